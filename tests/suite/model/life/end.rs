//! The end of a random sequence: every byte is compared, then everything is deleted, and nothing may be left.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;

use deltapath::sys::blockdev;
use deltapath::sys::loopdev::LoopDevice;
use deltapath::sys::sweep::devices_below;

use super::{BLOCK, Call, Duration, Instant, LETTING_GO, Life, MARK, MountPath, Name, Path, World, blocks};
use crate::model::calls::{Access, Cut, From, Members, NewVolume, Node, Ref};
use crate::model::world::{Bytes, Snapshot, Volume};
use testkit::content::{Content, block_bytes};
use testkit::names;

/// The name of volumes that are restored at the end.
const RESTORED: Name = Name('z');
/// How long the files of deleted objects may stay.
const SETTLING: Duration = Duration::from_secs(10);

impl Life<'_, '_> {
    /// Reads every stream, checks every volume, and restores every snapshot.
    pub(super) async fn look_at_all(&mut self) -> Result<(), String> {
        let snapshots: Vec<Ref> = self.snapshots().into_iter().map(|(of, _)| of).collect();
        for target in &snapshots {
            self.check(Call::Allocated { snapshot: *target, cut: Cut::WHOLE }).await?;
            for base in &snapshots {
                self.check(Call::Delta { base: *base, target: *target, cut: Cut::WHOLE }).await?;
            }
        }
        self.expand_again().await;
        self.look_at_volumes()?;
        for (of, snapshot) in self.snapshots() {
            self.restore(of, &snapshot).await?;
        }
        self.look().await
    }

    /// The existing snapshots that a name refers to.
    fn snapshots(&self) -> Vec<(Ref, Snapshot)> {
        let world = &self.known.worlds[0];
        let mut found = Vec::new();
        for (id, snapshot) in &world.snapshots {
            let of = match (&snapshot.group, snapshot.name) {
                (None, Some(name)) => Ref::Last(name),
                (Some(group), _) => {
                    let name = world.groups[group].name;
                    let place =
                        self.known.names.group(&Ref::Last(name)).1.iter().position(|member| member == id);
                    Ref::Member(name, place.unwrap_or(0))
                }
                _ => continue,
            };
            if self.known.names.snapshot(&of) == *id {
                found.push((of, snapshot.clone()));
            }
        }
        found
    }

    /// Compares the devices with the worlds.
    pub(super) async fn look_at_devices(&mut self) -> Result<(), String> {
        let ids: BTreeSet<String> =
            self.known.worlds.iter().flat_map(|world| world.volumes.keys().cloned()).collect();
        let lingers = |world: &World, devices: &BTreeMap<String, LoopDevice>| {
            let unused = |volume: &Volume| !volume.is_used() && volume.haunted.is_empty();
            world.volumes.iter().any(|(id, volume)| unused(volume) && devices.contains_key(id))
        };
        let deadline = Instant::now() + LETTING_GO;
        let mut devices = devices_of(&ids)?;
        while Instant::now() < deadline && self.known.worlds.iter().all(|world| lingers(world, &devices)) {
            tokio::time::sleep(Duration::from_millis(20)).await;
            devices = devices_of(&ids)?;
        }
        self.narrow(|world| {
            world.volumes.iter().try_for_each(|(id, volume)| {
                check_device(volume, devices.get(id))
                    .map_err(|said| format!("volume {}: {said}", volume.name))
            })
        })
    }

    /// Repeats all expansions, as a client does: an interrupted one may have grown the record and not the device.
    async fn expand_again(&mut self) {
        for proto::Volume { volume_id, capacity_bytes, .. } in
            self.rig.client.volumes().await.expect("ListVolumes")
        {
            self.rig.client.expand_volume(&volume_id, capacity_bytes).await.expect("ControllerExpandVolume");
        }
    }

