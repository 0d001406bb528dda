//! What is kept of a volume while its unmounted ext4 grows. resize2fs changes a filesystem in no safe order: where it is killed, or
//! the power fails, `e2fsck -p` refuses what is left. A growth is
//!
//! 1. Make `ungrown/` of the volume, as one step. Where the pool copies at once, a copy of the bytes is in it.
//! 2. Check and grow the filesystem, and flush its device. Without a copy, resize2fs keeps each block in `ungrown/` before it
//!    changes it.
//! 3. Remove `ungrown/`: this is the commit.
//!
//! If a step fails, or the driver ends before the last, the volume gets its bytes back before it is used next: all of the copy, or
//! the blocks, by e2undo(8). The blocks are not synced one by one, so only a copy survives a power cut for sure.

use std::fs::File;
use std::io::{self, ErrorKind};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use crate::driver::error::{Error, Result};
use crate::pool::{Backend, Copying};
use crate::store::Store;
use crate::sys::loopdev::LoopDevice;
use crate::sys::{blockdev, clone, program};
use base::{BlockSize, ObjectDir, Stop, VolumeId};
use files::{Context, change};

/// Where an ext4 has the time of its last mount: `s_mtime` of its superblock (`Documentation/filesystems/ext4/super.rst` of Linux).
const LAST_MOUNT: u64 = 1024 + 0x2C;

/// Grows the filesystem of a volume by `grow`, which gets the file for the blocks that it changes, if no copy is made. Where it
/// fails, the filesystem is as it was.
pub(super) fn guarded(
    pool: &dyn Backend,
    store: &Store,
    id: &VolumeId,
    grow: impl FnOnce(Option<&Path>) -> Result<()>,
) -> Result<()> {
    let volume = store.dir().volume(id);
    let draft = store.draft_ungrown(id)?;
    let copies = pool.copies_atomically();
    if copies {
        let how = Copying { sink: None, size: BlockSize::MIN, stop: &Stop::default() };
        pool.copy(&pool.open(&volume)?, draft.dir(), how)?;
    }
    store.keep_ungrown(draft, id)?;
    let blocks = blocks(&volume)?;
    match grow((!copies).then_some(&blocks)) {
        Ok(()) => Ok(store.remove_ungrown(id)?),
        Err(error) => undo(store, id).and(Err(error)),
    }
}

/// Undoes a growth that was cut short. The caller holds the lock of the volume.
pub(super) fn undo(store: &Store, id: &VolumeId) -> Result<()> {
    let volume = store.dir().volume(id);
    let (ungrown, data) = (volume.ungrown(), volume.data());
    let is_there = |path: &Path| path.try_exists().context("stat", path);
    if !is_there(ungrown.path())? {
        return Ok(());
    }
    let file = File::options().write(true).open(&data).context("open", &data)?;
    let device = LoopDevice::find(&data)?.map(|device| device.path());
    if let Some(device) = &device {
        if blockdev::is_claimed(device)? {
            return Err(Error::Precondition(format!(
                "the growth of the filesystem on {} was cut short, and is not undone while something holds the device: end that first",
                device.display()
            )));
        }
        // What resize2fs wrote last may still be on its way to the file.
        blockdev::flush(device)?;
    }
    let is_undone = match is_there(&ungrown.data())? {
        true => {
            let copy = File::open(ungrown.data()).context("open", &ungrown.data())?;
            clone::reflink(&copy, &file, &data)?;
            true
        }
        false => put_back(&blocks(&volume)?, &data).map_err(|error| {
            Error::Precondition(format!(
                "the growth of the filesystem in {} was cut short, and is not undone: {}. Try again; or stop the driver, remove {}, and \
                 run e2fsck on the volume",
                data.display(),
                base::report(&error),
                ungrown.path().display()
            ))
        })?,
    };
    change::sync(&file, &data)?;
    if let Some(device) = &device {
        blockdev::forget(device)?;
    }
    store.remove_ungrown(id)?;
    if is_undone {
        tracing::warn!(volume_id = %id, "the growth of its filesystem was cut short, and is undone");
    }
    Ok(())
}

/// Where resize2fs keeps the blocks that it changes. Their name has the time of the last mount: after another one they are not put
/// back, such as those that a driver left which did not know them.
fn blocks(volume: &ObjectDir) -> Result<PathBuf> {
    let (mut mounted, data) = ([0; 4], volume.data());
    File::open(&data).and_then(|file| file.read_exact_at(&mut mounted, LAST_MOUNT)).context("read", &data)?;
    let mounted = u32::from_le_bytes(mounted);
    Ok(volume.ungrown().path().join(format!("blocks.{mounted}")))
}

/// Puts blocks back that resize2fs kept; `false` if there are none, so that nothing has changed.
fn put_back(blocks: &Path, data: &Path) -> Result<bool> {
    if !has_blocks(blocks).context("read", blocks)? {
        return Ok(false);
    }
    // Each has a checksum: all are looked at before the first is written.
    for flags in ["-fn", "-f"] {
        let arguments = [flags.as_ref(), blocks.as_os_str()];
        let output = program::run("e2undo", &arguments, data, |code| code == 0)?;
        let said = String::from_utf8_lossy(&output.stderr);
        // It succeeds also where it passed over what it could not read or write.
        if said.contains("error") {
            return Err(Error::Precondition(format!("e2undo: {}", said.trim())));
        }
    }
    Ok(true)
}

/// Whether the head of an undo file (`struct undo_header` of e2fsprogs) counts any. It does before the first block of the volume changes.
fn has_blocks(path: &Path) -> io::Result<bool> {
    let mut head = [0; 16];
    match File::open(path).and_then(|file| file.read_exact_at(&mut head, 0)) {
        Err(error) if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::UnexpectedEof) => Ok(false),
        read => read.map(|()| head[..8] == *b"E2UNDO02" && head[8..] != [0; 8]),
    }
}
