//! `cbt-earlier cbt-http`: the sidecar that publishes itself as the DriverDiscovery of its driver and answers JSON over HTTPS,
//! from ListSnapshotDeltas on its socket; and that gives the data of a block for a token.

use std::error::Error;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use axum::body::Body;
use axum::extract::{Request, State};
use axum::http::{HeaderMap, StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Extension, Router};
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use csi_client::identity;
use futures_util::StreamExt;
use kube::api::{Patch, PatchParams};
use kube::{Api, Client};
use proto::answers::Checked;
use proto::deltas::ListSnapshotDeltasRequest;
use proto::deltas::snapshot_deltas_client::SnapshotDeltasClient;
use proto::deltas::snapshot_deltas_server::SnapshotDeltasServer;
use serde_json::{Value, json};
use serve::listen::{Calls, OpenCall};
use serve::questions::ask;
use serve::reviews::{Object, Reviews};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio_stream::wrappers::UnixListenerStream;
use tokio_util::io::ReaderStream;
use tonic::Status;
use tonic::transport::Server as Grpc;

use super::discovery::{self, DATA, DriverDiscovery};
use super::list::Lists;
use super::token::{Data, Tokens};
use super::wire;
use crate::CbtHttp as Arguments;
use crate::driver::{Blocks, Driver};
use crate::refusal::Refusal;
use crate::request::bearer;
use crate::server::{METRICS, Ready, Server, answer_page, count, place};

pub const PATH: &str = "/v1alpha1/deltas";
const MANAGER: &str = "cbt-http";
/// How often the DriverDiscovery is written again, and how soon where that failed.
const EVERY: Duration = Duration::from_secs(30);
const SOON: Duration = Duration::from_secs(2);
/// Longest request, in bytes: secrets are the most of it.
const MAX_REQUEST: usize = 2 << 20;
/// Messages of ListSnapshotDeltas are longer than gRPC's default allows: a page with tokens.
const MAX_MESSAGE: usize = 16 << 20;

/// Answers the aggregated API server, and those who bring tokens.
struct Sidecar {
    reviews: Reviews,
    audience: String,
    driver_name: String,
    lists: SnapshotDeltasClient<Checked>,
    driver: Driver,
    data: Option<(Tokens, Data)>,
    page_timeout: Duration,
    places: Arc<Semaphore>,
}

fn router(sidecar: Arc<Sidecar>) -> Router {
    Router::new()
        .route(PATH, post(page))
        .route(&format!("{PATH}{DATA}"), get(data))
        .fallback(async || Refusal::from(Status::not_found(format!("there is {PATH} and {PATH}{DATA}"))))
        .method_not_allowed_fallback(async || {
            let message =
                format!("POST {PATH} asks for changed blocks, GET {PATH}{DATA} for the data of one");
            Refusal::new(StatusCode::METHOD_NOT_ALLOWED, "MethodNotAllowed", message)
        })
        .with_state(sidecar)
}

async fn page(
    State(sidecar): State<Arc<Sidecar>>,
    Extension(calls): Extension<Calls>,
    request: Request,
) -> Response {
    let time = sidecar.page_timeout;
    let page = async move {
        let open = calls.open();
        let (page, place) = sidecar.page(request, &calls, &open).await?;
        Ok((page, (place, open)))
    };
    answer_page(page, time, "the page took too long: request fewer entries").await
}

async fn data(
    State(sidecar): State<Arc<Sidecar>>,
    Extension(calls): Extension<Calls>,
    headers: HeaderMap,
) -> Response {
    let open = calls.open();
    let answer = sidecar.read(&headers, &open).await;
    count("cbt_earlier_data_total", &answer);
    match answer {
        Ok(bytes) => {
            let stream = ReaderStream::with_capacity(bytes, 64 << 10);
            // The call is open as long as its body.
            let stream = stream.inspect(move |_| {
                let _ = &open;
            });
            let kind =
                [(header::CONTENT_TYPE, "application/octet-stream"), (header::CACHE_CONTROL, "no-store")];
            (kind, Body::from_stream(stream)).into_response()
        }
        Err(status) => Refusal::from(status).into_response(),
    }
}

impl Sidecar {
    /// Only who may create the subresource of this driver's DriverDiscovery gets a page: handles say nothing of whose they
    /// are, so the aggregated API server alone should have that right.
    async fn page(
        &self,
        request: Request,
        calls: &Calls,
        open: &OpenCall,
    ) -> Result<(wire::Response, OwnedSemaphorePermit), Status> {
        let (head, body) = request.into_parts();
        let token = bearer(&head.headers).ok_or_else(|| {
            Status::unauthenticated("a token is missing: send the header Authorization: Bearer TOKEN")
        })?;
        let held = calls.hold()?;
        let caller = self.reviews.caller(token, &self.audience).await?;
        open.known(caller.name());
        let place = place(&self.places)?;
        drop(held);
        let object = Object {
            group: discovery::GROUP,
            version: discovery::VERSION,
            resource: discovery::PLURAL,
            subresource: "deltas",
            kind: "DriverDiscovery",
            namespace: "",
            name: &object_name(&self.driver_name),
        };
        self.reviews.may(&caller, "create", object).await?;
        // Last: the body of a refused request is not waited for.
        let body = axum::body::to_bytes(body, MAX_REQUEST).await.map_err(|error| {
            Status::invalid_argument(format!(
                "the request has more than {MAX_REQUEST} bytes, or was cut off: {error}"
            ))
        })?;
        let request: wire::Request = serde_json::from_slice(&body)
            .map_err(|error| Status::invalid_argument(format!("invalid request: {error}")))?;
        let page = self.lists.clone().list_snapshot_deltas(ListSnapshotDeltasRequest::from(request)).await?;
        Ok((page.into_inner().into(), place))
    }

