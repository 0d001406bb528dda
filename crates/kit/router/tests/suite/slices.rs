//! Promise: a router that watches a Service of Kubernetes knows the nodes of now, and keeps those of before while the API
//! server is away. Of a volume that was made twice it deletes the one that no PersistentVolume has.

use csi_client::{block_capability, new_volume};
use nix::sys::signal::Signal;
use serde_json::{Value, json};
use testkit::api_server::ApiServer;
use testkit::{PoolKind, network};
use tonic::Code;

use testkit::cluster::{Cluster, eventually, patiently};

const SERVICE: &str = "deltapath-nodes";

fn endpoint(pod: usize, address: &str) -> Value {
    json!({
        "addresses": [address],
        "conditions": {"ready": pod != 1},
        "targetRef": {"kind": "Pod", "name": format!("node-{pod}"), "uid": format!("uid-{pod}")},
    })
}

/// A slice with this port, as the cluster's own controller writes it.
fn slice(name: &str, service: &str, port: u16, endpoints: &[Value]) -> Value {
    json!({
        "apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice", "addressType": "IPv4",
        "metadata": {"name": name, "namespace": "deltapath", "labels": {"kubernetes.io/service-name": service}},
        "ports": [{"name": "metrics", "port": 1, "protocol": "TCP"}, {"name": "router", "port": port, "protocol": "TCP"}],
        "endpoints": endpoints,
    })
}

/// A cluster of two drivers at these addresses, which no router knows yet, and an API server with the slices of the first of
/// them. Slices hold no loopback addresses.
async fn cluster(addresses: &[&str]) -> (Cluster, ApiServer) {
    addresses.iter().for_each(|address| network::add_local_address(address));
    let api = ApiServer::start().await;
    let mut cluster = Cluster::empty();
    for address in &addresses[..2] {
        cluster.add_node_on(PoolKind::Dir, &[], address, None).await;
    }
    api.namespace("deltapath").await;
    api.make(slice("one", SERVICE, cluster.nodes[0].port, &[endpoint(0, addresses[0])])).await;
    (cluster, api)
}

/// Flags of a router with what deploy/overlays/distributed allows it, and no more.
async fn flags(api: &ApiServer) -> Vec<String> {
    let list = |group: &str, resource: &str, verbs: &[&str]| json!([{"apiGroups": [group], "resources": [resource], "verbs": verbs}]);
    api.account("deltapath", "router", list("discovery.k8s.io", "endpointslices", &["list", "watch"])).await;
    let (of, name) = ("rbac.authorization.k8s.io/v1", json!({"name": "router"}));
    let rules = list("", "persistentvolumes", &["list"]);
    api.make(json!({"apiVersion": of, "kind": "ClusterRole", "metadata": name, "rules": rules})).await;
    api.bind("deltapath", "router", "router").await;
    let kubeconfig = api.kubeconfig_of("deltapath", "router").await;
    vec![
        format!("--node-service=deltapath/{SERVICE}"),
        format!("--kubeconfig={}", kubeconfig.display()),
        "--node-timeout=2s".to_owned(),
    ]
}

#[test_with::root]
#[test]
fn nodes_come_and_go_and_move_as_the_slices_of_a_service_say() {
    network::alone(|| async {
        let addresses = ["10.99.0.1", "10.99.0.2", "10.99.0.3"];
        let (mut cluster, api) = cluster(&addresses).await;
        let ports = [cluster.nodes[0].port, cluster.nodes[1].port];
        // Of another Service: not asked.
        api.make(slice("other", "other", ports[1], &[endpoint(1, addresses[1])])).await;

        let flags = flags(&api).await;
        let flags: Vec<&str> = flags.iter().map(String::as_str).collect();
        cluster.route(&[], &flags, 1).await;
        let mut client = cluster.client();
        let first = cluster.volume_on(0, "first").await;

        // One comes; it is not ready, and its volumes are where it is all the same.
        api.make(slice("two", SERVICE, ports[1], &[endpoint(1, addresses[1])])).await;
        cluster.router().sees(2).await;
        let second = cluster.volume_on(1, "second").await;
        client.create_snapshot("second", &second).await.expect("CreateSnapshot");

        // One goes: its objects are missed, and not taken for gone.
        api.delete("EndpointSlice", Some("deltapath"), "two").await;
        cluster.router().sees(1).await;
        let error = client.create_snapshot("more", &second).await.expect_err("its node has no address");
        assert_eq!(error.code(), Code::Unavailable, "{error}");
        let status = client.snapshots().await.expect_err("not all of them").status;
        assert!(status.message().contains(&cluster.nodes[1].name()), "{status}");
        client.create_snapshot("first", &first).await.expect("the other node");

        // It comes back at another address, in the slice of the first.
        cluster.nodes[1].rig.terminate();
        let listen = format!("--router-listen={}:{}", addresses[2], ports[0]);
        cluster.nodes[1].start_again_with(&[&listen]).await;
        let both = json!({"endpoints": [endpoint(0, addresses[0]), endpoint(1, addresses[2])]});
        api.merge("EndpointSlice", Some("deltapath"), "one", both).await;
        cluster.router().sees(2).await;
        client.create_snapshot("more", &second).await.expect("it is back");
        assert_eq!(client.snapshots().await.expect("all of them").len(), 3);

        // The API server is away: the last list is kept, also by what happens to the nodes meanwhile.
        api.kill_server();
        eventually("the watch has ended", async || {
            cluster.router().running.log().contains("cannot be watched now")
        })
        .await;
        cluster.router().sees(2).await;
        cluster.nodes[1].rig.terminate();
        cluster.router().sees(1).await;
        cluster.nodes[1].rig.start_again().await;
        cluster.router().sees(2).await;
        patiently!(client.create_snapshot("meanwhile", &second)).expect("both nodes are there");
        // And what has changed in the meantime is seen when it is back.
        api.start_again().await;
        let one = json!({"endpoints": [endpoint(1, addresses[2])]});
        api.merge("EndpointSlice", Some("deltapath"), "one", one).await;
        cluster.router().sees(1).await;
        let error = client.create_snapshot("late", &first).await.expect_err("its node has no address");
        assert_eq!(error.code(), Code::Unavailable, "{error}");
        let missed = "deltapath_router_nodes{state=\"away\"} 1\n";
        assert!(cluster.router().get("/metrics").await.contains(missed), "it is not missed");
        cluster.finish();
    });
}

