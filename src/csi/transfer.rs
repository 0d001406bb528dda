//! Transfers between nodes, `deltapath.transfer.v1`: the service for nodes that read here, and the client for reading there.
//!
//! The certificate identifies the caller; the ticket names what it may open. Handles opened by other nodes are rejected.

use std::error::Error as _;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use futures_util::Stream;
use roaring::RoaringBitmap;
use tokio::runtime::Handle;
use tokio::sync::{Semaphore, mpsc};
use tokio_stream::wrappers::ReceiverStream;
use tonic::transport::Channel;
use tonic::{Code, Request, Response, Status, Streaming, async_trait};

use super::rpc::{rpc_span, unary};
use super::status::status;
use crate::driver::{Blocks, Driver, OpenSource, Opened, Remote, RemoteFault};
use crate::metric;
use base::{BlockSize, ByteRange, DataDirKey, SnapshotId, Stop, Stopped, VolumeId};
use cbt::SegmentIndex;
use proto::transfer::transfer_client::TransferClient;
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
/// Bytes that a connection takes in before they are written.
const WINDOW: u32 = 4 << 20;
/// How long a node may take to answer a connection, and to give a sign of life on it.
const PATIENCE: Duration = Duration::from_secs(10);
/// How often it is looked whether a call is still wanted.
const POLL_INTERVAL: Duration = Duration::from_millis(100);
/// Answers that are made at once, each in a thread.
const ANSWERS: usize = 16;
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

fn decode_blocks(bytes: &[u8]) -> Result<RoaringBitmap, Status> {
    let blocks = RoaringBitmap::deserialize_from(bytes);
    blocks.map_err(|error| Status::invalid_argument(format!("the blocks cannot be decoded: {error}")))
}

