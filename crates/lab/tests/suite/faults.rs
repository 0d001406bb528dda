//! Every fault there is, seen by a client: one life of a driver is lived with each, and what it meets differs from what it
//! meets without, in the way that the table says.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Mutex;
use std::time::Duration;

use csi_client::{
    Client, Options, Question, block_capability, from_snapshot, from_volume, mount_capability, new_volume,
};
use futures_util::StreamExt;
use proto::*;
use serde_json::Value;

use super::{Lab, allocated, code, connect, delta, read};

const KIB: i64 = 1024;

/// A fault; the step that meets it; what the client sees there. The same without a fault is [`WITHOUT`].
const SEEN: &[(&str, &str, &str)] = &[
    ("cut", "delta", "v1024[8+4 32+4] Unavailable"),
    ("cut:after=2,code=OK", "delta", "v1024[8+4 32+4] v1024[64+8 128+4] OK"),
    ("cut:after=0,code=INTERNAL", "delta", "Internal"),
    ("stall", "delta", "no end"),
    ("stall:after=1", "delta", "v1024[8+4 32+4] no end"),
    ("stall:call=Probe", "probe", "no end"),
    ("late-first-message:ms=60000", "delta", "no end"),
    ("delay:ms=60000,call=GetMetadataDelta", "delta", "no end"),
    ("drip:ms=60000", "delta", "no end"),
    ("reset:call=Probe", "probe", "Unknown"),
    ("reset:after=1,call=GetMetadataDelta", "delta", "v1024[8+4 32+4] Unknown"),
    ("no-first-message", "delta", "v1024[64+8 128+4] v1024[512+4] OK"),
    ("repeat-message:after=2", "delta", "v1024[8+4 32+4] v1024[64+8 128+4] v1024[512+4] v1024[512+4] OK"),
    ("huge-messages", "delta", "OutOfRange"),
    ("swap-tuples", "delta", "v1024[32+4 8+4] v1024[128+4 64+8] v1024[512+4] OK"),
    ("swap-messages", "delta", "v1024[8+4 32+4] v1024[512+4] v1024[64+8 128+4] OK"),
    (
        "overlap",
        "delta",
        "v1024[8+25088b] v1024[32+33280b] v1024[64+66048b] v1024[128+393728b] v1024[512+4] OK",
    ),
    ("duplicate-tuple", "delta", "v1024[8+4 8+4 32+4] v1024[64+8 64+8 128+4] v1024[512+4 512+4] OK"),
    ("empty-tuple", "delta", "v1024[8+0 32+4] v1024[64+0 128+4] v1024[512+0] OK"),
    ("negative-offset", "delta", "v1024[-4+4 32+4] v1024[-4+8 128+4] v1024[-4+4] OK"),
    ("negative-size", "delta", "v1024[8+-4 32+4] v1024[64+-8 128+4] v1024[512+-4] OK"),
    ("past-capacity", "delta", "v1024[8+4 32+4] v1024[64+8 128+4] v1024[512+524800b] OK"),
    ("last-fixed-past-capacity", "delta", "f1024[8+4 32+4] f1024[64+8 128+4] f1024[512+524800b] OK"),
    ("type-unknown", "delta", "?1024[8+4 32+4] ?1024[64+8 128+4] ?1024[512+4] OK"),
    ("type-changes", "delta", "v1024[8+4 32+4] f1024[64+8 128+4] f1024[512+4] OK"),
    ("fixed-uneven", "delta", "f1024[8+4 32+4] f1024[64+8 128+4] f1024[512+4] OK"),
    ("capacity-changes:after=2", "delta", "v1024[8+4 32+4] v1024[64+8 128+4] v1028[512+4] OK"),
    ("capacity-wrong", "delta", "v512[8+4 32+4] v512[64+8 128+4] v512[512+4] OK"),
    ("empty-without-message", "unchanged", "OK"),
    ("empty-is-error", "unchanged", "Internal"),
    ("end-repeats-last", "at the end", "v1024[1020+4] OK"),
    ("end-is-error", "at the end", "OutOfRange"),
    ("lose-tuple:after=2", "delta", "v1024[8+4 32+4] v1024[128+4] v1024[512+4] OK"),
    ("lose-last", "delta", "v1024[8+4 32+4] v1024[64+8 128+4] v1024[] OK"),
    ("lose-share:percent=100", "delta", "v1024[] v1024[] v1024[] OK"),
    ("lose-small", "delta", "v1024[] v1024[64+8] v1024[] OK"),
    ("lose-later:after=3", "delta", "v1024[8+4 32+4] v1024[64+8] OK"),
    ("lose-discarded", "delta", "v1024[8+4 32+4] v1024[64+8 128+4] v1024[512+4] OK"),
    ("lose-when-asked-again", "again", "v1024[32+4] v1024[64+8 128+4] v1024[512+4] OK"),
    ("lose-after-cancel", "after a cancel", "v1024[8+4 32+4] v1024[64+8 128+4] v1024[] OK"),
    ("lose-beside", "beside another", "v1024[8+4 32+4] v1024[64+8 128+4] v1024[] OK"),
    ("lose-slow:ms=20", "read slowly", "cut OK"),
    ("too-much", "delta", "v1024[0+1024] OK"),
    ("ignore-max-results", "delta", "v1024[8+4 32+4 64+8 128+4 512+4] OK"),
    ("negative-bound-is-none", "negative max_results", "v1024[8+4 32+4 64+8 128+4 512+4] OK"),
    ("negative-bound-cuts", "negative max_results", "v1024[8+4 32+4 64+8 128+4] OK"),
    ("ignore-offset", "resumed", "v1024[8+4 32+4] v1024[64+8 128+4] v1024[512+4] OK"),
    ("round-offset-up", "resumed", "v1024[64+8 128+4] v1024[512+4] OK"),
    ("shifted-window", "resumed", "v1024[28+4 64+8] v1024[124+4 508+4] OK"),
    ("refuse:code=DATA_LOSS,call=Probe", "probe", "DataLoss"),
    ("burst:call=GetMetadataDelta,times=1,of=2", "delta", "Unavailable"),
    ("put-off", "volume", "Aborted"),
    ("error-becomes", "unknown", "Internal"),
    ("error-becomes:code=OK", "unknown", "v65536[] OK"),
    ("same-is-refused", "same", "InvalidArgument"),
    ("wants-secrets", "delta", "Unauthenticated"),
    ("no-service", "services", "Controller GroupController"),
    ("no-service", "delta", "Unimplemented"),
    ("service-not-claimed", "services", "Controller GroupController"),
    ("groups-not-claimed", "services", "Controller SnapshotMetadata"),
    ("expansion-not-claimed", "expands", "false"),
    ("node-elsewhere", "node", "Unimplemented"),
    ("base-gone", "delta", "v1024[8+4 32+4] NotFound"),
    ("base-gone", "again", "NotFound"),
    ("base-gone-is-empty", "base deleted", "v65536[] OK"),
    ("base-gone-is-error:code=DATA_LOSS", "base deleted", "DataLoss"),
    ("base-gone-loses-later", "base deleted, again", "v1024[] v1024[] v1024[] OK"),
    ("source-gone", "source deleted", "NotFound"),
    ("lose-after-delete", "after a delete", "v1024[32+4] v1024[64+8 128+4] v1024[512+4] OK"),
    ("delete-ends-streams", "deleted meanwhile", "cut OK"),
    ("lose-after-restore", "after a restore", "v1024[32+4] v1024[64+8 128+4] v1024[512+4] OK"),
    ("lose-restored", "of a restored volume", "lost"),
    ("lose-after-clone", "after a clone", "v1024[32+4] v1024[64+8 128+4] v1024[512+4] OK"),
    ("lose-after-modify", "after a change", "v1024[32+4] v1024[64+8 128+4] v1024[512+4] OK"),
    ("lose-after-expand", "expanded, base", "v1024[8+4 32+4] v1024[64+8 128+4] v1024[] OK"),
    ("restored-in-use", "restored volume in use", "Aborted"),
    ("old-snapshots-grow", "expanded, base", "v2048[8+4 32+4] v2048[64+8 128+4] v2048[512+4] OK"),
    ("grown-stays-small", "expanded", "v1024[1536+4] OK"),
    ("lose-grown", "expanded", "v2048[] OK"),
    ("resume-grown-fails", "expanded, resumed", "OutOfRange"),
    ("lose-group-members", "group", "v1024[] OK"),
    ("filesystem-is-error", "filesystem", "Internal"),
    ("filesystem-is-empty", "filesystem", "v1024[] OK"),
    ("deadline-is-ok", "deadline", "cut OK"),
    ("snapshot-not-ready", "snapshot", "not ready"),
    ("fails-after-success", "snapshot", "Internal"),
];

