//! The queue decides which snapshot the hashing thread works on next. It is kept in memory only, and made again from the
//! maps at start.
//!
//! Volumes take turns, one step each, so that no volume waits for another's first snapshot. Work on a snapshot has three
//! parts. The blocks that may have changed come first, those of a volume's newest snapshot before the others, because the
//! next delta needs them. The rest comes in the order in which the snapshots were taken, because each takes hashes over
//! from the one before. Skip maps come last, those of the oldest snapshot first. A rest without anything to hash comes before all: it reads no data, and frees the bytes of
//! deleted snapshots.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::PoisonError;
use std::time::{Duration, Instant};

use crate::store::SnapshotRecord;
use crate::sync::{Condvar, Mutex, MutexGuard};
use base::{SnapshotId, Stop, VolumeId};

/// How often the age of retained snapshots is checked.
pub(in crate::driver) const RETENTION_INTERVAL: Duration = Duration::from_secs(600);
/// The time until the retry of a snapshot that could not be hashed, for instance because the pool was full. Each further
/// failure doubles it, up to [`RETENTION_INTERVAL`].
const RETRY: Duration = Duration::from_secs(5);

/// The snapshots that are still to be hashed.
#[derive(Debug, Default)]
pub(in crate::driver) struct Queue {
    state: Mutex<State>,
    wake: Condvar,
    pub(in crate::driver) stop: Stop,
}

/// Each operation takes logarithmic time, since calls wait for it and thousands of snapshots may be queued.
#[derive(Debug, Default)]
struct State {
    volumes: BTreeMap<VolumeId, VolumeQueue>,
    /// The volumes with work to do now, in the order in which they are served: by the rank of the work, then by the volume's
    /// last step.
    order: BTreeSet<(Rank, u64, VolumeId)>,
    /// Failed work, by the time of its retry.
    waiting: BTreeSet<(Instant, Position, Part)>,
    steps: u64,
    /// Bytes of all jobs that are still to be hashed.
    left: u64,
    /// When to check retained snapshots next.
    turn: Option<Instant>,
    stopping: bool,
}

/// A snapshot's volume, and its sequence number there.
type Position = (VolumeId, u64);

/// The queued snapshots of a volume.
#[derive(Debug, Default)]
struct VolumeQueue {
    jobs: BTreeMap<u64, Job>,
    /// The snapshots with work to do now, by the rank of the work.
    ready: BTreeMap<Rank, BTreeSet<u64>>,
    /// The number of the volume's last step.
    served: u64,
}

#[derive(Debug)]
struct Job {
    id: SnapshotId,
    /// Bytes that are still to be hashed.
    left: u64,
    /// Parts that are waiting.
    parts: BTreeMap<Part, Try>,
}

/// When a part is tried next, and how often it has failed. A part that fails does not delay others.
#[derive(Clone, Copy, Debug)]
struct Try {
    due: Option<Instant>,
    failures: u32,
}

const FIRST: Try = Try { due: None, failures: 0 };

/// What to do next.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(in crate::driver) struct Work {
    pub(in crate::driver) id: SnapshotId,
    pub(in crate::driver) part: Part,
    place: Position,
    failures: u32,
}

/// The parts of the work on a snapshot, the first to be done first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(in crate::driver) enum Part {
    /// Hashes the blocks that may have changed since the snapshot before, and finds those that did.
    Changes,
    /// Hashes all other blocks.
    Rest,
    /// Makes its skip maps.
    Skips,
}

/// The order of work. The lowest is first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Rank {
    /// The rest of a snapshot without anything left to hash.
    Hashed,
    Changes,
    Rest,
    /// When all is hashed, so that no data is read for them.
    Skips,
}

impl Rank {
    fn part(self) -> Part {
        match self {
            Rank::Changes => Part::Changes,
            Rank::Skips => Part::Skips,
            Rank::Hashed | Rank::Rest => Part::Rest,
        }
    }
}

impl Job {
    fn new(id: SnapshotId, left: u64) -> Self {
        let parts = [Part::Changes, Part::Rest, Part::Skips].map(|part| (part, FIRST));
        Job { id, left, parts: parts.into() }
    }

