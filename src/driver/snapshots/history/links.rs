//! The links between the snapshots of a volume: each `changed` map names the snapshot it is relative to.

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::driver::error::{Error, Result};
use crate::driver::snapshots::history::hold::{Histories, History, header};
use crate::driver::snapshots::history::skips::span;
use crate::store::SnapshotRecord;
use base::{Block, DraftFile, ObjectDir, Stop};
use cbt::{self, DeltaScan, Found, MapFile, MapHeader, MapWriter, Relation, Side};
use files::durable;

/// The most links between two snapshots that a delta follows, since each keeps a file open. Beyond that, all blocks that
/// either snapshot holds are compared. With skip maps, a chain of 30,000 snapshots has shorter ways.
const MAX_LINKS: usize = 64;

/// How often a comparison in the background looks up from its work.
const POLL_INTERVAL: Duration = Duration::from_secs(1);

impl Histories {
    /// Opens the maps, hashes and data of a snapshot for a comparison.
    pub(in crate::driver) fn side(&self, record: &SnapshotRecord, stop: &Stop) -> Result<Side> {
        let dir = self.shared.store.snapshot_dir(record);
        let fresh = self.fresh.of(&record.id);
        let side = self.healed(record, stop, || Side::open(&dir, fresh.clone()));
        let is_to_hash = side.as_ref().is_ok_and(|side| side.fresh.is_some());
        // The index is read after the entry was made: it may have been removed before.
        if !(is_to_hash && self.shared.store.read(|index| index.known(&record.id).is_some())) {
            self.fresh.forget(&record.id);
        }
        let side = side.map_err(|error| Error::gone_or(error, record))?;
        // The index is read after the open: bytes are freed only after the deletion.
        if side.data.is_none() && self.shared.store.read(|index| index.snapshot(&record.id).is_some()) {
            let source = std::io::ErrorKind::NotFound.into();
            return Err(files::Error { operation: "open", path: side.data_path, at: None, source }.into());
        }
        Ok(side)
    }

    /// The `changed` and skip maps on the way from `target` back to `base`; `None` if a link is missing.
    pub(in crate::driver) fn way(
        &self,
        base: &SnapshotRecord,
        target: &SnapshotRecord,
    ) -> Result<Option<Vec<MapFile>>> {
        let mut maps = Vec::new();
        let mut at = Arc::new(target.clone());
        while at.id != base.id {
            let Some((map, before)) = self.longest_link(&at, base)? else { return Ok(None) };
            maps.push(map);
            if maps.len() > MAX_LINKS {
                return Ok(None);
            }
            at = before;
        }
        Ok(Some(maps))
    }

    /// The link of a snapshot that leads furthest back, but not past `base`, and the snapshot that it leads to.
    fn longest_link(
        &self,
        at: &SnapshotRecord,
        base: &SnapshotRecord,
    ) -> Result<Option<(MapFile, Arc<SnapshotRecord>)>> {
        let dir = self.shared.store.snapshot_dir(at);
        let before = |map: &MapFile| {
            let id = &map.header().relative_to.as_ref()?.snapshot;
            let before = self.shared.store.read(|index| index.known(id))?;
            (before.sequence >= base.sequence).then_some(before)
        };
        // Within one span of a level, its link leads past the base.
        let may_lead_there = |level: &u32| span(at.sequence, *level) > span(base.sequence, *level);
        for level in ObjectDir::SKIPS.rev().filter(may_lead_there) {
            // One that is missing, damaged or of a later version is not needed.
            if let Ok(Some(map)) = MapFile::open_sound(&dir.skip(level))
                && let Some(before) = before(&map)
            {
                return Ok(Some((map, before)));
            }
        }
        match MapFile::open_sound(&dir.changed()) {
            Err(cbt::Error::Sys(error)) if error.is_not_found() => Ok(None),
            map => Ok(map?.and_then(|map| before(&map).map(|before| (map, before)))),
        }
    }

