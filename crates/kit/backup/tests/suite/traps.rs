//! What a person, or a program that is not this one, leaves in a repository or writes on a command line: nothing is lost by it,
//! nothing hangs, and the message says what to do.

use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::symlink;
use std::path::PathBuf;
use std::time::Duration;

use files::pattern::Image;

use crate::driver::Driver;
use crate::locks::packs;
use crate::proxy::Fault;
use crate::s3::Bucket;
use crate::tool::{Loop, MIB, Place, Running, arg, id, json, plant, text};

const SIZE: u64 = 20 * MIB;

/// The commands end with this exit code and say these words. `@/` is the place.
fn says(place: &Place, code: i32, words: &str, lines: &[&str]) {
    for line in lines {
        let at = |argument: &str| argument.replace("@/", &format!("{}/", place.dir.path().display()));
        let arguments: Vec<String> = line.split(' ').map(at).collect();
        let said = place.fails(code, &arguments.iter().map(String::as_str).collect::<Vec<_>>());
        assert!(said.contains(words), "{line}: {said}, instead of {words}");
    }
}

#[test]
fn a_prune_follows_no_link_out_of_the_repository() {
    let (place, id, image) = Place::with_backup(SIZE);
    let repository = place.repository();
    let outside = place.path("outside");
    std::fs::create_dir_all(outside.join("deep")).expect("mkdir");
    let digits = "ab".repeat(32);
    let own =
        ["thesis.txt", "note#1", "deep/note#1", &digits, &format!("{digits}#1"), &format!("deep/{digits}")];
    let own = own.map(|name| outside.join(name));
    for path in &own {
        std::fs::write(path, "mine").expect("write");
    }
    for name in ["packs/zz", "packs/ab", "partial", "damaged", "backups/zz"] {
        let _ = std::fs::remove_dir(repository.join(name));
        symlink(&outside, repository.join(name)).expect("symlink");
    }
    for dry in [&["--dry-run"][..], &[]] {
        place.ok(&[&["prune", "--keep-last", "1"], dry].concat());
    }
    place.ok(&["verify"]);
    place.restores(&id, &image, SIZE);
    for path in &own {
        assert_eq!(std::fs::read_to_string(path).unwrap_or_default(), "mine", "{}", path.display());
    }
    // The directories at the top may be on another disk.
    for name in ["packs", "backups"] {
        std::fs::rename(repository.join(name), place.path(name)).expect("rename");
        symlink(place.path(name), repository.join(name)).expect("symlink");
    }
    image_is_backed_up_again(&place, &image);
    // Nothing is read or written through the others either.
    let linked = place.path("packs").read_dir().expect("list").map(|entry| entry.expect("entry").path());
    let linked = linked.filter(|dir| !dir.is_symlink()).collect::<Vec<_>>();
    for dir in linked {
        let aside = place.path("aside").join(dir.file_name().expect("a name"));
        std::fs::create_dir_all(place.path("aside")).expect("mkdir");
        std::fs::rename(&dir, &aside).expect("rename");
        symlink(&aside, &dir).expect("symlink");
    }
    says(&place, 1, "is a symbolic link", &["verify", "restore latest --to @/other"]);
}

/// The directories at the top may be on another disk, which may not be there.
#[test]
fn a_prune_without_the_disk_of_the_backups_removes_nothing() {
    let (place, id, image) = Place::with_backup(SIZE);
    let (backups, other) = (place.repository().join("backups"), place.path("other"));
    std::fs::rename(&backups, &other).expect("rename");
    symlink(&other, &backups).expect("symlink");
    let packs = packs(&place);
    let lines = ["prune", "prune --keep-daily 7", "prune --keep-last 1 --dry-run"];
    // The link leads nowhere; or to an empty mount point.
    std::fs::rename(&other, place.path("unmounted")).expect("rename");
    says(&place, 1, "mount the disk", &lines);
    says(&place, 1, "mount the disk", &["list", "verify", "restore latest --to @/new"]);
    std::fs::create_dir(&other).expect("mkdir");
    says(&place, 1, "mount that disk", &lines);
    assert_eq!(self::packs(&place), packs);
    std::fs::remove_dir(&other).expect("rmdir");
    std::fs::rename(place.path("unmounted"), &other).expect("rename");
    place.restores(&id, &image, SIZE);
    // Somebody has removed all backups.
    std::fs::remove_file(other.join(&id)).expect("remove");
    says(&place, 1, "remove the empty directory", &lines);
    std::fs::remove_file(&backups).expect("remove");
    place.ok(&["prune"]);
    assert_eq!(self::packs(&place), 0);
}

