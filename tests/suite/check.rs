//! `deltapath check` reports only real faults, removes only what is not needed, and changes nothing else.

use std::fs;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use deltapath::sys::loopdev::{Access, LoopDevice};
use serde_json::Value;

use testkit::prelude::*;

struct Checked {
    exit: i32,
    /// Severity, path, whether it was repaired.
    found: Vec<(String, PathBuf, bool)>,
}

fn check(data_dir: &Path, arguments: &[&str]) -> Checked {
    let mut command = Command::new(testkit::program("deltapath"));
    command.args(["check", "--output", "json", "--data-dir"]).arg(data_dir).args(arguments);
    let output = command.output().expect("run deltapath check");
    let said = String::from_utf8_lossy(&output.stdout);
    let report: Value = serde_json::from_str(&said)
        .unwrap_or_else(|error| panic!("{error}: {said}\n{}", String::from_utf8_lossy(&output.stderr)));
    let text = |value: &Value| value.as_str().expect("a string").to_owned();
    let found = report["found"].as_array().expect("a list").iter();
    Checked {
        exit: output.status.code().expect("it ended by itself"),
        found: found
            .map(|found| {
                let repaired = found["repaired"].as_bool().expect("a bool");
                (text(&found["severity"]), text(&found["path"]).into(), repaired)
            })
            .collect(),
    }
}

/// The directory of a killed driver: it has one object of every kind, one volume is in use, and the pool is still mounted.
struct Scene {
    rig: Rig,
    used: String,
    idle: String,
    snapshot: String,
    group: String,
    retained: String,
}

impl Scene {
    async fn set(pool: PoolKind) -> Scene {
        let mut rig = Rig::start(pool).await;
        let (used, device) = rig.block_volume("used", 16 * MIB).await;
        let (idle, other) = rig.block_volume("idle", 16 * MIB).await;
        let mut content = Content::default();
        content.write(&device, 0, 100, 1);
        content.write(&other, 50, 100, 1);
        rig.detach(&idle).await;
        let first = rig.snapshot("first", &used).await;
        let retained = rig.snapshot("deleted", &used).await;
        content.write(&device, 7, 9, 2);
        let both = [used.clone(), idle.clone()];
        let group = rig.client.create_group("group", &both).await.expect("group").group_snapshot_id;
        rig.client.delete_snapshot(&retained).await.expect("delete");
        let scene = Scene { rig, used, idle, snapshot: first, group, retained };
        scene.is_well("beside a driver");
        scene
    }

    fn is_killed(&mut self) {
        self.rig.kill();
        // A comparison that the kill interrupted may leave its file.
        assert_eq!(check(&self.rig.data_dir(), &["--repair"]).exit, 0);
    }

    fn pool(&self) -> PathBuf {
        self.rig.pool_dir().canonicalize().expect("the pool is there")
    }

    fn is_well(&self, when: &str) {
        is_well(&self.rig, when);
    }
}

fn is_well(rig: &Rig, when: &str) {
    let checked = check(&rig.data_dir(), &[]);
    assert_eq!((checked.exit, checked.found), (0, vec![]), "{when}\n{}", rig.log());
}

/// What is done to the directory.
enum Change {
    /// A file is put there.
    Stray,
    /// What a call that was cut has left: a directory with a directory and a file.
    HalfMade(&'static str, &'static str),
    /// A file is cut in half, gets another first bit, or is removed.
    Cut(PathBuf),
    Flip(PathBuf),
    Remove(PathBuf),
    /// A file of 16 MiB is made longer.
    Grow,
    /// A device is attached to the file.
    Attach(Access),
}

use Change::{Attach, Cut, Flip, Grow, HalfMade, Remove, Stray};

/// Makes a change; returns what it is reported with, and what undoes it.
fn make(change: &Change, path: &Path) -> (PathBuf, Box<dyn FnOnce()>) {
    let set_length = |file: &Path, length: u64| {
        fs::File::options()
            .write(true)
            .open(file)
            .and_then(|file| file.set_len(length))
            .expect("set the length");
    };
    let undo: Box<dyn FnOnce()> = match change {
        Stray => {
            fs::write(path, "stray").expect("write");
            let path = path.to_owned();
            // A leftover is gone by then.
            Box::new(move || _ = fs::remove_file(path))
        }
        HalfMade(inner, file) => {
            fs::create_dir_all(path.join(inner)).expect("mkdir");
            fs::write(path.join(file), "").expect("write");
            Box::new(|| ())
        }
        Cut(file) | Flip(file) | Remove(file) => {
            let (file, mut bytes) = (file.clone(), fs::read(file).expect("read"));
            let sound = bytes.clone();
            match change {
                Cut(_) => set_length(&file, bytes.len() as u64 / 2),
                Remove(_) => fs::remove_file(&file).expect("remove"),
                _ => {
                    bytes[0] ^= 1;
                    fs::write(&file, bytes).expect("write");
                }
            }
            Box::new(move || fs::write(file, sound).expect("put it back"))
        }
        Grow => {
            set_length(path, 32 * MIB as u64);
            let path = path.to_owned();
            Box::new(move || set_length(&path, 16 * MIB as u64))
        }
        Attach(access) => {
            let device = LoopDevice::attach(path, *access).expect("attach");
            let is_leftover = matches!(access, Access::ReadWrite);
            return (
                device.path(),
                Box::new(move || assert!(is_leftover || device.detach().expect("detach"))),
            );
        }
    };
    (path.to_owned(), undo)
}

