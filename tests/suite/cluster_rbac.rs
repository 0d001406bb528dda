//! RBAC: a program uses each rule of the manifests, and no rule that a program needs is missing.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::Value;

use crate::manifests::{Found, KUSTOMIZATIONS, containers, list, objects_of, pod_spec, strings};

/// Where a role applies.
#[derive(Clone, Copy, PartialEq, Eq)]
enum When {
    Always,
    /// With attachments.
    Attach,
    /// With one driver per node.
    Distributed,
}

use When::{Always, Attach, Distributed};

const STORAGE: &str = "storage.k8s.io";
const SNAPSHOTS: &str = "snapshot.storage.k8s.io";
const GROUPS: &str = "groupsnapshot.storage.k8s.io";
const HEALTH: &str = "csi-external-health-monitor-controller";
const SIDECAR: &str = "csi-snapshot-metadata";
const CONTROLLER: &str = "snapshot-controller";

/// The calls of each program: its container, an API group and resource, the verbs, and when. Taken from the sources of the
/// versions that the manifests name; those of csi-snapshotter, csi-resizer, csi-snapshot-metadata and snapshot-controller
/// also from the audit log of an API server. An informer needs no get.
const CALLS: [(&str, &str, &str, &str, When); 93] = [
    // Binds volumes: makes the PV, deletes it, and puts its finalizer on it.
    ("csi-provisioner", "", "persistentvolumes", "get list watch create patch delete", Always),
    // Finalizers of claims that are being cloned; removal of the selected node on RESOURCE_EXHAUSTED.
    ("csi-provisioner", "", "persistentvolumeclaims", "get list watch update", Always),
    ("csi-provisioner", STORAGE, "storageclasses", "get list watch", Always),
    // Mutable parameters of CreateVolume.
    ("csi-provisioner", STORAGE, "volumeattributesclasses", "get", Always),
    ("csi-provisioner", "", "events", "create patch", Always),
    // Source protection: a finalizer while a snapshot is being restored, cleaned up periodically.
    ("csi-provisioner", SNAPSHOTS, "volumesnapshots", "get list watch update", Always),
    ("csi-provisioner", SNAPSHOTS, "volumesnapshotcontents", "get", Always),
    // Topology.
    ("csi-provisioner", STORAGE, "csinodes", "get list watch", Always),
    ("csi-provisioner", "", "nodes", "get list watch", Always),
    // Only if the driver has PUBLISH_UNPUBLISH_VOLUME: a volume is deleted once it is detached.
    ("csi-provisioner", STORAGE, "volumeattachments", "get list watch", Attach),
    // --enable-capacity, and the owner of these objects (--capacity-ownerref-level=1: the pod names it).
    ("csi-provisioner", STORAGE, "csistoragecapacities", "get list watch create update delete", Always),
    ("csi-provisioner", "", "pods", "get", Always),
    // The owner of the pod's owner: --capacity-ownerref-level=2.
    ("csi-provisioner", "apps", "replicasets", "get", Distributed),
    // Leader election of two replicas.
    ("csi-provisioner", "coordination.k8s.io", "leases", "create get update", Distributed),
    ("csi-resizer", "coordination.k8s.io", "leases", "create get update", Distributed),
    ("csi-snapshotter", "coordination.k8s.io", "leases", "create get update", Distributed),
    (HEALTH, "coordination.k8s.io", "leases", "create get update", Distributed),
    // Ours: the addresses of the nodes, and which volumes are used. Its tests have only these rights.
    ("router", "discovery.k8s.io", "endpointslices", "list watch", Distributed),
    ("router", "", "persistentvolumes", "list", Distributed),
    // And their certificates. The test has only these rights.
    ("certificates", "", "secrets", "get update", Distributed),
    ("certificates", "", "configmaps", "get update", Distributed),
    ("certificates", "certificates.k8s.io", "certificatesigningrequests", "list", Distributed),
    ("certificates", "certificates.k8s.io", "certificatesigningrequests/approval", "patch", Distributed),
    ("certificates", "certificates.k8s.io", "certificatesigningrequests/status", "patch", Distributed),
    ("certificates", "certificates.k8s.io", "signers", "approve sign", Distributed),
    ("node-certificate", "certificates.k8s.io", "certificatesigningrequests", "create get", Distributed),
    // No pods: --handle-volume-inuse-error=false.
    ("csi-resizer", "", "persistentvolumes", "list watch patch", Always),
    ("csi-resizer", "", "persistentvolumeclaims", "list watch", Always),
    ("csi-resizer", "", "persistentvolumeclaims/status", "patch", Always),
    ("csi-resizer", STORAGE, "volumeattributesclasses", "list watch", Always),
    ("csi-resizer", "", "events", "create patch", Always),
    ("csi-snapshotter", SNAPSHOTS, "volumesnapshotclasses", "list watch", Always),
    ("csi-snapshotter", SNAPSHOTS, "volumesnapshotcontents", "get list watch patch", Always),
    ("csi-snapshotter", SNAPSHOTS, "volumesnapshotcontents/status", "update patch", Always),
    ("csi-snapshotter", GROUPS, "volumegroupsnapshotclasses", "list watch", Always),
    ("csi-snapshotter", GROUPS, "volumegroupsnapshotcontents", "get list watch patch", Always),
    ("csi-snapshotter", GROUPS, "volumegroupsnapshotcontents/status", "update patch", Always),
    ("csi-snapshotter", "", "events", "create patch", Always),
    // The one secret that a class may name.
    ("csi-snapshotter", "", "secrets", "get", Always),
    (HEALTH, "", "persistentvolumes", "list watch", Always),
    (HEALTH, "", "persistentvolumeclaims", "list watch", Always),
    (HEALTH, "", "persistentvolumeclaims/status", "patch", Always),
    // Ours: reviews of callers and their rights, and the objects they ask about. Its tests have only these rights.
    ("gateway", "authentication.k8s.io", "tokenreviews", "create", Always),
    ("gateway", "authorization.k8s.io", "subjectaccessreviews", "create", Always),
    ("gateway", SNAPSHOTS, "volumesnapshots", "get list watch", Always),
    ("gateway", SNAPSHOTS, "volumesnapshotcontents", "get list watch", Always),
    ("gateway", SNAPSHOTS, "volumesnapshotclasses", "list watch", Always),
    // Its certificate, its object and its election; and the one secret that a class may name.
    ("gateway", "cbt.storage.k8s.io", "snapshotmetadataservices", "create get list update watch", Always),
    ("gateway", "", "secrets", "get update", Always),
    ("gateway", "coordination.k8s.io", "leases", "create get update", Always),
    // An earlier design: its objects, and the objects that they name. Its tests have only these rights.
    ("differential", "authentication.k8s.io", "tokenreviews", "create", Always),
    ("differential", "authorization.k8s.io", "subjectaccessreviews", "create", Always),
    ("differential", "differential.cbt.storage.k8s.io", "differentialsnapshots", "get list watch", Always),
    ("differential", "differential.cbt.storage.k8s.io", "differentialsnapshots/status", "patch", Always),
    ("differential", SNAPSHOTS, "volumesnapshots", "get list watch", Always),
    ("differential", SNAPSHOTS, "volumesnapshotcontents", "get", Always),
    ("differential", "coordination.k8s.io", "leases", "create get update", Always),
    // Another one: the server behind kube-apiserver, and the sidecar that it calls. Their tests have only these rights.
    ("aggregated", "authorization.k8s.io", "subjectaccessreviews", "create", Always),
    ("aggregated", "", "configmaps", "get", Always),
    ("aggregated", SNAPSHOTS, "volumesnapshots", "get", Always),
    ("aggregated", SNAPSHOTS, "volumesnapshotcontents", "get", Always),
    ("aggregated", "discovery.cbt.storage.k8s.io", "driverdiscoveries", "list", Always),
    ("aggregated", "discovery.cbt.storage.k8s.io", "driverdiscoveries/status", "patch", Always),
    ("aggregated", "discovery.cbt.storage.k8s.io", "driverdiscoveries/deltas", "create", Always),
    ("aggregated", "coordination.k8s.io", "leases", "create get update", Always),
    ("cbt-http", "authentication.k8s.io", "tokenreviews", "create", Always),
    ("cbt-http", "authorization.k8s.io", "subjectaccessreviews", "create", Always),
    ("cbt-http", "discovery.cbt.storage.k8s.io", "driverdiscoveries", "create patch", Always),
    ("cbt-http", "coordination.k8s.io", "leases", "create get update", Always),
    // The audience of tokens.
    (SIDECAR, "cbt.storage.k8s.io", "snapshotmetadataservices", "get", Always),
    // The user of a token, and whether the user may get the snapshot.
    (SIDECAR, "authentication.k8s.io", "tokenreviews", "create", Always),
    (SIDECAR, "authorization.k8s.io", "subjectaccessreviews", "create", Always),
    (SIDECAR, SNAPSHOTS, "volumesnapshots", "get", Always),
    (SIDECAR, SNAPSHOTS, "volumesnapshotcontents", "get", Always),
    // The class of a snapshot, or the default class, since it may name a secret.
    (SIDECAR, SNAPSHOTS, "volumesnapshotclasses", "get list", Always),
    (SIDECAR, "", "secrets", "get", Always),
    ("csi-attacher", "", "persistentvolumes", "list watch patch", Attach),
    ("csi-attacher", STORAGE, "csinodes", "list watch", Attach),
    ("csi-attacher", STORAGE, "volumeattachments", "list watch patch", Attach),
    ("csi-attacher", STORAGE, "volumeattachments/status", "patch", Attach),
    (CONTROLLER, "", "persistentvolumes", "get list watch", Always),
    (CONTROLLER, "", "persistentvolumeclaims", "get list watch update", Always),
    (CONTROLLER, "", "events", "create patch", Always),
    (CONTROLLER, SNAPSHOTS, "volumesnapshotclasses", "get list watch", Always),
    (CONTROLLER, SNAPSHOTS, "volumesnapshotcontents", "create get list watch update delete patch", Always),
    (CONTROLLER, SNAPSHOTS, "volumesnapshotcontents/status", "patch", Always),
    (CONTROLLER, SNAPSHOTS, "volumesnapshots", "create get list watch update patch delete", Always),
    (CONTROLLER, SNAPSHOTS, "volumesnapshots/status", "update patch", Always),
    (CONTROLLER, GROUPS, "volumegroupsnapshotclasses", "get list watch", Always),
    (CONTROLLER, GROUPS, "volumegroupsnapshotcontents", "create get list watch update delete patch", Always),
    (CONTROLLER, GROUPS, "volumegroupsnapshotcontents/status", "patch", Always),
    (CONTROLLER, GROUPS, "volumegroupsnapshots", "get list watch update patch", Always),
    (CONTROLLER, GROUPS, "volumegroupsnapshots/status", "update patch", Always),
];

