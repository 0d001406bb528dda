//! The history of a volume: its snapshots in the order they were taken, deleted ones that are retained among them, and
//! the maps that link each to its parent. Code that adds to it, deletes from it or changes a link does so through a
//! [`History`], which holds the lock; readers need none, since files are replaced by rename and the index changes
//! after them.
//!
//! - `hold.rs`: the lock, and what is added, removed and replaced under it.
//! - `parent.rs`: the snapshot that a new one builds on. `snapshots/fill.rs` writes the link to it into the draft; the commit
//!   makes it count.
//! - `links.rs`: the way from one snapshot to a later one, and how links are merged when a snapshot between is removed.
//! - `skips.rs`: links over many snapshots at once.
//! - `retention.rs`: which deleted snapshots stay, and whose bytes are freed.
//! - `healing.rs`: maps and hashes that are damaged or wrong are made again from the data.

pub(in crate::driver) mod healing;
pub(in crate::driver) mod hold;
pub(in crate::driver) mod links;
pub(in crate::driver) mod parent;
pub(in crate::driver) mod retention;
pub(in crate::driver) mod skips;
