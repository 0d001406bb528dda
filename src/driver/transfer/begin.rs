//! Begins, continues and removes transfers.

use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::driver::devices::superblock::check_growth;
use crate::driver::error::{Error, Result};
use crate::driver::locks::LockKey;
use crate::driver::request::capability::kinds;
use crate::driver::request::create::{CreateVolume, SourceRef, check_name};
use crate::driver::snapshots::quiesce::LiveCopy;
use crate::driver::transfer::run::Running;
use crate::driver::transfer::transfers::Transfers;
use crate::driver::volumes::incoming::{Phase, Transfer};
use crate::driver::volumes::remote::{Opened, Remote, RemoteFault};
use crate::store::{AccessKind, Draft, Source, Timestamp, VolumeRecord};
use crate::sync::thread;
use base::{Stop, VolumeId};
use files::Context;
use files::change;

/// The most transfers at a time.
const MOST: usize = 256;
/// How long a call waits, since a transfer may be short.
const PATIENCE: Duration = Duration::from_secs(1);
/// How long a transfer is kept without a call for it.
const UNASKED: Duration = Duration::from_secs(3600);
/// How long a stop waits for the transfers to end.
const STOP_PATIENCE: Duration = Duration::from_secs(5);

impl Transfers {
    /// Makes a volume from a source on another node, or returns the one that an earlier call of this name made. Fails with
    /// [`Error::Copying`] while the bytes are copied.
    pub fn create_volume(
        self: &Arc<Self>,
        request: &CreateVolume,
        mut remote: Box<dyn Remote>,
    ) -> Result<Arc<VolumeRecord>> {
        check_name("name", &request.name)?;
        let access = kinds(&request.capabilities, request.parameters.fs_type.as_deref())?;
        let _name = self.shared.locks.take(LockKey::VolumeName(request.name.clone()))?;
        let transfer = match self.table.named(&request.name) {
            Some(transfer) => transfer,
            None => {
                if let Some(existing) = self.volumes.existing(request, &access)? {
                    return Ok(existing);
                }
                self.begin_transfer(request, access.clone(), remote.as_mut())?
            }
        };
        self.table.called_for(&transfer, request, &access)?;
        self.go_on_with(&transfer, remote)?;
        transfer.wait_while_running(PATIENCE);
        self.table.called_for(&transfer, request, &access)?;
        match self.shared.store.read(|index| index.volume(&transfer.record.id)) {
            Some(made) => Ok(made),
            None => Err(transfer.busy()),
        }
    }

    /// Steps 1 and 2 of the list above.
    fn begin_transfer(
        &self,
        request: &CreateVolume,
        access: Vec<AccessKind>,
        remote: &mut dyn Remote,
    ) -> Result<Arc<Transfer>> {
        self.shared.check_topology(&request.requisite, "volumes are made where the driver runs")?;
        let source = match &request.source {
            Some(SourceRef::Snapshot(id)) => id.parse().map(Source::Snapshot).ok(),
            Some(SourceRef::Volume(id)) => id.parse().map(Source::Volume).ok(),
            None => None,
        };
        let source = source.ok_or(Error::Missing { field: "volume_content_source" })?;
        self.shared.check_room()?;
        if self.table.known().len() >= MOST {
            return Err(Error::TooMany { what: format!("{MOST} transfers from other nodes") });
        }
        let new = || VolumeId::random(self.shared.key).context("draw an id from", "/dev/random".as_ref());
        let before = self.opening.lock().remove(&request.name);
        let id = before.map_or_else(new, Ok)?;
        let opened = remote.open(id.as_str(), &Stop::default()).inspect_err(|fault| {
            if matches!(fault, RemoteFault::Unavailable(_)) {
                let mut opening = self.opening.lock();
                if opening.len() >= MOST {
                    opening.clear();
                }
                opening.insert(request.name.clone(), id.clone());
            }
        })?;
        // The next try has another id, so it could not use this one.
        self.begin_from(request, access, source, id, &opened, remote.node()).inspect_err(|_| remote.close())
    }

    fn begin_from(
        &self,
        request: &CreateVolume,
        access: Vec<AccessKind>,
        source: Source,
        id: VolumeId,
        opened: &Opened,
        from: &str,
    ) -> Result<Arc<Transfer>> {
        let block_size = request.parameters.block_size.unwrap_or(opened.block_size);
        let capacity = self.capacity.of_new(Some(opened.capacity), &access, block_size, request.range)?;
        // As where the source is (`volumes/make.rs`).
        if let Some((fs_type, most)) = opened.filesystem.as_ref().filter(|_| opened.capacity < capacity)
            && access.iter().all(|kind| *kind != AccessKind::Block)
        {
            check_growth(fs_type, *most, "capacity_range.required_bytes", capacity)?;
        }
        let _room = self.capacity.reserve(capacity)?;
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
        let draft = self.shared.store.draft_volume(&record.id)?;
        self.start_from(&draft, &record, opened)?;
        self.shared.store.begin_transfer(&draft, &record)?;
        draft.keep();
        tracing::info!(
            volume_id = %record.id,
            from,
            bytes = opened.allocated_blocks * opened.block_size.bytes(),
            "a volume is copied from another node"
        );
        let transfer = Arc::new(Transfer::new(record));
        self.table.known().insert(transfer.record.id.clone(), transfer.clone());
        Ok(transfer)
    }

