//! What is measured: a volume's life from its creation to its deletion, with everything that is known of it checked on the way.

use std::collections::BTreeSet;
use std::future::Future;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use base::Quantity;
use csi_client::{Question, block_capability};
use tonic::Code;

use super::bare::Bare;
use super::check::{holds, judge, stream};
use super::figures::{Book, Spot, Unit};
use super::progress::Progress;
use super::writes::{BATCH, Workload};
use crate::conformance::case::Wrong;
use crate::conformance::content::{BLOCK, Content, Edit, apply, blocks, device_size};
use crate::conformance::plugin::{Plugin, Volume};
use crate::conformance::ranges::Ranges;
use crate::random;

/// Blocks of a piece, in which data is written first.
const PIECE: u64 = 256;
/// Per cent that change before a snapshot, where the number of snapshots is what is looked at.
const GROWTH: f64 = 1.0;

/// How long is waited at most until a driver says the same of its space twice.
const STILL: Duration = Duration::from_secs(5);

/// What is asked for on the command line.
#[derive(Clone, Debug)]
pub(super) struct Plan {
    pub sizes: Vec<u64>,
    /// Ascending.
    pub snapshots: Vec<u64>,
    pub runs: u64,
    pub data: u64,
    /// Per cent of the data.
    pub changed: Vec<f64>,
    pub settle: Duration,
    /// How long is written before and after a snapshot.
    pub write_time: Duration,
    pub bare_dir: Option<PathBuf>,
    pub patience: Duration,
}

impl Plan {
    /// How often progress is printed.
    pub fn steps(&self) -> u64 {
        let life = 8 + 3 * self.changed.len() as u64;
        let growth =
            4 * self.runs * self.snapshots.len() as u64 + self.snapshots.last().copied().unwrap_or(0);
        self.sizes.len() as u64 * self.runs * life + growth
    }
}

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

type Lived<T> = Result<T, Over>;

/// Measures on one driver.
pub(super) struct Bench<'a> {
    pub plugin: &'a Plugin,
    pub plan: &'a Plan,
    pub book: &'a mut Book,
    pub progress: &'a Progress,
    /// Whether GetCapacity is worth asking.
    pub tells_space: bool,
}

/// A published volume with data, and the same without a driver.
struct Subject {
    volume: Volume,
    device: PathBuf,
    size: u64,
    content: Content,
    /// Blocks with data, ascending; what changes is chosen among them.
    data: Vec<u64>,
    bare: Option<Bare>,
    seed: u64,
}

#[derive(Clone)]
struct Snap {
    id: String,
    content: Content,
}

/// Chunks of a volume that are written, spread at random.
fn pieces(size: u64, bytes: u64, seed: u64) -> BTreeSet<u64> {
    let all = size / (PIECE * BLOCK);
    let wanted = (bytes / (PIECE * BLOCK)).min(all);
    let mut chosen = BTreeSet::new();
    let mut place = 0;
    while (chosen.len() as u64) < wanted {
        place += 1;
        let piece = random::at(seed, place) % all;
        // Where most are taken, the next free one.
        let free = (piece..all).chain(0..piece).find(|piece| !chosen.contains(piece));
        chosen.extend(free);
    }
    chosen
}

/// So many per cent of `data`, one block at least.
fn some(data: &[u64], percent: f64, seed: u64) -> BTreeSet<u64> {
    let wanted = ((data.len() as f64 * percent / 100.0).round() as usize).clamp(1, data.len().max(1));
    let mut chosen = BTreeSet::new();
    let mut place = 0;
    while chosen.len() < wanted.min(data.len()) {
        place += 1;
        let at = (random::at(seed, place) % data.len() as u64) as usize;
        let free = (at..data.len()).chain(0..at).find(|at| !chosen.contains(&data[*at]));
        chosen.extend(free.map(|at| data[at]));
    }
    chosen
}