/// What the same steps see of a driver without a fault.
const WITHOUT: &[(&str, &str)] = &[
    ("services", "Controller GroupController SnapshotMetadata"),
    ("expands", "true"),
    ("probe", "Ok"),
    ("node", "Ok"),
    ("volume", "Ok"),
    ("delta", "v1024[8+4 32+4] v1024[64+8 128+4] v1024[512+4] OK"),
    ("again", "v1024[8+4 32+4] v1024[64+8 128+4] v1024[512+4] OK"),
    ("resumed", "v1024[32+4 64+8] v1024[128+4 512+4] OK"),
    ("at the end", "v1024[] OK"),
    ("negative max_results", "InvalidArgument"),
    ("unknown", "NotFound"),
    ("same", "v1024[] OK"),
    ("unchanged", "v1024[] OK"),
    ("read slowly", "whole OK"),
    ("deadline", "cut DeadlineExceeded"),
    ("beside another", "v1024[8+4 32+4] v1024[64+8 128+4] v1024[512+4] OK"),
    ("after a cancel", "v1024[8+4 32+4] v1024[64+8 128+4] v1024[512+4] OK"),
    ("snapshot", "ready"),
    ("snapshot, again", "ready"),
    ("group", "v1024[16+4] OK"),
    ("filesystem", "v1024[0+8] OK"),
    ("after a change", "v1024[8+4 32+4] v1024[64+8 128+4] v1024[512+4] OK"),
    ("after a clone", "v1024[8+4 32+4] v1024[64+8 128+4] v1024[512+4] OK"),
    ("after a restore", "v1024[8+4 32+4] v1024[64+8 128+4] v1024[512+4] OK"),
    ("of a restored volume", "whole"),
    ("restored volume in use", "v1024[8+4 32+4] v1024[64+8 128+4] v1024[512+4] OK"),
    ("expanded", "v2048[1536+4] OK"),
    ("expanded, base", "v1024[8+4 32+4] v1024[64+8 128+4] v1024[512+4] OK"),
    ("expanded, resumed", "v2048[1536+4] OK"),
    ("deleted meanwhile", "whole OK"),
    ("after a delete", "v1024[8+4 32+4] v1024[64+8 128+4] v1024[512+4] OK"),
    ("base deleted", "v1024[8+4 32+4] v1024[64+8 128+4] v1024[512+4] OK"),
    ("base deleted, again", "v1024[8+4 32+4] v1024[64+8 128+4] v1024[512+4] OK"),
    ("source deleted", "v1024[8+4 32+4] v1024[64+8 128+4] v1024[512+4] OK"),
];

