//! Whether the answers are whole: everything that the suite wrote is in a tuple, and nothing that a
//! restored volume shows lies outside.
//!
//! Completeness is a lower bound, since the spec lets a driver list more than what changed. More listed blocks, rounded to the
//! driver's own unit, are a remark.

use super::answer::{Answer, missing, unit};
use super::content::{BLOCK, blocking, differs_outside};
use super::fixtures::Fixtures;
use super::history::{emptied, filled};
use super::ranges::Ranges;
use super::subject::{Kind, Subject};
use super::verdict::{Judged, Verdict, Wrong, remarked, remarked_once, without_message};
use super::volume::Snap;

/// Says how much more is listed than had to be, beyond the driver's own unit.
fn more(listed: &Ranges, may: &Ranges, unit: u64, what: &str) -> Vec<String> {
    let more = listed.minus(&may.rounded(unit)).bytes();
    match more {
        0 => Vec::new(),
        more => vec![format!("also lists {more} bytes {what}")],
    }
}

/// The unit of the driver's tuples.
async fn learned(fixtures: &Fixtures) -> Result<u64, Wrong> {
    let mut answers = Vec::new();
    for kind in [Kind::Allocated, Kind::Delta] {
        // One that is refused teaches nothing, and is for other cases to judge.
        answers.push(fixtures.try_ask(&fixtures.question(kind)?, &fixtures.options(0, 0)).await?);
    }
    Ok(unit(&answers).max(BLOCK))
}

/// What a snapshot holds is in its answer.
pub(super) async fn check_allocated(fixtures: &Fixtures, snap: &Snap) -> Result<Vec<String>, Wrong> {
    let listed = fixtures.ask(&snap.allocated(), 0, 0).await?.ranges();
    missing("that were written", &snap.content.data(), &listed)?;
    Ok(more(
        &listed,
        &snap.content.written(),
        learned(fixtures).await?,
        "that were never written, or discarded",
    ))
}

/// What changed between two snapshots is in the answer.
pub(super) async fn check_delta(
    fixtures: &Fixtures,
    base: &Snap,
    target: &Snap,
) -> Result<Vec<String>, Wrong> {
    let changed = target.content.changed_since(&base.content);
    let listed = fixtures.ask(&target.since(base), 0, 0).await?.ranges();
    missing("that changed", &changed, &listed)?;
    Ok(more(&listed, &changed, learned(fixtures).await?, "whose content is the same in both"))
}

pub(super) async fn written(fixtures: &Fixtures) -> Judged {
    let pair = fixtures.pair()?;
    let mut remarks = Vec::new();
    for snap in [&pair.first, &pair.second, &pair.third] {
        remarks.extend(check_allocated(fixtures, snap).await?);
    }
    remarked_once(remarks)
}

pub(super) async fn changed(fixtures: &Fixtures) -> Judged {
    let pair = fixtures.pair()?;
    let mut remarks = check_delta(fixtures, &pair.first, &pair.second).await?;
    remarks.extend(check_delta(fixtures, &pair.second, &pair.third).await?);
    remarked_once(remarks)
}

/// From an empty snapshot to a written one, and over one in between.
pub(super) async fn across(fixtures: &Fixtures) -> Judged {
    let pair = fixtures.pair()?;
    let mut remarks = check_delta(fixtures, &pair.first, &pair.third).await?;
    remarks.extend(check_delta(fixtures, &pair.empty, &pair.third).await?);
    remarked_once(remarks)
}

/// Some ranges of the second history, in the answer to what changed since the first.
async fn some_changed(fixtures: &Fixtures, blocks: Vec<(u64, u64)>, what: &str) -> Result<(), Wrong> {
    let must = Ranges::of(blocks.into_iter().map(|(start, count)| start * BLOCK..(start + count) * BLOCK));
    let listed = fixtures.ask(&fixtures.question(Kind::Delta)?, 0, 0).await?.ranges();
    missing(what, &must, &listed)
}

