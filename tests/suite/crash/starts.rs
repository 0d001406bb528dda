//! The start, the stop and hashing are interrupted at each of their steps.

use std::path::Path;
use std::process::ExitStatus;
use std::time::{Duration, Instant};

use deltapath::sys::mount;

use super::FLAGS;
use super::audit::When;
use super::cases::{FILESYSTEM, RAW, target};
use super::points::Stride;
use super::scene::Scene;
use super::tally::{Tally, last_lines};
use crate::faults::{compared, is_compared};
use testkit::content::Content;
use testkit::orders::{Cut, Orders, Point};
use testkit::{PoolKind, Rig, set_frozen, swept_dir, try_command, wait};

const CUTS: [Cut; 3] = [Cut::Kill, Cut::Error(nix::libc::EIO), Cut::Error(nix::libc::ENOSPC)];

/// The point at which an order was carried out, which counts, and a name for the round.
fn cut_at(tally: &mut Tally, what: &str, cut: Cut, points: Vec<Point>) -> (Option<Point>, String) {
    let point = points.into_iter().find(|point| point.hit);
    tally.round(point.is_some());
    let place = point.as_ref().map_or("after the last point".to_owned(), |point| {
        tally.point(format!("{what} {cut:?} {} {}", point.number, point.step));
        format!("at point {}: {} {}", point.number, point.step, point.path.display())
    });
    let context = format!("{what}, {:?}, {cut:?} {place}", tally.pool);
    (point, context)
}

/// The points of a series that are cut.
fn strides(pool: PoolKind, series: usize) -> impl Iterator<Item = u64> {
    let Stride { first, step } = Stride::of(pool, series, 2);
    (first..).step_by(step as usize)
}

/// Whether a process was killed or failed at a point, as ordered.
fn ended_as_wanted(cut: Cut, ended: ExitStatus) -> bool {
    use std::os::unix::process::ExitStatusExt;
    match cut {
        Cut::Kill => ended.signal() == Some(nix::libc::SIGKILL),
        Cut::Error(_) => ended.code().is_some_and(|code| code != 0),
    }
}

/// If a first start is interrupted, the next one completes it, with a pool that can hold volumes.
#[apply(every_pool)]
async fn a_first_start_that_is_cut_is_taken_up_by_the_next(pool: PoolKind) {
    let mut tally = Tally::new("first-start", pool);
    for (series, cut) in CUTS.into_iter().enumerate() {
        for at in strides(pool, series) {
            let (dir, _swept) = swept_dir();
            if !first_start(dir.path(), pool, cut, at, &mut tally).await {
                break;
            }
        }
    }
}

fn is_socket(path: &Path) -> bool {
    path.ends_with("csi.sock")
}

/// Steps whose failure a start may ignore. A device whose requests are not counted works too, and never counts as quiet. If
/// the probe cannot clone, the pool is made in an image. Without the reserve nothing new is made, and calls try again to take it.
/// With it, the state of a volume that found no space is written again.
fn is_passed_over(cut: Cut, point: &Point) -> bool {
    let is_probe = point.step == "clone blocks into" && point.path.ends_with("data/pool");
    let is_reserve = point.path.to_string_lossy().contains("/reserve")
        || (point.step == "sync" && (point.path.ends_with("data") || point.path.ends_with("data/pool")));
    let is_tried_again = cut == Cut::Error(nix::libc::ENOSPC) && point.path.ends_with("state.json");
    cut != Cut::Kill && (is_probe || is_reserve || is_tried_again || point.path.ends_with("queue/iostats"))
}

/// Steps of a start that remove what is not needed. If they fail, the start logs it and continues.
fn clears_up(point: &Point) -> bool {
    let path = point.path.to_string_lossy();
    point.step == "sync the filesystem of"
        || path.contains("/staging")
        || path.contains("/group-empty")
        || path.ends_with("/groups")
}

