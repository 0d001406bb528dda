//! The scripts that a person runs, with fake programs that only record how they were called. Checks the order of the steps,
//! a second run, and the message of each failure, but not the effect on a cluster.

use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::Path;
use std::process::Command;

use crate::manifests::repository;

/// A fake program. It appends its name and arguments to `$CALLS`, and answers as a healthy cluster would. A call that
/// contains the words of `$FAILING` fails; `$VOLUMES`, `$CRDS` and `$RELEASE` are the cluster's answers when asked for these.
const PROGRAM: &str = r#"#!/bin/bash
me=$(basename "$0")
echo "$me $*" >>"$CALLS"
case "$me $*" in
    *"${FAILING:-words of no call}"*) echo "$me: connection refused" >&2; exit 1 ;;
    *" get persistentvolumes "*) echo "${VOLUMES-}" ;;
    *" get customresourcedefinitions "*) echo "${CRDS-}" ;;
    *" get csidrivers "*) echo "${RELEASE-}" ;;
    "docker info") exit "${DOCKER_FAILS:-0}" ;;
    "kind version") echo "kind v0.33.0 go1.26 linux/amd64" ;;
    "kind get clusters") cat "$CLUSTERS" ;;
    "kind create cluster"*) cat >/dev/null; echo deltapath >>"$CLUSTERS" ;;
    "kind delete cluster"*) : >"$CLUSTERS" ;;
    *" get nodes "*) echo "node-1 Ready" ;;
    *" --filename -"*) cat >/dev/null ;;
    *" version"*) exit "${CLUSTER_FAILS:-0}" ;;
    *"get pod "*phase*) echo "${PHASE:-Succeeded}" ;;
    *logs*list-blocks*) printf '%16d %12d\n' "${DELTA:-268435456}" 1048576 ;;
    *logs*files-as-block*) echo " 53 ef" ;;
    *exec*df*) printf 'Filesystem 1K-blocks\n/dev/loop0 2000000 1 1 1%% /data\n' ;;
esac
"#;
const SYSTEM: [&str; 22] = [
    "awk", "base64", "basename", "bash", "cat", "cut", "dirname", "env", "grep", "head", "mktemp", "openssl",
    "rm", "sed", "seq", "sh", "sleep", "sort", "tail", "tr", "uname", "wc",
];

struct Stage {
    dir: tempfile::TempDir,
}

impl Stage {
    /// A directory for PATH that has `programs`, but no other of the fake programs.
    fn new(programs: &[&str]) -> Self {
        let dir = tempfile::tempdir().expect("temp dir");
        let bin = dir.path().join("bin");
        std::fs::create_dir(&bin).expect("mkdir");
        for name in SYSTEM {
            let found = ["/usr/bin", "/bin"]
                .map(|place| Path::new(place).join(name))
                .into_iter()
                .find(|path| path.exists());
            symlink(found.unwrap_or_else(|| panic!("no {name}")), bin.join(name)).expect("symlink");
        }
        for name in programs {
            std::fs::write(bin.join(name), PROGRAM).expect("write");
            std::fs::set_permissions(bin.join(name), std::fs::Permissions::from_mode(0o755)).expect("chmod");
        }
        for file in ["calls", "clusters"] {
            std::fs::write(dir.path().join(file), "").expect("write");
        }
        Stage { dir }
    }

    fn all() -> Self {
        Stage::new(&["kind", "kubectl", "docker", "make"])
    }

    /// Runs a script. Returns whether it succeeded, and its output.
    fn run(&self, script: &str, arguments: &[&str], environment: &[(&str, &str)]) -> (bool, String) {
        let place = |name: &str| self.dir.path().join(name);
        let output = Command::new(repository().join(script))
            .args(arguments)
            .env_clear()
            .env("PATH", place("bin"))
            .env("CALLS", place("calls"))
            .env("CLUSTERS", place("clusters"))
            .envs(environment.iter().copied())
            .output()
            .expect("run");
        (output.status.success(), testkit::said(&output))
    }

    /// Runs a script that must succeed; its output.
    #[track_caller]
    fn succeeds(&self, script: &str, arguments: &[&str], environment: &[(&str, &str)]) -> String {
        let (ok, said) = self.run(script, arguments, environment);
        assert!(ok, "{script} {arguments:?}: {said}");
        said
    }

