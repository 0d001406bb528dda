//! A real Kubernetes API server with its etcd, in a temporary directory: objects, RBAC, tokens and reviews as in any
//! cluster, and no node. The programs are those of hack/kube-programs.sh.

use std::collections::BTreeMap;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use axum::http::Request;
use base64::Engine as _;
use k8s_openapi::api::core::v1::Namespace;
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kube::api::{DeleteParams, DynamicObject, Patch, PatchParams, PostParams};
use kube::config::{KubeConfigOptions, Kubeconfig};
use kube::core::{ApiResource, GroupVersionKind};
use kube::{Api, Client, Config};
use parking_lot::Mutex;
use serde_json::{Value, json};
use tempfile::TempDir;
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader};
use tokio::net::TcpStream;

use files::{kubeconfig, make_certificates, write_kubeconfig};

mod accounts;
mod files;

pub use accounts::API_AUDIENCE;

/// Kills a program when the test's process ends in whatever way: the test holds the pipe at its standard input.
const KEEPER: &str = r#""$@" </dev/null & pid=$!; read -r _; kill -9 $pid; wait $pid 2>/dev/null"#;

/// An API server, until it is dropped.
pub struct ApiServer {
    /// A client with all rights.
    pub client: Client,
    /// A kubeconfig file with all rights.
    pub kubeconfig: PathBuf,
    dir: TempDir,
    port: u16,
    etcd_port: u16,
    programs: PathBuf,
    etcd: Mutex<Option<Child>>,
    server: Mutex<Option<Child>>,
}

/// The directory with these programs of Kubernetes, which are built the first time.
pub fn kube_programs(programs: &[&str]) -> PathBuf {
    super::needs("the Kubernetes API server");
    let script = Path::new(super::HOME).join("hack/kube-programs.sh");
    let output =
        Command::new(script).args(programs).stderr(Stdio::inherit()).output().expect("kube-programs.sh");
    assert!(output.status.success(), "needs {programs:?}: hack/kube-programs.sh {}", programs.join(" "));
    String::from_utf8(output.stdout).expect("a path").trim().into()
}

/// The configuration of a client with a kubeconfig.
pub async fn config_of(kubeconfig: &Path) -> Config {
    let config = Kubeconfig::read_from(kubeconfig).expect("kubeconfig");
    Config::from_custom_kubeconfig(config, &KubeConfigOptions::default()).await.expect("a config")
}

/// A client with the rights of a kubeconfig file.
pub async fn client_of(kubeconfig: &Path) -> Client {
    Client::try_from(config_of(kubeconfig).await).expect("a client")
}

/// How often a user asked for each resource, with which verb, by an audit log.
fn calls_in(log: &str, user: &str) -> BTreeMap<String, usize> {
    let mut calls = BTreeMap::new();
    for line in log.lines() {
        let Ok(event) = serde_json::from_str::<Value>(line) else { continue };
        if event.pointer("/user/username").and_then(Value::as_str) == Some(user) {
            let text = |at: &str| event.pointer(at).and_then(Value::as_str).unwrap_or("-").to_owned();
            *calls.entry(format!("{} {}", text("/verb"), text("/objectRef/resource"))).or_default() += 1;
        }
    }
    calls
}

impl ApiServer {
    /// Starts one, with the CRDs of snapshots and of the SnapshotMetadataService.
    pub async fn start() -> Self {
        let programs = kube_programs(&["etcd", "kube-apiserver"]);
        let dir = super::temp_dir();
        let [port, etcd_port] = [(); 2].map(|()| super::free_port());
        make_certificates(dir.path());
        let kubeconfig = write_kubeconfig(dir.path(), port);
        let client = client_of(&kubeconfig).await;
        let [etcd, server] = [(); 2].map(|()| Mutex::default());
        let server = ApiServer { client, kubeconfig, dir, port, etcd_port, programs, etcd, server };
        server.start_etcd();
        server.start_server();
        server.ready().await;
        server.install_crds().await;
        server
    }

    fn spawn(&self, program: &str, arguments: &[String]) -> Child {
        let log = std::fs::OpenOptions::new().create(true).append(true).open(self.dir.path().join(program));
        let log = log.expect("a log");
        Command::new("sh")
            .args(["-c", KEEPER, program])
            .arg(self.programs.join(program))
            .args(arguments)
            .stdin(Stdio::piped())
            .stdout(log.try_clone().expect("dup"))
            .stderr(log)
            .spawn()
            .expect("sh")
    }

    fn start_etcd(&self) {
        let (dir, port, peer) = (self.dir.path().join("etcd.data"), self.etcd_port, super::free_port());
        *self.etcd.lock() = Some(self.spawn(
            "etcd",
            &[
                format!("--data-dir={}", dir.display()),
                format!("--listen-client-urls=http://127.0.0.1:{port}"),
                format!("--advertise-client-urls=http://127.0.0.1:{port}"),
                format!("--listen-peer-urls=http://127.0.0.1:{peer}"),
                "--unsafe-no-fsync".into(),
                "--log-level=warn".into(),
            ],
        ));
    }

