//! Runs the cases, several at once where they do not exclude each other, each within its time, and takes everything away at the
//! end.
//!
//! A case waits for every earlier case in the table that it excludes, so those that share a volume keep the table's order. After a
//! failure nothing starts until the driver answers a Probe.

use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::time::{Duration, Instant};

use futures_util::FutureExt;
use tokio::sync::watch;
use tokio::task::JoinSet;

use super::case::Case;
use super::content::at_rest;
use super::fixtures::{Fixtures, Need};
use super::plugin::{Plugin, within};
use super::report::{Outcome, Report};
use super::subject::Subject;
use super::subject::{NotReady, Prepared};
use super::verdict::{Judged, Verdict, Wrong};
use csi_client::{Question, block_capability};
use tonic::Code;

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

/// Makes a volume with snapshots, which is what every case needs that needs anything.
pub(super) async fn first(fixtures: &Fixtures, patience: Duration) -> (Need, Prepared<()>) {
    (Need::Pair, sound(async { within(patience, fixtures.prepare(Need::Pair)).await? }).await)
}

/// Why the driver refuses it: then there is nothing to test on. One that does not answer refuses nothing.
pub(super) fn refusal(first: &Prepared<()>) -> Option<&Wrong> {
    match first {
        Err(NotReady::Failed(wrong)) if wrong.code().is_some() && !wrong.is_silence() => Some(wrong),
        _ => None,
    }
}

/// Why the driver does not take the parameters that a volume is to be modified to: they are at fault, and no case of it.
pub(super) async fn refused_attributes(plugin: &Plugin, patience: Duration) -> Option<Wrong> {
    if !plugin.claims.modify || plugin.settings.attributes.is_empty() {
        return None;
    }
    let tried = async {
        let volume = plugin.create_volume(block_capability(), None, plugin.settings.volume_size).await?;
        let modified = plugin.modify_volume(&volume.id).await;
        plugin.delete_volume(&volume.id).await?;
        modified
    };
    let refused = within(patience, tried).await.ok()?.err();
    refused.filter(|wrong| wrong.code() == Some(Code::InvalidArgument))
}

/// Runs `cases`, `jobs` at once, after the `first` preparation. The first signal ends it, and the second leaves things as they are.
pub(super) async fn run<S: Subject>(
    subject: Arc<S>,
    cases: &[&Case<S>],
    first: Option<(S::Need, Prepared<()>)>,
    (jobs, patience): (usize, Duration),
    report: &mut Report,
    mut signals: watch::Receiver<u32>,
) {
    let mut run = Run::new(subject.clone(), cases, jobs, patience);
    if let Some((need, prepared)) = first {
        run.note(Ended::Prepared(need, prepared));
    }
    loop {
        run.start();
        run.tell(report, run.over());
        tokio::select! {
            ended = run.steps.join_next() => match ended {
                Some(Ok(ended)) => run.note(ended),
                // None is aborted here. Of one that panicked nothing comes: its case is not over at the end.
                Some(Err(_)) => {}
                None => {
                    run.give_up();
                    break;
                }
            },
            _ = signals.wait_for(|count| *count >= 1) => {
                report.interrupted = true;
                break;
            }
        }
    }
    run.steps.shutdown().await;
    run.tell(report, cases.len());
    at_rest(REST).await;
    tokio::select! {
        left = subject.clean_up(patience.min(CLEAN_UP)) => report.left_behind = left,
        _ = signals.wait_for(|count| *count >= 2) => {
            report.interrupted = true;
            report.left_behind = subject.made();
        }
    }
}

/// How far a case is.
enum Progress {
    Waits,
    Runs,
    Done(Outcome),
    Told,
}

impl Progress {
    fn is_over(&self) -> bool {
        matches!(self, Progress::Done(_) | Progress::Told)
    }
}

/// How far a preparation is.
enum State {
    Open,
    Runs,
    Ready,
    Failed(NotReady),
}

/// What is started: a preparation, or a case by its place in the table.
enum Step<N> {
    Prepare(N),
    Judge(usize),
}

/// What came of a step, or of the look after one that failed.
enum Ended<N> {
    Prepared(N, Prepared<()>),
    Judged { at: usize, judged: Judged, started: Duration, took: Duration },
    Pulse { after: String, answered: bool },
}

