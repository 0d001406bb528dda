//! What stands around the routers in a life: their processes, the calls that sidecars make of them, and a Kubernetes API that has
//! PersistentVolumes and nothing else.

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http_body_util::{BodyExt, Full};
use k8s_openapi::api::core::v1::PersistentVolume;
use parking_lot::Mutex;
use prost::Message;
use serde_json::json;
use serve::relay::{frame, unframe_bytes};
use serve::streams::Streams;
use tokio::task::JoinHandle;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tonic::Status;
use tonic::body::Body;
use tonic::codegen::http::{Request, Response};
use tower::Service;

use super::certificates;
use super::network::{From, HostId, Network};
use crate::calls::Router;
use crate::nodes::Nodes;
use crate::record;
use crate::service::Controller;

/// --node-timeout.
const PATIENCE: Duration = Duration::from_secs(5);
/// By how much a call may outlive its deadline. Code takes no simulated time.
const LATE: Duration = Duration::from_millis(10);

/// Which volume each claim has, by the claim's name.
pub type Volumes = Arc<Mutex<BTreeMap<String, String>>>;

pub struct RouterProcess {
    host: HostId,
    network: Network,
    router: Arc<Router>,
    ended: CancellationToken,
    finds_twice: JoinHandle<()>,
}

impl RouterProcess {
    pub fn start(host: HostId, network: &Network, addresses: &[String], volumes: &Volumes) -> Self {
        let tls = certificates().router.clone();
        let nodes = Nodes::new(tls, Arc::new(From(host, network.clone())), PATIENCE, None, None);
        nodes.set_addresses(&addresses.iter().cloned().collect());
        let router = Arc::new(Router::new(nodes, Streams::new(8, 8, record::OPEN_STREAMS)));
        let finds_twice = tokio::spawn({
            let (router, network) = (router.clone(), network.clone());
            let volumes = kube::Api::all(kubernetes(volumes));
            async move { network.unless_frozen(host, router.find_twice(Some(volumes))).await }
        });
        RouterProcess { host, network: network.clone(), router, ended: CancellationToken::new(), finds_twice }
    }

    /// As `kill -9` does.
    pub fn end(&self) {
        assert!(
            !self.finds_twice.is_finished() || self.ended.is_cancelled(),
            "a task of the router has ended"
        );
        self.ended.cancel();
        self.finds_twice.abort();
        // Ends the tasks that follow the nodes.
        self.router.nodes.set_addresses(&Default::default());
    }

    /// A call as it comes over the socket. It ends by its deadline.
    pub async fn call<A: Message + Default>(
        &self,
        path: &str,
        request: &impl Message,
        deadline: Duration,
    ) -> Result<A, Status> {
        let (begun, mut service) = (Instant::now(), Controller(self.router.clone()));
        let request = Request::post(path)
            .header("grpc-timeout", format!("{}m", deadline.as_millis()))
            .body(Body::new(Full::new(frame(request))))
            .expect("a request");
        let answer = async {
            let Ok(answer) = service.call(request).await;
            read(answer).await
        };
        let answer = tokio::select! {
            biased;
            () = self.ended.cancelled() => Err(Status::unavailable("the router is gone")),
            answer = self.network.unless_frozen(self.host, answer) => answer,
        };
        let elapsed = begun.elapsed();
        let was_frozen = self.network.was_frozen(self.host, begun);
        assert!(elapsed <= deadline + LATE || was_frozen, "{path} took {elapsed:?}, and had {deadline:?}");
        Ok(A::decode(answer?).expect("an answer"))
    }
}

async fn read(answer: Response<Body>) -> Result<Bytes, Status> {
    if let Some(status) = Status::from_header_map(answer.headers()) {
        return Err(status);
    }
    let body = answer.into_body().collect().await.expect("a body");
    let trailers = body.trailers().and_then(Status::from_header_map).expect("a status");
    match trailers.code() {
        tonic::Code::Ok => unframe_bytes(body.to_bytes()),
        _ => Err(trailers),
    }
}

fn kubernetes(volumes: &Volumes) -> kube::Client {
    let volumes = volumes.clone();
    let service = tower::service_fn(move |request: Request<kube::client::Body>| {
        assert_eq!(request.uri().path(), "/api/v1/persistentvolumes");
        let items: Vec<PersistentVolume> = volumes
            .lock()
            .iter()
            .map(|(name, id)| {
                let csi = json!({"driver": super::node::DRIVER, "volumeHandle": id});
                serde_json::from_value(json!({"metadata": {"name": name}, "spec": {"csi": csi}}))
                    .expect("a volume")
            })
            .collect();
        let list =
            json!({"apiVersion": "v1", "kind": "PersistentVolumeList", "metadata": {}, "items": items});
        std::future::ready(Ok::<_, Infallible>(Response::new(Full::new(Bytes::from(list.to_string())))))
    });
    kube::Client::new(service, "default")
}
