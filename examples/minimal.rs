//! A SnapshotMetadata service in one file, to read and to copy from: docs/tutorial-driver.md walks through it. A snapshot is
//! a sparse file with the map of its allocated blocks, and a delta compares two of them. What a CSI driver needs around it,
//! to make volumes and snapshots, is in minimal/driver.rs.
//!
//! `minimal SOCKET DIRECTORY`, as root: a volume is published as a loop device.

#![allow(clippy::disallowed_methods)]

#[path = "minimal/driver.rs"]
mod driver;

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::sync::Arc;

use cbt::{Block, BlockSize, MapFile, SegmentIndex};
use driver::{Driver, Records, Snapshot, internal};
use proto::controller_server::ControllerServer;
use proto::identity_server::IdentityServer;
use proto::node_server::NodeServer;
use proto::snapshot_metadata_server::{SnapshotMetadata, SnapshotMetadataServer};
use proto::{
    BlockMetadata, BlockMetadataType, GetMetadataAllocatedRequest, GetMetadataAllocatedResponse,
    GetMetadataDeltaRequest, GetMetadataDeltaResponse,
};
use tokio::net::UnixListener;
use tokio::sync::mpsc::{Sender, channel};
use tokio_stream::wrappers::{ReceiverStream, UnixListenerStream};
use tonic::{Request, Response, Status, async_trait};

/// The unit of maps and deltas.
pub const BLOCK: BlockSize = BlockSize::MIN;
/// Tuples in a message: some 350 KB of the 4 MiB that gRPC clients take.
const TUPLES: usize = 16_384;

type Messages<M> = ReceiverStream<Result<M, Status>>;

/// One snapshot of an answer. Its files stay readable when the snapshot is deleted meanwhile.
struct Side {
    data: File,
    allocated: MapFile,
}

/// The blocks of an answer, from `next` on.
struct Blocks {
    base: Option<Side>,
    target: Side,
    next: Block,
}

impl Blocks {
    /// Calls `put` with each block that is listed, ascending, until it returns false.
    fn list(&self, mut put: impl FnMut(Block) -> bool, is_gone: impl Fn() -> bool) -> Result<(), Status> {
        let maps = self.base.iter().chain([&self.target]).map(|side| &side.allocated);
        let mut segments: Vec<SegmentIndex> = maps.flat_map(MapFile::indexes).collect();
        segments.sort_unstable();
        segments.dedup();
        for segment in segments {
            let after = self.target.allocated.segment(segment).map_err(internal)?;
            let before = match &self.base {
                Some(base) => base.allocated.segment(segment).map_err(internal)?,
                None => Default::default(),
            };
            for within in &before | &after {
                let block = segment.block(within);
                if block < self.next {
                    continue;
                }
                if is_gone() {
                    return Ok(());
                }
                // Data on one side alone is a change, also where it is zeros.
                let is_listed = match &self.base {
                    Some(base) if before.contains(within) == after.contains(within) => {
                        read(&base.data, block)? != read(&self.target.data, block)?
                    }
                    _ => true,
                };
                if is_listed && !put(block) {
                    return Ok(());
                }
            }
        }
        Ok(())
    }
}

fn read(file: &File, block: Block) -> Result<Vec<u8>, Status> {
    let mut bytes = vec![0; BLOCK.bytes() as usize];
    file.read_exact_at(&mut bytes, block.0 * BLOCK.bytes()).map_err(internal)?;
    Ok(bytes)
}

/// What a stream was asked for. Without a base it is GetMetadataAllocated.
struct Question {
    base: Option<String>,
    target: String,
    starting_offset: i64,
    max_results: i32,
}

impl Driver {
    /// Checks the question and opens the files: a wrong question is refused before the first message.
    async fn open(&self, question: &Question) -> Result<(Blocks, u64, usize), Status> {
        let records = self.records.lock().await;
        let (target, target_side) = self.side(&records, &question.target)?;
        let base = match &question.base {
            None => None,
            Some(id) => {
                let (base, side) = self.side(&records, id)?;
                if base.volume != target.volume {
                    return Err(Status::invalid_argument("the snapshots are of two volumes"));
                }
                if base.number > target.number {
                    return Err(Status::invalid_argument("the base is newer than the target"));
                }
                Some(side)
            }
        };
        let offset = u64::try_from(question.starting_offset).ok().filter(|offset| *offset <= target.capacity);
        let offset = offset.ok_or_else(|| Status::out_of_range("starting_offset is not in the volume"))?;
        let most = match usize::try_from(question.max_results) {
            Err(_) => return Err(Status::invalid_argument("max_results is negative")),
            Ok(0) => TUPLES,
            Ok(most) => most.min(TUPLES),
        };
        // The block that holds the offset is listed whole: the spec lets a tuple begin before it.
        Ok((Blocks { base, target: target_side, next: BLOCK.block_of(offset) }, target.capacity, most))
    }

