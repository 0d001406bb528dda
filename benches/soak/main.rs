//! `make soak`: a driver at work for as long as is wanted, with everything at once, and every byte checked.
//!
//! 16 volumes, raw ones and all filesystems, are written by `fio`, which verifies what it wrote. Each has a
//! backup: a snapshot, its allocated blocks once and then deltas, copied into a file that is compared with the
//! snapshot byte by byte, read from its image or from a restored volume. Bases are deleted before their delta is
//! asked; volumes are cloned, restored, expanded, published again and taken in groups. On one more device writers log what
//! they wrote, and each snapshot of it must hold what its logs name. For half of the time a loop device of somebody
//! else's is dead; eight times the pool is full. During the first third the driver is stopped and killed again and
//! again; the other two run on one process, so that what it leaks shows.
//!
//! Settings, by environment: `MINUTES` (30), `POOL` (btrfs, xfs or dir; btrfs). Fails on a mismatch, an error of fio,
//! an answer that is not expected, a line of level ERROR in the log, and a leak. Needs root and fio.
#![allow(clippy::disallowed_methods)]

mod backup;
mod curves;
mod keeper;
mod link;
mod load;
mod selfcheck;
mod trouble;

use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use link::Link;
use testkit::places::Disk;
use testkit::{PoolKind, Rig};
use tokio::sync::RwLock;

/// What went wrong, for the reader.
type Failed = String;

/// What has been done so far.
#[derive(Debug, Default)]
struct Counts {
    snapshots: AtomicU64,
    deltas: AtomicU64,
    deltas_of_deleted: AtomicU64,
    copied: AtomicU64,
    compared: AtomicU64,
    restores: AtomicU64,
    clones: AtomicU64,
    groups: AtomicU64,
    expansions: AtomicU64,
    moves: AtomicU64,
    fio_written: AtomicU64,
    fio_verified: AtomicU64,
    passes: AtomicU64,
    kills: AtomicU64,
    stops: AtomicU64,
    ordered: AtomicU64,
    pairs: AtomicU64,
    full: AtomicU64,
    refused: AtomicU64,
}

/// What all tasks share.
struct World {
    pool: PoolKind,
    started: Instant,
    length: Duration,
    link: Link,
    counts: Counts,
    /// The rig's directory.
    dir: PathBuf,
    kubelet: PathBuf,
    pool_dir: PathBuf,
    stop: AtomicBool,
    failures: Mutex<Vec<Failed>>,
    /// Held shared by those who need room in the pool, alone by those who fill it.
    room: RwLock<()>,
}

impl World {
    /// Whether tasks are to end: time is over, or something went wrong.
    fn is_over(&self) -> bool {
        self.stop.load(Ordering::Relaxed) || self.started.elapsed() >= self.length
    }

    /// Ends the run as failed.
    fn fail(&self, what: Failed) {
        eprintln!("soak: FAILED: {what}");
        self.failures.lock().expect("failures").push(what);
        self.stop.store(true, Ordering::Relaxed);
    }

    fn has_failed(&self) -> bool {
        !self.failures.lock().expect("failures").is_empty()
    }
}

fn add(counter: &AtomicU64, more: u64) {
    counter.fetch_add(more, Ordering::Relaxed);
}

fn get(counter: &AtomicU64) -> u64 {
    counter.load(Ordering::Relaxed)
}

/// Runs what blocks on a thread that may.
fn blocking<T>(work: impl FnOnce() -> T) -> T {
    tokio::task::block_in_place(work)
}

fn setting<T: std::str::FromStr>(name: &str, default: T) -> T {
    match std::env::var(name) {
        Err(_) => default,
        Ok(text) => text.parse().unwrap_or_else(|_| panic!("{name}={text} cannot be read")),
    }
}

fn main() -> ExitCode {
    let minutes: f64 = setting("MINUTES", 30.0);
    assert!(minutes >= 1.0, "MINUTES={minutes}: a run of less than a minute says nothing");
    let flag: String = setting("POOL", "btrfs".to_owned());
    let pool = testkit::POOLS.into_iter().find(|pool| pool.name() == flag);
    let pool = pool.unwrap_or_else(|| panic!("POOL={flag}: it is btrfs, xfs or dir"));
    if !deltapath::sys::is_root() {
        eprintln!("soak: it needs root, to attach loop devices and to mount");
        return ExitCode::FAILURE;
    }
    if let Err(what) = selfcheck::run() {
        eprintln!("soak: the checks do not see what they are for: {what}");
        return ExitCode::FAILURE;
    }
    let length = Duration::from_secs_f64(minutes * 60.0);
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(8).enable_all().build();
    match runtime.expect("runtime").block_on(soak(pool, length)) {
        true => ExitCode::SUCCESS,
        false => ExitCode::FAILURE,
    }
}

async fn soak(pool: PoolKind, length: Duration) -> bool {
    // Plain files fill the disk that they are on: they get one of their own.
    let disk = (pool == PoolKind::Dir).then(|| Disk::ext4(24 << 30));
    let dir = disk.as_ref().map_or_else(testkit::temp_dir, Disk::dir);
    let mut rig = Rig::start_in(dir, pool, &["--pool-size", "24Gi"], "info").await;
    let fresh = curves::Sample::take(&rig, 0.0);
    let started = Instant::now();
    let world = World {
        pool,
        started,
        length,
        link: Link::new(rig.client.clone()),
        counts: Counts::default(),
        dir: rig.dir.path().to_owned(),
        kubelet: rig.kubelet(),
        pool_dir: rig.pool_dir(),
        stop: AtomicBool::new(false),
        failures: Mutex::default(),
        room: RwLock::default(),
    };
    println!(
        "soak: {} min on {}, 16 volumes under fio, 2 thirds on one process",
        length.as_secs() / 60,
        pool.name()
    );
    let world: &'static World = Box::leak(Box::new(world));
    let volumes = match load::make_volumes(world).await {
        Ok(volumes) => volumes,
        Err(what) => {
            world.fail(what);
            return false;
        }
    };
    let mut tasks = tokio::task::JoinSet::new();
    for volume in volumes {
        tasks.spawn(load::write(world, volume));
        tasks.spawn(backup::keep(world, volume));
    }
    tasks.spawn(backup::groups(world, volumes));
    tasks.spawn(trouble::order(world));
    tasks.spawn(trouble::dead_devices(world));
    tasks.spawn(trouble::full_pools(world, volumes));
    tasks.spawn(async move {
        if tokio::signal::ctrl_c().await.is_ok() {
            world.fail("interrupted".into());
        }
    });
    let curves = keeper::watch(world, &mut rig, volumes.len() * 2 + 4, &mut tasks).await;
    if !world.has_failed()
        && let Err(what) = keeper::close(world, &mut rig, volumes, &fresh).await
    {
        world.fail(what);
    }
    let leaks = curves.print(started.elapsed());
    // A run that ended early has too little to judge.
    for leak in leaks.into_iter().filter(|_| started.elapsed() >= length) {
        world.fail(leak);
    }
    for line in keeper::errors_in(&rig.log()) {
        world.fail(format!("the driver's log says: {line}"));
    }
    keeper::print_counts(world);
    if world.has_failed() {
        let failures = world.failures.lock().expect("failures");
        println!("soak: FAILED: {}", failures.join("\n"));
        return false;
    }
    rig.finish();
    disk.into_iter().for_each(Disk::finish);
    println!("soak: no mismatch, no leak");
    true
}
