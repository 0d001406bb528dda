//! Many clients at once, doing anything, legal or not.

use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use csi_client::{Client, block_capability, from_snapshot, from_volume, mount_capability, new_volume};
use deltapath::sys::sweep::devices_below;
use proto::VolumeCapability;
use proto::volume_capability::access_mode::Mode;
use tonic::{Code, Status};

use crate::hostile::allowed;
use testkit::{MIB, PoolKind, Rig, names, state_of};

const CLIENTS: u64 = 32;

/// How long; `DELTAPATH_CHAOS_SECONDS` asks for another time.
fn seconds() -> u64 {
    std::env::var("DELTAPATH_CHAOS_SECONDS").ok().and_then(|seconds| seconds.parse().ok()).unwrap_or(40)
}

/// Ids that calls have returned, those of deleted objects among them.
#[derive(Default)]
struct Known {
    volumes: Vec<String>,
    snapshots: Vec<String>,
    groups: Vec<(String, Vec<String>)>,
}

struct Caller {
    client: Client,
    dice: fastrand::Rng,
    known: Arc<Mutex<Known>>,
    dir: std::path::PathBuf,
}

/// What a call came to, for the count and the check of its code.
struct Answer {
    method: &'static str,
    code: Code,
    message: String,
}

fn answer<T>(method: &'static str, result: Result<T, Status>) -> Answer {
    match result {
        Ok(_) => Answer { method, code: Code::Ok, message: String::new() },
        Err(status) => Answer { method, code: status.code(), message: status.message().to_owned() },
    }
}

impl Caller {
    fn volume(&mut self) -> String {
        let known = self.known.lock().expect("known").volumes.clone();
        match self.dice.usize(0..10) {
            0 => self
                .dice
                .choice(["", "..", "vol-00000000000000000000000000000000"])
                .expect("a choice")
                .to_owned(),
            _ if known.is_empty() => "none yet".into(),
            // The youngest are likely to be there still.
            _ => known[known.len() - 1 - self.dice.usize(0..known.len().min(12))].clone(),
        }
    }

    fn snapshot(&mut self) -> String {
        let known = self.known.lock().expect("known").snapshots.clone();
        match self.dice.usize(0..10) {
            0 => self
                .dice
                .choice(["", "/", "snap-00000000000000000000000000000000"])
                .expect("a choice")
                .to_owned(),
            _ if known.is_empty() => "none yet".into(),
            _ => known[known.len() - 1 - self.dice.usize(0..known.len().min(12))].clone(),
        }
    }

    fn group(&mut self) -> (String, Vec<String>) {
        let known = self.known.lock().expect("known").groups.clone();
        if known.is_empty() || self.dice.usize(0..10) == 0 {
            return ("group-x".into(), vec!["x".into()]);
        }
        known[known.len() - 1 - self.dice.usize(0..known.len().min(6))].clone()
    }

    fn capability(&mut self) -> VolumeCapability {
        let mut capability = match self.dice.usize(0..5) {
            0 => mount_capability("xfs"),
            1 => mount_capability(""),
            2 => mount_capability("ext4"),
            _ => block_capability(),
        };
        let modes = [
            Mode::SingleNodeWriter,
            Mode::SingleNodeWriter,
            Mode::SingleNodeMultiWriter,
            Mode::SingleNodeSingleWriter,
            Mode::SingleNodeReaderOnly,
            Mode::MultiNodeReaderOnly,
            Mode::MultiNodeMultiWriter,
        ];
        let mode = self.dice.choice(modes).expect("a choice");
        capability.access_mode = Some(proto::volume_capability::AccessMode { mode: mode.into() });
        capability
    }

    fn name(&mut self) -> String {
        format!("name {}", self.dice.usize(0..40))
    }

    fn range(&mut self) -> proto::CapacityRange {
        proto::CapacityRange {
            required_bytes: self
                .dice
                .choice([0, MIB, 3 * MIB, 16 * MIB, 40 * MIB, -1, i64::MAX])
                .expect("a choice"),
            limit_bytes: self.dice.choice([0, 0, 0, 64 * MIB, 2 * MIB]).expect("a choice"),
        }
    }

