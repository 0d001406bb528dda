//! Mutual TLS between the router of a cluster and the drivers of its nodes, and between these. Each side's certificate says in a
//! URI what it is: `spiffe://CLUSTER/deltapath/router`, or `spiffe://CLUSTER/deltapath/node/KEY` with the key of the data
//! directory. Both sides check that the other's is signed by the CA of their own file, is of their own cluster, and has a role.
//! What a role may ask is for the server to look at ([`Identity::of`]). Names and addresses are not looked at: nodes come and
//! go, and their addresses with them.
//!
//! The files are read again when they change. Connections that are open continue. No session is resumed, since that would skip
//! the check of the client's certificate.

use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use arc_swap::ArcSwapOption;
use hyper_util::rt::TokioIo;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::client::{Resumption, verify_server_cert_signed_by_trust_anchor};
use rustls::crypto::{CryptoProvider, ring, verify_tls13_signature};
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName, UnixTime};
use rustls::server::danger::{ClientCertVerified, ClientCertVerifier};
use rustls::server::{NoServerSessionStorage, ParsedCertificate, WebPkiClientVerifier};
use rustls::{
    CertificateError, ClientConfig, DigitallySignedStruct, DistinguishedName, OtherError, RootCertStore,
    ServerConfig, SignatureScheme,
};

use proto::answers::Checked;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;
use tonic::transport::{Endpoint, Uri};

use crate::certificate::{self, Pair, Pem, Tried, Validity};
use crate::identity::{Identity, Role};
use crate::ticket::{Signer, TicketVerifier};

/// How often the files are looked at.
const FILES_EVERY: Duration = Duration::from_secs(2);
/// The largest frame that a node may send, in bytes. Each frame wakes its reader: at HTTP/2's 16 KiB that costs more than the
/// bytes do.
const FRAME: u32 = 256 << 10;

/// Why files cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// They cannot be read, or hold something else.
    #[error(transparent)]
    Certificate(#[from] certificate::Error),
    /// The certificate is for somebody else.
    #[error(
        "the certificate in {} must have the URI SAN spiffe://CLUSTER/deltapath/{wanted}, and no other of deltapath; it has {found}",
        path.display()
    )]
    Role {
        /// The file.
        path: PathBuf,
        /// `router`, or `node/KEY`.
        wanted: String,
        /// What it is for.
        found: String,
    },
    /// What TLS makes of them.
    #[error("certificate, key and CA cannot be used together")]
    Tls(#[source] rustls::Error),
}

/// The files that say who we are and whom we believe, in PEM.
#[derive(Clone, Debug)]
pub struct Files {
    /// Certificate chain.
    pub certificate: PathBuf,
    /// Its key.
    pub key: PathBuf,
    /// The CAs that sign the other side's certificates.
    pub authorities: PathBuf,
}

/// TLS as the files say it.
#[derive(Debug)]
pub struct Mutual {
    files: Files,
    tried: Tried,
    own: Role,
    loaded: ArcSwapOption<Loaded>,
}

/// What the files hold.
#[derive(Debug)]
struct Loaded {
    client: Arc<ClientConfig>,
    validity: Validity,
    /// Of a node.
    server: Option<(Arc<ServerConfig>, Arc<TicketVerifier>)>,
    /// Of the router.
    signer: Option<Arc<Signer>>,
}

impl Mutual {
    /// Nothing is loaded yet. `own` is what our certificate must be for.
    pub fn new(files: Files, own: Role) -> Arc<Self> {
        Arc::new(Mutual { files, tried: Tried::default(), own, loaded: ArcSwapOption::empty() })
    }

