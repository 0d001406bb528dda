//! Answers of the two streams, read whole.

use std::time::Duration;

use tonic::Status;

use super::ranges::Ranges;
use super::verdict::{Wrong, said};
use csi_client::{Message, Options, Question, RawStream};

/// A stream with more messages and tuples than this that lead no further into the volume is taken for one without an end.
///
/// One that does lead further is as long as its volume has blocks, however many those are: the capacity bounds it.
const ENDLESS: usize = 2_000_000;

/// A stream under way, message by message.
pub(crate) trait Messages: Send {
    /// The next message; `None` is the end with `OK`.
    fn next(&mut self) -> impl Future<Output = Result<Option<Message>, Status>> + Send;
}

impl Messages for RawStream {
    async fn next(&mut self) -> Result<Option<Message>, Status> {
        RawStream::next(self).await
    }
}

/// All messages of a stream, and its end.
#[derive(Clone, Debug)]
pub(crate) struct Answer {
    pub messages: Vec<Message>,
    pub end: Result<(), Status>,
}

impl Answer {
    /// Reads a stream to its end, whatever that is; `call` says which. An error only where it has none.
    pub async fn read(opened: Result<impl Messages, Status>, call: &str) -> Result<Self, Wrong> {
        Self::read_slowly(opened, call, |_| Duration::ZERO).await
    }

    /// The same with a pause before each message, by how many were read.
    pub async fn read_slowly(
        opened: Result<impl Messages, Status>,
        call: &str,
        pause: impl Fn(usize) -> Duration,
    ) -> Result<Self, Wrong> {
        let mut messages = Vec::new();
        let mut stream = match opened {
            Ok(stream) => stream,
            Err(status) => return Ok(Answer { messages, end: Err(status) }),
        };
        let (mut idle, mut end) = (0, 0);
        loop {
            let pause = pause(messages.len());
            if !pause.is_zero() {
                tokio::time::sleep(pause).await;
            }
            match stream.next().await {
                Ok(Some(message)) => {
                    idle += usize::from(message.tuples.is_empty());
                    for (offset, size) in &message.tuples {
                        let leads_on = (end..message.capacity).contains(offset) && *size > 0;
                        idle += usize::from(!leads_on);
                        end = end.max(offset.saturating_add(*size));
                    }
                    messages.push(message);
                }
                Ok(None) => return Ok(Answer { messages, end: Ok(()) }),
                Err(status) => return Ok(Answer { messages, end: Err(status) }),
            }
            if idle > ENDLESS {
                return Err(Wrong::new(format!(
                    "{call}: no end after {ENDLESS} messages and tuples that name nothing new in the volume"
                )));
            }
        }
    }

    /// All tuples, byte offset and size.
    pub fn tuples(&self) -> impl Iterator<Item = (i64, i64)> + '_ {
        self.messages.iter().flat_map(|message| message.tuples.iter().copied())
    }

    /// The bytes that the tuples name.
    pub fn ranges(&self) -> Ranges {
        let bytes = |value: i64| u64::try_from(value).unwrap_or(0);
        Ranges::of(self.tuples().map(|(offset, size)| bytes(offset)..bytes(offset.saturating_add(size))))
    }

    /// `volume_capacity_bytes` of the first message.
    pub fn capacity(&self) -> Option<i64> {
        self.messages.first().map(|message| message.capacity)
    }

    /// The answer, if it ended with `OK`.
    pub fn ok(self, question: &Question, options: &Options) -> Result<Self, Wrong> {
        match &self.end {
            Ok(()) => Ok(self),
            Err(status) => {
                let after = self.messages.len();
                let call = format!("{} after {after} messages", name(question, options));
                Err(Wrong::call(&call, status))
            }
        }
    }
}

/// The RPC that answers a question.
pub(crate) fn call_of(question: &Question) -> &'static str {
    match question {
        Question::Allocated { .. } => "GetMetadataAllocated",
        Question::Delta { .. } => "GetMetadataDelta",
    }
}

/// A question as a person would write it.
pub(crate) fn name(question: &Question, options: &Options) -> String {
    let call = call_of(question);
    format!("{call} (starting_offset {}, max_results {})", options.offset, options.max_results)
}

