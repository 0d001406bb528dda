//! Locks in a bucket that are lost: by a process that stood still, by a network that was away, by somebody who removed them.
//! Nothing is made then that names what another has removed, and nothing is removed that another needs.

use std::path::PathBuf;
use std::time::Duration;

use files::pattern::Image;
use nix::sys::signal::Signal;
use testkit::until;

use crate::proxy::{Fault, Proxy};
use crate::s3::Bucket;
use crate::tool::{MIB, Place, Running, arg, ended, id, json, plant, text};

const SIZE: u64 = 200 * MIB;
/// A lock that was not written for so many seconds is of a process that is gone.
const LIFE: u64 = 16;
const LOST: &str = "the lock on the repository is lost";

/// A bucket, and an image in which two packs and a half are.
fn bucket() -> (Bucket, Image) {
    let bucket = Bucket::start();
    let image = bucket.place.written(SIZE, 100, 10000, 1);
    (bucket, image)
}

/// The same with short locks. A holder gives one up that it could not renew for half of its life, so only those have it who
/// wait for its end: on a busy machine eight seconds may pass like that.
fn with_short_locks() -> (Bucket, Image) {
    let (mut bucket, image) = bucket();
    bucket.place.environment.push(("CBT_BACKUP_TEST_LOCK_SECONDS", LIFE.to_string()));
    (bucket, image)
}

/// A backup of ten seconds.
fn slow_backup(place: &Place) -> Running {
    Running::start(place.backup("full", &["--limit-rate", "4Mi"]))
}

/// How many packs a repository has, while others come and go.
pub fn packs(place: &Place) -> usize {
    let list = |path: PathBuf| path.read_dir().into_iter().flatten().flatten();
    let names = list(place.repository().join("packs")).flat_map(|dir| list(dir.path()));
    // A file that is being written has another kind of name.
    names.filter(|pack| pack.file_name().len() == 64).count()
}

#[test]
fn a_backup_that_stood_still_while_a_prune_swept_is_none() {
    let (bucket, image) = with_short_locks();
    let place = &bucket.place;
    let backup = slow_backup(place);
    until("a pack", || packs(place) > 0);
    backup.signal(Signal::SIGSTOP);
    std::thread::sleep(Duration::from_secs(LIFE + 1));
    let pruned = place.ok(&["prune"]);
    assert!(pruned["freed"].as_u64().is_some_and(|bytes| bytes > 16_000_000), "{pruned}");
    backup.signal(Signal::SIGCONT);
    let said = ended(1, &backup.output());
    assert!(said.contains(LOST) && !said.contains("interrupted"), "{said}");
    assert_eq!(place.list(), [""; 0]);
    // Whatever it has left of use, the next one is whole.
    let made = json(0, place.backup("full", &["--resume"]));
    place.ok(&["verify"]);
    place.restores(&id(&made), &image, SIZE);
    place.ok(&["prune"]);
    assert!(bucket.locks().is_empty(), "a lock is left");
}

#[test]
fn a_lock_that_is_removed_is_not_made_anew() {
    let (bucket, _) = with_short_locks();
    let place = &bucket.place;
    let backup = slow_backup(place);
    until("a pack", || packs(place) > 0);
    std::fs::remove_file(&bucket.locks()[0]).expect("remove");
    let said = ended(1, &backup.output());
    assert!(said.contains(LOST) && said.contains("has removed"), "{said}");
    assert_eq!(place.list(), [""; 0]);
    assert!(bucket.locks().is_empty(), "it has come back");
}

/// The prune knows what is needed and asks which packs there are when its network goes away.
#[test]
fn a_prune_that_lost_its_lock_sweeps_nothing_of_a_new_backup() {
    let (bucket, image) = with_short_locks();
    let place = &bucket.place;
    place.full();
    let proxy = Proxy::start(bucket.port);
    proxy.next("GET", "prefix%2Fpacks", Fault::Hold);
    let mut command = place.command(&["prune"]);
    command.env("AWS_ENDPOINT", format!("http://127.0.0.1:{}", proxy.port));
    let prune = Running::start(command);
    proxy.wait_held();
    std::thread::sleep(Duration::from_secs(LIFE + 1));
    let before = packs(place);
    let backup = slow_backup(place);
    until("a new pack", || packs(place) > before);
    proxy.open();
    let pruned = prune.output();
    ended(0, &backup.output());
    place.ok(&["verify"]);
    for id in place.list() {
        place.restores(&id, &image, SIZE);
    }
    let said = ended(1, &pruned);
    assert!(said.contains(LOST), "{said}");
}

