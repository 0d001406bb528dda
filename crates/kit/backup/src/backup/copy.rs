//! Reads what is listed, compresses and stores it, and writes the index last. The threads of a backup are here.

use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, channel, sync_channel};
use std::time::Instant;

use parking_lot::Mutex;

use base::ByteRange;
use files::AlignedBuffer;

use super::partial::{self, Noting};
use super::state::State;
use super::{Job, Ranges, Request};
use crate::device::{Device, is_zeros};
use crate::error::{Error, Result, refused};
use crate::plan::{self, Listed, Read, Segments};
use crate::progress::{Limit, Progress};
use crate::repository::index::{Cells, check, envelope};
use crate::repository::pack::Compressor;
use crate::repository::writer::Writer;
use crate::repository::{self, About, BLOCK, Extent, Index, Partial, Repository, SEGMENT, SegmentRef};
use crate::sampled;
use crate::wait::unless;

/// Reads and stores, and writes the index. What is interrupted or fails can be gone on with.
pub fn store(repository: &Repository, request: &Request, device: &Device, job: Job) -> Result<Index> {
    let began = Instant::now();
    let Job { mut about, base, ranges, done } = job;
    // What is done is not taken from the base, whether it is listed again or not. What else was noted is of the base.
    let touched: HashSet<u32> = done.iter().flat_map(|done| &done.done).copied().collect();
    let (packs, segments) = done.as_ref().map_or((&[][..], &[][..]), |done| (&done.packs, &done.segments));
    let segments = segments.iter().filter(|of| touched.contains(&of.number));
    let source = partial::source(request, device);
    partial::reserve(repository, &about)?;
    let run = Run {
        device,
        request,
        writer: Writer::new(repository, packs, segments),
        base: base.as_ref(),
        limit: Limit::new(request.source.limit_rate.map(|rate| rate.0)),
        progress: Progress::new("backup", about.size),
        read: AtomicU64::new(0),
        state: State::new(repository.store.stop(), done.map(|done| done.done).unwrap_or_default()),
    };
    let mut seen = Seen { listed: 0, touched, changed: Cells::new(about.size) };
    let came = run.all(repository, ranges, &about, &mut seen).and_then(|()| device.check_unchanged());
    let Run { writer, read, state, .. } = run;
    let done = state.into_done();
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
            let (packs, segments) = (written.packs, written.segments);
            return Err(given_up(repository, Partial { about, packs, segments, done, source }, error));
        }
        (came, Err(error)) => {
            if done.is_empty() {
                partial::drop_reserved(repository, &about);
            }
            return Err(came.err().unwrap_or(error));
        }
    };
    about.data = written.segments.iter().map(|of| u64::from(of.blocks) * BLOCK).sum();
    about.milliseconds = began.elapsed().as_millis() as u64;
    about.added = written.added;
    let index =
        Index { about, packs: written.packs, segments: written.segments, changed: seen.changed.finish() };
    if let Err(error) = check_unlisted(repository, &index, device)
        .and_then(|()| Ok(repository.store.stop().check()?))
        .and_then(|()| commit(repository, &index))
    {
        let Index { about, packs, segments, .. } = index;
        return Err(given_up(repository, Partial { about, packs, segments, done, source }, error));
    }
    if let Err(error) = partial::drop_before(repository, &index.about) {
        tracing::warn!("what was interrupted before stays until a prune: {}", base::report(&error));
    }
    Ok(index)
}

/// What is left of a backup that failed: enough to go on with, unless what was read is wrong.
fn given_up(repository: &Repository, partial: Partial, error: Error) -> Error {
    match error.is_of_increment() || matches!(error, Error::Changed { .. } | Error::Unlisted { .. }) {
        true => partial::drop_own(repository, &partial.about),
        false if partial.done.is_empty() => partial::drop_reserved(repository, &partial.about),
        false => partial::leave(repository, &partial),
    }
    error
}

