//! What a test lives in: a namespace of the shared API server, programs of the earlier designs, and users of them.

use std::net::{IpAddr, SocketAddr};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::api_server::ApiServer;
use crate::crowd::Door;
use crate::running::Running;
use crate::scene;
use crate::{PATIENCE, free_port, pause};
use proto::differential::DifferentialSnapshotRequest;
use proto::differential::differential_snapshot_client::DifferentialSnapshotClient;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;

pub const AUDIENCE: &str = "cbt-earlier";
/// The host in the certificate.
const HOST: &str = "differential.test";
const MANIFEST: &str = "deploy/components/differential/differential.yaml";

/// A namespace, and a driver's name that no other test has.
pub struct World {
    pub api: Arc<ApiServer>,
    pub namespace: String,
    pub driver: String,
    pub dir: tempfile::TempDir,
    /// The CSI driver's socket.
    pub csi: PathBuf,
    /// What programs write into their logs.
    pub log: &'static str,
}

impl World {
    pub async fn new(api: Arc<ApiServer>, test: &str) -> Self {
        let (namespace, driver) = scene::names(test);
        api.namespace(&namespace).await;
        let dir = tempfile::Builder::new().prefix("deltapath-earlier-").tempdir().expect("temp dir");
        let csi = dir.path().join("csi.sock");
        let log = "debug,h2=info,hyper=info,tower=info,rustls=info";
        World { driver, namespace, api, dir, csi, log }
    }

    /// Makes a VolumeSnapshot and its content, ready, and bound to each other.
    pub async fn snapshot(&self, name: &str, handle: &str) {
        self.snapshot_with(name, handle, |_, _| {}).await;
    }

    /// The same with a change to both objects first.
    pub async fn snapshot_with(&self, name: &str, handle: &str, change: impl FnOnce(&mut Value, &mut Value)) {
        scene::snapshot(&self.api, &self.driver, &self.namespace, (name, handle), change).await;
    }

    /// Makes a VolumeSnapshot that was taken at that second.
    pub async fn snapshot_taken_at(&self, name: &str, handle: &str, second: i64) {
        let change = |_: &mut Value, content: &mut Value| {
            content["status"]["creationTime"] = json!(second * 1_000_000_000);
        };
        self.snapshot_with(name, handle, change).await;
    }

    /// Makes a VolumeSnapshot that is not ready to use.
    pub async fn snapshot_unready(&self, name: &str, handle: &str) {
        let change = |snapshot: &mut Value, content: &mut Value| {
            snapshot["status"]["readyToUse"] = json!(false);
            content["status"]["readyToUse"] = json!(false);
        };
        self.snapshot_with(name, handle, change).await;
    }

    /// Makes the VolumeSnapshots `monday`, which the driver knows as `s0`, and `tuesday`, its `s1`.
    pub async fn two_snapshots(&self) {
        self.snapshot("monday", "s0").await;
        self.snapshot("tuesday", "s1").await;
    }

    /// The same, and a DifferentialSnapshot `walk` of them.
    pub async fn ask_of_two(&self) {
        self.two_snapshots().await;
        self.ask("walk", Some("monday"), "tuesday").await;
    }

    /// Makes a VolumeSnapshot, and a DifferentialSnapshot of the same name of all that it holds.
    pub async fn ask_of_one(&self, name: &str, handle: &str) {
        self.snapshot(name, handle).await;
        self.ask(name, None, name).await;
    }

    /// Makes a DifferentialSnapshot.
    pub async fn ask(&self, name: &str, base: Option<&str>, target: &str) {
        let mut spec = json!({"targetVolumeSnapshotName": target});
        if let Some(base) = base {
            spec["baseVolumeSnapshotName"] = json!(base);
        }
        self.ask_with(name, spec).await;
    }

    pub async fn ask_with(&self, name: &str, spec: Value) {
        self.api.make(self.object(name, spec)).await;
    }

    pub fn object(&self, name: &str, spec: Value) -> Value {
        json!({
            "apiVersion": "differential.cbt.storage.k8s.io/v1alpha1", "kind": "DifferentialSnapshot",
            "metadata": {"name": name, "namespace": self.namespace}, "spec": spec,
        })
    }

    /// A DifferentialSnapshot as it is.
    pub async fn read(&self, name: &str) -> Value {
        let objects = self.api.objects("DifferentialSnapshot", Some(&self.namespace));
        serde_json::to_value(objects.get(name).await.expect("the object")).expect("JSON")
    }

    /// Waits for a status, and returns it.
    pub async fn status(&self, name: &str, what: &str, is_it: impl Fn(&Value) -> bool) -> Value {
        let begun = Instant::now();
        loop {
            let status = self.read(name).await["status"].clone();
            if is_it(&status) {
                return status;
            }
            assert!(begun.elapsed() < Duration::from_secs(60), "{name} is not {what} in a minute: {status}");
            tokio::time::sleep(pause(begun)).await;
        }
    }

