//! What is asked, and how long a client tries.

use std::time::Duration;

use crate::error::Call;

/// What is asked for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Query {
    /// The ranges of a snapshot that hold data.
    Allocated {
        /// The snapshot: the name of a VolumeSnapshot, or a CSI handle on a driver's socket.
        snapshot: String,
    },
    /// The ranges that differ between two snapshots of a volume.
    Delta {
        /// The CSI handle of the older snapshot. Its VolumeSnapshot may be gone, where the driver can do without.
        base: String,
        /// The newer snapshot: the name of a VolumeSnapshot, or a CSI handle on a driver's socket.
        target: String,
    },
}

impl Query {
    /// The snapshot whose driver is asked.
    #[cfg(feature = "kubernetes")]
    pub(crate) fn target(&self) -> &str {
        match self {
            Query::Allocated { snapshot } => snapshot,
            Query::Delta { target, .. } => target,
        }
    }

    pub(crate) fn call(&self) -> Call {
        match self {
            Query::Allocated { .. } => Call::Allocated,
            Query::Delta { .. } => Call::Delta,
        }
    }
}

/// How long a client tries.
#[derive(Clone, Debug)]
pub struct Policy {
    /// How often in a row a call may fail and be tried again. Every new range sets the count back to 0.
    pub retries: u32,
    /// The pause before the first retry. It doubles with each further one, and a random part of up to a half is taken off.
    pub backoff: Duration,
    /// The longest pause.
    pub max_backoff: Duration,
    /// How long a server may send nothing until the stream counts as lost. A driver may need long to find the next change.
    pub idle: Duration,
    /// How long it may take to connect.
    pub connect: Duration,
    /// Most ranges in one message; 0 leaves it to the driver.
    pub max_results: u32,
}

impl Default for Policy {
    /// Eight retries within a minute, and five minutes of silence.
    fn default() -> Self {
        Policy {
            retries: 8,
            backoff: Duration::from_millis(200),
            max_backoff: Duration::from_secs(30),
            idle: Duration::from_secs(300),
            connect: Duration::from_secs(10),
            max_results: 0,
        }
    }
}

impl Policy {
    pub(crate) fn max_results(&self) -> i32 {
        i32::try_from(self.max_results).unwrap_or(i32::MAX)
    }

    /// The pause before a retry, without chance: `failed` is how often it failed so far, from 1 on.
    pub(crate) fn pause(&self, failed: u32) -> Duration {
        let doubled = 2u32.saturating_pow(failed.saturating_sub(1));
        self.backoff.saturating_mul(doubled).min(self.max_backoff)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_double_up_to_the_longest() {
        let policy = Policy::default();
        let pauses: Vec<u128> = (1..=9).map(|failed| policy.pause(failed).as_millis()).collect();
        assert_eq!(pauses, [200, 400, 800, 1600, 3200, 6400, 12800, 25600, 30000]);
        assert_eq!(policy.pause(u32::MAX), policy.max_backoff);
    }
}
