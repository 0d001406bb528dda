//! Promise: in Kubernetes router and nodes get their certificates by themselves, and no node gets another's.

use std::path::Path;
use std::process::{Command, Stdio};

use k8s_openapi::api::core::v1::{ConfigMap, Secret};
use kube::Api;
use serde_json::json;
use testkit::api_server::{ApiServer, kube_programs};
use testkit::{PoolKind, Rig, free_port};

use testkit::cluster::{Router, eventually};
use testkit::running::Running;

const NAMESPACE: &str = "deltapath";

/// `deltapath-router` with another command than to route.
fn start(dir: &Path, name: &str, arguments: &[String]) -> Running {
    let mut command = Command::new(testkit::program("deltapath-router"));
    command.args(arguments).env("RUST_LOG", "info").stdout(Stdio::null());
    Running::start(&mut command, &dir.join(format!("{name}.log")))
}

/// A kubeconfig by which the API server knows on which node its bearer is: that of a pod there.
async fn of_pod(api: &ApiServer, account: &str, node: &str) -> std::path::PathBuf {
    let name = format!("{account}-{node}");
    api.make(json!({
        "apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, "namespace": NAMESPACE},
        "spec": {
            "nodeName": node, "serviceAccountName": account, "automountServiceAccountToken": false,
            "containers": [{"name": "c", "image": "i"}],
        },
    }))
    .await;
    api.kubeconfig_of_pod(NAMESPACE, account, &name).await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_real_api_server_takes_the_manifests() {
    let programs = kube_programs(&["kubectl"]);
    let api = ApiServer::start().await;
    api.namespace(NAMESPACE).await;
    for overlay in ["distributed", "kind-distributed"] {
        let done = Command::new(programs.join("kubectl"))
            .arg("--kubeconfig")
            .arg(&api.kubeconfig)
            .args(["apply", "--server-side", "--dry-run=server", "--kustomize"])
            .arg(Path::new(testkit::HOME).join("deploy/overlays").join(overlay))
            .output()
            .expect("kubectl");
        let said = String::from_utf8_lossy(&done.stdout).into_owned();
        assert!(done.status.success(), "{overlay}: {said}{}", String::from_utf8_lossy(&done.stderr));
        assert!(
            said.contains("deployment.apps/deltapath-controller serverside-applied"),
            "{overlay}: {said}"
        );
    }
}

#[apply(device_test)]
async fn certificates_are_made_signed_and_denied_by_the_node_that_asks() {
    let api = ApiServer::start().await;
    let dir = tempfile::tempdir().expect("temp dir");
    let path = |name: &str| dir.path().join(name).display().to_string();
    // The objects and rights of deploy/overlays/distributed, and no more.
    api.namespace(NAMESPACE).await;
    for object in testkit::scene::manifests("deploy/overlays/distributed/certificates.yaml") {
        if object["kind"] != "Deployment" && object["kind"] != "NetworkPolicy" {
            api.make(object).await;
        }
    }
    api.make(json!({"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": "deltapath-plugin", "namespace": NAMESPACE}})).await;

    let signer = of_pod(&api, "deltapath-certificates", "control").await;
    let flags = [
        "certificates".to_owned(),
        format!("--kubeconfig={}", signer.display()),
        format!("--namespace={NAMESPACE}"),
    ];
    let signing = start(dir.path(), "signer", &flags);
    let maps: Api<ConfigMap> = Api::namespaced(api.client.clone(), NAMESPACE);
    let ca = || async { maps.get("deltapath-router-ca").await.ok()?.data?.remove("ca.crt") };
    eventually("there is a CA", async || ca().await.is_some()).await;
    std::fs::write(path("ca.crt"), ca().await.expect("a CA")).expect("write");
    let secrets: Api<Secret> = Api::namespaced(api.client.clone(), NAMESPACE);
    let kept = || async { secrets.get("deltapath-router-tls").await.expect("the Secret").data };
    eventually("the router's certificate is there", async || kept().await.is_some()).await;
    for (file, key) in [("router.crt", "tls.crt"), ("router.key", "tls.key"), ("router.ca", "ca.crt")] {
        std::fs::write(path(file), &kept().await.expect("data")[key].0).expect("write");
    }

    // A driver with what runs beside it, on node-1.
    let port = free_port();
    let mut arguments = vec![format!("--router-listen=127.0.0.1:{port}")];
    for (flag, file) in [("cert", "node.crt"), ("key", "node.key"), ("ca", "ca.crt")] {
        arguments.push(format!("--router-tls-{flag}={}", path(file)));
    }
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let rig = Rig::start_with(PoolKind::Dir, &arguments, "info").await;
    let beside = |name: &str, kubeconfig: &Path, to: &str| {
        let flags = ["node-certificate".into(), format!("--csi-address=unix://{}", rig.socket().display())];
        let more = [format!("--kubeconfig={}", kubeconfig.display()), format!("--dir={to}")];
        start(dir.path(), name, &[flags, more].concat())
    };
    let first = of_pod(&api, "deltapath-plugin", "node-1").await;
    let asking = beside("beside", &first, &path(""));
    eventually("the certificate is there", async || Path::new(&path("node.crt")).exists()).await;
    let router = Router::start(dir.path(), "router", &[format!("127.0.0.1:{port}")], &[]).await;
    router.sees(1).await;

    // The same key from another node: denied, and the answer says why. And from a pod that is no driver's: it may not ask at all.
    std::fs::create_dir(path("other")).expect("mkdir");
    let second = of_pod(&api, "deltapath-plugin", "node-2").await;
    let posing = beside("posing", &second, &path("other"));
    eventually("it is denied", async || posing.log().contains("is on node node-1")).await;
    let stranger = beside("stranger", &signer, &path("other"));
    eventually("it may not ask", async || stranger.log().contains("forbidden")).await;
    assert!(testkit::names(Path::new(&path("other"))).is_empty(), "it got a certificate");
    let keys = maps.get("deltapath-node-keys").await.expect("the keys").data.expect("one");
    assert_eq!(keys.into_values().collect::<Vec<_>>(), ["node-1"]);

    // An operator says that the data directory has moved.
    api.merge("ConfigMap", Some(NAMESPACE), "deltapath-node-keys", json!({"data": null})).await;
    eventually("the other node has it", async || Path::new(&path("other/node.crt")).exists()).await;
    // Whoever starts again goes on with the CA that is there.
    let before = ca().await;
    drop(signing);
    let again = start(dir.path(), "signer-again", &flags);
    eventually("it works", async || again.log().contains("signing")).await;
    tokio::time::sleep(std::time::Duration::from_secs(3)).await;
    assert!(before.is_some() && ca().await == before, "another CA");
    assert!(!again.log().contains("WARN"), "{}", again.log());
    drop(asking);
    router.finish();
    rig.finish();
}
