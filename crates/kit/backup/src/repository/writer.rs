//! Adding to a repository: chunks go into packs, packs are sent as they fill, and maps of segments follow the packs they
//! name. What is written is of no use to anybody before an index names it.

use std::collections::HashSet;
use std::sync::Arc;

use parking_lot::Mutex;
use tokio::sync::Semaphore;
use tokio::task::JoinHandle;

use super::names::pack_name;
use super::pack::{Chunk, Compressor, OpenPack, PackRef, Packs, Spare};
use super::{BLOCK, Repository, SEGMENT_BLOCKS, Segment, SegmentRef};
use crate::error::{Error, Result, refused};

/// Packs on their way at once: with the two that are open, 100 MB.
const IN_FLIGHT: usize = 4;
/// Extents that may wait for their packs: 20 MB of them. A change in every segment of a huge volume would have all maps
/// wait for one pack.
const WAITING: usize = 1 << 20;
/// Parts of a segment in [`SegmentRef::fill`].
const PARTS: u32 = 16;

/// Where chunks of all threads go.
pub struct Writer<'r> {
    repository: &'r Repository,
    /// Threads that add take the state; a full pack waits for its turn to be sent with the state taken, so that no thread is
    /// quicker than the storage.
    state: Mutex<State>,
    permits: Arc<Semaphore>,
}

#[derive(Default)]
struct State {
    packs: Packs,
    data: Option<(u32, OpenPack)>,
    maps: Option<(u32, OpenPack)>,
    spare: Spare,
    /// Segments that name the pack with data that is open.
    waiting: Vec<(u32, Segment)>,
    waiting_extents: usize,
    segments: Vec<SegmentRef>,
    sent: Vec<JoinHandle<Result<()>>>,
    /// Why a pack was not stored. The pack that was open then is lost, too, so nothing more is sent, and nothing is finished.
    failed: Option<String>,
    /// Packs that are sent and not durable yet.
    in_flight: Arc<Mutex<HashSet<[u8; 32]>>>,
    added: u64,
}

/// What a writer has written, with packs that are in use alone.
pub struct Written {
    /// As in an index.
    pub packs: Vec<PackRef>,
    /// As in an index.
    pub segments: Vec<SegmentRef>,
    /// Bytes of new packs.
    pub added: u64,
}

impl State {
    fn check(&self) -> Result<()> {
        match &self.failed {
            Some(why) => Err(refused!("{why}")),
            None => Ok(()),
        }
    }
}

