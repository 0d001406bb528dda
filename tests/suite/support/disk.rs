//! A machine's disk that can lose power. Its cache is volatile and in this process: what was written since
//! the last flush may or may not be there after a cut, block by block and in any order, as on hardware.
//!
//! The disks are files of a small FUSE filesystem, so that loop devices can lie on them: a write of the
//! device comes as a write here, a flush as an fsync, a discard as a punched hole, and a write with FUA as a
//! write and a flush. SIGKILL sees no missing fsync, and neither does a copy of a file taken through the
//! kernel's page cache, whose writes are in order; this does.

use std::collections::{BTreeMap, HashMap};
use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, mpsc};
use std::thread::JoinHandle;
use std::time::{Duration, Instant, UNIX_EPOCH};

use fuser::{
    Config, Errno, FileAttr, FileHandle, FileType, Filesystem, FopenFlags, Generation, INodeNo, KernelConfig,
    LockOwner, MountOption, OpenFlags, ReplyAttr, ReplyData, ReplyEmpty, ReplyEntry, ReplyOpen, ReplyStatfs,
    ReplyWrite, Request, Session, WriteFlags,
};

/// The unit that is written whole or not at all: a sector of every loop device.
const PAGE: usize = deltapath::sys::loopdev::SECTOR as usize;
/// Pages that a copy of a disk shares or copies together.
const CHUNK: u64 = 256;
const FOREVER: Duration = Duration::from_secs(3600);

/// Numbers for a test (xorshift); not for anything else.
pub struct Random(pub u64);

impl Random {
    pub fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    /// A number below `end`.
    pub fn below(&mut self, end: u64) -> u64 {
        // The low bits of the generator are the weak ones.
        (self.next() >> 16) % end
    }
}

/// A sector; `None` for zeros.
type Page = Option<Arc<[u8]>>;

fn page_of(bytes: &[u8]) -> Page {
    bytes.iter().any(|byte| *byte != 0).then(|| bytes.into())
}

/// What is on the platters.
#[derive(Clone, Default)]
struct Pages(HashMap<u64, Arc<Vec<Page>>>);

impl Pages {
    fn get(&self, number: u64) -> &Page {
        self.0.get(&(number / CHUNK)).map_or(&None, |chunk| &chunk[(number % CHUNK) as usize])
    }

    fn set(&mut self, number: u64, page: Page) {
        let chunk = self.0.entry(number / CHUNK).or_insert_with(|| Arc::new(vec![None; CHUNK as usize]));
        Arc::make_mut(chunk)[(number % CHUNK) as usize] = page;
    }
}

/// How much of the cache a power cut leaves.
#[derive(Clone, Copy, Debug)]
enum Survival {
    /// Nothing since the last flush.
    Nothing,
    /// The writes up to one of them, in order.
    Prefix,
    /// Each sector by itself, as of any write to it since the flush.
    Any,
}

struct Disk {
    size: u64,
    stable: Pages,
    /// Written since the last flush: every version of a page with its number, the oldest first.
    cache: BTreeMap<u64, Vec<(u64, Page)>>,
    writes: u64,
    flushed: u64,
}

impl Disk {
    fn new(size: u64, stable: Pages) -> Self {
        Disk { size, stable, cache: BTreeMap::new(), writes: 0, flushed: 0 }
    }

    fn page(&self, number: u64) -> &Page {
        let cached = self.cache.get(&number).and_then(|versions| versions.last());
        cached.map_or_else(|| self.stable.get(number), |(_, page)| page)
    }

    fn write(&mut self, number: u64, page: Page) {
        self.cache.entry(number).or_default().push((self.writes, page));
    }

    fn flush(&mut self) {
        for (number, mut versions) in std::mem::take(&mut self.cache) {
            let (_, page) = versions.pop().expect("a cached page has a version");
            self.stable.set(number, page);
        }
        self.flushed = self.writes;
    }

    /// The disk as the next boot finds it, and what it lost.
    fn cut(&self, random: &mut Random) -> (Disk, String) {
        let mut stable = self.stable.clone();
        let survival = [Survival::Nothing, Survival::Prefix, Survival::Any][random.below(3) as usize];
        let since = self.writes - self.flushed;
        let last = self.flushed + random.below(since + 1);
        let share = random.below(101);
        let mut survived = 0;
        for (number, versions) in &self.cache {
            let version = match survival {
                Survival::Nothing => None,
                Survival::Prefix => versions.iter().rev().find(|(write, _)| *write <= last),
                Survival::Any if random.below(100) < share => {
                    versions.get(random.below(versions.len() as u64) as usize)
                }
                Survival::Any => None,
            };
            if let Some((_, page)) = version {
                stable.set(*number, page.clone());
                survived += 1;
            }
        }
        let cached = self.cache.len();
        let story = format!("{survival:?}: {survived} of {cached} sectors in the cache survived");
        (Disk::new(self.size, stable), story)
    }
}

