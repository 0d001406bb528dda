//! The memory of metadata streams: all of them together use at most [`MEMORY`], whatever their number and whatever their
//! maps hold, and however slow their clients are.
//!
//! A stream at work holds the bitmaps of a segment; [`MetadataStream::work_bytes`](super::MetadataStream::work_bytes)
//! says how much, and its caller lets as many work at once as fit into [`WORKING`]. Between two turns, while the
//! client reads, its segment is kept here, until newer ones take the place: then it is read again. A message gets its
//! length from what other messages leave.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use base::Foreground;
use cbt::Loaded;

/// Bytes that all streams take together.
pub const MEMORY: usize = 64 << 20;
/// Of these, what streams at work share.
pub const WORKING: usize = MEMORY / 4;
/// What segments between two turns share.
const PARKED: usize = MEMORY / 8;
/// What messages share, from the first tuple until the last byte has left. Those of [`SHORT`] tuples go beyond it.
const MESSAGES: usize = MEMORY / 8;
/// Tuples that every message may hold. The rest of the memory is for a thousand streams of such messages.
const SHORT: usize = 64;
/// Memory that a tuple takes while its message is made.
const TUPLE: usize = 40;

/// What the streams of a driver hold.
#[derive(Debug)]
pub struct Streams {
    held: Mutex<Held>,
    foreground: Foreground,
}

#[derive(Debug, Default)]
struct Held {
    /// By the time they were parked.
    segments: BTreeMap<u64, Loaded>,
    /// The number of the last one.
    last: u64,
    /// Bytes of all segments.
    parked: usize,
    /// Bytes of all messages.
    messages: usize,
}

impl Streams {
    /// `foreground` is what hashing gives way to.
    pub(super) fn new(foreground: Foreground) -> Self {
        Streams { held: Mutex::default(), foreground }
    }

    /// What streams do while their clients wait.
    pub(super) fn foreground(&self) -> &Foreground {
        &self.foreground
    }

    /// Keeps a segment for the stream's next turn, as long as there is room.
    pub(super) fn park(self: &Arc<Self>, segment: Loaded) -> Place {
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
        Place { streams: self.clone(), number }
    }

    /// Share for a message of up to `most` tuples, and how many it may hold. A stream whose client is slow holds its
    /// message for long, so none gets more than a share of what is left.
    pub(super) fn share(self: &Arc<Self>, most: usize) -> (Share, usize) {
        let mut held = self.held();
        let left = MESSAGES.saturating_sub(held.messages);
        let most = most.min(SHORT + left / 8 / TUPLE);
        let bytes = most * TUPLE;
        held.messages += bytes;
        (Share { streams: self.clone(), bytes }, most)
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

/// Where a stream's segment is between two turns.
pub(super) struct Place {
    streams: Arc<Streams>,
    number: u64,
}

impl Place {
    /// The segment, where it is still there.
    pub(super) fn take(&self) -> Option<Loaded> {
        let mut held = self.streams.held();
        let segment = held.segments.remove(&self.number)?;
        held.parked -= segment.bytes();
        Some(segment)
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        drop(self.take());
    }
}

/// Memory that a message takes.
#[derive(Debug)]
pub struct Share {
    streams: Arc<Streams>,
    bytes: usize,
}

impl Share {
    /// Gives back what the message does not need.
    pub(super) fn shrink(&mut self, tuples: usize) {
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