    /// Runs a script that must fail and say why.
    #[track_caller]
    fn fails(&self, script: &str, arguments: &[&str], environment: &[(&str, &str)], why: &str) {
        let (ok, said) = self.run(script, arguments, environment);
        assert!(!ok && said.contains(why), "{script} {arguments:?}: {said}");
    }

    /// The calls since the last time.
    fn calls(&self) -> String {
        let path = self.dir.path().join("calls");
        let calls = std::fs::read_to_string(&path).expect("calls");
        std::fs::write(path, "").expect("write");
        calls
    }
}

#[track_caller]
fn assert_in_order(calls: &str, steps: &[&str]) {
    let mut rest = calls;
    for step in steps {
        let at =
            rest.find(step).unwrap_or_else(|| panic!("{step:?} is missing or comes too early in:\n{calls}"));
        rest = &rest[at + step.len()..];
    }
}

#[test]
fn kind_up_makes_a_cluster_and_can_be_run_again() {
    let stage = Stage::all();
    let said = stage.succeeds("hack/kind-up.sh", &[], &[]);
    let steps = [
        "kind create cluster --name deltapath --image kindest/node:v1.37.0@sha256:",
        "image gateway-image router-image earlier-image backup-example-image cbt-backup-image",
        "kind load docker-image --name deltapath deltapath:",
        "kind load docker-image --name deltapath deltapath-gateway:",
        "kind load docker-image --name deltapath deltapath-router:",
        "kind load docker-image --name deltapath cbt-earlier:",
        "kind load docker-image --name deltapath backup-example:",
        "kind load docker-image --name deltapath cbt-backup:",
        "external-snapshotter/client/config/crd?ref=v8.7.0",
        "cbt.storage.k8s.io_snapshotmetadataservices.yaml",
        "deploy/snapshot-controller/base",
        "deploy/overlays/kind",
        "rollout status --namespace deltapath statefulset/deltapath-plugin",
        "rollout status --namespace deltapath deployment/deltapath-gateway",
    ];
    assert_in_order(&stage.calls(), &steps);
    // Its last lines are a first backup.
    let last: Vec<&str> = said.lines().rev().take(3).collect();
    assert!(last.iter().all(|line| line.starts_with("kubectl --context kind-deltapath ")), "{said}");
    let example = repository().join("deploy/backup/try.yaml");
    assert!(last[2].contains(&format!(" -f {}", example.display())) && example.exists(), "{said}");
    assert!(last[0].ends_with(" logs try-backup"), "{said}");
    let said = stage.succeeds("hack/kind-up.sh", &["--no-build"], &[]);
    assert!(said.contains("is there already"), "{said}");
    let calls = stage.calls();
    assert!(!calls.contains("create cluster") && !calls.contains("make "), "{calls}");
    assert_in_order(&calls, &steps[2..]);
    stage.fails("hack/install.sh", &["--distributed", "--chart"], &[], "helm is missing");
    stage.calls();
    let helm = Stage::new(&["kubectl", "helm"]);
    helm.succeeds("hack/install.sh", &["--distributed", "--chart"], &[]);
    let calls = helm.calls();
    let chart =
        "deploy/chart/deltapath --kube-context kind-deltapath --namespace deltapath --create-namespace";
    assert_in_order(&calls, &["deploy/snapshot-controller/base", chart, "mode=distributed", "daemonset/"]);
    assert!(!calls.contains("deploy/overlays"), "{calls}");
    helm.fails(
        "hack/install.sh",
        &["--overlay", "faults", "--chart"],
        &[],
        "--chart is not for the overlay faults",
    );
    stage.fails("hack/kind-up.sh", &["--distributed"], &[], "has 1 nodes and 3 are asked for");

    stage.succeeds("hack/kind-down.sh", &[], &[]);
    assert_in_order(&stage.calls(), &["delete --kustomize", "kind delete cluster --name deltapath"]);
    let said = stage.succeeds("hack/kind-down.sh", &[], &[]);
    assert!(said.contains("there is no cluster deltapath"), "{said}");
}

