//! A table of faults, with the cases that must detect each. So every case is known to be able to fail.

use std::collections::BTreeSet;

use futures_util::StreamExt;

use super::{all_cases, assert_empty, run_broken};
use testkit::lab::named;
use testkit::{PoolKind, Rig};

/// A fault, and the cases that must detect it; `*-order` are those of both streams.
const FAULTS: &[(&str, &str)] = &[
    // These come first, since they take longest.
    ("stall", "*-served"),
    ("stall:when=negative", "*-max-results-negative"),
    ("service-not-claimed", "service-claimed"),
    ("refuse:call=GetMetadataAllocated+GetMetadataDelta,code=UNIMPLEMENTED", "*-served"),
    ("refuse:call=Probe,code=FAILED_PRECONDITION", "alive"),
    ("swap-tuples", "*-order"),
    ("swap-messages", "*-order"),
    ("overlap", "*-overlap"),
    ("empty-tuple", "*-positive-size"),
    ("negative-offset", "*-positive-size"),
    ("past-capacity", "*-inside"),
    ("type-unknown", "*-type-known"),
    ("type-changes", "*-type-constant"),
    ("fixed-uneven", "*-fixed-size"),
    ("capacity-changes", "*-capacity-constant"),
    ("capacity-wrong", "*-capacity allocated-never-written delta-unchanged"),
    ("ignore-max-results", "*-max-results"),
    ("huge-messages", "*-max-results"),
    ("ignore-offset", "*-first-tuple *-resume *-offset-at-capacity"),
    ("round-offset-up", "*-offset-complete"),
    ("lose-tuple:when=resumed", "*-offset-complete *-resume"),
    ("end-repeats-last", "*-offset-at-capacity"),
    ("error-becomes:from=OUT_OF_RANGE,code=OK", "*-offset-beyond *-offset-negative"),
    ("error-becomes:from=OUT_OF_RANGE,code=INVALID_ARGUMENT", "*-offset-beyond *-offset-negative"),
    (
        "error-becomes:from=INVALID_ARGUMENT,code=INTERNAL",
        "*-id-missing *-max-results-negative delta-reversed delta-other-volume",
    ),
    ("error-becomes:from=INVALID_ARGUMENT,code=OK", "*-id-missing delta-reversed delta-other-volume"),
    ("error-becomes:from=NOT_FOUND,code=INTERNAL", "*-id-unknown *-id-deleted"),
    ("error-becomes:from=NOT_FOUND,code=OK", "*-id-unknown *-id-deleted"),
    ("negative-bound-cuts", "*-max-results-negative"),
    ("empty-is-error", "allocated-never-written delta-unchanged delta-same-snapshot"),
    ("lose-last:when=whole", "*-complete allocated-full-backup delta-incremental-backup"),
    ("lose-share", "*-complete delta-zeroed delta-new-data delta-across"),
    ("lose-discarded", "delta-discarded delta-complete delta-incremental-backup"),
    ("lose-when-asked-again", "written-on"),
    ("old-snapshots-grow", "expanded-old-snapshot"),
    ("grown-stays-small", "expanded-capacity"),
    ("lose-grown", "expanded-delta"),
    ("lose-after-restore", "restored-between"),
    ("lose-restored", "restored-snapshot"),
    ("source-gone", "source-deleted"),
    ("lose-after-delete", "middle-deleted"),
    ("base-gone-is-empty", "base-deleted"),
    ("filesystem-is-error", "filesystem-volume"),
    ("filesystem-is-empty", "filesystem-volume"),
    ("refuse:call=NodeStageVolume,code=INTERNAL", "filesystem-volume"),
    ("deadline-is-ok", "*-deadline"),
    ("lose-after-cancel", "*-cancel"),
    ("delete-ends-streams", "*-deleted-meanwhile"),
    ("lose-beside", "*-concurrent"),
    ("restored-in-use", "restored-volume-read"),
    ("lose-slow", "*-slow-reader"),
    ("lose-later:after=5000", "*-many"),
    ("shifted-window", "delta-offset-partial delta-offset-complete"),
    ("resume-grown-fails", "expanded-resume"),
    ("lose-after-clone", "cloned-between"),
    ("lose-after-modify", "modified-between"),
    ("modify-ends-streams", "modified-between"),
    ("expand-ends-streams", "expanded-meanwhile"),
    ("old-snapshots-grow:call=GetMetadataDelta", "expanded-meanwhile"),
    ("clone-ends-streams", "cloned-meanwhile"),
    ("base-gone-loses-later", "base-deleted-again"),
    ("lose-last", "tail"),
    ("lose-group-members", "group-members"),
];

/// Behaviour that the spec allows and a user should know about, and the cases that must report it.
const ALLOWED: &[(&str, &str)] = &[
    ("too-much", "*-complete delta-unchanged delta-same-snapshot"),
    (
        "empty-without-message",
        "allocated-never-written delta-unchanged delta-same-snapshot *-offset-at-capacity",
    ),
    ("end-is-error", "*-offset-at-capacity"),
    ("negative-bound-is-none", "*-max-results-negative"),
    ("same-is-refused", "delta-same-snapshot"),
    ("error-becomes:from=INVALID_ARGUMENT,code=FAILED_PRECONDITION", "delta-reversed delta-other-volume"),
    ("error-becomes:from=NOT_FOUND,code=INVALID_ARGUMENT", "*-id-unknown"),
    ("filesystem-is-error:code=FAILED_PRECONDITION", "filesystem-volume"),
    ("last-fixed-past-capacity", "*-inside"),
];

/// Runs the table, a few faults at a time. Fails with all results that differ from the table.
async fn each_is_seen(table: &[(&str, &str)], verdict: &str, code: i32) {
    let rig = Rig::start_with(PoolKind::Xfs, &["--max-volume-size", "1Gi"], "info").await;
    let runs = table.iter().map(|(fault, cases)| {
        let rig = &rig;
        async move {
            let hangs = fault.starts_with("stall");
            let timeout = if hangs { "10" } else { "180" };
            let cases = named(cases);
            let ran = run_broken(rig, fault, &cases, timeout).await;
            (*fault, cases, ran)
        }
    });
    let mut runs = futures_util::stream::iter(runs).buffer_unordered(6);
    let mut wrong = Vec::new();
    while let Some((fault, cases, (ended, verdicts, report))) = runs.next().await {
        if ended != Some(code) {
            wrong.push(format!("{fault}: exit status {ended:?}: {report:#}"));
        }
        for case in cases {
            match verdicts.get(&case) {
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
    let named: BTreeSet<String> = FAULTS.iter().flat_map(|(_, cases)| named(cases)).collect();
    assert!(cases.len() > 70, "{} cases", cases.len());
    let unseen: Vec<&String> = cases.difference(&named).collect();
    assert!(unseen.is_empty(), "no fault is there for {unseen:?}");
    let unknown: Vec<&String> = named.difference(&cases).collect();
    assert!(unknown.is_empty(), "no such cases: {unknown:?}");
}
