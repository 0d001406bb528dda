//! On btrfs a copy of a device that is being written changes settings of the volume. If the copy is interrupted, they are
//! restored.

use std::fs::File;
use std::path::Path;

use deltapath::sys::attributes::Flag;
use deltapath::sys::loopdev::LoopDevice;

use crate::faults::Disk;
use testkit::orders::{Cut, Orders};
use testkit::prelude::*;

/// Whether writes are synchronous, and whether they bypass the page cache.
fn mode(data: &Path) -> (bool, bool) {
    let file = File::open(data).expect("open");
    let device = LoopDevice::find(data).expect("find").expect("published");
    (Flag::Synchronous.is_set(&file, data).expect("attributes"), device.is_direct_io().expect("dio"))
}

/// What must not happen: a driver is killed while it copies a volume that is being written, and the volume's writes stay
/// synchronous, or go through the page cache, as long as the device exists.
async fn killed_at_every_step(mut rig: Rig, kills_wanted: usize) {
    let (volume, device) = rig.block_volume("volume", 8 * MIB).await;
    let data = rig.volume_dir(&volume).data();
    let mut content = Content::default();
    content.write(&device, 3, 20, 1);
    let mut orders = Orders::new(rig.dir.path());
    orders.count();
    rig.snapshot("counted", &volume).await;
    let points = orders.withdraw();
    let (mut kills, mut left) = (0, 0);
    for point in &points {
        orders.give(Cut::Kill, point.number, "calls");
        let _ = rig.client.create_snapshot(&format!("cut {}", point.number), &volume).await;
        orders.withdraw();
        rig.kill();
        kills += 1;
        left += usize::from(mode(&data) != (false, true));
        rig.start_again().await;
        assert_eq!(mode(&data), (false, true), "after a kill before {point:?}");
        content.assert_equals(&device, 0, 30);
    }
    assert!(kills >= 5 && left >= kills_wanted, "{kills} kills, {left} of them during the copy: {points:?}");
    let snapshot = rig.snapshot("last", &volume).await;
    let copy = rig.snapshot_dir(&snapshot).data();
    let is_set = Flag::Synchronous.is_set(&File::open(&copy).expect("open"), &copy);
    assert!(!is_set.expect("attributes"), "the copy is synchronous");
    rig.detach_and_finish(&volume).await;
}

#[apply(device_test)]
async fn a_killed_copy_leaves_no_synchronous_volume() {
    killed_at_every_step(Rig::start(PoolKind::Btrfs).await, 2).await;
}

#[apply(device_test)]
async fn a_killed_copy_in_place_leaves_direct_io_as_it_was() {
    let disk = Disk::new("btrfs", &["-q"], 1 << 30);
    killed_at_every_step(disk.rig(PoolKind::Btrfs, &[]).await, 4).await;
    disk.finish();
}
