//! Promise: a node that lies, or that is taken for another, is named in an error and harms nobody else.

use std::pin::Pin;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use bytes::Bytes;
use csi_client::{Client, block_capability, new_volume};
use prost::Message;
use proto::ListVolumesRequest;
use proto::node::{ChooseRequest, ChooseResponse, DescribeResponse, FindResponse};
use serve::identity::Role;
use serve::relay::frame_bytes;
use testkit::cluster::{Cluster, Router, eventually, uri, within};
use testkit::{MIB, PoolKind, free_port, played};
use tonic::codegen::http::{HeaderMap, HeaderValue};
use tonic::metadata::MetadataMap;
use tonic::{Code, Status};

pub const KEY: &str = "0badcafe";
const LIAR: &str = "liar";

/// A node with this key and certificate name, which answers calls in this way; its address.
pub async fn play(
    cluster: &Cluster,
    key: &str,
    certificate: &str,
    answers: impl Fn(&str, Bytes) -> Vec<u8> + Clone + Send + Sync + 'static,
) -> String {
    play_calls(cluster, key, certificate, move |call, message| Ok(answers(call, message))).await
}

/// The same where calls may fail.
async fn play_calls(
    cluster: &Cluster,
    key: &str,
    certificate: &str,
    answers: impl Fn(&str, Bytes) -> Result<Vec<u8>, Status> + Clone + Send + Sync + 'static,
) -> String {
    cluster.authority.issue(cluster.dir.path(), certificate, &uri(&format!("node/{key}")));
    let tls = played::tls(cluster.dir.path(), certificate, Role::Node(key.to_owned()));
    let address = format!("127.0.0.1:{}", free_port());
    let listener = tokio::net::TcpListener::bind(&address).await.expect("listen");
    played::serve(listener, tls, move |path, message| Ok(vec![frame_bytes(&answers(path, message)?)]));
    address
}

/// Who a played node says it is.
pub fn described(key: &str, name: &str) -> DescribeResponse {
    described_by(key, name, "deltapath.csi.dev")
}

/// The same with another driver.
fn described_by(key: &str, name: &str, driver_name: &str) -> DescribeResponse {
    DescribeResponse {
        key: key.to_owned(),
        node_id: name.to_owned(),
        topology: [(format!("topology.{driver_name}/node"), name.to_owned())].into(),
        driver_name: driver_name.to_owned(),
        total_bytes: 1 << 40,
        free_bytes: 1 << 40,
        process: key.to_owned(),
        ..Default::default()
    }
}

/// What an arbiter answers that knows of no other call.
pub fn agreed(message: Bytes) -> Vec<u8> {
    let asked = ChooseRequest::decode(message).expect("a request");
    ChooseResponse { key: asked.proposed_key, kind: asked.kind }.encode_to_vec()
}

/// A router in front of an honest node and one that is played, which tells the truth of itself. The rest are these answers, to the
/// call of a name.
async fn beside(answers: impl Fn(&str, Bytes) -> Vec<u8> + Clone + Send + Sync + 'static) -> Cluster {
    let mut cluster = Cluster::empty();
    cluster.add_node(PoolKind::Dir, &[]).await;
    let answers = move |path: &str, message: Bytes| match path.rsplit('/').next().unwrap_or_default() {
        "Describe" => described(KEY, LIAR).encode_to_vec(),
        "Find" => FindResponse::default().encode_to_vec(),
        "Choose" => agreed(message),
        call => answers(call, message),
    };
    let address = play(&cluster, KEY, LIAR, answers).await;
    let endpoints = [cluster.endpoints(), vec![address]].concat();
    cluster.route(&endpoints, &[], 2).await;
    cluster
}

fn made(id: &str, topology: Vec<proto::Topology>) -> Vec<u8> {
    let volume = proto::Volume {
        volume_id: id.to_owned(),
        capacity_bytes: 16 * MIB,
        accessible_topology: topology,
        ..Default::default()
    };
    proto::CreateVolumeResponse { volume: Some(volume) }.encode_to_vec()
}

fn id(kind: &str, key: &str, number: u32) -> String {
    format!("{kind}-{key}{number:024x}")
}

