//! Volumes from snapshots and volumes of other nodes: the blocks are copied over, beside calls.
//!
//! - `plan.rs`: what is to be done with a segment, pure.
//! - `receive.rs`: makes the bytes here like those there.
//! - `send.rs`: the side of the source.
//! - `throttle.rs`: `--transfer-rate`.
//!
//! Here: which transfers there are, who waits for them, and how each ends. A transfer begins and goes on when CreateVolume is
//! called with the way to its source, and ends as a volume or as nothing:
//!
//! 1. The source is opened, so that an error of it is known at once.
//! 2. An empty volume is drafted in `staging/`, and `transfer.json` makes it outlive the driver (`store/transfers.rs`).
//! 3. A thread makes its bytes like the source's, and syncs them. A source that is away is tried again and again.
//! 4. The draft becomes a volume by a rename, as ever.
//!
//! A driver that stops or dies leaves the draft; the next one goes on with it when CreateVolume is called again. It is removed when
//! DeleteVolume names it, when the source is gone or damaged, and when nobody has called for it in an hour.

mod plan;
mod receive;
mod send;
mod throttle;

use std::collections::HashMap;
use std::fs::File;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::capability::kinds;
use super::error::shown;
use super::locks::Key;
use super::quiesce::LiveCopy;
use super::volumes::{check_name, difference};
use super::{CreateVolume, Driver, Error, Result, SourceRef};
use crate::store::{AccessKind, Draft, Source, Timestamp, VolumeRecord};
use base::{Quantity, Stop, VolumeId};
use files::Context;
use files::change;
pub use receive::{Blocks, Opened, Remote, RemoteFault};
use receive::{Cut, Progress, Receiver};
pub(super) use send::Sources;
pub use send::{OpenSource, Point};
use throttle::Throttle;

/// Transfers at work at once; the others wait for their turn.
const AT_ONCE: usize = 4;
/// Transfers that are known at once.
const MOST: usize = 256;
/// How long a call waits for a transfer that may be short.
const PATIENCE: Duration = Duration::from_secs(1);
/// How long a source that is away is left alone: so long first, and each time twice as long up to this.
const PAUSES: [Duration; 2] = [Duration::from_millis(100), Duration::from_secs(10)];
/// How long a transfer goes on that nobody calls for.
const UNASKED: Duration = Duration::from_secs(3600);
/// How long a stop waits for transfers to notice.
const LAST_CALL: Duration = Duration::from_secs(5);

/// The transfers to this node.
#[derive(Debug)]
pub(super) struct Transfers {
    known: Mutex<HashMap<VolumeId, Arc<Transfer>>>,
    throttle: Throttle,
    /// How many are at work.
    working: Mutex<usize>,
    /// How those ended that are not known any more, and the bytes that they received.
    ended: [AtomicU64; 3],
    received: AtomicU64,
}

/// How transfers ended and how many there are, for metrics.
#[derive(Clone, Copy, Debug, Default)]
pub struct TransferFigures {
    /// Under way.
    pub running: u64,
    /// Known, and not under way: their CreateVolume has to be called again.
    pub waiting: u64,
    /// Bytes that those under way still have to make sure of.
    pub left_bytes: u64,
    /// Became a volume.
    pub done: u64,
    /// Ended with an error.
    pub failed: u64,
    /// Were removed, since nobody wanted them any more.
    pub removed: u64,
    /// Bytes that came over the network.
    pub received_bytes: u64,
}

#[derive(Clone, Copy)]
enum Outcome {
    Done,
    Failed,
    Removed,
}

/// A volume that is being copied from another node.
struct Transfer {
    record: VolumeRecord,
    progress: Progress,
    state: Mutex<State>,
    changed: Condvar,
}

impl std::fmt::Debug for Transfer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Transfer").field("id", &self.record.id).finish_non_exhaustive()
    }
}

struct State {
    phase: Phase,
    /// The newest way to the source, until the thread takes it.
    remote: Option<Box<dyn Remote>>,
    /// When somebody called for it last.
    asked: Instant,
    /// Told to the thread that is at work.
    stop: Stop,
    /// Its files are to go.
    is_unwanted: bool,
}

