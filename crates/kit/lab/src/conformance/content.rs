//! What the suite writes, and the comparison of devices with it.

use std::collections::BTreeSet;
use std::fs::File;
use std::io::{Seek, SeekFrom};
use std::os::unix::fs::{FileExt, FileTypeExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use super::ranges::Ranges;
use super::verdict::Wrong;
use base::{BlockSize, Stop};
use files::pattern::Image;

/// The unit that is written: no common device has a larger sector.
pub(crate) const BLOCK: u64 = BlockSize::MIN.bytes();
/// Bytes read at once.
const CHUNK: u64 = 1 << 20;

/// A change of the device, in blocks.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Edit {
    /// Write something else for each seed.
    Write { start: u64, count: u64, seed: u64 },
    /// Write what is there already.
    Same { start: u64, count: u64 },
    /// Write zeros.
    Zero { start: u64, count: u64 },
    /// Discard; zeros where the device takes no discards.
    Punch { start: u64, count: u64 },
}

/// The content of a volume.
#[derive(Clone, Debug, Default)]
pub(crate) struct Content {
    image: Image,
    /// Written to, also with zeros, and not discarded since.
    written: BTreeSet<u64>,
    /// Whether every discard was taken.
    pub discards: bool,
}

impl Content {
    pub fn new() -> Self {
        Content { discards: true, ..Default::default() }
    }

    /// Makes the changes on the device and here, and syncs the device: what a workload has synced, a
    /// snapshot holds.
    pub fn apply(&mut self, device: &Path, edits: &[Edit], stop: &Stop) -> Result<(), Wrong> {
        let opened = File::options().read(true).write(true).open(device);
        let file = opened.map_err(|error| Wrong::new(format!("open {}: {error}", device.display())))?;
        let failed = |error: std::io::Error| Wrong::new(format!("write to {}: {error}", device.display()));
        for edit in edits {
            stop.check().map_err(|stopped| Wrong::new(stopped.to_string()))?;
            match *edit {
                Edit::Write { start, count, seed } => {
                    self.image.write(&file, start, count, seed).map_err(failed)?;
                    self.written.extend(start..start + count);
                }
                Edit::Same { start, count } => {
                    for block in start..start + count {
                        self.image.rewrite_same(&file, block).map_err(failed)?;
                    }
                }
                Edit::Zero { start, count } => {
                    self.image.zero(&file, start, count).map_err(failed)?;
                    self.written.extend(start..start + count);
                }
                Edit::Punch { start, count } => {
                    if self.image.punch(&file, start, count).is_ok() {
                        self.written.retain(|block| !(start..start + count).contains(block));
                    } else {
                        self.discards = false;
                        self.image.zero(&file, start, count).map_err(failed)?;
                    }
                }
            }
        }
        file.sync_data().map_err(failed)
    }

    /// What holds data other than zeros.
    pub fn data(&self) -> Ranges {
        blocks(self.image.allocated())
    }

    /// The blocks that hold data other than zeros.
    pub fn blocks(&self) -> Vec<u64> {
        self.image.allocated()
    }

    /// What was written and not discarded.
    pub fn written(&self) -> Ranges {
        blocks(self.written.iter().copied())
    }

    /// What differs from `base`.
    pub fn changed_since(&self, base: &Content) -> Ranges {
        blocks(self.image.changed_since(&base.image))
    }

    /// Compares the parts of a device that hold data, and `spread` parts of 1 MiB in all of it.
    pub fn compare_parts(&self, device: &Path, size: u64, spread: u64, stop: &Stop) -> Result<(), Wrong> {
        self.image
            .compare_parts(device, size, spread, stop)
            .map_err(|error| Wrong::new(format!("not what was written: {error}")))
    }

    /// Compares a device with it, byte by byte.
    pub fn compare(&self, device: &Path, size: u64, stop: &Stop) -> Result<(), Wrong> {
        self.image
            .compare(device, size, stop)
            .map_err(|error| Wrong::new(format!("not what was written: {error}")))
    }
}

pub(crate) fn blocks(blocks: impl IntoIterator<Item = u64>) -> Ranges {
    Ranges::of(blocks.into_iter().map(|block| block * BLOCK..(block + 1) * BLOCK))
}

/// The size of a device; an error when it is not a block device.
pub(crate) fn device_size(device: &Path) -> Result<u64, Wrong> {
    if !std::fs::metadata(device).is_ok_and(|meta| meta.file_type().is_block_device()) {
        return Err(Wrong::new(format!(
            "{} is not a block device after NodePublishVolume",
            device.display()
        )));
    }
    let size = File::open(device).and_then(|mut file| file.seek(SeekFrom::End(0)));
    size.map_err(|error| Wrong::new(format!("find the size of {}: {error}", device.display())))
}

