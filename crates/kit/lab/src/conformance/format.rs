//! The form of an answer: tuples, type, capacity, sizes of messages.

use super::answer::{Answer, name};
use super::fixtures::Fixtures;
use super::subject::Kind;
use super::subject::Subject;
use super::verdict::{Judged, Verdict, Wrong, remarked};
use proto::BlockMetadataType;

/// Answers to one question, cut in different ways, each under its name.
async fn looks(subject: &impl Subject, kind: Kind) -> Result<Vec<(String, Answer)>, Wrong> {
    let question = subject.question(kind)?;
    let middle = (subject.size()? / 2) as i64;
    let mut looks = Vec::new();
    for (offset, max_results) in [(0, 0), (0, 1), (0, 3), (middle, 2)] {
        let answer = subject.ask(&question, offset, max_results).await?;
        looks.push((name(&question, &subject.options(offset, max_results)), answer));
    }
    Ok(looks)
}

/// Why there is not enough to look at, if so: a suite that saw no two tuples has compared nothing.
pub(super) fn too_few<'a, S: Subject>(
    subject: &S,
    answers: impl IntoIterator<Item = &'a Answer>,
) -> Result<Option<Verdict>, Wrong> {
    match answers.into_iter().map(|answer| answer.tuples().count()).max() {
        None | Some(0) => subject.without_tuples().map(Some),
        Some(1) => Ok(Some(Verdict::Skip(format!("no answer has two tuples to compare: {}", S::SPREAD)))),
        Some(_) => Ok(None),
    }
}

fn answers(looks: &[(String, Answer)]) -> impl Iterator<Item = &Answer> {
    looks.iter().map(|(_, answer)| answer)
}

/// Asks of each pair of neighbouring tuples, in a message and across, whether it is right.
async fn neighbours(
    subject: &impl Subject,
    kind: Kind,
    right: fn((i64, i64), (i64, i64)) -> bool,
    what: &str,
) -> Judged {
    let looks = looks(subject, kind).await?;
    if let Some(skip) = too_few(subject, answers(&looks))? {
        return Ok(skip);
    }
    for (call, answer) in &looks {
        let tuples: Vec<(i64, i64)> = answer.tuples().collect();
        if let Some(pair) = tuples.windows(2).find(|pair| !right(pair[0], pair[1])) {
            let ((a, b), (c, d)) = (pair[0], pair[1]);
            return Err(Wrong::new(format!("{call}: ({c}, {d}) {what} ({a}, {b})")));
        }
    }
    Ok(Verdict::Pass)
}

pub(super) async fn order(subject: &impl Subject, kind: Kind) -> Judged {
    neighbours(subject, kind, |a, b| a.0 < b.0, "does not start after its predecessor").await
}

pub(super) async fn overlap(subject: &impl Subject, kind: Kind) -> Judged {
    let apart = |a: (i64, i64), b: (i64, i64)| a.0.saturating_add(a.1) <= b.0;
    neighbours(subject, kind, apart, "starts before the end of its predecessor").await
}

pub(super) async fn positive(subject: &impl Subject, kind: Kind) -> Judged {
    let looks = looks(subject, kind).await?;
    if let Some(skip) = too_few(subject, answers(&looks))? {
        return Ok(skip);
    }
    for (call, answer) in &looks {
        if let Some((offset, size)) = answer.tuples().find(|(offset, size)| *offset < 0 || *size <= 0) {
            return Err(Wrong::new(format!("{call}: ({offset}, {size}) is negative or empty")));
        }
    }
    Ok(Verdict::Pass)
}

/// A fixed length may not divide the capacity; then the last tuple may reach past it.
pub(super) async fn inside(subject: &impl Subject, kind: Kind) -> Judged {
    let mut remarks = Vec::new();
    for (call, answer) in &looks(subject, kind).await? {
        for (offset, size) in answer.tuples() {
            let capacity = answer.capacity().unwrap_or(0);
            if offset.saturating_add(size) <= capacity {
                continue;
            }
            let fixed = answer.messages[0].style == BlockMetadataType::FixedLength as i32;
            if !fixed || offset >= capacity {
                let what = format!("{call}: ({offset}, {size}) passes the capacity, {capacity}");
                return Err(Wrong::new(what));
            }
            remarks =
                vec![format!("the last tuple, ({offset}, {size}), reaches past the capacity, {capacity}")];
        }
    }
    remarked(remarks)
}

