//! Promise: a transfer whose source or target is cut off, or frozen, holds no call past its deadline. When that node is back the
//! transfer ends with the whole volume. Each driver is on a host of its own.

use std::time::Duration;

use csi_client::{from_snapshot, from_volume};
use testkit::cluster::{Cluster, eventually, patiently};
use testkit::{PoolKind, network};

use crate::cuts::{Fault, is_given_up};
use crate::transfers::{
    assert_same, begun, data, later_deltas_are_exact, nothing_is_left, on, staging, written,
};

const SOURCE: usize = 0;
const TARGET: usize = 1;
const CREATE: &str = "/csi.v1.Controller/CreateVolume";
/// What the target's driver logs when its connection to the source is dead.
const INTERRUPTED: &str = "a transfer is interrupted";

#[rstest::rstest]
#[test_with::root]
#[test]
fn a_transfer_outlives_a_cut_and_a_freeze_of_either_end(
    #[values(Fault::Cut, Fault::Freeze)] fault: Fault,
    #[values(SOURCE, TARGET)] victim: usize,
) {
    network::alone(move || async move {
        let rate = ["--transfer-rate", "2Mi"];
        let mut cluster = Cluster::start_on_hosts(PoolKind::Xfs, 2, &rate, &["--node-timeout", "1s"]).await;
        let mut client = cluster.client();
        let (origin, _, content) = written(&mut cluster, 12).await;
        let snapshot = client.create_snapshot("first", &origin).await.expect("CreateSnapshot").snapshot_id;
        cluster.nodes[SOURCE].rig.detach(&origin).await;
        let request = on(&cluster, TARGET, "restored", from_snapshot(&snapshot));
        let id = begun(&cluster, &request).await;
        fault.strike(&mut cluster.nodes[victim]);
        // At once, when nobody knows yet, and later.
        is_given_up(&cluster, CREATE, request.clone()).await;
        cluster.router().sees(1).await;
        is_given_up(&cluster, CREATE, request.clone()).await;
        if victim == SOURCE {
            // Long enough for the target to give up its connection; the other faults are over before that.
            let is_noticed = || cluster.nodes[TARGET].rig.log().contains(INTERRUPTED);
            eventually("the target gives up its connection", async || is_noticed()).await;
            is_given_up(&cluster, CREATE, request.clone()).await;
        }
        assert_eq!(staging(&cluster, TARGET), [id.as_str()], "the transfer is not cut in its middle");
        fault.mend(&mut cluster.nodes[victim]).await;
        cluster.router().sees(2).await;
        let made = patiently!(client.create_volume(request.clone())).expect("CreateVolume").volume_id;
        assert_eq!(made, id, "the same volume is made");
        assert_same(
            &data(&cluster, SOURCE, "snapshots", &snapshot),
            &data(&cluster, TARGET, "volumes", &made),
        );
        later_deltas_are_exact(&mut cluster, TARGET, &made, content).await;
        nothing_is_left(&cluster).await;
        cluster.finish();
    });
}

/// As many transfers as work at once wait for a node that is dead. One from another node is not kept waiting by them.
#[apply(device_test)]
async fn a_source_that_is_dead_keeps_no_other_from_being_copied() {
    const AT_ONCE: usize = 4;
    let mut cluster = Cluster::start(PoolKind::Dir, 3, &["--transfer-rate", "2Mi"]).await;
    let mut client = cluster.client();
    let (origin, ..) = written(&mut cluster, 12).await;
    let snapshot = client.create_snapshot("first", &origin).await.expect("CreateSnapshot").snapshot_id;
    let other = cluster.volume_on(2, "other").await;
    let waiting: Vec<_> = (0..AT_ONCE)
        .map(|number| on(&cluster, TARGET, &format!("from-the-dead-{number}"), from_snapshot(&snapshot)))
        .collect();
    futures_util::future::join_all(waiting.iter().map(|request| begun(&cluster, request))).await;
    cluster.nodes[SOURCE].rig.kill();
    cluster.router().sees(2).await;
    // As csi-provisioner does: what nobody asks for any more is given up.
    let mut provisioner = cluster.client();
    let asking = tokio::spawn(async move {
        loop {
            for request in &waiting {
                let _ = provisioner.create_volume(request.clone()).await;
            }
            tokio::time::sleep(Duration::from_millis(500)).await;
        }
    });
    let request = on(&cluster, TARGET, "from-the-living", from_volume(&other));
    patiently!(client.create_volume(request.clone())).expect("CreateVolume");
    assert_eq!(staging(&cluster, TARGET).len(), AT_ONCE, "the others were not under way");
    asking.abort();
    cluster.nodes[SOURCE].rig.start_again().await;
    cluster.nodes[SOURCE].rig.detach(&origin).await;
    cluster.finish();
}
