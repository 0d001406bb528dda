//! What a router asks a node: how much space there is, which object has a name, and which node was chosen for a new
//! object.

use std::sync::Arc;
use std::time::Instant;

use parking_lot::Mutex;

use crate::driver::error::{Error, Result};
use crate::driver::locks::LockKey;
use crate::driver::request::create::check_name;
use crate::driver::shared::Shared;
use crate::driver::volumes::incoming::TransferTable;
use crate::sys;
use base::{Choices, DataDirKey};

/// The space of a node's pool, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Space {
    /// The pool's size; 0 if it does not answer.
    pub total: u64,
    /// What can still be written.
    pub free: u64,
    /// The capacity of all volumes together.
    pub provisioned: u64,
}

/// A kind of object that has a name given by the caller.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Named {
    /// A volume.
    Volume,
    /// A snapshot that is not a member of a group.
    Snapshot,
    /// A group snapshot.
    Group,
}

/// What a router needs to know to place a volume.
#[derive(Debug)]
pub struct Placement {
    pub(in crate::driver) shared: Arc<Shared>,
    pub(in crate::driver) transfers: Arc<TransferTable>,
    pub(in crate::driver) choices: Mutex<Choices<Named>>,
}

impl Placement {
    /// The space at this moment.
    pub fn room(&self) -> Space {
        Space {
            total: sys::space(self.shared.open_pool.dir().path()).map_or(0, |space| space.total),
            free: self.shared.open_pool.free().unwrap_or(0),
            provisioned: self.shared.store.read(|index| {
                let capacities = index.volumes_after(None).map(|record| record.capacity);
                capacities.fold(self.transfers.reserved(), u64::saturating_add)
            }),
        }
    }

    /// The id of the object with this name, and whether it is a volume that is still being transferred. Fails with
    /// [`Error::Busy`] while one is made.
    pub fn find_named(&self, kind: Named, name: &str) -> Result<Option<(String, bool)>> {
        check_name("name", name)?;
        self.shared.store.check_alive()?;
        let making = match kind {
            Named::Volume => LockKey::VolumeName(name.to_owned()),
            Named::Snapshot => LockKey::SnapshotName(name.to_owned()),
            Named::Group => LockKey::GroupName(name.to_owned()),
        };
        // Looked at before what there is: whatever is made until then is found.
        let is_being_made = self.shared.locks.is_held(&making);
        // Read before the volumes: a transfer that becomes a volume in between is found among them.
        let in_progress = self.transfers.id_of(name).filter(|_| kind == Named::Volume);
        let found = self.shared.store.read(|index| match kind {
            Named::Volume => index.volume_named(name).map(|record| record.id.to_string()),
            Named::Snapshot => index.snapshot_named(name).map(|record| record.id.to_string()),
            Named::Group => index.group_named(name).map(|record| record.id.to_string()),
        });
        let in_progress = in_progress.map(|id| (id.to_string(), true));
        match found.map(|id| (id, false)).or(in_progress) {
            None if is_being_made => Err(Error::Busy { what: making.to_string() }),
            found => Ok(found),
        }
    }

    /// The node on which the new object `name` is made: the first one proposed that is not in `not`.
    pub fn choose_node(
        &self,
        kind: Named,
        name: &str,
        proposed: DataDirKey,
        not: &[DataDirKey],
    ) -> Result<DataDirKey> {
        check_name("name", name)?;
        let chosen = self.choices.lock().choose(kind, name, proposed, not, Instant::now());
        chosen.ok_or_else(|| Error::TooMany { what: format!("{} choices of a node", base::MOST_CHOICES) })
    }

    /// The node has answered for the object `name`. If it was the chosen one, the choice ends.
    pub fn end_choice(&self, kind: Named, name: &str, chosen: DataDirKey) -> DataDirKey {
        self.choices.lock().end(kind, name, chosen);
        chosen
    }
}
