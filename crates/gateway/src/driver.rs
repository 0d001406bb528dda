//! The CSI driver behind the gateway: any one, on its socket.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

use bytes::Bytes;
use csi_client::identity;
use serve::upstream::{self, WideWindows};
use tokio::net::UnixStream;
use tonic::codegen::http::response;
use tonic::transport::Channel;
use tonic::{Code, Status};

/// What fast streams together may have sent ahead, in bytes.
const WIDE_WINDOWS: usize = 16 << 20;

/// The driver on its socket.
#[derive(Clone)]
pub struct Driver {
    path: PathBuf,
    /// For calls about the driver itself.
    pub channel: Channel,
    windows: Arc<WideWindows>,
}

/// The body of a driver's answer.
pub type Answer = upstream::Answer<UnixStream>;

impl Driver {
    /// The driver on the socket at `path`.
    pub fn at(path: &Path) -> Self {
        let channel = identity::lazy_channel(path);
        Driver { path: path.to_owned(), channel, windows: WideWindows::of(WIDE_WINDOWS) }
    }

    /// Opens a stream: the head of the answer, and its body.
    pub async fn open(
        &self,
        path: &'static str,
        body: Bytes,
        deadline: Option<Instant>,
    ) -> Result<(response::Parts, Answer), Status> {
        let request = upstream::request(path, deadline)
            .map_err(|error| Status::internal(format!("address the CSI driver: {error}")))?;
        let socket = UnixStream::connect(&self.path).await.map_err(|error| away(&error))?;
        upstream::call(socket, request, body, self.windows.clone(), upstream::RARELY)
            .await
            .map_err(|error| away(&error))
    }
}

/// The answer where the driver could not be reached, or was lost in the middle.
pub fn away(error: &(dyn std::error::Error + 'static)) -> Status {
    tracing::warn!(error, "the CSI driver is away");
    Status::new(Code::Unavailable, "the CSI driver does not answer on its socket: try again")
}

/// The answer where the driver's own ended without a status.
pub fn cut_short(why: &str) -> Status {
    tracing::warn!(why, "the CSI driver's answer is cut short");
    Status::unavailable("the CSI driver's answer is cut short: try again behind the last tuple")
}
