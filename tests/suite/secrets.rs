//! Secrets are never in logs, records or errors.

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use csi_client::delta_of;

use testkit::mount_with;
use testkit::prelude::*;

const SECRET: &str = "hunter2-do-not-print";

fn secrets() -> HashMap<String, String> {
    HashMap::from([("token".to_owned(), SECRET.to_owned()), (SECRET.to_owned(), "x".to_owned())])
}

fn files_with_secret(dir: &Path) -> Vec<PathBuf> {
    let is_small = |path: &PathBuf| path.is_file() && std::fs::metadata(path).expect("stat").len() < 1 << 20;
    let tells = |path: &PathBuf| {
        let bytes = std::fs::read(path).expect("read");
        bytes.windows(SECRET.len()).any(|window| window == SECRET.as_bytes())
    };
    let files = testkit::paths_below(dir).into_iter();
    files.filter(|path| !path.is_symlink() && is_small(path) && tells(path)).collect()
}

/// Seen in other drivers: at a high log level whole requests are logged, with their secrets. Mount flags count as secrets
/// too (CSI spec, `MountVolume.mount_flags`).
#[apply(device_test)]
async fn no_secret_is_logged_stored_or_reported() {
    let mut rig = Rig::start_with(PoolKind::Dir, &[], "trace").await;
    let mut errors = Vec::new();

    let mut create = new_volume("secretive", MIB, block_capability());
    create.secrets = secrets();
    let volume = rig.client.create_volume(create.clone()).await.expect("create").volume_id;
    create.parameters = HashMap::from([("blockSize".to_owned(), "17".to_owned())]);
    errors.push(rig.client.create_volume(create).await.expect_err("bad blockSize").to_string());

    let mounted = mount_with("ext4", &["noatime", &format!("context={SECRET}")]);
    let filesystem = rig.volume("mounted", 8 * MIB, mounted.clone()).await;

    let snapshot = proto::CreateSnapshotRequest {
        name: "secretive".into(),
        source_volume_id: volume.clone(),
        secrets: secrets(),
        ..Default::default()
    };
    let snapshot = rig.client.controller.create_snapshot(snapshot).await.expect("snapshot").into_inner();
    let snapshot = snapshot.snapshot.expect("a snapshot").snapshot_id;

    let staging = rig.dir.path().join("staging");
    std::fs::create_dir(&staging).expect("mkdir");
    for volume_id in [&volume, &filesystem] {
        let stage = proto::NodeStageVolumeRequest {
            secrets: secrets(),
            ..stage_of(volume_id, &staging, mounted.clone())
        };
        errors.push(rig.client.node.node_stage_volume(stage).await.expect_err("a refused flag").to_string());
    }
    let publish = requests::publish(&volume, &staging, rig.dir.path().join("target"), mounted);
    let publish = proto::NodePublishVolumeRequest { secrets: secrets(), ..publish };
    errors.push(rig.client.node.node_publish_volume(publish).await.expect_err("not staged").to_string());

    let allocated = proto::GetMetadataAllocatedRequest {
        snapshot_id: snapshot.clone(),
        secrets: secrets(),
        ..Default::default()
    };
    let mut stream =
        rig.client.metadata.get_metadata_allocated(allocated).await.expect("stream").into_inner();
    while stream.message().await.expect("message").is_some() {}
    let delta = proto::GetMetadataDeltaRequest { secrets: secrets(), ..delta_of(&snapshot, "unknown") };
    errors.push(rig.client.metadata.get_metadata_delta(delta).await.expect_err("unknown").to_string());

    let list = proto::ListSnapshotsRequest { secrets: secrets(), ..Default::default() };
    rig.client.controller.list_snapshots(list).await.expect("list");
    let get = proto::GetSnapshotRequest { snapshot_id: snapshot.clone(), secrets: secrets() };
    rig.client.controller.get_snapshot(get).await.expect("get");
    let health = proto::ControllerGetVolumeHealthRequest { volume_id: volume.clone(), secrets: secrets() };
    rig.client.controller.controller_get_volume_health(health).await.expect("health");
    let list = proto::ControllerListVolumeHealthRequest { secrets: secrets(), ..Default::default() };
    rig.client.controller.controller_list_volume_health(list).await.expect("list");
    let health = proto::NodeGetStorageHealthRequest { secrets: secrets() };
    rig.client.node.node_get_storage_health(health).await.expect("health");
    let mut validate = requests::validate(&volume, vec![block_capability()]);
    validate.secrets = secrets();
    rig.client.controller.validate_volume_capabilities(validate).await.expect("validate");

    let before = rig.dir.path().join("data");
    let mut found = files_with_secret(&before);
    rig.client.node.node_unstage_volume(requests::unstage(filesystem, &staging)).await.expect("unstage");
    let delete = proto::DeleteSnapshotRequest { snapshot_id: snapshot, secrets: secrets() };
    rig.client.controller.delete_snapshot(delete).await.expect("delete");
    let delete = proto::DeleteVolumeRequest { volume_id: volume, secrets: secrets() };
    rig.client.controller.delete_volume(delete).await.expect("delete");
    rig.terminate();

    let log = rig.log();
    assert!(log.contains("TRACE"), "the log is not at its highest level");
    let lines: Vec<&str> = log.lines().filter(|line| line.contains(SECRET)).collect();
    assert!(lines.is_empty(), "the log tells a secret:\n{}", lines.join("\n"));
    assert!(errors.iter().all(|error| !error.contains(SECRET)), "an error tells a secret: {errors:?}");
    found.extend(files_with_secret(&before));
    assert!(found.is_empty(), "stored: {found:?}");
}

