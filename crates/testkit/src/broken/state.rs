//! What a broken driver remembers of the calls before.

use std::collections::{HashMap, HashSet};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

/// What a broken driver remembers.
#[derive(Default)]
pub struct State {
    /// Snapshots and the volume of each.
    pub snapshots: Mutex<HashMap<String, String>>,
    /// Volumes and snapshots that are gone.
    pub deleted: Mutex<HashSet<String>>,
    /// Volumes made from snapshots.
    pub restored: Mutex<HashSet<String>>,
    /// Volumes with a filesystem.
    pub mounted: Mutex<HashSet<String>>,
    /// Questions and how often they were asked.
    pub asked: Mutex<HashMap<String, usize>>,
    /// The capacity that an expansion led to.
    pub grown: Mutex<Option<i64>>,
    /// Snapshots deleted.
    pub deletions: AtomicUsize,
    /// Restored volumes published.
    pub in_use: AtomicUsize,
    /// Streams open.
    pub open: AtomicUsize,
    /// A stream was dropped before its end.
    pub cancelled: AtomicBool,
}

/// A stream that is open.
pub struct Opened {
    state: Arc<State>,
    /// Deletions when it was opened.
    pub deletions: usize,
    done: bool,
}

impl State {
    pub fn opened(self: &Arc<Self>) -> Opened {
        self.open.fetch_add(1, Ordering::SeqCst);
        Opened { state: self.clone(), deletions: self.deletions.load(Ordering::SeqCst), done: false }
    }

    pub fn volume_of(&self, snapshot: &str) -> String {
        self.snapshots.lock().expect("lock").get(snapshot).cloned().unwrap_or_default()
    }
}

impl Opened {
    pub fn done(&mut self) {
        self.done = true;
    }
}

impl Drop for Opened {
    fn drop(&mut self) {
        self.state.open.fetch_sub(1, Ordering::SeqCst);
        if !self.done {
            self.state.cancelled.store(true, Ordering::SeqCst);
        }
    }
}
