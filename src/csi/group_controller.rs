//! The GroupController service.

use std::sync::Arc;

use tonic::{Request, Response, Status, async_trait};

use super::decode;
use super::rpc::{rpc_span, unary};
use crate::driver::{Driver, Group, SnapshotParameters};
use proto::group_controller_server::GroupController;
use proto::group_controller_service_capability::{Rpc, Type, rpc};

pub(super) struct GroupControllerService(pub(super) Arc<Driver>);

#[async_trait]
impl GroupController for GroupControllerService {
    async fn group_controller_get_capabilities(
        &self,
        _: Request<proto::GroupControllerGetCapabilitiesRequest>,
    ) -> Result<Response<proto::GroupControllerGetCapabilitiesResponse>, Status> {
        unary(&self.0, rpc_span!("GroupControllerGetCapabilities"), |_| {
            let kind = rpc::Type::CreateDeleteGetVolumeGroupSnapshot;
            let capability = proto::GroupControllerServiceCapability {
                r#type: Some(Type::Rpc(Rpc { r#type: kind.into() })),
            };
            Ok(proto::GroupControllerGetCapabilitiesResponse { capabilities: vec![capability] })
        })
        .await
    }

    async fn create_volume_group_snapshot(
        &self,
        request: Request<proto::CreateVolumeGroupSnapshotRequest>,
    ) -> Result<Response<proto::CreateVolumeGroupSnapshotResponse>, Status> {
        let request = request.into_inner();
        let span = rpc_span!("CreateVolumeGroupSnapshot", group_snapshot_name = request.name);
        unary(&self.0, span, move |driver| {
            let parameters = SnapshotParameters::parse(&request.parameters)?;
            let group =
                driver.snapshots.create_group(&request.name, &request.source_volume_ids, &parameters)?;
            Ok(proto::CreateVolumeGroupSnapshotResponse { group_snapshot: Some(encode(driver, &group)) })
        })
        .await
    }

    async fn delete_volume_group_snapshot(
        &self,
        request: Request<proto::DeleteVolumeGroupSnapshotRequest>,
    ) -> Result<Response<proto::DeleteVolumeGroupSnapshotResponse>, Status> {
        let request = request.into_inner();
        let span = rpc_span!("DeleteVolumeGroupSnapshot", group_snapshot_id = request.group_snapshot_id);
        unary(&self.0, span, move |driver| {
            driver.snapshots.delete_group(&request.group_snapshot_id, &request.snapshot_ids)?;
            Ok(proto::DeleteVolumeGroupSnapshotResponse {})
        })
        .await
    }

    async fn get_volume_group_snapshot(
        &self,
        request: Request<proto::GetVolumeGroupSnapshotRequest>,
    ) -> Result<Response<proto::GetVolumeGroupSnapshotResponse>, Status> {
        let request = request.into_inner();
        let span = rpc_span!("GetVolumeGroupSnapshot", group_snapshot_id = request.group_snapshot_id);
        unary(&self.0, span, move |driver| {
            let group = driver.snapshots.group(&request.group_snapshot_id, &request.snapshot_ids)?;
            Ok(proto::GetVolumeGroupSnapshotResponse { group_snapshot: Some(encode(driver, &group)) })
        })
        .await
    }
}

fn encode(driver: &Driver, group: &Group) -> proto::VolumeGroupSnapshot {
    proto::VolumeGroupSnapshot {
        group_snapshot_id: group.record.id.to_string(),
        snapshots: group
            .members
            .iter()
            .map(|member| decode::encode_snapshot(member, driver.topology()))
            .collect(),
        creation_time: Some(decode::encode_time(group.record.created)),
        // A group exists once all of it is whole.
        ready_to_use: true,
    }
}
