//! Starts what the gateway consists of, and stops it.

use std::error::Error;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use csi_client::identity;
use futures_util::StreamExt;
use hyper::body::Incoming;
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use hyper_util::server::conn::auto;
use hyper_util::server::graceful::GracefulShutdown;
use hyper_util::service::TowerToHyperService;
use kube::Client;
use metrics::gauge;
use serve::certificate::Certificate;
use serve::lease::{Lease, Times};
use serve::listen::{self, Connection, Limits};
use serve::program::{self, Stop, host_name};
use serve::reviews::Reviews;
use serve::streams::Streams;
use tokio::task::JoinSet;
use tokio_stream::wrappers::ReceiverStream;
use tonic::body::Body;
use tonic::codegen::http::Request;
use tonic::server::NamedService;
use tonic::service::Routes;
use tonic::transport::server::Connected;
use tower::ServiceExt;

use crate::Arguments;
use crate::certificates::{Certificates, Lifetimes};
use crate::driver::Driver;
use crate::health::Health;
use crate::objects::Objects;
use crate::record;
use crate::service::{Gateway, SnapshotMetadata};

const FILES_EVERY: Duration = Duration::from_secs(2);
/// Between two pings of a client's connection, and until one that does not answer is given up.
const KEEPALIVE: Duration = Duration::from_secs(30);
/// Calls at once on one connection: RFC 9113 recommends no fewer. HTTP/2 keeps 1 KiB for each until the connection ends, also
/// of calls that were refused, and a thousand strangers may have connections.
const CALLS_A_CONNECTION: u32 = 100;
/// Longest head of a request, in bytes: the token is in the body.
const MAX_HEAD: u32 = 8 << 10;
/// Bytes of requests that a connection, and a call on it, may send before they are read.
const WINDOW: u32 = 64 << 10;

/// The most bytes of a stream that wait for a client that does not read its socket, in addition to a piece of the driver's answer.
const WAITING: usize = 32 << 10;

/// Serves until a signal. Ends with an error when a task of its own does: then it would only seem to work.
pub async fn run(arguments: Arguments) -> Result<(), Box<dyn Error>> {
    let objects = Arc::new(Objects::new(arguments.audience.is_none()));
    let certificate = Arc::<Certificate>::default();
    let mut tasks = JoinSet::new();
    // What can fail at once does so before anything is served.
    let metrics = serve::http::install_metrics("deltapath_gateway_log_lines_dropped_total")?;
    record::describe();
    let http = program::bind_http(arguments.http_endpoint)?;
    let listener = program::bind(arguments.bind_address, arguments.port)?;
    if let (Some(chain), Some(key)) = (&arguments.tls_cert, &arguments.tls_key) {
        certificate.load(chain, key)?;
        tasks.spawn(certificate.clone().follow(chain.clone(), key.clone(), FILES_EVERY));
    }
    tasks.spawn(certificate.clone().tell_end("deltapath_gateway_certificate_not_after_seconds"));
    let client = serve::questions::client(arguments.kubeconfig.as_deref()).await?;
    let stop = Stop::watch()?;

    let has_driver = Arc::<AtomicBool>::default();
    let missing = {
        let (stop, certificate) = (stop.clone(), certificate.clone());
        let (has_driver, objects) = (has_driver.clone(), objects.clone());
        move || {
            let lacks_driver = !has_driver.load(Ordering::Relaxed);
            None.or(stop.is_asked().then_some("it is stopping"))
                .or_else(|| certificate.missing())
                .or(lacks_driver.then_some("the CSI driver is not ready"))
                .or_else(|| objects.missing())
        }
    };
    tasks.spawn(serve::http::probes(http, metrics, missing.clone()));

    let driver = Driver::at(arguments.csi_address.path());
    let driver_name = tokio::select! {
        name = identity::name(&driver.channel) => name,
        () = stop.asked() => return Ok(()),
    };
    tracing::info!(driver = driver_name, address = %listener.local_addr()?, "serving");
    if arguments.manage_certificates {
        manage_certificates(&arguments, &driver_name, &client, &certificate, &mut tasks);
    }
    objects.watch(&client, &driver_name, &mut tasks);
    let (health, health_service) = tonic_health::server::health_reporter();
    tasks.spawn({
        let driver = driver.clone();
        async move {
            let tell = |is_ready: bool| {
                has_driver.store(is_ready, Ordering::Relaxed);
                gauge!("deltapath_gateway_driver_ready").set(f64::from(u8::from(is_ready)));
            };
            identity::watch(&driver.channel, tell).await;
        }
    });
    tasks.spawn(program::follow_readiness(health, &["", SnapshotMetadata::NAME], missing));

    let streams = Streams::new(
        arguments.max_streams,
        arguments.max_streams_per_client,
        "deltapath_gateway_open_streams",
    );
    tasks.spawn(streams.clone().end_idle(arguments.idle_timeout));
    let gateway = Gateway {
        driver_name,
        driver,
        objects,
        reviews: Reviews::new(client.clone(), arguments.review_cache, crate::service::METRICS)?,
        client,
        audience: arguments.audience,
        streams,
    };
    let config = certificate.server_config();
    let limits = listen_limits(arguments.max_streams, arguments.max_streams_per_client);
    let connections = listen::tls(listener, move || Some(config.clone()), limits);
    let services =
        Routes::new(Health(health_service)).add_service(SnapshotMetadata(Arc::new(gateway))).prepare();
    let graceful = GracefulShutdown::new();
    let server = async {
        tokio::select! {
            () = answer(connections, services, &graceful) => {}
            () = stop.asked() => {}
        }
        tracing::info!("draining");
        graceful.shutdown().await;
    };
    tokio::select! {
        () = server => {}
        _ = tasks.join_next() => return Err("a task of the gateway ended unexpectedly: see the log".into()),
        () = async {
            stop.asked().await;
            tokio::time::sleep(arguments.drain).await;
        } => tracing::warn!("streams are still open, leaving them"),
    }
    tracing::info!("stopped");
    Ok(())
}

