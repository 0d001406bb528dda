//! What the driver says it can, asked once.

use tonic::Status;

use csi_client::Client;
use proto::{
    controller_service_capability, group_controller_service_capability, node_service_capability,
    plugin_capability,
};

/// Name, version and capabilities of the driver.
#[derive(Clone, Debug, Default)]
pub(crate) struct Claims {
    pub name: String,
    pub version: String,
    /// SNAPSHOT_METADATA_SERVICE.
    pub metadata: bool,
    /// CONTROLLER_SERVICE with CREATE_DELETE_VOLUME.
    pub volumes: bool,
    /// CREATE_DELETE_SNAPSHOT.
    pub snapshots: bool,
    /// PUBLISH_UNPUBLISH_VOLUME.
    pub attach: bool,
    /// STAGE_UNSTAGE_VOLUME.
    pub stage: bool,
    /// CLONE_VOLUME.
    pub clone: bool,
    /// GET_CAPACITY.
    pub capacity: bool,
    /// CREATE_DELETE_GET_VOLUME_GROUP_SNAPSHOT.
    pub groups: bool,
    /// EXPAND_VOLUME of the controller.
    pub expand: bool,
    /// Volumes expand while they are published.
    pub expand_online: bool,
    /// EXPAND_VOLUME of the node.
    pub node_expand: bool,
    /// MODIFY_VOLUME.
    pub modify: bool,
    pub node_id: String,
    /// Where this node is, if the driver has VOLUME_ACCESSIBILITY_CONSTRAINTS.
    pub topology: Option<proto::Topology>,
    /// The same, if it has SNAPSHOT_ACCESSIBILITY_CONSTRAINTS.
    pub snapshot_topology: Option<proto::Topology>,
}

impl Claims {
    /// Asks the driver. An error names the call.
    pub async fn ask(client: &mut Client) -> Result<Self, String> {
        let said = |call: &'static str| {
            move |status: Status| format!("{call}: {:?}: {}", status.code(), status.message())
        };
        let info = client.identity.get_plugin_info(proto::GetPluginInfoRequest {}).await;
        let info = info.map_err(said("GetPluginInfo"))?.into_inner();
        let mut claims = Claims { name: info.name, version: info.vendor_version, ..Default::default() };

        let plugin = client.identity.get_plugin_capabilities(proto::GetPluginCapabilitiesRequest {}).await;
        let plugin = plugin.map_err(said("GetPluginCapabilities"))?.into_inner().capabilities;
        let (mut controller, mut constraints, mut snapshot_constraints, mut groups) =
            (false, false, false, false);
        for kind in plugin.into_iter().filter_map(|capability| capability.r#type) {
            use plugin_capability::{Type, service, volume_expansion};
            match kind {
                Type::Service(service) => match service.r#type() {
                    service::Type::SnapshotMetadataService => claims.metadata = true,
                    service::Type::ControllerService => controller = true,
                    service::Type::GroupControllerService => groups = true,
                    service::Type::VolumeAccessibilityConstraints => constraints = true,
                    service::Type::SnapshotAccessibilityConstraints => snapshot_constraints = true,
                    _ => {}
                },
                Type::VolumeExpansion(expansion) => {
                    claims.expand_online = expansion.r#type() == volume_expansion::Type::Online;
                }
            }
        }

        if controller {
            let request = proto::ControllerGetCapabilitiesRequest {};
            let answer = client.controller.controller_get_capabilities(request).await;
            let answer = answer.map_err(said("ControllerGetCapabilities"))?.into_inner();
            for kind in answer.capabilities.into_iter().filter_map(|capability| capability.r#type) {
                use controller_service_capability::{Type, rpc};
                let Type::Rpc(rpc) = kind;
                match rpc.r#type() {
                    rpc::Type::CreateDeleteVolume => claims.volumes = true,
                    rpc::Type::CreateDeleteSnapshot => claims.snapshots = true,
                    rpc::Type::PublishUnpublishVolume => claims.attach = true,
                    rpc::Type::ExpandVolume => claims.expand = true,
                    rpc::Type::CloneVolume => claims.clone = true,
                    rpc::Type::GetCapacity => claims.capacity = true,
                    rpc::Type::ModifyVolume => claims.modify = true,
                    _ => {}
                }
            }
        }
        if groups {
            let request = proto::GroupControllerGetCapabilitiesRequest {};
            let answer = client.groups.group_controller_get_capabilities(request).await;
            let answer = answer.map_err(said("GroupControllerGetCapabilities"))?.into_inner();
            for kind in answer.capabilities.into_iter().filter_map(|capability| capability.r#type) {
                use group_controller_service_capability::{Type, rpc};
                let Type::Rpc(rpc) = kind;
                claims.groups |= rpc.r#type() == rpc::Type::CreateDeleteGetVolumeGroupSnapshot;
            }
        }

        let answer = client.node.node_get_capabilities(proto::NodeGetCapabilitiesRequest {}).await;
        let answer = answer.map_err(said("NodeGetCapabilities"))?.into_inner();
        for kind in answer.capabilities.into_iter().filter_map(|capability| capability.r#type) {
            use node_service_capability::{Type, rpc};
            let Type::Rpc(rpc) = kind;
            match rpc.r#type() {
                rpc::Type::StageUnstageVolume => claims.stage = true,
                rpc::Type::ExpandVolume => claims.node_expand = true,
                _ => {}
            }
        }
        if claims.attach || constraints || snapshot_constraints {
            let answer = client.node.node_get_info(proto::NodeGetInfoRequest {}).await;
            let answer = answer.map_err(said("NodeGetInfo"))?.into_inner();
            claims.node_id = answer.node_id;
            claims.snapshot_topology = answer.accessible_topology.clone().filter(|_| snapshot_constraints);
            claims.topology = answer.accessible_topology.filter(|_| constraints);
        }
        Ok(claims)
    }

    /// Why the suite cannot run on such a driver, if it cannot.
    pub fn missing(&self) -> Option<&'static str> {
        match self {
            Claims { volumes: false, .. } => Some("CREATE_DELETE_VOLUME"),
            Claims { snapshots: false, .. } => Some("CREATE_DELETE_SNAPSHOT"),
            _ => None,
        }
    }
}
