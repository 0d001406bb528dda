//! Promise: a caller gets what it may read, and an answer that says why not; never anything of another tenant.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use testkit::api_server::API_AUDIENCE;
use tonic::Code;

use crate::driver::{Driver, MESSAGES, TUPLES};
use crate::world::{AUDIENCE, Answer, Files, Gateway, World, code, eventually};

const OK: Code = Code::Ok;
const DENIED: &str = "the caller may not get this VolumeSnapshot";
pub const DENIED_BASE: &str = "the caller may not get the VolumeSnapshot of base_snapshot_id";
const BAD_TOKEN: &str = "the security token is not valid, or not for the audience of this service";

/// The code and the message that a client gets; of an answer without an error `OK` alone.
fn said(answer: &Answer) -> (Code, &str) {
    answer.as_ref().map_or_else(|(code, message)| (*code, message.as_str()), |_| (OK, ""))
}

pub fn get_snapshots(names: &[&str]) -> Value {
    let mut rule =
        json!({"apiGroups": ["snapshot.storage.k8s.io"], "resources": ["volumesnapshots"], "verbs": ["get"]});
    if !names.is_empty() {
        rule["resourceNames"] = json!(names);
    }
    json!([rule])
}

pub async fn a_caller_gets_what_its_rights_allow(world: World) {
    let driver = Driver::start(&world.driver, &world.socket());
    let ns = world.namespace.clone();
    for (name, handle) in [("monday", "plain-1"), ("tuesday", "plain-2"), ("other", "plain-3")] {
        world.snapshot(&ns, name, handle).await;
    }
    world.api.account(&ns, "whole", get_snapshots(&[])).await;
    world.api.account(&ns, "two", get_snapshots(&["monday", "tuesday"])).await;
    world.api.account(&ns, "target-only", get_snapshots(&["tuesday"])).await;
    world.api.account(&ns, "nothing", json!([])).await;
    let lists = json!([{"apiGroups": ["snapshot.storage.k8s.io"], "resources": ["volumesnapshots"], "verbs": ["list", "watch"]}]);
    world.api.account(&ns, "lister", lists).await;
    let (gateway, mut client) = world.served(&[]).await;
    let (ok, denied) = ((OK, ""), (Code::PermissionDenied, DENIED));
    for (account, allocated, other, delta) in [
        ("whole", ok, ok, ok),
        ("two", ok, denied, ok),
        // The base is somebody's snapshot too.
        ("target-only", ok, denied, (Code::PermissionDenied, DENIED_BASE)),
        ("nothing", denied, denied, denied),
        ("lister", denied, denied, denied),
    ] {
        let token = world.api.token(&ns, account, AUDIENCE).await;
        // Twice: once reviewed, once remembered.
        for round in 0..2 {
            let answer = client.allocated(&token, &ns, "tuesday").await;
            assert_eq!(said(&answer), allocated, "{account} {round}");
            let answer = client.allocated(&token, &ns, "other").await;
            assert_eq!(said(&answer), other, "{account} {round}");
            let answer = client.delta(&token, &ns, "plain-1", "tuesday").await;
            assert_eq!(said(&answer), delta, "{account} {round}");
        }
    }
    let token = world.api.token(&ns, "whole", AUDIENCE).await;
    let (messages, tuples) = client.allocated(&token, &ns, "monday").await.expect("allowed");
    assert_eq!((messages as i64, tuples.len() as i64), (MESSAGES, MESSAGES * TUPLES));
    let asked = driver.seen.allocated.lock();
    assert_eq!(asked.last().map(|request| request.target_snapshot_id.as_str()), Some("plain-1"));
    // Who asked for what, and with which result, is on record.
    let audit = gateway.audit();
    let user = |account: &str| json!(format!("system:serviceaccount:{ns}:{account}"));
    assert!(
        audit.iter().any(|line| line["user"] == user("target-only")
            && line["method"] == "GetMetadataDelta"
            && line["base"] == "plain-1"
            && line["code"] == "PermissionDenied"),
        "{audit:?}"
    );
    let done = audit.iter().rfind(|line| line["user"] == user("whole")).expect("a line");
    assert_eq!((&done["code"], &done["tuples"]), (&json!("Ok"), &json!(MESSAGES * TUPLES)));
    assert_eq!((&done["namespace"], &done["snapshot"]), (&json!(ns), &json!("monday")));
}

