//! Metrics, the health endpoint, and Probe.

use std::time::Duration;

use deltapath::sys::mount;
use tokio::io::AsyncWriteExt;

use crate::volume_health::{
    StorageHealthErrorType, VolumeHealthErrorType, health as volume_health, is_unwell, storage, storage_tells,
};
use testkit::prelude::*;
use testkit::{eventually, free_port, process_status};

/// A driver, and the port at which it answers over HTTP.
async fn served(pool: PoolKind) -> (Rig, u16) {
    let port = free_port();
    (Rig::start_with(pool, &["--http-endpoint", &format!("127.0.0.1:{port}")], "info").await, port)
}

async fn get(port: u16, path: &str) -> (u16, String) {
    testkit::http::get(port, path).await.expect("an answer")
}

/// The value of a metric. The name includes the labels.
fn value(metrics: &str, name: &str) -> Option<f64> {
    metrics.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' ')?.parse().ok())
}

/// Bytes that are not hashed yet count once for each snapshot, whether its map is new or made from the one before, and
/// whether it was taken alone or in a group.
#[apply(device_test)]
async fn the_backlog_is_what_is_still_to_be_hashed() {
    let (mut rig, port) = served(PoolKind::Xfs).await;
    let (volume, device) = rig.block_volume("counted", 8 * MIB).await;
    let mut orders = testkit::orders::Orders::new(rig.dir.path());
    orders.hold(1, "hashing", 5_000);
    let mut content = Content::default();
    content.write(&device, 0, 10, 1);
    rig.snapshot("first", &volume).await;
    content.write(&device, 5, 2, 2);
    content.write(&device, 100, 3, 2);
    rig.snapshot("second", &volume).await;
    content.write(&device, 200, 4, 3);
    rig.client.create_group("group", std::slice::from_ref(&volume)).await.expect("group");
    let (_, metrics) = get(port, "/metrics").await;
    let blocks = 10 + (10 + 3) + (10 + 3 + 4);
    let found = value(&metrics, "deltapath_hashing_backlog_bytes");
    assert_eq!(found, Some(f64::from(blocks * 4096)), "{metrics}");
    orders.withdraw();
    rig.detach_and_finish(&volume).await;
}

/// A client of the port may send any number of requests. They use only a few threads, so calls are not delayed.
#[apply(device_test)]
async fn a_flood_of_scrapes_takes_few_threads() {
    let (mut rig, port) = served(PoolKind::Dir).await;
    let process = rig.pid();
    let threads = || process_status(process, "Threads:");
    let (before, mut most) = (threads(), 0);
    let mut flood = tokio::task::JoinSet::new();
    // Fewer than the server takes at once: it closes the oldest of more.
    for number in 0..200 {
        let path = if number % 2 == 0 { "/metrics" } else { "/readyz" };
        flood.spawn(get(port, path));
    }
    while let Some(answered) = flood.join_next().await {
        assert_eq!(answered.expect("join").0, 200);
        most = most.max(threads());
    }
    rig.client.identity.probe(proto::ProbeRequest {}).await.expect("probe");
    assert!(most <= before + 1, "{before} threads before, {most} in the flood");
    rig.finish();
}

