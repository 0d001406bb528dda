//! Lives of a cluster, simulated: the router's own code, its connections and its TLS, with nodes that are a model (`node.rs`) on a
//! network that is one too (`network.rs`). All of it runs in one thread, under a clock that jumps to the next timer when no task
//! can go on: so a minute takes some milliseconds, and a seed always gives the same life.
//!
//! `life.rs` has what is asked in a life, `faults.rs` what goes wrong, and `world.rs` what must hold in the end.
//! `make simulation LIVES=10000` plays many. If one fails, its seed is printed:
//! `DELTAPATH_SEED=N DELTAPATH_TELL=1 cargo test -p deltapath-router --bin deltapath-router -- a_life_of_a_seed --nocapture`
//! plays it again, and tells what happens in it.

mod disk;
mod faults;
mod life;
mod network;
mod node;
mod orchestrator;
mod world;

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

use parking_lot::Mutex;
use serve::identity::Role;
use serve::mutual::Mutual;
use testkit::cluster::{Authority, uri};
use testkit::played;

use world::Outcome;

/// The most nodes of a life.
const MOST_NODES: usize = 8;

/// Everybody's certificates: made once, since that takes longer than a life.
struct Certificates {
    router: Arc<Mutual>,
    nodes: Vec<Arc<Mutual>>,
}

fn key_of(number: usize) -> String {
    // Neither in the order of the addresses nor of the hosts.
    format!("{:08x}", (number as u32 + 1).wrapping_mul(0x9e37_79b1))
}

fn certificates() -> &'static Certificates {
    static CERTIFICATES: OnceLock<Certificates> = OnceLock::new();
    CERTIFICATES.get_or_init(|| {
        let dir = testkit::temp_dir();
        let authority = Authority::new("the simulation's CA");
        let issue = |name: &str, role: Role, of: &str| {
            authority.issue(dir.path(), name, &uri(of));
            played::tls(dir.path(), name, role)
        };
        let router = issue("router", Role::Router, "router");
        let node = |number| {
            let key = key_of(number);
            issue(&key, Role::Node(key.clone()), &format!("node/{key}"))
        };
        Certificates { router, nodes: (0..MOST_NODES).map(node).collect() }
    })
}

fn play(seed: u64) -> Outcome {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build();
    runtime.expect("a runtime").block_on(life::live(seed))
}

/// Plays lives on all processors, from this seed on; what happened in them together.
fn play_many(first: u64, count: u64) -> BTreeMap<&'static str, u64> {
    let (next, sum) = (AtomicU64::new(0), Mutex::new(BTreeMap::new()));
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                loop {
                    let number = next.fetch_add(1, Ordering::Relaxed);
                    if number >= count {
                        break;
                    }
                    let seed = first.wrapping_add(number);
                    let played = std::panic::catch_unwind(|| play(seed));
                    let Ok(outcome) = played else {
                        next.store(count, Ordering::Relaxed);
                        panic!("a life failed: DELTAPATH_SEED={seed}");
                    };
                    let mut sum = sum.lock();
                    for (what, times) in outcome.counts {
                        *sum.entry(what).or_insert(0) += times;
                    }
                }
            });
        }
    });
    sum.into_inner()
}

/// Promise: whatever fails, one volume has a name, nothing that was promised is lost, no call outlives its deadline, and a list is
/// complete or refused. What docs/router.md allows is counted.
#[test]
fn nothing_is_lost_doubled_or_late_in_random_lives() {
    let lives = testkit::asked("DELTAPATH_LIVES").unwrap_or(if testkit::is_short() { 20 } else { 60 });
    let seed = testkit::seed("simulation");
    let begun = std::time::Instant::now();
    let counts = play_many(seed, lives);
    println!("{lives} lives from seed {seed} in {:.1} s: {counts:?}", begun.elapsed().as_secs_f64());
    // About every life has some of each.
    for what in [
        "volumes",
        "snapshots",
        "restores",
        "lists of volumes",
        "lists of snapshots",
        "faults",
        "looked at in calm",
    ] {
        assert!(counts.get(what).is_some_and(|count| *count >= lives), "{what}: {counts:?}");
    }
}

#[test]
fn a_life_of_a_seed_is_the_same_again() {
    let seed = testkit::asked("DELTAPATH_SEED").unwrap_or(7);
    assert_eq!(play(seed).trace, play(seed).trace);
}
