//! Drivers of many nodes in one process: each with an address, a key and a certificate of its own, and volumes that are no
//! more than their names.

use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

use bytes::Bytes;
use prost::Message;
use proto::BlockMetadataType;
use proto::list_snapshots_response::Entry as Snapshot;
use proto::list_volumes_response::Entry;
use proto::node::{ChooseRequest, ChooseResponse, DescribeResponse, FindResponse};
use serve::identity::Role;
use serve::relay::frame;
use testkit::played;
use tokio::net::TcpListener;
use tonic::Status;

/// Messages of the long stream, and tuples in each.
pub const MESSAGES: usize = 4096;
pub const TUPLES: usize = 4096;
/// What each node has left, in bytes.
pub const FREE: i64 = 1 << 40;

pub fn key_of(number: usize) -> String {
    format!("{number:08x}")
}

struct Node {
    key: String,
    volumes: Vec<Entry>,
    snapshots: Vec<Snapshot>,
    message: Bytes,
}

/// The file with the ports of nodes from this number on, which is there once all of them listen.
pub fn ports(first: usize) -> String {
    format!("ports-{first}")
}

/// Serves these nodes, for ever, at this port or at any. Each has so many volumes and snapshots.
pub async fn serve(dir: &Path, numbers: Range<usize>, volumes: usize, port: u16) {
    let block_metadata = (0..TUPLES)
        .map(|number| proto::BlockMetadata { byte_offset: (number as i64) << 13, size_bytes: 4096 })
        .collect();
    let message = proto::GetMetadataAllocatedResponse {
        block_metadata_type: BlockMetadataType::VariableLength.into(),
        volume_capacity_bytes: 1 << 40,
        block_metadata,
    };
    let message = frame(&message);
    let (mut listening, first) = (Vec::new(), numbers.start);
    for number in numbers {
        let key = key_of(number);
        let tls = played::tls(dir, &key, Role::Node(key.clone()));
        let listener = TcpListener::bind(("127.0.0.1", port)).await.expect("listen");
        listening.push(listener.local_addr().expect("an address").port().to_string());
        let topology = proto::Topology { segments: segments(&key) };
        let entry = |number: usize| Entry {
            volume: Some(proto::Volume {
                volume_id: format!("vol-{key}{number:024x}"),
                capacity_bytes: 1 << 30,
                accessible_topology: vec![topology.clone()],
                ..Default::default()
            }),
            ..Default::default()
        };
        let snapshot = |number: usize| Snapshot {
            snapshot: Some(proto::Snapshot {
                snapshot_id: format!("snap-{key}{number:024x}"),
                source_volume_id: format!("vol-{key}{number:024x}"),
                ready_to_use: true,
                ..Default::default()
            }),
        };
        let (snapshots, volumes) = ((0..volumes).map(snapshot).collect(), (0..volumes).map(entry).collect());
        let node = Arc::new(Node { key, volumes, snapshots, message: message.clone() });
        played::serve(listener, tls, move |path, message| node.answer(path, message));
    }
    let new = dir.join("new").with_extension(first.to_string());
    std::fs::write(&new, listening.join("\n")).expect("write");
    std::fs::rename(new, dir.join(ports(first))).expect("rename");
    std::future::pending().await
}

fn segments(key: &str) -> std::collections::HashMap<String, String> {
    [("topology.deltapath.csi.dev/node".to_owned(), format!("node-{key}"))].into()
}

impl Node {
    fn answer(&self, path: &str, request: Bytes) -> Result<Vec<Bytes>, Status> {
        Ok(match path {
            "/deltapath.node.v1.Node/Describe" => vec![frame(&DescribeResponse {
                key: self.key.clone(),
                node_id: format!("node-{}", self.key),
                topology: segments(&self.key),
                driver_name: "deltapath.csi.dev".to_owned(),
                total_bytes: 1 << 41,
                free_bytes: FREE as u64,
                provisioned_bytes: (self.volumes.len() as u64) << 30,
                ..Default::default()
            })],
            "/deltapath.node.v1.Node/Find" => vec![frame(&FindResponse::default())],
            "/csi.v1.Controller/ListVolumes" => {
                let asked = proto::ListVolumesRequest::decode(request).expect("a request");
                let (page, next_token) = self.page("vol", asked.max_entries, &asked.starting_token);
                vec![frame(&proto::ListVolumesResponse { entries: self.volumes[page].to_vec(), next_token })]
            }
            "/csi.v1.Controller/ListSnapshots" => {
                let asked = proto::ListSnapshotsRequest::decode(request).expect("a request");
                let (page, next_token) = self.page("snap", asked.max_entries, &asked.starting_token);
                let entries = self.snapshots[page].to_vec();
                vec![frame(&proto::ListSnapshotsResponse { entries, next_token })]
            }
            "/deltapath.node.v1.Node/Choose" => {
                let asked = ChooseRequest::decode(request).expect("a request");
                vec![frame(&ChooseResponse { key: asked.proposed_key, kind: asked.kind })]
            }
            "/csi.v1.Controller/CreateVolume" => {
                let volume = Some(proto::Volume {
                    volume_id: format!("vol-{}{}", self.key, "f".repeat(24)),
                    capacity_bytes: 1 << 30,
                    accessible_topology: vec![proto::Topology { segments: segments(&self.key) }],
                    ..Default::default()
                });
                vec![frame(&proto::CreateVolumeResponse { volume })]
            }
            "/csi.v1.Controller/GetCapacity" => vec![frame(&proto::GetCapacityResponse {
                available_capacity: FREE,
                maximum_volume_size: Some(FREE),
                minimum_volume_size: Some(1 << 20),
            })],
            "/csi.v1.SnapshotMetadata/GetMetadataAllocated" => vec![self.message.clone(); MESSAGES],
            other => return Err(Status::unimplemented(other)),
        })
    }

    /// Which of its volumes or snapshots a page has, and the token behind it: the id that comes next, as a driver's is.
    fn page(&self, kind: &str, most: i32, token: &str) -> (Range<usize>, String) {
        let digits = token.len().checked_sub(24).and_then(|begin| token.get(begin..)).unwrap_or_default();
        let begin = usize::from_str_radix(digits, 16).unwrap_or(0);
        let most = usize::try_from(most).ok().filter(|most| *most > 0).unwrap_or(usize::MAX);
        let end = self.volumes.len().min(begin.saturating_add(most));
        let next = (end < self.volumes.len()).then(|| format!("{kind}-{}{end:024x}", self.key));
        (begin..end, next.unwrap_or_default())
    }
}
