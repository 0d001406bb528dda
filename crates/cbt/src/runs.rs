//! Runs of blocks turned into the tuples of an answer.

use std::time::Instant;

use super::Result;
use super::allocation::{self, AllocatedScan};
use super::delta::{self, DeltaScan};
use super::walk::Found;
use base::{BlockRange, BlockSize, ByteRange, Stop};

/// Where the runs of an answer come from.
pub enum RunSource {
    /// All allocated blocks of one snapshot.
    Allocated(Box<AllocatedScan>),
    /// The blocks that differ between two.
    Delta(Box<DeltaScan>),
}

impl RunSource {
    fn next_run(&mut self, stop: &Stop, until: Instant) -> Result<Found> {
        match self {
            RunSource::Allocated(scan) => Ok(scan.next_run(stop)?.map_or(Found::End, Found::Run)),
            RunSource::Delta(scan) => scan.next_run(stop, until),
        }
    }
}

/// The segment that an answer is in, or a few: most of the memory that it takes.
pub struct Loaded(Segment);

enum Segment {
    Allocated(allocation::Runs),
    Delta(delta::LoadedSegments),
}

impl std::fmt::Debug for Loaded {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Loaded({} bytes)", self.bytes())
    }
}

impl Loaded {
    /// Memory it takes, in bytes.
    pub fn bytes(&self) -> usize {
        match &self.0 {
            Segment::Allocated(runs) => runs.bytes,
            Segment::Delta(segments) => segments.bytes(),
        }
    }
}

/// The tuples of an answer, cut into messages: ascending, disjoint, never empty.
pub struct Tuples {
    source: RunSource,
    size: BlockSize,
    /// Lists blocks one by one (`FIXED_LENGTH`) instead of joining them (`VARIABLE_LENGTH`).
    fixed: bool,
    /// A run that was found and not handed out yet. It may continue.
    open: Option<BlockRange>,
}

impl Tuples {
    /// The tuples of `source`, in blocks of `size`.
    pub fn new(source: RunSource, size: BlockSize, fixed: bool) -> Self {
        Tuples { source, size, fixed, open: None }
    }

    /// Memory that it may take to continue, in bytes.
    pub fn work_bytes(&self) -> usize {
        match &self.source {
            RunSource::Allocated(scan) => scan.work_bytes(),
            RunSource::Delta(scan) => scan.work_bytes(),
        }
    }

    /// Gives up the memory that is not needed until the answer continues. [`Tuples::resume`] takes the segment back;
    /// without it, the answer continues and reads it again.
    pub fn park(&mut self) -> Option<Loaded> {
        match &mut self.source {
            RunSource::Allocated(scan) => scan.park().map(Segment::Allocated),
            RunSource::Delta(scan) => scan.park().map(Segment::Delta),
        }
        .map(Loaded)
    }

    /// Takes back what [`Tuples::park`] gave up.
    pub fn resume(&mut self, segment: Loaded) {
        match (&mut self.source, segment.0) {
            (RunSource::Allocated(scan), Segment::Allocated(runs)) => scan.resume(runs),
            (RunSource::Delta(scan), Segment::Delta(segments)) => scan.resume(segments),
            _ => unreachable!("an answer takes back only its own segment"),
        }
    }

    /// Appends tuples until there are `most`, or `until` has passed. `Ok(false)` once no more will follow.
    pub fn fill(
        &mut self,
        most: usize,
        tuples: &mut Vec<ByteRange>,
        stop: &Stop,
        until: Instant,
    ) -> Result<bool> {
        match (self.fixed, &mut self.source) {
            (true, RunSource::Allocated(scan)) => {
                scan.next_blocks(most, stop, |block| tuples.push(BlockRange::one(block).bytes(self.size)))
            }
            (true, RunSource::Delta(_)) => self.list(most, tuples, stop, until),
            (false, _) => self.join(most, tuples, stop, until),
        }
    }

    fn list(
        &mut self,
        most: usize,
        tuples: &mut Vec<ByteRange>,
        stop: &Stop,
        until: Instant,
    ) -> Result<bool> {
        loop {
            if let Some(run) = self.open.take() {
                let cut = run.end.min(run.start + (most - tuples.len()) as u64);
                let listed = BlockRange { end: cut, ..run }.blocks();
                tuples.extend(listed.map(|block| BlockRange::one(block).bytes(self.size)));
                if cut < run.end {
                    self.open = Some(BlockRange { start: cut, end: run.end });
                    return Ok(true);
                }
            }
            match self.source.next_run(stop, until)? {
                Found::Run(next) => self.open = Some(next),
                Found::Nothing => return Ok(true),
                Found::End => return Ok(false),
            }
            // Known only by looking: a full last message is not followed by an empty one.
            if tuples.len() == most {
                return Ok(true);
            }
        }
    }

    fn join(
        &mut self,
        most: usize,
        tuples: &mut Vec<ByteRange>,
        stop: &Stop,
        until: Instant,
    ) -> Result<bool> {
        while tuples.len() < most {
            match (self.source.next_run(stop, until)?, &mut self.open) {
                // Sources cut their runs at segment borders.
                (Found::Run(next), Some(open)) if open.end == next.start => open.end = next.end,
                (Found::Run(next), open) => {
                    tuples.extend(open.replace(next).map(|run| run.bytes(self.size)));
                }
                (Found::Nothing, _) => return Ok(true),
                (Found::End, open) => {
                    tuples.extend(open.take().map(|run| run.bytes(self.size)));
                    return Ok(false);
                }
            }
        }
        Ok(true)
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use base::Block;

    use super::*;
    use crate::{Allocation, MapFile, MapHeader, MapWriter, SEGMENT_BLOCKS};

    const SIZE: BlockSize = BlockSize::MIN;

    /// All messages of an answer over `runs`, from block `start` on.
    fn messages(runs: &[(u64, u64)], fixed: bool, most: usize, start: u64) -> Vec<Vec<(u64, u64)>> {
        let dir = tempfile::tempdir().expect("temp dir");
        let path = dir.path().join("map");
        let header = MapHeader { block_size: SIZE, blocks: 1 << 32, relative_to: None };
        let mut writer = MapWriter::create(&path, header).expect("create");
        for (start, end) in runs {
            writer.insert(BlockRange::new(*start, *end)).expect("insert");
        }
        writer.finish().expect("finish");
        let map = Allocation::new(MapFile::open(&path).expect("open"), None, &path);
        let scan = AllocatedScan::new(map, Block(start));
        let mut tuples = Tuples::new(RunSource::Allocated(Box::new(scan)), SIZE, fixed);
        let (stop, until) = (Stop::default(), Instant::now() + Duration::from_secs(60));
        let mut messages = Vec::new();
        loop {
            let mut message = Vec::new();
            let more = tuples.fill(most, &mut message, &stop, until).expect("fill");
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

    /// A run that fills its roaring container to the last member.
    #[test]
    fn fixed_lists_a_long_run_whole() {
        let sent: Vec<(u64, u64)> = messages(&[(0, 1 << 17)], true, 5000, 0).concat();
        assert_eq!(sent, (0..1 << 17).map(|block| (block, block + 1)).collect::<Vec<_>>());
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
