//! A fault of a volume, or of the storage below it, is reported with its reason as long as it exists:
//! ControllerGetVolumeHealth, ControllerListVolumeHealth, NodeGetVolumeHealth and NodeGetStorageHealth. `faults` tests pools
//! that are full, read-only, dead or damaged, with the functions of this file.

use std::fs::File;
use std::path::Path;

use deltapath::sys::loopdev::LoopDevice;
use deltapath::sys::{self, sweep::devices_below};
use proto::VolumeHealth;
use proto::node_get_storage_health_response::StorageBackendHealth;
use proto::volume_health::VolumeHealthEntry;
pub use proto::{StorageHealthErrorType, VolumeHealthErrorType};
use tonic::Status;

use testkit::eventually;
use testkit::prelude::*;

/// The faults of a volume, as the controller reports them.
pub async fn health(rig: &Rig, volume: &str) -> Vec<VolumeHealthEntry> {
    let reported = rig.client.controller.clone().controller_get_volume_health(requests::health(volume)).await;
    of(reported.expect("ControllerGetVolumeHealth").into_inner().volume_health, volume)
}

/// The faults of a volume at all its places, as the node reports them.
pub async fn node_health(rig: &Rig, volume: &str) -> Vec<VolumeHealthEntry> {
    node_health_at(rig, volume, "", "").await.expect("NodeGetVolumeHealth")
}

async fn node_health_at(
    rig: &Rig,
    volume: &str,
    published: &str,
    staged: &str,
) -> Result<Vec<VolumeHealthEntry>, Status> {
    let request = proto::NodeGetVolumeHealthRequest {
        volume_id: volume.to_owned(),
        volume_publish_path: published.to_owned(),
        staging_target_path: staged.to_owned(),
    };
    let reported = rig.client.node.clone().node_get_volume_health(request).await?;
    Ok(of(reported.into_inner().volume_health, volume))
}

#[track_caller]
fn of(health: Option<VolumeHealth>, volume: &str) -> Vec<VolumeHealthEntry> {
    let health = health.expect("volume_health is required");
    assert_eq!(health.volume_id, volume);
    check(&health);
    health.health_statuses
}

/// Checks what the spec demands of every answer.
#[track_caller]
fn check(health: &VolumeHealth) {
    let entries = &health.health_statuses;
    for (number, entry) in entries.iter().enumerate() {
        assert_ne!(entry.status(), VolumeHealthErrorType::UnknownVolumeHealthType, "{entry:?}");
        let is_camel = entry.reason.starts_with(char::is_uppercase)
            && entry.reason.chars().all(|c| c.is_ascii_alphanumeric());
        assert!(is_camel && (1..=1024).contains(&entry.message.len()), "{entry:?}");
        let is_same =
            |other: &VolumeHealthEntry| other.reason == entry.reason && other.status == entry.status;
        assert!(!entries[..number].iter().any(is_same), "twice: {entries:?}");
    }
}

/// The listed volumes with faults, read in pages of at most `most` entries.
pub async fn unwell(rig: &Rig, most: i32) -> Vec<VolumeHealth> {
    let mut request = proto::ControllerListVolumeHealthRequest { max_entries: most, ..Default::default() };
    let mut all = Vec::new();
    loop {
        let page = rig.client.controller.clone().controller_list_volume_health(request.clone()).await;
        let page = page.expect("ControllerListVolumeHealth").into_inner();
        assert!(most == 0 || page.entries.len() <= most as usize);
        page.entries.iter().for_each(check);
        all.extend(page.entries);
        if page.next_token.is_empty() {
            return all;
        }
        request.starting_token = page.next_token;
    }
}

/// The faults of the node's storage.
pub async fn storage(rig: &Rig) -> Vec<StorageBackendHealth> {
    let request = proto::NodeGetStorageHealthRequest::default();
    let reported = rig.client.node.clone().node_get_storage_health(request).await;
    reported.expect("NodeGetStorageHealth").into_inner().backend_health
}

/// The controller and the node report this fault of a volume, with a message that holds these texts. Returns how many faults
/// they report, whoever reports more.
pub async fn is_reported(
    rig: &Rig,
    volume: &str,
    reason: &str,
    status: VolumeHealthErrorType,
    texts: &[&str],
) -> usize {
    let mut most = 0;
    for view in [health(rig, volume).await, node_health(rig, volume).await] {
        let said = tells(&view, reason, status);
        assert!(texts.iter().all(|text| said.contains(text)), "{said}");
        most = most.max(view.len());
    }
    most
}