    fn look_at_volumes(&mut self) -> Result<(), String> {
        let data = self.rig.data();
        let names = self.known.names.clone();
        self.narrow(|world| {
            for (id, volume) in &world.volumes {
                let data = data(id);
                let shown = |place: &MountPath| names.path(*place);
                let targets: Vec<String> = volume.published.iter().map(|there| shown(&there.at)).collect();
                let staged = volume.staged.as_ref().map(|staged| shown(&staged.at));
                check_bytes(volume, &data, targets.first(), staged.as_ref())
                    .map_err(|said| format!("volume {}: {said}", volume.name))?;
            }
            Ok(())
        })
    }

    /// Checks that a volume restored from a snapshot has its content.
    async fn restore(&mut self, of: Ref, snapshot: &Snapshot) -> Result<(), String> {
        let Bytes::Raw(content) = &snapshot.bytes else { return Ok(()) };
        if self.known.worlds[0].room(&self.known.names.snapshot(&of)) < snapshot.capacity {
            return Ok(());
        }
        let new = NewVolume::plain(RESTORED, Access::Block, 0, From::Snapshot(of));
        self.check(Call::CreateVolume(new)).await?;
        self.learn();
        let id = self.known.names.volume(&Ref::Last(RESTORED));
        compare(&self.rig.data()(&id), content, snapshot.capacity)
            .map_err(|said| format!("a volume restored from snapshot {of:?}: {said}"))?;
        self.check(Call::DeleteVolume(Ref::Last(RESTORED))).await
    }

    /// Undoes and deletes everything, and checks that nothing is left.
    pub(super) async fn clear(&mut self) -> Result<(), String> {
        // The capacity decides between worlds with and without an ephemeral volume, which no list shows.
        self.check(Call::GetCapacity { asked: None }).await?;
        let World { attach, volumes, ephemeral, snapshots, groups, .. } = self.known.worlds[0].clone();
        for (id, volume) in &volumes {
            let of = Ref::Last(volume.name);
            if self.known.names.volume(&of) != *id {
                return Err(format!("volume {} is not the last of its name", volume.name));
            }
            let haunted = volume.haunted.iter().copied();
            let places: Vec<MountPath> =
                haunted.chain(volume.published.iter().map(|published| published.at)).collect();
            for at in places.iter().copied().filter(|at| matches!(at, MountPath::Target(_))) {
                self.check(Call::Unpublish { volume: of, at }).await?;
            }
            let staged = volume.staged.iter().map(|staged| staged.at);
            for at in places.iter().copied().chain(staged).filter(|at| matches!(at, MountPath::Staging(_))) {
                self.check(Call::Unstage { volume: of, at }).await?;
            }
            if attach {
                self.check(Call::ControllerUnpublish { volume: of, node: Node::Empty }).await?;
            }
            self.check(Call::DeleteVolume(of)).await?;
        }
        for (handle, volume) in ephemeral {
            self.check(Call::UnpublishEphemeral { handle, at: volume.at }).await?;
        }
        for group in groups.values() {
            let call = Call::DeleteGroup { group: Ref::Last(group.name), members: Members::All };
            self.check(call).await?;
        }
        for name in snapshots.values().filter_map(|snapshot| snapshot.name) {
            self.check(Call::DeleteSnapshot(Ref::Last(name))).await?;
        }
        self.look().await?;
        for place in self.known.worlds[0].left.keys() {
            let path = self.known.names.path(*place);
            std::fs::remove_dir(&path).or_else(|_| std::fs::remove_file(&path)).expect("remove litter");
        }
        self.check(Call::GetCapacity { asked: None }).await?;
        self.nothing_is_left().await
    }

