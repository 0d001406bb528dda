//! The driver in memory: volumes, snapshots, groups, and what the streams tell of them. Ids are names, so a test knows them
//! beforehand.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Instant, SystemTime};

use futures_util::Stream;
use proto::*;
use tonic::Status;

use super::data::{self, Changes, Tuples};
use crate::random;

/// The most data that a published volume is written with.
const PUBLISHED: u64 = 4 << 30;
/// Tuples of a message at most: with 22 bytes each they fit gRPC's 4 MiB.
const TUPLES: usize = 100_000;

/// How the mock answers.
#[derive(Clone, Debug)]
pub(super) struct Settings {
    pub name: String,
    pub seed: u64,
    pub block_size: u64,
    pub fixed: bool,
    pub tuples_per_message: usize,
    pub changes: u64,
    /// Whether a deleted base is answered as if it were there.
    pub keeps_bases: bool,
}

#[derive(Clone, Debug)]
struct Volume {
    request: CreateVolumeRequest,
    capacity: u64,
    history: Vec<Arc<Changes>>,
}

#[derive(Clone, Debug)]
struct Snapshot {
    volume: String,
    group: String,
    /// Among those of its volume.
    number: usize,
    capacity: u64,
    history: Vec<Arc<Changes>>,
    created: SystemTime,
    is_deleted: bool,
}

#[derive(Debug, Default)]
struct State {
    volumes: BTreeMap<String, Volume>,
    snapshots: BTreeMap<String, Snapshot>,
    groups: BTreeMap<String, Vec<String>>,
}

#[derive(Debug)]
pub(super) struct Driver {
    pub settings: Settings,
    state: Mutex<State>,
}

/// One of the two questions.
pub(super) struct Question<'a> {
    pub base: Option<&'a str>,
    pub target: &'a str,
    pub offset: i64,
    pub max_results: i32,
}

fn missing(what: &str) -> Status {
    Status::invalid_argument(format!("{what} is missing"))
}

