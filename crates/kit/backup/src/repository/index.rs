//! The index of a backup: what it is, and where the maps of its segments lie. One object a backup; without it the backup
//! does not exist.

use serde::de::DeserializeOwned;
use serde::{Deserialize, Deserializer, Serialize};

use super::pack::{self, PackRef};
use crate::error::{Error, Result, refused};

/// Cells of a drawn map.
pub const CELLS: usize = 1024;

/// Full or incremental.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Kind {
    /// All data was read.
    #[default]
    Full,
    /// What changed since another backup was read; the rest is named.
    Incremental,
}

impl std::fmt::Display for Kind {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Kind::Full => "full",
            Kind::Incremental => "incremental",
        })
    }
}

/// What a backup is, for people.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct About {
    /// Its name in the repository: the time, and random digits.
    pub id: String,
    /// The name that the user gives the volume.
    pub volume: String,
    /// When it began, in seconds since 1970.
    pub created: i64,
    pub kind: Kind,
    /// The backup that it was made over.
    pub base: Option<String>,
    /// Why it is full, where an incremental one was wished for.
    pub why: Option<String>,
    /// The handle of the CSI snapshot: what an incremental backup after this one has as its base.
    pub snapshot: Option<String>,
    /// The device or image it was read from.
    pub device: String,
    /// Bytes of the volume.
    pub size: u64,
    /// Bytes that are not zeros, in blocks.
    pub data: u64,
    /// Bytes that were listed as allocated or changed.
    pub listed: u64,
    /// Bytes that were read.
    pub read: u64,
    /// Bytes that were added to the repository.
    pub added: u64,
    /// How long it took.
    pub milliseconds: u64,
}

/// A segment that holds data, and the chunk with its map.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SegmentRef {
    /// Which segment of the volume.
    pub number: u32,
    /// The pack with its map, as a place in [`Index::packs`].
    pub pack: u32,
    pub chunk: u32,
    pub blocks: u32,
    /// The packs with its data.
    pub packs: Vec<u32>,
    /// How much of each sixteenth of it holds data: 0 nothing, 255 all.
    pub fill: [u8; 16],
}

/// An index as it is stored, in an [`envelope`]. Written last: everything it names is durable before.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Index {
    pub about: About,
    /// Every pack that the backup needs.
    pub packs: Vec<PackRef>,
    /// The segments that hold data, ascending.
    pub segments: Vec<SegmentRef>,
    /// For each of 1024 parts of the volume, how much of it was listed as allocated or changed: 0 nothing, 255 all.
    pub changed: Vec<u8>,
}

impl Index {
    /// Reads an index, and checks that it holds together.
    pub fn decode(bytes: &[u8], name: &str) -> Result<Self> {
        let index: Index = open(bytes, name)?;
        check(&index.about, &index.packs, &index.segments, name)?;
        match index.changed.len() == CELLS {
            true => Ok(index),
            false => Err(Error::damaged(name, "its map has another number of cells than 1024")),
        }
    }

    /// A segment, where it holds data.
    pub fn segment(&self, number: u32) -> Option<&SegmentRef> {
        let place = self.segments.binary_search_by_key(&number, |segment| segment.number);
        place.ok().map(|place| &self.segments[place])
    }
}

/// What a backup, whole or interrupted, names must be there, and no larger than anybody writes it: others take it at its word.
pub fn check(about: &About, packs: &[PackRef], segments: &[SegmentRef], name: &str) -> Result<()> {
    let pack = |place: &u32| packs.get(*place as usize);
    pack::check(packs, name)?;
    let mut ids: Vec<&[u8; 32]> = packs.iter().map(|pack| &pack.id).collect();
    ids.sort_unstable();
    let are_distinct = ids.is_sorted_by(|a, b| a < b);
    let is_ascending = segments.is_sorted_by(|a, b| a.number < b.number);
    let is_inside = segments.last().is_none_or(|last| u64::from(last.number) * super::SEGMENT < about.size);
    let are_known = segments.iter().all(|of| {
        pack(&of.pack).is_some_and(|pack| of.chunk < pack.rows)
            && of.packs.iter().all(|of| pack(of).is_some())
    });
    let is_possible = about.size <= MAX_SIZE;
    match are_distinct && is_ascending && is_inside && are_known && is_possible {
        true => Ok(()),
        false => Err(Error::damaged(name, "its parts contradict each other")),
    }
}

/// Reads a field that was not there in an earlier version: all after the last one is missing then.
pub fn if_there<'d, D: Deserializer<'d>, T: Deserialize<'d> + Default>(from: D) -> Result<T, D::Error> {
    Ok(T::deserialize(from).unwrap_or_default())
}