/// The programs that use a role: usually the one with which its name ends.
fn users(role: &str) -> Vec<&str> {
    match role {
        "deltapath-snapshotter-secret" => vec!["csi-snapshotter", "gateway", SIDECAR],
        "deltapath-leader-election" => vec!["csi-provisioner", "csi-resizer", "csi-snapshotter", HEALTH],
        role => {
            let name = role.strip_prefix("cbt-earlier-").or_else(|| role.strip_prefix("deltapath-"));
            vec![name.unwrap_or(role)]
        }
    }
}

type Rights = BTreeMap<(String, String), BTreeSet<String>>;

fn add(rights: &mut Rights, rule: &Value) {
    for group in strings(&rule["apiGroups"]) {
        for resource in strings(&rule["resources"]) {
            let verbs = rights.entry((group.to_owned(), resource.to_owned())).or_default();
            verbs.extend(strings(&rule["verbs"]).into_iter().map(str::to_owned));
        }
    }
}

/// The objects of a kind and of its namespaced twin.
fn both<'o>(objects: &'o [&Found], kind: &str) -> impl Iterator<Item = &'o Found> {
    objects
        .iter()
        .copied()
        .filter(move |found| found.kind().strip_prefix("Cluster").unwrap_or(found.kind()) == kind)
}