impl Driver {
    pub fn new(settings: Settings) -> Self {
        Driver { settings, state: Mutex::default() }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn create_volume(&self, request: CreateVolumeRequest) -> Result<CreateVolumeResponse, Status> {
        if request.name.is_empty() {
            return Err(missing("name"));
        }
        if request.volume_capabilities.is_empty() {
            return Err(missing("volume_capabilities"));
        }
        let range = request.capacity_range.unwrap_or_default();
        let mut state = self.state();
        let (mut history, mut least) = (Vec::new(), 0);
        match request.volume_content_source.as_ref().and_then(|source| source.r#type.as_ref()) {
            Some(volume_content_source::Type::Snapshot(source)) => {
                let snapshot = state.snapshot(&source.snapshot_id)?;
                (history, least) = (snapshot.history.clone(), snapshot.capacity);
            }
            Some(volume_content_source::Type::Volume(source)) => {
                let volume = state.volume(&source.volume_id)?;
                (history, least) = (volume.history.clone(), volume.capacity);
            }
            None => {}
        }
        let asked = u64::try_from(range.required_bytes)
            .map_err(|_| Status::invalid_argument("required_bytes is negative"))?;
        let capacity = match asked {
            0 if least > 0 => least,
            0 => 1 << 30,
            asked if asked < least => {
                return Err(Status::out_of_range(format!(
                    "{asked} bytes are less than the source has, {least}"
                )));
            }
            asked => asked,
        };
        if range.limit_bytes != 0 && capacity > range.limit_bytes.unsigned_abs() {
            return Err(Status::out_of_range(format!(
                "{capacity} bytes are above limit_bytes, {}",
                range.limit_bytes
            )));
        }
        let name = request.name.clone();
        match state.volumes.get(&name) {
            Some(there)
                if there.capacity != capacity
                    || there.request.volume_content_source != request.volume_content_source =>
            {
                return Err(Status::already_exists(format!("{name} is there with another size or source")));
            }
            Some(_) => {}
            None => {
                state.volumes.insert(name.clone(), Volume { request, capacity, history });
            }
        }
        let volume = state.volumes.get(&name).map(|volume| volume.tell(&name));
        Ok(CreateVolumeResponse { volume })
    }

    pub fn delete_volume(&self, request: &DeleteVolumeRequest) -> Result<DeleteVolumeResponse, Status> {
        if request.volume_id.is_empty() {
            return Err(missing("volume_id"));
        }
        self.state().volumes.remove(&request.volume_id);
        Ok(DeleteVolumeResponse::default())
    }

    pub fn list_volumes(&self, request: &ListVolumesRequest) -> Result<ListVolumesResponse, Status> {
        let state = self.state();
        let (chosen, next_token) =
            page(state.volumes.iter().collect(), &request.starting_token, request.max_entries)?;
        let entry = |(id, volume): (&String, &Volume)| list_volumes_response::Entry {
            volume: Some(volume.tell(id)),
            ..Default::default()
        };
        Ok(ListVolumesResponse { entries: chosen.into_iter().map(entry).collect(), next_token })
    }

    pub fn expand(
        &self,
        request: &ControllerExpandVolumeRequest,
    ) -> Result<ControllerExpandVolumeResponse, Status> {
        let range = request.capacity_range.unwrap_or_default();
        let mut state = self.state();
        let volume = state
            .volumes
            .get_mut(&request.volume_id)
            .ok_or_else(|| Status::not_found(format!("there is no volume {:?}", request.volume_id)))?;
        volume.capacity = volume.capacity.max(range.required_bytes.unsigned_abs());
        Ok(ControllerExpandVolumeResponse {
            capacity_bytes: volume.capacity as i64,
            node_expansion_required: false,
        })
    }

    /// Takes any parameters, and they change nothing.
    pub fn modify(
        &self,
        request: &ControllerModifyVolumeRequest,
    ) -> Result<ControllerModifyVolumeResponse, Status> {
        self.state().volume(&request.volume_id)?;
        Ok(ControllerModifyVolumeResponse::default())
    }

    pub fn create_snapshot(&self, request: &CreateSnapshotRequest) -> Result<CreateSnapshotResponse, Status> {
        if request.name.is_empty() {
            return Err(missing("name"));
        }
        if request.source_volume_id.is_empty() {
            return Err(missing("source_volume_id"));
        }
        let mut state = self.state();
        self.snapshot(&mut state, &request.name, &request.source_volume_id, "", &request.parameters)?;
        Ok(CreateSnapshotResponse { snapshot: Some(state.snapshot(&request.name)?.tell(&request.name)) })
    }

    /// Takes a snapshot, and with it the changes since the one before.
    fn snapshot(
        &self,
        state: &mut State,
        name: &str,
        volume_id: &str,
        group: &str,
        parameters: &std::collections::HashMap<String, String>,
    ) -> Result<(), Status> {
        if let Some(there) = state.snapshots.get(name) {
            return match there.volume == volume_id && there.group == group {
                true if !there.is_deleted => Ok(()),
                true => Err(Status::already_exists(format!(
                    "{name} was deleted; its name is not given out again"
                ))),
                false => Err(Status::already_exists(format!("{name} is a snapshot of {}", there.volume))),
            };
        }
        let number = state.snapshots.values().filter(|snapshot| snapshot.volume == volume_id).count();
        let volume = state
            .volumes
            .get_mut(volume_id)
            .ok_or_else(|| Status::not_found(format!("there is no volume {volume_id:?}")))?;
        let Settings { seed, block_size, .. } = self.settings;
        let seed = random::at(random::of(seed, volume_id), volume.history.len() as u64);
        let blocks = volume.capacity.div_ceil(block_size);
        if let Some(unknown) = parameters.keys().find(|key| {
            !["changes", "ranges"].contains(&key.as_str()) && !key.starts_with("csi.storage.k8s.io/")
        }) {
            return Err(Status::invalid_argument(format!(
                "there is no parameter {unknown:?}: it takes changes or ranges"
            )));
        }
        let changes = match (parameters.get("ranges"), parameters.get("changes")) {
            (Some(_), Some(_)) => {
                return Err(Status::invalid_argument("it takes changes or ranges, not both"));
            }
            (Some(ranges), None) => {
                data::listed(ranges, block_size, volume.capacity, seed).map_err(Status::invalid_argument)?
            }
            (None, changes) => {
                let wanted = |_| Status::invalid_argument("changes is no number");
                let count: u64 = changes
                    .map(|changes| changes.parse())
                    .transpose()
                    .map_err(wanted)?
                    .unwrap_or(self.settings.changes);
                Changes::Spread { blocks, count: count.min(blocks), seed }
            }
        };
        volume.history.push(Arc::new(changes));
        let snapshot = Snapshot {
            volume: volume_id.to_owned(),
            group: group.to_owned(),
            number,
            capacity: volume.capacity,
            history: volume.history.clone(),
            created: SystemTime::now(),
            is_deleted: false,
        };
        state.snapshots.insert(name.to_owned(), snapshot);
        Ok(())
    }

    pub fn delete_snapshot(&self, request: &DeleteSnapshotRequest) -> Result<DeleteSnapshotResponse, Status> {
        if request.snapshot_id.is_empty() {
            return Err(missing("snapshot_id"));
        }
        if let Some(snapshot) = self.state().snapshots.get_mut(&request.snapshot_id) {
            snapshot.is_deleted = true;
        }
        Ok(DeleteSnapshotResponse::default())
    }

    pub fn list_snapshots(&self, request: &ListSnapshotsRequest) -> Result<ListSnapshotsResponse, Status> {
        let state = self.state();
        let is_asked = |(id, snapshot): &(&String, &Snapshot)| {
            !snapshot.is_deleted
                && (request.snapshot_id.is_empty() || request.snapshot_id == **id)
                && (request.source_volume_id.is_empty() || request.source_volume_id == snapshot.volume)
        };
        let all = state.snapshots.iter().filter(is_asked).collect();
        let (chosen, next_token) = page(all, &request.starting_token, request.max_entries)?;
        let entry = |(id, snapshot): (&String, &Snapshot)| list_snapshots_response::Entry {
            snapshot: Some(snapshot.tell(id)),
        };
        Ok(ListSnapshotsResponse { entries: chosen.into_iter().map(entry).collect(), next_token })
    }

    pub fn create_group(
        &self,
        request: &CreateVolumeGroupSnapshotRequest,
    ) -> Result<CreateVolumeGroupSnapshotResponse, Status> {
        if request.name.is_empty() {
            return Err(missing("name"));
        }
        if request.source_volume_ids.is_empty() {
            return Err(missing("source_volume_ids"));
        }
        let mut state = self.state();
        // All members or none.
        for volume in &request.source_volume_ids {
            state.volume(volume)?;
        }
        let mut members = Vec::new();
        for volume in &request.source_volume_ids {
            let name = format!("{}-{volume}", request.name);
            self.snapshot(&mut state, &name, volume, &request.name, &request.parameters)?;
            members.push(name);
        }
        state.groups.insert(request.name.clone(), members);
        Ok(CreateVolumeGroupSnapshotResponse { group_snapshot: Some(state.group(&request.name)?) })
    }

    pub fn get_group(
        &self,
        request: &GetVolumeGroupSnapshotRequest,
    ) -> Result<GetVolumeGroupSnapshotResponse, Status> {
        Ok(GetVolumeGroupSnapshotResponse {
            group_snapshot: Some(self.state().group(&request.group_snapshot_id)?),
        })
    }

    pub fn delete_group(
        &self,
        request: &DeleteVolumeGroupSnapshotRequest,
    ) -> Result<DeleteVolumeGroupSnapshotResponse, Status> {
        if request.group_snapshot_id.is_empty() {
            return Err(missing("group_snapshot_id"));
        }
        let mut state = self.state();
        for member in state.groups.remove(&request.group_snapshot_id).unwrap_or_default() {
            if let Some(snapshot) = state.snapshots.get_mut(&member) {
                snapshot.is_deleted = true;
            }
        }
        Ok(DeleteVolumeGroupSnapshotResponse::default())
    }

    /// Makes the target: of a Block volume a file with what the volume holds, of a Filesystem volume a directory.
    pub fn publish(&self, request: &NodePublishVolumeRequest) -> Result<NodePublishVolumeResponse, Status> {
        if request.target_path.is_empty() {
            return Err(missing("target_path"));
        }
        let capability = request.volume_capability.as_ref().ok_or_else(|| missing("volume_capability"))?;
        let (capacity, history) = {
            let state = self.state();
            let volume = state.volume(&request.volume_id)?;
            (volume.capacity, volume.history.clone())
        };
        let target = Path::new(&request.target_path);
        let failed = |error: std::io::Error| Status::internal(format!("make {}: {error}", target.display()));
        let is_mount = matches!(capability.access_type, Some(volume_capability::AccessType::Mount(_)));
        if is_mount {
            std::fs::create_dir_all(target).map_err(failed)?;
            return Ok(NodePublishVolumeResponse::default());
        }
        let block_size = self.settings.block_size;
        let most = (PUBLISHED / block_size) as usize;
        if data::Blocks::new(&history, 0).take(most + 1).count() > most {
            return Err(Status::resource_exhausted(format!(
                "{} holds more than {PUBLISHED} bytes of data",
                request.volume_id
            )));
        }
        // Made beside it, so that what is there is whole.
        let draft = target.with_extension("draft");
        let file = std::fs::File::create(&draft).map_err(failed)?;
        file.set_len(capacity).map_err(failed)?;
        data::write(&file, &history, block_size, capacity).map_err(failed)?;
        std::fs::rename(&draft, target).map_err(failed)?;
        Ok(NodePublishVolumeResponse::default())
    }

    pub fn unpublish(
        &self,
        request: &NodeUnpublishVolumeRequest,
    ) -> Result<NodeUnpublishVolumeResponse, Status> {
        let target = Path::new(&request.target_path);
        let removed =
            if target.is_dir() { std::fs::remove_dir(target) } else { std::fs::remove_file(target) };
        match removed {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                Err(Status::internal(format!("remove {}: {error}", target.display())))
            }
            _ => Ok(NodeUnpublishVolumeResponse::default()),
        }
    }

