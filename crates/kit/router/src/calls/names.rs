//! Names of objects in the whole cluster: held while an object of one is made, and looked for on all nodes.

use std::sync::Arc;

use base::DataDirKey;
use bytes::Bytes;
use futures_util::stream::{self, StreamExt};
use proto::node::{ChooseRequest, ChooseResponse, FindRequest, FindResponse, Kind};
use tokio::time::Instant;
use tonic::{Code, Status};

use super::{AT_ONCE, Router, answers, no_node};
use crate::node::Node;
use crate::placement;

/// Holds a name while an object of it is made.
pub(super) struct HeldName<'r> {
    router: &'r Router,
    name: (i32, String),
}

impl Drop for HeldName<'_> {
    fn drop(&mut self) {
        self.router.names.lock().remove(&self.name);
    }
}

/// Whether this answer is the last word of a node. Otherwise the node may still make the object, or have made it.
pub(super) fn is_answered(answer: &Result<Bytes, Status>) -> bool {
    answer.as_ref().err().is_none_or(|status| {
        !matches!(
            status.code(),
            Code::Unavailable | Code::DeadlineExceeded | Code::Cancelled | Code::Unknown | Code::Aborted
        )
    })
}

/// The node that was chosen for this name may still make the object.
pub(super) fn in_work(name: &str, node: &str) -> Status {
    Status::aborted(format!(
        "another call may still make {name:?} on node {node}: try again, or use another name"
    ))
}

pub(super) fn choice(kind: Kind, name: &str) -> ChooseRequest {
    ChooseRequest { name: name.to_owned(), kind: kind.into(), ..Default::default() }
}

impl Router {
    /// Which node makes the object of this name, as the arbiter of the name knows it, and the arbiter. `best` is proposed.
    pub(super) async fn choose(
        &self,
        request: ChooseRequest,
        best: DataDirKey,
        nodes: &[Arc<Node>],
        deadline: Option<Instant>,
    ) -> Result<(DataDirKey, Arc<Node>), Status> {
        let mut last = no_node();
        for arbiter in placement::arbiters(&request.name, nodes.iter().map(|node| node.key).collect()) {
            let Some(node) = nodes.iter().find(|node| node.key == arbiter) else { continue };
            let request = ChooseRequest { proposed_key: best.to_string(), ..request.clone() };
            let kind = request.kind();
            let answer = node.ask::<ChooseResponse>("/deltapath.node.v1.Node/Choose", &request, deadline);
            match node.while_up(answer).await {
                Ok(chosen) => {
                    // A driver of an earlier release has choices for volumes alone.
                    if kind != Kind::Volume && chosen.kind() != kind {
                        return Ok((best, node.clone()));
                    }
                    return match chosen.key.parse() {
                        Ok(key) if !request.excluded_keys.contains(&chosen.key) => Ok((key, node.clone())),
                        _ => Err(node.refused(&format!(
                            "chose the node {:?} for {:?}, which cannot be",
                            chosen.key, request.name
                        ))),
                    };
                }
                Err(status) if status.code() == Code::Unavailable => last = status,
                Err(status) => return Err(status),
            }
        }
        Err(last)
    }

    /// `key` makes nothing more of the name that it was chosen for: the choice ends.
    pub(super) async fn is_over(
        &self,
        choice: ChooseRequest,
        key: DataDirKey,
        nodes: &[Arc<Node>],
        deadline: Option<Instant>,
    ) {
        // Without it the choice ends by itself, later.
        let _ = self.choose(ChooseRequest { is_over: true, ..choice }, key, nodes, deadline).await;
    }

    /// Until what is returned is dropped, this router makes nothing else of this name.
    pub(super) fn hold(&self, kind: Kind, name: &str) -> Result<HeldName<'_>, Status> {
        let held = (kind.into(), name.to_owned());
        match self.names.lock().insert(held.clone()) {
            true => Ok(HeldName { router: self, name: held }),
            false => Err(Status::aborted(format!(
                "another call is in progress for the name {name:?}: try again when it is done"
            ))),
        }
    }

    /// The nodes that have an object of this name, and whether all nodes that are up could be asked. What the others hold
    /// cannot be used before they are back, and then they are asked again. Fails while a node makes an object of this name: it may
    /// be there next.
    pub(super) async fn find(
        &self,
        kind: Kind,
        name: &str,
        deadline: Option<Instant>,
    ) -> Result<(Vec<(Arc<Node>, FindResponse)>, bool), Status> {
        let ask = |node: Arc<Node>| async move {
            let found = Self::find_on(&node, kind, name, deadline).await;
            (node, found)
        };
        let answers: Vec<_> =
            stream::iter(self.nodes.up()).map(ask).buffer_unordered(AT_ONCE).collect().await;
        let is_busy =
            |found: &Result<_, Status>| found.as_ref().is_err_and(|status| status.code() == Code::Aborted);
        if let Some((node, _)) = answers.iter().find(|(_, found)| is_busy(found)) {
            return Err(in_work(name, &node.name));
        }
        let are_all = answers.iter().all(|(_, found)| found.is_ok());
        let found = answers.into_iter().filter_map(|(node, found)| Some((node, found.ok()??))).collect();
        Ok((found, are_all))
    }

    /// The object of this name on one node, if there is one. An error is that the node could not be asked.
    pub(super) async fn find_on(
        node: &Arc<Node>,
        kind: Kind,
        name: &str,
        deadline: Option<Instant>,
    ) -> Result<Option<FindResponse>, Status> {
        let request = FindRequest { kind: kind.into(), name: name.to_owned() };
        let answer = node.ask::<FindResponse>("/deltapath.node.v1.Node/Find", &request, deadline);
        let found = node.while_up(answer).await.inspect_err(|status| {
            tracing::debug!(node = node.name, reason = status.message(), "a node could not be asked");
        })?;
        let found = Some(found).filter(|found| !found.id.is_empty());
        found.map(|found| answers::is_of(node, &found.id).map(|()| found)).transpose()
    }
}
