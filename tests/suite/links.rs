//! Paths of clients that are symbolic links. Links among the parents of a path lead to a directory of kubelet that was moved; the last
//! part is never followed, and a link that takes the place of a directory while a call is at work is not either.

use std::os::unix::fs::symlink;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

use deltapath::sys::mount;

use testkit::orders::{Orders, Point};
use testkit::prelude::*;

#[track_caller]
fn is_no_place<T>(answer: Result<T, tonic::Status>, field: &str, path: &Path) {
    is_refused(answer, Code::InvalidArgument, &[field, &path.display().to_string(), "symbolic link"]);
}

/// The incident: a target that was a link to /etc got the volume mounted over /etc.
#[apply(device_test)]
async fn a_path_that_is_a_link_is_refused_by_every_node_call(rig: Rig<Dir>) {
    let kubelet = rig.kubelet();
    let (directory, file) = (rig.dir.path().join("etc"), rig.dir.path().join("a-file"));
    std::fs::create_dir(&directory).expect("mkdir");
    std::fs::write(&file, "").expect("write");
    let (to_directory, to_file, to_nothing) =
        (rig.dir.path().join("link"), rig.dir.path().join("file-link"), rig.dir.path().join("dangling"));
    symlink(&directory, &to_directory).expect("symlink");
    symlink(&file, &to_file).expect("symlink");
    symlink(rig.dir.path().join("nothing"), &to_nothing).expect("symlink");
    for (name, capability) in [("files", mount_capability("ext4")), ("raw", block_capability())] {
        let (volume, _) = rig.published(name, 16 * MIB, capability.clone()).await;
        let target = kubelet.join(&volume).join("target");
        rig.unpublish_at(&volume, &target).await;
        for link in [&to_directory, &to_file, &to_nothing] {
            is_no_place(rig.publish_at(&volume, link, capability.clone(), false).await, "target_path", link);
            let node = &mut rig.client.node;
            let stage = stage_of(&volume, link, capability.clone());
            is_no_place(node.node_stage_volume(stage).await, "staging_target_path", link);
            let unpublish = requests::unpublish(&volume, link);
            is_no_place(node.node_unpublish_volume(unpublish).await, "target_path", link);
            let unstage = requests::unstage(&volume, link);
            is_no_place(node.node_unstage_volume(unstage).await, "staging_target_path", link);
        }
        for place in [&directory, &file] {
            assert_eq!(mount::mounted_at(place).expect("mounts"), None, "{}", place.display());
        }
        assert!(to_nothing.is_symlink() && !rig.dir.path().join("nothing").exists());
        rig.detach(&volume).await;
    }
}

/// The target is exchanged for a link to another directory again and again while the volume is published. Nothing is ever mounted
/// behind the link. A link among its parents is followed once, whenever it was put there.
#[apply(device_test)]
async fn a_link_that_is_exchanged_for_a_directory_leads_nowhere() {
    let mut rig = Rig::start(PoolKind::Dir).await;
    let kubelet = rig.kubelet();
    let capability = mount_capability("ext4");
    let (volume, _) = rig.published("files", 16 * MIB, capability.clone()).await;
    let pod = rig.dir.path().join("pod");
    let (parent, victim) = (pod.join("parent"), rig.dir.path().join("victim"));
    std::fs::create_dir_all(&parent).expect("mkdir");
    std::fs::create_dir_all(&victim).expect("mkdir");
    let target = parent.join("target");
    let is_over = AtomicBool::new(false);
    let mut client = rig.client.node.clone();
    rig.unpublish_at(&volume, &kubelet.join(&volume).join("target")).await;
    let request = rig.publish_request(&volume, &target, capability, false);
    let aside = pod.join("aside");
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !is_over.load(Ordering::Relaxed) {
                // A directory that something is mounted on cannot be moved, nor what is missing.
                if std::fs::rename(&target, &aside).is_ok() {
                    let _ = symlink(&victim, &target);
                    let _ = std::fs::remove_file(&target);
                    let _ = std::fs::rename(&aside, &target);
                }
            }
        });
        let runtime = tokio::runtime::Handle::current();
        let done = tokio::task::block_in_place(|| {
            runtime.block_on(async {
                for _ in 0..150 {
                    let _ = client.node_publish_volume(request.clone()).await;
                    if mount::mounted_at(&victim).expect("mounts").is_some() {
                        return Err(());
                    }
                    let _ = client.node_unpublish_volume(requests::unpublish(&volume, &target)).await;
                }
                Ok(())
            })
        });
        is_over.store(true, Ordering::Relaxed);
        assert_eq!(done, Ok(()), "the volume was mounted behind a link");
    });
    // The directory may have been moved with the volume on it.
    while mount::mounted_at(&aside).expect("mounts").is_some() {
        mount::unmount_top(&aside).expect("unmount");
    }
    client.node_unpublish_volume(requests::unpublish(&volume, &target)).await.expect("unpublish");
    rig.detach(&volume).await;
    testkit::nothing_left(rig.dir.path());
    rig.finish();
}

