//! The queue: which snapshots the hashing thread works on next. It is in memory only. What it is made of, the maps, is
//! on disk, and read again at start.
//!
//! Volumes take turns of a step each, so that nobody waits for another's first snapshot. What changed between two
//! snapshots goes before the rest: of a volume the newest first, for that is what the next delta asks for. The rest goes
//! in the order in which the snapshots were taken, for each takes hashes over from the one before. Where nothing is left
//! to be hashed the rest goes before all: it reads no data, and frees the bytes of deleted snapshots.

use std::collections::BTreeMap;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::store::SnapshotRecord;
use base::{SnapshotId, Stop, VolumeId};

/// How often retained snapshots are looked at for their age.
pub(super) const TURN: Duration = Duration::from_secs(600);
/// When a snapshot that could not be hashed is tried again: a pool that was full may have room by then. Each
/// further failure doubles it, up to [`TURN`].
const RETRY: Duration = Duration::from_secs(5);

/// The snapshots that are still to be hashed.
#[derive(Debug, Default)]
pub(super) struct Queue {
    state: Mutex<State>,
    wake: Condvar,
    pub(super) stop: Stop,
}

#[derive(Debug, Default)]
struct State {
    jobs: BTreeMap<Place, Job>,
    /// The number of each volume's last step.
    served: BTreeMap<VolumeId, u64>,
    steps: u64,
    /// When to look at retained snapshots next.
    turn: Option<Instant>,
    stopping: bool,
}

/// A snapshot's volume, and its sequence number there.
type Place = (VolumeId, u64);

#[derive(Debug)]
struct Job {
    id: SnapshotId,
    /// Bytes that are still to be hashed.
    left: u64,
    /// What is to be done, and is not under way.
    parts: BTreeMap<Part, Try>,
}

/// When a part is tried next, and how often it has failed. One that fails holds up no other.
#[derive(Clone, Copy, Debug)]
struct Try {
    due: Option<Instant>,
    failures: u32,
}

const FIRST: Try = Try { due: None, failures: 0 };

/// What to do next.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Work {
    pub(super) id: SnapshotId,
    pub(super) part: Part,
    place: Place,
    failures: u32,
}

/// The parts of the work on a snapshot, the first to be done first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Part {
    /// The blocks that may have changed since the snapshot before, and which of them did.
    Changes,
    /// All others.
    Rest,
}

impl Job {
    fn new(id: SnapshotId, left: u64) -> Self {
        Job { id, left, parts: BTreeMap::from([(Part::Changes, FIRST), (Part::Rest, FIRST)]) }
    }

    /// The part that is done next, if any may be done now, after its rank: the lowest goes first.
    fn next(&self, now: Instant) -> Option<(u8, Part)> {
        let is_due = |part: &Part| {
            self.parts.get(part).is_some_and(|attempt| attempt.due.is_none_or(|due| now >= due))
        };
        let order = match self.left {
            0 => [(0, Part::Rest), (1, Part::Changes)],
            _ => [(1, Part::Changes), (2, Part::Rest)],
        };
        order.into_iter().find(|(_, part)| is_due(part))
    }
}

impl State {
    /// The next step that may be done now.
    fn next(&mut self, now: Instant) -> Option<Work> {
        let mut best: Option<((u8, Part), u64, &Place)> = None;
        for (place, job) in &self.jobs {
            let Some(part) = job.next(now) else { continue };
            let served = self.served.get(&place.0).copied().unwrap_or(0);
            // Places ascend: of a volume the first is the oldest, and the last the newest.
            let is_better = best.is_none_or(|(other, last, of)| match place.0 == of.0 {
                true => part < other || (part == other && part.1 == Part::Changes),
                false => (part, served) < (other, last),
            });
            if is_better {
                best = Some((part, served, place));
            }
        }
        let ((_, part), _, place) = best?;
        let place = place.clone();
        self.steps += 1;
        self.served.insert(place.0.clone(), self.steps);
        let job = self.jobs.get_mut(&place)?;
        let failures = job.parts.remove(&part)?.failures;
        Some(Work { id: job.id.clone(), part, place, failures })
    }

