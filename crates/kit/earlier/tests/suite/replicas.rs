//! Promise: one replica is elected and ready, the others are not; when it is gone another takes over, and a walk goes on where
//! it was. Requests fail only while no replica is ready.

use std::sync::Arc;
use std::time::{Duration, Instant};

use k8s_openapi::api::coordination::v1::{Lease, LeaseSpec};
use kube::Api;
use nix::sys::signal::Signal;
use serde_json::{Value, json};
use testkit::api_server::ApiServer;
use tokio::sync::watch;
use tokio::task::{JoinHandle, JoinSet};

use crate::aggregated::page_of_pair;
use crate::aggregation::{Aggregation, create, entries, snapshots};
use crate::driver::{Driver, Volume};
use crate::walk::tuples;
use crate::world::{Program, World, readiness};

pub async fn the_replica_that_is_not_elected_is_not_ready_and_takes_over(world: World) {
    let volume = Volume::small();
    let expected = volume.tuples(Some("s0"), "s1", 0).expect("tuples");
    let _driver = Driver::start(&world.driver, &world.csi, volume);
    world.ask_of_two().await;
    let mut one = world.start(&[]).await;
    let mut two = Program::start(&world, "two", &one.kubeconfig, &[]);
    let token = world.user("user").await;
    let url = world.url("walk").await;
    let (_, _, first) = one.get(&format!("{url}?maxEntries=1"), Some(&token)).await;
    assert_eq!(tuples(&first), expected[..1]);
    two.waits_for_election().await;
    assert_eq!((two.readiness().await.0, one.readiness().await.0), (503, 200));
    one.running.kill();
    two.ready().await;
    // The new one writes the status: in a cluster both have the address of one Service.
    let moved = |status: &serde_json::Value| {
        status["callbackURL"].as_str().is_some_and(|url| url.contains(&two.address))
    };
    world.status("walk", "taken over", moved).await;
    let next = first["NextOffset"].as_str().expect("a place");
    let path = format!("/{}/walk?startOffset={next}", world.namespace);
    let (code, _, rest) = two.get(&path, Some(&token)).await;
    assert_eq!((code, tuples(&rest)), (200, expected[1..].to_vec()));
    // An orderly stop ends with 0 and takes the socket away.
    assert!(two.socket.exists());
    assert_eq!(two.running.stop().code(), Some(0), "{}", two.running.log());
    assert!(!two.socket.exists(), "the socket is left behind");
    // What a killed one left behind is no obstacle.
    assert!(one.socket.exists());
    drop(one);
    let again = Program::start(&world, "one", &two.kubeconfig, &[]);
    // And the one that was stopped has given the lease back.
    again.ready().await;
}

/// Users at once, and how long each waits between two requests.
const USERS: usize = 4;
const PAUSE: Duration = Duration::from_millis(20);
const PAGE: usize = 8;

/// What a user asks for, in the two designs in which one replica is elected.
#[derive(Clone)]
enum Pages {
    /// The URL of a DifferentialSnapshot, without the host.
    Differential(String),
    CbtHttp,
}

/// A request: when it was sent, when it was answered, and what was wrong.
struct Call {
    begun: Instant,
    ended: Instant,
    failure: Option<String>,
}

/// A replica, as users know it.
#[derive(Clone)]
struct Replica {
    client: reqwest::Client,
    address: String,
    http: u16,
}

impl Replica {
    fn of(program: &Program) -> Self {
        let (client, address) = (program.https(program.at()), program.address.clone());
        Replica { client, address, http: program.http }
    }

