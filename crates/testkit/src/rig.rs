//! A driver under test: started on a fresh data directory, killed, started again, and swept away.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use base::ObjectDir;
use csi_client::{Client, block_capability, mount_capability, new_volume};
use deltapath::sys::sweep::sweep;
use proto::{VolumeCapability, VolumeContentSource};
use tempfile::TempDir;
use tonic::Status;

use crate::content::{Content, blocks_of};
use crate::{
    BLOCK, PoolKind, Swept, is_held_elsewhere, names, new_volume_from, program, requests, signal, temp_dir,
    wait,
};

pub struct Rig {
    pub client: Client,
    /// Of a driver that does not start, too.
    _swept: Swept,
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
        let arguments: Vec<String> = arguments.iter().map(|argument| (*argument).to_owned()).collect();
        let swept = Swept(dir.path().to_owned());
        let started = try_command(dir.path(), pool, &arguments, &environment, log_filter).await;
        let (child, client) = started.unwrap_or_else(|ended| {
            let log = std::fs::read_to_string(dir.path().join("driver.log")).unwrap_or_default();
            panic!("the driver did not start ({ended}):\n{log}");
        });
        let (log_filter, child) = (log_filter.to_owned(), Some(child));
        let mut rig = Rig { client, _swept: swept, dir, pool, arguments, environment, log_filter, child };
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

    pub fn volume_dir(&self, id: &str) -> ObjectDir {
        ObjectDir::new(self.pool_dir().join("volumes").join(id))
    }

    /// The files of a snapshot that was taken alone.
    pub fn snapshot_dir(&self, id: &str) -> ObjectDir {
        ObjectDir::new(self.pool_dir().join("snapshots").join(id))
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
        signal(child.id(), nix::sys::signal::Signal::SIGTERM);
        wait(&mut child, Duration::from_secs(60))
    }

    /// Starts the driver again on the same data directory.
    pub async fn start_again(&mut self) {
        if let Err(ended) = self.try_start_again().await {
            panic!("the driver did not start ({ended}):\n{}", self.log());
        }
    }

    pub async fn restart(&mut self) {
        assert!(self.terminate().success());
        self.start_again().await;
    }

    pub async fn crash(&mut self) {
        self.kill();
        self.start_again().await;
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
        crate::running::is_plain(&self.log());
        crate::nothing_left(self.dir.path());
    }

    pub async fn detach_and_finish(mut self, volume_id: &str) {
        self.detach(volume_id).await;
        self.finish();
    }

    /// A published Block volume: its id and its device.
    pub async fn block_volume(&mut self, name: &str, bytes: i64) -> (String, PathBuf) {
        self.block_volume_of(name, bytes, "4Ki").await
    }

    /// The same with these blocks written to it: the first, how many, and their byte.
    pub async fn written_volume(
        &mut self,
        name: &str,
        bytes: i64,
        (start, count, fill): (u64, u64, u8),
    ) -> (String, PathBuf, Content) {
        let (volume, device) = self.block_volume(name, bytes).await;
        let mut content = Content::default();
        content.write(&device, start, count, fill);
        (volume, device, content)
    }

    /// The same with a block size.
    pub async fn block_volume_of(&mut self, name: &str, bytes: i64, block_size: &str) -> (String, PathBuf) {
        let mut request = new_volume(name, bytes, block_capability());
        request.parameters.insert("blockSize".into(), block_size.into());
        self.made_and_attached(request).await
    }

    /// A published Block volume made from something.
    pub async fn volume_from(
        &mut self,
        name: &str,
        bytes: i64,
        source: VolumeContentSource,
    ) -> (String, PathBuf) {
        self.made_and_attached(new_volume_from(name, bytes, block_capability(), source)).await
    }

    async fn made_and_attached(&mut self, request: proto::CreateVolumeRequest) -> (String, PathBuf) {
        let volume = self.client.create_volume(request).await.expect("CreateVolume").volume_id;
        let device = self.attach(&volume).await;
        (volume, device)
    }

    /// A volume that is not in use.
    pub async fn volume(&mut self, name: &str, bytes: i64, capability: VolumeCapability) -> String {
        self.client.create_volume(new_volume(name, bytes, capability)).await.expect("CreateVolume").volume_id
    }

    /// The same made from something.
    pub async fn made_from(
        &mut self,
        name: &str,
        bytes: i64,
        capability: VolumeCapability,
        source: VolumeContentSource,
    ) -> String {
        let request = new_volume_from(name, bytes, capability, source);
        self.client.create_volume(request).await.expect("CreateVolume from a source").volume_id
    }

