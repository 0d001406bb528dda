//! Promise: `cbt-lab conformance --kubernetes` passes on the gateway, each of its cases sees a service that is broken in that way
//! (`cbt-lab faults` in front of the gateway), and it finds in the community's sidecar what docs/conformance.md says.
//!
//! The driver is `cbt-lab mock`.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::process::Stdio;
use std::time::SystemTime;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use kube::api::ListParams;
use rcgen::{BasicConstraints, CertificateParams, IsCa, KeyPair};
use serde_json::{Value, json};
use testkit::lab::{Lab, named};
use tokio::process::Command;

use crate::community::program;
use crate::rights;
use crate::world::{AUDIENCE, Files, Sidecar, World, eventually};

/// A driver in memory with two snapshots, of which the cluster knows.
async fn driver(world: &World, changes: &str) -> Lab {
    driver_at(world, &world.socket(), &["--changes", changes]).await
}

/// The same at another socket, with more flags.
pub async fn driver_at(world: &World, socket: &Path, more: &[&str]) -> Lab {
    let lab = mock(world, socket, more).await;
    for (name, handle, nanos) in
        [("monday", "disk-1", 1_000_000_000), ("tuesday", "disk-2", 2_000_000_000_u64)]
    {
        let at = json!({"content": {"status": {"creationTime": nanos}}});
        world.snapshot_but(&world.namespace, name, handle, at).await;
    }
    lab
}

async fn mock(world: &World, socket: &Path, more: &[&str]) -> Lab {
    let listen = format!("unix://{}", socket.display());
    let named = ["mock", "--listen", &listen, "--driver-name", &world.driver];
    Lab::start(named.iter().chain(&["--volume", "disk=1Gi", "--snapshots", "2"]).chain(more)).await
}

/// Exit code, verdict and detail by case, and the whole report.
type Ran = (Option<i32>, BTreeMap<String, (String, String)>, Value);

fn suite(world: &World, kubeconfig: &Path, arguments: &[&str]) -> Command {
    let mut command = Command::new(testkit::program("cbt-lab"));
    command
        .args(["conformance", "--kubernetes", "--output", "json", "--namespace", &world.namespace])
        .arg("--kubeconfig")
        .arg(kubeconfig)
        .args(arguments)
        .env_remove("CSI_ENDPOINT")
        .kill_on_drop(true);
    command
}

async fn run(world: &World, arguments: &[&str]) -> Ran {
    let output = suite(world, &world.api.kubeconfig, arguments).output().await.expect("run");
    let report: Value = serde_json::from_slice(&output.stdout)
        .unwrap_or_else(|_| panic!("{arguments:?}: {}", String::from_utf8_lossy(&output.stderr)));
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let cases = report["cases"].as_array().expect("cases").iter();
    let verdicts =
        cases.map(|case| (text(&case["name"]), (text(&case["verdict"]), text(&case["detail"])))).collect();
    (output.status.code(), verdicts, report)
}

async fn all_cases() -> Vec<Value> {
    let mut command = Command::new(testkit::program("cbt-lab"));
    command.args(["conformance", "--kubernetes", "--list", "--output", "json"]);
    let output = command.output().await.expect("run");
    serde_json::from_slice(&output.stdout).expect("a list")
}

fn names(cases: &[Value]) -> BTreeSet<String> {
    cases.iter().map(|case| case["name"].as_str().expect("a name").to_owned()).collect()
}

