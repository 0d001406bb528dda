//! How far a command is: a bar on a terminal, a line every few seconds elsewhere. On standard error. And the rate at which
//! devices may be read.

use std::io::IsTerminal;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use base::Stop;
use indicatif::{HumanBytes, ProgressBar, ProgressStyle};
use parking_lot::Mutex;

use crate::error::Result;

/// Between two lines.
const EVERY: Duration = Duration::from_secs(10);

/// Counts the bytes that are moved, and how much of the volume is behind.
#[derive(Debug)]
pub struct Progress {
    what: &'static str,
    bar: Option<ProgressBar>,
    size: u64,
    began: Instant,
    position: AtomicU64,
    bytes: AtomicU64,
    last: Mutex<Instant>,
}

impl Progress {
    /// Of a volume or a sum of `size` bytes.
    pub fn new(what: &'static str, size: u64) -> Self {
        let bar = (shell::tells_progress() && std::io::stderr().is_terminal()).then(|| {
            let style = "{prefix} {bar:30} {binary_bytes}/{binary_total_bytes} {msg} {eta} left";
            let bar = ProgressBar::new(size).with_prefix(what);
            // A template of ours that does not parse would leave the plain bar.
            bar.set_style(
                ProgressStyle::with_template(style).unwrap_or_else(|_| ProgressStyle::default_bar()),
            );
            bar
        });
        let now = Instant::now();
        Progress {
            what,
            bar,
            size,
            began: now,
            position: AtomicU64::new(0),
            bytes: AtomicU64::new(0),
            last: Mutex::new(now),
        }
    }

    /// The volume is done up to `position` at least, for which `bytes` were moved.
    pub fn at(&self, position: u64, bytes: u64) {
        self.position.fetch_max(position, Ordering::Relaxed);
        self.moved(bytes);
    }

    /// The same where parts end in any order.
    pub fn by(&self, behind: u64, bytes: u64) {
        self.position.fetch_add(behind, Ordering::Relaxed);
        self.moved(bytes);
    }

    fn moved(&self, bytes: u64) {
        let bytes = self.bytes.fetch_add(bytes, Ordering::Relaxed) + bytes;
        let position = self.position.load(Ordering::Relaxed).min(self.size);
        let rate = || HumanBytes((bytes as f64 / self.began.elapsed().as_secs_f64().max(0.001)) as u64);
        if let Some(bar) = &self.bar {
            bar.set_position(position);
            bar.set_message(format!("{}/s", rate()));
            return;
        }
        let Some(mut last) = self.last.try_lock() else { return };
        if shell::tells_progress() && last.elapsed() >= EVERY {
            *last = Instant::now();
            let percent = position * 100 / self.size.max(1);
            shell::say!(
                "{}: {percent} % of the volume, {} moved, {}/s",
                self.what,
                HumanBytes(bytes),
                rate()
            );
        }
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }
}

/// A rate that all threads keep to together.
#[derive(Debug)]
pub struct Limit {
    /// Bytes a second.
    rate: Option<u64>,
    /// When what was let through so far is paid for.
    paid: Mutex<Instant>,
}

impl Limit {
    /// `rate` is in bytes a second; `None` means no limit.
    pub fn new(rate: Option<u64>) -> Self {
        Limit { rate, paid: Mutex::new(Instant::now()) }
    }

    /// Waits until this number of bytes may be moved.
    pub fn pass(&self, bytes: u64, stop: &Stop) -> Result<()> {
        let Some(rate) = self.rate else { return Ok(()) };
        let until = {
            let mut paid = self.paid.lock();
            let from = (*paid).max(Instant::now());
            *paid = from + Duration::from_secs_f64(bytes as f64 / rate.max(1) as f64);
            from
        };
        loop {
            stop.check()?;
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Ok(());
            }
            std::thread::sleep(left.min(Duration::from_millis(100)));
        }
    }
}
