//! Promise: what the watches do not show is not guessed, and a gateway whose watches get no answer says so.

use std::path::Path;
use std::time::{Duration, Instant, SystemTime};

use kube::Api;
use kube::api::{DynamicObject, ListParams};
use kube::core::{ApiResource, GroupVersionKind};
use serde_json::json;
use testkit::api_server::client_of;
use tonic::Code;

use crate::cost::{Bridge, Link};
use crate::driver::Driver;
use crate::metrics::{samples, sum};
use crate::rights::DENIED_BASE;
use crate::world::{AUDIENCE, Files, Gateway, World, eventually};

/// Gives the gateway with this kubeconfig the right to list and watch contents, or takes it. All its other rights stay, so its
/// watch of contents alone fails.
async fn may_watch_contents(world: &World, config: &Path, may: bool) {
    let role = format!("{}-gateway", world.namespace);
    let rule = |resources: &[&str], verbs: &[&str]| json!({"apiGroups": ["snapshot.storage.k8s.io"], "resources": resources, "verbs": verbs});
    let watch = ["get", "list", "watch"];
    let mut rules =
        world.api.objects("ClusterRole", None).get(&role).await.expect("the role").data["rules"].clone();
    rules.as_array_mut().expect("rules").retain(|rule| {
        let names = |name: &str| rule["resources"].as_array().is_some_and(|all| all.contains(&json!(name)));
        !names("volumesnapshots") && !names("volumesnapshotcontents")
    });
    let contents = if may { &watch[..] } else { &watch[..1] };
    let new = [rule(&["volumesnapshots"], &watch), rule(&["volumesnapshotcontents"], contents)];
    rules.as_array_mut().expect("rules").extend(new);
    world.api.merge("ClusterRole", None, &role, json!({"rules": rules})).await;
    // The API server has to see that too.
    let kind = GroupVersionKind::gvk("snapshot.storage.k8s.io", "v1", "VolumeSnapshotContent");
    let contents: Api<DynamicObject> = Api::all_with(client_of(config).await, &ApiResource::from_gvk(&kind));
    eventually("the right counts", async || {
        contents.list(&ListParams::default().limit(1)).await.is_ok() == may
    })
    .await;
}

pub async fn no_base_is_taken_for_deleted_before_all_contents_are_listed(world: World) {
    let driver = Driver::start(&world.driver, &world.socket());
    let (ns, other) = (world.namespace.clone(), world.other_namespace().await);
    world.snapshot(&ns, "monday", "plain-1").await;
    world.snapshot(&other, "theirs", "plain-2").await;
    let token = world.reader("reader").await;
    let config = world.gateway_kubeconfig("gateway").await;
    may_watch_contents(&world, &config, false).await;
    let gateway = world.gateway_by(&config, "gateway", &[]);
    gateway.until("/readyz", "listing", |(_, text)| text.contains("not listed yet")).await;
    let mut client = gateway.client().await;
    for _ in 0..3 {
        let (code, message) = client.delta(&token, &ns, "plain-2", "monday").await.expect_err("refused");
        assert_eq!(code, Code::Unavailable, "{message}");
        assert!(message.contains("are not listed yet"), "{message}");
    }
    may_watch_contents(&world, &config, true).await;
    gateway.ready().await;
    let refused = client.delta(&token, &ns, "plain-2", "monday").await.expect_err("refused");
    assert_eq!(refused, (Code::PermissionDenied, DENIED_BASE.into()));
    assert!(driver.seen.deltas.lock().is_empty(), "the driver was asked");
}

/// One gateway may not watch contents any more, and the link of another to the API server is dead without a word. Both say so in
/// bounded time, so that their Service leads to other replicas, and come back by themselves.
pub async fn a_gateway_whose_watches_are_not_answered_is_not_ready(world: World) {
    let driver = Driver::start(&world.driver, &world.socket());
    let (ns, other) = (world.namespace.clone(), world.other_namespace().await);
    world.snapshot(&ns, "monday", "plain-1").await;
    let token = world.reader("reader").await;
    let config = world.gateway_kubeconfig("gateway").await;
    let (through, bridge) = Bridge::before(&world, &world.gateway_kubeconfig("cut-off").await).await;
    let files = Files::make(world.dir.path());
    let [cut_off, gateway] = [(&through, "cut-off"), (&config, "gateway")].map(|(config, name)| {
        Gateway::start(&world, config, name, &["--audience", AUDIENCE], Some(files.clone()))
    });
    for gateway in [&gateway, &cut_off] {
        gateway.ready().await;
    }

    bridge.set(Link::Frozen);
    may_watch_contents(&world, &config, false).await;
    let lost = Instant::now();
    // The last good answer is at most as old as a watch.
    for gateway in [&gateway, &cut_off] {
        until(gateway, 503, "has not answered a watch for 90 seconds").await;
        assert!(lost.elapsed() > Duration::from_secs(55), "after {:?}", lost.elapsed());
        assert!(lost.elapsed() < Duration::from_secs(120), "after {:?}", lost.elapsed());
        assert_eq!(gateway.get("/healthz").await.expect("an answer").0, 200, "a restart would not help");
    }
    let both = ["volumesnapshots", "volumesnapshotcontents"];
    let [snapshots, contents] = age_of(&gateway, both).await;
    assert!(snapshots < 45.0 && contents >= 89.0, "{snapshots} {contents}");
    let [snapshots, contents] = age_of(&cut_off, both).await;
    assert!(snapshots >= 60.0 && contents >= 60.0, "{snapshots} {contents}");
    // Another tenant's snapshot, which the watch does not know, is no deleted one.
    world.snapshot(&other, "theirs", "plain-2").await;
    let mut client = gateway.client().await;
    let (code, message) = client.delta(&token, &ns, "plain-2", "monday").await.expect_err("refused");
    assert_eq!(code, Code::Unavailable, "{message}");
    assert!(message.contains("has not answered a watch"), "{message}");

    bridge.set(Link::Open);
    may_watch_contents(&world, &config, true).await;
    for gateway in [&gateway, &cut_off] {
        until(gateway, 200, "ok").await;
    }
    let refused = client.delta(&token, &ns, "plain-2", "monday").await.expect_err("refused");
    assert_eq!(refused, (Code::PermissionDenied, DENIED_BASE.into()));
    assert!(driver.seen.deltas.lock().is_empty(), "the driver was asked");
}

async fn until(gateway: &Gateway, status: u16, words: &str) {
    gateway.until("/readyz", words, |(is, text)| *is == status && text.contains(words)).await;
}

/// How many seconds ago the watches of these objects were answered.
async fn age_of<const N: usize>(gateway: &Gateway, objects: [&str; N]) -> [f64; N] {
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).expect("after 1970").as_secs_f64();
    let samples = samples(&gateway.get("/metrics").await.expect("metrics").1);
    objects.map(|objects| {
        now - sum(&samples, "deltapath_gateway_watch_answered_seconds", &[("objects", objects)])
    })
}
