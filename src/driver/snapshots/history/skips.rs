//! Skip maps: what changed over many snapshots at once, so that a delta over a long chain reads few maps.
//!
//! A level cuts the sequence numbers of a volume's snapshots into spans of [`FAN`]^level. The first snapshot of a span has
//! a `skip-LEVEL.map`, relative to the first snapshot of the nearest earlier span that has a snapshot. So each level is a chain
//! from the newest span to the oldest, also where snapshots are removed, and the way between two of n snapshots has about
//! 2 FAN log(n) maps. None is made that leads to the oldest snapshot: rotation removes that one next.
//!
//! A skip map has the format and the promise of a `changed` map: it may list too much, never too little. Nothing needs it:
//! [`Histories::way`] takes shorter links where one is missing. The hashing thread makes those that are missing, and a
//! [`History`] removes one together with the snapshot that it is relative to.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use crate::driver::error::Result;
use crate::driver::snapshots::history::hold::{Histories, History};
use crate::store::SnapshotRecord;
use base::{DraftFile, ObjectDir, SnapshotId, Stop};
use cbt::MapFile;
use files::{change, durable};

/// How many spans of a level a span of the next has. The driver of the tests makes skip maps over 2 snapshots, not 8.
const FAN: u64 = if cfg!(feature = "failpoints") { 2 } else { 8 };

/// The snapshots of a volume by sequence number.
type Line = BTreeMap<u64, SnapshotId>;

/// The span of a level that a sequence number is in.
pub(super) fn span(sequence: u64, level: u32) -> u64 {
    sequence / FAN.pow(level)
}

fn first_from(line: &Line, sequence: u64) -> Option<u64> {
    line.range(sequence..).next().map(|(sequence, _)| *sequence)
}

/// Whether a snapshot is the first of its span.
fn is_first(line: &Line, sequence: u64, level: u32) -> bool {
    first_from(line, span(sequence, level) * FAN.pow(level)) == Some(sequence)
}

/// The snapshot that another one's skip map is relative to; `None` if it has none of this level.
fn skip_base(line: &Line, sequence: u64, level: u32) -> Option<u64> {
    let (before, _) = line.range(..sequence).next_back().filter(|_| is_first(line, sequence, level))?;
    let is_oldest = |base: &u64| line.range(..base).next().is_none();
    first_from(line, span(*before, level) * FAN.pow(level)).filter(|base| !is_oldest(base))
}

/// The snapshot whose skip map is relative to this one; `None` if there is none of this level.
fn skips_to(line: &Line, sequence: u64, level: u32) -> Option<u64> {
    let next = (span(sequence, level) + 1) * FAN.pow(level);
    first_from(line, next).filter(|_| is_first(line, sequence, level))
}

