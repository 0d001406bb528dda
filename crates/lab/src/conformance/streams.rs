//! Streams that do not run to their end, and streams beside each other.

use std::time::{Duration, Instant};

use super::answer::{Answer, missing, name};
use super::case::{Judged, Verdict, Wrong};
use super::content::blocking;
use super::fixtures::{Fixtures, Kind};
use super::ranges::Ranges;
use csi_client::{Client, Options, Question};

/// Places in a stream where it is cut.
const CUTS: usize = 8;
/// Streams at once.
const BESIDE: usize = 16;

/// A stream that ended with `OK` is whole.
fn whole_if_ok(answer: &Answer, must: &Ranges, call: &str) -> Result<(), Wrong> {
    match answer.end {
        Ok(()) => missing("that were written or changed", must, &answer.ranges())
            .map_err(|wrong| wrong.at(&format!("{call} ended with OK"))),
        Err(_) => Ok(()),
    }
}

/// Reads a stream whose deadline passes after `read` messages, while its reader waits.
async fn overdue(
    client: &mut Client,
    question: &Question,
    options: &Options,
    read: usize,
) -> Result<Answer, Wrong> {
    let deadline = Instant::now() + Duration::from_millis(options.timeout_ms.unwrap_or(0));
    let mut answer = Answer { messages: Vec::new(), end: Ok(()) };
    let mut stream = match client.open_stream(question, options).await {
        Ok(stream) => stream,
        Err(status) => return Ok(Answer { end: Err(status), ..answer }),
    };
    loop {
        if answer.messages.len() == read {
            let late = deadline + Duration::from_millis(20);
            tokio::time::sleep(late.saturating_duration_since(Instant::now())).await;
        }
        match stream.next().await {
            Ok(Some(message)) => answer.messages.push(message),
            Ok(None) => return Ok(answer),
            Err(status) => return Ok(Answer { end: Err(status), ..answer }),
        }
    }
}

/// Deadlines at many points of a stream: never `OK` on what was cut.
pub(super) async fn deadline(fixtures: &Fixtures, kind: Kind) -> Judged {
    let question = fixtures.question(kind)?;
    let mut client = fixtures.plugin.narrow().await?;
    let started = Instant::now();
    let whole = Answer::read(&mut client, &question, &fixtures.options(0, 1)).await?;
    let whole = whole.ok(&question, &fixtures.options(0, 1))?;
    let took = started.elapsed().as_millis() as u64;
    let (messages, must) = (whole.messages.len(), fixtures.must(kind)?);
    let mut cut = 0;
    for point in 0..CUTS {
        // Twice what the messages up to there take, so that the deadline meets a reader that waits.
        let read = messages * point / CUTS;
        let timeout = 20 + 2 * took * point as u64 / CUTS as u64;
        let options = Options { timeout_ms: Some(timeout), ..fixtures.options(0, 1) };
        let answer = overdue(&mut client, &question, &options, read).await?;
        let call = format!("a deadline of {timeout} ms met a reader after {read} messages: the stream");
        whole_if_ok(&answer, &must, &call)?;
        cut += usize::from(answer.end.is_err());
    }
    for point in 0..CUTS as u64 {
        let timeout = took * point / CUTS as u64;
        let options = Options { timeout_ms: Some(timeout.max(1)), ..fixtures.options(0, 1) };
        let answer = Answer::read(&mut fixtures.plugin.client(), &question, &options).await?;
        whole_if_ok(&answer, &must, &format!("with a deadline of {timeout} ms the stream"))?;
        cut += usize::from(answer.end.is_err());
    }
    match cut {
        0 => Ok(Verdict::Skip(
            "no deadline met a stream midway: the answers are whole before. A larger --volume-size helps little; \
             the driver hands its messages over at once"
                .into(),
        )),
        _ => Ok(Verdict::Pass),
    }
}

/// Clients that go away at many points of a stream: later ones get all.
pub(super) async fn cancel(fixtures: &Fixtures, kind: Kind) -> Judged {
    let question = fixtures.question(kind)?;
    let messages = fixtures.ask(&question, 0, 1).await?.messages.len();
    let mut client = fixtures.plugin.narrow().await?;
    for point in 0..4 * CUTS {
        let read = messages * point / (4 * CUTS);
        let mut stream = client
            .open_stream(&question, &fixtures.options(0, 1))
            .await
            .map_err(|status| Wrong::call(&name(&question, &fixtures.options(0, 1)), &status))
            .map_err(|wrong| wrong.at("after cancelled streams"))?;
        for _ in 0..read {
            let next = stream.next().await;
            next.map_err(|status| Wrong::call("the stream", &status).at("after cancelled streams"))?;
        }
        drop(stream);
    }
    let again = fixtures.ask(&question, 0, 0).await.map_err(|wrong| wrong.at("after cancelled streams"))?;
    missing("that were written or changed", &fixtures.must(kind)?, &again.ranges())
        .map_err(|wrong| wrong.at("after cancelled streams"))?;
    Ok(Verdict::Pass)
}

/// Many streams of both kinds at once, each cut in its own way.
pub(super) async fn beside(fixtures: &Fixtures, kind: Kind) -> Judged {
    let question = fixtures.question(kind)?;
    let must = fixtures.must(kind)?;
    let streams = (0..BESIDE).map(|number| {
        let options = fixtures.options(0, [0, 1, 2, 5][number % 4]);
        let (question, must) = (&question, &must);
        async move {
            let answer = fixtures.try_ask(question, &options).await?.ok(question, &options)?;
            missing("that were written or changed", must, &answer.ranges())
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
            read.map_err(|wrong| wrong.at(&format!("the restored volume, read beside {rounds} streams")))?;
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