/// What is in the target and not in the base.
const CHANGED: &str = "8Ki+4Ki 32Ki+4Ki 64Ki+8Ki 128Ki+4Ki 512Ki+4Ki";

/// Makes a call again that a fault has refused, as an orchestrator would.
macro_rules! again {
    ($client:expr, $service:ident.$method:ident, $request:expr) => {{
        let request = $request;
        match $client.$service.$method(request.clone()).await {
            Ok(answer) => Some(answer.into_inner()),
            Err(_) => $client.$service.$method(request).await.ok().map(tonic::Response::into_inner),
        }
    }};
}

async fn make(client: &mut Client, name: &str, source: Option<VolumeContentSource>, mounted: bool) {
    let capability = if mounted { mount_capability("") } else { block_capability() };
    let mut request = new_volume(name, 1024 * KIB, capability);
    request.volume_content_source = source;
    again!(client, controller.create_volume, request);
}

async fn snapshot(client: &mut Client, name: &str, volume: &str, ranges: &str) {
    again!(client, controller.create_snapshot, of_snapshot(name, volume, ranges));
}

fn of_snapshot(name: &str, volume: &str, ranges: &str) -> CreateSnapshotRequest {
    CreateSnapshotRequest {
        name: name.to_owned(),
        source_volume_id: volume.to_owned(),
        parameters: [("ranges".to_owned(), ranges.to_owned())].into(),
        ..Default::default()
    }
}

