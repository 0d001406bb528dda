//! `--resume` goes on with the same data or not at all, and an image that changes while it is read makes no backup.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;

use files::pattern::Image;
use nix::sys::signal::Signal;
use serde_json::Value;

use crate::driver::Driver;
use crate::locks::packs;
use crate::proxy::Fault;
use crate::s3::Bucket;
use crate::tool::{BLOCK, Loop, MIB, Place, Running, arg, ended, id};

const SIZE: u64 = 500 * MIB;

/// Three segments with 8 MB each.
fn write(path: &Path, seed: u64) -> Image {
    let file = File::create(path).expect("create");
    file.set_len(SIZE).expect("set the length");
    write_to(&file, seed)
}

fn write_to(file: &File, seed: u64) -> Image {
    let mut image = Image::default();
    for segment in 0..3 {
        image.write(file, segment * 128 * MIB / BLOCK + 50, 2000, seed + segment).expect("write");
    }
    image
}

fn writable(path: &Path) -> File {
    File::options().write(true).open(path).expect("open")
}

/// A backup of `device` in `dir` that is ended after its first segment.
fn is_interrupted(place: &Place, dir: &Path, arguments: &[&str], signal: Signal) {
    is_interrupted_at("6Mi", place, dir, arguments, signal);
}

fn is_interrupted_at(rate: &str, place: &Place, dir: &Path, arguments: &[&str], signal: Signal) {
    let mut command = place.command(&[arguments, &["--limit-rate", rate]].concat());
    command.current_dir(dir);
    place.interrupt(Running::start(command), signal);
    assert_eq!(place.list(), [""; 0]);
}

fn goes_on(place: &Place, dir: &Path, arguments: &[&str]) -> (Value, String) {
    let mut command = place.command(&[arguments, &["--resume", "--output", "json"]].concat());
    let output = command.current_dir(dir).output().expect("run");
    let said = ended(0, &output);
    (serde_json::from_slice(&output.stdout).expect("JSON"), said)
}

const C_IMG: [&str; 5] = ["full", "--volume", "v", "--device", "c.img"];

/// What is done between the interruption and the next try, and whether that goes on.
#[test]
fn resume_takes_no_other_image_for_its_own() {
    type Between = fn(&Place) -> u64;
    let cases: [(&str, Between, bool); 5] = [
        ("nothing", |_| 1, true),
        (
            "another directory",
            |place| {
                std::fs::rename(place.path("a"), place.path("b")).expect("rename");
                std::fs::create_dir(place.path("a")).expect("mkdir");
                write(&place.path("a/c.img"), 7);
                7
            },
            false,
        ),
        (
            "the same name",
            |place| {
                std::fs::rename(place.path("a/c.img"), place.path("a/d.img")).expect("rename");
                write(&place.path("a/c.img"), 7);
                7
            },
            false,
        ),
        (
            "written in place",
            |place| {
                write_to(&writable(&place.path("a/c.img")), 7);
                7
            },
            false,
        ),
        (
            "another in its place, with the old times",
            |place| {
                let times = place.path("a/c.img").metadata().expect("there");
                let times = std::fs::FileTimes::new().set_modified(times.modified().expect("a time"));
                write(&place.path("a/c.img"), 7);
                writable(&place.path("a/c.img")).set_times(times).expect("set the times");
                7
            },
            false,
        ),
    ];
    for (what, between, is_same) in cases {
        let place = Place::new();
        let dir = place.path("a");
        std::fs::create_dir(&dir).expect("mkdir");
        write(&dir.join("c.img"), 1);
        is_interrupted(&place, &dir, &C_IMG, Signal::SIGINT);
        let seed = between(&place);
        let (made, said) = goes_on(&place, &dir, &C_IMG);
        let model = write(&place.path("model"), seed);
        place.restores(&id(&made), &model, SIZE);
        let read = made["read"].as_u64().expect("a number");
        assert_eq!(read < 6000 * BLOCK, is_same, "{what}: {read} read, and said {said}");
        assert!(is_same || said.contains("is not resumed"), "{what}: {said}");
        assert_eq!(place.partials(), 0, "{what}");
        // But for a part of one segment, what was stored before is in use.
        let verified = place.ok(&["verify"]);
        let unused = verified["unused"].as_u64().expect("a number");
        assert!(!is_same || unused < 2100 * BLOCK, "{what}: {verified}");
    }
}

