//! Promise: the callback listener gives a page to users who may read both snapshots, and others the reason why not.

use serde_json::{Value, json};
use testkit::api_server::API_AUDIENCE;
use testkit::crowd::{Stranger, keeps_nobody_out};

use crate::driver::{Driver, Volume};
use crate::walk::tuples;
use crate::world::{AUDIENCE, World};

pub async fn a_good_token_gets_a_page_and_no_token_gets_403(world: World) {
    let _driver = Driver::asked_of_two(&world).await;
    let (program, token, url) = world.serves("walk", &[]).await;
    let (code, head, page) = program.get(&url, Some(&token)).await;
    assert_eq!(code, 200, "{page}");
    assert!(
        head.contains("content-type: application/json") && head.contains("cache-control: no-store"),
        "{head}"
    );
    let block = |number: u64, zero: bool| json!({"Offset": number * 4096, "Size": 4096, "Context": "", "ZeroOut": zero});
    let expected = json!({
        "ChangeBlockList": [block(1, false), block(2, true), block(5, true)],
        "NextOffset": "", "VolumeSize": 8 * 4096, "Timeout": 0,
    });
    assert_eq!(page, expected);
    let (code, _, body) = program.get(&url, None).await;
    assert_eq!((code, &body["kind"], &body["reason"]), (403, &json!("Status"), &json!("Forbidden")));
    let (code, ..) = program
        .send("GET /a/b HTTP/1.1\r\nHost: x\r\nAuthorization: Basic eDp5\r\nConnection: close\r\n\r\n")
        .await;
    assert_eq!(code, 403);
    // The same over HTTP/2.
    let stream = program.connect(&["h2", "http/1.1"]).await;
    assert_eq!(stream.get_ref().1.alpn_protocol(), Some(&b"h2"[..]));
    let (mut client, connection) = h2::client::handshake(stream).await.expect("a handshake");
    let connection = tokio::spawn(connection);
    let request = axum::http::Request::get(&url).header("authorization", format!("Bearer {token}"));
    let (answer, _) = client.send_request(request.body(()).expect("a request"), true).expect("send");
    let answer = answer.await.expect("an answer");
    assert_eq!(answer.status(), 200);
    let (mut body, mut bytes) = (answer.into_body(), Vec::new());
    while let Some(data) = body.data().await {
        bytes.extend(data.expect("data"));
    }
    assert_eq!(serde_json::from_slice::<Value>(&bytes).expect("JSON"), expected);
    connection.abort();
}

pub async fn tokens_of_every_wrong_kind_are_refused(world: World) {
    let _driver = Driver::asked_of_two(&world).await;
    let (program, good, url) = world.serves("walk", &[]).await;
    let ns = &world.namespace;
    let [expired, control, forged] = world.api.signed((ns, "user"), AUDIENCE).await;
    let other_audience = world.api.token(ns, "user", "another-audience").await;
    let for_the_api = world.api.token(ns, "user", API_AUDIENCE).await;
    let tampered = format!("{good}x");
    for (what, token, expected) in [
        ("good", &good[..], 200),
        ("control", &control, 200),
        ("expired", &expired, 401),
        ("forged", &forged, 401),
        ("another audience", &other_audience, 401),
        ("for the API server", &for_the_api, 401),
        ("tampered with", &tampered, 401),
        ("garbage", "garbage", 401),
    ] {
        let (code, head, body) = program.get(&url, Some(token)).await;
        assert_eq!(code, expected, "{what}: {body}");
        if code == 401 {
            assert!(head.contains("www-authenticate: bearer"), "{what}: {head}");
            assert!(!body.to_string().contains(token), "{what}: {body}");
        }
    }
    // No token is in the log, whatever level it has.
    let log = program.running.log();
    assert!(log.contains("url-ready") && !log.contains(&good) && !log.contains("Bearer"), "{log}");
}

