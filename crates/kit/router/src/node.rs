//! One node: connections to its driver, and calls on them.
//!
//! Every connection shows a certificate with the key of the node's data directory. The first one says which key the node
//! has, and the later ones must have the same: an address may come to be another node's, which would take a call for an
//! object of this one as about an object that does not exist.

use std::collections::BTreeMap;
use std::fmt;
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use base::DataDirKey;
use bytes::Bytes;
use hyper_util::rt::TokioIo;
use parking_lot::Mutex;
use prost::Message;
use serve::mutual::Mutual;
use serve::streams::{passed_on, within};
use serve::upstream::{self, Answer, ORIGIN, Upstream, WideWindows, time_left};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::sync::Notify;
use tokio::time::Instant;
use tokio_rustls::client::TlsStream;
use tokio_util::sync::CancellationToken;
use tonic::codegen::http::response;
use tonic::codegen::http::uri::PathAndQuery;
use tonic::metadata::MetadataValue;
use tonic::transport::{Channel, Endpoint, Uri};
use tonic::{Code, Request, Status};

use crate::passthrough::Passthrough;
use proto::answers::Checked;
use proto::node::DescribeResponse;

/// How tonic begins the status of a message that is larger than it takes, 4 MiB.
const TOO_LARGE: &str = "Error, decoded message length too large";
/// Between two pings of a connection, and until one that is not answered is given up.
const KEEPALIVE: Duration = Duration::from_secs(10);

#[derive(Clone)]
pub struct Link {
    connector: Connector,
    channel: Channel,
    upstream: Arc<Upstream>,
}

/// What leads to an address: TCP, or the network of the simulation.
pub trait Dial: Send + Sync {
    fn dial<'d>(&'d self, address: &'d str) -> Dialling<'d>;
}

pub type Dialling<'d> = Pin<Box<dyn Future<Output = io::Result<Box<dyn Wire>>> + Send + 'd>>;

pub trait Wire: AsyncRead + AsyncWrite + Unpin + Send {}

impl<W: AsyncRead + AsyncWrite + Unpin + Send> Wire for W {}

impl Dial for Mutual {
    fn dial<'d>(&'d self, address: &'d str) -> Dialling<'d> {
        Box::pin(async move { Ok(Box::new(Mutual::dial(self, address).await?) as Box<dyn Wire>) })
    }
}

/// Makes connections to one address, all of them to the same data directory.
#[derive(Clone)]
struct Connector {
    address: Arc<str>,
    tls: Arc<Mutual>,
    network: Arc<dyn Dial>,
    patience: Duration,
    seen: Arc<Mutex<Seen>>,
}

/// What the certificates at an address have said.
#[derive(Clone, Copy, Debug, Default)]
struct Seen {
    key: Option<DataDirKey>,
    is_taken: bool,
    is_replaced: bool,
}

impl Link {
    /// Nothing is connected yet. `patience` bounds the time that a connection takes.
    pub fn new(
        address: &str,
        tls: &Arc<Mutual>,
        network: &Arc<dyn Dial>,
        patience: Duration,
        windows: &WideWindows,
    ) -> Self {
        let (tls, network) = (tls.clone(), network.clone());
        let connector = Connector { address: address.into(), tls, network, patience, seen: Arc::default() };
        let connect = {
            let connector = connector.clone();
            tower::service_fn(move |_: Uri| {
                let connector = connector.clone();
                async move { connector.connect().await.map(TokioIo::new) }
            })
        };
        let channel = Endpoint::from_static(ORIGIN)
            .http2_keep_alive_interval(KEEPALIVE)
            .keep_alive_timeout(KEEPALIVE)
            .keep_alive_while_idle(true)
            .connect_with_connector_lazy(connect);
        let upstream = Arc::new(Upstream::new(windows.clone(), upstream::OFTEN));
        Link { connector, channel, upstream }
    }

    /// For typed calls.
    pub fn channel(&self) -> Checked {
        Checked(self.channel.clone())
    }

    /// The key in the certificate that was shown; none before there was a connection.
    pub fn key(&self) -> Option<DataDirKey> {
        self.connector.seen().key
    }

    /// Whether something has accepted the last connection that was tried.
    pub fn is_taken(&self) -> bool {
        self.connector.seen().is_taken
    }

    /// Whether another data directory has answered at the address since.
    pub fn is_replaced(&self) -> bool {
        self.connector.seen().is_replaced
    }
}

impl Connector {
    fn seen(&self) -> Seen {
        *self.seen.lock()
    }

    async fn connect(&self) -> io::Result<TlsStream<Box<dyn Wire>>> {
        let connecting = tokio::time::timeout(self.patience, self.connect_patiently());
        connecting.await.unwrap_or_else(|_| {
            let late = format!("{} does not answer within {} s", self.address, self.patience.as_secs_f64());
            Err(io::Error::new(io::ErrorKind::TimedOut, late))
        })
    }

    async fn connect_patiently(&self) -> io::Result<TlsStream<Box<dyn Wire>>> {
        self.seen.lock().is_taken = false;
        let stream = self.network.dial(&self.address).await?;
        self.seen.lock().is_taken = true;
        let (stream, key) = self.tls.greet(stream, &self.address).await?;
        let key: DataDirKey = key.parse().map_err(|_| {
            io::Error::other(format!("the certificate at {} names no key of a data directory", self.address))
        })?;
        let mut seen = self.seen.lock();
        match *seen.key.get_or_insert(key) {
            known if known == key => Ok(stream),
            known => {
                seen.is_replaced = true;
                let address = &self.address;
                Err(io::Error::other(format!("at {address} is data directory {key}, where {known} was")))
            }
        }
    }
}

