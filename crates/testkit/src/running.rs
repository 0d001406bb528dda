//! A program under test, or one that a test needs, with its log: killed when it is dropped, and the log is shown where the test
//! failed. The driver has a [`Rig`](crate::Rig) of its own.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::Instant;

use nix::sys::signal::Signal;

use crate::{PATIENCE, pause};

pub struct Running {
    child: Child,
    log: PathBuf,
}

impl Running {
    /// Starts it with nothing to read. What it writes to standard error is added to `log`.
    pub fn start(command: &mut Command, log: &Path) -> Self {
        let file = std::fs::OpenOptions::new().create(true).append(true).open(log).expect("a log");
        let child = command.stdin(Stdio::null()).stderr(file).spawn();
        let child = child.unwrap_or_else(|error| panic!("start {command:?}: {error}"));
        Running { child, log: log.to_owned() }
    }

    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    pub fn log(&self) -> String {
        std::fs::read_to_string(&self.log).unwrap_or_default()
    }

    pub fn signal(&self, signal: Signal) {
        crate::signal(self.pid(), signal);
    }

    pub fn kill(&mut self) {
        self.child.kill().expect("kill");
        self.child.wait().expect("wait");
    }

    /// SIGTERM, and how it ends.
    pub fn stop(&mut self) -> ExitStatus {
        self.signal(Signal::SIGTERM);
        crate::wait(&mut self.child, PATIENCE)
    }

    /// How it has ended; `None` while it runs.
    pub fn status(&mut self) -> Option<ExitStatus> {
        self.child.try_wait().expect("wait")
    }

    pub fn is_alive(&mut self) -> bool {
        self.status().is_none()
    }

    /// The exit code, waited for while other tasks run.
    pub async fn ended(&mut self) -> Option<i32> {
        let begun = Instant::now();
        loop {
            if let Some(status) = self.status() {
                return status.code();
            }
            assert!(begun.elapsed() < PATIENCE, "it does not end:\n{}", self.log());
            tokio::time::sleep(pause(begun)).await;
        }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        if std::thread::panicking() {
            eprintln!("--- {}\n{}", self.log.display(), self.log());
        }
    }
}

/// Fails where a log has an error as Rust dumps it, and not in words. What other crates write is theirs.
pub fn is_plain(log: &str) {
    let dump = ["Os {", "Custom {", "ConnectError(", "source: Some("];
    let is_dump = |line: &&str| line.contains(" deltapath") && dump.iter().any(|sign| line.contains(sign));
    let line = log.lines().find(is_dump);
    assert_eq!(line, None, "the log has a dump of an error");
}

/// Waits until a thread of a process waits in a function of the kernel with this in its name.
pub fn until_blocked_in(pid: u32, function: &str) {
    crate::until(&format!("a thread of process {pid} waits in {function}"), || {
        let threads = std::fs::read_dir(format!("/proc/{pid}/task")).expect("it runs").flatten();
        let mut places = threads.map(|thread| std::fs::read_to_string(thread.path().join("wchan")));
        places.any(|place| place.is_ok_and(|place| place.contains(function)))
    });
}
