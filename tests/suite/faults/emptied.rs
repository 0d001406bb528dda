//! Pools are filled in every way, and then everything is deleted in random order: each deletion works on the full pool, the
//! space comes back, and new volumes can be made.

use std::path::Path;
use std::process::Command;

use deltapath::sys::space;

use super::pool_full::small_pool_of;
use super::{Disk, assert_nothing_half_made, listed, probe, sync_fs, until, verify};
use testkit::POOLS;
use testkit::prelude::*;

#[derive(Clone, Copy, Debug)]
enum Way {
    /// One volume is written, past every cache.
    OneVolume,
    /// Several are, in turns.
    ManyVolumes,
    /// A large file in a mounted ext4.
    Files,
    /// A volume is rewritten in pieces after each snapshot.
    Snapshots,
    /// The same with group snapshots of two volumes.
    Groups,
    /// Clones and restores, each written.
    Copies,
}

const WAYS: [Way; 6] =
    [Way::OneVolume, Way::ManyVolumes, Way::Files, Way::Snapshots, Way::Groups, Way::Copies];

/// Fills `path` past the page cache, from this MiB on; returns whether all could be written.
fn fill(path: &Path, from: i64, mib: i64) -> bool {
    let (seek, count) = (format!("seek={from}"), format!("count={mib}"));
    let mut dd = Command::new("dd");
    dd.args(["if=/dev/zero", "bs=1M", "oflag=direct", "conv=notrunc", "status=none", &seek, &count]);
    dd.arg(format!("of={}", path.display())).output().expect("run dd").status.success()
}

enum Object {
    Volume(String),
    Snapshot(String),
    Group(String, Vec<String>),
}

async fn volume_of(
    rig: &mut Rig,
    made: &mut Vec<Object>,
    name: &str,
    mib: i64,
) -> (String, std::path::PathBuf) {
    let (id, device) = rig.block_volume(name, mib * MIB).await;
    made.push(Object::Volume(id.clone()));
    (id, device)
}

/// Fills the pool of this size. Until it is full, every call works; from then on none need.
async fn fill_by(rig: &mut Rig, way: Way, mib: i64) -> Vec<Object> {
    let mut made = Vec::new();
    // Of no content: its deletion gives back next to nothing.
    volume_of(rig, &mut made, "small", 8).await;
    let (volume, device) = volume_of(rig, &mut made, "first", mib).await;
    match way {
        Way::OneVolume => assert!(!fill(&device, 0, mib), "there was room"),
        Way::ManyVolumes => {
            let mut devices = vec![device];
            for number in 0..4 {
                devices.push(volume_of(rig, &mut made, &format!("another {number}"), mib).await.1);
            }
            assert!((0..mib).any(|at| !fill(&devices[at as usize % 5], at / 5, 1)), "there was room");
        }
        Way::Files => {
            let files = rig.volume("files", mib * MIB, mount_capability("ext4")).await;
            made.push(Object::Volume(files.clone()));
            let root = rig.publish(&files, mount_capability("ext4")).await;
            let mut dd = Command::new("dd");
            dd.args(["if=/dev/zero", "bs=1M", "conv=fsync", "status=none"]);
            let _ = dd.arg(format!("of={}", root.join("file").display())).output().expect("run dd");
            rig.detach(&files).await;
        }
        Way::Snapshots | Way::Groups => {
            let second = volume_of(rig, &mut made, "second", mib).await;
            let volumes = [volume.clone(), second.0];
            for turn in 0.. {
                let whole = fill(&device, turn * 7 % 20, 20) && fill(&second.1, turn * 11 % 20, 20);
                let name = format!("turn {turn}");
                if matches!(way, Way::Snapshots) {
                    let Ok(snapshot) = rig.client.create_snapshot(&name, &volume).await else { break };
                    made.push(Object::Snapshot(snapshot.snapshot_id));
                } else {
                    let Ok(group) = rig.client.create_group(&name, &volumes).await else { break };
                    let ids = group.snapshots.into_iter().map(|snapshot| snapshot.snapshot_id).collect();
                    made.push(Object::Group(group.group_snapshot_id, ids));
                }
                if !whole {
                    break;
                }
            }
        }
        Way::Copies => {
            assert!(fill(&device, 0, mib / 8), "no room at first");
            let snapshot = rig.snapshot("base", &volume).await;
            made.push(Object::Snapshot(snapshot.clone()));
            for number in 0.. {
                let mut request = new_volume(&format!("copy {number}"), mib * MIB, block_capability());
                let source = [from_snapshot(&snapshot), from_volume(&volume)][number % 2].clone();
                request.volume_content_source = Some(source);
                let Ok(copy) = rig.client.create_volume(request).await else { break };
                made.push(Object::Volume(copy.volume_id.clone()));
                let device = rig.attach(&copy.volume_id).await;
                if !fill(&device, mib / 16, mib / 8) {
                    break;
                }
            }
        }
    }
    made
}

