//! Records as JSON: how they are written and read. Where they lie, and in which order they are written, is not here.

use std::fs;
use std::path::Path;

use serde::Serialize;
use serde::de::DeserializeOwned;

use super::records::{self, Checked, VolumeRecord, VolumeState};
use super::{Error, Result};
use crate::sys::slots;
use base::ObjectDir;
use files::Context;

pub(super) fn encode(record: &impl Serialize) -> Vec<u8> {
    let mut bytes = serde_json::to_vec_pretty(record).expect("records hold only strings, numbers and lists");
    bytes.push(b'\n');
    bytes
}

/// Reads the record of a volume, with what is done to it now.
pub(super) fn read_volume(dir: &ObjectDir) -> Result<VolumeRecord> {
    let record: VolumeRecord = read_named(dir.path(), |record: &VolumeRecord| record.id.as_str())?;
    // Calls that need the state report its damage.
    let attached = read_state(dir).unwrap_or_default().attached;
    Ok(VolumeRecord { attached, ..record })
}

pub(super) fn read_state(dir: &ObjectDir) -> Result<VolumeState> {
    let path = dir.state();
    slots::read(&path)?.map_or_else(|| Ok(VolumeState::default()), |bytes| decode(&path, &bytes))
}

/// Reads the record in an object's directory, whose name must be the record's id.
pub(super) fn read_named<R: Checked + DeserializeOwned>(dir: &Path, id: impl Fn(&R) -> &str) -> Result<R> {
    let path = ObjectDir::new(dir).record();
    let record: R = decode(&path, &fs::read(&path).context("read", &path)?)?;
    match dir.file_name().is_some_and(|name| name == id(&record)) {
        true => Ok(record),
        false => Err(Error::Misplaced { path, id: id(&record).to_owned() }),
    }
}

pub(super) fn read_optional<R: Checked + DeserializeOwned>(path: &Path) -> Result<Option<R>> {
    match fs::read(path) {
        Ok(bytes) => decode(path, &bytes).map(Some),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error).context("read", path).map_err(Error::Sys),
    }
}

/// Checks the version before anything else: a record of a later version may look quite different.
pub(super) fn decode<R: Checked + DeserializeOwned>(path: &Path, bytes: &[u8]) -> Result<R> {
    #[derive(serde::Deserialize)]
    struct Versioned {
        version: u32,
    }
    let broken = |source| Error::Unreadable { path: path.to_owned(), source };
    let Versioned { version } = serde_json::from_slice(bytes).map_err(broken)?;
    if version != records::VERSION {
        return Err(Error::UnknownVersion { path: path.to_owned(), version, known: records::VERSION });
    }
    let record: R = serde_json::from_slice(bytes).map_err(broken)?;
    match record.check() {
        Ok(()) => Ok(record),
        Err(what) => Err(Error::Impossible { path: path.to_owned(), what }),
    }
}
