//! Packs: objects of some megabytes that hold chunks, and a table of them. Making one, reading parts of one.
//!
//! - One object for each chunk would mean a file and a sync, or a request, for 64 KiB. So chunks are in packs.
//! - A chunk holds the data of one cell. Smaller cells need more rows (40 bytes each) and more calls of zstd. Larger cells need
//!   more reading for each small piece that a restore wants.
//! - An incremental backup stores the changed blocks of a cell as one chunk and keeps the rest of the old chunk, unless half of
//!   the cell changed. So a change of 4 KiB reads and writes 4 KiB. A cell has at most sixteen pieces.
//! - The map of a segment is read with the 64 KiB behind it. Backups, restores and mounts ask for maps in about that order, and
//!   in a bucket each read is a request.

use std::borrow::Cow;
use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;

use bytes::Bytes;
use files::AlignedBuffer;
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};

use crate::error::{Error, Result, refused};

/// A chunk is at most so long, raw: data has [`CELL`], the map of a segment more.
pub const MAX_CHUNK: usize = 8 << 20;
/// Raw bytes of a chunk of data.
pub const CELL: u64 = 64 << 10;
/// A pack is closed once it holds this number of bytes.
pub const PACK: usize = 16 << 20;
/// A pack is closed once it holds this number of chunks, so that its table stays small.
const MAX_ROWS: usize = 16384;
/// No pack is longer: one that is not full yet takes one chunk more.
pub const MAX_PACK: usize = PACK + MAX_CHUNK + MAX_ROWS * ROW;
/// Bytes that are compressed to see whether more are worth it.
const SAMPLE: usize = 8 << 10;
/// Bytes of a row.
const ROW: usize = 40;

/// A pack as those name it who use it.
///
/// ```text
/// chunks                 one after another; zstd (with its own checksum of the raw bytes), or raw where that is no shorter
/// table                  a row of 40 bytes for each chunk, little-endian
///    0   4   stored      length in the pack, u32
///    4   4   raw         length when decompressed, u32; equal to `stored`: it is not compressed
///    8  32   BLAKE3 of the stored bytes
/// ```
///
/// The pack is named by the BLAKE3 of its table, and the table has that of every chunk: no bit of it is without a
/// checksum. It never changes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct PackRef {
    /// BLAKE3 of the table.
    pub id: [u8; 32],
    /// Length of the whole object.
    pub bytes: u32,
    pub rows: u32,
}

impl PackRef {
    /// Where the table lies in the object.
    pub fn table(&self) -> Range<u64> {
        let bytes = u64::from(self.bytes);
        bytes.saturating_sub(u64::from(self.rows) * ROW as u64)..bytes
    }

    /// The id as text.
    pub fn name(&self) -> String {
        blake3::Hash::from(self.id).to_hex().to_string()
    }
}

/// An error where a pack is larger than any that is written: what reads it makes room for all that its lengths say.
pub fn check(packs: &[PackRef], name: &str) -> Result<()> {
    let is_wrong = |pack: &&PackRef| {
        let (rows, bytes) = (pack.rows as usize, pack.bytes as usize);
        rows > MAX_ROWS || bytes > MAX_PACK || rows * ROW > bytes
    };
    match packs.iter().find(is_wrong) {
        Some(PackRef { rows, bytes, .. }) => Err(Error::damaged(
            name,
            format!("it names a pack of {bytes} bytes with {rows} chunks, which cannot be"),
        )),
        None => Ok(()),
    }
}

/// The packs that a backup uses, each in one place.
#[derive(Debug, Default)]
pub struct Packs {
    /// The last one may be still open: a place without a pack.
    places: Vec<Option<PackRef>>,
    by_id: HashMap<[u8; 32], u32>,
}

impl Packs {
    /// With the same places as in a list, in which none comes twice.
    pub fn of(list: &[PackRef]) -> Self {
        let mut packs = Packs::default();
        for pack in list {
            packs.intern(*pack);
        }
        packs
    }

    /// The place of a pack, a new one where it has none.
    pub fn intern(&mut self, pack: PackRef) -> u32 {
        if let Some(place) = self.by_id.get(&pack.id) {
            return *place;
        }
        let place = self.reserve();
        self.fill(place, pack);
        place
    }

    /// A place for a pack that is not closed yet.
    pub fn reserve(&mut self) -> u32 {
        self.places.push(None);
        self.places.len() as u32 - 1
    }

    /// Says which pack it has become.
    pub fn fill(&mut self, place: u32, pack: PackRef) {
        self.places[place as usize] = Some(pack);
        self.by_id.entry(pack.id).or_insert(place);
    }

    /// Whether the pack of a place is closed.
    pub fn is_filled(&self, place: u32) -> bool {
        self.places.get(place as usize).is_some_and(Option::is_some)
    }

