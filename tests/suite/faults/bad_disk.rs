//! The disk returns errors instead of bytes. The data directory is on a btrfs of the test's own. The test damages single
//! blocks of the disk below it, in data, maps, hashes or records, and the wrong checksum makes the kernel return an I/O
//! error. Another test truncates a pool image while the pool is mounted.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use super::{
    Disk, StorageTrouble, Trouble, assert_nothing_half_made, compared, exact_or_error, hashed, health,
    is_unwell, listed, probe, storage, storage_tells, sync_fs, tells, until, unwell, without_skip,
};
use testkit::content::block_bytes;
use testkit::prelude::*;
use testkit::said;

const SECTOR: usize = 4096;

/// A disk on which even small files have blocks of their own, with checksums.
fn disk() -> Disk {
    Disk::with_options("btrfs", &["-q", "-d", "single"], 1 << 30, "loop,max_inline=0,compress=no")
}

/// Drops the page cache of a file, so that the next read reads the disk.
fn forget(path: &Path) {
    let file = File::open(path).expect("open");
    let advice = nix::fcntl::PosixFadviseAdvice::POSIX_FADV_DONTNEED;
    nix::fcntl::posix_fadvise(&file, 0, 0, advice).expect("fadvise");
}

/// Damages the disk block that holds the file's data at `offset`, so that reads of it fail.
fn spoil(disk: &Disk, path: &Path, offset: u64) {
    sync_fs(&disk.mount_point);
    let file = File::open(path).expect("open");
    let mut wanted = vec![0; SECTOR];
    let length = file.read_at(&mut wanted, offset).expect("read before it is spoiled");
    assert!(
        wanted[..length].iter().any(|byte| *byte != 0),
        "the block is zeros, so it cannot be found on the disk"
    );
    let image = File::options().read(true).write(true).open(disk.image()).expect("open the disk");
    let end = image.metadata().expect("stat").len();
    let mut chunk = vec![0; 4 << 20];
    let mut spoiled = 0;
    for start in (0..end).step_by(chunk.len()) {
        let read = image.read_at(&mut chunk, start).expect("read the disk");
        for (number, sector) in chunk[..read].chunks(SECTOR).enumerate() {
            if sector == wanted {
                image.write_all_at(&[0xA5; 512], start + (number * SECTOR) as u64 + 100).expect("spoil");
                spoiled += 1;
            }
        }
    }
    assert!(spoiled > 0, "the block of {} was not found on the disk", path.display());
    image.sync_all().expect("sync");
    forget(path);
    let error = file.read_at(&mut wanted, offset).expect_err("it is spoiled");
    assert_eq!(error.raw_os_error(), Some(libc::EIO), "{error}");
}

/// A volume with two hashed snapshots, and their contents.
struct Line {
    volume: String,
    device: PathBuf,
    /// The content of the volume.
    now: Content,
    /// The byte that fills the base.
    fill: u8,
    base: (String, Content),
    target: (String, Content),
}

async fn line(rig: &mut Rig, name: &str, fill: u8) -> Line {
    let (volume, device, mut before) = rig.written_volume(name, 64 * MIB, (0, 400, fill)).await;
    // So many single blocks that a map is longer than a block of the disk, and its table is in another block.
    let scattered = || (1000..6000).step_by(2);
    scattered().for_each(|block| before.write(&device, block, 1, fill));
    without_skip(rig, &volume).await;
    let base = rig.snapshot(&format!("{name} base"), &volume).await;
    let mut after = before.clone();
    after.write(&device, 100, 50, fill + 1);
    scattered().for_each(|block| after.write(&device, block, 1, fill + 1));
    let target = rig.snapshot(&format!("{name} target"), &volume).await;
    // After this the volume shares no block with a snapshot.
    let mut now = after.clone();
    now.write(&device, 0, 400, fill + 2);
    hashed(rig, &[&base]).await;
    compared(rig, &[&target]).await;
    Line { volume, device, now, fill, base: (base, before), target: (target, after) }
}