    async fn read(
        &self,
        headers: &HeaderMap,
        open: &OpenCall,
    ) -> Result<tokio::io::Take<tokio::fs::File>, Status> {
        let Some((tokens, data)) = &self.data else {
            return Err(Status::unimplemented("no data is served here: it runs without --snapshot-data"));
        };
        let token = bearer(headers).ok_or_else(|| {
            Status::unauthenticated("a data token is missing: send the header Authorization: Bearer TOKEN")
        })?;
        let grant = tokens.open(token)?;
        // Whose it is, it does not say.
        open.known("a data token");
        // The driver says whether the snapshot is still there: its file may be there for longer.
        let blocks = Blocks::of(None, &grant.snapshot);
        self.driver.tuples(blocks, grant.offset, 1).await?.next().await?;
        data.read(&grant).await
    }
}

/// Serves until a signal.
pub async fn run(arguments: Arguments) -> Result<(), Box<dyn Error>> {
    let common = arguments.common;
    let ready = Arc::new(Ready::default());
    let socket = arguments.socket.path().to_owned();
    let (grpc, _socket) = serve::socket::bind(&socket)
        .await
        .map_err(|error| format!("listen on {} (--socket): {error}", arguments.socket))?;
    let key_file = arguments.data_token_key.as_deref();
    let tokens_of =
        |driver: &str| key_file.map(|key| Tokens::new(key, driver, arguments.data_token_ttl)).transpose();
    // What is wrong with it is said before the driver is there.
    tokens_of("")?;
    let is_published = Arc::new(AtomicBool::default());
    let missing = {
        let (ready, is_published) = (ready.clone(), is_published.clone());
        move || {
            let unpublished = || "its DriverDiscovery is not written: see the log";
            ready.missing().or_else(|| (!is_published.load(Ordering::Relaxed)).then(unpublished))
        }
    };
    let mut server = Server::begin(&common, &ready.certificate, missing).await?;
    let driver = Driver::at(arguments.csi_address.path());
    let Some(driver_name) = server.driver_name(&driver, &ready).await? else { return Ok(()) };
    let tokens = tokens_of(&driver_name)?;
    let lists = Lists { driver: driver.clone(), block_size: arguments.block_size, tokens: tokens.clone() };
    let lists = SnapshotDeltasServer::new(lists).max_encoding_message_size(MAX_MESSAGE);
    server.tasks.spawn(async move {
        let served =
            Grpc::builder().add_service(lists).serve_with_incoming(UnixListenerStream::new(grpc)).await;
        tracing::error!(?served, "the service ListSnapshotDeltas has ended");
    });
    let publisher = Arc::new(Publisher {
        client: server.client.clone(),
        driver_name: driver_name.clone(),
        place: match (arguments.url, arguments.service) {
            (Some(url), _) => json!({"url": url}),
            (None, Some(service)) => json!({"service": service.json()}),
            (None, None) => return Err("either --url or --service is needed".into()),
        },
        bundle: arguments.ca_bundle.unwrap_or_else(|| common.tls_cert.clone()),
        is_published,
    });
    let lease = arguments.lease.unwrap_or_else(|| format!("cbt-http-{driver_name}"));
    let lease = server.lease(&common, &lease);
    let sidecar = Arc::new(Sidecar {
        reviews: Reviews::new(server.client.clone(), common.review_cache, METRICS)?,
        audience: arguments.audience,
        driver_name,
        driver,
        lists: SnapshotDeltasClient::new(identity::lazy_channel(&socket))
            .max_decoding_message_size(MAX_MESSAGE),
        data: tokens.map(|tokens| (tokens, Data(arguments.snapshot_data))),
        page_timeout: arguments.page_timeout,
        places: Arc::new(Semaphore::new(usize::from(common.max_requests))),
    });
    let work = move || publisher.clone().run();
    server.serve_elected(ready, lease, work, router(sidecar), "cbt-http").await
}

/// The name of a driver's DriverDiscovery. Names of drivers may have capitals, names of objects have none.
fn object_name(driver: &str) -> String {
    driver.to_ascii_lowercase()
}

struct Publisher {
    client: Client,
    driver_name: String,
    /// `url` or `service`.
    place: Value,
    bundle: PathBuf,
    is_published: Arc<AtomicBool>,
}

impl Publisher {
    /// Works until it is dropped.
    async fn run(self: Arc<Self>) {
        loop {
            let wait = match self.publish().await {
                Ok(()) => {
                    self.is_published.store(true, Ordering::Relaxed);
                    EVERY
                }
                Err(error) => {
                    tracing::warn!(error, name = self.driver_name, "write the DriverDiscovery");
                    SOON
                }
            };
            tokio::time::sleep(wait).await;
        }
    }

    /// Applied by this author. What a person has written over it stays, and is an error here.
    async fn publish(&self) -> Result<(), String> {
        let bundle = std::fs::read(&self.bundle)
            .map_err(|error| format!("read {}: {error}", self.bundle.display()))?;
        let mut config = self.place.clone();
        config["caBundle"] = json!(STANDARD.encode(bundle));
        let name = object_name(&self.driver_name);
        let object = json!({
            "apiVersion": format!("{}/{}", discovery::GROUP, discovery::VERSION), "kind": "DriverDiscovery",
            "metadata": {"name": name},
            "spec": {"driverName": self.driver_name, "clientConfig": config},
        });
        let objects: Api<DriverDiscovery> = Api::all(self.client.clone());
        let (params, patch) = (PatchParams::apply(MANAGER), Patch::Apply(object));
        let applied = ask(METRICS.seconds, "DriverDiscovery", objects.patch(&name, &params, &patch)).await;
        applied.map(drop).map_err(|error| error.to_string())
    }
}
