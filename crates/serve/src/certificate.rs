//! The certificate that a server shows. It can be replaced at any time: connections that come later see the new one, and
//! those that are open continue.

use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, SystemTime};

use arc_swap::ArcSwapOption;
use parking_lot::Mutex;
use rustls::ServerConfig;
use rustls::crypto::ring;
use rustls::pki_types::pem::{self, PemObject};
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::server::danger::ClientCertVerifier;
use rustls::server::{ClientHello, NoClientAuth, ResolvesServerCert};
use rustls::sign::CertifiedKey;
use x509_parser::time::ASN1Time;

/// Why a certificate cannot be shown.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A file cannot be read.
    #[error("read {}", .0.display())]
    Read(PathBuf, #[source] std::io::Error),
    /// No certificate, or no key, in PEM.
    #[error("{what} holds no {wanted} in PEM")]
    Pem {
        /// The file, or where else it comes from.
        what: String,
        /// `certificate` or `private key`.
        wanted: &'static str,
        /// What the parser says.
        source: pem::Error,
    },
    /// There are bytes in the PEM that are not a certificate.
    #[error("{what} holds no certificate of X.509: {why}")]
    Validity {
        /// The file, or where else it comes from.
        what: String,
        /// What the parser says.
        why: String,
    },
    /// The two do not belong together, or the key is of a kind that TLS does not know.
    #[error("{key} is not the key of the certificate in {chain}, or of a kind that TLS does not know")]
    Mismatch {
        /// Where the certificate comes from.
        chain: String,
        /// Where the key comes from.
        key: String,
        /// What TLS says.
        source: rustls::Error,
    },
}

/// A PEM, and where it comes from.
#[derive(Clone, Copy, Debug)]
pub struct Pem<'p> {
    /// The file, or what else it is.
    pub what: &'p str,
    /// The text.
    pub text: &'p [u8],
}

impl Pem<'_> {
    fn lacks(&self, wanted: &'static str) -> impl Fn(pem::Error) -> Error {
        let what = self.what.to_owned();
        move |source| Error::Pem { what: what.clone(), wanted, source }
    }

    /// All certificates in it, of which there is at least one.
    pub(crate) fn certificates(&self) -> Result<Vec<CertificateDer<'static>>, Error> {
        let found = CertificateDer::pem_slice_iter(self.text).collect::<Result<Vec<_>, _>>();
        let some = found.and_then(|all| if all.is_empty() { Err(pem::Error::NoItemsFound) } else { Ok(all) });
        some.map_err(self.lacks("certificate"))
    }

    /// This chain with the key in the other one.
    pub(crate) fn with_key(&self, key: Pem<'_>) -> Result<Pair, Error> {
        let chain = self.certificates()?;
        let validity = Validity::of(self.what, &chain)?;
        let key_der = PrivateKeyDer::from_pem_slice(key.text).map_err(key.lacks("private key"))?;
        let pair = CertifiedKey::from_der(chain, key_der.clone_key(), &ring::default_provider());
        let pair = pair.map_err(|source| Error::Mismatch {
            chain: self.what.to_owned(),
            key: key.what.to_owned(),
            source,
        })?;
        Ok(Pair { pair, key: key_der, validity })
    }
}

/// A certificate with its key.
pub(crate) struct Pair {
    pub(crate) pair: CertifiedKey,
    pub(crate) key: PrivateKeyDer<'static>,
    pub(crate) validity: Validity,
}

impl Error {
    /// Whether a file is not there.
    pub fn is_not_found(&self) -> bool {
        matches!(self, Error::Read(_, error) if error.kind() == std::io::ErrorKind::NotFound)
    }
}

/// When a chain is valid: from the latest beginning of its certificates to the earliest end, as UNIX time.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Validity {
    begins: i64,
    ends: i64,
}

impl Validity {
    fn of(what: &str, chain: &[CertificateDer<'_>]) -> Result<Self, Error> {
        let mut all = Validity { begins: i64::MIN, ends: i64::MAX };
        for certificate in chain {
            let parsed = x509_parser::parse_x509_certificate(certificate);
            let (_, parsed) =
                parsed.map_err(|error| Error::Validity { what: what.to_owned(), why: error.to_string() })?;
            all.begins = all.begins.max(parsed.validity().not_before.timestamp());
            all.ends = all.ends.min(parsed.validity().not_after.timestamp());
        }
        Ok(all)
    }

    /// Why clients refuse it now.
    pub(crate) fn missing(&self) -> Option<&'static str> {
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
        let now = now.map_or(0, |now| now.as_secs() as i64);
        match () {
            () if now >= self.ends => Some("its certificate has ended: replace it"),
            () if now < self.begins => Some("its certificate is not valid yet: look at the clock"),
            () => None,
        }
    }
}

