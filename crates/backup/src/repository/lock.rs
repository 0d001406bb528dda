//! Locks on a repository: shared by those who add or read, exclusive for `prune`.
//!
//! In a directory a lock is flock(2) on the file `lock`: the kernel frees it with the process, also after kill -9. A
//! bucket has nothing like it, so there a lock is an object below `locks/` that its holder writes anew every minute. One
//! that was not written for ten minutes is of a process that is gone, and the next who looks removes it. Times are compared
//! with that of the looker's own lock object, as the storage tells both, so that no clock but the storage's counts. A
//! holder that could not write its lock for five minutes stops by itself.

use std::fs::{File, TryLockError};
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use base::Stop;
use serde::{Deserialize, Serialize};

use super::store::Store;
use crate::error::{Error, Result};

const REFRESH: Duration = Duration::from_secs(60);
const LOST_AFTER: Duration = Duration::from_secs(300);
const STALE_AFTER: Duration = Duration::from_secs(600);

/// Who may work beside.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Mode {
    /// Others that share.
    Shared,
    /// Nobody.
    Exclusive,
}

/// What a lock object says, as JSON.
#[derive(Debug, Serialize, Deserialize)]
struct Holder {
    mode: Mode,
    command: String,
    host: String,
    pid: u32,
}

/// A lock that is held until the value goes.
#[derive(Debug)]
pub enum Lock {
    /// By the kernel.
    File(#[expect(dead_code, reason = "held, never read")] File),
    /// By an object.
    Object(#[expect(dead_code, reason = "held, never read")] ObjectLock),
}

impl Lock {
    /// Takes the lock, or says who has it. `stop` is set when it is lost.
    pub fn take(store: &Store, mode: Mode, command: &str, stop: &Stop) -> Result<Self> {
        let Some(dir) = store.dir() else {
            return ObjectLock::take(store, mode, command, stop).map(Lock::Object);
        };
        let path = dir.join("lock");
        // A reader of a repository may not be allowed to write to it.
        let file = match files::change::open_or_create(&path) {
            Ok(file) => file,
            Err(error) if mode == Mode::Shared => File::open(&path).map_err(|_| error)?,
            Err(error) => return Err(error.into()),
        };
        let taken = match mode {
            Mode::Shared => file.try_lock_shared(),
            Mode::Exclusive => file.try_lock(),
        };
        match taken {
            Ok(()) => Ok(Lock::File(file)),
            Err(TryLockError::WouldBlock) => Err(Error::refused(match mode {
                Mode::Shared => "a prune works on the repository: wait until it has ended".to_owned(),
                Mode::Exclusive => {
                    "other commands use the repository, and prune needs it alone: wait until they have ended"
                        .to_owned()
                }
            })),
            Err(TryLockError::Error(source)) => {
                Err(files::Error { operation: "lock", path, at: None, source }.into())
            }
        }
    }
}

/// A lock in a bucket.
#[derive(Debug)]
pub struct ObjectLock {
    store: Store,
    name: String,
    /// Dropped, it ends the thread that writes the lock anew.
    ends: Option<Sender<()>>,
    refresher: Option<JoinHandle<()>>,
}

impl ObjectLock {
    fn take(store: &Store, mode: Mode, command: &str, stop: &Stop) -> Result<Self> {
        let host = nix::unistd::gethostname().unwrap_or_default().to_string_lossy().into_owned();
        let holder = Holder { mode, command: command.to_owned(), host, pid: std::process::id() };
        // Numbers and texts.
        let bytes = serde_json::to_vec(&holder).expect("strings and numbers can be written as JSON");
        let name = format!("locks/{}", super::random_digits(16)?);
        store.replace(&name, bytes.clone())?;
        // From here on it goes again where this one fails.
        let mut lock = ObjectLock { store: store.clone(), name, ends: None, refresher: None };
        lock.look(mode)?;
        let (ends, ended) = channel();
        let (of, name, stop) = (store.clone(), lock.name.clone(), stop.clone());
        let refresh = move || {
            let mut written = Instant::now();
            while ended.recv_timeout(REFRESH) == Err(RecvTimeoutError::Timeout) {
                match of.replace(&name, bytes.clone()) {
                    Ok(()) => written = Instant::now(),
                    Err(error) if written.elapsed() > LOST_AFTER => {
                        tracing::error!(error = base::report(&error), "the lock is lost");
                        return stop.cancel();
                    }
                    Err(error) => {
                        tracing::warn!(error = base::report(&error), "the lock could not be renewed")
                    }
                }
            }
        };
        let refresher = std::thread::Builder::new().name("lock".into()).spawn(refresh);
        let refresher = refresher.map_err(|error| Error::refused(format!("start a thread: {error}")))?;
        (lock.ends, lock.refresher) = (Some(ends), Some(refresher));
        Ok(lock)
    }

    /// An error where another lock is in the way. Two that come at once see each other, and at least one goes.
    fn look(&self, mode: Mode) -> Result<()> {
        let locks = self.store.list("locks")?;
        let Some(own) = locks.iter().find(|lock| lock.location.as_ref() == self.name) else {
            return Err(Error::refused("the storage does not list an object that was just written"));
        };
        for lock in locks.iter().filter(|lock| lock.location != own.location) {
            let age = (own.last_modified - lock.last_modified).to_std().unwrap_or_default();
            let name = lock.location.to_string();
            if age > STALE_AFTER {
                self.store.remove(&[name])?;
                continue;
            }
            let bytes = match self.store.get(&name) {
                // Freed meanwhile.
                Err(Error::Store { source: object_store::Error::NotFound { .. }, .. }) => continue,
                bytes => bytes?,
            };
            let holder: Holder =
                serde_json::from_slice(&bytes).map_err(|error| Error::damaged(&name, error.to_string()))?;
            if mode == Mode::Exclusive || holder.mode == Mode::Exclusive {
                let Holder { command, host, pid, .. } = holder;
                return Err(Error::refused(format!(
                    "cbt-backup {command} (process {pid} on {host}) uses the repository: wait until it has ended. If it is \
                     gone, its lock ends {} seconds from now",
                    (STALE_AFTER - age).as_secs()
                )));
            }
        }
        Ok(())
    }
}

impl Drop for ObjectLock {
    fn drop(&mut self) {
        drop(self.ends.take());
        if let Some(refresher) = self.refresher.take() {
            let _ = refresher.join();
        }
        if let Err(error) = self.store.remove(std::slice::from_ref(&self.name)) {
            tracing::warn!(
                error = base::report(&error),
                "the lock could not be removed; it ends in ten minutes"
            );
        }
    }
}