fn roles<'o>(objects: &'o [&Found]) -> impl Iterator<Item = &'o Found> {
    // Users bind the roles for backup applications themselves.
    both(objects, "Role").filter(|found| !found.name().starts_with("deltapath-backup-client"))
}

fn applies(when: When, source: &str) -> bool {
    match when {
        Always => true,
        Attach => source.ends_with("/attach"),
        Distributed => source.contains("distributed"),
    }
}

#[test]
fn every_rule_is_used_and_every_call_is_allowed() {
    for source in KUSTOMIZATIONS {
        let objects = objects_of(source);
        let pods: Vec<&Value> = objects.iter().filter_map(|found| pod_spec(&found.object)).collect();
        let programs: BTreeSet<&str> = pods
            .iter()
            .flat_map(|pod| containers(pod))
            .filter_map(|container| container["name"].as_str())
            .collect();
        let mut granted: BTreeMap<&str, Rights> = BTreeMap::new();
        for role in roles(&objects) {
            for user in users(role.name()) {
                if user == SIDECAR && !programs.contains(user) {
                    continue;
                }
                let role_name = role.name();
                assert!(programs.contains(user), "{source}: {role_name} is for {user}, which does not run");
                let rights = granted.entry(user).or_default();
                list(&role.object["rules"]).for_each(|rule| add(rights, rule));
            }
        }
        let mut called: BTreeMap<&str, Rights> = BTreeMap::new();
        for (program, group, resource, verbs, when) in CALLS {
            if programs.contains(program) && applies(when, source) {
                let verbs = verbs.split(' ').map(str::to_owned).collect();
                let rights = called.entry(program).or_default();
                rights.insert((group.to_owned(), resource.to_owned()), verbs);
            }
        }
        assert_eq!(granted, called, "{source}: rights that are granted (left) and used (right)");
    }
}

