//! The calls that change something: what each works on, the call, what it must have come to, and how it is
//! undone.

use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use csi_client::{Client, block_capability, from_snapshot, from_volume, mount_capability, new_volume};
use deltapath::sys::loopdev::LoopDevice;
use deltapath::sys::{blockdev, mount, space};
use tonic::Status;

use super::scene::{FILES, SIZE, Scene};
use testkit::content::open_device;
use testkit::{MIB, Rig};

/// A call that is cut short.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Call {
    CreateVolume,
    Restore,
    Clone,
    /// Of a mounted filesystem, which is frozen for it.
    CloneMounted,
    CreateSnapshot,
    /// Of a raw device that is attached.
    SnapshotDevice,
    /// Of a mounted filesystem, which is frozen for it.
    SnapshotMounted,
    DeleteSnapshot,
    DeleteVolume,
    CreateGroup,
    /// Of a mounted filesystem and a raw device.
    GroupInUse,
    DeleteGroup,
    Expand,
    ExpandInUse,
    Modify,
    Attach,
    Detach,
    /// A blank volume: it is formatted.
    Stage,
    /// A volume that was expanded while nobody used it: its filesystem grows.
    StageGrown,
    Publish,
    Unpublish,
    Unstage,
    PublishDevice,
    PublishDeviceReadOnly,
    UnpublishDevice,
    NodeExpand,
    PublishEphemeral,
    UnpublishEphemeral,
}

impl Call {
    /// The filesystem of its victim, and the size it is made with. A mounted ext4 grows only with a capability
    /// that a container may lack.
    fn filesystem(self) -> (&'static str, i64) {
        match self {
            Call::NodeExpand => ("xfs", 300 * MIB),
            _ => ("ext4", FILES),
        }
    }
}

pub const CALLS: [Call; 28] = [
    Call::CreateVolume,
    Call::Restore,
    Call::Clone,
    Call::CloneMounted,
    Call::CreateSnapshot,
    Call::SnapshotDevice,
    Call::SnapshotMounted,
    Call::DeleteSnapshot,
    Call::DeleteVolume,
    Call::CreateGroup,
    Call::GroupInUse,
    Call::DeleteGroup,
    Call::Expand,
    Call::ExpandInUse,
    Call::Modify,
    Call::Attach,
    Call::Detach,
    Call::Stage,
    Call::StageGrown,
    Call::Publish,
    Call::Unpublish,
    Call::Unstage,
    Call::PublishDevice,
    Call::PublishDeviceReadOnly,
    Call::UnpublishDevice,
    Call::NodeExpand,
    Call::PublishEphemeral,
    Call::UnpublishEphemeral,
];

/// What depends on `--retain-deleted`, for a second pass without retention.
#[cfg(feature = "failpoints")]
pub const DELETIONS: [Call; 4] =
    [Call::DeleteSnapshot, Call::DeleteGroup, Call::DeleteVolume, Call::CreateSnapshot];

/// What `Modify` sets.
const READ_AHEAD: &str = "512";

/// A call with what it works on.
#[derive(Clone, Debug)]
pub struct Job {
    pub call: Call,
    /// The name of what it makes.
    name: String,
    /// The id of what was made for it beforehand.
    victim: String,
    kubelet: PathBuf,
}

/// The members of a group, from the list of all snapshots.
pub async fn members(client: &mut Client, group: &str) -> Vec<String> {
    let list = client.controller.list_snapshots(proto::ListSnapshotsRequest::default()).await.expect("list");
    let snapshots = list.into_inner().entries.into_iter().filter_map(|entry| entry.snapshot);
    snapshots.filter(|found| found.group_snapshot_id == group).map(|found| found.snapshot_id).collect()
}

fn text(path: &Path) -> String {
    path.display().to_string()
}

