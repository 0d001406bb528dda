//! The second design: DifferentialSnapshot, a controller that publishes a callback URL, a listener behind that URL, and the
//! gRPC service that the listener calls. Here they are started and stopped.

mod controller;
mod listener;
mod pages;
mod resource;

use std::error::Error;
use std::path::Path;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use axum::http::StatusCode;
use axum::routing::get;
use axum::{Extension, Router};
use futures_util::StreamExt;
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use hyper_util::server::conn::auto;
use hyper_util::server::graceful::GracefulShutdown;
use hyper_util::service::TowerToHyperService;
use kube::config::{KubeConfigOptions, Kubeconfig};
use kube::{Client, Config};
use proto::differential::differential_snapshot_client::DifferentialSnapshotClient;
use proto::differential::differential_snapshot_server::DifferentialSnapshotServer;
use serve::certificate::Certificate;
use serve::http::text;
use serve::lease::{Lease, Times};
use serve::listen::{self, Limits};
use serve::reviews::Reviews;
use tokio::net::TcpListener;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::Semaphore;
use tokio::task::JoinSet;
use tokio_stream::wrappers::UnixListenerStream;
use tonic::transport::Server;
use tonic::transport::server::Connected;

use crate::Differential as Arguments;
use crate::driver::{self, Driver};
use controller::Controller;
use listener::Listener;
use pages::Pages;

/// How often certificate files are looked at.
const FILES_EVERY: Duration = Duration::from_secs(2);
/// How long a client may take to send its request's head; between two pings of a connection, too.
const PATIENCE: Duration = Duration::from_secs(10);
/// How long requests may go on after a signal.
const DRAIN: Duration = Duration::from_secs(30);
/// Connections to the callback listener at once. A client that reads slowly holds a page.
const CONNECTIONS: usize = 256;
/// Requests at once on one connection.
const CALLS_A_CONNECTION: u32 = 16;

/// What a replica needs before users are led to it.
#[derive(Debug, Default)]
struct Ready {
    leads: AtomicBool,
    has_driver: AtomicBool,
    is_stopping: AtomicBool,
    certificate: Arc<Certificate>,
}

