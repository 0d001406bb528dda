//! Ctrl-C, SIGTERM and SIGHUP to a command that has mounted a pool: it ends its work and unmounts it first.

use nix::sys::signal::{SigSet, Signal};

use base::Stop;

/// From here on a signal cancels the returned `Stop` instead of ending the process. To be called before any other thread
/// is started: threads that exist already keep taking signals as before.
pub(super) fn stop_on_signals() -> std::io::Result<Stop> {
    let signals = SigSet::from_iter([Signal::SIGINT, Signal::SIGTERM, Signal::SIGHUP]);
    signals.thread_block()?;
    let stop = Stop::default();
    std::thread::Builder::new().name("signals".into()).spawn({
        let stop = stop.clone();
        move || {
            while signals.wait().is_ok() {
                stop.cancel();
            }
        }
    })?;
    Ok(stop)
}
