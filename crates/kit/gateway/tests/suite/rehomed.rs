//! Promise: a tool with rights in its own namespace alone stays incremental, though it takes each snapshot over from another namespace
//! and deletes it, as Velero does.

use csi_client::from_snapshot;
use serde_json::json;
use testkit::content::Content;
use testkit::mover::Image;
use testkit::{BLOCK, MIB, PoolKind, Rig};
use tonic::Code;

use crate::world::{World, code};

const SIZE: i64 = 16 * MIB + 3 * BLOCK as i64;

pub async fn a_tool_that_takes_snapshots_over_stays_incremental(world: World, pool: PoolKind) {
    let mut rig = Rig::start_with(pool, &[&format!("--driver-name={}", world.driver)], "info").await;
    let (own, applications) = (world.namespace.clone(), world.other_namespace().await);
    let gateway = world.gateway(&[&format!("--csi-address={}", rig.socket().display())]).await;
    let (token, mut client) = (world.reader("mover").await, gateway.client().await);
    let (volume, device) = rig.block_volume("data", SIZE).await;
    let (mut content, image) = (Content::default(), Image::new(world.dir.path().join("image")));
    let mut base: Option<String> = None;
    for round in 0..4 {
        content.write(&device, 100 + round * 700, 300, round as u8 + 1);
        // In a unit of the mover that nothing else touches.
        content.write(&device, 3900 - round * 256, 1, round as u8 + 1);
        content.discard(&device, 150 + round * 500, 20);
        let (name, handle) = (format!("backup-{round}"), rig.snapshot(&format!("{round}"), &volume).await);
        world.snapshot(&applications, &name, &handle).await;
        let of_own = format!("content-{own}-{name}");
        let snapshot = json!({"spec": {"source": {"persistentVolumeClaimName": null, "volumeSnapshotContentName": of_own}}});
        let source = json!({"volumeHandle": null, "snapshotHandle": handle});
        let bound = json!({"spec": {"source": source, "deletionPolicy": "Delete"}});
        world.snapshot_but(&own, &name, &handle, json!({"snapshot": snapshot, "content": bound})).await;
        world.delete_snapshot(&applications, &name).await;

        assert_eq!(
            code(&client.allocated(&token, &applications, &name).await),
            Code::PermissionDenied,
            "{round}"
        );
        let answer = match &base {
            None => client.allocated(&token, &own, &name).await,
            Some(base) => client.delta(&token, &own, base, &name).await,
        };
        let (_, tuples) = answer.unwrap_or_else(|answer| panic!("{pool:?} {round}: {answer:?}"));
        let (claim, read) = rig.volume_from(&format!("{round}, read"), SIZE, from_snapshot(&handle)).await;
        let ranges = tuples.into_iter().map(|(offset, size)| (offset as u64, size as u64));
        image.take(&read, ranges).assert_is_close(&name);
        content.assert_equals(&image.path, 0, SIZE as u64 / BLOCK);
        rig.detach(&claim).await;
        rig.client.delete_volume(&claim).await.expect("DeleteVolume");
        world.delete_snapshot(&own, &name).await;
        rig.client.delete_snapshot(&handle).await.expect("DeleteSnapshot");
        base = Some(handle);
    }
    rig.detach_and_finish(&volume).await;
}
