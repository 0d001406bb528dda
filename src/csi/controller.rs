//! The Controller service.

use std::sync::Arc;

use tonic::{Request, Response, Status, async_trait};

use super::decode;
use super::rpc::{not_claimed, rpc_span, unary};
use crate::driver::{
    AttachRequest, CreateVolume, Driver, Error, PageRequest, Result as DriverResult, SnapshotFilter,
    SnapshotParameters, VolumeParameters, parse_tuning,
};
use crate::store::VolumeRecord;
use proto::controller_server::Controller;
use proto::controller_service_capability::{Rpc, Type, rpc};

pub(super) struct ControllerService(pub(super) Arc<Driver>);

const CAPABILITIES: [rpc::Type; 13] = [
    rpc::Type::CreateDeleteVolume,
    rpc::Type::ListVolumes,
    rpc::Type::GetCapacity,
    rpc::Type::CreateDeleteSnapshot,
    rpc::Type::ListSnapshots,
    rpc::Type::CloneVolume,
    rpc::Type::SingleNodeMultiWriter,
    rpc::Type::GetSnapshot,
    rpc::Type::ExpandVolume,
    rpc::Type::GetVolume,
    rpc::Type::ModifyVolume,
    rpc::Type::GetVolumeHealth,
    rpc::Type::ListVolumeHealth,
];
/// What `--enable-attach` adds.
const ATTACH_CAPABILITIES: [rpc::Type; 3] =
    [rpc::Type::PublishUnpublishVolume, rpc::Type::ListVolumesPublishedNodes, rpc::Type::PublishReadonly];

/// What a CreateVolume request asks for.
pub(super) fn create_volume(request: proto::CreateVolumeRequest) -> DriverResult<CreateVolume> {
    Ok(CreateVolume {
        name: request.name,
        range: decode::range(request.capacity_range)?,
        capabilities: decode::capabilities(request.volume_capabilities)?,
        parameters: VolumeParameters::parse(&request.parameters)?,
        tuning: parse_tuning(&request.mutable_parameters)?,
        source: decode::source(request.volume_content_source)?,
        requisite: decode::requisite(request.accessibility_requirements),
    })
}

/// The answer about the volume that it came to.
pub(super) fn encode_created(driver: &Driver, record: &VolumeRecord) -> proto::CreateVolumeResponse {
    proto::CreateVolumeResponse { volume: Some(decode::encode_volume(record, driver.topology())) }
}

#[async_trait]
impl Controller for ControllerService {
    async fn create_volume(
        &self,
        request: Request<proto::CreateVolumeRequest>,
    ) -> Result<Response<proto::CreateVolumeResponse>, Status> {
        let request = request.into_inner();
        let span = rpc_span!("CreateVolume", volume_name = request.name);
        unary(&self.0, span, move |driver| {
            let record = driver.volumes.create(&create_volume(request)?)?;
            Ok(encode_created(driver, &record))
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
            driver.volumes.delete(&request.volume_id)?;
            Ok(proto::DeleteVolumeResponse {})
        })
        .await
    }

    async fn controller_publish_volume(
        &self,
        request: Request<proto::ControllerPublishVolumeRequest>,
    ) -> Result<Response<proto::ControllerPublishVolumeResponse>, Status> {
        let request = request.into_inner();
        let span =
            rpc_span!("ControllerPublishVolume", volume_id = request.volume_id, node_id = request.node_id);
        if !self.0.config().attach {
            return Err(not_claimed(&span, "PUBLISH_UNPUBLISH_VOLUME"));
        }
        unary(&self.0, span, move |driver| {
            let Some(capability) = request.volume_capability else {
                return Err(Error::Missing { field: "volume_capability" });
            };
            driver.volumes.attach(&AttachRequest {
                volume_id: request.volume_id,
                node_id: request.node_id,
                capability: decode::capability(Some(capability))?,
                read_only: request.readonly,
            })?;
            Ok(proto::ControllerPublishVolumeResponse { publish_context: Default::default() })
        })
        .await
    }

