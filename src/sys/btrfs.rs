//! btrfs subvolumes: a whole tree of files that is copied in constant time, and that reports from the
//! generations in its nodes what was written since.

use std::ffi::OsStr;
use std::fs::File;
use std::io;
use std::mem::offset_of;
use std::os::fd::AsRawFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use linux_raw_sys::btrfs::{
    BTRFS_BLOCK_GROUP_DATA, BTRFS_BLOCK_GROUP_METADATA, BTRFS_EXTENT_DATA_KEY,
    BTRFS_FEATURE_INCOMPAT_NO_HOLES, BTRFS_FILE_EXTENT_INLINE, BTRFS_FILE_EXTENT_REG,
    BTRFS_FIRST_FREE_OBJECTID, BTRFS_SPACE_INFO_GLOBAL_RSV, btrfs_file_extent_item,
    btrfs_ioctl_feature_flags, btrfs_ioctl_get_subvol_info_args, btrfs_ioctl_search_header,
    btrfs_ioctl_search_key, btrfs_ioctl_space_info, btrfs_ioctl_vol_args, btrfs_ioctl_vol_args_v2,
};
use linux_raw_sys::ioctl::{
    BTRFS_IOC_FORGET_DEV, BTRFS_IOC_GET_FEATURES, BTRFS_IOC_GET_SUBVOL_INFO, BTRFS_IOC_SNAP_CREATE_V2,
    BTRFS_IOC_SNAP_DESTROY, BTRFS_IOC_SPACE_INFO, BTRFS_IOC_SUBVOL_CREATE, BTRFS_IOC_TREE_SEARCH_V2,
};

use super::attributes::Flag;
use base::{ByteRange, Written};
use files::{Context, Result, step};

/// Bytes of tree items asked for a call: some 3,000 extents.
const BATCH: usize = 256 << 10;

/// `struct btrfs_ioctl_vol_args`, and `_v2`, whose first field is also the descriptor: a name sits at
/// another place in each.
#[repr(C, align(8))]
struct VolumeArguments([u8; 4096]);

impl VolumeArguments {
    const NAME: usize = offset_of!(btrfs_ioctl_vol_args, name);
    const NAME_V2: usize = offset_of!(btrfs_ioctl_vol_args_v2, __bindgen_anon_2);

    /// `None` where the name does not fit.
    fn new(descriptor: i64, name: &OsStr, name_at: usize) -> Option<Box<Self>> {
        let mut arguments = Box::new(VolumeArguments([0; 4096]));
        arguments.0[..8].copy_from_slice(&descriptor.to_ne_bytes());
        let field = arguments.0.get_mut(name_at..name_at + name.len() + 1)?;
        field[..name.len()].copy_from_slice(name.as_bytes());
        Some(arguments)
    }
}

/// The directory of a path, open, and the name in it.
fn parent(path: &Path) -> Result<(File, &OsStr)> {
    let nameless = || io::Error::from(io::ErrorKind::InvalidInput);
    let (Some(dir), Some(name)) = (path.parent(), path.file_name()) else {
        return Err(nameless()).context("name the subvolume", path);
    };
    Ok((File::open(dir).context("open", dir)?, name))
}