#[test]
fn no_rule_is_wide_and_every_binding_joins_what_exists() {
    for source in KUSTOMIZATIONS {
        let objects = objects_of(source);
        for role in both(&objects, "Role") {
            let name = role.name();
            for rule in list(&role.object["rules"]) {
                for part in ["apiGroups", "resources", "verbs"] {
                    assert!(!strings(&rule[part]).contains(&"*"), "{source}: {name} grants all {part}");
                }
                if strings(&rule["resources"]).contains(&"secrets") {
                    let named = list(&rule["resourceNames"]).count();
                    assert_eq!(named, 1, "{source}: {name} reads any secret");
                }
            }
        }
        let mut bound = BTreeSet::new();
        for binding in both(&objects, "RoleBinding") {
            let role = &binding.object["roleRef"];
            let [kind, name] = ["kind", "name"].map(|part| role[part].as_str().expect(part));
            let is_there = objects.iter().any(|found| found.is(kind, name));
            assert!(is_there, "{source}: {} binds no role", binding.name());
            bound.insert((kind, name));
            for subject in list(&binding.object["subjects"]) {
                let account = objects.iter().any(|found| {
                    found.kind() == "ServiceAccount"
                        && subject["name"] == found.name()
                        && subject["namespace"] == found.object["metadata"]["namespace"]
                });
                assert!(account, "{source}: {} binds {subject}, which is not an account", binding.name());
            }
        }
        for role in roles(&objects) {
            let name = role.name();
            assert!(bound.contains(&(role.kind(), name)), "{source}: no account is bound to {name}");
        }
        for found in &objects {
            let Some(pod) = pod_spec(&found.object) else { continue };
            let account = pod["serviceAccountName"].as_str().expect("an account");
            let is_there = objects.iter().any(|found| found.is("ServiceAccount", account));
            assert!(is_there, "{source}: no account {account}");
        }
    }
}
