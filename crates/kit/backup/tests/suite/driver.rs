//! A CSI driver whose snapshots are models: it answers from them, and fails and lies on demand.

use std::collections::{HashMap, VecDeque};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use files::pattern::Image;
use futures_util::{StreamExt, stream};
use proto::{BlockMetadata, BlockMetadataType, GetMetadataAllocatedResponse};
use testkit::plugin::{self, Asked, Metadata, Served};
use tonic::Status;

use crate::tool::{BLOCK, Place, json};

/// What goes wrong with one stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// It is cut after this number of messages.
    Cut(usize),
    /// It fails for good after this number of messages.
    Breaks(usize),
    /// It ends after this number of messages, since the driver has lost the base.
    Loses(usize),
    /// It is not what the specification says, from this message on.
    Lies(Lie, usize),
    /// It begins at the first range, whatever offset was asked for; that is allowed.
    FromTheBeginning,
    /// It begins half a second late.
    Late,
    /// There are no deltas, in this and all later calls.
    NoDelta,
    /// The base is of another volume, in this and all later calls.
    OtherVolume,
}

/// How a stream breaks the specification.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Lie {
    /// Two messages have changed places.
    SwappedMessages,
    /// The ranges of a message come backwards.
    SwappedRanges,
    /// A range comes twice.
    Overlap,
    /// A range lies behind the end of the volume.
    BeyondEnd,
    /// A range begins before the volume.
    Negative,
    /// A range is empty.
    Empty,
    /// The volume has another size all at once.
    Capacity,
    /// The style of the ranges is another all at once.
    Style,
    /// It ends with OK before its first message.
    NoMessage,
}

impl Lie {
    pub const ALL: [Lie; 9] = [
        Lie::SwappedMessages,
        Lie::SwappedRanges,
        Lie::Overlap,
        Lie::BeyondEnd,
        Lie::Negative,
        Lie::Empty,
        Lie::Capacity,
        Lie::Style,
        Lie::NoMessage,
    ];

    /// Spoils an honest answer; one that is too short for the lie stays as it is.
    fn spoil(self, messages: &mut Vec<GetMetadataAllocatedResponse>, at: usize) {
        let Some(last) = messages.len().checked_sub(1) else { return };
        let at = at.min(last);
        let ranges = &mut messages[at].block_metadata;
        match self {
            Lie::SwappedMessages => messages.swap(at, last),
            Lie::SwappedRanges => ranges.reverse(),
            Lie::Overlap => ranges.extend(ranges.first().copied()),
            Lie::BeyondEnd => {
                let end = messages[at].volume_capacity_bytes;
                let beyond = BlockMetadata { byte_offset: end, size_bytes: BLOCK as i64 };
                messages[at].block_metadata.push(beyond);
            }
            Lie::Negative => ranges.iter_mut().for_each(|range| range.byte_offset = -range.byte_offset - 1),
            Lie::Empty => ranges.iter_mut().for_each(|range| range.size_bytes = 0),
            Lie::Capacity => messages[at].volume_capacity_bytes += BLOCK as i64,
            Lie::Style => messages[at].block_metadata_type = BlockMetadataType::FixedLength.into(),
            Lie::NoMessage => messages.clear(),
        }
    }
}

#[derive(Default)]
struct State {
    snapshots: HashMap<String, (Image, u64)>,
    script: VecDeque<Fault>,
    calls: usize,
}

/// A running driver.
pub struct Driver {
    state: Arc<Mutex<State>>,
    socket: PathBuf,
    _served: Served,
}

impl Driver {
    pub fn start(socket: &Path) -> Self {
        let state = Arc::<Mutex<State>>::default();
        let known = state.clone();
        let answer = move |asked| {
            let state = known.clone();
            async move { answer(&state, asked).await }
        };
        let served = Served::start("models", socket, Some(Metadata(answer)));
        Driver { state, socket: socket.to_owned(), _served: served }
    }

    /// One in a new place.
    pub fn anew() -> (Place, Self) {
        let place = Place::new();
        let driver = Self::start(&place.path("csi.sock"));
        (place, driver)
    }

    /// A backup of a snapshot, which the image of that place holds; not started.
    pub fn command(&self, place: &Place, wish: &str, handle: &str) -> Command {
        place.backup(wish, &["--endpoint", &self.endpoint(), "--snapshot", handle])
    }

    pub fn back_up(&self, place: &Place, wish: &str, handle: &str) -> serde_json::Value {
        json(0, self.command(place, wish, handle))
    }

    pub fn endpoint(&self) -> String {
        format!("unix://{}", self.socket.display())
    }

