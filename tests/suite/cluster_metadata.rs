//! The way of a backup application, whole but for the cluster: the example program, the community's
//! csi-snapshot-metadata of the release in the manifests, and the driver. A few answers stand in for the API server;
//! the certificate is made by hack/tls.sh.

use std::convert::Infallible;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use csi_client::from_snapshot;
use http_body_util::{BodyExt, Full};
use hyper::body::{Bytes, Incoming};
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::rt::TokioIo;
use serde_json::{Value, json};

use crate::manifests::{DRIVER, read, repository};
use testkit::content::Content;
use testkit::{MIB, POOLS, Rig};

const HOST: &str = "deltapath-snapshot-metadata.deltapath.svc";
const AUDIENCE: &str = "deltapath-snapshot-metadata";
/// A token for [`AUDIENCE`], and one that shows a caller to the API server itself.
const SCOPED: &str = "scoped-token";
const CALLER: &str = "caller-token";

fn program(name: &str) -> Option<PathBuf> {
    let path = repository().join(".deps/backup").join(name);
    if path.exists() {
        return Some(path);
    }
    eprintln!("skipped: needs {name}, which `make test-deps` builds where go is installed");
    assert_ne!(std::env::var("CI").as_deref(), Ok("true"), "skipped under CI: needs {name}");
    None
}

/// What the API server would know of one volume's snapshots.
struct Cluster {
    address: String,
    ca: String,
    snapshots: Vec<(&'static str, String)>,
}

impl Cluster {
    /// The answer to a call; `None` where an API server would have nothing. Bodies come as protobuf, and are
    /// looked through for the words that matter.
    fn answer(&self, method: &Method, path: &str, body: &[u8]) -> Option<Value> {
        let parts: Vec<&str> = path.trim_start_matches('/').split('/').collect();
        let says = |word: &str| body.windows(word.len()).any(|part| part == word.as_bytes());
        let user = json!({"username": "system:serviceaccount:default:backup"});
        let made = |group: &str, kind: &str, status: Value| json!({"apiVersion": format!("{group}.k8s.io/v1"), "kind": kind, "metadata": {}, "status": status});
        Some(match (method, &parts[1..]) {
            (&Method::POST, [.., "selfsubjectreviews"]) => {
                made("authentication", "SelfSubjectReview", json!({"userInfo": user}))
            }
            (&Method::POST, [.., "serviceaccounts", "backup", "token"]) => {
                let token = if says(AUDIENCE) { SCOPED } else { "token-for-another" };
                let expires = "2100-01-01T00:00:00Z";
                made(
                    "authentication",
                    "TokenRequest",
                    json!({"token": token, "expirationTimestamp": expires}),
                )
            }
            (&Method::POST, [.., "tokenreviews"]) => {
                let good = says(SCOPED) && says(AUDIENCE);
                let status = json!({"authenticated": good, "user": user, "audiences": [AUDIENCE]});
                made("authentication", "TokenReview", status)
            }
            (&Method::POST, [.., "subjectaccessreviews"]) => {
                let good = says("system:serviceaccount:default:backup")
                    && says("volumesnapshots")
                    && says("default");
                made("authorization", "SubjectAccessReview", json!({"allowed": good}))
            }
            (&Method::GET, [_, "v1beta1", "snapshotmetadataservices", name]) => json!({
                "apiVersion": "cbt.storage.k8s.io/v1beta1", "kind": "SnapshotMetadataService",
                "metadata": {"name": name},
                "spec": {"address": self.address, "audience": AUDIENCE, "caCert": self.ca},
            }),
            (&Method::GET, [_, "v1", "namespaces", "default", "volumesnapshots", name]) => {
                self.snapshots.iter().find(|(known, _)| known == name)?;
                json!({
                    "apiVersion": "snapshot.storage.k8s.io/v1", "kind": "VolumeSnapshot",
                    "metadata": {"name": name, "namespace": "default"},
                    "spec": {"source": {"persistentVolumeClaimName": "block"}, "volumeSnapshotClassName": "deltapath"},
                    "status": {"readyToUse": true, "boundVolumeSnapshotContentName": format!("content-{name}")},
                })
            }
            (&Method::GET, [_, "v1", "volumesnapshotcontents", name]) => {
                let of = name.trim_start_matches("content-");
                let (_, handle) = self.snapshots.iter().find(|(known, _)| *known == of)?;
                json!({
                    "apiVersion": "snapshot.storage.k8s.io/v1", "kind": "VolumeSnapshotContent",
                    "metadata": {"name": name},
                    "spec": {
                        "driver": DRIVER, "deletionPolicy": "Delete", "source": {},
                        "volumeSnapshotRef": {"name": of, "namespace": "default"},
                    },
                    "status": {"readyToUse": true, "snapshotHandle": handle},
                })
            }
            (&Method::GET, [_, "v1", "volumesnapshotclasses", name]) => json!({
                "apiVersion": "snapshot.storage.k8s.io/v1", "kind": "VolumeSnapshotClass",
                "metadata": {"name": name}, "driver": DRIVER, "deletionPolicy": "Delete",
            }),
            _ => return None,
        })
    }