/// The changes, each with its name, the finding that it must cause, and the path that is reported: that of the object where
/// its record or a map of it is broken.
fn changes(scene: &Scene) -> Vec<(&'static str, &'static str, PathBuf, Change)> {
    let pool = scene.pool();
    let data_dir = scene.rig.data_dir().canonicalize().expect("the data dir is there");
    let volume = pool.join("volumes").join(&scene.idle);
    let state = pool.join("volumes").join(&scene.used).join("state.json");
    let snapshot = pool.join("snapshots").join(&scene.snapshot);
    let group = pool.join("groups").join(&scene.group);
    let retained = pool.join("snapshots").join(&scene.retained);
    let data = |dir: &Path| dir.join("bytes/data.img");
    vec![
        ("volume-record", "damage", volume.clone(), Cut(volume.join("record.json"))),
        ("snapshot-record", "damage", snapshot.clone(), Cut(snapshot.join("record.json"))),
        ("retained-record", "damage", retained.clone(), Cut(retained.join("record.json"))),
        ("allocated", "damage", snapshot.clone(), Flip(snapshot.join("allocated.map"))),
        ("retained-changed", "damage", retained.clone(), Flip(retained.join("changed.map"))),
        ("snapshot-data", "damage", data(&snapshot), Cut(data(&snapshot))),
        ("volume-data", "damage", data(&volume), Cut(data(&volume))),
        ("node", "damage", state.clone(), Cut(state)),
        ("hashes", "damage", snapshot.clone(), Remove(snapshot.join("hashes"))),
        ("top", "stranger", data_dir.join("notes.txt"), Stray),
        ("manifest-draft", "leftover", data_dir.join("deltapath.json.new"), Stray),
        ("pool-stray", "stranger", pool.join("notes.txt"), Stray),
        ("volume-stray", "stranger", volume.join("notes.txt"), Stray),
        ("bytes-stray", "stranger", volume.join("bytes/other.img"), Stray),
        ("record-draft", "leftover", volume.join("record.json.new"), Stray),
        ("map-draft", "leftover", snapshot.join("changed.map.compared"), Stray),
        ("checked-map-draft", "leftover", snapshot.join("allocated.map.checked"), Stray),
        ("group-stray", "stranger", group.join("notes.txt"), Stray),
        ("staging", "leftover", pool.join("staging/volume-half-made"), HalfMade("bytes", "bytes/data.img")),
        ("empty-group", "leftover", pool.join("groups/group-empty"), HalfMade("members", "deleted.json")),
        ("long-volume", "note", data(&volume), Grow),
        ("device", "leftover", data(&volume), Attach(Access::ReadWrite)),
        ("snapshot-device", "stranger", data(&snapshot), Attach(Access::ReadOnly)),
    ]
}

#[apply(every_pool)]
async fn what_is_wrong_is_reported_and_only_leftovers_go(pool: PoolKind) {
    let mut scene = Scene::set(pool).await;
    let mut repair = Command::new(testkit::program("deltapath"));
    let said =
        crate::startup::refused(repair.args(["check", "--repair", "--data-dir"]).arg(scene.rig.data_dir()));
    assert!(said.contains("stop it first"), "{said}");
    scene.is_killed();
    let data_dir = scene.rig.data_dir();
    scene.is_well("after a kill");
    for (name, severity, path, change) in changes(&scene) {
        let ((path, undo), repaired) = (make(&change, &path), severity == "leftover");
        let exit = match severity {
            "damage" => 1,
            "note" => 0,
            _ => 3,
        };
        let reported = check(&data_dir, &[]);
        let wanted = (severity.to_owned(), path.clone(), false);
        assert!(
            reported.found.contains(&wanted),
            "{pool:?}, {name}: {wanted:?} is not in {:?}",
            reported.found
        );
        assert_eq!(reported.exit, exit, "{pool:?}, {name}");
        // Nothing outside of the broken object is reported.
        let others = reported.found.iter().filter(|(_, found, _)| !found.starts_with(&path));
        assert_eq!(others.count(), 0, "{pool:?}, {name}: {:?}", reported.found);

        let mended = check(&data_dir, &["--repair"]);
        let wanted = (severity.to_owned(), path.clone(), repaired);
        assert!(mended.found.contains(&wanted), "{pool:?}, {name}: {wanted:?} is not in {:?}", mended.found);
        assert_eq!(mended.exit, if repaired { 0 } else { exit }, "{pool:?}, {name}");
        undo();
        scene.is_well(name);
    }
    scene.rig.start_again().await;
    scene.is_well("started again");
    let used = scene.used.clone();
    scene.rig.detach(&used).await;
    scene.rig.finish();
}