    /// A page and where the next one begins.
    async fn page(&self, pages: &Pages, token: &str, at: &str) -> Result<(Vec<(u64, u64)>, String), String> {
        let request = match pages {
            Pages::Differential(path) => {
                let query = format!("maxEntries={PAGE}&startOffset={at}");
                self.client.get(format!("https://{}{path}?{query}", self.address))
            }
            Pages::CbtHttp => {
                let body = json!({"fromSnapshotId": "s0", "toSnapshotId": "s1", "maxEntries": PAGE, "startingToken": at});
                let url = format!("https://{}/v1alpha1/deltas", self.address);
                self.client.post(url).header("content-type", "application/json").body(body.to_string())
            }
        };
        let answer = request.bearer_auth(token).send().await.map_err(|error| format!("{error:?}"))?;
        let code = answer.status().as_u16();
        let body = answer.text().await.map_err(|error| format!("{error:?}"))?;
        if code != 200 {
            return Err(format!("{code}: {body}"));
        }
        let page: Value = serde_json::from_str(&body).expect("JSON");
        let blocks = |list: &str, offset: &str, size: &str| {
            let number = |block: &Value, field: &str| block[field].as_u64().expect("a number");
            let blocks = page[list].as_array().expect("a list").iter();
            blocks.map(|block| (number(block, offset), number(block, size))).collect()
        };
        let (blocks, next) = match pages {
            Pages::Differential(_) => (blocks("ChangeBlockList", "Offset", "Size"), &page["NextOffset"]),
            Pages::CbtHttp => (blocks("changedBlocks", "offset", "blockSizeBytes"), &page["nextToken"]),
        };
        Ok((blocks, next.as_str().expect("a place").to_owned()))
    }
}

/// What leads users to the replica that is ready, as a Service does; and the users.
struct Load {
    replicas: watch::Sender<Vec<Replica>>,
    /// Which one is ready, and since when.
    ready: watch::Receiver<(Option<usize>, Instant)>,
    tasks: JoinSet<Vec<Call>>,
    served: watch::Sender<usize>,
    stop: watch::Sender<bool>,
    service: JoinHandle<()>,
}

impl Load {
    fn start(first: &Program, pages: &Pages, token: &str, expected: &[(u64, u64)]) -> Self {
        let (replicas, known) = watch::channel(vec![Replica::of(first)]);
        let (tell, ready) = watch::channel((None, Instant::now()));
        let (stop, stopped) = watch::channel(false);
        let served = watch::Sender::new(0);
        let service = tokio::spawn({
            let known = known.clone();
            async move {
                loop {
                    let replicas = known.borrow().clone();
                    let mut found: Option<usize> = None;
                    for (number, replica) in replicas.iter().enumerate() {
                        if readiness(replica.http).await.0 == 200 {
                            // The one before may have handed over since it was asked.
                            let before = found.replace(number).map(|before| replicas[before].http);
                            if let Some(before) = before {
                                assert_ne!(readiness(before).await.0, 200, "two replicas are ready");
                            }
                        }
                    }
                    tell.send_if_modified(|(now, since)| {
                        let is_new = *now != found;
                        if is_new {
                            (*now, *since) = (found, Instant::now());
                        }
                        is_new
                    });
                    tokio::time::sleep(PAUSE).await;
                }
            }
        });
        let mut tasks = JoinSet::new();
        for _ in 0..USERS {
            let (known, mut ready, stopped) = (known.clone(), ready.clone(), stopped.clone());
            let served = served.clone();
            let (pages, token, expected) = (pages.clone(), token.to_owned(), expected.to_vec());
            tasks.spawn(async move {
                let (mut calls, mut told, mut at) = (Vec::new(), Vec::new(), String::new());
                ready.wait_for(|(found, _)| found.is_some()).await.expect("the service works");
                // Whole walks only: each goes on at the same place, however often it is refused.
                while !*stopped.borrow() || !told.is_empty() {
                    let begun = Instant::now();
                    let chosen = ready.borrow().0.map(|number| known.borrow()[number].clone());
                    let answer = match chosen {
                        Some(replica) => replica.page(&pages, &token, &at).await,
                        None => Err("no replica is ready".to_owned()),
                    };
                    let failure = answer.as_ref().err().cloned();
                    calls.push(Call { begun, ended: Instant::now(), failure });
                    if let Ok((blocks, next)) = answer {
                        served.send_modify(|served| *served += 1);
                        told.extend(blocks);
                        at = next;
                        if at.is_empty() {
                            assert_eq!(told, expected, "a walk has lost or gained blocks");
                            told.clear();
                        }
                    }
                    tokio::time::sleep(PAUSE).await;
                }
                calls
            });
        }
        Load { replicas, ready, tasks, served, stop, service }
    }

