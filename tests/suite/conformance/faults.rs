//! A table of faults, with the cases that must detect each. So every case is known to be able to fail.

use std::collections::BTreeSet;

use futures_util::StreamExt;

use super::{all_cases, assert_empty, run_broken};
use testkit::{PoolKind, Rig};

/// A fault, and the cases that must detect it.
const FAULTS: &[(&str, &[&str])] = &[
    // These come first, since they take longest.
    ("stall", &["allocated-served", "delta-served"]),
    ("stall:when=negative", &["allocated-max-results-negative", "delta-max-results-negative"]),
    ("service-not-claimed", &["service-claimed"]),
    (
        "refuse:call=GetMetadataAllocated+GetMetadataDelta,code=UNIMPLEMENTED",
        &["allocated-served", "delta-served"],
    ),
    ("refuse:call=Probe,code=FAILED_PRECONDITION", &["alive"]),
    ("swap-tuples", &["allocated-order", "delta-order"]),
    ("swap-messages", &["allocated-order", "delta-order"]),
    ("overlap", &["allocated-overlap", "delta-overlap"]),
    ("empty-tuple", &["allocated-positive-size", "delta-positive-size"]),
    ("negative-offset", &["allocated-positive-size", "delta-positive-size"]),
    ("past-capacity", &["allocated-inside", "delta-inside"]),
    ("type-unknown", &["allocated-type-known", "delta-type-known"]),
    ("type-changes", &["allocated-type-constant", "delta-type-constant"]),
    ("fixed-uneven", &["allocated-fixed-size", "delta-fixed-size"]),
    ("capacity-changes", &["allocated-capacity-constant", "delta-capacity-constant"]),
    (
        "capacity-wrong",
        &["allocated-capacity", "delta-capacity", "allocated-never-written", "delta-unchanged"],
    ),
    ("ignore-max-results", &["allocated-max-results", "delta-max-results"]),
    ("huge-messages", &["allocated-max-results", "delta-max-results"]),
    (
        "ignore-offset",
        &[
            "allocated-first-tuple",
            "delta-first-tuple",
            "allocated-resume",
            "delta-resume",
            "allocated-offset-at-capacity",
            "delta-offset-at-capacity",
        ],
    ),
    ("round-offset-up", &["allocated-offset-complete", "delta-offset-complete"]),
    (
        "lose-tuple:when=resumed",
        &["allocated-offset-complete", "delta-offset-complete", "allocated-resume", "delta-resume"],
    ),
    ("end-repeats-last", &["allocated-offset-at-capacity", "delta-offset-at-capacity"]),
    (
        "error-becomes:from=OUT_OF_RANGE,code=OK",
        &[
            "allocated-offset-beyond",
            "delta-offset-beyond",
            "allocated-offset-negative",
            "delta-offset-negative",
        ],
    ),
    (
        "error-becomes:from=OUT_OF_RANGE,code=INVALID_ARGUMENT",
        &[
            "allocated-offset-beyond",
            "delta-offset-beyond",
            "allocated-offset-negative",
            "delta-offset-negative",
        ],
    ),
    (
        "error-becomes:from=INVALID_ARGUMENT,code=INTERNAL",
        &[
            "allocated-id-missing",
            "delta-id-missing",
            "allocated-max-results-negative",
            "delta-max-results-negative",
            "delta-reversed",
            "delta-other-volume",
        ],
    ),
    (
        "error-becomes:from=INVALID_ARGUMENT,code=OK",
        &["allocated-id-missing", "delta-id-missing", "delta-reversed", "delta-other-volume"],
    ),
    (
        "error-becomes:from=NOT_FOUND,code=INTERNAL",
        &["allocated-id-unknown", "delta-id-unknown", "allocated-id-deleted", "delta-id-deleted"],
    ),
    (
        "error-becomes:from=NOT_FOUND,code=OK",
        &["allocated-id-unknown", "delta-id-unknown", "allocated-id-deleted", "delta-id-deleted"],
    ),
    ("negative-bound-cuts", &["allocated-max-results-negative", "delta-max-results-negative"]),
    ("empty-is-error", &["allocated-never-written", "delta-unchanged", "delta-same-snapshot"]),
    (
        "lose-last:when=whole",
        &["allocated-complete", "delta-complete", "allocated-full-backup", "delta-incremental-backup"],
    ),
    (
        "lose-share",
        &["allocated-complete", "delta-complete", "delta-zeroed", "delta-new-data", "delta-across"],
    ),
    ("lose-discarded", &["delta-discarded", "delta-complete", "delta-incremental-backup"]),
    ("lose-when-asked-again", &["written-on"]),
    ("old-snapshots-grow", &["expanded-old-snapshot"]),
    ("grown-stays-small", &["expanded-capacity"]),
    ("lose-grown", &["expanded-delta"]),
    ("lose-after-restore", &["restored-between"]),
    ("lose-restored", &["restored-snapshot"]),
    ("source-gone", &["source-deleted"]),
    ("lose-after-delete", &["middle-deleted"]),
    ("base-gone-is-empty", &["base-deleted"]),
    ("filesystem-is-error", &["filesystem-volume"]),
    ("filesystem-is-empty", &["filesystem-volume"]),
    ("deadline-is-ok", &["allocated-deadline", "delta-deadline"]),
    ("lose-after-cancel", &["allocated-cancel", "delta-cancel"]),
    ("delete-ends-streams", &["allocated-deleted-meanwhile", "delta-deleted-meanwhile"]),
    ("lose-beside", &["allocated-concurrent", "delta-concurrent"]),
    ("restored-in-use", &["restored-volume-read"]),
    ("lose-slow", &["allocated-slow-reader", "delta-slow-reader"]),
    ("lose-later:after=5000", &["allocated-many", "delta-many"]),
    ("shifted-window", &["delta-offset-partial", "delta-offset-complete"]),
    ("resume-grown-fails", &["expanded-resume"]),
    ("lose-after-clone", &["cloned-between"]),
    ("lose-after-modify", &["modified-between"]),
    ("modify-ends-streams", &["modified-between"]),
    ("expand-ends-streams", &["expanded-meanwhile"]),
    ("old-snapshots-grow:call=GetMetadataDelta", &["expanded-meanwhile"]),
    ("clone-ends-streams", &["cloned-meanwhile"]),
    ("base-gone-loses-later", &["base-deleted-again"]),
    ("lose-last", &["tail"]),
    ("lose-group-members", &["group-members"]),
];

