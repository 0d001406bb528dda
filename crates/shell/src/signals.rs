//! The signals that end a program, none of which is lost once the program no longer ends by itself.
#![allow(unsafe_code)]

use std::io;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};

use nix::errno::Errno;
use nix::libc::c_int;
use nix::sys::signal::{SaFlags, SigAction, SigHandler, SigSet, sigaction};
use tokio::signal::unix::{Signal, SignalKind, signal};

/// The signals that end a program in order: SIGINT, SIGTERM, and SIGHUP where the program was not started to ignore it, as by
/// nohup.
#[derive(Debug)]
pub struct Signals {
    /// Whether a signal came before there was a receiver for it: tokio drops such a signal.
    early: bool,
    interrupt: Signal,
    terminate: Signal,
    hangup: Option<Signal>,
}

impl Signals {
    /// Watches from now on. Needs a runtime.
    pub fn watch() -> io::Result<Self> {
        Watched::begin()?.signals()
    }

    /// The next one.
    pub async fn next(&mut self) {
        if std::mem::take(&mut self.early) {
            return;
        }
        let hangup = async {
            match &mut self.hangup {
                Some(hangup) => drop(hangup.recv().await),
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            _ = self.interrupt.recv() => {}
            _ = self.terminate.recv() => {}
            () = hangup => {}
        }
    }
}

/// Signals are noted, and do not end the program any more. Their receivers follow.
struct Watched {
    hangup: Option<SignalKind>,
}

/// Whether a signal came since this was last read.
static CAME: AtomicBool = AtomicBool::new(false);

extern "C" fn note(_: c_int) {
    CAME.store(true, Ordering::Relaxed);
}

impl Watched {
    /// tokio (signal-hook-registry) sets its handler first, and then records what the handler is to do: a signal between the two is
    /// lost. It also calls the handler that was there before, so ours notes that signal.
    fn begin() -> io::Result<Self> {
        // A second call would take tokio's handlers away.
        static NOTED: OnceLock<Result<Option<SignalKind>, Errno>> = OnceLock::new();
        let noted = NOTED.get_or_init(|| {
            let hangup = (!is_hangup_ignored()).then(SignalKind::hangup);
            let action = SigAction::new(SigHandler::Handler(note), SaFlags::SA_RESTART, SigSet::empty());
            for kind in hangup.into_iter().chain([SignalKind::interrupt(), SignalKind::terminate()]) {
                let kind = kind.as_raw_value().try_into()?;
                // SAFETY: `note` only stores to an atomic, which a handler may do at any point of the program.
                unsafe { sigaction(kind, &action) }?;
            }
            Ok(hangup)
        });
        Ok(Watched { hangup: (*noted)? })
    }

    fn signals(self) -> io::Result<Signals> {
        let hangup = self.hangup.map(signal).transpose()?;
        let (interrupt, terminate) = (signal(SignalKind::interrupt())?, signal(SignalKind::terminate())?);
        Ok(Signals { early: CAME.swap(false, Ordering::Relaxed), interrupt, terminate, hangup })
    }
}

fn is_hangup_ignored() -> bool {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let ignored = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    // SIGHUP is the first.
    ignored.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok()).is_some_and(|mask| mask & 1 == 1)
}

/// For programs without a runtime: a thread of its own acts at each of these signals.
pub fn at_signals(mut act: impl FnMut() + Send + 'static) -> io::Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let mut signals = {
        let _entered = runtime.enter();
        Signals::watch()?
    };
    let watch = move || {
        runtime.block_on(async {
            loop {
                signals.next().await;
                act();
            }
        });
    };
    std::thread::Builder::new().name("signals".into()).spawn(watch).map(drop)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    /// Promise: a signal that comes while a program is made ready for signals ends it too.
    #[tokio::test]
    async fn a_signal_that_comes_early_is_not_lost() {
        let watched = Watched::begin().expect("watch");
        nix::sys::signal::raise(nix::sys::signal::SIGTERM).expect("raise");
        let mut signals = watched.signals().expect("watch");
        let first = tokio::time::timeout(Duration::from_secs(20), signals.next()).await;
        first.expect("it is lost");
        let second = tokio::time::timeout(Duration::from_millis(50), signals.next()).await;
        assert!(second.is_err(), "it counts twice");
        nix::sys::signal::raise(nix::sys::signal::SIGTERM).expect("raise");
        signals.next().await;
    }
}