impl<'r> Writer<'r> {
    /// A writer that continues after segments that are stored already.
    pub fn new<'s>(
        repository: &'r Repository,
        packs: &[PackRef],
        segments: impl IntoIterator<Item = &'s SegmentRef>,
    ) -> Self {
        let writer =
            Writer { repository, state: Mutex::default(), permits: Arc::new(Semaphore::new(IN_FLIGHT)) };
        for segment in segments {
            writer.keep(packs, segment);
        }
        writer
    }

    /// Names a segment as another index has it.
    pub fn keep(&self, packs: &[PackRef], segment: &SegmentRef) {
        let mut state = self.state.lock();
        let mut place = |of: &u32| state.packs.intern(packs[*of as usize]);
        let kept = SegmentRef {
            pack: place(&segment.pack),
            packs: segment.packs.iter().map(&mut place).collect(),
            ..segment.clone()
        };
        state.segments.push(kept);
    }

    /// Adds chunks of data that lie side by side in the volume, and so in a pack as far as it has room: of each its pack and
    /// number.
    pub fn chunks(&self, chunks: &[Chunk<'_>]) -> Result<Vec<(u32, u32)>> {
        let mut state = self.state.lock();
        let mut places = Vec::with_capacity(chunks.len());
        for chunk in chunks {
            let State { packs, data, spare, .. } = &mut *state;
            let (place, open) = data.get_or_insert_with(|| (packs.reserve(), OpenPack::new(spare)));
            places.push((*place, open.push(chunk)));
            if open.is_full() {
                self.close_data(&mut state)?;
            }
        }
        Ok(places)
    }

    /// Reads the map of a segment of another index, with places of this writer.
    pub fn read(&self, packs: &[PackRef], segment: &SegmentRef) -> Result<Segment> {
        let bytes = self.repository.chunk(&packs[segment.pack as usize], segment.chunk)?;
        Segment::decode(&bytes, &mut self.state.lock().packs)
    }

    /// Adds the map of a segment; one without data has no map.
    pub fn segment(&self, number: u32, segment: Segment) -> Result<()> {
        if segment.extents.is_empty() {
            return Ok(());
        }
        let mut state = self.state.lock();
        if segment.packs().iter().all(|pack| state.packs.is_filled(*pack)) {
            return self.write_maps(&mut state, vec![(number, segment)]);
        }
        state.waiting_extents += segment.extents.len();
        state.waiting.push((number, segment));
        match state.waiting_extents > WAITING {
            true => self.close_data(&mut state),
            false => Ok(()),
        }
    }

    /// The name of a pack that is closed.
    pub fn id(&self, place: u32) -> Option<[u8; 32]> {
        let state = self.state.lock();
        state.packs.is_filled(place).then(|| state.packs.get(place).id)
    }

    /// Closes the pack with data, and writes the maps that have waited for it: one pack with data is open at a time.
    fn close_data(&self, state: &mut State) -> Result<()> {
        state.check()?;
        if let Some((place, open)) = state.data.take() {
            self.send(state, place, open)?;
        }
        state.waiting_extents = 0;
        let waiting = std::mem::take(&mut state.waiting);
        self.write_maps(state, waiting)
    }

    /// Writes maps whose packs are closed.
    fn write_maps(&self, state: &mut State, segments: Vec<(u32, Segment)>) -> Result<()> {
        let mut compressor = None;
        for (number, segment) in segments {
            let compressor = match &mut compressor {
                Some(compressor) => compressor,
                none => none.insert(Compressor::new(1)?),
            };
            let encoded = segment.encode(&state.packs);
            let chunk = compressor.chunk(&encoded);
            let State { packs, maps, spare, .. } = &mut *state;
            let (pack, open) = maps.get_or_insert_with(|| (packs.reserve(), OpenPack::new(spare)));
            let pack = *pack;
            let chunk = open.push(&chunk);
            let is_full = open.is_full();
            state.segments.push(SegmentRef {
                number,
                pack,
                chunk,
                blocks: segment.blocks() as u32,
                packs: segment.packs(),
                fill: fill(&segment),
            });
            if is_full {
                self.close_maps(state)?;
            }
        }
        Ok(())
    }

    fn close_maps(&self, state: &mut State) -> Result<()> {
        state.check()?;
        match state.maps.take() {
            Some((place, open)) => self.send(state, place, open),
            None => Ok(()),
        }
    }

    fn send(&self, state: &mut State, place: u32, open: OpenPack) -> Result<()> {
        let store = &self.repository.store;
        // What failed since the last one.
        for task in state.sent.extract_if(.., |task| task.is_finished()) {
            let stored = store.runtime().block_on(task).map_err(ended).flatten();
            if let Err(error) = stored {
                state.failed = Some(base::report(&error));
                return Err(error);
            }
        }
        let (pack, parts) = open.close();
        state.packs.fill(place, pack);
        state.added += u64::from(pack.bytes);
        let permit = store.runtime().block_on(self.permits.clone().acquire_owned());
        let of = store.clone();
        state.in_flight.lock().insert(pack.id);
        let in_flight = state.in_flight.clone();
        let send = async move {
            let _permit = permit;
            of.put(&pack_name(&pack), parts.to_vec()).await?;
            in_flight.lock().remove(&pack.id);
            Ok(())
        };
        state.sent.push(store.runtime().spawn(send));
        Ok(())
    }

    /// Closes what is open, so that all that was added until now becomes durable.
    pub fn flush(&self) -> Result<()> {
        let mut state = self.state.lock();
        self.close_data(&mut state)?;
        self.close_maps(&mut state)
    }

    /// What is durable by now, and the numbers of the segments that are not.
    pub fn durable(&self) -> (Written, HashSet<u32>) {
        let state = self.state.lock();
        let in_flight = state.in_flight.lock();
        let is_durable =
            |pack: &u32| state.packs.is_filled(*pack) && !in_flight.contains(&state.packs.get(*pack).id);
        let (durable, others): (Vec<_>, Vec<_>) =
            state.segments.iter().partition(|of| is_durable(&of.pack) && of.packs.iter().all(is_durable));
        let others = others.iter().map(|of| of.number).chain(state.waiting.iter().map(|of| of.0)).collect();
        let (packs, segments) = gather(durable.into_iter().map(|segment| (&state.packs, segment)));
        (Written { packs, segments, added: state.added }, others)
    }

    /// Closes everything and waits until all of it is durable.
    pub fn finish(self) -> Result<Written> {
        let mut first = self.flush();
        let mut state = self.state.into_inner();
        for task in state.sent.drain(..) {
            let done = self.repository.store.runtime().block_on(task).map_err(ended).flatten();
            first = first.and(done);
        }
        first?;
        let (packs, segments) = gather(state.segments.iter().map(|segment| (&state.packs, segment)));
        Ok(Written { packs, segments, added: state.added })
    }
}

