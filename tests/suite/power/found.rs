//! The objects on a disk, as their records say.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use super::model::Model;
use testkit::names;

/// The objects on a pool, by the names in their records.
#[derive(Default)]
pub struct Found {
    pub volumes: BTreeMap<String, Record>,
    pub snapshots: BTreeMap<String, Record>,
    pub groups: BTreeMap<String, Record>,
}

pub struct Record {
    pub id: String,
    dir: PathBuf,
    pub json: serde_json::Value,
}

impl Record {
    fn read(dir: PathBuf) -> Result<Self, String> {
        let path = dir.join("record.json");
        let reported = |error: &dyn std::fmt::Display| format!("{}: {error}", path.display());
        let bytes = std::fs::read(&path).map_err(|error| reported(&error))?;
        let json: serde_json::Value = serde_json::from_slice(&bytes).map_err(|error| reported(&error))?;
        let id = json["id"].as_str().ok_or_else(|| reported(&"no id"))?.to_owned();
        Ok(Record { id, dir, json })
    }

    fn text(&self, field: &str) -> String {
        self.json[field].as_str().unwrap_or_default().to_owned()
    }

    pub fn data(&self) -> PathBuf {
        self.dir.join("bytes/data.img")
    }
}

impl Found {
    pub fn on(pool: &Path, model: &Model) -> Result<Self, String> {
        let mut found = Found::default();
        let read = |kind: &str| -> Result<Vec<Record>, String> {
            let dir = pool.join(kind);
            let dirs = names(&dir).into_iter().map(|name| dir.join(name));
            // What is retained is deleted, for all but deltas.
            dirs.filter(|dir| !dir.join("deleted.json").exists()).map(Record::read).collect()
        };
        let once = |before: Option<Record>| match before {
            Some(before) => Err(format!("two objects have the name of {}", before.dir.display())),
            None => Ok(()),
        };
        for record in read("volumes")? {
            once(found.volumes.insert(record.text("name"), record))?;
        }
        for record in read("snapshots")? {
            once(found.snapshots.insert(record.text("name"), record))?;
        }
        for group in read("groups")? {
            let name = group.text("name");
            for member in read(&format!("groups/{}/members", group.id))? {
                // A group outlives its volumes.
                let id = member.text("volume");
                let there = found.volumes.iter().find(|(_, volume)| volume.id == id).map(|(name, _)| name);
                let known = || model.volumes.iter().find(|(_, volume)| volume.id.as_ref() == Some(&id));
                let of = there.or_else(|| known().map(|(name, _)| name)).cloned().unwrap_or(id.clone());
                once(found.snapshots.insert(format!("{name}/{of}"), member))?;
            }
            once(found.groups.insert(name, group))?;
        }
        Ok(found)
    }
}