/// Keeps `gauge` at the end of what is shown, and writes to the log when it is not, or no longer, valid; for ever.
pub(crate) async fn tell_end(gauge: &'static str, shown: impl Fn() -> Option<Validity>) {
    metrics::describe_gauge!(gauge, "When the certificate ends, as UNIX time.");
    let mut told = None;
    loop {
        let validity = shown();
        if let Some(validity) = validity {
            metrics::gauge!(gauge).set(validity.ends as f64);
        }
        let missing = validity.and_then(|validity| validity.missing());
        if let (Some(why), true) = (missing, missing != told) {
            let time =
                |seconds| ASN1Time::from_timestamp(seconds).map_or_else(|_| String::new(), |t| t.to_string());
            let Validity { begins, ends } = validity.unwrap_or(Validity { begins: 0, ends: 0 });
            tracing::error!(why, begins = time(begins), ends = time(ends), "clients refuse the certificate");
        }
        told = missing;
        tokio::time::sleep(Duration::from_secs(1)).await;
    }
}

/// The certificate in use; none at first, so that handshakes fail until there is one.
#[derive(Debug, Default)]
pub struct Certificate {
    shown: ArcSwapOption<Shown>,
    /// The metric of its end, once there is one.
    gauge: OnceLock<&'static str>,
    tried: Tried,
}

#[derive(Debug)]
struct Shown {
    pair: Arc<CertifiedKey>,
    validity: Validity,
}

impl Certificate {
    /// Shows this one from now on: a chain and its key. On an error the one before stays.
    pub fn replace(&self, chain: Pem<'_>, key: Pem<'_>) -> Result<(), Error> {
        let Pair { pair, validity, .. } = chain.with_key(key)?;
        if let Some(gauge) = self.gauge.get() {
            metrics::gauge!(*gauge).set(validity.ends as f64);
        }
        self.shown.store(Some(Arc::new(Shown { pair: Arc::new(pair), validity })));
        Ok(())
    }

    /// Shows the one in these files from now on.
    pub fn load(&self, chain: &Path, key: &Path) -> Result<(), Error> {
        let read = self.tried.read([chain, key])?;
        let names = [chain, key].map(|file| file.display().to_string());
        let [chain, key] = [0, 1].map(|which| Pem { what: &names[which], text: &read[which] });
        self.replace(chain, key)
    }

    /// Why clients would not accept what is shown, if that is so.
    pub fn missing(&self) -> Option<&'static str> {
        match &*self.shown.load() {
            None => Some("it has no certificate yet"),
            Some(shown) => shown.validity.missing(),
        }
    }

    /// Keeps the metric of this name at the certificate's end, and writes to the log when it has ended; for ever.
    pub async fn tell_end(self: Arc<Self>, gauge: &'static str) {
        let _ = self.gauge.set(gauge);
        tell_end(gauge, || self.shown.load().as_ref().map(|shown| shown.validity)).await;
    }

    /// Loads the files again whenever they change.
    pub async fn follow(self: Arc<Self>, chain: PathBuf, key: PathBuf, every: Duration) {
        self.tried.follow([&chain, &key], every, || self.load(&chain, &key)).await;
    }

    /// TLS 1.2 and 1.3 for HTTP/2, with this certificate and without certificates of clients.
    pub fn server_config(self: Arc<Self>) -> Arc<ServerConfig> {
        self.server_config_for(Arc::new(NoClientAuth))
    }

    /// The same, with certificates of clients where this verifier asks for them.
    pub fn server_config_for(self: Arc<Self>, clients: Arc<dyn ClientCertVerifier>) -> Arc<ServerConfig> {
        let provider = Arc::new(ring::default_provider());
        let builder = ServerConfig::builder_with_provider(provider);
        let builder =
            builder.with_safe_default_protocol_versions().expect("ring has suites for both versions");
        let mut config = builder.with_client_cert_verifier(clients).with_cert_resolver(self);
        config.alpn_protocols = vec![b"h2".to_vec()];
        Arc::new(config)
    }
}

