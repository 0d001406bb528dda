//! Data of a later version of the driver is refused or withheld, with a clear message, and not changed. After the upgrade
//! all of it is there.

use std::collections::BTreeMap;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use csi_client::Error;
use deltapath::sys::slots;
use files::durable;

use super::{Trouble, hashed, health, listed, tells, without_skip};
use crate::startup::refused;
use testkit::prelude::*;
use testkit::{driver_command, state_path};

/// Replaces a record by one of a later version. Returns the old content.
fn later(path: &Path) -> Vec<u8> {
    of_version(path, 7)
}

fn of_version(path: &Path, version: u32) -> Vec<u8> {
    let sound = std::fs::read(path).expect("read");
    let is_state = path.ends_with("state.json");
    let text = if is_state { slots::read(path).expect("read").expect("a state") } else { sound.clone() };
    let text = String::from_utf8(text).expect("utf-8");
    let later = text.replacen("\"version\": 3", &format!("\"version\": {version}"), 1);
    assert_ne!(later, text);
    match is_state {
        true => slots::write(path, later.as_bytes()).expect("write"),
        false => std::fs::write(path, later).expect("write"),
    }
    sound
}

/// Replaces a block map by one of a later version, with a right checksum. Returns the old content.
pub fn later_map(path: &Path) -> Vec<u8> {
    const TRAILER: usize = 8 + 4 + 4 + 8 + 8 + 4 + 40 + 32;
    const ROW: usize = 48;
    let sound = std::fs::read(path).expect("read");
    let mut bytes = sound.clone();
    let trailer = bytes.len() - TRAILER;
    assert_eq!(&bytes[trailer..trailer + 8], b"dpathmap");
    bytes[trailer + 8..trailer + 12].copy_from_slice(&7u32.to_le_bytes());
    let rows = u64::from_le_bytes(bytes[trailer + 24..trailer + 32].try_into().expect("8 bytes")) as usize;
    let end = bytes.len() - 32;
    let checksum = blake3::hash(&bytes[trailer - rows * ROW..end]);
    bytes[end..].copy_from_slice(checksum.as_bytes());
    // By a rename, as the driver does it, since hashing may be reading the map.
    durable::replace(path, &bytes).expect("write");
    sound
}

/// The files below a directory, with their content or, for a sparse image, the time of its last write.
fn fingerprints(dir: &Path, found: &mut BTreeMap<PathBuf, String>) {
    for name in names(dir) {
        let path = dir.join(name);
        let meta = std::fs::symlink_metadata(&path).expect("stat");
        let print = match (meta.is_dir(), meta.len() < 1 << 20) {
            (true, _) => {
                fingerprints(&path, found);
                "a directory".to_owned()
            }
            (false, true) => blake3::hash(&std::fs::read(&path).expect("read")).to_string(),
            (false, false) => {
                format!("{} {} {}.{}", meta.len(), meta.blocks(), meta.mtime(), meta.mtime_nsec())
            }
        };
        found.insert(path, print);
    }
}

#[track_caller]
fn withheld<T: std::fmt::Debug>(answer: Result<T, Error>) {
    let text = answer.as_ref().expect_err("it is withheld").to_string();
    assert!(!text.contains("remove"), "it is good data: {text}");
    is_refused(answer, Code::Internal, &["version 7", "upgrade the driver"]);
}

#[apply(every_pool)]
async fn a_data_directory_of_another_version_is_not_touched(rig: Rig<pool>) {
    rig.volume("volume", MIB, block_capability()).await;
    assert!(rig.terminate().success());
    let manifest = rig.data_dir().join("deltapath.json");
    let earlier = of_version(&manifest, 1);
    let said = refused(&mut driver_command(rig.dir.path(), pool));
    assert!(said.contains("version 1") && said.contains("run the build that made it"), "{said}");
    std::fs::write(&manifest, earlier).expect("write");
    let sound = later(&manifest);
    let look = |dir: PathBuf| {
        let mut files = BTreeMap::new();
        fingerprints(&dir, &mut files);
        files
    };
    let before = look(rig.data_dir());
    let said = refused(&mut driver_command(rig.dir.path(), pool));
    assert!(said.contains("version 7") && said.contains("upgrade the driver"), "{said}");
    assert!(before == look(rig.data_dir()), "a refused start changed something");
    std::fs::write(&manifest, sound).expect("write");
    rig.start_again().await;
    assert_eq!(listed(&rig).await.0.len(), 1);
}

