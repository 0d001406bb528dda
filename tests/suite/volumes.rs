//! Volumes: sizes, names, sources, deletion.

use std::collections::HashMap;
use std::path::Path;
use std::time::{Duration, Instant};

use deltapath::sys::blockdev;
use deltapath::sys::loopdev::{Access, LoopDevice};
use deltapath::sys::sweep::devices_below;
use proto::volume_capability::access_mode::Mode;
use proto::{CapacityRange, GetCapacityRequest};

use crate::node::with_mode;
use testkit::Beside;
use testkit::prelude::*;

fn sized(name: &str, required: i64, limit: i64) -> proto::CreateVolumeRequest {
    let mut request = new_volume(name, required, block_capability());
    request.capacity_range = Some(CapacityRange { required_bytes: required, limit_bytes: limit });
    request
}

/// Seen in other drivers: for 1.5 MiB they make 1 MiB and report 1.5 MiB, and a request without a size is an error.
#[apply(every_pool)]
async fn a_volume_has_the_size_that_is_reported_and_at_least_what_was_asked(pool: PoolKind) {
    let mut rig = Rig::start_with(pool, &["--max-volume-size", "1Ti"], "info").await;
    for (asked, made) in
        [(1, 4096), (3 << 19, 3 << 19), ((3 << 19) + 1, (3 << 19) + 4096), (0, GIB), (1 << 40, 1 << 40)]
    {
        let name = format!("volume of {asked}");
        let volume = rig.client.create_volume(sized(&name, asked, 0)).await.expect("create");
        assert_eq!(volume.capacity_bytes, made, "asked for {asked}");
        let device = rig.attach(&volume.volume_id).await;
        assert_eq!(blockdev::size(&device).expect("size"), made as u64, "asked for {asked}");
        rig.detach(&volume.volume_id).await;
    }
    let mut unsized_request = new_volume("no size", 0, block_capability());
    unsized_request.capacity_range = None;
    assert_eq!(rig.client.create_volume(unsized_request).await.expect("create").capacity_bytes, GIB);
    let small = rig.client.create_volume(sized("only a limit", 0, 10 * MIB)).await.expect("create");
    assert!(small.capacity_bytes <= 10 * MIB);

    for (required, limit, expected) in [
        (-1, 0, Code::InvalidArgument),
        (0, -1, Code::InvalidArgument),
        (2 * MIB, MIB, Code::InvalidArgument),
        (5000, 5000, Code::OutOfRange),
        ((1 << 40) + 1, 0, Code::OutOfRange),
        (i64::MAX, 0, Code::OutOfRange),
    ] {
        let request = sized("impossible", required, limit);
        assert_eq!(code(rig.client.create_volume(request).await), expected, "{required} to {limit}");
    }
    let mut xfs = new_volume("xfs", MIB, mount_capability("xfs"));
    assert_eq!(rig.client.create_volume(xfs.clone()).await.expect("rounded up").capacity_bytes, 300 * MIB);
    xfs.name = "xfs with a limit".into();
    xfs.capacity_range = Some(CapacityRange { required_bytes: MIB, limit_bytes: 200 * MIB });
    assert_eq!(code(rig.client.create_volume(xfs).await), Code::OutOfRange);
    rig.finish();
}

