//! Deltas from deleted snapshots (`--retain-deleted`), and the hashing that they need.

use std::path::{Path, PathBuf};
use std::time::Duration;

use base::{BlockRange, ObjectDir};
use cbt::{MapFile, MapWriter};
use deltapath::sys::btrfs::{self, WrittenSince};

use crate::faults::{compared, hashed, until, verify as is_sound, without_skip};
use testkit::places::Disk;
use testkit::prelude::*;
use testkit::{leftovers, members, said, signal, verify, wait};

/// What backup tools do: take a snapshot, back up the changes since the last one, delete that one, and repeat. Each delta is
/// exact, and the deleted snapshot's data is freed. The next snapshot builds on the deleted one, so its cost depends on
/// the change. A kill and a restart in between change nothing.
#[apply(every_pool)]
async fn a_backup_tool_may_delete_each_snapshot_after_use(rig: Rig<pool>) {
    let (volume, device, mut content) = rig.written_volume("volume", 64 * MIB, (0, 2000, 1)).await;
    let mut base = (rig.snapshot("snapshot 0", &volume).await, content.clone());
    rig.client.delete_snapshot(&base.0).await.expect("delete");
    for round in 1..6u8 {
        content.write(&device, u64::from(round) * 100, 10, round);
        content.discard(&device, u64::from(round) * 150, 3);
        if round == 2 {
            rig.crash().await;
        }
        if round == 4 {
            rig.restart().await;
        }
        let target = rig.snapshot(&format!("snapshot {round}"), &volume).await;
        assert_eq!(
            rig.changed(&base.0, &target).await,
            content.changed_since(&base.1, BLOCK),
            "{pool:?} {round}"
        );
        let changed = MapFile::open(&rig.snapshot_dir(&target).changed()).expect("changed");
        let built_on = changed.header().relative_to.clone().expect("it builds on the deleted one");
        assert_eq!(built_on.snapshot.as_str(), base.0);
        let freed = rig.snapshot_dir(&base.0);
        until("the data of the one before is freed", || !freed.bytes().exists()).await;
        rig.client.delete_snapshot(&target).await.expect("delete");
        base = (target, content.clone());
    }
    // Only a pool that compares bytes keeps those of the newest.
    let newest = rig.snapshot_dir(&base.0);
    hashed(&rig, &[&base.0]).await;
    until("settled", || newest.bytes().exists() == (pool == PoolKind::Xfs)).await;
    rig.delete(&volume).await;
    assert!(rig.retained().is_empty(), "deleted snapshots are kept that cannot be a base");
}

/// `--retain-deleted COUNT:AGE`: beyond the count the oldest are removed, after the age all but a volume's newest, and with
/// 0 none is kept. Deltas across removed snapshots stay exact.
#[apply(every_pool)]
async fn what_was_deleted_is_forgotten_by_count_and_by_age(pool: PoolKind) {
    let mut rig = Rig::start_with(pool, &["--retain-deleted", "2"], "info").await;
    let (volume, device) = rig.block_volume("volume", 16 * MIB).await;
    let (mut content, mut taken) = (Content::default(), Vec::new());
    for number in 0..5 {
        content.write(&device, number * 7, 9, number as u8 + 1);
        taken.push((rig.snapshot(&format!("{number}"), &volume).await, content.clone()));
    }
    // From the middle, the start and the end.
    for number in [2, 0, 3, 1] {
        rig.client.delete_snapshot(&taken[number].0).await.expect("delete");
    }
    let hints = |rig: &Rig| rig.log().matches("a deleted snapshot that is not kept").count();
    for (number, kept, hinted) in [(2, true, 0), (3, true, 0), (4, true, 0), (0, false, 1), (1, false, 1)] {
        let answer = rig.client.delta(&taken[number].0, &taken[4].0, 0, 0).await;
        assert_eq!(hints(&rig), hinted, "said once, {number}");
        match kept {
            false => assert_eq!(code(answer), Code::NotFound, "{pool:?} {number}"),
            true => assert_eq!(
                blocks_of(&answer.expect("delta"), BLOCK),
                content.changed_since(&taken[number].1, BLOCK),
                "{pool:?} {number}"
            ),
        }
    }
    assert!(rig.terminate().success());
    tokio::time::sleep(Duration::from_millis(1100)).await;
    rig.start_again_with(&["--retain-deleted", "2:1s"]).await;
    until("forgotten by age", || rig.retained().is_empty()).await;
    assert_eq!(code(rig.client.delta(&taken[3].0, &taken[4].0, 0, 0).await), Code::NotFound);
    assert!(rig.terminate().success());
    rig.start_again_with(&["--retain-deleted", "0"]).await;
    rig.client.delete_snapshot(&taken[4].0).await.expect("delete");
    assert!(rig.retained().is_empty(), "0 keeps none");
    let next = rig.snapshot("next", &volume).await;
    let said = hints(&rig);
    let strange = "snap-00000000000000000000000000000000";
    for (base, hinted) in [(strange, said), (&taken[4].0, said + 1), (&taken[4].0, said + 1)] {
        assert_eq!(code(rig.client.delta(base, &next, 0, 0).await), Code::NotFound);
        assert_eq!(hints(&rig), hinted, "said once, and of what was here: {}", rig.log());
    }
    rig.detach_and_finish(&volume).await;
}

