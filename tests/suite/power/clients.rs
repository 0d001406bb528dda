//! Clients that make every call that changes something, and write down what was acknowledged.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use csi_client::{Client, block_capability, from_snapshot, from_volume, new_volume};
use proto::ControllerModifyVolumeRequest;

use super::model::{Call, Group, Phase, Snapshot, Stage, Turn, Volume};
use fastrand::Rng;
use testkit::content::{Content, open_device};
use testkit::{BLOCK, MIB};

pub const SIZE: i64 = 8 * MIB;
const LARGEST: i64 = 20 * MIB;
const STEP: i64 = 2 * MIB;
const VOLUMES: usize = 3;
const SNAPSHOTS: usize = 6;

/// A client with volumes of its own, so that none of its calls may fail.
pub struct Worker {
    pub number: usize,
    pub client: Client,
    pub kubelet: PathBuf,
    pub stage: Arc<Stage>,
    pub random: Rng,
    pub stop: Arc<AtomicBool>,
    made: usize,
    /// Its volumes and their devices.
    volumes: BTreeMap<String, PathBuf>,
    snapshots: Vec<String>,
    groups: Vec<String>,
}

impl Worker {
    pub fn new(
        number: usize,
        client: Client,
        kubelet: PathBuf,
        stage: Arc<Stage>,
        stop: Arc<AtomicBool>,
        seed: u64,
    ) -> Self {
        let (volumes, snapshots, groups) = Default::default();
        Worker {
            number,
            client,
            kubelet,
            stage,
            random: Rng::with_seed(seed),
            stop,
            made: 0,
            volumes,
            snapshots,
            groups,
        }
    }

    /// Works until `stop` is set.
    pub async fn work(mut self) {
        self.create_volume(Call::CreateVolume, None).await;
        while !self.stop.load(Ordering::Relaxed) {
            let usual = self.usual();
            match self.stage.turn(self.number) {
                Turn::Wait => {}
                Turn::Free => drop(self.make(usual).await),
                Turn::This(call) => {
                    // Where it cannot be made yet, another may help.
                    if !self.make(call).await {
                        self.make(usual).await;
                    }
                    continue;
                }
            }
            tokio::time::sleep(Duration::from_millis(1 + self.random.u64(0..8))).await;
        }
    }

    fn usual(&mut self) -> Call {
        match self.random.u64(0..100) {
            0..30 => Call::Write,
            30..35 => Call::Discard,
            35..53 => Call::CreateSnapshot,
            53..58 => Call::CreateVolume,
            58..64 => Call::Restore,
            64..68 => Call::Clone,
            68..73 => Call::Expand,
            73..78 => Call::Modify,
            78..87 => Call::DeleteSnapshot,
            87..92 => Call::CreateGroup,
            92..96 => Call::DeleteGroup,
            _ => Call::DeleteVolume,
        }
    }

    /// Makes a call, where it can be made: it needs something, and nothing may grow for ever.
    async fn make(&mut self, call: Call) -> bool {
        let which = self.random.u64(0..self.volumes.len() as u64) as usize;
        let volume = self.volumes.keys().nth(which).expect("there is always one").clone();
        let has_room = self.volumes.len() < VOLUMES;
        match call {
            Call::Write => self.write(&volume),
            Call::Discard => self.discard(&volume),
            Call::CreateVolume if has_room => self.create_volume(call, None).await,
            Call::Restore if has_room && !self.snapshots.is_empty() => {
                let snapshot = self.snapshots[0].clone();
                self.create_volume(call, Some(&snapshot)).await;
            }
            Call::Clone if has_room => self.create_volume(call, Some(&volume)).await,
            Call::CreateSnapshot if self.snapshots.len() < SNAPSHOTS => self.create_snapshot(&volume).await,
            Call::DeleteSnapshot if self.snapshots.len() > 1 => self.delete_snapshot().await,
            Call::CreateGroup if self.groups.len() < 2 => self.create_group().await,
            Call::DeleteGroup if !self.groups.is_empty() => self.delete_group().await,
            Call::Expand => return self.expand(&volume).await,
            Call::Modify => self.modify(&volume).await,
            Call::DeleteVolume if self.volumes.len() > 1 => self.delete_volume(&volume).await,
            _ => return false,
        }
        true
    }

    fn name(&mut self, kind: &str) -> String {
        self.made += 1;
        format!("{kind} {}.{}", self.number, self.made)
    }