/// Deletes everything in random order.
async fn delete_all(rig: &mut Rig, mut made: Vec<Object>, seed: u64) {
    fastrand::Rng::with_seed(seed).shuffle(&mut made);
    for object in made {
        match object {
            Object::Volume(id) => rig.client.delete_volume(&id).await,
            Object::Snapshot(id) => rig.client.delete_snapshot(&id).await,
            Object::Group(id, members) => rig.client.delete_group(&id, &members).await,
        }
        .unwrap_or_else(|error| panic!("seed {seed}: {error}"));
    }
}

async fn emptied(pool: PoolKind, mib: i64, way: Way, seed: u64) {
    let (disk, mut rig) = small_pool_of(pool, mib).await;
    let free = |rig: &Rig| space(&rig.pool_dir()).expect("statvfs").available;
    let at_first = free(&rig);
    let made = fill_by(&mut rig, way, mib).await;
    let context = format!("{pool:?}, {mib} MiB, {way:?}, seed {seed}");
    for volume in listed(&rig).await.0 {
        rig.detach(&volume).await;
    }
    delete_all(&mut rig, made, seed).await;
    assert_eq!(listed(&rig).await, (vec![], vec![]));
    assert_nothing_half_made(&rig).await;
    until(&format!("{context}: the space comes back"), || {
        sync_fs(&rig.pool_dir());
        free(&rig) >= at_first / 20 * 19
    })
    .await;
    probe(&rig).await.unwrap_or_else(|error| panic!("{context}: {error}"));
    let (after, device) = rig.block_volume("after", mib * MIB).await;
    assert!(fill(&device, 0, mib / 4), "{context}: no room after all is deleted");
    let snapshot = rig.snapshot("after", &after).await;
    verify(&rig);
    rig.delete(&after).await;
    rig.client.delete_snapshot(&snapshot).await.expect("delete");
    assert_eq!(names(&rig.pool_dir()), ["groups", "reserve", "snapshots", "staging", "volumes"]);
    super::pool_full::finish(rig, disk);
}

/// All at once: btrfs may take half a minute to give the space of a removed subvolume back. Each pool is filled in
/// two of the six ways; between them the pools have all six. `make full-pools` fills each in all.
#[apply(every_pool)]
async fn a_full_pool_is_emptied(pool: PoolKind) {
    let mib = if pool == PoolKind::Btrfs { 400 } else { 320 };
    let ways = WAYS.into_iter().zip(0..).skip(pool as usize).step_by(POOLS.len());
    let ways = ways.map(|(way, seed)| emptied(pool, mib, way, seed));
    ways.collect::<tokio::task::JoinSet<()>>().join_all().await;
}

/// From an incident: data had taken all but the first 8 MiB, which are metadata.
#[apply(device_test)]
async fn a_btrfs_pool_of_any_size_is_emptied() {
    let sizes = [300, 1024, 3072].map(|mib| emptied(PoolKind::Btrfs, mib, Way::OneVolume, 7));
    sizes.into_iter().collect::<tokio::task::JoinSet<()>>().join_all().await;
}

#[apply(every_pool)]
#[ignore = "takes 16 GiB of disk: make full-pools"]
async fn a_full_pool_of_many_gigabytes_is_emptied(pool: PoolKind) {
    for (mib, seed) in [(6 << 10, 1), (16 << 10, 2)] {
        for way in WAYS {
            emptied(pool, mib, way, seed).await;
        }
    }
}

