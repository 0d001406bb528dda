//! Changing a volume that is there: making it larger, and setting attributes of its device.

use std::collections::HashMap;
use std::fs::File;
use std::path::Path;

use super::locks::Key;
use super::params::parse_tuning;
use super::{Capability, CapacityRange, Driver, Error, Result};
use crate::store::{AccessKind, Tuning, VolumeRecord};
use crate::sys::blockdev;
use crate::sys::loopdev::LoopDevice;
use files::Context;
use files::change;

/// What an expansion came to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Expansion {
    /// The volume's size in bytes.
    pub capacity: u64,
    /// Whether a filesystem is still to be grown on the node.
    pub node_expansion_required: bool,
}

impl Driver {
    /// Makes a volume larger, in use or not; large enough already is done. Snapshots keep the size they
    /// were taken with.
    ///
    /// 1. Extend the file and sync it: after a crash the record still says the old size, and the next use
    ///    cuts the file back to it ([`Driver::truncate_to_record`]). No device shows the new part yet.
    /// 2. Replace the record: this is the commit.
    /// 3. Grow the device: a crash before it leaves a device that stage, publish, a retry and
    ///    `NodeExpandVolume` grow.
    pub fn expand_volume(
        &self,
        id: &str,
        range: CapacityRange,
        capability: Option<&Capability>,
    ) -> Result<Expansion> {
        let record = self.volume(id)?;
        let _guard = self.locks.take(Key::Volume(record.id.clone()))?;
        // Looked up again: it may have been deleted before the lock was ours.
        let mut record = self.volume(id)?;
        let node_expansion_required = match capability.map(|asked| asked.kind_of(&record)).transpose()? {
            Some(kind) => kind != AccessKind::Block,
            None => record.fs_type().is_some(),
        };
        self.truncate_to_record(&record)?;
        let capacity = self.expanded(record.capacity, record.block_size, range)?;
        let path = self.volume_data(&record.id);
        if capacity > record.capacity {
            self.check_host()?;
            let _room = self.reserve(capacity - record.capacity)?;
            let file = File::options().write(true).open(&path).context("open", &path)?;
            change::set_len(&file, &path, capacity)?;
            change::sync(&file, &path)?;
        }
        let capacity = capacity.max(record.capacity);
        record = self.store.update_volume(VolumeRecord { capacity, ..(*record).clone() })?;
        if let Some(device) = LoopDevice::find(&path)? {
            grow(&device, capacity)?;
        }
        Ok(Expansion { capacity: record.capacity, node_expansion_required })
    }

    /// Makes the volume's file as long as its record says: an expansion may have been cut short. No device
    /// is ever larger than the record, so nothing that anybody wrote is cut off. The caller holds the
    /// volume's lock.
    pub(super) fn truncate_to_record(&self, record: &VolumeRecord) -> Result<()> {
        let path = self.volume_data(&record.id);
        let length = std::fs::metadata(&path).context("stat", &path)?.len();
        if length != record.capacity {
            tracing::warn!(volume_id = %record.id, length, capacity = record.capacity, "an expansion was cut short");
            let file = File::options().write(true).open(&path).context("open", &path)?;
            change::set_len(&file, &path, record.capacity)?;
            change::sync(&file, &path)?;
        }
        Ok(())
    }

    /// Sets attributes of a volume's device, now and at every later attach. What is not named stays, so no
    /// name at all is no change.
    ///
    /// The device first: what it refuses is not recorded. A crash between the two leaves an effect that
    /// ends with the device, and a retry records it.
    pub fn modify_volume(&self, id: &str, parameters: &HashMap<String, String>) -> Result<()> {
        let record = self.volume(id)?;
        let asked = parse_tuning(parameters)?;
        let _guard = self.locks.take(Key::Volume(record.id.clone()))?;
        let record = self.volume(id)?;
        if let Some(device) = LoopDevice::find(&self.volume_data(&record.id))? {
            tune(&device, &self.volume_data(&record.id), &asked)?;
        }
        let tuning = Tuning {
            read_ahead_kib: asked.read_ahead_kib.or(record.tuning.read_ahead_kib),
            direct_io: asked.direct_io.or(record.tuning.direct_io),
        };
        self.store.update_volume(VolumeRecord { tuning, ..(*record).clone() })?;
        Ok(())
    }
}

/// Makes a device as large as its volume, if it is not yet.
pub(super) fn grow(device: &LoopDevice, capacity: u64) -> Result<()> {
    if blockdev::size(&device.path())? < capacity {
        device.grow_to_file()?;
    }
    Ok(())
}

/// Sets attributes of a volume's device, whose bytes are at `data`. What is `None` stays as it is.
pub(super) fn tune(device: &LoopDevice, data: &Path, tuning: &Tuning) -> Result<()> {
    if let Some(direct) = tuning.direct_io {
        let file = File::open(data).context("open", data)?;
        device.set_direct_io(direct, &file).map_err(|error| match error.errno() {
            Some(libc::EINVAL) => Error::Unsupported(
                "directIO true is not possible: the pool's filesystem has no direct I/O for this volume"
                    .into(),
            ),
            _ => error.into(),
        })?;
    }
    if let Some(kib) = tuning.read_ahead_kib {
        device.set_read_ahead(kib)?;
    }
    Ok(())
}
