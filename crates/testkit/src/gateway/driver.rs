//! A CSI driver that does what a test wants: the snapshot's handle says what is answered. It stands where a real driver
//! would have to be slow, endless or broken on demand; `community` uses the real one.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use crate::plugin::{self, Asked, Messages, Metadata, Served};
use futures_util::{StreamExt, stream};
use parking_lot::Mutex;
use proto::*;
use tonic::{Code, Status};

/// Messages in the answer about a handle `plain-*`, and tuples in each.
pub const MESSAGES: i64 = 3;
pub const TUPLES: i64 = 100;
/// Messages in the answer about a handle `steady-*`; one about `paced-*` has no end.
pub const STEADY_MESSAGES: i64 = 60;
/// The time before each message of both.
const PAUSE: Duration = Duration::from_millis(30);

/// A driver on a socket, until it is dropped.
pub struct Driver {
    pub seen: Arc<Seen>,
    _served: Served,
}

/// What it was asked.
#[derive(Default)]
pub struct Seen {
    /// For what is allocated in these targets.
    pub allocated: Mutex<Vec<GetMetadataDeltaRequest>>,
    pub deltas: Mutex<Vec<GetMetadataDeltaRequest>>,
    pub timeouts: Mutex<Vec<String>>,
    /// Streams that are open now.
    pub open: Mutex<usize>,
}

impl Driver {
    pub fn start(name: &str, socket: &Path) -> Self {
        Self::start_with(name, socket, true)
    }

    /// Without its SnapshotMetadata service, if so.
    pub fn start_with(name: &str, socket: &Path, has_metadata: bool) -> Self {
        let seen = Arc::<Seen>::default();
        let answering = seen.clone();
        let metadata =
            has_metadata.then_some(Metadata(move |asked| std::future::ready(answer(&answering, asked))));
        Driver { seen, _served: Served::start(name, socket, metadata) }
    }
}

/// Counts an open stream.
struct OpenStream(Arc<Seen>);

impl Drop for OpenStream {
    fn drop(&mut self) {
        *self.0.open.lock() -= 1;
    }
}

/// Message `number` of an answer.
fn message(number: i64) -> GetMetadataAllocatedResponse {
    message_of(number, TUPLES)
}

fn message_of(number: i64, tuples: i64) -> GetMetadataAllocatedResponse {
    let first = number * tuples;
    let tuple = |at| BlockMetadata { byte_offset: at * 8192, size_bytes: 4096 };
    GetMetadataAllocatedResponse {
        block_metadata_type: BlockMetadataType::VariableLength.into(),
        volume_capacity_bytes: 1 << 40,
        block_metadata: (first..first + tuples).map(tuple).collect(),
    }
}

/// Messages up to `end`, one at a time, from the one with the offset on.
fn paced(offset: i64, end: i64) -> Messages<GetMetadataAllocatedResponse> {
    let first = offset / (TUPLES * 8192);
    Box::pin(stream::unfold(first, move |number| async move {
        tokio::time::sleep(PAUSE).await;
        (number < end).then(|| (Ok(message(number)), number + 1))
    }))
}

fn answer(seen: &Arc<Seen>, Asked { is_delta, request, timeout }: Asked) -> plugin::Answer {
    let asked = if is_delta { &seen.deltas } else { &seen.allocated };
    asked.lock().push(request.clone());
    // A base that is unknown here too, as after its time is over.
    if request.base_snapshot_id == "forgotten" {
        return Err(Status::not_found("snapshot forgotten does not exist"));
    }
    let (handle, offset) = (&request.target_snapshot_id, request.starting_offset);
    seen.timeouts.lock().push(timeout);
    *seen.open.lock() += 1;
    let open = OpenStream(seen.clone());
    let holding = move |messages: Messages<GetMetadataAllocatedResponse>| -> Messages<_> {
        Box::pin(messages.map(move |message| {
            let _open = &open;
            message
        }))
    };
    let whole = || stream::iter((0..MESSAGES).map(|number| Ok(message(number))));
    Ok(match handle.split('-').next().unwrap_or_default() {
        "plain" => holding(Box::pin(whole())),
        // What the bench measures: as many messages and tuples as its bare server sends.
        "long" => holding(Box::pin(stream::iter((0..4096).map(|number| Ok(message_of(number, 4096)))))),
        // A message now and then, from the one with the offset on. None is sent ahead, so one that arrives is new.
        "steady" => holding(paced(offset, STEADY_MESSAGES)),
        "paced" => holding(paced(offset, i64::MAX)),
        // Never ends, and is always quicker than its reader.
        "endless" => holding(Box::pin(stream::iter((0i64..).map(|number| Ok(message(number)))))),
        // The first message comes after a second, and no second one ever.
        "slow" => {
            let first = async {
                tokio::time::sleep(Duration::from_secs(1)).await;
                Ok(message(0))
            };
            holding(Box::pin(stream::once(first).chain(stream::pending())))
        }
        "midway" => {
            let status = Status::with_details(
                Code::DataLoss,
                "block 7 is gone: ünreadable",
                b"detail".to_vec().into(),
            );
            holding(Box::pin(whole().chain(stream::iter([Err(status)]))))
        }
        // It does not know the snapshot.
        _ => return Err(Status::not_found(format!("snapshot {handle} does not exist"))),
    })
}