    fn id(&self, volume: &str) -> String {
        self.stage.look(|model| model.volumes[volume].id.clone()).expect("acknowledged")
    }

    /// Makes a volume, empty or from the volume or snapshot of a name, and attaches it.
    async fn create_volume(&mut self, call: Call, source: Option<&str>) {
        let name = self.name("volume");
        let (source, size, content) = self.stage.look(|model| match (call, source) {
            (Call::Clone, Some(source)) => {
                let of = &model.volumes[source];
                (Some(from_volume(of.id.as_ref().expect("acknowledged"))), of.size, of.content.clone())
            }
            (_, Some(source)) => {
                let of = &model.snapshots[source];
                (Some(from_snapshot(of.id.as_ref().expect("acknowledged"))), of.size, of.content.clone())
            }
            (_, None) => (None, SIZE as u64, Arc::default()),
        });
        let mut request = new_volume(&name, size as i64, block_capability());
        request.volume_content_source = source;
        self.stage.begin(|model| {
            let volume = Volume {
                id: None,
                phase: Phase::Making,
                size,
                growing: None,
                read_ahead: None,
                retuned: None,
                content,
                unsure: BTreeMap::new(),
            };
            model.volumes.insert(name.clone(), volume);
        });
        let made = self.client.create_volume(request).await.expect("CreateVolume");
        assert_eq!(made.capacity_bytes as u64, size);
        self.stage.acknowledged(self.number, call, |model| {
            let volume = model.volume(&name);
            (volume.id, volume.phase) = (Some(made.volume_id.clone()), Phase::There);
        });
        let device = self.client.publish(&made.volume_id, block_capability(), false, &self.kubelet).await;
        self.volumes.insert(name, device.expect("publish"));
    }

    fn range(&mut self, volume: &str, longest: u64) -> (u64, u64) {
        let blocks = self.stage.look(|model| model.volumes[volume].size) / BLOCK;
        let start = self.random.u64(0..blocks);
        (start, 1 + self.random.u64(0..longest.min(blocks - start)))
    }

    /// Writes and syncs: what counts is what fsync(2) said is there.
    fn write(&mut self, volume: &str) {
        let (start, count) = self.range(volume, 60);
        let fill = 1 + self.random.u64(0..255) as u8;
        let blocks = start..start + count;
        self.stage.begin(|model| model.volume(volume).unsure.extend(blocks.map(|block| (block, Some(fill)))));
        self.change(Call::Write, volume, |content, device| content.write(device, start, count, fill));
    }

    fn discard(&mut self, volume: &str) {
        let (start, count) = self.range(volume, 200);
        let blocks = start..start + count;
        self.stage.begin(|model| model.volume(volume).unsure.extend(blocks.map(|block| (block, None))));
        self.change(Call::Discard, volume, |content, device| content.discard(device, start, count));
    }

    fn change(&mut self, call: Call, volume: &str, change: impl FnOnce(&mut Content, &std::path::Path)) {
        let device = &self.volumes[volume];
        let mut content = self.stage.look(|model| (*model.volumes[volume].content).clone());
        tokio::task::block_in_place(|| {
            change(&mut content, device);
            open_device(device).sync_all().expect("sync the device");
        });
        self.stage.acknowledged(self.number, call, |model| {
            let volume = model.volume(volume);
            (volume.content, volume.unsure) = (Arc::new(content), BTreeMap::new());
        });
    }

    async fn create_snapshot(&mut self, volume: &str) {
        let (name, id) = (self.name("snapshot"), self.id(volume));
        self.stage.begin(|model| {
            let of = &model.volumes[volume];
            let snapshot = Snapshot {
                id: None,
                phase: Phase::Making,
                volume: volume.to_owned(),
                group: None,
                order: model.next_order(volume),
                size: of.size,
                content: of.content.clone(),
            };
            model.snapshots.insert(name.clone(), snapshot);
        });
        let made = self.client.create_snapshot(&name, &id).await.expect("CreateSnapshot");
        self.stage.acknowledged(self.number, Call::CreateSnapshot, |model| {
            let snapshot = model.snapshot(&name);
            (snapshot.id, snapshot.phase) = (Some(made.snapshot_id), Phase::There);
        });
        self.snapshots.push(name);
    }

