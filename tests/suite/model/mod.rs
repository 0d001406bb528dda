//! Random sequences of calls ("lives") against a model of the CSI spec: every RPC of every service, legal or
//! not, by one client or by several at once, with restarts, and SIGKILLs at rest and in the middle of
//! calls.
//!
//! The model says for each call which code it must end with and what the answer must hold; the lists and
//! the kernel's mounts are held against it after every step, all bytes at the end. Calls that ran at once
//! must be explained by some order of them ([`rounds`]); after a kill the model holds every state that the
//! cut call may have left, until an answer, a list or a mount tells which it is. Deltas are left to
//! `property.rs` but for a few blocks.
//!
//! The same lives are lived with two and three drivers behind a router. What differs there stands at the rules, by
//! [`world::World::is_routed`]: each node has room of its own, the volumes of a group are on one node, ids of two nodes are of two
//! volumes, and a list beside other calls is of no one moment.
//!
//! Why not `proptest-state-machine`: it runs one transition after another, and in shrinking it drops those whose
//! preconditions no longer hold. Here calls run at once, and a step is about names (`a`, not "the third
//! volume"), so that it has a meaning after any other and any part of a life is a life. Proptest makes
//! lives; `shrink.rs` makes a failed one short, for proptest goes over the steps once and leaves what a
//! later step needed only before it was made plainer.

pub mod calls;
pub mod life;
pub mod names;
mod node;
pub mod rounds;
mod shrink;
mod snapshots;
pub mod strategies;
mod volumes;
pub mod wire;
pub mod world;

use std::cell::RefCell;

use proptest::prelude::*;
use proptest::test_runner::{Config, TestCaseError, TestError, TestRunner};

use self::calls::Step;
use self::shrink::{Stage, shrunk};
use testkit::PoolKind;

/// Deleted snapshots of a volume that are kept as a base for deltas.
const RETAINED: usize = 2;

/// Lives of each kind, with and without `--enable-attach`; `DELTAPATH_MODEL_CASES` asks for more.
fn cases() -> u32 {
    std::env::var("DELTAPATH_MODEL_CASES").ok().and_then(|cases| cases.parse().ok()).unwrap_or(15)
}

/// `routed`: the number of drivers behind a router; none for a driver alone.
fn lives(pool: PoolKind, routed: Option<usize>, strategy: impl Strategy<Value = Vec<Step>>) {
    for attach in [false, true] {
        // Shrinking is ours: see `shrink.rs`.
        let config =
            Config { cases: cases(), failure_persistence: None, max_shrink_iters: 0, ..Config::default() };
        let stage = RefCell::new(Stage::new(pool, routed, attach));
        let outcome = TestRunner::new(config).run(&strategy, |steps| {
            let lived = stage.borrow_mut().live(&steps);
            lived.map_err(|failure| TestCaseError::fail(failure.story))
        });
        let mut stage = stage.into_inner();
        match outcome {
            Ok(()) => {
                let tally = stage.finish();
                println!("{pool:?}: {tally}");
                tally.assert_reach(cases());
            }
            Err(TestError::Fail(reason, steps)) => {
                println!("{reason}\nLooking for a shorter life that fails");
                let (steps, story) = shrunk(&mut stage, steps, reason.message().to_owned());
                stage.finish();
                panic!(
                    "the driver ({pool:?}{}) and the model differ in a life of {} steps:\n{story}",
                    if attach { ", --enable-attach" } else { "" },
                    steps.len()
                );
            }
            Err(TestError::Abort(reason)) => panic!("{reason}"),
        }
    }
}

#[test_with::root]
#[test]
fn one_client_finds_what_the_model_says_on_dir() {
    lives(PoolKind::Dir, None, strategies::alone());
}

#[test_with::root]
#[test]
fn one_client_finds_what_the_model_says_on_xfs() {
    lives(PoolKind::Xfs, None, strategies::alone());
}

#[test_with::root]
#[test]
fn one_client_finds_what_the_model_says_on_btrfs() {
    lives(PoolKind::Btrfs, None, strategies::alone());
}

#[test_with::root]
#[test]
fn several_clients_at_once_find_what_some_order_gives_on_dir() {
    lives(PoolKind::Dir, None, strategies::together());
}

#[test_with::root]
#[test]
fn several_clients_at_once_find_what_some_order_gives_on_xfs() {
    lives(PoolKind::Xfs, None, strategies::together());
}

#[test_with::root]
#[test]
fn several_clients_at_once_find_what_some_order_gives_on_btrfs() {
    lives(PoolKind::Btrfs, None, strategies::together());
}

#[test_with::root]
#[test]
fn one_client_of_two_drivers_behind_a_router_finds_what_the_model_says() {
    lives(PoolKind::Xfs, Some(2), strategies::alone());
}

#[test_with::root]
#[test]
fn several_clients_of_three_drivers_behind_a_router_find_what_some_order_gives() {
    lives(PoolKind::Btrfs, Some(3), strategies::together());
}
