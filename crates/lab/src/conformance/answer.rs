//! Answers of the two streams, read whole.

use tonic::Status;

use super::case::{Wrong, said};
use super::ranges::Ranges;
use super::subject::Subject;
use csi_client::{Message, Options, Question, RawStream};

/// A stream that sends more than this is taken for one without an end.
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
    /// Reads a stream to its end, whatever that is. An error only where it has none.
    pub(super) async fn read<S: Subject>(
        client: &mut S::Narrow,
        question: &Question,
        options: &Options,
    ) -> Result<Self, Wrong> {
        let opened = S::open(client, question, options).await;
        Self::read_all(opened, &name(question, options)).await
    }

    /// The same of a stream that was opened; `call` says which.
    pub async fn read_all(opened: Result<impl Messages, Status>, call: &str) -> Result<Self, Wrong> {
        let mut messages = Vec::new();
        let mut stream = match opened {
            Ok(stream) => stream,
            Err(status) => return Ok(Answer { messages, end: Err(status) }),
        };
        let mut sent = 0;
        loop {
            match stream.next().await {
                Ok(Some(message)) => {
                    sent += 1 + message.tuples.len();
                    messages.push(message);
                }
                Ok(None) => return Ok(Answer { messages, end: Ok(()) }),
                Err(status) => return Ok(Answer { messages, end: Err(status) }),
            }
            if sent > ENDLESS {
                return Err(Wrong::new(format!("{call}: {ENDLESS} tuples and no end")));
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
