//! Promise: each client gets the same answer for the same rights and objects: the community's iterator (in the example of
//! deploy/backup-example) and the client library, each for what is allocated and for a delta.

use std::path::Path;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use kube::api::{Patch, PatchParams};
use kube::config::{KubeConfigOptions, Kubeconfig};
use serde_json::{Value, json};
use snapshot_metadata_client::{Client, Options, Token};
use tokio::process::Command;

use crate::community::program;
use crate::driver::{Driver, MESSAGES, TUPLES};
use crate::rights::{get_snapshots, sign};
use crate::world::{AUDIENCE, World, eventually};

/// What a client gets: how many ranges, or its error in full.
type Outcome = Result<usize, String>;

/// Words of an error: its code and parts of its message. Without any, ranges are listed.
type Words = &'static [&'static str];

const DENIED: Words = &["PermissionDenied", "the caller may not get this VolumeSnapshot"];
const DENIED_BASE: Words =
    &["PermissionDenied", "the caller may not get the VolumeSnapshot of base_snapshot_id"];
/// The clients find that out by themselves: they look for another gateway, of which there is none.
const NO_SERVICE: Words = &["SnapshotMetadataService", "x.csi.test"];
const NO_SECRET: Words =
    &["FailedPrecondition", "the secret that the VolumeSnapshotClass names does not exist"];
const UNREADY: Words = &["Unavailable", "unready is not ready to use yet"];
const NO_STATUS: Words = &["Unavailable", "no-status is not ready to use yet"];
/// The driver's own words.
const FORGOTTEN: Words = &["NotFound", "snapshot forgotten does not exist"];
const UNKNOWN: Words =
    &["Unauthenticated", "the security token is not valid, or not for the audience of this service"];

/// The service account whose token is shown, the snapshot and the CSI handle of a base, and what comes of them: for what is
/// allocated, and for the delta.
const CASES: &[(&str, &str, &str, &str, Words, Words)] = &[
    ("a role for the namespace", "whole", "tuesday", "plain-1", &[], &[]),
    ("a role for both by name", "two", "tuesday", "plain-1", &[], &[]),
    ("a role for the target alone", "target", "tuesday", "plain-1", &[], DENIED_BASE),
    ("a role for the base alone", "base", "tuesday", "plain-1", DENIED, DENIED),
    ("no role", "nothing", "tuesday", "plain-1", DENIED, DENIED),
    ("another namespace's base", "whole", "tuesday", "plain-3", &[], DENIED_BASE),
    ("a deleted base that the driver keeps", "whole", "tuesday", "deleted-1", &[], &[]),
    ("a base that the driver knows no more", "whole", "tuesday", "forgotten", &[], FORGOTTEN),
    ("an unready base: by its handle the driver decides", "whole", "tuesday", "plain-4", &[], &[]),
    ("an unready snapshot", "whole", "unready", "plain-1", UNREADY, UNREADY),
    ("a content without status", "whole", "no-status", "plain-1", NO_STATUS, NO_STATUS),
    ("a class that is gone", "whole", "class-is-gone", "plain-1", &[], &[]),
    ("a secret that is missing", "whole", "secret-is-missing", "plain-1", NO_SECRET, NO_SECRET),
    ("another driver's snapshot", "whole", "other-driver", "plain-1", NO_SERVICE, NO_SERVICE),
];

/// The clients, with the rights of an administrator but for the token that they show.
struct Clients<'a> {
    world: &'a World,
    example: std::path::PathBuf,
    kube: kube::Client,
}

impl Clients<'_> {
    async fn new(world: &World) -> Clients<'_> {
        let config = Kubeconfig::read_from(&world.api.kubeconfig).expect("kubeconfig");
        let config = kube::Config::from_custom_kubeconfig(config, &KubeConfigOptions::default()).await;
        let kube = kube::Client::try_from(config.expect("a config")).expect("a client");
        Clients { world, example: program("backup-example"), kube }
    }

    async fn iterator(&self, account: &str, snapshot: &str, base: Option<&str>) -> Outcome {
        let mut command = Command::new(&self.example);
        command.args(["list", "-namespace", &self.world.namespace, "-service-account", account]);
        command.args(["-snapshot", snapshot, "-kubeconfig"]).arg(&self.world.api.kubeconfig);
        if let Some(base) = base {
            command.args(["-base-id", base]);
        }
        let output = command.kill_on_drop(true).output().await.expect("run the example");
        if !output.status.success() {
            return Err(String::from_utf8_lossy(&output.stderr).into_owned());
        }
        let lines = String::from_utf8_lossy(&output.stdout).lines().count();
        // The last line is the sum.
        Ok(lines - 1)
    }

    async fn library(&self, token: Token, snapshot: &str, base: Option<&str>) -> Outcome {
        let options = Options { token, ..Options::default() };
        let client = Client::kubernetes(self.kube.clone(), &self.world.namespace, options);
        let client = client.with_policy(crate::library::hasty());
        let blocks = match base {
            None => client.allocated(snapshot).await,
            Some(base) => client.delta(base, snapshot).await,
        };
        let words = |error: snapshot_metadata_client::Error| {
            let code = error.code().map(|code| format!("{code:?}: ")).unwrap_or_default();
            format!("{code}{error}")
        };
        let ranges = blocks.map_err(words)?.collect_all().await.map_err(words)?;
        Ok(ranges.len())
    }

    fn token(&self, account: &str) -> Token {
        Token::ServiceAccount { namespace: self.world.namespace.clone(), name: account.to_owned() }
    }
}

