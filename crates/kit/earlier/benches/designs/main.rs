//! The designs beside each other, as `make bench` shows them: the same delta through each, on one API server, in front of one
//! driver. Needs root, and Go for the API server. All bytes are counted by go-betweens, which cost every design a little.
//!
//! `cargo bench -p deltapath-earlier -- 10 10000` measures deltas of 10 and 10,000 blocks; without numbers 10, 10,000 and 1,000,000.
#![allow(clippy::disallowed_methods)]

mod cost;
mod driver;
mod stage;
mod wire;

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use csi_client::delta_of;
use proto::differential::DifferentialSnapshotRequest;
use proto::differential::differential_snapshot_client::DifferentialSnapshotClient;
use proto::kubernetes::GetMetadataDeltaRequest as KubernetesDeltaRequest;
use proto::snapshot_metadata_client::SnapshotMetadataClient;
use serde_json::{Value, json};
use testkit::api_server::ApiServer;
use testkit::bench::{Process, record};
use testkit::earlier::aggregation::object;
use testkit::earlier::world::{World, https};
use testkit::gateway::world::Client;

use cost::{Watched, seconds};
use driver::{BLOCK, handle, offset};
use stage::{GATEWAY, Stage};

/// How the bench starts itself as a driver.
const DRIVER: &str = "--serve-driver";
/// Entries in an answer of a VolumeSnapshotDelta, and in one of cbt-http: the most that each gives by default.
const DELTA_PAGE: u64 = 256;
const HTTP_PAGE: u64 = 4096;

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().expect("a runtime");
    if let [DRIVER, name, socket] = arguments.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        return runtime.block_on(driver::serve(name, Path::new(socket)));
    }
    let wanted: Vec<u64> = arguments.iter().filter_map(|argument| argument.parse().ok()).collect();
    let sizes = if wanted.is_empty() { vec![10, 10_000, 1_000_000] } else { wanted };
    runtime.block_on(async {
        let api = ApiServer::start().await;
        let crds =
            ["differential", "aggregated"].map(|design| format!("deploy/components/{design}/crd.yaml"));
        api.install(&crds).await;
        let api = Arc::new(api);
        let mut world = World::new(api.clone(), "designs_beside_each_other").await;
        // The name that the gateway's role allows; no logs of debugging.
        (world.driver, world.log) = ("deltapath.csi.dev".into(), "info");
        compare(&world, &sizes).await;
    });
}

async fn compare(world: &World, sizes: &[u64]) {
    let _driver = Process::of_this(&[DRIVER, &world.driver, &world.csi.display().to_string()]);
    world.snapshot("base", "base").await;
    for blocks in sizes.iter().chain([&10]) {
        let name = handle(*blocks);
        let snapshots = world.api.objects("VolumeSnapshot", Some(&world.namespace));
        if snapshots.get_opt(&name).await.expect("get").is_none() {
            world.snapshot(&name, &name).await;
        }
    }
    let stage = Stage::new(world).await;
    for design in Design::ALL {
        // Reviews are remembered, connections and caches are there.
        stage.walk(design, 10).await;
    }
    let mut idle = Watched::begin(&world.api, &stage.counts()).await;
    tokio::time::sleep(Duration::from_secs(10)).await;
    let idle = idle.end(world, 1).await;
    for blocks in sizes {
        println!("\nA delta of {blocks} blocks:\n");
        println!(
            "| Design | Time | Compared with the stream | Calls | Calls at kube-apiserver by the parts | Bytes to and from the user | Bytes between the parts | CPU of kube-apiserver | Its memory | Writes to etcd |"
        );
        println!("| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |");
        let mut stream = None;
        for design in Design::ALL {
            let rounds = match blocks {
                ..1_000 => 20,
                1_000..100_000 => 5,
                _ => 1,
            };
            let mut watched = Watched::begin(&world.api, &stage.counts()).await;
            let (mut times, mut calls) = (Vec::new(), 0);
            for _ in 0..rounds {
                let begun = Instant::now();
                calls = stage.walk(design, *blocks).await;
                times.push(begun.elapsed());
            }
            let cost = watched.end(world, rounds).await;
            times.sort();
            let time = times[times.len() / 2];
            let beside = match design {
                Design::Driver => "-".to_owned(),
                _ => format!("{:.1} x", time.as_secs_f64() / stream.get_or_insert(time).as_secs_f64()),
            };
            let shown = seconds(time.as_secs_f64());
            println!("| {} | {shown} | {beside} | {calls} | {} |", design.name(), cost.cells());
            record(&blocks.to_string(), design.name(), &shown, &beside, "", true);
        }
    }
    println!("\nIn 10 s in which nobody asks, the parts and the API server by themselves: {idle}");
    let load = std::fs::read_to_string("/proc/loadavg").expect("loadavg");
    println!("Load of the machine in the end: {}", load.split(' ').take(3).collect::<Vec<_>>().join(" "));
}

