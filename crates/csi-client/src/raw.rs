//! The streams of the SnapshotMetadata service as they are, checked for nothing: what a test of a
//! driver has to look at.

use std::collections::HashMap;

use proto::GetMetadataAllocatedResponse;
use tonic::{Request, Status, Streaming};

use super::Client;

/// What a stream is asked for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Question {
    /// GetMetadataAllocated.
    Allocated {
        /// `snapshot_id`.
        snapshot: String,
    },
    /// GetMetadataDelta.
    Delta {
        /// `base_snapshot_id`.
        base: String,
        /// `target_snapshot_id`.
        target: String,
    },
}

/// A request for a stream.
#[derive(Clone, Debug, Default)]
pub struct Options {
    /// `starting_offset`.
    pub offset: i64,
    /// `max_results`.
    pub max_results: i32,
    /// `secrets`.
    pub secrets: HashMap<String, String>,
    /// The deadline that the driver gets, as a `grpc-timeout` in milliseconds.
    pub timeout_ms: Option<u64>,
}

/// A message as it came.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Message {
    /// `block_metadata_type`, known or not.
    pub style: i32,
    /// `volume_capacity_bytes`.
    pub capacity: i64,
    /// `byte_offset` and `size_bytes` of each tuple.
    pub tuples: Vec<(i64, i64)>,
}

/// An answer under way. Dropped before its end, it is cancelled.
#[derive(Debug)]
pub struct RawStream(Kind);

#[derive(Debug)]
enum Kind {
    Allocated(Streaming<GetMetadataAllocatedResponse>),
    Delta(Streaming<proto::GetMetadataDeltaResponse>),
}

impl RawStream {
    /// The next message; `None` is the end with `OK`.
    pub async fn next(&mut self) -> Result<Option<Message>, Status> {
        let message = match &mut self.0 {
            Kind::Allocated(stream) => stream.message().await?,
            // The two have the same fields.
            Kind::Delta(stream) => stream.message().await?.map(|message| GetMetadataAllocatedResponse {
                block_metadata_type: message.block_metadata_type,
                volume_capacity_bytes: message.volume_capacity_bytes,
                block_metadata: message.block_metadata,
            }),
        };
        Ok(message.map(|message| Message {
            style: message.block_metadata_type,
            capacity: message.volume_capacity_bytes,
            tuples: message
                .block_metadata
                .into_iter()
                .map(|tuple| (tuple.byte_offset, tuple.size_bytes))
                .collect(),
        }))
    }
}

impl Client {
    /// Opens a stream.
    pub async fn open_stream(&mut self, question: &Question, options: &Options) -> Result<RawStream, Status> {
        let Options { offset: starting_offset, max_results, .. } = *options;
        let secrets = options.secrets.clone();
        Ok(RawStream(match question.clone() {
            Question::Allocated { snapshot: snapshot_id } => {
                let request =
                    proto::GetMetadataAllocatedRequest { snapshot_id, starting_offset, max_results, secrets };
                let answer = self.metadata.get_metadata_allocated(timed(request, options)).await?;
                Kind::Allocated(answer.into_inner())
            }
            Question::Delta { base: base_snapshot_id, target: target_snapshot_id } => {
                let request = proto::GetMetadataDeltaRequest {
                    base_snapshot_id,
                    target_snapshot_id,
                    starting_offset,
                    max_results,
                    secrets,
                };
                let answer = self.metadata.get_metadata_delta(timed(request, options)).await?;
                Kind::Delta(answer.into_inner())
            }
        }))
    }
}

fn timed<M>(message: M, options: &Options) -> Request<M> {
    let mut request = Request::new(message);
    if let Some(millis) = options.timeout_ms {
        request.set_timeout(std::time::Duration::from_millis(millis));
    }
    request
}
