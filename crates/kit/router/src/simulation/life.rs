//! One life: sidecars make, repeat, restore, list and delete what claims ask for, while hosts and links fail; then all is well
//! again, and what is on the disks must be what was promised.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use parking_lot::Mutex;
use proto::volume_content_source::{SnapshotSource, Type};
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, timeout};
use tonic::{Code, Status};

use super::disk::Disk;
use super::faults::break_things;
use super::network::Network;
use super::node::{Node, POOL};
use super::orchestrator::{RouterProcess, Volumes};
use super::world::{Outcome, Promised, Story, World};
use super::{MOST_NODES, certificates, key_of};

/// How long hosts and links fail in a life, at most.
const BAD_TIMES: u64 = 120;
/// By then everybody has what was asked for, once all is well.
const SETTLED: Duration = Duration::from_secs(1800);
/// How long a router needs to find what exists twice, and delete it.
const FOUND: Duration = Duration::from_secs(45);
const MINUTE: Duration = Duration::from_secs(60);

/// What a sidecar wants of a volume.
#[derive(Clone)]
struct Wish {
    name: String,
    gib: u64,
    source: Option<(String, u64)>,
    /// Nodes that are allowed; none: all.
    places: Vec<usize>,
}

/// What it was made of, or where it would be, is not there.
struct Gone;

pub async fn live(seed: u64) -> Outcome {
    let mut random = fastrand::Rng::with_seed(seed);
    let (routers, nodes) = (random.usize(1..=3), random.usize(2..=MOST_NODES));
    let network = Network::new(random.u64(..), routers + nodes);
    let node = |number: usize| {
        let (key, tls) = (key_of(number).parse().expect("a key"), certificates().nodes[number].clone());
        Node::new(routers + number, key, tls, &network, random.u64(..))
    };
    let nodes: Vec<Arc<Node>> = (0..nodes).map(node).collect();
    let addresses: Vec<String> = (0..nodes.len()).map(|number| format!("10.0.0.{number}:9811")).collect();
    for (node, address) in nodes.iter().zip(&addresses) {
        network.lead(address, node.host);
    }
    let volumes = Volumes::default();
    let start = |host| Arc::new(RouterProcess::start(host, &network, &addresses, &volumes));
    let world = Arc::new(World {
        routers: Mutex::new((0..routers).map(start).collect()),
        network: network.clone(),
        story: Mutex::new(Story { troubled: vec![(0, None); nodes.len()], ..Default::default() }),
        begun: Instant::now(),
        addresses,
        volumes,
        nodes,
        has_failed: Arc::default(),
    });
    world.nodes.iter().for_each(|node| node.start(&world));
    let mut tasks = JoinSet::new();
    let claims = random.usize(3..=8);
    for number in 0..claims {
        tasks.spawn(claim(world.clone(), number, random.fork()));
    }
    let bad_times = Duration::from_secs(random.u64(20..BAD_TIMES));
    let mut faults = JoinSet::new();
    faults.spawn(break_things(world.clone(), bad_times, random.fork()));
    let lists = list(&world, random.fork());
    let all_else = async {
        while let Some(ended) = faults.join_next().await {
            ended.expect("faults");
        }
        world.tell("all is well");
        world.story.lock().is_well = true;
        let settled = timeout(SETTLED, async {
            while let Some(ended) = tasks.join_next().await {
                ended.expect("a claim");
            }
        });
        settled.await.expect("claims are served when all is well");
        sleep(FOUND).await;
    };
    tokio::select! {
        biased;
        () = all_else => {}
        () = lists => unreachable!("it has no end"),
    }
    list_at_the_end(&world).await;
    world.judge();
    assert!(!world.has_failed.load(Ordering::Relaxed), "the model of a node has panicked");
    world.routers.lock().iter().for_each(|router| router.end());
    let story = std::mem::take(&mut *world.story.lock());
    Outcome { trace: story.trace.finalize(), counts: story.counts }
}

/// A claim's volume, its snapshots, and what is restored from them.
async fn claim(world: Arc<World>, number: usize, mut random: fastrand::Rng) {
    let _ = serve(&world, number, &mut random).await;
}