#[derive(Clone, Copy)]
enum Design {
    Driver,
    Stream,
    Listener,
    Call,
    Delta,
    CbtHttp,
}

impl Design {
    const ALL: [Design; 6] =
        [Design::Driver, Design::Stream, Design::Listener, Design::Call, Design::Delta, Design::CbtHttp];

    fn name(self) -> &'static str {
        match self {
            Design::Driver => "(the driver's own stream, on its socket)",
            Design::Stream => "SnapshotMetadata: the stream, through deltapath-gateway",
            Design::Listener => "DifferentialSnapshot: the callback listener",
            Design::Call => "DifferentialSnapshot: the call, on its socket",
            Design::Delta => "VolumeSnapshotDelta, through kube-apiserver",
            Design::CbtHttp => "VolumeSnapshotDelta: cbt-http without kube-apiserver",
        }
    }
}

/// The blocks that a walk has told so far, each checked.
#[derive(Default)]
struct Told(u64);

impl Told {
    fn push(&mut self, begin: u64, size: u64) {
        assert_eq!((begin, size), (offset(self.0), BLOCK), "block {}", self.0);
        self.0 += 1;
    }

    fn list(&mut self, list: &Value, at: &str, size: &str, unit: u64) {
        for block in list.as_array().expect("a list") {
            let number = |field: &str| block[field].as_u64().expect("a number");
            self.push(number(at) * unit, number(size));
        }
    }
}

