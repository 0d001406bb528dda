//! Freezes that last longer than their limit, or longer than the driver that made them.

use std::time::Duration;

use deltapath::sys::freeze;
use deltapath::sys::mount::{self, Mount};
use proto::Snapshot;
use tokio::task::JoinHandle;
use tonic::Code;

use super::audit::{When, audit};
use super::cases::{FILESYSTEM, staging};
use super::scene::Scene;
use testkit::orders::Orders;
use testkit::{Rig, root_of};

/// A scene, with the order that the first step of this name is held in the next snapshot of the mounted volume.
async fn held(rig: &mut Rig, step: &str, ms: u32) -> (Scene, Orders) {
    let scene = Scene::make(rig).await;
    let mut orders = Orders::new(rig.dir.path());
    orders.count();
    let snapshot = rig.snapshot("counted", &scene.files).await;
    let points = orders.withdraw();
    rig.client.delete_snapshot(&snapshot).await.expect("delete");
    let at = points.iter().find(|point| point.step == step).expect("the step is in the call").number;
    orders.hold(at, "calls", ms);
    (scene, orders)
}

/// Begins such a snapshot; returns its call, once it is held, and where the filesystem is mounted.
async fn begun(
    rig: &Rig,
    scene: &Scene,
    orders: &Orders,
) -> (JoinHandle<csi_client::Result<Snapshot>>, Mount) {
    let (mut client, source) = (rig.client.clone(), scene.files.clone());
    let call = tokio::spawn(async move { client.create_snapshot("held", &source).await });
    orders.reached(&call).await;
    let staging = scene.path(staging(FILESYSTEM));
    let mounted = mount::mounted_at(&staging).expect("mounts").expect("the filesystem is mounted");
    (call, mounted)
}

async fn is_sound(rig: &mut Rig, scene: &mut Scene, when: When) {
    let found = audit(rig, scene, when).await;
    assert!(found.losses.is_empty() && found.leaks.is_empty(), "{when:?}: {found:#?}");
}

/// On a slow device the freeze itself takes longer than the limit. The watchdog finds nothing to thaw yet, so the call
/// thaws, and fails because the copy may be inconsistent.
#[apply(device_test)]
async fn a_freeze_that_takes_longer_than_its_bound_is_undone_and_reported(rig: Rig<Xfs>) {
    let (mut scene, orders) = held(&mut rig, "freeze", 31_000).await;
    let refused = rig.client.create_snapshot("late", &scene.files).await.expect_err("the bound has passed");
    assert!(orders.withdraw().iter().any(|point| point.hit && point.step == "freeze"));
    // The time limit of the copy or that of the freeze may be the first to pass.
    assert!(matches!(refused.code(), Code::Internal | Code::FailedPrecondition), "{refused}");
    assert!(refused.to_string().contains("frozen"), "{refused}");
    is_sound(&mut rig, &mut scene, When::Cut).await;
    let made = rig.snapshot("late", &scene.files).await;
    is_sound(&mut rig, &mut scene, When::Done).await;
    rig.client.delete_snapshot(&made).await.expect("delete");
    is_sound(&mut rig, &mut scene, When::Undone).await;
    scene.leave(&mut rig).await;
}

/// A copy of a frozen filesystem is still running when the driver has drained. The copy is left behind, and the filesystem
/// is thawed before the process ends, since its watchdog ends with the process.
#[apply(device_test)]
async fn a_driver_that_leaves_a_copy_behind_thaws_its_filesystem(rig: Rig<Xfs>) {
    let (mut scene, orders) = held(&mut rig, "clone blocks into", 60_000).await;
    let (call, mounted) = begun(&rig, &scene, &orders).await;
    let frozen = freeze::Frozen::freeze(root_of(&mounted), Duration::from_secs(1)).expect("ask");
    assert!(frozen.is_none(), "the copy is held up before the filesystem is frozen");
    let status = tokio::task::block_in_place(|| rig.terminate());
    assert!(status.success(), "the driver ended with {status}\n{}", rig.log());
    let log = rig.log();
    assert!(log.contains("thawed what a driver left frozen"), "the watchdog thawed it:\n{log}");
    call.await.expect("join").expect_err("the call was left behind");
    let frozen = freeze::Frozen::freeze(root_of(&mounted), Duration::from_secs(1)).expect("ask");
    frozen.expect("the filesystem is left frozen").thaw().expect("thaw");
    orders.withdraw();
    rig.start_again().await;
    is_sound(&mut rig, &mut scene, When::Cut).await;
    let made = rig.snapshot("held", &scene.files).await;
    is_sound(&mut rig, &mut scene, When::Done).await;
    rig.client.delete_snapshot(&made).await.expect("delete");
    scene.leave(&mut rig).await;
}

/// Another program thaws the filesystem while it is copied. The copy may be inconsistent, so the call fails.
#[apply(device_test)]
async fn a_freeze_that_somebody_else_undoes_is_reported(rig: Rig<Xfs>) {
    let (mut scene, orders) = held(&mut rig, "clone blocks into", 1_000).await;
    let (call, mounted) = begun(&rig, &scene, &orders).await;
    freeze::thaw(&root_of(&mounted)).expect("thaw");
    let refused = call.await.expect("join").expect_err("a torn copy");
    assert!(refused.to_string().contains("keep frozen"), "{refused}");
    orders.withdraw();
    is_sound(&mut rig, &mut scene, When::Cut).await;
    scene.leave(&mut rig).await;
}
