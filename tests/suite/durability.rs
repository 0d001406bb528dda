//! A snapshot of a filesystem that is being written contains every acknowledged write.

use std::fs::File;
use std::io::{Read, Write};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use csi_client::{block_capability, from_snapshot, mount_capability, new_volume};
use deltapath::sys::{freeze, mount};

use testkit::{Beside, MIB, PoolKind, Rig, fsck, root_of};

/// Rounds per pool; `DELTAPATH_FSCK_ROUNDS` sets another number.
fn rounds() -> usize {
    testkit::asked("DELTAPATH_FSCK_ROUNDS").unwrap_or(30)
}

/// A small database. It appends numbered records to a log, syncs each before it counts as written, and makes, renames and
/// removes other files.
struct Database {
    acknowledged: Arc<AtomicU64>,
    beside: Beside,
}

impl Database {
    fn open(dir: &Path) -> Self {
        let acknowledged = Arc::new(AtomicU64::new(0));
        let mut log = File::create(dir.join("log")).expect("create");
        let (counted, dir, mut number) = (acknowledged.clone(), dir.to_owned(), 0u64);
        let mut append = move || -> std::io::Result<()> {
            number += 1;
            log.write_all(&number.to_le_bytes().repeat(1 + number as usize % 20))?;
            log.write_all(&u64::MAX.to_le_bytes())?;
            log.sync_data()?;
            counted.store(number, Ordering::SeqCst);
            let page = dir.join(format!("page.{}", number % 16));
            std::fs::write(page.with_extension("new"), number.to_le_bytes().repeat(512))?;
            std::fs::rename(page.with_extension("new"), &page)?;
            if number.is_multiple_of(5) {
                std::fs::remove_file(page)?;
            }
            Ok(())
        };
        Database { acknowledged, beside: Beside::start(move || append().expect("write")) }
    }

    fn acknowledged(&self) -> u64 {
        self.acknowledged.load(Ordering::SeqCst)
    }

    fn close(self) {
        self.beside.stop();
    }
}

/// The number of the last whole record of a log.
fn last_record(log: &Path) -> u64 {
    let mut bytes = Vec::new();
    File::open(log).and_then(|mut file| file.read_to_end(&mut bytes)).expect("read the log");
    let mut last = 0;
    let mut number = None;
    for word in bytes.chunks_exact(8).map(|word| u64::from_le_bytes(word.try_into().expect("8 bytes"))) {
        match (word, number) {
            (u64::MAX, Some(whole)) => {
                assert!(last == 0 || whole == last + 1, "record {whole} follows {last}");
                (last, number) = (whole, None);
            }
            (word, None) => number = Some(word),
            (word, Some(number)) => assert_eq!(word, number, "a torn record"),
        }
    }
    last
}

/// Writers on a filesystem while snapshots of it are taken. Each filesystem has every third of the rounds.
#[apply(device_cases)]
#[case::ext4(0, "ext4")]
#[case::xfs(1, "xfs")]
#[case::btrfs(2, "btrfs")]
async fn a_snapshot_holds_every_acknowledged_write(
    #[values(PoolKind::Btrfs, PoolKind::Xfs, PoolKind::Dir)] pool: PoolKind,
    #[case] first: usize,
    #[case] fs_type: &str,
) {
    let mut rig = Rig::start(pool).await;
    let kubelet = rig.kubelet();
    let capability = mount_capability(fs_type);
    let (volume, target) = rig.published(fs_type, 320 * MIB, capability.clone()).await;
    let database = Database::open(&target);
    while database.acknowledged() < 5 {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    for round in (first..rounds()).step_by(3) {
        // Sometimes the user has frozen the filesystem. It must stay frozen.
        let staging = kubelet.join(&volume).join("staging");
        let frozen = (round / 3 % 4 == 3).then(|| {
            let mounted = mount::mounted_at(&staging).expect("mounts").expect("staged");
            let frozen = freeze::Frozen::freeze(root_of(&mounted), Duration::from_secs(60)).expect("freeze");
            (mounted, frozen.expect("nobody else froze it"))
        });
        let before = database.acknowledged();
        let snapshot = rig.snapshot(&format!("{fs_type} {round}"), &volume).await;
        if let Some((mounted, frozen)) = frozen {
            let again = freeze::Frozen::freeze(root_of(&mounted), Duration::from_secs(1)).expect("ask");
            assert!(again.is_none(), "the user's freeze is gone");
            frozen.thaw().expect("it is the user's to thaw");
        }
        let mut request = new_volume(&format!("restored {fs_type} {round}"), 0, capability.clone());
        request.volume_capabilities.push(block_capability());
        request.volume_content_source = Some(from_snapshot(&snapshot));
        let restored = rig.client.create_volume(request).await.expect("restore").volume_id;
        let seen = rig.publish(&restored, capability.clone()).await;
        let last = last_record(&seen.join("log"));
        assert!(last >= before, "{before} was acknowledged, {last} is there");
        rig.detach(&restored).await;
        let device = rig.attach(&restored).await;
        fsck(fs_type, &device);
        rig.delete(&restored).await;
        rig.client.delete_snapshot(&snapshot).await.expect("delete");
    }
    database.close();
    rig.detach(&volume).await;
    rig.finish();
}

/// A freeze ends at its time limit even if nobody thaws, and a thaw after that fails.
#[apply(device_cases)]
async fn a_freeze_ends_with_its_bound(rig: Rig<Dir>, #[values("ext4", "xfs", "btrfs")] fs_type: &str) {
    let capability = mount_capability(fs_type);
    let (volume, target) = rig.published(fs_type, 320 * MIB, capability).await;
    let mounted = mount::mounted_at(&target).expect("mounts").expect("published");
    let frozen = freeze::Frozen::freeze(root_of(&mounted), Duration::from_millis(300)).expect("freeze");
    let frozen = frozen.expect("nobody else froze it");
    let file = target.join("file");
    let write = tokio::task::spawn_blocking(move || std::fs::write(file, "written after the bound"));
    let written = tokio::time::timeout(Duration::from_secs(20), write).await;
    let late = frozen.thaw();
    written.expect("still frozen after its bound").expect("join").expect("write");
    assert!(late.is_err(), "{fs_type}: a thaw after the bound fails, for a copy may be torn by then");
    rig.detach(&volume).await;
}