    /// The pack in a place that is filled.
    pub fn get(&self, place: u32) -> &PackRef {
        // Callers hold places that this table gave them, and that are filled.
        self.places[place as usize].as_ref().expect("a pack that is closed")
    }
}

/// A row of a table, with the place of the chunk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Row {
    /// First byte in the pack.
    pub start: u64,
    /// Length in the pack.
    pub stored: u32,
    /// Length of the content.
    pub raw: u32,
    /// BLAKE3 of the stored bytes.
    pub hash: [u8; 32],
}

impl Row {
    /// Where the chunk lies in the pack.
    pub fn range(&self) -> Range<u64> {
        self.start..self.start + u64::from(self.stored)
    }

    /// Checks the stored bytes of the chunk, and gives its content.
    pub fn open<'s>(&self, stored: &'s [u8]) -> Result<Cow<'s, [u8]>> {
        let damaged = |why: String| Error::damaged("a chunk", why);
        if blake3::hash(stored).as_bytes() != &self.hash {
            return Err(damaged("its checksum differs".into()));
        }
        if self.stored == self.raw {
            return Ok(stored.into());
        }
        let raw =
            zstd::bulk::decompress(stored, self.raw as usize).map_err(|error| damaged(error.to_string()))?;
        match raw.len() == self.raw as usize {
            true => Ok(raw.into()),
            false => Err(damaged(format!("it holds {} bytes instead of {}", raw.len(), self.raw))),
        }
    }
}

/// Reads the table of a pack, and checks it against what names it.
pub fn read_table(pack: &PackRef, bytes: &[u8]) -> Result<Vec<Row>> {
    let damaged = |why: &str| Error::damaged(format!("the table of pack {}", pack.name()), why);
    if blake3::hash(bytes).as_bytes() != &pack.id || bytes.len() != pack.rows as usize * ROW {
        return Err(damaged("its checksum differs"));
    }
    let number = |bytes: &[u8]| u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]);
    let mut start = 0;
    let mut rows = Vec::with_capacity(pack.rows as usize);
    for row in bytes.chunks_exact(ROW) {
        let mut hash = [0; 32];
        hash.copy_from_slice(&row[8..]);
        let row = Row { start, stored: number(&row[..4]), raw: number(&row[4..8]), hash };
        if row.raw as usize > MAX_CHUNK || row.stored > row.raw {
            return Err(damaged("a row is impossible"));
        }
        start += u64::from(row.stored);
        rows.push(row);
    }
    match start == pack.table().start {
        true => Ok(rows),
        false => Err(damaged("its chunks are not as long as the pack")),
    }
}

/// A chunk that is ready for a pack.
#[derive(Debug)]
pub struct Chunk<'s> {
    stored: Cow<'s, [u8]>,
    raw: u32,
    hash: [u8; 32],
}

impl<'s> Chunk<'s> {
    /// A chunk as another pack holds it.
    pub fn copied(row: &Row, stored: impl Into<Cow<'s, [u8]>>) -> Self {
        Chunk { stored: stored.into(), raw: row.raw, hash: row.hash }
    }
}

/// Makes chunks of bytes. One a thread.
pub struct Compressor {
    zstd: zstd::bulk::Compressor<'static>,
    /// Whether the last chunk became shorter: then the next one most likely does, too.
    is_worth_it: bool,
}

impl Compressor {
    /// With a level of zstd: 1 to 19, or below 0 for one of its fast ones.
    pub fn new(level: i32) -> Result<Self> {
        let make = || {
            let mut zstd = zstd::bulk::Compressor::new(level)?;
            zstd.include_checksum(true)?;
            Ok(Compressor { zstd, is_worth_it: false })
        };
        make().map_err(|error: std::io::Error| refused!("zstd at level {level}: {error}"))
    }

    /// A chunk of at most [`MAX_CHUNK`] bytes.
    pub fn chunk<'r>(&mut self, raw: &'r [u8]) -> Chunk<'r> {
        // Of what is compressed or encrypted already a look at two places is enough, and saves most of the time. Where the
        // last chunk became shorter, the look would only be more work.
        let is_worth_it = self.is_worth_it
            || raw.len() <= 4 * SAMPLE
            || [0, raw.len() / 2].iter().any(|at| self.compressed(&raw[*at..*at + SAMPLE]).is_some());
        let shorter = is_worth_it.then(|| self.compressed(raw)).flatten();
        self.is_worth_it = shorter.is_some();
        let stored = shorter.map_or(Cow::from(raw), Cow::from);
        Chunk { raw: raw.len() as u32, hash: *blake3::hash(&stored).as_bytes(), stored }
    }

    /// Bytes that are shorter by a sixteenth at least, or none.
    fn compressed(&mut self, raw: &[u8]) -> Option<Vec<u8>> {
        let mut stored = Vec::with_capacity(raw.len() - raw.len() / 16);
        // An error is that the buffer ends.
        self.zstd.compress_to_buffer(raw, &mut stored).ok().map(|_| stored)
    }
}