/// An incremental backup takes what the driver does not list from its base. Fails where a sample shows that the device holds
/// something else.
fn check_unlisted(repository: &Repository, index: &Index, device: &Device) -> Result<()> {
    let Some(base) = &index.about.base else { return Ok(()) };
    let all: Vec<u32> = index.segments.iter().map(|of| of.number).collect();
    // A small incremental backup takes 0.3 seconds, and none of these reads is cached: 32 segments would show.
    match sampled::differs(repository, index, None, &sampled::some(&all, 8), false, device)? {
        None => Ok(()),
        Some(offset) => Err(Error::Unlisted { path: device.path().to_owned(), base: base.clone(), offset }),
    }
}

/// Writes the index, and so makes the backup. The lock is looked at before, and after: where it was lost in between, while
/// the machine stood still, a prune may have removed what the index names, so the index is removed again.
fn commit(repository: &Repository, index: &Index) -> Result<()> {
    let name = format!("backups/{}", index.about.id);
    check(&index.about, &index.packs, &index.segments, &name)?;
    repository.hold()?;
    if !repository.store.create(&name, envelope(index))? {
        return Err(refused!("{name} is there already"));
    }
    repository.was_held().inspect_err(|_| {
        if let Err(error) = repository.store.remove(std::slice::from_ref(&name)) {
            tracing::error!(
                "{name} may refer to removed data and could not be deleted: {}",
                base::report(&error)
            );
        }
    })
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
    writer: Writer<'r>,
    base: Option<&'r Index>,
    limit: Limit,
    progress: Progress,
    read: AtomicU64,
    state: State<'r>,
}

