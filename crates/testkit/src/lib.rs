//! What tests and benches share: drivers under test, disks that fail, API servers, and what looks at them from outside.
//! Dropped, also by a panic, none of them leaves a process, mount or loop device behind.
#![allow(clippy::disallowed_methods)]
#![allow(missing_docs)]

pub mod api_server;
pub mod bench;
pub mod cluster;
pub mod content;
pub mod crowd;
pub mod disk;
pub mod earlier;
pub mod fuzz;
pub mod gateway;
pub mod http;
pub mod lab;
mod macros;
pub mod mover;
pub mod network;
pub mod order;
pub mod orders;
pub mod pages;
pub mod places;
pub mod played;
pub mod plugin;
mod pool;
pub mod prelude;
pub mod requests;
mod rig;
pub mod running;
pub mod sanity;
pub mod scene;
pub mod subject;
mod waiting;

use std::collections::BTreeSet;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use deltapath::store::VolumeRecord;
use deltapath::sys::freeze::Root;
use deltapath::sys::mount::Mount;
use deltapath::sys::slots;
use deltapath::sys::sweep::devices_below;
use nix::sys::signal::Signal;
use parking_lot::Mutex;
use proto::snapshot_metadata_client::SnapshotMetadataClient;
use proto::volume_capability::AccessType;
use tempfile::TempDir;
use tonic::transport::Channel;
use tonic::{Code, Status};

pub const MIB: i64 = 1 << 20;
pub const GIB: i64 = 1 << 30;
pub const BLOCK: u64 = 4096;

pub use pool::PoolKind;
pub use rig::{LETTING_GO, Rig, STARTED_BY, driver_command, try_command};
pub use waiting::{PATIENCE, eventually, pause, until, until_caught, wait};

/// Every pool there is.
pub const POOLS: [PoolKind; 3] = PoolKind::ALL;

/// A program of this workspace, as it was built next to the test that runs.
pub fn program(name: &str) -> PathBuf {
    let package = if name == "cbt-earlier" { "deltapath-earlier" } else { name };
    // Cargo has built the programs of the package whose tests run, and no others.
    let is_built = std::env::var("CARGO_PKG_NAME").is_ok_and(|tested| tested == package);
    beside_the_test(name, (!is_built).then_some(["--bin", name, "--package", package]))
}

pub fn example(name: &str) -> PathBuf {
    beside_the_test(&format!("examples/{name}"), Some(["--example", name, "--package", "deltapath"]))
}

/// A file of the build's directory, for which Cargo may have to be called.
fn beside_the_test(path: &str, arguments: Option<[&str; 4]>) -> PathBuf {
    static BUILT: Mutex<BTreeSet<String>> = Mutex::new(BTreeSet::new());
    let test = std::env::current_exe().expect("the test's own path");
    // target/PROFILE/deps/suite-HASH
    let profile = test.ancestors().nth(2).expect("a directory of the build");
    let arguments = arguments.filter(|_| std::env::var_os("DELTAPATH_PROGRAMS_ARE_BUILT").is_none());
    let mut built = BUILT.lock();
    if let Some(arguments) = arguments
        && built.insert(path.to_owned())
    {
        let mut cargo = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
        cargo.args(["build", "--quiet", "--locked"]).args(arguments);
        cargo.arg("--target-dir").arg(profile.parent().expect("the target directory"));
        if profile.ends_with("release") {
            cargo.arg("--release");
        } else if arguments.ends_with(&["deltapath"]) {
            cargo.args(["--features", "failpoints"]);
        }
        let status = cargo.current_dir(HOME).status().expect("cargo");
        assert!(status.success(), "cargo could not build {path}");
    }
    profile.join(path)
}

/// The seed of a test's random choices, which it prints: with the same `DELTAPATH_SEED` it makes the same choices again.
pub fn seed(test: &str) -> u64 {
    let given = asked("DELTAPATH_SEED").unwrap_or_else(|| fastrand::u64(..));
    println!("{test}: DELTAPATH_SEED={given}");
    // Each test makes choices of its own.
    test.bytes().fold(given, |seed, byte| fastrand::Rng::with_seed(seed ^ u64::from(byte)).u64(..))
}

/// The number in an environment variable by which a person asks for longer or shorter tests.
pub fn asked<N: std::str::FromStr>(variable: &str) -> Option<N> {
    let given = std::env::var(variable).ok()?;
    Some(given.parse().unwrap_or_else(|_| panic!("{variable} is {given:?}: set it to a number")))
}

