//! The boot after a power cut: what must be there is there and whole, what must be gone is gone, what was on
//! the way is whole or absent, nothing else is there, and the driver works.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};

use csi_client::{Client, block_capability, from_snapshot, new_volume};
use proto::{ListSnapshotsRequest, ListVolumesRequest};

use super::found::{Found, Record};
use super::machine::Machine;
use super::model::{Cut, Model, Phase, Snapshot, Volume};
use testkit::content::{Content, block_bytes, blocks_of, open_device};
use testkit::{BLOCK, names};

/// Deltas asked of one boot at most.
const DELTAS: usize = 80;

/// What an audit looked at, and what it missed.
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

/// Boots the machine with the disk that a cut left, looks at everything, and switches it off again.
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
    if !cut.model.volumes.is_empty() {
        // Before anything is mended: maps and hashes are as the data says.
        findings.losses.extend(verify(&machine.data_dir()));
    }
    let mut client = machine.start(async || ()).await?;
    let pool = machine.pool_dir();
    let staging = pool.join("staging");
    let deadline = Instant::now() + Duration::from_secs(20);
    // What was deleted may be settled behind.
    while !names(&staging).is_empty() {
        if Instant::now() > deadline {
            return Err(format!("staging holds {:?}", names(&staging)));
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    let found = Found::on(&pool, &cut.model)?;
    let mut model = cut.model.clone();
    compare_lists(&mut client, &found, findings).await;
    compare_volumes(&mut client, &found, &model, findings).await;
    compare_snapshots(&mut client, &found, &mut model, findings).await;
    compare_deltas(&mut client, &found, &model, findings).await;
    findings.losses.extend(check(&machine.data_dir()));
    if findings.losses.is_empty() {
        work(machine, &mut client, &found, &model, findings).await?;
    }
    drop(client);
    machine.stop()
}

/// `deltapath verify` finds nothing.
fn verify(data_dir: &Path) -> Option<String> {
    let (code, said) = examine("verify", data_dir);
    (code != Some(0)).then(|| format!("verify: {said}"))
}

/// `deltapath check` finds leftovers at most: a file beside a record that was to replace it.
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

/// The lists say what is on the disk.
async fn compare_lists(client: &mut Client, found: &Found, findings: &mut Findings) {
    let volumes = client.controller.list_volumes(ListVolumesRequest::default()).await;
    if let Some(list) = findings.take(volumes, || "ListVolumes".into()) {
        let ids: BTreeSet<String> =
            list.into_inner().entries.into_iter().filter_map(|entry| Some(entry.volume?.volume_id)).collect();
        let there = found.volumes.values().map(|record| record.id.clone()).collect();
        findings.expect(ids == there, || format!("volumes {there:?} are on the disk, {ids:?} are listed"));
    }
    let snapshots = client.controller.list_snapshots(ListSnapshotsRequest::default()).await;
    if let Some(list) = findings.take(snapshots, || "ListSnapshots".into()) {
        let entries = list.into_inner().entries;
        let ids: BTreeSet<String> =
            entries.into_iter().filter_map(|entry| Some(entry.snapshot?.snapshot_id)).collect();
        let there = found.snapshots.values().map(|record| record.id.clone()).collect();
        findings.expect(ids == there, || format!("snapshots {there:?} are on the disk, {ids:?} are listed"));
    }
}

/// Whether an object is there, or not, as its phase demands.
fn compare_phase(
    name: &str,
    phase: Phase,
    id: Option<&String>,
    found: Option<&Record>,
    findings: &mut Findings,
) {
    findings.objects += 1;
    match found {
        None => findings.expect(!phase.must_be(), || format!("{name} was acknowledged and is lost")),
        Some(record) => {
            findings.expect(phase.may_be(), || format!("{name} was deleted and is back"));
            findings.expect(id.is_none_or(|id| *id == record.id), || format!("{name} has another id"));
        }
    }
}

async fn compare_volumes(client: &mut Client, found: &Found, model: &Model, findings: &mut Findings) {
    for name in found.volumes.keys() {
        findings.expect(model.volumes.contains_key(name), || format!("nobody asked for {name}"));
    }
    let listed = client.controller.list_volumes(ListVolumesRequest::default()).await;
    let listed = listed.map(|list| list.into_inner().entries).unwrap_or_default();
    for (name, volume) in &model.volumes {
        let record = found.volumes.get(name);
        compare_phase(name, volume.phase, volume.id.as_ref(), record, findings);
        let Some(record) = record else { continue };
        let sizes = [Some(volume.size), volume.growing];
        let entry = listed
            .iter()
            .filter_map(|entry| entry.volume.as_ref())
            .find(|entry| entry.volume_id == record.id);
        let capacity = entry.map(|entry| entry.capacity_bytes as u64);
        findings.expect(capacity.is_some() && sizes.contains(&capacity), || {
            format!("{name} has {capacity:?} bytes and not {}", volume.size)
        });
        let read_ahead = record.json["tuning"]["read_ahead_kib"].as_u64().map(|kib| kib as u32);
        let allowed =
            read_ahead == volume.read_ahead || volume.retuned.is_some() && read_ahead == volume.retuned;
        findings.expect(allowed, || {
            format!("{name} has a read-ahead of {read_ahead:?} and not {:?}", volume.read_ahead)
        });
        compare_bytes(name, &record.data(), volume.size, &volume.content, &volume.unsure, findings);
    }
}

/// Compares a file with what was written; an unsure block may be as before or as after its write.
fn compare_bytes(
    name: &str,
    path: &Path,
    size: u64,
    content: &Content,
    unsure: &BTreeMap<u64, Option<u8>>,
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
            !before && !unsure.get(block).is_some_and(|after| is(*block, found, *after))
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

async fn compare_snapshots(client: &mut Client, found: &Found, model: &mut Model, findings: &mut Findings) {
    for name in found.groups.keys() {
        findings.expect(model.groups.contains_key(name), || format!("nobody asked for {name}"));
    }
    for (name, group) in &model.groups {
        let record = found.groups.get(name);
        compare_phase(name, group.phase, group.id.as_ref(), record, findings);
        let members = |(_, member): &(&String, &Snapshot)| member.group.as_ref() == Some(name);
        let wanted = model.snapshots.iter().filter(members).count();
        let prefix = format!("{name}/");
        let there = found.snapshots.keys().filter(|key| key.starts_with(&prefix)).count();
        let whole = if record.is_some() { wanted } else { 0 };
        findings.expect(there == whole, || format!("{name} has {there} members, not {whole}"));
    }
    for name in found.snapshots.keys() {
        findings.expect(model.snapshots.contains_key(name), || format!("nobody asked for {name}"));
    }
    for (name, snapshot) in &mut model.snapshots {
        let record = found.snapshots.get(name);
        compare_phase(name, snapshot.phase, snapshot.id.as_ref(), record, findings);
        let Some(record) = record else { continue };
        snapshot.id = Some(record.id.clone());
        compare_bytes(name, &record.data(), snapshot.size, &snapshot.content, &BTreeMap::new(), findings);
        let allocated = client.allocated(&record.id, 0, 0).await;
        let Some(list) = findings.take(allocated, || format!("{name}: allocated")) else { continue };
        findings.expect(list.capacity == snapshot.size, || format!("{name} has {} bytes", list.capacity));
        findings.expect(blocks_of(&list, BLOCK) == snapshot.content.allocated(BLOCK), || {
            format!("{name}: not the blocks that were allocated")
        });
    }
}

/// Deltas to every snapshot from all before it, deleted ones among them.
async fn compare_deltas(client: &mut Client, found: &Found, model: &Model, findings: &mut Findings) {
    let mut pairs = Vec::new();
    for (name, target) in model.snapshots.iter().filter(|(name, _)| found.snapshots.contains_key(*name)) {
        let line = model.snapshots.iter().filter(|(_, base)| base.volume == target.volume);
        let mut bases: Vec<_> =
            line.filter(|(_, base)| base.order < target.order && base.phase != Phase::Making).collect();
        bases.sort_by_key(|(_, base)| std::cmp::Reverse(base.order));
        pairs.extend(bases.into_iter().enumerate().map(|(distance, base)| (distance, base, (name, target))));
    }
    // The nearest ones first.
    pairs.sort_by_key(|(distance, ..)| *distance);
    for (_, (base_name, base), (target_name, target)) in pairs.into_iter().take(DELTAS) {
        let (Some(base_id), Some(target_id)) = (&base.id, &target.id) else { continue };
        let reported = || format!("the delta from {base_name} ({:?}) to {target_name}", base.phase);
        let Some(delta) = findings.take(client.delta(base_id, target_id, 0, 0).await, reported) else {
            continue;
        };
        let changed = target.content.changed_since(&base.content, BLOCK);
        findings.expect(blocks_of(&delta, BLOCK) == changed, || format!("{} is wrong", reported()));
    }
}

/// The driver goes on with what it found.
async fn work(
    machine: &Machine,
    client: &mut Client,
    found: &Found,
    model: &Model,
    findings: &mut Findings,
) -> Result<(), String> {
    let reported = |error: csi_client::Error| format!("after the cut: {error}");
    let kubelet = machine.kubelet();
    let whole = |(name, _): &(&String, &Volume)| found.volumes.contains_key(*name);
    let chosen = model.volumes.iter().rfind(whole);
    let volume = match chosen {
        Some((name, _)) => found.volumes[name].id.clone(),
        None => {
            let request = new_volume("after", super::clients::SIZE, block_capability());
            client.create_volume(request).await.map_err(reported)?.volume_id
        }
    };
    let device = client.publish(&volume, block_capability(), false, &kubelet).await.map_err(reported)?;
    let mut content = Content::default();
    let mut base = None;
    if let Some((name, volume)) = chosen {
        content = read_content(&device, volume);
        let line = model
            .snapshots
            .iter()
            .filter(|(key, snapshot)| snapshot.volume == *name && found.snapshots.contains_key(*key));
        base = line.max_by_key(|(_, snapshot)| snapshot.order).map(|(_, snapshot)| snapshot.clone());
    }
    content.write(&device, 77, 5, 99);
    open_device(&device).sync_all().map_err(|error| format!("sync the device: {error}"))?;
    let snapshot = client.create_snapshot("after the cut", &volume).await.map_err(reported)?;
    let data = machine.pool_dir().join("snapshots").join(&snapshot.snapshot_id).join("bytes/data.img");
    compare_bytes(
        "the first snapshot after the cut",
        &data,
        snapshot.size_bytes as u64,
        &content,
        &BTreeMap::new(),
        findings,
    );
    if let Some(base) = base {
        let id = base.id.expect("found");
        let delta = client.delta(&id, &snapshot.snapshot_id, 0, 0).await.map_err(reported)?;
        let changed = content.changed_since(&base.content, BLOCK);
        findings
            .expect(blocks_of(&delta, BLOCK) == changed, || "the first delta after the cut is wrong".into());
    }
    let mut request = new_volume("restored", 0, block_capability());
    request.volume_content_source = Some(from_snapshot(&snapshot.snapshot_id));
    let restored = client.create_volume(request).await.map_err(reported)?.volume_id;
    client.delete_snapshot(&snapshot.snapshot_id).await.map_err(reported)?;
    client.delete_volume(&restored).await.map_err(reported)?;
    client.unpublish(&volume, &kubelet).await.map_err(reported)?;
    client.delete_volume(&volume).await.map_err(reported)
}

/// What a volume holds, where a write to it was on the way.
fn read_content(device: &Path, volume: &Volume) -> Content {
    let file = open_device(device);
    let mut content: Content = (*Arc::clone(&volume.content)).clone();
    for (block, after) in &volume.unsure {
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
