//! Objects as the API server sends them, and what is kept of each.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use serde::Deserialize;

use super::{Content, SNAPSHOTS, Snapshot, SnapshotName};
use crate::object;

object!(ApiSnapshot, "VolumeSnapshot", "volumesnapshots", "v1", SNAPSHOTS, k8s_openapi::NamespaceResourceScope, {
    spec: ApiSnapshotSpec,
    status: Option<ApiSnapshotStatus>,
});
object!(ApiContent, "VolumeSnapshotContent", "volumesnapshotcontents", "v1", SNAPSHOTS, k8s_openapi::ClusterResourceScope, {
    spec: ApiContentSpec,
    status: Option<ApiContentStatus>,
});
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct ApiSnapshotSpec {
    volume_snapshot_class_name: Option<String>,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct ApiSnapshotStatus {
    bound_volume_snapshot_content_name: Option<String>,
    ready_to_use: Option<bool>,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct ApiContentSpec {
    driver: String,
    volume_snapshot_class_name: Option<String>,
    volume_snapshot_ref: ApiReference,
    source: ApiContentSource,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct ApiReference {
    name: String,
    namespace: String,
    uid: Option<String>,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct ApiContentSource {
    volume_handle: Option<String>,
    snapshot_handle: Option<String>,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct ApiContentStatus {
    snapshot_handle: Option<String>,
    ready_to_use: Option<bool>,
    creation_time: Option<i64>,
}

/// What is used of a VolumeSnapshot.
pub fn keep_snapshot(object: ApiSnapshot) -> (SnapshotName, Snapshot) {
    let ObjectMeta { name, namespace, uid, .. } = object.metadata;
    let status = object.status.unwrap_or_default();
    let name = SnapshotName { namespace: namespace.unwrap_or_default(), name: name.unwrap_or_default() };
    let snapshot = Snapshot {
        uid: uid.unwrap_or_default(),
        class: object.spec.volume_snapshot_class_name,
        content: status.bound_volume_snapshot_content_name.filter(|name| !name.is_empty()),
        is_ready: status.ready_to_use.unwrap_or(false),
    };
    (name, snapshot)
}

/// What is used of a VolumeSnapshotContent, and its name.
pub fn keep_content(object: ApiContent) -> (String, Content) {
    let ApiContentSpec { driver, volume_snapshot_class_name: class, volume_snapshot_ref, source } =
        object.spec;
    let ApiReference { name, namespace, uid } = volume_snapshot_ref;
    let status = object.status.unwrap_or_default();
    let content = Content {
        driver,
        class,
        snapshot: SnapshotName { namespace, name },
        snapshot_uid: uid.filter(|uid| !uid.is_empty()),
        volume: source.volume_handle,
        handle: [status.snapshot_handle, source.snapshot_handle]
            .into_iter()
            .flatten()
            .find(|handle| !handle.is_empty()),
        is_ready: status.ready_to_use.unwrap_or(false),
        created: status.creation_time,
    };
    (object.metadata.name.unwrap_or_default(), content)
}
