//! btrfs or xfs for a pool made in an image: what each costs where they differ.

use std::fs::File;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::Path;
use std::time::{Duration, Instant};

use files::punch_hole;

use crate::host;
use crate::{Row, SHARING, Table};
use fastrand::Rng;
use testkit::bench::{median, ms};
use testkit::{PoolKind, Rig};

const SIZE: u64 = 2 << 30;
const WRITES: usize = 20_000;
const ROUNDS: usize = 5;
/// How long freed space may take to come back to the host.
const PATIENCE: Duration = Duration::from_secs(180);

/// What one pool costs.
struct Figures {
    sequential: f64,
    before: f64,
    after: f64,
    snapshot: Duration,
    delta: Duration,
    /// The share of the image's space that is back on the host, and when.
    returned: (f64, Duration),
}

pub async fn run(table: &mut Table) {
    let [xfs, btrfs] = [measure(SHARING[0]).await, measure(SHARING[1]).await];
    let speed = |value: f64| format!("{:.0} MB/s", value / 1e6);
    let rate = |value: f64| format!("{:.0}/s", value);
    let share =
        |(share, after): (f64, Duration)| format!("{:.0} % after {} s", 100.0 * share, after.as_secs());
    for (what, btrfs, xfs) in [
        ("sequential write", speed(btrfs.sequential), speed(xfs.sequential)),
        ("4 KiB random writes, synced in the end, before a snapshot", rate(btrfs.before), rate(xfs.before)),
        ("the same after a snapshot", rate(btrfs.after), rate(xfs.after)),
        ("snapshot after them", ms(btrfs.snapshot), ms(xfs.snapshot)),
        ("delta of them", ms(btrfs.delta), ms(xfs.delta)),
        ("space back on the host after a discard of all", share(btrfs.returned), share(xfs.returned)),
    ] {
        table.add(Row {
            id: "pools",
            what: format!("{what}: btrfs image"),
            measured: btrfs,
            beside: format!("xfs image {xfs}"),
            must: "",
            holds: true,
        });
    }
}

async fn measure(pool: PoolKind) -> Figures {
    let mut rig = Rig::start_with(pool, &["--pool-size", "32Gi", "--retain-deleted", "0"], "warn").await;
    let mut random = Rng::with_seed(11);
    let (volume, device) = rig.block_volume("volume", SIZE as i64).await;
    let sequential = SIZE as f64 / fill(&device, &mut random).as_secs_f64();
    let write = |random: &mut Rng| {
        let offsets: Vec<u64> = (0..WRITES).map(|_| random.u64(0..SIZE / 4096) * 4096).collect();
        let started = Instant::now();
        host::write_blocks(&device, random, &offsets);
        WRITES as f64 / started.elapsed().as_secs_f64()
    };
    let before: Vec<f64> = (0..ROUNDS).map(|_| write(&mut random)).collect();
    let mut base = rig.snapshot("base", &volume).await;
    host::hashed(&rig, &base).await;
    let (mut after, mut snapshot, mut delta) = (Vec::new(), Vec::new(), Vec::new());
    let mut taken = vec![base.clone()];
    for round in 0..ROUNDS {
        after.push(write(&mut random));
        let started = Instant::now();
        let target = rig.snapshot(&format!("target {round}"), &volume).await;
        snapshot.push(started.elapsed());
        host::hashed(&rig, &target).await;
        let started = Instant::now();
        rig.client.delta(&base, &target, 0, 0).await.expect("delta");
        delta.push(started.elapsed());
        taken.push(target.clone());
        base = target;
    }
    for snapshot in taken {
        rig.client.delete_snapshot(&snapshot).await.expect("delete");
    }
    let image = rig.data_dir().join("pool.img");
    let used = || std::fs::metadata(&image).expect("stat").blocks() * 512;
    let most = used();
    punch_hole(&File::options().write(true).open(&device).expect("open"), 0, SIZE).expect("discard");
    let started = Instant::now();
    let share = || 1.0 - used() as f64 / most as f64;
    while share() < 0.95 && started.elapsed() < PATIENCE {
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
    let returned = (share(), started.elapsed());
    rig.detach(&volume).await;
    rig.finish();
    let (before, after) = (median(&before), median(&after));
    Figures { sequential, before, after, snapshot: median(&snapshot), delta: median(&delta), returned }
}

fn fill(device: &Path, random: &mut Rng) -> Duration {
    let file = File::options().write(true).open(device).expect("open the device");
    let mut piece = vec![0; 1 << 20];
    random.fill(&mut piece);
    let started = Instant::now();
    for offset in (0..SIZE).step_by(piece.len()) {
        piece[..8].copy_from_slice(&offset.to_le_bytes());
        file.write_all_at(&piece, offset).expect("write");
    }
    file.sync_all().expect("flush");
    started.elapsed()
}