enum Phase {
    /// Nobody is at work on it.
    Waiting,
    Running,
    /// It is gone. The answer to the next call says why.
    Failed(Error),
    /// It is a volume, or was removed.
    Over,
}

impl Transfers {
    /// None yet; all together may receive so much in a second.
    pub fn new(rate: Option<Quantity>) -> Self {
        Transfers {
            known: Mutex::default(),
            throttle: Throttle::new(rate.map(|rate| rate.0)),
            working: Mutex::default(),
            ended: Default::default(),
            received: AtomicU64::default(),
        }
    }

    /// What an earlier driver left waits for its next call.
    pub fn take_up(&self, records: Vec<VolumeRecord>) {
        for record in records {
            tracing::info!(volume_id = %record.id, name = record.name, "a transfer waits for its next CreateVolume");
            self.known().insert(record.id.clone(), Arc::new(Transfer::new(record)));
        }
    }

    fn known(&self) -> MutexGuard<'_, HashMap<VolumeId, Arc<Transfer>>> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn named(&self, name: &str) -> Option<Arc<Transfer>> {
        self.known().values().find(|transfer| transfer.record.name == name).cloned()
    }

    /// The id of the volume that is made under this name.
    pub fn id_of(&self, name: &str) -> Option<VolumeId> {
        Some(self.named(name)?.record.id.clone())
    }

    /// What the volumes in the making may hold.
    pub fn promised(&self) -> u64 {
        let known = self.known();
        known.values().fold(0, |sum: u64, transfer| sum.saturating_add(transfer.record.capacity))
    }

    pub fn figures(&self) -> TransferFigures {
        let known: Vec<_> = self.known().values().cloned().collect();
        let ended = |outcome: Outcome| self.ended[outcome as usize].load(Ordering::Relaxed);
        let mut figures = TransferFigures {
            done: ended(Outcome::Done),
            failed: ended(Outcome::Failed),
            removed: ended(Outcome::Removed),
            received_bytes: self.received.load(Ordering::Relaxed),
            ..TransferFigures::default()
        };
        for transfer in known {
            let Progress { total, done, received } = &transfer.progress;
            figures.received_bytes += received.load(Ordering::Relaxed);
            match transfer.state().phase {
                Phase::Running => {
                    figures.running += 1;
                    let done = done.load(Ordering::Relaxed);
                    figures.left_bytes += total.load(Ordering::Relaxed).saturating_sub(done);
                }
                Phase::Waiting => figures.waiting += 1,
                Phase::Failed(_) | Phase::Over => {}
            }
        }
        figures
    }

    /// Forgets a transfer.
    fn forget(&self, transfer: &Transfer, outcome: Option<Outcome>) {
        let Some(_) = self.known().remove(&transfer.record.id) else { return };
        self.received.fetch_add(transfer.progress.received.load(Ordering::Relaxed), Ordering::Relaxed);
        if let Some(outcome) = outcome {
            self.ended[outcome as usize].fetch_add(1, Ordering::Relaxed);
        }
    }
}