    async fn delete_snapshot(&mut self) {
        let which = self.random.u64(0..self.snapshots.len() as u64) as usize;
        let name = self.snapshots.remove(which);
        let id = self.stage.look(|model| model.snapshots[&name].id.clone()).expect("acknowledged");
        self.stage.begin(|model| model.snapshot(&name).phase = Phase::Going);
        self.client.delete_snapshot(&id).await.expect("DeleteSnapshot");
        self.stage.acknowledged(self.number, Call::DeleteSnapshot, |model| {
            model.snapshot(&name).phase = Phase::Gone
        });
    }

    async fn create_group(&mut self) {
        let name = self.name("group");
        let names: Vec<String> = self.volumes.keys().take(2).cloned().collect();
        let ids: Vec<String> = names.iter().map(|name| self.id(name)).collect();
        self.stage.begin(|model| {
            model.groups.insert(name.clone(), Group { id: None, phase: Phase::Making });
            for volume in &names {
                let of = &model.volumes[volume];
                let member = Snapshot {
                    id: None,
                    phase: Phase::Making,
                    volume: volume.clone(),
                    group: Some(name.clone()),
                    order: model.next_order(volume),
                    size: of.size,
                    content: of.content.clone(),
                };
                model.snapshots.insert(format!("{name}/{volume}"), member);
            }
        });
        let made = self.client.create_group(&name, &ids).await.expect("CreateVolumeGroupSnapshot");
        self.stage.acknowledged(self.number, Call::CreateGroup, |model| {
            for member in made.snapshots {
                let at = ids.iter().position(|id| *id == member.source_volume_id).expect("one of ours");
                let key = format!("{name}/{}", names[at]);
                model.snapshot(&key).id = Some(member.snapshot_id);
            }
            model.groups.get_mut(&name).expect("begun").id = Some(made.group_snapshot_id);
            model.set_group(&name, Phase::There);
        });
        self.groups.push(name);
    }

    async fn delete_group(&mut self) {
        let name = self.groups.remove(0);
        let (id, members) = self.stage.look(|model| {
            let members = model.snapshots.values().filter(|member| member.group.as_ref() == Some(&name));
            let ids: Vec<String> = members.filter_map(|member| member.id.clone()).collect();
            (model.groups[&name].id.clone().expect("acknowledged"), ids)
        });
        self.stage.begin(|model| model.set_group(&name, Phase::Going));
        self.client.delete_group(&id, &members).await.expect("DeleteVolumeGroupSnapshot");
        self.stage.acknowledged(self.number, Call::DeleteGroup, |model| model.set_group(&name, Phase::Gone));
    }

    async fn expand(&mut self, volume: &str) -> bool {
        let (id, size) = (self.id(volume), self.stage.look(|model| model.volumes[volume].size) as i64 + STEP);
        if size > LARGEST {
            return false;
        }
        self.stage.begin(|model| model.volume(volume).growing = Some(size as u64));
        let grown = self.client.expand_volume(&id, size).await.expect("ControllerExpandVolume");
        assert_eq!(grown.capacity_bytes, size);
        self.stage.acknowledged(self.number, Call::Expand, |model| {
            let volume = model.volume(volume);
            (volume.size, volume.growing) = (size as u64, None);
        });
        true
    }

    async fn modify(&mut self, volume: &str) {
        let (id, kib) = (self.id(volume), 4 * (1 + self.random.u64(0..256)) as u32);
        self.stage.begin(|model| model.volume(volume).retuned = Some(kib));
        let request = ControllerModifyVolumeRequest {
            volume_id: id,
            mutable_parameters: [("readAheadKiB".to_owned(), kib.to_string())].into(),
            ..Default::default()
        };
        self.client.controller.controller_modify_volume(request).await.expect("ControllerModifyVolume");
        self.stage.acknowledged(self.number, Call::Modify, |model| {
            let volume = model.volume(volume);
            (volume.read_ahead, volume.retuned) = (Some(kib), None);
        });
    }

    async fn delete_volume(&mut self, volume: &str) {
        let id = self.id(volume);
        self.volumes.remove(volume);
        self.client.unpublish(&id, &self.kubelet).await.expect("unpublish");
        self.stage.begin(|model| model.volume(volume).phase = Phase::Going);
        self.client.delete_volume(&id).await.expect("DeleteVolume");
        self.stage
            .acknowledged(self.number, Call::DeleteVolume, |model| model.volume(volume).phase = Phase::Gone);
    }
}
