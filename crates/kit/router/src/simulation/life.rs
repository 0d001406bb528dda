//! One life: sidecars make, repeat, restore, list and delete what claims ask for, while hosts and links fail; then all is well
//! again, and what is on the disks must be what was promised.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use base::DataDirKey;
use parking_lot::Mutex;
use proto::volume_content_source::{SnapshotSource, Type};
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, timeout};
use tonic::{Code, Status};

use super::network::Network;
use super::node::{Disk, NORMAL, Node, POOL};
use super::orchestrator::{RouterProcess, Volumes};
use super::{MOST_NODES, certificates, key_of};

/// How long hosts and links fail in a life, at most.
const BAD_TIMES: u64 = 120;
/// By then everybody has what was asked for, once all is well.
const SETTLED: Duration = Duration::from_secs(1800);
/// How long a router needs to find what exists twice, and delete it.
const FOUND: Duration = Duration::from_secs(45);
/// How long after a fault of a node a router may still take it to be away.
const AFTERMATH: Duration = Duration::from_secs(30);

pub struct Outcome {
    /// Of all that was asked, answered and broken, and when.
    pub trace: blake3::Hash,
    pub counts: BTreeMap<&'static str, u64>,
}

/// Everything there is in a life.
pub struct World {
    network: Network,
    /// Their host numbers come first.
    routers: Mutex<Vec<Arc<RouterProcess>>>,
    nodes: Vec<Arc<Node>>,
    addresses: Vec<String>,
    volumes: Volumes,
    begun: Instant,
    story: Mutex<Story>,
}

/// What was asked and promised.
#[derive(Default)]
struct Story {
    trace: blake3::Hasher,
    counts: BTreeMap<&'static str, u64>,
    /// By id.
    promised_volumes: BTreeMap<String, Promised>,
    promised_snapshots: BTreeMap<String, Promised>,
    /// Faults that each node has now, and when the last one ended.
    troubled: Vec<(u32, Option<Instant>)>,
    /// When a router forgot all it knew, the last time.
    forgot: Option<Instant>,
    /// When each name was first asked for.
    asked: BTreeMap<String, Instant>,
    /// Names of volumes that an older disk brought back.
    revived: BTreeSet<String>,
    is_well: bool,
}

#[derive(Clone)]
struct Promised {
    name: String,
    content: u64,
    is_being_deleted: bool,
}

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

impl World {
    /// The node at an address, if it is reached.
    pub fn at(&self, from: &Node, address: &str) -> Result<&Arc<Node>, Status> {
        let host = self.network.host_at(address).expect("an address of a node");
        match self.network.reaches(from.host, host) {
            true => Ok(self.nodes.iter().find(|node| node.host == host).expect("a node")),
            false => Err(Status::unavailable("the source's node is not reached")),
        }
    }

    fn tell(&self, what: &str) {
        let line = format!("{:>9.3} {what}\n", self.begun.elapsed().as_secs_f64());
        if std::env::var_os("DELTAPATH_TELL").is_some() {
            print!("{line}");
        }
        self.story.lock().trace.update(line.as_bytes());
    }

    fn count(&self, what: &'static str) {
        self.count_more(what, 1);
    }

    fn count_more(&self, what: &'static str, more: u64) {
        *self.story.lock().counts.entry(what).or_insert(0) += more;
    }

