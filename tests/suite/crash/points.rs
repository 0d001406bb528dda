//! The driver is killed before each step that changes something, or the step fails.
//!
//! A series repeats one call, and interrupts it at its first point, then at its second, and so on, until the call ends before
//! it reaches the point. `make test-all` takes a part of the points, and other points on each pool; `make test` fewer. With
//! `DELTAPATH_POINT_ROUNDS=N` every pool takes every point, and repeats them until N rounds are made.
//! `DELTAPATH_POINT_CALL=Restore` tests only this call.

use std::path::Path;

use super::audit::When;
use super::cases::{Case, DELETIONS, cases};
use super::scene::Scene;
use super::tally::Tally;
use super::{FLAGS, asked, retried};
use crate::faults::pool_full::small_pool_with;
pub use crate::model::calls::Call;
use crate::model::wire::{Answer, make};
use testkit::POOLS;
use testkit::orders::{Cut, Orders, Point};
use testkit::places::{Ballast, Disk};
use testkit::prelude::*;

/// The errors with which a step fails, and the code that the caller gets.
const ERRORS: [(i32, Code); 2] =
    [(nix::libc::EIO, Code::Internal), (nix::libc::ENOSPC, Code::ResourceExhausted)];

/// Whether a failed step is harmless. Gets the point, the points before it (newest first), the call and the error.
type Harmless = fn(&Point, &[Point], &Call, i32) -> bool;

/// Steps that may fail although the call succeeds, and why.
const HARMLESS: [Harmless; 8] = [
    // Thawing is tried again at once.
    |point, _, _, _| point.step == "thaw",
    // Only `WriteCounters` needs the count of requests, and it proves nothing without it.
    |point, _, _, _| point.path.ends_with("queue/iostats"),
    // The object is deleted already; a retry removes its files.
    |point, before, _, _| {
        let in_staging = contains(&point.path, "/staging/");
        let emptied = before.first().is_some_and(|before| {
            before.step.starts_with("remove") && before.path.parent() == Some(&point.path)
        });
        in_staging && (point.step.starts_with("remove") || point.step == "sync" && emptied)
    },
    // A deleted snapshot is kept for longer, and freed with the next change.
    |point, before, _, _| {
        let goes = |point: &Point| {
            let is_kept = contains(&point.path, "/snapshots/") || contains(&point.path, "/members/");
            point.step == "rename"
                && is_kept
                && !contains(&point.path, "/staging/")
                && point.path.extension().is_none()
        };
        let renamed = before.iter().find(|point| point.step == "rename");
        // The last member of a deleted group takes the group with it, after what the call asked for is done.
        let is_done = before.iter().any(|before| contains(&before.path, "/deleted.json"));
        let group_goes = |point: &Point| point.step == "rename" && contains(&point.path, "/groups/");
        let gone = |point: &Point| goes(point) || is_done && group_goes(point);
        gone(point) || point.step == "sync" && renamed.is_some_and(gone)
    },
    // Without the link a delta compares whole maps, and is as exact.
    |point, before, _, _| {
        let replaced = before.first().filter(|before| before.step == "replace" && point.step == "sync");
        let is_next = |path: &Path| {
            let is_map = path.ends_with("changed.map") || path.ends_with("changed.map.new");
            is_map && !contains(path, "/staging/")
        };
        is_next(&point.path) || replaced.is_some_and(|replaced| is_next(&replaced.path))
    },
    // A skip map that leads to a removed snapshot is ignored.
    |point, _, _, _| {
        let name = point.path.file_name().unwrap_or_default().to_string_lossy();
        point.step.starts_with("remove") && name.starts_with("skip-")
    },
    // What was undone need not be recorded: the record then names a place that is no longer used.
    |point, _, call, _| {
        let undoes =
            matches!(call, Call::Unpublish { .. } | Call::Unstage { .. } | Call::UnpublishEphemeral { .. });
        undoes && point.path.ends_with("state.json")
    },
    // A full pool has no room to record that the snapshot was deleted, so its data is freed at once.
    |_, _, call, errno| {
        errno == nix::libc::ENOSPC && matches!(call, Call::DeleteSnapshot(_) | Call::DeleteGroup { .. })
    },
];

fn contains(path: &Path, part: &str) -> bool {
    path.to_string_lossy().contains(part)
}

/// The points of a series at which the call is interrupted: the first, and the distance to the next.
#[derive(Clone, Copy)]
pub struct Stride {
    pub first: u64,
    pub step: u64,
}

