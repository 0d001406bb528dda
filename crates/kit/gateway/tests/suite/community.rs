//! Promise: what exists works with it. The community's iterator (in deploy/backup-example, as a backup tool would use it) reads
//! through the gateway from the real driver, the client library reads through the gateway, the community's sidecar and the
//! driver's socket, and `cbt-backup` backs up through the first two; and the faults that these tests look for are there in the community's sidecar.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use csi_client::from_snapshot;
use serde_json::json;
use testkit::{MIB, PoolKind, Rig, free_port};
use tonic::Code;

use crate::backup_tool::{arg, ok, tool};
use crate::certificates::{bundle, empty_secret, service};
use crate::driver::Driver;
use crate::library;
use crate::metrics::{samples, sum};
use crate::world::{AUDIENCE, Client, Files, Gateway, HOST, Sidecar, World, about, code, eventually, get};

pub fn program(name: &str) -> PathBuf {
    let path = Path::new(testkit::HOME).join(".deps/backup").join(name);
    assert!(path.exists(), "needs {name}: run `make test-deps`");
    path
}

/// Lists, copies and verifies with the example tool, which is the community's iterator, first through the gateway and then
/// through the community's sidecar: both give the same.
pub async fn a_backup_tool_of_the_community_works(world: World, pool: PoolKind) {
    let (example, sidecar) = (program("backup-example"), program("csi-snapshot-metadata"));
    let ns = world.namespace.clone();
    const SIZE: i64 = 64 * MIB;
    let mut rig = Rig::start_with(pool, &[&format!("--driver-name={}", world.driver)], "info").await;
    let (raw, device, mut content) = rig.written_volume("block", SIZE, (0, 300, 1)).await;
    content.write(&device, 9000, 40, 2);
    let first = rig.snapshot("block-1", &raw).await;
    content.write(&device, 5000, 7, 3);
    content.discard(&device, 9010, 3);
    let second = rig.snapshot("block-2", &raw).await;
    let (_, old) = rig.volume_from("old", SIZE, from_snapshot(&first)).await;
    let (_, new) = rig.volume_from("new", SIZE, from_snapshot(&second)).await;
    world.snapshot(&ns, "block-1", &first).await;
    world.snapshot(&ns, "block-2", &second).await;
    // The sidecar finds no secret without a class.
    world.default_class().await;
    let caller = backup_account(&world).await;
    let socket = rig.socket();

    let walk = |through: &str, says: &dyn Fn() -> String| {
        let image = world.dir.path().join(format!("{through}.img"));
        let run = |what: &str, more: &[&str]| -> (bool, String) {
            let mut command = Command::new(&example);
            command.arg(what).args(more);
            if what != "verify" {
                command.args(["-namespace", &ns, "-service-account=backup", "-kubeconfig"]).arg(&caller);
            }
            if what != "list" {
                command.arg("-image").arg(&image);
            }
            let output = command.output().expect("run the example");
            let text = [output.stdout, output.stderr].map(|text| String::from_utf8_lossy(&text).into_owned());
            (output.status.success(), text.concat())
        };
        let done = |what: &str, more: &[&str]| -> String {
            let (ok, text) = run(what, more);
            assert!(ok, "{through}: {what} {more:?}: {text}\n{}", says());
            text
        };
        let (old, new) = (format!("-device={}", old.display()), format!("-device={}", new.display()));
        let all = blocks(&done("list", &["-snapshot=block-1"]));
        assert_eq!(all, [(0, 300 * 4096), (9000 * 4096, 40 * 4096)], "{through}");
        assert_eq!(blocks(&done("list", &["-snapshot=block-2", "-base=block-1"])), CHANGED, "{through}");
        let full = done("copy", &["-snapshot=block-1", &old]);
        assert!(full.contains(&format!("copied 2 tuples, {} bytes", 340 * 4096)), "{full}");
        done("verify", &[&old]);
        let (ok, text) = run("verify", &[&new]);
        assert!(
            !ok && text.contains("differ between"),
            "the image of the old snapshot passes for the new one: {text}"
        );
        let incremental = done("copy", &["-snapshot=block-2", "-base=block-1", &new]);
        assert!(incremental.contains(&format!("copied 2 tuples, {} bytes", 10 * 4096)), "{incremental}");
        done("verify", &[&new]);
        let (ok, text) = run("list", &["-snapshot=block-1", "-base=block-2"]);
        assert!(!ok && text.contains("InvalidArgument"), "the wrong way round: {text}");
    };

    // The certificate and the SnapshotMetadataService are the gateway's own work.
    empty_secret(&world).await;
    let config = world.gateway_kubeconfig("gateway").await;
    let port = free_port();
    let own = [
        format!("--csi-address={}", rig.socket().display()),
        format!("--service-address=127.0.0.1:{port}"),
        format!("--namespace={ns}"),
        format!("--port={port}"),
    ];
    let mut arguments = vec![
        "--manage-certificates",
        "--audience=community",
        "--require-base-snapshot=false",
        "--pod-name=one",
    ];
    arguments.extend(own.iter().map(String::as_str));
    let gateway = Gateway::start(&world, &config, "gateway", &arguments, None);
    gateway.ready().await;
    let object = service(&world).await.expect("it is there before the gateway is ready");
    walk("gateway", &|| gateway.running.log());
    let listed = || library::answers(&caller, &ns, &socket, ("block-1", "block-2"), (&first, &second));
    let expected = library::Answers {
        capacity: SIZE as u64,
        allocated: vec![(0, 300 * 4096), (9000 * 4096, 40 * 4096)],
        delta: CHANGED.to_vec(),
    };
    assert_eq!(listed().await, expected);
    backs_up(&world, &caller, "by-gateway", "full", "block-1", &old).await;
    drop(gateway);

    world.api.delete("SnapshotMetadataService", None, &world.driver).await;
    let files = Files::make(world.dir.path());
    let front = Sidecar::start(&sidecar, &world, &rig.socket(), &files).await;
    let address = format!("127.0.0.1:{}", front.port);
    world.service(&address, "community", &STANDARD.encode(&files.ca)).await;
    walk("sidecar", &|| front.running.log());
    assert_eq!(listed().await, expected);
    backs_up(&world, &caller, "by-sidecar", "full", "block-1", &old).await;
    backs_up(&world, &caller, "by-sidecar", "incremental", "block-2", &new).await;
    drop(front);

    // A deleted base: the handle is all that is left of it.
    let gateway = Gateway::start(&world, &config, "gateway", &arguments, None);
    gateway.ready().await;
    rig.client.delete_snapshot(&first).await.expect("delete");
    world.delete_snapshot(&ns, "block-1").await;
    let token = world.api.token(&ns, "backup", "community").await;
    let mut client = Client::connect(port, "127.0.0.1", &bundle(&object)).await.expect("connect");
    let (_, tuples) =
        client.delta(&token, &ns, &first, "block-2").await.expect("a delta from a deleted base");
    let tuples: Vec<_> = tuples.into_iter().map(|(offset, size)| (offset as u64, size as u64)).collect();
    assert_eq!(tuples, CHANGED);
    world.api.delete("SnapshotMetadataService", None, &world.driver).await;
    eventually("the gateway has published itself", async || service(&world).await.is_some()).await;
    backs_up(&world, &caller, "by-gateway", "incremental", "block-2", &new).await;
    for volume in rig.client.volumes().await.expect("list") {
        rig.detach(&volume.volume_id).await;
        rig.client.delete_volume(&volume.volume_id).await.expect("delete");
    }
    rig.finish();
}

