//! The backup of a volume: a file that every snapshot is copied into, all of the first one and what changed of the
//! others, and that is compared with each.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;
use std::time::Duration;

use csi_client::{BlockList, Client, block_capability, from_snapshot, from_volume, mount_capability};
use deltapath::sys;
use fastrand::Rng;
use files::punch_hole;

use crate::load::{FIO_BYTES, Volume, create, publish, unpublish};
use crate::{Failed, World, add, blocking};
use testkit::{MIB, PoolKind, new_volume_from, requests};

/// Bytes compared and copied at once.
const CHUNK: u64 = 1 << 20;
/// Where the marks of a raw device lie, and how many are kept; the rest behind them is scribbled over.
const MARKS: u64 = FIO_BYTES;
const MARK_SLOTS: u64 = 64;
const SCRIBBLE: u64 = MARKS + MARK_SLOTS * 4096;
/// What one expansion adds to a volume.
const GROWTH: u64 = 16 * MIB as u64;
/// The most expansions of a volume.
const MOST_GROWTHS: u64 = 6;

fn bytes(random: &mut Rng, length: u64) -> Vec<u8> {
    let mut bytes = vec![0; length as usize];
    random.fill(&mut bytes);
    bytes
}

struct Backup {
    world: &'static World,
    volume: &'static Volume,
    file: File,
    path: PathBuf,
    /// The snapshot that the file holds.
    base: Option<String>,
    dice: Rng,
    round: u64,
    growths: u64,
}

/// Keeps a volume's backup until the run is over.
pub async fn keep(world: &'static World, volume: &'static Volume) {
    let path = world.dir.join(format!("backup-{}", volume.number));
    let file =
        File::options().create(true).truncate(true).read(true).write(true).open(&path).expect("a backup");
    let dice = Rng::with_seed(0x9E37_79B9 + volume.number as u64 * 7919);
    let mut backup = Backup { world, volume, file, path, base: None, dice, round: 0, growths: 0 };
    while !world.is_over() {
        if let Err(what) = backup.round().await {
            world.fail(format!(
                "volume {} ({:?}), round {}: {what}",
                volume.number, volume.fs_type, backup.round
            ));
            break;
        }
        let pause = 1000 + backup.dice.u64(0..4000);
        tokio::time::sleep(Duration::from_millis(pause)).await;
    }
}

impl Backup {
    async fn round(&mut self) -> Result<(), Failed> {
        let (world, volume) = (self.world, self.volume);
        let _room = world.room.read().await;
        self.round += 1;
        let mark = {
            let _writing = volume.writers.read().await;
            blocking(|| self.scribble()).map_err(|error| format!("write: {error}"))?
        };
        let name = format!("soak {} {}", volume.number, self.round);
        let snapshot = {
            let _still = match volume.must_be_still(world.pool) {
                true => Some(volume.writers.write().await),
                false => None,
            };
            snapshot(world, &volume.id, &name).await?
        };
        add(&world.counts.snapshots, 1);
        let (id, size) = (snapshot.snapshot_id, snapshot.size_bytes as u64);
        let gone_before = self.base.is_some() && self.dice.u64(0..3) == 0;
        if gone_before {
            delete_snapshot(world, self.base.as_deref().expect("a base")).await?;
        }
        // Now and then from the start, so that no mistake of an early delta is copied over for ever.
        let list = match self.base.clone().filter(|_| !self.round.is_multiple_of(12)) {
            None => {
                self.file.set_len(0).map_err(|error| error.to_string())?;
                self.list("GetMetadataAllocated", None, &id).await?
            }
            Some(base) => {
                add(&world.counts.deltas, 1);
                add(&world.counts.deltas_of_deleted, u64::from(gone_before));
                self.list("GetMetadataDelta", Some(base), &id).await?
            }
        };
        if list.capacity != size {
            return Err(format!("the stream says {} bytes, the snapshot {size}", list.capacity));
        }
        let image = world.pool_dir.join("snapshots").join(&id).join("bytes/data.img");
        match self.round.is_multiple_of(3) {
            false => self.copy_and_compare(&list, &image, size, &mark)?,
            true => {
                let (restored, device) = self.restore(&name, &id, size, None).await?;
                self.copy_and_compare(&list, &device, size, &mark)?;
                self.drop_volume(&restored).await?;
                if let Some(fs_type) = volume.fs_type {
                    self.check_restored_file(&name, &id, size, fs_type, &mark).await?;
                }
            }
        }
        if let Some(base) = self.base.replace(id).filter(|_| !gone_before) {
            delete_snapshot(world, &base).await?;
        }
        if self.round.is_multiple_of(4) {
            self.clone_volume(&name).await?;
        }
        if self.round % 3 == 1 && self.growths < MOST_GROWTHS {
            self.expand().await?;
        }
        Ok(())
    }

