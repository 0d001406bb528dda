//! Rows j and k: deltas with nothing in the page cache, as a backup tool asks for them: right after its snapshot, of
//! volumes that are written past the cache. What stands beside row j makes a bare copy of the volume and reads that at once,
//! so both begin with what the copy has left of the filesystem's own blocks in the cache.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use fastrand::Rng;
use testkit::bench::{median, ms};
use testkit::prelude::*;

use crate::host::Streamed;
use crate::{Row, Table, changes, host, ratio, spread};

const SIZE: u64 = 8 << 30;
const SPARSE: u64 = 16 << 40;
/// The data: 1 GiB, in pieces that are spread evenly.
const PIECE: u64 = 1 << 20;
const BLOCK: u64 = 4096;
const ROUNDS: usize = 3;
/// Reads in flight of the bare operation.
const IN_FLIGHT: usize = 32;

/// Whole streams, their first messages, and the bare reads.
#[derive(Default)]
struct Samples {
    wholes: Vec<Duration>,
    firsts: Vec<Duration>,
    bares: Vec<Duration>,
}

impl Samples {
    fn add(&mut self, whole: Duration, first: Duration, bare: Duration) {
        self.wholes.push(whole);
        self.firsts.push(first);
        self.bares.push(bare);
    }

    fn medians(&self) -> [Duration; 3] {
        [&self.wholes, &self.firsts, &self.bares].map(|times| median(times))
    }

    fn measured(&self) -> String {
        format!("{}, first message {}", spread(&self.wholes, ms), spread(&self.firsts, ms))
    }
}

pub async fn run(table: &mut Table) {
    for pool in table.sharing() {
        let mut rig = Rig::start_with(pool, &["--pool-size", "48Gi"], "warn").await;
        let volume = Volume::make(&mut rig, "volume", SIZE).await;
        let mut base = volume.first_snapshot(&mut rig).await;
        let name = pool.name();
        let mut dense = None;
        for percent in [1, 10] {
            let (at_once, unhashed) = volume.rounds(&mut rig, pool, &mut base, percent).await;
            for (id, what, samples, sides) in [
                ("j", "GetMetadataDelta at once after CreateSnapshot", &at_once, "the target's"),
                ("k", "the same, nothing hashed", &unhashed, "both sides'"),
            ] {
                let [whole, first, bare] = samples.medians();
                let spare = if id == "j" { Duration::from_millis(20) } else { Duration::ZERO };
                table.add(Row {
                    id,
                    what: format!("{what}, cold, {percent} % of 1 GiB changed, {name}"),
                    measured: samples.measured(),
                    beside: format!(
                        "{:.2} x reading {sides} blocks, {IN_FLIGHT} in flight, {}",
                        ratio(whole, bare),
                        spread(&samples.bares, ms)
                    ),
                    must: if id == "j" { "1.5 x and 20 ms; first 50 ms" } else { "1.5 x" },
                    holds: whole <= bare.mul_f64(1.5) + spare
                        && (id != "j" || first <= Duration::from_millis(50)),
                });
            }
            dense.get_or_insert(at_once);
        }
        rig.delete(&volume.id).await;
        let dense = dense.expect("1 %");
        let volume = Volume::make(&mut rig, "sparse", SPARSE).await;
        let mut base = volume.first_snapshot(&mut rig).await;
        let (at_once, _) = volume.rounds(&mut rig, pool, &mut base, 1).await;
        let ([whole, first, _], [in_dense, ..]) = (at_once.medians(), dense.medians());
        table.add(Row {
            id: "j-sparse",
            what: format!("row j in a volume of 16 TiB, each piece in a segment of its own, 1 %, {name}"),
            measured: at_once.measured(),
            beside: format!(
                "{:.2} x the same in 8 GiB, {}",
                ratio(whole, in_dense),
                spread(&dense.wholes, ms)
            ),
            must: "1.5 x; first 30 ms",
            holds: whole <= in_dense.mul_f64(1.5) && first <= Duration::from_millis(30),
        });
        rig.detach_and_finish(&volume.id).await;
    }
}

/// A volume with the data in pieces.
struct Volume {
    id: String,
    device: PathBuf,
    size: u64,
}

impl Volume {
    async fn make(rig: &mut Rig, name: &str, size: u64) -> Self {
        let (id, device) = rig.block_volume(name, size as i64).await;
        changes::fill(&device, size, PIECE, &mut Rng::with_seed(3));
        Volume { id, device, size }
    }

    async fn first_snapshot(&self, rig: &mut Rig) -> String {
        let base = rig.snapshot(&format!("base of {}", self.id), &self.id).await;
        host::hashed(rig, &base).await;
        base
    }

    /// Changes some blocks and asks for the delta, again and again: at once after the snapshot, and with no hash of either.
    async fn rounds(
        &self,
        rig: &mut Rig,
        pool: testkit::PoolKind,
        base: &mut String,
        percent: u64,
    ) -> (Samples, Samples) {
        let (mut at_once, mut unhashed) = (Samples::default(), Samples::default());
        let mut random = Rng::with_seed(percent);
        for round in 0..ROUNDS {
            let offsets = changes::change_part(&self.device, self.size, PIECE, percent, &mut random);
            host::drop_caches();
            let target = rig.snapshot(&format!("{percent} {round} of {}", self.id), &self.id).await;
            let Streamed { first, whole, .. } = delta(&mut rig.client, base, &target, offsets.len()).await;
            host::hashed(rig, &target).await;
            // As cold: the caches go, and the filesystem's own copy of the volume is made and read at once.
            host::drop_caches();
            let copy = host::bare_copy(rig, pool, &rig.volume_dir(&self.id), Some(&self.device));
            at_once.add(whole, first, read(&[copy.data()], &offsets));
            drop(copy);
            let forgotten = [host::forget_hashes(rig, base), host::forget_hashes(rig, &target)];
            host::idle(rig, pool).await;
            host::drop_caches();
            let Streamed { first, whole, .. } = delta(&mut rig.client, base, &target, offsets.len()).await;
            host::drop_caches();
            let data = [&*base, &target].map(|id| rig.snapshot_dir(id).data());
            unhashed.add(whole, first, read(&data, &offsets));
            drop(forgotten);
            *base = target;
        }
        (at_once, unhashed)
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
