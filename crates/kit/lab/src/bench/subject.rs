//! A volume with data in it, published, and what changes in it; to compare with it, the same in a plain file.

use std::collections::BTreeSet;
use std::path::PathBuf;

use csi_client::block_capability;
use tonic::Code;

use super::bare::Bare;
use super::check::Size;
use super::figures::Spot;
use super::steps::{Bench, Lived, Over, Snap};
use crate::conformance::content::{BLOCK, Content, Edit, apply, device_size};
use crate::conformance::plugin::Volume;
use crate::conformance::verdict::Wrong;
use crate::random;

/// Blocks of a piece, in which data is written first.
const PIECE: u64 = 256;

/// A published volume with data, and the same without a driver.
pub(super) struct Subject {
    pub volume: Volume,
    pub device: PathBuf,
    pub size: Size,
    pub content: Content,
    /// Blocks with data, ascending; what changes is chosen among them.
    pub data: Vec<u64>,
    pub bare: Option<Bare>,
    pub seed: u64,
}

/// Chunks of a volume that are written, spread at random.
fn pieces(size: u64, bytes: u64, seed: u64) -> BTreeSet<u64> {
    let all = size / (PIECE * BLOCK);
    chosen(all, bytes / (PIECE * BLOCK), seed)
}

/// A share of `data`, one block at least.
fn some(data: &[u64], percent: f64, seed: u64) -> BTreeSet<u64> {
    let wanted = ((data.len() as f64 * percent / 100.0).round() as usize).clamp(1, data.len().max(1));
    chosen(data.len() as u64, wanted as u64, seed).into_iter().map(|at| data[at as usize]).collect()
}

/// So many of the numbers below `all`, or all of them.
fn chosen(all: u64, wanted: u64, seed: u64) -> BTreeSet<u64> {
    let mut chosen = BTreeSet::new();
    let mut place = 0;
    while (chosen.len() as u64) < wanted.min(all) {
        place += 1;
        let number = random::at(seed, place) % all;
        // Where most are taken, the next free one.
        let free = (number..all).chain(0..number).find(|number| !chosen.contains(number));
        chosen.extend(free);
    }
    chosen
}

impl Bench<'_> {
    pub async fn snapshot(&mut self, subject: &Subject, spot: &Spot) -> Lived<Snap> {
        let id = self.step(spot, self.plugin.create_snapshot(&subject.volume.id)).await?;
        Ok(Snap { id, content: subject.content.clone() })
    }

    /// A volume with data in it, and its space as the driver gave it before there was any.
    pub async fn subject(&mut self, size: u64, seed: u64, create: Option<&Spot>) -> Lived<Subject> {
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
        let real = device_size(&device)?;
        if real < size {
            let made = format!("a volume of {size} bytes was asked for, its device has {real}");
            return Err(Wrong::new(made).into());
        }
        let mut bare = None;
        if let Some(dir) = &self.plan.bare_dir
            && let Some((made, took)) = Bare::create(dir, real).await?
        {
            if let Some(spot) = create {
                self.book.bare(spot, "a sparse file, synced", took);
            }
            bare = Some(made);
        }
        let edits: Vec<Edit> = pieces(real, self.plan.data, seed)
            .into_iter()
            .map(|piece| Edit::Write { start: piece * PIECE, count: PIECE, seed: seed ^ 1 })
            .collect();
        let content = Content::new();
        let size = Size { device: real, told: volume.capacity };
        let mut subject = Subject { volume, device, size, content, data: Vec::new(), bare, seed };
        self.write(&mut subject, edits).await?;
        subject.data = subject.content.blocks();
        Ok(subject)
    }

    pub async fn write(&self, subject: &mut Subject, edits: Vec<Edit>) -> Lived<()> {
        if let Some(bare) = &mut subject.bare {
            bare.write(edits.clone()).await?;
        }
        let writing = apply(subject.content.clone(), subject.device.clone(), edits);
        subject.content = self.quietly(writing).await?;
        Ok(())
    }

    /// Changes this share of the data, in per cent.
    pub async fn change(&self, subject: &mut Subject, percent: f64) -> Lived<()> {
        subject.seed = random::at(subject.seed, 1);
        let seed = subject.seed;
        let edits = some(&subject.data, percent, seed).into_iter();
        let edits = edits.map(|start| Edit::Write { start, count: 1, seed }).collect();
        self.write(subject, edits).await
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
