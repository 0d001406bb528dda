//! What each call does: to which node it goes, or what is made of the answers of many.

use std::collections::{BTreeSet, HashMap};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use base::Key;
use bytes::Bytes;
use futures_util::stream::{self, StreamExt};
use metrics::counter;
use prost::Message;
use proto::node::node_client::NodeClient;
use proto::node::{ChooseRequest, CreateFromRequest, CreateFromResponse, FindRequest, FindResponse, Kind};
use serve::relay::frame_bytes;
use serve::streams::Streams;
use serve::upstream::Answer;
use tonic::codegen::http::response;
use tonic::{Code, Request, Status};

use crate::node::{Connection, Node, within};
use crate::nodes::{Nodes, Place};
use crate::pages::{self, Asked, MAX_PAGE, Page, Start};
use crate::place;
use crate::record::Record;

/// Nodes that are asked at once on behalf of one call.
const AT_ONCE: usize = 32;
/// How long a volume that a node was asked for, without an answer, is waited for after the last try.
const WAITED_FOR: Duration = Duration::from_secs(600);
/// Names of such volumes, when those that nobody waits for any more are left out.
const MOST_UNANSWERED: usize = 10_000;

/// A call of CSI that is routed.
#[derive(Clone, Copy, Debug)]
pub struct Method {
    path: &'static str,
    route: Route,
}

/// Where a call goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Route {
    /// To no node: the router knows.
    PluginInfo,
    Probe,
    /// To any node: all say the same.
    Any,
    /// To the node of the id in field 1. On a forgotten one the object does not exist.
    ById,
    /// The same, for calls that end well where there is nothing to undo.
    Undo,
    CreateVolume,
    CreateSnapshot,
    CreateGroup,
    /// To all nodes, in pages.
    List,
    ListSnapshots,
    GetCapacity,
    /// A stream, to the node of the snapshot in field 1.
    Allocated,
    /// A stream, to the node of the snapshot in field 2.
    Delta,
}

/// All of them.
const METHODS: [Method; 26] = {
    const fn method(path: &'static str, route: Route) -> Method {
        Method { path, route }
    }
    [
        method("/csi.v1.Identity/GetPluginInfo", Route::PluginInfo),
        method("/csi.v1.Identity/GetPluginCapabilities", Route::Any),
        method("/csi.v1.Identity/Probe", Route::Probe),
        method("/csi.v1.Controller/CreateVolume", Route::CreateVolume),
        method("/csi.v1.Controller/DeleteVolume", Route::Undo),
        method("/csi.v1.Controller/ControllerPublishVolume", Route::ById),
        method("/csi.v1.Controller/ControllerUnpublishVolume", Route::Undo),
        method("/csi.v1.Controller/ValidateVolumeCapabilities", Route::ById),
        method("/csi.v1.Controller/ListVolumes", Route::List),
        method("/csi.v1.Controller/ControllerListVolumeHealth", Route::List),
        method("/csi.v1.Controller/ControllerGetVolumeHealth", Route::ById),
        method("/csi.v1.Controller/GetCapacity", Route::GetCapacity),
        method("/csi.v1.Controller/ControllerGetCapabilities", Route::Any),
        method("/csi.v1.Controller/CreateSnapshot", Route::CreateSnapshot),
        method("/csi.v1.Controller/DeleteSnapshot", Route::Undo),
        method("/csi.v1.Controller/ListSnapshots", Route::ListSnapshots),
        method("/csi.v1.Controller/GetSnapshot", Route::ById),
        method("/csi.v1.Controller/ControllerExpandVolume", Route::ById),
        method("/csi.v1.Controller/ControllerGetVolume", Route::ById),
        method("/csi.v1.Controller/ControllerModifyVolume", Route::ById),
        method("/csi.v1.GroupController/GroupControllerGetCapabilities", Route::Any),
        method("/csi.v1.GroupController/CreateVolumeGroupSnapshot", Route::CreateGroup),
        method("/csi.v1.GroupController/DeleteVolumeGroupSnapshot", Route::Undo),
        method("/csi.v1.GroupController/GetVolumeGroupSnapshot", Route::ById),
        method("/csi.v1.SnapshotMetadata/GetMetadataAllocated", Route::Allocated),
        method("/csi.v1.SnapshotMetadata/GetMetadataDelta", Route::Delta),
    ]
};

