//! The histories that the cases look at: which volume is written how, and when snapshots are taken.

use super::case::Wrong;
use super::content::{Edit, device_size};
use super::lab::{Change, Lab, NotReady, Pair, Prepared, Restored};

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
pub(super) async fn pair(lab: &Lab) -> Prepared<Pair> {
    let mut pen = lab.pen(None, lab.plugin.settings.volume_size).await?;
    let empty = pen.snapshot(lab).await?;
    let blocks = pen.blocks();
    pen.write(first_edits(blocks)).await?;
    let first = pen.snapshot(lab).await?;
    pen.write(second_edits(blocks)).await?;
    let second = pen.snapshot(lab).await?;
    pen.write(third_edits(blocks)).await?;
    let third = pen.snapshot(lab).await?;
    Ok(Pair { pen, empty, first, second, third })
}

/// Its first and its second, restored.
pub(super) async fn restored(lab: &Lab) -> Prepared<Restored> {
    let pair = lab.pair()?;
    let first = lab.pen(Some(&pair.first.id), pair.first.size).await?;
    let second = lab.pen(Some(&pair.second.id), pair.second.size).await?;
    Ok(Restored { first: first.device, second: second.device })
}

fn some_edits(blocks: u64, seed: u64) -> Vec<Edit> {
    let places = (1..8).map(|place| place * (blocks / 8) + place);
    places.map(|start| Edit::Write { start, count: RUN, seed: seed + start }).collect()
}

/// A volume with two snapshots and changes between them, published.
pub(super) async fn short(lab: &Lab) -> Result<(super::lab::Pen, Change), Wrong> {
    let mut pen = lab.pen(None, lab.plugin.settings.volume_size).await?;
    let blocks = pen.blocks();
    pen.write(some_edits(blocks, 1)).await?;
    let before = pen.snapshot(lab).await?;
    pen.write(some_edits(blocks / 2, 2)).await?;
    let after = pen.snapshot(lab).await?;
    Ok((pen, Change { before, after, copy: None }))
}

/// A volume that grows between two snapshots, and is written in its new part.
pub(super) async fn expanded(lab: &Lab) -> Prepared<Change> {
    let claims = &lab.plugin.claims;
    if !claims.expand {
        return Err(NotReady::Skip("the driver does not claim EXPAND_VOLUME".into()));
    }
    let mut pen = lab.pen(None, lab.plugin.settings.volume_size).await?;
    let old = pen.blocks();
    pen.write(some_edits(old, 1)).await?;
    let before = pen.snapshot(lab).await?;
    if !claims.expand_online {
        lab.plugin.detach(&pen.volume.id).await?;
    }
    let wanted = pen.size * 2;
    let (told, on_node) = lab.plugin.expand(&pen.volume, wanted).await?;
    pen.told = told;
    if !claims.expand_online {
        pen.device = lab.plugin.attach(&pen.volume).await?;
    }
    if on_node {
        lab.plugin.expand_node(&pen.volume, wanted).await?;
    }
    pen.size = device_size(&pen.device)?;
    if pen.size < wanted {
        let grown = format!("expanded to {wanted} bytes, but the device has {}", pen.size);
        return Err(Wrong::new(grown).into());
    }
    let blocks = pen.blocks();
    let mut edits = some_edits(old / 2, 2);
    edits.push(Edit::Write { start: old, count: RUN, seed: 3 });
    edits.push(Edit::Write { start: (old + blocks) / 2 + 1, count: RUN, seed: 4 });
    edits.push(Edit::Write { start: blocks - 1, count: 1, seed: 5 });
    pen.write(edits).await?;
    let after = pen.snapshot(lab).await?;
    Ok(Change { before, after, copy: None })
}

/// A volume that is restored from, in use and written to while its copy is, between two snapshots.
pub(super) async fn between(lab: &Lab) -> Prepared<Change> {
    let mut pen = lab.pen(None, lab.plugin.settings.volume_size).await?;
    let blocks = pen.blocks();
    pen.write(some_edits(blocks, 1)).await?;
    let before = pen.snapshot(lab).await?;
    pen.write(some_edits(blocks / 3, 2)).await?;
    let mut copy = lab.pen(Some(&before.id), before.size).await?;
    copy.content = before.content.clone();
    copy.write(some_edits(blocks / 5, 3)).await?;
    pen.write(some_edits(blocks / 7, 4)).await?;
    let after = pen.snapshot(lab).await?;
    let copy = copy.snapshot(lab).await?;
    Ok(Change { before, after, copy: Some(copy) })
}