    /// The messages of a stream. Each is made when it is asked for.
    pub fn stream(
        &self,
        question: &Question<'_>,
        deadline: Option<Instant>,
    ) -> Result<impl Stream<Item = Result<GetMetadataDeltaResponse, Status>> + Send + 'static, Status> {
        let state = self.state();
        let Question { offset, max_results, .. } = *question;
        let target = state.snapshot(question.target)?;
        let since = match question.base {
            None => 0,
            Some(base) => {
                let base = match state.snapshots.get(base) {
                    Some(gone) if gone.is_deleted && self.settings.keeps_bases => gone,
                    _ => state.snapshot(base)?,
                };
                if base.volume != target.volume {
                    return Err(Status::invalid_argument("base and target are snapshots of two volumes"));
                }
                if base.number > target.number {
                    return Err(Status::invalid_argument("the target was created before the base"));
                }
                base.history.len()
            }
        };
        let capacity = target.capacity;
        let offset = u64::try_from(offset).ok().filter(|offset| *offset <= capacity).ok_or_else(|| {
            Status::out_of_range(format!(
                "starting_offset {offset} is not in the volume, which has {capacity} bytes"
            ))
        })?;
        if max_results < 0 {
            return Err(Status::invalid_argument(format!("max_results {max_results} is negative")));
        }
        let per_message = match max_results {
            0 => self.settings.tuples_per_message,
            bound => bound as usize,
        };
        let Settings { block_size, fixed, .. } = self.settings;
        let history = if offset == capacity { &[] } else { &target.history[since..] };
        let mut tuples = Tuples::new(history, offset, block_size, capacity, fixed).peekable();
        let style = if fixed { BlockMetadataType::FixedLength } else { BlockMetadataType::VariableLength };
        let mut is_first = true;
        Ok(futures_util::stream::iter(std::iter::from_fn(move || {
            // An answer without tuples has one message, which tells type and capacity.
            if !std::mem::take(&mut is_first) && tuples.peek().is_none() {
                return None;
            }
            if deadline.is_some_and(|deadline| Instant::now() >= deadline) {
                tuples = Tuples::new(&[], 0, block_size, capacity, fixed).peekable();
                return Some(Err(Status::deadline_exceeded("the deadline has passed")));
            }
            let taken = tuples.by_ref().take(per_message.min(TUPLES));
            let block_metadata = taken
                .map(|(start, end)| BlockMetadata {
                    byte_offset: start as i64,
                    size_bytes: (end - start) as i64,
                })
                .collect();
            Some(Ok(GetMetadataDeltaResponse {
                block_metadata_type: style.into(),
                volume_capacity_bytes: capacity as i64,
                block_metadata,
            }))
        })))
    }
}

