//! The driver in memory: volumes, snapshots and groups come and go. Ids are names, so a test knows them beforehand.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::SystemTime;

use parking_lot::{Mutex, MutexGuard};
use proto::*;
use tonic::Status;

use super::data::{self, Changes};
use super::state::{Snapshot, State, Volume, missing, page, required};
use crate::random;

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

#[derive(Debug)]
pub(super) struct Driver {
    pub settings: Settings,
    state: Mutex<State>,
}

/// What ControllerModifyVolume may set.
const MUTABLE: &str = "note";

fn known(mutable: &HashMap<String, String>) -> Result<(), Status> {
    match mutable.keys().find(|key| *key != MUTABLE) {
        Some(unknown) => Err(Status::invalid_argument(format!(
            "there is no mutable parameter {unknown:?}: it takes {MUTABLE}"
        ))),
        None => Ok(()),
    }
}

impl Driver {
    pub fn new(settings: Settings) -> Self {
        Driver { settings, state: Mutex::default() }
    }

    pub fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock()
    }

    pub fn create_volume(&self, request: CreateVolumeRequest) -> Result<CreateVolumeResponse, Status> {
        required("name", &request.name)?;
        required("volume_capabilities", &request.volume_capabilities)?;
        known(&request.mutable_parameters)?;
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
        required("volume_id", &request.volume_id)?;
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
        let range = request.capacity_range.ok_or_else(|| missing("capacity_range"))?;
        let mut state = self.state();
        let volume = state.volume_mut(&request.volume_id)?;
        volume.capacity = volume.capacity.max(range.required_bytes.unsigned_abs());
        Ok(ControllerExpandVolumeResponse {
            capacity_bytes: volume.capacity as i64,
            node_expansion_required: false,
        })
    }

    /// Changes nothing that can be seen.
    pub fn modify(
        &self,
        request: &ControllerModifyVolumeRequest,
    ) -> Result<ControllerModifyVolumeResponse, Status> {
        self.state().volume(&request.volume_id)?;
        known(&request.mutable_parameters)?;
        Ok(ControllerModifyVolumeResponse::default())
    }

    pub fn validate(
        &self,
        request: &ValidateVolumeCapabilitiesRequest,
    ) -> Result<ValidateVolumeCapabilitiesResponse, Status> {
        self.state().volume(&request.volume_id)?;
        required("volume_capabilities", &request.volume_capabilities)?;
        let confirmed = validate_volume_capabilities_response::Confirmed {
            volume_context: request.volume_context.clone(),
            volume_capabilities: request.volume_capabilities.clone(),
            parameters: request.parameters.clone(),
            ..Default::default()
        };
        Ok(ValidateVolumeCapabilitiesResponse { confirmed: Some(confirmed), ..Default::default() })
    }

    pub fn create_snapshot(&self, request: &CreateSnapshotRequest) -> Result<CreateSnapshotResponse, Status> {
        required("name", &request.name)?;
        required("source_volume_id", &request.source_volume_id)?;
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
        parameters: &HashMap<String, String>,
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
        let volume = state.volume_mut(volume_id)?;
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
                let wanted = |_| Status::invalid_argument("changes is not a number");
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
        required("snapshot_id", &request.snapshot_id)?;
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
        required("name", &request.name)?;
        required("source_volume_ids", &request.source_volume_ids)?;
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
        required("group_snapshot_id", &request.group_snapshot_id)?;
        let mut state = self.state();
        for member in state.groups.remove(&request.group_snapshot_id).unwrap_or_default() {
            if let Some(snapshot) = state.snapshots.get_mut(&member) {
                snapshot.is_deleted = true;
            }
        }
        Ok(DeleteVolumeGroupSnapshotResponse::default())
    }
}