/// A deleted snapshot cannot be the base of a delta if its volume is deleted and it has no later snapshot. Such a snapshot
/// does not count, even if it is deleted together with one that is kept.
#[apply(device_test)]
async fn what_is_of_no_use_takes_nobodys_place() {
    let mut rig = Rig::start_with(PoolKind::Dir, &["--retain-deleted", "1"], "info").await;
    let (volume, device) = rig.block_volume("volume", 16 * MIB).await;
    let (other, _) = rig.block_volume("other", 16 * MIB).await;
    let (mut content, mut taken) = (Content::default(), Vec::new());
    for number in 0..2 {
        content.write(&device, number * 7, 9, number as u8 + 1);
        taken.push((rig.snapshot(&format!("{number}"), &volume).await, content.clone()));
    }
    let group = rig.client.create_group("last", &[volume.clone(), other.clone()]).await.expect("group");
    rig.delete(&volume).await;
    rig.client.delete_snapshot(&taken[0].0).await.expect("delete");
    rig.client.delete_group(&group.group_snapshot_id, &members(&group)).await.expect("delete");
    // It is the newest that is of use.
    assert_eq!(rig.changed(&taken[0].0, &taken[1].0).await, content.changed_since(&taken[0].1, BLOCK));
    rig.detach_and_finish(&other).await;
}

/// Interrupts `deltapath verify` while it reads. It must unmount the pool that it mounted.
fn interrupt_verify(rig: &Rig) {
    let mut command = std::process::Command::new(testkit::program("deltapath"));
    let mut child = command.args(["verify", "--data-dir"]).arg(rig.data_dir()).spawn().expect("verify");
    let pool = rig.pool_dir().display().to_string();
    while !leftovers(rig.dir.path()).contains(&pool) {
        assert_eq!(child.try_wait().expect("wait"), None, "verify ended before it mounted the pool");
    }
    signal(child.id(), nix::sys::signal::Signal::SIGINT);
    assert_eq!(wait(&mut child, Duration::from_secs(20)).code(), Some(130));
    testkit::nothing_left(rig.dir.path());
}

/// Hashing comes after CreateSnapshot. If the driver is killed before it is done, the next one continues. Deltas are exact
/// meanwhile, and in the end every hash is right.
#[apply(device_cases)]
async fn hashing_goes_on_after_a_kill(#[values(PoolKind::Xfs, PoolKind::Btrfs)] pool: PoolKind) {
    let mut rig = Rig::start(pool).await;
    let (volume, device) = rig.block_volume("volume", 1024 * MIB).await;
    let mut content = Content::default();
    for start in (0..131_072).step_by(4096) {
        content.write(&device, start, 4096, 1);
    }
    let first = rig.snapshot("first", &volume).await;
    let pending = MapFile::open(&rig.snapshot_dir(&first).pending()).and_then(|map| map.count());
    rig.kill();
    assert_eq!(pending.expect("pending"), 131_072, "{pool:?}: nothing is hashed when the call returns");
    rig.start_again().await;
    let before = content.clone();
    content.write(&device, 70_000, 50, 2);
    content.discard(&device, 5, 5);
    let second = rig.snapshot("second", &volume).await;
    let expected = content.changed_since(&before, BLOCK);
    assert_eq!(rig.changed(&first, &second).await, expected, "{pool:?}: while it is being hashed");
    compared(&rig, &[&first, &second]).await;
    assert_eq!(rig.changed(&first, &second).await, expected, "{pool:?}: when it is hashed");
    is_sound(&rig);
    rig.detach(&volume).await;
    assert!(rig.terminate().success());
    // Without a driver it mounts the pool itself.
    let seen = verify(&rig.data_dir());
    assert!(seen.status.success(), "{pool:?}: {seen:?}");
    let report: serde_json::Value = serde_json::from_slice(&seen.stdout).expect("json");
    assert_eq!((&report["snapshots"], &report["bytes"]), (&2.into(), &(2 * 512 * MIB - 5 * 4096).into()));
    assert_eq!(report["unhashed"], 0);
    interrupt_verify(&rig);
    rig.start_again().await;
    rig.finish();
}

