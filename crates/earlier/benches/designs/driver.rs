//! A CSI driver whose deltas are as long as their handle says, and cost nothing to find: every second block of a volume.

use std::path::Path;
use std::pin::Pin;

use futures_util::{Stream, StreamExt, stream};
use proto::identity_server::IdentityServer;
use proto::snapshot_metadata_server::{SnapshotMetadata, SnapshotMetadataServer};
use proto::*;
use testkit::plugin::Plugin;
use tokio::net::UnixListener;
use tokio_stream::wrappers::UnixListenerStream;
use tonic::transport::Server;
use tonic::{Request, Response, Status, async_trait};

/// In bytes.
pub const BLOCK: u64 = 4096;
/// Tuples in a message, where the client sets no bound.
const MESSAGE: u64 = 4096;

/// The handle of the snapshot that differs from the base in this number of blocks, and holds these.
pub fn handle(blocks: u64) -> String {
    format!("target-{blocks}")
}

/// Where the changed block with this number begins.
pub fn offset(number: u64) -> u64 {
    number * 2 * BLOCK
}

/// Serves until its process ends.
pub async fn serve(name: &str, socket: &Path) {
    let listener = UnixListenerStream::new(UnixListener::bind(socket).expect("bind"));
    Server::builder()
        .add_service(IdentityServer::new(Plugin { name: name.to_owned() }))
        .add_service(SnapshotMetadataServer::new(Metadata))
        .serve_with_incoming(listener)
        .await
        .expect("serve");
}

struct Metadata;

type Messages<M> = Pin<Box<dyn Stream<Item = Result<M, Status>> + Send>>;

/// The messages of a stream: each is made when it is sent. One without tuples, where there are none.
fn messages(
    target: &str,
    from: i64,
    max_results: i32,
) -> Result<impl Stream<Item = GetMetadataDeltaResponse> + Send + use<>, Status> {
    let blocks = target.strip_prefix("target-").and_then(|digits| digits.parse::<u64>().ok());
    let blocks = blocks.ok_or_else(|| Status::not_found(format!("snapshot {target} does not exist")))?;
    let first = (from as u64 / BLOCK).div_ceil(2).min(blocks);
    let length = if max_results == 0 { MESSAGE } else { (max_results as u64).min(MESSAGE) };
    let begins = (first..blocks.max(first + 1)).step_by(length as usize);
    Ok(stream::iter(begins.map(move |begin| {
        GetMetadataDeltaResponse {
            block_metadata_type: BlockMetadataType::FixedLength.into(),
            volume_capacity_bytes: offset(blocks) as i64,
            block_metadata: (begin..(begin + length).min(blocks))
                .map(|number| BlockMetadata { byte_offset: offset(number) as i64, size_bytes: BLOCK as i64 })
                .collect(),
        }
    })))
}

#[async_trait]
impl SnapshotMetadata for Metadata {
    type GetMetadataAllocatedStream = Messages<GetMetadataAllocatedResponse>;
    type GetMetadataDeltaStream = Messages<GetMetadataDeltaResponse>;

    async fn get_metadata_allocated(
        &self,
        request: Request<GetMetadataAllocatedRequest>,
    ) -> Result<Response<Self::GetMetadataAllocatedStream>, Status> {
        let request = request.into_inner();
        let messages = messages(&request.snapshot_id, request.starting_offset, request.max_results)?;
        let messages = messages.map(|message| {
            Ok(GetMetadataAllocatedResponse {
                block_metadata_type: message.block_metadata_type,
                volume_capacity_bytes: message.volume_capacity_bytes,
                block_metadata: message.block_metadata,
            })
        });
        Ok(Response::new(messages.boxed()))
    }

    async fn get_metadata_delta(
        &self,
        request: Request<GetMetadataDeltaRequest>,
    ) -> Result<Response<Self::GetMetadataDeltaStream>, Status> {
        let request = request.into_inner();
        let messages = messages(&request.target_snapshot_id, request.starting_offset, request.max_results)?;
        Ok(Response::new(messages.map(Ok).boxed()))
    }
}
