//! All there is in a life, and what was promised in it.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use base::DataDirKey;
use parking_lot::Mutex;
use tokio::time::{Instant, sleep};
use tonic::Status;

use super::disk::Disk;
use super::network::Network;
use super::node::Node;
use super::orchestrator::{RouterProcess, Volumes};
use crate::placement;

/// How long after a fault of a node a router may still take it to be away.
const AFTERMATH: Duration = Duration::from_secs(30);

pub struct Outcome {
    /// Of all that was asked, answered and broken, and when.
    pub trace: blake3::Hash,
    pub counts: BTreeMap<&'static str, u64>,
}

/// Everything there is in a life.
pub struct World {
    pub network: Network,
    /// Their host numbers come first.
    pub routers: Mutex<Vec<Arc<RouterProcess>>>,
    pub nodes: Vec<Arc<Node>>,
    pub addresses: Vec<String>,
    pub volumes: Volumes,
    /// A call of a node's model has panicked.
    pub has_failed: Arc<AtomicBool>,
    pub begun: Instant,
    pub story: Mutex<Story>,
}

/// What was asked and promised.
#[derive(Default)]
pub struct Story {
    pub trace: blake3::Hasher,
    pub counts: BTreeMap<&'static str, u64>,
    /// By id.
    pub promised_volumes: BTreeMap<String, Promised>,
    pub promised_snapshots: BTreeMap<String, Promised>,
    /// Nodes that have a fault of their own now.
    pub struck: BTreeSet<usize>,
    /// Faults that keep routers from each node now, and when the last one ended.
    pub troubled: Vec<(u32, Option<Instant>)>,
    /// When a router forgot all it knew, the last time.
    pub forgot: Option<Instant>,
    /// When each name of a volume was first answered.
    pub answered: BTreeMap<String, Instant>,
    /// When it was first asked for.
    pub asked: BTreeMap<String, Instant>,
    /// Ids and names of volumes that an older disk brought back.
    pub revived: BTreeSet<String>,
    /// Ids that went with a disk, or that an operator has deleted.
    pub dropped: BTreeSet<String>,
    /// Ids whose deletion was answered.
    pub deleted: BTreeSet<String>,
    pub is_well: bool,
}

#[derive(Clone)]
pub struct Promised {
    pub name: String,
    pub content: u64,
    pub is_being_deleted: bool,
}

impl World {
    /// The node at an address, if it is reached.
    pub fn at(&self, from: &Node, address: &str) -> Result<&Arc<Node>, Status> {
        let host = self.network.host_at(address).expect("an address of a node");
        match self.network.reaches(from.host, host) {
            true => Ok(self.nodes.iter().find(|node| node.host == host).expect("a node")),
            false => Err(Status::unavailable("the source's node is not reached")),
        }
    }

    pub fn tell(&self, what: &str) {
        let line = format!("{:>9.3} {what}\n", self.begun.elapsed().as_secs_f64());
        if std::env::var_os("DELTAPATH_TELL").is_some() {
            print!("{line}");
        }
        self.story.lock().trace.update(line.as_bytes());
    }

    pub fn count(&self, what: &'static str) {
        *self.story.lock().counts.entry(what).or_insert(0) += 1;
    }

    pub fn node_of(&self, id: &str) -> usize {
        let key = DataDirKey::of(id).expect("an id");
        self.nodes.iter().position(|node| node.key == key).expect("a node")
    }

    /// The node that settles where a volume of this name is made, unless something keeps a router from it.
    pub fn arbiter_of(&self, name: &str) -> usize {
        let first = placement::arbiters(name, self.nodes.iter().map(|node| node.key).collect())[0];
        self.nodes.iter().position(|node| node.key == first).expect("a node")
    }

    /// Whether nothing has kept routers from this node since then, nor shortly before.
    pub fn was_calm(&self, node: usize, since: Instant) -> bool {
        let was_calm = match self.story.lock().troubled[node] {
            (0, None) => true,
            (0, Some(ended)) => ended + AFTERMATH < since,
            _ => false,
        };
        self.count(if was_calm { "looked at in calm" } else { "excused by a fault" });
        was_calm
    }

