//! Who asks, as kube-apiserver says it: in headers, on a connection whose client certificate shows that it is kube-apiserver.
//! The CA and the headers' names stand in the ConfigMap that each cluster has for that.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use arc_swap::ArcSwapOption;
use axum::http::HeaderMap;
use k8s_openapi::api::authentication::v1::UserInfo;
use k8s_openapi::api::core::v1::ConfigMap;
use kube::{Api, Client};
use percent_encoding::percent_decode_str;
use rustls::client::danger::HandshakeSignatureValid;
use rustls::crypto::{CryptoProvider, verify_tls12_signature, verify_tls13_signature};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, UnixTime};
use rustls::server::WebPkiClientVerifier;
use rustls::server::danger::{ClientCertVerified, ClientCertVerifier};
use rustls::{DigitallySignedStruct, DistinguishedName, RootCertStore, SignatureScheme};
use serve::questions::ask;
use x509_parser::parse_x509_certificate;

use crate::server::METRICS;

/// Where a cluster says it.
const PLACE: (&str, &str) = ("kube-system", "extension-apiserver-authentication");
/// How often that is read again, and how soon where it could not be.
const EVERY: Duration = Duration::from_secs(30);
const SOON: Duration = Duration::from_secs(1);

/// What the ConfigMap says, as it was last read.
#[derive(Default)]
pub struct FrontProxy(ArcSwapOption<Trust>);

/// Whom to believe, and which headers.
struct Trust {
    verifier: Arc<dyn ClientCertVerifier>,
    /// Common names; empty: any.
    names: Vec<String>,
    user: Vec<String>,
    uid: Vec<String>,
    groups: Vec<String>,
    extra: Vec<String>,
}

impl FrontProxy {
    pub async fn follow(self: Arc<Self>, client: Client) {
        let maps: Api<ConfigMap> = Api::namespaced(client, PLACE.0);
        let mut read = None;
        loop {
            let wait = match ask(METRICS.seconds, "ConfigMap", maps.get(PLACE.1)).await {
                Ok(map) => {
                    let data = map.data.unwrap_or_default();
                    if read.as_ref() != Some(&data) {
                        match Trust::of(&data) {
                            Ok(trust) => {
                                self.0.store(Some(Arc::new(trust)));
                                tracing::info!("the front proxy's CA and headers are read");
                            }
                            Err(error) => {
                                tracing::warn!(error, "ConfigMap {}/{} is not used", PLACE.0, PLACE.1);
                            }
                        }
                        read = Some(data);
                    }
                    EVERY
                }
                Err(error) => {
                    tracing::warn!(%error, "read ConfigMap {}/{}", PLACE.0, PLACE.1);
                    SOON
                }
            };
            tokio::time::sleep(wait).await;
        }
    }

    pub fn is_known(&self) -> bool {
        self.0.load().is_some()
    }

    /// The user that the headers name, where the certificates are those of kube-apiserver.
    pub fn user(&self, certificates: &[CertificateDer<'_>], headers: &HeaderMap) -> Option<UserInfo> {
        let trust = self.0.load_full()?;
        trust.vouches(certificates).then(|| trust.user(headers)).flatten()
    }
}

impl Trust {
    fn of(data: &BTreeMap<String, String>) -> Result<Self, String> {
        let list = |key: &str| match data.get(key).map(String::as_str) {
            None | Some("") => Ok(Vec::new()),
            Some(text) => {
                serde_json::from_str::<Vec<String>>(text).map_err(|error| format!("{key}: {error}"))
            }
        };
        let key = "requestheader-client-ca-file";
        let pem = data.get(key).ok_or_else(|| {
            format!("there is no {key}: kube-apiserver runs without --requestheader-client-ca-file")
        })?;
        let mut roots = RootCertStore::empty();
        for certificate in CertificateDer::pem_slice_iter(pem.as_bytes()) {
            let certificate = certificate.map_err(|error| format!("{key}: {error}"))?;
            roots.add(certificate).map_err(|error| format!("{key}: {error}"))?;
        }
        let verifier = WebPkiClientVerifier::builder_with_provider(Arc::new(roots), provider());
        let trust = Trust {
            verifier: verifier.build().map_err(|error| format!("{key}: {error}"))?,
            names: list("requestheader-allowed-names")?,
            user: list("requestheader-username-headers")?,
            uid: list("requestheader-uid-headers")?,
            groups: list("requestheader-group-headers")?,
            extra: list("requestheader-extra-headers-prefix")?,
        };
        match trust.user.is_empty() {
            true => Err("requestheader-username-headers names no header".into()),
            false => Ok(trust),
        }
    }