    /// Another replica, behind the same Service.
    fn add(&self, program: &Program) -> usize {
        self.replicas.send_modify(|replicas| replicas.push(Replica::of(program)));
        self.replicas.borrow().len() - 1
    }

    /// Waits until users are led there, and says since when.
    async fn led_to(&mut self, number: usize) -> Instant {
        let led = self.ready.wait_for(|(found, _)| *found == Some(number));
        let led = tokio::time::timeout(Duration::from_secs(90), led).await;
        led.unwrap_or_else(|_| panic!("replica {number} is not ready")).expect("the service works").1
    }

    /// Waits until requests that begin now have been served: a user has one under way at most.
    async fn at_work(&self) {
        let enough = *self.served.borrow() + 2 * USERS;
        let mut served = self.served.subscribe();
        let waited =
            tokio::time::timeout(Duration::from_secs(90), served.wait_for(|served| *served >= enough));
        waited.await.expect("users are served").expect("the sender is here");
    }

    /// Ends when all walks have ended, and returns every call.
    async fn end(self) -> Vec<Call> {
        self.stop.send(true).expect("users");
        let calls = self.tasks.join_all().await;
        assert!(!self.service.is_finished(), "two replicas were ready");
        self.service.abort();
        calls.into_iter().flatten().collect()
    }
}

/// The one Lease of the world.
async fn lease(world: &World) -> LeaseSpec {
    let leases: Api<Lease> = Api::namespaced(world.api.client.clone(), &world.namespace);
    let mut all = leases.list(&Default::default()).await.expect("leases").items;
    assert_eq!(all.len(), 1, "{all:?}");
    all.remove(0).spec.expect("a spec")
}

/// How long a request may be on its way to the server.
const JUST_BEFORE: Duration = Duration::from_millis(100);

/// Kills the elected replica of two and stops the next one, with users at work: only between the signal and the moment when the
/// next one is ready may a request fail.
async fn two_changes(
    world: &World,
    pages: Pages,
    token: &str,
    expected: &[(u64, u64)],
    first: Program,
    start: impl AsyncFn(&str) -> Program,
) {
    let mut load = Load::start(&first, &pages, token, expected);
    let mut elected = first;
    load.led_to(0).await;
    let mut gaps = Vec::new();
    for (number, name, signal) in [(1, "two", Signal::SIGKILL), (2, "three", Signal::SIGTERM)] {
        let next = start(name).await;
        next.waits_for_election().await;
        load.add(&next);
        load.at_work().await;
        let before = lease(world).await;
        let begun = Instant::now();
        elected.running.signal(signal);
        if signal == Signal::SIGTERM {
            elected.running.ended().await;
            // It has not left the lease to run out.
            let after = lease(world).await;
            assert_ne!(after.holder_identity, before.holder_identity, "the lease was not given back");
        }
        let ended = load.led_to(number).await;
        let after = lease(world).await;
        if signal == Signal::SIGKILL {
            // What explains the gap: nobody may take the lease before it has run out.
            let taken = after.acquire_time.as_ref().expect("a time").0;
            let renewed = before.renew_time.as_ref().expect("a time").0;
            let seconds = taken.duration_since(renewed).as_secs();
            let lasts = i64::from(before.lease_duration_seconds.expect("a duration"));
            assert!(seconds >= lasts, "a lease of {lasts} s was taken {seconds} s after its renewal");
        }
        gaps.push((signal, begun, ended));
        elected = next;
        load.at_work().await;
    }
    let calls = load.end().await;
    let mut failed = vec![0; gaps.len()];
    for call in &calls {
        let Some(failure) = &call.failure else { continue };
        // The killed one takes what is under way with it; the one that is stopped ends it. But it closes idle connections, and
        // what was sent on one a moment before is lost.
        let gap = gaps.iter().position(|(signal, begun, ended)| {
            let lost = if *signal == Signal::SIGKILL { call.ended } else { call.begun + JUST_BEFORE };
            lost >= *begun && call.begun <= *ended
        });
        failed[gap.unwrap_or_else(|| panic!("a request failed outside of both gaps: {failure}"))] += 1;
    }
    for ((signal, begun, ended), failed) in gaps.iter().zip(&failed) {
        let served = calls.iter().filter(|call| call.failure.is_none() && call.begun > *ended).count();
        assert!(served >= USERS, "{served} requests were served after {signal}");
        eprintln!(
            "{}: nobody ready for {:.1} s after {signal}; {failed} of {} requests failed, all of them then",
            world.driver,
            ended.duration_since(*begun).as_secs_f64(),
            calls.len(),
        );
    }
    let before = calls.iter().filter(|call| call.failure.is_none() && call.ended < gaps[0].1).count();
    assert!(before >= USERS, "{before} requests were served before the first signal");
    assert!(failed[0] > 0, "nobody asked while no replica was ready");
}

