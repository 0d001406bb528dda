//! The gRPC service ListSnapshotDeltas: pages of changed blocks, made from the streams of a CSI driver, each block with a token
//! for its data where that is served. Nothing is kept between two pages.
//!
//! Blocks have one size in a whole list, and are counted from the volume's beginning: the resource has block indexes, which
//! mean nothing otherwise. It is the driver's own where its tuples have one size. Where they have not, tuples are cut at
//! multiples of a configured size.
//!
//! Only the first tuple of the list shows the driver's block size. So a page that begins later opens the stream twice.

use std::collections::HashMap;

use proto::deltas::snapshot_deltas_server::SnapshotDeltas;
use proto::deltas::{BlockSnapshotChangedBlock, ListSnapshotDeltasRequest, ListSnapshotDeltasResponse};
use tonic::{Request, Response, Status, async_trait};

use super::token::Tokens;
use crate::driver::{Blocks, Driver, Tuple, Tuples};
use crate::page_token::PageToken;

/// Blocks in a page at most, also where the client sets no restriction: a message has to fit.
pub const MAX_ENTRIES: u32 = 4096;

pub struct Lists {
    pub driver: Driver,
    /// Bytes in a block where the driver's tuples are of any size.
    pub block_size: u64,
    /// Makes the tokens; none where no data is served.
    pub tokens: Option<Tokens>,
}

struct Question {
    base: Option<String>,
    target: String,
    secrets: HashMap<String, String>,
    /// The first block that counts.
    from: u64,
    limit: usize,
}

impl Question {
    fn of(request: ListSnapshotDeltasRequest) -> Result<Self, Status> {
        let ListSnapshotDeltasRequest {
            from_snapshot_id,
            to_snapshot_id: target,
            secrets,
            max_entries,
            starting_token,
        } = request;
        if target.is_empty() {
            return Err(Status::invalid_argument("to_snapshot_id is missing"));
        }
        let base = Some(from_snapshot_id).filter(|base| !base.is_empty());
        let limit = match u32::try_from(max_entries) {
            Err(_) => {
                return Err(Status::invalid_argument(format!(
                    "max_entries must not be negative, got {max_entries}"
                )));
            }
            Ok(0) => MAX_ENTRIES,
            Ok(wanted) => wanted.min(MAX_ENTRIES),
        };
        let from = match starting_token.as_str() {
            "" => 0,
            text => {
                // The CSI spec's code for such a token in its lists.
                let place = PageToken::parse(text).ok_or_else(|| {
                    Status::aborted(format!(
                        "starting_token must be the next_token of a page or the index of a block, got {text:?}"
                    ))
                })?;
                place.number_in(base.as_deref(), &target).ok_or_else(|| {
                    Status::aborted("starting_token belongs to other snapshots: start without it")
                })?
            }
        };
        Ok(Question { base, target, secrets, from, limit: limit as usize })
    }

    fn blocks(&self) -> Blocks<'_> {
        let secrets = Some(&self.secrets);
        Blocks { base: self.base.as_deref(), target: &self.target, secrets }
    }
}

#[async_trait]
impl SnapshotDeltas for Lists {
    async fn list_snapshot_deltas(
        &self,
        request: Request<ListSnapshotDeltasRequest>,
    ) -> Result<Response<ListSnapshotDeltasResponse>, Status> {
        let question = Question::of(request.into_inner())?;
        self.page(&question).await.map(Response::new)
    }
}