    /// A volume's own directories, and now and then another's.
    fn place(&mut self, volume: &str) -> (String, String) {
        let owner = if self.dice.usize(0..20) == 0 { self.volume() } else { volume.to_owned() };
        let base = self.dir.join(owner.replace('/', "_").replace("..", "_"));
        let _ = std::fs::create_dir_all(base.join("staging"));
        let target = format!("target-{}", self.dice.usize(0..3));
        (base.join("staging").display().to_string(), base.join(target).display().to_string())
    }

    async fn call(&mut self) -> Answer {
        match self.dice.usize(0..27) {
            26 => self.ask_who().await,
            0..=2 => self.create_volume().await,
            3 => {
                let request = proto::DeleteVolumeRequest { volume_id: self.volume(), ..Default::default() };
                answer("DeleteVolume", self.client.controller.delete_volume(request).await)
            }
            4 | 5 => {
                let mut request = proto::CreateSnapshotRequest {
                    name: self.name(),
                    source_volume_id: self.volume(),
                    ..Default::default()
                };
                if self.dice.usize(0..8) == 0 {
                    request.parameters.insert("blockMetadataType".into(), "fixed".into());
                }
                let made = self.client.controller.create_snapshot(request).await;
                if let Ok(made) = &made {
                    let id = made.get_ref().snapshot.clone().expect("a snapshot").snapshot_id;
                    self.known.lock().expect("known").snapshots.push(id);
                }
                answer("CreateSnapshot", made)
            }
            6 => {
                let request =
                    proto::DeleteSnapshotRequest { snapshot_id: self.snapshot(), ..Default::default() };
                answer("DeleteSnapshot", self.client.controller.delete_snapshot(request).await)
            }
            7 => {
                let request = proto::ControllerExpandVolumeRequest {
                    volume_id: self.volume(),
                    capacity_range: Some(self.range()),
                    ..Default::default()
                };
                answer(
                    "ControllerExpandVolume",
                    self.client.controller.controller_expand_volume(request).await,
                )
            }
            8 => {
                let mut request =
                    proto::ControllerModifyVolumeRequest { volume_id: self.volume(), ..Default::default() };
                let value = self.dice.choice(["64", "512", "3"]).expect("a choice").to_owned();
                request.mutable_parameters.insert("readAheadKiB".into(), value);
                answer(
                    "ControllerModifyVolume",
                    self.client.controller.controller_modify_volume(request).await,
                )
            }
            9 => {
                let request = proto::ControllerPublishVolumeRequest {
                    volume_id: self.volume(),
                    node_id: self.dice.choice(["node-1", "node-1", "node-2"]).expect("a choice").into(),
                    volume_capability: Some(self.capability()),
                    ..Default::default()
                };
                answer(
                    "ControllerPublishVolume",
                    self.client.controller.controller_publish_volume(request).await,
                )
            }
            10 | 11 => {
                let request = proto::ControllerUnpublishVolumeRequest {
                    volume_id: self.volume(),
                    node_id: self.dice.choice(["node-1", ""]).expect("a choice").into(),
                    ..Default::default()
                };
                let done = self.client.controller.controller_unpublish_volume(request).await;
                answer("ControllerUnpublishVolume", done)
            }
            12 => {
                let request = proto::ListVolumesRequest {
                    max_entries: self.dice.choice([0, 1, 7, -1]).expect("a choice"),
                    starting_token: self.dice.choice(["", "", "nonsense"]).expect("a choice").into(),
                };
                answer("ListVolumes", self.client.controller.list_volumes(request).await)
            }
            13 => {
                let request =
                    proto::ListSnapshotsRequest { source_volume_id: self.volume(), ..Default::default() };
                answer("ListSnapshots", self.client.controller.list_snapshots(request).await)
            }
            14 => match self.dice.usize(0..4) {
                0 => {
                    let request = proto::ControllerGetVolumeRequest { volume_id: self.volume() };
                    answer("ControllerGetVolume", self.client.controller.controller_get_volume(request).await)
                }
                1 => {
                    let request =
                        proto::GetSnapshotRequest { snapshot_id: self.snapshot(), ..Default::default() };
                    answer("GetSnapshot", self.client.controller.get_snapshot(request).await)
                }
                2 => {
                    let request = proto::GetCapacityRequest {
                        volume_capabilities: vec![self.capability()],
                        ..Default::default()
                    };
                    answer("GetCapacity", self.client.controller.get_capacity(request).await)
                }
                _ => {
                    let request = proto::ValidateVolumeCapabilitiesRequest {
                        volume_id: self.volume(),
                        volume_capabilities: vec![self.capability()],
                        ..Default::default()
                    };
                    let done = self.client.controller.validate_volume_capabilities(request).await;
                    answer("ValidateVolumeCapabilities", done)
                }
            },
            15 => {
                let ids: Vec<String> = (0..1 + self.dice.usize(0..3)).map(|_| self.volume()).collect();
                let request = proto::CreateVolumeGroupSnapshotRequest {
                    name: self.name(),
                    source_volume_ids: ids,
                    ..Default::default()
                };
                let made = self.client.groups.create_volume_group_snapshot(request).await;
                if let Ok(made) = &made {
                    let group = made.get_ref().group_snapshot.clone().expect("a group");
                    let members: Vec<String> = group.snapshots.into_iter().map(|s| s.snapshot_id).collect();
                    let mut known = self.known.lock().expect("known");
                    known.snapshots.extend(members.clone());
                    known.groups.push((group.group_snapshot_id, members));
                }
                answer("CreateVolumeGroupSnapshot", made)
            }
            16 => {
                let (group_snapshot_id, snapshot_ids) = self.group();
                if self.dice.usize(0..3) == 0 {
                    let request = proto::GetVolumeGroupSnapshotRequest {
                        group_snapshot_id,
                        snapshot_ids,
                        ..Default::default()
                    };
                    let done = self.client.groups.get_volume_group_snapshot(request).await;
                    return answer("GetVolumeGroupSnapshot", done);
                }
                let request = proto::DeleteVolumeGroupSnapshotRequest {
                    group_snapshot_id,
                    snapshot_ids,
                    ..Default::default()
                };
                let done = self.client.groups.delete_volume_group_snapshot(request).await;
                answer("DeleteVolumeGroupSnapshot", done)
            }
            17 | 18 => self.stage_and_publish().await,
            19..=21 => self.unpublish_or_unstage().await,
            22 => {
                let volume_id = self.volume();
                let (staging, target) = self.place(&volume_id);
                let volume_path = if self.dice.usize(0..2) == 0 { staging } else { target };
                if self.dice.usize(0..2) == 0 {
                    let request =
                        proto::NodeGetVolumeStatsRequest { volume_id, volume_path, ..Default::default() };
                    return answer(
                        "NodeGetVolumeStats",
                        self.client.node.node_get_volume_stats(request).await,
                    );
                }
                let request = proto::NodeExpandVolumeRequest { volume_id, volume_path, ..Default::default() };
                answer("NodeExpandVolume", self.client.node.node_expand_volume(request).await)
            }
            23 => {
                let request = proto::GetMetadataAllocatedRequest {
                    snapshot_id: self.snapshot(),
                    starting_offset: self.dice.choice([0, 5000, -1, 1 << 40]).expect("a choice"),
                    ..Default::default()
                };
                let stream = self.client.metadata.get_metadata_allocated(request).await;
                let drained = match stream {
                    Ok(stream) => drain(stream.into_inner()).await,
                    Err(status) => Err(status),
                };
                answer("GetMetadataAllocated", drained)
            }
            _ => {
                let request = proto::GetMetadataDeltaRequest {
                    base_snapshot_id: self.snapshot(),
                    target_snapshot_id: self.snapshot(),
                    max_results: self.dice.choice([0, 1, -1, i32::MAX]).expect("a choice"),
                    ..Default::default()
                };
                let stream = self.client.metadata.get_metadata_delta(request).await;
                let drained = match stream {
                    Ok(stream) => drain(stream.into_inner()).await,
                    Err(status) => Err(status),
                };
                answer("GetMetadataDelta", drained)
            }
        }
    }

