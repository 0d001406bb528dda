//! What the same costs without a driver: operations on a sparse file in a directory of the user's, with the same bytes in it.

use std::fs::File;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::time::Instant;

use base::ByteRange;
use files::DataRanges;
use tempfile::TempDir;

use crate::conformance::content::{Content, Edit, blocking};
use crate::conformance::ranges::Ranges;
use crate::conformance::verdict::Wrong;

/// Bytes copied and read at once.
const CHUNK: u64 = 1 << 20;

/// A file that is written as the volume is. Dropped, it and its copies are removed.
pub(super) struct Bare {
    dir: TempDir,
    pub content: Content,
    size: u64,
}

impl Bare {
    /// Makes the file; the milliseconds that it took. None where the filesystem has no files of that size.
    pub async fn create(parent: &Path, size: u64) -> Result<Option<(Self, f64)>, Wrong> {
        let dir = tempfile::Builder::new().prefix("cbt-lab-bench-").tempdir_in(parent);
        let dir = dir.map_err(|error| Wrong::new(format!("{}: {error}", parent.display())))?;
        let bare = Bare { dir, content: Content::new(), size };
        let path = bare.file();
        let took = blocking(move |_| {
            let began = Instant::now();
            let file = File::create(path).map_err(failed)?;
            match file.set_len(size).and_then(|()| file.sync_all()) {
                Ok(()) => Ok(Some(milliseconds(began))),
                Err(error) if error.raw_os_error() == Some(nix::libc::EFBIG) => Ok(None),
                Err(error) => Err(failed(error)),
            }
        });
        Ok(took.await?.map(|took| (bare, took)))
    }

    pub fn file(&self) -> PathBuf {
        self.at("volume")
    }

    fn at(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    pub async fn write(&mut self, edits: Vec<Edit>) -> Result<(), Wrong> {
        self.content = crate::conformance::content::apply(self.content.clone(), self.file(), edits).await?;
        Ok(())
    }

    /// Copies the data of the file to another, and flushes it.
    pub async fn copy(&self, name: &str) -> Result<f64, Wrong> {
        let (from, to, size) = (self.file(), self.at(name), self.size);
        timed(move || {
            let source = File::open(&from)?;
            let target = File::create(to)?;
            target.set_len(size)?;
            let mut buffer = vec![0; CHUNK as usize];
            for range in DataRanges::of(&source, &from, ByteRange { start: 0, end: size }) {
                each_chunk(range.map_err(std::io::Error::other)?, |start, length| {
                    source.read_exact_at(&mut buffer[..length], start)?;
                    target.write_all_at(&buffer[..length], start)
                })?;
            }
            target.sync_all()
        })
        .await
    }

    /// Finds which parts of the file hold data.
    pub async fn walk(&self) -> Result<f64, Wrong> {
        let (path, size) = (self.file(), self.size);
        timed(move || {
            let file = File::open(&path)?;
            for range in DataRanges::of(&file, &path, ByteRange { start: 0, end: size }) {
                range.map_err(std::io::Error::other)?;
            }
            Ok(())
        })
        .await
    }

    /// Reads these ranges in the file and in a copy.
    pub async fn read_both(&self, copy: &str, ranges: &Ranges) -> Result<f64, Wrong> {
        let (one, other, ranges) = (self.file(), self.at(copy), ranges.clone());
        timed(move || {
            let files = [File::open(one)?, File::open(other)?];
            let mut buffer = vec![0; CHUNK as usize];
            for file in &files {
                for range in ranges.iter() {
                    each_chunk(ByteRange { start: range.start, end: range.end }, |start, length| {
                        file.read_exact_at(&mut buffer[..length], start)
                    })?;
                }
            }
            Ok(())
        })
        .await
    }

    /// Removes a copy, or the file itself.
    pub async fn remove(&self, name: &str) -> Result<f64, Wrong> {
        let (dir, path) = (self.dir.path().to_owned(), self.at(name));
        timed(move || {
            std::fs::remove_file(path)?;
            File::open(dir)?.sync_all()
        })
        .await
    }
}

fn each_chunk(
    range: ByteRange,
    mut work: impl FnMut(u64, usize) -> std::io::Result<()>,
) -> std::io::Result<()> {
    let mut start = range.start;
    while start < range.end {
        let length = CHUNK.min(range.end - start);
        work(start, length as usize)?;
        start += length;
    }
    Ok(())
}

/// The bytes that the filesystem of a directory has left.
pub(super) fn space_left(dir: &Path) -> nix::Result<f64> {
    let system = nix::sys::statvfs::statvfs(dir)?;
    Ok(system.blocks_available() as f64 * system.fragment_size() as f64)
}

/// The bytes that the plain files under `parent` take, where a driver that says that `left` bytes are left means the filesystem that
/// they are on: it has nearly as much left. They are not the driver's.
pub(super) fn space_of_same(parent: &Path, left: f64, data: f64) -> f64 {
    let Ok(free) = space_left(parent) else { return 0.0 };
    if (free - left).abs() > data / 2.0 {
        return 0.0;
    }
    let files = std::fs::read_dir(parent).into_iter().flatten().flatten();
    let files = files.flat_map(|dir| std::fs::read_dir(dir.path()).into_iter().flatten().flatten());
    files.filter_map(|file| file.metadata().ok()).map(|file| file.blocks() as f64 * 512.0).sum()
}

async fn timed(work: impl FnOnce() -> std::io::Result<()> + Send + 'static) -> Result<f64, Wrong> {
    blocking(move |_| {
        let began = Instant::now();
        work().map_err(failed)?;
        Ok(milliseconds(began))
    })
    .await
}

fn milliseconds(since: Instant) -> f64 {
    since.elapsed().as_secs_f64() * 1000.0
}

fn failed(error: std::io::Error) -> Wrong {
    Wrong::new(format!("bare operation: {error}"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::conformance::content::{BLOCK, blocks};

    #[tokio::test(flavor = "multi_thread")]
    async fn a_copy_holds_the_same_and_nothing_stays() {
        let parent = tempfile::tempdir().expect("temp dir");
        let size = 64 << 20;
        let (mut bare, _) =
            Bare::create(parent.path(), size).await.expect("create").expect("a file of 64 MiB");
        bare.write(vec![Edit::Write { start: 300, count: 600, seed: 1 }]).await.expect("write");
        bare.copy("copy").await.expect("copy");
        let stop = base::Stop::default();
        bare.content.compare(&bare.at("copy"), size, &stop).expect("the same");
        bare.read_both("copy", &blocks([300, 899])).await.expect("read");
        assert!(bare.read_both("copy", &blocks([size / BLOCK])).await.is_err(), "behind the end");
        bare.walk().await.expect("walk");
        let free = space_left(parent.path()).expect("statvfs");
        let written = 600.0 * BLOCK as f64;
        // Others may write to this disk.
        let taken = space_of_same(parent.path(), free, 1e12);
        assert!((2.0 * written..2.0 * written + 65536.0).contains(&taken), "both files: {taken}");
        assert_eq!(space_of_same(parent.path(), free - 1e12, 1e12), 0.0, "another filesystem");
        bare.remove("copy").await.expect("remove");
        assert!(bare.remove("copy").await.is_err(), "it is there still");
        drop(bare);
        assert_eq!(std::fs::read_dir(parent.path()).expect("list").count(), 0);
    }
}
