//! The report of a run: to a person while it runs, as one JSON object, as JUnit XML.

use std::io;
use std::path::Path;
use std::time::Duration;

use quick_junit::{NonSuccessKind, TestCase, TestCaseStatus, TestSuite};
use serde::Serialize;

use super::case::{Case, Level};
use super::compare::{Before, Changes};
use super::subject::Subject;
use super::verdict::{Judged, Verdict};

/// What the cases are from.
#[derive(Clone, Copy, Debug)]
pub(super) struct Contract {
    version: &'static str,
    /// What a driver or service is tested against.
    title: &'static str,
    /// The same in a line to quote.
    short: &'static str,
}

pub(super) const CSI: Contract = Contract {
    version: "1.13",
    title: "the CSI spec, \"Snapshot Metadata Service RPCs\"",
    short: "CSI 1.13 SnapshotMetadata",
};
pub(super) const KUBERNETES: Contract = Contract {
    version: "KEP-3314",
    title: "the Kubernetes SnapshotMetadata API (KEP-3314)",
    short: "Kubernetes SnapshotMetadata (KEP-3314)",
};

/// Which cases are run.
#[derive(Clone, Copy, Debug)]
pub(super) struct Choice {
    pub level: Option<Level>,
    /// By `--focus` or `--skip`.
    pub by_name: bool,
}

/// A case and what came of it.
#[derive(Debug, Serialize)]
pub(super) struct Outcome {
    pub name: &'static str,
    level: Level,
    section: &'static str,
    requirement: &'static str,
    /// `pass`, `fail`, `allowed`, `not-shown` or `skip`.
    pub verdict: &'static str,
    /// Why, for all but a pass.
    detail: Option<String>,
    /// When it was started, in the run.
    started_ms: f64,
    ms: f64,
}

impl Outcome {
    pub fn of<S: Subject>(case: &Case<S>, judged: Judged, started: Duration, took: Duration) -> Self {
        let (verdict, detail) = match judged {
            Err(wrong) => ("fail", Some(wrong.to_string())),
            Ok(Verdict::Pass) => (Verdict::Pass.word(), None),
            Ok(
                ref
                verdict @ (Verdict::Allowed(ref why) | Verdict::NotShown(ref why) | Verdict::Skip(ref why)),
            ) => (verdict.word(), Some(why.clone())),
        };
        let Case { name, level, section, requirement, .. } = *case;
        let (started_ms, ms) = (millis(started), millis(took));
        Outcome { name, level, section, requirement, verdict, detail, started_ms, ms }
    }
}

/// How many cases came out how.
#[derive(Debug, Default, PartialEq, Eq, Serialize)]
pub(super) struct Counts {
    pass: usize,
    allowed: usize,
    fail: usize,
    not_shown: usize,
    skip: usize,
}

/// A whole run.
#[derive(Debug, Serialize)]
pub(super) struct Report {
    /// `pass`, `fail` or `interrupted`.
    verdict: &'static str,
    /// One line to quote.
    summary: String,
    /// Version of the spec that the cases are from.
    spec: &'static str,
    #[serde(skip)]
    contract: Contract,
    /// Version of the suite.
    suite: &'static str,
    /// The level that was chosen, where not all cases were.
    level: Option<Level>,
    /// Whether cases were chosen by name.
    chosen: bool,
    endpoint: String,
    driver: String,
    version: String,
    counts: Counts,
    total_ms: f64,
    pub left_behind: Vec<String>,
    cases: Vec<Outcome>,
    /// What changed since another run.
    #[serde(skip_serializing_if = "Option::is_none")]
    changes: Option<Changes>,
    #[serde(skip)]
    pub interrupted: bool,
    #[serde(skip)]
    live: bool,
}

impl Report {
    /// An empty report; a live one prints each case when it is done.
    pub fn new(
        contract: Contract,
        endpoint: String,
        driver: String,
        version: String,
        choice: Choice,
        live: bool,
    ) -> Self {
        if live {
            tell(&format!("{} at {endpoint}, against {}\n\n", named(&driver, &version), contract.title));
        }
        Report {
            verdict: "fail",
            summary: String::new(),
            spec: contract.version,
            contract,
            suite: env!("CARGO_PKG_VERSION"),
            level: choice.level,
            chosen: choice.by_name,
            endpoint,
            driver,
            version,
            counts: Counts::default(),
            total_ms: 0.0,
            left_behind: Vec::new(),
            cases: Vec::new(),
            changes: None,
            interrupted: false,
            live,
        }
    }

    pub fn add(&mut self, outcome: Outcome) {
        match outcome.verdict {
            "pass" => self.counts.pass += 1,
            "allowed" => self.counts.allowed += 1,
            "not-shown" => self.counts.not_shown += 1,
            "skip" => self.counts.skip += 1,
            _ => self.counts.fail += 1,
        }
        if self.live {
            let word = match outcome.verdict {
                "allowed" => "allowed, but",
                "not-shown" => "not shown",
                verdict => verdict,
            };
            let Outcome { level, name, ms, section, requirement, .. } = &outcome;
            let detail = outcome.detail.as_ref();
            let detail = detail.map_or(String::new(), |detail| format!("              -> {detail}\n"));
            tell(&format!(
                "{word:<12}  {level:<6} {name:<30} {ms:>6.0} ms\n              {section}: {requirement}\n{detail}"
            ));
        }
        self.cases.push(outcome);
    }

