//! The calls of clients that are not ours, as lives of a volume: those of Velero's block data mover. It gives a snapshot to its own
//! namespace by a second content of the same handle, reads it as a Block volume whatever the source is, and deletes both. So the base
//! of its next delta is always a deleted snapshot, and any error of that delta makes it read the whole device.

use std::collections::{BTreeMap, VecDeque};
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use proto::volume_capability::access_mode::Mode;

use crate::node::with_mode;
use testkit::mover::Image;
use testkit::prelude::*;

/// No volume here is whole units of the mover.
const ODD: i64 = 3 * BLOCK as i64;
/// The count of `--retain-deleted` as nobody set it.
const RETAINED: usize = 8;

#[derive(Debug, PartialEq, Eq)]
enum Kind {
    Full,
    Incremental,
    /// All of the device, since the delta failed.
    Whole,
}

/// Backups of one volume to one place.
struct Schedule {
    name: &'static str,
    image: Image,
    /// The last backup's snapshot, which is deleted.
    base: Option<String>,
    number: usize,
    /// The claim that is read is ReadOnlyMany, not ReadWriteOnce.
    read_only: bool,
}

impl Schedule {
    fn new(rig: &Rig, name: &'static str, read_only: bool) -> Self {
        Schedule { name, image: Image::new(place(rig, name)), base: None, number: 0, read_only }
    }

    /// Makes a backup; the image is what the volume was. What is read of a delta is no more than what changed.
    async fn back_up(&mut self, rig: &mut Rig, volume: &str) -> Kind {
        self.number += 1;
        let name = format!("{} {}", self.name, self.number);
        let taken = rig.client.create_snapshot(&name, volume).await.expect("CreateSnapshot");
        let handle = taken.snapshot_id.clone();
        // The second content is bound: its controller asks for the handle. The first one is then deleted, which the driver does not
        // see: it was told to retain the snapshot.
        let request = proto::ListSnapshotsRequest { snapshot_id: handle.clone(), ..Default::default() };
        let listed = rig.client.controller.list_snapshots(request).await.expect("ListSnapshots");
        let listed: Vec<_> =
            listed.into_inner().entries.into_iter().filter_map(|entry| entry.snapshot).collect();
        assert_eq!(listed, std::slice::from_ref(&taken), "{name}");
        assert!(taken.ready_to_use, "{name}");

        let mode = if self.read_only { Mode::MultiNodeReaderOnly } else { Mode::SingleNodeWriter };
        let capability = with_mode(block_capability(), mode);
        let (name, source) = (format!("{name}, read"), from_snapshot(&handle));
        let claim = rig.made_from(&name, taken.size_bytes, capability.clone(), source).await;
        let kubelet = rig.kubelet();
        let device = rig.client.publish(&claim, capability, self.read_only, &kubelet).await.expect("publish");
        let list = match &self.base {
            None => rig.client.allocated(&handle, 0, 0).await,
            Some(base) => rig.client.delta(base, &handle, 0, 0).await,
        };
        let kind = match list {
            Ok(list) => {
                assert_eq!(list.capacity as i64, taken.size_bytes, "{name}");
                let moved = self.image.take(&device, list.tuples().map(|tuple| (tuple.offset, tuple.size)));
                if self.base.is_none() {
                    Kind::Full
                } else {
                    moved.assert_is_close(&name);
                    Kind::Incremental
                }
            }
            Err(error) => {
                assert!(self.base.is_some() && error.code() == Code::NotFound, "{name}: {error}");
                self.image.take(&device, [(0, u64::MAX)]);
                Kind::Whole
            }
        };
        rig.delete(&claim).await;
        // Once, by the content that was told to delete it.
        rig.client.delete_snapshot(&handle).await.expect("DeleteSnapshot");
        self.base = Some(handle);
        kind
    }

    /// The same of a volume that holds this.
    async fn back_up_as(&mut self, rig: &mut Rig, volume: &str, content: &Content) -> Kind {
        let kind = self.back_up(rig, volume).await;
        let size = std::fs::metadata(&self.image.path).expect("stat").len();
        content.assert_equals(&self.image.path, 0, size / BLOCK);
        kind
    }
}

fn place(rig: &Rig, name: &str) -> PathBuf {
    rig.dir.path().join(format!("{name}.img"))
}

