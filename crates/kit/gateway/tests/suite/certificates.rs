//! Promise: certificates and the SnapshotMetadataService look after themselves, and no client notices.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use futures_util::StreamExt;
use kube::api::DynamicObject;
use kube::runtime::WatchStreamExt;
use kube::runtime::watcher::{self, Event, watcher};
use nix::sys::signal::Signal;
use proto::kubernetes::GetMetadataAllocatedRequest;
use serde_json::{Value, json};
use testkit::free_port;
use tokio::sync::oneshot;
use tokio::task::JoinHandle;
use tonic::Code;
use x509_parser::pem::Pem;
use x509_parser::time::ASN1Time;

use crate::driver::{Driver, TUPLES};
use crate::world::{AUDIENCE, Client, Files, Gateway, HOST, World, about, code, eventually};

/// A gateway that manages certificates, which live for seconds.
pub fn start(world: &World, name: &str, config: &Path, lifetimes: [&str; 3]) -> Gateway {
    start_requiring(world, name, config, lifetimes, false)
}

/// The same with what it is to say about bases.
fn start_requiring(world: &World, name: &str, config: &Path, lifetimes: [&str; 3], base: bool) -> Gateway {
    let [ca, leaf, overlap] = lifetimes;
    let (ca, leaf) = (format!("--ca-lifetime={ca}"), format!("--certificate-lifetime={leaf}"));
    let overlap = format!("--ca-overlap={overlap}");
    let (namespace, pod) = (format!("--namespace={}", world.namespace), format!("--pod-name={name}"));
    let base = format!("--require-base-snapshot={base}");
    let place = ["--audience", AUDIENCE, "--service-address=127.0.0.1:1", &namespace, &pod];
    let arguments = [&place[..], &["--manage-certificates", &base, &ca, &leaf, &overlap]].concat();
    Gateway::start(world, config, name, &arguments, None)
}

pub async fn service(world: &World) -> Option<DynamicObject> {
    world.api.objects("SnapshotMetadataService", None).get_opt(&world.driver).await.expect("get")
}

fn spec(object: &DynamicObject, field: &str) -> String {
    object.data["spec"][field].as_str().unwrap_or_default().to_owned()
}

pub fn bundle(object: &DynamicObject) -> String {
    let bytes = STANDARD.decode(spec(object, "caCert")).expect("base64");
    String::from_utf8(bytes).expect("PEM")
}

/// The Secret that the manifests bring, empty.
pub async fn empty_secret(world: &World) {
    let metadata = json!({"name": "deltapath-snapshot-metadata-tls", "namespace": world.namespace});
    world.api.make(json!({"apiVersion": "v1", "kind": "Secret", "metadata": metadata})).await;
}

async fn secret(world: &World) -> Value {
    let secrets = world.api.objects("Secret", Some(&world.namespace));
    secrets.get("deltapath-snapshot-metadata-tls").await.expect("get").data["data"].clone()
}

/// A watch of the driver's SnapshotMetadataService: from the first event on the object names an authority that is valid, at
/// any moment, and nobody but the test deletes it.
struct Watched {
    own_deletions: Arc<AtomicUsize>,
    stop: oneshot::Sender<()>,
    task: JoinHandle<usize>,
}

impl Watched {
    fn start(world: &World) -> Self {
        let services = world.api.objects("SnapshotMetadataService", None);
        let one = watcher::Config::default().fields(&format!("metadata.name={}", world.driver));
        let (stop, mut stopped) = oneshot::channel();
        let own_deletions = Arc::<AtomicUsize>::default();
        let allowed = own_deletions.clone();
        let task = tokio::spawn(async move {
            let mut events = watcher(services, one).default_backoff().boxed();
            let (mut objects, mut deletions, mut lists) = (0, 0, 0);
            // When the last of the authorities ends that the object names.
            let mut ends = None;
            loop {
                let event = tokio::select! {
                    event = events.next() => event.expect("a watch has no end"),
                    _ = &mut stopped => break,
                };
                match event {
                    Ok(Event::Apply(object) | Event::InitApply(object)) => {
                        assert_valid_until(ends);
                        ends = Some(authorities_end(&object));
                        objects += 1;
                    }
                    Ok(Event::Delete(object)) => {
                        assert_valid_until(ends.take());
                        authorities_end(&object);
                        objects += 1;
                        deletions += 1;
                        assert!(deletions <= allowed.load(Ordering::Relaxed), "the object was deleted");
                    }
                    // What was between a watch and the next list nobody knows.
                    Ok(Event::Init) => lists += 1,
                    Ok(Event::InitDone) => assert_eq!(lists, 1, "the watch has missed something"),
                    Err(error) => eprintln!("the watch is tried again: {error}"),
                }
            }
            assert_valid_until(ends);
            assert_eq!(deletions, allowed.load(Ordering::Relaxed), "deletions that were seen");
            objects
        });
        Watched { own_deletions, stop, task }
    }

