//! Which node has the objects of a key, and what is said where none is known.

use std::sync::Arc;

use base::DataDirKey;
use tonic::Status;

use super::trouble::Trouble;
use super::{Nodes, State, Table};
use crate::node::Node;

/// What is known of the node whose data directory has a key.
pub enum Lookup {
    Found(Arc<Node>),
    /// An operator has said that the node is gone for good.
    Forgotten,
    /// It does not answer now, or is not known.
    Unavailable(Status),
}

impl Nodes {
    pub fn lookup(&self, key: DataDirKey) -> Lookup {
        let table = self.table.lock();
        if table.forgotten.contains(&key) {
            return Lookup::Forgotten;
        }
        let (mut away, mut refused) = (None, None);
        for (address, entry) in &table.by_address {
            match (&entry.state, &entry.trouble) {
                (State::Up(node, _), None | Some(Trouble::TakenId(_))) if node.key == key => {
                    return Lookup::Found(node.clone());
                }
                (State::Up(node, _), Some(trouble)) if node.key == key => {
                    refused = Some(Status::failed_precondition(format!(
                        "node {} ({key}) at {address} is not used: {}",
                        node.name,
                        trouble.why()
                    )));
                }
                (State::Away(Some(node), why), _) if node.key == key => away = Some(node.unavailable(why)),
                (State::Away(None, why), _) if entry.shown == Some(key) => {
                    away = Some(Status::unavailable(format!(
                        "the node at {address} ({key}) does not answer as it should, {why}: try again when it does"
                    )));
                }
                _ => {}
            }
        }
        let departed = || {
            let departed = table.departed.get(&key)?;
            Some(departed.unavailable("its address is no longer in the list of nodes"))
        };
        Lookup::Unavailable(refused.or(away).or_else(departed).unwrap_or_else(|| {
            let advice = match self.may_live(&table) {
                Some(why) => format!("{why}: try again later"),
                None => format!(
                    "try again when it is back, or, if it is gone for good, run deltapath-router forget {key}"
                ),
            };
            Status::unavailable(format!("no node with the data directory {key} has answered: {advice}"))
        }))
    }

    /// Why a node that has never answered may be there all the same, if there is a reason.
    fn may_live(&self, table: &Table) -> Option<String> {
        if let Some(why) = self.tls.missing() {
            return Some(format!("the router cannot ask any, {why}"));
        }
        if table.by_address.is_empty() {
            return Some("no address of a node is known yet".to_owned());
        }
        let unknown = table.by_address.iter().filter_map(|(address, entry)| match &entry.state {
            State::New => Some(format!("{address} has not been asked yet")),
            State::Away(None, why) if entry.is_taken && entry.shown.is_none() => {
                Some(format!("what listens at {address} does not answer as a node, {why}"))
            }
            State::Up(..) | State::Away(..) => None,
        });
        let unknown: Vec<String> = unknown.collect();
        (!unknown.is_empty()).then(|| unknown.join("; and "))
    }
}
