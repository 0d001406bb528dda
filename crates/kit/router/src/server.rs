//! Starts what the router consists of, and stops it.

use std::error::Error;
use std::sync::Arc;

use serve::authority::Tolerant;
use serve::identity::Role;
use serve::mutual::{self, Files, Mutual};
use serve::program::{self, Stop};
use serve::streams::Streams;
use tokio::task::JoinSet;
use tokio_stream::StreamExt;
use tokio_stream::wrappers::UnixListenerStream;
use tonic::server::NamedService;
use tonic::transport::Server;

use crate::Serve;
use crate::calls::Router;
use crate::nodes::Nodes;
use crate::record;
use crate::service::{Controller, GroupController, Identity, SnapshotMetadata};

/// Serves until a signal. Ends with an error when a task of its own does: then it would only seem to work.
pub async fn run(arguments: Serve) -> Result<(), Box<dyn Error>> {
    let mut tasks = JoinSet::new();
    // What can fail at once does so before anything is served.
    let metrics = serve::http::install_metrics("deltapath_router_log_lines_dropped_total")?;
    record::describe();
    let http = program::bind_http(arguments.http_endpoint)?;
    let files =
        Files { certificate: arguments.tls_cert, key: arguments.tls_key, authorities: arguments.tls_ca };
    let tls = Mutual::new(files, Role::Router);
    match tls.load() {
        Ok(()) => {}
        // In Kubernetes the files of a Secret are there as soon as somebody has filled it.
        Err(mutual::Error::Certificate(error))
            if arguments.node_service.is_some() && error.is_not_found() =>
        {
            tracing::warn!(error = base::report(&error), "no node is asked until there is a certificate");
        }
        Err(error) => return Err(error.into()),
    }
    tasks.spawn(tls.clone().follow("deltapath_router_certificate_not_after_seconds"));
    if let Some(forgotten) = &arguments.forgotten {
        crate::forget::read(forgotten)?;
    }
    let (socket, _file) = serve::socket::bind(arguments.endpoint.path())
        .await
        .map_err(|error| format!("listen on {} (--endpoint): {error}", arguments.endpoint))?;
    let stop = Stop::watch()?;

    let nodes = Nodes::new(
        tls.clone(),
        tls.clone(),
        arguments.node_timeout,
        arguments.forgotten,
        arguments.driver_name,
    );
    nodes.read_forgotten();
    let mut volumes = None;
    match &arguments.node_service {
        Some(service) => {
            let client = serve::questions::client(arguments.kubeconfig.as_deref()).await?;
            volumes = Some(kube::Api::all(client.clone()));
            tasks.spawn(crate::slices::follow(client, service.clone(), nodes.clone()));
        }
        None => nodes.set_addresses(&arguments.node_endpoints.iter().cloned().collect()),
    }
    tasks.spawn(nodes.clone().follow_forgotten());

    let missing = {
        let (nodes, stop) = (nodes.clone(), stop.clone());
        move || {
            None.or(stop.is_asked().then_some("it is stopping"))
                .or_else(|| tls.missing())
                .or_else(|| nodes.up().is_empty().then_some("no node answers"))
        }
    };
    tasks.spawn(serve::http::probes(http, metrics, missing.clone()));
    let (health, health_service) = tonic_health::server::health_reporter();
    const SERVICES: [&str; 5] =
        ["", Identity::NAME, Controller::NAME, GroupController::NAME, SnapshotMetadata::NAME];
    tasks.spawn(program::follow_readiness(health, &SERVICES, missing));

    let streams = Streams::new(arguments.max_streams, arguments.max_streams, record::OPEN_STREAMS);
    tasks.spawn(streams.clone().end_idle(arguments.idle_timeout));
    let router = Arc::new(Router::new(nodes, streams));
    tasks.spawn({
        let router = router.clone();
        async move { router.find_twice(volumes).await }
    });
    tracing::info!(endpoint = %arguments.endpoint, "serving");
    let connections = UnixListenerStream::new(socket).map(|connection| connection.map(Tolerant::new));
    let server = Server::builder()
        .add_service(health_service)
        .add_service(Identity(router.clone()))
        .add_service(Controller(router.clone()))
        .add_service(GroupController(router.clone()))
        .add_service(SnapshotMetadata(router))
        .serve_with_incoming_shutdown(connections, async {
            stop.asked().await;
            tracing::info!("draining");
        });
    tokio::select! {
        served = server => served?,
        _ = tasks.join_next() => return Err("a task of the router ended unexpectedly: see the log".into()),
        () = async {
            stop.asked().await;
            tokio::time::sleep(arguments.drain).await;
        } => tracing::warn!("calls are still under way, leaving them"),
    }
    tracing::info!("stopped");
    Ok(())
}
