//! What a node answers is about its own objects: each id in it holds the node's key. Another's would send later calls to
//! another node.

use std::collections::BTreeSet;

use base::DataDirKey;
use bytes::Bytes;
use prost::Message;
use tonic::Status;

use super::decode;
use super::methods::{Ids, Method};
use crate::node::Node;
use crate::pages::{Asked, MAX_PAGE, Page};
use crate::placement;

/// Volume and Snapshot as far as both are alike: the id is field 2.
#[derive(Clone, PartialEq, Eq, Message)]
struct Object {
    #[prost(string, tag = "2")]
    id: String,
}

type SnapshotEntry = proto::list_snapshots_response::Entry;

/// A message whose first field holds such an object.
#[derive(Clone, PartialEq, Eq, Message)]
struct Holder {
    #[prost(message, tag = "1")]
    object: Option<Object>,
}

pub(super) fn answered<M: Message + Default>(
    method: Method,
    node: &Node,
    answer: &Bytes,
) -> Result<M, Status> {
    let refused = |_| node.refused(&format!("answered {} with no message of it", method.name()));
    M::decode(answer.clone()).map_err(refused)
}

/// Fails with what the node did wrong, unless its answer is right.
fn check_that(node: &Node, is_right: bool, wrong: impl FnOnce() -> String) -> Result<(), Status> {
    if is_right { Ok(()) } else { Err(node.refused(&wrong())) }
}

/// Fails if an id is not one of this node's.
pub(super) fn is_of(node: &Node, id: &str) -> Result<(), Status> {
    let is_own = DataDirKey::of(id) == Some(node.key);
    check_that(node, is_own, || format!("answered with the id {id:?}, which is not one of its own"))
}

/// Fails if the answer is about another object than the one that was asked for.
fn is_asked_for(node: &Node, id: &str, asked: &str) -> Result<(), Status> {
    check_that(node, id == asked, || format!("was asked for {asked:?}, and answered with {id:?}"))
}

/// Fails if a volume cannot have this capacity after a request for that one.
fn is_capacity(node: &Node, bytes: i64, asked: Option<proto::CapacityRange>) -> Result<(), Status> {
    let proto::CapacityRange { required_bytes: least, limit_bytes: most } = asked.unwrap_or_default();
    check_that(node, bytes >= least.max(1) && (most <= 0 || bytes <= most), || {
        format!(
            "answered with a volume of {bytes} bytes, where at least {least} and at most {most} (0: any) were asked for"
        )
    })
}

/// Fails if a snapshot, or its volume, is not this node's.
fn snapshot_is_of(node: &Node, snapshot: &proto::Snapshot) -> Result<(), Status> {
    is_of(node, &snapshot.snapshot_id)?;
    is_of(node, &snapshot.source_volume_id)
}

/// Fails if a page of a list does not lead on from where `asked` begins, has more entries than that, or is about objects of other
/// nodes.
pub(super) fn check_page(method: Method, node: &Node, asked: &Asked, page: &Page) -> Result<(), Status> {
    let (next, token) = (page.next_token.as_str(), asked.starting_token.as_str());
    // Lists are in the order of ids, and a token is one: so every list has an end.
    let leads_on = !page.entries.is_empty() && DataDirKey::of(next) == Some(node.key) && next > token;
    check_that(node, next.is_empty() || leads_on, || {
        format!("answered a list from {token:?} with the next token {next:?}, which does not lead on")
    })?;
    let most = usize::try_from(asked.max_entries).ok().filter(|most| *most > 0).unwrap_or(MAX_PAGE);
    let entries = page.entries.len();
    check_that(node, entries <= most, || {
        format!("answered with {entries} entries, where at most {most} fit")
    })?;
    for entry in &page.entries {
        match method.name() {
            "ControllerListVolumeHealth" => is_of(node, &answered::<Ids>(method, node, entry)?.first)?,
            "ListSnapshots" => snapshot_is_of(
                node,
                &answered::<SnapshotEntry>(method, node, entry)?.snapshot.unwrap_or_default(),
            )?,
            _ => is_of(node, &answered::<Holder>(method, node, entry)?.object.unwrap_or_default().id)?,
        }
    }
    Ok(())
}

