//! The repository: what is where in it, and how it is read. [`writer`] adds to it, [`prune`] removes, [`verify`] checks.
//!
//! ```text
//! repository         what this is: format and identity; written when the first backup begins
//! backups/ID         the index of a backup: it is there, or the backup does not exist
//! partial/ID         how far a backup came that was interrupted
//! damaged/ID         what a verify has found wrong with a backup, so that none is made over it
//! packs/XX/NAME      chunks: data, and the maps of segments. XX are the first digits of NAME
//! lock, locks/ID     see `lock`
//! ```
//!
//! Everything is a tree of checksums: an index has one of itself and names packs by the BLAKE3 of their tables, a table
//! has that of each chunk, and a chunk may be the map of a segment, which names packs and chunks in turn. Objects never
//! change, but for indexes when a prune has moved chunks, and those are replaced as one step.
//!
//! The order of writes of a backup: packs with data, packs with the maps that name them, the index. Each is durable before
//! the next is begun that names it, so whatever ends the backup leaves packs that nothing names, which a prune removes.

pub mod index;
pub mod lock;
pub mod pack;
mod patience;
pub mod prune;
pub mod segment;
pub mod store;
pub mod verify;
pub mod writer;

use std::collections::{HashMap, VecDeque};
use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};

use base::Stop;
use bytes::Bytes;
use serde::{Deserialize, Serialize};
use tokio::runtime::Handle;

pub use index::{About, Index, Kind, SegmentRef};
use lock::{Lock, Lost, Wanted};
use pack::{PackRef, Packs, Row, read_table};
pub use segment::{BLOCK, Extent, SEGMENT, SEGMENT_BLOCKS, Segment};
use store::Store;

use crate::device::Buffer;
use crate::error::{Error, Result};

/// The object that makes a directory a repository.
const CONFIG: &str = "repository";
/// Parts of a pack that are read at once, and what may lie between them unused.
const SPAN: u64 = 4 << 20;
const SPAN_GAP: u64 = 128 << 10;
/// Objects that are removed between two looks at the lock.
const REMOVED: usize = 100;
/// Rows of tables that are remembered: 25 MB of them.
const REMEMBERED_ROWS: usize = 1 << 19;
/// Bytes of a pack that are read for one chunk. It is the map of a segment, and those of the next segments mostly follow it.
const AHEAD: u64 = 64 << 10;
/// Such parts that are remembered: several threads ask, not quite in order.
const REMEMBERED_PARTS: usize = 16;

#[derive(Debug, Serialize, Deserialize)]
struct Config {
    id: String,
    created: i64,
}

/// How far a backup came that was interrupted: segments whose data and maps are stored.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Partial {
    /// What it was to be. Figures are those up to here.
    pub about: About,
    /// As in [`Index`].
    pub packs: Vec<PackRef>,
    /// Those of them that hold data.
    pub segments: Vec<SegmentRef>,
    /// All that are done.
    pub done: Vec<u32>,
}

/// Blocks of a volume and where they are stored.
#[derive(Clone, Copy, Debug)]
pub struct Piece {
    /// First byte in the volume.
    pub offset: u64,
    /// Number of blocks.
    pub blocks: u32,
    /// The pack.
    pub pack: PackRef,
    /// The chunk.
    pub chunk: u32,
    /// Blocks of the chunk before the first that is meant.
    pub skip: u32,
}

/// An open repository.
#[derive(Debug)]
pub struct Repository {
    /// Where it lies.
    pub store: Store,
    tables: Mutex<HashMap<[u8; 32], Arc<Vec<Row>>>>,
    /// Parts of packs that were read last.
    parts: Mutex<VecDeque<Part>>,
    lock: Option<Lock>,
}

/// A part of a pack.
#[derive(Debug)]
struct Part {
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

impl Repository {
    /// Opens a repository that is there.
    pub fn open(url: &str, runtime: &Handle) -> Result<Self> {
        let store = Store::open(url, false, runtime)?;
        match store.get(CONFIG) {
            Ok(bytes) => index::open::<Config>(&bytes, CONFIG)?,
            Err(Error::Store { source: object_store::Error::NotFound { .. }, .. }) => {
                return Err(Error::refused(format!(
                    "{url} is no repository of cbt-backup: the first backup makes one, in an empty place"
                )));
            }
            Err(error) => return Err(error),
        };
        Ok(Repository { store, tables: Mutex::default(), parts: Mutex::default(), lock: None })
    }

