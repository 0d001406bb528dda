//! Promise: `cbt-backup run` takes its snapshot, its claim and its pod away again, however it ends, and what the next backup
//! needs is there. There is no kubelet and no controller: the test plays the snapshot controller, and runs what the pod would.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Output};
use std::time::{Duration, Instant};

use kube::api::{ListParams, Patch, PatchParams};
use nix::sys::signal::Signal;
use serde_json::{Value, json};
use testkit::scene;

use crate::backup_tool::{arg, ended, first_gateway, image, output, restores, text, tool};
use crate::driver::{Driver, MESSAGES, TUPLES};
use crate::world::World;

/// The account of deploy/backup/cronjob.yaml with its rights and no others, in this namespace: its kubeconfig.
async fn account_of_the_manifest(world: &World) -> PathBuf {
    let World { api, driver, namespace, .. } = world;
    scene::account_of(api, driver, namespace, "cbt-backup", "deploy/backup/cronjob.yaml").await
}

async fn claim(world: &World, name: &str, mode: &str) {
    let ns = &world.namespace;
    let volume = format!("{ns}-{name}");
    let nodes = json!({"nodeSelectorTerms": [{"matchExpressions": [{"key": "zone", "operator": "In", "values": ["a"]}]}]});
    world
        .api
        .make(json!({
            "apiVersion": "v1", "kind": "PersistentVolume", "metadata": {"name": volume},
            "spec": {
                "capacity": {"storage": "1Ti"}, "accessModes": ["ReadWriteOnce"], "volumeMode": mode,
                "storageClassName": "fast", "nodeAffinity": {"required": nodes},
                "csi": {"driver": world.driver, "volumeHandle": "volume-1"},
            },
        }))
        .await;
    world
        .api
        .make(json!({
            "apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": name, "namespace": ns},
            "spec": {
                "accessModes": ["ReadWriteOnce"], "volumeMode": mode, "storageClassName": "fast",
                "volumeName": volume, "resources": {"requests": {"storage": "1Ti"}},
            },
            "status": {"phase": "Bound", "accessModes": ["ReadWriteOnce"], "capacity": {"storage": "1Ti"}},
        }))
        .await;
}

/// What the cluster does, once: snapshots become ready, pods run, and claims that are deleted go.
struct Cluster<'w> {
    world: &'w World,
    account: PathBuf,
    has_controller: bool,
    has_kubelet: bool,
    snapshots: usize,
    /// The VolumeSnapshotContent of each VolumeSnapshot that was seen.
    contents: Vec<(String, String)>,
    /// The objects of the temporary claims and pods that were seen.
    claims: Vec<Value>,
    pods: Vec<Value>,
}

impl<'w> Cluster<'w> {
    fn new(world: &'w World, account: &Path) -> Self {
        Cluster {
            world,
            account: account.to_owned(),
            has_controller: true,
            has_kubelet: true,
            snapshots: 0,
            contents: Vec::new(),
            claims: Vec::new(),
            pods: Vec::new(),
        }
    }

    async fn list(&self, kind: &str) -> Vec<Value> {
        let objects = self.world.api.objects(kind, Some(&self.world.namespace));
        let list = objects.list(&ListParams::default()).await.expect("list");
        list.items.into_iter().map(|object| serde_json::to_value(object).expect("JSON")).collect()
    }

    async fn status(&self, kind: &str, name: &str, status: Value) {
        let objects = self.world.api.objects(kind, Some(&self.world.namespace));
        let patch = Patch::Merge(json!({"status": status}));
        // It may be gone already.
        let _ = objects.patch_status(name, &PatchParams::default(), &patch).await;
    }

