//! Restores into files: never another's bytes under the name that was asked for, and nothing of a user's is lost.

use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::Output;

use files::pattern::Image;
use nix::sys::signal::Signal;
use testkit::until;

use crate::tool::{MIB, Place, Running, arg, ended};

const SIZE: u64 = 150 * MIB;

/// A repository with two backups, and what they hold.
struct World {
    place: Place,
    backups: [(String, Image); 2],
}

impl World {
    fn new(blocks: u64) -> Self {
        let place = Place::new();
        let file = place.open_image(SIZE);
        let backups = [1, 2].map(|seed| {
            let mut image = Image::default();
            image.write(&file, 10, blocks, seed).expect("write");
            (place.full(), image)
        });
        World { place, backups }
    }

    fn to(&self) -> PathBuf {
        self.place.path("r.img")
    }

    /// Begins a restore, and stops it as soon as it has written something.
    fn stopped(&self, backup: usize, more: &[&str]) -> Running {
        let before = self.drafts();
        let to = self.to();
        let fixed = ["restore", &self.backups[backup].0, "--to", arg(&to), "--in-flight", "1"];
        let running = Running::start(self.place.command(&[&fixed[..], more].concat()));
        let is_begun = |draft: &PathBuf| {
            draft.metadata().is_ok_and(|of| {
                of.blocks() > 0 && !before.iter().any(|(path, inode)| path == draft && *inode == of.ino())
            })
        };
        until("there is a draft", || self.drafts().iter().any(|(path, _)| is_begun(path)));
        running.signal(Signal::SIGSTOP);
        running
    }

    /// What lies beside the file that a restore makes.
    fn drafts(&self) -> Vec<(PathBuf, u64)> {
        let entries =
            self.place.dir.path().read_dir().expect("list").map(|entry| entry.expect("entry").path());
        let drafts = entries.filter(|path| path.to_string_lossy().contains(".restoring"));
        drafts.filter_map(|path| path.metadata().ok().map(|of| (path, of.ino()))).collect()
    }

    fn holds(&self, path: &Path, backup: usize) {
        self.backups[backup].1.compare(path, SIZE, &base::Stop::default()).expect("the backup");
    }
}

fn go_on(running: Running) -> Output {
    running.signal(Signal::SIGCONT);
    running.output()
}

#[test]
fn of_two_restores_to_one_path_each_has_its_own_bytes() {
    let world = World::new(20000);
    let one = world.stopped(0, &["--overwrite"]);
    let other = world.stopped(1, &["--overwrite"]);
    ended(0, &go_on(one));
    world.holds(&world.to(), 0);
    ended(0, &go_on(other));
    world.holds(&world.to(), 1);
    assert_eq!(world.drafts(), []);
    // Without --overwrite the one that comes second finds a file.
    std::fs::remove_file(world.to()).expect("remove");
    let (one, other) = (world.stopped(0, &[]), world.stopped(1, &[]));
    ended(0, &go_on(other));
    let said = ended(1, &go_on(one));
    assert!(said.contains("add --overwrite"), "{said}");
    world.holds(&world.to(), 1);
    assert_eq!(world.drafts(), []);
}

#[test]
fn leftovers_of_killed_restores_go_and_files_of_users_stay() {
    let world = World::new(20000);
    let (place, to) = (&world.place, world.to());
    let own = [".r.img.restoring", "r.img.restoring", ".r.img.0123456789abcdef.mine", "r.img.new"]
        .map(|name| place.path(name));
    for path in &own {
        std::fs::write(path, "mine").expect("write");
    }
    let killed = world.stopped(0, &[]);
    drop(killed);
    assert_eq!(world.drafts().len(), 3, "what the killed one left: {:?}", world.drafts());
    place.ok(&["restore", &world.backups[1].0, "--to", arg(&to)]);
    world.holds(&to, 1);
    assert_eq!(world.drafts().len(), 2, "{:?}", world.drafts());
    let html = place.path("r.img.html");
    let beside = place.path("r.img.html.new");
    std::fs::write(&beside, "mine").expect("write");
    place.ok(&["show", "--html", arg(&html)]);
    for path in own.iter().chain([&beside]) {
        assert_eq!(std::fs::read_to_string(path).expect("a user's file"), "mine", "{}", path.display());
    }
    assert!(html.metadata().expect("a page").permissions().mode() & 0o444 == 0o444);
}