impl Bench<'_> {
    /// All that is planned. What went wrong beside the figures, and what could not be taken away.
    pub async fn measure(&mut self, troubles: &mut Vec<String>, left: &mut Vec<String>) {
        for size in &self.plan.sizes {
            for run in 1..=self.plan.runs {
                let place = format!("{}, run {run} of {}", Quantity(*size), self.plan.runs);
                self.progress.part(&place);
                let lived = self.life(*size, run).await;
                if !self.end(&place, lived, troubles, left).await {
                    break;
                }
            }
        }
        if let Some(size) = self.plan.sizes.first().filter(|_| !self.plan.snapshots.is_empty()) {
            let place = format!("{}, many snapshots", Quantity(*size));
            self.progress.part(&place);
            let grown = self.growth(*size).await;
            self.end(&place, grown, troubles, left).await;
        }
    }

    /// Takes away what a life has made. Whether another one is worth trying.
    async fn end(
        &mut self,
        place: &str,
        lived: Lived<()>,
        troubles: &mut Vec<String>,
        left: &mut Vec<String>,
    ) -> bool {
        if let Err(Over::Trouble(wrong)) = &lived {
            troubles.push(format!("{place}: {wrong}"));
        }
        let still = self.plugin.ledger().clean_up(self.plugin, self.plan.patience).await;
        for thing in still {
            if !left.contains(&thing) {
                left.push(thing);
            }
        }
        lived.is_ok() && left.is_empty()
    }

    /// Something that the driver does, within its time; what it returns, and its milliseconds.
    async fn timed<T>(&self, work: impl Future<Output = Result<T, Wrong>>) -> Result<(T, f64), Wrong> {
        let began = Instant::now();
        let ended = tokio::time::timeout(self.plan.patience, work).await;
        let took = began.elapsed().as_secs_f64() * 1000.0;
        Ok((ended.map_err(|_| self.plugin.late(self.plan.patience))??, took))
    }

    /// Measures it. The life is over where it fails.
    async fn step<T>(&mut self, spot: &Spot, work: impl Future<Output = Result<T, Wrong>>) -> Lived<T> {
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
    async fn quietly<T>(&self, work: impl Future<Output = Result<T, Wrong>>) -> Lived<T> {
        Ok(self.timed(work).await?.0)
    }

    fn spot(&self, id: &str, what: &str, size: u64) -> Spot {
        let spot = Spot { id: id.into(), what: what.into(), unit: Unit::Milliseconds, size, snapshots: None };
        Spot {
            unit: match id {
                _ if id.starts_with("space-") => Unit::Bytes,
                _ if id.starts_with("listed-") => Unit::Times,
                "write-before" | "write-during" | "write-after" => Unit::WritesPerSecond,
                _ => Unit::Milliseconds,
            },
            ..spot
        }
    }

    /// A volume with data in it, and its space as the driver gave it before there was any.
    async fn subject(&mut self, size: u64, seed: u64, create: Option<&Spot>) -> Lived<Subject> {
        let plugin = self.plugin;
        let making = plugin.create_volume(block_capability(), None, size);
        let volume = match self.timed(making).await {
            Ok((volume, took)) => {
                if let Some(spot) = create {
                    self.book.sample(spot, took);
                }
                volume
            }
            Err(wrong) => {
                let too_large = [Code::OutOfRange, Code::ResourceExhausted, Code::InvalidArgument];
                match (create, wrong.code().is_some_and(|code| too_large.contains(&code))) {
                    (Some(spot), true) => self.book.left_out(spot, wrong),
                    (Some(spot), false) => self.book.failed(spot, wrong),
                    (None, _) => return Err(wrong.into()),
                }
                return Err(Over::Noted);
            }
        };
        let device = self.quietly(plugin.attach(&volume)).await?;
        let told = device_size(&device)?;
        if told < size {
            let made = format!("a volume of {size} bytes was asked for, its device has {told}");
            return Err(Wrong::new(made).into());
        }
        let mut bare = None;
        if let Some(dir) = &self.plan.bare_dir {
            let (made, took) = Bare::create(dir, told).await?;
            if let Some(spot) = create {
                self.book.bare(spot, "a sparse file, synced", took);
            }
            bare = Some(made);
        }
        let edits: Vec<Edit> = pieces(told, self.plan.data, seed)
            .into_iter()
            .map(|piece| Edit::Write { start: piece * PIECE, count: PIECE, seed: seed ^ 1 })
            .collect();
        let content = Content::new();
        let mut subject = Subject { volume, device, size: told, content, data: Vec::new(), bare, seed };
        self.write(&mut subject, edits).await?;
        subject.data = subject.content.blocks();
        Ok(subject)
    }

    async fn write(&self, subject: &mut Subject, edits: Vec<Edit>) -> Lived<()> {
        if let Some(bare) = &mut subject.bare {
            bare.write(edits.clone()).await?;
        }
        let writing = apply(subject.content.clone(), subject.device.clone(), edits);
        subject.content = self.quietly(writing).await?;
        Ok(())
    }

    /// Changes so many per cent of the data.
    async fn change(&self, subject: &mut Subject, percent: f64) -> Lived<()> {
        subject.seed = random::at(subject.seed, 1);
        let seed = subject.seed;
        let edits = some(&subject.data, percent, seed).into_iter();
        let edits = edits.map(|start| Edit::Write { start, count: 1, seed }).collect();
        self.write(subject, edits).await
    }

    async fn snapshot(&mut self, subject: &Subject, spot: &Spot) -> Lived<Snap> {
        let id = self.step(spot, self.plugin.create_snapshot(&subject.volume.id)).await?;
        Ok(Snap { id, content: subject.content.clone() })
    }

    /// A delta, if the driver has them. What it lists for each byte that changed.
    async fn delta(&mut self, spot: &Spot, base: &Snap, target: &Snap, size: u64) -> Lived<Option<f64>> {
        let must = target.content.changed_since(&base.content);
        let question = Question::Delta { base: base.id.clone(), target: target.id.clone() };
        let told = self.ask(spot, question, "that changed", &must, size).await?;
        Ok(told.map(|told| told as f64 / must.bytes().max(1) as f64))
    }

    /// A stream, judged. None: the driver has none, or it is wrong.
    async fn ask(
        &mut self,
        spot: &Spot,
        question: Question,
        what: &str,
        must: &Ranges,
        size: u64,
    ) -> Lived<Option<u64>> {
        self.progress.step(&spot.what);
        if !self.plugin.claims.metadata {
            self.book.left_out(spot, "the driver does not claim SNAPSHOT_METADATA_SERVICE");
            return Ok(None);
        }
        match self.timed(stream(self.plugin, &question)).await {
            Ok((answer, took)) => match judge(&answer, what, must, size) {
                Ok(told) => {
                    self.book.sample(spot, took);
                    return Ok(Some(told));
                }
                Err(wrong) => self.book.wrong(spot, wrong),
            },
            Err(wrong) if wrong.code() == Some(Code::Unimplemented) => self.book.left_out(spot, wrong),
            Err(wrong) => self.book.failed(spot, wrong),
        }
        Ok(None)
    }

    /// What the driver says is left, if it does, once it says the same twice: deletions may go on behind the calls.
    async fn space(&mut self, volume: Option<&Volume>) -> Option<f64> {
        if !self.tells_space {
            return None;
        }
        // Whatever ends this, it is not tried again.
        self.tells_space = false;
        let request = proto::GetCapacityRequest {
            volume_capabilities: volume.map(|volume| vec![volume.capability.clone()]).unwrap_or_default(),
            parameters: self.plugin.settings.volume_parameters.clone(),
            accessible_topology: self.plugin.claims.topology.clone(),
        };
        let mut client = self.plugin.client();
        let began = Instant::now();
        let mut before = None;
        loop {
            let asked = client.controller.get_capacity(request.clone());
            let answer = tokio::time::timeout(self.plan.patience, asked).await.ok()?.ok()?;
            let told = answer.into_inner().available_capacity;
            if before == Some(told) {
                self.tells_space = true;
                return Some(told as f64);
            }
            if began.elapsed() > STILL {
                return None;
            }
            before = Some(told);
            tokio::time::sleep(STILL / 20).await;
        }
    }

    /// One run on a volume of one size.
    async fn life(&mut self, size: u64, run: u64) -> Lived<()> {
        let seed = random::at(size, run);
        self.progress.step("CreateVolume");
        let create = self.spot("create", "CreateVolume", size);
        let at_first = self.space(None).await;
        let mut subject = self.subject(size, seed, Some(&create)).await?;
        let size_told = subject.size;

        // Snapshots and what they tell.
        let first = self.spot("snapshot-first", "CreateSnapshot, the first", size);
        let copied = "a copy of the data to another sparse file, synced";
        if let Some(bare) = &subject.bare {
            self.book.bare(&first, copied, bare.copy("base").await?);
        }
        let mut last = self.snapshot(&subject, &first).await?;
        // Not before: some filesystems count what is written only once a snapshot, or time, has made them commit.
        let with_data = self.space(Some(&subject.volume)).await;
        let allocated = self.spot("allocated", "GetMetadataAllocated of it", size);
        if let Some(bare) = &subject.bare {
            self.book.bare(&allocated, "SEEK_DATA and SEEK_HOLE over a file", bare.walk().await?);
        }
        let question = Question::Allocated { snapshot: last.id.clone() };
        self.ask(&allocated, question, "with data", &last.content.data(), size_told).await?;

        let mut snaps = vec![last.clone()];
        for percent in self.plan.changed.clone() {
            self.change(&mut subject, percent).await?;
            let what = format!("CreateSnapshot after {percent} % changed");
            let spot = self.spot(&format!("snapshot-{percent}"), &what, size);
            let at_once = self.delta_spot(percent, false, size);
            if let Some(bare) = &subject.bare {
                let changed = subject.content.changed_since(&last.content);
                let read = bare.read_both("base", &changed).await?;
                self.book.bare(&spot, copied, bare.copy("base").await?);
                self.book.bare(&at_once, "reading what changed in both files", read);
            }
            let taken = self.snapshot(&subject, &spot).await?;
            let listed = self.delta(&at_once, &last, &taken, size_told).await?;
            let what = format!("delta of {percent} %: bytes listed for each that changed");
            let spot = self.spot(&format!("listed-{percent}"), &what, size);
            if let Some(listed) = listed {
                self.book.sample(&spot, listed);
            }
            last = taken;
            snaps.push(last.clone());
        }
        let with_snapshots = self.space(Some(&subject.volume)).await;
        if self.plugin.claims.metadata {
            tokio::time::sleep(self.plan.settle).await;
        }
        for (at, percent) in self.plan.changed.clone().into_iter().enumerate() {
            let later = self.delta_spot(percent, true, size);
            let (base, target) = (snaps[at].clone(), snaps[at + 1].clone());
            self.delta(&later, &base, &target, size_told).await?;
        }

        // Copies, which must hold what was written; the restored snapshot is not the last, so the volume has changed since.
        let (from, spot_of_it) = match self.plan.changed.len().checked_sub(2) {
            Some(at) => (&snaps[at + 1], format!("snapshot-{}", self.plan.changed[at])),
            None => (&snaps[0], "snapshot-first".to_owned()),
        };
        let restore = self.spot("restore", "CreateVolume from a snapshot", size);
        let source = csi_client::from_snapshot(&from.id);
        if let Some(bare) = &subject.bare {
            self.book.bare(&restore, copied, bare.copy("copy").await?);
            bare.remove("copy").await?;
        }
        let right = self.copy(&restore, source, &from.content, size_told).await?;
        if !right {
            // Whichever of the two calls is at fault.
            let spot = Spot { id: spot_of_it, ..restore.clone() };
            self.book.wrong(&spot, "the volume that is restored from it does not hold what was written");
        }
        let with_restored = self.space(Some(&subject.volume)).await;
        let clone = self.spot("clone", "CreateVolume from a volume", size);
        if self.plugin.claims.clone {
            if let Some(bare) = &subject.bare {
                self.book.bare(&clone, copied, bare.copy("copy").await?);
                bare.remove("copy").await?;
            }
            let source = csi_client::from_volume(&subject.volume.id);
            self.copy(&clone, source, &subject.content.clone(), size_told).await?;
        } else {
            self.progress.step(&clone.what);
            self.book.left_out(&clone, "the driver does not claim CLONE_VOLUME");
        }
        let with_clone = self.space(Some(&subject.volume)).await;

        // What it takes.
        let data = Quantity(self.plan.data);
        let follows =
            at_first.zip(with_data).is_none_or(|(before, after)| before - after >= data.0 as f64 / 2.0);
        let pairs = [
            ("space-data", "space of the data and its first snapshot", at_first.zip(with_data)),
            ("space-snapshots", "space of the further snapshots", with_data.zip(with_snapshots)),
            ("space-restored", "space of the restored volume", with_snapshots.zip(with_restored)),
            ("space-clone", "space of the clone", with_restored.zip(with_clone)),
        ];
        for (id, what, told) in pairs {
            let spot = self.spot(id, what, size);
            match told {
                None => {
                    self.book.not_told(&spot, "the driver does not claim GET_CAPACITY, does not answer it, or never says the same twice")
                }
                Some(_) if !follows => {
                    let why = format!(
                        "what GetCapacity tells does not follow what is written, {data} of data here"
                    );
                    self.book.not_told(&spot, why);
                }
                Some(_) if id == "space-clone" && !self.plugin.claims.clone => {
                    self.book.not_told(&spot, "the driver does not claim CLONE_VOLUME");
                }
                Some((before, after)) => self.book.sample(&spot, before - after),
            }
        }

        // Deletion.
        let delete = self.spot("delete-snapshot", "DeleteSnapshot", size);
        if let Some(bare) = &subject.bare {
            self.book.bare(&delete, "unlink of a copy, synced", bare.remove("base").await?);
        }
        for snap in snaps.iter().rev() {
            self.progress.message(&delete.what);
            match self.timed(self.plugin.delete_snapshot(&snap.id)).await {
                Ok(((), took)) => self.book.sample(&delete, took),
                Err(wrong) => {
                    self.book.failed(&delete, wrong);
                    return Err(Over::Noted);
                }
            }
        }
        self.progress.step(&delete.what);
        self.quietly(self.plugin.detach(&subject.volume.id)).await?;
        let delete = self.spot("delete-volume", "DeleteVolume", size);
        if let Some(bare) = &subject.bare {
            self.book.bare(&delete, "unlink of the file, synced", bare.remove("volume").await?);
        }
        self.step(&delete, self.plugin.delete_volume(&subject.volume.id)).await?;
        drop(subject);
        self.writes(size, seed).await
    }

    fn delta_spot(&self, percent: f64, later: bool, size: u64) -> Spot {
        let (id, what) = match later {
            false => {
                (format!("delta-{percent}-at-once"), format!("GetMetadataDelta of {percent} %, at once"))
            }
            true => (format!("delta-{percent}-later"), format!("GetMetadataDelta of {percent} %, later")),
        };
        self.spot(&id, &what, size)
    }

    /// Makes a volume from something, and looks whether it holds the same.
    async fn copy(
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

    /// The rate of writes before, while and after a first snapshot is taken.
    async fn writes(&mut self, size: u64, seed: u64) -> Lived<()> {
        let time = self.plan.write_time;
        if time.is_zero() {
            return Ok(());
        }
        self.progress.step("random writes");
        let mut subject = self.subject(size, seed ^ 2, None).await?;
        let mut bare_pace = None;
        if let Some(bare) = &subject.bare {
            let trace = Workload::begin(bare.file(), bare.content().clone(), seed).end_after(time).await?;
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

    /// What a volume's snapshots cost where it has many.
    async fn growth(&mut self, size: u64) -> Lived<()> {
        let mut subject = self.subject(size, random::at(size, 0), None).await?;
        let mut first: Option<Snap> = None;
        let mut last: Option<Snap> = None;
        let mut there = 0;
        for count in self.plan.snapshots.clone() {
            while there < count {
                self.progress.step(&format!("snapshot {} of {count}", there + 1));
                if there > 0 {
                    self.change(&mut subject, 0.01).await?;
                }
                let making = self.timed(self.plugin.create_snapshot(&subject.volume.id)).await;
                let id = match making {
                    Ok((id, _)) => id,
                    Err(wrong) if wrong.code() == Some(Code::ResourceExhausted) => {
                        let spot = self.spot("many-snapshot", "CreateSnapshot after 1 % changed", size);
                        self.book.left_out(&Spot { snapshots: Some(count), ..spot }, wrong);
                        return Ok(());
                    }
                    Err(wrong) => return Err(wrong.at(&format!("snapshot {}", there + 1)).into()),
                };
                let taken = Snap { id, content: subject.content.clone() };
                first.get_or_insert_with(|| taken.clone());
                last = Some(taken);
                there += 1;
            }
            let spot = |bench: &Self, id: &str, what: &str| Spot {
                snapshots: Some(count),
                ..bench.spot(id, what, size)
            };
            let take = spot(self, "many-snapshot", "CreateSnapshot after 1 % changed");
            let since_last = spot(self, "many-delta-last", "GetMetadataDelta from the one before");
            let since_first = spot(self, "many-delta-first", "GetMetadataDelta from the first");
            let delete = spot(self, "many-delete", "DeleteSnapshot");
            for _ in 0..self.plan.runs {
                let (Some(oldest), Some(base)) = (&first, &last) else { return Ok(()) };
                self.change(&mut subject, GROWTH).await?;
                let taken = self.snapshot(&subject, &take).await?;
                self.delta(&since_last, base, &taken, subject.size).await?;
                self.delta(&since_first, oldest, &taken, subject.size).await?;
                // The new one takes the place of the one before, so that there are as many in each run.
                self.step(&delete, self.plugin.delete_snapshot(&base.id)).await?;
                if oldest.id == base.id {
                    first = Some(taken.clone());
                }
                last = Some(taken);
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_and_changes_are_as_many_as_asked_for() {
        assert_eq!(pieces(64 << 20, 16 << 20, 1).len(), 16);
        // All of it, and more than all.
        assert_eq!(pieces(8 << 20, 8 << 20, 1), (0..8).collect());
        assert_eq!(pieces(8 << 20, 80 << 20, 1).len(), 8);
        assert_ne!(pieces(64 << 20, 16 << 20, 1), pieces(64 << 20, 16 << 20, 2));
        let data: Vec<u64> = (0..10_000).map(|block| block * 3).collect();
        for (percent, count) in [(0.01, 1), (0.000_1, 1), (1.0, 100), (10.0, 1000), (100.0, 10_000)] {
            let chosen = some(&data, percent, 7);
            assert_eq!(chosen.len(), count, "{percent}");
            assert!(chosen.iter().all(|block| data.binary_search(block).is_ok()));
        }
    }
}