pub async fn a_user_gets_what_its_rights_allow(world: World) {
    let _driver = Driver::asked_of_two(&world).await;
    world.ask("full", None, "tuesday").await;
    let other = format!("{}-other", world.namespace);
    world.api.namespace(&other).await;
    let program = world.start(&[]).await;
    world.url("walk").await;
    let get = |group: &str, resource: &str, names: &[&str]| match names {
        [] => json!({"apiGroups": [group], "resources": [resource], "verbs": ["get"]}),
        _ => json!({"apiGroups": [group], "resources": [resource], "verbs": ["get"], "resourceNames": names}),
    };
    let object = |names: &[&str]| get("differential.cbt.storage.k8s.io", "differentialsnapshots", names);
    let snapshots = |names: &[&str]| get("snapshot.storage.k8s.io", "volumesnapshots", names);
    for (home, account, rules, walk, full) in [
        (&world.namespace, "whole", json!([object(&[]), snapshots(&[])]), 200, 200),
        (
            &world.namespace,
            "by-name",
            json!([object(&["walk"]), snapshots(&["monday", "tuesday"])]),
            200,
            403,
        ),
        // Whoever writes the object may name any snapshot; that alone is no right to read it.
        (&world.namespace, "no-snapshots", json!([object(&[])]), 403, 403),
        (&world.namespace, "target-only", json!([object(&[]), snapshots(&["tuesday"])]), 403, 200),
        (&world.namespace, "base-only", json!([object(&[]), snapshots(&["monday"])]), 403, 403),
        (&world.namespace, "no-object", json!([snapshots(&[])]), 403, 403),
        (&world.namespace, "nothing", json!([]), 403, 403),
        (&other, "elsewhere", json!([object(&[]), snapshots(&[])]), 403, 403),
    ] {
        world.api.account(home, account, rules).await;
        let token = world.api.token(home, account, AUDIENCE).await;
        // Twice: once reviewed, once remembered.
        for round in 0..2 {
            for (name, expected) in [("walk", walk), ("full", full)] {
                let path = format!("/{}/{name}", world.namespace);
                let (code, _, body) = program.get(&path, Some(&token)).await;
                assert_eq!(code, expected, "{account} {name} {round}: {body}");
            }
        }
    }
    // Who may not ask does not learn whether something exists.
    let token = world.api.token(&world.namespace, "nothing", AUDIENCE).await;
    assert_eq!(program.get(&format!("/{}/nowhere", world.namespace), Some(&token)).await.0, 403);
}

