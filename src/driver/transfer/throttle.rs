//! Limits the rate of all transfers together (`--transfer-rate`).

use std::time::{Duration, Instant};

use parking_lot::Mutex;

/// How often a waiting thread checks whether it is to stop.
pub(super) const POLL_INTERVAL: Duration = Duration::from_millis(50);

/// Allows bytes at a rate. Unused time is not saved up.
#[derive(Debug)]
pub(in crate::driver) struct Throttle {
    /// Bytes per second; `None` for no limit.
    rate: Option<u64>,
    /// When the bytes taken so far are used up at this rate.
    until: Mutex<Option<Instant>>,
}

impl Throttle {
    /// `rate` is in bytes per second; `None` for no limit.
    pub(in crate::driver) fn new(rate: Option<u64>) -> Self {
        Throttle { rate, until: Mutex::default() }
    }

    /// The size of a request: `most`, or less if that takes longer than a tenth of a second.
    pub fn portion(&self, most: u64) -> u64 {
        self.rate.map_or(most, |rate| most.min(rate / 10))
    }

    /// Takes `bytes`, and returns how long to wait before using them.
    pub fn take(&self, bytes: u64, now: Instant) -> Duration {
        let Some(rate) = self.rate else { return Duration::ZERO };
        let mut until = self.until.lock();
        let start = until.unwrap_or(now).max(now);
        *until = Some(start + Duration::from_secs_f64(bytes as f64 / rate as f64));
        start - now
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_taken_together_is_no_faster_than_the_rate() {
        let throttle = Throttle::new(Some(1000));
        let start = Instant::now();
        let at = |millis| start + Duration::from_millis(millis);
        let millis = Duration::from_millis;
        assert_eq!(throttle.take(500, at(0)), millis(0));
        assert_eq!(throttle.take(500, at(0)), millis(500), "two at once share it");
        assert_eq!(throttle.take(100, at(400)), millis(600));
        assert_eq!(throttle.take(100, at(5000)), millis(0), "and nothing is saved up:");
        assert_eq!(throttle.take(100, at(5000)), millis(100));
        assert_eq!((throttle.portion(1 << 20), Throttle::new(None).portion(1 << 20)), (100, 1 << 20));
        assert_eq!(Throttle::new(None).take(u64::MAX, start), millis(0));
    }
}