#[test]
fn every_script_says_why_it_fails() {
    let bare = Stage::new(&[]);
    for script in ["hack/kind-up.sh", "hack/kind-down.sh", "hack/install.sh", "hack/e2e.sh", "hack/remove.sh"]
    {
        let (ok, said) = bare.run(script, &[], &[]);
        assert!(!ok && said.contains("is missing: install it"), "{script}: {said}");
        let (ok, said) = bare.run(script, &["--nonsense"], &[]);
        let known = said.contains("unknown argument --nonsense") || said.contains("takes no arguments");
        assert!(!ok && known, "{script}: {said}");
    }
    let stage = Stage::all();
    stage.fails("hack/kind-up.sh", &[], &[("DOCKER_FAILS", "1")], "docker does not answer");
    stage.fails(
        "hack/e2e.sh",
        &[],
        &[("CLUSTER_FAILS", "1")],
        "no cluster answers at kind-deltapath: hack/kind-up.sh makes one",
    );
}

/// With the programs of this machine, but for those in a directory before them.
#[test]
fn a_cluster_that_cannot_be_made_says_why() {
    let dir = tempfile::tempdir().expect("temp dir");
    let bin = dir.path().join("bin");
    std::fs::create_dir(&bin).expect("mkdir");
    let path = format!("{}:{}", bin.display(), std::env::var("PATH").expect("PATH"));
    let run = |cluster: &str, arguments: &[&str]| {
        let output = Command::new(repository().join("hack/cluster.sh"))
            .args(arguments)
            .env("PATH", &path)
            .env("CLUSTER", cluster)
            .env("DELTAPATH_CLUSTERS", dir.path().join("clusters"))
            .env("DELTAPATH_CACHE", dir.path().join("cache"))
            .output()
            .expect("run");
        assert!(!output.status.success(), "{arguments:?} succeeds");
        String::from_utf8_lossy(&output.stderr).into_owned()
    };
    let user = |number: &str| {
        std::fs::write(bin.join("id"), format!("#!/bin/sh\necho {number}\n")).expect("write");
        std::fs::set_permissions(bin.join("id"), std::fs::Permissions::from_mode(0o755)).expect("chmod");
    };
    user("0");
    for (cluster, arguments, why) in [
        ("Test", &["up"][..], "CLUSTER=Test: a name is 1 to 32 lower-case letters"),
        ("test", &["up", "--nodes", "4"], "--nodes 4: 1, 2 or 3"),
        ("test", &["exec", "true"], "no cluster test runs: hack/cluster.sh up makes one"),
        ("test", &["load", "archive"], "no cluster test runs"),
        ("test", &["off", "2"], "no cluster test runs"),
        ("test", &["raise"], "unknown argument raise"),
    ] {
        let said = run(cluster, arguments);
        assert!(said.contains(why), "{arguments:?}: {said}");
    }
    // Whichever is the first that this machine lacks: no program is built in that cache.
    let said = run("test", &["up"]);
    let reasons = ["is missing: install it", "the CNI plugins are missing", "make cluster-deps builds them"];
    assert!(reasons.iter().any(|why| said.contains(why)), "{said}");
    user("1000");
    let said = run("test", &["up"]);
    assert!(said.contains("needs root, for namespaces and mounts"), "{said}");
    assert!(!dir.path().join("clusters").exists(), "something is left");
}

#[test]
fn the_smoke_test_runs_every_example_and_fails_on_a_wrong_delta() {
    let stage = Stage::all();
    let said = stage.succeeds("hack/e2e.sh", &[], &[]);
    assert!(said.contains("all examples work"), "{said}");
    let calls = stage.calls();
    for example in crate::manifests::files("deploy/examples", "yaml") {
        assert!(
            calls.contains(&format!("apply --filename {}", repository().join(&example).display())),
            "{example} is not run"
        );
    }
    assert_in_order(
        &calls,
        &[
            "volumesnapshot/block-1",
            "seek=256",
            "volumesnapshot/block-2",
            "list-blocks",
            "pod block-2-backup",
        ],
    );
    stage.fails(
        "hack/e2e.sh",
        &[],
        &[("DELTA", "0")],
        "the delta is to be one extent of 1048576 bytes at 268435456",
    );
    stage.fails("hack/e2e.sh", &[], &[("PHASE", "Failed")], "the pod list-blocks failed");
}

