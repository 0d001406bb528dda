//! Volumes that exist twice: made by a retry that was given to another node while the first one was cut off, by a router that
//! did not know of the first try, or by two routers that did not agree. They are found as soon as all nodes answer.
//!
//! Which of the two is used, only the orchestrator knows: the first answer may have arrived. In Kubernetes the PersistentVolumes
//! say it, and the volume that none of them has is deleted. Elsewhere an operator has to do it.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use base::DataDirKey;
use k8s_openapi::api::core::v1::PersistentVolume;
use kube::Api;
use kube::api::ListParams;
use metrics::counter;
use proto::node::Kind;
use tokio::time::{Instant, timeout};

use super::{Router, Target};

/// How often it is looked whether a node has come back.
const EVERY: Duration = Duration::from_secs(2);
/// How long a node may take to look for a name, and to delete a volume.
const PATIENCE: Duration = Duration::from_secs(10);
const MOST: usize = 10_000;
/// How often PersistentVolumes are looked through for a volume that exists twice, how long that may take, and for how long
/// it is done: the PersistentVolume is made after the volume.
const LOOK_EVERY: Duration = Duration::from_secs(30);
const LOOKED_IN: Duration = Duration::from_secs(60);
const LOOKED_FOR: Duration = Duration::from_secs(600);
const PAGE: u32 = 500;

/// What an operator has to do where no one else can.
const DELETE: &str =
    "a volume exists twice: delete the one that is not in use (deltapath-router delete-volume)";

/// What is said until then.
const LOOK: &str = "a volume exists twice: PersistentVolumes say which one is used";

struct Twice {
    name: String,
    ids: [String; 2],
    found: Instant,
    /// When PersistentVolumes are looked through for it next.
    look: Instant,
}

impl Twice {
    fn tell(&self, what: &str) {
        let Twice { name, ids: [volume, other], .. } = self;
        tracing::warn!(name, volume, other, "{what}");
    }
}

/// The volume that is not used, if the other one is.
fn unused<'i>(ids: &'i [String; 2], used: &BTreeSet<String>) -> Option<&'i str> {
    let [one, other] = ids;
    match (used.contains(one), used.contains(other)) {
        (true, false) => Some(other),
        (false, true) => Some(one),
        (true, true) | (false, false) => None,
    }
}

async fn used(volumes: &Api<PersistentVolume>, ids: &[String; 2]) -> kube::Result<BTreeSet<String>> {
    let (mut used, mut page) = (BTreeSet::new(), ListParams::default().limit(PAGE));
    loop {
        let listed = volumes.list(&page).await?;
        let handles = listed.items.into_iter().filter_map(|volume| Some(volume.spec?.csi?.volume_handle));
        used.extend(handles.filter(|handle| ids.contains(handle)));
        match listed.metadata.continue_.filter(|token| !token.is_empty()) {
            Some(token) => page = ListParams::default().limit(PAGE).continue_token(&token),
            None => return Ok(used),
        }
    }
}

impl Router {
    /// There may be another volume of this name than the one that was made, or is being copied.
    pub(super) fn doubt(&self, name: &str, id: String) {
        let mut doubtful = self.doubtful.lock();
        if doubtful.len() < MOST || doubtful.contains_key(name) {
            doubtful.insert(name.to_owned(), id);
        } else {
            tracing::warn!(
                name,
                "more than {MOST} volumes may exist twice until all nodes answer: a second volume of this name will not be searched for"
            );
        }
    }

    /// Asks each node that comes back for volumes that were made meanwhile, and deletes those that no PersistentVolume has,
    /// where these can be asked; for ever.
    pub async fn find_twice(&self, volumes: Option<Api<PersistentVolume>>) {
        let mut known: BTreeSet<DataDirKey> = BTreeSet::new();
        let mut asked_before = BTreeMap::new();
        let mut twice: Vec<Twice> = Vec::new();
        loop {
            tokio::time::sleep(EVERY).await;
            let found = self.look_for_twice(&mut known, &mut asked_before).await;
            let Some(volumes) = &volumes else {
                found.iter().for_each(|twice| twice.tell(DELETE));
                continue;
            };
            found.iter().for_each(|twice| twice.tell(LOOK));
            twice.extend(found);
            let mut left = Vec::new();
            for mut one in twice {
                if one.look <= Instant::now() {
                    one.look = Instant::now() + LOOK_EVERY;
                    if self.delete_unused(volumes, &one).await {
                        continue;
                    }
                    if one.found.elapsed() >= LOOKED_FOR {
                        one.tell(DELETE);
                        continue;
                    }
                }
                left.push(one);
            }
            twice = left;
        }
    }

