//! What random sequences run against: a driver, or drivers behind a router that look like one.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::ExitStatus;
use std::sync::Arc;

use csi_client::{Client, block_capability};
use deltapath::sys::sweep::sweep;
use prost::Message;
use tempfile::TempDir;
use tonic::Status;
use tonic::body::Body;
use tonic::codegen::http::{Request, Response};
use tonic::transport::Channel;

use crate::cluster::{Cluster, PATIENCE, Router, eventually, key_of, patiently};
use crate::{PoolKind, Rig, leftovers, new_volume_from, temp_dir};

/// A driver, or drivers behind a router, on one socket.
pub struct Subject<'r> {
    pub client: Client,
    of: Of<'r>,
}

enum Of<'r> {
    Alone(Box<Rig>),
    /// A driver that keeps running afterwards.
    Lent(&'r mut Rig),
    Routed(Box<Routed>),
}

struct Routed {
    cluster: Cluster,
    socket: PathBuf,
    serving: tokio::task::JoinHandle<()>,
    /// Which node is next, where one is picked.
    turn: usize,
    // After all that is in there.
    _dir: TempDir,
}

/// A node with a driver.
#[derive(Clone, Debug, PartialEq)]
pub struct Site {
    /// With which the ids of its objects begin.
    pub key: String,
    pub name: String,
    /// Bytes that all volumes on it together may still have.
    pub room: u64,
}

impl Site {
    /// That of a driver alone, whose key makes no difference.
    pub fn alone() -> Self {
        Site { key: String::new(), name: "node-1".to_owned(), room: u64::MAX }
    }
}

impl<'r> Subject<'r> {
    /// A driver that another owner keeps.
    pub fn lent(rig: &'r mut Rig) -> Self {
        Subject { client: rig.client.clone(), of: Of::Lent(rig) }
    }

    /// One driver alone, or several behind a router.
    pub async fn start(pool: PoolKind, routed: Option<usize>, flags: &[&str], log: &str) -> Self {
        let Some(nodes) = routed else {
            let rig = Rig::start_with(pool, flags, log).await;
            return Subject { client: rig.client.clone(), of: Of::Alone(Box::new(rig)) };
        };
        let cluster = Cluster::start(pool, nodes, flags).await;
        let dir = temp_dir();
        let socket = dir.path().join("front.sock");
        let serving = front(&cluster, &socket).await;
        let client = Client::connect(&socket, PATIENCE).await.expect("connect");
        let routed = Routed { cluster, socket, serving, turn: 0, _dir: dir };
        Subject { client, of: Of::Routed(Box::new(routed)) }
    }

    pub fn is_routed(&self) -> bool {
        matches!(self.of, Of::Routed(_))
    }

    pub fn rigs(&self) -> Vec<&Rig> {
        match &self.of {
            Of::Alone(rig) => vec![rig],
            Of::Lent(rig) => vec![rig],
            Of::Routed(routed) => routed.cluster.nodes.iter().map(|node| &node.rig).collect(),
        }
    }

    fn rigs_mut(&mut self) -> Vec<&mut Rig> {
        match &mut self.of {
            Of::Alone(rig) => vec![rig],
            Of::Lent(rig) => vec![rig],
            Of::Routed(routed) => routed.cluster.nodes.iter_mut().map(|node| &mut node.rig).collect(),
        }
    }

    /// The nodes. Calls of the Node service that name no volume of a node's go to the first one.
    pub async fn sites(&mut self) -> Vec<Site> {
        let mut sites = Vec::new();
        for rig in self.rigs_mut() {
            let room = rig.client.controller.get_capacity(proto::GetCapacityRequest::default()).await;
            let info = rig.client.node.node_get_info(proto::NodeGetInfoRequest {}).await;
            sites.push(Site {
                key: rig.key(),
                name: info.expect("NodeGetInfo").into_inner().node_id,
                room: room.expect("GetCapacity").into_inner().available_capacity as u64,
            });
        }
        sites
    }

