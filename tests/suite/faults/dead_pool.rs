//! The kernel has shut the pool's filesystem down, so that it no longer answers.
//!
//! The incident: a driver whose xfs pool was shut down did not start again. With volumes in use NodeUnpublish was `INTERNAL`,
//! so pods could not end. When the pods end, a restart of the driver repairs the pool; no reboot is needed.

use std::path::PathBuf;

use deltapath::sys::{loopdev::LoopDevice, program};

use super::{
    StorageTrouble, Trouble, hashed, is_unwell, listed, probe, storage, storage_tells, unwell, verify,
};
use testkit::leftovers;
use testkit::prelude::*;

struct Scene {
    rig: Rig,
    raw: String,
    files: String,
    content: Content,
    /// An ephemeral inline volume.
    inline: proto::NodePublishVolumeRequest,
    base: String,
    listed: (Vec<String>, Vec<String>),
}

/// A driver with a device and a filesystem in use, on a pool that is then shut down.
async fn shut_down() -> Scene {
    let mut rig = Rig::start(PoolKind::Xfs).await;
    let (raw, _, content) = rig.written_volume("raw", 16 * MIB, (5, 200, 1)).await;
    let base = rig.snapshot("base", &raw).await;
    hashed(&rig, &[&base]).await;
    let (files, target) = rig.published("files", 32 * MIB, mount_capability("ext4")).await;
    std::fs::write(target.join("file"), "here").expect("write");
    super::sync_fs(&target);
    let inline = crate::usage::ephemeral(&rig, "csi-inline", "16Mi");
    rig.client.node.node_publish_volume(inline.clone()).await.expect("publish");
    let listed = listed(&rig).await;
    program::run("xfs_io", &["-x", "-c", "shutdown"], &rig.pool_dir(), |code| code == 0).expect("shutdown");
    assert!(std::fs::metadata(rig.pool_dir()).is_err(), "it still answers");
    Scene { rig, raw, files, content, inline, base, listed }
}

impl Scene {
    /// Pods end, the driver is restarted, and everything is there.
    async fn comes_back(mut self) {
        let kubelet = self.rig.kubelet();
        assert!(probe(&self.rig).await.is_err(), "Probe does not report the dead pool");
        let said =
            storage_tells(&storage(&self.rig).await, "PoolShutDown", StorageTrouble::StorageUnreachable);
        assert!(said.contains("Input/output error"), "{said}");
        for volume in [&self.raw, &self.files] {
            self.rig.detach(volume).await;
        }
        let undo = requests::unpublish(&self.inline.volume_id, &self.inline.target_path);
        let node = &mut self.rig.client.node;
        node.node_unpublish_volume(undo.clone()).await.expect("the pod with the inline volume ends");
        let target = PathBuf::from(&self.inline.target_path);
        assert!(!target.exists(), "the inline volume's target stays");
        // What is not mounted is not known to be ours.
        std::fs::create_dir(&target).expect("mkdir");
        node.node_unpublish_volume(undo.clone()).await.expect("nothing is mounted there");
        std::fs::remove_dir(&target).expect("an empty directory of somebody is gone");
        let below: Vec<PathBuf> = vec![kubelet.clone(), target];
        let left = leftovers(self.rig.dir.path());
        assert!(
            !left.iter().any(|left| below.iter().any(|dir| PathBuf::from(left).starts_with(dir))),
            "{left:?}"
        );
        let data = self.rig.volume_dir(&self.raw).data();
        assert_eq!(LoopDevice::find(&data).ok().flatten(), None, "the device keeps the pool");
        self.rig.kill();
        self.rig.start_again().await;
        probe(&self.rig).await.expect("the pool is mounted anew");
        assert_eq!(listed(&self.rig).await, self.listed);
        self.rig.client.node.node_unpublish_volume(undo).await.expect("the inline volume is deleted");
        let device = self.rig.attach(&self.raw).await;
        self.content.assert_equals(&device, 0, 300);
        assert_eq!(self.rig.allocated(&self.base).await, self.content.allocated(BLOCK));
        let target = self.rig.publish(&self.files, mount_capability("ext4")).await;
        assert_eq!(std::fs::read_to_string(target.join("file")).expect("read"), "here");
        verify(&self.rig);
        for volume in [&self.raw, &self.files] {
            self.rig.detach(volume).await;
            self.rig.client.delete_volume(volume).await.expect("DeleteVolume");
        }
        self.rig.finish();
    }
}

#[apply(device_test)]
async fn pods_end_on_a_dead_pool_and_a_restart_brings_it_back() {
    let scene = shut_down().await;
    for volume in [&scene.raw, &scene.files] {
        is_unwell(&scene.rig, volume, "PoolShutDown", Trouble::Inaccessible, &[]).await;
    }
    assert_eq!(unwell(&scene.rig, 1).await.len(), 2);
    scene.comes_back().await;
}

#[apply(device_test)]
async fn a_driver_starts_on_a_dead_pool_so_that_pods_can_end() {
    let mut scene = shut_down().await;
    scene.rig.kill();
    scene.rig.start_again().await;
    // The driver knows no objects, but does not report them as deleted.
    let client = &mut scene.rig.client;
    assert_eq!(code(client.delete_volume(&scene.raw).await), Code::Unavailable);
    assert_eq!(code(client.delete_snapshot(&scene.base).await), Code::Unavailable);
    assert_eq!(code(client.allocated(&scene.base, 0, 0).await), Code::Unavailable);
    let refused = code(client.create_volume(new_volume("new", MIB, block_capability())).await);
    assert_eq!(refused, Code::Unavailable);
    assert_eq!(code(client.volumes().await), Code::Unavailable, "the list must fail, not be empty");
    let request = proto::ControllerListVolumeHealthRequest::default();
    let list = client.controller.controller_list_volume_health(request).await;
    assert_eq!(code(list), Code::Unavailable, "the list must fail, not be empty");
    let reported = client.controller.controller_get_volume_health(requests::health(&scene.raw)).await;
    assert_eq!(code(reported), Code::Unavailable, "nothing is known of it");
    scene.comes_back().await;
}
