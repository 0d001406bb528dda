//! A driver under test: its process, its directory, its client. Dropped, also by a panic, it leaves no
//! process, mount or loop device behind.
#![allow(clippy::disallowed_methods)]
#![allow(missing_docs)]

pub mod api_server;
pub mod bench;
pub mod cluster;
pub mod content;
pub mod disk;
pub mod lab;
pub mod network;
pub mod order;
pub mod orders;
pub mod places;
pub mod plugin;
pub mod reference;
pub mod sanity;
pub mod subject;

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use csi_client::{Client, block_capability};
use deltapath::store::VolumeRecord;
use deltapath::sys::freeze::Root;
use deltapath::sys::mount::Mount;
use deltapath::sys::slots;
use deltapath::sys::sweep::{devices_below, sweep};
use proto::snapshot_metadata_client::SnapshotMetadataClient;
use tempfile::TempDir;
use tonic::Code;
use tonic::transport::Channel;

pub const MIB: i64 = 1 << 20;
pub const GIB: i64 = 1 << 30;
pub const BLOCK: u64 = 4096;

pub use base::PoolKind;

/// Every pool there is.
pub const POOLS: [PoolKind; 3] = PoolKind::ALL;

/// A program of this workspace, as it was built beside the test that runs.
pub fn program(name: &str) -> PathBuf {
    static BUILT: Mutex<BTreeSet<String>> = Mutex::new(BTreeSet::new());
    let test = std::env::current_exe().expect("the test's own path");
    // target/PROFILE/deps/suite-HASH
    let profile = test.ancestors().nth(2).expect("a directory of the build");
    // Cargo builds the programs of the tested packages alone; of all, where the whole workspace is tested (`make test`).
    let is_there = name == "deltapath" || std::env::var_os("DELTAPATH_PROGRAMS_ARE_BUILT").is_some();
    let mut built = BUILT.lock().unwrap_or_else(PoisonError::into_inner);
    if !is_there && built.insert(name.to_owned()) {
        let mut cargo = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
        cargo.args(["build", "--quiet", "--locked", "--bin", name, "--package", name]);
        cargo.arg("--target-dir").arg(profile.parent().expect("the target directory"));
        if profile.ends_with("release") {
            cargo.arg("--release");
        }
        let status = cargo.current_dir(HOME).status().expect("cargo");
        assert!(status.success(), "cargo could not build {name}");
    }
    profile.join(name)
}

/// The directory of the project.
pub const HOME: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../..");

/// A directory that [`Rig`] takes.
pub fn temp_dir() -> TempDir {
    tempfile::Builder::new().prefix("deltapath-test-").tempdir().expect("temp dir")
}

/// The root of a mount that is seen where it is.
pub fn root_of(mount: &Mount) -> Root {
    Root::open(mount).expect("open").expect("nothing is mounted over it")
}

pub struct Rig {
    pub client: Client,
    pub dir: TempDir,
    pool: PoolKind,
    arguments: Vec<String>,
    /// Variables of the driver's environment, from the next start on.
    pub environment: Vec<(&'static str, std::ffi::OsString)>,
    log_filter: String,
    child: Option<Child>,
}

/// How long the kernel may take to let go of a device: another mount namespace, a container's say, may have a copy of a mount
/// for a moment.
pub const LETTING_GO: Duration = Duration::from_secs(60);

/// A variable of [`Rig::environment`] that is not the driver's: the driver is started by this command line, whose words are
/// separated by spaces and which it ends.
pub const STARTED_BY: &str = "DELTAPATH_TEST_STARTED_BY";

impl Rig {
    /// Starts a driver on a fresh data directory.
    pub async fn start(pool: PoolKind) -> Self {
        Self::start_with(pool, &[], "info").await
    }

    /// The same with further flags, and what its log is to hold.
    pub async fn start_with(pool: PoolKind, arguments: &[&str], log_filter: &str) -> Self {
        Self::start_in(temp_dir(), pool, arguments, log_filter).await
    }

    /// The same in a directory that the test has prepared.
    pub async fn start_in(dir: TempDir, pool: PoolKind, arguments: &[&str], log_filter: &str) -> Self {
        Self::start_as(dir, pool, arguments, Vec::new(), log_filter).await
    }

