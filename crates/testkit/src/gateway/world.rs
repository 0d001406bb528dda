//! What a test lives in: a namespace of the shared API server, a gateway, and clients of it.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::api_server::ApiServer;
pub use crate::eventually;
use crate::gateway::driver::Driver;
pub use crate::http::get;
use crate::running::Running;
use crate::scene;
pub use crate::scene::manifests;
use crate::{free_port, pause};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use proto::kubernetes::snapshot_metadata_client::SnapshotMetadataClient;
use proto::kubernetes::{BlockMetadata, GetMetadataAllocatedRequest, GetMetadataDeltaRequest};
use serde_json::{Value, json};
use tonic::transport::{Certificate, Channel, ClientTlsConfig};
use tonic::{Code, Response, Status, Streaming};

pub const AUDIENCE: &str = "test-audience";
/// A name in the certificates of [`Files`].
pub const HOST: &str = "snapshot-metadata.test";
/// RUST_LOG of a gateway.
const LEVELS: &str = "debug,h2=info,hyper=info,tower=info,rustls=info";

/// A namespace, and a driver's name that no other test has.
pub struct World {
    pub api: Arc<ApiServer>,
    pub namespace: String,
    pub driver: String,
    pub dir: tempfile::TempDir,
}

/// What a client gets: a code and a message, or how many messages and tuples.
pub type Answer = Result<(usize, Vec<(i64, i64)>), (Code, String)>;

impl World {
    pub async fn new(api: Arc<ApiServer>, test: &str) -> Self {
        let (namespace, driver) = scene::names(test);
        api.namespace(&namespace).await;
        let dir = tempfile::Builder::new().prefix("deltapath-gateway-").tempdir().expect("temp dir");
        World { driver, namespace, api, dir }
    }

    pub fn socket(&self) -> PathBuf {
        self.dir.path().join("csi.sock")
    }

    /// Another namespace of this test.
    pub async fn other_namespace(&self) -> String {
        let name = format!("{}-other", self.namespace);
        self.api.namespace(&name).await;
        name
    }

    /// Makes a VolumeSnapshot and its content, ready, and bound to each other.
    pub async fn snapshot(&self, namespace: &str, name: &str, handle: &str) {
        self.snapshot_with(namespace, name, handle, |_, _| {}).await;
    }

    /// The same with a change to both objects first.
    pub async fn snapshot_with(
        &self,
        namespace: &str,
        name: &str,
        handle: &str,
        change: impl FnOnce(&mut Value, &mut Value),
    ) {
        scene::snapshot(&self.api, &self.driver, namespace, (name, handle), change).await;
    }

    /// The same with a merge patch of the two first: `{"snapshot": …, "content": …}`.
    pub async fn snapshot_but(&self, namespace: &str, name: &str, handle: &str, changes: Value) {
        self.snapshot_with(namespace, name, handle, |snapshot, content| {
            for (object, named) in [(snapshot, "snapshot"), (content, "content")] {
                if let Some(change) = changes.get(named) {
                    merge(object, change);
                }
            }
        })
        .await;
    }

    /// Deletes a VolumeSnapshot and its content, as if the controller had.
    pub async fn delete_snapshot(&self, namespace: &str, name: &str) {
        self.api.delete("VolumeSnapshot", Some(namespace), name).await;
        self.api.delete("VolumeSnapshotContent", None, &format!("content-{namespace}-{name}")).await;
    }

    /// A driver, a snapshot of that handle, the namespace of it, and a token that may read it.
    pub async fn with_snapshot(&self, name: &str, handle: &str) -> (Driver, String, String) {
        self.with_snapshots(&[(name, handle)]).await
    }

    /// The same with several.
    pub async fn with_snapshots(&self, snapshots: &[(&str, &str)]) -> (Driver, String, String) {
        let driver = Driver::start(&self.driver, &self.socket());
        for (name, handle) in snapshots {
            self.snapshot(&self.namespace, name, handle).await;
        }
        (driver, self.namespace.clone(), self.reader("reader").await)
    }

    /// A service account that may get all VolumeSnapshots of its namespace, and a token of it for the gateway.
    pub async fn reader(&self, name: &str) -> String {
        let rules = json!([{"apiGroups": ["snapshot.storage.k8s.io"], "resources": ["volumesnapshots"], "verbs": ["get"]}]);
        self.api.account(&self.namespace, name, rules).await;
        self.api.token(&self.namespace, name, AUDIENCE).await
    }

