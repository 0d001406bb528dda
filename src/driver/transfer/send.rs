//! The source's side of a transfer: the sources that other nodes have open here, with their maps, hashes and bytes. There
//! are no access checks here: `csi/transfer.rs` checks the ticket before it opens a source, and other calls only name open
//! sources.
//!
//! A snapshot is read in place, and stays readable if it is deleted meanwhile. For a volume a hidden snapshot is taken in
//! `staging/`. It is removed when it is closed, when it was not read for a while, and at a start.

use std::collections::HashMap;
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use roaring::RoaringBitmap;

use crate::driver::devices::superblock::Superblock;
use crate::driver::error::{Error, Result};
use crate::driver::locks::LockKey;
use crate::driver::shared::{Shared, check_whole};
use crate::driver::snapshots::fill::NewSnapshot;
use crate::driver::snapshots::take::Snapshots;
use crate::driver::transfer::holes::{cut_out, holes_in};
use crate::driver::transfer::plan::runs;
use crate::driver::transfer::receive::FETCHED;
use crate::driver::volumes::remote::{Blocks, Opened};
use crate::pool::{self, Bytes};
use crate::store::{Draft, SnapshotRecord};
use crate::sys::memory::KeepFreed;
use base::{Block, BlockRange, BlockSize, ByteRange, ObjectDir, SnapshotId, Stop, VolumeId};
use cbt::{Allocation, BlockHash, HashFile, HashReader, MapFile, SegmentIndex, hash_each};
use files::{Context, DataRanges};

/// The most open sources, those of one reader, and those that are the same one for one reader. Each has four open files, and a volume
/// a copy.
const MOST: usize = 64;
const MOST_OF_READER: usize = 32;
const MOST_OF_SOURCE: usize = 16;
/// How long a source stays open without being read.
const IDLE: Duration = Duration::from_secs(600);
/// Bytes of a message, unless a block is larger. The kernel would map, clear and unmap a larger buffer for every message
/// (`sys/memory.rs`), and it would not stay in the processor's cache.
const MESSAGE: u64 = 128 << 10;
/// How many ids of relatives are sent, the newest ones.
const RELATIVES: usize = 1000;

/// The sources that other nodes have open.
#[derive(Debug)]
pub struct Sources {
    shared: Arc<Shared>,
    snapshots: Arc<Snapshots>,
    open: Mutex<HashMap<String, Arc<OpenSource>>>,
}

/// A snapshot or volume that another node reads, from its first question until it is closed or idle for too long.
#[derive(Debug)]
pub struct OpenSource {
    /// The only node that may read it.
    reader: String,
    source: String,
    volume: String,
    record: SnapshotRecord,
    allocation: Allocation,
    data: Bytes,
    /// The filesystem in it, if there is one.
    filesystem: Option<Superblock>,
    /// The hashes, and the blocks whose slots do not count; `None` if there are no hashes.
    hashes: Option<(HashFile, MapFile)>,
    used: Mutex<Instant>,
    /// The hidden snapshot of a volume. Dropped last, since that removes its files.
    _draft: Option<Draft>,
}

/// Blocks whose hashes count, and the file of hashes.
struct Known {
    blocks: RoaringBitmap,
    hashes: HashReader,
}

/// The name of an open source, and its description.
pub type Point = (String, Opened);

impl Sources {
    pub(in crate::driver) fn new(shared: Arc<Shared>, snapshots: Arc<Snapshots>) -> Self {
        Sources { shared, snapshots, open: Mutex::default() }
    }

    /// Closes all sources.
    pub fn clear(&self) {
        self.open.lock().clear();
    }

    /// Closes sources that were not read for ten minutes.
    pub fn sweep(&self) {
        let is_idle = |source: &OpenSource| source.used().elapsed() >= IDLE;
        let idle: Vec<_> = self.open.lock().extract_if(|_, source| is_idle(source)).collect();
        for (_, source) in idle {
            tracing::info!(
                source_id = source.source,
                reader = source.reader,
                "a source is closed: no node has read it for ten minutes"
            );
        }
    }

