//! A backup: what is decided first (full or incremental, over which base, after what was interrupted), and the threads that
//! read, compress and store.

use std::collections::HashSet;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use base::{ByteRange, Stop};
use snapshot_metadata_client::{Advice, Blocks, Client};

use crate::device::{Buffer, Device, is_zeros};
use crate::error::{Error, Result};
use crate::plan::{self, Listed, Read, Segments};
use crate::progress::{Limit, Progress};
use crate::repository::index::{Cells, envelope};
use crate::repository::pack::Compressor;
use crate::repository::writer::Writer;
use crate::repository::{self, About, BLOCK, Extent, Index, Kind, Partial, Repository, SEGMENT, SegmentRef};

/// What a user asks for.
#[derive(Debug)]
pub struct Request {
    /// The volume's name in the repository.
    pub volume: String,
    /// What is read.
    pub device: PathBuf,
    /// The socket of the CSI driver, where one says what is allocated and changed.
    pub endpoint: Option<String>,
    /// The snapshot that the device holds.
    pub snapshot: Option<String>,
    /// The snapshot that an incremental backup is made over; without it that of the last backup.
    pub base: Option<String>,
    /// What is made.
    pub wish: Wish,
    /// Bytes a second that are read.
    pub limit: Option<u64>,
    /// Go on with what was interrupted.
    pub resume: bool,
    /// Reads at once.
    pub in_flight: usize,
    /// Level of zstd.
    pub level: i32,
}

/// What kind of backup is asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wish {
    /// Full.
    Full,
    /// Incremental, or none.
    Incremental,
    /// Incremental where that can be, else full.
    Auto,
}

/// A backup that is decided.
struct Job {
    about: About,
    base: Option<Index>,
    ranges: Ranges,
    done: Option<Partial>,
}

/// Where the ranges come from that are read.
enum Ranges {
    /// The holes of an image.
    File,
    /// A driver.
    Stream(Box<Blocks>),
}

/// Why there is no incremental backup.
enum Not {
    /// A full one can be made.
    Possible(String),
    /// Nothing can.
    Failed(Error),
}

impl From<Error> for Not {
    fn from(error: Error) -> Self {
        match error {
            Error::Driver { error } if error.advice() == Advice::FullBackup => {
                Not::Possible(format!("the driver's delta ended early: {error}"))
            }
            error if error.is_damage() => Not::Possible(base::report(&error)),
            error => Not::Failed(error),
        }
    }
}

/// Makes a backup, and says what was made.
pub fn run(repository: &Repository, request: &Request, stop: &Stop) -> Result<Index> {
    let device = Device::open(&request.device)?;
    let partial = match request.resume {
        true => interrupted(repository, request)?,
        false => None,
    };
    let wish = match partial.as_ref().map(|partial| partial.about.kind) {
        Some(Kind::Full) => Wish::Full,
        Some(Kind::Incremental) if request.wish == Wish::Full => Wish::Full,
        _ => request.wish,
    };
    let why = match wish {
        Wish::Full => partial.as_ref().and_then(|partial| partial.about.why.clone()),
        Wish::Incremental | Wish::Auto => {
            let made = incremental(repository, request, &device, partial.clone())
                .and_then(|job| Ok(store(repository, request, &device, job, stop)?));
            match made {
                Ok(index) => return Ok(index),
                Err(Not::Possible(why)) if wish == Wish::Auto => Some(why),
                Err(Not::Possible(why)) => {
                    return Err(Error::refused(format!(
                        "no incremental backup can be made: {why}; make a full one, or use `auto`"
                    )));
                }
                Err(Not::Failed(error)) => return Err(error),
            }
        }
    };
    if let Some(why) = &why {
        tracing::warn!("a full backup: {why}");
    }
    let partial = partial.filter(|partial| partial.about.kind == Kind::Full);
    let job = full(repository, request, &device, why, partial)?;
    store(repository, request, &device, job, stop)
}

/// What was interrupted of the same backup.
fn interrupted(repository: &Repository, request: &Request) -> Result<Option<Partial>> {
    let mut found = None;
    for (name, partial) in repository.partials()? {
        match partial {
            Ok(partial)
                if partial.about.volume == request.volume && partial.about.snapshot == request.snapshot =>
            {
                let is_same = request.snapshot.is_some()
                    || partial.about.device == request.device.display().to_string();
                found = is_same.then_some(partial).or(found);
            }
            Ok(_) => {}
            Err(error) if error.is_damage() => tracing::warn!("{name} is left out: {}", base::report(&error)),
            Err(error) => return Err(error),
        }
    }
    Ok(found)
}

