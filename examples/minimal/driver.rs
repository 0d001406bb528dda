//! What a CSI driver needs around its SnapshotMetadata service: volumes, which are sparse files, snapshots of them, and loop
//! devices. Records are in memory and end with the process. Of each service, the calls whose capability is not claimed are
//! not served.

use std::collections::BTreeMap;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::sync::Arc;

use cbt::{MapHeader, Stop, scan_allocated};
use proto::controller_server::Controller;
use proto::identity_server::Identity;
use proto::node_server::Node;
use proto::*;
use tokio::process::Command;
use tokio::sync::Mutex;
use tonic::{Request, Response, Status, async_trait};

use crate::BLOCK;

type Answer<T> = Result<Response<T>, Status>;

pub struct Volume {
    pub name: String,
    pub capacity: u64,
}

pub struct Snapshot {
    pub name: String,
    pub volume: String,
    /// Later snapshots have greater ones.
    pub number: u64,
    pub capacity: u64,
    created: prost_types::Timestamp,
}

#[derive(Default)]
pub struct Records {
    /// The number in the newest id.
    last: u64,
    volumes: BTreeMap<String, Volume>,
    snapshots: BTreeMap<String, Snapshot>,
}

#[derive(Clone)]
pub struct Driver {
    pub dir: PathBuf,
    /// Held through each call that makes or removes something, so these run one at a time.
    pub records: Arc<Mutex<Records>>,
}

pub fn internal(error: impl std::fmt::Display) -> Status {
    Status::internal(error.to_string())
}

/// Runs a program of the system to its end.
async fn run(program: &str, arguments: &[&Path]) -> Result<String, Status> {
    let done = Command::new(program).args(arguments).output().await.map_err(internal)?;
    let text = |bytes: Vec<u8>| String::from_utf8_lossy(&bytes).trim().to_owned();
    match done.status.success() {
        true => Ok(text(done.stdout)),
        false => Err(internal(format_args!("{program}: {}", text(done.stderr)))),
    }
}

/// Copies a sparse file; holes stay holes. On xfs and btrfs it takes no time: the blocks are shared.
async fn copy(from: &Path, to: &Path) -> Result<(), Status> {
    run("cp", &["--sparse=auto".as_ref(), "--reflink=auto".as_ref(), from, to]).await.map(drop)
}

async fn remove(path: PathBuf) -> Result<(), Status> {
    match tokio::fs::remove_file(&path).await {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => Err(internal(error)),
        _ => Ok(()),
    }
}

impl Records {
    fn new_id(&mut self, kind: &str) -> String {
        self.last += 1;
        format!("{kind}-{}", self.last)
    }

    fn volume(&self, id: &str) -> Result<&Volume, Status> {
        self.volumes.get(id).ok_or_else(|| missing("volume", id))
    }

    pub fn snapshot(&self, id: &str) -> Result<&Snapshot, Status> {
        self.snapshots.get(id).ok_or_else(|| missing("snapshot", id))
    }
}

fn missing(kind: &str, id: &str) -> Status {
    match id {
        "" => Status::invalid_argument(format!("the id of a {kind} is missing")),
        _ => Status::not_found(format!("there is no {kind} {id:?}")),
    }
}

impl Driver {
    /// The map of a snapshot's allocated blocks, beside its data.
    pub fn map(&self, id: &str) -> PathBuf {
        self.dir.join(format!("{id}.map"))
    }
}

fn tell(id: &str, snapshot: &Snapshot) -> CreateSnapshotResponse {
    let snapshot = proto::Snapshot {
        snapshot_id: id.to_owned(),
        source_volume_id: snapshot.volume.clone(),
        size_bytes: snapshot.capacity as i64,
        creation_time: Some(snapshot.created),
        ready_to_use: true,
        ..Default::default()
    };
    CreateSnapshotResponse { snapshot: Some(snapshot) }
}

fn is_block(capability: &VolumeCapability) -> bool {
    matches!(capability.access_type, Some(volume_capability::AccessType::Block(_)))
}

/// Calls of a service whose capability is not claimed, as `async_trait` has them.
macro_rules! not_served {
    ($($call:ident($request:ty) -> $response:ty),* $(,)?) => {$(
        fn $call<'s, 'a>(
            &'s self,
            _: Request<$request>,
        ) -> Pin<Box<dyn Future<Output = Answer<$response>> + Send + 'a>>
        where
            's: 'a,
            Self: 'a,
        {
            Box::pin(async { Err(Status::unimplemented(stringify!($call))) })
        }
    )*};
}

