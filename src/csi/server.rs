//! The socket and the server behind it.

use std::io;
use std::sync::Arc;

use tokio::sync::watch;
use tokio_stream::StreamExt;
use tokio_stream::wrappers::UnixListenerStream;
use tonic::transport::{self, Server};

use super::node::NodeService;
use super::router::{RouterError, RouterListener};
use super::services::cluster_services;
use super::snapshot_metadata::SnapshotMetadataService;
use crate::driver::Driver;
use base::Endpoint;
use proto::node_server::NodeServer;
use serve::authority::Tolerant;
use serve::socket;

/// Why the socket could not be served.
#[derive(Debug, thiserror::Error)]
pub enum EndpointError {
    /// Another process answers there.
    #[error("another process listens on {0}: stop it, or choose another --endpoint")]
    Live(Endpoint),
    /// The path is there, and is not a socket.
    #[error("{0} is not a socket: move it away, or choose another --endpoint")]
    NotASocket(Endpoint),
    /// The kernel refused.
    #[error("listen on {0}")]
    Listen(Endpoint, #[source] io::Error),
    /// The server failed.
    #[error("serve {0}")]
    Serve(Endpoint, #[source] transport::Error),
    /// The router could not be served.
    #[error(transparent)]
    Router(#[from] RouterError),
}

/// Serves all services on `endpoint`, and those of the cluster where the `router` is waited for, until `shutdown` resolves and
/// the calls under way are done. The socket is removed at the end.
pub async fn serve(
    driver: Arc<Driver>,
    endpoint: &Endpoint,
    router: Option<RouterListener>,
    shutdown: impl Future<Output = ()>,
) -> Result<(), EndpointError> {
    let (listener, _socket) = socket::bind(endpoint.path()).await.map_err(|error| match error {
        socket::Error::Live => EndpointError::Live(endpoint.clone()),
        socket::Error::NotASocket => EndpointError::NotASocket(endpoint.clone()),
        socket::Error::Io(error) => EndpointError::Listen(endpoint.clone(), error),
    })?;
    tracing::info!(%endpoint, driver = driver.config().driver_name, node = driver.config().node_id, "listening");
    let incoming = UnixListenerStream::new(listener).map(|connection| connection.map(Tolerant::new));
    // One for both: what streams may take is bounded for all of them together.
    let metadata = SnapshotMetadataService::new(driver.clone());
    let (stop, mut stopped) = watch::channel(false);
    let shutdown = async move {
        shutdown.await;
        let _ = stop.send(true);
    };
    let local = async {
        cluster_services(&mut Server::builder(), &driver, metadata.clone())
            .add_service(NodeServer::new(NodeService(driver.clone())))
            .serve_with_incoming_shutdown(incoming, shutdown)
            .await
            .map_err(|error| EndpointError::Serve(endpoint.clone(), error))
    };
    let cluster = async {
        let Some(router) = router else { return Ok(()) };
        // Ends too when the socket's server is gone.
        let shutdown = async move { drop(stopped.wait_for(|stopped| *stopped).await) };
        Ok(router.serve(driver.clone(), metadata.clone(), shutdown).await?)
    };
    // The first error ends both.
    tokio::try_join!(local, cluster).map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn endpoints_are_unix_sockets_at_absolute_paths() {
        for text in ["unix:///run/x.sock", "unix:/run/x.sock", "/run/x.sock"] {
            assert_eq!(text.parse::<Endpoint>().map(|e| e.to_string()), Ok("unix:///run/x.sock".into()));
        }
        for text in ["", "x.sock", "unix://x.sock", "tcp://127.0.0.1:1"] {
            assert!(text.parse::<Endpoint>().is_err(), "{text:?}");
        }
    }
}