async fn delete(client: &mut Client, id: &str) {
    let request = DeleteSnapshotRequest { snapshot_id: id.to_owned(), ..Default::default() };
    again!(client, controller.delete_snapshot, request);
}

/// How far a stream of five messages came, and how it ended. What a server has sent ahead of its reader is not always the
/// same.
fn ending(seen: &str) -> String {
    let reach = if seen.contains("512+4") { "whole" } else { "cut" };
    format!("{reach} {}", seen.rsplit(' ').next().unwrap_or_default())
}

fn bound(max_results: i32) -> Options {
    Options { max_results, ..Options::default() }
}

/// What each step saw.
#[derive(Default)]
struct Seen(Mutex<BTreeMap<&'static str, String>>);

impl Seen {
    fn insert(&self, step: &'static str, saw: String) {
        self.0.lock().expect("lock").insert(step, saw);
    }
}

/// Lives through all that a fault may be about.
#[expect(clippy::too_many_lines, reason = "one life, step after step")]
async fn life(client: &mut Client, narrow: &mut Client, dir: &std::path::Path, seen: &Seen) {
    let ends =
        |result: Result<(), tonic::Status>| result.map_or_else(|status| code(&status), |()| "Ok".to_owned());
    let patience = Duration::from_secs(3);
    let none = Duration::ZERO;

    let plugin = client.identity.get_plugin_capabilities(GetPluginCapabilitiesRequest {}).await;
    let services: Vec<&str> = plugin
        .map(|answer| answer.into_inner().capabilities)
        .unwrap_or_default()
        .iter()
        .filter_map(|capability| match &capability.r#type {
            Some(plugin_capability::Type::Service(service)) => Some(match service.r#type() {
                plugin_capability::service::Type::ControllerService => "Controller",
                plugin_capability::service::Type::GroupControllerService => "GroupController",
                _ => "SnapshotMetadata",
            }),
            _ => None,
        })
        .collect();
    seen.insert("services", services.join(" "));
    let controller = client.controller.controller_get_capabilities(ControllerGetCapabilitiesRequest {}).await;
    let expands = controller.is_ok_and(|answer| {
        use controller_service_capability::{Type, rpc};
        answer.into_inner().capabilities.iter().any(
            |capability| matches!(&capability.r#type, Some(Type::Rpc(rpc)) if rpc.r#type() == rpc::Type::ExpandVolume),
        )
    });
    seen.insert("expands", expands.to_string());
    let probe = tokio::time::timeout(patience, client.identity.probe(ProbeRequest {})).await;
    seen.insert("probe", probe.map_or_else(|_| "no end".to_owned(), |probe| ends(probe.map(drop))));
    seen.insert("node", ends(client.node.node_get_info(NodeGetInfoRequest {}).await.map(drop)));

    let request = new_volume("first", 1024 * KIB, block_capability());
    seen.insert("volume", ends(client.controller.create_volume(request).await.map(drop)));
    make(client, "v", None, false).await;
    snapshot(client, "base", "v", "0+4Ki 8Ki+4Ki 1020Ki+4Ki").await;
    snapshot(client, "target", "v", CHANGED).await;
    let question = delta("base", "target");
    seen.insert("delta", read(client, &question, &bound(2), none).await);
    seen.insert("again", read(client, &question, &bound(2), none).await);
    let resumed = Options { offset: 32 * KIB + 1, ..bound(2) };
    seen.insert("resumed", read(client, &question, &resumed, none).await);
    let at_end = Options { offset: 1024 * KIB, ..bound(0) };
    seen.insert("at the end", read(client, &question, &at_end, none).await);
    seen.insert("negative max_results", read(client, &question, &bound(-1), none).await);
    seen.insert("unknown", read(client, &allocated("nobody"), &bound(0), none).await);
    seen.insert("same", read(client, &delta("target", "target"), &bound(0), none).await);
    snapshot(client, "equal", "v", "").await;
    seen.insert("unchanged", read(client, &delta("target", "equal"), &bound(0), none).await);
    seen.insert("read slowly", ending(&read(narrow, &question, &bound(1), Duration::from_millis(40)).await));
    let hurried = Options { timeout_ms: Some(60), ..bound(1) };
    seen.insert("deadline", ending(&read(narrow, &question, &hurried, Duration::from_millis(70)).await));

    let opened = tokio::time::timeout(patience, narrow.open_stream(&question, &bound(1))).await;
    seen.insert("beside another", read(client, &question, &bound(2), none).await);
    drop(opened);
    tokio::time::sleep(Duration::from_millis(50)).await;
    seen.insert("after a cancel", read(client, &question, &bound(2), none).await);

    for step in ["snapshot", "snapshot, again"] {
        let made = client.controller.create_snapshot(of_snapshot("slow", "v", "")).await;
        let told = match made {
            Ok(answer)
                if answer.get_ref().snapshot.as_ref().is_some_and(|snapshot| snapshot.ready_to_use) =>
            {
                "ready".into()
            }
            Ok(_) => "not ready".into(),
            Err(status) => code(&status),
        };
        seen.insert(step, told);
    }
    for (group, ranges) in [("group1", "0+4Ki"), ("group2", "16Ki+4Ki")] {
        let request = CreateVolumeGroupSnapshotRequest {
            name: group.to_owned(),
            source_volume_ids: vec!["v".to_owned()],
            parameters: [("ranges".to_owned(), ranges.to_owned())].into(),
            ..Default::default()
        };
        again!(client, groups.create_volume_group_snapshot, request);
    }
    seen.insert("group", read(client, &delta("group1-v", "group2-v"), &bound(0), none).await);
    make(client, "mounted", None, true).await;
    snapshot(client, "of-mounted", "mounted", "0+8Ki").await;
    seen.insert("filesystem", read(client, &allocated("of-mounted"), &bound(0), none).await);
    let request = ControllerModifyVolumeRequest { volume_id: "v".into(), ..Default::default() };
    again!(client, controller.controller_modify_volume, request);
    seen.insert("after a change", read(client, &question, &bound(2), none).await);
    make(client, "clone", Some(from_volume("v")), false).await;
    seen.insert("after a clone", read(client, &question, &bound(2), none).await);
    make(client, "restored", Some(from_snapshot("target")), false).await;
    seen.insert("after a restore", read(client, &question, &bound(2), none).await);
    snapshot(client, "of-restored", "restored", "").await;
    let of_restored = read(client, &allocated("of-restored"), &bound(1), none).await;
    let of_target = read(client, &allocated("target"), &bound(1), none).await;
    seen.insert("of a restored volume", if of_restored == of_target { "whole" } else { "lost" }.to_owned());
    let request = NodePublishVolumeRequest {
        volume_id: "restored".into(),
        target_path: dir.join("restored").display().to_string(),
        volume_capability: Some(block_capability()),
        ..Default::default()
    };
    again!(client, node.node_publish_volume, request);
    seen.insert("restored volume in use", read(client, &question, &bound(2), none).await);
    let request = NodeUnpublishVolumeRequest {
        volume_id: "restored".into(),
        target_path: dir.join("restored").display().to_string(),
    };
    again!(client, node.node_unpublish_volume, request);
    let request = ControllerExpandVolumeRequest {
        volume_id: "v".into(),
        capacity_range: Some(CapacityRange { required_bytes: 2048 * KIB, limit_bytes: 0 }),
        ..Default::default()
    };
    snapshot(client, "before", "v", "").await;
    again!(client, controller.controller_expand_volume, request);
    snapshot(client, "grown", "v", "1536Ki+4Ki").await;
    let grown = delta("before", "grown");
    seen.insert("expanded", read(client, &grown, &bound(0), none).await);
    seen.insert("expanded, base", read(client, &question, &bound(2), none).await);
    let resumed = Options { offset: 1100 * KIB, ..bound(0) };
    seen.insert("expanded, resumed", read(client, &grown, &resumed, none).await);

    let mut all = Vec::new();
    if let Ok(Ok(mut stream)) = tokio::time::timeout(patience, narrow.open_stream(&question, &bound(1))).await
    {
        let next = async {
            if let Ok(Some(message)) = stream.next().await {
                all.push(super::told(&message));
                delete(client, "equal").await;
            }
            loop {
                match stream.next().await {
                    Ok(Some(message)) => all.push(super::told(&message)),
                    Ok(None) => break all.push("OK".into()),
                    Err(status) => break all.push(code(&status)),
                }
            }
        };
        let _ = tokio::time::timeout(patience, next).await;
    }
    seen.insert("deleted meanwhile", ending(&all.join(" ")));
    seen.insert("after a delete", read(client, &question, &bound(2), none).await);
    delete(client, "base").await;
    seen.insert("base deleted", read(client, &question, &bound(2), none).await);
    seen.insert("base deleted, again", read(client, &question, &bound(2), none).await);
    let request = DeleteVolumeRequest { volume_id: "v".into(), ..Default::default() };
    again!(client, controller.delete_volume, request);
    seen.insert("source deleted", read(client, &question, &bound(2), none).await);
}