#[async_trait]
impl Controller for Driver {
    async fn create_volume(&self, request: Request<CreateVolumeRequest>) -> Answer<CreateVolumeResponse> {
        let request = request.into_inner();
        let capabilities = &request.volume_capabilities;
        if request.name.is_empty() || capabilities.is_empty() || !capabilities.iter().all(is_block) {
            return Err(Status::invalid_argument("a name and capabilities of Block volumes are needed"));
        }
        let mut records = self.records.lock().await;
        let source = match request.volume_content_source.clone().and_then(|source| source.r#type) {
            Some(volume_content_source::Type::Snapshot(source)) => Some(source.snapshot_id),
            Some(_) => return Err(Status::invalid_argument("a volume cannot be cloned")),
            None => None,
        };
        let least = source.as_ref().map(|id| records.snapshot(id)).transpose()?.map_or(0, |one| one.capacity);
        let asked = request.capacity_range.map_or(1 << 30, |range| range.required_bytes.unsigned_abs());
        let capacity = BLOCK.round_up(asked).filter(|capacity| *capacity >= least);
        let capacity = capacity.ok_or_else(|| Status::out_of_range("no volume can have required_bytes"))?;
        let there = records.volumes.iter().find(|(_, volume)| volume.name == request.name);
        let id = match there.map(|(id, volume)| (id.clone(), volume.capacity)) {
            Some((id, there)) if there == capacity => id,
            Some(_) => return Err(Status::already_exists("the volume has another size")),
            None => {
                let id = records.new_id("volume");
                let path = self.dir.join(&id);
                if let Some(source) = &source {
                    copy(&self.dir.join(source), &path).await?;
                }
                let file = File::options().create(true).truncate(false).write(true).open(&path);
                file.and_then(|file| file.set_len(capacity)).map_err(internal)?;
                records.volumes.insert(id.clone(), Volume { name: request.name, capacity });
                id
            }
        };
        let volume = proto::Volume {
            volume_id: id,
            capacity_bytes: capacity as i64,
            content_source: request.volume_content_source,
            ..Default::default()
        };
        Ok(Response::new(CreateVolumeResponse { volume: Some(volume) }))
    }

    async fn delete_volume(&self, request: Request<DeleteVolumeRequest>) -> Answer<DeleteVolumeResponse> {
        let id = request.into_inner().volume_id;
        let mut records = self.records.lock().await;
        if records.volumes.contains_key(&id) {
            remove(self.dir.join(&id)).await?;
            records.volumes.remove(&id);
        }
        Ok(Response::new(Default::default()))
    }

    async fn create_snapshot(
        &self,
        request: Request<CreateSnapshotRequest>,
    ) -> Answer<CreateSnapshotResponse> {
        let CreateSnapshotRequest { name, source_volume_id: volume, .. } = request.into_inner();
        if name.is_empty() {
            return Err(Status::invalid_argument("the name is missing"));
        }
        let mut records = self.records.lock().await;
        if let Some((id, there)) = records.snapshots.iter().find(|(_, snapshot)| snapshot.name == name) {
            return match there.volume == volume {
                true => Ok(Response::new(tell(id, there))),
                false => Err(Status::already_exists("the snapshot is of another volume")),
            };
        }
        let capacity = records.volume(&volume)?.capacity;
        let id = records.new_id("snapshot");
        let data = self.dir.join(&id);
        // A copy of a device under write is torn: a driver for real use takes its storage's snapshot here.
        copy(&self.dir.join(&volume), &data).await?;
        let map = self.map(&id);
        let header = MapHeader { block_size: BLOCK, blocks: BLOCK.blocks_in(capacity), relative_to: None };
        let file = File::open(&data).map_err(internal)?;
        let scan =
            move || -> cbt::Result<u64> { scan_allocated(&file, &data, &map, header, &Stop::default()) };
        tokio::task::spawn_blocking(scan).await.map_err(internal)?.map_err(internal)?;
        let created = std::time::SystemTime::now().into();
        let snapshot = Snapshot { name, volume, number: records.last, capacity, created };
        let answer = tell(&id, &snapshot);
        records.snapshots.insert(id, snapshot);
        Ok(Response::new(answer))
    }

    async fn delete_snapshot(
        &self,
        request: Request<DeleteSnapshotRequest>,
    ) -> Answer<DeleteSnapshotResponse> {
        let id = request.into_inner().snapshot_id;
        let mut records = self.records.lock().await;
        if records.snapshots.contains_key(&id) {
            remove(self.dir.join(&id)).await?;
            remove(self.map(&id)).await?;
            records.snapshots.remove(&id);
        }
        Ok(Response::new(Default::default()))
    }

    async fn validate_volume_capabilities(
        &self,
        request: Request<ValidateVolumeCapabilitiesRequest>,
    ) -> Answer<ValidateVolumeCapabilitiesResponse> {
        let request = request.into_inner();
        self.records.lock().await.volume(&request.volume_id)?;
        let volume_capabilities = request.volume_capabilities;
        let confirmed = volume_capabilities.iter().all(is_block).then(|| {
            validate_volume_capabilities_response::Confirmed { volume_capabilities, ..Default::default() }
        });
        Ok(Response::new(ValidateVolumeCapabilitiesResponse { confirmed, ..Default::default() }))
    }

