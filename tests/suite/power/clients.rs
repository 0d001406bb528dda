//! Clients that make every kind of call that changes something, and record what was acknowledged.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use fastrand::Rng;

use super::stage::{Moment, NAMES, Stage, Turn, WISHES, Wish};
use crate::model::calls::{Access, Call, From, Members, Name, NameSet, NewName, NewVolume, Ref, Size};
use crate::model::wire::{Answer, Reply, make};
use crate::model::world::Bytes;
use testkit::prelude::*;

pub const SIZE: i64 = 8 * MIB;
const LARGEST: i64 = 20 * MIB;
const STEP: i64 = 2 * MIB;
/// Values of `readAheadKiB`.
const READ_AHEAD: [&str; 6] = ["4", "16", "64", "256", "512", "1024"];

/// A client. Its objects belong to no other, so none of its calls may fail.
pub struct Worker {
    number: usize,
    client: Client,
    kubelet: PathBuf,
    stage: Arc<Stage>,
    random: Rng,
    stop: Arc<AtomicBool>,
    names: NameSet,
    /// The devices of its volumes.
    devices: BTreeMap<Name, PathBuf>,
}

/// The names of a client's objects.
struct Own {
    volumes: Vec<Name>,
    snapshots: Vec<Name>,
    groups: Vec<Name>,
}

impl Own {
    fn at(moment: &Moment, names: NameSet) -> Self {
        let world = &moment.world;
        let of = |there: BTreeSet<Name>, names: &[char]| {
            names.iter().map(|name| Name(*name)).filter(|name| there.contains(name)).collect()
        };
        Own {
            volumes: of(world.volumes.values().map(|volume| volume.name).collect(), names.volumes),
            snapshots: of(world.snapshots.values().filter_map(|one| one.name).collect(), names.snapshots),
            groups: of(world.groups.values().map(|group| group.name).collect(), names.groups),
        }
    }
}

fn free(names: &[char], taken: &[Name]) -> Option<Name> {
    names.iter().map(|name| Name(*name)).find(|name| !taken.contains(name))
}

impl Worker {
    pub fn new(
        number: usize,
        client: Client,
        kubelet: PathBuf,
        stage: Arc<Stage>,
        stop: Arc<AtomicBool>,
        seed: u64,
    ) -> Self {
        let (random, names, devices) = (Rng::with_seed(seed), NAMES[number], BTreeMap::new());
        Worker { number, client, kubelet, stage, random, stop, names, devices }
    }

    /// Works until `stop` is set.
    pub async fn work(mut self) {
        self.make(Wish::CreateVolume).await;
        while !self.stop.load(Ordering::Relaxed) {
            let usual = self.usual();
            match self.stage.turn(self.number) {
                Turn::Wait => {}
                Turn::Free => drop(self.make(usual).await),
                Turn::This(wish) => {
                    // If it cannot be done yet, another action may make it possible.
                    if !self.make(wish).await {
                        self.make(usual).await;
                    }
                    continue;
                }
            }
            tokio::time::sleep(Duration::from_millis(1 + self.random.u64(0..8))).await;
        }
    }

    fn usual(&mut self) -> Wish {
        let mut rest = self.random.u32(0..WISHES.iter().map(|(_, often)| often).sum());
        let chosen = WISHES.iter().find(|(_, often)| {
            let is_it = rest < *often;
            rest = rest.saturating_sub(*often);
            is_it
        });
        chosen.expect("less than the sum").0
    }

    /// Does what is wished for, and returns whether that was possible: some calls need an object, and the number and size of
    /// objects are limited.
    async fn make(&mut self, wish: Wish) -> bool {
        let own = self.stage.look(|moment| Own::at(moment, self.names));
        let volume = self.random.choice(&own.volumes).copied();
        if let (Wish::Write | Wish::Discard, Some(volume)) = (wish, volume) {
            self.write(wish, volume);
            return true;
        }
        let Some(call) = self.call(wish, &own, volume) else { return false };
        if let (Call::DeleteVolume(of), Some(volume)) = (&call, volume) {
            let id = self.stage.look(|moment| moment.names.volume(of));
            self.devices.remove(&volume);
            self.client.unpublish(&id, &self.kubelet).await.expect("unpublish");
        }
        let asked = self.stage.begin(self.number, call);
        let answer = make(&mut self.client, &asked).await;
        self.stage.end(self.number, wish, &asked, &answer);
        if let (
            Call::CreateVolume(NewVolume { name: NewName::Fine(name), .. }),
            Answer::Done(Reply::Volume(made)),
        ) = (&asked.call, &answer)
        {
            let device = self.client.publish(&made.volume_id, block_capability(), false, &self.kubelet).await;
            self.devices.insert(*name, device.expect("publish"));
        }
        true
    }