impl Histories {
    /// Makes the skip maps of a snapshot that are missing, the shortest first, for the longer ones are made from them. Makes
    /// none on a pool that is short of space. Returns whether nothing is left to do.
    pub(in crate::driver) fn make_skips(&self, record: &SnapshotRecord, stop: &Stop) -> Result<bool> {
        if self.is_short() {
            return Ok(true);
        }
        for level in ObjectDir::SKIPS {
            let Some(base) = self.lacks_skip(record, level) else { continue };
            let is_still_wanted = || self.lacks_skip(record, level).is_some_and(|now| now.id == base.id);
            // Where a link is missing, all blocks would be compared.
            let Some(way) = self.way(&base, record)? else {
                // A deletion that was half done when the way was looked for is done under the lock.
                let _history = self.hold([&record.volume]);
                match is_still_wanted() {
                    true => continue,
                    false => return Ok(false),
                }
            };
            let fresh = DraftFile::New.of(&self.shared.store.snapshot_dir(record).skip(level));
            let written = self.write_differences(&fresh, &base, record, way, stop);
            if written.is_err() && !is_still_wanted() {
                return Ok(false);
            }
            written?;
            if !self.hold([&record.volume]).keep_skip(record, level, &base, &fresh)? {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Whether a snapshot lacks a skip map.
    pub(in crate::driver) fn lacks_skips(&self, record: &SnapshotRecord) -> bool {
        ObjectDir::SKIPS.into_iter().any(|level| self.lacks_skip(record, level).is_some())
    }

    /// What the skip map of a snapshot would be relative to; `None` if it is there, or there is none of this level.
    fn lacks_skip(&self, record: &SnapshotRecord, level: u32) -> Option<Arc<SnapshotRecord>> {
        let base = self.shared.store.read(|index| {
            // It may have been removed.
            let line = index.places(&record.volume).filter(|_| index.known(&record.id).is_some())?;
            index.known(&line[&skip_base(line, record.sequence, level)?])
        })?;
        let leads_to_base =
            |map: &MapFile| map.header().relative_to.as_ref().is_some_and(|it| it.snapshot == base.id);
        let map = MapFile::open(&self.shared.store.snapshot_dir(record).skip(level));
        let is_there = match map.and_then(|map| map.count().map(|_| leads_to_base(&map))) {
            Ok(leads_to_base) => leads_to_base,
            Err(cbt::Error::Damaged { .. }) => false,
            // A map of a later version stays, and a disk that fails gets no more to write.
            Err(error) => !matches!(error, cbt::Error::Sys(error) if error.is_not_found()),
        };
        (!is_there).then_some(base)
    }
}

impl History<'_> {
    /// Keeps a skip map that was written, unless it is relative to a snapshot that was removed meanwhile. Returns whether it
    /// is kept. No map that it was made from was mended meanwhile: only the hashing thread does that, too.
    fn keep_skip(
        &self,
        record: &SnapshotRecord,
        level: u32,
        base: &SnapshotRecord,
        fresh: &Path,
    ) -> Result<bool> {
        let histories = self.histories;
        let is_wanted = histories.lacks_skip(record, level).is_some_and(|now| now.id == base.id);
        match is_wanted {
            true => {
                durable::replace_soon_by(fresh, &histories.shared.store.snapshot_dir(record).skip(level))?
            }
            false => durable::remove(fresh)?,
        }
        Ok(is_wanted)
    }

    /// Removes the skip maps that are relative to a snapshot that is removed, and queues the snapshots that then lack one:
    /// those, and the next first snapshot of its spans.
    pub(super) fn remove_skips_to(&self, gone: &SnapshotRecord) {
        let Histories { shared, queue, fresh: _ } = self.histories;
        let (skipping, next) = shared.store.read(|index| {
            let Some(line) = index.places(&gone.volume) else { return Default::default() };
            let skipping = |level| Some((index.known(&line[&skips_to(line, gone.sequence, level)?])?, level));
            let next = first_from(line, gone.sequence + 1).filter(|_| is_first(line, gone.sequence, 1));
            let skipping: Vec<_> = ObjectDir::SKIPS.filter_map(skipping).collect();
            (skipping, next.and_then(|next| index.known(&line[&next])))
        });
        for (other, level) in &skipping {
            // Not synced, and no error: a map that stays is relative to an unknown snapshot, and ignored.
            if let Err(error) = change::remove_file(&shared.store.snapshot_dir(other).skip(*level))
                && !error.is_not_found()
            {
                tracing::warn!(error = base::report(&error), "a skip map could not be removed");
            }
        }
        for lacking in skipping.iter().map(|(other, _)| other).chain(&next) {
            queue.add_skips(lacking);
        }
    }

    /// Removes the skip maps of a snapshot and of all later ones: they may lack blocks.
    pub(super) fn remove_skips_from(&self, first: &SnapshotRecord) -> Result<()> {
        let store = &self.histories.shared.store;
        let later: Vec<_> =
            store.read(|index| index.line_in(&first.volume, first.sequence..).cloned().collect());
        for other in later {
            let dir = self.histories.shared.store.snapshot_dir(&other);
            for level in ObjectDir::SKIPS {
                durable::remove(&dir.skip(level))?;
            }
            self.histories.queue.add_skips(&other);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn line(places: impl IntoIterator<Item = u64>) -> Line {
        let id = || SnapshotId::random(base::DataDirKey::random().expect("key")).expect("id");
        places.into_iter().map(|sequence| (sequence, id())).collect()
    }

    #[test]
    fn the_first_of_a_span_skips_to_the_first_of_the_span_before() {
        let (one, two) = (FAN, FAN * FAN);
        // The places of a line; what the skip maps of the last one, of levels 1 and 2, are relative to.
        type Case = (Vec<u64>, [Option<u64>; 2]);
        let cases: [Case; 9] = [
            (vec![one], [None, None]),
            // Not to the oldest.
            ((1..=one).collect(), [None, None]),
            ((1..=2 * one).collect(), [Some(one), None]),
            ((1..=2 * one + 1).collect(), [None, None]),
            ((1..=2 * two).collect(), [Some(2 * two - one), Some(two)]),
            // Whole spans, and the first snapshots of spans, were removed.
            (vec![1, two + 1], [None, None]),
            (vec![1, one, two + 1], [Some(one), None]),
            (vec![1, two + 1, 2 * two + 1], [Some(two + 1), Some(two + 1)]),
            (vec![1, one, two + 1, two + one], [Some(two + 1), None]),
        ];
        for (places, want) in cases {
            let last = places[places.len() - 1];
            let found = [1, 2].map(|level| skip_base(&line(places.clone()), last, level));
            assert_eq!(found, want, "{places:?}");
        }
    }

    /// Whatever is removed, both directions agree.
    #[test]
    fn what_skips_to_a_snapshot_is_what_has_it_as_its_base() {
        for seed in 0..300 {
            let mut random = fastrand::Rng::with_seed(seed);
            let line = line((1..3 * FAN.pow(3)).filter(|_| random.bool()));
            for level in 1..=3 {
                // Maps that lead to the oldest are left from before it was.
                for at in line.keys().skip(1) {
                    let has_it = |other: &&u64| skip_base(&line, **other, level) == Some(*at);
                    let want: Vec<u64> = line.keys().filter(has_it).copied().collect();
                    let found: Vec<u64> = skips_to(&line, *at, level).into_iter().collect();
                    assert_eq!(found, want, "seed {seed}, level {level}, {at}");
                }
            }
        }
    }

    #[test]
    fn a_way_over_thousands_is_short() {
        let line = line(1..=8 * FAN.pow(4));
        let (mut at, base, mut steps) = (8 * FAN.pow(4), 2, 0);
        while at != base {
            let skips = ObjectDir::SKIPS.rev().filter_map(|level| skip_base(&line, at, level));
            let before = line.range(..at).next_back().map(|(before, _)| *before);
            at = skips.chain(before).find(|before| *before >= base).expect("a link");
            steps += 1;
        }
        assert!(steps as u64 <= 8 + 9 * FAN, "{steps} maps");
    }
}