fn about(request: &Request, kind: Kind, size: u64) -> Result<About> {
    let now = jiff::Timestamp::now();
    Ok(About {
        id: format!("{}-{}", now.strftime("%Y%m%dT%H%M%S%.3fZ"), repository::random_digits(6)?),
        volume: request.volume.clone(),
        created: now.as_second(),
        kind,
        base: None,
        why: None,
        snapshot: request.snapshot.clone(),
        device: request.device.display().to_string(),
        size,
        data: 0,
        listed: 0,
        read: 0,
        added: 0,
        milliseconds: 0,
    })
}

fn full(
    repository: &Repository,
    request: &Request,
    device: &Device,
    why: Option<String>,
    partial: Option<Partial>,
) -> Result<Job> {
    let (ranges, size) = match (&request.endpoint, &request.snapshot) {
        (Some(endpoint), Some(snapshot)) => {
            let allocated = client(endpoint)
                .and_then(|client| repository.store.runtime().block_on(client.allocated(snapshot)));
            match allocated {
                Ok(blocks) => {
                    let capacity = blocks.capacity();
                    (Ranges::Stream(Box::new(blocks)), capacity)
                }
                // A driver that cannot say what is allocated: the device is read whole.
                Err(error) if error.advice() == Advice::FullBackup => {
                    tracing::warn!("all of the device is read: {error}");
                    (Ranges::File, device.size())
                }
                Err(error) => return Err(error.into()),
            }
        }
        _ => (Ranges::File, device.size()),
    };
    fits(device, size)?;
    let done = partial.filter(|partial| partial.about.size == size);
    Ok(Job { about: About { why, ..about(request, Kind::Full, size)? }, base: None, ranges, done })
}

fn incremental(
    repository: &Repository,
    request: &Request,
    device: &Device,
    partial: Option<Partial>,
) -> Result<Job, Not> {
    let (Some(endpoint), Some(snapshot)) = (&request.endpoint, &request.snapshot) else {
        return Err(Not::Possible("without --endpoint and --snapshot nobody says what changed".into()));
    };
    let base = base_of(repository, request, partial.as_ref())?;
    let Some(handle) = &base.about.snapshot else {
        return Err(Not::Possible(format!(
            "backup {} is of no snapshot that the driver knows",
            base.about.id
        )));
    };
    if handle == snapshot {
        return Err(Not::Failed(Error::refused(format!(
            "snapshot {snapshot} is backed up already, as {}; take a new snapshot",
            base.about.id
        ))));
    }
    let delta = client(endpoint)
        .and_then(|client| repository.store.runtime().block_on(client.delta(handle, snapshot)));
    let blocks = match delta {
        Ok(blocks) => blocks,
        Err(error) if error.advice() == Advice::FullBackup => {
            return Err(Not::Possible(format!("the driver gives no delta from {handle}: {error}")));
        }
        Err(error) => return Err(Not::Failed(error.into())),
    };
    let size = blocks.capacity();
    if size != base.about.size {
        return Err(Not::Possible(format!(
            "the volume has {size} bytes, and had {} in {}",
            base.about.size, base.about.id
        )));
    }
    fits(device, size)?;
    let base_id = Some(base.about.id.clone());
    let done = partial.filter(|partial| partial.about.base == base_id && partial.about.size == size);
    let about = About { base: base_id, ..about(request, Kind::Incremental, size)? };
    Ok(Job { about, base: Some(base), ranges: Ranges::Stream(Box::new(blocks)), done })
}

