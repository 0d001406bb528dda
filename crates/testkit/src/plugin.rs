//! The Identity and SnapshotMetadata services of a CSI driver that a test or a bench makes itself.

use std::path::Path;
use std::pin::Pin;

use futures_util::{Stream, StreamExt};
use proto::identity_server::{Identity, IdentityServer};
use proto::snapshot_metadata_server::{SnapshotMetadata, SnapshotMetadataServer};
use proto::{
    GetMetadataAllocatedRequest, GetMetadataAllocatedResponse, GetMetadataDeltaRequest,
    GetMetadataDeltaResponse, GetPluginCapabilitiesRequest, GetPluginCapabilitiesResponse,
    GetPluginInfoRequest, GetPluginInfoResponse, PluginCapability, ProbeRequest, ProbeResponse,
    plugin_capability,
};
use tokio::net::UnixListener;
use tokio::runtime::Runtime;
use tokio_stream::wrappers::UnixListenerStream;
use tonic::transport::Server;
use tonic::transport::server::Router;
use tonic::{Request, Response, Status, async_trait};

/// A ready driver of this name, with a SnapshotMetadata service.
struct Plugin {
    name: String,
}

#[async_trait]
impl Identity for Plugin {
    async fn get_plugin_info(
        &self,
        _: Request<GetPluginInfoRequest>,
    ) -> Result<Response<GetPluginInfoResponse>, Status> {
        let name = self.name.clone();
        Ok(Response::new(GetPluginInfoResponse { name, ..Default::default() }))
    }

    async fn get_plugin_capabilities(
        &self,
        _: Request<GetPluginCapabilitiesRequest>,
    ) -> Result<Response<GetPluginCapabilitiesResponse>, Status> {
        let kind = plugin_capability::service::Type::SnapshotMetadataService;
        let service = plugin_capability::Type::Service(plugin_capability::Service { r#type: kind.into() });
        let capabilities = vec![PluginCapability { r#type: Some(service) }];
        Ok(Response::new(GetPluginCapabilitiesResponse { capabilities }))
    }

    async fn probe(&self, _: Request<ProbeRequest>) -> Result<Response<ProbeResponse>, Status> {
        Ok(Response::new(ProbeResponse { ready: Some(true) }))
    }
}

/// A request for a delta, or for what is allocated in its target.
pub struct Asked {
    pub is_delta: bool,
    pub request: GetMetadataDeltaRequest,
    /// `grpc-timeout`; empty without a deadline.
    pub timeout: String,
}

pub type Messages<M> = Pin<Box<dyn Stream<Item = Result<M, Status>> + Send>>;
pub type Answer = Result<Messages<GetMetadataAllocatedResponse>, Status>;

/// The SnapshotMetadata service whose answers a function makes. The messages of a delta have the same fields as those of what
/// is allocated.
pub struct Metadata<F>(pub F);

fn timeout_of<T>(request: &Request<T>) -> String {
    let timeout = request.metadata().get("grpc-timeout").and_then(|text| text.to_str().ok());
    timeout.unwrap_or_default().to_owned()
}

#[async_trait]
impl<A: Future<Output = Answer> + Send, F: Fn(Asked) -> A + Send + Sync + 'static> SnapshotMetadata
    for Metadata<F>
{
    type GetMetadataAllocatedStream = Messages<GetMetadataAllocatedResponse>;
    type GetMetadataDeltaStream = Messages<GetMetadataDeltaResponse>;

    async fn get_metadata_allocated(
        &self,
        request: Request<GetMetadataAllocatedRequest>,
    ) -> Result<Response<Self::GetMetadataAllocatedStream>, Status> {
        let timeout = timeout_of(&request);
        let GetMetadataAllocatedRequest { snapshot_id, starting_offset, max_results, secrets } =
            request.into_inner();
        let (base_snapshot_id, target_snapshot_id) = (String::new(), snapshot_id);
        let request = GetMetadataDeltaRequest {
            base_snapshot_id,
            target_snapshot_id,
            starting_offset,
            max_results,
            secrets,
        };
        (self.0)(Asked { is_delta: false, request, timeout }).await.map(Response::new)
    }

    async fn get_metadata_delta(
        &self,
        request: Request<GetMetadataDeltaRequest>,
    ) -> Result<Response<Self::GetMetadataDeltaStream>, Status> {
        let timeout = timeout_of(&request);
        let messages = (self.0)(Asked { is_delta: true, request: request.into_inner(), timeout }).await?;
        let delta = |message: GetMetadataAllocatedResponse| GetMetadataDeltaResponse {
            block_metadata_type: message.block_metadata_type,
            volume_capacity_bytes: message.volume_capacity_bytes,
            block_metadata: message.block_metadata,
        };
        Ok(Response::new(messages.map(move |message| message.map(delta)).boxed()))
    }
}

/// Serves a driver on a socket until the process ends.
pub async fn serve(name: &str, socket: &Path, metadata: Option<impl SnapshotMetadata>) {
    let listener = UnixListenerStream::new(UnixListener::bind(socket).expect("bind"));
    services(name, metadata).serve_with_incoming(listener).await.expect("serve");
}

fn services(name: &str, metadata: Option<impl SnapshotMetadata>) -> Router {
    Server::builder()
        .add_service(IdentityServer::new(Plugin { name: name.to_owned() }))
        .add_optional_service(metadata.map(SnapshotMetadataServer::new))
}

/// A driver on a socket, until it is dropped. Its runtime is its own, so that its connections end with it, as those of a
/// process do.
pub struct Served(Option<Runtime>);

impl Served {
    pub fn start(name: &str, socket: &Path, metadata: Option<impl SnapshotMetadata>) -> Self {
        Self::serving(socket, services(name, metadata))
    }

    /// The same with any services.
    pub fn serving(socket: &Path, services: Router) -> Self {
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build();
        let runtime = runtime.expect("a runtime");
        let _ = std::fs::remove_file(socket);
        let listener = {
            let _entered = runtime.enter();
            UnixListenerStream::new(UnixListener::bind(socket).expect("bind"))
        };
        runtime.spawn(services.serve_with_incoming(listener));
        Served(Some(runtime))
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        if let Some(runtime) = self.0.take() {
            runtime.shutdown_background();
        }
    }
}