async fn serve(world: &World, number: usize, random: &mut fastrand::Rng) -> Result<(), Gone> {
    world.wait_a_bit(random, 40).await;
    let places = |random: &mut fastrand::Rng| match random.u8(..3) {
        0 => Vec::new(),
        // One or two.
        number => random.choose_multiple(0..world.nodes.len(), number.into()),
    };
    let wish =
        Wish { name: format!("pvc-{number}"), gib: random.u64(1..=12), source: None, places: places(random) };
    let id = make(world, random, &wish).await?;
    world.count("volumes");
    world.wait_a_bit(random, 20).await;
    let mut snapshots = Vec::new();
    for snapshot in 0..random.usize(..3) {
        let snapshot = take(world, random, &format!("snap-{number}-{snapshot}"), &id).await?;
        world.count("snapshots");
        snapshots.push(snapshot);
        world.wait_a_bit(random, 10).await;
    }
    let mut restored = Vec::new();
    for (index, (snapshot, content)) in snapshots.iter().enumerate() {
        if random.bool() {
            continue;
        }
        let source = Some((snapshot.clone(), *content));
        let name = format!("pvc-{number}-from-{index}");
        let wish = Wish { name, source, places: places(random), ..wish.clone() };
        restored.push((wish.name.clone(), make(world, random, &wish).await?));
        world.count("restores");
        world.wait_a_bit(random, 10).await;
    }
    if random.bool() {
        for (snapshot, _) in &snapshots {
            delete_snapshot(world, random, snapshot).await;
        }
        for (name, id) in restored.iter().chain([&(wish.name.clone(), id)]) {
            delete_volume(world, random, name, id).await;
        }
    }
    Ok(())
}

/// Whether a code is not the last word: csi-provisioner asks again.
fn is_not_final(status: &Status) -> bool {
    use Code::{Aborted, Cancelled, DeadlineExceeded, ResourceExhausted, Unavailable};
    matches!(status.code(), Cancelled | DeadlineExceeded | Unavailable | Aborted | ResourceExhausted)
}

fn request_of(world: &World, wish: &Wish) -> proto::CreateVolumeRequest {
    let requisite = wish.places.iter().map(|place| world.nodes[*place].topology()).collect();
    proto::CreateVolumeRequest {
        name: wish.name.clone(),
        capacity_range: Some(proto::CapacityRange {
            required_bytes: (wish.gib << 30) as i64,
            limit_bytes: 0,
        }),
        volume_content_source: wish.source.clone().map(|(snapshot_id, _)| proto::VolumeContentSource {
            r#type: Some(Type::Snapshot(SnapshotSource { snapshot_id })),
        }),
        accessibility_requirements: Some(proto::TopologyRequirement { requisite, preferred: Vec::new() }),
        ..Default::default()
    }
}

/// Whether there is no room for it where it may be.
fn is_full(world: &World, wish: &Wish) -> bool {
    let source = wish.source.as_ref().map(|(id, _)| world.node_of(id));
    let places: Vec<usize> = match source {
        Some(node) if wish.places.is_empty() || wish.places.contains(&node) => vec![node],
        _ if wish.places.is_empty() => (0..world.nodes.len()).collect(),
        _ => wish.places.clone(),
    };
    places.iter().all(|place| world.nodes[*place].disk().provisioned() + (wish.gib << 30) > POOL)
}

