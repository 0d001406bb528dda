//! The steps of the demo, and the report of them.

use std::error::Error;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::time::{Duration, Instant};

use serde::Serialize;

use super::draw;
use super::host::Host;
use base::{BlockSize, Quantity, Stop};
use csi_client::{BlockList, block_capability, from_snapshot, new_volume};
use fastrand::Rng;
use files::pattern::Image;
use files::punch_hole;
use proto::Volume;

type Result<T> = std::result::Result<T, Box<dyn Error>>;

const BLOCK: u64 = BlockSize::MIN.bytes();

/// What is printed.
#[derive(Serialize)]
pub(super) struct Report {
    verdict: &'static str,
    size_bytes: u64,
    total_ms: f64,
    steps: Vec<Step>,
    #[serde(skip)]
    live: bool,
    /// Why the text could not be printed, the first time.
    #[serde(skip)]
    unprinted: Option<io::Error>,
}

#[derive(Serialize)]
struct Step {
    name: String,
    ms: f64,
    result: String,
}

impl Report {
    /// An empty report; a live one prints each step when it is done.
    pub fn new(size: Quantity, live: bool) -> Self {
        let (verdict, steps) = ("failed", Vec::new());
        Report { verdict, size_bytes: size.0, total_ms: 0.0, steps, live, unprinted: None }
    }

    fn done(&mut self, name: &str, started: Instant, result: String) {
        let ms = millis(started.elapsed());
        self.say(format!("{:>4}  {name:<46} {ms:>9.1} ms   {result}\n", self.steps.len() + 1));
        self.steps.push(Step { name: name.to_owned(), ms, result });
    }

    /// Output that cannot be written ends no demo: it has to clean up.
    fn say(&mut self, text: String) {
        if self.live
            && let Err(error) = shell::print(&text)
        {
            self.unprinted.get_or_insert(error);
        }
    }

    /// Ends the report. An error: not all of it could be printed.
    pub fn verdict(&mut self, ok: bool, total: Duration) -> io::Result<()> {
        self.verdict = if ok { "ok" } else { "failed" };
        self.total_ms = millis(total);
        let (steps, seconds) = (self.steps.len(), total.as_secs_f64());
        self.say(match ok {
            true => {
                format!("\nOK: every tuple and every byte is as written. {steps} steps, {seconds:.1} s.\n")
            }
            false => format!("\nFAILED after {steps} steps, {seconds:.1} s.\n"),
        });
        match self.unprinted.take() {
            Some(error) => Err(error),
            None => shell::show(!self.live, self, String::new),
        }
    }
}

fn millis(duration: Duration) -> f64 {
    (duration.as_secs_f64() * 1e4).round() / 10.0
}

pub(super) struct Story<'d> {
    host: &'d mut Host,
    report: &'d mut Report,
    stop: &'d Stop,
    random: Rng,
    blocks: u64,
}

impl<'d> Story<'d> {
    pub fn new(host: &'d mut Host, report: &'d mut Report, stop: &'d Stop) -> Self {
        let blocks = report.size_bytes / BLOCK;
        Story { host, report, stop, random: Rng::with_seed(3314), blocks }
    }

    /// Plays all steps; the first difference ends it.
    pub async fn run(mut self) -> Result<()> {
        let volume = self.create("volume", None).await?;
        let (first, before) = self.write_and_snapshot(&volume).await?;
        let (second, after) = self.change_and_snapshot(&volume, &before).await?;

        self.stream_allocated(&second, &after).await?;
        let (delta, changed) = self.stream_delta(&first, &second, &before, &after).await?;
        let punched: Vec<u64> = {
            let held = after.allocated();
            changed.iter().copied().filter(|block| held.binary_search(block).is_err()).collect()
        };
        let map = draw::map(self.blocks, &after.allocated(), &written(&changed, &punched), &punched);
        self.report.say(format!("\n{map}\n"));

        let restored = self.restore("restore the second snapshot", &second, &after).await?;
        let source = self.restore("restore the first, to back it up", &first, &before).await?;
        let image = self.full_backup(&first, &source, &before).await?;
        self.incremental_backup(&delta, &restored, &image, &after).await?;
        self.delete_all(&[&volume, &restored, &source], &[&first, &second]).await
    }

