//! The repository: what is where in it, and how it is read. [`writer`] adds to it, [`prune`] removes, [`verify`] checks.
//!
//! ```text
//! repository         what this is: format and identity; written when the first backup begins
//! backups/ID         the index of a backup: it is there, or the backup does not exist
//! partial/ID         how far a backup is, or came that was interrupted
//! damaged/ID         what a verify has found wrong with a backup, so that none is made over it
//! packs/XX/NAME      chunks: data, and the maps of segments. XX are the first digits of NAME
//! lock, locks/ID     see `lock`
//! ```
//!
//! An ID is the time and random digits. Each new one comes after all that are there, also where the clock went back, so the
//! order of the names is that in which backups were begun, and the last name is the latest backup. Nothing else in the
//! directory is looked into or touched, and nothing through a symbolic link below it.
//!
//! Everything is a tree of checksums. An index has its own, and names packs by the BLAKE3 of their tables. A table has that of each
//! chunk. A chunk may be the map of a segment, which names packs and chunks in turn. Objects never change, but for indexes when a
//! prune has moved chunks, and those are replaced as one step. A checksum is not a signature:
//! whoever can write to the repository can forge it, so every length in an object has a bound, and what asks for more is
//! damaged.
//!
//! The order of writes of a backup: packs with data, packs with the maps that name them, the index. Each is durable before
//! the next is begun that names it, so whatever ends the backup leaves packs that nothing names, which a prune removes.
//!
//! A backup is chunks and an index, not a reflinked image. So one repository works in a directory and in a bucket, and data is
//! compressed and has checksums. There is no table of all chunks by hash, since it would not fit into memory for large volumes:
//! backups share the chunks that the driver reports as unchanged, and equal chunks elsewhere are stored twice. A full backup
//! shares nothing, so it repairs a repository in which something is damaged. The hash of a chunk is that of its stored bytes, so
//! damaged bytes never reach zstd. Data is not encrypted: that is left to the storage.

mod directory;
#[cfg(any(test, feature = "fuzz"))]
pub mod fuzz;
pub mod index;
mod keep;
pub mod lock;
pub mod names;
pub mod pack;
mod patience;
pub mod prune;
mod read;
pub mod segment;
pub mod store;
pub mod verify;
pub mod writer;

use std::collections::HashMap;
use std::sync::Arc;

use base::Stop;
use files::Context;
use object_store::ObjectMeta;
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use tokio::runtime::Handle;

pub use index::{About, Index, Kind, SegmentRef};
use lock::{Lock, Lost, Wanted};
use names::{are_digits, pack_name, random_digits};
use pack::{PackRef, Row};
use read::Parts;
pub use read::{Piece, pieces};
pub use segment::{Extent, SEGMENT, SEGMENT_BLOCKS, Segment};
use store::Store;

pub use crate::block::BLOCK;
use crate::device::Identity;
use crate::error::{Error, Result, refused};

/// The object that makes a directory a repository.
const CONFIG: &str = "repository";
/// Bytes of the largest index that is read: that of 80 TiB of data that cannot be compressed, or of several PiB of what can. In
/// memory it takes at most five times as much.
const MAX_INDEX: usize = 256 << 20;
/// Bytes of any other object that is not a pack.
const MAX_NOTE: usize = 1 << 20;
/// Indexes that are read at once to find the last of a volume.
const AT_ONCE: usize = 64;
/// Objects that are removed between two looks at the lock.
const REMOVED: usize = 100;

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
    pub done: Vec<u32>,
    /// What it was read from, where no driver was asked. Earlier versions do not say it.
    #[serde(deserialize_with = "index::if_there")]
    pub source: Option<Identity>,
}

impl Partial {
    /// Reads one, and checks that it holds together.
    fn decode(bytes: &[u8], name: &str) -> Result<Self> {
        let partial: Partial = index::open(bytes, name)?;
        index::check(&partial.about, &partial.packs, &partial.segments, name)?;
        Ok(partial)
    }
}

/// An open repository.
#[derive(Debug)]
pub struct Repository {
    /// Where it lies.
    pub store: Store,
    tables: Mutex<HashMap<[u8; 32], Arc<Vec<Row>>>>,
    /// Parts of packs that were read last.
    parts: Mutex<Parts>,
    lock: Option<Lock>,
}

impl Repository {
    /// Opens a repository that is there. Nothing needs the content of its [`CONFIG`], so backups can be read where it is damaged.
    pub fn open(url: &str, runtime: &Handle, stop: &Stop) -> Result<Self> {
        let repository = Self::of(Store::open(url, false, runtime, stop)?);
        let Err(error) = repository.config() else { return Ok(repository) };
        if !error.is_damage() {
            return Err(error);
        }
        // A bucket that does not exist is another error.
        if !repository.ids()?.is_empty() {
            tracing::warn!(
                "{}; the backups are not hurt, and the next backup writes it again",
                base::report(&error)
            );
            return Ok(repository);
        }
        Err(Error::refused(match error.is_not_found() {
            true => {
                format!(
                    "{url} is not a repository of cbt-backup: the first backup makes one, in an empty place"
                )
            }
            false => format!(
                "{url} is not a repository of cbt-backup, and {}: name an empty place, where the first backup makes one",
                base::report(&error)
            ),
        }))
    }

