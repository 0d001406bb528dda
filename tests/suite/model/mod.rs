//! Random sequences of calls ("lives") against a model of the CSI spec: every RPC of every service, legal or not, by one
//! client or by several concurrent ones, with restarts, and with SIGKILLs between calls and during calls.
//!
//! For each call the model knows the code that it must return and what the answer must contain. After every step the lists
//! and the kernel's mounts are compared with the model, and at the end all bytes. For concurrent calls there must be an
//! order that explains all answers ([`rounds`]). After a kill there is a model (a "world") for every state that the
//! interrupted call may have left, until an answer, a list or a mount decides between them. Deltas are tested here with a
//! few blocks only; `property.rs` tests them fully.
//!
//! The same lives also run with two and three drivers behind a router. Rules that differ there check
//! [`world::World::is_routed`]: each node has its own space, the volumes of a group must be on one node, ids of two nodes
//! belong to different volumes, and a list during other calls is not a snapshot of one moment.
//!
//! Why not `proptest-state-machine`: it runs one transition after another, and while shrinking it drops transitions whose
//! preconditions no longer hold. Here calls are concurrent, and a step names objects (`a`, not "the third volume"), so it has
//! a meaning after any other step, and any part of a life is a life. Proptest makes lives. `shrink.rs` shortens a failed one,
//! because proptest goes over the steps only once, and keeps steps that only a later, since simplified, step needed.

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
use proptest::test_runner::{Config, RngSeed, TestCaseError, TestError, TestRunner};

use self::calls::Step;
use self::shrink::{Stage, shrunk};
use testkit::PoolKind;

/// Deleted snapshots of a volume that are kept as a base for deltas.
const RETAINED: usize = 2;

/// The number of lives of each kind, with and without `--enable-attach`; `DELTAPATH_MODEL_CASES` sets another number.
fn cases() -> u32 {
    testkit::asked("DELTAPATH_MODEL_CASES").unwrap_or(7)
}

/// `routed`: the number of drivers behind a router; `None` for a driver without a router.
fn lives(of: &str, pool: PoolKind, routed: Option<usize>, strategy: impl Strategy<Value = Vec<Step>>) {
    for attach in [false, true] {
        // `shrink.rs` does the shrinking.
        let config = Config {
            cases: cases(),
            failure_persistence: None,
            max_shrink_iters: 0,
            rng_seed: RngSeed::Fixed(testkit::seed(&format!("{of} on {pool:?}, attach {attach}"))),
            ..Config::default()
        };
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

#[apply(root_cases)]
#[case::dir(PoolKind::Dir, None)]
#[case::xfs(PoolKind::Xfs, None)]
#[case::btrfs(PoolKind::Btrfs, None)]
#[case::two_nodes(PoolKind::Xfs, Some(2))]
fn one_client_finds_what_the_model_says(#[case] pool: PoolKind, #[case] routed: Option<usize>) {
    lives("lives of one client", pool, routed, strategies::alone());
}

#[apply(root_cases)]
#[case::dir(PoolKind::Dir, None)]
#[case::xfs(PoolKind::Xfs, None)]
#[case::btrfs(PoolKind::Btrfs, None)]
#[case::three_nodes(PoolKind::Btrfs, Some(3))]
fn several_clients_at_once_find_what_some_order_gives(#[case] pool: PoolKind, #[case] routed: Option<usize>) {
    lives("lives of several clients", pool, routed, strategies::together());
}