/// They report this fault and no other.
pub async fn is_unwell(rig: &Rig, volume: &str, reason: &str, status: VolumeHealthErrorType, texts: &[&str]) {
    assert_eq!(is_reported(rig, volume, reason, status, texts).await, 1, "another fault than {reason}");
}

/// Fails if a reason is not reported, and returns its message.
#[track_caller]
pub fn tells(entries: &[VolumeHealthEntry], reason: &str, status: VolumeHealthErrorType) -> String {
    let found = entries.iter().find(|entry| entry.reason == reason);
    let found = found.unwrap_or_else(|| panic!("{reason} is not among {entries:?}"));
    assert_eq!(found.status(), status, "{found:?}");
    found.message.clone()
}

/// The same for the storage.
#[track_caller]
pub fn storage_tells(
    entries: &[StorageBackendHealth],
    reason: &str,
    status: StorageHealthErrorType,
) -> String {
    let found = entries.iter().find(|entry| entry.reason == reason);
    let found = found.unwrap_or_else(|| panic!("{reason} is not among {entries:?}"));
    assert_eq!(found.status(), status, "{found:?}");
    found.message.clone()
}

use VolumeHealthErrorType::{DataLoss, Degraded, Inaccessible};

/// The checks of csi-sanity and more: the capabilities, which requests are refused, and that a healthy volume has no faults,
/// wherever it is in use and even where publishing it failed.
#[apply(every_pool)]
async fn a_volume_that_is_well_has_nothing_to_tell(rig: Rig<pool>) {
    let mut controller = rig.client.controller.clone();
    let claimed = controller.controller_get_capabilities(proto::ControllerGetCapabilitiesRequest {}).await;
    let claimed = format!("{:?}", claimed.expect("capabilities").into_inner());
    assert!(["GetVolumeHealth", "ListVolumeHealth"].iter().all(|name| claimed.contains(name)), "{claimed}");
    let claimed = rig.client.node.node_get_capabilities(proto::NodeGetCapabilitiesRequest {}).await;
    let claimed = format!("{:?}", claimed.expect("capabilities").into_inner());
    assert!(["GetVolumeHealth", "GetStorageHealth"].iter().all(|name| claimed.contains(name)), "{claimed}");

    let (raw, device) = rig.block_volume("raw", 16 * MIB).await;
    let capability = mount_capability("ext4");
    let files = rig.volume("files", 64 * MIB, capability.clone()).await;
    // The volume is not in use, or kubelet only tried to use it.
    for (published, staged) in [("", ""), ("/nowhere/published", ""), ("/nowhere/published", "/nowhere")] {
        assert_eq!(node_health_at(&rig, &files, published, staged).await.expect("it exists"), []);
    }
    let kubelet = rig.kubelet();
    let target = rig.publish(&files, capability).await;
    let staging = kubelet.join(&files).join("staging").display().to_string();
    let target = target.display().to_string();
    for (published, staged) in [("", ""), (target.as_str(), ""), ("", staging.as_str()), (&target, &staging)]
    {
        assert_eq!(node_health_at(&rig, &files, published, staged).await.expect("it exists"), []);
    }
    assert_eq!(node_health_at(&rig, &raw, &device.display().to_string(), "").await.expect("it exists"), []);
    for volume in [&raw, &files] {
        assert_eq!(health(&rig, volume).await, []);
    }
    assert_eq!(unwell(&rig, 0).await, []);
    // The disk of the test machine may have no direct I/O.
    let reported: Vec<_> =
        storage(&rig).await.into_iter().filter(|reported| reported.reason != "NoDirectIO").collect();
    assert_eq!(reported, []);

    for (volume, published, staged, expected) in [
        ("", "", "", Code::InvalidArgument),
        ("", target.as_str(), "", Code::InvalidArgument),
        ("unknown", "", "", Code::NotFound),
        (raw.as_str(), "relative", "", Code::InvalidArgument),
        (&raw, "", "/not/../plain", Code::InvalidArgument),
    ] {
        let refused = node_health_at(&rig, volume, published, staged).await;
        assert_eq!(code(refused), expected, "{volume} {published} {staged}");
    }
    for (volume, expected) in [("", Code::InvalidArgument), ("unknown", Code::NotFound)] {
        let request = requests::health(volume);
        assert_eq!(code(controller.controller_get_volume_health(request).await), expected);
    }
    for (max_entries, token, expected) in
        [(-1, "", Code::InvalidArgument), (0, "nonsense", Code::Aborted), (1, "0", Code::Aborted)]
    {
        let request = proto::ControllerListVolumeHealthRequest {
            max_entries,
            starting_token: token.into(),
            ..Default::default()
        };
        assert_eq!(code(controller.controller_list_volume_health(request).await), expected);
    }
    rig.detach(&files).await;
    rig.delete(&raw).await;
    let request = requests::health(raw);
    assert_eq!(code(controller.controller_get_volume_health(request).await), Code::NotFound);
}

