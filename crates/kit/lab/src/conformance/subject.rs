//! What is tested: a driver at its socket (`fixtures.rs`), or a service in a cluster (`kubernetes/cluster.rs`). Cases about
//! answers alone ask either of them.

use std::fmt::Debug;
use std::future::Future;
use std::time::Duration;

use super::answer::{Answer, Messages, name};
use super::ranges::Ranges;
use super::verdict::{Judged, Wrong};
use csi_client::{Options, Question};
use tonic::Status;

/// The two streams.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Allocated,
    Delta,
}

/// Why something could not be prepared.
#[derive(Clone, Debug)]
pub(super) enum NotReady {
    Skip(String),
    Failed(Wrong),
}

impl From<Wrong> for NotReady {
    fn from(wrong: Wrong) -> Self {
        NotReady::Failed(wrong)
    }
}

pub(super) type Prepared<T> = Result<T, NotReady>;

/// What cases ask, and what the run of all cases needs.
pub(super) trait Subject: Send + Sync + Sized + 'static {
    /// What is prepared before a case.
    type Need: Copy + Debug + PartialEq + Send + Sync + 'static;
    /// A connection whose streams wait for their reader.
    type Narrow: Send;
    /// An answer under way on such a connection.
    type Stream: Messages;

    /// Which bytes an answer has to hold.
    const MUST: &'static str;
    /// Why an answer has one tuple alone, and what to do for more.
    const SPREAD: &'static str;
    /// Whether an answer is compared with the first one, and not with what was written.
    const KNOWS_FIRST: bool;
    /// At how many places of an answer it is cut and continued.
    const RESUMES: usize;
    /// How streams become longer.
    const MORE: &'static str;

    /// What has to be prepared before this is.
    fn made_from(need: Self::Need) -> &'static [Self::Need];
    /// Prepares what cases need. It is prepared already, or made once and by one caller at a time.
    fn prepare(&self, need: Self::Need) -> impl Future<Output = Prepared<()>> + Send;
    /// Whether cases with these needs must not run at once. Then they run in the order of the table.
    fn exclude(one: &[Self::Need], other: &[Self::Need]) -> bool;
    /// Whether it does not answer any more.
    fn is_silent(&self) -> impl Future<Output = bool> + Send;
    /// Takes all away that was made, each thing within `patience`. Returns what could not be.
    fn clean_up(&self, patience: Duration) -> impl Future<Output = Vec<String>> + Send;
    /// What was made and is not taken away yet.
    fn made(&self) -> Vec<String>;

    /// The question whose answer has many tuples.
    fn question(&self, kind: Kind) -> Result<Question, Wrong>;
    /// What an answer to it has to hold.
    fn must(&self, kind: Kind) -> Result<Ranges, Wrong>;
    /// The question whose answer has as many tuples as can be, and what it has to hold.
    fn dense_question(&self, kind: Kind) -> Result<(Question, Ranges), Wrong>;
    /// The size of the volume of these questions' target.
    fn size(&self) -> Result<u64, Wrong>;
    /// The same, or the capacity that the driver gave where that is more.
    fn end(&self) -> Result<i64, Wrong>;
    /// The question with its base and target exchanged, and others like it.
    fn reversed(&self) -> Result<Vec<Question>, Wrong>;
    /// A snapshot as its own target.
    fn same(&self) -> Result<Question, Wrong>;
    /// What comes of a case that finds no tuple to look at.
    fn without_tuples(&self) -> Judged;

    /// How it is asked.
    fn options(&self, offset: i64, max_results: i32) -> Options;
    /// An answer, however it ends.
    fn try_ask(
        &self,
        question: &Question,
        options: &Options,
    ) -> impl Future<Output = Result<Answer, Wrong>> + Send;
    /// An answer that has to end with `OK`.
    fn ask(
        &self,
        question: &Question,
        offset: i64,
        max_results: i32,
    ) -> impl Future<Output = Result<Answer, Wrong>> + Send {
        async move {
            let options = self.options(offset, max_results);
            self.try_ask(question, &options).await?.ok(question, &options)
        }
    }
    /// A new connection whose streams wait for their reader.
    fn narrow(&self) -> impl Future<Output = Result<Self::Narrow, Wrong>> + Send;
    /// Opens a stream on it.
    fn open(
        narrow: &mut Self::Narrow,
        question: &Question,
        options: &Options,
    ) -> impl Future<Output = Result<Self::Stream, Status>> + Send;
    /// Reads an answer on it, however it ends.
    fn read(
        narrow: &mut Self::Narrow,
        question: &Question,
        options: &Options,
    ) -> impl Future<Output = Result<Answer, Wrong>> + Send {
        async move {
            let opened = Self::open(narrow, question, options).await;
            Answer::read(opened, &name(question, options)).await
        }
    }
}
