//! The programs of all designs, with wires between them.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use serde_json::{Value, json};
use testkit::bench::Process;
use testkit::earlier::aggregation::{Aggregation, create, snapshots};
use testkit::earlier::world::{AUDIENCE, Program, World, certificate, readiness};
use testkit::free_port;

use crate::wire::{self, Count, Wire};

pub const GATEWAY: &str = "gateway.test";

/// All programs, started and ready.
pub struct Stage<'w> {
    pub world: &'w World,
    pub differential: Program,
    pub http: Program,
    _server: Program,
    _aggregation: Aggregation<'w>,
    _gateway: Process,
    pub gateway_ca: String,
    /// Where users find each of them.
    pub to_kube: Wire,
    pub to_listener: Wire,
    pub to_gateway: Wire,
    pub to_http: Wire,
    pub driver_socket: PathBuf,
    pub call_socket: PathBuf,
    pub user: Count,
    pub parts: Count,
    /// The user's tokens: for the API server, and for listener and gateway; and the one of the aggregated API server for cbt-http.
    pub kube_token: String,
    pub token: String,
    pub http_token: String,
}

impl<'w> Stage<'w> {
    pub async fn new(world: &'w World) -> Self {
        let (api, ns, dir) = (&world.api, &world.namespace, world.dir.path());
        let (user, parts) = (Count::default(), Count::default());
        let local = "127.0.0.1".parse().expect("an address");
        let kube = kube_address(&api.kubeconfig);
        let wire = async |count: &Count| Wire::new(local, count).await;
        let (to_kube, to_listener) = (wire(&user).await, wire(&user).await);
        let (to_gateway, to_http) = (wire(&user).await, wire(&user).await);
        let (parts_to_kube, parts_to_http) = (wire(&parts).await, wire(&parts).await);
        to_kube.lead_to(kube);
        parts_to_kube.lead_to(kube);

        let config =
            world.kubeconfig("differential", "deploy/components/differential/differential.yaml").await;
        lead(&config, &parts_to_kube);
        let address = format!("--service-address=differential.test:{}", to_listener.at.port());
        let differential = Program::start(world, "one", &config, &[&address]);
        differential.ready().await;
        to_listener.lead_to(differential.at());

        let aggregation = Aggregation::begin(world).await;
        for account in ["aggregated", "cbt-http"] {
            lead(&api.file(&format!("{ns}.{account}.kubeconfig")), &parts_to_kube);
        }
        let url = format!("--url=https://localhost:{}/v1alpha1/deltas", parts_to_http.at.port());
        let http = aggregation.sidecar("http", &[&url]).await;
        parts_to_http.lead_to(http.at());
        to_http.lead_to(http.at());
        // Its bound for each user is not what is measured.
        let rate = ["--client-qps=1000000", "--client-burst=1000000"];
        let mut server = aggregation.server("server", &rate).await;
        let kube_to_server = Wire::new(aggregation.ip, &parts).await;
        kube_to_server.lead_to(server.at());
        server.port = kube_to_server.at.port();
        aggregation.route(&[&server]).await;

        let config = world.kubeconfig("gateway", "deploy/base/gateway.yaml").await;
        lead(&config, &parts_to_kube);
        let (gateway_ca, chain, key) = certificate(dir, "gateway", GATEWAY);
        let (port, probes) = (free_port(), free_port());
        let gateway = Process::start(
            Command::new(testkit::program("deltapath-gateway"))
                .arg(format!("--csi-address={}", world.csi.display()))
                .arg(format!("--kubeconfig={}", config.display()))
                .args([format!("--port={port}"), "--bind-address=127.0.0.1".into()])
                .arg(format!("--http-endpoint=127.0.0.1:{probes}"))
                .arg(format!("--audience={AUDIENCE}"))
                .arg(format!("--tls-cert={}", chain.display()))
                .arg(format!("--tls-key={}", key.display()))
                .stdout(Stdio::null())
                .stderr(std::fs::File::create(dir.join("gateway.log")).expect("a log")),
        );
        while readiness(probes).await.0 != 200 {
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        to_gateway.lead_to(([127, 0, 0, 1], port).into());
        let class = json!({
            "apiVersion": "snapshot.storage.k8s.io/v1", "kind": "VolumeSnapshotClass",
            "metadata": {
                "name": "default", "annotations": {"snapshot.storage.kubernetes.io/is-default-class": "true"},
            },
            "driver": world.driver, "deletionPolicy": "Delete",
        });
        api.make(class).await;

        let objects = json!({
            "apiGroups": ["differential.cbt.storage.k8s.io"], "resources": ["differentialsnapshots"],
            "verbs": ["get", "create", "delete", "watch"],
        });
        api.account(ns, "user", json!([objects, create(), snapshots(&[])])).await;
        Stage {
            world,
            call_socket: wire::socket(dir, "call", &differential.socket, &user),
            driver_socket: wire::socket(dir, "driver", &world.csi, &user),
            kube_token: api.token(ns, "user", "https://kubernetes.default.svc").await,
            token: api.token(ns, "user", AUDIENCE).await,
            http_token: api.token(ns, "aggregated", "cbt-http").await,
            differential,
            http,
            _server: server,
            _aggregation: aggregation,
            _gateway: gateway,
            gateway_ca,
            to_kube,
            to_listener,
            to_gateway,
            to_http,
            user,
            parts,
        }
    }

    pub fn counts(&self) -> [Count; 2] {
        [self.user.clone(), self.parts.clone()]
    }
}

/// Where a kubeconfig of the test kit says that the API server is.
fn kube_address(kubeconfig: &Path) -> std::net::SocketAddr {
    let server = read(kubeconfig)["clusters"][0]["cluster"]["server"].take();
    server.as_str().and_then(|url| url.strip_prefix("https://")?.parse().ok()).expect("an address")
}

/// Leads users of this kubeconfig over a wire.
fn lead(kubeconfig: &Path, wire: &Wire) {
    let mut config = read(kubeconfig);
    config["clusters"][0]["cluster"]["server"] = json!(format!("https://{}", wire.at));
    std::fs::write(kubeconfig, config.to_string()).expect("write");
}

fn read(kubeconfig: &Path) -> Value {
    serde_json::from_slice(&std::fs::read(kubeconfig).expect("a kubeconfig")).expect("JSON")
}
