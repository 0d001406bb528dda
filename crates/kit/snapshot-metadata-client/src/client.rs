//! The client: it knows where answers come from, and how long it tries.

use std::collections::HashMap;
use std::sync::Arc;

use crate::blocks::Blocks;
use crate::csi::Socket;
use crate::error::Error;
#[cfg(feature = "kubernetes")]
use crate::kubernetes::{Cluster, Options};
use crate::query::{Policy, Query};
use crate::source::{Opener, Source};

/// A client of the SnapshotMetadata service, of a cluster or of one driver. Clones share what they know.
#[derive(Clone, Debug)]
pub struct Client {
    source: Arc<Source>,
    policy: Policy,
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

    /// An answer from an offset on, for a backup that continues after it was interrupted. Nothing before `offset` is listed;
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