#[test]
fn remove_refuses_while_there_are_volumes() {
    let stage = Stage::all();
    stage.fails("hack/remove.sh", &[], &[("VOLUMES", "pv-1")], "there are volumes of deltapath still:\npv-1");
    assert!(!stage.calls().contains(" delete "), "something was deleted");
}

/// A failed answer must not be taken for a cluster without volumes. Each question fails once.
#[test]
fn remove_deletes_nothing_where_kubectl_fails() {
    let stage = Stage::all();
    let asked = [
        "get persistentvolumes",
        "get customresourcedefinitions volumesnapshotcontents.",
        "get volumesnapshotcontents.",
        "get customresourcedefinitions volumegroupsnapshotcontents.",
        "get volumegroupsnapshotcontents.",
        "get pods --all-namespaces",
        "get csidrivers deltapath.csi.dev",
    ];
    for failing in asked {
        for arguments in [&[] as &[&str], &["--volumes"]] {
            let (ok, said) =
                stage.run("hack/remove.sh", arguments, &[("FAILING", failing), ("CRDS", "there")]);
            let why = said.contains("connection refused") && said.contains("kubectl fails");
            assert!(!ok && why, "{failing} {arguments:?}: {said}");
            let calls = stage.calls();
            assert!(
                calls.contains(failing) && !calls.contains(" delete "),
                "{failing} {arguments:?}: {calls}"
            );
        }
    }
    let failing = [("FAILING", "get pods --namespace space"), ("VOLUMES", "space claim")];
    stage.fails("hack/remove.sh", &["--volumes"], &failing, "kubectl fails");
    let calls = stage.calls();
    assert!(calls.contains("get pods --namespace space") && !calls.contains(" delete "), "{calls}");
}

/// What helm installed helm uninstalls, after the questions; without helm nothing is deleted.
#[test]
fn remove_uninstalls_the_chart() {
    let stage = Stage::new(&["kubectl", "helm"]);
    stage.succeeds("hack/remove.sh", &["--context", "there"], &[("RELEASE", "deltapath deltapath")]);
    let calls = stage.calls();
    let uninstall = "helm uninstall deltapath --namespace deltapath --kube-context there --wait";
    assert_in_order(&calls, &["get pods --all-namespaces", uninstall, " delete --kustomize"]);
    assert_eq!(calls.matches("helm uninstall").count(), 1, "{calls}");
    // The namespace of the manifests may be somebody else's.
    let stage = Stage::new(&["kubectl", "helm"]);
    stage.succeeds("hack/remove.sh", &[], &[("RELEASE", "storage cbt")]);
    let calls = stage.calls();
    let uninstall = "helm uninstall cbt --namespace storage --wait";
    assert_in_order(&calls, &["get pods --all-namespaces", uninstall, " delete snapshotmetadataservices"]);
    assert!(!calls.contains(" delete --kustomize"), "{calls}");
    let stage = Stage::all();
    stage.fails("hack/remove.sh", &[], &[("RELEASE", "deltapath deltapath")], "helm is missing");
    assert!(!stage.calls().contains(" delete "), "something was deleted");
}

/// Many clusters have no group snapshots. Without the CRD the script must not ask for them.
#[test]
fn remove_works_where_a_crd_is_missing() {
    let stage = Stage::all();
    for arguments in [&[] as &[&str], &["--volumes"]] {
        stage.succeeds("hack/remove.sh", arguments, &[]);
        let calls = stage.calls();
        assert!(!calls.contains("get volumegroupsnapshotcontents"), "{calls}");
        assert_in_order(
            &calls,
            &["get customresourcedefinitions volumegroupsnapshotcontents.", " delete --kustomize"],
        );
    }
}

/// So `--version` names the commit and its date.
#[test]
fn make_build_tells_the_compiler_the_commit() {
    let said = |program: &str, arguments: &[&str]| {
        let mut command = Command::new(program);
        let output = command.args(arguments).current_dir(repository()).env_remove("MAKEFLAGS").output();
        String::from_utf8(output.expect(program).stdout).expect("UTF-8")
    };
    let commit = said("git", &["log", "-1", "--abbrev=12", "--format=%h %cs"]);
    assert!(!commit.is_empty(), "git tells no commit");
    let built = said("make", &["--silent", "build", "CARGO=printenv DELTAPATH_COMMIT #"]);
    assert_eq!(built.trim_end(), commit.trim_end());
}