impl Job {
    /// Makes what the call is to work on.
    pub async fn prepare(call: Call, rig: &mut Rig, scene: &Scene, round: usize) -> Self {
        let (name, kubelet) = (format!("round {round}"), rig.kubelet());
        let mut job = Job { call, name, victim: String::new(), kubelet };
        let victim = format!("victim {round}");
        let client = &mut rig.client;
        let restored = || {
            let mut request = new_volume(&victim, SIZE, block_capability());
            request.volume_content_source = Some(from_snapshot(&scene.snapshot));
            request
        };
        job.victim = match call {
            Call::DeleteSnapshot => {
                let victim =
                    client.create_snapshot(&victim, &scene.origin).await.expect("snapshot").snapshot_id;
                // One after it: its changes are handed on.
                let next = format!("next {round}");
                client.create_snapshot(&next, &scene.origin).await.expect("snapshot");
                victim
            }
            Call::DeleteGroup => {
                client.create_group(&victim, &scene.idle()).await.expect("group").group_snapshot_id
            }
            Call::DeleteVolume | Call::Expand | Call::Attach | Call::Detach => {
                client.create_volume(restored()).await.expect("create").volume_id
            }
            Call::ExpandInUse | Call::Modify | Call::UnpublishDevice => {
                let volume = client.create_volume(restored()).await.expect("create").volume_id;
                client.publish(&volume, block_capability(), false, &job.kubelet).await.expect("publish");
                volume
            }
            Call::PublishDevice | Call::PublishDeviceReadOnly => {
                client.create_volume(restored()).await.expect("create").volume_id
            }
            Call::Stage
            | Call::StageGrown
            | Call::Publish
            | Call::Unpublish
            | Call::Unstage
            | Call::NodeExpand => {
                let (fs_type, size) = call.filesystem();
                let request = new_volume(&victim, size, mount_capability(fs_type));
                client.create_volume(request).await.expect("create").volume_id
            }
            Call::PublishEphemeral | Call::UnpublishEphemeral => format!("csi-{round}"),
            _ => String::new(),
        };
        job.place(client).await.unwrap_or_else(|status| panic!("{call:?} cannot be prepared: {status}"));
        job
    }

    /// Brings the victim to the place on the node that the call starts from.
    async fn place(&self, client: &mut Client) -> Result<(), Status> {
        std::fs::create_dir_all(self.staging()).expect("mkdir");
        match self.call {
            Call::PublishDevice | Call::PublishDeviceReadOnly | Call::Publish | Call::Unstage => {
                self.stage(client).await
            }
            Call::Unpublish | Call::NodeExpand => {
                self.stage(client).await?;
                self.publish(client).await?;
                if self.call == Call::NodeExpand {
                    client
                        .expand_volume(&self.victim, 2 * self.call.filesystem().1)
                        .await
                        .map_err(|error| error.status)?;
                }
                Ok(())
            }
            Call::StageGrown => {
                self.stage(client).await?;
                self.unstage(client).await?;
                client
                    .expand_volume(&self.victim, 2 * self.call.filesystem().1)
                    .await
                    .map_err(|error| error.status)
                    .map(drop)
            }
            Call::Detach => self.attach(client).await,
            Call::UnpublishEphemeral => self.publish(client).await,
            _ => Ok(()),
        }
    }

    fn staging(&self) -> PathBuf {
        self.kubelet.join(&self.victim).join("staging")
    }

    fn target(&self) -> PathBuf {
        self.kubelet.join(&self.victim).join("target")
    }

    fn capability(&self) -> proto::VolumeCapability {
        match self.call {
            Call::PublishDevice | Call::PublishDeviceReadOnly | Call::UnpublishDevice => block_capability(),
            Call::Attach | Call::Detach => block_capability(),
            _ => mount_capability(self.call.filesystem().0),
        }
    }

    async fn stage(&self, client: &mut Client) -> Result<(), Status> {
        let request = proto::NodeStageVolumeRequest {
            volume_id: self.victim.clone(),
            staging_target_path: text(&self.staging()),
            volume_capability: Some(self.capability()),
            ..Default::default()
        };
        client.node.node_stage_volume(request).await.map(drop)
    }

    async fn publish(&self, client: &mut Client) -> Result<(), Status> {
        let mut request = proto::NodePublishVolumeRequest {
            volume_id: self.victim.clone(),
            staging_target_path: text(&self.staging()),
            target_path: text(&self.target()),
            volume_capability: Some(self.capability()),
            readonly: self.call == Call::PublishDeviceReadOnly,
            ..Default::default()
        };
        if matches!(self.call, Call::PublishEphemeral | Call::UnpublishEphemeral) {
            request.staging_target_path.clear();
            for (name, value) in [("csi.storage.k8s.io/ephemeral", "true"), ("size", "16Mi")] {
                request.volume_context.insert(name.into(), value.into());
            }
        }
        client.node.node_publish_volume(request).await.map(drop)
    }

    async fn unpublish(&self, client: &mut Client) -> Result<(), Status> {
        let request = proto::NodeUnpublishVolumeRequest {
            volume_id: self.victim.clone(),
            target_path: text(&self.target()),
        };
        client.node.node_unpublish_volume(request).await.map(drop)
    }

    async fn unstage(&self, client: &mut Client) -> Result<(), Status> {
        let request = proto::NodeUnstageVolumeRequest {
            volume_id: self.victim.clone(),
            staging_target_path: text(&self.staging()),
        };
        client.node.node_unstage_volume(request).await.map(drop)
    }

    async fn attach(&self, client: &mut Client) -> Result<(), Status> {
        let request = proto::ControllerPublishVolumeRequest {
            volume_id: self.victim.clone(),
            node_id: "node-1".into(),
            volume_capability: Some(self.capability()),
            ..Default::default()
        };
        client.controller.controller_publish_volume(request).await.map(drop)
    }

