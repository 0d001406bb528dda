//! Runs random sequences one after the other, and shortens a failed one, so that a person can read it.

use std::collections::BTreeSet;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::runtime::Runtime;

use super::RETAINED;
use super::calls::Step;
use super::life::{Known, Life, NAMES, Tally};
use super::world::World;
use testkit::PoolKind;
use testkit::subject::{Site, Subject};

/// A failure with concurrent calls or a kill may depend on timing. The minimum number of tries to reproduce it, and the
/// minimum time.
const TRIES: usize = 3;
const PATIENCE: Duration = Duration::from_secs(2);
/// How long shrinking may take.
const SHRINKING: Duration = Duration::from_secs(240);

/// A life that failed.
pub struct Failure {
    /// The steps that were made, and what was wrong, as text.
    pub story: String,
    /// How many steps it took.
    steps: usize,
}

/// A driver, or several behind a router, that run one life after the other. After a failed life a new one is started.
pub struct Stage {
    runtime: Runtime,
    pool: PoolKind,
    attach: bool,
    /// The number of drivers behind a router.
    routed: Option<usize>,
    rig: Option<(Subject<'static>, Arc<[Site]>)>,
    /// What `World::kept_names` came to in the lives of this rig: the router knows nothing of lives.
    kept_names: BTreeSet<(String, String)>,
    tally: Tally,
    failed: bool,
}

impl Stage {
    pub fn new(pool: PoolKind, routed: Option<usize>, attach: bool) -> Self {
        let runtime = Runtime::new().expect("runtime");
        Stage {
            runtime,
            pool,
            attach,
            routed,
            rig: None,
            kept_names: BTreeSet::new(),
            tally: Tally::default(),
            failed: false,
        }
    }

    /// Stops the driver, and returns the figures of all lives.
    pub fn finish(self) -> Tally {
        if let Some((mut rig, _)) = self.rig {
            let status = rig.terminate();
            assert!(status.success(), "the driver ended with {status}");
            testkit::let_go(|| rig.leftovers());
        }
        self.tally
    }

    /// Runs a life. While shrinking, repeats it several times if the failure may depend on timing.
    pub fn live(&mut self, steps: &[Step]) -> Result<(), Failure> {
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

    fn live_once(&mut self, steps: &[Step]) -> Result<(), Failure> {
        let outcome = catch_unwind(AssertUnwindSafe(|| self.try_living(steps)));
        let outcome = outcome.unwrap_or_else(|panic| {
            let said = panic.downcast_ref::<String>().cloned();
            let said = said.or_else(|| panic.downcast_ref::<&str>().map(|said| (*said).to_owned()));
            let story = story(steps, &[], &said.unwrap_or_else(|| "a panic".to_owned()));
            Err(Failure { story, steps: steps.len() })
        });
        self.failed |= outcome.is_err();
        outcome
    }

    fn try_living(&mut self, steps: &[Step]) -> Result<(), Failure> {
        let Stage { runtime, pool, attach, routed, rig, kept_names, tally, .. } = self;
        let retained = RETAINED.to_string();
        let mut flags = vec!["--overcommit", "1", "--retain-deleted", retained.as_str()];
        if *attach {
            flags.push("--enable-attach");
        }
        let (mut there, sites) = rig.take().unwrap_or_else(|| {
            kept_names.clear();
            runtime.block_on(async {
                let mut rig = Subject::start(*pool, *routed, &flags, "error").await;
                let sites = rig.sites().await;
                (rig, sites.into())
            })
        });
        let (outcome, reported) = runtime.block_on(async {
            let mut world = World::new(*attach, Arc::clone(&sites), RETAINED);
            world.kept_names.clone_from(kept_names);
            let mut known = Known::new(NAMES, there.kubelet(), world);
            let mut life = Life::begin(&mut there, tally, &mut known).await;
            let outcome = life.live(steps).await;
            let reported = std::mem::take(&mut life.reported);
            *kept_names = known.worlds.iter().flat_map(|world| world.kept_names.clone()).collect();
            (outcome, reported)
        });
        let log = there.log();
        let outcome = match log.contains("panicked") {
            true => Err(format!("the driver panicked: {log}")),
            false => outcome,
        };
        match outcome {
            Ok(()) => {
                *rig = Some((there, sites));
                Ok(())
            }
            Err(said) => {
                put_away(there);
                Err(Failure { story: story(steps, &reported, &said), steps: reported.len() })
            }
        }
    }
}

/// Ends a driver in an unknown state. Tries again if another process has its devices open for a moment.
fn put_away(mut rig: Subject) {
    rig.kill();
    for _ in 0..600 {
        if rig.sweep() {
            break;
        }
        std::thread::sleep(Duration::from_millis(50));
    }
}

/// A failed life as text: up to the step that failed, or all of it after a panic, which leaves nothing reported.
fn story(steps: &[Step], reported: &[String], said: &str) -> String {
    let mut story = String::new();
    let lived = if reported.is_empty() { steps.len() } else { reported.len() };
    for (number, step) in steps.iter().enumerate().take(lived) {
        let answer = match reported.get(number) {
            Some(answer) if !answer.is_empty() => format!("  -> {answer}"),
            _ => String::new(),
        };
        story.push_str(&format!("{:>4}. {step:?}{answer}\n", number + 1));
    }
    format!("{story}{said}")
}

/// Finds a short and simple life that still fails, and its text. Leaves out steps, many at first and then one by one, and
/// simplifies the others, until nothing more can be removed.
pub fn shrunk(stage: &mut Stage, steps: Vec<Step>, story: String) -> (Vec<Step>, String) {
    let mut best = (steps, story);
    let deadline = Instant::now() + SHRINKING;
    let mut fails = |best: &mut (Vec<Step>, String), steps: Vec<Step>| {
        if Instant::now() > deadline {
            return false;
        }
        match stage.live(&steps) {
            Ok(()) => false,
            Err(Failure { story, steps: lived }) => {
                *best = (steps, story);
                best.0.truncate(lived.max(1));
                true
            }
        }
    };
    let whole = best.0.clone();
    fails(&mut best, whole);
    loop {
        let before = best.0.clone();
        let mut size = before.len().div_ceil(2);
        while size > 0 {
            let mut at = best.0.len();
            while at > 0 {
                let from = at.saturating_sub(size);
                let mut fewer = best.0.clone();
                drop(fewer.drain(from..at));
                fails(&mut best, fewer);
                at = from.min(best.0.len());
            }
            size /= 2;
        }
        for at in (0..best.0.len()).rev() {
            while let Some(step) = best.0.get(at) {
                let plainer = step.plainer();
                let found = plainer.into_iter().any(|plainer| {
                    let mut steps = best.0.clone();
                    steps[at] = plainer;
                    fails(&mut best, steps)
                });
                if !found {
                    break;
                }
            }
        }
        if best.0 == before {
            return best;
        }
    }
}
