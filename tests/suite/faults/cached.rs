//! Devices that write through the page cache, on a pool that becomes full.
//!
//! The incident: if the filesystem writes only a part of a request, the loop driver reports the whole request as written.
//! With `directIO: "false"`, and always on tmpfs, write and fsync succeeded and hundreds of blocks were lost.

use std::fs::File;
use std::ops::Range;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;

use files::AlignedBuffer;

use super::pool_full::small_pool_of;
use super::{Disk, StorageTrouble, health, storage, storage_tells};
use testkit::content::block_bytes;
use testkit::order::image;
use testkit::prelude::*;

/// Blocks per request of each writer. None is a power of two, so that the filesystem writes a request in several parts.
const TOGETHER: [u64; 3] = [250, 33, 7];

/// A pool that refuses so many requests of a writer, one after the other, is full.
const REFUSED: u32 = 64;

/// Writes a part of a device, and syncs each request, until the pool is full. Returns the acknowledged blocks.
fn fill(device: &Path, part: Range<u64>, together: u64) -> Vec<u64> {
    let file = File::options().write(true).custom_flags(libc::O_DIRECT).open(device).expect("open");
    let length = (together * BLOCK) as usize;
    let mut request = AlignedBuffer::new(length);
    let mut acknowledged = Vec::new();
    let (mut first, mut refused) = (part.start, 0);
    while first + together <= part.end && refused < REFUSED {
        for (block, bytes) in (first..).zip(request.chunks_exact_mut(BLOCK as usize)) {
            bytes.copy_from_slice(&block_bytes(block, 7));
        }
        if file.write_all_at(&request, first * BLOCK).and_then(|()| file.sync_all()).is_ok() {
            acknowledged.extend(first..first + together);
            refused = 0;
        } else {
            refused += 1;
        }
        first += together;
    }
    acknowledged
}

/// Fills a pool through a device, and checks that all acknowledged blocks are there.
async fn nothing_is_lost(mut rig: Rig, direct_io: Option<bool>) {
    let blocks = 450 * MIB as u64 / BLOCK;
    let mut request = new_volume("cached", 450 * MIB, block_capability());
    if let Some(direct) = direct_io {
        request.mutable_parameters.insert("directIO".into(), direct.to_string());
    }
    let volume = rig.client.create_volume(request).await.expect("CreateVolume").volume_id;
    let device = rig.attach(&volume).await;
    let part = blocks / TOGETHER.len() as u64;
    let acknowledged: Vec<u64> = std::thread::scope(|scope| {
        let start = |(number, together)| {
            let (device, part) = (&device, part * number..part * (number + 1));
            scope.spawn(move || fill(device, part, together))
        };
        let writers: Vec<_> = (0..).zip(TOGETHER).map(start).collect();
        writers.into_iter().flat_map(|writer| writer.join().expect("a writer")).collect()
    });
    assert!(acknowledged.len() as u64 + 1000 < blocks, "the pool never ran full");
    rig.detach(&volume).await;
    let file = File::open(image(&rig.pool_dir(), "volumes", &volume)).expect("open");
    let mut found = vec![0; BLOCK as usize];
    let mut is_lost = |block: &&u64| {
        file.read_exact_at(&mut found, **block * BLOCK).expect("read");
        found != block_bytes(**block, 7)
    };
    let lost = acknowledged.iter().filter(|block| is_lost(block)).count();
    println!("{} blocks of {blocks} acknowledged, {lost} lost", acknowledged.len());
    assert_eq!(lost, 0, "of {} blocks that were acknowledged", acknowledged.len());
    drop(file);
    rig.finish();
}

#[apply(every_pool)]
async fn a_cached_device_on_a_full_pool_loses_nothing(pool: PoolKind) {
    let (disk, rig) = small_pool_of(pool, if pool == PoolKind::Dir { 200 } else { 320 }).await;
    nothing_is_lost(rig, Some(false)).await;
    if let Some(disk) = disk {
        disk.finish();
    }
}

/// tmpfs accepts direct I/O, but uses its cache for it.
#[apply(device_cases)]
#[case::dir(PoolKind::Dir, "128m")]
#[case::xfs(PoolKind::Xfs, "200m")]
async fn a_device_on_a_full_tmpfs_loses_nothing(#[case] pool: PoolKind, #[case] size: &str) {
    let disk = Disk::in_memory_of("tmpfs", size);
    let mut rig = disk.rig(pool, &["--pool-size", "400Mi"]).await;
    let (volume, _) = rig.block_volume("volume", MIB).await;
    // The volume is healthy; only the storage is degraded.
    assert_eq!(health(&rig, &volume).await, []);
    let said = storage_tells(&storage(&rig).await, "NoDirectIO", StorageTrouble::StorageDegraded);
    assert!(said.contains("no direct I/O"), "{said}");
    assert!(rig.log().contains("has no direct I/O"), "{}", rig.log());
    rig.detach(&volume).await;
    nothing_is_lost(rig, None).await;
    disk.finish();
}
