//! A table of faults and of the cases that must see each, so that no case is a check that cannot fail.

use std::collections::BTreeSet;

use futures_util::StreamExt;

use super::{all_cases, assert_empty, run_broken};
use testkit::broken::Fault;
use testkit::{PoolKind, Rig};

/// A fault, and the cases that must see it.
const FAULTS: &[(Fault, &[&str])] = &[
    // First, for they are waited for.
    (Fault::StreamsHang, &["allocated-served", "delta-served"]),
    (Fault::NegativeBoundSpins, &["allocated-max-results-negative", "delta-max-results-negative"]),
    (Fault::ServiceNotClaimed, &["service-claimed"]),
    (Fault::Unimplemented, &["allocated-served", "delta-served"]),
    (Fault::ProbeFails, &["alive"]),
    (Fault::SwapsTuples, &["allocated-order", "delta-order"]),
    (Fault::SwapsMessages, &["allocated-order", "delta-order"]),
    (Fault::Overlaps, &["allocated-overlap", "delta-overlap"]),
    (Fault::EmptyTuple, &["allocated-positive-size", "delta-positive-size"]),
    (Fault::NegativeTuple, &["allocated-positive-size", "delta-positive-size"]),
    (Fault::PassesCapacity, &["allocated-inside", "delta-inside"]),
    (Fault::TypeUnknown, &["allocated-type-known", "delta-type-known"]),
    (Fault::TypeChanges, &["allocated-type-constant", "delta-type-constant"]),
    (Fault::FixedIsUneven, &["allocated-fixed-size", "delta-fixed-size"]),
    (Fault::CapacityChanges, &["allocated-capacity-constant", "delta-capacity-constant"]),
    (
        Fault::CapacityIsWrong,
        &["allocated-capacity", "delta-capacity", "allocated-never-written", "delta-unchanged"],
    ),
    (Fault::IgnoresMaxResults, &["allocated-max-results", "delta-max-results"]),
    (Fault::HugeMessages, &["allocated-max-results", "delta-max-results"]),
    (
        Fault::IgnoresOffset,
        &[
            "allocated-first-tuple",
            "delta-first-tuple",
            "allocated-resume",
            "delta-resume",
            "allocated-offset-at-capacity",
            "delta-offset-at-capacity",
        ],
    ),
    (Fault::RoundsOffsetUp, &["allocated-offset-complete", "delta-offset-complete"]),
    (
        Fault::LosesFirstWhenResumed,
        &["allocated-offset-complete", "delta-offset-complete", "allocated-resume", "delta-resume"],
    ),
    (Fault::EndRepeatsLast, &["allocated-offset-at-capacity", "delta-offset-at-capacity"]),
    (
        Fault::OutOfRangeIsOk,
        &[
            "allocated-offset-beyond",
            "delta-offset-beyond",
            "allocated-offset-negative",
            "delta-offset-negative",
        ],
    ),
    (
        Fault::OutOfRangeIsInvalid,
        &[
            "allocated-offset-beyond",
            "delta-offset-beyond",
            "allocated-offset-negative",
            "delta-offset-negative",
        ],
    ),
    (
        Fault::InvalidIsInternal,
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
        Fault::InvalidIsOk,
        &["allocated-id-missing", "delta-id-missing", "delta-reversed", "delta-other-volume"],
    ),
    (
        Fault::NotFoundIsInternal,
        &["allocated-id-unknown", "delta-id-unknown", "allocated-id-deleted", "delta-id-deleted"],
    ),
    (
        Fault::NotFoundIsOk,
        &["allocated-id-unknown", "delta-id-unknown", "allocated-id-deleted", "delta-id-deleted"],
    ),
    (Fault::NegativeBoundCuts, &["allocated-max-results-negative", "delta-max-results-negative"]),
    (Fault::EmptyIsAnError, &["allocated-never-written", "delta-unchanged", "delta-same-snapshot"]),
    (
        Fault::LosesLast,
        &["allocated-complete", "delta-complete", "allocated-full-backup", "delta-incremental-backup"],
    ),
    (
        Fault::LosesHalf,
        &["allocated-complete", "delta-complete", "delta-zeroed", "delta-new-data", "delta-across"],
    ),
    (Fault::LosesDiscarded, &["delta-discarded", "delta-complete", "delta-incremental-backup"]),
    (Fault::LosesWhenAskedAgain, &["written-on"]),
    (Fault::OldSnapshotsGrow, &["expanded-old-snapshot"]),
    (Fault::GrownStaysSmall, &["expanded-capacity"]),
    (Fault::LosesGrown, &["expanded-delta"]),
    (Fault::LosesAfterRestore, &["restored-between"]),
    (Fault::LosesRestored, &["restored-snapshot"]),
    (Fault::SourceGoneIsNotFound, &["source-deleted"]),
    (Fault::LosesAfterDelete, &["middle-deleted"]),
    (Fault::BaseGoneIsEmpty, &["base-deleted"]),
    (Fault::FilesystemIsInternal, &["filesystem-volume"]),
    (Fault::FilesystemIsEmpty, &["filesystem-volume"]),
    (Fault::DeadlineIsOk, &["allocated-deadline", "delta-deadline"]),
    (Fault::CancelBreaksLater, &["allocated-cancel", "delta-cancel"]),
    (Fault::DeleteEndsStreams, &["allocated-deleted-meanwhile", "delta-deleted-meanwhile"]),
    (Fault::TwoAtOnceLose, &["allocated-concurrent", "delta-concurrent"]),
    (Fault::RestoredInUse, &["restored-volume-read"]),
];