/// From another directory, by another name for the same file.
#[test]
fn resume_knows_an_image_by_more_than_its_name() {
    let place = Place::new();
    let dir = place.path("a");
    std::fs::create_dir(&dir).expect("mkdir");
    let model = write(&dir.join("c.img"), 1);
    is_interrupted(&place, &dir, &C_IMG, Signal::SIGINT);
    let path = dir.join("c.img");
    let (made, _) = goes_on(&place, place.dir.path(), &["full", "--volume", "v", "--device", arg(&path)]);
    assert!(made["read"].as_u64().expect("a number") < 6000 * BLOCK, "{made}");
    place.restores(&id(&made), &model, SIZE);
}

/// Its name may mean another one after a restart, and no sample shows that.
#[test_with::root]
#[test]
fn resume_knows_a_block_device_by_more_than_its_name() {
    for is_same in [true, false] {
        let place = Place::new();
        let mut model = write(&place.path("a.img"), 1);
        let device = Loop::of(&place.path("a.img"));
        let name = place.path("c.img");
        std::os::unix::fs::symlink(&device.0, &name).expect("symlink");
        // It has no holes that show: all of it is read.
        is_interrupted_at("100Mi", &place, place.dir.path(), &C_IMG, Signal::SIGINT);
        let other = (!is_same).then(|| {
            write(&place.path("b.img"), 1);
            // A block that is no sample.
            model.write(&writable(&place.path("b.img")), 50 + 300, 1, 99).expect("write");
            std::fs::remove_file(&name).expect("remove");
            let other = Loop::of(&place.path("b.img"));
            std::os::unix::fs::symlink(&other.0, &name).expect("symlink");
            other
        });
        let (made, said) = goes_on(&place, place.dir.path(), &C_IMG);
        let read = made["read"].as_u64().expect("a number");
        assert_eq!(
            (read < SIZE, said.contains("is not resumed")),
            (is_same, !is_same),
            "{read} read, and said {said}"
        );
        place.restores(&id(&made), &model, SIZE);
        drop(other);
    }
}

/// Nobody but the person who typed the handle says that the image holds that snapshot.
#[test]
fn a_handle_without_a_driver_proves_nothing() {
    let place = Place::new();
    let mut model = write(&place.path("c.img"), 1);
    let arguments = [&C_IMG[..], &["--snapshot", "s"]].concat();
    is_interrupted(&place, place.dir.path(), &arguments, Signal::SIGINT);
    // A block that is no sample.
    let file = writable(&place.path("c.img"));
    model.write(&file, 50 + 300, 1, 99).expect("write");
    let (made, said) = goes_on(&place, place.dir.path(), &arguments);
    assert!(said.contains("is not resumed"), "{said}");
    place.restores(&id(&made), &model, SIZE);

    // Nor is what was stored before a driver is asked.
    let place = Place::new();
    let mut model = write(&place.path("c.img"), 1);
    is_interrupted(&place, place.dir.path(), &arguments, Signal::SIGINT);
    let file = writable(&place.path("c.img"));
    model.write(&file, 50 + 300, 1, 99).expect("write");
    let driver = Driver::start(&place.path("csi.sock"));
    driver.snapshot("s", &model, SIZE);
    let endpoint = driver.endpoint();
    let (made, said) =
        goes_on(&place, place.dir.path(), &[&arguments[..], &["--endpoint", &endpoint]].concat());
    assert!(said.contains("is not resumed"), "{said}");
    place.restores(&id(&made), &model, SIZE);
}

/// The handle is the same, and the device is of another volume.
#[test]
fn resume_looks_into_the_device() {
    let (place, driver) = Driver::anew();
    let model = write(&place.path("c.img"), 1);
    driver.snapshot("one", &model, SIZE);
    let endpoint = driver.endpoint();
    let arguments = [&C_IMG[..], &["--endpoint", &endpoint, "--snapshot", "one"]].concat();
    is_interrupted(&place, place.dir.path(), &arguments, Signal::SIGINT);
    let other = write(&place.path("c.img"), 7);
    let (made, said) = goes_on(&place, place.dir.path(), &arguments);
    assert!(said.contains("is not resumed"), "{said}");
    place.restores(&id(&made), &other, SIZE);
}

