//! Published volumes that the suite writes to, and their snapshots with what is in them.

use std::path::PathBuf;

use super::content::{BLOCK, Content, Edit, apply, device_size};
use super::plugin::{Plugin, Volume};
use super::verdict::Wrong;
use csi_client::{Question, block_capability};

/// A snapshot and what is in it.
#[derive(Clone, Debug)]
pub(super) struct Snap {
    pub id: String,
    pub content: Content,
    /// The size of the device when it was taken.
    pub size: u64,
    /// The capacity that the driver had given of the volume by then.
    pub reported_size: i64,
}

impl Snap {
    pub fn allocated(&self) -> Question {
        Question::Allocated { snapshot: self.id.clone() }
    }

    pub fn since(&self, base: &Snap) -> Question {
        Question::Delta { base: base.id.clone(), target: self.id.clone() }
    }
}

/// A published volume that the suite writes to.
#[derive(Clone, Debug)]
pub(super) struct OpenVolume {
    pub volume: Volume,
    pub device: PathBuf,
    pub size: u64,
    pub reported_size: i64,
    pub content: Content,
}

impl Plugin {
    /// A new published Block volume.
    pub(super) async fn open(&self, from_snapshot: Option<&str>, bytes: u64) -> Result<OpenVolume, Wrong> {
        self.open_from(from_snapshot.map(csi_client::from_snapshot), bytes).await
    }

    /// The same from any source.
    pub(super) async fn open_from(
        &self,
        source: Option<proto::VolumeContentSource>,
        bytes: u64,
    ) -> Result<OpenVolume, Wrong> {
        let volume = self.create_volume(block_capability(), source, bytes).await?;
        let device = self.attach(&volume).await?;
        let size = device_size(&device)?;
        if size < bytes {
            let made = format!("a volume of {bytes} bytes was asked for, its device has {size}");
            return Err(Wrong::new(made));
        }
        let reported_size = volume.capacity;
        Ok(OpenVolume { volume, device, size, reported_size, content: Content::new() })
    }
}

impl OpenVolume {
    /// Writes to the device.
    pub async fn write(&mut self, edits: Vec<Edit>) -> Result<(), Wrong> {
        self.content = apply(self.content.clone(), self.device.clone(), edits).await?;
        Ok(())
    }

    pub async fn snapshot(&self, plugin: &Plugin) -> Result<Snap, Wrong> {
        Ok(self.taken(plugin.create_snapshot(&self.volume.id).await?))
    }

    /// The snapshot that was taken just now and has this id.
    pub fn taken(&self, id: String) -> Snap {
        Snap { id, content: self.content.clone(), size: self.size, reported_size: self.reported_size }
    }

    /// Writes 14 places, a few blocks each, at a distance from their begin that the seed says.
    pub async fn write_places(&mut self, seed: u64) -> Result<(), Wrong> {
        let step = self.blocks() / 16;
        let places = (1..15).map(|place| Edit::Write { start: place * step + seed, count: 3, seed });
        self.write(places.collect()).await
    }

    /// 4 KiB blocks of the device.
    pub fn blocks(&self) -> u64 {
        self.size / BLOCK
    }
}