    /// Opens a snapshot or a volume for the node `reader`, which makes `volume` from it.
    pub fn open(&self, source: &str, reader: &str, volume: &str) -> Result<Point> {
        self.sweep();
        let name = format!("{source}/{reader}/{volume}");
        // Of two calls for one transfer, the second finds what the first opened.
        let _lock = self.shared.locks.take(LockKey::Transfer(name.clone()))?;
        let found = self.open.lock().get(&name).cloned();
        let open = match found {
            Some(open) => open,
            None => {
                self.make_room(source, reader)?;
                let open = Arc::new(match source.parse::<SnapshotId>() {
                    Ok(_) => self.open_snapshot(source, reader, volume)?,
                    Err(_) => self.open_volume(source, reader, volume)?,
                });
                tracing::info!(
                    source_id = source,
                    reader,
                    volume_id = volume,
                    "another node has opened a source"
                );
                self.open.lock().insert(name.clone(), open.clone());
                open
            }
        };
        open.touch();
        let map = open.allocation.map();
        let record = &open.record;
        let opened = Opened {
            capacity: record.capacity,
            block_size: record.block_size,
            tracking: record.tracking,
            segments: map.indexes().collect(),
            allocated_blocks: map
                .indexes()
                .try_fold(0, |sum, index| Ok::<_, Error>(sum + open.map(index)?.len()))?,
            relatives: self.relatives_of(&record.volume),
            filesystem: open.filesystem.map(|found| (found.fs_type.to_owned(), found.most)),
        };
        // The name contains the id of the snapshot. A new copy of a volume has another name, so that the reader does not
        // mix blocks of two copies.
        Ok((format!("{name}/{}", record.id), opened))
    }

    /// Makes room for one more of this reader: where it has too many, what it has not used for longest is closed, such as what it had
    /// open when it died. Where it still needs that, it opens it again. Fails if all readers together have too many.
    fn make_room(&self, source: &str, reader: &str) -> Result<()> {
        let mut open = self.open.lock();
        if open.len() >= MOST {
            return Err(Error::TooMany { what: format!("{MOST} transfers to other nodes") });
        }
        let of_reader = || open.values().filter(|open| open.reader == reader);
        let of_source = || of_reader().filter(|open| open.source == source);
        let oldest = if of_source().count() >= MOST_OF_SOURCE {
            of_source().min_by_key(|open| open.used())
        } else if of_reader().count() >= MOST_OF_READER {
            of_reader().min_by_key(|open| open.used())
        } else {
            None
        };
        if let Some(name) = oldest.map(|open| open.name()) {
            open.remove(&name);
            tracing::info!(
                source_id = source,
                reader,
                "a source is closed: its reader has opened many others"
            );
        }
        Ok(())
    }

    /// The source that this node opened under this name.
    pub fn get(&self, point: &str, reader: &str) -> Option<Arc<OpenSource>> {
        let (name, id) = point.rsplit_once('/')?;
        let open = self.open.lock().get(name).cloned()?;
        let is_it = open.reader == reader && open.record.id.as_str() == id;
        open.touch();
        is_it.then_some(open)
    }

    /// Closes a source.
    pub fn close(&self, point: &str, reader: &str) {
        let Some(open) = self.get(point, reader) else { return };
        let closed = self.open.lock().remove(&open.name());
        tracing::info!(
            source_id = open.source,
            reader,
            volume_id = open.volume,
            "another node has closed a source"
        );
        drop(closed);
    }

    fn relatives_of(&self, volume: &VolumeId) -> Vec<String> {
        self.shared.store.read(|index| {
            let snapshots = index.line(volume).rev().take(RELATIVES).map(|record| record.id.to_string());
            snapshots.chain([volume.to_string()]).collect()
        })
    }

    fn open_snapshot(&self, source: &str, reader: &str, volume: &str) -> Result<OpenSource> {
        let record = self.shared.snapshot(source)?;
        let opened = self.open_files(
            &record,
            &self.shared.store.snapshot_dir(&record),
            None,
            [source, reader, volume],
        );
        match opened {
            // It was deleted since the lookup.
            Err(_) if self.shared.snapshot(source).is_err() => Err(Error::no_snapshot(source)),
            opened => opened,
        }
    }

