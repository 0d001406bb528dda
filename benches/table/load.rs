//! Rows l to o and r: volumes under load, beside bare loop devices on bare files of the same filesystem; and hashing behind, alone
//! and beside the writers.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use base::{ByteRange, ObjectDir};
use deltapath::sys::{btrfs, tree};
use files::DataRanges;
use testkit::bench::{median, ms, write_direct};
use testkit::{PoolKind, Rig};

use crate::host::BareCopy;
use crate::work::{Load, PIECE, Work};
use crate::{Row, Table, host, spread};

/// The data of the volume that is hashed: long enough to be written beside.
const HASHED: u64 = 4 << 30;
/// The size of each volume that is written, all of it data.
pub const WRITTEN: u64 = 1 << 30;
/// Random writes, each thread with an fsync after 16.
const SYNCED: Work = Work::Random { between_syncs: Some(16) };
pub const EACH_SYNCED: Work = Work::Random { between_syncs: Some(1) };
pub const RANDOM: Work = Work::Random { between_syncs: None };
pub const ROUNDS: usize = 5;

pub async fn run(table: &mut Table) {
    for pool in table.pools(&PoolKind::ALL) {
        if (table.wants("l") || table.wants("m")) && pool != PoolKind::Dir {
            hashing(table, pool).await;
        }
        if ["n", "o", "r"].iter().any(|id| table.wants(id)) {
            for count in [1, 16] {
                volumes(table, pool, count).await;
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
        let ((), took) = host::timed(host::hashed(&rig, &snapshot)).await;
        alone.push(HASHED as f64 / took.as_secs_f64());
        host::drop_caches();
        bare.push(read_through(&rig.snapshot_dir(&snapshot).data()));
        rig.client.delete_snapshot(&snapshot).await.expect("delete");

        // Both samples begin without what the filesystem has read of itself.
        host::drop_caches();
        quiet.push(Load::of(&written, SYNCED));
        host::drop_caches();
        let snapshot = rig.snapshot(&format!("beside {round}"), &hashed).await;
        let load = tokio::task::spawn_blocking({
            let written = written.clone();
            move || Load::of(&written, SYNCED)
        });
        beside.push(load.await.expect("the writers"));
        assert!(!host::is_hashed(&rig, &snapshot), "hashing was over before the writers were");
        host::hashed(&rig, &snapshot).await;
        rig.client.delete_snapshot(&snapshot).await.expect("delete");
    }
    let share = median(&alone) / median(&bare);
    table.add(Row {
        id: "l",
        what: format!("hashing a first snapshot of 4 GiB behind, cold, {}", pool.name()),
        measured: spread(&alone, gigabytes),
        beside: format!(
            "{:.0} % of a bare sequential read of it, {}",
            100.0 * share,
            spread(&bare, gigabytes)
        ),
        must: "80 %",
        holds: share >= 0.8,
    });
    let (share, slower) = compared(&beside, &quiet);
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
        must: "85 %; 1.5 x",
        holds: share >= 0.85 && slower <= 1.5,
    });
    for id in [hashed, other] {
        rig.detach(&id).await;
    }
    rig.finish();
}

/// Rows n, o and r.
async fn volumes(table: &mut Table, pool: PoolKind, count: usize) {
    let mut volumes = Volumes::make(pool, count).await;
    if table.wants("n") {
        volumes.without_snapshots(table);
    }
    if table.wants("r") {
        volumes.other_work(table);
    }
    if pool != PoolKind::Dir && table.wants("o") {
        volumes.right_after_snapshots(table).await;
    }
    if pool != PoolKind::Dir && table.wants("r") {
        volumes.long_after_snapshots(table).await;
    }
    volumes.finish().await;
}

/// Volumes full of data, and as many loop devices on files beside them.
struct Volumes {
    rig: Rig,
    pool: PoolKind,
    /// Bytes of each.
    size: u64,
    ids: Vec<String>,
    ours: Vec<PathBuf>,
    bare: Vec<Bare>,
    loops: Vec<PathBuf>,
    /// What stands beside the snapshots.
    copies: Vec<BareCopy>,
}