impl Stage<'_> {
    /// Walks the whole delta, with connections of its own, and says with how many calls.
    async fn walk(&self, design: Design, blocks: u64) -> u64 {
        let (mut told, target) = (Told::default(), handle(blocks));
        let calls = match design {
            Design::Driver => self.driver(target, &mut told).await,
            Design::Stream => self.stream(target, &mut told).await,
            Design::Listener => self.listener(target, &mut told).await,
            Design::Call => self.call(target, &mut told).await,
            Design::Delta => self.delta(target, &mut told).await,
            Design::CbtHttp => self.cbt_http(target, &mut told).await,
        };
        assert_eq!(told.0, blocks, "{}", design.name());
        calls
    }

    async fn driver(&self, target: String, told: &mut Told) -> u64 {
        let mut client = SnapshotMetadataClient::new(testkit::channel(&self.driver_socket).await);
        let request = delta_of("base", &target);
        let mut stream = client.get_metadata_delta(request).await.expect("a stream").into_inner();
        while let Some(message) = stream.message().await.expect("a message") {
            for tuple in message.block_metadata {
                told.push(tuple.byte_offset as u64, tuple.size_bytes as u64);
            }
        }
        1
    }

    async fn stream(&self, target: String, told: &mut Told) -> u64 {
        let client = Client::connect(self.to_gateway.at.port(), GATEWAY, &self.gateway_ca).await;
        let mut client = client.expect("connect").0;
        let request = KubernetesDeltaRequest {
            security_token: self.token.clone(),
            namespace: self.world.namespace.clone(),
            base_snapshot_id: "base".into(),
            target_snapshot_name: target,
            ..Default::default()
        };
        let mut stream = client.get_metadata_delta(request).await.expect("a stream").into_inner();
        while let Some(message) = stream.message().await.expect("a message") {
            for tuple in message.block_metadata {
                told.push(tuple.byte_offset as u64, tuple.size_bytes as u64);
            }
        }
        1
    }

    async fn listener(&self, target: String, told: &mut Told) -> u64 {
        let kube = self.kube();
        let objects = format!(
            "https://localhost:{}/apis/differential.cbt.storage.k8s.io/v1alpha1/namespaces/{}/differentialsnapshots",
            self.to_kube.at.port(),
            self.world.namespace
        );
        let spec = json!({"baseVolumeSnapshotName": "base", "targetVolumeSnapshotName": target});
        let made = self.world.object("walk", spec).to_string();
        let made = kube.post(&objects).header("content-type", "application/json").body(made);
        let made = answer(made.bearer_auth(&self.kube_token), 201).await;
        // It waits for the URL as `kubectl wait` does.
        let version = made["metadata"]["resourceVersion"].as_str().expect("a version");
        let watch =
            format!("{objects}?watch=true&fieldSelector=metadata.name%3Dwalk&resourceVersion={version}");
        let mut watch = kube.get(watch).bearer_auth(&self.kube_token).send().await.expect("a watch");
        assert_eq!(watch.status(), 200);
        let mut seen = Vec::new();
        let url = loop {
            seen.extend_from_slice(&watch.chunk().await.expect("an event").expect("a URL before the end"));
            let events =
                seen.split(|byte| *byte == b'\n').filter_map(|line| serde_json::from_slice(line).ok());
            let status = events.map(|mut event: Value| event["object"]["status"].take()).next_back();
            if let Some(status) = status.filter(|status| status["state"] == "url-ready") {
                break status["callbackURL"].as_str().expect("a URL").to_owned();
            }
        };
        drop(watch);
        let (client, mut at, mut calls) = (self.differential.https(self.to_listener.at), String::new(), 3);
        loop {
            let page = client.get(format!("{url}?startOffset={at}")).bearer_auth(&self.token);
            let page = answer(page, 200).await;
            calls += 1;
            told.list(&page["ChangeBlockList"], "Offset", "Size", 1);
            at = page["NextOffset"].as_str().expect("a place").to_owned();
            if at.is_empty() {
                break;
            }
        }
        answer(kube.delete(format!("{objects}/walk")).bearer_auth(&self.kube_token), 200).await;
        calls
    }

    async fn call(&self, target: String, told: &mut Told) -> u64 {
        let mut client = DifferentialSnapshotClient::new(testkit::channel(&self.call_socket).await);
        let (mut start_offset, mut calls) = (String::new(), 0);
        loop {
            let request = DifferentialSnapshotRequest {
                snapshot_base: "base".into(),
                snapshot_target: target.clone(),
                start_offset,
                ..Default::default()
            };
            let page = client.get_differential_snapshot(request).await.expect("a page").into_inner();
            calls += 1;
            page.change_block_list.iter().for_each(|block| told.push(block.offset, block.size));
            start_offset = page.next_offset;
            if start_offset.is_empty() {
                return calls;
            }
        }
    }

    async fn delta(&self, target: String, told: &mut Told) -> u64 {
        let kube = self.kube();
        let url = format!(
            "https://localhost:{}/apis/cbt.storage.k8s.io/v1alpha1/namespaces/{}/volumesnapshotdeltas",
            self.to_kube.at.port(),
            self.world.namespace
        );
        let (mut offset, mut calls) = (0, 0);
        loop {
            let object = object(json!({
                "baseVolumeSnapshotName": "base", "targetVolumeSnapshotName": target, "offset": offset,
            }));
            let object = kube.post(&url).header("content-type", "application/json").body(object.to_string());
            let status = answer(object.bearer_auth(&self.kube_token), 201).await["status"].take();
            calls += 1;
            assert_eq!(status["limit"], DELTA_PAGE, "{status}");
            told.list(&status["changedBlocks"], "offset", "blockSizeBytes", BLOCK);
            match status["state"].as_u64() {
                Some(0) => return calls,
                Some(1) => offset = status["continue"].as_u64().expect("where to go on"),
                _ => panic!("{status}"),
            }
        }
    }

    async fn cbt_http(&self, target: String, told: &mut Told) -> u64 {
        let client = self.http.https(self.to_http.at);
        let url = format!("https://localhost:{}/v1alpha1/deltas", self.to_http.at.port());
        let (mut token, mut calls) = (String::new(), 0);
        loop {
            let request = json!({
                "fromSnapshotId": "base", "toSnapshotId": target, "maxEntries": HTTP_PAGE, "startingToken": token,
            });
            let page = client.post(&url).header("content-type", "application/json").body(request.to_string());
            let page = answer(page.bearer_auth(&self.http_token), 200).await;
            calls += 1;
            told.list(&page["changedBlocks"], "offset", "blockSizeBytes", 1);
            token = page["nextToken"].as_str().expect("a token").to_owned();
            if token.is_empty() {
                return calls;
            }
        }
    }

    /// A new client of the API server.
    fn kube(&self) -> reqwest::Client {
        let ca = std::fs::read_to_string(self.world.api.file("ca.crt")).expect("the CA");
        https(&ca, "localhost", self.to_kube.at)
    }
}

async fn answer(request: reqwest::RequestBuilder, code: u16) -> Value {
    let answer = request.send().await.expect("an answer");
    let found = answer.status();
    let body = answer.bytes().await.expect("a body");
    assert_eq!(found.as_u16(), code, "{}", String::from_utf8_lossy(&body));
    serde_json::from_slice(&body).expect("JSON")
}
