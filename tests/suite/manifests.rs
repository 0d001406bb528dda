//! All manifests of deploy/ are valid for the Kubernetes version and the CRDs that hack/manifests pins, and every file is
//! used. The other `cluster_` tests read manifests with the functions here. No cluster is needed.

use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::OnceLock;

use serde_json::Value;
use testkit::pages::{blocks, read};

/// The directories that kustomize can build.
pub const KUSTOMIZATIONS: [&str; 10] = [
    "deploy/base",
    "deploy/overlays/aggregated",
    "deploy/overlays/attach",
    "deploy/overlays/community-sidecar",
    "deploy/overlays/differential",
    "deploy/overlays/distributed",
    "deploy/overlays/faults",
    "deploy/overlays/kind",
    "deploy/overlays/kind-distributed",
    "deploy/snapshot-controller/base",
];
/// Those that contain a driver: all but the last.
pub const OVERLAYS: [&str; 9] = *KUSTOMIZATIONS.first_chunk().expect("nine of ten");
pub const DRIVER: &str = "deltapath.csi.dev";

pub fn repository() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// An object, and the path in the repository that it came from.
pub struct Found {
    pub source: String,
    pub object: Value,
}

impl Found {
    pub fn kind(&self) -> &str {
        self.object["kind"].as_str().expect("a kind")
    }

    pub fn name(&self) -> &str {
        self.object["metadata"]["name"].as_str().expect("a name")
    }

    pub fn is(&self, kind: &str, name: &str) -> bool {
        self.kind() == kind && self.name() == name
    }
}

/// The files below a directory, as paths relative to the repository.
pub fn files(dir: &str, extension: &str) -> Vec<String> {
    let below = testkit::files_below(&repository().join(dir), extension).into_iter();
    below.map(|path| path.strip_prefix(repository()).expect("below").display().to_string()).collect()
}

fn plain_files() -> Vec<String> {
    [files("deploy/examples", "yaml"), files("deploy/backup", "yaml")].concat()
}

/// The checker, run in the repository.
fn check(arguments: &[impl AsRef<OsStr>]) -> Output {
    testkit::needs("the checker of the manifests");
    let deps = repository().join(".deps/manifests");
    assert!(deps.join("manifests").exists(), "needs the checker of the manifests: run `make test-deps`");
    let mut command = Command::new(deps.join("manifests"));
    command.current_dir(repository()).arg("-crds").arg(deps.join("crds"));
    command.args(arguments).output().expect("run the checker")
}

/// The checker refuses this text of a file that these arguments are of; returns its messages.
#[track_caller]
fn refused(arguments: &[&str], text: &str) -> String {
    let file = tempfile::Builder::new().suffix(".yaml").tempfile().expect("temp file");
    std::fs::write(file.path(), text).expect("write");
    let path = file.path().to_str().expect("UTF-8");
    let all: Vec<&str> = arguments.iter().map(|word| if *word == "@" { path } else { *word }).collect();
    let output = check(&all);
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(!output.status.success(), "it is not refused:\n{text}");
    said
}

/// Every object of deploy/.
pub fn objects() -> &'static [Found] {
    static OBJECTS: OnceLock<Vec<Found>> = OnceLock::new();
    let load = || {
        let paths: Vec<String> =
            KUSTOMIZATIONS.iter().map(|path| (*path).to_owned()).chain(plain_files()).collect();
        let output = check(&paths);
        let all: Vec<Value> = serde_json::from_slice(&output.stdout).expect("JSON of the checker");
        let found = |mut value: Value| Found {
            source: value["source"].as_str().expect("a source").to_owned(),
            object: value["object"].take(),
        };
        all.into_iter().map(found).collect()
    };
    OBJECTS.get_or_init(load)
}

/// The objects of one kustomization or file.
pub fn objects_of(source: &str) -> Vec<&'static Found> {
    let of: Vec<&Found> = objects().iter().filter(|found| found.source == source).collect();
    assert!(!of.is_empty(), "{source} has no objects");
    of
}

/// The pod spec of an object, if it has one.
pub fn pod_spec(object: &Value) -> Option<&Value> {
    let spec = match object["kind"].as_str() {
        Some("Pod") => &object["spec"],
        Some("StatefulSet" | "DaemonSet" | "Deployment") => &object["spec"]["template"]["spec"],
        Some("CronJob") => &object["spec"]["jobTemplate"]["spec"]["template"]["spec"],
        _ => return None,
    };
    Some(spec)
}