/// The directory above a target is exchanged for a link while the target is made, or removed: what is behind the link stays as it is.
#[apply(device_cases)]
async fn a_parent_that_is_exchanged_for_a_link_leads_nowhere(
    rig: Rig<Dir>,
    #[values(block_capability(), mount_capability("ext4"))] capability: proto::VolumeCapability,
) {
    let kubelet = rig.kubelet();
    let (volume, _) = rig.published("volume", 16 * MIB, capability.clone()).await;
    rig.unpublish_at(&volume, &kubelet.join(&volume).join("target")).await;
    let (parent, aside) = (rig.dir.path().join("parent"), rig.dir.path().join("aside"));
    let (target, victim) = (parent.join("target"), rig.dir.path().join("victim"));
    for dir in [&parent, &victim] {
        std::fs::create_dir(dir).expect("mkdir");
    }
    let publish = rig.publish_request(&volume, &target, capability, false);
    let undo = requests::unpublish(&volume, &target);
    let mut orders = Orders::new(rig.dir.path());
    // The steps of both calls on the target itself.
    orders.count();
    rig.client.node.node_publish_volume(publish.clone()).await.expect("publish");
    let made = orders.withdraw();
    orders.count();
    rig.client.node.node_unpublish_volume(undo.clone()).await.expect("unpublish");
    let removed = orders.withdraw();
    let at = |points: &[Point], steps: [&str; 2]| {
        points.iter().find(|point| steps.contains(&point.step.as_str())).expect("the step").number
    };
    let (made, removed) = (at(&made, ["create", "make the directory"]), at(&removed, ["remove", "remove"]));

    let exchange = || {
        std::fs::rename(&parent, &aside).expect("move away");
        symlink(&victim, &parent).expect("symlink");
    };
    let put_back = || {
        std::fs::remove_file(&parent).expect("remove the link");
        std::fs::rename(&aside, &parent).expect("move back");
    };
    orders.hold(made, "calls", 300);
    let (mut client, request) = (rig.client.node.clone(), publish.clone());
    let call = tokio::spawn(async move { client.node_publish_volume(request).await });
    orders.reached(&call).await;
    exchange();
    let _ = call.await.expect("join");
    orders.withdraw();
    assert!(names(&victim).is_empty(), "a target was made behind the link: {:?}", names(&victim));
    put_back();

    rig.client.node.node_publish_volume(publish).await.expect("publish");
    std::fs::create_dir(victim.join("target")).expect("mkdir");
    orders.hold(removed, "calls", 300);
    let mut client = rig.client.node.clone();
    let request = undo.clone();
    let call = tokio::spawn(async move { client.node_unpublish_volume(request).await });
    orders.reached(&call).await;
    exchange();
    let _ = call.await.expect("join");
    orders.withdraw();
    assert_eq!(names(&victim), ["target"], "what is behind the link was removed");
    put_back();
    rig.client.node.node_unpublish_volume(undo).await.expect("unpublish");
    rig.detach(&volume).await;
}