    /// The same, and makes one where there is nothing yet.
    pub fn open_or_create(url: &str, runtime: &Handle) -> Result<Self> {
        let store = Store::open(url, true, runtime)?;
        if let Err(Error::Store { source: object_store::Error::NotFound { .. }, .. }) = store.get(CONFIG) {
            if let Some(first) = store.list("")?.into_iter().find(|object| object.location.as_ref() != "lock")
            {
                return Err(Error::refused(format!(
                    "{url} is no repository and not empty: it holds {}; name an empty place",
                    first.location
                )));
            }
            let config = Config { id: random_digits(32)?, created: jiff::Timestamp::now().as_second() };
            // Another process was quicker.
            store.create(CONFIG, index::envelope(&config))?;
        }
        Self::open(url, runtime)
    }

    /// Takes the lock, until the value goes. See [`Lock::take`].
    pub fn lock(self, wanted: Wanted<'_>, stop: &Stop, lost: &Lost) -> Result<Self> {
        let lock = Lock::take(&self.store, wanted, stop, lost)?;
        Ok(Repository { lock: Some(lock), ..self })
    }

    /// See [`Lock::hold`].
    pub fn hold(&self) -> Result<()> {
        self.lock.as_ref().map_or(Ok(()), Lock::hold)
    }

    /// The same after something is done: that the storage does not answer then says nothing.
    pub fn was_held(&self) -> Result<()> {
        match self.hold() {
            Err(error) if !matches!(error, Error::LockLost { .. }) => {
                tracing::warn!("the lock could not be renewed: {}", base::report(&error));
                Ok(())
            }
            held => held,
        }
    }

    /// Removes objects, and looks before whether the lock is still held.
    pub fn remove(&self, names: &[String]) -> Result<()> {
        for batch in names.chunks(REMOVED) {
            self.hold()?;
            for name in batch {
                self.lock.as_ref().map_or(Ok(()), Lock::check)?;
                self.store.remove(std::slice::from_ref(name))?;
            }
        }
        Ok(())
    }

    /// The ids of all backups, the oldest first.
    pub fn ids(&self) -> Result<Vec<String>> {
        let of = |object: object_store::ObjectMeta| object.location.filename().map(str::to_owned);
        Ok(self.store.list("backups")?.into_iter().filter_map(of).collect())
    }

    /// The index of a backup.
    pub fn index(&self, id: &str) -> Result<Index> {
        let name = format!("backups/{id}");
        let index = Index::decode(&self.store.get(&name)?, &name)?;
        match index.about.id == id {
            true => Ok(index),
            false => Err(Error::damaged(name, format!("it is that of {}", index.about.id))),
        }
    }

    /// The backup that a person means: an id, the beginning of one, or `latest`, of one volume or of all.
    pub fn find(&self, wanted: &str, volume: Option<&str>) -> Result<Index> {
        if wanted != "latest" {
            return self.index(&self.named(wanted)?);
        }
        for id in self.ids()?.iter().rev() {
            let index = self.index(id)?;
            if volume.is_none_or(|volume| index.about.volume == volume) {
                return Ok(index);
            }
        }
        let of = volume.map(|volume| format!(" of {volume}")).unwrap_or_default();
        Err(Error::refused(format!("there is no backup{of} yet")))
    }

    /// The id that a person means: all of it, or its beginning.
    pub fn named(&self, wanted: &str) -> Result<String> {
        let mut ids = self.ids()?;
        ids.retain(|id| id.starts_with(wanted));
        match ids.as_slice() {
            [id] => Ok(id.clone()),
            [] => Err(Error::refused(format!("there is no backup {wanted}: `cbt-backup list` names all"))),
            [one, other, ..] => {
                Err(Error::refused(format!("{wanted} may be {one} or {other}: write more of it")))
            }
        }
    }

    /// What was interrupted.
    pub fn partials(&self) -> Result<Vec<(String, Result<Partial>)>> {
        let list = self.store.list("partial")?.into_iter().map(|object| object.location.to_string());
        Ok(list
            .map(|name| (name.clone(), self.store.get(&name).and_then(|bytes| index::open(&bytes, &name))))
            .collect())
    }

