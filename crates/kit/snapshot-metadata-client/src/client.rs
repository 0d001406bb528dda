//! The client: where answers come from, and how long it tries.

use std::collections::HashMap;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use futures_util::{Stream, StreamExt};
use tonic::transport::Endpoint;
use tonic::{Response, Status, Streaming};

use crate::answer::Message;
use crate::blocks::Blocks;
use crate::csi::Socket;
use crate::error::{Call, Error};
#[cfg(feature = "kubernetes")]
use crate::kubernetes::{Cluster, Options};

/// Longest message that is taken, in bytes. Other clients take 4 MiB, so drivers keep to that.
pub(crate) const MAX_MESSAGE: usize = 16 << 20;
/// How much a server may send ahead, in bytes.
const WINDOW: u32 = 1 << 20;
/// When TCP looks whether the other end is still there. HTTP/2 has pings for that, but servers in Go end a connection whose
/// client pings more often than every five minutes.
const KEEPALIVE: Duration = Duration::from_secs(20);

/// What is asked for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Query {
    /// The ranges of a snapshot that hold data.
    Allocated {
        /// The snapshot: the name of a VolumeSnapshot, or a CSI handle on a driver's socket.
        snapshot: String,
    },
    /// The ranges that differ between two snapshots of a volume.
    Delta {
        /// The CSI handle of the older snapshot. Its VolumeSnapshot may be gone, where the driver can do without.
        base: String,
        /// The newer snapshot: the name of a VolumeSnapshot, or a CSI handle on a driver's socket.
        target: String,
    },
}

impl Query {
    /// The snapshot whose driver is asked.
    #[cfg(feature = "kubernetes")]
    pub(crate) fn target(&self) -> &str {
        match self {
            Query::Allocated { snapshot } => snapshot,
            Query::Delta { target, .. } => target,
        }
    }

    pub(crate) fn call(&self) -> Call {
        match self {
            Query::Allocated { .. } => Call::Allocated,
            Query::Delta { .. } => Call::Delta,
        }
    }
}

/// How long a client tries.
#[derive(Clone, Debug)]
pub struct Policy {
    /// How often in a row a call may fail and be tried again. Every new range sets the count back to 0.
    pub retries: u32,
    /// The pause before the first retry. It doubles with each further one, and a random part of up to a half is taken off.
    pub backoff: Duration,
    /// The longest pause.
    pub max_backoff: Duration,
    /// How long a server may send nothing until the stream counts as lost. A driver may need long to find the next change.
    pub idle: Duration,
    /// How long it may take to connect.
    pub connect: Duration,
    /// Most ranges in one message; 0 leaves it to the driver.
    pub max_results: u32,
}

impl Default for Policy {
    /// Eight retries within a minute, and five minutes of silence.
    fn default() -> Self {
        Policy {
            retries: 8,
            backoff: Duration::from_millis(200),
            max_backoff: Duration::from_secs(30),
            idle: Duration::from_secs(300),
            connect: Duration::from_secs(10),
            max_results: 0,
        }
    }
}

impl Policy {
    pub(crate) fn max_results(&self) -> i32 {
        i32::try_from(self.max_results).unwrap_or(i32::MAX)
    }

    /// The pause before a retry, without chance: `failed` is how often it failed so far, from 1 on.
    pub(crate) fn pause(&self, failed: u32) -> Duration {
        let doubled = 2u32.saturating_pow(failed.saturating_sub(1));
        self.backoff.saturating_mul(doubled).min(self.max_backoff)
    }
}

/// A client of the SnapshotMetadata service, of a cluster or of one driver. Clones share what they know.
#[derive(Clone, Debug)]
pub struct Client {
    source: Arc<Source>,
    policy: Policy,
}

#[derive(Debug)]
enum Source {
    Csi(Socket),
    #[cfg(feature = "kubernetes")]
    Kubernetes(Box<Cluster>),
}

impl Client {
    /// A client of the CSI driver that listens on a socket, such as `unix:///run/csi/csi.sock`. Snapshots are named by
    /// their CSI handles. It connects when it is asked something.
    pub fn csi(endpoint: &str) -> Result<Self, Error> {
        Self::csi_with_secrets(endpoint, HashMap::new())
    }

    /// The same for a driver that wants secrets with each call.
    pub fn csi_with_secrets(endpoint: &str, secrets: HashMap<String, String>) -> Result<Self, Error> {
        let source = Source::Csi(Socket::new(endpoint, secrets)?);
        Ok(Client { source: Arc::new(source), policy: Policy::default() })
    }

    /// A client for the VolumeSnapshots of a namespace, which are called by their names. `kube::Client::try_default` makes
    /// the client of the Kubernetes API from the kubeconfig, or in a pod from its service account.
    ///
    /// That client has to be allowed to get `volumesnapshots` in the namespace, `volumesnapshotcontents` and
    /// `snapshotmetadataservices`, and where tokens are requested to create `serviceaccounts/token`.
    #[cfg(feature = "kubernetes")]
    pub fn kubernetes(client: kube::Client, namespace: &str, options: Options) -> Self {
        let source = Source::Kubernetes(Box::new(Cluster::new(client, namespace, options)));
        Client { source: Arc::new(source), policy: Policy::default() }
    }

