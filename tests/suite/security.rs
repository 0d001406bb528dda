//! Promises of SECURITY.md that no other test checks.

use std::collections::HashSet;
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::path::{Path, PathBuf};

use deltapath::sys::loopdev::{Access, LoopDevice};
use proto::GetMetadataAllocatedRequest;

use testkit::content::block_bytes;
use testkit::prelude::*;
use testkit::{files_below, narrow_client, paths_below};

/// Only root can open the files of records, maps and blocks, on every pool and for every kind of object.
#[apply(every_pool)]
async fn what_is_stored_is_for_root_alone(rig: Rig<pool>) {
    let (volume, ..) = rig.written_volume("volume", 8 * MIB, (0, 10, 1)).await;
    let snapshot = rig.snapshot("snapshot", &volume).await;
    rig.client.create_group("group", std::slice::from_ref(&volume)).await.expect("group");
    rig.client.delete_snapshot(&snapshot).await.expect("delete");
    let (clone, _) = rig.volume_from("clone", 8 * MIB, from_volume(&volume)).await;
    let paths = paths_below(&rig.data_dir());
    assert!(paths.len() > 20, "{pool:?}: {paths:?}");
    // The roots of the directory and of the pool show only names; everything in them is closed.
    let open: Vec<String> = paths
        .iter()
        .filter(|path| **path != rig.pool_dir() && !is_closed_above(path, &rig.data_dir()))
        // Drafts, and the bytes of what was deleted, may go meanwhile.
        .filter_map(|path| Some((path, std::fs::symlink_metadata(path).ok()?.permissions().mode())))
        .filter(|(_, mode)| mode & 0o077 != 0)
        .map(|(path, mode)| format!("{} {mode:o}", path.display()))
        .collect();
    assert!(open.is_empty(), "{pool:?}: others may open {open:?}");
    for id in [volume, clone] {
        rig.detach(&id).await;
    }
}

/// Whether a directory between `root` and `path` is closed to others.
fn is_closed_above(path: &Path, root: &Path) -> bool {
    let above = path.ancestors().skip(1).take_while(|dir| *dir != root);
    let is_closed =
        |dir: &Path| std::fs::metadata(dir).is_ok_and(|dir| dir.permissions().mode() & 0o077 == 0);
    above.into_iter().any(is_closed)
}

/// Blocks of a deleted volume, and those past the end of a smaller one, read as zeros in a new volume.
#[apply(every_pool)]
async fn a_new_volume_shows_nothing_of_those_before(rig: Rig<pool>) {
    for round in 0..4 {
        let (volume, device) = rig.block_volume(&format!("volume {round}"), 32 * MIB).await;
        let mut bytes = vec![1; 32 << 20];
        std::fs::File::open(&device).and_then(|file| file.read_exact_at(&mut bytes, 0)).expect("read");
        assert!(bytes.iter().all(|byte| *byte == 0), "{pool:?}: a new volume is not zeros");
        let mut content = Content::default();
        content.write(&device, 0, 32 * MIB as u64 / BLOCK, 0xa5);
        let file = std::fs::File::open(&device).expect("open");
        file.sync_all().expect("sync");
        let mut block = vec![0; BLOCK as usize];
        file.read_exact_at(&mut block, 77 * BLOCK).expect("read");
        assert_eq!(block, block_bytes(77, 0xa5), "the first volume's data was not written");
        drop(file);
        rig.delete(&volume).await;
    }
}

/// The inodes of all internet sockets, in any state, in the driver's network namespace.
fn internet(pid: u32) -> HashSet<String> {
    let table = |name| std::fs::read_to_string(format!("/proc/{pid}/net/{name}")).unwrap_or_default();
    let tables = ["tcp", "tcp6", "udp", "udp6"].map(table);
    let lines = tables.iter().flat_map(|table| table.lines().skip(1));
    let inodes = lines.filter_map(|line| line.split_whitespace().nth(9));
    inodes.map(|inode| format!("socket:[{inode}]")).collect()
}

fn own_sockets(pid: u32) -> HashSet<String> {
    let open = std::fs::read_dir(format!("/proc/{pid}/fd")).expect("fds");
    let targets = open.filter_map(|entry| std::fs::read_link(entry.expect("fd").path()).ok());
    targets
        .map(|target| target.display().to_string())
        .filter(|target| target.starts_with("socket:"))
        .collect()
}

/// The driver listens only on its UNIX socket, unless it serves metrics, and connects to nothing.
#[apply(device_test)]
async fn no_port_is_open_without_a_metrics_address() {
    for (arguments, ports) in [(&[][..], 0), (&["--http-endpoint", "127.0.0.1:0"][..], 1)] {
        let rig = Rig::start_with(PoolKind::Dir, arguments, "info").await;
        let (all, own) = (internet(rig.pid()), own_sockets(rig.pid()));
        assert!(!own.is_empty(), "a driver has a UNIX socket at least");
        assert_eq!(own.intersection(&all).count(), ports, "{arguments:?}");
        rig.finish();
    }
}

