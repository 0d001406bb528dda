//! Which node was chosen for each new object of a name, as a node keeps it that routers ask. Pure.
//!
//! A choice is kept in memory for ten minutes, long enough for all tries of one call, by one router or several. Once the
//! object exists, it is found by its name. A volume may be made on any node, so its choice stays. A snapshot is made where
//! its source is: its choice ends with the call, so that the name is free for another source if no object has it.

use std::collections::HashMap;
use std::hash::Hash;
use std::time::{Duration, Instant};

use crate::DataDirKey;

/// How long a choice is kept after the node was last proposed.
const KEPT: Duration = Duration::from_secs(600);
/// The most choices at a time: more than the objects that anybody makes in ten minutes.
pub const MOST_CHOICES: usize = 10_000;

/// The chosen nodes, by kind and name of the object.
#[derive(Debug)]
pub struct Choices<K>(HashMap<(K, String), (DataDirKey, Instant)>);

impl<K> Default for Choices<K> {
    fn default() -> Self {
        Choices(HashMap::new())
    }
}

impl<K: Eq + Hash> Choices<K> {
    /// The node chosen for `name`: that of an earlier call, unless it is in `not`, or else `proposed`. None if there are
    /// [`MOST_CHOICES`].
    pub fn choose(
        &mut self,
        kind: K,
        name: &str,
        proposed: DataDirKey,
        not: &[DataDirKey],
        now: Instant,
    ) -> Option<DataDirKey> {
        let name = (kind, name.to_owned());
        if let Some((chosen, asked)) = self.0.get_mut(&name)
            && now.duration_since(*asked) < KEPT
            && !not.contains(chosen)
        {
            // A call that proposes another node does not prolong the choice: perhaps no caller needs it.
            if *chosen == proposed {
                *asked = now;
            }
            return Some(*chosen);
        }
        if self.0.len() >= MOST_CHOICES {
            self.0.retain(|_, (_, asked)| now.duration_since(*asked) < KEPT);
        }
        if self.0.len() >= MOST_CHOICES {
            return None;
        }
        self.0.insert(name, (proposed, now));
        Some(proposed)
    }

    /// Ends the choice of this node.
    pub fn end(&mut self, kind: K, name: &str, chosen: DataDirKey) {
        let name = (kind, name.to_owned());
        if self.0.get(&name).is_some_and(|(key, _)| *key == chosen) {
            self.0.remove(&name);
        }
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
        let mut choices = Choices::default();
        let (one, two, three) = (key("00000001"), key("00000002"), key("00000003"));
        let start = Instant::now();
        let mut choose = |proposed, not: &[DataDirKey], after: u64| {
            choices
                .choose("volume", "a", proposed, not, start + Duration::from_secs(after))
                .expect("a choice")
        };
        assert_eq!(choose(one, &[], 0), one);
        assert_eq!(choose(one, &[], 500), one);
        assert_eq!(choose(two, &[], 1000), one, "kept since it was proposed last");
        assert_eq!(choose(two, &[one], 1000), two, "ruled out");
        assert_eq!(choose(three, &[one], 1000), two);
        assert_eq!(choose(three, &[], 2000), three, "forgotten");
        assert_eq!(choices.choose("volume", "b", two, &[], start).expect("a choice"), two);
    }

    #[test]
    fn a_snapshots_choice_ends_with_its_call_and_is_not_kept_by_others() {
        let mut choices = Choices::default();
        let (one, two) = (key("00000001"), key("00000002"));
        let start = Instant::now();
        let choose = |choices: &mut Choices<_>, proposed, after: u64| {
            let now = start + Duration::from_secs(after);
            choices.choose("snapshot", "a", proposed, &[], now).expect("a choice")
        };
        assert_eq!((choose(&mut choices, one, 0), choose(&mut choices, two, 500)), (one, one));
        assert_eq!(choose(&mut choices, two, 700), two, "only another has asked since");
        choices.end("snapshot", "a", one);
        assert_eq!(choose(&mut choices, one, 701), two, "another's choice stays");
        choices.end("snapshot", "a", two);
        assert_eq!(choose(&mut choices, one, 702), one);
        let volume = choices.choose("volume", "a", two, &[], start).expect("a choice");
        assert_eq!(volume, two, "names of each kind are apart");
    }

    #[test]
    fn choices_are_bounded() {
        let mut choices = Choices::default();
        let now = Instant::now();
        for number in 0..MOST_CHOICES {
            choices.choose("volume", &number.to_string(), key("00000001"), &[], now).expect("a choice");
        }
        assert_eq!(choices.choose("volume", "more", key("00000001"), &[], now), None);
        choices.choose("volume", "more", key("00000001"), &[], now + KEPT).expect("the others are forgotten");
    }
}
