//! btrfs, a subvolume for the bytes of each object: a copy takes constant time, and the tree shows what was written since.
//!
//! **Copying a file while its loop device is written.** A clone is one step towards writers: the filesystem holds them off
//! meanwhile. A btrfs subvolume snapshot is not, for btrfs acknowledges a direct write before the block is in its tree, and
//! overwrites in place what no snapshot shares yet. So a block that was rewritten in place could be in the snapshot, and one
//! that was acknowledged before it not. For the length of such a snapshot each write of the file is therefore synchronous:
//! acknowledged when it is on disk, by which it is in the transaction that the snapshot shows, or in a later one. Then so is
//! all that is sent after it.
//!
//! **Copying a group.** A commit makes all snapshots that were asked for since the one before it. Asked for by threads at the
//! same time, those of two members mostly are, and so show one moment; those of four under write never were. Their births
//! tell.

use std::fs::File;
use std::path::Path;
use std::thread::{self, ScopedJoinHandle};

use super::Result;
use super::backend::{Backend, Bytes, Changes, Copying, GroupMember};
use super::kind::{ImageFormat, Kind, Otherwise};
use super::xfs::by_extents;
use crate::sys::attributes::Flag;
use crate::sys::btrfs::{self, WrittenSince};
use crate::sys::extents::wait_for_writes;
use crate::sys::loopdev::{self, LoopDevice};
use crate::sys::reserve::is_metadata_too_small;
use crate::sys::{blockdev, clone, tree};
use base::ObjectDir;
use files::{Context, durable};

pub(super) static KIND: Kind = Kind {
    name: "btrfs",
    help: "The data directory's filesystem if it is btrfs, else a btrfs image in it. Snapshots take constant time",
    fits: |dir| Ok(btrfs::is_btrfs(dir)?),
    otherwise: Otherwise::Image(ImageFormat {
        filesystem: "btrfs",
        mkfs: "mkfs.btrfs",
        package: "btrfs-progs",
        magic: (0x1_0040, b"_BHRfS_M"),
        // Freed space returns to the host.
        mount_options: "discard=async",
        // `^no-holes`: a punched hole must leave an item, for a search to find it. One copy of the metadata: two of them in one
        // file protect against nothing.
        options: || {
            let sector = loopdev::SECTOR.to_string();
            ["-q", "-K", "-O", "^no-holes", "-m", "single", "-d", "single", "-s", &sector]
                .map(str::to_owned)
                .to_vec()
        },
        grow: ("btrfs", &["filesystem", "resize", "max"]),
    }),
    open: |dir, image| {
        Ok(Box::new(Btrfs {
            holes: btrfs::records_holes(dir)?,
            // The devices of somebody else's filesystem may be exchanged at any time.
            flushes: image.map_or(Ok(false), |device| blockdev::wants_flushes(&device.sysfs()))?,
        }))
    },
};

#[derive(Debug)]
struct Btrfs {
    /// Whether a punched hole leaves a trace in the tree. Without (`no-holes`), extents are compared.
    holes: bool,
    /// Whether a synchronous direct write ends with a flush, as on a device with a cache that cannot write through it.
    flushes: bool,
}

impl Backend for Btrfs {
    fn fill(&self, source: &File, target: &File, target_path: &Path, _: Copying<'_>) -> Result<()> {
        Ok(clone::reflink(source, target, target_path)?)
    }

    fn changes<'f>(
        &self,
        since: Option<u64>,
        before: Option<&'f Bytes>,
        after: &'f File,
        after_path: &'f Path,
    ) -> Result<Changes<'f>> {
        match since.filter(|_| self.holes) {
            Some(since) => Ok(Changes::Written(Box::new(WrittenSince::of(after, after_path, since)?))),
            None => by_extents(before, after, after_path),
        }
    }

    fn compares_bytes(&self) -> bool {
        !self.holes
    }

    fn copies_atomically(&self) -> bool {
        true
    }

    fn make_dir(&self, path: &Path) -> Result<()> {
        Ok(btrfs::create_subvolume(path)?)
    }

    fn copy(&self, source: &Bytes, target: &ObjectDir, _: Copying<'_>) -> Result<File> {
        snapshot(source, target)
    }

    fn copy_live(&self, source: &Bytes, target: &ObjectDir, _: Copying<'_>) -> Result<File> {
        self.under_write(&[source], || snapshot(source, target))
    }

    fn copy_group(&self, members: &[GroupMember<'_>]) -> Result<Option<(Vec<File>, bool)>> {
        let written = members.iter().filter(|member| member.written).map(|member| member.source);
        let copied = self.under_write(&written.collect::<Vec<_>>(), || snapshots(members))?;
        let births = members.iter().map(|member| btrfs::birth(&member.target.bytes()));
        let births = births.collect::<files::Result<Vec<_>>>()?;
        Ok(Some((copied, births.windows(2).all(|two| two[0] == two[1]))))
    }

    fn end_cut_copy(&self, dir: &ObjectDir, direct: bool) -> Result<()> {
        let bytes = self.open(dir)?;
        if Flag::Synchronous.is_set(bytes.file(), bytes.path())? {
            tracing::warn!(path = %bytes.path().display(), "a copy of this volume was cut short, its writes are no longer synchronous");
            let device = LoopDevice::find(bytes.path())?.filter(|_| direct);
            SynchronousWrites { source: &bytes, device, held: true }.end()?;
        }
        Ok(())
    }

    fn discard(&self, target: &ObjectDir) -> Result<()> {
        tree::remove(&target.bytes())?;
        // As in [`tree::remove`]: the object's directory may be the next to go.
        Ok(durable::sync_dir(target.path())?)
    }

    fn birth(&self, dir: &ObjectDir) -> Result<Option<u64>> {
        self.holes.then(|| Ok(btrfs::birth(&dir.bytes())?)).transpose()
    }

    /// The bytes of objects have an attribute for it that other files lack.
    fn has_direct_io(&self, _: &Path) -> Result<bool> {
        Ok(true)
    }

    /// An image of a version before there was a reserve, once: then its metadata has a second chunk.
    fn deletes_only_when_grown(&self, dir: &Path) -> Result<bool> {
        Ok(is_metadata_too_small(dir)?)
    }
}

