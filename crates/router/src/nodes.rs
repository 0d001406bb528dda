//! The nodes there are: found at their addresses, asked who they are every few seconds, and looked up by the key that every
//! id begins with. Nothing of this is kept: a router that starts asks again.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use base::Key;
use metrics::gauge;
use proto::node::DescribeRequest;
use proto::node::node_client::NodeClient;
use serve::mutual::Mutual;
use serve::upstream::WideWindows;
use tokio::sync::{Notify, watch};
use tokio_util::sync::{CancellationToken, DropGuard};
use tonic::Status;

use crate::node::{Link, Node};
use crate::place::Candidate;

/// How often a node is asked who it is and what room it has.
const EVERY: Duration = Duration::from_secs(2);
/// The same while it does not answer.
const EVERY_AWAY: Duration = Duration::from_millis(500);
/// What streams with wide windows may have sent ahead together, in bytes.
const WIDE_WINDOWS: usize = 16 << 20;

/// All nodes.
pub struct Nodes {
    tls: Arc<Mutual>,
    patience: Duration,
    windows: WideWindows,
    forgotten_file: Option<PathBuf>,
    table: Mutex<Table>,
    /// Whether every address was tried since it became known.
    settled: watch::Sender<bool>,
}

#[derive(Default)]
struct Table {
    /// Whether the addresses are known, be they none.
    has_addresses: bool,
    by_address: BTreeMap<Arc<str>, Entry>,
    /// Nodes that have answered, and whose addresses are nobody's or another's now. They have objects, so they are missed
    /// until they answer elsewhere or an operator says that they are gone.
    departed: BTreeMap<Key, Arc<Node>>,
    forgotten: BTreeSet<Key>,
    driver_name: Option<String>,
}