pub fn flip(path: &Path, at: u64) {
    use std::os::unix::fs::FileExt;
    let file = std::fs::File::options().read(true).write(true).open(path).expect("open");
    let mut byte = [0];
    file.read_exact_at(&mut byte, at).expect("read");
    file.write_all_at(&[byte[0] ^ 4], at).expect("write");
}

/// The damage that `verify` reports.
pub fn damage(rig: &Rig) -> Vec<serde_json::Value> {
    let seen = verify(&rig.data_dir());
    assert_eq!(seen.status.code(), Some(1));
    let report: serde_json::Value = serde_json::from_slice(&seen.stdout).expect("json");
    report["damage"].as_array().expect("a list").clone()
}

/// A flipped bit anywhere in a map or in the hashes is detected, and the data is read instead, so every answer stays exact.
#[apply(every_pool)]
async fn a_flipped_bit_changes_no_answer(rig: Rig<pool>) {
    let (volume, device, before) = rig.written_volume("volume", 64 * MIB, (10, 300, 1)).await;
    without_skip(&mut rig, &volume).await;
    let base = rig.snapshot("base", &volume).await;
    let mut after = before.clone();
    after.write(&device, 50, 20, 2);
    after.write(&device, 90, 20, 1);
    after.discard(&device, 200, 9);
    let target = rig.snapshot("target", &volume).await;
    compared(&rig, &[&base, &target]).await;
    let expected = after.changed_since(&before, BLOCK);
    let files = |dir: ObjectDir| [dir.allocated(), dir.changed(), dir.pending(), dir.hashes()];
    let files: Vec<PathBuf> =
        [&base, &target].into_iter().flat_map(|id| files(rig.snapshot_dir(id))).collect();
    for path in files {
        let sound = std::fs::read(&path).expect("read");
        for at in (0..sound.len() as u64).step_by((sound.len() / 12).max(1)) {
            flip(&path, at);
            assert_eq!(rig.changed(&base, &target).await, expected, "{pool:?} {} byte {at}", path.display());
            assert_eq!(rig.allocated(&target).await, after.allocated(BLOCK), "{} byte {at}", path.display());
            std::fs::write(&path, &sound).expect("restore");
        }
    }
    rig.detach(&volume).await;
}

/// Unwritten space is a hole. On some filesystems SEEK_DATA reports it as data after it was read, so a map that is made
/// again may list it. Then the hash that the snapshot before has for the block must not count.
#[apply(every_pool)]
async fn zeroed_space_that_was_read_is_a_hole(rig: Rig<pool>) {
    let (volume, device) = rig.block_volume("volume", 8 * MIB).await;
    let (mut content, mut taken) = (Content::default(), Vec::new());
    content.write(&device, 0, 200, 1);
    for step in 0..4 {
        match step {
            0 => {}
            3 => content.zero(&device, 40, 20),
            _ => content.write(&device, 40, 20, 3 - step),
        }
        let id = rig.snapshot(&format!("snapshot {step}"), &volume).await;
        hashed(&rig, &[&id]).await;
        taken.push((id, content.clone()));
    }
    let ((base, before), (target, after)) = (&taken[0], &taken[3]);
    let dir = rig.snapshot_dir(target);
    compared(&rig, &[target]).await;
    let read = || std::fs::read(dir.data()).expect("read");
    read();
    is_sound(&rig);
    read();
    flip(&dir.allocated(), 0);
    let changed = after.changed_since(before, BLOCK);
    assert_eq!(rig.changed(base, target).await, changed, "{pool:?}");
    assert_eq!(rig.allocated(target).await, after.allocated(BLOCK), "{pool:?}");
    let header = MapFile::open(&dir.pending()).expect("open").header().clone();
    std::fs::remove_file(dir.allocated()).expect("remove");
    let mut map = MapWriter::create(&dir.allocated(), header).expect("create");
    map.insert(BlockRange::new(0, 200)).expect("insert");
    map.finish().expect("finish");
    assert_eq!(rig.changed(base, target).await, changed, "{pool:?}: the hash of another snapshot counted");
    rig.detach(&volume).await;
}