impl Transfer {
    fn new(record: VolumeRecord) -> Self {
        let state = State {
            phase: Phase::Waiting,
            remote: None,
            asked: Instant::now(),
            stop: Stop::default(),
            is_unwanted: false,
        };
        Transfer { record, progress: Progress::default(), state: Mutex::new(state), changed: Condvar::new() }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn set(&self, phase: Phase) {
        self.state().phase = phase;
        self.changed.notify_all();
    }

    /// Waits while the thread is at work, no longer than this.
    fn settle(&self, patience: Duration) {
        let is_running = |state: &mut State| matches!(state.phase, Phase::Running);
        let waited = self.changed.wait_timeout_while(self.state(), patience, is_running);
        drop(waited.unwrap_or_else(PoisonError::into_inner));
    }

    /// Waits for so long, or until there is a new way to the source or no wish for it any more.
    fn pause(&self, patience: Duration) {
        let is_quiet = |state: &mut State| state.remote.is_none() && state.stop.check().is_ok();
        let waited = self.changed.wait_timeout_while(self.state(), patience, is_quiet);
        drop(waited.unwrap_or_else(PoisonError::into_inner));
    }

    fn end(&self, is_unwanted: bool) {
        let mut state = self.state();
        state.is_unwanted |= is_unwanted;
        state.stop.cancel();
        drop(state);
        self.changed.notify_all();
    }

    fn busy(&self) -> Error {
        let Progress { total, done, .. } = &self.progress;
        let (total, done) = (total.load(Ordering::Relaxed), done.load(Ordering::Relaxed));
        let what = match self.state().phase {
            Phase::Waiting => "it waits until its source's node answers".to_owned(),
            _ => format!("{done} of {total} bytes are there"),
        };
        Error::Copying { id: self.record.id.to_string(), progress: what }
    }
}

impl Driver {
    /// Makes a volume of a source on another node, or finds what an earlier call of this name made or began. Fails with
    /// [`Error::Copying`] while it is copied.
    pub fn create_volume_from(
        self: &Arc<Self>,
        request: &CreateVolume,
        mut remote: Box<dyn Remote>,
    ) -> Result<Arc<VolumeRecord>> {
        check_name("name", &request.name)?;
        let access = kinds(&request.capabilities, request.parameters.fs_type.as_deref())?;
        let _name = self.locks.take(Key::VolumeName(request.name.clone()))?;
        let transfer = match self.transfers.named(&request.name) {
            Some(transfer) => transfer,
            None => {
                if let Some(existing) = self.existing_volume(request, &access)? {
                    return Ok(existing);
                }
                self.begin_transfer(request, access.clone(), remote.as_mut())?
            }
        };
        self.called_for(&transfer, request, &access)?;
        self.go_on_with(&transfer, remote)?;
        transfer.settle(PATIENCE);
        self.called_for(&transfer, request, &access)?;
        match self.store.read(|index| index.volume(&transfer.record.id)) {
            Some(made) => Ok(made),
            None => Err(transfer.busy()),
        }
    }

    /// The answer to a call for a name that is being transferred, if it is.
    pub(super) fn transferring(&self, request: &CreateVolume, access: &[AccessKind]) -> Result<()> {
        let Some(transfer) = self.transfers.named(&request.name) else { return Ok(()) };
        self.called_for(&transfer, request, access)?;
        Err(transfer.busy())
    }

    /// Somebody waits for it. Fails where they want another volume, and where it has failed.
    fn called_for(&self, transfer: &Transfer, request: &CreateVolume, access: &[AccessKind]) -> Result<()> {
        if let Some(difference) = difference(&transfer.record, request, access) {
            return Err(Error::Clash { kind: "volume", name: shown(&request.name), difference });
        }
        let mut state = transfer.state();
        state.asked = Instant::now();
        if let Phase::Failed(_) = state.phase {
            let phase = std::mem::replace(&mut state.phase, Phase::Over);
            drop(state);
            self.transfers.forget(transfer, None);
            if let Phase::Failed(error) = phase {
                return Err(error);
            }
        }
        Ok(())
    }

    /// Steps 1 and 2.
    fn begin_transfer(
        &self,
        request: &CreateVolume,
        access: Vec<AccessKind>,
        remote: &mut dyn Remote,
    ) -> Result<Arc<Transfer>> {
        self.check_topology(&request.requisite, "volumes are made where the driver runs")?;
        let source = match &request.source {
            Some(SourceRef::Snapshot(id)) => id.parse().map(Source::Snapshot).ok(),
            Some(SourceRef::Volume(id)) => id.parse().map(Source::Volume).ok(),
            None => None,
        };
        let source = source.ok_or(Error::Missing { field: "volume_content_source" })?;
        self.check_host()?;
        if self.transfers.known().len() >= MOST {
            return Err(Error::Busy { what: format!("{MOST} volumes that are copied from other nodes") });
        }
        let id = VolumeId::random(self.key).context("draw an id from", "/dev/random".as_ref())?;
        let opened = remote.open(id.as_str(), &Stop::default())?;
        let block_size = request.parameters.block_size.unwrap_or(opened.block_size);
        let capacity = self.capacity(Some(opened.capacity), &access, block_size, request.range)?;
        let _room = self.reserve(capacity)?;
        let record = VolumeRecord {
            version: VolumeRecord::VERSION,
            id,
            name: request.name.clone(),
            capacity,
            block_size,
            access,
            source: Some(source),
            tracking: request.parameters.tracking.unwrap_or(opened.tracking),
            tuning: request.tuning.clone(),
            attached: None,
            ephemeral: None,
            created: Timestamp::now(),
        };
        let draft = self.store.draft_volume(&record.id)?;
        self.start_from(&draft, &record, &opened)?;
        self.store.begin_transfer(&draft, &record)?;
        draft.keep();
        tracing::info!(
            volume_id = %record.id,
            from = remote.node(),
            bytes = opened.allocated_blocks * opened.block_size.bytes(),
            "a volume is copied from another node"
        );
        let transfer = Arc::new(Transfer::new(record));
        self.transfers.known().insert(transfer.record.id.clone(), transfer.clone());
        Ok(transfer)
    }

