//! A CSI driver whose snapshots are models: it answers from them, and fails and lies on demand.

use std::collections::{HashMap, VecDeque};
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use files::pattern::Image;
use futures_util::{Stream, stream};
use proto::snapshot_metadata_server::{SnapshotMetadata, SnapshotMetadataServer};
use proto::{
    BlockMetadata, BlockMetadataType, GetMetadataAllocatedRequest, GetMetadataAllocatedResponse,
    GetMetadataDeltaRequest, GetMetadataDeltaResponse,
};
use tokio::net::UnixListener;
use tokio::runtime::Runtime;
use tokio_stream::wrappers::UnixListenerStream;
use tonic::{Request, Response, Status, async_trait};

use crate::tool::BLOCK;

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
    runtime: Option<Runtime>,
    socket: PathBuf,
}

impl Driver {
    pub fn start(socket: &Path) -> Self {
        let state = Arc::<Mutex<State>>::default();
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build();
        let runtime = runtime.expect("a runtime");
        let listener = {
            let _entered = runtime.enter();
            UnixListenerStream::new(UnixListener::bind(socket).expect("bind"))
        };
        let service = SnapshotMetadataServer::new(Metadata(state.clone()));
        runtime.spawn(tonic::transport::Server::builder().add_service(service).serve_with_incoming(listener));
        Driver { state, runtime: Some(runtime), socket: socket.to_owned() }
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

impl Drop for Driver {
    fn drop(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }
}

struct Metadata(Arc<Mutex<State>>);

type Messages<M> = Pin<Box<dyn Stream<Item = Result<M, Status>> + Send>>;

/// Tuples in a message: a few, so that streams have several.
const TUPLES: usize = 16;

impl Metadata {
    fn of(&self, handle: &str) -> Result<(Image, u64), Status> {
        let missing = || Status::not_found(format!("snapshot {handle} does not exist"));
        self.0.lock().unwrap().snapshots.get(handle).cloned().ok_or_else(missing)
    }

    async fn called(&self) {
        let is_late = {
            let mut state = self.0.lock().unwrap();
            state.calls += 1;
            let is_late = state.script.front() == Some(&Fault::Late);
            if is_late {
                state.script.pop_front();
            }
            is_late
        };
        if is_late {
            tokio::time::sleep(Duration::from_millis(500)).await;
        }
    }

    /// Blocks as messages from an offset on, with the fault that is due.
    fn answer(
        &self,
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
        let mut state = self.0.lock().unwrap();
        let fault = match state.script.front() {
            Some(Fault::NoDelta | Fault::OtherVolume) | None => None,
            Some(_) => state.script.pop_front(),
        };
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

#[async_trait]
impl SnapshotMetadata for Metadata {
    type GetMetadataAllocatedStream = Messages<GetMetadataAllocatedResponse>;
    type GetMetadataDeltaStream = Messages<GetMetadataDeltaResponse>;

    async fn get_metadata_allocated(
        &self,
        request: Request<GetMetadataAllocatedRequest>,
    ) -> Result<Response<Self::GetMetadataAllocatedStream>, Status> {
        self.called().await;
        let request = request.into_inner();
        let (image, size) = self.of(&request.snapshot_id)?;
        let messages = self.answer(&image.allocated(), size, request.starting_offset);
        Ok(Response::new(Box::pin(stream::iter(messages))))
    }

    async fn get_metadata_delta(
        &self,
        request: Request<GetMetadataDeltaRequest>,
    ) -> Result<Response<Self::GetMetadataDeltaStream>, Status> {
        match self.0.lock().unwrap().script.front() {
            Some(Fault::NoDelta) => return Err(Status::unimplemented("this driver has no deltas")),
            Some(Fault::OtherVolume) => {
                return Err(Status::invalid_argument("the snapshots are of different volumes"));
            }
            _ => {}
        }
        self.called().await;
        let request = request.into_inner();
        let (base, _) = self.of(&request.base_snapshot_id)?;
        let (target, size) = self.of(&request.target_snapshot_id)?;
        let messages = self.answer(&target.changed_since(&base), size, request.starting_offset);
        let messages = messages.into_iter().map(|message| {
            message.map(|message| GetMetadataDeltaResponse {
                block_metadata_type: message.block_metadata_type,
                volume_capacity_bytes: message.volume_capacity_bytes,
                block_metadata: message.block_metadata,
            })
        });
        Ok(Response::new(Box::pin(stream::iter(messages.collect::<Vec<_>>()))))
    }
}
