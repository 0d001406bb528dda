//! Foreground work, which clients wait for, and background work, which gives way to it. Foreground work announces itself, or
//! leaves traces that are counted.

use std::fmt::Debug;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use super::Stop;

/// How long background work runs before it gives way again, and how long it gives way at most: it keeps a fifth of the
/// time, however busy others are.
const WORK: Duration = Duration::from_millis(20);
const PAUSE: Duration = Duration::from_millis(80);

/// How often the counter is read, and for how long after a change of it background work is slow.
const LOOK: Duration = Duration::from_millis(10);
const BUSY: Duration = Duration::from_millis(100);
/// Slow background work keeps one part in this number of the time, over all threads.
const PARTS: u32 = 32;
/// The longest rest of slow background work between two reads.
const REST: Duration = Duration::from_millis(100);

/// Counts foreground work that does not announce itself, as the kernel counts the writes of devices.
pub trait Counter: Debug + Send + Sync {
    /// Changes with each piece of that work, or soon after it. It is asked a hundred times a second: it must not cost more
    /// where more is counted.
    fn count(&self) -> u64;
}

/// Whether there is foreground work now, so that background work can give way.
#[derive(Debug)]
pub struct Foreground {
    under_way: AtomicUsize,
    counter: Option<Box<dyn Counter>>,
    began: Instant,
    /// Times in microseconds since `began`. When background work went on after it had given way,
    resumed: AtomicU64,
    /// when the counter was read last,
    looked: AtomicU64,
    /// until when background work is slow,
    busy: AtomicU64,
    /// and when the next read of slow work is due.
    next: AtomicU64,
    counted: AtomicU64,
}

impl Default for Foreground {
    fn default() -> Self {
        Foreground {
            under_way: AtomicUsize::new(0),
            counter: None,
            began: Instant::now(),
            resumed: AtomicU64::new(0),
            looked: AtomicU64::new(0),
            busy: AtomicU64::new(0),
            next: AtomicU64::new(0),
            counted: AtomicU64::new(0),
        }
    }
}

/// Foreground work under way, until it is dropped.
#[derive(Debug)]
pub struct ForegroundWork<'f>(&'f Foreground);

fn micros(time: Duration) -> u64 {
    time.as_micros() as u64
}

impl Foreground {
    /// Background work gives way to what this counts, too.
    pub fn watching(counter: impl Counter + 'static) -> Self {
        Foreground { counter: Some(Box::new(counter)), ..Foreground::default() }
    }

    /// Foreground work begins.
    pub fn begin(&self) -> ForegroundWork<'_> {
        self.under_way.fetch_add(1, Ordering::Relaxed);
        ForegroundWork(self)
    }

    /// Waits a moment where others work. To be called between two reads, with no lock held, and with the time that the
    /// last read and what followed took. Returns whether what is counted continues: then one read at a time is enough.
    pub fn give_way(&self, took: Duration, stop: &Stop) -> bool {
        if self.is_due(self.began.elapsed()) {
            let started = Instant::now();
            while self.is_under_way() && started.elapsed() < PAUSE && stop.check().is_ok() {
                std::thread::sleep(Duration::from_millis(1));
            }
            self.resumed.store(micros(self.began.elapsed()), Ordering::Relaxed);
        }
        let now = self.began.elapsed();
        self.look(now);
        if !self.is_busy(now) {
            return false;
        }
        let mut left = self.rest(now, took);
        while !left.is_zero() && stop.check().is_ok() {
            let part = left.min(LOOK);
            std::thread::sleep(part);
            left -= part;
        }
        true
    }

    fn is_under_way(&self) -> bool {
        self.under_way.load(Ordering::Relaxed) > 0
    }

    /// Whether background work is to give way at a time since `began`.
    fn is_due(&self, now: Duration) -> bool {
        let resumed = Duration::from_micros(self.resumed.load(Ordering::Relaxed));
        self.is_under_way() && now.saturating_sub(resumed) >= WORK
    }

    /// Reads the counter now and then, in one thread alone.
    fn look(&self, now: Duration) {
        let Some(counter) = &self.counter else { return };
        let (now, looked) = (micros(now), self.looked.load(Ordering::Relaxed));
        let is_due = now >= looked + micros(LOOK);
        if !is_due || self.looked.compare_exchange(looked, now, Ordering::Relaxed, Ordering::Relaxed).is_err()
        {
            return;
        }
        let count = counter.count();
        if self.counted.swap(count, Ordering::Relaxed) != count {
            self.busy.store(now + micros(BUSY), Ordering::Relaxed);
        }
    }

    fn is_busy(&self, now: Duration) -> bool {
        micros(now) < self.busy.load(Ordering::Relaxed)
    }

    /// How long a thread rests after a read that took this long: all threads together keep their part of the time.
    fn rest(&self, now: Duration, took: Duration) -> Duration {
        let (now, gap) = (micros(now), micros((took * (PARTS - 1)).min(REST)));
        let due = |next: u64| Some(next.clamp(now, now + micros(REST)) + gap);
        let before = self.next.fetch_update(Ordering::Relaxed, Ordering::Relaxed, due).unwrap_or(now);
        Duration::from_micros(due(before).unwrap_or(now) - now)
    }
}