    fn start_server(&self) {
        let file = |name: &str| self.dir.path().join(name).display().to_string();
        let arguments = [
            format!("--etcd-servers=http://127.0.0.1:{}", self.etcd_port),
            format!("--secure-port={}", self.port),
            "--bind-address=127.0.0.1".into(),
            "--advertise-address=127.0.0.1".into(),
            "--endpoint-reconciler-type=none".into(),
            "--service-cluster-ip-range=10.96.0.0/16".into(),
            format!("--cert-dir={}", file("run")),
            format!("--client-ca-file={}", file("ca.crt")),
            format!("--tls-cert-file={}", file("server.crt")),
            format!("--tls-private-key-file={}", file("server.key")),
            format!("--service-account-key-file={}", file("accounts.pub")),
            format!("--service-account-signing-key-file={}", file("accounts.key")),
            "--service-account-issuer=https://kubernetes.default.svc".into(),
            "--authorization-mode=RBAC".into(),
            // A driver's pod is.
            "--allow-privileged=true".into(),
            // The aggregation layer: how it shows other API servers who it is, and that it asks endpoints, for no proxy
            // leads from a Service to them here.
            format!("--requestheader-client-ca-file={}", file("proxy-ca.crt")),
            "--requestheader-allowed-names=front-proxy".into(),
            "--requestheader-username-headers=X-Remote-User".into(),
            "--requestheader-group-headers=X-Remote-Group".into(),
            "--requestheader-extra-headers-prefix=X-Remote-Extra-".into(),
            format!("--proxy-client-cert-file={}", file("front-proxy.crt")),
            format!("--proxy-client-key-file={}", file("front-proxy.key")),
            "--enable-aggregator-routing=true".into(),
            // Every review and read that the tests count.
            format!("--audit-policy-file={}", file("audit.yaml")),
            format!("--audit-log-path={}", file("audit.log")),
        ];
        std::fs::write(
            self.dir.path().join("audit.yaml"),
            "apiVersion: audit.k8s.io/v1\nkind: Policy\nomitStages: [RequestReceived]\nrules: [{level: Metadata}]\n",
        )
        .expect("write");
        *self.server.lock() = Some(self.spawn("kube-apiserver", &arguments));
    }