/// The backup that an incremental one is made over: of the snapshot that is named, or the last one of the volume.
fn base_of(repository: &Repository, request: &Request, partial: Option<&Partial>) -> Result<Index, Not> {
    let mut damaged = None;
    for id in repository.ids()?.iter().rev() {
        let index = match repository.index(id) {
            Ok(index) => index,
            Err(error) if error.is_damage() => {
                damaged.get_or_insert(base::report(&error));
                continue;
            }
            Err(error) => return Err(Not::Failed(error)),
        };
        let of_partial = partial.is_none_or(|partial| partial.about.base.as_ref() == Some(id));
        let of_base = request.base.is_none() || index.about.snapshot == request.base;
        if index.about.volume == request.volume && of_base && of_partial {
            return match repository.known_damage(id)? {
                Some(what) => Err(Not::Possible(format!("the last backup, {id}, is damaged: {what}"))),
                None => {
                    repository.check_packs(&index)?;
                    Ok(index)
                }
            };
        }
    }
    Err(Not::Possible(match (damaged, &request.base) {
        (Some(damaged), _) => damaged,
        (None, Some(base)) => format!("no backup of {} is of snapshot {base}", request.volume),
        (None, None) => format!("there is no earlier backup of {}", request.volume),
    }))
}

fn client(endpoint: &str) -> Result<Client, snapshot_metadata_client::Error> {
    Client::csi(endpoint)
}

fn fits(device: &Device, size: u64) -> Result<()> {
    match device.size() >= size {
        true => Ok(()),
        false => Err(Error::refused(format!(
            "{} has {} bytes, and the snapshot has {size}: it is not the device of that snapshot",
            device.path().display(),
            device.size()
        ))),
    }
}

/// Reads and stores, and writes the index. What is interrupted or fails can be gone on with.
fn store(
    repository: &Repository,
    request: &Request,
    device: &Device,
    job: Job,
    stop: &Stop,
) -> Result<Index> {
    let began = Instant::now();
    let Job { mut about, base, ranges, done } = job;
    let (packs, segments) = done.as_ref().map_or((&[][..], &[][..]), |done| (&done.packs, &done.segments));
    let run = Run {
        device,
        request,
        stop,
        writer: Writer::new(repository, packs, segments),
        base: base.as_ref(),
        limit: Limit::new(request.limit),
        progress: Progress::new("backup", about.size),
        is_failed: AtomicBool::new(false),
        error: Mutex::new(None),
        read: AtomicU64::new(0),
        done: Mutex::new(done.map(|done| done.done).unwrap_or_default()),
    };
    let mut seen = Seen { listed: 0, touched: HashSet::new(), changed: Cells::new(about.size) };
    let came = run.all(repository, ranges, about.size, &mut seen);
    let Run { writer, read, done, .. } = run;
    let done = done.into_inner().unwrap_or_else(PoisonError::into_inner);
    if came.is_ok() {
        for segment in
            base.iter().flat_map(|base| &base.segments).filter(|of| !seen.touched.contains(&of.number))
        {
            writer.keep(base.as_ref().map_or(&[], |base| &base.packs), segment);
        }
    }
    (about.listed, about.read) = (seen.listed, read.into_inner());
    let written = match (came, writer.finish()) {
        (Ok(()), Ok(written)) => written,
        (Err(error), Ok(written)) => {
            about.added = written.added;
            if !done.is_empty() && !error.is_of_increment() {
                leave(repository, Partial { about, packs: written.packs, segments: written.segments, done });
            }
            return Err(error);
        }
        (came, Err(error)) => return Err(came.err().unwrap_or(error)),
    };
    about.data = written.segments.iter().map(|of| u64::from(of.blocks) * BLOCK).sum();
    about.milliseconds = began.elapsed().as_millis() as u64;
    about.added = written.added;
    let name = format!("backups/{}", about.id);
    let index =
        Index { about, packs: written.packs, segments: written.segments, changed: seen.changed.finish() };
    stop.check()?;
    if !repository.store.create(&name, envelope(&index))? {
        return Err(Error::refused(format!("{name} is there already")));
    }
    // Of no use any more; what stays here a prune removes.
    for (name, partial) in repository.partials()? {
        if partial.is_ok_and(|partial| partial.about.volume == index.about.volume) {
            repository.store.remove(&[name])?;
        }
    }
    Ok(index)
}

/// Leaves what `--resume` goes on with. The backup has failed anyway, so that this fails too is said and no more.
fn leave(repository: &Repository, partial: Partial) {
    let name = format!("partial/{}", partial.about.id);
    match repository.store.replace(&name, envelope(&partial)) {
        Ok(()) => eprintln!(
            "cbt-backup: {} segments of 128 MiB are stored; the same command with --resume goes on after them",
            partial.done.len()
        ),
        Err(error) => tracing::warn!("it cannot be gone on with: {}", base::report(&error)),
    }
}

