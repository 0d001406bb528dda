//! Rows j and k: deltas with nothing in the page cache, as a backup tool asks for them: right after its snapshot, of
//! volumes that are written past the cache. What stands beside row j makes a bare copy of the volume and reads that at once,
//! so both begin with what the copy has left of the filesystem's own blocks in the cache.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use csi_client::Client;
use fastrand::Rng;
use testkit::Rig;
use testkit::bench::{median, ms};

use crate::host::Streamed;
use crate::{Row, Table, host, ratio, spread};

const SIZE: u64 = 8 << 30;
/// The data: 1 GiB, in pieces that are spread evenly.
const PIECES: u64 = 1024;
const PIECE: u64 = 1 << 20;
const BLOCK: u64 = 4096;
const ROUNDS: usize = 3;
/// Reads in flight of the bare operation.
const IN_FLIGHT: usize = 32;

/// The whole stream and its first message, and the bare reads.
struct Sample {
    whole: Duration,
    first: Duration,
    bare: Duration,
}

pub async fn run(table: &mut Table) {
    for pool in table.sharing() {
        let mut rig = Rig::start_with(pool, &["--pool-size", "48Gi"], "warn").await;
        let mut random = Rng::with_seed(3);
        let (volume, device) = rig.block_volume("volume", SIZE as i64).await;
        let file = File::options().write(true).open(&device).expect("open the device");
        let mut piece = vec![0; PIECE as usize];
        for number in 0..PIECES {
            random.fill(&mut piece);
            file.write_all_at(&piece, number * (SIZE / PIECES)).expect("write");
        }
        file.sync_all().expect("flush");
        drop(file);
        let mut base = rig.snapshot("base", &volume).await;
        host::hashed(&rig, &base).await;
        for percent in [1, 10] {
            let count = PIECES * PIECE / BLOCK / 100 * percent;
            let (mut at_once, mut unhashed) = (Vec::new(), Vec::new());
            for round in 0..ROUNDS {
                let mut offsets: Vec<u64> = (0..count)
                    .map(|_| random.u64(0..PIECES) * (SIZE / PIECES) + random.u64(0..PIECE / BLOCK) * BLOCK)
                    .collect();
                host::write_blocks(&device, &mut random, &offsets);
                offsets.sort_unstable();
                offsets.dedup();
                host::drop_caches();
                let target = rig.snapshot(&format!("{percent} {round}"), &volume).await;
                let Streamed { first, whole, .. } =
                    delta(&mut rig.client, &base, &target, offsets.len()).await;
                host::hashed(&rig, &target).await;
                // As cold: the caches go, and the filesystem's own copy of the volume is made and read at once.
                host::drop_caches();
                let copy = host::bare_copy(&rig, pool, &host::volume_dir(&rig, &volume), Some(&device));
                at_once.push(Sample { whole, first, bare: read(&[copy.data()], &offsets) });
                drop(copy);
                let forgotten = [host::forget_hashes(&rig, &base), host::forget_hashes(&rig, &target)];
                host::idle(&rig, pool).await;
                host::drop_caches();
                let Streamed { first, whole, .. } =
                    delta(&mut rig.client, &base, &target, offsets.len()).await;
                host::drop_caches();
                let data = [&base, &target].map(|id| host::snapshot_dir(&rig, id).data());
                unhashed.push(Sample { whole, first, bare: read(&data, &offsets) });
                drop(forgotten);
                base = target;
            }
            let name = pool.name();
            for (id, what, samples, sides) in [
                ("j", "GetMetadataDelta at once after CreateSnapshot", at_once, "the target's"),
                ("k", "the same, nothing hashed", unhashed, "both sides'"),
            ] {
                let wholes: Vec<Duration> = samples.iter().map(|sample| sample.whole).collect();
                let whole = median(&wholes);
                let firsts: Vec<Duration> = samples.iter().map(|sample| sample.first).collect();
                let bares: Vec<Duration> = samples.iter().map(|sample| sample.bare).collect();
                let (first, bare) = (median(&firsts), median(&bares));
                let spare = if id == "j" { Duration::from_millis(20) } else { Duration::ZERO };
                table.add(Row {
                    id,
                    what: format!("{what}, cold, {percent} % of 1 GiB changed, {name}"),
                    measured: format!("{}, first message {}", spread(&wholes, ms), spread(&firsts, ms)),
                    beside: format!(
                        "{:.2} x reading {sides} blocks, {IN_FLIGHT} in flight, {}",
                        ratio(whole, bare),
                        spread(&bares, ms)
                    ),
                    must: if id == "j" { "1.5 x and 20 ms; first 50 ms" } else { "1.5 x" },
                    holds: whole <= bare.mul_f64(1.5) + spare
                        && (id != "j" || first <= Duration::from_millis(50)),
                });
            }
        }
        rig.detach_and_finish(&volume).await;
    }
}

async fn delta(client: &mut Client, base: &str, target: &str, changed: usize) -> Streamed {
    let read = host::delta(client, base, target).await;
    assert_eq!(read.bytes, changed as u64 * BLOCK, "not what was changed");
    read
}

/// Reads these blocks of files.
fn read(paths: &[PathBuf], offsets: &[u64]) -> Duration {
    let started = Instant::now();
    let files: Vec<File> = paths.iter().map(|path| File::open(path).expect("open")).collect();
    std::thread::scope(|scope| {
        for number in 0..IN_FLIGHT {
            let files = &files;
            scope.spawn(move || {
                let mut block = vec![0; BLOCK as usize];
                for offset in offsets.iter().skip(number).step_by(IN_FLIGHT) {
                    for file in files {
                        file.read_exact_at(&mut block, *offset).expect("read");
                    }
                }
            });
        }
    });
    started.elapsed()
}
