//! Whether a volume is well (`VolumeCondition`), as the controller sees it: its bytes, and the room below
//! them. The node's view is in `node/stats.rs`.

use std::sync::Arc;

use super::{Driver, Error, Result};
use crate::store::VolumeRecord;
use base::VolumeId;

/// How a volume is, for people.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Condition {
    /// Whether something is wrong.
    pub abnormal: bool,
    /// What, or that all is well.
    pub message: String,
}

impl Condition {
    pub(super) fn normal(message: &str) -> Self {
        Condition { abnormal: false, message: message.to_owned() }
    }

    pub(super) fn abnormal(message: String) -> Self {
        Condition { abnormal: true, message }
    }
}

impl Driver {
    /// How volumes are; one look at the pool for all of them.
    pub fn conditions(&self, volumes: &[Arc<VolumeRecord>]) -> Vec<Condition> {
        let shortage = match self.ready() {
            Ok(()) => self.open_pool.shortage().unwrap_or_else(|error| Some(base::report(&error))),
            Err(error) => Some(base::report(&error)),
        };
        let condition = |record: &Arc<VolumeRecord>| match (self.bytes(record), &shortage) {
            (Err(what), _) => Condition::abnormal(what),
            (Ok(()), Some(shortage)) => Condition::abnormal(format!("{shortage}: writes will fail")),
            (Ok(()), None) => Condition::normal(&match self.cached {
                Some(cached) => format!("the volume's bytes are there; {cached}"),
                None => "the volume's bytes are there".to_owned(),
            }),
        };
        volumes.iter().map(condition).collect()
    }

    /// Whether the file behind a volume is there, and as long as it must be.
    fn bytes(&self, record: &VolumeRecord) -> Result<(), String> {
        let path = self.volume_data(&record.id);
        match std::fs::metadata(&path) {
            Err(error) => Err(format!("{} cannot be read: {error}", path.display())),
            Ok(meta) if meta.len() < record.capacity => Err(format!(
                "{} has {} bytes of {}: its end is missing",
                path.display(),
                meta.len(),
                record.capacity
            )),
            Ok(_) => Ok(()),
        }
    }

    /// What is wrong with a volume that is on the disk and cannot be served; `None` for all others.
    pub fn withheld(&self, id: &str) -> Option<Condition> {
        let parsed = id.parse::<VolumeId>().ok()?;
        match self.store.check_readable(parsed.as_str()) {
            Ok(()) => None,
            Err(error) => Some(Condition::abnormal(base::report(&Error::from(error)))),
        }
    }
}