/// Onto a file as onto a device: one writes at a time.
#[test]
fn two_restores_do_not_write_to_one_file() {
    let world = World::new(20000);
    let (place, to) = (&world.place, world.to());
    let [(one, _), (other, _)] = &world.backups;
    place.ok(&["restore", one, "--to", arg(&to)]);
    let onto = ["restore", other, "--to", arg(&to), "--onto-base", one, "--in-flight", "1"];
    let before = to.metadata().expect("there").mtime_nsec();
    let first = Running::start(place.command(&onto));
    until("it writes", || to.metadata().expect("there").mtime_nsec() != before);
    first.signal(Signal::SIGSTOP);
    let said = place.fails(1, &onto);
    assert!(said.contains("another"), "{said}");
    let said = place.fails(1, &["verify", other, "--against", arg(&to)]);
    assert!(said.contains("another"), "{said}");
    // The first one would end well, and the file would hold what this one has put in its place.
    let said = place.fails(1, &["restore", one, "--to", arg(&to), "--overwrite"]);
    assert!(said.contains("another"), "{said}");
    assert_eq!(go_on(first).status.code(), Some(0));
    world.holds(&to, 1);
}

/// The incident: the file held another backup, and afterwards a mixture of both, with exit code 0.
#[test]
fn what_does_not_hold_the_base_is_not_written_onto() {
    let world = World::new(20000);
    let (place, to) = (&world.place, world.to());
    let [(one, _), (other, _)] = &world.backups;
    let onto = ["restore", other, "--to", arg(&to), "--onto-base", one];
    // The same command again, also where the one before was killed halfway.
    place.ok(&["restore", other, "--to", arg(&to)]);
    place.ok(&onto);
    let whole = std::fs::read(&to).expect("read");
    place.ok(&["restore", one, "--to", arg(&to), "--overwrite"]);
    let file = std::fs::File::options().write(true).open(&to).expect("open");
    file.write_all_at(&whole[..whole.len() / 2], 0).expect("write");
    place.ok(&onto);
    world.holds(&to, 1);
    // Neither of both.
    file.set_len(0).and_then(|()| file.set_len(SIZE)).expect("cut");
    let said = place.fails(1, &onto);
    assert!(said.contains("does not hold backup") && said.contains(one), "{said}");
    assert_eq!(to.metadata().expect("there").blocks(), 0);
    place.ok(&["restore", one, "--to", arg(&to), "--overwrite"]);
    place.ok(&onto);
    world.holds(&to, 1);
}

#[test]
fn overwriting_keeps_the_link_the_mode_and_the_owner() {
    let world = World::new(20);
    let (place, to) = (&world.place, world.to());
    let inside = place.path("inside");
    std::fs::create_dir(&inside).expect("mkdir");
    let target = inside.join("target.img");
    std::fs::write(&target, "old").expect("write");
    std::fs::set_permissions(&target, std::fs::Permissions::from_mode(0o640)).expect("chmod");
    std::os::unix::fs::chown(&target, Some(1234), Some(4321)).expect("chown");
    symlink("inside/target.img", &to).expect("symlink");
    place.ok(&["restore", &world.backups[0].0, "--to", arg(&to), "--overwrite"]);
    assert_eq!(std::fs::read_link(&to).expect("still a link"), Path::new("inside/target.img"));
    world.holds(&target, 0);
    let of = target.metadata().expect("there");
    assert_eq!((of.mode() & 0o7777, of.uid(), of.gid()), (0o640, 1234, 4321));
    // A link to what is not there yet.
    std::fs::remove_file(&target).expect("remove");
    place.ok(&["restore", &world.backups[1].0, "--to", arg(&to)]);
    world.holds(&target, 1);
    assert!(to.symlink_metadata().expect("there").is_symlink());
}
