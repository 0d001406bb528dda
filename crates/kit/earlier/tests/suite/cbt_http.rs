//! Promise: cbt-http is found by the DriverDiscovery that it writes, gives pages to the aggregated API server alone, and the data
//! of a block for a good token.

use std::time::{Duration, Instant};

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use kube::api::PostParams;
use proto::deltas::ListSnapshotDeltasRequest;
use proto::deltas::snapshot_deltas_client::SnapshotDeltasClient;
use serde_json::{Value, json};
use testkit::{BLOCK, MIB, PoolKind, Rig, eventually, pause};
use tonic::Code;
use tonic::transport::Channel;

use crate::aggregated::pair;
use crate::aggregation::{Aggregation, create, data, snapshots};
use crate::driver::{Driver, Volume};
use crate::world::{Program, World};

const PATH: &str = "/v1alpha1/deltas";

async fn post(program: &Program, token: Option<&str>, body: &str) -> (u16, Value) {
    let authorization = token.map_or_else(String::new, |token| format!("Authorization: Bearer {token}\r\n"));
    let length = body.len();
    let request = format!(
        "POST {PATH} HTTP/1.1\r\nHost: x\r\n{authorization}Content-Length: {length}\r\nConnection: close\r\n\r\n{body}"
    );
    let (code, _, body) = program.send(&request).await;
    (code, body)
}

async fn bytes(program: &Program, token: &str) -> (u16, Vec<u8>) {
    let url = format!("https://{}{PATH}/data", program.address);
    let answer = program.https(program.at()).get(url).bearer_auth(token).send().await.expect("an answer");
    (answer.status().as_u16(), answer.bytes().await.expect("a body").to_vec())
}

async fn discovery(world: &World, name: &str, what: &str, is_it: impl Fn(&Value) -> bool) -> Value {
    let objects = world.api.objects("DriverDiscovery", None);
    let begun = Instant::now();
    while begun.elapsed() < Duration::from_secs(60) {
        let found = objects.get_opt(name).await.expect("the API server");
        let found = serde_json::to_value(found).expect("JSON");
        if is_it(&found) {
            return found;
        }
        tokio::time::sleep(pause(begun)).await;
    }
    panic!("{name} is not {what} in a minute: {:?}", objects.get_opt(name).await);
}

pub async fn it_publishes_itself_and_its_state_is_reported(world: World) {
    let _driver = Driver::start(&world.driver, &world.csi, Volume::small());
    let aggregation = Aggregation::apart(&world).await;
    let mut http = aggregation.sidecar("http", &[]).await;
    let _server = aggregation.server("server", &[]).await;
    let name = world.driver.as_str();
    let is = |state: &'static str| move |object: &Value| object["status"]["state"] == state;
    let found = discovery(&world, name, "ready", is("ready")).await;
    let config = json!({
        "url": format!("https://localhost:{}{PATH}", http.port), "caBundle": STANDARD.encode(&http.ca),
    });
    assert_eq!(found["spec"], json!({"driverName": name, "clientConfig": config}));
    // A second one for the same driver counts for nothing.
    let object = |name: &str, driver: &str, config: Value| {
        json!({
            "apiVersion": "discovery.cbt.storage.k8s.io/v1alpha1", "kind": "DriverDiscovery",
            "metadata": {"name": name}, "spec": {"driverName": driver, "clientConfig": config},
        })
    };
    let twin = format!("twin-{name}");
    world.api.make(object(&twin, name, config.clone())).await;
    let found = discovery(&world, &twin, "failed", is("failed")).await;
    let error = found["status"]["error"].as_str().expect("an error").to_owned();
    assert!(error.contains(&format!("{name} is the DriverDiscovery of {name}: it is older")), "{error}");
    http.running.kill();
    let found = discovery(&world, name, "failed", is("failed")).await;
    assert_eq!(found["status"]["error"], "cbt-http does not answer: try again");
    // It comes back with another certificate and at another port.
    let _again = aggregation.sidecar("http", &[]).await;
    let found = discovery(&world, name, "ready again", is("ready")).await;
    assert_ne!(found["spec"]["clientConfig"], config);
    assert!(found["status"].get("error").is_none_or(Value::is_null), "{found}");
    // What is not an address is not made.
    let objects = world.api.objects("DriverDiscovery", None);
    let service = json!({"namespace": "a", "name": "b"});
    let bundle = "Q0E=";
    for (what, config) in [
        ("neither", json!({"caBundle": bundle})),
        ("both", json!({"caBundle": bundle, "url": "https://a.test", "service": service})),
        ("no https", json!({"caBundle": bundle, "url": "http://a.test"})),
        ("no base64", json!({"caBundle": "?", "url": "https://a.test"})),
        ("no bundle", json!({"url": "https://a.test"})),
    ] {
        let bad = serde_json::from_value(object("bad", "bad", config)).expect("an object");
        match objects.create(&PostParams::default(), &bad).await {
            Err(kube::Error::Api(status)) if status.code == 422 => {}
            made => panic!("{what}: {made:?}"),
        }
    }
}