    fn of(store: Store) -> Self {
        Repository { store, tables: Mutex::default(), parts: Mutex::default(), lock: None }
    }

    fn config(&self) -> Result<Config> {
        index::open(&self.store.get(CONFIG, MAX_NOTE)?, CONFIG)
    }

    /// The same, and makes one where there is nothing yet.
    pub fn open_or_create(url: &str, runtime: &Handle, stop: &Stop) -> Result<Self> {
        let repository = Self::of(Store::open(url, true, runtime, stop)?);
        if let Err(error) = repository.config()
            && error.is_damage()
        {
            // The root of an ext4 is empty, and other disks may be mounted where objects are to be.
            let is_own = |name: &String| ["lock", "lost+found"].contains(&name.as_str());
            let mut others = repository.store.top()?;
            others.retain(|name| !is_own(name));
            for top in ["packs", "backups", "partial", "damaged"] {
                if others.iter().any(|name| name == top) && repository.store.list(top)?.is_empty() {
                    others.retain(|name| name != top);
                }
            }
            if repository.ids()?.is_empty()
                && let Some(first) = others.first()
            {
                return Err(refused!(
                    "{url} is not a repository and not empty: it holds {first}; name an empty place"
                ));
            }
            let config = Config { id: random_digits(32)?, created: jiff::Timestamp::now().as_second() };
            match error.is_not_found() {
                // Another process was quicker.
                true => drop(repository.store.create(CONFIG, index::envelope(&config))?),
                false => repository.store.replace(CONFIG, index::envelope(&config))?,
            }
        }
        Self::open(url, runtime, stop)
    }

    /// Takes the lock, until the value is dropped. See [`Lock::take`].
    pub fn lock(self, wanted: Wanted<'_>, lost: &Lost) -> Result<Self> {
        let lock = Lock::take(&self.store, wanted, lost)?;
        Ok(Repository { lock, ..self })
    }

    /// Whether there is one: a reader may have none.
    pub fn has_lock(&self) -> bool {
        self.lock.is_some()
    }

