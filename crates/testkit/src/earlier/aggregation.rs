//! What tests of VolumeSnapshotDelta share: the aggregated API server behind the one APIService, which each test has for itself
//! in turn, the cbt-http of its driver, and users.

use std::net::{IpAddr, UdpSocket};
use std::path::{Path, PathBuf};
use std::sync::LazyLock;

use crate::api_server::config_of;
use crate::free_port;
use axum::http::Request;
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use kube::Client;
use kube::api::{DeleteParams, Patch, PatchParams};
use serde_json::{Value, json};
use tokio::sync::{Mutex, MutexGuard};

use super::world::{Program, World};

/// The name of the one APIService.
const API: &str = "v1alpha1.cbt.storage.k8s.io";
const MANIFESTS: &str = "deploy/components/aggregated";
/// The bytes in a block where the driver lists ranges of any length.
pub const BLOCK: u64 = 4096;

static TURN: LazyLock<Mutex<()>> = LazyLock::new(Mutex::default);

/// The APIService, as long as it lives.
pub struct Aggregation<'w> {
    pub world: &'w World,
    /// Where kube-apiserver finds replicas: no endpoint may be at a loopback address.
    pub ip: IpAddr,
    kubeconfig: PathBuf,
    http_kubeconfig: PathBuf,
    token: PathBuf,
    _turn: Option<MutexGuard<'static, ()>>,
}

impl<'w> Aggregation<'w> {
    pub async fn begin(world: &'w World) -> Self {
        let turn = TURN.lock().await;
        Aggregation { _turn: Some(turn), ..Self::apart(world).await }
    }

    /// For those who have no use for the APIService.
    pub async fn apart(world: &'w World) -> Self {
        let probe = UdpSocket::bind("0.0.0.0:0").expect("a socket");
        // Nothing is sent: this only asks which address would be used.
        probe.connect("198.51.100.1:9").expect("these tests need an address that is no loopback address");
        let ip = probe.local_addr().expect("an address").ip();
        let kubeconfig = world.kubeconfig("aggregated", &format!("{MANIFESTS}/aggregated.yaml")).await;
        let http_kubeconfig = world.kubeconfig("cbt-http", &format!("{MANIFESTS}/cbt-http.yaml")).await;
        let token = world.dir.path().join("token");
        std::fs::write(&token, world.api.token(&world.namespace, "aggregated", "cbt-http").await)
            .expect("write");
        let metadata = json!({"name": "aggregated", "namespace": world.namespace});
        let port = json!({"name": "api", "port": 443, "protocol": "TCP", "targetPort": "api"});
        world
            .api
            .make(json!({"apiVersion": "v1", "kind": "Service", "metadata": metadata, "spec": {"ports": [port]}}))
            .await;
        Aggregation { world, ip, kubeconfig, http_kubeconfig, token, _turn: None }
    }

    /// Begins, and starts one replica and one cbt-http.
    pub async fn start(world: &'w World) -> (Self, Program, Program) {
        let aggregation = Self::begin(world).await;
        let http = aggregation.sidecar("http", &[]).await;
        let server = aggregation.server("server", &[]).await;
        aggregation.route(&[&server]).await;
        (aggregation, server, http)
    }

    /// Takes the APIService away, for the tests that come later.
    pub async fn end(self) {
        let services = self.world.api.objects("APIService", None);
        services.delete(API, &DeleteParams::default()).await.expect("delete the APIService");
    }

    /// A replica of the aggregated API server, ready.
    pub async fn server(&self, name: &str, more: &[&str]) -> Program {
        let mut flags = vec![
            format!("--bind-address={}", self.ip),
            format!("--token-file={}", self.token.display()),
            "--lease=cbt-earlier-aggregated".into(),
        ];
        flags.extend(more.iter().map(|flag| (*flag).to_owned()));
        let host = format!("aggregated.{}.svc", self.world.namespace);
        let port = free_port();
        let server = Program::spawn(self.world, "aggregated", name, &host, port, &self.kubeconfig, flags);
        server.ready().await;
        server
    }

    /// A cbt-http of the world's driver, ready.
    pub async fn sidecar(&self, name: &str, more: &[&str]) -> Program {
        let sidecar = self.sidecar_unready(name, more);
        sidecar.ready().await;
        sidecar
    }