/// The cluster has nothing of the suite's any more; namespaces wait for a controller that is not here.
async fn assert_nothing_is_left(world: &World) {
    let ours = ListParams::default().labels(&format!("cbt-lab/tests={}", world.namespace));
    let homes = world.api.objects("Namespace", None).list(&ours).await.expect("namespaces");
    let is_deleted = homes.iter().all(|home| home.metadata.deletion_timestamp.is_some());
    assert!(is_deleted, "not deleted: {homes:?}");
    let homes: Vec<String> = homes.into_iter().map(|home| home.metadata.name.expect("a name")).collect();
    for kind in ["Role", "RoleBinding", "Secret", "ServiceAccount", "VolumeSnapshot"] {
        for namespace in homes.iter().chain([&world.namespace]) {
            let objects = world.api.objects(kind, Some(namespace)).list(&ListParams::default()).await;
            for object in objects.expect("a list") {
                let object = object.metadata.name.expect("a name");
                let is_ours = *namespace != world.namespace || object.starts_with("cbt-lab-");
                assert!(!is_ours, "{kind} {namespace}/{object} is left");
            }
        }
    }
}

/// A token of an account with all rights, that ended an hour ago, in a file.
async fn expired_token(world: &World) -> String {
    world.reader("former").await;
    rights::expired_token(world, "former").await.display().to_string()
}

/// Changes between the snapshots. With one tuple a message, enough small messages are under way at once that a relay has to
/// bound them by their number too.
const MANY: &str = "20000";
/// Enough that a stream is still under way when its client goes.
const SOME: &str = "5500";

pub async fn the_gateway_passes_every_case_of_kubernetes(world: World) {
    let driver = driver(&world, MANY).await;
    let _gateway = world.published_gateway().await;
    let expired_token = expired_token(&world).await;
    let junit = world.dir.path().join("junit.xml").display().to_string();
    let chosen = ["--snapshot", "tuesday", "--snapshot", "monday"];
    let more = ["--expired-token", &expired_token, "--junit", &junit];
    let (code, verdicts, report) = run(&world, &[&chosen[..], &more].concat()).await;
    assert_eq!(code, Some(0), "{report:#}");
    let cases = all_cases().await;
    assert_eq!(verdicts.keys().cloned().collect::<BTreeSet<_>>(), names(&cases));
    for (case, (verdict, detail)) in &verdicts {
        // The mock lists extents here.
        let may = verdict == "pass" || (verdict == "skip" && case.ends_with("-fixed-size"));
        assert!(may, "{case}: {verdict}: {detail}");
    }
    assert_eq!(report["left_behind"], json!([]));
    let summary = report["summary"].as_str().expect("a summary");
    let begin = format!("{}: Kubernetes SnapshotMetadata (KEP-3314), cbt-lab ", world.driver);
    assert!(summary.starts_with(&begin) && summary.contains("all cases: pass"), "{summary}");
    let junit = std::fs::read_to_string(junit).expect("JUnit");
    assert!(junit.contains("name=\"token-forged\"") && !junit.contains("<failure"), "{junit}");

    // Without names it takes the newest two; a case alone, compared with the run before.
    let before = world.dir.path().join("before.json");
    std::fs::write(&before, report.to_string()).expect("write");
    let compare = before.display().to_string();
    let only = ["--focus", "^(alive|token-expired)$", "--compare", &compare];
    let (code, verdicts, report) = run(&world, &only).await;
    assert_eq!((code, verdicts.len(), verdicts["alive"].0.as_str()), (Some(0), 2, "pass"), "{report:#}");
    assert_eq!(verdicts["token-expired"].0, "skip");
    assert!(report["endpoint"].as_str().expect("an endpoint").ends_with("(monday, tuesday)"), "{report:#}");
    let changes = report["changes"].as_array().expect("changes");
    let expired = changes.iter().find(|change| change["name"] == "token-expired").expect("it is another");
    assert_eq!((&expired["before"], &expired["now"]), (&json!("pass"), &json!("skip")));

    // And blocks of one length: then no case is left out.
    drop(driver);
    let fixed = ["--changes", MANY, "--block-metadata-type", "fixed"];
    let _driver = mock(&world, &world.socket(), &fixed).await;
    let file = ["--expired-token", expired_token.as_str()];
    let (code, verdicts, report) = run(&world, &[&chosen[..], &file].concat()).await;
    assert_eq!(code, Some(0), "{report:#}");
    assert_eq!(verdicts.keys().cloned().collect::<BTreeSet<_>>(), names(&cases));
    for (case, (verdict, detail)) in &verdicts {
        assert_eq!(verdict, "pass", "{case}, FIXED_LENGTH: {detail}");
    }
    assert_nothing_is_left(&world).await;
    the_page_lists(&cases);
}

