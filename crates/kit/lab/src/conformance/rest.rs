//! Rests of streams with many messages, long enough that something can happen inside them, and whether such a stream waits for
//! its reader.

use std::time::{Duration, Instant};

use tonic::Status;

use super::answer::{Answer, Messages, name};
use super::ranges::Ranges;
use super::subject::{Kind, Prepared, Subject};
use super::verdict::{Verdict, Wrong};
use csi_client::{Options, Question};

/// Reads a stream whose deadline passes after `read` messages, while its reader waits.
pub(super) async fn overdue<S: Subject>(
    client: &mut S::Narrow,
    question: &Question,
    options: &Options,
    read: usize,
) -> Result<Answer, Wrong> {
    let begun = Instant::now();
    let opened = S::open(client, question, options).await;
    read_late(opened, begun, &name(question, options), options, read).await
}

/// Reads a stream that was opened at `begun`, all but the first `read` messages after its deadline.
async fn read_late(
    opened: Result<impl Messages, Status>,
    begun: Instant,
    call: &str,
    options: &Options,
    read: usize,
) -> Result<Answer, Wrong> {
    let late = begun + Duration::from_millis(options.timeout_ms.unwrap_or(0) + 20);
    Answer::read_slowly(opened, call, |messages| match messages == read {
        true => late.saturating_duration_since(Instant::now()),
        false => Duration::ZERO,
    })
    .await
}

/// Whether a stream of that many messages ended with an error after its first one and before its last: until then it was open.
pub(super) fn is_cut_inside(answer: &Answer, messages: usize) -> bool {
    answer.end.is_err() && (1..messages).contains(&answer.messages.len())
}

/// The rest of a stream with many messages, from an offset on.
pub(super) struct Rest {
    pub question: Question,
    pub offset: i64,
    /// What it held when nothing disturbed it.
    pub must: Ranges,
    pub messages: usize,
}

impl Rest {
    /// Rests that are longer and longer, up to the whole: work that grows until something can happen within it.
    pub async fn growing<S: Subject>(subject: &S, kind: Kind) -> Result<Vec<Rest>, Wrong> {
        let (question, first) = subject.dense_question(kind)?;
        let whole = subject.ask(&question, 0, 0).await?;
        let mut rests = Self::of(&question, &whole);
        if S::KNOWS_FIRST {
            // Streams that were disturbed before may have cost this one something.
            for rest in &mut rests {
                rest.must = first.within(rest.offset.unsigned_abs(), u64::MAX);
            }
        }
        Ok(rests)
    }

    /// The same of a question whose whole answer is known.
    pub fn of(question: &Question, whole: &Answer) -> Vec<Rest> {
        let must = whole.ranges();
        let whole: Vec<(i64, i64)> = whole.tuples().collect();
        let mut rests = Vec::new();
        for messages in [1_500, 6_000, 60_000, usize::MAX] {
            let skipped = whole.len().saturating_sub(messages);
            let offset = if skipped == 0 { 0 } else { whole[skipped].0 };
            let must = must.within(offset.unsigned_abs(), u64::MAX);
            rests.push(Rest { question: question.clone(), offset, must, messages: whole.len() - skipped });
            if skipped == 0 {
                break;
            }
        }
        rests
    }

    /// The same rest of an answer to another question, about a snapshot with the same content.
    pub fn of_same_length(&self, question: &Question, whole: &Answer) -> Rest {
        let must = whole.ranges().within(self.offset.unsigned_abs(), u64::MAX);
        Rest { question: question.clone(), must, ..*self }
    }

    /// With one tuple a message.
    pub fn options(&self, subject: &impl Subject) -> Options {
        subject.options(self.offset, 1)
    }
}

/// Why a cut was none, in the longest stream that there is.
pub(super) fn not_shown<S: Subject>(rests: &[Rest], what: &str) -> Verdict {
    let messages = rests.last().map_or(0, |rest| rest.messages);
    Verdict::NotShown(format!(
        "no {what} fell inside a stream: a driver may have handed over all {messages} messages before; {}",
        S::MORE
    ))
}

/// How long a stream is left alone at least, besides the time that reading it to its end takes.
const WAIT: Duration = Duration::from_millis(500);
/// Each wait is this many times as long as the one before.
const AGAIN: u32 = 4;
/// How many waits there are at most.
const WAITS: u32 = 4;

/// The shortest rest of an answer about the dense volume whose stream waits for its reader; else the longest. It is found once, for
/// it takes time and has nothing to do with what is done then.
pub(super) struct Held {
    pub rests: Vec<Rest>,
    pub at: usize,
    pub waits: bool,
}

impl Held {
    pub async fn find<S: Subject>(subject: &S, kind: Kind) -> Prepared<Self> {
        let (question, _) = subject.dense_question(kind)?;
        let whole = subject.ask(&question, 0, 0).await?;
        let rests = Rest::of(&question, &whole);
        for (at, rest) in rests.iter().enumerate() {
            if waits_for_its_reader(subject, rest).await? {
                return Ok(Held { at, waits: true, rests });
            }
        }
        Ok(Held { at: rests.len() - 1, waits: false, rests })
    }
}

/// Whether a stream that no one reads is still open when the driver has had the time to send all of it: then it waits for its
/// reader, however long that takes. A deadline shows it, for it ends only what is open.
///
/// A driver that is held up is not taken for one that waits: a deadline counts only if the same answer, asked for later, was
/// read to its end before it, and there are two of them.
async fn waits_for_its_reader<S: Subject>(subject: &S, rest: &Rest) -> Result<bool, Wrong> {
    let (mut client, mut reader) = (subject.narrow().await?, subject.narrow().await?);
    let options = rest.options(subject);
    let call = name(&rest.question, &options);
    let opened = Instant::now();
    let whole = S::read(&mut client, &rest.question, &options).await?;
    whole.ok(&rest.question, &options)?;
    let first = WAIT + opened.elapsed();
    let mut seen = 0;
    for wait in (0..WAITS).map(|number| AGAIN.pow(number) * first) {
        let until = Options { timeout_ms: Some(wait.as_millis() as u64), ..options.clone() };
        let begun = Instant::now();
        let stalled = S::open(&mut client, &rest.question, &until).await;
        let read = async {
            let answer = S::read(&mut reader, &rest.question, &options).await?;
            answer.ok(&rest.question, &options).map(|_| begun.elapsed())
        };
        let (stalled, read) = tokio::join!(read_late(stalled, begun, &call, &until, 1), read);
        if !is_cut_inside(&stalled?, rest.messages) {
            return Ok(false);
        }
        seen += u32::from(read? < wait);
        if seen == 2 {
            return Ok(true);
        }
    }
    Ok(false)
}
