//! Promise: certificates and the SnapshotMetadataService look after themselves, and no client notices.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use kube::api::DynamicObject;
use nix::sys::signal::Signal;
use serde_json::{Value, json};
use testkit::free_port;
use tonic::Code;

use crate::driver::Driver;
use crate::world::{AUDIENCE, Client, Files, Gateway, World, code, eventually};

/// A gateway that manages certificates, which live for seconds.
async fn start(world: &World, name: &str, config: &Path, address: &str, lifetimes: [&str; 3]) -> Gateway {
    let [ca, leaf, overlap] = lifetimes;
    let (ca, leaf) = (format!("--ca-lifetime={ca}"), format!("--certificate-lifetime={leaf}"));
    let overlap = format!("--ca-overlap={overlap}");
    let (namespace, pod) = (format!("--namespace={}", world.namespace), format!("--pod-name={name}"));
    let address = format!("--service-address={address}");
    let arguments = [
        "--manage-certificates",
        "--audience",
        AUDIENCE,
        "--require-base-snapshot=false",
        &ca,
        &leaf,
        &overlap,
        &namespace,
        &pod,
        &address,
    ];
    Gateway::start(world, config, name, &arguments, None)
}

async fn service(world: &World) -> Option<DynamicObject> {
    world.api.objects("SnapshotMetadataService", None).get_opt(&world.driver).await.expect("get")
}

fn spec(object: &DynamicObject, field: &str) -> String {
    object.data["spec"][field].as_str().unwrap_or_default().to_owned()
}

fn bundle(object: &DynamicObject) -> String {
    let bytes = STANDARD.decode(spec(object, "caCert")).expect("base64");
    String::from_utf8(bytes).expect("PEM")
}

/// The Secret that the manifests bring, empty.
async fn empty_secret(world: &World) {
    let metadata = json!({"name": "deltapath-snapshot-metadata-tls", "namespace": world.namespace});
    world.api.make(json!({"apiVersion": "v1", "kind": "Secret", "metadata": metadata})).await;
}