/// CreateVolume, until it ends well: the volume's id.
async fn make(world: &World, random: &mut fastrand::Rng, wish: &Wish) -> Result<String, Gone> {
    let mut wish = wish.clone();
    world.story.lock().asked.entry(wish.name.clone()).or_insert_with(Instant::now);
    let (mut pause, mut before) = (1, None);
    loop {
        let begun = Instant::now();
        let call = async |mut random, wish: &Wish| {
            let request = request_of(world, wish);
            let call =
                world.call::<proto::CreateVolumeResponse>(&mut random, "CreateVolume", &wish.name, &request);
            let id = call.await?.volume.expect("a volume").volume_id;
            world.tell(&format!("{} is {id}", wish.name));
            world.story.lock().answered.entry(wish.name.clone()).or_insert_with(Instant::now);
            check(world, wish, &id);
            Ok::<_, Status>(id)
        };
        let mut answer = call(random.fork(), &wish).await;
        // For a while two sidecars may take themselves for the elected one. The pod may be scheduled anew in between.
        if random.u8(..4) == 0 {
            let mut anew = wish.clone();
            if random.bool() {
                anew.places = random.choose_multiple(0..world.nodes.len(), 2);
            }
            let (one, other) = tokio::join!(call(random.fork(), &wish), call(random.fork(), &anew));
            let ids: Vec<&String> = [&answer, &one, &other].into_iter().flatten().collect();
            let is_same = ids.windows(2).all(|ids| ids[0] == ids[1]);
            // docs/router.md: routers that do not ask the same arbiter may make one each.
            let was_calm = world.was_calm(world.arbiter_of(&wish.name), begun)
                && ids.iter().all(|id| world.was_calm(world.node_of(id), begun) && !world.is_gone(id));
            assert!(is_same || !was_calm, "{} is {ids:?}", wish.name);
            if !is_same {
                world.count("twice at once");
            }
            answer = answer.or(one);
        }
        match answer {
            Ok(id) => {
                // The sidecar is ended before it has noted the volume, and asks again.
                if let Some(before) = before.replace(id.clone()).filter(|before| *before != id) {
                    world.count("made again while away");
                    let was_calm = world.was_calm(world.node_of(&before), begun) && !world.is_gone(&before);
                    assert!(!was_calm, "{} was {before}, and now it is {id}", wish.name);
                } else if random.u8(..4) == 0 {
                    continue;
                }
                promise(world, &wish, &id);
                return Ok(id);
            }
            // What was full for a moment is asked again.
            Err(status)
                if status.code() == Code::ResourceExhausted && world.is_well() && is_full(world, &wish) =>
            {
                world.count("no room");
                return Err(Gone);
            }
            Err(status) if is_not_final(&status) => {
                // The pod is scheduled anew.
                if random.u8(..8) == 0 {
                    wish.places = random.choose_multiple(0..world.nodes.len(), 2);
                }
            }
            // It was made where an earlier try allowed it.
            Err(status) if status.code() == Code::AlreadyExists && !wish.places.is_empty() => {
                assert!(status.message().contains("requisite topologies leave out"), "{status}");
                wish.places.clear();
            }
            Err(status) if status.code() == Code::FailedPrecondition => {
                assert!(status.message().contains("exists twice"), "{status}");
                world.count("twice, for an operator");
                delete_doubles(world, random, &wish.name).await;
                before = None;
            }
            Err(status) if status.code() == Code::NotFound => {
                let (source, _) = wish.source.as_ref().expect("a source");
                assert!(world.is_gone(source), "{}: {status}", wish.name);
                return Err(Gone);
            }
            Err(status) => panic!("{}: {status}", wish.name),
        }
        world.wait_a_bit(random, pause).await;
        pause = (pause * 2).min(30);
    }
}

/// What the answer says is so: the volume is there, holds what it should, and is where it may be.
fn check(world: &World, wish: &Wish, id: &str) {
    let node = world.node_of(id);
    let disk = world.nodes[node].disk();
    let Some(volume) = disk.volumes.get(id) else {
        panic!("{} is said to be {id}, which is not there", wish.name);
    };
    assert_eq!(volume.name, wish.name);
    if let Some((_, content)) = wish.source {
        assert_eq!(volume.content, content, "{} holds something else than its source", wish.name);
    }
    assert!(wish.places.is_empty() || wish.places.contains(&node), "{} is on node {node}", wish.name);
}

/// A PersistentVolume has it from now on.
fn promise(world: &World, wish: &Wish, id: &str) {
    let Some(volume) = world.nodes[world.node_of(id)].disk().volumes.remove(id) else {
        assert!(world.is_gone(id), "{} was answered as {id}, and is not there", wish.name);
        return;
    };
    let promised = Promised { name: volume.name, content: volume.content, is_being_deleted: false };
    world.story.lock().promised_volumes.insert(id.to_owned(), promised);
    world.volumes.lock().insert(wish.name.clone(), id.to_owned());
}