pub(super) async fn discarded(fixtures: &Fixtures) -> Judged {
    let pair = fixtures.pair()?;
    if !pair.second.content.discards {
        return Ok(Verdict::Skip("the device takes no discards".into()));
    }
    some_changed(fixtures, emptied(pair.open.blocks(), true), "that were discarded").await?;
    Ok(Verdict::Pass)
}

pub(super) async fn zeroed(fixtures: &Fixtures) -> Judged {
    let blocks = fixtures.pair()?.open.blocks();
    some_changed(fixtures, emptied(blocks, false), "that were overwritten with zeros").await?;
    Ok(Verdict::Pass)
}

pub(super) async fn new_data(fixtures: &Fixtures) -> Judged {
    let blocks = fixtures.pair()?.open.blocks();
    some_changed(fixtures, filled(blocks), "that were written for the first time").await?;
    Ok(Verdict::Pass)
}

/// A full backup, as a tool would make it: the restored volume has nothing outside of the tuples.
pub(super) async fn full_backup(fixtures: &Fixtures) -> Judged {
    let (snap, device) = (fixtures.pair()?.second.clone(), fixtures.restored()?.second.clone());
    let listed = fixtures.ask(&snap.allocated(), 0, 0).await?.ranges();
    blocking(move |stop| {
        snap.content.compare(&device, snap.size, stop).map_err(|wrong| wrong.at("the restored volume"))?;
        match differs_outside(&device, None, &listed, snap.size, stop)? {
            None => Ok(Verdict::Pass),
            Some(byte) => {
                Err(Wrong::new(format!("the restored volume has data at byte {byte}, outside of all tuples")))
            }
        }
    })
    .await
}

/// An incremental one: outside of the tuples both restored volumes are equal.
pub(super) async fn incremental_backup(fixtures: &Fixtures) -> Judged {
    let (snap, restored) = (fixtures.pair()?.second.clone(), fixtures.restored()?);
    let (first, second) = (restored.first.clone(), restored.second.clone());
    let listed = fixtures.ask(&fixtures.question(Kind::Delta)?, 0, 0).await?.ranges();
    blocking(move |stop| match differs_outside(&second, Some(&first), &listed, snap.size, stop)? {
        None => Ok(Verdict::Pass),
        Some(byte) => {
            Err(Wrong::new(format!("the restored volumes differ at byte {byte}, outside of all tuples")))
        }
    })
    .await
}

/// An answer that has to be without tuples; more is allowed.
fn nothing(answer: &Answer, what: &str) -> Judged {
    let bytes = answer.ranges().bytes();
    if answer.messages.is_empty() {
        return without_message();
    }
    remarked(if bytes > 0 { vec![format!("lists {bytes} bytes, though {what}")] } else { Vec::new() })
}

/// A volume that was never written to.
pub(super) async fn never_written(fixtures: &Fixtures) -> Judged {
    let empty = &fixtures.pair()?.empty;
    let answer = fixtures.ask(&empty.allocated(), 0, 0).await?;
    right_capacity(&answer, empty)?;
    nothing(&answer, "the volume was never written")
}

/// Two snapshots with nothing between them.
pub(super) async fn unchanged(fixtures: &Fixtures) -> Judged {
    let open = &fixtures.pair()?.open;
    let (before, after) = (open.snapshot(&fixtures.plugin).await?, open.snapshot(&fixtures.plugin).await?);
    let answer = fixtures.ask(&after.since(&before), 0, 0).await?;
    right_capacity(&answer, &after)?;
    let judged = nothing(&answer, "nothing changed");
    fixtures.plugin.delete_snapshot(&after.id).await?;
    fixtures.plugin.delete_snapshot(&before.id).await?;
    judged
}

/// The capacity that an answer tells, if it tells one, is the snapshot's.
pub(super) fn right_capacity(answer: &Answer, snap: &Snap) -> Result<(), Wrong> {
    match answer.capacity() {
        Some(capacity) if capacity != snap.size as i64 && capacity != snap.reported_size => {
            Err(Wrong::new(format!(
                "volume_capacity_bytes is {capacity}, the volume had {} when the snapshot was taken",
                snap.size
            )))
        }
        _ => Ok(()),
    }
}
