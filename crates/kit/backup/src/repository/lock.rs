//! Locks on a repository: shared by those who add or read, exclusive for `prune`.
//!
//! In a directory a lock is flock(2) on the file `lock`: the kernel frees it with the process, also after kill -9. A
//! bucket has nothing like it, so there a lock is an object below `locks/` that its holder rewrites every minute. One
//! that was not written for ten minutes is of a process that is gone, and the next who looks removes it; on the same machine
//! it is known at once, by the process. Times are compared with that of one's own lock object. Both are the storage's, so no
//! other clock counts.
//!
//! A holder does not hear that its lock was removed, the file or the object, so it checks. A lock that is gone is never
//! made again, and one that was not written for five minutes counts as lost, by a clock that keeps running while the machine
//! sleeps: the five minutes that are left are for requests under way. Before an index is written, and before what a prune
//! removes or replaces, the lock is written once more ([`Lock::hold`]): a removal before that is seen.

use std::fs::{File, TryLockError};
use std::path::Path;
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::sync::{Arc, OnceLock};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use nix::time::{ClockId, clock_gettime};
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};

use super::MAX_NOTE;
use super::directory::FileLock;
use super::store::Store;
use crate::error::{Error, Result, refused};

#[cfg(test)]
mod tests;

/// A lock that was not written for so long is of a process that is gone.
const LIFE: Duration = Duration::from_secs(600);
/// Between two looks at a lock that is in the way.
const POLL: Duration = Duration::from_secs(1);

/// Who may work at the same time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Mode {
    /// Others that share.
    Shared,
    /// No one.
    Exclusive,
}

/// What a lock object says, as JSON.
#[derive(Debug, Serialize, Deserialize)]
pub struct Holder {
    mode: Mode,
    command: String,
    host: String,
    pid: u32,
    /// Where its pid counts: a boot of a machine, and a namespace. Earlier versions do not say it, nor the next.
    #[serde(default)]
    place: Option<String>,
    /// When the process began, in ticks since the boot.
    #[serde(default)]
    started: Option<u64>,
}

impl Holder {
    fn new(wanted: &Wanted<'_>) -> Self {
        let host = nix::unistd::gethostname().unwrap_or_default().to_string_lossy().into_owned();
        let pid = std::process::id();
        let Wanted { mode, command, .. } = wanted;
        Holder {
            mode: *mode,
            command: (*command).to_owned(),
            host,
            pid,
            place: place(),
            started: started(pid),
        }
    }

    /// Whether it is known that its process has ended.
    pub fn is_gone(&self) -> bool {
        let (Some(held_at), Some(began)) = (&self.place, self.started) else { return false };
        let pid = nix::unistd::Pid::from_raw(self.pid as i32);
        let is_here = self.pid > 0 && self.pid <= i32::MAX as u32 && place().as_ref() == Some(held_at);
        // What runs and may not be looked at is there.
        is_here
            && (nix::sys::signal::kill(pid, None) == Err(nix::errno::Errno::ESRCH)
                || started(self.pid).is_some_and(|started| started != began)
                || state(self.pid).is_some_and(|state| state == "Z"))
    }
}

fn place() -> Option<String> {
    let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").ok()?;
    let namespace = std::fs::read_link("/proc/self/ns/pid").ok()?;
    Some(format!("{} {}", boot.trim(), namespace.display()))
}

/// The fields of a process in proc(5), from its state on. The name before them, in parentheses, may hold anything.
fn stat(pid: u32, field: usize) -> Option<String> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    stat.rsplit_once(')')?.1.split_whitespace().nth(field).map(str::to_owned)
}

fn started(pid: u32) -> Option<u64> {
    stat(pid, 19)?.parse().ok()
}

/// "Z": it has ended, and its parent has not asked how.
fn state(pid: u32) -> Option<String> {
    stat(pid, 0)
}

/// How the lock was lost, once it is. A clone of it tells why a command was stopped.
#[derive(Clone, Debug, Default)]
pub struct Lost(Arc<OnceLock<String>>);

impl Lost {
    /// An error where it is lost.
    pub fn check(&self) -> Result<()> {
        match self.0.get() {
            Some(why) => Err(Error::LockLost { why: why.clone() }),
            None => Ok(()),
        }
    }
}

