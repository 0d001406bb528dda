//! Our own rules for the manifests: what one file says of another, and of the programs that they start.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::process::Command;

use serde_json::Value;

use crate::manifests::{
    DRIVER, Found, OVERLAYS, container, containers, list, objects, objects_of, pod_spec, strings,
};

/// The flags of each sidecar that the manifests use, looked up in the sources of exactly this version: a newer
/// version has to be looked up again.
const SIDECARS: [(&str, &str); 9] = [
    ("csi-node-driver-registrar:v2.17.0", "csi-address kubelet-registration-path http-endpoint v"),
    ("livenessprobe:v2.20.0", "csi-address probe-timeout v"),
    (
        "csi-provisioner:v6.4.0",
        "csi-address extra-create-metadata leader-election strict-topology immediate-topology \
         enable-capacity capacity-ownerref-level kube-api-capacity-qps kube-api-capacity-burst \
         kube-api-qps kube-api-burst timeout v",
    ),
    ("csi-attacher:v4.13.0", "csi-address timeout v"),
    (
        "csi-resizer:v2.3.0",
        "csi-address leader-election handle-volume-inuse-error resize-timeout kube-api-qps \
         kube-api-burst v",
    ),
    (
        "csi-snapshotter:v8.7.0",
        "csi-address leader-election extra-create-metadata timeout kube-api-qps kube-api-burst v",
    ),
    ("csi-external-health-monitor-controller:v0.19.0", "csi-address leader-election list-volumes-interval v"),
    ("csi-snapshot-metadata:v1.1.0", "csi-address port tls-cert tls-key http-endpoint v"),
    ("snapshot-controller:v8.7.0", "kube-api-qps kube-api-burst v"),
];

fn name(container: &Value) -> &str {
    container["name"].as_str().expect("a name")
}

/// `--flag=value` of a container's arguments.
fn flags(container: &Value) -> BTreeMap<&str, &str> {
    strings(&container["args"])
        .into_iter()
        .filter_map(|argument| argument.strip_prefix("--"))
        .map(|argument| argument.split_once('=').unwrap_or((argument, "")))
        .collect()
}

/// Everything that runs the driver or a sidecar.
fn pods(objects: &'static [Found]) -> impl Iterator<Item = (&'static Found, &'static Value)> {
    objects.iter().filter_map(|found| Some((found, pod_spec(&found.object)?)))
}

/// Each overlay's objects, and its driver among them.
pub fn plugins() -> Vec<(&'static str, Vec<&'static Found>, &'static Found)> {
    let plugin = |source: &'static str| {
        let objects = objects_of(source);
        let plugin = objects
            .iter()
            .find(|found| found.name() == "deltapath-plugin" && pod_spec(&found.object).is_some());
        let plugin = *plugin.unwrap_or_else(|| panic!("{source} has no deltapath-plugin"));
        (source, objects, plugin)
    };
    OVERLAYS.into_iter().map(plugin).collect()
}

/// The program of ours that a container runs, and its subcommand.
fn of_ours(container: &Value) -> Option<(&'static str, Option<&str>)> {
    let subcommand = strings(&container["args"]).into_iter().next().filter(|first| !first.starts_with('-'));
    let image = container["image"].as_str().expect("an image");
    let program = match subcommand {
        Some("driver") => "deltapath",
        Some("faults") => "cbt-lab",
        _ if image.starts_with("deltapath-router:") => "deltapath-router",
        _ => return None,
    };
    Some((program, subcommand))
}

/// Of the driver, the go-between, the router, and of what makes the router's certificates and the nodes'.
#[test]
fn every_flag_is_in_the_help_of_its_program() {
    let mut seen: BTreeMap<&str, usize> = BTreeMap::new();
    for (found, pod) in pods(objects()) {
        for container in containers(pod) {
            let Some((program, subcommand)) = of_ours(container) else { continue };
            let output = Command::new(testkit::program(program)).args(subcommand).arg("--help").output();
            let help = String::from_utf8(output.expect("run").stdout).expect("utf-8");
            let known: BTreeSet<&str> = help.split([' ', '=', '[', ',', '\n']).collect();
            let count = seen.entry(name(container)).or_default();
            for flag in flags(container).keys() {
                let flag = format!("--{flag}");
                assert!(known.contains(&*flag), "{}: {program} {subcommand:?} has no {flag}", found.source);
                *count += 1;
            }
        }
    }
    let names: Vec<&str> = seen.keys().copied().collect();
    assert_eq!(names, ["certificates", "deltapath", "faults", "node-certificate", "router"]);
    assert!(seen["deltapath"] >= 4 * OVERLAYS.len(), "too few flags are seen: {seen:?}");
}

