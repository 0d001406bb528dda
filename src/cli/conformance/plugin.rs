//! The driver under test, and what a container orchestrator does with it: volumes, snapshots,
//! attachments. It knows what the CSI spec says of the order of calls, and nothing of any driver.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::time::Duration;

use tonic::Code;

use super::case::Wrong;
use super::claims::Claims;
use super::ledger::{Attachment, Ledger, Made};
use super::secrets::Secrets;
use crate::client::{self, Client};
use crate::csi::proto;

/// How long to wait before a call that the driver put off is made again.
const AGAIN: Duration = Duration::from_millis(200);

/// What the command line says of the driver.
#[derive(Clone, Debug)]
pub(super) struct Settings {
    /// Parameters of the StorageClass.
    pub volume_parameters: HashMap<String, String>,
    /// Parameters of the VolumeSnapshotClass.
    pub snapshot_parameters: HashMap<String, String>,
    /// A call's secrets.
    pub secrets: Secrets,
    /// Where volumes are staged, each in a directory of its own.
    pub staging_dir: PathBuf,
    /// Where volumes are published, each in a directory of its own.
    pub target_dir: PathBuf,
    /// Bytes asked of a new volume.
    pub volume_size: u64,
}

pub(super) struct Plugin {
    socket: PathBuf,
    client: Client,
    /// What the driver says it can.
    pub claims: Claims,
    pub settings: Settings,
    ledger: Ledger,
    /// Begins the names of all that is made.
    run: String,
}

/// A volume that the suite made.
#[derive(Clone, Debug)]
pub(super) struct Volume {
    pub id: String,
    /// `capacity_bytes` as the driver told it.
    pub capacity: i64,
    context: HashMap<String, String>,
    capability: proto::VolumeCapability,
}

impl Plugin {
    pub fn new(socket: &Path, client: Client, claims: Claims, settings: Settings, run: String) -> Self {
        Plugin { socket: socket.to_owned(), client, claims, settings, ledger: Ledger::default(), run }
    }

    /// All that was made and is not deleted yet.
    pub fn ledger(&self) -> &Ledger {
        &self.ledger
    }

    /// A connection; the clones of one share its socket.
    pub fn client(&self) -> Client {
        self.client.clone()
    }

    /// A new connection whose streams wait for their reader.
    pub async fn narrow(&self) -> Result<Client, Wrong> {
        let connected = Client::connect_narrow(&self.socket, 512).await;
        connected.map_err(|error| Wrong::new(format!("connect: {error}")))
    }

    fn secrets(&self, call: &str) -> HashMap<String, String> {
        self.settings.secrets.of(call)
    }

    /// The secrets of both streams.
    pub fn stream_secrets(&self) -> HashMap<String, String> {
        self.secrets("SnapshotMetadata")
    }

    /// CreateVolume, from a snapshot or empty.
    pub async fn create_volume(
        &self,
        capability: proto::VolumeCapability,
        from_snapshot: Option<&str>,
        bytes: u64,
    ) -> Result<Volume, Wrong> {
        let name = format!("{}-volume-{}", self.run, self.ledger.next());
        let mut request = client::new_volume(&name, bytes as i64, capability.clone());
        request.parameters = self.settings.volume_parameters.clone();
        request.secrets = self.secrets("CreateVolume");
        request.volume_content_source = from_snapshot.map(client::from_snapshot);
        request.accessibility_requirements = self.claims.topology.clone().map(|topology| {
            proto::TopologyRequirement { requisite: vec![topology.clone()], preferred: vec![topology] }
        });
        self.ledger.push(Made::Volume { request: Box::new(request.clone()), id: None });
        let volume = self.create_volume_again(request).await?;
        Ok(Volume {
            id: volume.volume_id,
            capacity: volume.capacity_bytes,
            context: volume.volume_context,
            capability,
        })
    }

    /// CreateVolume until it is not put off; a retry finds the same volume by its name.
    pub async fn create_volume_again(
        &self,
        request: proto::CreateVolumeRequest,
    ) -> Result<proto::Volume, Wrong> {
        loop {
            match self.client().controller.create_volume(request.clone()).await {
                Ok(answer) => {
                    let volume = answer.into_inner().volume;
                    let volume =
                        volume.ok_or_else(|| Wrong::new("CreateVolume: the answer holds no volume"))?;
                    self.ledger.volume_is(&request.name, &volume.volume_id);
                    return Ok(volume);
                }
                Err(status) if status.code() == Code::Aborted => tokio::time::sleep(AGAIN).await,
                Err(status) => return Err(Wrong::call("CreateVolume", &status)),
            }
        }
    }

