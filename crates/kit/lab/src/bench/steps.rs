//! What a life is made of: a call that is timed, a stream that is judged, a copy that is held against what was written. Each puts
//! its figure into the book.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use csi_client::{Question, block_capability};
use tonic::Code;

use super::bare;
use super::check::{Size, holds, judge, stream};
use super::figures::{Book, Spot, Unit};
use super::plan::Plan;
use super::progress::Progress;
use crate::conformance::content::Content;
use crate::conformance::plugin::{Plugin, Volume, within};
use crate::conformance::ranges::Ranges;
use crate::conformance::verdict::Wrong;

/// The longest wait until two answers of GetCapacity are equal.
const STEADY: Duration = Duration::from_secs(5);
/// The longest wait until a driver has freed what was deleted before.
const FREED: Duration = Duration::from_secs(10);

/// Why the rest of a life is not lived.
pub(super) enum Over {
    /// It is in the book.
    Noted,
    Trouble(Wrong),
}

impl From<Wrong> for Over {
    fn from(wrong: Wrong) -> Self {
        Over::Trouble(wrong)
    }
}

pub(super) type Lived<T> = Result<T, Over>;

/// Measures on one driver.
pub(super) struct Bench<'a> {
    pub plugin: &'a Plugin,
    pub plan: &'a Plan,
    pub book: &'a mut Book,
    pub progress: &'a Progress,
    /// Whether anything says how much space is left.
    pub knows_space: bool,
    /// What the driver said was left before the last life.
    pub left_before: Option<f64>,
}

#[derive(Clone)]
pub(super) struct Snap {
    pub id: String,
    pub content: Content,
}

impl Bench<'_> {
    /// Something that the driver does, within its time; what it returns, and its milliseconds.
    pub async fn timed<T>(&self, work: impl Future<Output = Result<T, Wrong>>) -> Result<(T, f64), Wrong> {
        let began = Instant::now();
        let ended = within(self.plan.patience, work).await;
        let took = began.elapsed().as_secs_f64() * 1000.0;
        Ok((ended??, took))
    }

    /// Measures it. The life is over where it fails.
    pub async fn step<T>(&mut self, spot: &Spot, work: impl Future<Output = Result<T, Wrong>>) -> Lived<T> {
        self.progress.step(&spot.what);
        match self.timed(work).await {
            Ok((made, took)) => {
                self.book.sample(spot, took);
                Ok(made)
            }
            Err(wrong) => {
                self.book.failed(spot, wrong);
                Err(Over::Noted)
            }
        }
    }

    /// The same without a figure.
    pub async fn quietly<T>(&self, work: impl Future<Output = Result<T, Wrong>>) -> Lived<T> {
        Ok(self.timed(work).await?.0)
    }

    pub fn spot(&self, id: &str, what: &str, size: u64) -> Spot {
        let unit = match id {
            _ if id.starts_with("space-") => Unit::Bytes,
            _ if id.starts_with("listed-") => Unit::Times,
            "write-before" | "write-during" | "write-after" => Unit::WritesPerSecond,
            _ => Unit::Milliseconds,
        };
        Spot { id: id.into(), what: what.into(), unit, size, snapshots: None }
    }

    /// A delta, if the driver has them. What it lists for each byte that changed.
    pub async fn delta(&mut self, spot: &Spot, base: &Snap, target: &Snap, size: Size) -> Lived<Option<f64>> {
        let must = target.content.changed_since(&base.content);
        let question = Question::Delta { base: base.id.clone(), target: target.id.clone() };
        let answer = self.ask(spot, question, "that changed", &must, size).await?;
        Ok(answer.map(|answer| answer as f64 / must.bytes().max(1) as f64))
    }

    /// A stream, judged. None: the driver has none, or it is wrong.
    pub async fn ask(
        &mut self,
        spot: &Spot,
        question: Question,
        what: &str,
        must: &Ranges,
        size: Size,
    ) -> Lived<Option<u64>> {
        self.progress.step(&spot.what);
        if !self.plugin.claims.metadata {
            self.book.left_out(spot, "the driver does not claim SNAPSHOT_METADATA_SERVICE");
            return Ok(None);
        }
        match self.timed(stream(self.plugin, &question)).await {
            Ok((answer, took)) => match judge(&answer, what, must, size) {
                Ok(answer) => {
                    self.book.sample(spot, took);
                    return Ok(Some(answer));
                }
                Err(wrong) => self.book.wrong(spot, wrong),
            },
            Err(wrong) if wrong.code() == Some(Code::Unimplemented) => self.book.left_out(spot, wrong),
            Err(wrong) => self.book.failed(spot, wrong),
        }
        Ok(None)
    }

    /// What the driver says is left before a life, once it has freed most of what the life before wrote: drivers may delete behind
    /// the calls, and stop for a while in the middle.
    pub async fn space_at_first(&mut self) -> Option<f64> {
        let until = Instant::now() + FREED;
        let written = self.plan.data as f64;
        loop {
            let left = self.space(None).await?;
            if self.left_before.is_none_or(|before| left > before - written / 2.0) || Instant::now() >= until
            {
                self.left_before = Some(left);
                return Some(left);
            }
        }
    }

    /// What the driver says is left, if it does, once it says the same twice: deletions may continue after the calls.
    pub async fn space(&mut self, volume: Option<&Volume>) -> Option<f64> {
        if !self.knows_space {
            return None;
        }
        // Whatever ends this, it is not tried again.
        self.knows_space = false;
        let request = proto::GetCapacityRequest {
            volume_capabilities: volume.map(|volume| vec![volume.capability.clone()]).unwrap_or_default(),
            parameters: self.plugin.settings.volume_parameters.clone(),
            accessible_topology: self.plugin.claims.topology.clone(),
        };
        let mut client = self.plugin.client();
        let began = Instant::now();
        let mut before = None;
        loop {
            let answer = match &self.plan.space_dir {
                Some(dir) => bare::space_left(dir).ok()?,
                None => {
                    let asked = client.controller.get_capacity(request.clone());
                    let answer = tokio::time::timeout(self.plan.patience, asked).await.ok()?.ok()?;
                    answer.into_inner().available_capacity as f64
                }
            };
            if before == Some(answer) {
                self.knows_space = true;
                let ours = |dir: &PathBuf| bare::space_of_same(dir, answer, self.plan.data as f64);
                return Some(answer + self.plan.bare_dir.as_ref().map_or(0.0, ours));
            }
            if began.elapsed() > STEADY {
                return None;
            }
            before = Some(answer);
            tokio::time::sleep(STEADY / 20).await;
        }
    }

    /// Makes a volume from something, and looks whether it holds the same.
    pub async fn copy(
        &mut self,
        spot: &Spot,
        source: proto::VolumeContentSource,
        content: &Content,
        size: u64,
    ) -> Lived<bool> {
        let plugin = self.plugin;
        let volume = self.step(spot, plugin.create_volume(block_capability(), Some(source), size)).await?;
        let device = self.quietly(plugin.attach(&volume)).await?;
        let reading = holds(content.clone(), device, size);
        let right = match tokio::time::timeout(self.plan.patience, reading).await {
            Ok(Ok(())) => true,
            Ok(Err(wrong)) => {
                self.book.wrong(spot, format!("the new volume's device: {wrong}"));
                false
            }
            Err(_) => {
                let seconds = self.plan.patience.as_secs();
                let late =
                    format!("the new volume could not be read within {seconds} s: a longer --timeout waits");
                self.book.failed(spot, late);
                true
            }
        };
        self.quietly(plugin.detach(&volume.id)).await?;
        Ok(right)
    }
}