impl Method {
    /// The call with this path.
    pub fn at(path: &str) -> Option<Self> {
        METHODS.into_iter().find(|method| method.path == path)
    }

    /// Its name in the contract.
    pub fn name(self) -> &'static str {
        self.path.rsplit('/').next().unwrap_or_default()
    }

    /// Whether its answer is a stream.
    pub fn is_stream(self) -> bool {
        matches!(self.route, Route::Allocated | Route::Delta)
    }
}

/// The first fields of requests: an id each, in those that are routed by it.
#[derive(Clone, PartialEq, Eq, Message)]
struct Ids {
    #[prost(string, tag = "1")]
    first: String,
}

/// The first two, of GetMetadataDelta.
#[derive(Clone, PartialEq, Eq, Message)]
struct TwoIds {
    #[prost(string, tag = "1")]
    base: String,
    #[prost(string, tag = "2")]
    target: String,
}

/// A call under way: its message, its deadline, and what is kept of it.
struct Work<'c> {
    path: &'static str,
    message: Bytes,
    deadline: Option<Instant>,
    record: &'c mut Record,
    /// What a new volume is made of, and the key of its node.
    source: Option<(Key, String)>,
}

/// Where a call about an object goes.
enum Target {
    Node(Arc<Node>),
    /// The object is gone with its node.
    Forgotten,
}

/// Routes calls to nodes.
pub struct Router {
    /// The nodes.
    pub nodes: Arc<Nodes>,
    /// Answers under way.
    pub streams: Arc<Streams<Connection, Record>>,
    /// Names of objects that are being made.
    names: Mutex<BTreeSet<(i32, String)>>,
    /// The node that was last asked to make a volume of this name and has not answered: it may be there.
    unanswered: Mutex<HashMap<String, (Key, Instant)>>,
}

/// Holds a name while an object of it is made.
struct HeldName<'r> {
    router: &'r Router,
    name: (i32, String),
}

impl Drop for HeldName<'_> {
    fn drop(&mut self) {
        self.router.names.lock().unwrap_or_else(PoisonError::into_inner).remove(&self.name);
    }
}

fn decode<M: Message + Default>(message: &Bytes) -> Result<M, Status> {
    M::decode(message.clone())
        .map_err(|_| Status::invalid_argument("the request is not a message of this call"))
}

fn forgotten(id: &str) -> Status {
    Status::not_found(format!("{id} does not exist: its node was forgotten (deltapath-router forget)"))
}

impl Router {
    /// Routes to these.
    pub fn new(nodes: Arc<Nodes>, streams: Arc<Streams<Connection, Record>>) -> Self {
        Router { nodes, streams, names: Mutex::default(), unanswered: Mutex::default() }
    }

    /// Makes a unary call.
    pub async fn call(
        &self,
        method: Method,
        message: Bytes,
        deadline: Option<Instant>,
        record: &mut Record,
    ) -> Result<Bytes, Status> {
        self.nodes.settled().await;
        let mut work = Work { path: method.path, message, deadline, record, source: None };
        match method.route {
            Route::PluginInfo => self.plugin_info(),
            Route::Probe => {
                let ready = Some(!self.nodes.up().is_empty());
                Ok(proto::ProbeResponse { ready }.encode_to_vec().into())
            }
            Route::Any => self.ask_any(&mut work).await,
            Route::ById | Route::Undo => {
                let id = decode::<Ids>(&work.message)?.first;
                work.record.about(&id);
                match self.target(&id)? {
                    Target::Node(node) => work.ask(&node).await,
                    Target::Forgotten if method.route == Route::Undo => Ok(Bytes::new()),
                    Target::Forgotten => Err(forgotten(&id)),
                }
            }
            Route::CreateVolume => self.create_volume(&mut work).await,
            Route::CreateSnapshot => self.create_snapshot(&mut work).await,
            Route::CreateGroup => self.create_group(&mut work).await,
            Route::List => self.list(method, &mut work, true).await,
            Route::ListSnapshots => self.list_snapshots(method, &mut work).await,
            Route::GetCapacity => self.get_capacity(&mut work).await,
            Route::Allocated | Route::Delta => Err(Status::internal("a stream is no unary call")),
        }
    }

