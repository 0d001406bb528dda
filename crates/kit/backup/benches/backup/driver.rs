//! A CSI driver that answers from memory, so that what it takes does not count.

use std::collections::HashMap;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use futures_util::{StreamExt, stream};
use parking_lot::{Mutex, MutexGuard};
use proto::{BlockMetadata, BlockMetadataType, GetMetadataAllocatedResponse};
use testkit::plugin::{Asked, Metadata, Served};
use tonic::Status;

use crate::source::Source;

/// Tuples in a message.
const TUPLES: usize = 256;

/// Answers by base, where there is one, and target.
type Answers = HashMap<(Option<String>, String), Vec<BlockMetadata>>;

/// A running driver of one volume.
pub struct Driver {
    answers: Arc<Mutex<Answers>>,
    socket: PathBuf,
    _served: Served,
}

fn lock(answers: &Mutex<Answers>) -> MutexGuard<'_, Answers> {
    answers.lock()
}

fn tuples(ranges: &[Range<u64>]) -> Vec<BlockMetadata> {
    let tuple = |range: &Range<u64>| BlockMetadata {
        byte_offset: range.start as i64,
        size_bytes: (range.end - range.start) as i64,
    };
    ranges.iter().map(tuple).collect()
}

impl Driver {
    /// With one snapshot that holds what the source does.
    pub fn start(socket: &Path, source: &Source, handle: &str) -> Self {
        let first = HashMap::from([((None, handle.to_owned()), tuples(&source.ranges()))]);
        let answers = Arc::new(Mutex::new(first));
        let (known, volume_capacity_bytes) = (answers.clone(), source.size as i64);
        let answer = move |Asked { is_delta, request, .. }: Asked| {
            let base = is_delta.then_some(request.base_snapshot_id);
            let message = |tuples: &[BlockMetadata]| {
                Ok(GetMetadataAllocatedResponse {
                    block_metadata_type: BlockMetadataType::VariableLength.into(),
                    volume_capacity_bytes,
                    block_metadata: tuples.to_vec(),
                })
            };
            let known = lock(&known);
            let messages = known.get(&(base, request.target_snapshot_id)).map(|tuples| {
                let messages: Vec<_> = tuples.chunks(TUPLES).map(message).collect();
                stream::iter(messages).boxed()
            });
            std::future::ready(messages.ok_or_else(|| Status::not_found("no such snapshot")))
        };
        let served = Served::start("bench", socket, Some(Metadata(answer)));
        Driver { answers, socket: socket.to_owned(), _served: served }
    }

    pub fn endpoint(&self) -> String {
        format!("unix://{}", self.socket.display())
    }

    pub fn delta(&self, base: &str, target: &str, changed: &[Range<u64>]) {
        lock(&self.answers).insert((Some(base.to_owned()), target.to_owned()), tuples(changed));
    }
}