/// What the spec allows and a user should know, and the cases that must tell it.
const ALLOWED: &[(Fault, &[&str])] = &[
    (Fault::ReportsMore, &["allocated-complete", "delta-complete", "delta-unchanged", "delta-same-snapshot"]),
    (
        Fault::EmptyWithoutMessage,
        &[
            "allocated-never-written",
            "delta-unchanged",
            "delta-same-snapshot",
            "allocated-offset-at-capacity",
            "delta-offset-at-capacity",
        ],
    ),
    (Fault::CapacityIsOutOfRange, &["allocated-offset-at-capacity", "delta-offset-at-capacity"]),
    (Fault::NegativeBoundIsNone, &["allocated-max-results-negative", "delta-max-results-negative"]),
    (Fault::SameIsRefused, &["delta-same-snapshot"]),
    (Fault::InvalidIsPrecondition, &["delta-reversed", "delta-other-volume"]),
    (Fault::NotFoundIsInvalid, &["allocated-id-unknown", "delta-id-unknown"]),
    (Fault::FilesystemIsRefused, &["filesystem-volume"]),
    (Fault::LastFixedPasses, &["allocated-inside", "delta-inside"]),
];

/// A few faults at a time; what went otherwise than the table says.
async fn each_is_seen(table: &[(Fault, &[&str])], verdict: &str, code: i32) {
    let rig = Rig::start_with(PoolKind::Xfs, &["--max-volume-size", "1Gi"], "info").await;
    let runs = table.iter().map(|(fault, cases)| {
        let rig = &rig;
        async move {
            let hangs = matches!(fault, Fault::StreamsHang | Fault::NegativeBoundSpins);
            let timeout = if hangs { "10" } else { "180" };
            (fault, *cases, run_broken(rig, *fault, cases, timeout).await)
        }
    });
    let mut runs = futures_util::stream::iter(runs).buffer_unordered(6);
    let mut wrong = Vec::new();
    while let Some((fault, cases, (ended, verdicts, report))) = runs.next().await {
        if ended != Some(code) {
            wrong.push(format!("{fault:?}: exit status {ended:?}: {report:#}"));
        }
        for case in cases {
            match verdicts.get(*case) {
                // What could not even be prepared was not tested.
                Some((found, detail)) if found == verdict && !detail.starts_with("preparing") => {}
                found => wrong.push(format!("{fault:?}: {case}: {found:?}")),
            }
        }
        if report["left_behind"].as_array().is_none_or(|left| !left.is_empty()) {
            wrong.push(format!("{fault:?}: left behind: {}", report["left_behind"]));
        }
    }
    drop(runs);
    assert!(wrong.is_empty(), "must be {verdict}:\n{}", wrong.join("\n"));
    let mut rig = rig;
    assert_empty(&mut rig).await;
    rig.finish();
}

#[test_with::root]
#[tokio::test(flavor = "multi_thread")]
async fn every_fault_is_seen_by_its_cases() {
    each_is_seen(FAULTS, "fail", 1).await;
}

#[test_with::root]
#[tokio::test(flavor = "multi_thread")]
async fn what_is_allowed_is_told_and_does_not_fail() {
    each_is_seen(ALLOWED, "allowed", 0).await;
}

/// No case is a check that cannot fail.
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