    /// Opens a stream.
    pub async fn open(
        &self,
        method: Method,
        message: Bytes,
        deadline: Option<Instant>,
        record: &mut Record,
    ) -> Result<(response::Parts, Answer<Connection>), Status> {
        self.nodes.settled().await;
        let id = match method.route {
            Route::Delta => decode::<TwoIds>(&message)?.target,
            _ => decode::<Ids>(&message)?.first,
        };
        record.about(&id);
        match self.target(&id)? {
            Target::Node(node) => {
                record.on(&node);
                node.open(method.path, frame_bytes(&message), deadline).await
            }
            Target::Forgotten => Err(forgotten(&id)),
        }
    }

    /// The node of an object. What is no id of ours exists nowhere, and any node says so.
    fn target(&self, id: &str) -> Result<Target, Status> {
        let Some(key) = Key::of(id) else { return self.any().map(Target::Node) };
        match self.nodes.place(key) {
            Place::Here(node) => Ok(Target::Node(node)),
            Place::Forgotten => Ok(Target::Forgotten),
            Place::Away(status) => Err(status),
        }
    }

    fn any(&self) -> Result<Arc<Node>, Status> {
        let first = self.nodes.up().into_iter().next();
        first.ok_or_else(|| Status::unavailable("no node answers: see the router's log"))
    }

    /// Asks the nodes in turn, until one is there.
    async fn ask_any(&self, work: &mut Work<'_>) -> Result<Bytes, Status> {
        let mut last = Status::unavailable("no node answers: see the router's log");
        for node in self.nodes.up() {
            match work.ask(&node).await {
                Err(status) if status.code() == Code::Unavailable => last = status,
                answer => return answer,
            }
        }
        Err(last)
    }

    fn plugin_info(&self) -> Result<Bytes, Status> {
        let name = self.nodes.driver_name();
        let name = name.ok_or_else(|| Status::unavailable("no node has said its driver's name yet"))?;
        let vendor_version = env!("CARGO_PKG_VERSION").to_owned();
        let manifest = [("nodes".to_owned(), self.nodes.up().len().to_string())].into();
        Ok(proto::GetPluginInfoResponse { name, vendor_version, manifest }.encode_to_vec().into())
    }

