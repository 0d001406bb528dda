//! Starts what the gateway consists of, and stops it.

use std::error::Error;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use axum::Router;
use axum::http::StatusCode;
use axum::routing::get;
use kube::config::{KubeConfigOptions, Kubeconfig};
use kube::{Client, Config};
use metrics::gauge;
use serve::certificate::Certificate;
use serve::http::text;
use serve::lease::{Lease, Times};
use serve::listen::{self, Limits};
use serve::reviews::Reviews;
use serve::streams::Streams;
use tokio::net::TcpListener;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::watch;
use tokio::task::JoinSet;
use tonic::server::NamedService;
use tonic::transport::Server;
use tonic_health::ServingStatus;

use crate::Arguments;
use crate::certificates::{Certificates, Lifetimes};
use crate::driver::Driver;
use crate::objects::Objects;
use crate::record;
use crate::service::{Gateway, SnapshotMetadata};

/// How often certificate files are looked at.
const FILES_EVERY: Duration = Duration::from_secs(2);
/// Between two pings of a client's connection, and until one that does not answer is given up.
const KEEPALIVE: Duration = Duration::from_secs(30);
/// Calls at once on one connection.
const CALLS_A_CONNECTION: u32 = 256;
/// Longest head of a request, in bytes.
const MAX_HEAD: u32 = 16 << 10;

/// What the gateway needs before it can answer.
#[derive(Debug, Default)]
struct Ready {
    has_driver: AtomicBool,
    has_objects: AtomicBool,
    is_stopping: AtomicBool,
    certificate: Arc<Certificate>,
}

impl Ready {
    /// What is missing, if anything.
    fn missing(&self) -> Option<&'static str> {
        [
            (self.is_stopping.load(Ordering::Relaxed), "it is stopping"),
            (!self.certificate.is_there(), "it has no certificate yet"),
            (!self.has_driver.load(Ordering::Relaxed), "the CSI driver is not ready"),
            (!self.has_objects.load(Ordering::Relaxed), "the VolumeSnapshots are not listed yet"),
        ]
        .iter()
        .find(|(is_missing, _)| *is_missing)
        .map(|(_, what)| *what)
    }
}

