//! Nodes that answer, and are taken for something that they are not.

use std::collections::BTreeMap;
use std::sync::Arc;

use base::DataDirKey;

use super::{Entry, State, Table};
use crate::node::Node;
use crate::placement::Candidate;

/// Why a node that answers is not used as others are.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Trouble {
    /// It has another driver.
    Stranger(String),
    /// Another process has its data directory too: one is a copy, and it is not known which.
    Copy(String),
    /// Another node has its node id too: nothing new is made there, since its topology does not say which of them has it.
    TakenId(String),
}

impl Trouble {
    pub(super) fn why(&self) -> &str {
        let (Trouble::Stranger(why) | Trouble::Copy(why) | Trouble::TakenId(why)) = self;
        why
    }
}

/// Nodes that answer, by what two of them may have in common.
#[derive(Default)]
struct Alike<'t> {
    key: BTreeMap<DataDirKey, Vec<&'t Arc<Node>>>,
    name: BTreeMap<&'t str, Vec<&'t Arc<Node>>>,
}

impl Entry {
    /// Who answers there, if its objects can be reached.
    pub(super) fn used(&self) -> Option<(&Arc<Node>, &Candidate)> {
        match (&self.state, &self.trouble) {
            (State::Up(node, candidate), None | Some(Trouble::TakenId(_))) => Some((node, candidate)),
            _ => None,
        }
    }
}

impl Table {
    /// The name that more nodes have than any other. Nodes that do not answer count too.
    fn majority(&self) -> Option<String> {
        let nodes = self.by_address.values().filter_map(|entry| entry.state.node());
        let nodes = nodes.chain(self.departed.values());
        let names: BTreeMap<DataDirKey, &str> = nodes.map(|node| (node.key, node.driver.as_str())).collect();
        let mut counts: BTreeMap<&str, usize> = BTreeMap::new();
        names.values().for_each(|name| *counts.entry(name).or_default() += 1);
        let most = counts.values().copied().max()?;
        let mut first = counts.iter().filter(|(_, count)| **count == most);
        let name = first.next().map(|(name, _)| (*name).to_owned());
        name.filter(|_| first.next().is_none())
    }

    fn trouble_of(&self, node: &Node, alike: &Alike<'_>) -> Option<Trouble> {
        match &self.driver_name {
            Some(name) if *name == node.driver => {}
            Some(name) => {
                let why = format!(
                    "its driver is {:?}, and that of the cluster is {name:?} (--driver-name)",
                    node.driver
                );
                return Some(Trouble::Stranger(why));
            }
            None => {
                let why = format!(
                    "its driver is {:?}, and as many nodes have another: set --driver-name",
                    node.driver
                );
                return Some(Trouble::Stranger(why));
            }
        }
        let is_same = |other: &Node| node.name == other.name && node.process == other.process;
        if let Some(other) = alike.key[&node.key].iter().find(|other| !is_same(other)) {
            let (key, one, two) = (node.key, &node.name, &other.name);
            return Some(Trouble::Copy(format!(
                "nodes {one} at {} and {two} at {} both have the data directory {key}: one is a copy, stop its driver",
                node.address, other.address
            )));
        }
        let mut others = alike.name[node.name.as_str()].iter();
        let other = others.find(|other| other.driver == node.driver && other.key != node.key)?;
        Some(Trouble::TakenId(format!(
            "the data directories {} at {} and {} at {} both have the node id {}: start one of the drivers with another \
             --node-id",
            node.key, node.address, other.key, other.address, node.name
        )))
    }

    pub(super) fn look_for_trouble(&mut self, driver_name: Option<&String>, is_settled: bool) {
        // Among as many of each the name stays that was most nodes', and not that of the first to answer.
        let before = self.driver_name.take().filter(|_| is_settled);
        self.driver_name = driver_name.cloned().or_else(|| self.majority()).or(before);
        let mut alike = Alike::default();
        for node in self.up() {
            alike.key.entry(node.key).or_default().push(node);
            alike.name.entry(node.name.as_str()).or_default().push(node);
        }
        let found: Vec<Option<Trouble>> = self
            .by_address
            .values()
            .map(|entry| match &entry.state {
                State::Up(node, _) => self.trouble_of(node, &alike),
                State::New | State::Away(..) => None,
            })
            .collect();
        for ((address, entry), found) in self.by_address.iter_mut().zip(found) {
            if let Some(trouble) = found.as_ref().filter(|_| entry.trouble != found) {
                tracing::error!(
                    address = &**address,
                    why = trouble.why(),
                    "a node is not used as others are"
                );
            }
            entry.trouble = found;
        }
    }
}