    fn side<'r>(&self, records: &'r Records, id: &str) -> Result<(&'r Snapshot, Side), Status> {
        let snapshot = records.snapshot(id)?;
        let data = File::open(self.dir.join(id)).map_err(internal)?;
        let allocated = MapFile::open(&self.map(id)).map_err(internal)?;
        Ok((snapshot, Side { data, allocated }))
    }

    /// A thread lists the blocks and waits in `send` while the client is slow: an answer takes the memory of two
    /// messages. The channel is closed once the client is gone or its deadline has passed, which ends the thread.
    async fn stream<M: Send + 'static>(
        &self,
        question: Question,
        message: fn(Vec<BlockMetadata>, i64) -> M,
    ) -> Result<Response<Messages<M>>, Status> {
        let (blocks, capacity, most) = self.open(&question).await?;
        let (sender, receiver) = channel(1);
        tokio::task::spawn_blocking(move || {
            if let Err(error) = send_all(&blocks, capacity, most, message, &sender) {
                // The stream ends with an error: OK would say that everything was listed.
                let _ = sender.blocking_send(Err(error));
            }
        });
        Ok(Response::new(ReceiverStream::new(receiver)))
    }
}

fn send_all<M>(
    blocks: &Blocks,
    capacity: u64,
    most: usize,
    message: fn(Vec<BlockMetadata>, i64) -> M,
    sender: &Sender<Result<M, Status>>,
) -> Result<(), Status> {
    let size = BLOCK.bytes() as i64;
    let mut tuples: Vec<BlockMetadata> = Vec::new();
    let mut is_first = true;
    let put = |block: Block| {
        let byte_offset = block.0 as i64 * size;
        if let Some(last) = tuples.last_mut()
            && last.byte_offset + last.size_bytes == byte_offset
        {
            last.size_bytes += size;
            return true;
        }
        let is_sent = tuples.len() < most || {
            is_first = false;
            sender.blocking_send(Ok(message(std::mem::take(&mut tuples), capacity as i64))).is_ok()
        };
        tuples.push(BlockMetadata { byte_offset, size_bytes: size });
        is_sent
    };
    blocks.list(put, || sender.is_closed())?;
    // An answer without tuples has one message, with type and capacity.
    if is_first || !tuples.is_empty() {
        let _ = sender.blocking_send(Ok(message(tuples, capacity as i64)));
    }
    Ok(())
}

#[async_trait]
impl SnapshotMetadata for Driver {
    type GetMetadataAllocatedStream = Messages<GetMetadataAllocatedResponse>;
    type GetMetadataDeltaStream = Messages<GetMetadataDeltaResponse>;

    async fn get_metadata_allocated(
        &self,
        request: Request<GetMetadataAllocatedRequest>,
    ) -> Result<Response<Self::GetMetadataAllocatedStream>, Status> {
        let GetMetadataAllocatedRequest { snapshot_id: target, starting_offset, max_results, .. } =
            request.into_inner();
        let question = Question { base: None, target, starting_offset, max_results };
        self.stream(question, |block_metadata, volume_capacity_bytes| GetMetadataAllocatedResponse {
            block_metadata_type: BlockMetadataType::VariableLength.into(),
            volume_capacity_bytes,
            block_metadata,
        })
        .await
    }

    async fn get_metadata_delta(
        &self,
        request: Request<GetMetadataDeltaRequest>,
    ) -> Result<Response<Self::GetMetadataDeltaStream>, Status> {
        let request = request.into_inner();
        let GetMetadataDeltaRequest { base_snapshot_id, target_snapshot_id: target, .. } = request;
        let GetMetadataDeltaRequest { starting_offset, max_results, .. } = request;
        let question = Question { base: Some(base_snapshot_id), target, starting_offset, max_results };
        self.stream(question, |block_metadata, volume_capacity_bytes| GetMetadataDeltaResponse {
            block_metadata_type: BlockMetadataType::VariableLength.into(),
            volume_capacity_bytes,
            block_metadata,
        })
        .await
    }
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let [socket, dir] = &std::env::args().skip(1).collect::<Vec<_>>()[..] else {
        return Err("usage: minimal SOCKET DIRECTORY".into());
    };
    let driver = Driver { dir: dir.into(), records: Arc::default() };
    let server = tonic::transport::Server::builder()
        .add_service(IdentityServer::new(driver.clone()))
        .add_service(ControllerServer::new(driver.clone()))
        .add_service(NodeServer::new(driver.clone()))
        .add_service(SnapshotMetadataServer::new(driver));
    server.serve_with_incoming(UnixListenerStream::new(UnixListener::bind(socket)?)).await?;
    Ok(())
}
