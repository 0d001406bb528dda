//! Objects as the API server sends them, with the fields that are used, and what is kept of each.

use std::collections::HashMap;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::Resource;
use serde::Deserialize;

use super::{Content, SNAPSHOTS, Snapshot, SnapshotName};

/// Declares an object of an API group as the API server sends it.
macro_rules! object {
    ($name:ident, $kind:literal, $plural:literal, $version:literal, $group:expr, $scope:ty, { $($field:ident: $type:ty),* $(,)? }) => {
        #[derive(Clone, Debug, Deserialize)]
        #[serde(rename_all = "camelCase")]
        pub(super) struct $name {
            pub(super) metadata: ObjectMeta,
            $(#[serde(default)] pub(super) $field: $type,)*
        }

        impl Resource for $name {
            type DynamicType = ();
            type Scope = $scope;

            fn kind(_: &()) -> std::borrow::Cow<'_, str> {
                $kind.into()
            }

            fn group(_: &()) -> std::borrow::Cow<'_, str> {
                $group.into()
            }

            fn version(_: &()) -> std::borrow::Cow<'_, str> {
                $version.into()
            }

            fn plural(_: &()) -> std::borrow::Cow<'_, str> {
                $plural.into()
            }

            fn meta(&self) -> &ObjectMeta {
                &self.metadata
            }

            fn meta_mut(&mut self) -> &mut ObjectMeta {
                &mut self.metadata
            }
        }
    };
}

object!(ApiSnapshot, "VolumeSnapshot", "volumesnapshots", "v1", SNAPSHOTS, k8s_openapi::NamespaceResourceScope, {
    spec: ApiSnapshotSpec,
    status: Option<ApiSnapshotStatus>,
});
object!(ApiContent, "VolumeSnapshotContent", "volumesnapshotcontents", "v1", SNAPSHOTS, k8s_openapi::ClusterResourceScope, {
    spec: ApiContentSpec,
    status: Option<ApiContentStatus>,
});
object!(ApiClass, "VolumeSnapshotClass", "volumesnapshotclasses", "v1", SNAPSHOTS, k8s_openapi::ClusterResourceScope, {
    driver: String,
    parameters: HashMap<String, String>,
});
object!(ApiService, "SnapshotMetadataService", "snapshotmetadataservices", "v1beta1", "cbt.storage.k8s.io", k8s_openapi::ClusterResourceScope, {
    spec: ApiServiceSpec,
});

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(super) struct ApiSnapshotSpec {
    volume_snapshot_class_name: Option<String>,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(super) struct ApiSnapshotStatus {
    bound_volume_snapshot_content_name: Option<String>,
    ready_to_use: Option<bool>,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(super) struct ApiContentSpec {
    driver: String,
    volume_snapshot_class_name: Option<String>,
    volume_snapshot_ref: ApiReference,
    source: ApiContentSource,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(super) struct ApiReference {
    name: String,
    namespace: String,
    uid: Option<String>,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(super) struct ApiContentSource {
    volume_handle: Option<String>,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(super) struct ApiContentStatus {
    snapshot_handle: Option<String>,
    ready_to_use: Option<bool>,
    creation_time: Option<i64>,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(super) struct ApiServiceSpec {
    pub(super) audience: String,
}

pub(super) fn keep_snapshot(object: ApiSnapshot) -> (SnapshotName, Snapshot) {
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

pub(super) fn keep_content(object: ApiContent) -> (String, Content) {
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
        handle: status.snapshot_handle.filter(|handle| !handle.is_empty()),
        is_ready: status.ready_to_use.unwrap_or(false),
        created: status.creation_time,
    };
    (object.metadata.name.unwrap_or_default(), content)
}