/// A backup of a snapshot by `cbt-backup`, from a device that holds it; what is restored from it holds the same.
async fn backs_up(world: &World, caller: &Path, repository: &str, kind: &str, snapshot: &str, device: &Path) {
    let (repository, to) = (world.dir.path().join(repository), world.dir.path().join("restored"));
    let of = ["--repository", arg(&repository), "--volume", "v", "--output", "json"];
    let source = ["--namespace", &world.namespace, "--snapshot", snapshot, "--device", arg(device)];
    let made = ok(tool(world, caller, &[&[kind], &of[..], &source].concat())).await;
    assert_eq!(made["kind"], kind, "{made}");
    if kind == "incremental" {
        assert_eq!(made["listed"].as_u64(), Some(CHANGED.iter().map(|(_, size)| size).sum()), "{made}");
    }
    let target = ["--to", arg(&to), "--overwrite"];
    ok(tool(world, caller, &[&["restore", "latest"], &of[..], &target].concat())).await;
    let bytes = |path: &Path| std::fs::read(path).expect("read");
    assert!(bytes(&to) == bytes(device), "{kind} of {snapshot}: another volume is restored");
}

const CHANGED: [(u64, u64); 2] = [(5000 * 4096, 7 * 4096), (9010 * 4096, 3 * 4096)];

