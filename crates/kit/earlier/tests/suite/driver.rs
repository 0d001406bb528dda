//! A CSI driver that holds one volume in memory: its snapshots say of each block which content it has. The model that pages
//! are held against, and what drivers do wrong on demand; `first_draft` uses the real one.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::{Arc, Mutex};

use futures_util::{StreamExt, stream};
use proto::*;
use testkit::plugin::{Asked, Metadata, Served};
use tonic::Status;

use crate::world::World;

#[derive(Clone)]
pub struct Volume {
    pub style: BlockMetadataType,
    /// In bytes.
    pub block: u64,
    pub blocks: u64,
    /// The content of each block, by handle. 0 is a hole.
    pub snapshots: BTreeMap<String, Vec<u8>>,
}

impl Volume {
    /// Snapshots `s0` and `s1`: blocks 1, 2 and 5 of 8 differ; of them 2 and 5 are holes in `s1`.
    pub fn small() -> Self {
        Volume::pair(vec![7, 7, 7, 0, 7, 7, 0, 0], vec![7, 8, 0, 0, 7, 0, 0, 0])
    }

    /// Snapshots `s0` and `s1` with this content.
    pub fn pair(s0: Vec<u8>, s1: Vec<u8>) -> Self {
        let blocks = s0.len() as u64;
        let snapshots = [("s0".to_owned(), s0), ("s1".to_owned(), s1)].into();
        Volume { style: BlockMetadataType::FixedLength, block: 4096, blocks, snapshots }
    }

    /// Random snapshots `s0`, `s1` and on.
    pub fn random(random: &mut fastrand::Rng, snapshots: usize) -> Self {
        let style = match random.bool() {
            true => BlockMetadataType::FixedLength,
            false => BlockMetadataType::VariableLength,
        };
        let mut volume = Volume {
            style,
            block: 512 << random.u32(..8),
            blocks: random.u64(1..400),
            snapshots: BTreeMap::new(),
        };
        let mut content = vec![0; volume.blocks as usize];
        for number in 0..snapshots {
            for _ in 0..random.usize(..12) {
                let begin = random.usize(..content.len());
                let end = (begin + random.usize(1..40)).min(content.len());
                let fill = random.u8(..4);
                content[begin..end].fill(fill);
            }
            volume.snapshots.insert(format!("s{number}"), content.clone());
        }
        volume
    }

    pub fn capacity(&self) -> u64 {
        self.block * self.blocks
    }

    /// Tuples from the block with `from` on: offset and size.
    pub fn tuples(&self, base: Option<&str>, target: &str, from: u64) -> Result<Vec<(u64, u64)>, Status> {
        let find = |handle: &str| {
            let found = self.snapshots.get(handle);
            found.ok_or_else(|| Status::not_found(format!("snapshot {handle} does not exist")))
        };
        let target = find(target)?;
        let base = base.map(find).transpose()?;
        if from > self.capacity() {
            return Err(Status::out_of_range(format!("the volume has {} bytes", self.capacity())));
        }
        let is_listed = |at: usize| base.map_or(target[at] != 0, |base| base[at] != target[at]);
        let mut tuples: Vec<(u64, u64)> = Vec::new();
        for at in (from / self.block..self.blocks).filter(|at| is_listed(*at as usize)) {
            let offset = at * self.block;
            match tuples.last_mut() {
                Some((begin, size))
                    if self.style == BlockMetadataType::VariableLength && *begin + *size == offset =>
                {
                    *size += self.block;
                }
                _ => tuples.push((offset, self.block)),
            }
        }
        Ok(tuples)
    }

    pub fn is_hole(&self, snapshot: &str, (offset, size): (u64, u64)) -> bool {
        let content = &self.snapshots[snapshot];
        (offset / self.block..(offset + size) / self.block).all(|at| content[at as usize] == 0)
    }
}

