//! Runs the cases one after another, each within its time, and takes everything away at the end.

use std::panic::AssertUnwindSafe;
use std::time::{Duration, Instant};

use futures_util::FutureExt;
use tokio::sync::watch;

use super::case::{Case, Judged, Wrong};
use super::content::at_rest;
use super::fixtures::Fixtures;
use super::report::{Outcome, Report};
use super::subject::Subject;
use csi_client::Question;

/// How long a driver may take to answer a Probe before it counts as gone.
const PULSE: Duration = Duration::from_secs(30);
/// How long threads may take to let go of devices.
const REST: Duration = Duration::from_secs(10);
/// How long taking one thing away may take at most.
const CLEAN_UP: Duration = Duration::from_secs(60);

/// Whether the driver serves the streams at all, claimed or not.
pub(super) async fn serves(fixtures: &Fixtures, patience: Duration) -> bool {
    let question = Question::Allocated { snapshot: "no-such-snapshot".into() };
    let options = fixtures.options(0, 0);
    match tokio::time::timeout(patience, fixtures.try_ask(&question, &options)).await {
        Ok(Ok(answer)) => !matches!(answer.end, Err(s) if s.code() == tonic::Code::Unimplemented),
        _ => true,
    }
}

/// Runs `cases`. The first signal ends it before the next one, and the second leaves things as they are.
pub(super) async fn run<S: Subject>(
    subject: &S,
    cases: &[&Case<S>],
    patience: Duration,
    report: &mut Report,
    mut signals: watch::Receiver<u32>,
) {
    let mut gone_since: Option<&str> = None;
    for case in cases {
        let started = Instant::now();
        let judged = match gone_since {
            Some(since) => Err(Wrong::new(format!("not run: nobody has answered since {since}"))),
            None => tokio::select! {
                judged = judge(subject, case, patience) => judged,
                _ = signals.wait_for(|count| *count >= 1) => {
                    report.interrupted = true;
                    break;
                }
            },
        };
        if judged.is_err() && gone_since.is_none() {
            let pulse = tokio::time::timeout(PULSE.min(patience), pulse(subject));
            if pulse.await.is_err() {
                gone_since = Some(case.name);
            }
        }
        report.add(Outcome::of(case, judged, started.elapsed()));
    }
    at_rest(REST).await;
    tokio::select! {
        left = subject.clean_up(patience.min(CLEAN_UP)) => report.left_behind = left,
        _ = signals.wait_for(|count| *count >= 2) => {
            report.interrupted = true;
            report.left_behind = subject.made();
        }
    }
}

/// Prepares and runs a case. A mistake of the suite's own must not leave volumes behind.
async fn judge<S: Subject>(subject: &S, case: &Case<S>, patience: Duration) -> Judged {
    let prepared_and_run = async {
        tracing::info!(case = case.name, needs = ?case.needs, "prepares");
        if let Some(judged) = subject.prepare(case.needs).await {
            return judged;
        }
        tracing::info!(case = case.name, "runs");
        let ended = tokio::time::timeout(patience, (case.run)(subject)).await;
        ended.unwrap_or_else(|_| Err(subject.late(patience)))
    };
    let ended = AssertUnwindSafe(prepared_and_run).catch_unwind().await;
    ended.unwrap_or_else(|_| Err(Wrong::new("the suite itself failed; standard error says where")))
}

/// Waits until the driver answers anything: a supervisor may be starting it again.
async fn pulse(subject: &impl Subject) {
    while subject.is_silent().await {
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}
