//! What the worlds of the gateway and of the earlier designs share: names, snapshots, accounts with the rights of a manifest,
//! certificates, probes, and the harness that runs their tests.

use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use libtest_mimic::{Arguments, Trial};
use parking_lot::Mutex;
use rcgen::CertificateParams;
use rustls::client::WantsClientCert;
use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject;
use rustls::{ClientConfig, ConfigBuilder, RootCertStore};
use serde_json::{Value, json};

use crate::api_server::ApiServer;
use crate::cluster::Authority;

pub type Test<W> = fn(W) -> Pin<Box<dyn Future<Output = ()>>>;

/// Names that no other test has: of a namespace, and of a CSI driver.
pub fn names(test: &str) -> (String, String) {
    let short: String = test.split('_').filter_map(|word| word.chars().next()).collect();
    let namespace = format!("{short}-{}", &test.replace('_', "-")[..12].trim_end_matches('-'));
    (namespace, format!("{short}.csi.test"))
}

/// Makes a VolumeSnapshot and its content, ready and bound to each other, after a change to both.
pub async fn snapshot(
    api: &ApiServer,
    driver: &str,
    namespace: &str,
    (name, handle): (&str, &str),
    change: impl FnOnce(&mut Value, &mut Value),
) {
    let content_name = format!("content-{namespace}-{name}");
    let mut snapshot = json!({
        "apiVersion": "snapshot.storage.k8s.io/v1", "kind": "VolumeSnapshot",
        "metadata": {"name": name, "namespace": namespace},
        "spec": {"source": {"persistentVolumeClaimName": "data"}},
        "status": {"readyToUse": true, "boundVolumeSnapshotContentName": content_name},
    });
    let mut content = json!({
        "apiVersion": "snapshot.storage.k8s.io/v1", "kind": "VolumeSnapshotContent",
        "metadata": {"name": content_name},
        "spec": {
            "driver": driver, "deletionPolicy": "Retain", "source": {"volumeHandle": "volume-1"},
            "volumeSnapshotRef": {"name": name, "namespace": namespace},
        },
        "status": {"readyToUse": true, "snapshotHandle": handle},
    });
    change(&mut snapshot, &mut content);
    api.make(content).await;
    api.make(snapshot).await;
}

/// A kubeconfig of a new service account with the rights in a manifest and no others. What the manifest says of deltapath's
/// driver is said of this one.
pub async fn account_of(
    api: &ApiServer,
    driver: &str,
    namespace: &str,
    account: &str,
    manifest: &str,
) -> PathBuf {
    let metadata = json!({"name": account, "namespace": namespace});
    api.make(json!({"apiVersion": "v1", "kind": "ServiceAccount", "metadata": metadata})).await;
    for mut rule in manifests(manifest) {
        let kind = rule["kind"].as_str().unwrap_or_default().to_owned();
        if !kind.contains("Role") {
            continue;
        }
        let name = format!("{namespace}-{account}");
        rule["metadata"] = match rule["metadata"]["namespace"].as_str() {
            None => json!({"name": name}),
            Some("kube-system") => json!({"name": name, "namespace": "kube-system"}),
            Some(_) => json!({"name": name, "namespace": namespace}),
        };
        if kind.ends_with("Binding") {
            rule["roleRef"]["name"] = json!(name);
            rule["subjects"] = json!([{"kind": "ServiceAccount", "name": account, "namespace": namespace}]);
        }
        for rule in rule["rules"].as_array_mut().into_iter().flatten() {
            for named in rule["resourceNames"].as_array_mut().into_iter().flatten() {
                if named == "deltapath.csi.dev" {
                    *named = json!(driver);
                }
            }
        }
        api.make(rule).await;
    }
    api.kubeconfig_of(namespace, account).await
}

/// The objects in a file of the project.
pub fn manifests(path: &str) -> Vec<Value> {
    let text = std::fs::read_to_string(Path::new(crate::HOME).join(path)).expect(path);
    text.split("\n---\n").map(|document| serde_saphyr::from_str(document).expect(path)).collect()
}

/// A CA, and a certificate by it with its key; PEM.
pub struct Certificate {
    pub ca: String,
    pub chain: String,
    pub key: String,
}

/// A certificate for these hosts, by a CA of its own.
pub fn certificate(hosts: &[&str]) -> Certificate {
    let authority = Authority::new("CA");
    let hosts: Vec<String> = hosts.iter().map(|host| (*host).to_owned()).collect();
    let (chain, key) = authority.sign(&CertificateParams::new(hosts).expect("params"));
    Certificate { ca: authority.pem, chain, key }
}

/// The begin of a TLS client's configuration that trusts this CA.
pub fn trusting(ca: &str) -> ConfigBuilder<ClientConfig, WantsClientCert> {
    let mut roots = RootCertStore::empty();
    roots.add(CertificateDer::from_pem_slice(ca.as_bytes()).expect("PEM")).expect("a CA");
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let config = ClientConfig::builder_with_provider(provider).with_safe_default_protocol_versions();
    config.expect("versions").with_root_certificates(roots)
}

/// Tests by their paths, for [`run`]; one that takes a pool with its name: `module::test on "xfs"`.
#[macro_export]
macro_rules! tests {
    ($($module:ident :: $name:ident $(on $pool:literal)?),* $(,)?) => {
        [$((
            stringify!($module),
            concat!(stringify!($name) $(, "_on_", $pool)?),
            (|world| Box::pin($module::$name(world $(, $crate::PoolKind::named($pool))?))) as $crate::scene::Test<_>,
        )),*]
    };
}

/// How long a test may take: one that hangs is named, and the others still run.
const LONGEST: Duration = Duration::from_secs(600);

/// Runs tests, each in a world that `make` gives it, and all with one API server that has these CRDs. The harness is libtest-mimic, so that
/// the server ends with the tests.
pub fn run<W: 'static>(
    tests: Vec<(&'static str, &'static str, Test<W>)>,
    crds: &'static [&'static str],
    make: impl AsyncFn(Arc<ApiServer>, &'static str) -> W + Copy + Send + 'static,
) -> ExitCode {
    let arguments = Arguments::from_args();
    let runtime = Arc::new(tokio::runtime::Runtime::new().expect("a runtime"));
    let server = Arc::new(Mutex::new(None));
    // Some drivers attach loop devices, and Go builds the API server. Under CI nothing is left out.
    let is_ci = std::env::var("CI").as_deref() == Ok("true");
    let has_go = std::process::Command::new("go").arg("version").output().is_ok();
    let can_run = !crate::is_short() && (is_ci || (nix::unistd::geteuid().is_root() && has_go));
    if !can_run {
        eprintln!("ignored: they need root, and Go to build the Kubernetes API server");
    }
    let trials = tests.into_iter().map(|(module, name, test)| {
        let (runtime, server) = (runtime.clone(), server.clone());
        let trial = Trial::test(format!("{module}::{name}"), move || {
            let start = || {
                runtime.block_on(async {
                    let api = ApiServer::start().await;
                    api.install(crds).await;
                    Arc::new(api)
                })
            };
            // The first test starts it; the others wait.
            let api = server.lock().get_or_insert_with(start).clone();
            let done = runtime.block_on(async {
                tokio::time::timeout(LONGEST, async { test(make(api, name).await).await }).await
            });
            done.unwrap_or_else(|_| panic!("{module}::{name} is not done after {LONGEST:?}"));
            Ok(())
        });
        trial.with_ignored_flag(!can_run)
    });
    let conclusion = libtest_mimic::run(&arguments, trials.collect());
    // Before the process ends: the API server ends with it.
    drop(server.lock().take());
    conclusion.exit_code()
}