    async fn create(&mut self, name: &str, from: Option<&str>) -> Result<Volume> {
        let started = Instant::now();
        let mut request = new_volume(name, self.report.size_bytes as i64, block_capability());
        request.volume_content_source = from.map(from_snapshot);
        let volume = self.host.client.create_volume(request).await?;
        if from.is_none() {
            let size = Quantity(volume.capacity_bytes as u64);
            self.report.done("create a Block volume", started, format!("{size}, sparse"));
        }
        Ok(volume)
    }

    async fn write_and_snapshot(&mut self, volume: &Volume) -> Result<(String, Image)> {
        let started = Instant::now();
        let device = self.host.attach(&volume.volume_id, false).await?;
        self.report.done("stage and publish it", started, "a loop device at the target".into());

        let started = Instant::now();
        let mut image = Image::default();
        let file = File::options().read(true).write(true).open(&device)?;
        for region in 0..24 {
            self.stop.check()?;
            let length = 16 + self.random.u64(0..self.blocks / 48);
            let start = self.random.u64(0..self.blocks - length);
            image.write(&file, start, length, region)?;
        }
        // Not synced: a snapshot must hold what was written, flushed or not.
        let bytes = Quantity(image.allocated().len() as u64 * BLOCK);
        self.report.done("write 24 regions, buffered", started, format!("{bytes} in all"));
        drop(file);

        let first = self.snapshot("first", volume).await?;
        Ok((first, image))
    }

    async fn change_and_snapshot(&mut self, volume: &Volume, before: &Image) -> Result<(String, Image)> {
        let started = Instant::now();
        let mut image = before.clone();
        let held = before.allocated();
        let device = self.host.attach(&volume.volume_id, false).await?;
        let file = File::options().read(true).write(true).open(&device)?;
        for seed in 100..148 {
            self.stop.check()?;
            let start = held[self.random.u64(0..held.len() as u64) as usize];
            let count = (1 + self.random.u64(0..64)).min(self.blocks - start);
            image.write(&file, start, count, seed)?;
        }
        for region in 200..203 {
            let start = self.random.u64(0..self.blocks - 64);
            image.write(&file, start, 64, region)?;
        }
        self.report.done("change 48 places, write 3 new regions", started, "buffered".into());

        let started = Instant::now();
        for _ in 0..200 {
            let block = held[self.random.u64(0..held.len() as u64) as usize];
            image.rewrite_same(&file, block)?;
        }
        self.report.done("rewrite 200 blocks with the same bytes", started, "must not be reported".into());

        let started = Instant::now();
        let mut punched = 0;
        for _ in 0..12 {
            let start = held[self.random.u64(0..held.len() as u64) as usize];
            let count = (1 + self.random.u64(0..200)).min(self.blocks - start);
            image.punch(&file, start, count)?;
            punched += count;
        }
        self.report.done("punch 12 ranges", started, format!("{punched} blocks"));
        drop(file);

        let second = self.snapshot("second", volume).await?;
        Ok((second, image))
    }

    async fn snapshot(&mut self, name: &str, volume: &Volume) -> Result<String> {
        self.stop.check()?;
        let started = Instant::now();
        let snapshot = self.host.client.create_snapshot(name, &volume.volume_id).await?;
        self.report.done(&format!("take the {name} snapshot"), started, "while published".into());
        Ok(snapshot.snapshot_id)
    }

    async fn stream_allocated(&mut self, snapshot: &str, image: &Image) -> Result<()> {
        self.stop.check()?;
        let started = Instant::now();
        let list = self.host.client.allocated(snapshot, 0, 0).await?;
        equal("GetMetadataAllocated", &blocks_of(&list), &image.allocated())?;
        self.report.done("GetMetadataAllocated of the second", started, summary(&list));
        Ok(())
    }

    async fn stream_delta(
        &mut self,
        first: &str,
        second: &str,
        before: &Image,
        after: &Image,
    ) -> Result<(BlockList, Vec<u64>)> {
        self.stop.check()?;
        let started = Instant::now();
        let list = self.host.client.delta(first, second, 0, 0).await?;
        let changed = blocks_of(&list);
        equal("GetMetadataDelta", &changed, &after.changed_since(before))?;
        self.report.done("GetMetadataDelta from first to second", started, summary(&list));
        Ok((list, changed))
    }

