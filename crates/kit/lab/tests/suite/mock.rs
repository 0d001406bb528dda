//! The mock: deterministic answers of any size, data that agrees with them, and the Kubernetes service over TLS.

use std::collections::HashMap;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::time::Duration;

use csi_client::{Client, Options, block_capability, from_snapshot, new_volume};
use proto::kubernetes::snapshot_metadata_client::SnapshotMetadataClient;
use proto::{kubernetes, *};
use tonic::Code;

use super::{Lab, connect, delta, read};

#[tokio::test(flavor = "multi_thread")]
async fn a_million_changes_of_a_tebibyte_are_the_same_in_every_run() {
    let mut answers = Vec::new();
    let arguments = ["--volume", "disk=1Ti", "--snapshots", "3", "--changes", "1000000"];
    for (seed, style) in [("1", "fixed"), ("1", "fixed"), ("2", "fixed"), ("1", "variable")] {
        let dir = tempfile::tempdir().expect("temp dir");
        let more = ["--seed", seed, "--block-metadata-type", style];
        let (_lab, socket) = Lab::mock(&dir, &[&arguments[..], &more].concat()).await;
        let mut client = connect(&socket).await;
        let list = client.delta("disk-1", "disk-2", 0, 0).await.expect("a delta that keeps to the spec");
        assert_eq!(list.capacity, 1 << 40);
        assert_eq!(list.bytes(), 4096 * 1_000_000);
        // Resumed in the middle, it is the rest.
        let middle = list.tuples().nth(500_000).expect("a tuple").offset;
        let rest = client.delta("disk-1", "disk-2", middle as i64 + 1, 10_000).await.expect("a delta");
        assert!(rest.tuples().eq(list.tuples().filter(|tuple| tuple.offset + tuple.size > middle + 1)));
        answers.push(list);
    }
    assert_eq!(answers[0], answers[1]);
    assert_ne!(answers[0], answers[2]);
    let count = |at: usize| answers[at].tuples().count();
    assert_eq!(count(0), 1_000_000);
    assert!(count(3) < count(0), "runs of blocks are one tuple");
}

async fn publish(client: &mut Client, name: &str, snapshot: &str, dir: &Path) -> std::path::PathBuf {
    let mut request = new_volume(name, 0, block_capability());
    request.volume_content_source = Some(from_snapshot(snapshot));
    client.create_volume(request).await.expect("CreateVolume");
    let target = dir.join(name);
    let request = NodePublishVolumeRequest {
        volume_id: name.to_owned(),
        target_path: target.display().to_string(),
        volume_capability: Some(block_capability()),
        ..Default::default()
    };
    client.node.node_publish_volume(request).await.expect("NodePublishVolume");
    target
}

/// What a backup tool does: the base's data with the ranges of the delta is the target's.
#[tokio::test(flavor = "multi_thread")]
async fn the_data_of_restored_volumes_agrees_with_the_streams() {
    let dir = tempfile::tempdir().expect("temp dir");
    // No multiple of the block size.
    let arguments = ["--volume", "disk=1234567", "--snapshots", "4", "--changes", "40"];
    let (_lab, socket) = Lab::mock(&dir, &arguments).await;
    let mut client = connect(&socket).await;
    let base = publish(&mut client, "from-1", "disk-1", dir.path()).await;
    let target = publish(&mut client, "from-4", "disk-4", dir.path()).await;
    let (mut backup, wanted) = (std::fs::read(&base).expect("read"), std::fs::read(&target).expect("read"));
    assert_eq!(backup.len(), 1_234_567);
    assert_ne!(backup, wanted);
    let changed = client.delta("disk-1", "disk-4", 0, 7).await.expect("a delta");
    let file = std::fs::File::open(&target).expect("open");
    for tuple in changed.tuples() {
        let range = tuple.offset as usize..(tuple.offset + tuple.size) as usize;
        file.read_exact_at(&mut backup[range], tuple.offset).expect("read");
    }
    assert!(backup == wanted, "an incremental backup is not the target");
    let held = client.allocated("disk-4", 0, 0).await.expect("allocated");
    let outside = (0..wanted.len()).filter(|byte| {
        wanted[*byte] != 0
            && !held.tuples().any(|tuple| (tuple.offset..tuple.offset + tuple.size).contains(&(*byte as u64)))
    });
    assert_eq!(outside.count(), 0, "data lies outside of what is allocated");
    let request =
        NodeUnpublishVolumeRequest { volume_id: "from-1".into(), target_path: base.display().to_string() };
    client.node.node_unpublish_volume(request).await.expect("NodeUnpublishVolume");
    assert!(!base.exists());
}