/// Asks of each message whether it is right compared with the first one.
async fn messages(
    subject: &impl Subject,
    kind: Kind,
    wrong: impl Fn(&csi_client::Message, &csi_client::Message) -> Option<String>,
) -> Judged {
    for (call, answer) in &looks(subject, kind).await? {
        let Some(first) = answer.messages.first() else {
            return Err(Wrong::new(format!("{call}: OK without a message, though there are tuples")));
        };
        for (number, message) in answer.messages.iter().enumerate() {
            if let Some(what) = wrong(first, message) {
                return Err(Wrong::new(format!("{call}: message {number}: {what}")));
            }
        }
    }
    Ok(Verdict::Pass)
}

pub(super) async fn style_known(subject: &impl Subject, kind: Kind) -> Judged {
    let known = [BlockMetadataType::FixedLength as i32, BlockMetadataType::VariableLength as i32];
    messages(subject, kind, |_, message| {
        (!known.contains(&message.style)).then(|| {
            format!("block_metadata_type is {}, neither FIXED_LENGTH nor VARIABLE_LENGTH", message.style)
        })
    })
    .await
}

pub(super) async fn style_constant(subject: &impl Subject, kind: Kind) -> Judged {
    messages(subject, kind, |first, message| {
        (first.style != message.style)
            .then(|| format!("block_metadata_type is {}, and was {}", message.style, first.style))
    })
    .await
}

pub(super) async fn capacity_constant(subject: &impl Subject, kind: Kind) -> Judged {
    messages(subject, kind, |first, message| {
        (first.capacity != message.capacity)
            .then(|| format!("volume_capacity_bytes is {}, and was {}", message.capacity, first.capacity))
    })
    .await
}

pub(super) async fn capacity_value(fixtures: &Fixtures, kind: Kind) -> Judged {
    let snap = &fixtures.pair()?.second;
    let (size, reported_size) = (snap.size as i64, snap.reported_size);
    messages(fixtures, kind, |_, message| {
        (message.capacity != size && message.capacity != reported_size)
            .then(|| format!("volume_capacity_bytes is {}, the volume has {size}", message.capacity))
    })
    .await
}

pub(super) async fn fixed_size(subject: &impl Subject, kind: Kind) -> Judged {
    let looks = looks(subject, kind).await?;
    if let Some(skip) = too_few(subject, answers(&looks))? {
        return Ok(skip);
    }
    let is_fixed = |answer: &Answer| {
        answer.messages.first().is_some_and(|message| message.style == BlockMetadataType::FixedLength as i32)
    };
    if !looks.iter().any(|(_, answer)| is_fixed(answer)) {
        return Ok(Verdict::Skip("the driver lists VARIABLE_LENGTH extents".into()));
    }
    for (call, answer) in looks.iter().filter(|(_, answer)| is_fixed(answer)) {
        let mut tuples = answer.tuples();
        let Some((_, length)) = tuples.next() else { continue };
        if let Some((offset, size)) = tuples.find(|(_, size)| *size != length) {
            let what =
                format!("{call}: FIXED_LENGTH, but ({offset}, {size}) follows tuples of {length} bytes");
            return Err(Wrong::new(what));
        }
    }
    Ok(Verdict::Pass)
}

/// Bounds down to one tuple, and far above what a message of gRPC's usual 4 MiB could hold.
pub(super) async fn max_results(subject: &impl Subject, kind: Kind) -> Judged {
    let question = subject.question(kind)?;
    let whole = subject.ask(&question, 0, 0).await?;
    let count = whole.tuples().count();
    let around = [count as i32 - 1, count as i32, count as i32 + 1];
    let bounds = [1, 2, 3, 7].into_iter().chain(around).chain([1 << 20, i32::MAX]);
    for max_results in bounds.filter(|bound| *bound > 0) {
        let answer = subject.ask(&question, 0, max_results).await?;
        let call = name(&question, &subject.options(0, max_results));
        let most = answer.messages.iter().map(|message| message.tuples.len()).max().unwrap_or(0);
        if most as i64 > i64::from(max_results) {
            return Err(Wrong::new(format!("{call}: a message has {most} tuples")));
        }
        if answer.ranges() != whole.ranges() {
            return Err(Wrong::new(format!("{call}: other ranges than with max_results 0")));
        }
    }
    Ok(Verdict::Pass)
}