    /// Deletes the volume that no PersistentVolume has, if one has the other; whether that is done.
    async fn delete_unused(&self, volumes: &Api<PersistentVolume>, twice: &Twice) -> bool {
        let Twice { name, ids, .. } = twice;
        let used = match timeout(LOOKED_IN, used(volumes, ids)).await {
            Ok(Ok(used)) => used,
            Ok(Err(error)) => {
                tracing::warn!(name, error = base::report(&error), "PersistentVolumes cannot be listed now");
                return false;
            }
            Err(_) => {
                tracing::warn!(
                    name,
                    "PersistentVolumes could not be listed within {} s",
                    LOOKED_IN.as_secs()
                );
                return false;
            }
        };
        let Some(id) = unused(ids, &used) else { return false };
        let Ok(Target::Node(node)) = self.target(id) else { return false };
        match self.delete_on(&node, id, Some(Instant::now() + PATIENCE)).await {
            Ok(()) => {
                tracing::info!(
                    name,
                    volume = id,
                    node = node.name,
                    "a volume that exists twice and that no PersistentVolume has is deleted"
                );
                true
            }
            Err(status) => {
                let reason = status.message();
                tracing::warn!(
                    name,
                    volume = id,
                    node = node.name,
                    reason,
                    "a volume that exists twice cannot be deleted now"
                );
                false
            }
        }
    }

    /// Asks each node that has come back for the volumes in doubt. `known` are the nodes that were asked for all of them, and
    /// `asked_before` the volumes for which they were.
    async fn look_for_twice(
        &self,
        known: &mut BTreeSet<DataDirKey>,
        asked_before: &mut BTreeMap<String, String>,
    ) -> Vec<Twice> {
        let up = self.nodes.up();
        let is_any_away = !self.nodes.away().is_empty();
        let volumes = self.doubtful.lock().clone();
        let (mut twice, mut asked) = (Vec::new(), BTreeSet::new());
        'nodes: for node in &up {
            let is_new = !known.contains(&node.key);
            // A node may have come back just before a volume was noted.
            let is_unasked = |(name, id): &(&String, &String)| is_new || asked_before.get(*name) != Some(*id);
            for (name, id) in volumes.iter().filter(is_unasked) {
                let until = Some(Instant::now() + PATIENCE);
                let found = Self::find_on(node, Kind::Volume, name, until).await;
                // It is asked for all of them when it answers again.
                let Ok(found) = found else { continue 'nodes };
                let Some(other) = found.filter(|found| found.id != *id) else { continue };
                if other.in_progress {
                    // One that a call asks for is looked at again.
                    match self.abandon_on(node, name, &other, "", until).await {
                        Ok(()) => continue,
                        Err(_) => continue 'nodes,
                    }
                }
                counter!("deltapath_router_volumes_made_twice_total").increment(1);
                let now = Instant::now();
                let ids = [id.clone(), other.id];
                twice.push(Twice { name: name.clone(), ids, found: now, look: now });
            }
            asked.insert(node.key);
        }
        let are_all = asked.len() == up.len();
        *known = asked;
        if !is_any_away && are_all {
            // Not what was noted meanwhile, another volume of the same name perhaps.
            self.doubtful.lock().retain(|name, id| volumes.get(name) != Some(id));
        }
        *asked_before = volumes;
        twice
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_volume_is_unused_only_if_the_other_one_is_used() {
        let ids = ["a", "b"].map(str::to_owned);
        for (used, expected) in
            [(&[][..], None), (&["a"][..], Some("b")), (&["b"], Some("a")), (&["a", "b"], None)]
        {
            let used = used.iter().map(|id| (*id).to_owned()).collect();
            assert_eq!(unused(&ids, &used), expected, "{used:?}");
        }
    }
}
