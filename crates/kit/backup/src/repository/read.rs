//! Reading chunks of packs: a map of a segment, or the data of many extents in as few requests as may be.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;

use bytes::Bytes;
use files::AlignedBuffer;

use super::names::pack_name;
use super::pack::{PackRef, Packs, Row, read_table};
use super::{BLOCK, Extent, Index, Repository, SEGMENT, Segment, SegmentRef};
use crate::error::{Error, Result};

/// Parts of a pack that are read at once, and what may lie between them unused.
const SPAN: u64 = 4 << 20;
const SPAN_GAP: u64 = 128 << 10;
/// Rows of tables that are remembered: 25 MB of them.
const REMEMBERED_ROWS: usize = 1 << 19;
/// Bytes of a pack that are read for one chunk. It is the map of a segment, and those of the next segments mostly follow it.
const AHEAD: u64 = 64 << 10;
/// Such parts that are remembered: several threads ask, not quite in order.
const REMEMBERED_PARTS: usize = 16;

/// Blocks of a volume and where they are stored.
#[derive(Clone, Copy, Debug)]
pub struct Piece {
    /// First byte in the volume.
    pub offset: u64,
    pub blocks: u32,
    pub pack: PackRef,
    pub chunk: u32,
    /// Blocks of the chunk before the first that is meant.
    pub skip: u32,
}

/// A part of a pack.
#[derive(Debug)]
pub struct Part {
    pack: [u8; 32],
    start: u64,
    bytes: Bytes,
}

impl Part {
    fn slice(&self, pack: &PackRef, range: &Range<u64>) -> Option<Bytes> {
        let has = self.start..self.start + self.bytes.len() as u64;
        let is_in = self.pack == pack.id && has.start <= range.start && range.end <= has.end;
        is_in.then(|| self.bytes.slice((range.start - has.start) as usize..(range.end - has.start) as usize))
    }
}

/// Those that were read last.
pub type Parts = VecDeque<Part>;

impl Repository {
    /// The table of a pack.
    pub fn table(&self, pack: &PackRef) -> Result<Arc<Vec<Row>>> {
        let known = self.tables.lock().get(&pack.id).cloned();
        if let Some(table) = known {
            // Another index may say otherwise of the same pack.
            return match table.len() == pack.rows as usize {
                true => Ok(table),
                false => Err(Error::damaged(
                    format!("pack {}", pack.name()),
                    format!("it has {} chunks, and not the {} of an index", table.len(), pack.rows),
                )),
            };
        }
        let table = Arc::new(read_table(pack, &self.store.get_range(&pack_name(pack), pack.table())?)?);
        let mut tables = self.tables.lock();
        if tables.values().map(|table| table.len()).sum::<usize>() > REMEMBERED_ROWS {
            tables.clear();
        }
        tables.insert(pack.id, table.clone());
        Ok(table)
    }

    /// A whole chunk.
    pub fn chunk(&self, pack: &PackRef, chunk: u32) -> Result<Vec<u8>> {
        let table = self.table(pack)?;
        let row = row(pack, &table, chunk)?;
        let stored = self.part(pack, row.range())?;
        let content = row.open(&stored).map_err(|error| in_pack(error, pack, chunk))?;
        Ok(content.into_owned())
    }

    /// Bytes of a pack. Those behind them are read with them and kept for the next calls.
    fn part(&self, pack: &PackRef, range: Range<u64>) -> Result<Bytes> {
        if let Some(bytes) = self.parts.lock().iter().find_map(|part| part.slice(pack, &range)) {
            return Ok(bytes);
        }
        let (name, start) = (pack_name(pack), range.start);
        let end = range.end.max(pack.table().start.min(start + AHEAD));
        let bytes = match self.store.get_range(&name, start..end) {
            // Those behind may be what is damaged.
            Err(error) if error.is_damage() => return self.store.get_range(&name, range),
            bytes => bytes?,
        };
        let wanted = bytes.slice(..(range.end - start) as usize);
        let mut parts = self.parts.lock();
        parts.truncate(REMEMBERED_PARTS - 1);
        parts.push_front(Part { pack: pack.id, start, bytes });
        Ok(wanted)
    }

    /// The map of a segment, with places in `packs`.
    pub fn segment(&self, index: &Index, of: &SegmentRef, packs: &mut Packs) -> Result<Segment> {
        let bytes = self.chunk(&index.packs[of.pack as usize], of.chunk)?;
        let segment = Segment::decode(&bytes, packs)?;
        let end = segment.extents.last().map_or(0, Extent::end);
        let is_inside = u64::from(of.number) * SEGMENT + u64::from(end) * BLOCK < index.about.size + BLOCK;
        match segment.blocks() == u64::from(of.blocks) && is_inside {
            true => Ok(segment),
            false => Err(Error::damaged("the map of a segment", "it holds more or less than the index says")),
        }
    }

    /// The same by its number. One that holds no data is empty.
    pub fn segment_at(&self, index: &Index, number: u32, packs: &mut Packs) -> Result<Segment> {
        index.segment(number).map_or_else(|| Ok(Segment::default()), |of| self.segment(index, of, packs))
    }