    /// DeleteVolume.
    pub async fn delete_volume(&self, id: &str) -> Result<(), Wrong> {
        loop {
            let secrets = self.secrets("DeleteVolume");
            let request = proto::DeleteVolumeRequest { volume_id: id.to_owned(), secrets };
            match self.client().controller.delete_volume(request).await {
                Ok(_) => break,
                Err(status) if status.code() == Code::Aborted => tokio::time::sleep(AGAIN).await,
                Err(status) => return Err(Wrong::call("DeleteVolume", &status)),
            }
        }
        self.ledger.forget(|made| matches!(made, Made::Volume { id: Some(found), .. } if found == id));
        Ok(())
    }

    /// CreateSnapshot, until it is ready to use; returns its id.
    pub async fn create_snapshot(&self, volume_id: &str) -> Result<String, Wrong> {
        let request = proto::CreateSnapshotRequest {
            source_volume_id: volume_id.to_owned(),
            name: format!("{}-snapshot-{}", self.run, self.ledger.next()),
            secrets: self.secrets("CreateSnapshot"),
            parameters: self.settings.snapshot_parameters.clone(),
        };
        self.ledger.push(Made::Snapshot { request: Box::new(request.clone()), id: None });
        self.create_snapshot_again(request, true).await
    }

    /// CreateSnapshot until it is not put off, and ready where that is wanted; a retry finds the same
    /// snapshot by its name.
    pub async fn create_snapshot_again(
        &self,
        request: proto::CreateSnapshotRequest,
        ready: bool,
    ) -> Result<String, Wrong> {
        loop {
            match self.client().controller.create_snapshot(request.clone()).await {
                Ok(answer) => {
                    let snapshot = answer.into_inner().snapshot;
                    let snapshot =
                        snapshot.ok_or_else(|| Wrong::new("CreateSnapshot: the answer holds no snapshot"))?;
                    self.ledger.snapshot_is(&request.name, &snapshot.snapshot_id);
                    if snapshot.ready_to_use || !ready {
                        return Ok(snapshot.snapshot_id);
                    }
                }
                Err(status) if status.code() == Code::Aborted => {}
                Err(status) => return Err(Wrong::call("CreateSnapshot", &status)),
            }
            tokio::time::sleep(AGAIN).await;
        }
    }

    /// DeleteSnapshot.
    pub async fn delete_snapshot(&self, id: &str) -> Result<(), Wrong> {
        loop {
            let secrets = self.secrets("DeleteSnapshot");
            let request = proto::DeleteSnapshotRequest { snapshot_id: id.to_owned(), secrets };
            match self.client().controller.delete_snapshot(request).await {
                Ok(_) => break,
                Err(status) if status.code() == Code::Aborted => tokio::time::sleep(AGAIN).await,
                Err(status) => return Err(Wrong::call("DeleteSnapshot", &status)),
            }
        }
        self.ledger.forget(|made| matches!(made, Made::Snapshot { id: Some(found), .. } if found == id));
        Ok(())
    }

