//! A backup back onto a device or into a file: all of it, or what differs from an earlier backup that is there already.

use std::fs::{File, TryLockError};
use std::ops::Range;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileTypeExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use files::durable::Draft;
use files::{AlignedBuffer, Context, change};
use nix::fcntl::OFlag;
use parking_lot::Mutex;
use serde::Serialize;

use crate::device::{self, Device, Target, is_zeros};
use crate::error::{Error, Result, refused};
use crate::progress::Progress;
use crate::repository::pack::Packs;
use crate::repository::{BLOCK, Index, Repository, SEGMENT, Segment, pieces};
use crate::sampled;
use crate::wait::each;

/// What a restore did.
#[derive(Debug, Serialize)]
pub struct Restored {
    pub id: String,
    /// Where it is now.
    pub to: PathBuf,
    /// Bytes of data that were written.
    pub written: u64,
    /// Bytes that were made zeros, where the device held something before.
    pub cleared: u64,
}

/// Restores into a file, which comes into being as a whole, or onto a device.
pub fn run(
    repository: &Repository,
    index: &Index,
    to: &Path,
    overwrite: bool,
    threads: usize,
) -> Result<Restored> {
    let kind = match std::fs::metadata(to) {
        Ok(metadata) => Some(metadata.file_type()),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => None,
        Err(error) => return Err(error).context("look at", to).map_err(Error::from),
    };
    match kind {
        Some(kind) if kind.is_block_device() => {
            let file = open_device(to, index)?;
            Job::new(repository, index, None, &file, to).all(threads)
        }
        Some(kind) if !kind.is_file() => {
            Err(refused!("{} is neither a block device nor a file", to.display()))
        }
        Some(_) if !overwrite => {
            Err(refused!("{} exists: name another file, or add --overwrite", to.display()))
        }
        _ => {
            let place = target_of(to)?;
            let _lock = lock_replaced(&place)?;
            let draft = Draft::beside(&place, "restoring")?;
            let (file, path) = (draft.file(), draft.path());
            change::set_len(file, path, index.about.size)?;
            let job = Job { is_new: true, ..Job::new(repository, index, None, file, path) };
            let restored = Restored { to: to.to_owned(), ..job.all(threads)? };
            match overwrite {
                true => put_over(draft, &place)?,
                false => draft.create(&place).map_err(|error| match error.errno() {
                    Some(nix::libc::EEXIST) => {
                        let to = to.display();
                        refused!("{to} was made meanwhile: name another file, or add --overwrite")
                    }
                    _ => error.into(),
                })?,
            }
            Ok(restored)
        }
    }
}

/// Locks the file that is to be replaced, if there is one: what another restore writes into it would be lost.
fn lock_replaced(place: &Path) -> Result<Option<File>> {
    let file = File::options().read(true).custom_flags(OFlag::O_NONBLOCK.bits()).open(place).ok();
    match file.as_ref().map(File::try_lock_shared) {
        Some(Err(TryLockError::WouldBlock)) => Err(device::in_use(place)),
        _ => Ok(file),
    }
}

/// The file that a path means, through symbolic links, also where it is not there yet.
pub fn target_of(path: &Path) -> Result<PathBuf> {
    if path.as_os_str().as_bytes().ends_with(b"/") {
        return Err(refused!("{}: the name of a file ends as that of a directory", path.display()));
    }
    // As many links as the kernel follows.
    let mut target = path.to_owned();
    for _ in 0..40 {
        if !target.is_symlink() {
            return match target.file_name() {
                Some(_) if target.exists() && !target.is_file() => {
                    Err(refused!("{} is not a file", path.display()))
                }
                // The error would name the draft next to it, which the user did not ask for.
                Some(_) if target.parent().is_some_and(|dir| !dir.is_dir()) => {
                    Err(refused!("{} cannot be written: its directory does not exist", path.display()))
                }
                Some(_) => Ok(target),
                None => Err(refused!("{} is not the name of a file", path.display())),
            };
        }
        let link = std::fs::read_link(&target).context("follow the link", &target)?;
        target = target.parent().map_or(link.clone(), |parent| parent.join(link));
    }
    Err(refused!("{} is a symbolic link to itself", path.display()))
}

