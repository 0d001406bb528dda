//! Promise: each client gets the same answer for the same rights and objects: the community's iterator (in the example of
//! deploy/backup-example) and the client library, each for what is allocated and for a delta.

use serde_json::json;
use snapshot_metadata_client::{Client, Options, Token};
use tokio::process::Command;

use crate::community::program;
use crate::driver::{Driver, MESSAGES, TUPLES};
use crate::rights::{expired_token, get_snapshots};
use crate::world::{World, eventually};

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
}

impl Clients<'_> {
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
        let client = Client::kubernetes(self.world.api.client.clone(), &self.world.namespace, options);
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
    let _gateway = world.published_gateway().await;
    // It may read the secret, so that a missing one is told from a forbidden one.
    let secrets = json!([{"apiGroups": [""], "resources": ["secrets"], "verbs": ["get"], "resourceNames": ["nowhere"]}]);
    world.api.allow(&ns, &ns, "gateway", secrets).await;
    let clients = Clients { world: &world, example: program("backup-example") };
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
    let expired = expired_token(&world, "whole").await;
    for base in [None, Some("plain-1")] {
        let outcome = clients.library(Token::File(expired.clone()), "tuesday", base).await;
        wrong.extend(as_expected("library, an expired token", outcome, UNKNOWN, &other));
    }
    // Both ask for the audience that the object names.
    world.change_service(json!({"audience": "another"})).await;
    for base in [None, Some("plain-1")] {
        let outcome = clients.iterator("whole", "tuesday", base).await;
        wrong.extend(as_expected("iterator, wrong audience", outcome, UNKNOWN, &other));
        let outcome = clients.library(clients.token("whole"), "tuesday", base).await;
        wrong.extend(as_expected("library, wrong audience", outcome, UNKNOWN, &other));
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

async fn objects(world: &World, ns: &str, other: &str) {
    world.snapshot(ns, "monday", "plain-1").await;
    world.snapshot(ns, "tuesday", "plain-2").await;
    world.snapshot(other, "theirs", "plain-3").await;
    let unready = json!({"status": {"readyToUse": false}});
    let of_class = |class: &str| json!({"snapshot": {"spec": {"volumeSnapshotClassName": class}}});
    world.class("secret", "nowhere", ns).await;
    for (name, handle, changes) in [
        ("unready", "plain-4", json!({"snapshot": unready, "content": unready})),
        ("no-status", "plain-5", json!({"content": {"status": null}})),
        ("class-is-gone", "plain-6", of_class("a-class-that-was-deleted")),
        ("secret-is-missing", "plain-7", of_class(&format!("{ns}-secret"))),
        ("other-driver", "plain-8", json!({"content": {"spec": {"driver": "x.csi.test"}}})),
    ] {
        world.snapshot_but(ns, name, handle, changes).await;
    }
    for (account, names) in
        [("whole", &[][..]), ("two", &["monday", "tuesday"]), ("target", &["tuesday"]), ("base", &["monday"])]
    {
        world.api.account(ns, account, get_snapshots(names)).await;
    }
    world.api.account(ns, "nothing", json!([])).await;
}
