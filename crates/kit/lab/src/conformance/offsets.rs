//! `starting_offset`: what an answer that starts later has to hold, and not to hold.

use super::answer::{Answer, missing, name, unexpected};
use super::content::{BLOCK, Edit, blocking};
use super::errors;
use super::fixtures::Fixtures;
use super::format::too_few;
use super::life::clear;
use super::ranges::Ranges;
use super::subject::Kind;
use super::subject::Subject;
use super::verdict::{Judged, Verdict, Wrong, remarked, remarked_once, without_message};
use std::os::unix::fs::FileExt;

use csi_client::Question;
use tonic::Code;

/// Every kind of offset there is in an answer, with what it is.
fn kinds(whole: &Answer, capacity: u64) -> Result<Vec<(u64, &'static str)>, Wrong> {
    let tuples: Vec<(u64, u64)> = whole
        .tuples()
        .filter(|(offset, size)| *offset >= 0 && *size > 0 && offset.checked_add(*size).is_some())
        .map(|(offset, size)| (offset as u64, size as u64))
        .collect();
    let last = *tuples.last().ok_or_else(|| Wrong::new("the answer has no tuple to start in"))?;
    let (offset, size) = tuples[tuples.len() / 2];
    let mut kinds = vec![
        (0, "the start of the volume"),
        (1, "a byte behind the start"),
        (offset, "the first byte of a tuple"),
        (offset + 1, "a byte behind the first of a tuple"),
        (offset + size / 2, "the middle of a tuple"),
        (offset + size - 1, "the last byte of a tuple"),
        (offset + size, "the end of a tuple"),
        (last.0, "the start of the last tuple"),
        (last.0 + last.1 - 1, "the last byte of the last tuple"),
        (capacity - 1, "the last byte of the volume"),
    ];
    let gap = tuples.windows(2).find(|pair| pair[0].0 + pair[0].1 < pair[1].0);
    if let Some(pair) = gap {
        let end = pair[0].0 + pair[0].1;
        kinds.push((end, "the start of a gap"));
        kinds.push((end + (pair[1].0 - end) / 2, "the middle of a gap"));
        kinds.push((pair[1].0 - 1, "the last byte of a gap"));
    }
    kinds.retain(|(offset, _)| *offset < capacity);
    Ok(kinds)
}

/// Runs through all kinds of offsets: no tuple may end at or before one.
pub(super) async fn first_tuple(subject: &impl Subject, kind: Kind) -> Judged {
    let question = subject.question(kind)?;
    let capacity = subject.size()?;
    let whole = subject.ask(&question, 0, 0).await?;
    if whole.tuples().next().is_none() {
        return subject.without_tuples();
    }
    for (offset, what) in kinds(&whole, capacity)? {
        for max_results in [0, 1] {
            let answer = subject.ask(&question, offset as i64, max_results).await?;
            early(&answer, &question, subject, offset, max_results).map_err(|wrong| wrong.at(what))?;
        }
    }
    Ok(Verdict::Pass)
}

fn early(
    answer: &Answer,
    question: &Question,
    subject: &impl Subject,
    offset: u64,
    max: i32,
) -> Result<(), Wrong> {
    match answer.tuples().find(|(start, size)| start.saturating_add(*size) <= offset as i64) {
        None => Ok(()),
        Some((start, size)) => {
            let call = name(question, &subject.options(offset as i64, max));
            Err(Wrong::new(format!("{call}: ({start}, {size}) ends at or before the offset")))
        }
    }
}

/// What lies behind `offset` in the whole answer has to be in `answer`. Tells what is there besides.
fn rest(whole: &Answer, answer: &Answer, offset: u64) -> Result<Option<String>, Wrong> {
    let wanted = whole.ranges().within(offset, u64::MAX);
    let listed = answer.ranges().within(offset, u64::MAX);
    missing("that the whole answer has behind the offset", &wanted, &listed)?;
    let more = listed.minus(&wanted).bytes();
    Ok((more > 0).then(|| format!("from offset {offset} on it lists {more} bytes more than from 0 on")))
}

/// The same offsets: nothing behind them is lost.
pub(super) async fn complete(subject: &impl Subject, kind: Kind) -> Judged {
    let question = subject.question(kind)?;
    let capacity = subject.size()?;
    let whole = subject.ask(&question, 0, 0).await?;
    if whole.tuples().next().is_none() {
        return subject.without_tuples();
    }
    let mut remarks = Vec::new();
    for (offset, what) in kinds(&whole, capacity)? {
        let answer = subject.ask(&question, offset as i64, 0).await?;
        let rest = rest(&whole, &answer, offset);
        remarks.extend(rest.map_err(|wrong| wrong.at(&format!("starting_offset {offset}, {what}")))?);
    }
    remarked(remarks)
}

/// Cut after each message, and continued where its last tuple ended.
pub(super) async fn resume(subject: &impl Subject, kind: Kind) -> Judged {
    let question = subject.question(kind)?;
    resume_at_each(subject, &question, subject.size()?).await
}

/// The same of a delta over an expansion: base and target have different sizes.
pub(super) async fn resume_expanded(fixtures: &Fixtures) -> Judged {
    let change = fixtures.expanded()?;
    resume_at_each(fixtures, &change.after.since(&change.before), change.after.size).await
}

