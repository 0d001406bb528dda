//! What the cases work on: volumes with a known history, made once and shared, and questions to the
//! driver about them.

use std::time::Duration;

use tokio::sync::OnceCell;

use super::answer::{Answer, call_of};
use super::history::{self, Change, Dense, Pair, Restored};
use super::plugin::{Plugin, calls};
use super::ranges::Ranges;
use super::rest::Held;
use super::subject::{Kind, Prepared, Subject};
use super::verdict::{Judged, Wrong};
use csi_client::{Client, Options, Question, RawStream};
use tonic::Status;

/// What is prepared before a case runs, and what it must have to itself while it runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Need {
    /// A volume with four snapshots.
    Pair,
    /// Two of them, restored.
    Restored,
    /// A volume that grew between two snapshots.
    Expanded,
    /// A volume that was restored from between two snapshots.
    Between,
    /// A volume with as many changes between two snapshots as it takes, a million at most.
    Dense,
    /// A stream about it that waits for its reader.
    Held(Kind),
    /// To take and delete snapshots of the pair's volume.
    PairCalls,
    /// To change the dense volume or its snapshots.
    DenseCalls,
    /// To run alone, when all cases before it in the table are over.
    Alone,
}

/// The one rule of which cases must not run at once.
fn exclude(one: &[Need], other: &[Need]) -> bool {
    let meet = |a: Need, b: Need| {
        (one.contains(&a) && other.contains(&b)) || (one.contains(&b) && other.contains(&a))
    };
    // It is about what all cases before it did to the driver, or opens as many streams as a driver may allow.
    one.contains(&Need::Alone)
        || other.contains(&Need::Alone)
        // CSI has an orchestrator make one call about a volume at a time, so do the cases that share one.
        || meet(Need::PairCalls, Need::PairCalls)
        // The same; and who reads its snapshots must not be blamed for what is done to their volume.
        || meet(Need::DenseCalls, Need::Dense)
}

pub(super) struct Fixtures {
    pub plugin: Plugin,
    pair: OnceCell<Pair>,
    restored: OnceCell<Restored>,
    expanded: OnceCell<Change>,
    between: OnceCell<Change>,
    dense: OnceCell<Dense>,
    /// Of each [`Kind`].
    held: [OnceCell<Held>; 2],
}

fn take<T>(cell: &OnceCell<T>) -> Result<&T, Wrong> {
    cell.get().ok_or_else(|| Wrong::new("a case uses what it does not say that it needs"))
}

impl Fixtures {
    pub fn new(plugin: Plugin) -> Self {
        Fixtures {
            plugin,
            pair: OnceCell::new(),
            restored: OnceCell::new(),
            expanded: OnceCell::new(),
            between: OnceCell::new(),
            dense: OnceCell::new(),
            held: Default::default(),
        }
    }

    pub fn pair(&self) -> Result<&Pair, Wrong> {
        take(&self.pair)
    }

    pub fn restored(&self) -> Result<&Restored, Wrong> {
        take(&self.restored)
    }

    pub fn expanded(&self) -> Result<&Change, Wrong> {
        take(&self.expanded)
    }

    pub fn between(&self) -> Result<&Change, Wrong> {
        take(&self.between)
    }

    pub fn dense(&self) -> Result<&Dense, Wrong> {
        take(&self.dense)
    }

    pub fn held(&self, kind: Kind) -> Result<&Held, Wrong> {
        take(&self.held[kind as usize])
    }

    /// The question whose answer has as many tuples as can be, and what it has to hold.
    pub fn dense_question(&self, kind: Kind) -> Result<(Question, Ranges), Wrong> {
        let Dense { before, after, .. } = self.dense()?;
        Ok(match kind {
            Kind::Allocated => (after.allocated(), after.content.data()),
            Kind::Delta => (after.since(before), after.content.changed_since(&before.content)),
        })
    }

    /// The question whose answer has many tuples.
    pub fn question(&self, kind: Kind) -> Result<Question, Wrong> {
        let pair = self.pair()?;
        Ok(match kind {
            Kind::Allocated => pair.second.allocated(),
            Kind::Delta => pair.second.since(&pair.first),
        })
    }

    /// What an answer to it has to hold.
    pub fn must(&self, kind: Kind) -> Result<Ranges, Wrong> {
        let pair = self.pair()?;
        Ok(match kind {
            Kind::Allocated => pair.second.content.data(),
            Kind::Delta => pair.second.content.changed_since(&pair.first.content),
        })
    }

