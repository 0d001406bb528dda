//! Promise: the client library finds the gateway by the cluster's objects alone, and a stream of it outlives restarts of the
//! gateway, new certificates, new addresses and tokens that end.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use kube::client::Body;
use nix::sys::signal::Signal;
use serde_json::{Value, json};
use snapshot_metadata_client::{Advice, Blocks, Client, Error, Options, Policy, Token};
use testkit::api_server::client_of;
use tonic::Code;
use tonic::codegen::http::{Request, Response};

use crate::community::backup_account;
use crate::driver::{Driver, MESSAGES, STEADY_MESSAGES, TUPLES};
use crate::world::{Files, World, eventually};

fn patient() -> Policy {
    Policy {
        retries: 1000,
        backoff: Duration::from_millis(20),
        max_backoff: Duration::from_millis(100),
        idle: Duration::from_secs(20),
        ..Policy::default()
    }
}

/// The same that gives up soon.
pub fn hasty() -> Policy {
    Policy { retries: 2, ..patient() }
}

/// A client of the API server with the rights of a backup application.
async fn application(world: &World) -> kube::Client {
    client_of(&backup_account(world).await).await
}

/// What the library gets about two snapshots, from the cluster's service and from the driver itself.
pub async fn answers(
    kubeconfig: &Path,
    namespace: &str,
    socket: &Path,
    (first, second): (&str, &str),
    handles: (&str, &str),
) -> Answers {
    let cluster = Client::kubernetes(client_of(kubeconfig).await, namespace, Options::default());
    let base = cluster.snapshot_handle(first).await.expect("a handle");
    assert_eq!(base, handles.0);
    let driver = Client::csi(&format!("unix://{}", socket.display())).expect("an endpoint");
    let mut all = Vec::new();
    for (client, first, second) in [(&cluster, first, second), (&driver, handles.0, handles.1)] {
        let blocks = client.allocated(first).await.expect("allocated");
        let capacity = blocks.capacity();
        let delta = client.delta(&base, second).await.expect("a delta");
        assert_eq!(delta.capacity(), capacity);
        all.push(Answers { capacity, allocated: rest(blocks).await, delta: rest(delta).await });
        let error = client.delta(handles.1, first).await.expect_err("the wrong way round");
        assert_eq!((error.code(), error.advice()), (Some(Code::InvalidArgument), Advice::Stop), "{error}");
    }
    assert_eq!(all[0], all[1], "the driver says something else");
    all.remove(0)
}

#[derive(Debug, PartialEq)]
pub struct Answers {
    pub capacity: u64,
    pub allocated: Vec<(u64, u64)>,
    pub delta: Vec<(u64, u64)>,
}

async fn rest(blocks: Blocks) -> Vec<(u64, u64)> {
    let ranges = blocks.collect_all().await.expect("a whole answer");
    ranges.iter().map(|range| (range.offset, range.length)).collect()
}

/// What the driver lists in this number of messages.
fn listed(messages: i64) -> Vec<(u64, u64)> {
    (0..(messages * TUPLES) as u64).map(|number| (number * 8192, 4096)).collect()
}

pub async fn a_client_finds_all_it_needs(world: World) {
    let (driver, ns, _) = &world.with_snapshots(&[("monday", "plain-1"), ("tuesday", "plain-2")]).await;
    let gateway = world.published_gateway().await;
    let client = Client::kubernetes(application(&world).await, ns, Options::default());
    let base = client.snapshot_handle("monday").await.expect("a handle");
    assert_eq!(base, "plain-1");
    let blocks = client.allocated("monday").await.expect("allocated");
    assert_eq!(blocks.capacity(), 1 << 40);
    assert_eq!(rest(blocks).await, listed(MESSAGES));
    let delta = client.delta(&base, "tuesday").await.expect("a delta");
    assert_eq!(rest(delta).await, listed(MESSAGES));
    let asked = driver.seen.deltas.lock().pop().expect("a request");
    assert_eq!((asked.base_snapshot_id.as_str(), asked.target_snapshot_id.as_str()), ("plain-1", "plain-2"));
    // Whose token it was.
    let user = json!(format!("system:serviceaccount:{ns}:backup"));
    eventually("it is on record", async || gateway.audit().iter().any(|line| line["user"] == user)).await;
    // The object of this CRD does not say that it can do without the base.
    assert!(client.needs_base_snapshot("monday").await.expect("the object"));
}