/// Fails if an answer is not about the object that was asked for, or not about objects of its node, or if a volume in it is where
/// or as large as it may not be.
pub(super) fn check(method: Method, node: &Node, request: &Bytes, answer: &Bytes) -> Result<(), Status> {
    match method.name() {
        "CreateVolume" => {
            let volume =
                answered::<proto::CreateVolumeResponse>(method, node, answer)?.volume.unwrap_or_default();
            is_of(node, &volume.volume_id)?;
            let asked: proto::CreateVolumeRequest = decode(request)?;
            // 0: the spec has it unknown.
            if volume.capacity_bytes != 0 {
                is_capacity(node, volume.capacity_bytes, asked.capacity_range)?;
            }
            let requirement = asked.accessibility_requirements;
            let is_there = |topology: &proto::Topology| {
                let segments = topology.segments.clone().into_iter().collect();
                placement::is_allowed(&segments, requirement.as_ref())
            };
            let is_bound = requirement.as_ref().is_some_and(|requirement| !requirement.requisite.is_empty());
            check_that(node, !is_bound || volume.accessible_topology.iter().any(is_there), || {
                format!("made volume {} where the requisite topologies do not allow it", volume.volume_id)
            })
        }
        "ControllerExpandVolume" => {
            let asked: proto::ControllerExpandVolumeRequest = decode(request)?;
            let expanded = answered::<proto::ControllerExpandVolumeResponse>(method, node, answer)?;
            is_capacity(node, expanded.capacity_bytes, asked.capacity_range)
        }
        "ControllerGetVolume" | "GetSnapshot" => {
            let id = answered::<Holder>(method, node, answer)?.object.unwrap_or_default().id;
            is_asked_for(node, &id, &decode::<Ids>(request)?.first)
        }
        "ControllerGetVolumeHealth" => {
            let health = answered::<proto::ControllerGetVolumeHealthResponse>(method, node, answer)?;
            let id = health.volume_health.unwrap_or_default().volume_id;
            is_asked_for(node, &id, &decode::<Ids>(request)?.first)
        }
        "CreateSnapshot" => {
            let asked: proto::CreateSnapshotRequest = decode(request)?;
            let made = answered::<proto::CreateSnapshotResponse>(method, node, answer)?;
            let snapshot = made.snapshot.unwrap_or_default();
            is_of(node, &snapshot.snapshot_id)?;
            is_asked_for(node, &snapshot.source_volume_id, &asked.source_volume_id)
        }
        "CreateVolumeGroupSnapshot" => {
            let made = answered::<proto::CreateVolumeGroupSnapshotResponse>(method, node, answer)?;
            let group = made.group_snapshot.unwrap_or_default();
            is_of(node, &group.group_snapshot_id)?;
            group.snapshots.iter().try_for_each(|snapshot| snapshot_is_of(node, snapshot))?;
            let asked: proto::CreateVolumeGroupSnapshotRequest = decode(request)?;
            let asked: BTreeSet<&String> = asked.source_volume_ids.iter().collect();
            let sources = || group.snapshots.iter().map(|snapshot| &snapshot.source_volume_id);
            let is_right =
                group.snapshots.len() == asked.len() && sources().collect::<BTreeSet<_>>() == asked;
            check_that(node, is_right, || {
                let sources: Vec<_> = sources().collect();
                format!(
                    "was asked for a group of snapshots of {asked:?}, and answered with those of {sources:?}"
                )
            })
        }
        "GetVolumeGroupSnapshot" => {
            let found = answered::<proto::GetVolumeGroupSnapshotResponse>(method, node, answer)?;
            let group = found.group_snapshot.unwrap_or_default();
            is_asked_for(node, &group.group_snapshot_id, &decode::<Ids>(request)?.first)?;
            group.snapshots.iter().try_for_each(|snapshot| snapshot_is_of(node, snapshot))
        }
        "GetCapacity" => {
            let room = answered::<proto::GetCapacityResponse>(method, node, answer)?;
            let sizes = [Some(room.available_capacity), room.maximum_volume_size, room.minimum_volume_size];
            let least = sizes.into_iter().flatten().min().unwrap_or_default();
            check_that(node, least >= 0, || format!("has a capacity of {least} bytes"))
        }
        "ListSnapshots" => {
            check_page(method, node, &decode(request)?, &answered(method, node, answer)?)?;
            let asked: proto::ListSnapshotsRequest = decode(request)?;
            let listed = answered::<proto::ListSnapshotsResponse>(method, node, answer)?;
            for snapshot in listed.entries.into_iter().filter_map(|entry| entry.snapshot) {
                for (id, asked) in [
                    (&snapshot.snapshot_id, &asked.snapshot_id),
                    (&snapshot.source_volume_id, &asked.source_volume_id),
                ] {
                    if !asked.is_empty() {
                        is_asked_for(node, id, asked)?;
                    }
                }
            }
            Ok(())
        }
        "ListVolumes" | "ControllerListVolumeHealth" => {
            check_page(method, node, &decode(request)?, &answered(method, node, answer)?)
        }
        _ => Ok(()),
    }
}
