//! `deltapath-router delete-volume`: one volume, by its id, through a router. For a volume that exists twice.

use std::path::Path;

use hyper_util::rt::TokioIo;
use proto::DeleteVolumeRequest;
use proto::controller_client::ControllerClient;
use tokio::net::UnixStream;
use tonic::transport::{Channel, Endpoint, Uri};

/// A connection to a CSI socket, made when it is used.
pub fn channel(socket: &Path, timeout: std::time::Duration) -> Channel {
    let socket = socket.to_owned();
    let connect = tower::service_fn(move |_: Uri| {
        let socket = socket.clone();
        async move { UnixStream::connect(socket).await.map(TokioIo::new) }
    });
    Endpoint::from_static("http://localhost").timeout(timeout).connect_with_connector_lazy(connect)
}

/// Deletes it, unless it is in use.
pub async fn volume(socket: &Path, volume_id: String) -> Result<(), String> {
    let mut client = ControllerClient::new(channel(socket, std::time::Duration::from_secs(60)));
    let request = DeleteVolumeRequest { volume_id, ..DeleteVolumeRequest::default() };
    let done = client.delete_volume(request).await;
    done.map(drop).map_err(|status| {
        format!("delete it through {}: {:?}: {}", socket.display(), status.code(), status.message())
    })
}
