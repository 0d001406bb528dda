//! Promise: what is on one node stays between its driver and the router: no other node gets a call about it, a secret with it, or
//! an answer from the router, which listens to none.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};

use bytes::Bytes;
use csi_client::{block_capability, delta_of, from_snapshot, new_volume};
use prost::Message;
use proto::TopologyRequirement;
use proto::node::{DescribeResponse, FindResponse};
use testkit::cluster::{Cluster, Router};
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

#[apply(device_test)]
async fn another_node_is_sent_no_secret_and_no_call_about_an_object() {
    let mut cluster = Cluster::empty();
    cluster.add_node(PoolKind::Dir, &["--enable-attach"]).await;
    let (address, seen) = curious(&cluster).await;
    let endpoints = [cluster.endpoints(), vec![address]].concat();
    cluster.router = Some(Router::start(cluster.dir.path(), "router", &endpoints, &[]).await);
    cluster.router().sees(2).await;
    let mut client = cluster.client();
    let mut request = new_volume("secretive", 16 * MIB, block_capability());
    request.secrets = secrets();
    request.accessibility_requirements =
        Some(TopologyRequirement { requisite: vec![cluster.nodes[0].topology()], preferred: Vec::new() });
    let volume_id = client.create_volume(request.clone()).await.expect("CreateVolume").volume_id;
    let mut snapshots = Vec::new();
    for name in ["secretive", "later"] {
        let snapshot = proto::CreateSnapshotRequest {
            name: name.to_owned(),
            source_volume_id: volume_id.clone(),
            secrets: secrets(),
            ..Default::default()
        };
        let taken = client.controller.create_snapshot(snapshot).await.expect("CreateSnapshot").into_inner();
        snapshots.push(taken.snapshot.expect("a snapshot").snapshot_id);
    }
    let [snapshot_id, later_id] = &snapshots[..] else { unreachable!("two were taken") };
    // A copy of it, wherever there is room: it is where its source is.
    (request.name, request.accessibility_requirements) = ("copy".to_owned(), None);
    request.volume_content_source = Some(from_snapshot(snapshot_id));
    let copy = client.create_volume(request).await.expect("CreateVolume").volume_id;
    assert_eq!(cluster.node_of(&copy), 0);
    let group = proto::CreateVolumeGroupSnapshotRequest {
        name: "secretive".to_owned(),
        source_volume_ids: vec![volume_id.clone(), copy.clone()],
        secrets: secrets(),
        ..Default::default()
    };
    let group = client.groups.create_volume_group_snapshot(group).await.expect("CreateVolumeGroupSnapshot");
    let group = group.into_inner().group_snapshot.expect("a group");
    let snapshot_ids: Vec<_> = group.snapshots.into_iter().map(|member| member.snapshot_id).collect();
    let get = proto::GetVolumeGroupSnapshotRequest {
        group_snapshot_id: group.group_snapshot_id.clone(),
        snapshot_ids: snapshot_ids.clone(),
        secrets: secrets(),
    };
    client.groups.get_volume_group_snapshot(get).await.expect("GetVolumeGroupSnapshot");
    let delete = proto::DeleteVolumeGroupSnapshotRequest {
        group_snapshot_id: group.group_snapshot_id.clone(),
        snapshot_ids,
        secrets: secrets(),
    };
    client.groups.delete_volume_group_snapshot(delete).await.expect("DeleteVolumeGroupSnapshot");
    let modify = proto::ControllerModifyVolumeRequest {
        volume_id: volume_id.clone(),
        secrets: secrets(),
        mutable_parameters: [("readAheadKiB".to_owned(), "512".to_owned())].into(),
    };
    client.controller.controller_modify_volume(modify).await.expect("ControllerModifyVolume");
    let publish = proto::ControllerPublishVolumeRequest {
        volume_id: volume_id.clone(),
        node_id: cluster.nodes[0].name(),
        volume_capability: Some(block_capability()),
        secrets: secrets(),
        ..Default::default()
    };
    client.controller.controller_publish_volume(publish).await.expect("ControllerPublishVolume");
    let unpublish = proto::ControllerUnpublishVolumeRequest {
        volume_id: volume_id.clone(),
        node_id: cluster.nodes[0].name(),
        secrets: secrets(),
    };
    client.controller.controller_unpublish_volume(unpublish).await.expect("ControllerUnpublishVolume");
    let expand = proto::ControllerExpandVolumeRequest {
        volume_id: volume_id.clone(),
        capacity_range: Some(proto::CapacityRange { required_bytes: 32 * MIB, limit_bytes: 0 }),
        secrets: secrets(),
        ..Default::default()
    };
    client.controller.controller_expand_volume(expand).await.expect("ControllerExpandVolume");
    let validate = proto::ValidateVolumeCapabilitiesRequest {
        volume_id: volume_id.clone(),
        volume_capabilities: vec![block_capability()],
        secrets: secrets(),
        ..Default::default()
    };
    client.controller.validate_volume_capabilities(validate).await.expect("ValidateVolumeCapabilities");
    let health = proto::ControllerGetVolumeHealthRequest { volume_id: volume_id.clone(), secrets: secrets() };
    client.controller.controller_get_volume_health(health).await.expect("ControllerGetVolumeHealth");
    let get = proto::GetSnapshotRequest { snapshot_id: snapshot_id.clone(), secrets: secrets() };
    client.controller.get_snapshot(get).await.expect("GetSnapshot");
    for list in [
        proto::ListSnapshotsRequest { snapshot_id: snapshot_id.clone(), ..Default::default() },
        proto::ListSnapshotsRequest { source_volume_id: volume_id.clone(), ..Default::default() },
    ] {
        let list = proto::ListSnapshotsRequest { secrets: secrets(), ..list };
        let listed = client.controller.list_snapshots(list).await.expect("ListSnapshots").into_inner();
        assert!(!listed.entries.is_empty());
    }
    let stream = proto::GetMetadataAllocatedRequest {
        snapshot_id: snapshot_id.clone(),
        secrets: secrets(),
        ..Default::default()
    };
    let stream = client.metadata.get_metadata_allocated(stream).await.expect("GetMetadataAllocated");
    assert!(stream.into_inner().message().await.is_ok());
    let stream = proto::GetMetadataDeltaRequest { secrets: secrets(), ..delta_of(snapshot_id, later_id) };
    let stream = client.metadata.get_metadata_delta(stream).await.expect("GetMetadataDelta");
    assert!(stream.into_inner().message().await.is_ok());
    // All nodes are asked for these, and any for what is nobody's.
    let list = proto::ListSnapshotsRequest { secrets: secrets(), ..Default::default() };
    let listed = client.controller.list_snapshots(list).await.expect("ListSnapshots").into_inner();
    assert_eq!(listed.entries.len(), snapshots.len());
    let list = proto::ControllerListVolumeHealthRequest { secrets: secrets(), ..Default::default() };
    client.controller.controller_list_volume_health(list).await.expect("ControllerListVolumeHealth");
    let get = proto::GetSnapshotRequest { snapshot_id: "nobody's".to_owned(), secrets: secrets() };
    // The node that is asked may be either.
    let _ = client.controller.get_snapshot(get).await;
    for delete in [&copy, &volume_id] {
        let delete = proto::DeleteVolumeRequest { volume_id: delete.clone(), secrets: secrets() };
        client.controller.delete_volume(delete).await.expect("DeleteVolume");
    }
    for delete in &snapshots {
        let delete = proto::DeleteSnapshotRequest { snapshot_id: delete.clone(), secrets: secrets() };
        client.controller.delete_snapshot(delete).await.expect("DeleteSnapshot");
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
        let ids = [&volume_id, snapshot_id, later_id, &copy, &group.group_snapshot_id, &cluster.nodes[0].key];
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
