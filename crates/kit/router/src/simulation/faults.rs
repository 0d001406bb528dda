//! What goes wrong in a life.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep};

use super::disk::Disk;
use super::node::NORMAL;
use super::orchestrator::RouterProcess;
use super::world::World;

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
pub async fn break_things(world: Arc<World>, how_long: Duration, mut random: fastrand::Rng) {
    let until = Instant::now() + how_long;
    let old: Arc<Mutex<BTreeMap<usize, Disk>>> = Arc::default();
    let mut under_way = JoinSet::new();
    while Instant::now() < until {
        world.wait_a_bit(&mut random, 15).await;
        let fault = FAULTS[random.usize(..FAULTS.len())];
        let node = match random.bool() {
            true => random.usize(..world.nodes.len()),
            false => world.one_at_work(&mut random).await,
        };
        // One that has a fault has enough.
        if !world.story.lock().struck.insert(node) {
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
    let mut story = world.story.lock();
    story.struck.remove(&number);
    for (now, last) in &mut story.troubled[troubled] {
        (*now, *last) = (*now - 1, Some(Instant::now()));
    }
    drop(story);
    world.tell(&format!("{fault:?} {number} is over"));
}