impl Volumes {
    async fn make(pool: PoolKind, count: usize) -> Self {
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
        let volumes = Volumes { rig, pool, size, ids, ours, bare, loops, copies: Vec::new() };
        volumes.write_all();
        volumes
    }

    fn write_all(&self) {
        for path in self.ours.iter().chain(&self.loops) {
            write_direct(path, self.size);
        }
    }

    async fn finish(mut self) {
        drop(self.copies);
        drop(self.bare);
        for id in &self.ids {
            self.rig.detach(id).await;
        }
        self.rig.finish();
    }

    /// "1 volume" or "16 volumes".
    fn count(&self) -> String {
        match self.ids.len() {
            1 => "1 volume".to_owned(),
            count => format!("{count} volumes"),
        }
    }

    /// The volumes and the loop devices, by turns the first.
    fn in_turns(&self, work: Work) -> [Vec<Load>; 2] {
        let mut loads = [vec![], vec![]];
        for turn in 0..ROUNDS * 2 {
            let whose = (turn + turn / 2) % 2;
            loads[whose].push(Load::of([&self.ours, &self.loops][whose], work));
        }
        loads
    }

    /// Row n.
    fn without_snapshots(&self, table: &mut Table) {
        let host_dir = tempfile::tempdir().expect("temp dir");
        let files: Vec<PathBuf> =
            (0..self.ids.len()).map(|number| host_dir.path().join(number.to_string())).collect();
        for file in &files {
            write_direct(file, self.size);
        }
        let (mut of_ours, mut of_loops, mut of_files) = (vec![], vec![], vec![]);
        // The disk may be slower for whoever comes later, so they take turns to be the first.
        for turn in 0..ROUNDS * 3 {
            match (turn + turn / 3) % 3 {
                0 => of_ours.push(Load::of(&self.ours, RANDOM)),
                1 => of_loops.push(Load::of(&self.loops, RANDOM)),
                _ => of_files.push(Load::of(&files, RANDOM)),
            }
        }
        let (of_loop, of_file) = (compared(&of_ours, &of_loops).0, compared(&of_ours, &of_files).0);
        table.add(Row {
            id: "n",
            what: format!("random 4 KiB writes to {} without a snapshot, {}", self.count(), self.pool.name()),
            measured: spread(&rates(&of_ours), per_second),
            beside: format!(
                "{:.0} % of bare loop devices on the same filesystem, {}; {:.0} % of bare files on the host's, {}",
                100.0 * of_loop,
                spread(&rates(&of_loops), per_second),
                100.0 * of_file,
                spread(&rates(&of_files), per_second)
            ),
            must: "85 %; 60 %",
            holds: of_loop >= 0.85 && of_file >= 0.6,
        });
    }

    /// Row o.
    async fn right_after_snapshots(&mut self, table: &mut Table) {
        let (mut of_ours, mut of_loops) = (vec![], vec![]);
        for turn in 0..ROUNDS * 2 {
            if (turn + turn / 2) % 2 == 0 {
                self.take_snapshots(turn).await;
                of_ours.push(Load::of(&self.ours, RANDOM));
            } else {
                self.copy_bare();
                of_loops.push(Load::of(&self.loops, RANDOM));
            }
        }
        let (share, _) = compared(&of_ours, &of_loops);
        table.add(Row {
            id: "o",
            what: format!(
                "random 4 KiB writes to {} right after a snapshot of each, {}",
                self.count(),
                self.pool.name()
            ),
            measured: spread(&rates(&of_ours), per_second),
            beside: format!(
                "{:.0} % of bare loop devices after the filesystem's own, {}",
                100.0 * share,
                spread(&rates(&of_loops), per_second)
            ),
            must: "90 %",
            holds: share >= 0.9,
        });
    }

