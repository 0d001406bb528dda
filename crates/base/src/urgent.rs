//! Work that somebody waits for, and work that gives way to it.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use super::Stop;

/// How long other work goes on before it gives way again, and how long it gives way at most: it keeps a fifth of the time,
/// however busy others are.
const WORK: Duration = Duration::from_millis(20);
const PAUSE: Duration = Duration::from_millis(80);

/// Counts urgent work under way.
#[derive(Clone, Debug)]
pub struct Urgent(Arc<Counts>);

#[derive(Debug)]
struct Counts {
    under_way: AtomicUsize,
    began: Instant,
    /// When other work went on last, in milliseconds since `began`.
    resumed: AtomicU64,
}

impl Default for Urgent {
    fn default() -> Self {
        let counts =
            Counts { under_way: AtomicUsize::new(0), began: Instant::now(), resumed: AtomicU64::new(0) };
        Urgent(Arc::new(counts))
    }
}

/// Urgent work under way, until it is dropped.
#[derive(Debug)]
pub struct UrgentWork(Urgent);

impl Urgent {
    /// Urgent work begins.
    pub fn begin(&self) -> UrgentWork {
        self.0.under_way.fetch_add(1, Ordering::Relaxed);
        UrgentWork(self.clone())
    }

    fn is_under_way(&self) -> bool {
        self.0.under_way.load(Ordering::Relaxed) > 0
    }

    /// Waits a moment while urgent work is under way. To be called between two reads, with no lock held.
    pub fn give_way(&self, stop: &Stop) {
        let now = || self.0.began.elapsed().as_millis() as u64;
        let worked = now().saturating_sub(self.0.resumed.load(Ordering::Relaxed));
        if !self.is_under_way() || worked < WORK.as_millis() as u64 {
            return;
        }
        let started = Instant::now();
        while self.is_under_way() && started.elapsed() < PAUSE && stop.check().is_ok() {
            std::thread::sleep(Duration::from_millis(1));
        }
        self.0.resumed.store(now(), Ordering::Relaxed);
    }
}

impl Drop for UrgentWork {
    fn drop(&mut self) {
        self.0.0.under_way.fetch_sub(1, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn other_work_waits_for_urgent_work_and_keeps_a_share_of_the_time() {
        let (urgent, stop) = (Urgent::default(), Stop::default());
        std::thread::sleep(WORK);
        let took = || {
            let started = Instant::now();
            urgent.give_way(&stop);
            started.elapsed()
        };
        let work = urgent.begin();
        assert!(took() >= PAUSE);
        assert!(took() < PAUSE, "it worked for no time since");
        std::thread::sleep(WORK + WORK / 10);
        drop(work);
        assert!(!urgent.is_under_way());
        let _work = urgent.begin();
        stop.cancel();
        assert!(took() < PAUSE, "it is to stop");
    }
}