/// Behaviour that the spec allows and a user should know about, and the cases that must report it.
const ALLOWED: &[(&str, &[&str])] = &[
    ("too-much", &["allocated-complete", "delta-complete", "delta-unchanged", "delta-same-snapshot"]),
    (
        "empty-without-message",
        &[
            "allocated-never-written",
            "delta-unchanged",
            "delta-same-snapshot",
            "allocated-offset-at-capacity",
            "delta-offset-at-capacity",
        ],
    ),
    ("end-is-error", &["allocated-offset-at-capacity", "delta-offset-at-capacity"]),
    ("negative-bound-is-none", &["allocated-max-results-negative", "delta-max-results-negative"]),
    ("same-is-refused", &["delta-same-snapshot"]),
    (
        "error-becomes:from=INVALID_ARGUMENT,code=FAILED_PRECONDITION",
        &["delta-reversed", "delta-other-volume"],
    ),
    ("error-becomes:from=NOT_FOUND,code=INVALID_ARGUMENT", &["allocated-id-unknown", "delta-id-unknown"]),
    ("filesystem-is-error:code=FAILED_PRECONDITION", &["filesystem-volume"]),
    ("last-fixed-past-capacity", &["allocated-inside", "delta-inside"]),
];

/// Runs the table, a few faults at a time. Fails with all results that differ from the table.
async fn each_is_seen(table: &[(&str, &[&str])], verdict: &str, code: i32) {
    let rig = Rig::start_with(PoolKind::Xfs, &["--max-volume-size", "1Gi"], "info").await;
    let runs = table.iter().map(|(fault, cases)| {
        let rig = &rig;
        async move {
            let hangs = fault.starts_with("stall");
            let timeout = if hangs { "10" } else { "180" };
            (*fault, *cases, run_broken(rig, fault, cases, timeout).await)
        }
    });
    let mut runs = futures_util::stream::iter(runs).buffer_unordered(6);
    let mut wrong = Vec::new();
    while let Some((fault, cases, (ended, verdicts, report))) = runs.next().await {
        if ended != Some(code) {
            wrong.push(format!("{fault}: exit status {ended:?}: {report:#}"));
        }
        for case in cases {
            match verdicts.get(*case) {
                // A case whose preparation failed, or that lacked its preparation, did not test anything.
                Some((found, detail))
                    if found == verdict
                        && !detail.starts_with("preparing")
                        && !detail.contains("uses what it does not say that it needs") => {}
                found => wrong.push(format!("{fault}: {case}: {found:?}")),
            }
        }
        if report["left_behind"].as_array().is_none_or(|left| !left.is_empty()) {
            wrong.push(format!("{fault}: left behind: {}", report["left_behind"]));
        }
    }
    drop(runs);
    assert!(wrong.is_empty(), "must be {verdict}:\n{}", wrong.join("\n"));
    let mut rig = rig;
    assert_empty(&mut rig).await;
    rig.finish();
}

#[apply(device_test)]
async fn every_fault_is_seen_by_its_cases() {
    each_is_seen(FAULTS, "fail", 1).await;
}

#[apply(device_test)]
async fn what_is_allowed_is_reported_and_does_not_fail() {
    each_is_seen(ALLOWED, "allowed", 0).await;
}

/// Every case is known to be able to fail.
#[tokio::test]
async fn every_case_is_named_by_a_fault() {
    let cases = all_cases().await;
    let named: BTreeSet<String> =
        FAULTS.iter().flat_map(|(_, cases)| cases.iter().map(|case| (*case).to_owned())).collect();
    assert!(cases.len() > 70, "{} cases", cases.len());
    let unseen: Vec<&String> = cases.difference(&named).collect();
    assert!(unseen.is_empty(), "no fault is there for {unseen:?}");
    let unknown: Vec<&String> = named.difference(&cases).collect();
    assert!(unknown.is_empty(), "no such cases: {unknown:?}");
}