pub async fn bad_requests_get_an_error_that_says_what_is_wrong(world: World) {
    let driver = Driver::start(&world.driver, &world.csi, Volume::small());
    driver.volume.lock().unwrap().snapshots.insert("s2".into(), vec![9; 8]);
    world.ask_of_two().await;
    world.snapshot("wednesday", "s2").await;
    world.ask("later", Some("monday"), "wednesday").await;
    world.ask("full", None, "tuesday").await;
    let start = json!({"baseVolumeSnapshotName": "monday", "targetVolumeSnapshotName": "tuesday", "startOffset": "8192"});
    world.ask_with("from-8192", start).await;
    let parameters = json!({"targetVolumeSnapshotName": "tuesday", "parameters": {"speed": "high"}});
    world.ask_with("unknown-parameter", parameters).await;
    let (program, token, url) = world.serves("walk", &[]).await;
    let get = async |what: &str| {
        let (code, _, body) = program.get(&url.replace("walk", what), Some(&token)).await;
        (code, body)
    };
    let (_, first) = get("walk?maxEntries=1").await;
    let next = first["NextOffset"].as_str().expect("a place").to_owned();
    // The place is good for its own pair, and for no other.
    let (code, second) = get(&format!("walk?maxEntries=1&startOffset={next}")).await;
    assert_eq!((code, tuples(&second)), (200, vec![(8192, 4096)]));
    for (what, expected, message) in [
        (format!("later?startOffset={next}"), 400, "another base or target"),
        (format!("full?startOffset={next}"), 400, "another base or target"),
        ("walk?startOffset=x".into(), 400, "\"x\""),
        ("walk?startOffset=-1".into(), 400, "\"-1\""),
        ("walk?startOffset=32769".into(), 400, "32768"),
        ("walk?startOffset=18446744073709551615".into(), 400, "18446744073709551615"),
        ("walk?maxEntries=many".into(), 400, "maxEntries"),
        ("walk?maxEntries=-1".into(), 400, "maxEntries"),
        ("walk?max_entries=1".into(), 400, "max_entries"),
        ("unknown-parameter".into(), 400, "\"speed\""),
        ("nowhere".into(), 404, "nowhere does not exist"),
        ("Walk%2F..".into(), 404, "does not name"),
        ("walk/more".into(), 404, "/NAMESPACE/NAME"),
    ] {
        let (code, body) = get(&what).await;
        assert_eq!(code, expected, "{what}: {body}");
        assert!(body["message"].as_str().is_some_and(|text| text.contains(message)), "{what}: {body}");
        assert_eq!((&body["kind"], &body["code"]), (&json!("Status"), &json!(expected)), "{what}");
    }
    // A number is a place too, and the object may say where to begin.
    for what in ["walk?startOffset=8192", "from-8192"] {
        assert_eq!(tuples(&get(what).await.1), [(8192, 4096), (5 * 4096, 4096)], "{what}");
    }
    assert_eq!(tuples(&get("from-8192?startOffset=0").await.1).len(), 3);
    let end = get("walk?startOffset=32768").await;
    assert_eq!((end.0, tuples(&end.1), &end.1["NextOffset"]), (200, Vec::new(), &json!("")));
    let request = format!(
        "POST /{}/walk HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\nConnection: close\r\n\r\n",
        world.namespace
    );
    assert_eq!(program.send(&request).await.0, 405);
}

pub async fn a_driver_that_is_away_or_broken_is_reported(world: World) {
    let driver = Driver::asked_of_two(&world).await;
    for (name, handle) in [("shuffled", "out-of-order"), ("large", "too-long"), ("unknown", "forgotten")] {
        world.ask_of_one(name, handle).await;
    }
    let (program, token, url) = world.serves("walk", &[]).await;
    let get = async |what: &str| {
        let (code, _, body) = program.get(&url.replace("walk", what), Some(&token)).await;
        (code, body["message"].as_str().unwrap_or_default().to_owned())
    };
    for what in ["shuffled", "large"] {
        let (code, message) = get(what).await;
        assert!(code == 500 && message.contains("breaks the CSI spec"), "{what}: {code} {message}");
    }
    let (code, message) = get("unknown").await;
    assert!(code == 404 && message.contains("forgotten does not exist"), "{code} {message}");
    drop(driver);
    let (code, message) = get("walk").await;
    assert!(code == 503 && message.contains("does not answer on its socket"), "{code} {message}");
    testkit::eventually("it is not ready", async || program.readiness().await.0 != 200).await;
    let _driver = Driver::start(&world.driver, &world.csi, Volume::small());
    program.ready().await;
    assert_eq!(get("walk").await.0, 200);
}

pub async fn requests_at_once_are_bounded(world: World) {
    let _driver = Driver::start(&world.driver, &world.csi, Volume::small());
    world.ask_of_one("slow", "slow").await;
    let (program, token, url) = world.serves("slow", &["--max-requests=1", "--page-timeout=5s"]).await;
    let (one, other) = tokio::join!(program.get(&url, Some(&token)), program.get(&url, Some(&token)));
    let (done, refused) = if one.0 == 429 { (other, one) } else { (one, other) };
    assert_eq!((done.0, refused.0), (504, 429), "{done:?} {refused:?}");
    assert!(refused.1.contains("retry-after: 1"), "{}", refused.1);
    // The place is free again.
    assert_eq!(program.get(&url, Some(&token)).await.0, 504);
}