/// The controller's pods: what asks a socket asks the router's, and the router finds the nodes at the port that drivers serve.
#[test]
fn the_controller_asks_a_router_that_finds_the_drivers() {
    for source in ["deploy/overlays/distributed", "deploy/overlays/kind-distributed"] {
        let objects = objects_of(source);
        let of = |kind: &str, name: &str| {
            let found = objects.iter().find(|found| found.is(kind, name));
            &found.unwrap_or_else(|| panic!("{source} has no {kind} {name}")).object
        };
        let controller = of("Deployment", "deltapath-controller");
        assert_eq!(controller["spec"]["replicas"], 2, "{source}");
        let pod = pod_spec(controller).expect("a pod");
        let all = containers(pod);
        let router = container(pod, "router").expect("a router");
        let socket = flags(router)["endpoint"].strip_prefix("unix://").expect("a UNIX socket");
        let names: Vec<&str> = all.iter().map(|container| name(container)).collect();
        let sidecars =
            ["csi-provisioner", "csi-resizer", "csi-snapshotter", "csi-external-health-monitor-controller"];
        for wanted in sidecars.iter().chain(&["gateway"]) {
            assert!(names.contains(wanted), "{source}: no {wanted} among {names:?}");
        }
        for container in all.iter().filter(|container| name(container) != "router") {
            let flags = flags(container);
            assert_eq!(flags.get("csi-address"), Some(&socket), "{source}: {}", name(container));
            let is_elected = flags.contains_key("leader-election");
            assert_eq!(is_elected, sidecars.contains(&name(container)), "{source}: {}", name(container));
        }
        // The CA's key is in the same Secret as the router's certificate.
        let tls = list(&pod["volumes"]).find(|volume| volume["name"] == "router-tls").expect("certificates");
        let files: Vec<&str> =
            list(&tls["secret"]["items"]).filter_map(|item| item["key"].as_str()).collect();
        assert_eq!(files, ["tls.crt", "tls.key", "ca.crt"], "{source}");

        let service = of("Service", "deltapath-nodes");
        assert_eq!(flags(router)["node-service"], "deltapath/deltapath-nodes", "{source}");
        assert_eq!(service["spec"]["clusterIP"], "None", "{source}");
        assert_eq!(service["spec"]["publishNotReadyAddresses"], true, "{source}");
        let plugin = of("DaemonSet", "deltapath-plugin");
        let driver = container(pod_spec(plugin).expect("a pod"), "deltapath").expect("a driver");
        let port = flags(driver)["router-listen"].rsplit(':').next().expect("a port");
        let served =
            list(&driver["ports"]).find(|port| port["name"] == "router").expect("a port of the router's");
        assert_eq!(served["containerPort"].to_string(), port, "{source}");
        assert_eq!(service["spec"]["ports"][0]["targetPort"], "router", "{source}");
        for container in containers(pod_spec(plugin).expect("a pod")) {
            assert!(!sidecars.contains(&name(container)), "{source}: {} runs on each node", name(container));
        }
    }
}

#[test]
fn every_flag_of_a_sidecar_is_one_of_its_version() {
    let mut used = BTreeSet::new();
    for (found, pod) in pods(objects()) {
        for container in containers(pod) {
            let image = container["image"].as_str().expect("an image");
            let Some(sidecar) = image.strip_prefix("registry.k8s.io/sig-storage/") else { continue };
            let known = SIDECARS.iter().find(|(image, _)| *image == sidecar);
            let (_, known) =
                known.unwrap_or_else(|| panic!("{}: look up the flags of {sidecar}", found.source));
            for flag in flags(container).keys() {
                let is_known = known.split(' ').any(|known| known == *flag);
                assert!(is_known, "{}: {sidecar} has no flag --{flag}", found.source);
            }
            used.insert(sidecar);
        }
    }
    let listed: BTreeSet<&str> = SIDECARS.iter().map(|(image, _)| *image).collect();
    assert_eq!(used, listed, "sidecars that are used, and that are listed");
}

