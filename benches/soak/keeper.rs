//! Who watches the driver, stops and kills it, and sees at the end that nothing is left.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use tokio::task::JoinSet;

use crate::backup::{delete_snapshot, delete_volume};
use crate::curves::{Curves, Sample, devices, entries};
use crate::load::{Volume, unpublish};
use crate::{Counts, Failed, World, add, blocking, get};
use testkit::Rig;

/// How often a line is printed, in seconds.
const PRINT: f64 = 30.0;

/// Watches until all of the `working` tasks have ended. Stops and kills happen during the first third.
pub async fn watch(world: &'static World, rig: &mut Rig, working: usize, tasks: &mut JoinSet<()>) -> Curves {
    let length = world.length.as_secs_f64();
    let between = (length / 24.0).clamp(8.0, 45.0);
    let mut curves = Curves { samples: Vec::new(), steady_from: 0.0, length };
    let (mut next_end, mut next_print, mut ends) = (between, PRINT, 0u32);
    // Some hundred samples a third, so that the lowest is one of a quiet moment.
    let look = Duration::from_secs_f64((length / 1000.0).clamp(0.1, 1.0));
    let mut traffic = Traffic { seen: sectors(rig), at: 0.0 };
    let mut ended = 0;
    while ended < working {
        tokio::select! {
            done = tasks.join_next() => {
                match done {
                    Some(Ok(())) => {}
                    Some(Err(error)) => world.fail(format!("a task of the soak: {error}")),
                    None => break,
                }
                ended += 1;
                continue;
            }
            () = tokio::time::sleep(look) => {}
        }
        let at = world.started.elapsed().as_secs_f64();
        if world.is_over() {
            continue;
        }
        if at >= next_end && at < length / 3.0 {
            ends += 1;
            end_and_start(world, rig, ends.is_multiple_of(2)).await;
            curves.steady_from = world.started.elapsed().as_secs_f64();
            next_end = curves.steady_from + between;
            continue;
        }
        let sample = blocking(|| Sample::take(rig, at));
        if at >= next_print {
            next_print += PRINT;
            println!("{}", traffic.line(world, rig, &sample));
        }
        curves.samples.push(sample);
    }
    tasks.abort_all();
    curves
}

/// Ends the driver, in order or not, while calls are under way, and starts another.
async fn end_and_start(world: &World, rig: &mut Rig, in_order: bool) {
    world.link.down();
    match in_order {
        true => {
            let status = blocking(|| rig.terminate());
            if !status.success() {
                world.fail(format!("the driver got SIGTERM and ended with {status}"));
            }
            add(&world.counts.stops, 1);
        }
        false => {
            rig.kill();
            add(&world.counts.kills, 1);
        }
    }
    rig.start_again().await;
    world.link.up(rig.client.clone());
}

/// What passed through the devices since the last look.
struct Traffic {
    /// Sectors read and written, by device. They keep their values where another file takes the device over.
    seen: BTreeMap<PathBuf, [u64; 2]>,
    at: f64,
}

impl Traffic {
    fn line(&mut self, world: &World, rig: &Rig, sample: &Sample) -> String {
        let Counts { snapshots, deltas, compared, .. } = &world.counts;
        let now = sectors(rig);
        let mut sums = [0; 2];
        for (device, counts) in &now {
            let before = self.seen.get(device).unwrap_or(counts);
            (0..2).for_each(|side| sums[side] += counts[side].saturating_sub(before[side]));
        }
        let [read, written] = sums.map(|sectors| sectors as f64 * 512.0 / 1e6 / (sample.at - self.at));
        let line = format!(
            "{:>5.0} s: devices {written:.1} MB/s written, {read:.1} read; {} snapshots, {} deltas, {:.1} GB compared; {}; {}",
            sample.at,
            get(snapshots),
            get(deltas),
            get(compared) as f64 / 1e9,
            sample.describe(),
            pool_usage(&rig.pool_dir()),
        );
        (self.seen, self.at) = (now, sample.at);
        line
    }
}

/// Sectors read from and written to each device of the rig (Documentation/block/stat).
fn sectors(rig: &Rig) -> BTreeMap<PathBuf, [u64; 2]> {
    let devices = devices(rig);
    let counts = devices.iter().map(|device| {
        let text = std::fs::read_to_string(device.sysfs().join("stat")).unwrap_or_default();
        let fields: Vec<u64> = text.split_whitespace().filter_map(|field| field.parse().ok()).collect();
        (device.path(), [2, 6].map(|field| fields.get(field).copied().unwrap_or(0)))
    });
    counts.collect()
}

