//! A source on another node, as a transfer reads it. `csi/puller.rs` connects to it.

use bytes::Bytes;
use roaring::RoaringBitmap;

use crate::driver::error::Error;
use base::{BlockSize, ByteRange, Stop, Stopped};
use cbt::SegmentIndex;

/// Why a request to the other node failed.
#[derive(Debug)]
pub enum RemoteFault {
    /// The node does not answer, or refuses temporarily: try again.
    Unavailable(String),
    /// The source no longer exists.
    Gone(String),
    /// The source cannot be read.
    Damaged(String),
    /// The node refuses, for a permanent reason.
    Refused(String),
    /// The transfer was stopped.
    Stopped,
}

/// A source that was opened on the other node.
#[derive(Clone, Debug)]
pub struct Opened {
    /// The source's size in bytes.
    pub capacity: u64,
    /// The block size of its maps.
    pub block_size: BlockSize,
    /// Whether its changed blocks are tracked.
    pub tracking: bool,
    /// Segments that hold data, ascending.
    pub segments: Vec<SegmentIndex>,
    /// The number of blocks that hold data.
    pub allocated_blocks: u64,
    /// Ids of objects with similar content: its volume, and that volume's snapshots.
    pub relatives: Vec<String>,
    /// The type of the filesystem in it, and the size in bytes that it can grow to; `None` if there is none, or if the node does not
    /// say.
    pub filesystem: Option<(String, u64)>,
}

/// Blocks as they come from another node.
#[derive(Debug)]
pub struct Blocks {
    /// Their bytes, without those of the holes.
    pub data: Bytes,
    /// A hash of each block, with zeros for holes.
    pub hashes: Bytes,
    /// What holds no data, in bytes of the blocks one behind the other; ascending.
    pub holes: Vec<ByteRange>,
}

/// A source on another node. Each call waits for its answer, or until `stop`.
pub trait Remote: Send {
    /// Opens the source for the new volume with this id. Must be called again after a fault.
    fn open(&mut self, volume_id: &str, stop: &Stop) -> Result<Opened, RemoteFault>;
    /// The blocks of a segment that hold data.
    fn map(&mut self, index: SegmentIndex, stop: &Stop) -> Result<RoaringBitmap, RemoteFault>;
    /// The hashes of blocks, in ascending order of the blocks.
    fn hashes(
        &mut self,
        index: SegmentIndex,
        blocks: &RoaringBitmap,
        stop: &Stop,
    ) -> Result<Vec<u8>, RemoteFault>;
    /// Requests the bytes of blocks, which [`Remote::next`] returns.
    fn read(&mut self, index: SegmentIndex, blocks: &RoaringBitmap, stop: &Stop) -> Result<(), RemoteFault>;
    /// The next blocks and their hashes, in the order of the request; `None` after the last.
    fn next(&mut self, stop: &Stop) -> Result<Option<Blocks>, RemoteFault>;
    /// Says that the source is no longer needed.
    fn close(&mut self);
    /// The node that has the source, for messages.
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