/// What the stream of ranges said.
struct Seen {
    listed: u64,
    touched: HashSet<u32>,
    changed: Cells,
}

/// What the threads of a backup share.
struct Run<'r> {
    device: &'r Device,
    request: &'r Request,
    stop: &'r Stop,
    writer: Writer<'r>,
    base: Option<&'r Index>,
    limit: Limit,
    progress: Progress,
    is_failed: AtomicBool,
    error: Mutex<Option<Error>>,
    read: AtomicU64,
    done: Mutex<Vec<u32>>,
}

/// A segment in work. Whoever drops the last hold on it stores its map.
struct Work<'r> {
    listed: Listed,
    base: Option<&'r SegmentRef>,
    extents: Mutex<Vec<Extent>>,
    /// A part of it was not read.
    is_cut: AtomicBool,
}

type Order<'r> = (Arc<Work<'r>>, Read);

impl<'r> Run<'r> {
    /// Reads all ranges with as many threads as are asked for.
    fn all(&self, repository: &Repository, ranges: Ranges, size: u64, seen: &mut Seen) -> Result<()> {
        let (orders, queue) = sync_channel::<Order<'_>>(2 * self.request.in_flight);
        let queue = Mutex::new(queue);
        let dispatched = std::thread::scope(|scope| {
            for number in 0..self.request.in_flight {
                let worker = std::thread::Builder::new().name(format!("read {number}"));
                let spawned = worker.spawn_scoped(scope, || self.work(&queue));
                if let Err(error) = spawned {
                    self.fail(Error::refused(format!("start a thread: {error}")));
                }
            }
            let dispatched = self.dispatch(repository, ranges, size, seen, &orders);
            if dispatched.is_err() {
                self.is_failed.store(true, Ordering::Relaxed);
            }
            drop(orders);
            dispatched
        });
        let failed = self.error.lock().unwrap_or_else(PoisonError::into_inner).take();
        // What ended the others first, and not that they were ended.
        match (failed, dispatched) {
            (Some(Error::Stopped), Err(error)) | (Some(error), _) => Err(error),
            (None, dispatched) => dispatched,
        }
    }

    fn fail(&self, error: Error) {
        self.error.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(error);
        self.is_failed.store(true, Ordering::Relaxed);
    }

    fn is_over(&self) -> bool {
        self.is_failed.load(Ordering::Relaxed) || self.stop.check().is_err()
    }

    fn dispatch(
        &self,
        repository: &Repository,
        ranges: Ranges,
        size: u64,
        seen: &mut Seen,
        orders: &SyncSender<Order<'r>>,
    ) -> Result<()> {
        let done: HashSet<u32> =
            self.done.lock().unwrap_or_else(PoisonError::into_inner).iter().copied().collect();
        let mut segments = Segments::new(size);
        let mut take = |range: ByteRange, segments: &mut Segments| -> Result<()> {
            seen.listed += range.len();
            seen.changed.add(range.start, range.end);
            for listed in segments.add(range) {
                seen.touched.insert(listed.number);
                self.segment(listed, size, &done, orders)?;
            }
            self.stop.check()?;
            Ok(())
        };
        match ranges {
            Ranges::File => {
                for range in self.device.data() {
                    let range = range?;
                    // In parts, so that a stop is seen between.
                    for start in (range.start..range.end).step_by(SEGMENT as usize) {
                        take(ByteRange { start, end: range.end.min(start + SEGMENT) }, &mut segments)?;
                    }
                }
            }
            Ranges::Stream(mut blocks) => {
                let runtime = repository.store.runtime();
                loop {
                    let next =
                        async { tokio::time::timeout(Duration::from_millis(200), blocks.next()).await };
                    match runtime.block_on(next) {
                        Err(_) => self.stop.check()?,
                        Ok(None) => break,
                        Ok(Some(ranges)) => {
                            for range in ranges? {
                                take(
                                    ByteRange { start: range.offset, end: range.offset + range.length },
                                    &mut segments,
                                )?;
                            }
                        }
                    }
                    if self.is_failed.load(Ordering::Relaxed) {
                        return Err(Error::Stopped);
                    }
                }
            }
        }
        if let Some(listed) = segments.finish() {
            seen.touched.insert(listed.number);
            self.segment(listed, size, &done, orders)?;
        }
        Ok(())
    }

