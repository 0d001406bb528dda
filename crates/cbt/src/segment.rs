//! Sets of blocks on disk, in checksummed segments: the format and its reader. The writer is in `segment/writer.rs`.

use std::fs::File;
use std::path::{Path, PathBuf};

use parking_lot::Mutex;
use roaring::RoaringBitmap;

use super::{Error, Result};
use base::{Block, BlockRange, BlockSize, SnapshotId};
use files::Context;
use window::{WINDOW, Windows, read_at};

/// Blocks a segment covers: 16 GiB at 4 KiB blocks, a bitmap of at most 512 KiB in memory.
pub const SEGMENT_BLOCKS: u64 = 1 << 22;

/// A segment of a map, by its number from the volume's start.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SegmentIndex(pub u32);

impl SegmentIndex {
    /// The blocks it covers.
    pub fn blocks(self) -> BlockRange {
        let start = self.block(0);
        BlockRange { start, end: start + SEGMENT_BLOCKS }
    }

    /// The block at a place in it.
    pub fn block(self, within: u32) -> Block {
        Block(u64::from(self.0) * SEGMENT_BLOCKS + u64::from(within))
    }
}

impl std::fmt::Display for SegmentIndex {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.0.fmt(f)
    }
}

const MAGIC: [u8; 8] = *b"dpathmap";
const VERSION: u32 = 2;
/// Flag of a map whose members all differ.
const EXACT: u32 = 1;
const CHECKSUM: usize = 32;
/// index u32, length u32, offset u64, checksum.
const ENTRY: usize = 16 + CHECKSUM;
const ID: usize = 40;
/// magic 8, version u32, block size u32, blocks u64, segments u64, flags u32, base id 40, checksum.
const TRAILER: usize = 8 + 4 + 4 + 8 + 8 + 4 + ID + CHECKSUM;

/// What a whole map is about.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MapHeader {
    /// The size of a block.
    pub block_size: BlockSize,
    /// The capacity of the snapshot in blocks; no member is at or past it.
    pub blocks: u64,
    /// What a `changed` set compares with.
    pub relative_to: Option<Relation>,
}

/// What a `changed` set is about.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Relation {
    /// The other snapshot.
    pub snapshot: SnapshotId,
    /// Whether all members differ from it; else they may. All others are the same either way.
    pub exact: bool,
}

/// A set of blocks in a file: payloads, then a table of them, then a trailer.
///
/// ```text
/// payload ...   a RoaringBitmap a segment (its portable serialization), block numbers counted from
///               the start of the segment; empty segments are not stored
/// table         index u32, length u32, offset u64, BLAKE3 of the payload; a row a payload
/// trailer       "dpathmap", version u32, block size u32, blocks u64, rows u64,
///               flags u32 (1: every member differs, not only may), id of the other snapshot (40 bytes,
///               zero padded), BLAKE3 of table and trailer
/// ```
///
/// Numbers are little-endian. Segments, because an answer must start before the whole map is read and
/// must not hold it in memory. The table is last, because a map is written in one pass whose length
/// is known at its end; a file cut short therefore has no trailer and is refused whole. A checksum a
/// segment, because a map is trusted instead of the data: a flipped bit would lose a change.
#[derive(Debug)]
pub struct MapFile {
    file: File,
    path: PathBuf,
    header: MapHeader,
    /// The segments of the table's rows. The rows stay on disk: a stream holds all maps of its chain open, and
    /// there may be a thousand streams.
    indexes: Vec<SegmentIndex>,
    table_at: u64,
    /// The most bytes that are stored of a segment.
    largest: u32,
    windows: Mutex<Windows>,
}

#[derive(Clone, Debug)]
struct Entry {
    index: SegmentIndex,
    length: u32,
    offset: u64,
    checksum: [u8; CHECKSUM],
}