    /// Ends it, and fails if there ever was no valid authority.
    async fn finish(self) {
        // It is closed where the watch has failed, which the next line says.
        let _ = self.stop.send(());
        let objects = self.task.await.expect("an object with a valid authority at any moment");
        assert!(objects > 0, "the watch saw no object");
    }
}

fn assert_valid_until(ends: Option<i64>) {
    let now = ASN1Time::now().timestamp();
    assert!(ends.is_none_or(|ends| now < ends), "the object named no valid authority any more");
}

/// When the last of the authorities ends that the object names. At least one of them is valid now.
fn authorities_end(object: &DynamicObject) -> i64 {
    let bundle = bundle(object);
    let ends = Pem::iter_from_buffer(bundle.as_bytes()).map(|block| {
        let block = block.expect("PEM");
        let certificate = block.parse_x509().expect("a certificate");
        assert!(certificate.is_ca(), "{} is no authority", certificate.subject());
        let validity = certificate.validity();
        (validity.is_valid(), validity.not_after.timestamp())
    });
    let valid = ends.filter(|(is_valid, _)| *is_valid).map(|(_, ends)| ends).max();
    valid.unwrap_or_else(|| panic!("the object names no valid authority: {bundle:?}"))
}

/// Reads a stream of a replica that has no end, until the test says so, and counts what comes. It never fails, none of its
/// messages is missing, and it is never silent for long.
async fn read_on(
    port: u16,
    ca: &str,
    request: GetMetadataAllocatedRequest,
    messages: Arc<AtomicUsize>,
    stop: Arc<AtomicBool>,
) -> JoinHandle<()> {
    /// A message comes every 30 ms.
    const SILENCE: Duration = Duration::from_secs(30);
    let mut client = Client::connect(port, "127.0.0.1", ca).await.expect("connect");
    let mut stream = client.0.get_metadata_allocated(request).await.expect("a stream").into_inner();
    tokio::spawn(async move {
        while !stop.load(Ordering::Relaxed) {
            let message = tokio::time::timeout(SILENCE, stream.message()).await.expect("messages come");
            let message = message.expect("the stream does not fail").expect("the stream does not end");
            let number = messages.fetch_add(1, Ordering::Relaxed) as i64;
            assert_eq!(message.block_metadata[0].byte_offset, number * TUPLES * 8192, "one is missing");
        }
    })
}

