//! What a storage has to do: the trait, and the open bytes of an object. It names no kind of storage.

use std::fmt;
use std::fs::File;
use std::path::{Path, PathBuf};

use super::Result;
use crate::sys::loopdev::has_direct_io;
use crate::sys::tree;
use base::{BlockSize, Extent, ObjectDir, Stop, Stopped, Written};
use files::{Context, change, durable};

/// Bytes of a copy on their way: the offset and whole blocks from there on.
pub type Sink<'s> = &'s mut dyn FnMut(u64, &[u8]) -> std::result::Result<(), Stopped>;

/// How a file is copied.
pub struct Copying<'s> {
    /// A backend that reads every byte hands them to it, ascending and rounded out to whole blocks of `size`. One that shares
    /// them never calls it.
    pub sink: Option<Sink<'s>>,
    /// The unit of `sink`.
    pub size: BlockSize,
    /// The copy ends early when it is stopped.
    pub stop: &'s Stop,
}

/// The bytes of a volume or a snapshot, open: they stay readable when the object is removed.
#[derive(Debug)]
pub struct Bytes {
    file: File,
    path: PathBuf,
    dir: File,
}

impl Bytes {
    /// The blocks.
    pub fn file(&self) -> &File {
        &self.file
    }

    /// Where they are, for messages.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// How many there are.
    pub fn length(&self) -> Result<u64> {
        Ok(self.file.metadata().context("stat", &self.path)?.len())
    }

    /// The directory that holds their file and nothing else.
    pub fn dir(&self) -> &File {
        &self.dir
    }
}

/// One of the objects that [`Backend::copy_group`] copies.
pub struct GroupMember<'m> {
    /// The bytes.
    pub source: &'m Bytes,
    /// The object whose bytes are made.
    pub target: &'m ObjectDir,
    /// Whether `source` may be written meanwhile.
    pub written: bool,
}

/// What a backend knows of the difference between two copies of a volume. It may list too much, and never too little.
pub enum Changes<'f> {
    /// What was written since, ascending; all else is as it was.
    Written(Box<dyn Iterator<Item = files::Result<Written>> + 'f>),
    /// Where the bytes of both are, ascending, to be compared by address.
    Extents(Extents<'f>, Extents<'f>),
    /// Nothing: the content of both must be compared.
    Unknown,
}

/// The parts of a file, ascending, and where they are.
pub type Extents<'f> = Box<dyn Iterator<Item = files::Result<Extent>> + 'f>;

/// A storage of the bytes of volumes and snapshots. Each object has a directory with one sparse file, `data.img`; what a
/// backend decides is how such a file is copied, and what it knows of the difference between two copies.
///
/// `laws.rs` tests what every backend promises.
pub trait Backend: fmt::Debug + Send + Sync {
    /// Fills `target`, an empty file, with the bytes of `source`, holes kept, and gives it the same length. Without a sync.
    fn fill(&self, source: &File, target: &File, target_path: &Path, how: Copying<'_>) -> Result<()>;

    /// What may differ between a copy and a later one. `since` is the [`Backend::birth`] of the earlier one, `before` its
    /// bytes; a backend needs one of the two.
    fn changes<'f>(
        &self,
        since: Option<u64>,
        before: Option<&'f Bytes>,
        after: &'f File,
        after_path: &'f Path,
    ) -> Result<Changes<'f>>;

    /// Whether the changes of the next copy can only be listed while the bytes of the last one exist.
    fn compares_bytes(&self) -> bool;

    /// Whether a copy is one step that writers cannot tear, and shares all blocks.
    fn copies_atomically(&self) -> bool;

    /// Makes the directory that a new object's bytes are in. Synced.
    fn make_dir(&self, path: &Path) -> Result<()> {
        Ok(durable::make_dir(path)?)
    }

    /// Makes the empty sparse file of an object, of `length` bytes. Synced.
    fn create(&self, target: &ObjectDir, length: u64) -> Result<File> {
        self.make_dir(&target.bytes())?;
        let path = target.data();
        let file = change::create_new(&path)?;
        change::set_len(&file, &path, length)?;
        change::sync(&file, &path)?;
        durable::sync_dir(&target.bytes())?;
        Ok(file)
    }

    /// Opens the bytes of an object.
    fn open(&self, dir: &ObjectDir) -> Result<Bytes> {
        let (path, bytes) = (dir.data(), dir.bytes());
        Ok(Bytes {
            dir: File::open(&bytes).context("open", &bytes)?,
            file: File::open(&path).context("open", &path)?,
            path,
        })
    }

    /// Makes the bytes of `target` a copy of `source`, as [`Backend::fill`] does. Synced.
    fn copy(&self, source: &Bytes, target: &ObjectDir, how: Copying<'_>) -> Result<File> {
        self.make_dir(&target.bytes())?;
        let file = self.copy_file(source.file(), &target.data(), how)?;
        durable::sync_dir(&target.bytes())?;
        Ok(file)
    }

    /// The same for a single file. The caller syncs its directory entry.
    fn copy_file(&self, source: &File, target: &Path, how: Copying<'_>) -> Result<File> {
        let file = change::create_new(target)?;
        self.fill(source, &file, target, how)?;
        change::sync(&file, target)?;
        Ok(file)
    }

    /// Copies bytes while they may be written: what the copy holds of a write it holds of all that was acknowledged
    /// before that write was sent. Only where [`Backend::copies_atomically`].
    fn copy_live(&self, source: &Bytes, target: &ObjectDir, how: Copying<'_>) -> Result<File> {
        self.copy(source, target, how)
    }

    /// Copies several objects at once, each as [`Backend::copy_live`] does, and returns whether all copies show one moment: what they
    /// hold of a write to one of the objects they hold of all writes, to any of them, that were acknowledged before it was
    /// sent. `None` where copies can only be made one after another.
    fn copy_group(&self, _members: &[GroupMember<'_>]) -> Result<Option<(Vec<File>, bool)>> {
        Ok(None)
    }

    /// Undoes what a driver that was killed in [`Backend::copy_live`] left set on a volume's bytes. `direct` is what the
    /// volume's device is to be.
    fn end_cut_copy(&self, _dir: &ObjectDir, _direct: bool) -> Result<()> {
        Ok(())
    }

    /// Removes the bytes of a copy that is not wanted.
    fn discard(&self, target: &ObjectDir) -> Result<()> {
        Ok(tree::remove(&target.bytes())?)
    }

    /// What marks the moment at which these bytes were copied, for [`Backend::changes`]; `None` where the bytes themselves
    /// are needed for that.
    fn birth(&self, _dir: &ObjectDir) -> Result<Option<u64>> {
        Ok(None)
    }

    /// Whether writes into the bytes of objects below `dir` can pass the page cache by.
    fn has_direct_io(&self, dir: &Path) -> Result<bool> {
        let scratch = tempfile::tempfile_in(dir).context("make a scratch file in", dir)?;
        Ok(has_direct_io(&scratch, dir)?)
    }

    /// Whether a full filesystem at `dir` lacks room for what deletions need, and has it once its image grows.
    fn deletes_only_when_grown(&self, _dir: &Path) -> Result<bool> {
        Ok(false)
    }
}
