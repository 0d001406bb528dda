//! Faults of the environment: full pools and hosts, bad disks, missing devices and programs, unusual filesystems, wrong
//! clocks, and other programs' devices.

mod bad_disk;
mod cached;
mod clock;
mod dead_pool;
mod emptied;
mod filesystems;
mod host_full;
mod no_loop;
pub mod pool_full;
mod programs;
mod read_only;
mod strangers;
mod two_drivers;
pub mod versions;

use std::fs::File;
use std::path::Path;

use base::ObjectDir;
use cbt::MapFile;
use csi_client::BlockList;

use crate::volume_health::{
    StorageHealthErrorType as StorageTrouble, VolumeHealthErrorType as Trouble, health, is_reported,
    is_unwell, storage, storage_tells, tells, unwell,
};
pub use testkit::places::{Ballast, DeadDevices, Disk, sync_fs};
use testkit::prelude::*;

/// The same, but the disk may return an error.
pub fn sync_fs_may_fail(dir: &Path) {
    let _ = nix::unistd::syncfs(File::open(dir).expect("open"));
}

/// Waits for something that happens in the background.
pub async fn until(what: &str, holds: impl Fn() -> bool) {
    // Not by `eventually`: an async closure is not known to be Send in a task.
    let begun = std::time::Instant::now();
    while !holds() {
        assert!(begun.elapsed() < testkit::PATIENCE, "never: {what}");
        tokio::time::sleep(testkit::pause(begun)).await;
    }
}

/// Gives a volume a deleted snapshot, so that between the next two there is a `changed` map alone, and no skip map.
pub async fn without_skip(rig: &mut Rig, volume: &str) {
    let first = rig.snapshot(&format!("before all of {volume}"), volume).await;
    rig.client.delete_snapshot(&first).await.expect("delete");
}

pub fn is_hashed(dir: &ObjectDir) -> bool {
    MapFile::open(&dir.pending()).and_then(|map| map.count()).is_ok_and(|count| count == 0)
}

/// Waits until all of these snapshots are.
pub async fn hashed(rig: &Rig, ids: &[&String]) {
    for id in ids {
        until("hashed", || is_hashed(&rig.snapshot_dir(id))).await;
    }
}

/// Whether a snapshot is compared with the one before too, where there is one.
pub fn is_compared(dir: &ObjectDir) -> bool {
    let is_exact = |map: MapFile| map.is_exact() || map.header().relative_to.is_none();
    is_hashed(dir) && MapFile::open(&dir.changed()).is_ok_and(is_exact)
}

/// Waits until all of these snapshots are.
pub async fn compared(rig: &Rig, ids: &[&String]) {
    for id in ids {
        until("compared", || is_compared(&rig.snapshot_dir(id))).await;
    }
}

/// The listed ids of all volumes and of all snapshots.
pub async fn listed(rig: &Rig) -> (Vec<String>, Vec<String>) {
    let mut client = rig.client.clone();
    let volumes = client.volumes().await.expect("ListVolumes").into_iter();
    let snapshots = client.snapshots().await.expect("ListSnapshots").into_iter();
    (volumes.map(|volume| volume.volume_id).collect(), snapshots.map(|taken| taken.snapshot_id).collect())
}

pub async fn probe(rig: &Rig) -> Result<(), tonic::Status> {
    rig.client.identity.clone().probe(proto::ProbeRequest {}).await.map(drop)
}

/// Checks a stream of a snapshot on a broken disk: the list is exact, or the call failed because of the disk. Returns
/// whether it failed.
#[track_caller]
pub fn exact_or_error(answer: Result<BlockList, csi_client::Error>, expected: &[u64]) -> bool {
    match answer {
        Ok(list) => assert_eq!(blocks_of(&list, BLOCK), expected, "the answer is OK and wrong"),
        Err(error) => {
            assert!(matches!(error.code(), Code::Internal | Code::DataLoss), "{error}");
            return true;
        }
    }
    false
}

/// Checks that nothing half-made stays: no draft beside a record, and nothing in `staging/`. What the hashing thread frees is there
/// for a moment.
pub async fn assert_nothing_half_made(rig: &Rig) {
    let staging = rig.pool_dir().join("staging");
    let begun = std::time::Instant::now();
    while !names(&staging).is_empty() && begun.elapsed() < testkit::PATIENCE {
        tokio::time::sleep(testkit::pause(begun)).await;
    }
    assert_eq!(names(&staging), Vec::<String>::new(), "half-made objects");
    for kind in ["volumes", "snapshots"] {
        for id in names(&rig.pool_dir().join(kind)) {
            let found = names(&rig.pool_dir().join(kind).join(&id));
            assert!(!found.iter().any(|name| name.ends_with(".new")), "{kind}/{id} holds {found:?}");
        }
    }
}

/// Compares every snapshot with its maps and hashes.
pub fn verify(rig: &Rig) {
    let seen = testkit::verify(&rig.data_dir());
    assert!(seen.status.success(), "{seen:?}");
}
