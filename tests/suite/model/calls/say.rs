//! How calls are named in paths, failures and figures.

use std::fmt::{self, Debug, Display};

use super::{Call, MountPath, Name, Spot};

impl Display for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.0)
    }
}

impl Debug for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        Display::fmt(self, f)
    }
}

impl Display for MountPath {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            MountPath::Staging(Spot { name, number }) => write!(f, "{name}/staging-{number}"),
            MountPath::Target(Spot { name, number }) => write!(f, "{name}/target-{number}"),
            MountPath::Empty => write!(f, "\"\""),
        }
    }
}

impl Call {
    /// The RPC.
    pub fn method(&self) -> String {
        match self {
            Call::CreateVolume(_) => "CreateVolume".into(),
            Call::DeleteVolume(_) => "DeleteVolume".into(),
            Call::ControllerPublish { .. } => "ControllerPublishVolume".into(),
            Call::ControllerUnpublish { .. } => "ControllerUnpublishVolume".into(),
            Call::Validate { .. } => "ValidateVolumeCapabilities".into(),
            Call::ListVolumes(_) => "ListVolumes".into(),
            Call::GetVolume(_) => "ControllerGetVolume".into(),
            Call::ListHealth(_) => "ControllerListVolumeHealth".into(),
            Call::GetHealth(_) => "ControllerGetVolumeHealth".into(),
            Call::GetCapacity { .. } => "GetCapacity".into(),
            Call::Expand { .. } => "ControllerExpandVolume".into(),
            Call::Modify { .. } => "ControllerModifyVolume".into(),
            Call::CreateSnapshot { .. } => "CreateSnapshot".into(),
            Call::DeleteSnapshot(_) => "DeleteSnapshot".into(),
            Call::ListSnapshots { .. } => "ListSnapshots".into(),
            Call::GetSnapshot(_) => "GetSnapshot".into(),
            Call::CreateGroup { .. } => "CreateVolumeGroupSnapshot".into(),
            Call::DeleteGroup { .. } => "DeleteVolumeGroupSnapshot".into(),
            Call::GetGroup { .. } => "GetVolumeGroupSnapshot".into(),
            Call::Stage { .. } => "NodeStageVolume".into(),
            Call::Unstage { .. } => "NodeUnstageVolume".into(),
            Call::Publish { .. } | Call::PublishEphemeral { .. } => "NodePublishVolume".into(),
            Call::Unpublish { .. } | Call::UnpublishEphemeral { .. } => "NodeUnpublishVolume".into(),
            Call::Stats { .. } => "NodeGetVolumeStats".into(),
            Call::NodeHealth { .. } => "NodeGetVolumeHealth".into(),
            Call::NodeExpand { .. } => "NodeExpandVolume".into(),
            Call::Allocated { .. } => "GetMetadataAllocated".into(),
            Call::Delta { .. } => "GetMetadataDelta".into(),
            Call::Ask(question) => format!("{question:?}"),
        }
    }
}
