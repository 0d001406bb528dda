//! The CSI driver behind the gateway: any one, on its socket.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use hyper_util::rt::TokioIo;
use serve::upstream::{self, ORIGIN, WideWindows};
use tokio::net::UnixStream;
use tonic::codegen::http::response;
use tonic::transport::{Channel, Endpoint, Uri};
use tonic::{Code, Status};

use proto::identity_client::IdentityClient;
use proto::{GetPluginInfoRequest, ProbeRequest};

/// How long an answer about the driver itself may take.
const PATIENCE: Duration = Duration::from_secs(5);
/// How often it is asked while it is away, and later whether it is still there.
const EVERY: Duration = Duration::from_secs(1);

/// What fast streams together may have sent ahead, in bytes.
const WIDE_WINDOWS: usize = 16 << 20;

/// The driver on its socket.
#[derive(Clone)]
pub struct Driver {
    path: PathBuf,
    /// For calls about the driver itself. It is made when it is used, and made again when it was lost.
    channel: Channel,
    windows: Arc<WideWindows>,
}

/// The body of a driver's answer.
pub type Answer = upstream::Answer<UnixStream>;

impl Driver {
    /// The driver on the socket at `path`.
    pub fn at(path: PathBuf) -> Self {
        let socket = path.clone();
        let connector = tower::service_fn(move |_: Uri| {
            let socket = socket.clone();
            async move { UnixStream::connect(socket).await.map(TokioIo::new) }
        });
        let channel = Endpoint::from_static(ORIGIN).connect_with_connector_lazy(connector);
        Driver { path, channel, windows: WideWindows::of(WIDE_WINDOWS) }
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
        upstream::call(socket, request, body, self.windows.clone()).await.map_err(|error| away(&error))
    }

    /// The driver's name, as soon as it says it.
    pub async fn name(&self) -> String {
        let mut identity = IdentityClient::new(self.channel.clone());
        let mut has_said = None;
        loop {
            let asked =
                tokio::time::timeout(PATIENCE, identity.get_plugin_info(GetPluginInfoRequest {})).await;
            match asked {
                Ok(Ok(info)) => return info.into_inner().name,
                Ok(Err(status)) => {
                    if has_said != Some(status.code()) {
                        tracing::warn!(reason = status.message(), "the CSI driver does not answer yet");
                    }
                    has_said = Some(status.code());
                }
                Err(_) => tracing::warn!("the CSI driver does not answer in time"),
            }
            tokio::time::sleep(EVERY).await;
        }
    }

    /// Whether the driver is there and ready, over and over.
    pub async fn watch(&self, tell: impl Fn(bool)) {
        let mut identity = IdentityClient::new(self.channel.clone());
        loop {
            let probe = tokio::time::timeout(PATIENCE, identity.probe(ProbeRequest {})).await;
            // A driver that says nothing about itself is ready (CSI spec, "Probe").
            let is_ready = matches!(probe, Ok(Ok(answer)) if answer.get_ref().ready != Some(false));
            tell(is_ready);
            tokio::time::sleep(EVERY).await;
        }
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