    /// Takes a hidden snapshot of a volume, which is in no index and no history.
    fn open_volume(&self, source: &str, reader: &str, volume: &str) -> Result<OpenSource> {
        let found = self.shared.lock_volume(source)?;
        self.shared.check_room()?;
        self.shared.undo_cut_expansion(&found)?;
        let record = self.snapshots.new_record("", None, &found, None)?;
        let draft = self.shared.store.draft_snapshot(&record.id)?;
        let mut new =
            NewSnapshot { draft: draft.dir().clone(), volume: found.record.clone(), record, pending: 0 };
        self.snapshots.filler.fill(std::slice::from_mut(&mut new))?;
        let dir = draft.dir().clone();
        self.open_files(&new.record, &dir, Some(draft), [source, reader, volume])
    }

    fn open_files(
        &self,
        record: &SnapshotRecord,
        dir: &ObjectDir,
        draft: Option<Draft>,
        [source, reader, volume]: [&str; 3],
    ) -> Result<OpenSource> {
        let data = match self.shared.pool().open(dir) {
            Err(pool::Error::Sys(error)) if error.is_not_found() => return Err(Error::no_snapshot(source)),
            data => data?,
        };
        check_whole(data.path(), data.length()?, record.capacity)?;
        let for_damage = data.file().try_clone().context("open", data.path())?;
        let allocation = Allocation::new(MapFile::open(&dir.allocated())?, Some(for_damage), data.path());
        let hashes = match record.tracking {
            // Opened before the hashes: a slot is written before its block leaves `pending`.
            true => match MapFile::open_sound(&dir.pending())? {
                Some(pending) => Some((HashFile::open(&dir.hashes())?, pending)),
                None => None,
            },
            false => None,
        };
        Ok(OpenSource {
            reader: reader.to_owned(),
            source: source.to_owned(),
            volume: volume.to_owned(),
            record: record.clone(),
            allocation,
            filesystem: Superblock::read(data.path())?,
            data,
            hashes,
            used: Mutex::new(Instant::now()),
            _draft: draft,
        })
    }
}

impl OpenSource {
    fn name(&self) -> String {
        format!("{}/{}/{}", self.source, self.reader, self.volume)
    }

    fn used(&self) -> Instant {
        *self.used.lock()
    }

    fn touch(&self) {
        *self.used.lock() = Instant::now();
    }

    fn size(&self) -> BlockSize {
        self.record.block_size
    }

    /// The most blocks that a reader asks for at once.
    pub fn fetched(&self) -> u64 {
        (FETCHED / self.size().bytes()).max(1)
    }

    /// Fails if a block is past the end, or if these are more than a reader asks for at once.
    pub fn check(&self, index: SegmentIndex, blocks: &RoaringBitmap, most: u64) -> Result<()> {
        let end = Block(self.allocation.header().blocks);
        let (value, want) = match blocks.max() {
            Some(last) if index.block(last) >= end => {
                (last.into(), format!("before the end of the source, block {}", end.0))
            }
            _ if blocks.len() > most => (blocks.len().into(), format!("{most} at most")),
            _ => return Ok(()),
        };
        Err(Error::OutOfRange { field: "blocks", value, want })
    }

    /// The blocks of a segment that hold data.
    pub fn map(&self, index: SegmentIndex) -> Result<RoaringBitmap> {
        Ok(self.allocation.segment(index)?)
    }

    /// The hashes of blocks. Missing ones are computed from the data.
    pub fn hashes(&self, index: SegmentIndex, blocks: &RoaringBitmap, stop: &Stop) -> Result<Vec<u8>> {
        let mut all = Vec::with_capacity(blocks.len() as usize * 32);
        let mut known = self.known(index, blocks)?;
        let mut buffer = Vec::new();
        // Where all hashes exist no data is read, so a long run costs nothing.
        for run in runs(blocks, (MESSAGE / self.size().bytes()).max(1) as u32) {
            stop.check()?;
            buffer.clear();
            let hashes = self.hashes_of(index, run, &mut known, &mut buffer, false)?;
            all.extend_from_slice(hashes.as_flattened());
        }
        Ok(all)
    }

