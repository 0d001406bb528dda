//! Promise: what is on one node stays between its driver and the router: no other node gets a call about it, a secret with it, or
//! an answer from the router, which listens to none.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};

use bytes::Bytes;
use csi_client::{block_capability, delta_of, from_snapshot, new_volume};
use prost::Message;
use proto::node::{DescribeResponse, FindResponse};
use testkit::cluster::{Cluster, within};
use testkit::{MIB, PoolKind};

use crate::strangers::{agreed, described, play};

const SECRET: &str = "hunter2-do-not-print";
const KEY: &str = "0badcafe";
/// What all nodes are asked for, also with secrets.
const LISTS: [&str; 2] =
    ["/csi.v1.Controller/ListSnapshots", "/csi.v1.Controller/ControllerListVolumeHealth"];

type Seen = Arc<Mutex<Vec<(String, Vec<u8>)>>>;

fn secrets() -> HashMap<String, String> {
    HashMap::from([("token".to_owned(), SECRET.to_owned())])
}

/// A node that keeps whatever it is sent, and claims to have more room than any.
async fn curious(cluster: &Cluster) -> (String, Seen) {
    let seen = Seen::default();
    let kept = seen.clone();
    let answers = move |path: &str, message: Bytes| {
        kept.lock().expect("seen").push((path.to_owned(), message.to_vec()));
        answer(path, message)
    };
    (play(cluster, KEY, "curious", answers).await, seen)
}

fn answer(path: &str, message: Bytes) -> Vec<u8> {
    match path.rsplit('/').next().unwrap_or_default() {
        "Describe" => {
            DescribeResponse { total_bytes: 1 << 50, free_bytes: 1 << 50, ..described(KEY, "curious") }
                .encode_to_vec()
        }
        "Find" => FindResponse::default().encode_to_vec(),
        "Choose" => agreed(message),
        _ => Vec::new(),
    }
}

/// The TCP ports on which a process listens.
fn listening(pid: u32) -> Vec<u16> {
    let links = std::fs::read_dir(format!("/proc/{pid}/fd")).expect("its files");
    let links = links.filter_map(|entry| std::fs::read_link(entry.ok()?.path()).ok());
    let sockets: Vec<String> = links.map(|link| link.display().to_string()).collect();
    let mut ports = Vec::new();
    for table in ["tcp", "tcp6"] {
        let table = std::fs::read_to_string(format!("/proc/{pid}/net/{table}")).expect("its sockets");
        for line in table.lines().skip(1) {
            let fields: Vec<&str> = line.split_whitespace().collect();
            // 0A: LISTEN.
            if fields[3] == "0A" && sockets.contains(&format!("socket:[{}]", fields[9])) {
                let (_, port) = fields[1].rsplit_once(':').expect("an address");
                ports.push(u16::from_str_radix(port, 16).expect("a port"));
            }
        }
    }
    ports
}

/// The answer to a call with the secret, these fields and no others.
macro_rules! secretly {
    ($client:ident.$service:ident.$call:ident, $request:ident { $($field:ident: $value:expr),* }) => {{
        #[allow(clippy::needless_update)]
        let request = proto::$request { secrets: secrets(), $($field: $value,)* ..Default::default() };
        $client.$service.$call(request).await.expect(stringify!($call)).into_inner()
    }};
}

