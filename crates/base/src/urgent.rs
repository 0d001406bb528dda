//! Work that somebody waits for, and work that gives way to it.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use super::Stop;

/// How long other work goes on before it gives way again, and how long it gives way at most: it keeps a fifth of the time,
/// however busy others are.
const WORK: Duration = Duration::from_millis(20);
const PAUSE: Duration = Duration::from_millis(80);

/// Counts urgent work under way.
#[derive(Debug)]
pub struct Urgent {
    under_way: AtomicUsize,
    began: Instant,
    /// When other work went on after it had given way, in milliseconds since `began`.
    resumed: AtomicU64,
}

impl Default for Urgent {
    fn default() -> Self {
        Urgent { under_way: AtomicUsize::new(0), began: Instant::now(), resumed: AtomicU64::new(0) }
    }
}

/// Urgent work under way, until it is dropped.
#[derive(Debug)]
pub struct UrgentWork<'u>(&'u Urgent);

impl Urgent {
    /// Urgent work begins.
    pub fn begin(&self) -> UrgentWork<'_> {
        self.under_way.fetch_add(1, Ordering::Relaxed);
        UrgentWork(self)
    }

    /// Waits a moment while urgent work is under way. To be called between two reads, with no lock held.
    pub fn give_way(&self, stop: &Stop) {
        if !self.is_due(self.began.elapsed()) {
            return;
        }
        let started = Instant::now();
        while self.is_under_way() && started.elapsed() < PAUSE && stop.check().is_ok() {
            std::thread::sleep(Duration::from_millis(1));
        }
        self.resumed.store(self.began.elapsed().as_millis() as u64, Ordering::Relaxed);
    }

    fn is_under_way(&self) -> bool {
        self.under_way.load(Ordering::Relaxed) > 0
    }

    /// Whether other work is to give way at a time since `began`.
    fn is_due(&self, now: Duration) -> bool {
        let resumed = Duration::from_millis(self.resumed.load(Ordering::Relaxed));
        self.is_under_way() && now.saturating_sub(resumed) >= WORK
    }
}

impl Drop for UrgentWork<'_> {
    fn drop(&mut self) {
        self.0.under_way.fetch_sub(1, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn other_work_gives_way_after_its_share_of_the_time_and_only_to_work_under_way() {
        let urgent = Urgent::default();
        assert!(!urgent.is_due(10 * WORK), "nothing is urgent");
        let (one, two) = (urgent.begin(), urgent.begin());
        assert!(!urgent.is_due(WORK / 2), "it has worked for too short a time");
        assert!(urgent.is_due(WORK));
        drop(one);
        assert!(urgent.is_due(WORK), "one of two is under way");
        urgent.resumed.store(100, Ordering::Relaxed);
        assert!(!urgent.is_due(Duration::from_millis(100) + WORK / 2));
        assert!(urgent.is_due(Duration::from_millis(100) + WORK));
        drop(two);
        assert!(!urgent.is_due(Duration::from_secs(1)));
    }

    #[test]
    fn it_waits_as_long_as_it_gives_way_at_most() {
        let urgent = Urgent { began: Instant::now() - WORK, ..Urgent::default() };
        let _work = urgent.begin();
        let started = Instant::now();
        urgent.give_way(&Stop::default());
        assert!(started.elapsed() >= PAUSE);
        assert!(urgent.resumed.load(Ordering::Relaxed) >= PAUSE.as_millis() as u64);
    }
}