fn as_expected(what: &str, outcome: Outcome, words: &[&str], others: &str) -> Option<String> {
    let right = match &outcome {
        Ok(ranges) => words.is_empty() && *ranges as i64 == MESSAGES * TUPLES,
        Err(error) => {
            !words.is_empty() && words.iter().all(|word| error.contains(word)) && !error.contains(others)
        }
    };
    (!right).then(|| format!("{what}: expected {words:?}, found {outcome:?}"))
}

pub async fn every_client_gets_the_same_answer_for_the_same_rights(world: World) {
    let _driver = Driver::start(&world.driver, &world.socket());
    let (ns, other) = (world.namespace.clone(), world.other_namespace().await);
    objects(&world, &ns, &other).await;
    let gateway = world.gateway(&[]).await;
    // It may read the secret, so that a missing one is told from a forbidden one.
    let secrets = json!([{"apiGroups": [""], "resources": ["secrets"], "verbs": ["get"], "resourceNames": ["nowhere"]}]);
    world.api.allow(&ns, &ns, "gateway", secrets).await;
    let ca = STANDARD.encode(&gateway.files.as_ref().expect("files").ca);
    world.service(&format!("127.0.0.1:{}", gateway.port), AUDIENCE, &ca).await;
    let clients = Clients::new(&world).await;
    eventually("the roles count", async || {
        clients.library(clients.token("two"), "tuesday", None).await.is_ok()
            && clients
                .library(clients.token("whole"), "secret-is-missing", None)
                .await
                .is_err_and(|error| !error.contains("may not be read"))
    })
    .await;

    let mut wrong = Vec::new();
    for (case, account, snapshot, base, allocated, delta) in CASES {
        for (base, words) in [(None, allocated), (Some(*base), delta)] {
            let what = |client: &str| format!("{client}, {case}, delta {}", base.is_some());
            let outcome = clients.iterator(account, snapshot, base).await;
            wrong.extend(as_expected(&what("iterator"), outcome, words, &other));
            let outcome = clients.library(clients.token(account), snapshot, base).await;
            wrong.extend(as_expected(&what("library"), outcome, words, &other));
        }
    }
    // The iterator has a new token for each call; the library reads one that ended from a file.
    let expired = expired_token(&world, &ns, world.dir.path()).await;
    for base in [None, Some("plain-1")] {
        let outcome = clients.library(Token::File(expired.clone()), "tuesday", base).await;
        wrong.extend(as_expected("library, an expired token", outcome, UNKNOWN, &other));
    }
    // Both ask for the audience that the object names.
    let services = world.api.objects("SnapshotMetadataService", None);
    let patch = Patch::Merge(json!({"spec": {"audience": "another"}}));
    services.patch(&world.driver, &PatchParams::default(), &patch).await.expect("patch");
    for base in [None, Some("plain-1")] {
        let outcome = clients.iterator("whole", "tuesday", base).await;
        wrong.extend(as_expected("iterator, wrong audience", outcome, UNKNOWN, &other));
        let outcome = clients.library(clients.token("whole"), "tuesday", base).await;
        wrong.extend(as_expected("library, wrong audience", outcome, UNKNOWN, &other));
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

async fn expired_token(world: &World, ns: &str, dir: &Path) -> std::path::PathBuf {
    let account = world.api.objects("ServiceAccount", Some(ns)).get("whole").await.expect("the account");
    let now =
        std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).expect("after 1970").as_secs();
    let uid = account.metadata.uid.expect("a uid");
    let token = sign(&world.api.signing_key(), ns, "whole", &uid, now - 7200, now - 3600);
    let file = dir.join("expired");
    std::fs::write(&file, token).expect("write");
    file
}

async fn objects(world: &World, ns: &str, other: &str) {
    world.snapshot(ns, "monday", "plain-1").await;
    world.snapshot(ns, "tuesday", "plain-2").await;
    world.snapshot(other, "theirs", "plain-3").await;
    let unready = |snapshot: &mut Value, content: &mut Value| {
        snapshot["status"]["readyToUse"] = json!(false);
        content["status"]["readyToUse"] = json!(false);
    };
    world.snapshot_with(ns, "unready", "plain-4", unready).await;
    let bare = |_: &mut Value, content: &mut Value| {
        content.as_object_mut().expect("an object").remove("status");
    };
    world.snapshot_with(ns, "no-status", "plain-5", bare).await;
    let of_class = |class: String| {
        move |snapshot: &mut Value, _: &mut Value| snapshot["spec"]["volumeSnapshotClassName"] = json!(class)
    };
    world.snapshot_with(ns, "class-is-gone", "plain-6", of_class("a-class-that-was-deleted".into())).await;
    world
        .api
        .make(json!({
            "apiVersion": "snapshot.storage.k8s.io/v1", "kind": "VolumeSnapshotClass",
            "metadata": {"name": format!("{ns}-secret")}, "driver": world.driver, "deletionPolicy": "Delete",
            "parameters": {
                "csi.storage.k8s.io/snapshotter-secret-name": "nowhere",
                "csi.storage.k8s.io/snapshotter-secret-namespace": ns,
            },
        }))
        .await;
    world.snapshot_with(ns, "secret-is-missing", "plain-7", of_class(format!("{ns}-secret"))).await;
    world
        .snapshot_with(ns, "other-driver", "plain-8", |_, content| {
            content["spec"]["driver"] = json!("x.csi.test")
        })
        .await;
    for (account, names) in
        [("whole", &[][..]), ("two", &["monday", "tuesday"]), ("target", &["tuesday"]), ("base", &["monday"])]
    {
        world.api.account(ns, account, get_snapshots(names)).await;
    }
    world.api.account(ns, "nothing", json!([])).await;
}