/// Whether this is `make test`, which has short forms of what takes long.
pub fn is_short() -> bool {
    std::env::var_os("DELTAPATH_SHORT").is_some()
}

/// Ends a test that needs what only `make test-all` builds where `make test` runs: hack/run-tests.sh, which gives each test a process,
/// counts this code as skipped. To be called before anything is made that a test cleans up.
pub fn needs(what: &str) {
    if is_short() {
        // Past the test runner's capture.
        writeln!(std::io::stdout(), "left out: needs {what}").expect("write");
        std::process::exit(77);
    }
}

/// The directory of the project.
pub const HOME: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../..");

/// A directory that [`Rig`] takes.
pub fn temp_dir() -> TempDir {
    tempfile::Builder::new().prefix("deltapath-test-").tempdir().expect("temp dir")
}

/// A directory that is freed of mounts and devices when this is dropped, also where a test fails.
pub struct Swept(pub PathBuf);

impl Drop for Swept {
    fn drop(&mut self) {
        let _ = deltapath::sys::sweep::sweep(&self.0);
    }
}

/// A directory for a test without a rig, and what frees it.
pub fn swept_dir() -> (TempDir, Swept) {
    let dir = temp_dir();
    let swept = Swept(dir.path().to_owned());
    (dir, swept)
}

/// All that a program has said.
pub fn said(output: &std::process::Output) -> String {
    format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr))
}

/// What `deltapath verify` finds in a data directory.
pub fn verify(data_dir: &Path) -> std::process::Output {
    let mut command = Command::new(program("deltapath"));
    command.args(["verify", "--output", "json", "--data-dir"]).arg(data_dir);
    command.output().expect("run deltapath verify")
}

/// The ids of a group's snapshots.
pub fn members(group: &proto::VolumeGroupSnapshot) -> Vec<String> {
    group.snapshots.iter().map(|member| member.snapshot_id.clone()).collect()
}

/// A number of `/proc/PID/status`: memory in KiB.
pub fn process_status(pid: u32, field: &str) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).expect("a process");
    let line = status.lines().find_map(|line| line.strip_prefix(field)).expect(field);
    line.trim().trim_end_matches(" kB").parse().expect("a number")
}

/// A mounted filesystem with flags of the mount.
pub fn mount_with(fs_type: &str, flags: &[&str]) -> proto::VolumeCapability {
    let mut capability = csi_client::mount_capability(fs_type);
    if let Some(AccessType::Mount(mount)) = &mut capability.access_type {
        mount.mount_flags = flags.iter().map(|flag| (*flag).to_owned()).collect();
    }
    capability
}

/// A request for a volume that is made from something.
pub fn new_volume_from(
    name: &str,
    bytes: i64,
    capability: proto::VolumeCapability,
    source: proto::VolumeContentSource,
) -> proto::CreateVolumeRequest {
    let volume_content_source = Some(source);
    proto::CreateVolumeRequest { volume_content_source, ..csi_client::new_volume(name, bytes, capability) }
}

/// The root of a mount that is seen where it is.
pub fn root_of(mount: &Mount) -> Root {
    Root::open(mount).expect("open").expect("nothing is mounted over it")
}

/// Sends a signal. After SIGSTOP it waits until every thread has stopped: kill(2) returns while those on other processors
/// still run, and may answer a call.
pub fn signal(pid: u32, signal: Signal) {
    nix::sys::signal::kill(nix::unistd::Pid::from_raw(pid as i32), signal).expect("signal");
    if signal == Signal::SIGSTOP {
        until("all threads stopped", || is_stopped(pid));
    }
}

fn is_stopped(pid: u32) -> bool {
    let threads = std::fs::read_dir(format!("/proc/{pid}/task")).expect("a process");
    threads.flatten().all(|thread| {
        let stat = std::fs::read_to_string(thread.path().join("stat")).unwrap_or_default();
        // The state follows the name, which may hold blanks and brackets.
        stat.rsplit_once(") ").is_none_or(|(_, rest)| rest.starts_with('T'))
    })
}

