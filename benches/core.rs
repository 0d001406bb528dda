//! The core beside the bare operation it cannot be faster than, in the same run: hashing, building a
//! map, a delta, tuples, messages.
#![allow(clippy::disallowed_methods)]

use std::fs::File;
use std::hint::black_box;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::time::{Duration, Instant};

use base::{Block, BlockRange, BlockSize, Foreground, ObjectDir, Stop};
use cbt::{
    AllocatedScan, Allocation, DeltaScan, Found, FreshHashes, HashFile, MapFile, MapHeader, MapWriter,
    RunSource, Side, ToHash, Tuples,
};
use criterion::{BatchSize, Criterion, Throughput, criterion_group, criterion_main};
use prost::Message;
use proto::{BlockMetadata, BlockMetadataType, GetMetadataAllocatedResponse};
use roaring::RoaringBitmap;

const SIZE: BlockSize = BlockSize::MIN;
/// 64 MiB of data.
const BLOCKS: u64 = 16384;

fn header(blocks: u64) -> MapHeader {
    MapHeader { block_size: SIZE, blocks, relative_to: None }
}

fn write_map(path: &Path, blocks: u64, ranges: impl Iterator<Item = (u64, u64)>) {
    let mut writer = MapWriter::create(path, header(blocks)).expect("create");
    for (start, end) in ranges {
        writer.insert(BlockRange::new(start, end)).expect("insert");
    }
    writer.finish().expect("finish");
}

/// A snapshot of [`BLOCKS`] blocks, every `step`th of which holds `fill`, the others 1; all hashed.
fn snapshot(dir: &Path, step: u64, fill: u8) -> ObjectDir {
    let object = ObjectDir::new(dir);
    std::fs::create_dir_all(object.bytes()).expect("mkdir");
    let data = File::options().read(true).write(true).create_new(true).open(object.data()).expect("data");
    for block in 0..BLOCKS {
        let byte = if block % step == 0 { fill } else { 1 };
        data.write_all_at(&[byte; 4096], block * 4096).expect("write");
    }
    write_map(&object.allocated(), BLOCKS, std::iter::once((0, BLOCKS)));
    write_map(&object.pending(), BLOCKS, std::iter::empty());
    let hashes = HashFile::create(&object.hashes()).expect("hashes");
    let allocated = MapFile::open(&object.allocated()).expect("map");
    hash_all(&data, &object.data(), &allocated, &hashes);
    object
}

fn hash_all(data: &File, data_path: &Path, allocated: &MapFile, hashes: &HashFile) {
    let foreground = Foreground::default();
    let to_hash = ToHash {
        data,
        data_path,
        size: SIZE,
        hashes,
        foreground: &foreground,
        fresh: &FreshHashes::default(),
    };
    for index in allocated.indexes() {
        let members = allocated.segment(index).expect("segment");
        to_hash.hash_segment(index, members, &Stop::default()).expect("hash");
    }
    hashes.sync().expect("sync");
}

fn hashing(criterion: &mut Criterion) {
    let dir = tempfile::tempdir().expect("temp dir");
    let object = snapshot(dir.path(), 2, 2);
    let data = File::open(object.data()).expect("open");
    let allocated = MapFile::open(&object.allocated()).expect("map");
    let hashes = HashFile::open_for_update(&object.hashes()).expect("hashes");
    let mut bytes = vec![0; (BLOCKS * SIZE.bytes()) as usize];
    data.read_exact_at(&mut bytes, 0).expect("read");
    let mut group = criterion.benchmark_group("hash 64 MiB of cached data in 4 KiB blocks");
    group.throughput(Throughput::Bytes(BLOCKS * SIZE.bytes()));
    group.bench_function("bare blake3 a block, one core", |bencher| {
        bencher.iter(|| {
            bytes.chunks_exact(4096).map(|block| blake3::hash(block).as_bytes()[0]).fold(0, u8::wrapping_add)
        });
    });
    group.bench_function("hash_blocks into a hash file, synced", |bencher| {
        bencher.iter(|| {
            hash_all(&data, &object.data(), &allocated, &hashes);
        });
    });
    group.finish();
}

fn maps(criterion: &mut Criterion) {
    const ALTERNATE: u64 = 1 << 20;
    let mut group = criterion.benchmark_group("map of 1,048,576 alternate blocks");
    group.throughput(Throughput::Elements(ALTERNATE));
    group.bench_function("bare roaring bitmap", |bencher| {
        bencher.iter(|| (0..ALTERNATE as u32).map(|block| block * 2).collect::<RoaringBitmap>().len());
    });
    group.bench_function("MapWriter to a synced file", |bencher| {
        bencher.iter_batched(
            || tempfile::tempdir().expect("temp dir"),
            |dir| {
                let ranges = (0..ALTERNATE).map(|block| (block * 2, block * 2 + 1));
                write_map(&dir.path().join("map"), ALTERNATE * 2, ranges);
                dir
            },
            BatchSize::PerIteration,
        );
    });
    group.finish();
}

