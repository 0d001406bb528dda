//! In all calls that change something the driver is killed, and steps fail.
//!
//! The calls are those of the model of random sequences (`model`), which knows every state that an interrupted call may
//! leave. `audit.rs` checks what needs no model.
//!
//! The incident: a driver is killed in the middle of a restore. The retry finds a volume of that name and answers `OK`, and
//! the workload runs on half of its data. So after each kill the test starts the driver again, checks that every object is
//! whole or absent, retries the call, and checks again that records explain every file, device and mount.
//!
//! The driver is killed at random moments (here), and before each step that changes something (`points`). In `points` steps also fail.

mod audit;
mod cases;
mod freezes;
mod handover;
mod healing;
mod inline;
mod moves;
mod panics;
mod points;
mod scene;
mod starts;
mod tally;
mod writes;

use std::time::{Duration, Instant};

use crate::model::calls::Step;
use crate::model::wire::{Answer, make};
use audit::When;
use cases::{Case, cases};
use scene::Scene;
use tally::Tally;

use testkit::{PoolKind, Rig, asked};

/// The flags that all calls here need.
const FLAGS: [&str; 1] = ["--enable-attach"];

/// Kills the driver at random moments, from the beginning of a call until a little after its usual end.
/// `DELTAPATH_CRASH_ROUNDS` sets another number of rounds.
#[apply(every_pool)]
async fn a_kill_leaves_every_object_whole_or_absent(pool: PoolKind) {
    let mut tally = Tally::new("random", pool);
    let mut rig = Rig::start_with(pool, &FLAGS, "info").await;
    let mut scene = Scene::make(&mut rig).await;
    let mut random = fastrand::Rng::with_seed(1);
    let cases = cases();
    let count = asked("DELTAPATH_CRASH_ROUNDS").unwrap_or(2 * cases.len());
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
                if matches!(answer, Answer::Cut) {
                    tally.lost(&rig, &format!("{context}: it fails before the kill"));
                }
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

/// The steps after each interrupted call: an audit, the retry, an audit, the undo, and an audit.
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