    /// The same client with another policy.
    pub fn with_policy(mut self, policy: Policy) -> Self {
        self.policy = policy;
        self
    }

    /// The ranges of a snapshot that hold data. The first message of the answer is there when this returns.
    pub async fn allocated(&self, snapshot: &str) -> Result<Blocks, Error> {
        self.query(Query::Allocated { snapshot: snapshot.to_owned() }, 0).await
    }

    /// The ranges that differ between two snapshots of a volume: the older one by its CSI handle (see
    /// [`Client::snapshot_handle`]), the newer one as everywhere.
    pub async fn delta(&self, base_snapshot_id: &str, target: &str) -> Result<Blocks, Error> {
        let query = Query::Delta { base: base_snapshot_id.to_owned(), target: target.to_owned() };
        self.query(query, 0).await
    }

    /// An answer from an offset on, for a backup that goes on after it was interrupted. Nothing before `offset` is listed;
    /// a range that begins before it is cut there. At or past the capacity a server answers OUT_OF_RANGE.
    pub async fn query(&self, query: Query, offset: u64) -> Result<Blocks, Error> {
        let opener = Opener {
            source: self.source.clone(),
            #[cfg(feature = "kubernetes")]
            driver: None,
        };
        Blocks::open(opener, query, offset, self.policy.clone()).await
    }

    /// The CSI handle of a snapshot, to keep as the base of the next delta. On a driver's socket it is the name itself.
    pub async fn snapshot_handle(&self, snapshot: &str) -> Result<String, Error> {
        match &*self.source {
            Source::Csi(_) => Ok(snapshot.to_owned()),
            #[cfg(feature = "kubernetes")]
            Source::Kubernetes(cluster) => cluster.handle(snapshot).await,
        }
    }

    /// Whether the VolumeSnapshot of a base has to stay until the delta to this snapshot was asked for, which is so unless
    /// the SnapshotMetadataService of its driver says otherwise. A socket does not say it.
    #[cfg(feature = "kubernetes")]
    pub async fn needs_base_snapshot(&self, snapshot: &str) -> Result<bool, Error> {
        match &*self.source {
            Source::Csi(_) => Ok(true),
            Source::Kubernetes(cluster) => cluster.needs_base(snapshot).await,
        }
    }
}

/// Opens the parts of one answer.
#[derive(Debug)]
pub(crate) struct Opener {
    source: Arc<Source>,
    /// The driver of the snapshot, once it is known.
    #[cfg(feature = "kubernetes")]
    driver: Option<String>,
}

impl Opener {
    /// Asks for an answer from an offset on, over a connection of its own: a retry may find another server.
    pub async fn open(&mut self, query: &Query, offset: u64, policy: &Policy) -> Result<Messages, Error> {
        // Above it is no offset of the contract, and the answer is the same.
        let offset = i64::try_from(offset).unwrap_or(i64::MAX);
        match &*self.source {
            Source::Csi(socket) => socket.open(query, offset, policy).await,
            #[cfg(feature = "kubernetes")]
            Source::Kubernetes(cluster) => cluster.open(query, offset, &mut self.driver, policy).await,
        }
    }

    /// After the server did not accept who called: whether another try can bring something else.
    pub async fn renew(&self) -> bool {
        match &*self.source {
            Source::Csi(_) => false,
            #[cfg(feature = "kubernetes")]
            Source::Kubernetes(cluster) => {
                cluster.renew().await;
                true
            }
        }
    }
}

/// The messages of a part.
pub(crate) type Messages = Pin<Box<dyn Stream<Item = Result<Message, Status>> + Send>>;

pub(crate) fn messages<M>(answer: Response<Streaming<M>>) -> Messages
where
    M: Into<Message> + Send + 'static,
{
    Box::pin(answer.into_inner().map(|message| message.map(Into::into)))
}

/// The connections of this client.
pub(crate) fn configured(endpoint: Endpoint, policy: &Policy) -> Endpoint {
    endpoint
        .connect_timeout(policy.connect)
        .tcp_keepalive(Some(KEEPALIVE))
        .tcp_keepalive_interval(Some(KEEPALIVE))
        .initial_stream_window_size(WINDOW)
        .initial_connection_window_size(WINDOW)
}

macro_rules! message_from {
    ($($response:ty),*) => {$(
        impl From<$response> for Message {
            fn from(message: $response) -> Self {
                let tuples = message.block_metadata.into_iter();
                Message {
                    style: message.block_metadata_type,
                    capacity: message.volume_capacity_bytes,
                    tuples: tuples.map(|tuple| (tuple.byte_offset, tuple.size_bytes)).collect(),
                }
            }
        }
    )*};
}

message_from!(
    proto::GetMetadataAllocatedResponse,
    proto::GetMetadataDeltaResponse,
    proto::kubernetes::GetMetadataAllocatedResponse,
    proto::kubernetes::GetMetadataDeltaResponse
);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_double_up_to_the_longest() {
        let policy = Policy::default();
        let pauses: Vec<u128> = (1..=9).map(|failed| policy.pause(failed).as_millis()).collect();
        assert_eq!(pauses, [200, 400, 800, 1600, 3200, 6400, 12800, 25600, 30000]);
        assert_eq!(policy.pause(u32::MAX), policy.max_backoff);
    }
}
