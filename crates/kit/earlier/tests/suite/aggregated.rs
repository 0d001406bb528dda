//! Promise: a VolumeSnapshotDelta is answered as it is created, to users who may read both snapshots, and nothing of it is kept.

use std::io::Write;
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use kube::api::DeleteParams;
use proto::BlockMetadataType;
use serde_json::{Value, json};
use testkit::api_server::kube_programs;
use testkit::eventually;

use crate::aggregation::{Aggregation, BLOCK, create, entries, object, snapshots};
use crate::driver::{Driver, Volume};
use crate::world::World;

/// The tuples of a volume as blocks of one size: the driver's own, or tuples cut at multiples of [`BLOCK`].
fn blocks(volume: &Volume, base: Option<&str>, target: &str) -> Vec<(u64, u64)> {
    let tuples = volume.tuples(base, target, 0).expect("tuples");
    if volume.style == BlockMetadataType::FixedLength {
        return tuples;
    }
    let cut = tuples.iter().flat_map(|(offset, size)| offset / BLOCK..(offset + size).div_ceil(BLOCK));
    let mut indexes: Vec<_> = cut.collect();
    indexes.dedup();
    indexes.into_iter().map(|index| (index * BLOCK, BLOCK)).collect()
}

pub fn pair() -> Value {
    json!({"baseVolumeSnapshotName": "monday", "targetVolumeSnapshotName": "tuesday"})
}

/// The same for a page of so many entries, from an index on.
pub fn page_of_pair(offset: impl Into<Value>, limit: impl Into<Value>) -> Value {
    let mut spec = pair();
    (spec["offset"], spec["limit"]) = (offset.into(), limit.into());
    spec
}

pub fn kubectl(world: &World, arguments: &[&str], input: &str) -> Output {
    let programs = kube_programs(&["kubectl"]);
    let mut child = Command::new(programs.join("kubectl"))
        .arg(format!("--kubeconfig={}", world.api.kubeconfig.display()))
        .arg(format!("--namespace={}", world.namespace))
        .arg(format!("--cache-dir={}", world.dir.path().join("cache").display()))
        .args(arguments)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("kubectl");
    child.stdin.take().expect("piped").write_all(input.as_bytes()).expect("write");
    child.wait_with_output().expect("wait")
}