    /// Uses what the files hold now. On an error what was loaded before stays.
    pub fn load(&self) -> Result<(), Error> {
        let Files { certificate, key, authorities } = &self.files;
        let files = [certificate.as_path(), key, authorities];
        let read = self.tried.read(files)?;
        let names = files.map(|file| file.display().to_string());
        let [chain, key, authorities] =
            [0, 1, 2].map(|which| Pem { what: &names[which], text: &read[which] });
        let Pair { pair, key, validity } = chain.with_key(key)?;
        let chain = pair.cert;
        let own = chain.first().and_then(Identity::of);
        let identity = match own {
            Some(identity) if identity.role == self.own => identity,
            other => {
                return Err(Error::Role {
                    path: certificate.clone(),
                    wanted: match &self.own {
                        Role::Router => "router".to_owned(),
                        Role::Node(key) => format!("node/{key}"),
                    },
                    found: other.map_or_else(|| "none".to_owned(), |other| other.to_string()),
                });
            }
        };
        let mut roots = RootCertStore::empty();
        for authority in authorities.certificates()? {
            roots.add(authority).map_err(Error::Tls)?;
        }
        let roots = Arc::new(roots);
        let provider = Arc::new(ring::default_provider());
        let (cluster, copy) = (identity.cluster, key.clone_key());
        let client = client(provider.clone(), roots.clone(), cluster.clone(), chain.clone(), copy);
        let client = Arc::new(client.map_err(Error::Tls)?);
        let mut loaded = Loaded { client, validity, server: None, signer: None };
        match self.own {
            Role::Node(_) => {
                let signed = WebPkiClientVerifier::builder_with_provider(roots, provider.clone())
                    .build()
                    .map_err(|error| Error::Tls(rustls::Error::General(error.to_string())))?;
                let judge = TicketVerifier::new(signed.clone(), provider.clone(), &cluster);
                let config = server(provider, signed, cluster, chain, key).map_err(Error::Tls)?;
                loaded.server = Some((Arc::new(config), Arc::new(judge)));
            }
            Role::Router => {
                let key = provider.key_provider.load_private_key(key).map_err(Error::Tls)?;
                loaded.signer = Some(Arc::new(Signer::new(key, chain)));
            }
        }
        self.loaded.store(Some(Arc::new(loaded)));
        Ok(())
    }

    /// Loads the files again whenever they change, keeps the metric `gauge` at the end of our certificate, and writes to the log
    /// when it has ended; for ever.
    pub async fn follow(self: Arc<Self>, gauge: &'static str) {
        let Files { certificate, key, authorities } = &self.files;
        let validity = || self.loaded.load().as_ref().map(|loaded| loaded.validity);
        tokio::join!(
            self.tried.follow([certificate, key, authorities], FILES_EVERY, || self.load()),
            certificate::tell_end(gauge, validity)
        );
    }

