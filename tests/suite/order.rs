//! If a copy of a device that is being written contains a write, it contains all writes that were acknowledged before that
//! one was sent.
//!
//! Seen here: a btrfs subvolume snapshot had a log block without data blocks that were acknowledged before it.
//! `DELTAPATH_ORDER_COPIES` sets the number of copies in each test. More than the usual few find rarer losses.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use deltapath::sys::loopdev::LoopDevice;

use crate::faults::Disk;
use testkit::order::{WRITER_BYTES, Writers, group_image, image, violations};
use testkit::prelude::*;

const WRITERS: u64 = 4;
const CAPACITY: u64 = WRITERS * WRITER_BYTES;

fn copies() -> u64 {
    testkit::asked("DELTAPATH_ORDER_COPIES").unwrap_or(25)
}

fn no_rest(_: u64) -> Duration {
    Duration::ZERO
}

/// The figures of a long run.
#[derive(Default)]
struct Tally {
    taken: u64,
    refused: u64,
    wrong: Vec<String>,
    times: Vec<Duration>,
    written: u64,
    longest_write: Duration,
}

impl Tally {
    fn add(&mut self, round: u64, took: Duration, wrong: &[String]) {
        self.taken += 1;
        self.times.push(took);
        self.wrong
            .extend(wrong.first().map(|first| format!("copy {round}, {} blocks: {first}", wrong.len())));
    }

    fn end_writers(&mut self, writers: Writers) {
        self.written += writers.written();
        self.longest_write = self.longest_write.max(writers.finish());
    }

    fn report(mut self, what: &str) {
        self.times.sort_unstable();
        let median = self.times.get(self.times.len() / 2).copied().unwrap_or_default();
        let most = self.times.last().copied().unwrap_or_default();
        println!(
            "order of writes, {what}: {} copies taken, {} refused, {} wrong; a copy takes {median:.1?} ({most:.1?} at \
             most), a write {:.1?} at most, {} pairs written",
            self.taken,
            self.refused,
            self.wrong.len(),
            self.longest_write,
            self.written,
        );
        assert!(self.written > 100, "{} pairs of writes prove nothing", self.written);
        assert!(self.wrong.is_empty(), "{what}: {:#?}", self.wrong);
    }
}

/// The disk of a driver's data directory: its own, or the machine's.
struct Place {
    name: &'static str,
    disk: Option<Disk>,
    /// The setting of its device that was changed to "write through". It is changed back, since it stays with the number of
    /// the loop device.
    write_cache: Option<PathBuf>,
}

impl Drop for Place {
    fn drop(&mut self) {
        if let Some(path) = &self.write_cache {
            std::fs::write(path, "write back").expect("write_cache");
        }
    }
}

impl Place {
    /// So fast that copies are often made during writes.
    fn memory() -> Self {
        // Writers that nothing slows down fill a smaller pool before btrfs has freed the copies that were deleted.
        Place { name: "in memory", disk: Some(Disk::in_memory_of("tmpfs", "5g")), write_cache: None }
    }

    fn disk() -> Self {
        Place { name: "on a disk", disk: None, write_cache: None }
    }

    /// A btrfs that the driver did not make, on a device set to "write through".
    fn in_place() -> Self {
        // btrfs gives the bytes of deleted copies back when it comes to it, and the writers do not wait.
        let disk = Disk::new("btrfs", &["-q"], 4 << 30);
        let device = LoopDevice::find(&disk.image()).expect("find").expect("mounted");
        let write_cache = device.sysfs().join("queue/write_cache");
        std::fs::write(&write_cache, "write through").expect("write_cache");
        Place { name: "in place", disk: Some(disk), write_cache: Some(write_cache) }
    }

    async fn start(&self, pool: PoolKind) -> Rig {
        match &self.disk {
            Some(disk) => disk.rig(pool, &["--pool-size", "4Gi"]).await,
            None => Rig::start(pool).await,
        }
    }
}

async fn raw_volume(rig: &mut Rig, name: &str, direct: bool) -> (String, PathBuf) {
    let mut request = new_volume(name, CAPACITY as i64, block_capability());
    if !direct {
        request.mutable_parameters.insert("directIO".into(), "false".into());
    }
    let volume = rig.client.create_volume(request).await.expect("CreateVolume").volume_id;
    let device = rig.attach(&volume).await;
    (volume, device)
}