/// What an application does between two backups: new blocks, some over others, some gone and some zeroed.
fn change(content: &mut Content, device: &Path, round: u64) {
    let fill = round as u8 + 1;
    content.write(device, round * 301 % 3900, 70, fill);
    // In a unit of the mover that nothing else touches, in most rounds.
    content.write(device, round * 7 % 16 * 256 + 200, 1, fill);
    content.write(device, 4097, 2, fill);
    content.discard(device, round * 97 % 3900, 5);
    content.zero(device, (round * 301 + 30) % 3900, 3);
}

/// The same in a filesystem.
fn change_files(dir: &Path, round: u8) {
    let (path, at) = (dir.join("large"), u64::from(round) << 20);
    let large = File::options().create(true).truncate(false).write(true).open(path).expect("open");
    let length = if round == 0 { 8 << 20 } else { 70_000 };
    large.write_all_at(&vec![round + 1; length], at).expect("write");
    std::fs::write(dir.join(format!("small-{round}")), [round; 5000]).expect("write");
    if let Some(before) = round.checked_sub(2) {
        std::fs::remove_file(dir.join(format!("small-{before}"))).expect("remove");
    }
}

fn files_in(dir: &Path) -> BTreeMap<String, Vec<u8>> {
    let names = testkit::names(dir).into_iter().filter(|name| name != "lost+found");
    names.map(|name| (name.clone(), std::fs::read(dir.join(&name)).expect("read"))).collect()
}

/// Files of a filesystem that grows on the way, backed up by blocks. They come back on a new Block volume that is then bound as a
/// Filesystem under the same handle, and on the volume itself, which was made for a Filesystem and is bound as Block for it. What the
/// restore wrote is in the next delta.
#[apply(every_pool)]
async fn a_filesystem_is_backed_up_by_blocks_and_restored_elsewhere_and_in_place(
    pool: PoolKind,
    #[values("ext4", "xfs", "btrfs")] fs_type: &str,
) {
    let (least, style) = match fs_type {
        "ext4" => (64 * MIB, "variable"),
        "xfs" => (300 * MIB, "fixed"),
        _ => (256 * MIB, "variable"),
    };
    let mut rig = Rig::start_with(pool, &["--block-metadata-type", style], "info").await;
    let files = mount_capability(fs_type);
    let (source, mut target) = rig.published("source", least + ODD, files.clone()).await;
    let mut schedule = Schedule::new(&rig, "daily", fs_type == "xfs");
    let mut kept = Vec::new();
    for round in 0..4 {
        if round == 2 {
            rig.detach(&source).await;
            rig.client.expand_volume(&source, least + 40 * MIB).await.expect("expand");
            target = rig.publish(&source, files.clone()).await;
        }
        change_files(&target, round);
        let kind = schedule.back_up(&mut rig, &source).await;
        assert_eq!(kind, if round == 0 { Kind::Full } else { Kind::Incremental }, "{round}");
        kept.push((files_in(&target), schedule.image.copy(place(&rig, &format!("kept {round}")))));
    }

    for (files_then, image) in &kept {
        let (restored, device) = rig.block_volume("restored", least + 40 * MIB).await;
        image.restore(&device);
        rig.detach(&restored).await;
        let restored_to = rig.publish(&restored, files.clone()).await;
        assert!(files_in(&restored_to) == *files_then, "other files are restored");
        rig.delete(&restored).await;
    }

    rig.detach(&source).await;
    let device = rig.attach(&source).await;
    let (files_then, image) = &kept[2];
    image.restore(&device);
    rig.detach(&source).await;
    let target = rig.publish(&source, files).await;
    assert!(files_in(&target) == *files_then, "other files are restored in place");
    change_files(&target, 3);
    assert_eq!(schedule.back_up(&mut rig, &source).await, Kind::Incremental);
    rig.detach(&source).await;
    rig.finish();
}