/// What is known of an address.
struct Entry {
    state: State,
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
    /// Who is or was there.
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
    /// The state of an address is no more, and another may follow.
    fn is_past(departed: &mut BTreeMap<Key, Arc<Node>>, past: &State, next: Option<&State>) {
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

/// 1 while the node answers.
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

/// Where the objects of a key are.
pub enum Place {
    /// On this node, which answers.
    Here(Arc<Node>),
    /// An operator has said that the node is gone for good.
    Forgotten,
    /// On a node that does not answer now, or that nobody knows.
    Away(Status),
}

impl Nodes {
    /// None yet.
    pub fn new(tls: Arc<Mutual>, patience: Duration, forgotten_file: Option<PathBuf>) -> Arc<Self> {
        Arc::new(Nodes {
            tls,
            patience,
            windows: WideWindows::of(WIDE_WINDOWS),
            forgotten_file,
            table: Mutex::default(),
            settled: watch::Sender::new(false),
        })
    }

    /// These are the addresses from now on: new ones are asked, and others no longer.
    pub fn set_addresses(self: &Arc<Self>, addresses: &BTreeSet<String>) {
        let mut table = self.table();
        let Table { by_address, departed, .. } = &mut *table;
        by_address.retain(|address, entry| {
            let stays = addresses.contains(&**address);
            if !stays {
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
                let entry = Entry { state: State::New, _task: AbortOnDrop(task.abort_handle()) };
                table.by_address.insert(address, entry);
            }
        }
        self.changed(&table);
    }

    /// Reads the keys of nodes that are gone for good.
    pub fn read_forgotten(&self) {
        let Some(file) = &self.forgotten_file else { return };
        match crate::forget::read(file) {
            Ok(forgotten) => {
                let mut table = self.table();
                if table.forgotten != forgotten {
                    let keys: Vec<_> = forgotten.iter().map(Key::to_string).collect();
                    tracing::info!(keys = keys.join(", "), "forgotten nodes");
                    table.forgotten = forgotten;
                    self.changed(&table);
                }
            }
            // What was forgotten stays so.
            Err(error) => tracing::warn!(error, "the file of --forgotten is not used"),
        }
    }

    /// Reads them again and again, for ever.
    pub async fn follow_forgotten(self: Arc<Self>) {
        loop {
            tokio::time::sleep(EVERY).await;
            self.read_forgotten();
        }
    }

    /// Asks one address, for ever.
    async fn follow(self: Arc<Self>, address: Arc<str>) {
        let suspect = Arc::new(Notify::new());
        let mut link = None;
        // Of the node that answers now: cancelled when it does not, and when this task ends.
        let mut up = Answers::new();
        loop {
            let way =
                link.get_or_insert_with(|| Link::new(&address, &self.tls, self.patience, &self.windows));
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
                Err(why) => self.put_away(&address, why),
            }
            tokio::select! {
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
        let asked = tokio::time::timeout(self.patience, client.describe(DescribeRequest {})).await;
        let described = match asked {
            Ok(Ok(answer)) => answer.into_inner(),
            Ok(Err(status)) => return Err(format!("{:?}: {}", status.code(), status.message())),
            Err(_) => return Err(format!("it says nothing for {} s", self.patience.as_secs_f64())),
        };
        let key: Key = described.key.parse().map_err(|_| format!("its key is {:?}", described.key))?;
        if link.key() != Some(key) {
            return Err(format!("it has the key {key}, and its certificate is for another"));
        }
        let mut table = self.table();
        let driver_name = table.driver_name.get_or_insert_with(|| described.driver_name.clone());
        if *driver_name != described.driver_name {
            return Err(format!(
                "its driver is {}, and the others are {driver_name} (--driver-name)",
                described.driver_name
            ));
        }
        drop(table);
        let candidate = Candidate {
            key,
            topology: described.topology.clone().into_iter().collect(),
            total: described.total_bytes,
            free: described.free_bytes,
            provisioned: described.provisioned_bytes,
        };
        let node = Node::new(address, key, described, link.clone(), suspect.clone(), gone.clone());
        Ok((Arc::new(node), candidate))
    }

    fn put(&self, address: &Arc<str>, state: State) {
        let mut table = self.table();
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
        Table::is_past(departed, &entry.state, Some(&state));
        entry.state = state;
        self.changed(&table);
    }

    fn put_away(&self, address: &Arc<str>, why: String) {
        let before = self.table().by_address.get(address).and_then(|entry| entry.state.node().cloned());
        self.put(address, State::Away(before, why));
    }

    fn changed(&self, table: &Table) {
        let mut counts = [0_u32; 3];
        for entry in table.by_address.values() {
            let which = match &entry.state {
                State::Up(node, _) if table.forgotten.contains(&node.key) => 2,
                State::Up(..) => 0,
                State::New | State::Away(..) => 1,
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
        // One that joins later holds nobody up.
        self.settled.send_if_modified(|before| settled && !std::mem::replace(before, true));
    }

    fn table(&self) -> MutexGuard<'_, Table> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until a router that has just started has tried all nodes.
    pub async fn settled(&self) {
        let mut settled = self.settled.subscribe();
        let _ = tokio::time::timeout(self.patience, settled.wait_for(|settled| *settled)).await;
    }

    /// All that answer, by key. Data directories that two nodes claim are left out.
    pub fn up(&self) -> Vec<Arc<Node>> {
        self.candidates().into_iter().map(|(node, _)| node).collect()
    }

    /// The same, with what is to be known of their room.
    pub fn candidates(&self) -> Vec<(Arc<Node>, Candidate)> {
        let table = self.table();
        let mut claims: BTreeMap<Key, Vec<_>> = BTreeMap::new();
        for entry in table.by_address.values() {
            if let State::Up(node, candidate) = &entry.state
                && !table.forgotten.contains(&node.key)
            {
                claims.entry(node.key).or_default().push((node.clone(), candidate.clone()));
            }
        }
        // A node with two addresses is one.
        let is_one = |nodes: &Vec<(Arc<Node>, _)>| nodes.iter().all(|(node, _)| node.name == nodes[0].0.name);
        claims.into_values().filter(is_one).filter_map(|nodes| nodes.into_iter().next()).collect()
    }

    /// Names of the nodes that lists cannot be asked of, and the topologies of those that were known before.
    pub fn away(&self) -> Vec<(String, Option<Arc<Node>>)> {
        let table = self.table();
        let mut claimed: BTreeMap<Key, &str> = BTreeMap::new();
        let mut away = Vec::new();
        for (address, entry) in &table.by_address {
            match &entry.state {
                State::Up(node, _) => {
                    // Two that claim one data directory: neither is asked.
                    if *claimed.entry(node.key).or_insert(&node.name) != node.name {
                        away.push((node.name.clone(), None));
                    }
                }
                State::Away(Some(node), _) if table.forgotten.contains(&node.key) => {}
                State::Away(Some(node), _) => away.push((node.name.clone(), Some(node.clone()))),
                State::Away(None, _) | State::New => away.push((address.to_string(), None)),
            }
        }
        away.extend(table.missed().map(|node| (node.name.clone(), Some(node.clone()))));
        // A pod that came back at another address is there.
        away.retain(|(_, node)| node.as_ref().is_none_or(|node| !claimed.contains_key(&node.key)));
        away
    }

    /// Where the objects of this key are.
    pub fn place(&self, key: Key) -> Place {
        let table = self.table();
        if table.forgotten.contains(&key) {
            return Place::Forgotten;
        }
        // A node with two addresses is one.
        let mut up: BTreeMap<&str, &Arc<Node>> = BTreeMap::new();
        let mut away = None;
        for entry in table.by_address.values() {
            match &entry.state {
                State::Up(node, _) if node.key == key => {
                    up.entry(&node.name).or_insert(node);
                }
                State::Away(Some(node), why) if node.key == key => away = Some((node, why)),
                _ => {}
            }
        }
        let up: Vec<&Arc<Node>> = up.into_values().collect();
        match (&up[..], away) {
            ([node], _) => Place::Here((*node).clone()),
            ([one, two, ..], _) => Place::Away(Status::failed_precondition(format!(
                "nodes {} and {} both have the data directory {key}: one is a copy, stop its driver",
                one.name, two.name
            ))),
            ([], Some((node, why))) => Place::Away(node.unavailable(why)),
            ([], None) if table.departed.contains_key(&key) => {
                Place::Away(table.departed[&key].unavailable("its address is no longer in the list of nodes"))
            }
            ([], None) => Place::Away(Status::unavailable(format!(
                "no node with the data directory {key} has answered: try again when it is back, or, if it is gone for \
                 good, run deltapath-router forget {key}"
            ))),
        }
    }

    /// A ticket that lets the node `reader` read `source` on another.
    pub fn ticket(&self, source: &str, reader: Key) -> Result<Vec<u8>, Status> {
        let signer =
            self.tls.signer().ok_or_else(|| Status::unavailable("the router has no certificate yet"))?;
        let issued = signer.issue(source, &reader.to_string());
        issued.map_err(|error| Status::internal(format!("sign a ticket: {error}")))
    }

    /// The name of the driver, as the nodes say it.
    pub fn driver_name(&self) -> Option<String> {
        self.table().driver_name.clone()
    }
}
