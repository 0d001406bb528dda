//! An answer as it comes, in as many parts as it takes.
//!
//! Each part has its own connection, so that a retry may reach another replica.

use std::fmt;

use futures_util::StreamExt;
use tokio::time::{Instant, timeout, timeout_at};
use tonic::Code;

use crate::answer::{Answer, Ended, Range, Style};
use crate::error::Error;
use crate::query::{Policy, Query};
use crate::source::Opener;
use crate::transport::Messages;

/// An answer of the server: ranges in ascending order that do not overlap.
///
/// It is whole when [`Blocks::next`] has returned `None`, and not before: after an error, what came is a part of the answer.
///
/// If the stream is cut, the rest is requested, from the byte after the last range. Servers may begin before that byte: what is
/// known already is cut off. Not all servers take an offset inside one of their blocks. So if that byte is the end of the volume,
/// or is not a multiple of 4096, the request begins with the last range, which has to be in the answer again. The same is done
/// if the rest comes without a message.
pub struct Blocks {
    opener: Opener,
    query: Query,
    policy: Policy,
    answer: Answer,
    style: Style,
    capacity: u64,
    part: Option<Messages>,
    /// Since when a message is waited for, also over several calls.
    waits: Option<Instant>,
    first: Option<Vec<Range>>,
    /// How often it failed in a row.
    failed: u32,
    /// The token was renewed since the last progress.
    is_renewed: bool,
    resumed: u32,
    is_over: bool,
}

impl fmt::Debug for Blocks {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Blocks")
            .field("query", &self.query)
            .field("answer", &self.answer)
            .finish_non_exhaustive()
    }
}

impl Blocks {
    /// Asks, and waits for the first message.
    pub(crate) async fn open(
        opener: Opener,
        query: Query,
        offset: u64,
        policy: Policy,
    ) -> Result<Self, Error> {
        let mut blocks = Blocks {
            opener,
            query,
            policy,
            answer: Answer::from(offset),
            // Set below, before anybody sees them.
            style: Style::VariableLength,
            capacity: 0,
            part: None,
            waits: None,
            first: None,
            failed: 0,
            is_renewed: false,
            resumed: 0,
            is_over: false,
        };
        blocks.first = blocks.advance().await?;
        if let Some((style, capacity)) = blocks.answer.shape() {
            (blocks.style, blocks.capacity) = (style, capacity);
        }
        Ok(blocks)
    }

    /// The size of the volume when the snapshot was taken, in bytes.
    pub fn capacity(&self) -> u64 {
        self.capacity
    }

    /// How the driver lists ranges.
    pub fn style(&self) -> Style {
        self.style
    }

    /// Every range before this byte has been returned by [`Blocks::next`] or is about to be. Keep it together with what is
    /// backed up, to continue from there with [`Client::query`](crate::Client::query).
    pub fn position(&self) -> u64 {
        self.first.as_deref().and_then(<[Range]>::first).map_or(self.answer.end(), |first| first.offset)
    }

    /// How often the stream was cut and asked for again.
    pub fn resumed(&self) -> u32 {
        self.resumed
    }

    /// The next ranges; `None` when the answer is whole. After an error there is nothing more.
    ///
    /// A call that is given up, as `tokio::select!` does, loses no ranges. Where it was opening the stream again, or pausing
    /// before that, the next call begins this again: so do not give calls up after a short time, over and over.
    pub async fn next(&mut self) -> Option<Result<Vec<Range>, Error>> {
        if let Some(first) = self.first.take()
            && !first.is_empty()
        {
            return Some(Ok(first));
        }
        while !self.is_over {
            match self.advance().await {
                Ok(Some(ranges)) if ranges.is_empty() => {}
                Ok(Some(ranges)) => return Some(Ok(ranges)),
                Ok(None) => self.is_over = true,
                Err(error) => {
                    self.is_over = true;
                    self.part = None;
                    return Some(Err(error));
                }
            }
        }
        None
    }

    /// All ranges that are left.
    pub async fn collect_all(mut self) -> Result<Vec<Range>, Error> {
        let mut all = Vec::new();
        while let Some(ranges) = self.next().await {
            all.append(&mut ranges?);
        }
        Ok(all)
    }

    /// The new ranges of the next message, which may be none; `None` when the answer is whole.
    async fn advance(&mut self) -> Result<Option<Vec<Range>>, Error> {
        let (call, idle) = (self.query.call(), self.policy.idle);
        let silent = |_| Error::Silent { call, idle };
        let invalid = |violation| Error::Invalid { call, violation };
        loop {
            let Some(part) = &mut self.part else {
                let offset = self.answer.begin_part();
                let opened = self.opener.open(&self.query, offset, &self.policy);
                match timeout(idle, opened).await.map_err(silent).flatten() {
                    Ok(part) => self.part = Some(part),
                    Err(error) => self.failed(error).await?,
                }
                continue;
            };
            let until = *self.waits.get_or_insert_with(Instant::now) + idle;
            let next = timeout_at(until, part.next()).await;
            self.waits = None;
            match next {
                Ok(Some(Ok(message))) => {
                    let before = self.answer.end();
                    let is_first = self.answer.shape().is_none();
                    let ranges = self.answer.accept(message).map_err(invalid)?;
                    if is_first || self.answer.end() > before {
                        (self.failed, self.is_renewed) = (0, false);
                    }
                    return Ok(Some(ranges));
                }
                Ok(Some(Err(status))) => self.failed(Error::of_status(call, status)).await?,
                Ok(None) => {
                    self.part = None;
                    match self.answer.finish_part().map_err(invalid)? {
                        Ended::Whole => return Ok(None),
                        Ended::AskAgain => {}
                    }
                }
                Err(elapsed) => self.failed(silent(elapsed)).await?,
            }
        }
    }

    /// Waits until it is time for another try, or gives up.
    async fn failed(&mut self, error: Error) -> Result<(), Error> {
        self.part = None;
        let is_refused = error.code() == Some(Code::Unauthenticated);
        let renews = is_refused && !self.is_renewed && self.opener.renew().await;
        self.is_renewed |= renews;
        if !renews && !error.is_passing() {
            return Err(error);
        }
        self.failed += 1;
        let at = self.answer.end();
        if self.failed > self.policy.retries {
            return Err(match self.policy.retries {
                0 => error,
                _ => {
                    Error::GaveUp { call: self.query.call(), at, tries: self.failed, source: Box::new(error) }
                }
            });
        }
        let pause = self.policy.pause(self.failed).mul_f64(1.0 - fastrand::f64() / 2.0);
        tracing::warn!(at, failed = self.failed, pause_ms = pause.as_millis() as u64, %error, "asking again");
        tokio::time::sleep(pause).await;
        self.resumed += u32::from(self.answer.shape().is_some());
        Ok(())
    }
}
