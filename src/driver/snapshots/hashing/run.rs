//! The thread: takes work from the queue, hashes, and compares with the parent. What a step hashes is in `step.rs`.

use std::sync::Arc;

use crate::driver::error::{Error, Result};
use crate::driver::health::read_errors::ReadErrors;
use crate::driver::locks::LockKey;
use crate::driver::shared::Shared;
use crate::driver::snapshots::history::hold::Histories;
use crate::driver::snapshots::queue::{Next, Part, Queue, Work};
use crate::store::{Index, SnapshotRecord};
use crate::sys;
use base::{DraftFile, Foreground};
use cbt::{self, MapFile};
use files::Context;

/// Hashes snapshots, compares them with their parents, and frees what is no longer needed.
#[derive(Debug)]
pub struct Hashing {
    pub(in crate::driver) shared: Arc<Shared>,
    pub(in crate::driver) histories: Arc<Histories>,
    pub(in crate::driver) queue: Arc<Queue>,
    /// Hashing pauses while these work.
    pub(in crate::driver) foreground: Arc<Foreground>,
    pub(in crate::driver) read_errors: Arc<ReadErrors>,
}

/// The threads that help; without any, those of rayon's own pool.
pub(super) type Helpers<'h> = Option<&'h rayon::ThreadPool>;

/// Does work whose parts the helpers share.
pub(super) fn with<T: Send>(helpers: Helpers<'_>, work: impl FnOnce() -> T + Send) -> T {
    match helpers {
        Some(helpers) => helpers.install(work),
        None => work(),
    }
}

/// The thread that hashes. Ends soon after it is dropped: it hashes a few more megabytes at most.
#[derive(Debug)]
pub struct HashingThread {
    hashing: Arc<Hashing>,
    thread: Option<std::thread::JoinHandle<()>>,
}

impl HashingThread {
    /// Starts hashing, on all cores.
    pub fn start(hashing: Arc<Hashing>) -> Result<Self> {
        let helpers = rayon::ThreadPoolBuilder::new()
            .thread_name(|number| format!("hash-{number}"))
            .start_handler(|_| sys::lower_priority())
            .build()
            .map_err(std::io::Error::other)
            .context("start the hashing threads of", &hashing.shared.config.data_dir)?;
        let thread = std::thread::Builder::new().name("hashing".into()).spawn({
            let hashing = hashing.clone();
            move || {
                let _ends = EndsProcess;
                hashing.run(Some(&helpers));
            }
        });
        let thread = thread.context("start the hashing thread of", &hashing.shared.config.data_dir)?;
        Ok(HashingThread { hashing, thread: Some(thread) })
    }
}

impl Drop for HashingThread {
    fn drop(&mut self) {
        self.hashing.queue.cease();
        if let Some(thread) = self.thread.take() {
            // It does not panic: that would have ended the process.
            let _ = thread.join();
        }
    }
}

/// Ends the process where the thread that has it panics, as a kill would. Without that thread, deltas stay exact, but what is
/// deleted is never freed. The next start takes its work up.
struct EndsProcess;

impl Drop for EndsProcess {
    fn drop(&mut self) {
        if std::thread::panicking() {
            tracing::error!("the hashing thread panicked, the driver ends: start it again");
            std::process::abort();
        }
    }
}

impl Hashing {
    /// Works until the queue ceases.
    pub(in crate::driver) fn run(&self, helpers: Helpers<'_>) {
        self.take_up();
        self.apply_retention();
        loop {
            // A deletion that needed it may have found no room for it yet.
            let _ = self.shared.store.take_reserve();
            let work = match self.queue.next() {
                Next::Work(work) => work,
                Next::Retention => {
                    self.apply_retention();
                    continue;
                }
                Next::Stop => return,
            };
            match self.work_on(&work, helpers) {
                Ok(true) => self.queue.done(&work),
                Ok(false) => self.queue.go_on(&work),
                Err(error) if error.stopped().is_some() => return,
                // The parent's data of these blocks was freed, so a retry cannot succeed.
                Err(Error::Cbt(cbt::Error::Lost { what })) => {
                    tracing::warn!(snapshot_id = %work.id, what, "not compared with an earlier snapshot");
                    self.queue.done(&work);
                }
                // Until a retry succeeds, deltas read the data instead.
                Err(error) => {
                    if let Some(record) = self.shared.store.read(|index| index.known(&work.id)) {
                        self.read_errors.note(&record.volume, &error);
                    }
                    let error = error.explain(&self.shared.config.data_dir);
                    tracing::warn!(snapshot_id = %work.id, error, "a snapshot could not be hashed, trying again later");
                    self.queue.put_off(&work);
                }
            }
        }
    }

