//! Rows l to o: volumes under load, beside bare loop devices on bare files of the same filesystem; and hashing behind, alone
//! and beside the writers.

use std::fs::File;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use base::{ByteRange, ObjectDir};
use deltapath::sys::{btrfs, tree};
use fastrand::Rng;
use files::DataRanges;
use testkit::bench::{Aligned, median, ms, write_direct};
use testkit::{PoolKind, Rig};

use crate::{Row, SHARING, Table, host, spread};

const PIECE: usize = 1 << 20;
const BLOCK: usize = 4096;
/// The data of the volume that is hashed: long enough to be written beside.
const HASHED: u64 = 4 << 30;
/// The size of each volume that is written, all of it data.
const WRITTEN: u64 = 1 << 30;
/// Writes in flight, over all volumes.
const IN_FLIGHT: usize = 16;
/// How long a sample takes.
const SAMPLE: Duration = Duration::from_millis(1500);
/// Writes of a thread between two fsyncs, in row m.
const BETWEEN_SYNCS: u64 = 16;
const ROUNDS: usize = 5;

pub async fn run(table: &mut Table) {
    for pool in SHARING.into_iter().chain([PoolKind::Dir]) {
        if !table.wants_pool(pool) {
            continue;
        }
        if (table.wants("l") || table.wants("m")) && pool != PoolKind::Dir {
            hashing(table, pool).await;
        }
        if table.wants("n") || table.wants("o") {
            for volumes in [1, 16] {
                writes(table, pool, volumes).await;
            }
        }
    }
}

/// Rows l and m.
async fn hashing(table: &mut Table, pool: PoolKind) {
    let mut rig = Rig::start_with(pool, &["--pool-size", "32Gi", "--retain-deleted", "0"], "warn").await;
    let (hashed, device) = rig.block_volume("hashed", HASHED as i64).await;
    write_direct(&device, HASHED);
    let (other, written) = rig.block_volume("written", WRITTEN as i64).await;
    write_direct(&written, WRITTEN);
    let written = vec![written];
    let (mut alone, mut bare, mut quiet, mut beside) = (vec![], vec![], vec![], vec![]);
    for round in 0..ROUNDS {
        host::drop_caches();
        let snapshot = rig.snapshot(&format!("alone {round}"), &hashed).await;
        let started = Instant::now();
        host::hashed(&rig, &snapshot).await;
        alone.push(HASHED as f64 / started.elapsed().as_secs_f64());
        host::drop_caches();
        bare.push(read_through(&host::snapshot_dir(&rig, &snapshot).data()));
        rig.client.delete_snapshot(&snapshot).await.expect("delete");

        // Both samples begin without what the filesystem has read of itself.
        host::drop_caches();
        quiet.push(Load::of(&written, Some(BETWEEN_SYNCS), after(SAMPLE)));
        host::drop_caches();
        let snapshot = rig.snapshot(&format!("beside {round}"), &hashed).await;
        let load = tokio::task::spawn_blocking({
            let written = written.clone();
            move || Load::of(&written, Some(BETWEEN_SYNCS), after(SAMPLE))
        });
        beside.push(load.await.expect("the writers"));
        assert!(!host::is_hashed(&rig, &snapshot), "hashing was over before the writers were");
        host::hashed(&rig, &snapshot).await;
        rig.client.delete_snapshot(&snapshot).await.expect("delete");
    }
    let rates = |loads: &[Load]| loads.iter().map(|load| load.rate).collect::<Vec<_>>();
    let syncs = |loads: &[Load]| loads.iter().map(|load| load.sync).collect::<Vec<_>>();
    let rate = |loads: &[Load]| median(&rates(loads));
    let sync = |loads: &[Load]| median(&syncs(loads));
    let per_second = |rate: f64| format!("{rate:.0}/s");
    let share = median(&alone) / median(&bare);
    table.add(Row {
        id: "l",
        what: format!("hashing a first snapshot of 4 GiB behind, cold, {}", pool.name()),
        measured: spread(&alone, |rate| format!("{:.2} GB/s", rate / 1e9)),
        beside: format!(
            "{:.0} % of a bare sequential read of it, {}",
            100.0 * share,
            spread(&bare, |rate| format!("{:.2} GB/s", rate / 1e9))
        ),
        must: "80 %",
        holds: share >= 0.8,
    });
    let (share, slower) =
        (rate(&beside) / rate(&quiet), sync(&beside).as_secs_f64() / sync(&quiet).as_secs_f64());
    table.add(Row {
        id: "m",
        what: format!("random 4 KiB writes to another volume meanwhile, {}", pool.name()),
        measured: format!(
            "{}, p99 of fsync {}",
            spread(&rates(&beside), per_second),
            spread(&syncs(&beside), ms)
        ),
        beside: format!(
            "{:.0} % of the rate without, {}; p99 {slower:.2} x, {}",
            100.0 * share,
            spread(&rates(&quiet), per_second),
            spread(&syncs(&quiet), ms)
        ),
        must: "85 %; 2 x",
        holds: share >= 0.85 && slower <= 2.0,
    });
    for id in [hashed, other] {
        rig.detach(&id).await;
    }
    rig.finish();
}

