//! The queue: which snapshots are still to be hashed, in which order, and when one that failed is tried again. It is
//! in memory only. What it is made of, the `pending` maps, is on disk, and read again at start.

use std::collections::{BTreeMap, HashSet, VecDeque};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::base::{SnapshotId, Stop};
use crate::store::SnapshotRecord;

/// How often retained snapshots are looked at for their age.
pub(super) const TURN: Duration = Duration::from_secs(600);
/// When a snapshot that could not be hashed is tried again: a pool that was full may have room by then. Each
/// further failure doubles it, up to [`TURN`].
const RETRY: Duration = Duration::from_secs(5);

/// The snapshots that are still to be hashed.
#[derive(Debug, Default)]
pub(in super::super) struct Hashing {
    state: Mutex<State>,
    wake: Condvar,
    pub(super) stop: Stop,
}

#[derive(Debug, Default)]
struct State {
    /// In the order in which they were taken: a child takes hashes over from its parent.
    queue: VecDeque<SnapshotId>,
    /// Those in the queue.
    queued: HashSet<SnapshotId>,
    /// When to look around next.
    turn: Option<Instant>,
    /// Bytes left of each.
    left: BTreeMap<SnapshotId, u64>,
    /// Those that could not be hashed: when to try again, and how often it failed.
    failed: BTreeMap<SnapshotId, (Instant, u32)>,
    stopping: bool,
}

impl Hashing {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Bytes of all snapshots that are still to be hashed.
    pub(in super::super) fn backlog(&self) -> u64 {
        self.state().left.values().sum()
    }

    /// Takes a snapshot into the queue, with so many bytes to be hashed; none where it is to be compared
    /// only.
    pub(in super::super) fn add(&self, record: &SnapshotRecord, bytes: u64) {
        let mut state = self.state();
        if !record.tracking {
            return;
        }
        state.left.insert(record.id.clone(), bytes);
        if state.queued.insert(record.id.clone()) {
            state.queue.push_back(record.id.clone());
            self.wake.notify_all();
        }
    }

    /// A snapshot is done, or gone; unless it was queued again meanwhile.
    pub(in super::super) fn forget(&self, id: &SnapshotId) {
        let mut state = self.state();
        if !state.queued.contains(id) {
            state.left.remove(id);
        }
        state.failed.remove(id);
    }

    /// A snapshot could not be hashed: it is tried again, each time twice as late.
    pub(super) fn put_off(&self, id: &SnapshotId) {
        let mut state = self.state();
        if state.left.contains_key(id) {
            let failures = state.failed.get(id).map_or(0, |(_, failures)| *failures);
            let delay = RETRY.saturating_mul(1 << failures.min(16)).min(TURN);
            state.failed.insert(id.clone(), (Instant::now() + delay, failures + 1));
        }
    }

    /// Notes that so many bytes of a snapshot were hashed.
    pub(super) fn progress(&self, id: &SnapshotId, bytes: u64) {
        if let Some(left) = self.state().left.get_mut(id) {
            *left = left.saturating_sub(bytes);
        }
    }

    /// Whether it is time for a look around, which it is once.
    pub(super) fn is_turn(&self) -> bool {
        let mut state = self.state();
        let is_due = state.turn.is_some_and(|turn| Instant::now() >= turn);
        if is_due {
            state.turn = None;
        }
        is_due
    }

    /// Ends the work at hand, and gives out no other.
    pub(super) fn cease(&self) {
        self.state().stopping = true;
        self.stop.cancel();
        self.wake.notify_all();
    }

    /// The next snapshot; `Ok(None)` when it is time for a look around.
    pub(super) fn next(&self) -> Result<Option<SnapshotId>, Stopping> {
        let mut state = self.state();
        loop {
            if state.stopping {
                return Err(Stopping);
            }
            let now = Instant::now();
            let turn = *state.turn.get_or_insert(now + TURN);
            if now >= turn {
                state.turn = None;
                return Ok(None);
            }
            if let Some((id, at)) =
                state.failed.iter_mut().find_map(|(id, (at, _))| (now >= *at).then_some((id.clone(), at)))
            {
                // Its count of failures stays until it succeeds.
                *at = now + TURN;
                return Ok(Some(id));
            }
            if let Some(id) = state.queue.pop_front() {
                state.queued.remove(&id);
                return Ok(Some(id));
            }
            let wake = state.failed.values().map(|(at, _)| *at).fold(turn, Instant::min);
            (state, _) = self.wake.wait_timeout(state, wake - now).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

pub(super) struct Stopping;