    /// Writes what is acknowledged before the snapshot is taken, and must be in it: returns its content. On a raw
    /// device blocks are also scribbled over, zeroed and discarded.
    fn scribble(&mut self) -> io::Result<Vec<u8>> {
        let mark = bytes(&mut self.dice, 4096);
        if self.volume.fs_type.is_some() {
            let target = self.volume.target();
            let length = 4096 * (1 + self.dice.u64(0..16));
            std::fs::write(target.join(format!("data-{}", self.round % 8)), bytes(&mut self.dice, length))?;
            let _ = std::fs::remove_file(target.join(format!("data-{}", (self.round + 3) % 8)));
            let fresh = target.join("mark.new");
            let file = File::create(&fresh)?;
            file.write_all_at(&mark, 0)?;
            file.sync_all()?;
            std::fs::rename(fresh, target.join("mark"))?;
            File::open(&target)?.sync_all()?;
            return Ok(mark);
        }
        let device = File::options().read(true).write(true).open(self.volume.target())?;
        let blocks = (self.volume.capacity() - SCRIBBLE) / 4096;
        for _ in 0..8 {
            let (at, count) = (self.dice.u64(0..blocks - 16), 1 + self.dice.u64(0..16));
            let (offset, length) = (SCRIBBLE + at * 4096, count * 4096);
            match self.dice.u64(0..5) {
                0 => punch_hole(&device, offset, length)?,
                1 => device.write_all_at(&vec![0; length as usize], offset)?,
                _ => device.write_all_at(&bytes(&mut self.dice, length), offset)?,
            }
        }
        device.write_all_at(&mark, self.mark_offset())?;
        device.sync_all()?;
        Ok(mark)
    }

    fn mark_offset(&self) -> u64 {
        MARKS + self.round % MARK_SLOTS * 4096
    }

    async fn list(&self, what: &str, base: Option<String>, target: &str) -> Result<BlockList, Failed> {
        let base = base.as_deref();
        let list = |mut client: Client| async move {
            match base {
                None => client.allocated(target, 0, 0).await,
                Some(base) => client.delta(base, target, 0, 0).await,
            }
        };
        self.world.link.call(what, list).await
    }

    /// Copies what is listed, and compares all of the backup with the snapshot.
    fn copy_and_compare(
        &self,
        list: &BlockList,
        snapshot: &Path,
        size: u64,
        mark: &[u8],
    ) -> Result<(), Failed> {
        let done = blocking(|| {
            let from = File::open(snapshot)?;
            self.file.set_len(size)?;
            for tuple in list.tuples() {
                copy(&from, &self.file, tuple.offset, tuple.size)?;
            }
            add(&self.world.counts.copied, list.bytes());
            let differs = first_difference(&from, &self.file, size)?;
            add(&self.world.counts.compared, size);
            let mut found = vec![0; 4096];
            if self.volume.fs_type.is_none() {
                from.read_exact_at(&mut found, self.mark_offset())?;
            } else {
                found.copy_from_slice(mark);
            }
            Ok::<_, io::Error>((differs, found == mark))
        });
        let (differs, is_marked) = done.map_err(|error| format!("copy {}: {error}", snapshot.display()))?;
        if let Some(offset) = differs {
            return Err(format!(
                "the backup {} differs from {} at byte {offset}, of which the stream said nothing",
                self.path.display(),
                snapshot.display()
            ));
        }
        match is_marked {
            true => Ok(()),
            false => Err(format!("{} lacks what was synced before it was taken", snapshot.display())),
        }
    }

