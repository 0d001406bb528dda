//! Manifests, classes and examples agree with each other and with the driver.

use std::collections::HashMap;

use deltapath::driver::{SnapshotParameters, VolumeParameters, parse_tuning};
use serde_json::Value;
use testkit::pages::read;

use crate::cluster_rules::plugins;
use crate::manifests::{DRIVER, Found, list, objects, objects_of, pod_spec, strings};

#[test]
fn the_gateway_tells_clients_where_its_service_is() {
    for (source, objects, _) in plugins() {
        let gateway = objects.iter().find(|found| {
            ["deltapath-gateway", "deltapath-controller"].contains(&found.name())
                && pod_spec(&found.object).is_some()
        });
        let gateway = gateway.unwrap_or_else(|| panic!("{source} has no gateway"));
        let pod = pod_spec(&gateway.object).expect("a pod");
        let arguments = strings(&pod["containers"][0]["args"]);
        let flag = |name: &str| {
            let value = arguments.iter().find_map(|argument| argument.strip_prefix(name)?.strip_prefix('='));
            value.unwrap_or_else(|| panic!("{source}: the gateway has no {name}"))
        };
        let service = objects.iter().find(|found| found.kind() == "Service").expect("a Service");
        let (namespace, port) =
            (&service.object["metadata"]["namespace"], &service.object["spec"]["ports"][0]["port"]);
        let address = format!("{}.{}.svc:{port}", service.name(), namespace.as_str().expect("a namespace"));
        assert_eq!(flag("--service-address"), address, "{source}");
        // Its roles name the Secret and the lease that it writes, and the object of its driver.
        let secret = objects.iter().find(|found| found.kind() == "Secret").expect("the empty Secret");
        let named: Vec<&Value> = objects
            .iter()
            .filter(|found| found.name() == "deltapath-gateway" && found.kind().ends_with("Role"))
            .flat_map(|found| list(&found.object["rules"]))
            .flat_map(|rule| list(&rule["resourceNames"]))
            .collect();
        assert_eq!(named, [DRIVER, secret.name(), "deltapath-gateway"], "{source}");
        assert!(
            secret.object.get("data").is_none(),
            "{source}: the Secret has data, which would replace the certificate"
        );
        // With retention a client may delete base snapshots, so the gateway must not require them.
        assert_eq!(flag("--require-base-snapshot"), "false", "{source}");
    }
}

fn parameters(found: &Found) -> HashMap<String, String> {
    let pairs = found.object["parameters"].as_object();
    let pair = |(key, value): (&String, &Value)| (key.clone(), value.as_str().expect("a string").to_owned());
    pairs.into_iter().flatten().map(pair).collect()
}

#[test]
fn classes_are_this_drivers_and_take_their_parameters() {
    for (source, objects, _) in plugins() {
        let mut defaults = 0;
        for found in objects {
            let who = format!("{source}: {} {}", found.kind(), found.name());
            let object = &found.object;
            match found.kind() {
                "StorageClass" => {
                    assert_eq!(object["provisioner"], DRIVER, "{who}");
                    VolumeParameters::parse(&parameters(found)).expect(&who);
                    // A volume is on one node, so it must be made on the node of its first pod.
                    assert_eq!(object["volumeBindingMode"], "WaitForFirstConsumer", "{who}");
                    assert_eq!(object["allowVolumeExpansion"], true, "{who}");
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
        assert_eq!(defaults, 1, "{source}: csi-snapshotter wants exactly one default VolumeSnapshotClass");
    }
}

/// Classes, claims and snapshots that the examples name exist.
#[test]
fn the_examples_name_what_exists() {
    let (objects, base) = (objects(), objects_of("deploy/base"));
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
            assert!(there(kind, name), "{who} names the {kind} {name}, which does not exist");
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