    /// Why the other side would not accept our certificate, if that is so.
    pub fn missing(&self) -> Option<&'static str> {
        match &*self.loaded.load() {
            None => Some("it has no certificate yet"),
            Some(loaded) => loaded.validity.missing(),
        }
    }

    /// For the side that is called, as soon as something is loaded.
    pub fn server(&self) -> Option<Arc<ServerConfig>> {
        self.loaded.load().as_ref()?.server.as_ref().map(|(server, _)| server.clone())
    }

    /// For the side that calls, as soon as something is loaded.
    pub fn client(&self) -> Option<Arc<ClientConfig>> {
        self.loaded.load().as_ref().map(|loaded| loaded.client.clone())
    }

    /// Signs the router's tickets, as soon as something is loaded.
    pub fn signer(&self) -> Option<Arc<Signer>> {
        self.loaded.load().as_ref()?.signer.clone()
    }

    /// Judges them on a node, as soon as something is loaded.
    pub fn judge(&self) -> Option<Arc<TicketVerifier>> {
        self.loaded.load().as_ref()?.server.as_ref().map(|(_, judge)| judge.clone())
    }

    /// A channel to the node with this key, which connects when it is used. A connection takes no longer than `patience`, and
    /// ends when the node is silent for twice as long.
    pub fn channel(self: &Arc<Self>, address: &str, key: &str, patience: Duration, window: u32) -> Checked {
        let (tls, address, key) = (self.clone(), address.to_owned(), key.to_owned());
        let connect = tower::service_fn(move |_: Uri| {
            let (tls, address, key) = (tls.clone(), address.clone(), key.clone());
            async move {
                let connecting = tokio::time::timeout(patience, tls.connect(&address)).await;
                let late = || io::Error::new(io::ErrorKind::TimedOut, format!("{address} does not answer"));
                match connecting.map_err(|_| late())?? {
                    (stream, found) if found == key => Ok(TokioIo::new(stream)),
                    (_, found) => {
                        let why = format!("at {address} is data directory {found}, and {key} is expected");
                        Err(io::Error::other(why))
                    }
                }
            }
        });
        let channel = Endpoint::from_static("http://node")
            .initial_stream_window_size(window)
            .initial_connection_window_size(window)
            .max_frame_size(FRAME)
            .http2_keep_alive_interval(patience)
            .keep_alive_timeout(patience)
            .connect_with_connector_lazy(connect);
        Checked(channel)
    }

    /// Connects to a node. The key of its data directory, which its certificate names, is for the caller to look at.
    pub async fn connect(&self, address: &str) -> io::Result<(TlsStream<TcpStream>, String)> {
        self.greet(self.dial(address).await?, address).await
    }

    fn certified(&self) -> io::Result<Arc<ClientConfig>> {
        self.client().ok_or_else(|| {
            io::Error::other("this side has no certificate yet: its files are missing or not valid")
        })
    }

    /// The first half of it: something accepts.
    pub async fn dial(&self, address: &str) -> io::Result<TcpStream> {
        self.certified()?;
        let stream = TcpStream::connect(address)
            .await
            .map_err(|error| io::Error::new(error.kind(), format!("connect to {address}: {error}")))?;
        stream.set_nodelay(true)?;
        Ok(stream)
    }

    /// The second half: it is a node.
    pub async fn greet<S: AsyncRead + AsyncWrite + Unpin>(
        &self,
        stream: S,
        address: &str,
    ) -> io::Result<(TlsStream<S>, String)> {
        // Who the node is stands in its certificate, and not in its name.
        let name = ServerName::try_from("node").map_err(io::Error::other)?;
        let stream = TlsConnector::from(self.certified()?)
            .connect(name, stream)
            .await
            .map_err(|error| io::Error::new(error.kind(), format!("TLS with {address}: {error}")))?;
        let shown = stream.get_ref().1.peer_certificates().and_then(|chain| chain.first());
        match shown.and_then(Identity::of).map(|identity| identity.role) {
            Some(Role::Node(key)) => Ok((stream, key)),
            _ => Err(io::Error::other(format!("the certificate at {address} names no data directory"))),
        }
    }
}

fn server(
    provider: Arc<CryptoProvider>,
    signed: Arc<dyn ClientCertVerifier>,
    cluster: String,
    chain: Vec<CertificateDer<'static>>,
    key: PrivateKeyDer<'static>,
) -> Result<ServerConfig, rustls::Error> {
    let mut config = ServerConfig::builder_with_provider(provider)
        .with_protocol_versions(&[&rustls::version::TLS13])?
        .with_client_cert_verifier(Arc::new(ClusterOnly { signed, cluster }))
        .with_single_cert(chain, key)?;
    config.alpn_protocols = vec![b"h2".to_vec()];
    config.session_storage = Arc::new(NoServerSessionStorage {});
    config.send_tls13_tickets = 0;
    Ok(config)
}

fn client(
    provider: Arc<CryptoProvider>,
    roots: Arc<RootCertStore>,
    cluster: String,
    chain: Vec<CertificateDer<'static>>,
    key: PrivateKeyDer<'static>,
) -> Result<ClientConfig, rustls::Error> {
    let verifier = NodeOnly { roots, cluster, provider: provider.clone() };
    let mut config = ClientConfig::builder_with_provider(provider)
        .with_protocol_versions(&[&rustls::version::TLS13])?
        .dangerous()
        .with_custom_certificate_verifier(Arc::new(verifier))
        .with_client_auth_cert(chain, key)?;
    config.alpn_protocols = vec![b"h2".to_vec()];
    config.resumption = Resumption::disabled();
    Ok(config)
}

/// The peer's certificate is sound, and for somebody who has no business here.
fn refused(wanted: &str, found: Option<Identity>) -> rustls::Error {
    let found = found.map_or_else(|| "no part of deltapath".to_owned(), |found| found.to_string());
    let why = format!("the certificate is for {found}, and {wanted} is expected");
    CertificateError::Other(OtherError(Arc::new(std::io::Error::other(why)))).into()
}

