//! Random lives of a whole driver against a model of the CSI spec: every RPC of every service, legal or
//! not, by one client or by several at once, with restarts, and SIGKILLs at rest and in the middle of
//! calls.
//!
//! The model says for each call which code it must end with and what the answer must hold; the lists and
//! the kernel's mounts are held against it after every step, all bytes at the end. Calls that ran at once
//! must be explained by some order of them ([`rounds`]); after a kill the model holds every state that the
//! cut call may have left, until an answer, a list or a mount tells which it is. Deltas are left to
//! `property.rs` but for a few blocks.
//!
//! Why not `proptest-state-machine`: it runs one transition after another, and drops those from a failing
//! sequence whose preconditions no longer hold. Here calls run at once, and a step is about names (`a`,
//! not "the third volume"), so that it has a meaning after any other: any part of a life is a life,
//! and plain proptest shrinks it to a few steps, which print as sentences.

mod calls;
mod life;
mod names;
mod node;
mod rounds;
mod snapshots;
mod strategies;
mod volumes;
mod wire;
mod world;

use std::cell::RefCell;
use std::time::{Duration, Instant};

use deltapath::sys::sweep::sweep;
use proptest::prelude::*;
use proptest::test_runner::{Config, TestCaseError, TestError, TestRunner};
use tokio::runtime::Runtime;

use self::calls::Step;
use self::life::{Life, Tally};
use self::world::World;
use crate::support::{PoolKind, Rig, have_root};

/// Deleted snapshots of a volume that deltas are told from.
const RETAINED: usize = 2;
/// What failed with calls at once, or with a kill, may need luck to fail again: it is tried so often at
/// least, and for so long.
const TRIES: usize = 3;
const PATIENCE: Duration = Duration::from_secs(2);
/// How long a failed life is made shorter after proptest has done so.
const TIDYING: Duration = Duration::from_secs(60);

/// Lives of each kind; `DELTAPATH_MODEL_CASES` asks for more.
fn cases() -> u32 {
    std::env::var("DELTAPATH_MODEL_CASES").ok().and_then(|cases| cases.parse().ok()).unwrap_or(20)
}

/// A driver that lives are lived with, one after the other; a new one after each that failed.
struct Stage {
    runtime: Runtime,
    pool: PoolKind,
    attach: bool,
    rig: Option<(Rig, u64)>,
    tally: Tally,
    failed: bool,
}

impl Stage {
    fn live(&mut self, steps: &[Step]) -> Result<(), String> {
        let races = |step: &Step| matches!(step, Step::Together(_) | Step::Killed { .. });
        let again = self.failed && steps.iter().any(races);
        let started = Instant::now();
        self.live_once(steps)?;
        let mut tries = 1;
        while again && (tries < TRIES || started.elapsed() < PATIENCE) {
            self.live_once(steps)?;
            tries += 1;
        }
        Ok(())
    }

    fn live_once(&mut self, steps: &[Step]) -> Result<(), String> {
        let Stage { runtime, pool, attach, rig, tally, failed } = self;
        let retained = RETAINED.to_string();
        let mut flags = vec!["--overcommit", "1", "--retain-deleted", retained.as_str()];
        if *attach {
            flags.push("--enable-attach");
        }
        let (mut there, promise) = rig.take().unwrap_or_else(|| {
            runtime.block_on(async {
                let mut rig = Rig::start_with(*pool, &flags, "error").await;
                let promise = Life::promise(&mut rig).await;
                (rig, promise)
            })
        });
        let (outcome, told) = runtime.block_on(async {
            let world = World::new(*attach, promise, RETAINED);
            let mut life = Life::begin(&mut there, tally, world).await;
            let outcome = life.live(steps).await;
            (outcome, std::mem::take(&mut life.told))
        });
        if outcome.is_ok() && there.log().contains("panicked") {
            *failed = true;
            return Err(format!("the driver panicked:\n{}", there.log()));
        }
        match outcome {
            Ok(()) => {
                *rig = Some((there, promise));
                Ok(())
            }
            Err(said) => {
                *failed = true;
                put_away(there);
                Err(story(steps, &told, &said))
            }
        }
    }
}

