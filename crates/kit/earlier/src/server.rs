//! What the server of every design needs as well as `serve::program`: readiness of an elected replica, and HTTPS. What it answers
//! is the design's own.

use std::error::Error;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use axum::body::{Body, Bytes};
use axum::http::header;
use axum::response::{IntoResponse, Response};
use axum::{Extension, Json, Router};
use csi_client::identity;
use futures_util::StreamExt;
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use hyper_util::server::conn::auto;
use hyper_util::server::graceful::GracefulShutdown;
use hyper_util::service::TowerToHyperService;
use kube::Client;
use rustls::ServerConfig;
use rustls::pki_types::CertificateDer;
use serde::Serialize;
use serve::certificate::Certificate;
use serve::lease::{Lease, Times};
use serve::listen::{self, Limits};
use serve::program::{self, Stop, host_name};
use serve::questions::Metrics;
use tokio::net::TcpListener;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc};
use tokio::task::JoinSet;
use tokio_stream::wrappers::ReceiverStream;
use tonic::transport::server::Connected;
use tonic::{Code, Status};

use crate::Common;
use crate::driver::Driver;
use crate::refusal::Refusal;

/// The metrics of questions to the API server.
pub const METRICS: Metrics =
    Metrics { seconds: "cbt_earlier_api_seconds", reviews: "cbt_earlier_reviews_total" };
/// The counter of lines of the log that are lost.
const DROPPED_LINES: &str = "cbt_earlier_log_lines_dropped_total";
const CERTIFICATE_ENDS: &str = "cbt_earlier_certificate_not_after_seconds";
const FILES_EVERY: Duration = Duration::from_secs(2);
/// How long a client may take to send its request's head; between two pings of a connection, too.
const PATIENCE: Duration = Duration::from_secs(10);
const DRAIN: Duration = Duration::from_secs(30);
/// Connections at once, by what is known of their clients. A client that reads slowly holds an answer.
const CONNECTIONS: [usize; 3] = [1024, 256, 256];
const EACH: usize = 64;
/// What waits in the transport for a client, in bytes: of a request, and the pieces that it gets.
const WAITING: usize = 32 << 10;
const PIECE: usize = 16 << 10;
const CALLS_A_CONNECTION: u32 = 16;

/// The certificates that the client of a connection has shown; each request has them among its extensions.
#[derive(Clone, Debug)]
pub struct ClientCertificates(pub Arc<[CertificateDer<'static>]>);

/// What a replica that serves a driver needs before users are led to it.
#[derive(Debug, Default)]
pub struct Ready {
    leads: AtomicBool,
    has_driver: AtomicBool,
    is_stopping: AtomicBool,
    pub certificate: Arc<Certificate>,
}

impl Ready {
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

    /// The driver's name, as soon as it answers; from then on `ready` says whether the driver is ready. None where a signal came first.
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

/// One of the places for requests, if there is a free one.
pub fn place(places: &Arc<Semaphore>) -> Result<OwnedSemaphorePermit, Status> {
    let busy = |_| Status::resource_exhausted("too many requests at once: try again");
    places.clone().try_acquire_owned().map_err(busy)
}

/// Counts a request under its gRPC code.
pub fn count<T>(counter: &'static str, answer: &Result<T, Status>) {
    let code = answer.as_ref().map_or_else(Status::code, |_| Code::Ok);
    metrics::counter!(counter, "code" => format!("{code:?}")).increment(1);
}

/// Answers with a page that is made in this time, or says why there is none; `late` where it is not made in time. With the page is
/// what its request holds.
pub async fn answer_page<P: Serialize, H: Send + 'static>(
    page: impl Future<Output = Result<(P, H), Status>>,
    time: Duration,
    late: &str,
) -> Response {
    let page = tokio::time::timeout(time, page).await;
    let page = page.unwrap_or_else(|_| Err(Status::deadline_exceeded(late)));
    count("cbt_earlier_pages_total", &page);
    match page {
        Ok((page, held)) => {
            let page = ([(header::CACHE_CONTROL, "no-store")], Json(page)).into_response();
            held_until_taken(page, held, time).await
        }
        Err(status) => Refusal::from(status).into_response(),
    }
}

/// The answer, with what its request holds - a place, say - until the client has taken all of it but a piece. Where it has not in this
/// time, what is left is dropped: a client that does not read would hold it for ever.
pub async fn held_until_taken(answer: Response, held: impl Send + 'static, time: Duration) -> Response {
    let (mut head, body) = answer.into_parts();
    // It is in memory already.
    let bytes = axum::body::to_bytes(body, usize::MAX).await.unwrap_or_default();
    head.headers.insert(header::CONTENT_LENGTH, bytes.len().into());
    let (pieces, body) = mpsc::channel(2);
    tokio::spawn(async move {
        let _held = held;
        // One place is for the end.
        let Ok(end) = pieces.clone().reserve_owned().await else { return };
        let taken = async {
            // Copied: a piece that waits in the transport must not keep the others.
            for piece in bytes.chunks(PIECE) {
                if pieces.send(Ok(Bytes::copy_from_slice(piece))).await.is_err() {
                    return;
                }
            }
        };
        if tokio::time::timeout(time, taken).await.is_err() {
            end.send(Err("the client has not taken the answer in time"));
        }
    });
    Response::from_parts(head, Body::from_stream(ReceiverStream::new(body)))
}

/// Lets requests under way end, for a while.
async fn drain(graceful: GracefulShutdown) {
    tracing::info!("stopping");
    if tokio::time::timeout(DRAIN, graceful.shutdown()).await.is_err() {
        tracing::warn!("requests are still open, leaving them");
    }
    tracing::info!("stopped");
}