/// Lets in clients whose certificate is the router's or a node's.
#[derive(Debug)]
struct ClusterOnly {
    signed: Arc<dyn ClientCertVerifier>,
    cluster: String,
}

impl ClientCertVerifier for ClusterOnly {
    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        self.signed.root_hint_subjects()
    }

    fn verify_client_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        now: UnixTime,
    ) -> Result<ClientCertVerified, rustls::Error> {
        let verified = self.signed.verify_client_cert(end_entity, intermediates, now)?;
        match Identity::of(end_entity) {
            Some(Identity { cluster, .. }) if cluster == self.cluster => Ok(verified),
            found => Err(refused(&format!("the router or a node of {}", self.cluster), found)),
        }
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        self.signed.verify_tls12_signature(message, certificate, signature)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        self.signed.verify_tls13_signature(message, certificate, signature)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.signed.supported_verify_schemes()
    }
}

/// Talks to servers whose certificate is a node's. Which node's is for the caller to look at, when the handshake is done.
#[derive(Debug)]
struct NodeOnly {
    roots: Arc<RootCertStore>,
    cluster: String,
    provider: Arc<CryptoProvider>,
}

impl ServerCertVerifier for NodeOnly {
    fn verify_server_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        _: &ServerName<'_>,
        _: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        let certificate = ParsedCertificate::try_from(end_entity)?;
        let algorithms = self.provider.signature_verification_algorithms.all;
        verify_server_cert_signed_by_trust_anchor(&certificate, &self.roots, intermediates, now, algorithms)?;
        match Identity::of(end_entity) {
            Some(Identity { cluster, role: Role::Node(_) }) if cluster == self.cluster => {
                Ok(ServerCertVerified::assertion())
            }
            found => Err(refused(&format!("a node of {}", self.cluster), found)),
        }
    }

    fn verify_tls12_signature(
        &self,
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        Err(rustls::Error::General("TLS 1.3 is required".to_owned()))
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        verify_tls13_signature(
            message,
            certificate,
            signature,
            &self.provider.signature_verification_algorithms,
        )
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.provider.signature_verification_algorithms.supported_schemes()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_that_cannot_be_used_are_named() {
        let dir = tempfile::tempdir().expect("temp dir");
        let [certificate, key, authorities] =
            ["tls.crt", "tls.key", "ca.crt"].map(|name| dir.path().join(name));
        let files =
            Files { certificate: certificate.clone(), key: key.clone(), authorities: authorities.clone() };
        let pair = rcgen::KeyPair::generate().expect("a key");
        let mut params = rcgen::CertificateParams::new(Vec::new()).expect("params");
        let role = "spiffe://cluster/deltapath/router".try_into().expect("ASCII");
        params.subject_alt_names.push(rcgen::SanType::URI(role));
        let chain = params.self_signed(&pair).expect("a certificate").pem();
        let (own, other) = (pair.serialize_pem(), rcgen::KeyPair::generate().expect("a key").serialize_pem());
        for (in_certificate, in_key, in_authorities, said) in [
            ("", own.as_str(), chain.as_str(), "tls.crt holds no certificate in PEM"),
            ("root:x:0:0", &own, &chain, "tls.crt holds no certificate in PEM"),
            (&chain, "root:x:0:0", &chain, "tls.key holds no private key in PEM"),
            (&chain, &own, "root:x:0:0", "ca.crt holds no certificate in PEM"),
            (&chain, &other, &chain, "tls.key is not the key of the certificate in"),
            (&chain, &own, &chain, ""),
        ] {
            for (file, text) in
                [(&certificate, in_certificate), (&key, in_key), (&authorities, in_authorities)]
            {
                std::fs::write(file, text).expect("write");
            }
            match Mutual::new(files.clone(), Role::Router).load() {
                Ok(()) => assert_eq!(said, ""),
                Err(error) => {
                    assert!(!said.is_empty() && error.to_string().contains(said), "{said}: {error}")
                }
            }
        }
    }
}
