//! Locks, so that only one call at a time works on an object.
//!
//! The CSI spec ("Error Scheme", `ABORTED`: "Operation pending for volume") lets a plugin refuse a
//! call while another is under way on the same object. A guard is taken inside the blocking closure
//! that does the work, so a cancelled RPC does not free the object while its work continues. No
//! guard covers two objects: CreateVolumeGroupSnapshot takes one for the name and one for each volume,
//! DeleteVolumeGroupSnapshot one for the group.

use std::collections::HashSet;
use std::path::PathBuf;
use std::sync::{Arc, PoisonError};
use std::time::Duration;

use crate::driver::error::{Error, Result};
use crate::sync::{Condvar, Mutex, MutexGuard};
use base::{GroupId, SnapshotId, Stop, Stopped, VolumeId};

/// How often a waiting caller's stop is checked.
const POLL_INTERVAL: Duration = Duration::from_millis(50);

/// What a lock is for.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) enum LockKey {
    /// The making of a volume, by the name the CO gives it.
    VolumeName(String),
    /// The making of a snapshot, by the name the CO gives it.
    SnapshotName(String),
    /// The making of a group snapshot, by the name the CO gives it.
    GroupName(String),
    /// The making of an ephemeral volume, by the handle that kubelet gives it.
    Ephemeral(String),
    Volume(VolumeId),
    Snapshot(SnapshotId),
    Group(GroupId),
    /// A path on the node: between the check that it is free and the mount, nothing else is mounted there.
    MountPath(PathBuf),
    /// The history of a volume (`snapshots/history/hold.rs`): held for a short time, and callers wait for it.
    History(VolumeId),
    /// The opening of a source, for a transfer to another node.
    Transfer(String),
    /// The making of a snapshot's `allocated` map from its data, and replacing it. Callers wait until their own stop.
    Map(SnapshotId),
}

impl std::fmt::Display for LockKey {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            LockKey::VolumeName(name) => write!(f, "the volume named {name}"),
            LockKey::SnapshotName(name) => write!(f, "the snapshot named {name}"),
            LockKey::GroupName(name) => write!(f, "the group snapshot named {name}"),
            LockKey::Ephemeral(handle) => write!(f, "the ephemeral volume {handle}"),
            LockKey::Group(id) => write!(f, "group snapshot {id}"),
            LockKey::Volume(id) => write!(f, "volume {id}"),
            LockKey::Snapshot(id) => write!(f, "snapshot {id}"),
            LockKey::MountPath(path) => write!(f, "{}", path.display()),
            LockKey::History(id) => write!(f, "the snapshots of {id}"),
            LockKey::Transfer(name) => write!(f, "the transfer {name}"),
            LockKey::Map(id) => write!(f, "the allocated map of {id}"),
        }
    }
}

/// The objects that calls work on.
#[derive(Clone, Debug, Default)]
pub(super) struct OpLocks {
    held: Arc<(Mutex<HashSet<LockKey>>, Condvar)>,
}

/// The right to work on an object, until dropped.
#[derive(Debug)]
pub(super) struct OpGuard {
    locks: OpLocks,
    key: LockKey,
}

impl OpLocks {
    fn held(&self) -> MutexGuard<'_, HashSet<LockKey>> {
        self.held.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Locks the object, or fails at once if another call has it.
    pub(super) fn take(&self, key: LockKey) -> Result<OpGuard> {
        match self.held().insert(key.clone()) {
            true => Ok(OpGuard { locks: self.clone(), key }),
            false => Err(Error::Busy { what: key.to_string() }),
        }
    }

    /// Whether a call has the object now.
    pub(super) fn is_held(&self, key: &LockKey) -> bool {
        self.held().contains(key)
    }

    /// Locks the object, and waits until it is free or the caller gives up.
    pub(super) fn wait_until(&self, key: LockKey, stop: &Stop) -> Result<OpGuard, Stopped> {
        let mut held = self.held();
        while !held.insert(key.clone()) {
            stop.check()?;
            (held, _) = self.held.1.wait_timeout(held, POLL_INTERVAL).unwrap_or_else(PoisonError::into_inner);
        }
        drop(held);
        Ok(OpGuard { locks: self.clone(), key })
    }

    /// Locks the object, and waits until it is free.
    pub(super) fn wait(&self, key: LockKey) -> OpGuard {
        let mut held = self.held();
        while !held.insert(key.clone()) {
            held = self.held.1.wait(held).unwrap_or_else(PoisonError::into_inner);
        }
        drop(held);
        OpGuard { locks: self.clone(), key }
    }
}

impl Drop for OpGuard {
    fn drop(&mut self) {
        self.locks.held().remove(&self.key);
        self.locks.held.1.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_at_a_time_on_an_object_and_none_in_each_others_way() {
        let locks = OpLocks::default();
        let (one, two) = (
            VolumeId::random(base::DataDirKey::random().expect("key")).expect("id"),
            VolumeId::random(base::DataDirKey::random().expect("key")).expect("id"),
        );
        let held = locks.take(LockKey::Volume(one.clone())).expect("free");
        assert!(matches!(locks.take(LockKey::Volume(one.clone())), Err(Error::Busy { .. })));
        let _other = locks.take(LockKey::Volume(two)).expect("another object");
        drop(held);
        locks.take(LockKey::Volume(one)).expect("free again");
    }

    #[test]
    fn a_waiter_gets_it_when_the_holder_goes() {
        let locks = OpLocks::default();
        let id = VolumeId::random(base::DataDirKey::random().expect("key")).expect("id");
        let held = locks.wait(LockKey::History(id.clone()));
        let waiter = std::thread::spawn({
            let locks = locks.clone();
            move || drop(locks.wait(LockKey::History(id)))
        });
        drop(held);
        waiter.join().expect("the waiter ends");
    }
}