/// Whether the point was reached.
async fn first_start(dir: &Path, pool: PoolKind, cut: Cut, at: u64, tally: &mut Tally) -> bool {
    let mut orders = Orders::new(dir);
    orders.give(cut, at, "main");
    let flags = FLAGS.map(String::from);
    let outcome = try_command(dir, pool, &flags, &[], "info").await;
    let (point, context) = cut_at(tally, "first start", cut, orders.withdraw());
    let log = || last_lines(&std::fs::read_to_string(dir.join("driver.log")).unwrap_or_default());
    match outcome {
        // The socket answers a moment before the last step of the start.
        Ok((mut child, _)) if point.as_ref().is_some_and(|point| is_socket(&point.path)) => {
            let ended = wait(&mut child, Duration::from_secs(20));
            assert!(ended_as_wanted(cut, ended), "{context}: it ended with {ended}\n{}", log());
        }
        Ok((mut child, _)) => {
            child.kill().expect("kill");
            child.wait().expect("wait");
            let cut_off = point.as_ref().is_some_and(|point| !is_passed_over(cut, point));
            assert!(!cut_off, "{context}: it started\n{}", log());
        }
        Err(ended) => {
            let is_wanted = point.is_some() && ended_as_wanted(cut, ended);
            assert!(is_wanted, "{context}: it ended with {ended}\n{}", log());
            if cut != Cut::Kill {
                testkit::nothing_left(dir);
            }
        }
    }
    let (mut child, mut client) = try_command(dir, pool, &flags, &[], "info")
        .await
        .unwrap_or_else(|ended| panic!("{context}: the next start ends with {ended}\n{}", log()));
    let request = csi_client::new_volume("volume", 1 << 20, csi_client::block_capability());
    let made = client.create_volume(request).await;
    testkit::signal(child.id(), nix::sys::signal::Signal::SIGTERM);
    let status = wait(&mut child, Duration::from_secs(60));
    made.unwrap_or_else(|error| panic!("{context}: {error}"));
    assert!(status.success(), "{context}: the next driver ends with {status}");
    let mut strangers = testkit::names(&dir.join("data"));
    strangers
        .retain(|name| !["deltapath.json", "lock", "pool", "pool.img", "reserve"].contains(&name.as_str()));
    assert!(strangers.is_empty(), "{context}: {strangers:?} are left");
    point.is_some()
}

/// What a driver that died leaves to the next: half-removed objects, a frozen filesystem, and a pool that is mounted or not.
async fn disorder(rig: &mut Rig, scene: &Scene, detached: bool) {
    rig.kill();
    let pool = rig.pool_dir();
    let junk = pool.join("staging/snap-half-made");
    std::fs::create_dir_all(junk.join("bytes")).expect("mkdir");
    std::fs::write(junk.join("bytes/data.img"), "half").expect("write");
    std::fs::create_dir_all(pool.join("groups/group-empty/members")).expect("mkdir");
    std::fs::write(pool.join("groups/group-empty/deleted.json"), "").expect("write");
    if detached {
        // As after a reboot, before kubelet has staged anything.
        let left = deltapath::sys::sweep::sweep(rig.dir.path()).expect("sweep");
        assert!(left.is_empty(), "{left:?}");
        return;
    }
    set_frozen(&pool, &scene.files);
    let target = scene.path(target(FILESYSTEM));
    testkit::ok(std::process::Command::new("fsfreeze").arg("--freeze").arg(&target));
    assert!(mount::mounted_at(&target).expect("mounts").is_some());
}

#[apply(every_pool)]
async fn a_start_that_is_cut_while_it_recovers_is_taken_up_by_the_next(pool: PoolKind) {
    let mut tally = Tally::new("recovering-start", pool);
    let mut rig = Rig::start_with(pool, &FLAGS, "info").await;
    let mut scene = Scene::make(&mut rig).await;
    let mut orders = Orders::new(rig.dir.path());
    for (series, (cut, detached)) in CUTS.into_iter().flat_map(|cut| [(cut, false), (cut, true)]).enumerate()
    {
        for at in strides(pool, series) {
            disorder(&mut rig, &scene, detached).await;
            orders.give(cut, at, "main");
            let outcome = rig.try_start_again().await;
            let what = if detached { "start on a detached pool" } else { "start" };
            let (point, context) = cut_at(&mut tally, what, cut, orders.withdraw());
            let Some(point) = point else {
                outcome.unwrap_or_else(|ended| panic!("{context}: {ended}\n{}", last_lines(&rig.log())));
                scene.use_again(&mut rig).await;
                tally.look(&mut rig, &mut scene, When::Undone, &context).await;
                break;
            };
            match outcome {
                Err(ended) => {
                    assert!(ended_as_wanted(cut, ended), "{context}: {ended}");
                    rig.start_again().await;
                }
                // The socket answers a moment before the last step of the start.
                Ok(()) if is_socket(&point.path) || is_passed_over(cut, &point) => {
                    rig.crash().await;
                }
                // If one object cannot be repaired, the start logs it and continues, and the next start tries again.
                Ok(()) => {
                    let reported = last_lines(&rig.log());
                    let is_its_sync = point.step == "sync" && point.path.join("record.json").exists();
                    let alone = point.path.ends_with("state.json") || point.step == "thaw" || is_its_sync;
                    let said = match clears_up(&point) {
                        true => {
                            reported.contains("objects that a crash left incomplete could not be removed")
                        }
                        false => alone && reported.contains("may be frozen"),
                    };
                    assert!(cut != Cut::Kill && said, "{context}: it started\n{reported}");
                    rig.crash().await;
                }
            }
            scene.use_again(&mut rig).await;
            tally.look(&mut rig, &mut scene, When::Undone, &context).await;
        }
    }
    scene.leave(&mut rig).await;
    rig.finish();
}