    fn rank(&self, part: Part) -> Rank {
        match (part, self.left) {
            (Part::Changes, _) => Rank::Changes,
            (Part::Skips, _) => Rank::Skips,
            (Part::Rest, 0) => Rank::Hashed,
            (Part::Rest, _) => Rank::Rest,
        }
    }
}

impl VolumeQueue {
    /// The rank of the volume's next work.
    fn rank(&self) -> Option<Rank> {
        self.ready.keys().next().copied()
    }

    /// The volume's next work: the changes of the newest snapshot, or the rest or the skip maps of the oldest.
    fn next(&self) -> Option<(u64, Part)> {
        let (rank, sequences) = self.ready.iter().next()?;
        let sequence = match rank {
            Rank::Changes => sequences.last(),
            Rank::Hashed | Rank::Skips | Rank::Rest => sequences.first(),
        };
        Some((*sequence?, rank.part()))
    }
}

impl State {
    /// Changes, adds or removes the job of a place, and updates all indexes.
    fn change<T>(&mut self, place: &Position, change: impl FnOnce(&mut Option<Job>) -> T) -> T {
        let (volume, sequence) = place;
        let mut line = self.volumes.remove(volume).unwrap_or_default();
        if let Some(rank) = line.rank() {
            self.order.remove(&(rank, line.served, volume.clone()));
        }
        let mut job = line.jobs.remove(sequence);
        if let Some(job) = &job {
            self.left -= job.left;
            for (part, attempt) in &job.parts {
                let rank = job.rank(*part);
                match attempt.due {
                    Some(due) => _ = self.waiting.remove(&(due, place.clone(), *part)),
                    None => {
                        let sequences = line.ready.entry(rank).or_default();
                        sequences.remove(sequence);
                        if sequences.is_empty() {
                            line.ready.remove(&rank);
                        }
                    }
                }
            }
        }
        let changed = change(&mut job);
        if let Some(job) = job {
            self.left += job.left;
            for (part, attempt) in &job.parts {
                match attempt.due {
                    Some(due) => _ = self.waiting.insert((due, place.clone(), *part)),
                    None => _ = line.ready.entry(job.rank(*part)).or_default().insert(*sequence),
                }
            }
            line.jobs.insert(*sequence, job);
        }
        if line.jobs.is_empty() {
            return changed;
        }
        if let Some(rank) = line.rank() {
            self.order.insert((rank, line.served, volume.clone()));
        }
        self.volumes.insert(volume.clone(), line);
        changed
    }

    fn add(&mut self, place: &Position, id: &SnapshotId, bytes: u64) {
        self.change(place, |job| {
            let job = job.get_or_insert_with(|| Job::new(id.clone(), bytes));
            job.left = bytes;
            // What made the changes fail may be over, so they are tried at once. The others are tried when they are due.
            job.parts.insert(Part::Changes, FIRST);
            job.parts.entry(Part::Skips).or_insert(FIRST);
            job.parts.entry(Part::Rest).or_insert(FIRST);
        });
    }

    /// The next step that may be done now.
    fn next(&mut self, now: Instant) -> Option<Work> {
        while let Some((_, place, part)) = self.waiting.first().filter(|(due, ..)| now >= *due).cloned() {
            let attempt = |job: &mut Job| job.parts.get_mut(&part).map(|attempt| attempt.due = None);
            self.change(&place, |job| job.as_mut().and_then(attempt));
        }
        let (_, _, volume) = self.order.first()?;
        let (sequence, part) = self.volumes.get(volume)?.next()?;
        let place = (volume.clone(), sequence);
        let (id, failures) = self.change(&place, |job| {
            let job = job.as_mut()?;
            Some((job.id.clone(), job.parts.remove(&part)?.failures))
        })?;
        self.steps += 1;
        self.serve(&place.0);
        Some(Work { id, part, place, failures })
    }

    /// Numbers the volume's last step, so that other volumes have their turn.
    fn serve(&mut self, volume: &VolumeId) {
        let Some(line) = self.volumes.get_mut(volume) else { return };
        if let Some(rank) = line.rank() {
            self.order.remove(&(rank, line.served, volume.clone()));
            self.order.insert((rank, self.steps, volume.clone()));
        }
        line.served = self.steps;
    }

