//! `mount`: a backup read by the NBD clients that people have.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use files::pattern::Image;
use nix::sys::signal::Signal;
use testkit::until;

use crate::tool::{BLOCK, MIB, Place, Running, arg, text};

fn run(program: &str, arguments: &[&str]) -> String {
    let output = Command::new(program).args(arguments).output();
    let output = output.unwrap_or_else(|error| panic!("{program}: {error}: run `make test-deps`"));
    assert!(output.status.success(), "{program} {arguments:?}: {}", text(&output.stderr));
    text(&output.stdout)
}

/// A server of the last backup; its socket.
fn serve(place: &Place, sector: &str) -> (Running, PathBuf) {
    let socket = place.path("nbd.sock");
    let command = place.command(&["mount", "latest", "--socket", arg(&socket), "--sector-size", sector]);
    let running = Running::start(command);
    until("the server listens", || std::os::unix::net::UnixStream::connect(&socket).is_ok());
    (running, socket)
}

fn url(socket: &Path) -> String {
    format!("nbd+unix:///?socket={}", socket.display())
}

/// What it says of itself may find nobody: it serves all the same, until it is ended.
#[test]
fn a_server_whose_output_nobody_takes_serves() {
    let (place, ..) = Place::with_backup(2 * MIB);
    let socket = place.path("nbd.sock");
    let full = || Stdio::from(std::fs::File::options().write(true).open("/dev/full").expect("open"));
    let broken = || Stdio::from(std::io::pipe().expect("a pipe").1);
    for (out, err) in [(broken(), broken()), (full(), full()), (Stdio::null(), broken()), (full(), broken())]
    {
        let mut command = place.command(&["mount", "latest", "--socket", arg(&socket)]);
        let mut server = Running(command.stdout(out).stderr(err).spawn().expect("start"));
        until("the server listens", || std::os::unix::net::UnixStream::connect(&socket).is_ok());
        let info = run("nbdinfo", &["--size", &url(&socket)]);
        assert_eq!(info.trim(), (2 * MIB).to_string());
        server.signal(Signal::SIGTERM);
        let code = server.0.wait().expect("wait").code();
        assert_eq!(code, Some(0));
        assert!(!socket.exists());
    }
}

#[test]
fn nbd_clients_read_a_backup() {
    let place = Place::new();
    // Not a whole number of sectors: behind the end there are zeros.
    let size = 150 * MIB + 700;
    let file = place.open_image(size);
    let mut image = Image::default();
    image.write(&file, 1, 200, 1).expect("write");
    image.write(&file, 128 * MIB / BLOCK - 3, 6, 2).expect("write");
    place.full();
    for sector in ["512", "4096"] {
        let (mut running, socket) = serve(&place, sector);
        let info = run("nbdinfo", &[&url(&socket)]);
        assert!(
            info.contains("is_read_only: true") && info.contains(&format!("block_size_minimum: {sector}")),
            "{info}"
        );
        for (name, program, arguments) in
            [("nbdcopy", "nbdcopy", vec![]), ("qemu", "qemu-img", vec!["convert", "-f", "raw", "-O", "raw"])]
        {
            let copy = place.path(name);
            let mut arguments = arguments;
            let url = url(&socket);
            arguments.extend([url.as_str(), arg(&copy)]);
            run(program, &arguments);
            let length = size.next_multiple_of(sector.parse().expect("a number"));
            assert_eq!(copy.metadata().expect("copied").len(), length);
            image.compare(&copy, length, &base::Stop::default()).expect("equal");
        }
        // A prune would pull the packs away.
        assert!(place.fails(1, &["prune"]).contains("wait until they have ended"));
        running.signal(Signal::SIGTERM);
        assert!(running.0.wait().expect("wait").success());
        assert!(!socket.exists());
    }
    // The socket of a server that was killed is taken over; that of one that runs is not.
    let (mut running, socket) = serve(&place, "512");
    place.fails(1, &["mount", "latest", "--socket", arg(&socket)]);
    running.0.kill().expect("kill");
    running.0.wait().expect("wait");
    assert!(socket.exists());
    let (mut running, socket) = serve(&place, "512");
    // Its socket has another name now, and another server has the name: that one's stays.
    std::fs::rename(&socket, place.path("moved.sock")).expect("rename");
    let (_other, socket) = serve(&place, "512");
    running.signal(Signal::SIGTERM);
    assert!(running.0.wait().expect("wait").success());
    assert!(socket.exists());
}

/// Each found the socket of a server that was killed, and removed what was there by then: the socket of the other.
#[test]
fn of_two_servers_on_one_socket_one_serves_and_the_other_ends() {
    let (place, _, _) = Place::with_backup(2 * MIB);
    let socket = place.path("nbd.sock");
    for round in 0..20 {
        drop(std::os::unix::net::UnixListener::bind(&socket).expect("bind"));
        let start = |_| Running::start(place.command(&["mount", "latest", "--socket", arg(&socket)]));
        let mut servers = [0, 1, 2].map(start);
        let mut ended = [false; 3];
        until("all but one end", || {
            for (server, ended) in servers.iter_mut().zip(&mut ended) {
                *ended = *ended || server.0.try_wait().expect("wait").is_some();
            }
            ended.iter().filter(|ended| **ended).count() >= 2
        });
        let serving =
            ended.iter().position(|ended| !ended).unwrap_or_else(|| panic!("round {round}: none serves"));
        run("nbdinfo", &["--size", &url(&socket)]);
        for (number, server) in servers.into_iter().enumerate() {
            if number == serving {
                server.signal(Signal::SIGTERM);
            }
            let said = text(&server.output().stderr);
            assert_eq!(said.contains("Address already in use"), number != serving, "round {round}: {said}");
        }
        assert!(!socket.exists(), "round {round}");
    }
}

