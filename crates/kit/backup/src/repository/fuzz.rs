//! Fuzz targets: what is read from a repository holds together, or is damaged. Whoever forges a file forges its checksums, so
//! targets take content and seal it.

use serde::Serialize;
use serde::de::DeserializeOwned;

use super::index::{CELLS, Cells, envelope, open, seal};
use super::lock::Holder;
use super::pack::{self, MAX_CHUNK, MAX_PACK, Packs, Row, read_table};
use super::writer::filled;
use super::{About, Config, Index, PackRef, Partial, SEGMENT, SEGMENT_BLOCKS, Segment, SegmentRef};

const NAME: &str = "a file";

/// What all readers of an index rely on.
fn holds_together(about: &About, packs: &[PackRef], segments: &[SegmentRef]) {
    for pack in packs {
        assert!(
            pack.bytes as usize <= MAX_PACK && pack.table().end - pack.table().start <= pack.bytes.into()
        );
    }
    let mut cells = Cells::new(about.size);
    for of in segments {
        assert!(of.chunk < packs[of.pack as usize].rows);
        assert!(of.packs.iter().all(|pack| (*pack as usize) < packs.len()));
        assert!(u64::from(of.number) * SEGMENT < about.size);
        filled(of).for_each(|(start, end)| cells.add(start, end));
    }
    assert!(segments.is_sorted_by(|a, b| a.number < b.number));
    assert_eq!(cells.finish().len(), CELLS);
}

/// `backups/ID`.
pub fn index(content: &[u8]) {
    let _ = Index::decode(content, NAME);
    let Ok(index) = Index::decode(&seal(content), NAME) else { return };
    holds_together(&index.about, &index.packs, &index.segments);
    let table = Packs::of(&index.packs);
    assert!((0..).zip(&index.packs).all(|(place, pack)| table.get(place) == pack));
    assert_eq!(Index::decode(&envelope(&index), NAME).expect("it was read"), index);
}

/// `partial/ID`.
pub fn partial(content: &[u8]) {
    let Ok(partial) = Partial::decode(&seal(content), NAME) else { return };
    holds_together(&partial.about, &partial.packs, &partial.segments);
    let again = Partial::decode(&envelope(&partial), NAME).expect("it was read");
    assert_eq!(envelope(&again), envelope(&partial));
}

fn note<T: Serialize + DeserializeOwned>(content: &[u8]) {
    let _ = open::<T>(content, NAME);
    let Ok(read) = open::<T>(&seal(content), NAME) else { return };
    let written = envelope(&read);
    assert_eq!(envelope(&open::<T>(&written, NAME).expect("it was read")), written);
}

/// `repository`.
pub fn config(content: &[u8]) {
    note::<Config>(content);
}

/// `damaged/ID`.
pub fn damage(content: &[u8]) {
    note::<String>(content);
}

/// `locks/ID`.
pub fn lock(bytes: &[u8]) {
    let Ok(holder) = serde_json::from_slice::<Holder>(bytes) else { return };
    holder.is_gone();
    serde_json::to_vec(&holder).expect("it was read");
}

/// `packs/XX/NAME`, and behind it the number of its chunks.
pub fn pack(bytes: &[u8]) {
    let Some((bytes, rows)) = bytes.split_last_chunk::<2>() else { return };
    let rows = u16::from_le_bytes(*rows).into();
    let mut pack = PackRef { id: [0; 32], bytes: bytes.len() as u32, rows };
    if pack::check(&[pack], NAME).is_err() {
        return;
    }
    let table = &bytes[pack.table().start as usize..];
    pack.id = *blake3::hash(table).as_bytes();
    let Ok(table) = read_table(&pack, table) else { return };
    assert_eq!(table.len(), rows as usize);
    let mut end = 0;
    for row in table {
        assert!(row.start == end && row.raw as usize <= MAX_CHUNK && row.range().end <= pack.table().start);
        end = row.range().end;
        let stored = &bytes[row.start as usize..end as usize];
        let _ = row.open(stored);
        let row = Row { hash: *blake3::hash(stored).as_bytes(), ..row };
        if let Ok(content) = row.open(stored) {
            assert_eq!(content.len(), row.raw as usize);
        }
    }
    assert_eq!(end, pack.table().start);
}

/// The chunk that is the map of a segment.
pub fn segment(bytes: &[u8]) {
    let mut packs = Packs::default();
    packs.intern(PackRef { id: [9; 32], bytes: 100, rows: 1 });
    let Ok(segment) = Segment::decode(bytes, &mut packs) else { return };
    let mut end = 0;
    for extent in &segment.extents {
        assert!(extent.start >= end && extent.blocks > 0 && extent.skip.checked_add(extent.blocks).is_some());
        end = extent.end();
        assert!(end <= SEGMENT_BLOCKS && packs.get(extent.pack).bytes as usize <= MAX_PACK);
    }
    assert!(segment.blocks() <= SEGMENT_BLOCKS.into());
    assert_eq!(segment.differing(&segment), []);
    let again = Segment::decode(&segment.encode(&packs), &mut packs);
    assert_eq!(again.expect("it was read"), segment);
}