    /// Makes the bytes that a transfer starts with. If the pool copies without reading, they are those of a volume made from
    /// the same source or a similar one, and only what differs is fetched. Otherwise the file is empty.
    fn start_from(&self, draft: &Draft, record: &VolumeRecord, opened: &Opened) -> Result<()> {
        let is_relative = |volume: &VolumeRecord| match &volume.source {
            Some(Source::Snapshot(id)) => opened.relatives.iter().any(|relative| relative == id.as_str()),
            Some(Source::Volume(id)) => opened.relatives.iter().any(|relative| relative == id.as_str()),
            None => false,
        };
        let relative = self.shared.store.read(|index| {
            let relatives = index.volumes_after(None).filter(|volume| is_relative(volume));
            relatives.max_by_key(|volume| volume.created).cloned()
        });
        if self.shared.pool().copies_atomically()
            && let Some(relative) = relative
            && let Ok(_lock) = self.shared.locks.take(LockKey::Volume(relative.id.clone()))
            && let Ok(source) = self.shared.pool().open(&self.shared.store.dir().volume(&relative.id))
        {
            let (id, target) = (relative.id.clone(), draft.dir().clone());
            let block_size = relative.block_size;
            let copy = LiveCopy { id, source, target, block_size, sink: None, written: false };
            match self.copier.copy_live(&mut [copy]) {
                Ok(mut files) => {
                    let (file, path) = (files.remove(0), draft.dir().data());
                    change::set_len(&file, &path, record.capacity)?;
                    change::sync(&file, &path)?;
                    let (volume_id, relative) = (&record.id, &relative.id);
                    tracing::info!(%volume_id, %relative, "only what differs from another volume is copied");
                    return Ok(());
                }
                // The transfer works without it, and only takes longer.
                Err(error) => {
                    let error = error.explain(&self.shared.config.data_dir);
                    tracing::info!(relative = %relative.id, error, "all of a volume is copied");
                    if draft.dir().bytes().exists() {
                        self.shared.pool().discard(draft.dir())?;
                    }
                }
            }
        }
        self.shared.pool().create(draft.dir(), record.capacity)?;
        Ok(())
    }

    /// Gives a transfer a new connection to its source, and a thread if it has none.
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
        let running = Running { transfers: self.clone(), transfer: transfer.clone() };
        let started = thread::Builder::new().name("transfer".to_owned()).spawn(move || running.run());
        match started.context("start a thread for", self.shared.store.dir().staging().as_path()) {
            Ok(_) => Ok(()),
            Err(error) => {
                transfer.set(Phase::Waiting);
                Err(error.into())
            }
        }
    }

    /// Removes the transfer that makes this volume, unless a call came for it in the time `unasked`; if its source is `gone`, in any
    /// case. Returns `false` if it became a volume, which stays.
    pub fn abandon(&self, id: &str, unasked: Duration, gone: &str) -> Result<bool> {
        let Ok(id) = id.parse::<VolumeId>() else { return Ok(true) };
        let lock = self.shared.locks.take(LockKey::Volume(id.clone()))?;
        let found = self.table.known().get(&id).cloned();
        if let Some(transfer) = found {
            let is_gone = match &transfer.record.source {
                Some(Source::Snapshot(source)) => source.as_str() == gone,
                Some(Source::Volume(source)) => source.as_str() == gone,
                None => false,
            };
            if !is_gone && transfer.state().asked.elapsed() < unasked {
                return Err(transfer.busy());
            }
            self.table.remove(&id, &lock)?;
        }
        Ok(self.shared.store.read(|index| index.volume(&id).is_none()))
    }

    /// Removes transfers for which no call came for an hour.
    pub fn sweep(&self) {
        let known: Vec<_> = self.table.known().values().cloned().collect();
        for transfer in known {
            let id = &transfer.record.id;
            if transfer.state().asked.elapsed() < UNASKED {
                continue;
            }
            match self.abandon(id.as_str(), UNASKED, "") {
                Ok(_) => {
                    tracing::warn!(volume_id = %id, "a transfer was removed: CreateVolume was not called for it in an hour")
                }
                Err(error) => {
                    let error = error.explain(&self.shared.config.data_dir);
                    tracing::warn!(volume_id = %id, error, "an abandoned transfer could not be removed");
                }
            }
        }
    }

    /// Stops all transfers: the next driver continues them.
    pub fn stop(&self) {
        let known: Vec<_> = self.table.known().values().cloned().collect();
        known.iter().for_each(|transfer| transfer.end(false));
        let until = Instant::now() + STOP_PATIENCE;
        known.iter().for_each(|transfer| {
            transfer.wait_while_running(until.saturating_duration_since(Instant::now()))
        });
    }
}