    async fn detach(&self, client: &mut Client) -> Result<(), Status> {
        let request = proto::ControllerUnpublishVolumeRequest {
            volume_id: self.victim.clone(),
            node_id: "node-1".into(),
            ..Default::default()
        };
        client.controller.controller_unpublish_volume(request).await.map(drop)
    }

    /// Makes the call; the id of what it made, or what it worked on.
    pub async fn make(&self, client: &mut Client, scene: &Scene) -> Result<String, Status> {
        let victim = &self.victim;
        let create = |source, capability, size| {
            let mut request = new_volume(&self.name, size, capability);
            request.volume_content_source = source;
            request
        };
        let worked = |outcome: Result<(), Status>| outcome.map(|()| victim.clone());
        match self.call {
            Call::CreateVolume => {
                let made = client.create_volume(create(None, block_capability(), SIZE)).await;
                made.map(|volume| volume.volume_id).map_err(|error| error.status)
            }
            Call::Restore => {
                let source = Some(from_snapshot(&scene.snapshot));
                let made = client.create_volume(create(source, block_capability(), SIZE)).await;
                made.map(|volume| volume.volume_id).map_err(|error| error.status)
            }
            Call::Clone => {
                let source = Some(from_volume(&scene.origin));
                let made = client.create_volume(create(source, block_capability(), SIZE)).await;
                made.map(|volume| volume.volume_id).map_err(|error| error.status)
            }
            Call::CloneMounted => {
                let source = Some(from_volume(&scene.files));
                let made = client.create_volume(create(source, mount_capability("ext4"), FILES)).await;
                made.map(|volume| volume.volume_id).map_err(|error| error.status)
            }
            Call::CreateSnapshot | Call::SnapshotDevice | Call::SnapshotMounted => {
                let source = match self.call {
                    Call::CreateSnapshot => &scene.origin,
                    Call::SnapshotDevice => &scene.raw,
                    _ => &scene.files,
                };
                let made = client.create_snapshot(&self.name, source).await;
                made.map(|snapshot| snapshot.snapshot_id).map_err(|error| error.status)
            }
            Call::CreateGroup | Call::GroupInUse => {
                let sources = if self.call == Call::GroupInUse { scene.in_use() } else { scene.idle() };
                let made = client.create_group(&self.name, &sources).await;
                made.map(|group| group.group_snapshot_id).map_err(|error| error.status)
            }
            Call::DeleteSnapshot => {
                worked(client.delete_snapshot(victim).await.map_err(|error| error.status))
            }
            Call::DeleteVolume => worked(client.delete_volume(victim).await.map_err(|error| error.status)),
            Call::DeleteGroup => {
                let ids = members(client, victim).await;
                worked(client.delete_group(victim, &ids).await.map_err(|error| error.status))
            }
            Call::Expand | Call::ExpandInUse => {
                let expanded = client.expand_volume(victim, 2 * SIZE).await.map_err(|error| error.status)?;
                assert_eq!(expanded.capacity_bytes, 2 * SIZE);
                Ok(victim.clone())
            }
            Call::Modify => {
                let mut request =
                    proto::ControllerModifyVolumeRequest { volume_id: victim.clone(), ..Default::default() };
                request.mutable_parameters.insert("readAheadKiB".into(), READ_AHEAD.into());
                request.mutable_parameters.insert("directIO".into(), "false".into());
                worked(client.controller.controller_modify_volume(request).await.map(drop))
            }
            Call::Attach => worked(self.attach(client).await),
            Call::Detach => worked(self.detach(client).await),
            Call::Stage | Call::StageGrown => worked(self.stage(client).await),
            Call::Unstage => worked(self.unstage(client).await),
            Call::Publish | Call::PublishDevice | Call::PublishDeviceReadOnly | Call::PublishEphemeral => {
                worked(self.publish(client).await)
            }
            Call::Unpublish | Call::UnpublishDevice | Call::UnpublishEphemeral => {
                worked(self.unpublish(client).await)
            }
            Call::NodeExpand => {
                let request = proto::NodeExpandVolumeRequest {
                    volume_id: victim.clone(),
                    volume_path: text(&self.target()),
                    ..Default::default()
                };
                worked(client.node.node_expand_volume(request).await.map(drop))
            }
        }
    }

