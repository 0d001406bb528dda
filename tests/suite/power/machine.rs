//! A machine whose disk can lose power: the disk, its filesystem, and a driver with its data directory there.

use std::fs::File;
use std::path::PathBuf;
use std::process::Child;
use std::sync::Arc;
use std::time::{Duration, Instant};

use csi_client::Client;
use deltapath::sys::loopdev::{Access, LoopDevice};
use deltapath::sys::mount;
use deltapath::sys::sweep::{devices_below, sweep};
use tempfile::TempDir;

use testkit::disk::{self, Rack};
use testkit::{PoolKind, driver_command, signal, wait};

/// The image is sparse, and much larger than what is ever written.
const DISK: u64 = 16 << 30;

/// The filesystem of the machine's disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Host {
    Ext4,
    Xfs,
    Btrfs,
}

impl Host {
    pub fn name(self) -> &'static str {
        match self {
            Host::Ext4 => "ext4",
            Host::Xfs => "xfs",
            Host::Btrfs => "btrfs",
        }
    }
}

pub struct Machine {
    pub rack: Arc<Rack>,
    host: Host,
    pool: PoolKind,
    device: Option<LoopDevice>,
    driver: Option<Child>,
    dir: TempDir,
}

impl Machine {
    /// A machine that is switched off, with an empty filesystem on its disk, which has number 0.
    pub fn new(host: Host, pool: PoolKind) -> Self {
        let dir = testkit::temp_dir();
        let rack = Arc::new(Rack::start(&dir.path().join("rack"), DISK));
        std::fs::create_dir_all(dir.path().join("machine/data")).expect("directories");
        let mut machine = Machine { rack, host, pool, device: None, driver: None, dir };
        let device = LoopDevice::attach(&machine.rack.path(0), Access::ReadWrite).expect("attach");
        disk::format(&machine.device.insert(device).path(), host.name());
        machine.off();
        machine
    }

    fn root(&self) -> PathBuf {
        self.dir.path().join("machine")
    }

    /// Where the disk is mounted: the driver's data directory.
    pub fn data_dir(&self) -> PathBuf {
        self.root().join("data")
    }

    pub fn pool_dir(&self) -> PathBuf {
        self.data_dir().join("pool")
    }

    pub fn kubelet(&self) -> PathBuf {
        self.root().join("kubelet")
    }

    /// The driver's log since its start.
    pub fn log(&self) -> String {
        std::fs::read_to_string(self.root().join("driver.log")).unwrap_or_default()
    }

    /// Switches on the machine with one of the rack's disks.
    pub fn boot(&mut self, disk: usize) -> Result<(), String> {
        let device = LoopDevice::attach(&self.rack.path(disk), Access::ReadWrite).expect("attach");
        let path = device.path();
        self.device = Some(device);
        disk::mount_disk(&path, self.host.name(), &self.data_dir())
    }

    /// Starts the driver, and calls `meanwhile` repeatedly until it answers.
    pub async fn start(&mut self, mut meanwhile: impl AsyncFnMut()) -> Result<Client, String> {
        let socket = self.root().join("csi.sock");
        let _ = std::fs::remove_file(&socket);
        let log = File::create(self.root().join("driver.log")).expect("log");
        let driver = driver_command(&self.root(), self.pool)
            .args(["--retain-deleted", &super::RETAINED.to_string()])
            .env("RUST_LOG", "info")
            .stderr(log)
            .spawn();
        let driver = self.driver.insert(driver.expect("start the driver"));
        let deadline = Instant::now() + Duration::from_secs(60);
        loop {
            if let Ok(client) = Client::connect(&socket, Duration::ZERO).await {
                return Ok(client);
            }
            if let Some(status) = driver.try_wait().expect("wait") {
                return Err(format!("the driver does not start, {status}"));
            }
            if Instant::now() > deadline {
                return Err("the driver does not start in a minute".into());
            }
            meanwhile().await;
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    }

    /// Stops the driver in order.
    pub fn stop(&mut self) -> Result<(), String> {
        let mut driver = self.driver.take().expect("the driver runs");
        signal(driver.id(), nix::sys::signal::Signal::SIGTERM);
        match wait(&mut driver, Duration::from_secs(60)) {
            status if status.success() => Ok(()),
            status => Err(format!("the driver ended with {status}")),
        }
    }

    /// Switches off the machine in any state. What is in memory is no longer needed.
    pub fn off(&mut self) {
        if let Some(mut driver) = self.driver.take() {
            let _ = driver.kill();
            let _ = driver.wait();
        }
        // Volumes are unmounted before the pool that holds them.
        for mount in mount::mounts().expect("mounts").iter().rev() {
            if mount.mount_point.starts_with(self.kubelet()) {
                mount::unmount(&mount.mount_point).expect("unmount");
            }
        }
        for device in devices_below(&self.pool_dir()).expect("devices") {
            device.detach().expect("detach");
        }
        let left = sweep(&self.root()).expect("sweep");
        assert!(left.is_empty(), "could not be freed: {left:?}");
        if let Some(device) = self.device.take() {
            detach(device);
        }
    }
}

/// Detaches a disk. If another mount namespace has a copy of a mount, the kernel frees the device when that namespace
/// ends.
fn detach(device: LoopDevice) {
    let deadline = Instant::now() + Duration::from_secs(20);
    while !device.clone().detach().expect("detach") {
        if Instant::now() > deadline {
            eprintln!("{} is held by another mount namespace, and goes with it", device.path().display());
            return;
        }
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        if let Some(mut driver) = self.driver.take() {
            let _ = driver.kill();
            let _ = driver.wait();
        }
        if std::thread::panicking() {
            eprintln!("the driver's log:\n{}", self.log());
        }
        let left = sweep(&self.root());
        if let Some(device) = self.device.take() {
            let _ = device.detach();
        }
        if !std::thread::panicking() {
            let left = left.expect("sweep");
            assert!(left.is_empty(), "could not be freed: {left:?}");
        }
    }
}
