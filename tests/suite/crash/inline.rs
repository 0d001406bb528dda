//! The publish of an inline volume is killed, and its retry fails.

use std::process::Command;

use crate::usage::ephemeral;
use testkit::orders::{Cut, Orders};
use testkit::prelude::*;

/// The incident: the driver was killed while it made the filesystem of an inline volume, the retry failed with a final code,
/// and the pod was deleted. Kubelet had mounted nothing, so it never called NodeUnpublishVolume. The record, the data and
/// the loop device stayed for ever.
#[apply(device_test)]
async fn an_inline_volume_that_no_pod_has_seen_goes_when_its_publish_fails(rig: Rig<Xfs>) {
    let mut orders = Orders::new(rig.dir.path());
    let (volumes, mut failed) = (rig.pool_dir().join("volumes"), 0);
    for at in 1.. {
        let publish = ephemeral(&rig, &format!("csi-{at}"), "16Mi");
        let unpublish = requests::unpublish(&publish.volume_id, &publish.target_path);
        orders.give(Cut::Kill, at, "calls");
        let published = rig.client.node.node_publish_volume(publish.clone()).await.is_ok();
        orders.withdraw();
        if !published {
            rig.crash().await;
            orders.give(Cut::Error(nix::libc::EIO), 1, "calls");
            let again = rig.client.node.node_publish_volume(publish).await;
            orders.withdraw();
            for volume in names(&volumes).iter().filter(|_| again.is_err()) {
                let data = volumes.join(volume).join("bytes/data.img");
                let seen = Command::new("blkid").arg("-p").arg(&data).status().expect("run blkid");
                assert!(seen.success(), "killed before step {at}: a volume without a filesystem stays");
            }
            failed += usize::from(again.is_err());
        }
        rig.client.node.node_unpublish_volume(unpublish).await.expect("unpublish");
        assert_eq!(names(&volumes), Vec::<String>::new(), "killed before step {at}");
        if published {
            break;
        }
    }
    assert!(failed > 5, "only {failed} retries failed");
}
