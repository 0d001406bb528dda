//! A cluster under test: real drivers, each with its own data directory and certificate, and routers in front of them.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use csi_client::{Client, block_capability};
use nix::sys::signal::Signal;
use proto::{CreateVolumeRequest, Topology, TopologyRequirement};
use rcgen::{
    BasicConstraints, CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair,
    KeyUsagePurpose, SanType,
};
use tempfile::TempDir;

use crate::network::Host;
use crate::running::Running;
use crate::{PoolKind, Rig, STARTED_BY, free_port};

/// The name of the cluster in certificates.
pub const CLUSTER: &str = "cluster.test";
pub use crate::{PATIENCE, eventually};

/// The key of the data directory that an object is in.
pub fn key_of(id: &str) -> Option<String> {
    base::DataDirKey::of(id).map(String::from)
}

/// A CA, and what it signs.
pub struct Authority {
    pub pem: String,
    issuer: Issuer<'static, KeyPair>,
}

impl Authority {
    pub fn new(name: &str) -> Self {
        let mut params = CertificateParams::new(Vec::new()).expect("params");
        params.distinguished_name.push(DnType::CommonName, name);
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::DigitalSignature];
        let key = KeyPair::generate().expect("a key");
        let pem = params.self_signed(&key).expect("a CA").pem();
        Authority { pem, issuer: Issuer::new(params, key) }
    }

    /// A certificate with a new key: its chain and the key, in PEM.
    pub fn sign(&self, params: &CertificateParams) -> (String, String) {
        let key = KeyPair::generate().expect("a key");
        (params.signed_by(&key, &self.issuer).expect("a certificate").pem(), key.serialize_pem())
    }

    /// Writes a certificate for this URI, its key, and this CA, as `NAME.crt`, `NAME.key` and `NAME.ca`.
    pub fn issue(&self, dir: &Path, name: &str, uri: &str) {
        let mut params = CertificateParams::new(Vec::new()).expect("params");
        params.subject_alt_names.push(SanType::URI(uri.try_into().expect("a URI")));
        params.extended_key_usages =
            vec![ExtendedKeyUsagePurpose::ServerAuth, ExtendedKeyUsagePurpose::ClientAuth];
        let (chain, key) = self.sign(&params);
        for (end, content) in [("key", key), ("ca", self.pem.clone()), ("crt", chain)] {
            std::fs::write(dir.join(format!("{name}.{end}")), content).expect("write");
        }
    }
}

pub fn uri(role: &str) -> String {
    format!("spiffe://{CLUSTER}/deltapath/{role}")
}

/// The request for a volume that is to be in one of these places.
pub fn within(topologies: &[Topology], request: CreateVolumeRequest) -> CreateVolumeRequest {
    let requisite = topologies.to_vec();
    let accessibility_requirements = Some(TopologyRequirement { requisite, preferred: Vec::new() });
    CreateVolumeRequest { accessibility_requirements, ..request }
}

/// Flags that name the files of [`Authority::issue`].
pub fn tls_flags(prefix: &str, dir: &Path, name: &str) -> Vec<String> {
    [("cert", "crt"), ("key", "key"), ("ca", "ca")]
        .map(|(flag, end)| format!("--{prefix}tls-{flag}={}", dir.join(format!("{name}.{end}")).display()))
        .into()
}

pub struct Node {
    pub rig: Rig,
    pub key: String,
    pub port: u16,
    /// Where it answers routers.
    pub address: String,
    // After the driver.
    pub host: Option<Host>,
    /// Its driver's.
    pub flags: Vec<String>,
}

impl Node {
    pub fn name(&self) -> String {
        format!("node-{}", self.port)
    }

    pub fn topology(&self) -> Topology {
        let segments = [("topology.deltapath.csi.dev/node".to_owned(), self.name())].into();
        Topology { segments }
    }

    pub fn signal(&self, signal: Signal) {
        crate::signal(self.rig.pid(), signal);
    }

    /// Starts its driver again with more flags; those that it had count where these do not say otherwise.
    pub async fn start_again_with(&mut self, more: &[&str]) {
        let flags: Vec<&str> = self.flags.iter().map(String::as_str).chain(more.iter().copied()).collect();
        self.rig.start_again_with(&flags).await;
    }
}