impl Btrfs {
    /// Makes copies of sources that may be written meanwhile.
    fn under_write<T>(&self, sources: &[&Bytes], copy: impl FnOnce() -> Result<T>) -> Result<T> {
        let begin = |source| SynchronousWrites::begin(source, self.flushes);
        let synchronous = sources.iter().copied().map(begin).collect::<Result<Vec<_>>>()?;
        let copied = copy();
        synchronous.into_iter().try_for_each(SynchronousWrites::end)?;
        let copied = copied?;
        // A write may have looked whether it shares its block before the copy was made, and be sent to it after. The
        // end above waited until such a write is under way; it lands before anybody reads the copy.
        sources.iter().try_for_each(|source| wait_for_writes(source.file(), source.path()))?;
        Ok(copied)
    }
}

fn snapshot(source: &Bytes, target: &ObjectDir) -> Result<File> {
    let path = target.data();
    btrfs::snapshot(source.dir(), source.path(), &target.bytes())?;
    let file = File::options().read(true).write(true).open(&path).context("open", &path)?;
    // A source that is copied under write has this attribute, its copy is to be a plain file.
    Flag::Synchronous.set(&file, &path, false)?;
    Ok(file)
}

/// Asks for all at the same time.
fn snapshots(members: &[GroupMember<'_>]) -> Result<Vec<File>> {
    thread::scope(|scope| {
        let mut threads = Vec::new();
        for GroupMember { source, target, .. } in members {
            let thread = thread::Builder::new().name("copy".into());
            let begun = thread.spawn_scoped(scope, || snapshot(source, target));
            threads.push(begun.context("start a copy of", source.path()));
        }
        let end = |thread: files::Result<ScopedJoinHandle<'_, _>>| match thread?.join() {
            Ok(copied) => copied,
            Err(panic) => std::panic::resume_unwind(panic),
        };
        threads.into_iter().map(end).collect()
    })
}

/// Every write of a file is synchronous while this lives.
struct SynchronousWrites<'b> {
    source: &'b Bytes,
    /// The loop device that is to pass the page cache by again.
    device: Option<LoopDevice>,
    held: bool,
}

impl<'b> SynchronousWrites<'b> {
    /// 1. Make the file synchronous.
    /// 2. Where the filesystem may take a synchronous direct write without a flush, its device having no cache or
    ///    writing through it, have the loop device write through the page cache, where a flush follows each write. Its
    ///    requests under way end before that.
    ///
    /// In this order, and undone in the other: a device that writes through the page cache loses acknowledged
    /// writes on a full filesystem, unless the file is synchronous. So what a driver that is killed leaves is slow
    /// and safe; [`Backend::end_cut_copy`] ends it.
    fn begin(source: &'b Bytes, flushes: bool) -> Result<Self> {
        Flag::Synchronous.set(source.file(), source.path(), true)?;
        let mut begun = SynchronousWrites { source, device: None, held: true };
        if !flushes
            && let Some(device) = LoopDevice::find(source.path())?
            && device.is_direct_io()?
        {
            begun.device = Some(device.clone());
            device.set_direct_io(false, source.file())?;
        }
        Ok(begun)
    }

    fn end(mut self) -> Result<()> {
        self.undo()
    }

    fn undo(&mut self) -> Result<()> {
        if std::mem::take(&mut self.held) {
            if let Some(device) = &self.device {
                device.set_direct_io(true, self.source.file())?;
            }
            Flag::Synchronous.set(self.source.file(), self.source.path(), false)?;
        }
        Ok(())
    }
}

impl Drop for SynchronousWrites<'_> {
    fn drop(&mut self) {
        if let Err(error) = self.undo() {
            let path: &Path = self.source.path();
            tracing::error!(path = %path.display(), %error, "writes of this volume stay synchronous until the next start");
        }
    }
}