    /// Writes the map of the blocks that differ between two snapshots, of those that `way` lists.
    pub(in crate::driver) fn write_differences(
        &self,
        fresh: &Path,
        base: &SnapshotRecord,
        record: &SnapshotRecord,
        way: Vec<MapFile>,
        stop: &Stop,
    ) -> Result<()> {
        durable::prepare(fresh, |fresh| {
            let relative_to = Some(Relation { snapshot: base.id.clone(), exact: true });
            let mut writer = MapWriter::create(fresh, MapHeader { relative_to, ..header(record) })?;
            let (base, target) = (self.side(base, stop)?, self.side(record, stop)?);
            let mut scan = DeltaScan::new(base, target, Some(way), Block(0));
            loop {
                match scan.next_run(stop, Instant::now() + POLL_INTERVAL)? {
                    Found::Run(run) => writer.insert(run)?,
                    Found::Nothing => {}
                    Found::End => return Ok(writer.finish()?),
                }
            }
        })
    }
}

impl History<'_> {
    /// Replaces the `changed` map of a snapshot by `fresh`, which lists only the blocks that a comparison found to differ.
    /// If the map is relative to another snapshot by now, or was compared already, `fresh` is removed instead.
    pub(in crate::driver) fn keep_compared(
        &self,
        record: &SnapshotRecord,
        relation: &Relation,
        fresh: &Path,
    ) -> Result<()> {
        let changed = self.histories.shared.store.snapshot_dir(record).changed();
        match MapFile::open(&changed) {
            Ok(now) if now.header().relative_to.as_ref() == Some(relation) => {
                Ok(durable::replace_soon_by(fresh, &changed)?)
            }
            _ => Ok(durable::remove(fresh)?),
        }
    }

    /// Merges the changes of a snapshot that is removed into those of the next one.
    pub(super) fn merge_into_next(&self, gone: &SnapshotRecord) {
        if let Err(error) = self.hand_changes_on(gone) {
            // Without the link, a delta across the gap compares all blocks: slower, and equally exact.
            tracing::warn!(snapshot_id = %gone.id, error = base::report(&error), "the changed map of a removed snapshot was not merged into the next one's");
        }
        self.remove_skips_to(gone);
    }

    /// Merges the changes of a snapshot that is removed into those of the next one, whose map then
    /// is relative to the parent of the removed one.
    ///
    /// 1. Write the union next to the next one's map and sync it: a crash leaves a draft that the next merge replaces.
    /// 2. Rename it over the map and sync: the map names the snapshot that it is relative to, so both change at once.
    ///    After a crash here the snapshot still exists, but no map is relative to it, so deltas from it compare all
    ///    blocks.
    fn hand_changes_on(&self, gone: &SnapshotRecord) -> Result<()> {
        if !gone.tracking {
            return Ok(());
        }
        let next = self
            .histories
            .shared
            .store
            .read(|index| index.line_in(&gone.volume, gone.sequence + 1..).next().cloned());
        let Some(next) = next else { return Ok(()) };
        let next_dir = self.histories.shared.store.snapshot_dir(&next);
        let theirs = MapFile::open(&next_dir.changed())?;
        if theirs.header().relative_to.as_ref().is_none_or(|relation| relation.snapshot != gone.id) {
            return Ok(());
        }
        let ours = MapFile::open(&self.histories.shared.store.snapshot_dir(gone).changed())?;
        // The first snapshot's changes are not merged: no delta starts before it, and the map would grow without limit.
        let relation = ours.header().relative_to.clone();
        let is_known = |relation: &Relation| {
            self.histories.shared.store.read(|index| index.known(&relation.snapshot)).is_some()
        };
        let Some(relation) = relation.filter(is_known) else { return Ok(()) };
        // A block that changed twice may have its old content again, so the union is not exact.
        let relative_to = Some(Relation { exact: false, ..relation });
        let header = MapHeader { relative_to, ..theirs.header().clone() };
        let changed = next_dir.changed();
        durable::replace_with(&changed, &DraftFile::New.of(&changed), |fresh| {
            cbt::write_union(fresh, header, &[&ours, &theirs], &Stop::default())
                .map_err(Error::from)
                .map(drop)
        })?;
        self.histories.queue.add(&next, self.histories.pending_bytes(&next));
        Ok(())
    }
}