pub struct Router {
    pub client: Client,
    pub socket: PathBuf,
    pub http: u16,
    pub running: Running,
}

impl Router {
    pub async fn start(dir: &Path, name: &str, endpoints: &[String], more: &[&str]) -> Self {
        let socket = dir.join(format!("{name}.sock"));
        let log = dir.join(format!("{name}.log"));
        let http = free_port();
        let nodes = (!endpoints.is_empty()).then(|| format!("--node-endpoints={}", endpoints.join(",")));
        let mut command = Command::new(crate::program("deltapath-router"));
        command
            .arg(format!("--endpoint=unix://{}", socket.display()))
            .args(nodes)
            .arg(format!("--http-endpoint=127.0.0.1:{http}"))
            .args(tls_flags("", dir, "router"))
            .args(more)
            .env_remove("CSI_ENDPOINT")
            .env("RUST_LOG", "info")
            .stdout(Stdio::null());
        let running = Running::start(&mut command, &log);
        let client = Client::connect(&socket, PATIENCE).await.expect("the router answers");
        Router { client, socket, http, running }
    }

    /// What the router answers over HTTP.
    pub async fn get(&self, path: &str) -> String {
        get(self.http, path).await
    }

    /// Waits until this number of nodes answer.
    pub async fn sees(&self, nodes: usize) {
        let line = format!("deltapath_router_nodes{{state=\"up\"}} {nodes}\n");
        eventually(&format!("{nodes} nodes up"), async || self.get("/metrics").await.contains(&line)).await;
    }

    /// SIGTERM: it has to end well.
    pub fn finish(mut self) {
        let status = self.running.stop();
        assert!(status.success(), "the router ended with {status}\n{}", self.running.log());
        crate::running::is_plain(&self.running.log());
        assert!(!self.socket.exists(), "the socket stays");
    }
}

/// What a program answers over HTTP at this port.
pub async fn get(port: u16, path: &str) -> String {
    crate::http::get(port, path).await.expect("an answer").1
}

pub struct Cluster {
    // Dropped in this order: routers go before their nodes.
    pub router: Option<Router>,
    pub nodes: Vec<Node>,
    pub authority: Authority,
    pub dir: TempDir,
}

impl Cluster {
    /// Drivers behind one router.
    pub async fn start(pool: PoolKind, nodes: usize, driver: &[&str]) -> Self {
        Self::start_with(pool, nodes, driver, &[]).await
    }

    pub async fn start_with(pool: PoolKind, nodes: usize, driver: &[&str], router: &[&str]) -> Self {
        Self::start_each(pool, &vec![driver; nodes], router).await
    }

    /// Drivers with flags of their own.
    pub async fn start_each(pool: PoolKind, drivers: &[&[&str]], router: &[&str]) -> Self {
        let drivers: Vec<_> = drivers.iter().map(|flags| (pool, *flags)).collect();
        Self::start_mixed(&drivers, router).await
    }

    /// Drivers with flags and pools of their own.
    pub async fn start_mixed(drivers: &[(PoolKind, &[&str])], router: &[&str]) -> Self {
        let mut cluster = Self::empty();
        for (pool, driver) in drivers {
            cluster.add_node(*pool, driver).await;
        }
        cluster.route(&cluster.endpoints(), router, drivers.len()).await;
        cluster
    }

    /// A cluster that has no drivers yet.
    pub fn empty() -> Self {
        let dir = tempfile::Builder::new().prefix("deltapath-router-").tempdir().expect("temp dir");
        let authority = Authority::new("the cluster's CA");
        authority.issue(dir.path(), "router", &uri("router"));
        Cluster { router: None, nodes: Vec::new(), authority, dir }
    }

    /// Drivers, each on a host of its own, behind one router. The caller is in a network of its own.
    pub async fn start_on_hosts(pool: PoolKind, nodes: u8, driver: &[&str], router: &[&str]) -> Self {
        let mut cluster = Self::empty();
        for number in 0..nodes {
            cluster.add_node_on(pool, driver, "", Some(Host::new(number))).await;
        }
        cluster.route(&cluster.endpoints(), router, nodes.into()).await;
        cluster
    }

