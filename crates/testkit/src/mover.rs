//! A mover of blocks as Velero has one: whatever of a list touches a block of 1 MiB makes it read the block, past the page cache.
//! Its repository is one image that holds the volume as of the last backup.

use std::collections::BTreeSet;
use std::fs::File;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use deltapath::sys::{blockdev, program};
use files::AlignedBuffer;

/// What it marks, reads and writes at once.
pub const UNIT: u64 = 1 << 20;

/// An image, and what it holds.
pub struct Image {
    pub path: PathBuf,
}

/// Bytes of one backup, in whole units.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Moved {
    pub read: u64,
    /// Those of the units that differ from the image as it was.
    pub changed: u64,
}

impl Moved {
    /// A list names little more than what changed.
    pub fn assert_is_close(&self, what: &str) {
        assert!(self.read * 10 <= self.changed * 11, "{what}: too much is listed: {self:?}");
    }
}

fn direct(path: &Path, writes: bool) -> File {
    let mut options = File::options();
    options.read(!writes).write(writes).custom_flags(libc::O_DIRECT);
    options.open(path).expect("open for direct I/O")
}

/// The units of a device: their offsets and lengths. The last may be short.
fn units(size: u64) -> impl Iterator<Item = (u64, u64)> {
    (0..size).step_by(UNIT as usize).map(move |offset| (offset, UNIT.min(size - offset)))
}

impl Image {
    /// An empty one, as before the first backup.
    pub fn new(path: PathBuf) -> Self {
        File::create_new(&path).expect("make the image");
        Image { path }
    }

    /// Another of the same content.
    pub fn copy(&self, path: PathBuf) -> Self {
        std::fs::copy(&self.path, &path).expect("copy the image");
        Image { path }
    }

    /// Takes over the units of a device that these ranges of offset and size touch. The image then holds what the device holds;
    /// fails where it does not.
    pub fn take(&self, device: &Path, ranges: impl IntoIterator<Item = (u64, u64)>) -> Moved {
        let size = blockdev::size(device).expect("the size of the device");
        let image = File::options().read(true).write(true).open(&self.path).expect("open the image");
        image.set_len(size).expect("set the length of the image");
        let touched =
            |(offset, length): (u64, u64)| offset / UNIT..(offset + length).min(size).div_ceil(UNIT);
        let marked: BTreeSet<u64> = ranges.into_iter().flat_map(touched).collect();
        let source = direct(device, false);
        let (mut found, mut kept) = (AlignedBuffer::new(UNIT as usize), vec![0; UNIT as usize]);
        let mut moved = Moved { read: 0, changed: 0 };
        for (offset, length) in units(size) {
            let (found, kept) = (found.part(length as usize), &mut kept[..length as usize]);
            source.read_exact_at(found, offset).expect("read the device");
            image.read_exact_at(kept, offset).expect("read the image");
            let differs = found != kept;
            moved.changed += if differs { length } else { 0 };
            if marked.contains(&(offset / UNIT)) {
                moved.read += length;
                image.write_all_at(found, offset).expect("write the image");
            } else {
                assert!(!differs, "the {length} bytes at {offset} changed, and are not listed");
            }
        }
        moved
    }

    /// Writes all of it to a device that may hold anything: BLKZEROOUT for zeros, direct writes for the rest.
    pub fn restore(&self, device: &Path) {
        let (image, target) = (File::open(&self.path).expect("open the image"), direct(device, true));
        let size = image.metadata().expect("stat the image").len();
        let mut unit = AlignedBuffer::new(UNIT as usize);
        let mut zeros: Option<(u64, u64)> = None;
        for (offset, length) in units(size) {
            let unit = unit.part(length as usize);
            image.read_exact_at(unit, offset).expect("read the image");
            if unit.iter().all(|byte| *byte == 0) {
                zeros = Some((zeros.map_or(offset, |(start, _)| start), offset + length));
                continue;
            }
            zeros.take().into_iter().for_each(|run| zero_out(device, run));
            target.write_all_at(unit, offset).expect("write the device");
        }
        zeros.into_iter().for_each(|run| zero_out(device, run));
        target.sync_all().expect("flush the device");
    }
}

/// By BLKZEROOUT, from an offset to another.
fn zero_out(device: &Path, (start, end): (u64, u64)) {
    let (offset, length) = (start.to_string(), (end - start).to_string());
    let arguments = ["--force", "--zeroout", "--offset", &offset, "--length", &length];
    program::run("blkdiscard", &arguments, device, |code| code == 0).expect("BLKZEROOUT");
}
