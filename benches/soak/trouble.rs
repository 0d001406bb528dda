//! What happens during the load: writers whose order snapshots must keep, somebody's dead loop devices, and a pool that
//! is full now and then.

use std::time::Duration;

use crate::backup::{delete_snapshot, snapshot};
use crate::load::{Volume, create, publish, unpublish};
use crate::{Failed, World, add, blocking};
use testkit::order::{WRITER_BYTES, Writers, image, violations};
use testkit::places::{Ballast, DeadDevices};
use testkit::prelude::*;

/// Writers of the device whose order is watched, and the snapshots that they are kept at work for.
const WRITERS: u64 = 2;
const LAP: usize = 5;

/// How often the pool is full, and how long each time.
const FULL: u32 = 8;

/// Takes snapshots of a device under write, none of which may hold a log without what it names.
pub async fn order(world: &'static World) {
    if let Err(what) = keep_order(world).await {
        world.fail(format!("the order of writes: {what}"));
    }
}

async fn keep_order(world: &'static World) -> Result<(), Failed> {
    let request = new_volume("soak order", (WRITERS * WRITER_BYTES) as i64, block_capability());
    let volume = create(world, &request).await?;
    let device = publish(world, &volume, block_capability(), false).await?;
    let (mut first, mut number) = (1, 0);
    while !world.is_over() {
        let _room = world.room.read().await;
        // A device is too fast for a copy of plain files, which wants it still for a moment.
        let pause: fn(u64) -> Duration = match world.pool {
            PoolKind::Dir => |number| Duration::from_millis(if number.is_multiple_of(8) { 400 } else { 0 }),
            _ => |_| Duration::from_millis(2),
        };
        let count = if world.pool == PoolKind::Dir { 1 } else { WRITERS };
        let writers = blocking(|| Writers::start(&device, &device, count, first, pause));
        for _ in 0..LAP {
            number += 1;
            let id = match snapshot(world, &volume, &format!("soak order {number}")).await {
                Err(still) if world.pool == PoolKind::Dir && is(&still, Code::FailedPrecondition) => continue,
                made => made?.snapshot_id,
            };
            let path = image(&world.pool_dir, "snapshots", &id);
            let found = blocking(|| violations(&path, &path, count, first));
            if let Some(what) = found.first() {
                return Err(format!("{id}: {} blocks: {what}", found.len()));
            }
            add(&world.counts.ordered, 1);
            delete_snapshot(world, &id).await?;
            tokio::time::sleep(Duration::from_millis(500)).await;
        }
        let pairs = writers.written();
        blocking(|| writers.finish());
        add(&world.counts.pairs, pairs);
        // No writer has written more than all have.
        first += pairs;
    }
    unpublish(world, &volume).await?;
    crate::backup::delete_volume(world, &volume).await
}

/// Has loop devices of somebody else's dead for half of the time, under names that ours have.
pub async fn dead_devices(world: &'static World) {
    let sleep_until = async |part: f64| {
        let at = world.length.mul_f64(part);
        while world.started.elapsed() < at && !world.is_over() {
            tokio::time::sleep(Duration::from_millis(200)).await;
        }
    };
    sleep_until(0.25).await;
    let dead = blocking(|| DeadDevices::attach(&["disk.img", "pool.img"]));
    sleep_until(0.75).await;
    blocking(|| dead.detach());
}

/// Fills the pool now and then.
pub async fn full_pools(world: &'static World, volumes: &'static [Volume]) {
    let every = world.length / (FULL + 1);
    for time in 1..=FULL {
        while world.started.elapsed() < every * time && !world.is_over() {
            tokio::time::sleep(Duration::from_millis(200)).await;
        }
        if world.is_over() {
            return;
        }
        if let Err(what) = full_pool(world, volumes, time).await {
            world.fail(format!("full pool {time}: {what}"));
        }
    }
}

/// Fills the pool while nobody writes, and makes the calls that need no room; a snapshot may be refused. Filesystems are
/// unpublished meanwhile: what they write by themselves would be lost.
async fn full_pool(world: &World, volumes: &[Volume], time: u32) -> Result<(), Failed> {
    let _alone = world.room.write().await;
    let (raw, filesystems): (Vec<_>, Vec<_>) = volumes.iter().partition(|volume| volume.fs_type.is_none());
    for volume in &filesystems {
        unpublish(world, &volume.id).await?;
    }
    let old = snapshot(world, &raw[0].id, &format!("soak before {time}")).await?.snapshot_id;
    let ballast = blocking(|| Ballast::fill(&world.pool_dir));
    add(&world.counts.full, 1);
    let answers = async {
        for volume in &raw {
            volume.publish_again(world).await?;
        }
        let old = &old;
        let allocated = |mut client: Client| async move { client.allocated(old, 0, 0).await };
        let seen = world.link.call("GetMetadataAllocated", allocated).await?;
        if seen.tuples().next().is_none() {
            return Err("a volume under fio has no blocks".to_owned());
        }
        match snapshot(world, &raw[1].id, &format!("soak full {time}")).await {
            Ok(taken) => delete_snapshot(world, &taken.snapshot_id).await?,
            Err(refused) if is(&refused, Code::ResourceExhausted) => {
                add(&world.counts.refused, 1);
            }
            Err(other) => return Err(other),
        }
        delete_snapshot(world, old).await
    };
    let answers = answers.await;
    blocking(|| ballast.remove());
    answers?;
    for volume in &filesystems {
        let target = publish(world, &volume.id, volume.capability(), false).await?;
        *volume.target.lock().expect("target") = target;
    }
    Ok(())
}

fn is(failed: &Failed, code: Code) -> bool {
    failed.contains(&format!(": {code:?}: "))
}