/// Segments with places in one table, which holds what they use, each once. Ascending.
pub fn gather<'s>(
    segments: impl Iterator<Item = (&'s Packs, &'s SegmentRef)>,
) -> (Vec<PackRef>, Vec<SegmentRef>) {
    let mut table = Packs::default();
    let mut packs: Vec<PackRef> = Vec::new();
    let mut gathered: Vec<SegmentRef> = segments
        .map(|(from, segment)| {
            let mut place = |old: u32| {
                let pack = *from.get(old);
                let place = table.intern(pack);
                if place as usize == packs.len() {
                    packs.push(pack);
                }
                place
            };
            SegmentRef {
                pack: place(segment.pack),
                packs: segment.packs.iter().map(|pack| place(*pack)).collect(),
                ..segment.clone()
            }
        })
        .collect();
    gathered.sort_unstable_by_key(|segment| segment.number);
    (packs, gathered)
}

fn ended(error: tokio::task::JoinError) -> Error {
    refused!("a request ended by itself: {error}")
}

/// How much of each sixteenth of a segment holds data: 0 nothing, 255 all.
fn fill(segment: &Segment) -> [u8; PARTS as usize] {
    let whole = SEGMENT_BLOCKS / PARTS;
    std::array::from_fn(|part| {
        let start = part as u32 * whole;
        let held: u32 = segment.within(&(start..start + whole)).iter().map(|extent| extent.blocks).sum();
        (held * 255).div_ceil(whole) as u8
    })
}

/// The ranges of the volume that [`SegmentRef::fill`] stands for, as if each part were filled from its start.
pub fn filled(segment: &SegmentRef) -> impl Iterator<Item = (u64, u64)> + '_ {
    let whole = u64::from(SEGMENT_BLOCKS / PARTS) * BLOCK;
    let start = u64::from(segment.number) * super::SEGMENT;
    (0..).zip(&segment.fill).map(move |(part, fill)| {
        let start = start + part * whole;
        (start, start + whole * u64::from(*fill) / 255)
    })
}

#[cfg(test)]
#[expect(clippy::disallowed_methods, reason = "what is done to a repository from outside")]
mod tests {
    use super::super::Extent;
    use super::super::tests::{open, runtime};
    use super::*;

    /// A disk became full while a backup noted how far it was: the note met the error, and the pack that was open then was lost
    /// with it. The backup went on, and ended in a panic when it wrote a map that names that pack.
    #[test]
    fn a_pack_that_is_not_stored_ends_all_that_follows() {
        let dir = tempfile::tempdir().expect("temp dir");
        let runtime = runtime();
        let repository = open(dir.path(), &runtime);
        let writer = Writer::new(&repository, &[], &[]);
        let mut compressor = Compressor::new(1).expect("zstd");
        let mut add = |number: u32| {
            let content = number.to_le_bytes().repeat(1024);
            let (pack, chunk) = writer.chunks(&[compressor.chunk(&content)])?[0];
            let extents = vec![Extent { start: 0, blocks: 1, pack, chunk, skip: 0 }];
            writer.segment(number, Segment { extents })
        };
        std::fs::write(dir.path().join("packs"), "").expect("packs cannot lie below a file");
        let mut number = 0;
        let first = loop {
            number += 1;
            add(number).expect("it waits for its pack");
            if let Err(error) = writer.flush() {
                break error;
            }
        };
        add(number + 1).expect("it waits for its pack");
        let again = writer.flush().expect_err("nothing is sent any more");
        assert_eq!(again.to_string(), base::report(&first));
        assert!(writer.durable().0.segments.is_empty());
        let end = writer.finish().map(|written| written.segments).expect_err("the backup fails");
        assert_eq!(end.to_string(), base::report(&first));
    }
}