#[apply(device_test)]
async fn what_is_wrong_with_a_request_is_said(rig: Rig<Dir>) {
    let good = || new_volume("good", MIB, block_capability());
    let with = |change: &dyn Fn(&mut proto::CreateVolumeRequest)| {
        let mut request = good();
        change(&mut request);
        request
    };
    let parameter = |name: &str, value: &str| {
        with(&|request| _ = request.parameters.insert(name.to_owned(), value.to_owned()))
    };
    let writers = with_mode(block_capability(), Mode::MultiNodeMultiWriter);
    let invalid = Code::InvalidArgument;
    let mut cases: Vec<(&str, proto::CreateVolumeRequest, Code, &str)> = vec![
        ("no name", with(&|request| request.name.clear()), invalid, "name is missing"),
        ("long name", with(&|request| request.name = "x".repeat(10_000)), invalid, "128 bytes"),
        (
            "no capability",
            with(&|request| request.volume_capabilities.clear()),
            invalid,
            "volume_capabilities",
        ),
        ("unknown parameter", parameter("colour", "red"), invalid, "\"colour\""),
        ("bad block size", parameter("blockSize", "3Ki"), invalid, "\"3Ki\""),
        ("unknown filesystem", new_volume("fs", MIB, mount_capability("zfs")), invalid, "ext4, xfs, btrfs"),
        ("many writers", new_volume("writers", MIB, writers), invalid, "MULTI_NODE_MULTI_WRITER"),
    ];
    let from = |source| new_volume_from("good", MIB, block_capability(), source);
    for (id, expected) in [("", invalid), ("unknown", Code::NotFound), ("../../etc", Code::NotFound)] {
        cases.push(("source", from(from_snapshot(id)), expected, "snapshot"));
        cases.push(("source", from(from_volume(id)), expected, "volume"));
    }
    // An unknown source may be on the node that the scheduler tries next.
    let digits = "0123456789abcdef".repeat(2);
    for (source, expected) in [
        (from_snapshot(&format!("snap-{digits}")), Code::ResourceExhausted),
        (from_volume(&format!("vol-{digits}")), Code::ResourceExhausted),
        (from_snapshot("unknown"), Code::NotFound),
    ] {
        let mut request = from(source);
        request.accessibility_requirements = on_node("node-1");
        let said = if expected == Code::NotFound { "unknown" } else { "not on this node, node-1" };
        cases.push(("source elsewhere", request, expected, said));
    }
    let elsewhere = with(&|request| request.accessibility_requirements = on_node("node-2"));
    cases.push(("elsewhere", elsewhere, Code::ResourceExhausted, "node-1"));
    for (name, request, expected, said) in cases {
        println!("{name}");
        is_refused(rig.client.create_volume(request).await, expected, &[said]);
    }
    assert!(names(&rig.pool_dir().join("volumes")).is_empty(), "a refused call made something");
    assert!(names(&rig.pool_dir().join("staging")).is_empty(), "a refused call left something");
}

fn on_node(name: &str) -> Option<proto::TopologyRequirement> {
    let segments = HashMap::from([("topology.deltapath.csi.dev/node".to_owned(), name.to_owned())]);
    Some(proto::TopologyRequirement { requisite: vec![proto::Topology { segments }], preferred: vec![] })
}

/// Seen in other drivers: the content source is not recorded, so a retry with another source or mode answers `OK`, and a
/// retry of a clone answers `ALREADY_EXISTS`.
#[apply(every_pool)]
async fn creation_is_idempotent_by_name_and_clashes_are_reported(rig: Rig<pool>) {
    let origin = rig.client.create_volume(sized("origin", 8 * MIB, 0)).await.expect("create").volume_id;
    let snapshots = [rig.snapshot("one", &origin).await, rig.snapshot("two", &origin).await];
    let request = |source: Option<proto::VolumeContentSource>| {
        let mut request = sized("copy", 8 * MIB, 0);
        request.volume_content_source = source;
        request
    };
    for (source, others) in [
        (None, [Some(from_snapshot(&snapshots[0])), Some(from_volume(&origin))]),
        (Some(from_snapshot(&snapshots[0])), [None, Some(from_snapshot(&snapshots[1]))]),
        (Some(from_volume(&origin)), [None, Some(from_snapshot(&snapshots[0]))]),
    ] {
        let made = rig.client.create_volume(request(source.clone())).await.expect("create");
        assert_eq!(made.content_source, source);
        let again = rig.client.create_volume(request(source.clone())).await.expect("a retry");
        assert_eq!(again, made, "a retry finds the volume");
        for other in others {
            assert_eq!(code(rig.client.create_volume(request(other)).await), Code::AlreadyExists);
        }
        let [mut mode, mut larger, mut block_size, mut elsewhere] = [(); 4].map(|()| request(source.clone()));
        mode.volume_capabilities = vec![mount_capability("ext4")];
        larger.capacity_range = Some(CapacityRange { required_bytes: 9 * MIB, limit_bytes: 0 });
        block_size.parameters = HashMap::from([("blockSize".to_owned(), "64Ki".to_owned())]);
        elsewhere.accessibility_requirements = on_node("node-2");
        for other in [mode, larger, block_size, elsewhere] {
            assert_eq!(code(rig.client.create_volume(other).await), Code::AlreadyExists);
        }
        rig.client.delete_volume(&made.volume_id).await.expect("delete");
    }
    // A retry finds its volume even if the source is deleted.
    let made = rig.client.create_volume(request(Some(from_snapshot(&snapshots[0])))).await.expect("create");
    rig.client.delete_snapshot(&snapshots[0]).await.expect("delete");
    let again = rig.client.create_volume(request(Some(from_snapshot(&snapshots[0])))).await;
    assert_eq!(again.expect("a retry"), made);
}

