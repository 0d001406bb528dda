//! The table of calls: which there are, and where each is sent.

use bytes::{Bytes, BytesMut};
use prost::encoding::{DecodeContext, decode_key, skip_field};
use prost::{DecodeError, Message};
use tonic::Status;

use super::not_a_message;

#[derive(Clone, Copy, Debug)]
pub struct Method {
    pub(super) path: &'static str,
    pub(super) route: Route,
    /// The number of the field of its request that holds secrets; 0 where it has none.
    secrets: u32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Route {
    /// To no node: the router knows.
    PluginInfo,
    Probe,
    /// To any node: all say the same.
    Any,
    /// To the node of the id in field 1. On a forgotten one the object does not exist.
    ById,
    /// The same, for calls that end well where there is nothing to undo.
    Undo,
    CreateVolume,
    CreateSnapshot,
    CreateGroup,
    /// To all nodes, in pages.
    List,
    ListSnapshots,
    GetCapacity,
    /// A stream, to the node of the snapshot in field 1.
    Allocated,
    /// A stream, to the node of the snapshot in field 2.
    Delta,
}

const METHODS: [Method; 26] = {
    const fn method(path: &'static str, route: Route, secrets: u32) -> Method {
        Method { path, route, secrets }
    }
    [
        method("/csi.v1.Identity/GetPluginInfo", Route::PluginInfo, 0),
        method("/csi.v1.Identity/GetPluginCapabilities", Route::Any, 0),
        method("/csi.v1.Identity/Probe", Route::Probe, 0),
        method("/csi.v1.Controller/CreateVolume", Route::CreateVolume, 5),
        method("/csi.v1.Controller/DeleteVolume", Route::Undo, 2),
        method("/csi.v1.Controller/ControllerPublishVolume", Route::ById, 5),
        method("/csi.v1.Controller/ControllerUnpublishVolume", Route::Undo, 3),
        method("/csi.v1.Controller/ValidateVolumeCapabilities", Route::ById, 5),
        method("/csi.v1.Controller/ListVolumes", Route::List, 0),
        method("/csi.v1.Controller/ControllerListVolumeHealth", Route::List, 3),
        method("/csi.v1.Controller/ControllerGetVolumeHealth", Route::ById, 2),
        method("/csi.v1.Controller/GetCapacity", Route::GetCapacity, 0),
        method("/csi.v1.Controller/ControllerGetCapabilities", Route::Any, 0),
        method("/csi.v1.Controller/CreateSnapshot", Route::CreateSnapshot, 3),
        method("/csi.v1.Controller/DeleteSnapshot", Route::Undo, 2),
        method("/csi.v1.Controller/ListSnapshots", Route::ListSnapshots, 5),
        method("/csi.v1.Controller/GetSnapshot", Route::ById, 2),
        method("/csi.v1.Controller/ControllerExpandVolume", Route::ById, 3),
        method("/csi.v1.Controller/ControllerGetVolume", Route::ById, 0),
        method("/csi.v1.Controller/ControllerModifyVolume", Route::ById, 2),
        method("/csi.v1.GroupController/GroupControllerGetCapabilities", Route::Any, 0),
        method("/csi.v1.GroupController/CreateVolumeGroupSnapshot", Route::CreateGroup, 3),
        method("/csi.v1.GroupController/DeleteVolumeGroupSnapshot", Route::Undo, 3),
        method("/csi.v1.GroupController/GetVolumeGroupSnapshot", Route::ById, 3),
        method("/csi.v1.SnapshotMetadata/GetMetadataAllocated", Route::Allocated, 4),
        method("/csi.v1.SnapshotMetadata/GetMetadataDelta", Route::Delta, 5),
    ]
};

impl Method {
    pub fn at(path: &str) -> Option<Self> {
        METHODS.into_iter().find(|method| method.path == path)
    }

    pub fn name(self) -> &'static str {
        self.path.rsplit('/').next().unwrap_or_default()
    }

    pub fn is_stream(self) -> bool {
        matches!(self.route, Route::Allocated | Route::Delta)
    }

    /// The request without its secrets, for nodes that do not hold the object that the call is about: the secrets may be
    /// another node's. All else stays as it is, also fields that this router does not know.
    pub(super) fn without_secrets(self, request: &Bytes) -> Result<Bytes, Status> {
        without(request, self.secrets).map_err(|_| not_a_message())
    }
}