    /// The driver's class, as the default one.
    pub async fn default_class(&self) {
        let class = json!({
            "apiVersion": "snapshot.storage.k8s.io/v1", "kind": "VolumeSnapshotClass",
            "metadata": {
                "name": format!("{}-default", self.namespace),
                "annotations": {"snapshot.storage.kubernetes.io/is-default-class": "true"},
            },
            "driver": self.driver, "deletionPolicy": "Delete",
        });
        self.api.make(class).await;
    }

    /// A class of the driver, with a secret for it. Its name begins with the namespace.
    pub async fn class(&self, name: &str, secret: &str, secret_namespace: &str) {
        let class = json!({
            "apiVersion": "snapshot.storage.k8s.io/v1", "kind": "VolumeSnapshotClass",
            "metadata": {"name": format!("{}-{name}", self.namespace)},
            "driver": self.driver, "deletionPolicy": "Delete",
            "parameters": {
                "csi.storage.k8s.io/snapshotter-secret-name": secret,
                "csi.storage.k8s.io/snapshotter-secret-namespace": secret_namespace,
            },
        });
        self.api.make(class).await;
    }

    /// The driver's SnapshotMetadataService, as a person would write it. `ca` is base64.
    pub async fn service(&self, address: &str, audience: &str, ca: &str) {
        let service = json!({
            "apiVersion": "cbt.storage.k8s.io/v1beta1", "kind": "SnapshotMetadataService",
            "metadata": {"name": self.driver},
            "spec": {"address": address, "audience": audience, "caCert": ca},
        });
        self.api.make(service).await;
    }

    /// Changes what that object says.
    pub async fn change_service(&self, spec: Value) {
        self.api.merge("SnapshotMetadataService", None, &self.driver, json!({"spec": spec})).await;
    }

    /// A kubeconfig of a gateway's service account, with the rights in deploy/base/gateway.yaml and no others.
    pub async fn gateway_kubeconfig(&self, account: &str) -> PathBuf {
        let (driver, namespace) = (&self.driver, &self.namespace);
        scene::account_of(&self.api, driver, namespace, account, "deploy/base/gateway.yaml").await
    }

    /// Starts a gateway with files as certificate.
    pub async fn gateway(&self, more: &[&str]) -> Gateway {
        let gateway = self.gateway_unready(more).await;
        gateway.ready().await;
        gateway
    }

    /// The same, which the driver's SnapshotMetadataService leads to.
    pub async fn published_gateway(&self) -> Gateway {
        let gateway = self.gateway(&[]).await;
        gateway.publish(self).await;
        gateway
    }

    /// The same, and a client of it.
    pub async fn served(&self, more: &[&str]) -> (Gateway, Client) {
        let gateway = self.gateway(more).await;
        let client = gateway.client().await;
        (gateway, client)
    }

    /// Starts one without waiting for it.
    pub async fn gateway_unready(&self, more: &[&str]) -> Gateway {
        self.gateway_with(more, None, LEVELS).await
    }

    /// The same with an audit that is written elsewhere, and another RUST_LOG.
    pub async fn gateway_with(&self, more: &[&str], audit_to: Option<Stdio>, levels: &str) -> Gateway {
        let config = self.gateway_kubeconfig("gateway").await;
        self.gateway_as(&config, "gateway", more, audit_to, levels)
    }

    /// The same by a kubeconfig that is there, and under another name.
    pub fn gateway_by(&self, config: &Path, name: &str, more: &[&str]) -> Gateway {
        self.gateway_as(config, name, more, None, LEVELS)
    }

    fn gateway_as(
        &self,
        config: &Path,
        name: &str,
        more: &[&str],
        audit_to: Option<Stdio>,
        levels: &str,
    ) -> Gateway {
        let arguments = [&["--audience", AUDIENCE][..], more].concat();
        let files = Some(Files::make(self.dir.path()));
        Gateway::start_with(self, config, name, &arguments, files, audit_to, levels)
    }
}

/// A merge patch, as the API server makes it.
fn merge(object: &mut Value, change: &Value) {
    let Value::Object(fields) = change else { return *object = change.clone() };
    for (name, change) in fields {
        match change {
            Value::Null => drop(object.as_object_mut().expect("an object").remove(name)),
            change => merge(&mut object[name], change),
        }
    }
}

/// A CA, and a certificate in files.
#[derive(Clone)]
pub struct Files {
    pub ca: String,
    pub chain: PathBuf,
    pub key: PathBuf,
}

