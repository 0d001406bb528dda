//! The router's part of `make bench`: what it costs beside the node's own answer and beside a bare stream over mutual TLS,
//! what 200 nodes cost, and how quickly a volume gets to another node. Needs root and 2 free cores.
//!
//! `cargo bench -p deltapath-router -- a c` runs the rows that are named; without names all.
#![allow(clippy::disallowed_methods)]
#![allow(missing_docs)]

mod nodes;
mod transfer;

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use hyper_util::rt::TokioIo;
use proto::snapshot_metadata_client::SnapshotMetadataClient;
use proto::{
    ControllerGetVolumeRequest, GetCapacityRequest, GetMetadataAllocatedRequest, ListVolumesRequest,
};
use serve::identity::Role;
use testkit::bench::{HEADS, Process, median, ms, row};
use testkit::{PoolKind, played};
use tonic::transport::{Channel, Endpoint, Uri};

use nodes::{MESSAGES, TUPLES, key_of};
use testkit::cluster::{Authority, Cluster, Router, eventually, uri};

/// How the bench starts itself as the drivers of many nodes.
const NODES: &str = "--serve-nodes";
/// Many of them, and volumes on each.
const MANY: usize = 200;
const VOLUMES: usize = 50;

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().expect("a runtime");
    if let [NODES, dir, count] = arguments.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        return runtime.block_on(nodes::serve(Path::new(dir), count.parse().expect("a number"), VOLUMES));
    }
    let wanted: Vec<_> = arguments.into_iter().filter(|argument| !argument.starts_with('-')).collect();
    let wants = |row: &str| wanted.is_empty() || wanted.iter().any(|wanted| wanted == row);
    runtime.block_on(async {
        println!("{HEADS}");
        if wants("a") {
            unary().await;
        }
        if wants("b") {
            stream().await;
        }
        if wants("c") {
            many().await;
        }
        if wants("d") {
            transfer::transfer().await;
        }
    });
}

/// A call that a real driver answers at once.
async fn unary() {
    let cluster = Cluster::start(PoolKind::Dir, 2, &[]).await;
    let volume_id = cluster.volume_on(0, "bench").await;
    let mut through = cluster.client().controller;
    let mut own = cluster.nodes[0].rig.client.controller.clone();
    let (mut ours, mut owns) = (Vec::new(), Vec::new());
    // In turn, so that a slow moment of the machine meets both.
    for _ in 0..1001 {
        for (client, times) in [(&mut own, &mut owns), (&mut through, &mut ours)] {
            let begun = Instant::now();
            let request = ControllerGetVolumeRequest { volume_id: volume_id.clone() };
            client.controller_get_volume(request).await.expect("the volume");
            times.push(begun.elapsed());
        }
    }
    cluster.finish();
    let (own, ours) = (median(&owns), median(&ours));
    let extra = ours.saturating_sub(own);
    row(
        "a",
        "ControllerGetVolume through the router, above the node's own",
        &ms(extra),
        &format!(
            "the node's own {} on its socket; {:.1} x that through the router",
            ms(own),
            ours.as_secs_f64() / own.as_secs_f64()
        ),
        "2 ms",
        extra <= Duration::from_millis(2),
    );
}

/// Many nodes in a process of their own, and a router in front of them.
struct Simulated {
    router: Router,
    authority_dir: tempfile::TempDir,
    endpoints: Vec<String>,
    _nodes: Process,
}

impl Simulated {
    async fn start(count: usize) -> Self {
        let dir = tempfile::Builder::new().prefix("deltapath-bench-").tempdir().expect("temp dir");
        let authority = Authority::new("the bench's CA");
        authority.issue(dir.path(), "router", &uri("router"));
        for number in 0..count {
            authority.issue(dir.path(), &key_of(number), &uri(&format!("node/{}", key_of(number))));
        }
        let at = dir.path().display().to_string();
        let nodes = Process::of_this(&[NODES, &at, &count.to_string()]);
        let ports = dir.path().join("ports");
        eventually("the nodes serve", async || ports.exists()).await;
        let ports = std::fs::read_to_string(ports).expect("the ports");
        let endpoints: Vec<String> = ports.lines().map(|port| format!("127.0.0.1:{port}")).collect();
        let router = Router::start(dir.path(), "router", &endpoints, &[]).await;
        router.sees(count).await;
        Simulated { router, authority_dir: dir, endpoints, _nodes: nodes }
    }
}

/// The same windows on both ways.
fn endpoint() -> Endpoint {
    Endpoint::from_static("http://localhost")
        .initial_stream_window_size(512 << 10)
        .initial_connection_window_size(1 << 20)
}