pub async fn a_base_is_a_handle_or_a_name_and_never_a_way_into_another_namespace(world: World) {
    let driver = Driver::start(&world.driver, &world.socket());
    let (ns, other) = (world.namespace.clone(), world.other_namespace().await);
    let taken_at = |nanos: i64| json!({"content": {"status": {"creationTime": nanos}}});
    world.snapshot_but(&ns, "first", "plain-1", taken_at(100_000_000_000)).await;
    world.snapshot_but(&ns, "second", "plain-2", taken_at(200_000_000_000)).await;
    world.snapshot(&other, "theirs", "plain-3").await;
    // Its name is the handle of another: the handle wins.
    world.snapshot(&ns, "plain-1", "plain-4").await;
    let of_another = json!({"content": {"spec": {"source": {"volumeHandle": "volume-2"}}}});
    world.snapshot_but(&ns, "of-another-volume", "plain-5", of_another).await;
    let unready = json!({"status": {"readyToUse": false}});
    world.snapshot_but(&ns, "unready", "plain-6", json!({"snapshot": unready, "content": unready})).await;
    // Of a snapshot that was there before its content, which has no status yet.
    let source = json!({"volumeHandle": null, "snapshotHandle": "plain-7"});
    let nothing = json!({"readyToUse": null, "snapshotHandle": null});
    let content = json!({"spec": {"source": source}, "status": nothing});
    let changes = json!({"snapshot": unready, "content": content});
    world.snapshot_but(&other, "theirs-too", "plain-7", changes).await;
    // The same handle under another driver's content: none of this gateway's business.
    let foreign = json!({"content": {"spec": {"driver": "other.csi.test"}}});
    world.snapshot_but(&other, "foreign", "deleted-1", foreign).await;
    let token = world.reader("reader").await;
    let (_gateway, mut client) = world.served(&[]).await;
    for (base, target, code, words, handle) in [
        ("plain-1", "second", OK, "", "plain-1"),
        ("first", "second", OK, "", "plain-1"),
        ("second", "second", OK, "", "plain-2"),
        // Deleted snapshots: the driver decides.
        ("deleted-1", "second", OK, "", "deleted-1"),
        ("a/b..c", "second", OK, "", "a/b..c"),
        ("forgotten", "second", Code::NotFound, "snapshot forgotten does not exist", "forgotten"),
        ("plain-3", "second", Code::PermissionDenied, DENIED_BASE, ""),
        ("plain-7", "second", Code::PermissionDenied, DENIED_BASE, ""),
        ("plain-5", "second", Code::InvalidArgument, "are snapshots of different volumes", ""),
        ("plain-2", "first", Code::InvalidArgument, "the base is newer than the target", ""),
        ("unready", "second", Code::Unavailable, "is not ready to use yet", ""),
    ] {
        driver.seen.deltas.lock().clear();
        let answer = client.delta(&token, &ns, base, target).await;
        assert_eq!(crate::world::code(&answer), code, "{base} {target}: {answer:?}");
        let asked = driver.seen.deltas.lock().pop().map(|request| request.base_snapshot_id);
        assert_eq!(asked.unwrap_or_default(), handle, "{base} {target}");
        if let Err((_, message)) = answer {
            assert!(message.contains(words), "{base} {target}: {message}");
            assert!(!message.contains(&other) && !message.contains("theirs"), "{message}");
        }
    }
    // Whoever may read another VolumeSnapshot of the same handle may use it as a base.
    world.api.account(&ns, "other-reader", get_snapshots(&["second"])).await;
    let token = world.api.token(&ns, "other-reader", AUDIENCE).await;
    world.api.allow(&other, &ns, "other-reader", get_snapshots(&["twin"])).await;
    assert_eq!(code(&client.delta(&token, &ns, "plain-1", "second").await), Code::PermissionDenied);
    world.snapshot(&other, "twin", "plain-1").await;
    eventually("the twin is a base too", async || {
        code(&client.clone().delta(&token, &ns, "plain-1", "second").await) == OK
    })
    .await;
}

