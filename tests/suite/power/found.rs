//! The objects on a disk, by their records.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use crate::model::world::World;
use testkit::names;

/// The objects on a pool, by their ids. Retained snapshots count as deleted.
pub struct Found {
    pub volumes: BTreeMap<String, Record>,
    /// Including members of groups.
    pub snapshots: BTreeMap<String, Record>,
    groups: BTreeMap<String, Record>,
}

pub struct Record {
    dir: PathBuf,
    json: serde_json::Value,
}

impl Record {
    pub fn data(&self) -> PathBuf {
        self.dir.join("bytes/data.img")
    }

    fn read_ahead(&self) -> Option<u32> {
        self.json["tuning"]["read_ahead_kib"].as_u64().map(|kib| kib as u32)
    }
}

fn read(pool: &Path, kind: &str) -> Result<BTreeMap<String, Record>, String> {
    let dirs = names(&pool.join(kind)).into_iter().map(|id| (pool.join(kind).join(&id), id));
    let records = dirs.filter(|(dir, _)| !dir.join("deleted.json").exists()).map(|(dir, id)| {
        let path = dir.join("record.json");
        let reported = |error: &dyn std::fmt::Display| format!("{}: {error}", path.display());
        let bytes = std::fs::read(&path).map_err(|error| reported(&error))?;
        let json: serde_json::Value = serde_json::from_slice(&bytes).map_err(|error| reported(&error))?;
        match json["id"] == *id {
            true => Ok((id, Record { dir, json })),
            false => Err(reported(&format!("the id is {}", json["id"]))),
        }
    });
    records.collect()
}

impl Found {
    pub fn on(pool: &Path) -> Result<Self, String> {
        let (volumes, mut snapshots, groups) =
            (read(pool, "volumes")?, read(pool, "snapshots")?, read(pool, "groups")?);
        for id in groups.keys() {
            snapshots.extend(read(pool, &format!("groups/{id}/members"))?);
        }
        Ok(Found { volumes, snapshots, groups })
    }

    /// Checks that the disk has exactly the objects of a world, with the names in their requests, and that volumes have the
    /// right parameters.
    pub fn fits(&self, world: &World) -> Result<(), String> {
        let named = |record: &Record| record.json["name"].as_str().unwrap_or_default().to_owned();
        let on_disk = |records: &BTreeMap<String, Record>| -> BTreeMap<String, String> {
            records.iter().map(|(id, record)| (id.clone(), named(record))).collect()
        };
        let volumes =
            world.volumes.iter().map(|(id, volume)| (id.clone(), format!("volume {}", volume.name)));
        same("volumes", on_disk(&self.volumes), volumes.collect())?;
        let groups = world.groups.iter().map(|(id, group)| (id.clone(), format!("group {}", group.name)));
        same("groups", on_disk(&self.groups), groups.collect())?;
        let names = world.snapshots.iter().map(|(id, snapshot)| {
            let name = snapshot.name.map(|name| format!("snapshot {name}"));
            // A member has no name of its own.
            (id.clone(), name.unwrap_or_else(|| self.snapshots.get(id).map(named).unwrap_or_default()))
        });
        same("snapshots", on_disk(&self.snapshots), names.collect())?;
        // This decides between worlds that differ only by a ControllerModifyVolume.
        for (id, volume) in &world.volumes {
            let found = self.volumes[id].read_ahead();
            if !volume.read_ahead.contains(&found) {
                let (name, want) = (&volume.name, &volume.read_ahead);
                return Err(format!("volume {name} has a read-ahead of {found:?}, want {want:?}"));
            }
        }
        Ok(())
    }
}

type NamesById = BTreeMap<String, String>;

fn same(what: &str, on_disk: NamesById, want: NamesById) -> Result<(), String> {
    match on_disk == want {
        true => Ok(()),
        false => Err(format!("{what} on the disk are {on_disk:?}, want {want:?}")),
    }
}