    /// Restores a snapshot into a new volume, publishes that for reading and compares every byte.
    async fn restore(&mut self, title: &str, snapshot: &str, image: &Image) -> Result<Volume> {
        self.stop.check()?;
        let started = Instant::now();
        let volume = self.create(title, Some(snapshot)).await?;
        let device = self.host.attach(&volume.volume_id, true).await?;
        self.report.done(title, started, "published read-only".into());
        let started = Instant::now();
        image.compare(&device, self.report.size_bytes, self.stop)?;
        self.report.done("compare it byte by byte", started, "equal".into());
        Ok(volume)
    }

    async fn full_backup(
        &mut self,
        snapshot: &str,
        volume: &Volume,
        image: &Image,
    ) -> Result<std::path::PathBuf> {
        self.stop.check()?;
        let started = Instant::now();
        let backup = self.host.scratch("backup.img");
        let list = self.host.client.allocated(snapshot, 0, 0).await?;
        let file = File::options().read(true).write(true).create_new(true).open(&backup)?;
        file.set_len(list.capacity)?;
        let source = self.host.attach(&volume.volume_id, true).await?;
        copy_tuples(&source, &file, &list, self.stop)?;
        let copied = Quantity(list.bytes());
        self.report.done("full backup, driven by the tuples", started, format!("{copied} copied"));
        let started = Instant::now();
        image.compare(&backup, self.report.size_bytes, self.stop)?;
        self.report.done("compare the backup with the first snapshot", started, "equal".into());
        Ok(backup)
    }

    async fn incremental_backup(
        &mut self,
        delta: &BlockList,
        volume: &Volume,
        backup: &Path,
        image: &Image,
    ) -> Result<()> {
        self.stop.check()?;
        let started = Instant::now();
        let file = File::options().read(true).write(true).open(backup)?;
        let source = self.host.attach(&volume.volume_id, true).await?;
        copy_tuples(&source, &file, delta, self.stop)?;
        let copied = Quantity(delta.bytes());
        self.report.done("incremental backup on top of it", started, format!("{copied} copied"));
        let started = Instant::now();
        image.compare(backup, self.report.size_bytes, self.stop)?;
        self.report.done("compare the backup with the second snapshot", started, "equal".into());
        Ok(())
    }

    async fn delete_all(&mut self, volumes: &[&Volume], snapshots: &[&str]) -> Result<()> {
        let started = Instant::now();
        for volume in volumes {
            self.host.detach(&volume.volume_id).await?;
            self.host.client.delete_volume(&volume.volume_id).await?;
        }
        for snapshot in snapshots {
            self.host.client.delete_snapshot(snapshot).await?;
        }
        let count = format!("{} volumes, {} snapshots", volumes.len(), snapshots.len());
        self.report.done("unpublish and delete everything", started, count);
        Ok(())
    }
}

/// Copies the ranges of `list`, as a backup tool does; zeros become holes.
fn copy_tuples(source: &Path, target: &File, list: &BlockList, stop: &Stop) -> Result<()> {
    let source = File::open(source)?;
    let mut buffer = Vec::new();
    for tuple in list.tuples() {
        let (mut offset, end) = (tuple.offset, tuple.offset + tuple.size);
        while offset < end {
            stop.check()?;
            buffer.resize((end - offset).min(1 << 20) as usize, 0);
            source.read_exact_at(&mut buffer, offset)?;
            match buffer.iter().all(|byte| *byte == 0) {
                true => punch_hole(target, offset, buffer.len() as u64)?,
                false => target.write_all_at(&buffer, offset)?,
            }
            offset += buffer.len() as u64;
        }
    }
    Ok(())
}

fn blocks_of(list: &BlockList) -> Vec<u64> {
    list.tuples()
        .flat_map(|tuple| tuple.offset / BLOCK..(tuple.offset + tuple.size).div_ceil(BLOCK))
        .collect()
}

fn written(changed: &[u64], punched: &[u64]) -> Vec<u64> {
    changed.iter().copied().filter(|block| punched.binary_search(block).is_err()).collect()
}

fn equal(call: &str, listed: &[u64], wanted: &[u64]) -> Result<()> {
    if listed == wanted {
        return Ok(());
    }
    let missing = wanted.iter().filter(|block| listed.binary_search(block).is_err()).count();
    let extra = listed.iter().filter(|block| wanted.binary_search(block).is_err()).count();
    Err(format!("{call} is wrong: {missing} blocks missing, {extra} too many").into())
}

fn summary(list: &BlockList) -> String {
    let (count, bytes) = (list.tuples().count(), Quantity(list.bytes()));
    format!("exact: {count} tuples, {bytes}")
}