fn set_length(path: &Path, bytes: i64) {
    File::options()
        .write(true)
        .open(path)
        .and_then(|file| file.set_len(bytes as u64))
        .expect("set the length");
}

/// A missing or truncated file, and a record that cannot be read, are reported. The list has only such volumes, each once,
/// with pages of any size.
#[apply(device_test)]
async fn lost_bytes_and_records_are_reported_and_listed(rig: Rig<Dir>) {
    let mut volumes = Vec::new();
    for number in 0..8 {
        volumes.push(rig.volume(&format!("volume-{number}"), 4 * MIB, block_capability()).await);
    }
    volumes.sort();
    let ids = |list: Vec<VolumeHealth>| -> Vec<String> {
        list.into_iter().map(|health| health.volume_id).collect()
    };
    assert_eq!(ids(unwell(&rig, 2).await), [""; 0]);
    // These four of the eight, in the order of the list, including the first and the last.
    let (cut, missing, damaged, last) = (&volumes[0], &volumes[2], &volumes[3], &volumes[7]);
    for volume in [cut, last] {
        set_length(&rig.volume_dir(volume).data(), MIB);
    }
    // A volume in use is reported too.
    rig.attach(missing).await;
    let moved = rig.volume_dir(missing).data().with_extension("moved");
    std::fs::rename(rig.volume_dir(missing).data(), &moved).expect("move away");
    is_unwell(&rig, cut, "FileTruncated", DataLoss, &["1048576 bytes of 4194304"]).await;
    is_reported(&rig, missing, "FileMissing", DataLoss, &["data.img is missing"]).await;
    assert_eq!(ids(unwell(&rig, 0).await), [cut, missing, last].map(String::clone));
    for listed in unwell(&rig, 0).await {
        assert_eq!(listed.health_statuses, health(&rig, &listed.volume_id).await, "{}", listed.volume_id);
    }

    let record = rig.pool_dir().join("volumes").join(damaged).join("record.json");
    let sound = std::fs::read(&record).expect("read");
    rig.kill();
    std::fs::write(&record, "{").expect("write");
    rig.start_again().await;
    is_reported(&rig, damaged, "RecordUnreadable", Inaccessible, &["record.json", "repair or remove"]).await;
    // All other calls for it fail, since it neither can be used nor is deleted.
    let request = proto::ControllerGetVolumeRequest { volume_id: damaged.clone() };
    let get = rig.client.controller.controller_get_volume(request).await;
    assert_eq!(code(get), Code::Internal);
    let all = [cut, missing, damaged, last].map(String::clone);
    for most in [0, 1, 2, 3, 4, 5] {
        let list = unwell(&rig, most).await;
        assert!(list.iter().all(|health| !health.health_statuses.is_empty()));
        assert_eq!(ids(list), all, "in pages of {most}");
    }
    // After a full last page there is no next page.
    let request = proto::ControllerListVolumeHealthRequest { max_entries: 4, ..Default::default() };
    let page = rig.client.controller.controller_list_volume_health(request).await.expect("list");
    assert_eq!(page.into_inner().next_token, "");

    rig.kill();
    std::fs::write(&record, sound).expect("write");
    rig.start_again().await;
    std::fs::rename(moved, rig.volume_dir(missing).data()).expect("move back");
    rig.detach(missing).await;
    for volume in [cut, last] {
        set_length(&rig.volume_dir(volume).data(), 4 * MIB);
    }
    assert_eq!(ids(unwell(&rig, 1).await), [""; 0], "what is well again is reported no more");
}