/// Finds a byte of `device` outside of `except` that is not as in `other` (zeros where there is none).
pub(crate) fn differs_outside(
    device: &Path,
    other: Option<&Path>,
    except: &Ranges,
    size: u64,
    stop: &Stop,
) -> Result<Option<u64>, Wrong> {
    let open =
        |path: &Path| File::open(path).map_err(|e| Wrong::new(format!("open {}: {e}", path.display())));
    let (file, other) = (open(device)?, other.map(open).transpose()?);
    let outside = Ranges::of(std::iter::once(0..size)).minus(except);
    let (mut found, mut wanted) = (vec![0; CHUNK as usize], vec![0; CHUNK as usize]);
    for range in outside.iter() {
        for start in range.clone().step_by(CHUNK as usize) {
            stop.check().map_err(|stopped| Wrong::new(stopped.to_string()))?;
            let length = CHUNK.min(range.end - start) as usize;
            file.read_exact_at(&mut found[..length], start)?;
            if let Some(other) = &other {
                other.read_exact_at(&mut wanted[..length], start)?;
            }
            if found[..length] != wanted[..length] {
                let at = found.iter().zip(&wanted).position(|(a, b)| a != b).unwrap_or(0);
                return Ok(Some(start + at as u64));
            }
        }
    }
    Ok(None)
}

/// Threads at work on devices.
static AT_WORK: AtomicUsize = AtomicUsize::new(0);

/// Work on a device, which may hang: not on the threads that keep the time. It is stopped when no caller
/// waits for it any more.
pub(crate) async fn blocking<T: Send + 'static>(
    work: impl FnOnce(&Stop) -> Result<T, Wrong> + Send + 'static,
) -> Result<T, Wrong> {
    struct Tell(Stop);
    impl Drop for Tell {
        fn drop(&mut self) {
            self.0.cancel();
        }
    }
    struct Count;
    impl Drop for Count {
        fn drop(&mut self) {
            AT_WORK.fetch_sub(1, Ordering::SeqCst);
        }
    }
    let stop = Stop::default();
    let _tell = Tell(stop.clone());
    AT_WORK.fetch_add(1, Ordering::SeqCst);
    let count = Count;
    let task = tokio::task::spawn_blocking(move || {
        let _count = count;
        work(&stop)
    });
    task.await.unwrap_or_else(|error| Err(Wrong::new(format!("a device task failed: {error}"))))
}

/// Waits until no thread has a device open, or for `patience`.
pub(crate) async fn at_rest(patience: Duration) {
    let deadline = Instant::now() + patience;
    while AT_WORK.load(Ordering::SeqCst) > 0 && Instant::now() < deadline {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

/// [`Content::apply`] away from those threads.
pub(crate) async fn apply(mut content: Content, device: PathBuf, edits: Vec<Edit>) -> Result<Content, Wrong> {
    blocking(move |stop| content.apply(&device, &edits, stop).map(|()| content)).await
}

#[cfg(test)]
mod tests {
    use super::*;

    /// On files: what is listed of the content is what is there.
    #[test]
    fn the_model_is_the_file() {
        let dir = tempfile::tempdir().expect("temp dir");
        let (one, two) = (dir.path().join("one"), dir.path().join("two"));
        let (size, stop) = (64 * BLOCK, Stop::default());
        for path in [&one, &two] {
            File::create(path).and_then(|file| file.set_len(size)).expect("make a file");
        }
        let start = [
            Edit::Write { start: 0, count: 4, seed: 1 },
            Edit::Zero { start: 2, count: 1 },
            Edit::Write { start: 10, count: 10, seed: 2 },
        ];
        let mut base = Content::new();
        base.apply(&one, &start, &stop).expect("write");
        base.apply(&two, &start, &stop).expect("write");
        let mut target = base.clone();
        let edits = [
            Edit::Punch { start: 10, count: 2 },
            Edit::Same { start: 14, count: 3 },
            Edit::Zero { start: 18, count: 1 },
            Edit::Write { start: 63, count: 1, seed: 3 },
        ];
        target.apply(&two, &edits, &stop).expect("change");
        let in_blocks = |ranges: &Ranges| -> Vec<std::ops::Range<u64>> {
            ranges.iter().map(|range| range.start / BLOCK..range.end / BLOCK).collect()
        };
        assert_eq!(in_blocks(&base.data()), [0..2, 3..4, 10..20]);
        assert_eq!(in_blocks(&base.written()), [0..4, 10..20]);
        assert_eq!(in_blocks(&target.changed_since(&base)), [10..12, 18..19, 63..64]);
        target.compare(&two, size, &stop).expect("as written");
        assert!(target.compare(&one, size, &stop).is_err());

        let changed = target.changed_since(&base);
        assert_eq!(differs_outside(&two, Some(&one), &changed, size, &stop).expect("read"), None);
        let less = changed.within(0, 63 * BLOCK);
        let found = differs_outside(&two, Some(&one), &less, size, &stop).expect("read");
        assert_eq!(found.map(|byte| byte / BLOCK), Some(63));
        assert_eq!(differs_outside(&two, None, &target.data(), size, &stop).expect("read"), None);
        assert!(differs_outside(&two, None, &less, size, &stop).expect("read").is_some());
    }
}
