//! Rights: what reads needs none to write, nobody else can read what a repository holds, and what is not the tool's own in
//! its directory is neither looked into nor touched.

use std::os::fd::IntoRawFd;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use files::pattern::Image;

use crate::proxy::Fault;
use crate::s3::Bucket;
use crate::tool::{MIB, Mounted, Place, arg, ended, plant};

const SIZE: u64 = 20 * MIB;
const NOBODY: u32 = 65534;

/// The same command, run by somebody without rights: through a descriptor, since nobody else may be able to reach where it was built.
pub fn by_nobody(command: &Command) -> Command {
    let program = std::fs::File::open(command.get_program()).expect("open the program").into_raw_fd();
    let mut same = Command::new(format!("/proc/self/fd/{program}"));
    same.args(command.get_args()).stdin(Stdio::null()).uid(NOBODY).gid(NOBODY);
    for (name, value) in command.get_envs() {
        match value {
            Some(value) => same.env(name, value),
            None => same.env_remove(name),
        };
    }
    same
}

pub fn set_mode(path: &Path, mode: u32) {
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)).expect("chmod");
}

pub fn walk(dir: &Path) -> Vec<PathBuf> {
    let mut found = vec![dir.to_owned()];
    for entry in dir.read_dir().expect("list") {
        let path = entry.expect("entry").path();
        match path.is_dir() {
            true => found.extend(walk(&path)),
            false => found.push(path),
        }
    }
    found
}

/// A place that others may enter, with a backup of an image.
fn place() -> (Place, String, Image) {
    let (place, id, image) = Place::with_backup(SIZE);
    set_mode(place.dir.path(), 0o777);
    (place, id, image)
}

fn as_nobody(place: &Place, arguments: &[&str]) -> Output {
    by_nobody(&place.command(arguments)).output().expect("run as nobody")
}

/// Every command that reads.
fn readers<'a>(id: &'a str, to: &'a str, image: &'a str, html: &'a str) -> Vec<Vec<&'a str>> {
    vec![
        vec!["list"],
        vec!["show"],
        vec!["show", id, "--html", html],
        vec!["verify"],
        vec!["verify", id, "--against", image],
        vec!["restore", id, "--to", to, "--overwrite"],
        vec!["prune", "--keep-last", "1", "--dry-run"],
    ]
}

#[test]
fn readers_need_no_right_to_write() {
    let (place, id, image) = place();
    let lock = place.repository().join("lock");
    let paths = ["restored", "image", "page.html"].map(|name| place.path(name));
    let [to, device, html] = paths.each_ref().map(|path| arg(path));
    set_mode(&place.image(), 0o644);
    for (what, mode) in
        [("a lock of root's", Some(0o600)), ("a lock for all", Some(0o644)), ("no lock", None)]
    {
        for path in walk(&place.repository()) {
            set_mode(&path, if path.is_dir() { 0o755 } else { 0o644 });
        }
        match mode {
            Some(mode) => set_mode(&lock, mode),
            None => std::fs::remove_file(&lock).expect("remove"),
        }
        let before = walk(&place.repository());
        for arguments in readers(&id, to, device, html) {
            let said = ended(0, &as_nobody(&place, &arguments));
            let warned = said.matches("without a lock").count();
            assert_eq!(warned, usize::from(mode != Some(0o644)), "{what}: {arguments:?}: {said}");
        }
        image.compare(&paths[0], SIZE, &base::Stop::default()).expect("restored");
        assert_eq!(walk(&place.repository()), before, "{what}");
        ended(1, &as_nobody(&place, &["prune", "--keep-last", "1"]));
        std::fs::remove_file(&paths[0]).expect("remove");
    }
}

#[test_with::root]
#[test]
fn a_read_only_mount_can_be_read() {
    let (mut place, _, _) = place();
    let image = place.written(SIZE, 7, 90, 2);
    let id = place.full();
    let mounted = Mounted::at(place.path("mounted"), &["--bind", "-o", "ro", arg(&place.repository())]);
    place.objects_in = mounted.0.clone();
    let paths = ["restored", "image", "page.html"].map(|name| place.path(name));
    let [to, device, html] = paths.each_ref().map(|path| arg(path));
    for arguments in readers(&id, to, device, html) {
        ended(0, &place.run(&arguments));
    }
    image.compare(&paths[0], SIZE, &base::Stop::default()).expect("restored");
    let would = place.ok(&["prune", "--keep-last", "1", "--dry-run"]);
    assert!(would["freed"].as_u64().is_some_and(|bytes| bytes > 90 * 4096), "{would}");
    for arguments in [&["prune", "--keep-last", "1"][..], &["full", "--volume", "v", "--device", device]] {
        let said = place.fails(1, arguments);
        assert!(said.contains("Read-only file system"), "{said}");
    }
}