    async fn nothing_is_left(&mut self) -> Result<(), String> {
        let started = Instant::now();
        let left = || -> Vec<String> {
            let dirs = ["volumes", "snapshots", "groups", "staging"];
            let of = |pool: PathBuf| {
                let below = |dir: &str| {
                    names(&pool.join(dir)).into_iter().map(|name| format!("{dir}/{name}")).collect::<Vec<_>>()
                };
                let devices = devices_below(&pool).expect("devices").into_iter();
                let devices = devices.map(|device| device.path().display().to_string());
                dirs.into_iter().flat_map(below).chain(devices).collect::<Vec<_>>()
            };
            self.rig.rigs().into_iter().flat_map(|rig| of(rig.pool_dir())).collect()
        };
        while !left().is_empty() {
            // Files are removed in the background, and a device is free only when no other process has it open.
            let patience =
                if left().iter().all(|left| left.starts_with("/dev")) { LETTING_GO } else { SETTLING };
            if started.elapsed() > patience {
                return Err(format!("{} stay", left().join(", ")));
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        Ok(())
    }
}

fn check_bytes(
    volume: &Volume,
    data: &Path,
    target: Option<&String>,
    staged: Option<&String>,
) -> Result<(), String> {
    match (&volume.bytes, target, staged) {
        // Writes to a device may be only in its cache.
        (Bytes::Raw(content), Some(device), _) => compare(Path::new(device), content, volume.capacity),
        (Bytes::Raw(content), None, _) => compare(data, content, volume.capacity),
        (Bytes::Fs(_, file), _, Some(dir)) if volume.is_mounted() => {
            let found = std::fs::read(Path::new(dir).join(MARK)).ok();
            match found == file.map(|byte| vec![byte]) {
                true => Ok(()),
                false => Err(format!("the file on it holds {found:?}, want {file:?}")),
            }
        }
        _ => Ok(()),
    }
}

fn compare(path: &Path, content: &Content, capacity: u64) -> Result<(), String> {
    let file = File::open(path).map_err(|error| format!("open {}: {error}", path.display()))?;
    let mut found = vec![0; BLOCK as usize];
    for block in blocks(content, capacity) {
        file.read_exact_at(&mut found, block * BLOCK)
            .map_err(|error| format!("read block {block}: {error}"))?;
        let fill = content.blocks.get(&block).copied().unwrap_or(0);
        if found != block_bytes(block, fill) {
            return Err(format!("block {block} begins with {:?}, want fill {fill}", &found[..9]));
        }
    }
    Ok(())
}

/// The loop devices of volumes, by their ids.
fn devices_of(ids: &BTreeSet<String>) -> Result<BTreeMap<String, LoopDevice>, String> {
    let id_of =
        |path: &Path| path.iter().filter_map(|part| part.to_str()).find_map(|part| ids.get(part).cloned());
    let devices = LoopDevice::all_on(|path| id_of(path).is_some()).map_err(|error| error.to_string())?;
    Ok(devices.into_iter().filter_map(|device| Some((id_of(&device.backing_path()?)?, device))).collect())
}

/// Checks that a volume in use has a device of its size with its attributes, and that any other has none.
fn check_device(volume: &Volume, device: Option<&LoopDevice>) -> Result<(), String> {
    let used = volume.is_used();
    let Some(device) = device else {
        return if used { Err("it is in use and has no device".into()) } else { Ok(()) };
    };
    if !used {
        return match volume.haunted.is_empty() {
            true => Err(format!("nobody uses it, and {} is attached", device.path().display())),
            false => Ok(()),
        };
    }
    let size = blockdev::size(&device.path()).map_err(|error| error.to_string())?;
    if volume.grown && size != volume.capacity {
        return Err(format!("its device has {size} bytes, want {}", volume.capacity));
    }
    let found = std::fs::read_to_string(device.sysfs().join("queue/read_ahead_kb")).expect("sysfs");
    // Without the parameter the kernel chooses.
    let may_be = |kib: &Option<u32>| kib.is_none_or(|kib| found.trim() == kib.to_string());
    match volume.read_ahead.iter().any(may_be) {
        true => Ok(()),
        false => Err(format!("its device reads {} KiB ahead, want {:?}", found.trim(), volume.read_ahead)),
    }
}
