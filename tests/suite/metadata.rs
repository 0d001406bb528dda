//! The answers of the SnapshotMetadata service in each case (docs/reference.md, "What a client sees").

use std::collections::HashMap;

use proto::{BlockMetadataType, CreateSnapshotRequest};

use testkit::prelude::*;

/// A volume of 64 MiB with two snapshots, and their contents.
struct Pair {
    volume: String,
    first: String,
    second: String,
    before: Content,
    after: Content,
}

const CAPACITY: i64 = 64 * MIB;

async fn pair(rig: &mut Rig) -> Pair {
    let (volume, device, mut before) = rig.written_volume("paired", CAPACITY, (0, 4, 1)).await;
    before.write(&device, 1000, 100, 2);
    before.write(&device, 16380, 4, 3);
    let first = rig.snapshot("first", &volume).await;
    let mut after = before.clone();
    after.write(&device, 1010, 10, 4);
    after.write(&device, 1050, 1, 5);
    after.write(&device, 1060, 10, 2);
    after.discard(&device, 1090, 4);
    after.write(&device, 5000, 3, 0);
    after.write(&device, 6000, 2, 6);
    after.write(&device, 16383, 1, 7);
    let second = rig.snapshot("second", &volume).await;
    rig.detach(&volume).await;
    Pair { volume, first, second, before, after }
}

fn style_flag(style: BlockMetadataType) -> [&'static str; 2] {
    let name = if style == BlockMetadataType::FixedLength { "fixed" } else { "variable" };
    ["--block-metadata-type", name]
}

const STYLES: [BlockMetadataType; 2] = [BlockMetadataType::FixedLength, BlockMetadataType::VariableLength];

/// Lists are exact to 4 KiB. A block that was rewritten with the same bytes is not listed, nor are zeros written into a
/// hole, but a punched block is.
#[apply(every_pool)]
async fn allocated_and_delta_are_exact(pool: PoolKind) {
    for style in STYLES {
        let mut rig = Rig::start_with(pool, &style_flag(style), "info").await;
        let pair = pair(&mut rig).await;
        for (snapshot, content) in [(&pair.first, &pair.before), (&pair.second, &pair.after)] {
            let list = rig.client.allocated(snapshot, 0, 0).await.expect("allocated");
            assert_eq!((list.style, list.capacity), (style, CAPACITY as u64));
            assert_eq!(blocks_of(&list, BLOCK), content.allocated(BLOCK));
        }
        let list = rig.client.delta(&pair.first, &pair.second, 0, 0).await.expect("delta");
        assert_eq!((list.style, list.capacity), (style, CAPACITY as u64));
        assert_eq!(blocks_of(&list, BLOCK), pair.after.changed_since(&pair.before, BLOCK));
        let sizes: Vec<u64> = list.tuples().map(|tuple| tuple.size).collect();
        match style {
            BlockMetadataType::FixedLength => assert!(sizes.iter().all(|size| *size == BLOCK)),
            _ => assert_eq!(sizes, [10 * BLOCK, BLOCK, 4 * BLOCK, 2 * BLOCK, BLOCK], "adjacent blocks join"),
        }
        rig.finish();
    }
}

