//! btrfs subvolumes: a whole tree of files that is copied in constant time, and that tells from the
//! generations in its nodes what was written since.

use std::ffi::OsStr;
use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use super::attributes::Flag;
use base::{ByteRange, Written};
use files::{Context, Result, step};

/// `_IOW(0x94, 14, struct btrfs_ioctl_vol_args)` of `linux/btrfs.h`.
const SUBVOL_CREATE: libc::c_ulong = 0x5000_940E;
/// `_IOW(0x94, 15, struct btrfs_ioctl_vol_args)`.
const SNAP_DESTROY: libc::c_ulong = 0x5000_940F;
/// `_IOWR(0x94, 17, struct btrfs_ioctl_search_args_v2)`.
const TREE_SEARCH_V2: libc::c_ulong = 0xC070_9411;
/// `_IOW(0x94, 23, struct btrfs_ioctl_vol_args_v2)`.
const SNAP_CREATE_V2: libc::c_ulong = 0x5000_9417;
/// `_IOR(0x94, 57, struct btrfs_ioctl_feature_flags)`.
const GET_FEATURES: libc::c_ulong = 0x8018_9439;
/// `_IOR(0x94, 60, struct btrfs_ioctl_get_subvol_info_args)`.
const GET_SUBVOL_INFO: libc::c_ulong = 0x81F8_943C;

/// `BTRFS_FIRST_FREE_OBJECTID`: the inode number of every subvolume's root directory.
const ROOT_INODE: u64 = 256;
/// `BTRFS_FEATURE_INCOMPAT_NO_HOLES`.
const NO_HOLES: u64 = 1 << 9;
/// `BTRFS_EXTENT_DATA_KEY`.
const EXTENT_DATA: u32 = 108;
/// `BTRFS_FILE_EXTENT_INLINE` and `BTRFS_FILE_EXTENT_REG`; the third type is preallocated.
const INLINE: u8 = 0;
const REGULAR: u8 = 1;

/// Bytes of tree items asked for a call: some 3,000 extents.
const BATCH: usize = 256 << 10;

/// `struct btrfs_ioctl_vol_args`, and `_v2`, whose first field is also the descriptor: a name sits at
/// another place in each.
#[repr(C, align(8))]
struct VolumeArguments([u8; 4096]);

