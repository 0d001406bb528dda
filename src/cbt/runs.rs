//! Runs of blocks turned into the tuples of an answer.

use super::Result;
use super::delta::DeltaScan;
use super::scan::AllocatedScan;
use crate::base::{BlockRange, BlockSize, ByteRange, Stop};

/// Where the runs of an answer come from.
pub enum RunSource {
    /// All allocated blocks of one snapshot.
    Allocated(Box<AllocatedScan>),
    /// The blocks that differ between two.
    Delta(Box<DeltaScan>),
}

impl RunSource {
    fn next_run(&mut self, stop: &Stop) -> Result<Option<BlockRange>> {
        match self {
            RunSource::Allocated(scan) => scan.next_run(stop),
            RunSource::Delta(scan) => scan.next_run(stop),
        }
    }
}

/// The tuples of an answer, cut into messages: ascending, disjoint, never empty.
pub struct Tuples {
    source: RunSource,
    size: BlockSize,
    /// Lists blocks one by one (`FIXED_LENGTH`) instead of joining them (`VARIABLE_LENGTH`).
    fixed: bool,
    /// A run that was found and not handed out yet.
    ahead: Option<BlockRange>,
}

impl Tuples {
    /// The tuples of `source`, in blocks of `size`.
    pub fn new(source: RunSource, size: BlockSize, fixed: bool) -> Self {
        Tuples { source, size, fixed, ahead: None }
    }

    /// Appends tuples until there are `most`. `Ok(false)` once no more will follow.
    pub fn fill(&mut self, most: usize, tuples: &mut Vec<ByteRange>, stop: &Stop) -> Result<bool> {
        while tuples.len() < most {
            let Some(run) = self.pull(stop)? else { return Ok(false) };
            if self.fixed {
                let cut = run.end.min(run.start + (most - tuples.len()) as u64);
                let block = |start| BlockRange { start, end: start + 1 }.bytes(self.size);
                tuples.extend((run.start..cut).map(block));
                self.ahead = (cut < run.end).then_some(BlockRange { start: cut, end: run.end });
            } else {
                let run = self.join(run, stop)?;
                tuples.push(run.bytes(self.size));
            }
        }
        // Known only by looking: a full last message is not followed by an empty one.
        self.ahead = self.pull(stop)?;
        Ok(self.ahead.is_some())
    }

    /// Adds the runs that adjoin `run`: sources cut theirs at segment borders.
    fn join(&mut self, mut run: BlockRange, stop: &Stop) -> Result<BlockRange> {
        while let Some(next) = self.pull(stop)? {
            if next.start != run.end {
                self.ahead = Some(next);
                break;
            }
            run.end = next.end;
        }
        Ok(run)
    }

    fn pull(&mut self, stop: &Stop) -> Result<Option<BlockRange>> {
        match self.ahead.take() {
            Some(run) => Ok(Some(run)),
            None => self.source.next_run(stop),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cbt::{MapFile, MapHeader, MapWriter, SEGMENT_BLOCKS};

    const SIZE: BlockSize = BlockSize::MIN;

    /// All messages of an answer over `runs`, from block `start` on.
    fn messages(runs: &[(u64, u64)], fixed: bool, most: usize, start: u64) -> Vec<Vec<(u64, u64)>> {
        let dir = tempfile::tempdir().expect("temp dir");
        let path = dir.path().join("map");
        let header = MapHeader { block_size: SIZE, blocks: 1 << 32, relative_to: None };
        let mut writer = MapWriter::create(&path, header).expect("create");
        for (start, end) in runs {
            writer.insert(BlockRange { start: *start, end: *end }).expect("insert");
        }
        writer.finish().expect("finish");
        let scan = AllocatedScan::new(MapFile::open(&path).expect("open"), start);
        let mut tuples = Tuples::new(RunSource::Allocated(Box::new(scan)), SIZE, fixed);
        let stop = Stop::default();
        let mut messages = Vec::new();
        loop {
            let mut message = Vec::new();
            let more = tuples.fill(most, &mut message, &stop).expect("fill");
            messages.push(message.iter().map(|range| (range.start / 4096, range.end / 4096)).collect());
            if !more {
                return messages;
            }
        }
    }

    #[test]
    fn variable_joins_runs_also_across_segments() {
        let edge = SEGMENT_BLOCKS;
        let runs = [(1, 3), (edge - 1, edge + 1), (2 * edge, 2 * edge + 1)];
        assert_eq!(messages(&runs, false, 10, 0), [runs.to_vec()]);
    }

    #[test]
    fn fixed_lists_blocks() {
        assert_eq!(messages(&[(1, 4), (9, 10)], true, 10, 0), [vec![(1, 2), (2, 3), (3, 4), (9, 10)]]);
    }

    #[test]
    fn messages_are_full_and_no_empty_one_trails() {
        assert_eq!(messages(&[(1, 4), (9, 10)], true, 2, 0), [vec![(1, 2), (2, 3)], vec![(3, 4), (9, 10)]]);
        assert_eq!(messages(&[(1, 4), (9, 10)], false, 1, 0), [vec![(1, 4)], vec![(9, 10)]]);
        assert_eq!(messages(&[], false, 1, 0), [vec![]]);
    }

    #[test]
    fn a_start_cuts_the_run_it_falls_in() {
        assert_eq!(messages(&[(1, 4), (9, 10)], false, 10, 2), [vec![(2, 4), (9, 10)]]);
        assert_eq!(messages(&[(1, 4)], true, 10, 4), [vec![]]);
    }
}