impl Stride {
    /// Every point if a number of rounds is set, as by `make crash`. Otherwise one point in twelve times `parts`, and different points
    /// in the next series and on the next pool.
    pub fn of(pool: PoolKind, series: usize, parts: usize) -> Self {
        if wanted().is_some() {
            return Stride { first: 1, step: 1 };
        }
        let parts = 4 * parts;
        let step = (POOLS.len() * parts) as u64;
        Stride { first: 1 + (pool as usize * parts + series) as u64 % step, step }
    }
}

/// A driver, its objects, and the figures.
struct CutRun {
    rig: Rig,
    scene: Scene,
    orders: Orders,
    tally: Tally,
    pool: PoolKind,
    round: usize,
    /// Whether the pool is full during each call, from before the call until the call is undone.
    is_full: bool,
    /// The pool's own disk, if any. Dropped after the driver.
    disk: Option<Disk>,
}

impl CutRun {
    async fn new(pool: PoolKind, what: &'static str) -> Self {
        let rig = Rig::start_with(pool, &FLAGS, "info").await;
        Self::on(rig, None, pool, what).await
    }

    /// The same on a pool of some hundred megabytes, which is full during each call.
    async fn on_full_pool(pool: PoolKind, what: &'static str) -> Self {
        let (disk, rig) = small_pool_with(pool, &FLAGS).await;
        let mut run = CutRun { is_full: true, ..Self::on(rig, disk, pool, what).await };
        run.scene.unmount(&mut run.rig).await;
        run
    }

    async fn on(mut rig: Rig, disk: Option<Disk>, pool: PoolKind, what: &'static str) -> Self {
        let scene = Scene::make(&mut rig).await;
        let orders = Orders::new(rig.dir.path());
        let tally = Tally::new(what, pool);
        CutRun { rig, scene, orders, tally, pool, round: 0, is_full: false, disk }
    }

    /// Interrupts a call at one point after another, until it ends before it reaches the point.
    async fn series(&mut self, case: &Case, cut: Cut, stride: Stride) {
        let mut at = stride.first;
        while self.round(case, cut, at).await {
            at += stride.step;
        }
        assert!(at > 1, "{} reaches no point", case.name);
    }

    /// Makes one round. Returns whether the point was reached.
    async fn round(&mut self, case: &Case, cut: Cut, at: u64) -> bool {
        self.round += 1;
        let name = case.name;
        if let Err(said) = self.scene.live(&mut self.rig, &case.before).await {
            self.tally.lost(&self.rig, &format!("{:?}, before {name}: {said}", self.pool));
        }
        let ballast = self.is_full.then(|| Ballast::fill(&self.rig.pool_dir()).with_metadata());
        let (asked, mut client) = (self.scene.asked(&case.call), self.rig.client.clone());
        self.orders.give(cut, at, "calls");
        let mut answer = make(&mut client, &asked).await;
        let points = self.orders.withdraw();
        let hit = points.iter().find(|point| point.hit);
        let context = match hit {
            Some(point) => format!(
                "{:?}, {name}, {cut:?} at point {at}: {} {}",
                self.pool,
                point.step,
                point.path.display()
            ),
            None => format!("{:?}, {name}, {cut:?} after the last point", self.pool),
        };
        self.tally.round(hit.is_some());
        match (hit, cut, &answer) {
            (Some(_), Cut::Kill, Answer::Done(made)) => {
                self.tally.lost(&self.rig, &format!("{context}: answered with {made:?}, and was killed"));
            }
            (None, _, Answer::Cut) => {
                self.tally.lost(&self.rig, &format!("{context}: UNAVAILABLE, or the driver died by itself"));
            }
            (Some(point), Cut::Error(errno), answer) => {
                let before = points.iter().filter(|before| before.number < point.number).rev();
                let before: Vec<Point> = before.cloned().collect();
                // The reserve was given back, and the step made again.
                let is_spent =
                    |later: &&Point| later.number > point.number && later.path.ends_with("pool/reserve");
                let is_made_again = errno == nix::libc::ENOSPC && points.iter().any(|later| is_spent(&later));
                let harmless =
                    is_made_again || HARMLESS.iter().any(|look| look(point, &before, &case.call, errno));
                self.judge(harmless, errno, answer, &context);
            }
            _ => {}
        }
        if let Some(point) = hit {
            self.tally.point(format!("{name} {cut:?} {} {}", point.number, point.step));
            // For the model a failed step interrupts the call like a kill.
            if !matches!(answer, Answer::Done(_)) {
                answer = Answer::Cut;
            }
        }
        if cut != Cut::Kill {
            self.tally.look(&mut self.rig, &mut self.scene, When::Failed, &context).await;
        }
        // The driver is also killed after the last point, when the call is done but the caller does not know. After
        // an error every second round restarts, since memory may hide what is wrong on disk.
        let is_restarted = cut == Cut::Kill || self.round.is_multiple_of(2);
        if is_restarted {
            self.rig.kill();
            self.rig.start_again().await;
        }
        if let Err(said) = self.scene.ended(&mut self.rig, asked, answer, is_restarted).await {
            self.tally.lost(&self.rig, &format!("{context}: {said}"));
        }
        let when = if is_restarted { When::Cut } else { When::Failed };
        retried(&mut self.rig, &mut self.scene, case, &mut self.tally, when, &context).await;
        if let Some(ballast) = ballast {
            ballast.remove();
        }
        hit.is_some()
    }

