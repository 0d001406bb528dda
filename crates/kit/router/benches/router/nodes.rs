//! Drivers of many nodes in one process: each with an address, a key and a certificate of its own, and volumes that are no
//! more than their names.

use std::convert::Infallible;
use std::path::Path;
use std::sync::Arc;

use bytes::Bytes;
use futures_util::stream;
use http_body_util::{BodyExt, StreamBody};
use prost::Message;
use proto::BlockMetadataType;
use proto::list_volumes_response::Entry;
use proto::node::{DescribeResponse, FindResponse};
use serve::identity::Role;
use serve::listen::{self, Limits};
use serve::mutual::{Files, Mutual};
use serve::relay::{frame_bytes, unframe_bytes};
use tokio::net::TcpListener;
use tonic::Status;
use tonic::body::Body;
use tonic::codegen::http::{HeaderMap, HeaderValue, Response};
use tonic::transport::Server;

/// Messages of the long stream, and tuples in each.
pub const MESSAGES: usize = 4096;
pub const TUPLES: usize = 4096;
/// What each node has left, in bytes.
pub const FREE: i64 = 1 << 40;

pub fn key_of(number: usize) -> String {
    format!("{number:08x}")
}

/// TLS with the files of this name.
pub fn tls(dir: &Path, name: &str, role: Role) -> Arc<Mutual> {
    let file = |end: &str| dir.join(format!("{name}.{end}"));
    let files = Files { certificate: file("crt"), key: file("key"), authorities: file("ca") };
    let tls = Mutual::new(files, role);
    tls.load().expect("certificates");
    tls
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
    let message = frame_bytes(&message.encode_to_vec());
    let mut ports = Vec::new();
    for number in 0..count {
        let key = key_of(number);
        let tls = tls(dir, &key, Role::Node(key.clone()));
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
        let served = axum::Router::new().fallback(move |request: axum::extract::Request| {
            let node = node.clone();
            async move { node.answer(request).await.map(axum::body::Body::new) }
        });
        let connections = listen::tls(listener, move || tls.server(), Limits::of_certificates());
        let server = Server::builder().add_routes(tonic::service::Routes::from(served));
        tokio::spawn(async move { server.serve_with_incoming(connections).await.expect("serve") });
    }
    std::fs::write(dir.join("ports.new"), ports.join("\n")).expect("write");
    std::fs::rename(dir.join("ports.new"), dir.join("ports")).expect("rename");
    std::future::pending().await
}

fn segments(key: &str) -> std::collections::HashMap<String, String> {
    [("topology.deltapath.csi.dev/node".to_owned(), format!("node-{key}"))].into()
}

impl Node {
    async fn answer(&self, request: axum::extract::Request) -> Response<Body> {
        let path = request.uri().path().to_owned();
        // A router gives up the nodes that it has asked ahead when a page is full.
        let Ok(body) = request.into_body().collect().await else {
            return Status::cancelled("the request is given up").into_http();
        };
        let request = unframe_bytes(body.to_bytes()).expect("a message");
        let messages = match path.as_str() {
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
            other => return Status::unimplemented(other).into_http(),
        };
        let mut trailers = HeaderMap::new();
        trailers.insert("grpc-status", HeaderValue::from_static("0"));
        let data = messages.into_iter().map(http_body::Frame::data);
        let frames = data.chain([http_body::Frame::trailers(trailers)]).map(Ok::<_, Infallible>);
        let mut response = Response::new(Body::new(StreamBody::new(stream::iter(frames))));
        response.headers_mut().insert("content-type", HeaderValue::from_static("application/grpc"));
        response
    }
}

fn frame(message: &impl Message) -> Bytes {
    frame_bytes(&message.encode_to_vec())
}
