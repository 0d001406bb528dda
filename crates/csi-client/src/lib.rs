//! A small CSI client: what a sidecar, a kubelet and a backup tool do, over the driver's socket. Any
//! driver's: it knows the wire contract and nothing of ours.
#![allow(clippy::disallowed_methods)]
#![forbid(unsafe_code)]

pub mod identity;
mod metadata;
mod raw;

pub use metadata::{BlockList, Tuple};
pub use raw::{Message, Options, Question, RawStream};

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use hyper_util::rt::TokioIo;
use tokio::net::UnixStream;
use tonic::transport::{Endpoint, Uri};
use tonic::{Code, Status};
use tower::Service;

use proto::answers::Checked;
use proto::controller_client::ControllerClient;
use proto::group_controller_client::GroupControllerClient;
use proto::identity_client::IdentityClient;
use proto::node_client::NodeClient;
use proto::snapshot_metadata_client::SnapshotMetadataClient;
use proto::{
    self, CapacityRange, VolumeCapability, VolumeContentSource, volume_capability, volume_content_source,
};

/// A call that failed: which one, and what the driver said.
#[derive(Debug, thiserror::Error)]
#[error("{call}: {:?}: {}", status.code(), status.message())]
pub struct Error {
    /// The RPC.
    pub call: &'static str,
    /// The answer.
    pub status: Status,
}

impl Error {
    fn of(call: &'static str) -> impl Fn(Status) -> Error {
        move |status| Error { call, status }
    }

    /// The gRPC code of the answer.
    pub fn code(&self) -> Code {
        self.status.code()
    }
}

/// What a call returns.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// A connection to a driver.
#[derive(Clone, Debug)]
pub struct Client {
    /// The Identity service.
    pub identity: IdentityClient<Checked>,
    /// The Controller service.
    pub controller: ControllerClient<Checked>,
    /// The GroupController service.
    pub groups: GroupControllerClient<Checked>,
    /// The Node service.
    pub node: NodeClient<Checked>,
    /// The SnapshotMetadata service.
    pub metadata: SnapshotMetadataClient<Checked>,
}

/// A raw block device for one writer.
pub fn block_capability() -> VolumeCapability {
    capability(volume_capability::AccessType::Block(volume_capability::BlockVolume {}))
}

/// A mounted filesystem for one writer.
pub fn mount_capability(fs_type: &str) -> VolumeCapability {
    capability(volume_capability::AccessType::Mount(volume_capability::MountVolume {
        fs_type: fs_type.to_owned(),
        ..Default::default()
    }))
}

fn capability(access: volume_capability::AccessType) -> VolumeCapability {
    use volume_capability::access_mode::Mode;
    VolumeCapability {
        access_type: Some(access),
        access_mode: Some(volume_capability::AccessMode { mode: Mode::SingleNodeWriter.into() }),
    }
}

