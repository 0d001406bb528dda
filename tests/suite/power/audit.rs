//! The boot after a power cut. What was acknowledged is there and whole, what was deleted is gone, what a running call was
//! making is whole or absent, there is nothing else, and the driver works. The model knows the possible states: a power cut
//! interrupts calls like a kill.

use std::collections::BTreeMap;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use super::found::Found;
use super::machine::Machine;
use super::stage::{Cut, Moment};
use crate::model::calls::{Call, Cut as Part, Pages};
use crate::model::names::Asked;
use crate::model::rounds::{Event, Listed, explain};
use crate::model::wire::{Answer, make};
use crate::model::world::{Bytes, Snapshot, Volume, World};
use testkit::content::block_bytes;
use testkit::prelude::*;

/// The most deltas that are compared after one boot.
const DELTAS: usize = 80;

/// The number of objects that an audit checked, and its findings.
#[derive(Default)]
pub struct Findings {
    pub objects: usize,
    pub losses: Vec<String>,
}

impl Findings {
    fn expect(&mut self, holds: bool, otherwise: impl FnOnce() -> String) {
        if !holds {
            self.losses.push(otherwise());
        }
    }

    /// The value, or its error as a loss.
    fn take<T>(
        &mut self,
        result: Result<T, impl std::fmt::Display>,
        what: impl FnOnce() -> String,
    ) -> Option<T> {
        match result {
            Ok(value) => Some(value),
            Err(error) => {
                self.losses.push(format!("{}: {error}", what()));
                None
            }
        }
    }
}

/// Boots the machine with the disk after a cut, checks everything, and switches it off again.
pub async fn audit(machine: &mut Machine, cut: &Cut) -> Findings {
    let mut findings = Findings::default();
    if let Err(error) = boot(machine, cut, &mut findings).await {
        findings.losses.push(error);
    }
    let log = machine.log();
    for line in log.lines().filter(|line| line.contains("ERROR") || line.contains("panicked")) {
        findings.losses.push(format!("in the log: {line}"));
    }
    machine.off();
    machine.rack.scrap(cut.disk);
    findings
}

