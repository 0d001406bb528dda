//! Straight to a CSI driver, over its socket.

use std::collections::HashMap;
use std::fmt;
use std::path::PathBuf;

use hyper_util::rt::TokioIo;
use proto::answers::Checked;
use proto::snapshot_metadata_client::SnapshotMetadataClient;
use tokio::net::UnixStream;
use tonic::transport::{Endpoint, Uri};

use crate::error::Error;
use crate::query::{Policy, Query};
use crate::transport::{MAX_MESSAGE, Messages, configured, messages};

/// A CSI driver's socket.
pub(crate) struct Socket {
    path: PathBuf,
    secrets: HashMap<String, String>,
}

impl fmt::Debug for Socket {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // Without the secrets.
        f.debug_struct("Socket").field("path", &self.path).finish_non_exhaustive()
    }
}

impl Socket {
    pub fn new(endpoint: &str, secrets: HashMap<String, String>) -> Result<Self, Error> {
        let path = endpoint.strip_prefix("unix://").or_else(|| endpoint.strip_prefix("unix:"));
        let path = path.unwrap_or(endpoint);
        match path.starts_with('/') {
            true => Ok(Socket { path: path.into(), secrets }),
            false => Err(Error::Endpoint(endpoint.to_owned())),
        }
    }

    async fn connect(&self, policy: &Policy) -> Result<Checked, Error> {
        let path = self.path.clone();
        let connector = tower::service_fn(move |_: Uri| {
            let path = path.clone();
            async move { UnixStream::connect(path).await.map(TokioIo::new) }
        });
        // The address is not used: the connector always takes the socket.
        let endpoint = configured(Endpoint::from_static("http://localhost"), policy);
        endpoint.connect_with_connector(connector).await.map(Checked).map_err(|source| Error::Connect {
            to: format!("unix://{}", self.path.display()),
            source: source.into(),
        })
    }

    /// Asks, from an offset on.
    pub async fn open(&self, query: &Query, offset: i64, policy: &Policy) -> Result<Messages, Error> {
        let channel = self.connect(policy).await?;
        let mut client = SnapshotMetadataClient::new(channel).max_decoding_message_size(MAX_MESSAGE);
        let (starting_offset, max_results) = (offset, policy.max_results());
        let secrets = self.secrets.clone();
        let answer = match query.clone() {
            Query::Allocated { snapshot: snapshot_id } => {
                let request =
                    proto::GetMetadataAllocatedRequest { snapshot_id, starting_offset, max_results, secrets };
                client.get_metadata_allocated(request).await.map(messages)
            }
            Query::Delta { base: base_snapshot_id, target: target_snapshot_id } => {
                let request = proto::GetMetadataDeltaRequest {
                    base_snapshot_id,
                    target_snapshot_id,
                    starting_offset,
                    max_results,
                    secrets,
                };
                client.get_metadata_delta(request).await.map(messages)
            }
        };
        answer.map_err(|status| Error::of_status(query.call(), status))
    }
}