/// What a command wants of a repository.
#[derive(Clone, Copy, Debug)]
pub struct Wanted<'c> {
    /// Who may work at the same time.
    pub mode: Mode,
    /// Its name, for those who find the lock in their way.
    pub command: &'c str,
    /// How long it waits for others.
    pub wait: Duration,
    /// It only reads, and continues without a lock where it may not write one.
    pub is_reader: bool,
}

/// A lock that is held until the value is dropped.
#[derive(Debug)]
pub enum Lock {
    /// By the kernel.
    File(FileLock),
    /// By an object.
    Object(ObjectLock),
}

/// Another has it.
struct Busy {
    why: String,
    /// The object that is in the way, and how long it can be yet without being written.
    object: Option<(String, Duration)>,
}

impl Lock {
    /// Takes the lock, or says who has it. The store is stopped when it is lost, and `lost` says why. A reader without the
    /// right to write has none: a prune at the same time makes it fail, but what it reads has checksums.
    pub fn take(store: &Store, wanted: Wanted<'_>, lost: &Lost) -> Result<Option<Self>> {
        let until = Instant::now() + wanted.wait;
        let mut is_told = false;
        loop {
            let tried = match store.dir() {
                // To open a FIFO is to wait for its other end.
                Some(dir) => {
                    store.check("lock", true).and_then(|()| try_file(&dir.join("lock"), wanted.mode))
                }
                None => ObjectLock::try_take(store, wanted, lost).map(|lock| lock.map(Lock::Object)),
            };
            let tried = match tried {
                Err(error) if wanted.is_reader && is_refused(&error) => {
                    // A server answers with a page of XML.
                    let why = base::report(&error);
                    let why = why.split(['\n', '<']).next().unwrap_or_default().trim_end_matches([':', ' ']);
                    shell::say!(
                        "cbt-backup: continues without a lock, so a prune meanwhile may make it fail: {}",
                        shell::plain(why)
                    );
                    return Ok(None);
                }
                tried => tried?,
            };
            let busy = match tried {
                Ok(lock) => return Ok(Some(lock)),
                Err(busy) if Instant::now() >= until => return Err(Error::refused(busy.why)),
                Err(busy) => busy,
            };
            if !std::mem::replace(&mut is_told, true) {
                // It names who holds the lock, in words that anybody may have written there.
                let (seconds, why) = (wanted.wait.as_secs(), shell::plain(&busy.why));
                shell::say!("cbt-backup: waiting at most {seconds} s: {why}");
            }
            busy.wait(store, until)?;
        }
    }

    /// An error where the lock is lost. Asks no server.
    pub fn check(&self) -> Result<()> {
        match self {
            Lock::File(lock) => lock.check(),
            Lock::Object(lock) => lock.held.check(),
        }
    }

    /// Makes sure that the lock is held, and will be for a while. Asks the storage.
    pub fn hold(&self) -> Result<()> {
        match self {
            Lock::File(lock) => lock.check(),
            Lock::Object(lock) => lock.held.renew(),
        }
    }
}

/// Whether there is no right, or no room, to write a lock, or the storage knows none.
fn is_refused(error: &Error) -> bool {
    use nix::libc::{EACCES, ENOLCK, ENOSYS, EOPNOTSUPP, EPERM, EROFS};
    match error {
        Error::File(error) => {
            let is_refusal = |code| matches!(code, EACCES | EPERM | EROFS | ENOLCK | ENOSYS | EOPNOTSUPP);
            error.is_no_space() || error.errno().is_some_and(is_refusal)
        }
        // Of all that is asked for a lock only it is written. A server without writes says so in its own way.
        Error::Store { operation: "write", .. } => true,
        Error::Store { source, .. } => {
            use object_store::Error::{PermissionDenied, Unauthenticated};
            matches!(source, PermissionDenied { .. } | Unauthenticated { .. })
        }
        _ => false,
    }
}