    pub fn sidecar_unready(&self, name: &str, more: &[&str]) -> Program {
        let port = free_port();
        let path = |end: &str| self.world.dir.path().join(format!("{name}.{end}")).display().to_string();
        let mut flags = vec![
            format!("--csi-address={}", self.world.csi.display()),
            format!("--socket={}", path("sock")),
            "--bind-address=127.0.0.1".into(),
            format!("--url=https://localhost:{port}/v1alpha1/deltas"),
            format!("--ca-bundle={}", path("ca")),
            // The name that the role allows.
            "--lease=cbt-earlier-cbt-http".into(),
        ];
        flags.extend(more.iter().map(|flag| (*flag).to_owned()));
        Program::spawn(self.world, "cbt-http", name, "localhost", port, &self.http_kubeconfig, flags)
    }

    /// Makes these replicas the endpoints of the Service behind the APIService, and waits until they answer.
    pub async fn route(&self, servers: &[&Program]) {
        let World { api, namespace, .. } = self.world;
        let slices = api.objects("EndpointSlice", Some(namespace));
        for slice in slices.list(&Default::default()).await.expect("slices") {
            let name = slice.metadata.name.expect("a name");
            slices.delete(&name, &DeleteParams::default()).await.expect("delete a slice");
        }
        for server in servers {
            api.make(json!({
                "apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice",
                "metadata": {
                    "name": format!("aggregated-{}", server.port), "namespace": namespace,
                    "labels": {"kubernetes.io/service-name": "aggregated"},
                },
                "addressType": "IPv4",
                "endpoints": [{"addresses": [self.ip.to_string()], "conditions": {"ready": true}}],
                "ports": [{"name": "api", "port": server.port, "protocol": "TCP"}],
            }))
            .await;
        }
        let authorities: String = servers.iter().map(|server| server.ca.as_str()).collect();
        let manifest = crate::HOME.to_owned() + "/" + MANIFESTS + "/apiservice.yaml";
        let manifest = std::fs::read_to_string(&manifest).expect("the manifest");
        let mut service: Value = serde_saphyr::from_str(&manifest).expect("YAML");
        service["spec"]["service"] = json!({"namespace": namespace, "name": "aggregated", "port": 443});
        service["spec"]["caBundle"] = json!(STANDARD.encode(authorities));
        let params = PatchParams::apply("test").force();
        let services = api.objects("APIService", None);
        services.patch(API, &params, &Patch::Apply(service)).await.expect("the APIService");
        let client = client(&api.kubeconfig).await;
        let is_available = async || {
            let request = Request::get("/apis/cbt.storage.k8s.io/v1alpha1").body(Vec::new());
            let found = client.request::<Value>(request.expect("a request")).await;
            found.is_ok_and(|found| found["resources"][0]["name"] == "volumesnapshotdeltas")
        };
        crate::eventually("the APIService is available", is_available).await;
    }

    /// A client of a service account with these rules.
    pub async fn user(&self, name: &str, rules: Value) -> User {
        self.world.api.account(&self.world.namespace, name, rules).await;
        self.user_of(&self.world.namespace, name).await
    }

    /// A client of an account that is there, which asks in the world's namespace.
    pub async fn user_of(&self, home: &str, name: &str) -> User {
        let client = client(&self.world.api.kubeconfig_of(home, name).await).await;
        User { client, namespace: self.world.namespace.clone() }
    }
}

/// A client that sends each request once: refusals are what is tested.
async fn client(kubeconfig: &Path) -> Client {
    let mut config = config_of(kubeconfig).await;
    config.default_retry = false;
    Client::try_from(config).expect("a client")
}

/// The right to create VolumeSnapshotDeltas.
pub fn create() -> Value {
    json!({"apiGroups": ["cbt.storage.k8s.io"], "resources": ["volumesnapshotdeltas"], "verbs": ["create"]})
}

/// The right to get data tokens.
pub fn data() -> Value {
    json!({"apiGroups": ["cbt.storage.k8s.io"], "resources": ["volumesnapshotdeltas/data"], "verbs": ["create"]})
}