fn pool_usage(pool: &Path) -> String {
    match nix::sys::statvfs::statvfs(pool) {
        Ok(found) => {
            let used = (found.blocks() - found.blocks_free()) * found.fragment_size();
            format!("pool {:.2} GB used", used as f64 / 1e9)
        }
        Err(error) => format!("pool: {error}"),
    }
}

/// Kills the driver once more, deletes everything through it, and sees that nothing is left.
pub async fn close(world: &World, rig: &mut Rig, volumes: &[Volume], fresh: &Sample) -> Result<(), Failed> {
    end_and_start(world, rig, false).await;
    for (id, _) in snapshots(world).await? {
        delete_snapshot(world, &id).await?;
    }
    for volume in volumes {
        unpublish(world, &volume.id).await?;
        delete_volume(world, &volume.id).await?;
    }
    let left = snapshots(world).await?;
    if !left.is_empty() {
        return Err(format!("snapshots are still listed: {left:?}"));
    }
    let deadline = Instant::now() + Duration::from_secs(60);
    loop {
        let left = leftovers(rig, fresh);
        if left.is_empty() {
            return Ok(());
        }
        if Instant::now() > deadline {
            return Err(format!("all was deleted, and there is still: {}", left.join(", ")));
        }
        tokio::time::sleep(Duration::from_millis(500)).await;
    }
}

async fn snapshots(world: &World) -> Result<Vec<(String, String)>, Failed> {
    let list = |mut client: csi_client::Client| async move { client.snapshots().await };
    let listed = world.link.call("ListSnapshots", list).await?.into_iter();
    Ok(listed.map(|snapshot| (snapshot.snapshot_id, snapshot.source_volume_id)).collect())
}

/// What an idle driver without any object should not have.
fn leftovers(rig: &Rig, fresh: &Sample) -> Vec<String> {
    let mut left = Vec::new();
    for name in ["volumes", "snapshots", "groups", "staging"] {
        let count = entries(&rig.pool_dir().join(name));
        if count > 0.0 {
            left.push(format!("{count} in {name}/"));
        }
    }
    let devices = devices(rig);
    left.extend(devices.iter().map(|device| format!("device {}", device.path().display())));
    let mounts = deltapath::sys::mount::mounts().unwrap_or_default();
    let below = mounts.iter().filter(|mount| mount.mount_point.starts_with(rig.kubelet()));
    left.extend(below.map(|mount| format!("mount {}", mount.mount_point.display())));
    let (now, before) = (Sample::take(rig, 0.0).open_files(), fresh.open_files());
    // One for the client of the soak that went with the first driver, and some slack for its successor.
    if now > before + 4.0 {
        left.push(format!("{now} open files, {before} when it was fresh"));
    }
    left
}

/// Lines of the driver's log that must not be there.
pub fn errors_in(log: &str) -> Vec<&str> {
    let plain = log.lines().filter(|line| line.contains("ERROR") || line.contains("panicked"));
    plain.take(5).collect()
}

pub fn print_counts(world: &World) {
    let counts = &world.counts;
    let gigabytes = |counter| get(counter) as f64 / 1e9;
    println!(
        "fio: {} passes, {:.2} GB written, {:.2} GB verified. Backups: {} snapshots, {} deltas ({} from deleted bases), \
         {:.2} GB copied, {:.1} GB compared. {} restores, {} clones, {} groups, {} expansions, {} volumes published again. \
         {} snapshots of a device whose {} pairs of writes were logged in order. The pool was full {} times and refused {} \
         snapshots. The driver was stopped {} times and killed {} times.",
        get(&counts.passes),
        gigabytes(&counts.fio_written),
        gigabytes(&counts.fio_verified),
        get(&counts.snapshots),
        get(&counts.deltas),
        get(&counts.deltas_of_deleted),
        gigabytes(&counts.copied),
        gigabytes(&counts.compared),
        get(&counts.restores),
        get(&counts.clones),
        get(&counts.groups),
        get(&counts.expansions),
        get(&counts.moves),
        get(&counts.ordered),
        get(&counts.pairs),
        get(&counts.full),
        get(&counts.refused),
        get(&counts.stops),
        get(&counts.kills),
    );
}
