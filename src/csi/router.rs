//! The services for the router of a cluster, over TCP: those of CSI that are asked on behalf of the cluster, and the few
//! questions of `deltapath.node.v1`. The CSI Node service is not among them: what is mounted here is kubelet's business. And, on
//! the same address, the service for the drivers of other nodes (`transfer.rs`).
//!
//! Only certificates of the cluster are let in; others learn nothing (`serve::mutual`). A connection with the router's
//! certificate is served by one server, and one with a node's by another, which only serves transfers.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use prost::Message;
use tokio::net::TcpListener;
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tokio_stream::{Stream, StreamExt};
use tonic::service::Routes;
use tonic::transport::{self, Server};
use tonic::{Request, Response, Status, async_trait};

use super::controller::{create_volume, encode_created};
use super::puller::Puller;
use super::rpc::{rpc_span, unary};
use super::services::cluster_services;
use super::snapshot_metadata::SnapshotMetadataService;
use super::transfer::{MAX_MESSAGE, TransferService};
use crate::driver::{Driver, Error, Named, SourceRef};
use crate::metric;
use base::DataDirKey;
use proto::node::node_server::{Node, NodeServer};
use proto::node::{
    AbandonRequest, AbandonResponse, ChooseRequest, ChooseResponse, CreateFromRequest, CreateFromResponse,
    DescribeRequest, DescribeResponse, FindRequest, FindResponse, Kind,
};
use proto::transfer::transfer_server::TransferServer;
use serve::identity::{Identity, Role};
use serve::listen::{self, Connection, Limits};
use serve::mutual::{self, Files, Mutual};

/// Between two pings of a router's connection, and until one that does not answer is given up.
const KEEPALIVE: Duration = Duration::from_secs(20);
/// How often abandoned transfers are looked for.
const SWEEP: Duration = Duration::from_secs(60);

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
    process: DataDirKey,
}

impl RouterListener {
    /// Listens. A certificate that is not there yet is waited for, since it names the key of the data directory; one that
    /// is wrong is an error.
    pub fn bind(driver: &Driver, address: SocketAddr, files: Files) -> Result<Self, RouterError> {
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
        let listener = serve::slots::bind(address).map_err(|error| RouterError::Listen(address, error))?;
        let process = DataDirKey::random().map_err(|error| RouterError::Listen(address, error))?;
        Ok(RouterListener { listener, tls, process })
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
        let connections = listen::tls(self.listener, move || tls.server(), Limits::of_certificates());
        let (of_router, of_nodes) = by_role(connections);
        let shutdown = futures_util::FutureExt::shared(shutdown);
        let server = || {
            Server::builder()
                .http2_keepalive_interval(Some(KEEPALIVE))
                .http2_keepalive_timeout(Some(KEEPALIVE))
        };
        let for_router = cluster_services(&mut server(), &driver, metadata)
            .add_service(NodeServer::new(NodeService {
                driver: driver.clone(),
                tls: self.tls.clone(),
                process: self.process,
            }))
            .serve_with_incoming_shutdown(of_router, shutdown.clone());
        let transfers = TransferService::new(driver.clone(), self.tls.clone());
        let transfers = TransferServer::new(transfers).max_decoding_message_size(MAX_MESSAGE);
        let refused = Routes::new(transfers).into_axum_router().fallback(|| async {
            Status::permission_denied("only the router's certificate may ask this")
                .into_http::<tonic::body::Body>()
        });
        let for_nodes =
            server().add_routes(Routes::from(refused)).serve_with_incoming_shutdown(of_nodes, shutdown);
        tokio::select! {
            served = async { tokio::try_join!(for_router, for_nodes) } => {
                served.map(drop).map_err(RouterError::Serve)
            }
            () = self.tls.follow(metric::CERTIFICATE_NOT_AFTER_SECONDS) => Ok(()),
            () = sweep(driver) => Ok(()),
        }
    }
}

/// Removes abandoned transfers now and then, for ever.
async fn sweep(driver: Arc<Driver>) {
    loop {
        tokio::time::sleep(SWEEP).await;
        let driver = driver.clone();
        let _ = tokio::task::spawn_blocking(move || {
            driver.transfers.sweep();
            driver.sources.sweep();
        })
        .await;
    }
}

type Incoming = ReceiverStream<io::Result<Connection>>;

/// Connections of the router, and those of nodes.
fn by_role(
    mut connections: impl Stream<Item = io::Result<Connection>> + Send + Unpin + 'static,
) -> (Incoming, Incoming) {
    let (router, of_router) = mpsc::channel(1);
    let (nodes, of_nodes) = mpsc::channel(1);
    tokio::spawn(async move {
        while let Some(connection) = connections.next().await {
            let role = match &connection {
                Ok(connection) => connection.client_certificates().first().and_then(Identity::of),
                Err(_) => None,
            };
            // Who has no role did not get as far as this.
            let to = match role.map(|identity| identity.role) {
                Some(Role::Node(_)) => &nodes,
                Some(Role::Router) => &router,
                None => continue,
            };
            if to.send(connection).await.is_err() {
                return;
            }
        }
    });
    (ReceiverStream::new(of_router), ReceiverStream::new(of_nodes))
}

