//! The driver under test, and what a container orchestrator does with it: volumes and snapshots here,
//! attachments in `attach.rs`. It knows what the CSI spec says of the order of calls, and nothing of any
//! driver.

use std::cell::Cell;
use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::time::Duration;

use super::claims::Claims;
use super::ledger::{Ledger, What};
use super::secrets::Secrets;
use super::verdict::Wrong;
use csi_client::Client;

/// How long to wait before a call that the driver put off is made again.
pub(crate) const AGAIN: Duration = Duration::from_millis(200);

/// `call!(plugin, service.method, name, request)`: makes a call until it is not put off with ABORTED, as the
/// spec has it done. The case's time bounds it.
macro_rules! call {
    ($plugin:expr, $service:ident.$method:ident, $name:literal, $request:expr) => {
        loop {
            $crate::conformance::plugin::calls($name);
            match $plugin.client().$service.$method($request.clone()).await {
                Err(status) if status.code() == tonic::Code::Aborted => {
                    tokio::time::sleep($crate::conformance::plugin::AGAIN).await;
                }
                Err(status) => break Err($crate::conformance::verdict::Wrong::call($name, &status)),
                Ok(answer) => break Ok(answer.into_inner()),
            }
        }
    };
}
pub(crate) use call;

/// What the command line says of the driver.
#[derive(Clone, Debug)]
pub(crate) struct Settings {
    /// Parameters of the StorageClass.
    pub volume_parameters: HashMap<String, String>,
    /// Parameters of the VolumeSnapshotClass.
    pub snapshot_parameters: HashMap<String, String>,
    /// Parameters of the VolumeAttributesClass.
    pub attributes: HashMap<String, String>,
    /// A call's secrets.
    pub secrets: Secrets,
    /// Where volumes are staged, each in a directory of its own.
    pub staging_dir: PathBuf,
    /// Where volumes are published, each in a directory of its own.
    pub target_dir: PathBuf,
    /// Bytes asked of a new volume.
    pub volume_size: u64,
}

pub(crate) struct Plugin {
    socket: PathBuf,
    client: Client,
    /// What the driver says it can.
    pub claims: Claims,
    pub settings: Settings,
    /// All that was made and is not deleted yet.
    pub ledger: Ledger,
    /// Begins the names of all that is made.
    pub(crate) run: String,
}

tokio::task_local! {
    /// The last call of what runs [`within`] a time.
    static LAST_CALL: Cell<Option<&'static str>>;
}

/// Notes the call that is made, for those who wait for its end.
pub(crate) fn calls(call: &'static str) {
    // No caller waits for what is taken away at the end.
    let _ = LAST_CALL.try_with(|last| last.set(Some(call)));
}

/// What the work returns, or an error that it did not end in time, with the last call that it made.
pub(crate) async fn within<T>(patience: Duration, work: impl Future<Output = T>) -> Result<T, Wrong> {
    let timed = async {
        tokio::time::timeout(patience, work).await.map_err(|_| {
            let call =
                LAST_CALL.with(Cell::get).map_or(String::new(), |call| format!("; the last call was {call}"));
            Wrong::new(format!("no end within {} s{call}", patience.as_secs()))
        })
    };
    LAST_CALL.scope(Cell::new(None), timed).await
}

/// A volume that the suite made.
#[derive(Clone, Debug)]
pub(crate) struct Volume {
    pub id: String,
    /// `capacity_bytes` as the driver gave it.
    pub capacity: i64,
    pub(crate) context: HashMap<String, String>,
    pub(crate) capability: proto::VolumeCapability,
}

/// Where a volume or snapshot must be usable: on this node.
fn required(topology: proto::Topology) -> proto::TopologyRequirement {
    proto::TopologyRequirement { requisite: vec![topology.clone()], preferred: vec![topology] }
}

