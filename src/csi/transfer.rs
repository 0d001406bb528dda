//! Transfers between nodes, `deltapath.transfer.v1`: the service for nodes that read here. `puller.rs` reads there.
//!
//! The certificate identifies the caller; the ticket names what it may open. Handles opened by other nodes are rejected.

use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use futures_util::Stream;
use roaring::RoaringBitmap;
use tokio::runtime::Handle;
use tokio::sync::{Semaphore, mpsc};
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Request, Response, Status, async_trait};

use super::rpc::{rpc_span, unary};
use super::status::status;
use crate::driver::{Blocks, COMPARED, Driver, OpenSource};
use crate::metric;
use base::{DataDirKey, SnapshotId, Stop, Stopped, VolumeId};
use cbt::SegmentIndex;
use proto::transfer::transfer_server::Transfer;
use proto::transfer::{
    BlocksRequest, CloseRequest, CloseResponse, HashesResponse, MapRequest, MapResponse, OpenRequest,
    OpenResponse, ReadResponse,
};
use serve::identity::{Identity, Role};
use serve::listen::Calls;
use serve::mutual::Mutual;

/// Bytes of a message at most: a block of 4 MiB with its hash.
pub(super) const MAX_MESSAGE: usize = 8 << 20;
/// Answers that are made at once, each in a thread.
const ANSWERS: usize = 16;
/// How long a reader may leave a message of an answer, which keeps a thread. Tests have less time.
const UNTAKEN: Duration = if cfg!(test) { Duration::from_millis(500) } else { Duration::from_secs(300) };
/// Messages of an answer that are made before they are sent, so that the two threads need not wait for each other each time.
const AHEAD: usize = 4;

/// The service for the drivers of other nodes.
pub(super) struct TransferService {
    driver: Arc<Driver>,
    tls: Arc<Mutual>,
    answers: Arc<Semaphore>,
}

impl TransferService {
    pub(super) fn new(driver: Arc<Driver>, tls: Arc<Mutual>) -> Self {
        TransferService { driver, tls, answers: Arc::new(Semaphore::new(ANSWERS)) }
    }

    fn source(&self, reader: &str, point: &str) -> Result<Arc<OpenSource>, Status> {
        let found = self.driver.sources.get(point, reader);
        found.ok_or_else(|| Status::aborted("the source is not open: open it again"))
    }

    /// Does work on what is open in a blocking thread, in which it may wait for a turn.
    async fn work<T: Send + 'static>(
        &self,
        source: Arc<OpenSource>,
        work: impl FnOnce(&OpenSource) -> crate::driver::Result<T> + Send + 'static,
    ) -> Result<T, Status> {
        let turn = self.answers.clone().acquire_owned().await;
        let driver = self.driver.clone();
        let worked = tokio::task::spawn_blocking(move || {
            let _turn = turn;
            work(&source).map_err(|error| status(&driver, &error))
        });
        worked.await.map_err(|_| Status::internal("the node could not read the source"))?
    }
}

/// The key of the node that asks.
fn reader<T>(request: &Request<T>) -> Result<String, Status> {
    let certificate = request.extensions().get::<Calls>().and_then(Calls::client);
    match certificate.and_then(Identity::of).map(|identity| identity.role) {
        Some(Role::Node(key)) => Ok(key),
        _ => Err(Status::permission_denied("only a node may read from a node")),
    }
}

pub(super) fn decode_blocks(bytes: &[u8]) -> Result<RoaringBitmap, Status> {
    let blocks = RoaringBitmap::deserialize_from(bytes);
    blocks.map_err(|error| Status::invalid_argument(format!("the blocks cannot be decoded: {error}")))
}

pub(super) fn encode_blocks(blocks: &RoaringBitmap) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(blocks.serialized_size());
    // A Vec takes everything.
    let _ = blocks.serialize_into(&mut bytes);
    bytes
}

#[async_trait]
impl Transfer for TransferService {
    async fn open(&self, request: Request<OpenRequest>) -> Result<Response<OpenResponse>, Status> {
        let reader = reader(&request)?;
        let OpenRequest { ticket, source_id, volume_id } = request.into_inner();
        let judge = self
            .tls
            .judge()
            .ok_or_else(|| Status::unavailable("this node has no certificate yet (--router-tls-cert)"))?;
        if let Err(refused) = judge.check(&ticket, &source_id, &reader) {
            tracing::warn!(reader, source_id = super::rpc::id(&source_id), %refused, "a ticket is refused");
            return Err(Status::permission_denied(format!("the ticket is refused: {refused}")));
        }
        let is_id = source_id.parse::<SnapshotId>().is_ok() || source_id.parse::<VolumeId>().is_ok();
        let is_readers = DataDirKey::of(&volume_id).is_some_and(|key| key.to_string() == reader);
        if !is_id || volume_id.parse::<VolumeId>().is_err() || !is_readers {
            return Err(Status::invalid_argument(
                "source_id must be an id of this driver, and volume_id that of a volume of the node that asks",
            ));
        }
        let span = rpc_span!("Open", source_id = source_id, volume_id = volume_id);
        unary(&self.driver, span, move |driver| {
            let (point, opened) = driver.sources.open(&source_id, &reader, &volume_id)?;
            let (filesystem, most_bytes) = opened.filesystem.unwrap_or_default();
            Ok(OpenResponse {
                point,
                capacity: opened.capacity,
                block_size: opened.block_size.bytes() as u32,
                tracking: opened.tracking,
                segments: opened.segments.iter().map(|index| index.0).collect(),
                allocated_blocks: opened.allocated_blocks,
                relatives: opened.relatives,
                filesystem,
                most_bytes,
            })
        })
        .await
    }