/// One page of a list, and the token of the next.
fn page<T>(all: Vec<T>, token: &str, most: i32) -> Result<(Vec<T>, String), Status> {
    let start: usize = match token {
        "" => 0,
        token => token
            .parse()
            .ok()
            .filter(|start| *start <= all.len())
            .ok_or_else(|| Status::aborted(format!("{token:?} is no token of this list")))?,
    };
    let most = usize::try_from(most).map_err(|_| Status::invalid_argument("max_entries is negative"))?;
    let end = if most == 0 { all.len() } else { all.len().min(start + most) };
    let next = if end < all.len() { end.to_string() } else { String::new() };
    Ok((all.into_iter().skip(start).take(end - start).collect(), next))
}

impl State {
    fn volume(&self, id: &str) -> Result<&Volume, Status> {
        match id {
            "" => Err(missing("volume_id")),
            id => self.volumes.get(id).ok_or_else(|| Status::not_found(format!("there is no volume {id:?}"))),
        }
    }

    fn snapshot(&self, id: &str) -> Result<&Snapshot, Status> {
        if id.is_empty() {
            return Err(missing("the id of a snapshot"));
        }
        let there = self.snapshots.get(id).filter(|snapshot| !snapshot.is_deleted);
        there.ok_or_else(|| Status::not_found(format!("there is no snapshot {id:?}")))
    }

