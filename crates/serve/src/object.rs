//! Objects of the Kubernetes API with the fields that a server uses.

/// Declares an object of an API group as the API server sends it.
#[macro_export]
macro_rules! object {
    ($name:ident, $kind:expr, $plural:expr, $version:expr, $group:expr, $scope:ty, { $($field:ident: $type:ty),* $(,)? }) => {
        #[allow(missing_docs)]
        #[derive(Clone, Debug, ::serde::Deserialize)]
        #[serde(rename_all = "camelCase")]
        pub struct $name {
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