/// A snapshot as the content of a new volume.
pub fn from_snapshot(snapshot_id: &str) -> VolumeContentSource {
    let source = volume_content_source::SnapshotSource { snapshot_id: snapshot_id.to_owned() };
    VolumeContentSource { r#type: Some(volume_content_source::Type::Snapshot(source)) }
}

/// A volume as the content of a new one.
pub fn from_volume(volume_id: &str) -> VolumeContentSource {
    let source = volume_content_source::VolumeSource { volume_id: volume_id.to_owned() };
    VolumeContentSource { r#type: Some(volume_content_source::Type::Volume(source)) }
}

/// A CreateVolume request of `bytes` for one use, with nothing else asked.
pub fn new_volume(name: &str, bytes: i64, capability: VolumeCapability) -> proto::CreateVolumeRequest {
    proto::CreateVolumeRequest {
        name: name.to_owned(),
        capacity_range: Some(CapacityRange { required_bytes: bytes, limit_bytes: 0 }),
        volume_capabilities: vec![capability],
        ..Default::default()
    }
}

/// A NodeStageVolume request with nothing else asked.
pub fn stage_of(
    volume_id: &str,
    staging: &Path,
    capability: VolumeCapability,
) -> proto::NodeStageVolumeRequest {
    proto::NodeStageVolumeRequest {
        volume_id: volume_id.to_owned(),
        staging_target_path: text(staging),
        volume_capability: Some(capability),
        ..Default::default()
    }
}

/// A GetMetadataDelta request for all of a delta.
pub fn delta_of(base: &str, target: &str) -> proto::GetMetadataDeltaRequest {
    proto::GetMetadataDeltaRequest {
        base_snapshot_id: base.to_owned(),
        target_snapshot_id: target.to_owned(),
        ..Default::default()
    }
}

impl Client {
    /// Connects to the socket at `path`, waiting up to `patience` for a driver to answer there.
    pub async fn connect(path: &Path, patience: Duration) -> Result<Self, tonic::transport::Error> {
        let deadline = Instant::now() + patience;
        loop {
            match dial(endpoint(), path).await {
                Ok(client) => return Ok(client),
                Err(error) if Instant::now() > deadline => return Err(error),
                Err(_) => tokio::time::sleep(Duration::from_millis(10)).await,
            }
        }
    }

    /// The same with a connection that takes in `window` bytes of a stream and no more before they are
    /// read: a stream that is longer waits for its reader.
    pub async fn connect_narrow(path: &Path, window: u32) -> Result<Self, tonic::transport::Error> {
        dial(endpoint().initial_stream_window_size(window), path).await
    }

    /// The clients of all services, over a channel.
    pub fn over(channel: Checked) -> Self {
        Client {
            identity: IdentityClient::new(channel.clone()),
            controller: ControllerClient::new(channel.clone()),
            groups: GroupControllerClient::new(channel.clone()),
            node: NodeClient::new(channel.clone()),
            metadata: SnapshotMetadataClient::new(channel),
        }
    }

    /// CreateVolume.
    pub async fn create_volume(&mut self, request: proto::CreateVolumeRequest) -> Result<proto::Volume> {
        const CALL: &str = "CreateVolume";
        let answer = self.controller.create_volume(request).await.map_err(Error::of(CALL))?;
        answer.into_inner().volume.ok_or_else(|| empty(CALL))
    }

    /// DeleteVolume.
    pub async fn delete_volume(&mut self, volume_id: &str) -> Result<()> {
        let request =
            proto::DeleteVolumeRequest { volume_id: volume_id.to_owned(), secrets: Default::default() };
        self.controller.delete_volume(request).await.map_err(Error::of("DeleteVolume")).map(drop)
    }

    /// ListVolumes: all of them, where they fit in one page.
    pub async fn volumes(&mut self) -> Result<Vec<proto::Volume>> {
        let answer = self.controller.list_volumes(proto::ListVolumesRequest::default()).await;
        let entries = answer.map_err(Error::of("ListVolumes"))?.into_inner().entries;
        Ok(entries.into_iter().filter_map(|entry| entry.volume).collect())
    }

    /// ListSnapshots: all of them, where they fit in one page.
    pub async fn snapshots(&mut self) -> Result<Vec<proto::Snapshot>> {
        let answer = self.controller.list_snapshots(proto::ListSnapshotsRequest::default()).await;
        let entries = answer.map_err(Error::of("ListSnapshots"))?.into_inner().entries;
        Ok(entries.into_iter().filter_map(|entry| entry.snapshot).collect())
    }

    /// CreateSnapshot.
    pub async fn create_snapshot(&mut self, name: &str, volume_id: &str) -> Result<proto::Snapshot> {
        const CALL: &str = "CreateSnapshot";
        let request = proto::CreateSnapshotRequest {
            name: name.to_owned(),
            source_volume_id: volume_id.to_owned(),
            ..Default::default()
        };
        let answer = self.controller.create_snapshot(request).await.map_err(Error::of(CALL))?;
        answer.into_inner().snapshot.ok_or_else(|| empty(CALL))
    }

    /// DeleteSnapshot.
    pub async fn delete_snapshot(&mut self, snapshot_id: &str) -> Result<()> {
        let request =
            proto::DeleteSnapshotRequest { snapshot_id: snapshot_id.to_owned(), secrets: Default::default() };
        self.controller.delete_snapshot(request).await.map_err(Error::of("DeleteSnapshot")).map(drop)
    }

    /// ControllerExpandVolume to at least `bytes`.
    pub async fn expand_volume(
        &mut self,
        volume_id: &str,
        bytes: i64,
    ) -> Result<proto::ControllerExpandVolumeResponse> {
        let request = proto::ControllerExpandVolumeRequest {
            volume_id: volume_id.to_owned(),
            capacity_range: Some(CapacityRange { required_bytes: bytes, limit_bytes: 0 }),
            ..Default::default()
        };
        let answer = self.controller.controller_expand_volume(request).await;
        answer.map(tonic::Response::into_inner).map_err(Error::of("ControllerExpandVolume"))
    }

    /// CreateVolumeGroupSnapshot.
    pub async fn create_group(
        &mut self,
        name: &str,
        volume_ids: &[String],
    ) -> Result<proto::VolumeGroupSnapshot> {
        const CALL: &str = "CreateVolumeGroupSnapshot";
        let request = proto::CreateVolumeGroupSnapshotRequest {
            name: name.to_owned(),
            source_volume_ids: volume_ids.to_vec(),
            ..Default::default()
        };
        let answer = self.groups.create_volume_group_snapshot(request).await.map_err(Error::of(CALL))?;
        answer.into_inner().group_snapshot.ok_or_else(|| empty(CALL))
    }

    /// DeleteVolumeGroupSnapshot.
    pub async fn delete_group(&mut self, group_id: &str, snapshot_ids: &[String]) -> Result<()> {
        let request = proto::DeleteVolumeGroupSnapshotRequest {
            group_snapshot_id: group_id.to_owned(),
            snapshot_ids: snapshot_ids.to_vec(),
            ..Default::default()
        };
        let answer = self.groups.delete_volume_group_snapshot(request).await;
        answer.map(drop).map_err(Error::of("DeleteVolumeGroupSnapshot"))
    }

    /// Stages and publishes a volume as kubelet does, below `dir`, and returns the target: the block
    /// device, or the directory of the filesystem.
    pub async fn publish(
        &mut self,
        volume_id: &str,
        capability: VolumeCapability,
        readonly: bool,
        dir: &Path,
    ) -> Result<PathBuf> {
        let paths = MountPaths::of(dir, volume_id);
        std::fs::create_dir_all(&paths.staging).map_err(|error| Error {
            call: "NodeStageVolume",
            status: Status::internal(format!("make {}: {error}", paths.staging.display())),
        })?;
        let stage = stage_of(volume_id, &paths.staging, capability.clone());
        self.node.node_stage_volume(stage).await.map_err(Error::of("NodeStageVolume"))?;
        let publish = proto::NodePublishVolumeRequest {
            volume_id: volume_id.to_owned(),
            staging_target_path: text(&paths.staging),
            target_path: text(&paths.target),
            volume_capability: Some(capability),
            readonly,
            ..Default::default()
        };
        self.node.node_publish_volume(publish).await.map_err(Error::of("NodePublishVolume"))?;
        Ok(paths.target)
    }

    /// Undoes [`Client::publish`].
    pub async fn unpublish(&mut self, volume_id: &str, dir: &Path) -> Result<()> {
        let paths = MountPaths::of(dir, volume_id);
        let unpublish = proto::NodeUnpublishVolumeRequest {
            volume_id: volume_id.to_owned(),
            target_path: text(&paths.target),
        };
        self.node.node_unpublish_volume(unpublish).await.map_err(Error::of("NodeUnpublishVolume"))?;
        let unstage = proto::NodeUnstageVolumeRequest {
            volume_id: volume_id.to_owned(),
            staging_target_path: text(&paths.staging),
        };
        self.node.node_unstage_volume(unstage).await.map_err(Error::of("NodeUnstageVolume")).map(drop)
    }
}

/// Where a volume is staged and published, as kubelet would lay it out.
struct MountPaths {
    staging: PathBuf,
    target: PathBuf,
}

impl MountPaths {
    fn of(dir: &Path, volume_id: &str) -> Self {
        let base = dir.join(volume_id);
        MountPaths { staging: base.join("staging"), target: base.join("target") }
    }
}

fn text(path: &Path) -> String {
    path.to_string_lossy().into_owned()
}

fn empty(call: &'static str) -> Error {
    Error { call, status: Status::internal("the answer is empty") }
}

/// The address is not used: the connector always takes the socket.
fn endpoint() -> Endpoint {
    Endpoint::from_static("http://localhost")
}

async fn dial(endpoint: Endpoint, path: &Path) -> Result<Client, tonic::transport::Error> {
    Ok(Client::over(Checked(endpoint.connect_with_connector(connector(path.to_owned())).await?)))
}

/// Connects to the socket, whatever address is asked for.
pub fn connector(
    path: PathBuf,
) -> impl Service<Uri, Response = TokioIo<UnixStream>, Error = std::io::Error, Future: Send> + Send + 'static
{
    tower::service_fn(move |_: Uri| {
        let path = path.clone();
        async move { UnixStream::connect(path).await.map(TokioIo::new) }
    })
}