impl Files {
    /// Makes them, over those of before.
    pub fn make(dir: &Path) -> Self {
        let made = scene::certificate(&[HOST, "127.0.0.1"]);
        let files = Files { ca: made.ca, chain: dir.join("tls.crt"), key: dir.join("tls.key") };
        std::fs::write(&files.chain, made.chain).expect("write");
        std::fs::write(&files.key, made.key).expect("write");
        files
    }

    fn flags(&self) -> [String; 2] {
        [format!("--tls-cert={}", self.chain.display()), format!("--tls-key={}", self.key.display())]
    }
}

pub struct Gateway {
    pub running: Running,
    pub port: u16,
    pub http: u16,
    pub files: Option<Files>,
    audit: PathBuf,
}

impl Gateway {
    pub fn start(world: &World, kubeconfig: &Path, name: &str, more: &[&str], files: Option<Files>) -> Self {
        Self::start_with(world, kubeconfig, name, more, files, None, LEVELS)
    }

    fn start_with(
        world: &World,
        kubeconfig: &Path,
        name: &str,
        more: &[&str],
        files: Option<Files>,
        audit_to: Option<Stdio>,
        levels: &str,
    ) -> Self {
        let (port, http) = (free_port(), free_port());
        let (log, audit) =
            (world.dir.path().join(format!("{name}.log")), world.dir.path().join(format!("{name}.audit")));
        let file = |path| std::fs::OpenOptions::new().create(true).append(true).open(path).expect("a file");
        let mut command = Command::new(crate::program("deltapath-gateway"));
        command
            .arg(format!("--csi-address={}", world.socket().display()))
            .arg(format!("--kubeconfig={}", kubeconfig.display()))
            .args([format!("--port={port}"), "--bind-address=127.0.0.1".into()])
            .arg(format!("--http-endpoint=127.0.0.1:{http}"))
            .args(files.iter().flat_map(Files::flags))
            .args(more)
            .env("RUST_LOG", levels)
            .env_remove("TLS_CERT_PATH")
            .stdout(audit_to.unwrap_or_else(|| file(&audit).into()));
        Gateway { running: Running::start(&mut command, &log), port, http, files, audit }
    }

    /// Waits until it says that it is ready.
    pub async fn ready(&self) {
        self.until("/readyz", "ready", |(status, _)| *status == 200).await;
    }

    /// Waits for an answer over HTTP.
    pub async fn until(&self, path: &str, what: &str, is_it: impl Fn(&(u16, String)) -> bool) {
        let begun = Instant::now();
        loop {
            let answer = self.get(path).await;
            if answer.as_ref().is_some_and(&is_it) {
                return;
            }
            assert!(
                begun.elapsed() < Duration::from_secs(180),
                "not {what} in three minutes: {answer:?}\n{}",
                self.running.log()
            );
            tokio::time::sleep(pause(begun)).await;
        }
    }

    pub async fn get(&self, path: &str) -> Option<(u16, String)> {
        get(self.http, path).await
    }

    /// The value of a metric; 0 where it was never counted.
    pub async fn metric(&self, name: &str) -> f64 {
        let (_, text) = self.get("/metrics").await.expect("metrics");
        let line = text.lines().find(|line| line.starts_with(name) && !line.starts_with('#'));
        line.and_then(|line| line.rsplit(' ').next()?.parse().ok()).unwrap_or(0.0)
    }

    /// Resident memory, in bytes.
    pub fn memory(&self) -> u64 {
        self.status("VmRSS:")
    }

    /// The most resident memory that it has had, in bytes.
    pub fn peak(&self) -> u64 {
        self.status("VmHWM:")
    }

    fn status(&self, of: &str) -> u64 {
        crate::process_status(self.running.pid(), of) * 1024
    }

    /// The audit lines so far.
    pub fn audit(&self) -> Vec<BTreeMap<String, Value>> {
        let text = std::fs::read_to_string(&self.audit).unwrap_or_default();
        text.lines().map(|line| serde_json::from_str(line).expect("a JSON object")).collect()
    }

    /// The authority of its certificate in files, in PEM.
    pub fn ca(&self) -> &str {
        &self.files.as_ref().expect("files").ca
    }

    /// What the driver's SnapshotMetadataService says of it.
    pub fn spec(&self) -> Value {
        let ca = STANDARD.encode(self.ca());
        json!({"address": format!("127.0.0.1:{}", self.port), "audience": AUDIENCE, "caCert": ca})
    }