/// The pairs of numbers that the tool lists.
fn blocks(text: &str) -> Vec<(u64, u64)> {
    let pair = |line: &str| {
        let mut words = line.split_whitespace().map(str::parse);
        Some((words.next()?.ok()?, words.next()?.ok()?))
    };
    text.lines().filter_map(pair).collect()
}

/// An account that may do everything: its name to the API server, and its kubeconfig.
async fn account_of_all_rights(world: &World, account: &str) -> (String, PathBuf) {
    let ns = &world.namespace;
    world.api.account(ns, account, json!([])).await;
    world.api.bind(ns, account, "cluster-admin").await;
    (format!("system:serviceaccount:{ns}:{account}"), world.api.kubeconfig_of(ns, account).await)
}

/// A kubeconfig of an account with what deploy/base/rbac-clients.yaml gives to backup applications.
pub async fn backup_account(world: &World) -> PathBuf {
    let ns = &world.namespace;
    let rules = json!([{"apiGroups": ["snapshot.storage.k8s.io"], "resources": ["volumesnapshots"], "verbs": ["get"]},
        {"apiGroups": [""], "resources": ["serviceaccounts/token"], "verbs": ["create"]}]);
    world.api.account(ns, "backup", rules).await;
    let objects = crate::world::manifests("deploy/base/rbac-clients.yaml");
    let role = objects.into_iter().find(|object| object["metadata"]["name"] == "deltapath-backup-client");
    let (mut role, name) = (role.expect("the role of backup applications"), format!("{ns}-client"));
    role["metadata"]["name"] = json!(name);
    for rule in role["rules"].as_array_mut().expect("rules") {
        if rule["resourceNames"] == json!(["deltapath.csi.dev"]) {
            rule["resourceNames"] = json!([world.driver]);
        }
    }
    world.api.make(role).await;
    world.api.bind(ns, "backup", &name).await;
    world.api.kubeconfig_of(ns, "backup").await
}