/// All disks of a test, below one directory. Dropped, it takes the directory's mount away.
pub struct Rack {
    dir: PathBuf,
    disks: Arc<Mutex<Vec<Disk>>>,
    server: Option<JoinHandle<()>>,
}

impl Rack {
    /// Serves disks in the empty directory `dir`, one of `size` bytes to begin with.
    pub fn start(dir: &Path, size: u64) -> Self {
        std::fs::create_dir(dir).expect("the rack's directory");
        let disks = Arc::new(Mutex::new(vec![Disk::new(size, Pages::default())]));
        let (ready, started) = mpsc::channel();
        let server = std::thread::Builder::new().name("disks".into()).spawn({
            let (disks, dir) = (disks.clone(), dir.to_owned());
            move || {
                keep_files_apart();
                let mut config = Config::default();
                config.mount_options = vec![MountOption::FSName("deltapath-test-disks".into())];
                let session = Session::new(Server(disks), dir, &config);
                match session {
                    Ok(session) => {
                        let _ = ready.send(Ok(()));
                        let _ = session.run();
                    }
                    Err(error) => drop(ready.send(Err(error))),
                }
            }
        });
        let server = server.expect("a thread");
        started.recv().expect("the server's word").expect("mount a FUSE filesystem");
        Rack { dir: dir.to_owned(), disks, server: Some(server) }
    }

    /// The file of a disk, for a loop device to serve.
    pub fn path(&self, disk: usize) -> PathBuf {
        self.dir.join(format!("disk-{disk}"))
    }

    fn disks(&self) -> MutexGuard<'_, Vec<Disk>> {
        self.disks.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes the power away from a disk while it is in use, in a copy: the number of the disk that the next
    /// boot finds, and what it lost. The original goes on.
    pub fn cut(&self, disk: usize, random: &mut Random) -> (usize, String) {
        let mut disks = self.disks();
        let (found, story) = disks[disk].cut(random);
        disks.push(found);
        (disks.len() - 1, story)
    }

    /// Waits until a disk has so many sectors in its cache, or for as long as `patience` says.
    pub fn wait_for_writes(&self, disk: usize, sectors: usize, patience: Duration) {
        let deadline = Instant::now() + patience;
        while self.disks()[disk].cache.len() < sectors && Instant::now() < deadline {
            std::thread::sleep(Duration::from_micros(50));
        }
    }

    /// Frees the memory of a disk that is not needed any more.
    pub fn scrap(&self, disk: usize) {
        let disk = &mut self.disks()[disk];
        *disk = Disk::new(disk.size, Pages::default());
    }
}

impl Drop for Rack {
    fn drop(&mut self) {
        // The server ends with its mount; where that fails it is told here, not waited for.
        match deltapath::sys::mount::unmount(&self.dir) {
            Ok(()) => drop(self.server.take().map(JoinHandle::join)),
            Err(error) if std::thread::panicking() => eprintln!("{error}"),
            Err(error) => panic!("{error}"),
        }
    }
}

/// Gives this thread, and those it starts, a table of open files of its own, and an empty one.
///
/// If the process is killed, the kernel closes the server's connection as soon as the server is gone, and
/// whoever waits for its disks gets an error. In a shared table it would stay open until the last thread
/// ends, which may be one that waits for a disk. One step, so that no file of another test is held open.
#[allow(unsafe_code)]
fn keep_files_apart() {
    // SAFETY: the thread has just been started and owns no descriptor; those that it no longer sees stay
    // open in the table of all others.
    let rc = unsafe { libc::close_range(3, libc::c_uint::MAX, libc::CLOSE_RANGE_UNSHARE as libc::c_int) };
    assert_eq!(rc, 0, "close_range: {}", std::io::Error::last_os_error());
}

/// The filesystem: a root directory with a file a disk.
struct Server(Arc<Mutex<Vec<Disk>>>);

impl Server {
    fn with<T>(&self, inode: INodeNo, work: impl FnOnce(&mut Disk) -> T) -> Result<T, Errno> {
        let index = inode.0.checked_sub(2).ok_or(Errno::EISDIR)? as usize;
        let mut disks = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        disks.get_mut(index).map(work).ok_or(Errno::ENOENT)
    }

    fn attributes(&self, inode: INodeNo) -> Result<FileAttr, Errno> {
        let (kind, size) = match inode {
            INodeNo::ROOT => (FileType::Directory, 0),
            _ => (FileType::RegularFile, self.with(inode, |disk| disk.size)?),
        };
        Ok(FileAttr {
            ino: inode,
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
        })
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
    fn init(&mut self, _: &Request, _: &mut KernelConfig) -> std::io::Result<()> {
        Ok(())
    }

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
        match self.with(inode, Disk::flush) {
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