/// Mounts and loop devices below a directory.
pub fn leftovers(dir: &Path) -> Vec<String> {
    let mounts = deltapath::sys::mount::mounts().expect("mounts");
    let below = mounts.iter().filter(|mount| mount.mount_point.starts_with(dir));
    let mut left: Vec<String> = below.map(|mount| mount.mount_point.display().to_string()).collect();
    left.extend(
        devices_below(dir).expect("devices").iter().map(|device| device.path().display().to_string()),
    );
    left
}

/// Fails where a mount or a loop device stays below a directory.
#[track_caller]
pub fn nothing_left(dir: &Path) {
    let_go(|| leftovers(dir));
}

/// Fails where a loop device stays whose file is below a directory.
#[track_caller]
pub fn no_device_left(dir: &Path) {
    let_go(|| leftovers(dir).into_iter().filter(|left| left.starts_with("/dev/")).collect());
}

/// Fails where something of this stays. A mount is gone at once; its device stays as long as a mount namespace that was made
/// before has a copy of the mount.
#[track_caller]
pub fn let_go(left: impl Fn() -> Vec<String>) {
    let begun = Instant::now();
    loop {
        let left = left();
        let are_devices = left.iter().all(|left| left.starts_with("/dev/"));
        assert!(are_devices && (left.is_empty() || begun.elapsed() < LETTING_GO), "left behind: {left:?}");
        if left.is_empty() {
            return;
        }
        std::thread::sleep(pause(begun));
    }
}

/// Whether a call was refused since the device of its volume is held by what no call can end, such as a copy of its mount in a
/// mount namespace that was made a moment ago. Provisioners call again.
pub fn is_held_elsewhere(code: Code, said: &str) -> bool {
    code == Code::FailedPrecondition && said.contains("a mount elsewhere holds")
}

pub async fn channel(socket: &Path) -> Channel {
    connected(tonic::transport::Endpoint::from_static("http://localhost"), socket).await
}

/// A metadata client that takes in 64 KiB at most before it reads: a longer stream stalls.
pub async fn narrow_client(socket: &Path) -> SnapshotMetadataClient<Channel> {
    let endpoint = tonic::transport::Endpoint::from_static("http://localhost")
        .initial_stream_window_size(65535)
        .initial_connection_window_size(65535 * 16);
    SnapshotMetadataClient::new(connected(endpoint, socket).await)
}

async fn connected(endpoint: tonic::transport::Endpoint, socket: &Path) -> Channel {
    endpoint.connect_with_connector(csi_client::connector(socket.to_owned())).await.expect("connect")
}

/// What is recorded of a volume's use, as JSON; null where nothing is.
pub fn state_of(pool_dir: &Path, volume: &str) -> serde_json::Value {
    let content = slots::read(&state_path(pool_dir, volume)).expect("read the state");
    content.map_or(serde_json::Value::Null, |content| serde_json::from_slice(&content).expect("JSON"))
}

/// Records something else, with `fields` over what there is when nothing is done to a volume.
pub fn set_state(pool_dir: &Path, volume: &str, fields: serde_json::Value) {
    let mut state = serde_json::json!({
        "version": VolumeRecord::VERSION, "attached": null, "staged": null, "published": [], "formatting": false, "frozen": null
    });
    for (name, value) in fields.as_object().expect("an object") {
        state[name] = value.clone();
    }
    slots::write(&state_path(pool_dir, volume), state.to_string().as_bytes()).expect("write the state");
}

/// Records that a driver of this boot left the volume's filesystem frozen.
pub fn set_frozen(pool_dir: &Path, volume: &str) {
    let mut state = state_of(pool_dir, volume);
    state["frozen"] = deltapath::sys::boot_id().expect("boot id").into();
    set_state(pool_dir, volume, state);
}

pub fn state_path(pool_dir: &Path, volume: &str) -> PathBuf {
    pool_dir.join("volumes").join(volume).join("state.json")
}

/// What a call fails with: of [`csi_client::Client`], or of a bare client.
pub trait Refusal {
    fn status(self) -> Status;
}

impl Refusal for Status {
    fn status(self) -> Status {
        self
    }
}

impl Refusal for csi_client::Error {
    fn status(self) -> Status {
        self.status
    }
}

/// The code of a call that must fail.
#[track_caller]
pub fn code<T>(answer: Result<T, impl Refusal>) -> Code {
    status(answer).code()
}

#[track_caller]
fn status<T>(answer: Result<T, impl Refusal>) -> Status {
    match answer {
        Ok(_) => panic!("the call must fail"),
        Err(error) => error.status(),
    }
}