/// Out of memory, a drained node: no signal that it can answer.
#[test]
fn a_killed_backup_goes_on_too() {
    let place = Place::new();
    let model = write(&place.path("c.img"), 1);
    is_interrupted(&place, place.dir.path(), &C_IMG, Signal::SIGKILL);
    let (made, said) = goes_on(&place, place.dir.path(), &C_IMG);
    assert!(made["read"].as_u64().expect("a number") < 6000 * BLOCK, "{made}: {said}");
    place.restores(&id(&made), &model, SIZE);
    assert_eq!(place.partials(), 0);
    place.ok(&["verify"]);
}

#[test]
fn an_image_that_changes_while_it_is_read_makes_no_backup() {
    let place = Place::new();
    write(&place.path("c.img"), 1);
    let mut command = place.command(&[&C_IMG[..], &["--limit-rate", "4Mi"]].concat());
    command.current_dir(place.dir.path());
    let running = Running::start(command);
    testkit::until("a pack", || packs(&place) > 0);
    let file = writable(&place.path("c.img"));
    file.write_all_at(b"changed", 300 * MIB).expect("write");
    let said = ended(1, &running.output());
    assert!(said.contains("changed while it was read"), "{said}");
    assert_eq!(place.list(), [""; 0]);
    assert_eq!(place.partials(), 0, "what was read is of no use");
}

/// Nor is it equal to one, whatever the bytes were that were read.
#[test]
fn an_image_that_changes_while_it_is_compared_is_not_equal() {
    let (place, ..) = Place::with_backup(2 * MIB);
    let (file, is_over) = (writable(&place.image()), std::sync::atomic::AtomicBool::new(false));
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !is_over.load(std::sync::atomic::Ordering::Relaxed) {
                file.write_all_at(&[0], 2 * MIB - 1).expect("write");
            }
        });
        let compared = place.run(&["verify", "latest", "--against", arg(&place.image())]);
        is_over.store(true, std::sync::atomic::Ordering::Relaxed);
        let said = ended(1, &compared);
        assert!(said.contains("changed while it was read"), "{said}");
    });
}

/// Two answers about one delta: the second does not list what is done.
#[test]
fn what_is_done_and_not_listed_again_is_kept_once() {
    let (place, driver) = Driver::anew();
    let path = place.path("c.img");
    let endpoint = driver.endpoint();
    let of = |handle| -> Vec<&str> {
        ["--volume", "v", "--device", arg(&path), "--endpoint", &endpoint, "--snapshot", handle].into()
    };
    let before = write(&path, 1);
    driver.snapshot("one", &before, SIZE);
    place.ok(&[&["full"][..], &of("one")].concat());
    let image = write_to(&writable(&path), 7);
    driver.snapshot("two", &image, SIZE);
    let incremental = [&["incremental"][..], &of("two")].concat();
    let running = Running::start(place.command(&[&incremental[..], &["--limit-rate", "6Mi"]].concat()));
    place.interrupt(running, Signal::SIGINT);
    let aside = File::create(place.path("aside")).expect("create");
    let mut other = before;
    for segment in 1..3 {
        other.write(&aside, segment * 128 * MIB / BLOCK + 50, 2000, 7 + segment).expect("write");
    }
    driver.snapshot("two", &other, SIZE);
    let (made, _) = goes_on(&place, place.dir.path(), &incremental);
    // The first segment is that of the first answer: without what was done it would be as before.
    place.restores(&id(&made), &image, SIZE);
    place.ok(&["verify"]);
}

/// All is stored but for the index.
#[test]
fn what_could_not_be_named_in_the_end_goes_on() {
    let mut bucket = Bucket::start();
    let driver = Driver::start(&bucket.place.path("csi.sock"));
    let proxy = bucket.proxy();
    let place = &bucket.place;
    let path = place.path("c.img");
    let endpoint = driver.endpoint();
    let of = |handle| -> Vec<&str> {
        ["auto", "--volume", "v", "--device", arg(&path), "--endpoint", &endpoint, "--snapshot", handle]
            .into()
    };
    let mut image = write(&path, 1);
    driver.snapshot("one", &image, SIZE);
    place.ok(&of("one"));
    image.write(&writable(&path), 50, 9, 7).expect("write");
    driver.snapshot("two", &image, SIZE);
    proxy.next("PUT", "/backups/", Fault::Refuse(403));
    place.fails(1, &of("two"));
    assert_eq!(place.partials(), 1);
    let (made, _) = goes_on(place, place.dir.path(), &of("two"));
    assert_eq!((made["kind"].as_str(), made["read"].as_u64()), (Some("incremental"), Some(0)), "{made}");
    place.restores(&id(&made), &image, SIZE);
    place.ok(&["verify"]);
}