    pub fn snapshot(&self, handle: &str, image: &Image, size: u64) {
        self.state.lock().unwrap().snapshots.insert(handle.to_owned(), (image.clone(), size));
    }

    pub fn forget(&self, handle: &str) {
        self.state.lock().unwrap().snapshots.remove(handle);
    }

    /// What goes wrong with the next calls, one after another; then nothing does.
    pub fn script(&self, faults: impl IntoIterator<Item = Fault>) {
        let mut state = self.state.lock().unwrap();
        (state.script, state.calls) = (faults.into_iter().collect(), 0);
    }

    /// Streams that were asked for since the script began.
    pub fn calls(&self) -> usize {
        self.state.lock().unwrap().calls
    }
}

/// Tuples in a message: a few, so that streams have several.
const TUPLES: usize = 16;

impl State {
    fn snapshot(&self, handle: &str) -> Result<(Image, u64), Status> {
        let missing = || Status::not_found(format!("snapshot {handle} does not exist"));
        self.snapshots.get(handle).cloned().ok_or_else(missing)
    }

    /// The next fault, if it is one of these.
    fn next_if(&mut self, is_due: fn(&Fault) -> bool) -> Option<Fault> {
        self.script.front().is_some_and(is_due).then(|| self.script.pop_front())?
    }

    /// Blocks as messages from an offset on, with the fault that is due.
    fn messages(
        &mut self,
        blocks: &[u64],
        size: u64,
        from: i64,
    ) -> Vec<Result<GetMetadataAllocatedResponse, Status>> {
        let mut tuples: Vec<BlockMetadata> = Vec::new();
        for block in blocks {
            let offset = (block * BLOCK) as i64;
            match tuples.last_mut().filter(|last| last.byte_offset + last.size_bytes == offset) {
                Some(last) => last.size_bytes += BLOCK as i64,
                None => tuples.push(BlockMetadata { byte_offset: offset, size_bytes: BLOCK as i64 }),
            }
        }
        let fault = self.next_if(|fault| !matches!(fault, Fault::NoDelta | Fault::OtherVolume));
        if fault != Some(Fault::FromTheBeginning) {
            tuples.retain(|tuple| tuple.byte_offset + tuple.size_bytes > from);
        }
        let message = |block_metadata: &[BlockMetadata]| GetMetadataAllocatedResponse {
            block_metadata_type: BlockMetadataType::VariableLength.into(),
            volume_capacity_bytes: size as i64,
            block_metadata: block_metadata.to_vec(),
        };
        let mut messages: Vec<_> = tuples.chunks(TUPLES).map(message).collect();
        if messages.is_empty() {
            messages.push(message(&[]));
        }
        let (most, end) = match fault {
            Some(Fault::Cut(at)) => (at, Some(Status::unavailable("the driver restarts"))),
            Some(Fault::Breaks(at)) => (at, Some(Status::permission_denied("no more for you"))),
            Some(Fault::Loses(at)) => (at, Some(Status::data_loss("a map cannot be read"))),
            Some(Fault::Lies(lie, at)) => {
                lie.spoil(&mut messages, at);
                (usize::MAX, None)
            }
            Some(Fault::FromTheBeginning | Fault::Late | Fault::NoDelta | Fault::OtherVolume) | None => {
                (usize::MAX, None)
            }
        };
        messages.truncate(most);
        messages.into_iter().map(Ok).chain(end.map(Err)).collect()
    }
}

async fn answer(state: &Mutex<State>, Asked { is_delta, request, .. }: Asked) -> plugin::Answer {
    match state.lock().unwrap().script.front() {
        Some(Fault::NoDelta) if is_delta => {
            return Err(Status::unimplemented("this driver has no deltas"));
        }
        Some(Fault::OtherVolume) if is_delta => {
            return Err(Status::invalid_argument("the snapshots are of different volumes"));
        }
        _ => {}
    }
    let late = {
        let mut state = state.lock().unwrap();
        state.calls += 1;
        state.next_if(|fault| *fault == Fault::Late)
    };
    if late.is_some() {
        tokio::time::sleep(Duration::from_millis(500)).await;
    }
    let mut state = state.lock().unwrap();
    let base = is_delta.then(|| state.snapshot(&request.base_snapshot_id)).transpose()?;
    let (target, size) = state.snapshot(&request.target_snapshot_id)?;
    let blocks = base.map_or_else(|| target.allocated(), |(base, _)| target.changed_since(&base));
    Ok(stream::iter(state.messages(&blocks, size, request.starting_offset)).boxed())
}
