//! A second driver on the same data directory is refused, whatever path it uses.

use std::path::Path;

use csi_client::{block_capability, new_volume};
use deltapath::sys::mount;
use deltapath::sys::sweep::devices_below;

use crate::startup::refused;
use testkit::{MIB, PoolKind, Rig, driver_command, swept_dir};

/// The second driver's command line: another socket, another path.
fn second(rig: &Rig, pool: PoolKind, data_dir: &Path) -> String {
    let endpoint = format!("unix://{}", rig.dir.path().join("second.sock").display());
    refused(driver_command(rig.dir.path(), pool).args(["--endpoint", &endpoint, "--data-dir"]).arg(data_dir))
}

#[apply(every_pool)]
async fn a_data_directory_is_one_by_any_path(rig: Rig<pool>) {
    let (volume, _) = rig.block_volume("volume", MIB).await;
    let devices = devices_below(rig.dir.path()).expect("devices").len();
    let (link, bind) = (rig.dir.path().join("link"), rig.dir.path().join("bind"));
    std::os::unix::fs::symlink(rig.data_dir(), &link).expect("symlink");
    std::fs::create_dir(&bind).expect("mkdir");
    mount::bind(&rig.data_dir(), &bind, false).expect("bind");
    for path in [&link, &bind, &rig.dir.path().join("kubelet/../data")] {
        let said = second(&rig, pool, path);
        assert!(said.contains("in use by another driver") && said.contains("choose another"), "{said}");
    }
    assert_eq!(devices_below(rig.dir.path()).expect("devices").len(), devices);
    let staging = rig.pool_dir().join("staging/half-made");
    std::fs::create_dir(&staging).expect("a call under way");
    second(&rig, pool, &link);
    assert!(staging.exists(), "the second driver cleaned up after the first");
    std::fs::remove_dir(&staging).expect("remove");
    mount::unmount(&bind).expect("unmount");
    rig.snapshot("the first goes on", &volume).await;
    rig.detach(&volume).await;
}

/// One image with two names, in two data directories.
#[apply(device_cases)]
async fn an_image_is_one_by_any_name(#[values(PoolKind::Xfs, PoolKind::Btrfs)] pool: PoolKind) {
    let mut rig = Rig::start(pool).await;
    let (volume, _) = rig.block_volume("volume", MIB).await;
    let (other, _swept) = swept_dir();
    let copy = other.path().join("data");
    std::fs::create_dir(&copy).expect("mkdir");
    std::fs::hard_link(rig.data_dir().join("pool.img"), copy.join("pool.img")).expect("link");
    std::fs::copy(rig.data_dir().join("deltapath.json"), copy.join("deltapath.json")).expect("copy");
    let said = second(&rig, pool, &copy);
    assert!(said.contains("pool.img") && said.contains("another"), "{said}");
    assert!(mount::mounted_at(&copy.join("pool")).expect("mounts").is_none(), "mounted a second time");
    // Even if the lock file of the data directory was removed, the lock on the image holds.
    std::fs::remove_file(rig.data_dir().join("lock")).expect("remove");
    let said = second(&rig, pool, &rig.data_dir());
    assert!(said.contains("pool.img") && said.contains("another"), "{said}");
    rig.client.create_volume(new_volume("the first goes on", MIB, block_capability())).await.expect("create");
    rig.snapshot("the first goes on", &volume).await;
    rig.detach_and_finish(&volume).await;
}
