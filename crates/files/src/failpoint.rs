//! Fail points: one before each step that changes something on disk or in the kernel, at which a test kills
//! the driver, fails the step or holds it up. [`super::step`] makes them.
//!
//! Compiled in with the cargo feature `failpoints`, which no release has; without it a point is nothing.
//! With it the environment variable `DELTAPATH_FAILPOINTS` names a control file, which is read at each point
//! and says in one line what is to happen:
//!
//! ```text
//! NUMBER kill N WHOSE            SIGKILL before the Nth step from now on
//! NUMBER panic N WHOSE           the thread panics before the Nth step
//! NUMBER error N WHOSE ERRNO     the Nth step is not made and fails with an error number
//! NUMBER errors N WHOSE ERRNO    the Nth and all later ones
//! NUMBER hold N WHOSE MS         the Nth step is made some milliseconds later
//! ```
//!
//! A new NUMBER, of the test's choice, starts a new count. WHOSE is `calls`, `main` (start and stop),
//! `hashing`, or `all`. While the file is there each point is written to a log next to it, `FILE.log`, a
//! line a point: NUMBER, the count, `hit` or `passed`, the step and its path, between tabs.

/// Passes the point before a step. An error is what the step is to fail with, unmade.
#[cfg(not(feature = "failpoints"))]
#[inline(always)]
pub fn pass(_step: &'static str, _path: &std::path::Path) -> std::io::Result<()> {
    Ok(())
}

#[cfg(feature = "failpoints")]
pub use armed::pass;

#[cfg(feature = "failpoints")]
mod armed {
    use parking_lot::Mutex;
    use std::fs::File;
    use std::io::{self, Write};
    use std::path::{Path, PathBuf};
    use std::sync::OnceLock;
    use std::time::Duration;

    /// What the control file says.
    struct Order {
        number: u64,
        action: Action,
        at: u64,
        whose: String,
    }

    #[derive(Clone, Copy)]
    enum Action {
        Kill,
        Panic,
        Error(i32),
        ErrorsFrom(i32),
        Hold(Duration),
    }

    impl Order {
        fn parse(text: &str) -> Option<Self> {
            let mut words = text.split_ascii_whitespace();
            let number = words.next()?.parse().ok()?;
            let action = words.next()?;
            let at = words.next()?.parse().ok()?;
            let whose = words.next()?.to_owned();
            let mut amount = || words.next()?.parse::<u32>().ok();
            let action = match action {
                "kill" => Action::Kill,
                "panic" => Action::Panic,
                "error" => Action::Error(amount()? as i32),
                "errors" => Action::ErrorsFrom(amount()? as i32),
                "hold" => Action::Hold(Duration::from_millis(amount()?.into())),
                _ => return None,
            };
            Some(Order { number, action, at, whose })
        }

        /// Whether a step of this thread counts.
        fn is_about(&self, thread: &str) -> bool {
            let whose = match thread {
                "main" => "main",
                name if name.starts_with("hash") => "hashing",
                _ => "calls",
            };
            self.whose == "all" || self.whose == whose
        }
    }

    /// The number of the last order, and the steps counted since.
    static COUNT: Mutex<(u64, u64)> = Mutex::new((0, 0));
    static CONTROL: OnceLock<Option<PathBuf>> = OnceLock::new();

    /// Passes the point before a step. An error is what the step is to fail with, unmade.
    pub fn pass(step: &'static str, path: &Path) -> io::Result<()> {
        let control = CONTROL.get_or_init(|| std::env::var_os("DELTAPATH_FAILPOINTS").map(PathBuf::from));
        let Some(control) = control else { return Ok(()) };
        let Ok(text) = std::fs::read_to_string(control) else { return Ok(()) };
        let order = Order::parse(&text).unwrap_or_else(|| panic!("{} says {text:?}", control.display()));
        if !order.is_about(std::thread::current().name().unwrap_or_default()) {
            return Ok(());
        }
        // Counted, logged and hit as one: the log is in the order of the count, and ends with a kill.
        let mut count = COUNT.lock();
        if count.0 != order.number {
            *count = (order.number, 0);
        }
        count.1 += 1;
        let hit =
            count.1 == order.at || (count.1 > order.at && matches!(order.action, Action::ErrorsFrom(_)));
        let word = if hit { "hit" } else { "passed" };
        let line = format!("{}\t{}\t{word}\t{step}\t{}\n", order.number, count.1, path.display());
        let mut log = control.as_os_str().to_owned();
        log.push(".log");
        #[expect(clippy::disallowed_methods, reason = "the log of the steps is none")]
        let log = File::options().create(true).append(true).open(log);
        log.and_then(|mut log| log.write_all(line.as_bytes())).expect("the log of fail points takes a line");
        match order.action {
            Action::Kill if hit => {
                nix::sys::signal::raise(nix::sys::signal::Signal::SIGKILL).expect("raise");
                unreachable!("SIGKILL ends the process");
            }
            Action::Panic if hit => {
                drop(count);
                panic!("a fail point says so");
            }
            Action::Error(errno) | Action::ErrorsFrom(errno) if hit => {
                Err(io::Error::from_raw_os_error(errno))
            }
            Action::Hold(time) if hit => {
                drop(count);
                std::thread::sleep(time);
                Ok(())
            }
            _ => Ok(()),
        }
    }
}