    async fn step(&mut self) {
        let ns = self.world.namespace.clone();
        let there = self.names("VolumeSnapshot").await;
        for (_, content) in self.contents.extract_if(.., |(snapshot, _)| !there.contains(snapshot)) {
            self.world.api.delete("VolumeSnapshotContent", None, &content).await;
        }
        for snapshot in self.list("VolumeSnapshot").await {
            if !snapshot["status"].is_null() || !self.has_controller {
                continue;
            }
            assert_eq!(snapshot["spec"]["source"]["persistentVolumeClaimName"], "data");
            let name = snapshot["metadata"]["name"].as_str().expect("a name");
            self.snapshots += 1;
            let content = format!("content-{ns}-{name}");
            self.world
                .api
                .make(json!({
                    "apiVersion": "snapshot.storage.k8s.io/v1", "kind": "VolumeSnapshotContent",
                    "metadata": {"name": content},
                    "spec": {
                        "driver": self.world.driver, "deletionPolicy": "Delete", "source": {"volumeHandle": "volume-1"},
                        "volumeSnapshotRef": {"name": name, "namespace": ns}, "sourceVolumeMode": "Filesystem",
                    },
                    "status": {"readyToUse": true, "snapshotHandle": format!("plain-{}", self.snapshots)},
                }))
                .await;
            self.contents.push((name.to_owned(), content.clone()));
            let status =
                json!({"readyToUse": true, "boundVolumeSnapshotContentName": content, "restoreSize": "1Ti"});
            self.status("VolumeSnapshot", name, status).await;
        }
        for claim in self.list("PersistentVolumeClaim").await {
            let name = claim["metadata"]["name"].as_str().expect("a name");
            if name == "cbt-backup-data"
                && !self.claims.iter().any(|seen| seen["metadata"]["uid"] == claim["metadata"]["uid"])
            {
                self.claims.push(claim.clone());
            }
            // The controller that protects claims in use lets go of them.
            if !claim["metadata"]["deletionTimestamp"].is_null() {
                let claims = self.world.api.objects("PersistentVolumeClaim", Some(&ns));
                let patch = Patch::Merge(json!({"metadata": {"finalizers": null}}));
                let _ = claims.patch(name, &PatchParams::default(), &patch).await;
            }
        }
        for pod in self.list("Pod").await {
            let is_new = !self.pods.iter().any(|seen| seen["metadata"]["uid"] == pod["metadata"]["uid"]);
            if is_new {
                self.pods.push(pod.clone());
                if self.has_kubelet {
                    self.start(&pod).await;
                }
            }
        }
    }

    /// Runs what the pod's container would.
    async fn start(&self, pod: &Value) {
        let name = pod["metadata"]["name"].as_str().expect("a name");
        let container = &pod["spec"]["containers"][0];
        let report = self.world.dir.path().join("report");
        let _ = std::fs::remove_file(&report);
        let image = self.world.dir.path().join("image");
        let arguments: Vec<String> = container["args"]
            .as_array()
            .expect("arguments")
            .iter()
            .map(|argument| match argument.as_str().expect("a text") {
                device if device == container["volumeDevices"][0]["devicePath"] => arg(&image).to_owned(),
                file if file == container["terminationMessagePath"] => arg(&report).to_owned(),
                other => other.to_owned(),
            })
            .collect();
        let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
        self.status("Pod", name, json!({"phase": "Running"})).await;
        let output = output(tool(self.world, &self.account, &arguments)).await;
        let said = match output.status.success() {
            true => std::fs::read_to_string(&report).expect("a report"),
            false => text(&output.stderr),
        };
        let phase = if output.status.success() { "Succeeded" } else { "Failed" };
        let ended = json!({"exitCode": output.status.code().expect("a code"), "message": said});
        let container = json!({
            "name": "backup", "image": "cbt-backup", "imageID": "", "ready": false, "restartCount": 0,
            "state": {"terminated": ended},
        });
        self.status("Pod", name, json!({"phase": phase, "containerStatuses": [container]})).await;
    }

