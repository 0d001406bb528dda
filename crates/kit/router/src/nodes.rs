//! The nodes there are: found at their addresses, asked who they are every few seconds, and looked up by the key that every
//! id begins with. Nothing of this is kept: a router that starts asks again.

mod lookup;
mod trouble;

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use base::DataDirKey;
use metrics::gauge;
use parking_lot::Mutex;
use proto::node::DescribeRequest;
use proto::node::node_client::NodeClient;
use serve::mutual::Mutual;
use serve::upstream::WideWindows;
use tokio::sync::Notify;
use tokio::time::Instant;
use tokio_util::sync::{CancellationToken, DropGuard};
use tonic::Status;

use crate::node::{Dial, Link, Node};
use crate::placement::{self, Candidate};
pub use lookup::Lookup;
use trouble::Trouble;

/// How often a node is asked who it is and what room it has.
const EVERY: Duration = Duration::from_secs(2);
/// The same while it does not answer.
const EVERY_AWAY: Duration = Duration::from_millis(500);
/// What streams with wide windows may have sent ahead together, in bytes.
const WIDE_WINDOWS: usize = 16 << 20;

pub struct Nodes {
    tls: Arc<Mutual>,
    network: Arc<dyn Dial>,
    patience: Duration,
    windows: WideWindows,
    forgotten_file: Option<PathBuf>,
    driver_name: Option<String>,
    table: Mutex<Table>,
    /// Cancelled once every address was tried.
    settled: CancellationToken,
}

#[derive(Default)]
struct Table {
    /// Whether the addresses are known, be they none.
    has_addresses: bool,
    by_address: BTreeMap<Arc<str>, Entry>,
    /// Nodes that have answered, and whose addresses now belong to no node or to another. They have objects, so they are
    /// missed until they answer elsewhere or an operator says that they are gone.
    departed: BTreeMap<DataDirKey, Arc<Node>>,
    forgotten: BTreeSet<DataDirKey>,
    /// What the nodes' driver is called: as in --driver-name, or as most nodes say.
    driver_name: Option<String>,
}

/// What is known of an address.
struct Entry {
    state: State,
    trouble: Option<Trouble>,
    /// The key in the certificate that was shown there last.
    shown: Option<DataDirKey>,
    is_taken: bool,
    /// Ends its task when it is dropped.
    _task: AbortOnDrop,
}

enum State {
    /// Not tried to the end yet.
    New,
    Up(Arc<Node>, Candidate),
    /// Who it was, if it ever answered, and why it does not now.
    Away(Option<Arc<Node>>, String),
}

impl State {
    fn node(&self) -> Option<&Arc<Node>> {
        match self {
            State::Up(node, _) | State::Away(Some(node), _) => Some(node),
            State::Away(None, _) | State::New => None,
        }
    }

    /// Before something else is known of the address.
    fn is_no_more(&self) {
        if let State::Up(node, _) = self {
            node_up(node).set(0);
        }
    }
}

impl Table {
    fn up(&self) -> impl Iterator<Item = &Arc<Node>> {
        self.by_address.values().filter_map(|entry| match &entry.state {
            State::Up(node, _) => Some(node),
            State::New | State::Away(..) => None,
        })
    }

    /// The state of an address has ended, and another may follow.
    fn is_past(departed: &mut BTreeMap<DataDirKey, Arc<Node>>, past: &State, next: Option<&State>) {
        past.is_no_more();
        let stays = next.and_then(State::node).map(|node| node.key);
        if let Some(node) = past.node().filter(|node| stays != Some(node.key)) {
            departed.insert(node.key, node.clone());
        }
        if let Some(State::Up(node, _)) = next {
            departed.remove(&node.key);
        }
    }

    /// Departed nodes that are missed.
    fn missed(&self) -> impl Iterator<Item = &Arc<Node>> {
        self.departed.values().filter(|node| !self.forgotten.contains(&node.key))
    }
}

fn node_up(node: &Node) -> metrics::Gauge {
    gauge!("deltapath_router_node_up", "node" => node.name.clone(), "key" => node.key.to_string())
}

/// The time in which an address answers without a break.
struct Answers {
    gone: CancellationToken,
    _guard: DropGuard,
}

impl Answers {
    fn new() -> Self {
        let gone = CancellationToken::new();
        Answers { _guard: gone.clone().drop_guard(), gone }
    }
}

