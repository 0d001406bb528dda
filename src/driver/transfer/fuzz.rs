//! Fuzz target: whatever another node answers to a transfer, a copy that is whole holds what that node gave hashes of, and zeros.

use std::collections::BTreeMap;
use std::os::unix::fs::FileExt;
use std::time::Instant;

use base::fuzz::Input;
use base::{BlockSize, ByteRange, DataDirKey, Stop, VolumeId};
use cbt::{BlockHash, SegmentIndex};
use roaring::RoaringBitmap;

use super::receive::Receiver;
use super::throttle::Throttle;
use crate::driver::volumes::incoming::Progress;
use crate::driver::volumes::remote::{Blocks, Opened, Remote, RemoteFault};

const BLOCK: usize = 4096;
const BLOCKS: u32 = 64;

/// A node that answers as the input says.
struct Hostile<'i> {
    input: Input<'i>,
    map: RoaringBitmap,
    left: Vec<u32>,
    /// The hash that it gave last for a block.
    given: BTreeMap<u32, BlockHash>,
}

fn content(block: u32) -> Vec<u8> {
    vec![block as u8 | 1; BLOCK]
}

impl Hostile<'_> {
    fn ranges(&mut self) -> Vec<ByteRange> {
        let count = self.input.u8() % 4;
        let mut range = || {
            let start = self.input.u16().into();
            ByteRange { start, end: start + u64::from(self.input.u16()) }
        };
        (0..count).map(|_| range()).collect()
    }

    fn give(&mut self, hashes: &[(u32, BlockHash)]) -> Vec<u8> {
        self.given.extend(hashes.iter().copied());
        hashes.iter().flat_map(|(_, hash)| *hash).collect()
    }

    /// Blocks with their holes and hashes as they have to be, where the holes are.
    fn honest(&mut self, count: usize) -> Blocks {
        let count = count.min(self.left.len());
        let blocks: Vec<u32> = self.left.drain(..count).collect();
        let mut whole: Vec<u8> = blocks.iter().flat_map(|block| content(*block)).collect();
        let holes = self.ranges();
        let mut data = Vec::new();
        let mut at = 0;
        for hole in &holes {
            let end = (hole.end as usize).min(whole.len());
            let start = (hole.start as usize).min(end);
            whole[start..end].fill(0);
            data.extend_from_slice(whole.get(at..start).unwrap_or_default());
            at = end;
        }
        data.extend_from_slice(whole.get(at..).unwrap_or_default());
        let hashes: Vec<_> = blocks
            .into_iter()
            .zip(whole.chunks(BLOCK).map(|block| *blake3::hash(block).as_bytes()))
            .collect();
        Blocks { data: data.into(), hashes: self.give(&hashes).into(), holes }
    }
}

impl Remote for Hostile<'_> {
    fn open(&mut self, _: &str, _: &Stop) -> Result<Opened, RemoteFault> {
        unreachable!("it is open")
    }

    fn map(&mut self, _: SegmentIndex, _: &Stop) -> Result<RoaringBitmap, RemoteFault> {
        let mut map = RoaringBitmap::new();
        for ByteRange { start, end } in self.ranges() {
            map.insert_range(start as u32 % (BLOCKS + 2)..end as u32 % (BLOCKS + 2));
        }
        if self.input.u8() == 255 {
            map.insert(self.input.u32());
        }
        self.map.clone_from(&map);
        Ok(map)
    }

    fn hashes(&mut self, _: SegmentIndex, blocks: &RoaringBitmap, _: &Stop) -> Result<Vec<u8>, RemoteFault> {
        let hashes: Vec<_> =
            blocks.iter().map(|block| (block, *blake3::hash(&content(block)).as_bytes())).collect();
        let mut hashes = self.give(&hashes);
        hashes.truncate(hashes.len().saturating_sub(self.input.u8().saturating_sub(250).into()));
        Ok(hashes)
    }

    fn read(&mut self, _: SegmentIndex, blocks: &RoaringBitmap, _: &Stop) -> Result<(), RemoteFault> {
        self.left = blocks.iter().collect();
        Ok(())
    }

    fn next(&mut self, _: &Stop) -> Result<Option<Blocks>, RemoteFault> {
        let (kind, count) = (self.input.u8(), self.input.u8());
        match kind {
            // Past the end of the input there are zeros.
            0 if self.left.is_empty() => Ok(None),
            0 => Ok(Some(self.honest(usize::MAX))),
            1..=200 => Ok(Some(self.honest(count.into()))),
            201 => Ok(None),
            202 => Err(RemoteFault::Gone("a snapshot".into())),
            _ => {
                let length = usize::from(self.input.u16());
                let data = self.input.bytes(length).to_vec();
                let hashes = self.input.bytes(count.into()).to_vec();
                let (given, _) = hashes.as_chunks();
                let blocks = self.left.drain(..given.len().min(self.left.len()));
                self.given.extend(blocks.zip(given.iter().copied()));
                Ok(Some(Blocks { data: data.into(), hashes: hashes.into(), holes: self.ranges() }))
            }
        }
    }

    fn close(&mut self) {}

    fn node(&self) -> &str {
        "another node"
    }
}

/// The input: which blocks hold data here before, whether they are as at the source, and the answers.
pub(crate) fn transfer(bytes: &[u8]) {
    let mut input = Input(bytes);
    let file = tempfile::NamedTempFile::new().expect("temp file");
    file.as_file().set_len(u64::from(BLOCKS) * BLOCK as u64).expect("set_len");
    let (ours, same) = (input.u8() % 64, input.u8());
    for block in (0..ours).map(u32::from) {
        let content = if same & 1 == 0 { content(block) } else { vec![same; BLOCK] };
        file.as_file().write_all_at(&content, u64::from(block) * BLOCK as u64).expect("write");
    }
    let mut remote = Hostile { input, map: RoaringBitmap::new(), left: Vec::new(), given: BTreeMap::new() };
    let opened = Opened {
        capacity: u64::from(BLOCKS) * BLOCK as u64,
        block_size: BlockSize::MIN,
        tracking: true,
        segments: vec![SegmentIndex(0)],
        allocated_blocks: BLOCKS.into(),
        relatives: Vec::new(),
        filesystem: None,
    };
    let received = Receiver {
        file: file.as_file(),
        path: file.path(),
        remote: &mut remote,
        opened: &opened,
        throttle: &Throttle::new(None),
        progress: &Progress::default(),
        stop: &Stop::default(),
        volume_id: &VolumeId::random(DataDirKey::random().expect("key")).expect("id"),
        logged: Instant::now(),
    }
    .receive();
    assert_eq!(file.as_file().metadata().expect("stat").len(), u64::from(BLOCKS) * BLOCK as u64);
    if received.is_err() {
        return;
    }
    let mut found = vec![0; BLOCK];
    for block in 0..BLOCKS {
        file.as_file().read_exact_at(&mut found, u64::from(block) * BLOCK as u64).expect("read");
        match remote.map.contains(block) {
            true => {
                assert_eq!(Some(blake3::hash(&found).as_bytes()), remote.given.get(&block), "block {block}")
            }
            false => assert!(found.iter().all(|byte| *byte == 0), "block {block} is not zeros"),
        }
    }
}
