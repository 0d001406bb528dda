//! On which node a new volume is made. Pure.

use std::collections::BTreeMap;

use parking_lot::Mutex;
use tokio::time::Instant;

use base::DataDirKey;
use proto::{Topology, TopologyRequirement};

#[derive(Clone, Debug)]
pub struct Candidate {
    pub key: DataDirKey,
    /// As in NodeGetInfo.
    pub topology: BTreeMap<String, String>,
    /// Size of the pool, in bytes.
    pub total: u64,
    /// Bytes that can still be written.
    pub free: u64,
    /// Capacity of all volumes together.
    pub provisioned: u64,
    pub asked: Instant,
}

/// Parts of a pool in which room is compared. Nodes whose room is about the same take volumes in turn.
const PARTS: i128 = 64;
/// What a volume has that asks for no size.
const DEFAULT_SIZE: u64 = 1 << 30;

/// Volumes that are being made, or that no node has told of yet.
#[derive(Default)]
pub struct Making(Mutex<Vec<Volume>>);

struct Volume {
    number: u64,
    on: DataDirKey,
    bytes: u64,
    ended: Option<Instant>,
}

/// Counts a volume that is being made, until it is dropped.
pub struct Counted<'m> {
    making: &'m Making,
    number: u64,
}

impl Making {
    /// The nodes that a volume may be made on, best first, as if all that are being made were there. From now on this one is
    /// counted on the best.
    pub fn order(
        &self,
        mut nodes: Vec<Candidate>,
        requirement: Option<&TopologyRequirement>,
        bytes: u64,
    ) -> (Vec<DataDirKey>, Counted<'_>) {
        let mut volumes = self.0.lock();
        // What every node has told of since.
        let oldest = nodes.iter().map(|node| node.asked).min();
        volumes
            .retain(|volume| volume.ended.is_none_or(|ended| oldest.is_some_and(|oldest| ended >= oldest)));
        for node in &mut nodes {
            let untold = |volume: &&Volume| {
                volume.on == node.key && volume.ended.is_none_or(|ended| ended >= node.asked)
            };
            let bytes: u64 =
                volumes.iter().filter(untold).map(|volume| volume.bytes).fold(0, u64::saturating_add);
            node.provisioned = node.provisioned.saturating_add(bytes);
            node.free = node.free.saturating_sub(bytes);
        }
        let keys = order(nodes, requirement);
        let number = volumes.last().map_or(0, |last| last.number + 1);
        let bytes = if bytes == 0 { DEFAULT_SIZE } else { bytes };
        if let Some(on) = keys.first() {
            volumes.push(Volume { number, on: *on, bytes, ended: None });
        }
        (keys, Counted { making: self, number })
    }
}

impl Counted<'_> {
    pub fn is_on(&self, key: DataDirKey) {
        if let Some(volume) = self.making.0.lock().iter_mut().find(|volume| volume.number == self.number) {
            volume.on = key;
        }
    }
}

impl Drop for Counted<'_> {
    fn drop(&mut self) {
        if let Some(volume) = self.making.0.lock().iter_mut().find(|volume| volume.number == self.number) {
            volume.ended = Some(Instant::now());
        }
    }
}

impl Candidate {
    /// What would be left if all volumes were written full, and never more than there is now.
    fn room(&self) -> i128 {
        i128::from(self.free).min(i128::from(self.total) - i128::from(self.provisioned))
    }
}

/// Whether a node of this topology is in the one that is asked for. A segment that the node does not have says nothing about
/// it, and a node without any is nowhere.
pub fn fits(topology: &BTreeMap<String, String>, asked: &Topology) -> bool {
    !topology.is_empty()
        && topology.iter().all(|(key, value)| asked.segments.get(key).is_none_or(|asked| asked == value))
}

/// Whether a volume may be made on a node of this topology.
pub fn is_allowed(topology: &BTreeMap<String, String>, requirement: Option<&TopologyRequirement>) -> bool {
    requirement.is_none_or(|requirement| {
        requirement.requisite.is_empty() || requirement.requisite.iter().any(|asked| fits(topology, asked))
    })
}

/// The nodes that a volume may be made on, best first: in the order of the preferred topologies, and among equals by the room
/// that is left. Where that is about the same, by what is promised: a volume that is not written yet takes no room.
pub fn order(mut nodes: Vec<Candidate>, requirement: Option<&TopologyRequirement>) -> Vec<DataDirKey> {
    nodes.retain(|node| is_allowed(&node.topology, requirement));
    let preferred = requirement.map(|requirement| &requirement.preferred[..]).unwrap_or_default();
    nodes.sort_by_key(|node| {
        let rank = preferred.iter().position(|asked| fits(&node.topology, asked));
        let parts = node.room() * PARTS / i128::from(node.total.max(1));
        (rank.unwrap_or(usize::MAX), -parts, node.provisioned, -node.room(), node.key)
    });
    nodes.into_iter().map(|node| node.key).collect()
}

