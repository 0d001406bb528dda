//! The volumes and what writes them: fio, which verifies what it wrote, and between two passes a volume is
//! unpublished and published again.

use std::path::PathBuf;
use std::process::Stdio;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use proto::VolumeCapability;
use tokio::sync::RwLock;

use crate::{Failed, World, add};
use testkit::prelude::*;

/// What fio writes to a volume: a file, or the first bytes of a raw device. Behind it, raw devices are the
/// backup's to write.
pub const FIO_BYTES: u64 = 16 * MIB as u64;

const VOLUMES: usize = 16;

/// What a volume is: every second one raw, the others with each filesystem in turn.
fn kind(number: usize) -> Option<&'static str> {
    (number % 2 == 1).then(|| ["ext4", "xfs", "btrfs"][number / 2 % 3])
}

pub struct Volume {
    pub number: usize,
    /// The filesystem, if it has one.
    pub fs_type: Option<&'static str>,
    pub id: String,
    pub capacity: AtomicU64,
    /// Where it is published.
    pub target: Mutex<PathBuf>,
    /// Held shared by writers, alone by those who need it still or gone.
    pub writers: RwLock<()>,
}

impl Volume {
    pub fn capability(&self) -> VolumeCapability {
        self.fs_type.map_or_else(block_capability, mount_capability)
    }

    pub fn target(&self) -> PathBuf {
        self.target.lock().expect("target").clone()
    }

    pub fn capacity(&self) -> u64 {
        self.capacity.load(Ordering::Relaxed)
    }

    /// Unpublishes and publishes it. The caller alone holds its writers.
    pub async fn publish_again(&self, world: &World) -> Result<(), Failed> {
        unpublish(world, &self.id).await?;
        let target = publish(world, &self.id, self.capability(), false).await?;
        *self.target.lock().expect("target") = target;
        add(&world.counts.moves, 1);
        Ok(())
    }

    /// Whether a copy of it needs writers to pause: it is raw, and copies take time.
    pub fn must_be_still(&self, pool: PoolKind) -> bool {
        self.fs_type.is_none() && pool == PoolKind::Dir
    }
}

pub async fn make_volumes(world: &World) -> Result<&'static [Volume], Failed> {
    let mut volumes = Vec::new();
    for number in 0..VOLUMES {
        let fs_type = kind(number);
        let capability = fs_type.map_or_else(block_capability, mount_capability);
        let bytes = match fs_type {
            None => 48 * MIB,
            Some("ext4") => 96 * MIB,
            Some("btrfs") => 256 * MIB,
            Some(_) => 320 * MIB,
        };
        let request = new_volume(&format!("soak {number}"), bytes, capability.clone());
        let id = create(world, &request).await?;
        let target = publish(world, &id, capability, false).await?;
        volumes.push(Volume {
            number,
            fs_type,
            id,
            capacity: AtomicU64::new(bytes as u64),
            target: Mutex::new(target),
            writers: RwLock::default(),
        });
    }
    Ok(Box::leak(volumes.into_boxed_slice()))
}

pub async fn publish(
    world: &World,
    id: &str,
    capability: VolumeCapability,
    read_only: bool,
) -> Result<PathBuf, Failed> {
    let capability = &capability;
    let publish = |mut client: Client| async move {
        client.publish(id, capability.clone(), read_only, &world.kubelet).await
    };
    world.link.call("publish", publish).await
}

pub async fn create(world: &World, request: &proto::CreateVolumeRequest) -> Result<String, Failed> {
    let create = |mut client: Client| async move { client.create_volume(request.clone()).await };
    Ok(world.link.call("CreateVolume", create).await?.volume_id)
}

pub async fn unpublish(world: &World, id: &str) -> Result<(), Failed> {
    world.link.call("unpublish", |mut client| async move { client.unpublish(id, &world.kubelet).await }).await
}

/// Keeps a volume written, pass after pass.
pub async fn write(world: &'static World, volume: &'static Volume) {
    let mut pass = 0;
    while !world.is_over() {
        let done = async {
            let _room = world.room.read().await;
            {
                let _writing = volume.writers.read().await;
                fio(world, volume, pass).await?;
            }
            pass += 1;
            if u64::is_multiple_of(pass, 3) && !world.is_over() {
                let _alone = volume.writers.write().await;
                volume.publish_again(world).await?;
            }
            Ok::<_, Failed>(())
        };
        if let Err(what) = done.await {
            world.fail(format!("volume {} ({:?}): {what}", volume.number, volume.fs_type));
        }
        // A copy that needs the volume still gets its turn.
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

/// One pass: random blocks are written, read back and held against their checksums.
async fn fio(world: &World, volume: &Volume, pass: u64) -> Result<(), Failed> {
    let target = volume.target();
    let file = if volume.fs_type.is_some() { target.join("fio") } else { target };
    // Half of the passes through the page cache, half past it.
    let direct = u64::from((pass + volume.number as u64).is_multiple_of(2));
    let seed = pass * 100 + volume.number as u64 + 1;
    let output = tokio::process::Command::new("fio")
        .args(["--name=soak", "--rw=randwrite", "--bsrange=4k-64k", "--ioengine=psync", "--fsync=64"])
        .args(["--verify=crc32c", "--verify_fatal=1", "--verify_backlog=64", "--verify_state_save=0"])
        .args(["--rate=8m,1m", "--output-format=json"])
        .arg(format!("--filename={}", file.display()))
        .arg(format!("--size={FIO_BYTES}"))
        .arg(format!("--direct={direct}"))
        .arg(format!("--randseed={seed}"))
        .current_dir(&world.dir)
        .stdin(Stdio::null())
        .process_group(0)
        .kill_on_drop(true)
        .output()
        .await
        .map_err(|error| format!("fio cannot be run: {error}"))?;
    let (text, errors) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    if !output.status.success() {
        return Err(format!("fio ended with {}: {errors}{text}", output.status));
    }
    // Notes may stand before the report.
    let report = text.find('{').map(|at| serde_json::from_str::<serde_json::Value>(&text[at..]));
    let Some(Ok(report)) = report else { return Err(format!("fio's report cannot be read: {text}")) };
    let job = &report["jobs"][0];
    let bytes = |side: &str| job[side]["io_bytes"].as_u64().unwrap_or(0);
    let (written, verified) = (bytes("write"), bytes("read"));
    if job["error"] != 0 || written == 0 || verified < written {
        return Err(format!("fio wrote {written} bytes and verified {verified}: {errors}{job}"));
    }
    add(&world.counts.fio_written, written);
    add(&world.counts.fio_verified, verified);
    add(&world.counts.passes, 1);
    Ok(())
}