    fn hold(&self, kind: Kind, name: &str) -> Result<HeldName<'_>, Status> {
        let held = (kind.into(), name.to_owned());
        match self.names.lock().unwrap_or_else(PoisonError::into_inner).insert(held.clone()) {
            true => Ok(HeldName { router: self, name: held }),
            false => Err(Status::aborted(format!(
                "another call is in progress for the name {name:?}: try again when it is done"
            ))),
        }
    }

    /// The nodes that have an object of this name, of those that answer.
    async fn find(
        &self,
        kind: Kind,
        name: &str,
        deadline: Option<Instant>,
    ) -> Vec<(Arc<Node>, FindResponse)> {
        let ask = |node: Arc<Node>| async move {
            let mut client = NodeClient::new(node.link().channel());
            let mut request = Request::new(FindRequest { kind: kind.into(), name: name.to_owned() });
            if let Some(deadline) = deadline {
                request.set_timeout(deadline.saturating_duration_since(Instant::now()));
            }
            let found =
                within(deadline, async { client.find(request).await.map_err(|status| node.told(status)) });
            match found.await {
                Ok(found) => {
                    Some(found.into_inner()).filter(|found| !found.id.is_empty()).map(|found| (node, found))
                }
                // What it holds cannot be used before it is back, and then it is asked again.
                Err(status) => {
                    tracing::debug!(node = node.name, reason = status.message(), "a node could not be asked");
                    None
                }
            }
        };
        let found = stream::iter(self.nodes.up()).map(ask).buffer_unordered(AT_ONCE);
        found.filter_map(std::future::ready).collect().await
    }

    /// 1. A volume of this name is found again, wherever it is, also while it is copied there.
    /// 2. A node that was asked before and has not answered is asked again: the volume may be there.
    /// 3. A source decides, for it is where it is.
    /// 4. Else, and where the topologies leave the source's node out, the best node, as the arbiter of the name has it: so two
    ///    routers make one volume. The next best where that has no room.
    async fn create_volume(&self, work: &mut Work<'_>) -> Result<Bytes, Status> {
        use proto::volume_content_source::Type;
        let request: proto::CreateVolumeRequest = decode(&work.message)?;
        let name = request.name.as_str();
        work.record.about(name);
        if name.is_empty() {
            return self.ask_any(work).await;
        }
        let _held = self.hold(Kind::Volume, name)?;
        let requirement = request.accessibility_requirements.as_ref();
        let source = request.volume_content_source.and_then(|source| match source.r#type {
            Some(Type::Snapshot(source)) => Some(source.snapshot_id),
            Some(Type::Volume(source)) => Some(source.volume_id),
            None => None,
        });
        work.source = source.and_then(|source| Some((Key::of(&source)?, source)));
        let is_forgotten = |key: Key| matches!(self.nodes.place(key), Place::Forgotten);
        let source_is_forgotten = work.source.as_ref().is_some_and(|(key, _)| is_forgotten(*key));
        match &self.find(Kind::Volume, name, work.deadline).await[..] {
            [] => {}
            // Half a copy, of what will never be read, or where nobody wants it any more.
            [(node, found)]
                if found.in_progress
                    && (source_is_forgotten || !place::is_allowed(&node.topology, requirement)) =>
            {
                self.delete_on(node, &found.id, work).await?;
                self.unanswered().remove(name);
            }
            [(node, found)] if !place::is_allowed(&node.topology, requirement) => {
                return Err(Status::already_exists(format!(
                    "volume {name:?} already exists as {} on node {}, which the requisite topologies leave out: use \
                     another name, or delete it",
                    found.id, node.name
                )));
            }
            [(node, _)] => return self.create_on(node, name, work).await,
            found => {
                counter!("deltapath_router_volumes_made_twice_total").increment(1);
                let places: Vec<_> =
                    found.iter().map(|(node, found)| format!("{} on node {}", found.id, node.name)).collect();
                return Err(Status::failed_precondition(format!(
                    "volume {name:?} was made twice, as {}: delete the one that is not in use",
                    places.join(" and as ")
                )));
            }
        }
        if let Some(key) = self.waits_for(name) {
            match self.nodes.place(key) {
                Place::Here(node) if place::is_allowed(&node.topology, requirement) => {
                    return self.create_on(&node, name, work).await;
                }
                Place::Away(status) => return Err(status),
                Place::Here(_) | Place::Forgotten => {}
            }
        }
        if let Some((_, source)) = work.source.clone() {
            match self.target(&source)? {
                Target::Forgotten => return Err(forgotten(&source)),
                Target::Node(node) if place::is_allowed(&node.topology, requirement) => {
                    return self.create_on(&node, name, work).await;
                }
                Target::Node(_) => {}
            }
        }
        self.create_anywhere(name, requirement, work).await
    }

    /// Ends what was begun on a node.
    async fn delete_on(&self, node: &Arc<Node>, id: &str, work: &Work<'_>) -> Result<(), Status> {
        let request = proto::DeleteVolumeRequest { volume_id: id.to_owned(), ..Default::default() };
        let message = request.encode_to_vec().into();
        node.call("/csi.v1.Controller/DeleteVolume", message, work.deadline).await.map(drop)
    }

    fn unanswered(&self) -> MutexGuard<'_, HashMap<String, (Key, Instant)>> {
        self.unanswered.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Asks a node to make the volume. Until it answers, also beyond the end of this call, its name is kept for it.
    async fn create_on(&self, node: &Arc<Node>, name: &str, work: &mut Work<'_>) -> Result<Bytes, Status> {
        {
            let mut unanswered = self.unanswered();
            if unanswered.len() >= MOST_UNANSWERED {
                unanswered.retain(|_, (_, asked)| asked.elapsed() < WAITED_FOR);
            }
            unanswered.insert(name.to_owned(), (node.key, Instant::now()));
        }
        let answer = match work.source.clone() {
            Some((key, source)) if key != node.key => self.copy_to(node, key, &source, work).await,
            _ => work.ask(node).await,
        };
        let is_answered = answer.as_ref().err().is_none_or(|status| {
            !matches!(
                status.code(),
                Code::Unavailable | Code::DeadlineExceeded | Code::Cancelled | Code::Unknown | Code::Aborted
            )
        });
        if is_answered {
            self.unanswered().remove(name);
        }
        answer
    }

    /// Asks a node to make the volume of a source that is on another, which is allowed to it by a ticket.
    async fn copy_to(
        &self,
        node: &Arc<Node>,
        key: Key,
        source: &str,
        work: &mut Work<'_>,
    ) -> Result<Bytes, Status> {
        let away = match self.nodes.place(key) {
            Place::Here(from) => Ok(from),
            Place::Away(status) => Err(status),
            Place::Forgotten => Err(forgotten(source)),
        };
        let from = match away {
            Ok(from) => from,
            // Without its source's node it can still be found. The node itself knows no more than that the source is elsewhere.
            Err(status) => match work.ask(node).await {
                Err(refused) if refused.code() == Code::ResourceExhausted => return Err(status),
                answer => return answer,
            },
        };
        let request = CreateFromRequest {
            create_volume: work.message.to_vec(),
            address: from.address.to_string(),
            key: key.to_string(),
            ticket: self.nodes.ticket(source, node.key)?,
        };
        work.record.on(node);
        let request = request.encode_to_vec().into();
        let answer = node.call("/deltapath.node.v1.Node/CreateFrom", request, work.deadline).await?;
        Ok(decode::<CreateFromResponse>(&answer)?.created.into())
    }

    /// The node that has not answered for this name, if there is one.
    fn waits_for(&self, name: &str) -> Option<Key> {
        let mut unanswered = self.unanswered();
        let (key, asked) = unanswered.get_mut(name).filter(|(_, asked)| asked.elapsed() < WAITED_FOR)?;
        *asked = Instant::now();
        Some(*key)
    }

    async fn create_anywhere(
        &self,
        name: &str,
        requirement: Option<&proto::TopologyRequirement>,
        work: &mut Work<'_>,
    ) -> Result<Bytes, Status> {
        let nodes = self.nodes.candidates();
        let node = |key: Key| nodes.iter().map(|(node, _)| node).find(|node| node.key == key);
        let allowed =
            place::order(nodes.iter().map(|(_, candidate)| candidate.clone()).collect(), requirement);
        let away = self.nodes.away();
        let may_be_away = away
            .iter()
            .any(|(_, node)| node.as_ref().is_none_or(|node| place::is_allowed(&node.topology, requirement)));
        let mut excluded = Vec::new();
        let mut full = None;
        loop {
            let mut left = allowed.iter().filter(|key| !excluded.contains(*key));
            let Some(best) = left.next() else {
                return Err(full.unwrap_or_else(|| match may_be_away {
                    true => Status::unavailable("no node that the topologies allow answers: try again later"),
                    false => Status::resource_exhausted("none of the requisite topologies is that of a node"),
                }));
            };
            // Where there is nothing to choose, nobody needs to agree.
            let chosen = match left.next().is_none() && !may_be_away && excluded.is_empty() {
                true => *best,
                false => self.choose(name, *best, &excluded, &nodes, work.deadline).await?,
            };
            match node(chosen) {
                Some(node) if allowed.contains(&chosen) => match self.create_on(node, name, work).await {
                    Err(status) if status.code() == Code::ResourceExhausted => full = Some(status),
                    answer => return answer,
                },
                // Chosen by an earlier call, whose volume may be there.
                None => match self.nodes.place(chosen) {
                    Place::Away(status) => return Err(status),
                    Place::Here(_) | Place::Forgotten => {}
                },
                Some(_) => {}
            }
            excluded.push(chosen);
        }
    }

    /// Which node makes the volume, as the arbiter of its name knows it.
    async fn choose(
        &self,
        name: &str,
        best: Key,
        excluded: &[Key],
        nodes: &[(Arc<Node>, place::Candidate)],
        deadline: Option<Instant>,
    ) -> Result<Key, Status> {
        let request = ChooseRequest {
            volume_name: name.to_owned(),
            proposed_key: best.to_string(),
            excluded_keys: excluded.iter().map(Key::to_string).collect(),
        };
        let mut last = Status::unavailable("no node answers: see the router's log");
        for arbiter in place::arbiters(name, nodes.iter().map(|(node, _)| node.key).collect()) {
            let Some((node, _)) = nodes.iter().find(|(node, _)| node.key == arbiter) else { continue };
            let mut client = NodeClient::new(node.link().channel());
            let chosen = within(deadline, async {
                client.choose(request.clone()).await.map_err(|status| node.told(status))
            });
            match chosen.await {
                Ok(chosen) => {
                    let key = chosen.into_inner().key;
                    return key
                        .parse()
                        .map_err(|_| Status::internal(format!("a node chose {key:?}, which is no key")));
                }
                Err(status) if status.code() == Code::Unavailable => last = status,
                Err(status) => return Err(status),
            }
        }
        Err(last)
    }

    async fn create_snapshot(&self, work: &mut Work<'_>) -> Result<Bytes, Status> {
        let request: proto::CreateSnapshotRequest = decode(&work.message)?;
        work.record.about(&request.name);
        let target = self.target(&request.source_volume_id)?;
        self.create_by_name(Kind::Snapshot, &request.name, target, &request.source_volume_id, work).await
    }

    async fn create_group(&self, work: &mut Work<'_>) -> Result<Bytes, Status> {
        let request: proto::CreateVolumeGroupSnapshotRequest = decode(&work.message)?;
        work.record.about(&request.name);
        let mut by_node: Vec<(Key, &str)> =
            request.source_volume_ids.iter().filter_map(|id| Some((Key::of(id)?, id.as_str()))).collect();
        by_node.dedup_by_key(|(key, _)| *key);
        if let [(one, first), (_, second), ..] = by_node[..] {
            return Err(match (self.nodes.place(one), Key::of(second).map(|two| self.nodes.place(two))) {
                (Place::Here(one), Some(Place::Here(two))) => Status::failed_precondition(format!(
                    "volume {first} is on node {} and volume {second} on node {}: the volumes of a group snapshot must \
                     be on one node",
                    one.name, two.name
                )),
                _ => Status::failed_precondition(format!(
                    "volumes {first} and {second} are on different nodes: the volumes of a group snapshot must be on \
                     one node"
                )),
            });
        }
        let source = by_node.first().map_or("", |(_, id)| *id);
        let target = self.target(source)?;
        self.create_by_name(Kind::GroupSnapshot, &request.name, target, source, work).await
    }

    /// Makes a snapshot or a group on the node of its source, unless its name is taken on another.
    async fn create_by_name(
        &self,
        kind: Kind,
        name: &str,
        target: Target,
        source: &str,
        work: &mut Work<'_>,
    ) -> Result<Bytes, Status> {
        let Target::Node(node) = target else { return Err(forgotten(source)) };
        if name.is_empty() || Key::of(source).is_none() {
            // The node says what is wrong with it.
            return work.ask(&node).await;
        }
        let _held = self.hold(kind, name)?;
        let found = self.find(kind, name, work.deadline).await;
        match found.iter().find(|(found, _)| found.key != node.key) {
            Some((other, found)) => Err(Status::already_exists(format!(
                "{name:?} already exists as {} on node {}: use another name, or the same request",
                found.id, other.name
            ))),
            None => work.ask(&node).await,
        }
    }

    /// Lists of a volume's or for one snapshot are its node's; the others are of all nodes.
    async fn list_snapshots(&self, method: Method, work: &mut Work<'_>) -> Result<Bytes, Status> {
        let request: proto::ListSnapshotsRequest = decode(&work.message)?;
        let ids = [&request.snapshot_id, &request.source_volume_id];
        let Some(id) = ids.into_iter().find(|id| !id.is_empty()) else {
            // The spec has all snapshots of the storage system listed, so a part of them is no answer.
            return self.list(method, work, false).await;
        };
        work.record.about(id);
        match self.target(id)? {
            Target::Node(node) => work.ask(&node).await,
            Target::Forgotten => Ok(Bytes::new()),
        }
    }

    /// A page of what all nodes list. Where a node is away, the others' entries are an answer only if the list `may_lack`
    /// some.
    async fn list(&self, method: Method, work: &mut Work<'_>, may_lack: bool) -> Result<Bytes, Status> {
        let asked: Asked = decode(&work.message)?;
        let Ok(limit) = usize::try_from(asked.max_entries) else {
            // Any node says what is wrong with it.
            return self.ask_any(work).await;
        };
        let limit = if limit == 0 { MAX_PAGE } else { limit.min(MAX_PAGE) };
        let start = Start::parse(&asked.starting_token)?;
        let mut missing: Vec<String> = self.nodes.away().into_iter().map(|(name, _)| name).collect();
        let nodes: Vec<(Arc<Node>, String)> = self
            .nodes
            .up()
            .into_iter()
            .filter_map(|node| start.at(node.key).map(str::to_owned).map(|token| (node, token)))
            .collect();
        if nodes.is_empty() && self.nodes.up().is_empty() {
            return Err(Status::unavailable("no node answers: see the router's log"));
        }
        let last_key = nodes.last().map(|(node, _)| node.key);
        let (path, deadline, message) = (work.path, work.deadline, work.message.clone());
        let ask = |node: Arc<Node>, token: String, limit: usize| {
            let asked = Asked { max_entries: limit as i32, starting_token: token };
            let request = asked.instead_of_those_in(&message);
            async move {
                let page = node.call(path, request, deadline).await;
                let page = page.and_then(|page| {
                    Page::decode(page)
                        .map_err(|_| Status::internal(format!("node {} sent no list", node.name)))
                });
                (node, page)
            }
        };
        let mut page = Page::default();
        let mut pages = stream::iter(nodes)
            .map(|(node, token)| {
                let again = token.clone();
                let asked = ask(node, token, limit);
                async move { (again, asked.await) }
            })
            // In order, a few ahead.
            .buffered(AT_ONCE / 2);
        while let Some((token, (node, answer))) = pages.next().await {
            let room = limit - page.entries.len();
            let answer = match answer {
                // It has more than there is room for: the part that fits, with the token behind it.
                Ok(answer) if answer.entries.len() > room => ask(node.clone(), token, room).await.1,
                answer => answer,
            };
            match answer {
                Ok(mut answer) => {
                    page.entries.append(&mut answer.entries);
                    page.next_token = answer.next_token;
                }
                Err(status) if status.code() == Code::Unavailable => {
                    missing.push(node.name.clone());
                    continue;
                }
                Err(status) => return Err(status),
            }
            if !page.next_token.is_empty() {
                break;
            }
            if page.entries.len() >= limit && last_key != Some(node.key) {
                page.next_token = pages::after(node.key);
                break;
            }
        }
        if !missing.is_empty() {
            for node in &missing {
                counter!(
                    "deltapath_router_lists_incomplete_total",
                    "method" => method.name(),
                    "node" => node.clone()
                )
                .increment(1);
            }
            tracing::warn!(
                method = method.name(),
                nodes = missing.join(", "),
                "nodes are missing from a list"
            );
            if !may_lack {
                return Err(Status::unavailable(format!(
                    "the list would lack what is on {}, which does not answer: try again when it is back",
                    missing.join(", ")
                )));
            }
        }
        Ok(page.encode_to_vec().into())
    }

    /// The sum of what the nodes of a topology have, and the largest volume that one of them can make. A node that is away
    /// has nothing to offer.
    async fn get_capacity(&self, work: &mut Work<'_>) -> Result<Bytes, Status> {
        let request: proto::GetCapacityRequest = decode(&work.message)?;
        let nodes = self.nodes.up().into_iter().filter(|node| {
            request.accessible_topology.as_ref().is_none_or(|asked| place::fits(&node.topology, asked))
        });
        let (path, deadline, message) = (work.path, work.deadline, work.message.clone());
        let ask = |node: Arc<Node>| {
            let message = message.clone();
            async move { node.call(path, message, deadline).await }
        };
        let answers: Vec<_> = stream::iter(nodes).map(ask).buffer_unordered(AT_ONCE).collect().await;
        let mut sum = proto::GetCapacityResponse { maximum_volume_size: Some(0), ..Default::default() };
        for answer in answers {
            let answer = match answer {
                Ok(answer) => decode::<proto::GetCapacityResponse>(&answer)?,
                Err(status) if status.code() == Code::Unavailable => continue,
                Err(status) => return Err(status),
            };
            sum.available_capacity = sum.available_capacity.saturating_add(answer.available_capacity);
            sum.maximum_volume_size = sum.maximum_volume_size.max(answer.maximum_volume_size);
            let least = [sum.minimum_volume_size, answer.minimum_volume_size];
            sum.minimum_volume_size = least.into_iter().flatten().min();
        }
        Ok(sum.encode_to_vec().into())
    }
}

