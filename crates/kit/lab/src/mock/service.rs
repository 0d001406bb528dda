//! The calls of the mock by their paths: decode, call, encode. Calls that are not here are UNIMPLEMENTED, so a later version
//! of CSI does not change the mock.

use bytes::Bytes;
use futures_util::StreamExt;
use http_body_util::StreamBody;
use hyper::body::Frame;
use prost::Message;
use proto::*;
use serve::relay::{frame, unframe};
use tokio::time::Instant;
use tonic::Status;
use tonic::body::Body;
use tonic::codegen::http::Response;

use super::driver::Driver;
use super::state::required;
use crate::faults::{Caller, Local, Stream, answer, response, trailers};

/// The driver, and what serves it.
pub(super) struct Mock {
    pub driver: Driver,
    pub serves_kubernetes: bool,
    pub token: Option<String>,
}

impl Local for Mock {
    fn call(&self, path: &str, deadline: Option<Instant>, body: Bytes) -> Result<Response<Body>, Status> {
        let driver = &self.driver;
        let unimplemented = || Err(Status::unimplemented(format!("the mock has no {path}")));
        if path.starts_with("/snapshotmetadata.") && !self.serves_kubernetes {
            return unimplemented();
        }
        if let Some(stream) = Stream::read(path, &body)? {
            self.admit(&stream)?;
            return self.stream(&stream, deadline);
        }
        match path {
            "/csi.v1.Identity/GetPluginInfo" => one(&GetPluginInfoResponse {
                name: driver.settings.name.clone(),
                vendor_version: env!("CARGO_PKG_VERSION").to_owned(),
                ..Default::default()
            }),
            "/csi.v1.Identity/GetPluginCapabilities" => one(&plugin_capabilities()),
            "/csi.v1.Identity/Probe" => one(&ProbeResponse { ready: Some(true) }),
            "/csi.v1.Controller/ControllerGetCapabilities" => one(&controller_capabilities()),
            "/csi.v1.Controller/CreateVolume" => one(&driver.create_volume(unframe(body)?)?),
            "/csi.v1.Controller/DeleteVolume" => one(&driver.delete_volume(&unframe(body)?)?),
            "/csi.v1.Controller/ListVolumes" => one(&driver.list_volumes(&unframe(body)?)?),
            "/csi.v1.Controller/ValidateVolumeCapabilities" => one(&driver.validate(&unframe(body)?)?),
            "/csi.v1.Controller/ControllerExpandVolume" => one(&driver.expand(&unframe(body)?)?),
            "/csi.v1.Controller/ControllerModifyVolume" => one(&driver.modify(&unframe(body)?)?),
            "/csi.v1.Controller/CreateSnapshot" => one(&driver.create_snapshot(&unframe(body)?)?),
            "/csi.v1.Controller/DeleteSnapshot" => one(&driver.delete_snapshot(&unframe(body)?)?),
            "/csi.v1.Controller/ListSnapshots" => one(&driver.list_snapshots(&unframe(body)?)?),
            "/csi.v1.GroupController/GroupControllerGetCapabilities" => one(&group_capabilities()),
            "/csi.v1.GroupController/CreateVolumeGroupSnapshot" => {
                one(&driver.create_group(&unframe(body)?)?)
            }
            "/csi.v1.GroupController/GetVolumeGroupSnapshot" => one(&driver.get_group(&unframe(body)?)?),
            "/csi.v1.GroupController/DeleteVolumeGroupSnapshot" => {
                one(&driver.delete_group(&unframe(body)?)?)
            }
            "/csi.v1.Node/NodeGetCapabilities" => one(&NodeGetCapabilitiesResponse::default()),
            "/csi.v1.Node/NodeGetInfo" => {
                one(&NodeGetInfoResponse { node_id: "mock".into(), ..Default::default() })
            }
            "/csi.v1.Node/NodePublishVolume" => one(&driver.publish(&unframe(body)?)?),
            "/csi.v1.Node/NodeUnpublishVolume" => one(&driver.unpublish(&unframe(body)?)?),
            _ => unimplemented(),
        }
    }
}

impl Mock {
    fn stream(&self, asked: &Stream, deadline: Option<Instant>) -> Result<Response<Body>, Status> {
        let messages = self.driver.stream(asked, deadline)?;
        let frames = futures_util::stream::unfold(Some(Box::pin(messages)), |messages| async move {
            let mut messages = messages?;
            let (frame, rest) = match messages.next().await {
                Some(Ok(message)) => (Frame::data(frame(&message)), Some(messages)),
                Some(Err(status)) => (Frame::trailers(trailers(&status)), None),
                None => (Frame::trailers(trailers(&Status::ok(""))), None),
            };
            Some((Ok::<_, Status>(frame), rest))
        });
        Ok(response(Body::new(StreamBody::new(frames))))
    }

    /// Looks at who asks the Kubernetes service, in the order of the community's sidecar.
    fn admit(&self, asked: &Stream) -> Result<(), Status> {
        let Some(Caller { token, namespace }) = &asked.caller else { return Ok(()) };
        required("security_token", token)?;
        required("namespace", namespace)?;
        match &self.token {
            Some(wanted) if wanted != token => Err(Status::unauthenticated("unauthenticated user")),
            _ => Ok(()),
        }
    }
}

/// An answer of one message.
fn one(message: &impl Message) -> Result<Response<Body>, Status> {
    Ok(answer([frame(message)]))
}

fn plugin_capabilities() -> GetPluginCapabilitiesResponse {
    use plugin_capability::{Service, Type, VolumeExpansion, service, volume_expansion};
    let service = |kind: service::Type| PluginCapability {
        r#type: Some(Type::Service(Service { r#type: kind.into() })),
    };
    let expansion = VolumeExpansion { r#type: volume_expansion::Type::Online.into() };
    GetPluginCapabilitiesResponse {
        capabilities: vec![
            service(service::Type::ControllerService),
            service(service::Type::GroupControllerService),
            service(service::Type::SnapshotMetadataService),
            PluginCapability { r#type: Some(Type::VolumeExpansion(expansion)) },
        ],
    }
}

fn controller_capabilities() -> ControllerGetCapabilitiesResponse {
    use controller_service_capability::{Rpc, Type, rpc};
    let kinds = [
        rpc::Type::CreateDeleteVolume,
        rpc::Type::CreateDeleteSnapshot,
        rpc::Type::ListVolumes,
        rpc::Type::ListSnapshots,
        rpc::Type::CloneVolume,
        rpc::Type::ExpandVolume,
        rpc::Type::ModifyVolume,
    ];
    let capability = |kind: rpc::Type| ControllerServiceCapability {
        r#type: Some(Type::Rpc(Rpc { r#type: kind.into() })),
    };
    ControllerGetCapabilitiesResponse { capabilities: kinds.map(capability).to_vec() }
}

fn group_capabilities() -> GroupControllerGetCapabilitiesResponse {
    use group_controller_service_capability::{Rpc, Type, rpc};
    let kind = rpc::Type::CreateDeleteGetVolumeGroupSnapshot;
    GroupControllerGetCapabilitiesResponse {
        capabilities: vec![GroupControllerServiceCapability {
            r#type: Some(Type::Rpc(Rpc { r#type: kind.into() })),
        }],
    }
}