/// A node that has said who it is.
pub struct Node {
    pub address: Arc<str>,
    pub key: DataDirKey,
    /// As in NodeGetInfo.
    pub name: String,
    /// The same.
    pub topology: BTreeMap<String, String>,
    /// The name of its driver.
    pub driver: String,
    /// Another one for each process; empty if the driver does not tell.
    pub process: String,
    /// Told when a call found it away, so that it is looked at now.
    pub suspect: Arc<Notify>,
    /// Cancelled when it does not answer any more.
    gone: CancellationToken,
    link: Link,
}

impl fmt::Debug for Node {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Node").field("name", &self.name).field("key", &self.key).finish_non_exhaustive()
    }
}

impl Node {
    pub fn new(
        address: &Arc<str>,
        key: DataDirKey,
        described: DescribeResponse,
        link: Link,
        suspect: Arc<Notify>,
        gone: CancellationToken,
    ) -> Self {
        Node {
            address: address.clone(),
            key,
            name: described.node_id,
            topology: described.topology.into_iter().collect(),
            driver: described.driver_name,
            process: described.process,
            suspect,
            gone,
            link,
        }
    }

    /// Whether it says of itself what the other says.
    pub fn is_as(&self, other: &Node) -> bool {
        let Node { key, name, driver, process, topology, .. } = self;
        (key, name, driver, process, topology)
            == (&other.key, &other.name, &other.driver, &other.process, &other.topology)
    }

    pub async fn call(
        &self,
        path: &'static str,
        message: Bytes,
        deadline: Option<Instant>,
    ) -> Result<Bytes, Status> {
        let mut grpc = tonic::client::Grpc::new(self.link.channel());
        let call = async {
            grpc.ready().await.map_err(|error| Status::from_error(error.into()))?;
            let mut request = Request::new(message);
            if let Some(left) = deadline.map(time_left) {
                let left =
                    MetadataValue::try_from(left).map_err(|error| Status::internal(error.to_string()))?;
                request.metadata_mut().insert("grpc-timeout", left);
            }
            let answer = grpc.unary(request, PathAndQuery::from_static(path), Passthrough).await;
            answer.map(tonic::Response::into_inner)
        };
        within(deadline, call).await.map_err(|status| self.status_of(status))
    }

    /// Makes a call whose request is the router's own.
    pub async fn ask<A: Message + Default>(
        &self,
        path: &'static str,
        request: &impl Message,
        deadline: Option<Instant>,
    ) -> Result<A, Status> {
        let answer = self.call(path, request.encode_to_vec().into(), deadline).await?;
        A::decode(answer).map_err(|_| self.refused(&format!("answered {path} with no message of it")))
    }

    /// The status for the client: the node's own as it is, and for a connection that broke, which a source gives away, one
    /// that says so.
    fn status_of(&self, status: Status) -> Status {
        match std::error::Error::source(&status) {
            Some(_) => self.away(&status),
            None if status.code() == Code::OutOfRange && status.message().starts_with(TOO_LARGE) => {
                self.refused("answered with more than 4 MiB")
            }
            None => passed_on(status),
        }
    }

    pub fn refused(&self, what: &str) -> Status {
        let Node { name, key, address, .. } = self;
        tracing::error!(node = name, %key, address = &**address, what, "an answer is refused");
        Status::internal(format!("node {name} ({key}) at {address} {what}: its answer is refused"))
    }

    /// The status where the node was not reached, or was lost in the middle.
    pub fn away(&self, error: &(dyn std::error::Error + 'static)) -> Status {
        self.suspect.notify_one();
        let why = base::report(error);
        tracing::warn!(node = self.name, key = %self.key, address = &*self.address, error = why, "a node is unreachable");
        self.unavailable("its connection broke")
    }

    pub fn lost(&self, error: &upstream::Error) -> Status {
        match error.verdict() {
            Some((code, what)) => Status::new(code, format!("node {} ({}) {what}", self.name, self.key)),
            None => self.away(error),
        }
    }

    /// The status of what only this node could answer.
    pub fn unavailable(&self, why: &str) -> Status {
        Status::unavailable(format!(
            "node {} ({}) does not answer, {why}: try again when it is back",
            self.name, self.key
        ))
    }

    /// Waits for the node's part of an answer that many nodes have a part in. A node that is slow is waited for as long as it
    /// answers at all, since it may have what is looked for; one that has gone silent is looked at at once, and holds the call
    /// up no longer than it takes to see that.
    pub async fn while_up<T>(&self, answer: impl Future<Output = Result<T, Status>>) -> Result<T, Status> {
        tokio::pin!(answer);
        let look = async {
            tokio::time::sleep(self.link.connector.patience).await;
            self.suspect.notify_one();
            self.gone.cancelled().await;
        };
        tokio::select! {
            biased;
            answer = &mut answer => answer,
            () = look => Err(self.unavailable("it has gone silent")),
        }
    }

    /// Opens a stream: the head of the answer, and its body. `body` is a message with its prefix.
    pub async fn open(
        &self,
        path: &'static str,
        body: Bytes,
        deadline: Option<Instant>,
    ) -> Result<(response::Parts, Answer), Status> {
        let request = upstream::request(path, deadline)
            .map_err(|error| Status::internal(format!("address the node: {error}")))?;
        let open = self.link.upstream.call(self.link.connector.connect(), request, body);
        within(deadline, async { open.await.map_err(|error| self.lost(&error)) }).await
    }
}