#[apply(device_test)]
async fn an_answer_is_about_objects_of_its_node() {
    static TURN: AtomicUsize = AtomicUsize::new(0);
    let cluster = beside(|call, _| match call {
        "CreateVolume" => match TURN.fetch_add(1, Ordering::Relaxed) {
            0 => made(&id("vol", "0000000a", 1), vec![topology(LIAR)]),
            1 => made("", vec![topology(LIAR)]),
            2 => made(&id("vol", KEY, 1), Vec::new()),
            3 => made(&id("vol", KEY, 1), vec![proto::Topology::default()]),
            4 => made(&id("vol", KEY, 1), vec![topology("elsewhere")]),
            _ => made(&id("vol", KEY, 1), vec![topology(LIAR)]),
        },
        "CreateSnapshot" => {
            let snapshot = proto::Snapshot { snapshot_id: id("snap", "0000000a", 1), ..Default::default() };
            proto::CreateSnapshotResponse { snapshot: Some(snapshot) }.encode_to_vec()
        }
        _ => Vec::new(),
    })
    .await;
    let mut client = cluster.client();
    let request = within(&[topology(LIAR)], new_volume("new", 16 * MIB, block_capability()));
    let mut errors = Vec::new();
    for _ in 0..5 {
        errors.push(client.create_volume(request.clone()).await.expect_err("a lie"));
    }
    client.create_volume(request).await.expect("the truth");
    errors.push(client.create_snapshot("s", &id("vol", KEY, 1)).await.map(drop).expect_err("a lie"));
    for error in errors {
        assert_eq!(error.code(), Code::Internal, "{error}");
        assert!(error.status.message().contains(LIAR), "{error}");
    }
    cluster.volume_on(0, "honest").await;
    cluster.finish();
}

/// What the played node answers to one call, and who asks it.
struct Lie {
    call: &'static str,
    answer: Vec<u8>,
    asked: fn(&mut Client) -> Asked<'_>,
}

type Asked<'c> = Pin<Box<dyn Future<Output = Result<(), Status>> + 'c>>;

/// A row for a call of the controller.
macro_rules! lie {
    ($call:ident($request:expr) $name:literal, $answer:expr) => {
        Lie {
            call: $name,
            answer: $answer.encode_to_vec(),
            asked: |client| Box::pin(async { client.controller.$call($request).await.map(drop) }),
        }
    };
}

/// tonic panics at such details: the task that follows the address ended, and the node stayed away for good.
#[apply(device_test)]
async fn a_node_whose_status_cannot_be_read_is_asked_again() {
    let mut cluster = Cluster::empty();
    cluster.add_node(PoolKind::Dir, &[]).await;
    let is_broken = Arc::new(AtomicBool::new(true));
    let answers = {
        let is_broken = is_broken.clone();
        move |path: &str, message: Bytes| {
            let mut broken = Status::failed_precondition("asleep");
            let details =
                [("grpc-status-details-bin".parse().expect("a name"), HeaderValue::from_static("***"))];
            *broken.metadata_mut() = MetadataMap::from_headers(HeaderMap::from_iter(details));
            match path.rsplit('/').next().unwrap_or_default() {
                "Describe" if !is_broken.load(Ordering::Relaxed) => Ok(described(KEY, LIAR).encode_to_vec()),
                "Find" => Ok(FindResponse::default().encode_to_vec()),
                "Choose" => Ok(agreed(message)),
                _ => Err(broken),
            }
        }
    };
    let address = play_calls(&cluster, KEY, LIAR, answers).await;
    cluster.route(&[cluster.endpoints(), vec![address]].concat(), &[], 1).await;
    eventually("it is asked", async || cluster.router().running.log().contains("asleep")).await;
    is_broken.store(false, Ordering::Relaxed);
    cluster.router().sees(2).await;
    let request = within(&[topology(LIAR)], new_volume("new", 16 * MIB, block_capability()));
    let refused = cluster.client().create_volume(request).await.expect_err("a status");
    assert_eq!((refused.code(), refused.status.message()), (Code::FailedPrecondition, "asleep"));
    cluster.volume_on(0, "honest").await;
    cluster.finish();
}