pub async fn an_object_that_a_person_wrote_is_left_alone(world: World) {
    let _driver = Driver::start(&world.driver, &world.csi, Volume::small());
    let config = json!({"url": "https://elsewhere.test/deltas", "caBundle": "Q0E="});
    let object = json!({
        "apiVersion": "discovery.cbt.storage.k8s.io/v1alpha1", "kind": "DriverDiscovery",
        "metadata": {"name": world.driver}, "spec": {"driverName": world.driver, "clientConfig": config},
    });
    world.api.make(object).await;
    let aggregation = Aggregation::apart(&world).await;
    let http = aggregation.sidecar_unready("http", &[]);
    while http.readiness().await.1 != "its DriverDiscovery is not written: see the log\n" {
        assert_ne!(http.readiness().await.0, 200, "ready and not to be found");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    eventually("the conflict is in the log", async || http.running.log().contains("conflict")).await;
    let found = discovery(&world, &world.driver, "there", |object| !object.is_null()).await;
    assert_eq!(found["spec"]["clientConfig"], config);
}

pub async fn pages_are_for_the_aggregated_server_alone(world: World) {
    let _driver = Driver::start(&world.driver, &world.csi, Volume::small());
    let aggregation = Aggregation::apart(&world).await;
    let http = aggregation.sidecar("http", &[]).await;
    let ns = &world.namespace;
    world.api.account(ns, "user", json!([create(), snapshots(&[])])).await;
    let good = world.api.token(ns, "aggregated", "cbt-http").await;
    let no_right = world.api.token(ns, "user", "cbt-http").await;
    let other_audience = world.api.token(ns, "aggregated", "cbt-earlier").await;
    let tampered = format!("{good}x");
    let [expired, control, forged] = world.api.signed((ns, "aggregated"), "cbt-http").await;
    let request = json!({"fromSnapshotId": "s0", "toSnapshotId": "s1", "maxEntries": 2}).to_string();
    for (what, token, expected) in [
        ("good", Some(good.as_str()), 200),
        ("none", None, 401),
        ("garbage", Some("garbage"), 401),
        ("tampered with", Some(&tampered), 401),
        ("control", Some(&control), 200),
        ("expired", Some(&expired), 401),
        ("forged", Some(&forged), 401),
        ("another audience", Some(&other_audience), 401),
        ("a user's", Some(&no_right), 403),
    ] {
        let (code, body) = post(&http, token, &request).await;
        assert_eq!(code, expected, "{what}: {body}");
        assert!(code == 200 || body["kind"] == "Status", "{what}: {body}");
    }
    let (_, page) = post(&http, Some(&good), &request).await;
    let block = |index: u64| json!({"offset": index * 4096, "blockSizeBytes": 4096});
    assert_eq!(page["changedBlocks"], json!([block(1), block(2)]));
    assert_eq!(page["volumeSizeBytes"], json!(8 * 4096));
    let next = page["nextToken"].as_str().expect("a token");
    let ask = |from: &str, token: &str| {
        json!({"fromSnapshotId": from, "toSnapshotId": "s1", "startingToken": token}).to_string()
    };
    let (code, page) = post(&http, Some(&good), &ask("s0", next)).await;
    assert_eq!((code, &page["changedBlocks"], &page["nextToken"]), (200, &json!([block(5)]), &json!("")));
    for (body, expected, message) in [
        (ask("", next), 409, "other snapshots"),
        (ask("s0", "x"), 409, "\"x\""),
        (ask("s9", ""), 404, "s9"),
        (ask("s0", "9"), 400, "32768"),
        (json!({"toSnapshotId": ""}).to_string(), 400, "to_snapshot_id"),
        (json!({"toSnapshotId": "s1", "maxEntries": -1}).to_string(), 400, "-1"),
        (json!({"toSnapshotId": "s1", "limit": 1}).to_string(), 400, "limit"),
        ("{".into(), 400, "invalid request"),
    ] {
        let (code, answer) = post(&http, Some(&good), &body).await;
        assert_eq!(code, expected, "{body}: {answer}");
        assert!(answer["message"].as_str().is_some_and(|text| text.contains(message)), "{body}: {answer}");
    }
    assert_eq!(http.get(PATH, Some(&good)).await.0, 405);
    assert_eq!(http.get("/", Some(&good)).await.0, 404);
    let (code, _, answer) = http.get(&format!("{PATH}/data"), Some("x")).await;
    assert_eq!(code, 501, "{answer}");
    // No token is in the log.
    assert!(!http.running.log().contains(&good), "a token is in the log");
}

async fn grpc(program: &Program) -> SnapshotDeltasClient<Channel> {
    SnapshotDeltasClient::new(testkit::channel(&program.socket).await)
}

pub async fn the_call_lists_deltas_as_the_design_says(world: World) {
    let volume = Volume::small();
    let _driver = Driver::start(&world.driver, &world.csi, volume.clone());
    let aggregation = Aggregation::apart(&world).await;
    let http = aggregation.sidecar("http", &[]).await;
    let mut client = grpc(&http).await;
    let request = |from: &str, max_entries: i32, starting_token: &str| ListSnapshotDeltasRequest {
        from_snapshot_id: from.into(),
        to_snapshot_id: "s1".into(),
        max_entries,
        starting_token: starting_token.into(),
        ..Default::default()
    };
    for base in [Some("s0"), None] {
        let from = base.unwrap_or_default();
        let expected = volume.tuples(base, "s1", 0).expect("tuples");
        let whole = client.list_snapshot_deltas(request(from, 0, "")).await.expect("a page").into_inner();
        let (mut told, mut token) = (Vec::new(), String::new());
        loop {
            let page =
                client.list_snapshot_deltas(request(from, 1, &token)).await.expect("a page").into_inner();
            assert_eq!((page.changed_blocks.len(), page.volume_size_bytes), (1, 8 * 4096));
            told.extend(page.changed_blocks);
            token = page.next_token;
            if token.is_empty() {
                break;
            }
        }
        assert_eq!((&told, whole.next_token.as_str()), (&whole.changed_blocks, ""));
        let told: Vec<_> = told.iter().map(|block| (block.offset, block.block_size_bytes)).collect();
        assert_eq!(told, expected, "{base:?}");
    }
    let first = client.list_snapshot_deltas(request("s0", 1, "")).await.expect("a page").into_inner();
    for (what, request, code) in [
        ("of another request", request("", 1, &first.next_token), Code::Aborted),
        ("no token", request("s0", 1, "nonsense"), Code::Aborted),
        ("negative", request("s0", -1, ""), Code::InvalidArgument),
        ("missing", request("s9", 0, ""), Code::NotFound),
    ] {
        let refused = client.list_snapshot_deltas(request).await.expect_err(what);
        assert_eq!(refused.code(), code, "{what}: {refused}");
    }
}

pub async fn data_is_given_for_good_tokens_alone(mut world: World) {
    let mut rig = Rig::start(PoolKind::Btrfs).await;
    let (volume, device, mut content) = rig.written_volume("data", 16 * MIB, (100, 4, 1)).await;
    let base = rig.snapshot("base", &volume).await;
    content.write(&device, 101, 1, 2);
    content.write(&device, 200, 3, 3);
    content.discard(&device, 103, 1);
    let target = rig.snapshot("target", &volume).await;
    // What is written later is not in the snapshot.
    content.write(&device, 200, 1, 9);
    (world.csi, world.driver) = (rig.socket(), "deltapath.csi.dev".into());
    world.snapshot("monday", &base).await;
    world.snapshot("tuesday", &target).await;
    let template =
        format!("--snapshot-data={}", rig.pool_dir().join("snapshots/{snapshot}/bytes/data.img").display());
    let key_file = |name: &str, byte: u8| {
        let path = world.dir.path().join(name);
        std::fs::write(&path, [byte; 32]).expect("write");
        format!("--data-token-key={}", path.display())
    };
    let (key, other_key) = (key_file("key", 1), key_file("other-key", 2));
    let aggregation = Aggregation::begin(&world).await;
    let mut http = aggregation.sidecar("http", &[&template, &key]).await;
    let server = aggregation.server("server", &[]).await;
    aggregation.route(&[&server]).await;
    let user = aggregation.user("user", json!([create(), snapshots(&[]), data()])).await;
    let status = user.status(pair()).await;
    let entries = status["changedBlocks"].as_array().expect("entries").clone();
    let indexes: Vec<_> = entries.iter().map(|entry| entry["offset"].as_u64().expect("an index")).collect();
    assert_eq!(indexes, [101, 103, 200, 201, 202], "{status}");
    let fill = |index: u64| match index {
        101 => 2,
        103 => 0,
        _ => 3,
    };
    let token = |entry: &Value| entry["dataToken"]["token"].as_str().expect("a token").to_owned();
    for entry in &entries {
        let index = entry["offset"].as_u64().expect("an index");
        let expected = match fill(index) {
            0 => vec![0; BLOCK as usize],
            fill => testkit::content::block_bytes(index, fill),
        };
        let (code, found) = bytes(&http, &token(entry)).await;
        assert_eq!((code, found.len()), (200, BLOCK as usize), "block {index}");
        assert!(found == expected, "block {index} has other bytes");
    }
    let good = token(&entries[0]);
    // Forged: the signature of one token under the claims of another.
    let (claims, _) = good.split_once('.').expect("two parts");
    let second = token(&entries[1]);
    let (_, signature) = second.split_once('.').expect("two parts");
    let account = world.api.token(&world.namespace, "user", "cbt-http").await;
    for (what, token) in [
        ("forged", format!("{claims}.{signature}")),
        ("tampered with", format!("{good}x")),
        ("an account's", account),
        ("garbage", "garbage".into()),
    ] {
        let (code, body) = bytes(&http, &token).await;
        assert_eq!(code, 401, "{what}: {}", String::from_utf8_lossy(&body));
    }
    // Another replica with the same key takes the token, one with another key does not, and time ends it.
    http.running.kill();
    let twin = aggregation.sidecar("twin", &[&template, &key, "--data-token-ttl=1s"]).await;
    assert_eq!(bytes(&twin, &good).await.0, 200);
    let status = user.status(json!({"targetVolumeSnapshotName": "tuesday"})).await;
    let short = token(&status["changedBlocks"][0]);
    eventually("a token of one second has expired", async || bytes(&twin, &short).await.0 != 200).await;
    let (code, body) = bytes(&twin, &short).await;
    let body = String::from_utf8_lossy(&body);
    assert!(code == 401 && body.contains("expired"), "{code}: {body}");
    let foreign = aggregation.sidecar_unready("foreign", &[&template, &other_key]);
    foreign.waits_for_election().await;
    assert_eq!(bytes(&foreign, &good).await.0, 401, "another key's token");
    // What is gone cannot be read, with a token that is still good.
    rig.client.delete_snapshot(&target).await.expect("DeleteSnapshot");
    let (code, body) = bytes(&twin, &good).await;
    assert_eq!(code, 404, "{}", String::from_utf8_lossy(&body));
    assert!(!twin.running.log().contains(&good), "a data token is in the log");
    aggregation.end().await;
}