impl Line {
    /// Takes a third snapshot and makes all metadata calls for it. Each answer must be right or an error. Returns whether
    /// all were right.
    async fn next(&mut self, rig: &mut Rig, name: &str) -> (String, bool) {
        self.now.write(&self.device, 110, 20, self.fill + 3);
        let next = rig.snapshot(&format!("{name} next"), &self.volume).await;
        hashed(rig, &[&next]).await;
        let mut failed = false;
        for (id, content) in [&self.base, &self.target] {
            let delta = rig.client.delta(id, &next, 0, 0).await;
            failed |= exact_or_error(delta, &self.now.changed_since(content, BLOCK));
        }
        let list = rig.client.allocated(&next, 0, 0).await;
        failed |= exact_or_error(list, &self.now.allocated(BLOCK));
        (next, !failed)
    }

    /// Makes all metadata calls. Each answer must be right or an error. Returns whether all were right.
    async fn answers(&self, rig: &mut Rig) -> bool {
        let changed = self.target.1.changed_since(&self.base.1, BLOCK);
        let delta = rig.client.delta(&self.base.0, &self.target.0, 0, 0).await;
        let mut failed = exact_or_error(delta, &changed);
        for (id, content) in [&self.base, &self.target] {
            failed |= exact_or_error(rig.client.allocated(id, 0, 0).await, &content.allocated(BLOCK));
        }
        !failed
    }
}

/// The first whole block of a file that does not read as zeros.
fn first_block(path: &Path) -> u64 {
    let file = File::open(path).expect("open");
    let mut block = vec![0; SECTOR];
    let mut offset = 0;
    while file.read_at(&mut block, offset).expect("read") > 0 {
        if block.iter().any(|byte| *byte != 0) {
            return offset;
        }
        offset += SECTOR as u64;
    }
    panic!("{} holds zeros", path.display());
}

#[apply(device_cases)]
async fn a_bad_block_costs_what_lies_on_it(#[values(PoolKind::Dir, PoolKind::Xfs)] pool: PoolKind) {
    let disk = disk();
    let mut rig = disk.rig(pool, &[]).await;
    assert!(!rig.data_dir().join("pool.img").exists(), "not in place");
    let sound = line(&mut rig, "sound", 10).await;
    for (number, name) in ["allocated.map", "changed.map", "pending.map", "hashes"].into_iter().enumerate() {
        let mut line = line(&mut rig, name, 20 + 4 * number as u8).await;
        let path = rig.snapshot_dir(&line.target.0).path().join(name);
        spoil(&disk, &path, first_block(&path));
        // A damaged map can be made again from the data. A damaged hash cannot, since the data may be damaged too. The next
        // snapshot must be taken and hashed in both cases.
        assert!(line.answers(&mut rig).await || name == "hashes", "{}", path.display());
        let (next, whole) = line.next(&mut rig, name).await;
        assert!(whole || name == "hashes", "{}", path.display());
        let shown = format!("{}/{name}", line.target.0);
        let is_reported = |said: &str| {
            said.contains(&shown) && (said.contains("damaged") || said.contains("Input/output error"))
        };
        assert!(rig.log().lines().any(is_reported), "{} is not read: this proves nothing", path.display());
        assert!(sound.answers(&mut rig).await, "what is sound is served");
        rig.detach(&line.volume).await;
        rig.client.delete_snapshot(&next).await.expect("delete what came after it");
        rig.client.delete_snapshot(&line.base.0).await.expect("delete beside it");
        rig.client.delete_snapshot(&line.target.0).await.expect("what is spoiled can be deleted");
        rig.client.delete_volume(&line.volume).await.expect("delete");
    }

    // A damaged block of data: maps and hashes still give right answers, but its bytes are lost.
    let damaged = line(&mut rig, "damaged", 40).await;
    let data = rig.snapshot_dir(&damaged.base.0).data();
    spoil(&disk, &data, 120 * BLOCK);
    assert!(damaged.answers(&mut rig).await, "maps and hashes are sound");
    let restore = new_volume_from("restored", 64 * MIB, block_capability(), from_snapshot(&damaged.base.0));
    match rig.client.create_volume(restore).await {
        // The volume shares the block with the snapshot, so reading it fails too.
        Ok(volume) => {
            let device = rig.attach(&volume.volume_id).await;
            let device = open_device(&device);
            device
                .read_exact_at(&mut [0; SECTOR], 120 * BLOCK)
                .expect_err("a block that is gone was made up");
            device.read_exact_at(&mut [0; SECTOR], 300 * BLOCK).expect("another one");
            drop(device);
            rig.detach(&volume.volume_id).await;
        }
        refused => is_refused(refused, Code::Internal, &["Input/output error", "the disk failed"]),
    }
    assert_nothing_half_made(&rig).await;
    let seen = testkit::verify(&rig.data_dir());
    assert!(seen.status.code() == Some(1) && said(&seen).contains(&damaged.base.0), "{seen:?}");

    // A damaged record is still in memory. After a restart its object is withheld, and all others are served.
    let record = rig.snapshot_dir(&damaged.base.0).record();
    spoil(&disk, &record, 0);
    assert!(damaged.answers(&mut rig).await);
    rig.kill();
    forget(&record);
    rig.start_again().await;
    is_refused(rig.client.allocated(&damaged.base.0, 0, 0).await, Code::Internal, &["record.json"]);
    assert!(sound.answers(&mut rig).await, "what is sound is served");
    assert_eq!(rig.allocated(&damaged.target.0).await, damaged.target.1.allocated(BLOCK));
    probe(&rig).await.expect("it lives");
    let log = rig.log();
    assert!(!log.contains("panicked"), "{log}");
    for line in [&sound, &damaged] {
        rig.detach(&line.volume).await;
    }
    rig.finish();
    disk.finish();
}