    /// Waits until it is ready, as its own probe says. It answers sooner, but knows no roles yet: who is not an administrator
    /// is refused then.
    pub async fn ready(&self) {
        let deadline = Instant::now() + Duration::from_secs(90);
        let is_ready = async || {
            let probe = Request::get("/readyz").body(Vec::new()).expect("a request");
            self.client.request_text(probe).await.is_ok()
        };
        while !is_ready().await {
            let log = || std::fs::read_to_string(self.dir.path().join("kube-apiserver")).unwrap_or_default();
            let gone = self.server.lock().as_mut().and_then(|server| server.try_wait().expect("wait"));
            assert!(gone.is_none() && Instant::now() < deadline, "no API server ({gone:?}):\n{}", log());
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
        let namespaces: Api<Namespace> = Api::all(self.client.clone());
        // A controller of the server makes it.
        let has_default = async || namespaces.get("default").await.is_ok();
        super::eventually("the API server has a namespace default", has_default).await;
    }

    /// Kills the server, and not its etcd.
    pub fn kill_server(&self) {
        end(&self.server);
    }

    /// Kills it and its etcd.
    pub fn kill(&self) {
        end(&self.server);
        end(&self.etcd);
    }

    /// Starts again what was killed, at the same addresses and with what it had.
    pub async fn start_again(&self) {
        if self.etcd.lock().is_none() {
            self.start_etcd();
        }
        self.start_server();
        self.ready().await;
    }

    async fn install_crds(&self) {
        let from = ".deps/manifests/crds";
        let files = super::names(&Path::new(super::HOME).join(from));
        assert!(!files.is_empty(), "no CRDs in {from}: run `make test-deps`");
        let files: Vec<_> = files.iter().map(|file| format!("{from}/{file}")).collect();
        self.install(&files).await;
    }

    /// Makes the CRDs in these files of the project, and waits until they are served.
    pub async fn install(&self, files: &[impl AsRef<Path>]) {
        let crds: Api<CustomResourceDefinition> = Api::all(self.client.clone());
        let mut names = Vec::new();
        for file in files {
            let path = Path::new(super::HOME).join(file);
            let text =
                std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
            let crd: Value =
                serde_saphyr::from_str(&text).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
            let crd: CustomResourceDefinition = serde_json::from_value(as_it_will_be(crd)).expect("a CRD");
            let made = crds.create(&PostParams::default(), &crd).await;
            made.unwrap_or_else(|error| panic!("{}: {error}", path.display()));
            names.push(crd.metadata.name.expect("a name"));
        }
        for name in names {
            let is_established = async || {
                let status = crds.get(&name).await.expect("a CRD").status.unwrap_or_default();
                let conditions = status.conditions.unwrap_or_default();
                conditions.iter().any(|c| c.type_ == "Established" && c.status == "True")
            };
            super::eventually(&format!("the CRD {name} is established"), is_established).await;
        }
    }

    /// Objects of that kind, in a namespace or in the whole cluster.
    pub fn objects(&self, kind: &str, namespace: Option<&str>) -> Api<DynamicObject> {
        let resource = resource(kind);
        match namespace {
            None => Api::all_with(self.client.clone(), &resource),
            Some(namespace) => Api::namespaced_with(self.client.clone(), namespace, &resource),
        }
    }

    /// Makes an object from its JSON, with its status where it has one.
    pub async fn make(&self, object: Value) {
        let text = |at: &str| object.pointer(at).and_then(Value::as_str).map(str::to_owned);
        let kind = text("/kind").expect("a kind");
        let name = text("/metadata/name").expect("a name");
        let api = self.objects(&kind, text("/metadata/namespace").as_deref());
        let made: DynamicObject = serde_json::from_value(object.clone()).expect("an object");
        api.create(&PostParams::default(), &made)
            .await
            .unwrap_or_else(|error| panic!("make {object}: {error}"));
        if let Some(status) = object.get("status") {
            let patch = Patch::Merge(json!({"status": status}));
            let done = api.patch_status(&name, &PatchParams::default(), &patch).await;
            done.unwrap_or_else(|error| panic!("the status of {object}: {error}"));
        }
    }

    /// Changes fields of an object, and not its status.
    pub async fn merge(&self, kind: &str, namespace: Option<&str>, name: &str, change: Value) {
        let (objects, change) = (self.objects(kind, namespace), Patch::Merge(change));
        let changed = objects.patch(name, &PatchParams::default(), &change).await;
        changed.unwrap_or_else(|error| panic!("{change:?} of {kind} {name}: {error}"));
    }

    pub async fn delete(&self, kind: &str, namespace: Option<&str>, name: &str) {
        let deleted = self.objects(kind, namespace).delete(name, &DeleteParams::default()).await;
        deleted.unwrap_or_else(|error| panic!("delete {kind} {name}: {error}"));
    }

    pub async fn namespace(&self, name: &str) {
        self.make(json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}})).await;
    }

    /// How often each resource was asked for, with which verb, since [`ApiServer`] began: from its audit log. Watches count
    /// when they end. The log is written behind the answers, so this waits for the line of a call of its own, and until no more
    /// come.
    pub async fn calls_of(&self, user: &str) -> BTreeMap<String, usize> {
        let log = self.dir.path().join("audit.log");
        let before = std::fs::metadata(&log).map_or(0, |log| log.len());
        let mark = format!("mark-{:x}", fastrand::u64(..));
        self.objects("Namespace", None).get_opt(&mark).await.expect("get");
        let log = || std::fs::read_to_string(&log).unwrap_or_default();
        crate::eventually("a call is in the audit log", async || log()[before as usize..].contains(&mark))
            .await;
        let mut calls = calls_in(&log(), user);
        loop {
            tokio::time::sleep(std::time::Duration::from_millis(300)).await;
            let before = std::mem::replace(&mut calls, calls_in(&log(), user));
            if before == calls {
                return calls;
            }
        }
    }

    /// A file of the server's: `front-proxy.crt` and `.key`, by which it shows other API servers who it is.
    pub fn file(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    pub fn pid(&self) -> u32 {
        // Its parent is the shell that keeps it.
        let keeper = self.server.lock().as_ref().expect("a server").id();
        let children = std::fs::read_to_string(format!("/proc/{keeper}/task/{keeper}/children"));
        let pid = children.expect("children").split_whitespace().next().and_then(|pid| pid.parse().ok());
        pid.expect("kube-apiserver runs")
    }

    /// The revision of etcd: how often anything was written there.
    pub async fn revision(&self) -> u64 {
        let answer =
            self.etcd("/v3/kv/range", json!({"key": "AA==", "range_end": "AA==", "count_only": true}));
        let answer = answer.await.remove(0);
        let revision = answer.pointer("/header/revision").and_then(Value::as_str);
        revision.and_then(|text| text.parse().ok()).expect("a revision")
    }

    /// All that was written to etcd since a revision: keys and values, decoded. They end with a namespace that is made now, so
    /// that the watch has seen what it should.
    pub async fn written_since(&self, revision: u64) -> Vec<(String, Vec<u8>)> {
        let marker = &format!("marker-{:x}", fastrand::u64(..));
        self.namespace(marker).await;
        let request =
            json!({"create_request": {"key": "AA==", "range_end": "AA==", "start_revision": revision + 1}});
        let is_last = |answer: &Value| events(answer).any(|(key, _)| key.contains(marker));
        let answers = self.etcd_until("/v3/watch", request, is_last).await;
        let written: Vec<_> = answers.iter().flat_map(events).collect();
        assert!(written.iter().any(|(key, value)| key.contains(marker) && !value.is_empty()), "{written:?}");
        written
    }

    async fn etcd(&self, path: &str, request: Value) -> Vec<Value> {
        self.etcd_until(path, request, |_| true).await
    }

    /// The JSON answers of etcd's gateway, a line each, until one is the last.
    async fn etcd_until(&self, path: &str, request: Value, is_last: impl Fn(&Value) -> bool) -> Vec<Value> {
        let stream = TcpStream::connect(("127.0.0.1", self.etcd_port)).await.expect("etcd");
        let mut stream = BufReader::new(stream);
        let body = request.to_string();
        let head = format!("POST {path} HTTP/1.0\r\nHost: etcd\r\nContent-Length: {}\r\n\r\n", body.len());
        stream.write_all((head + &body).as_bytes()).await.expect("write");
        let mut answers = Vec::new();
        let mut line = String::new();
        while stream.read_line(&mut line).await.expect("read") > 0 {
            if line.starts_with('{') {
                let answer: Value = serde_json::from_str(&line).expect("JSON");
                let is_end = is_last(&answer);
                answers.push(answer);
                if is_end {
                    break;
                }
            }
            line.clear();
        }
        answers
    }
}