    /// An injected error must be reported, unless its step may fail.
    fn judge(&mut self, harmless: bool, errno: i32, answer: &Answer, context: &str) {
        let (_, expected) = ERRORS.iter().find(|(number, _)| *number == errno).expect("a known error");
        match answer {
            Answer::Done(_) if harmless => {}
            Answer::Done(_) => self.tally.lost(&self.rig, &format!("{context}: the call succeeds")),
            Answer::Failed(code, _) if code == expected => {}
            answer => self.tally.lost(&self.rig, &format!("{context}: {answer}, not {expected:?}")),
        }
    }

    async fn finish(mut self) {
        self.scene.leave(&mut self.rig).await;
        let status = self.rig.terminate();
        assert!(status.success(), "the driver ended with {status}\n{}", self.rig.log());
        drop(self.rig);
        if let Some(disk) = self.disk {
            disk.finish();
        }
    }
}

/// Rounds per pool; `None` means that a part of the points is taken, as [`Stride::of`] has it.
pub fn wanted() -> Option<usize> {
    asked("DELTAPATH_POINT_ROUNDS")
}

/// The cases to interrupt: all, unless `DELTAPATH_POINT_CALL` names one.
fn chosen() -> Vec<Case> {
    let one = std::env::var("DELTAPATH_POINT_CALL").ok();
    cases().into_iter().filter(|case| one.as_ref().is_none_or(|one| one == case.name)).collect()
}

async fn all_series(pool: PoolKind, what: &'static str, cuts: &[Cut]) {
    let mut run = CutRun::new(pool, what).await;
    loop {
        for flags in [&["--enable-attach"][..], &["--enable-attach", "--retain-deleted", "0"][..]] {
            run.rig.kill();
            run.rig.start_again_with(flags).await;
            let is_one = |case: &&Case| flags.len() == 1 || DELETIONS.contains(&case.name);
            for (number, case) in chosen().iter().filter(is_one).enumerate() {
                for (kind, cut) in cuts.iter().enumerate() {
                    let stride = Stride::of(pool, number * cuts.len() + kind, 2 * cuts.len());
                    run.series(case, *cut, stride).await;
                }
            }
        }
        if wanted().is_none_or(|rounds| run.round >= rounds) {
            break;
        }
    }
    run.finish().await;
}

/// Deletions must free a full pool even if the driver is killed in them, before any step or after the last.
#[apply(every_pool)]
async fn a_kill_in_a_deletion_on_a_full_pool_loses_nothing(pool: PoolKind) {
    let mut run = CutRun::on_full_pool(pool, "full-kill-points").await;
    let step = if wanted().is_some() { 1 } else { 3 };
    let stride = Stride { first: 1 + pool as u64 % step, step };
    for case in cases().iter().filter(|case| ["DeleteSnapshot", "DeleteGroup"].contains(&case.name)) {
        run.series(case, Cut::Kill, stride).await;
    }
    run.finish().await;
}

#[apply(every_pool)]
async fn a_kill_before_any_step_loses_nothing(pool: PoolKind) {
    all_series(pool, "kill-points", &[Cut::Kill]).await;
}

#[apply(every_pool)]
async fn a_failing_step_leaves_nothing_half_made(pool: PoolKind) {
    all_series(pool, "error-points", &ERRORS.map(|(errno, _)| Cut::Error(errno))).await;
}
