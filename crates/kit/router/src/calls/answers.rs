//! What a node answers is about its own objects: each id in it holds the node's key. Another's would send later calls to
//! another node.

use base::DataDirKey;
use bytes::Bytes;
use prost::Message;
use tonic::Status;

use super::decode;
use super::methods::{Ids, Method, Route};
use crate::node::Node;
use crate::pages::{Asked, Page};
use crate::placement;

/// A message whose id is in field 2, as in Volume and Snapshot.
#[derive(Clone, PartialEq, Eq, Message)]
struct Object {
    #[prost(string, tag = "2")]
    id: String,
}

/// A message whose first field holds such an object.
#[derive(Clone, PartialEq, Eq, Message)]
struct Holder {
    #[prost(message, tag = "1")]
    object: Option<Object>,
}

/// The answer of this node cannot be.
pub(super) fn refused(node: &Node, what: &str) -> Status {
    tracing::error!(node = node.name, key = %node.key, address = &*node.address, what, "an answer is refused");
    Status::internal(format!(
        "node {} ({}) at {} {what}: its answer is refused",
        node.name, node.key, node.address
    ))
}

/// Fails if an id is not one of this node's.
pub(super) fn is_of(node: &Node, id: &str) -> Result<(), Status> {
    match DataDirKey::of(id) == Some(node.key) {
        true => Ok(()),
        false => Err(refused(node, &format!("answered with the id {id:?}, which is not one of its own"))),
    }
}

fn object(node: &Node, message: &[u8]) -> Result<(), Status> {
    let held = Holder::decode(message).ok().and_then(|held| held.object);
    is_of(node, &held.unwrap_or_default().id)
}

/// Fails if a page of a list does not lead on from `token`, or is about objects of other nodes.
pub(super) fn check_page(method: Method, node: &Node, token: &str, page: &Page) -> Result<(), Status> {
    let next = page.next_token.as_str();
    // Lists are in the order of ids, and a token is one: so every list has an end.
    if !next.is_empty()
        && (page.entries.is_empty() || DataDirKey::of(next) != Some(node.key) || next <= token)
    {
        return Err(refused(
            node,
            &format!("answered a list from {token:?} with the next token {next:?}, which does not lead on"),
        ));
    }
    for entry in &page.entries {
        match method.name() {
            "ControllerListVolumeHealth" => is_of(node, &decode::<Ids>(entry)?.first)?,
            _ => object(node, entry)?,
        }
    }
    Ok(())
}

/// Fails if an answer is not about objects of its node, or a volume in it is where it may not be.
pub(super) fn check(method: Method, node: &Node, request: &Bytes, answer: &Bytes) -> Result<(), Status> {
    let decoded = |_| refused(node, &format!("answered {} with no message of it", method.name()));
    match method.route {
        Route::CreateVolume => {
            let made = proto::CreateVolumeResponse::decode(answer.clone()).map_err(decoded)?;
            let volume = made.volume.unwrap_or_default();
            is_of(node, &volume.volume_id)?;
            let asked: proto::CreateVolumeRequest = decode(request)?;
            let requirement = asked.accessibility_requirements;
            let is_there = |topology: &proto::Topology| {
                let segments = topology.segments.clone().into_iter().collect();
                placement::is_allowed(&segments, requirement.as_ref())
            };
            let is_bound = requirement.as_ref().is_some_and(|requirement| !requirement.requisite.is_empty());
            match !is_bound || volume.accessible_topology.iter().any(is_there) {
                true => Ok(()),
                false => Err(refused(
                    node,
                    &format!(
                        "made volume {} where the requisite topologies do not allow it",
                        volume.volume_id
                    ),
                )),
            }
        }
        Route::CreateSnapshot => object(node, answer),
        Route::CreateGroup => {
            let made = proto::CreateVolumeGroupSnapshotResponse::decode(answer.clone()).map_err(decoded)?;
            let group = made.group_snapshot.unwrap_or_default();
            is_of(node, &group.group_snapshot_id)?;
            group.snapshots.iter().try_for_each(|snapshot| is_of(node, &snapshot.snapshot_id))
        }
        Route::List | Route::ListSnapshots => {
            let asked: Asked = decode(request)?;
            let page = Page::decode(answer.clone()).map_err(decoded)?;
            check_page(method, node, &asked.starting_token, &page)
        }
        _ => Ok(()),
    }
}
