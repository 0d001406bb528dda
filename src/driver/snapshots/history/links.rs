//! The links between the snapshots of a volume: each `changed` map names the snapshot it is relative to.

use std::path::Path;

use crate::driver::error::{Error, Result};
use crate::driver::snapshots::history::hold::{Histories, History};
use crate::store::SnapshotRecord;
use base::{DraftFile, Stop};
use cbt::{self, MapFile, MapHeader, Relation, Side};
use files::durable;

/// The most links between two snapshots that a delta follows, since each keeps a file open. Beyond that, all blocks that
/// either snapshot holds are compared.
const MAX_LINKS: usize = 64;

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

    /// The `changed` maps on the way from `target` back to `base`; `None` if a link is missing.
    pub(in crate::driver) fn way(
        &self,
        base: &SnapshotRecord,
        target: &SnapshotRecord,
    ) -> Result<Option<Vec<MapFile>>> {
        let mut maps = Vec::new();
        let mut at = target.clone();
        while at.id != base.id {
            let map = match MapFile::open_sound(&self.shared.store.snapshot_dir(&at).changed()) {
                Err(cbt::Error::Sys(error)) if error.is_not_found() => return Ok(None),
                map => map?,
            };
            let Some(map) = map else { return Ok(None) };
            let Some(before) = map.header().relative_to.clone() else { return Ok(None) };
            let before = self.shared.store.read(|index| index.known(&before.snapshot));
            let Some(before) = before.filter(|before| before.sequence >= base.sequence) else {
                return Ok(None);
            };
            maps.push(map);
            if maps.len() > MAX_LINKS {
                return Ok(None);
            }
            at = (*before).clone();
        }
        Ok(Some(maps))
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
    pub(super) fn hand_on(&self, gone: &SnapshotRecord) {
        if let Err(error) = self.hand_changes_on(gone) {
            // Without the link, a delta across the gap compares all blocks: slower, and equally exact.
            tracing::warn!(snapshot_id = %gone.id, error = base::report(&error), "the changed map of a removed snapshot was not merged into the next one's");
        }
    }

    /// Merges the changes of a snapshot that is removed into those of the next one, whose map then
    /// is relative to the parent of the removed one.
    ///
    /// 1. Write the union beside the next one's map and sync it: a crash leaves a draft that the next merge replaces.
    /// 2. Rename it over the map and sync: the map names the snapshot that it is relative to, so both change at once.
    ///    After a crash here the snapshot still exists, but no map is relative to it, so deltas from it compare all
    ///    blocks.
    fn hand_changes_on(&self, gone: &SnapshotRecord) -> Result<()> {
        if !gone.tracking {
            return Ok(());
        }
        let next =
            self.histories.shared.store.read(|index| {
                index.line(&gone.volume).find(|record| record.sequence > gone.sequence).cloned()
            });
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
