//! Rows f, g, h: hashing, plain copies, and many snapshots.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::time::{Duration, Instant};

use base::{BlockRange, BlockSize, ByteRange, ObjectDir, Stop};
use cbt::{FreshHashes, HashFile, MapFile, MapHeader, MapWriter, ToHash, hash_each};
use csi_client::Client;
use files::DataRanges;
use nix::fcntl::{PosixFadviseAdvice, posix_fadvise};
use proto::ProbeRequest;

use rayon::prelude::*;

use crate::host;
use crate::{Row, Table, ratio, spread};
use fastrand::Rng;
use testkit::bench::{median, ms};
use testkit::{PoolKind, Rig, driver_command};

const ROUNDS: usize = 5;
const GB: f64 = 1e9;

/// Row f.
pub fn hashing(table: &mut Table) {
    const BYTES: u64 = 1 << 30;
    /// What one core takes at once.
    const SHARE: usize = 1 << 20;
    let dir = tempfile::tempdir().expect("temp dir");
    let path = dir.path().join("data");
    let data = File::options().read(true).write(true).create_new(true).open(&path).expect("create");
    let mut bytes = vec![0; BYTES as usize];
    Rng::with_seed(3).fill(&mut bytes);
    data.write_all_at(&bytes, 0).expect("write");
    data.sync_all().expect("sync");
    let size = BlockSize::MIN;
    let blocks = BYTES / size.bytes();
    let header = MapHeader { block_size: size, blocks, relative_to: None };
    let map = dir.path().join("map");
    let mut writer = MapWriter::create(&map, header).expect("create");
    writer.insert(BlockRange::new(0, blocks)).expect("insert");
    writer.finish().expect("finish");
    let map = MapFile::open(&map).expect("open");
    let hashes = HashFile::create(&dir.path().join("hashes")).expect("create");
    let foreground = base::Foreground::default();
    let fresh = FreshHashes::default();
    let to_hash = ToHash {
        data: &data,
        data_path: &path,
        size,
        hashes: &hashes,
        foreground: &foreground,
        fresh: &fresh,
    };
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let (mut ours, mut bare, mut whole) = (Vec::new(), Vec::new(), Vec::new());
    for _ in 0..ROUNDS {
        let started = Instant::now();
        let sum = bytes.chunks_exact(4096).fold(0u8, |sum, block| sum ^ blake3::hash(block).as_bytes()[0]);
        bare.push(BYTES as f64 / started.elapsed().as_secs_f64() * cores as f64);
        std::hint::black_box(sum);
        let started = Instant::now();
        bytes.par_chunks(SHARE).for_each(|share| {
            hash_each(share, size, |_, hash| _ = std::hint::black_box(hash));
        });
        ours.push(BYTES as f64 / started.elapsed().as_secs_f64());
        let started = Instant::now();
        for index in map.indexes() {
            to_hash
                .hash_segment(index, map.segment(index).expect("segment"), &Stop::default())
                .expect("hash");
        }
        whole.push(BYTES as f64 / started.elapsed().as_secs_f64());
    }
    let rates = |rates: &[f64]| spread(rates, |rate| format!("{:.1} GB/s", rate / GB));
    let (cached, files) = (rates(&ours), rates(&whole));
    let (ours, bare) = (median(&ours), median(&bare));
    table.add(Row {
        id: "f",
        what: "hashing 1 GiB of cached data in 4 KiB blocks".into(),
        measured: format!("{cached} on {cores} cores; read from a cached file into a hash file {files}"),
        beside: format!(
            "{:.0} % of blake3::hash a block on one core, times cores ({:.1} GB/s)",
            100.0 * ours / bare,
            bare / GB
        ),
        must: "200 %",
        holds: ours / bare >= 2.0,
    });
}

/// Row g.
pub async fn plain_copies(table: &mut Table) {
    const BYTES: u64 = 2 << 30;
    let mut rig = Rig::start_with(PoolKind::Dir, &["--retain-deleted", "0"], "warn").await;
    let (volume, device) = rig.block_volume("volume", (BYTES * 4) as i64).await;
    const PIECE: u64 = 4 << 20;
    host::write_pieces(&device, BYTES / PIECE, PIECE, 4 * PIECE, &mut Rng::with_seed(5));
    let source = rig.volume_dir(&volume).data();
    let scratch = rig.pool_dir().join("staging/bench.img");
    let (mut ours, mut bare) = (Vec::new(), Vec::new());
    // The disk may be slower for whoever writes second, so each is the first in every other round.
    for turn in 0..2 * ROUNDS {
        let started = Instant::now();
        if turn % 4 == 0 || turn % 4 == 3 {
            sparse_copy(&source, &scratch);
            bare.push(BYTES as f64 / started.elapsed().as_secs_f64());
            std::fs::remove_file(&scratch).expect("remove");
        } else {
            let snapshot = rig.snapshot(&format!("snapshot {turn}"), &volume).await;
            ours.push(BYTES as f64 / started.elapsed().as_secs_f64());
            rig.client.delete_snapshot(&snapshot).await.expect("delete");
        }
    }
    let rates = ours;
    let (ours, bare) = (median(&rates), median(&bare));
    table.add(Row {
        id: "g",
        what: "dir pool: CreateSnapshot of 2 GiB, copied and hashed in one pass".into(),
        measured: spread(&rates, |rate| format!("{:.2} GB/s", rate / GB)),
        beside: format!(
            "{:.0} % of a bare sparse copy, {:.2} GB/s, both synced",
            100.0 * ours / bare,
            bare / GB
        ),
        must: "70 %",
        holds: ours / bare >= 0.7,
    });
    rig.detach_and_finish(&volume).await;
}