/// What has a name; `None` if it is unknown.
fn named(kind: Kind) -> Option<Named> {
    match kind {
        Kind::Volume => Some(Named::Volume),
        Kind::Snapshot => Some(Named::Snapshot),
        Kind::GroupSnapshot => Some(Named::Group),
        Kind::Unknown => None,
    }
}

struct NodeService {
    driver: Arc<Driver>,
    tls: Arc<Mutual>,
    /// As in `DescribeResponse`.
    process: DataDirKey,
}

#[async_trait]
impl Node for NodeService {
    async fn describe(&self, _: Request<DescribeRequest>) -> Result<Response<DescribeResponse>, Status> {
        // Asked every few seconds: no line in the log and no place in the metrics.
        let (driver, process) = (self.driver.clone(), self.process);
        let described = tokio::task::spawn_blocking(move || {
            let room = driver.placement.room();
            DescribeResponse {
                key: driver.key().to_string(),
                node_id: driver.config().node_id.clone(),
                topology: driver.topology().into_iter().collect(),
                driver_name: driver.config().driver_name.clone(),
                version: env!("CARGO_PKG_VERSION").to_owned(),
                total_bytes: room.total,
                free_bytes: room.free,
                provisioned_bytes: room.provisioned,
                process: process.to_string(),
            }
        });
        let described =
            described.await.map_err(|_| Status::internal("the node could not read its own state"))?;
        Ok(Response::new(described))
    }

    async fn find(&self, request: Request<FindRequest>) -> Result<Response<FindResponse>, Status> {
        let request = request.into_inner();
        unary(&self.driver, rpc_span!("Find", name = request.name), move |driver| {
            let kind = named(request.kind()).ok_or(Error::Missing { field: "kind" })?;
            let (id, in_progress) = driver.placement.find_named(kind, &request.name)?.unwrap_or_default();
            Ok(FindResponse { id, in_progress })
        })
        .await
    }

    async fn choose(&self, request: Request<ChooseRequest>) -> Result<Response<ChooseResponse>, Status> {
        let request = request.into_inner();
        unary(&self.driver, rpc_span!("Choose", name = request.name), move |driver| {
            let key = |field, text: &String| {
                text.parse::<DataDirKey>().map_err(|_| Error::Invalid {
                    field,
                    value: format!("{text:?}"),
                    want: "8 hexadecimal digits in lower case".into(),
                })
            };
            let proposed = key("proposed_key", &request.proposed_key)?;
            let excluded = request
                .excluded_keys
                .iter()
                .map(|text| key("excluded_keys", text))
                .collect::<Result<Vec<_>, _>>()?;
            // A router of an earlier release has choices for volumes alone.
            let kind = named(request.kind()).unwrap_or(Named::Volume);
            let chosen = match request.is_over {
                true => driver.placement.end_choice(kind, &request.name, proposed),
                false => driver.placement.choose_node(kind, &request.name, proposed, &excluded)?,
            };
            Ok(ChooseResponse { key: chosen.to_string(), kind: request.kind })
        })
        .await
    }

    async fn create_from(
        &self,
        request: Request<CreateFromRequest>,
    ) -> Result<Response<CreateFromResponse>, Status> {
        let request = request.into_inner();
        let create = proto::CreateVolumeRequest::decode(&request.create_volume[..])
            .map_err(|_| Status::invalid_argument("create_volume is not a CreateVolumeRequest"))?;
        let (tls, driver) = (self.tls.clone(), self.driver.clone());
        let runtime = tokio::runtime::Handle::current();
        unary(&self.driver, rpc_span!("CreateFrom", volume_name = create.name), move |_| {
            let key: DataDirKey = request.key.parse().map_err(|_: base::KeyError| Error::Invalid {
                field: "key",
                value: format!("{:?}", request.key),
                want: "8 hexadecimal digits in lower case".into(),
            })?;
            let create = create_volume(create)?;
            let source = match &create.source {
                Some(SourceRef::Snapshot(id) | SourceRef::Volume(id)) => id.clone(),
                None => return Err(Error::Missing { field: "volume_content_source" }),
            };
            let way = {
                let _in_runtime = runtime.enter();
                Puller::new(&tls, &request.address, key, request.ticket, source)
            };
            let record = driver.transfers.create_volume(&create, Box::new(way))?;
            Ok(CreateFromResponse { created: encode_created(&driver, &record).encode_to_vec() })
        })
        .await
    }

    async fn abandon(&self, request: Request<AbandonRequest>) -> Result<Response<AbandonResponse>, Status> {
        let AbandonRequest { volume_id, unasked_seconds, gone_source_id } = request.into_inner();
        unary(&self.driver, rpc_span!("Abandon", volume_id = volume_id), move |driver| {
            let unasked = Duration::from_secs(unasked_seconds);
            let is_gone = driver.transfers.abandon(&volume_id, unasked, &gone_source_id)?;
            Ok(AbandonResponse { is_volume: !is_gone })
        })
        .await
    }
}