/// Three volumes are made on a node that freezes, and again, on another node, by a router that has never heard of them. In
/// life the first answer was lost, or arrived, or nobody has said yet.
#[test_with::root]
#[test]
fn of_a_volume_made_twice_the_one_that_no_persistent_volume_has_is_deleted() {
    network::alone(|| async {
        let addresses = ["10.99.0.1", "10.99.0.2"];
        let (mut cluster, api) = cluster(&addresses).await;
        let second_node = slice("two", SERVICE, cluster.nodes[1].port, &[endpoint(1, addresses[1])]);
        api.make(second_node).await;
        let flags = flags(&api).await;
        let flags: Vec<&str> = flags.iter().map(String::as_str).collect();
        cluster.route(&[], &flags, 2).await;
        let names = ["lost", "arrived", "open"];
        let mut firsts = Vec::new();
        for name in names {
            // By the node alone, as if the arbiter had forgotten which node it chose.
            let request = new_volume(name, 16 << 20, block_capability());
            let made = cluster.nodes[0].rig.client.create_volume(request).await;
            firsts.push(made.expect("CreateVolume").volume_id);
        }
        cluster.nodes[0].signal(Signal::SIGSTOP);
        let fresh = cluster.another("fresh", &[], &flags, 1).await;
        let mut client = fresh.client.clone();
        let mut seconds = Vec::new();
        for name in names {
            let request = || new_volume(name, 16 << 20, block_capability());
            seconds.push(patiently!(client.create_volume(request())).expect("the other node").volume_id);
        }
        for (name, handle) in [("lost", &seconds[0]), ("arrived", &firsts[1])] {
            api.make(json!({
                "apiVersion": "v1", "kind": "PersistentVolume", "metadata": {"name": name},
                "spec": {
                    "capacity": {"storage": "16Mi"}, "accessModes": ["ReadWriteOnce"],
                    "csi": {"driver": "deltapath.csi.dev", "volumeHandle": handle},
                },
            }))
            .await;
        }
        cluster.nodes[0].signal(Signal::SIGCONT);
        fresh.sees(2).await;
        let volumes = |node: usize| testkit::names(&cluster.nodes[node].rig.pool_dir().join("volumes"));
        let sorted = |ids: [&String; 2]| {
            let mut ids = ids.map(String::clone).to_vec();
            ids.sort();
            ids
        };
        // The directory of a volume is gone before its node has forgotten the name: the end of the call counts.
        eventually("the unused ones are deleted", async || {
            fresh.running.log().matches("that no PersistentVolume has is deleted").count() == 2
        })
        .await;
        assert_eq!(volumes(0), sorted([&firsts[1], &firsts[2]]));
        assert_eq!(volumes(1), sorted([&seconds[0], &seconds[2]]));
        // One is left, and is found by its name.
        for (name, id) in [("lost", &seconds[0]), ("arrived", &firsts[1])] {
            let found = client.create_volume(new_volume(name, 16 << 20, block_capability())).await;
            assert_eq!(found.expect("one is left").volume_id, *id);
        }
        let both = client.create_volume(new_volume("open", 16 << 20, block_capability())).await;
        assert_eq!(both.expect_err("which of them?").code(), Code::FailedPrecondition);
        let counted = "deltapath_router_volumes_made_twice_total 4\n";
        assert!(
            fresh.get("/metrics").await.contains(counted),
            "three were found, and one again when it was asked for"
        );
        fresh.finish();
        cluster.finish();
    });
}