impl Work<'_> {
    /// Makes the call on this node, as it came.
    async fn ask(&mut self, node: &Arc<Node>) -> Result<Bytes, Status> {
        self.record.on(node);
        node.call(self.path, self.message.clone(), self.deadline).await
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every call of CSI that is about the cluster has a way.
    #[test]
    fn all_calls_are_routed() {
        let contract = include_str!("../../proto/proto/csi.proto");
        let mut service = "";
        let mut found = 0;
        for line in contract.lines() {
            let line = line.trim();
            if let Some(name) = line.strip_prefix("service ") {
                service = name.trim_end_matches('{').trim();
            }
            let Some(method) = line.strip_prefix("rpc ").and_then(|rest| rest.split(['(', ' ']).next())
            else {
                continue;
            };
            let routed = Method::at(&format!("/csi.v1.{service}/{method}"));
            assert_eq!(routed.is_some(), service != "Node", "{service}/{method}");
            if let Some(routed) = routed {
                assert_eq!(routed.name(), method);
                assert_eq!(routed.is_stream(), service == "SnapshotMetadata");
                found += 1;
            }
        }
        assert!(found >= 24, "only {found} are found");
        let paths: BTreeSet<_> = METHODS.iter().map(|method| method.path).collect();
        assert_eq!(paths.len(), METHODS.len(), "a path stands there twice");
    }
}