    /// Removes the job of a place.
    fn remove(&mut self, place: &Place) {
        self.jobs.remove(place);
        if !self.jobs.keys().any(|(volume, _)| *volume == place.0) {
            self.served.remove(&place.0);
        }
    }
}

impl Queue {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Bytes of all snapshots that are still to be hashed.
    pub(super) fn backlog(&self) -> u64 {
        self.state().jobs.values().map(|job| job.left).sum()
    }

    /// Puts a snapshot into the queue, with the number of bytes to hash.
    pub(super) fn add(&self, record: &SnapshotRecord, bytes: u64) {
        if !record.tracking {
            return;
        }
        let place = (record.volume.clone(), record.sequence);
        let mut state = self.state();
        let job = state.jobs.entry(place).or_insert_with(|| Job::new(record.id.clone(), bytes));
        job.left = bytes;
        // What was in the way of the changes may be gone. The rest is tried again when it is due.
        job.parts.insert(Part::Changes, FIRST);
        job.parts.entry(Part::Rest).or_insert(FIRST);
        drop(state);
        self.wake.notify_all();
    }

    /// A snapshot is gone.
    pub(super) fn forget(&self, record: &SnapshotRecord) {
        self.state().remove(&(record.volume.clone(), record.sequence));
    }

    /// Work goes on later, when others had their turn.
    pub(super) fn go_on(&self, work: &Work) {
        self.again(work, FIRST);
    }

    /// Work failed: it is tried again, each time twice as late.
    pub(super) fn put_off(&self, work: &Work) {
        let delay = RETRY.saturating_mul(1 << work.failures.min(16)).min(TURN);
        self.again(work, Try { due: Some(Instant::now() + delay), failures: work.failures + 1 });
    }

    fn again(&self, work: &Work, attempt: Try) {
        if let Some(job) = self.state().jobs.get_mut(&work.place) {
            // Unless it was queued again meanwhile.
            job.parts.entry(work.part).or_insert(attempt);
        }
    }

    /// Work is done. Its snapshot leaves the queue, unless something else is to be done.
    pub(super) fn done(&self, work: &Work) {
        let mut state = self.state();
        if state.jobs.get(&work.place).is_some_and(|job| job.parts.is_empty()) {
            state.remove(&work.place);
        }
    }

    /// Counts bytes of a snapshot that were hashed.
    pub(super) fn progress(&self, record: &SnapshotRecord, bytes: u64) {
        if let Some(job) = self.state().jobs.get_mut(&(record.volume.clone(), record.sequence)) {
            job.left = job.left.saturating_sub(bytes);
        }
    }

    /// Ends the work at hand, and gives out no other.
    pub(super) fn cease(&self) {
        self.state().stopping = true;
        self.stop.cancel();
        self.wake.notify_all();
    }

    /// Waits for the next thing to do.
    pub(super) fn next(&self) -> Next {
        let mut state = self.state();
        loop {
            if state.stopping {
                return Next::Stop;
            }
            let now = Instant::now();
            let turn = *state.turn.get_or_insert(now + TURN);
            if now >= turn {
                state.turn = None;
                return Next::Retention;
            }
            if let Some(work) = state.next(now) {
                return Next::Work(work);
            }
            let tries = state.jobs.values().flat_map(|job| job.parts.values());
            let wake = tries.filter_map(|attempt| attempt.due).fold(turn, Instant::min);
            (state, _) = self
                .wake
                .wait_timeout(state, wake.saturating_duration_since(now))
                .unwrap_or_else(PoisonError::into_inner);
        }
    }
}

