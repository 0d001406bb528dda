//! The services for the router of a cluster, over TCP: those of CSI that are asked on behalf of the cluster, and the few
//! questions of `deltapath.node.v1`. The CSI Node service is not among them: what is mounted here is kubelet's business.
//!
//! Only the router's certificate is let in; others learn nothing (`serve::mutual`).

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use tokio::net::TcpListener;
use tonic::transport::{self, Server};
use tonic::{Request, Response, Status, async_trait};

use super::rpc::{rpc_span, unary};
use super::server::cluster_services;
use super::snapshot_metadata::SnapshotMetadataService;
use crate::driver::{Driver, Error, Named};
use proto::node::node_server::{Node, NodeServer};
use proto::node::{
    ChooseRequest, ChooseResponse, DescribeRequest, DescribeResponse, FindRequest, FindResponse, Kind,
};
use serve::listen::{self, Limits};
use serve::mutual::{self, Files, Mutual, Role};

/// Between two pings of a router's connection, and until one that does not answer is given up.
const KEEPALIVE: Duration = Duration::from_secs(20);

/// Why routers could not be served.
#[derive(Debug, thiserror::Error)]
pub enum RouterError {
    /// The address cannot be had.
    #[error("listen on {0} (--router-listen)")]
    Listen(SocketAddr, #[source] io::Error),
    /// The files hold nothing to use.
    #[error("the certificate for --router-listen")]
    Certificate(#[source] mutual::Error),
    /// The server failed.
    #[error("serve routers")]
    Serve(#[source] transport::Error),
}

/// An address on which the router is waited for.
#[derive(Debug)]
pub struct RouterListener {
    listener: TcpListener,
    tls: Arc<Mutual>,
}

impl RouterListener {
    /// Listens. A certificate that is not there yet is waited for, since it names the key of the data directory; one that
    /// is wrong is an error.
    pub async fn bind(driver: &Driver, address: SocketAddr, files: Files) -> Result<Self, RouterError> {
        let tls = Mutual::new(files.clone(), Role::Node(driver.key().to_string()));
        match tls.load() {
            Ok(()) => {}
            Err(mutual::Error::Certificate(error)) if error.is_not_found() => tracing::warn!(
                error = base::report(&error),
                key = %driver.key(),
                "no router is served until there is a certificate for this data directory"
            ),
            Err(error) => return Err(RouterError::Certificate(error)),
        }
        let listener =
            TcpListener::bind(address).await.map_err(|error| RouterError::Listen(address, error))?;
        Ok(RouterListener { listener, tls })
    }

    /// Serves until `shutdown` resolves and the calls under way are done.
    pub(super) async fn serve(
        self,
        driver: Arc<Driver>,
        metadata: SnapshotMetadataService,
        shutdown: impl Future<Output = ()>,
    ) -> Result<(), RouterError> {
        if let Ok(address) = self.listener.local_addr() {
            tracing::info!(%address, key = %driver.key(), "listening for the router");
        }
        let tls = self.tls.clone();
        let connections = listen::tls(self.listener, move || tls.server(), Limits::default());
        let mut server = Server::builder()
            .http2_keepalive_interval(Some(KEEPALIVE))
            .http2_keepalive_timeout(Some(KEEPALIVE));
        let served = cluster_services(&mut server, &driver, metadata)
            .add_service(NodeServer::new(NodeService(driver)))
            .serve_with_incoming_shutdown(connections, shutdown);
        tokio::select! {
            served = served => served.map_err(RouterError::Serve),
            () = self.tls.follow() => Ok(()),
        }
    }
}

struct NodeService(Arc<Driver>);

#[async_trait]
impl Node for NodeService {
    async fn describe(&self, _: Request<DescribeRequest>) -> Result<Response<DescribeResponse>, Status> {
        // Asked every few seconds: no line in the log and no place in the metrics.
        let driver = self.0.clone();
        let described = tokio::task::spawn_blocking(move || {
            let room = driver.room();
            DescribeResponse {
                key: driver.key().to_string(),
                node_id: driver.config().node_id.clone(),
                topology: driver.topology().into_iter().collect(),
                driver_name: driver.config().driver_name.clone(),
                version: env!("CARGO_PKG_VERSION").to_owned(),
                total_bytes: room.total,
                free_bytes: room.free,
                provisioned_bytes: room.provisioned,
            }
        });
        let described = described.await.map_err(|_| Status::internal("the node could not look at itself"))?;
        Ok(Response::new(described))
    }

    async fn find(&self, request: Request<FindRequest>) -> Result<Response<FindResponse>, Status> {
        let request = request.into_inner();
        unary(&self.0, rpc_span!("Find", name = request.name), move |driver| {
            let kind = match request.kind() {
                Kind::Volume => Named::Volume,
                Kind::Snapshot => Named::Snapshot,
                Kind::GroupSnapshot => Named::Group,
                Kind::Unknown => return Err(Error::Missing { field: "kind" }),
            };
            Ok(FindResponse { id: driver.find_named(kind, &request.name)?.unwrap_or_default() })
        })
        .await
    }

    async fn choose(&self, request: Request<ChooseRequest>) -> Result<Response<ChooseResponse>, Status> {
        let request = request.into_inner();
        unary(&self.0, rpc_span!("Choose", volume_name = request.volume_name), move |driver| {
            let key = |field, text: &String| {
                text.parse().map_err(|error: base::KeyError| Error::Invalid {
                    field,
                    value: format!("{text:?}"),
                    want: error.to_string(),
                })
            };
            let proposed = key("proposed_key", &request.proposed_key)?;
            let excluded = request
                .excluded_keys
                .iter()
                .map(|text| key("excluded_keys", text))
                .collect::<Result<Vec<_>, _>>()?;
            let chosen = driver.choose_node(&request.volume_name, proposed, &excluded)?;
            Ok(ChooseResponse { key: chosen.to_string() })
        })
        .await
    }
}