/// The section of the page about these cases.
fn page() -> String {
    let page = testkit::pages::read("docs/conformance.md");
    page.split_once("\n## Test a service in a cluster\n").expect("the section").1.to_owned()
}

/// The list of the page is the table.
fn the_page_lists(cases: &[Value]) {
    let page = page();
    let mut listed = BTreeMap::new();
    for row in page.lines().filter(|line| line.starts_with("| MUST |") || line.starts_with("| SHOULD |")) {
        let cells: Vec<&str> = row.trim_matches('|').split('|').map(str::trim).collect();
        let [level, section, requirement, cases] = cells[..] else { panic!("{row}") };
        for case in cases.split('`').skip(1).step_by(2) {
            let told = (level.to_owned(), section.to_owned(), requirement.to_owned());
            assert!(listed.insert(case.to_owned(), told).is_none(), "{case} is listed twice");
        }
    }
    // Those of CSI are named, and their demands are above.
    let shared = page.lines().find(|line| line.starts_with("The same as of a driver: ")).expect("the line");
    let shared: BTreeSet<&str> = shared.split('`').skip(1).step_by(2).collect();
    for case in cases {
        let text = |key: &str| case[key].as_str().expect(key).to_owned();
        if shared.contains(text("name").as_str()) {
            continue;
        }
        let told =
            listed.remove(&text("name")).unwrap_or_else(|| panic!("{} is not in the page", case["name"]));
        assert_eq!(told, (text("level"), text("section"), text("requirement")), "{case}");
    }
    assert!(listed.is_empty(), "in the page alone: {listed:?}");
    let unknown: Vec<_> = shared.iter().filter(|name| !names(cases).contains(**name)).collect();
    assert!(unknown.is_empty(), "no such cases: {unknown:?}");
}

