//! The gRPC service DifferentialSnapshot: pages of changed blocks, made from the streams of a CSI driver. Nothing is kept
//! between two pages: each says where the next one begins, and that is where the driver's stream is begun again.
//!
//! `ZeroOut` needs the allocated ranges of the target, from a second stream. It is opened again further on instead of reading more
//! than a few thousand tuples that a page does not need.

use std::collections::HashMap;

use proto::differential::differential_snapshot_server::DifferentialSnapshot;
use proto::differential::{ChangedBlock, DifferentialSnapshotRequest, DifferentialSnapshotResponse};
use tonic::{Code, Request, Response, Status, async_trait};

use crate::driver::{Blocks, Driver, Tuple, Tuples};
use crate::page_token::PageToken;

/// The parameter that says what a base means which the driver no longer knows, and the value for "all data changed".
const DELETED_BASE: (&str, &str) = ("deletedBase", "all-changed");
/// Longest message that is asked of the driver, in tuples.
const MAX_RESULTS: u32 = 4096;
/// Allocated tuples that are skipped before a new stream is opened further on.
const FAR: usize = 4096;

pub struct Pages {
    pub driver: Driver,
    pub max_entries: u32,
}

#[derive(Debug, PartialEq, Eq)]
struct Question {
    base: Option<String>,
    target: String,
    /// The first byte that counts.
    from: u64,
    limit: u32,
    /// Whether all data counts as changed where the driver does not know the base.
    or_all: bool,
}

impl Question {
    fn of(request: DifferentialSnapshotRequest, max_entries: u32) -> Result<Self, Status> {
        let DifferentialSnapshotRequest {
            snapshot_base,
            snapshot_target: target,
            mode,
            start_offset,
            max_entries: wanted,
            parameters,
        } = request;
        if target.is_empty() {
            return Err(Status::invalid_argument("SnapshotTarget is missing"));
        }
        if !mode.is_empty() && !mode.eq_ignore_ascii_case("block") {
            return Err(Status::invalid_argument(format!("Mode must be block, got {mode:?}")));
        }
        let base = Some(snapshot_base).filter(|base| !base.is_empty());
        let from = match start_offset.as_str() {
            "" => 0,
            text => {
                let place = PageToken::parse(text).ok_or_else(|| {
                    Status::invalid_argument(format!(
                        "StartOffset must be a number of bytes or the NextOffset of a page, got {text:?}"
                    ))
                })?;
                place.number_in(base.as_deref(), &target).ok_or_else(|| {
                    Status::invalid_argument(
                        "StartOffset is the NextOffset of another base or target: begin without it",
                    )
                })?
            }
        };
        let limit = match u32::try_from(wanted) {
            Ok(0) | Err(_) => max_entries,
            Ok(wanted) => wanted.min(max_entries),
        };
        Ok(Question { or_all: or_all(parameters)?, base, target, from, limit })
    }
}

fn or_all(parameters: HashMap<String, String>) -> Result<bool, Status> {
    let (name, value) = DELETED_BASE;
    for (given, with) in &parameters {
        if given != name {
            return Err(Status::invalid_argument(format!(
                "the parameter {given:?} is not known: there is {name}"
            )));
        }
        if with != value {
            return Err(Status::invalid_argument(format!(
                "the parameter {name} must be {value:?}, got {with:?}"
            )));
        }
    }
    Ok(!parameters.is_empty())
}

#[async_trait]
impl DifferentialSnapshot for Pages {
    async fn get_differential_snapshot(
        &self,
        request: Request<DifferentialSnapshotRequest>,
    ) -> Result<Response<DifferentialSnapshotResponse>, Status> {
        let question = Question::of(request.into_inner(), self.max_entries)?;
        self.page(&question).await.map(Response::new)
    }
}

