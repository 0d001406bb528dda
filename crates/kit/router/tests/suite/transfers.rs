//! Promise: a snapshot or a volume of one node becomes a volume on another, to the byte, and nothing half made of it stays,
//! whatever happens in between.

use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use csi_client::{block_capability, from_snapshot, from_volume, new_volume};
use proto::transfer::transfer_client::TransferClient;
use proto::transfer::{BlocksRequest, MapRequest, OpenRequest};
use proto::{CreateVolumeRequest, VolumeContentSource};
use serve::identity::Role;
use serve::mutual::Mutual;
use testkit::PoolKind::{self, Btrfs, Dir, Xfs};
use testkit::content::{Content, blocks_of};
use testkit::played::tls;
use testkit::{BLOCK, names};
use tonic::Code;

use testkit::cluster::{Cluster, PATIENCE, eventually, patiently, within};

pub const SIZE: i64 = 64 << 20;
pub const BLOCKS: u64 = SIZE as u64 / BLOCK;

/// A request for a volume of a source on this node alone.
pub fn on(cluster: &Cluster, node: usize, name: &str, source: VolumeContentSource) -> CreateVolumeRequest {
    let mut request = new_volume(name, SIZE, block_capability());
    request.volume_content_source = Some(source);
    within(&[cluster.nodes[node].topology()], request)
}

/// The bytes of an object, below its node's pool.
pub fn data(cluster: &Cluster, node: usize, kind: &str, id: &str) -> PathBuf {
    cluster.nodes[node].rig.pool_dir().join(kind).join(id).join("bytes/data.img")
}

/// A volume on the first node with `mib` MiB of data that lies scattered, and holes that were data. It stays attached.
pub async fn written(cluster: &mut Cluster, mib: u64) -> (String, PathBuf, Content) {
    let (volume, device) = cluster.nodes[0].rig.block_volume("origin", SIZE).await;
    let mut content = Content::default();
    let mut at = 0;
    for part in 0..mib * 2 {
        content.write(&device, at, 128, part as u8 | 1);
        at += 128 + if part % 3 == 0 { 7 } else { 0 };
    }
    content.discard(&device, 40, 9);
    content.write(&device, BLOCKS - 1, 1, 77);
    (volume, device, content)
}

