//! Reading the streams of the SnapshotMetadata service.

use tonic::Status;

use super::{Client, Error, Message, Options, Question, Result};
use proto::BlockMetadataType;

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

impl Client {
    /// GetMetadataAllocated, the whole stream.
    pub async fn allocated(&mut self, snapshot_id: &str, offset: i64, max_results: i32) -> Result<BlockList> {
        let question = Question::Allocated { snapshot: snapshot_id.to_owned() };
        self.whole(&question, offset, max_results).await.map_err(Error::of("GetMetadataAllocated"))
    }

    /// GetMetadataDelta, the whole stream.
    pub async fn delta(
        &mut self,
        base_snapshot_id: &str,
        target_snapshot_id: &str,
        offset: i64,
        max_results: i32,
    ) -> Result<BlockList> {
        let (base, target) = (base_snapshot_id.to_owned(), target_snapshot_id.to_owned());
        let question = Question::Delta { base, target };
        self.whole(&question, offset, max_results).await.map_err(Error::of("GetMetadataDelta"))
    }

    /// Reads a stream to its end and checks what the spec says of every one: ascending, disjoint tuples
    /// of positive size inside the capacity; type and capacity the same in all messages.
    async fn whole(
        &mut self,
        question: &Question,
        offset: i64,
        max_results: i32,
    ) -> Result<BlockList, Status> {
        let options = Options { offset, max_results, ..Options::default() };
        let mut stream = self.open_stream(question, &options).await?;
        let mut list: Option<BlockList> = None;
        let mut end = 0;
        while let Some(Message { style, capacity, tuples }) = stream.next().await? {
            let style = BlockMetadataType::try_from(style).map_err(|_| broken("an unknown type"))?;
            let capacity = u64::try_from(capacity).map_err(|_| broken("a negative capacity"))?;
            let list = list.get_or_insert_with(|| BlockList { style, capacity, messages: Vec::new() });
            if (list.style, list.capacity) != (style, capacity) {
                return Err(broken("type or capacity change midway"));
            }
            let mut decoded = Vec::with_capacity(tuples.len());
            for (offset, size) in tuples {
                let (Ok(offset), Ok(size)) = (u64::try_from(offset), u64::try_from(size)) else {
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
}

fn broken(what: &str) -> Status {
    Status::data_loss(format!("the stream breaks the spec: {what}"))
}