/// Says of what is missing how much it is and where it starts.
pub(crate) fn missing(what: &str, must: &Ranges, listed: &Ranges) -> Result<(), Wrong> {
    let missing = must.minus(listed);
    match missing.first() {
        None => Ok(()),
        Some(first) => {
            Err(Wrong::new(format!("{} bytes {what} are in no tuple, the first at {first}", missing.bytes())))
        }
    }
}

/// The unit of the driver's tuples, as far as they tell: what divides all their offsets and sizes, but
/// for one that ends at the capacity.
pub(crate) fn unit<'a>(answers: impl IntoIterator<Item = &'a Answer>) -> u64 {
    let mut unit = 0;
    for answer in answers {
        for (offset, size) in answer.tuples() {
            unit = gcd(unit, offset.unsigned_abs());
            if Some(offset.saturating_add(size)) != answer.capacity() {
                unit = gcd(unit, size.unsigned_abs());
            }
        }
    }
    unit.max(1)
}

fn gcd(a: u64, b: u64) -> u64 {
    if b == 0 { a } else { gcd(b, a % b) }
}

/// How a stream that had to be refused was answered instead.
pub(crate) fn unexpected(question: &Question, options: &Options, answer: &Answer, wanted: &str) -> Wrong {
    let call = name(question, options);
    match &answer.end {
        Ok(()) => Wrong::new(format!("{call}: OK with {} tuples, not {wanted}", answer.tuples().count())),
        Err(status) => Wrong::new(format!("{call}: {}, not {wanted}", said(status))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A stream of `messages` messages.
    struct Long<F> {
        messages: usize,
        make: F,
    }

    impl<F: FnMut() -> Message + Send> Messages for Long<F> {
        async fn next(&mut self) -> Result<Option<Message>, Status> {
            if self.messages == 0 {
                return Ok(None);
            }
            self.messages -= 1;
            Ok(Some((self.make)()))
        }
    }

    /// A million changes of 4 KiB, which a driver with units of 1 KiB names by four million tuples.
    #[tokio::test]
    async fn a_stream_is_as_long_as_its_volume_has_blocks() {
        const CAPACITY: i64 = 8 << 30;
        let mut offset = 0;
        let mut tuple = || {
            offset += if offset % 4096 == 3072 { 5120 } else { 1024 };
            (offset - 1024, 1024)
        };
        let make = || Message { style: 1, capacity: CAPACITY, tuples: (0..4000).map(|_| tuple()).collect() };
        let answer = Answer::read(Ok(Long { messages: 1000, make }), "it").await.expect("it ends");
        assert_eq!(answer.tuples().count(), 4_000_000);
        assert!(answer.tuples().last().is_some_and(|(offset, _)| offset < CAPACITY));
    }

    #[tokio::test]
    async fn a_stream_that_repeats_itself_or_leaves_its_volume_has_no_end() {
        let tuples = |offset: i64| (0..4096).map(|at| (offset + at * 512, 512)).collect::<Vec<_>>();
        let mut at = 0;
        let behind = || {
            at += 4096 * 512;
            tuples(at)
        };
        // The same again, behind the end, and nothing.
        has_no_end(|| tuples(0)).await;
        has_no_end(behind).await;
        has_no_end(Vec::new).await;
    }

    async fn has_no_end(mut make: impl FnMut() -> Vec<(i64, i64)> + Send) {
        let make = || Message { style: 1, capacity: 1 << 20, tuples: make() };
        let read = Answer::read(Ok(Long { messages: usize::MAX, make }), "it").await;
        assert!(read.is_err_and(|wrong| wrong.to_string().contains("no end")));
    }

    #[test]
    fn the_unit_divides_all_but_a_short_last_tuple() {
        let answer = |tuples: &[(i64, i64)]| Answer {
            messages: vec![Message { style: 2, capacity: 100, tuples: tuples.to_vec() }],
            end: Ok(()),
        };
        assert_eq!(unit([&answer(&[(0, 16), (24, 8), (96, 4)])]), 8);
        assert_eq!(unit([&answer(&[(0, 16), (24, 12)])]), 4);
        assert_eq!(unit([&answer(&[])]), 1);
    }
}