/// Every call, including streams, is logged with method, ids, code and time.
#[apply(device_test)]
async fn every_call_is_in_the_log() {
    let mut rig = Rig::start_with(PoolKind::Dir, &["--log-format", "json"], "info").await;
    let (volume, _) = rig.block_volume("logged", MIB).await;
    let snapshot = rig.snapshot("logged", &volume).await;
    rig.client.allocated(&snapshot, 0, 0).await.expect("allocated");
    rig.client.delta(&snapshot, &snapshot, 0, 0).await.expect("delta");
    rig.client.delta(&snapshot, "unknown", 0, 0).await.expect_err("unknown");
    let attach = proto::ControllerPublishVolumeRequest { volume_id: volume.clone(), ..Default::default() };
    rig.client.controller.controller_publish_volume(attach).await.expect_err("not claimed");
    rig.detach(&volume).await;
    rig.terminate();
    let log = rig.log();
    let lines: Vec<serde_json::Value> =
        log.lines().map(|line| serde_json::from_str(line).expect("a JSON line")).collect();
    for (method, field, id, code) in [
        ("CreateVolume", "volume_name", "logged", "Ok"),
        ("NodeStageVolume", "volume_id", volume.as_str(), "Ok"),
        ("NodePublishVolume", "volume_id", volume.as_str(), "Ok"),
        ("CreateSnapshot", "volume_id", volume.as_str(), "Ok"),
        ("GetMetadataAllocated", "snapshot_id", snapshot.as_str(), "Ok"),
        ("GetMetadataDelta", "base_snapshot_id", snapshot.as_str(), "Ok"),
        ("GetMetadataDelta", "target_snapshot_id", "unknown", "NotFound"),
        ("ControllerPublishVolume", "volume_id", volume.as_str(), "Unimplemented"),
        ("NodeUnpublishVolume", "volume_id", volume.as_str(), "Ok"),
    ] {
        let found = lines.iter().any(|line| {
            let (span, fields) = (&line["span"], &line["fields"]);
            span["method"] == method
                && span[field] == id
                && fields["code"] == code
                && fields["ms"].is_number()
        });
        assert!(found, "no line for {method} with {field} {id} and code {code}:\n{log}");
    }
}
