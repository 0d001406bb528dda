//! A source on another node, as a transfer reads it. `csi/transfer.rs` has the way to one.

use bytes::Bytes;
use roaring::RoaringBitmap;

use super::Error;
use base::{BlockSize, Stop, Stopped};
use cbt::SegmentIndex;

/// Why a request to the other node failed.
#[derive(Debug)]
pub enum RemoteFault {
    /// The node does not answer, or refuses temporarily: try again.
    Unavailable(String),
    /// The source does not exist any more.
    Gone(String),
    /// The source cannot be read.
    Damaged(String),
    /// The node refuses, for a permanent reason.
    Refused(String),
    /// The transfer was stopped.
    Stopped,
}

/// What was opened on the other node.
#[derive(Clone, Debug)]
pub struct Opened {
    /// The source's size in bytes.
    pub capacity: u64,
    /// The unit of its maps.
    pub block_size: BlockSize,
    /// Whether deltas are kept of it.
    pub tracking: bool,
    /// Segments that hold data, ascending.
    pub segments: Vec<SegmentIndex>,
    /// Blocks that hold data.
    pub allocated_blocks: u64,
    /// Ids of what is much like it: its volume, and that volume's snapshots.
    pub relatives: Vec<String>,
}

/// The bytes of whole blocks, and a hash of each.
pub type Blocks = (Bytes, Bytes);

/// A source on another node. Each call waits until it is answered, or `stop` says so.
pub trait Remote: Send {
    /// Opens it for the new volume of this id. To be called again after a fault.
    fn open(&mut self, volume_id: &str, stop: &Stop) -> Result<Opened, RemoteFault>;
    /// The blocks of a segment that hold data.
    fn map(&mut self, index: SegmentIndex, stop: &Stop) -> Result<RoaringBitmap, RemoteFault>;
    /// The hashes of blocks, ascending.
    fn hashes(
        &mut self,
        index: SegmentIndex,
        blocks: &RoaringBitmap,
        stop: &Stop,
    ) -> Result<Vec<u8>, RemoteFault>;
    /// Asks for the bytes of blocks, which [`Remote::next`] hands out.
    fn read(&mut self, index: SegmentIndex, blocks: &RoaringBitmap, stop: &Stop) -> Result<(), RemoteFault>;
    /// Whole blocks, and their hashes, in the order in which they were asked for; `None` after the last ones.
    fn next(&mut self, stop: &Stop) -> Result<Option<Blocks>, RemoteFault>;
    /// It is not needed any more.
    fn close(&mut self);
    /// Which node it is on, for messages.
    fn node(&self) -> &str;
}

impl From<RemoteFault> for Error {
    fn from(fault: RemoteFault) -> Self {
        match fault {
            RemoteFault::Unavailable(why) => Error::Unavailable(why),
            RemoteFault::Gone(id) => Error::NotFound { kind: "the source", id },
            RemoteFault::Damaged(what) => Error::Damaged(what),
            RemoteFault::Refused(why) => Error::Precondition(why),
            RemoteFault::Stopped => Error::Stopped(Stopped::Cancelled),
        }
    }
}
