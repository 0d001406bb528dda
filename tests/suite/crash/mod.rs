//! The driver is killed, and its steps fail, in all calls that change something.
//!
//! The calls are those of the model of random lives (`model`), which knows every state that a cut call may leave; what
//! needs no model is looked at in `audit.rs`.
//!
//! The incident: a driver is killed in the middle of a restore; kubelet's retry finds a volume of
//! that name, answers `OK`, and the workload runs on half its data. So after each
//! kill here: start again, look at every object (whole or absent), retry the call, look again, and
//! find no file, device or mount that nothing explains.
//!
//! Kills come at random moments (here), and before each single step that changes something (`points`, which
//! needs the cargo feature `failpoints`); there steps also fail.

mod audit;
mod cases;
#[cfg(feature = "failpoints")]
mod freezes;
#[cfg(feature = "failpoints")]
mod handover;
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

use crate::model::calls::Step;
use crate::model::wire::{Answer, make};
use audit::When;
use cases::{Case, cases};
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
    let cases = cases();
    let mut usual = vec![Duration::from_millis(20); cases.len()];
    for round in 0..count {
        let which = round % cases.len();
        let case = &cases[which];
        let context = format!("{pool:?}, round {round}, {}", case.name);
        scene
            .live(&mut rig, &case.before)
            .await
            .unwrap_or_else(|said| tally.lost(&rig, &format!("{context}: {said}")));
        let (asked, mut client) = (scene.asked(&case.call), rig.client.clone());
        let started = Instant::now();
        let moment = usual[which].mul_f64(random.f64() * 1.25);
        let answer = tokio::select! {
            answer = make(&mut client, &asked) => {
                usual[which] = (usual[which] + started.elapsed()) / 2;
                answer
            }
            () = tokio::time::sleep(moment) => Answer::Cut,
        };
        rig.kill();
        tally.round(matches!(answer, Answer::Cut));
        rig.start_again().await;
        if let Err(said) = scene.ended(&mut rig, asked, answer, true).await {
            tally.lost(&rig, &format!("{context}: {said}"));
        }
        retried(&mut rig, &mut scene, case, &mut tally, When::Cut, &context).await;
    }
    assert!(tally.cut > count / 4, "only {} of {count} calls were cut by the kill", tally.cut);
    scene.leave(&mut rig).await;
    rig.finish();
}

/// What follows each call that was cut short: a look, the retry, a look, all undone, and a look.
async fn retried(
    rig: &mut Rig,
    scene: &mut Scene,
    case: &Case,
    tally: &mut Tally,
    when: When,
    context: &str,
) {
    tally.look(rig, scene, when, context).await;
    if let Err(said) = scene.live(rig, &[Step::One(case.call.clone())]).await {
        tally.lost(rig, &format!("{context}, the retry: {said}"));
    }
    if let Err(what) = case.shortfall(rig, scene) {
        tally.lost(rig, &format!("{context}: {what}"));
    }
    tally.look(rig, scene, When::Done, context).await;
    if let Err(said) = scene.live(rig, &case.after).await {
        tally.lost(rig, &format!("{context}, undone: {said}"));
    }
    tally.look(rig, scene, When::Undone, context).await;
}

/// Rounds a pool; `DELTAPATH_CRASH_ROUNDS` asks for more.
fn count() -> usize {
    asked("DELTAPATH_CRASH_ROUNDS").unwrap_or(3 * cases().len())
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

/// Without the feature there are no points to stop at, and the report of the run says so.
#[cfg(not(feature = "failpoints"))]
#[test]
#[ignore = "needs --features failpoints, with which `make test` runs it"]
fn kills_and_errors_at_every_step() {
    panic!("run it with --features failpoints");
}