    /// A volume, and where it is published.
    pub async fn published(
        &mut self,
        name: &str,
        bytes: i64,
        capability: VolumeCapability,
    ) -> (String, PathBuf) {
        let volume = self.volume(name, bytes, capability.clone()).await;
        let target = self.publish(&volume, capability).await;
        (volume, target)
    }

    /// Stages a volume and publishes it for writing: where.
    pub async fn publish(&mut self, volume_id: &str, capability: VolumeCapability) -> PathBuf {
        self.try_publish(volume_id, capability).await.expect("publish")
    }

    pub async fn try_publish(
        &mut self,
        volume_id: &str,
        capability: VolumeCapability,
    ) -> csi_client::Result<PathBuf> {
        let kubelet = self.kubelet();
        self.client.publish(volume_id, capability, false, &kubelet).await
    }

    pub async fn attach(&mut self, volume_id: &str) -> PathBuf {
        self.publish(volume_id, block_capability()).await
    }

    pub async fn detach(&mut self, volume_id: &str) {
        let kubelet = self.kubelet();
        self.client.unpublish(volume_id, &kubelet).await.expect("unpublish");
    }

    /// A volume that may be used as a device and with an ext4.
    pub async fn volume_of_both(&mut self, name: &str, bytes: i64) -> String {
        let mut request = new_volume(name, bytes, block_capability());
        request.volume_capabilities.push(mount_capability("ext4"));
        self.client.create_volume(request).await.expect("CreateVolume").volume_id
    }

    /// A request to publish a volume at another place than [`Self::publish`] does, which has staged it.
    pub fn publish_request(
        &self,
        volume_id: &str,
        target: &Path,
        capability: VolumeCapability,
        readonly: bool,
    ) -> proto::NodePublishVolumeRequest {
        let staging = self.kubelet().join(volume_id).join("staging");
        let request = requests::publish(volume_id, staging, target, capability);
        proto::NodePublishVolumeRequest { readonly, ..request }
    }

    pub async fn publish_at(
        &mut self,
        volume_id: &str,
        target: &Path,
        capability: VolumeCapability,
        readonly: bool,
    ) -> Result<(), Status> {
        let request = self.publish_request(volume_id, target, capability, readonly);
        self.client.node.node_publish_volume(request).await.map(drop)
    }

    pub async fn unpublish_at(&mut self, volume_id: &str, target: &Path) {
        let request = requests::unpublish(volume_id, target);
        self.client.node.node_unpublish_volume(request).await.expect("unpublish");
    }

    pub async fn node_expand(
        &mut self,
        volume_id: &str,
        path: &Path,
    ) -> Result<proto::NodeExpandVolumeResponse, Status> {
        let answer = self.client.node.node_expand_volume(requests::node_expand(volume_id, path)).await;
        answer.map(tonic::Response::into_inner)
    }

    pub async fn stats(&self, volume_id: &str, path: &Path) -> Result<Vec<proto::VolumeUsage>, Status> {
        let mut node = self.client.node.clone();
        Ok(node.node_get_volume_stats(requests::stats(volume_id, path)).await?.into_inner().usage)
    }

    pub async fn modify(&mut self, volume_id: &str, pairs: &[(&str, &str)]) -> Result<(), Status> {
        let request = requests::modify(volume_id, pairs);
        self.client.controller.controller_modify_volume(request).await.map(drop)
    }

    pub async fn delete(&mut self, volume_id: &str) {
        self.detach(volume_id).await;
        let deadline = Instant::now() + LETTING_GO;
        loop {
            match self.client.delete_volume(volume_id).await {
                Err(error)
                    if is_held_elsewhere(error.code(), error.status.message())
                        && Instant::now() < deadline =>
                {
                    tokio::time::sleep(Duration::from_millis(20)).await;
                }
                deleted => return deleted.expect("DeleteVolume"),
            }
        }
    }

    pub async fn snapshot(&mut self, name: &str, volume_id: &str) -> String {
        self.client.create_snapshot(name, volume_id).await.expect("CreateSnapshot").snapshot_id
    }

    /// The 4 KiB blocks of a delta.
    pub async fn changed(&mut self, base: &str, target: &str) -> Vec<u64> {
        blocks_of(&self.client.delta(base, target, 0, 0).await.expect("GetMetadataDelta"), BLOCK)
    }

    /// The 4 KiB blocks that hold data.
    pub async fn allocated(&mut self, snapshot: &str) -> Vec<u64> {
        blocks_of(&self.client.allocated(snapshot, 0, 0).await.expect("GetMetadataAllocated"), BLOCK)
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