struct Run<'c, S: Subject> {
    subject: Arc<S>,
    cases: &'c [&'c Case<S>],
    jobs: usize,
    patience: Duration,
    began: Instant,
    progress: Vec<Progress>,
    /// All that the cases need; each is tried for all of them once.
    needs: Vec<(S::Need, State)>,
    steps: JoinSet<Ended<S::Need>>,
    /// Looks whether the driver answers; nothing is started before they ended.
    pulses: usize,
    /// The subject has not answered since.
    gone_since: Option<String>,
}

impl<'c, S: Subject> Run<'c, S> {
    fn new(subject: Arc<S>, cases: &'c [&'c Case<S>], jobs: usize, patience: Duration) -> Self {
        let mut needs: Vec<(S::Need, State)> = Vec::new();
        for need in cases.iter().flat_map(|case| case.needs) {
            if !needs.iter().any(|(known, _)| known == need) {
                needs.push((*need, State::Open));
            }
        }
        Run {
            subject,
            cases,
            jobs,
            patience,
            began: Instant::now(),
            progress: cases.iter().map(|_| Progress::Waits).collect(),
            needs,
            steps: JoinSet::new(),
            pulses: 0,
            gone_since: None,
        }
    }

    /// Starts as much as may run now.
    fn start(&mut self) {
        if self.pulses > 0 {
            return;
        }
        for at in 0..self.cases.len() {
            if let Some(judged) = self.without_run(at) {
                let now = self.began.elapsed();
                self.judged(at, judged, now, Duration::ZERO);
            }
        }
        while self.steps.len() < self.jobs
            && let Some(step) = self.next()
        {
            match step {
                Step::Prepare(need) => self.prepare(need),
                Step::Judge(at) => self.judge(at),
            }
        }
    }

    /// What comes of a case that cannot be run.
    fn without_run(&self, at: usize) -> Option<Judged> {
        if !matches!(self.progress[at], Progress::Waits) {
            return None;
        }
        if let Some(since) = &self.gone_since {
            return Some(Err(Wrong::new(format!("not run: no answer since {since}"))));
        }
        self.cases[at].needs.iter().find_map(|need| match self.state(*need) {
            Some(State::Failed(why)) => Some(unprepared(why.clone())),
            _ => None,
        })
    }

    /// The first step, in the order of the table, that may be started. Of several at once the preparations come first: what waits for
    /// them takes longest.
    fn next(&self) -> Option<Step<S::Need>> {
        let mut ready = None;
        for (at, case) in self.cases.iter().enumerate() {
            if !matches!(self.progress[at], Progress::Waits) {
                continue;
            }
            if let Some(need) = case.needs.iter().find(|need| self.can_be_prepared(**need)) {
                return Some(Step::Prepare(*need));
            }
            if ready.is_none() && self.is_ready(at) {
                ready = Some(Step::Judge(at));
                if self.jobs == 1 {
                    break;
                }
            }
        }
        ready
    }

    fn state(&self, need: S::Need) -> Option<&State> {
        self.needs.iter().find(|(known, _)| *known == need).map(|(_, state)| state)
    }

    /// What no case says that it needs is for the test to miss.
    fn is_prepared(&self, need: S::Need) -> bool {
        matches!(self.state(need), None | Some(State::Ready))
    }

    fn can_be_prepared(&self, need: S::Need) -> bool {
        let is_open = matches!(self.state(need), Some(State::Open));
        is_open && S::made_from(need).iter().all(|from| self.is_prepared(*from))
    }

    /// Whether all is prepared, and no case before it that excludes it is still to end.
    fn is_ready(&self, at: usize) -> bool {
        let needs = self.cases[at].needs;
        let mut before = self.cases[..at].iter().zip(&self.progress);
        needs.iter().all(|need| self.is_prepared(*need))
            && before.all(|(case, progress)| progress.is_over() || !S::exclude(case.needs, needs))
    }

    fn prepare(&mut self, need: S::Need) {
        self.set(need, State::Runs);
        let (subject, patience) = (self.subject.clone(), self.patience);
        self.steps.spawn(async move {
            let prepared = sound(async { within(patience, subject.prepare(need)).await? }).await;
            Ended::Prepared(need, prepared)
        });
    }

    fn judge(&mut self, at: usize) {
        let (case, started) = (self.cases[at], self.began.elapsed());
        self.progress[at] = Progress::Runs;
        let (subject, patience, run) = (self.subject.clone(), self.patience, case.run);
        self.steps.spawn(async move {
            let began = Instant::now();
            let judged = sound(async { within(patience, run(&subject)).await? }).await;
            Ended::Judged { at, judged, started, took: began.elapsed() }
        });
    }

    /// Looks whether the driver answers anything after a failure: a supervisor may be starting it again.
    fn pulse(&mut self, after: String) {
        self.pulses += 1;
        let (subject, patience) = (self.subject.clone(), PULSE.min(self.patience));
        self.steps.spawn(async move {
            let answered = tokio::time::timeout(patience, pulse(&*subject)).await.is_ok();
            Ended::Pulse { after, answered }
        });
    }

    fn set(&mut self, need: S::Need, now: State) {
        if let Some((_, state)) = self.needs.iter_mut().find(|(known, _)| *known == need) {
            *state = now;
        }
    }

    fn note(&mut self, ended: Ended<S::Need>) {
        match ended {
            Ended::Prepared(need, Ok(())) => self.set(need, State::Ready),
            Ended::Prepared(need, Err(why)) => self.not_ready(need, why),
            Ended::Judged { at, judged, started, took } => {
                if judged.is_err() {
                    self.pulse(self.cases[at].name.to_owned());
                }
                self.judged(at, judged, started, took);
            }
            Ended::Pulse { after, answered } => {
                self.pulses -= 1;
                if !answered && self.gone_since.is_none() {
                    self.gone_since = Some(after);
                }
            }
        }
    }

    /// A driver that was away may be back for the next case: only the first one that waits for the preparation fails then.
    fn not_ready(&mut self, need: S::Need, why: NotReady) {
        let waits = |at: &usize| {
            matches!(self.progress[*at], Progress::Waits) && self.cases[*at].needs.contains(&need)
        };
        let first = (0..self.cases.len()).find(waits);
        if let (NotReady::Failed(_), Some(at)) = (&why, first) {
            self.pulse(self.cases[at].name.to_owned());
        }
        match (&why, first) {
            (NotReady::Failed(wrong), Some(at)) if wrong.is_silence() => {
                self.set(need, State::Open);
                let now = self.began.elapsed();
                self.judged(at, unprepared(why), now, Duration::ZERO);
            }
            _ => self.set(need, State::Failed(why)),
        }
    }

    /// No case is left out of the report.
    fn give_up(&mut self) {
        for at in 0..self.cases.len() {
            if !self.progress[at].is_over() {
                self.judged(at, Err(suite_failed()), self.began.elapsed(), Duration::ZERO);
            }
        }
    }

    fn judged(&mut self, at: usize, judged: Judged, started: Duration, took: Duration) {
        self.progress[at] = Progress::Done(Outcome::of(self.cases[at], judged, started, took));
    }

    /// How many cases are over up to the first that is not.
    fn over(&self) -> usize {
        self.progress.iter().take_while(|progress| progress.is_over()).count()
    }

    /// Reports what is over of that many cases.
    fn tell(&mut self, report: &mut Report, up_to: usize) {
        for progress in self.progress[..up_to].iter_mut().filter(|progress| progress.is_over()) {
            if let Progress::Done(outcome) = std::mem::replace(progress, Progress::Told) {
                report.add(outcome);
            }
        }
    }
}

/// What comes of a case for which something could not be prepared.
fn unprepared(why: NotReady) -> Judged {
    match why {
        NotReady::Skip(why) => Ok(Verdict::Skip(why)),
        NotReady::Failed(wrong) => Err(wrong.at("preparing")),
    }
}

/// A mistake of the suite's own must not leave volumes behind.
async fn sound<T, E: From<Wrong>>(work: impl Future<Output = Result<T, E>>) -> Result<T, E> {
    let ended = AssertUnwindSafe(work).catch_unwind().await;
    ended.unwrap_or_else(|_| Err(suite_failed().into()))
}

fn suite_failed() -> Wrong {
    Wrong::new("the suite itself failed; standard error says where")
}

/// Waits until the driver answers anything.
async fn pulse(subject: &impl Subject) {
    while subject.is_silent().await {
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}