    /// Says what changed since the run that `before` tells of.
    pub fn compare(&mut self, before: &Before) {
        self.changes =
            Some(Changes::between(before, self.cases.iter().map(|case| (case.name, case.verdict))));
    }

    /// The whole run in a line: what was tested against what, and what came out. Cases that were chosen by name are said to be.
    fn summarize(&self) -> String {
        let Counts { pass, allowed, fail, not_shown, skip } = self.counts;
        let which = match (self.level, self.chosen) {
            (None, false) => "all cases".to_owned(),
            (Some(level), false) => format!("{level} cases"),
            (_, true) => "some cases".to_owned(),
        };
        format!(
            "{}: {}, cbt-lab {}, {which}: {} ({pass} pass, {allowed} allowed, {fail} fail, {not_shown} not shown, \
             {skip} skipped)",
            named(&self.driver, &self.version),
            self.contract.short,
            self.suite,
            self.verdict
        )
    }

    /// Whether no case failed and nothing is left.
    pub fn is_good(&self) -> bool {
        self.counts.fail == 0 && self.left_behind.is_empty() && !self.interrupted
    }

    /// Ends the report: the sum for a person, or all of it as JSON.
    pub fn finish(&mut self, total: Duration) -> io::Result<()> {
        self.total_ms = millis(total);
        self.verdict = match (self.interrupted, self.is_good()) {
            (true, _) => "interrupted",
            (false, true) => "pass",
            (false, false) => "fail",
        };
        self.summary = self.summarize();
        for left in &self.left_behind {
            shell::say!("cbt-lab: left behind: {left}");
        }
        shell::show(!self.live, self, || self.text(total))
    }

    fn text(&self, total: Duration) -> String {
        let Counts { pass, allowed, fail, not_shown, skip } = self.counts;
        let word = self.verdict.to_uppercase();
        let seconds = total.as_secs_f64();
        let failed = self.cases.iter().filter(|case| case.verdict == "fail").map(|case| {
            let why = case.detail.as_deref().and_then(|detail| detail.lines().next()).unwrap_or_default();
            format!("failed: {}: {why}\n", case.name)
        });
        format!(
            "\n{word}: {pass} passed, {allowed} allowed but, {fail} failed, {not_shown} not shown, {skip} skipped in \
             {seconds:.1} s\n{}{}{}\n",
            failed.collect::<String>(),
            self.changes.as_ref().map_or(String::new(), Changes::text),
            self.summary
        )
    }

    /// Writes JUnit XML: what is allowed passes, with its remark as output.
    pub fn write_junit(&self, path: &Path) -> Result<(), String> {
        let mut suite = TestSuite::new("SnapshotMetadata");
        suite.add_property(("driver", self.driver.as_str()));
        suite.add_property(("version", self.version.as_str()));
        for case in &self.cases {
            let detail = case.detail.clone().unwrap_or_default();
            let status = match case.verdict {
                "fail" => {
                    let mut status = TestCaseStatus::non_success(NonSuccessKind::Failure);
                    status.set_message(detail.clone());
                    status.set_description(format!("{} {}: {}", case.level, case.section, case.requirement));
                    status
                }
                "skip" | "not-shown" => {
                    let mut status = TestCaseStatus::skipped();
                    status.set_message(detail.clone());
                    status
                }
                _ => TestCaseStatus::success(),
            };
            let mut test = TestCase::new(case.name, status);
            test.set_classname(case.section);
            test.set_time(Duration::from_secs_f64(case.ms / 1000.0));
            if case.verdict == "allowed" {
                test.set_system_out(format!("allowed, but: {detail}"));
            }
            suite.add_test_case(test);
        }
        let mut report = quick_junit::Report::new("cbt-lab conformance");
        report.add_test_suite(suite);
        let text = report.to_string().map_err(|error| format!("write {}: {error}", path.display()))?;
        crate::output::write(path, &text)
    }
}

/// A driver with its version, where that is known.
fn named(driver: &str, version: &str) -> String {
    format!("{driver} {version}").trim_end().to_owned()
}

/// Prints what came of a case. What cannot be printed is not a reason to leave volumes behind, and the end of the report says it.
fn tell(text: &str) {
    let _ = shell::print(text);
}

/// Prints the table of cases.
pub(super) fn list<S: Subject>(cases: &[&Case<S>], json: bool) -> io::Result<()> {
    let line = |case: &&Case<S>| {
        format!("{:<6}  {:<28} {}: {}\n", case.level, case.name, case.section, case.requirement)
    };
    shell::show(json, cases, || cases.iter().map(line).collect())
}

fn millis(duration: Duration) -> f64 {
    (duration.as_secs_f64() * 1e4).round() / 10.0
}