/// A client that opens streams and does not read them gets at most 1024, and does not block other clients' calls.
#[apply(device_test)]
async fn streams_are_capped() {
    let mut rig = Rig::start_with(PoolKind::Dir, &["--block-metadata-type", "fixed"], "warn").await;
    let (volume, ..) = rig.written_volume("volume", 256 * MIB, (0, 65536, 1)).await;
    let snapshot = rig.snapshot("snapshot", &volume).await;
    let mut open = Vec::new();
    let refused = 'connections: loop {
        // The streams of a connection share its window, so several connections are needed.
        let mut client = narrow_client(&rig.socket()).await;
        for _ in 0..8 {
            let request = GetMetadataAllocatedRequest { snapshot_id: snapshot.clone(), ..Default::default() };
            match client.get_metadata_allocated(request).await {
                Ok(stream) => open.push(stream),
                refused => break 'connections code(refused),
            }
        }
        assert!(open.len() < 1100, "{} streams are open", open.len());
    };
    assert_eq!((open.len(), refused), (1024, Code::ResourceExhausted));
    rig.client.create_snapshot("meanwhile", &volume).await.expect("another call");
    drop(open);
    rig.detach_and_finish(&volume).await;
}

/// Only one function starts programs, and never a shell, so a client's text is never a part of a shell command.
#[test]
fn programs_are_started_at_one_place_and_without_a_shell() {
    let src = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let files = files_below(&src, "rs");
    let code = |path: &PathBuf| std::fs::read_to_string(path).expect("read");
    // The demo is run by a user, and starts a driver.
    let served = files.iter().filter(|path| !path.starts_with(src.join("cli")));
    let starting: Vec<_> = served.clone().filter(|path| code(path).contains("Command::new")).collect();
    assert_eq!(starting, [&src.join("sys/program.rs")]);
    let calls = served.flat_map(|path| {
        let text = code(path);
        text.split("program::run").skip(1).map(str::to_owned).collect::<Vec<_>>()
    });
    let calls: Vec<String> = calls.collect();
    assert!(calls.len() > 5, "{} programs are called", calls.len());
    for call in calls {
        let begin = &call[..call.len().min(60)];
        assert!(!begin.contains("\"sh\"") && !begin.contains("bash"), "{begin}");
    }
}

/// A message that is too long is refused before it is read into memory.
#[apply(device_test)]
async fn a_request_of_more_than_4_mib_is_refused(rig: Rig<Dir>) {
    for (length, code) in [(5 << 20, Code::OutOfRange), (3 << 20, Code::NotFound)] {
        let request = requests::snapshot("x".repeat(length));
        let answer = rig.client.controller.get_snapshot(request).await.expect_err("no such snapshot");
        assert_eq!(answer.code(), code, "{length} bytes");
        assert!(answer.message().len() < 4096, "a message of {} bytes", answer.message().len());
    }
}

/// A device with a file that is not the driver's keeps working whatever the driver does with its own devices, even if the
/// driver is killed.
#[apply(device_test)]
async fn a_loop_device_of_somebody_else_is_left_alone() {
    // Not below the rig's directory, since the rig frees everything there.
    let dir = tempfile::Builder::new().prefix("deltapath-other-").tempdir().expect("temp dir");
    let file = dir.path().join("data.img");
    let mut content = Content::default();
    std::fs::write(&file, vec![0; 1 << 20]).expect("write");
    let other = Detach(LoopDevice::attach(&file, Access::ReadWrite).expect("attach"));
    content.write(&other.0.path(), 0, 200, 7);
    let backing = || std::fs::read_to_string(other.0.sysfs().join("loop/backing_file")).expect("attached");
    let before = backing();
    let mut rig = Rig::start(PoolKind::Xfs).await;
    let (volume, device) = rig.block_volume("volume", MIB).await;
    assert_ne!(device, other.0.path());
    rig.crash().await;
    rig.delete(&volume).await;
    rig.finish();
    assert_eq!(backing(), before);
    content.assert_equals(&other.0.path(), 0, 256);
}

/// Frees a device, even if the test fails.
struct Detach(LoopDevice);

impl Drop for Detach {
    fn drop(&mut self) {
        let freed = self.0.clone().detach();
        assert!(std::thread::panicking() || freed.expect("detach"), "somebody holds {:?}", self.0);
    }
}

/// The tests and fuzz targets that SECURITY.md names exist.
#[test]
fn every_test_and_fuzz_target_that_security_md_names_exists() {
    let text = testkit::pages::read("SECURITY.md");
    let suites = ["tests/suite", "crates/kit/gateway/tests/suite", "crates/kit/router/tests/suite"];
    assert!(testkit::pages::assert_has_tests(&text, &suites) > 25);
    let targets = text.split("fuzz target").skip(1).flat_map(|rest| {
        let list = rest.trim_start_matches('s').split([']', '.']).next().unwrap_or("");
        testkit::pages::quoted(list).collect::<Vec<_>>()
    });
    let targets: HashSet<&str> = targets.collect();
    assert!(targets.len() > 7, "{targets:?}");
    for target in targets {
        assert!(
            Path::new(testkit::HOME).join("fuzz/corpus").join(target).is_dir(),
            "SECURITY.md names the fuzz target {target}"
        );
    }
}
