//! Every command with odd paths, names and streams: the exit code, the words, nothing left and nothing lost.

use std::os::unix::net::UnixListener;
use std::path::Path;
use std::time::Duration;

use files::pattern::Image;
use nix::sys::signal::Signal;
use nix::sys::stat::Mode;

use crate::tool::{MIB, Place, Running, arg, text};

const SIZE: u64 = 20 * MIB;

/// All that is in a place but for what the repository holds.
fn names(place: &Place) -> Vec<String> {
    let entries = place.dir.path().read_dir().expect("list").map(|entry| entry.expect("entry").file_name());
    let mut names: Vec<String> = entries.map(|name| name.to_string_lossy().into_owned()).collect();
    names.sort();
    names
}

/// Ends in time, as a command on a FIFO that nobody opens does not.
fn run(place: &Place, arguments: &[&str]) -> (i32, String) {
    let mut running = Running::start(place.command(arguments));
    if running.ends_within(Duration::from_secs(20)).is_none() {
        running.signal(Signal::SIGKILL);
        panic!("{arguments:?} does not end");
    }
    let output = running.output();
    (output.status.code().expect("a code"), text(&output.stderr))
}

#[test]
fn odd_paths_are_refused_and_nothing_is_made() {
    let place = Place::new();
    let mut image = Image::default();
    image.write(&place.open_image(SIZE), 7, 90, 1).expect("write");
    let id = place.full();
    let path = |name: &str| arg(&place.path(name)).to_owned();
    let (fifo, socket, dir, loops, into) =
        (path("fifo"), path("socket"), path("dir"), path("loop"), path("dir/x/y"));
    nix::unistd::mkfifo(Path::new(&fifo), Mode::from_bits_truncate(0o600)).expect("mkfifo");
    let _listener = UnixListener::bind(&socket).expect("bind");
    std::fs::create_dir(&dir).expect("mkdir");
    std::os::unix::fs::symlink("loop", &loops).expect("symlink");
    let (device, gone, own) = (path("image"), path("gone"), path("image.html"));
    std::fs::write(&own, "a page").expect("write");
    let before = names(&place);
    let objects = place.objects();

    let wrong = "neither a block device nor a file";
    let no_file = "No such file or directory";
    let fifo_report = ["full", "--volume", "v", "--device", &device, "--report", &fifo];
    let mut cases: Vec<(Vec<&str>, &str)> = vec![
        (vec!["restore", &id, "--to", &into], no_file),
        (vec!["restore", &id, "--to", &loops], "symbolic link"),
        (vec!["restore", &id, "--to", &device], "add --overwrite"),
        (vec!["restore", &id, "--to", &gone, "--onto-base", &id], no_file),
        (vec!["full", "--volume", "v", "--device", &device, "--report", &into], no_file),
        (vec!["full", "--volume", "v", "--device", &device, "--report", &dir], "Is a directory"),
        (fifo_report.to_vec(), "write to"),
        (vec!["show", "--html", &into], no_file),
        (vec!["show", "--html", &dir], "is no file"),
        (vec!["show", "--html", &fifo], "is no file"),
        (vec!["show", "--html", "/dev/null"], "is no file"),
        (vec!["mount", &id, "--socket", &device], "in use"),
        (vec!["list", "--repository", &fifo], ""),
        (vec!["list", "--repository", &gone], "first backup"),
    ];
    for path in [fifo.as_str(), &socket, &dir, "/dev/zero"] {
        cases.push((vec!["full", "--volume", "v", "--device", path], wrong));
        cases.push((vec!["auto", "--volume", "v", "--device", path], wrong));
        cases.push((vec!["verify", &id, "--against", path], wrong));
        cases.push((vec!["restore", &id, "--to", path], wrong));
        cases.push((vec!["restore", &id, "--to", path, "--overwrite"], wrong));
        cases.push((vec!["restore", &id, "--to", path, "--onto-base", &id], wrong));
    }
    for path in [gone.as_str(), &loops, &into] {
        cases.push((vec!["full", "--volume", "v", "--device", path], "open"));
        cases.push((vec!["verify", &id, "--against", path], "open"));
    }
    for (arguments, words) in cases {
        let mut command = place.command(&arguments);
        if let Some(at) = arguments.iter().position(|argument| *argument == "--repository") {
            command = std::process::Command::new(env!("CARGO_BIN_EXE_cbt-backup"));
            command.args(&arguments[..at]).arg("--repository").arg(arguments[at + 1]);
        }
        let mut running = Running::start(command);
        let code = running.ends_within(Duration::from_secs(20));
        if code.is_none() {
            running.signal(Signal::SIGKILL);
        }
        let said = text(&running.output().stderr);
        assert_eq!(code, Some(1), "{arguments:?}: {said}");
        assert!(said.contains(words), "{arguments:?}: {said}, instead of {words}");
        assert_eq!(names(&place), before, "{arguments:?}");
        assert_eq!(place.objects(), objects, "{arguments:?}");
    }
    assert_eq!(std::fs::read_to_string(&own).expect("a user's file"), "a page");
    place.restores(&id, &image, SIZE);
}

#[test]
fn names_are_checked_where_they_come_in() {
    let place = Place::new();
    place.open_image(MIB);
    let device = place.image();
    let long = "x".repeat(513);
    for name in ["", "a\nb", "a\x1b[31mRED", "\u{7f}", "\u{9b}", &long] {
        for arguments in [
            vec!["full", "--device", arg(&device), "--volume", name],
            vec!["auto", "--device", arg(&device), "--volume", name],
            vec!["full", "--device", arg(&device), "--volume", "v", "--snapshot", name],
            vec!["incremental", "--device", arg(&device), "--volume", "v", "--snapshot", "s", "--base", name],
            vec!["run", "--pvc", "data", "--volume", name],
        ] {
            let (code, said) = run(&place, &arguments);
            assert_eq!(code, 2, "{arguments:?}: {said}");
            assert!(!place.repository().exists(), "{arguments:?}");
        }
    }
    let volume = "y".repeat(300);
    place.ok(&["full", "--device", arg(&device), "--volume", &volume]);
    let listed = text(&place.run(&["list"]).stdout);
    assert!(listed.lines().all(|line| line.chars().count() < 140), "{listed}");
    assert!(place.ok(&["list", "--volume", &volume]).as_array().is_some_and(|list| list.len() == 1));
}

/// With --output json there is one document on standard output, whatever comes of a command.
#[test]
fn errors_have_a_json_form() {
    let place = Place::new();
    place.open_image(MIB);
    let id = place.full();
    let gone = place.path("gone");
    for (arguments, words) in [
        (vec!["restore", "nothing", "--to", arg(&gone)], "there is no backup nothing"),
        (vec!["full", "--volume", "v", "--device", arg(&gone)], "No such file"),
        (vec!["verify", &id, "--against", arg(&gone)], "No such file"),
        (vec!["prune", "--remove", "nothing"], "there is no backup nothing"),
    ] {
        let output = place.run(&[&arguments[..], &["--output", "json"]].concat());
        assert_eq!(output.status.code(), Some(1), "{arguments:?}");
        let told: serde_json::Value = serde_json::from_slice(&output.stdout).expect("JSON");
        let error = told["error"].as_str().expect("an error");
        assert!(error.contains(words), "{arguments:?}: {told}");
        assert!(text(&output.stderr).contains(error), "for people too: {}", text(&output.stderr));
        assert!(place.run(&arguments).stdout.is_empty(), "{arguments:?}");
    }
}
