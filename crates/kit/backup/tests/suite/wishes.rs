//! Which kind of backup comes of what was asked for, and of what the driver and the repository say.

use std::os::unix::net::UnixListener;

use files::pattern::Image;
use nix::sys::signal::Signal;

use crate::driver::{Driver, Fault};
use crate::tool::{MIB, Place, Running, arg, ended, id};

const SIZE: u64 = 200 * MIB;

/// A repository with a full backup of the snapshot `one`, and a driver that has `two` as well, which the image holds.
struct World {
    place: Place,
    driver: Driver,
    image: Image,
}

impl World {
    fn new() -> Self {
        let (place, driver) = Driver::anew();
        let mut image = place.written(SIZE, 100, 3000, 1);
        driver.snapshot("one", &image, SIZE);
        driver.back_up(&place, "full", "one");
        let file = place.open_image(SIZE);
        image.write(&file, 200, 2000, 2).expect("write");
        // A second segment, so that the first one can be done when it is interrupted.
        image.write(&file, 128 * MIB / 4096 + 7, 3000, 2).expect("write");
        driver.snapshot("two", &image, SIZE);
        World { place, driver, image }
    }

    fn back_up<'a>(&self, wish: &'a str, snapshot: &'a str, more: &[&'a str]) -> Vec<&'a str> {
        let leak = |text: String| -> &'static str { Box::leak(text.into_boxed_str()) };
        let device = leak(arg(&self.place.image()).to_owned());
        let endpoint = leak(self.driver.endpoint());
        let fixed = ["--volume", "v", "--device", device, "--endpoint", endpoint, "--snapshot", snapshot];
        [&[wish][..], &fixed, more].concat()
    }
}

/// A claim that was deleted and made anew has the same name, and a volume that is no other's.
#[test]
fn a_volume_that_was_made_anew_is_backed_up_whole() {
    let world = World::new();
    world.driver.script([Fault::OtherVolume]);
    let place = &world.place;
    let said = place.fails(1, &world.back_up("incremental", "two", &[]));
    assert!(said.contains("no incremental backup can be made") && said.contains("created again"), "{said}");
    // A base that the user names is the user's mistake.
    let said = place.fails(1, &world.back_up("auto", "two", &["--base", "one"]));
    assert!(said.contains("different volumes") && !said.contains("full backup"), "{said}");
    let made = place.ok(&world.back_up("auto", "two", &[]));
    assert_eq!(made["kind"], "full");
    let why = made["why"].as_str().expect("a reason");
    assert!(why.contains("created again") && why.contains("different volumes"), "{why}");
    place.restores(&id(&made), &world.image, SIZE);
}

/// Only what changed is read, so the backup of another device was a mixture of both, with exit code 0.
#[test]
fn an_incremental_backup_of_another_device_is_refused() {
    let world = World::new();
    let place = &world.place;
    for (of, blocks) in [("a copy with one other block", 1), ("another disk", 3000)] {
        let mut other = world.image.clone();
        let path = place.path(of);
        std::fs::copy(place.image(), &path).expect("copy");
        let file = std::fs::File::options().write(true).open(&path).expect("open");
        // The first of these blocks is not in the delta.
        other.write(&file, 100, blocks, 3).expect("write");
        for wish in ["incremental", "auto"] {
            let mut arguments = world.back_up(wish, "two", &[]);
            arguments[4] = arg(&path);
            let said = place.fails(1, &arguments);
            assert!(said.contains("it is not the device of that snapshot"), "{of}: {said}");
            assert!(said.contains("holds other data at byte ") && !said.contains("--resume"), "{of}: {said}");
        }
    }
    assert_eq!(place.list().len(), 1);
    assert_eq!(place.repository().join("partial").read_dir().map_or(0, Iterator::count), 0);
    let made = place.ok(&world.back_up("incremental", "two", &[]));
    place.restores(&id(&made), &world.image, SIZE);
}

/// A Job that is tried again finds that its backup was made.
#[test]
fn a_snapshot_that_is_backed_up_already_is_no_failure_of_auto() {
    let world = World::new();
    let place = &world.place;
    let made = place.ok(&world.back_up("auto", "two", &[]));
    let report = place.path("report");
    let said = ended(0, &place.run(&world.back_up("auto", "two", &["--report", arg(&report)])));
    assert!(said.contains(&format!("backed up already, as {}", id(&made))), "{said}");
    let report: serde_json::Value =
        serde_json::from_slice(&std::fs::read(&report).expect("a report")).expect("JSON");
    assert_eq!(report, made);
    assert_eq!(place.list().len(), 2);
    let said = place.fails(1, &world.back_up("incremental", "two", &[]));
    assert!(said.contains("backed up already"), "{said}");
    // One that cannot be restored is none.
    std::fs::remove_file(place.largest()).expect("remove");
    assert_eq!(place.ok(&world.back_up("auto", "two", &[]))["kind"], "full");
}