/// What is wrong: a fault of the go-between, or a field of the SnapshotMetadataService.
#[derive(Clone, Copy, Debug)]
enum Fault {
    Between(&'static str),
    Object(&'static str, &'static str),
    /// caCert is one that has expired.
    OldAuthority,
}
use Fault::{Between, Object, OldAuthority};

/// A fault, what its cases must say of it, and the cases.
const FAULTS: &[(Fault, &str, &str)] = &[
    (Object("address", "127.0.0.1"), "fail", "object-address"),
    (Object("address", "127.0.0.1:1"), "fail", "object-address"),
    (Object("audience", ""), "fail", "object-audience client"),
    (Object("caCert", "bm9uZQ=="), "fail", "object-ca client"),
    (OldAuthority, "fail", "object-ca"),
    (Between("tls-expired"), "fail", "tls-certificate"),
    (Between("tls-other-host"), "fail", "tls-certificate client"),
    (Between("tls-other-authority"), "fail", "tls-certificate"),
    (Between("tls-old-versions"), "fail", "tls-old-versions"),
    (Between("plaintext"), "fail", "tls-plaintext"),
    (Between("refuse:call=GetMetadataAllocated+GetMetadataDelta,code=UNIMPLEMENTED"), "fail", "*-served"),
    (Between("swap-tuples"), "fail", "*-order client"),
    (Between("overlap"), "fail", "*-overlap"),
    (Between("empty-tuple"), "fail", "*-positive-size"),
    (Between("past-capacity"), "fail", "*-inside"),
    (Between("type-unknown"), "fail", "*-type-known"),
    (Between("type-changes"), "fail", "*-type-constant"),
    (Between("fixed-uneven"), "fail", "*-fixed-size"),
    (Between("capacity-changes"), "fail", "*-capacity-constant"),
    (Between("ignore-max-results"), "fail", "*-max-results"),
    (Between("ignore-offset"), "fail", "*-first-tuple *-resume *-offset-at-capacity"),
    (Between("round-offset-up"), "fail", "*-offset-complete"),
    (Between("error-becomes:from=OUT_OF_RANGE,code=OK"), "fail", "*-offset-beyond *-offset-negative"),
    (Between("negative-bound-cuts"), "fail", "*-max-results-negative"),
    (
        Between("error-becomes:from=INVALID_ARGUMENT,code=INTERNAL"),
        "fail",
        "delta-reversed argument-missing argument-no-name",
    ),
    (Between("empty-is-error"), "fail", "delta-same-snapshot"),
    (Between("token-not-needed"), "fail", "token-missing"),
    (Between("signature-not-checked"), "fail", "token-garbage token-forged token-revoked"),
    (Between("audience-not-checked"), "fail", "token-audience"),
    (Between("expiry-not-checked"), "fail", "token-expired"),
    (
        Between("rights-not-checked"),
        "fail",
        "rights-none rights-list rights-other-name rights-other-namespace",
    ),
    (Between("rights-not-checked:account=lister"), "fail", "rights-list"),
    (Between("rights-not-checked:account=other-name"), "fail", "rights-other-name"),
    (Between("rights-not-checked:account=stranger"), "fail", "rights-other-namespace"),
    (Between("refuse:account=named,code=PERMISSION_DENIED"), "fail", "rights-by-name"),
    (Between("error-becomes:from=PERMISSION_DENIED,code=INTERNAL"), "fail", "rights-base rights-none"),
    (Between("namespace-not-checked"), "fail", "snapshot-elsewhere"),
    (
        Between("error-becomes:from=NOT_FOUND,code=OK"),
        "fail",
        "snapshot-unknown snapshot-elsewhere base-unknown",
    ),
    (Between("error-becomes:from=UNAVAILABLE,code=INTERNAL"), "fail", "snapshot-unready snapshot-new"),
    (Between("deadline-is-ok"), "fail", "*-deadline"),
    (Between("lose-after-cancel"), "fail", "*-cancel"),
    (Between("lose-slow"), "fail", "*-slow-reader"),
    (Between("lose-beside"), "fail", "*-concurrent"),
    (Between("lose-when-asked-again"), "fail", "alive"),
    // What a client can live with.
    (Between("rights-not-checked:account=target-only"), "allowed", "rights-base"),
    (Between("error-becomes:from=INVALID_ARGUMENT,code=UNAUTHENTICATED"), "allowed", "token-missing"),
    (
        Between("error-becomes:from=PERMISSION_DENIED,code=UNAUTHENTICATED"),
        "allowed",
        "rights-none rights-list rights-other-name rights-other-namespace",
    ),
    (
        Between("error-becomes:from=NOT_FOUND,code=UNAVAILABLE"),
        "allowed",
        "snapshot-unknown snapshot-elsewhere",
    ),
    (
        Between("error-becomes:from=UNAVAILABLE,code=FAILED_PRECONDITION"),
        "allowed",
        "snapshot-unready snapshot-new",
    ),
    // A service without a fault, so that none of these is red by itself.
    (Between(""), "pass", "object-ca tls-certificate client token-forged rights-by-name alive"),
];

/// Worlds that the faults are shared out to.
const WORLDS: usize = 3;

pub async fn every_fault_before_the_gateway_is_seen_by_its_cases(world: World) {
    let cases = names(&all_cases().await);
    let failing = FAULTS.iter().filter(|(_, verdict, _)| *verdict == "fail");
    let named: BTreeSet<String> = failing.flat_map(|(_, _, cases)| named(cases)).collect();
    assert_eq!(named, cases, "a case that no fault is there for, or no case");
    let all = (0..WORLDS).map(|number| {
        let api = world.api.clone();
        async move {
            let world = World::new(api, &format!("faults_{number}_of_the_kubernetes_side")).await;
            some_faults_are_seen(&world, number).await
        }
    });
    let wrong = futures_util::future::join_all(all).await.concat();
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

async fn some_faults_are_seen(world: &World, number: usize) -> Vec<String> {
    let _driver = driver(world, SOME).await;
    let gateway = world.gateway(&[]).await;
    let at = |name: &str| world.dir.path().join(name).display().to_string();
    std::fs::write(at("gateway-ca"), gateway.ca()).expect("write");
    let upstream = format!("https://127.0.0.1:{}", gateway.port);
    let [upstream_ca, ca_file] = ["gateway-ca", "ca"].map(at);
    world.service("127.0.0.1:1", AUDIENCE, "YQ==").await;
    let expired = expired_token(world).await;
    let mut wrong = Vec::new();
    for (fault, verdict, cases) in FAULTS.iter().skip(number).step_by(WORLDS) {
        let between = ["faults", "--listen", "https://127.0.0.1:0", "--ca-file", &ca_file];
        let behind = ["--upstream", &upstream, "--upstream-ca", &upstream_ca];
        let chosen = match fault {
            Between("") | Object(..) | OldAuthority => Vec::new(),
            Between(faults) => vec!["--fault", faults],
        };
        let lab = Lab::start([&between[..], &behind, &chosen].concat()).await;
        let listen = lab.ready["listen"][0].as_str().and_then(|listen| listen.strip_prefix("https://"));
        let ca = STANDARD.encode(std::fs::read(&ca_file).expect("the authority"));
        let mut spec = json!({"address": listen.expect("https"), "audience": AUDIENCE, "caCert": ca});
        match fault {
            Between(_) => {}
            Object(field, value) => spec[field] = json!(value),
            OldAuthority => spec["caCert"] = json!(STANDARD.encode(old_authority())),
        }
        world.change_service(spec).await;
        let cases = named(cases);
        let focus = format!("^({})$", cases.join("|"));
        let arguments = ["--focus", &focus, "--timeout", "60", "--expired-token", &expired];
        let (code, verdicts, report) = run(world, &arguments).await;
        if code != Some(i32::from(*verdict == "fail")) || report["left_behind"] != json!([]) {
            wrong.push(format!("{fault:?}: exit status {code:?}: {report:#}"));
        }
        for case in cases {
            if verdicts.get(&case).is_none_or(|(found, _)| found != verdict) {
                wrong.push(format!("{fault:?}: {case}: not {verdict}: {:?}", verdicts.get(&case)));
            }
        }
    }
    wrong
}

fn old_authority() -> String {
    let day = std::time::Duration::from_secs(24 * 3600);
    let mut ca = CertificateParams::new(Vec::new()).expect("params");
    ca.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    ca.not_before = (SystemTime::now() - 20 * day).into();
    ca.not_after = (SystemTime::now() - 10 * day).into();
    ca.self_signed(&KeyPair::generate().expect("a key")).expect("a CA").pem()
}

pub async fn what_the_communitys_sidecar_fails_is_what_the_page_says(world: World) {
    let sidecar = program("csi-snapshot-metadata");
    let _driver = driver(&world, SOME).await;
    world.default_class().await;
    let files = Files::make(world.dir.path());
    // As it is, it makes five calls a second to the API server, and each of its clients waits for the others.
    let hurried = ["--kube-api-qps=1000", "--kube-api-burst=1000"];
    let front = Sidecar::start_with(&sidecar, &world, &world.socket(), &files, &hurried).await;
    world.service(&format!("127.0.0.1:{}", front.port), AUDIENCE, &STANDARD.encode(&files.ca)).await;
    let expired = expired_token(&world).await;
    let (code, verdicts, report) = run(&world, &["--timeout", "120", "--expired-token", &expired]).await;
    assert_eq!(code, Some(1), "{report:#}");
    // Each row of the page is a case, what comes of it, and why.
    let page = page();
    let (_, table) = page.split_once("\n### The community's sidecar\n").expect("the section");
    let rows = table.lines().filter(|line| line.starts_with("| `"));
    let told: BTreeMap<String, String> = rows
        .map(|row| {
            let cells: Vec<&str> = row.trim_matches('|').split('|').map(str::trim).collect();
            (cells[0].trim_matches('`').to_owned(), cells[1].to_owned())
        })
        .collect();
    let found: BTreeMap<String, String> = verdicts
        .iter()
        .filter(|(case, (verdict, _))| verdict != "pass" && !case.ends_with("-fixed-size"))
        .map(|(case, (verdict, _))| (case.clone(), verdict.clone()))
        .collect();
    assert_eq!(found, told, "{report:#}\n{}", front.running.log());
    assert_nothing_is_left(&world).await;
}

pub async fn an_interrupted_run_leaves_nothing(world: World) {
    let _driver = driver(&world, SOME).await;
    let _gateway = world.published_gateway().await;
    let ours = ListParams::default().labels(&format!("cbt-lab/tests={}", world.namespace));
    let homes = world.api.objects("Namespace", None);
    // While it makes its accounts, and while it asks.
    for (round, wait) in [0, 2000].into_iter().enumerate() {
        let suite = suite(&world, &world.api.kubeconfig, &[]).stdout(Stdio::null()).spawn().expect("spawn");
        eventually("it has a namespace", async || {
            homes.list(&ours).await.expect("a list").items.len() > round
        })
        .await;
        tokio::time::sleep(std::time::Duration::from_millis(wait)).await;
        testkit::signal(suite.id().expect("it runs"), nix::sys::signal::Signal::SIGINT);
        let ended = suite.wait_with_output().await.expect("wait");
        assert_eq!(ended.status.code(), Some(130), "{wait}");
        assert_nothing_is_left(&world).await;
    }
}

pub async fn what_cannot_be_tested_says_why_and_leaves_nothing(world: World) {
    let says_to = async |config: &Path, arguments: &[&str], part: &str| {
        let output = suite(&world, config, arguments).output().await.expect("run");
        let told = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{arguments:?}: {told}");
        assert!(output.stdout.is_empty() && told.contains(part), "{arguments:?}: {told}");
    };
    let says = async |arguments: &[&str], part: &str| says_to(&world.api.kubeconfig, arguments, part).await;
    says(&[], "no two VolumeSnapshots of one claim").await;
    says(&["--snapshot", "monday"], "give it twice").await;
    says(&["--snapshot", "monday", "--snapshot", "tuesday"], "monday does not exist").await;
    says(&["--snapshot", "../x", "--snapshot", "tuesday"], "is not the name of a VolumeSnapshot").await;
    says(&["--expired-token", "/no/such/file"], "/no/such/file").await;
    says(&["--focus", "nothing"], "--list").await;
    let _driver = driver(&world, SOME).await;
    says(&[], "there is no SnapshotMetadataService").await;
    let unready = json!({"snapshot": {"status": {"readyToUse": false}}});
    world.snapshot_but(&world.namespace, "unready", "disk-1", unready).await;
    says(&["--snapshot", "monday", "--snapshot", "unready"], "not ready to use").await;
    let other = json!({"content": {"spec": {"source": {"volumeHandle": "volume-2"}}}});
    world.snapshot_but(&world.namespace, "of-another", "disk-1", other).await;
    says(&["--snapshot", "monday", "--snapshot", "of-another"], "two volumes").await;
    // An account that may make nothing.
    world.service("127.0.0.1:1", AUDIENCE, "YQ==").await;
    let rules = json!([{"apiGroups": ["snapshot.storage.k8s.io"], "resources": ["volumesnapshots"], "verbs": ["get", "list"]}]);
    world.api.account(&world.namespace, "user", rules).await;
    let config = world.api.kubeconfig_of(&world.namespace, "user").await;
    says_to(&config, &[], "forbidden").await;
    assert_nothing_is_left(&world).await;
}