/// Who is asked which node makes the volume of this name, in order: the same for every router that knows these nodes, and
/// for most names the same when a node is added or removed (rendezvous hashing).
pub fn arbiters(name: &str, mut keys: Vec<DataDirKey>) -> Vec<DataDirKey> {
    keys.sort_by_key(|key| {
        let text = key.to_string();
        // FNV-1a, and a mixing of its high bits, for the last bytes differ most. Not the standard library's: that may
        // change from release to release.
        let hash = name.bytes().chain(text.bytes()).fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
            (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3)
        });
        let mixed = (hash ^ (hash >> 32)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        (mixed, *key)
    });
    keys
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(number: u32) -> DataDirKey {
        format!("{number:08x}").parse().expect("a key")
    }

    fn zone(name: &str) -> Topology {
        Topology { segments: [("zone".to_owned(), name.to_owned())].into() }
    }

    fn node(number: u32, zone: &str, free: u64, provisioned: u64) -> Candidate {
        let topology = BTreeMap::from([("zone".to_owned(), zone.to_owned())]);
        Candidate { key: key(number), topology, total: 100, free, provisioned, asked: Instant::now() }
    }

    #[test]
    fn topology_comes_before_room() {
        let nodes =
            || vec![node(1, "a", 90, 0), node(2, "a", 95, 50), node(3, "b", 50, 0), node(4, "c", 90, 0)];
        let requirement = |requisite: &[&str], preferred: &[&str]| TopologyRequirement {
            requisite: requisite.iter().map(|name| zone(name)).collect(),
            preferred: preferred.iter().map(|name| zone(name)).collect(),
        };
        for (requisite, preferred, expected) in [
            // By room: the one with 95 free has 50 left to promise; equals by key.
            (&[][..], &[][..], &[1, 4, 3, 2][..]),
            (&["b"], &[], &[3]),
            (&["a", "b"], &[], &[1, 3, 2]),
            (&["a", "b"], &["b", "a"], &[3, 1, 2]),
            (&["a", "b"], &["c", "b"], &[3, 1, 2]),
            (&[], &["c"], &[4, 1, 3, 2]),
            (&["x"], &["a"], &[]),
        ] {
            let requirement = requirement(requisite, preferred);
            let expected: Vec<DataDirKey> = expected.iter().map(|number| key(*number)).collect();
            assert_eq!(order(nodes(), Some(&requirement)), expected, "{requisite:?} {preferred:?}");
        }
        // Of two with the same room, the one on which less is promised.
        assert_eq!(order(nodes(), None)[0], key(1));
        // What is promised beyond the pool counts against a node.
        assert_eq!(order(vec![node(1, "a", 90, 500), node(2, "a", 1, 0)], None)[0], key(2));
    }

    #[test]
    fn a_topology_of_others_says_nothing() {
        let topology = BTreeMap::from([("zone".to_owned(), "a".to_owned())]);
        let rack = Topology { segments: [("rack".to_owned(), "7".to_owned())].into() };
        assert!(fits(&topology, &rack));
        assert!(!fits(&topology, &zone("b")));
        assert!(!fits(&BTreeMap::new(), &zone("b")), "a node without a topology");
    }

    #[test]
    fn what_is_being_made_counts_until_the_node_tells_of_it() {
        let making = Making::default();
        let nodes = || vec![node(1, "a", 90, 0), node(2, "a", 90, 0), node(3, "a", 88, 0)];
        let told = nodes();
        let (first, counted) = making.order(nodes(), None, 20);
        assert_eq!(first[0], key(1));
        let (second, _second) = making.order(nodes(), None, 20);
        assert_eq!(second[0], key(2));
        counted.is_on(key(3));
        drop(counted);
        // The nodes have said this before the first was made, and the others after it.
        assert_eq!(making.order(told, None, 1).0[0], key(1));
        assert_eq!(making.order(vec![node(2, "a", 90, 0), node(3, "a", 88, 0)], None, 1).0[0], key(3));
    }

    #[test]
    fn arbiters_are_spread_and_stay_when_others_come() {
        let keys = |count: u32| (1..=count).map(key).collect::<Vec<_>>();
        let mut firsts = BTreeMap::new();
        let mut moved = 0;
        for number in 0..900 {
            let name = format!("pvc-{number}");
            let with_three = arbiters(&name, keys(3));
            let mut turned = keys(3);
            turned.reverse();
            assert_eq!(with_three, arbiters(&name, turned), "whatever the order");
            *firsts.entry(with_three[0]).or_insert(0) += 1;
            moved += u32::from(arbiters(&name, keys(4))[0] != with_three[0]);
        }
        assert!(firsts.values().all(|count| (200..400).contains(count)), "{firsts:?}");
        assert!((130..320).contains(&moved), "a fourth node takes about a quarter: {moved}");
    }
}