/// Snapshots of one device, and every eighth time a clone.
async fn one_device(pool: PoolKind, place: Place, direct: bool) {
    let mut rig = place.start(pool).await;
    let (source, device) = raw_volume(&mut rig, "written", direct).await;
    let rest = |number: u64| Duration::from_millis(if number.is_multiple_of(50) { 40 } else { 0 });
    // A copy of plain files needs a moment without writes.
    let rest = if pool == PoolKind::Dir { rest } else { no_rest };
    let count = if pool == PoolKind::Dir { 1 } else { WRITERS };
    let writers = Writers::start(&device, &device, count, 1, rest);
    let mut tally = Tally::default();
    for round in 0..copies() {
        let started = Instant::now();
        let is_clone = round % 8 == 7;
        let name = round.to_string();
        let made = match is_clone {
            false => rig.client.create_snapshot(&name, &source).await.map(|made| made.snapshot_id),
            true => {
                let request = new_volume_from(&name, 0, block_capability(), from_volume(&source));
                rig.client.create_volume(request).await.map(|made| made.volume_id)
            }
        };
        let id = match made {
            Err(error) if pool == PoolKind::Dir && error.code() == Code::FailedPrecondition => {
                tally.refused += 1;
                continue;
            }
            made => made.expect("a copy of a device under write"),
        };
        let took = started.elapsed();
        let kind = if is_clone { "volumes" } else { "snapshots" };
        let copy = image(&rig.pool_dir(), kind, &id);
        tally.add(round, took, &violations(&copy, &copy, count, 1));
        match is_clone {
            false => rig.client.delete_snapshot(&id).await.expect("DeleteSnapshot"),
            true => rig.client.delete_volume(&id).await.expect("DeleteVolume"),
        }
    }
    tally.end_writers(writers);
    assert!(tally.taken > 0, "{} copies were refused, and none was taken", tally.refused);
    let mode = if direct { "direct" } else { "buffered" };
    tally.report(&format!("{} {}, one device, {mode}", pool.name(), place.name));
    rig.detach_and_finish(&source).await;
}

/// Groups of a raw device and a mounted filesystem, with the data on one and the log on the other, and the reverse.
async fn device_and_filesystem(pool: PoolKind, place: Place) {
    let mut rig = place.start(pool).await;
    let (raw, device) = raw_volume(&mut rig, "raw", true).await;
    let (mounted, root) = rig.published("ext4", CAPACITY as i64 + 16 * MIB, mount_capability("ext4")).await;
    let file = root.join("written");
    File::create(&file)
        .and_then(|file| {
            let part = vec![0; 1 << 20];
            (0..CAPACITY >> 20).try_for_each(|at| file.write_all_at(&part, at << 20))?;
            file.set_len(CAPACITY)?;
            file.sync_all()
        })
        .expect("write the file");
    let volumes = [raw.clone(), mounted.clone()];
    let mut tally = Tally::default();
    let (phases, mut first) = ([(&device, &device), (&file, &device), (&device, &file)], 1);
    for (phase, (data, log)) in (0..).zip(phases) {
        let writers = Writers::start(data, log, WRITERS, first, no_rest);
        for round in 0..copies().div_ceil(3) {
            let started = Instant::now();
            let name = format!("{phase} {round}");
            let group = rig.client.create_group(&name, &volumes).await.expect("a frozen one and one device");
            let took = started.elapsed();
            let ids = testkit::members(&group);
            let raw_copy = group_image(&rig.pool_dir(), &group.group_snapshot_id, &ids[0]);
            let restored = new_volume_from(&name, 0, mount_capability("ext4"), from_snapshot(&ids[1]));
            let restored = rig.client.create_volume(restored).await.expect("restore").volume_id;
            let seen = rig.publish(&restored, mount_capability("ext4")).await;
            let seen = seen.join("written");
            let copy_of = |path: &Path| if path == device { raw_copy.clone() } else { seen.clone() };
            tally.add(round, took, &violations(&copy_of(data), &copy_of(log), WRITERS, first));
            rig.delete(&restored).await;
            rig.client.delete_group(&group.group_snapshot_id, &ids).await.expect("DeleteVolumeGroupSnapshot");
        }
        // The next phase uses larger numbers, so what this one left in a log is older than all that follows.
        first += 1_000_000_000;
        tally.end_writers(writers);
    }
    tally.report(&format!("{} {}, a group of a device and a filesystem", pool.name(), place.name));
    rig.detach(&mounted).await;
    rig.detach_and_finish(&raw).await;
}