/// Nothing is removed, and no backup is written to the disk below.
#[test]
fn an_empty_mount_point_for_packs_is_no_loss_of_them() {
    let (place, id, image) = Place::with_backup(SIZE);
    place.full();
    let (packs, unmounted) = (place.repository().join("packs"), place.path("unmounted"));
    std::fs::rename(&packs, &unmounted).expect("rename");
    std::fs::create_dir_all(packs.join("lost+found")).expect("mkdir");
    let lines = ["prune --keep-last 1", "prune --keep-last 1 --dry-run", "full --volume v --device @/image"];
    says(&place, 1, "mount that disk", &lines);
    assert_eq!(place.list().len(), 2);
    std::fs::remove_dir_all(&packs).expect("remove");
    std::fs::rename(&unmounted, &packs).expect("rename");
    place.restores(&id, &image, SIZE);
    // Where they are lost, and not away, a full backup begins anew.
    std::fs::remove_dir_all(&packs).expect("remove");
    let backup = place.full();
    place.ok(&["prune", "--keep-last", "1"]);
    place.ok(&["verify"]);
    place.restores(&backup, &image, SIZE);
}

/// What is written and what is read at once would be a mixture.
#[test]
fn a_device_that_is_being_restored_is_not_backed_up() {
    let place = Place::new();
    place.written(SIZE, 7, 90, 1);
    let restored = place.open_image(SIZE);
    restored.lock().expect("lock");
    says(&place, 1, "another cbt-backup works on", &["full --volume v --device @/image"]);
    restored.unlock().expect("unlock");
    place.full();
}

/// A reader takes its time, or is gone and the pipe is still open.
#[test]
fn a_reader_of_results_that_stops_holds_nothing_up() {
    let (place, _, _) = Place::with_backup(SIZE);
    for command in ["list", "verify", "show"] {
        let (_reader, mut writer) = std::io::pipe().expect("a pipe");
        // It is full from the beginning.
        nix::fcntl::fcntl(&writer, nix::fcntl::FcntlArg::F_SETPIPE_SZ(4096)).expect("a small pipe");
        std::io::Write::write_all(&mut writer, &[b'x'; 4096]).expect("write");
        let mut running = Running(place.command(&[command]).stdout(writer).spawn().expect("start"));
        testkit::running::until_blocked_in(running.0.id(), "pipe_write");
        // The repository is free as soon as there is nothing left but to print.
        place.ok(&["prune", "--keep-last", "1"]);
        running.signal(nix::sys::signal::Signal::SIGTERM);
        assert_eq!(running.ends_within(Duration::from_secs(5)), Some(130), "{command}");
    }
}

/// `ulimit -f`, or a quota of a service manager.
#[test]
fn a_limit_of_file_sizes_is_an_error() {
    let (place, id, _) = Place::with_backup(SIZE);
    let to = place.path("restored");
    let restore = place.command(&["restore", &id, "--to", arg(&to)]);
    let mut limited = std::process::Command::new("bash");
    limited
        .args(["-c", "ulimit -f 64; exec \"$@\"", "bash"])
        .arg(restore.get_program())
        .args(restore.get_args());
    let said = crate::tool::fails(1, limited);
    assert!(said.contains("File too large"), "{said}");
    let left = place.dir.path().read_dir().expect("list").flatten();
    let left: Vec<_> = left
        .map(|entry| entry.file_name())
        .filter(|name| name.to_string_lossy().contains("restored"))
        .collect();
    assert!(left.is_empty(), "{left:?}");
}

fn image_is_backed_up_again(place: &Place, image: &Image) {
    let backup = place.full();
    let pruned = place.ok(&["prune", "--keep-last", "1"]);
    assert_eq!(pruned["removed"].as_array().map(Vec::len), Some(1), "{pruned}");
    place.ok(&["verify"]);
    place.restores(&backup, image, SIZE);
}

#[test_with::root]
#[test]
fn a_block_device_without_a_driver_is_read_whole() {
    let place = Place::new();
    let image = place.written(SIZE, 7, 90, 1);
    let device = Loop::of(&place.image());
    let made = place.ok(&["full", "--volume", "v", "--device", arg(&device.0)]);
    assert_eq!((made["read"].as_u64(), made["data"].as_u64()), (Some(SIZE), Some(90 * 4096)), "{made}");
    place.restores(&id(&made), &image, SIZE);
}

