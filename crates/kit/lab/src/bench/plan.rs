//! What is asked for on the command line.

use std::path::PathBuf;
use std::time::Duration;

#[derive(Clone, Debug)]
pub(super) struct Plan {
    pub sizes: Vec<u64>,
    /// Ascending.
    pub snapshots: Vec<u64>,
    pub runs: u64,
    pub data: u64,
    /// Per cent of the data.
    pub changed: Vec<f64>,
    pub settle: Duration,
    /// How long is written before and after a snapshot.
    pub write_time: Duration,
    pub bare_dir: Option<PathBuf>,
    /// What its filesystem has left counts, instead of what GetCapacity says.
    pub space_dir: Option<PathBuf>,
    pub patience: Duration,
}

impl Plan {
    /// How often progress is printed.
    pub fn steps(&self) -> u64 {
        let life = 8 + 3 * self.changed.len() as u64;
        let growth =
            5 * self.runs * self.snapshots.len() as u64 + self.snapshots.last().copied().unwrap_or(0);
        self.sizes.len() as u64 * self.runs * life + growth
    }
}