#[test]
fn keys_that_may_only_read_are_enough_to_read() {
    let mut bucket = Bucket::start();
    let image = bucket.place.written(SIZE, 7, 90, 1);
    let id = bucket.place.full();
    let proxy = bucket.proxy();
    let place = &bucket.place;
    let paths = ["restored", "image", "page.html"].map(|name| place.path(name));
    let [to, device, html] = paths.each_ref().map(|path| arg(path));
    for arguments in readers(&id, to, device, html) {
        proxy.next("PUT", "/locks/", Fault::Refuse(403));
        let said = ended(0, &place.run(&arguments));
        assert_eq!(said.matches("without a lock").count(), 1, "{arguments:?}: {said}");
    }
    image.compare(&paths[0], SIZE, &base::Stop::default()).expect("restored");
    // A server that takes no writes may say it in any way.
    for code in [400, 405] {
        proxy.next("PUT", "/locks/", Fault::Refuse(code));
        let said = ended(0, &place.run(&["list"]));
        assert_eq!(said.matches("without a lock").count(), 1, "{code}: {said}");
    }
    // Not so where it is not known who else is there.
    proxy.next("GET", "prefix%2Flocks", Fault::Refuse(400));
    assert!(place.fails(1, &["list"]).contains("list"));
    for arguments in [&["prune", "--keep-last", "1"][..], &["full", "--volume", "v", "--device", device]] {
        proxy.next("PUT", "/locks/", Fault::Refuse(403));
        let said = place.fails(1, arguments);
        assert!(said.contains("locks/"), "{said}");
    }
}

#[test]
fn nobody_else_reads_a_repository() {
    let place = Place::new();
    place.written(SIZE, 7, 5000, 1);
    let mut command = Command::new("sh");
    let program = place.backup("full", &[]);
    command.args(["-c", "umask 022; exec \"$@\"", "sh"]).arg(program.get_program()).args(program.get_args());
    assert!(command.status().expect("run").success());
    for path in walk(&place.repository()) {
        let mode = path.metadata().expect("there").mode() & 0o777;
        assert_eq!(mode, if path.is_dir() { 0o700 } else { 0o600 }, "{}", path.display());
    }
}

/// The root of an ext4 has a directory that only root may list.
#[test]
fn what_is_not_the_tools_own_is_left_alone() {
    let place = Place::new();
    set_mode(place.dir.path(), 0o755);
    let mut image = place.written(SIZE, 7, 90, 1);
    set_mode(&place.image(), 0o644);
    std::fs::create_dir(place.repository()).expect("mkdir");
    std::os::unix::fs::chown(place.repository(), Some(NOBODY), Some(NOBODY)).expect("chown");
    // So do those of the disks on which its directories may lie.
    for dir in ["", "packs", "backups", "partial", "damaged"] {
        let dir = place.repository().join(dir);
        std::fs::create_dir_all(dir.join("lost+found")).expect("mkdir");
        std::os::unix::fs::chown(&dir, Some(NOBODY), Some(NOBODY)).expect("chown");
        set_mode(&dir.join("lost+found"), 0o700);
    }
    for round in 0..2 {
        image.write(&place.open_image(SIZE), 7 + round, 90, round).expect("write");
        ended(0, &by_nobody(&place.backup("full", &[])).output().expect("run as nobody"));
    }
    // A user's files, one of which looks like a draft of an object.
    let own = ["note#1", "lost+found/x#1", "mine/x#1"].map(|name| place.repository().join(name));
    for path in &own {
        plant(path, "mine");
    }
    let draft = place.repository().join(format!("packs/ab/{}#1", "ab".repeat(32)));
    plant(&draft, "half");
    std::os::unix::fs::chown(draft.parent().expect("a directory"), Some(NOBODY), Some(NOBODY))
        .expect("chown");
    let pruned = as_nobody(&place, &["prune", "--keep-last", "1", "--output", "json"]);
    ended(0, &pruned);
    let pruned: serde_json::Value = serde_json::from_slice(&pruned.stdout).expect("JSON");
    assert!(pruned["freed"].as_u64().is_some_and(|bytes| bytes > 90 * 4096), "{pruned}");
    assert!(!draft.exists());
    assert!(own.iter().all(|path| path.exists()));
    place.restores("latest", &image, SIZE);
}

/// What cannot be listed is found before anything is removed.
#[test]
fn a_prune_that_cannot_look_removes_nothing() {
    let (place, first, _) = place();
    place.full();
    for path in walk(&place.repository()) {
        std::os::unix::fs::chown(&path, Some(NOBODY), Some(NOBODY)).expect("chown");
    }
    let foreign = place.repository().join("packs/00");
    std::fs::create_dir_all(&foreign).expect("mkdir");
    std::os::unix::fs::chown(&foreign, Some(0), Some(0)).expect("chown");
    set_mode(&foreign, 0o700);
    let said = ended(1, &as_nobody(&place, &["prune", "--keep-last", "1"]));
    assert!(said.contains("packs"), "{said}");
    assert!(place.list().contains(&first), "its index is gone, and nothing is freed");
}
