//! What the rows share: writing volumes, the bare operations, and waiting.

use std::fs::File;
use std::io::{Seek, SeekFrom};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use base::ObjectDir;
use cbt::{MapFile, MapHeader, MapWriter, Relation, write_union};
use csi_client::{Client, delta_of};
use deltapath::sys::btrfs;
use deltapath::sys::loopdev::LoopDevice;
use deltapath::sys::{blockdev, clone, tree};
use fastrand::Rng;
use proto::{BlockMetadata, GetMetadataAllocatedRequest, ProbeRequest};
use testkit::{PoolKind, Rig};
use tonic::{Response, Status, Streaming};

/// What a stream is asked for, so that few messages carry many tuples.
pub const TUPLES_OF_A_MESSAGE: i32 = 16384;

/// Writes random blocks of 4 KiB at these offsets and flushes them.
pub fn write_blocks(device: &Path, random: &mut Rng, offsets: &[u64]) {
    let file = File::options().write(true).open(device).expect("open the device");
    let mut block = vec![0; 4096];
    random.fill(&mut block);
    for (number, offset) in offsets.iter().enumerate() {
        block[..8].copy_from_slice(&(random.u64(..) ^ number as u64).to_le_bytes());
        file.write_all_at(&block, *offset).expect("write");
    }
    file.sync_all().expect("flush");
}

/// A copy that [`bare_copy`] made, in `staging/`: a start of the driver would remove it.
/// It is removed when dropped, after what it is compared with is measured: the filesystem works behind a removal.
pub struct BareCopy {
    pub took: Duration,
    pool: PoolKind,
    scratch: ObjectDir,
}

impl Drop for BareCopy {
    fn drop(&mut self) {
        let removed = tree::remove(self.scratch.path());
        // A second panic would end the process, and with it the table.
        assert!(removed.is_ok() || std::thread::panicking(), "remove: {removed:?}");
    }
}

impl BareCopy {
    pub fn data(&self) -> PathBuf {
        match self.pool {
            PoolKind::Btrfs => self.scratch.data(),
            _ => self.scratch.path().join("copy"),
        }
    }

    /// Removes it, for good: what removing a snapshot cannot be cheaper than.
    pub fn remove(self) -> Duration {
        let started = Instant::now();
        let scratch = std::mem::ManuallyDrop::new(self).scratch.path().to_owned();
        tree::remove(&scratch).expect("remove");
        let parent = scratch.parent().expect("it is in a directory");
        File::open(parent).and_then(|parent| parent.sync_all()).expect("sync");
        started.elapsed()
    }
}

/// Takes what is clean out of the page cache, of all of the machine.
pub fn drop_caches() {
    nix::unistd::sync();
    std::fs::write("/proc/sys/vm/drop_caches", "3").expect("drop the caches");
}

/// Of a file or a device, in bytes.
pub fn length(mut file: &File) -> u64 {
    file.seek(SeekFrom::End(0)).expect("seek")
}

/// The bare operation that a snapshot cannot be cheaper than: flush the device, and clone the file or take
/// a snapshot of its subvolume.
pub fn bare_copy(rig: &Rig, pool: PoolKind, source: &ObjectDir, device: Option<&Path>) -> BareCopy {
    let scratch = tempfile::tempdir_in(rig.pool_dir().join("staging")).expect("mkdir");
    let scratch = ObjectDir::new(scratch.keep());
    let started = Instant::now();
    if let Some(device) = device {
        blockdev::flush(device).expect("flush");
    }
    if pool == PoolKind::Btrfs {
        let from = File::open(source.bytes()).expect("open");
        btrfs::snapshot(&from, &source.bytes(), &scratch.bytes()).expect("snapshot");
    } else {
        let from = File::open(source.data()).expect("open");
        let to = scratch.path().join("copy");
        clone::reflink(&from, &File::create(&to).expect("create"), &to).expect("clone");
    }
    BareCopy { took: started.elapsed(), pool, scratch }
}

