//! The image that is backed up: pieces of 1 MiB of data, spread evenly.

use std::fs::File;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use fastrand::Rng;

pub const PIECE: u64 = 1 << 20;
pub const BLOCK: u64 = 4096;

/// What the data is.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Content {
    /// Random bytes: they do not compress.
    Noise,
    /// Every other piece is text.
    Mixed,
}

/// An image and where its data lies.
pub struct Source {
    path: PathBuf,
    pieces: Vec<u64>,
    pub size: u64,
    random: Rng,
}

impl Source {
    /// `data` bytes, spread over all of an image of `size` bytes.
    pub fn make(path: &Path, size: u64, data: u64, content: Content) -> Self {
        Self::make_within(path, size, size, data, content)
    }

    /// The same, spread over the first `span` bytes.
    pub fn make_within(path: &Path, size: u64, span: u64, data: u64, content: Content) -> Self {
        let mut random = Rng::with_seed(5);
        let file = File::create(path).expect("create");
        file.set_len(size).expect("set the length");
        let step = span / (data / PIECE);
        let pieces: Vec<u64> = (0..data / PIECE).map(|number| number * step).collect();
        let words: Vec<String> = (0..2000)
            .map(|_| {
                let length = random.usize(2..9);
                std::iter::repeat_with(|| random.lowercase()).take(length).collect()
            })
            .collect();
        let mut bytes = vec![0; PIECE as usize];
        for (number, offset) in pieces.iter().enumerate() {
            match content == Content::Mixed && number % 2 == 1 {
                true => text(&mut random, &words, &mut bytes),
                false => random.fill(&mut bytes),
            }
            file.write_all_at(&bytes, *offset).expect("write");
        }
        file.sync_all().expect("flush");
        Source { path: path.to_owned(), pieces, size, random }
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    pub fn ranges(&self) -> Vec<Range<u64>> {
        self.pieces.iter().map(|start| *start..start + PIECE).collect()
    }

    /// Writes random blocks of the data, and says which.
    pub fn change(&mut self, count: u64) -> Vec<Range<u64>> {
        let file = File::options().write(true).open(&self.path).expect("open");
        let mut offsets: Vec<u64> = (0..count)
            .map(|_| {
                self.pieces[self.random.usize(..self.pieces.len())] + self.random.u64(..PIECE / BLOCK) * BLOCK
            })
            .collect();
        offsets.sort_unstable();
        offsets.dedup();
        let mut block = vec![0; BLOCK as usize];
        let mut ranges: Vec<Range<u64>> = Vec::new();
        for offset in offsets {
            self.random.fill(&mut block);
            file.write_all_at(&block, offset).expect("write");
            match ranges.last_mut().filter(|last| last.end == offset) {
                Some(last) => last.end += BLOCK,
                None => ranges.push(offset..offset + BLOCK),
            }
        }
        ranges
    }
}

fn text(random: &mut Rng, words: &[String], mut bytes: &mut [u8]) {
    while !bytes.is_empty() {
        let word = words[random.usize(..words.len())].as_bytes();
        let length = word.len().min(bytes.len());
        bytes[..length].copy_from_slice(&word[..length]);
        bytes = &mut bytes[length..];
        if let Some(space) = bytes.first_mut() {
            *space = b' ';
            bytes = &mut bytes[1..];
        }
    }
}
