//! The `SnapshotMetadata` service: which blocks a snapshot holds, and which differ between two.
//!
//! A stream holds open files and a position. Each call to [`MetadataStream::work`] makes one message, or returns after a
//! short time without one. So no thread waits here for a slow client, and no stream waits long for another.

use std::fs::File;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use crate::driver::error::{Error, Result};
use crate::driver::metadata::streams::{Parked, Share, Streams};
use crate::driver::shared::Shared;
use crate::driver::snapshots::history::hold::Histories;
use crate::store::{SnapshotRecord, TupleStyle};
use base::{Block, ByteRange, SnapshotId, Stop};
use cbt::{self, AllocatedScan, Allocation, DeltaScan, MapFile, RunSource, Tuples};
use files::Context;

/// The most tuples of a message if the client does not choose.
const DEFAULT_TUPLES: usize = 4096;
/// The most tuples of a message that a client can choose: at 24 bytes each well under gRPC's 4 MiB.
const MAX_TUPLES: usize = 16384;
/// How long tuples are collected before a message is sent even if it is not full, or another stream has its turn.
const PACE: Duration = Duration::from_millis(20);

/// Where an answer starts, and how many tuples a message holds.
#[derive(Clone, Copy, Debug, Default)]
pub struct MetadataRequest {
    /// `starting_offset`: no tuple ends at or before it.
    pub starting_offset: i64,
    /// `max_results`: the most tuples of a message; 0 for the driver's choice.
    pub max_results: i32,
}

/// The result of one turn of a stream.
#[derive(Debug)]
pub enum Progress {
    /// The next message. Only the first one may have no tuples.
    Message(Message),
    /// Nothing was found yet.
    Nothing,
    /// Everything was listed.
    End,
}

/// The tuples of a message. Their memory counts until the message is dropped.
#[derive(Debug)]
pub struct Message {
    /// Ascending.
    pub tuples: Vec<ByteRange>,
    _share: Share,
}

/// An answer that is being streamed.
pub struct MetadataStream {
    style: TupleStyle,
    capacity: u64,
    most: usize,
    /// `None` once all has been sent.
    tuples: Option<Tuples>,
    first: bool,
    /// Whether it may read data.
    reads: bool,
    streams: Arc<Streams>,
    /// The segment it was in, between two turns.
    parked: Option<Parked>,
}

impl MetadataStream {
    /// How the tuples are listed, the same in all messages.
    pub fn style(&self) -> TupleStyle {
        self.style
    }

    /// The size of the (target) snapshot in bytes, the same in all messages.
    pub fn capacity(&self) -> u64 {
        self.capacity
    }

    /// The most memory that a turn takes, in bytes.
    pub fn work_bytes(&self) -> usize {
        self.tuples.as_ref().map_or(0, Tuples::work_bytes)
    }

    /// Works until a message is full or `PACE` has passed. The first message is always sent, even without a tuple, since it
    /// carries type and capacity.
    pub fn work(&mut self, stop: &Stop) -> Result<Progress> {
        // A delta may read data, so hashing pauses meanwhile.
        let _foreground = self.reads.then(|| self.streams.foreground().begin());
        let first = std::mem::take(&mut self.first);
        let (mut share, most) = self.streams.share(self.most);
        let mut found = Vec::new();
        if let Some(tuples) = &mut self.tuples {
            stop.check()?;
            if let Some(segment) = self.parked.take().and_then(|place| place.take()) {
                tuples.resume(segment);
            }
            if tuples.fill(most, &mut found, stop, Instant::now() + PACE)? {
                self.parked = tuples.park().map(|segment| self.streams.park(segment));
            } else {
                self.tuples = None;
            }
        } else if !first {
            return Ok(Progress::End);
        }
        if !first && found.is_empty() {
            return Ok(Progress::Nothing);
        }
        found.shrink_to_fit();
        share.shrink(found.len());
        Ok(Progress::Message(Message { tuples: found, _share: share }))
    }
}

/// Answers which blocks snapshots hold, and which differ.
#[derive(Debug)]
pub struct Metadata {
    pub(in crate::driver) shared: Arc<Shared>,
    pub(in crate::driver) histories: Arc<Histories>,
    pub(in crate::driver) streams: Arc<Streams>,
    /// Whether [`Metadata::hint`] has been logged.
    pub(in crate::driver) hinted: AtomicBool,
}

impl Metadata {
    /// The memory of its streams.
    pub fn streams(&self) -> &Arc<Streams> {
        &self.streams
    }

    /// The allocated blocks of a snapshot.
    pub fn allocated(
        &self,
        snapshot_id: &str,
        request: MetadataRequest,
        stop: &Stop,
    ) -> Result<MetadataStream> {
        let record = self.shared.snapshot(snapshot_id)?;
        let position = Position::of(&record, request)?;
        let dir = self.shared.store.snapshot_dir(&record);
        let map = self.histories.healed(&record, stop, || {
            let path = dir.data();
            let data = File::open(&path).context("open", &path)?;
            Ok(Allocation::new(MapFile::open(&dir.allocated())?, Some(data), &path))
        });
        let map = map.map_err(|error| Error::gone_or(error, &record))?;
        let source = RunSource::Allocated(Box::new(AllocatedScan::new(map, position.block)));
        Ok(self.stream(&record, position, Some(source)))
    }