/// A segment that is being backed up. Its map is stored with the last reference to it.
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
    fn all(&self, repository: &Repository, ranges: Ranges, about: &About, seen: &mut Seen) -> Result<()> {
        let (works, working) = channel::<()>();
        let (orders, queue) = sync_channel::<Order<'_>>(2 * usize::from(self.request.source.in_flight));
        let queue = Mutex::new(queue);
        let dispatched = std::thread::scope(|scope| {
            for number in 0..self.request.source.in_flight {
                let worker = std::thread::Builder::new().name(format!("read {number}"));
                let (works, queue) = (works.clone(), &queue);
                let spawned = worker.spawn_scoped(scope, move || {
                    self.work(queue);
                    drop(works);
                });
                if let Err(error) = spawned {
                    self.state.fail(refused!("start a thread: {error}"));
                }
            }
            drop(works);
            let (writer, state) = (&self.writer, &self.state);
            let source = partial::source(self.request, self.device);
            scope.spawn(move || Noting { source, writer, state, repository, about }.until_over(working));
            let dispatched = self.dispatch(repository, ranges, about.size, seen, &orders);
            if dispatched.is_err() {
                self.state.give_up();
            }
            drop(orders);
            dispatched
        });
        let failed = self.state.error();
        // What ended the others first, and not that they were ended.
        match (failed, dispatched) {
            (Some(Error::Stopped), Err(error)) | (Some(error), _) => Err(error),
            (None, dispatched) => dispatched,
        }
    }

    fn dispatch(
        &self,
        repository: &Repository,
        ranges: Ranges,
        size: u64,
        seen: &mut Seen,
        orders: &SyncSender<Order<'r>>,
    ) -> Result<()> {
        let done: HashSet<u32> = self.state.done().into_iter().collect();
        let mut segments = Segments::new(size);
        let mut take = |range: ByteRange, segments: &mut Segments| -> Result<()> {
            seen.listed += range.len();
            seen.changed.add(range.start, range.end);
            for listed in segments.add(range) {
                seen.touched.insert(listed.number);
                self.segment(listed, size, &done, orders)?;
            }
            self.state.stop.check()?;
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
                // A delta says what changed in the base. A volume that has grown since is all new behind its end.
                let grown = self.base.filter(|base| base.about.size < size);
                let known = grown.map_or(size, |base| base.about.size / BLOCK * BLOCK);
                let runtime = repository.store.runtime();
                // Whatever is begun for the next ranges, a new call or the pause before it, continues until they arrive.
                let mut next = async || {
                    Ok::<_, Error>(unless(|| self.state.is_over(), blocks.next()).await?.transpose()?)
                };
                while let Some(ranges) = runtime.block_on(next())? {
                    for range in ranges {
                        let range = ByteRange { start: range.offset, end: range.offset + range.length };
                        // What lies behind is read anyway.
                        let range = ByteRange { end: range.end.min(known), ..range };
                        if range.start < range.end {
                            take(range, &mut segments)?;
                        }
                    }
                }
                for start in (known..size).step_by(SEGMENT as usize) {
                    take(ByteRange { start, end: size.min(start + SEGMENT) }, &mut segments)?;
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
        let reads = plan::reads(&listed.blocks);
        let base = self.base.and_then(|base| base.segment(listed.number));
        let work = Arc::new(Work { listed, base, extents: Mutex::default(), is_cut: AtomicBool::new(false) });
        for read in reads {
            if self.state.is_over() || orders.send((work.clone(), read)).is_err() {
                work.is_cut.store(true, Ordering::Relaxed);
                return Err(Error::Stopped);
            }
        }
        self.complete(work)
    }

    /// What a reading thread does.
    fn work(&self, queue: &Mutex<Receiver<Order<'r>>>) {
        let mut buffer = AlignedBuffer::new((plan::READ_BLOCKS as u64 * BLOCK) as usize);
        let mut compressor = match Compressor::new(self.request.source.compression) {
            Ok(compressor) => compressor,
            Err(error) => return self.state.fail(error),
        };
        loop {
            let order = queue.lock().recv();
            let Ok((work, read)) = order else { return };
            let done = match self.state.is_over() {
                true => Err(Error::Stopped),
                false => self.read(&work, &read, &mut buffer, &mut compressor),
            };
            if let Err(error) = done {
                work.is_cut.store(true, Ordering::Relaxed);
                self.state.fail(error);
            }
            if let Err(error) = self.complete(work) {
                self.state.fail(error);
            }
        }
    }

    fn read(
        &self,
        work: &Work<'_>,
        read: &Read,
        buffer: &mut AlignedBuffer,
        compressor: &mut Compressor,
    ) -> Result<()> {
        let bytes = |blocks: u32| u64::from(blocks) * BLOCK;
        let length = bytes(read.blocks.end - read.blocks.start);
        self.limit.pass(length, self.state.stop)?;
        let offset = u64::from(work.listed.number) * SEGMENT + bytes(read.blocks.start);
        let content = buffer.part(length as usize);
        self.device.read(offset, content)?;
        self.read.fetch_add(length, Ordering::Relaxed);
        let (mut found, mut chunks) = (Vec::new(), Vec::new());
        for cell in plan::cells(&read.listed) {
            let block = |block: u32| bytes(block - read.blocks.start) as usize;
            let is_zero = |number: &u32| is_zeros(&content[block(*number)..block(*number + 1)]);
            // Zeros at both ends are left out; those between come along, compressed.
            let Some(start) = cell.clone().find(|number| !is_zero(number)) else { continue };
            let end = cell.rev().find(|number| !is_zero(number)).map_or(start + 1, |last| last + 1);
            found.push(start..end);
            chunks.push(compressor.chunk(&content[block(start)..block(end)]));
        }
        let places = self.writer.chunks(&chunks)?;
        let extents = found.into_iter().zip(places).map(|(blocks, (pack, chunk))| Extent {
            start: blocks.start,
            blocks: blocks.end - blocks.start,
            pack,
            chunk,
            skip: 0,
        });
        work.extents.lock().extend(extents);
        self.progress.at(offset + length, length);
        Ok(())
    }

    /// Stores the map of a segment, if no thread works on it any more.
    fn complete(&self, work: Arc<Work<'_>>) -> Result<()> {
        let Some(work) = Arc::into_inner(work) else { return Ok(()) };
        if work.is_cut.into_inner() {
            return Ok(());
        }
        let mut extents = work.extents.into_inner();
        extents.sort_unstable_by_key(|extent| extent.start);
        let mut segment = match (self.base, work.base) {
            (Some(index), Some(base)) => self.writer.read(&index.packs, base)?,
            _ => repository::Segment::default(),
        };
        segment.replace(&work.listed.blocks, extents);
        self.writer.segment(work.listed.number, segment)?;
        self.state.segment_is_done(work.listed.number);
        Ok(())
    }
}
