//! The SnapshotMetadata service (KEP-3314; CSI spec, "Snapshot Metadata Service RPCs").
//!
//! A stream is pulled: when the transport takes a message, because the client can receive one, a blocking
//! thread makes the next one. So the next is made while one is encoded, a slow client blocks no
//! thread, and a client that is gone drops the stream, which stops the work under way.

use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use futures_util::Stream;
use http_body_util::BodyExt;
use prost::bytes::Bytes;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::task::{JoinError, JoinHandle};
use tonic::body::Body;
use tonic::codegen::http;
use tonic::{Code, Request, Response, Status, async_trait};
use tower::util::MapResponseLayer;
use tracing::Span;

use super::decode::{encode_style, wire_bytes};
use super::rpc::{Rpc, log, rpc_span};
use super::status::status;
use crate::driver::{
    Driver, Message, MetadataRequest, MetadataStream, Progress, Result as DriverResult, STREAMS_WORKING,
    Share, Streams,
};
use crate::metric;
use crate::sys::memory;
use base::{ByteRange, Stop};
use proto::snapshot_metadata_server::SnapshotMetadata;
use serve::relay::deadline;

/// Streams open at once; each holds a few files.
const MAX_STREAMS: usize = 1024;
/// Streams at work at once: the rest waits its turn, so that unary calls find a thread, and memory stays bounded.
const MAX_WORKING: usize = 32;
/// What a stream at work takes besides its bitmaps, in bytes.
const TURN_BYTES: usize = STREAMS_WORKING / MAX_WORKING;
/// How long after the end of a stream its memory is given back to the kernel, with that of others that ended meanwhile, and
/// of their threads.
const GIVE_BACK: Duration = Duration::from_secs(3);
/// The unit in which streams share the memory of those at work: a semaphore counts to 2^32 at most.
const KIB: usize = 1 << 10;

/// Counts each frame of an answer among the memory of streams until the transport has sent it: where the client is
/// slow, it lies there long after its stream has ended.
pub(super) fn counted(
    streams: Arc<Streams>,
) -> MapResponseLayer<impl Fn(http::Response<Body>) -> http::Response<Body> + Clone> {
    MapResponseLayer::new(move |response: http::Response<Body>| {
        let streams = streams.clone();
        let count =
            move |bytes: Bytes| Bytes::from_owner(Sending { _share: streams.hold(bytes.len()), bytes });
        response.map(|body| Body::new(body.map_frame(move |frame| frame.map_data(&count))))
    })
}

/// Bytes of a message that the transport holds.
struct Sending {
    bytes: Bytes,
    _share: Share,
}

impl AsRef<[u8]> for Sending {
    fn as_ref(&self) -> &[u8] {
        &self.bytes
    }
}

#[derive(Clone)]
pub(super) struct SnapshotMetadataService {
    open: Arc<Semaphore>,
    workers: Workers,
    giving_back: Arc<AtomicBool>,
}

type Messages<M> = Pin<Box<dyn Stream<Item = Result<M, Status>> + Send>>;

impl SnapshotMetadataService {
    pub(super) fn new(driver: Arc<Driver>) -> Self {
        let semaphore = |permits| Arc::new(Semaphore::new(permits));
        let workers = Workers { driver, memory: semaphore(STREAMS_WORKING / KIB) };
        Self { open: semaphore(MAX_STREAMS), workers, giving_back: Arc::default() }
    }