/// Rows n and o.
async fn writes(table: &mut Table, pool: PoolKind, count: usize) {
    let size = WRITTEN / count as u64;
    let mut rig = Rig::start_with(pool, &["--pool-size", "32Gi", "--retain-deleted", "0"], "warn").await;
    let (mut ids, mut ours) = (Vec::new(), Vec::new());
    for number in 0..count {
        let (id, device) = rig.block_volume(&format!("volume {number}"), size as i64).await;
        ids.push(id);
        ours.push(device);
    }
    let bare: Vec<Bare> = (0..count).map(|number| Bare::make(&rig, pool, number, size)).collect();
    let loops: Vec<PathBuf> = bare.iter().map(|bare| bare.device.clone()).collect();
    let host_dir = tempfile::tempdir().expect("temp dir");
    let files: Vec<PathBuf> = (0..count).map(|number| host_dir.path().join(number.to_string())).collect();
    for file in &files {
        File::create(file).and_then(|file| file.set_len(size)).expect("create");
    }
    for path in ours.iter().chain(&loops).chain(&files) {
        write_direct(path, size);
    }
    let load = |paths: &[PathBuf]| Load::of(paths, None, after(SAMPLE)).rate;
    let (mut of_ours, mut of_loops, mut of_files) = (vec![], vec![], vec![]);
    // The disk may be slower for whoever comes later, so they take turns to be the first.
    for turn in 0..ROUNDS * 3 {
        match (turn + turn / 3) % 3 {
            0 => of_ours.push(load(&ours)),
            1 => of_loops.push(load(&loops)),
            _ => of_files.push(load(&files)),
        }
    }
    let name = pool.name();
    let of_volumes = if count == 1 { "1 volume".to_owned() } else { format!("{count} volumes") };
    let (rate, of_loop, of_file) = (median(&of_ours), median(&of_loops), median(&of_files));
    let per_second = |rate: f64| format!("{rate:.0}/s");
    table.add(Row {
        id: "n",
        what: format!("random 4 KiB writes to {of_volumes} without a snapshot, {name}"),
        measured: spread(&of_ours, per_second),
        beside: format!(
            "{:.0} % of bare loop devices on the same filesystem, {}; {:.0} % of bare files on the host's, {}",
            100.0 * rate / of_loop,
            spread(&of_loops, per_second),
            100.0 * rate / of_file,
            spread(&of_files, per_second)
        ),
        must: "85 %; 60 %",
        holds: rate / of_loop >= 0.85 && rate / of_file >= 0.6,
    });
    if pool != PoolKind::Dir {
        let (mut of_ours, mut of_loops) = (vec![], vec![]);
        let mut copies = Vec::new();
        for turn in 0..ROUNDS * 2 {
            if (turn + turn / 2) % 2 == 0 {
                for id in &ids {
                    rig.snapshot(&format!("{id} {turn}"), id).await;
                }
                of_ours.push(load(&ours));
            } else {
                for bare in &bare {
                    copies.push(host::bare_copy(&rig, pool, &bare.dir, Some(&bare.device)));
                }
                of_loops.push(load(&loops));
            }
        }
        let (rate, of_loop) = (median(&of_ours), median(&of_loops));
        table.add(Row {
            id: "o",
            what: format!("random 4 KiB writes to {of_volumes} right after a snapshot of each, {name}"),
            measured: spread(&of_ours, per_second),
            beside: format!(
                "{:.0} % of bare loop devices after the filesystem's own, {}",
                100.0 * rate / of_loop,
                spread(&of_loops, per_second)
            ),
            must: "90 %",
            holds: rate / of_loop >= 0.9,
        });
        drop(copies);
    }
    drop(bare);
    for id in &ids {
        rig.detach(id).await;
    }
    rig.finish();
}

/// A file beside the volumes, as the filesystem makes it, with a loop device that passes the page cache by.
struct Bare {
    dir: ObjectDir,
    device: PathBuf,
}