pub async fn what_is_missing_is_an_error_that_says_what_to_do(world: World) {
    let (_driver, ns, _) = &world.with_snapshots(&[("monday", "plain-1"), ("unknown", "unknown-1")]).await;
    let new = json!({"snapshot": {"status": null}, "content": {"status": null}});
    world.snapshot_but(ns, "new", "plain-3", new).await;
    let gateway = world.gateway(&[]).await;
    let api = application(&world).await;
    let with = |api: &kube::Client, token| {
        let options = Options { token, ..Options::default() };
        Client::kubernetes(api.clone(), ns, options).with_policy(hasty())
    };
    let client = with(&api, Token::OwnAccount);
    let failed =
        async |client: &Client, snapshot: &str| client.allocated(snapshot).await.expect_err("it fails");

    // No object for the driver: nobody serves its metadata.
    let error = failed(&client, "monday").await;
    assert!(matches!(&error, Error::NoService { driver } if *driver == world.driver), "{error:?}");
    assert_eq!(error.advice(), Advice::FullBackup);
    gateway.publish(&world).await;
    assert_eq!(rest(client.allocated("monday").await.expect("allocated")).await, listed(MESSAGES));

    for (snapshot, advice, words) in [
        ("nowhere", Advice::Stop, format!("VolumeSnapshot {ns}/nowhere does not exist")),
        ("new", Advice::Retry, format!("VolumeSnapshot {ns}/new cannot be used: it is not bound")),
        ("unknown", Advice::Stop, "NotFound: snapshot unknown-1 does not exist".into()),
    ] {
        let error = failed(&client, snapshot).await;
        assert!(error.to_string().contains(&words), "{snapshot}: {error}");
        assert_eq!(error.advice(), advice, "{snapshot}: {error}");
    }
    let error = client.delta("forgotten", "monday").await.expect_err("the base is gone");
    assert_eq!((error.code(), error.advice()), (Some(Code::NotFound), Advice::FullBackup));

    // Accounts that do not exist, may not, or are none.
    let named = |name: &str| Token::ServiceAccount { namespace: ns.clone(), name: name.into() };
    let nothing = {
        world.api.account(ns, "nothing", json!([])).await;
        client_of(&world.api.kubeconfig_of(ns, "nothing").await).await
    };
    for (client, words) in [
        (with(&api, named("nobody")), format!("ServiceAccount {ns}/nobody does not exist")),
        (with(&api, named("nothing")), "PermissionDenied".into()),
        (with(&nothing, Token::OwnAccount), format!("did not give VolumeSnapshot {ns}/monday")),
        (with(&world.api.client, Token::OwnAccount), "\"admin\" is not a service account".into()),
        (with(&api, Token::File(world.dir.path().join("none"))), "cannot read the token in /".into()),
    ] {
        let error = failed(&client, "monday").await;
        assert!(error.to_string().contains(&words), "{words}: {error}");
        assert_eq!(error.advice(), Advice::Stop, "{error}");
    }

    // An object that cannot be used, and one whose authority is not the gateway's.
    let elsewhere = tempfile::tempdir_in(world.dir.path()).expect("temp dir");
    let other = STANDARD.encode(Files::make(elsewhere.path()).ca);
    for (spec, advice, words) in [
        (json!({"caCert": "bm9uZQ=="}), Advice::Stop, "caCert is not a certificate in PEM"),
        (json!({"caCert": other}), Advice::Retry, "invalid peer certificate"),
        (json!({"address": "a b"}), Advice::Stop, "address is not a host and a port"),
        (json!({"address": "127.0.0.1:1"}), Advice::Retry, "Connection refused"),
    ] {
        world.change_service(spec).await;
        let error = failed(&client, "monday").await;
        assert!(error.to_string().contains(words), "{words}: {error}");
        assert_eq!(error.advice(), advice, "{error}");
    }
}