#[apply(device_test)]
async fn metrics_count_what_happened_and_no_label_is_a_clients() {
    let (mut rig, port) = served(PoolKind::Xfs).await;
    let (volume, ..) = rig.written_volume("counted", 8 * MIB, (0, 10, 1)).await;
    let snapshot = rig.snapshot("counted", &volume).await;
    rig.client.allocated(&snapshot, 0, 0).await.expect("allocated");
    for number in 0..50 {
        rig.client.delete_snapshot("").await.expect_err("no id");
        let get = proto::ControllerGetVolumeRequest { volume_id: format!("unknown-{number}") };
        rig.client.controller.controller_get_volume(get).await.expect_err("unknown");
    }
    // The snapshot is hashed in the background.
    let backlog = async || value(&get(port, "/metrics").await.1, "deltapath_hashing_backlog_bytes");
    eventually("it is hashed", async || backlog().await == Some(0.0)).await;
    let (status, metrics) = get(port, "/metrics").await;
    assert_eq!(status, 200);
    for (name, expected) in [
        (r#"deltapath_rpc_total{method="CreateVolume",code="Ok"}"#, 1.0),
        (r#"deltapath_rpc_total{method="DeleteSnapshot",code="InvalidArgument"}"#, 50.0),
        (r#"deltapath_rpc_total{method="ControllerGetVolume",code="NotFound"}"#, 50.0),
        (r#"deltapath_rpc_total{method="GetMetadataAllocated",code="Ok"}"#, 1.0),
        (r#"deltapath_rpc_seconds_count{method="CreateSnapshot"}"#, 1.0),
        (r#"deltapath_rpc_seconds_bucket{method="CreateSnapshot",le="+Inf"}"#, 1.0),
        (r#"deltapath_stream_tuples_total{method="GetMetadataAllocated"}"#, 1.0),
        (r#"deltapath_stream_described_bytes_total{method="GetMetadataAllocated"}"#, 40960.0),
        ("deltapath_volumes", 1.0),
        ("deltapath_snapshots", 1.0),
        ("deltapath_retained_snapshots", 0.0),
        ("deltapath_group_snapshots", 0.0),
        ("deltapath_unreadable_objects", 0.0),
        ("deltapath_unhealthy_volumes", 0.0),
        ("deltapath_hashing_backlog_bytes", 0.0),
        ("deltapath_ready", 1.0),
    ] {
        assert_eq!(value(&metrics, name), Some(expected), "{name} in\n{metrics}");
    }
    let size = value(&metrics, "deltapath_pool_size_bytes").expect("the pool's size");
    let free = value(&metrics, "deltapath_pool_free_bytes").expect("free bytes");
    assert!(size > 7e9 && free > 0.0 && free <= size, "{free} of {size}");
    assert!(!metrics.contains("unknown-") && !metrics.contains(&volume), "a client's text is a label");
    assert_eq!(get(port, "/healthz").await.0, 200);
    assert_eq!(get(port, "/readyz").await.0, 200);
    assert_eq!(get(port, "/").await.0, 404);

    let unhealthy = async || value(&get(port, "/metrics").await.1, "deltapath_unhealthy_volumes");
    let data = rig.volume_dir(&volume).data();
    std::fs::rename(&data, data.with_extension("away")).expect("the file goes");
    assert_eq!(unhealthy().await, Some(1.0));
    std::fs::rename(data.with_extension("away"), &data).expect("and comes back");
    assert_eq!(unhealthy().await, Some(0.0));
    rig.detach_and_finish(&volume).await;
}

/// The pool is unmounted under a running driver, which reports that, and reports when it is back.
#[apply(device_test)]
async fn a_probe_tells_when_the_pool_is_gone() {
    let (mut rig, port) = served(PoolKind::Xfs).await;
    let pool = rig.pool_dir();
    let volume = rig.volume("volume", MIB, csi_client::block_capability()).await;
    let ready = rig.client.identity.probe(proto::ProbeRequest {}).await.expect("probe").into_inner().ready;
    assert_eq!(ready, Some(true));
    let device = mount::mounted_at(&pool).expect("mounts").expect("the pool is mounted").source;
    mount::unmount(&pool).expect("a stranger unmounts it");
    let reported = storage(&rig).await;
    storage_tells(&reported, "PoolNotMounted", StorageHealthErrorType::StorageUnreachable);
    assert_eq!(reported.len(), 1, "{reported:?}");
    is_unwell(&rig, &volume, "PoolNotMounted", VolumeHealthErrorType::Inaccessible, &[]).await;
    let gone = rig.client.identity.probe(proto::ProbeRequest {}).await;
    assert_eq!(code(gone), Code::FailedPrecondition);
    assert_eq!(get(port, "/readyz").await.0, 503);
    assert_eq!(get(port, "/healthz").await.0, 200, "the process itself is well");
    // While a copy of the mount is left in another mount namespace, only the same kind of mount is possible.
    let is_let_go = async || !deltapath::sys::blockdev::is_claimed(&device).expect("open");
    eventually("the device is let go", is_let_go).await;
    mount::mount(&device, &pool, "xfs", mount::Flags::MS_RDONLY, "nouuid").expect("mount read-only");
    let read_only = rig.client.identity.probe(proto::ProbeRequest {}).await;
    assert_eq!(code(read_only), Code::FailedPrecondition);
    mount::unmount(&pool).expect("unmount");
    eventually("the device is let go", is_let_go).await;
    mount::mount(&device, &pool, "xfs", mount::Flags::empty(), "nouuid").expect("mount again");
    rig.client.identity.probe(proto::ProbeRequest {}).await.expect("back");
    assert_eq!(volume_health(&rig, &volume).await, []);
    assert_eq!(get(port, "/readyz").await.0, 200);
    rig.finish();
}

/// Found from outside: 64 connections that asked for metrics without reading them held every place for ever.
#[apply(device_test)]
async fn a_crowd_that_does_not_read_keeps_no_probe_waiting() {
    let (mut rig, port) = served(PoolKind::Dir).await;
    let mut crowd = Vec::new();
    for _ in 0..300 {
        let mut stream = tokio::net::TcpStream::connect(("127.0.0.1", port)).await.expect("connect");
        let asked = b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n".repeat(2_000);
        // As much as is taken without reading an answer.
        let _ = tokio::time::timeout(Duration::from_millis(20), stream.write_all(&asked)).await;
        crowd.push(stream);
    }
    for path in ["/healthz", "/readyz"].repeat(5) {
        let answer = tokio::time::timeout(Duration::from_secs(20), get(port, path)).await;
        assert_eq!(answer.expect("in time").0, 200, "{path}");
    }
    rig.client.identity.probe(proto::ProbeRequest {}).await.expect("probe");
    rig.finish();
}

/// Whoever reads the log may stop: no call and no probe waits for it, nor does the end of the driver.
#[apply(device_test)]
async fn a_log_that_nobody_reads_stops_no_call() {
    let (port, dir) = (free_port(), testkit::temp_dir());
    let (reader, writer) = std::io::pipe().expect("a pipe");
    let mut driver = testkit::driver_command(dir.path(), PoolKind::Dir)
        .args(["--http-endpoint", &format!("127.0.0.1:{port}")])
        .env("RUST_LOG", "trace")
        .stderr(writer)
        .spawn()
        .expect("start the driver");
    let calls = async {
        let socket = dir.path().join("csi.sock");
        let mut client =
            csi_client::Client::connect(&socket, Duration::from_secs(30)).await.expect("connect");
        let mut lost = 0.0;
        while lost < 100.0 {
            let unknown = proto::ControllerGetVolumeRequest { volume_id: "x".repeat(10_000) };
            client.controller.controller_get_volume(unknown).await.expect_err("unknown");
            let (_, metrics) = get(port, "/metrics").await;
            lost = value(&metrics, r#"deltapath_log_lines_dropped_total{output="stderr"}"#).unwrap_or(0.0);
        }
    };
    let called = tokio::time::timeout(Duration::from_secs(120), calls).await;
    testkit::signal(driver.id(), nix::sys::signal::Signal::SIGTERM);
    let ended = testkit::wait(&mut driver, Duration::from_secs(60));
    called.expect("calls are answered");
    assert!(ended.success(), "{ended}");
    drop(reader);
}
