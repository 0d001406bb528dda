//! A CSI driver that does what a test wants: the snapshot's handle says what is answered. It stands where a real driver
//! would have to be slow, endless or broken on demand; `community` uses the real one.

use std::path::Path;
use std::pin::Pin;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use crate::plugin::Plugin;
use futures_util::{Stream, StreamExt, stream};
use proto::identity_server::IdentityServer;
use proto::snapshot_metadata_server::{SnapshotMetadata, SnapshotMetadataServer};
use proto::*;
use tokio::net::UnixListener;
use tokio::runtime::Runtime;
use tokio_stream::wrappers::UnixListenerStream;
use tonic::{Code, Request, Response, Status, async_trait};

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
    /// Its own, so that its connections end with it, as those of a process do.
    runtime: Option<Runtime>,
}

/// What it was asked.
#[derive(Default)]
pub struct Seen {
    pub allocated: Mutex<Vec<GetMetadataAllocatedRequest>>,
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
        let _ = std::fs::remove_file(socket);
        let seen = Arc::<Seen>::default();
        let identity = IdentityServer::new(Plugin { name: name.to_owned() });
        let metadata = has_metadata.then(|| SnapshotMetadataServer::new(Metadata(seen.clone())));
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build();
        let runtime = runtime.expect("a runtime");
        let listener = {
            let _entered = runtime.enter();
            UnixListenerStream::new(UnixListener::bind(socket).expect("bind"))
        };
        runtime.spawn(
            tonic::transport::Server::builder()
                .add_service(identity)
                .add_optional_service(metadata)
                .serve_with_incoming(listener),
        );
        Driver { seen, runtime: Some(runtime) }
    }
}

impl Drop for Driver {
    fn drop(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }
}

struct Metadata(Arc<Seen>);

type Messages<M> = Pin<Box<dyn Stream<Item = Result<M, Status>> + Send>>;

/// Counts an open stream.
struct OpenStream(Arc<Seen>);

impl Drop for OpenStream {
    fn drop(&mut self) {
        *self.0.open.lock().unwrap() -= 1;
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

fn answer(
    seen: &Arc<Seen>,
    handle: &str,
    offset: i64,
    timeout: Option<&str>,
) -> Result<Messages<GetMetadataAllocatedResponse>, Status> {
    seen.timeouts.lock().unwrap().push(timeout.unwrap_or_default().to_owned());
    *seen.open.lock().unwrap() += 1;
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

#[async_trait]
impl SnapshotMetadata for Metadata {
    type GetMetadataAllocatedStream = Messages<GetMetadataAllocatedResponse>;
    type GetMetadataDeltaStream = Messages<GetMetadataDeltaResponse>;

    async fn get_metadata_allocated(
        &self,
        request: Request<GetMetadataAllocatedRequest>,
    ) -> Result<Response<Self::GetMetadataAllocatedStream>, Status> {
        let timeout =
            request.metadata().get("grpc-timeout").and_then(|text| text.to_str().ok()).map(str::to_owned);
        let request = request.into_inner();
        self.0.allocated.lock().unwrap().push(request.clone());
        answer(&self.0, &request.snapshot_id, request.starting_offset, timeout.as_deref()).map(Response::new)
    }

    async fn get_metadata_delta(
        &self,
        request: Request<GetMetadataDeltaRequest>,
    ) -> Result<Response<Self::GetMetadataDeltaStream>, Status> {
        let timeout =
            request.metadata().get("grpc-timeout").and_then(|text| text.to_str().ok()).map(str::to_owned);
        let request = request.into_inner();
        self.0.deltas.lock().unwrap().push(request.clone());
        // A base that is unknown here too, as after its time is over.
        if request.base_snapshot_id == "forgotten" {
            return Err(Status::not_found("snapshot forgotten does not exist"));
        }
        let messages =
            answer(&self.0, &request.target_snapshot_id, request.starting_offset, timeout.as_deref())?;
        Ok(Response::new(Box::pin(messages.map(|message| {
            message.map(|message| GetMetadataDeltaResponse {
                block_metadata_type: message.block_metadata_type,
                volume_capacity_bytes: message.volume_capacity_bytes,
                block_metadata: message.block_metadata,
            })
        }))))
    }
}
