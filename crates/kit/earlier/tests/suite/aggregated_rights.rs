//! Promise: who may ask for a VolumeSnapshotDelta, for data and by what secrets, and how often.

use serde_json::{Value, json};
use testkit::api_server::API_AUDIENCE;

use crate::aggregated::pair;
use crate::aggregation::{Aggregation, create, data, entries, object, snapshots};
use crate::driver::Driver;
use crate::world::{Program, World};

pub async fn users_get_what_their_rights_allow(world: World) {
    let _driver = Driver::with_two_snapshots(&world).await;
    let other = format!("{}-other", world.namespace);
    world.api.namespace(&other).await;
    let (aggregation, _server, _http) = Aggregation::start(&world).await;
    let full = json!({"targetVolumeSnapshotName": "tuesday"});
    for (home, account, rules, walk, alone) in [
        (&world.namespace, "whole", json!([create(), snapshots(&[])]), 201, 201),
        (&world.namespace, "by-name", json!([create(), snapshots(&["monday", "tuesday"])]), 201, 201),
        // A user who creates the object may name any snapshot; that alone is no right to read it.
        (&world.namespace, "no-snapshots", json!([create()]), 403, 403),
        (&world.namespace, "target-only", json!([create(), snapshots(&["tuesday"])]), 403, 201),
        (&world.namespace, "base-only", json!([create(), snapshots(&["monday"])]), 403, 403),
        (&world.namespace, "no-create", json!([snapshots(&[])]), 403, 403),
        (&other, "elsewhere", json!([create(), snapshots(&[])]), 403, 403),
    ] {
        world.api.account(home, account, rules).await;
        let user = aggregation.user_of(home, account).await;
        // Twice: once reviewed, once remembered.
        for round in 0..2 {
            for (spec, expected) in [(pair(), walk), (full.clone(), alone)] {
                let (code, answer) = user.ask(spec).await;
                assert_eq!(code, expected, "{account} {round}: {answer}");
                assert!(code == 201 || answer["reason"] == "Forbidden", "{account}: {answer}");
            }
        }
    }
    // Who may not ask does not learn whether something exists.
    let user = aggregation.user_of(&world.namespace, "base-only").await;
    assert_eq!(user.ask(json!({"targetVolumeSnapshotName": "nowhere"})).await.0, 403);
    aggregation.end().await;
}

pub async fn secrets_are_for_those_who_may_read_them(world: World) {
    let driver = Driver::with_two_snapshots(&world).await;
    let ns = &world.namespace;
    let metadata = json!({"name": "keys", "namespace": ns});
    let secret = json!({"apiVersion": "v1", "kind": "Secret", "metadata": metadata, "stringData": {"password": "p4ssw0rd"}});
    world.api.make(secret).await;
    let (aggregation, server, http) = Aggregation::start(&world).await;
    let read =
        json!({"apiGroups": [""], "resources": ["secrets"], "resourceNames": ["keys"], "verbs": ["get"]});
    let without = aggregation.user("without", json!([create(), snapshots(&[])])).await;
    let with = aggregation.user("with", json!([create(), snapshots(&[]), read])).await;
    let mut spec = pair();
    spec["volumeSnapshotDeltaSecretRef"] = json!({"name": "keys", "namespace": ns});
    let (code, answer) = without.ask(spec.clone()).await;
    assert_eq!(
        (code, answer["message"].as_str()),
        (403, Some("the caller may not get this Secret")),
        "{answer}"
    );
    // The server has no such right from its manifest: the operator gives it.
    let (code, answer) = with.ask(spec.clone()).await;
    assert_eq!(code, 403, "{answer}");
    assert!(
        answer["message"].as_str().is_some_and(|text| text.contains("its operator has to allow it")),
        "{answer}"
    );
    world.api.allow(ns, ns, "aggregated", json!([read])).await;
    testkit::eventually("the server may read it", async || with.ask(spec.clone()).await.0 == 201).await;
    assert_eq!(driver.secrets.lock().unwrap().last(), Some(&("password".to_owned(), "p4ssw0rd".to_owned())));
    let (code, answer) = without.ask(spec.clone()).await;
    assert_eq!(code, 403, "{answer}");
    spec["volumeSnapshotDeltaSecretRef"]["name"] = json!("nowhere");
    assert_eq!(with.ask(spec).await.0, 403);
    for program in [&server, &http] {
        assert!(!program.running.log().contains("p4ssw0rd"), "the secret is in the log");
    }
    aggregation.end().await;
}