    /// Hands the reads of a segment out.
    fn segment(
        &self,
        mut listed: Listed,
        size: u64,
        done: &HashSet<u32>,
        orders: &SyncSender<Order<'r>>,
    ) -> Result<()> {
        if done.contains(&listed.number) {
            return Ok(());
        }
        if self.base.is_some() {
            plan::widen(&mut listed, size);
        }
        let of = |base: &'r Index| {
            let place = base.segments.binary_search_by_key(&listed.number, |segment| segment.number);
            place.ok().map(|place| &base.segments[place])
        };
        let reads = plan::reads(&listed.blocks);
        let base = self.base.and_then(of);
        let work = Arc::new(Work { listed, base, extents: Mutex::default(), is_cut: AtomicBool::new(false) });
        for read in reads {
            if self.is_over() || orders.send((work.clone(), read)).is_err() {
                work.is_cut.store(true, Ordering::Relaxed);
                return Err(Error::Stopped);
            }
        }
        self.complete(work)
    }

    /// What a reading thread does.
    fn work(&self, queue: &Mutex<Receiver<Order<'r>>>) {
        let mut buffer = Buffer::new((plan::READ_BLOCKS as u64 * BLOCK) as usize);
        let mut compressor = match Compressor::new(self.request.level) {
            Ok(compressor) => compressor,
            Err(error) => return self.fail(error),
        };
        loop {
            let order = queue.lock().unwrap_or_else(PoisonError::into_inner).recv();
            let Ok((work, read)) = order else { return };
            let done = match self.is_over() {
                true => Err(Error::Stopped),
                false => self.read(&work, &read, &mut buffer, &mut compressor),
            };
            if let Err(error) = done {
                work.is_cut.store(true, Ordering::Relaxed);
                self.fail(error);
            }
            if let Err(error) = self.complete(work) {
                self.fail(error);
            }
        }
    }

    fn read(
        &self,
        work: &Work<'_>,
        read: &Read,
        buffer: &mut Buffer,
        compressor: &mut Compressor,
    ) -> Result<()> {
        let bytes = |blocks: u32| u64::from(blocks) * BLOCK;
        let length = bytes(read.blocks.end - read.blocks.start);
        self.limit.pass(length, self.stop)?;
        let offset = u64::from(work.listed.number) * SEGMENT + bytes(read.blocks.start);
        let content = buffer.part(length as usize);
        self.device.read(offset, content)?;
        self.read.fetch_add(length, Ordering::Relaxed);
        for cell in plan::cells(&read.listed) {
            let block = |block: u32| bytes(block - read.blocks.start) as usize;
            let is_zero = |number: &u32| is_zeros(&content[block(*number)..block(*number + 1)]);
            // Zeros at both ends are left out; those between come along, compressed.
            let Some(start) = cell.clone().find(|number| !is_zero(number)) else { continue };
            let end = cell.rev().find(|number| !is_zero(number)).map_or(start + 1, |last| last + 1);
            let chunk = compressor.chunk(&content[block(start)..block(end)]);
            let (pack, chunk) = self.writer.chunk(&chunk)?;
            let extent = Extent { start, blocks: end - start, pack, chunk, skip: 0 };
            work.extents.lock().unwrap_or_else(PoisonError::into_inner).push(extent);
        }
        self.progress.at(offset + length, length);
        Ok(())
    }

    /// Stores the map of a segment, if nobody works on it any more.
    fn complete(&self, work: Arc<Work<'_>>) -> Result<()> {
        let Some(work) = Arc::into_inner(work) else { return Ok(()) };
        if work.is_cut.into_inner() {
            return Ok(());
        }
        let mut extents = work.extents.into_inner().unwrap_or_else(PoisonError::into_inner);
        extents.sort_unstable_by_key(|extent| extent.start);
        let mut segment = match (self.base, work.base) {
            (Some(index), Some(base)) => self.writer.read(&index.packs, base)?,
            _ => repository::Segment::default(),
        };
        segment.replace(&work.listed.blocks, extents);
        self.writer.segment(work.listed.number, segment)?;
        self.done.lock().unwrap_or_else(PoisonError::into_inner).push(work.listed.number);
        Ok(())
    }
}
