//! Requests to a driver, with the fields that the tests fill in.

use std::path::Path;

fn text(path: impl AsRef<Path>) -> String {
    path.as_ref().display().to_string()
}

pub fn publish(
    volume: impl Into<String>,
    staging: impl AsRef<Path>,
    target: impl AsRef<Path>,
    capability: proto::VolumeCapability,
) -> proto::NodePublishVolumeRequest {
    proto::NodePublishVolumeRequest {
        volume_id: volume.into(),
        staging_target_path: text(staging),
        target_path: text(target),
        volume_capability: Some(capability),
        ..Default::default()
    }
}

pub fn unpublish(volume: impl Into<String>, target: impl AsRef<Path>) -> proto::NodeUnpublishVolumeRequest {
    proto::NodeUnpublishVolumeRequest { volume_id: volume.into(), target_path: text(target) }
}

pub fn unstage(volume: impl Into<String>, staging: impl AsRef<Path>) -> proto::NodeUnstageVolumeRequest {
    proto::NodeUnstageVolumeRequest { volume_id: volume.into(), staging_target_path: text(staging) }
}

pub fn node_expand(volume: impl Into<String>, path: impl AsRef<Path>) -> proto::NodeExpandVolumeRequest {
    let (volume_id, volume_path) = (volume.into(), text(path));
    proto::NodeExpandVolumeRequest { volume_id, volume_path, ..Default::default() }
}

pub fn stats(volume: impl Into<String>, path: impl AsRef<Path>) -> proto::NodeGetVolumeStatsRequest {
    let (volume_id, volume_path) = (volume.into(), text(path));
    proto::NodeGetVolumeStatsRequest { volume_id, volume_path, ..Default::default() }
}

pub fn modify(volume: impl Into<String>, pairs: &[(&str, &str)]) -> proto::ControllerModifyVolumeRequest {
    let mutable_parameters = pairs.iter().map(|(name, value)| ((*name).into(), (*value).into())).collect();
    let volume_id = volume.into();
    proto::ControllerModifyVolumeRequest { volume_id, mutable_parameters, ..Default::default() }
}

/// Attaches a volume to a node as a device.
pub fn attach(volume: impl Into<String>, node: &str) -> proto::ControllerPublishVolumeRequest {
    proto::ControllerPublishVolumeRequest {
        volume_id: volume.into(),
        node_id: node.to_owned(),
        volume_capability: Some(csi_client::block_capability()),
        ..Default::default()
    }
}

/// Detaches a volume from a node; from all where it is empty.
pub fn detach(volume: impl Into<String>, node: &str) -> proto::ControllerUnpublishVolumeRequest {
    let (volume_id, node_id) = (volume.into(), node.to_owned());
    proto::ControllerUnpublishVolumeRequest { volume_id, node_id, ..Default::default() }
}

pub fn health(volume: impl Into<String>) -> proto::ControllerGetVolumeHealthRequest {
    proto::ControllerGetVolumeHealthRequest { volume_id: volume.into(), ..Default::default() }
}

pub fn snapshot(id: impl Into<String>) -> proto::GetSnapshotRequest {
    proto::GetSnapshotRequest { snapshot_id: id.into(), ..Default::default() }
}

pub fn validate(
    volume: impl Into<String>,
    volume_capabilities: Vec<proto::VolumeCapability>,
) -> proto::ValidateVolumeCapabilitiesRequest {
    let volume_id = volume.into();
    proto::ValidateVolumeCapabilitiesRequest { volume_id, volume_capabilities, ..Default::default() }
}