/// A volume of which all has changed, and the tuples that say it.
fn many() -> (Volume, Vec<(u64, u64)>) {
    let volume = Volume::pair(vec![1; 100], vec![2; 100]);
    let expected = volume.tuples(Some("s0"), "s1", 0).expect("tuples");
    (volume, expected)
}

pub async fn requests_fail_in_the_readiness_gap_alone(world: World) {
    let (volume, expected) = many();
    let _driver = Driver::start(&world.driver, &world.csi, volume);
    world.ask_of_two().await;
    let one = world.start(&[]).await;
    let (token, kubeconfig) = (world.user("user").await, one.kubeconfig.clone());
    let pages = Pages::Differential(format!("/{}/walk", world.namespace));
    let start = async |name: &str| Program::start(&world, name, &kubeconfig, &[]);
    two_changes(&world, pages, &token, &expected, one, start).await;
}

pub async fn requests_of_cbt_http_fail_in_the_readiness_gap_alone(world: World) {
    let (volume, expected) = many();
    let _driver = Driver::start(&world.driver, &world.csi, volume);
    let sidecars = Aggregation::apart(&world).await;
    let one = sidecars.sidecar_unready("one", &[]);
    one.ready().await;
    let token = world.api.token(&world.namespace, "aggregated", "cbt-http").await;
    let start = async |name: &str| sidecars.sidecar_unready(name, &[]);
    two_changes(&world, Pages::CbtHttp, &token, &expected, one, start).await;
}

/// Asks again and again, as a user would, until there is a page. Every refusal must be one of those that tell to try again.
async fn page_of(program: &Program, path: &str, token: &str, at: &str) -> (Value, usize) {
    let (client, url) = (program.https(program.at()), format!("https://{}{path}", program.address));
    let deadline = Instant::now() + Duration::from_secs(90);
    for refused in 0.. {
        let request = client.get(format!("{url}?maxEntries={PAGE}&startOffset={at}")).bearer_auth(token);
        // Nobody listens while it is killed.
        if let Ok(answer) = request.send().await {
            let code = answer.status().as_u16();
            let body = answer.bytes().await.expect("a body");
            let body: Value = serde_json::from_slice(&body).expect("JSON");
            if code == 200 {
                return (body, refused);
            }
            assert_eq!(code, 503, "{body}");
        }
        assert!(Instant::now() < deadline, "no page in 90 s:\n{}", program.running.log());
        tokio::time::sleep(PAUSE).await;
    }
    unreachable!("it has counted to the end")
}

