//! The hashes of a snapshot's blocks.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use roaring::RoaringBitmap;

use super::ahead::Readahead;
use super::hash::{BlockHash, UNKNOWN};
use super::segment::SegmentIndex;
use super::{Error, Result};
use base::{Block, ByteRange};
use files::Context;
use files::change;

const PAGE: usize = 4096;
const HASH: usize = 32;
/// Blocks whose hashes share a page; in place of one more it has its version and checksum.
pub(super) const SLOTS: u64 = (PAGE / HASH - 1) as u64;
/// The format below. Each page says its own: a file starts as a clone of one that another release wrote.
const VERSION: u32 = 1;
const CHECKSUM: usize = HASH - 4;

/// How often a page is read before its checksum counts as wrong.
const LOOKS: usize = 3;

/// One BLAKE3 hash a block, in a sparse file of 4 KiB pages.
///
/// ```text
/// page p    127 slots of 32 bytes: the hashes of blocks 127 p to 127 p + 126, zeros where unknown
///           then the version, 1 (u32, little-endian)
///           then 28 bytes: the first of BLAKE3 of the version, the page number (u64, little-endian) and the slots
/// ```
///
/// Pages of a filesystem block, so that a child's file starts as a clone of its parent's and only
/// changed pages take room. A hole means that nothing is known, which sends the reader to the data.
/// The checksum covers the page number, so a page that landed in the wrong place is found too. A page
/// that fails its check counts as unknown: it costs a read of the data, never a lost change. A slot
/// counts only for a block that its snapshot's `allocated` holds and `pending` does not: a clone
/// still carries the parent's hashes for all others. That of a block that became a hole is taken out before the block
/// leaves `pending`, since an `allocated` that is made again from the data may hold more than the first one.
#[derive(Debug)]
pub struct HashFile {
    file: File,
    path: PathBuf,
}

/// The slots of one page.
#[derive(Clone)]
pub(super) struct Page {
    bytes: Box<[u8; PAGE]>,
}

impl Page {
    fn empty() -> Self {
        Page { bytes: Box::new([0; PAGE]) }
    }

    fn checksum(&self, version: u32, number: u64) -> [u8; CHECKSUM] {
        let mut hasher = blake3::Hasher::new();
        hasher
            .update(&version.to_le_bytes())
            .update(&number.to_le_bytes())
            .update(&self.bytes[..PAGE - HASH]);
        *hasher.finalize().as_bytes().first_chunk().expect("a hash is longer")
    }

    /// Makes it the sound page of a place.
    fn seal(&mut self, number: u64) {
        let checksum = self.checksum(VERSION, number);
        self.bytes[PAGE - HASH..PAGE - CHECKSUM].copy_from_slice(&VERSION.to_le_bytes());
        self.bytes[PAGE - CHECKSUM..].copy_from_slice(&checksum);
    }

    /// The hash of a block of this page; `None` where it is unknown.
    pub(super) fn get(&self, block: Block) -> Option<BlockHash> {
        let at = (block.0 % SLOTS) as usize * HASH;
        let slot: BlockHash = self.bytes[at..at + HASH].try_into().expect("a slot is 32 bytes");
        (slot != UNKNOWN).then_some(slot)
    }

    /// Makes the hash of a block unknown; returns whether it was known.
    pub(super) fn forget(&mut self, block: Block) -> bool {
        let known = self.get(block).is_some();
        self.set(block, &UNKNOWN);
        known
    }

    pub(super) fn set(&mut self, block: Block, hash: &BlockHash) {
        let at = (block.0 % SLOTS) as usize * HASH;
        self.bytes[at..at + HASH].copy_from_slice(hash);
    }
}

pub(super) fn page_of(block: Block) -> u64 {
    block.0 / SLOTS
}

impl HashFile {
    /// Creates an empty file: nothing is known.
    pub fn create(path: &Path) -> Result<Self> {
        Ok(HashFile { file: change::create_new(path)?, path: path.to_owned() })
    }

    /// Opens a file for reading and writing, such as a clone of the parent's.
    pub fn open_for_update(path: &Path) -> Result<Self> {
        let file = File::options().read(true).write(true).open(path).context("open", path)?;
        Ok(HashFile { file, path: path.to_owned() })
    }