    /// Waits until it can be asked about.
    pub async fn url(&self, name: &str) -> String {
        let status = self.status(name, "url-ready", |status| status["state"] == "url-ready").await;
        status["callbackURL"].as_str().expect("a URL").to_owned()
    }

    /// A user who may get everything that a page needs, and a token.
    pub async fn user(&self, name: &str) -> String {
        let get = |group: &str, resource: &str| json!({"apiGroups": [group], "resources": [resource], "verbs": ["get"]});
        let rules = [
            get("differential.cbt.storage.k8s.io", "differentialsnapshots"),
            get("snapshot.storage.k8s.io", "volumesnapshots"),
        ];
        self.api.account(&self.namespace, name, json!(rules)).await;
        self.api.token(&self.namespace, name, AUDIENCE).await
    }

    /// A kubeconfig of a program's service account, with the rights in its manifest and no others.
    pub async fn kubeconfig(&self, account: &str, manifest: &str) -> PathBuf {
        scene::account_of(&self.api, &self.driver, &self.namespace, account, manifest).await
    }

    /// Starts `cbt-earlier differential`, and waits until it is ready.
    pub async fn start(&self, more: &[&str]) -> Program {
        let program = self.start_unready(more).await;
        program.ready().await;
        program
    }

    /// Starts it with those flags: the program, the token of a user, and where that DifferentialSnapshot is asked about.
    pub async fn serves(&self, name: &str, more: &[&str]) -> (Program, String, String) {
        let program = self.start(more).await;
        let token = self.user("user").await;
        (program, token, self.url(name).await)
    }

    pub async fn start_unready(&self, more: &[&str]) -> Program {
        Program::start(self, "one", &self.kubeconfig("differential", MANIFEST).await, more)
    }
}

pub struct Program {
    pub running: Running,
    pub socket: PathBuf,
    /// What its URLs begin with.
    pub address: String,
    pub port: u16,
    host: String,
    ip: IpAddr,
    pub http: u16,
    pub ca: String,
    pub kubeconfig: PathBuf,
}

impl Program {
    /// Starts a replica.
    pub fn start(world: &World, name: &str, kubeconfig: &Path, more: &[&str]) -> Self {
        let port = free_port();
        let own = vec![
            format!("--csi-address={}", world.csi.display()),
            format!("--socket={}", world.dir.path().join(format!("{name}.sock")).display()),
            "--bind-address=127.0.0.1".into(),
            format!("--service-address={HOST}:{port}"),
            // The name that the role allows.
            "--lease=cbt-earlier-differential".into(),
        ];
        let more = own.into_iter().chain(more.iter().map(|flag| (*flag).to_owned())).collect();
        Self::spawn(world, "differential", name, HOST, port, kubeconfig, more)
    }

    /// Starts a program: those flags, and the ones that all designs have.
    pub fn spawn(
        world: &World,
        design: &str,
        name: &str,
        host: &str,
        port: u16,
        kubeconfig: &Path,
        flags: Vec<String>,
    ) -> Self {
        let ip = flags.iter().find_map(|flag| flag.strip_prefix("--bind-address=")?.parse().ok());
        let (http, ip) = (free_port(), ip.expect("--bind-address"));
        let dir = world.dir.path();
        let (ca, chain, key) = certificate(dir, name, host);
        let (log, socket) = (dir.join(format!("{name}.log")), dir.join(format!("{name}.sock")));
        let address = format!("{host}:{port}");
        let mut command = Command::new(crate::program("cbt-earlier"));
        command
            .arg(design)
            .arg(format!("--kubeconfig={}", kubeconfig.display()))
            .args([format!("--port={port}"), format!("--http-endpoint=127.0.0.1:{http}")])
            .args([format!("--tls-cert={}", chain.display()), format!("--tls-key={}", key.display())])
            .args([format!("--namespace={}", world.namespace), format!("--pod-name={name}")])
            .args(flags)
            .env("RUST_LOG", world.log)
            .stdout(Stdio::null());
        let running = Running::start(&mut command, &log);
        let (host, kubeconfig) = (host.to_owned(), kubeconfig.to_owned());
        Program { running, socket, address, port, host, ip, http, ca, kubeconfig }
    }

    /// Waits until it says that it is ready.
    pub async fn ready(&self) {
        crate::eventually("it is ready", async || self.readiness().await.0 == 200).await;
    }

    /// Waits until only the election is missing.
    pub async fn waits_for_election(&self) {
        let begun = Instant::now();
        loop {
            match self.readiness().await {
                (503, what) if what == "another replica is elected\n" => return,
                (200, _) => panic!("two replicas are ready"),
                other => assert!(begun.elapsed() < PATIENCE, "it says {other:?}\n{}", self.running.log()),
            }
            tokio::time::sleep(pause(begun)).await;
        }
    }

    /// What the readiness probe gets; 0 where no program listens.
    pub async fn readiness(&self) -> (u16, String) {
        readiness(self.http).await
    }