/// Ends a driver whose state nobody knows. Somebody may look at its devices just now, as `blkid` of another
/// test does: then it takes another look.
fn put_away(mut rig: Rig) {
    rig.kill();
    for _ in 0..100 {
        if sweep(rig.dir.path()).is_ok_and(|left| left.is_empty()) {
            break;
        }
        std::thread::sleep(Duration::from_millis(50));
    }
}

/// Leaves out what a failed life does not need. Proptest goes over a life once, steps first: what a later
/// step no longer needs after it was made plainer stays there.
fn tidied(stage: &mut Stage, mut steps: Vec<Step>, mut said: String) -> (Vec<Step>, String) {
    let deadline = Instant::now() + TIDYING;
    loop {
        let before = steps.clone();
        for at in (0..steps.len()).rev() {
            let plainer = steps[at].plainer();
            for plainer in [None].into_iter().chain(plainer.into_iter().map(Some)) {
                let mut fewer = steps.clone();
                match plainer {
                    None => drop(fewer.remove(at)),
                    Some(step) => fewer[at] = step,
                }
                if Instant::now() < deadline
                    && let Err(reason) = stage.live(&fewer)
                {
                    (steps, said) = (fewer, reason);
                    break;
                }
            }
        }
        if steps == before {
            return (steps, said);
        }
    }
}

/// A failed life for a reader.
fn story(steps: &[Step], told: &[String], said: &str) -> String {
    let mut story = String::new();
    for (number, step) in steps.iter().enumerate() {
        let answer = match told.get(number) {
            Some(answer) if !answer.is_empty() => format!("  -> {answer}"),
            _ => String::new(),
        };
        story.push_str(&format!("{:>4}. {step}{answer}\n", number + 1));
    }
    format!("{story}{said}")
}

fn lives(pool: PoolKind, strategy: impl Strategy<Value = Vec<Step>>, flags: [bool; 2]) {
    if !have_root() {
        return;
    }
    for attach in flags {
        let mut runner = TestRunner::new(Config {
            cases: cases(),
            failure_persistence: None,
            max_shrink_iters: 1000,
            max_shrink_time: 60_000,
            ..Config::default()
        });
        let runtime = Runtime::new().expect("runtime");
        let stage = Stage { runtime, pool, attach, rig: None, tally: Tally::default(), failed: false };
        let stage = RefCell::new(stage);
        let outcome = runner
            .run(&strategy, |steps| stage.borrow_mut().live(&steps).map_err(TestCaseError::fail));
        let outcome = match outcome {
            Err(TestError::Fail(reason, steps)) => {
                let (steps, said) = tidied(&mut stage.borrow_mut(), steps, reason.message().to_owned());
                Err(TestError::Fail(said.into(), steps))
            }
            outcome => outcome,
        };
        let Stage { rig, tally, .. } = stage.into_inner();
        // Before a panic: a driver's log is long, and not that of the life that failed.
        if let Some((rig, _)) = rig {
            rig.finish();
        }
        match outcome {
            Ok(()) => {
                println!("{pool:?}: {tally}");
                tally.assert_reach(cases());
            }
            Err(TestError::Fail(reason, steps)) => panic!(
                "the driver ({pool:?}{}) and the model differ in a life of {} steps:\n{reason}",
                if attach { ", --enable-attach" } else { "" },
                steps.len()
            ),
            Err(TestError::Abort(reason)) => panic!("{reason}"),
        }
    }
}

#[test]
fn one_client_finds_what_the_model_says_on_dir() {
    lives(PoolKind::Dir, strategies::alone(), [false, true]);
}

#[test]
fn one_client_finds_what_the_model_says_on_xfs() {
    lives(PoolKind::Xfs, strategies::alone(), [false, true]);
}

#[test]
fn one_client_finds_what_the_model_says_on_btrfs() {
    lives(PoolKind::Btrfs, strategies::alone(), [false, true]);
}

#[test]
fn several_clients_at_once_find_what_some_order_gives_on_dir() {
    lives(PoolKind::Dir, strategies::together(), [false, true]);
}

#[test]
fn several_clients_at_once_find_what_some_order_gives_on_xfs() {
    lives(PoolKind::Xfs, strategies::together(), [false, true]);
}

#[test]
fn several_clients_at_once_find_what_some_order_gives_on_btrfs() {
    lives(PoolKind::Btrfs, strategies::together(), [false, true]);
}