/// A mock with that fault, and what a life sees of it, up to a step.
async fn lived(fault: Option<&str>, until: Option<&str>) -> BTreeMap<&'static str, String> {
    let dir = tempfile::tempdir().expect("temp dir");
    let chosen = fault.map_or(Vec::new(), |fault| vec!["--fault", fault]);
    let (_lab, socket) = Lab::mock(&dir, &[&["--keep-bases"], &chosen[..]].concat()).await;
    let mut client = connect(&socket).await;
    let mut narrow = Client::connect_narrow(&socket, 24).await.expect("connect");
    let seen = Seen::default();
    let reached = async {
        while until.is_none_or(|until| !seen.0.lock().expect("lock").contains_key(until)) {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::select! {
        () = life(&mut client, &mut narrow, dir.path(), &seen) => {}
        () = reached => {}
    }
    seen.0.into_inner().expect("lock")
}

#[tokio::test(flavor = "multi_thread")]
async fn every_fault_is_seen_and_in_the_way_that_its_name_says() {
    let without = lived(None, None).await;
    let expected: BTreeMap<&str, String> =
        WITHOUT.iter().map(|(step, seen)| (*step, (*seen).to_owned())).collect();
    assert_eq!(without, expected);
    let lives = SEEN.iter().map(|(fault, step, expected)| async move {
        let seen = lived(Some(fault), Some(step)).await;
        (fault, step, expected, seen[step].clone())
    });
    let mut lives = futures_util::stream::iter(lives).buffer_unordered(6);
    let mut wrong = Vec::new();
    while let Some((fault, step, expected, seen)) = lives.next().await {
        if seen != **expected {
            wrong.push(format!("{fault}: {step}:\n  expected {expected}\n  saw      {seen}"));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

fn catalog() -> Value {
    let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_cbt-lab"));
    let output = command.args(["faults", "--list", "--output", "json"]).output().expect("run");
    serde_json::from_slice(&output.stdout).expect("JSON")
}

fn names() -> BTreeSet<String> {
    let all = catalog();
    let all = all["faults"].as_array().expect("a list");
    all.iter().map(|fault| fault["name"].as_str().expect("a name").to_owned()).collect()
}

/// No fault is one that nobody has seen; the two that this driver cannot show are seen elsewhere.
#[test]
fn every_fault_is_in_the_table() {
    let mut seen: BTreeSet<String> =
        SEEN.iter().map(|(fault, ..)| fault.split(':').next().unwrap_or_default().to_owned()).collect();
    // `tls-expired` in `mock.rs`; those about who asks, and about what comes before TLS, before a gateway
    // (`crates/gateway/tests/suite/conformance.rs`).
    let elsewhere = [
        "tls-expired",
        "tls-other-host",
        "tls-other-authority",
        "tls-old-versions",
        "plaintext",
        "token-not-needed",
        "audience-not-checked",
        "expiry-not-checked",
        "signature-not-checked",
        "rights-not-checked",
        "namespace-not-checked",
    ];
    seen.extend(elsewhere.map(str::to_owned));
    assert_eq!(seen, names());
}

/// The section of `docs/faults.md` that says what a client makes of faults.
pub(crate) const CLIENTS: &str = "\n## What a client makes of them\n";

/// The page has a row for every fault, with what it takes and does, and no other.
#[test]
fn the_page_is_the_catalogue() {
    let page = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/faults.md");
    let page = std::fs::read_to_string(page).expect("the page");
    let (page, _) = page.split_once(CLIENTS).expect("the section of clients");
    let rows: BTreeSet<&str> = page.lines().filter(|line| line.starts_with("| `")).collect();
    let all = catalog();
    let mut wanted = BTreeSet::new();
    for fault in all["faults"].as_array().expect("a list") {
        let takes: Vec<String> = fault["takes"]
            .as_array()
            .expect("a list")
            .iter()
            .map(|pair| format!("`{}={}`", pair[0].as_str().expect("text"), pair[1].as_str().expect("text")))
            .collect();
        let text = |key: &str| fault[key].as_str().expect(key).to_owned();
        wanted.insert(format!("| `{}` | {} | {} |", text("name"), takes.join(", "), text("does")));
    }
    for key in ["values", "limits"] {
        for pair in all[key].as_array().expect("a list") {
            wanted.insert(format!(
                "| `{}` | {} |",
                pair[0].as_str().expect("text"),
                pair[1].as_str().expect("text")
            ));
        }
    }
    let wanted: BTreeSet<&str> = wanted.iter().map(String::as_str).collect();
    let (missing, others): (Vec<_>, Vec<_>) =
        (wanted.difference(&rows).collect(), rows.difference(&wanted).collect());
    assert!(missing.is_empty(), "not in docs/faults.md:\n{missing:#?}");
    assert!(others.is_empty(), "in docs/faults.md alone:\n{others:#?}");
}

/// Turned on and off over HTTP, and named by a request's or a snapshot's own marker.
#[tokio::test(flavor = "multi_thread")]
async fn faults_are_chosen_while_it_runs() {
    let dir = tempfile::tempdir().expect("temp dir");
    let file = dir.path().join("faults");
    std::fs::write(&file, "# nothing at first\nrefuse:call=Probe,nth=2,code=INTERNAL\n").expect("write");
    let (lab, socket) = Lab::mock(&dir, &["--faults-file", file.to_str().expect("UTF-8")]).await;
    let mut client = connect(&socket).await;
    let mut probes = Vec::new();
    for _ in 0..3 {
        let probe = client.identity.probe(ProbeRequest {}).await;
        probes.push(probe.map_or_else(|status| code(&status), |_| "Ok".to_owned()));
    }
    assert_eq!(probes, ["Ok", "Internal", "Ok"]);
    make(&mut client, "v", None, false).await;
    snapshot(&mut client, "base", "v", "0+4Ki").await;
    snapshot(&mut client, "target", "v", CHANGED).await;
    let question = delta("base", "target");
    let whole = "v1024[8+4 32+4] v1024[64+8 128+4] v1024[512+4] OK";
    let cut = "v1024[8+4 32+4] Unavailable";

    let (code, body) = lab.control("PUT", "/faults", "cut:snapshot=target,first=1").await;
    assert_eq!(code, 200, "{body}");
    assert_eq!(read(&mut client, &allocated("base"), &bound(2), Duration::ZERO).await, "v1024[0+4] OK");
    assert_eq!(read(&mut client, &question, &bound(2), Duration::ZERO).await, cut);
    assert_eq!(read(&mut client, &question, &bound(2), Duration::ZERO).await, whole);
    let (_, body) = lab.control("GET", "/faults", "").await;
    let rows: Value = serde_json::from_str(&body).expect("JSON");
    assert_eq!((&rows[0]["calls"], &rows[0]["met"]), (&2.into(), &1.into()), "{rows}");
    let id = rows[0]["id"].as_u64().expect("a number");
    let (code, body) = lab.control("POST", "/faults", "cut:after=2\nno-such-fault").await;
    assert!(code == 400 && body.contains("no-such-fault"), "{code} {body}");
    assert_eq!(read(&mut client, &question, &bound(2), Duration::ZERO).await, whole, "none of both is on");
    assert_eq!(lab.control("DELETE", &format!("/faults/{id}"), "").await.0, 204);
    assert_eq!(lab.control("DELETE", &format!("/faults/{id}"), "").await.0, 404);

    // One request.
    let mut request = tonic::Request::new(GetMetadataDeltaRequest {
        base_snapshot_id: "base".into(),
        target_snapshot_id: "target".into(),
        ..Default::default()
    });
    request.metadata_mut().insert("cbt-lab-fault", "refuse:code=DATA_LOSS".parse().expect("ASCII"));
    let refused = client.metadata.get_metadata_delta(request).await.expect_err("it is marked");
    assert_eq!(refused.code(), tonic::Code::DataLoss);
    let mut request = tonic::Request::new(ProbeRequest {});
    request.metadata_mut().insert("cbt-lab-fault", "cutt".parse().expect("ASCII"));
    let refused = client.identity.probe(request).await.expect_err("no fault");
    assert!(refused.message().contains("there is cut"), "{refused}");
    assert_eq!(read(&mut client, &question, &bound(2), Duration::ZERO).await, whole);

    // All calls about one snapshot, from the class that it is made with. The driver does not see that parameter.
    let mut marked = of_snapshot("marked", "v", "0+4Ki 256Ki+4Ki 512Ki+4Ki");
    marked.parameters.insert("cbt-lab.fault".into(), "cut:after=1,code=OK,first=1".into());
    client.controller.create_snapshot(marked.clone()).await.expect("create");
    client.controller.create_snapshot(marked).await.expect("again");
    let question = delta("target", "marked");
    assert_eq!(read(&mut client, &question, &bound(2), Duration::ZERO).await, "v1024[0+4 256+4] OK");
    assert_eq!(
        read(&mut client, &question, &bound(2), Duration::ZERO).await,
        "v1024[0+4 256+4] v1024[512+4] OK"
    );
    let of_other: Question = delta("base", "target");
    assert_eq!(read(&mut client, &of_other, &bound(2), Duration::ZERO).await, whole);
}
