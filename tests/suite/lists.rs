//! Lists: pages, tokens, filters.

use proto::{ListSnapshotsRequest, ListVolumesRequest};

use testkit::prelude::*;

async fn volume_page(rig: &mut Rig, max_entries: i32, token: &str) -> (Vec<String>, String) {
    let request = ListVolumesRequest { max_entries, starting_token: token.to_owned() };
    let page = rig.client.controller.list_volumes(request).await.expect("ListVolumes").into_inner();
    let ids = page.entries.into_iter().map(|entry| entry.volume.expect("a volume").volume_id).collect();
    (ids, page.next_token)
}

async fn snapshots(rig: &mut Rig, request: ListSnapshotsRequest) -> (Vec<String>, String) {
    let page = rig.client.controller.list_snapshots(request).await.expect("ListSnapshots").into_inner();
    let ids = page.entries.into_iter().map(|entry| entry.snapshot.expect("a snapshot").snapshot_id).collect();
    (ids, page.next_token)
}

/// Seen in other drivers: tokens `0` and `4294967295`, and `max_entries = -1`, panic the driver, and
/// `next_token` is never set.
#[apply(device_test)]
async fn bad_tokens_are_refused_and_pages_are_whole(rig: Rig<Dir>) {
    let mut made = Vec::new();
    for number in 0..5 {
        made.push(rig.volume(&format!("volume-{number}"), MIB, block_capability()).await);
    }
    made.sort();

    for token in ["0", "4294967295", "-1", "x", "vol-zz", &"9".repeat(10_000)] {
        let request = ListVolumesRequest { max_entries: 1, starting_token: token.to_owned() };
        let volumes = code(rig.client.controller.list_volumes(request).await);
        let request = ListSnapshotsRequest { starting_token: token.to_owned(), ..Default::default() };
        let snapshots = code(rig.client.controller.list_snapshots(request).await);
        assert_eq!([volumes, snapshots], [Code::Aborted; 2], "{token:.20}");
    }
    let negative = ListVolumesRequest { max_entries: -1, starting_token: String::new() };
    assert_eq!(code(rig.client.controller.list_volumes(negative).await), Code::InvalidArgument);
    let negative = ListSnapshotsRequest { max_entries: -1, ..Default::default() };
    assert_eq!(code(rig.client.controller.list_snapshots(negative).await), Code::InvalidArgument);

    let (mut token, mut listed) = (String::new(), Vec::new());
    while listed.is_empty() || !token.is_empty() {
        let (page, next) = volume_page(&mut rig, 2, &token).await;
        assert!((1..=2).contains(&page.len()), "{page:?}");
        listed.extend(page);
        token = next;
    }
    assert_eq!(listed, made);
    assert_eq!(volume_page(&mut rig, 0, "").await, (made.clone(), String::new()));
    assert_eq!(volume_page(&mut rig, 5, "").await.1, "", "a full last page has no next one");

    // A token still works if the entry that it names is deleted and others are made.
    let (_, token) = volume_page(&mut rig, 2, "").await;
    rig.client.delete_volume(&made[1]).await.expect("delete");
    let (rest, _) = volume_page(&mut rig, 0, &token).await;
    assert_eq!(rest, made[2..]);
}

/// Seen in other drivers: the list by source volume returns one of three.
#[apply(device_test)]
async fn snapshots_are_filtered_by_source_and_by_id(rig: Rig<Dir>) {
    let mut of = [Vec::new(), Vec::new()];
    let mut volumes = Vec::new();
    for (number, taken) in of.iter_mut().enumerate() {
        let volume = rig.volume(&format!("volume-{number}"), MIB, block_capability()).await;
        for snapshot in 0..3 {
            taken.push(rig.snapshot(&format!("snapshot-{number}-{snapshot}"), &volume).await);
        }
        taken.sort();
        volumes.push(volume);
    }
    for (volume, taken) in volumes.iter().zip(&of) {
        let by_source = ListSnapshotsRequest { source_volume_id: volume.clone(), ..Default::default() };
        assert_eq!(snapshots(&mut rig, by_source.clone()).await, (taken.clone(), String::new()));
        let first = ListSnapshotsRequest { max_entries: 2, ..by_source.clone() };
        let (page, token) = snapshots(&mut rig, first).await;
        assert_eq!(page, taken[..2]);
        let second = ListSnapshotsRequest { starting_token: token, ..by_source };
        assert_eq!(snapshots(&mut rig, second).await, (taken[2..].to_vec(), String::new()));
    }
    let by_id = ListSnapshotsRequest { snapshot_id: of[0][1].clone(), ..Default::default() };
    assert_eq!(snapshots(&mut rig, by_id.clone()).await.0, [of[0][1].clone()]);
    let both = ListSnapshotsRequest { source_volume_id: volumes[1].clone(), ..by_id };
    assert_eq!(snapshots(&mut rig, both).await.0, [""; 0]);
    for unknown in ["nothing", "../x", "snap-00000000000000000000000000000000"] {
        let by_id = ListSnapshotsRequest { snapshot_id: unknown.into(), ..Default::default() };
        assert_eq!(snapshots(&mut rig, by_id).await.0, [""; 0], "an unknown id is an empty list");
        let by_source = ListSnapshotsRequest { source_volume_id: unknown.into(), ..Default::default() };
        assert_eq!(snapshots(&mut rig, by_source).await.0, [""; 0]);
    }
    // The snapshots of a deleted volume are still listed.
    rig.client.delete_volume(&volumes[0]).await.expect("delete");
    let by_source = ListSnapshotsRequest { source_volume_id: volumes[0].clone(), ..Default::default() };
    assert_eq!(snapshots(&mut rig, by_source).await.0, of[0]);
}
