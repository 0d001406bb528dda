//! Connections of clients: each is served by itself, so that a fault can close one.

use std::convert::Infallible;
use std::fmt::Display;
use std::io;
use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use hyper::server::conn::http2;
use hyper::service::service_fn;
use hyper_util::rt::{TokioExecutor, TokioIo};
use rcgen::{BasicConstraints, CertificateParams, DnType, IsCa, Issuer, KeyPair};
use rustls::ServerConfig;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, pem::PemObject};
use serve::authority::Tolerant;
use serve::socket::{self, SocketFile};
use tokio::io::{AsyncRead, AsyncWrite, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream, UnixListener};
use tokio_rustls::TlsAcceptor;
use tokio_util::sync::CancellationToken;

use super::address::Address;
use super::catalog::Kind;
use super::proxy::Proxy;

/// Time for a TLS handshake.
const GREETING: Duration = Duration::from_secs(10);
const DAY: Duration = Duration::from_secs(24 * 3600);

/// A place that clients connect to.
pub(crate) struct Listener {
    accept: Accept,
    /// As clients write it, with the port that was given.
    pub address: Address,
}

enum Accept {
    Unix { listener: UnixListener, _file: SocketFile },
    Tcp(TcpListener, Option<Tls>),
}

trait Io: AsyncRead + AsyncWrite + Unpin + Send {}
impl<T: AsyncRead + AsyncWrite + Unpin + Send> Io for T {}

/// What a server over TLS shows.
#[derive(Clone)]
pub(crate) struct Tls {
    good: TlsAcceptor,
    /// What each of [`CERTIFICATES`] shows instead. None where the certificate is the user's own.
    bad: Option<[TlsAcceptor; 3]>,
}

/// Faults that show a certificate of their own.
pub(super) const CERTIFICATES: [Kind; 3] = [Kind::TlsExpired, Kind::TlsOtherHost, Kind::TlsOtherAuthority];

/// A host that no client connects to.
const OTHER_HOST: &str = "another-host.cbt-lab.invalid";

impl Tls {
    /// With a certificate chain and key in PEM files.
    pub fn of(chain: &Path, key: &Path) -> Result<Self, String> {
        let read =
            |path: &Path| std::fs::read(path).map_err(|error| format!("read {}: {error}", path.display()));
        Ok(Tls { good: acceptor(&read(chain)?, &read(key)?)?, bad: None })
    }

    /// With certificates of an authority that lives as long as this process, and its own certificate, in PEM.
    pub fn made(host: &str) -> Result<(Self, String), String> {
        let now = SystemTime::now();
        let authority = || -> Result<_, rcgen::Error> {
            let key = KeyPair::generate()?;
            let mut authority = CertificateParams::new(Vec::new())?;
            authority.distinguished_name.push(DnType::CommonName, "cbt-lab");
            authority.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
            authority.not_before = (now - 30 * DAY).into();
            authority.not_after = (now + 30 * DAY).into();
            let ca = authority.self_signed(&key)?.pem();
            Ok((ca, Issuer::new(authority, key)))
        };
        let leaf =
            |issuer: &Issuer<'_, KeyPair>, names: &[&str], ends: SystemTime| -> Result<_, rcgen::Error> {
                let key = KeyPair::generate()?;
                let mut leaf =
                    CertificateParams::new(names.iter().map(|name| (*name).to_owned()).collect::<Vec<_>>())?;
                leaf.not_before = (now - 20 * DAY).into();
                leaf.not_after = ends.into();
                leaf.use_authority_key_identifier_extension = true;
                Ok((leaf.signed_by(&key, issuer)?.pem(), key.serialize_pem()))
            };
        let mut names = vec!["localhost", "127.0.0.1", "::1", host];
        names.dedup();
        let make = || -> Result<_, rcgen::Error> {
            let ((ca, issuer), (_, other)) = (authority()?, authority()?);
            let (soon, past) = (now + 30 * DAY, now - 10 * DAY);
            let bad = [
                leaf(&issuer, &names, past)?,
                leaf(&issuer, &[OTHER_HOST], soon)?,
                leaf(&other, &names, soon)?,
            ];
            Ok((ca, leaf(&issuer, &names, soon)?, bad))
        };
        let (ca, good, [expired, host, authority]) =
            make().map_err(|error| format!("make a certificate for {host}: {error}"))?;
        let acceptor = |(chain, key): (String, String)| acceptor(chain.as_bytes(), key.as_bytes());
        let bad = [acceptor(expired)?, acceptor(host)?, acceptor(authority)?];
        Ok((Tls { good: acceptor(good)?, bad: Some(bad) }, ca))
    }
}

