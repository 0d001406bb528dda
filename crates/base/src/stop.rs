//! The wish to stop, carried into long loops.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// The longest that work gives way at one look: it goes on, if slowly, however busy others are.
const PAUSE: Duration = Duration::from_millis(50);

/// Work was given up because its caller is gone or its time is over; nothing is wrong with the data.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Stopped {
    /// The caller cancelled or vanished.
    #[error("cancelled by the caller")]
    Cancelled,
    /// The caller's deadline passed.
    #[error("the caller's deadline passed")]
    DeadlineExceeded,
}

/// A flag and a deadline that a long loop looks at every few milliseconds of work.
#[derive(Clone, Debug, Default)]
pub struct Stop {
    cancelled: Arc<AtomicBool>,
    deadline: Option<Instant>,
    urgent: Option<Urgent>,
}

/// Counts urgent work that somebody waits for, to which other work gives way.
#[derive(Clone, Debug, Default)]
pub struct Urgent(Arc<AtomicUsize>);

/// Urgent work under way, until it is dropped.
#[derive(Debug)]
pub struct UrgentWork(Urgent);

impl Urgent {
    /// Urgent work begins.
    pub fn begin(&self) -> UrgentWork {
        self.0.fetch_add(1, Ordering::Relaxed);
        UrgentWork(self.clone())
    }

    fn is_under_way(&self) -> bool {
        self.0.load(Ordering::Relaxed) > 0
    }
}

impl Drop for UrgentWork {
    fn drop(&mut self) {
        self.0.0.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Stop {
    /// Stops when told to, and at `deadline` at the latest.
    pub fn at(deadline: Option<Instant>) -> Self {
        Stop { cancelled: Arc::default(), deadline, urgent: None }
    }

    /// The same for work that gives way to what is urgent: each look at it waits a moment meanwhile.
    pub fn giving_way_to(urgent: Urgent) -> Self {
        Stop { urgent: Some(urgent), ..Stop::default() }
    }

    /// Tells all who hold a clone to stop.
    pub fn cancel(&self) {
        self.cancelled.store(true, Ordering::Relaxed);
    }

    /// An error once the work should end.
    pub fn check(&self) -> Result<(), Stopped> {
        if let Some(urgent) = &self.urgent
            && urgent.is_under_way()
        {
            let started = Instant::now();
            while urgent.is_under_way()
                && started.elapsed() < PAUSE
                && !self.cancelled.load(Ordering::Relaxed)
            {
                std::thread::sleep(Duration::from_millis(1));
            }
        }
        if self.cancelled.load(Ordering::Relaxed) {
            return Err(Stopped::Cancelled);
        }
        match self.deadline {
            Some(deadline) if Instant::now() >= deadline => Err(Stopped::DeadlineExceeded),
            _ => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn work_gives_way_for_a_moment_and_goes_on() {
        let urgent = Urgent::default();
        let stop = Stop::giving_way_to(urgent.clone());
        let work = urgent.begin();
        let started = Instant::now();
        assert_eq!(stop.check(), Ok(()));
        assert!(started.elapsed() >= PAUSE, "it gave way for {:?}", started.elapsed());
        drop(work);
        assert!(!urgent.is_under_way());
        stop.cancel();
        assert_eq!(stop.check(), Err(Stopped::Cancelled));
    }

    #[test]
    fn a_clone_sees_the_cancel_and_a_passed_deadline_stops() {
        let stop = Stop::default();
        let seen = stop.clone();
        assert_eq!(seen.check(), Ok(()));
        stop.cancel();
        assert_eq!(seen.check(), Err(Stopped::Cancelled));
        let past = Instant::now() - Duration::from_millis(1);
        assert_eq!(Stop::at(Some(past)).check(), Err(Stopped::DeadlineExceeded));
    }
}