    /// See [`Lock::check`].
    pub fn check_lock(&self) -> Result<()> {
        self.lock.as_ref().map_or(Ok(()), Lock::check)
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
                self.check_lock()?;
                self.store.remove(std::slice::from_ref(name))?;
            }
        }
        Ok(())
    }

    /// The ids of all backups, the oldest first.
    pub fn ids(&self) -> Result<Vec<String>> {
        self.names("backups")
    }

    fn names(&self, top: &str) -> Result<Vec<String>> {
        let of = |object: ObjectMeta| object.location.filename().map(str::to_owned);
        Ok(self.store.list(top)?.into_iter().filter_map(of).collect())
    }

    /// The index of a backup.
    pub fn index(&self, id: &str) -> Result<Index> {
        let name = format!("backups/{id}");
        decode(&name, self.store.get(&name, MAX_INDEX))
    }

    /// What `take` makes of all indexes, the oldest first. They are read many at once, and it must not read more. One that a prune
    /// removes meanwhile is none: a reader may have no lock.
    pub fn each_index<T>(&self, take: impl Fn(&str, Result<Index>) -> T) -> Result<Vec<T>> {
        self.some_indexes(&self.store.list("backups")?, take)
    }

    fn some_indexes<T>(
        &self,
        objects: &[ObjectMeta],
        take: impl Fn(&str, Result<Index>) -> T,
    ) -> Result<Vec<T>> {
        let taken = self.store.get_each(objects, MAX_INDEX, |object, bytes| {
            let id = object.location.filename().unwrap_or_default();
            let is_gone = matches!(&bytes, Err(error) if error.is_not_found());
            (!is_gone).then(|| take(id, decode(object.location.as_ref(), bytes)))
        })?;
        Ok(taken.into_iter().flatten().collect())
    }

    /// What `take` makes of the latest index of which it makes anything. `skip` has the errors of later ones, and may make an end.
    pub fn last<T>(
        &self,
        take: impl Fn(Index) -> Option<T>,
        mut skip: impl FnMut(Error) -> Result<()>,
    ) -> Result<Option<T>> {
        let objects = self.store.list("backups")?;
        // Mostly it is the very last. Of the others many are read at once.
        let (others, last) = objects.split_at(objects.len().saturating_sub(1));
        for some in std::iter::once(last).chain(others.rchunks(AT_ONCE)) {
            for found in self.some_indexes(some, |_, index| index.map(&take))?.into_iter().rev() {
                match found {
                    Ok(Some(found)) => return Ok(Some(found)),
                    Ok(None) => {}
                    Err(error) => skip(error)?,
                }
            }
        }
        Ok(None)
    }

    /// The backup that a person means: an id, the beginning of one, or `latest`, of one volume or of all.
    pub fn find(&self, wanted: &str, volume: Option<&str>) -> Result<Index> {
        if wanted != "latest" {
            return self.index(&self.named(wanted)?);
        }
        let is_it = |index: &Index| volume.is_none_or(|volume| index.about.volume == volume);
        let last = self.last(
            |index| is_it(&index).then_some(index),
            |error| match volume {
                Some(volume) if error.is_damage() => {
                    tracing::warn!(
                        "{}; it is left out, and may be a later backup of {volume} than the one that is taken",
                        base::report(&error)
                    );
                    Ok(())
                }
                _ => Err(error),
            },
        )?;
        if let Some(index) = last {
            return Ok(index);
        }
        let of = volume.map(|volume| format!(" of {volume}")).unwrap_or_default();
        Err(refused!("there is no backup{of} yet"))
    }

    /// The id that a person means: all of it, or its beginning.
    pub fn named(&self, wanted: &str) -> Result<String> {
        let mut ids = self.ids()?;
        ids.retain(|id| id.starts_with(wanted));
        match ids.as_slice() {
            [id] => Ok(id.clone()),
            [] => Err(refused!("there is no backup {wanted}: `cbt-backup list` names all")),
            [one, other, ..] => Err(refused!("{wanted} may be {one} or {other}: write more of it")),
        }
    }

    /// What was interrupted or is being made. They are read one by one, so that one is in memory at a time.
    pub fn partials(&self) -> Result<impl Iterator<Item = (String, Result<Partial>)>> {
        let objects = self.store.list("partial")?;
        let read = |object: ObjectMeta| {
            let name = object.location.to_string();
            let bytes = self.store.get(&name, MAX_INDEX);
            let partial = bytes.and_then(|bytes| Partial::decode(&bytes, &name));
            (name, partial)
        };
        // What another backup has removed meanwhile is done.
        let is_there =
            |(_, partial): &(String, Result<Partial>)| !matches!(partial, Err(error) if error.is_not_found());
        Ok(objects.into_iter().map(read).filter(is_there))
    }

    /// What a verify has found wrong with a backup.
    pub fn known_damage(&self, id: &str) -> Result<Option<String>> {
        let name = format!("damaged/{id}");
        match self.store.get(&name, MAX_NOTE).and_then(|bytes| index::open(&bytes, &name)) {
            Ok(what) => Ok(Some(what)),
            Err(error) if error.is_not_found() => Ok(None),
            // That there is a mark says enough.
            Err(error) if error.is_damage() => Ok(Some("the note about it cannot be read".into())),
            Err(error) => Err(error),
        }
    }

    /// Whether they are: a backup that had lost its lock may have left what names others.
    pub fn has_packs(&self, packs: &[PackRef], id: &str) -> Result<bool> {
        match self.check_packs(packs, id) {
            Ok(()) => Ok(true),
            Err(error) if error.is_damage() => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// An error where the directory of packs is empty, and backups need some: another disk may have to be mounted there.
    pub fn check_disk(&self) -> Result<()> {
        let Some(packs) = self.store.dir().map(|dir| dir.join("packs")).filter(|packs| packs.is_dir()) else {
            return Ok(());
        };
        let is_shelf =
            |entry: std::fs::DirEntry| entry.file_name().to_str().is_some_and(|name| are_digits(name, 2));
        let is_empty = !packs.read_dir().context("list", &packs)?.flatten().any(is_shelf);
        let needs_some = || self.each_index(|_, index| index.is_ok_and(|index| !index.packs.is_empty()));
        if is_empty && needs_some()?.contains(&true) {
            return Err(refused!(
                "{0} is empty, and there are backups that need packs: if it is on another disk, mount that disk. If the packs are \
                 lost, remove the empty directory {0} and run the command again",
                packs.display()
            ));
        }
        Ok(())
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
}

/// The index that an object of this name must be.
fn decode(name: &str, bytes: Result<Vec<u8>>) -> Result<Index> {
    let index = Index::decode(&bytes?, name)?;
    match name.strip_prefix("backups/") == Some(&index.about.id) {
        true => Ok(index),
        false => Err(Error::damaged(name, format!("it is that of {}", index.about.id))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    pub fn runtime() -> tokio::runtime::Runtime {
        let mut builder = tokio::runtime::Builder::new_multi_thread();
        builder.worker_threads(2).enable_all().build().expect("a runtime")
    }

    /// A repository in a directory, made where there is none.
    pub fn open(dir: &std::path::Path, runtime: &tokio::runtime::Runtime) -> Repository {
        Repository::open_or_create(&dir.to_string_lossy(), runtime.handle(), &Stop::default())
            .expect("a repository")
    }
}
