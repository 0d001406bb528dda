//! The Identity service.

use std::sync::Arc;

use tonic::{Request, Response, Status, async_trait};

use super::rpc::{rpc_span, unary};
use crate::driver::Driver;
use proto::identity_server::Identity;
use proto::plugin_capability::{Service, Type, VolumeExpansion, service, volume_expansion};

pub(super) struct IdentityService(pub(super) Arc<Driver>);

#[async_trait]
impl Identity for IdentityService {
    async fn get_plugin_info(
        &self,
        _: Request<proto::GetPluginInfoRequest>,
    ) -> Result<Response<proto::GetPluginInfoResponse>, Status> {
        unary(&self.0, rpc_span!("GetPluginInfo"), |driver| {
            Ok(proto::GetPluginInfoResponse {
                name: driver.config().driver_name.clone(),
                vendor_version: env!("CARGO_PKG_VERSION").to_owned(),
                manifest: [
                    ("pool".to_owned(), driver.pool_kind().name.to_owned()),
                    // Needed to make its certificate for the router.
                    ("key".to_owned(), driver.key().to_string()),
                ]
                .into(),
            })
        })
        .await
    }

    async fn get_plugin_capabilities(
        &self,
        _: Request<proto::GetPluginCapabilitiesRequest>,
    ) -> Result<Response<proto::GetPluginCapabilitiesResponse>, Status> {
        unary(&self.0, rpc_span!("GetPluginCapabilities"), |_| {
            use service::Type::{
                ControllerService, GroupControllerService, SnapshotAccessibilityConstraints,
                SnapshotMetadataService, VolumeAccessibilityConstraints,
            };
            let services = [
                ControllerService,
                VolumeAccessibilityConstraints,
                GroupControllerService,
                SnapshotMetadataService,
                SnapshotAccessibilityConstraints,
            ];
            let service = |kind: service::Type| Type::Service(Service { r#type: kind.into() });
            let expansion =
                Type::VolumeExpansion(VolumeExpansion { r#type: volume_expansion::Type::Online.into() });
            let types = services.map(service).into_iter().chain([expansion]);
            let capabilities = types.map(|kind| proto::PluginCapability { r#type: Some(kind) }).collect();
            Ok(proto::GetPluginCapabilitiesResponse { capabilities })
        })
        .await
    }

    async fn probe(&self, _: Request<proto::ProbeRequest>) -> Result<Response<proto::ProbeResponse>, Status> {
        unary(&self.0, rpc_span!("Probe"), |driver| {
            driver.ready()?;
            Ok(proto::ProbeResponse { ready: Some(true) })
        })
        .await
    }
}