fn acceptor(chain: &[u8], key: &[u8]) -> Result<TlsAcceptor, String> {
    let chain: Vec<_> = CertificateDer::pem_slice_iter(chain)
        .collect::<Result<_, _>>()
        .map_err(|error| format!("the certificate is not PEM: {error}"))?;
    let key = PrivateKeyDer::from_pem_slice(key).map_err(|error| format!("the key is not PEM: {error}"))?;
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let mut config = ServerConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .and_then(|builder| builder.with_no_client_auth().with_single_cert(chain, key))
        .map_err(|error| format!("certificate and key cannot be used: {error}"))?;
    config.alpn_protocols = vec![b"h2".to_vec()];
    Ok(TlsAcceptor::from(Arc::new(config)))
}

impl Listener {
    /// Listens at an address; `tls` is what an https one shows.
    pub async fn bind(address: &Address, tls: Option<Tls>) -> Result<Self, String> {
        let failed = |error: &dyn Display| format!("listen at {address}: {error}");
        match address {
            Address::Unix(path) => {
                let (listener, file) = socket::bind(path).await.map_err(|error| failed(&error))?;
                Ok(Listener { accept: Accept::Unix { listener, _file: file }, address: address.clone() })
            }
            Address::Tcp { host, port, tls: is_tls } => {
                let listener =
                    TcpListener::bind((host.as_str(), *port)).await.map_err(|error| failed(&error))?;
                let bound: SocketAddr = listener.local_addr().map_err(|error| failed(&error))?;
                let address = Address::Tcp { host: host.clone(), port: bound.port(), tls: *is_tls };
                Ok(Listener { accept: Accept::Tcp(listener, tls), address })
            }
        }
    }

    /// Whether it can show other certificates than the good one.
    pub fn has_certificates(&self) -> bool {
        matches!(&self.accept, Accept::Tcp(_, Some(Tls { bad: Some(_), .. })))
    }

    /// Serves until dropped.
    pub async fn serve(self, proxy: Arc<Proxy>) {
        loop {
            let accepted = match &self.accept {
                Accept::Unix { listener, .. } => listener.accept().await.map(|(stream, _)| {
                    tokio::spawn(connection(Box::new(Tolerant::new(stream)), None, proxy.clone()));
                }),
                Accept::Tcp(listener, tls) => listener.accept().await.map(|(stream, _)| {
                    let _ = stream.set_nodelay(true);
                    tokio::spawn(tcp_connection(stream, tls.clone(), proxy.clone()));
                }),
            };
            if accepted.is_err() {
                // Out of descriptors, perhaps: some of them come back.
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
        }
    }
}

/// Bytes of a client's offer up to its newest version, where it names none in an extension.
const OFFER: usize = 11;
/// A ServerHello of TLS 1.1.
const OLD_HELLO: [u8; 11] = [22, 3, 2, 0, 42, 2, 0, 0, 38, 3, 2];

/// A connection over TCP. Faults that are about what comes before TLS look at the first bytes.
async fn tcp_connection(mut stream: TcpStream, tls: Option<Tls>, proxy: Arc<Proxy>) {
    let (plaintext, old) = (proxy.active.has(Kind::Plaintext), proxy.active.has(Kind::TlsOldVersions));
    if tls.is_some() && (plaintext || old) {
        let mut first = [0; OFFER];
        let peeked = async {
            while stream.peek(&mut first).await? < OFFER {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
            Ok::<_, io::Error>(())
        };
        if !matches!(tokio::time::timeout(GREETING, peeked).await, Ok(Ok(()))) {
            return;
        }
        if plaintext && first.starts_with(b"PRI ") {
            return connection(Box::new(stream), None, proxy).await;
        }
        if old && first[0] == OLD_HELLO[0] && first[9] == 3 && first[10] < 3 {
            let rest = [[7; 32].as_slice(), &[0, 0xc0, 0x13, 0]].concat();
            let _ = stream.write_all(&[&OLD_HELLO[..], &rest].concat()).await;
            return;
        }
    }
    connection(Box::new(stream), tls, proxy).await;
}

/// Serves one connection, until its client or a fault closes it.
async fn connection(stream: Box<dyn Io>, tls: Option<Tls>, proxy: Arc<Proxy>) {
    let stream: Box<dyn Io> = match tls {
        None => stream,
        Some(tls) => {
            let fault = CERTIFICATES.iter().position(|kind| proxy.active.has(*kind));
            let acceptor = fault.and_then(|fault| Some(&tls.bad.as_ref()?[fault])).unwrap_or(&tls.good);
            match tokio::time::timeout(GREETING, acceptor.accept(stream)).await {
                Ok(Ok(stream)) => Box::new(stream),
                _ => return,
            }
        }
    };
    let closed = CancellationToken::new();
    let on_it = closed.clone();
    let service = service_fn(move |request| {
        let (proxy, closed) = (proxy.clone(), on_it.clone());
        async move { Ok::<_, Infallible>(proxy.handle(request, closed).await) }
    });
    let serving = http2::Builder::new(TokioExecutor::new()).serve_connection(TokioIo::new(stream), service);
    tokio::select! {
        // A client that disconnects is not an error.
        _ = serving => {}
        () = closed.cancelled() => {}
    }
}