    /// The blocks of `target` whose content differs from that of `base`.
    pub fn delta(
        &self,
        base_id: &str,
        target_id: &str,
        request: MetadataRequest,
        stop: &Stop,
    ) -> Result<MetadataStream> {
        // A missing id is reported before an unknown one.
        for (field, id) in [("base_snapshot_id", base_id), ("target_snapshot_id", target_id)] {
            if id.is_empty() {
                return Err(Error::Missing { field });
            }
        }
        let base = self.base_snapshot(base_id)?;
        let target = self.shared.snapshot_in("target_snapshot_id", target_id)?;
        if base.volume != target.volume {
            return Err(Error::Invalid {
                field: "base_snapshot_id",
                value: format!("a snapshot of volume {}", base.volume),
                want: format!("a snapshot of the target's volume {}", target.volume),
            });
        }
        if base.sequence > target.sequence {
            return Err(Error::Invalid {
                field: "base_snapshot_id",
                value: format!("{base_id}, taken after the target"),
                want: "the older of the two".into(),
            });
        }
        let position = Position::of(&target, request)?;
        if !target.tracking {
            return Err(Error::Precondition(format!(
                "volume {} was made with changedBlockTracking false, so no delta is kept: use \
                 GetMetadataAllocated, or a StorageClass with tracking",
                target.volume
            )));
        }
        if base.id == target.id {
            return Ok(self.stream(&target, position, None));
        }
        // The way is opened first. If links are merged meanwhile, its maps still list enough. If a link is
        // missing, all blocks are compared.
        let way = self.histories.way(&base, &target)?;
        let scan = DeltaScan::new(
            self.histories.side(&base, stop)?,
            self.histories.side(&target, stop)?,
            way,
            position.block,
        );
        Ok(self.stream(&target, position, Some(RunSource::Delta(Box::new(scan)))))
    }

    /// The base of a delta, which may be a deleted snapshot that is retained.
    fn base_snapshot(&self, id: &str) -> Result<Arc<SnapshotRecord>> {
        match self.shared.snapshot_in("base_snapshot_id", id) {
            Err(Error::NotFound { kind, id: shown }) => {
                let retained =
                    id.parse().ok().and_then(|id| self.shared.store.read(|index| index.known(&id)));
                retained.ok_or_else(|| {
                    self.hint(id);
                    Error::NotFound { kind, id: shown }
                })
            }
            found => found,
        }
    }

    /// Says once why a backup tool that deletes its snapshots gets no delta.
    fn hint(&self, base_id: &str) {
        let is_of_here =
            base_id.parse::<SnapshotId>().is_ok() && base::DataDirKey::of(base_id) == Some(self.shared.key);
        if is_of_here && !self.hinted.swap(true, Ordering::Relaxed) {
            tracing::warn!(
                base = base_id,
                retained = self.shared.config.retain.count,
                "a delta was asked from a deleted snapshot that is not kept, so the backup tool has to make a full backup. \
                 --retain-deleted sets how many are kept, and for how long. This is logged once"
            );
        }
    }

    fn stream(
        &self,
        record: &SnapshotRecord,
        position: Position,
        source: Option<RunSource>,
    ) -> MetadataStream {
        let style = record.tuple_style.unwrap_or(self.shared.config.tuple_style);
        let fixed = style == TupleStyle::Fixed;
        MetadataStream {
            style,
            capacity: record.capacity,
            most: position.most,
            reads: matches!(source, Some(RunSource::Delta(_))),
            tuples: source.map(|source| Tuples::new(source, record.block_size, fixed)),
            first: true,
            streams: self.streams.clone(),
            parked: None,
        }
    }
}

/// A checked request.
#[derive(Clone, Copy, Debug)]
struct Position {
    /// The block that holds the starting offset.
    block: Block,
    most: usize,
}

impl Position {
    fn of(record: &SnapshotRecord, request: MetadataRequest) -> Result<Self> {
        let most = match usize::try_from(request.max_results) {
            Ok(0) => DEFAULT_TUPLES,
            Ok(most) => most.min(MAX_TUPLES),
            Err(_) => {
                return Err(Error::Invalid {
                    field: "max_results",
                    value: request.max_results.to_string(),
                    want: "0 (the driver's choice) or more".into(),
                });
            }
        };
        match u64::try_from(request.starting_offset) {
            Ok(offset) if offset <= record.capacity => {
                Ok(Position { block: record.block_size.block_of(offset), most })
            }
            _ => Err(Error::OutOfRange {
                field: "starting_offset",
                value: i128::from(request.starting_offset),
                want: format!("from 0 to the snapshot's capacity, {}", record.capacity),
            }),
        }
    }
}
