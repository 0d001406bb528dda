//! What a run makes: the snapshot, the temporary claim of it, and the pod that reads that. And how all that is known: a name
//! says nothing, since a user may have given it to something else.

use kube::api::DynamicObject;
use serde_json::{Value, json};

use super::{OF_CLAIM, Run};
use crate::error::{Error, refused};

pub const MANAGED_BY: &str = "app.kubernetes.io/managed-by";
pub const OURS: &str = "cbt-backup";
/// Says which run has made an object.
pub const OF_RUN: &str = "cbt-backup/run";

/// Where the pod has the source, the repository's claim, and its report.
const DEVICE: &str = "/dev/source";
pub const CLAIMED: &str = "/repository";
const REPORT: &str = "/dev/termination-log";

/// Whether a run has made it, this one or another.
pub fn is_managed(object: &DynamicObject) -> bool {
    object.metadata.labels.as_ref().and_then(|labels| labels.get(MANAGED_BY)).is_some_and(|by| by == OURS)
}

pub fn not_of_a_run() -> String {
    format!("no run has made it, since it has no label {MANAGED_BY}={OURS}")
}

/// What is in the way of a run.
pub fn another(kind: &str, there: &DynamicObject) -> Error {
    let what = format!("{kind} {}", there.metadata.name.as_deref().unwrap_or_default());
    match is_managed(there) {
        true => Error::AnotherRun { what },
        false => refused!(
            "{what} is there already, and {}. A backup of this claim needs the name: delete that object if it is not needed",
            not_of_a_run()
        ),
    }
}

impl Run<'_> {
    /// Whether this run has made it.
    pub(super) fn has_made(&self, object: &DynamicObject) -> bool {
        object.metadata.annotations.as_ref().and_then(|all| all.get(OF_RUN)) == Some(&self.id)
    }

    pub(super) fn snapshot(&self, snapshot: &str) -> Value {
        let class = &self.arguments.snapshot_class;
        let source = json!({"persistentVolumeClaimName": self.arguments.pvc});
        let mut spec = json!({"source": source});
        if let Some(class) = class {
            spec["volumeSnapshotClassName"] = json!(class);
        }
        let mut metadata =
            json!({"name": snapshot, "namespace": self.namespace, "labels": {MANAGED_BY: OURS}});
        if !self.arguments.keep_snapshot {
            metadata["annotations"] = json!({OF_CLAIM: self.arguments.pvc});
        }
        json!({
            "apiVersion": "snapshot.storage.k8s.io/v1", "kind": "VolumeSnapshot", "metadata": metadata, "spec": spec,
        })
    }

    pub(super) fn source_claim(&self, snapshot: &str, size: &str, class: Option<&str>) -> Value {
        let source =
            json!({"apiGroup": "snapshot.storage.k8s.io", "kind": "VolumeSnapshot", "name": snapshot});
        json!({
            "apiVersion": "v1", "kind": "PersistentVolumeClaim",
            "metadata": {"name": self.name, "namespace": self.namespace, "labels": {MANAGED_BY: OURS}},
            "spec": {
                "storageClassName": class, "volumeMode": "Block", "accessModes": ["ReadOnlyMany"],
                "dataSource": source, "resources": {"requests": {"storage": size}},
            },
        })
    }

    /// `continues` the backup of a pod that was killed.
    pub(super) fn pod(
        &self,
        snapshot: &str,
        repository: &str,
        placement: Option<Value>,
        continues: bool,
    ) -> Value {
        let volume = self.arguments.volume.clone();
        let volume = volume.unwrap_or_else(|| format!("{}/{}", self.namespace, self.arguments.pvc));
        let wish = if self.arguments.full { "full" } else { "auto" };
        let mut arguments = vec![wish, "--volume", &volume, "--device", DEVICE];
        arguments.extend(["--namespace", &self.namespace, "--snapshot", snapshot, "--report", REPORT]);
        arguments.extend(self.arguments.more.iter().map(String::as_str));
        arguments.extend((continues && !arguments.contains(&"--resume")).then_some("--resume"));
        let claim = json!({"claimName": self.name, "readOnly": true});
        let mut volumes = vec![json!({"name": "source", "persistentVolumeClaim": claim})];
        let mut mounts = Vec::new();
        if let Some(name) = &self.arguments.repository_claim {
            volumes.push(json!({"name": "repository", "persistentVolumeClaim": {"claimName": name}}));
            mounts.push(json!({"name": "repository", "mountPath": CLAIMED}));
        }
        let from = self.arguments.secret.iter().map(|name| json!({"secretRef": {"name": name}}));
        let tolerations = self.arguments.toleration.iter().map(|taint| match taint.split_once('=') {
            None if taint == "*" => json!({"operator": "Exists"}),
            None => json!({"key": taint, "operator": "Exists"}),
            Some((key, value)) => json!({"key": key, "operator": "Equal", "value": value}),
        });
        let affinity = placement
            .map(|nodes| json!({"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": nodes}}));
        json!({
            "apiVersion": "v1", "kind": "Pod",
            "metadata": {"name": self.name, "namespace": self.namespace, "labels": {MANAGED_BY: OURS}},
            "spec": {
                "serviceAccountName": self.arguments.service_account,
                "restartPolicy": "Never",
                "affinity": affinity,
                "tolerations": tolerations.collect::<Vec<_>>(),
                "containers": [{
                    "name": "backup",
                    "image": self.arguments.image,
                    "imagePullPolicy": "IfNotPresent",
                    "args": arguments,
                    "env": [{"name": "CBT_BACKUP_REPOSITORY", "value": repository}],
                    "envFrom": from.collect::<Vec<_>>(),
                    // What it reports in the end; where it fails, the last lines of its log.
                    "terminationMessagePath": REPORT,
                    "terminationMessagePolicy": "FallbackToLogsOnError",
                    "resources": {"requests": {"memory": "64Mi"}, "limits": {"memory": "512Mi"}},
                    // Devices are root's: it is the user root, with no right more than to open what is its own.
                    "securityContext": {
                        "allowPrivilegeEscalation": false, "readOnlyRootFilesystem": true,
                        "capabilities": {"drop": ["ALL"]}, "seccompProfile": {"type": "RuntimeDefault"},
                    },
                    "volumeDevices": [{"name": "source", "devicePath": DEVICE}],
                    "volumeMounts": mounts,
                }],
                "volumes": volumes,
            },
        })
    }
}
