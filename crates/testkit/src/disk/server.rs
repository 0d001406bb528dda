//! The filesystem with the disks: a root directory with one file per disk.

use std::ffi::OsStr;
use std::path::PathBuf;
use std::sync::{Arc, mpsc};
use std::thread::JoinHandle;
use std::time::{Duration, UNIX_EPOCH};

use fuser::{
    Config, Errno, FileAttr, FileHandle, FileType, Filesystem, FopenFlags, Generation, INodeNo, LockOwner,
    MountOption, OpenFlags, ReplyAttr, ReplyData, ReplyEmpty, ReplyEntry, ReplyOpen, ReplyStatfs, ReplyWrite,
    Request, Session, WriteFlags,
};
use parking_lot::Mutex;

use super::{PAGE, VolatileDisk, page_of};

const FOREVER: Duration = Duration::from_secs(3600);

/// Mounts the disks at the empty directory `dir` and serves them until they are unmounted.
pub(super) fn start(disks: Arc<Mutex<Vec<VolatileDisk>>>, dir: PathBuf) -> JoinHandle<()> {
    let (ready, started) = mpsc::channel();
    let serve = move || {
        keep_files_apart();
        let mut config = Config::default();
        config.mount_options = vec![MountOption::FSName("deltapath-test-disks".into())];
        match Session::new(Server(disks), dir, &config) {
            Ok(session) => {
                let _ = ready.send(Ok(()));
                let _ = session.run();
            }
            Err(error) => drop(ready.send(Err(error))),
        }
    };
    let server = std::thread::Builder::new().name("disks".into()).spawn(serve).expect("a thread");
    started.recv().expect("the server's word").expect("mount a FUSE filesystem");
    server
}

/// Gives this thread, and those it starts, a table of open files of its own, and an empty one.
///
/// If the process is killed, the kernel closes the server's connection as soon as the server is gone, and
/// those who wait for its disks get an error. In a shared table it would stay open until the last thread
/// ends, which may be one that waits for a disk. One step, so that no file of another test is held open.
#[allow(unsafe_code)]
fn keep_files_apart() {
    // SAFETY: the thread has just been started and owns no descriptor; those that it no longer sees stay
    // open in the table of all others.
    let rc = unsafe { libc::close_range(3, libc::c_uint::MAX, libc::CLOSE_RANGE_UNSHARE as libc::c_int) };
    assert_eq!(rc, 0, "close_range: {}", std::io::Error::last_os_error());
}

struct Server(Arc<Mutex<Vec<VolatileDisk>>>);

impl Server {
    fn with<T>(&self, inode: INodeNo, work: impl FnOnce(&mut VolatileDisk) -> T) -> Result<T, Errno> {
        let index = inode.0.checked_sub(2).ok_or(Errno::EISDIR)? as usize;
        let mut disks = self.0.lock();
        disks.get_mut(index).map(work).ok_or(Errno::ENOENT)
    }

    fn attributes(&self, inode: INodeNo) -> Result<FileAttr, Errno> {
        let (kind, size) = match inode {
            INodeNo::ROOT => (FileType::Directory, 0),
            _ => (FileType::RegularFile, self.with(inode, |disk| disk.size)?),
        };
        Ok(attributes(inode, kind, size))
    }
}

/// What a FUSE filesystem of a test says of a file.
pub fn attributes(ino: INodeNo, kind: FileType, size: u64) -> FileAttr {
    FileAttr {
        ino,
        size,
        blocks: size / 512,
        atime: UNIX_EPOCH,
        mtime: UNIX_EPOCH,
        ctime: UNIX_EPOCH,
        crtime: UNIX_EPOCH,
        kind,
        perm: 0o700,
        nlink: 1,
        uid: 0,
        gid: 0,
        rdev: 0,
        blksize: PAGE as u32,
        flags: 0,
    }
}

/// The numbers of the pages of a range, which lies on their borders.
fn pages(offset: u64, length: u64) -> Result<std::ops::Range<u64>, Errno> {
    let page = PAGE as u64;
    match offset.is_multiple_of(page) && length.is_multiple_of(page) {
        true => Ok(offset / page..(offset + length) / page),
        false => Err(Errno::EINVAL),
    }
}

