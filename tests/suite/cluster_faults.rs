//! `cbt-lab faults` as deploy/overlays/faults runs it, in front of a real driver. All clients of the driver's socket get the
//! faults that are turned on over HTTP or named by a VolumeSnapshotClass, and no others.

use std::time::Duration;

use csi_client::BlockList;
use testkit::lab::Lab;
use testkit::prelude::*;

use crate::manifests::{container, objects_of, pod_spec, strings};

/// Arguments of a container of the overlay's driver pod.
fn arguments(name: &str) -> Vec<String> {
    let objects = objects_of("deploy/overlays/faults");
    let plugin = objects.iter().find(|found| found.is("StatefulSet", "deltapath-plugin")).expect("a driver");
    let pod = pod_spec(&plugin.object).expect("a pod");
    let container = container(pod, name).unwrap_or_else(|| panic!("no container {name}"));
    strings(&container["args"]).into_iter().map(str::to_owned).collect()
}

#[apply(device_test)]
async fn the_go_between_of_the_manifest_stands_before_the_driver() {
    let (faults, driver) = (arguments("faults"), arguments("deltapath"));
    let mut rig = Rig::start(PoolKind::Xfs).await;
    let front = rig.dir.path().join("front.sock");
    // The sockets have other paths here than in the pod. The port is chosen by the kernel, since other tests use
    // ports too.
    let upstream = faults.iter().find_map(|argument| argument.strip_prefix("--upstream=")).expect("a flag");
    assert!(driver.contains(&format!("--endpoint={upstream}")), "{driver:?} does not serve at {upstream}");
    let here = |argument: &String| {
        argument
            .replace(upstream, &format!("unix://{}", rig.socket().display()))
            .replace("unix:///csi/csi.sock", &format!("unix://{}", front.display()))
            .replace("127.0.0.1:9900", "127.0.0.1:0")
    };
    let between = Lab::start(faults.iter().map(here)).await;
    // From here on all calls go through it, as those of sidecars, kubelet and the gateway do.
    let directly = rig.client.clone();
    rig.client = Client::connect(&front, Duration::from_secs(10)).await.expect("connect");

    let (volume, device, mut content) = rig.written_volume("disk", 64 * MIB, (0, 300, 1)).await;
    let first = rig.snapshot("first", &volume).await;
    let before = content.clone();
    content.write(&device, 100, 5, 2);
    content.write(&device, 5000, 7, 3);
    let second = rig.snapshot("second", &volume).await;
    let changed = content.changed_since(&before, 4096);
    let is_whole = |list: &BlockList| assert_eq!(blocks_of(list, 4096), changed);
    is_whole(&rig.client.delta(&first, &second, 0, 1).await.expect("a delta"));

    between.put("cut:after=1,first=1").await;
    assert_eq!(code(rig.client.delta(&first, &second, 0, 1).await), Code::Unavailable, "it is cut");
    is_whole(&rig.client.delta(&first, &second, 0, 1).await.expect("the next is whole"));
    between.put("lose-last").await;
    let lost = rig.client.delta(&first, &second, 0, 0).await.expect("a delta");
    assert_eq!(lost.tuples().count(), 1, "two ranges changed, and one is lost");
    between.put("").await;

    // The proxy removes this parameter of a VolumeSnapshotClass; the driver would refuse it.
    let request = proto::CreateSnapshotRequest {
        source_volume_id: volume.clone(),
        name: "marked".into(),
        parameters: [("cbt-lab.fault".to_owned(), "cut:after=0,code=DATA_LOSS".to_owned())].into(),
        ..Default::default()
    };
    let refused = directly.clone().controller.create_snapshot(request.clone()).await;
    assert_eq!(code(refused), Code::InvalidArgument, "the driver has no such parameter");
    let made = rig.client.controller.create_snapshot(request).await.expect("CreateSnapshot").into_inner();
    let marked = made.snapshot.expect("a snapshot").snapshot_id;
    assert_eq!(code(rig.client.delta(&second, &marked, 0, 0).await), Code::DataLoss, "it is marked");
    is_whole(&rig.client.delta(&first, &second, 0, 0).await.expect("a delta of others"));

    rig.delete(&volume).await;
    drop(between);
    rig.client = directly;
    for snapshot in [first, second, marked] {
        rig.client.delete_snapshot(&snapshot).await.expect("delete");
    }
    rig.finish();
}