/// Seen in other drivers: after a restore into a larger volume the backing file is too short, and reads past its end fail
/// with EIO.
#[apply(every_pool)]
async fn a_restore_into_a_larger_volume_has_the_full_size(rig: Rig<pool>) {
    let (origin, device, mut content) = rig.written_volume("origin", 8 * MIB, (0, 16, 1)).await;
    content.write(&device, 2047, 1, 2);
    let snapshot = rig.snapshot("taken", &origin).await;
    for (name, source) in [("restored", from_snapshot(&snapshot)), ("cloned", from_volume(&origin))] {
        let (volume, device) = rig.volume_from(name, 40 * MIB + 1, source).await;
        assert_eq!(blockdev::size(&device).expect("size"), 40 * MIB as u64 + BLOCK);
        content.assert_equals(&device, 0, 10241);
        let mut grown = content.clone();
        grown.write(&device, 10240, 1, 3);
        grown.assert_equals(&device, 0, 10241);
        rig.detach(&volume).await;
    }
    let mut smaller = sized("smaller", 0, 4 * MIB);
    smaller.volume_content_source = Some(from_snapshot(&snapshot));
    assert_eq!(code(rig.client.create_volume(smaller).await), Code::OutOfRange);
    rig.detach(&origin).await;
}

/// Seen in other drivers: one lock is held during copies, and GetCapacity waits 20 s for a restore. Here it answers within
/// 100 ms during a copy of gigabytes. One try must be that fast: the machine may be busy with other tests, but a lock would
/// delay all of them.
#[apply(device_test)]
async fn a_long_copy_is_in_nobodys_way() {
    // The pool that copies data.
    let mut rig = Rig::start(PoolKind::Dir).await;
    let (origin, device) = rig.block_volume("origin", 3 * GIB).await;
    let mut content = Content::default();
    for part in 0..18 {
        content.write(&device, part * 32768, 32768, 1 + part as u8);
    }
    rig.detach(&origin).await;
    let mut client = rig.client.clone();
    let request = new_volume_from("copy", 3 * GIB, block_capability(), from_volume(&origin));
    let copy = tokio::spawn(async move { client.create_volume(request).await });
    let (mut answered, mut fastest) = (0, Duration::MAX);
    while !copy.is_finished() {
        let asked = Instant::now();
        rig.client.controller.get_capacity(GetCapacityRequest::default()).await.expect("GetCapacity");
        let took = asked.elapsed();
        let request = sized(&format!("beside {answered}"), MIB, 0);
        let beside = rig.client.create_volume(request).await.expect("create");
        let snapshot = rig.snapshot(&format!("beside {answered}"), &beside.volume_id).await;
        rig.client.delete_volume(&beside.volume_id).await.expect("delete");
        rig.client.delete_snapshot(&snapshot).await.expect("delete");
        // A call on the volumes being copied is answered with ABORTED, as the spec says.
        let busy = rig.client.delete_volume(&origin).await;
        if copy.is_finished() {
            break;
        }
        assert_eq!(code(busy), Code::Aborted);
        let retry = sized("copy", 3 * GIB, 0);
        let retried = rig.client.create_volume(retry).await;
        if copy.is_finished() {
            break;
        }
        assert_eq!(code(retried), Code::Aborted);
        answered += 1;
        // The copy was under way since the refused deletion of the round before.
        if answered > 1 {
            fastest = fastest.min(took);
        }
    }
    let copied = copy.await.expect("join").expect("the copy");
    // The first round may have begun before the copy, but the second was during it.
    assert!(answered > 1, "no other call was answered while the copy was made");
    assert!(fastest < Duration::from_millis(100), "GetCapacity took {fastest:?}");
    let device = rig.attach(&copied.volume_id).await;
    content.assert_equals(&device, 0, GIB as u64 / BLOCK);
    rig.detach(&copied.volume_id).await;
    rig.finish();
}

