//! An audit of everything that needs no model: the driver and its disk agree, each object is whole or absent, records
//! explain each file, loop device and mount, and what was acknowledged is unchanged. `model/world.rs` has the results
//! that calls must have.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use base::Stop;
use deltapath::driver::{Inspected, Inspection, Severity};
use deltapath::store::SnapshotRecord;
use deltapath::sys::{freeze, mount};
use proto::{ListSnapshotsRequest, ListVolumesRequest};

use super::scene::{self, Scene};
use testkit::content::blocks_of;
use testkit::{BLOCK, Rig, names, root_of, state_of};

/// How long removal and hashing in the background may take. Hashing is slow while other tests run.
const PATIENCE: Duration = Duration::from_secs(90);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum When {
    /// After a call was interrupted, before its retry. There may be drafts, which a retry replaces.
    Cut,
    /// After a call in which a step failed, before its retry. The driver keeps running.
    Failed,
    /// After a call that succeeded. There must be no drafts.
    Done,
    /// After the round was undone. Everything must be as before it.
    Undone,
}

#[derive(Debug, Default)]
pub struct Findings {
    /// Acknowledged objects that are missing or changed, and half-made objects.
    pub losses: Vec<String>,
    /// Files, devices and mounts that no record explains.
    pub leaks: Vec<String>,
}

impl Findings {
    fn loss(&mut self, what: impl Into<String>) {
        self.losses.push(what.into());
    }

    fn leak(&mut self, what: impl Into<String>) {
        self.leaks.push(what.into());
    }
}

#[derive(Debug)]
struct ListedVolume {
    capacity: u64,
    attached: bool,
}

#[derive(Debug)]
struct ListedSnapshot {
    volume: String,
    /// Empty if it is not a member of a group.
    group: String,
}

#[derive(Debug)]
struct Listed {
    volumes: BTreeMap<String, ListedVolume>,
    snapshots: BTreeMap<String, ListedSnapshot>,
}

async fn listed(rig: &mut Rig) -> Listed {
    let controller = &mut rig.client.controller;
    let volumes = controller.list_volumes(ListVolumesRequest::default()).await.expect("list").into_inner();
    let snapshots =
        controller.list_snapshots(ListSnapshotsRequest::default()).await.expect("list").into_inner();
    let volumes = volumes.entries.into_iter().map(|entry| {
        let volume = entry.volume.expect("volume");
        let attached = entry.status.is_some_and(|status| !status.published_node_ids.is_empty());
        (volume.volume_id, ListedVolume { capacity: volume.capacity_bytes as u64, attached })
    });
    let snapshots = snapshots.entries.into_iter().map(|entry| {
        let snapshot = entry.snapshot.expect("snapshot");
        let of = ListedSnapshot { volume: snapshot.source_volume_id, group: snapshot.group_snapshot_id };
        (snapshot.snapshot_id, of)
    });
    Listed { volumes: volumes.collect(), snapshots: snapshots.collect() }
}

/// Makes the audit. New snapshots are added to the scene: from now on they must not change.
pub async fn audit(rig: &mut Rig, scene: &mut Scene, when: When) -> Findings {
    let mut found = Findings::default();
    let list = listed(rig).await;
    settle(rig, when, &mut found).await;
    objects(rig, scene, &list, when, &mut found);
    node(rig, scene, &mut found);
    snapshots(rig, scene, &list, when, &mut found).await;
    found
}