/// A message without one of its fields, however often that is in it.
fn without(message: &Bytes, field: u32) -> Result<Bytes, DecodeError> {
    let mut kept = BytesMut::with_capacity(message.len());
    let mut rest = &message[..];
    while !rest.is_empty() {
        let before = rest;
        let (tag, wire_type) = decode_key(&mut rest)?;
        skip_field(wire_type, tag, &mut rest, DecodeContext::default())?;
        if tag != field {
            kept.extend_from_slice(&before[..before.len() - rest.len()]);
        }
    }
    Ok(kept.freeze())
}

/// The first fields of requests: an id each, in those that are routed by it.
#[derive(Clone, PartialEq, Eq, Message)]
pub(super) struct Ids {
    #[prost(string, tag = "1")]
    pub(super) first: String,
}

/// The first two, of GetMetadataDelta.
#[derive(Clone, PartialEq, Eq, Message)]
pub(super) struct TwoIds {
    #[prost(string, tag = "1")]
    pub(super) base: String,
    #[prost(string, tag = "2")]
    pub(super) target: String,
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn a_request_loses_its_secrets_and_nothing_else() {
        let method = Method::at("/csi.v1.Controller/ListSnapshots").expect("a call");
        let secrets =
            [("user".to_owned(), "root".to_owned()), ("token".to_owned(), "hunter2".to_owned())].into();
        let request = proto::ListSnapshotsRequest { max_entries: 300, secrets, ..Default::default() };
        let kept = proto::ListSnapshotsRequest { secrets: Default::default(), ..request.clone() };
        // A field that this contract does not have, of each length that there is, around the secrets.
        let unknown =
            [&[0x98_u8, 0x06, 0x01][..], &[0x9d, 0x06, 1, 2, 3, 4], &[0x9a, 0x06, 2, 0x2a, 0x00]].concat();
        let message = [&unknown[..], &request.encode_to_vec(), &unknown, &request.encode_to_vec()].concat();
        let expected = [&unknown[..], &kept.encode_to_vec(), &unknown, &kept.encode_to_vec()].concat();
        assert_eq!(method.without_secrets(&message.clone().into()).expect("a message"), expected);
        let cut: Bytes = message[..message.len() - 1].to_vec().into();
        assert_eq!(method.without_secrets(&cut).expect_err("cut").code(), tonic::Code::InvalidArgument);
        // One without secrets stays whole.
        let method = Method::at("/csi.v1.Controller/ListVolumes").expect("a call");
        assert_eq!(method.without_secrets(&expected.clone().into()).expect("a message"), expected);
    }

    /// The number of the field that holds secrets in this message of the contract; 0 where none does.
    fn secrets_of(contract: &str, message: &str) -> u32 {
        let begin = format!("message {message} {{");
        let lines = contract.lines().skip_while(|line| *line != begin).take_while(|line| *line != "}");
        let mut numbers = lines.filter_map(|line| {
            let number = line.trim().strip_prefix("map<string, string> secrets = ")?;
            number.split(' ').next()?.parse().ok()
        });
        numbers.next().unwrap_or(0)
    }

    /// Every call of CSI that is about the cluster has a way, and what is secret in it is known.
    #[test]
    fn all_calls_are_routed() {
        let contract = testkit::pages::read("proto/csi.proto");
        let mut found = 0;
        for (service, method) in testkit::pages::calls_of_csi() {
            let routed = Method::at(&format!("/csi.v1.{service}/{method}"));
            assert_eq!(routed.is_some(), service != "Node", "{service}/{method}");
            if let Some(routed) = routed {
                assert_eq!(routed.name(), method);
                assert_eq!(routed.is_stream(), service == "SnapshotMetadata");
                assert_eq!(routed.secrets, secrets_of(&contract, &format!("{method}Request")), "{method}");
                found += 1;
            }
        }
        assert!(found >= 24, "only {found} are found");
        let paths: BTreeSet<_> = METHODS.iter().map(|method| method.path).collect();
        assert_eq!(paths.len(), METHODS.len(), "a path stands there twice");
    }
}
