//! What the superblock of a filesystem says: its type, its size, and how far it can grow without harm.
//!
//! It is read here, and not by the programs that own the formats, since it is asked for each time a volume is restored or
//! expanded. The fields are those of `Documentation/filesystems/ext4/super.rst` of Linux and of `struct xfs_dsb`
//! (`fs/xfs/libxfs/xfs_format.h`), and of `struct btrfs_super_block` (`linux/btrfs_tree.h`).

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;

use crate::driver::error::{Error, Result};
use base::Quantity;
use files::Context;

/// A filesystem on a device or in the file of a volume.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::driver) struct Superblock {
    /// As `blkid` names it: `ext4`, `ext3`, `ext2`, `xfs` or `btrfs`.
    pub(in crate::driver) fs_type: &'static str,
    /// Its block size in bytes; 0 if it is not known.
    pub(in crate::driver) block: u64,
    /// Its size in bytes; 0 if it is not known.
    pub(in crate::driver) size: u64,
    /// Where its block groups begin, and how large each is, in bytes.
    first: u64,
    group: u64,
    /// The least that a last, short group needs, in bytes.
    least: u64,
    /// Which of the devices of a btrfs this is, from 1.
    pub(in crate::driver) member: u64,
    /// The size in bytes that it is never grown beyond.
    pub(in crate::driver) most: u64,
    /// Whether the kernel or a check found errors that were not repaired. Then it does not grow.
    pub(in crate::driver) has_errors: bool,
}

/// Allocation groups of an xfs at most. A group never changes its size, so a small xfs that grows has many. Each is read at every
/// mount: 1,500 take 0.1 seconds, 10,000 three, 100,000 a minute and a half.
const XFS_GROUPS: u64 = 1500;

/// Blocks that a last, short block group of ext4 needs besides its inode table: bitmaps, backups of the superblock and the group
/// descriptors, and the 50 that resize2fs does not go below.
const EXT4_TAIL: u64 = 128;

/// Bytes from the beginning of a device that tell which filesystem it has.
const HEAD: usize = 4096;
/// Where btrfs has its superblock.
const BTRFS: u64 = 64 << 10;

impl Superblock {
    /// Reads the superblock of a device or file; `None` if it has no filesystem of ours.
    pub(in crate::driver) fn read(path: &Path) -> Result<Option<Self>> {
        let file = File::open(path).context("open", path)?;
        let mut head = [0; HEAD];
        if !read_at(&file, &mut head, 0).context("read", path)? {
            return Ok(None);
        }
        if let Some(found) = ext4(&head).or_else(|| xfs(&head)) {
            return Ok(Some(found));
        }
        Ok(if read_at(&file, &mut head, BTRFS).context("read", path)? { btrfs(&head) } else { None })
    }

    /// The size that it grows to on a device of `device` bytes; `None` if it stays as it is. A rest of the device that is too short
    /// for another group stays unused.
    pub(in crate::driver) fn growth(&self, device: u64) -> Option<u64> {
        let target = device.min(self.most).checked_div(self.block)? * self.block;
        let rest = target.checked_sub(self.first)? % self.group;
        let is_too_short = rest < self.least && target - rest >= self.size;
        let target = if is_too_short { target - rest } else { target };
        (target > self.size).then_some(target)
    }

    /// The most bytes that are written when it grows to `target`.
    pub(in crate::driver) fn room_to_grow(&self, target: u64) -> u64 {
        // Bitmaps, headers and roots of a new group, and what the whole filesystem keeps of it.
        const A_GROUP: u64 = 64 << 10;
        let groups = if self.fs_type == "btrfs" { 0 } else { (target - self.size).div_ceil(self.group) };
        (1 << 20) + groups * A_GROUP
    }

    /// Fails if a volume of `capacity` bytes is larger than its filesystem can be.
    pub(in crate::driver) fn check_growth(&self, field: &'static str, capacity: u64) -> Result<()> {
        check_growth(self.fs_type, self.most, field, capacity)
    }
}

/// The same for a filesystem that can grow to `most` bytes.
pub(in crate::driver) fn check_growth(
    fs_type: &str,
    most: u64,
    field: &'static str,
    capacity: u64,
) -> Result<()> {
    match capacity <= most {
        true => Ok(()),
        false => Err(Error::OutOfRange {
            field,
            value: i128::from(capacity),
            want: format!(
                "at most {most} ({}): the {fs_type} of this volume was made too small to grow further without harm. Make \
                 a new volume of that size and copy the files",
                Quantity(most)
            ),
        }),
    }
}

/// Fills `buffer`; `false` if the file ends before.
fn read_at(file: &File, buffer: &mut [u8], at: u64) -> io::Result<bool> {
    match file.read_exact_at(buffer, at) {
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => Ok(false),
        read => read.map(|()| true),
    }
}

