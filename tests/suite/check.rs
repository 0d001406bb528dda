//! `deltapath check` reports only real faults, removes only what is not needed, and changes nothing else.

use std::fs;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use csi_client::mount_capability;
use deltapath::sys::loopdev::{Access, LoopDevice};
use serde_json::Value;

use testkit::content::Content;
use testkit::{MIB, PoolKind, Rig, names};

/// The result of one run.
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

    fn pool(&self) -> PathBuf {
        self.rig.pool_dir().canonicalize().expect("the pool is there")
    }

    fn is_well(&self, when: &str) {
        let checked = check(&self.rig.data_dir(), &[]);
        assert_eq!((checked.exit, checked.found), (0, vec![]), "{when}\n{}", self.rig.log());
    }
}

/// A change to the directory, the finding that it must cause, and whether `--repair` undoes it.
struct Case {
    name: &'static str,
    path: PathBuf,
    severity: &'static str,
    repaired: bool,
    undo: Box<dyn FnOnce()>,
}

fn case(name: &'static str, severity: &'static str, path: PathBuf) -> Case {
    Case { name, path, severity, repaired: severity == "leftover", undo: Box::new(|| ()) }
}

/// Breaks a file, and restores it afterwards.
fn broken(name: &'static str, path: PathBuf, break_it: impl FnOnce(&Path)) -> Case {
    let aside = tempfile::Builder::new().prefix("deltapath-test-").tempfile().expect("temp file");
    let aside = aside.into_temp_path().keep().expect("it stays until it is put back");
    fs::copy(&path, &aside).expect("keep a copy");
    break_it(&path);
    let undo = {
        let path = path.clone();
        Box::new(move || {
            fs::copy(&aside, &path).expect("put it back");
            fs::remove_file(&aside).expect("remove the copy");
        })
    };
    Case { undo, ..case(name, "damage", path) }
}

