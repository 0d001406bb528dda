//! The thread of a transfer. It receives, retries while the source is unavailable, and commits.

use std::fs::File;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use crate::driver::error::{Error, Result};
use crate::driver::transfer::receive::{Cut, Receiver};
use crate::driver::transfer::throttle;
use crate::driver::transfer::transfers::Transfers;
use crate::driver::volumes::incoming::{Outcome, Phase, Transfer};
use crate::driver::volumes::remote::Remote;
use base::{ObjectDir, Stop};
use files::Context;

/// The most transfers that receive at a time. The others wait for their turn.
const AT_ONCE: usize = 4;
/// The first and the longest pause before a retry if the source is unavailable. The pause doubles each time.
const PAUSES: [Duration; 2] = [Duration::from_millis(100), Duration::from_secs(10)];

/// A transfer in its own thread. If the thread panics, the transfer waits for its next call, so that no caller waits for
/// the thread.
pub(super) struct Running {
    pub(super) transfers: Arc<Transfers>,
    pub(super) transfer: Arc<Transfer>,
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
    pub(super) fn run(self) {
        let Running { transfers, transfer } = &self;
        let id = &transfer.record.id;
        let started = Instant::now();
        let phase = match self.carry_out() {
            Ok(()) => {
                let received = transfer.progress.received.load(Ordering::Relaxed);
                let bytes = transfer.progress.total.load(Ordering::Relaxed);
                let ms = started.elapsed().as_millis() as u64;
                tracing::info!(volume_id = %id, bytes, received, ms, "a volume was copied from another node");
                transfers.table.forget(transfer, Some(Outcome::Done));
                Phase::Over
            }
            Err(error) if error.stopped().is_some() => {
                // If the removal fails, the transfer waits, and the next call that removes it tries again.
                match transfer.state().is_unwanted {
                    false => Phase::Waiting,
                    true => transfers.table.discard(transfer).map_or(Phase::Waiting, |()| Phase::Over),
                }
            }
            Err(error) => {
                let why = error.explain(&transfers.shared.config.data_dir);
                tracing::warn!(volume_id = %id, error = why, "a volume could not be copied from another node");
                let draft = transfers.shared.store.transfer_draft(id);
                if let Err(error) = transfers.shared.store.end_transfer(&draft) {
                    tracing::warn!(volume_id = %id, error = base::report(&error), "the files of a failed transfer could not be removed");
                }
                drop(draft);
                transfers.table.ended[Outcome::Failed as usize].fetch_add(1, Ordering::Relaxed);
                Phase::Failed(error)
            }
        };
        transfer.set(phase);
    }

    /// Steps 3 and 4 of `transfer/mod.rs`.
    fn carry_out(&self) -> Result<()> {
        let Running { transfers, transfer } = self;
        let stop = transfer.state().stop.clone();
        let path = transfers.shared.store.dir().staging().join(transfer.record.id.as_str());
        let path = ObjectDir::new(path).data();
        let file = File::options().read(true).write(true).open(&path).context("open", &path)?;
        let mut way = None;
        let received = self.receive_patiently(&file, &path, &stop, &mut way);
        // If the driver stops, the source stays open for the next driver, which continues.
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
        let draft = transfers.shared.store.transfer_draft(&transfer.record.id);
        let committed = transfers.shared.store.commit_transfer(draft, transfer.record.clone());
        close();
        committed?;
        Ok(())
    }

    /// Receives until everything is there, and retries while the source is unavailable. `way` is the newest connection.
    fn receive_patiently(
        &self,
        file: &File,
        path: &Path,
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
            // The turn is not kept during a pause, so that unavailable sources do not block other transfers.
            let turn = self.turn(stop)?;
            let received = self.receive(way.as_mut(), file, path, stop);
            drop(turn);
            match received {
                Ok(()) => return Ok(()),
                Err(Cut::Failed(error)) => return Err(error),
                Err(Cut::Unavailable(why)) => {
                    if transfer.progress.received.load(Ordering::Relaxed) > before {
                        pause = PAUSES[0];
                    }
                    tracing::info!(volume_id = %transfer.record.id, from = way.node(), why, "a transfer is interrupted, and will be tried again");
                    transfer.pause(pause);
                    pause = (pause * 2).min(longest);
                }
            }
        }
    }

    fn receive(&self, remote: &mut dyn Remote, file: &File, path: &Path, stop: &Stop) -> Result<(), Cut> {
        let Running { transfers, transfer } = self;
        let opened = remote.open(transfer.record.id.as_str(), stop)?;
        if opened.capacity > transfer.record.capacity {
            return Err(Error::Precondition(format!(
                "the source has grown to {} bytes, and the new volume has {}: delete it and create it again",
                opened.capacity, transfer.record.capacity
            ))
            .into());
        }
        let (throttle, progress) = (&transfers.throttle, &transfer.progress);
        let logged = Instant::now();
        let volume_id = &transfer.record.id;
        Receiver { file, path, remote, opened: &opened, throttle, progress, stop, volume_id, logged }
            .receive()
    }

    /// Waits until fewer than [`AT_ONCE`] receive.
    fn turn(&self, stop: &Stop) -> Result<Receiving<'_>> {
        loop {
            stop.check()?;
            let mut working = self.transfers.working.lock();
            if *working < AT_ONCE {
                *working += 1;
                return Ok(Receiving(&self.transfers.working));
            }
            drop(working);
            std::thread::sleep(throttle::POLL_INTERVAL);
        }
    }
}

/// The right to receive, until dropped.
struct Receiving<'t>(&'t Mutex<usize>);

impl Drop for Receiving<'_> {
    fn drop(&mut self) {
        *self.0.lock() -= 1;
    }
}
