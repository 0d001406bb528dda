//! The CSI driver behind the gateway: any one, on its socket.

use std::path::PathBuf;
use std::time::Duration;

use hyper_util::rt::TokioIo;
use tokio::net::UnixStream;
use tonic::transport::{Channel, Endpoint, Uri};
use tonic::{Code, Status};

use proto::identity_client::IdentityClient;
use proto::{GetPluginInfoRequest, ProbeRequest};

/// What one stream may send ahead of its reader, in bytes: a reader that stops costs this and no more.
const STREAM_WINDOW: u32 = 64 << 10;
/// How long an answer about the driver itself may take.
const PATIENCE: Duration = Duration::from_secs(5);
/// How often it is asked while it is away, and later whether it is still there.
const EVERY: Duration = Duration::from_secs(1);
/// Between two pings, and until a connection that does not answer one is given up.
const KEEPALIVE: Duration = Duration::from_secs(20);

/// A connection to the driver that is made when it is used, and made again when it was lost.
#[derive(Clone, Debug)]
pub struct Driver {
    channel: Channel,
}

impl Driver {
    /// The driver on the socket at `path`, with room for `streams` at once.
    pub fn at(path: PathBuf, streams: usize) -> Self {
        let connector = tower::service_fn(move |_: Uri| {
            let path = path.clone();
            async move { UnixStream::connect(path).await.map(TokioIo::new) }
        });
        // Readers that stop fill their own windows and never the connection's: it has room for all of them.
        let window = u64::from(STREAM_WINDOW) * (streams as u64 + 1);
        let endpoint = Endpoint::from_static("http://localhost")
            .initial_stream_window_size(STREAM_WINDOW)
            .initial_connection_window_size(
                u32::try_from(window).map_or(i32::MAX as u32, |w| w.min(i32::MAX as u32)),
            )
            .http2_keep_alive_interval(KEEPALIVE)
            .keep_alive_timeout(KEEPALIVE);
        Driver { channel: endpoint.connect_with_connector_lazy(connector) }
    }

    /// The connection.
    pub fn channel(&self) -> Channel {
        self.channel.clone()
    }

    /// The driver's name, as soon as it says it.
    pub async fn name(&self) -> String {
        let mut identity = IdentityClient::new(self.channel());
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
        let mut identity = IdentityClient::new(self.channel());
        let mut was_ready = false;
        loop {
            let probe = tokio::time::timeout(PATIENCE, identity.probe(ProbeRequest {})).await;
            // A driver that says nothing about itself is ready (CSI spec, "Probe").
            let is_ready = matches!(probe, Ok(Ok(answer)) if answer.get_ref().ready != Some(false));
            if is_ready != was_ready {
                tracing::info!(is_ready, "the CSI driver");
                was_ready = is_ready;
            }
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