/// A deleted snapshot has only maps and hashes. If they are damaged, a delta from it fails, and the error says what to do.
/// `verify` names damaged data by snapshot and range.
#[apply(device_test)]
async fn damage_that_can_not_be_mended_is_reported(rig: Rig<Btrfs>) {
    let (volume, device, mut content) = rig.written_volume("volume", 64 * MIB, (10, 300, 1)).await;
    without_skip(&mut rig, &volume).await;
    let base = rig.snapshot("base", &volume).await;
    content.write(&device, 50, 20, 2);
    let target = rig.snapshot("target", &volume).await;
    compared(&rig, &[&base, &target]).await;
    let changed = rig.snapshot_dir(&target).changed();
    rig.client.delete_snapshot(&base).await.expect("delete");
    let gone = rig.snapshot_dir(&base);
    until("freed", || !gone.bytes().exists()).await;
    // Without `changed` all blocks are compared, by hash, since the base has no data.
    flip(&changed, 0);
    assert_eq!(rig.changed(&base, &target).await, (50..70).collect::<Vec<u64>>());
    for path in [gone.hashes(), gone.allocated(), gone.pending()] {
        let sound = std::fs::read(&path).expect("read");
        let at = if path == gone.pending() { sound.len() - 20 } else { 40 };
        flip(&path, at as u64);
        println!("{}", path.display());
        let refused = rig.client.delta(&base, &target, 0, 0).await;
        is_refused(refused, Code::FailedPrecondition, &["GetMetadataAllocated"]);
        std::fs::write(&path, &sound).expect("restore");
    }
    let told = said(&verify(&rig.data_dir()));
    assert!(told.contains("changed.map"), "{told}");
    flip(&rig.snapshot_dir(&target).data(), 100 * BLOCK + 5);
    let damage = damage(&rig);
    let found = damage.iter().find(|damage| damage["start"] == 100 * BLOCK).expect("the range");
    assert_eq!((found["snapshot"].as_str(), &found["end"]), (Some(target.as_str()), &(101 * BLOCK).into()));
    rig.detach(&volume).await;
}

/// Seen in other drivers: changes since a snapshot were searched from its `generation`. A restore from the snapshot raises
/// that, so all changes before the restore were lost.
#[apply(every_pool)]
async fn a_restore_between_two_snapshots_hides_no_change(rig: Rig<pool>) {
    let (volume, device, before) = rig.written_volume("volume", 64 * MIB, (0, 100, 1)).await;
    let base = rig.snapshot("base", &volume).await;
    let mut after = before.clone();
    after.write(&device, 10, 5, 2);
    after.discard(&device, 40, 5);
    let (restored, restored_device) = rig.volume_from("restored", 64 * MIB, from_snapshot(&base)).await;
    let mut theirs = before.clone();
    theirs.write(&restored_device, 70, 5, 3);
    let target = rig.snapshot("target", &volume).await;
    assert_eq!(rig.changed(&base, &target).await, after.changed_since(&before, BLOCK), "{pool:?}");
    // The first snapshot of the restored volume builds on the restored snapshot, which is of another volume.
    let first = rig.snapshot("its first", &restored).await;
    assert_eq!(rig.allocated(&first).await, theirs.allocated(BLOCK), "{pool:?}");
    hashed(&rig, &[&first]).await;
    is_sound(&rig);
    rig.detach(&volume).await;
    rig.detach(&restored).await;
}

fn btrfs_disk(features: &str) -> Disk {
    Disk::new("btrfs", &["-q", "-O", features], 1 << 30)
}

