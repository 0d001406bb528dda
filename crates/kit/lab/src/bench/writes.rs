//! A workload that writes before, while and after a snapshot is taken, and its rate: blocks of 4 KiB at random places of what is
//! written already, flushed after each batch.

use std::fs::File;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use csi_client::Question;
use tokio::task::JoinHandle;
use tonic::Code;

use super::check::{judge, stream};
use super::steps::{Bench, Lived};
use crate::conformance::content::{Content, Edit, blocking, blocks};
use crate::conformance::verdict::Wrong;
use crate::random;

/// Writes between two flushes.
const BATCH: usize = 64;

/// Writes and their flush.
#[derive(Clone, Debug)]
struct Batch {
    from: Instant,
    to: Instant,
    blocks: Vec<u64>,
}

/// What was written when.
#[derive(Debug)]
pub(super) struct Trace {
    batches: Vec<Batch>,
    pub content: Content,
}

/// How fast a workload was over some time.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Pace {
    pub per_second: f64,
    /// Milliseconds that the slowest batch took.
    pub slowest: f64,
}

/// A workload under way. Dropped, it ends soon.
pub(super) struct Workload {
    enough: Arc<AtomicBool>,
    /// Batches that have ended.
    done: Arc<AtomicU64>,
    task: JoinHandle<Result<Trace, Wrong>>,
}

impl Drop for Workload {
    fn drop(&mut self) {
        self.enough.store(true, Ordering::SeqCst);
        self.task.abort();
    }
}

impl Workload {
    /// Begins to write on a device, or a file, that holds `content`.
    pub fn begin(device: PathBuf, mut content: Content, seed: u64) -> Self {
        let enough = Arc::new(AtomicBool::new(false));
        let done = Arc::new(AtomicU64::new(0));
        let (over, ended) = (Arc::clone(&enough), Arc::clone(&done));
        let task = tokio::spawn(blocking(move |stop| {
            // Held open, so that no batch is the last to close the device.
            let _held = File::open(&device)?;
            let places = content.blocks();
            if places.is_empty() {
                return Err(Wrong::new("nothing is written yet that could be written again"));
            }
            let mut batches = Vec::new();
            let mut number = 0;
            while !over.load(Ordering::SeqCst) {
                let mut blocks = Vec::with_capacity(BATCH);
                for _ in 0..BATCH {
                    number += 1;
                    blocks.push(places[(random::at(seed, number) % places.len() as u64) as usize]);
                }
                // Each batch has a seed of its own: a block that is written again has changed.
                let seed = seed ^ (number << 20);
                let edits: Vec<Edit> =
                    blocks.iter().map(|block| Edit::Write { start: *block, count: 1, seed }).collect();
                let from = Instant::now();
                content.apply(&device, &edits, stop)?;
                batches.push(Batch { from, to: Instant::now(), blocks });
                ended.fetch_add(1, Ordering::SeqCst);
            }
            Ok(Trace { batches, content })
        }));
        Workload { enough, done, task }
    }

    /// Lets it write for some time, and longer where no whole batch began and ended in it.
    pub async fn go_on(&self, time: Duration) {
        // The first of these may have begun before.
        let wanted = self.done.load(Ordering::SeqCst) + 2;
        tokio::time::sleep(time).await;
        while self.done.load(Ordering::SeqCst) < wanted && !self.task.is_finished() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }

    /// The same, and ends it after the batch at hand.
    pub async fn end_after(mut self, time: Duration) -> Result<Trace, Wrong> {
        self.go_on(time).await;
        self.enough.store(true, Ordering::SeqCst);
        let ended = (&mut self.task).await;
        ended.unwrap_or_else(|error| Err(Wrong::new(format!("the workload failed: {error}"))))
    }
}

impl Trace {
    fn pace(&self, counts: impl Fn(&&Batch) -> bool) -> Option<Pace> {
        let batches: Vec<&Batch> = self.batches.iter().filter(counts).collect();
        let (first, last) = (batches.first()?, batches.last()?);
        let seconds = (last.to - first.from).as_secs_f64();
        let slowest = batches.iter().map(|batch| batch.to - batch.from).max()?;
        Some(Pace {
            per_second: (batches.len() * BATCH) as f64 / seconds,
            slowest: slowest.as_secs_f64() * 1000.0,
        })
    }

    /// By the batches that ended before `time`.
    pub fn before(&self, time: Instant) -> Option<Pace> {
        self.pace(|batch| batch.to <= time)
    }

    /// By the batches that any moment from `from` to `to` falls in.
    pub fn during(&self, from: Instant, to: Instant) -> Option<Pace> {
        self.pace(|batch| batch.to > from && batch.from < to)
    }

    /// By the batches that began after `time`.
    pub fn after(&self, time: Instant) -> Option<Pace> {
        self.pace(|batch| batch.from >= time)
    }

    /// The blocks that were written after `time`, and not before.
    pub fn blocks_after(&self, time: Instant) -> Vec<u64> {
        let after = self.batches.iter().filter(|batch| batch.from >= time);
        after.flat_map(|batch| batch.blocks.iter().copied()).collect()
    }
}

