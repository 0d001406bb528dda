//! A machine's disk that can lose power. Its cache is volatile and in this process: what was written since
//! the last flush may or may not be there after a cut, block by block and in any order, as on hardware.
//!
//! The disks are files of a small FUSE filesystem, so that loop devices can lie on them: a write of the
//! device comes as a write here, a flush as an fsync, a discard as a punched hole, and a write with FUA as a
//! write and a flush. SIGKILL sees no missing fsync, and neither does a copy of a file taken through the
//! kernel's page cache, whose writes are in order; this does.

mod mounted;
mod server;

use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use fastrand::Rng;
use parking_lot::Mutex;

pub use mounted::{Mounted, format, mount_disk};
pub use server::attributes;

/// The unit that is written whole or not at all: a sector of every loop device.
const PAGE: usize = deltapath::sys::loopdev::SECTOR as usize;
/// Pages that a copy of a disk shares or copies together.
const CHUNK: u64 = 256;

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

struct VolatileDisk {
    size: u64,
    stable: Pages,
    /// Written since the last flush: every version of a page with its number, the oldest first.
    cache: BTreeMap<u64, Vec<(u64, Page)>>,
    writes: u64,
    flushed: u64,
}

impl VolatileDisk {
    fn new(size: u64, stable: Pages) -> Self {
        VolatileDisk { size, stable, cache: BTreeMap::new(), writes: 0, flushed: 0 }
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
    fn cut(&self, random: &mut Rng) -> (VolatileDisk, String) {
        let mut stable = self.stable.clone();
        let survival = [Survival::Nothing, Survival::Prefix, Survival::Any][random.u64(0..3) as usize];
        let since = self.writes - self.flushed;
        let last = self.flushed + random.u64(0..since + 1);
        let share = random.u64(0..101);
        let mut survived = 0;
        for (number, versions) in &self.cache {
            let version = match survival {
                Survival::Nothing => None,
                Survival::Prefix => versions.iter().rev().find(|(write, _)| *write <= last),
                Survival::Any if random.u64(0..100) < share => {
                    versions.get(random.u64(0..versions.len() as u64) as usize)
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
        (VolatileDisk::new(self.size, stable), story)
    }
}

/// All disks of a test, below one directory. Dropped, it takes the directory's mount away.
pub struct Rack {
    dir: PathBuf,
    disks: Arc<Mutex<Vec<VolatileDisk>>>,
    server: Option<JoinHandle<()>>,
}

impl Rack {
    /// Serves disks in the empty directory `dir`, one of `size` bytes to begin with.
    pub fn start(dir: &Path, size: u64) -> Self {
        std::fs::create_dir(dir).expect("the rack's directory");
        let disks = Arc::new(Mutex::new(vec![VolatileDisk::new(size, Pages::default())]));
        let server = server::start(disks.clone(), dir.to_owned());
        Rack { dir: dir.to_owned(), disks, server: Some(server) }
    }

    /// The file of a disk, for a loop device to serve.
    pub fn path(&self, disk: usize) -> PathBuf {
        self.dir.join(format!("disk-{disk}"))
    }

    /// Takes the power away from a disk while it is in use, in a copy: the number of the disk that the next
    /// boot finds, and what it lost. The original keeps working.
    pub fn cut(&self, disk: usize, random: &mut Rng) -> (usize, String) {
        let mut disks = self.disks.lock();
        let (found, story) = disks[disk].cut(random);
        disks.push(found);
        (disks.len() - 1, story)
    }

    /// Waits until a disk has this number of sectors in its cache, or for as long as `patience` says.
    pub fn wait_for_writes(&self, disk: usize, sectors: usize, patience: Duration) {
        let deadline = Instant::now() + patience;
        while self.disks.lock()[disk].cache.len() < sectors && Instant::now() < deadline {
            std::thread::sleep(Duration::from_micros(50));
        }
    }

    /// Frees the memory of a disk that is not needed any more.
    pub fn scrap(&self, disk: usize) {
        let disk = &mut self.disks.lock()[disk];
        *disk = VolatileDisk::new(disk.size, Pages::default());
    }
}

impl Drop for Rack {
    fn drop(&mut self) {
        match deltapath::sys::mount::unmount(&self.dir) {
            // The server ends with its mount.
            Ok(()) => drop(self.server.take().map(JoinHandle::join)),
            // A disk is still in use, by another mount namespace or after a panic: it is unmounted with its last user.
            Err(_) => nix::mount::umount2(&self.dir, nix::mount::MntFlags::MNT_DETACH).expect("unmount"),
        }
    }
}