    /// Has a router in front of these nodes, in the place of one that there may be, and waits until it sees so many.
    pub async fn route(&mut self, endpoints: &[String], flags: &[&str], sees: usize) {
        if let Some(before) = self.router.take() {
            before.finish();
        }
        self.router = Some(self.another("router", endpoints, flags, sees).await);
    }

    /// One more router, which sees so many nodes.
    pub async fn another(&self, name: &str, endpoints: &[String], flags: &[&str], sees: usize) -> Router {
        let router = Router::start(self.dir.path(), name, endpoints, flags).await;
        router.sees(sees).await;
        router
    }

    pub async fn add_node(&mut self, pool: PoolKind, driver: &[&str]) {
        self.add_node_on(pool, driver, "127.0.0.1", None).await;
    }

    /// Starts a driver at a local address or on a host. Its certificate is made when its key is known, as it is in life.
    pub async fn add_node_on(&mut self, pool: PoolKind, driver: &[&str], address: &str, host: Option<Host>) {
        let port = free_port();
        // Ports are free on all hosts at once, and names are different.
        let address = host.as_ref().map_or(address, |host| &host.address).to_owned();
        let name = format!("node-{port}");
        let mut arguments = vec![format!("--router-listen={address}:{port}"), format!("--node-id={name}")];
        arguments.extend(tls_flags("router-", self.dir.path(), &name));
        arguments.extend(driver.iter().map(|argument| (*argument).to_owned()));
        let flags = arguments.clone();
        let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
        let by = host.as_ref().map(|host| (STARTED_BY, host.enter().join(" ").into()));
        let rig = Rig::start_as(crate::temp_dir(), pool, &arguments, by.into_iter().collect(), "info").await;
        let key = rig.key();
        self.authority.issue(self.dir.path(), &name, &uri(&format!("node/{key}")));
        self.nodes.push(Node { rig, key, port, address: format!("{address}:{port}"), host, flags });
    }

    pub fn endpoints(&self) -> Vec<String> {
        self.nodes.iter().map(|node| node.address.clone()).collect()
    }

    pub fn router(&self) -> &Router {
        self.router.as_ref().expect("it runs")
    }

    pub fn client(&self) -> Client {
        self.router().client.clone()
    }

    /// Which node an id is of.
    pub fn node_of(&self, id: &str) -> usize {
        let key = key_of(id);
        self.nodes.iter().position(|node| Some(&node.key) == key.as_ref()).expect("an id of a node")
    }

    /// A volume on this node, made through the router.
    pub async fn volume_on(&self, node: usize, name: &str) -> String {
        let mut request = csi_client::new_volume(name, 16 << 20, block_capability());
        request.accessibility_requirements = Some(TopologyRequirement {
            requisite: vec![self.nodes[node].topology()],
            preferred: vec![self.nodes[node].topology()],
        });
        let volume = self.client().create_volume(request).await.expect("CreateVolume");
        assert_eq!(volume.accessible_topology, [self.nodes[node].topology()]);
        assert_eq!(self.node_of(&volume.volume_id), node, "made elsewhere");
        volume.volume_id
    }

    /// Everything ends well and nothing is left.
    pub fn finish(mut self) {
        self.router.take().expect("it runs").finish();
        for node in self.nodes.drain(..) {
            node.rig.finish();
        }
    }
}

/// Makes a call again while it is put off, as sidecars do.
#[macro_export]
macro_rules! patiently {
    ($call:expr) => {{
        let deadline = std::time::Instant::now() + $crate::cluster::PATIENCE;
        loop {
            match $call.await {
                Err(error)
                    if matches!(error.code(), tonic::Code::Unavailable | tonic::Code::Aborted)
                        && std::time::Instant::now() < deadline =>
                {
                    tokio::time::sleep(std::time::Duration::from_millis(50)).await;
                }
                answer => break answer,
            }
        }
    }};
}
pub use crate::patiently;