pub async fn the_audience_is_the_one_of_the_snapshot_metadata_service(world: World) {
    let (_driver, ns, before) = world.with_snapshot("monday", "plain-1").await;
    let after = world.api.token(&ns, "reader", "another-audience").await;
    let files = Files::make(world.dir.path());
    let config = world.gateway_kubeconfig("gateway").await;
    let gateway = Gateway::start(&world, &config, "gateway", &[], Some(files));
    gateway.ready().await;
    let mut client = gateway.client().await;
    let (code, message) = client.allocated(&before, &ns, "monday").await.expect_err("there is none yet");
    assert_eq!(code, Code::Unavailable);
    assert!(message.contains(&world.driver), "{message}");
    for (audience, good, bad) in [(AUDIENCE, &before, &after), ("another-audience", &after, &before)] {
        match audience {
            AUDIENCE => world.service("nowhere:1", audience, "YQ==").await,
            _ => world.change_service(json!({"audience": audience})).await,
        }
        eventually(audience, async || client.clone().allocated(good, &ns, "monday").await.is_ok()).await;
        let (code, message) = client.allocated(bad, &ns, "monday").await.expect_err("for another audience");
        assert_eq!(code, Code::Unauthenticated, "{message}");
    }
}

pub async fn objects_that_are_not_whole_get_an_answer(world: World) {
    let _driver = Driver::start(&world.driver, &world.socket());
    let ns = world.namespace.clone();
    let mut gateway = world.gateway(&[]).await;
    let uid = "00000000-0000-0000-0000-000000000000";
    let nowhere = "content-that-is-nowhere";
    let deleted = "a-class-that-was-deleted";
    for (name, handle, changes) in [
        ("no-status", "plain-1", json!({"snapshot": {"status": null}})),
        (
            "unbound",
            "plain-2",
            json!({"snapshot": {"status": {"readyToUse": false, "boundVolumeSnapshotContentName": null}}}),
        ),
        ("content-without-status", "plain-3", json!({"content": {"status": null}})),
        ("no-handle", "plain-4", json!({"content": {"status": {"snapshotHandle": null}}})),
        ("not-ready", "plain-5", json!({"snapshot": {"status": {"readyToUse": false}}})),
        (
            "no-content",
            "plain-6",
            json!({"snapshot": {"status": {"boundVolumeSnapshotContentName": nowhere}}}),
        ),
        ("stolen", "plain-7", json!({"content": {"spec": {"volumeSnapshotRef": {"name": "another"}}}})),
        ("other-uid", "plain-8", json!({"content": {"spec": {"volumeSnapshotRef": {"uid": uid}}}})),
        ("other-driver", "plain-9", json!({"content": {"spec": {"driver": "x.csi.test"}}})),
        ("class-is-gone", "plain-10", json!({"snapshot": {"spec": {"volumeSnapshotClassName": deleted}}})),
    ] {
        world.snapshot_but(&ns, name, handle, changes).await;
    }
    world.snapshot(&ns, "whole", "plain-11").await;
    let token = world.reader("reader").await;
    let mut client = gateway.client().await;
    for (name, expected, words) in [
        ("no-status", Code::Unavailable, "is not bound to a VolumeSnapshotContent yet"),
        ("unbound", Code::Unavailable, "is not bound to a VolumeSnapshotContent yet"),
        ("content-without-status", Code::Unavailable, "is not ready to use yet"),
        ("no-handle", Code::Unavailable, "has no snapshot handle yet"),
        ("not-ready", Code::Unavailable, "is not ready to use yet"),
        ("no-content", Code::NotFound, "VolumeSnapshotContent of VolumeSnapshot"),
        ("stolen", Code::FailedPrecondition, "are not bound to each other"),
        ("other-uid", Code::FailedPrecondition, "are not bound to each other"),
        ("other-driver", Code::InvalidArgument, "was not taken by the CSI driver"),
        ("missing", Code::NotFound, "does not exist"),
        ("class-is-gone", OK, ""),
        ("whole", OK, ""),
    ] {
        for answer in
            [client.allocated(&token, &ns, name).await, client.delta(&token, &ns, "plain-0", name).await]
        {
            assert_eq!(code(&answer), expected, "{name}: {answer:?}");
            if let Err((_, message)) = answer {
                assert!(message.contains(words) && message.contains(name), "{name}: {message}");
            }
        }
        assert!(gateway.running.is_alive(), "{name}");
    }
    // A namespace that is gone, or never was, has no snapshots; and nobody has rights in it.
    let answer = client.allocated(&token, "nowhere", "whole").await;
    assert_eq!(code(&answer), Code::PermissionDenied);
    // What becomes ready is served at once: a client may be quicker than a watch.
    let status = json!({"status": {"readyToUse": true, "boundVolumeSnapshotContentName": format!("content-{ns}-no-status")}});
    let snapshots = world.api.objects("VolumeSnapshot", Some(&ns));
    let patch = kube::api::Patch::Merge(status);
    snapshots.patch_status("no-status", &kube::api::PatchParams::default(), &patch).await.expect("patch");
    assert_eq!(code(&client.allocated(&token, &ns, "no-status").await), OK);
}