#[test]
fn every_socket_path_leads_to_the_drivers_socket() {
    for (source, _, plugin) in plugins() {
        let pod = pod_spec(&plugin.object).expect("a pod");
        let volume_at = |container: &Value, path: &str| -> Option<String> {
            let mounts = list(&container["volumeMounts"]);
            let (dir, _) = path.rsplit_once('/')?;
            let mount = mounts.into_iter().find(|mount| mount["mountPath"] == dir)?;
            mount["name"].as_str().map(str::to_owned)
        };
        let driver = container(pod, "deltapath").expect("a driver");
        let mut endpoint = flags(driver)["endpoint"].strip_prefix("unix://").expect("a UNIX socket");
        let volume = volume_at(driver, endpoint)
            .unwrap_or_else(|| panic!("{source}: nothing is mounted at {endpoint}"));
        // A go-between asks the driver, and all others ask the go-between.
        if let Some(faults) = container(pod, "faults") {
            let at = |flag: &str| flags(faults)[flag].strip_prefix("unix://").expect("a UNIX socket");
            assert_eq!(at("upstream"), endpoint, "{source}");
            assert_ne!(at("listen"), endpoint, "{source}");
            endpoint = at("listen");
            assert_eq!(volume_at(faults, endpoint).as_deref(), Some(&*volume), "{source}: {endpoint}");
        }
        let file = endpoint.rsplit('/').next().expect("a name");
        for container in containers(pod) {
            let Some(address) = flags(container).get("csi-address").copied() else {
                let name = name(container);
                assert!(
                    ["deltapath", "faults", "loop-device-nodes"].contains(&name),
                    "{name} asks no driver"
                );
                continue;
            };
            let (name, mounted) = (name(container), volume_at(container, address));
            assert_eq!(mounted.as_deref(), Some(&*volume), "{source}: {name} looks for {address}");
            assert!(address.ends_with(&format!("/{file}")), "{source}: {address} is not {endpoint}");
        }
        let volumes: Vec<&Value> = list(&pod["volumes"]).collect();
        let host = volumes.iter().find(|found| found["name"] == *volume).expect("the socket's volume");
        let host = host["hostPath"]["path"].as_str().expect("on the node, where kubelet is");
        let registrar = container(pod, "node-driver-registrar").expect("one");
        assert_eq!(flags(registrar)["kubelet-registration-path"], format!("{host}/{file}"), "{source}");
        assert_eq!(host, format!("/var/lib/kubelet/plugins/{DRIVER}"), "{source}");
    }
}

#[test]
fn mounts_and_rights_are_what_the_driver_needs_and_nobody_elses() {
    for (source, _, plugin) in plugins() {
        let pod = pod_spec(&plugin.object).expect("a pod");
        let path_of: HashMap<&str, &str> = list(&pod["volumes"])
            .filter_map(|volume| Some((volume["name"].as_str()?, volume["hostPath"]["path"].as_str()?)))
            .collect();
        for container in containers(pod) {
            let who = format!("{source}: {}", name(container));
            let privileged = container["securityContext"]["privileged"] == true;
            assert_eq!(privileged, ["deltapath", "loop-device-nodes"].contains(&name(container)), "{who}");
            if !privileged {
                assert_eq!(strings(&container["securityContext"]["capabilities"]["drop"]), ["ALL"], "{who}");
                assert_eq!(container["securityContext"]["readOnlyRootFilesystem"], true, "{who}");
            }
            assert!(container["resources"]["requests"]["memory"].is_string(), "{who} requests no memory");
            assert!(container["resources"]["limits"]["memory"].is_string(), "{who} has no limit");
            for mount in list(&container["volumeMounts"]) {
                let (at, volume) =
                    (mount["mountPath"].as_str().expect("a path"), mount["name"].as_str().expect("a name"));
                let shared = mount["mountPropagation"] == "Bidirectional";
                let kubelets =
                    ["/var/lib/kubelet/pods", "/var/lib/kubelet/plugins", "/var/lib/deltapath"].contains(&at);
                assert_eq!(shared, kubelets, "{who}: propagation of {at}");
                // Paths come from kubelet and go into records: they must be the same inside and outside.
                if shared || at == "/dev" {
                    assert_eq!(path_of[volume], at, "{who}");
                }
            }
            if name(container) == "deltapath" {
                let at: BTreeSet<&str> = list(&container["volumeMounts"])
                    .filter_map(|mount| mount["mountPath"].as_str())
                    .collect();
                let kubelets = ["/var/lib/kubelet/pods", "/var/lib/kubelet/plugins"];
                for needed in ["/csi", "/dev", flags(container)["data-dir"]].into_iter().chain(kubelets) {
                    assert!(at.contains(needed), "{who} lacks {needed}");
                }
            }
        }
    }
}

