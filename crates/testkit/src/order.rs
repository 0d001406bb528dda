//! Writers whose order a copy must keep, and the check of a copy.
//!
//! Each writer writes a data block past the page cache, waits for the acknowledgement, and writes the block's number into
//! its log block. So a copy in whose log stands k holds all data blocks up to k, whatever moment it shows. The data
//! lands all over the writer's part of the device, the log always in one block: the first is new to the pool after
//! a snapshot, the second is not.

use std::fs::{File, OpenOptions};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use files::AlignedBuffer;

use super::BLOCK;

/// Blocks of data that a writer has.
const SLOTS: u64 = 2048;
/// Bytes of a device that a writer needs: its log block and its data.
pub const WRITER_BYTES: u64 = (1 + SLOTS) * BLOCK;

/// Where a writer's blocks are.
fn log_at(writer: u64) -> u64 {
    writer * WRITER_BYTES
}

fn data_at(writer: u64, number: u64) -> u64 {
    // An odd stride visits every slot before one again.
    let slot = number.wrapping_mul(1009) % SLOTS;
    writer * WRITER_BYTES + (1 + slot) * BLOCK
}

/// Writers at work, each with a part of its own of the same two places.
pub struct Writers {
    stop: Arc<AtomicBool>,
    /// How many numbers each has written.
    written: Vec<Arc<AtomicU64>>,
    threads: Vec<JoinHandle<Duration>>,
}

impl Writers {
    /// Starts `count` writers, which write their data to `data` and their log to `log`: devices, which may be one, or files.
    /// Returns once each has written something. They continue from number `first`, and rest for `pause` of each number.
    pub fn start(data: &Path, log: &Path, count: u64, first: u64, pause: fn(u64) -> Duration) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let written: Vec<Arc<AtomicU64>> = (0..count).map(|_| Arc::default()).collect();
        let open = |path: &Path| {
            let mut options = OpenOptions::new();
            options.write(true).custom_flags(libc::O_DIRECT).open(path).expect("open for direct I/O")
        };
        let spawn = |(writer, written): (u64, &Arc<AtomicU64>)| {
            let (data, log, stop, written) = (open(data), open(log), stop.clone(), written.clone());
            std::thread::spawn(move || write([&data, &log], writer, first, pause, &stop, &written))
        };
        let threads = (0..count).zip(&written).map(spawn).collect();
        let writers = Writers { stop, written, threads };
        let has_written = || writers.written.iter().all(|written| written.load(Ordering::Relaxed) > 0);
        crate::until("each writer writes", has_written);
        writers
    }

    /// What all have written so far.
    pub fn written(&self) -> u64 {
        self.written.iter().map(|written| written.load(Ordering::Relaxed)).sum()
    }

    /// Stops them; returns the longest that one of them waited for an acknowledgement.
    pub fn finish(self) -> Duration {
        self.stop.store(true, Ordering::Relaxed);
        self.threads.into_iter().map(|thread| thread.join().expect("a writer")).max().unwrap_or_default()
    }
}

fn write(
    [data, log]: [&File; 2],
    writer: u64,
    first: u64,
    pause: fn(u64) -> Duration,
    stop: &AtomicBool,
    written: &AtomicU64,
) -> Duration {
    let (mut block, mut longest) = (AlignedBuffer::new(BLOCK as usize), Duration::ZERO);
    for number in first.. {
        if stop.load(Ordering::Relaxed) {
            break;
        }
        block.copy_from_slice(&number.to_le_bytes().repeat(BLOCK as usize / 8));
        for (file, offset) in [(data, data_at(writer, number)), (log, log_at(writer))] {
            let started = Instant::now();
            file.write_all_at(&block, offset).expect("write");
            longest = longest.max(started.elapsed());
        }
        written.fetch_add(1, Ordering::Relaxed);
        let rest = pause(number);
        if !rest.is_zero() {
            std::thread::sleep(rest);
        }
    }
    longest
}

/// What is wrong with a copy: blocks that it lacks although a log names them. `data` and `log` are copies of the places
/// that `count` writers wrote to from number `first` on.
pub fn violations(data: &Path, log: &Path, count: u64, first: u64) -> Vec<String> {
    let open = |path: &Path| File::open(path).expect("open a copy");
    let (data, log) = (open(data), open(log));
    let mut found = Vec::new();
    let mut blocks = vec![0; WRITER_BYTES as usize];
    for writer in 0..count {
        let mut block = [0; BLOCK as usize];
        log.read_exact_at(&mut block, log_at(writer)).expect("read a copy");
        let (last, whole) = number_in(&block);
        if !whole {
            found.push(format!("the log of writer {writer} is torn"));
        }
        data.read_exact_at(&mut blocks, log_at(writer)).expect("read a copy");
        for number in last.saturating_sub(SLOTS - 1).max(first)..=last {
            let at = (data_at(writer, number) - log_at(writer)) as usize;
            let (there, whole) = number_in(&blocks[at..at + BLOCK as usize]);
            if there < number || !whole {
                let torn = if whole { "" } else { ", torn" };
                found.push(format!("writer {writer} logged {last}, its block {number} holds {there}{torn}"));
            }
        }
    }
    found
}

/// The number in a block, and whether it is the same all over.
fn number_in(block: &[u8]) -> (u64, bool) {
    let number: [u8; 8] = block[..8].try_into().expect("8 bytes");
    (u64::from_le_bytes(number), block[8..] == block[..block.len() - 8])
}

/// The bytes of an object, one of `volumes` or `snapshots`, as the pool holds them.
pub fn image(pool_dir: &Path, kind: &str, id: &str) -> PathBuf {
    pool_dir.join(kind).join(id).join("bytes/data.img")
}

/// The bytes of a member of a group snapshot.
pub fn group_image(pool_dir: &Path, group: &str, member: &str) -> PathBuf {
    pool_dir.join("groups").join(group).join("members").join(member).join("bytes/data.img")
}