pub async fn tokens_of_every_wrong_kind_are_refused(world: World) {
    let (driver, ns, good) = world.with_snapshot("monday", "plain-1").await;
    let (_gateway, mut client) = world.served(&[]).await;
    let [expired, control, foreign] = world.api.signed((&ns, "reader"), AUDIENCE).await;
    let other_audience = world.api.token(&ns, "reader", "another-audience").await;
    let for_the_api = world.api.token(&ns, "reader", API_AUDIENCE).await;
    let tampered = format!("{}x", good);
    let refused = (Code::Unauthenticated, BAD_TOKEN);
    for (what, token, expected) in [
        ("none", "", (Code::InvalidArgument, "security_token is missing")),
        ("good", &good, (OK, "")),
        ("control", &control, (OK, "")),
        ("expired", &expired, refused),
        ("signed by another key", &foreign, refused),
        ("another audience", &other_audience, refused),
        ("for the API server", &for_the_api, refused),
        ("tampered with", &tampered, refused),
        ("garbage", "garbage", refused),
        ("line breaks", "a\r\nb: c", refused),
        // The API server takes the token out of a header, where these are none: it reviews a request without a token.
        ("a blank", " ", refused),
        ("a line break", "\n", refused),
        ("a blank at the front", " x", refused),
        ("a blank before a good one", &format!(" {good}"), refused),
        ("a tab at the front", "\tx", refused),
        ("two words", " Basic YWJj", refused),
        ("a blank within", "a b", refused),
        ("not ASCII", "\u{a0}x", refused),
    ] {
        let answers = [
            client.allocated(token, &ns, "monday").await,
            client.delta(token, &ns, "plain-0", "monday").await,
        ];
        for answer in answers {
            assert_eq!(said(&answer), expected, "{what}");
        }
    }
    // A token whose account is gone is not believed for longer than the cache says.
    world.api.delete("ServiceAccount", Some(&ns), "reader").await;
    let deleted = Instant::now();
    eventually("a deleted account's token is not believed", async || {
        code(&client.clone().allocated(&good, &ns, "monday").await) != OK
    })
    .await;
    assert!(deleted.elapsed() < Duration::from_secs(30), "after {:?}", deleted.elapsed());
    assert!(driver.seen.allocated.lock().len() >= 2);
}

/// A token of an account by the cluster's own key that ended an hour ago, in a file.
pub async fn expired_token(world: &World, account: &str) -> PathBuf {
    let file = world.dir.path().join("expired");
    let [expired, ..] = world.api.signed((&world.namespace, account), AUDIENCE).await;
    std::fs::write(&file, expired).expect("write");
    file
}