fn deltas(criterion: &mut Criterion) {
    let dirs = [tempfile::tempdir().expect("temp dir"), tempfile::tempdir().expect("temp dir")];
    let (base, target) = (snapshot(dirs[0].path(), 16, 1), snapshot(dirs[1].path(), 16, 2));
    let changed = dirs[1].path().join("changed of all");
    write_map(&changed, BLOCKS, std::iter::once((0, BLOCKS)));
    let hashes = [File::open(base.hashes()).expect("open"), File::open(target.hashes()).expect("open")];
    let length = hashes[0].metadata().expect("stat").len();
    let mut group = criterion.benchmark_group("delta: 16,384 candidates, 1,024 differ");
    group.throughput(Throughput::Elements(BLOCKS));
    group.bench_function("bare read of both hash files", |bencher| {
        let mut page = vec![0; 4096];
        bencher.iter(|| {
            for file in &hashes {
                for offset in (0..length).step_by(4096) {
                    file.read_exact_at(&mut page, offset).expect("read");
                    black_box(&page);
                }
            }
        });
    });
    group.bench_function("DeltaScan", |bencher| {
        bencher.iter(|| {
            let side = |object| Side::open(object, Default::default()).expect("open");
            let way = vec![MapFile::open(&changed).expect("map")];
            let mut scan = DeltaScan::new(side(&base), side(&target), Some(way), Block(0));
            let (stop, until) = (Stop::default(), Instant::now() + Duration::from_secs(60));
            let mut found = 0;
            while let Found::Run(run) = scan.next_run(&stop, until).expect("scan") {
                found += run.len();
            }
            assert_eq!(found, BLOCKS / 16);
        });
    });
    group.finish();
}

fn tuples(criterion: &mut Criterion) {
    const ALTERNATE: u64 = 1 << 20;
    let dir = tempfile::tempdir().expect("temp dir");
    let path = dir.path().join("map");
    write_map(&path, ALTERNATE * 2, (0..ALTERNATE).map(|block| (block * 2, block * 2 + 1)));
    let mut group = criterion.benchmark_group("1,048,576 FIXED_LENGTH tuples");
    group.throughput(Throughput::Elements(ALTERNATE));
    group.bench_function("bare pushes to a vector", |bencher| {
        bencher.iter(|| {
            for message in 0..ALTERNATE / 4096 {
                let range = |block| BlockRange::new(block * 2, block * 2 + 1).bytes(SIZE);
                let tuples: Vec<_> = (message * 4096..(message + 1) * 4096).map(range).collect();
                black_box(tuples);
            }
        });
    });
    group.bench_function("Tuples from a stored map", |bencher| {
        bencher.iter(|| {
            let scan = AllocatedScan::new(
                Allocation::new(MapFile::open(&path).expect("map"), None, &path),
                Block(0),
            );
            let mut tuples = Tuples::new(RunSource::Allocated(Box::new(scan)), SIZE, true);
            let until = Instant::now() + Duration::from_secs(60);
            let (mut total, mut more) = (0, true);
            while more {
                let mut message = Vec::with_capacity(4096);
                more = tuples.fill(4096, &mut message, &Stop::default(), until).expect("fill");
                total += message.len() as u64;
            }
            assert_eq!(total, ALTERNATE);
        });
    });
    group.finish();
}

fn encoding(criterion: &mut Criterion) {
    const TUPLES: usize = 16384;
    let tuple = |block: i64| BlockMetadata { byte_offset: block * 8192, size_bytes: 4096 };
    let message = GetMetadataAllocatedResponse {
        block_metadata_type: BlockMetadataType::FixedLength.into(),
        volume_capacity_bytes: 1 << 40,
        block_metadata: (0..TUPLES as i64).map(tuple).collect(),
    };
    let mut group = criterion.benchmark_group("message of 16,384 tuples");
    group.throughput(Throughput::Elements(TUPLES as u64));
    group.bench_function("bare copy of its bytes", |bencher| {
        let bytes = message.encode_to_vec();
        bencher.iter(|| black_box(bytes.clone()));
    });
    group.bench_function("encoded", |bencher| bencher.iter(|| black_box(message.encode_to_vec())));
    group.finish();
}

criterion_group! {
    name = benches;
    config = Criterion::default().sample_size(20);
    targets = hashing, maps, deltas, tuples, encoding
}
criterion_main!(benches);
