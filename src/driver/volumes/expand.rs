//! Changes an existing volume: makes it larger, and sets attributes of its device.

use std::collections::HashMap;
use std::fs::File;
use std::path::Path;

use crate::driver::devices::superblock::Superblock;
use crate::driver::error::{Error, Result};
use crate::driver::request::capability::Capability;
use crate::driver::request::create::CapacityRange;
use crate::driver::request::params::parse_tuning;
use crate::driver::volumes::make::Volumes;
use crate::store::{AccessKind, Tuning, VolumeRecord};
use crate::sys::blockdev;
use crate::sys::loopdev::LoopDevice;
use files::Context;
use files::change;

/// The result of an expansion.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Expansion {
    /// The volume's size in bytes.
    pub capacity: u64,
    /// Whether a filesystem must still be grown on the node.
    pub node_expansion_required: bool,
}

impl Volumes {
    /// Makes a volume larger, in use or not. Succeeds if it is large enough already. Snapshots keep their size.
    ///
    /// 1. Extend the file and sync it. After a crash the record still has the old size, and the next use truncates the file
    ///    to it ([`Shared::undo_cut_expansion`](crate::driver::shared::Shared::undo_cut_expansion)). No device shows the new part yet.
    /// 2. Replace the record: this is the commit.
    /// 3. Grow the device. After a crash before this step, stage, publish, a retry or `NodeExpandVolume` grows it.
    pub fn expand(
        &self,
        id: &str,
        range: CapacityRange,
        capability: Option<&Capability>,
    ) -> Result<Expansion> {
        let volume = self.shared.lock_volume(id)?;
        let mut record = volume.record.clone();
        let asked = capability.map(|asked| asked.kind_for(&record)).transpose()?;
        let staged = self.shared.store.volume_state(&record.id)?.staged.map(|staged| staged.access);
        let is_filesystem = match staged.or(asked) {
            Some(kind) => kind != AccessKind::Block,
            None => record.fs_type().is_some(),
        };
        self.shared.undo_cut_expansion(&volume)?;
        let capacity = self.capacity.of_expanded(record.capacity, record.block_size, range)?;
        let path = self.shared.volume_data(&record.id);
        let device = LoopDevice::find(&path)?;
        if capacity > record.capacity {
            // Asked of the device if there is one: it has what is not written back yet.
            let place = device.as_ref().map_or(path.clone(), LoopDevice::path);
            if let Some(found) = Superblock::read(&place)?.filter(|_| is_filesystem) {
                found.check_growth("capacity_range.required_bytes", capacity)?;
            }
            self.shared.check_room()?;
            let _room = self.capacity.reserve(capacity - record.capacity)?;
            let file = File::options().write(true).open(&path).context("open", &path)?;
            change::set_len(&file, &path, capacity)?;
            change::sync(&file, &path)?;
        }
        let capacity = capacity.max(record.capacity);
        record = self.shared.store.update_volume(VolumeRecord { capacity, ..(*record).clone() })?;
        if let Some(device) = device {
            grow(&device, capacity)?;
        }
        Ok(Expansion { capacity: record.capacity, node_expansion_required: is_filesystem })
    }

    /// Sets attributes of a volume's device, now and at every later attach. Attributes that are not named stay as they are.
    ///
    /// The device is set first, so that a value which it refuses is not recorded. After a crash between the two, the value
    /// lasts until the device is detached, and a retry records it.
    pub fn modify(&self, id: &str, parameters: &HashMap<String, String>) -> Result<()> {
        let record = self.shared.lock_volume(id)?;
        let asked = parse_tuning(parameters)?;
        if let Some(device) = LoopDevice::find(&self.shared.volume_data(&record.id))? {
            tune(&device, &self.shared.volume_data(&record.id), &asked)?;
        }
        let tuning = Tuning {
            read_ahead_kib: asked.read_ahead_kib.or(record.tuning.read_ahead_kib),
            direct_io: asked.direct_io.or(record.tuning.direct_io),
        };
        self.shared.store.update_volume(VolumeRecord { tuning, ..(*record).clone() })?;
        Ok(())
    }
}

/// Makes a device as large as its volume.
pub(in crate::driver) fn grow(device: &LoopDevice, capacity: u64) -> Result<()> {
    if blockdev::size(&device.path())? < capacity {
        device.grow_to_file()?;
    }
    Ok(())
}

/// Sets attributes of a volume's device, whose bytes are at `data`. `None` leaves one unchanged.
pub(in crate::driver) fn tune(device: &LoopDevice, data: &Path, tuning: &Tuning) -> Result<()> {
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