pub async fn the_elected_replica_makes_renews_and_publishes(world: World) {
    let (driver, ns, token) = world.with_snapshot("monday", "plain-1").await;
    world.snapshot(&ns, "long", "paced-1").await;
    empty_secret(&world).await;
    let watched = Watched::start(&world);
    let config = world.gateway_kubeconfig("gateway").await;
    // A CA every 6 seconds, a certificate every 4, two seconds of overlap: ten hand-overs in about a minute.
    let lifetimes = ["9s", "6s", "2s"];
    const OVERLAP: Duration = Duration::from_secs(2);
    let one = start(&world, "one", &config, lifetimes);
    let two = start(&world, "two", &config, lifetimes);
    one.ready().await;
    two.ready().await;
    let object = service(&world).await.expect("the object");
    assert_eq!(spec(&object, "audience"), AUDIENCE);
    assert_eq!(spec(&object, "address"), "127.0.0.1:1");
    // A stream on each replica, open and read through all that follows.
    let end_streams = Arc::new(AtomicBool::new(false));
    let messages = [(); 2].map(|()| Arc::<AtomicUsize>::default());
    let mut readers = Vec::new();
    for (gateway, messages) in [&one, &two].into_iter().zip(&messages) {
        let request = about(&token, &ns, "long");
        let (messages, stop) = (messages.clone(), end_streams.clone());
        readers.push(read_on(gateway.port, &bundle(&object), request, messages, stop).await);
    }
    let read = || messages.each_ref().map(|count| count.load(Ordering::Relaxed));
    let more_comes = async || {
        let before = read();
        eventually("more comes on each stream", async || {
            read().iter().zip(&before).all(|(now, before)| now > before)
        })
        .await;
    };

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
                    let read = Instant::now();
                    let object = service(&world).await.expect("there is an object at any time");
                    let bundle = bundle(&object);
                    assert!(bundle.contains("BEGIN CERTIFICATE"), "an object without a CA");
                    assert!(!bundle.contains("PRIVATE KEY"));
                    tokio::time::sleep(Duration::from_secs(1)).await;
                    let mut client = match Client::connect(port, "127.0.0.1", &bundle).await {
                        Ok(client) => client,
                        Err(error) if read.elapsed() < OVERLAP => {
                            panic!("{error:?}: the CA of the object does not do")
                        }
                        // On a busy machine it came too late.
                        Err(_) => continue,
                    };
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
        let secret = secret(&world).await;
        let is_new = keys.insert(secret["tls.key"].to_string());
        // Two keys of authorities at most, and one of a server: those of the past are gone.
        let kept = STANDARD.decode(secret["certificates.json"].as_str().expect("it")).expect("base64");
        let kept: Value = serde_json::from_slice(&kept).expect("JSON");
        let private = kept.to_string().matches("BEGIN PRIVATE KEY").count();
        assert!(private <= 3, "{private} private keys are kept");
        assert!(clients.iter().all(|client| !client.is_finished()), "a client failed");
        assert!(readers.iter().all(|reader| !reader.is_finished()), "a stream failed");
        if is_new {
            more_comes().await;
        }
        let count = named.len();
        assert!(Instant::now() < deadline, "{count} authorities in that time:\n{}", one.running.log());
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    stop.store(true, Ordering::Relaxed);
    for client in clients {
        client.await.expect("no call failed");
    }
    assert!(keys.len() >= 10, "{} keys", keys.len());
    assert!(calls.load(Ordering::Relaxed) > 100, "{calls:?} calls");
    more_comes().await;
    end_streams.store(true, Ordering::Relaxed);
    for reader in readers {
        reader.await.expect("no stream failed");
    }
    // Each was one stream all along.
    {
        let asked = driver.seen.allocated.lock();
        assert_eq!(asked.iter().filter(|request| request.target_snapshot_id == "paced-1").count(), 2);
    }
    watched.finish().await;
    let elected = [&one, &two]
        .iter()
        .filter(|gateway| gateway.running.log().contains("making the first certificates"))
        .count();
    assert_eq!(elected, 1);
}

pub async fn another_replica_takes_over(world: World) {
    let (_driver, ns, token) = world.with_snapshot("monday", "plain-1").await;
    empty_secret(&world).await;
    let watched = Watched::start(&world);
    let config = world.gateway_kubeconfig("gateway").await;
    // Long enough for the other to be elected (15 s) before the certificate ends.
    let lifetimes = ["3650d", "45s", "1h"];
    let one = start(&world, "one", &config, lifetimes);
    one.ready().await;
    let two = start(&world, "two", &config, lifetimes);
    two.ready().await;
    let holder = async || {
        let lease = world.api.objects("Lease", Some(&ns)).get("deltapath-gateway").await.expect("the lease");
        spec(&lease, "holderIdentity")
    };
    assert_eq!(holder().await, "one");
    let before = secret(&world).await["tls.crt"].clone();
    let ca = bundle(&service(&world).await.expect("the object"));
    one.running.signal(Signal::SIGKILL);
    eventually("the other is elected", async || holder().await == "two").await;
    eventually("the other renews", async || secret(&world).await["tls.crt"] != before).await;
    let object = service(&world).await.expect("the object");
    assert_eq!(bundle(&object), ca, "the authority is the same");
    let mut client = Client::connect(two.port, "127.0.0.1", &ca).await.expect("connect");
    assert_eq!(code(&client.allocated(&token, &ns, "monday").await), Code::Ok);
    // The object is made again where somebody deletes it or changes what it says.
    watched.own_deletions.store(1, Ordering::Relaxed);
    world.api.delete("SnapshotMetadataService", None, &world.driver).await;
    eventually("it is made again", async || service(&world).await.is_some()).await;
    world.change_service(json!({"address": "elsewhere:1"})).await;
    eventually("it is written again", async || {
        service(&world).await.is_some_and(|object| spec(&object, "address") == "127.0.0.1:1")
    })
    .await;
    // A replica that stands still longer than its lease, and goes on, does nothing as the elected one.
    two.running.signal(Signal::SIGSTOP);
    let three = start(&world, "three", &config, lifetimes);
    eventually("the third is elected", async || holder().await == "three").await;
    two.running.signal(Signal::SIGCONT);
    eventually("the second knows", async || two.running.log().contains("no longer elected")).await;
    assert_eq!(holder().await, "three");
    three.ready().await;
    watched.finish().await;
}

