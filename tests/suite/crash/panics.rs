//! A thread whose work nobody else does panics.

use crate::faults::{compared, until};
use testkit::orders::Orders;
use testkit::{BLOCK, MIB};

/// The incident: the hashing thread had ended, and nobody noticed: what was deleted was never freed.
#[apply(device_test)]
async fn a_panic_of_the_hashing_thread_ends_the_driver_and_the_next_one_takes_its_work_up(rig: Rig<Btrfs>) {
    let (volume, device, before) = rig.written_volume("volume", 8 * MIB, (10, 100, 1)).await;
    let base = rig.snapshot("base", &volume).await;
    let mut after = before.clone();
    after.write(&device, 50, 20, 2);
    let target = rig.snapshot("target", &volume).await;
    compared(&rig, &[&base, &target]).await;
    let mut orders = Orders::new(rig.dir.path());
    orders.panic(1, "hashing");
    let pid = rig.pid();
    // The hashing thread frees its bytes, and panics; the answer may be lost with the driver.
    let _ = rig.client.delete_snapshot(&base).await;
    let has_ended = || {
        let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).expect("it is not waited for yet");
        stat.rsplit(") ").next().is_some_and(|rest| rest.starts_with('Z'))
    };
    until("the driver ends", has_ended).await;
    orders.withdraw();
    rig.kill();
    assert!(rig.log().contains("the hashing thread panicked, the driver ends"), "{}", rig.log());
    rig.start_again().await;
    // As a CO does. The panic may have come at the last step of the comparison, before the call.
    rig.client.delete_snapshot(&base).await.expect("delete");
    let dir = rig.snapshot_dir(&base);
    until("the bytes are freed", || !dir.bytes().exists()).await;
    assert_eq!(rig.changed(&base, &target).await, after.changed_since(&before, BLOCK));
    rig.detach(&volume).await;
}