/// The incident: the end of a volume's file was lost. The next stage made the file as long as before, with zeros, and snapshots and
/// backups took the zeros for content; a filesystem whose file was empty was formatted anew.
#[apply(every_pool)]
async fn a_file_whose_end_is_missing_is_not_filled_with_zeros(rig: Rig<pool>) {
    let raw = rig.volume("raw", 4 * MIB, block_capability()).await;
    let files = rig.volume("files", 16 * MIB, mount_capability("ext4")).await;
    let snapshot = rig.snapshot("of it", &raw).await;
    set_length(&rig.volume_dir(&raw).data(), MIB);
    set_length(&rig.volume_dir(&files).data(), 0);
    set_length(&rig.snapshot_dir(&snapshot).data(), MIB);
    let from = |source| new_volume_from("made of it", 4 * MIB, block_capability(), source);
    let answers = [
        ("publish", rig.try_publish(&raw, block_capability()).await.map(drop)),
        ("stage", rig.try_publish(&files, mount_capability("ext4")).await.map(drop)),
        ("snapshot", rig.client.create_snapshot("of zeros", &raw).await.map(drop)),
        ("clone", rig.client.create_volume(from(from_volume(&raw))).await.map(drop)),
        ("restore", rig.client.create_volume(from(from_snapshot(&snapshot))).await.map(drop)),
        ("expand", rig.client.expand_volume(&raw, 8 * MIB).await.map(drop)),
    ];
    for (call, answer) in answers {
        println!("{call}");
        is_refused(answer, Code::DataLoss, &["its end is missing"]);
    }
    for volume in [&raw, &files] {
        tells(&health(&rig, volume).await, "FileTruncated", DataLoss);
        rig.detach(volume).await;
        rig.client.delete_volume(volume).await.expect("DeleteVolume");
    }
    rig.client.delete_snapshot(&snapshot).await.expect("DeleteSnapshot");
}

/// It cannot be told whether a volume's file exists, because its directory cannot be read. Here a file is in place of the
/// directory; with a failing disk it would be an I/O error.
#[apply(device_test)]
async fn bytes_that_do_not_answer_are_reported(rig: Rig<Dir>) {
    let volume = rig.volume("volume", 4 * MIB, block_capability()).await;
    assert_eq!(health(&rig, &volume).await, []);
    let bytes = rig.volume_dir(&volume).data().parent().expect("a directory").to_owned();
    let moved = bytes.with_extension("moved");
    std::fs::rename(&bytes, &moved).expect("move away");
    std::fs::write(&bytes, "").expect("write");
    is_unwell(&rig, &volume, "FileUnreadable", Inaccessible, &["data.img cannot be read: Not a directory"])
        .await;
    assert_eq!(unwell(&rig, 0).await.len(), 1);
    std::fs::remove_file(&bytes).expect("remove");
    std::fs::rename(&moved, &bytes).expect("move back");
    assert_eq!(health(&rig, &volume).await, []);
    rig.client.delete_volume(&volume).await.expect("delete");
}

fn remount(option: &str, place: &Path) {
    testkit::ok(std::process::Command::new("mount").args(["-o", option]).arg(place));
}

/// Makes the kernel give up the one mounted filesystem: by an error of ext4, or a shutdown of xfs.
pub fn give_up(rig: &Rig, fs_type: &str, target: &Path) {
    if fs_type == "xfs" {
        sys::program::run("xfs_io", &["-x", "-c", "shutdown"], target, |code| code == 0).expect("shutdown");
        return;
    }
    let device = devices_below(&rig.pool_dir()).expect("devices").pop().expect("a device").path();
    let trigger =
        Path::new("/sys/fs/ext4").join(device.file_name().expect("a name")).join("trigger_fs_error");
    std::fs::write(trigger, "a test").expect("trigger an error");
}

/// Only the node reports what other programs and the kernel do to a filesystem in use. The controller does not report it.
#[apply(device_cases)]
async fn a_node_tells_what_is_wrong_with_a_mounted_filesystem(
    rig: Rig<Dir>,
    #[values("ext4", "xfs", "btrfs")] fs_type: &str,
) {
    let kubelet = rig.kubelet();
    let capability = mount_capability(fs_type);
    let (volume, target) = rig.published(fs_type, 320 * MIB, capability.clone()).await;
    let staging = kubelet.join(&volume).join("staging");
    assert_eq!(node_health(&rig, &volume).await, []);

    // All mounts become read-only, as after an error.
    remount("remount,ro", &staging);
    let reported = node_health(&rig, &volume).await;
    tells(&reported, "FilesystemReadOnly", Degraded);
    assert_eq!(reported.len(), 1, "{reported:?}");
    remount("remount,rw", &staging);
    assert_eq!(node_health(&rig, &volume).await, []);

    // Unmounted from one of two places. The call names this place, the other, or none.
    sys::mount::unmount(&target).expect("a stranger unmounts it");
    let reported = node_health(&rig, &volume).await;
    let said = tells(&reported, "NotMounted", Inaccessible);
    assert!(said.contains(&target.display().to_string()) && !said.contains("staging"), "{said}");
    let (target_path, staging_path) = (target.display().to_string(), staging.display().to_string());
    let reported = node_health_at(&rig, &volume, &target_path, "").await.expect("health");
    tells(&reported, "NotMounted", Inaccessible);
    assert_eq!(node_health_at(&rig, &volume, "", &staging_path).await.expect("health"), []);
    // The statistics must not be those of the filesystem below the mount point.
    assert_eq!(code(rig.stats(&volume, &target).await), Code::NotFound);
    assert_eq!(health(&rig, &volume).await, []);
    rig.publish(&volume, capability).await;
    assert_eq!(node_health(&rig, &volume).await, []);

    match fs_type {
        "ext4" => {
            give_up(&rig, fs_type, &target);
            // ext4 counts the error a little later.
            let is_counted = async || !node_health(&rig, &volume).await.is_empty();
            eventually("the error is counted", is_counted).await;
            let said = tells(&node_health(&rig, &volume).await, "FilesystemErrors", Degraded);
            assert!(said.contains("ext4 has counted errors, 1 so far"), "{said}");
        }
        "xfs" => {
            give_up(&rig, fs_type, &target);
            let reported = node_health(&rig, &volume).await;
            let said = tells(&reported, "FilesystemShutDown", Inaccessible);
            assert!(said.contains("does not answer"), "{said}");
            assert_eq!(code(rig.stats(&volume, &target).await), Code::Internal);
        }
        _ => {}
    }
    rig.detach(&volume).await;
    assert_eq!(node_health(&rig, &volume).await, [], "{fs_type}");
    rig.client.delete_volume(&volume).await.expect("delete");
}

