//! Streams that do not run to their end, and streams at the same time.

use std::time::{Duration, Instant};

use super::answer::{Answer, Messages, missing, name};
use super::content::blocking;
use super::fixtures::Fixtures;
use super::history::MOST;
use super::ranges::Ranges;
use super::rest::{Rest, is_cut_inside, not_shown, overdue};
use super::subject::{Kind, Subject};
use super::verdict::{Judged, Verdict, Wrong};
use csi_client::Options;

/// Places in a stream where it is cut.
const CUTS: usize = 8;
/// Streams at once.
const BESIDE: usize = 16;

/// What an undisturbed stream lists, a disturbed one has to list too. Whether that is all that was written is asked by other
/// cases.
const LISTED: &str = "that were listed before";

/// A stream that ended with `OK` is whole.
fn whole_if_ok(answer: &Answer, must: &Ranges, call: &str) -> Result<(), Wrong> {
    match answer.end {
        Ok(()) => missing(LISTED, must, &answer.ranges())
            .map_err(|wrong| wrong.at(&format!("{call} ended with OK"))),
        Err(_) => Ok(()),
    }
}

/// Deadlines at many points of a stream: never `OK` on what was cut. Only one that fell inside a stream, after its first
/// message and before its last, shows anything.
pub(super) async fn deadline<S: Subject>(subject: &S, kind: Kind) -> Judged {
    let mut client = subject.narrow().await?;
    let rests = Rest::growing(subject, kind).await?;
    for rest in &rests {
        let options = rest.options(subject);
        let started = Instant::now();
        let whole = S::read(&mut client, &rest.question, &options).await?.ok(&rest.question, &options)?;
        let took = started.elapsed().as_millis() as u64;
        let messages = whole.messages.len();
        let mut inside = 0;
        for point in 0..CUTS {
            // Twice what the messages up to there take and more, so that the deadline meets a reader that waits.
            let read = messages * point / CUTS / 2;
            let timeout = 20 + took * point as u64 / CUTS as u64;
            let options = Options { timeout_ms: Some(timeout), ..options.clone() };
            let answer = overdue::<S>(&mut client, &rest.question, &options, read).await?;
            let call = format!("a deadline of {timeout} ms met a reader after {read} messages: the stream");
            whole_if_ok(&answer, &rest.must, &call)?;
            inside += usize::from(is_cut_inside(&answer, messages));
        }
        if inside > 0 {
            return Ok(Verdict::Pass);
        }
    }
    Ok(not_shown::<S>(&rests, "deadline"))
}

/// Bytes that a server's HTTP/2 commonly takes before it waits for the client.
const AHEAD: usize = 64 << 10;
/// Bytes of a message with one tuple, at least.
const MESSAGE: usize = 16;

/// Clients that go away at many points of a stream: later ones get all. A stream whose rest fits into what a server sends
/// ahead may have been over, so it shows nothing.
pub(super) async fn cancel<S: Subject>(subject: &S, kind: Kind) -> Judged {
    let mut client = subject.narrow().await?;
    let rests = Rest::growing(subject, kind).await?;
    let mut inside = 0;
    for rest in &rests {
        let (question, options) = (&rest.question, rest.options(subject));
        for point in 0..2 * CUTS {
            let read = rest.messages * point / (8 * CUTS);
            let mut stream = S::open(&mut client, question, &options).await.map_err(|status| {
                Wrong::call(&name(question, &options), &status).at("after cancelled streams")
            })?;
            for _ in 0..read {
                let next = stream.next().await;
                next.map_err(|status| Wrong::call("the stream", &status).at("after cancelled streams"))?;
            }
            drop(stream);
            inside += usize::from((rest.messages - read) * MESSAGE > AHEAD);
        }
        let again = subject.ask(question, rest.offset, 0).await;
        let again = again.map_err(|wrong| wrong.at("after cancelled streams"))?;
        missing(LISTED, &rest.must, &again.ranges()).map_err(|wrong| wrong.at("after cancelled streams"))?;
        if inside > 0 {
            return Ok(Verdict::Pass);
        }
    }
    Ok(not_shown::<S>(&rests, "cancel"))
}

