//! How a volume becomes a device on this node, and stops being one.

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use tonic::Code;

use super::ledger::{Attachment, What};
use super::plugin::{Plugin, Volume, call};
use super::verdict::Wrong;
use csi_client::stage_of;

impl Plugin {
    /// Attaches, stages and publishes a volume, as far as the driver claims these, and returns the
    /// target: a device node, or a directory.
    pub async fn attach(&self, volume: &Volume) -> Result<PathBuf, Wrong> {
        let place = format!("{}-{}", self.run, self.ledger.next());
        let staging = self.settings.staging_dir.join(&place);
        let parent = self.settings.target_dir.join(&place);
        let target = parent.join("volume");
        let attachment =
            Attachment { volume_id: volume.id.clone(), staging: staging.clone(), target: target.clone() };
        self.ledger.push(What::Attachment(attachment));
        for dir in [&parent, &staging] {
            std::fs::create_dir_all(dir)
                .map_err(|error| Wrong::new(format!("make {}: {error}", dir.display())))?;
        }
        let publish_context = self.controller_publish(volume).await?;
        let staging_target_path = self.staging(&staging);
        if self.claims.stage {
            let request = proto::NodeStageVolumeRequest {
                publish_context: publish_context.clone(),
                secrets: self.secrets("NodeStageVolume"),
                volume_context: volume.context.clone(),
                ..stage_of(&volume.id, &staging, volume.capability.clone())
            };
            call!(self, node.node_stage_volume, "NodeStageVolume", request)?;
        }
        let request = proto::NodePublishVolumeRequest {
            volume_id: volume.id.clone(),
            publish_context,
            staging_target_path,
            target_path: text(&target),
            volume_capability: Some(volume.capability.clone()),
            readonly: false,
            secrets: self.secrets("NodePublishVolume"),
            volume_context: volume.context.clone(),
        };
        call!(self, node.node_publish_volume, "NodePublishVolume", request)?;
        Ok(target)
    }

    async fn controller_publish(&self, volume: &Volume) -> Result<HashMap<String, String>, Wrong> {
        if !self.claims.attach {
            return Ok(HashMap::new());
        }
        let request = proto::ControllerPublishVolumeRequest {
            volume_id: volume.id.clone(),
            node_id: self.claims.node_id.clone(),
            volume_capability: Some(volume.capability.clone()),
            readonly: false,
            secrets: self.secrets("ControllerPublishVolume"),
            volume_context: volume.context.clone(),
        };
        let answer = call!(self, controller.controller_publish_volume, "ControllerPublishVolume", request)?;
        Ok(answer.publish_context)
    }

    /// The staging path, for a driver that stages.
    fn staging(&self, staging: &Path) -> String {
        if self.claims.stage { text(staging) } else { String::new() }
    }

    /// Undoes [`Plugin::attach`], also where it was cut short, and removes its directories.
    pub async fn detach(&self, volume_id: &str) -> Result<(), Wrong> {
        let Some(attachment) = self.ledger.attachment(volume_id) else { return Ok(()) };
        let Attachment { staging, target, .. } = attachment;
        let request =
            proto::NodeUnpublishVolumeRequest { volume_id: volume_id.to_owned(), target_path: text(&target) };
        gone(call!(self, node.node_unpublish_volume, "NodeUnpublishVolume", request))?;
        if self.claims.stage {
            let request = proto::NodeUnstageVolumeRequest {
                volume_id: volume_id.to_owned(),
                staging_target_path: text(&staging),
            };
            gone(call!(self, node.node_unstage_volume, "NodeUnstageVolume", request))?;
        }
        if self.claims.attach {
            let request = proto::ControllerUnpublishVolumeRequest {
                volume_id: volume_id.to_owned(),
                node_id: self.claims.node_id.clone(),
                secrets: self.secrets("ControllerUnpublishVolume"),
            };
            gone(call!(self, controller.controller_unpublish_volume, "ControllerUnpublishVolume", request))?;
        }
        let left = remove_place(&staging, &target);
        self.ledger.forget(|made| matches!(&made.what, What::Attachment(at) if at.volume_id == volume_id));
        match left.first() {
            None => Ok(()),
            Some(left) => Err(Wrong::new(format!("after NodeUnpublishVolume: {left}"))),
        }
    }

    /// ControllerExpandVolume to at least `bytes`: the capacity, and whether the node has its part.
    pub async fn expand(&self, volume: &Volume, bytes: u64) -> Result<(i64, bool), Wrong> {
        let request = proto::ControllerExpandVolumeRequest {
            volume_id: volume.id.clone(),
            capacity_range: Some(proto::CapacityRange { required_bytes: bytes as i64, limit_bytes: 0 }),
            secrets: self.secrets("ControllerExpandVolume"),
            volume_capability: Some(volume.capability.clone()),
        };
        let answer = call!(self, controller.controller_expand_volume, "ControllerExpandVolume", request)?;
        Ok((answer.capacity_bytes, answer.node_expansion_required && self.claims.node_expand))
    }

    /// NodeExpandVolume of a published volume.
    pub async fn expand_node(&self, volume: &Volume, bytes: u64) -> Result<(), Wrong> {
        let Some(attachment) = self.ledger.attachment(&volume.id) else { return Ok(()) };
        let request = proto::NodeExpandVolumeRequest {
            volume_id: volume.id.clone(),
            volume_path: text(&attachment.target),
            capacity_range: Some(proto::CapacityRange { required_bytes: bytes as i64, limit_bytes: 0 }),
            staging_target_path: self.staging(&attachment.staging),
            volume_capability: Some(volume.capability.clone()),
            secrets: self.secrets("NodeExpandVolume"),
        };
        call!(self, node.node_expand_volume, "NodeExpandVolume", request)?;
        Ok(())
    }
}

/// An undoing call: what is not there is undone.
fn gone<T>(answer: Result<T, Wrong>) -> Result<(), Wrong> {
    match answer {
        Err(wrong) if wrong.code() != Some(Code::NotFound) => Err(wrong),
        _ => Ok(()),
    }
}

/// Removes the directories of an attachment. The target itself is the driver's to remove.
pub(crate) fn remove_place(staging: &Path, target: &Path) -> Vec<String> {
    let parent = target.parent().unwrap_or(target);
    let failed = |dir: &Path| match std::fs::remove_dir(dir) {
        Ok(()) => None,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => None,
        Err(error) => Some(format!("{} cannot be removed: {error}", dir.display())),
    };
    [staging, parent].into_iter().filter_map(failed).collect()
}

fn text(path: &Path) -> String {
    path.to_string_lossy().into_owned()
}
