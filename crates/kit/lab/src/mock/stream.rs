//! What the streams tell.

use futures_util::Stream;
use proto::*;
use tokio::time::Instant;
use tonic::Status;

use super::data::Tuples;
use super::driver::{Driver, Settings};
use crate::faults::Stream as Asked;

/// Tuples of a message at most: with 22 bytes each they fit gRPC's 4 MiB.
const TUPLES: usize = 100_000;

impl Driver {
    /// The messages of a stream. Each is made when it is asked for.
    pub fn stream(
        &self,
        asked: &Asked,
        deadline: Option<Instant>,
    ) -> Result<impl Stream<Item = Result<GetMetadataDeltaResponse, Status>> + Send + 'static, Status> {
        let state = self.state();
        let Asked { offset, max_results, .. } = *asked;
        let target = state.snapshot(&asked.target)?;
        let since = match &asked.base {
            None => 0,
            Some(base) => {
                let base = match state.snapshots.get(base) {
                    Some(gone) if gone.is_deleted && self.settings.keeps_bases => gone,
                    _ => state.snapshot(base)?,
                };
                if base.volume != target.volume {
                    return Err(Status::invalid_argument("base and target are snapshots of two volumes"));
                }
                if base.number > target.number {
                    return Err(Status::invalid_argument("the target was created before the base"));
                }
                base.history.len()
            }
        };
        let capacity = target.capacity;
        let offset = u64::try_from(offset).ok().filter(|offset| *offset <= capacity).ok_or_else(|| {
            Status::out_of_range(format!(
                "starting_offset {offset} is not in the volume, which has {capacity} bytes"
            ))
        })?;
        if max_results < 0 {
            return Err(Status::invalid_argument(format!("max_results {max_results} is negative")));
        }
        let per_message = match max_results {
            0 => self.settings.tuples_per_message,
            bound => bound as usize,
        };
        let Settings { block_size, fixed, .. } = self.settings;
        let history = if offset == capacity { &[] } else { &target.history[since..] };
        let mut tuples = Tuples::new(history, offset, block_size, capacity, fixed).peekable();
        let style = if fixed { BlockMetadataType::FixedLength } else { BlockMetadataType::VariableLength };
        let mut is_first = true;
        Ok(futures_util::stream::iter(std::iter::from_fn(move || {
            // An answer without tuples has one message, which tells type and capacity.
            if !std::mem::take(&mut is_first) && tuples.peek().is_none() {
                return None;
            }
            if deadline.is_some_and(|deadline| Instant::now() >= deadline) {
                tuples = Tuples::new(&[], 0, block_size, capacity, fixed).peekable();
                return Some(Err(Status::deadline_exceeded("the deadline has passed")));
            }
            let taken = tuples.by_ref().take(per_message.min(TUPLES));
            let block_metadata = taken
                .map(|(start, end)| BlockMetadata {
                    byte_offset: start as i64,
                    size_bytes: (end - start) as i64,
                })
                .collect();
            Some(Ok(GetMetadataDeltaResponse {
                block_metadata_type: style.into(),
                volume_capacity_bytes: capacity as i64,
                block_metadata,
            }))
        })))
    }
}