    /// Opens a stream and hands out its messages, encoded by `encode`.
    async fn stream<M: Send + 'static>(
        &self,
        rpc: Rpc,
        deadline: Option<Instant>,
        open: impl FnOnce(&Driver, &Stop) -> DriverResult<MetadataStream> + Send + 'static,
        encode: fn(proto::BlockMetadataType, i64, Vec<proto::BlockMetadata>) -> M,
    ) -> Result<Response<Messages<M>>, Status> {
        let mut call = Call {
            rpc,
            started: Instant::now(),
            stop: Stop::at(deadline),
            tuples: 0,
            ended: false,
            giving_back: self.giving_back.clone(),
            _permit: None,
        };
        let Ok(permit) = self.open.clone().try_acquire_owned() else {
            let full = format!("{MAX_STREAMS} metadata streams are open: try again when some are done");
            return Err(call.fail(Status::resource_exhausted(full)));
        };
        call._permit = Some(permit);
        let stop = call.stop.clone();
        let opened = self.workers.work(0, &call.rpc.span, move |driver| open(driver, &stop)).await;
        let stream = match opened {
            Ok(stream) => stream,
            Err(status) => return Err(call.fail(status)),
        };
        let header = (encode_style(stream.style()), wire_bytes(stream.capacity()));
        let next = next_message(&self.workers, &call, stream);
        let state = (Some((next, call)), self.workers.clone());
        let messages = futures_util::stream::unfold(state, move |(state, workers)| async move {
            let (next, mut call) = state?;
            match next.await.unwrap_or_else(|error| Err(panicked(error))) {
                Ok((stream, Some(mut message))) => {
                    let next = next_message(&workers, &call, stream);
                    call.count(&message.tuples);
                    let tuples = encode_tuples(std::mem::take(&mut message.tuples));
                    Some((Ok(encode(header.0, header.1, tuples)), (Some((next, call)), workers)))
                }
                Ok((_, None)) => {
                    call.end(Code::Ok, None);
                    None
                }
                Err(status) => Some((Err(call.fail(status)), (None, workers))),
            }
        });
        Ok(Response::new(Box::pin(messages)))
    }
}

/// A stream's place in the log and among the open ones. Dropped before its end, the client is gone:
/// the work under way stops.
struct Call {
    rpc: Rpc,
    started: Instant,
    stop: Stop,
    tuples: u64,
    ended: bool,
    giving_back: Arc<AtomicBool>,
    _permit: Option<OwnedSemaphorePermit>,
}

impl Call {
    fn count(&mut self, tuples: &[ByteRange]) {
        self.tuples += tuples.len() as u64;
        let method = self.rpc.method;
        metrics::counter!(metric::STREAM_TUPLES_TOTAL, "method" => method).increment(tuples.len() as u64);
        let described = tuples.iter().map(|range| range.len()).sum();
        metrics::counter!(metric::STREAM_DESCRIBED_BYTES_TOTAL, "method" => method).increment(described);
    }

    fn fail(&mut self, status: Status) -> Status {
        self.end(status.code(), Some(status.message()));
        status
    }

    fn end(&mut self, code: Code, message: Option<&str>) {
        self.ended = true;
        let _entered = self.rpc.span.enter();
        tracing::debug!(tuples = self.tuples, "stream ends");
        log(self.rpc.method, code, self.started, message);
    }
}

impl Drop for Call {
    fn drop(&mut self) {
        self.stop.cancel();
        if !self.ended {
            self.end(Code::Cancelled, Some("the client is gone"));
        }
        give_back_soon(&self.giving_back);
    }
}

fn give_back_soon(giving_back: &Arc<AtomicBool>) {
    if let Ok(runtime) = tokio::runtime::Handle::try_current()
        && !giving_back.swap(true, Ordering::Relaxed)
    {
        let giving_back = giving_back.clone();
        runtime.spawn(async move {
            tokio::time::sleep(GIVE_BACK).await;
            giving_back.store(false, Ordering::Relaxed);
            tokio::task::spawn_blocking(memory::give_back);
        });
    }
}

type Next = Result<(MetadataStream, Option<Message>), Status>;

/// Starts making the next message. It is dropped unread, and its work stopped, when the call is. A stream that finds
/// nothing for long gives its working place up now and then, and queues for another.
fn next_message(workers: &Workers, call: &Call, mut stream: MetadataStream) -> JoinHandle<Next> {
    let (workers, stop, span) = (workers.clone(), call.stop.clone(), call.rpc.span.clone());
    tokio::spawn(async move {
        loop {
            let stop = stop.clone();
            let bytes = stream.work_bytes();
            let work = move |_: &Driver| stream.work(&stop).map(|turn| (stream, turn));
            let turn;
            (stream, turn) = workers.work(bytes, &span, work).await?;
            match turn {
                Progress::Message(message) => return Ok((stream, Some(message))),
                Progress::Nothing => {}
                Progress::End => return Ok((stream, None)),
            }
        }
    })
}

