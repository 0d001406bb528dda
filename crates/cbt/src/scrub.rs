//! Holding the maps and hashes of a snapshot against its data.

use std::fs::File;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rayon::prelude::*;
use roaring::RoaringBitmap;

use super::allocation::Allocation;
use super::delta::{DeltaScan, Side};
use super::hash::hash_each;
use super::hashfile::{HashFile, HashReader};
use super::segment::{MapFile, SegmentIndex, all_indexes, locate};
use super::walk::{Found, Members};
use super::{Error, Result};
use base::{Block, BlockRange, BlockSize, ByteRange, ObjectDir, Stop};
use files::Context;
use files::DataRanges;

/// Bytes that one core reads and hashes at once.
const SHARE: u64 = 1 << 20;

/// Something that is not as it was written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Finding {
    /// What is wrong.
    pub what: String,
    /// The bytes of the snapshot that it is about; `None` for all.
    pub range: Option<ByteRange>,
}

/// What a scrub counts while it runs: bytes of data looked at.
pub type Progress<'p> = &'p (dyn Fn(u64) + Sync);

/// Reads all data and all maps of a snapshot and reports what does not agree. `Ok` also when it found
/// much; an error means that it could not look.
///
/// Blocks that are not hashed yet are counted, and compared with nothing.
pub fn scrub(dir: &ObjectDir, size: BlockSize, progress: Progress<'_>, stop: &Stop) -> Result<Vec<Finding>> {
    let mut findings = Vec::new();
    let path = dir.data();
    let data = File::open(&path).context("open", &path)?;
    // `pending` before the hashes: a slot is written before its block leaves `pending`.
    let pending = sound_map(&dir.pending(), &mut findings)?;
    sound_map(&dir.changed(), &mut findings)?;
    skip_maps(dir, &mut findings)?;
    let allocated = sound_map(&dir.allocated(), &mut findings)?;
    let hashes = HashFile::open(&dir.hashes())?;
    let length = data.metadata().context("stat", &path)?.len();
    for index in segments(&data, dir, length, allocated.as_ref(), size)? {
        stop.check()?;
        let found = Allocation::scan(&data, &path, size, size.blocks_in(length), index)?;
        if let Some(Ok(claimed)) = allocated.as_ref().map(|map| map.segment(index)) {
            for run in runs(index, &claimed ^ &found) {
                let what = "allocated.map and the data do not agree".to_owned();
                findings.push(Finding { what, range: Some(run.bytes(size)) });
            }
        }
        let unhashed = match pending.as_ref().map(|map| map.segment(index)) {
            Some(Ok(pending)) => pending,
            // Reported above; no slot is known to count.
            _ => found.clone(),
        };
        progress((&found & &unhashed).len() * size.bytes());
        let wrong = wrong_blocks(&data, dir, &hashes, size, runs(index, found - unhashed), progress, stop)?;
        for what in [UNREADABLE, UNLIKE, UNHASHED] {
            let such = wrong.iter().filter(|(_, why)| *why == what);
            for run in runs(index, such.map(|(block, _)| locate(*block).1).collect()) {
                findings.push(Finding { what: what.to_owned(), range: Some(run.bytes(size)) });
            }
        }
    }
    Ok(findings)
}

/// Reads the maps of a snapshot, every segment with its checksum, and reports what is not as it was written, or
/// not there. The hashes are only opened: [`scrub`] reads them.
pub fn check_maps(dir: &ObjectDir, size: BlockSize, capacity: u64, tracking: bool) -> Result<Vec<Finding>> {
    let mut findings = Vec::new();
    let wanted = match tracking {
        true => vec![dir.allocated(), dir.changed(), dir.pending()],
        false => vec![dir.allocated()],
    };
    let is_of_another = |map: &MapFile| {
        let is_of_another =
            map.header().block_size != size || map.header().blocks != size.blocks_in(capacity);
        let what = || format!("{} is that of another snapshot", file_name(map.path()));
        is_of_another.then(|| Finding { what: what(), range: None })
    };
    let skips = skip_maps(dir, &mut findings)?;
    findings.extend(skips.iter().filter_map(is_of_another));
    for path in wanted {
        if !path.exists() {
            let what = format!("{} is missing", file_name(&path));
            findings.push(Finding { what, range: None });
        } else if let Some(map) = sound_map(&path, &mut findings)? {
            findings.extend(is_of_another(&map));
        }
    }
    if tracking && !dir.hashes().exists() {
        findings.push(Finding { what: "hashes is missing".to_owned(), range: None });
    }
    Ok(findings)
}

