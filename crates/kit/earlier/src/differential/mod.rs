//! The second design: DifferentialSnapshot, a controller that publishes a callback URL, a listener behind that URL, and the
//! gRPC service that the listener calls. Here they are started and stopped.

mod controller;
mod listener;
mod pages;
mod resource;

use std::error::Error;
use std::sync::Arc;

use csi_client::identity;
use proto::differential::differential_snapshot_client::DifferentialSnapshotClient;
use proto::differential::differential_snapshot_server::DifferentialSnapshotServer;
use serve::reviews::Reviews;
use tokio::sync::Semaphore;
use tokio_stream::wrappers::UnixListenerStream;
use tonic::transport::Server as Grpc;

use crate::Differential as Arguments;
use crate::driver::Driver;
use crate::server::{METRICS, Ready, Server};
use controller::Controller;
use listener::Listener;
use pages::Pages;

/// Serves until a signal.
pub async fn run(arguments: Arguments) -> Result<(), Box<dyn Error>> {
    let common = arguments.common;
    let ready = Arc::new(Ready::default());
    let socket = arguments.socket.path();
    let (grpc, _socket) = serve::socket::bind(socket)
        .await
        .map_err(|error| format!("listen on {} (--socket): {error}", arguments.socket))?;
    let missing = {
        let ready = ready.clone();
        move || ready.missing()
    };
    let mut server = Server::begin(&common, &ready.certificate, missing).await?;
    let driver = Driver::at(arguments.csi_address.path());
    let Some(driver_name) = server.driver_name(&driver, &ready).await? else { return Ok(()) };
    let pages = DifferentialSnapshotServer::new(Pages { driver, max_entries: arguments.max_entries });
    server.tasks.spawn(async move {
        let served =
            Grpc::builder().add_service(pages).serve_with_incoming(UnixListenerStream::new(grpc)).await;
        tracing::error!(?served, "the service DifferentialSnapshot has ended");
    });
    let client = server.client.clone();
    let controller = Arc::new(Controller {
        client: client.clone(),
        driver_name: driver_name.clone(),
        service_address: arguments.service_address,
        ready_timeout: arguments.ready_timeout,
    });
    let callbacks = Arc::new(Listener {
        reviews: Reviews::new(client.clone(), common.review_cache, METRICS)?,
        client,
        audience: arguments.audience,
        driver_name,
        pages: DifferentialSnapshotClient::new(identity::lazy_channel(socket)),
        page_timeout: arguments.page_timeout,
        places: Arc::new(Semaphore::new(usize::from(common.max_requests))),
        each: usize::from(common.max_requests).div_ceil(2),
        under_way: Default::default(),
    });
    let lease = server.lease(&common, &arguments.lease);
    let work = move || controller.clone().run();
    server.serve_elected(ready, lease, work, listener::router(callbacks), "the callback listener").await
}