    /// A client as applications have it: it keeps its connections, and finds the program's host at this address.
    pub fn https(&self, at: SocketAddr) -> reqwest::Client {
        https(&self.ca, &self.host, at)
    }

    /// Where it listens.
    pub fn at(&self) -> SocketAddr {
        (self.ip, self.port).into()
    }

    /// A page of two handles.
    pub async fn page(
        &self,
        base: &str,
        target: &str,
        start: &str,
        max_entries: u64,
        parameters: &[(&str, &str)],
    ) -> Result<proto::differential::DifferentialSnapshotResponse, tonic::Status> {
        let request = DifferentialSnapshotRequest {
            snapshot_base: base.into(),
            snapshot_target: target.into(),
            start_offset: start.into(),
            max_entries,
            parameters: parameters.iter().map(|(name, value)| ((*name).into(), (*value).into())).collect(),
            ..Default::default()
        };
        let mut client = DifferentialSnapshotClient::new(crate::channel(&self.socket).await);
        client.get_differential_snapshot(request).await.map(tonic::Response::into_inner)
    }

    /// A connection over TLS with these protocols on offer.
    pub async fn connect(&self, protocols: &[&str]) -> TlsStream<TcpStream> {
        self.connect_as(protocols, None).await
    }

    /// The same, with a client certificate: the files of its chain and key.
    pub async fn connect_as(
        &self,
        protocols: &[&str],
        own: Option<(PathBuf, PathBuf)>,
    ) -> TlsStream<TcpStream> {
        let door = self.door(protocols, own);
        let stream = TcpStream::connect(door.address).await.expect("connect");
        TlsConnector::from(door.config).connect(door.name, stream).await.expect("a handshake")
    }

    pub fn door(&self, protocols: &[&str], own: Option<(PathBuf, PathBuf)>) -> Door {
        let config = scene::trusting(&self.ca);
        let mut config = match own {
            None => config.with_no_client_auth(),
            Some((chain, key)) => {
                let chain = vec![CertificateDer::from_pem_file(chain).expect("a certificate")];
                let key = PrivateKeyDer::from_pem_file(key).expect("a key");
                config.with_client_auth_cert(chain, key).expect("a pair")
            }
        };
        config.alpn_protocols = protocols.iter().map(|name| name.as_bytes().to_vec()).collect();
        let name = ServerName::try_from(self.host.clone()).expect("a name");
        Door { address: self.at(), config: Arc::new(config), name }
    }

    /// GET of a URL, or of a path: the code, the head and the JSON.
    pub async fn get(&self, url: &str, token: Option<&str>) -> (u16, String, Value) {
        let path = url.strip_prefix(&format!("https://{}", self.address)).unwrap_or(url);
        let authorization =
            token.map_or_else(String::new, |token| format!("Authorization: Bearer {token}\r\n"));
        let request =
            format!("GET {path} HTTP/1.1\r\nHost: host\r\n{authorization}Connection: close\r\n\r\n");
        self.send(&request).await
    }

    /// The answer to a request as it stands.
    pub async fn send(&self, request: &str) -> (u16, String, Value) {
        let (code, head, body) = self.exchange(self.connect(&[]).await, request).await;
        (code, head, serde_json::from_slice(&body).unwrap_or(Value::Null))
    }

    /// The answer on that connection: its code, its head in lower case and its body.
    pub async fn exchange(&self, mut stream: TlsStream<TcpStream>, request: &str) -> (u16, String, Vec<u8>) {
        stream.write_all(request.as_bytes()).await.expect("write");
        let mut answer = Vec::new();
        stream.read_to_end(&mut answer).await.expect("read");
        let end = answer.windows(4).position(|bytes| bytes == b"\r\n\r\n").expect("HTTP");
        let head = String::from_utf8(answer[..end].to_vec()).expect("text").to_ascii_lowercase();
        let code = head.split(' ').nth(1).and_then(|code| code.parse().ok()).expect("a code");
        (code, head, answer[end + 4..].to_vec())
    }
}

/// What the readiness probe at that port gets; 0 where no program listens.
pub async fn readiness(port: u16) -> (u16, String) {
    crate::http::get(port, "/readyz").await.unwrap_or_default()
}

/// A client that trusts this CA and finds the host at this address.
pub fn https(ca: &str, host: &str, at: SocketAddr) -> reqwest::Client {
    let client =
        reqwest::Client::builder().tls_backend_preconfigured(scene::trusting(ca).with_no_client_auth());
    client.resolve(host, at).build().expect("a client")
}

/// A CA, and the files of a certificate by it.
pub fn certificate(dir: &Path, name: &str, host: &str) -> (String, PathBuf, PathBuf) {
    let made = scene::certificate(&[host]);
    let (chain, key) = (dir.join(format!("{name}.crt")), dir.join(format!("{name}.key")));
    std::fs::write(dir.join(format!("{name}.ca")), &made.ca).expect("write");
    std::fs::write(&chain, made.chain).expect("write");
    std::fs::write(&key, made.key).expect("write");
    (made.ca, chain, key)
}