/// Each kept backup is restored over the other. The driver keeps as many bases as it says, and each of them answers exactly.
#[apply(every_pool)]
async fn of_twenty_backups_the_oldest_expire_and_the_kept_ones_are_restored(
    pool: PoolKind,
    #[values("variable", "fixed")] style: &str,
) {
    let mut rig = Rig::start_with(pool, &["--block-metadata-type", style], "info").await;
    let (volume, device) = rig.block_volume("volume", 16 * MIB + ODD).await;
    let (mut content, mut schedule) = (Content::default(), Schedule::new(&rig, "hourly", style == "fixed"));
    let (mut kept, mut bases) = (VecDeque::new(), Vec::new());
    for round in 0..20 {
        change(&mut content, &device, round);
        let kind = schedule.back_up_as(&mut rig, &volume, &content).await;
        assert_eq!(kind, if round == 0 { Kind::Full } else { Kind::Incremental }, "{pool:?} {round}");
        assert!(rig.retained().len() <= RETAINED, "{pool:?} {round}: {:?}", rig.retained());
        bases.push((schedule.base.clone().expect("a base"), content.clone()));
        kept.push_back((content.clone(), schedule.image.copy(place(&rig, &format!("kept {round}")))));
        if kept.len() > 5 {
            let (_, expired) = kept.pop_front().expect("the oldest");
            std::fs::remove_file(expired.path).expect("remove the expired one");
        }
    }
    change(&mut content, &device, 20);
    let now = rig.snapshot("now", &volume).await;
    for (number, (base, then)) in bases.iter().enumerate() {
        let delta = rig.client.delta(base, &now, 0, 0).await;
        if number + RETAINED < bases.len() {
            assert_eq!(code(delta), Code::NotFound, "{pool:?} {number}");
        } else {
            let delta = delta.unwrap_or_else(|error| panic!("{pool:?} {number}: {error}"));
            assert_eq!(blocks_of(&delta, BLOCK), content.changed_since(then, BLOCK), "{pool:?} {number}");
        }
    }
    for (content, image) in kept {
        image.restore(&device);
        content.assert_equals(&device, 0, (16 * MIB + ODD) as u64 / BLOCK);
    }
    rig.detach_and_finish(&volume).await;
}

/// Each has its own base, and neither sees the other's. The one that is slower than the bases last reads the whole device once, and is
/// incremental again.
#[apply(every_pool)]
async fn two_schedules_of_one_volume_have_a_base_each(
    pool: PoolKind,
    #[values("variable", "fixed")] style: &str,
) {
    let mut rig = Rig::start_with(pool, &["--block-metadata-type", style], "info").await;
    let (volume, device) = rig.block_volume("volume", 16 * MIB + ODD).await;
    let mut content = Content::default();
    let (mut hourly, mut daily) = (Schedule::new(&rig, "hourly", false), Schedule::new(&rig, "daily", true));
    let (mut round, mut made) = (0, Vec::new());
    for hours in [1, 4, RETAINED - 1, RETAINED, 1] {
        for _ in 0..hours {
            change(&mut content, &device, round);
            let kind = hourly.back_up_as(&mut rig, &volume, &content).await;
            assert_eq!(kind, if round == 0 { Kind::Full } else { Kind::Incremental }, "{pool:?} {round}");
            round += 1;
        }
        change(&mut content, &device, round);
        made.push(daily.back_up_as(&mut rig, &volume, &content).await);
        round += 1;
    }
    assert_eq!(made, [Kind::Full, Kind::Incremental, Kind::Incremental, Kind::Whole, Kind::Incremental]);
    rig.detach_and_finish(&volume).await;
}

/// The delta from a base that was smaller lists what was written to the new part, and no more.
#[apply(every_pool)]
async fn a_volume_that_grows_between_backups_stays_incremental(
    pool: PoolKind,
    #[values("variable", "fixed")] style: &str,
) {
    let mut rig = Rig::start_with(pool, &["--block-metadata-type", style], "info").await;
    let (volume, device) = rig.block_volume("volume", 16 * MIB + ODD).await;
    let (mut content, mut schedule) = (Content::default(), Schedule::new(&rig, "hourly", false));
    let sizes = [16 * MIB + ODD, 24 * MIB, 24 * MIB, 40 * MIB + ODD, 60 * MIB];
    for (round, size) in sizes.into_iter().enumerate() {
        rig.client.expand_volume(&volume, size).await.expect("expand");
        change(&mut content, &device, round as u64);
        if round != 2 {
            content.write(&device, size as u64 / BLOCK - 1, 1, 9);
        }
        let kind = schedule.back_up_as(&mut rig, &volume, &content).await;
        assert_eq!(kind, if round == 0 { Kind::Full } else { Kind::Incremental }, "{pool:?} {round}");
    }
    let (restored, to) = rig.block_volume("restored", 60 * MIB).await;
    schedule.image.restore(&to);
    content.assert_equals(&to, 0, 60 * MIB as u64 / BLOCK);
    rig.detach(&restored).await;
    rig.detach_and_finish(&volume).await;
}