/// The memory of packs that are stored, for the next ones: the kernel clears every page of fresh memory.
#[derive(Clone, Debug, Default)]
pub struct Spare(Arc<Mutex<Vec<AlignedBuffer>>>);

/// Memory that is given back when it is dropped.
struct Lent {
    bytes: AlignedBuffer,
    to: Spare,
}

impl AsRef<[u8]> for Lent {
    fn as_ref(&self) -> &[u8] {
        &self.bytes
    }
}

impl Drop for Lent {
    fn drop(&mut self) {
        self.to.0.lock().push(std::mem::take(&mut self.bytes));
    }
}

/// A pack in the making.
#[derive(Debug)]
pub struct OpenPack {
    /// As long as the chunks of a pack become; the first `length` bytes are in use.
    bytes: AlignedBuffer,
    length: usize,
    table: Vec<u8>,
    spare: Spare,
}

impl OpenPack {
    pub fn new(spare: &Spare) -> Self {
        // What is not written to takes no memory.
        let bytes = spare.0.lock().pop().unwrap_or_else(|| AlignedBuffer::new(PACK + MAX_CHUNK));
        OpenPack { bytes, length: 0, table: Vec::new(), spare: spare.clone() }
    }

    /// Takes a chunk and says its number.
    pub fn push(&mut self, chunk: &Chunk) -> u32 {
        let number = self.table.len() / ROW;
        self.bytes[self.length..][..chunk.stored.len()].copy_from_slice(&chunk.stored);
        self.length += chunk.stored.len();
        self.table.extend_from_slice(&(chunk.stored.len() as u32).to_le_bytes());
        self.table.extend_from_slice(&chunk.raw.to_le_bytes());
        self.table.extend_from_slice(&chunk.hash);
        number as u32
    }

    /// Whether it is time to close it.
    pub fn is_full(&self) -> bool {
        self.length >= PACK || self.table.len() >= MAX_ROWS * ROW
    }

    /// Closes it: what names it, and the parts of the object.
    pub fn close(self) -> (PackRef, [Bytes; 2]) {
        let chunks = Bytes::from_owner(Lent { bytes: self.bytes, to: self.spare }).slice(..self.length);
        let pack = PackRef {
            id: *blake3::hash(&self.table).as_bytes(),
            bytes: (chunks.len() + self.table.len()) as u32,
            rows: (self.table.len() / ROW) as u32,
        };
        (pack, [chunks, self.table.into()])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pack(contents: &[Vec<u8>]) -> (PackRef, Vec<u8>) {
        let mut open = OpenPack::new(&Spare::default());
        let mut compressor = Compressor::new(1).expect("zstd");
        for (number, content) in (0..).zip(contents) {
            assert_eq!(open.push(&compressor.chunk(content)), number);
        }
        let (pack, parts) = open.close();
        (pack, parts.concat())
    }

    fn contents() -> Vec<Vec<u8>> {
        let mut random = fastrand::Rng::with_seed(1);
        let noise = std::iter::repeat_with(|| random.u8(..)).take(9000).collect();
        vec![vec![7; 65536], noise, vec![0; 4096]]
    }

    #[test]
    fn chunks_come_back_and_only_what_shrinks_is_compressed() {
        let (pack, bytes) = pack(&contents());
        assert_eq!(pack.bytes as usize, bytes.len());
        let table = pack.table();
        let rows = read_table(&pack, &bytes[table.start as usize..]).expect("a table");
        assert!(rows[0].stored < 200 && rows[1].stored == 9000);
        for (row, content) in rows.iter().zip(contents()) {
            let stored = &bytes[row.start as usize..row.range().end as usize];
            assert_eq!(row.open(stored).expect("a chunk"), content);
        }
    }

    #[test]
    fn every_bit_is_covered() {
        let (pack, bytes) = pack(&contents());
        let is_sound = |bytes: &[u8]| {
            let rows = read_table(&pack, &bytes[pack.table().start as usize..])?;
            for row in &rows {
                row.open(&bytes[row.start as usize..row.range().end as usize])?;
            }
            Ok::<_, Error>(())
        };
        is_sound(&bytes).expect("sound");
        for bit in 0..bytes.len() * 8 {
            let mut flipped = bytes.clone();
            flipped[bit / 8] ^= 1 << (bit % 8);
            assert!(is_sound(&flipped).is_err(), "bit {bit}");
        }
    }
}