#[apply(every_pool)]
async fn a_stop_that_is_cut_leaves_what_the_next_start_finds(pool: PoolKind) {
    let mut tally = Tally::new("stop", pool);
    let mut rig = Rig::start_with(pool, &FLAGS, "info").await;
    let mut scene = Scene::make(&mut rig).await;
    let mut orders = Orders::new(rig.dir.path());
    let mut turns = CUTS.into_iter().map(|cut| (cut, 1)).collect::<Vec<_>>();
    while let Some((cut, at)) = turns.pop() {
        scene.leave(&mut rig).await;
        orders.give(cut, at, "main");
        let ended = tokio::task::block_in_place(|| rig.terminate());
        let (point, context) = cut_at(&mut tally, "stop", cut, orders.withdraw());
        match &point {
            None => assert!(ended.success(), "{context}: {ended}\n{}", last_lines(&rig.log())),
            // The next driver replaces a stale socket.
            Some(point) if is_socket(&point.path) && cut != Cut::Kill => {
                assert!(ended.success(), "{context}: {ended}");
            }
            Some(_) => {
                assert!(ended_as_wanted(cut, ended), "{context}: {ended}\n{}", last_lines(&rig.log()));
            }
        }
        turns.extend(point.map(|_| (cut, at + 1)));
        rig.start_again().await;
        scene.use_again(&mut rig).await;
        tally.look(&mut rig, &mut scene, When::Undone, &context).await;
    }
    scene.leave(&mut rig).await;
    rig.finish();
}

/// Hashing is interrupted. Whether its hashes count yet or not, deltas are exact, and the next start does the rest.
#[apply(every_pool)]
async fn hashing_that_is_cut_is_done_by_the_next_start_and_no_delta_is_wrong(pool: PoolKind) {
    let mut tally = Tally::new("hashing", pool);
    let mut rig = Rig::start_with(pool, &FLAGS, "info").await;
    let mut scene = Scene::make(&mut rig).await;
    let mut orders = Orders::new(rig.dir.path());
    let mut content = Content::default();
    let raw = scene.raw.clone();
    let device = scene.path(target(RAW));
    let mut round = 0;
    for (series, cut) in CUTS.into_iter().enumerate() {
        for at in strides(pool, series) {
            round += 1;
            // The base is hashed; then blocks change in several pages of hashes.
            let base = rig.snapshot(&format!("base {round}"), &raw).await;
            compared(&rig, &[&base]).await;
            for (place, start) in [(1, 10), (2, 400), (3, 900)] {
                content.write(&device, start, 30, (round % 50 * 4 + place) as u8);
            }
            scene.volumes.remove(&raw);
            orders.give(cut, at, "hashing");
            let name = format!("target {round}");
            // Hashing is interrupted before the answer to CreateSnapshot, or after it.
            let early = rig.client.create_snapshot(&name, &raw).await;
            if let Ok(target) = &early {
                worked_or_cut(&orders, &target.snapshot_id, &rig).await;
            }
            let (point, context) = cut_at(&mut tally, "hashing", cut, orders.withdraw());
            let reached = point.is_some();
            if let Err(error) = early {
                assert!(reached && cut == Cut::Kill, "{context}: {error}");
            }
            if cut != Cut::Kill {
                tally.look(&mut rig, &mut scene, When::Cut, &context).await;
            }
            rig.crash().await;
            let target = rig.snapshot(&name, &raw).await;
            compared(&rig, &[&target]).await;
            tally.look(&mut rig, &mut scene, When::Done, &context).await;
            for id in [base, target] {
                rig.client.delete_snapshot(&id).await.expect("delete");
            }
            tally.look(&mut rig, &mut scene, When::Undone, &context).await;
            if !reached {
                break;
            }
        }
    }
    scene.leave(&mut rig).await;
    rig.finish();
}

/// Waits until the hashing of a snapshot is done or was interrupted.
async fn worked_or_cut(orders: &Orders, snapshot: &str, rig: &Rig) {
    let deadline = Instant::now() + Duration::from_secs(90);
    while !orders.passed().iter().any(|point| point.hit) {
        assert!(Instant::now() < deadline, "{snapshot} is not hashed\n{}", last_lines(&rig.log()));
        let done = is_compared(&rig.snapshot_dir(snapshot));
        // Some steps follow after the map is replaced.
        tokio::time::sleep(Duration::from_millis(if done { 30 } else { 2 })).await;
        if done {
            return;
        }
    }
}
