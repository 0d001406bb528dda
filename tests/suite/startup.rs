//! The start: sockets, data directories, records, and what a dead driver left.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use testkit::orders::{Cut, Orders};
use testkit::prelude::*;
use testkit::running::Running;
use testkit::{driver_command, swept_dir};

/// Runs a driver that must refuse to start, and returns its messages.
pub fn refused(command: &mut Command) -> String {
    let mut child = command.stderr(Stdio::piped()).spawn().expect("spawn");
    let deadline = Instant::now() + Duration::from_secs(30);
    while child.try_wait().expect("wait").is_none() && Instant::now() < deadline {
        std::thread::sleep(Duration::from_millis(5));
    }
    // If the driver was not refused, it would run for ever.
    let _ = child.kill();
    let output = child.wait_with_output().expect("output");
    assert_eq!(output.status.code(), Some(1), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stderr).expect("utf-8")
}

/// The incident: a driver was killed while it started a program, which has copies of the driver's locks until exec. The next
/// driver was started at once, and reported that another driver is running.
#[apply(device_test)]
async fn a_lock_that_outlives_its_driver_for_a_moment_is_waited_for() {
    use nix::fcntl::{Flock, FlockArg};
    let mut rig = Rig::start(PoolKind::Btrfs).await;
    rig.kill();
    let held = [rig.data_dir().join("lock"), rig.data_dir().join("pool.img")].map(|path| {
        let file = std::fs::File::options().read(true).write(true).open(path).expect("open");
        Flock::lock(file, FlockArg::LockExclusiveNonblock).map_err(|(_, errno)| errno).expect("it is free")
    });
    let holder = std::thread::spawn(move || {
        std::thread::sleep(Duration::from_millis(300));
        drop(held);
    });
    rig.start_again().await;
    holder.join().expect("join");
    rig.finish();
}

#[apply(device_test)]
async fn a_live_socket_is_refused_and_a_stale_one_replaced() {
    let mut rig = Rig::start(PoolKind::Dir).await;
    let other = rig.dir.path().join("other-data");
    let said = refused(driver_command(rig.dir.path(), PoolKind::Dir).arg("--data-dir").arg(&other));
    assert!(said.contains("another process listens"), "{said}");

    rig.kill();
    assert!(rig.socket().exists(), "a killed driver leaves its socket");
    rig.start_again().await;
    let mode = std::os::unix::fs::PermissionsExt::mode(
        &std::fs::metadata(rig.socket()).expect("stat").permissions(),
    );
    assert_eq!(mode & 0o777, 0o660);

    rig.terminate();
    assert!(!rig.socket().exists(), "an orderly stop removes the socket");
    std::fs::write(rig.socket(), "not a socket").expect("write");
    let said = refused(&mut driver_command(rig.dir.path(), PoolKind::Dir));
    assert!(said.contains("not a socket"), "{said}");
    let found = std::fs::read_to_string(rig.socket()).expect("read");
    assert_eq!(found, "not a socket", "a file that is not a socket was removed");
}

#[apply(device_test)]
async fn csi_endpoint_is_honoured_and_a_flag_wins() {
    let dir = tempfile::tempdir().expect("temp dir");
    let socket = dir.path().join("from-env.sock");
    let mut child = Command::new(testkit::program("deltapath"))
        .args(["driver", "--node-id", "n", "--pool", "dir", "--data-dir"])
        .arg(dir.path().join("data"))
        .env("CSI_ENDPOINT", format!("unix://{}", socket.display()))
        .stderr(Stdio::null())
        .spawn()
        .expect("spawn");
    let connected = csi_client::Client::connect(&socket, Duration::from_secs(30)).await;
    child.kill().expect("kill");
    child.wait().expect("wait");
    connected.expect("the driver listens where CSI_ENDPOINT says");
    let said = refused(
        driver_command(dir.path(), PoolKind::Dir)
            .args(["--endpoint", "unix:///proc/nowhere/csi.sock"])
            .env("CSI_ENDPOINT", format!("unix://{}", socket.display())),
    );
    assert!(said.contains("/proc/nowhere"), "{said}");
}

