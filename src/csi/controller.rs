//! The Controller service.

use std::sync::Arc;

use tonic::{Request, Response, Status, async_trait};

use super::decode;
use super::proto::controller_service_capability::{Rpc, Type, rpc};
use super::proto::{self, controller_server::Controller};
use super::rpc::{not_claimed, rpc_span, unary};
use crate::driver::{
    CreateVolume, Driver, Error, PageRequest, Result as DriverResult, SnapshotFilter, SnapshotParameters,
    VolumeParameters,
};

pub(super) struct ControllerService(pub(super) Arc<Driver>);

const CAPABILITIES: [rpc::Type; 8] = [
    rpc::Type::CreateDeleteVolume,
    rpc::Type::ListVolumes,
    rpc::Type::GetCapacity,
    rpc::Type::CreateDeleteSnapshot,
    rpc::Type::ListSnapshots,
    rpc::Type::CloneVolume,
    rpc::Type::SingleNodeMultiWriter,
    rpc::Type::GetSnapshot,
];

#[async_trait]
impl Controller for ControllerService {
    async fn create_volume(
        &self,
        request: Request<proto::CreateVolumeRequest>,
    ) -> Result<Response<proto::CreateVolumeResponse>, Status> {
        let request = request.into_inner();
        let span = rpc_span!("CreateVolume", volume_name = request.name);
        unary(&self.0, span, move |driver| {
            if !request.mutable_parameters.is_empty() {
                return Err(Error::Unsupported(
                    "mutable_parameters are not supported (MODIFY_VOLUME is not claimed)".into(),
                ));
            }
            let range = request.capacity_range.unwrap_or_default();
            let record = driver.create_volume(&CreateVolume {
                name: request.name,
                required_bytes: range.required_bytes,
                limit_bytes: range.limit_bytes,
                capabilities: decode::capabilities(request.volume_capabilities)?,
                parameters: VolumeParameters::parse(&request.parameters)?,
                source: decode::source(request.volume_content_source)?,
                requisite: request
                    .accessibility_requirements
                    .map(|topology| decode::topologies(topology.requisite))
                    .unwrap_or_default(),
            })?;
            let volume = decode::encode_volume(&record, driver.topology());
            Ok(proto::CreateVolumeResponse { volume: Some(volume) })
        })
        .await
    }

    async fn delete_volume(
        &self,
        request: Request<proto::DeleteVolumeRequest>,
    ) -> Result<Response<proto::DeleteVolumeResponse>, Status> {
        let request = request.into_inner();
        let span = rpc_span!("DeleteVolume", volume_id = request.volume_id);
        unary(&self.0, span, move |driver| {
            driver.delete_volume(&request.volume_id)?;
            Ok(proto::DeleteVolumeResponse {})
        })
        .await
    }

    async fn controller_publish_volume(
        &self,
        request: Request<proto::ControllerPublishVolumeRequest>,
    ) -> Result<Response<proto::ControllerPublishVolumeResponse>, Status> {
        let span = rpc_span!("ControllerPublishVolume", volume_id = request.into_inner().volume_id);
        Err(not_claimed(&span, "PUBLISH_UNPUBLISH_VOLUME"))
    }

    async fn controller_unpublish_volume(
        &self,
        request: Request<proto::ControllerUnpublishVolumeRequest>,
    ) -> Result<Response<proto::ControllerUnpublishVolumeResponse>, Status> {
        let span = rpc_span!("ControllerUnpublishVolume", volume_id = request.into_inner().volume_id);
        Err(not_claimed(&span, "PUBLISH_UNPUBLISH_VOLUME"))
    }

    async fn validate_volume_capabilities(
        &self,
        request: Request<proto::ValidateVolumeCapabilitiesRequest>,
    ) -> Result<Response<proto::ValidateVolumeCapabilitiesResponse>, Status> {
        let request = request.into_inner();
        let span = rpc_span!("ValidateVolumeCapabilities", volume_id = request.volume_id);
        unary(&self.0, span, move |driver| validate(driver, request)).await
    }

