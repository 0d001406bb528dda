//! Cancellation for long loops.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

/// Work was stopped because its caller disconnected or its deadline passed; the data is not the cause.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Stopped {
    /// The caller cancelled or disconnected.
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
}

impl Stop {
    /// Stops on request, and at `deadline` at the latest.
    pub fn at(deadline: Option<Instant>) -> Self {
        Stop { cancelled: Arc::default(), deadline }
    }

    /// Stops all holders of a clone.
    pub fn cancel(&self) {
        self.cancelled.store(true, Ordering::Relaxed);
    }

    /// An error once the work should end.
    pub fn check(&self) -> Result<(), Stopped> {
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
    use std::time::Duration;

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
