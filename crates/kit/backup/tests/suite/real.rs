//! Against the real driver, on real loop devices.

use files::pattern::Image;
use testkit::{PoolKind, Rig};

use crate::tool::{BLOCK, MIB, Place, arg, id};

const SIZE: u64 = 256 * MIB;

/// A device with a snapshot on it, as a pod gets it.
async fn restored(rig: &mut Rig, snapshot: &str) -> std::path::PathBuf {
    rig.volume_from(&format!("of {snapshot}"), SIZE as i64, csi_client::from_snapshot(snapshot)).await.1
}

#[rstest::rstest]
#[test_with::root]
#[tokio::test(flavor = "multi_thread")]
async fn full_and_incremental_backups_of_loop_devices_come_back(
    #[values(PoolKind::Btrfs, PoolKind::Xfs, PoolKind::Dir)] pool: PoolKind,
) {
    let place = Place::new();
    let mut rig = Rig::start(pool).await;
    let endpoint = format!("unix://{}", rig.socket().display());
    let (volume, device) = rig.block_volume("volume", SIZE as i64).await;
    let mut image = Image::default();
    let open = || std::fs::File::options().read(true).write(true).open(&device).expect("open the device");
    image.write(&open(), 100, 3000, 1).expect("write");
    image.write(&open(), 128 * MIB / BLOCK - 100, 200, 2).expect("write");
    open().sync_all().expect("flush");
    let first = rig.snapshot("first", &volume).await;
    let before = image.clone();
    let source = restored(&mut rig, &first).await;
    let back_up = |source: &std::path::Path, snapshot: &str| {
        let of = ["--endpoint", &endpoint, "--snapshot", snapshot];
        place.ok(&[&["auto", "--volume", "v", "--device", arg(source)], &of[..]].concat())
    };
    let full = back_up(&source, &first);
    assert_eq!(full["kind"], "full");
    assert_eq!(full["read"].as_u64(), Some(3200 * BLOCK), "nothing but the data is read");

    image.write(&open(), 500, 2, 3).expect("write");
    image.write(&open(), 60000, 20, 4).expect("write");
    image.punch(&open(), 1000, 300).expect("discard");
    open().sync_all().expect("flush");
    let second = rig.snapshot("second", &volume).await;
    let source = restored(&mut rig, &second).await;
    // What is kept of the first snapshot is its handle.
    rig.client.delete_snapshot(&first).await.expect("DeleteSnapshot");
    let incremental = back_up(&source, &second);
    assert_eq!((&incremental["kind"], &incremental["base"]), (&"incremental".into(), &full["id"]));
    let read = incremental["read"].as_u64().expect("a number");
    assert!(read <= 340 * BLOCK, "{read} bytes are read for 322 blocks");

    place.restores(&id(&full), &before, SIZE);
    place.restores(&id(&incremental), &image, SIZE);
    // Onto a device with other content, then forth and back over what it holds.
    let (_, target) = rig.block_volume("target", SIZE as i64).await;
    let mut other = Image::default();
    let file = std::fs::File::options().write(true).open(&target).expect("open the device");
    other.write(&file, 0, 5000, 9).expect("write");
    other.write(&file, 50000, 1000, 9).expect("write");
    drop(file);
    let compare = |model: &Image| model.compare(&target, SIZE, &base::Stop::default()).expect("equal");
    place.ok(&["restore", &id(&full), "--to", arg(&target)]);
    compare(&before);
    let written = place.ok(&["restore", &id(&incremental), "--to", arg(&target), "--onto-base", &id(&full)]);
    assert!(written["written"].as_u64().is_some_and(|bytes| bytes <= 60 * BLOCK), "{written}");
    compare(&image);
    place.ok(&["verify", &id(&incremental), "--against", arg(&target)]);
    let said = place.fails(1, &["verify", &id(&full), "--against", arg(&target)]);
    assert!(said.contains(&format!("bytes {} to {} differ", 500 * BLOCK, 502 * BLOCK)), "{said}");
    place.ok(&["restore", &id(&full), "--to", arg(&target), "--onto-base", &id(&incremental)]);
    compare(&before);
    for entry in std::fs::read_dir(rig.kubelet()).expect("list") {
        let entry = entry.expect("entry");
        rig.detach(entry.file_name().to_str().expect("an id")).await;
    }
    rig.finish();
}