    async fn list_volumes(
        &self,
        request: Request<proto::ListVolumesRequest>,
    ) -> Result<Response<proto::ListVolumesResponse>, Status> {
        let request = request.into_inner();
        unary(&self.0, rpc_span!("ListVolumes"), move |driver| {
            let page = driver.list_volumes(&PageRequest {
                max_entries: request.max_entries,
                starting_token: request.starting_token,
            })?;
            let entry = |record: &Arc<_>| proto::list_volumes_response::Entry {
                volume: Some(decode::encode_volume(record, driver.topology())),
                status: None,
            };
            Ok(proto::ListVolumesResponse {
                entries: page.entries.iter().map(entry).collect(),
                next_token: page.next_token,
            })
        })
        .await
    }

    async fn get_capacity(
        &self,
        request: Request<proto::GetCapacityRequest>,
    ) -> Result<Response<proto::GetCapacityResponse>, Status> {
        let request = request.into_inner();
        unary(&self.0, rpc_span!("GetCapacity"), move |driver| {
            VolumeParameters::parse(&request.parameters)?;
            decode::capabilities(request.volume_capabilities)?;
            let ours = driver.topology();
            let elsewhere = request.accessible_topology.is_some_and(|asked| {
                ours.iter().any(|(key, value)| asked.segments.get(key).is_some_and(|asked| asked != value))
            });
            Ok(proto::GetCapacityResponse {
                available_capacity: if elsewhere { 0 } else { decode::wire_bytes(driver.available()?) },
                maximum_volume_size: Some(decode::wire_bytes(driver.config().max_volume_size.0)),
                minimum_volume_size: None,
            })
        })
        .await
    }

    async fn controller_get_capabilities(
        &self,
        _: Request<proto::ControllerGetCapabilitiesRequest>,
    ) -> Result<Response<proto::ControllerGetCapabilitiesResponse>, Status> {
        unary(&self.0, rpc_span!("ControllerGetCapabilities"), |_| {
            let capability = |kind: rpc::Type| proto::ControllerServiceCapability {
                r#type: Some(Type::Rpc(Rpc { r#type: kind.into() })),
            };
            Ok(proto::ControllerGetCapabilitiesResponse { capabilities: CAPABILITIES.map(capability).into() })
        })
        .await
    }

    async fn create_snapshot(
        &self,
        request: Request<proto::CreateSnapshotRequest>,
    ) -> Result<Response<proto::CreateSnapshotResponse>, Status> {
        let request = request.into_inner();
        let span =
            rpc_span!("CreateSnapshot", snapshot_name = request.name, volume_id = request.source_volume_id);
        unary(&self.0, span, move |driver| {
            let parameters = SnapshotParameters::parse(&request.parameters)?;
            let record = driver.create_snapshot(&request.name, &request.source_volume_id, &parameters)?;
            Ok(proto::CreateSnapshotResponse { snapshot: Some(decode::encode_snapshot(&record)) })
        })
        .await
    }

    async fn delete_snapshot(
        &self,
        request: Request<proto::DeleteSnapshotRequest>,
    ) -> Result<Response<proto::DeleteSnapshotResponse>, Status> {
        let request = request.into_inner();
        let span = rpc_span!("DeleteSnapshot", snapshot_id = request.snapshot_id);
        unary(&self.0, span, move |driver| {
            driver.delete_snapshot(&request.snapshot_id)?;
            Ok(proto::DeleteSnapshotResponse {})
        })
        .await
    }

