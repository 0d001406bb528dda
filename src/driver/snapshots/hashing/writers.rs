//! Detects writes to volumes by the counters of their devices. Hashing slows down while volumes are written.

use std::collections::{BTreeMap, VecDeque};
use std::ops::Bound;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use crate::sys::loopdev::LoopDevice;
use base::Counter;

/// A list of devices is used for at least this long, and for at least this many times as long as making it took.
const LISTED: Duration = Duration::from_secs(1);
const LISTED_TIMES: u32 = 100;

/// The numbers of devices that one call reads: those that were written last, and some of the others in turn. So with few
/// devices all are read each time, and with many the cost is bounded.
const WRITTEN_LAST: usize = 16;
const OTHERS: usize = 32;

/// Watches the writes to all volumes.
#[derive(Debug)]
pub(in crate::driver) struct Writers {
    volumes: PathBuf,
    devices: Mutex<(Devices, Option<Instant>)>,
}

/// The counter files of devices.
#[derive(Debug, Default)]
struct Devices {
    /// With the completed writes when each was read last.
    all: BTreeMap<PathBuf, Option<u64>>,
    /// The devices written most recently, newest first; at most [`WRITTEN_LAST`].
    written: VecDeque<PathBuf>,
    /// The last of the others that was read.
    looked_at: PathBuf,
    /// How often a device was found to have been written.
    changes: u64,
}

impl Writers {
    /// Watches the volumes whose files are below this directory.
    pub(in crate::driver) fn new(volumes: PathBuf) -> Self {
        Writers { volumes, devices: Mutex::default() }
    }
}

impl Counter for Writers {
    /// A number that differs from the last call's if anything was written since; with many devices a write may show only
    /// some calls later.
    fn count(&self) -> u64 {
        let mut devices = self.devices.lock();
        let (devices, list_again) = &mut *devices;
        if list_again.is_none_or(|due| Instant::now() >= due) {
            let started = Instant::now();
            // Without a list hashing does not give way to writers.
            let counters = LoopDevice::counters_on(|path| path.starts_with(&self.volumes));
            devices.set(counters.unwrap_or_default());
            *list_again = Some(Instant::now() + LISTED.max(started.elapsed() * LISTED_TIMES));
        }
        devices.look(writes)
    }
}

impl Devices {
    /// Replaces the list of devices and keeps what is known of each. New devices are read first, since they may be written.
    fn set(&mut self, counters: Vec<PathBuf>) {
        let mut before = std::mem::take(&mut self.all);
        for path in counters {
            let known = before.remove(&path);
            if known.is_none() {
                self.written.push_front(path.clone());
            }
            self.all.insert(path, known.flatten());
        }
        self.written.retain(|path| self.all.contains_key(path));
        self.written.truncate(WRITTEN_LAST);
    }

    fn look(&mut self, writes: impl Fn(&Path) -> Option<u64>) -> u64 {
        let behind = self.all.range::<PathBuf, _>((Bound::Excluded(&self.looked_at), Bound::Unbounded));
        let in_turn = behind.chain(self.all.range::<PathBuf, _>(..=&self.looked_at));
        let others = in_turn.map(|(path, _)| path).filter(|path| !self.written.contains(path));
        let others: Vec<PathBuf> = others.take(OTHERS).cloned().collect();
        if let Some(last) = others.last() {
            self.looked_at.clone_from(last);
        }
        for path in self.written.iter().cloned().chain(others).collect::<Vec<_>>() {
            let now = writes(&path);
            let before = self.all.insert(path.clone(), now).flatten();
            if before.is_some() && now.is_some() && before != now {
                self.changes += 1;
                self.written.retain(|other| *other != path);
                self.written.push_front(path);
            }
        }
        self.written.truncate(WRITTEN_LAST);
        self.changes
    }
}

/// The number of writes that a device has completed; `None` if the device is gone.
fn writes(counters: &Path) -> Option<u64> {
    std::fs::read_to_string(counters).ok()?.split_whitespace().nth(4)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use std::cell::{Cell, RefCell};

    use super::*;

    fn paths(count: u64) -> Vec<PathBuf> {
        (0..count).map(|number| number.to_string().into()).collect()
    }

    /// Not from an incident: reading a file for each volume in use, 100 times a second, costs too much.
    #[test]
    fn a_look_costs_no_more_with_many_devices_and_finds_who_writes() {
        for (count, looks_to_find) in [(1, 1), (48, 1), (1000, 31)] {
            let mut devices = Devices::default();
            devices.set(paths(count));
            let written = RefCell::new(vec![7; count as usize]);
            let reads = Cell::new(0);
            let look = |devices: &mut Devices| {
                reads.set(0);
                let count = devices.look(|path| {
                    reads.set(reads.get() + 1);
                    written.borrow().get(path.to_str()?.parse::<usize>().ok()?).copied()
                });
                assert!(reads.get() <= WRITTEN_LAST + OTHERS, "{} reads", reads.get());
                count
            };
            for _ in 0..looks_to_find {
                assert_eq!(look(&mut devices), 0, "what was written before is not written now");
            }
            let mut found = 0;
            for writer in [0, count - 1, count / 2].map(|writer| writer as usize) {
                written.borrow_mut()[writer] += 1;
                let looks = (1..).find(|_| look(&mut devices) > found).expect("found");
                assert!(looks <= looks_to_find, "{writer} of {count} is found after {looks} looks");
                found += 1;
                // From then on each write is seen at once.
                for _ in 0..3 * looks_to_find {
                    written.borrow_mut()[writer] += 1;
                    found += 1;
                    assert_eq!(look(&mut devices), found);
                }
            }
            // All devices are written once, at the same time.
            written.borrow_mut().iter_mut().for_each(|writes| *writes += 1);
            for _ in 0..looks_to_find + 1 {
                look(&mut devices);
            }
            assert_eq!(look(&mut devices), found + count, "each is counted once");
        }
    }

    #[test]
    fn what_is_known_of_a_device_outlives_the_list_that_it_was_in() {
        let mut devices = Devices::default();
        devices.set(paths(3));
        assert_eq!(devices.look(|_| Some(1)), 0);
        devices.set(paths(4)[1..].to_vec());
        assert_eq!(devices.written[0], Path::new("3"), "fresh ones are first");
        assert_eq!(devices.all.values().copied().collect::<Vec<_>>(), [Some(1), Some(1), None]);
        assert_eq!(devices.look(|_| None), 0, "a device that is gone is no writer");
        assert_eq!(devices.look(|_| Some(5)), 0);
        assert_eq!(devices.look(|_| Some(6)), 3);
    }
}