    async fn ask_who(&mut self) -> Answer {
        let client = &mut self.client;
        match self.dice.usize(0..7) {
            0 => answer("Probe", client.identity.probe(proto::ProbeRequest {}).await),
            1 => {
                answer("GetPluginInfo", client.identity.get_plugin_info(proto::GetPluginInfoRequest {}).await)
            }
            2 => {
                let request = proto::GetPluginCapabilitiesRequest {};
                answer("GetPluginCapabilities", client.identity.get_plugin_capabilities(request).await)
            }
            3 => {
                let request = proto::ControllerGetCapabilitiesRequest {};
                answer(
                    "ControllerGetCapabilities",
                    client.controller.controller_get_capabilities(request).await,
                )
            }
            4 => {
                let request = proto::GroupControllerGetCapabilitiesRequest {};
                let done = client.groups.group_controller_get_capabilities(request).await;
                answer("GroupControllerGetCapabilities", done)
            }
            5 => {
                let request = proto::NodeGetCapabilitiesRequest {};
                answer("NodeGetCapabilities", client.node.node_get_capabilities(request).await)
            }
            _ => answer("NodeGetInfo", client.node.node_get_info(proto::NodeGetInfoRequest {}).await),
        }
    }

    async fn create_volume(&mut self) -> Answer {
        let mut request = new_volume(&self.name(), 0, self.capability());
        request.capacity_range = Some(self.range());
        request.volume_content_source = match self.dice.usize(0..4) {
            0 => Some(from_snapshot(&self.snapshot())),
            1 => Some(from_volume(&self.volume())),
            _ => None,
        };
        let made = self.client.controller.create_volume(request).await;
        if let Ok(made) = &made {
            let id = made.get_ref().volume.clone().expect("a volume").volume_id;
            self.known.lock().expect("known").volumes.push(id);
        }
        answer("CreateVolume", made)
    }

