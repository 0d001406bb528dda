//! What a call asks, as far as faults have to know: its name, and of the two streams, at the driver's socket or a
//! gateway's address, all of it.

use std::collections::HashMap;

use bytes::Bytes;
use prost::Message;
use proto::{kubernetes, *};
use serve::relay::{frame, unframe};
use tonic::Status;

use super::caller::Caller;

/// A call.
#[derive(Clone, Debug)]
pub(super) struct Asked {
    /// The name of the call, without its service.
    pub call: String,
    /// One of the two streams.
    pub stream: Option<Stream>,
    /// The snapshot that another call is about.
    pub snapshot: Option<String>,
}

/// The request of a stream: of a delta, or of what the target holds where there is no base.
#[derive(Clone, Debug)]
pub(crate) struct Stream {
    pub base: Option<String>,
    pub target: String,
    pub offset: i64,
    pub max_results: i32,
    /// Who asks, at a gateway's address.
    pub caller: Option<Caller>,
    pub(super) secrets: HashMap<String, String>,
}

impl Asked {
    /// Reads the request at `path`, such as `/csi.v1.Identity/Probe`.
    pub fn read(path: &str, body: &Bytes) -> Result<Self, Status> {
        let (_, call) = path.trim_start_matches('/').split_once('/').unwrap_or(("", path));
        let snapshot = match path {
            "/csi.v1.Controller/DeleteSnapshot" => {
                Some(unframe::<DeleteSnapshotRequest>(body.clone())?.snapshot_id)
            }
            "/csi.v1.Controller/GetSnapshot" => {
                Some(unframe::<GetSnapshotRequest>(body.clone())?.snapshot_id)
            }
            _ => None,
        };
        Ok(Asked { call: call.to_owned(), stream: Stream::read(path, body)?, snapshot })
    }

    pub fn snapshots(&self) -> impl Iterator<Item = &str> {
        let stream = self.stream.as_ref();
        let of_stream = stream.into_iter().flat_map(|stream| [Some(&stream.target), stream.base.as_ref()]);
        of_stream.flatten().chain(&self.snapshot).map(String::as_str)
    }
}

/// Paths of the streams of a driver and of a gateway, of which both have these two calls.
const OF_DRIVER: &str = "/csi.v1.SnapshotMetadata/";
const OF_GATEWAY: &str = "/snapshotmetadata.SnapshotMetadata/";
const ALLOCATED: &str = "GetMetadataAllocated";
const DELTA: &str = "GetMetadataDelta";

impl Stream {
    /// Reads the request at `path`; none of another call.
    pub fn read(path: &str, body: &Bytes) -> Result<Option<Self>, Status> {
        let body = body.clone();
        Ok(match (path.strip_prefix(OF_DRIVER), path.strip_prefix(OF_GATEWAY)) {
            (Some(ALLOCATED), _) => {
                let request: GetMetadataAllocatedRequest = unframe(body)?;
                let GetMetadataAllocatedRequest { snapshot_id: target, starting_offset: offset, .. } =
                    request;
                let (max_results, secrets) = (request.max_results, request.secrets);
                Some(Stream { base: None, target, offset, max_results, caller: None, secrets })
            }
            (Some(DELTA), _) => {
                let request: GetMetadataDeltaRequest = unframe(body)?;
                let (base, target) = (Some(request.base_snapshot_id), request.target_snapshot_id);
                let (offset, max_results) = (request.starting_offset, request.max_results);
                Some(Stream { base, target, offset, max_results, caller: None, secrets: request.secrets })
            }
            (_, Some(ALLOCATED)) => {
                let request: kubernetes::GetMetadataAllocatedRequest = unframe(body)?;
                let caller = Caller { token: request.security_token, namespace: request.namespace };
                Some(Stream {
                    base: None,
                    target: request.snapshot_name,
                    offset: request.starting_offset,
                    max_results: request.max_results,
                    caller: Some(caller),
                    secrets: HashMap::new(),
                })
            }
            (_, Some(DELTA)) => {
                let request: kubernetes::GetMetadataDeltaRequest = unframe(body)?;
                let caller = Caller { token: request.security_token, namespace: request.namespace };
                Some(Stream {
                    base: Some(request.base_snapshot_id),
                    target: request.target_snapshot_name,
                    offset: request.starting_offset,
                    max_results: request.max_results,
                    caller: Some(caller),
                    secrets: HashMap::new(),
                })
            }
            _ => None,
        })
    }

