//! What the server of every design needs beside `serve::program`: readiness of an elected replica, and HTTPS. What it answers
//! is the design's own.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use axum::{Extension, Router};
use futures_util::StreamExt;
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use hyper_util::server::conn::auto;
use hyper_util::server::graceful::GracefulShutdown;
use hyper_util::service::TowerToHyperService;
use rustls::ServerConfig;
use rustls::pki_types::CertificateDer;
use serve::certificate::Certificate;
use serve::listen::{self, Limits};
use serve::questions::Metrics;
use tokio::net::TcpListener;
use tonic::transport::server::Connected;

/// The metrics of questions to the API server.
pub const METRICS: Metrics =
    Metrics { seconds: "cbt_earlier_api_seconds", reviews: "cbt_earlier_reviews_total" };
/// The counter of lines of the log that are lost.
pub const DROPPED_LINES: &str = "cbt_earlier_log_lines_dropped_total";
/// When the certificate ends.
pub const CERTIFICATE_ENDS: &str = "cbt_earlier_certificate_not_after_seconds";
/// How often certificate files are looked at.
pub const FILES_EVERY: Duration = Duration::from_secs(2);
/// How long a client may take to send its request's head; between two pings of a connection, too.
const PATIENCE: Duration = Duration::from_secs(10);
/// How long requests may go on after a signal.
const DRAIN: Duration = Duration::from_secs(30);
/// Connections at once, by what is known of their clients. A client that reads slowly holds an answer.
const CONNECTIONS: [usize; 3] = [1024, 256, 256];
/// Connections at once of one user.
const EACH: usize = 64;
/// Requests at once on one connection.
const CALLS_A_CONNECTION: u32 = 16;

/// The certificates that the client of a connection has shown; each request has them among its extensions.
#[derive(Clone, Debug)]
pub struct ClientCertificates(pub Arc<[CertificateDer<'static>]>);

/// What a replica that serves a driver needs before users are led to it.
#[derive(Debug, Default)]
pub struct Ready {
    /// Whether it is elected.
    pub leads: AtomicBool,
    pub has_driver: AtomicBool,
    pub is_stopping: AtomicBool,
    pub certificate: Arc<Certificate>,
}

impl Ready {
    /// What is missing, if anything.
    pub fn missing(&self) -> Option<&'static str> {
        let is = |flag: &AtomicBool| flag.load(Ordering::Relaxed);
        None.or(is(&self.is_stopping).then_some("it is stopping"))
            .or_else(|| self.certificate.missing())
            .or((!is(&self.has_driver)).then_some("the CSI driver is not ready"))
            .or((!is(&self.leads)).then_some("another replica is elected"))
    }
}

/// Is elected until it is dropped.
pub struct Leads(Arc<Ready>);

impl Leads {
    pub fn of(ready: &Arc<Ready>) -> Self {
        ready.leads.store(true, Ordering::Relaxed);
        Leads(ready.clone())
    }
}

impl Drop for Leads {
    fn drop(&mut self) {
        self.0.leads.store(false, Ordering::Relaxed);
    }
}

/// Answers HTTP over TLS, in the versions 1.1 and 2.
pub async fn answer(
    listener: TcpListener,
    config: Arc<ServerConfig>,
    router: Router,
    graceful: &GracefulShutdown,
) {
    let mut config = Arc::unwrap_or_clone(config);
    config.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
    let config = Arc::new(config);
    let limits = Limits { stages: CONNECTIONS, each: EACH, ..Limits::default() };
    let mut connections = listen::tls(listener, move || Some(config.clone()), limits);
    while let Some(Ok(connection)) = connections.next().await {
        let shown = ClientCertificates(connection.client_certificates().into());
        let router = router.clone().layer(Extension(connection.connect_info())).layer(Extension(shown));
        let mut builder = auto::Builder::new(TokioExecutor::new());
        builder.http1().timer(TokioTimer::new()).header_read_timeout(PATIENCE);
        builder
            .http2()
            .timer(TokioTimer::new())
            .keep_alive_interval(PATIENCE)
            .keep_alive_timeout(PATIENCE)
            .max_concurrent_streams(CALLS_A_CONNECTION);
        let served = builder.serve_connection(TokioIo::new(connection), TowerToHyperService::new(router));
        let served = graceful.watch(served.into_owned());
        tokio::spawn(async move {
            if let Err(error) = served.await {
                tracing::debug!(error, "a connection ended");
            }
        });
    }
}

/// Lets requests under way end, for a while.
pub async fn drain(graceful: GracefulShutdown) {
    tracing::info!("stopping");
    if tokio::time::timeout(DRAIN, graceful.shutdown()).await.is_err() {
        tracing::warn!("requests are still open, leaving them");
    }
    tracing::info!("stopped");
}