    /// Serves on a port of its own.
    async fn serve(self) -> u16 {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("bind");
        let port = listener.local_addr().expect("address").port();
        let cluster = Arc::new(self);
        tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                let cluster = cluster.clone();
                tokio::spawn(async move {
                    let service = hyper::service::service_fn(move |request| reply(cluster.clone(), request));
                    let _ = hyper::server::conn::http1::Builder::new()
                        .serve_connection(TokioIo::new(stream), service)
                        .await;
                });
            }
        });
        port
    }
}

async fn reply(
    cluster: Arc<Cluster>,
    request: Request<Incoming>,
) -> Result<Response<Full<Bytes>>, Infallible> {
    let (head, body) = request.into_parts();
    let body = body.collect().await.expect("a body").to_bytes();
    let (status, answer) = match cluster.answer(&head.method, head.uri.path(), &body) {
        Some(answer) if head.method == Method::POST => (StatusCode::CREATED, answer),
        Some(answer) => (StatusCode::OK, answer),
        None => (
            StatusCode::NOT_FOUND,
            json!({"apiVersion": "v1", "kind": "Status", "status": "Failure", "reason": "NotFound", "code": 404}),
        ),
    };
    let response = Response::builder().status(status).header("content-type", "application/json");
    Ok(response.body(Full::new(Bytes::from(answer.to_string()))).expect("a response"))
}

/// Stands in for kubectl before hack/tls.sh: what is applied is kept in a directory, and read from there.
const KUBECTL: &str = r#"#!/bin/bash
set -e
case "$1 $2" in
    "get secret") [ ! -e "$KEPT/tls.crt" ] || base64 -w 0 <"$KEPT/tls.crt" ;;
    "get snapshotmetadataservices.cbt.storage.k8s.io") [ ! -e "$KEPT/object.yaml" ] || sed -n 's/^  caCert: //p' "$KEPT/object.yaml" ;;
    "create secret")
        while [ $# -gt 0 ]; do
            case "$1" in --cert) cp "$2" "$KEPT/tls.crt" ;; --key) cp "$2" "$KEPT/tls.key" ;; esac
            shift
        done ;;
    apply*) text=$(cat); case "$text" in *SnapshotMetadataService*) printf '%s\n' "$text" >"$KEPT/object.yaml" ;; esac ;;
    *) echo "kubectl $*: not known here" >&2; exit 1 ;;
esac
"#;

fn make_certificate(kept: &Path, arguments: &[&str]) -> Output {
    let bin = kept.join("bin");
    std::fs::create_dir_all(&bin).expect("mkdir");
    let kubectl = bin.join("kubectl");
    std::fs::write(&kubectl, KUBECTL).expect("write");
    std::fs::set_permissions(&kubectl, std::fs::Permissions::from_mode(0o755)).expect("chmod");
    let path = format!("{}:{}", bin.display(), std::env::var("PATH").expect("PATH"));
    let output = Command::new(repository().join("hack/tls.sh"))
        .args(arguments)
        .env("PATH", path)
        .env("KEPT", kept)
        .env("TMPDIR", kept)
        .output()
        .expect("run hack/tls.sh");
    assert!(output.status.success(), "hack/tls.sh: {}", String::from_utf8_lossy(&output.stderr));
    output
}

fn ca_of(kept: &Path) -> String {
    let object = std::fs::read_to_string(kept.join("object.yaml")).expect("the object was applied");
    object.lines().find_map(|line| line.strip_prefix("  caCert: ")).expect("a CA").to_owned()
}