    /// Queues what the last driver left to be hashed or compared, and removes the maps that it did not finish. Reads a map
    /// of each snapshot, which takes time, so calls are served meanwhile.
    fn take_up(&self) {
        let volumes: Vec<_> = self.shared.store.read(|index| index.lines().cloned().collect());
        for volume in volumes {
            let line: Vec<_> = self.shared.store.read(|index| index.line(&volume).cloned().collect());
            for record in &line {
                self.remove_drafts(record);
                if !record.tracking {
                    continue;
                }
                let bytes = self.histories.pending_bytes(record);
                if bytes > 0 || self.is_to_compare(record) {
                    self.queue.add(record, bytes);
                } else if self.histories.lacks_skips(record) {
                    self.queue.add_skips(record);
                }
            }
            if self.queue.stop.check().is_err() {
                return;
            }
        }
    }

    fn remove_drafts(&self, record: &SnapshotRecord) {
        let Ok(_map) = self.shared.locks.wait_until(LockKey::Map(record.id.clone()), &self.queue.stop) else {
            return;
        };
        self.histories.hold([&record.volume]).remove_drafts(record);
    }

    /// Whether the `changed` map of a snapshot was not compared yet.
    fn is_to_compare(&self, record: &SnapshotRecord) -> bool {
        let changed = MapFile::open(&self.shared.store.snapshot_dir(record).changed());
        changed.is_ok_and(|changed| changed.header().relative_to.is_some() && !changed.is_exact())
    }

    /// Applies the retention to all volumes.
    fn apply_retention(&self) {
        let volumes: Vec<_> = self.shared.store.read(|index| index.lines().cloned().collect());
        for volume in volumes {
            let has_retained = |index: &Index| index.retained_of(&volume).next().is_some();
            if self.shared.store.read(has_retained) {
                self.histories.hold([&volume]).apply_retention(&volume);
            }
            if self.queue.stop.check().is_err() {
                return;
            }
        }
    }

    /// Does a step of the work on a snapshot; returns whether it was the last.
    fn work_on(&self, work: &Work, helpers: Helpers<'_>) -> Result<bool> {
        let known = || self.shared.store.read(|index| index.known(&work.id));
        let Some(record) = known() else { return Ok(true) };
        let done = self.work_on_part(work.part, &record, helpers);
        // The snapshot was removed meanwhile.
        if known().is_none() {
            self.histories.fresh.forget(&work.id);
            return Ok(true);
        }
        done
    }

    fn work_on_part(&self, part: Part, record: &SnapshotRecord, helpers: Helpers<'_>) -> Result<bool> {
        match part {
            Part::Changes => self.compare_changes(record, helpers),
            Part::Skips => with(helpers, || self.histories.make_skips(record, &self.queue.stop)),
            Part::Rest => {
                if !self.hash_snapshot(record, None, helpers)? {
                    return Ok(false);
                }
                self.histories.fresh.forget(&record.id);
                self.histories.check_allocated(record)?;
                self.histories.free_when_sound(record)?;
                Ok(true)
            }
        }
    }

    /// Hashes the blocks that may have changed since the parent, in both, and then keeps those that did.
    fn compare_changes(&self, record: &SnapshotRecord, helpers: Helpers<'_>) -> Result<bool> {
        // If the map is damaged, deltas compare all blocks.
        let Some(changed) = MapFile::open_sound(&self.shared.store.snapshot_dir(record).changed())? else {
            return Ok(true);
        };
        let Some(relation) = changed.header().relative_to.clone().filter(|relation| !relation.exact) else {
            return Ok(true);
        };
        let Some(parent) = self.shared.store.read(|index| index.known(&relation.snapshot)) else {
            return Ok(true);
        };
        for record in [&parent, record] {
            if !self.hash_snapshot(record, Some(&changed), helpers)? {
                return Ok(false);
            }
        }
        with(helpers, || self.compare(record, &parent))?;
        Ok(true)
    }

    /// Keeps in `changed` what differs from the parent.
    ///
    /// 1. Write the new map next to the old one: a crash leaves a file that the next try replaces.
    /// 2. Rename it over the old one. After a crash either may be there: the old one lists the same changes, and perhaps more.
    fn compare(&self, record: &SnapshotRecord, parent: &SnapshotRecord) -> Result<()> {
        let dir = self.shared.store.snapshot_dir(record);
        // Read again: a deletion may have merged another map into it meanwhile, and queued it again.
        let changed = MapFile::open(&dir.changed())?;
        let relation = changed.header().relative_to.clone();
        let Some(relation) = relation.filter(|relation| relation.snapshot == parent.id && !relation.exact)
        else {
            return Ok(());
        };
        let fresh = DraftFile::Compared.of(&dir.changed());
        self.histories.write_differences(&fresh, parent, record, vec![changed], &self.queue.stop)?;
        self.histories.hold([&record.volume]).keep_compared(record, &relation, &fresh)
    }
}