pub async fn a_gateway_may_go_and_come_back_elsewhere_with_another_authority(world: World) {
    let (driver, ns, _) = world.with_snapshot("monday", "steady-1").await;
    let ns = &ns;
    let config = world.gateway_kubeconfig("gateway").await;
    let first = world.gateway_by(&config, "first", &[]);
    first.ready().await;
    first.publish(&world).await;
    let api = application(&world).await;
    let client = Client::kubernetes(api, ns, Options::default()).with_policy(patient());
    let mut blocks = client.delta("gone", "monday").await.expect("a delta");
    let mut got = Vec::new();
    while got.len() < 1000 {
        let ranges = blocks.next().await.expect("more").expect("ranges");
        got.extend(ranges.iter().map(|range| (range.offset, range.length)));
    }
    // It is gone while the stream is open; the next one is elsewhere, and shows what the object does not vouch for yet.
    first.running.signal(Signal::SIGKILL);
    drop(first);
    let reading = tokio::spawn(async move {
        let mut blocks = blocks;
        let mut got = got;
        while let Some(ranges) = blocks.next().await {
            got.extend(ranges.expect("ranges").iter().map(|range| (range.offset, range.length)));
        }
        (got, blocks.resumed())
    });
    let second = world.gateway_by(&config, "second", &[]);
    second.ready().await;
    world.change_service(json!({"address": second.spec()["address"]})).await;
    eventually("it is not trusted", async || {
        let log = second.running.log();
        log.contains("BadCertificate") || log.contains("UnknownCA") || log.contains("received fatal alert")
    })
    .await;
    assert!(!reading.is_finished());
    world.change_service(second.spec()).await;
    let (got, resumed) = reading.await.expect("no panic");
    assert_eq!(got, listed(STEADY_MESSAGES));
    assert!(resumed >= 1);
    let offsets: Vec<i64> = driver.seen.deltas.lock().iter().map(|request| request.starting_offset).collect();
    assert!(offsets.len() == 2 && offsets[0] == 0 && offsets[1] >= 999 * 8192 + 4096, "{offsets:?}");
}

/// A client of the API server whose tokens are changed on their way, and how many were asked for.
fn tampering(
    inner: kube::Client,
    change: impl Fn(usize, &mut Value) + Send + Sync + 'static,
) -> (kube::Client, Arc<AtomicUsize>) {
    let requested = Arc::<AtomicUsize>::default();
    let (count, change) = (requested.clone(), Arc::new(change));
    let service = tower::service_fn(move |request: Request<Body>| {
        let (inner, count, change) = (inner.clone(), count.clone(), change.clone());
        async move {
            let is_token = request.uri().path().ends_with("/token");
            let answer = inner.send(request).await?;
            if !is_token {
                return Ok::<_, kube::Error>(answer);
            }
            let (head, body) = answer.into_parts();
            let mut object: Value = serde_json::from_slice(&body.collect_bytes().await?).expect("JSON");
            change(count.fetch_add(1, Ordering::SeqCst), &mut object);
            Ok(Response::from_parts(head, Body::from(object.to_string().into_bytes())))
        }
    });
    (kube::Client::new(service, "default"), requested)
}

pub async fn tokens_are_renewed_before_they_end_and_when_they_are_refused(world: World) {
    let (_driver, ns, _) = world.with_snapshot("monday", "plain-1").await;
    let ns = &ns;
    let _gateway = world.published_gateway().await;
    let api = application(&world).await;
    let spoil = |object: &mut Value| object["status"]["token"] = json!("spoiled");
    // What is done to which token, how many are asked for by two streams, and how they end.
    for (what, change, expected, is_ok) in [
        ("nothing", Box::new(|_, _: &mut Value| {}) as Box<dyn Fn(usize, &mut Value) + Send + Sync>, 1, true),
        (
            "its time is over at once",
            Box::new(|_, object: &mut Value| object["spec"]["expirationSeconds"] = json!(0)),
            2,
            true,
        ),
        (
            "the first is refused",
            Box::new(move |number, object: &mut Value| {
                if number == 0 {
                    spoil(object);
                }
            }),
            2,
            true,
        ),
        // The second stream begins with the last one of the first.
        ("all are refused", Box::new(move |_, object: &mut Value| spoil(object)), 3, false),
    ] {
        let (api, requested) = tampering(api.clone(), change);
        let client = Client::kubernetes(api, ns, Options::default()).with_policy(patient());
        for _ in 0..2 {
            match client.allocated("monday").await {
                Ok(blocks) => assert_eq!(rest(blocks).await, listed(MESSAGES), "{what}"),
                Err(error) => {
                    assert!(!is_ok, "{what}: {error}");
                    assert_eq!((error.code(), error.advice()), (Some(Code::Unauthenticated), Advice::Stop));
                }
            }
        }
        let requested = requested.load(Ordering::SeqCst);
        assert_eq!(requested, expected, "{what}");
    }
}

