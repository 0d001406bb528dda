//! What is on the disk of a node of the simulation.

use std::collections::{BTreeMap, BTreeSet};

use base::DataDirKey;
use proto::volume_content_source::{SnapshotSource, Type, VolumeSource};
use tokio::time::Instant;
use tonic::Status;

/// What a power cut leaves.
#[derive(Clone, Default)]
pub struct Disk {
    pub volumes: BTreeMap<String, Volume>,
    pub snapshots: BTreeMap<String, Snapshot>,
    pub copies: BTreeMap<String, Copy>,
}

#[derive(Clone, Debug)]
pub struct Volume {
    pub name: String,
    pub bytes: i64,
    /// Which bytes it holds: two that are equal have the same number.
    pub content: u64,
    pub source: Option<Type>,
}

#[derive(Clone, Debug)]
pub struct Snapshot {
    pub name: String,
    pub volume_id: String,
    pub content: u64,
}

/// A volume that is on its way from another node.
#[derive(Clone)]
pub struct Copy {
    pub volume: Volume,
    pub source_id: String,
    pub asked: Instant,
    /// Parts that are still to come.
    pub left: u32,
}

pub fn is_same(volume: &Volume, request: &proto::CreateVolumeRequest) -> Result<(), Status> {
    let bytes = request.capacity_range.map_or(0, |range| range.required_bytes);
    let source = request.volume_content_source.clone().and_then(|source| source.r#type);
    match volume.bytes == bytes && volume.source == source {
        true => Ok(()),
        false => Err(Status::already_exists("another volume has the name")),
    }
}

impl Disk {
    pub fn ids_named(&self, name: &str) -> Vec<String> {
        let named = self.volumes.iter().filter(|(_, volume)| volume.name == name);
        named.map(|(id, _)| id.clone()).collect()
    }

    /// Of volumes, copies and snapshots.
    pub fn ids(&self) -> BTreeSet<String> {
        self.volumes.keys().chain(self.copies.keys()).chain(self.snapshots.keys()).cloned().collect()
    }

    pub fn name_of(&self, id: &str) -> Option<&str> {
        let volume = self.volumes.get(id).or_else(|| Some(&self.copies.get(id)?.volume));
        volume.map(|volume| volume.name.as_str())
    }

    pub fn provisioned(&self) -> u64 {
        let volumes = self.volumes.values().chain(self.copies.values().map(|copy| &copy.volume));
        volumes.map(|volume| volume.bytes as u64).sum()
    }

    pub fn volume_named(&self, name: &str) -> Option<String> {
        self.volumes.iter().find(|(_, volume)| volume.name == name).map(|(id, _)| id.clone())
    }

    pub fn copy_named(&self, name: &str) -> Option<String> {
        self.copies.iter().find(|(_, copy)| copy.volume.name == name).map(|(id, _)| id.clone())
    }

    pub fn snapshot_named(&self, name: &str) -> Option<String> {
        self.snapshots.iter().find(|(_, snapshot)| snapshot.name == name).map(|(id, _)| id.clone())
    }

    /// What a source holds. Of one that is elsewhere, a driver says so only to calls that have requisite topologies.
    pub fn content(&self, source: &Type, key: DataDirKey, has_requisite: bool) -> Result<u64, Status> {
        let id = id_of(source);
        let found = match source {
            Type::Snapshot(_) => self.snapshots.get(id).map(|snapshot| snapshot.content),
            Type::Volume(_) => self.volumes.get(id).map(|volume| volume.content),
        };
        found.ok_or_else(|| match DataDirKey::of(id) == Some(key) || !has_requisite {
            true => Status::not_found("no such source"),
            false => Status::resource_exhausted("the source is on another node"),
        })
    }
}

pub fn id_of(source: &Type) -> &str {
    match source {
        Type::Snapshot(SnapshotSource { snapshot_id: id }) | Type::Volume(VolumeSource { volume_id: id }) => {
            id
        }
    }
}

pub fn snapshot(id: &str, snapshot: &Snapshot) -> proto::Snapshot {
    proto::Snapshot {
        snapshot_id: id.to_owned(),
        source_volume_id: snapshot.volume_id.clone(),
        ready_to_use: true,
        ..Default::default()
    }
}

/// A page in the order of ids, and the token behind it: the id that comes next.
pub fn page<'d, T>(
    objects: &'d BTreeMap<String, T>,
    most: i32,
    token: &str,
) -> (impl Iterator<Item = (&'d String, &'d T)>, String) {
    let most = usize::try_from(most).ok().filter(|most| *most > 0).unwrap_or(usize::MAX);
    let rest = objects.range(token.to_owned()..);
    let next = rest.clone().nth(most).map(|(id, _)| id.clone()).unwrap_or_default();
    (rest.take(most), next)
}
