//! A driver with one fault: it stands before a real one on a socket of its own, hands every call on, and
//! gets one thing wrong. `faults.rs` says what, `state.rs` what it remembers for that.

mod faults;
mod state;

pub use faults::Fault;

use std::any::Any;
use std::path::Path;
use std::pin::Pin;
use std::sync::Arc;
use std::time::{Duration, Instant};

use csi_client::{Client, Message, Options, Question};
use futures_util::Stream;
use proto::BlockMetadata;
use proto::controller_server::{Controller, ControllerServer};
use proto::identity_server::{Identity, IdentityServer};
use proto::node_server::{Node, NodeServer};
use proto::snapshot_metadata_server::{SnapshotMetadata, SnapshotMetadataServer};
use tokio::net::UnixListener;
use tokio::task::JoinHandle;
use tokio_stream::wrappers::UnixListenerStream;
use tonic::metadata::MetadataMap;
use tonic::{Request, Response, Status};

use state::State;

#[derive(Clone)]
struct Broken {
    real: Client,
    fault: Fault,
    state: Arc<State>,
}

/// A broken driver at work; dropped, it is gone.
pub struct Serving(JoinHandle<()>);

impl Drop for Serving {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// Serves on `socket` what the driver at `real` does, with one fault.
pub async fn serve(real: &Path, fault: Fault, socket: &Path) -> Serving {
    let real = Client::connect(real, Duration::from_secs(10)).await.expect("connect to the real driver");
    let broken = Broken { real, fault, state: Arc::default() };
    let listener = UnixListener::bind(socket).expect("bind");
    let server = tonic::transport::Server::builder()
        .add_service(IdentityServer::new(broken.clone()))
        .add_service(ControllerServer::new(broken.clone()))
        .add_service(NodeServer::new(broken.clone()))
        .add_service(SnapshotMetadataServer::new(broken))
        .serve_with_incoming(UnixListenerStream::new(listener));
    Serving(tokio::spawn(async move { server.await.expect("serve") }))
}

impl Broken {
    async fn before(&self, call: &str, request: &(dyn Any + Send + Sync)) -> Result<(), Status> {
        self.fault.before(&self.state, call, request).await
    }

    fn after(&self, request: &(dyn Any + Send + Sync), answer: &mut (dyn Any + Send)) {
        self.fault.after(&self.state, request, answer);
    }
}

/// Hands the unary calls of a service on.
macro_rules! hand_on {
    ($service:ident, $client:ident, $($method:ident: $request:ident -> $response:ident,)*) => {
        #[tonic::async_trait]
        impl $service for Broken {
            $(async fn $method(
                &self,
                request: Request<proto::$request>,
            ) -> Result<Response<proto::$response>, Status> {
                let request = request.into_inner();
                self.before(stringify!($method), &request).await?;
                let mut answer = self.real.clone().$client.$method(request.clone()).await?;
                self.after(&request, answer.get_mut());
                Ok(answer)
            })*
        }
    };
}

hand_on! { Identity, identity,
    get_plugin_info: GetPluginInfoRequest -> GetPluginInfoResponse,
    get_plugin_capabilities: GetPluginCapabilitiesRequest -> GetPluginCapabilitiesResponse,
    probe: ProbeRequest -> ProbeResponse,
}

hand_on! { Controller, controller,
    create_volume: CreateVolumeRequest -> CreateVolumeResponse,
    delete_volume: DeleteVolumeRequest -> DeleteVolumeResponse,
    controller_publish_volume: ControllerPublishVolumeRequest -> ControllerPublishVolumeResponse,
    controller_unpublish_volume: ControllerUnpublishVolumeRequest -> ControllerUnpublishVolumeResponse,
    validate_volume_capabilities: ValidateVolumeCapabilitiesRequest -> ValidateVolumeCapabilitiesResponse,
    list_volumes: ListVolumesRequest -> ListVolumesResponse,
    get_capacity: GetCapacityRequest -> GetCapacityResponse,
    controller_get_capabilities: ControllerGetCapabilitiesRequest -> ControllerGetCapabilitiesResponse,
    create_snapshot: CreateSnapshotRequest -> CreateSnapshotResponse,
    delete_snapshot: DeleteSnapshotRequest -> DeleteSnapshotResponse,
    list_snapshots: ListSnapshotsRequest -> ListSnapshotsResponse,
    get_snapshot: GetSnapshotRequest -> GetSnapshotResponse,
    controller_expand_volume: ControllerExpandVolumeRequest -> ControllerExpandVolumeResponse,
    controller_get_volume: ControllerGetVolumeRequest -> ControllerGetVolumeResponse,
    controller_modify_volume: ControllerModifyVolumeRequest -> ControllerModifyVolumeResponse,
    controller_list_volume_health: ControllerListVolumeHealthRequest -> ControllerListVolumeHealthResponse,
    controller_get_volume_health: ControllerGetVolumeHealthRequest -> ControllerGetVolumeHealthResponse,
}

hand_on! { Node, node,
    node_stage_volume: NodeStageVolumeRequest -> NodeStageVolumeResponse,
    node_unstage_volume: NodeUnstageVolumeRequest -> NodeUnstageVolumeResponse,
    node_publish_volume: NodePublishVolumeRequest -> NodePublishVolumeResponse,
    node_unpublish_volume: NodeUnpublishVolumeRequest -> NodeUnpublishVolumeResponse,
    node_get_volume_stats: NodeGetVolumeStatsRequest -> NodeGetVolumeStatsResponse,
    node_get_volume_health: NodeGetVolumeHealthRequest -> NodeGetVolumeHealthResponse,
    node_get_storage_health: NodeGetStorageHealthRequest -> NodeGetStorageHealthResponse,
    node_expand_volume: NodeExpandVolumeRequest -> NodeExpandVolumeResponse,
    node_get_capabilities: NodeGetCapabilitiesRequest -> NodeGetCapabilitiesResponse,
    node_get_info: NodeGetInfoRequest -> NodeGetInfoResponse,
}

/// A real answer, read whole.
pub async fn read(
    client: &mut Client,
    question: &Question,
    options: &Options,
) -> Result<Vec<Message>, Status> {
    let mut stream = client.open_stream(question, options).await?;
    let mut messages = Vec::new();
    while let Some(message) = stream.next().await? {
        messages.push(message);
    }
    Ok(messages)
}

type Messages<M> = Pin<Box<dyn Stream<Item = Result<M, Status>> + Send>>;

impl Broken {
    async fn stream<M: Send + 'static>(
        &self,
        question: Question,
        options: Options,
        deadline: Option<Instant>,
        encode: fn(Message) -> M,
    ) -> Result<Response<Messages<M>>, Status> {
        let messages = self.fault.answer(&self.state, &mut self.real.clone(), &question, options).await?;
        let opened = self.state.opened();
        let rest = messages.into_iter();
        let state = (rest, self.fault, self.state.clone(), opened);
        let stream =
            futures_util::stream::unfold(state, move |(mut rest, fault, state, mut opened)| async move {
                // A message at a time, as a driver that has to work for each.
                tokio::time::sleep(Duration::from_micros(50)).await;
                let message = rest.next();
                if message.is_none() || fault.ends_early(&state, &opened, deadline) {
                    opened.done();
                    return None;
                }
                message.map(|message| (Ok(encode(message)), (rest, fault, state, opened)))
            });
        Ok(Response::new(Box::pin(stream)))
    }
}