    /// Where the bytes of each volume are.
    pub fn data(&self) -> impl Fn(&str) -> PathBuf + use<> {
        let pools: Vec<_> = self.rigs().iter().map(|rig| (rig.key(), rig.pool_dir())).collect();
        move |id| {
            let (_, pool) = pools
                .iter()
                .find(|(key, _)| key_of(id).as_ref() == Some(key))
                .unwrap_or_else(|| panic!("{id} is of no node"));
            pool.join("volumes").join(id).join("bytes/data.img")
        }
    }

    pub fn socket(&self) -> PathBuf {
        match &self.of {
            Of::Alone(rig) => rig.socket(),
            Of::Lent(rig) => rig.socket(),
            Of::Routed(routed) => routed.socket.clone(),
        }
    }

    /// Where volumes are staged and published, of all nodes.
    pub fn kubelet(&self) -> PathBuf {
        self.rigs()[0].kubelet()
    }

    pub fn log(&self) -> String {
        let router = match &self.of {
            Of::Routed(routed) => {
                routed.cluster.router.as_ref().map(|router| router.running.log()).unwrap_or_default()
            }
            Of::Alone(_) | Of::Lent(_) => String::new(),
        };
        self.rigs().iter().map(|rig| rig.log()).chain([router]).collect()
    }

    /// Kills everything, as when the power fails: the router first, so that it sends no call to another node.
    pub fn kill(&mut self) {
        if let Of::Routed(routed) = &mut self.of {
            drop(routed.cluster.router.take());
        }
        for rig in self.rigs_mut().into_iter().filter(|rig| rig.is_running()) {
            rig.kill();
        }
    }

    /// Kills the driver of one node, another each time; its key.
    pub fn kill_one(&mut self) -> String {
        let number = match &mut self.of {
            Of::Alone(_) | Of::Lent(_) => 0,
            Of::Routed(routed) => {
                routed.turn += 1;
                routed.turn % routed.cluster.nodes.len()
            }
        };
        let rig = self.rigs_mut().swap_remove(number);
        rig.kill();
        rig.key()
    }

    pub fn terminate(&mut self) -> ExitStatus {
        if let Of::Routed(routed) = &mut self.of {
            routed.cluster.router.take().expect("it runs").finish();
        }
        let ended: Vec<ExitStatus> = self.rigs_mut().into_iter().map(Rig::terminate).collect();
        *ended.iter().find(|status| !status.success()).unwrap_or(&ended[0])
    }

    /// Starts what does not run, and waits until it can be reached.
    pub async fn start_again(&mut self) {
        for rig in self.rigs_mut().into_iter().filter(|rig| !rig.is_running()) {
            rig.start_again().await;
        }
        match &mut self.of {
            Of::Alone(rig) => self.client = rig.client.clone(),
            Of::Lent(rig) => self.client = rig.client.clone(),
            Of::Routed(routed) => routed.reach(&mut self.client).await,
        }
    }

    pub async fn attach(&mut self, volume_id: &str) -> PathBuf {
        let kubelet = self.kubelet();
        self.client.publish(volume_id, block_capability(), false, &kubelet).await.expect("publish")
    }

    pub async fn detach(&mut self, volume_id: &str) {
        let kubelet = self.kubelet();
        self.client.unpublish(volume_id, &kubelet).await.expect("unpublish");
    }

    pub async fn snapshot(&mut self, name: &str, volume_id: &str) -> String {
        self.client.create_snapshot(name, volume_id).await.expect("CreateSnapshot").snapshot_id
    }

    /// A published Block volume made from something, on another node each time.
    pub async fn volume_from(
        &mut self,
        name: &str,
        bytes: i64,
        source: proto::VolumeContentSource,
    ) -> (String, PathBuf) {
        let mut request = new_volume_from(name, bytes, block_capability(), source);
        if let Of::Routed(routed) = &mut self.of {
            let Routed { cluster, turn, .. } = &mut **routed;
            *turn += 1;
            let requisite = vec![cluster.nodes[*turn % cluster.nodes.len()].topology()];
            request.accessibility_requirements =
                Some(proto::TopologyRequirement { requisite, preferred: Vec::new() });
        }
        let made = patiently!(self.client.create_volume(request.clone()));
        let volume = made.expect("CreateVolume from a source").volume_id;
        let device = self.attach(&volume).await;
        (volume, device)
    }