pub async fn only_the_front_proxy_may_say_who_a_user_is(world: World) {
    let _driver = Driver::with_two_snapshots(&world).await;
    let (aggregation, server, _http) = Aggregation::start(&world).await;
    let pair_of =
        |name: &str| Some((world.api.file(&format!("{name}.crt")), world.api.file(&format!("{name}.key"))));
    let path =
        format!("/apis/cbt.storage.k8s.io/v1alpha1/namespaces/{}/volumesnapshotdeltas", world.namespace);
    let body = object(pair()).to_string();
    let post = async |own, headers: &str| {
        let stream = server.connect_as(&[], own).await;
        let length = body.len();
        let request = format!(
            "POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n{headers}Content-Length: {length}\r\nConnection: close\r\n\r\n{body}"
        );
        let (code, _, body) = server.exchange(stream, &request).await;
        (code, serde_json::from_slice::<Value>(&body).unwrap_or_default())
    };
    let admin = "X-Remote-User: admin\r\nX-Remote-Group: system:masters\r\n";
    let nobody = "X-Remote-User: nobody\r\nX-Remote-Group: system:authenticated\r\n";
    let token = world.api.token(&world.namespace, "aggregated", API_AUDIENCE).await;
    let bearer = format!("Authorization: Bearer {token}\r\n");
    for (what, own, headers, expected) in [
        ("the front proxy for an administrator", pair_of("front-proxy"), admin, 201),
        ("the front proxy for a user without rights", pair_of("front-proxy"), nobody, 403),
        ("the front proxy for nobody", pair_of("front-proxy"), "", 401),
        ("another name by the same CA", pair_of("not-the-proxy"), admin, 401),
        ("an administrator by the clients' CA", pair_of("admin"), admin, 401),
        ("nobody", None, admin, 401),
        ("a token", None, bearer.as_str(), 401),
    ] {
        let (code, answer) = post(own, headers).await;
        assert_eq!(code, expected, "{what}: {answer}");
        assert!(code == 201 || answer["kind"] == "Status", "{what}: {answer}");
    }
    // Discovery is no exception.
    let (code, ..) = server.get("/apis/cbt.storage.k8s.io/v1alpha1", None).await;
    assert_eq!(code, 401);
    aggregation.end().await;
}

pub async fn each_user_has_a_rate_of_its_own(world: World) {
    let _driver = Driver::with_two_snapshots(&world).await;
    let aggregation = Aggregation::begin(&world).await;
    let _http = aggregation.sidecar("http", &[]).await;
    // A second one comes after a second; the pause makes the test no slower, for nobody waits.
    let server = aggregation.server("server", &["--client-qps=1", "--client-burst=3"]).await;
    aggregation.route(&[&server]).await;
    let hasty = aggregation.user("hasty", json!([create(), snapshots(&[])])).await;
    let calm = aggregation.user("calm", json!([create(), snapshots(&[])])).await;
    let text = object(pair()).to_string();
    let mut refused = Vec::new();
    for _ in 0..12 {
        let answer = hasty.post_json("", &text).await;
        match answer.code {
            201 => {}
            429 => refused.push(answer),
            code => panic!("{code}: {}", answer.body),
        }
    }
    let first = refused.first().expect("a rate");
    let status = first.json();
    assert_eq!((first.retry.as_str(), &status["reason"]), ("1", &json!("TooManyRequests")), "{status}");
    assert_eq!(status["details"]["retryAfterSeconds"], json!(1), "{status}");
    assert_eq!(calm.ask(pair()).await.0, 201, "another user is held up");
    aggregation.end().await;
}

pub async fn creates_have_a_priority_level_of_their_own(world: World) {
    let _driver = Driver::with_two_snapshots(&world).await;
    let (aggregation, _server, _http) = Aggregation::start(&world).await;
    let path = format!("{}/deploy/components/aggregated/priority.yaml", testkit::HOME);
    for document in std::fs::read_to_string(&path).expect("the manifest").split("\n---\n") {
        world.api.make(serde_saphyr::from_str(document).expect("YAML")).await;
    }
    let schemas = world.api.objects("FlowSchema", None);
    let uid = schemas.get("cbt-earlier-aggregated").await.expect("the FlowSchema").metadata.uid;
    let user = aggregation.user("user", json!([create(), snapshots(&[])])).await;
    let text = object(pair()).to_string();
    testkit::eventually("creates are counted to their FlowSchema", async || {
        let answer = user.post_json("", &text).await;
        assert!(!answer.flow.is_empty(), "priority and fairness is off");
        answer.code == 201 && Some(&answer.flow) == uid.as_ref()
    })
    .await;
    aggregation.end().await;
}

pub async fn data_tokens_are_for_those_who_may_have_data(world: World) {
    let _driver = Driver::with_two_snapshots(&world).await;
    let aggregation = Aggregation::begin(&world).await;
    let key = world.dir.path().join("key");
    std::fs::write(&key, [7; 32]).expect("write");
    let key = format!("--data-token-key={}", key.display());
    let _http = aggregation.sidecar("http", &["--snapshot-data=/nowhere/{snapshot}", &key]).await;
    let server: Program = aggregation.server("server", &[]).await;
    aggregation.route(&[&server]).await;
    let with = aggregation.user("with", json!([create(), snapshots(&[]), data()])).await;
    let without = aggregation.user("without", json!([create(), snapshots(&[])])).await;
    let status = with.status(pair()).await;
    for entry in status["changedBlocks"].as_array().expect("entries") {
        let token = &entry["dataToken"];
        assert!(token["token"].as_str().is_some_and(|token| token.len() > 40), "{entry}");
        assert_eq!(token["ttl"], "5m0s", "{entry}");
        assert!(token["issuanceTime"].as_str().is_some_and(|time| time.ends_with('Z')), "{entry}");
    }
    let status = without.status(pair()).await;
    assert_eq!(entries(&status).len(), 3);
    assert!(!status.to_string().contains("dataToken"), "{status}");
    aggregation.end().await;
}