pub async fn an_object_that_a_person_wrote_is_left_alone(world: World) {
    let _driver = Driver::start(&world.driver, &world.socket());
    empty_secret(&world).await;
    let config = world.gateway_kubeconfig("gateway").await;
    world.service("by.hand:1", "by-hand", "YnkgaGFuZA==").await;
    let before = service(&world).await.expect("the object").metadata.resource_version;
    let gateway = start(&world, "one", &config, ["9s", "6s", "2s"]);
    gateway.ready().await;
    eventually("it says so", async || gateway.running.log().contains("it is left alone")).await;
    tokio::time::sleep(Duration::from_secs(5)).await;
    assert_eq!(service(&world).await.expect("the object").metadata.resource_version, before);
    assert_eq!(gateway.running.log().matches("it is left alone").count(), 1, "it says so again and again");
}

pub async fn the_object_says_whether_a_delta_wants_its_base(world: World) {
    let _driver = Driver::start(&world.driver, &world.socket());
    empty_secret(&world).await;
    let config = world.gateway_kubeconfig("gateway").await;
    let said = async || Some(service(&world).await?.data["spec"]["requireBaseSnapshotForDelta"].clone());
    // Nothing else makes it write the object anew. It is looked at every half second.
    let lifetimes = ["3650d", "90d", "4s"];
    let mut gateway = start_requiring(&world, "one", &config, lifetimes, false);
    eventually("the object says it", async || said().await == Some(json!(false))).await;
    for base in [true, false] {
        gateway.running.signal(Signal::SIGTERM);
        gateway.running.ended().await;
        gateway = start_requiring(&world, "one", &config, lifetimes, base);
        eventually("the object says it", async || said().await == Some(json!(base))).await;
    }
    // As where the CRD did not know the field when the object was written, and was replaced since.
    world.change_service(json!({"requireBaseSnapshotForDelta": null})).await;
    eventually("a gateway that runs says it", async || said().await == Some(json!(false))).await;
}

pub async fn files_are_loaded_again_when_they_change(world: World) {
    let (_driver, ns, token) = world.with_snapshot("monday", "plain-1").await;
    let mut gateway = world.gateway(&[]).await;
    let mut early = gateway.client().await;
    // The certificate alone does not fit to the key that is there: the old pair serves on.
    let old_key = std::fs::read(world.dir.path().join("tls.key")).expect("read");
    let renewed = Files::make(world.dir.path());
    let new_key = std::fs::read(&renewed.key).expect("read");
    std::fs::write(&renewed.key, &old_key).expect("write");
    eventually("it is refused", async || gateway.running.log().contains("a new certificate is not used"))
        .await;
    assert_eq!(code(&gateway.client().await.allocated(&token, &ns, "monday").await), Code::Ok);
    std::fs::write(&renewed.key, &new_key).expect("write");
    eventually("the new one is shown", async || {
        Client::connect(gateway.port, HOST, &renewed.ca).await.is_ok()
    })
    .await;
    assert!(Client::connect(gateway.port, HOST, gateway.ca()).await.is_err());
    assert_eq!(code(&early.allocated(&token, &ns, "monday").await), Code::Ok, "an open connection goes on");
    gateway.files = Some(renewed);
    assert_eq!(code(&gateway.client().await.allocated(&token, &ns, "monday").await), Code::Ok);
    assert!(gateway.running.is_alive());
    // What cannot be used stops the start, with the names of the files.
    let [chain, key] = ["tls.crt", "tls.key"].map(|name| world.dir.path().join(name));
    let [sound_chain, sound_key] = [&chain, &key].map(|file| std::fs::read(file).expect("read"));
    let garbage = b"-----BEGIN CERTIFICATE-----\nYWJj\n-----END CERTIFICATE-----\n".to_vec();
    for (in_chain, in_key, said) in [
        (b"nothing".to_vec(), sound_key.clone(), "tls.crt holds no certificate in PEM"),
        (Vec::new(), sound_key.clone(), "tls.crt holds no certificate in PEM"),
        (sound_key.clone(), sound_chain.clone(), "tls.crt holds no certificate in PEM"),
        (garbage, sound_key, "tls.crt holds no certificate"),
        (sound_chain.clone(), sound_chain.clone(), "tls.key holds no private key in PEM"),
        (sound_chain, old_key, "tls.key is not the key of the certificate in"),
    ] {
        std::fs::write(&chain, in_chain).expect("write");
        std::fs::write(&key, in_key).expect("write");
        let error = fails_to_start(&[("--tls-cert", &chain), ("--tls-key", &key)], None);
        assert!(error.contains(said), "{said}: {error}");
    }
}