pub async fn kubectl_create_prints_the_answer_page_by_page(world: World) {
    let volume = Volume::small();
    let expected = blocks(&volume, Some("s0"), "s1");
    let _driver = Driver::start(&world.driver, &world.csi, volume);
    world.two_snapshots().await;
    let (aggregation, _server, _http) = Aggregation::start(&world).await;
    let run = |arguments: &[&str], input: &str| {
        let output = kubectl(&world, arguments, input);
        let (out, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
        (output.status.success(), out.into_owned(), err.into_owned())
    };
    let done = |arguments: &[&str], input: &str| {
        let (is_done, out, err) = run(arguments, input);
        assert!(is_done, "kubectl {arguments:?}: {err}");
        out
    };
    let mut spec = pair();
    spec["limit"] = json!(2);
    let printed = done(&["create", "-f", "-", "-o", "json"], &object(spec.clone()).to_string());
    let first: Value = serde_json::from_str(&printed).expect("JSON");
    assert_eq!(first["metadata"]["namespace"], world.namespace);
    let status = &first["status"];
    assert_eq!((&status["state"], &status["limit"], &status["offset"]), (&json!(1), &json!(2), &json!(0)));
    spec["offset"] = status["continue"].clone();
    // The second page in YAML, both ways.
    let text = serde_saphyr::to_string(&object(spec.clone())).expect("YAML");
    let printed = done(&["create", "-f", "-", "-o", "yaml"], &text);
    let second: Value = serde_saphyr::from_str(&printed).expect("YAML");
    assert_eq!(second["status"]["state"], json!(0), "{printed}");
    assert!(second["status"].get("continue").is_none_or(Value::is_null), "{printed}");
    assert_eq!([entries(status), entries(&second["status"])].concat(), expected);
    // Without an output format it says what was made.
    let said = done(&["create", "-f", "-"], &object(pair()).to_string());
    assert_eq!(said.trim(), "volumesnapshotdelta.cbt.storage.k8s.io/walk created");
    // Nothing is there.
    let (is_done, _, err) = run(&["get", "volumesnapshotdeltas"], "");
    assert!(!is_done && err.contains("MethodNotAllowed"), "{err}");
    // What is served is listed, and explained.
    let resources = done(&["api-resources", "--api-group=cbt.storage.k8s.io", "--no-headers"], "");
    let words: Vec<Vec<&str>> = resources.lines().map(|line| line.split_whitespace().collect()).collect();
    let delta = ["volumesnapshotdeltas", "vsd", "cbt.storage.k8s.io/v1alpha1", "true", "VolumeSnapshotDelta"];
    assert!(words.iter().any(|words| *words == delta), "{resources}");
    // kube-apiserver fetches a new APIService's schema in the background, and says nothing of it until it has it.
    let deadline = Instant::now() + Duration::from_secs(120);
    let explained = loop {
        let explain = ["explain", "volumesnapshotdeltas.spec.targetVolumeSnapshotName"];
        match run(&explain, "") {
            (true, explained, _) => break explained,
            (_, _, err) if err.contains("couldn't find resource") && Instant::now() < deadline => {}
            (_, _, err) => panic!("kubectl explain: {err}"),
        }
        tokio::time::sleep(Duration::from_millis(500)).await;
    };
    assert!(explained.contains("The VolumeSnapshot whose blocks are listed."), "{explained}");
    // A misspelt field is refused, by kubectl's own check or the server's.
    spec["targetVolumeSnapshot"] = json!("tuesday");
    let (is_done, _, err) = run(&["create", "-f", "-"], &object(spec).to_string());
    assert!(!is_done && err.contains("targetVolumeSnapshot\""), "{err}");
    let patched = done(&["api-versions"], "");
    for version in ["cbt.storage.k8s.io/v1alpha1", "cbt.storage.k8s.io/v1beta1"] {
        assert!(patched.lines().any(|line| line == version), "{patched}");
    }
    aggregation.end().await;
}

pub async fn other_versions_of_the_group_keep_working_beside_it(world: World) {
    let _driver = Driver::with_two_snapshots(&world).await;
    let services = world.api.objects("SnapshotMetadataService", None);
    let service = |name: &str| {
        json!({
            "apiVersion": "cbt.storage.k8s.io/v1beta1", "kind": "SnapshotMetadataService",
            "metadata": {"name": name},
            "spec": {"address": "a.b.svc:6443", "caCert": "Q0E=", "audience": "a"},
        })
    };
    let before = format!("before.{}", world.driver);
    world.api.make(service(&before)).await;
    let (aggregation, server, _http) = Aggregation::start(&world).await;
    let user = aggregation.user("user", json!([create(), snapshots(&[])])).await;
    let beside = format!("beside.{}", world.driver);
    world.api.make(service(&beside)).await;
    assert_eq!(entries(&user.status(pair()).await).len(), 3);
    for name in [&before, &beside] {
        let found = services.get(name).await.expect("the CRD's object");
        assert_eq!(found.data["spec"]["audience"], "a");
    }
    let versions = async || {
        let request =
            axum::http::Request::get("/apis/cbt.storage.k8s.io").body(Vec::new()).expect("a request");
        let group: Value = world.api.client.request(request).await.expect("the group");
        let versions = group["versions"].as_array().expect("versions").iter();
        let mut versions: Vec<_> =
            versions.map(|version| version["version"].as_str().expect("a version").to_owned()).collect();
        versions.sort();
        versions
    };
    assert_eq!(versions().await, ["v1alpha1", "v1beta1"]);
    // While the aggregated API server is gone, and when its APIService is.
    drop(server);
    let (code, _) = user.ask(pair()).await;
    assert_eq!(code, 503, "nobody serves it");
    for name in [&before, &beside] {
        services.get(name).await.expect("the CRD's object");
    }
    aggregation.end().await;
    eventually("the APIService is gone", async || versions().await == ["v1beta1"]).await;
    for name in [&before, &beside] {
        services.delete(name, &DeleteParams::default()).await.expect("the CRD's object");
    }
}

pub async fn entries_together_are_the_stream(world: World) {
    let mut random = fastrand::Rng::with_seed(testkit::seed("entries of random volumes"));
    let driver = Driver::start(&world.driver, &world.csi, Volume::random(&mut random, 3));
    for snapshot in ["s0", "s1", "s2"] {
        world.snapshot(snapshot, snapshot).await;
    }
    let (aggregation, _server, _http) = Aggregation::start(&world).await;
    // Its rate is not what is tested here.
    let server = aggregation.server("fast", &["--client-qps=100000", "--client-burst=100000"]).await;
    aggregation.route(&[&server]).await;
    let user = aggregation.user("user", json!([create(), snapshots(&[])])).await;
    let (mut pages, mut variable) = (0, 0);
    for life in 0..25 {
        let volume = Volume::random(&mut random, 3);
        *driver.volume.lock().unwrap() = volume.clone();
        variable += usize::from(volume.style == BlockMetadataType::VariableLength);
        for (base, target) in [(Some("s0"), "s2"), (Some("s1"), "s2"), (Some("s1"), "s1"), (None, "s1")] {
            let all = blocks(&volume, base, target);
            let size = all.first().map_or(BLOCK, |(_, size)| *size);
            let offset = if random.bool() { 0 } else { random.u64(..=volume.capacity() / size) };
            let expected: Vec<_> = all.into_iter().filter(|(at, _)| *at >= offset * size).collect();
            let limit = random.u64(expected.len().div_ceil(9) as u64 + 1..=expected.len() as u64 + 2);
            let told = user.walk(base, target, offset, limit).await;
            let what = format!("life {life}: {base:?} to {target} from {offset}, pages of {limit}");
            assert_eq!(told, expected, "{what}");
            pages += 1 + told.len() as u64 / limit;
        }
    }
    assert!(pages > 100 && variable > 0 && variable < 25, "{pages} pages, {variable} variable");
    aggregation.end().await;
}

pub async fn limits_are_bounded_and_blocks_are_counted(world: World) {
    let volume = Volume::pair(vec![0; 2000], vec![1; 2000]);
    let _driver = Driver::start(&world.driver, &world.csi, volume);
    world.two_snapshots().await;
    let (aggregation, _server, _http) = Aggregation::start(&world).await;
    let user = aggregation.user("user", json!([create(), snapshots(&[])])).await;
    for (limit, expected) in [
        (json!(null), 256),
        (json!(0), 256),
        (json!(7), 7),
        (json!(256), 256),
        (json!(257), 256),
        (json!(u64::MAX), 256),
    ] {
        let status = user.status(page_of_pair(0, limit.clone())).await;
        assert_eq!(entries(&status).len(), expected, "{limit}");
        assert_eq!((&status["limit"], &status["state"]), (&json!(expected), &json!(1)), "{limit}");
        assert_eq!(status["continue"], json!(expected), "{limit}");
    }
    // At the end of the volume nothing is left; past it there is no block.
    let at = async |offset: u64| user.status(page_of_pair(offset, Value::Null)).await;
    let last = at(1999).await;
    assert_eq!((entries(&last), &last["state"]), (vec![(1999 * 4096, 4096)], &json!(0)));
    let end = at(2000).await;
    assert_eq!((entries(&end), &end["state"]), (vec![], &json!(0)));
    for past in [2001, u64::MAX] {
        let status = at(past).await;
        assert_eq!((&status["state"], &status["continue"]), (&json!(2), &json!(past)), "{status}");
        assert!(status["error"].as_str().is_some_and(|error| error.starts_with("BadRequest: ")), "{status}");
    }
    aggregation.end().await;
}

pub async fn nothing_of_it_is_in_etcd(world: World) {
    let _driver = Driver::with_two_snapshots(&world).await;
    let (aggregation, _server, _http) = Aggregation::start(&world).await;
    let user = aggregation.user("user", json!([create(), snapshots(&[])])).await;
    let before = world.api.revision().await;
    for limit in [1, 2, 256] {
        assert_eq!(user.walk(Some("monday"), "tuesday", 0, limit).await.len(), 3);
    }
    for (key, value) in world.api.written_since(before).await {
        let value = String::from_utf8_lossy(&value);
        for trace in ["volumesnapshotdelta", "VolumeSnapshotDelta", "changedBlocks", "blockSizeBytes"] {
            // Its APIService and the like have the name of the kind, and were there before.
            assert!(!key.contains(trace) && !value.contains(trace), "{key}: {value}");
        }
    }
    aggregation.end().await;
}

pub async fn mistakes_get_the_errors_that_users_expect(world: World) {
    let driver = Driver::start(&world.driver, &world.csi, Volume::small());
    world.snapshot_taken_at("monday", "s0", 100).await;
    world.snapshot_taken_at("tuesday", "s1", 200).await;
    world.snapshot_unready("late", "s0").await;
    let other = |_: &mut Value, content: &mut Value| {
        content["spec"]["source"] = json!({"volumeHandle": "volume-2"});
    };
    world.snapshot_with("other-volume", "s0", other).await;
    let foreign = |_: &mut Value, content: &mut Value| content["spec"]["driver"] = json!("other.csi.test");
    world.snapshot_with("foreign", "s0", foreign).await;
    let stolen = |_: &mut Value, content: &mut Value| {
        content["spec"]["volumeSnapshotRef"]["name"] = json!("monday");
    };
    world.snapshot_with("stolen", "s1", stolen).await;
    world.snapshot("unknown-to-driver", "s9").await;
    let (aggregation, server, http) = Aggregation::start(&world).await;
    let user = aggregation.user("user", json!([create(), snapshots(&[])])).await;
    let of = |base: &str, target: &str| {
        let mut spec = json!({"targetVolumeSnapshotName": target});
        if !base.is_empty() {
            spec["baseVolumeSnapshotName"] = json!(base);
        }
        spec
    };
    // What the objects tell fails the request.
    for (base, target, code, reason, message) in [
        ("", "nowhere", 404, "NotFound", "nowhere does not exist"),
        ("nowhere", "tuesday", 404, "NotFound", "nowhere does not exist"),
        ("", "late", 409, "Conflict", "is not ready to use"),
        ("late", "tuesday", 409, "Conflict", "is not ready to use"),
        ("tuesday", "monday", 422, "Invalid", "spec.baseVolumeSnapshotName: the base is newer"),
        ("other-volume", "tuesday", 422, "Invalid", "different volumes"),
        ("foreign", "tuesday", 422, "Invalid", "not taken by the CSI driver"),
        ("", "foreign", 404, "NotFound", "other.csi.test has no DriverDiscovery"),
        ("", "stolen", 409, "Conflict", "not bound to each other"),
        ("", "", 422, "Invalid", "spec.targetVolumeSnapshotName: Required value"),
        ("", "../secrets", 422, "Invalid", "\"../secrets\""),
    ] {
        let (found, answer) = user.ask(of(base, target)).await;
        assert_eq!((found, answer["reason"].as_str()), (code, Some(reason)), "{base} {target}: {answer}");
        assert_eq!(answer["kind"], "Status", "{answer}");
        assert!(answer["message"].as_str().is_some_and(|text| text.contains(message)), "{answer}");
    }
    // What the driver says stands in the answer.
    let failed = async |spec: Value, with: &str| {
        let status = user.status(spec).await;
        assert_eq!(status["state"], json!(2), "{status}");
        assert!(status["error"].as_str().is_some_and(|error| error.contains(with)), "{with}: {status}");
        assert_eq!(status["changedBlocks"], json!([]), "{status}");
    };
    failed(of("", "unknown-to-driver"), "NotFound: snapshot s9 does not exist").await;
    world.snapshot("broken", "out-of-order").await;
    failed(of("", "broken"), "breaks the CSI spec").await;
    drop(driver);
    failed(pair(), "ServiceUnavailable: the CSI driver does not answer on its socket").await;
    let driver = Driver::start_with(&world.driver, &world.csi, None);
    failed(pair(), "NotImplemented: ").await;
    drop(driver);
    let _driver = Driver::start(&world.driver, &world.csi, Volume::small());
    http.ready().await;
    assert_eq!(entries(&user.status(pair()).await).len(), 3);
    drop(http);
    failed(pair(), "cbt-http does not answer").await;
    assert!(!server.running.log().contains("panicked"), "{}", server.running.log());
    aggregation.end().await;
}

pub async fn contents_are_negotiated(world: World) {
    let _driver = Driver::with_two_snapshots(&world).await;
    let (aggregation, _server, _http) = Aggregation::start(&world).await;
    let user = aggregation.user("user", json!([create(), snapshots(&[])])).await;
    let text = object(pair()).to_string();
    let yaml = serde_saphyr::to_string(&object(pair())).expect("YAML");
    const PROTOBUF: &str = "application/vnd.kubernetes.protobuf";
    for (content, accept, body, code, kind) in [
        ("application/json", "application/json", &text, 201, "application/json"),
        ("application/json", "application/yaml", &text, 201, "application/yaml"),
        ("application/yaml", "application/json", &yaml, 201, "application/json"),
        (
            "application/json",
            "application/vnd.kubernetes.protobuf,application/json",
            &text,
            201,
            "application/json",
        ),
        ("application/json", PROTOBUF, &text, 406, "application/json"),
        (PROTOBUF, "application/json", &text, 415, "application/json"),
        (PROTOBUF, "application/yaml", &text, 415, "application/yaml"),
        ("text/plain", "*/*", &text, 415, "application/json"),
        ("application/json", "*/*", &"{".to_owned(), 400, "application/json"),
    ] {
        let answer = user.post("", &[("content-type", content), ("accept", accept)], body.as_bytes()).await;
        assert_eq!((answer.code, answer.kind.as_str()), (code, kind), "{content} {accept}: {}", answer.body);
        let object: Value = match kind {
            "application/yaml" => serde_saphyr::from_str(&answer.body).expect("YAML"),
            _ => answer.json(),
        };
        match code {
            201 => assert_eq!(entries(&object["status"]).len(), 3, "{object}"),
            code => {
                assert_eq!((&object["kind"], &object["code"]), (&json!("Status"), &json!(code)), "{object}")
            }
        }
    }
    let mut more = object(pair());
    more["spec"]["speed"] = json!("high");
    let more = more.to_string();
    for (query, code, warning) in [
        ("", 201, "299 - \"unknown field \\\"spec.speed\\\"\""),
        ("?fieldValidation=Ignore", 201, ""),
        ("?fieldValidation=Strict", 400, ""),
        ("?fieldValidation=Nonsense", 400, ""),
        ("?dryRun=All", 201, "299 - \"unknown field \\\"spec.speed\\\"\""),
        ("?dryRun=Some", 400, ""),
    ] {
        let answer = user.post_json(query, &more).await;
        assert_eq!((answer.code, answer.warning.as_str()), (code, warning), "{query}: {}", answer.body);
    }
    let mut elsewhere = object(pair());
    elsewhere["metadata"]["namespace"] = json!("default");
    let answer = user.post_json("", &elsewhere.to_string()).await;
    assert_eq!(answer.code, 400, "{}", answer.body);
    let long = format!("{{\"a\": \"{}\"}}", "x".repeat(2 << 20));
    let answer = user.post_json("", &long).await;
    assert_eq!((answer.code, &answer.json()["reason"]), (413, &json!("RequestEntityTooLarge")));
    aggregation.end().await;
}

pub async fn a_walk_goes_on_whatever_is_killed(world: World) {
    let mut random = fastrand::Rng::with_seed(7);
    let content: Vec<u8> = (0..300).map(|_| random.u8(..2)).collect();
    let volume = Volume::pair(vec![0; 300], content);
    let expected = blocks(&volume, Some("s0"), "s1");
    let mut driver = Some(Driver::start(&world.driver, &world.csi, volume.clone()));
    world.two_snapshots().await;
    let (aggregation, server, http) = Aggregation::start(&world).await;
    let second = aggregation.server("second", &[]).await;
    aggregation.route(&[&server, &second]).await;
    let mut waits = aggregation.sidecar_unready("waits", &[]);
    waits.waits_for_election().await;
    let user = aggregation.user("user", json!([create(), snapshots(&[])])).await;
    let (mut servers, mut https) = (vec![server, second], vec![http]);
    let (mut told, mut offset, mut page, mut failed) = (Vec::new(), 0, 0, 0);
    loop {
        match page {
            3 => {
                servers.remove(0).running.kill();
                aggregation.route(&servers.iter().collect::<Vec<_>>()).await;
            }
            6 => {
                https.remove(0).running.kill();
            }
            9 => drop(driver.take()),
            12 => waits.running.kill(),
            _ => {}
        }
        let spec = page_of_pair(offset, 8);
        // The same page until it is answered, as a user would ask.
        let status = loop {
            let (code, answer) = user.ask(spec.clone()).await;
            if code == 201 && answer["status"]["state"] != json!(2) {
                break answer["status"].clone();
            }
            assert!([201, 503].contains(&code), "{code}: {answer}");
            failed += 1;
            if code == 201 {
                assert_eq!(answer["status"]["continue"], json!(offset), "{answer}");
            }
            match page {
                9 if driver.is_none() => {
                    driver = Some(Driver::start(&world.driver, &world.csi, volume.clone()));
                }
                12 if https.is_empty() => https.push(aggregation.sidecar("again", &[]).await),
                _ => {}
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        };
        told.extend(entries(&status));
        page += 1;
        match status["continue"].as_u64() {
            Some(next) => offset = next,
            None => break,
        }
    }
    assert_eq!(told, expected);
    assert!(page > 12 && failed >= 3, "{page} pages, {failed} failures");
    aggregation.end().await;
}
