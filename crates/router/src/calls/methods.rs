//! The table of calls: which there are, and where each goes.

use prost::Message;

/// A call of CSI that is routed.
#[derive(Clone, Copy, Debug)]
pub struct Method {
    pub(super) path: &'static str,
    pub(super) route: Route,
}

/// Where a call goes.
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

/// All of them.
const METHODS: [Method; 26] = {
    const fn method(path: &'static str, route: Route) -> Method {
        Method { path, route }
    }
    [
        method("/csi.v1.Identity/GetPluginInfo", Route::PluginInfo),
        method("/csi.v1.Identity/GetPluginCapabilities", Route::Any),
        method("/csi.v1.Identity/Probe", Route::Probe),
        method("/csi.v1.Controller/CreateVolume", Route::CreateVolume),
        method("/csi.v1.Controller/DeleteVolume", Route::Undo),
        method("/csi.v1.Controller/ControllerPublishVolume", Route::ById),
        method("/csi.v1.Controller/ControllerUnpublishVolume", Route::Undo),
        method("/csi.v1.Controller/ValidateVolumeCapabilities", Route::ById),
        method("/csi.v1.Controller/ListVolumes", Route::List),
        method("/csi.v1.Controller/ControllerListVolumeHealth", Route::List),
        method("/csi.v1.Controller/ControllerGetVolumeHealth", Route::ById),
        method("/csi.v1.Controller/GetCapacity", Route::GetCapacity),
        method("/csi.v1.Controller/ControllerGetCapabilities", Route::Any),
        method("/csi.v1.Controller/CreateSnapshot", Route::CreateSnapshot),
        method("/csi.v1.Controller/DeleteSnapshot", Route::Undo),
        method("/csi.v1.Controller/ListSnapshots", Route::ListSnapshots),
        method("/csi.v1.Controller/GetSnapshot", Route::ById),
        method("/csi.v1.Controller/ControllerExpandVolume", Route::ById),
        method("/csi.v1.Controller/ControllerGetVolume", Route::ById),
        method("/csi.v1.Controller/ControllerModifyVolume", Route::ById),
        method("/csi.v1.GroupController/GroupControllerGetCapabilities", Route::Any),
        method("/csi.v1.GroupController/CreateVolumeGroupSnapshot", Route::CreateGroup),
        method("/csi.v1.GroupController/DeleteVolumeGroupSnapshot", Route::Undo),
        method("/csi.v1.GroupController/GetVolumeGroupSnapshot", Route::ById),
        method("/csi.v1.SnapshotMetadata/GetMetadataAllocated", Route::Allocated),
        method("/csi.v1.SnapshotMetadata/GetMetadataDelta", Route::Delta),
    ]
};

impl Method {
    /// The call with this path.
    pub fn at(path: &str) -> Option<Self> {
        METHODS.into_iter().find(|method| method.path == path)
    }

    /// Its name in the contract.
    pub fn name(self) -> &'static str {
        self.path.rsplit('/').next().unwrap_or_default()
    }

    /// Whether its answer is a stream.
    pub fn is_stream(self) -> bool {
        matches!(self.route, Route::Allocated | Route::Delta)
    }
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

    /// Every call of CSI that is about the cluster has a way.
    #[test]
    fn all_calls_are_routed() {
        let contract = include_str!("../../../proto/proto/csi.proto");
        let mut service = "";
        let mut found = 0;
        for line in contract.lines() {
            let line = line.trim();
            if let Some(name) = line.strip_prefix("service ") {
                service = name.trim_end_matches('{').trim();
            }
            let Some(method) = line.strip_prefix("rpc ").and_then(|rest| rest.split(['(', ' ']).next())
            else {
                continue;
            };
            let routed = Method::at(&format!("/csi.v1.{service}/{method}"));
            assert_eq!(routed.is_some(), service != "Node", "{service}/{method}");
            if let Some(routed) = routed {
                assert_eq!(routed.name(), method);
                assert_eq!(routed.is_stream(), service == "SnapshotMetadata");
                found += 1;
            }
        }
        assert!(found >= 24, "only {found} are found");
        let paths: BTreeSet<_> = METHODS.iter().map(|method| method.path).collect();
        assert_eq!(paths.len(), METHODS.len(), "a path stands there twice");
    }
}
