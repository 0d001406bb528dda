//! Names of objects in the whole cluster: held while an object of one is made, and looked for on all nodes.

use std::sync::{Arc, PoisonError};
use std::time::Instant;

use futures_util::stream::{self, StreamExt};
use proto::node::node_client::NodeClient;
use proto::node::{FindRequest, FindResponse, Kind};
use tonic::{Request, Status};

use super::{AT_ONCE, Router};
use crate::node::{Node, within};

/// Holds a name while an object of it is made.
pub(super) struct HeldName<'r> {
    router: &'r Router,
    name: (i32, String),
}

impl Drop for HeldName<'_> {
    fn drop(&mut self) {
        self.router.names.lock().unwrap_or_else(PoisonError::into_inner).remove(&self.name);
    }
}

impl Router {
    /// Until what is returned is dropped, this router makes nothing else of this name.
    pub(super) fn hold(&self, kind: Kind, name: &str) -> Result<HeldName<'_>, Status> {
        let held = (kind.into(), name.to_owned());
        match self.names.lock().unwrap_or_else(PoisonError::into_inner).insert(held.clone()) {
            true => Ok(HeldName { router: self, name: held }),
            false => Err(Status::aborted(format!(
                "another call is in progress for the name {name:?}: try again when it is done"
            ))),
        }
    }

    /// The nodes that have an object of this name, of those that answer.
    pub(super) async fn find(
        &self,
        kind: Kind,
        name: &str,
        deadline: Option<Instant>,
    ) -> Vec<(Arc<Node>, FindResponse)> {
        let ask = |node: Arc<Node>| async move {
            let found = Self::find_on(&node, kind, name, deadline).await?;
            Some((node, found))
        };
        let found = stream::iter(self.nodes.up()).map(ask).buffer_unordered(AT_ONCE);
        found.filter_map(std::future::ready).collect().await
    }

    /// The object of this name on one node.
    pub(super) async fn find_on(
        node: &Arc<Node>,
        kind: Kind,
        name: &str,
        deadline: Option<Instant>,
    ) -> Option<FindResponse> {
        let mut client = NodeClient::new(node.link().channel());
        let mut request = Request::new(FindRequest { kind: kind.into(), name: name.to_owned() });
        if let Some(deadline) = deadline {
            request.set_timeout(deadline.saturating_duration_since(Instant::now()));
        }
        let found =
            within(deadline, async { client.find(request).await.map_err(|status| node.status_of(status)) });
        match found.await {
            Ok(found) => Some(found.into_inner()).filter(|found| !found.id.is_empty()),
            // What it holds cannot be used before it is back, and then it is asked again.
            Err(status) => {
                tracing::debug!(node = node.name, reason = status.message(), "a node could not be asked");
                None
            }
        }
    }
}
