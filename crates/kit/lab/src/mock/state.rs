//! What the driver remembers: volumes, snapshots and groups, and how it tells of them.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::SystemTime;

use proto::*;
use tonic::Status;

use super::data::Changes;

#[derive(Clone, Debug)]
pub(super) struct Volume {
    pub request: CreateVolumeRequest,
    pub capacity: u64,
    pub history: Vec<Arc<Changes>>,
}

#[derive(Clone, Debug)]
pub(super) struct Snapshot {
    pub volume: String,
    pub group: String,
    /// Among those of its volume.
    pub number: usize,
    pub capacity: u64,
    pub history: Vec<Arc<Changes>>,
    pub created: SystemTime,
    pub is_deleted: bool,
}

#[derive(Debug, Default)]
pub(super) struct State {
    pub volumes: BTreeMap<String, Volume>,
    pub snapshots: BTreeMap<String, Snapshot>,
    pub groups: BTreeMap<String, Vec<String>>,
}

pub(super) fn missing(what: &str) -> Status {
    Status::invalid_argument(format!("{what} is missing"))
}

/// An error where a field that has to be given is empty.
pub(super) fn required<T>(what: &str, field: &impl AsRef<[T]>) -> Result<(), Status> {
    match field.as_ref().is_empty() {
        true => Err(missing(what)),
        false => Ok(()),
    }
}

fn no_volume(id: &str) -> Status {
    match id {
        "" => missing("volume_id"),
        id => Status::not_found(format!("there is no volume {id:?}")),
    }
}

/// One page of a list, and the token of the next.
pub(super) fn page<T>(all: Vec<T>, token: &str, most: i32) -> Result<(Vec<T>, String), Status> {
    let start: usize = match token {
        "" => 0,
        token => token
            .parse()
            .ok()
            .filter(|start| *start <= all.len())
            .ok_or_else(|| Status::aborted(format!("{token:?} is not a token of this list")))?,
    };
    let most = usize::try_from(most).map_err(|_| Status::invalid_argument("max_entries is negative"))?;
    let end = if most == 0 { all.len() } else { all.len().min(start + most) };
    let next = if end < all.len() { end.to_string() } else { String::new() };
    Ok((all.into_iter().skip(start).take(end - start).collect(), next))
}

impl State {
    pub fn volume(&self, id: &str) -> Result<&Volume, Status> {
        self.volumes.get(id).ok_or_else(|| no_volume(id))
    }

    pub fn volume_mut(&mut self, id: &str) -> Result<&mut Volume, Status> {
        self.volumes.get_mut(id).ok_or_else(|| no_volume(id))
    }

    pub fn snapshot(&self, id: &str) -> Result<&Snapshot, Status> {
        required("the id of a snapshot", &id)?;
        let there = self.snapshots.get(id).filter(|snapshot| !snapshot.is_deleted);
        there.ok_or_else(|| Status::not_found(format!("there is no snapshot {id:?}")))
    }

    pub fn group(&self, id: &str) -> Result<VolumeGroupSnapshot, Status> {
        required("group_snapshot_id", &id)?;
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
    pub fn tell(&self, id: &str) -> proto::Volume {
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
    pub fn tell(&self, id: &str) -> proto::Snapshot {
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