fn try_file(path: &Path, mode: Mode) -> Result<Result<Lock, Busy>> {
    // A reader of a repository may not be allowed to write to it.
    let file = match files::change::open_or_create(path) {
        Ok(file) => file,
        Err(error) if mode == Mode::Shared => File::open(path).map_err(|_| error)?,
        Err(error) => return Err(error.into()),
    };
    let taken = match mode {
        Mode::Shared => file.try_lock_shared(),
        Mode::Exclusive => file.try_lock(),
    };
    match taken {
        Ok(()) => Ok(Ok(Lock::File(FileLock::of(file, path)?))),
        Err(TryLockError::WouldBlock) => {
            let why = match mode {
                Mode::Shared => "a prune works on the repository: wait until it has ended",
                Mode::Exclusive => {
                    "other commands use the repository, and prune needs it alone: wait until they have ended, or add \
                     --wait AGE"
                }
            };
            Ok(Err(Busy { why: why.to_owned(), object: None }))
        }
        Err(TryLockError::Error(source)) => {
            Err(files::Error { operation: "lock", path: path.to_owned(), at: None, source }.into())
        }
    }
}

impl Busy {
    /// Waits until it may be worth another try. A try writes a lock object, in whose way others may come, so that of a lock
    /// in a bucket is made when the one in the way is gone or out of its time.
    fn wait(&self, store: &Store, until: Instant) -> Result<()> {
        let ends = self.object.as_ref().map_or(Duration::ZERO, |(_, ends)| *ends);
        let until = until.min(Instant::now() + ends.max(POLL));
        loop {
            store.stop().check()?;
            std::thread::sleep(POLL.min(until.saturating_duration_since(Instant::now())));
            let is_gone = match &self.object {
                Some((name, _)) => !store.exists(name)?,
                None => true,
            };
            if is_gone || Instant::now() >= until {
                return Ok(());
            }
        }
    }
}

/// The times of a lock in a bucket.
#[derive(Clone, Copy, Debug)]
struct Times {
    /// Between two writes of it.
    renewed: Duration,
    /// Its holder gives it up when it was not written for so long.
    lost: Duration,
    /// Others remove it when it was not written for so long.
    life: Duration,
}

impl Times {
    fn new() -> Self {
        // Tests have less time; what users have does not look.
        let seconds = match cfg!(debug_assertions) {
            true => std::env::var("CBT_BACKUP_TEST_LOCK_SECONDS").ok(),
            false => None,
        };
        let life = seconds.and_then(|seconds| seconds.parse().ok()).map_or(LIFE, Duration::from_secs);
        Times { renewed: life / 10, lost: life / 2, life }
    }
}

/// Time since some moment, which also counts while the machine sleeps.
fn now() -> Duration {
    clock_gettime(ClockId::CLOCK_BOOTTIME).expect("every Linux since 2.6.39 has this clock").into()
}

/// What is known of a lock object that was written.
#[derive(Debug)]
struct Held {
    store: Store,
    name: String,
    bytes: Vec<u8>,
    times: Times,
    /// When the last write of it that succeeded was begun.
    written: Mutex<Duration>,
    /// One renewal at a time.
    renewing: Mutex<()>,
    lost: Lost,
}

impl Held {
    /// How long it was not written.
    fn age(&self) -> Duration {
        now().saturating_sub(*self.written.lock())
    }

    /// Stops all work that relies on the lock.
    fn lose(&self, why: String) {
        let _ = self.lost.0.set(why);
        self.store.stop().cancel();
    }

    fn check(&self) -> Result<()> {
        let age = self.age();
        if age > self.times.lost {
            self.lose(format!("it could not be renewed for {} s", age.as_secs()));
        }
        self.lost.check()
    }

    /// Writes it again. It is looked at before whether that comes too late: others may have removed it already, and in its
    /// place there may be none.
    fn renew(&self) -> Result<()> {
        let _one = self.renewing.lock();
        self.check()?;
        let begun = now();
        let left = self.times.lost.saturating_sub(self.age());
        match self.store.rewrite(&self.name, &self.bytes, left) {
            Ok(true) => *self.written.lock() = begun,
            Ok(false) => self.lose(format!("another command, or a person, has removed {}", self.name)),
            Err(error) => {
                self.check()?;
                return Err(error);
            }
        }
        self.check()
    }
}

/// A lock in a bucket.
#[derive(Debug)]
pub struct ObjectLock {
    held: Arc<Held>,
    /// Dropped, it ends the thread that rewrites the lock.
    ends: Option<Sender<()>>,
    renewer: Option<JoinHandle<()>>,
}