#[apply(device_test)]
async fn a_data_dir_is_started_as_it_was_made() {
    let mut rig = Rig::start(PoolKind::Dir).await;
    rig.terminate();
    for (arguments, named) in [
        (["--pool", "xfs"], "made with --pool dir"),
        (["--driver-name", "other.example"], "made with --driver-name deltapath.csi.dev"),
    ] {
        let said = refused(driver_command(rig.dir.path(), PoolKind::Dir).args(arguments));
        assert!(said.contains(named), "{said}");
    }
    let manifest = rig.data_dir().join("deltapath.json");
    let text = std::fs::read_to_string(&manifest).expect("manifest");
    for (from, to, parts) in [
        ("\"version\": 3", "\"version\": 7", ["version 7", "upgrade"]),
        ("\"pool\": \"dir\"", "\"pool\": \"zfs\"", ["--pool zfs", "this version does not have"]),
    ] {
        std::fs::write(&manifest, text.replace(from, to)).expect("write");
        let said = refused(&mut driver_command(rig.dir.path(), PoolKind::Dir));
        assert!(parts.iter().all(|part| said.contains(part)), "{said}");
    }
}

/// Seen in other drivers: with a truncated state file the driver never starts again. Here a damaged record is reported, its
/// object is withheld, and all others are served.
#[apply(every_pool)]
async fn a_record_cut_short_does_not_stop_the_driver(rig: Rig<pool>) {
    let mut ids = Vec::new();
    for name in ["sound", "torn"] {
        ids.push(rig.volume(name, MIB, block_capability()).await);
    }
    rig.kill();
    let record = rig.pool_dir().join("volumes").join(&ids[1]).join("record.json");
    let bytes = std::fs::read(&record).expect("read");
    for length in [0, bytes.len() / 2] {
        std::fs::write(&record, &bytes[..length]).expect("write");
        rig.start_again().await;
        assert_eq!(crate::faults::listed(&rig).await.0, [ids[0].clone()]);
        assert!(rig.log().contains(&ids[1]), "the damaged record is not named in the log");
        // Neither served nor gone.
        is_refused(rig.client.delete_volume(&ids[1]).await, Code::Internal, &["record.json"]);
        // A kill, so that the pool stays mounted and the record can be changed.
        rig.kill();
    }
    std::fs::write(&record, &bytes).expect("write");
    rig.start_again().await;
    assert!(record.exists(), "a damaged object was removed");
    rig.client.delete_volume(&ids[1]).await.expect("delete");
    assert!(!record.exists(), "the repaired record's volume is served again");
}

/// A volume that is in use when its record, or its state, can no longer be read: pods end all the same.
#[apply(device_cases)]
async fn a_record_that_cannot_be_read_keeps_no_pod_from_ending(
    rig: Rig<Dir>,
    #[values("record.json", "state.json")] damaged: &str,
    #[values("raw", "files", "inline")] kind: &str,
) {
    let inline = crate::usage::ephemeral(&rig, "csi-inline", "16Mi");
    let (id, target) = match kind {
        "raw" => rig.published("raw", 16 * MIB, block_capability()).await,
        "files" => rig.published("files", 16 * MIB, mount_capability("ext4")).await,
        _ => {
            rig.client.node.node_publish_volume(inline.clone()).await.expect("publish");
            (inline.volume_id.clone(), PathBuf::from(&inline.target_path))
        }
    };
    rig.kill();
    let volumes = rig.pool_dir().join("volumes");
    let volume = testkit::names(&volumes).pop().expect("a volume");
    let file = volumes.join(&volume).join(damaged);
    let bytes = std::fs::read(&file).expect("read");
    std::fs::write(&file, "{").expect("write");
    rig.start_again().await;
    let undo = requests::unpublish(&id, &target);
    for _ in 0..2 {
        match kind {
            "inline" => drop(rig.client.node.node_unpublish_volume(undo.clone()).await.expect("unpublish")),
            _ => rig.detach(&id).await,
        }
    }
    assert_eq!(deltapath::sys::mount::mounted_at(&target).expect("mounts"), None);
    testkit::no_device_left(&rig.pool_dir());
    rig.kill();
    std::fs::write(&file, bytes).expect("write");
    rig.start_again().await;
    rig.client.node.node_unpublish_volume(undo).await.expect("unpublish");
}

