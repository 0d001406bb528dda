//! Lists in pages.
//!
//! A token is the id of the last entry sent. Ids are never used twice and lists are in the order of ids, so a token keeps
//! its place when objects are made or deleted between pages, even the one that it names.

use std::str::FromStr;
use std::sync::Arc;

use crate::driver::error::{Error, Result, shown};

/// Entries of a page at most: some 300 bytes each, so well under gRPC's 4 MiB.
pub(in crate::driver) const MAX_PAGE: usize = 5000;

/// The requested part of a list.
#[derive(Clone, Debug, Default)]
pub struct PageRequest {
    /// `max_entries`: the most entries; 0 for as many as fit into a message.
    pub max_entries: i32,
    /// `starting_token`: the `next_token` of the page before; empty for the first.
    pub starting_token: String,
}

impl PageRequest {
    pub(in crate::driver) fn limit(&self) -> Result<usize> {
        match usize::try_from(self.max_entries) {
            Ok(0) => Ok(MAX_PAGE),
            Ok(most) => Ok(most.min(MAX_PAGE)),
            Err(_) => Err(Error::Invalid {
                field: "max_entries",
                value: self.max_entries.to_string(),
                want: "0 (no limit of the caller's) or more".into(),
            }),
        }
    }

    pub(in crate::driver) fn after<Id: FromStr>(&self) -> Result<Option<Id>> {
        if self.starting_token.is_empty() {
            return Ok(None);
        }
        let bad = |_| Error::BadToken { token: shown(&self.starting_token) };
        self.starting_token.parse().map(Some).map_err(bad)
    }
}

/// A part of a list.
#[derive(Clone, Debug)]
pub struct Page<R> {
    /// In the order of their tokens.
    pub entries: Vec<Arc<R>>,
    /// The token of the next page; empty when this is the last.
    pub next_token: String,
}

/// Which snapshots are listed.
#[derive(Clone, Debug, Default)]
pub struct SnapshotFilter {
    /// Only those of this volume; empty for all.
    pub source_volume_id: String,
    /// Only this one; empty for all.
    pub snapshot_id: String,
}

pub(in crate::driver) fn optional<Id: FromStr>(text: &str) -> Result<Option<Id>, Id::Err> {
    if text.is_empty() { Ok(None) } else { text.parse().map(Some) }
}

pub(in crate::driver) fn page<R>(
    mut records: impl Iterator<Item = Arc<R>>,
    limit: usize,
    token: impl Fn(&R) -> String,
) -> Page<R> {
    let entries: Vec<Arc<R>> = records.by_ref().take(limit).collect();
    let more = records.next().is_some();
    let next_token = entries.last().filter(|_| more).map_or_else(String::new, |last| token(last));
    Page { entries, next_token }
}