/// A write in the next transaction after a copy is found, a write before the copy is not, and a block punched beside a hole
/// is found.
#[test_with::root]
#[test]
fn a_search_lists_what_was_written_since_and_nothing_else() {
    let disk = btrfs_disk("^no-holes");
    let at = |name: &str| disk.mount_point.join(name);
    btrfs::create_subvolume(&at("live")).expect("subvolume");
    let path = at("live").join("data");
    let file = std::fs::File::options().read(true).write(true).create_new(true).open(&path).expect("create");
    file.set_len(1 << 30).expect("set_len");
    let live = std::fs::File::open(at("live")).expect("open");
    let snapshot = |name| btrfs::snapshot(&live, &at("live"), &at(name)).expect("snapshot");
    let write = |block: u64, fill: u8| {
        use std::os::unix::fs::FileExt;
        file.write_all_at(&[fill; 4096], block * 4096).expect("write");
    };
    (10..20).for_each(|block| write(block, 1));
    snapshot("first");
    write(12, 2);
    files::punch_hole(&file, 19 * 4096, 4096).expect("punch");
    snapshot("second");
    let birth = |name| btrfs::birth(&at(name)).expect("birth");
    let written = |name: &str, since| {
        let path = at(name).join("data");
        let file = std::fs::File::open(&path).expect("open");
        let found = WrittenSince::of(&file, &path, since).expect("search");
        found.map(|found| found.expect("search")).collect::<Vec<_>>()
    };
    assert_eq!(birth("second"), birth("first") + 1, "the next transaction, or this proves nothing");
    let found = written("second", birth("first"));
    let data: Vec<u64> =
        found.iter().filter(|found| found.data).map(|found| found.range.start / 4096).collect();
    assert_eq!(data, [12], "{found:?}");
    let punched = 19 * 4096;
    let reported =
        found.iter().any(|found| !found.data && found.range.start <= punched && punched < found.range.end);
    assert!(reported, "the punched block in {found:?}");
    assert!(written("second", birth("second")).iter().all(|found| !found.data), "nothing since");
}

/// A data directory on an existing btrfs is used in place, even if a punched hole leaves no item in the tree there
/// (`no-holes`, the default of mkfs). A part of a block that was punched is a change.
#[apply(device_test)]
async fn a_btrfs_of_ones_own_is_used_in_place() {
    for features in ["no-holes", "^no-holes"] {
        let disk = btrfs_disk(features);
        let data_dir = disk.mount_point.join("data");
        let lived = tokio::spawn({
            let data_dir = data_dir.clone();
            async move {
                let flags = ["--data-dir", data_dir.to_str().expect("a plain path")];
                let mut rig = Rig::start_with(PoolKind::Btrfs, &flags, "info").await;
                assert!(!data_dir.join("pool.img").exists(), "not in place");
                let (volume, device) = rig.block_volume_of("volume", 64 * MIB, "64Ki").await;
                let mut before = Content::default();
                before.write(&device, 0, 64, 1);
                let base = rig.snapshot("base", &volume).await;
                let mut after = before.clone();
                after.discard(&device, 17, 2);
                let target = rig.snapshot("target", &volume).await;
                let list = rig.client.delta(&base, &target, 0, 0).await.expect("delta");
                assert_eq!(blocks_of(&list, 16 * BLOCK), after.changed_since(&before, 16 * BLOCK));
                rig.delete(&volume).await;
                for snapshot in [base, target] {
                    rig.client.delete_snapshot(&snapshot).await.expect("delete");
                }
                rig.finish();
            }
        });
        if let Err(error) = lived.await {
            std::panic::resume_unwind(error.into_panic());
        }
        drop(disk);
    }
}

/// A record has no checksum. With a wrong birth, later than that of the next snapshot, nothing would seem to be written
/// since. Then the data is compared instead.
#[apply(device_test)]
async fn a_birth_that_can_not_be_loses_no_change(rig: Rig<Btrfs>) {
    let (volume, device, mut content) = rig.written_volume("volume", 8 * MIB, (0, 100, 1)).await;
    for (round, birth) in [u64::MAX, u64::MAX - 1, 1 << 40].into_iter().enumerate() {
        let first = rig.snapshot(&format!("first {round}"), &volume).await;
        rig.kill();
        let path = rig.pool_dir().join("snapshots").join(&first).join("record.json");
        let mut record: serde_json::Value =
            serde_json::from_slice(&std::fs::read(&path).expect("read")).expect("JSON");
        assert!(record["birth"].is_u64(), "{record}");
        record["birth"] = birth.into();
        std::fs::write(&path, record.to_string()).expect("write");
        rig.start_again().await;
        let before = content.clone();
        content.write(&device, 50, 3, 10 + round as u8);
        content.discard(&device, 7 + round as u64, 1);
        let second = rig.snapshot(&format!("second {round}"), &volume).await;
        assert_eq!(
            rig.changed(&first, &second).await,
            content.changed_since(&before, BLOCK),
            "birth {birth}"
        );
    }
    rig.detach(&volume).await;
}
