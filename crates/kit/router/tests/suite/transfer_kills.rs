//! Promise: both ends of a transfer may be killed at any moment, and what comes of it equals its source, or is nothing.
//!
//! `DELTAPATH_TRANSFER_KILLS` says how many transfers are killed, a third on each pool (`make transfer-kills`).

use std::time::Duration;

use csi_client::{from_snapshot, from_volume};
use testkit::PoolKind;

use crate::transfers::{assert_same, data, nothing_is_left, on, written};
use testkit::cluster::{Cluster, patiently};

const KILLS: usize = 24;
const POOLS: usize = testkit::POOLS.len();

#[apply(every_pool)]
async fn kills_at_any_moment_leave_the_whole_volume_or_none(pool: PoolKind) {
    let kills = testkit::asked("DELTAPATH_TRANSFER_KILLS").unwrap_or(KILLS).div_ceil(POOLS);
    let mut random =
        fastrand::Rng::with_seed(testkit::seed(&format!("kills of transfers on {}", pool.name())));
    let mut done = 0;
    let mut cluster = Cluster::start(pool, 2, &["--transfer-rate", "24Mi"]).await;
    let (origin, _, content) = written(&mut cluster, 8).await;
    cluster.nodes[0].rig.detach(&origin).await;
    let mut client = cluster.client();
    let snapshot = client.create_snapshot("first", &origin).await.expect("CreateSnapshot").snapshot_id;
    for round in 0..kills {
        let name = format!("copy-{round}");
        let source = if random.u8(..4) == 0 { from_volume(&origin) } else { from_snapshot(&snapshot) };
        let request = on(&cluster, 1, &name, source);
        // Somebody asks on and on, as sidecars do.
        let asking = {
            let (mut client, request) = (client.clone(), request.clone());
            tokio::spawn(async move { patiently!(client.create_volume(request.clone())) })
        };
        tokio::time::sleep(Duration::from_millis(random.u64(..500))).await;
        let victims: &[usize] = [&[1][..], &[1], &[0], &[0, 1]][random.usize(..4)];
        for victim in victims {
            cluster.nodes[*victim].rig.kill();
            done += 1;
        }
        if random.bool() {
            tokio::time::sleep(Duration::from_millis(random.u64(..100))).await;
        }
        for victim in victims {
            cluster.nodes[*victim].rig.start_again().await;
        }
        let made = asking.await.expect("the task").expect("CreateVolume").volume_id;
        let copy = data(&cluster, 1, "volumes", &made);
        assert_same(&data(&cluster, 0, "snapshots", &snapshot), &copy);
        if round % 8 == 0 {
            // Of the second snapshot of it, what was written since.
            let rig = &mut cluster.nodes[1].rig;
            let device = rig.attach(&made).await;
            let (one, mut later) = (rig.snapshot(&format!("{name}-1"), &made).await, content.clone());
            later.write(&device, 11, 3, 77);
            let two = rig.snapshot(&format!("{name}-2"), &made).await;
            let delta = rig.client.delta(&one, &two, 0, 0).await.expect("delta");
            let blocks = testkit::content::blocks_of(&delta, testkit::BLOCK);
            assert_eq!(blocks, later.changed_since(&content, testkit::BLOCK));
            for snapshot in [one, two] {
                rig.client.delete_snapshot(&snapshot).await.expect("delete");
            }
            rig.detach(&made).await;
        }
        // The next one is not to start with it, but for now and then.
        if random.u8(..4) > 0 {
            patiently!(client.delete_volume(&made)).expect("DeleteVolume");
        }
    }
    // A source that was opened before its node was killed is not; one whose target was killed is open for ten minutes.
    cluster.nodes[0].rig.terminate();
    cluster.nodes[0].rig.start_again().await;
    nothing_is_left(&cluster).await;
    cluster.finish();
    eprintln!("{} pool: {done} kills", pool.name());
    assert!(done >= kills);
}