    /// The call for a wish, on one of the client's volumes if it needs one.
    fn call(&mut self, wish: Wish, own: &Own, volume: Option<Name>) -> Option<Call> {
        let names = self.names;
        let new = |from| {
            let bytes = if from == From::Nothing { SIZE } else { 0 };
            let name = free(names.volumes, &own.volumes)?;
            Some(Call::CreateVolume(NewVolume::plain(name, Access::Block, bytes, from)))
        };
        let Some(volume) = volume else { return new(From::Nothing) };
        let of = Ref::Last(volume);
        match wish {
            Wish::Write | Wish::Discard => None,
            Wish::CreateVolume => new(From::Nothing),
            Wish::Restore => new(From::Snapshot(Ref::Last(*own.snapshots.first()?))),
            Wish::Clone => new(From::Volume(of)),
            Wish::CreateSnapshot => free(names.snapshots, &own.snapshots).map(|name| Call::CreateSnapshot {
                name: NewName::Fine(name),
                volume: of,
                style: None,
            }),
            Wish::DeleteSnapshot => {
                let snapshot = self.random.choice(&own.snapshots).filter(|_| own.snapshots.len() > 1)?;
                Some(Call::DeleteSnapshot(Ref::Last(*snapshot)))
            }
            Wish::CreateGroup => {
                let volumes = own.volumes.iter().take(2).map(|name| Ref::Last(*name)).collect();
                let name = NewName::Fine(free(names.groups, &own.groups)?);
                Some(Call::CreateGroup { name, volumes, style: None })
            }
            Wish::DeleteGroup => {
                let group = Ref::Last(*own.groups.first()?);
                Some(Call::DeleteGroup { group, members: Members::All })
            }
            Wish::Expand => {
                let id = self.stage.look(|moment| moment.names.volume(&of));
                let size = self.stage.look(|moment| moment.world.volumes[&id].capacity) as i64 + STEP;
                let size = Size { required: size, limit: 0 };
                (size.required <= LARGEST).then_some(Call::Expand { volume: of, size, asked: None })
            }
            Wish::Modify => {
                // A value different from the current one, so that a lost change shows.
                let set = self
                    .stage
                    .look(|moment| moment.world.volumes[&moment.names.volume(&of)].read_ahead.clone());
                let others = READ_AHEAD.iter().filter(|kib| !set.contains(&kib.parse().ok()));
                let read_ahead = self.random.choice(others.collect::<Vec<_>>())?;
                Some(Call::Modify { volume: of, read_ahead, direct_io: None })
            }
            Wish::DeleteVolume => (own.volumes.len() > 1).then_some(Call::DeleteVolume(of)),
        }
    }

    /// Writes or discards, and syncs. Only what fsync(2) acknowledged counts.
    fn write(&mut self, wish: Wish, volume: Name) {
        let (id, capacity, mut content) = self.stage.look(|moment| {
            let id = moment.names.volume(&Ref::Last(volume));
            let of = &moment.world.volumes[&id];
            let Bytes::Raw(content) = &of.bytes else { panic!("a Block volume") };
            (id, of.capacity, content.clone())
        });
        let blocks = capacity / BLOCK;
        let start = self.random.u64(0..blocks);
        let longest: u64 = if wish == Wish::Write { 60 } else { 200 };
        let count = 1 + self.random.u64(0..longest.min(blocks - start));
        let fill = (wish == Wish::Write).then(|| self.random.u8(1..));
        self.stage.begin_write(&id, (start..start + count).map(|block| (block, fill)));
        let device = &self.devices[&volume];
        tokio::task::block_in_place(|| change(&mut content, device, start, count, fill));
        self.stage.end_write(self.number, wish, &id, content);
    }
}

fn change(content: &mut Content, device: &Path, start: u64, count: u64, fill: Option<u8>) {
    match fill {
        Some(fill) => content.write(device, start, count, fill),
        None => content.discard(device, start, count),
    }
    open_device(device).sync_all().expect("sync the device");
}