impl VolumeArguments {
    const NAME: usize = 8;
    const NAME_V2: usize = 56;

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
fn name_call(dir: &File, request: libc::c_ulong, arguments: Option<Box<VolumeArguments>>) -> io::Result<()> {
    let Some(mut arguments) = arguments else { return Err(io::Error::from(io::ErrorKind::InvalidFilename)) };
    // SAFETY: each of the requests reads the 4096 bytes of its argument, whose name ends with a zero
    // byte inside them; the box lives through the call.
    match unsafe { libc::ioctl(dir.as_raw_fd(), request, &mut *arguments) } {
        0.. => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Whether a directory lies on btrfs.
pub fn is_btrfs(dir: &Path) -> Result<bool> {
    let found = nix::sys::statfs::statfs(dir).context("stat the filesystem of", dir)?;
    Ok(found.filesystem_type() == nix::sys::statfs::BTRFS_SUPER_MAGIC)
}

/// Whether the filesystem of `dir`, a btrfs, writes an item where a hole is punched. Without (`no-holes`,
/// what mkfs makes by default) a search does not show it.
pub fn records_holes(dir: &Path) -> Result<bool> {
    let file = File::open(dir).context("open", dir)?;
    // compat, compat_ro, incompat.
    let mut features = [0u64; 3];
    // SAFETY: GET_FEATURES writes the three numbers of its argument, which lives through the call.
    match unsafe { libc::ioctl(file.as_raw_fd(), GET_FEATURES, &mut features) } {
        0.. => Ok(features[2] & NO_HOLES == 0),
        _ => Err(io::Error::last_os_error()).context("ask for the features of", dir),
    }
}

/// Makes an empty subvolume whose files are overwritten in place (chattr(1), `C`).
pub fn create_subvolume(path: &Path) -> Result<()> {
    let (dir, name) = parent(path)?;
    let arguments = VolumeArguments::new(0, name, VolumeArguments::NAME);
    step("make the subvolume", path, || name_call(&dir, SUBVOL_CREATE, arguments))?;
    let made = File::open(path).context("open", path)?;
    Flag::OverwriteInPlace.set(&made, path, true)
}

/// Removes a subvolume with all that is in it, in constant time; open files in it stay readable.
/// `Ok(false)` where `path` is none.
pub fn destroy_subvolume(path: &Path) -> Result<bool> {
    if std::fs::symlink_metadata(path).context("stat", path)?.ino() != ROOT_INODE || !is_btrfs(path)? {
        return Ok(false);
    }
    let (dir, name) = parent(path)?;
    let arguments = VolumeArguments::new(0, name, VolumeArguments::NAME);
    step("remove the subvolume", path, || name_call(&dir, SNAP_DESTROY, arguments))?;
    Ok(true)
}

/// An open subvolume.
#[derive(Debug)]
pub struct Subvolume {
    dir: File,
    path: PathBuf,
}

impl Subvolume {
    /// Opens the subvolume at `path`.
    pub fn open(path: &Path) -> Result<Self> {
        Ok(Subvolume { dir: File::open(path).context("open", path)?, path: path.to_owned() })
    }

    /// Makes `target` a copy that shares all blocks. Dirty pages are written first; writers see one
    /// moment, the commit that the call waits for, so the copy is durable when it returns.
    pub fn snapshot(&self, target: &Path) -> Result<()> {
        let (dir, name) = parent(target)?;
        let source = i64::from(self.dir.as_raw_fd());
        let arguments = VolumeArguments::new(source, name, VolumeArguments::NAME_V2);
        step("make a snapshot of", &self.path, || name_call(&dir, SNAP_CREATE_V2, arguments))
    }

    /// The transaction that made this subvolume (`otransid`): all that is written into it afterwards,
    /// or into the one that it was copied from, carries a later one. Unlike `generation` it never
    /// changes.
    pub fn birth(&self) -> Result<u64> {
        /// `struct btrfs_ioctl_get_subvol_info_args`, of which one field matters.
        #[repr(C)]
        struct Info {
            before: [u64; 44],
            otransid: u64,
            after: [u64; 18],
        }
        let mut info = Info { before: [0; 44], otransid: 0, after: [0; 18] };
        // SAFETY: GET_SUBVOL_INFO writes at most the 504 bytes of `Info`, which lives through the call.
        match unsafe { libc::ioctl(self.dir.as_raw_fd(), GET_SUBVOL_INFO, &mut info) } {
            0.. => Ok(info.otransid),
            _ => Err(io::Error::last_os_error()).context("ask for the birth of", &self.path),
        }
    }
}

/// `struct btrfs_ioctl_search_args_v2` with room for a batch of answers.
#[repr(C)]
struct Search {
    tree: u64,
    min_objectid: u64,
    max_objectid: u64,
    min_offset: u64,
    max_offset: u64,
    min_transid: u64,
    max_transid: u64,
    min_type: u32,
    max_type: u32,
    items: u32,
    unused: [u32; 9],
    size: u64,
    answers: [u8; BATCH],
}

/// The ranges of a file that were written in transactions after a given one, ascending, fetched a batch
/// at a time. Subtrees that are older are skipped whole, so the cost follows the change.
///
/// Dirty pages are not seen: the file is to be one that nobody writes, in a snapshot.
pub struct WrittenSince<'f> {
    file: &'f File,
    path: &'f Path,
    inode: u64,
    since: u64,
    search: Box<Search>,
    /// The part of the answers that is still to be handed out.
    next: usize,
    left: u32,
    /// Where the next call goes on; `None` after the last.
    resume: Option<u64>,
}

impl<'f> WrittenSince<'f> {
    /// What was written into `file` after transaction `since`, which has been.
    pub fn of(file: &'f File, path: &'f Path, since: u64) -> Result<Self> {
        let inode = file.metadata().context("stat", path)?.ino();
        let search = Box::new(Search {
            // The tree of the subvolume that the descriptor is in.
            tree: 0,
            min_objectid: inode,
            max_objectid: inode,
            min_offset: 0,
            max_offset: u64::MAX,
            min_transid: since.saturating_add(1),
            max_transid: u64::MAX,
            min_type: EXTENT_DATA,
            max_type: EXTENT_DATA,
            items: 0,
            unused: [0; 9],
            size: BATCH as u64,
            answers: [0; BATCH],
        });
        Ok(WrittenSince { file, path, inode, since, search, next: 0, left: 0, resume: Some(0) })
    }

    fn refill(&mut self, from: u64) -> Result<()> {
        self.search.min_offset = from;
        self.search.items = u32::MAX;
        self.search.size = BATCH as u64;
        // SAFETY: TREE_SEARCH_V2 writes at most `size` bytes behind the header, and `Search` has room
        // for as many; the box is mutably borrowed through the call.
        let rc = unsafe { libc::ioctl(self.file.as_raw_fd(), TREE_SEARCH_V2, &mut *self.search) };
        if rc < 0 {
            return Err(io::Error::last_os_error()).context("search the tree of", self.path);
        }
        self.next = 0;
        self.left = self.search.items;
        self.resume = None;
        Ok(())
    }

    /// The next answer's key and item.
    fn answer(&mut self) -> Option<(u64, Item)> {
        const HEADER: usize = 32;
        let number = |bytes: &[u8]| u64::from_ne_bytes(bytes.try_into().expect("8 bytes"));
        self.left = self.left.checked_sub(1)?;
        let header = &self.search.answers[self.next..self.next + HEADER];
        let (objectid, offset) = (number(&header[8..16]), number(&header[16..24]));
        let length = u32::from_ne_bytes(header[28..32].try_into().expect("4 bytes")) as usize;
        self.next += HEADER;
        let item = Item::decode(&self.search.answers[self.next..self.next + length]);
        self.next += length;
        self.resume = offset.checked_add(1);
        debug_assert_eq!(objectid, self.inode, "the search was for one file");
        Some((offset, item))
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
    fn decode(bytes: &[u8]) -> Self {
        let number = |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().expect("8 bytes"));
        let kind = bytes[20];
        match kind {
            // The bytes themselves follow; their length in memory counts.
            INLINE => Item { generation: number(0), length: number(8), data: true },
            _ => Item { generation: number(0), length: number(45), data: kind == REGULAR && number(21) != 0 },
        }
    }
}

impl Iterator for WrittenSince<'_> {
    type Item = Result<Written>;

    fn next(&mut self) -> Option<Result<Written>> {
        loop {
            while let Some((start, item)) = self.answer() {
                // A leaf that was written since also holds items that were not. A hole is told whatever it
                // carries: before Linux 6.0 one that was punched beside it made it longer and left its
                // generation as it was.
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