/// An ext4 has space for the descriptors of a certain number of block groups, which was reserved when it was made. resize2fs (1.47 and
/// before) destroys filesystems that it grows further (github.com/tytso/e2fsprogs/issues/98), unless they have `meta_bg`, which puts
/// descriptors anywhere.
fn ext4(head: &[u8; HEAD]) -> Option<Superblock> {
    let half =
        |at: usize| Some(u64::from(u16::from_le_bytes(head.get(1024 + at..1026 + at)?.try_into().ok()?)));
    let word =
        |at: usize| Some(u64::from(u32::from_le_bytes(head.get(1024 + at..1028 + at)?.try_into().ok()?)));
    if half(0x38)? != 0xEF53 {
        return None;
    }
    let (compatible, incompatible) = (word(0x5C)?, word(0x60)?);
    let (has_resize_inode, has_meta_bg, is_64bit) =
        (compatible & 0x10 != 0, incompatible & 0x10 != 0, incompatible & 0x80 != 0);
    let read_only_compatible = word(0x64)?;
    let has_bigalloc = read_only_compatible & 0x200 != 0;
    // An ext4 has a feature that is not among those of an ext3, and an ext3 has a journal.
    let fs_type = match incompatible & !0x16 != 0 || read_only_compatible & !0x7 != 0 {
        true => "ext4",
        false if compatible & 0x4 != 0 => "ext3",
        false => "ext2",
    };
    let block =
        1024u64.checked_shl(word(0x18)?.try_into().ok()?).filter(|block| (1024..=65536).contains(block))?;
    let high = if is_64bit { word(0x150)? } else { 0 };
    let (blocks, first) = (high << 32 | word(0x04)?, word(0x14)?);
    let (per_group, inodes_per_group) = (word(0x20)?, word(0x28)?);
    if per_group == 0 || inodes_per_group == 0 {
        return None;
    }
    let per_descriptor_block = block / if is_64bit { half(0xFE)?.clamp(32, block) } else { 32 };
    let reserved = if has_resize_inode { half(0xCE)? } else { 0 };
    let groups = blocks.checked_sub(first)?.div_ceil(per_group);
    let described = (groups.div_ceil(per_descriptor_block) + reserved) * per_descriptor_block;
    // There are 2^32 inodes at most, and without `64bit` as many blocks.
    let numbered = u64::from(u32::MAX) / inodes_per_group;
    let most_groups = if has_meta_bg { numbered } else { described.min(numbered) }.max(groups);
    let most = first.saturating_add(most_groups.saturating_mul(per_group));
    let most = if is_64bit { most } else { most.min(u64::from(u32::MAX)) };
    let table = (inodes_per_group * half(0x58)?).div_ceil(block);
    Some(Superblock {
        fs_type,
        block,
        size: blocks.saturating_mul(block),
        first: first * block,
        group: per_group.saturating_mul(block),
        least: (table + reserved + EXT4_TAIL) * block,
        member: 0,
        // resize2fs does not grow a `bigalloc` unless it is forced to.
        most: if has_bigalloc { blocks } else { most.max(blocks) }.saturating_mul(block),
        has_errors: half(0x3A)? & 2 != 0,
    })
}

fn xfs(head: &[u8; HEAD]) -> Option<Superblock> {
    let word = |at: usize| Some(u64::from(u32::from_be_bytes(head.get(at..at + 4)?.try_into().ok()?)));
    if &head[..4] != b"XFSB" {
        return None;
    }
    let block = word(4)?;
    let blocks = u64::from_be_bytes(head[8..16].try_into().ok()?);
    let group = word(84).filter(|group| *group > 0)?;
    let most = blocks.max(group.saturating_mul(XFS_GROUPS));
    let bytes = |blocks: u64| blocks.saturating_mul(block);
    Some(Superblock {
        fs_type: "xfs",
        block,
        size: bytes(blocks),
        first: 0,
        group: bytes(group),
        least: 0,
        member: 0,
        most: bytes(most),
        has_errors: false,
    })
}

/// `head` is of the superblock's place. The device's own number and size are in its `dev_item`.
fn btrfs(head: &[u8; HEAD]) -> Option<Superblock> {
    let long = |at: usize| Some(u64::from_le_bytes(head.get(at..at + 8)?.try_into().ok()?));
    let block = u64::from(u32::from_le_bytes(head[0x90..0x94].try_into().ok()?));
    (&head[64..72] == b"_BHRfS_M").then_some(Superblock {
        fs_type: "btrfs",
        block,
        size: long(0xD1)?,
        first: 0,
        group: u64::MAX,
        least: 0,
        member: long(0xC9)?,
        most: u64::MAX,
        has_errors: false,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_filesystem_grows_to_its_device_but_not_by_a_group_that_is_too_short() {
        let ext4 = Superblock {
            fs_type: "ext4",
            block: 4,
            size: 150,
            first: 0,
            group: 100,
            least: 30,
            member: 0,
            most: 500,
            has_errors: false,
        };
        let any = Superblock { group: u64::MAX, least: 0, most: u64::MAX, ..ext4 };
        for (of, device, target) in [
            // Its last group becomes longer by any block.
            (ext4, 150, None),
            (ext4, 153, Some(152)),
            (ext4, 200, Some(200)),
            // A new one is too short, and then is not.
            (ext4, 228, Some(200)),
            (ext4, 232, Some(232)),
            (Superblock { size: 200, ..ext4 }, 228, None),
            // The last one is as short already.
            (Superblock { size: 208, ..ext4 }, 212, Some(212)),
            (ext4, 10_000, Some(500)),
            (ext4, 100, None),
            (any, 154, Some(152)),
            (any, 10_000, Some(10_000)),
            (Superblock { block: 0, ..any }, 10_000, None),
        ] {
            assert_eq!(of.growth(device), target, "{of:?} on {device}");
        }
    }
}