/// Puts a whole file in the place of another, and keeps that one's owner and mode.
pub fn put_over(draft: Draft, place: &Path) -> Result<()> {
    if let Ok(replaced) = place.metadata()
        && let Err(error) = draft.take_after(&replaced)
    {
        tracing::warn!("{} has another owner now: {}", place.display(), base::report(&error));
    }
    Ok(draft.replace(place)?)
}

/// Writes what differs from an earlier backup, which the device or file holds: a part of that is compared first.
pub fn onto(
    repository: &Repository,
    index: &Index,
    base: &Index,
    to: &Path,
    threads: usize,
) -> Result<Restored> {
    if base.about.size != index.about.size {
        return Err(refused!(
            "backup {} has {} bytes and backup {} has {}: restore it whole, without --onto-base",
            base.about.id,
            base.about.size,
            index.about.id,
            index.about.size
        ));
    }
    let file = open_device(to, index)?;
    let stored: Vec<u32> = base.segments.iter().map(|segment| segment.number).collect();
    let some = sampled::some(&stored, 32);
    if let Some(offset) = sampled::differs(repository, base, Some(index), &some, false, &Device::open(to)?)? {
        return Err(refused!(
            "{} does not hold backup {}: at byte {offset} it differs; restore it whole, without --onto-base",
            to.display(),
            base.about.id
        ));
    }
    Job::new(repository, index, Some(base), &file, to).all(threads)
}

fn open_device(path: &Path, index: &Index) -> Result<File> {
    // Of a block device that is mounted or in use otherwise, the kernel refuses this; of a file it ignores it.
    let flags = OFlag::O_EXCL | device::no_wait(path)?;
    let file = File::options().read(true).write(true).custom_flags(flags.bits()).open(path);
    let mut file = file.context("open for writing", path)?;
    // udev locks devices, and files where there are no locks cannot be.
    if flags.contains(OFlag::O_NONBLOCK) && matches!(file.try_lock(), Err(TryLockError::WouldBlock)) {
        return Err(device::in_use(path));
    }
    let size = std::io::Seek::seek(&mut file, std::io::SeekFrom::End(0)).context("find the size of", path)?;
    match size >= index.about.size {
        true => Ok(file),
        false => Err(refused!(
            "{} has {size} bytes, and the backup has {}: it does not fit",
            path.display(),
            index.about.size
        )),
    }
}

/// Bytes that are written at once.
const LONGEST_WRITE: usize = 1 << 20;

/// Blocks that lie side by side and are not written yet.
#[derive(Default)]
struct Run {
    start: u64,
    length: usize,
    bytes: AlignedBuffer,
}

struct Job<'r> {
    repository: &'r Repository,
    index: &'r Index,
    base: Option<&'r Index>,
    to: Target<'r>,
    /// Everything is a hole before.
    is_new: bool,
    written: AtomicU64,
    cleared: AtomicU64,
}

impl<'r> Job<'r> {
    fn new(
        repository: &'r Repository,
        index: &'r Index,
        base: Option<&'r Index>,
        file: &'r File,
        path: &'r Path,
    ) -> Self {
        Job {
            repository,
            index,
            base,
            to: Target::of(file, path),
            is_new: false,
            written: AtomicU64::new(0),
            cleared: AtomicU64::new(0),
        }
    }

    fn all(self, threads: usize) -> Result<Restored> {
        let size = self.index.about.size;
        let progress = Progress::new("restore", size);
        let count = size.div_ceil(SEGMENT) as usize;
        let stop = self.repository.store.stop();
        each(count, threads, stop, |number| self.segment(number as u32, &progress)).inspect_err(|_| {
            if !self.is_new {
                shell::say!(
                    "cbt-backup: {} holds neither what it held before nor the backup: run the restore again, without --onto-base",
                    self.to.path().display()
                );
            }
        })?;
        self.to.sync()?;
        Ok(Restored {
            id: self.index.about.id.clone(),
            to: self.to.path().to_owned(),
            written: self.written.into_inner(),
            cleared: self.cleared.into_inner(),
        })
    }