    /// A volume made from the snapshot and published for reading, raw or as a filesystem.
    async fn restore(
        &self,
        name: &str,
        id: &str,
        size: u64,
        fs_type: Option<&str>,
    ) -> Result<(String, PathBuf), Failed> {
        let capability = fs_type.map_or_else(block_capability, mount_capability);
        let name = format!("{name} restored {fs_type:?}");
        let request = new_volume_from(&name, size as i64, capability.clone(), from_snapshot(id));
        let restored = create(self.world, &request).await?;
        add(&self.world.counts.restores, 1);
        let target = publish(self.world, &restored, capability, true).await?;
        Ok((restored, target))
    }

    async fn drop_volume(&self, id: &str) -> Result<(), Failed> {
        unpublish(self.world, id).await?;
        delete_volume(self.world, id).await
    }

    /// The filesystem of a restored snapshot mounts and holds what was synced before.
    async fn check_restored_file(
        &self,
        name: &str,
        id: &str,
        size: u64,
        fs_type: &str,
        mark: &[u8],
    ) -> Result<(), Failed> {
        let (restored, target) = self.restore(name, id, size, Some(fs_type)).await?;
        let found = blocking(|| std::fs::read(target.join("mark")));
        self.drop_volume(&restored).await?;
        match found {
            Ok(found) if found == mark => Ok(()),
            Ok(_) => Err("a restored filesystem holds an older file than was synced".into()),
            Err(error) => Err(format!("a restored filesystem lacks a file: {error}")),
        }
    }

    async fn clone_volume(&self, name: &str) -> Result<(), Failed> {
        let _still = match self.volume.must_be_still(self.world.pool) {
            true => Some(self.volume.writers.write().await),
            false => None,
        };
        let (volume, size) = (self.volume, self.volume.capacity());
        let (name, source) = (format!("{name} clone"), from_volume(&volume.id));
        let request = new_volume_from(&name, size as i64, volume.capability(), source);
        let clone = create(self.world, &request).await?;
        add(&self.world.counts.clones, 1);
        delete_volume(self.world, &clone).await
    }

    async fn expand(&mut self) -> Result<(), Failed> {
        let (world, volume) = (self.world, self.volume);
        let wanted = volume.capacity() + GROWTH;
        let expand =
            |mut client: Client| async move { client.expand_volume(&volume.id, wanted as i64).await };
        let expanded = world.link.call("ControllerExpandVolume", expand).await?;
        if expanded.node_expansion_required && volume.fs_type == Some("ext4") && !can_grow_mounted_ext4() {
            let _alone = volume.writers.write().await;
            volume.publish_again(world).await?;
        } else if expanded.node_expansion_required {
            // Its place must stay while the node expands it.
            let _there = volume.writers.read().await;
            let mut request = requests::node_expand(&volume.id, volume.target());
            request.volume_capability = Some(volume.capability());
            let request = &request;
            let grow = |mut client: Client| async move {
                let grown = client.node.node_expand_volume(request.clone()).await;
                grown.map_err(|status| csi_client::Error { call: "NodeExpandVolume", status })
            };
            world.link.call("NodeExpandVolume", grow).await?;
        }
        volume.capacity.store(expanded.capacity_bytes as u64, Ordering::Relaxed);
        self.growths += 1;
        add(&world.counts.expansions, 1);
        Ok(())
    }
}