    /// The same with variables in the driver's environment.
    pub async fn start_as(
        dir: TempDir,
        pool: PoolKind,
        arguments: &[&str],
        environment: Vec<(&'static str, std::ffi::OsString)>,
        log_filter: &str,
    ) -> Self {
        let arguments = arguments.iter().map(|argument| (*argument).to_owned()).collect();
        let log_filter = log_filter.to_owned();
        let mut rig = PartialRig { dir: Some(dir), pool, arguments, environment, log_filter };
        let (child, client) = rig.spawn().await;
        let mut rig = Rig {
            client,
            dir: rig.dir.take().expect("set above"),
            pool,
            arguments: rig.arguments.clone(),
            environment: rig.environment.clone(),
            log_filter: rig.log_filter.clone(),
            child: Some(child),
        };
        let info = rig.client.identity.get_plugin_info(proto::GetPluginInfoRequest {}).await;
        let manifest = info.expect("GetPluginInfo").into_inner().manifest;
        assert_eq!(manifest["pool"], pool.name(), "another pool is in use than the test names");
        rig
    }

    pub fn data_dir(&self) -> PathBuf {
        self.dir.path().join("data")
    }

    /// Where the pool's objects are.
    pub fn pool_dir(&self) -> PathBuf {
        self.data_dir().join("pool")
    }

    /// The ids of deleted snapshots that are retained.
    pub fn retained(&self) -> Vec<String> {
        let below = |dir: PathBuf| names(&dir).into_iter().map(move |name| (dir.join(&name), name));
        let is_deleted = |(dir, _): &(PathBuf, String)| dir.join("deleted.json").exists();
        let alone = below(self.pool_dir().join("snapshots")).filter(is_deleted);
        let groups = below(self.pool_dir().join("groups")).filter(is_deleted);
        let members = groups.flat_map(|(dir, _)| below(dir.join("members")));
        alone.chain(members).map(|(_, id)| id).collect()
    }

    pub fn socket(&self) -> PathBuf {
        self.dir.path().join("csi.sock")
    }

    /// Where volumes are staged and published.
    pub fn kubelet(&self) -> PathBuf {
        self.dir.path().join("kubelet")
    }

    /// All that the driver has logged, over restarts.
    pub fn log(&self) -> String {
        std::fs::read_to_string(self.dir.path().join("driver.log")).expect("the driver's log")
    }

    pub fn pid(&self) -> u32 {
        self.child.as_ref().expect("the driver runs").id()
    }

    /// Which every id of the data directory's objects begins with.
    pub fn key(&self) -> String {
        let manifest = std::fs::read(self.data_dir().join("deltapath.json")).expect("deltapath.json");
        let manifest: serde_json::Value = serde_json::from_slice(&manifest).expect("JSON");
        manifest["key"].as_str().expect("a key").to_owned()
    }

    pub fn is_running(&self) -> bool {
        self.child.is_some()
    }

    /// SIGKILL, as a crash.
    pub fn kill(&mut self) {
        let mut child = self.child.take().expect("the driver runs");
        child.kill().expect("kill");
        child.wait().expect("wait");
    }

    /// SIGTERM, as an orderly stop.
    pub fn terminate(&mut self) -> ExitStatus {
        let mut child = self.child.take().expect("the driver runs");
        signal(&child, nix::sys::signal::Signal::SIGTERM);
        wait(&mut child, Duration::from_secs(60))
    }

    /// Starts the driver again on the same data directory.
    pub async fn start_again(&mut self) {
        let (dir, pool) = (self.dir.path(), self.pool);
        let (child, client) = command(dir, pool, &self.arguments, &self.environment, &self.log_filter).await;
        (self.child, self.client) = (Some(child), client);
    }

    /// Starts the driver again; an error where it ends instead of answering.
    pub async fn try_start_again(&mut self) -> Result<(), ExitStatus> {
        let dir = self.dir.path();
        let (child, client) =
            try_command(dir, self.pool, &self.arguments, &self.environment, &self.log_filter).await?;
        (self.child, self.client) = (Some(child), client);
        Ok(())
    }

    /// The same with other flags.
    pub async fn start_again_with(&mut self, arguments: &[&str]) {
        self.arguments = arguments.iter().map(|argument| (*argument).to_owned()).collect();
        self.start_again().await;
    }

    /// Stops the driver in order and checks that nothing is left of it.
    pub fn finish(mut self) {
        let status = self.terminate();
        assert!(status.success(), "the driver ended with {status}\n{}", self.log());
        let deadline = Instant::now() + LETTING_GO;
        while !leftovers(self.dir.path()).is_empty() && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(20));
        }
        let left = leftovers(self.dir.path());
        assert!(left.is_empty(), "left behind: {left:?}");
    }

    /// A published Block volume: its id and its device.
    pub async fn block_volume(&mut self, name: &str, bytes: i64) -> (String, PathBuf) {
        self.block_volume_of(name, bytes, "4Ki").await
    }