#[test]
fn a_name_that_is_empty_is_no_name() {
    let (place, backup, image) = Place::with_backup(SIZE);
    for line in [
        "restore --to @/new",
        "verify",
        "show",
        "prune --remove",
        "prune --keep-last 1 --volume",
        "list --volume",
        "show --volume",
        "verify --volume",
        "restore latest --to @/new --volume",
        "restore latest --to @/new --onto-base",
        "mount latest --socket @/new --volume",
    ] {
        let mut arguments: Vec<&str> = line.split(' ').collect();
        arguments.push("");
        assert!(place.fails(2, &arguments).contains("is a variable not set?"), "{line}");
    }
    says(
        &place,
        1,
        "there is no backup of other",
        &["prune --volume other --keep-last 1", "prune --volume other --keep-last 1 --dry-run"],
    );
    place.restores(&backup, &image, SIZE);
    // The last one of a volume may be named.
    let pruned = place.ok(&["prune", "--volume", "v", "--remove", &backup]);
    assert_eq!(pruned["removed"][0], backup);
}

#[test]
fn what_is_no_file_holds_nobody_up() {
    let (place, _, _) = Place::with_backup(SIZE);
    std::fs::create_dir(place.repository().join("damaged")).expect("mkdir");
    let names: Vec<PathBuf> = place.objects();
    let named = |name: &str| place.repository().join(name);
    let damaged = named("damaged/20200101T000000.000Z-abcdef");
    for path in [&names[..], &[damaged, named("lock")]].concat() {
        let aside = place.path("aside");
        let was_there = std::fs::rename(&path, &aside).is_ok();
        nix::unistd::mkfifo(&path, nix::sys::stat::Mode::from_bits_truncate(0o600)).expect("mkfifo");
        let (to, device) = (place.path("restored"), place.image());
        for arguments in [
            &["verify"][..],
            &["list"],
            &["restore", "latest", "--to", arg(&to), "--overwrite"],
            &["prune", "--keep-last", "1", "--dry-run"],
            &["full", "--volume", "other", "--device", arg(&device)],
        ] {
            let mut running = Running::start(place.command(arguments));
            let ended = running.ends_within(Duration::from_secs(20));
            assert!(ended.is_some(), "{arguments:?} hangs at {}", path.display());
            let output = running.output();
            let said = text(&output.stdout) + &text(&output.stderr);
            let is_told = arguments != ["verify"] || said.contains("is not a plain file");
            assert!(is_told, "{}: {said}", path.display());
        }
        std::fs::remove_file(&path).expect("remove");
        if was_there {
            std::fs::rename(&aside, &path).expect("rename");
        }
    }
}

#[test_with::root]
#[test]
fn a_report_overwrites_nothing_that_is_read_or_kept() {
    let (place, backup, image) = Place::with_backup(SIZE);
    let device = Loop::of(&place.image());
    let (content, objects) = (std::fs::read(place.image()).expect("read"), place.objects());
    let full = "full --volume v --device @/image --report";
    std::fs::hard_link(place.image(), place.path("hard")).expect("link");
    symlink(place.image(), place.path("soft")).expect("symlink");
    symlink(place.repository().join("repository"), place.path("inside")).expect("symlink");
    let line = |path: &str| format!("{full} {path}");
    for path in ["@/image", "@/hard", "@/soft"] {
        says(&place, 1, "is what is backed up", &[&line(path)]);
    }
    for path in [arg(&device.0), "/dev/null", "/dev/full"] {
        says(&place, 1, "is not a file", &[&line(path)]);
    }
    let within = ["@/repository/repository", "@/repository/new", "@/inside"];
    for path in within {
        says(&place, 1, "is in the repository", &[&line(path)]);
        says(&place, 1, "is in the repository", &[&format!("restore {backup} --overwrite --to {path}")]);
        says(&place, 1, "is in the repository", &[&format!("show --html {path}")]);
    }
    says(
        &place,
        1,
        "is in the repository",
        &["full --volume v --device @/image --repository @/new --report @/new"],
    );
    assert!(std::fs::read(place.image()).expect("read") == content, "the device is written to");
    assert_eq!(place.objects(), objects);
    place.ok(&["verify"]);
    place.restores(&backup, &image, SIZE);
}

