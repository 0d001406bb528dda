//! Promise: the status of a DifferentialSnapshot says whether it can be asked about, and follows what it depends on. The
//! design's own cases for its controller are among these.

use kube::api::{Patch, PatchParams};
use serde_json::{Value, json};

use crate::driver::{Driver, Volume};
use crate::world::World;

fn volume() -> Volume {
    Volume::random(&mut fastrand::Rng::with_seed(1), 3)
}

fn is_failed(with: &'static str) -> impl Fn(&Value) -> bool {
    move |status| {
        status["state"] == "failed" && status["error"].as_str().is_some_and(|error| error.starts_with(with))
    }
}

pub async fn snapshots_that_exist_give_a_url(world: World) {
    let _driver = Driver::start(&world.driver, &world.csi, volume());
    world.two_snapshots().await;
    // One is there before the controller, one comes later.
    world.ask("both", Some("monday"), "tuesday").await;
    let program = world.start(&[]).await;
    world.ask("alone", None, "tuesday").await;
    for name in ["both", "alone"] {
        let url = world.url(name).await;
        assert_eq!(url, format!("https://{}/{}/{name}", program.address, world.namespace));
        assert!(world.read(name).await["status"].get("error").is_none(), "an error beside a URL");
    }
    // The defaults are in the object.
    assert_eq!(world.read("alone").await["spec"]["mode"], "block");
}

pub async fn what_does_not_exist_fails_until_it_does(world: World) {
    let _driver = Driver::start(&world.driver, &world.csi, volume());
    world.snapshot("monday", "s0").await;
    let _program = world.start(&[]).await;
    world.ask("no-target", Some("monday"), "tuesday").await;
    world.ask("no-base", Some("sunday"), "monday").await;
    world.ask("neither", Some("x"), "y").await;
    for (name, missing) in [("no-target", "tuesday"), ("no-base", "sunday"), ("neither", "y")] {
        let status = world.status(name, "failed", is_failed("NotFound")).await;
        assert!(status["error"].as_str().expect("an error").contains(missing), "{status}");
        assert!(status.get("callbackURL").is_none(), "a URL beside an error: {status}");
    }
    world.snapshot("tuesday", "s1").await;
    world.url("no-target").await;
    // And back, when a snapshot goes.
    world.api.delete("VolumeSnapshot", Some(&world.namespace), "tuesday").await;
    let status = world.status("no-target", "failed again", is_failed("NotFound")).await;
    assert!(status.get("callbackURL").is_none(), "a URL of what is gone: {status}");
}

pub async fn pairs_that_do_not_fit_fail(world: World) {
    let _driver = Driver::start(&world.driver, &world.csi, volume());
    world.snapshot_taken_at("first", "s0", 100).await;
    world.snapshot_taken_at("second", "s1", 200).await;
    world
        .snapshot_with("of-another-volume", "s2", |_, content| {
            content["spec"]["source"] = json!({"volumeHandle": "volume-2"});
        })
        .await;
    let foreign = |_: &mut Value, content: &mut Value| content["spec"]["driver"] = json!("other.csi.test");
    world.snapshot_with("foreign", "s0", foreign).await;
    world
        .snapshot_with("stolen", "s0", |_, content| {
            content["spec"]["volumeSnapshotRef"]["name"] = json!("first");
        })
        .await;
    let _program = world.start(&[]).await;
    world.ask("theirs", None, "foreign").await;
    for (name, base, target, error) in [
        ("base-after-target", "second", "first", "InvalidArgument: the base is newer"),
        (
            "two-volumes",
            "of-another-volume",
            "second",
            "InvalidArgument: base and target are snapshots of different",
        ),
        ("foreign-base", "foreign", "second", "InvalidArgument"),
        ("not-bound", "stolen", "second", "FailedPrecondition"),
    ] {
        world.ask(name, Some(base), target).await;
        world.status(name, error, is_failed(error)).await;
    }
    world.ask("fits", Some("first"), "second").await;
    world.url("fits").await;
    // Another driver's target is left to its own controller. This one has seen it before all of the others.
    assert!(
        world.read("theirs").await.get("status").is_none_or(Value::is_null),
        "a status of another driver's"
    );
}