    /// What is not as it must be once the call has succeeded. Contents of snapshots are the audit's matter.
    pub async fn shortfall(&self, rig: &mut Rig, scene: &Scene, made: &str) -> Result<(), String> {
        let image = rig.pool_dir().join("volumes").join(made).join("bytes/data.img");
        let hold = |holds: bool, what: &str| if holds { Ok(()) } else { Err(what.to_owned()) };
        let device = || LoopDevice::find(&image).ok().flatten().ok_or("it has no device");
        let shown = |path: &Path| mount::mounted_at(path).expect("mounts").is_some();
        match self.call {
            Call::Restore | Call::Clone => scene.check_origin(&image),
            Call::CloneMounted => super::scene::check_filesystem(&image),
            Call::Expand | Call::ExpandInUse => {
                let length = std::fs::metadata(&image).map_err(|error| error.to_string())?.len();
                hold(length == 2 * SIZE as u64, "the file has not grown")?;
                match self.call {
                    Call::Expand => Ok(()),
                    _ => hold(
                        blockdev::size(&device()?.path()).expect("size") == 2 * SIZE as u64,
                        "the device has not grown",
                    ),
                }
            }
            Call::Modify => {
                let kib = std::fs::read_to_string(device()?.sysfs().join("queue/read_ahead_kb"));
                hold(kib.expect("sysfs").trim() == READ_AHEAD, "the device is not tuned")
            }
            Call::Attach | Call::Detach => {
                let attached = super::audit::listed(rig).await.volumes[made].attached;
                hold(attached == (self.call == Call::Attach), "the attachment is not as asked")
            }
            Call::Stage => write_file(&self.staging()),
            Call::Publish | Call::PublishEphemeral => write_file(&self.target()),
            Call::StageGrown | Call::NodeExpand => {
                let total = space(&self.staging()).expect("statvfs").total;
                hold(total > self.call.filesystem().1 as u64 * 3 / 2, "the filesystem has not grown")
            }
            Call::PublishDevice => {
                let file = open_device(&self.target());
                file.write_all_at(&[7; 4096], 0).and_then(|()| file.sync_all()).map_err(|e| e.to_string())
            }
            Call::PublishDeviceReadOnly => {
                let refused = std::fs::File::options().write(true).open(self.target());
                let refused = refused.and_then(|file| file.write_all_at(&[7; 4096], 0));
                hold(shown(&self.target()) && refused.is_err(), "the device is not there for reading only")
            }
            Call::Unpublish | Call::UnpublishDevice | Call::UnpublishEphemeral => {
                hold(!self.target().exists(), "the target stays")
            }
            Call::Unstage => hold(!shown(&self.staging()), "it is still mounted"),
            Call::DeleteVolume | Call::DeleteSnapshot | Call::DeleteGroup => {
                let list = super::audit::listed(rig).await;
                let there = list.volumes.contains_key(made)
                    || list.snapshots.iter().any(|(id, of)| id == made || of.group == made);
                hold(!there, "it is still listed")
            }
            _ => Ok(()),
        }
    }

    /// Removes what the round made, so that all is as before it.
    pub async fn undo(&self, rig: &mut Rig, made: &str) {
        let client = &mut rig.client;
        match self.call {
            Call::CreateSnapshot | Call::SnapshotDevice | Call::SnapshotMounted => {
                client.delete_snapshot(made).await.expect("delete");
            }
            Call::CreateGroup | Call::GroupInUse => {
                let ids = members(client, made).await;
                client.delete_group(made, &ids).await.expect("delete");
            }
            Call::DeleteSnapshot => {
                let list = client.controller.list_snapshots(proto::ListSnapshotsRequest::default()).await;
                let snapshots =
                    list.expect("list").into_inner().entries.into_iter().filter_map(|e| e.snapshot);
                let next = super::scene::newest(snapshots);
                client.delete_snapshot(&next).await.expect("delete");
            }
            Call::DeleteGroup | Call::DeleteVolume | Call::UnpublishEphemeral => {}
            Call::PublishEphemeral => self.unpublish(client).await.expect("unpublish"),
            _ => {
                client.unpublish(made, &self.kubelet).await.expect("unpublish");
                self.detach_if_attached(client, made).await;
                client.delete_volume(made).await.expect("delete");
            }
        }
        let _ = std::fs::remove_dir(self.staging());
        let _ = std::fs::remove_dir(self.kubelet.join(&self.victim));
    }

    async fn detach_if_attached(&self, client: &mut Client, made: &str) {
        if matches!(self.call, Call::Attach | Call::Detach) {
            assert_eq!(made, self.victim);
            self.detach(client).await.expect("detach");
        }
    }
}

/// Writes and syncs a file, which needs a filesystem that is mounted, writable and not frozen.
fn write_file(dir: &Path) -> Result<(), String> {
    if mount::mounted_at(dir).expect("mounts").is_none() {
        return Err(format!("nothing is mounted at {}", dir.display()));
    }
    let written = std::fs::File::create(dir.join("file")).and_then(|file| {
        std::io::Write::write_all(&mut &file, b"written")?;
        file.sync_all()
    });
    written.map_err(|error| error.to_string())
}