#[test]
fn a_report_that_cannot_be_written_is_known_before_or_says_what_is_made() {
    let (place, backup, _) = Place::with_backup(SIZE);
    for (name, target) in [("nowhere", "dir/report"), ("somewhere", "report")] {
        symlink(place.path(target), place.path(name)).expect("symlink");
    }
    let told = "/nowhere cannot be written: its directory does not exist";
    says(&place, 1, told, &["full --volume v --device @/image --report @/nowhere"]);
    assert_eq!(place.list(), [backup]);
    let made = json(0, place.backup("full", &["--report", arg(&place.path("somewhere"))]));
    let told: serde_json::Value =
        serde_json::from_slice(&std::fs::read(place.path("report")).expect("a report")).expect("JSON");
    assert_eq!(told, made);

    std::fs::create_dir(place.path("dir")).expect("mkdir");
    place.written(SIZE, 0, 4000, 2);
    let report = place.path("dir/report");
    let running = Running::start(place.backup("full", &["--limit-rate", "4Mi", "--report", arg(&report)]));
    // The report's directory was looked at before.
    let lock = place.repository().join("lock");
    testkit::until("it has the lock", || {
        let open = std::fs::read_dir(format!("/proc/{}/fd", running.0.id())).expect("it runs");
        open.flatten().any(|file| file.path().read_link().is_ok_and(|path| path == lock))
    });
    std::fs::remove_dir(place.path("dir")).expect("rmdir");
    let output = running.output();
    let said = text(&output.stderr);
    let last = place.list().pop().expect("a backup");
    assert_eq!((output.status.code(), place.list().len()), (Some(1), 3), "{said}");
    assert!(said.contains(&format!("backup {last} is made")), "{said}");
}

#[test]
fn a_snapshot_is_backed_up_once_whatever_came_after_it() {
    let (place, driver) = Driver::anew();
    let (file, mut image) = (place.open_image(SIZE), Image::default());
    let auto = |handle: &str| driver.back_up(&place, "auto", handle);
    let made = ["one", "two"].map(|handle| {
        image.write(&file, 7, 9, handle.len() as u64).expect("write");
        driver.snapshot(handle, &image, SIZE);
        id(&auto(handle))
    });
    assert_eq!([id(&auto("one")), id(&auto("two"))], made);
    assert_eq!(place.list(), made);
    // One that is damaged is none.
    std::fs::write(place.repository().join("backups").join(&made[0]), "").expect("write");
    assert!(!made.contains(&id(&auto("one"))));
}

#[test]
fn a_dry_run_passes_over_what_a_prune_removes() {
    let (place, _, _) = Place::with_backup(SIZE);
    let partial = place.repository().join("partial/20200101T000000.000Z-abcdef");
    plant(&partial, "half of it");
    let would = place.ok(&["prune", "--keep-last", "1", "--dry-run"]);
    assert!(partial.exists());
    let did = place.ok(&["prune", "--keep-last", "1"]);
    assert!(!partial.exists() && would == did, "{would} {did}");
}