fn encode_tuples(tuples: Vec<(i64, i64)>) -> Vec<BlockMetadata> {
    tuples.into_iter().map(|(byte_offset, size_bytes)| BlockMetadata { byte_offset, size_bytes }).collect()
}

/// The deadline that a client told, in a unit that tonic writes.
fn deadline(metadata: &MetadataMap) -> Option<Instant> {
    let text = metadata.get("grpc-timeout")?.to_str().expect("ASCII");
    let (value, unit) = text.split_at(text.len() - 1);
    let value: u64 = value.parse().expect("a number");
    let timeout = match unit {
        "n" => Duration::from_nanos(value),
        "u" => Duration::from_micros(value),
        "m" => Duration::from_millis(value),
        _ => Duration::from_secs(value),
    };
    Some(Instant::now() + timeout)
}

#[tonic::async_trait]
impl SnapshotMetadata for Broken {
    type GetMetadataAllocatedStream = Messages<proto::GetMetadataAllocatedResponse>;
    type GetMetadataDeltaStream = Messages<proto::GetMetadataDeltaResponse>;

    async fn get_metadata_allocated(
        &self,
        request: Request<proto::GetMetadataAllocatedRequest>,
    ) -> Result<Response<Self::GetMetadataAllocatedStream>, Status> {
        let deadline = deadline(request.metadata());
        let request = request.into_inner();
        self.before("stream", &request).await?;
        let options = Options {
            offset: request.starting_offset,
            max_results: request.max_results,
            ..Default::default()
        };
        let question = Question::Allocated { snapshot: request.snapshot_id };
        self.stream(question, options, deadline, |message| proto::GetMetadataAllocatedResponse {
            block_metadata_type: message.style,
            volume_capacity_bytes: message.capacity,
            block_metadata: encode_tuples(message.tuples),
        })
        .await
    }

    async fn get_metadata_delta(
        &self,
        request: Request<proto::GetMetadataDeltaRequest>,
    ) -> Result<Response<Self::GetMetadataDeltaStream>, Status> {
        let deadline = deadline(request.metadata());
        let request = request.into_inner();
        self.before("stream", &request).await?;
        let options = Options {
            offset: request.starting_offset,
            max_results: request.max_results,
            ..Default::default()
        };
        let question = Question::Delta { base: request.base_snapshot_id, target: request.target_snapshot_id };
        self.stream(question, options, deadline, |message| proto::GetMetadataDeltaResponse {
            block_metadata_type: message.style,
            volume_capacity_bytes: message.capacity,
            block_metadata: encode_tuples(message.tuples),
        })
        .await
    }
}