/// Compares two snapshots as a whole, and reports the blocks that differ and are not in `map`, a `changed` or skip map of
/// `dir` that is relative to `base`.
pub fn check_changed(base: &ObjectDir, dir: &ObjectDir, map: &MapFile, stop: &Stop) -> Result<Vec<Finding>> {
    let size = map.header().block_size;
    let side = |dir| Side::open(dir, Arc::default());
    let mut scan = DeltaScan::new(side(base)?, side(dir)?, None, Block(0));
    let mut findings: Vec<Finding> = Vec::new();
    let (mut at, mut listed) = (None, RoaringBitmap::new());
    loop {
        let run = match scan.next_run(stop, Instant::now() + Duration::from_secs(1))? {
            Found::Run(run) => run,
            Found::Nothing => continue,
            Found::End => return Ok(findings),
        };
        for block in run.blocks() {
            let (index, within) = locate(block);
            if at != Some(index) {
                (at, listed) = (Some(index), map.segment_or_all(index)?);
            }
            if listed.contains(within) {
                continue;
            }
            let bytes = BlockRange::one(block).bytes(size);
            match findings.last_mut().and_then(|last| last.range.as_mut()) {
                Some(last) if last.end == bytes.start => last.end = bytes.end,
                _ => {
                    let what = format!("{} lacks blocks that differ", file_name(map.path()));
                    findings.push(Finding { what, range: Some(bytes) });
                }
            }
        }
    }
}

/// The skip maps that are there. A driver may remove one at any time.
fn skip_maps(dir: &ObjectDir, findings: &mut Vec<Finding>) -> Result<Vec<MapFile>> {
    let mut maps = Vec::new();
    for level in ObjectDir::SKIPS {
        match sound_map(&dir.skip(level), findings) {
            Err(Error::Sys(error)) if error.is_not_found() => {}
            map => maps.extend(map?),
        }
    }
    Ok(maps)
}

fn file_name(path: &Path) -> std::borrow::Cow<'_, str> {
    path.file_name().unwrap_or_default().to_string_lossy()
}

/// A map whose table is sound; damaged segments are reported and left to the caller.
fn sound_map(path: &Path, findings: &mut Vec<Finding>) -> Result<Option<MapFile>> {
    let name = file_name(path);
    let mut tell = |what, range| findings.push(Finding { what: format!("{name}: {what}"), range });
    let map = match MapFile::open(path) {
        Err(Error::Damaged { what, .. }) => {
            tell(what, None);
            return Ok(None);
        }
        map => map?,
    };
    for index in map.indexes() {
        match map.segment(index) {
            Err(Error::Damaged { what, .. }) => {
                let size = map.header().block_size;
                tell(what, Some(index.blocks().bytes(size)));
            }
            segment => drop(segment?),
        }
    }
    Ok(Some(map))
}

/// The segments in which there is data, or a map says so.
fn segments(
    data: &File,
    dir: &ObjectDir,
    length: u64,
    allocated: Option<&MapFile>,
    size: BlockSize,
) -> Result<Vec<SegmentIndex>> {
    let mut indexes = all_indexes(allocated.into_iter());
    let mut start = 0;
    while let Some(range) = DataRanges::of(data, &dir.data(), ByteRange { start, end: length }).next() {
        let index = locate(size.block_of(range?.start)).0;
        indexes.push(index);
        start = index.blocks().bytes(size).end;
    }
    indexes.sort_unstable();
    indexes.dedup();
    Ok(indexes)
}

fn runs(index: SegmentIndex, members: RoaringBitmap) -> Vec<BlockRange> {
    let mut members = Members::new(index, members);
    std::iter::from_fn(|| members.next_run()).collect()
}

const UNREADABLE: &str = "the data cannot be read";
const UNLIKE: &str = "the data is not what was hashed";
const UNHASHED: &str = "the page of their hashes is damaged, or was never written";

/// The blocks whose content is not known to be what was hashed, ascending, and why not.
fn wrong_blocks(
    data: &File,
    dir: &ObjectDir,
    hashes: &HashFile,
    size: BlockSize,
    runs: Vec<BlockRange>,
    progress: Progress<'_>,
    stop: &Stop,
) -> Result<Vec<(Block, &'static str)>> {
    let at_once = (SHARE / size.bytes()).max(1);
    let shares: Vec<BlockRange> = runs
        .into_iter()
        .flat_map(|run| {
            let share = move |start| BlockRange { start, end: run.end.min(start + at_once) };
            run.blocks().step_by(at_once as usize).map(share)
        })
        .collect();
    let buffer = || vec![0; (at_once * size.bytes()) as usize];
    let wrong = shares.par_iter().map_init(buffer, |buffer, share| {
        use std::os::unix::fs::FileExt;
        stop.check()?;
        let range = share.bytes(size);
        let buffer = &mut buffer[..range.len() as usize];
        if let Err(error) = data.read_exact_at(buffer, range.start) {
            tracing::error!(path = %dir.data().display(), %error, start = range.start, "data cannot be read");
            return Ok(share.blocks().map(|block| (block, UNREADABLE)).collect());
        }
        let mut reader = HashReader::new(hashes.try_clone()?);
        let mut computed = Vec::new();
        hash_each(buffer, size, |number, hash| computed.push((share.start + number, hash)));
        let mut wrong = Vec::new();
        for (block, hash) in computed {
            match reader.get(block)? {
                Some(known) if known == hash => {}
                Some(_) => wrong.push((block, UNLIKE)),
                None => wrong.push((block, UNHASHED)),
            }
        }
        progress(range.len());
        Ok(wrong)
    });
    let wrong: Result<Vec<Vec<_>>> = wrong.collect();
    Ok(wrong?.concat())
}