/// Growing a mounted ext4 takes a capability that a container may lack; the driver, which inherits ours, grows it
/// when it is staged again then.
fn can_grow_mounted_ext4() -> bool {
    sys::has_capability(sys::CAP_SYS_RESOURCE).expect("capabilities")
}

/// Takes groups of volumes until the run is over: filesystems, and one raw device beside them where a copy is one
/// step. Their members stand among the snapshots that deltas pass over.
pub async fn groups(world: &'static World, volumes: &'static [Volume]) {
    let mut dice = Rng::with_seed(77);
    let mut number = 0;
    while !world.is_over() {
        number += 1;
        let raw = volumes.iter().filter(|volume| volume.fs_type.is_none()).collect::<Vec<_>>();
        let other = volumes.iter().filter(|volume| volume.fs_type.is_some()).collect::<Vec<_>>();
        let first = dice.u64(0..other.len() as u64) as usize;
        let room = world.room.read().await;
        let mut ids = vec![other[first].id.clone(), other[(first + 1) % other.len()].id.clone()];
        if world.pool != PoolKind::Dir {
            ids.push(raw[dice.u64(0..raw.len() as u64) as usize].id.clone());
        }
        if let Err(what) = group(world, &format!("soak group {number}"), &ids).await {
            world.fail(format!("group {number}: {what}"));
        }
        drop(room);
        tokio::time::sleep(Duration::from_millis(3000 + dice.u64(0..3000))).await;
    }
}

async fn group(world: &World, name: &str, ids: &[String]) -> Result<(), Failed> {
    let create = |mut client: Client| async move { client.create_group(name, ids).await };
    let group = world.link.call("CreateVolumeGroupSnapshot", create).await?;
    add(&world.counts.groups, 1);
    let members = &testkit::members(&group);
    if members.len() != ids.len() {
        return Err(format!("{} members of {} volumes", members.len(), ids.len()));
    }
    for member in members {
        let allocated = |mut client: Client| async move { client.allocated(member, 0, 0).await };
        world.link.call("GetMetadataAllocated of a member", allocated).await?;
    }
    let id = &group.group_snapshot_id;
    let delete = |mut client: Client| async move { client.delete_group(id, members).await };
    world.link.call("DeleteVolumeGroupSnapshot", delete).await
}

pub async fn snapshot(world: &World, volume: &str, name: &str) -> Result<proto::Snapshot, Failed> {
    let create = |mut client: Client| async move { client.create_snapshot(name, volume).await };
    world.link.call("CreateSnapshot", create).await
}

pub async fn delete_snapshot(world: &World, id: &str) -> Result<(), Failed> {
    world.link.call("DeleteSnapshot", |mut client| async move { client.delete_snapshot(id).await }).await
}

pub async fn delete_volume(world: &World, id: &str) -> Result<(), Failed> {
    world.link.call("DeleteVolume", |mut client| async move { client.delete_volume(id).await }).await
}

fn copy(from: &File, to: &File, offset: u64, length: u64) -> io::Result<()> {
    let mut buffer = vec![0; CHUNK.min(length) as usize];
    let mut at = offset;
    while at < offset + length {
        let part = &mut buffer[..CHUNK.min(offset + length - at) as usize];
        from.read_exact_at(part, at)?;
        to.write_all_at(part, at)?;
        at += part.len() as u64;
    }
    Ok(())
}

/// The first byte at which two files differ, of `length` bytes.
pub fn first_difference(one: &File, other: &File, length: u64) -> io::Result<Option<u64>> {
    let (mut a, mut b) = (vec![0; CHUNK as usize], vec![0; CHUNK as usize]);
    let mut at = 0;
    while at < length {
        let count = CHUNK.min(length - at) as usize;
        one.read_exact_at(&mut a[..count], at)?;
        other.read_exact_at(&mut b[..count], at)?;
        if a[..count] != b[..count] {
            let within = a.iter().zip(&b).position(|(a, b)| a != b).unwrap_or(0);
            return Ok(Some(at + within as u64));
        }
        at += count as u64;
    }
    Ok(None)
}