impl ObjectLock {
    fn try_take(store: &Store, wanted: Wanted<'_>, lost: &Lost) -> Result<Result<Self, Busy>> {
        // Numbers and texts.
        let bytes =
            serde_json::to_vec(&Holder::new(&wanted)).expect("strings and numbers can be written as JSON");
        let name = format!("locks/{}", super::names::random_digits(16)?);
        let written = Mutex::new(now());
        store.replace(&name, bytes.clone())?;
        // From here on, the object is removed again where this call fails.
        let (store, lost) = (store.clone(), lost.clone());
        let times = Times::new();
        let held = Held { store, name, bytes, times, written, renewing: Mutex::default(), lost };
        let mut lock = ObjectLock { held: Arc::new(held), ends: None, renewer: None };
        if let Some(busy) = lock.held.in_the_way(wanted.mode)? {
            return Ok(Err(busy));
        }
        let (ends, ended) = channel();
        let held = lock.held.clone();
        let renew = move || {
            while ended.recv_timeout(held.times.renewed) == Err(RecvTimeoutError::Timeout) {
                match held.renew() {
                    Ok(()) => {}
                    Err(Error::LockLost { why }) => return tracing::error!("the lock is lost: {why}"),
                    Err(error) => {
                        tracing::warn!(error = base::report(&error), "the lock could not be renewed")
                    }
                }
            }
        };
        let renewer = std::thread::Builder::new().name("lock".into()).spawn(renew);
        let renewer = renewer.map_err(|error| refused!("start a thread: {error}"))?;
        (lock.ends, lock.renewer) = (Some(ends), Some(renewer));
        Ok(Ok(lock))
    }
}

impl Held {
    /// Removes a lock whose holder is gone. It is not in the way of any command any more, also where it has to stay.
    fn remove(&self, name: String) {
        if let Err(error) = self.store.remove(&[name]) {
            tracing::warn!("a lock that is out of its time stays: {}", base::report(&error));
        }
    }

    /// Another lock that is in the way. Two that come at once see each other, and at least one gives way.
    fn in_the_way(&self, mode: Mode) -> Result<Option<Busy>> {
        let locks = self.store.list("locks")?;
        let Some(own) = locks.iter().find(|lock| lock.location.as_ref() == self.name) else {
            return Err(Error::refused("the storage does not list an object that was just written"));
        };
        for lock in locks.iter().filter(|lock| lock.location != own.location) {
            let age = (own.last_modified - lock.last_modified).to_std().unwrap_or_default();
            let name = lock.location.to_string();
            if age > self.times.life {
                self.remove(name);
                continue;
            }
            let holder = match self.store.get(&name, MAX_NOTE) {
                // Freed meanwhile.
                Err(error) if error.is_not_found() => continue,
                Err(error) if error.is_damage() => None,
                bytes => serde_json::from_slice::<Holder>(&bytes?).ok(),
            };
            if holder.as_ref().is_some_and(Holder::is_gone) {
                self.remove(name);
                continue;
            }
            // One that cannot be read may be that of a prune.
            if mode == Mode::Exclusive || holder.as_ref().is_none_or(|holder| holder.mode == Mode::Exclusive)
            {
                let who = match holder {
                    Some(Holder { command, host, pid, .. }) => {
                        format!("cbt-backup {command} (process {pid} on {host})")
                    }
                    None => format!("a command whose lock {name} cannot be read"),
                };
                let ends = self.times.life - age;
                let hint = if mode == Mode::Exclusive { ", or add --wait AGE" } else { "" };
                let until = jiff::Timestamp::now() + ends;
                let why = format!(
                    "{who} uses the repository: wait until it has ended{hint}. If \
                     it is gone, its lock ends at {}, {} seconds from now",
                    until.strftime("%H:%M:%S UTC"),
                    ends.as_secs()
                );
                return Ok(Some(Busy { why, object: Some((name, ends + POLL)) }));
            }
        }
        Ok(None)
    }
}

impl Drop for ObjectLock {
    fn drop(&mut self) {
        drop(self.ends.take());
        if let Some(renewer) = self.renewer.take() {
            let _ = renewer.join();
        }
        if let Err(error) = self.held.store.remove(std::slice::from_ref(&self.held.name)) {
            tracing::warn!(
                error = base::report(&error),
                "the lock could not be removed; it ends in ten minutes"
            );
        }
    }
}
