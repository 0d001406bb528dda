//! The driver is killed, and its steps fail, in all calls that change something.
//!
//! The incident: a driver is killed in the middle of a restore; kubelet's retry finds a volume of
//! that name, answers `OK`, and the workload runs on half its data. So after each
//! kill here: start again, look at every object (whole or absent), retry the call, look again, and
//! find no file, device or mount that nothing explains.
//!
//! Kills come at random moments (here), and before each single step that changes something (`points`, which
//! needs the cargo feature `failpoints`); there steps also fail.

mod audit;
mod calls;
#[cfg(feature = "failpoints")]
mod freezes;
#[cfg(feature = "failpoints")]
mod healing;
#[cfg(feature = "failpoints")]
mod inline;
#[cfg(feature = "failpoints")]
mod moves;
#[cfg(feature = "failpoints")]
mod points;
mod scene;
#[cfg(feature = "failpoints")]
mod starts;
mod tally;
#[cfg(feature = "failpoints")]
mod writes;

use std::time::{Duration, Instant};

use audit::When;
use calls::{CALLS, Job};
#[cfg(feature = "failpoints")]
pub use points::{Cut, Orders, Point};
use scene::Scene;
use tally::Tally;

use testkit::{PoolKind, Rig};

/// The flags that all calls here need.
const FLAGS: [&str; 1] = ["--enable-attach"];

/// A number from a variable that asks for more than `make test` does.
fn asked(variable: &str) -> Option<usize> {
    std::env::var(variable).ok().map(|text| text.parse().unwrap_or_else(|_| panic!("{variable} is {text:?}")))
}

/// Kills at random moments, between the begin of a call and a little after its usual end.
async fn rounds(pool: PoolKind, count: usize) {
    let mut tally = Tally::new("random", pool);
    let mut rig = Rig::start_with(pool, &FLAGS, "info").await;
    let mut scene = Scene::make(&mut rig).await;
    let mut random = fastrand::Rng::with_seed(1);
    let mut usual = [Duration::from_millis(20); CALLS.len()];
    for round in 0..count {
        let which = round % CALLS.len();
        let context = format!("{pool:?}, round {round}, {:?}", CALLS[which]);
        let job = Job::prepare(CALLS[which], &mut rig, &scene, round).await;
        let mut client = rig.client.clone();
        let started = Instant::now();
        let moment = usual[which].mul_f64(random.f64() * 1.25);
        let finished = tokio::select! {
            made = job.make(&mut client, &scene) => {
                usual[which] = (usual[which] + started.elapsed()) / 2;
                if let Err(status) = made {
                    tally.lost(&rig, &format!("{context}: fails before the kill: {status}"));
                }
                true
            }
            () = tokio::time::sleep(moment) => false,
        };
        rig.kill();
        tally.round(!finished);
        rig.start_again().await;
        retried(&mut rig, &mut scene, &job, &mut tally, When::Cut, &context).await;
    }
    assert!(tally.cut > count / 4, "only {} of {count} calls were cut by the kill", tally.cut);
    scene.leave(&mut rig).await;
    rig.finish();
}

/// What follows each call that was cut short: a look, the retry, a look, all undone, and a look.
async fn retried(rig: &mut Rig, scene: &mut Scene, job: &Job, tally: &mut Tally, when: When, context: &str) {
    tally.look(rig, scene, when, context).await;
    let mut client = rig.client.clone();
    let made = match job.make(&mut client, scene).await {
        Ok(made) => made,
        Err(status) => tally.lost(rig, &format!("{context}: the retry fails: {status}")),
    };
    if let Err(what) = job.shortfall(rig, scene, &made).await {
        tally.lost(rig, &format!("{context}: {what}"));
    }
    tally.look(rig, scene, When::Done, context).await;
    job.undo(rig, &made).await;
    tally.look(rig, scene, When::Undone, context).await;
}

/// Rounds a pool; `DELTAPATH_CRASH_ROUNDS` asks for more.
fn count() -> usize {
    asked("DELTAPATH_CRASH_ROUNDS").unwrap_or(3 * CALLS.len())
}

#[test_with::root]
#[tokio::test(flavor = "multi_thread")]
async fn a_kill_leaves_every_object_whole_or_absent_on_dir() {
    rounds(PoolKind::Dir, count()).await;
}

#[test_with::root]
#[tokio::test(flavor = "multi_thread")]
async fn a_kill_leaves_every_object_whole_or_absent_on_xfs() {
    rounds(PoolKind::Xfs, count()).await;
}

#[test_with::root]
#[tokio::test(flavor = "multi_thread")]
async fn a_kill_leaves_every_object_whole_or_absent_on_btrfs() {
    rounds(PoolKind::Btrfs, count()).await;
}

/// Without the feature there are no points to stop at; who believes that they were tested is wrong.
#[cfg(not(feature = "failpoints"))]
#[test]
fn kills_and_errors_at_every_step() {
    eprintln!("skipped: needs `cargo test --features failpoints`, as `make test` runs it");
    assert_ne!(std::env::var("CI").as_deref(), Ok("true"), "skipped under CI: needs --features failpoints");
}
