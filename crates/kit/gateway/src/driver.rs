//! The CSI driver behind the gateway: any one, on its socket.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use bytes::Bytes;
use csi_client::identity;
use proto::answers::Checked;
use serve::upstream::{self, Answer, Upstream, WideWindows};
use tokio::net::UnixStream;
use tokio::time::Instant;
use tonic::codegen::http::response;
use tonic::{Code, Status};

/// What streams with wide windows may have sent ahead together, in bytes.
const WIDE_WINDOWS: usize = 8 << 20;

#[derive(Clone)]
pub struct Driver {
    path: PathBuf,
    /// For calls about the driver itself.
    pub channel: Checked,
    upstream: Arc<Upstream>,
}

impl Driver {
    pub fn at(path: &Path) -> Self {
        let channel = identity::lazy_channel(path);
        let upstream = Upstream::new(WideWindows::of(WIDE_WINDOWS), upstream::RARELY);
        Driver { path: path.to_owned(), channel, upstream: Arc::new(upstream) }
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
        self.upstream.call(UnixStream::connect(&self.path), request, body).await.map_err(|error| lost(&error))
    }
}

/// The answer where the driver could not be reached, or its own broke.
pub fn lost(error: &upstream::Error) -> Status {
    tracing::warn!(error = error as &dyn std::error::Error, "a call to the CSI driver broke");
    match error.verdict() {
        Some((code, what)) => Status::new(code, format!("the CSI driver {what}")),
        None => Status::unavailable("the CSI driver does not answer on its socket: try again"),
    }
}

/// The answer where the driver's own is not whole.
pub fn cut_short(code: Code, why: &str) -> Status {
    tracing::warn!(why, "the CSI driver's answer is cut short");
    let what = format!("the CSI driver's answer is cut short, {why}: continue after the last tuple");
    Status::new(code, what)
}