    /// Reads pieces and hands their bytes on, checked: part of a pack after part of a pack, and of each the chunks in the
    /// order of the volume. An extent beyond its chunk is damage.
    pub fn fetch(
        &self,
        mut pieces: Vec<Piece>,
        emit: &mut dyn FnMut(&Piece, &[u8]) -> Result<()>,
    ) -> Result<()> {
        pieces.sort_unstable_by_key(|piece| (piece.pack.id, piece.chunk, piece.offset));
        let mut buffer = AlignedBuffer::default();
        for pieces in pieces.chunk_by(|a, b| a.pack == b.pack) {
            let pack = &pieces[0].pack;
            let table = self.table(pack)?;
            let mut rest = pieces;
            while let Some(first) = rest.first() {
                let mut span = row(pack, &table, first.chunk)?.range();
                let mut count = 0;
                for piece in rest {
                    let next = row(pack, &table, piece.chunk)?.range();
                    if next.start > span.end + SPAN_GAP || next.end - span.start > SPAN && count > 0 {
                        break;
                    }
                    span.end = span.end.max(next.end);
                    count += 1;
                }
                let (now, later) = rest.split_at(count);
                let bytes = self.store.read_into(&pack_name(pack), span.clone(), &mut buffer)?;
                emit_span(pack, &table, now, bytes, span.start, emit)?;
                rest = later;
            }
        }
        Ok(())
    }
}

fn emit_span(
    pack: &PackRef,
    table: &[Row],
    pieces: &[Piece],
    bytes: &[u8],
    start: u64,
    emit: &mut dyn FnMut(&Piece, &[u8]) -> Result<()>,
) -> Result<()> {
    let mut chunks: Vec<&[Piece]> = pieces.chunk_by(|a, b| a.chunk == b.chunk).collect();
    chunks.sort_unstable_by_key(|pieces| pieces[0].offset);
    for pieces in chunks {
        let chunk = pieces[0].chunk;
        let row = row(pack, table, chunk)?;
        let range = row.range();
        let stored = &bytes[(range.start - start) as usize..(range.end - start) as usize];
        let raw = row.open(stored).map_err(|error| in_pack(error, pack, chunk))?;
        for piece in pieces {
            let part: Range<usize> = blocks(piece.skip)..blocks(piece.skip + piece.blocks);
            let part = raw
                .get(part)
                .ok_or_else(|| Error::damaged("the map of a segment", "a chunk is too short for it"))?;
            emit(piece, part)?;
        }
    }
    Ok(())
}

fn blocks(count: u32) -> usize {
    count as usize * BLOCK as usize
}

fn row<'t>(pack: &PackRef, table: &'t [Row], chunk: u32) -> Result<&'t Row> {
    let row = table.get(chunk as usize);
    row.ok_or_else(|| {
        Error::damaged("the map of a segment", format!("pack {} has no chunk {chunk}", pack.name()))
    })
}

/// Says in which pack a chunk is damaged.
pub fn in_pack(error: Error, pack: &PackRef, chunk: u32) -> Error {
    match error {
        Error::Damaged { why, .. } => Error::damaged(format!("chunk {chunk} of pack {}", pack.name()), why),
        error => error,
    }
}

/// The parts of a segment's extents as pieces of the volume.
pub fn pieces(number: u32, extents: &[Extent], packs: &Packs) -> Vec<Piece> {
    let piece = |extent: &Extent| Piece {
        offset: u64::from(number) * SEGMENT + u64::from(extent.start) * BLOCK,
        blocks: extent.blocks,
        pack: *packs.get(extent.pack),
        chunk: extent.chunk,
        skip: extent.skip,
    };
    extents.iter().map(piece).collect()
}

#[cfg(test)]
#[expect(clippy::disallowed_methods, reason = "what is done to a repository from outside")]
mod tests {
    use super::super::pack::{Compressor, OpenPack, Spare};
    use super::super::tests::runtime;
    use super::*;

    #[test]
    fn maps_that_follow_are_at_hand_and_their_damage_is_theirs_alone() {
        let dir = tempfile::tempdir().expect("temp dir");
        let runtime = runtime();
        let open = || super::super::tests::open(dir.path(), &runtime);
        // Noise, so that what is stored is as long: six chunks are not quite what is read at once.
        let mut random = fastrand::Rng::with_seed(3);
        let contents: Vec<Vec<u8>> = (0..20)
            .map(|_| std::iter::repeat_with(|| random.u8(..)).take(AHEAD as usize / 6 - 100).collect())
            .collect();
        let store = |contents: &mut dyn Iterator<Item = &Vec<u8>>| {
            let (mut pack, mut compressor) =
                (OpenPack::new(&Spare::default()), Compressor::new(1).expect("zstd"));
            for content in contents {
                pack.push(&compressor.chunk(content));
            }
            let (pack, parts) = pack.close();
            runtime.block_on(open().store.put(&pack_name(&pack), parts.to_vec())).expect("put");
            pack
        };
        let (pack, other) = (store(&mut contents.iter()), store(&mut contents.iter().rev()));
        let path = dir.path().join(pack_name(&pack));
        let whole = std::fs::read(&path).expect("read");

        let repository = open();
        for (number, content) in (0..).zip(&contents) {
            assert_eq!(&repository.chunk(&pack, number).expect("a chunk"), content, "{number}");
            assert_eq!(&repository.chunk(&other, 19 - number).expect("a chunk"), content, "{number} of 19");
        }
        // What was read needs the file no more. Of the rest only the table is known.
        let repository = open();
        assert_eq!(repository.chunk(&pack, 3).expect("a chunk"), contents[3]);
        std::fs::remove_file(&path).expect("remove");
        for number in 4..9 {
            assert_eq!(repository.chunk(&pack, number).expect("at hand"), contents[number as usize]);
        }
        for number in [2, 9] {
            assert!(repository.chunk(&pack, number).is_err(), "{number} was not read");
        }

        std::fs::write(&path, &whole).expect("write");
        let repository = open();
        repository.table(&pack).expect("a table");
        std::fs::write(&path, &whole[..contents[0].len() * 3 / 2]).expect("cut it short");
        assert_eq!(repository.chunk(&pack, 0).expect("it is whole"), contents[0]);
        assert!(repository.chunk(&pack, 1).expect_err("it is not").is_damage());
    }
}
