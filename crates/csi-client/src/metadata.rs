//! Reading the streams of the SnapshotMetadata service.

use tonic::{Status, Streaming};

use super::{Client, Error, Result, delta_of};
use proto::{BlockMetadata, BlockMetadataType};

/// A range of bytes as a stream lists it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tuple {
    /// First byte.
    pub offset: u64,
    /// Length in bytes.
    pub size: u64,
}

/// A whole stream.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BlockList {
    /// How the tuples are listed.
    pub style: BlockMetadataType,
    /// `volume_capacity_bytes`.
    pub capacity: u64,
    /// The tuples, message by message.
    pub messages: Vec<Vec<Tuple>>,
}

impl BlockList {
    /// All tuples.
    pub fn tuples(&self) -> impl Iterator<Item = Tuple> + '_ {
        self.messages.iter().flatten().copied()
    }

    /// Bytes in all tuples.
    pub fn bytes(&self) -> u64 {
        self.tuples().map(|tuple| tuple.size).sum()
    }
}

/// The fields that the messages of both streams share.
pub(super) trait Message {
    fn parts(self) -> (i32, i64, Vec<BlockMetadata>);
}

impl Message for proto::GetMetadataAllocatedResponse {
    fn parts(self) -> (i32, i64, Vec<BlockMetadata>) {
        (self.block_metadata_type, self.volume_capacity_bytes, self.block_metadata)
    }
}

impl Message for proto::GetMetadataDeltaResponse {
    fn parts(self) -> (i32, i64, Vec<BlockMetadata>) {
        (self.block_metadata_type, self.volume_capacity_bytes, self.block_metadata)
    }
}

impl Client {
    /// GetMetadataAllocated, the whole stream.
    pub async fn allocated(&mut self, snapshot_id: &str, offset: i64, max_results: i32) -> Result<BlockList> {
        const CALL: &str = "GetMetadataAllocated";
        let request = proto::GetMetadataAllocatedRequest {
            snapshot_id: snapshot_id.to_owned(),
            starting_offset: offset,
            max_results,
            ..Default::default()
        };
        let stream = self.metadata.get_metadata_allocated(request).await.map_err(Error::of(CALL))?;
        collect(stream.into_inner()).await.map_err(Error::of(CALL))
    }

    /// GetMetadataDelta, the whole stream.
    pub async fn delta(
        &mut self,
        base_snapshot_id: &str,
        target_snapshot_id: &str,
        offset: i64,
        max_results: i32,
    ) -> Result<BlockList> {
        const CALL: &str = "GetMetadataDelta";
        let whole = delta_of(base_snapshot_id, target_snapshot_id);
        let request = proto::GetMetadataDeltaRequest { starting_offset: offset, max_results, ..whole };
        let stream = self.metadata.get_metadata_delta(request).await.map_err(Error::of(CALL))?;
        collect(stream.into_inner()).await.map_err(Error::of(CALL))
    }
}

/// Reads a stream to its end and checks what the spec says of every one: ascending, disjoint tuples
/// of positive size inside the capacity; type and capacity the same in all messages.
async fn collect<M: Message>(mut stream: Streaming<M>) -> Result<BlockList, Status> {
    let mut list: Option<BlockList> = None;
    let mut end = 0;
    while let Some(message) = stream.message().await? {
        let (style, capacity, tuples) = message.parts();
        let style = BlockMetadataType::try_from(style).map_err(|_| broken("an unknown type"))?;
        let capacity = u64::try_from(capacity).map_err(|_| broken("a negative capacity"))?;
        let list = list.get_or_insert_with(|| BlockList { style, capacity, messages: Vec::new() });
        if (list.style, list.capacity) != (style, capacity) {
            return Err(broken("type or capacity change midway"));
        }
        let mut decoded = Vec::with_capacity(tuples.len());
        for tuple in tuples {
            let (Ok(offset), Ok(size)) = (u64::try_from(tuple.byte_offset), u64::try_from(tuple.size_bytes))
            else {
                return Err(broken("a negative tuple"));
            };
            if size == 0 || offset < end || offset.saturating_add(size) > capacity {
                return Err(broken("a tuple that is empty, out of order or past the capacity"));
            }
            end = offset + size;
            decoded.push(Tuple { offset, size });
        }
        list.messages.push(decoded);
    }
    list.ok_or_else(|| broken("no message"))
}

fn broken(what: &str) -> Status {
    Status::data_loss(format!("the stream breaks the spec: {what}"))
}