impl Pages {
    async fn page(&self, question: &Question) -> Result<DifferentialSnapshotResponse, Status> {
        let Question { base, target, from, limit, or_all } = question;
        let (base, from) = (base.as_deref(), *from);
        let messages = limit.saturating_add(1).min(MAX_RESULTS);
        // A driver may answer NOT_FOUND at once or in its stream.
        let first = async {
            let mut tuples = self.driver.tuples(Blocks::of(base, target), from, messages).await?;
            let first = next_behind(&mut tuples, from).await?;
            Ok::<_, Status>((tuples, first))
        };
        match first.await {
            Err(status) if status.code() == Code::NotFound && *or_all && base.is_some() => {
                self.all(question).await
            }
            Err(status) => Err(status),
            Ok((tuples, first)) => self.listed(question, tuples, first).await,
        }
    }

    async fn listed(
        &self,
        question: &Question,
        mut tuples: Tuples,
        first: Option<Tuple>,
    ) -> Result<DifferentialSnapshotResponse, Status> {
        let base = question.base.as_deref();
        let mut allocated =
            Allocated { driver: &self.driver, target: &question.target, tuples: None, ahead: None };
        let mut page = Page::of(question);
        let mut next = first;
        while let Some(tuple) = next {
            // What the target holds is asked only where it is not the question itself.
            let is_zero = base.is_some() && !page.is_full() && !allocated.touch(tuple).await?;
            if !page.push(tuple, is_zero) {
                break;
            }
            next = tuples.next().await?;
        }
        Ok(page.end(tuples.capacity()))
    }

    /// The page where nothing is known of the base: the whole volume has changed. What the target does not hold reads as
    /// zeros, and the base may have had data there.
    async fn all(&self, question: &Question) -> Result<DifferentialSnapshotResponse, Status> {
        let messages = question.limit.saturating_add(1).min(MAX_RESULTS);
        let blocks = Blocks::of(None, &question.target);
        let mut tuples = self.driver.tuples(blocks, question.from, messages).await?;
        let mut page = Page::of(question);
        let mut cursor = question.from;
        while let Some(tuple) = next_behind(&mut tuples, cursor).await? {
            let is_room =
                tuple.offset <= cursor || page.push(Tuple { offset: cursor, end: tuple.offset }, true);
            let tuple = Tuple { offset: tuple.offset.max(cursor), end: tuple.end };
            if !is_room || !page.push(tuple, false) {
                return Ok(page.end(tuples.capacity()));
            }
            cursor = tuple.end;
        }
        let capacity = tuples.capacity().ok_or_else(|| {
            Status::internal("the CSI driver does not report the size of the volume, so its end is not known")
        })?;
        if cursor < capacity {
            page.push(Tuple { offset: cursor, end: capacity }, true);
        }
        Ok(page.end(Some(capacity)))
    }
}

/// The next tuple that does not end before `from`: a driver may round down where it begins.
async fn next_behind(tuples: &mut Tuples, from: u64) -> Result<Option<Tuple>, Status> {
    loop {
        match tuples.next().await? {
            Some(tuple) if tuple.end <= from => {}
            next => return Ok(next),
        }
    }
}

struct Page<'q> {
    question: &'q Question,
    blocks: Vec<ChangedBlock>,
    has_more: bool,
}

impl<'q> Page<'q> {
    fn of(question: &'q Question) -> Self {
        Page { question, blocks: Vec::new(), has_more: false }
    }

    fn is_full(&self) -> bool {
        self.blocks.len() >= self.question.limit as usize
    }

    /// Whether the block has found a place. One that has not belongs to the next page.
    fn push(&mut self, Tuple { offset, end }: Tuple, zero_out: bool) -> bool {
        if self.is_full() {
            self.has_more = true;
            return false;
        }
        self.blocks.push(ChangedBlock { offset, size: end - offset, context: Vec::new(), zero_out });
        true
    }