/// A driver that is stopped with nothing in use leaves no mount and no device. A driver that is killed leaves its pool
/// attached, and the next start uses it instead of attaching it again.
#[apply(device_test)]
async fn a_start_finds_the_pool_that_a_dead_driver_left(rig: Rig<Xfs>) {
    let dir = rig.dir.path().to_owned();
    let attached = || deltapath::sys::sweep::devices_below(&dir).expect("devices").len();
    assert_eq!(attached(), 1, "the pool's device");
    let volume = rig.volume("kept", MIB, block_capability()).await;
    for _ in 0..3 {
        rig.crash().await;
        assert_eq!(attached(), 1, "the pool was attached a second time");
    }
    assert_eq!(names(&rig.pool_dir().join("volumes")), std::slice::from_ref(&volume));
    rig.terminate();
    testkit::no_device_left(rig.dir.path());
    rig.start_again().await;
    rig.attach(&volume).await;
    assert!(rig.terminate().success());
    assert_eq!(attached(), 2, "a volume in use keeps its device and its pool");
    rig.start_again().await;
    assert_eq!(attached(), 2);
    rig.detach(&volume).await;
}

/// A directory with a mkfs.btrfs that writes only the magic number of a btrfs.
fn programs_that_know_more(dir: &Path) -> std::path::PathBuf {
    use std::os::unix::fs::PermissionsExt;
    let programs = dir.join("bin");
    std::fs::create_dir(&programs).expect("mkdir");
    let mkfs = programs.join("mkfs.btrfs");
    let script = "#!/bin/sh\nfor image; do :; done\nprintf _BHRfS_M | dd of=\"$image\" bs=1 seek=65600 conv=notrunc 2>/dev/null\n";
    std::fs::write(&mkfs, script).expect("write");
    std::fs::set_permissions(&mkfs, std::fs::Permissions::from_mode(0o755)).expect("chmod");
    programs
}

/// A driver that finds these programs first, for a pool by this choice.
fn driver_with(programs: &Path, dir: &Path, choice: &str) -> Command {
    let path = format!("{}:{}", programs.display(), std::env::var("PATH").expect("PATH"));
    let mut command = driver_command(dir, PoolKind::Dir);
    command.args(["--pool-size", "1Gi", "--pool", choice]).env("PATH", path).env("RUST_LOG", "warn");
    command
}

/// The incident: a start was killed after it made such an image and before it chose the other filesystem. The next start
/// insisted on the image, although its manifest was not written yet.
#[apply(device_test)]
async fn a_start_that_is_killed_before_it_takes_the_other_filesystem_is_made_up_for() {
    let mut kills = 0;
    for at in (1..).step_by(2) {
        let (dir, _swept) = swept_dir();
        let programs = programs_that_know_more(dir.path());
        let start = || {
            let mut driver = driver_with(&programs, dir.path(), "auto");
            Running::start(&mut driver, &dir.path().join("driver.log"))
        };
        let mut orders = Orders::new(dir.path());
        orders.give(Cut::Kill, at, "main");
        let mut driver = start();
        let connected = loop {
            if !driver.is_alive() {
                break false;
            }
            // An answer: the socket takes connections before its mode is set, which is the last step.
            if let Ok(mut client) =
                Client::connect(&dir.path().join("csi.sock"), Duration::from_millis(100)).await
                && client.identity.get_plugin_info(proto::GetPluginInfoRequest {}).await.is_ok()
            {
                break true;
            }
        };
        orders.withdraw();
        if !connected {
            kills += 1;
            driver = start();
            let mut client = Client::connect(&dir.path().join("csi.sock"), Duration::from_secs(60)).await;
            let client = client.as_mut().unwrap_or_else(|error| panic!("killed before step {at}: {error}"));
            let info = client.identity.get_plugin_info(proto::GetPluginInfoRequest {}).await;
            assert_eq!(info.expect("GetPluginInfo").into_inner().manifest["pool"], "xfs", "step {at}");
        }
        assert!(driver.stop().success());
        testkit::nothing_left(dir.path());
        assert!(!dir.path().join("data/pool.img.untried").exists(), "killed before step {at}");
        if connected {
            break;
        }
    }
    assert!(kills > 5, "only {kills} steps");
}

