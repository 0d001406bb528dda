//! What the router of a cluster asks of a node: how much room there is, which objects have a name, and which node it is
//! that a new volume was given to.
//!
//! A choice is kept for some minutes, in memory: long enough that all tries of one CreateVolume, by one router or several,
//! meet it. Once the volume is there, its name says where.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use super::request::check_name;
use super::shared::Shared;
use super::transfer_table::TransferTable;
use super::{Error, Result};
use crate::sys;
use base::Key;

/// How long a choice is kept after it was last asked for.
const KEPT: Duration = Duration::from_secs(600);
/// Choices at once: more than anybody makes volumes in ten minutes.
const MOST: usize = 10_000;

/// The space of a node's pool, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Space {
    /// The pool's size; 0 where it does not answer.
    pub total: u64,
    /// What can still be written.
    pub free: u64,
    /// What all volumes together may hold.
    pub provisioned: u64,
}

/// An object that has a name of the caller's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
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
    pub(super) shared: Arc<Shared>,
    pub(super) transfers: Arc<TransferTable>,
    pub(super) choices: Choices,
}

/// Which node each new volume was given to.
#[derive(Debug, Default)]
pub(super) struct Choices(Mutex<HashMap<String, (Key, Instant)>>);

impl Choices {
    /// The first choice for `name` that is not among `not`: an earlier one, or `proposed`.
    fn choose(&self, name: &str, proposed: Key, not: &[Key], now: Instant) -> Result<Key> {
        let mut choices = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((chosen, asked)) = choices.get_mut(name)
            && now.duration_since(*asked) < KEPT
            && !not.contains(chosen)
        {
            *asked = now;
            return Ok(*chosen);
        }
        if choices.len() >= MOST {
            choices.retain(|_, (_, asked)| now.duration_since(*asked) < KEPT);
        }
        if choices.len() >= MOST {
            return Err(Error::Busy { what: format!("{MOST} volumes that are being made") });
        }
        choices.insert(name.to_owned(), (proposed, now));
        Ok(proposed)
    }
}

impl Placement {
    /// The room of now.
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

    /// The id of the object that a client gave this name, and whether it is a volume that is still being transferred.
    pub fn find_named(&self, kind: Named, name: &str) -> Result<Option<(String, bool)>> {
        check_name("name", name)?;
        self.shared.store.check_alive()?;
        // Before the volumes: what becomes one in between is found among them.
        let in_progress = self.transfers.id_of(name).filter(|_| kind == Named::Volume);
        let found = self.shared.store.read(|index| match kind {
            Named::Volume => index.volume_named(name).map(|record| record.id.to_string()),
            Named::Snapshot => index.snapshot_named(name).map(|record| record.id.to_string()),
            Named::Group => index.group_named(name).map(|record| record.id.to_string()),
        });
        let in_progress = in_progress.map(|id| (id.to_string(), true));
        Ok(found.map(|id| (id, false)).or(in_progress))
    }

    /// The node that the new volume `name` is made on: the one that was proposed first and is not among `not`.
    pub fn choose_node(&self, name: &str, proposed: Key, not: &[Key]) -> Result<Key> {
        check_name("name", name)?;
        self.choices.choose(name, proposed, not, Instant::now())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(text: &str) -> Key {
        text.parse().expect("a key")
    }

    #[test]
    fn the_first_choice_holds_until_it_is_ruled_out_or_forgotten() {
        let choices = Choices::default();
        let (one, two, three) = (key("00000001"), key("00000002"), key("00000003"));
        let start = Instant::now();
        let choose = |proposed, not: &[Key], after: u64| {
            choices.choose("a", proposed, not, start + Duration::from_secs(after)).expect("a choice")
        };
        assert_eq!(choose(one, &[], 0), one);
        assert_eq!(choose(two, &[], 500), one);
        assert_eq!(choose(two, &[], 1000), one, "kept since it was asked for last");
        assert_eq!(choose(two, &[one], 1000), two, "ruled out");
        assert_eq!(choose(three, &[one], 1000), two);
        assert_eq!(choose(three, &[], 2000), three, "forgotten");
        assert_eq!(choices.choose("b", two, &[], start).expect("a choice"), two);
    }

    #[test]
    fn choices_are_bounded() {
        let choices = Choices::default();
        let now = Instant::now();
        for number in 0..MOST {
            choices.choose(&number.to_string(), key("00000001"), &[], now).expect("a choice");
        }
        choices.choose("more", key("00000001"), &[], now).expect_err("too many");
        choices.choose("more", key("00000001"), &[], now + KEPT).expect("the others are forgotten");
    }
}