    /// Opens a file for reading.
    pub fn open(path: &Path) -> Result<Self> {
        Ok(HashFile { file: File::open(path).context("open", path)?, path: path.to_owned() })
    }

    /// Reads a page. Unknown where the file has a hole, ends, or fails the page's checksum.
    ///
    /// A page that is being written may be read half new; it is whole at the next look, or damaged.
    pub(super) fn page(&self, number: u64) -> Result<Page> {
        for _ in 1..LOOKS {
            if let Some(page) = self.look(number)? {
                return Ok(page);
            }
            std::thread::yield_now();
        }
        Ok(self.look(number)?.unwrap_or_else(|| {
            tracing::warn!(path = %self.path.display(), page = number, "hash page is damaged, reading the data instead");
            Page::empty()
        }))
    }

    /// Reads a page to write it again. One that the disk does not give back is replaced; a caller that only reads it gets the
    /// error, since a failing disk may return zeros for the data as well.
    pub(super) fn page_to_update(&self, number: u64) -> Result<Page> {
        match self.page(number) {
            Err(Error::Sys(error)) if error.is_unreadable() => {
                let error = error.to_string();
                tracing::warn!(path = %self.path.display(), page = number, error, "hash page is damaged, replacing it");
                Ok(Page::empty())
            }
            page => page,
        }
    }

    /// `None` where the checksum is wrong.
    fn look(&self, number: u64) -> Result<Option<Page>> {
        let mut page = Page::empty();
        match self.file.read_exact_at(&mut page.bytes[..], number * PAGE as u64) {
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(Some(Page::empty())),
            other => other.context("read", &self.path)?,
        }
        if page.bytes.iter().all(|byte| *byte == 0) {
            return Ok(Some(page));
        }
        let version = u32::from_le_bytes(*page.bytes[PAGE - HASH..].first_chunk().expect("a slot is longer"));
        match page.checksum(version, number) == page.bytes[PAGE - CHECKSUM..] {
            false => Ok(None),
            true if version == VERSION => Ok(Some(page)),
            true => Err(Error::UnknownVersion { path: self.path.clone(), version, known: VERSION }),
        }
    }

    /// Writes a page with its checksum.
    pub(super) fn write_page(&self, number: u64, page: &mut Page) -> Result<()> {
        page.seal(number);
        let offset = number * PAGE as u64;
        Ok(change::write_at(&self.file, &self.path, &page.bytes[..], offset)?)
    }

    /// Forgets all hashes.
    pub fn clear(&self) -> Result<(), Error> {
        Ok(change::set_len(&self.file, &self.path, 0)?)
    }

    /// Makes what was written durable.
    pub fn sync(&self) -> Result<(), Error> {
        Ok(change::sync(&self.file, &self.path)?)
    }

    /// The same file, open a second time.
    pub fn try_clone(&self) -> Result<Self> {
        let file = self.file.try_clone().context("open", &self.path)?;
        Ok(HashFile { file, path: self.path.clone() })
    }

    /// The descriptor, for cloning.
    pub fn file(&self) -> &File {
        &self.file
    }
}

/// Looks hashes up, keeping the page it looked at last: lookups that ascend read each page once.
#[derive(Debug)]
pub struct HashReader {
    file: HashFile,
    cached: Option<(u64, Page)>,
    ahead: Readahead,
    /// The page that was read last, also when it was given up since.
    last: Option<u64>,
}

/// Where the caller does not say which pages come next, the pages that follow are asked for if the last two that were looked
/// at are no farther apart than this: what is asked for is then mostly needed.
const NEAR: u64 = 8;
/// How many are requested.
const AT_ONCE: u64 = 256;

impl std::fmt::Debug for Page {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Page")
    }
}

impl HashReader {
    /// Reads from `file`.
    pub fn new(file: HashFile) -> Self {
        HashReader { file, cached: None, ahead: Readahead::default(), last: None }
    }

    /// Gives up the page that was looked at last.
    pub(super) fn park(&mut self) {
        self.cached = None;
    }

    /// The hash of `block`; `None` where it is unknown.
    pub fn get(&mut self, block: Block) -> Result<Option<BlockHash>> {
        let number = page_of(block);
        let is_near = self.last.is_some_and(|last| number.abs_diff(last) <= NEAR);
        let next = number + 1..number + 1 + if is_near { AT_ONCE } else { 0 };
        self.get_with_next(block, || next)
    }