fn encode_blocks(blocks: &RoaringBitmap) -> Vec<u8> {
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
        if !is_id || volume_id.parse::<VolumeId>().is_err() {
            return Err(Status::invalid_argument("source_id and volume_id must be ids of this driver"));
        }
        let span = rpc_span!("Open", source_id = source_id, volume_id = volume_id);
        unary(&self.driver, span, move |driver| {
            let (point, opened) = driver.sources.open(&source_id, &reader, &volume_id)?;
            Ok(OpenResponse {
                point,
                capacity: opened.capacity,
                block_size: opened.block_size.bytes() as u32,
                tracking: opened.tracking,
                segments: opened.segments.iter().map(|index| index.0).collect(),
                allocated_blocks: opened.allocated_blocks,
                relatives: opened.relatives,
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
                source.check(index, &blocks)?;
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
            let read = source.check(index, &blocks).and_then(|()| {
                source.read(
                    index,
                    &blocks,
                    without_holes,
                    &Stop::default(),
                    |Blocks { data, hashes, holes }| {
                        metrics::counter!(metric::TRANSFER_SENT_BYTES_TOTAL).increment(data.len() as u64);
                        let holes = holes.iter().flat_map(|hole| [hole.start, hole.len()]).collect();
                        let message = ReadResponse { data, hashes, holes };
                        // The caller is gone.
                        messages.blocking_send(Ok(message)).map_err(|_| Stopped::Cancelled)
                    },
                )
            });
            if let Err(error) = read {
                let _ = messages.blocking_send(Err(status(&driver, &error)));
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

struct StopOnDrop(Stop);

impl Drop for StopOnDrop {
    fn drop(&mut self) {
        self.0.cancel();
    }
}

/// A source on another node, as its driver gives it out.
pub(super) struct Puller {
    runtime: Handle,
    client: TransferClient<Channel>,
    node: String,
    ticket: Vec<u8>,
    source: String,
    point: String,
    answer: Option<Streaming<ReadResponse>>,
}

impl Puller {
    /// The way to a source. To be made in a runtime; used from threads outside of it.
    pub(super) fn new(
        tls: &Arc<Mutual>,
        address: &str,
        key: DataDirKey,
        ticket: Vec<u8>,
        source: String,
    ) -> Self {
        let channel = tls.channel(address, &key.to_string(), PATIENCE, WINDOW);
        Puller {
            runtime: Handle::current(),
            client: TransferClient::new(channel).max_decoding_message_size(MAX_MESSAGE),
            node: format!("the node {key} at {address}"),
            ticket,
            source,
            point: String::new(),
            answer: None,
        }
    }

    /// Waits for an answer, for as long as it is wanted.
    fn wait<T>(&self, stop: &Stop, call: impl Future<Output = Result<T, Status>>) -> Result<T, RemoteFault> {
        let answered = self.runtime.block_on(async {
            let mut call = std::pin::pin!(call);
            loop {
                if let Ok(answered) = tokio::time::timeout(POLL_INTERVAL, &mut call).await {
                    return Some(answered);
                }
                if stop.check().is_err() {
                    return None;
                }
            }
        });
        match answered {
            None => Err(RemoteFault::Stopped),
            Some(answered) => answered.map_err(|status| self.fault(&status)),
        }
    }

    fn fault(&self, status: &Status) -> RemoteFault {
        let said = || format!("{} says: {}", self.node, status.message());
        // A status that has a source was made by the transport, and not by the node.
        if let Some(broken) = status.source() {
            return RemoteFault::Unavailable(format!(
                "{} does not answer: {}",
                self.node,
                base::report(broken)
            ));
        }
        match status.code() {
            Code::NotFound => RemoteFault::Gone(format!("{} on {}", self.source, self.node)),
            Code::DataLoss | Code::Internal => RemoteFault::Damaged(said()),
            Code::FailedPrecondition | Code::InvalidArgument | Code::OutOfRange | Code::Unimplemented => {
                RemoteFault::Refused(said())
            }
            _ => RemoteFault::Unavailable(said()),
        }
    }

    fn request(&self, index: SegmentIndex, blocks: &RoaringBitmap) -> BlocksRequest {
        let (point, blocks) = (self.point.clone(), encode_blocks(blocks));
        BlocksRequest { point, segment: index.0, blocks, without_holes: true }
    }
}

impl Remote for Puller {
    fn open(&mut self, volume_id: &str, stop: &Stop) -> Result<Opened, RemoteFault> {
        let request = OpenRequest {
            ticket: self.ticket.clone(),
            source_id: self.source.clone(),
            volume_id: volume_id.to_owned(),
        };
        let mut client = self.client.clone();
        let opened = self.wait(stop, client.open(request))?.into_inner();
        let block_size = BlockSize::try_from(u64::from(opened.block_size));
        let block_size =
            block_size.map_err(|error| RemoteFault::Refused(format!("{} says: {error}", self.node)))?;
        (self.point, self.answer) = (opened.point, None);
        Ok(Opened {
            capacity: opened.capacity,
            block_size,
            tracking: opened.tracking,
            segments: opened.segments.into_iter().map(SegmentIndex).collect(),
            allocated_blocks: opened.allocated_blocks,
            relatives: opened.relatives,
        })
    }

    fn map(&mut self, index: SegmentIndex, stop: &Stop) -> Result<RoaringBitmap, RemoteFault> {
        let request = MapRequest { point: self.point.clone(), segment: index.0 };
        let mut client = self.client.clone();
        let map = self.wait(stop, client.map(request))?.into_inner();
        decode_blocks(&map.blocks).map_err(|status| self.fault(&status))
    }

    fn hashes(
        &mut self,
        index: SegmentIndex,
        blocks: &RoaringBitmap,
        stop: &Stop,
    ) -> Result<Vec<u8>, RemoteFault> {
        let request = self.request(index, blocks);
        let mut client = self.client.clone();
        Ok(self.wait(stop, client.hashes(request))?.into_inner().hashes)
    }

    fn read(&mut self, index: SegmentIndex, blocks: &RoaringBitmap, stop: &Stop) -> Result<(), RemoteFault> {
        let request = self.request(index, blocks);
        let mut client = self.client.clone();
        self.answer = Some(self.wait(stop, client.read(request))?.into_inner());
        Ok(())
    }

    fn next(&mut self, stop: &Stop) -> Result<Option<Blocks>, RemoteFault> {
        let Some(mut answer) = self.answer.take() else { return Ok(None) };
        let message = self.wait(stop, answer.message())?;
        Ok(message.map(|ReadResponse { data, hashes, holes }| {
            self.answer = Some(answer);
            let (holes, _) = holes.as_chunks();
            // What is too long is past the end of the blocks, which is refused where it is used.
            let hole =
                |[start, length]: &[u64; 2]| ByteRange { start: *start, end: start.saturating_add(*length) };
            Blocks { data, hashes, holes: holes.iter().map(hole).collect() }
        }))
    }

    fn close(&mut self) {
        let request = CloseRequest { point: std::mem::take(&mut self.point) };
        let mut client = self.client.clone();
        // If that fails, it is closed after a while without reads.
        let closed = self.wait(&Stop::at(Some(std::time::Instant::now() + PATIENCE)), client.close(request));
        if let Err(fault) = closed {
            tracing::debug!(?fault, node = self.node, "a source could not be closed");
        }
    }

    fn node(&self) -> &str {
        &self.node
    }
}