    /// The ids of deleted snapshots that are retained.
    pub fn retained(&self) -> Vec<String> {
        self.rigs().iter().flat_map(|rig| rig.retained()).collect()
    }

    pub fn leftovers(&self) -> Vec<String> {
        self.rigs().iter().flat_map(|rig| leftovers(rig.dir.path())).collect()
    }

    /// Takes away what a driver that was killed has left; whether nothing is left any more.
    pub fn sweep(&self) -> bool {
        self.rigs().iter().all(|rig| sweep(rig.dir.path()).is_ok_and(|left| left.is_empty()))
    }

    /// Stops everything in order and checks that nothing is left of it.
    pub fn finish(self) {
        match self.of {
            Of::Alone(rig) => rig.finish(),
            Of::Lent(_) => {}
            Of::Routed(routed) => {
                routed.serving.abort();
                routed.cluster.finish();
            }
        }
    }
}

impl Routed {
    /// Starts the router if it does not run, and waits until every node answers through it.
    async fn reach(&mut self, client: &mut Client) {
        let Cluster { router, nodes, dir, .. } = &mut self.cluster;
        if router.is_none() {
            let endpoints: Vec<String> = nodes.iter().map(|node| node.address.clone()).collect();
            *router = Some(Router::start(dir.path(), "router", &endpoints, &[]).await);
        }
        router.as_ref().expect("it runs").sees(nodes.len()).await;
        // Of a node that was just killed it may not know yet. Without one of them there is no list.
        let client = &mut client.controller;
        let mut listed = async || client.list_snapshots(proto::ListSnapshotsRequest::default()).await.is_ok();
        eventually("all nodes answer through the router", async || listed().await).await;
    }
}

/// A socket on which both the router and the kubelets of all nodes seem to be: calls of the Node service go to the node that
/// holds the volume, and all others to the router. For suites that know one socket.
pub async fn front(cluster: &Cluster, socket: &Path) -> tokio::task::JoinHandle<()> {
    let router = crate::channel(&cluster.router().socket).await;
    let mut nodes = BTreeMap::new();
    for node in &cluster.nodes {
        nodes.insert(node.key.clone(), crate::channel(&node.rig.socket()).await);
    }
    let first = nodes[&cluster.nodes[0].key].clone();
    let front = Arc::new(Front { router, first, nodes });
    let listener = tokio::net::UnixListener::bind(socket).expect("bind");
    let served = axum::Router::new().fallback(move |request: axum::extract::Request| {
        let front = front.clone();
        async move { front.answer(request.map(Body::new)).await.map(axum::body::Body::new) }
    });
    let routes = tonic::service::Routes::from(served);
    tokio::spawn(async move {
        let incoming = tokio_stream::wrappers::UnixListenerStream::new(listener);
        let served = tonic::transport::Server::builder().add_routes(routes).serve_with_incoming(incoming);
        served.await.expect("serve");
    })
}

struct Front {
    router: Channel,
    /// Whose NodeGetInfo is answered.
    first: Channel,
    nodes: BTreeMap<String, Channel>,
}

impl Front {
    async fn answer(&self, request: Request<Body>) -> Response<Body> {
        use http_body_util::BodyExt;
        use tower::{Service, ServiceExt};
        #[derive(Clone, PartialEq, Eq, Message)]
        struct VolumeId {
            #[prost(string, tag = "1")]
            volume_id: String,
        }
        let (head, body) = request.into_parts();
        let (mut channel, body) = if head.uri.path().starts_with("/csi.v1.Node/") {
            let Ok(body) = body.collect().await else {
                return Status::cancelled("the request did not arrive").into_http();
            };
            let body = body.to_bytes();
            let id = VolumeId::decode(&body[5..]).map(|id| id.volume_id).unwrap_or_default();
            let node = key_of(&id).and_then(|key| self.nodes.get(&key));
            (node.unwrap_or(&self.first).clone(), Body::new(http_body_util::Full::new(body)))
        } else {
            (self.router.clone(), body)
        };
        let request = Request::from_parts(head, body);
        let answer = async { channel.ready().await?.call(request).await }.await;
        answer.unwrap_or_else(|error| Status::unavailable(error.to_string()).into_http())
    }
}