    async fn stage_and_publish(&mut self) -> Answer {
        let volume_id = self.volume();
        let (staging_target_path, target_path) = self.place(&volume_id);
        let volume_capability = Some(self.capability());
        if self.dice.usize(0..3) > 0 {
            let request = proto::NodeStageVolumeRequest {
                volume_id: volume_id.clone(),
                staging_target_path: staging_target_path.clone(),
                volume_capability: volume_capability.clone(),
                ..Default::default()
            };
            let staged = self.client.node.node_stage_volume(request).await;
            if staged.is_err() {
                return answer("NodeStageVolume", staged);
            }
        }
        let request = proto::NodePublishVolumeRequest {
            volume_id,
            staging_target_path,
            target_path,
            volume_capability,
            readonly: self.dice.usize(0..4) == 0,
            ..Default::default()
        };
        answer("NodePublishVolume", self.client.node.node_publish_volume(request).await)
    }

    async fn unpublish_or_unstage(&mut self) -> Answer {
        let volume_id = self.volume();
        let (staging_target_path, target_path) = self.place(&volume_id);
        if self.dice.usize(0..2) == 0 {
            let request = proto::NodeUnstageVolumeRequest { volume_id, staging_target_path };
            return answer("NodeUnstageVolume", self.client.node.node_unstage_volume(request).await);
        }
        let request = proto::NodeUnpublishVolumeRequest { volume_id, target_path };
        answer("NodeUnpublishVolume", self.client.node.node_unpublish_volume(request).await)
    }
}

async fn drain<T>(mut stream: tonic::Streaming<T>) -> Result<(), Status> {
    while stream.message().await?.is_some() {}
    Ok(())
}

/// Where a volume is on the node, from its record: the targets, and the staging path.
fn places(rig: &Rig, volume: &str) -> (Vec<String>, Option<String>) {
    let state = state_of(&rig.pool_dir(), volume);
    let published = state["published"].as_array().cloned().unwrap_or_default();
    let targets = published.iter().map(|entry| entry["target"].as_str().expect("a path").to_owned());
    (targets.collect(), state["staged"]["path"].as_str().map(str::to_owned))
}

