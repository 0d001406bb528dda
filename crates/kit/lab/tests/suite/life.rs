//! A life of a driver, step after step: all that a fault may be about, and what a client sees at each step.

use std::collections::BTreeMap;
use std::sync::Mutex;
use std::time::Duration;

use csi_client::{
    Client, Options, Question, block_capability, from_snapshot, from_volume, mount_capability, new_volume,
};
use proto::*;

use super::{Lab, allocated, code, connect, delta, read};

const KIB: i64 = 1024;

/// What the same steps see of a driver without a fault.
pub(crate) const WITHOUT: &[(&str, &str)] = &[
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
    ("modified meanwhile", "whole OK"),
    ("after a change", "v1024[8+4 32+4] v1024[64+8 128+4] v1024[512+4] OK"),
    ("cloned meanwhile", "whole OK"),
    ("after a clone", "v1024[8+4 32+4] v1024[64+8 128+4] v1024[512+4] OK"),
    ("after a restore", "v1024[8+4 32+4] v1024[64+8 128+4] v1024[512+4] OK"),
    ("of a restored volume", "whole"),
    ("restored volume in use", "v1024[8+4 32+4] v1024[64+8 128+4] v1024[512+4] OK"),
    ("expanded meanwhile", "whole OK"),
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
pub(crate) const CHANGED: &str = "8Ki+4Ki 32Ki+4Ki 64Ki+8Ki 128Ki+4Ki 512Ki+4Ki";

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

pub(crate) async fn make(
    client: &mut Client,
    name: &str,
    source: Option<VolumeContentSource>,
    mounted: bool,
) {
    let capability = if mounted { mount_capability("") } else { block_capability() };
    let mut request = new_volume(name, 1024 * KIB, capability);
    request.volume_content_source = source;
    again!(client, controller.create_volume, request);
}

pub(crate) async fn snapshot(client: &mut Client, name: &str, volume: &str, ranges: &str) {
    again!(client, controller.create_snapshot, of_snapshot(name, volume, ranges));
}

pub(crate) fn of_snapshot(name: &str, volume: &str, ranges: &str) -> CreateSnapshotRequest {
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

async fn modify(client: &mut Client, id: &str) {
    let request = ControllerModifyVolumeRequest { volume_id: id.to_owned(), ..Default::default() };
    again!(client, controller.controller_modify_volume, request);
}

async fn expand(client: &mut Client, id: &str) {
    let request = ControllerExpandVolumeRequest {
        volume_id: id.to_owned(),
        capacity_range: Some(CapacityRange { required_bytes: 2048 * KIB, limit_bytes: 0 }),
        ..Default::default()
    };
    again!(client, controller.controller_expand_volume, request);
}

/// A stream after whose first message something is done.
async fn meanwhile(narrow: &mut Client, question: &Question, work: impl Future<Output = ()>) -> String {
    let mut all = Vec::new();
    let reading = async {
        let Ok(mut stream) = narrow.open_stream(question, &bound(1)).await else { return };
        if let Ok(Some(message)) = stream.next().await {
            all.push(super::text_of(&message));
            work.await;
        }
        loop {
            match stream.next().await {
                Ok(Some(message)) => all.push(super::text_of(&message)),
                Ok(None) => break all.push("OK".into()),
                Err(status) => break all.push(code(&status)),
            }
        }
    };
    let _ = tokio::time::timeout(Duration::from_secs(3), reading).await;
    ending(&all.join(" "))
}

/// How far a stream of five messages came, and how it ended. What a server has sent ahead of its reader is not always the
/// same.
fn ending(seen: &str) -> String {
    let reach = if seen.contains("512+4") { "whole" } else { "cut" };
    format!("{reach} {}", seen.rsplit(' ').next().unwrap_or_default())
}

pub(crate) fn bound(max_results: i32) -> Options {
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
    let modified = meanwhile(narrow, &question, modify(client, "v"));
    seen.insert("modified meanwhile", modified.await);
    seen.insert("after a change", read(client, &question, &bound(2), none).await);
    let cloned = meanwhile(narrow, &question, make(client, "clone", Some(from_volume("v")), false));
    seen.insert("cloned meanwhile", cloned.await);
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
    snapshot(client, "before", "v", "").await;
    let expanded = meanwhile(narrow, &question, expand(client, "v"));
    seen.insert("expanded meanwhile", expanded.await);
    snapshot(client, "grown", "v", "1536Ki+4Ki").await;
    let grown = delta("before", "grown");
    seen.insert("expanded", read(client, &grown, &bound(0), none).await);
    seen.insert("expanded, base", read(client, &question, &bound(2), none).await);
    let resumed = Options { offset: 1100 * KIB, ..bound(0) };
    seen.insert("expanded, resumed", read(client, &grown, &resumed, none).await);

    let deleted = meanwhile(narrow, &question, delete(client, "equal"));
    seen.insert("deleted meanwhile", deleted.await);
    seen.insert("after a delete", read(client, &question, &bound(2), none).await);
    delete(client, "base").await;
    seen.insert("base deleted", read(client, &question, &bound(2), none).await);
    seen.insert("base deleted, again", read(client, &question, &bound(2), none).await);
    let request = DeleteVolumeRequest { volume_id: "v".into(), ..Default::default() };
    again!(client, controller.delete_volume, request);
    seen.insert("source deleted", read(client, &question, &bound(2), none).await);
}

/// A mock with that fault, and what a life sees of it, up to a step.
pub(crate) async fn lived(fault: Option<&str>, until: Option<&str>) -> BTreeMap<&'static str, String> {
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
