//! `--jobs`: cases run at once, those that exclude each other do not, and the report is as of one after another.

use std::time::Instant;

use serde_json::Value;

use super::bare;
use testkit::lab::Lab;
use testkit::{PoolKind, Rig};

/// Those that change the volume with the densest changes, or its snapshots, and those that read them.
const CHANGES: [&str; 5] = [
    "modified-between",
    "expanded-meanwhile",
    "cloned-meanwhile",
    "allocated-deleted-meanwhile",
    "delta-deleted-meanwhile",
];
const READS: [&str; 8] = [
    "allocated-deadline",
    "delta-deadline",
    "allocated-cancel",
    "delta-cancel",
    "allocated-slow-reader",
    "delta-slow-reader",
    "allocated-many",
    "delta-many",
];
/// Those that run alone, at the end.
const ALONE: [&str; 3] = ["allocated-concurrent", "delta-concurrent", "alive"];
/// Those that take snapshots of one volume.
const SNAPSHOTS: [&str; 3] = ["allocated-id-deleted", "delta-id-deleted", "delta-unchanged"];

/// When each case began and ended, in milliseconds.
fn times(report: &Value) -> Vec<(&str, f64, f64)> {
    let cases = report["cases"].as_array().expect("cases");
    let number = |value: &Value| value.as_f64().expect("a number");
    let time =
        |case: &Value| (number(&case["started_ms"]), number(&case["started_ms"]) + number(&case["ms"]));
    cases.iter().map(|case| (case["name"].as_str().expect("a name"), time(case).0, time(case).1)).collect()
}

/// Of a report of all cases, run four at once.
pub fn excluding_cases_never_overlap(report: &Value) {
    let times = times(report);
    // The times are rounded to 0.1 ms.
    let overlap = |one: &(&str, f64, f64), other: &(&str, f64, f64)| {
        one.0 != other.0 && one.1 < other.2 - 0.3 && other.1 < one.2 - 0.3
    };
    let some = |names: &[&str]| -> Vec<_> { times.iter().filter(|case| names.contains(&case.0)).collect() };
    let (changes, reads, snapshots) = (some(&CHANGES), some(&READS), some(&SNAPSHOTS));
    assert_eq!((changes.len(), reads.len(), snapshots.len()), (CHANGES.len(), READS.len(), SNAPSHOTS.len()));
    let mut wrong = Vec::new();
    for (ones, others) in [(&changes, &changes), (&changes, &reads), (&snapshots, &snapshots)] {
        for one in ones {
            wrong.extend(others.iter().filter(|other| overlap(one, other)).map(|other| (one, other)));
        }
    }
    assert!(wrong.is_empty(), "run at once: {wrong:?}");
    let last: Vec<&str> = times[times.len() - ALONE.len()..].iter().map(|case| case.0).collect();
    assert_eq!(last, ALONE);
    for case in some(&ALONE) {
        let beside: Vec<_> = times.iter().filter(|other| overlap(case, other)).collect();
        assert!(beside.is_empty(), "{case:?} ran beside {beside:?}");
    }
    assert!(times.iter().any(|one| times.iter().any(|other| overlap(one, other))), "no two ran at once");
}

/// The text without what the clock has to do with, and how long it took.
async fn text(rig: &Rig, jobs: &str) -> (Vec<String>, f64) {
    let faults = "lose-discarded;capacity-wrong;negative-bound-is-none;base-gone-is-empty;filesystem-is-error;grown-stays-small";
    let (_serving, socket) = Lab::faulty(rig, faults).await;
    let flags = ["--jobs", jobs, "--volume-size", "64Mi", "--modify-parameter", "readAheadKiB=512"];
    let began = Instant::now();
    let output = bare(&socket, &flags).output().await.expect("run");
    let took = began.elapsed().as_secs_f64();
    assert_eq!(output.status.code(), Some(1), "{}", super::said(&output));
    let text = String::from_utf8(output.stdout).expect("UTF-8");
    let lines = text.lines().skip(1).map(|line| match line.strip_suffix(" ms") {
        Some(line) => line.trim_end_matches(|c: char| c.is_ascii_digit() || c == ' ').to_owned(),
        None => line.split(" skipped in ").next().unwrap_or_default().to_owned(),
    });
    (lines.collect(), took)
}

/// On a driver with many faults, of which none comes from what another case does.
#[apply(device_test)]
async fn cases_at_once_find_what_they_find_one_after_another() {
    let rig = Rig::start_with(PoolKind::Xfs, &["--max-volume-size", "1Gi"], "info").await;
    let (alone, took_alone) = text(&rig, "1").await;
    let (at_once, took_at_once) = text(&rig, "4").await;
    assert_eq!(at_once, alone);
    for verdict in ["pass  ", "fail  ", "allowed, but", "not shown", "skip  "] {
        assert!(alone.iter().filter(|line| line.starts_with(verdict)).count() >= 2, "{verdict}: {alone:#?}");
    }
    println!("{took_alone:.1} s one after another, {took_at_once:.1} s at once");
    rig.finish();
}
