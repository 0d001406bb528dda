//! Drivers of many nodes in one process: each with an address, a key and a certificate of its own, and volumes that are no
//! more than their names.

use std::path::Path;
use std::sync::Arc;

use bytes::Bytes;
use prost::Message;
use proto::BlockMetadataType;
use proto::list_volumes_response::Entry;
use proto::node::{DescribeResponse, FindResponse};
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
    message: Bytes,
}

/// Serves this number of nodes, for ever. Their ports stand in the file `ports` once all of them listen.
pub async fn serve(dir: &Path, count: usize, volumes: usize) {
    let block_metadata = (0..TUPLES)
        .map(|number| proto::BlockMetadata { byte_offset: (number as i64) << 13, size_bytes: 4096 })
        .collect();
    let message = proto::GetMetadataAllocatedResponse {
        block_metadata_type: BlockMetadataType::VariableLength.into(),
        volume_capacity_bytes: 1 << 40,
        block_metadata,
    };
    let message = frame(&message);
    let mut ports = Vec::new();
    for number in 0..count {
        let key = key_of(number);
        let tls = played::tls(dir, &key, Role::Node(key.clone()));
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("listen");
        ports.push(listener.local_addr().expect("an address").port().to_string());
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
        let volumes = (0..volumes).map(entry).collect();
        let node = Arc::new(Node { key, volumes, message: message.clone() });
        played::serve(listener, tls, move |path, message| node.answer(path, message));
    }
    std::fs::write(dir.join("ports.new"), ports.join("\n")).expect("write");
    std::fs::rename(dir.join("ports.new"), dir.join("ports")).expect("rename");
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
                // A token is the id of the volume that comes next, as a driver's is.
                let digits = asked.starting_token.get(12..).unwrap_or_default();
                let begin = usize::from_str_radix(digits, 16).unwrap_or(0);
                let most =
                    usize::try_from(asked.max_entries).ok().filter(|most| *most > 0).unwrap_or(usize::MAX);
                let end = self.volumes.len().min(begin.saturating_add(most));
                let next = self.volumes.get(end).and_then(|entry| entry.volume.as_ref());
                let next_token = next.map(|volume| volume.volume_id.clone()).unwrap_or_default();
                vec![frame(&proto::ListVolumesResponse {
                    entries: self.volumes[begin..end].to_vec(),
                    next_token,
                })]
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
}