    fn group(&self, id: &str) -> Result<VolumeGroupSnapshot, Status> {
        let members =
            self.groups.get(id).ok_or_else(|| Status::not_found(format!("there is no group {id:?}")))?;
        let members: Vec<proto::Snapshot> = members
            .iter()
            .map(|member| self.snapshot(member).map(|snapshot| snapshot.tell(member)))
            .collect::<Result<_, _>>()?;
        Ok(VolumeGroupSnapshot {
            group_snapshot_id: id.to_owned(),
            creation_time: members.first().and_then(|member| member.creation_time),
            snapshots: members,
            ready_to_use: true,
        })
    }
}

impl Volume {
    fn tell(&self, id: &str) -> proto::Volume {
        proto::Volume {
            volume_id: id.to_owned(),
            capacity_bytes: self.capacity as i64,
            content_source: self.request.volume_content_source.clone(),
            ..Default::default()
        }
    }
}

impl Snapshot {
    #[allow(clippy::needless_update, reason = "a later CSI has more fields")]
    fn tell(&self, id: &str) -> proto::Snapshot {
        proto::Snapshot {
            snapshot_id: id.to_owned(),
            source_volume_id: self.volume.clone(),
            group_snapshot_id: self.group.clone(),
            size_bytes: self.capacity as i64,
            creation_time: Some(self.created.into()),
            ready_to_use: true,
            ..Default::default()
        }
    }
}