/// Groups of two raw devices. Every group that succeeds is right. btrfs copies both at once, so there the writers never rest and no
/// group is refused.
async fn two_devices(pool: PoolKind, place: Place) {
    let mut rig = place.start(pool).await;
    let (first, data) = raw_volume(&mut rig, "data", true).await;
    let (second, log) = raw_volume(&mut rig, "log", true).await;
    let volumes = [first.clone(), second.clone()];
    // Some pauses are long enough for copies of both, one after another.
    let now_and_then = |number: u64| Duration::from_millis(if number.is_multiple_of(20) { 150 } else { 0 });
    let at_once = pool == PoolKind::Btrfs;
    let writers = Writers::start(&data, &log, 1, 1, if at_once { no_rest } else { now_and_then });
    let mut tally = Tally::default();
    for round in 0..copies() {
        while writers.written() < 3 * (round + 1) {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        let started = Instant::now();
        let group = match rig.client.create_group(&round.to_string(), &volumes).await {
            Err(error) => {
                assert_eq!(error.code(), Code::FailedPrecondition, "{error}");
                tally.refused += 1;
                continue;
            }
            Ok(group) => group,
        };
        let took = started.elapsed();
        let ids = testkit::members(&group);
        let [data, log] =
            [0, 1].map(|member| group_image(&rig.pool_dir(), &group.group_snapshot_id, &ids[member]));
        tally.add(round, took, &violations(&data, &log, 1, 1));
        rig.client.delete_group(&group.group_snapshot_id, &ids).await.expect("DeleteVolumeGroupSnapshot");
    }
    tally.end_writers(writers);
    assert!(tally.taken > 0, "{} groups were refused, and none was taken", tally.refused);
    assert!(tally.refused == 0 || !at_once, "{} groups were refused", tally.refused);
    tally.report(&format!("{} {}, a group of two devices", pool.name(), place.name));
    rig.detach(&first).await;
    rig.detach_and_finish(&second).await;
}

/// Defines one test per line, with its name and what it runs. Those in `long` are for a long run, `make order`.
macro_rules! tests {
    (short { $($name:ident: $run:expr;)* } long { $($long:ident: $long_run:expr;)* }) => {
        $(#[test_with::root]
        #[tokio::test(flavor = "multi_thread")]
        async fn $name() {
            $run.await;
        })*
        $(#[test_with::root]
        #[tokio::test(flavor = "multi_thread")]
        #[ignore = "make order runs it"]
        async fn $long() {
            $long_run.await;
        })*
    };
}

tests! {
    short {
    one_device_on_btrfs: one_device(PoolKind::Btrfs, Place::memory(), true);
    one_buffered_device_on_btrfs: one_device(PoolKind::Btrfs, Place::memory(), false);
    one_device_on_a_btrfs_in_place: one_device(PoolKind::Btrfs, Place::in_place(), true);
    one_device_on_xfs: one_device(PoolKind::Xfs, Place::memory(), true);
    one_device_on_dir: one_device(PoolKind::Dir, Place::memory(), true);
    a_device_and_a_filesystem_on_btrfs: device_and_filesystem(PoolKind::Btrfs, Place::memory());
    two_devices_on_btrfs: two_devices(PoolKind::Btrfs, Place::memory());
    }
    long {
    one_device_on_btrfs_on_a_disk: one_device(PoolKind::Btrfs, Place::disk(), true);
    one_buffered_device_on_btrfs_on_a_disk: one_device(PoolKind::Btrfs, Place::disk(), false);
    one_buffered_device_on_xfs: one_device(PoolKind::Xfs, Place::memory(), false);
    one_device_on_xfs_on_a_disk: one_device(PoolKind::Xfs, Place::disk(), true);
    one_buffered_device_on_xfs_on_a_disk: one_device(PoolKind::Xfs, Place::disk(), false);
    one_buffered_device_on_dir: one_device(PoolKind::Dir, Place::memory(), false);
    one_device_on_dir_on_a_disk: one_device(PoolKind::Dir, Place::disk(), true);
    one_buffered_device_on_dir_on_a_disk: one_device(PoolKind::Dir, Place::disk(), false);
    a_device_and_a_filesystem_on_btrfs_on_a_disk: device_and_filesystem(PoolKind::Btrfs, Place::disk());
    a_device_and_a_filesystem_on_xfs: device_and_filesystem(PoolKind::Xfs, Place::memory());
    a_device_and_a_filesystem_on_xfs_on_a_disk: device_and_filesystem(PoolKind::Xfs, Place::disk());
    two_devices_on_btrfs_on_a_disk: two_devices(PoolKind::Btrfs, Place::disk());
    two_devices_on_xfs: two_devices(PoolKind::Xfs, Place::memory());
    two_devices_on_xfs_on_a_disk: two_devices(PoolKind::Xfs, Place::disk());
    two_devices_on_dir: two_devices(PoolKind::Dir, Place::memory());
    two_devices_on_dir_on_a_disk: two_devices(PoolKind::Dir, Place::disk());
    }
}