impl Filesystem for Server {
    fn lookup(&self, _: &Request, _: INodeNo, name: &OsStr, reply: ReplyEntry) {
        let number = name.to_str().and_then(|name| name.strip_prefix("disk-")?.parse::<u64>().ok());
        let found = number.ok_or(Errno::ENOENT).and_then(|number| self.attributes(INodeNo(number + 2)));
        match found {
            Ok(attributes) => reply.entry(&FOREVER, &attributes, Generation(0)),
            Err(error) => reply.error(error),
        }
    }

    fn getattr(&self, _: &Request, inode: INodeNo, _: Option<FileHandle>, reply: ReplyAttr) {
        match self.attributes(inode) {
            Ok(attributes) => reply.attr(&FOREVER, &attributes),
            Err(error) => reply.error(error),
        }
    }

    fn open(&self, _: &Request, _: INodeNo, _: OpenFlags, reply: ReplyOpen) {
        // No page of a disk in the kernel's cache: whatever it wrote is written here.
        reply.opened(FileHandle(0), FopenFlags::FOPEN_DIRECT_IO);
    }

    fn read(
        &self,
        _: &Request,
        inode: INodeNo,
        _: FileHandle,
        offset: u64,
        size: u32,
        _: OpenFlags,
        _: Option<LockOwner>,
        reply: ReplyData,
    ) {
        let read = pages(offset, u64::from(size)).and_then(|numbers| {
            self.with(inode, |disk| {
                let mut bytes = vec![0; size as usize];
                for (number, target) in numbers.zip(bytes.chunks_exact_mut(PAGE)) {
                    if let Some(page) = disk.page(number) {
                        target.copy_from_slice(page);
                    }
                }
                let end = disk.size.saturating_sub(offset).min(bytes.len() as u64);
                bytes.truncate(end as usize);
                bytes
            })
        });
        match read {
            Ok(bytes) => reply.data(&bytes),
            Err(error) => reply.error(error),
        }
    }

    fn write(
        &self,
        _: &Request,
        inode: INodeNo,
        _: FileHandle,
        offset: u64,
        data: &[u8],
        _: WriteFlags,
        _: OpenFlags,
        _: Option<LockOwner>,
        reply: ReplyWrite,
    ) {
        let written = pages(offset, data.len() as u64).and_then(|numbers| {
            self.with(inode, |disk| {
                disk.writes += 1;
                for (number, bytes) in numbers.zip(data.chunks_exact(PAGE)) {
                    disk.write(number, page_of(bytes));
                }
            })
        });
        match written {
            Ok(()) => reply.written(data.len() as u32),
            Err(error) => reply.error(error),
        }
    }

    fn fsync(&self, _: &Request, inode: INodeNo, _: FileHandle, _: bool, reply: ReplyEmpty) {
        match self.with(inode, VolatileDisk::flush) {
            Ok(()) => reply.ok(),
            Err(error) => reply.error(error),
        }
    }

    fn fallocate(
        &self,
        _: &Request,
        inode: INodeNo,
        _: FileHandle,
        offset: u64,
        length: u64,
        mode: i32,
        reply: ReplyEmpty,
    ) {
        // A discard, or zeros to be written.
        let zeroes = mode & (libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_ZERO_RANGE) != 0;
        let done = pages(offset, length).and_then(|numbers| match zeroes {
            true => self.with(inode, |disk| {
                disk.writes += 1;
                for number in numbers {
                    if disk.page(number).is_some() {
                        disk.write(number, None);
                    }
                }
            }),
            false => Err(Errno::EOPNOTSUPP),
        });
        match done {
            Ok(()) => reply.ok(),
            Err(error) => reply.error(error),
        }
    }

    fn statfs(&self, _: &Request, _: INodeNo, reply: ReplyStatfs) {
        reply.statfs(0, 0, 0, 0, 0, PAGE as u32, 255, PAGE as u32);
    }
}