/// Seen in other drivers: an unaligned `starting_offset` shifts the comparison and loses changes;
/// `max_results` -1 spins for ever; 1,000,000 makes a message over gRPC's limit; an offset past the end
/// answers `OK` with nothing.
#[apply(device_test)]
async fn any_offset_and_any_max_results_give_the_same_tail() {
    for style in STYLES {
        let mut rig = Rig::start_with(PoolKind::Xfs, &style_flag(style), "info").await;
        let pair = pair(&mut rig).await;
        let all = rig.changed(&pair.first, &pair.second).await;
        let held = rig.allocated(&pair.second).await;
        let edges = [0, 1010, 1015, 1020, 1050, 1089, 1090, 1094, 6000, 16383, 16384];
        let offsets =
            edges.iter().flat_map(|block| [-4096, -4095, -1, 0, 1, 2047, 4095].map(|d| block * 4096 + d));
        for offset in offsets.filter(|offset| (0..=CAPACITY).contains(offset)) {
            for max_results in [0, 1, 2, 3, 1_000_000, i32::MAX] {
                let from = offset as u64 / BLOCK;
                let tail = |blocks: &[u64]| blocks.iter().copied().filter(|b| *b >= from).collect::<Vec<_>>();
                let delta = rig.client.delta(&pair.first, &pair.second, offset, max_results).await;
                let allocated = rig.client.allocated(&pair.second, offset, max_results).await;
                for (list, blocks) in [(delta, &all), (allocated, &held)] {
                    let list = list.expect("a list");
                    assert_eq!(
                        blocks_of(&list, BLOCK),
                        tail(blocks),
                        "from {offset}, {max_results} a message"
                    );
                    assert!(list.tuples().all(|tuple| tuple.offset + tuple.size > offset as u64));
                    let most = if max_results == 0 { 4096 } else { (max_results as usize).min(16384) };
                    assert!(list.messages.iter().all(|message| message.len() <= most));
                    let empty = list.messages.iter().filter(|message| message.is_empty()).count();
                    assert!(empty == 0 || list.messages.len() == 1, "an empty message among others");
                }
            }
        }
        rig.finish();
    }
}

/// Seen in other drivers: an empty answer sends no message, so the client never learns type or capacity.
#[apply(every_pool)]
async fn an_empty_answer_is_one_message_with_type_and_capacity(rig: Rig<pool>) {
    let volume = rig.volume("never written", CAPACITY, block_capability()).await;
    let first = rig.snapshot("first", &volume).await;
    let second = rig.snapshot("second", &volume).await;
    for list in [
        rig.client.allocated(&first, 0, 0).await,
        rig.client.allocated(&first, CAPACITY, 0).await,
        rig.client.delta(&first, &second, 0, 0).await,
        rig.client.delta(&first, &first, 0, 0).await,
        rig.client.delta(&first, &second, CAPACITY, 0).await,
    ] {
        let list = list.expect("OK");
        assert_eq!(list.messages, [vec![]]);
        assert_eq!((list.style, list.capacity), (BlockMetadataType::VariableLength, CAPACITY as u64));
    }
}

/// Seen in other drivers: base and target the wrong way round are accepted.
#[apply(device_test)]
async fn snapshots_that_make_no_pair_are_refused(rig: Rig<Xfs>) {
    let pair = pair(&mut rig).await;
    let (restored, _) = rig.volume_from("restored", CAPACITY, from_snapshot(&pair.second)).await;
    let other = rig.snapshot("of another volume", &restored).await;
    rig.detach(&restored).await;
    let unknown = "snap-00000000000000000000000000000000";
    for (base, target, expected) in [
        (pair.second.as_str(), pair.first.as_str(), Code::InvalidArgument),
        (&pair.second, &other, Code::InvalidArgument),
        ("", &pair.second, Code::InvalidArgument),
        (&pair.first, "", Code::InvalidArgument),
        (unknown, "", Code::InvalidArgument),
        (unknown, &pair.second, Code::NotFound),
        (&pair.first, unknown, Code::NotFound),
        ("../../etc/passwd", &pair.second, Code::NotFound),
        (&pair.first, &pair.volume, Code::NotFound),
    ] {
        assert_eq!(code(rig.client.delta(base, target, 0, 0).await), expected, "{base} to {target}");
    }
    for (id, expected) in [("", Code::InvalidArgument), (unknown, Code::NotFound), ("x/../y", Code::NotFound)]
    {
        assert_eq!(code(rig.client.allocated(id, 0, 0).await), expected, "{id}");
    }
    // The first snapshot of a restored volume that was not written has the content of the source.
    assert_eq!(rig.allocated(&other).await, pair.after.allocated(BLOCK));
}