#[tokio::test(flavor = "multi_thread")]
async fn wrong_requests_are_refused_as_the_spec_has_it() {
    let dir = tempfile::tempdir().expect("temp dir");
    let (_lab, socket) =
        Lab::mock(&dir, &["--volume", "one=1Mi", "--volume", "two=1Mi", "--snapshots", "2"]).await;
    let mut client = connect(&socket).await;
    for (base, target, offset, bound, code) in [
        ("one-1", "one-2", -1, 0, Code::OutOfRange),
        ("one-1", "one-2", (1 << 20) + 1, 0, Code::OutOfRange),
        ("one-1", "one-2", 0, -1, Code::InvalidArgument),
        ("one-2", "one-1", 0, 0, Code::InvalidArgument),
        ("one-1", "two-2", 0, 0, Code::InvalidArgument),
        ("", "two-2", 0, 0, Code::InvalidArgument),
        ("one-1", "", 0, 0, Code::InvalidArgument),
        ("one-1", "one-9", 0, 0, Code::NotFound),
    ] {
        let refused = client.delta(base, target, offset, bound).await.expect_err("refused");
        assert_eq!(refused.code(), code, "{base} {target} {offset} {bound}");
    }
    client.delete_snapshot("one-1").await.expect("delete");
    assert_eq!(
        client.delta("one-1", "one-2", 0, 0).await.expect_err("its base is gone").code(),
        Code::NotFound
    );
    let mut request =
        CreateSnapshotRequest { name: "n".into(), source_volume_id: "one".into(), ..Default::default() };
    for (key, value, part) in [
        ("ranges", "0+2Mi", "capacity"),
        ("changes", "many", "not a number"),
        ("size", "1", "changes or ranges"),
    ] {
        request.parameters = HashMap::from([(key.to_owned(), value.to_owned())]);
        let refused = client.controller.create_snapshot(request.clone()).await.expect_err("refused");
        assert!(refused.code() == Code::InvalidArgument && refused.message().contains(part), "{refused}");
    }
    let mut ids = Vec::new();
    let mut token = String::new();
    loop {
        let request = ListSnapshotsRequest { max_entries: 1, starting_token: token, ..Default::default() };
        let answer = client.controller.list_snapshots(request).await.expect("ListSnapshots").into_inner();
        let snapshots = answer.entries.into_iter().filter_map(|entry| entry.snapshot);
        ids.extend(snapshots.map(|snapshot| snapshot.snapshot_id));
        token = answer.next_token;
        if token.is_empty() {
            break;
        }
    }
    assert_eq!(ids, ["one-2", "two-1", "two-2"]);
}