/// A mkfs that is newer than the kernel makes an image that cannot be mounted. Then `--pool auto` uses the other filesystem,
/// and a start that asked for this one fails.
#[apply(device_test)]
async fn an_image_that_the_kernel_refuses_is_replaced() {
    let (dir, _swept) = swept_dir();
    let programs = programs_that_know_more(dir.path());
    let start = |choice: &str| {
        let mut command = driver_with(&programs, dir.path(), choice);
        command.arg("--data-dir").arg(dir.path().join(choice));
        command
    };
    let said = refused(&mut start("btrfs"));
    assert!(said.contains("mount a filesystem"), "{said}");

    let mut driver = Running::start(&mut start("auto"), &dir.path().join("driver.log"));
    let mut client =
        Client::connect(&dir.path().join("csi.sock"), Duration::from_secs(60)).await.expect("auto");
    let info = client.identity.get_plugin_info(proto::GetPluginInfoRequest {}).await;
    assert!(driver.stop().success());
    assert_eq!(info.expect("GetPluginInfo").into_inner().manifest["pool"], "xfs");
    testkit::nothing_left(dir.path());
    let said = driver.log();
    assert!(said.contains("no btrfs image, trying xfs"), "{said}");
}

/// A pool whose image is missing must not look like an empty pool: every volume would be reported as deleted.
#[apply(device_test)]
async fn a_missing_pool_image_is_not_made_anew(rig: Rig<Xfs>) {
    let volume = rig.volume("kept", MIB, block_capability()).await;
    assert!(rig.terminate().success());
    let (image, aside) = (rig.data_dir().join("pool.img"), rig.data_dir().join("aside.img"));
    std::fs::rename(&image, &aside).expect("take the image away");
    let said = refused(&mut driver_command(rig.dir.path(), PoolKind::Xfs));
    assert!(said.contains("is missing") && said.contains("pool.img"), "{said}");
    std::fs::rename(&aside, &image).expect("bring it back");
    rig.start_again().await;
    rig.attach(&volume).await;
    rig.detach(&volume).await;
}

/// Clients with gRPC core (Python, C++, Ruby) send the percent-encoded path of the socket as the authority, and grpc-java
/// sends the plain path. The bytes here are what they send for a Probe.
#[apply(device_test)]
async fn a_client_whose_authority_is_the_sockets_path_is_let_in() {
    use std::io::{Read, Write};
    let rig = Rig::start(PoolKind::Dir).await;
    let frame = |kind: u8, flags: u8, stream: u8, payload: &[u8]| {
        let length = (payload.len() as u32).to_be_bytes();
        [&length[1..], &[kind, flags, 0, 0, 0, stream], payload].concat()
    };
    let field = |name: &[u8], value: &[u8]| {
        [&[0x40, name.len() as u8][..], name, &[value.len() as u8], value].concat()
    };
    for authority in [&b"tmp%2Frun%2Fcsi.sock"[..], b"/tmp/run/csi.sock"] {
        let headers = [
            field(b":path", b"/csi.v1.Identity/Probe"),
            field(b":authority", authority),
            vec![0x83, 0x86],
            field(b"content-type", b"application/grpc"),
            field(b"te", b"trailers"),
        ]
        .concat();
        let request = [
            b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n".to_vec(),
            frame(4, 0, 0, b""),
            frame(1, 4, 1, &headers),
            frame(0, 1, 1, &[0; 5]),
        ]
        .concat();
        let answer = tokio::task::spawn_blocking({
            let socket = rig.socket();
            move || {
                let mut connection = std::os::unix::net::UnixStream::connect(socket).expect("connect");
                connection.set_read_timeout(Some(Duration::from_secs(20))).expect("timeout");
                connection.write_all(&request).expect("write");
                loop {
                    let mut header = [0; 9];
                    connection.read_exact(&mut header).expect("an answer");
                    let length = u32::from_be_bytes([0, header[0], header[1], header[2]]);
                    let mut payload = vec![0; length as usize];
                    connection.read_exact(&mut payload).expect("a whole frame");
                    // HEADERS or RST_STREAM of our stream.
                    if header[8] == 1 && matches!(header[3], 1 | 3) {
                        return (header[3], payload);
                    }
                }
            }
        });
        let (kind, payload) = answer.await.expect("the connection");
        assert_eq!(kind, 1, "the stream was reset: {payload:?}");
        assert_eq!(payload[0], 0x88, ":status 200");
    }
    rig.finish();
}
