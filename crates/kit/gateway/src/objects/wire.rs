//! Objects as the API server sends them, with the fields that are used.

use std::collections::HashMap;

use serde::Deserialize;
use serve::object;
use serve::snapshots::SNAPSHOTS;
pub(super) use serve::snapshots::{ApiContent, ApiSnapshot, keep_content, keep_snapshot};

object!(ApiClass, "VolumeSnapshotClass", "volumesnapshotclasses", "v1", SNAPSHOTS, k8s_openapi::ClusterResourceScope, {
    driver: String,
    parameters: HashMap<String, String>,
});
object!(ApiService, "SnapshotMetadataService", "snapshotmetadataservices", "v1beta1", "cbt.storage.k8s.io", k8s_openapi::ClusterResourceScope, {
    spec: ApiServiceSpec,
});

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(super) struct ApiServiceSpec {
    pub(super) audience: String,
}