/// An operator deletes the volumes of a name that no claim has.
async fn delete_doubles(world: &World, random: &mut fastrand::Rng, name: &str) {
    let used = world.volumes.lock().get(name).cloned();
    let ids: Vec<String> = world.nodes.iter().flat_map(|node| node.disk().ids_named(name)).collect();
    let kept = used.or_else(|| ids.first().cloned());
    for id in ids.iter().filter(|id| Some(*id) != kept.as_ref()) {
        world.story.lock().dropped.insert(id.clone());
        let request = proto::DeleteVolumeRequest { volume_id: id.clone(), ..Default::default() };
        let _ = world.call::<proto::DeleteVolumeResponse>(random, "DeleteVolume", id, &request).await;
    }
}

/// CreateSnapshot, until it ends well: its id, and what it holds.
async fn take(
    world: &World,
    random: &mut fastrand::Rng,
    name: &str,
    volume_id: &str,
) -> Result<(String, u64), Gone> {
    let request = proto::CreateSnapshotRequest {
        name: name.to_owned(),
        source_volume_id: volume_id.to_owned(),
        ..Default::default()
    };
    let mut pause = 1;
    loop {
        let answer =
            world.call::<proto::CreateSnapshotResponse>(random, "CreateSnapshot", name, &request).await;
        match answer {
            Ok(taken) => {
                let id = taken.snapshot.expect("a snapshot").snapshot_id;
                let mut story = world.story.lock();
                let Some(volume) = story.promised_volumes.get(volume_id) else { return Err(Gone) };
                let content = volume.content;
                let disk = world.nodes[world.node_of(&id)].disk();
                let snapshot = disk.snapshots.get(&id);
                assert!(
                    snapshot.is_some_and(|snapshot| snapshot.name == name && snapshot.content == content),
                    "{name} is said to be {id}, which is {snapshot:?}"
                );
                let promised = Promised { name: name.to_owned(), content, is_being_deleted: false };
                story.promised_snapshots.insert(id.clone(), promised);
                return Ok((id, content));
            }
            Err(status) if is_not_final(&status) => {}
            Err(status) if status.code() == Code::NotFound => {
                assert!(world.is_gone(volume_id), "{name} of {volume_id}: {status}");
                return Err(Gone);
            }
            Err(status) => panic!("{name}: {status}"),
        }
        world.wait_a_bit(random, pause).await;
        pause = (pause * 2).min(30);
    }
}

/// Calls until it ends well. Answers to deletions are empty messages.
async fn delete(
    world: &World,
    random: &mut fastrand::Rng,
    call: &str,
    id: &str,
    request: &impl prost::Message,
) {
    while let Err(status) = world.call::<()>(random, call, id, request).await {
        assert!(is_not_final(&status), "{id}: {status}");
        world.wait_a_bit(random, 5).await;
    }
}

async fn delete_snapshot(world: &World, random: &mut fastrand::Rng, id: &str) {
    if let Some(snapshot) = world.story.lock().promised_snapshots.get_mut(id) {
        snapshot.is_being_deleted = true;
    }
    let request = proto::DeleteSnapshotRequest { snapshot_id: id.to_owned(), ..Default::default() };
    delete(world, random, "DeleteSnapshot", id, &request).await;
    let disk = world.nodes[world.node_of(id)].disk();
    assert!(!disk.snapshots.contains_key(id), "{id} is said to be deleted, and is there");
    let mut story = world.story.lock();
    story.promised_snapshots.remove(id);
    story.deleted.insert(id.to_owned());
}

async fn delete_volume(world: &World, random: &mut fastrand::Rng, name: &str, id: &str) {
    if let Some(volume) = world.story.lock().promised_volumes.get_mut(id) {
        volume.is_being_deleted = true;
    }
    let request = proto::DeleteVolumeRequest { volume_id: id.to_owned(), ..Default::default() };
    delete(world, random, "DeleteVolume", id, &request).await;
    let disk = world.nodes[world.node_of(id)].disk();
    assert!(!disk.volumes.contains_key(id), "{id} is said to be deleted, and is there");
    let mut story = world.story.lock();
    story.promised_volumes.remove(id);
    story.deleted.insert(id.to_owned());
    world.volumes.lock().remove(name);
}

