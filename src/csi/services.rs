//! The services that both the socket and the router's listener serve.

use std::sync::Arc;

use tonic::service::LayerExt;
use tonic::transport::server::{Router, Server};

use super::controller::ControllerService;
use super::group_controller::GroupControllerService;
use super::identity::IdentityService;
use super::snapshot_metadata::{SnapshotMetadataService, counted};
use crate::driver::Driver;
use proto::controller_server::ControllerServer;
use proto::group_controller_server::GroupControllerServer;
use proto::identity_server::IdentityServer;
use proto::snapshot_metadata_server::SnapshotMetadataServer;

/// The services that are asked on behalf of the cluster, and not of the node.
pub(super) fn cluster_services(
    server: &mut Server,
    driver: &Arc<Driver>,
    metadata: SnapshotMetadataService,
) -> Router {
    server
        .add_service(IdentityServer::new(IdentityService(driver.clone())))
        .add_service(ControllerServer::new(ControllerService(driver.clone())))
        .add_service(GroupControllerServer::new(GroupControllerService(driver.clone())))
        .add_service(
            counted(driver.metadata.streams().clone()).named_layer(SnapshotMetadataServer::new(metadata)),
        )
}