async fn read_long(client: &mut SnapshotMetadataClient<Channel>) -> Duration {
    let begun = Instant::now();
    let snapshot_id = format!("snap-{}{:024x}", key_of(0), 0);
    let request = GetMetadataAllocatedRequest { snapshot_id, ..Default::default() };
    let mut stream = client.get_metadata_allocated(request).await.expect("a stream").into_inner();
    let mut tuples = 0;
    while let Some(message) = stream.message().await.expect("a message") {
        tuples += message.block_metadata.len();
    }
    assert_eq!(tuples, MESSAGES * TUPLES);
    begun.elapsed()
}

async fn stream() {
    let simulated = Simulated::start(1).await;
    let tls = played::tls(simulated.authority_dir.path(), "router", Role::Router);
    let address = Arc::new(simulated.endpoints[0].clone());
    let connect = tower::service_fn(move |_: Uri| {
        let (tls, address) = (tls.clone(), address.clone());
        async move { tls.connect(&address).await.map(|(stream, _)| TokioIo::new(stream)) }
    });
    let bare = endpoint().connect_with_connector(connect).await.expect("connect");
    let connect = csi_client::connector(simulated.router.socket.clone());
    let through = endpoint().connect_with_connector(connect).await.expect("connect");
    let [mut bare, mut through] = [bare, through]
        .map(|channel| SnapshotMetadataClient::new(channel).max_decoding_message_size(16 << 20));
    let (mut bares, mut ours) = (Vec::new(), Vec::new());
    for _ in 0..7 {
        bares.push(read_long(&mut bare).await);
        ours.push(read_long(&mut through).await);
    }
    let rate = |times: &[Duration]| (MESSAGES * TUPLES) as f64 / median(times).as_secs_f64() / 1e6;
    let (bare, ours) = (rate(&bares), rate(&ours));
    simulated.router.finish();
    row(
        "b",
        &format!("a stream of {} tuples through the router", MESSAGES * TUPLES),
        &format!("{ours:.1} M tuples/s"),
        &format!("{:.0} % of a bare stream over mutual TLS, {bare:.1} M/s", ours / bare * 100.0),
        "80 %",
        ours >= 0.8 * bare,
    );
}

async fn many() {
    let simulated = Simulated::start(MANY).await;
    let mut client = simulated.router.client.controller.clone();
    let (mut first, mut pages, mut capacities) = (Vec::new(), Vec::new(), Vec::new());
    for _ in 0..21 {
        let mut token = String::new();
        let mut volumes = 0;
        loop {
            let begun = Instant::now();
            let request = ListVolumesRequest { max_entries: 500, starting_token: token.clone() };
            let page = client.list_volumes(request).await.expect("a page").into_inner();
            if token.is_empty() {
                first.push(begun.elapsed());
            }
            pages.push(begun.elapsed());
            volumes += page.entries.len();
            token = page.next_token;
            if token.is_empty() {
                break;
            }
        }
        assert_eq!(volumes, MANY * VOLUMES);
        let begun = Instant::now();
        let capacity =
            client.get_capacity(GetCapacityRequest::default()).await.expect("GetCapacity").into_inner();
        capacities.push(begun.elapsed());
        assert_eq!(capacity.available_capacity, nodes::FREE * MANY as i64);
    }
    // Every volume in one page too: the most that it holds at once.
    let all = client.list_volumes(ListVolumesRequest::default()).await.expect("a page").into_inner();
    assert!(!all.entries.is_empty());
    let peak = testkit::process_status(simulated.router.running.pid(), "VmHWM:");
    simulated.router.finish();
    let limit = Duration::from_millis(50);
    let slowest = pages.iter().max().copied().unwrap_or_default();
    let what = format!("{MANY} nodes with {} volumes: ", MANY * VOLUMES);
    row(
        "c",
        &format!("{what}a page of 500 of ListVolumes"),
        &ms(median(&pages)),
        &format!("the first page {}, the slowest of {} {}", ms(median(&first)), pages.len(), ms(slowest)),
        "50 ms",
        median(&pages) <= limit,
    );
    row(
        "c",
        &format!("{what}GetCapacity"),
        &ms(median(&capacities)),
        "asks all nodes",
        "50 ms",
        median(&capacities) <= limit,
    );
    row(
        "c",
        &format!("{what}the router's memory"),
        &format!("{} MiB", peak >> 10),
        "the most that it had",
        "64 MiB",
        peak <= 64 << 10,
    );
}
