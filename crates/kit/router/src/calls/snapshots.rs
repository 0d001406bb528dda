//! Snapshots and groups of them: made where their source is, if their name is free on the other nodes; and their lists.

use std::sync::Arc;

use base::DataDirKey;
use bytes::Bytes;
use proto::node::Kind;
use tonic::Status;

use super::names::{choice, in_work, is_answered};
use super::{Router, Target, Work, decode, forgotten};
use crate::node::Node;
use crate::nodes::Lookup;

impl Router {
    pub(super) async fn create_snapshot(&self, work: &mut Work<'_>) -> Result<Bytes, Status> {
        let request: proto::CreateSnapshotRequest = decode(&work.message)?;
        work.record.about(&request.name);
        let target = self.target(&request.source_volume_id)?;
        self.create_by_name(Kind::Snapshot, &request.name, target, &request.source_volume_id, work).await
    }

    pub(super) async fn create_group(&self, work: &mut Work<'_>) -> Result<Bytes, Status> {
        let request: proto::CreateVolumeGroupSnapshotRequest = decode(&work.message)?;
        work.record.about(&request.name);
        let mut by_node: Vec<(DataDirKey, &str)> = request
            .source_volume_ids
            .iter()
            .filter_map(|id| Some((DataDirKey::of(id)?, id.as_str())))
            .collect();
        by_node.dedup_by_key(|(key, _)| *key);
        if let [(one, first), (_, second), ..] = by_node[..] {
            return Err(
                match (self.nodes.lookup(one), DataDirKey::of(second).map(|two| self.nodes.lookup(two))) {
                    (Lookup::Found(one), Some(Lookup::Found(two))) => Status::failed_precondition(format!(
                        "volume {first} is on node {} and volume {second} on node {}: the volumes of a group snapshot must \
                     be on one node",
                        one.name, two.name
                    )),
                    _ => Status::failed_precondition(format!(
                        "volumes {first} and {second} are on different nodes: the volumes of a group snapshot must be on \
                     one node"
                    )),
                },
            );
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
        let node = match target {
            // The node says what is wrong with it.
            Target::Node(node) if name.is_empty() => return work.ask(&node).await,
            Target::Any => return self.ask_any(work).await,
            Target::Node(node) => node,
            Target::Forgotten => return Err(forgotten(source)),
        };
        let _held = self.hold(kind, name)?;
        let nodes = self.nodes.up();
        let choice = choice(kind, name);
        let (chosen, arbiter) = self.choose(choice.clone(), node.key, &nodes, work.deadline).await?;
        let answer = self.create_if_free(kind, name, &node, chosen, work).await;
        if chosen == node.key && is_answered(&answer) {
            self.is_over(choice, node.key, &[arbiter], work.deadline).await;
        }
        answer
    }

    /// Makes a snapshot or a group on its node if this node is `chosen` for the name, and no other has an object of it. Names
    /// are looked for after the choice: a call that was chosen before and is done is found so.
    async fn create_if_free(
        &self,
        kind: Kind,
        name: &str,
        node: &Arc<Node>,
        chosen: DataDirKey,
        work: &mut Work<'_>,
    ) -> Result<Bytes, Status> {
        let (found, _) = self.find(kind, name, work.deadline).await?;
        // What it has may be of an earlier, same call, whatever has come to be of this name elsewhere since.
        if found.iter().any(|(found, _)| found.key == node.key) {
            return work.ask(node).await;
        }
        if let Some((other, found)) = found.first() {
            return Err(Status::already_exists(format!(
                "{name:?} already exists as {} on node {}: use another name, or the same request",
                found.id, other.name
            )));
        }
        if chosen != node.key {
            let node = match self.nodes.lookup(chosen) {
                Lookup::Found(other) => other.name.clone(),
                Lookup::Unavailable(_) | Lookup::Forgotten => chosen.to_string(),
            };
            return Err(in_work(name, &node));
        }
        work.ask(node).await
    }

    /// Lists of a volume's or for one snapshot are its node's; the others are of all nodes.
    pub(super) async fn list_snapshots(&self, work: &mut Work<'_>) -> Result<Bytes, Status> {
        let request: proto::ListSnapshotsRequest = decode(&work.message)?;
        let ids = [&request.snapshot_id, &request.source_volume_id];
        let Some(id) = ids.into_iter().find(|id| !id.is_empty()) else {
            // The spec has all snapshots of the storage system listed, so a part of them is not an answer.
            return self.list(work, false).await;
        };
        work.record.about(id);
        match self.target(id)? {
            Target::Node(node) => work.ask(&node).await,
            Target::Any => self.ask_any(work).await,
            Target::Forgotten => Ok(Bytes::new()),
        }
    }
}
