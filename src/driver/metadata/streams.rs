//! The memory of metadata streams. All of them together use at most [`MEMORY`], whatever their number, the content of
//! their maps and the speed of their clients.
//!
//! A working stream holds the bitmaps of a segment. [`MetadataStream::work_bytes`](crate::driver::metadata::read::MetadataStream::work_bytes)
//! is their size, and its caller lets as many streams work at once as fit into [`WORKING`]. Between two turns, while the
//! client reads, the segment is kept here until newer ones need the memory; then the stream reads it again. The length
//! of a message depends on the memory that other messages leave.

use std::collections::BTreeMap;
use std::sync::{Arc, PoisonError};

use crate::sync::{Mutex, MutexGuard};
use base::Foreground;
use cbt::Loaded;

/// The most bytes that all streams take together.
pub const MEMORY: usize = 64 << 20;
/// Of these, the part that working streams share.
pub const WORKING: usize = MEMORY / 4;
/// The part that segments between two turns share.
const PARKED: usize = MEMORY / 8;
/// The part that messages share, from the first tuple until the last byte is sent. Messages of up to [`SHORT`] tuples may
/// exceed it.
pub(in crate::driver) const MESSAGES: usize = MEMORY / 8;
/// Tuples that every message may hold. The rest of the memory is for a thousand streams of such messages.
pub(in crate::driver) const SHORT: usize = 64;
/// Memory that a tuple takes while its message is made.
pub(in crate::driver) const TUPLE: usize = 40;

/// The memory that the streams of a driver hold.
#[derive(Debug)]
pub struct Streams {
    held: Mutex<Held>,
    foreground: Arc<Foreground>,
}

#[derive(Debug, Default)]
struct Held {
    /// In the order in which they were parked.
    segments: BTreeMap<u64, Loaded>,
    /// The number of the last one.
    last: u64,
    /// Bytes of all segments.
    parked: usize,
    /// Bytes of all messages.
    messages: usize,
}

impl Streams {
    /// Hashing pauses while `foreground` is busy.
    pub(in crate::driver) fn new(foreground: Arc<Foreground>) -> Self {
        Streams { held: Mutex::default(), foreground }
    }

    /// Tells hashing when streams are busy.
    pub(in crate::driver) fn foreground(&self) -> &Foreground {
        &self.foreground
    }

    /// Keeps a segment for the stream's next turn, as long as there is memory.
    pub(in crate::driver) fn park(self: &Arc<Self>, segment: Loaded) -> Parked {
        let mut held = self.held();
        held.last += 1;
        let number = held.last;
        held.parked += segment.bytes();
        held.segments.insert(number, segment);
        while held.parked > PARKED
            && let Some((_, oldest)) = held.segments.pop_first()
        {
            held.parked -= oldest.bytes();
        }
        Parked { streams: self.clone(), number }
    }

    /// The memory for a message of up to `most` tuples, and how many it may hold. A slow client's message is held for long, so
    /// each gets only a part of what is left.
    pub(in crate::driver) fn share(self: &Arc<Self>, most: usize) -> (Share, usize) {
        let mut held = self.held();
        let left = MESSAGES.saturating_sub(held.messages);
        let most = most.min(SHORT + left / 8 / TUPLE);
        let bytes = most * TUPLE;
        held.messages += bytes;
        (Share { streams: self.clone(), bytes }, most)
    }

    /// Bytes of all messages, which the bound is for.
    #[cfg(all(test, feature = "interleavings"))]
    pub(in crate::driver) fn messages(&self) -> usize {
        self.held().messages
    }

    /// Counts `bytes` of a message until the share is dropped.
    pub fn hold(self: &Arc<Self>, bytes: usize) -> Share {
        self.held().messages += bytes;
        Share { streams: self.clone(), bytes }
    }

    fn held(&self) -> MutexGuard<'_, Held> {
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A stream's segment between two turns.
pub(in crate::driver) struct Parked {
    streams: Arc<Streams>,
    number: u64,
}

impl Parked {
    /// The segment, if it is still kept.
    pub(in crate::driver) fn take(&self) -> Option<Loaded> {
        let mut held = self.streams.held();
        let segment = held.segments.remove(&self.number)?;
        held.parked -= segment.bytes();
        Some(segment)
    }
}

impl Drop for Parked {
    fn drop(&mut self) {
        drop(self.take());
    }
}

/// The memory that a message takes, until dropped.
#[derive(Debug)]
pub struct Share {
    streams: Arc<Streams>,
    bytes: usize,
}

impl Share {
    /// Frees the part that the message does not need.
    pub(in crate::driver) fn shrink(&mut self, tuples: usize) {
        let spare = self.bytes.saturating_sub(tuples * TUPLE);
        self.bytes -= spare;
        self.streams.held().messages -= spare;
    }
}

impl Drop for Share {
    fn drop(&mut self) {
        self.streams.held().messages -= self.bytes;
    }
}