/// Whether a snapshot is hashed, and compared with the one before where there is one.
pub fn is_hashed(rig: &Rig, id: &str) -> bool {
    let dir = rig.snapshot_dir(id);
    let is_compared = || {
        let changed = MapFile::open(&dir.changed()).expect("changed");
        changed.is_exact() || changed.header().relative_to.is_none()
    };
    MapFile::open(&dir.pending()).and_then(|map| map.count()).expect("pending") == 0 && is_compared()
}

pub async fn hashed(rig: &Rig, id: &str) {
    let deadline = Instant::now() + Duration::from_secs(600);
    while !is_hashed(rig, id) {
        assert!(Instant::now() < deadline, "{id} is never hashed");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

/// Maps as they were, to be put back.
pub struct Remembered(Vec<(PathBuf, Vec<u8>)>);

impl Drop for Remembered {
    fn drop(&mut self) {
        for (path, bytes) in self.0.drain(..) {
            let written = std::fs::write(path, bytes);
            assert!(written.is_ok() || std::thread::panicking(), "write: {written:?}");
        }
    }
}

/// Makes a snapshot one of which nothing is hashed or compared, behind the driver's back: what it reads when
/// asked. It is again as it was when the answer is dropped.
pub fn forget_hashes(rig: &Rig, id: &str) -> Remembered {
    let dir = rig.snapshot_dir(id);
    let remember = |path: PathBuf| (path.clone(), std::fs::read(path).expect("read"));
    let remembered = Remembered(vec![remember(dir.changed()), remember(dir.pending())]);
    let changed = MapFile::open(&dir.changed()).expect("changed");
    let relative_to = changed.header().relative_to.clone();
    let relative_to = relative_to.map(|relation| Relation { exact: false, ..relation });
    std::fs::remove_file(dir.changed()).expect("remove");
    let header = MapHeader { relative_to, ..changed.header().clone() };
    write_union(&dir.changed(), header, &[&changed], &Default::default()).expect("write");
    let allocated = MapFile::open(&dir.allocated()).expect("allocated");
    std::fs::remove_file(dir.pending()).expect("remove");
    write_union(&dir.pending(), allocated.header().clone(), &[&allocated], &Default::default())
        .expect("write");
    remembered
}

/// A stream that was read to its end.
pub struct Streamed {
    /// The time of the first message, and of the whole stream.
    pub first: Duration,
    pub whole: Duration,
    pub tuples: u64,
    /// The sum of the tuples' sizes.
    pub bytes: u64,
}

async fn read_stream<M>(
    call: impl Future<Output = Result<Response<Streaming<M>>, Status>>,
    tuples_of: impl Fn(&M) -> &[BlockMetadata],
) -> Streamed {
    let started = Instant::now();
    let mut stream = call.await.expect("the stream").into_inner();
    let mut message = stream.message().await.expect("a message");
    let mut read = Streamed { first: started.elapsed(), whole: Duration::ZERO, tuples: 0, bytes: 0 };
    while let Some(one) = &message {
        let tuples = tuples_of(one);
        read.tuples += tuples.len() as u64;
        read.bytes += tuples.iter().map(|tuple| tuple.size_bytes as u64).sum::<u64>();
        message = stream.message().await.expect("a message");
    }
    read.whole = started.elapsed();
    read
}

pub async fn delta(client: &mut Client, base: &str, target: &str) -> Streamed {
    let request = delta_of(base, target);
    read_stream(client.metadata.get_metadata_delta(request), |message| &message.block_metadata).await
}

/// In messages of [`TUPLES_OF_A_MESSAGE`].
pub async fn allocated(client: &mut Client, snapshot: &str) -> Streamed {
    let request = GetMetadataAllocatedRequest {
        snapshot_id: snapshot.to_owned(),
        max_results: TUPLES_OF_A_MESSAGE,
        ..Default::default()
    };
    read_stream(client.metadata.get_metadata_allocated(request), |message| &message.block_metadata).await
}

/// Replaces a map behind the driver's back.
pub fn replace_map(path: &PathBuf, fill: impl FnOnce(&mut MapWriter)) {
    let header = MapFile::open(path).expect("map").header().clone();
    std::fs::remove_file(path).expect("remove");
    let mut writer = MapWriter::create(path, header).expect("create");
    fill(&mut writer);
    writer.finish().expect("finish");
}

/// Waits until the driver does nothing any more behind the calls, and neither does the filesystem of its pool, which frees
/// behind what was removed.
pub async fn idle(rig: &Rig, pool: PoolKind) {
    /// Nothing happened for this long.
    const QUIET: Duration = Duration::from_secs(1);
    let deadline = Instant::now() + Duration::from_secs(600);
    // It also has btrfs begin to clean up, which waits for the next commit.
    File::open(rig.pool_dir()).and_then(|dir| Ok(nix::unistd::syncfs(dir)?)).expect("syncfs");
    if pool == PoolKind::Btrfs {
        let status = Command::new("btrfs")
            .args(["subvolume", "sync"])
            .arg(rig.pool_dir())
            .stdout(Stdio::null())
            .status();
        assert!(status.expect("btrfs").success(), "btrfs subvolume sync failed");
    }
    let image = rig.data_dir().join("pool.img");
    let (mut last, mut since) = (String::new(), Instant::now());
    while since.elapsed() < QUIET {
        assert!(Instant::now() < deadline, "the driver or its pool is never idle");
        let counters = LoopDevice::counters_on(|path| path == image).expect("loop devices");
        let of_pool = counters.iter().map(|path| std::fs::read_to_string(path).expect("counters"));
        // How long its threads ran, in nanoseconds (the kernel's Documentation/scheduler/sched-stats.rst).
        let ran = |thread: &Path| std::fs::read_to_string(thread.join("schedstat")).unwrap_or_default();
        let threads = std::fs::read_dir(format!("/proc/{}/task", rig.pid())).expect("threads");
        let of_driver: u64 = threads
            .filter_map(|thread| ran(&thread.ok()?.path()).split(' ').next()?.parse::<u64>().ok())
            .sum();
        // A look at a clock now and then is nothing: in steps of 10 ms.
        let now = of_pool.collect::<String>() + &(of_driver / 10_000_000).to_string();
        if now != last {
            (last, since) = (now, Instant::now());
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

/// Writes this number of random pieces of a length, each so far from the next, and flushes them.
pub fn write_pieces(device: &Path, count: u64, length: u64, apart: u64, random: &mut Rng) {
    let file = File::options().write(true).open(device).expect("open the device");
    let mut piece = vec![0; length as usize];
    for number in 0..count {
        random.fill(&mut piece);
        file.write_all_at(&piece, number * apart).expect("write");
    }
    file.sync_all().expect("flush");
}

/// What a call answers, and how long that takes.
pub async fn timed<T>(call: impl Future<Output = T>) -> (T, Duration) {
    let started = Instant::now();
    let answer = call.await;
    (answer, started.elapsed())
}

/// Ends the driver and starts it again: how long the start takes, up to the first answer of Probe.
pub async fn start_again(rig: &mut Rig) -> Duration {
    assert!(rig.terminate().success(), "the driver failed");
    let started = Instant::now();
    rig.start_again().await;
    rig.client.identity.probe(ProbeRequest {}).await.expect("Probe");
    started.elapsed()
}

/// Fills a device with random pieces of 1 MiB, and flushes it: how long that takes.
pub fn fill(device: &Path, size: u64, random: &mut Rng) -> Duration {
    let file = File::options().write(true).open(device).expect("open the device");
    let mut piece = vec![0; 1 << 20];
    random.fill(&mut piece);
    let started = Instant::now();
    for offset in (0..size).step_by(piece.len()) {
        piece[..8].copy_from_slice(&offset.to_le_bytes());
        file.write_all_at(&piece, offset).expect("write");
    }
    file.sync_all().expect("flush");
    started.elapsed()
}

/// The machine, for the reader of the table.
pub fn machine() -> String {
    let cpu = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let model = cpu.lines().find_map(|line| line.strip_prefix("model name")).unwrap_or("unknown");
    let kernel = std::fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
    let cores = std::thread::available_parallelism().map_or(0, usize::from);
    format!("{cores} cores ({}), Linux {}", model.trim_matches([' ', '\t', ':']), kernel.trim())
}