/// Of what is not in the page cache, as volumes that are written past it.
fn sparse_copy(source: &Path, target: &Path) {
    let from = File::open(source).expect("open");
    posix_fadvise(&from, 0, 0, PosixFadviseAdvice::POSIX_FADV_DONTNEED).expect("drop the cache");
    let to = File::create(target).expect("create");
    let length = from.metadata().expect("stat").len();
    to.set_len(length).expect("set_len");
    let mut buffer = vec![0; 4 << 20];
    for range in DataRanges::of(&from, source, ByteRange { start: 0, end: length }) {
        let range = range.expect("seek");
        let mut offset = range.start;
        while offset < range.end {
            let count = buffer.len().min((range.end - offset) as usize);
            from.read_exact_at(&mut buffer[..count], offset).expect("read");
            to.write_all_at(&buffer[..count], offset).expect("write");
            offset += count as u64;
        }
    }
    to.sync_all().expect("sync");
}

/// Row h.
pub async fn many_snapshots(table: &mut Table) {
    const VOLUMES: usize = 100;
    const EACH: usize = 100;
    let mut rig = Rig::start_with(PoolKind::Xfs, &[], "warn").await;
    let mut snapshots = Vec::new();
    for number in 0..VOLUMES {
        let (volume, device) = rig.block_volume(&format!("volume {number}"), 1 << 30).await;
        host::write_blocks(&device, &mut Rng::with_seed(number as u64 + 1), &[0, 4096, 1 << 20]);
        snapshots.push(rig.snapshot(&format!("snapshot {number}"), &volume).await);
        host::hashed(&rig, &snapshots[number]).await;
        rig.detach(&volume).await;
    }
    rig.restart().await;
    for id in &snapshots {
        multiply(&rig.snapshot_dir(id), id, EACH);
    }
    assert!(rig.terminate().success());
    let (mut starts, mut bares) = (Vec::new(), Vec::new());
    for _ in 0..ROUNDS {
        let started = Instant::now();
        let mut child = driver_command(rig.dir.path(), PoolKind::Xfs).spawn().expect("start");
        let mut client = Client::connect(&rig.socket(), Duration::from_secs(60)).await.expect("connect");
        client.identity.probe(ProbeRequest {}).await.expect("Probe");
        starts.push(started.elapsed());
        // Long enough for what the driver does at its start.
        tokio::time::sleep(Duration::from_secs(5)).await;
        let memory = testkit::process_status(child.id(), "VmRSS:") >> 10;
        let started = Instant::now();
        let records = read_records(&rig.pool_dir().join("snapshots"));
        bares.push((started.elapsed(), memory));
        assert_eq!(records, VOLUMES * EACH);
        testkit::signal(child.id(), nix::sys::signal::Signal::SIGTERM);
        testkit::wait(&mut child, Duration::from_secs(60));
    }
    let memory = bares.iter().map(|bare| bare.1).max().unwrap_or(0);
    let bare: Vec<Duration> = bares.iter().map(|bare| bare.0).collect();
    table.add(Row {
        id: "h",
        what: "start to first Probe with 10,000 snapshots on 100 volumes".into(),
        measured: format!("{}, then {memory} MiB when idle", spread(&starts, ms)),
        beside: format!(
            "{:.1} x reading 10,000 records, cached, {}",
            ratio(median(&starts), median(&bare)),
            spread(&bare, ms)
        ),
        must: "1.5 s; 40 MiB",
        holds: median(&starts) <= Duration::from_millis(1500) && memory <= 40,
    });
    rig.start_again().await;
    rig.finish();
}

/// Makes a snapshot into this number of snapshots, each with files of its own.
fn multiply(dir: &ObjectDir, id: &str, count: usize) {
    let record = std::fs::read_to_string(dir.record()).expect("record");
    let name = record.split("\"name\": \"").nth(1).and_then(|rest| rest.split('"').next()).expect("a name");
    for copy in 1..count {
        let fresh = format!("snap-{copy:04x}{}", &id[9..]);
        let to = ObjectDir::new(dir.path().with_file_name(&fresh));
        std::fs::create_dir_all(to.bytes()).expect("mkdir");
        for (from, to) in [
            (dir.allocated(), to.allocated()),
            (dir.changed(), to.changed()),
            (dir.pending(), to.pending()),
            (dir.hashes(), to.hashes()),
        ] {
            std::fs::copy(from, to).expect("copy");
        }
        let data = File::create(to.data()).expect("create");
        data.set_len(1 << 30).expect("set_len");
        let changed = record
            .replace(id, &fresh)
            .replace(&format!("\"name\": \"{name}\""), &format!("\"name\": \"{name} {copy}\""))
            .replace("\"sequence\": 1,", &format!("\"sequence\": {},", copy + 1));
        std::fs::write(to.record(), changed).expect("write");
    }
}

fn read_records(dir: &Path) -> usize {
    let mut read = 0;
    for entry in std::fs::read_dir(dir).expect("list") {
        let record = std::fs::read(entry.expect("entry").path().join("record.json")).expect("read");
        read += usize::from(!record.is_empty());
    }
    read
}