    /// How the driver is asked.
    pub fn options(&self, offset: i64, max_results: i32) -> Options {
        Options { offset, max_results, secrets: self.plugin.stream_secrets(), timeout_ms: None }
    }

    /// An answer that has to end with `OK`.
    pub async fn ask(&self, question: &Question, offset: i64, max_results: i32) -> Result<Answer, Wrong> {
        let options = self.options(offset, max_results);
        self.try_ask(question, &options).await?.ok(question, &options)
    }

    /// An answer, however it ends.
    pub async fn try_ask(&self, question: &Question, options: &Options) -> Result<Answer, Wrong> {
        calls(call_of(question));
        Self::read(&mut self.plugin.client(), question, options).await
    }
}

impl Subject for Fixtures {
    type Need = Need;
    type Narrow = Client;
    type Stream = RawStream;

    const MUST: &'static str = "that were written or changed";
    const SPREAD: &'static str = "the driver's unit is large; a larger --volume-size spreads the writes";
    const RESUMES: usize = usize::MAX;
    const KNOWS_FIRST: bool = false;
    const MORE: &'static str = "a larger --volume-size makes them more";

    fn made_from(need: Need) -> &'static [Need] {
        match need {
            Need::Restored => &[Need::Pair],
            Need::Held(_) => &[Need::Dense],
            _ => &[],
        }
    }

    async fn prepare(&self, need: Need) -> Prepared<()> {
        match need {
            Need::Pair => self.pair.get_or_try_init(|| history::pair(&self.plugin)).await.map(drop),
            Need::Restored => self
                .restored
                .get_or_try_init(|| async { history::restored(&self.plugin, self.pair()?).await })
                .await
                .map(drop),
            Need::Expanded => {
                self.expanded.get_or_try_init(|| history::expanded(&self.plugin)).await.map(drop)
            }
            Need::Between => self.between.get_or_try_init(|| history::between(&self.plugin)).await.map(drop),
            Need::Dense => self.dense.get_or_try_init(|| history::dense(&self.plugin)).await.map(drop),
            Need::Held(kind) => {
                self.held[kind as usize].get_or_try_init(|| Held::find(self, kind)).await.map(drop)
            }
            Need::PairCalls | Need::DenseCalls | Need::Alone => Ok(()),
        }
    }

    fn exclude(one: &[Need], other: &[Need]) -> bool {
        exclude(one, other)
    }

    async fn is_silent(&self) -> bool {
        self.plugin.is_silent().await
    }

    async fn clean_up(&self, patience: Duration) -> Vec<String> {
        self.plugin.clean_up(patience).await
    }

    fn made(&self) -> Vec<String> {
        self.plugin.ledger().names()
    }

    fn question(&self, kind: Kind) -> Result<Question, Wrong> {
        self.question(kind)
    }

    fn must(&self, kind: Kind) -> Result<Ranges, Wrong> {
        self.must(kind)
    }

    fn dense_question(&self, kind: Kind) -> Result<(Question, Ranges), Wrong> {
        self.dense_question(kind)
    }

    fn size(&self) -> Result<u64, Wrong> {
        Ok(self.pair()?.second.size)
    }

    fn end(&self) -> Result<i64, Wrong> {
        let snap = &self.pair()?.second;
        Ok((snap.size as i64).max(snap.reported_size))
    }

    fn reversed(&self) -> Result<Vec<Question>, Wrong> {
        let pair = self.pair()?;
        Ok(vec![pair.first.since(&pair.second), pair.empty.since(&pair.third)])
    }

    fn same(&self) -> Result<Question, Wrong> {
        let snap = &self.pair()?.second;
        Ok(snap.since(snap))
    }

    fn without_tuples(&self) -> Judged {
        Err(Wrong::new("no answer has a tuple, though dozens of places were written"))
    }

    fn options(&self, offset: i64, max_results: i32) -> Options {
        self.options(offset, max_results)
    }

    async fn try_ask(&self, question: &Question, options: &Options) -> Result<Answer, Wrong> {
        self.try_ask(question, options).await
    }

    async fn narrow(&self) -> Result<Client, Wrong> {
        self.plugin.narrow().await
    }

    async fn open(client: &mut Client, question: &Question, options: &Options) -> Result<RawStream, Status> {
        client.open_stream(question, options).await
    }
}