#[apply(device_test)]
async fn another_node_is_sent_no_secret_and_no_call_about_an_object() {
    let mut cluster = Cluster::empty();
    cluster.add_node(PoolKind::Dir, &["--enable-attach"]).await;
    let (address, seen) = curious(&cluster).await;
    let endpoints = [cluster.endpoints(), vec![address]].concat();
    cluster.route(&endpoints, &[], 2).await;
    let mut client = cluster.client();
    let request = new_volume("secretive", 16 * MIB, block_capability());
    let mut request = within(&[cluster.nodes[0].topology()], request);
    request.secrets = secrets();
    let volume_id = client.create_volume(request.clone()).await.expect("CreateVolume").volume_id;
    let (id, node_id) = (|| volume_id.clone(), || cluster.nodes[0].name());
    let mut snapshots = Vec::new();
    for name in ["secretive", "later"] {
        let taken = secretly!(
            client.controller.create_snapshot,
            CreateSnapshotRequest { name: name.to_owned(), source_volume_id: id() }
        );
        snapshots.push(taken.snapshot.expect("a snapshot").snapshot_id);
    }
    let [snapshot_id, later_id] = &snapshots[..] else { unreachable!("two were taken") };
    // A copy of it, wherever there is room: it is where its source is.
    (request.name, request.accessibility_requirements) = ("copy".to_owned(), None);
    request.volume_content_source = Some(from_snapshot(snapshot_id));
    let copy = client.create_volume(request).await.expect("CreateVolume").volume_id;
    assert_eq!(cluster.node_of(&copy), 0);
    let both = vec![id(), copy.clone()];
    let group = secretly!(
        client.groups.create_volume_group_snapshot,
        CreateVolumeGroupSnapshotRequest { name: "secretive".to_owned(), source_volume_ids: both }
    );
    let group = group.group_snapshot.expect("a group");
    let members: Vec<_> = group.snapshots.into_iter().map(|member| member.snapshot_id).collect();
    let group_id = group.group_snapshot_id;
    secretly!(
        client.groups.get_volume_group_snapshot,
        GetVolumeGroupSnapshotRequest { group_snapshot_id: group_id.clone(), snapshot_ids: members.clone() }
    );
    secretly!(
        client.groups.delete_volume_group_snapshot,
        DeleteVolumeGroupSnapshotRequest { group_snapshot_id: group_id.clone(), snapshot_ids: members }
    );
    let parameters = [("readAheadKiB".to_owned(), "512".to_owned())].into();
    secretly!(
        client.controller.controller_modify_volume,
        ControllerModifyVolumeRequest { volume_id: id(), mutable_parameters: parameters }
    );
    let block = || Some(block_capability());
    secretly!(
        client.controller.controller_publish_volume,
        ControllerPublishVolumeRequest { volume_id: id(), node_id: node_id(), volume_capability: block() }
    );
    secretly!(
        client.controller.controller_unpublish_volume,
        ControllerUnpublishVolumeRequest { volume_id: id(), node_id: node_id() }
    );
    let range = Some(proto::CapacityRange { required_bytes: 32 * MIB, limit_bytes: 0 });
    secretly!(
        client.controller.controller_expand_volume,
        ControllerExpandVolumeRequest { volume_id: id(), capacity_range: range }
    );
    secretly!(
        client.controller.validate_volume_capabilities,
        ValidateVolumeCapabilitiesRequest { volume_id: id(), volume_capabilities: vec![block_capability()] }
    );
    secretly!(
        client.controller.controller_get_volume_health,
        ControllerGetVolumeHealthRequest { volume_id: id() }
    );
    let snapshot = || snapshot_id.clone();
    secretly!(client.controller.get_snapshot, GetSnapshotRequest { snapshot_id: snapshot() });
    for listed in [
        secretly!(client.controller.list_snapshots, ListSnapshotsRequest { snapshot_id: snapshot() }),
        secretly!(client.controller.list_snapshots, ListSnapshotsRequest { source_volume_id: id() }),
    ] {
        assert!(!listed.entries.is_empty());
    }
    let mut stream = secretly!(
        client.metadata.get_metadata_allocated,
        GetMetadataAllocatedRequest { snapshot_id: snapshot() }
    );
    assert!(stream.message().await.is_ok());
    let stream = proto::GetMetadataDeltaRequest { secrets: secrets(), ..delta_of(snapshot_id, later_id) };
    let stream = client.metadata.get_metadata_delta(stream).await.expect("GetMetadataDelta");
    assert!(stream.into_inner().message().await.is_ok());
    // All nodes are asked for these, and any for what is nobody's.
    let listed = secretly!(client.controller.list_snapshots, ListSnapshotsRequest {});
    assert_eq!(listed.entries.len(), snapshots.len());
    secretly!(client.controller.controller_list_volume_health, ControllerListVolumeHealthRequest {});
    let get = proto::GetSnapshotRequest { snapshot_id: "nobody's".to_owned(), secrets: secrets() };
    // The node that is asked may be either.
    let _ = client.controller.get_snapshot(get).await;
    for delete in [&copy, &volume_id] {
        secretly!(client.controller.delete_volume, DeleteVolumeRequest { volume_id: delete.clone() });
    }
    for delete in &snapshots {
        secretly!(client.controller.delete_snapshot, DeleteSnapshotRequest { snapshot_id: delete.clone() });
    }

    let is_in =
        |message: &[u8], text: &str| message.windows(text.len()).any(|window| window == text.as_bytes());
    let sent = seen.lock().expect("seen").clone();
    for asked in ["/deltapath.node.v1.Node/Find", LISTS[0], LISTS[1]] {
        assert!(sent.iter().any(|(path, _)| path == asked), "it was not asked for {asked}");
    }
    for (path, message) in sent {
        let is_for_all = LISTS.contains(&path.as_str()) || path == "/csi.v1.Controller/GetSnapshot";
        assert!(is_for_all || path.starts_with("/deltapath.node.v1.Node/"), "{path}");
        let ids = [&volume_id, snapshot_id, later_id, &copy, &group_id, &cluster.nodes[0].key];
        for text in ids.map(String::as_str).into_iter().chain([SECRET]) {
            // A choice between nodes names them by their keys.
            let is_sent = is_in(&message, text) && !(path.ends_with("/Choose") && text.len() == KEY.len());
            assert!(!is_sent, "{text} is sent with {path}");
        }
    }
    let log = cluster.router().running.log();
    assert!(!log.contains(SECRET), "{log}");
    assert_eq!(
        listening(cluster.router().running.pid()),
        [cluster.router().http],
        "nobody comes in over the network"
    );
    cluster.finish();
}