#[apply(every_pool)]
async fn without_tracking_there_are_no_deltas_and_allocated_works(rig: Rig<pool>) {
    let mut request = new_volume("untracked", CAPACITY, block_capability());
    request.parameters = HashMap::from([("changedBlockTracking".to_owned(), "false".to_owned())]);
    let volume = rig.client.create_volume(request).await.expect("create").volume_id;
    let device = rig.attach(&volume).await;
    let mut content = Content::default();
    content.write(&device, 5, 9, 1);
    let first = rig.snapshot("first", &volume).await;
    let second = rig.snapshot("second", &volume).await;
    assert_eq!(rig.allocated(&second).await, content.allocated(BLOCK));
    let refused = rig.client.delta(&first, &second, 0, 0).await;
    is_refused(refused, Code::FailedPrecondition, &["changedBlockTracking"]);
    rig.client.delete_snapshot(&first).await.expect("delete");
    rig.detach(&volume).await;
}

/// The block size of the maps is the volume's `blockSize`, and a VolumeSnapshotClass may choose the style.
#[apply(every_pool)]
async fn block_size_and_style_are_as_the_classes_say(rig: Rig<pool>) {
    for (block_size, bytes) in [("64Ki", 64 << 10), ("4Mi", 4 << 20)] {
        let mut request = new_volume(block_size, CAPACITY + 1, block_capability());
        request.parameters = HashMap::from([("blockSize".to_owned(), block_size.to_owned())]);
        let volume = rig.client.create_volume(request).await.expect("create");
        assert_eq!(volume.capacity_bytes as u64 % bytes, 0, "whole blocks");
        let volume = volume.volume_id;
        let device = rig.attach(&volume).await;
        let mut before = Content::default();
        before.write(&device, 15, 3, 1);
        before.write(&device, 9000, 1, 1);
        let first = rig.snapshot(&format!("first {block_size}"), &volume).await;
        let mut after = before.clone();
        after.write(&device, 9001, 1, 1);
        after.discard(&device, 15, 1);
        let request = CreateSnapshotRequest {
            name: format!("second {block_size}"),
            source_volume_id: volume.clone(),
            parameters: HashMap::from([("blockMetadataType".to_owned(), "fixed".to_owned())]),
            ..Default::default()
        };
        let second = rig.client.controller.create_snapshot(request).await.expect("snapshot").into_inner();
        let second = second.snapshot.expect("a snapshot").snapshot_id;
        let list = rig.client.delta(&first, &second, 0, 0).await.expect("delta");
        assert_eq!(list.style, BlockMetadataType::FixedLength);
        assert_eq!(blocks_of(&list, bytes), after.changed_since(&before, bytes));
        let list = rig.client.allocated(&first, 0, 0).await.expect("allocated");
        assert_eq!(list.style, BlockMetadataType::VariableLength);
        assert_eq!(blocks_of(&list, bytes), before.allocated(bytes));
        rig.detach(&volume).await;
    }
}

/// Seen in other drivers: `max_results = 1000000` makes a message over gRPC's 4 MiB limit.
#[apply(device_test)]
async fn a_message_has_at_most_16384_tuples_and_4096_by_default() {
    let mut rig = Rig::start_with(PoolKind::Dir, &style_flag(BlockMetadataType::FixedLength), "info").await;
    let (volume, _, content) = rig.written_volume("full", 2 * CAPACITY, (0, 32768, 1)).await;
    let snapshot = rig.snapshot("full", &volume).await;
    for (max_results, most) in [(0, 4096), (1_000_000, 16384), (i32::MAX, 16384), (16384, 16384), (100, 100)]
    {
        let list = rig.client.allocated(&snapshot, 0, max_results).await.expect("allocated");
        assert_eq!(blocks_of(&list, BLOCK), content.allocated(BLOCK));
        assert_eq!(list.messages.iter().map(Vec::len).max(), Some(most), "max_results {max_results}");
    }
    rig.detach_and_finish(&volume).await;
}
