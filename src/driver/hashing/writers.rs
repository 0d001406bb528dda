//! How much is written to volumes, by the counters of their devices. Hashing gives way to it.

use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use crate::sys::loopdev::LoopDevice;
use base::Counter;

/// How long a list of devices is used.
const LISTED: Duration = Duration::from_secs(1);

/// The writes of all volumes.
#[derive(Debug)]
pub(in crate::driver) struct Writers {
    volumes: PathBuf,
    devices: Mutex<Devices>,
}

#[derive(Debug, Default)]
struct Devices {
    counters: Vec<PathBuf>,
    listed: Option<Instant>,
}

impl Writers {
    /// Of the volumes whose files are below this directory.
    pub(in crate::driver) fn new(volumes: PathBuf) -> Self {
        Writers { volumes, devices: Mutex::default() }
    }
}

impl Counter for Writers {
    /// Another number where anything was written since the last call. It may be smaller, where a device is gone.
    fn count(&self) -> u64 {
        let mut devices = self.devices.lock().unwrap_or_else(PoisonError::into_inner);
        if devices.listed.is_none_or(|listed| listed.elapsed() >= LISTED) {
            // Without a list hashing gives way to nobody, and everything else is as it was.
            devices.counters =
                LoopDevice::counters_on(|path| path.starts_with(&self.volumes)).unwrap_or_default();
            devices.listed = Some(Instant::now());
        }
        devices.counters.iter().filter_map(|path| writes(path)).sum()
    }
}

/// The writes that a device has completed; `None` where it is gone.
fn writes(counters: &Path) -> Option<u64> {
    std::fs::read_to_string(counters).ok()?.split_whitespace().nth(4)?.parse().ok()
}