    /// The bytes that a transfer starts with: those of a volume that was made from the same source or a relative of it, where
    /// the pool copies without reading; else none. What differs is fetched either way.
    fn start_from(&self, draft: &Draft, record: &VolumeRecord, opened: &Opened) -> Result<()> {
        let is_relative = |volume: &VolumeRecord| match &volume.source {
            Some(Source::Snapshot(id)) => opened.relatives.iter().any(|relative| relative == id.as_str()),
            Some(Source::Volume(id)) => opened.relatives.iter().any(|relative| relative == id.as_str()),
            None => false,
        };
        let relative = self.store.read(|index| {
            let relatives = index.volumes_after(None).filter(|volume| is_relative(volume));
            relatives.max_by_key(|volume| volume.created).cloned()
        });
        if self.pool().copies_atomically()
            && let Some(relative) = relative
            && let Ok(_lock) = self.locks.take(Key::Volume(relative.id.clone()))
            && let Ok(source) = self.pool().open(&self.store.dir().volume(&relative.id))
        {
            let (id, target) = (relative.id.clone(), draft.dir().clone());
            let block_size = relative.block_size;
            let copy = LiveCopy { id, source, target, block_size, sink: None, written: false };
            match self.copy_live(&mut [copy]) {
                Ok(mut files) => {
                    let (file, path) = (files.remove(0), draft.dir().data());
                    change::set_len(&file, &path, record.capacity)?;
                    change::sync(&file, &path)?;
                    let (volume_id, relative) = (&record.id, &relative.id);
                    tracing::info!(%volume_id, %relative, "only what differs from another volume is copied");
                    return Ok(());
                }
                // It would only have saved time.
                Err(error) => {
                    let error = error.explain(&self.config().data_dir);
                    tracing::info!(relative = %relative.id, error, "all of a volume is copied");
                    if draft.dir().bytes().exists() {
                        self.pool().discard(draft.dir())?;
                    }
                }
            }
        }
        self.pool().create(draft.dir(), record.capacity)?;
        Ok(())
    }

    /// Gives a transfer a new way to its source, and a thread where it has none.
    fn go_on_with(self: &Arc<Self>, transfer: &Arc<Transfer>, remote: Box<dyn Remote>) -> Result<()> {
        let mut state = transfer.state();
        match state.phase {
            Phase::Waiting => {}
            Phase::Running => {
                state.remote = Some(remote);
                drop(state);
                transfer.changed.notify_all();
                return Ok(());
            }
            Phase::Failed(_) | Phase::Over => return Ok(()),
        }
        state.remote = Some(remote);
        (state.phase, state.stop) = (Phase::Running, Stop::default());
        drop(state);
        let (driver, of_thread) = (self.clone(), transfer.clone());
        let started = std::thread::Builder::new()
            .name("transfer".to_owned())
            .spawn(move || Running { driver, transfer: of_thread }.run());
        match started.context("start a thread for", self.store.dir().staging().as_path()) {
            Ok(_) => Ok(()),
            Err(error) => {
                transfer.set(Phase::Waiting);
                Err(error.into())
            }
        }
    }

