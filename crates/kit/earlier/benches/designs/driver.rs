//! A CSI driver whose deltas are as long as their handle says, and cost nothing to find: every second block of a volume.

use std::path::Path;

use futures_util::{StreamExt, stream};
use proto::*;
use testkit::plugin::{self, Asked, Metadata};
use tonic::Status;

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
    let answer = |Asked { request, .. }: Asked| std::future::ready(messages(&request));
    plugin::serve(name, socket, Some(Metadata(answer))).await;
}

/// The messages of a stream: each is made when it is sent. One without tuples, where there are none.
fn messages(request: &GetMetadataDeltaRequest) -> plugin::Answer {
    let GetMetadataDeltaRequest { target_snapshot_id: target, starting_offset, max_results, .. } = request;
    let blocks = target.strip_prefix("target-").and_then(|digits| digits.parse::<u64>().ok());
    let blocks = blocks.ok_or_else(|| Status::not_found(format!("snapshot {target} does not exist")))?;
    let first = (*starting_offset as u64 / BLOCK).div_ceil(2).min(blocks);
    let length = if *max_results == 0 { MESSAGE } else { (*max_results as u64).min(MESSAGE) };
    let begins = (first..blocks.max(first + 1)).step_by(length as usize);
    let message = move |begin: u64| {
        let tuple =
            |number: u64| BlockMetadata { byte_offset: offset(number) as i64, size_bytes: BLOCK as i64 };
        Ok(GetMetadataAllocatedResponse {
            block_metadata_type: BlockMetadataType::FixedLength.into(),
            volume_capacity_bytes: offset(blocks) as i64,
            block_metadata: (begin..(begin + length).min(blocks)).map(tuple).collect(),
        })
    };
    Ok(stream::iter(begins.map(message)).boxed())
}
