//! What manifests, classes and examples say of each other and of the driver.

use std::collections::HashMap;

use deltapath::driver::{SnapshotParameters, VolumeParameters, parse_tuning};
use serde_json::Value;

use crate::cluster_rules::plugins;
use crate::manifests::{DRIVER, Found, list, objects, objects_of, pod_spec, read};

#[test]
fn the_metadata_service_is_where_its_object_says() {
    let Some(base) = objects_of("deploy/base") else { return };
    let cr = objects_of("deploy/cbt/snapshotmetadataservice.yaml").expect("the checker is there")[0];
    assert_eq!(cr.name(), DRIVER, "clients look it up by the driver's name");
    let service = base.iter().find(|found| found.kind() == "Service").expect("a Service");
    let (namespace, port) =
        (&service.object["metadata"]["namespace"], &service.object["spec"]["ports"][0]["port"]);
    let address = format!("{}.{}.svc:{port}", service.name(), namespace.as_str().expect("a namespace"));
    assert_eq!(cr.object["spec"]["address"], address);
    let plugin = base.iter().find(|found| found.kind() == "StatefulSet").expect("the driver");
    let pod = pod_spec(&plugin.object).expect("a pod");
    let tls =
        list(&pod["volumes"]).find(|volume| volume["name"] == "tls").expect("a volume for the certificate");
    let secret = tls["secret"]["secretName"].as_str().expect("a secret");
    assert!(
        read("hack/tls.sh").contains(&format!("secret={secret}\n")),
        "hack/tls.sh makes another secret than {secret}"
    );
}

fn parameters(found: &Found) -> HashMap<String, String> {
    let pairs = found.object["parameters"].as_object();
    let pair = |(key, value): (&String, &Value)| (key.clone(), value.as_str().expect("a string").to_owned());
    pairs.into_iter().flatten().map(pair).collect()
}

#[test]
fn classes_are_this_drivers_and_take_their_parameters() {
    let Some(plugins) = plugins() else { return };
    for (source, objects, _) in plugins {
        let mut defaults = 0;
        for found in objects {
            let who = format!("{source}: {} {}", found.kind(), found.name());
            let object = &found.object;
            match found.kind() {
                "StorageClass" => {
                    assert_eq!(object["provisioner"], DRIVER, "{who}");
                    VolumeParameters::parse(&parameters(found)).expect(&who);
                    // A volume lives on one node: it is made where its first pod goes.
                    assert_eq!(object["volumeBindingMode"], "WaitForFirstConsumer", "{who}");
                    let resizer = source != "deploy/overlays/distributed"
                        && source != "deploy/overlays/kind-distributed";
                    assert_eq!(object["allowVolumeExpansion"], resizer, "{who}");
                }
                "VolumeSnapshotClass" | "VolumeGroupSnapshotClass" => {
                    assert_eq!(object["driver"], DRIVER, "{who}");
                    SnapshotParameters::parse(&parameters(found)).expect(&who);
                    let default =
                        &object["metadata"]["annotations"]["snapshot.storage.kubernetes.io/is-default-class"];
                    defaults += usize::from(default == "true");
                }
                "VolumeAttributesClass" => {
                    assert_eq!(object["driverName"], DRIVER, "{who}");
                    parse_tuning(&parameters(found)).expect(&who);
                }
                "CSIDriver" => {
                    assert_eq!(found.name(), DRIVER);
                    assert_eq!(object["spec"]["fsGroupPolicy"], "File", "{who}");
                    assert_eq!(object["spec"]["attachRequired"], source.ends_with("/attach"), "{who}");
                }
                _ => {}
            }
        }
        assert_eq!(
            defaults, 1,
            "{source}: csi-snapshot-metadata wants exactly one default VolumeSnapshotClass"
        );
    }
}

/// Classes, claims and snapshots that the examples name are there.
#[test]
fn the_examples_name_what_exists() {
    let (Some(objects), Some(base)) = (objects(), objects_of("deploy/base")) else { return };
    let examples: Vec<&Found> =
        objects.iter().filter(|found| found.source.starts_with("deploy/examples/")).collect();
    let there = |kind: &str, name: &Value| {
        examples.iter().chain(&base).any(|found| name.as_str().is_some_and(|name| found.is(kind, name)))
    };
    for found in &examples {
        let (who, spec) = (format!("{}: {}", found.source, found.name()), &found.object["spec"]);
        let named = [
            ("StorageClass", &spec["storageClassName"]),
            ("VolumeAttributesClass", &spec["volumeAttributesClassName"]),
            ("VolumeSnapshotClass", &spec["volumeSnapshotClassName"]),
            ("VolumeGroupSnapshotClass", &spec["volumeGroupSnapshotClassName"]),
            ("PersistentVolumeClaim", &spec["source"]["persistentVolumeClaimName"]),
            (spec["dataSource"]["kind"].as_str().unwrap_or(""), &spec["dataSource"]["name"]),
            ("ServiceAccount", &spec["serviceAccountName"]),
            (found.object["roleRef"]["kind"].as_str().unwrap_or(""), &found.object["roleRef"]["name"]),
        ];
        for (kind, name) in named.into_iter().filter(|(_, name)| !name.is_null()) {
            assert!(there(kind, name), "{who} names the {kind} {name}, which is nowhere");
        }
        for volume in list(&spec["volumes"]) {
            let claim = &volume["persistentVolumeClaim"]["claimName"];
            assert!(claim.is_null() || there("PersistentVolumeClaim", claim), "{who} uses the claim {claim}");
            let driver = &volume["csi"]["driver"];
            assert!(driver.is_null() || driver == DRIVER, "{who}");
        }
    }
    let driver = read("deploy/e2e/test-driver.yaml");
    for line in driver.lines().filter(|line| line.contains("FromExistingClassName: ")) {
        let name = line.rsplit(' ').next().expect("a name");
        assert!(base.iter().any(|found| found.name() == name), "the test driver names the class {name}");
    }
    for capability in
        ["snapshotMetadata", "groupSnapshot", "block", "topology", "capacity", "onlineExpansion"]
    {
        assert!(driver.contains(&format!("    {capability}: true\n")), "{capability} is not switched on");
    }
}