pub async fn secrets_of_the_class_reach_the_driver(world: World) {
    let driver = Driver::start(&world.driver, &world.socket());
    let ns = world.namespace.clone();
    world.class("fixed", "one", &ns).await;
    world.class("template", "for-${volumesnapshot.name}", "${volumesnapshot.namespace}").await;
    world.class("missing", "nowhere", &ns).await;
    world.class("wrong", "${pvc.name}", &ns).await;
    world.class("forbidden", "one", "kube-system").await;
    world.class("binary", "binary", &ns).await;
    for (name, value) in [("one", "aGVsbG8="), ("for-templated", "d29ybGQ="), ("binary", "/w==")] {
        let metadata = json!({"name": name, "namespace": ns});
        world
            .api
            .make(json!({"apiVersion": "v1", "kind": "Secret", "metadata": metadata, "data": {"key": value}}))
            .await;
    }
    for name in ["fixed", "templated", "missing", "wrong", "forbidden", "binary", "none"] {
        let class = match name {
            "none" => None,
            "templated" => Some(format!("{ns}-template")),
            name => Some(format!("{ns}-{name}")),
        };
        world
            .snapshot_with(&ns, name, &format!("plain-{name}"), |snapshot, content| {
                if let Some(class) = class {
                    // Either of the two may name it.
                    let object = if name == "fixed" { content } else { snapshot };
                    object["spec"]["volumeSnapshotClassName"] = json!(class);
                }
            })
            .await;
    }
    let token = world.reader("reader").await;
    let gateway = world.gateway(&[]).await;
    // The manifests grant it one Secret by name; here they are in the test's own namespace.
    let rules = json!([{"apiGroups": [""], "resources": ["secrets"], "verbs": ["get"],
        "resourceNames": ["one", "for-templated", "nowhere", "binary"]}]);
    world.api.allow(&ns, &ns, "gateway", rules).await;
    let mut client = gateway.client().await;
    // Until the API server's own cache of roles has it.
    let first = client.allocated(&token, &ns, "fixed").await;
    if code(&first) != OK {
        tokio::time::sleep(Duration::from_secs(1)).await;
    }
    // Which part of the message says why; none where the driver is given what it needs.
    for (name, words, secret) in [
        ("fixed", None, Some("hello")),
        ("templated", None, Some("world")),
        ("none", None, None),
        ("missing", Some("the secret that the VolumeSnapshotClass names does not exist"), None),
        ("wrong", Some("holds a template that is not known"), None),
        ("forbidden", Some("names may not be read by this service"), None),
        ("binary", Some("names holds bytes that are not UTF-8"), None),
    ] {
        for delta in [false, true] {
            driver.seen.allocated.lock().clear();
            driver.seen.deltas.lock().clear();
            let answer = match delta {
                false => client.allocated(&token, &ns, name).await,
                true => client.delta(&token, &ns, "deleted", name).await,
            };
            let expected = if words.is_none() { OK } else { Code::FailedPrecondition };
            assert_eq!(code(&answer), expected, "{name}: {answer:?}");
            let allocated = driver.seen.allocated.lock().pop().map(|request| request.secrets);
            let changed = driver.seen.deltas.lock().pop().map(|request| request.secrets);
            let sent = allocated.or(changed).unwrap_or_default();
            assert_eq!(sent.get("key").map(String::as_str), secret, "{name}");
            if let Err((_, message)) = answer {
                assert!(words.is_some_and(|words| message.contains(words)), "{name}: {message}");
                assert!(!message.contains("kube-system") && !message.contains("nowhere"), "{message}");
            }
        }
    }
}

pub async fn rights_that_are_taken_away_end_within_the_time_of_the_cache(world: World) {
    let (_driver, ns, token) = world.with_snapshot("monday", "plain-1").await;
    let (_gateway, mut client) = world.served(&["--review-cache=3s"]).await;
    assert_eq!(code(&client.allocated(&token, &ns, "monday").await), OK);
    world.api.delete("RoleBinding", Some(&ns), "reader").await;
    let taken = Instant::now();
    let mut answers = Vec::new();
    loop {
        let answer = code(&client.allocated(&token, &ns, "monday").await);
        answers.push(answer);
        if answer == Code::PermissionDenied {
            break;
        }
        // The API server needs a moment of its own to forget the role.
        assert!(taken.elapsed() < Duration::from_secs(30), "{answers:?}");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    assert!(answers.len() > 1 && answers[0] == OK, "nothing was remembered: {answers:?}");
    // A refusal is never remembered.
    let binding = json!({
        "apiVersion": "rbac.authorization.k8s.io/v1", "kind": "RoleBinding", "metadata": {"name": "again", "namespace": ns},
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": "reader"},
        "subjects": [{"kind": "ServiceAccount", "name": "reader", "namespace": ns}],
    });
    world.api.make(binding).await;
    let given = Instant::now();
    eventually("rights that are given back are seen", async || {
        code(&client.clone().allocated(&token, &ns, "monday").await) == OK
    })
    .await;
    assert!(given.elapsed() < Duration::from_secs(30), "after {:?}", given.elapsed());
}