    /// Whether the same was asked.
    pub fn is(&self) -> String {
        format!("{:?} {} {}", self.base, self.target, self.offset)
    }

    pub fn body(&self) -> Bytes {
        let Stream { base, target, offset: starting_offset, max_results, caller, secrets } = self.clone();
        match (caller, base) {
            (None, None) => {
                let snapshot_id = target;
                frame(&GetMetadataAllocatedRequest { snapshot_id, starting_offset, max_results, secrets })
            }
            (None, Some(base_snapshot_id)) => frame(&GetMetadataDeltaRequest {
                base_snapshot_id,
                target_snapshot_id: target,
                starting_offset,
                max_results,
                secrets,
            }),
            (Some(Caller { token: security_token, namespace }), None) => {
                frame(&kubernetes::GetMetadataAllocatedRequest {
                    security_token,
                    namespace,
                    snapshot_name: target,
                    starting_offset,
                    max_results,
                })
            }
            (Some(Caller { token: security_token, namespace }), Some(base_snapshot_id)) => {
                frame(&kubernetes::GetMetadataDeltaRequest {
                    security_token,
                    namespace,
                    base_snapshot_id,
                    target_snapshot_name: target,
                    starting_offset,
                    max_results,
                })
            }
        }
    }

    /// What the target holds: path and body of that request.
    pub fn allocated_of_target(&self) -> (String, Bytes) {
        let service = if self.caller.is_some() { OF_GATEWAY } else { OF_DRIVER };
        let request = Stream { base: None, offset: 0, max_results: 0, ..self.clone() };
        (format!("{service}{ALLOCATED}"), request.body())
    }
}

/// Whether a call may have secrets and none of them has that value.
pub(super) fn lacks_secret(path: &str, body: &Bytes, value: &str) -> Result<bool, Status> {
    macro_rules! secrets {
        ($($call:literal: $request:ty,)*) => {
            match path {
                $(concat!("/csi.v1.", $call) => unframe::<$request>(body.clone())?.secrets,)*
                _ => return Ok(false),
            }
        };
    }
    let secrets = secrets! {
        "Controller/CreateVolume": CreateVolumeRequest,
        "Controller/DeleteVolume": DeleteVolumeRequest,
        "Controller/CreateSnapshot": CreateSnapshotRequest,
        "Controller/DeleteSnapshot": DeleteSnapshotRequest,
        "Controller/ControllerExpandVolume": ControllerExpandVolumeRequest,
        "Controller/ControllerModifyVolume": ControllerModifyVolumeRequest,
        "GroupController/CreateVolumeGroupSnapshot": CreateVolumeGroupSnapshotRequest,
        "GroupController/DeleteVolumeGroupSnapshot": DeleteVolumeGroupSnapshotRequest,
        "Node/NodeStageVolume": NodeStageVolumeRequest,
        "Node/NodePublishVolume": NodePublishVolumeRequest,
        "SnapshotMetadata/GetMetadataAllocated": GetMetadataAllocatedRequest,
        "SnapshotMetadata/GetMetadataDelta": GetMetadataDeltaRequest,
    };
    Ok(!secrets.values().any(|given| given == value))
}

/// A message that is read from a body, changed and put back.
pub(super) fn changed<M: Message + Default>(
    body: &Bytes,
    change: impl FnOnce(&mut M),
) -> Result<Bytes, Status> {
    let mut message: M = unframe(body.clone())?;
    change(&mut message);
    Ok(frame(&message))
}
