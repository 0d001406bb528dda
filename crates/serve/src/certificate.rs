//! The certificate that a server shows. It can be replaced at any time: connections that come later see the new one, and
//! those that are open go on.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use arc_swap::ArcSwapOption;
use rustls::ServerConfig;
use rustls::crypto::ring;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::server::danger::ClientCertVerifier;
use rustls::server::{ClientHello, NoClientAuth, ResolvesServerCert};
use rustls::sign::CertifiedKey;

/// Why a certificate cannot be shown.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A file cannot be read.
    #[error("read {}", .0.display())]
    Read(PathBuf, #[source] std::io::Error),
    /// No certificate, or no key, in PEM.
    #[error("{what} is not PEM with a {wanted}")]
    Pem {
        /// The file, or where else it comes from.
        what: String,
        /// `certificate` or `private key`.
        wanted: &'static str,
        /// What the parser says.
        source: rustls::pki_types::pem::Error,
    },
    /// The two do not belong together, or the key is of a kind that TLS does not know.
    #[error("certificate and private key do not fit together")]
    Mismatch(#[source] rustls::Error),
}

impl Error {
    /// Whether a file is not there.
    pub fn is_not_found(&self) -> bool {
        matches!(self, Error::Read(_, error) if error.kind() == std::io::ErrorKind::NotFound)
    }
}

/// The certificate in use; none at first, so that handshakes fail until there is one.
#[derive(Debug, Default)]
pub struct Certificate(ArcSwapOption<CertifiedKey>);

impl Certificate {
    /// Shows this one from now on: a chain and its key, in PEM. On an error the one before stays.
    pub fn replace(&self, chain: &[u8], key: &[u8]) -> Result<(), Error> {
        let pem = |what: &str, wanted| {
            let what = what.to_owned();
            move |source| Error::Pem { what, wanted, source }
        };
        let chain: Vec<_> = CertificateDer::pem_slice_iter(chain)
            .collect::<Result<_, _>>()
            .map_err(pem("the certificate", "certificate"))?;
        let key = PrivateKeyDer::from_pem_slice(key).map_err(pem("the key", "private key"))?;
        let pair = CertifiedKey::from_der(chain, key, &ring::default_provider()).map_err(Error::Mismatch)?;
        self.0.store(Some(Arc::new(pair)));
        Ok(())
    }

    /// Shows the one in these files from now on.
    pub fn load(&self, chain: &Path, key: &Path) -> Result<(), Error> {
        self.replace(&read(chain)?, &read(key)?)
    }

    /// Whether there is one to show.
    pub fn is_there(&self) -> bool {
        self.0.load().is_some()
    }

    /// Loads the files again whenever they change.
    pub async fn follow(self: Arc<Self>, chain: PathBuf, key: PathBuf, every: Duration) {
        follow(&[&chain, &key], every, || self.load(&chain, &key)).await;
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
        self.0.load_full()
    }
}

/// Calls `load` whenever one of these files has changed, for ever. What does not fit together, since one of the files is not
/// replaced yet, is tried again with the next change; what was loaded before is used meanwhile.
pub(crate) async fn follow<E: std::error::Error + 'static>(
    files: &[&Path],
    every: Duration,
    load: impl Fn() -> Result<(), E>,
) {
    let contents = || files.iter().map(|file| std::fs::read(file).ok()).collect::<Option<Vec<_>>>();
    let mut shown = contents();
    let mut refused = None;
    loop {
        tokio::time::sleep(every).await;
        let now = contents();
        if now == shown || now == refused {
            continue;
        }
        let chain = files.first().map(|file| file.display().to_string());
        match load() {
            Ok(()) => {
                tracing::info!(chain, "the new certificate is in use");
                (shown, refused) = (now, None);
            }
            Err(error) => {
                tracing::warn!(
                    chain,
                    error = &error as &dyn std::error::Error,
                    "a new certificate is not used"
                );
                refused = now;
            }
        }
    }
}

pub(crate) fn read(path: &Path) -> Result<Vec<u8>, Error> {
    std::fs::read(path).map_err(|error| Error::Read(path.to_owned(), error))
}