    fn again(&mut self, work: &Work, attempt: Try) {
        self.change(&work.place, |job| {
            // If it was queued again meanwhile, that entry counts.
            job.as_mut().map(|job| _ = job.parts.entry(work.part).or_insert(attempt))
        });
    }

    fn put_off(&mut self, work: &Work, now: Instant) {
        let delay = RETRY.saturating_mul(1 << work.failures.min(16)).min(RETENTION_INTERVAL);
        self.again(work, Try { due: Some(now + delay), failures: work.failures + 1 });
    }

    fn done(&mut self, work: &Work) {
        self.change(&work.place, |job| _ = job.take_if(|job| job.parts.is_empty()));
    }

    fn progress(&mut self, place: &Position, bytes: u64) {
        self.change(place, |job| job.as_mut().map(|job| job.left = job.left.saturating_sub(bytes)));
    }

    fn forget(&mut self, place: &Position) {
        self.change(place, |job| *job = None);
    }
}

impl Queue {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Bytes of all snapshots that are still to be hashed.
    pub(in crate::driver) fn backlog(&self) -> u64 {
        self.state().left
    }

    /// Puts a snapshot into the queue, with the number of bytes to hash.
    pub(in crate::driver) fn add(&self, record: &SnapshotRecord, bytes: u64) {
        if !record.tracking {
            return;
        }
        self.state().add(&(record.volume.clone(), record.sequence), &record.id, bytes);
        self.wake.notify_all();
    }

    /// Queues a snapshot that lacks a skip map.
    pub(in crate::driver) fn add_skips(&self, record: &SnapshotRecord) {
        self.state().change(&(record.volume.clone(), record.sequence), |job| {
            let job =
                job.get_or_insert_with(|| Job { id: record.id.clone(), left: 0, parts: BTreeMap::new() });
            job.parts.entry(Part::Skips).or_insert(FIRST);
        });
        self.wake.notify_all();
    }

    /// Removes a snapshot that no longer exists.
    pub(in crate::driver) fn forget(&self, record: &SnapshotRecord) {
        self.state().forget(&(record.volume.clone(), record.sequence));
    }

    /// Queues work that has more steps, after others had their turn.
    pub(in crate::driver) fn go_on(&self, work: &Work) {
        self.state().again(work, FIRST);
    }

    /// Queues work that failed for a retry; the delay doubles each time.
    pub(in crate::driver) fn put_off(&self, work: &Work) {
        self.state().put_off(work, Instant::now());
    }

    /// Ends work. Its snapshot leaves the queue, unless another part is left.
    pub(in crate::driver) fn done(&self, work: &Work) {
        self.state().done(work);
    }

    /// Subtracts bytes of a snapshot that were hashed.
    pub(in crate::driver) fn progress(&self, record: &SnapshotRecord, bytes: u64) {
        self.state().progress(&(record.volume.clone(), record.sequence), bytes);
    }

    /// Stops the current work, and gives out no more.
    pub(in crate::driver) fn cease(&self) {
        self.state().stopping = true;
        self.stop.cancel();
        self.wake.notify_all();
    }

    /// Waits for the next thing to do.
    pub(in crate::driver) fn next(&self) -> Next {
        let mut state = self.state();
        loop {
            if state.stopping {
                return Next::Stop;
            }
            let now = Instant::now();
            let turn = *state.turn.get_or_insert(now + RETENTION_INTERVAL);
            if now >= turn {
                state.turn = None;
                return Next::Retention;
            }
            if let Some(work) = state.next(now) {
                return Next::Work(work);
            }
            let wake = state.waiting.first().map_or(turn, |(due, ..)| turn.min(*due));
            (state, _) = self
                .wake
                .wait_timeout(state, wake.saturating_duration_since(now))
                .unwrap_or_else(PoisonError::into_inner);
        }
    }
}

/// What the hashing thread does next.
pub(in crate::driver) enum Next {
    Work(Work),
    /// Check the age of retained snapshots.
    Retention,
    Stop,
}

#[cfg(test)]
mod tests;