impl MapFile {
    /// Opens a map and checks its table; segments are checked as they are read.
    pub fn open(path: &Path) -> Result<Self> {
        let file = File::open(path).context("open", path)?;
        let length = file.metadata().context("stat", path)?.len();
        let Some(trailer_at) = length.checked_sub(TRAILER as u64) else {
            return Err(Error::damaged(path, "it is too short for a trailer"));
        };
        let mut trailer = [0; TRAILER];
        read_at(&file, path, &mut trailer, trailer_at)?;
        let mut fields = Fields(&trailer);
        if fields.take::<8>() != MAGIC {
            return Err(Error::damaged(path, "its trailer is not that of a block map"));
        }
        let version = u32::from_le_bytes(fields.take());
        let block_size = u32::from_le_bytes(fields.take());
        let blocks = u64::from_le_bytes(fields.take());
        let rows = u64::from_le_bytes(fields.take());
        let flags = u32::from_le_bytes(fields.take());
        let relative_to = parse_id(&fields.take::<ID>());
        let table_length = rows.checked_mul(ENTRY as u64).filter(|bytes| *bytes <= trailer_at);
        let Some(table_length) = table_length else {
            return Err(Error::damaged(path, format!("its table has {rows} rows")));
        };
        let mut bytes = vec![0; table_length as usize];
        read_at(&file, path, &mut bytes, trailer_at - table_length)?;
        let mut hasher = blake3::Hasher::new();
        hasher.update(&bytes).update(&trailer[..TRAILER - CHECKSUM]);
        if hasher.finalize() != fields.take::<CHECKSUM>() {
            return Err(Error::damaged(path, "the checksum of its table is wrong"));
        }
        // After the checksum: a flipped bit is damage, which can be mended.
        if version != VERSION {
            return Err(Error::UnknownVersion { path: path.into(), version, known: VERSION });
        }
        let (Ok(block_size), Ok(relative_to)) = (BlockSize::try_from(u64::from(block_size)), relative_to)
        else {
            return Err(Error::damaged(path, "its trailer holds impossible values"));
        };
        // No file is longer, so no sum of blocks and bytes below overflows.
        if blocks.checked_mul(block_size.bytes()).is_none_or(|bytes| i64::try_from(bytes).is_err()) {
            return Err(Error::damaged(
                path,
                format!("its trailer names {blocks} blocks of {block_size} bytes"),
            ));
        }
        let table_at = trailer_at - table_length;
        let table = || bytes.chunks_exact(ENTRY).map(Entry::decode);
        let indexes: Vec<SegmentIndex> = table().map(|entry| entry.index).collect();
        let largest = table().map(|entry| entry.length).max().unwrap_or(0);
        let fits = |entry: Entry| {
            let end = entry.offset.checked_add(u64::from(entry.length));
            end.is_some_and(|end| end <= table_at)
                && u64::from(entry.index.0) < blocks.div_ceil(SEGMENT_BLOCKS)
        };
        if !indexes.is_sorted_by(|row, next| row < next) || !table().all(fits) {
            return Err(Error::damaged(path, "its table holds impossible rows"));
        }
        let relative_to = relative_to.map(|snapshot| Relation { snapshot, exact: flags & EXACT != 0 });
        Ok(MapFile {
            file,
            path: path.to_owned(),
            header: MapHeader { block_size, blocks, relative_to },
            indexes,
            table_at,
            largest,
            windows: Mutex::default(),
        })
    }

    /// What the map is about.
    pub fn header(&self) -> &MapHeader {
        &self.header
    }

    /// The file, for messages.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The segments that hold members, ascending.
    pub fn indexes(&self) -> impl Iterator<Item = SegmentIndex> + '_ {
        self.indexes.iter().copied()
    }

    /// Opens a map that may hold too much, `changed` or `pending`; `None` where it is damaged, so that it may hold all.
    pub fn open_sound(path: &Path) -> Result<Option<Self>> {
        sound(MapFile::open(path))
    }

    /// The members of a segment of such a map; `None` where it is damaged.
    pub fn sound_segment(&self, index: SegmentIndex) -> Result<Option<RoaringBitmap>> {
        sound(self.segment(index))
    }

    /// The same with all blocks of a damaged one.
    pub fn segment_or_all(&self, index: SegmentIndex) -> Result<RoaringBitmap> {
        Ok(self.sound_segment(index)?.unwrap_or_else(all_of_a_segment))
    }

    /// The most memory that a segment takes while it is read, in bytes.
    pub(super) fn segment_bytes(&self) -> usize {
        2 * self.largest as usize
    }

    /// The most memory that is kept of the map between two reads, in bytes.
    pub(super) const KEPT: usize = 2 * WINDOW;

    /// Gives that memory up.
    pub(super) fn park(&self) {
        *self.windows.lock() = Windows::default();
    }

    /// The row of a segment and the bytes that are stored of it; `None` where nothing is.
    fn stored(&self, index: SegmentIndex) -> Result<Option<(Entry, Vec<u8>)>> {
        let Ok(row) = self.indexes.binary_search(&index) else { return Ok(None) };
        let Windows { rows, payloads } = &mut *self.windows.lock();
        let table_end = self.table_at + (self.indexes.len() * ENTRY) as u64;
        let at = self.table_at + (row * ENTRY) as u64;
        let entry = Entry::decode(rows.read(&self.file, &self.path, at, ENTRY, table_end)?);
        // A row whose other fields changed names a payload that does not have its checksum.
        if entry.index != index || u64::from(entry.length) > self.table_at {
            return Err(Error::damaged(&self.path, format!("row {row} of its table changed")));
        }
        let length = entry.length as usize;
        if length > WINDOW {
            let mut bytes = vec![0; length];
            read_at(&self.file, &self.path, &mut bytes, entry.offset)?;
            return Ok(Some((entry, bytes)));
        }
        let bytes = payloads.read(&self.file, &self.path, entry.offset, length, self.table_at)?.to_vec();
        Ok(Some((entry, bytes)))
    }

    /// Whether all members differ from the other snapshot that the header names.
    pub fn is_exact(&self) -> bool {
        self.header.relative_to.as_ref().is_some_and(|relation| relation.exact)
    }

    /// One segment's members, counted from its start. Empty where nothing is stored.
    pub fn segment(&self, index: SegmentIndex) -> Result<RoaringBitmap> {
        let Some((entry, bytes)) = self.stored(index)? else { return Ok(RoaringBitmap::new()) };
        if blake3::hash(&bytes) != entry.checksum {
            let range = index.blocks().bytes(self.header.block_size);
            let what = format!("the checksum of bytes {} to {} is wrong", range.start, range.end);
            return Err(Error::damaged(&self.path, what));
        }
        let members = RoaringBitmap::deserialize_from(&bytes[..])
            .map_err(|error| Error::damaged(&self.path, format!("segment {index}: {error}")))?;
        match members.max().is_some_and(|last| index.block(last) >= Block(self.header.blocks)) {
            true => Err(Error::damaged(&self.path, format!("segment {index} holds blocks past its end"))),
            false => Ok(members),
        }
    }

    /// The number of members, each segment read once.
    pub fn count(&self) -> Result<u64> {
        self.indexes().try_fold(0, |sum, index| Ok(sum + self.segment(index)?.len()))
    }
}

