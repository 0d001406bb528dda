//! What the server of every design needs beside `serve::program`: readiness of an elected replica, and HTTPS. What it answers
//! is the design's own.

use std::error::Error;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use axum::body::{Body, Bytes};
use axum::http::header;
use axum::response::Response;
use axum::{Extension, Router};
use csi_client::identity;
use futures_util::StreamExt;
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use hyper_util::server::conn::auto;
use hyper_util::server::graceful::GracefulShutdown;
use hyper_util::service::TowerToHyperService;
use kube::Client;
use parking_lot::Mutex;
use rustls::ServerConfig;
use rustls::pki_types::CertificateDer;
use serve::certificate::Certificate;
use serve::lease::{Lease, Times};
use serve::listen::{self, Limits};
use serve::program::{self, Stop, host_name};
use serve::questions::Metrics;
use tokio::net::TcpListener;
use tokio::task::JoinSet;
use tonic::transport::server::Connected;

use crate::Common;
use crate::driver::Driver;

/// The metrics of questions to the API server.
pub const METRICS: Metrics =
    Metrics { seconds: "cbt_earlier_api_seconds", reviews: "cbt_earlier_reviews_total" };
/// The counter of lines of the log that are lost.
const DROPPED_LINES: &str = "cbt_earlier_log_lines_dropped_total";
/// When the certificate ends.
const CERTIFICATE_ENDS: &str = "cbt_earlier_certificate_not_after_seconds";
/// How often certificate files are looked at.
const FILES_EVERY: Duration = Duration::from_secs(2);
/// How long a client may take to send its request's head; between two pings of a connection, too.
const PATIENCE: Duration = Duration::from_secs(10);
/// How long requests may go on after a signal.
const DRAIN: Duration = Duration::from_secs(30);
/// Connections at once, by what is known of their clients. A client that reads slowly holds an answer.
const CONNECTIONS: [usize; 3] = [1024, 256, 256];
/// Connections at once of one user.
const EACH: usize = 64;
/// What waits in the transport for a client, in bytes: of a request, and the pieces that it gets.
const WAITING: usize = 32 << 10;
const PIECE: usize = 16 << 10;
/// Requests at once on one connection.
const CALLS_A_CONNECTION: u32 = 16;