/// Keys and values in an answer of etcd's watch.
fn events(answer: &Value) -> impl Iterator<Item = (String, Vec<u8>)> {
    let events = answer.pointer("/result/events").and_then(Value::as_array).cloned().unwrap_or_default();
    events.into_iter().filter_map(|event| {
        let decoded = |at: &str| {
            let text = event.pointer(at).and_then(Value::as_str).unwrap_or_default();
            base64::engine::general_purpose::STANDARD.decode(text).ok()
        };
        Some((String::from_utf8_lossy(&decoded("/kv/key")?).into_owned(), decoded("/kv/value")?))
    })
}

impl Drop for ApiServer {
    fn drop(&mut self) {
        self.kill();
    }
}

fn end(child: &Mutex<Option<Child>>) {
    if let Some(mut child) = child.lock().take() {
        if let Some(mut stdin) = child.stdin.take() {
            let _ = stdin.write_all(b"\n");
        }
        let _ = child.wait();
    }
}

/// The CRD of external-snapshot-metadata v1.1.0 has no `requireBaseSnapshotForDelta`, which the KEP describes; here it has.
fn as_it_will_be(mut crd: Value) -> Value {
    if crd["spec"]["names"]["kind"] == "SnapshotMetadataService" {
        for version in crd["spec"]["versions"].as_array_mut().into_iter().flatten() {
            let fields = &mut version["schema"]["openAPIV3Schema"]["properties"]["spec"]["properties"];
            fields["requireBaseSnapshotForDelta"] = json!({"type": "boolean"});
        }
    }
    crd
}

fn resource(kind: &str) -> ApiResource {
    let (group, version) = match kind {
        "Namespace" | "ConfigMap" | "ServiceAccount" | "Secret" | "Pod" | "Service" => ("", "v1"),
        "PersistentVolume" | "PersistentVolumeClaim" => ("", "v1"),
        "Lease" => ("coordination.k8s.io", "v1"),
        "Role" | "RoleBinding" | "ClusterRole" | "ClusterRoleBinding" => ("rbac.authorization.k8s.io", "v1"),
        "VolumeSnapshot" | "VolumeSnapshotContent" | "VolumeSnapshotClass" => {
            ("snapshot.storage.k8s.io", "v1")
        }
        "DifferentialSnapshot" => ("differential.cbt.storage.k8s.io", "v1alpha1"),
        "DriverDiscovery" => ("discovery.cbt.storage.k8s.io", "v1alpha1"),
        "VolumeSnapshotDelta" => ("cbt.storage.k8s.io", "v1alpha1"),
        "SnapshotMetadataService" => ("cbt.storage.k8s.io", "v1beta1"),
        "APIService" => ("apiregistration.k8s.io", "v1"),
        "EndpointSlice" => ("discovery.k8s.io", "v1"),
        "PriorityLevelConfiguration" | "FlowSchema" => ("flowcontrol.apiserver.k8s.io", "v1"),
        _ => panic!("the kind {kind} is not in the test kit's list"),
    };
    ApiResource::from_gvk(&GroupVersionKind::gvk(group, version, kind))
}