    /// Whether the first of the certificates is one of kube-apiserver's.
    fn vouches(&self, certificates: &[CertificateDer<'_>]) -> bool {
        let Some((own, chain)) = certificates.split_first() else { return false };
        if let Err(error) = self.verifier.verify_client_cert(own, chain, UnixTime::now()) {
            tracing::debug!(%error, "a client's certificate is not by the front proxy's CA");
            return false;
        }
        if self.names.is_empty() {
            return true;
        }
        let Ok((_, parsed)) = parse_x509_certificate(own) else { return false };
        let mut names = parsed.subject().iter_common_name().filter_map(|name| name.as_str().ok());
        names.next().is_some_and(|name| self.names.iter().any(|allowed| allowed == name))
    }

    fn user(&self, headers: &HeaderMap) -> Option<UserInfo> {
        let text = |names: &[String]| {
            let mut values = names.iter().filter_map(|name| headers.get(name)?.to_str().ok());
            values.find(|value| !value.is_empty()).map(str::to_owned)
        };
        let all = self.groups.iter().flat_map(|name| headers.get_all(name));
        let groups: Vec<_> = all.filter_map(|value| value.to_str().ok()).map(str::to_owned).collect();
        let mut extra: BTreeMap<String, Vec<String>> = BTreeMap::new();
        for (name, value) in headers {
            let key = self.extra.iter().find_map(|prefix| {
                name.as_str().strip_prefix(&prefix.to_ascii_lowercase()).filter(|key| !key.is_empty())
            });
            if let (Some(key), Ok(value)) = (key, value.to_str()) {
                // What cannot be decoded stays as it is.
                let key = percent_decode_str(key).decode_utf8().map_or(key.to_owned(), Cow::into_owned);
                extra.entry(key).or_default().push(value.to_owned());
            }
        }
        Some(UserInfo {
            username: Some(text(&self.user)?),
            uid: text(&self.uid),
            groups: Some(groups),
            extra: Some(extra),
        })
    }
}

fn provider() -> Arc<CryptoProvider> {
    Arc::new(rustls::crypto::ring::default_provider())
}

/// Asks each client for a certificate and takes any in the handshake, if the client has its key. Whose it is, is judged with
/// each request ([`FrontProxy::user`]): so a client without a good one hears 401 instead of a broken handshake, and a CA
/// that changes counts for open connections too.
#[derive(Debug)]
pub struct AnyClient(Arc<CryptoProvider>);

impl AnyClient {
    pub fn new() -> Self {
        AnyClient(provider())
    }
}

impl ClientCertVerifier for AnyClient {
    fn client_auth_mandatory(&self) -> bool {
        false
    }

    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        &[]
    }

    fn verify_client_cert(
        &self,
        _: &CertificateDer<'_>,
        _: &[CertificateDer<'_>],
        _: UnixTime,
    ) -> Result<ClientCertVerified, rustls::Error> {
        Ok(ClientCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        verify_tls12_signature(message, certificate, signed, &self.0.signature_verification_algorithms)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        verify_tls13_signature(message, certificate, signed, &self.0.signature_verification_algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.0.signature_verification_algorithms.supported_schemes()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use axum::http::{HeaderName, HeaderValue};
    use rcgen::{BasicConstraints, CertificateParams, DnType, IsCa, Issuer, KeyPair};

    /// A CA in PEM, and what signs with it.
    fn authority() -> (String, Issuer<'static, KeyPair>) {
        let mut params = CertificateParams::new(Vec::new()).expect("params");
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let key = KeyPair::generate().expect("a key");
        (params.self_signed(&key).expect("a CA").pem(), Issuer::new(params, key))
    }

    fn client(issuer: &Issuer<'static, KeyPair>, name: &str) -> CertificateDer<'static> {
        let mut params = CertificateParams::new(Vec::new()).expect("params");
        params.distinguished_name.push(DnType::CommonName, name);
        let key = KeyPair::generate().expect("a key");
        params.signed_by(&key, issuer).expect("a certificate").der().clone()
    }

    fn map(ca: &str, names: &str) -> BTreeMap<String, String> {
        [
            ("requestheader-client-ca-file", ca),
            ("requestheader-allowed-names", names),
            ("requestheader-username-headers", "[\"X-Remote-User\"]"),
            ("requestheader-group-headers", "[\"X-Remote-Group\"]"),
            ("requestheader-extra-headers-prefix", "[\"X-Remote-Extra-\"]"),
        ]
        .map(|(key, value)| (key.to_owned(), value.to_owned()))
        .into()
    }

    #[test]
    fn an_empty_list_of_names_is_any_name_by_the_ca() {
        let (ca, issuer) = authority();
        let (_, other) = authority();
        let any = Trust::of(&map(&ca, "[]")).expect("trust");
        assert!(any.vouches(&[client(&issuer, "someone")]));
        assert!(!any.vouches(&[client(&other, "someone")]), "another CA");
    }

    #[test]
    fn users_are_read_from_the_headers() {
        let trust = Trust::of(&map(&authority().0, "")).expect("trust");
        let header =
            |name: &'static str, value| (HeaderName::from_static(name), HeaderValue::from_static(value));
        let headers: HeaderMap = HeaderMap::from_iter([header("x-remote-user", "jane")]);
        let mut headers = headers;
        for (name, value) in [
            header("x-remote-group", "a"),
            header("x-remote-group", "b"),
            header("x-remote-extra-example.org%2fscopes", "one"),
            header("x-other", "c"),
        ] {
            headers.append(name, value);
        }
        let user = trust.user(&headers).expect("a user");
        assert_eq!(user.username.as_deref(), Some("jane"));
        assert_eq!(user.groups, Some(vec!["a".into(), "b".into()]));
        assert_eq!(user.extra, Some([("example.org/scopes".into(), vec!["one".into()])].into()));
        headers.remove("x-remote-user");
        assert!(trust.user(&headers).is_none(), "nobody");
    }

    #[test]
    fn a_config_map_that_cannot_be_used_is_refused() {
        let ca = authority().0;
        for (key, value) in [
            ("requestheader-client-ca-file", ""),
            ("requestheader-username-headers", "[]"),
            ("requestheader-allowed-names", "proxy"),
        ] {
            let mut map = map(&ca, "[]");
            map.insert(key.into(), value.into());
            assert!(Trust::of(&map).is_err(), "{key} {value:?}");
        }
        assert!(
            Trust::of(&BTreeMap::new()).is_err_and(|error| error.contains("requestheader-client-ca-file"))
        );
    }
}