#[apply(device_test)]
async fn an_impossible_answer_is_internal_and_names_the_node() {
    static ANSWER: Mutex<(&str, Vec<u8>)> = Mutex::new(("", Vec::new()));
    let cluster = beside(|call, _| {
        let answer = ANSWER.lock().expect("an answer");
        if answer.0 == call { answer.1.clone() } else { Vec::new() }
    })
    .await;
    let own = |kind: &str| id(kind, KEY, 1);
    let (volume_id, others) = (|| id("vol", KEY, 1), |kind: &str| id(kind, "0000000a", 1));
    let volume = |id: String, capacity_bytes: i64| {
        let accessible_topology = vec![topology(LIAR)];
        Some(proto::Volume { volume_id: id, capacity_bytes, accessible_topology, ..Default::default() })
    };
    let snapshot = |snapshot_id: String, source_volume_id: String| {
        Some(proto::Snapshot { snapshot_id, source_volume_id, ready_to_use: true, ..Default::default() })
    };
    let group = |group_snapshot_id: String, source_volume_id: String| {
        let snapshots = snapshot(own("snap"), source_volume_id).into_iter().collect();
        Some(proto::VolumeGroupSnapshot { group_snapshot_id, snapshots, ..Default::default() })
    };
    let capacity = |available: i64, most: i64, least: i64| proto::GetCapacityResponse {
        available_capacity: available,
        maximum_volume_size: Some(most),
        minimum_volume_size: Some(least),
    };
    let listed = |count: u32, bytes: usize| proto::ListVolumesResponse {
        entries: (0..count)
            .map(|number| {
                let volume_context = [("a".to_owned(), "x".repeat(bytes))].into();
                let volume_id = id("vol", KEY, number);
                let volume = proto::Volume { volume_id, volume_context, ..Default::default() };
                proto::list_volumes_response::Entry { volume: Some(volume), status: None }
            })
            .collect(),
        next_token: String::new(),
    };
    let snapshots = |source: String| proto::ListSnapshotsResponse {
        entries: vec![proto::list_snapshots_response::Entry { snapshot: snapshot(own("snap"), source) }],
        next_token: String::new(),
    };
    let mut lies = Vec::new();
    for capacity_bytes in [-5, 1, 16 * MIB - 1, 32 * MIB + 1] {
        let answer = proto::CreateVolumeResponse { volume: volume(volume_id(), capacity_bytes) };
        lies.push(lie!(create_volume(new_on_liar()) "CreateVolume", answer));
        let answer = proto::ControllerExpandVolumeResponse { capacity_bytes, node_expansion_required: false };
        lies.push(lie!(controller_expand_volume(expansion()) "ControllerExpandVolume", answer));
    }
    for id in [others("vol"), id("vol", KEY, 2), String::new()] {
        let answer = proto::ControllerGetVolumeResponse { volume: volume(id.clone(), MIB), status: None };
        lies.push(lie!(controller_get_volume(proto::ControllerGetVolumeRequest { volume_id: its("vol") }) "ControllerGetVolume", answer));
        let health = proto::VolumeHealth { volume_id: id.clone(), health_statuses: Vec::new() };
        let answer = proto::ControllerGetVolumeHealthResponse { volume_health: Some(health) };
        lies.push(lie!(controller_get_volume_health(proto::ControllerGetVolumeHealthRequest { volume_id: its("vol"), ..Default::default() }) "ControllerGetVolumeHealth", answer));
        let answer = proto::CreateSnapshotResponse { snapshot: snapshot(own("snap"), id) };
        lies.push(lie!(create_snapshot(new_snapshot()) "CreateSnapshot", answer));
    }
    let answer = proto::CreateSnapshotResponse { snapshot: snapshot(others("snap"), volume_id()) };
    lies.push(lie!(create_snapshot(new_snapshot()) "CreateSnapshot", answer));
    let answer = proto::GetSnapshotResponse { snapshot: snapshot(id("snap", KEY, 2), volume_id()) };
    lies.push(lie!(get_snapshot(proto::GetSnapshotRequest { snapshot_id: its("snap"), ..Default::default() }) "GetSnapshot", answer));
    for answer in [capacity(-1, 1, 1), capacity(1, -1, 1), capacity(1, 1, i64::MIN)] {
        lies.push(lie!(get_capacity(proto::GetCapacityRequest::default()) "GetCapacity", answer));
    }
    lies.push(lie!(list_volumes(page_of(2)) "ListVolumes", listed(3, 1)));
    lies.push(lie!(list_volumes(page_of(0)) "ListVolumes", listed(5001, 1)));
    // More than a client takes.
    lies.push(lie!(list_volumes(page_of(0)) "ListVolumes", listed(1, 5 << 20)));
    lies.push(lie!(list_snapshots(proto::ListSnapshotsRequest::default()) "ListSnapshots", snapshots(others("vol"))));
    lies.push(lie!(
        list_snapshots(proto::ListSnapshotsRequest { source_volume_id: its("vol"), ..Default::default() }) "ListSnapshots",
        snapshots(others("vol"))
    ));
    lies.push(lie!(
        list_snapshots(proto::ListSnapshotsRequest { source_volume_id: its("vol"), ..Default::default() }) "ListSnapshots",
        snapshots(id("vol", KEY, 2))
    ));
    lies.push(lie!(
        list_snapshots(proto::ListSnapshotsRequest { snapshot_id: id("snap", KEY, 2), ..Default::default() }) "ListSnapshots",
        snapshots(volume_id())
    ));
    let of = |sources: &[String]| {
        let snapshots = sources.iter().filter_map(|source| snapshot(own("snap"), source.clone())).collect();
        let group_snapshot_id = own("group");
        Some(proto::VolumeGroupSnapshot { group_snapshot_id, snapshots, ..Default::default() })
    };
    for group in [
        group(others("group"), volume_id()),
        group(own("group"), others("vol")),
        of(&[]),
        of(&[id("vol", KEY, 2)]),
        of(&[volume_id(), id("vol", KEY, 2)]),
        of(&[volume_id(), volume_id()]),
    ] {
        let answer = proto::CreateVolumeGroupSnapshotResponse { group_snapshot: group.clone() };
        lies.push(Lie {
            call: "CreateVolumeGroupSnapshot",
            answer: answer.encode_to_vec(),
            asked: |client| {
                Box::pin(async {
                    client.create_group("g", &[its("vol")]).await.map(drop).map_err(|error| error.status)
                })
            },
        });
    }
    let mut client = cluster.client();
    let mut wrong = Vec::new();
    for (row, Lie { call, answer, asked }) in lies.into_iter().enumerate() {
        *ANSWER.lock().expect("an answer") = (call, answer);
        match asked(&mut client).await {
            Err(status) if status.code() == Code::Internal && status.message().contains(LIAR) => {}
            Err(status) => wrong.push(format!("{row}: {call}: {status}")),
            Ok(()) => wrong.push(format!("{row}: {call}: it is believed")),
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
    cluster.finish();
}

fn its(kind: &str) -> String {
    id(kind, KEY, 1)
}

fn size() -> Option<proto::CapacityRange> {
    Some(proto::CapacityRange { required_bytes: 16 * MIB, limit_bytes: 32 * MIB })
}

fn new_on_liar() -> proto::CreateVolumeRequest {
    let new = new_volume("new", 16 * MIB, block_capability());
    within(&[topology(LIAR)], proto::CreateVolumeRequest { capacity_range: size(), ..new })
}

fn expansion() -> proto::ControllerExpandVolumeRequest {
    let volume_id = its("vol");
    proto::ControllerExpandVolumeRequest { volume_id, capacity_range: size(), ..Default::default() }
}

fn new_snapshot() -> proto::CreateSnapshotRequest {
    let (name, source_volume_id) = ("s".to_owned(), its("vol"));
    proto::CreateSnapshotRequest { name, source_volume_id, ..Default::default() }
}

fn page_of(max_entries: i32) -> ListVolumesRequest {
    ListVolumesRequest { max_entries, ..Default::default() }
}

fn topology(name: &str) -> proto::Topology {
    proto::Topology { segments: [("topology.deltapath.csi.dev/node".to_owned(), name.to_owned())].into() }
}

#[apply(device_test)]
async fn a_list_that_does_not_lead_on_is_cut_off() {
    static TURN: AtomicUsize = AtomicUsize::new(0);
    let cluster = beside(|call, _| match call {
        "ListVolumes" => {
            let page = |key: &str, next: &str, entries: usize| proto::ListVolumesResponse {
                entries: vec![
                    proto::list_volumes_response::Entry {
                        volume: Some(proto::Volume { volume_id: id("vol", key, 1), ..Default::default() }),
                        status: None,
                    };
                    entries
                ],
                next_token: next.to_owned(),
            };
            match TURN.fetch_add(1, Ordering::Relaxed) {
                0 => page(KEY, &id("vol", "0000000a", 2), 1),
                1 => page(KEY, &id("vol", KEY, 2), 0),
                2 => page("0000000a", "", 1),
                _ => page(KEY, &id("vol", KEY, 1), 1),
            }
            .encode_to_vec()
        }
        _ => Vec::new(),
    })
    .await;
    let mut client = cluster.client();
    let mut list = async |token: &str| {
        let request = ListVolumesRequest { starting_token: token.to_owned(), ..Default::default() };
        client.controller.list_volumes(request).await.map(tonic::Response::into_inner)
    };
    for _ in 0..3 {
        let status = list("").await.expect_err("a lie");
        assert!(status.code() == Code::Internal && status.message().contains(LIAR), "{status}");
    }
    // The same page for ever.
    let first = list("").await.expect("a page");
    assert_eq!(first.next_token, id("vol", KEY, 1));
    let status = list(&first.next_token).await.expect_err("it does not lead on");
    assert!(status.code() == Code::Internal && status.message().contains(LIAR), "{status}");
    cluster.finish();
}

#[apply(device_cases)]
async fn a_stranger_is_refused_and_never_the_others(#[values(false, true)] is_named: bool) {
    let mut cluster = Cluster::empty();
    for _ in 0..2 {
        cluster.add_node(PoolKind::Dir, &[]).await;
    }
    let driver_name = if is_named { "other.csi.dev" } else { "" };
    let stranger = move |path: &str, _| match path.ends_with("/Describe") {
        true => described_by(KEY, LIAR, driver_name).encode_to_vec(),
        false => Vec::new(),
    };
    let address = play(&cluster, KEY, LIAR, stranger).await;
    let honest = cluster.endpoints();
    // With a name one honest node is enough. Without one the stranger answers first: the others are not there yet.
    let count = if is_named { 1 } else { 2 };
    let flags: &[&str] = if is_named { &["--driver-name=deltapath.csi.dev"] } else { &[] };
    (0..count).for_each(|node| cluster.nodes[node].signal(nix::sys::signal::Signal::SIGSTOP));
    let endpoints = [vec![address], honest[..count].to_vec()].concat();
    let router = Router::start(cluster.dir.path(), "router", &endpoints, flags).await;
    tokio::time::sleep(std::time::Duration::from_secs(1)).await;
    (0..count).for_each(|node| cluster.nodes[node].signal(nix::sys::signal::Signal::SIGCONT));
    router.sees(count).await;
    cluster.router = Some(router);
    let mut client = cluster.client();
    for node in 0..count {
        cluster.volume_on(node, &format!("on-{node}")).await;
    }
    let info = client.identity.get_plugin_info(proto::GetPluginInfoRequest {}).await.expect("GetPluginInfo");
    assert_eq!(info.into_inner().name, "deltapath.csi.dev");
    let error = client.delete_volume(&id("vol", KEY, 1)).await.expect_err("a stranger's");
    assert_eq!(error.code(), Code::FailedPrecondition, "{error}");
    let why = format!("its driver is {driver_name:?}");
    let message = error.status.message();
    assert!(message.contains(LIAR) && message.contains(&why) && !message.contains("forget"), "{error}");
    let status = client.snapshots().await.expect_err("a stranger's would be missing").status;
    assert_eq!(status.code(), Code::Unavailable, "{status}");
    let message = status.message();
    assert!(message.contains(LIAR) && message.contains(&why) && !message.contains("not answer"), "{status}");
    cluster.finish();
}

/// It would fit each topology that is asked for, or another node's.
#[apply(device_cases)]
async fn a_node_whose_topology_is_not_its_own_is_not_used(
    #[values(&[("rack", "7")], &[("topology.deltapath.csi.dev/node", "other")])] segments: &'static [(
        &str,
        &str,
    )],
) {
    let mut cluster = Cluster::empty();
    cluster.add_node(PoolKind::Dir, &[]).await;
    let topology = segments.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect();
    let lie = DescribeResponse { topology, ..described(KEY, LIAR) }.encode_to_vec();
    let answers = move |path: &str, _| if path.ends_with("/Describe") { lie.clone() } else { Vec::new() };
    let address = play(&cluster, KEY, LIAR, answers).await;
    let router = Router::start(
        cluster.dir.path(),
        "router",
        &[cluster.endpoints(), vec![address.clone()]].concat(),
        &[],
    )
    .await;
    let why = "its topology must have";
    testkit::cluster::eventually("it is refused", async || router.running.log().contains(why)).await;
    router.sees(1).await;
    let error = router.client.clone().delete_volume(&id("vol", KEY, 1)).await.expect_err("it is not used");
    assert_eq!(error.code(), Code::Unavailable, "{error}");
    let message = error.status.message();
    assert!(message.contains(&address) && message.contains(why) && !message.contains("forget"), "{error}");
    cluster.router = Some(router);
    cluster.volume_on(0, "honest").await;
    cluster.finish();
}