/// A reader that may not write a lock, and a prune beside it.
#[test]
fn a_sound_repository_is_not_called_damaged_while_a_prune_runs() {
    let mut bucket = Bucket::start();
    for seed in [1, 2] {
        bucket.place.written(SIZE, 7, 90, seed);
        bucket.place.full();
    }
    let direct = bucket.port;
    let proxy = bucket.proxy();
    proxy.next("PUT", "/locks/", Fault::Refuse(403));
    proxy.next("GET", "/packs/", Fault::Hold);
    let reader = Running::start(bucket.place.command(&["verify"]));
    proxy.wait_held();
    bucket.endpoint(direct);
    bucket.place.ok(&["prune", "--keep-last", "1"]);
    proxy.open();
    let output = reader.output();
    let said = text(&output.stdout) + &text(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert!(
        said.contains("a prune has worked on the repository meanwhile") && !said.contains("damage"),
        "{said}"
    );
    bucket.place.ok(&["verify"]);
}

#[test]
fn names_that_are_not_the_tools_own_are_passed_over() {
    let (place, backup, image) = Place::with_backup(SIZE);
    let at = |name: &[u8]| place.repository().join(std::ffi::OsStr::from_bytes(name));
    let own = [
        &b"backups/zz/keep"[..],
        b"backups/note.txt",
        b"backups/a\tb",
        b"backups/\xff\xfe",
        b"packs/a%b",
        b"packs/ab/a%b",
        b"packs/ab/\xff",
        b"packs/note.txt",
        b"partial/a b",
        b"damaged/\n",
    ];
    for path in own.map(at) {
        plant(&path, "mine");
    }
    for dry in [&["--dry-run"][..], &[]] {
        let pruned = place.ok(&[&["prune", "--keep-last", "1"], dry].concat());
        assert_eq!(pruned["removed"], serde_json::json!([]));
        assert_eq!(pruned["freed"], 0);
    }
    assert_eq!(place.list(), [backup]);
    assert_eq!(place.ok(&["verify"])["unused"], 0);
    image_is_backed_up_again(&place, &image);
    for path in own.map(at) {
        assert_eq!(std::fs::read_to_string(&path).unwrap_or_default(), "mine", "{}", path.display());
    }
}

#[test]
fn a_damaged_name_of_the_repository_stops_no_restore() {
    for damage in [Some(&b""[..]), Some(b"nonsense"), None] {
        let (place, backup, image) = Place::with_backup(SIZE);
        let config = place.repository().join("repository");
        match damage {
            Some(bytes) => std::fs::write(&config, bytes).expect("write"),
            None => std::fs::remove_file(&config).expect("remove"),
        }
        for arguments in [&["list"][..], &["show"], &["prune", "--keep-last", "1"]] {
            let output = place.run(arguments);
            let said = text(&output.stderr);
            assert!(output.status.success() && said.contains("the next backup writes it again"), "{said}");
            assert!(!said.contains("0 bytes, and 1"), "{said}");
        }
        place.restores(&backup, &image, SIZE);
        assert!(place.fails(1, &["verify"]).contains("repository"));
        place.full();
        place.ok(&["verify"]);
    }
    // Without a backup it may be anybody's.
    let place = Place::new();
    place.open_image(SIZE);
    std::fs::create_dir(place.repository()).expect("mkdir");
    std::fs::write(place.repository().join("repository"), "mine").expect("write");
    says(&place, 1, "name an empty place", &["list", "full --volume v --device @/image"]);
    assert_eq!(std::fs::read(place.repository().join("repository")).expect("read"), b"mine");
}

#[test]
fn no_length_of_time_is_too_long_to_be_counted() {
    let (place, _, _) = Place::with_backup(SIZE);
    for line in [
        "prune --wait 213503982334601d",
        "full --volume v --device @/image --max-silence 213503982334601d",
        "run --pvc data --patience 213503982334601d",
    ] {
        says(&place, 2, "at most 36500d", &[line]);
    }
    place.ok(&["prune", "--wait", "36500d"]);
}

#[test]
fn a_lock_that_cannot_be_read_is_waited_for() {
    let mut bucket = Bucket::start();
    bucket.place.environment.push(("CBT_BACKUP_TEST_LOCK_SECONDS", "16".into()));
    let place = &bucket.place;
    place.open_image(SIZE);
    place.full();
    for content in ["", "nonsense"] {
        let lock = place.repository().join("locks/0123456789abcdef");
        plant(&lock, content);
        says(place, 1, "its lock ends at", &["list", "prune", "full --volume v --device @/image"]);
        place.ok(&["prune", "--wait", "60"]);
        assert!(bucket.locks().is_empty());
    }
}

#[test_with::root]
#[test]
fn a_block_device_without_a_medium_is_none() {
    let (place, _, _) = Place::with_backup(SIZE);
    std::fs::write(place.path("empty"), "").expect("write");
    let device = Loop::of(&place.path("empty"));
    says(&place, 1, "has no medium", &[&format!("full --volume v --device {}", device.0.display())]);
    assert_eq!(place.list().len(), 1);
}

#[test]
fn a_restore_to_a_directory_that_is_not_there_begins_nothing() {
    let (place, backup, _) = Place::with_backup(SIZE);
    std::fs::remove_dir_all(place.repository().join("packs")).expect("remove");
    let restore = format!("restore {backup} --to @/new/");
    let lines = [&restore[..], "full --volume v --device @/image --report @/new/", "show --html @/new/"];
    says(&place, 1, "ends as that of a directory", &lines);
}

#[test]
fn what_a_server_says_is_one_plain_line() {
    let mut bucket = Bucket::start();
    bucket.place.open_image(SIZE);
    bucket.place.full();
    let proxy = bucket.proxy();
    proxy.next("PUT", "/locks/", Fault::Refuse(403));
    let output = bucket.place.run(&["list"]);
    let said = text(&output.stderr);
    assert!(output.status.success() && said.lines().count() == 1, "{said}");
    assert!(said.contains("without a lock") && !said.contains('<') && !said.contains('\x1b'), "{said}");
}