pub async fn a_token_in_a_file_is_followed(world: World) {
    let (driver, ns, _) = world.with_snapshot("monday", "steady-1").await;
    let ns = &ns;
    let gateway = world.published_gateway().await;
    let (first, second) = (world.reader("first").await, world.reader("second").await);
    let path = world.dir.path().join("token");
    std::fs::write(&path, format!("{first}\n")).expect("write");
    let options = Options { token: Token::File(path.clone()), ..Options::default() };
    let client = Client::kubernetes(world.api.client.clone(), ns, options).with_policy(patient());
    let mut blocks = client.allocated("monday").await.expect("a stream");
    let mut got = blocks.next().await.expect("more").expect("ranges");
    // The file changes while the stream is open, and then the driver is lost.
    std::fs::write(&path, &second).expect("write");
    drop(driver);
    let _driver = Driver::start(&world.driver, &world.socket());
    got.extend(blocks.collect_all().await.expect("a whole answer"));
    let got: Vec<_> = got.iter().map(|range| (range.offset, range.length)).collect();
    assert_eq!(got, listed(STEADY_MESSAGES));
    let users = || gateway.audit().into_iter().map(|line| line["user"].clone()).collect::<Vec<_>>();
    let user = |name: &str| json!(format!("system:serviceaccount:{ns}:{name}"));
    eventually("both are on record", async || {
        let users = users();
        users.first() == Some(&user("first")) && users.last() == Some(&user("second"))
    })
    .await;
    // A token that nobody accepts ends it, and says so.
    std::fs::write(&path, "expired").expect("write");
    let error = client.allocated("monday").await.expect_err("refused");
    assert_eq!((error.code(), error.advice()), (Some(Code::Unauthenticated), Advice::Stop));
    std::fs::write(&path, "\n").expect("write");
    let error = client.allocated("monday").await.expect_err("no token");
    assert!(matches!(error, Error::TokenFile { .. }), "{error}");
}

pub async fn an_api_server_that_is_away_does_not_end_a_stream(world: World) {
    let (driver, ns, _) = world.with_snapshot("monday", "steady-1").await;
    let ns = &ns;
    let _gateway = world.published_gateway().await;
    // It is away for this client alone: the other tests need it.
    let is_away = Arc::<AtomicBool>::default();
    let api = {
        let (inner, is_away) = (application(&world).await, is_away.clone());
        let service = tower::service_fn(move |request: Request<Body>| {
            let (inner, is_away) = (inner.clone(), is_away.clone());
            async move {
                match is_away.load(Ordering::SeqCst) {
                    true => Err(std::io::Error::from(std::io::ErrorKind::ConnectionRefused).into()),
                    false => {
                        inner.send(request).await.map_err(Box::<dyn std::error::Error + Send + Sync>::from)
                    }
                }
            }
        });
        kube::Client::new(service, "default")
    };
    let client = Client::kubernetes(api, ns, Options::default()).with_policy(patient());
    let mut blocks = client.allocated("monday").await.expect("a stream");
    let mut got = blocks.next().await.expect("more").expect("ranges");
    is_away.store(true, Ordering::SeqCst);
    drop(driver);
    let _driver = Driver::start(&world.driver, &world.socket());
    // The object as it was and the token that is held will do.
    got.extend(blocks.collect_all().await.expect("a whole answer"));
    let got: Vec<_> = got.iter().map(|range| (range.offset, range.length)).collect();
    assert_eq!(got, listed(STEADY_MESSAGES));
    // A new question needs the API server.
    let error = client.with_policy(hasty()).allocated("monday").await.expect_err("it is away");
    assert!(error.to_string().contains("the Kubernetes API server did not give VolumeSnapshot"), "{error}");
    assert_eq!(error.advice(), Advice::Retry);
}