    async fn map(&self, request: Request<MapRequest>) -> Result<Response<MapResponse>, Status> {
        let reader = reader(&request)?;
        let MapRequest { point, segment } = request.into_inner();
        let source = self.source(&reader, &point)?;
        let blocks = self.work(source, move |source| source.map(SegmentIndex(segment))).await?;
        Ok(Response::new(MapResponse { blocks: encode_blocks(&blocks) }))
    }

    async fn hashes(&self, request: Request<BlocksRequest>) -> Result<Response<HashesResponse>, Status> {
        let reader = reader(&request)?;
        let BlocksRequest { point, segment, blocks, .. } = request.into_inner();
        let (source, index, blocks) =
            (self.source(&reader, &point)?, SegmentIndex(segment), decode_blocks(&blocks)?);
        // The work ends when its caller no longer waits.
        let stop = StopOnDrop(Stop::default());
        let wish = stop.0.clone();
        let hashes = self
            .work(source, move |source| {
                source.check(index, &blocks, COMPARED as u64)?;
                source.hashes(index, &blocks, &wish)
            })
            .await?;
        Ok(Response::new(HashesResponse { hashes }))
    }

    type ReadStream = Pin<Box<dyn Stream<Item = Result<ReadResponse, Status>> + Send>>;

    async fn read(&self, request: Request<BlocksRequest>) -> Result<Response<Self::ReadStream>, Status> {
        let reader = reader(&request)?;
        let BlocksRequest { point, segment, blocks, without_holes } = request.into_inner();
        let (source, index, blocks) =
            (self.source(&reader, &point)?, SegmentIndex(segment), decode_blocks(&blocks)?);
        let turn = self.answers.clone().acquire_owned().await;
        let (messages, answer) = mpsc::channel(AHEAD);
        let driver = self.driver.clone();
        tokio::task::spawn_blocking(move || {
            let _turn = turn;
            let read = source.check(index, &blocks, source.fetched()).and_then(|()| {
                source.read(
                    index,
                    &blocks,
                    without_holes,
                    &Stop::default(),
                    |Blocks { data, hashes, holes }| {
                        metrics::counter!(metric::TRANSFER_SENT_BYTES_TOTAL).increment(data.len() as u64);
                        let holes = holes.iter().flat_map(|hole| [hole.start, hole.len()]).collect();
                        hand_over(&messages, Ok(ReadResponse { data, hashes, holes }))
                    },
                )
            });
            if let Err(error) = read {
                let _ = hand_over(&messages, Err(status(&driver, &error)));
            }
        });
        Ok(Response::new(Box::pin(ReceiverStream::new(answer))))
    }

    async fn close(&self, request: Request<CloseRequest>) -> Result<Response<CloseResponse>, Status> {
        let reader = reader(&request)?;
        let CloseRequest { point } = request.into_inner();
        let driver = self.driver.clone();
        // What was copied for it is removed, which may take a moment.
        let closed = tokio::task::spawn_blocking(move || driver.sources.close(&point, &reader));
        closed.await.map_err(|_| Status::internal("a source could not be closed"))?;
        Ok(Response::new(CloseResponse {}))
    }
}

/// Waits until a message of an answer is taken. Fails if its reader is gone, or takes nothing for too long: then the answer is cut
/// short, and the reader asks for the rest.
fn hand_over(
    messages: &mpsc::Sender<Result<ReadResponse, Status>>,
    message: Result<ReadResponse, Status>,
) -> Result<(), Stopped> {
    let handed = Handle::current().block_on(messages.send_timeout(message, UNTAKEN));
    handed.map_err(|_| Stopped::Cancelled)
}

struct StopOnDrop(Stop);

impl Drop for StopOnDrop {
    fn drop(&mut self) {
        self.0.cancel();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reader_that_takes_nothing_holds_no_answer_for_ever() {
        let runtime = tokio::runtime::Runtime::new().expect("a runtime");
        let (messages, answer) = mpsc::channel(1);
        let (tell, told) = std::sync::mpsc::channel();
        runtime.spawn_blocking(move || {
            let message = || Ok(ReadResponse::default());
            let _ = tell.send([hand_over(&messages, message()), hand_over(&messages, message())]);
        });
        let handed = told.recv_timeout(Duration::from_secs(20));
        assert!(matches!(handed, Ok([Ok(()), Err(Stopped::Cancelled)])), "{handed:?}");
        drop(answer);
        runtime.shutdown_background();
    }
}