#[test]
fn certificates_are_made_once_and_renewed_on_demand() {
    let dir = tempfile::tempdir().expect("temp dir");
    let file = |name: &str| std::fs::read(dir.path().join(name)).expect(name);
    make_certificate(dir.path(), &[]);
    let (first, ca) = (file("tls.crt"), ca_of(dir.path()));
    let said = make_certificate(dir.path(), &[]);
    assert!(String::from_utf8_lossy(&said.stdout).contains("left alone"));
    assert_eq!(
        (file("tls.crt"), ca_of(dir.path())),
        (first.clone(), ca.clone()),
        "a good certificate was replaced"
    );
    make_certificate(dir.path(), &["--renew"]);
    assert_ne!(file("tls.crt"), first);
    assert!(
        ca_of(dir.path()).len() > ca.len(),
        "the CA before is forgotten while its certificate is still shown"
    );
    // A certificate for a day is not good for thirty.
    make_certificate(dir.path(), &["--renew", "--days", "1"]);
    let said = make_certificate(dir.path(), &[]);
    assert!(!String::from_utf8_lossy(&said.stdout).contains("left alone"));
    // No key but the server's is left anywhere.
    let left = testkit::names(dir.path());
    assert_eq!(left, ["bin", "object.yaml", "tls.crt", "tls.key"]);
    let address = read("deploy/cbt/snapshotmetadataservice.yaml");
    assert!(
        address.contains(&format!("address: {HOST}:")) && address.contains(&format!("audience: {AUDIENCE}"))
    );
}

struct Sidecar(Child);

