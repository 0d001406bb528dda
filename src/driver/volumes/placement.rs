//! What a router asks a node: how much space there is, which object has a name, and which node was chosen for a new
//! object.
//!
//! A choice is kept in memory for ten minutes, long enough for all tries of one call, by one router or several. Once the
//! object exists, it is found by its name. A volume may be made on any node, so its choice stays. A snapshot is made where
//! its source is: its choice ends with the call, so that the name is free for another source if no object has it.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use crate::driver::error::{Error, Result};
use crate::driver::locks::LockKey;
use crate::driver::request::create::check_name;
use crate::driver::shared::Shared;
use crate::driver::volumes::incoming::TransferTable;
use crate::sys;
use base::DataDirKey;

/// How long a choice is kept after the node was last proposed.
const KEPT: Duration = Duration::from_secs(600);
/// The most choices at a time: more than the objects that anybody makes in ten minutes.
const MOST: usize = 10_000;

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
    pub(in crate::driver) choices: Choices,
}

/// The node chosen for each new object.
#[derive(Debug, Default)]
pub(in crate::driver) struct Choices(Mutex<HashMap<(Named, String), (DataDirKey, Instant)>>);

impl Choices {
    /// The node chosen for `name`: that of an earlier call, unless it is in `not`, or else `proposed`.
    fn choose(
        &self,
        kind: Named,
        name: &str,
        proposed: DataDirKey,
        not: &[DataDirKey],
        now: Instant,
    ) -> Result<DataDirKey> {
        let name = (kind, name.to_owned());
        let mut choices = self.0.lock();
        if let Some((chosen, asked)) = choices.get_mut(&name)
            && now.duration_since(*asked) < KEPT
            && !not.contains(chosen)
        {
            // A call that proposes another node does not prolong the choice: perhaps no caller needs it.
            if *chosen == proposed {
                *asked = now;
            }
            return Ok(*chosen);
        }
        if choices.len() >= MOST {
            choices.retain(|_, (_, asked)| now.duration_since(*asked) < KEPT);
        }
        if choices.len() >= MOST {
            return Err(Error::TooMany { what: format!("{MOST} choices of a node") });
        }
        choices.insert(name, (proposed, now));
        Ok(proposed)
    }

    /// Ends the choice of this node.
    fn end(&self, kind: Named, name: &str, chosen: DataDirKey) {
        let mut choices = self.0.lock();
        let name = (kind, name.to_owned());
        if choices.get(&name).is_some_and(|(key, _)| *key == chosen) {
            choices.remove(&name);
        }
    }
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
        self.choices.choose(kind, name, proposed, not, Instant::now())
    }

    /// The node has answered for the object `name`. If it was the chosen one, the choice ends.
    pub fn end_choice(&self, kind: Named, name: &str, chosen: DataDirKey) -> DataDirKey {
        self.choices.end(kind, name, chosen);
        chosen
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(text: &str) -> DataDirKey {
        text.parse().expect("a key")
    }

    #[test]
    fn the_first_choice_holds_until_it_is_ruled_out_or_forgotten() {
        let choices = Choices::default();
        let (one, two, three) = (key("00000001"), key("00000002"), key("00000003"));
        let start = Instant::now();
        let choose = |proposed, not: &[DataDirKey], after: u64| {
            choices
                .choose(Named::Volume, "a", proposed, not, start + Duration::from_secs(after))
                .expect("a choice")
        };
        assert_eq!(choose(one, &[], 0), one);
        assert_eq!(choose(one, &[], 500), one);
        assert_eq!(choose(two, &[], 1000), one, "kept since it was proposed last");
        assert_eq!(choose(two, &[one], 1000), two, "ruled out");
        assert_eq!(choose(three, &[one], 1000), two);
        assert_eq!(choose(three, &[], 2000), three, "forgotten");
        assert_eq!(choices.choose(Named::Volume, "b", two, &[], start).expect("a choice"), two);
    }

    #[test]
    fn a_snapshots_choice_ends_with_its_call_and_is_not_kept_by_others() {
        let choices = Choices::default();
        let (one, two) = (key("00000001"), key("00000002"));
        let start = Instant::now();
        let choose = |proposed, after: u64| {
            let now = start + Duration::from_secs(after);
            choices.choose(Named::Snapshot, "a", proposed, &[], now).expect("a choice")
        };
        assert_eq!((choose(one, 0), choose(two, 500)), (one, one));
        assert_eq!(choose(two, 700), two, "only another has asked since");
        choices.end(Named::Snapshot, "a", one);
        assert_eq!(choose(one, 701), two, "another's choice stays");
        choices.end(Named::Snapshot, "a", two);
        assert_eq!(choose(one, 702), one);
        let volume = choices.choose(Named::Volume, "a", two, &[], start).expect("a choice");
        assert_eq!(volume, two, "names of each kind are apart");
    }

    #[test]
    fn choices_are_bounded() {
        let choices = Choices::default();
        let now = Instant::now();
        for number in 0..MOST {
            choices.choose(Named::Volume, &number.to_string(), key("00000001"), &[], now).expect("a choice");
        }
        choices.choose(Named::Volume, "more", key("00000001"), &[], now).expect_err("too many");
        choices
            .choose(Named::Volume, "more", key("00000001"), &[], now + KEPT)
            .expect("the others are forgotten");
    }
}
