//! The socket and the server behind it.

use std::io;
use std::os::unix::fs::FileTypeExt;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::Arc;

use tokio::net::UnixListener;
use tokio::sync::watch;
use tokio_stream::StreamExt;
use tokio_stream::wrappers::UnixListenerStream;
use tonic::service::LayerExt;
use tonic::transport::{self, Server};

use super::controller::ControllerService;
use super::group_controller::GroupControllerService;
use super::identity::IdentityService;
use super::node::NodeService;
use super::router::{RouterError, RouterListener};
use super::snapshot_metadata::{SnapshotMetadataService, counted};
use crate::driver::Driver;
use base::Endpoint;
use files::{change, step};
use proto::controller_server::ControllerServer;
use proto::group_controller_server::GroupControllerServer;
use proto::identity_server::IdentityServer;
use proto::node_server::NodeServer;
use proto::snapshot_metadata_server::SnapshotMetadataServer;
use serve::authority::Tolerant;

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
    let listener = listen(endpoint)?;
    let _socket = RemoveOnDrop(endpoint.path().to_owned());
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

/// The services that are asked on behalf of the cluster, and not of the node.
pub(super) fn cluster_services(
    server: &mut Server,
    driver: &Arc<Driver>,
    metadata: SnapshotMetadataService,
) -> transport::server::Router {
    server
        .add_service(IdentityServer::new(IdentityService(driver.clone())))
        .add_service(ControllerServer::new(ControllerService(driver.clone())))
        .add_service(GroupControllerServer::new(GroupControllerService(driver.clone())))
        .add_service(
            counted(driver.metadata.streams().clone()).named_layer(SnapshotMetadataServer::new(metadata)),
        )
}

struct RemoveOnDrop(PathBuf);

impl Drop for RemoveOnDrop {
    fn drop(&mut self) {
        let _ = change::remove_file(&self.0);
    }
}

/// Binds the socket with mode 0660. A stale one, without a server, is replaced; a live one is
/// refused, since two drivers would share its clients.
fn listen(endpoint: &Endpoint) -> Result<UnixListener, EndpointError> {
    let path = endpoint.path();
    let failed = |error: files::Error| EndpointError::Listen(endpoint.clone(), error.source);
    match std::fs::symlink_metadata(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            // One directory alone: a path with a typing error must not grow a tree.
            if let Some(parent) = path.parent()
                && !parent.exists()
            {
                change::create_dir(parent, 0o755).map_err(failed)?;
            }
        }
        Err(error) => return Err(EndpointError::Listen(endpoint.clone(), error)),
        Ok(meta) if !meta.file_type().is_socket() => return Err(EndpointError::NotASocket(endpoint.clone())),
        Ok(_) => match UnixStream::connect(path) {
            Ok(_) => return Err(EndpointError::Live(endpoint.clone())),
            Err(_) => change::remove_file(path).map_err(failed)?,
        },
    }
    #[expect(clippy::disallowed_methods, reason = "this is the step")]
    let listener = step("bind", path, || UnixListener::bind(path)).map_err(failed)?;
    change::set_mode(path, 0o660).map_err(failed)?;
    Ok(listener)
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
