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
use super::volume::Snap;
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

pub(super) struct Fixtures {
    pub plugin: Plugin,
    made: Made,
}

/// What is there of each need.
#[derive(Default)]
struct Made {
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

/// A question about two snapshots, and what the answer to it has to hold.
fn about(kind: Kind, base: &Snap, target: &Snap) -> (Question, Ranges) {
    match kind {
        Kind::Allocated => (target.allocated(), target.content.data()),
        Kind::Delta => (target.since(base), target.content.changed_since(&base.content)),
    }
}

impl Fixtures {
    pub fn new(plugin: Plugin) -> Self {
        Fixtures { plugin, made: Made::default() }
    }

    pub fn pair(&self) -> Result<&Pair, Wrong> {
        take(&self.made.pair)
    }

    pub fn restored(&self) -> Result<&Restored, Wrong> {
        take(&self.made.restored)
    }

    pub fn expanded(&self) -> Result<&Change, Wrong> {
        take(&self.made.expanded)
    }

    pub fn between(&self) -> Result<&Change, Wrong> {
        take(&self.made.between)
    }

    pub fn dense(&self) -> Result<&Dense, Wrong> {
        take(&self.made.dense)
    }

    pub fn held(&self, kind: Kind) -> Result<&Held, Wrong> {
        take(&self.made.held[kind as usize])
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
        let (made, plugin) = (&self.made, &self.plugin);
        match need {
            Need::Pair => made.pair.get_or_try_init(|| history::pair(plugin)).await.map(drop),
            Need::Restored => {
                let restored = async || history::restored(plugin, self.pair()?).await;
                made.restored.get_or_try_init(restored).await.map(drop)
            }
            Need::Expanded => made.expanded.get_or_try_init(|| history::expanded(plugin)).await.map(drop),
            Need::Between => made.between.get_or_try_init(|| history::between(plugin)).await.map(drop),
            Need::Dense => made.dense.get_or_try_init(|| history::dense(plugin)).await.map(drop),
            Need::Held(kind) => {
                made.held[kind as usize].get_or_try_init(|| Held::find(self, kind)).await.map(drop)
            }
            Need::PairCalls | Need::DenseCalls | Need::Alone => Ok(()),
        }
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

    async fn is_silent(&self) -> bool {
        self.plugin.is_silent().await
    }

    async fn clean_up(&self, patience: Duration) -> Vec<String> {
        self.plugin.clean_up(patience).await
    }

    fn made(&self) -> Vec<String> {
        self.plugin.ledger.names()
    }

    fn question(&self, kind: Kind) -> Result<Question, Wrong> {
        let Pair { first, second, .. } = self.pair()?;
        Ok(about(kind, first, second).0)
    }

    fn must(&self, kind: Kind) -> Result<Ranges, Wrong> {
        let Pair { first, second, .. } = self.pair()?;
        Ok(about(kind, first, second).1)
    }

    fn dense_question(&self, kind: Kind) -> Result<(Question, Ranges), Wrong> {
        let Dense { before, after, .. } = self.dense()?;
        Ok(about(kind, before, after))
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
        Options { offset, max_results, secrets: self.plugin.stream_secrets(), timeout_ms: None }
    }

    async fn try_ask(&self, question: &Question, options: &Options) -> Result<Answer, Wrong> {
        calls(call_of(question));
        Self::read(&mut self.plugin.client(), question, options).await
    }

    async fn narrow(&self) -> Result<Client, Wrong> {
        self.plugin.narrow().await
    }

    async fn open(client: &mut Client, question: &Question, options: &Options) -> Result<RawStream, Status> {
        client.open_stream(question, options).await
    }
}