    /// Passes the bytes and the hashes of blocks to `put`, in messages, `without_holes` or with zeros for them.
    pub fn read(
        &self,
        index: SegmentIndex,
        blocks: &RoaringBitmap,
        without_holes: bool,
        stop: &Stop,
        mut put: impl FnMut(Blocks) -> Result<(), base::Stopped>,
    ) -> Result<()> {
        let _keep = KeepFreed::begin();
        let mut known = self.known(index, blocks)?;
        let most = MESSAGE.max(self.size().bytes());
        let new = || (Vec::with_capacity(most as usize), Vec::new(), Vec::new(), 0);
        let (mut data, mut hashes, mut holes, mut length) = new();
        // The data of all blocks is looked up once, from the first block to the last.
        let span = self.bytes(index, &(blocks.min().unwrap_or(0)..blocks.max().map_or(0, |last| last + 1)));
        let mut parts = DataRanges::of(self.data.file(), self.data.path(), span).peekable();
        for run in runs(blocks, (MESSAGE / self.size().bytes()).max(1) as u32) {
            stop.check()?;
            let bytes = self.bytes(index, &run);
            if length > 0 && length + bytes.len() > most {
                put(Blocks { data: data.into(), hashes: hashes.into(), holes })?;
                (data, hashes, holes, length) = new();
                self.touch();
            }
            let before = data.len();
            let of_run = self.hashes_of(index, run, &mut known, &mut data, true)?;
            hashes.extend_from_slice(of_run.as_flattened());
            if without_holes {
                let moved = |holes: Vec<ByteRange>, from: u64, to: u64| -> Vec<ByteRange> {
                    let moved = |at: u64| at - from + to;
                    holes
                        .iter()
                        .map(|hole| ByteRange { start: moved(hole.start), end: moved(hole.end) })
                        .collect()
                };
                let of_run = moved(holes_in(&mut parts, bytes)?, bytes.start, 0);
                cut_out(&mut data, before, &of_run);
                holes.extend(moved(of_run, 0, length));
            }
            length += bytes.len();
        }
        match length {
            0 => Ok(()),
            _ => Ok(put(Blocks { data: data.into(), hashes: hashes.into(), holes })?),
        }
    }

    fn bytes(&self, index: SegmentIndex, run: &std::ops::Range<u32>) -> ByteRange {
        let start = index.block(run.start);
        BlockRange { start, end: Block(start.0 + run.len() as u64) }.bytes(self.size())
    }

    /// The stored hashes of these blocks, if hashes are stored.
    fn known(&self, index: SegmentIndex, blocks: &RoaringBitmap) -> Result<Option<Known>> {
        let Some((hashes, pending)) = &self.hashes else { return Ok(None) };
        let blocks = blocks - pending.segment_or_all(index)?;
        Ok(Some(Known { blocks, hashes: HashReader::new(hashes.try_clone()?) }))
    }

    /// The hashes of a run of blocks. The stored hashes are preferred: they were made when the data was new, so they detect
    /// later damage. Missing ones are computed from the data. Appends the data to `data` if it is `wanted`.
    fn hashes_of(
        &self,
        index: SegmentIndex,
        run: std::ops::Range<u32>,
        known: &mut Option<Known>,
        data: &mut Vec<u8>,
        wanted: bool,
    ) -> Result<Vec<BlockHash>> {
        let mut hashes: Vec<Option<BlockHash>> = vec![None; run.len()];
        if let Some(known) = known {
            for (block, hash) in run.clone().zip(&mut hashes) {
                if known.blocks.contains(block) {
                    *hash = known.hashes.get(index.block(block))?;
                }
            }
        }
        let is_whole = hashes.iter().all(Option::is_some);
        if wanted || !is_whole {
            let bytes = self.bytes(index, &run);
            let before = data.len();
            data.resize(before + bytes.len() as usize, 0);
            let (file, path, read) = (self.data.file(), self.data.path(), &mut data[before..]);
            file.read_exact_at(read, bytes.start).context_at("read", path, bytes.start)?;
            if !is_whole {
                hash_each(read, self.size(), |number, hash| {
                    hashes[number as usize].get_or_insert(hash);
                });
            }
        }
        Ok(hashes.into_iter().flatten().collect())
    }
}