/// Seen in other drivers: deleted volumes leave loop devices on deleted files.
#[apply(every_pool)]
async fn a_deleted_volume_leaves_no_device_and_a_used_one_is_not_deleted(rig: Rig<pool>) {
    let pool_dir = rig.pool_dir();
    let devices = |below: &Path| devices_below(below).expect("devices").len();
    let (volume, device) = rig.block_volume("used", MIB).await;
    assert_eq!(devices(&pool_dir), 1);
    let refused = rig.client.delete_volume(&volume).await;
    assert_eq!(code(refused), Code::FailedPrecondition);
    Content::default().write(&device, 0, 1, 1);
    rig.detach(&volume).await;
    assert_eq!(devices(&pool_dir), 0, "an unpublished volume keeps its device");
    rig.client.delete_volume(&volume).await.expect("delete");

    // A driver that is killed between the attach and the record leaves a device. The deletion frees it.
    let volume = rig.client.create_volume(sized("left over", MIB, 0)).await.expect("create").volume_id;
    LoopDevice::attach(&rig.volume_dir(&volume).data(), Access::ReadWrite).expect("attach");
    assert_eq!(devices(&pool_dir), 1);
    rig.client.delete_volume(&volume).await.expect("delete");
    assert_eq!(devices(&pool_dir), 0, "the deleted volume left its device");

    // An unknown id counts as deleted.
    for id in ["unknown", "..", "vol-00000000000000000000000000000000"] {
        rig.client.delete_volume(id).await.expect("an unknown id");
    }
    assert_eq!(code(rig.client.delete_volume("").await), Code::InvalidArgument);
}

#[apply(device_test)]
async fn capabilities_are_confirmed_for_devices_and_for_filesystems_of_ours(rig: Rig<Dir>) {
    let volume = rig.client.create_volume(sized("block", MIB, 0)).await.expect("create").volume_id;
    let validate = |capabilities, volume_id: &str| requests::validate(volume_id, capabilities);
    let controller = &mut rig.client.controller;
    let answer = controller.validate_volume_capabilities(validate(vec![block_capability()], &volume)).await;
    let confirmed = answer.expect("validate").into_inner().confirmed.expect("confirmed");
    assert_eq!(confirmed.volume_capabilities, [block_capability()]);
    for (fs_type, is_confirmed) in [("ext4", true), ("zfs", false)] {
        let request = validate(vec![mount_capability(fs_type)], &volume);
        let answer = controller.validate_volume_capabilities(request).await.expect("validate").into_inner();
        assert_eq!(answer.confirmed.is_some(), is_confirmed);
        assert!(is_confirmed || answer.message.contains("zfs"), "{}", answer.message);
    }
    let mut tuned = validate(vec![block_capability()], &volume);
    tuned.mutable_parameters.insert("iops".into(), "1".into());
    let answer = controller.validate_volume_capabilities(tuned).await;
    assert_eq!(code(answer), Code::InvalidArgument, "an unknown attribute");
    for (capabilities, id, expected) in [
        (vec![], volume.as_str(), Code::InvalidArgument),
        (vec![block_capability()], "", Code::InvalidArgument),
        (vec![block_capability()], "unknown", Code::NotFound),
    ] {
        let answer = controller.validate_volume_capabilities(validate(capabilities, id)).await;
        assert_eq!(code(answer), expected);
    }
}

/// The copy has the content of the snapshot even if its volume is written during the copy.
#[apply(every_pool)]
async fn a_restore_is_exact_while_the_source_is_written(rig: Rig<pool>) {
    let (origin, device, mut content) = rig.written_volume("origin", 64 * MIB, (0, 8192, 1)).await;
    content.discard(&device, 100, 50);
    let snapshot = rig.snapshot("taken", &origin).await;
    let mut fill = 2;
    let writer = Beside::start(move || {
        let mut scratch = Content::default();
        scratch.write(&device, u64::from(fill) * 32, 64, fill);
        open_device(&device).sync_all().expect("sync");
        fill = 2 + fill % 200;
    });
    for round in 0..4 {
        let (restored, device) =
            rig.volume_from(&format!("restored {round}"), 64 * MIB, from_snapshot(&snapshot)).await;
        content.assert_equals(&device, 0, 16384);
        rig.detach(&restored).await;
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    writer.stop();
    rig.detach(&origin).await;
}