/// A client that takes a while now and then, and once a whole second. A stream that fits into what a server sends ahead may have
/// been over, so the first one that does not is read, or else the longest.
pub(super) async fn slow_reader<S: Subject>(subject: &S, kind: Kind) -> Judged {
    let mut client = subject.narrow().await?;
    let rests = Rest::growing(subject, kind).await?;
    let is_long = |rest: &&Rest| rest.messages * MESSAGE > AHEAD;
    let Some(rest) = rests.iter().find(is_long).or(rests.last()) else { return subject.without_tuples() };
    let options = rest.options(subject);
    let call = format!("{}, read slowly", name(&rest.question, &options));
    let opened = S::open(&mut client, &rest.question, &options).await;
    let answer = Answer::read_slowly(opened, &call, |read| match read {
        0 => Duration::ZERO,
        read if read == rest.messages / 8 => Duration::from_secs(1),
        read if read.is_multiple_of(rest.messages / 16 + 1) => Duration::from_millis(50),
        _ => Duration::ZERO,
    })
    .await?;
    if let Err(status) = &answer.end {
        return Err(Wrong::call(&call, status));
    }
    missing(LISTED, &rest.must, &answer.ranges())
        .map_err(|wrong| wrong.at("read slowly, it ended with OK"))?;
    match is_long(&rest) {
        true => Ok(Verdict::Pass),
        false => Ok(not_shown::<S>(&rests, "pause")),
    }
}

/// As many ranges as the volume takes, in messages as large as the driver makes them.
pub(super) async fn many<S: Subject>(subject: &S, kind: Kind) -> Judged {
    let (question, must) = subject.dense_question(kind)?;
    let mut ranges = 0;
    for max_results in [0, 1 << 20, i32::MAX] {
        let answer = subject.ask(&question, 0, max_results).await?;
        let call = name(&question, &subject.options(0, max_results));
        missing(S::MUST, &must, &answer.ranges()).map_err(|wrong| wrong.at(&call))?;
        ranges = answer.tuples().count();
    }
    match ranges as u64 >= MOST {
        true => Ok(Verdict::Pass),
        false => Ok(Verdict::NotShown(format!(
            "{ranges} ranges are all that were listed; for a million the volume is too small: --volume-size 8Gi"
        ))),
    }
}

/// Many streams of both kinds at once, each cut in its own way.
pub(super) async fn beside<S: Subject>(subject: &S, kind: Kind) -> Judged {
    let question = subject.question(kind)?;
    let must = subject.must(kind)?;
    let streams = (0..BESIDE).map(|number| {
        let options = subject.options(0, [0, 1, 2, 5][number % 4]);
        let (question, must) = (&question, &must);
        async move {
            let answer = subject.try_ask(question, &options).await?.ok(question, &options)?;
            missing(S::MUST, must, &answer.ranges())
        }
    });
    for (number, judged) in futures_util::future::join_all(streams).await.into_iter().enumerate() {
        judged.map_err(|wrong| wrong.at(&format!("stream {number} of {BESIDE} at once")))?;
    }
    Ok(Verdict::Pass)
}

/// Streams of a snapshot while a volume that was restored from it is read from end to end.
pub(super) async fn while_read(fixtures: &Fixtures) -> Judged {
    let (snap, device) = (fixtures.pair()?.second.clone(), fixtures.restored()?.second.clone());
    let mut wholes = Vec::new();
    for kind in [Kind::Allocated, Kind::Delta] {
        wholes.push((fixtures.question(kind)?, fixtures.must(kind)?));
    }
    let mut reading = Box::pin(blocking(move |stop| snap.content.compare(&device, snap.size, stop)));
    let mut rounds = 0;
    loop {
        for (question, must) in &wholes {
            let answer = fixtures.ask(question, 0, 3).await;
            let answer = answer.map_err(|wrong| wrong.at("while a restored volume is read"))?;
            missing("that were written or changed", must, &answer.ranges())
                .map_err(|wrong| wrong.at("while a restored volume is read"))?;
        }
        rounds += 1;
        let read = tokio::time::timeout(Duration::from_millis(1), &mut reading).await;
        if let Ok(read) = read {
            read.map_err(|wrong| wrong.at(&format!("the restored volume, read during {rounds} streams")))?;
            return Ok(Verdict::Pass);
        }
    }
}

/// The driver answers after all that was done to it.
pub(super) async fn alive(fixtures: &Fixtures) -> Judged {
    match fixtures.plugin.alive().await {
        true => Ok(Verdict::Pass),
        false => Err(Wrong::new("Probe is not answered with OK after the cases before")),
    }
}