fn panicked(error: JoinError) -> Status {
    tracing::error!(%error, "a stream panicked");
    Status::internal("the stream failed inside the driver; its log says where")
}

/// The threads in which streams work, and the memory, in KiB, of those at work.
#[derive(Clone)]
struct Workers {
    driver: Arc<Driver>,
    memory: Arc<Semaphore>,
}

impl Workers {
    /// Does one message's work in a blocking thread, when there is memory for it: a turn's, and `bytes` besides.
    async fn work<T: Send + 'static>(
        &self,
        bytes: usize,
        span: &Span,
        work: impl FnOnce(&Driver) -> DriverResult<T> + Send + 'static,
    ) -> Result<T, Status> {
        let memory = (TURN_BYTES + bytes).min(STREAMS_WORKING).div_ceil(KIB) as u32;
        let Ok(turn) = self.memory.clone().acquire_many_owned(memory).await else {
            return Err(Status::unavailable("the driver is shutting down"));
        };
        let (driver, span) = (self.driver.clone(), span.clone());
        let task = tokio::task::spawn_blocking(move || {
            let _turn = turn;
            let _entered = span.enter();
            work(&driver).map_err(|error| status(&driver, &error))
        });
        task.await.unwrap_or_else(|error| Err(panicked(error)))
    }
}

fn encode_tuples(tuples: Vec<ByteRange>) -> Vec<proto::BlockMetadata> {
    let encode = |range: ByteRange| proto::BlockMetadata {
        byte_offset: wire_bytes(range.start),
        size_bytes: wire_bytes(range.len()),
    };
    tuples.into_iter().map(encode).collect()
}

#[async_trait]
impl SnapshotMetadata for SnapshotMetadataService {
    type GetMetadataAllocatedStream = Messages<proto::GetMetadataAllocatedResponse>;
    type GetMetadataDeltaStream = Messages<proto::GetMetadataDeltaResponse>;

    async fn get_metadata_allocated(
        &self,
        request: Request<proto::GetMetadataAllocatedRequest>,
    ) -> Result<Response<Self::GetMetadataAllocatedStream>, Status> {
        let deadline = deadline(request.metadata().as_ref()).map(Into::into);
        let request = request.into_inner();
        let rpc = rpc_span!("GetMetadataAllocated", snapshot_id = request.snapshot_id);
        let position =
            MetadataRequest { starting_offset: request.starting_offset, max_results: request.max_results };
        let open = move |driver: &Driver, stop: &Stop| {
            driver.metadata.allocated(&request.snapshot_id, position, stop)
        };
        self.stream(rpc, deadline, open, |style, volume_capacity_bytes, block_metadata| {
            proto::GetMetadataAllocatedResponse {
                block_metadata_type: style.into(),
                volume_capacity_bytes,
                block_metadata,
            }
        })
        .await
    }

    async fn get_metadata_delta(
        &self,
        request: Request<proto::GetMetadataDeltaRequest>,
    ) -> Result<Response<Self::GetMetadataDeltaStream>, Status> {
        let deadline = deadline(request.metadata().as_ref()).map(Into::into);
        let request = request.into_inner();
        let rpc = rpc_span!(
            "GetMetadataDelta",
            base_snapshot_id = request.base_snapshot_id,
            target_snapshot_id = request.target_snapshot_id,
        );
        let position =
            MetadataRequest { starting_offset: request.starting_offset, max_results: request.max_results };
        let open = move |driver: &Driver, stop: &Stop| {
            driver.metadata.delta(&request.base_snapshot_id, &request.target_snapshot_id, position, stop)
        };
        self.stream(rpc, deadline, open, |style, volume_capacity_bytes, block_metadata| {
            proto::GetMetadataDeltaResponse {
                block_metadata_type: style.into(),
                volume_capacity_bytes,
                block_metadata,
            }
        })
        .await
    }
}