/// SECURITY.md, "Privileges".
#[test]
fn every_container_of_ours_but_the_drivers_has_no_right_that_it_can_do_without() {
    let mut locked = BTreeSet::new();
    for (found, pod) in pods(objects()) {
        for container in containers(pod) {
            let image = container["image"].as_str().expect("an image").split(':').next().expect("a name");
            let is_ours = ["deltapath", "cbt-"].iter().any(|prefix| image.starts_with(prefix));
            let context = &container["securityContext"];
            if !is_ours || context["privileged"] == true {
                continue;
            }
            let who = format!("{}: {}", found.source, name(container));
            assert_eq!(strings(&context["capabilities"]["drop"]), ["ALL"], "{who}");
            assert_eq!(context["readOnlyRootFilesystem"], true, "{who}");
            assert_eq!(context["allowPrivilegeEscalation"], false, "{who}");
            let profile = |of: &Value| of["seccompProfile"]["type"] == "RuntimeDefault";
            assert!(profile(context) || profile(&pod["securityContext"]), "{who} has no seccomp profile");
            locked.insert(image);
        }
    }
    let ours = ["cbt-backup", "cbt-earlier", "cbt-lab", "deltapath-gateway", "deltapath-router"];
    assert_eq!(locked.into_iter().collect::<Vec<_>>(), ours);
}

#[test]
fn every_image_is_pinned_and_of_one_version() {
    let mut versions: BTreeMap<&str, &str> = BTreeMap::new();
    for (found, pod) in pods(objects()) {
        for container in containers(pod) {
            let image = container["image"].as_str().expect("an image");
            let (repository, tag) =
                image.rsplit_once(':').unwrap_or_else(|| panic!("{}: {image} has no tag", found.source));
            let numbers: Vec<&str> = tag.trim_start_matches('v').split('.').collect();
            let pinned = numbers.len() == 3 && numbers.iter().all(|part| part.parse::<u32>().is_ok());
            assert!(pinned, "{}: {image} is no version", found.source);
            let before = *versions.entry(repository).or_insert(tag);
            assert_eq!(before, tag, "{}: {repository} in two versions", found.source);
        }
    }
    // All that the Makefile builds.
    for ours in [
        "deltapath",
        "deltapath-gateway",
        "deltapath-router",
        "cbt-backup",
        "backup-example",
        "cbt-earlier",
        "cbt-lab",
    ] {
        assert_eq!(versions[ours], env!("CARGO_PKG_VERSION"), "{ours} is not of this version");
    }
    assert!(versions.len() >= 12, "{versions:?}");
}

#[test]
fn selectors_ports_and_probes_meet() {
    let objects = objects();
    let within = |some: &Value, all: &Value| {
        some.as_object()
            .is_some_and(|some| !some.is_empty() && some.iter().all(|(key, value)| all[key] == *value))
    };
    for (found, pod) in pods(objects) {
        let template = &found.object["spec"]["template"]["metadata"]["labels"];
        if !["Pod", "CronJob"].contains(&found.kind()) {
            let labels = &found.object["spec"]["selector"]["matchLabels"];
            assert!(within(labels, template), "{}: {}", found.source, found.name());
        }
        let (source, mut names, mut numbers) = (&found.source, BTreeSet::new(), BTreeSet::new());
        for container in containers(pod) {
            for port in list(&container["ports"]) {
                let (name, number) = (port["name"].as_str(), port["containerPort"].as_u64());
                assert!(names.insert(name.expect("a name")), "{source}: two ports of a name");
                assert!(numbers.insert(number.expect("a port")), "{source}: a port twice");
            }
        }
        for container in containers(pod) {
            for probe in ["livenessProbe", "readinessProbe", "startupProbe"] {
                let Some(port) = container[probe]["httpGet"]["port"].as_str() else { continue };
                let name = name(container);
                assert!(names.contains(port), "{source}: {name} probes {port}, which nobody serves");
            }
        }
    }
    for service in objects.iter().filter(|found| found.kind() == "Service") {
        let served = pods(objects).any(|(found, pod)| {
            let ports = &service.object["spec"]["ports"];
            found.source == service.source
                && within(
                    &service.object["spec"]["selector"],
                    &found.object["spec"]["template"]["metadata"]["labels"],
                )
                && list(ports).all(|port| {
                    containers(pod)
                        .iter()
                        .flat_map(|container| list(&container["ports"]))
                        .any(|own| own["name"] == port["targetPort"])
                })
        });
        assert!(served, "{}: nothing serves {}", service.source, service.name());
    }
}

/// The ports that the flags name are the ports that are declared.
#[test]
fn ports_are_those_of_the_flags() {
    for (source, _, plugin) in plugins() {
        for container in containers(pod_spec(&plugin.object).expect("a pod")) {
            let declared: BTreeSet<String> =
                list(&container["ports"]).map(|port| port["containerPort"].to_string()).collect();
            let flags = flags(container);
            for flag in ["http-endpoint", "port"] {
                let Some(value) = flags.get(flag) else { continue };
                let port = value.rsplit(':').next().expect("a port");
                let name = name(container);
                assert!(declared.contains(port), "{source}: {name} serves {port} and declares {declared:?}");
            }
        }
    }
}