async fn resume_at_each<S: Subject>(subject: &S, question: &Question, size_of_volume: u64) -> Judged {
    let mut remarks = Vec::new();
    for max_results in [1, 5] {
        let whole = subject.ask(question, 0, max_results).await?;
        if let Some(skip) = too_few(subject, [&whole])? {
            return Ok(skip);
        }
        let step = whole.messages.len() / S::RESUMES + 1;
        for (number, message) in whole.messages.iter().enumerate().step_by(step) {
            let Some((offset, size)) = message.tuples.last() else { continue };
            let next = offset.saturating_add(*size);
            if next as u64 >= size_of_volume {
                continue;
            }
            let answer = subject.ask(question, next, 0).await?;
            let place = || format!("continued after message {number}, at {next}");
            early(&answer, question, subject, next as u64, 0).map_err(|wrong| wrong.at(&place()))?;
            remarks.extend(rest(&whole, &answer, next as u64).map_err(|wrong| wrong.at(&place()))?);
        }
    }
    remarked_once(remarks)
}

/// Bytes at the start and at the end of blocks, as well as whole blocks. A driver that compares from an unaligned offset on, but
/// names aligned blocks, finds a whole block in both of the windows that it is in, and these in the wrong one alone.
pub(super) async fn partial(fixtures: &Fixtures) -> Judged {
    /// Bytes that change.
    const FEW: u64 = 512;
    let mut open = fixtures.plugin.open(None, fixtures.plugin.settings.volume_size).await?;
    let step = open.blocks() / 32;
    let places: Vec<u64> = (1..31).map(|place| place * step).collect();
    open.write(
        places.iter().map(|start| Edit::Write { start: *start, count: 3, seed: *start + 1 }).collect(),
    )
    .await?;
    let before = open.snapshot(&fixtures.plugin).await?;
    // The first bytes of a block, the last ones, and the whole block, in turn.
    let changed: Vec<std::ops::Range<u64>> = places
        .iter()
        .zip([(0, FEW), (BLOCK - FEW, BLOCK), (0, BLOCK)].into_iter().cycle())
        .map(|(block, (from, to))| (block + 1) * BLOCK + from..(block + 1) * BLOCK + to)
        .collect();
    let (device, ranges) = (open.device.clone(), changed.clone());
    blocking(move |_| overwrite(&device, &ranges)).await?;
    let after = open.snapshot(&fixtures.plugin).await?;
    let question = after.since(&before);
    let must = Ranges::of(changed.iter().cloned());
    let listed = fixtures.ask(&question, 0, 0).await?.ranges();
    let whole = missing("that changed", &must, &listed);
    let mut found = whole.map_err(|wrong| wrong.at("from offset 0"));
    let first = places[0] * BLOCK;
    for offset in [1, FEW, BLOCK / 2, BLOCK - 1, first - 1, first + BLOCK - FEW, first + 1] {
        if found.is_err() {
            break;
        }
        let listed = fixtures.ask(&question, offset as i64, 0).await?.ranges();
        let behind = must.within(offset, u64::MAX);
        found = missing("that changed behind the offset", &behind, &listed)
            .map_err(|wrong| wrong.at(&format!("starting_offset {offset}")));
    }
    clear(fixtures, &open.volume.id, &[&after, &before]).await?;
    found.map(|()| Verdict::Pass)
}

/// Writes other bytes over these, and nothing else.
fn overwrite(device: &std::path::Path, ranges: &[std::ops::Range<u64>]) -> Result<(), Wrong> {
    let file = std::fs::File::options().read(true).write(true).open(device)?;
    for range in ranges {
        let mut bytes = vec![0; (range.end - range.start) as usize];
        file.read_exact_at(&mut bytes, range.start)?;
        bytes.iter_mut().for_each(|byte| *byte ^= 0xff);
        file.write_all_at(&bytes, range.start)?;
    }
    Ok(file.sync_all()?)
}

/// An offset at the very end, where a client is that has read a tuple up to the capacity.
pub(super) async fn at_capacity(subject: &impl Subject, kind: Kind) -> Judged {
    let question = subject.question(kind)?;
    let whole = subject.ask(&question, 0, 0).await?;
    let capacity = whole.capacity().ok_or_else(|| Wrong::new("OK without a message"))?;
    let options = subject.options(capacity, 0);
    let answer = subject.try_ask(&question, &options).await?;
    match &answer.end {
        Ok(()) if answer.tuples().next().is_some() => {
            Err(unexpected(&question, &options, &answer, "OK without tuples"))
        }
        Ok(()) if answer.messages.is_empty() => without_message(),
        Ok(()) => Ok(Verdict::Pass),
        Err(status) if status.code() == Code::OutOfRange => Ok(Verdict::Allowed(
            "OUT_OF_RANGE, though the offset does not exceed the volume: a client that continues after a tuple \
             up to the capacity meets it"
                .into(),
        )),
        Err(_) => Err(unexpected(&question, &options, &answer, "OK without tuples")),
    }
}

/// Offsets that must be refused with OUT_OF_RANGE.
async fn refused(subject: &impl Subject, kind: Kind, offsets: &[i64]) -> Judged {
    let question = subject.question(kind)?;
    for offset in offsets {
        let options = subject.options(*offset, 0);
        errors::refused(subject, std::slice::from_ref(&question), &options, Code::OutOfRange, &[]).await?;
    }
    Ok(Verdict::Pass)
}

pub(super) async fn beyond(subject: &impl Subject, kind: Kind) -> Judged {
    let size = subject.end()?;
    refused(subject, kind, &[size + 1, size + 4096, size * 2, i64::MAX]).await
}

pub(super) async fn negative(subject: &impl Subject, kind: Kind) -> Judged {
    refused(subject, kind, &[-1, -4096, i64::MIN]).await
}