/// Lists snapshots and volumes again and again. A list of snapshots is complete or refused; one of volumes lacks none of a node
/// that was there all the time.
async fn list(world: &World, mut random: fastrand::Rng) {
    loop {
        world.wait_a_bit(&mut random, 12).await;
        let begun = Instant::now();
        let most = [0, 1, 2, 5][random.usize(..4)];
        let before = world.story.lock().promised_snapshots.clone();
        let listed = list_all(async |token| {
            let request = proto::ListSnapshotsRequest {
                max_entries: most,
                starting_token: token,
                ..Default::default()
            };
            let page: proto::ListSnapshotsResponse =
                world.call(&mut random, "ListSnapshots", "", &request).await?;
            let ids = page.entries.into_iter().map(|entry| entry.snapshot.expect("a snapshot").snapshot_id);
            Ok((ids.collect(), page.next_token))
        });
        if let Some(listed) = unless_refused(listed.await) {
            world.count("lists of snapshots");
            for id in before.keys() {
                let kept = world.story.lock().promised_snapshots.get(id).cloned();
                let is_missing = kept.is_some_and(|kept| !kept.is_being_deleted) && !listed.contains(id);
                assert!(!is_missing, "{id} is not in a list of all snapshots: {listed:?}");
            }
        }
        let before = world.story.lock().promised_volumes.clone();
        let listed = list_all(async |token| {
            let request = proto::ListVolumesRequest { max_entries: most, starting_token: token };
            let page: proto::ListVolumesResponse =
                world.call(&mut random, "ListVolumes", "", &request).await?;
            let ids = page.entries.into_iter().map(|entry| entry.volume.expect("a volume").volume_id);
            Ok((ids.collect(), page.next_token))
        });
        if let Some(listed) = unless_refused(listed.await) {
            world.count("lists of volumes");
            for id in before.keys() {
                let kept = world.story.lock().promised_volumes.get(id).cloned();
                let is_missing = kept.is_some_and(|kept| !kept.is_being_deleted) && !listed.contains(id);
                let was_there = world.was_calm(world.node_of(id), begun);
                assert!(!is_missing || !was_there, "{id} is not in a list of volumes: {listed:?}");
            }
        }
    }
}

fn unless_refused<T>(listed: Result<T, Status>) -> Option<T> {
    if let Err(status) = &listed {
        assert!(is_not_final(status), "{status}");
    }
    listed.ok()
}

/// When all is well again, each router lists what is on the disks.
async fn list_at_the_end(world: &World) {
    let routers = world.routers.lock().clone();
    for router in routers {
        let (volumes, snapshots) =
            (proto::ListVolumesRequest::default(), proto::ListSnapshotsRequest::default());
        let volumes = router.call("/csi.v1.Controller/ListVolumes", &volumes, MINUTE).await;
        let volumes: proto::ListVolumesResponse = volumes.expect("a list");
        let snapshots = router.call("/csi.v1.Controller/ListSnapshots", &snapshots, MINUTE).await;
        let snapshots: proto::ListSnapshotsResponse = snapshots.expect("a list");
        let disks: Vec<_> = world.nodes.iter().map(|node| node.disk()).collect();
        let of_disks = |count: fn(&Disk) -> usize| disks.iter().map(count).sum::<usize>();
        assert_eq!(volumes.entries.len(), of_disks(|disk| disk.volumes.len()));
        assert_eq!(snapshots.entries.len(), of_disks(|disk| disk.snapshots.len()));
    }
}

/// All pages. No id comes twice.
async fn list_all(
    mut page: impl AsyncFnMut(String) -> Result<(Vec<String>, String), Status>,
) -> Result<BTreeSet<String>, Status> {
    let (mut listed, mut token) = (BTreeSet::new(), String::new());
    loop {
        let (ids, next) = page(token).await?;
        for id in ids {
            assert!(listed.insert(id.clone()), "{id} comes twice in a list");
        }
        if next.is_empty() {
            return Ok(listed);
        }
        token = next;
    }
}
