//! Objects of the Kubernetes API with the fields that a server uses.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, Time};
use serde::{Deserialize, Deserializer};

/// The part of `metadata` that servers use. The rest is skipped: `managedFields` alone is most of an object, and a parsed page
/// of a list would keep it in memory.
pub fn metadata<'de, D: Deserializer<'de>>(deserializer: D) -> Result<ObjectMeta, D::Error> {
    #[derive(Deserialize)]
    #[serde(rename_all = "camelCase")]
    struct Used {
        name: Option<String>,
        namespace: Option<String>,
        uid: Option<String>,
        resource_version: Option<String>,
        generation: Option<i64>,
        creation_timestamp: Option<Time>,
        deletion_timestamp: Option<Time>,
    }
    let Used { name, namespace, uid, resource_version, generation, creation_timestamp, deletion_timestamp } =
        Used::deserialize(deserializer)?;
    Ok(ObjectMeta {
        name,
        namespace,
        uid,
        resource_version,
        generation,
        creation_timestamp,
        deletion_timestamp,
        ..ObjectMeta::default()
    })
}

/// Declares an object of an API group as the API server sends it, in a module that imports `serve::object`.
#[macro_export]
macro_rules! object {
    ($name:ident, $kind:expr, $plural:expr, $version:expr, $group:expr, $scope:ty, { $($field:ident: $type:ty),* $(,)? }) => {
        #[allow(missing_docs)]
        #[derive(Clone, Debug, ::serde::Deserialize)]
        #[serde(rename_all = "camelCase")]
        pub struct $name {
            #[serde(deserialize_with = "object::metadata")]
            pub metadata: ::k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta,
            $(
                #[serde(default)]
                pub $field: $type,
            )*
        }

        impl ::kube::Resource for $name {
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

            fn meta(&self) -> &::k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta {
                &self.metadata
            }

            fn meta_mut(&mut self) -> &mut ::k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta {
                &mut self.metadata
            }
        }
    };
}
