//! Volumes that were made twice: by a retry that was given to another node while the first one was cut off, and by a router that
//! did not know of the first try. They are found when the node is back, and reported to an operator. None is removed here: a node
//! cannot know whether somebody holds the id of its volume, since its answer may have arrived.

use std::collections::BTreeSet;
use std::sync::PoisonError;
use std::time::{Duration, Instant};

use base::Key;
use bytes::Bytes;
use metrics::counter;
use prost::Message;
use proto::node::Kind;

use super::Router;

/// How often it is looked whether a node has come back.
const EVERY: Duration = Duration::from_secs(2);
/// How long a node may take to look for a name.
const PATIENCE: Duration = Duration::from_secs(10);
/// Volumes in doubt at once.
const MOST: usize = 10_000;

impl Router {
    /// This volume was made while a node was away: it may have one of this name.
    pub(super) fn doubt(&self, name: &str, answer: &Bytes) {
        let made = proto::CreateVolumeResponse::decode(answer.clone()).ok().and_then(|made| made.volume);
        let Some(made) = made else { return };
        let mut doubtful = self.doubtful.lock().unwrap_or_else(PoisonError::into_inner);
        if doubtful.len() < MOST || doubtful.contains_key(name) {
            doubtful.insert(name.to_owned(), made.volume_id);
        } else {
            tracing::warn!(
                name,
                "more than {MOST} volumes were made while nodes are away: it is not looked for another of this name"
            );
        }
    }

    /// Asks each node that comes back for volumes that were made meanwhile; for ever.
    pub async fn find_twice(&self) {
        let mut known: BTreeSet<Key> = BTreeSet::new();
        let mut asked_before: BTreeSet<String> = BTreeSet::new();
        loop {
            tokio::time::sleep(EVERY).await;
            let up = self.nodes.up();
            let is_any_away = !self.nodes.away().is_empty();
            let volumes: Vec<(String, String)> = {
                let doubtful = self.doubtful.lock().unwrap_or_else(PoisonError::into_inner);
                doubtful.iter().map(|(name, id)| (name.clone(), id.clone())).collect()
            };
            let mut asked: BTreeSet<Key> = BTreeSet::new();
            'nodes: for node in &up {
                let is_new = !known.contains(&node.key);
                // A node may have come back just before a volume was noted.
                for (name, id) in volumes.iter().filter(|(name, _)| is_new || !asked_before.contains(name)) {
                    let until = Some(Instant::now() + PATIENCE);
                    let found = Self::find_on(node, Kind::Volume, name, until).await;
                    // It is asked for all of them when it answers again.
                    let Ok(found) = found else { continue 'nodes };
                    let Some(other) = found else { continue };
                    // A copy on its way ends by itself where nobody asks for it.
                    if other.id != *id && !other.in_progress {
                        counter!("deltapath_router_volumes_made_twice_total").increment(1);
                        tracing::warn!(
                            name,
                            volume = id,
                            other = other.id,
                            node = node.name,
                            "a volume was made twice: delete the one that is not in use (deltapath-router delete-volume)"
                        );
                    }
                }
                asked.insert(node.key);
            }
            let are_all = asked.len() == up.len();
            known = asked;
            asked_before = volumes.iter().map(|(name, _)| name.clone()).collect();
            if !is_any_away && are_all {
                let mut doubtful = self.doubtful.lock().unwrap_or_else(PoisonError::into_inner);
                for (name, _) in &volumes {
                    doubtful.remove(name);
                }
            }
        }
    }
}