/// What a gateway says that cannot be started with these files.
fn fails_to_start(files: &[(&str, &Path)], kubeconfig: Option<&Path>) -> String {
    let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_deltapath-gateway"));
    for (flag, file) in files {
        command.arg(flag).arg(file);
    }
    if let Some(file) = kubeconfig {
        command.env("KUBECONFIG", file);
    }
    let http = format!("--http-endpoint=127.0.0.1:{}", free_port());
    let output = command.args([format!("--port={}", free_port()), http]).output().expect("run");
    assert_eq!(output.status.code(), Some(1), "{output:?}");
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// Found from outside: a kubeconfig with an error in it was printed, with its tokens.
pub async fn a_broken_kubeconfig_is_named_and_not_quoted(world: World) {
    let files = Files::make(world.dir.path());
    let config = world.dir.path().join("broken");
    let tls = [("--tls-cert", files.chain.as_path()), ("--tls-key", files.key.as_path())];
    for text in ["users:\n- name: t\n  user: {token: hidden\nclusters: []\n", "users:\n- hidden\n", "hidden"]
    {
        std::fs::write(&config, text).expect("write");
        let by_flag: Vec<_> = tls.into_iter().chain([("--kubeconfig", config.as_path())]).collect();
        for (error, named) in
            [(fails_to_start(&by_flag, None), "broken"), (fails_to_start(&tls, Some(&config)), "KUBECONFIG")]
        {
            let is_said = error.contains(named) && error.contains("line");
            assert!(is_said && !error.contains("hidden"), "{text:?}: {error}");
        }
    }
}

/// Found from outside: with the certificate of yesterday a gateway was ready, and every client failed.
pub async fn a_certificate_that_has_ended_is_not_ready(world: World) {
    let _driver = Driver::start(&world.driver, &world.socket());
    let files = Files::make(world.dir.path());
    let sound = [&files.chain, &files.key].map(|file| std::fs::read(file).expect("read"));
    let key = rcgen::KeyPair::generate().expect("a key");
    let mut ended = rcgen::CertificateParams::new(vec![HOST.to_owned()]).expect("params");
    ended.not_before = rcgen::date_time_ymd(2020, 1, 1);
    ended.not_after = rcgen::date_time_ymd(2021, 1, 1);
    std::fs::write(&files.chain, ended.self_signed(&key).expect("a certificate").pem()).expect("write");
    std::fs::write(&files.key, key.serialize_pem()).expect("write");
    let config = world.gateway_kubeconfig("gateway").await;
    let gateway = Gateway::start(&world, &config, "gateway", &["--audience", AUDIENCE], Some(files.clone()));
    let is_ended = |(status, body): &(u16, String)| *status == 503 && body.contains("has ended");
    gateway.until("/readyz", "ended", is_ended).await;
    let ends = gateway.metric("deltapath_gateway_certificate_not_after_seconds").await;
    assert_eq!(ends, 1_609_459_200.0);
    let log = gateway.running.log();
    assert!(log.contains("clients refuse the certificate") && log.contains("2021"), "{log}");
    for (file, bytes) in [&files.chain, &files.key].into_iter().zip(&sound) {
        std::fs::write(file, bytes).expect("write");
    }
    gateway.ready().await;
}

/// Found from outside: whoever wrote a Lease with a duration of years first, kept every replica from making certificates.
pub async fn a_strangers_lease_does_not_last_for_years(world: World) {
    let _driver = Driver::start(&world.driver, &world.socket());
    let lease = json!({
        "apiVersion": "coordination.k8s.io/v1", "kind": "Lease",
        "metadata": {"name": "deltapath-gateway", "namespace": world.namespace},
        "spec": {
            "holderIdentity": "stranger", "leaseDurationSeconds": i32::MAX, "leaseTransitions": i32::MAX,
            "renewTime": "2026-01-01T00:00:00.000000Z",
        },
    });
    world.api.make(lease).await;
    empty_secret(&world).await;
    let config = world.gateway_kubeconfig("gateway").await;
    let gateway = start(&world, "one", &config, ["3650d", "90d", "1h"]);
    // Twice as long as a lease of its own.
    gateway.ready().await;
}
