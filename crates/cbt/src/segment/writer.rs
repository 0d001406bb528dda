//! Writing a map: one of new members, a copy of another, the union of several.

use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};

use roaring::RoaringBitmap;

use super::{
    ENTRY, EXACT, Entry, ID, MAGIC, MapFile, MapHeader, Relation, SegmentIndex, TRAILER, VERSION,
    all_indexes, locate,
};
use crate::Result;
use base::{BlockRange, Stop};
use files::{Context, change};

/// Bytes of a map that are gathered before they are written.
const AT_ONCE: usize = 64 << 10;

/// Writes a map in one ascending pass.
#[derive(Debug)]
pub struct MapWriter {
    file: File,
    path: PathBuf,
    header: MapHeader,
    table: Vec<Entry>,
    /// The length of the map so far.
    offset: u64,
    /// Its end, which is not in the file yet.
    waiting: Vec<u8>,
    /// The segment that is being gathered.
    current: SegmentIndex,
    members: RoaringBitmap,
}

impl MapWriter {
    /// Starts a map in a new file.
    pub fn create(path: &Path, header: MapHeader) -> Result<Self> {
        Ok(MapWriter {
            file: change::create_new(path)?,
            path: path.to_owned(),
            header,
            table: Vec::new(),
            offset: 0,
            waiting: Vec::new(),
            current: SegmentIndex(0),
            members: RoaringBitmap::new(),
        })
    }

    /// Adds blocks at or past those added before.
    pub fn insert(&mut self, range: BlockRange) -> Result<()> {
        let mut start = range.start;
        while start < range.end {
            let (index, within) = locate(start);
            self.turn_to(index)?;
            let end = range.end.min(index.blocks().end);
            self.members.insert_range(within..within + (end - start) as u32);
            start = end;
        }
        Ok(())
    }

    /// Adds a whole segment past those added before.
    pub fn insert_segment(&mut self, index: SegmentIndex, members: RoaringBitmap) -> Result<()> {
        self.turn_to(index)?;
        if self.members.is_empty() {
            self.members = members;
        } else {
            self.members |= members;
        }
        Ok(())
    }

    /// Adds a whole segment of another map past those added before, as it is stored: a damaged one stays
    /// damaged, under the same checksum. One that cannot be read is an error, and nothing is added.
    pub fn copy_segment(&mut self, from: &MapFile, index: SegmentIndex) -> Result<()> {
        let Some((entry, bytes)) = from.stored(index)? else { return Ok(()) };
        self.turn_to(SegmentIndex(index.0 + 1))?;
        self.table.push(Entry { offset: self.offset, ..entry });
        self.append(&bytes)
    }

    /// Segments of sparse maps have some tens of bytes, and a volume of 16 TiB has a thousand of them: they are written
    /// together.
    fn append(&mut self, bytes: &[u8]) -> Result<()> {
        self.waiting.extend_from_slice(bytes);
        self.offset += bytes.len() as u64;
        if self.waiting.len() >= AT_ONCE { self.write_out() } else { Ok(()) }
    }

    fn write_out(&mut self) -> Result<()> {
        let at = self.offset - self.waiting.len() as u64;
        change::write_at(&self.file, &self.path, &self.waiting, at)?;
        self.waiting.clear();
        Ok(())
    }

    fn turn_to(&mut self, index: SegmentIndex) -> Result<()> {
        assert!(index >= self.current, "maps are written in ascending order");
        if index > self.current {
            self.flush()?;
            self.current = index;
        }
        Ok(())
    }

    fn flush(&mut self) -> Result<()> {
        let mut members = std::mem::take(&mut self.members);
        if members.is_empty() {
            return Ok(());
        }
        members.optimize();
        let mut bytes = Vec::with_capacity(members.serialized_size());
        members.serialize_into(&mut bytes).context("write", &self.path)?;
        let length = u32::try_from(bytes.len())
            .map_err(|_| io::Error::from(io::ErrorKind::FileTooLarge))
            .context("write", &self.path)?;
        let checksum = *blake3::hash(&bytes).as_bytes();
        self.table.push(Entry { index: self.current, length, offset: self.offset, checksum });
        self.append(&bytes)
    }

    /// Writes the table and the trailer and syncs the file. Its directory entry is the caller's to
    /// sync.
    pub fn finish(mut self) -> Result<()> {
        self.flush()?;
        let mut bytes = Vec::with_capacity(self.table.len() * ENTRY + TRAILER);
        for entry in &self.table {
            entry.encode(&mut bytes);
        }
        bytes.extend(MAGIC);
        bytes.extend(VERSION.to_le_bytes());
        bytes.extend((self.header.block_size.bytes() as u32).to_le_bytes());
        bytes.extend(self.header.blocks.to_le_bytes());
        bytes.extend((self.table.len() as u64).to_le_bytes());
        let mut id = [0; ID];
        let exact = self.header.relative_to.as_ref().is_some_and(|relation| relation.exact);
        bytes.extend(if exact { EXACT } else { 0 }.to_le_bytes());
        if let Some(Relation { snapshot, .. }) = &self.header.relative_to {
            id[..snapshot.as_str().len()].copy_from_slice(snapshot.as_str().as_bytes());
        }
        bytes.extend(id);
        let checksum = blake3::hash(&bytes);
        bytes.extend(checksum.as_bytes());
        self.append(&bytes)?;
        self.write_out()?;
        Ok(change::sync(&self.file, &self.path)?)
    }
}

/// Writes the same map to another file, without decoding its members.
pub fn copy_map(path: &Path, map: &MapFile, stop: &Stop) -> Result<()> {
    let mut writer = MapWriter::create(path, map.header().clone())?;
    for index in map.indexes() {
        stop.check()?;
        writer.copy_segment(map, index)?;
    }
    writer.finish()
}

/// Writes the union of maps as a new map; returns the number of its members.
pub fn write_union(path: &Path, header: MapHeader, maps: &[&MapFile], stop: &Stop) -> Result<u64> {
    let mut writer = MapWriter::create(path, header)?;
    let mut count = 0;
    for index in all_indexes(maps.iter().copied()) {
        stop.check()?;
        let mut union = RoaringBitmap::new();
        for map in maps {
            union |= map.segment(index)?;
        }
        count += union.len();
        writer.insert_segment(index, union)?;
    }
    writer.finish()?;
    Ok(count)
}
