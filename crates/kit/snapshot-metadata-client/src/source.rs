//! Where answers come from: a driver's socket, or a cluster.

use std::sync::Arc;

use crate::csi::Socket;
use crate::error::Error;
#[cfg(feature = "kubernetes")]
use crate::kubernetes::Cluster;
use crate::query::{Policy, Query};
use crate::transport::Messages;

#[derive(Debug)]
pub(crate) enum Source {
    Csi(Socket),
    #[cfg(feature = "kubernetes")]
    Kubernetes(Box<Cluster>),
}

/// Opens the parts of one answer.
#[derive(Debug)]
pub(crate) struct Opener {
    pub source: Arc<Source>,
    /// The driver of the snapshot, once it is known.
    #[cfg(feature = "kubernetes")]
    pub driver: Option<String>,
}

impl Opener {
    /// Asks for an answer from an offset on, over a connection of its own: a retry may find another server.
    pub async fn open(&mut self, query: &Query, offset: u64, policy: &Policy) -> Result<Messages, Error> {
        // The contract has no larger offset, and the answer is the same.
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