/// Bad tokens took the places of users while they were looked at.
pub async fn strangers_take_no_places(world: World) {
    let _driver = Driver::asked_of_two(&world).await;
    let (program, token, url) = world.serves("walk", &["--max-requests=1"]).await;
    let strangers = (0..20).map(|number| {
        let (program, url) = (&program, &url);
        async move { program.get(url, Some(&format!("no token {number}"))).await.0 }
    });
    let (answered, strangers) =
        tokio::join!(program.get(&url, Some(&token)), futures_util::future::join_all(strangers));
    assert_eq!((answered.0, strangers), (200, vec![401; 20]));
}

pub async fn ten_thousand_strangers_keep_nobody_out(world: World) {
    let _driver = Driver::asked_of_two(&world).await;
    let (program, token, url) = world.serves("walk", &[]).await;
    let door = program.door(&["h2"], None);
    keeps_nobody_out(Stranger::Handshake, door, async || {
        let answer = program.https(program.at()).get(&url).bearer_auth(&token).send().await;
        answer.is_ok_and(|answer| answer.status() == 200)
    })
    .await;
}

/// Pages that nobody took stayed in memory while their places were free again, however many there were.
pub async fn a_page_that_is_not_taken_keeps_its_place_for_a_time(world: World) {
    // A page of over 100 KB.
    let blocks = 2000;
    let _driver = Driver::start(&world.driver, &world.csi, Volume::pair(vec![7; blocks], vec![8; blocks]));
    world.ask_of_two().await;
    let (program, token, url) = world.serves("walk", &["--max-requests=1", "--page-timeout=5s"]).await;
    let get = async || program.get(&url, Some(&token)).await.0;
    assert_eq!(get().await, 200);
    let ask = async |window: u32| {
        let mut client = h2::client::Builder::new();
        let stream = program.connect(&["h2"]).await;
        let (mut client, connection) = client
            .initial_window_size(window)
            .handshake::<_, axum::body::Bytes>(stream)
            .await
            .expect("a handshake");
        tokio::spawn(connection);
        let request = axum::http::Request::get(&url).header("authorization", format!("Bearer {token}"));
        let (answer, _) = client.send_request(request.body(()).expect("a request"), true).expect("send");
        let answer = answer.await.expect("an answer");
        assert_eq!(answer.status(), 200);
        (client, answer.into_body())
    };
    for window in [100, 50_000] {
        let (client, mut body) = ask(window).await;
        assert_eq!(get().await, 429, "a window of {window}");
        // What was sent ahead comes, and then that it is too late.
        tokio::time::sleep(std::time::Duration::from_secs(6)).await;
        assert_eq!(get().await, 200, "a window of {window}");
        let mut taken = 0;
        let end = loop {
            match body.data().await {
                Some(Ok(data)) => {
                    taken += data.len();
                    body.flow_control().release_capacity(data.len()).expect("as much as came");
                }
                end => break end,
            }
        };
        assert!(matches!(end, Some(Err(_))) && taken < 100_000, "{end:?} after {taken} bytes");
        drop(client);
    }
}

pub async fn one_user_does_not_take_the_places_of_others(world: World) {
    let _driver = Driver::start(&world.driver, &world.csi, Volume::small());
    world.ask_of_one("slow", "slow").await;
    let program = world.start(&["--max-requests=4", "--page-timeout=5s"]).await;
    let (one, other) = (world.user("one").await, world.user("other").await);
    let url = world.url("slow").await;
    let ask = |token| program.get(&url, Some(token));
    let (first, second, third, theirs) = tokio::join!(ask(&one), ask(&one), ask(&one), ask(&other));
    let mut own = [&first, &second, &third];
    own.sort_by_key(|answer| answer.0);
    assert_eq!(own.map(|answer| answer.0), [429, 504, 504], "{own:?}");
    assert!(own[0].2.to_string().contains("this user has 2 requests under way"), "{:?}", own[0]);
    assert_eq!(theirs.0, 504, "{theirs:?}");
    // Their places are free again.
    assert_eq!(ask(&one).await.0, 504);
}