/// Somebody else may lock the directory, and never let go.
#[test]
fn a_signal_ends_the_wait_for_the_directory_of_a_socket() {
    let (place, _, _) = Place::with_backup(2 * MIB);
    std::fs::create_dir(place.path("dir")).expect("mkdir");
    let dir = std::fs::File::open(place.path("dir")).expect("open");
    dir.lock().expect("lock");
    let socket = place.path("dir/nbd.sock");
    let mut running = Running::start(place.command(&["mount", "latest", "--socket", arg(&socket)]));
    testkit::until_caught(running.0.id());
    assert_eq!(running.ends_within(std::time::Duration::from_secs(1)), None);
    running.signal(Signal::SIGTERM);
    assert_eq!(running.ends_within(std::time::Duration::from_secs(30)), Some(130));
    assert!(!socket.exists());
}

/// A terminal would act on it.
#[test]
fn a_path_is_shown_as_text() {
    let (place, _, _) = Place::with_backup(2 * MIB);
    let socket = place.path("a\u{1b}[2J.sock");
    let running = Running::start(place.command(&["mount", "latest", "--socket", arg(&socket)]));
    until("the server listens", || std::os::unix::net::UnixStream::connect(&socket).is_ok());
    running.signal(Signal::SIGTERM);
    let said = text(&running.output().stderr);
    assert!(said.contains("a\\u{1b}[2J.sock") && !said.contains('\u{1b}'), "{said}");
}

/// A backup of 8 TiB that holds next to nothing: clients learn where, and read no more.
#[test]
fn clients_are_told_what_holds_data() {
    let place = Place::new();
    let size = 8 << 40;
    let file = place.open_image(size);
    let mut image = Image::default();
    // Two parts of one segment, one where segments meet, and the end.
    image.write(&file, 10, 20, 1).expect("write");
    image.write(&file, 50, 1, 1).expect("write");
    image.write(&file, 128 * MIB / BLOCK - 3, 6, 2).expect("write");
    image.write(&file, size / BLOCK - 1, 1, 3).expect("write");
    place.full();
    let (_running, socket) = serve(&place, "512");
    let map = run("nbdinfo", &["--map", "--json", &url(&socket)]);
    let map: serde_json::Value = serde_json::from_str(&map).expect("JSON");
    let parts: Vec<(u64, u64)> = map
        .as_array()
        .expect("a list")
        .iter()
        .filter(|part| part["type"] == 0)
        .map(|part| (part["offset"].as_u64().expect("an offset"), part["length"].as_u64().expect("a length")))
        .map(|(offset, length)| (offset / BLOCK, length / BLOCK))
        .collect();
    let wanted = [(10, 20), (50, 1), (128 * MIB / BLOCK - 3, 6), (size / BLOCK - 1, 1)];
    assert_eq!(parts, wanted, "{map}");
    let total: u64 = map.as_array().expect("a list").iter().filter_map(|part| part["length"].as_u64()).sum();
    assert_eq!(total, size);
    for (name, arguments) in [
        ("nbdcopy", vec!["60", "nbdcopy"]),
        ("qemu", vec!["60", "qemu-img", "convert", "-f", "raw", "-O", "raw"]),
    ] {
        let (copy, url) = (place.path(name), url(&socket));
        run("timeout", &[&arguments[..], &[&url, arg(&copy)]].concat());
        assert_eq!(copy.metadata().expect("copied").len(), size);
        image.compare_parts(&copy, size, 64, &base::Stop::default()).expect("equal");
    }
}

/// Unmounts what a test has mounted, the last one first, also when it fails.
#[derive(Default)]
struct Mounts(Vec<PathBuf>);

impl Drop for Mounts {
    fn drop(&mut self) {
        for path in self.0.iter().rev() {
            // A mount whose server has died is busy, and must not stay.
            let _ = Command::new("umount").arg("--lazy").arg(path).status();
        }
    }
}

#[test_with::root]
#[test_with::path(/dev/fuse)]
#[test]
fn files_come_out_of_a_filesystem_in_a_backup() {
    for (make, options) in
        [(&["mkfs.ext4", "-q", "-F"][..], "ro,noload"), (&["mkfs.xfs", "-q", "-f"], "ro,norecovery,nouuid")]
    {
        let place = Place::new();
        let mut mounts = Mounts::default();
        place.open_image(320 * MIB);
        let (image, mounted) = (place.image(), place.path("mounted"));
        run(make[0], &[&make[1..], &[arg(&image)]].concat());
        std::fs::create_dir(&mounted).expect("mkdir");
        run("mount", &["-o", "loop", arg(&image), arg(&mounted)]);
        mounts.0.push(mounted.clone());
        let content: Vec<u8> = (0..3_000_000u32).flat_map(u32::to_le_bytes).collect();
        std::fs::create_dir(mounted.join("deep")).expect("mkdir");
        std::fs::write(mounted.join("deep/file"), &content).expect("write");
        run("umount", &[arg(&mounted)]);
        mounts.0.clear();
        place.full();
        let (_running, socket) = serve(&place, "512");
        let fuse = place.path("fuse");
        std::fs::create_dir(&fuse).expect("mkdir");
        let mut command = Command::new("nbdfuse");
        command.arg("--readonly").arg(fuse.join("volume")).arg(url(&socket));
        let _nbdfuse = Running::start(command);
        mounts.0.push(fuse.clone());
        until("nbdfuse has mounted", || fuse.join("volume").exists());
        run("mount", &["-o", &format!("loop,{options}"), arg(&fuse.join("volume")), arg(&mounted)]);
        mounts.0.push(mounted.clone());
        assert_eq!(std::fs::read(mounted.join("deep/file")).expect("read"), content);
        drop(mounts);
    }
}