    /// One of three names, by the number of routers.
    fn by_routers(&self, names: [&'static str; 3]) -> &'static str {
        names[self.routers.lock().len() - 1]
    }

    fn node_of(&self, id: &str) -> usize {
        let key = DataDirKey::of(id).expect("an id");
        self.nodes.iter().position(|node| node.key == key).expect("a node")
    }

    /// Whether nothing has kept routers from this node since then, nor shortly before.
    fn was_calm(&self, node: usize, since: Instant) -> bool {
        match self.story.lock().troubled[node] {
            (0, None) => true,
            (0, Some(ended)) => ended + AFTERMATH < since,
            _ => false,
        }
    }

    async fn call<A: prost::Message + Default>(
        &self,
        random: &mut fastrand::Rng,
        call: &str,
        what: &str,
        request: &impl prost::Message,
    ) -> Result<A, Status> {
        let router = random.choice(self.routers.lock().iter()).cloned().expect("a router");
        let deadline = Duration::from_secs([3, 10, 60][random.usize(..3)]);
        let answer = router.call(&format!("/csi.v1.Controller/{call}"), request, deadline).await;
        self.count("calls");
        match &answer {
            Ok(_) => self.tell(&format!("{call} {what}: OK")),
            Err(status) => self.tell(&format!("{call} {what}: {:?} {}", status.code(), status.message())),
        }
        answer
    }

    /// Whether no fault comes any more.
    fn is_well(&self) -> bool {
        self.story.lock().is_well
    }

    fn is_full(&self, wish: &Wish) -> bool {
        let source = wish.source.as_ref().map(|(id, _)| self.node_of(id));
        let places: Vec<usize> = match source {
            Some(node) if wish.places.is_empty() || wish.places.contains(&node) => vec![node],
            _ if wish.places.is_empty() => (0..self.nodes.len()).collect(),
            _ => wish.places.clone(),
        };
        places.iter().all(|place| self.nodes[*place].disk().provisioned() + (wish.gib << 30) > POOL)
    }

    /// A node that is making something now, or any if none begins to.
    async fn one_at_work(&self) -> usize {
        for _ in 0..1000 {
            if let Some(node) = self.nodes.iter().position(|node| node.is_at_work()) {
                return node;
            }
            sleep(Duration::from_millis(5)).await;
        }
        0
    }

    async fn wait_a_bit(&self, random: &mut fastrand::Rng, most: u64) {
        sleep(Duration::from_millis(random.u64(..=most * 1000))).await;
    }
}

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
    world.judge();
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

/// CreateVolume, until it ends well: the volume's id.
async fn make(world: &World, random: &mut fastrand::Rng, wish: &Wish) -> Result<String, Gone> {
    let mut wish = wish.clone();
    world.story.lock().asked.entry(wish.name.clone()).or_insert_with(Instant::now);
    let (mut pause, mut before) = (1, None);
    loop {
        let (request, begun) = (request_of(world, &wish), Instant::now());
        let call = async |mut random| {
            let call = world.call(&mut random, "CreateVolume", &wish.name, &request);
            call.await as Result<proto::CreateVolumeResponse, Status>
        };
        let mut answer = call(random.fork()).await;
        // For a while two sidecars may take themselves for the elected one.
        if random.u8(..4) == 0 {
            let (one, other) = tokio::join!(call(random.fork()), call(random.fork()));
            if let (Ok(one), Ok(other)) = (&one, &other) {
                let [one, other] =
                    [one, other].map(|made| &made.volume.as_ref().expect("a volume").volume_id);
                let is_calm =
                    world.was_calm(world.node_of(one), begun) && world.was_calm(world.node_of(other), begun);
                assert!(one == other || !is_calm, "{} is {one} and {other}", wish.name);
            }
            answer = answer.or(one).or(other);
        }
        match answer {
            Ok(made) => {
                let id = made.volume.expect("a volume").volume_id;
                world.tell(&format!("{} is {id}", wish.name));
                check(world, &wish, &id);
                // The sidecar is ended before it has noted the volume, and asks again.
                if let Some(before) = before.replace(id.clone()).filter(|before| *before != id) {
                    world.count("made again while away");
                    let was_calm = world.was_calm(world.node_of(&before), begun);
                    assert!(!was_calm, "{} was {before}, and now it is {id}", wish.name);
                } else if random.u8(..4) == 0 {
                    continue;
                }
                promise(world, &wish, &id);
                let waited = world.story.lock().asked[&wish.name].elapsed();
                let of = ["waited ms, 1 router", "waited ms, 2 routers", "waited ms, 3 routers"];
                world.count_more(world.by_routers(of), waited.as_millis() as u64);
                world.count(world.by_routers(["made, 1 router", "made, 2 routers", "made, 3 routers"]));
                return Ok(id);
            }
            Err(status) if status.code() == Code::ResourceExhausted && world.is_well() => {
                assert!(world.is_full(&wish), "{}: {status}", wish.name);
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
                wish.places.clear();
            }
            Err(status) if status.code() == Code::FailedPrecondition => {
                world.count(world.by_routers(["twice, 1 router", "twice, 2 routers", "twice, 3 routers"]));
                delete_doubles(world, random, &wish.name).await;
                before = None;
            }
            Err(status) if status.code() == Code::NotFound => {
                let (source, _) = wish.source.as_ref().expect("a source");
                assert!(is_gone(world, source), "{}: {status}", wish.name);
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
    let Some(volume) = world.nodes[world.node_of(id)].disk().volumes.remove(id) else { return };
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
                assert!(is_gone(world, volume_id), "{name} of {volume_id}: {status}");
                return Err(Gone);
            }
            Err(status) => panic!("{name}: {status}"),
        }
        world.wait_a_bit(random, pause).await;
        pause = (pause * 2).min(30);
    }
}

/// Whether an object that was promised went with a disk.
fn is_gone(world: &World, id: &str) -> bool {
    let story = world.story.lock();
    !story.promised_volumes.contains_key(id) && !story.promised_snapshots.contains_key(id)
}

async fn delete_snapshot(world: &World, random: &mut fastrand::Rng, id: &str) {
    if let Some(snapshot) = world.story.lock().promised_snapshots.get_mut(id) {
        snapshot.is_being_deleted = true;
    }
    let request = proto::DeleteSnapshotRequest { snapshot_id: id.to_owned(), ..Default::default() };
    while let Err(status) =
        world.call::<proto::DeleteSnapshotResponse>(random, "DeleteSnapshot", id, &request).await
    {
        assert!(is_not_final(&status), "{id}: {status}");
        world.wait_a_bit(random, 5).await;
    }
    world.story.lock().promised_snapshots.remove(id);
}

async fn delete_volume(world: &World, random: &mut fastrand::Rng, name: &str, id: &str) {
    if let Some(volume) = world.story.lock().promised_volumes.get_mut(id) {
        volume.is_being_deleted = true;
    }
    let request = proto::DeleteVolumeRequest { volume_id: id.to_owned(), ..Default::default() };
    while let Err(status) =
        world.call::<proto::DeleteVolumeResponse>(random, "DeleteVolume", id, &request).await
    {
        assert!(is_not_final(&status), "{id}: {status}");
        world.wait_a_bit(random, 5).await;
    }
    world.story.lock().promised_volumes.remove(id);
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
        if let Ok(listed) = listed.await {
            world.count("lists");
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
        if let Ok(listed) = listed.await {
            world.count("lists");
            for id in before.keys() {
                let kept = world.story.lock().promised_volumes.get(id).cloned();
                let is_missing = kept.is_some_and(|kept| !kept.is_being_deleted) && !listed.contains(id);
                let was_there = world.was_calm(world.node_of(id), begun);
                assert!(!is_missing || !was_there, "{id} is not in a list of volumes: {listed:?}");
            }
        }
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

#[derive(Clone, Copy, Debug)]
enum Fault {
    /// The link of a router and a node, or of two nodes.
    Cut,
    Isolated,
    Killed,
    PowerLost,
    Frozen,
    Slow,
    Lossy,
    ConnectionsReset,
    OldDisk,
    /// Two nodes get each other's address.
    AddressesSwapped,
    RouterKilled,
    RouterFrozen,
}

const FAULTS: [Fault; 12] = [
    Fault::Cut,
    Fault::Isolated,
    Fault::Killed,
    Fault::PowerLost,
    Fault::Frozen,
    Fault::Slow,
    Fault::Lossy,
    Fault::ConnectionsReset,
    Fault::OldDisk,
    Fault::AddressesSwapped,
    Fault::RouterKilled,
    Fault::RouterFrozen,
];

/// Faults, one after the other and some at once; each ends by itself.
async fn break_things(world: Arc<World>, how_long: Duration, mut random: fastrand::Rng) {
    let until = Instant::now() + how_long;
    let old: Arc<Mutex<BTreeMap<usize, Disk>>> = Arc::default();
    let mut under_way = JoinSet::new();
    while Instant::now() < until {
        world.wait_a_bit(&mut random, 15).await;
        let fault = FAULTS[random.usize(..FAULTS.len())];
        let node = match random.bool() {
            true => random.usize(..world.nodes.len()),
            false => world.one_at_work().await,
        };
        // One that has a fault has enough.
        if world.story.lock().troubled[node].0 > 0 {
            continue;
        }
        old.lock().entry(node).or_insert_with(|| world.nodes[node].disk());
        world.count("faults");
        under_way.spawn(strike(world.clone(), fault, node, old.clone(), random.fork()));
    }
    while let Some(ended) = under_way.join_next().await {
        ended.expect("a fault");
    }
}

async fn strike(
    world: Arc<World>,
    fault: Fault,
    number: usize,
    old: Arc<Mutex<BTreeMap<usize, Disk>>>,
    mut random: fastrand::Rng,
) {
    let (node, network) = (&world.nodes[number], &world.network);
    let routers = world.routers.lock().len();
    let other = random.usize(..routers + world.nodes.len());
    let router = random.usize(..routers);
    let how_long = Duration::from_millis(random.u64(100..40_000));
    world.tell(&format!("{fault:?} {number} ({other}, {router}) for {how_long:?}"));
    // A router that fails keeps itself from all nodes.
    let troubled = match fault {
        Fault::RouterKilled | Fault::RouterFrozen | Fault::AddressesSwapped => 0..world.nodes.len(),
        _ => number..number + 1,
    };
    world.story.lock().troubled[troubled.clone()].iter_mut().for_each(|(now, _)| *now += 1);
    match fault {
        Fault::Cut if other != node.host => {
            network.cut(node.host, other, true);
            sleep(how_long).await;
            network.cut(node.host, other, false);
        }
        Fault::Cut => {}
        Fault::Isolated => {
            let others = || (0..routers + world.nodes.len()).filter(|other| *other != node.host);
            others().for_each(|other| network.cut(node.host, other, true));
            sleep(how_long).await;
            others().for_each(|other| network.cut(node.host, other, false));
        }
        Fault::Killed => {
            node.end();
            network.reset(node.host, true);
            sleep(how_long).await;
            node.start(&world);
        }
        Fault::PowerLost | Fault::OldDisk => {
            node.end();
            network.power(node.host, false);
            sleep(how_long).await;
            if let (Fault::OldDisk, Some(disk)) = (fault, old.lock().remove(&number)) {
                world.goes_back(number, disk);
            }
            network.power(node.host, true);
            node.start(&world);
        }
        Fault::Frozen => {
            network.freeze(node.host, true);
            sleep(how_long).await;
            network.freeze(node.host, false);
        }
        Fault::Slow => {
            node.slow(Duration::from_secs(random.u64(1..12)));
            sleep(how_long).await;
            node.slow(NORMAL);
        }
        Fault::Lossy => {
            network.lose(node.host, true);
            sleep(how_long).await;
            network.lose(node.host, false);
        }
        Fault::ConnectionsReset => network.reset(node.host, false),
        Fault::AddressesSwapped => {
            let [one, two] = [number, other % world.nodes.len()].map(|number| &world.addresses[number]);
            let hosts = [one, two].map(|address| network.host_at(address).expect("a host"));
            network.lead(one, hosts[1]);
            network.lead(two, hosts[0]);
            hosts.iter().for_each(|host| network.reset(*host, false));
        }
        Fault::RouterKilled => {
            let ended = world.routers.lock()[router].clone();
            ended.end();
            network.reset(router, true);
            world.story.lock().forgot = Some(Instant::now());
            sleep(how_long / 10).await;
            let started = RouterProcess::start(router, network, &world.addresses, &world.volumes);
            // Two faults may have struck it.
            std::mem::replace(&mut world.routers.lock()[router], Arc::new(started)).end();
        }
        Fault::RouterFrozen => {
            network.freeze(router, true);
            sleep(how_long).await;
            network.freeze(router, false);
        }
    }
    for (now, last) in &mut world.story.lock().troubled[troubled] {
        (*now, *last) = (*now - 1, Some(Instant::now()));
    }
    world.tell(&format!("{fault:?} {number} is over"));
}

impl World {
    /// A node's disk is one of earlier: what was promised since is gone, and what was deleted is there again.
    fn goes_back(&self, number: usize, disk: Disk) {
        let key = self.nodes[number].key;
        let mut story = self.story.lock();
        let is_of = |id: &String| DataDirKey::of(id) == Some(key);
        story.promised_volumes.retain(|id, _| !is_of(id) || disk.volumes.contains_key(id));
        story.promised_snapshots.retain(|id, _| !is_of(id) || disk.snapshots.contains_key(id));
        self.volumes.lock().retain(|_, id| !is_of(id) || disk.volumes.contains_key(id));
        story.revived.extend(disk.names());
        drop(story);
        self.nodes[number].set_disk(disk);
    }

    /// What is on the disks when all is well again.
    fn judge(&self) {
        let mut by_name: BTreeMap<String, Vec<String>> = BTreeMap::new();
        for node in &self.nodes {
            for (id, volume) in node.disk().volumes {
                by_name.entry(volume.name).or_default().push(id);
            }
        }
        let counted = {
            let story = self.story.lock();
            for (id, promised) in &story.promised_volumes {
                let ids = by_name.get(&promised.name);
                assert!(
                    ids.is_some_and(|ids| ids.contains(id)),
                    "{} was promised as {id}, and is lost",
                    promised.name
                );
            }
            for (id, promised) in &story.promised_snapshots {
                let disk = self.nodes[self.node_of(id)].disk();
                let there = disk.snapshots.get(id);
                assert!(
                    there.is_some_and(|there| there.content == promised.content),
                    "{} was promised as {id}, and is {there:?}",
                    promised.name
                );
            }
            let used = self.volumes.lock();
            let mut left = Vec::new();
            for (name, ids) in &by_name {
                let unused: Vec<_> = ids.iter().filter(|id| used.get(name) != Some(*id)).collect();
                if unused.is_empty() || story.revived.contains(name) {
                    continue;
                }
                // docs/router.md: what a router knew of a second volume ends with its process, and without a PersistentVolume
                // nobody knows which one is used.
                let asked = story.asked[name];
                let forgot = story.forgot.is_some_and(|forgot| asked < forgot);
                let deleted =
                    used.get(name).is_none() && story.troubled.iter().any(|(_, last)| *last > Some(asked));
                assert!(forgot || deleted, "{name} is left over, as {unused:?}, beside {:?}", used.get(name));
                left.push(if forgot {
                    "left over after a router forgot"
                } else {
                    "left over after its claim"
                });
            }
            left
        };
        counted.into_iter().for_each(|what| self.count(what));
    }
}
