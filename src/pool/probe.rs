//! Whether a filesystem shares blocks and reports their addresses correctly.
//!
//! That FICLONE succeeds is not enough. Changes are found by addresses, so a filesystem that lists
//! made-up ones (a network filesystem may answer FIEMAP with the offset in the file) would lose every
//! overwrite in silence. So it is tried, on two scratch files.
// Scratch files without a name go with the process.
#![allow(clippy::disallowed_methods)]

use std::fs::File;
use std::io::Write;
use std::os::unix::fs::FileExt;
use std::path::Path;

use super::Result;
use crate::sys::clone;
use crate::sys::extents::Extents;
use base::Address;
use base::ByteRange;
use files::Context;
use files::DataRanges;

const BLOCK: usize = 4096;
/// Large enough not to be stored inside an inode.
const BLOCKS: usize = 64;

/// Whether files in `directory` can be cloned, and their extents show which blocks a clone shares and
/// which were written since.
pub(super) fn tells_sharing(directory: &Path) -> Result<bool> {
    let scratch = || tempfile::tempfile_in(directory).context("make a scratch file in", directory);
    let (source, target) = (scratch()?, scratch()?);
    (&source).write_all(&noise(1, BLOCKS)).context("write a scratch file in", directory)?;
    source.sync_all().context("sync a scratch file in", directory)?;
    if clone::reflink(&source, &target, directory).is_err() {
        return Ok(false);
    }
    let shared = shared_blocks(&source, &target, directory)?;
    target.write_all_at(&noise(2, 1), 0).context("write a scratch file in", directory)?;
    target.sync_all().context("sync a scratch file in", directory)?;
    let after = shared_blocks(&source, &target, directory)?;
    let all_but_the_first = |blocks: Vec<bool>| !blocks[0] && blocks[1..].iter().all(|shared| *shared);
    Ok(shared.is_some_and(|blocks| blocks.iter().all(|shared| *shared))
        && after.is_some_and(all_but_the_first))
}

/// Whether a filesystem says where a sparse file has data. One that calls it all data (ramfs, for one) would make
/// every block of a volume count as written, and no volume blank.
pub(super) fn tells_holes(directory: &Path) -> Result<bool> {
    const LENGTH: u64 = 4 << 20;
    let file = tempfile::tempfile_in(directory).context("make a scratch file in", directory)?;
    file.set_len(LENGTH).context("set the length of a scratch file in", directory)?;
    file.write_all_at(&noise(1, 1), LENGTH / 2).context("write a scratch file in", directory)?;
    file.sync_all().context("sync a scratch file in", directory)?;
    let whole = ByteRange { start: 0, end: LENGTH };
    let data: Vec<ByteRange> = DataRanges::of(&file, directory, whole).collect::<Result<_, _>>()?;
    Ok(data.into_iter().map(ByteRange::len).sum::<u64>() < LENGTH / 2)
}

/// Which blocks have the same address in both; `None` where the filesystem does not list extents.
fn shared_blocks(source: &File, target: &File, directory: &Path) -> Result<Option<Vec<bool>>> {
    let (Some(source), Some(target)) = (addresses(source, directory)?, addresses(target, directory)?) else {
        return Ok(None);
    };
    Ok(Some(source.iter().zip(&target).map(|(a, b)| a.is_some() && a == b).collect()))
}

fn addresses(file: &File, directory: &Path) -> Result<Option<Vec<Option<u64>>>> {
    let mut addresses = vec![None; BLOCKS];
    for extent in Extents::of(file, directory)? {
        let extent = match extent {
            Err(error) if matches!(error.errno(), Some(libc::EOPNOTSUPP | libc::ENOTTY)) => return Ok(None),
            extent => extent?,
        };
        let Address::At(address) = extent.address else { continue };
        for (block, cell) in addresses.iter_mut().enumerate() {
            let offset = (block * BLOCK) as u64;
            if (extent.range.start..extent.range.end).contains(&offset) {
                *cell = Some(address + (offset - extent.range.start));
            }
        }
    }
    Ok(Some(addresses))
}

/// Bytes that no filesystem compresses.
fn noise(seed: u8, blocks: usize) -> Vec<u8> {
    let mut bytes = vec![0; blocks * BLOCK];
    blake3::Hasher::new().update(&[seed]).finalize_xof().fill(&mut bytes);
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tmpfs_and_ext4_share_nothing() {
        // The machine's temporary directory is one of both; on one that clones the answer is true and
        // FIEMAP really reports, which the tests on the xfs pool show.
        let dir = tempfile::tempdir().expect("temp dir");
        let (a, b) =
            (tempfile::tempfile_in(dir.path()).expect("a"), tempfile::tempfile_in(dir.path()).expect("b"));
        (&a).write_all(&noise(1, 1)).expect("write");
        let clones = clone::reflink(&a, &b, dir.path()).is_ok();
        assert_eq!(tells_sharing(dir.path()).expect("probe"), clones);
    }
}