/// Numbers of segments have 32 bits.
const MAX_SIZE: u64 = super::SEGMENT << 32;

const MAGIC: &[u8; 8] = b"cbtbackp";
/// Of everything in a repository. One with another is refused.
pub const VERSION: u32 = 1;

/// Bytes of an object that is not a pack:
///
/// ```text
///    0   8   "cbtbackp"
///    8   4   version, u32, little-endian: 1
///   12       content, postcard
///  end  32   BLAKE3 of all before
/// ```
pub fn envelope(content: &impl Serialize) -> Vec<u8> {
    // Numbers, texts and lists, into a vector.
    seal(&postcard::to_stdvec(content).expect("nothing in it that postcard refuses"))
}

/// The envelope of some content.
pub fn seal(content: &[u8]) -> Vec<u8> {
    let mut bytes = [MAGIC.as_slice(), &VERSION.to_le_bytes(), content].concat();
    let hash = blake3::hash(&bytes);
    bytes.extend(hash.as_bytes());
    bytes
}

/// Reads an [`envelope`].
pub fn open<T: DeserializeOwned>(bytes: &[u8], name: &str) -> Result<T> {
    let Some((content, hash)) = bytes.split_last_chunk::<32>() else {
        return Err(Error::damaged(name, "it is too short"));
    };
    if blake3::hash(content).as_bytes() != hash {
        return Err(Error::damaged(name, "its checksum differs"));
    }
    let version = content.strip_prefix(MAGIC).and_then(|rest| rest.split_first_chunk::<4>());
    match version {
        Some((version, content)) if u32::from_le_bytes(*version) == VERSION => {
            postcard::from_bytes(content).map_err(|error| Error::damaged(name, error.to_string()))
        }
        Some((version, _)) => Err(refused!(
            "{name} has format {}; this cbt-backup knows format {VERSION}: use the one that wrote it",
            u32::from_le_bytes(*version)
        )),
        None => Err(Error::damaged(name, "it is not a file of a cbt-backup repository")),
    }
}

/// How full the cells of a drawn map are.
#[derive(Clone, Debug)]
pub struct Cells {
    size: u64,
    bytes: Vec<u64>,
}

impl Cells {
    pub fn new(size: u64) -> Self {
        Cells { size, bytes: vec![0; CELLS] }
    }

    fn edge(&self, cell: usize) -> u64 {
        (u128::from(self.size) * cell as u128 / CELLS as u128) as u64
    }

    /// Counts a range of bytes.
    pub fn add(&mut self, start: u64, end: u64) {
        let (mut start, end) = (start, end.min(self.size));
        while start < end {
            let mut cell = (u128::from(start) * CELLS as u128 / u128::from(self.size)) as usize;
            while self.edge(cell + 1) <= start {
                cell += 1;
            }
            let stop = end.min(self.edge(cell + 1));
            self.bytes[cell] += stop - start;
            start = stop;
        }
    }

    /// A byte a cell; 0 only where there is nothing.
    pub fn finish(&self) -> Vec<u8> {
        let fill = |(cell, bytes): (usize, &u64)| {
            let whole = (self.edge(cell + 1) - self.edge(cell)).max(1);
            (u128::from(*bytes) * 255).div_ceil(u128::from(whole)).min(255) as u8
        };
        self.bytes.iter().enumerate().map(fill).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_bit_of_an_envelope_is_covered() {
        let bytes = envelope(&("text".to_owned(), 5u32));
        assert_eq!(open::<(String, u32)>(&bytes, "it").expect("whole"), ("text".to_owned(), 5));
        for bit in 0..bytes.len() * 8 {
            let mut flipped = bytes.clone();
            flipped[bit / 8] ^= 1 << (bit % 8);
            assert!(open::<(String, u32)>(&flipped, "it").is_err(), "bit {bit}");
        }
        for length in 0..bytes.len() {
            assert!(open::<(String, u32)>(&bytes[..length], "it").is_err(), "cut at {length}");
        }
    }

    #[test]
    fn cells_hold_every_byte_once() {
        for size in [1, 4096, 1 << 20, (1 << 30) + 12288, 8 << 40] {
            let mut cells = Cells::new(size);
            cells.add(0, size / 2);
            cells.add(size / 2, size);
            assert_eq!(cells.bytes.iter().sum::<u64>(), size);
            assert!((0..CELLS).all(|cell| cells.bytes[cell] == cells.edge(cell + 1) - cells.edge(cell)));
        }
        let mut cells = Cells::new(8 << 40);
        cells.add(5, 6);
        assert_eq!((cells.finish()[0], cells.finish()[1]), (1, 0));
    }
}
