//! How tests wait for what happens in the background, and for processes.

use std::process::{Child, ExitStatus};
use std::time::{Duration, Instant};

use nix::sys::signal::Signal;

/// How long a test waits for what happens while it runs.
pub const PATIENCE: Duration = Duration::from_secs(90);

/// How long a test that has waited since then sleeps before it looks again: a look may cost more than what it waits for.
pub fn pause(begun: Instant) -> Duration {
    (begun.elapsed() / 16).clamp(Duration::from_millis(1), Duration::from_millis(50))
}

/// Waits until something holds.
pub async fn eventually(what: &str, mut holds: impl AsyncFnMut() -> bool) {
    let begun = Instant::now();
    while !holds().await {
        assert!(begun.elapsed() < PATIENCE, "never: {what}");
        tokio::time::sleep(pause(begun)).await;
    }
}

/// The same in a test without a runtime, also for what holds for a moment only.
pub fn until(what: &str, mut holds: impl FnMut() -> bool) {
    let begun = Instant::now();
    while !holds() {
        assert!(begun.elapsed() < PATIENCE, "never: {what}");
        std::thread::sleep(pause(begun).min(Duration::from_millis(5)));
    }
}

/// Waits until a process catches SIGTERM: a signal before then ends it, whatever it does about signals.
pub fn until_caught(pid: u32) {
    let bit = 1 << (Signal::SIGTERM as u32 - 1);
    until("the process catches SIGTERM", || {
        let status = std::fs::read_to_string(format!("/proc/{pid}/status")).expect("it runs");
        assert!(!status.contains("\nState:\tZ"), "process {pid} has ended");
        let mask = status.lines().find_map(|line| line.strip_prefix("SigCgt:"));
        mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok()).unwrap_or(0) & bit != 0
    });
}

/// Waits for the end of a process. One that outlives `patience` is killed, and the test fails.
pub fn wait(child: &mut Child, patience: Duration) -> ExitStatus {
    let begun = Instant::now();
    loop {
        if let Some(status) = child.try_wait().expect("wait") {
            return status;
        }
        if begun.elapsed() > patience {
            // Nothing that cleans up holds it any more.
            let _ = child.kill();
            let _ = child.wait();
            panic!("process {} does not end", child.id());
        }
        std::thread::sleep(pause(begun));
    }
}