/// Damage of a map that may hold too much costs time, and no answer: it is logged, and the map not believed.
fn sound<T>(read: Result<T>) -> Result<Option<T>> {
    match read {
        Err(Error::Damaged { path, what }) => {
            tracing::error!(path = %path.display(), what, "a map is damaged, reading more than it would have asked for");
            Ok(None)
        }
        read => read.map(Some),
    }
}

pub(super) fn all_of_a_segment() -> RoaringBitmap {
    let mut all = RoaringBitmap::new();
    all.insert_range(0..SEGMENT_BLOCKS as u32);
    all
}

impl Entry {
    fn decode(row: &[u8]) -> Self {
        let mut fields = Fields(row);
        Entry {
            index: SegmentIndex(u32::from_le_bytes(fields.take())),
            length: u32::from_le_bytes(fields.take()),
            offset: u64::from_le_bytes(fields.take()),
            checksum: fields.take(),
        }
    }

    fn encode(&self, bytes: &mut Vec<u8>) {
        bytes.extend(self.index.0.to_le_bytes());
        bytes.extend(self.length.to_le_bytes());
        bytes.extend(self.offset.to_le_bytes());
        bytes.extend(self.checksum);
    }
}

/// Takes fields of a fixed length from the front of a buffer whose length the caller checked.
struct Fields<'b>(&'b [u8]);

impl Fields<'_> {
    fn take<const N: usize>(&mut self) -> [u8; N] {
        let (field, rest) = self.0.split_first_chunk().expect("the caller sized the buffer");
        self.0 = rest;
        *field
    }
}

fn parse_id(field: &[u8; ID]) -> Result<Option<SnapshotId>, ()> {
    let length = field.iter().position(|byte| *byte == 0).unwrap_or(ID);
    if length == 0 {
        return Ok(None);
    }
    let text = std::str::from_utf8(&field[..length]).map_err(drop)?;
    text.parse().map(Some).map_err(drop)
}

/// The segments that any of these maps holds members in, ascending.
pub(super) fn all_indexes<'m>(maps: impl Iterator<Item = &'m MapFile>) -> Vec<SegmentIndex> {
    let mut indexes: Vec<SegmentIndex> = maps.flat_map(MapFile::indexes).collect();
    indexes.sort_unstable();
    indexes.dedup();
    indexes
}

/// The segment of a block, and its place in it, as roaring bitmaps count.
pub(super) fn locate(block: Block) -> (SegmentIndex, u32) {
    // A volume has at most 2^63 / 4096 = 2^51 blocks, so both parts fit.
    (SegmentIndex((block.0 / SEGMENT_BLOCKS) as u32), (block.0 % SEGMENT_BLOCKS) as u32)
}

#[cfg(any(test, feature = "fuzz"))]
pub(super) mod fuzz;
#[cfg(test)]
mod tests;
mod window;
mod writer;

pub use writer::{MapWriter, copy_map, write_union};