async fn boot(machine: &mut Machine, cut: &Cut, findings: &mut Findings) -> Result<(), String> {
    machine.boot(cut.disk)?;
    if !cut.moment.world.volumes.is_empty() {
        // Before the driver repairs anything, maps and hashes match the data.
        findings.losses.extend(verify(&machine.data_dir()));
    }
    let client = machine.start(async || ()).await?;
    let pool = machine.pool_dir();
    let staging = pool.join("staging");
    let deadline = Instant::now() + Duration::from_secs(20);
    // Deleted objects may be removed in the background.
    while !names(&staging).is_empty() {
        if Instant::now() > deadline {
            return Err(format!("staging holds {:?}", names(&staging)));
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    let mut audit = Audit { client, found: Found::on(&pool)?, moment: &cut.moment, findings };
    let world = audit.world_that_fits().await.map_err(|reason| cut.moment.names.spelled(&reason))?;
    audit.volumes(&world);
    audit.snapshots(world.clone()).await;
    audit.deltas(world.clone()).await;
    audit.findings.losses.extend(check(&machine.data_dir()));
    if audit.findings.losses.is_empty() {
        audit.work(machine, &world).await?;
    }
    drop(audit);
    machine.stop()
}

/// `deltapath verify` finds nothing.
fn verify(data_dir: &Path) -> Option<String> {
    let (code, said) = examine("verify", data_dir);
    (code != Some(0)).then(|| format!("verify: {said}"))
}

/// `deltapath check` finds nothing but drafts.
fn check(data_dir: &Path) -> Option<String> {
    let (code, said) = examine("check", data_dir);
    let is_draft = |line: &str| {
        let path = line.strip_prefix("leftover: ").and_then(|line| line.split(": ").next());
        path.is_some_and(|path| path.ends_with(".new") || path.ends_with(".compared"))
    };
    let found =
        |line: &&str| ["damage: ", "leftover: ", "stranger: "].iter().any(|kind| line.starts_with(kind));
    let drafts_alone = code == Some(3) && said.lines().filter(found).all(is_draft);
    (code != Some(0) && !drafts_alone).then(|| format!("check: {said}"))
}

fn examine(command: &str, data_dir: &Path) -> (Option<i32>, String) {
    let mut examine = Command::new(testkit::program("deltapath"));
    let done = examine.arg(command).arg("--data-dir").arg(data_dir).output().expect("run it");
    let said = [done.stdout, done.stderr].concat();
    (done.status.code(), String::from_utf8_lossy(&said).trim().to_owned())
}

struct Audit<'c> {
    client: Client,
    found: Found,
    moment: &'c Moment,
    findings: &'c mut Findings,
}

impl Audit<'_> {
    async fn ask(&mut self, call: Call) -> Event {
        let asked = Asked { call, names: self.moment.names.clone() };
        let answer = make(&mut self.client, &asked).await;
        Event { asked, answer }
    }

    /// The acknowledged state, with the outcome of each interrupted call that the lists and records show.
    async fn world_that_fits(&mut self) -> Result<World, String> {
        let volumes = self.ask(Call::ListVolumes(Pages::ALL)).await;
        let snapshots = self.ask(Call::ListSnapshots { pages: Pages::ALL, of: None, only: None }).await;
        let listed = Listed::of(&volumes.answer, &snapshots.answer)?;
        let cut = self.moment.under_way.values();
        let cut: Vec<Event> = cut.map(|asked| Event { asked: asked.clone(), answer: Answer::Cut }).collect();
        let mut worlds = explain(std::slice::from_ref(&self.moment.world), &cut, &listed)?;
        for list in [volumes, snapshots] {
            worlds = explain(&worlds, &[list], &Listed::default())?;
        }
        let mut reason = String::new();
        let mut fitting = worlds.into_iter().filter(|world| match self.found.fits(world) {
            Ok(()) => true,
            Err(said) => {
                reason = said;
                false
            }
        });
        fitting.next().ok_or(reason)
    }

    fn volumes(&mut self, world: &World) {
        for (id, volume) in &world.volumes {
            let (record, name) = (&self.found.volumes[id], format!("volume {}", volume.name));
            let nothing = BTreeMap::new();
            let unsynced = self.moment.unsynced.get(id).unwrap_or(&nothing);
            compare_bytes(
                &name,
                &record.data(),
                volume.capacity,
                raw(&volume.bytes),
                unsynced,
                self.findings,
            );
        }
        self.findings.objects += world.volumes.len() + world.groups.len();
    }

    async fn snapshots(&mut self, mut world: World) {
        for (id, snapshot) in world.snapshots.clone() {
            let name = shown(&snapshot, &world);
            let data = self.found.snapshots[&id].data();
            let nothing = BTreeMap::new();
            compare_bytes(&name, &data, snapshot.capacity, raw(&snapshot.bytes), &nothing, self.findings);
            let list = Answer::of_blocks(self.client.allocated(&id, 0, 0).await);
            if let Err(reason) = world.judge(|world| world.allocated(&id, Part::WHOLE, &list), &list) {
                self.findings.losses.push(format!("the blocks of {name}: {reason}"));
            }
        }
        self.findings.objects += world.snapshots.len();
    }

    /// Compares the deltas to every snapshot from all earlier ones, including deleted ones.
    async fn deltas(&mut self, mut world: World) {
        let mut pairs = Vec::new();
        for (id, target) in &world.snapshots {
            let line = world.snapshots.iter().chain(&world.retained);
            let mut bases: Vec<(&String, &Snapshot)> = line
                .filter(|(_, base)| base.volume == target.volume && base.sequence < target.sequence)
                .collect();
            bases.sort_by_key(|(_, base)| std::cmp::Reverse(base.sequence));
            let named = |(base, of): (&String, &Snapshot)| (base.clone(), shown(of, &world));
            pairs.extend(
                bases
                    .into_iter()
                    .map(named)
                    .enumerate()
                    .map(|(distance, base)| (distance, base, id.clone(), shown(target, &world))),
            );
        }
        // The pairs with the smallest distance first.
        pairs.sort_by_key(|(distance, ..)| *distance);
        for (_, (base, base_name), target, target_name) in pairs.into_iter().take(DELTAS) {
            let list = Answer::of_blocks(self.client.delta(&base, &target, 0, 0).await);
            if let Err(reason) = world.judge(|world| world.delta(&base, &target, Part::WHOLE, &list), &list) {
                self.findings.losses.push(format!("the delta from {base_name} to {target_name}: {reason}"));
            }
        }
    }

    /// Checks that the driver can continue to work.
    async fn work(&mut self, machine: &Machine, world: &World) -> Result<(), String> {
        let reported = |error: csi_client::Error| format!("after the cut: {error}");
        let (kubelet, client) = (machine.kubelet(), &mut self.client);
        let chosen = world.volumes.iter().max_by_key(|(_, volume)| volume.name);
        let volume = match chosen {
            Some((id, _)) => id.clone(),
            None => {
                let request = csi_client::new_volume("after", super::clients::SIZE, block_capability());
                client.create_volume(request).await.map_err(reported)?.volume_id
            }
        };
        let device = client.publish(&volume, block_capability(), false, &kubelet).await.map_err(reported)?;
        let mut content = Content::default();
        let mut base = None;
        if let Some((id, volume)) = chosen {
            content = read_content(&device, volume, self.moment.unsynced.get(id));
            let line = world.snapshots.iter().filter(|(_, snapshot)| snapshot.volume == *id);
            base = line.max_by_key(|(_, snapshot)| snapshot.sequence);
        }
        content.write(&device, 77, 5, 99);
        open_device(&device).sync_all().map_err(|error| format!("sync the device: {error}"))?;
        let snapshot = client.create_snapshot("after the cut", &volume).await.map_err(reported)?;
        let data = machine.pool_dir().join("snapshots").join(&snapshot.snapshot_id).join("bytes/data.img");
        let (name, size) = ("the first snapshot after the cut", snapshot.size_bytes as u64);
        compare_bytes(name, &data, size, &content, &BTreeMap::new(), self.findings);
        if let Some((id, base)) = base {
            let delta = client.delta(id, &snapshot.snapshot_id, 0, 0).await.map_err(reported)?;
            let changed = content.changed_since(raw(&base.bytes), BLOCK);
            let is_right = blocks_of(&delta, BLOCK) == changed;
            self.findings.expect(is_right, || "the first delta after the cut is wrong".into());
        }
        let request =
            new_volume_from("restored", 0, block_capability(), from_snapshot(&snapshot.snapshot_id));
        let restored = client.create_volume(request).await.map_err(reported)?.volume_id;
        client.delete_snapshot(&snapshot.snapshot_id).await.map_err(reported)?;
        client.delete_volume(&restored).await.map_err(reported)?;
        client.unpublish(&volume, &kubelet).await.map_err(reported)?;
        client.delete_volume(&volume).await.map_err(reported)
    }
}