    /// The same with a block size.
    pub async fn block_volume_of(&mut self, name: &str, bytes: i64, block_size: &str) -> (String, PathBuf) {
        let mut request = csi_client::new_volume(name, bytes, block_capability());
        request.parameters.insert("blockSize".into(), block_size.into());
        let volume = self.client.create_volume(request).await.expect("CreateVolume");
        let device = self.attach(&volume.volume_id).await;
        (volume.volume_id, device)
    }

    /// A published Block volume made from something.
    pub async fn volume_from(
        &mut self,
        name: &str,
        bytes: i64,
        source: proto::VolumeContentSource,
    ) -> (String, PathBuf) {
        let mut request = csi_client::new_volume(name, bytes, block_capability());
        request.volume_content_source = Some(source);
        let volume = self.client.create_volume(request).await.expect("CreateVolume from a source");
        let device = self.attach(&volume.volume_id).await;
        (volume.volume_id, device)
    }

    pub async fn attach(&mut self, volume_id: &str) -> PathBuf {
        let kubelet = self.kubelet();
        self.client.publish(volume_id, block_capability(), false, &kubelet).await.expect("publish")
    }

    pub async fn detach(&mut self, volume_id: &str) {
        let kubelet = self.kubelet();
        self.client.unpublish(volume_id, &kubelet).await.expect("unpublish");
    }

    pub async fn snapshot(&mut self, name: &str, volume_id: &str) -> String {
        self.client.create_snapshot(name, volume_id).await.expect("CreateSnapshot").snapshot_id
    }
}