    fn end(self, capacity: Option<u64>) -> DifferentialSnapshotResponse {
        let end = self.blocks.last().map_or(self.question.from, |block| block.offset + block.size);
        let next_offset = match self.has_more {
            true => PageToken::next(end, self.question.base.as_deref(), &self.question.target),
            false => String::new(),
        };
        DifferentialSnapshotResponse {
            change_block_list: self.blocks,
            next_offset,
            volume_size: capacity.unwrap_or(0),
            // Nothing is kept that could end: the pages are there as long as the snapshots are.
            timeout: 0,
        }
    }
}

/// What the target holds, read only as far as it is asked for, from low to high.
struct Allocated<'a> {
    driver: &'a Driver,
    target: &'a str,
    tuples: Option<Tuples>,
    /// The tuple that was read last.
    ahead: Option<Tuple>,
}

impl Allocated<'_> {
    /// Whether any byte of the range is in it. Ranges are asked for in order.
    async fn touch(&mut self, range: Tuple) -> Result<bool, Status> {
        let mut in_vain = 0;
        loop {
            if let Some(ahead) = self.ahead
                && ahead.end > range.offset
            {
                return Ok(ahead.offset < range.end);
            }
            let tuples = match &mut self.tuples {
                Some(tuples) if in_vain < FAR => tuples,
                tuples => {
                    let blocks = Blocks::of(None, self.target);
                    in_vain = 0;
                    tuples.insert(self.driver.tuples(blocks, range.offset, MAX_RESULTS).await?)
                }
            };
            match tuples.next().await? {
                None => {
                    // Behind the end nothing is held, whatever is asked later.
                    self.ahead = Some(Tuple { offset: u64::MAX, end: u64::MAX });
                    return Ok(false);
                }
                next => self.ahead = next,
            }
            in_vain += 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn request() -> DifferentialSnapshotRequest {
        DifferentialSnapshotRequest {
            snapshot_base: "b".into(),
            snapshot_target: "t".into(),
            ..Default::default()
        }
    }

    #[test]
    fn requests_are_checked() {
        let ask = |change: &dyn Fn(&mut DifferentialSnapshotRequest)| {
            let mut request = request();
            change(&mut request);
            Question::of(request, 100).map_err(|status| (status.code(), status.message().to_owned()))
        };
        let whole =
            Question { base: Some("b".into()), target: "t".into(), from: 0, limit: 100, or_all: false };
        assert_eq!(ask(&|_| {}), Ok(whole));
        assert_eq!(ask(&|r| r.snapshot_base.clear()).map(|q| q.base), Ok(None));
        for (wanted, limit) in [(0, 100), (1, 1), (100, 100), (101, 100), (u64::MAX, 100)] {
            assert_eq!(ask(&|r| r.max_entries = wanted).map(|q| q.limit), Ok(limit), "{wanted}");
        }
        for mode in ["", "block", "Block"] {
            assert!(ask(&|r| r.mode = mode.into()).is_ok(), "{mode}");
        }
        let parameter = |r: &mut DifferentialSnapshotRequest, name: &str, value: &str| {
            r.parameters.insert(name.into(), value.into());
        };
        assert_eq!(ask(&|r| parameter(r, "deletedBase", "all-changed")).map(|q| q.or_all), Ok(true));
        type Change = fn(&mut DifferentialSnapshotRequest);
        let table: [(Change, &str); 7] = [
            (|r| r.snapshot_target.clear(), "SnapshotTarget"),
            (|r| r.mode = "file".into(), "\"file\""),
            (|r| r.parameters = HashMap::from([("speed".into(), "high".into())]), "\"speed\""),
            (|r| r.parameters = HashMap::from([("deletedBase".into(), "none".into())]), "\"none\""),
            (|r| r.start_offset = "-1".into(), "\"-1\""),
            (|r| r.start_offset = "+1".into(), "\"+1\""),
            (|r| r.start_offset = "4096-xyz".into(), "\"4096-xyz\""),
        ];
        for (change, named) in table {
            let (code, message) = ask(&change).expect_err(named);
            assert_eq!(code, Code::InvalidArgument, "{named}");
            assert!(message.contains(named), "{message}");
        }
    }
}
