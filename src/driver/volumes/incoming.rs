//! The transfers to this node, the calls that wait for them, and how each ended. Nothing here reads or writes a volume's
//! bytes.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};

use crate::driver::error::{Error, OTHER_NAME, Result, shown};
use crate::driver::locks::OpGuard;
use crate::driver::request::create::{CreateVolume, difference};
use crate::driver::shared::Shared;
use crate::driver::volumes::remote::Remote;
use crate::store::{AccessKind, VolumeRecord};
use crate::sync::{Condvar, Mutex, MutexGuard};
use base::{Stop, VolumeId};

/// How often a call that ends a transfer checks whether it has ended.
const PATIENCE: Duration = Duration::from_secs(1);

/// The transfers to this node.
#[derive(Debug)]
pub(in crate::driver) struct TransferTable {
    shared: Arc<Shared>,
    known: Mutex<HashMap<VolumeId, Arc<Transfer>>>,
    /// Numbers of transfers that ended and were forgotten, by outcome; and the bytes that those received.
    pub(in crate::driver) ended: [AtomicU64; 3],
    received: AtomicU64,
}

/// Numbers of transfers, by state and outcome, for metrics.
#[derive(Clone, Copy, Debug, Default)]
pub struct TransferFigures {
    /// With a thread at work, or waiting for one.
    pub running: u64,
    /// Not running until CreateVolume is called again.
    pub waiting: u64,
    /// Bytes that running transfers still have to fetch or compare.
    pub left_bytes: u64,
    /// Became a volume.
    pub done: u64,
    /// Ended with an error.
    pub failed: u64,
    /// Removed because they were not wanted any more.
    pub removed: u64,
    /// Bytes that came over the network.
    pub received_bytes: u64,
}

#[derive(Clone, Copy)]
pub(in crate::driver) enum Outcome {
    Done,
    Failed,
    Removed,
}

/// The progress of a transfer, for the log and for metrics.
#[derive(Debug, Default)]
pub(in crate::driver) struct Progress {
    /// Bytes that the source holds.
    pub total: AtomicU64,
    /// Of these, the bytes known to be in the new volume.
    pub done: AtomicU64,
    /// Bytes that came over the network, including bytes that were not used.
    pub received: AtomicU64,
}

impl Progress {
    /// Counts bytes that are in the new volume.
    pub(in crate::driver) fn add_done(&self, bytes: u64) {
        self.done.fetch_add(bytes, Ordering::Relaxed);
    }
}

/// A volume that is being copied from another node.
pub(in crate::driver) struct Transfer {
    pub(in crate::driver) record: VolumeRecord,
    pub(in crate::driver) progress: Progress,
    state: Mutex<State>,
    pub(in crate::driver) changed: Condvar,
}

impl std::fmt::Debug for Transfer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Transfer").field("id", &self.record.id).finish_non_exhaustive()
    }
}

pub(in crate::driver) struct State {
    pub(in crate::driver) phase: Phase,
    /// The newest connection to the source, until the thread takes it.
    pub(in crate::driver) remote: Option<Box<dyn Remote>>,
    /// When the last call for it came.
    pub(in crate::driver) asked: Instant,
    /// Cancelled to end the thread.
    pub(in crate::driver) stop: Stop,
    /// Whether its files are to be removed.
    pub(in crate::driver) is_unwanted: bool,
}

pub(in crate::driver) enum Phase {
    /// No thread works on it until CreateVolume is called again.
    Waiting,
    Running,
    /// It failed. The next call gets this error.
    Failed(Error),
    /// It became a volume, or was removed.
    Over,
}

impl TransferTable {
    pub(in crate::driver) fn new(shared: Arc<Shared>) -> Self {
        TransferTable {
            shared,
            known: Mutex::default(),
            ended: Default::default(),
            received: AtomicU64::default(),
        }
    }

    /// Adds the transfers that an earlier driver began. Each waits for its next call.
    pub(in crate::driver) fn take_up(&self) {
        let records = self.shared.store.transfers().unwrap_or_else(|error| {
            tracing::warn!(error = base::report(&error), "interrupted transfers cannot continue");
            Vec::new()
        });
        for record in records {
            tracing::info!(volume_id = %record.id, name = record.name, "a transfer waits for its next CreateVolume");
            self.known().insert(record.id.clone(), Arc::new(Transfer::new(record)));
        }
    }