pub async fn the_communitys_sidecar_has_the_faults_that_these_tests_look_for(world: World) {
    let sidecar = program("csi-snapshot-metadata");
    let driver = Driver::start(&world.driver, &world.socket());
    let (ns, other) = (world.namespace.clone(), world.other_namespace().await);
    world.default_class().await;
    for (name, handle) in [("first", "plain-1"), ("second", "plain-2")] {
        world.snapshot(&ns, name, handle).await;
    }
    world.snapshot(&other, "theirs", "plain-3").await;
    world.snapshot_but(&ns, "no-status", "plain-4", json!({"snapshot": {"status": null}})).await;
    let of_theirs = json!({"volumeSnapshotRef": {"name": "theirs", "namespace": other}});
    world.snapshot_but(&ns, "stolen", "plain-5", json!({"content": {"spec": of_theirs}})).await;
    world.service("sidecar.test:1", AUDIENCE, "YQ==").await;
    let token = world.reader("reader").await;
    let gateway = world.gateway(&[]).await;
    let files = gateway.files.as_ref().expect("files");
    // With an account of its own, by which its calls are told from those of the others.
    let (user, config) = account_of_all_rights(&world, "sidecar").await;
    let config = format!("--kubeconfig={}", config.display());
    let mut process = Sidecar::start_with(&sidecar, &world, &world.socket(), files, &[&config]).await;
    let mut client = Client::connect(process.port, HOST, &files.ca).await.expect("connect");
    // Each call of a client is six of its own to the API server, also where it has answered the same before.
    let of_one = [
        ("create subjectaccessreviews", 1),
        ("create tokenreviews", 1),
        ("get snapshotmetadataservices", 1),
        ("get volumesnapshotcontents", 1),
        ("get volumesnapshots", 1),
        ("list volumesnapshotclasses", 1),
    ];
    let none = world.api.calls_of(&user).await;
    assert_eq!(code(&client.allocated(&token, &ns, "second").await), Code::Ok);
    let first = world.api.calls_of(&user).await;
    assert_eq!(code(&client.allocated(&token, &ns, "second").await), Code::Ok);
    let again = world.api.calls_of(&user).await;
    assert_eq!(code(&client.delta(&token, &ns, "plain-1", "second").await), Code::Ok);
    let delta = world.api.calls_of(&user).await;
    for (before, after) in [(&none, &first), (&first, &again), (&again, &delta)] {
        let more = after.iter().map(|(call, times)| (call.as_str(), times - before.get(call).unwrap_or(&0)));
        assert_eq!(more.filter(|(_, times)| *times > 0).collect::<Vec<_>>(), of_one);
    }
    // 1. Another tenant's base is passed to the driver.
    assert_eq!(code(&client.delta(&token, &ns, "plain-3", "second").await), Code::Ok);
    let asked = driver.seen.deltas.lock().pop().map(|request| request.base_snapshot_id);
    assert_eq!(asked.as_deref(), Some("plain-3"));
    // 2. A content that belongs to another VolumeSnapshot is read.
    assert_eq!(code(&client.allocated(&token, &ns, "stolen").await), Code::Ok);
    // 3. It makes its calls to the API server five a second, so callers wait for each other.
    let begun = Instant::now();
    let calls = (0..10).map(|_| {
        let (mut client, token, ns) = (client.clone(), token.clone(), ns.clone());
        tokio::spawn(async move { code(&client.allocated(&token, &ns, "second").await) })
    });
    for call in calls.collect::<Vec<_>>() {
        assert_eq!(call.await.expect("a call"), Code::Ok);
    }
    assert!(begun.elapsed() > Duration::from_secs(5), "ten calls took {:?}", begun.elapsed());
    // 4. It counts a delta as something else. The gateway counts it as what it is.
    let mut ours = gateway.client().await;
    assert_eq!(code(&ours.delta(&token, &ns, "plain-1", "second").await), Code::Ok);
    let counted = samples(&gateway.get("/metrics").await.expect("metrics").1);
    let counts = |method| sum(&counted, "deltapath_gateway_rpc_total", &[("method", method)]);
    assert_eq!((counts("GetMetadataDelta"), counts("GetMetadataAllocated")), (1.0, 0.0));
    let (_, text) = get(process.http, "/metrics").await.expect("metrics");
    let counted = samples(&text);
    let name = "snapshot_metadata_controller_operations_seconds_count";
    let counts = |method| sum(&counted, name, &[("method_name", method)]);
    assert_eq!((counts("MetadataDelta"), counts("MetadataAllocated")), (0.0, 15.0), "{text}");
    // 5. A VolumeSnapshot without a status ends the process.
    assert!(process.running.is_alive());
    let answer = client.allocated(&token, &ns, "no-status").await;
    assert!(answer.is_err(), "{answer:?}");
    assert_eq!(process.running.ended().await, Some(2), "has it been mended?");
}

pub async fn the_communitys_sidecar_ends_streams_that_are_read_and_the_gateway_does_not(world: World) {
    let sidecar = program("csi-snapshot-metadata");
    let (_driver, ns, token) = world.with_snapshot("long", "paced-1").await;
    world.default_class().await;
    world.service("sidecar.test:1", AUDIENCE, "YQ==").await;
    // Its stream is open longer than the sidecar's, and many times longer than a client may be idle.
    let gateway = world.gateway(&["--idle-timeout=5s"]).await;
    let files = gateway.files.as_ref().expect("files");
    let limit = ["--max-streaming-duration-min=1"];
    let process = Sidecar::start_with(&sidecar, &world, &world.socket(), files, &limit).await;
    let open = async |port: u16| {
        let mut client = Client::connect(port, HOST, &files.ca).await.expect("connect");
        let request = about(&token, &ns, "long");
        client.0.get_metadata_allocated(request).await.expect("a stream").into_inner()
    };
    let (mut ours, mut theirs) = (open(gateway.port).await, open(process.port).await);
    let (begun, mut messages) = (Instant::now(), 0);
    let status = loop {
        assert!(ours.message().await.expect("it does not fail").is_some(), "it has no end");
        match theirs.message().await {
            Ok(message) => assert!(message.is_some(), "it has no end"),
            Err(status) => break status,
        }
        messages += 1;
        assert!(begun.elapsed() < Duration::from_secs(600), "it goes on: has it been mended?");
    };
    assert_eq!(status.code(), Code::DeadlineExceeded, "{status:?}");
    assert!(begun.elapsed() > Duration::from_secs(30) && messages > 100, "{messages} messages: {status:?}");
    for _ in 0..100 {
        assert!(ours.message().await.expect("it does not fail").is_some(), "it has no end");
    }
}