/// Serves until a signal. Ends with an error when a task of its own does: then it would only seem to work.
pub async fn run(arguments: Arguments) -> Result<(), Box<dyn Error>> {
    let ready = Arc::new(Ready::default());
    let mut tasks = JoinSet::new();
    // What can fail at once does so before anything is served.
    let metrics = serve::http::install_metrics()?;
    record::describe();
    let http = TcpListener::bind(arguments.http_endpoint)
        .await
        .map_err(|error| format!("listen on {} (--http-endpoint): {error}", arguments.http_endpoint))?;
    let address = (arguments.bind_address, arguments.port);
    let listener = TcpListener::bind(address)
        .await
        .map_err(|error| format!("listen on {}:{} (--port): {error}", address.0, address.1))?;
    if let (Some(chain), Some(key)) = (&arguments.tls_cert, &arguments.tls_key) {
        ready.certificate.load(chain, key)?;
        tasks.spawn(ready.certificate.clone().follow(chain.clone(), key.clone(), FILES_EVERY));
    }
    let client = connect(&arguments).await?;
    let stop = stop_signal()?;

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

    let driver = Driver::at(arguments.csi_address.clone());
    let mut stopped = stop.clone();
    let driver_name = tokio::select! {
        name = driver.name() => name,
        _ = stopped.wait_for(|stop| *stop) => return Ok(()),
    };
    tracing::info!(driver = driver_name, address = %listener.local_addr()?, "serving");
    if arguments.manage_certificates {
        manage_certificates(&arguments, &driver_name, &client, &ready.certificate, &mut tasks);
    }
    let objects = Arc::new(Objects::default());
    let mut complete = objects.watch(&client, &driver_name, arguments.audience.is_none(), &mut tasks);
    tasks.spawn({
        let ready = ready.clone();
        let objects = objects.clone();
        async move {
            if complete.wait_for(|complete| *complete).await.is_ok() {
                let (snapshots, contents) = objects.counts();
                tracing::info!(snapshots, contents, "listed");
                ready.has_objects.store(true, Ordering::Relaxed);
            }
            std::future::pending().await
        }
    });
    let (health, health_service) = tonic_health::server::health_reporter();
    tasks.spawn({
        let (driver, ready) = (driver.clone(), ready.clone());
        async move {
            let tell = |is_ready: bool| {
                ready.has_driver.store(is_ready, Ordering::Relaxed);
                gauge!("deltapath_gateway_driver_ready").set(f64::from(u8::from(is_ready)));
            };
            driver.watch(tell).await;
        }
    });
    tasks.spawn({
        let ready = ready.clone();
        async move {
            let mut was_missing = Some("it is starting");
            loop {
                let missing = ready.missing();
                if missing != was_missing {
                    match missing {
                        None => tracing::info!("ready"),
                        Some(reason) => tracing::warn!(reason, "not ready"),
                    }
                    was_missing = missing;
                }
                let status = match missing {
                    None => ServingStatus::Serving,
                    Some(_) => ServingStatus::NotServing,
                };
                for service in ["", SnapshotMetadata::NAME] {
                    health.set_service_status(service, status).await;
                }
                tokio::time::sleep(Duration::from_millis(500)).await;
            }
        }
    });

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
        reviews: Reviews::new(client.clone(), arguments.review_cache, crate::api::METRICS)?,
        client,
        audience: arguments.audience,
        streams,
    };
    let config = ready.certificate.clone().server_config();
    let connections = listen::tls(listener, move || Some(config.clone()), Limits::default());
    let (mut shutdown, mut overdue) = (stop.clone(), stop);
    let server = Server::builder()
        .http2_keepalive_interval(Some(KEEPALIVE))
        .http2_keepalive_timeout(Some(KEEPALIVE))
        .http2_max_header_list_size(Some(MAX_HEAD))
        .max_concurrent_streams(Some(CALLS_A_CONNECTION))
        .add_service(health_service)
        .add_service(SnapshotMetadata(Arc::new(gateway)))
        .serve_with_incoming_shutdown(connections, async {
            let _ = shutdown.wait_for(|stop| *stop).await;
            ready.is_stopping.store(true, Ordering::Relaxed);
            tracing::info!("draining");
        });
    tokio::select! {
        served = server => served?,
        _ = tasks.join_next() => return Err("a task of the gateway has ended, which should not be: see its log".into()),
        () = async {
            let _ = overdue.wait_for(|stop| *stop).await;
            tokio::time::sleep(arguments.drain).await;
        } => tracing::warn!("streams are still open, leaving them"),
    }
    tracing::info!("stopped");
    Ok(())
}

async fn connect(arguments: &Arguments) -> Result<Client, Box<dyn Error>> {
    let config = match &arguments.kubeconfig {
        None => Config::infer().await?,
        Some(path) => {
            let kubeconfig = Kubeconfig::read_from(path)?;
            Config::from_custom_kubeconfig(kubeconfig, &KubeConfigOptions::default()).await?
        }
    };
    Ok(Client::try_from(config)?)
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
    let lease =
        Lease::new(client.clone(), &namespace, &arguments.lease, &arguments.pod_name, Times::default());
    tasks.spawn(async move { lease.lead(|| certificates.manage()).await });
}

/// Turns true at the first SIGTERM or SIGINT.
fn stop_signal() -> std::io::Result<watch::Receiver<bool>> {
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    let (stop, stopped) = watch::channel(false);
    tokio::spawn(async move {
        tokio::select! {
            _ = terminate.recv() => {}
            _ = interrupt.recv() => {}
        }
        let _ = stop.send(true);
        // The receivers outlive this only as long as the server does.
        stop.closed().await;
    });
    Ok(stopped)
}