pub fn assert_same(one: &Path, other: &Path) {
    let read =
        |path: &Path| std::fs::read(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    assert!(read(one) == read(other), "{} and {} differ", one.display(), other.display());
}

/// The value of a field in the last line of a driver's log that says this.
pub fn logged(log: &str, says: &str, field: &str) -> u64 {
    let line =
        log.lines().rfind(|line| line.contains(says)).unwrap_or_else(|| panic!("no {says:?} in {log}"));
    let value = line.split(&format!("{field}=")).nth(1).unwrap_or_else(|| panic!("no {field} in {line}"));
    value.chars().take_while(char::is_ascii_digit).collect::<String>().parse().expect("a number")
}

pub const COPIED: &str = "a volume was copied from another node";

pub fn staging(cluster: &Cluster, node: usize) -> Vec<String> {
    names(&cluster.nodes[node].rig.pool_dir().join("staging"))
}

pub async fn nothing_is_left(cluster: &Cluster) {
    for node in 0..cluster.nodes.len() {
        eventually("nothing is half made", async || staging(cluster, node).is_empty()).await;
    }
}

/// Begins a transfer, and waits until it has received something; the id of the volume that it makes.
pub async fn begun(cluster: &Cluster, request: &CreateVolumeRequest) -> String {
    let error = cluster.client().create_volume(request.clone()).await.expect_err("it takes longer than that");
    assert_eq!(error.code(), Code::Aborted, "{error}");
    let message = error.status.message();
    let id = message.split_whitespace().find(|word| word.starts_with("vol-"));
    id.unwrap_or_else(|| panic!("no id in {message}")).to_owned()
}

/// What the volume's snapshots tell is what was written, and its bytes are.
pub async fn later_deltas_are_exact(cluster: &mut Cluster, node: usize, volume: &str, mut content: Content) {
    let rig = &mut cluster.nodes[node].rig;
    let device = rig.attach(volume).await;
    content.assert_equals(&device, 0, BLOCKS);
    let first = rig.snapshot(&format!("{volume}-1"), volume).await;
    assert_eq!(rig.allocated(&first).await, content.allocated(BLOCK), "holes stay holes");
    let before = content.clone();
    content.write(&device, 3, 2, 99);
    content.write(&device, 1000, 1, 98);
    content.discard(&device, 200, 5);
    let second = rig.snapshot(&format!("{volume}-2"), volume).await;
    assert_eq!(rig.changed(&first, &second).await, content.changed_since(&before, BLOCK));
    for snapshot in [first, second] {
        rig.client.delete_snapshot(&snapshot).await.expect("delete");
    }
    rig.detach(volume).await;
}

#[apply(device_cases)]
async fn a_snapshot_is_restored_on_another_node_and_its_deltas_are_exact(
    #[values([Dir, Dir], [Xfs, Dir], [Dir, Btrfs], [Btrfs, Xfs])] pools: [PoolKind; 2],
) {
    let mut cluster = Cluster::start_mixed(&pools.map(|pool| (pool, &[][..])), &[]).await;
    let mut client = cluster.client();
    let (origin, device, mut content) = written(&mut cluster, 12).await;
    let snapshot = client.create_snapshot("first", &origin).await.expect("CreateSnapshot").snapshot_id;
    let held = content.clone();
    content.write(&device, 0, 64, 200);
    let request = on(&cluster, 1, "restored", from_snapshot(&snapshot));
    let made = patiently!(client.create_volume(request.clone())).expect("CreateVolume");
    assert_eq!((cluster.node_of(&made.volume_id), made.accessible_topology.len()), (1, 1));
    assert_eq!(made.content_source, request.volume_content_source);
    let again = client.create_volume(request).await.expect("found again");
    assert_eq!(again, made);
    let source = data(&cluster, 0, "snapshots", &snapshot);
    assert_same(&source, &data(&cluster, 1, "volumes", &made.volume_id));
    later_deltas_are_exact(&mut cluster, 1, &made.volume_id, held).await;
    nothing_is_left(&cluster).await;
    cluster.nodes[0].rig.detach(&origin).await;
    cluster.finish();
}

/// From a cluster: 64 restores that failed on a full node left their source open, and from then on its node refused every
/// restore to other nodes.
#[apply(device_test)]
async fn a_transfer_that_fails_before_it_begins_leaves_no_source_open() {
    let mut cluster = Cluster::start(Dir, 2, &[]).await;
    let mut client = cluster.client();
    let (origin, _, _) = written(&mut cluster, 1).await;
    let snapshot = client.create_snapshot("first", &origin).await.expect("CreateSnapshot").snapshot_id;
    let too_small = Some(proto::CapacityRange { required_bytes: 0, limit_bytes: SIZE / 2 });
    for number in 0..65 {
        let request = on(&cluster, 1, &format!("too-small-{number}"), from_snapshot(&snapshot));
        let request = CreateVolumeRequest { capacity_range: too_small, ..request };
        let error = client.create_volume(request).await.expect_err("smaller than its source");
        assert_eq!(error.code(), Code::OutOfRange, "call {number}: {error}");
    }
    let request = on(&cluster, 1, "restored", from_snapshot(&snapshot));
    patiently!(client.create_volume(request.clone())).expect("CreateVolume");
    nothing_is_left(&cluster).await;
    cluster.nodes[0].rig.detach(&origin).await;
    cluster.finish();
}

#[apply(device_cases)]
async fn a_volume_in_use_is_cloned_on_another_node(#[values(Dir, Btrfs)] pool: PoolKind) {
    let mut cluster = Cluster::start(pool, 2, &[]).await;
    let mut client = cluster.client();
    let (origin, device, content) = written(&mut cluster, 6).await;
    let mut request = on(&cluster, 1, "clone", from_volume(&origin));
    // Larger, and with maps of another unit.
    request.capacity_range.as_mut().expect("a range").required_bytes = SIZE + (1 << 20);
    request.parameters.insert("blockSize".to_owned(), "64Ki".to_owned());
    let made = patiently!(client.create_volume(request.clone())).expect("CreateVolume");
    assert_eq!(made.capacity_bytes, SIZE + (1 << 20));
    let rig = &mut cluster.nodes[1].rig;
    let copy = rig.attach(&made.volume_id).await;
    content.assert_equals(&copy, 0, BLOCKS + 256);
    let snapshot = rig.snapshot("of-clone", &made.volume_id).await;
    let allocated = rig.client.allocated(&snapshot, 0, 0).await.expect("allocated");
    assert_eq!(blocks_of(&allocated, 65536), content.allocated(65536));
    rig.detach(&made.volume_id).await;
    // What was written since is not in it, and what the source copied for it is gone.
    Content::default().write(&device, 0, 1, 250);
    content.assert_equals(&data(&cluster, 1, "volumes", &made.volume_id), 0, BLOCKS);
    nothing_is_left(&cluster).await;
    cluster.nodes[0].rig.detach(&origin).await;
    cluster.finish();
}

/// The second restore of one origin to a node moves what differs.
#[apply(device_cases)]
async fn only_what_differs_from_an_earlier_copy_is_transferred(#[values(Xfs, Btrfs)] pool: PoolKind) {
    let mut cluster = Cluster::start(pool, 2, &[]).await;
    let mut client = cluster.client();
    let (origin, device, mut content) = written(&mut cluster, 12).await;
    let first = client.create_snapshot("first", &origin).await.expect("CreateSnapshot").snapshot_id;
    let request = on(&cluster, 1, "one", from_snapshot(&first));
    let one = patiently!(client.create_volume(request.clone())).expect("CreateVolume").volume_id;
    let all = logged(&cluster.nodes[1].rig.log(), COPIED, "received");
    assert_eq!(all, content.blocks.len() as u64 * BLOCK);
    content.write(&device, 500, 10, 201);
    content.discard(&device, 900, 30);
    let second = client.create_snapshot("second", &origin).await.expect("CreateSnapshot").snapshot_id;
    let request = on(&cluster, 1, "two", from_snapshot(&second));
    let two = patiently!(client.create_volume(request.clone())).expect("CreateVolume").volume_id;
    assert_eq!(logged(&cluster.nodes[1].rig.log(), COPIED, "received"), 10 * BLOCK);
    assert_same(&data(&cluster, 0, "snapshots", &second), &data(&cluster, 1, "volumes", &two));
    assert_same(&data(&cluster, 0, "snapshots", &first), &data(&cluster, 1, "volumes", &one));
    // The copy that it starts with is in use, and is another volume by now.
    let used = cluster.nodes[1].rig.attach(&two).await;
    Content::default().write(&used, 0, 50, 202);
    let request = on(&cluster, 1, "three", from_snapshot(&second));
    let three = patiently!(client.create_volume(request.clone())).expect("CreateVolume").volume_id;
    let received = logged(&cluster.nodes[1].rig.log(), COPIED, "received");
    assert!(received <= 50 * BLOCK, "{received}");
    later_deltas_are_exact(&mut cluster, 1, &three, content).await;
    cluster.nodes[1].rig.detach(&two).await;
    cluster.nodes[0].rig.detach(&origin).await;
    cluster.finish();
}

/// Copies that fill the pool of their node keep no deletion there from working, of those that are whole and of the one that is not.
#[apply(device_cases)]
async fn a_pool_that_copies_fill_is_emptied(#[values(Btrfs, Xfs)] pool: PoolKind) {
    let mut cluster = Cluster::empty();
    cluster.add_node(pool, &[]).await;
    cluster.add_node(pool, &["--pool-size", "400Mi"]).await;
    cluster.route(&cluster.endpoints(), &[], 2).await;
    let mut client = cluster.client();
    let mut copies = Vec::new();
    // The last one is refused at once, or while it is copied.
    let (last, snapshot) = loop {
        let number = copies.len();
        let (origin, device) = cluster.nodes[0].rig.block_volume(&format!("origin {number}"), SIZE).await;
        Content::default().write(&device, 0, BLOCKS - 1, number as u8 + 1);
        let name = format!("snapshot {number}");
        let snapshot = client.create_snapshot(&name, &origin).await.expect("CreateSnapshot").snapshot_id;
        cluster.nodes[0].rig.detach(&origin).await;
        let request = on(&cluster, 1, &format!("copy {number}"), from_snapshot(&snapshot));
        match patiently!(client.create_volume(request.clone())) {
            Ok(copy) => copies.push(copy.volume_id),
            Err(full) if full.code() == Code::ResourceExhausted => break (request, snapshot),
            Err(error) => panic!("copy {number}: {error}"),
        }
        assert!(number < 7, "a pool of 400 MiB holds {number} copies of 64 MiB");
    };
    assert!(copies.len() > 2, "only {} copies", copies.len());
    for copy in copies.iter().rev() {
        client.delete_volume(copy).await.expect("DeleteVolume");
    }
    // btrfs gives the space of a removed subvolume back after a while.
    let pool_dir = cluster.nodes[1].rig.pool_dir();
    eventually("there is room", async || {
        files::durable::sync_filesystem(&pool_dir).expect("sync");
        patiently!(client.clone().create_volume(last.clone())).is_ok()
    })
    .await;
    let made = client.create_volume(last).await.expect("it is there").volume_id;
    assert_same(&data(&cluster, 0, "snapshots", &snapshot), &data(&cluster, 1, "volumes", &made));
    client.delete_volume(&made).await.expect("DeleteVolume");
    nothing_is_left(&cluster).await;
    cluster.finish();
}

/// Both ends are killed in the middle and come back: what is there is not fetched again.
#[apply(device_test)]
async fn a_cut_transfer_goes_on_where_it_was() {
    let mut cluster = Cluster::start(PoolKind::Dir, 2, &["--transfer-rate", "1Mi"]).await;
    let mut client = cluster.client();
    let (origin, _, content) = written(&mut cluster, 20).await;
    let snapshot = client.create_snapshot("first", &origin).await.expect("CreateSnapshot").snapshot_id;
    cluster.nodes[0].rig.detach(&origin).await;
    let request = on(&cluster, 1, "restored", from_snapshot(&snapshot));
    let id = begun(&cluster, &request).await;
    cluster.nodes[0].rig.kill();
    cluster.nodes[0].rig.start_again().await;
    let staged = cluster.nodes[1].rig.pool_dir().join("staging").join(&id).join("bytes/data.img");
    let received = || std::fs::metadata(&staged).expect("stat").blocks() * 512;
    let before = received();
    assert_eq!(patiently_begun(&cluster, &request).await, id);
    eventually("it goes on", async || received() > before).await;
    cluster.nodes[1].rig.kill();
    let kept = received();
    cluster.nodes[1].start_again_with(&["--transfer-rate=1Gi"]).await;
    let made = patiently!(client.create_volume(request.clone())).expect("CreateVolume");
    assert_eq!(made.volume_id, id, "the same volume is made");
    // The last driver of the target counts what it fetched itself.
    let total = content.blocks.len() as u64 * BLOCK;
    let received = logged(&cluster.nodes[1].rig.log(), COPIED, "received");
    assert!(received + kept / 2 <= total, "{received} of {total} bytes were fetched, and {kept} were there");
    assert!(received > 0);
    assert_same(&data(&cluster, 0, "snapshots", &snapshot), &data(&cluster, 1, "volumes", &id));
    later_deltas_are_exact(&mut cluster, 1, &id, content).await;
    nothing_is_left(&cluster).await;
    cluster.finish();
}

/// The same while the node may be away.
pub async fn patiently_begun(cluster: &Cluster, request: &CreateVolumeRequest) -> String {
    let deadline = Instant::now() + PATIENCE;
    loop {
        let error =
            cluster.client().create_volume(request.clone()).await.expect_err("it takes longer than that");
        let message = error.status.message();
        if let Some(id) = message.split_whitespace().find(|word| word.starts_with("vol-")) {
            return id.to_owned();
        }
        assert!(Instant::now() < deadline, "{error}");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

#[apply(device_test)]
async fn a_transfer_ends_with_its_volume_and_with_its_source() {
    let mut cluster = Cluster::start(PoolKind::Dir, 2, &["--transfer-rate", "512Ki"]).await;
    let mut client = cluster.client();
    let (origin, device, _) = written(&mut cluster, 12).await;
    let snapshot = client.create_snapshot("first", &origin).await.expect("CreateSnapshot").snapshot_id;
    for source in [from_snapshot(&snapshot), from_volume(&origin)] {
        let request = on(&cluster, 1, "deleted", source);
        let id = begun(&cluster, &request).await;
        assert_eq!(staging(&cluster, 1), std::slice::from_ref(&id));
        let other = new_volume("deleted", SIZE, block_capability());
        let error = client.create_volume(other).await.expect_err("without a source");
        assert_eq!(error.code(), Code::AlreadyExists, "{error}");
        client.delete_volume(&id).await.expect("DeleteVolume");
        assert!(staging(&cluster, 1).is_empty(), "{:?}", staging(&cluster, 1));
        client.delete_volume(&id).await.expect("once more");
        nothing_is_left(&cluster).await;
    }
    // A snapshot that is deleted meanwhile: what is open can be read, and after a restart of its node it is gone.
    let request = on(&cluster, 1, "lost", from_snapshot(&snapshot));
    begun(&cluster, &request).await;
    client.delete_snapshot(&snapshot).await.expect("DeleteSnapshot");
    begun(&cluster, &request).await;
    cluster.nodes[0].rig.detach(&origin).await;
    cluster.nodes[0].rig.kill();
    cluster.nodes[0].rig.start_again().await;
    let error = patiently!(client.create_volume(request.clone())).expect_err("its source is gone");
    assert_eq!(error.code(), Code::NotFound, "{error}");
    nothing_is_left(&cluster).await;
    let error = patiently!(client.create_volume(request.clone())).expect_err("once more");
    assert_eq!(error.code(), Code::NotFound, "{error}");
    // The node of the source is given up.
    let request = on(&cluster, 1, "forgotten", from_volume(&origin));
    patiently_begun(&cluster, &request).await;
    let file = cluster.dir.path().join("forgotten");
    std::fs::write(&file, format!("{}\n", cluster.nodes[0].key)).expect("write");
    let flag = format!("--forgotten={}", file.display());
    cluster.route(&cluster.endpoints(), &[&flag], 1).await;
    let error = patiently!(cluster.client().create_volume(request.clone())).expect_err("forgotten");
    assert_eq!(error.code(), Code::NotFound, "{error}");
    assert!(staging(&cluster, 1).is_empty(), "{:?}", staging(&cluster, 1));
    drop(device);
    cluster.finish();
}

#[apply(device_test)]
async fn transfers_together_take_no_more_than_their_rate() {
    let mut cluster = Cluster::start(PoolKind::Dir, 2, &["--transfer-rate", "4Mi"]).await;
    let (origin, _, content) = written(&mut cluster, 6).await;
    let mut client = cluster.client();
    let snapshot = client.create_snapshot("first", &origin).await.expect("CreateSnapshot").snapshot_id;
    let started = Instant::now();
    let requests = ["one", "two"].map(|name| on(&cluster, 1, name, from_snapshot(&snapshot)));
    let [mut one, mut two] = [client.clone(), client];
    let [first, second] = requests;
    let (first, second) = tokio::join!(async { patiently!(one.create_volume(first.clone())) }, async {
        patiently!(two.create_volume(second.clone()))
    });
    for made in [first, second] {
        let made = made.expect("CreateVolume").volume_id;
        assert_same(&data(&cluster, 0, "snapshots", &snapshot), &data(&cluster, 1, "volumes", &made));
    }
    // A bound from below, to which whatever is slow adds. The last portions are handed out before their time is over.
    let bytes = 2 * content.blocks.len() as u64 * BLOCK;
    let least = Duration::from_secs_f64(bytes as f64 / f64::from(4 << 20));
    assert!(started.elapsed() > least * 3 / 4, "{:?} of {least:?}", started.elapsed());
    cluster.nodes[0].rig.detach(&origin).await;
    cluster.finish();
}

#[apply(device_test)]
async fn a_node_reads_what_a_ticket_names_and_nothing_else() {
    let mut cluster = Cluster::start(PoolKind::Dir, 3, &[]).await;
    let mut client = cluster.client();
    let (origin, _, _) = written(&mut cluster, 1).await;
    let [one, other] = ["one", "other"].map(|name| (client.clone(), name, origin.clone()));
    let take = async |(mut client, name, volume): (csi_client::Client, &str, String)| {
        client.create_snapshot(name, &volume).await.expect("CreateSnapshot").snapshot_id
    };
    let (snapshot, secret) = (take(one).await, take(other).await);
    let dir = cluster.dir.path();
    let router = tls(dir, "router", Role::Router);
    let address = format!("127.0.0.1:{}", cluster.nodes[0].port);
    let key_of = |node: usize| cluster.nodes[node].key.clone();
    let channel = |tls: &Arc<Mutual>| tls.channel(&address, &key_of(0), PATIENCE, 1 << 20);
    let of_node = |node: usize| {
        TransferClient::new(channel(&tls(dir, &cluster.nodes[node].name(), Role::Node(key_of(node)))))
    };
    let ticket = |source: &str, reader: usize| {
        router.signer().expect("loaded").issue(source, &key_of(reader)).expect("a ticket")
    };
    let open = |ticket: Vec<u8>, source: &str| OpenRequest {
        ticket,
        source_id: source.to_owned(),
        volume_id: format!("vol-{}{}", key_of(1), "0".repeat(24)),
    };
    let (mut second, mut third) = (of_node(1), of_node(2));
    // No ticket, one of nonsense, another's, and one for something else.
    for request in [
        open(Vec::new(), &snapshot),
        open(vec![7; 100], &snapshot),
        open(ticket(&snapshot, 2), &snapshot),
        open(ticket(&secret, 1), &snapshot),
        open(ticket(&snapshot, 1), &secret),
    ] {
        let status = second.open(request).await.expect_err("not allowed");
        assert_eq!(status.code(), Code::PermissionDenied, "{status}");
    }
    let opened = second.open(open(ticket(&snapshot, 1), &snapshot)).await.expect("allowed").into_inner();
    let map = MapRequest { point: opened.point.clone(), segment: 0 };
    let blocks = second.map(map.clone()).await.expect("the map").into_inner().blocks;
    // What one node has opened is nobody else's.
    assert_eq!(third.map(map).await.expect_err("another's").code(), Code::Aborted);
    let read = BlocksRequest { point: opened.point.clone(), segment: 0, blocks, without_holes: false };
    let status = third.read(read.clone()).await.expect_err("another's");
    assert_eq!(status.code(), Code::Aborted, "{status}");
    let mut answer = second.read(read.clone()).await.expect("read").into_inner();
    assert!(!answer.message().await.expect("a message").expect("data").data.is_empty());
    let beyond = BlocksRequest { segment: 9, ..read };
    let status = second.hashes(beyond).await.expect_err("past the end");
    assert_eq!(status.code(), Code::OutOfRange, "{status}");
    // The router orders transfers, and reads nothing. A node asks nothing else.
    let status = TransferClient::new(channel(&router)).open(open(ticket(&snapshot, 1), &snapshot)).await;
    assert_eq!(status.expect_err("the router").code(), Code::Unimplemented);
    let node = channel(&tls(dir, &cluster.nodes[1].name(), Role::Node(key_of(1))));
    let mut controller = proto::controller_client::ControllerClient::new(node.clone());
    let asked = controller.list_volumes(proto::ListVolumesRequest::default()).await;
    assert_eq!(asked.expect_err("CSI").code(), Code::PermissionDenied);
    let mut node = proto::node::node_client::NodeClient::new(node);
    let asked = node.create_from(proto::node::CreateFromRequest::default()).await;
    assert_eq!(asked.expect_err("a node's own business").code(), Code::PermissionDenied);
    let asked = node.describe(proto::node::DescribeRequest {}).await;
    assert_eq!(asked.expect_err("the same").code(), Code::PermissionDenied);
    cluster.nodes[0].rig.detach(&origin).await;
    client.delete_snapshot(&secret).await.expect("delete");
    cluster.finish();
}