/// What a rig is before its driver answers: if that fails, the directory still goes.
struct PartialRig {
    dir: Option<TempDir>,
    pool: PoolKind,
    arguments: Vec<String>,
    environment: Vec<(&'static str, std::ffi::OsString)>,
    log_filter: String,
}

impl PartialRig {
    async fn spawn(&mut self) -> (Child, Client) {
        let dir = self.dir.as_ref().expect("set until the rig is whole");
        command(dir.path(), self.pool, &self.arguments, &self.environment, &self.log_filter).await
    }
}

impl Drop for PartialRig {
    fn drop(&mut self) {
        if let Some(dir) = &self.dir {
            let _ = sweep(dir.path());
        }
    }
}

impl Drop for Rig {
    fn drop(&mut self) {
        if let Some(mut child) = self.child.take() {
            let _ = child.kill();
            let _ = child.wait();
        }
        if std::thread::panicking() {
            eprintln!("the driver's log:\n{}", self.log());
        }
        let left = sweep(self.dir.path());
        if !std::thread::panicking() {
            let left = left.expect("sweep");
            assert!(left.is_empty(), "could not be freed: {left:?}");
        }
    }
}

/// A command line of the driver below `dir`, not started.
pub fn driver_command(dir: &Path, pool: PoolKind) -> Command {
    let mut command = Command::new(program("deltapath"));
    command
        .arg("driver")
        .args(["--node-id", "node-1", "--pool", pool.name(), "--pool-size", "8Gi"])
        .arg("--endpoint")
        .arg(format!("unix://{}", dir.join("csi.sock").display()))
        .arg("--data-dir")
        .arg(dir.join("data"))
        .env_remove("CSI_ENDPOINT")
        .env_remove("RUST_LOG")
        .env("DELTAPATH_FAILPOINTS", dir.join("failpoints"))
        .stdin(Stdio::null())
        .stdout(Stdio::null());
    command
}

/// A command line that ends with another.
fn started_by(words: &str, ended: &Command) -> Command {
    let mut words = words.split(' ');
    let mut command = Command::new(words.next().expect("a program"));
    command.args(words).arg(ended.get_program()).args(ended.get_args());
    for (name, value) in ended.get_envs() {
        match value {
            Some(value) => command.env(name, value),
            None => command.env_remove(name),
        };
    }
    command.stdin(Stdio::null()).stdout(Stdio::null());
    command
}

async fn command(
    dir: &Path,
    pool: PoolKind,
    arguments: &[String],
    environment: &[(&'static str, std::ffi::OsString)],
    log_filter: &str,
) -> (Child, Client) {
    match try_command(dir, pool, arguments, environment, log_filter).await {
        Ok(running) => running,
        Err(ended) => {
            let log = std::fs::read_to_string(dir.join("driver.log")).unwrap_or_default();
            panic!("the driver did not start ({ended}):\n{log}");
        }
    }
}

/// Starts a driver below `dir`; an error where it ends instead of answering.
pub async fn try_command(
    dir: &Path,
    pool: PoolKind,
    arguments: &[String],
    environment: &[(&'static str, std::ffi::OsString)],
    log_filter: &str,
) -> Result<(Child, Client), ExitStatus> {
    let log = std::fs::File::options().create(true).append(true).open(dir.join("driver.log")).expect("log");
    let mut command = driver_command(dir, pool);
    if let Some((_, words)) = environment.iter().find(|(name, _)| *name == STARTED_BY) {
        command = started_by(words.to_str().expect("a command line"), &command);
    }
    let mut child = command
        .args(arguments)
        .env("RUST_LOG", log_filter)
        .envs(environment.iter().map(|(name, value)| (*name, value)))
        .stderr(log)
        .spawn()
        .expect("start the driver");
    let deadline = Instant::now() + Duration::from_secs(60);
    loop {
        // An answer, not a connection alone: a program that the driver before was starting when it was killed keeps
        // its socket open for a moment more.
        if let Ok(mut client) = Client::connect(&dir.join("csi.sock"), Duration::ZERO).await {
            let asked = client.identity.get_plugin_info(proto::GetPluginInfoRequest {});
            if let Ok(Ok(_)) = tokio::time::timeout(Duration::from_secs(10), asked).await {
                return Ok((child, client));
            }
        }
        if let Some(ended) = child.try_wait().expect("wait") {
            return Err(ended);
        }
        if Instant::now() > deadline {
            let _ = child.kill();
            return Err(child.wait().expect("wait"));
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

pub fn signal(child: &Child, signal: nix::sys::signal::Signal) {
    let pid = nix::unistd::Pid::from_raw(child.id() as i32);
    nix::sys::signal::kill(pid, signal).expect("signal");
}

/// Waits for a process to end.
pub fn wait(child: &mut Child, patience: Duration) -> ExitStatus {
    let deadline = Instant::now() + patience;
    loop {
        if let Some(status) = child.try_wait().expect("wait") {
            return status;
        }
        if Instant::now() > deadline {
            // Nothing that cleans up holds it any more.
            let _ = child.kill();
            let _ = child.wait();
            panic!("process {} does not end", child.id());
        }
        std::thread::sleep(Duration::from_millis(5));
    }
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

/// A bare channel to the socket.
pub async fn channel(socket: &Path) -> Channel {
    let socket = socket.to_owned();
    let connector = tower::service_fn(move |_: tonic::transport::Uri| {
        let socket = socket.clone();
        async move { tokio::net::UnixStream::connect(socket).await.map(hyper_util::rt::TokioIo::new) }
    });
    let endpoint = tonic::transport::Endpoint::from_static("http://localhost");
    endpoint.connect_with_connector(connector).await.expect("connect")
}

/// A metadata client that takes in 64 KiB at most before it reads: a longer stream stalls.
pub async fn narrow_client(socket: &Path) -> SnapshotMetadataClient<Channel> {
    let socket = socket.to_owned();
    let connector = tower::service_fn(move |_: tonic::transport::Uri| {
        let socket = socket.clone();
        async move { tokio::net::UnixStream::connect(socket).await.map(hyper_util::rt::TokioIo::new) }
    });
    let endpoint = tonic::transport::Endpoint::from_static("http://localhost")
        .initial_stream_window_size(65535)
        .initial_connection_window_size(65535 * 16);
    SnapshotMetadataClient::new(endpoint.connect_with_connector(connector).await.expect("connect"))
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

pub fn state_path(pool_dir: &Path, volume: &str) -> PathBuf {
    pool_dir.join("volumes").join(volume).join("state.json")
}

/// The code of a call that must fail.
#[track_caller]
pub fn code<T: std::fmt::Debug>(answer: Result<T, csi_client::Error>) -> Code {
    answer.expect_err("the call must fail").code()
}

/// The code of a call that must fail, made with a bare client.
#[track_caller]
pub fn status_code<T>(answer: Result<tonic::Response<T>, tonic::Status>) -> Code {
    match answer {
        Ok(_) => panic!("the call must fail"),
        Err(status) => status.code(),
    }
}

/// The names in a directory.
pub fn names(dir: &Path) -> Vec<String> {
    let mut names: Vec<String> = std::fs::read_dir(dir)
        .expect("read_dir")
        .map(|entry| entry.expect("entry").file_name().to_string_lossy().into_owned())
        .collect();
    names.sort();
    names
}

/// A TCP port that nobody listens on now.
pub fn free_port() -> u16 {
    // Below the range from which the kernel takes ports for connections: one of those could be given away before the
    // program under test binds it.
    let mut ports = std::iter::repeat_with(|| fastrand::u16(10_000..32_768));
    ports.find(|port| std::net::TcpListener::bind(("127.0.0.1", *port)).is_ok()).expect("endless")
}