    async fn list_snapshots(
        &self,
        request: Request<proto::ListSnapshotsRequest>,
    ) -> Result<Response<proto::ListSnapshotsResponse>, Status> {
        let request = request.into_inner();
        let span = rpc_span!(
            "ListSnapshots",
            volume_id = request.source_volume_id,
            snapshot_id = request.snapshot_id,
        );
        unary(&self.0, span, move |driver| {
            let page =
                PageRequest { max_entries: request.max_entries, starting_token: request.starting_token };
            let filter = SnapshotFilter {
                source_volume_id: request.source_volume_id,
                snapshot_id: request.snapshot_id,
            };
            let page = driver.list_snapshots(&page, &filter)?;
            let entry = |record: &Arc<_>| proto::list_snapshots_response::Entry {
                snapshot: Some(decode::encode_snapshot(record)),
            };
            Ok(proto::ListSnapshotsResponse {
                entries: page.entries.iter().map(entry).collect(),
                next_token: page.next_token,
            })
        })
        .await
    }

    async fn get_snapshot(
        &self,
        request: Request<proto::GetSnapshotRequest>,
    ) -> Result<Response<proto::GetSnapshotResponse>, Status> {
        let request = request.into_inner();
        let span = rpc_span!("GetSnapshot", snapshot_id = request.snapshot_id);
        unary(&self.0, span, move |driver| {
            let record = driver.snapshot(&request.snapshot_id)?;
            Ok(proto::GetSnapshotResponse { snapshot: Some(decode::encode_snapshot(&record)) })
        })
        .await
    }

    async fn controller_expand_volume(
        &self,
        request: Request<proto::ControllerExpandVolumeRequest>,
    ) -> Result<Response<proto::ControllerExpandVolumeResponse>, Status> {
        let span = rpc_span!("ControllerExpandVolume", volume_id = request.into_inner().volume_id);
        Err(not_claimed(&span, "EXPAND_VOLUME"))
    }

    async fn controller_get_volume(
        &self,
        request: Request<proto::ControllerGetVolumeRequest>,
    ) -> Result<Response<proto::ControllerGetVolumeResponse>, Status> {
        let span = rpc_span!("ControllerGetVolume", volume_id = request.into_inner().volume_id);
        Err(not_claimed(&span, "GET_VOLUME"))
    }

    async fn controller_modify_volume(
        &self,
        request: Request<proto::ControllerModifyVolumeRequest>,
    ) -> Result<Response<proto::ControllerModifyVolumeResponse>, Status> {
        let span = rpc_span!("ControllerModifyVolume", volume_id = request.into_inner().volume_id);
        Err(not_claimed(&span, "MODIFY_VOLUME"))
    }
}

fn validate(
    driver: &Driver,
    request: proto::ValidateVolumeCapabilitiesRequest,
) -> DriverResult<proto::ValidateVolumeCapabilitiesResponse> {
    let asked = request.volume_capabilities.clone();
    if request.volume_id.is_empty() {
        return Err(Error::Missing { field: "volume_id" });
    }
    if asked.is_empty() {
        return Err(Error::Missing { field: "volume_capabilities" });
    }
    driver.volume(&request.volume_id)?;
    let refused = |message| proto::ValidateVolumeCapabilitiesResponse { confirmed: None, message };
    // A capability that no volume has is an answer here, not a bad request.
    let capabilities = match decode::capabilities(request.volume_capabilities) {
        Ok(capabilities) => capabilities,
        Err(error @ Error::Unsupported(_)) => return Ok(refused(error.to_string())),
        Err(error) => return Err(error),
    };
    let parameters = VolumeParameters::parse(&request.parameters)?;
    Ok(match driver.validate_capabilities(&request.volume_id, &capabilities, &parameters)? {
        Some(lacks) => refused(lacks),
        None => proto::ValidateVolumeCapabilitiesResponse {
            confirmed: Some(proto::validate_volume_capabilities_response::Confirmed {
                volume_context: request.volume_context,
                volume_capabilities: asked,
                parameters: request.parameters,
                mutable_parameters: request.mutable_parameters,
            }),
            message: String::new(),
        },
    })
}