impl Ready {
    /// What is missing, if anything.
    fn missing(&self) -> Option<&'static str> {
        [
            (self.is_stopping.load(Ordering::Relaxed), "it is stopping"),
            (!self.certificate.is_there(), "it has no certificate"),
            (!self.has_driver.load(Ordering::Relaxed), "the CSI driver is not ready"),
            (!self.leads.load(Ordering::Relaxed), "another replica is elected"),
        ]
        .iter()
        .find(|(is_missing, _)| *is_missing)
        .map(|(_, what)| *what)
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

/// Serves until a signal. Ends with an error when a task of its own does: then it would only seem to work.
pub async fn run(arguments: Arguments) -> Result<(), Box<dyn Error>> {
    let ready = Arc::new(Ready::default());
    let mut tasks = JoinSet::new();
    // What can fail at once does so before anything is served.
    let metrics = serve::http::install_metrics()?;
    let http = TcpListener::bind(arguments.http_endpoint)
        .await
        .map_err(|error| format!("listen on {} (--http-endpoint): {error}", arguments.http_endpoint))?;
    let address = (arguments.bind_address, arguments.port);
    let listener = TcpListener::bind(address)
        .await
        .map_err(|error| format!("listen on {}:{} (--port): {error}", address.0, address.1))?;
    let socket = arguments.socket.path();
    let (grpc, _socket) = serve::socket::bind(socket)
        .await
        .map_err(|error| format!("listen on {} (--socket): {error}", arguments.socket))?;
    let grpc = UnixListenerStream::new(grpc);
    let (chain, key) = (arguments.tls_cert, arguments.tls_key);
    ready.certificate.load(&chain, &key)?;
    tasks.spawn(ready.certificate.clone().follow(chain, key, FILES_EVERY));
    let client = connect(arguments.kubeconfig.as_deref()).await?;
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    let stop = async {
        tokio::select! {
            _ = terminate.recv() => {}
            _ = interrupt.recv() => {}
        }
    };
    let mut stop = pin!(stop);

    tasks.spawn(serve::http::upkeep(metrics.clone()));
    let probes = Router::new()
        .route("/healthz", get(async || text(StatusCode::OK, "ok\n")))
        .route(
            "/readyz",
            get({
                let ready = ready.clone();
                async move || match ready.missing() {
                    None => text(StatusCode::OK, "ok\n"),
                    Some(what) => text(StatusCode::SERVICE_UNAVAILABLE, format!("{what}\n")),
                }
            }),
        )
        .route("/metrics", get(async move || text(StatusCode::OK, metrics.render())));
    tasks.spawn(serve::http::serve(http, probes));

    let driver = Driver::at(arguments.csi_address.path());
    let driver_name = tokio::select! {
        name = driver.name() => name,
        () = &mut stop => return Ok(()),
    };
    tracing::info!(driver = driver_name, address = %listener.local_addr()?, "serving");
    tasks.spawn({
        let (driver, ready) = (driver.clone(), ready.clone());
        async move { driver.watch(|is_ready| ready.has_driver.store(is_ready, Ordering::Relaxed)).await }
    });
    let pages = DifferentialSnapshotServer::new(Pages { driver, max_entries: arguments.max_entries });
    tasks.spawn(async move {
        let served = Server::builder().add_service(pages).serve_with_incoming(grpc).await;
        tracing::error!(?served, "the service DifferentialSnapshot has ended");
    });
    let controller = Arc::new(Controller {
        client: client.clone(),
        driver_name: driver_name.clone(),
        service_address: arguments.service_address,
        ready_timeout: arguments.ready_timeout,
    });
    let lease = Lease::new(
        client.clone(),
        &arguments.namespace,
        &arguments.lease,
        &arguments.pod_name,
        Times::default(),
    );
    tasks.spawn({
        let ready = ready.clone();
        async move {
            let work = || {
                let (leads, controller) = (Leads::of(&ready), controller.clone());
                async move {
                    let _leads = leads;
                    controller.run().await;
                }
            };
            lease.lead(work).await;
        }
    });
    let callbacks = Arc::new(Listener {
        reviews: Reviews::new(client.clone(), arguments.review_cache, resource::METRICS)?,
        client,
        audience: arguments.audience,
        driver_name,
        pages: DifferentialSnapshotClient::new(driver::channel(socket)),
        page_timeout: arguments.page_timeout,
        places: Semaphore::new(usize::from(arguments.max_requests)),
    });
    let graceful = GracefulShutdown::new();
    tokio::select! {
        () = answer(listener, &ready.certificate, listener::router(callbacks), &graceful) => {
            return Err("the callback listener takes no more connections: see the log".into());
        }
        _ = tasks.join_next() => return Err("a task has ended, which should not be: see the log".into()),
        () = &mut stop => {}
    }
    ready.is_stopping.store(true, Ordering::Relaxed);
    tracing::info!("stopping");
    if tokio::time::timeout(DRAIN, graceful.shutdown()).await.is_err() {
        tracing::warn!("requests are still open, leaving them");
    }
    tracing::info!("stopped");
    Ok(())
}

/// Answers HTTP over TLS, in the versions 1.1 and 2.
async fn answer(
    listener: TcpListener,
    certificate: &Arc<Certificate>,
    router: Router,
    graceful: &GracefulShutdown,
) {
    let mut config = Arc::unwrap_or_clone(certificate.clone().server_config());
    config.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
    let config = Arc::new(config);
    let limits = Limits { connections: CONNECTIONS, ..Limits::default() };
    let mut connections = listen::tls(listener, move || Some(config.clone()), limits);
    while let Some(Ok(connection)) = connections.next().await {
        let router = router.clone().layer(Extension(connection.connect_info()));
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

async fn connect(kubeconfig: Option<&Path>) -> Result<Client, Box<dyn Error>> {
    let config = match kubeconfig {
        None => Config::infer().await?,
        Some(path) => {
            let kubeconfig = Kubeconfig::read_from(path)?;
            Config::from_custom_kubeconfig(kubeconfig, &KubeConfigOptions::default()).await?
        }
    };
    Ok(Client::try_from(config)?)
}