    fn segment(&self, number: u32, progress: &Progress) -> Result<()> {
        let start = u64::from(number) * SEGMENT;
        let end = self.index.about.size.min(start + SEGMENT);
        let whole = 0..(end - start).div_ceil(BLOCK) as u32;
        let mut packs = Packs::default();
        let mut read = |index: &Index| self.repository.segment_at(index, number, &mut packs);
        let mut written = 0;
        let (target, ranges): (Segment, Vec<Range<u32>>) = match self.base {
            None if self.is_new && self.index.segment(number).is_none() => (Segment::default(), Vec::new()),
            None => (read(self.index)?, vec![whole.clone()]),
            Some(base) => {
                let name = |index: &Index| {
                    index.segment(number).map(|of| (index.packs[of.pack as usize].id, of.chunk))
                };
                if name(base) == name(self.index) {
                    progress.by(end - start, 0);
                    return Ok(());
                }
                let (held, target) = (read(base)?, read(self.index)?);
                let ranges = held.differing(&target);
                (target, ranges)
            }
        };
        for range in &ranges {
            let extents = target.within(range);
            if !self.is_new {
                let mut position = range.start;
                for extent in &extents {
                    self.clear(start, position..extent.start)?;
                    position = extent.end();
                }
                self.clear(start, position..range.end)?;
            }
        }
        let extents: Vec<_> = ranges.iter().flat_map(|range| target.within(range)).collect();
        let mut run = Run::default();
        self.repository.fetch(pieces(number, &extents, &packs), &mut |piece, bytes| {
            let length = (bytes.len() as u64).min(self.index.about.size - piece.offset) as usize;
            for (offset, block) in
                (piece.offset..).step_by(BLOCK as usize).zip(bytes[..length].chunks(BLOCK as usize))
            {
                // What is a hole already stays one.
                if !self.is_new || !is_zeros(block) {
                    self.put(&mut run, offset, block)?;
                    written += block.len() as u64;
                }
            }
            self.repository.store.stop().check()?;
            Ok(())
        })?;
        self.write(&mut run)?;
        self.written.fetch_add(written, Ordering::Relaxed);
        progress.by(end - start, written);
        Ok(())
    }

    /// Takes a block that is to be written, and writes those before it where it does not follow them.
    fn put(&self, run: &mut Run, offset: u64, block: &[u8]) -> Result<()> {
        if run.length > 0 && run.start + run.length as u64 != offset
            || run.length + block.len() > LONGEST_WRITE
        {
            self.write(run)?;
        }
        if run.length == 0 {
            run.start = offset;
        }
        run.bytes.part(LONGEST_WRITE)[run.length..][..block.len()].copy_from_slice(block);
        run.length += block.len();
        Ok(())
    }

    fn write(&self, run: &mut Run) -> Result<()> {
        let length = std::mem::take(&mut run.length);
        self.to.write(run.bytes.part(length), run.start)
    }

    /// Makes blocks zeros.
    fn clear(&self, start: u64, blocks: Range<u32>) -> Result<()> {
        let (offset, end) = (start + u64::from(blocks.start) * BLOCK, start + u64::from(blocks.end) * BLOCK);
        let end = end.min(self.index.about.size);
        if offset >= end {
            return Ok(());
        }
        self.cleared.fetch_add(end - offset, Ordering::Relaxed);
        match change::punch_hole(self.to.file(), self.to.path(), offset, end - offset) {
            Ok(()) => Ok(()),
            // It cannot: then they are written.
            Err(error) if matches!(error.errno(), Some(nix::libc::EOPNOTSUPP | nix::libc::EINVAL)) => {
                let zeros = vec![0; 1 << 20];
                for position in (offset..end).step_by(zeros.len()) {
                    let length = (end - position).min(zeros.len() as u64) as usize;
                    self.to.write(&zeros[..length], position)?;
                }
                Ok(())
            }
            Err(error) => Err(error.into()),
        }
    }
}