struct AbortOnDrop(tokio::task::AbortHandle);

impl Drop for AbortOnDrop {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// A node that a list cannot be asked of.
pub struct Missing {
    /// Its name, or its address where it has never answered.
    pub name: String,
    /// Why, as it is said behind its name.
    pub why: String,
    /// Who it was, unless it is refused.
    pub node: Option<Arc<Node>>,
}

impl Nodes {
    /// None yet. Without a driver's name that of most nodes counts.
    pub fn new(
        tls: Arc<Mutual>,
        network: Arc<dyn Dial>,
        patience: Duration,
        forgotten_file: Option<PathBuf>,
        driver_name: Option<String>,
    ) -> Arc<Self> {
        Arc::new(Nodes {
            tls,
            network,
            patience,
            windows: WideWindows::of(WIDE_WINDOWS),
            forgotten_file,
            driver_name,
            table: Mutex::default(),
            settled: CancellationToken::new(),
        })
    }

    /// These are the addresses from now on: new ones are asked, and others no longer.
    pub fn set_addresses(self: &Arc<Self>, addresses: &BTreeSet<String>) {
        let mut table = self.table.lock();
        let Table { by_address, departed, .. } = &mut *table;
        by_address.retain(|address, entry| {
            let stays = addresses.contains(&**address);
            if !stays && matches!(entry.trouble, Some(Trouble::Stranger(_))) {
                // It has no objects of this driver.
                entry.state.is_no_more();
            } else if !stays {
                Table::is_past(departed, &entry.state, None);
            }
            stays
        });
        // One that has come up at another address before this one went is there.
        let up = by_address.values().filter_map(|entry| match &entry.state {
            State::Up(node, _) => Some(node.key),
            State::New | State::Away(..) => None,
        });
        for key in up {
            departed.remove(&key);
        }
        table.has_addresses = true;
        for address in addresses {
            if !table.by_address.contains_key(address.as_str()) {
                let address: Arc<str> = address.as_str().into();
                let task = tokio::spawn(self.clone().follow(address.clone()));
                let task = AbortOnDrop(task.abort_handle());
                let entry =
                    Entry { state: State::New, trouble: None, shown: None, is_taken: false, _task: task };
                table.by_address.insert(address, entry);
            }
        }
        self.changed(&mut table);
    }

    /// Reads the keys of nodes that are gone for good.
    pub fn read_forgotten(&self) {
        let Some(file) = &self.forgotten_file else { return };
        match crate::forget::read(file) {
            Ok(forgotten) => {
                let mut table = self.table.lock();
                if table.forgotten != forgotten {
                    let keys: Vec<_> = forgotten.iter().map(DataDirKey::to_string).collect();
                    tracing::info!(keys = keys.join(", "), "forgotten nodes");
                    table.forgotten = forgotten;
                    self.changed(&mut table);
                }
            }
            // What was forgotten stays so.
            Err(error) => tracing::warn!(error, "the file of --forgotten is not used"),
        }
    }

    pub async fn follow_forgotten(self: Arc<Self>) {
        loop {
            tokio::time::sleep(EVERY).await;
            self.read_forgotten();
        }
    }

    async fn follow(self: Arc<Self>, address: Arc<str>) {
        let suspect = Arc::new(Notify::new());
        let mut link = None;
        // Of the node that answers now: cancelled when it does not, and when this task ends.
        let mut up = Answers::new();
        loop {
            let way = link.get_or_insert_with(|| {
                Link::new(&address, &self.tls, &self.network, self.patience, &self.windows)
            });
            let asked = self.ask(&address, way, &suspect, &up.gone).await;
            let is_up = asked.is_ok();
            if !is_up {
                up = Answers::new();
            }
            if way.is_replaced() {
                // Who was here is not here any more.
                link = None;
                self.put(&address, State::Away(None, "another data directory answers there".to_owned()));
                continue;
            }
            match asked {
                Ok((node, candidate)) => self.put(&address, State::Up(node, candidate)),
                Err(why) => self.put_away(&address, why, way),
            }
            tokio::select! {
                biased;
                () = tokio::time::sleep(if is_up { EVERY } else { EVERY_AWAY }) => {}
                () = suspect.notified(), if is_up => {}
            }
        }
    }