/// `deltapath check` finds nothing once background work is done.
async fn settle(rig: &Rig, when: When, found: &mut Findings) {
    let deadline = Instant::now() + PATIENCE;
    loop {
        let inspection = Inspection::open(&rig.data_dir()).expect("inspect");
        let mut wrong = inspection.check().expect("check");
        inspection.close().expect("close");
        // The test's own file that fills the pool.
        wrong.retain(|discovery| !discovery.path.ends_with("pool/ballast"));
        let draft = |path: &Path| path.extension().is_some_and(|end| end == "new" || end == "compared");
        if matches!(when, When::Cut | When::Failed) {
            wrong.retain(|discovery| match discovery.severity {
                Severity::Note => false,
                Severity::Leftover => !draft(&discovery.path),
                _ => true,
            });
        }
        let staging = names(&rig.pool_dir().join("staging"));
        if wrong.is_empty() && staging.is_empty() {
            return;
        }
        if Instant::now() > deadline {
            for discovery in wrong {
                let what = format!("{}: {}", discovery.path.display(), discovery.what);
                match discovery.severity {
                    Severity::Damage => found.loss(what),
                    _ => found.leak(what),
                }
            }
            staging.iter().for_each(|name| found.leak(format!("staging/{name}")));
            return;
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

fn json(path: &Path) -> Option<serde_json::Value> {
    serde_json::from_slice(&std::fs::read(path).ok()?).ok()
}

/// The objects on disk are the listed ones, and all acknowledged objects exist.
fn objects(rig: &Rig, scene: &Scene, list: &Listed, when: When, found: &mut Findings) {
    let pool = rig.pool_dir();
    let mut shown: BTreeSet<String> = list.volumes.keys().cloned().collect();
    for id in names(&pool.join("volumes")) {
        let dir = pool.join("volumes").join(&id);
        let Some(record) = json(&dir.join("record.json")) else {
            found.loss(format!("volume {id} has no record"));
            continue;
        };
        match list.volumes.get(&id) {
            Some(volume) => {
                if record["capacity"] != volume.capacity {
                    found.loss(format!("volume {id} is listed with {volume:?}, its record says {record}"));
                }
                let state = state_of(&pool, &id);
                // If only the last sync of a call failed, the new state may be in the file.
                if when != When::Failed && state["attached"].is_null() == volume.attached {
                    found.loss(format!("volume {id} is listed as {volume:?}, its state says {state}"));
                }
            }
            // Ephemeral volumes are not listed. A start removes those that were never published.
            None if !record["ephemeral"].is_null() && !state_of(&pool, &id)["staged"].is_null() => {}
            // After a failed call the volume may stay, since kubelet calls again.
            None if !record["ephemeral"].is_null() && when == When::Failed => {}
            None => found.leak(format!("volume {id} is on disk and not listed: {record}")),
        }
        shown.remove(&id);
    }
    shown.iter().for_each(|id| found.loss(format!("volume {id} is listed and not on disk")));
    let alone = list.snapshots.iter().filter(|(_, of)| of.group.is_empty()).map(|(id, _)| id.clone());
    // In this order: a deleted one may be removed since it was listed, and its deleted.json with it.
    let is_there = |kind: &str, id: &String| {
        let dir = pool.join(kind).join(id);
        !dir.join("deleted.json").exists() && dir.exists()
    };
    let mut there = names(&pool.join("snapshots"));
    there.retain(|id| is_there("snapshots", id));
    let alone = alone.collect::<Vec<_>>();
    if there != alone {
        found.loss(format!("snapshots on disk: {there:?}, listed: {alone:?}"));
    }
    for group in names(&pool.join("groups")).into_iter().filter(|id| is_there("groups", id)) {
        let members = list.snapshots.iter().filter(|(_, of)| of.group == group).map(|(id, _)| id.clone());
        let members: Vec<String> = members.collect();
        let there = names(&pool.join("groups").join(&group).join("members"));
        if there != members || members.len() != 2 {
            found.loss(format!("group {group} on disk: {there:?}, listed: {members:?}"));
        }
    }
    let volumes = [&scene.origin, &scene.other, &scene.raw, &scene.files];
    for id in volumes.iter().filter(|id| !list.volumes.contains_key(**id)) {
        found.loss(format!("volume {id} is gone"));
    }
    for (id, held) in &scene.volumes {
        match scene::hash(&pool.join("volumes").join(id).join("bytes/data.img")) {
            Ok(now) if now == *held => {}
            other => found.loss(format!("volume {id} does not hold what was written: {other:?}")),
        }
    }
    if when == When::Undone && (list.volumes.len() != volumes.len() || list.snapshots.len() != 2) {
        found.leak(format!("after the round there is more, or less, than before: {list:?}"));
    }
}

/// Every mount is in a `state.json`. The filesystem that is always mounted is there, with the right content and not
/// frozen.
fn node(rig: &Rig, scene: &Scene, found: &mut Findings) {
    let volumes = rig.pool_dir().join("volumes");
    let mut explained = BTreeSet::new();
    for id in names(&volumes) {
        let state = state_of(&rig.pool_dir(), &id);
        let published = state["published"].as_array().into_iter().flatten().map(|one| &one["target"]);
        let paths = published.chain([&state["staged"]["path"]]).filter_map(|path| path.as_str());
        explained.extend(paths.map(PathBuf::from));
    }
    let mounts = mount::mounts().expect("mounts");
    for mounted in mounts.iter().filter(|mounted| mounted.mount_point.starts_with(rig.kubelet())) {
        if !explained.contains(&mounted.mount_point) {
            found.leak(format!("mount {} is in no state.json", mounted.mount_point.display()));
        }
        if mounted.fs_type != "ext4" {
            continue;
        }
        match freeze::Frozen::freeze(root_of(mounted), Duration::from_secs(10)) {
            Ok(Some(frozen)) => frozen.thaw().expect("thaw"),
            other => found.leak(format!("{} is left frozen: {other:?}", mounted.mount_point.display())),
        }
    }
    if let Err(difference) = scene.check_files() {
        found.loss(difference);
    }
}

/// Snapshots have the acknowledged content, maps and hashes agree with it, and deltas list every difference and nothing
/// else.
async fn snapshots(rig: &mut Rig, scene: &mut Scene, list: &Listed, when: When, found: &mut Findings) {
    let inspection = Inspection::open(&rig.data_dir()).expect("inspect");
    let mut lines: BTreeMap<String, Vec<Arc<SnapshotRecord>>> = BTreeMap::new();
    for Inspected { record, .. } in inspection.snapshots() {
        match inspection.verify(&record.id, &|_| {}, &Stop::default()) {
            Ok(Some(wrong)) if wrong.is_empty() => {}
            wrong => found.loss(format!("snapshot {} does not agree with itself: {wrong:?}", record.id)),
        }
        lines.entry(record.volume.to_string()).or_default().push(record);
    }
    inspection.close().expect("close");
    let pool = rig.pool_dir();
    let image = |id: &str| {
        let group = &list.snapshots[id].group;
        match group.is_empty() {
            true => pool.join("snapshots").join(id).join("bytes/data.img"),
            false => pool.join("groups").join(group).join("members").join(id).join("bytes/data.img"),
        }
    };
    for (id, of) in &list.snapshots {
        let now = match scene::hash(&image(id)) {
            Ok(now) => now,
            Err(error) => {
                found.loss(format!("snapshot {id}: {error}"));
                continue;
            }
        };
        match (scene.snapshots.get(id), scene.volumes.get(&of.volume)) {
            (Some(before), _) if *before != now => found.loss(format!("snapshot {id} has changed")),
            (Some(_), _) => continue,
            (None, Some(content)) if *content != now => {
                found.loss(format!("snapshot {id} does not hold what its volume did"));
            }
            (None, None) if of.volume == scene.files => {
                if let Err(what) = scene::check_filesystem(&image(id)) {
                    found.loss(format!("snapshot {id} is no filesystem of one moment: {what}"));
                }
            }
            (None, _) => {}
        }
        scene.snapshots.insert(id.clone(), now);
    }
    // Forget the snapshots that the round deleted.
    scene.snapshots.retain(|id, _| list.snapshots.contains_key(id));
    if !list.snapshots.contains_key(&scene.snapshot) {
        found.loss(format!("snapshot {} is gone ({when:?})", scene.snapshot));
    }
    for line in lines.values_mut() {
        line.sort_by_key(|record| record.sequence);
        let listed = |record: &&Arc<SnapshotRecord>| list.snapshots.contains_key(record.id.as_str());
        let line: Vec<_> = line.iter().filter(listed).collect();
        for pair in line.windows(2) {
            delta(rig, &image, pair[0], pair[1], found).await;
        }
        if let [first, _, .., last] = line[..] {
            delta(rig, &image, first, last, found).await;
        }
    }
}

/// Compares a delta with the bytes of both snapshots.
async fn delta(
    rig: &mut Rig,
    image: &impl Fn(&str) -> PathBuf,
    base: &SnapshotRecord,
    target: &SnapshotRecord,
    found: &mut Findings,
) {
    let (base, target) = (base.id.as_str(), target.id.as_str());
    let read = |id: &str| std::fs::read(image(id)).unwrap_or_default();
    let (before, after) = (read(base), read(target));
    let blocks = before.chunks(BLOCK as usize).zip(after.chunks(BLOCK as usize)).enumerate();
    let differing = blocks.filter(|(_, (a, b))| a != b).map(|(block, _)| block as u64);
    match rig.client.delta(base, target, 0, 0).await {
        Ok(list) => {
            let (reported, true_ones) = (blocks_of(&list, BLOCK), differing.collect::<Vec<_>>());
            if reported != true_ones {
                found
                    .loss(format!("the delta from {base} to {target} tells {reported:?}, not {true_ones:?}"));
            }
        }
        Err(error) => found.loss(format!("the delta from {base} to {target}: {error}")),
    }
}
