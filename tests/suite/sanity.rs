//! csi-sanity, the CSI community's test suite for drivers, with each pool, both access types, and with and without
//! attachments.

use testkit::{PoolKind, Rig, sanity};

#[apply(every_pool)]
async fn csi_sanity_finds_nothing(pool: PoolKind, #[values(false, true)] attach: bool) {
    testkit::needs("csi-sanity");
    let flags: &[&str] = if attach { &["--enable-attach", "--max-volumes-per-node", "4"] } else { &[] };
    let rig = Rig::start_with(pool, flags, "info").await;
    let what = format!("{} pool", pool.name());
    sanity::assert_finds_nothing(&what, &rig.socket(), rig.dir.path(), "\"node-1\"", attach);
    rig.finish();
}