    /// Ends the transfer that makes this volume and removes what there is of it; tells whether there was one. When it has just
    /// become a volume there is none. The caller holds the volume's lock.
    pub(super) fn remove_transfer(&self, id: &VolumeId) -> Result<bool> {
        let Some(transfer) = self.transfers.known().get(id).cloned() else { return Ok(false) };
        transfer.end(true);
        while matches!(transfer.state().phase, Phase::Running) {
            transfer.settle(PATIENCE);
        }
        let phase = std::mem::replace(&mut transfer.state().phase, Phase::Over);
        match phase {
            Phase::Waiting => {
                let removed = self.discard(&transfer);
                if removed.is_err() {
                    transfer.state().is_unwanted = false;
                    transfer.set(Phase::Waiting);
                }
                removed.map(|()| true)
            }
            Phase::Failed(_) => {
                self.transfers.forget(&transfer, None);
                Ok(true)
            }
            // It is a volume, or the thread has removed it.
            Phase::Running | Phase::Over => Ok(self.store.read(|index| index.volume(id).is_none())),
        }
    }

    fn discard(&self, transfer: &Transfer) -> Result<()> {
        let draft = self.store.transfer_draft(&transfer.record.id);
        match self.store.end_transfer(&draft) {
            Ok(()) => {
                drop(draft);
                tracing::info!(volume_id = %transfer.record.id, "a transfer is removed");
                self.transfers.forget(transfer, Some(Outcome::Removed));
                Ok(())
            }
            Err(error) => {
                draft.keep();
                Err(error.into())
            }
        }
    }

    /// Removes transfers that nobody has called for in an hour, and closes sources that nobody reads.
    pub fn sweep_transfers(&self) {
        self.sources.sweep(Instant::now());
        let known: Vec<_> = self.transfers.known().values().cloned().collect();
        for transfer in known {
            let id = &transfer.record.id;
            if transfer.state().asked.elapsed() < UNASKED {
                continue;
            }
            let removed = self.locks.take(Key::Volume(id.clone())).and_then(|_lock| self.remove_transfer(id));
            match removed {
                Ok(_) => tracing::warn!(volume_id = %id, "nobody has called for this transfer in an hour"),
                Err(error) => {
                    let error = error.explain(&self.config().data_dir);
                    tracing::warn!(volume_id = %id, error, "a transfer that nobody calls for stays");
                }
            }
        }
    }

    /// Has all transfers stop where they are: the next driver goes on with them.
    pub fn stop_transfers(&self) {
        let known: Vec<_> = self.transfers.known().values().cloned().collect();
        known.iter().for_each(|transfer| transfer.end(false));
        let until = Instant::now() + LAST_CALL;
        known.iter().for_each(|transfer| transfer.settle(until.saturating_duration_since(Instant::now())));
        self.sources.clear();
    }
}

/// A transfer at work, in its own thread. In whatever way that ends, nobody waits for it any more.
struct Running {
    driver: Arc<Driver>,
    transfer: Arc<Transfer>,
}

impl Drop for Running {
    fn drop(&mut self) {
        if std::thread::panicking() {
            tracing::error!(volume_id = %self.transfer.record.id, "a transfer panicked");
            self.transfer.set(Phase::Waiting);
        }
    }
}

impl Running {
    fn run(self) {
        let Running { driver, transfer } = &self;
        let id = &transfer.record.id;
        let started = Instant::now();
        let phase = match self.carry_out() {
            Ok(()) => {
                let received = transfer.progress.received.load(Ordering::Relaxed);
                let bytes = transfer.progress.total.load(Ordering::Relaxed);
                let ms = started.elapsed().as_millis() as u64;
                tracing::info!(volume_id = %id, bytes, received, ms, "a volume was copied from another node");
                driver.transfers.forget(transfer, Some(Outcome::Done));
                Phase::Over
            }
            Err(error) if error.stopped().is_some() => {
                // What is asked for and cannot be removed is removed at the next try.
                match transfer.state().is_unwanted {
                    false => Phase::Waiting,
                    true => driver.discard(transfer).map_or(Phase::Waiting, |()| Phase::Over),
                }
            }
            Err(error) => {
                let why = error.explain(&driver.config().data_dir);
                tracing::warn!(volume_id = %id, error = why, "a volume could not be copied from another node");
                let draft = driver.store.transfer_draft(id);
                if let Err(error) = driver.store.end_transfer(&draft) {
                    tracing::warn!(volume_id = %id, error = base::report(&error), "its files may stay");
                }
                drop(draft);
                driver.transfers.ended[Outcome::Failed as usize].fetch_add(1, Ordering::Relaxed);
                Phase::Failed(error)
            }
        };
        transfer.set(phase);
    }

