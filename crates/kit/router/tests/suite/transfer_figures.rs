//! Promise: metrics and log say how far a transfer is, and how it ended.

use csi_client::from_snapshot;
use testkit::cluster::{Cluster, eventually, get, patiently};
use testkit::{BLOCK, PoolKind, free_port};

use crate::transfers::{COPIED, begun, logged, nothing_is_left, on, patiently_begun, written};

const BEGUN: &str = "a volume is copied from another node";
const UNDER_WAY: &str = "a volume is being copied from another node";
/// By how much figures may be off that are read one after the other: ten times what is fetched at once.
const SLACK: u64 = 1 << 20;

fn is_about(bytes: u64, wanted: u64) -> bool {
    bytes.abs_diff(wanted) <= SLACK
}

/// What a driver's metrics say of its transfers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Figures {
    running: u64,
    waiting: u64,
    left: u64,
    received: u64,
    sent: u64,
    done: u64,
    failed: u64,
}

async fn figures(port: u16) -> Figures {
    let metrics = get(port, "/metrics").await;
    let value = |name: &str| -> u64 {
        let value = metrics.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' ')?.parse().ok());
        value.unwrap_or_default()
    };
    Figures {
        running: value("deltapath_transfers{state=\"running\"}"),
        waiting: value("deltapath_transfers{state=\"waiting\"}"),
        left: value("deltapath_transfer_left_bytes"),
        received: value("deltapath_transfer_received_bytes_total"),
        sent: value("deltapath_transfer_sent_bytes_total"),
        done: value("deltapath_transfers_ended_total{outcome=\"done\"}"),
        failed: value("deltapath_transfers_ended_total{outcome=\"failed\"}"),
    }
}

#[apply(device_test)]
async fn a_transfer_shows_how_far_it_is_and_how_it_ended() {
    let [source, target] = [free_port(), free_port()];
    let flags = [source, target].map(|port| format!("--http-endpoint=127.0.0.1:{port}"));
    let [of_source, of_target] = flags.each_ref().map(String::as_str);
    // So slow that nearly everything is left when the driver is started again.
    let drivers: [&[&str]; 2] = [&[of_source], &[of_target, "--transfer-rate=64Ki"]];
    let mut cluster = Cluster::start_each(PoolKind::Dir, &drivers, &[]).await;
    let mut client = cluster.client();
    let (origin, _, content) = written(&mut cluster, 12).await;
    let total = content.blocks.len() as u64 * BLOCK;
    let snapshot = client.create_snapshot("first", &origin).await.expect("CreateSnapshot").snapshot_id;
    cluster.nodes[0].rig.detach(&origin).await;
    assert_eq!(figures(target).await, Figures::default());
    let request = on(&cluster, 1, "restored", from_snapshot(&snapshot));
    let id = begun(&cluster, &request).await;
    assert_eq!(logged(&cluster.nodes[1].rig.log(), BEGUN, "bytes"), total);
    eventually("it receives", async || figures(target).await.received > 0).await;
    let first = figures(target).await;
    assert_eq!((first.running, first.waiting, first.done, first.failed), (1, 0, 0, 0), "{first:?}");
    assert!(first.left > 0 && is_about(first.left + first.received, total), "{first:?} of {total}");

    // After a restart it waits for the next CreateVolume. It lasts longer now than it takes until progress is logged.
    cluster.nodes[1].rig.terminate();
    cluster.nodes[1].start_again_with(&["--transfer-rate=1Mi"]).await;
    assert_eq!(figures(target).await, Figures { waiting: 1, ..Figures::default() });
    let sent_before = figures(source).await.sent;
    assert_eq!(patiently_begun(&cluster, &request).await, id);
    eventually("it receives", async || figures(target).await.received > 0).await;

    let mut last = Figures { left: total, ..Figures::default() };
    eventually("it is done", async || {
        let now = figures(target).await;
        assert!(now.left <= last.left && now.received >= last.received, "{last:?}, and then {now:?}");
        assert!(now.running + now.done <= 1 && (now.waiting, now.failed) == (0, 0), "{now:?}");
        // What the driver before the restart has fetched is neither left nor received.
        assert!(now.left + now.received <= total + SLACK, "{now:?} of {total}");
        last = now;
        now.done == 1
    })
    .await;
    assert!(last.left == 0 && last.running == 0, "{last:?}");
    assert!(last.received > 0 && last.received < total, "{last:?} of {total}");
    let sent = figures(source).await.sent - sent_before;
    assert!(sent >= last.received, "{sent} bytes were sent, and {} received", last.received);

    let log = cluster.nodes[1].rig.log();
    assert_eq!(logged(&log, COPIED, "bytes"), total);
    assert_eq!(logged(&log, COPIED, "received"), last.received);
    let done = logged(&log, UNDER_WAY, "done");
    assert!(0 < done && done <= total, "{done} of {total}");
    let made = patiently!(client.create_volume(request.clone())).expect("CreateVolume");
    assert_eq!(made.volume_id, id);
    nothing_is_left(&cluster).await;
    cluster.finish();
}