impl Drop for ForegroundWork<'_> {
    fn drop(&mut self) {
        self.0.under_way.fetch_sub(1, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;

    #[test]
    fn background_work_gives_way_after_its_share_of_the_time_and_only_to_work_under_way() {
        let foreground = Foreground::default();
        assert!(!foreground.is_due(10 * WORK), "nothing is under way");
        let (one, two) = (foreground.begin(), foreground.begin());
        assert!(!foreground.is_due(WORK / 2), "it has worked for too short a time");
        assert!(foreground.is_due(WORK));
        drop(one);
        assert!(foreground.is_due(WORK), "one of two is under way");
        let resumed = Duration::from_millis(100);
        foreground.resumed.store(micros(resumed), Ordering::Relaxed);
        assert!(!foreground.is_due(resumed + WORK / 2));
        assert!(foreground.is_due(resumed + WORK));
        drop(two);
        assert!(!foreground.is_due(Duration::from_secs(1)));
    }

    #[test]
    fn it_waits_as_long_as_it_gives_way_at_most() {
        let foreground = Foreground { began: Instant::now() - WORK, ..Foreground::default() };
        let _work = foreground.begin();
        let started = Instant::now();
        assert!(!foreground.give_way(Duration::ZERO, &Stop::default()), "nothing is counted");
        assert!(started.elapsed() >= PAUSE);
        assert!(foreground.resumed.load(Ordering::Relaxed) >= micros(PAUSE));
    }

    #[derive(Debug, Default)]
    struct Writes(Arc<AtomicU64>);

    impl Counter for Writes {
        fn count(&self) -> u64 {
            self.0.load(Ordering::Relaxed)
        }
    }

    #[test]
    fn background_work_is_slow_for_a_while_after_each_change_of_the_counter() {
        let writes = Arc::<AtomicU64>::default();
        let foreground = Foreground::watching(Writes(writes.clone()));
        let look = |millis| {
            let now = Duration::from_millis(millis);
            foreground.look(now);
            foreground.is_busy(now)
        };
        assert!(!look(10));
        writes.store(1, Ordering::Relaxed);
        assert!(!look(15), "it is too soon to look");
        assert!(look(20));
        assert!(look(119));
        assert!(!look(120), "nothing was counted since");
        writes.store(0, Ordering::Relaxed);
        assert!(look(200), "a smaller number is a change, too");
        assert!(!Foreground::default().is_busy(Duration::from_secs(1)));
    }

    #[test]
    fn slow_work_keeps_its_part_of_the_time_over_all_threads() {
        let foreground = Foreground::default();
        let (now, took) = (Duration::from_secs(1), Duration::from_micros(100));
        let gap = took * (PARTS - 1);
        assert_eq!(foreground.rest(now, took), gap);
        assert_eq!(foreground.rest(now, took), 2 * gap, "another thread");
        assert_eq!(foreground.rest(now + gap, took), 2 * gap);
        assert_eq!(foreground.rest(now + 10 * gap, took), gap, "a rest that is over does not count");
        assert_eq!(foreground.rest(now + 20 * gap, Duration::from_secs(9)), REST);
    }
}