    /// What a verify has found wrong with a backup.
    pub fn known_damage(&self, id: &str) -> Result<Option<String>> {
        let name = format!("damaged/{id}");
        match self.store.get(&name).and_then(|bytes| index::open(&bytes, &name)) {
            Ok(what) => Ok(Some(what)),
            Err(Error::Store { source: object_store::Error::NotFound { .. }, .. }) => Ok(None),
            // That there is a mark says enough.
            Err(error) if error.is_damage() => Ok(Some("the note about it cannot be read".into())),
            Err(error) => Err(error),
        }
    }

    /// An error where a pack of a backup, or of a part of one, is not there in its length.
    pub fn check_packs(&self, packs: &[PackRef], id: &str) -> Result<()> {
        let there: HashMap<String, u64> = self
            .store
            .list("packs")?
            .into_iter()
            .map(|object| (object.location.to_string(), object.size))
            .collect();
        for pack in packs {
            let name = pack_name(pack);
            match there.get(&name) {
                Some(size) if *size == u64::from(pack.bytes) => {}
                Some(size) => {
                    return Err(Error::damaged(
                        name,
                        format!("it has {size} bytes instead of {}", pack.bytes),
                    ));
                }
                None => {
                    return Err(Error::damaged(name, format!("it is gone, and {id} needs it")));
                }
            }
        }
        Ok(())
    }

    /// The table of a pack.
    pub fn table(&self, pack: &PackRef) -> Result<Arc<Vec<Row>>> {
        let lock = || self.tables.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(table) = lock().get(&pack.id) {
            return Ok(table.clone());
        }
        let table = Arc::new(read_table(pack, &self.store.get_range(&pack_name(pack), pack.table())?)?);
        let mut tables = lock();
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
        let lock = || self.parts.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(bytes) = lock().iter().find_map(|part| part.slice(pack, &range)) {
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
        let mut parts = lock();
        parts.truncate(REMEMBERED_PARTS - 1);
        parts.push_front(Part { pack: pack.id, start, bytes });
        Ok(wanted)
    }

    /// The map of a segment, with places in `packs`.
    pub fn segment(&self, index: &Index, of: &SegmentRef, packs: &mut Packs) -> Result<Segment> {
        let bytes = self.chunk(&index.packs[of.pack as usize], of.chunk)?;
        let segment = Segment::decode(&bytes, packs)?;
        match segment.blocks() == u64::from(of.blocks) {
            true => Ok(segment),
            false => Err(Error::damaged("the map of a segment", "it holds more or less than the index says")),
        }
    }

    /// Reads pieces and hands their bytes on, checked: part of a pack after part of a pack, and of each the chunks in the
    /// order of the volume. An extent beyond its chunk is damage.
    pub fn fetch(
        &self,
        mut pieces: Vec<Piece>,
        emit: &mut dyn FnMut(&Piece, &[u8]) -> Result<()>,
    ) -> Result<()> {
        pieces.sort_unstable_by_key(|piece| (piece.pack.id, piece.chunk, piece.offset));
        let mut buffer = Buffer::default();
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
fn in_pack(error: Error, pack: &PackRef, chunk: u32) -> Error {
    match error {
        Error::Damaged { why, .. } => Error::damaged(format!("chunk {chunk} of pack {}", pack.name()), why),
        error => error,
    }
}

/// Where a pack lies.
pub fn pack_name(pack: &PackRef) -> String {
    let name = pack.name();
    format!("packs/{}/{name}", &name[..2])
}

/// Random hexadecimal digits.
pub fn random_digits(count: usize) -> Result<String> {
    let mut bytes = vec![0; count.div_ceil(2)];
    getrandom::fill(&mut bytes).map_err(|error| Error::refused(format!("no random numbers: {error}")))?;
    Ok(bytes.iter().map(|byte| format!("{byte:02x}")).collect::<String>()[..count].to_owned())
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
    use super::pack::{Compressor, OpenPack, Spare};
    use super::*;

    #[test]
    fn maps_that_follow_are_at_hand_and_their_damage_is_theirs_alone() {
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).build().expect("runtime");
        let dir = tempfile::tempdir().expect("temp dir");
        let open = || {
            let repository = Repository::open_or_create(&dir.path().to_string_lossy(), runtime.handle());
            repository.expect("a repository")
        };
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