    async fn take_snapshots(&mut self, turn: usize) {
        for id in &self.ids {
            self.rig.snapshot(&format!("{id} {turn}"), id).await;
        }
    }

    fn copy_bare(&mut self) {
        for bare in &self.bare {
            self.copies.push(host::bare_copy(&self.rig, self.pool, &bare.dir, Some(&bare.device)));
        }
    }

    /// Rows r, but for the last.
    fn other_work(&self, table: &mut Table) {
        self.row(table, "sequential writes of 1 MiB to", "", Work::Sequential, mebibytes);
        self.row(table, "random 4 KiB, seven reads to three writes, of", "", Work::Mixed, per_second);
        self.row(table, "random 4 KiB writes, each with an fsync, to", "", EACH_SYNCED, per_second);
    }

    /// The last of rows r: when nothing is shared any more.
    async fn long_after_snapshots(&mut self, table: &mut Table) {
        self.take_snapshots(ROUNDS * 2).await;
        self.copy_bare();
        self.write_all();
        host::idle(&self.rig, self.pool).await;
        self.row(table, "random 4 KiB writes to", ", all written once since a snapshot", RANDOM, per_second);
    }

    fn row(&self, table: &mut Table, what: &str, state: &str, work: Work, show: impl Fn(f64) -> String) {
        let [ours, loops] = self.in_turns(work);
        let (share, slower) = compared(&ours, &loops);
        let mut row = Row {
            id: "r",
            what: format!("{what} {}{state}, {}", self.count(), self.pool.name()),
            measured: spread(&rates(&ours), &show),
            beside: format!(
                "{:.0} % of bare loop devices on the same filesystem, {}",
                100.0 * share,
                spread(&rates(&loops), &show)
            ),
            must: "85 %",
            holds: share >= 0.85,
        };
        if slower.is_finite() {
            row.measured += &format!(", p99 of fsync {}", spread(&syncs(&ours), ms));
            row.beside += &format!("; p99 {slower:.2} x, {}", spread(&syncs(&loops), ms));
            row.must = "85 %; 2 x";
            row.holds &= slower <= 2.0;
        }
        table.add(row);
    }
}

fn rates(loads: &[Load]) -> Vec<f64> {
    loads.iter().map(|load| load.rate).collect()
}

fn syncs(loads: &[Load]) -> Vec<Duration> {
    loads.iter().map(|load| load.sync).collect()
}

pub fn per_second(rate: f64) -> String {
    format!("{rate:.0}/s")
}

pub fn gigabytes(rate: f64) -> String {
    format!("{:.2} GB/s", rate / 1e9)
}

/// Of pieces a second.
pub fn mebibytes(rate: f64) -> String {
    format!("{:.0} MiB/s", rate * PIECE as f64 / (1 << 20) as f64)
}

/// The rate of one as a share of the other's, and the same of the p99 of fsync: NaN where there was no fsync.
fn compared(one: &[Load], other: &[Load]) -> (f64, f64) {
    let sync = |loads: &[Load]| median(&syncs(loads)).as_secs_f64();
    (median(&rates(one)) / median(&rates(other)), sync(one) / sync(other))
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

/// Reads all data of a file once, in order; bytes a second.
fn read_through(path: &Path) -> f64 {
    let file = File::open(path).expect("open");
    let ranges = DataRanges::of(&file, path, ByteRange { start: 0, end: host::length(&file) });
    read_pieces(&file, ranges.map(|range| range.expect("seek")))
}

pub fn read_pieces(file: &File, ranges: impl IntoIterator<Item = ByteRange>) -> f64 {
    let mut piece = vec![0; PIECE];
    let started = Instant::now();
    let mut bytes = 0;
    for range in ranges {
        for offset in (range.start..range.end).step_by(PIECE) {
            let length = PIECE.min((range.end - offset) as usize);
            file.read_exact_at(&mut piece[..length], offset).expect("read");
            bytes += length as u64;
        }
    }
    bytes as f64 / started.elapsed().as_secs_f64()
}