/// How a device compares with a backup.
#[derive(Debug, Serialize)]
pub struct Compared {
    pub id: String,
    /// Bytes that were compared: all of the volume.
    pub bytes: u64,
    /// Bytes of ranges that differ.
    pub differing_bytes: u64,
    /// The first of them, whole blocks.
    pub differing: Vec<Range<u64>>,
}

/// Ranges that are reported; a device that is another one altogether has millions.
const TOLD: usize = 100;

/// Compares a device or file with a backup, every byte of it. What the device has beyond the backup does not count.
pub fn compare(repository: &Repository, index: &Index, with: &Path, threads: usize) -> Result<Compared> {
    let device = Device::open_alone(with)?;
    let size = index.about.size;
    if device.size() < size {
        return Err(refused!("{} has {} bytes, and the backup has {size}", with.display(), device.size()));
    }
    let progress = Progress::new("compare", size);
    let count = size.div_ceil(SEGMENT) as usize;
    let found = Mutex::new(Vec::new());
    each(count, threads, repository.store.stop(), |number| {
        let ranges = compare_segment(repository, index, &device, number as u32)?;
        found.lock().extend(ranges);
        progress.by(SEGMENT, SEGMENT);
        Ok(())
    })?;
    device.check_unchanged()?;
    let mut ranges = found.into_inner();
    ranges.sort_unstable_by_key(|range| range.start);
    let mut differing: Vec<Range<u64>> = Vec::new();
    for range in ranges {
        match differing.last_mut().filter(|last| last.end == range.start) {
            Some(last) => last.end = range.end,
            None => differing.push(range),
        }
    }
    let differing_bytes = differing.iter().map(|range| range.end - range.start).sum();
    differing.truncate(TOLD);
    Ok(Compared { id: index.about.id.clone(), bytes: size, differing_bytes, differing })
}

fn compare_segment(
    repository: &Repository,
    index: &Index,
    device: &Device,
    number: u32,
) -> Result<Vec<Range<u64>>> {
    let start = u64::from(number) * SEGMENT;
    let end = index.about.size.min(start + SEGMENT);
    let mut packs = Packs::default();
    let segment = repository.segment_at(index, number, &mut packs)?;
    let mut differing = Vec::new();
    let mut buffer = AlignedBuffer::new(WINDOW as usize);
    // What the backup has as zeros, in windows that hold nothing of it as well.
    for start_of_window in (start..end).step_by(WINDOW as usize) {
        repository.store.stop().check()?;
        let window = start_of_window..end.min(start_of_window + WINDOW);
        let first = ((window.start - start) / BLOCK) as u32;
        let blocks = first..(window.end - start).div_ceil(BLOCK) as u32;
        let length = ((blocks.end - blocks.start) as u64 * BLOCK) as usize;
        let found = buffer.part(length);
        device.read(window.start, found)?;
        // A device may be longer than the volume.
        found[(window.end - window.start) as usize..].fill(0);
        let mut wanted = vec![0; length];
        repository.fetch(pieces(number, &segment.within(&blocks), &packs), &mut |piece, bytes| {
            let at = (piece.offset - window.start) as usize;
            wanted[at..at + bytes.len()].copy_from_slice(bytes);
            Ok(())
        })?;
        for (at, (found, wanted)) in
            found.chunks(BLOCK as usize).zip(wanted.chunks(BLOCK as usize)).enumerate()
        {
            if found != wanted {
                let offset = window.start + at as u64 * BLOCK;
                differing.push(offset..window.end.min(offset + BLOCK));
            }
        }
    }
    Ok(differing)
}

/// Bytes that are compared at once, by each thread.
const WINDOW: u64 = 4 << 20;