/// What the hashing thread does next.
pub(super) enum Next {
    Work(Work),
    /// It is time to look at the age of retained snapshots.
    Retention,
    Stop,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn volume(letter: char) -> VolumeId {
        format!("vol-{}", letter.to_string().repeat(32)).parse().expect("an id")
    }

    /// Steps of jobs, as `a2` for the rest of the second snapshot of volume a, `A2` for its changes. Each job is a
    /// volume, a sequence number and the steps that its changes and its rest take.
    #[test]
    fn changes_go_first_and_volumes_take_turns() {
        type Jobs = &'static [(char, u64, u32, u32)];
        let cases: &[(Jobs, &str)] = &[
            (&[], ""),
            // Of a volume: the newest changes first, the rest from the oldest on.
            (&[('a', 1, 1, 1), ('a', 2, 1, 1), ('a', 3, 1, 1)], "A3 A2 A1 a1 a2 a3"),
            // A first snapshot of many steps holds nobody up.
            (&[('a', 1, 1, 4), ('b', 1, 1, 1), ('b', 2, 1, 1)], "A1 B2 B1 a1 b1 a1 b2 a1 a1"),
            // Nor do changes of many steps hold up those of another.
            (&[('a', 2, 4, 1), ('b', 2, 1, 1), ('c', 2, 2, 1)], "A2 B2 C2 A2 C2 A2 A2 b2 c2 a2"),
        ];
        for (jobs, expected) in cases {
            let mut state = State::default();
            let mut steps = BTreeMap::new();
            for (letter, sequence, changes, rest) in jobs.iter() {
                let place = (volume(*letter), *sequence);
                state.jobs.insert(
                    place.clone(),
                    Job::new(SnapshotId::random(base::Key::random().expect("key")).expect("id"), 1),
                );
                steps.insert((place.clone(), Part::Changes as u8), *changes);
                steps.insert((place, Part::Rest as u8), *rest);
            }
            let mut done = Vec::new();
            while let Some(work) = state.next(Instant::now()) {
                let left = steps.get_mut(&(work.place.clone(), work.part as u8)).expect("a job");
                *left -= 1;
                if *left > 0 {
                    state.jobs.get_mut(&work.place).expect("a job").parts.insert(work.part, FIRST);
                }
                let letter = &work.place.0.as_str()[4..5];
                let name = if work.part == Part::Changes { letter.to_uppercase() } else { letter.to_owned() };
                done.push(format!("{name}{}", work.place.1));
            }
            assert_eq!(done.join(" "), *expected);
        }
    }

    #[test]
    fn a_part_that_failed_waits_and_holds_up_no_other() {
        let hashing = Queue::default();
        let (place, now) = ((volume('a'), 1), Instant::now());
        hashing
            .state()
            .jobs
            .insert(place, Job::new(SnapshotId::random(base::Key::random().expect("key")).expect("id"), 1));
        let next = |after: u32| hashing.state().next(now + after * RETRY);
        let changes = next(0).expect("changes");
        hashing.put_off(&changes);
        let rest = next(0).expect("the rest");
        assert_eq!((changes.part, rest.part), (Part::Changes, Part::Rest));
        hashing.done(&rest);
        assert_eq!(next(0), None);
        let again = next(2).expect("changes again");
        assert_eq!((again.part, again.failures), (Part::Changes, 1));
        hashing.put_off(&again);
        assert_eq!(next(1), None, "twice as late");
        hashing.done(&next(3).expect("the third try"));
        assert!(hashing.state().jobs.is_empty());
    }

    #[test]
    fn what_is_hashed_is_freed_before_others_are_hashed() {
        let mut state = State::default();
        for (letter, left) in [('a', 5), ('b', 0), ('c', 5)] {
            state.jobs.insert(
                (volume(letter), 1),
                Job::new(SnapshotId::random(base::Key::random().expect("key")).expect("id"), left),
            );
        }
        let first = state.next(Instant::now()).expect("work");
        assert_eq!((first.part, first.place.0), (Part::Rest, volume('b')));
    }
}