    async fn controller_unpublish_volume(
        &self,
        request: Request<proto::ControllerUnpublishVolumeRequest>,
    ) -> Result<Response<proto::ControllerUnpublishVolumeResponse>, Status> {
        let request = request.into_inner();
        let span =
            rpc_span!("ControllerUnpublishVolume", volume_id = request.volume_id, node_id = request.node_id);
        if !self.0.config().attach {
            return Err(not_claimed(&span, "PUBLISH_UNPUBLISH_VOLUME"));
        }
        unary(&self.0, span, move |driver| {
            driver.volumes.detach(&request.volume_id, &request.node_id)?;
            Ok(proto::ControllerUnpublishVolumeResponse {})
        })
        .await
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
            let page = driver.volumes.list(&PageRequest {
                max_entries: request.max_entries,
                starting_token: request.starting_token,
            })?;
            let entry = |record: &Arc<_>| proto::list_volumes_response::Entry {
                volume: Some(decode::encode_volume(record, driver.topology())),
                status: Some(proto::list_volumes_response::VolumeStatus {
                    published_node_ids: driver.volumes.attached_nodes(record),
                }),
            };
            Ok(proto::ListVolumesResponse {
                entries: page.entries.iter().map(entry).collect(),
                next_token: page.next_token,
            })
        })
        .await
    }

    async fn controller_list_volume_health(
        &self,
        request: Request<proto::ControllerListVolumeHealthRequest>,
    ) -> Result<Response<proto::ControllerListVolumeHealthResponse>, Status> {
        let request = request.into_inner();
        unary(&self.0, rpc_span!("ControllerListVolumeHealth"), move |driver| {
            let (entries, next_token) = driver.health.list(&PageRequest {
                max_entries: request.max_entries,
                starting_token: request.starting_token,
            })?;
            let entries = entries.into_iter().map(decode::encode_health).collect();
            Ok(proto::ControllerListVolumeHealthResponse { entries, next_token })
        })
        .await
    }

    async fn controller_get_volume_health(
        &self,
        request: Request<proto::ControllerGetVolumeHealthRequest>,
    ) -> Result<Response<proto::ControllerGetVolumeHealthResponse>, Status> {
        let request = request.into_inner();
        let span = rpc_span!("ControllerGetVolumeHealth", volume_id = request.volume_id);
        unary(&self.0, span, move |driver| {
            let health = decode::encode_health(driver.health.of(&request.volume_id)?);
            Ok(proto::ControllerGetVolumeHealthResponse { volume_health: Some(health) })
        })
        .await
    }

    async fn get_capacity(
        &self,
        request: Request<proto::GetCapacityRequest>,
    ) -> Result<Response<proto::GetCapacityResponse>, Status> {
        let request = request.into_inner();
        unary(&self.0, rpc_span!("GetCapacity"), move |driver| {
            let capabilities = decode::capabilities(request.volume_capabilities)?;
            let room = driver.capacity.available(&capabilities, &request.parameters)?;
            let ours = driver.topology();
            let elsewhere = request.accessible_topology.is_some_and(|asked| {
                ours.iter().any(|(key, value)| asked.segments.get(key).is_some_and(|asked| asked != value))
            });
            Ok(proto::GetCapacityResponse {
                available_capacity: if elsewhere { 0 } else { decode::wire_bytes(room.available) },
                // Schedulers use this one where it is given.
                maximum_volume_size: Some(if elsewhere { 0 } else { decode::wire_bytes(room.most) }),
                minimum_volume_size: Some(decode::wire_bytes(room.least)),
            })
        })
        .await
    }

    async fn controller_get_capabilities(
        &self,
        _: Request<proto::ControllerGetCapabilitiesRequest>,
    ) -> Result<Response<proto::ControllerGetCapabilitiesResponse>, Status> {
        unary(&self.0, rpc_span!("ControllerGetCapabilities"), |driver| {
            let capability = |kind: rpc::Type| proto::ControllerServiceCapability {
                r#type: Some(Type::Rpc(Rpc { r#type: kind.into() })),
            };
            let more = if driver.config().attach { &ATTACH_CAPABILITIES[..] } else { &[] };
            let capabilities = CAPABILITIES.iter().chain(more).map(|kind| capability(*kind)).collect();
            Ok(proto::ControllerGetCapabilitiesResponse { capabilities })
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
            let requisite = decode::requisite(request.accessibility_requirements);
            let record =
                driver.snapshots.create(&request.name, &request.source_volume_id, &parameters, &requisite)?;
            let snapshot = decode::encode_snapshot(&record, driver.topology());
            Ok(proto::CreateSnapshotResponse { snapshot: Some(snapshot) })
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
            driver.snapshots.delete(&request.snapshot_id)?;
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
            let page = driver.snapshots.list(&page, &filter)?;
            let entry = |record: &Arc<_>| proto::list_snapshots_response::Entry {
                snapshot: Some(decode::encode_snapshot(record, driver.topology())),
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
            let record = driver.snapshots.get(&request.snapshot_id)?;
            let snapshot = decode::encode_snapshot(&record, driver.topology());
            Ok(proto::GetSnapshotResponse { snapshot: Some(snapshot) })
        })
        .await
    }

    async fn controller_expand_volume(
        &self,
        request: Request<proto::ControllerExpandVolumeRequest>,
    ) -> Result<Response<proto::ControllerExpandVolumeResponse>, Status> {
        let request = request.into_inner();
        let span = rpc_span!("ControllerExpandVolume", volume_id = request.volume_id);
        unary(&self.0, span, move |driver| {
            if request.volume_id.is_empty() {
                return Err(Error::Missing { field: "volume_id" });
            }
            let Some(range) = request.capacity_range else {
                return Err(Error::Missing { field: "capacity_range" });
            };
            let range = decode::range(Some(range))?;
            let capability = decode::optional_capability(request.volume_capability)?;
            let expansion = driver.volumes.expand(&request.volume_id, range, capability.as_ref())?;
            Ok(proto::ControllerExpandVolumeResponse {
                capacity_bytes: decode::wire_bytes(expansion.capacity),
                node_expansion_required: expansion.node_expansion_required,
            })
        })
        .await
    }

    async fn controller_get_volume(
        &self,
        request: Request<proto::ControllerGetVolumeRequest>,
    ) -> Result<Response<proto::ControllerGetVolumeResponse>, Status> {
        let request = request.into_inner();
        let span = rpc_span!("ControllerGetVolume", volume_id = request.volume_id);
        unary(&self.0, span, move |driver| {
            let record = driver.volumes.get(&request.volume_id)?;
            Ok(proto::ControllerGetVolumeResponse {
                volume: Some(decode::encode_volume(&record, driver.topology())),
                status: Some(proto::controller_get_volume_response::VolumeStatus {
                    published_node_ids: driver.volumes.attached_nodes(&record),
                }),
            })
        })
        .await
    }

    async fn controller_modify_volume(
        &self,
        request: Request<proto::ControllerModifyVolumeRequest>,
    ) -> Result<Response<proto::ControllerModifyVolumeResponse>, Status> {
        let request = request.into_inner();
        let span = rpc_span!("ControllerModifyVolume", volume_id = request.volume_id);
        unary(&self.0, span, move |driver| {
            driver.volumes.modify(&request.volume_id, &request.mutable_parameters)?;
            Ok(proto::ControllerModifyVolumeResponse {})
        })
        .await
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
    driver.volumes.get(&request.volume_id)?;
    let refused = |message| proto::ValidateVolumeCapabilitiesResponse { confirmed: None, message };
    // A capability that no volume has is an answer here, not a bad request.
    let capabilities = match decode::capabilities(request.volume_capabilities) {
        Ok(capabilities) => capabilities,
        Err(error @ Error::Unsupported(_)) => return Ok(refused(error.to_string())),
        Err(error) => return Err(error),
    };
    let parameters = VolumeParameters::parse(&request.parameters)?;
    parse_tuning(&request.mutable_parameters)?;
    Ok(match driver.volumes.validate_capabilities(&request.volume_id, &capabilities, &parameters)? {
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