pub async fn the_elected_replica_makes_renews_and_publishes(world: World) {
    let driver = Driver::start(&world.driver, &world.socket());
    let ns = world.namespace.clone();
    world.snapshot(&ns, "monday", "plain-1").await;
    world.snapshot(&ns, "long", "slow-1").await;
    empty_secret(&world).await;
    let token = world.reader("reader").await;
    let config = world.gateway_kubeconfig("gateway").await;
    // A CA every 6 seconds, a certificate every 4, two seconds of overlap: ten hand-overs in about a minute.
    let lifetimes = ["9s", "6s", "2s"];
    let one = start(&world, "one", &config, "127.0.0.1:1", lifetimes).await;
    let two = start(&world, "two", &config, "127.0.0.1:1", lifetimes).await;
    one.ready().await;
    two.ready().await;
    let object = service(&world).await.expect("the object");
    assert_eq!(spec(&object, "audience"), AUDIENCE);
    assert_eq!(spec(&object, "address"), "127.0.0.1:1");
    let mut trusting = Client::connect(one.port, "127.0.0.1", &bundle(&object)).await.expect("connect");
    let long = trusting.0.get_metadata_allocated(proto::kubernetes::GetMetadataAllocatedRequest {
        security_token: token.clone(),
        namespace: ns.clone(),
        snapshot_name: "long".into(),
        ..Default::default()
    });
    let mut long = long.await.expect("a stream").into_inner();
    assert!(long.message().await.expect("a message").is_some());

    // Clients that come all the time, with what the object named a second ago: less than the overlap.
    let stop = Arc::new(AtomicBool::new(false));
    let calls = Arc::new(AtomicUsize::new(0));
    let world = Arc::new(world);
    let clients: Vec<_> = [one.port, two.port]
        .repeat(4)
        .into_iter()
        .map(|port| {
            let (world, stop, calls, token, ns) =
                (world.clone(), stop.clone(), calls.clone(), token.clone(), ns.clone());
            tokio::spawn(async move {
                while !stop.load(Ordering::Relaxed) {
                    let object = service(&world).await.expect("there is an object at any time");
                    let bundle = bundle(&object);
                    assert!(bundle.contains("BEGIN CERTIFICATE"), "an object without a CA");
                    assert!(!bundle.contains("PRIVATE KEY"));
                    tokio::time::sleep(Duration::from_secs(1)).await;
                    let client = Client::connect(port, "127.0.0.1", &bundle).await;
                    let mut client =
                        client.unwrap_or_else(|error| panic!("{error:?}: the CA of the object does not do"));
                    assert_eq!(code(&client.allocated(&token, &ns, "monday").await), Code::Ok);
                    calls.fetch_add(1, Ordering::Relaxed);
                }
            })
        })
        .collect();
    // The authorities that the object has named.
    let mut named = std::collections::BTreeSet::new();
    let mut keys = std::collections::BTreeSet::new();
    let deadline = Instant::now() + Duration::from_secs(170);
    while named.len() < 11 {
        let object = service(&world).await.expect("there is an object at any time");
        let bundle = bundle(&object);
        let certificates: Vec<_> =
            bundle.split_inclusive("-----END CERTIFICATE-----\n").map(str::to_owned).collect();
        assert!(certificates.len() <= 3, "{} authorities are named at once", certificates.len());
        named.extend(certificates);
        let secret =
            world.api.objects("Secret", Some(&ns)).get("deltapath-snapshot-metadata-tls").await.expect("get");
        keys.insert(secret.data["data"]["tls.key"].to_string());
        // Two keys of authorities at most, and one of a server: those of the past are gone.
        let kept =
            STANDARD.decode(secret.data["data"]["certificates.json"].as_str().expect("it")).expect("base64");
        let kept: Value = serde_json::from_slice(&kept).expect("JSON");
        let private = kept.to_string().matches("BEGIN PRIVATE KEY").count();
        assert!(private <= 3, "{private} private keys are kept");
        assert!(clients.iter().all(|client| !client.is_finished()), "a client failed");
        assert!(Instant::now() < deadline, "{} authorities in that time:\n{}", named.len(), one.log());
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    stop.store(true, Ordering::Relaxed);
    for client in clients {
        client.await.expect("no call failed");
    }
    assert!(keys.len() >= 10, "{} keys", keys.len());
    assert!(calls.load(Ordering::Relaxed) > 100, "{calls:?} calls");
    // The stream that was open through all of it is open still.
    let next = tokio::time::timeout(Duration::from_millis(100), long.message()).await;
    assert!(next.is_err(), "the stream was lost: {next:?}");
    assert_eq!(*driver.seen.open.lock().unwrap(), 1);
    let elected =
        [&one, &two].iter().filter(|gateway| gateway.log().contains("making the first certificates")).count();
    assert_eq!(elected, 1);
}

pub async fn another_replica_takes_over(world: World) {
    let _driver = Driver::start(&world.driver, &world.socket());
    let ns = world.namespace.clone();
    world.snapshot(&ns, "monday", "plain-1").await;
    empty_secret(&world).await;
    let token = world.reader("reader").await;
    let config = world.gateway_kubeconfig("gateway").await;
    // Long enough for the other to be elected (15 s) before the certificate ends.
    let lifetimes = ["3650d", "45s", "1h"];
    let one = start(&world, "one", &config, "127.0.0.1:1", lifetimes).await;
    one.ready().await;
    let two = start(&world, "two", &config, "127.0.0.1:1", lifetimes).await;
    two.ready().await;
    let holder = async || {
        let lease = world.api.objects("Lease", Some(&ns)).get("deltapath-gateway").await.expect("the lease");
        spec(&lease, "holderIdentity")
    };
    assert_eq!(holder().await, "one");
    let secret = async || {
        let secret =
            world.api.objects("Secret", Some(&ns)).get("deltapath-snapshot-metadata-tls").await.expect("get");
        secret.data["data"]["tls.crt"].to_string()
    };
    let before = secret().await;
    let ca = bundle(&service(&world).await.expect("the object"));
    one.signal(Signal::SIGKILL);
    eventually("the other is elected", async || holder().await == "two").await;
    eventually("the other renews", async || secret().await != before).await;
    let object = service(&world).await.expect("the object");
    assert_eq!(bundle(&object), ca, "the authority is the same");
    let mut client = Client::connect(two.port, "127.0.0.1", &ca).await.expect("connect");
    assert_eq!(code(&client.allocated(&token, &ns, "monday").await), Code::Ok);
    // The object is made again where somebody deletes it or changes what it says.
    let services = world.api.objects("SnapshotMetadataService", None);
    services.delete(&world.driver, &Default::default()).await.expect("delete");
    eventually("it is made again", async || service(&world).await.is_some()).await;
    let wrong = kube::api::Patch::Merge(json!({"spec": {"address": "elsewhere:1"}}));
    services.patch(&world.driver, &Default::default(), &wrong).await.expect("patch");
    eventually("it is mended", async || {
        service(&world).await.is_some_and(|object| spec(&object, "address") == "127.0.0.1:1")
    })
    .await;
    // A replica that stands still longer than its lease, and goes on, does nothing as the elected one.
    two.signal(Signal::SIGSTOP);
    let three = start(&world, "three", &config, "127.0.0.1:1", lifetimes).await;
    eventually("the third is elected", async || holder().await == "three").await;
    two.signal(Signal::SIGCONT);
    eventually("the second knows", async || two.log().contains("no longer elected")).await;
    assert_eq!(holder().await, "three");
    three.ready().await;
}

pub async fn an_object_that_a_person_wrote_is_left_alone(world: World) {
    let _driver = Driver::start(&world.driver, &world.socket());
    empty_secret(&world).await;
    let config = world.gateway_kubeconfig("gateway").await;
    let written = json!({
        "apiVersion": "cbt.storage.k8s.io/v1beta1", "kind": "SnapshotMetadataService",
        "metadata": {"name": world.driver},
        "spec": {"address": "by.hand:1", "audience": "by-hand", "caCert": "YnkgaGFuZA=="},
    });
    world.api.make(written).await;
    let before = service(&world).await.expect("the object").metadata.resource_version;
    let gateway = start(&world, "one", &config, "127.0.0.1:1", ["9s", "6s", "2s"]).await;
    gateway.ready().await;
    eventually("it says so", async || gateway.log().contains("it is left alone")).await;
    tokio::time::sleep(Duration::from_secs(5)).await;
    assert_eq!(service(&world).await.expect("the object").metadata.resource_version, before);
    assert_eq!(gateway.log().matches("it is left alone").count(), 1, "it says so again and again");
}

pub async fn files_are_loaded_again_when_they_change(world: World) {
    let _driver = Driver::start(&world.driver, &world.socket());
    let ns = world.namespace.clone();
    world.snapshot(&ns, "monday", "plain-1").await;
    let token = world.reader("reader").await;
    let mut gateway = world.gateway(&[]).await;
    let mut early = gateway.client().await;
    // The certificate alone does not fit to the key that is there: the old pair serves on.
    let old_key = std::fs::read(world.dir.path().join("tls.key")).expect("read");
    let renewed = Files::make(world.dir.path());
    let new_key = std::fs::read(&renewed.key).expect("read");
    std::fs::write(&renewed.key, &old_key).expect("write");
    eventually("it is refused", async || gateway.log().contains("a new certificate is not used")).await;
    assert_eq!(code(&gateway.client().await.allocated(&token, &ns, "monday").await), Code::Ok);
    std::fs::write(&renewed.key, &new_key).expect("write");
    eventually("the new one is shown", async || {
        Client::connect(gateway.port, crate::world::HOST, &renewed.ca).await.is_ok()
    })
    .await;
    assert!(
        Client::connect(gateway.port, crate::world::HOST, &gateway.files.as_ref().expect("files").ca)
            .await
            .is_err()
    );
    assert_eq!(code(&early.allocated(&token, &ns, "monday").await), Code::Ok, "an open connection goes on");
    gateway.files = Some(renewed);
    assert_eq!(code(&gateway.client().await.allocated(&token, &ns, "monday").await), Code::Ok);
    assert!(gateway.is_alive());
    // A file that is no certificate stops the start, with its name.
    std::fs::write(world.dir.path().join("tls.crt"), "nothing").expect("write");
    let output = std::process::Command::new(env!("CARGO_BIN_EXE_deltapath-gateway"))
        .args(["--tls-cert".into(), world.dir.path().join("tls.crt")])
        .args(["--tls-key".into(), world.dir.path().join("tls.key")])
        .arg(format!("--port={}", free_port()))
        .arg(format!("--http-endpoint=127.0.0.1:{}", free_port()))
        .output()
        .expect("run");
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success() && error.contains("certificate"), "{error}");
}