impl Plugin {
    pub fn new(socket: &Path, client: Client, claims: Claims, settings: Settings, run: String) -> Self {
        Plugin { socket: socket.to_owned(), client, claims, settings, ledger: Ledger::default(), run }
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

    pub(crate) fn secrets(&self, call: &str) -> HashMap<String, String> {
        self.settings.secrets.of(call)
    }

    /// The secrets of both streams.
    pub fn stream_secrets(&self) -> HashMap<String, String> {
        self.secrets("SnapshotMetadata")
    }

    /// CreateVolume, from a source or empty.
    pub async fn create_volume(
        &self,
        capability: proto::VolumeCapability,
        source: Option<proto::VolumeContentSource>,
        bytes: u64,
    ) -> Result<Volume, Wrong> {
        let name = format!("{}-volume-{}", self.run, self.ledger.next());
        let mut request = csi_client::new_volume(&name, bytes as i64, capability.clone());
        request.parameters = self.settings.volume_parameters.clone();
        request.secrets = self.secrets("CreateVolume");
        request.volume_content_source = source;
        request.accessibility_requirements = self.claims.topology.clone().map(required);
        self.ledger.push(What::Volume(Box::new(request.clone())));
        let volume = self.create_volume_again(request).await?;
        Ok(Volume {
            id: volume.volume_id,
            capacity: volume.capacity_bytes,
            context: volume.volume_context,
            capability,
        })
    }

    /// CreateVolume; made again, it finds the same volume by its name.
    pub async fn create_volume_again(
        &self,
        request: proto::CreateVolumeRequest,
    ) -> Result<proto::Volume, Wrong> {
        let answer = call!(self, controller.create_volume, "CreateVolume", request)?;
        let volume = answer.volume.ok_or_else(|| Wrong::new("CreateVolume: the answer holds no volume"))?;
        self.ledger.has_ids(&request.name, &[&volume.volume_id]);
        Ok(volume)
    }

    /// ControllerModifyVolume, to the parameters of the VolumeAttributesClass.
    pub async fn modify_volume(&self, id: &str) -> Result<(), Wrong> {
        let request = proto::ControllerModifyVolumeRequest {
            volume_id: id.to_owned(),
            secrets: self.secrets("ControllerModifyVolume"),
            mutable_parameters: self.settings.attributes.clone(),
        };
        call!(self, controller.controller_modify_volume, "ControllerModifyVolume", request)?;
        Ok(())
    }

    /// DeleteVolume.
    pub async fn delete_volume(&self, id: &str) -> Result<(), Wrong> {
        let secrets = self.secrets("DeleteVolume");
        let request = proto::DeleteVolumeRequest { volume_id: id.to_owned(), secrets };
        call!(self, controller.delete_volume, "DeleteVolume", request)?;
        self.ledger.forget(|made| matches!(made.what, What::Volume(_)) && made.is(id));
        Ok(())
    }

    /// CreateSnapshot, until it is ready to use; returns its id.
    pub async fn create_snapshot(&self, volume_id: &str) -> Result<String, Wrong> {
        let request = proto::CreateSnapshotRequest {
            source_volume_id: volume_id.to_owned(),
            name: format!("{}-snapshot-{}", self.run, self.ledger.next()),
            secrets: self.secrets("CreateSnapshot"),
            parameters: self.settings.snapshot_parameters.clone(),
            accessibility_requirements: self.claims.snapshot_topology.clone().map(required),
        };
        self.ledger.push(What::Snapshot(Box::new(request.clone())));
        self.create_snapshot_again(request, true).await
    }

    /// CreateSnapshot, until it is ready where that is wanted; made again, it finds the same snapshot by its
    /// name.
    pub async fn create_snapshot_again(
        &self,
        request: proto::CreateSnapshotRequest,
        ready: bool,
    ) -> Result<String, Wrong> {
        loop {
            let answer = call!(self, controller.create_snapshot, "CreateSnapshot", request)?;
            let none = || Wrong::new("CreateSnapshot: the answer holds no snapshot");
            let snapshot = answer.snapshot.ok_or_else(none)?;
            self.ledger.has_ids(&request.name, &[&snapshot.snapshot_id]);
            if snapshot.ready_to_use || !ready {
                return Ok(snapshot.snapshot_id);
            }
            tokio::time::sleep(AGAIN).await;
        }
    }

    /// DeleteSnapshot.
    pub async fn delete_snapshot(&self, id: &str) -> Result<(), Wrong> {
        let secrets = self.secrets("DeleteSnapshot");
        let request = proto::DeleteSnapshotRequest { snapshot_id: id.to_owned(), secrets };
        call!(self, controller.delete_snapshot, "DeleteSnapshot", request)?;
        self.ledger.forget(|made| matches!(made.what, What::Snapshot(_)) && made.is(id));
        Ok(())
    }

    /// CreateVolumeGroupSnapshot of one volume, until it is ready: the ids of the group and of its member.
    pub async fn create_group(&self, volume_id: &str) -> Result<[String; 2], Wrong> {
        let request = proto::CreateVolumeGroupSnapshotRequest {
            name: format!("{}-group-{}", self.run, self.ledger.next()),
            source_volume_ids: vec![volume_id.to_owned()],
            secrets: self.secrets("CreateVolumeGroupSnapshot"),
            ..Default::default()
        };
        self.ledger.push(What::Group(Box::new(request.clone())));
        self.create_group_again(request).await
    }

    /// The same; made again, it finds the same group by its name.
    pub async fn create_group_again(
        &self,
        request: proto::CreateVolumeGroupSnapshotRequest,
    ) -> Result<[String; 2], Wrong> {
        loop {
            let answer =
                call!(self, groups.create_volume_group_snapshot, "CreateVolumeGroupSnapshot", request)?;
            let none = |what: &str| Wrong::new(format!("CreateVolumeGroupSnapshot: the {what}"));
            let group = answer.group_snapshot.ok_or_else(|| none("answer holds no group"))?;
            let member = group.snapshots.first().ok_or_else(|| none("group has no member"))?;
            let ids = [group.group_snapshot_id.clone(), member.snapshot_id.clone()];
            self.ledger.has_ids(&request.name, &[&ids[0], &ids[1]]);
            if group.ready_to_use {
                return Ok(ids);
            }
            tokio::time::sleep(AGAIN).await;
        }
    }

    /// DeleteVolumeGroupSnapshot, with its member.
    pub async fn delete_group(&self, id: &str, member: &str) -> Result<(), Wrong> {
        let request = proto::DeleteVolumeGroupSnapshotRequest {
            group_snapshot_id: id.to_owned(),
            snapshot_ids: vec![member.to_owned()],
            secrets: self.secrets("DeleteVolumeGroupSnapshot"),
        };
        call!(self, groups.delete_volume_group_snapshot, "DeleteVolumeGroupSnapshot", request)?;
        self.ledger.forget(|made| matches!(made.what, What::Group(_)) && made.is(id));
        Ok(())
    }

    /// Whether the driver answers a Probe with `OK`.
    pub async fn alive(&self) -> bool {
        self.client().identity.probe(proto::ProbeRequest {}).await.is_ok()
    }

    /// Whether a Probe gets no answer, of whatever kind.
    pub async fn is_silent(&self) -> bool {
        let answer = self.client().identity.probe(proto::ProbeRequest {}).await;
        answer.is_err_and(|status| Wrong::call("Probe", &status).is_silence())
    }
}