fn cases(scene: &Scene) -> Vec<Box<dyn Fn() -> Case>> {
    let pool = scene.pool();
    let data_dir = scene.rig.data_dir().canonicalize().expect("the data dir is there");
    let volume = pool.join("volumes").join(&scene.idle);
    let used = pool.join("volumes").join(&scene.used);
    let snapshot = pool.join("snapshots").join(&scene.snapshot);
    let group = pool.join("groups").join(&scene.group);
    let retained = pool.join("snapshots").join(&scene.retained);
    let cut = |path: &Path| {
        let file = fs::File::options().write(true).open(path).expect("open");
        file.set_len(file.metadata().expect("stat").len() / 2).expect("cut");
    };
    let flip = |path: &Path| {
        let mut bytes = fs::read(path).expect("read");
        bytes[0] ^= 1;
        fs::write(path, bytes).expect("write");
    };
    let stray = |name, severity, path: PathBuf| {
        let made = move || {
            fs::write(&path, "stray").expect("write");
            let mut case = case(name, severity, path.clone());
            if severity == "stranger" {
                let path = path.clone();
                case.undo = Box::new(move || fs::remove_file(path).expect("remove"));
            }
            case
        };
        Box::new(made) as Box<dyn Fn() -> Case>
    };
    // If the record is broken, the finding names the object's directory.
    let record = |name, dir: PathBuf| {
        let made = move || Case { path: dir.clone(), ..broken(name, dir.join("record.json"), cut) };
        Box::new(made) as Box<dyn Fn() -> Case>
    };
    let map = |name, dir: PathBuf, file: &'static str| {
        let made = move || Case { path: dir.clone(), ..broken(name, dir.join(file), flip) };
        Box::new(made) as Box<dyn Fn() -> Case>
    };
    let halved =
        |name, path: PathBuf| Box::new(move || broken(name, path.clone(), cut)) as Box<dyn Fn() -> Case>;
    // What a call that was cut has left: a directory with a directory and a file.
    let half_made = |name, dir: PathBuf, inner: &'static str, file: &'static str| {
        let made = move || {
            fs::create_dir_all(dir.join(inner)).expect("mkdir");
            fs::write(dir.join(file), "").expect("write");
            case(name, "leftover", dir.clone())
        };
        Box::new(made) as Box<dyn Fn() -> Case>
    };
    vec![
        record("volume-record", volume.clone()),
        record("snapshot-record", snapshot.clone()),
        record("retained-record", retained.clone()),
        map("allocated", snapshot.clone(), "allocated.map"),
        map("retained-changed", retained.clone(), "changed.map"),
        halved("snapshot-data", snapshot.join("bytes/data.img")),
        halved("volume-data", volume.join("bytes/data.img")),
        halved("node", used.join("state.json")),
        {
            let hashes = snapshot.join("hashes");
            let dir = snapshot.clone();
            Box::new(move || Case {
                path: dir.clone(),
                ..broken("hashes", hashes.clone(), |path| fs::remove_file(path).expect("remove"))
            })
        },
        stray("top", "stranger", data_dir.join("notes.txt")),
        stray("manifest-draft", "leftover", data_dir.join("deltapath.json.new")),
        stray("pool-stray", "stranger", pool.join("notes.txt")),
        stray("volume-stray", "stranger", volume.join("notes.txt")),
        stray("bytes-stray", "stranger", volume.join("bytes/other.img")),
        stray("record-draft", "leftover", volume.join("record.json.new")),
        stray("map-draft", "leftover", snapshot.join("changed.map.compared")),
        stray("checked-map-draft", "leftover", snapshot.join("allocated.map.checked")),
        stray("group-stray", "stranger", group.join("notes.txt")),
        half_made("staging", pool.join("staging/volume-half-made"), "bytes", "bytes/data.img"),
        half_made("empty-group", pool.join("groups/group-empty"), "members", "deleted.json"),
        {
            let data = volume.join("bytes/data.img");
            Box::new(move || {
                let file = fs::File::options().write(true).open(&data).expect("open");
                file.set_len(32 * MIB as u64).expect("grow");
                let undo = Box::new(move || file.set_len(16 * MIB as u64).expect("cut"));
                Case { undo, ..case("long-volume", "note", data.clone()) }
            })
        },
        {
            let data = volume.join("bytes/data.img");
            Box::new(move || {
                let device = LoopDevice::attach(&data, Access::ReadWrite).expect("attach");
                case("device", "leftover", device.path())
            })
        },
        {
            let data = snapshot.join("bytes/data.img");
            Box::new(move || {
                let device = LoopDevice::attach(&data, Access::ReadOnly).expect("attach");
                let path = device.path();
                let undo = Box::new(move || assert!(device.detach().expect("detach")));
                Case { undo, ..case("snapshot-device", "stranger", path) }
            })
        },
    ]
}

#[apply(every_pool)]
async fn what_is_wrong_is_reported_and_only_leftovers_go(pool: PoolKind) {
    let mut scene = Scene::set(pool).await;
    let refused = Command::new(testkit::program("deltapath"))
        .args(["check", "--repair", "--data-dir"])
        .arg(scene.rig.data_dir())
        .output()
        .expect("run deltapath check");
    assert_eq!(refused.status.code(), Some(1));
    assert!(String::from_utf8_lossy(&refused.stderr).contains("stop it first"), "{refused:?}");
    scene.rig.kill();
    let data_dir = scene.rig.data_dir();
    // A comparison that the kill interrupted may leave its file.
    assert_eq!(check(&data_dir, &["--repair"]).exit, 0);
    scene.is_well("after a kill");
    for make in cases(&scene) {
        let Case { name, path, severity, repaired, undo } = make();
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
    scene.rig.kill();
    assert_eq!(check(&scene.rig.data_dir(), &["--repair"]).exit, 0);
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
    let checked = check(&rig.data_dir(), &[]);
    assert_eq!((checked.exit, checked.found), (0, vec![]), "{fstype}");
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
    let checked = check(&rig.data_dir(), &[]);
    assert_eq!((checked.exit, checked.found), (0, vec![]), "{pool:?}");
    testkit::nothing_left(rig.dir.path());
    assert_eq!(names(&rig.data_dir()).contains(&"pool.img".to_owned()), pool != PoolKind::Dir);
}

/// If the data of a volume in use was removed by hand, its last copy is in the device, so the device is not freed.
#[apply(device_test)]
async fn a_device_that_holds_the_last_copy_stays() {
    let mut scene = Scene::set(PoolKind::Dir).await;
    scene.rig.kill();
    assert_eq!(check(&scene.rig.data_dir(), &["--repair"]).exit, 0);
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