impl Bare {
    fn make(rig: &Rig, pool: PoolKind, number: usize, size: u64) -> Self {
        let dir = ObjectDir::new(rig.pool_dir().join(format!("staging/bare-{number}")));
        std::fs::create_dir(dir.path()).expect("mkdir");
        if pool == PoolKind::Btrfs {
            btrfs::create_subvolume(&dir.bytes()).expect("subvolume");
        } else {
            std::fs::create_dir(dir.bytes()).expect("mkdir");
        }
        File::create(dir.data()).and_then(|file| file.set_len(size)).expect("create");
        let output = Command::new("losetup")
            .args(["--find", "--show", "--direct-io=on"])
            .arg(dir.data())
            .output()
            .expect("losetup");
        assert!(output.status.success(), "losetup: {}", String::from_utf8_lossy(&output.stderr));
        let device = PathBuf::from(String::from_utf8(output.stdout).expect("a path").trim());
        Bare { dir, device }
    }
}

impl Drop for Bare {
    fn drop(&mut self) {
        let status = Command::new("losetup").arg("--detach").arg(&self.device).status();
        let removed = tree::remove(self.dir.path());
        let is_gone = status.as_ref().is_ok_and(|status| status.success()) && removed.is_ok();
        // A second panic would end the process, and with it the table.
        let device = self.device.display();
        assert!(is_gone || std::thread::panicking(), "losetup --detach {device}: {status:?}; {removed:?}");
    }
}

/// Whether that much time has passed since the call.
fn after(time: Duration) -> impl Fn() -> bool + Sync {
    let started = Instant::now();
    move || started.elapsed() >= time
}

/// What random writes of 4 KiB past the page cache came to.
struct Load {
    /// Writes a second, the flush in the end included.
    rate: f64,
    /// 99 of 100 fsyncs were quicker.
    sync: Duration,
}

impl Load {
    /// Writes to devices or files in turns, [`IN_FLIGHT`] writes at once.
    fn of(paths: &[PathBuf], between_syncs: Option<u64>, over: impl Fn() -> bool + Sync) -> Self {
        let started = Instant::now();
        let threads = (0..IN_FLIGHT).map(|number| (number, &paths[number % paths.len()]));
        let write = |(number, path): (usize, &PathBuf)| {
            let mut random = Rng::with_seed(number as u64);
            let file = open(path);
            let blocks = host::length(&file) / BLOCK as u64;
            let mut block = Aligned([0; BLOCK]);
            random.fill(&mut block.0);
            let (mut count, mut syncs) = (0, Vec::new());
            while !over() {
                block.0[..8].copy_from_slice(&random.u64(..).to_le_bytes());
                file.write_all_at(&block.0, random.u64(0..blocks) * BLOCK as u64).expect("write");
                count += 1;
                if between_syncs.is_some_and(|between| count % between == 0) {
                    let started = Instant::now();
                    file.sync_data().expect("fsync");
                    syncs.push(started.elapsed());
                }
            }
            file.sync_data().expect("fsync");
            (count, syncs)
        };
        let (mut writes, mut syncs) = (0, Vec::new());
        std::thread::scope(|scope| {
            let running: Vec<_> = threads
                .map(|thread| {
                    scope.spawn({
                        let write = &write;
                        move || write(thread)
                    })
                })
                .collect();
            for thread in running {
                let (count, some) = thread.join().expect("a writer");
                writes += count;
                syncs.extend(some);
            }
        });
        syncs.sort_unstable();
        let sync = syncs.get(syncs.len() * 99 / 100).copied().unwrap_or_default();
        Load { rate: writes as f64 / started.elapsed().as_secs_f64(), sync }
    }
}

fn open(path: &Path) -> File {
    File::options().read(true).write(true).custom_flags(libc::O_DIRECT).open(path).expect("open")
}

/// Reads all data of a file once, in order; bytes a second.
fn read_through(path: &Path) -> f64 {
    let file = File::open(path).expect("open");
    let mut piece = vec![0; PIECE];
    let started = Instant::now();
    let mut bytes = 0;
    for range in DataRanges::of(&file, path, ByteRange { start: 0, end: host::length(&file) }) {
        let range = range.expect("seek");
        for offset in (range.start..range.end).step_by(PIECE) {
            let length = PIECE.min((range.end - offset) as usize);
            file.read_exact_at(&mut piece[..length], offset).expect("read");
            bytes += length as u64;
        }
    }
    bytes as f64 / started.elapsed().as_secs_f64()
}