/// A driver on a socket, until it is dropped.
pub struct Driver {
    pub volume: Arc<Mutex<Volume>>,
    /// Where each stream was to begin: of deltas, and of what is allocated.
    pub asked: Arc<Mutex<(Vec<i64>, Vec<i64>)>>,
    /// What came as secrets with deltas.
    pub secrets: Arc<Mutex<Vec<(String, String)>>>,
    _served: Served,
}

impl Driver {
    /// Of the small volume, and VolumeSnapshots of its two.
    pub async fn with_two_snapshots(world: &World) -> Self {
        let driver = Self::start(&world.driver, &world.csi, Volume::small());
        world.two_snapshots().await;
        driver
    }

    /// The same, and a DifferentialSnapshot `walk` of them.
    pub async fn asked_of_two(world: &World) -> Self {
        let driver = Self::start(&world.driver, &world.csi, Volume::small());
        world.ask_of_two().await;
        driver
    }

    /// How often it was asked what one snapshot holds. The end of a walk asks that too.
    pub fn asked_of_one(&self) -> usize {
        self.asked.lock().unwrap().1.len()
    }

    pub fn start(name: &str, socket: &Path, volume: Volume) -> Self {
        Self::start_with(name, socket, Some(volume))
    }

    /// Without its SnapshotMetadata service where there is no volume.
    pub fn start_with(name: &str, socket: &Path, volume: Option<Volume>) -> Self {
        let asked: Arc<Mutex<(Vec<_>, Vec<_>)>> = Arc::default();
        let secrets: Arc<Mutex<Vec<_>>> = Arc::default();
        let has_metadata = volume.is_some();
        let volume = Arc::new(Mutex::new(volume.unwrap_or_else(Volume::small)));
        let known = (volume.clone(), asked.clone(), secrets.clone());
        let answer = move |Asked { is_delta, request, .. }| {
            let (volume, asked, secrets) = known.clone();
            async move {
                let GetMetadataDeltaRequest { starting_offset: from, max_results, .. } = request;
                if is_delta {
                    asked.lock().unwrap().0.push(from);
                    secrets.lock().unwrap().extend(request.secrets);
                } else {
                    asked.lock().unwrap().1.push(from);
                    if request.target_snapshot_id == "slow" {
                        return std::future::pending().await;
                    }
                }
                let base = is_delta.then_some(request.base_snapshot_id.as_str());
                let messages =
                    volume.lock().unwrap().answer(base, &request.target_snapshot_id, from, max_results)?;
                Ok(stream::iter(messages.into_iter().map(Ok)).boxed())
            }
        };
        let _served = Served::start(name, socket, has_metadata.then_some(Metadata(answer)));
        Driver { volume, asked, secrets, _served }
    }
}

impl Volume {
    /// Messages of `max_results` tuples; one without any where there are none.
    fn answer(
        &self,
        base: Option<&str>,
        target: &str,
        from: i64,
        max_results: i32,
    ) -> Result<Vec<GetMetadataAllocatedResponse>, Status> {
        // It breaks the CSI spec.
        let tuples = match target {
            "out-of-order" => vec![(self.block, self.block), (0, self.block)],
            "too-long" => vec![(0, self.capacity() + 1)],
            _ => self.tuples(base, target, from as u64)?,
        };
        let message = |tuples: &[(u64, u64)]| {
            let tuple = |(offset, size): &(u64, u64)| BlockMetadata {
                byte_offset: *offset as i64,
                size_bytes: *size as i64,
            };
            GetMetadataAllocatedResponse {
                block_metadata_type: self.style.into(),
                volume_capacity_bytes: self.capacity() as i64,
                block_metadata: tuples.iter().map(tuple).collect(),
            }
        };
        let length = if max_results == 0 { 100 } else { max_results as usize };
        let messages: Vec<_> = tuples.chunks(length).map(message).collect();
        Ok(if messages.is_empty() { vec![message(&[])] } else { messages })
    }
}