/// A call must fail with this code and with a message that holds these texts.
#[track_caller]
pub fn is_refused<T>(answer: Result<T, impl Refusal>, code: Code, texts: &[&str]) {
    let status = status(answer);
    assert_eq!(status.code(), code, "{status}");
    for text in texts {
        assert!(status.message().contains(text), "{text:?} is missing: {status}");
    }
}

/// Runs a program that must succeed.
#[track_caller]
pub fn ok(command: &mut Command) {
    let output = command.output().unwrap_or_else(|error| panic!("{command:?}: {error}"));
    assert!(output.status.success(), "{command:?}: {output:?}");
}

/// What is done again and again in a thread while a test runs, until it is dropped at the latest.
pub struct Beside {
    goes_on: Arc<AtomicBool>,
    thread: Option<std::thread::JoinHandle<()>>,
}

impl Beside {
    pub fn start(mut work: impl FnMut() + Send + 'static) -> Self {
        let goes_on = Arc::new(AtomicBool::new(true));
        let seen = goes_on.clone();
        let thread = std::thread::spawn(move || {
            while seen.load(Ordering::Relaxed) {
                work();
            }
        });
        Beside { goes_on, thread: Some(thread) }
    }

    /// Ends it, and waits for that.
    pub fn stop(mut self) {
        self.goes_on.store(false, Ordering::Relaxed);
        self.thread.take().expect("it runs").join().expect("what is done beside the test");
    }
}

impl Drop for Beside {
    fn drop(&mut self) {
        self.goes_on.store(false, Ordering::Relaxed);
    }
}

/// Checks a filesystem that is not mounted for writing.
#[track_caller]
pub fn fsck(fs_type: &str, device: &Path) {
    let (program, arguments): (_, &[&str]) = match fs_type {
        "ext4" => ("e2fsck", &["-f", "-n"]),
        // Without -P its threads spend a minute on waking each other in a filesystem with 30,000 allocation groups.
        "xfs" => ("xfs_repair", &["-n", "-P"]),
        _ => ("btrfs", &["check", "--readonly", "--force"]),
    };
    ok(Command::new(program).args(arguments).arg(device));
}

pub fn names(dir: &Path) -> Vec<String> {
    let mut names: Vec<String> = std::fs::read_dir(dir)
        .unwrap_or_else(|error| panic!("{}: {error}", dir.display()))
        .map(|entry| entry.expect("entry").file_name().to_string_lossy().into_owned())
        .collect();
    names.sort();
    names
}

/// All files and directories below a directory, in order. Links are not followed, and what is removed meanwhile may be in it.
pub fn paths_below(dir: &Path) -> Vec<PathBuf> {
    let (mut found, mut left) = (Vec::new(), vec![dir.to_owned()]);
    let top = dir;
    while let Some(dir) = left.pop() {
        let entries = match std::fs::read_dir(&dir) {
            Ok(entries) => entries,
            Err(error) if dir == top => panic!("list {}: {error}", dir.display()),
            // It went meanwhile.
            Err(_) => continue,
        };
        let entries: Vec<PathBuf> = entries.map(|entry| entry.expect("entry").path()).collect();
        left.extend(entries.iter().filter(|path| path.is_dir() && !path.is_symlink()).cloned());
        found.extend(entries);
    }
    found.sort();
    found
}

/// The files below a directory whose names end so, `rs` say.
pub fn files_below(dir: &Path, extension: &str) -> Vec<PathBuf> {
    let is_one = |path: &PathBuf| path.extension().is_some_and(|found| found == extension) && path.is_file();
    paths_below(dir).into_iter().filter(is_one).collect()
}

/// A TCP port without a listener, that no other test of this process was given: until its program listens there, another test
/// would find it free.
pub fn free_port() -> u16 {
    // Below the range from which the kernel takes ports for connections: one of those could be given away before the
    // program under test binds it.
    const PORTS: std::ops::Range<u16> = 10_000..32_768;
    static NEXT: Mutex<Option<u16>> = Mutex::new(None);
    let mut next = NEXT.lock();
    loop {
        // Other processes begin elsewhere.
        let port = next.filter(|port| PORTS.contains(port)).unwrap_or_else(|| fastrand::u16(PORTS));
        *next = Some(port + 1);
        if std::net::TcpListener::bind(("127.0.0.1", port)).is_ok() {
            return port;
        }
    }
}
