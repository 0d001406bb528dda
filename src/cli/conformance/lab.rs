//! What the cases work on: volumes with a known history, made once and shared, and questions to the
//! driver about them.

use std::path::PathBuf;
use std::time::Duration;

use tokio::sync::OnceCell;

use super::answer::Answer;
use super::case::{Judged, Verdict, Wrong};
use super::content::{BLOCK, Content, Edit, apply, device_size};
use super::history;
use super::plugin::{Plugin, Volume};
use super::ranges::Ranges;
use crate::client::{Options, Question, block_capability};

/// The two streams.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Allocated,
    Delta,
}

/// What is prepared before a case runs.
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

/// A snapshot and what is in it.
#[derive(Clone, Debug)]
pub(super) struct Snap {
    pub id: String,
    pub content: Content,
    /// The size of the device when it was taken.
    pub size: u64,
    /// The capacity that the driver told of the volume by then.
    pub told: i64,
}

impl Snap {
    pub fn allocated(&self) -> Question {
        Question::Allocated { snapshot: self.id.clone() }
    }

    pub fn since(&self, base: &Snap) -> Question {
        Question::Delta { base: base.id.clone(), target: self.id.clone() }
    }
}

/// A published volume under the suite's pen.
#[derive(Clone, Debug)]
pub(super) struct Pen {
    pub volume: Volume,
    pub device: PathBuf,
    pub size: u64,
    pub told: i64,
    pub content: Content,
}

/// A volume and its snapshots: never written, written, changed, changed again.
pub(super) struct Pair {
    pub pen: Pen,
    pub empty: Snap,
    pub first: Snap,
    pub second: Snap,
    pub third: Snap,
}

/// Published volumes that were made from `first` and `second`.
pub(super) struct Restored {
    pub first: PathBuf,
    pub second: PathBuf,
}

/// A volume before and after something was done to it.
pub(super) struct Change {
    pub before: Snap,
    pub after: Snap,
    /// A snapshot of the volume that was restored from `before`.
    pub copy: Option<Snap>,
}

pub(super) struct Lab {
    pub plugin: Plugin,
    patience: Duration,
    pair: OnceCell<Prepared<Pair>>,
    restored: OnceCell<Prepared<Restored>>,
    expanded: OnceCell<Prepared<Change>>,
    between: OnceCell<Prepared<Change>>,
}

/// Fills a cell once, within the time that a case has.
async fn fill<T>(cell: &OnceCell<Prepared<T>>, patience: Duration, make: impl Future<Output = Prepared<T>>) {
    let made = cell.get_or_init(|| async {
        let late = || Wrong::new(format!("no end within {} s", patience.as_secs()));
        tokio::time::timeout(patience, make).await.unwrap_or_else(|_| Err(late().into()))
    });
    made.await;
}

fn take<T>(cell: &OnceCell<Prepared<T>>) -> Result<&T, Wrong> {
    match cell.get() {
        Some(Ok(made)) => Ok(made),
        Some(Err(NotReady::Failed(wrong))) => Err(wrong.clone()),
        _ => Err(Wrong::new("a case uses what it does not say that it needs")),
    }
}

impl Lab {
    pub fn new(plugin: Plugin, patience: Duration) -> Self {
        Lab {
            plugin,
            patience,
            pair: OnceCell::new(),
            restored: OnceCell::new(),
            expanded: OnceCell::new(),
            between: OnceCell::new(),
        }
    }

    /// Prepares what a case needs. What comes back, if anything, is the case's outcome.
    pub async fn prepare(&self, needs: &[Need]) -> Option<Judged> {
        for need in needs {
            let failed = match need {
                Need::Pair => {
                    fill(&self.pair, self.patience, history::pair(self)).await;
                    self.pair.get().and_then(|made| made.as_ref().err())
                }
                Need::Restored => {
                    fill(&self.restored, self.patience, history::restored(self)).await;
                    self.restored.get().and_then(|made| made.as_ref().err())
                }
                Need::Expanded => {
                    fill(&self.expanded, self.patience, history::expanded(self)).await;
                    self.expanded.get().and_then(|made| made.as_ref().err())
                }
                Need::Between => {
                    fill(&self.between, self.patience, history::between(self)).await;
                    self.between.get().and_then(|made| made.as_ref().err())
                }
            };
            match failed {
                None => {}
                Some(NotReady::Skip(why)) => return Some(Ok(Verdict::Skip(why.clone()))),
                Some(NotReady::Failed(wrong)) => return Some(Err(wrong.clone().at("preparing"))),
            }
        }
        None
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
        Answer::read(&mut self.plugin.client(), question, options).await
    }

    /// A new published Block volume.
    pub async fn pen(&self, from_snapshot: Option<&str>, bytes: u64) -> Result<Pen, Wrong> {
        let volume = self.plugin.create_volume(block_capability(), from_snapshot, bytes).await?;
        let device = self.plugin.attach(&volume).await?;
        let size = device_size(&device)?;
        if size < bytes {
            let made = format!("a volume of {bytes} bytes was asked for, its device has {size}");
            return Err(Wrong::new(made));
        }
        let told = volume.capacity;
        Ok(Pen { volume, device, size, told, content: Content::new() })
    }
}

impl Pen {
    /// Writes to the device.
    pub async fn write(&mut self, edits: Vec<Edit>) -> Result<(), Wrong> {
        self.content = apply(self.content.clone(), self.device.clone(), edits).await?;
        Ok(())
    }

    /// Takes a snapshot.
    pub async fn snapshot(&self, lab: &Lab) -> Result<Snap, Wrong> {
        let id = lab.plugin.create_snapshot(&self.volume.id).await?;
        Ok(Snap { id, content: self.content.clone(), size: self.size, told: self.told })
    }

    /// 4 KiB blocks of the device.
    pub fn blocks(&self) -> u64 {
        self.size / BLOCK
    }
}