impl Drop for Sidecar {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn free_port() -> u16 {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("bind");
    listener.local_addr().expect("address").port()
}

fn kubeconfig(dir: &Path, port: u16, token: &str) -> PathBuf {
    let path = dir.join("kubeconfig");
    let config = json!({
        "apiVersion": "v1", "kind": "Config", "current-context": "here",
        "clusters": [{"name": "here", "cluster": {"server": format!("http://127.0.0.1:{port}")}}],
        "users": [{"name": "caller", "user": {"token": token}}],
        "contexts": [{"name": "here", "context": {"cluster": "here", "user": "caller"}}],
    });
    std::fs::write(&path, config.to_string()).expect("write");
    path
}

/// The program, in a mount namespace where the service's name leads here.
fn backup(program: &Path, dir: &Path, arguments: &[&str]) -> Output {
    let hosts = dir.join("hosts");
    std::fs::write(&hosts, format!("127.0.0.1 localhost {HOST}\n")).expect("write");
    Command::new("unshare")
        .args(["--mount", "--propagation", "private", "sh", "-c"])
        .arg("mount --bind \"$1\" /etc/hosts && shift && exec \"$@\"")
        .args(["sh".as_ref(), hosts.as_os_str(), program.as_os_str()])
        .args(arguments)
        .stdin(Stdio::null())
        .output()
        .expect("run cbt-backup")
}

#[test_with::root]
#[tokio::test(flavor = "multi_thread")]
async fn a_backup_application_gets_exact_blocks_through_the_communitys_sidecar() {
    let (Some(example), Some(sidecar)) = (program("cbt-backup"), program("csi-snapshot-metadata")) else {
        return;
    };
    for pool in POOLS {
        const SIZE: i64 = 64 * MIB;
        let mut rig = Rig::start(pool).await;
        let (raw, device) = rig.block_volume("block", SIZE).await;
        let mut content = Content::default();
        content.write(&device, 0, 300, 1);
        content.write(&device, 9000, 40, 2);
        let first = rig.snapshot("block-1", &raw).await;
        content.write(&device, 5000, 7, 3);
        content.discard(&device, 9010, 3);
        let second = rig.snapshot("block-2", &raw).await;
        let (_, old) = rig.volume_from("old", SIZE, from_snapshot(&first)).await;
        let (_, new) = rig.volume_from("new", SIZE, from_snapshot(&second)).await;

        let dir = tempfile::tempdir().expect("temp dir");
        make_certificate(dir.path(), &[]);
        let (grpc, health) = (free_port(), free_port());
        let snapshots = vec![("block-1", first), ("block-2", second)];
        let cluster = Cluster { address: format!("{HOST}:{grpc}"), ca: ca_of(dir.path()), snapshots };
        let config = kubeconfig(dir.path(), cluster.serve().await, CALLER);
        let log = std::fs::File::create(dir.path().join("sidecar.log")).expect("log");
        let mut sidecar = Sidecar(
            Command::new(&sidecar)
                .arg(format!("--csi-address={}", rig.socket().display()))
                .arg(format!("--kubeconfig={}", config.display()))
                .arg(format!("--tls-cert={}", dir.path().join("tls.crt").display()))
                .arg(format!("--tls-key={}", dir.path().join("tls.key").display()))
                .args([format!("--port={grpc}"), format!("--http-endpoint=127.0.0.1:{health}")])
                .stdin(Stdio::null())
                .stderr(log)
                .spawn()
                .expect("start csi-snapshot-metadata"),
        );
        let said = || std::fs::read_to_string(dir.path().join("sidecar.log")).unwrap_or_default();
        let deadline = Instant::now() + Duration::from_secs(60);
        while std::net::TcpStream::connect(("127.0.0.1", health)).is_err() {
            let gone = sidecar.0.try_wait().expect("wait");
            assert!(gone.is_none() && Instant::now() < deadline, "no sidecar ({gone:?}):\n{}", said());
            tokio::time::sleep(Duration::from_millis(20)).await;
        }

        let run = |what: &str, more: &[&str]| {
            let mut arguments = vec![what];
            let config = format!("-kubeconfig={}", config.display());
            let image = format!("-image={}", dir.path().join("block.img").display());
            if what != "verify" {
                arguments.extend(["-namespace=default", &config]);
            }
            if what != "list" {
                arguments.push(&image);
            }
            arguments.extend(more);
            let output = backup(&example, dir.path(), &arguments);
            let text = format!(
                "{}{}",
                String::from_utf8_lossy(&output.stdout),
                String::from_utf8_lossy(&output.stderr)
            );
            (output.status.success(), text)
        };
        let done = |what: &str, more: &[&str]| {
            let (ok, text) = run(what, more);
            assert!(ok, "{what} {more:?}: {text}\n{}", said());
            text
        };
        let old = format!("-device={}", old.display());
        let new = format!("-device={}", new.display());
        let blocks = |text: &str| -> Vec<(u64, u64)> {
            let pair = |line: &str| {
                let mut words = line.split_whitespace().map(str::parse);
                Some((words.next()?.ok()?, words.next()?.ok()?))
            };
            text.lines().filter_map(pair).collect()
        };
        let delta = blocks(&done("list", &["-snapshot=block-2", "-base=block-1"]));
        assert_eq!(delta, [(5000 * 4096, 7 * 4096), (9010 * 4096, 3 * 4096)]);
        let all = blocks(&done("list", &["-snapshot=block-1"]));
        assert_eq!(all, [(0, 300 * 4096), (9000 * 4096, 40 * 4096)]);

        let full = done("copy", &["-snapshot=block-1", &old]);
        assert!(full.contains(&format!("copied 2 tuples, {} bytes", 340 * 4096)), "{full}");
        done("verify", &[&old]);
        let (ok, text) = run("verify", &[&new]);
        assert!(
            !ok && text.contains("differ between"),
            "the image of the old snapshot passes for the new one: {text}"
        );
        let incremental = done("copy", &["-snapshot=block-2", "-base=block-1", &new]);
        assert!(incremental.contains(&format!("copied 2 tuples, {} bytes", 10 * 4096)), "{incremental}");
        done("verify", &[&new]);

        let (ok, text) = run("list", &["-snapshot=block-1", "-base=block-2"]);
        assert!(!ok && text.contains("InvalidArgument"), "the wrong way round: {text}");
        drop(sidecar);
        for name in ["old", "new", "block"] {
            let volumes = rig.client.controller.list_volumes(proto::ListVolumesRequest::default()).await;
            let Some(entry) = volumes.expect("list").into_inner().entries.pop() else {
                panic!("no volume for {name}")
            };
            let id = entry.volume.expect("a volume").volume_id;
            rig.detach(&id).await;
            rig.client.delete_volume(&id).await.expect("delete");
        }
        rig.finish();
    }
}