/// The disk below the image is full, not the pool. A btrfs that could not be written is read-only. When its last volume is no longer used,
/// the driver starts again by itself, and its calls are repeated as a CO would.
#[apply(device_cases)]
async fn a_pool_on_a_full_disk_is_emptied(#[values(PoolKind::Btrfs, PoolKind::Xfs)] pool: PoolKind) {
    let disk = Disk::ext4(600 << 20);
    let mut rig = disk.rig(pool, &["--pool-size", "2Gi"]).await;
    let mut made = Vec::new();
    let (volume, device) = volume_of(&mut rig, &mut made, "first", 1024).await;
    assert!(fill(&device, 0, 64), "no room at first");
    made.push(Object::Snapshot(rig.snapshot("base", &volume).await));
    assert!(!fill(&device, 0, 1024), "there was room");
    rig.detach(&volume).await;
    if pool == PoolKind::Btrfs {
        let said = "the driver starts again to mount it";
        testkit::eventually("it starts again", async || rig.log().contains(said)).await;
        testkit::eventually("it takes writes", async || probe(&rig).await.is_ok()).await;
    }
    delete_all(&mut rig, made, 3).await;
    assert_eq!(listed(&rig).await, (vec![], vec![]));
    assert_nothing_half_made(&rig).await;
    probe(&rig).await.expect("it takes writes");
    super::pool_full::finish(rig, Some(disk));
}

/// More objects than the directory of removed ones has room for are removed at once from a full pool, and each removal
/// needs room that is not there: an xfs keeps some six names in an inode, and then needs a block.
#[apply(every_pool)]
async fn many_are_deleted_at_once_from_a_full_pool(pool: PoolKind) {
    let (disk, mut rig) = small_pool_of(pool, 320).await;
    let mut ids = Vec::new();
    for number in 0..24 {
        ids.push(rig.volume(&format!("volume {number}"), MIB, block_capability()).await);
    }
    let ballast = super::Ballast::fill(&rig.pool_dir()).with_metadata();
    let mut calls = tokio::task::JoinSet::new();
    for id in ids {
        let mut client = rig.client.clone();
        calls.spawn(async move { client.delete_volume(&id).await });
    }
    for deleted in calls.join_all().await {
        deleted.expect("DeleteVolume on a full pool");
    }
    assert_nothing_half_made(&rig).await;
    ballast.remove();
    let (volume, _) = rig.block_volume("after", MIB).await;
    rig.detach(&volume).await;
    super::pool_full::finish(rig, disk);
}

/// The image as a driver without a reserve made and filled it.
const EARLIER: &str = r#"
cd "$1"
mkdir old new
mount -o loop pool.img old
truncate -s 300M fresh.img
# It sees no other mounts, as in the driver (sys::program): one on another test's dead disk would fail it.
unshare -m sh -ec 'mount --bind /dev/null "/proc/$$/mounts"; exec mkfs.btrfs "$@"' sh -q -K -O ^no-holes -m single -d single -s 4096 fresh.img
mount -o loop fresh.img new
mkdir new/volumes new/snapshots new/groups new/staging
for volume in old/volumes/*; do
    copy=new/volumes/${volume##*/}
    mkdir "$copy"
    cp "$volume/record.json" "$copy"
    touch "$copy/state.json"
    chattr +C "$copy/state.json"
    cat "$volume/state.json" > "$copy/state.json"
    btrfs -q subvolume create "$copy/bytes"
    chattr +C "$copy/bytes"
    truncate -s "$(stat -c %s "$volume/bytes/data.img")" "$copy/bytes/data.img"
done
sync -f new
for volume in new/volumes/*; do
    dd if=/dev/zero of="$volume/bytes/data.img" bs=1M count=280 oflag=direct conv=notrunc status=none || true
done
for volume in new/volumes/*; do
    if mv "$volume" new/staging/ 2> /dev/null; then echo "there is room"; exit 1; fi
done
umount old new
rmdir old new
mv fresh.img pool.img
"#;

/// A pool that an earlier version made and filled, from which nothing could be deleted.
#[apply(device_test)]
async fn a_full_btrfs_pool_of_an_earlier_version_is_emptied_after_an_upgrade() {
    let (_, mut rig) = small_pool_of(PoolKind::Btrfs, 300).await;
    let mut ids = Vec::new();
    for name in ["one", "two"] {
        ids.push(rig.volume(name, 280 * MIB, block_capability()).await);
    }
    assert!(rig.terminate().success());
    testkit::ok(Command::new("sh").args(["-ec", EARLIER, "sh"]).arg(rig.data_dir()));
    rig.start_again().await;
    for id in &ids {
        rig.client.delete_volume(id).await.expect("DeleteVolume on a full pool");
    }
    assert_nothing_half_made(&rig).await;
    rig.volume("after", 64 * MIB, block_capability()).await;
    rig.restart().await;
    assert_eq!(listed(&rig).await.0.len(), 1);
    let image = std::fs::metadata(rig.data_dir().join("pool.img")).expect("stat");
    assert_eq!(image.len(), (300 + 64) << 20, "it grows, and once");
    super::pool_full::finish(rig, None);
}