impl Lists {
    async fn page(&self, question: &Question) -> Result<ListSnapshotDeltasResponse, Status> {
        // One more than the page takes shows whether there is another page.
        let messages = question.limit as u32 + 1;
        let probe = if question.from == 0 { messages } else { 1 };
        let mut tuples = self.driver.tuples(question.blocks(), 0, probe).await?;
        let first = tuples.next().await?;
        let mut page = Page { question, unit: self.unit(&tuples, first), indexes: Vec::new(), next: None };
        let mut next = first;
        if question.from > 0 && first.is_some() {
            let begin = question.from.checked_mul(page.unit).ok_or_else(|| {
                Status::out_of_range(format!("no volume has a block with the index {}", question.from))
            })?;
            tuples = self.driver.tuples(question.blocks(), begin, messages).await?;
            next = tuples.next().await?;
        }
        while let Some(tuple) = next {
            if !page.push(tuple) {
                break;
            }
            next = tuples.next().await?;
        }
        let token = |index: u64| {
            let tokens = self.tokens.as_ref()?;
            Some(tokens.seal(&question.target, index.saturating_mul(page.unit), page.unit))
        };
        let changed_blocks = page.indexes.iter().map(|index| BlockSnapshotChangedBlock {
            offset: index.saturating_mul(page.unit),
            block_size_bytes: page.unit,
            token: token(*index),
        });
        Ok(ListSnapshotDeltasResponse {
            volume_size_bytes: tuples.capacity().unwrap_or(0),
            next_token: page.next.map_or_else(String::new, |index| {
                PageToken::next(index, question.base.as_deref(), &question.target)
            }),
            changed_blocks: changed_blocks.collect(),
        })
    }

    /// Bytes in a block of the list whose first tuple is this one.
    fn unit(&self, tuples: &Tuples, first: Option<Tuple>) -> u64 {
        match first {
            Some(Tuple { offset, end }) if tuples.has_one_size() => end - offset,
            _ => self.block_size,
        }
    }
}

struct Page<'q> {
    question: &'q Question,
    unit: u64,
    indexes: Vec<u64>,
    next: Option<u64>,
}

impl Page<'_> {
    /// Takes the blocks that the tuple touches and that are not in the page yet. Whether there is a place for more.
    fn push(&mut self, tuple: Tuple) -> bool {
        let from = self.indexes.last().map_or(self.question.from, |last| last + 1);
        for index in from.max(tuple.offset / self.unit)..tuple.end.div_ceil(self.unit) {
            if self.indexes.len() == self.question.limit {
                self.next = Some(index);
                return false;
            }
            self.indexes.push(index);
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn request() -> ListSnapshotDeltasRequest {
        ListSnapshotDeltasRequest { to_snapshot_id: "t".into(), ..Default::default() }
    }

    #[test]
    fn requests_are_read() {
        let ask = |change: fn(&mut ListSnapshotDeltasRequest)| {
            let mut request = request();
            change(&mut request);
            Question::of(request).map(|question| (question.from, question.limit))
        };
        assert_eq!(ask(|_| {}).ok(), Some((0, 4096)));
        assert_eq!(ask(|r| r.max_entries = i32::MAX).ok(), Some((0, 4096)));
        assert_eq!(ask(|r| r.max_entries = 7).ok(), Some((0, 7)));
        assert_eq!(ask(|r| r.starting_token = "12".into()).ok(), Some((12, 4096)));
        assert_eq!(ask(|r| r.starting_token = PageToken::next(12, None, "t")).ok(), Some((12, 4096)));
    }

    #[test]
    fn tuples_become_blocks_each_once() {
        let cut = |tuples: &[(u64, u64)], from: u64, limit: i32| {
            let request = ListSnapshotDeltasRequest {
                max_entries: limit,
                starting_token: from.to_string(),
                ..request()
            };
            let question = Question::of(request).expect("a question");
            let mut page = Page { question: &question, unit: 10, indexes: Vec::new(), next: None };
            for (offset, size) in tuples {
                if !page.push(Tuple { offset: *offset, end: offset + size }) {
                    break;
                }
            }
            (page.indexes, page.next)
        };
        assert_eq!(cut(&[(0, 10), (30, 20)], 0, 9), (vec![0, 3, 4], None));
        assert_eq!(cut(&[(0, 10), (30, 20)], 0, 3), (vec![0, 3, 4], None));
        assert_eq!(cut(&[(0, 10), (30, 20)], 0, 2), (vec![0, 3], Some(4)));
        assert_eq!(cut(&[(0, 10), (30, 20)], 0, 1), (vec![0], Some(3)));
        // What is not cut at multiples is widened, and a block of two tuples is listed once.
        assert_eq!(cut(&[(5, 1), (7, 1), (19, 2)], 0, 9), (vec![0, 1, 2], None));
        // A driver may round down where it begins.
        assert_eq!(cut(&[(0, 100)], 8, 9), (vec![8, 9], None));
        assert_eq!(cut(&[], 0, 9), (vec![], None));
    }
}