    /// The same for callers that know the pages of the blocks that they look up next, ascending.
    pub(super) fn get_with_next<N: Iterator<Item = u64>>(
        &mut self,
        block: Block,
        next: impl FnOnce() -> N,
    ) -> Result<Option<BlockHash>> {
        let number = page_of(block);
        if let Some((cached, page)) = &self.cached
            && *cached == number
        {
            return Ok(page.get(block));
        }
        let bytes = |number| ByteRange { start: number * PAGE as u64, end: (number + 1) * PAGE as u64 };
        let page = self.ahead.timed(bytes(number).end, || self.file.page(number))?;
        self.ahead.ask(|| next().map(bytes), std::iter::once(&self.file.file));
        self.last = Some(number);
        let hash = page.get(block);
        self.cached = Some((number, page));
        Ok(hash)
    }

    /// Those of a segment's blocks whose hash is not there.
    pub fn unknown(&mut self, index: SegmentIndex, members: &RoaringBitmap) -> Result<RoaringBitmap> {
        let mut unknown = RoaringBitmap::new();
        for block in members {
            if self.get_if_readable(index.block(block))?.is_none() {
                unknown.insert(block);
            }
        }
        Ok(unknown)
    }

    /// The same for callers that can do without the hash: `None` also where the disk does not give it back.
    pub(super) fn get_if_readable(&mut self, block: Block) -> Result<Option<BlockHash>> {
        match self.get(block) {
            Err(Error::Sys(error)) if error.is_unreadable() => {
                self.cached = Some((page_of(block), Page::empty()));
                Ok(None)
            }
            hash => hash,
        }
    }
}

#[cfg(any(test, feature = "fuzz"))]
pub(super) mod fuzz;

#[cfg(test)]
mod tests {
    use super::*;

    fn hash(seed: u8) -> BlockHash {
        *blake3::hash(&[seed]).as_bytes()
    }

    #[test]
    fn slots_read_back_and_the_rest_is_unknown() {
        let dir = tempfile::tempdir().expect("temp dir");
        let path = dir.path().join("hashes");
        let file = HashFile::create(&path).expect("create");
        let mut page = file.page(3).expect("a page past the end is unknown");
        page.set(Block(3 * SLOTS + 5), &hash(1));
        page.set(Block(4 * SLOTS - 1), &hash(2));
        file.write_page(3, &mut page).expect("write");
        let mut reader = HashReader::new(HashFile::open(&path).expect("open"));
        let expected = [
            (0, None),
            (3 * SLOTS + 5, Some(hash(1))),
            (3 * SLOTS + 6, None),
            (4 * SLOTS - 1, Some(hash(2))),
            (4 * SLOTS, None),
        ];
        for (block, expected) in expected {
            assert_eq!(reader.get(Block(block)).expect("get"), expected, "block {block}");
        }
    }

    #[test]
    fn a_damaged_or_displaced_page_is_unknown_not_trusted() {
        let dir = tempfile::tempdir().expect("temp dir");
        let path = dir.path().join("hashes");
        let file = HashFile::create(&path).expect("create");
        let mut page = file.page(0).expect("page");
        page.set(Block(7), &hash(1));
        file.write_page(0, &mut page).expect("write");
        let sound = std::fs::read(&path).expect("read");
        for bit in (0..sound.len() * 8).step_by(61) {
            let mut bytes = sound.clone();
            bytes[bit / 8] ^= 1 << (bit % 8);
            std::fs::write(&path, &bytes).expect("write");
            assert_eq!(file.page(0).expect("page").get(Block(7)), None, "bit {bit}");
        }
        let displaced = [vec![0; PAGE], sound].concat();
        std::fs::write(&path, displaced).expect("write");
        assert_eq!(file.page(1).expect("page").get(Block(SLOTS + 7)), None, "a page of another place");
        let checksum = page.checksum(VERSION + 1, 0);
        page.bytes[PAGE - HASH..PAGE - CHECKSUM].copy_from_slice(&(VERSION + 1).to_le_bytes());
        page.bytes[PAGE - CHECKSUM..].copy_from_slice(&checksum);
        std::fs::write(&path, &page.bytes[..]).expect("write");
        let error = file.page(0).expect_err("a page of another version");
        assert!(matches!(error, Error::UnknownVersion { version: 2, known: 1, .. }), "{error}");
    }
}
