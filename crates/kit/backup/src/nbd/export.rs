//! A backup as a disk: what was read last is remembered, since clients read the same parts again.

use std::collections::VecDeque;
use std::sync::Arc;

use parking_lot::Mutex;

use super::{Disk, PREFERRED, Status};
use crate::error::Result;
use crate::repository::pack::Packs;
use crate::repository::{BLOCK, Index, Piece, Repository, SEGMENT, pieces};

/// Maps of segments that are remembered, and parts of 256 KiB with their bytes: 64 MiB.
const SEGMENTS: usize = 64;
const PART: u64 = PREFERRED as u64;
const PARTS: usize = 256;

pub struct Export {
    repository: Repository,
    index: Index,
    sector: u32,
    segments: Mutex<VecDeque<(u32, Arc<Vec<Piece>>)>>,
    parts: Mutex<VecDeque<(u64, Arc<Vec<u8>>)>>,
}

/// Looks for something among what was used last, and makes it where it is not there.
fn remembered<K: Copy + PartialEq, V>(
    queue: &Mutex<VecDeque<(K, Arc<V>)>>,
    key: K,
    most: usize,
    make: impl FnOnce() -> Result<V>,
) -> Result<Arc<V>> {
    {
        let mut queue = queue.lock();
        let place = queue.iter().position(|(of, _)| *of == key);
        if let Some((_, value)) = place.and_then(|place| queue.remove(place)) {
            queue.push_back((key, value.clone()));
            return Ok(value);
        }
    }
    let value = Arc::new(make()?);
    let mut queue = queue.lock();
    queue.push_back((key, value.clone()));
    if queue.len() > most {
        queue.pop_front();
    }
    Ok(value)
}

impl Export {
    /// A backup with sectors of 512 or 4096 bytes.
    pub fn new(repository: Repository, index: Index, sector: u32) -> Self {
        Export { repository, index, sector, segments: Mutex::default(), parts: Mutex::default() }
    }

    fn segment(&self, number: u32) -> Result<Arc<Vec<Piece>>> {
        remembered(&self.segments, number, SEGMENTS, || {
            let mut packs = Packs::default();
            let segment = self.repository.segment_at(&self.index, number, &mut packs)?;
            Ok(pieces(number, &segment.extents, &packs))
        })
    }

    fn part(&self, number: u64) -> Result<Arc<Vec<u8>>> {
        remembered(&self.parts, number, PARTS, || {
            let (start, end) = (number * PART, (number + 1) * PART);
            let segment = self.segment((start / SEGMENT) as u32)?;
            let last = |piece: &Piece| piece.offset + u64::from(piece.blocks) * BLOCK;
            let first = segment.partition_point(|piece| last(piece) <= start);
            let inside = segment[first..].iter().take_while(|piece| piece.offset < end).map(|piece| {
                let (from, to) = (piece.offset.max(start), last(piece).min(end));
                Piece {
                    offset: from,
                    blocks: ((to - from) / BLOCK) as u32,
                    skip: piece.skip + ((from - piece.offset) / BLOCK) as u32,
                    ..*piece
                }
            });
            let mut bytes = vec![0; PART as usize];
            self.repository.fetch(inside.collect(), &mut |piece, content| {
                let at = (piece.offset - start) as usize;
                bytes[at..at + content.len()].copy_from_slice(content);
                Ok(())
            })?;
            Ok(bytes)
        })
    }
}

impl Disk for Export {
    fn name(&self) -> &str {
        &self.index.about.id
    }

    /// Behind the end of the volume there are zeros.
    fn size(&self) -> u64 {
        self.index.about.size.next_multiple_of(self.sector.into())
    }

    fn sector(&self) -> u32 {
        self.sector
    }

    fn read(&self, offset: u64, length: u32) -> Result<Vec<u8>> {
        let end = offset + u64::from(length);
        let mut bytes = Vec::with_capacity(length as usize);
        let mut position = offset;
        while position < end {
            let part = self.part(position / PART)?;
            let from = (position % PART) as usize;
            let to = (from as u64 + (end - position)).min(PART) as usize;
            bytes.extend_from_slice(&part[from..to]);
            position += (to - from) as u64;
        }
        Ok(bytes)
    }

    fn status(&self, offset: u64, length: u32, most: usize) -> Result<Vec<Status>> {
        let end = offset + u64::from(length);
        let mut parts: Vec<Status> = Vec::new();
        let mut position = offset;
        while position < end && parts.len() <= most {
            let number = (position / SEGMENT) as u32;
            let stop = end.min((u64::from(number) + 1) * SEGMENT);
            let mut until = |next: u64, is_data: bool| {
                let length = next.saturating_sub(position);
                match parts.last_mut().filter(|last| last.1 == is_data) {
                    Some(last) => last.0 += length,
                    None if length > 0 => parts.push((length, is_data)),
                    None => {}
                }
                position = position.max(next);
            };
            let is_empty = self.index.segment(number).is_none();
            // Those that hold nothing are many, and are not remembered.
            let segment = if is_empty { Arc::default() } else { self.segment(number)? };
            for piece in segment.iter().take_while(|piece| piece.offset < stop) {
                until(piece.offset, false);
                until(stop.min(piece.offset + u64::from(piece.blocks) * BLOCK), true);
            }
            until(stop, false);
        }
        parts.truncate(most);
        Ok(parts)
    }
}
