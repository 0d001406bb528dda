//! What a call asks, as far as faults have to know: its name, and of the two streams, at the driver's socket or a
//! gateway's address, all of it.

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

/// The request of a stream.
#[derive(Clone, Debug)]
pub(super) enum Stream {
    Allocated(GetMetadataAllocatedRequest),
    Delta(GetMetadataDeltaRequest),
    GatewayAllocated(kubernetes::GetMetadataAllocatedRequest),
    GatewayDelta(kubernetes::GetMetadataDeltaRequest),
}

impl Asked {
    /// Reads the request at `path`, such as `/csi.v1.Identity/Probe`.
    pub fn read(path: &str, body: &Bytes) -> Result<Self, Status> {
        let (service, call) = path.trim_start_matches('/').split_once('/').unwrap_or(("", path));
        let body = || body.clone();
        let stream = match (service, call) {
            ("csi.v1.SnapshotMetadata", "GetMetadataAllocated") => Some(Stream::Allocated(unframe(body())?)),
            ("csi.v1.SnapshotMetadata", "GetMetadataDelta") => Some(Stream::Delta(unframe(body())?)),
            ("snapshotmetadata.SnapshotMetadata", "GetMetadataAllocated") => {
                Some(Stream::GatewayAllocated(unframe(body())?))
            }
            ("snapshotmetadata.SnapshotMetadata", "GetMetadataDelta") => {
                Some(Stream::GatewayDelta(unframe(body())?))
            }
            _ => None,
        };
        let snapshot = match (service, call) {
            ("csi.v1.Controller", "DeleteSnapshot") => {
                Some(unframe::<DeleteSnapshotRequest>(body())?.snapshot_id)
            }
            ("csi.v1.Controller", "GetSnapshot") => Some(unframe::<GetSnapshotRequest>(body())?.snapshot_id),
            _ => None,
        };
        Ok(Asked { call: call.to_owned(), stream, snapshot })
    }

    /// The snapshots that it names.
    pub fn snapshots(&self) -> impl Iterator<Item = &str> {
        let stream = self.stream.as_ref();
        let of_stream = stream.into_iter().flat_map(|stream| [Some(stream.target()), stream.base()]);
        of_stream.flatten().chain(self.snapshot.as_deref())
    }
}

/// `each!(stream, request => value)`: the same of whichever request it is.
macro_rules! each {
    ($stream:expr, $request:ident => $value:expr) => {
        match $stream {
            Stream::Allocated($request) => $value,
            Stream::Delta($request) => $value,
            Stream::GatewayAllocated($request) => $value,
            Stream::GatewayDelta($request) => $value,
        }
    };
}

impl Stream {
    pub fn offset(&self) -> i64 {
        each!(self, request => request.starting_offset)
    }

    pub fn set_offset(&mut self, offset: i64) {
        each!(self, request => request.starting_offset = offset);
    }

    pub fn max_results(&self) -> i32 {
        each!(self, request => request.max_results)
    }

    pub fn set_max_results(&mut self, max_results: i32) {
        each!(self, request => request.max_results = max_results);
    }

    pub fn target(&self) -> &str {
        match self {
            Stream::Allocated(request) => &request.snapshot_id,
            Stream::Delta(request) => &request.target_snapshot_id,
            Stream::GatewayAllocated(request) => &request.snapshot_name,
            Stream::GatewayDelta(request) => &request.target_snapshot_name,
        }
    }

    /// Who asks, at a gateway's address.
    pub fn caller(&self) -> Option<Caller> {
        let (token, namespace) = match self {
            Stream::GatewayAllocated(request) => (&request.security_token, &request.namespace),
            Stream::GatewayDelta(request) => (&request.security_token, &request.namespace),
            Stream::Allocated(_) | Stream::Delta(_) => return None,
        };
        Some(Caller { token: token.clone(), namespace: namespace.clone() })
    }

    /// The same request by somebody else.
    pub fn by(mut self, caller: &Caller) -> Self {
        let Caller { token, namespace } = caller.clone();
        match &mut self {
            Stream::GatewayAllocated(request) => {
                (request.security_token, request.namespace) = (token, namespace);
            }
            Stream::GatewayDelta(request) => (request.security_token, request.namespace) = (token, namespace),
            Stream::Allocated(_) | Stream::Delta(_) => {}
        }
        self
    }

    /// The base of a delta.
    pub fn base(&self) -> Option<&str> {
        match self {
            Stream::Delta(request) => Some(&request.base_snapshot_id),
            Stream::GatewayDelta(request) => Some(&request.base_snapshot_id),
            Stream::Allocated(_) | Stream::GatewayAllocated(_) => None,
        }
    }

    /// Whether the same was asked.
    pub fn is(&self) -> String {
        each!(self, request => format!("{:?} {} {}", self.base(), self.target(), request.starting_offset))
    }

    /// The request as a body.
    pub fn body(&self) -> Bytes {
        each!(self, request => frame(request))
    }

    /// What the target of a delta holds: path and body of that request.
    pub fn allocated_of_target(&self) -> (&'static str, Bytes) {
        match self {
            Stream::Allocated(request) => {
                let request =
                    GetMetadataAllocatedRequest { starting_offset: 0, max_results: 0, ..request.clone() };
                ("/csi.v1.SnapshotMetadata/GetMetadataAllocated", frame(&request))
            }
            Stream::Delta(request) => {
                let request = GetMetadataAllocatedRequest {
                    snapshot_id: request.target_snapshot_id.clone(),
                    starting_offset: 0,
                    max_results: 0,
                    secrets: request.secrets.clone(),
                };
                ("/csi.v1.SnapshotMetadata/GetMetadataAllocated", frame(&request))
            }
            Stream::GatewayAllocated(request) => {
                let request = kubernetes::GetMetadataAllocatedRequest {
                    starting_offset: 0,
                    max_results: 0,
                    ..request.clone()
                };
                ("/snapshotmetadata.SnapshotMetadata/GetMetadataAllocated", frame(&request))
            }
            Stream::GatewayDelta(request) => {
                let request = kubernetes::GetMetadataAllocatedRequest {
                    security_token: request.security_token.clone(),
                    namespace: request.namespace.clone(),
                    snapshot_name: request.target_snapshot_name.clone(),
                    starting_offset: 0,
                    max_results: 0,
                };
                ("/snapshotmetadata.SnapshotMetadata/GetMetadataAllocated", frame(&request))
            }
        }
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