/// Block 120 of a volume cannot be read. Its health names the block, as long as it cannot be read.
async fn lost_block(rig: &Rig, volume: &str, data: &Path) {
    for _ in 0..2 {
        let place = format!("{} cannot be read at byte {}:", data.display(), 120 * BLOCK);
        let end = place.rsplit_once("/volumes/").expect("a path").1;
        is_unwell(rig, volume, "ReadError", Trouble::DataLoss, &[end, "Input/output error"]).await;
    }
    assert_eq!(unwell(rig, 0).await.len(), 1);
    // The filesystem's count of errors belongs to no single volume.
    let said = storage_tells(&storage(rig).await, "PoolIoErrors", StorageTrouble::StorageDegraded);
    assert!(said.contains("has counted errors, "), "{said}");
}

/// A snapshot is taken of a block that cannot be read. On a pool that clones the call succeeds, hashing neither stops nor
/// retries without pause, and deltas that need the block fail. On a pool that copies the call fails.
#[apply(device_cases)]
#[case::is_not_copied_in_silence_on_dir(PoolKind::Dir)]
#[case::is_not_hashed_for_ever_on_a_pool_that_clones(PoolKind::Xfs)]
async fn a_bad_block_in_a_volume(#[case] pool: PoolKind) {
    let disk = disk();
    let mut rig = disk.rig(pool, &[]).await;
    let (volume, device, mut before) = rig.written_volume("volume", 64 * MIB, (0, 400, 1)).await;
    File::open(&device).and_then(|file| file.sync_all()).expect("sync");
    let data = rig.volume_dir(&volume).data();
    spoil(&disk, &data, 120 * BLOCK);
    let taken = rig.client.create_snapshot("base", &volume).await;
    match pool {
        PoolKind::Dir => {
            is_refused(taken, Code::Internal, &["Input/output error"]);
            assert_nothing_half_made(&rig).await;
            assert_eq!(listed(&rig).await.1, Vec::<String>::new());
            lost_block(&rig, &volume, &data).await;
            // The block can be read again after it is written.
            before.write(&device, 120, 1, 2);
            assert_eq!(health(&rig, &volume).await, []);
            rig.snapshot("base", &volume).await;
        }
        _ => {
            let base = taken.expect("a clone reads nothing").snapshot_id;
            let failures = |rig: &Rig| rig.log().matches("could not be hashed").count();
            until("a failure is counted", || failures(&rig) > 0).await;
            lost_block(&rig, &volume, &data).await;
            let mut after = before.clone();
            after.write(&device, 110, 20, 2);
            let target = rig.snapshot("target", &volume).await;
            let delta = rig.client.delta(&base, &target, 0, 0).await;
            assert!(
                exact_or_error(delta, &after.changed_since(&before, BLOCK)),
                "the delta did not need the unreadable block"
            );
            assert_eq!(rig.allocated(&base).await, before.allocated(BLOCK));
            tokio::time::sleep(std::time::Duration::from_secs(3)).await;
            assert!(failures(&rig) <= 4, "hashing retries without pause: {} failures in 3 s", failures(&rig));
            // Hashing continues for others.
            let (other, ..) = rig.written_volume("other", 64 * MIB, (0, 100, 1)).await;
            let snapshot = rig.snapshot("other", &other).await;
            hashed(&rig, &[&snapshot]).await;
            rig.detach(&other).await;
            // Without the bad block everything works again.
            rig.client.delete_snapshot(&base).await.expect("delete");
            hashed(&rig, &[&target]).await;
        }
    }
    assert_eq!(health(&rig, &volume).await, []);
    assert_eq!(unwell(&rig, 0).await, []);
    let log = rig.log();
    assert!(!log.contains("panicked"), "{log}");
    rig.detach_and_finish(&volume).await;
    disk.finish();
}

