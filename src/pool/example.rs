//! A storage in a hundred lines, without root and without devices: the example of docs/port.md, and what `make unit` plays
//! whole lives of the driver on. A copy repeats the bytes, as on `dir`. But it is never torn, since nothing in these tests
//! writes during one, and the storage knows exactly what was written: it compares both copies when it is asked.

use std::collections::BTreeSet;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;

use super::backend::{Backend, Bytes, Changes, Copying};
use super::kind::{Kind, Otherwise};
use super::{Result, dir, probe};
use base::{ByteRange, Written};
use files::{Context, DataRanges};

pub(super) static KIND: Kind = Kind {
    name: "example",
    help: "Plain files that are compared; only in tests",
    fits: probe::tells_holes,
    otherwise: Otherwise::Refuse("its filesystem does not report holes"),
    open: |_, _| Ok(Box::new(Example)),
};

#[derive(Debug)]
struct Example;

impl Backend for Example {
    fn fill(&self, source: &File, target: &File, target_path: &Path, how: Copying<'_>) -> Result<()> {
        dir::sparse(source, target, target_path, Copying { sink: None, ..how })
    }

    fn changes<'f>(
        &self,
        _: Option<u64>,
        before: Option<&'f Bytes>,
        after: &'f File,
        after_path: &'f Path,
    ) -> Result<Changes<'f>> {
        let Some(before) = before else { return Ok(Changes::Unknown) };
        let written = differing(before, after, after_path)?;
        Ok(Changes::Written(Box::new(written.into_iter().map(Ok))))
    }

    fn compares_bytes(&self) -> bool {
        true
    }

    fn copies_atomically(&self) -> bool {
        true
    }
}

/// Bytes compared at once.
const STEP: u64 = 4096;

/// The steps in which two files differ, ascending. Where neither holds data there is nothing to compare.
fn differing(before: &Bytes, after: &File, after_path: &Path) -> Result<Vec<Written>> {
    let steps = |file: &File, path: &Path| -> Result<BTreeSet<u64>> {
        let end = file.metadata().context("stat", path)?.len();
        let ranges =
            DataRanges::of(file, path, ByteRange { start: 0, end }).collect::<files::Result<Vec<_>>>()?;
        Ok(ranges.iter().flat_map(|range| range.start / STEP..range.end.div_ceil(STEP)).collect())
    };
    let read = |file: &File, path: &Path, step: u64| -> Result<[u8; STEP as usize]> {
        let mut bytes = [0; STEP as usize];
        // A volume that grew is longer than its earlier copy, which then reads as zeros.
        file.read_at(&mut bytes, step * STEP).context_at("read", path, step * STEP)?;
        Ok(bytes)
    };
    let (held, holds) = (steps(before.file(), before.path())?, steps(after, after_path)?);
    let mut written = Vec::new();
    for step in &held | &holds {
        if read(before.file(), before.path(), step)? != read(after, after_path, step)? {
            let range = ByteRange { start: step * STEP, end: (step + 1) * STEP };
            written.push(Written { range, data: holds.contains(&step) });
        }
    }
    Ok(written)
}