    async fn ask(
        &self,
        address: &Arc<str>,
        link: &Link,
        suspect: &Arc<Notify>,
        gone: &CancellationToken,
    ) -> Result<(Arc<Node>, Candidate), String> {
        let mut client = NodeClient::new(link.channel());
        let begun = Instant::now();
        let asked = tokio::time::timeout(self.patience, client.describe(DescribeRequest {})).await;
        let described = match asked {
            Ok(Ok(answer)) => answer.into_inner(),
            Ok(Err(status)) => return Err(format!("{:?}: {}", status.code(), status.message())),
            Err(_) => return Err(format!("it says nothing for {} s", self.patience.as_secs_f64())),
        };
        let key: DataDirKey = described.key.parse().map_err(|_| format!("its key is {:?}", described.key))?;
        if link.key() != Some(key) {
            return Err(format!("it has the key {key}, and its certificate is for another"));
        }
        let own = format!("topology.{}/node", described.driver_name);
        if described.topology.get(&own) != Some(&described.node_id) {
            return Err(format!(
                "its topology must have {own} with its node id, {:?}, and is {:?}",
                described.node_id, described.topology
            ));
        }
        let candidate = Candidate {
            key,
            topology: described.topology.clone().into_iter().collect(),
            total: described.total_bytes,
            free: described.free_bytes,
            provisioned: described.provisioned_bytes,
            asked: begun,
        };
        let node = Node::new(address, key, described, link.clone(), suspect.clone(), gone.clone());
        Ok((Arc::new(node), candidate))
    }

    fn put(&self, address: &Arc<str>, state: State) {
        let mut table = self.table.lock();
        let Table { by_address, departed, .. } = &mut *table;
        // Dropped from the list while it was asked.
        let Some(entry) = by_address.get_mut(address) else { return };
        match (&entry.state, &state) {
            (State::Up(..), State::Up(..)) => {}
            (_, State::Up(node, _)) => {
                tracing::info!(node = node.name, key = %node.key, address = &**address, "a node answers");
            }
            (State::Away(_, before), State::Away(_, why)) if before == why => {}
            (_, State::Away(node, why)) => {
                let (name, key) = node.as_ref().map(|node| (node.name.clone(), node.key.to_string())).unzip();
                tracing::warn!(node = name, key, address = &**address, why, "a node does not answer");
            }
            (_, State::New) => {}
        }
        let missed = departed.len();
        match &entry.trouble {
            Some(Trouble::Stranger(_)) => entry.state.is_no_more(),
            _ => Table::is_past(departed, &entry.state, Some(&state)),
        }
        let is_as_before = match (&entry.state, &state) {
            (State::Up(before, _), State::Up(now, _)) => before.is_as(now),
            _ => false,
        };
        entry.state = state;
        // The rest is about all nodes, and this is called for each every two seconds.
        if !is_as_before || departed.len() != missed {
            self.changed(&mut table);
        }
    }

    fn put_away(&self, address: &Arc<str>, why: String, way: &Link) {
        let before = self.table.lock().by_address.get_mut(address).and_then(|entry| {
            (entry.shown, entry.is_taken) = (way.key(), way.is_taken());
            // A stranger was never one of the nodes.
            let is_stranger = matches!(entry.trouble, Some(Trouble::Stranger(_)));
            entry.state.node().filter(|_| !is_stranger).cloned()
        });
        self.put(address, State::Away(before, why));
    }

    fn changed(&self, table: &mut Table) {
        table.look_for_trouble(self.driver_name.as_ref(), self.settled.is_cancelled());
        let mut counts = [0_u32; 3];
        for entry in table.by_address.values() {
            let which = match &entry.state {
                State::Up(node, _) if table.forgotten.contains(&node.key) => 2,
                State::Up(..) if entry.used().is_some() => 0,
                State::Up(..) | State::New | State::Away(..) => 1,
            };
            counts[which] += 1;
            if let State::Up(node, _) = &entry.state {
                node_up(node).set(1);
            }
        }
        counts[1] += table.missed().count() as u32;
        for (state, count) in ["up", "away", "forgotten"].into_iter().zip(counts) {
            gauge!("deltapath_router_nodes", "state" => state).set(count);
        }
        let settled =
            table.has_addresses && table.by_address.values().all(|entry| !matches!(entry.state, State::New));
        // One that joins later holds no call up.
        if settled {
            self.settled.cancel();
        }
    }

    /// Waits until a router that has just started has tried all nodes.
    pub async fn settled(&self) {
        let _ = tokio::time::timeout(self.patience, self.settled.cancelled()).await;
    }