#[test]
fn a_prune_waits_where_it_is_told_to() {
    let (bucket, _) = bucket();
    for place in [Place::new(), bucket.place] {
        place.written(SIZE, 100, 10000, 1);
        place.full();
        let before = packs(&place);
        let mut backup = slow_backup(&place);
        until("a new pack", || packs(&place) > before);
        // It keeps its lock for as long as this takes.
        backup.signal(Signal::SIGSTOP);
        let waits = Running::start(place.command(&["prune", "--wait", "300"]));
        let mut impatient = Running::start(place.command(&["prune", "--wait", "60"]));
        testkit::until_caught(impatient.0.id());
        std::thread::sleep(Duration::from_secs(1));
        impatient.signal(Signal::SIGINT);
        assert_eq!(impatient.ends_within(Duration::from_secs(30)), Some(130));
        assert!(place.fails(1, &["prune", "--wait", "1"]).contains("--wait AGE"));
        assert!(backup.0.try_wait().expect("wait").is_none(), "the backup was over before");
        backup.signal(Signal::SIGCONT);
        let said = ended(0, &waits.output());
        assert!(said.contains("waiting at most 300 s"), "{said}");
        assert_eq!(backup.output().status.code(), Some(0));
        assert_eq!(place.list().len(), 2);
    }
}

#[test]
fn a_backup_whose_last_answers_are_lost_is_one() {
    let (mut bucket, image) = bucket();
    let proxy = bucket.proxy();
    let place = &bucket.place;
    // By then it has an id.
    proxy.next("PUT", "/packs/", Fault::Hold);
    let backup = Running::start(place.backup("full", &[]));
    proxy.wait_held();
    proxy.next("PUT", "/backups/", Fault::LoseAnswer);
    proxy.next("GET", "prefix%2Fpartial", Fault::Refuse(403));
    proxy.open();
    let said = ended(0, &backup.output());
    assert!(said.contains("stays until a prune"), "{said}");
    place.restores(&place.list()[0], &image, SIZE);
}

/// A pack of 16 MiB takes more than half a minute there.
#[test]
fn a_slow_line_is_no_dead_one() {
    let (mut bucket, image) = bucket();
    bucket.proxy().limit(450 << 10);
    let backup = bucket.place.full();
    bucket.place.restores(&backup, &image, SIZE);
}

/// The server takes the request and does not answer.
#[test]
fn a_signal_ends_what_waits_for_a_server() {
    let (mut bucket, _) = bucket();
    let backup = bucket.place.full();
    let proxy = bucket.proxy();
    let place = &bucket.place;
    let to = place.path("restored");
    for (part, arguments) in [
        ("prefix/repository", vec!["list"]),
        ("prefix%2Fbackups", vec!["verify"]),
        ("/backups/", vec!["show"]),
        ("/packs/", vec!["restore", &backup, "--to", arg(&to)]),
    ] {
        proxy.next("GET", part, Fault::Hold);
        let mut running = Running::start(place.command(&arguments));
        proxy.wait_held();
        running.signal(Signal::SIGTERM);
        // The lock is removed over the same line.
        std::thread::sleep(Duration::from_secs(2));
        proxy.open();
        assert_eq!(running.ends_within(Duration::from_secs(5)), Some(130), "{arguments:?}");
        assert!(!to.exists() && bucket.locks().is_empty(), "{arguments:?}");
    }
}

/// The same in a directory, where it is a file.
#[test]
fn a_lock_file_that_is_removed_keeps_nobody_out() {
    let place = Place::new();
    let image = place.written(SIZE, 100, 6000, 1);
    let backup = Running::start(place.backup("full", &["--limit-rate", "8Mi"]));
    until("a pack", || packs(&place) > 0);
    std::fs::remove_file(place.repository().join("lock")).expect("remove");
    let pruned = place.ok(&["prune"]);
    let said = ended(1, &backup.output());
    assert!(said.contains(LOST) && said.contains("has removed"), "{said}, after {pruned}");
    assert_eq!(place.list(), [""; 0]);
    let made = json(0, place.backup("full", &["--resume"]));
    place.ok(&["verify"]);
    place.restores(&id(&made), &image, SIZE);
}

/// Another lock is in the way, and the server does not say whether it still is.
#[test]
fn a_signal_ends_the_wait_for_another_lock() {
    let mut bucket = bucket().0;
    bucket.place.full();
    let holder = r#"{"mode":"Shared","command":"a\u001b[2Jb","host":"c\nd","pid":1}"#;
    plant(&bucket.place.repository().join("locks/0123456789abcdef"), holder);
    let proxy = bucket.proxy();
    proxy.next("HEAD", "/locks/", Fault::Hold);
    let mut prune = Running::start(bucket.place.command(&["prune", "--wait", "300"]));
    proxy.wait_held();
    prune.signal(Signal::SIGTERM);
    let code = prune.ends_within(Duration::from_secs(10));
    proxy.open();
    let said = text(&prune.output().stderr);
    assert_eq!(code, Some(130), "{said}");
    assert!(said.contains("cbt-backup a\\u{1b}[2Jb (process 1 on c\\nd)"), "{said:?}");
}