impl Bench<'_> {
    /// The rate of writes before, while and after a first snapshot is taken.
    pub async fn writes(&mut self, size: u64, seed: u64) -> Lived<()> {
        let time = self.plan.write_time;
        if time.is_zero() {
            return Ok(());
        }
        self.progress.step("random writes");
        let mut subject = self.subject(size, seed ^ 2, None).await?;
        let mut bare_pace = None;
        if let Some(bare) = &subject.bare {
            let trace = Workload::begin(bare.file(), bare.content.clone(), seed).end_after(time).await?;
            bare_pace = trace.before(Instant::now());
        }
        subject.bare = None;
        let workload = Workload::begin(subject.device.clone(), subject.content.clone(), seed);
        let writing = async {
            workload.go_on(time).await;
            Ok(())
        };
        self.quietly(writing).await?;
        let called = Instant::now();
        let taken = self.timed(self.plugin.create_snapshot(&subject.volume.id)).await;
        let answered = Instant::now();
        let trace = self.quietly(workload.end_after(time)).await?;
        subject.content = trace.content.clone();

        let paces = [
            ("before", trace.before(called)),
            ("during", trace.during(called, answered)),
            ("after", trace.after(answered)),
        ];
        let rates = paces.map(|(when, pace)| {
            let rate = format!("random writes {when} a snapshot");
            let pause = format!("longest {BATCH} writes and flush {when} a snapshot");
            let spots = [("write", rate), ("pause", pause)];
            let [rate, pause] = spots.map(|(id, what)| self.spot(&format!("{id}-{when}"), &what, size));
            (rate, pause, pace)
        });
        for (rate, pause, pace) in &rates {
            if let Some(bare) = bare_pace {
                let what = "the same writes to a file";
                self.book.bare(rate, what, bare.per_second);
                self.book.bare(pause, what, bare.slowest);
            }
            match pace {
                None => {
                    self.book.failed(rate, "no write ended in this time: a longer --write-time shows more")
                }
                Some(pace) => {
                    self.book.sample(rate, pace.per_second);
                    self.book.sample(pause, pace.slowest);
                }
            }
        }
        let id = match taken {
            Ok((id, _)) => id,
            Err(wrong) if wrong.code() == Some(Code::FailedPrecondition) => return Ok(()),
            Err(wrong) => return Err(wrong.into()),
        };
        // What was written after the answer is not in the snapshot, so the next delta has it.
        if self.plugin.claims.metadata {
            let next = self.quietly(self.plugin.create_snapshot(&subject.volume.id)).await?;
            let question = Question::Delta { base: id, target: next };
            let answer = self.quietly(stream(self.plugin, &question)).await?;
            let must = blocks(trace.blocks_after(answered));
            if let Err(wrong) = judge(&answer, "that were written after the snapshot", &must, subject.size) {
                for (rate, pause, _) in &rates[1..] {
                    self.book.wrong(rate, &wrong);
                    self.book.wrong(pause, &wrong);
                }
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_batch_counts_where_it_was() {
        let start = Instant::now();
        let at = |ms: u64| start + Duration::from_millis(ms);
        let batch =
            |from: u64, to: u64, block: u64| Batch { from: at(from), to: at(to), blocks: vec![block] };
        let trace = Trace {
            batches: vec![
                batch(0, 10, 1),
                batch(10, 20, 2),
                batch(20, 100, 3),
                batch(100, 110, 4),
                batch(110, 140, 5),
            ],
            content: Content::new(),
        };
        let pace = |pace: Option<Pace>| pace.map(|pace| (pace.per_second.round(), pace.slowest.round()));
        assert_eq!(pace(trace.before(at(25))), Some((6400.0, 10.0)));
        assert_eq!(pace(trace.during(at(25), at(90))), Some((800.0, 80.0)));
        assert_eq!(pace(trace.after(at(90))), Some((3200.0, 30.0)));
        assert_eq!(trace.blocks_after(at(90)), [4, 5]);
        assert_eq!(pace(trace.before(at(5))), None);
    }

    /// On a file: what it says that it wrote is there.
    #[tokio::test(flavor = "multi_thread")]
    async fn a_workload_writes_what_it_tells() {
        let dir = tempfile::tempdir().expect("temp dir");
        let path = dir.path().join("file");
        File::create(&path).and_then(|file| file.set_len(1 << 20)).expect("make a file");
        let mut content = Content::new();
        let stop = base::Stop::default();
        content.apply(&path, &[Edit::Write { start: 3, count: 100, seed: 1 }], &stop).expect("write");
        let workload = Workload::begin(path.clone(), content.clone(), 7);
        let trace = workload.end_after(Duration::from_millis(50)).await.expect("writes");
        trace.content.compare(&path, 1 << 20, &stop).expect("equal");
        assert!(content.compare(&path, 1 << 20, &stop).is_err(), "nothing changed");
        assert!(trace.batches.iter().flat_map(|batch| &batch.blocks).all(|block| (3..103).contains(block)));
    }
}