pub async fn a_walk_of_pages_goes_on_whatever_is_killed(world: World) {
    let (volume, expected) = many();
    let mut driver = Driver::start(&world.driver, &world.csi, volume.clone());
    world.ask_of_two().await;
    let mut program = world.start(&[]).await;
    let (token, path) = (world.user("user").await, format!("/{}/walk", world.namespace));
    world.url("walk").await;
    let (mut told, mut at, mut refused) = (Vec::new(), String::new(), Vec::new());
    for number in 0.. {
        match number {
            3 => {
                program.running.kill();
                program = Program::start(&world, "one", &program.kubeconfig.clone(), &[]);
            }
            6 => {
                drop(driver);
                let (code, _, body) = program.get(&path, Some(&token)).await;
                assert_eq!(code, 503, "{body}");
                driver = Driver::start(&world.driver, &world.csi, volume.clone());
            }
            _ => {}
        }
        let (page, tries) = page_of(&program, &path, &token, &at).await;
        refused.push(tries);
        told.extend(tuples(&page));
        at = page["NextOffset"].as_str().expect("a place").to_owned();
        if at.is_empty() {
            break;
        }
    }
    assert_eq!(told, expected);
    assert!(refused[3] > 0, "the kill was not noticed: {refused:?}");
    drop(driver);
}

/// Its own API server: the others need theirs.
pub async fn walks_go_on_after_the_api_server_and_etcd_are_killed(shared: World) {
    let api = ApiServer::start().await;
    api.install(&crate::CRDS).await;
    let api = Arc::new(api);
    let world = World::new(api.clone(), "walks_go_on_after_the_api_server_and_etcd_are_killed").await;
    drop(shared);
    let (volume, expected) = many();
    let _driver = Driver::start(&world.driver, &world.csi, volume);
    world.ask_of_two().await;
    // Reviews are not remembered, so that every page needs the API server.
    let program = world.start(&["--review-cache=0s"]).await;
    let (token, path) = (world.user("user").await, format!("/{}/walk", world.namespace));
    world.url("walk").await;
    let aggregation = Aggregation::apart(&world).await;
    let _http = aggregation.sidecar("http", &[]).await;
    let server = aggregation.server("server", &[]).await;
    aggregation.route(&[&server]).await;
    let user = aggregation.user("user-of-deltas", json!([create(), snapshots(&[])])).await;
    let spec = |offset: u64| page_of_pair(offset, PAGE);
    let (page, _) = page_of(&program, &path, &token, "").await;
    let (mut told, mut at) = (tuples(&page), page["NextOffset"].as_str().expect("a place").to_owned());
    let status = user.status(spec(0)).await;
    let (mut told_deltas, mut offset) = (entries(&status), status["continue"].as_u64());
    api.kill();
    let (code, _, body) = program.get(&format!("{path}?startOffset={at}"), Some(&token)).await;
    assert_eq!(code, 503, "{body}");
    api.start_again().await;
    while !at.is_empty() {
        let (page, _) = page_of(&program, &path, &token, &at).await;
        told.extend(tuples(&page));
        at = page["NextOffset"].as_str().expect("a place").to_owned();
    }
    assert_eq!(told, expected);
    let deadline = Instant::now() + Duration::from_secs(90);
    while let Some(next) = offset {
        let (code, answer) = user.ask(spec(next)).await;
        if code == 201 && answer["status"]["state"] != json!(2) {
            told_deltas.extend(entries(&answer["status"]));
            offset = answer["status"]["continue"].as_u64();
            continue;
        }
        assert!([201, 503].contains(&code), "{code}: {answer}");
        assert!(Instant::now() < deadline, "no page in 90 s: {answer}");
        tokio::time::sleep(PAUSE).await;
    }
    assert_eq!(told_deltas, expected);
}
