//! The second design: DifferentialSnapshot, a controller that publishes a callback URL, a listener behind that URL, and the
//! gRPC service that the listener calls. Here they are started and stopped.

mod controller;
mod listener;
mod pages;
mod resource;

use std::error::Error;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use csi_client::identity;
use hyper_util::server::graceful::GracefulShutdown;
use proto::differential::differential_snapshot_client::DifferentialSnapshotClient;
use proto::differential::differential_snapshot_server::DifferentialSnapshotServer;
use serve::lease::{Lease, Times};
use serve::program::{self, Stop};
use serve::reviews::Reviews;
use tokio::sync::Semaphore;
use tokio::task::JoinSet;
use tokio_stream::wrappers::UnixListenerStream;
use tonic::transport::Server;

use crate::Differential as Arguments;
use crate::driver::Driver;
use crate::server::{self, Leads, METRICS, Ready};
use controller::Controller;
use listener::Listener;
use pages::Pages;

/// Serves until a signal. Ends with an error when a task of its own does: then it would only seem to work.
pub async fn run(arguments: Arguments) -> Result<(), Box<dyn Error>> {
    let common = arguments.common;
    let ready = Arc::new(Ready::default());
    let mut tasks = JoinSet::new();
    // What can fail at once does so before anything is served.
    let metrics = serve::http::install_metrics(server::DROPPED_LINES)?;
    let http = program::bind_http(common.http_endpoint)?;
    let listener = program::bind(common.bind_address, common.port)?;
    let socket = arguments.socket.path();
    let (grpc, _socket) = serve::socket::bind(socket)
        .await
        .map_err(|error| format!("listen on {} (--socket): {error}", arguments.socket))?;
    let (chain, key) = (common.tls_cert, common.tls_key);
    ready.certificate.load(&chain, &key)?;
    tasks.spawn(ready.certificate.clone().follow(chain, key, server::FILES_EVERY));
    tasks.spawn(ready.certificate.clone().tell_end(server::CERTIFICATE_ENDS));
    let client = serve::questions::client(common.kubeconfig.as_deref()).await?;
    let stop = Stop::watch()?;

    let missing = {
        let ready = ready.clone();
        move || ready.missing()
    };
    tasks.spawn(serve::http::probes(http, metrics, missing));

    let driver = Driver::at(arguments.csi_address.path());
    let driver_name = tokio::select! {
        name = identity::name(&driver.channel) => name,
        () = stop.asked() => return Ok(()),
    };
    tracing::info!(driver = driver_name, address = %listener.local_addr()?, "serving");
    tasks.spawn({
        let (driver, ready) = (driver.clone(), ready.clone());
        async move {
            let tell = |is_ready| ready.has_driver.store(is_ready, Ordering::Relaxed);
            identity::watch(&driver.channel, tell).await;
        }
    });
    let pages = DifferentialSnapshotServer::new(Pages { driver, max_entries: arguments.max_entries });
    tasks.spawn(async move {
        let served =
            Server::builder().add_service(pages).serve_with_incoming(UnixListenerStream::new(grpc)).await;
        tracing::error!(?served, "the service DifferentialSnapshot has ended");
    });
    let controller = Arc::new(Controller {
        client: client.clone(),
        driver_name: driver_name.clone(),
        service_address: arguments.service_address,
        ready_timeout: arguments.ready_timeout,
    });
    let lease =
        Lease::new(client.clone(), &common.namespace, &arguments.lease, &common.pod_name, Times::default());
    let election = tasks.spawn({
        let (lease, ready) = (lease.clone(), ready.clone());
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
        reviews: Reviews::new(client.clone(), common.review_cache, METRICS)?,
        client,
        audience: arguments.audience,
        driver_name,
        pages: DifferentialSnapshotClient::new(identity::lazy_channel(socket)),
        page_timeout: arguments.page_timeout,
        places: Semaphore::new(usize::from(common.max_requests)),
        each: usize::from(common.max_requests).div_ceil(2),
        under_way: Default::default(),
    });
    let config = ready.certificate.clone().server_config();
    let graceful = GracefulShutdown::new();
    tokio::select! {
        () = server::answer(listener, config, listener::router(callbacks), &graceful) => {
            return Err("the callback listener takes no more connections: see the log".into());
        }
        _ = tasks.join_next() => return Err("a task ended unexpectedly: see the log".into()),
        () = stop.asked() => {}
    }
    ready.is_stopping.store(true, Ordering::Relaxed);
    election.abort();
    tokio::join!(lease.release(), server::drain(graceful));
    Ok(())
}