fn raw(bytes: &Bytes) -> &Content {
    match bytes {
        Bytes::Raw(content) => content,
        other => panic!("all volumes here are devices, and not {other:?}"),
    }
}

fn shown(snapshot: &Snapshot, world: &World) -> String {
    match (&snapshot.name, snapshot.group.as_ref().and_then(|group| world.groups.get(group))) {
        (Some(name), _) => format!("snapshot {name}"),
        (None, Some(group)) => format!("the member of group {} that is of {}", group.name, snapshot.volume),
        (None, None) => format!("a member of a deleted group, of {}", snapshot.volume),
    }
}

/// Compares a file with the written content. A block that was not synced may be as before or as after its write.
fn compare_bytes(
    name: &str,
    path: &Path,
    size: u64,
    content: &Content,
    unsynced: &BTreeMap<u64, Option<u8>>,
    findings: &mut Findings,
) {
    let Some(file) = findings.take(File::open(path), || format!("{name}: {}", path.display())) else {
        return;
    };
    let length = file.metadata().map_or(0, |meta| meta.len());
    if length < size {
        findings.losses.push(format!("{name} is {length} bytes long, not {size}"));
        return;
    }
    let mut bytes = vec![0; size as usize];
    if findings.take(file.read_exact_at(&mut bytes, 0), || format!("{name}: read")).is_none() {
        return;
    }
    let zeros = [0; BLOCK as usize];
    let is = |block: u64, found: &[u8], fill: Option<u8>| match fill {
        None | Some(0) => found == zeros,
        Some(fill) => found == block_bytes(block, fill),
    };
    let wrong: Vec<u64> = (0..)
        .zip(bytes.chunks_exact(BLOCK as usize))
        .filter(|(block, found)| {
            let before = is(*block, found, content.blocks.get(block).copied());
            !before && !unsynced.get(block).is_some_and(|after| is(*block, found, *after))
        })
        .map(|(block, _)| block)
        .collect();
    findings.expect(wrong.is_empty(), || {
        format!(
            "{name}: {} blocks are not as written, among them {:?}",
            wrong.len(),
            &wrong[..wrong.len().min(5)]
        )
    });
}

/// The content of a volume whose last write may have been interrupted.
fn read_content(device: &Path, volume: &Volume, unsynced: Option<&BTreeMap<u64, Option<u8>>>) -> Content {
    let file = open_device(device);
    let mut content = raw(&volume.bytes).clone();
    for (block, after) in unsynced.into_iter().flatten() {
        let mut bytes = vec![0; BLOCK as usize];
        file.read_exact_at(&mut bytes, block * BLOCK).expect("read");
        if bytes.iter().all(|byte| *byte == 0) {
            content.blocks.remove(block);
        } else if let Some(fill) = after
            && bytes == block_bytes(*block, *fill)
        {
            content.blocks.insert(*block, *fill);
        }
    }
    content
}