/// The certificates that the client of a connection has shown; each request has them among its extensions.
#[derive(Clone, Debug)]
pub struct ClientCertificates(pub Arc<[CertificateDer<'static>]>);

/// What a replica that serves a driver needs before users are led to it.
#[derive(Debug, Default)]
pub struct Ready {
    /// Whether it is elected.
    leads: AtomicBool,
    has_driver: AtomicBool,
    is_stopping: AtomicBool,
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
struct Leads(Arc<Ready>);

impl Leads {
    fn of(ready: &Arc<Ready>) -> Self {
        ready.leads.store(true, Ordering::Relaxed);
        Leads(ready.clone())
    }
}

impl Drop for Leads {
    fn drop(&mut self) {
        self.0.leads.store(false, Ordering::Relaxed);
    }
}

/// A server that has begun.
pub struct Server {
    pub listener: TcpListener,
    pub client: Client,
    pub stop: Stop,
    pub tasks: JoinSet<()>,
}

impl Server {
    /// What every design begins with. What can fail at once does so before anything is served. `missing` is what readiness lacks.
    pub async fn begin(
        common: &Common,
        certificate: &Arc<Certificate>,
        missing: impl Fn() -> Option<&'static str> + Clone + Send + Sync + 'static,
    ) -> Result<Self, Box<dyn Error>> {
        let metrics = serve::http::install_metrics(DROPPED_LINES)?;
        let http = program::bind_http(common.http_endpoint)?;
        let listener = program::bind(common.bind_address, common.port)?;
        let (chain, key) = (common.tls_cert.clone(), common.tls_key.clone());
        certificate.load(&chain, &key)?;
        let client = serve::questions::client(common.kubeconfig.as_deref()).await?;
        let stop = Stop::watch()?;
        let mut tasks = JoinSet::new();
        tasks.spawn(certificate.clone().follow(chain, key, FILES_EVERY));
        tasks.spawn(certificate.clone().tell_end(CERTIFICATE_ENDS));
        tasks.spawn(serve::http::probes(http, metrics, missing));
        Ok(Server { listener, client, stop, tasks })
    }

    /// The lease of that name, for this replica.
    pub fn lease(&self, common: &Common, name: &str) -> Lease {
        let pod = common.pod_name.clone().unwrap_or_else(host_name);
        Lease::new(self.client.clone(), &common.namespace, name, &pod, Times::default())
    }

    /// The driver's name, as soon as it answers; from then on it is told whether it is ready. None where a signal came first.
    pub async fn driver_name(&mut self, driver: &Driver, ready: &Arc<Ready>) -> io::Result<Option<String>> {
        let name = tokio::select! {
            name = identity::name(&driver.channel) => name,
            () = self.stop.asked() => return Ok(None),
        };
        tracing::info!(driver = name, address = %self.listener.local_addr()?, "serving");
        let (driver, ready) = (driver.clone(), ready.clone());
        self.tasks.spawn(async move {
            let tell = |is_ready| ready.has_driver.store(is_ready, Ordering::Relaxed);
            identity::watch(&driver.channel, tell).await;
        });
        Ok(Some(name))
    }

    /// Serves until a signal, then does what is left to do and lets requests end. Ends with an error when a task of its own
    /// does: then it would only seem to work.
    pub async fn serve(
        mut self,
        config: Arc<ServerConfig>,
        router: Router,
        what: &str,
        at_end: impl Future<Output = ()>,
    ) -> Result<(), Box<dyn Error>> {
        let graceful = GracefulShutdown::new();
        tokio::select! {
            () = answer(self.listener, config, router, &graceful) => {
                return Err(format!("{what} takes no more connections: see the log").into());
            }
            _ = self.tasks.join_next() => return Err("a task ended unexpectedly: see the log".into()),
            () = self.stop.asked() => {}
        }
        tokio::join!(at_end, drain(graceful));
        Ok(())
    }

    /// The same of a replica that does some work as long as it is elected.
    pub async fn serve_elected<W: Future<Output = ()> + Send>(
        mut self,
        ready: Arc<Ready>,
        lease: Lease,
        work: impl Fn() -> W + Send + Sync + 'static,
        router: Router,
        what: &str,
    ) -> Result<(), Box<dyn Error>> {
        let election = self.tasks.spawn({
            let (lease, ready) = (lease.clone(), ready.clone());
            async move {
                let work = || {
                    let (leads, work) = (Leads::of(&ready), work());
                    async move {
                        let _leads = leads;
                        work.await;
                    }
                };
                lease.lead(work).await;
            }
        });
        let at_end = async {
            ready.is_stopping.store(true, Ordering::Relaxed);
            election.abort();
            lease.release().await;
        };
        self.serve(ready.certificate.clone().server_config(), router, what, at_end).await
    }
}

/// Answers HTTP over TLS, in the versions 1.1 and 2.
async fn answer(
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
            .max_send_buf_size(WAITING)
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

/// The answer, with what its request holds - a place, say - until the client has taken all of it but a piece. Where it has not in this
/// time, what is left goes: a client that does not read would hold it for ever.
pub async fn held_until_taken(answer: Response, held: impl Send + 'static, time: Duration) -> Response {
    let (mut head, body) = answer.into_parts();
    // It is in memory already.
    let bytes = axum::body::to_bytes(body, usize::MAX).await.unwrap_or_default();
    head.headers.insert(header::CONTENT_LENGTH, bytes.len().into());
    let left = Arc::new(Mutex::new(Some((bytes, held))));
    tokio::spawn({
        let left = Arc::downgrade(&left);
        async move {
            tokio::time::sleep(time).await;
            drop(left.upgrade().and_then(|left| left.lock().take()));
        }
    });
    let mut is_over = false;
    let pieces = std::iter::from_fn(move || {
        let mut left = left.lock();
        let Some((bytes, _)) = left.as_mut() else {
            let is_late = !std::mem::replace(&mut is_over, true);
            return is_late.then(|| Err("the client has not taken the answer in time"));
        };
        // Copied: a piece that waits in the transport must not keep the others.
        let piece = Bytes::copy_from_slice(&bytes.split_to(PIECE.min(bytes.len())));
        if bytes.is_empty() {
            (is_over, *left) = (true, None);
        }
        Some(Ok(piece))
    });
    Response::from_parts(head, Body::from_stream(futures_util::stream::iter(pieces)))
}

/// Lets requests under way end, for a while.
async fn drain(graceful: GracefulShutdown) {
    tracing::info!("stopping");
    if tokio::time::timeout(DRAIN, graceful.shutdown()).await.is_err() {
        tracing::warn!("requests are still open, leaving them");
    }
    tracing::info!("stopped");
}