    /// All whose objects can be reached, by key.
    pub fn up(&self) -> Vec<Arc<Node>> {
        let table = self.table.lock();
        let used = table.by_address.values().filter_map(Entry::used);
        // A node with two addresses is one.
        let by_key: BTreeMap<DataDirKey, &Arc<Node>> = used.map(|(node, _)| (node.key, node)).collect();
        let is_kept = |node: &&&Arc<Node>| !table.forgotten.contains(&node.key);
        by_key.values().filter(is_kept).map(|node| (*node).clone()).collect()
    }

    /// What is to be known of the room of those on which new volumes are made.
    pub fn candidates(&self) -> Vec<Candidate> {
        let table = self.table.lock();
        let entries = table.by_address.values().filter(|entry| entry.trouble.is_none());
        let by_key: BTreeMap<DataDirKey, _> =
            entries.filter_map(Entry::used).map(|used| (used.0.key, used)).collect();
        let kept = by_key.into_values().filter(|(node, _)| !table.forgotten.contains(&node.key));
        kept.map(|(_, candidate)| candidate.clone()).collect()
    }

    /// Which node ids two nodes have that a volume may be made on, if there are such.
    pub fn taken_id(&self, requirement: Option<&proto::TopologyRequirement>) -> Option<String> {
        self.table.lock().by_address.values().find_map(|entry| match (&entry.state, &entry.trouble) {
            (State::Up(node, _), Some(trouble @ Trouble::TakenId(_)))
                if placement::is_allowed(&node.topology, requirement) =>
            {
                Some(trouble.why().to_owned())
            }
            _ => None,
        })
    }

    /// What is to be done where the object is on a node that was forgotten, and answers.
    pub fn forgotten_but_there(&self, id: &str) -> Option<String> {
        let table = self.table.lock();
        let node = table.up().find(|node| DataDirKey::of(id) == Some(node.key))?;
        Some(format!(
            "{id} may exist: node {} at {} answers, and its data directory {} was forgotten: remove the key from the file of \
             --forgotten, or stop the driver",
            node.name, node.address, node.key
        ))
    }

    pub fn away(&self) -> Vec<Missing> {
        let table = self.table.lock();
        let used = table.by_address.values().filter_map(Entry::used);
        let there: BTreeSet<DataDirKey> = used.map(|(node, _)| node.key).collect();
        let mut away = Vec::new();
        let silent = |name: &str, why: &str, node: Option<&Arc<Node>>| Missing {
            name: name.to_owned(),
            why: format!("which does not answer, {why}"),
            node: node.cloned(),
        };
        for (address, entry) in &table.by_address {
            match (&entry.state, &entry.trouble) {
                (State::Up(node, _), Some(Trouble::Stranger(why) | Trouble::Copy(why))) => {
                    let why = format!("which is not used, since {why}");
                    away.push(Missing { name: node.name.clone(), why, node: None });
                }
                (State::Up(..), _) => {}
                (State::Away(Some(node), _), _) if table.forgotten.contains(&node.key) => {}
                // Another node may be there by now, which has never answered.
                (State::Away(Some(node), why), _) if there.contains(&node.key) => {
                    let why = format!("{why} (node {} is at another address now)", node.name);
                    away.push(silent(address, &why, None));
                }
                (State::Away(Some(node), why), _) => away.push(silent(&node.name, why, Some(node))),
                (State::Away(None, why), _) => away.push(silent(address, why, None)),
                (State::New, _) => away.push(silent(address, "it has not been asked yet", None)),
            }
        }
        let why = "its address is no longer in the list of nodes";
        let missed = table.missed().filter(|node| !there.contains(&node.key));
        away.extend(missed.map(|node| silent(&node.name, why, Some(node))));
        away
    }

    pub fn ticket(&self, source: &str, reader: DataDirKey) -> Result<Vec<u8>, Status> {
        let signer =
            self.tls.signer().ok_or_else(|| Status::unavailable("the router has no certificate yet"))?;
        let issued = signer.issue(source, &reader.to_string());
        issued.map_err(|error| Status::internal(format!("sign a ticket: {error}")))
    }

    /// The name of the driver, as --driver-name or most nodes say it.
    pub fn driver_name(&self) -> Option<String> {
        self.table.lock().driver_name.clone()
    }
}