#[apply(device_test)]
async fn records_of_a_later_version_are_withheld_and_not_touched(rig: Rig<Dir>) {
    let (volume, device) = rig.block_volume("volume", 16 * MIB).await;
    let (other, other_device) = rig.block_volume("other", 16 * MIB).await;
    let mut before = Content::default();
    before.write(&device, 0, 50, 1);
    Content::default().write(&other_device, 0, 10, 1);
    let base = rig.snapshot("base", &volume).await;
    let mut after = before.clone();
    after.write(&device, 20, 5, 2);
    let target = rig.snapshot("target", &volume).await;
    let spare = rig.snapshot("spare", &other).await;
    let group = rig.client.create_group("group", std::slice::from_ref(&volume)).await.expect("group");
    let gone = rig.snapshot("gone", &other).await;
    rig.snapshot("newest", &other).await;
    rig.client.delete_snapshot(&gone).await.expect("delete");
    rig.detach(&other).await;
    let all = listed(&rig).await;
    rig.kill();
    let pool = rig.pool_dir();
    let records = [
        pool.join("volumes").join(&other).join("record.json"),
        state_path(&pool, &volume),
        pool.join("snapshots").join(&spare).join("record.json"),
        pool.join("snapshots").join(&target).join("record.json"),
        pool.join("groups").join(&group.group_snapshot_id).join("record.json"),
        pool.join("snapshots").join(&gone).join("deleted.json"),
    ];
    let sound: Vec<Vec<u8>> = records.iter().map(|path| later(path)).collect();
    let now: Vec<Vec<u8>> = records.iter().map(|path| std::fs::read(path).expect("read")).collect();
    rig.start_again().await;

    let said = tells(&health(&rig, &other).await, "RecordUnreadable", Trouble::Inaccessible);
    assert!(said.contains("version 7"), "{said}");
    withheld(rig.client.delete_volume(&other).await);
    withheld(rig.client.create_snapshot("of it", &other).await);
    withheld(rig.client.delete_snapshot(&spare).await);
    withheld(rig.client.delta(&base, &target, 0, 0).await);
    withheld(rig.client.allocated(&target, 0, 0).await);
    let restore = new_volume_from("restored", 16 * MIB, block_capability(), from_snapshot(&target));
    withheld(rig.client.create_volume(restore).await);
    let members = testkit::members(&group);
    withheld(rig.client.delete_group(&group.group_snapshot_id, &members).await);
    is_refused(rig.client.allocated(&members[0], 0, 0).await, Code::Internal, &["group"]);
    withheld(rig.client.delete_volume(&volume).await);
    assert_eq!(code(rig.client.delta(&gone, &spare, 0, 0).await), Code::NotFound);
    // All other objects are served.
    assert_eq!(rig.allocated(&base).await, before.allocated(BLOCK));
    after.write(&device, 40, 3, 3);
    let beside = rig.snapshot("taken beside it", &volume).await;
    assert_eq!(rig.changed(&base, &beside).await, after.changed_since(&before, BLOCK));
    // Pods end: what the kernel has mounted says what is to be undone.
    rig.detach(&volume).await;
    testkit::no_device_left(&pool);
    rig.kill();
    for ((path, now), sound) in records.iter().zip(now).zip(sound) {
        assert!(std::fs::read(path).expect("read") == now, "{} was touched", path.display());
        std::fs::write(path, sound).expect("write");
    }
    // After the upgrade everything is there, and what was made meanwhile too.
    rig.start_again().await;
    let (volumes, snapshots) = listed(&rig).await;
    assert_eq!(volumes, all.0);
    let missing: Vec<_> = all.1.iter().chain([&beside]).filter(|id| !snapshots.contains(id)).collect();
    assert!(missing.is_empty(), "{missing:?}\n{}", rig.log());
    assert_eq!(rig.changed(&target, &beside).await, [40, 41, 42]);
    rig.detach(&volume).await;
}

#[apply(every_pool)]
async fn a_block_map_of_a_later_version_is_withheld_and_not_touched(rig: Rig<pool>) {
    let (volume, device, before) = rig.written_volume("volume", 16 * MIB, (0, 50, 1)).await;
    without_skip(&mut rig, &volume).await;
    let base = rig.snapshot("base", &volume).await;
    let mut after = before.clone();
    after.write(&device, 20, 5, 2);
    let target = rig.snapshot("target", &volume).await;
    hashed(&rig, &[&base, &target]).await;
    let dir = rig.snapshot_dir(&target);
    for (number, path) in [dir.allocated(), dir.changed(), dir.pending()].into_iter().enumerate() {
        let sound = later_map(&path);
        let now = std::fs::read(&path).expect("read");
        for start in 0..2 {
            if start == 1 {
                rig.crash().await;
            }
            withheld(rig.client.delta(&base, &target, 0, 0).await);
            if path == dir.allocated() {
                withheld(rig.client.allocated(&target, 0, 0).await);
            }
        }
        // The next snapshot works without it.
        after.write(&device, 100 + number as u64, 1, 3);
        let next = rig.snapshot(&format!("next {number}"), &volume).await;
        assert_eq!(rig.allocated(&next).await, after.allocated(BLOCK));
        assert_eq!(rig.changed(&base, &next).await, after.changed_since(&before, BLOCK));
        rig.client.delete_snapshot(&next).await.expect("delete");
        assert!(std::fs::read(&path).expect("read") == now, "{} was touched", path.display());
        durable::replace(&path, &sound).expect("write");
        assert_eq!(rig.changed(&base, &target).await, (20..25).collect::<Vec<u64>>());
    }
    rig.detach(&volume).await;
}