/// The image is truncated under a mounted pool, so that everything behind the new end is an I/O error. Every answer is right
/// or an error, and the driver keeps running.
#[apply(device_cases)]
async fn a_cut_image_gives_the_truth_or_an_error(#[values(PoolKind::Xfs, PoolKind::Btrfs)] pool: PoolKind) {
    let mut rig = Rig::start(pool).await;
    let mut lines = Vec::new();
    for number in 0..4 {
        lines.push(line(&mut rig, &format!("line {number}"), 10 * (number + 1)).await);
    }
    for line in &lines {
        rig.detach(&line.volume).await;
    }
    sync_fs(&rig.pool_dir());
    rig.restart().await;
    let image = File::options().write(true).open(rig.data_dir().join("pool.img")).expect("open");
    let length = image.metadata().expect("stat").len();
    let (mut failed, mut reported) = (0, 0);
    let kubelet = rig.kubelet();
    // Shorter each time, so that data, then maps, and finally the filesystem's own blocks are lost.
    for part in [2, 16, 64, 512] {
        image.set_len(length / part).expect("cut");
        let (seen, below) = (health(&rig, &lines[0].volume).await, storage(&rig).await);
        // A write of the kernel behind the end may have made the image long again.
        if image.metadata().expect("stat").len() < length {
            let said = tells(&seen, "PoolImageTruncated", Trouble::DataLoss);
            assert!(said.contains(&format!(" bytes of {length}: the end of the pool is missing")), "{said}");
            storage_tells(&below, "PoolImageTruncated", StorageTrouble::StorageDegraded);
            reported += 1;
        }
        for line in &lines {
            for id in [&line.base.0, &line.target.0] {
                let dir = rig.snapshot_dir(id);
                [dir.data(), dir.hashes(), dir.allocated(), dir.changed(), dir.pending()]
                    .iter()
                    .filter(|path| path.exists())
                    .for_each(|path| forget(path));
            }
            failed += usize::from(!line.answers(&mut rig).await);
            let (name, source) = (format!("{} for {part}", line.base.0), from_snapshot(&line.base.0));
            let restore = new_volume_from(&name, 64 * MIB, block_capability(), source);
            match rig.client.create_volume(restore).await {
                Ok(volume) => {
                    let device = rig.try_publish(&volume.volume_id, block_capability()).await;
                    let mut found = vec![0; SECTOR];
                    let read =
                        device.map(|device| open_device(&device).read_exact_at(&mut found, 120 * BLOCK));
                    // After a write of the kernel behind the end the image is long again, and the lost part reads as
                    // zeros. No reader of the volume can detect that.
                    match read {
                        Ok(Ok(())) if found == block_bytes(120, line.fill) => {}
                        Ok(Ok(())) => assert!(found.iter().all(|byte| *byte == 0), "bytes of another volume"),
                        Ok(Err(_)) | Err(_) => failed += 1,
                    }
                    let _ = rig.client.unpublish(&volume.volume_id, &kubelet).await;
                }
                Err(error) => {
                    assert_eq!(error.code(), Code::Internal, "{error}");
                    failed += 1;
                }
            }
        }
    }
    assert!(failed > 0 && reported > 0, "nothing was behind the cut: this proves nothing");
    let (_, snapshots) = listed(&rig).await;
    assert_eq!(snapshots.len(), 8, "a snapshot is not listed any more");
    let log = rig.log();
    assert!(!log.contains("panicked"), "{log}");
    rig.kill();
}
