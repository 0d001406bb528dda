//! The CSI driver's streams of tuples, checked as they come.

use std::collections::HashMap;
use std::path::Path;

use csi_client::{Client, Message, Options, Question, RawStream, identity};
use proto::BlockMetadataType;
use proto::answers::Checked;
use tonic::Status;

/// Any CSI driver with a SnapshotMetadata service.
#[derive(Clone)]
pub struct Driver {
    pub channel: Checked,
}

#[derive(Clone, Copy)]
pub struct Blocks<'a> {
    /// Handle of the base; without it, all that the target holds.
    pub base: Option<&'a str>,
    pub target: &'a str,
    /// For the driver; none for most.
    pub secrets: Option<&'a HashMap<String, String>>,
}

impl<'a> Blocks<'a> {
    /// Without secrets.
    pub fn of(base: Option<&'a str>, target: &'a str) -> Self {
        Blocks { base, target, secrets: None }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tuple {
    pub offset: u64,
    /// First byte after it.
    pub end: u64,
}

impl Driver {
    pub fn at(path: &Path) -> Self {
        Driver { channel: identity::lazy_channel(path) }
    }

    /// The tuples from `from` on, in messages of `max_results` at most.
    pub async fn tuples(&self, blocks: Blocks<'_>, from: u64, max_results: u32) -> Result<Tuples, Status> {
        let offset = i64::try_from(from)
            .map_err(|_| Status::out_of_range(format!("offset {from} is larger than any volume")))?;
        let max_results = i32::try_from(max_results).unwrap_or(i32::MAX);
        let secrets = blocks.secrets.cloned().unwrap_or_default();
        let options = Options { offset, max_results, secrets, timeout_ms: None };
        let target = blocks.target.to_owned();
        let question = match blocks.base {
            None => Question::Allocated { snapshot: target },
            Some(base) => Question::Delta { base: base.to_owned(), target },
        };
        let stream = Client::over(self.channel.clone()).open_stream(&question, &options).await;
        let message = Vec::new().into_iter();
        Ok(Tuples { stream: stream.map_err(said)?, message, end: 0, capacity: None, style: None })
    }
}

/// A stream of tuples. Dropped before its end, it stops the driver's work.
pub struct Tuples {
    stream: RawStream,
    message: std::vec::IntoIter<(i64, i64)>,
    end: u64,
    capacity: Option<u64>,
    style: Option<i32>,
}

impl Tuples {
    /// The next one; `None` at the end. What the CSI spec rules out is an error here, for pages rely on it.
    pub async fn next(&mut self) -> Result<Option<Tuple>, Status> {
        loop {
            if let Some(tuple) = self.message.next() {
                return self.check(tuple).map(Some);
            }
            let message = self.stream.next().await.map_err(said)?;
            let Some(Message { style, capacity, tuples }) = message else { return Ok(None) };
            if *self.style.get_or_insert(style) != style {
                return Err(broken("the type of the metadata changes"));
            }
            let capacity =
                u64::try_from(capacity).map_err(|_| broken("the capacity of the volume is negative"))?;
            if *self.capacity.get_or_insert(capacity) != capacity {
                return Err(broken("the capacity of the volume changes"));
            }
            self.message = tuples.into_iter();
        }
    }

    /// Bytes in the volume, after the first call of [`Tuples::next`]. `None` where the driver has sent no message.
    pub fn capacity(&self) -> Option<u64> {
        self.capacity
    }

    /// Whether all tuples have one size, after the first call of [`Tuples::next`].
    pub fn has_one_size(&self) -> bool {
        self.style == Some(BlockMetadataType::FixedLength.into())
    }

    fn check(&mut self, (offset, size): (i64, i64)) -> Result<Tuple, Status> {
        let tuple = match (u64::try_from(offset), u64::try_from(size)) {
            (Ok(offset), Ok(size)) if size > 0 => Tuple { offset, end: offset.saturating_add(size) },
            _ => return Err(broken("a tuple has a negative offset or no size")),
        };
        if tuple.offset < self.end || self.capacity.is_some_and(|capacity| tuple.end > capacity) {
            return Err(broken("a tuple is out of order or past the capacity"));
        }
        self.end = tuple.end;
        Ok(tuple)
    }
}

/// The driver's status as it is; one of the connection to it as a status that says so.
fn said(status: Status) -> Status {
    match std::error::Error::source(&status) {
        None => status,
        Some(error) => {
            tracing::warn!(error, "the CSI driver is unreachable");
            Status::unavailable("the CSI driver does not answer on its socket: try again")
        }
    }
}

fn broken(what: &str) -> Status {
    tracing::warn!(what, "the CSI driver's stream breaks the CSI spec");
    Status::data_loss(format!("the CSI driver's stream breaks the CSI spec: {what}"))
}