    /// Attaches, stages and publishes a volume, as far as the driver claims these, and returns the
    /// target: a device node, or a directory.
    pub async fn attach(&self, volume: &Volume) -> Result<PathBuf, Wrong> {
        let place = format!("{}-{}", self.run, self.ledger.next());
        let staging = self.settings.staging_dir.join(&place);
        let parent = self.settings.target_dir.join(&place);
        let target = parent.join("volume");
        let attachment =
            Attachment { volume_id: volume.id.clone(), staging: staging.clone(), target: target.clone() };
        self.ledger.push(Made::Attachment(attachment));
        for dir in [&parent, &staging] {
            std::fs::create_dir_all(dir)
                .map_err(|error| Wrong::new(format!("make {}: {error}", dir.display())))?;
        }
        let mut node = self.client().node;
        let publish_context = self.controller_publish(volume).await?;
        let staging_target_path = match self.claims.stage {
            true => text(&staging),
            false => String::new(),
        };
        if self.claims.stage {
            let request = proto::NodeStageVolumeRequest {
                volume_id: volume.id.clone(),
                publish_context: publish_context.clone(),
                staging_target_path: staging_target_path.clone(),
                volume_capability: Some(volume.capability.clone()),
                secrets: self.secrets("NodeStageVolume"),
                volume_context: volume.context.clone(),
            };
            node.node_stage_volume(request).await.map_err(|s| Wrong::call("NodeStageVolume", &s))?;
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
        node.node_publish_volume(request).await.map_err(|s| Wrong::call("NodePublishVolume", &s))?;
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
        let answer = self.client().controller.controller_publish_volume(request).await;
        let answer = answer.map_err(|status| Wrong::call("ControllerPublishVolume", &status))?;
        Ok(answer.into_inner().publish_context)
    }

    /// Undoes [`Plugin::attach`], also where it was cut short, and removes its directories.
    pub async fn detach(&self, volume_id: &str) -> Result<(), Wrong> {
        let Some(attachment) = self.ledger.attachment(volume_id) else { return Ok(()) };
        let Attachment { staging, target, .. } = attachment;
        let mut client = self.client();
        let request =
            proto::NodeUnpublishVolumeRequest { volume_id: volume_id.to_owned(), target_path: text(&target) };
        gone(client.node.node_unpublish_volume(request).await, "NodeUnpublishVolume")?;
        if self.claims.stage {
            let request = proto::NodeUnstageVolumeRequest {
                volume_id: volume_id.to_owned(),
                staging_target_path: text(&staging),
            };
            gone(client.node.node_unstage_volume(request).await, "NodeUnstageVolume")?;
        }
        if self.claims.attach {
            let request = proto::ControllerUnpublishVolumeRequest {
                volume_id: volume_id.to_owned(),
                node_id: self.claims.node_id.clone(),
                secrets: self.secrets("ControllerUnpublishVolume"),
            };
            gone(client.controller.controller_unpublish_volume(request).await, "ControllerUnpublishVolume")?;
        }
        let left = remove_place(&staging, &target);
        self.ledger.forget(|made| matches!(made, Made::Attachment(found) if found.volume_id == volume_id));
        match left.first() {
            None => Ok(()),
            Some(left) => Err(Wrong::new(format!("after NodeUnpublishVolume: {left}"))),
        }
    }

    /// ControllerExpandVolume to at least `bytes`, and the node's part where it is asked for. `target` is
    /// where the volume is published, if it is.
    pub async fn expand(&self, volume: &Volume, bytes: u64, target: Option<&Path>) -> Result<u64, Wrong> {
        let capacity_range = Some(proto::CapacityRange { required_bytes: bytes as i64, limit_bytes: 0 });
        let request = proto::ControllerExpandVolumeRequest {
            volume_id: volume.id.clone(),
            capacity_range,
            secrets: self.secrets("ControllerExpandVolume"),
            volume_capability: Some(volume.capability.clone()),
        };
        let answer = self.client().controller.controller_expand_volume(request).await;
        let answer = answer.map_err(|s| Wrong::call("ControllerExpandVolume", &s))?.into_inner();
        let attachment = self.ledger.attachment(&volume.id);
        if let (true, true, Some(target), Some(attachment)) =
            (answer.node_expansion_required, self.claims.node_expand, target, attachment)
        {
            let request = proto::NodeExpandVolumeRequest {
                volume_id: volume.id.clone(),
                volume_path: text(target),
                capacity_range,
                staging_target_path: if self.claims.stage {
                    text(&attachment.staging)
                } else {
                    String::new()
                },
                volume_capability: Some(volume.capability.clone()),
                secrets: self.secrets("NodeExpandVolume"),
            };
            let answer = self.client().node.node_expand_volume(request).await;
            answer.map_err(|status| Wrong::call("NodeExpandVolume", &status))?;
        }
        Ok(answer.capacity_bytes.max(0) as u64)
    }

    /// Whether the driver answers a Probe with `OK`.
    pub async fn alive(&self) -> bool {
        self.client().identity.probe(proto::ProbeRequest {}).await.is_ok()
    }

    /// Whether nobody answers a Probe, with whatever.
    pub async fn is_silent(&self) -> bool {
        let answer = self.client().identity.probe(proto::ProbeRequest {}).await;
        answer.is_err_and(|status| Wrong::call("Probe", &status).is_silence())
    }
}

/// An undoing call: what is not there is undone.
fn gone<T>(answer: Result<tonic::Response<T>, tonic::Status>, call: &str) -> Result<(), Wrong> {
    match answer {
        Ok(_) => Ok(()),
        Err(status) if status.code() == Code::NotFound => Ok(()),
        Err(status) => Err(Wrong::call(call, &status)),
    }
}

/// Removes the directories of an attachment. The target itself is the driver's to remove.
pub(super) fn remove_place(staging: &Path, target: &Path) -> Vec<String> {
    let parent = target.parent().unwrap_or(target);
    let failed = |dir: &Path| match std::fs::remove_dir(dir) {
        Ok(()) => None,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => None,
        Err(error) => Some(format!("{} can not be removed: {error}", dir.display())),
    };
    [staging, parent].into_iter().filter_map(failed).collect()
}

fn text(path: &Path) -> String {
    path.to_string_lossy().into_owned()
}
