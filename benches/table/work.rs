//! What programs do with a volume: writes and reads past the page cache, how many of them a second, and how long their fsync takes.

use std::fs::File;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use fastrand::Rng;
use files::AlignedBuffer;

use crate::host;

const BLOCK: usize = 4096;
pub const PIECE: usize = 1 << 20;
/// Requests of [`BLOCK`] in flight, over all volumes.
const IN_FLIGHT: usize = 16;
/// How long a sample takes.
const SAMPLE: Duration = Duration::from_millis(1500);

/// What is done over and over until the time is up, each device then flushed.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Work {
    /// Blocks are written at random places, with an fsync after this number of them.
    Random { between_syncs: Option<u64> },
    /// The same without an fsync, and seven of ten are read.
    Mixed,
    /// Pieces of [`PIECE`] are written one after another, by one thread a device.
    Sequential,
}

impl Work {
    fn threads(self, devices: usize) -> usize {
        match self {
            Work::Random { .. } | Work::Mixed => IN_FLIGHT,
            Work::Sequential => devices,
        }
    }
}

/// What it came to.
pub struct Load {
    /// Requests a second, the flush in the end included.
    pub rate: f64,
    /// 99 of 100 fsyncs were quicker.
    pub sync: Duration,
}

impl Load {
    /// Does it to devices or files in turns, for the length of a sample.
    pub fn of(paths: &[PathBuf], work: Work) -> Self {
        let started = Instant::now();
        let (mut requests, mut syncs) = (0, Vec::new());
        std::thread::scope(|scope| {
            let running: Vec<_> = (0..work.threads(paths.len()))
                .map(|number| {
                    scope.spawn(move || by_thread(&paths[number % paths.len()], work, number, started))
                })
                .collect();
            for thread in running {
                let (count, some) = thread.join().expect("a writer");
                requests += count;
                syncs.extend(some);
            }
        });
        syncs.sort_unstable();
        let sync = syncs.get(syncs.len() * 99 / 100).copied().unwrap_or_default();
        Load { rate: requests as f64 / started.elapsed().as_secs_f64(), sync }
    }
}

/// How many requests it made, and what each fsync took.
fn by_thread(path: &Path, work: Work, number: usize, started: Instant) -> (u64, Vec<Duration>) {
    let mut random = Rng::with_seed(number as u64);
    let file = open(path);
    let length = host::length(&file);
    let mut piece = AlignedBuffer::new(PIECE);
    random.fill(&mut piece);
    let block = |random: &mut Rng| random.u64(0..length / BLOCK as u64) * BLOCK as u64;
    let (mut count, mut syncs) = (0, Vec::new());
    while started.elapsed() < SAMPLE {
        piece[..8].copy_from_slice(&random.u64(..).to_le_bytes());
        match work {
            Work::Sequential => {
                let offset = count * PIECE as u64 % (length / PIECE as u64 * PIECE as u64);
                file.write_all_at(&piece, offset).expect("write");
            }
            Work::Mixed if random.u8(0..10) < 7 => {
                file.read_exact_at(&mut piece[..BLOCK], block(&mut random)).expect("read");
            }
            Work::Mixed | Work::Random { .. } => {
                file.write_all_at(&piece[..BLOCK], block(&mut random)).expect("write");
            }
        }
        count += 1;
        if let Work::Random { between_syncs: Some(between) } = work
            && count.is_multiple_of(between)
        {
            let began = Instant::now();
            file.sync_data().expect("fsync");
            syncs.push(began.elapsed());
        }
    }
    file.sync_data().expect("fsync");
    (count, syncs)
}

fn open(path: &Path) -> File {
    File::options().read(true).write(true).custom_flags(libc::O_DIRECT).open(path).expect("open")
}