    pub async fn call<A: prost::Message + Default>(
        &self,
        random: &mut fastrand::Rng,
        call: &str,
        what: &str,
        request: &impl prost::Message,
    ) -> Result<A, Status> {
        let router = random.choice(self.routers.lock().iter()).cloned().expect("a router");
        let deadline = Duration::from_secs([3, 10, 60][random.usize(..3)]);
        let answer = router.call(&format!("/csi.v1.Controller/{call}"), request, deadline).await;
        self.count("calls");
        match &answer {
            Ok(_) => self.tell(&format!("{call} {what}: OK")),
            Err(status) => self.tell(&format!("{call} {what}: {:?} {}", status.code(), status.message())),
        }
        answer
    }

    /// Whether no fault comes any more.
    pub fn is_well(&self) -> bool {
        self.story.lock().is_well
    }

    /// A node that is making something now, or any if none begins to.
    pub async fn one_at_work(&self, random: &mut fastrand::Rng) -> usize {
        for _ in 0..1000 {
            let at_work = (0..self.nodes.len()).filter(|node| self.nodes[*node].is_at_work());
            if let Some(node) = random.choice(at_work.collect::<Vec<_>>()) {
                return node;
            }
            sleep(Duration::from_millis(5)).await;
        }
        random.usize(..self.nodes.len())
    }

    pub async fn wait_a_bit(&self, random: &mut fastrand::Rng, most: u64) {
        sleep(Duration::from_millis(random.u64(..=most * 1000))).await;
    }

    /// Whether an object went with a disk.
    pub fn is_gone(&self, id: &str) -> bool {
        self.story.lock().dropped.contains(id)
    }

    /// A node's disk is one of earlier: what was promised since is gone, and what was deleted is there again.
    pub fn goes_back(&self, number: usize, disk: Disk) {
        let key = self.nodes[number].key;
        let mut story = self.story.lock();
        let is_of = |id: &String| DataDirKey::of(id) == Some(key);
        story.promised_volumes.retain(|id, _| !is_of(id) || disk.volumes.contains_key(id));
        story.promised_snapshots.retain(|id, _| !is_of(id) || disk.snapshots.contains_key(id));
        self.volumes.lock().retain(|_, id| !is_of(id) || disk.volumes.contains_key(id));
        let newest = self.nodes[number].disk();
        story.dropped.extend(newest.ids().difference(&disk.ids()).cloned());
        for id in disk.ids().difference(&newest.ids()) {
            story.dropped.remove(id);
            story.revived.insert(id.clone());
            story.revived.extend(disk.name_of(id).map(str::to_owned));
        }
        drop(story);
        self.nodes[number].set_disk(disk);
    }

    /// What is on the disks when all is well again.
    pub fn judge(&self) {
        let mut by_name: BTreeMap<String, Vec<String>> = BTreeMap::new();
        for node in &self.nodes {
            for (id, volume) in node.disk().volumes {
                by_name.entry(volume.name).or_default().push(id);
            }
        }
        let counted = {
            let story = self.story.lock();
            for (id, promised) in &story.promised_volumes {
                let disk = self.nodes[self.node_of(id)].disk();
                let there = disk.volumes.get(id);
                assert!(
                    there.is_some_and(|there| there.content == promised.content),
                    "{} was promised as {id}, and is {there:?}",
                    promised.name
                );
            }
            for id in story.deleted.difference(&story.revived) {
                assert!(
                    !self.nodes[self.node_of(id)].disk().ids().contains(id),
                    "{id} is deleted, and there"
                );
            }
            for (id, promised) in &story.promised_snapshots {
                let disk = self.nodes[self.node_of(id)].disk();
                let there = disk.snapshots.get(id);
                assert!(
                    there.is_some_and(|there| there.content == promised.content),
                    "{} was promised as {id}, and is {there:?}",
                    promised.name
                );
            }
            let used = self.volumes.lock();
            let mut left = Vec::new();
            for (name, ids) in &by_name {
                let unused: Vec<_> = ids.iter().filter(|id| used.get(name) != Some(*id)).collect();
                if unused.is_empty() || story.revived.contains(name) {
                    continue;
                }
                // docs/router.md: what a router knew of a second volume ends with its process, and without a PersistentVolume
                // nobody knows which one is used.
                let asked = story.asked[name];
                let forgot =
                    story.answered.get(name) < story.forgot.as_ref() && story.answered.contains_key(name);
                let deleted =
                    used.get(name).is_none() && story.troubled.iter().any(|(_, last)| *last > Some(asked));
                assert!(forgot || deleted, "{name} is left over, as {unused:?}, beside {:?}", used.get(name));
                left.push(if forgot {
                    "left over after a router forgot"
                } else {
                    "left over after its claim"
                });
            }
            left
        };
        counted.into_iter().for_each(|what| self.count(what));
    }
}