/// A pod that is killed after its backup is made has one in its place, which resumes.
#[test]
fn a_backup_that_is_made_is_not_made_again_by_resume() {
    let world = World::new();
    let place = &world.place;
    world.is_interrupted();
    let kept = place.copy();
    let made = place.ok(&world.back_up("full", "two", &["--resume"]));
    // It was killed before it had removed what it continued.
    std::fs::rename(kept.repository().join("partial"), place.path("partial")).expect("rename");
    let _ = std::fs::remove_dir(place.repository().join("partial"));
    std::fs::rename(place.path("partial"), place.repository().join("partial")).expect("rename");
    let count = place.list().len();
    let said = ended(0, &place.run(&world.back_up("auto", "two", &["--resume"])));
    assert!(said.contains(&format!("backed up already, as {}", id(&made))), "{said}");
    assert_eq!(place.list().len(), count);
}

impl World {
    /// A full backup of `two` is interrupted after its first segment, which has 12 MB.
    fn is_interrupted(&self) {
        let slow = self.place.command(&self.back_up("full", "two", &["--limit-rate", "4Mi"]));
        self.place.interrupt(Running::start(slow), Signal::SIGINT);
    }
}

#[test]
fn resume_goes_on_with_the_kind_that_is_asked_for() {
    let world = World::new();
    let place = &world.place;
    world.is_interrupted();
    // In a copy, since a backup that is made takes what was interrupted away.
    let made = |wish: &str| {
        let copy = place.copy();
        copy.ok(&world.back_up(wish, "two", &["--resume"]))["kind"].as_str().expect("a kind").to_owned()
    };
    assert_eq!(["full", "auto", "incremental"].map(made), ["full", "full", "incremental"]);
}

#[test]
fn what_was_interrupted_and_is_gone_is_not_gone_on_with() {
    let world = World::new();
    let place = &world.place;
    world.is_interrupted();
    // What a prune would have swept that had never seen it.
    let kept = place.copy();
    std::fs::remove_dir_all(kept.repository().join("partial")).expect("remove");
    kept.ok(&["prune"]);
    std::fs::rename(place.repository().join("partial"), kept.repository().join("partial")).expect("rename");
    let pruned = kept.copy();
    let made = kept.ok(&world.back_up("full", "two", &["--resume"]));
    kept.ok(&["verify"]);
    kept.restores(&id(&made), &world.image, SIZE);
    // Nor does it stand in a prune's way.
    pruned.ok(&["prune"]);
    assert_eq!(pruned.repository().join("partial").read_dir().map_or(0, Iterator::count), 0);
    pruned.ok(&["verify"]);
}

/// The driver takes the connection and says nothing.
#[test]
fn ctrl_c_is_seen_while_a_stream_is_opened() {
    let world = World::new();
    let place = &world.place;
    let socket = place.path("silent.sock");
    let listener = UnixListener::bind(&socket).expect("bind");
    let silent = format!("unix://{}", socket.display());
    let image = place.image();
    let source = ["--volume", "v", "--device", arg(&image), "--endpoint", &silent, "--snapshot", "two"];
    for arguments in [
        [&["full"], &source[..]].concat(),
        [&["incremental"], &source[..]].concat(),
        [&["auto"], &source[..]].concat(),
        vec!["show", "--endpoint", &silent, "--target", "two"],
    ] {
        let mut running = Running::start(place.command(&arguments));
        testkit::until_caught(running.0.id());
        let _connection = listener.accept().expect("accept");
        running.signal(Signal::SIGTERM);
        assert_eq!(running.ends_within(std::time::Duration::from_secs(30)), Some(130), "{arguments:?}");
    }
}

/// `--kubeconfig <(...)` is a FIFO, whose writer may never come. Nor is anything made meanwhile.
#[test]
fn a_signal_is_seen_while_a_kubeconfig_is_read() {
    let place = Place::new();
    let image = place.image();
    place.open_image(MIB);
    let fifo = place.path("kubeconfig");
    nix::unistd::mkfifo(&fifo, nix::sys::stat::Mode::S_IRWXU).expect("mkfifo");
    for arguments in [
        &["full", "--volume", "v", "--device", arg(&image), "--namespace", "n", "--snapshot", "s"][..],
        &["run", "--pvc", "data", "--repository-claim", "backups"],
        &["run", "--pvc", "data", "--clean-up"],
    ] {
        let mut running = Running::start(place.command(&[arguments, &["--kubeconfig", arg(&fifo)]].concat()));
        testkit::until_caught(running.0.id());
        running.signal(Signal::SIGTERM);
        assert_eq!(running.ends_within(std::time::Duration::from_secs(30)), Some(130), "{arguments:?}");
    }
    assert!(!place.repository().exists(), "a repository was made");
}