async fn answer(
    mut connections: ReceiverStream<io::Result<Connection>>,
    services: Routes,
    graceful: &GracefulShutdown,
) {
    // Not tonic's server, which cannot bound what waits for clients.
    let mut builder = auto::Builder::new(TokioExecutor::new()).http2_only();
    builder
        .http2()
        .timer(TokioTimer::new())
        .keep_alive_interval(KEEPALIVE)
        .keep_alive_timeout(KEEPALIVE)
        .max_header_list_size(MAX_HEAD)
        .initial_connection_window_size(WINDOW)
        .initial_stream_window_size(WINDOW)
        .max_concurrent_streams(CALLS_A_CONNECTION)
        .max_send_buf_size(WAITING);
    while let Some(Ok(connection)) = connections.next().await {
        let calls = connection.connect_info();
        let services = services.clone().map_request(move |mut request: Request<Incoming>| {
            request.extensions_mut().insert(calls.clone());
            request.map(Body::new)
        });
        let served = builder.serve_connection(TokioIo::new(connection), TowerToHyperService::new(services));
        let served = graceful.watch(served.into_owned());
        tokio::spawn(async move {
            if let Err(error) = served.await {
                tracing::debug!(error, "a connection ended");
            }
        });
    }
}

/// Room for every stream, and for idle connections as well.
fn listen_limits(streams: usize, each: usize) -> Limits {
    Limits { stages: [4096, 1024, streams + 256], each: each + 64, ..Limits::default() }
}

fn manage_certificates(
    arguments: &Arguments,
    driver: &str,
    client: &Client,
    shown: &Arc<Certificate>,
    tasks: &mut JoinSet<()>,
) {
    // Clap has seen to it that they are there.
    let text = |text: &Option<String>| text.clone().unwrap_or_default();
    let namespace = text(&arguments.namespace);
    let certificates = Certificates {
        client: client.clone(),
        namespace: namespace.clone(),
        secret: arguments.certificate_secret.clone(),
        driver: driver.to_owned(),
        address: text(&arguments.service_address),
        audience: text(&arguments.audience),
        require_base: arguments.require_base_snapshot,
        lifetimes: Lifetimes {
            authority: arguments.ca_lifetime,
            leaf: arguments.certificate_lifetime,
            overlap: arguments.ca_overlap,
        },
    };
    tasks.spawn(certificates.clone().follow(shown.clone()));
    let name = arguments.pod_name.clone().unwrap_or_else(host_name);
    let lease = Lease::new(client.clone(), &namespace, &arguments.lease, &name, Times::default());
    tasks.spawn(async move { lease.lead(|| certificates.manage()).await });
}
