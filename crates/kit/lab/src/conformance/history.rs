//! The histories that the cases look at: which volume is written how, and when snapshots are taken.

use std::path::PathBuf;

use super::content::{Edit, device_size};
use super::plugin::Plugin;
use super::subject::{NotReady, Prepared};
use super::verdict::Wrong;
use super::volume::{OpenVolume, Snap};

/// A volume and its snapshots: never written, written, changed, changed again.
pub(super) struct Pair {
    pub open: OpenVolume,
    pub empty: Snap,
    pub first: Snap,
    pub second: Snap,
    pub third: Snap,
}

/// Published volumes that were made from `first` and `second`.
pub(super) struct Restored {
    pub first: PathBuf,
    pub second: PathBuf,
}

/// A volume before and after something was done to it.
pub(super) struct Change {
    pub before: Snap,
    pub after: Snap,
    /// A snapshot of the volume that was restored from `before`.
    pub copy: Option<Snap>,
}

/// A volume with as many changes between two snapshots as it takes.
pub(super) struct Dense {
    pub before: Snap,
    pub after: Snap,
    /// The volume, written no more; cases may modify it and let it grow.
    pub open: tokio::sync::Mutex<OpenVolume>,
}

/// The volume is written in this many places, evenly spread.
const PLACES: u64 = 32;
/// Blocks of each place.
const RUN: u64 = 16;
/// The place where single blocks alternate with holes.
const COMB: u64 = 28;
const TEETH: u64 = 64;

fn start(place: u64, blocks: u64) -> u64 {
    // Not aligned to more than a block, but for the very first.
    place * (blocks / PLACES) + place % 3
}

fn teeth(blocks: u64) -> impl Iterator<Item = u64> {
    let first = start(COMB, blocks);
    (0..TEETH).map(move |tooth| first + 2 * tooth)
}

fn first_edits(blocks: u64) -> Vec<Edit> {
    let places = (0..PLACES).filter(|place| place % 4 != 3 && *place != COMB);
    let mut edits: Vec<Edit> = places
        .map(|place| Edit::Write { start: start(place, blocks), count: RUN, seed: place + 1 })
        .collect();
    edits.extend(teeth(blocks).map(|start| Edit::Write { start, count: 1, seed: 50 }));
    edits.push(Edit::Write { start: blocks - 1, count: 1, seed: 51 });
    edits
}

/// Ranges of the second history that lose their data: by a discard, and by zeros.
pub(super) fn emptied(blocks: u64, by_discard: bool) -> Vec<(u64, u64)> {
    match by_discard {
        true => vec![
            (start(2, blocks), RUN),
            (start(14, blocks), RUN / 4),
            (start(22, blocks) + RUN / 4, RUN / 2),
        ],
        false => vec![(start(6, blocks), RUN), (start(26, blocks) + 1, RUN / 4)],
    }
}

/// Ranges that hold data only in the second.
pub(super) fn filled(blocks: u64) -> Vec<(u64, u64)> {
    let mut filled: Vec<(u64, u64)> =
        (3..PLACES).step_by(8).map(|place| (start(place, blocks), RUN / 2)).collect();
    filled.push((start(30, blocks) + RUN, RUN / 2));
    filled
}

fn second_edits(blocks: u64) -> Vec<Edit> {
    let mut edits = Vec::new();
    for place in (1..PLACES).step_by(4) {
        edits.push(Edit::Write { start: start(place, blocks) + 4, count: 2, seed: 100 + place });
    }
    for (start, count) in emptied(blocks, true) {
        edits.push(Edit::Punch { start, count });
    }
    for (start, count) in emptied(blocks, false) {
        edits.push(Edit::Zero { start, count });
    }
    edits.push(Edit::Same { start: start(10, blocks), count: RUN });
    edits.push(Edit::Write { start: start(18, blocks), count: RUN, seed: 200 });
    for (start, count) in filled(blocks) {
        edits.push(Edit::Write { start, count, seed: 300 });
    }
    edits.extend(teeth(blocks).step_by(2).map(|start| Edit::Write { start, count: 1, seed: 400 }));
    edits.push(Edit::Write { start: 0, count: 1, seed: 401 });
    edits.push(Edit::Write { start: blocks - 1, count: 1, seed: 402 });
    edits
}

fn third_edits(blocks: u64) -> Vec<Edit> {
    let mut edits = vec![
        // As it was in the first, and data where the second has none.
        Edit::Write { start: start(18, blocks), count: RUN, seed: 19 },
        Edit::Write { start: start(2, blocks), count: RUN, seed: 500 },
    ];
    for place in (7..PLACES).step_by(8) {
        edits.push(Edit::Write { start: start(place, blocks), count: RUN, seed: 600 + place });
    }
    edits
}

