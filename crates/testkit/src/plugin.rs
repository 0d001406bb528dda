//! The Identity service of a CSI driver that a test or a bench makes itself.

use proto::identity_server::Identity;
use proto::{
    GetPluginCapabilitiesRequest, GetPluginCapabilitiesResponse, GetPluginInfoRequest, GetPluginInfoResponse,
    PluginCapability, ProbeRequest, ProbeResponse, plugin_capability,
};
use tonic::{Request, Response, Status, async_trait};

/// A ready driver of this name, with a SnapshotMetadata service.
pub struct Plugin {
    pub name: String,
}

#[async_trait]
impl Identity for Plugin {
    async fn get_plugin_info(
        &self,
        _: Request<GetPluginInfoRequest>,
    ) -> Result<Response<GetPluginInfoResponse>, Status> {
        let name = self.name.clone();
        Ok(Response::new(GetPluginInfoResponse { name, ..Default::default() }))
    }

    async fn get_plugin_capabilities(
        &self,
        _: Request<GetPluginCapabilitiesRequest>,
    ) -> Result<Response<GetPluginCapabilitiesResponse>, Status> {
        let kind = plugin_capability::service::Type::SnapshotMetadataService;
        let service = plugin_capability::Type::Service(plugin_capability::Service { r#type: kind.into() });
        let capabilities = vec![PluginCapability { r#type: Some(service) }];
        Ok(Response::new(GetPluginCapabilitiesResponse { capabilities }))
    }

    async fn probe(&self, _: Request<ProbeRequest>) -> Result<Response<ProbeResponse>, Status> {
        Ok(Response::new(ProbeResponse { ready: Some(true) }))
    }
}