    async fn controller_get_capabilities(
        &self,
        _: Request<ControllerGetCapabilitiesRequest>,
    ) -> Answer<ControllerGetCapabilitiesResponse> {
        use controller_service_capability::{Rpc, Type, rpc};
        let kinds = [rpc::Type::CreateDeleteVolume, rpc::Type::CreateDeleteSnapshot];
        let capabilities = kinds
            .map(|kind| ControllerServiceCapability { r#type: Some(Type::Rpc(Rpc { r#type: kind.into() })) });
        Ok(Response::new(ControllerGetCapabilitiesResponse { capabilities: capabilities.into() }))
    }

    not_served! {
        controller_publish_volume(ControllerPublishVolumeRequest) -> ControllerPublishVolumeResponse,
        controller_unpublish_volume(ControllerUnpublishVolumeRequest) -> ControllerUnpublishVolumeResponse,
        list_volumes(ListVolumesRequest) -> ListVolumesResponse,
        controller_list_volume_health(ControllerListVolumeHealthRequest) -> ControllerListVolumeHealthResponse,
        controller_get_volume_health(ControllerGetVolumeHealthRequest) -> ControllerGetVolumeHealthResponse,
        get_capacity(GetCapacityRequest) -> GetCapacityResponse,
        list_snapshots(ListSnapshotsRequest) -> ListSnapshotsResponse,
        get_snapshot(GetSnapshotRequest) -> GetSnapshotResponse,
        controller_expand_volume(ControllerExpandVolumeRequest) -> ControllerExpandVolumeResponse,
        controller_get_volume(ControllerGetVolumeRequest) -> ControllerGetVolumeResponse,
        controller_modify_volume(ControllerModifyVolumeRequest) -> ControllerModifyVolumeResponse,
    }
}

#[async_trait]
impl Node for Driver {
    /// The target is the loop device of the volume's file, bound to it.
    async fn node_publish_volume(
        &self,
        request: Request<NodePublishVolumeRequest>,
    ) -> Answer<NodePublishVolumeResponse> {
        let request = request.into_inner();
        self.records.lock().await.volume(&request.volume_id)?;
        if request.target_path.is_empty() || !request.volume_capability.as_ref().is_some_and(is_block) {
            return Err(Status::invalid_argument("a target_path and a Block capability are needed"));
        }
        let target = Path::new(&request.target_path);
        File::create_new(target).map_err(internal)?;
        let options: [&Path; 4] = ["--find", "--show", "--direct-io=on", "--nooverlap"].map(Path::new);
        let file = self.dir.join(&request.volume_id);
        let device = run("losetup", &[&options[..], &[&file]].concat()).await?;
        run("mount", &["--bind".as_ref(), device.as_ref(), target]).await?;
        Ok(Response::new(Default::default()))
    }

    async fn node_unpublish_volume(
        &self,
        request: Request<NodeUnpublishVolumeRequest>,
    ) -> Answer<NodeUnpublishVolumeResponse> {
        let request = request.into_inner();
        let target = Path::new(&request.target_path);
        if target.exists() {
            run("losetup", &["--detach".as_ref(), target]).await?;
            run("umount", &[target]).await?;
            remove(target.into()).await?;
        }
        Ok(Response::new(Default::default()))
    }

    async fn node_get_capabilities(
        &self,
        _: Request<NodeGetCapabilitiesRequest>,
    ) -> Answer<NodeGetCapabilitiesResponse> {
        Ok(Response::new(Default::default()))
    }

    async fn node_get_info(&self, _: Request<NodeGetInfoRequest>) -> Answer<NodeGetInfoResponse> {
        Ok(Response::new(NodeGetInfoResponse { node_id: "this".into(), ..Default::default() }))
    }

    not_served! {
        node_stage_volume(NodeStageVolumeRequest) -> NodeStageVolumeResponse,
        node_unstage_volume(NodeUnstageVolumeRequest) -> NodeUnstageVolumeResponse,
        node_get_volume_stats(NodeGetVolumeStatsRequest) -> NodeGetVolumeStatsResponse,
        node_get_volume_health(NodeGetVolumeHealthRequest) -> NodeGetVolumeHealthResponse,
        node_get_storage_health(NodeGetStorageHealthRequest) -> NodeGetStorageHealthResponse,
        node_expand_volume(NodeExpandVolumeRequest) -> NodeExpandVolumeResponse,
    }
}

#[async_trait]
impl Identity for Driver {
    async fn get_plugin_info(&self, _: Request<GetPluginInfoRequest>) -> Answer<GetPluginInfoResponse> {
        let (name, vendor_version) = ("minimal.example.com".into(), "0.1.0".into());
        Ok(Response::new(GetPluginInfoResponse { name, vendor_version, ..Default::default() }))
    }

    async fn get_plugin_capabilities(
        &self,
        _: Request<GetPluginCapabilitiesRequest>,
    ) -> Answer<GetPluginCapabilitiesResponse> {
        use plugin_capability::{Service, Type, service};
        let kinds = [service::Type::ControllerService, service::Type::SnapshotMetadataService];
        let capabilities = kinds
            .map(|kind| PluginCapability { r#type: Some(Type::Service(Service { r#type: kind.into() })) });
        Ok(Response::new(GetPluginCapabilitiesResponse { capabilities: capabilities.into() }))
    }

    async fn probe(&self, _: Request<ProbeRequest>) -> Answer<ProbeResponse> {
        Ok(Response::new(ProbeResponse { ready: Some(true) }))
    }
}