/// The Kubernetes service over TLS, with `cbt-lab faults` as the client of that TLS; and a certificate that expires.
#[tokio::test(flavor = "multi_thread")]
async fn the_kubernetes_service_is_reached_over_tls_until_its_certificate_expires() {
    let dir = tempfile::tempdir().expect("temp dir");
    let ca = dir.path().join("ca.pem").display().to_string();
    let service = ["--kubernetes", "https://127.0.0.1:0", "--ca-file", &ca, "--token", "sesame"];
    let disk = ["--volume", "disk=1Gi", "--snapshots", "2", "--changes", "10"];
    let (mock, _socket) = Lab::mock(&dir, &[service, disk].concat()).await;
    let address = mock.ready["listen"][1].as_str().expect("an address").to_owned();
    let before = async |name: &str| {
        let socket = dir.path().join(name);
        let listen = format!("unix://{}", socket.display());
        let lab =
            Lab::start(&["faults", "--upstream", &address, "--upstream-ca", &ca, "--listen", &listen]).await;
        (lab, SnapshotMetadataClient::new(testkit::channel(&socket).await))
    };
    let request = |token: &str, target: &str| kubernetes::GetMetadataDeltaRequest {
        security_token: token.to_owned(),
        namespace: "team".into(),
        base_snapshot_id: "disk-1".into(),
        target_snapshot_name: target.to_owned(),
        starting_offset: 0,
        max_results: 0,
    };
    let (_lab, mut client) = before("first.sock").await;
    let mut stream =
        client.get_metadata_delta(request("sesame", "disk-2")).await.expect("a stream").into_inner();
    let message = stream.message().await.expect("a message").expect("a message");
    assert_eq!((message.volume_capacity_bytes, message.block_metadata.len()), (1 << 30, 10));
    assert!(stream.message().await.expect("its end").is_none());
    for (token, target, code) in [
        ("", "disk-2", Code::InvalidArgument),
        ("wrong", "disk-2", Code::Unauthenticated),
        ("sesame", "none", Code::NotFound),
    ] {
        let refused = client.get_metadata_delta(request(token, target)).await.expect_err("refused");
        assert_eq!(refused.code(), code, "{token} {target}");
    }
    // Faults are for this service too.
    mock.control("PUT", "/faults", "refuse:snapshot=disk-2,code=DATA_LOSS").await;
    let refused = client.get_metadata_delta(request("sesame", "disk-2")).await.expect_err("refused");
    assert_eq!(refused.code(), Code::DataLoss);

    mock.control("PUT", "/faults", "tls-expired").await;
    let (_lab, mut client) = before("second.sock").await;
    let refused = client
        .get_metadata_delta(request("sesame", "disk-2"))
        .await
        .expect_err("its certificate has expired");
    assert_eq!(refused.code(), Code::Unavailable);
    assert!(refused.message().to_lowercase().contains("expired"), "{refused}");
}

/// Before a server that is not there yet, or is away for a while.
#[tokio::test(flavor = "multi_thread")]
async fn it_may_start_before_its_driver() {
    let dir = tempfile::tempdir().expect("temp dir");
    let (socket, front) = (dir.path().join("csi.sock"), dir.path().join("front.sock"));
    let (upstream, listen) = (format!("unix://{}", socket.display()), format!("unix://{}", front.display()));
    let _faults = Lab::start(&["faults", "--upstream", &upstream, "--listen", &listen]).await;
    let mut client = connect(&front).await;
    let away = client.identity.probe(ProbeRequest {}).await.expect_err("nobody is there");
    assert!(away.code() == Code::Unavailable && away.message().contains("csi.sock"), "{away}");
    let (mut mock, _) =
        Lab::mock(&dir, &["--volume", "disk=1Mi", "--snapshots", "2", "--changes", "3"]).await;
    let whole = read(&mut client, &delta("disk-1", "disk-2"), &Options::default(), Duration::ZERO).await;
    assert!(whole.ends_with("OK"), "{whole}");
    mock.child.kill().await.expect("kill");
    let away = client.identity.probe(ProbeRequest {}).await.expect_err("it is dead");
    assert_eq!(away.code(), Code::Unavailable);
    let _mock = Lab::mock(&dir, &["--volume", "disk=1Mi", "--snapshots", "2", "--changes", "3"]).await;
    let again = read(&mut client, &delta("disk-1", "disk-2"), &Options::default(), Duration::ZERO).await;
    assert_eq!(again, whole);
}