    /// Steps 3 and 4.
    fn carry_out(&self) -> Result<()> {
        let Running { driver, transfer } = self;
        let stop = transfer.state().stop.clone();
        let _turn = self.turn(&stop)?;
        let path = driver.store.dir().staging().join(transfer.record.id.as_str());
        let path = base::ObjectDir::new(path).data();
        let file = File::options().read(true).write(true).open(&path).context("open", &path)?;
        let mut way = None;
        let received = self.receive_patiently(&file, &path, &stop, &mut way);
        // Not for the next driver, which goes on with it: the source stays open for that.
        let is_over = received.as_ref().err().is_none_or(|error| error.stopped().is_none());
        let mut close = || {
            if let Some(way) = &mut way {
                way.close();
            }
        };
        if let Err(error) = received {
            if is_over || transfer.state().is_unwanted {
                close();
            }
            return Err(error);
        }
        stop.check()?;
        let draft = driver.store.transfer_draft(&transfer.record.id);
        let committed = driver.store.commit_transfer(draft, transfer.record.clone());
        close();
        committed?;
        Ok(())
    }

    /// Receives until all is there, whatever happens to the source meanwhile. `way` is the newest way to it.
    fn receive_patiently(
        &self,
        file: &File,
        path: &std::path::Path,
        stop: &Stop,
        way: &mut Option<Box<dyn Remote>>,
    ) -> Result<()> {
        let transfer = &self.transfer;
        let [mut pause, longest] = PAUSES;
        loop {
            stop.check()?;
            if let Some(newer) = transfer.state().remote.take() {
                *way = Some(newer);
            }
            let Some(way) = way else {
                transfer.pause(longest);
                continue;
            };
            let before = transfer.progress.received.load(Ordering::Relaxed);
            match self.receive(way.as_mut(), file, path, stop) {
                Ok(()) => return Ok(()),
                Err(Cut::Failed(error)) => return Err(error),
                Err(Cut::Away(why)) => {
                    if transfer.progress.received.load(Ordering::Relaxed) > before {
                        pause = PAUSES[0];
                    }
                    tracing::info!(volume_id = %transfer.record.id, from = way.node(), why, "a transfer is cut, and goes on");
                    transfer.pause(pause);
                    pause = (pause * 2).min(longest);
                }
            }
        }
    }

    fn receive(
        &self,
        remote: &mut dyn Remote,
        file: &File,
        path: &std::path::Path,
        stop: &Stop,
    ) -> Result<(), Cut> {
        let Running { driver, transfer } = self;
        let opened = remote.open(transfer.record.id.as_str(), stop)?;
        if opened.capacity > transfer.record.capacity {
            return Err(Error::Precondition(format!(
                "the source has grown to {} bytes since the volume was begun with {}: create it again",
                opened.capacity, transfer.record.capacity
            ))
            .into());
        }
        let (throttle, progress) = (&driver.transfers.throttle, &transfer.progress);
        let told = Instant::now();
        let volume_id = &transfer.record.id;
        Receiver { file, path, remote, opened: &opened, throttle, progress, stop, volume_id, told }.receive()
    }

    /// Waits until fewer than [`AT_ONCE`] are at work.
    fn turn(&self, stop: &Stop) -> Result<Turn<'_>> {
        loop {
            stop.check()?;
            let mut working = self.driver.transfers.working.lock().unwrap_or_else(PoisonError::into_inner);
            if *working < AT_ONCE {
                *working += 1;
                return Ok(Turn(&self.driver.transfers));
            }
            drop(working);
            std::thread::sleep(throttle::LOOK);
        }
    }
}

/// The right to be at work, until dropped.
struct Turn<'t>(&'t Transfers);

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        *self.0.working.lock().unwrap_or_else(PoisonError::into_inner) -= 1;
    }
}