/// A volume with four snapshots.
pub(super) async fn pair(plugin: &Plugin) -> Prepared<Pair> {
    let mut open = plugin.open(None, plugin.settings.volume_size).await?;
    let empty = open.snapshot(plugin).await?;
    let blocks = open.blocks();
    open.write(first_edits(blocks)).await?;
    let first = open.snapshot(plugin).await?;
    open.write(second_edits(blocks)).await?;
    let second = open.snapshot(plugin).await?;
    open.write(third_edits(blocks)).await?;
    let third = open.snapshot(plugin).await?;
    Ok(Pair { open, empty, first, second, third })
}

/// Its first and its second, restored.
pub(super) async fn restored(plugin: &Plugin, pair: &Pair) -> Prepared<Restored> {
    let first = plugin.open(Some(&pair.first.id), pair.first.size).await?;
    let second = plugin.open(Some(&pair.second.id), pair.second.size).await?;
    Ok(Restored { first: first.device, second: second.device })
}

fn some_edits(blocks: u64, seed: u64) -> Vec<Edit> {
    let places = (1..8).map(|place| place * (blocks / 8) + place);
    places.map(|start| Edit::Write { start, count: RUN, seed: seed + start }).collect()
}

/// A volume with two snapshots and changes between them, published.
pub(super) async fn short(plugin: &Plugin) -> Result<(OpenVolume, Change), Wrong> {
    let mut open = plugin.open(None, plugin.settings.volume_size).await?;
    let blocks = open.blocks();
    open.write(some_edits(blocks, 1)).await?;
    let before = open.snapshot(plugin).await?;
    open.write(some_edits(blocks / 2, 2)).await?;
    let after = open.snapshot(plugin).await?;
    Ok((open, Change { before, after, copy: None }))
}

/// Lets a published volume grow; it is published afterwards.
pub(super) async fn expand(plugin: &Plugin, open: &mut OpenVolume, wanted: u64) -> Result<(), Wrong> {
    let online = plugin.claims.expand_online;
    if !online {
        plugin.detach(&open.volume.id).await?;
    }
    let (reported_size, on_node) = plugin.expand(&open.volume, wanted).await?;
    open.reported_size = reported_size;
    if !online {
        open.device = plugin.attach(&open.volume).await?;
    }
    if on_node {
        plugin.expand_node(&open.volume, wanted).await?;
    }
    open.size = device_size(&open.device)?;
    if open.size < wanted {
        return Err(Wrong::new(format!("expanded to {wanted} bytes, but the device has {}", open.size)));
    }
    Ok(())
}

/// A volume that grows between two snapshots, and is written in its new part.
pub(super) async fn expanded(plugin: &Plugin) -> Prepared<Change> {
    if !plugin.claims.expand {
        return Err(NotReady::Skip("the driver does not claim EXPAND_VOLUME".into()));
    }
    let mut open = plugin.open(None, plugin.settings.volume_size).await?;
    let old = open.blocks();
    open.write(some_edits(old, 1)).await?;
    let before = open.snapshot(plugin).await?;
    let wanted = open.size * 2;
    expand(plugin, &mut open, wanted).await?;
    let blocks = open.blocks();
    let mut edits = some_edits(old / 2, 2);
    edits.push(Edit::Write { start: old, count: RUN, seed: 3 });
    edits.push(Edit::Write { start: (old + blocks) / 2 + 1, count: RUN, seed: 4 });
    edits.push(Edit::Write { start: blocks - 1, count: 1, seed: 5 });
    open.write(edits).await?;
    let after = open.snapshot(plugin).await?;
    Ok(Change { before, after, copy: None })
}

/// Changes of the densest history.
pub(super) const MOST: u64 = 1_000_000;

/// A volume that was empty, and in which every second block is written then.
pub(super) async fn dense(plugin: &Plugin) -> Prepared<Dense> {
    let mut open = plugin.open(None, plugin.settings.volume_size).await?;
    let before = open.snapshot(plugin).await?;
    let comb = (0..open.blocks() / 2).take(MOST as usize);
    open.write(comb.map(|tooth| Edit::Write { start: 2 * tooth, count: 1, seed: tooth + 1 }).collect())
        .await?;
    let after = open.snapshot(plugin).await?;
    Ok(Dense { before, after, open: open.into() })
}

/// A volume that is restored from, in use and written to while its copy is, between two snapshots.
pub(super) async fn between(plugin: &Plugin) -> Prepared<Change> {
    let mut open = plugin.open(None, plugin.settings.volume_size).await?;
    let blocks = open.blocks();
    open.write(some_edits(blocks, 1)).await?;
    let before = open.snapshot(plugin).await?;
    open.write(some_edits(blocks / 3, 2)).await?;
    let mut copy = plugin.open(Some(&before.id), before.size).await?;
    copy.content = before.content.clone();
    copy.write(some_edits(blocks / 5, 3)).await?;
    open.write(some_edits(blocks / 7, 4)).await?;
    let after = open.snapshot(plugin).await?;
    let copy = copy.snapshot(plugin).await?;
    Ok(Change { before, after, copy: Some(copy) })
}