    pub(in crate::driver) fn known(&self) -> MutexGuard<'_, HashMap<VolumeId, Arc<Transfer>>> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(in crate::driver) fn named(&self, name: &str) -> Option<Arc<Transfer>> {
        self.known().values().find(|transfer| transfer.record.name == name).cloned()
    }

    /// The id of the volume that is being copied under this name.
    pub(in crate::driver) fn id_of(&self, name: &str) -> Option<VolumeId> {
        Some(self.named(name)?.record.id.clone())
    }

    /// The total capacity of all volumes that are being copied.
    pub(in crate::driver) fn reserved(&self) -> u64 {
        let known = self.known();
        known.values().fold(0, |sum: u64, transfer| sum.saturating_add(transfer.record.capacity))
    }

    pub(in crate::driver) fn figures(&self) -> TransferFigures {
        let ended = |outcome: Outcome| self.ended[outcome as usize].load(Ordering::Relaxed);
        let mut figures = TransferFigures {
            done: ended(Outcome::Done),
            failed: ended(Outcome::Failed),
            removed: ended(Outcome::Removed),
            received_bytes: self.received.load(Ordering::Relaxed),
            ..TransferFigures::default()
        };
        // Read after the counters of ended transfers, so that one that ends meanwhile is not counted twice.
        let known: Vec<_> = self.known().values().cloned().collect();
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

    pub(in crate::driver) fn forget(&self, transfer: &Transfer, outcome: Option<Outcome>) {
        let Some(_) = self.known().remove(&transfer.record.id) else { return };
        self.received.fetch_add(transfer.progress.received.load(Ordering::Relaxed), Ordering::Relaxed);
        if let Some(outcome) = outcome {
            self.ended[outcome as usize].fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Fails if a volume of this name is being transferred.
    pub(in crate::driver) fn check(&self, request: &CreateVolume, access: &[AccessKind]) -> Result<()> {
        let Some(transfer) = self.named(&request.name) else { return Ok(()) };
        self.called_for(&transfer, request, access)?;
        Err(transfer.busy())
    }

    /// Notes a call for the transfer. Fails if the call asks for a different volume, or if the transfer has failed.
    pub(in crate::driver) fn called_for(
        &self,
        transfer: &Transfer,
        request: &CreateVolume,
        access: &[AccessKind],
    ) -> Result<()> {
        if let Some(difference) = difference(&transfer.record, request, access) {
            return Err(Error::Clash {
                kind: "volume",
                name: shown(&request.name),
                difference,
                remedy: OTHER_NAME,
            });
        }
        let mut state = transfer.state();
        state.asked = Instant::now();
        if let Phase::Failed(_) = state.phase {
            let phase = std::mem::replace(&mut state.phase, Phase::Over);
            drop(state);
            self.forget(transfer, None);
            if let Phase::Failed(error) = phase {
                return Err(error);
            }
        }
        Ok(())
    }

    /// Ends the transfer that makes this volume and removes its files. Returns `false` if there is no transfer, or if it
    /// became a volume meanwhile. `_lock` keeps others from making or using the volume.
    pub(in crate::driver) fn remove(&self, id: &VolumeId, _lock: &OpGuard) -> Result<bool> {
        let Some(transfer) = self.known().get(id).cloned() else { return Ok(false) };
        let phase = loop {
            transfer.end(true);
            // Looked at and changed under one lock: a call may set it going again at any other moment.
            let mut state = transfer.state();
            if !matches!(state.phase, Phase::Running) {
                break std::mem::replace(&mut state.phase, Phase::Over);
            }
            drop(state);
            transfer.wait_while_running(PATIENCE);
        };
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
                self.forget(&transfer, None);
                Ok(true)
            }
            // It became a volume, or the thread removed it.
            Phase::Running | Phase::Over => Ok(self.shared.store.read(|index| index.volume(id).is_none())),
        }
    }

    pub(in crate::driver) fn discard(&self, transfer: &Transfer) -> Result<()> {
        let draft = self.shared.store.transfer_draft(&transfer.record.id);
        match self.shared.store.end_transfer(&draft) {
            Ok(()) => {
                drop(draft);
                tracing::info!(volume_id = %transfer.record.id, "a transfer was removed");
                self.forget(transfer, Some(Outcome::Removed));
                Ok(())
            }
            Err(error) => {
                draft.keep();
                Err(error.into())
            }
        }
    }
}

impl Transfer {
    pub(in crate::driver) fn new(record: VolumeRecord) -> Self {
        let state = State {
            phase: Phase::Waiting,
            remote: None,
            asked: Instant::now(),
            stop: Stop::default(),
            is_unwanted: false,
        };
        Transfer { record, progress: Progress::default(), state: Mutex::new(state), changed: Condvar::new() }
    }

    pub(in crate::driver) fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(in crate::driver) fn set(&self, phase: Phase) {
        self.state().phase = phase;
        self.changed.notify_all();
    }

    /// Waits until the thread has stopped, at most `patience`.
    pub(in crate::driver) fn wait_while_running(&self, patience: Duration) {
        let is_running = |state: &mut State| matches!(state.phase, Phase::Running);
        _ = self.changed.wait_timeout_while(self.state(), patience, is_running);
    }

    /// Waits for `patience`, or until there is a new connection to the source or the transfer is to stop.
    pub(in crate::driver) fn pause(&self, patience: Duration) {
        let is_quiet = |state: &mut State| state.remote.is_none() && state.stop.check().is_ok();
        _ = self.changed.wait_timeout_while(self.state(), patience, is_quiet);
    }

    pub(in crate::driver) fn end(&self, is_unwanted: bool) {
        let mut state = self.state();
        state.is_unwanted |= is_unwanted;
        state.stop.cancel();
        drop(state);
        self.changed.notify_all();
    }

    pub(in crate::driver) fn busy(&self) -> Error {
        let Progress { total, done, .. } = &self.progress;
        let (total, done) = (total.load(Ordering::Relaxed), done.load(Ordering::Relaxed));
        let what = match self.state().phase {
            Phase::Waiting => "waiting for the source's node".to_owned(),
            _ => format!("{done} of {total} bytes are there"),
        };
        Error::Copying { id: self.record.id.to_string(), progress: what }
    }
}
