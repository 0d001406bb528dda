//! The Node service.

use std::sync::Arc;

use tonic::{Request, Response, Status, async_trait};

use super::decode;
use super::rpc::{rpc_span, unary};
use crate::driver::{Driver, EphemeralParameters, PublishRequest, StageRequest, Usage};
use proto::node_server::Node;
use proto::node_service_capability::{Rpc, Type, rpc};

pub(super) struct NodeService(pub(super) Arc<Driver>);

const CAPABILITIES: [rpc::Type; 6] = [
    rpc::Type::StageUnstageVolume,
    rpc::Type::GetVolumeStats,
    rpc::Type::ExpandVolume,
    rpc::Type::SingleNodeMultiWriter,
    rpc::Type::GetVolumeHealth,
    rpc::Type::GetStorageHealth,
];

#[async_trait]
impl Node for NodeService {
    async fn node_stage_volume(
        &self,
        request: Request<proto::NodeStageVolumeRequest>,
    ) -> Result<Response<proto::NodeStageVolumeResponse>, Status> {
        let request = request.into_inner();
        let span = rpc_span!("NodeStageVolume", volume_id = request.volume_id);
        unary(&self.0, span, move |driver| {
            driver.node.stage(&StageRequest {
                volume_id: request.volume_id,
                staging_path: request.staging_target_path.into(),
                capability: decode::capability(request.volume_capability)?,
            })?;
            Ok(proto::NodeStageVolumeResponse {})
        })
        .await
    }

    async fn node_unstage_volume(
        &self,
        request: Request<proto::NodeUnstageVolumeRequest>,
    ) -> Result<Response<proto::NodeUnstageVolumeResponse>, Status> {
        let request = request.into_inner();
        let span = rpc_span!("NodeUnstageVolume", volume_id = request.volume_id);
        unary(&self.0, span, move |driver| {
            driver.node.unstage(&request.volume_id, request.staging_target_path.as_ref())?;
            Ok(proto::NodeUnstageVolumeResponse {})
        })
        .await
    }

    async fn node_publish_volume(
        &self,
        request: Request<proto::NodePublishVolumeRequest>,
    ) -> Result<Response<proto::NodePublishVolumeResponse>, Status> {
        let request = request.into_inner();
        let span =
            rpc_span!("NodePublishVolume", volume_id = request.volume_id, target = request.target_path);
        unary(&self.0, span, move |driver| {
            driver.node.publish(&PublishRequest {
                volume_id: request.volume_id,
                staging_path: request.staging_target_path.into(),
                target_path: request.target_path.into(),
                capability: decode::capability(request.volume_capability)?,
                read_only: request.readonly,
                ephemeral: EphemeralParameters::parse(&request.volume_context)?,
            })?;
            Ok(proto::NodePublishVolumeResponse {})
        })
        .await
    }

    async fn node_unpublish_volume(
        &self,
        request: Request<proto::NodeUnpublishVolumeRequest>,
    ) -> Result<Response<proto::NodeUnpublishVolumeResponse>, Status> {
        let request = request.into_inner();
        let span =
            rpc_span!("NodeUnpublishVolume", volume_id = request.volume_id, target = request.target_path);
        unary(&self.0, span, move |driver| {
            driver.node.unpublish(&request.volume_id, request.target_path.as_ref())?;
            Ok(proto::NodeUnpublishVolumeResponse {})
        })
        .await
    }

    async fn node_get_volume_stats(
        &self,
        request: Request<proto::NodeGetVolumeStatsRequest>,
    ) -> Result<Response<proto::NodeGetVolumeStatsResponse>, Status> {
        let request = request.into_inner();
        let span = rpc_span!("NodeGetVolumeStats", volume_id = request.volume_id);
        unary(&self.0, span, move |driver| {
            use proto::volume_usage::Unit;
            let stats = driver.node.stats(&request.volume_id, request.volume_path.as_ref())?;
            let encode = |unit: Unit, usage: Usage| proto::VolumeUsage {
                total: decode::wire_bytes(usage.total),
                used: decode::wire_bytes(usage.used),
                available: decode::wire_bytes(usage.available),
                unit: unit.into(),
            };
            let inodes = stats.inodes.map(|inodes| encode(Unit::Inodes, inodes));
            let usage = [encode(Unit::Bytes, stats.bytes)].into_iter().chain(inodes).collect();
            Ok(proto::NodeGetVolumeStatsResponse { usage })
        })
        .await
    }

    async fn node_get_volume_health(
        &self,
        request: Request<proto::NodeGetVolumeHealthRequest>,
    ) -> Result<Response<proto::NodeGetVolumeHealthResponse>, Status> {
        let request = request.into_inner();
        let span = rpc_span!("NodeGetVolumeHealth", volume_id = request.volume_id);
        unary(&self.0, span, move |driver| {
            let (published, staged) = (&request.volume_publish_path, &request.staging_target_path);
            let health =
                driver.node.volume_health(&request.volume_id, published.as_ref(), staged.as_ref())?;
            Ok(proto::NodeGetVolumeHealthResponse { volume_health: Some(decode::encode_health(health)) })
        })
        .await
    }

    async fn node_get_storage_health(
        &self,
        _: Request<proto::NodeGetStorageHealthRequest>,
    ) -> Result<Response<proto::NodeGetStorageHealthResponse>, Status> {
        unary(&self.0, rpc_span!("NodeGetStorageHealth"), |driver| {
            let faults = driver.health.of_storage().into_iter();
            let backend_health = faults.map(decode::encode_storage_fault).collect();
            Ok(proto::NodeGetStorageHealthResponse { backend_health })
        })
        .await
    }

    async fn node_expand_volume(
        &self,
        request: Request<proto::NodeExpandVolumeRequest>,
    ) -> Result<Response<proto::NodeExpandVolumeResponse>, Status> {
        let request = request.into_inner();
        let span = rpc_span!("NodeExpandVolume", volume_id = request.volume_id);
        unary(&self.0, span, move |driver| {
            let range = decode::range(request.capacity_range)?;
            let capability = decode::optional_capability(request.volume_capability)?;
            let path = request.volume_path.as_ref();
            let capacity = driver.node.expand(&request.volume_id, path, range, capability.as_ref())?;
            Ok(proto::NodeExpandVolumeResponse { capacity_bytes: decode::wire_bytes(capacity) })
        })
        .await
    }

    async fn node_get_capabilities(
        &self,
        _: Request<proto::NodeGetCapabilitiesRequest>,
    ) -> Result<Response<proto::NodeGetCapabilitiesResponse>, Status> {
        unary(&self.0, rpc_span!("NodeGetCapabilities"), |_| {
            let capability = |kind: rpc::Type| proto::NodeServiceCapability {
                r#type: Some(Type::Rpc(Rpc { r#type: kind.into() })),
            };
            Ok(proto::NodeGetCapabilitiesResponse { capabilities: CAPABILITIES.map(capability).into() })
        })
        .await
    }

    async fn node_get_info(
        &self,
        _: Request<proto::NodeGetInfoRequest>,
    ) -> Result<Response<proto::NodeGetInfoResponse>, Status> {
        unary(&self.0, rpc_span!("NodeGetInfo"), |driver| {
            Ok(proto::NodeGetInfoResponse {
                node_id: driver.config().node_id.clone(),
                max_volumes_per_node: driver.config().max_volumes.into(),
                accessible_topology: Some(decode::encode_topology(driver.topology())),
            })
        })
        .await
    }
}
