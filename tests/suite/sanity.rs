//! csi-sanity, the CSI community's test suite for drivers, with each pool, both access types, and with and without
//! attachments.

use testkit::{PoolKind, Rig, sanity};

async fn run(pool: PoolKind, attach: bool) {
    testkit::needs("csi-sanity");
    let flags: &[&str] = if attach { &["--enable-attach", "--max-volumes-per-node", "4"] } else { &[] };
    let rig = Rig::start_with(pool, flags, "info").await;
    let what = format!("{} pool", pool.name());
    sanity::assert_finds_nothing(&what, &rig.socket(), rig.dir.path(), "\"node-1\"", attach);
    rig.finish();
}

#[apply(device_test)]
async fn csi_sanity_finds_nothing_on_dir() {
    run(PoolKind::Dir, false).await;
}

#[apply(device_test)]
async fn csi_sanity_finds_nothing_on_dir_with_attach() {
    run(PoolKind::Dir, true).await;
}

#[apply(device_test)]
async fn csi_sanity_finds_nothing_on_xfs() {
    run(PoolKind::Xfs, false).await;
}

#[apply(device_test)]
async fn csi_sanity_finds_nothing_on_xfs_with_attach() {
    run(PoolKind::Xfs, true).await;
}

#[apply(device_test)]
async fn csi_sanity_finds_nothing_on_btrfs() {
    run(PoolKind::Btrfs, false).await;
}

#[apply(device_test)]
async fn csi_sanity_finds_nothing_on_btrfs_with_attach() {
    run(PoolKind::Btrfs, true).await;
}
