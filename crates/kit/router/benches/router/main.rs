//! The router's part of `make bench`: what it costs beside the node's own answer and beside a bare stream over mutual TLS,
//! what 10, 100 and 1,000 nodes cost, and how quickly a volume gets to another node. Needs root and 2 free cores.
//!
//! `cargo bench -p deltapath-router -- a c` runs the rows that are named; without names all.
#![allow(clippy::disallowed_methods)]
#![allow(missing_docs)]

mod nodes;
mod transfer;

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use csi_client::{block_capability, new_volume};
use hyper_util::rt::TokioIo;
use proto::snapshot_metadata_client::SnapshotMetadataClient;
use proto::{
    ControllerGetVolumeRequest, GetCapacityRequest, GetMetadataAllocatedRequest, ListSnapshotsRequest,
    ListVolumesRequest,
};
use serve::identity::Role;
use testkit::bench::{HEADS, Process, median, ms, row};
use testkit::{PoolKind, played};
use tonic::transport::{Channel, Endpoint, Uri};

use nodes::{MESSAGES, TUPLES, key_of};
use testkit::cluster::{Authority, Cluster, Router, eventually, uri};

/// How the bench starts itself as the drivers of many nodes.
const NODES: &str = "--serve-nodes";
/// Volumes on all of them together, and as many snapshots.
const VOLUMES: usize = 100_000;
const PAGE: i32 = 500;

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().expect("a runtime");
    if let [NODES, dir, first, count, of, port] = arguments.iter().map(String::as_str).collect::<Vec<_>>()[..]
    {
        let [first, count, of] = [first, count, of].map(|number| number.parse().expect("a number"));
        let port = port.parse().expect("a port");
        return runtime.block_on(nodes::serve(Path::new(dir), first..first + count, VOLUMES / of, port));
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
            for nodes in [10, 100, 1000] {
                many(nodes).await;
            }
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

/// Many nodes in a process of their own, the last in another one, and a router in front of them.
struct Simulated {
    router: Router,
    authority_dir: tempfile::TempDir,
    endpoints: Vec<String>,
    /// From the router's start until all nodes were up.
    started: Duration,
    last: Option<Process>,
    _others: Process,
}

impl Simulated {
    async fn start(count: usize) -> Self {
        let dir = tempfile::Builder::new().prefix("deltapath-bench-").tempdir().expect("temp dir");
        let authority = Authority::new("the bench's CA");
        authority.issue(dir.path(), "router", &uri("router"));
        for number in 0..count {
            authority.issue(dir.path(), &key_of(number), &uri(&format!("node/{}", key_of(number))));
        }
        let others = serve(dir.path(), 0, count - 1, count, 0);
        let last = serve(dir.path(), count - 1, 1, count, 0);
        let mut endpoints = Vec::new();
        for first in [0, count - 1] {
            let ports = dir.path().join(nodes::ports(first));
            eventually("the nodes serve", async || ports.exists()).await;
            let ports = std::fs::read_to_string(ports).expect("the ports");
            endpoints.extend(ports.lines().map(|port| format!("127.0.0.1:{port}")));
        }
        let begun = Instant::now();
        let router = Router::start(dir.path(), "router", &endpoints, &[]).await;
        router.sees(count).await;
        let (started, last) = (begun.elapsed(), Some(last));
        Simulated { router, authority_dir: dir, endpoints, started, last, _others: others }
    }

    /// The last node's process ends, and starts again where it was: how long until the router uses it.
    async fn last_returns(&mut self) -> Duration {
        let (count, dir) = (self.endpoints.len(), self.authority_dir.path().to_owned());
        self.last = None;
        self.router.sees(count - 1).await;
        let (_, port) = self.endpoints[count - 1].rsplit_once(':').expect("a port");
        let begun = Instant::now();
        self.last = Some(serve(&dir, count - 1, 1, count, port.parse().expect("a port")));
        self.router.sees(count).await;
        begun.elapsed()
    }
}

/// Starts nodes, `count` from the number `first` on, of so many in all. The port may be any: 0.
fn serve(dir: &Path, first: usize, count: usize, of: usize, port: u16) -> Process {
    let numbers = [first, count, of, port.into()].map(|number| number.to_string());
    let [first, count, of, port] = numbers.each_ref().map(String::as_str);
    Process::of_this(&[NODES, &dir.display().to_string(), first, count, of, port])
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
    let simulated = Simulated::start(2).await;
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

/// What calls about all nodes cost, and what nodes cost that nobody asks for anything.
async fn many(nodes: usize) {
    let mut simulated = Simulated::start(nodes).await;
    let mut client = simulated.router.client.controller.clone();
    let mut times: [Vec<Duration>; 4] = Default::default();
    let [volumes, snapshots, capacities, created] = &mut times;
    let mut token = String::new();
    for round in 0..101 {
        let begun = Instant::now();
        let request = ListVolumesRequest { max_entries: PAGE, starting_token: token.clone() };
        let page = client.list_volumes(request).await.expect("a page").into_inner();
        volumes.push(begun.elapsed());
        assert_eq!(page.entries.len(), PAGE as usize);
        let begun = Instant::now();
        let request = ListSnapshotsRequest {
            max_entries: PAGE,
            starting_token: token.replace("vol", "snap"),
            ..Default::default()
        };
        let listed = client.list_snapshots(request).await.expect("a page").into_inner();
        snapshots.push(begun.elapsed());
        assert_eq!(listed.entries.len(), PAGE as usize);
        token = page.next_token;
        let begun = Instant::now();
        let capacity =
            client.get_capacity(GetCapacityRequest::default()).await.expect("GetCapacity").into_inner();
        capacities.push(begun.elapsed());
        assert_eq!(capacity.available_capacity, nodes::FREE * nodes as i64);
        let begun = Instant::now();
        let request = new_volume(&format!("new-{round}"), 1 << 30, block_capability());
        client.create_volume(request).await.expect("a volume");
        created.push(begun.elapsed());
    }
    // The longest page: the most that it holds at once.
    let all = client.list_volumes(ListVolumesRequest::default()).await.expect("a page").into_inner();
    assert_eq!(all.entries.len(), 5000);
    let returned = simulated.last_returns().await;
    let peak = testkit::process_status(simulated.router.running.pid(), "VmHWM:");
    simulated.router.finish();
    let what = |what: &str| format!("{nodes} nodes with {VOLUMES} volumes: {what}");
    for (name, times, must) in [
        ("a page of 500 of ListVolumes", &times[0], 50),
        ("a page of 500 of ListSnapshots", &times[1], 50),
        ("GetCapacity", &times[2], 100),
        ("CreateVolume", &times[3], 250),
    ] {
        let (median, slowest) = (median(times), times.iter().max().copied().unwrap_or_default());
        let beside = format!("the slowest of {}: {}", times.len(), ms(slowest));
        let must = Duration::from_millis(must);
        row("c", &what(name), &ms(median), &beside, &ms(must), median <= must);
    }
    for (name, time, must) in
        [("start until all are up", simulated.started, 5), ("a node's return", returned, 2)]
    {
        let must = Duration::from_secs(must);
        row("c", &what(name), &ms(time), "one run", &ms(must), time <= must);
    }
    let (most, memory) = (128 << 10, what("the router's memory"));
    row("c", &memory, &format!("{} MiB", peak >> 10), "the most that it had", "128 MiB", peak <= most);
}
