//! `deltapath demo`, run as a user runs it.

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use nix::sys::signal::Signal;
use testkit::{PoolKind, names, pages, said, signal, wait};

fn demo(work_dir: &Path, pool: PoolKind) -> Command {
    let mut command = Command::new(testkit::program("deltapath"));
    command.args(["demo", "--size", "128Mi", "--pool", pool.name(), "--work-dir"]).arg(work_dir);
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

fn assert_clean(dir: &Path) {
    assert!(names(dir).is_empty(), "files are left: {:?}", names(dir));
    testkit::nothing_left(dir);
}

#[apply(root_cases)]
fn it_succeeds_on_every_pool_twice_in_a_row_and_leaves_nothing(
    #[values(PoolKind::Btrfs, PoolKind::Xfs, PoolKind::Dir)] pool: PoolKind,
) {
    let dir = tempfile::tempdir().expect("temp dir");
    for _ in 0..2 {
        let output = demo(dir.path(), pool).output().expect("run");
        assert_eq!(output.status.code(), Some(0), "{}", said(&output));
        let text = String::from_utf8_lossy(&output.stdout);
        for part in ["GetMetadataDelta", "OK: every tuple and every byte", "█", "·"] {
            assert!(text.contains(part), "no {part}:\n{text}");
        }
        let readme = pages::read("README.md");
        pages::assert_printed(pages::blocks(&readme, "text")[0], &text);
        assert_clean(dir.path());
    }
}

#[test_with::root]
#[test]
fn two_at_once_are_in_nobodys_way_and_json_tells_all_steps() {
    let dir = tempfile::tempdir().expect("temp dir");
    let start = || demo(dir.path(), PoolKind::Xfs).args(["--output", "json"]).spawn().expect("spawn");
    for child in [start(), start()] {
        let output = child.wait_with_output().expect("output");
        assert_eq!(output.status.code(), Some(0), "{}", said(&output));
        let report: serde_json::Value = serde_json::from_slice(&output.stdout).expect("one JSON object");
        assert_eq!(report["verdict"], "ok");
        assert_eq!(report["size_bytes"], 128 << 20);
        assert!(report["steps"].as_array().expect("steps").len() > 15);
    }
    assert_clean(dir.path());
}

#[apply(root_cases)]
fn a_signal_at_any_time_leaves_nothing(
    #[values(PoolKind::Btrfs, PoolKind::Xfs, PoolKind::Dir)] pool: PoolKind,
    #[values(Signal::SIGINT, Signal::SIGTERM, Signal::SIGHUP)] by: Signal,
) {
    for millis in [1, 100, 400, 800] {
        let dir = tempfile::tempdir().expect("temp dir");
        let mut child = demo(dir.path(), pool).spawn().expect("spawn");
        std::thread::sleep(Duration::from_millis(millis));
        signal(child.id(), by);
        let status = wait(&mut child, Duration::from_secs(60));
        // Before the handler is set, the signal ends it at once. After its last step it has ended by itself.
        assert!(matches!(status.code(), Some(130 | 0 | 1) | None), "{status}");
        assert_clean(dir.path());
    }
}

/// Seen in this program: a demo that was killed left a driver that runs as root, a mounted pool and devices.
#[apply(root_cases)]
fn a_demo_that_is_killed_takes_its_driver_along(
    #[values(PoolKind::Btrfs, PoolKind::Xfs, PoolKind::Dir)] pool: PoolKind,
) {
    for millis in [20, 200, 600, 1000] {
        let dir = tempfile::tempdir().expect("temp dir");
        let mut child = demo(dir.path(), pool).spawn().expect("spawn");
        std::thread::sleep(Duration::from_millis(millis));
        child.kill().expect("kill");
        child.wait().expect("wait");
        let deadline = Instant::now() + Duration::from_secs(60);
        while !names(dir.path()).is_empty() && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(10));
        }
        assert_clean(dir.path());
    }
}

#[test_with::root]
#[test]
fn a_reader_that_leaves_early_leaves_nothing() {
    let dir = tempfile::tempdir().expect("temp dir");
    let mut child = demo(dir.path(), PoolKind::Xfs).spawn().expect("spawn");
    let mut line = String::new();
    BufReader::new(child.stdout.take().expect("piped")).read_line(&mut line).expect("read");
    assert!(line.contains("create a Block volume"), "{line}");
    let output = child.wait_with_output().expect("output");
    assert_eq!((output.status.code(), said(&output).trim()), (Some(0), ""));
    assert_clean(dir.path());
}