/// The right to get these VolumeSnapshots, or all.
pub fn snapshots(names: &[&str]) -> Value {
    let mut rule =
        json!({"apiGroups": ["snapshot.storage.k8s.io"], "resources": ["volumesnapshots"], "verbs": ["get"]});
    if !names.is_empty() {
        rule["resourceNames"] = json!(names);
    }
    rule
}

/// A user who asks for deltas through kube-apiserver.
pub struct User {
    pub client: Client,
    namespace: String,
}

/// An answer as it came.
pub struct Answer {
    pub code: u16,
    /// `Content-Type`, `Retry-After` and `Warning`.
    pub kind: String,
    pub retry: String,
    pub warning: String,
    /// The FlowSchema, by its uid, that kube-apiserver has counted the request to.
    pub flow: String,
    pub body: String,
}

impl Answer {
    pub fn json(&self) -> Value {
        // kube-apiserver writes plain text where no server answers for an APIService.
        serde_json::from_str(&self.body).unwrap_or_else(|_| json!(self.body))
    }
}

pub fn object(spec: Value) -> Value {
    json!({
        "apiVersion": "cbt.storage.k8s.io/v1alpha1", "kind": "VolumeSnapshotDelta",
        "metadata": {"name": "walk"}, "spec": spec,
    })
}

impl User {
    /// Sends a body as it is.
    pub async fn post(&self, query: &str, headers: &[(&str, &str)], body: &[u8]) -> Answer {
        let path = format!(
            "/apis/cbt.storage.k8s.io/v1alpha1/namespaces/{}/volumesnapshotdeltas{query}",
            self.namespace
        );
        let mut request = Request::post(path);
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        let request = request.body(kube::client::Body::from(body.to_vec())).expect("a request");
        let answer = self.client.send(request).await.expect("an answer");
        let header = |name: &str| {
            answer.headers().get(name).and_then(|value| value.to_str().ok()).unwrap_or_default().to_owned()
        };
        let (code, kind) = (answer.status().as_u16(), header("content-type"));
        let (retry, warning) = (header("retry-after"), header("warning"));
        let flow = header("x-kubernetes-pf-flowschema-uid");
        let body = answer.into_body().collect_bytes().await.expect("a body");
        Answer { code, kind, retry, warning, flow, body: String::from_utf8(body.to_vec()).expect("text") }
    }

    /// The same with a text that is JSON, or should be.
    pub async fn post_json(&self, query: &str, text: &str) -> Answer {
        self.post(query, &[("content-type", "application/json")], text.as_bytes()).await
    }

    /// Asks, and returns the code and the object or Status.
    pub async fn ask(&self, spec: Value) -> (u16, Value) {
        let answer = self.post_json("", &object(spec).to_string()).await;
        (answer.code, answer.json())
    }

    /// Asks, and returns the status of the answer.
    pub async fn status(&self, spec: Value) -> Value {
        let (code, answer) = self.ask(spec).await;
        assert_eq!(code, 201, "{answer}");
        answer["status"].clone()
    }

    /// All entries from `offset` on, `limit` at a time, in bytes.
    pub async fn walk(&self, base: Option<&str>, target: &str, offset: u64, limit: u64) -> Vec<(u64, u64)> {
        let (mut all, mut offset) = (Vec::new(), offset);
        loop {
            let mut spec = json!({"targetVolumeSnapshotName": target, "offset": offset, "limit": limit});
            if let Some(base) = base {
                spec["baseVolumeSnapshotName"] = json!(base);
            }
            let status = self.status(spec).await;
            let page = entries(&status);
            assert!(page.len() as u64 <= limit, "{} entries instead of {limit}", page.len());
            all.extend(page);
            match status["state"].as_u64() {
                Some(0) => return all,
                Some(1) => offset = status["continue"].as_u64().expect("where to go on"),
                _ => panic!("{status}"),
            }
        }
    }
}

/// The entries of a status, in bytes.
pub fn entries(status: &Value) -> Vec<(u64, u64)> {
    let entry = |entry: &Value| {
        let size = entry["blockSizeBytes"].as_u64().expect("a size");
        (entry["offset"].as_u64().expect("an index") * size, size)
    };
    status["changedBlocks"].as_array().expect("a list").iter().map(entry).collect()
}
