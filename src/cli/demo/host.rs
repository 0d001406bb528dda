//! The driver of the demo: this very program in a process of its own, in a directory of its own.

use std::error::Error;
use std::io::{Read, Seek, SeekFrom};
use std::os::unix::fs::MetadataExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use crate::pool::PoolRequest;
use crate::sys::sweep::sweep;
use base::{DataDirKey, Quantity, Stop};
use csi_client::{Client, block_capability};

/// How long the driver may take to answer, and to end.
const PATIENCE: Duration = Duration::from_secs(60);

pub(super) struct Host {
    child: Child,
    /// Made by the driver.
    dir: PathBuf,
    /// Connected to the driver.
    pub client: Client,
    published: Vec<String>,
}

impl Host {
    /// Starts a driver below `work_dir` and waits until it answers.
    pub async fn start(
        work_dir: &Path,
        pool: PoolRequest,
        size: Quantity,
        stop: &Stop,
    ) -> Result<Self, Box<dyn Error>> {
        let log = tempfile::tempfile_in(work_dir).map_err(|error| {
            let text = error.to_string();
            // Without the name that was tried.
            let why = text.split(" at path ").next().unwrap_or_default();
            format!("--work-dir {}: {why}", work_dir.display())
        })?;
        let dir = std::path::absolute(work_dir)?.join(format!("deltapath-demo-{}", DataDirKey::random()?));
        let socket = dir.join("csi.sock");
        let mut command = Command::new(std::env::current_exe()?);
        command
            .args(["driver", "--node-id", "demo", "--pool", pool.name()])
            .args(["--demo", &std::process::id().to_string()])
            .arg("--endpoint")
            .arg(format!("unix://{}", socket.display()))
            .arg("--data-dir")
            .arg(dir.join("data"))
            // Sparse: room for the volume, its snapshots and restores, whatever changes.
            .args(["--pool-size", &Quantity(size.0.saturating_mul(4).saturating_add(1 << 30)).to_string()])
            .env_remove("CSI_ENDPOINT")
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(log.try_clone()?)
            // Ctrl-C is for the demo, which then ends the driver in order.
            .process_group(0);
        let mut child = command.spawn()?;
        let deadline = Instant::now() + PATIENCE;
        let client = loop {
            if let Ok(client) = Client::connect(&socket, Duration::ZERO).await {
                break client;
            }
            let ended = child.try_wait()?;
            if ended.is_some() || Instant::now() > deadline || stop.check().is_err() {
                let _ = child.kill();
                let _ = child.wait();
                take_away(&dir);
                let mut said = String::new();
                let _ = (&log).seek(SeekFrom::Start(0)).and_then(|_| (&log).read_to_string(&mut said));
                let last = said.lines().last().unwrap_or("no error output").to_owned();
                return Err(format!("the driver did not start: {last}").into());
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        };
        Ok(Host { child, dir, client, published: Vec::new() })
    }

    /// A file of the demo's own.
    pub fn scratch(&self, name: &str) -> PathBuf {
        self.dir.join(name)
    }

    /// Stages and publishes a Block volume, and returns its device.
    pub async fn attach(&mut self, volume_id: &str, readonly: bool) -> Result<PathBuf, csi_client::Error> {
        self.published.push(volume_id.to_owned());
        let dir = self.dir.join("kubelet");
        self.client.publish(volume_id, block_capability(), readonly, &dir).await
    }

    /// Unpublishes and unstages it.
    pub async fn detach(&mut self, volume_id: &str) -> Result<(), csi_client::Error> {
        let dir = self.dir.join("kubelet");
        self.client.unpublish(volume_id, &dir).await?;
        self.published.retain(|published| published != volume_id);
        Ok(())
    }

    /// Ends the driver in order and removes all that the demo made. Returns what could not be.
    pub async fn stop(mut self) -> Vec<String> {
        let mut left = Vec::new();
        for volume_id in self.published.clone() {
            if let Err(error) = self.detach(&volume_id).await {
                left.push(format!("volume {volume_id}: {error}"));
            }
        }
        let pid = nix::unistd::Pid::from_raw(self.child.id() as i32);
        // A driver that is gone already gets no signal; waiting for it says so.
        let _ = nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGTERM);
        let deadline = Instant::now() + PATIENCE;
        loop {
            match self.child.try_wait() {
                Ok(Some(status)) if status.success() => break,
                Ok(Some(status)) => {
                    left.push(format!("the driver ended with {status}"));
                    break;
                }
                Ok(None) if Instant::now() < deadline => {
                    tokio::time::sleep(Duration::from_millis(10)).await;
                }
                _ => {
                    let _ = self.child.kill();
                    let _ = self.child.wait();
                    left.push("the driver did not end on SIGTERM; it was killed".to_owned());
                    break;
                }
            }
        }
        left.extend(take_away(&self.dir));
        left
    }
}

/// Removes all that the demo made, after its driver has ended. Returns what could not be.
pub fn take_away(dir: &Path) -> Vec<String> {
    // Its driver may not have made it, and another user may have taken the name meanwhile.
    let is_ours = |meta: std::fs::Metadata| meta.is_dir() && meta.uid() == nix::unistd::geteuid().as_raw();
    if !std::fs::symlink_metadata(dir).is_ok_and(is_ours) {
        return Vec::new();
    }
    let mut left = sweep(dir).unwrap_or_else(|error| vec![error.to_string()]);
    if let Err(error) = std::fs::remove_dir_all(dir) {
        left.push(format!("{}: {error}", dir.display()));
    }
    left
}
