//! Plain files, on any filesystem that tells where they have holes: a copy costs the data, holes are kept, and only hashes
//! show what changed.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;

use super::backend::{Backend, Bytes, Changes, Copying, Sink};
use super::kind::{Kind, Otherwise};
use super::{Result, probe};
use crate::sys::clone;
use base::ByteRange;
use files::{Context, DataRanges, change, step};

pub(super) static KIND: Kind = Kind {
    name: "dir",
    help: "Plain files; snapshots are sparse copies",
    fits: probe::tells_holes,
    otherwise: Otherwise::Refuse(
        "its filesystem does not report holes (SEEK_HOLE): choose a --data-dir on ext4, xfs, btrfs or tmpfs",
    ),
    open: |_, _| Ok(Box::new(Dir)),
};

#[derive(Debug)]
struct Dir;

impl Backend for Dir {
    fn fill(&self, source: &File, target: &File, target_path: &Path, how: Copying<'_>) -> Result<()> {
        sparse(source, target, target_path, how)
    }

    fn changes<'f>(
        &self,
        _: Option<u64>,
        _: Option<&'f Bytes>,
        _: &'f File,
        _: &'f Path,
    ) -> Result<Changes<'f>> {
        Ok(Changes::Unknown)
    }

    fn compares_bytes(&self) -> bool {
        false
    }

    fn copies_atomically(&self) -> bool {
        false
    }
}

/// Bytes copied at once; a larger block is copied whole.
const STEP: u64 = 4 << 20;

/// Copies the data of `source` into the new file `target` and leaves its holes out, also those inside
/// a block of which the sink is shown all.
pub(super) fn sparse(
    source: &File,
    target: &File,
    target_path: &Path,
    Copying { mut sink, size, stop }: Copying<'_>,
) -> Result<()> {
    let length = source.metadata().context("stat", target_path)?.len();
    change::set_len(target, target_path, length)?;
    clone::read_only_what_is_asked(source, target_path)?;
    let mut buffer = Vec::new();
    let mut next = 0;
    for range in DataRanges::of(source, target_path, ByteRange { start: 0, end: length }) {
        let range = range?.blocks(size).bytes(size);
        let end = range.end.min(length);
        let mut start = range.start.max(next);
        while start < end {
            stop.check()?;
            let part = ByteRange { start, end: end.min(start + STEP.max(size.bytes())) };
            // The disk reads what comes next while this part is hashed and written.
            if let Some(ahead) =
                DataRanges::of(source, target_path, ByteRange { start: part.end, end: length }).next()
            {
                let ahead = ahead?;
                clone::start_reading(source, ByteRange { end: ahead.end.min(ahead.start + STEP), ..ahead });
            }
            match &mut sink {
                Some(sink) => through(source, target, target_path, part, &mut buffer, sink)?,
                None => {
                    for data in DataRanges::of(source, target_path, part) {
                        inside(source, target, target_path, data?)?;
                    }
                }
            }
            // The disk writes while the next part is read and hashed.
            clone::start_writing(target, part.start, part.len());
            start = part.end;
        }
        next = next.max(end);
    }
    Ok(())
}

/// Copies the data of a part through the sink, which hashes exactly the bytes written, whatever changes in the source
/// meanwhile: a hash of other bytes would hide a change.
fn through(
    source: &File,
    target: &File,
    target_path: &Path,
    part: ByteRange,
    buffer: &mut Vec<u8>,
    sink: &mut Sink<'_>,
) -> Result<()> {
    buffer.resize(part.len() as usize, 0);
    let within = |data: ByteRange| (data.start - part.start) as usize..(data.end - part.start) as usize;
    let ranges: Vec<ByteRange> = DataRanges::of(source, target_path, part).collect::<files::Result<_>>()?;
    let mut filled = 0;
    for data in &ranges {
        let data_within = within(*data);
        buffer[filled..data_within.start].fill(0);
        filled = data_within.end;
        let bytes = &mut buffer[data_within];
        source.read_exact_at(bytes, data.start).context_at("read the source of", target_path, data.start)?;
    }
    buffer[filled..].fill(0);
    sink(part.start, buffer)?;
    for data in &ranges {
        let bytes = &buffer[within(*data)];
        change::write_at(target, target_path, bytes, data.start)?;
    }
    Ok(())
}