    async fn play(&mut self, mut child: Child) -> Output {
        let deadline = Instant::now() + Duration::from_secs(120);
        while child.try_wait().expect("wait").is_none() {
            assert!(Instant::now() < deadline, "it does not end");
            self.step().await;
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        ended(child).await
    }

    /// The same, and what it says that it has made.
    async fn makes(&mut self, child: Child) -> Value {
        let output = self.play(child).await;
        assert!(output.status.success(), "{}", text(&output.stderr));
        serde_json::from_slice(&output.stdout).expect("JSON")
    }

    /// The names of what there is of a kind, but for the claim itself.
    async fn names(&self, kind: &str) -> Vec<String> {
        let names = self.list(kind).await.into_iter();
        let names = names.map(|object| object["metadata"]["name"].as_str().expect("a name").to_owned());
        names.filter(|name| name != "data").collect()
    }

    async fn is_clean(&self) {
        for kind in ["Pod", "PersistentVolumeClaim", "VolumeSnapshot"] {
            assert_eq!(self.names(kind).await, [""; 0], "a {kind} is left");
        }
    }
}

fn start(world: &World, kubeconfig: &Path, more: &[&str]) -> Child {
    // The claim of the repository is its directory: where the pod has it is not looked at.
    let run = ["run", "--pvc", "data", "--repository-claim", "backups", "--output", "json", "--namespace"];
    let mut command = tool(world, kubeconfig, &run);
    command.arg(&world.namespace).args(more).spawn().expect("start cbt-backup")
}

pub async fn run_makes_a_backup_and_leaves_nothing(world: World) {
    let _driver = Driver::start(&world.driver, &world.socket());
    let _gateway = first_gateway(&world).await;
    let account = account_of_the_manifest(&world).await;
    image(&world);
    claim(&world, "data", "Filesystem").await;
    // The object of this CRD cannot say that deltas can do without the snapshot: the last one stays.
    let mut cluster = Cluster::new(&world, &account);
    let made = cluster.makes(start(&world, &account, &["--", "--limit-rate", "1Gi"])).await;
    let volume = format!("{}/data", world.namespace);
    assert_eq!((&made["kind"], &made["snapshot"]), (&json!("full"), &json!("plain-1")));
    assert_eq!(made["volume"], volume);
    restores(&world, &account, MESSAGES).await;
    let (claim, pod) = (&cluster.claims[0]["spec"], &cluster.pods[0]["spec"]);
    assert_eq!((&claim["volumeMode"], &claim["accessModes"]), (&json!("Block"), &json!(["ReadOnlyMany"])));
    assert_eq!(claim["storageClassName"], "fast");
    assert_eq!(claim["resources"]["requests"]["storage"], "1Ti");
    assert_eq!(claim["dataSource"]["kind"], "VolumeSnapshot");
    let terms = &pod["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"];
    assert_eq!(terms[0]["matchExpressions"][0]["values"], json!(["a"]), "it runs where the volume is");
    assert!(pod["containers"][0]["args"].as_array().is_some_and(|all| all.contains(&json!("--limit-rate"))));
    assert_eq!(cluster.names("Pod").await, [""; 0]);
    assert_eq!(cluster.names("PersistentVolumeClaim").await, [""; 0]);
    let first = cluster.names("VolumeSnapshot").await;
    assert_eq!(first.len(), 1, "the base stays: {first:?}");
    let contents = world.api.objects("VolumeSnapshotContent", None);
    let content =
        contents.get(&format!("content-{}-{}", world.namespace, first[0])).await.expect("a content");
    let annotations = content.metadata.annotations.unwrap_or_default();
    assert_eq!(annotations["snapshot.storage.kubernetes.io/allow-volume-mode-change"], "true");

    // Names of snapshots are by the second.
    tokio::time::sleep(Duration::from_millis(1100)).await;
    let made = cluster.makes(start(&world, &account, &[])).await;
    assert_eq!((&made["kind"], &made["snapshot"]), (&json!("incremental"), &json!("plain-2")));
    let second = cluster.names("VolumeSnapshot").await;
    assert!(second.len() == 1 && second != first, "the base before goes: {second:?}");
    // A clean-up leaves the base.
    let output = ended(start(&world, &account, &["--clean-up"])).await;
    assert!(output.status.success(), "{}", text(&output.stderr));
    assert_eq!(cluster.names("VolumeSnapshot").await, second);
}

/// `kubectl cbt` is the program under the name `kubectl-cbt`.
pub async fn a_plugin_of_kubectl_takes_its_flags(world: World) {
    let _driver = Driver::start(&world.driver, &world.socket());
    let _gateway = first_gateway(&world).await;
    let account = account_of_the_manifest(&world).await;
    image(&world);
    claim(&world, "data", "Block").await;
    // The current context leads nowhere, another one to the cluster and to the namespace.
    let mut config: Value =
        serde_json::from_slice(&std::fs::read(&account).expect("read")).expect("a kubeconfig in JSON");
    let mut here = config["contexts"][0].clone();
    here["name"] = json!("here");
    here["context"]["namespace"] = json!(world.namespace);
    let nowhere =
        json!({"name": "nowhere", "context": {"cluster": "nowhere", "user": here["context"]["user"]}});
    config["clusters"]
        .as_array_mut()
        .expect("clusters")
        .push(json!({"name": "nowhere", "cluster": {"server": "https://127.0.0.1:1"}}));
    (config["contexts"], config["current-context"]) = (json!([here, nowhere]), json!("nowhere"));
    let kubeconfig = world.dir.path().join("two-contexts");
    std::fs::write(&kubeconfig, config.to_string()).expect("write");
    let plugin = |line: &str, more: &[&str]| {
        let mut command = tool(&world, Path::new("/none"), &[]);
        command.arg0("kubectl-cbt").args(line.split(' ')).args(more).spawn().expect("start kubectl-cbt")
    };
    let run = "run --pvc data --repository-claim backups --output json --patience 2s --kubeconfig";
    let mut cluster = Cluster::new(&world, &account);
    for (more, words) in [
        (&[][..], "Connection refused"),
        (&["--context", "other"], "no way to the Kubernetes API server"),
        (&["--context", "here", "-n", "other"], "get PersistentVolumeClaim data"),
    ] {
        let output = ended(plugin(run, &[&[arg(&kubeconfig)], more].concat())).await;
        let said = text(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{more:?}: {said}");
        assert!(said.contains(words), "{more:?}: {said}");
    }
    let output = cluster.play(plugin(run, &[arg(&kubeconfig), "--context", "here", "--quiet"])).await;
    assert!(output.status.success() && output.stderr.is_empty(), "{}", text(&output.stderr));
    let made: Value = serde_json::from_slice(&output.stdout).expect("JSON");
    assert_eq!(made["volume"], json!(format!("{}/data", world.namespace)));
    let output = ended(plugin("list --output json", &[])).await;
    let list: Value = serde_json::from_slice(&output.stdout).expect("JSON");
    assert_eq!(list[0]["id"], made["id"], "{list}");
}

pub async fn run_cleans_up_after_it_is_interrupted(world: World) {
    let account = account_of_the_manifest(&world).await;
    claim(&world, "data", "Block").await;
    for (what, has_controller, reached) in [
        ("while the snapshot is not ready", false, "VolumeSnapshot"),
        ("while the pod does not start", true, "Pod"),
    ] {
        let mut cluster = Cluster { has_controller, has_kubelet: false, ..Cluster::new(&world, &account) };
        let child = start(&world, &account, &[]);
        while cluster.names(reached).await.is_empty() {
            cluster.step().await;
        }
        testkit::signal(child.id(), Signal::SIGINT);
        let output = cluster.play(child).await;
        assert_eq!(output.status.code(), Some(130), "{what}: {}", text(&output.stderr));
        cluster.is_clean().await;
        tokio::time::sleep(Duration::from_millis(1100)).await;
    }
}

pub async fn run_says_what_is_missing_and_leaves_nothing(world: World) {
    let account = account_of_the_manifest(&world).await;
    let mut cluster = Cluster { has_kubelet: false, ..Cluster::new(&world, &account) };
    let fails = async |cluster: &mut Cluster<'_>, more: &[&str], words: &str| {
        let output = cluster.play(start(&world, &account, more)).await;
        let said = text(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{said}");
        assert!(said.contains(words), "{said}, and not {words}");
        tokio::time::sleep(Duration::from_millis(1100)).await;
    };
    fails(&mut cluster, &[], "get PersistentVolumeClaim data").await;
    claim(&world, "data", "Block").await;
    fails(&mut cluster, &["--patience", "1"], "pod cbt-backup-data does not start in 1 s").await;
    cluster.is_clean().await;
    cluster.has_controller = false;
    fails(&mut cluster, &["--patience", "1"], "is not ready after 1 s: the snapshot controller says nothing")
        .await;
    cluster.is_clean().await;
    // A run that was killed has left its pod: nothing of it is touched before somebody says so.
    cluster.has_controller = true;
    let mut child = start(&world, &account, &[]);
    while cluster.names("Pod").await.is_empty() {
        cluster.step().await;
    }
    child.kill().expect("kill");
    child.wait().expect("wait");
    fails(&mut cluster, &[], "another run of this claim works").await;
    assert_eq!(cluster.names("Pod").await, ["cbt-backup-data"]);
    let output = cluster.play(start(&world, &account, &["--clean-up"])).await;
    assert!(output.status.success(), "{}", text(&output.stderr));
    cluster.is_clean().await;
    // A pod that fails: what it said.
    let mut cluster = Cluster::new(&world, &account);
    fails(&mut cluster, &[], "failed with exit code 1").await;
    cluster.is_clean().await;
}

pub async fn run_needs_no_snapshot_where_its_handle_is_enough(world: World) {
    let driver = Driver::start(&world.driver, &world.socket());
    let _gateway = first_gateway(&world).await;
    let account = account_of_the_manifest(&world).await;
    let device = image(&world);
    claim(&world, "data", "Block").await;
    world.change_service(json!({"requireBaseSnapshotForDelta": false})).await;
    let mut cluster = Cluster::new(&world, &account);
    let made = cluster.makes(start(&world, &account, &[])).await;
    assert_eq!((&made["kind"], &made["snapshot"]), (&json!("full"), &json!("plain-1")));
    restores(&world, &account, MESSAGES).await;
    cluster.step().await;
    cluster.is_clean().await;
    assert!(cluster.contents.is_empty(), "the content goes with its snapshot: {:?}", cluster.contents);

    // Every block that the driver lists has changed. The handle alone is left of the first snapshot.
    let file = File::options().write(true).open(&device).expect("open");
    for number in 0..(MESSAGES * TUPLES) as u64 {
        file.write_all_at(&[(number % 253) as u8 + 3; 4096], number * 8192).expect("write");
    }
    tokio::time::sleep(Duration::from_millis(1100)).await;
    let made = cluster.makes(start(&world, &account, &[])).await;
    assert_eq!((&made["kind"], &made["snapshot"]), (&json!("incremental"), &json!("plain-2")), "{made}");
    let delta = driver.seen.deltas.lock().pop().expect("a delta");
    assert_eq!((delta.base_snapshot_id.as_str(), delta.target_snapshot_id.as_str()), ("plain-1", "plain-2"));
    restores(&world, &account, MESSAGES).await;
    cluster.step().await;
    cluster.is_clean().await;
}