pub fn list(value: &Value) -> impl Iterator<Item = &Value> {
    value.as_array().into_iter().flatten()
}

pub fn strings(value: &Value) -> Vec<&str> {
    list(value).map(|item| item.as_str().expect("a string")).collect()
}

/// Containers and init containers of a pod.
pub fn containers(pod: &Value) -> Vec<&Value> {
    list(&pod["initContainers"]).chain(list(&pod["containers"])).collect()
}

/// A container of a pod, by its name.
pub fn container<'p>(pod: &'p Value, name: &str) -> Option<&'p Value> {
    containers(pod).into_iter().find(|container| container["name"] == name)
}

#[test]
fn every_manifest_is_valid_for_the_pinned_kubernetes() {
    let mut arguments = vec!["-test-driver".to_owned(), "deploy/e2e/test-driver.yaml".to_owned()];
    arguments.extend(KUSTOMIZATIONS.map(str::to_owned));
    arguments.extend(plain_files());
    let output = check(&arguments);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

/// The checker can fail: it refuses a wrong field, a wrong value and a violated rule of a CRD, each with a reason.
#[test]
fn the_checker_refuses_what_an_api_server_would() {
    let pod = read("deploy/examples/ephemeral.yaml");
    let class = read("deploy/base/snapshotclasses.yaml");
    let group = read("deploy/examples/group-snapshot.yaml");
    let driver = read("deploy/e2e/test-driver.yaml");
    let definition = read("deploy/components/differential/crd.yaml");
    let wrong = [
        ("unknown field \"spec.containerz\"", pod.replace("containers:", "containerz:")),
        ("spec.volumes[0].csi.driver", pod.replace("driver: deltapath.csi.dev", "driver: \"not a name\"")),
        (
            "volumeMounts[0].name",
            pod.replace("- name: scratch\n          mount", "- name: other\n          mount"),
        ),
        ("unknown field \"spec.scopes\"", definition.replace("scope:", "scopes:")),
        ("metadata.name", definition.replace("group: differential", "group: other")),
        ("Unsupported value: \"Keep\"", class.replace("Policy: Delete", "Policy: Keep")),
        ("unknown field parameterz", class.replace("parameters:", "parameterz:")),
        (
            "exactly one of selector",
            group.replace("selector:", "volumeGroupSnapshotContentName: x\n    selector:"),
        ),
    ];
    for (reason, text) in wrong {
        let said = refused(&["@"], &text);
        assert!(said.contains(reason), "not refused for {reason:?}:\n{said}\n{text}");
    }
    for wrong in [
        driver.replace("    topology: true", "    topologie: true"),
        driver.replace("MaxFileSize", "MaxSize"),
    ] {
        refused(&["-test-driver", "@", "deploy/examples/snapshot.yaml"], &wrong);
    }
}

/// The chart renders the same objects as the overlays, field by field; what it makes of other values is valid too, and wrong
/// values are refused. hack/manifests/chart.yaml has all of these.
#[test]
fn the_chart_renders_what_the_overlays_do() {
    let version = env!("CARGO_PKG_VERSION");
    let chart = read("deploy/chart/deltapath/Chart.yaml");
    for line in [format!("\nversion: {version}\n"), format!("\nappVersion: {version}\n")] {
        assert!(chart.contains(&line), "the chart is of another version than {version}:\n{chart}");
    }
    let output = check(&["-chart", "hack/manifests/chart.yaml"]);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

/// The overlay of docs/install.md, with the patch of docs/parameters.md.
#[test]
fn the_overlay_of_the_pages_builds() {
    let [install, parameters] = ["docs/install.md", "docs/parameters.md"].map(read);
    let overlay = [blocks(&install, "yaml"), blocks(&parameters, "yaml").split_off(1)].concat().join("\n");
    let dir = tempfile::tempdir().expect("temp dir");
    std::os::unix::fs::symlink(repository(), dir.path().join("deltapath")).expect("a link");
    let component = read("deploy/components/registry/kustomization.yaml");
    let copy = component.replace("newName: IMAGE_REGISTRY/", "newName: example.org/team/");
    for (name, content) in [("overlay", overlay), ("registry", copy)] {
        std::fs::create_dir(dir.path().join(name)).expect("mkdir");
        std::fs::write(dir.path().join(name).join("kustomization.yaml"), content).expect("write");
    }
    let output = check(&[dir.path().join("overlay").display().to_string()]);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let built = String::from_utf8_lossy(&output.stdout);
    for (word, count) in [
        ("\"example.org/team/deltapath:", 1),
        ("\"example.org/team/deltapath-gateway:", 1),
        ("\"example.org/team/deltapath-router:", 3),
        ("\"--pool-size=200Gi\"", 1),
    ] {
        assert_eq!(built.matches(word).count(), count, "{word}: {built}");
    }
    let released = read("hack/dist.sh");
    let released = released.lines().find_map(|line| line.strip_prefix("stages=(")?.strip_suffix(')'));
    let released = released.expect("images").split(' ').filter_map(|image| image.split(':').next());
    let released = released.map(|name| format!("  - {{name: {name}, newName: IMAGE_REGISTRY/{name}}}"));
    let named = component.lines().filter(|line| line.contains("name: ")).map(str::to_owned);
    assert_eq!(named.collect::<BTreeSet<_>>(), released.collect(), "the images of a release");
}

/// The comparison can fail: it names the field, the object that is missing, and the value that should be refused.
#[test]
fn a_chart_that_differs_from_an_overlay_is_found() {
    let differs = |cases: &str, reason: &str| {
        let said = refused(&["-chart", "@"], &format!("chart: deploy/chart/deltapath\n{cases}"));
        assert!(said.contains(reason), "not found for {cases}:\n{said}");
    };
    let base = "same: [{manifests: [deploy/base], values: {";
    differs(
        &format!("without: [Namespace/deltapath]\n{base}replicas: 3}}}}]"),
        "gateway.spec.replicas: 2, and 3",
    );
    differs(&format!("{base}}}}}]"), "Namespace/deltapath");
    differs("refused: [{values: {replicas: 3}, why: three}]", "the chart takes map[replicas:3]");
    differs("refused: [{values: {replicas: 0}, why: three}]", "does not say \"three\"");
    differs("valid: [{values: {}, with: [no such word]}]", "nothing says \"no such word\"");
    differs("valid: [{values: {}, without: [StorageClass]}]", "something says \"StorageClass\"");
}

/// What the chart has Prometheus and Grafana ask for, and what a page names, is in the reference's tables, which are those of the
/// programs.
#[test]
fn every_metric_that_is_named_is_one_of_the_programs() {
    let reference = read("docs/reference.md");
    let word = |c: char| !(c.is_ascii_lowercase() || c == '_');
    let chart = [("templates/monitoring.yaml", 6), ("dashboards/deltapath.json", 20)];
    let chart = chart.map(|(file, least)| (format!("deploy/chart/deltapath/{file}"), least));
    for (file, least) in
        chart.into_iter().chain(crate::cluster_docs::pages().into_iter().map(|page| (page, 0)))
    {
        let text = read(&file);
        let is_name = |name: &&str| name.starts_with("deltapath_") || name.starts_with("cbt_earlier_");
        let names: BTreeSet<&str> = text.split(word).filter(is_name).collect();
        assert!(names.len() >= least, "{file}: {names:?}");
        for name in names {
            let name = name.strip_suffix("_bucket").unwrap_or(name);
            assert!(reference.contains(&format!("`{name}`")), "{file}: no program serves {name}");
        }
    }
}

/// Grafana shows what it has no query for as an empty panel, and says nothing.
#[test]
fn every_panel_of_the_dashboard_asks_for_something() {
    let dashboard = read("deploy/chart/deltapath/dashboards/deltapath.json");
    let dashboard: Value = serde_json::from_str(&dashboard).expect("JSON");
    let (rows, panels): (Vec<&Value>, Vec<&Value>) =
        list(&dashboard["panels"]).partition(|panel| panel["type"] == "row");
    let titles: Vec<&str> = rows.iter().filter_map(|row| row["title"].as_str()).collect();
    assert_eq!(titles, ["Driver", "Gateway", "Router", "Certificates and logs"]);
    for panel in &panels {
        let asks: Vec<&str> = list(&panel["targets"]).filter_map(|target| target["expr"].as_str()).collect();
        assert!(!asks.is_empty(), "{panel}");
        assert!(asks.iter().all(|expression| expression.contains("$namespace")), "{panel}");
    }
    let ids: BTreeSet<u64> = list(&dashboard["panels"]).filter_map(|panel| panel["id"].as_u64()).collect();
    assert_eq!(ids.len(), rows.len() + panels.len(), "two panels have one id");
}

/// Each alert means that somebody is to do something, and the page says what.
#[test]
fn every_alert_has_a_section_that_says_what_to_do() {
    let rules = read("deploy/chart/deltapath/templates/monitoring.yaml");
    let page = read("docs/troubleshooting.md");
    let alerts: Vec<&str> = rules.split("- alert: ").skip(1).collect();
    assert!(alerts.len() > 5, "{alerts:?}");
    let mut named = BTreeSet::new();
    for alert in alerts {
        let name = alert.lines().next().expect("a name");
        let runbook = format!("runbook: docs/troubleshooting.md#{}\n", name.to_lowercase());
        assert!(alert.contains(&runbook), "{name} does not name its section");
        assert!(page.contains(&format!("\n### {name}\n")), "no section says what to do about {name}");
        named.insert(name);
    }
    let sections = page.lines().filter_map(|line| line.strip_prefix("### Deltapath"));
    for section in sections {
        assert!(named.contains(&*format!("Deltapath{section}")), "there is no alert Deltapath{section}");
    }
}

/// hack/alerts has series for which each alert fires, and some for which it does not, and plays them with Prometheus' own code,
/// which reads what the dashboard asks for too.
#[test]
fn every_alert_fires_when_it_is_to_and_not_otherwise() {
    testkit::needs("the player of the alerts");
    let player = repository().join(".deps/alerts/alerts");
    assert!(player.exists(), "needs the player of the alerts: run `make test-deps`");
    let play = |template: &Path| {
        let mut command = Command::new(&player);
        command.current_dir(repository()).arg(template).arg("hack/alerts/cases.yaml");
        command.arg("deploy/chart/deltapath/dashboards/deltapath.json");
        command.output().expect("run the player")
    };
    let template = "deploy/chart/deltapath/templates/monitoring.yaml";
    let output = play(Path::new(template));
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    // It can fail: here the first alert fires too late, and another at once.
    let rules = read(template).replacen("for: 15m", "for: 20m", 1).replace("ready[10m]) ==", "ready[2m]) ==");
    let wrong = tempfile::NamedTempFile::new().expect("temp file");
    std::fs::write(wrong.path(), rules).expect("write");
    let output = play(wrong.path());
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success(), "wrong alerts pass");
    for fault in ["DeltapathPoolNearlyFull does not fire for", "DeltapathNotReady fires for"] {
        assert!(said.contains(fault), "{fault:?} is not in:\n{said}");
    }
}

/// A file that nothing builds would never be checked.
#[test]
fn every_yaml_file_is_built_or_applied() {
    let mut used: BTreeSet<PathBuf> = plain_files().into_iter().map(PathBuf::from).collect();
    // The first two are checked here, those of CI by `conformance::ci`, and hack/dist.sh fills in krew's.
    let registry = "components/registry/kustomization.yaml";
    let others = ["e2e/test-driver.yaml", registry, "ci/github.yaml", "ci/prow.yaml", "krew/cbt.yaml"];
    used.extend(others.map(|file| Path::new("deploy").join(file)));
    let mut left: Vec<PathBuf> = KUSTOMIZATIONS.iter().map(PathBuf::from).collect();
    while let Some(dir) = left.pop() {
        let file = dir.join("kustomization.yaml");
        let text = read(&file.display().to_string());
        used.insert(file);
        let entries = text.lines().filter_map(|line| {
            let line = line.trim();
            line.strip_prefix("- ").or_else(|| line.strip_prefix("path: "))
        });
        for entry in entries {
            let mut path = dir.clone();
            for part in entry.split('/') {
                match part {
                    ".." => drop(path.pop()),
                    name => path.push(name),
                }
            }
            let place = repository().join(&path);
            if place.join("kustomization.yaml").exists() {
                left.push(path);
            } else if place.is_file() {
                used.insert(path);
            }
        }
    }
    // helm builds a chart's.
    for file in files("deploy", "yaml").into_iter().filter(|file| !file.starts_with("deploy/chart/")) {
        assert!(used.contains(Path::new(&file)), "nothing builds {file}");
    }
}