/// Unpublishes, unstages, detaches and deletes all there is.
async fn clear(rig: &mut Rig, known: &Known) {
    let list = proto::ListVolumesRequest::default();
    let list = rig.client.controller.list_volumes(list).await.expect("list").into_inner();
    for volume_id in list.entries.into_iter().map(|entry| entry.volume.expect("a volume").volume_id) {
        let (targets, staged) = places(rig, &volume_id);
        for target_path in targets {
            let request = proto::NodeUnpublishVolumeRequest { volume_id: volume_id.clone(), target_path };
            rig.client.node.node_unpublish_volume(request).await.expect("unpublish");
        }
        if let Some(staging_target_path) = staged {
            let request =
                proto::NodeUnstageVolumeRequest { volume_id: volume_id.clone(), staging_target_path };
            rig.client.node.node_unstage_volume(request).await.expect("unstage");
        }
        let request =
            proto::ControllerUnpublishVolumeRequest { volume_id: volume_id.clone(), ..Default::default() };
        rig.client.controller.controller_unpublish_volume(request).await.expect("detach");
        rig.client.delete_volume(&volume_id).await.expect("delete");
    }
    for (group, members) in &known.groups {
        rig.client.delete_group(group, members).await.expect("delete");
    }
    for snapshot in &known.snapshots {
        rig.client.delete_snapshot(snapshot).await.expect("delete");
    }
}

/// 32 clients do anything for a while: no panic, no code outside the spec's list for that call, no leak.
#[test_with::root]
#[tokio::test(flavor = "multi_thread")]
async fn many_clients_doing_anything_leave_a_driver_that_is_well() {
    let mut rig = Rig::start_with(PoolKind::Xfs, &["--enable-attach"], "error").await;
    std::fs::create_dir_all(rig.kubelet()).expect("mkdir");
    let known = Arc::new(Mutex::new(Known::default()));
    let end = Instant::now() + Duration::from_secs(seconds());
    let mut callers = Vec::new();
    for number in 0..CLIENTS {
        let client = Client::connect(&rig.socket(), Duration::ZERO).await.expect("connect");
        let mut caller = Caller {
            client,
            dice: fastrand::Rng::with_seed(0x9E37_79B9_7F4A_7C15 ^ (number + 1)),
            known: known.clone(),
            dir: rig.kubelet(),
        };
        callers.push(tokio::spawn(async move {
            let mut answers = Vec::new();
            while Instant::now() < end {
                answers.push(caller.call().await);
            }
            answers
        }));
    }
    let mut counts = std::collections::BTreeMap::<(&str, String), usize>::new();
    let mut wrong = std::collections::BTreeSet::new();
    for caller in callers {
        for answer in caller.await.expect("a client") {
            if !allowed(answer.method, answer.code) {
                wrong.insert(format!("{} answered {:?}: {}", answer.method, answer.code, answer.message));
            }
            *counts.entry((answer.method, format!("{:?}", answer.code))).or_default() += 1;
        }
    }
    let calls: usize = counts.values().sum();
    println!("{calls} calls by {CLIENTS} clients: {counts:?}");
    assert!(wrong.is_empty(), "{wrong:#?}");
    assert!(!rig.log().contains("panicked"), "{}", rig.log());
    for method in [
        "CreateVolume",
        "CreateSnapshot",
        "NodePublishVolume",
        "CreateVolumeGroupSnapshot",
        "GetMetadataDelta",
    ] {
        assert!(counts.contains_key(&(method, "Ok".to_owned())), "{method} never succeeded");
    }
    let known = std::mem::take(&mut *known.lock().expect("known"));
    clear(&mut rig, &known).await;
    assert_eq!(devices_below(&rig.pool_dir()).expect("devices").len(), 0, "a device is left");
    for dir in ["volumes", "snapshots", "groups", "staging"] {
        let left = names(&rig.pool_dir().join(dir));
        assert!(left.is_empty(), "{dir} holds {left:?}");
    }
    rig.finish();
}