/// Copies a range inside the kernel.
fn inside(source: &File, target: &File, target_path: &Path, range: ByteRange) -> Result<()> {
    let copied =
        step("copy into", target_path, || clone::copy_range(source, target, range.start, range.len()))
            .map_err(|error| files::Error { at: Some(range.start), ..error })?;
    match copied == range.len() {
        true => Ok(()),
        // Silent zeros would be in the copy.
        false => Err(io::Error::from(io::ErrorKind::UnexpectedEof)).context("copy into", target_path)?,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use base::{BlockSize, Stop};
    use std::os::unix::fs::MetadataExt;

    /// Blocks are punched and written while they are copied: what the sink saw is what the copy holds.
    #[test]
    fn what_the_sink_sees_is_what_is_written() {
        let dir = tempfile::tempdir().expect("temp dir");
        let open = |name: &str| {
            let path = dir.path().join(name);
            File::options().read(true).write(true).create_new(true).open(path).expect("create")
        };
        let (source, target) = (open("source"), open("target"));
        let length = 1 << 20;
        source.set_len(length).expect("set_len");
        source.write_all_at(&[7; 64 << 10], 0).expect("write");
        let mut seen = Vec::new();
        let mut sink = |_, bytes: &[u8]| {
            seen.extend_from_slice(bytes);
            files::punch_hole(&source, 4096, 8192).expect("punch");
            source.write_all_at(&[9; 4096], 100 << 10).expect("write");
            Ok(())
        };
        let size = BlockSize::try_from(length).expect("1Mi");
        let how = Copying { sink: Some(&mut sink), size, stop: &Stop::default() };
        sparse(&source, &target, dir.path(), how).expect("copy");
        let mut copied = vec![0; length as usize];
        target.read_exact_at(&mut copied, 0).expect("read");
        assert!(copied == seen, "the copy holds other bytes than the sink was shown");
    }

    #[test]
    fn a_copy_keeps_holes_and_length_and_the_sink_sees_whole_blocks() {
        let dir = tempfile::tempdir().expect("temp dir");
        let size = BlockSize::try_from(64 << 10).expect("64Ki");
        let length = 64 << 20;
        let source = File::options()
            .read(true)
            .write(true)
            .create_new(true)
            .open(dir.path().join("source"))
            .expect("create");
        source.set_len(length).expect("set_len");
        for offset in [0, (1 << 20) + 4096, length - 4096] {
            source.write_all_at(&[7; 4096], offset).expect("write");
        }
        for with_sink in [true, false] {
            let path = dir.path().join(format!("target-{with_sink}"));
            let target = File::options().read(true).write(true).create_new(true).open(&path).expect("create");
            let mut seen = Vec::new();
            let mut sink = |offset, bytes: &[u8]| {
                let mut read = vec![0; bytes.len()];
                source.read_exact_at(&mut read, offset).expect("read");
                assert!(read == bytes, "other bytes than are there, at {offset}");
                seen.push((offset, bytes.len() as u64));
                Ok(())
            };
            let sink: Option<Sink<'_>> = if with_sink { Some(&mut sink) } else { None };
            sparse(&source, &target, &path, Copying { sink, size, stop: &Stop::default() }).expect("copy");
            let meta = target.metadata().expect("stat");
            assert_eq!(meta.len(), length);
            assert!(meta.blocks() * 512 <= 4 * 4096, "holes were filled: {} sectors", meta.blocks());
            for offset in [0, (1 << 20) + 4096, length - 4096] {
                let mut block = [0; 4096];
                target.read_exact_at(&mut block, offset).expect("read");
                assert_eq!(block, [7; 4096], "at {offset}");
            }
            if with_sink {
                assert_eq!(seen, [(0, 65536), (1 << 20, 65536), (length - 65536, 65536)]);
            }
        }
    }
}
