//! A deletion takes long to move files, and other calls need the files meanwhile.

use cbt::MapFile;

use testkit::orders::{Orders, Point};
use testkit::prelude::*;

/// The incident: a deletion moved the files of a snapshot, and the sync after that took long. Until its end the index had the
/// old path. Meanwhile a delta from that base was `NOT_FOUND`, and a new snapshot found no parent, hashed everything and
/// lost its link to the snapshot before.
#[apply(device_test)]
async fn a_snapshot_that_is_being_deleted_is_a_base_all_the_time(rig: Rig<Xfs>) {
    let (volume, device) = rig.block_volume("volume", 8 * MIB).await;
    let (mut content, mut taken) = (Content::default(), Vec::new());
    for number in 0..3 {
        content.write(&device, 10 * number, 20, number as u8 + 1);
        taken.push((rig.snapshot(&format!("snapshot {number}"), &volume).await, content.clone()));
    }
    let mut orders = Orders::new(rig.dir.path());
    orders.count();
    rig.client.delete_snapshot(&taken[0].0).await.expect("delete");
    let points = orders.withdraw();
    let renamed = points.iter().find(|point| point.step == "rename").expect("it is deleted").number;

    // First the base of a delta is deleted, then the newest snapshot, on which a new one builds.
    for number in [1, 2] {
        orders.hold(renamed + 1, "calls", 1_000);
        let (mut client, id) = (rig.client.clone(), taken[number].0.clone());
        let deletion = tokio::spawn(async move { client.delete_snapshot(&id).await });
        orders.reached(&deletion).await;
        if number == 2 {
            content.write(&device, 100, 5, 9);
            let next = rig.snapshot("meanwhile", &volume).await;
            taken.push((next, content.clone()));
        }
        let ((base, before), (target, after)) = (&taken[number], &taken[number + 1]);
        assert_eq!(rig.changed(base, target).await, after.changed_since(before, BLOCK));
        assert!(orders.withdraw().iter().any(|point| point.hit && point.step == "sync"));
        deletion.await.expect("join").expect("delete");
    }
    let newest = rig.pool_dir().join("snapshots").join(&taken[3].0).join("changed.map");
    let relation = MapFile::open(&newest).expect("open").header().relative_to.clone();
    assert_eq!(relation.expect("a link").snapshot.as_str(), taken[2].0);
    rig.detach(&volume).await;
}

/// The incident: two volumes, each with a member of a deleted group, were deleted at the same time. The first deletion had
/// renamed its member and its sync took long. The second removed the last member, and so the group's directory, which the
/// first could then not sync. The first failed and left its member half removed until the next start.
#[apply(device_test)]
async fn members_of_a_deleted_group_leave_one_by_one() {
    // On this pool snapshots are hashed when they are taken, so only the calls move their files.
    let mut rig = Rig::start(PoolKind::Dir).await;
    let mut orders = Orders::new(rig.dir.path());
    let mut held = None;
    for round in 0..2 {
        let mut volumes = Vec::new();
        for name in ["first", "second"] {
            let (volume, ..) = rig.written_volume(&format!("{name} {round}"), 8 * MIB, (10, 20, 1)).await;
            rig.detach(&volume).await;
            volumes.push(volume);
        }
        let group = rig.client.create_group(&format!("group {round}"), &volumes).await.expect("group");
        let members = testkit::members(&group);
        rig.client.delete_group(&group.group_snapshot_id, &members).await.expect("delete the group");
        match held {
            None => orders.count(),
            Some(at) => orders.hold(at, "calls", 1_000),
        }
        let (mut client, first) = (rig.client.clone(), volumes[0].clone());
        let deletion = tokio::spawn(async move { client.delete_volume(&first).await });
        if held.is_some() {
            orders.reached(&deletion).await;
            rig.client.delete_volume(&volumes[1]).await.expect("delete the second");
        }
        deletion.await.expect("join").expect("delete the first");
        let points = orders.withdraw();
        let leaves =
            |point: &&Point| point.step == "rename" && point.path.to_string_lossy().contains("/members/");
        held = points.iter().find(leaves).map(|point| point.number + 1);
        assert!(held.is_some(), "no member is removed: {points:?}");
        if round == 0 {
            rig.client.delete_volume(&volumes[1]).await.expect("delete the second");
        }
        crate::faults::assert_nothing_half_made(&rig).await;
        assert_eq!(names(&rig.pool_dir().join("groups")), Vec::<String>::new(), "round {round}");
    }
    assert!(!rig.log().contains("could not be removed"), "{}", rig.log());
    rig.finish();
}
