//! What was seen of the calls so far: which volumes and snapshots there are and what became of them. Some faults are about
//! that. It is noted whether a fault is on or not, for one may be turned on later.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use bytes::Bytes;
use parking_lot::{Mutex, MutexGuard};
use proto::*;
use serve::relay::unframe;

use super::caller::Caller;

/// How often something was done.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Counts {
    /// Deletions of snapshots.
    pub deletions: u64,
    /// Modifications of volumes.
    pub modifications: u64,
    pub expansions: u64,
    /// Volumes made from volumes.
    pub clones: u64,
}

/// What was seen.
#[derive(Debug, Default)]
pub(super) struct Facts {
    /// Snapshots and the volume of each.
    pub snapshots: HashMap<String, String>,
    /// Capacity of the volume of each snapshot when it was made.
    pub capacities: HashMap<String, i64>,
    /// Snapshots that are members of a group.
    pub members: HashSet<String>,
    /// Volumes and snapshots that are gone.
    pub deleted: HashSet<String>,
    /// Volumes made from snapshots.
    pub restored: HashSet<String>,
    /// Volumes with a filesystem.
    pub mounted: HashSet<String>,
    /// Capacity of each volume when it was made, and of those that were expanded now.
    pub capacity: HashMap<String, i64>,
    pub grown: HashMap<String, i64>,
    /// Bases that a fault has let go.
    pub bases_gone: HashSet<String>,
    /// Snapshots that were made with faults of their own.
    pub marked: HashSet<String>,
    /// How often something was asked or answered, by what it is.
    pub times: HashMap<String, u64>,
    pub counts: Counts,
    /// Restored volumes published.
    pub in_use: HashSet<String>,
    /// Streams open.
    pub open: usize,
    /// A stream was left before its end.
    pub cancelled: bool,
    /// Whom the gateway let in, the last one last.
    pub let_in: Vec<Caller>,
}

#[derive(Clone, Debug, Default)]
pub(super) struct Seen(Arc<Mutex<Facts>>);

impl Seen {
    pub fn facts(&self) -> MutexGuard<'_, Facts> {
        self.0.lock()
    }

    /// A stream that is open until it is dropped.
    pub fn open(&self) -> Open {
        let mut facts = self.facts();
        facts.open += 1;
        Open { seen: self.clone(), counts: facts.counts, is_done: false }
    }
}

/// A stream that is open.
#[derive(Debug)]
pub(super) struct Open {
    pub seen: Seen,
    /// What had been done when it was opened.
    pub counts: Counts,
    /// It came to its end.
    pub is_done: bool,
}

impl Drop for Open {
    fn drop(&mut self) {
        let mut facts = self.seen.facts();
        facts.open -= 1;
        facts.cancelled |= !self.is_done;
    }
}

impl Facts {
    pub fn volume_of(&self, snapshot: &str) -> &str {
        self.snapshots.get(snapshot).map_or("", String::as_str)
    }

    /// Counts something, and tells how often it was there before.
    pub fn count(&mut self, what: String) -> u64 {
        let times = self.times.entry(what).or_default();
        *times += 1;
        *times - 1
    }

    /// Notes a snapshot. It may be told of again when its volume has grown.
    fn made(&mut self, snapshot: Snapshot) {
        let volume = &snapshot.source_volume_id;
        if let Some(capacity) = self.grown.get(volume).or(self.capacity.get(volume)).copied() {
            self.capacities.entry(snapshot.snapshot_id.clone()).or_insert(capacity);
        }
        self.snapshots.insert(snapshot.snapshot_id, snapshot.source_volume_id);
    }

    /// Notes a call that is about to be passed on.
    pub fn before(&mut self, call: &str, body: &Bytes) {
        // What cannot be read is not noted; the driver says what is wrong with it.
        match call {
            "NodePublishVolume" => {
                if let Ok(request) = unframe::<NodePublishVolumeRequest>(body.clone())
                    && self.restored.contains(&request.volume_id)
                {
                    self.in_use.insert(request.volume_id);
                }
            }
            "DeleteVolume" => {
                if let Ok(request) = unframe::<DeleteVolumeRequest>(body.clone()) {
                    self.deleted.insert(request.volume_id);
                }
            }
            _ => {}
        }
    }

    /// Notes a call that was answered with `OK`.
    pub fn after(&mut self, call: &str, body: &Bytes, answer: &Bytes) -> Option<()> {
        let (body, answer) = (body.clone(), answer.clone());
        match call {
            "CreateVolume" => {
                let request: CreateVolumeRequest = unframe(body).ok()?;
                let volume = unframe::<CreateVolumeResponse>(answer).ok()?.volume?;
                match request.volume_content_source.and_then(|source| source.r#type) {
                    Some(volume_content_source::Type::Snapshot(_)) => {
                        self.restored.insert(volume.volume_id.clone());
                    }
                    Some(volume_content_source::Type::Volume(_)) => self.counts.clones += 1,
                    None => {}
                }
                let access = request
                    .volume_capabilities
                    .first()
                    .and_then(|capability| capability.access_type.as_ref());
                if matches!(access, Some(volume_capability::AccessType::Mount(_))) {
                    self.mounted.insert(volume.volume_id.clone());
                }
                self.capacity.insert(volume.volume_id, volume.capacity_bytes);
            }
            "CreateSnapshot" => {
                let snapshot = unframe::<CreateSnapshotResponse>(answer).ok()?.snapshot?;
                self.made(snapshot);
            }
            "CreateVolumeGroupSnapshot" => {
                let group = unframe::<CreateVolumeGroupSnapshotResponse>(answer).ok()?.group_snapshot?;
                for snapshot in group.snapshots {
                    self.members.insert(snapshot.snapshot_id.clone());
                    self.made(snapshot);
                }
            }
            "DeleteSnapshot" => {
                self.deleted.insert(unframe::<DeleteSnapshotRequest>(body).ok()?.snapshot_id);
                self.counts.deletions += 1;
            }
            "ControllerExpandVolume" => {
                let id = unframe::<ControllerExpandVolumeRequest>(body).ok()?.volume_id;
                self.grown.insert(id, unframe::<ControllerExpandVolumeResponse>(answer).ok()?.capacity_bytes);
                self.counts.expansions += 1;
            }
            "ControllerModifyVolume" => self.counts.modifications += 1,
            "NodeUnpublishVolume" => {
                self.in_use.remove(&unframe::<NodeUnpublishVolumeRequest>(body).ok()?.volume_id);
            }
            _ => {}
        }
        Some(())
    }
}