/// Calls an ioctl that names an entry of `dir`.
fn name_call(dir: &File, request: u32, arguments: Option<Box<VolumeArguments>>) -> io::Result<()> {
    let Some(mut arguments) = arguments else { return Err(io::Error::from(io::ErrorKind::InvalidFilename)) };
    // SAFETY: each of the requests reads the 4096 bytes of its argument, whose name ends with a zero
    // byte inside them; the box lives through the call.
    match unsafe { libc::ioctl(dir.as_raw_fd(), request.into(), &mut *arguments) } {
        0.. => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Whether a directory is on btrfs.
pub fn is_btrfs(dir: &Path) -> Result<bool> {
    let found = nix::sys::statfs::statfs(dir).context("stat the filesystem of", dir)?;
    Ok(found.filesystem_type() == nix::sys::statfs::BTRFS_SUPER_MAGIC)
}

/// Lets the kernel forget the btrfs that it found on an unmounted device, so that it is not taken for a part of the next one there.
/// Fine if there is none, or if it is mounted.
pub fn forget(device: &Path) -> Result<()> {
    forget_through(Path::new("/dev/btrfs-control"), device)
}

fn forget_through(control: &Path, device: &Path) -> Result<()> {
    let file = match File::open(control).context("open", control) {
        // No btrfs in this kernel. Where its module may not be loaded, the node is there all the same.
        Err(error)
            if matches!(error.errno(), Some(libc::ENOENT | libc::ENODEV | libc::ENXIO | libc::EPERM)) =>
        {
            return Ok(());
        }
        file => file?,
    };
    let arguments = VolumeArguments::new(0, device.as_os_str(), VolumeArguments::NAME);
    let forgotten = step("forget the btrfs on", device, || name_call(&file, BTRFS_IOC_FORGET_DEV, arguments));
    match forgotten {
        Err(error)
            if matches!(error.errno(), Some(libc::ENOENT | libc::ENODEV | libc::ENXIO | libc::EBUSY)) =>
        {
            Ok(())
        }
        forgotten => forgotten,
    }
}

/// Whether the filesystem of `dir`, a btrfs, writes an item where a hole is punched. Without (`no-holes`,
/// what mkfs makes by default) a search does not show it.
pub fn records_holes(dir: &Path) -> Result<bool> {
    let file = File::open(dir).context("open", dir)?;
    let mut features = btrfs_ioctl_feature_flags { compat_flags: 0, compat_ro_flags: 0, incompat_flags: 0 };
    // SAFETY: GET_FEATURES writes its argument, which lives through the call.
    match unsafe { libc::ioctl(file.as_raw_fd(), BTRFS_IOC_GET_FEATURES.into(), &mut features) } {
        0.. => Ok(features.incompat_flags & u64::from(BTRFS_FEATURE_INCOMPAT_NO_HOLES) == 0),
        _ => Err(io::Error::last_os_error()).context("ask for the features of", dir),
    }
}

/// The metadata of a btrfs, in bytes.
#[derive(Clone, Copy, Debug)]
pub struct Metadata {
    /// In its chunks.
    pub total: u64,
    /// What it can still take: free in its chunks, without btrfs' own reserve, and in no chunk yet.
    pub room: u64,
}

/// Asks the btrfs that `dir` is on for the size of its metadata.
pub fn metadata(dir: &Path) -> Result<Metadata> {
    /// `struct btrfs_ioctl_space_args` with room for every kind of chunk, of which btrfs has at most nine.
    #[repr(C)]
    struct Spaces {
        slots: u64,
        count: u64,
        spaces: [btrfs_ioctl_space_info; 16],
    }
    let file = File::open(dir).context("open", dir)?;
    let none = btrfs_ioctl_space_info { flags: 0, total_bytes: 0, used_bytes: 0 };
    let mut asked = Spaces { slots: 16, count: 0, spaces: [none; 16] };
    // SAFETY: SPACE_INFO writes at most `slots` entries behind the header, and `Spaces` has room for as many; it lives
    // through the call.
    if unsafe { libc::ioctl(file.as_raw_fd(), BTRFS_IOC_SPACE_INFO.into(), &mut asked) } < 0 {
        return Err(io::Error::last_os_error()).context("ask for the chunks of", dir);
    }
    let (data, metadata) = (u64::from(BTRFS_BLOCK_GROUP_DATA), u64::from(BTRFS_BLOCK_GROUP_METADATA));
    let (mut total, mut free, mut free_data) = (0, 0u64, 0);
    for space in asked.spaces.iter().take(asked.count as usize) {
        let left = space.total_bytes.saturating_sub(space.used_bytes);
        match space.flags {
            flags if flags & BTRFS_SPACE_INFO_GLOBAL_RSV != 0 => free = free.saturating_sub(left),
            flags if flags & metadata != 0 => (total, free) = (total + space.total_bytes, free + left),
            flags if flags & data != 0 => free_data += left,
            _ => {}
        }
    }
    // What writers of data may take is free in chunks of data, or in none.
    let in_no_chunk = super::space(dir)?.available.saturating_sub(free_data);
    Ok(Metadata { total, room: free + in_no_chunk })
}

/// Makes an empty subvolume whose files are overwritten in place (chattr(1), `C`).
pub fn create_subvolume(path: &Path) -> Result<()> {
    let (dir, name) = parent(path)?;
    let arguments = VolumeArguments::new(0, name, VolumeArguments::NAME);
    step("make the subvolume", path, || name_call(&dir, BTRFS_IOC_SUBVOL_CREATE, arguments))?;
    let made = File::open(path).context("open", path)?;
    Flag::OverwriteInPlace.set(&made, path, true)
}

/// Removes a subvolume with all that is in it, in constant time; open files in it stay readable.
/// `Ok(false)` where `path` is not a subvolume.
pub fn destroy_subvolume(path: &Path) -> Result<bool> {
    // The inode number of every subvolume's root directory.
    let is_root =
        std::fs::symlink_metadata(path).context("stat", path)?.ino() == u64::from(BTRFS_FIRST_FREE_OBJECTID);
    if !is_root || !is_btrfs(path)? {
        return Ok(false);
    }
    let (dir, name) = parent(path)?;
    let arguments = VolumeArguments::new(0, name, VolumeArguments::NAME);
    step("remove the subvolume", path, || name_call(&dir, BTRFS_IOC_SNAP_DESTROY, arguments))?;
    Ok(true)
}

/// Makes `target` a copy of the subvolume `source` that shares all blocks. Dirty pages are written first; writers see one
/// moment, the commit that the call waits for, so the copy is durable when it returns.
pub fn snapshot(source: &File, source_path: &Path, target: &Path) -> Result<()> {
    let (dir, name) = parent(target)?;
    let arguments = VolumeArguments::new(i64::from(source.as_raw_fd()), name, VolumeArguments::NAME_V2);
    step("make a snapshot of", source_path, || name_call(&dir, BTRFS_IOC_SNAP_CREATE_V2, arguments))
}

/// The transaction that made the subvolume at `path` (`otransid`): all that is written into it afterwards, or into the one
/// that it was copied from, carries a later one. Unlike `generation` it never changes.
pub fn birth(path: &Path) -> Result<u64> {
    /// The argument as the kernel writes it: bytes, of which one number matters.
    #[repr(C, align(8))]
    struct Info([u8; size_of::<btrfs_ioctl_get_subvol_info_args>()]);
    let dir = File::open(path).context("open", path)?;
    let mut info = Box::new(Info([0; _]));
    // SAFETY: GET_SUBVOL_INFO writes its argument, which is as long as `Info` and lives through the call.
    match unsafe { libc::ioctl(dir.as_raw_fd(), BTRFS_IOC_GET_SUBVOL_INFO.into(), &mut *info) } {
        0.. => number(&info.0, offset_of!(btrfs_ioctl_get_subvol_info_args, otransid)),
        _ => Err(io::Error::last_os_error()),
    }
    .context("ask for the birth of", path)
}

/// `struct btrfs_ioctl_search_args_v2` with room for a batch of answers.
#[repr(C)]
struct Search {
    key: btrfs_ioctl_search_key,
    size: u64,
    answers: [u8; BATCH],
}

/// The ranges of a file that were written in transactions after a given one, ascending, fetched a batch
/// at a time. Subtrees that are older are skipped whole, so the cost follows the change.
///
/// Dirty pages are not seen: the file must not be written, as in a snapshot.
pub struct WrittenSince<'f> {
    file: &'f File,
    path: &'f Path,
    inode: u64,
    since: u64,
    search: Box<Search>,
    /// The part of the answers that is still to be handed out.
    next: usize,
    left: u32,
    /// Where the next call continues; `None` after the last.
    resume: Option<u64>,
}

impl<'f> WrittenSince<'f> {
    /// What was written into `file` after transaction `since`, which has been.
    pub fn of(file: &'f File, path: &'f Path, since: u64) -> Result<Self> {
        let inode = file.metadata().context("stat", path)?.ino();
        let key = btrfs_ioctl_search_key {
            // The tree of the subvolume that the descriptor is in.
            tree_id: 0,
            min_objectid: inode,
            max_objectid: inode,
            min_offset: 0,
            max_offset: u64::MAX,
            min_transid: since.saturating_add(1),
            max_transid: u64::MAX,
            min_type: BTRFS_EXTENT_DATA_KEY,
            max_type: BTRFS_EXTENT_DATA_KEY,
            nr_items: 0,
            unused: 0,
            unused1: 0,
            unused2: 0,
            unused3: 0,
            unused4: 0,
        };
        let search = Box::new(Search { key, size: BATCH as u64, answers: [0; BATCH] });
        Ok(WrittenSince { file, path, inode, since, search, next: 0, left: 0, resume: Some(0) })
    }

    fn refill(&mut self, from: u64) -> Result<()> {
        self.search.key.min_offset = from;
        self.search.key.nr_items = u32::MAX;
        self.search.size = BATCH as u64;
        // SAFETY: TREE_SEARCH_V2 writes at most `size` bytes behind the header, and `Search` has room
        // for as many; the box is mutably borrowed through the call.
        let rc =
            unsafe { libc::ioctl(self.file.as_raw_fd(), BTRFS_IOC_TREE_SEARCH_V2.into(), &mut *self.search) };
        if rc < 0 {
            return Err(io::Error::last_os_error()).context("search the tree of", self.path);
        }
        self.next = 0;
        self.left = self.search.key.nr_items;
        self.resume = None;
        Ok(())
    }

    /// The next answer's offset in the file and its item; `None` after the last.
    fn answer(&mut self) -> io::Result<Option<(u64, Item)>> {
        let Some(left) = self.left.checked_sub(1) else { return Ok(None) };
        self.left = left;
        let header = &self.search.answers[self.next.min(BATCH)..];
        let objectid = number(header, offset_of!(btrfs_ioctl_search_header, objectid))?;
        if objectid != self.inode {
            return Err(io::Error::other(format!(
                "the search for inode {} found one of {objectid}",
                self.inode
            )));
        }
        let offset = number(header, offset_of!(btrfs_ioctl_search_header, offset))?;
        let length = u32::from_ne_bytes(bytes(header, offset_of!(btrfs_ioctl_search_header, len))?) as usize;
        let item = header.get(size_of::<btrfs_ioctl_search_header>()..).and_then(|rest| rest.get(..length));
        let item = Item::decode(item.ok_or(io::ErrorKind::InvalidData)?)?;
        self.next += size_of::<btrfs_ioctl_search_header>() + length;
        self.resume = offset.checked_add(1);
        Ok(Some((offset, item)))
    }
}

/// What matters of `struct btrfs_file_extent_item`.
struct Item {
    generation: u64,
    length: u64,
    data: bool,
}

impl Item {
    /// Numbers are little-endian on disk.
    fn decode(item: &[u8]) -> io::Result<Self> {
        let number = |at| bytes(item, at).map(u64::from_le_bytes);
        let [kind] = bytes(item, offset_of!(btrfs_file_extent_item, type_))?;
        let generation = number(offset_of!(btrfs_file_extent_item, generation))?;
        if u32::from(kind) == BTRFS_FILE_EXTENT_INLINE as u32 {
            // The bytes themselves follow; their length in memory counts.
            let length = number(offset_of!(btrfs_file_extent_item, ram_bytes))?;
            return Ok(Item { generation, length, data: true });
        }
        let length = number(offset_of!(btrfs_file_extent_item, num_bytes))?;
        let is_hole = number(offset_of!(btrfs_file_extent_item, disk_bytenr))? == 0;
        // The third kind is preallocated.
        let data = u32::from(kind) == BTRFS_FILE_EXTENT_REG as u32 && !is_hole;
        Ok(Item { generation, length, data })
    }
}

/// The bytes of a field of a struct that the kernel wrote.
fn bytes<const N: usize>(of: &[u8], at: usize) -> io::Result<[u8; N]> {
    let field = of.get(at..).and_then(|rest| rest.first_chunk());
    field.copied().ok_or_else(|| io::ErrorKind::InvalidData.into())
}

fn number(of: &[u8], at: usize) -> io::Result<u64> {
    bytes(of, at).map(u64::from_ne_bytes)
}

impl Iterator for WrittenSince<'_> {
    type Item = Result<Written>;

    fn next(&mut self) -> Option<Result<Written>> {
        loop {
            loop {
                let (start, item) = match self.answer() {
                    Ok(Some(answer)) => answer,
                    Ok(None) => break,
                    Err(error) => {
                        (self.left, self.resume) = (0, None);
                        return Some(Err(error).context("read the tree of", self.path));
                    }
                };
                // A leaf that was written since also holds items that were not. A hole is listed whatever its
                // generation is: before Linux 6.0 a hole that was punched next to it made it longer and
                // left its generation as it was.
                if !item.data || item.generation > self.since {
                    let range = ByteRange { start, end: start.saturating_add(item.length) };
                    return Some(Ok(Written { range, data: item.data }));
                }
            }
            let from = self.resume.take()?;
            if let Err(error) = self.refill(from) {
                return Some(Err(error));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Where the module of btrfs may not be loaded its device node is there and does not open: nothing has to be forgotten then.
    #[test_with::root]
    #[test]
    fn a_kernel_without_btrfs_has_nothing_to_forget() {
        use nix::sys::stat::{Mode, SFlag, makedev, mknod};
        let dir = tempfile::tempdir().expect("temp dir");
        let control = dir.path().join("btrfs-control");
        // The last number of the misc devices, which no driver takes.
        mknod(&control, SFlag::S_IFCHR, Mode::S_IRUSR, makedev(10, (1 << 20) - 1)).expect("mknod");
        File::open(&control).expect_err("no driver has it");
        forget_through(&control, Path::new("/dev/loop0")).expect("there is nothing to forget");
    }

    /// A kernel that answers about another file would have its blocks taken for those of this one.
    #[test]
    fn an_answer_about_another_file_is_an_error() {
        let file = tempfile::tempfile().expect("temp file");
        let mut written = WrittenSince::of(&file, Path::new("file"), 1).expect("search");
        let length = size_of::<btrfs_file_extent_item>() as u32;
        for (inode, is_taken) in [(written.inode, true), (written.inode + 1, false)] {
            (written.next, written.left) = (0, 1);
            let answers = &mut written.search.answers;
            answers[offset_of!(btrfs_ioctl_search_header, objectid)..][..8]
                .copy_from_slice(&inode.to_ne_bytes());
            answers[offset_of!(btrfs_ioctl_search_header, len)..][..4].copy_from_slice(&length.to_ne_bytes());
            assert_eq!(written.answer().is_ok(), is_taken, "inode {inode}");
        }
    }
}
