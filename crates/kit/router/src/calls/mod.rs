//! What each call does: to which node it is sent, or what is made of the answers of many. Here is what all calls share; the table of
//! them is in `methods`.

mod answers;
mod lists;
mod methods;
mod names;
mod snapshots;
mod twice;
mod volumes;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use base::DataDirKey;
use bytes::Bytes;
use parking_lot::Mutex;
use prost::Message;
use serve::relay::frame_bytes;
use serve::streams::Streams;
use serve::upstream::Answer;
use tokio::time::Instant;
use tonic::codegen::http::response;
use tonic::{Code, Status};

pub use methods::Method;
use methods::{Ids, Route, TwoIds};

use crate::node::Node;
use crate::nodes::{Lookup, Nodes};
use crate::placement::Making;
use crate::record::Record;

/// Nodes that are asked at once on behalf of one call.
const AT_ONCE: usize = 32;

/// A call under way: its message, its deadline, and what is kept of it.
struct Work<'c> {
    method: Method,
    message: Bytes,
    deadline: Option<Instant>,
    record: &'c mut Record,
    /// What a new volume is made of, and the key of its node.
    source: Option<(DataDirKey, String)>,
    /// Whether a node that could not be asked may have a volume of the name of a new one, or another router may make one.
    is_in_doubt: bool,
}

/// Where a call about an object is sent.
enum Target {
    Node(Arc<Node>),
    /// The id is not one of ours: it exists nowhere, and any node says so.
    Any,
    /// The object is gone with its node.
    Forgotten,
}

pub struct Router {
    pub nodes: Arc<Nodes>,
    pub streams: Arc<Streams<Record>>,
    names: Mutex<BTreeSet<(i32, String)>>,
    /// The node that was last asked to make a volume of this name and has not answered: it may be there.
    unanswered: Mutex<BTreeMap<String, (DataDirKey, Instant)>>,
    /// Volumes that were made while nodes were away, which may have one of the same name: their ids by name.
    doubtful: Mutex<BTreeMap<String, String>>,
    making: Making,
}

fn decode<M: Message + Default>(message: &Bytes) -> Result<M, Status> {
    M::decode(message.clone()).map_err(|_| not_a_message())
}

fn not_a_message() -> Status {
    Status::invalid_argument("the request is not a message of this call")
}

fn no_node() -> Status {
    Status::unavailable("no node answers: see the router's log")
}

fn forgotten(id: &str) -> Status {
    Status::not_found(format!("{id} does not exist: its node was forgotten (deltapath-router forget)"))
}

impl Router {
    pub fn new(nodes: Arc<Nodes>, streams: Arc<Streams<Record>>) -> Self {
        Router {
            nodes,
            streams,
            names: Mutex::default(),
            unanswered: Mutex::default(),
            doubtful: Mutex::default(),
            making: Making::default(),
        }
    }

    pub async fn call(
        &self,
        method: Method,
        message: Bytes,
        deadline: Option<Instant>,
        record: &mut Record,
    ) -> Result<Bytes, Status> {
        self.nodes.settled().await;
        let mut work = Work { method, message, deadline, record, source: None, is_in_doubt: false };
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
                    Target::Any => self.ask_any(&mut work).await,
                    Target::Forgotten if method.route == Route::Undo => {
                        match self.nodes.forgotten_but_there(&id) {
                            Some(why) => Err(Status::failed_precondition(why)),
                            None => Ok(Bytes::new()),
                        }
                    }
                    Target::Forgotten => Err(forgotten(&id)),
                }
            }
            Route::CreateVolume => self.create_volume(&mut work).await,
            Route::CreateSnapshot => self.create_snapshot(&mut work).await,
            Route::CreateGroup => self.create_group(&mut work).await,
            Route::List => self.list(&mut work, true).await,
            Route::ListSnapshots => self.list_snapshots(&mut work).await,
            Route::GetCapacity => self.get_capacity(&mut work).await,
            Route::Allocated | Route::Delta => Err(Status::internal("a stream is not a unary call")),
        }
    }

    pub async fn open(
        &self,
        method: Method,
        message: Bytes,
        deadline: Option<Instant>,
        record: &mut Record,
    ) -> Result<(response::Parts, Answer), Status> {
        self.nodes.settled().await;
        let id = match method.route {
            Route::Delta => {
                let TwoIds { base, target } = decode(&message)?;
                // The node of one has never heard of the other, and would say that it does not exist.
                if let (Some(one), Some(two)) = (DataDirKey::of(&base), DataDirKey::of(&target))
                    && one != two
                {
                    return Err(Status::invalid_argument(format!(
                        "snapshots {base} and {target} are on different nodes, so they are not of one volume"
                    )));
                }
                target
            }
            _ => decode::<Ids>(&message)?.first,
        };
        record.about(&id);
        let (node, message) = match self.target(&id)? {
            Target::Node(node) => (node, message),
            Target::Any => (self.any()?, method.without_secrets(&message)?),
            Target::Forgotten => return Err(forgotten(&id)),
        };
        record.on(&node);
        node.open(method.path, frame_bytes(&message), deadline).await
    }

    fn target(&self, id: &str) -> Result<Target, Status> {
        let Some(key) = DataDirKey::of(id) else { return Ok(Target::Any) };
        match self.nodes.lookup(key) {
            Lookup::Found(node) => Ok(Target::Node(node)),
            Lookup::Forgotten => Ok(Target::Forgotten),
            Lookup::Unavailable(status) => Err(status),
        }
    }

    fn any(&self) -> Result<Arc<Node>, Status> {
        self.nodes.up().into_iter().next().ok_or_else(no_node)
    }

    /// Asks the nodes in turn, until one is there. It gets no secrets, which may be another's.
    async fn ask_any(&self, work: &mut Work<'_>) -> Result<Bytes, Status> {
        work.message = work.method.without_secrets(&work.message)?;
        let mut last = no_node();
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
        let name = name.ok_or_else(|| {
            Status::unavailable(
                "the nodes do not agree on the driver's name: see the router's log, and --driver-name",
            )
        })?;
        let vendor_version = env!("CARGO_PKG_VERSION").to_owned();
        let manifest = [("nodes".to_owned(), self.nodes.up().len().to_string())].into();
        Ok(proto::GetPluginInfoResponse { name, vendor_version, manifest }.encode_to_vec().into())
    }
}

impl Work<'_> {
    async fn ask(&mut self, node: &Arc<Node>) -> Result<Bytes, Status> {
        self.record.on(node);
        let answer = node.call(self.method.path, self.message.clone(), self.deadline).await?;
        answers::check(self.method, node, &self.message, &answer)?;
        Ok(answer)
    }
}