/// A mount that no record explains is removed before its device.
#[apply(device_test)]
async fn an_unexplained_mount_is_unmounted() {
    let mut scene = Scene::set(PoolKind::Dir).await;
    scene.is_killed();
    let data = scene.pool().join("volumes").join(&scene.idle).join("bytes/data.img");
    let before = fs::read(&data).expect("read");
    testkit::ok(Command::new("mkfs.ext4").args(["-q", "-b", "4096"]).arg(&data));
    let device = LoopDevice::attach(&data, Access::ReadWrite).expect("attach");
    let target = scene.rig.dir.path().join("mounted");
    fs::create_dir(&target).expect("mkdir");
    let none = deltapath::sys::mount::Flags::empty();
    deltapath::sys::mount::mount(&device.path(), &target, "ext4", none, "").expect("mount");
    let target = target.canonicalize().expect("the mount is there");
    let reported = check(&scene.rig.data_dir(), &[]);
    let leftover = |path: PathBuf, repaired| ("leftover".to_owned(), path, repaired);
    assert_eq!(reported.found, [leftover(target.clone(), false), leftover(device.path(), false)]);
    let mut mended = check(&scene.rig.data_dir(), &["--repair"]);
    assert_eq!((mended.found.len(), &mended.found[0]), (2, &leftover(target, true)));
    // A mount namespace of another test may hold the mount for a while: then the device is in use, and goes later.
    let deadline = Instant::now() + Duration::from_secs(60);
    while mended.found.last() == Some(&leftover(device.path(), false)) && Instant::now() < deadline {
        std::thread::sleep(Duration::from_millis(100));
        mended = check(&scene.rig.data_dir(), &["--repair"]);
    }
    let found = mended.found;
    assert!(found.last().is_none_or(|last| *last == leftover(device.path(), true)), "{found:?}");
    assert_eq!(mended.exit, 0);
    fs::write(&data, before).expect("write");
    scene.is_well("unmounted");
}

/// Kubelet mounts a part of a volume for a pod with a `subPath`. The finding is a note, not a fault.
#[apply(device_cases)]
async fn a_mount_of_a_part_of_a_volume_is_a_note(rig: Rig<Dir>, #[values("ext4", "btrfs")] fstype: &str) {
    let capability = || mount_capability(fstype);
    let (volume, target) = rig.published("volume", 256 * MIB, capability()).await;
    is_well(&rig, fstype);
    let (part, place) = (target.join("part"), rig.dir.path().join("part"));
    fs::create_dir(&part).expect("mkdir");
    fs::create_dir(&place).expect("mkdir");
    deltapath::sys::mount::bind(&part, &place, false).expect("bind");
    let place = place.canonicalize().expect("the mount is there");
    let (checked, note) = (check(&rig.data_dir(), &[]), ("note".to_owned(), place.clone(), false));
    assert_eq!((checked.exit, checked.found), (0, vec![note]), "{fstype}");
    deltapath::sys::mount::unmount_top(&place).expect("unmount");
    rig.detach(&volume).await;
}

/// Without a driver the pool is mounted for the check, and unmounted afterwards.
#[apply(every_pool)]
async fn the_pool_is_left_as_it_was_found(pool: PoolKind) {
    let mut rig = Rig::start(pool).await;
    let (volume, _) = rig.block_volume("volume", 16 * MIB).await;
    rig.snapshot("snapshot", &volume).await;
    rig.detach(&volume).await;
    assert!(rig.terminate().success());
    testkit::nothing_left(rig.dir.path());
    is_well(&rig, "without a driver");
    testkit::nothing_left(rig.dir.path());
    assert_eq!(names(&rig.data_dir()).contains(&"pool.img".to_owned()), pool != PoolKind::Dir);
}

/// If the data of a volume in use was removed by hand, its last copy is in the device, so the device is not freed.
#[apply(device_test)]
async fn a_device_that_holds_the_last_copy_stays() {
    let mut scene = Scene::set(PoolKind::Dir).await;
    scene.is_killed();
    let data = scene.pool().join("volumes").join(&scene.used).join("bytes/data.img");
    let device = LoopDevice::find(&data).expect("find").expect("it is in use");
    fs::remove_file(&data).expect("remove");
    let mended = check(&scene.rig.data_dir(), &["--repair"]);
    let reported = |severity: &str, path: &Path| (severity.to_owned(), path.to_owned(), false);
    assert_eq!(mended.found, [reported("damage", &data), reported("note", &device.path())]);
    assert_eq!(mended.exit, 1);
    let mut copy = vec![0; 16 * MIB as usize];
    fs::File::open(device.path()).and_then(|mut file| file.read_exact(&mut copy)).expect("read the device");
    fs::write(&data, copy).expect("write");
    assert!(device.detach().expect("detach"));
    scene.is_well("with the data back");
}