/// A device is gone: detached by another program, or lost in a reboot.
#[apply(device_test)]
async fn a_node_tells_that_a_device_is_gone(rig: Rig<Dir>) {
    let (raw, target) = rig.block_volume("raw", 16 * MIB).await;
    let capability = mount_capability("ext4");
    let (files, _) = rig.published("files", 64 * MIB, capability.clone()).await;

    let device = || LoopDevice::find(&rig.volume_dir(&raw).data()).expect("look").expect("a device");
    sys::mount::unmount(&target).expect("a stranger unmounts it");
    let said = tells(&node_health(&rig, &raw).await, "DeviceGone", Inaccessible);
    assert!(said.contains(&target.display().to_string()), "{said}");
    assert!(device().detach().expect("detach"));
    let said = tells(&node_health(&rig, &raw).await, "DeviceGone", Inaccessible);
    assert!(said.contains("no device"), "{said}");
    assert_eq!(health(&rig, &raw).await, [], "the bytes are there");
    assert_eq!(node_health(&rig, &files).await, [], "it is another volume's device");
    rig.attach(&raw).await;
    assert_eq!(node_health(&rig, &raw).await, []);

    rig.kill();
    sys::sweep::sweep(rig.dir.path()).expect("a reboot");
    rig.start_again().await;
    let reported = node_health(&rig, &files).await;
    let said = tells(&reported, "DeviceGone", Inaccessible);
    assert!(said.contains("lost in a reboot") && reported.len() == 1, "{reported:?}");
    rig.publish(&files, capability).await;
    assert_eq!(node_health(&rig, &files).await, []);
    rig.detach(&files).await;
    rig.detach(&raw).await;
}

/// Running calls cause no false faults: between the record of a place and its mount nothing is reported.
#[apply(device_test)]
async fn calls_at_work_are_no_trouble(rig: Rig<Dir>) {
    let capability = mount_capability("ext4");
    let files = rig.volume("files", 64 * MIB, capability.clone()).await;
    let (stop, stopped) = tokio::sync::watch::channel(false);
    let watcher = {
        let (client, files) = (rig.client.clone(), files.clone());
        tokio::spawn(async move {
            let mut looks = 0;
            while !*stopped.borrow() {
                let request =
                    proto::NodeGetVolumeHealthRequest { volume_id: files.clone(), ..Default::default() };
                let reported = client.node.clone().node_get_volume_health(request).await.expect("health");
                assert_eq!(of(reported.into_inner().volume_health, &files), []);
                let request = proto::ControllerListVolumeHealthRequest::default();
                let list = client.controller.clone().controller_list_volume_health(request).await;
                assert_eq!(list.expect("list").into_inner().entries, []);
                looks += 1;
            }
            looks
        })
    };
    for round in 0..20 {
        rig.publish(&files, capability.clone()).await;
        rig.detach(&files).await;
        let passing = rig.volume(&format!("passing {round}"), MIB, block_capability()).await;
        rig.client.delete_volume(&passing).await.expect("delete");
    }
    stop.send(true).expect("the watcher lives");
    assert!(watcher.await.expect("no alarm") > 20, "the watcher made too few calls");
}