pub async fn the_status_follows_another_target_and_a_deletion(world: World) {
    let driver = Driver::start(&world.driver, &world.csi, volume());
    for (name, handle) in [("monday", "s0"), ("tuesday", "s1"), ("wednesday", "s2")] {
        world.snapshot(name, handle).await;
    }
    let program = world.start(&["--review-cache=0s"]).await;
    let token = world.user("user").await;
    world.ask("walk", Some("monday"), "tuesday").await;
    let url = world.url("walk").await;
    let set_target = async |target: &str| {
        let spec = json!({"spec": {"targetVolumeSnapshotName": target}});
        world.api.merge("DifferentialSnapshot", Some(&world.namespace), "walk", spec).await;
    };
    set_target("nowhere").await;
    world.status("walk", "failed", is_failed("NotFound")).await;
    assert_eq!(program.get(&url, Some(&token)).await.0, 404);
    set_target("wednesday").await;
    assert_eq!(world.url("walk").await, url);
    let expected = driver.volume.lock().unwrap().tuples(Some("s0"), "s2", 0).expect("tuples");
    let (code, _, page) = program.get(&url, Some(&token)).await;
    assert_eq!((code, crate::walk::tuples(&page)), (200, expected));
    world.api.delete("DifferentialSnapshot", Some(&world.namespace), "walk").await;
    let (code, _, body) = program.get(&url, Some(&token)).await;
    assert_eq!((code, &body["reason"]), (404, &json!("NotFound")));
}

pub async fn snapshots_that_are_not_ready_are_waited_for(world: World) {
    let _driver = Driver::start(&world.driver, &world.csi, volume());
    world.snapshot_unready("late", "s0").await;
    let program = world.start(&["--ready-timeout=3s"]).await;
    let token = world.user("user").await;
    world.ask("waits", None, "late").await;
    let status = world.status("waits", "waiting", |status| status["error"].is_string()).await;
    assert!(status.get("state").is_none(), "decided too early: {status}");
    assert!(status["error"].as_str().is_some_and(|error| error.contains("is not ready to use")), "{status}");
    let path = format!("/{}/waits", world.namespace);
    let (code, head, body) = program.get(&path, Some(&token)).await;
    assert_eq!(code, 503, "{body}");
    assert!(head.contains("retry-after: 1"), "{head}");
    world.status("waits", "timed out", is_failed("Timeout")).await;
    // Late is better than never.
    let ready = Patch::Merge(json!({"status": {"readyToUse": true}}));
    let params = PatchParams::default();
    let content = format!("content-{}-late", world.namespace);
    let contents = world.api.objects("VolumeSnapshotContent", None);
    contents.patch_status(&content, &params, &ready).await.expect("patch");
    let snapshots = world.api.objects("VolumeSnapshot", Some(&world.namespace));
    snapshots.patch_status("late", &params, &ready).await.expect("patch");
    let url = world.url("waits").await;
    assert_eq!(program.get(&url, Some(&token)).await.0, 200);
}

pub async fn bad_specs_are_not_made(world: World) {
    let objects = world.api.objects("DifferentialSnapshot", Some(&world.namespace));
    let make = async |name: &str, spec: Value| {
        let object = serde_json::from_value(world.object(name, spec)).expect("an object");
        objects.create(&Default::default(), &object).await
    };
    let good = json!({
        "baseVolumeSnapshotName": "a", "targetVolumeSnapshotName": "b", "mode": "block",
        "startOffset": "4096-0123456789abcdef", "parameters": {"deletedBase": "all-changed"},
    });
    make("good", good.clone()).await.expect("a good one");
    for (field, value) in [
        ("targetVolumeSnapshotName", json!(null)),
        ("targetVolumeSnapshotName", json!("")),
        ("targetVolumeSnapshotName", json!("../secrets")),
        ("baseVolumeSnapshotName", json!("")),
        ("baseVolumeSnapshotName", json!("A")),
        ("mode", json!("file")),
        ("startOffset", json!("-1")),
        ("startOffset", json!(4096)),
        ("parameters", json!({"deletedBase": 1})),
    ] {
        let mut spec = good.clone();
        spec[field] = value.clone();
        match make("bad", spec).await {
            Err(kube::Error::Api(status)) if status.code == 422 => {
                assert!(status.message.contains(field), "{field} {value}: {}", status.message);
            }
            made => panic!("{field} {value}: {made:?}"),
        }
    }
}