#[cfg(test)]
#[expect(clippy::disallowed_methods, reason = "writes seeds into the tree")]
mod tests {
    use super::super::Kind;
    use super::super::pack::{Compressor, OpenPack, Spare};
    use super::super::segment::Extent;
    use super::*;

    fn about(kind: Kind) -> About {
        let is_full = kind == Kind::Full;
        let id = "20260102T030405.678Z-abcdef";
        About {
            id: id.into(),
            volume: "ns/data".into(),
            created: 1_767_323_045,
            kind,
            base: (!is_full).then(|| id.into()),
            why: is_full.then(|| "there is no earlier backup".into()),
            snapshot: (!is_full).then(|| "snap-1".into()),
            device: "/dev/data".into(),
            size: 3 * SEGMENT - 4096,
            data: 3 * 9 * 4096,
            listed: 1 << 20,
            read: 1 << 20,
            added: 3000,
            milliseconds: 70,
        }
    }

    fn packs() -> Vec<PackRef> {
        (0..3).map(|number| PackRef { id: [number; 32], bytes: 1000, rows: 20 }).collect()
    }

    fn segments() -> Vec<SegmentRef> {
        let of = |number| SegmentRef {
            number,
            pack: 0,
            chunk: number,
            blocks: 9,
            packs: vec![1, 2],
            fill: [number as u8; 16],
        };
        (0..3).map(of).collect()
    }

    fn content(of: &impl Serialize) -> Vec<u8> {
        postcard::to_stdvec(of).expect("postcard")
    }

    fn a_pack(contents: &[Vec<u8>]) -> Vec<u8> {
        let (mut open, mut compressor) =
            (OpenPack::new(&Spare::default()), Compressor::new(1).expect("zstd"));
        for content in contents {
            open.push(&compressor.chunk(content));
        }
        let (pack, parts) = open.close();
        [parts.concat(), (pack.rows as u16).to_le_bytes().to_vec()].concat()
    }

    fn a_segment(lengths: &[u32]) -> Vec<u8> {
        let extent = |(number, blocks): (u32, &u32)| Extent {
            start: 100 * number,
            blocks: *blocks,
            pack: number % 3,
            chunk: number,
            skip: number % 2,
        };
        Segment { extents: (0..).zip(lengths).map(extent).collect() }.encode(&Packs::of(&packs()))
    }

    /// Three files of each kind as they are written.
    fn written() -> Vec<(&'static str, [Vec<u8>; 3])> {
        let index = |kind, segments: Vec<SegmentRef>| {
            content(&Index { about: about(kind), packs: packs(), segments, changed: vec![3; CELLS] })
        };
        let config = |created| Config { id: "0123456789abcdef0123456789abcdef".into(), created };
        let partial = content(&Partial {
            about: about(Kind::Full),
            packs: packs(),
            segments: segments(),
            done: vec![0, 1, 2, 5],
            source: None,
        });
        // An earlier version does not say what it was read from.
        let earlier = &partial[..partial.len() - 1];
        let source = content(&Some((3 * SEGMENT, (1u64, 2u64), (3i64, 4i64), "serial")));
        let lock = |mode: &str, more: &str| {
            format!(r#"{{"mode":"{mode}","command":"backup","host":"node","pid":1{more}}}"#).into_bytes()
        };
        let zeros = vec![0; 4096];
        let noise: Vec<u8> = (0..1000u32)
            .flat_map(|number| blake3::hash(&number.to_le_bytes()).as_bytes()[..1].to_vec())
            .collect();
        vec![
            ("backup_config", [0, 1_767_323_045, i64::MIN].map(|created| content(&config(created)))),
            ("backup_damage", ["", "chunk 3 of pack 00 is damaged", "ü\n"].map(|why| content(&why))),
            (
                "backup_index",
                [
                    index(Kind::Full, segments()),
                    index(Kind::Incremental, segments()),
                    index(Kind::Full, Vec::new()),
                ],
            ),
            (
                "backup_lock",
                [
                    lock("Shared", ""),
                    lock("Exclusive", r#","place":"boot pid:[1]","started":77"#),
                    lock("Shared", r#","place":null,"started":null"#),
                ],
            ),
            ("backup_nbd", crate::nbd::fuzz::seeds::nbd()),
            (
                "backup_pack",
                [a_pack(&[zeros.clone(), noise.clone()]), a_pack(&[noise]), a_pack(&[zeros.clone(), zeros])],
            ),
            ("backup_partial", [earlier.to_vec(), [earlier, &source].concat(), partial]),
            ("backup_segment", [a_segment(&[1]), a_segment(&[5, 100, 7, 3]), a_segment(&[])]),
        ]
    }

    /// Seeds of an older format would be poor starting points. `make seeds` writes new ones.
    #[test]
    fn the_seeds_are_what_is_written() {
        for (corpus, files) in written() {
            for (number, bytes) in files.into_iter().enumerate() {
                let path = testkit::fuzz::corpora().join(corpus).join(format!("seed-{number}"));
                if std::env::var_os("DELTAPATH_SEEDS").is_some() {
                    std::fs::create_dir_all(path.parent().expect("a directory")).expect("mkdir");
                    std::fs::write(&path, &bytes).expect("write");
                }
                let seed = std::fs::read(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
                assert!(seed == bytes, "{} is of another format: run make seeds", path.display());
            }
        }
    }
}