impl ResolvesServerCert for Certificate {
    fn resolve(&self, _: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        self.shown.load().as_ref().map(|shown| shown.pair.clone())
    }
}

/// What files held when they were last loaded, with success or not; none where one of them could not be read. It begins
/// before the first look at them: what is written between a load and that look is loaded too.
#[derive(Debug, Default)]
pub(crate) struct Tried(Mutex<Option<Vec<Vec<u8>>>>);

impl Tried {
    /// What the files hold now, for the one who loads them.
    pub(crate) fn read<const N: usize>(&self, files: [&Path; N]) -> Result<[Vec<u8>; N], Error> {
        *self.0.lock() = None;
        let mut contents = [const { Vec::new() }; N];
        for (content, file) in contents.iter_mut().zip(files) {
            *content = std::fs::read(file).map_err(|error| Error::Read(file.to_owned(), error))?;
        }
        *self.0.lock() = Some(contents.to_vec());
        Ok(contents)
    }

    /// Calls `load`, which calls [`Tried::read`], whenever the files hold something else than was tried, for ever. What does
    /// not fit together, since one of the files is not replaced yet, is tried again with the next change; what was loaded
    /// before is used meanwhile.
    pub(crate) async fn follow<const N: usize, E: std::error::Error + 'static>(
        &self,
        files: [&Path; N],
        every: Duration,
        load: impl Fn() -> Result<(), E>,
    ) {
        let chain = files.first().map(|file| file.display().to_string());
        loop {
            tokio::time::sleep(every).await;
            let now = files.iter().map(|file| std::fs::read(file).ok()).collect::<Option<Vec<_>>>();
            if now == *self.0.lock() {
                continue;
            }
            match load() {
                Ok(()) => tracing::info!(chain, "the new certificate is in use"),
                Err(error) => tracing::warn!(
                    chain,
                    error = &error as &dyn std::error::Error,
                    "a new certificate is not used"
                ),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A driver is waited for until it answers, and then given the certificate that names its key. Where its task that looks
    /// at the files came a moment late, it took what it saw first for what it had loaded, and had no certificate until it was
    /// started again.
    #[tokio::test]
    async fn files_that_are_written_before_the_first_look_are_loaded() {
        let dir = tempfile::tempdir().expect("temp dir");
        let (chain, key) = (dir.path().join("tls.crt"), dir.path().join("tls.key"));
        let certificate = Arc::new(Certificate::default());
        assert!(certificate.load(&chain, &key).expect_err("no file").is_not_found());
        let made = rcgen::generate_simple_self_signed(["localhost".to_owned()]).expect("a certificate");
        std::fs::write(&key, made.signing_key.serialize_pem()).expect("write");
        std::fs::write(&chain, made.cert.pem()).expect("write");
        let every = Duration::from_millis(1);
        let following = tokio::spawn(certificate.clone().follow(chain, key, every));
        let loaded = async {
            while certificate.missing().is_some() {
                tokio::time::sleep(every).await;
            }
        };
        let loaded = tokio::time::timeout(Duration::from_secs(60), loaded).await;
        following.abort();
        loaded.expect("the certificate is loaded");
    }

    #[test]
    fn a_certificate_that_is_not_valid_now_is_missing() {
        let now = SystemTime::now();
        let day = Duration::from_secs(24 * 3600);
        for (begins, ends, expected) in [
            (now - day, now + day, None),
            (now - 2 * day, now - day, Some("its certificate has ended: replace it")),
            (now + day, now + 2 * day, Some("its certificate is not valid yet: look at the clock")),
        ] {
            let key = rcgen::KeyPair::generate().expect("a key");
            let mut params = rcgen::CertificateParams::new(["localhost".to_owned()]).expect("a name");
            let sound = params.self_signed(&key).expect("a certificate").pem();
            (params.not_before, params.not_after) = (begins.into(), ends.into());
            let made = params.self_signed(&key).expect("a certificate").pem();
            // Also where it is not the first one of the chain.
            for chain in [made.clone(), format!("{sound}{made}")] {
                let certificate = Certificate::default();
                assert_eq!(certificate.missing(), Some("it has no certificate yet"));
                let [chain, key] = [&chain, &key.serialize_pem()].map(|pem| pem.as_bytes().to_vec());
                let [chain, key] = [&chain, &key].map(|text| Pem { what: "a test", text });
                certificate.replace(chain, key).expect("it is shown");
                assert_eq!(certificate.missing(), expected);
            }
        }
    }
}