    /// Makes that object.
    pub async fn publish(&self, world: &World) {
        let ca = STANDARD.encode(self.ca());
        world.service(&format!("127.0.0.1:{}", self.port), AUDIENCE, &ca).await;
    }

    /// A client that trusts the files' CA.
    pub async fn client(&self) -> Client {
        Client::connect(self.port, HOST, self.ca()).await.expect("connect")
    }
}

pub struct Sidecar {
    pub running: Running,
    pub port: u16,
    pub http: u16,
}

impl Sidecar {
    /// In front of a driver's socket. It finds no secret without a default class, and its audience in the object.
    pub async fn start(program: &Path, world: &World, socket: &Path, files: &Files) -> Self {
        Self::start_with(program, world, socket, files, &[]).await
    }

    /// The same with more flags.
    pub async fn start_with(
        program: &Path,
        world: &World,
        socket: &Path,
        files: &Files,
        more: &[&str],
    ) -> Self {
        let (port, http) = (free_port(), free_port());
        let log = world.dir.path().join("sidecar.log");
        let mut command = Command::new(program);
        command
            .arg(format!("--csi-address={}", socket.display()))
            .arg(format!("--kubeconfig={}", world.api.kubeconfig.display()))
            .args(files.flags())
            .args([format!("--port={port}"), format!("--http-endpoint=127.0.0.1:{http}")])
            .args(more);
        let sidecar = Sidecar { running: Running::start(&mut command, &log), port, http };
        let listens = async || std::net::TcpStream::connect(("127.0.0.1", http)).is_ok();
        eventually("the sidecar listens", listens).await;
        sidecar
    }
}

/// A request about what is allocated in a snapshot.
pub fn about(token: &str, namespace: &str, name: &str) -> GetMetadataAllocatedRequest {
    GetMetadataAllocatedRequest {
        security_token: token.to_owned(),
        namespace: namespace.to_owned(),
        snapshot_name: name.to_owned(),
        ..Default::default()
    }
}

/// A client of the API.
#[derive(Clone)]
pub struct Client(pub SnapshotMetadataClient<Channel>);

impl Client {
    pub async fn connect(port: u16, host: &str, ca: &str) -> Result<Self, tonic::transport::Error> {
        Ok(Client(SnapshotMetadataClient::new(Self::channel(port, host, ca).await?)))
    }

    /// A connection, for other services on it too.
    pub async fn channel(port: u16, host: &str, ca: &str) -> Result<Channel, tonic::transport::Error> {
        let tls = ClientTlsConfig::new().ca_certificate(Certificate::from_pem(ca)).domain_name(host);
        let endpoint =
            Channel::from_shared(format!("https://127.0.0.1:{port}")).expect("an address").tls_config(tls)?;
        endpoint.connect().await
    }

    /// All that is allocated.
    pub async fn allocated(&mut self, token: &str, namespace: &str, snapshot: &str) -> Answer {
        let answer = self.0.get_metadata_allocated(about(token, namespace, snapshot)).await;
        collect(answer, |message| message.block_metadata).await
    }

    /// All that changed.
    pub async fn delta(&mut self, token: &str, namespace: &str, base: &str, target: &str) -> Answer {
        let request = GetMetadataDeltaRequest {
            security_token: token.to_owned(),
            namespace: namespace.to_owned(),
            base_snapshot_id: base.to_owned(),
            target_snapshot_name: target.to_owned(),
            ..Default::default()
        };
        let answer = self.0.get_metadata_delta(request).await;
        collect(answer, |message| message.block_metadata).await
    }
}

async fn collect<M>(
    answer: Result<Response<Streaming<M>>, Status>,
    tuples_of: impl Fn(M) -> Vec<BlockMetadata>,
) -> Answer {
    let mut stream = answer.map_err(said)?.into_inner();
    let (mut messages, mut tuples) = (0, Vec::new());
    while let Some(message) = stream.message().await.map_err(said)? {
        messages += 1;
        tuples.extend(tuples_of(message).iter().map(|tuple| (tuple.byte_offset, tuple.size_bytes)));
    }
    Ok((messages, tuples))
}

pub fn said(status: Status) -> (Code, String) {
    (status.code(), status.message().to_owned())
}

pub fn code(answer: &Answer) -> Code {
    answer.as_ref().map_or_else(|(code, _)| *code, |_| Code::Ok)
}
