//! The flags and outputs of `cbt-lab conformance`.

use super::{all_cases, bare, conformance, ends_untested, run, run_broken, said};
use testkit::lab::Lab;
use testkit::{PoolKind, Rig, pages};

/// The proxy adds no fault of its own, and secrets are sent with the right calls.
#[apply(device_test)]
async fn a_driver_that_wants_secrets_conforms_with_them_alone(rig: Rig<Xfs>) {
    let (_serving, socket) = Lab::faulty(&rig, "wants-secrets").await;
    ends_untested(conformance(&socket, &["--focus", "^delta-complete$"]), "UNAUTHENTICATED").await;

    let file = rig.dir.path().join("secrets.yaml");
    let calls = "CreateVolume DeleteVolume ControllerExpandVolume ControllerModifyVolume NodeStageVolume \
                 NodePublishVolume CreateSnapshot DeleteSnapshot CreateVolumeGroupSnapshot \
                 DeleteVolumeGroupSnapshot";
    let yaml: String = calls.split(' ').map(|call| format!("{call}Secret:\n  key: sesame\n")).collect();
    std::fs::write(&file, yaml).expect("write");
    let (code, verdicts, report) = run(&socket, &["--secrets", &file.display().to_string()]).await;
    assert_eq!(code, Some(0), "{report:#}");
    assert_eq!(verdicts.len(), all_cases().await.len());
    assert!(!report.to_string().contains("sesame"));
}

#[apply(device_test)]
async fn focus_skip_junit_and_text(rig: Rig<Xfs>) {
    let junit = rig.dir.path().join("junit.xml");
    let focus =
        ["--focus", "^delta-(id|type)", "--skip", "deleted", "--junit", junit.to_str().expect("UTF-8")];
    let (code, verdicts, _) = run(&rig.socket(), &focus).await;
    assert_eq!(code, Some(0));
    let ran: Vec<&str> = verdicts.keys().map(String::as_str).collect();
    assert_eq!(ran, ["delta-id-missing", "delta-id-unknown", "delta-type-constant", "delta-type-known"]);
    let xml = std::fs::read_to_string(&junit).expect("JUnit");
    assert!(xml.contains("tests=\"4\"") && xml.contains("failures=\"0\""), "{xml}");
    for case in ran {
        assert!(xml.contains(&format!("<testcase name=\"{case}\"")), "{xml}");
    }

    let (_serving, socket) = Lab::faulty(&rig, "swap-tuples").await;
    let mut text = bare(&socket, &["--focus", "^delta-(order|capacity)$", "--volume-size", "64Mi"]);
    text.arg("--junit").arg(&junit);
    let output = text.output().await.expect("run");
    assert_eq!(output.status.code(), Some(1));
    let reported = String::from_utf8_lossy(&output.stdout);
    for part in ["pass          MUST   delta-capacity", "fail          MUST   delta-order", "FAIL: 1 passed"]
    {
        assert!(reported.contains(part), "{reported}");
    }
    let order = reported.lines().skip_while(|line| !line.contains("delta-order")).collect::<Vec<_>>();
    assert!(order[1].contains("GetMetadataDelta: byte_offset strictly increases"), "{reported}");
    assert!(order[2].contains("does not start after its predecessor"), "{reported}");
    let page = pages::read("docs/conformance.md");
    let example = pages::blocks(&page, "text")[0].replace("your.csi.driver", "deltapath.csi.dev");
    pages::assert_printed(&example, &reported);
    let xml = std::fs::read_to_string(&junit).expect("JUnit");
    assert!(xml.contains("failures=\"1\"") && xml.contains("does not start after"), "{xml}");
}

/// `--level`, the summary line, and the comparison with an earlier run on a broken driver.
#[apply(device_test)]
async fn a_level_a_summary_and_a_comparison(rig: Rig<Xfs>) {
    let focus = ["--focus", "^(service-claimed|delta-(order|same-snapshot))$"];
    let (serving, socket) = Lab::faulty(&rig, "swap-tuples").await;
    let (code, _, before) = run(&socket, &focus).await;
    drop(serving);
    assert_eq!(code, Some(1));
    let file = rig.dir.path().join("before.json");
    std::fs::write(&file, before.to_string()).expect("write");
    let file = file.to_str().expect("UTF-8");

    let must = [&focus[..], &["--level", "must", "--compare", file]].concat();
    let (code, verdicts, report) = run(&rig.socket(), &must).await;
    assert_eq!(code, Some(0), "{report:#}");
    assert_eq!(verdicts.keys().collect::<Vec<_>>(), ["delta-order", "service-claimed"]);
    let changes = report["changes"].as_array().expect("what changed");
    let of = |name: &str| changes.iter().find(|change| change["name"] == name).expect("it changed");
    assert_eq!((&of("delta-order")["before"], &of("delta-order")["now"]), (&"fail".into(), &"pass".into()));
    assert_eq!(of("delta-same-snapshot")["now"], serde_json::Value::Null);
    assert_eq!(changes.len(), 2);

    let mut text = bare(&rig.socket(), &must);
    let output = text.args(["--volume-size", "64Mi"]).output().await.expect("run");
    let reported = String::from_utf8_lossy(&output.stdout);
    assert!(reported.contains("changed: delta-order: fail -> pass\n"), "{reported}");
    let last = reported.lines().last().unwrap_or_default();
    let quoted =
        ["deltapath", "CSI 1.13 SnapshotMetadata", "cbt-lab 0.", "some cases: pass (2 pass, 0 allowed"];
    assert!(quoted.iter().all(|part| last.contains(part)), "{last}");
    assert_eq!(report["summary"], last);

    ends_untested(bare(&rig.socket(), &["--compare", "/no/such/file"]), "/no/such/file").await;
}

/// The driver violates only a SHOULD. Each level runs its own cases, and together they run all.
#[apply(device_test)]
async fn each_level_runs_its_own_cases(rig: Rig<Xfs>) {
    let (_serving, socket) = Lab::faulty(&rig, "empty-is-error").await;
    let (code, verdicts, report) = run(&socket, &["--level", "should"]).await;
    assert_eq!(code, Some(1), "{report:#}");
    let failed: Vec<&String> =
        verdicts.iter().filter(|(_, (verdict, _))| verdict == "fail").map(|(name, _)| name).collect();
    assert_eq!(failed, ["allocated-never-written", "delta-same-snapshot", "delta-unchanged"], "{report:#}");
    assert_eq!(report["level"], "SHOULD");
    let summary = report["summary"].as_str().expect("a summary");
    assert!(summary.contains(", SHOULD cases: fail ("), "{report:#}");
    let focus = "^(alive|delta-(order|unchanged|same-snapshot))$";
    let (code, must, report) = run(&socket, &["--focus", focus, "--level", "must"]).await;
    assert_eq!(code, Some(0), "{report:#}");
    assert_eq!(must.keys().collect::<Vec<_>>(), ["alive", "delta-order"], "{report:#}");
    assert!(must.values().all(|(verdict, _)| verdict == "pass"), "{report:#}");

    let listed = async |level: &str| {
        let output = conformance(&socket, &["--list", "--level", level]).output().await.expect("run");
        let list: Vec<serde_json::Value> = serde_json::from_slice(&output.stdout).expect("a list");
        assert!(list.iter().all(|case| case["level"] == level.to_uppercase()), "{list:?}");
        list.len()
    };
    let (must, should) = (listed("must").await, listed("should").await);
    assert_eq!(should, verdicts.len());
    assert_eq!(must + should, all_cases().await.len());
}

const EXPANDED: [&str; 5] =
    ["expanded-old-snapshot", "expanded-capacity", "expanded-delta", "expanded-resume", "expanded-meanwhile"];

/// The cases that do other work during a stream.
const MEANWHILE: [&str; 5] = [
    "expanded-meanwhile",
    "cloned-meanwhile",
    "modified-between",
    "allocated-deleted-meanwhile",
    "delta-deleted-meanwhile",
];

const HELD_UP: [&str; 1] = ["allocated-deleted-meanwhile"];

/// What these cases find in a driver that behaves like this, which is no fault, and what they say of it.
#[apply(device_cases)]
// A call that is answered with ABORTED is repeated, and a snapshot may take long until it is ready.
#[case::calls_that_are_put_off("put-off;snapshot-not-ready", &["delta-complete", "expanded-delta", "source-deleted"], "pass", "")]
#[case::what_is_not_claimed("expansion-not-claimed", &EXPANDED, "skip", "EXPAND_VOLUME")]
// The effect of a fault on a deadline shows only inside a stream. Here the answer is one tuple in one message, so a cut cannot
// fall inside the stream.
#[case::a_cut_that_the_driver_outran("too-much", &["delta-deadline", "allocated-cancel", "delta-slow-reader"], "not-shown", "")]
// If the stream was over before the other work began, its result proves nothing.
#[case::a_stream_that_was_handed_over_before("read-ahead:size=1Gi", &MEANWHILE, "not-shown", "")]
// The streams are longer than what drivers usually buffer.
#[case::a_driver_that_reads_ahead("read-ahead", &MEANWHILE, "pass", "")]
// Incident: on a busy machine the driver was held up while a stream was handed over. A deadline cut it then, as if it waited for
// its reader, and the case passed. Of the calls of this case those with the first deadline, in the shortest stream and in
// the longest.
#[case::held_up_in_the_shortest("read-ahead:size=1Gi;drip:ms=2,nth=3,call=GetMetadataAllocated", &HELD_UP, "not-shown", "")]
#[case::held_up_in_the_longest("read-ahead:size=1Gi;drip:ms=2,nth=9,call=GetMetadataAllocated", &HELD_UP, "not-shown", "")]
// A driver of Block volumes alone lacks nothing that the service is about.
#[case::no_filesystems(
    "refuse:call=NodeStageVolume,code=INVALID_ARGUMENT", &["filesystem-volume"], "not-shown",
    "the driver makes no Filesystem volume: "
)]
async fn what_is_no_fault_fails_no_case(
    #[case] faults: &str,
    #[case] cases: &[&str],
    #[case] verdict: &str,
    #[case] said: &str,
) {
    let rig = Rig::start_with(PoolKind::Xfs, &["--enable-attach"], "info").await;
    let (code, verdicts, report) = run_broken(&rig, faults, cases, "180").await;
    assert_eq!((code, verdicts.len()), (Some(0), cases.len()), "{report:#}");
    for (case, (found, detail)) in &verdicts {
        assert!(found == verdict && detail.contains(said), "{case}: {found}: {detail}");
    }
    assert_eq!(report["counts"][verdict.replace('-', "_")], cases.len(), "{report:#}");
    rig.finish();
}

/// Buffering cannot hide a fault either.
#[apply(device_test)]
async fn a_driver_that_reads_ahead_hides_nothing(rig: Rig<Xfs>) {
    let ends = ["expand", "clone", "modify", "delete"].map(|work| format!("{work}-ends-streams"));
    let faults = format!("{};read-ahead", ends.join(";"));
    let (code, verdicts, report) = run_broken(&rig, &faults, &MEANWHILE, "180").await;
    assert_eq!(code, Some(1), "{report:#}");
    for case in MEANWHILE {
        let (verdict, detail) = &verdicts[case];
        assert!(verdict == "fail" && detail.contains("while it was streamed"), "{case}: {report:#}");
    }
}

/// In a cluster the node plugin and the controller plugin are different processes.
#[apply(device_test)]
async fn controller_and_node_may_have_sockets_of_their_own(rig: Rig<Xfs>) {
    let (_serving, controller) = Lab::faulty(&rig, "node-elsewhere").await;
    ends_untested(conformance(&controller, &["--focus", "complete"]), "NodeGetCapabilities").await;
    let endpoint = format!("unix://{}", controller.display());
    let split = ["--controller-endpoint", &endpoint, "--focus", "complete"];
    let (code, verdicts, report) = run(&rig.socket(), &split).await;
    assert_eq!(code, Some(0), "{report:#}");
    assert!(verdicts.contains_key("delta-complete") && verdicts.len() == 4, "{verdicts:?}");
}

/// A driver without the service is not tested.
#[apply(device_test)]
async fn a_driver_without_the_service_is_not_run(rig: Rig<Xfs>) {
    let (_serving, socket) = Lab::faulty(&rig, "no-service").await;
    ends_untested(conformance(&socket, &[]), "neither claims nor serves").await;
}

/// What every case needs is refused: that is no finding about the driver's streams, and one line says it.
#[apply(device_test)]
async fn a_set_up_that_is_refused_ends_the_run(rig: Rig<Xfs>) {
    for (flags, part) in [
        (["--parameter", "foo=bar"], "CreateVolume: INVALID_ARGUMENT"),
        (["--snapshot-parameter", "foo=bar"], "CreateSnapshot: INVALID_ARGUMENT"),
        (["--modify-parameter", "foo=bar"], "ControllerModifyVolume: INVALID_ARGUMENT"),
    ] {
        let output = conformance(&rig.socket(), &flags).output().await.expect("run");
        let told = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{}", said(&output));
        assert!(output.stdout.is_empty() && told.lines().count() == 1, "{}", said(&output));
        assert!(told.contains(part) && told.contains("foo"), "{told}");
        super::assert_empty(&mut rig).await;
    }
}

/// A driver that lists a thousand tuples at most: that is the fault of those cases alone that ask for all. The end of the text
/// says once more what failed.
#[apply(device_test)]
async fn a_disturbed_stream_is_compared_with_an_undisturbed_one(rig: Rig<Xfs>) {
    let (_serving, socket) = Lab::faulty(&rig, "lose-later:after=1000").await;
    let flags = ["--focus", "(cancel|deadline|slow-reader|many)$"];
    let (code, verdicts, report) = run(&socket, &flags).await;
    assert_eq!(code, Some(1), "{report:#}");
    for (case, (verdict, detail)) in &verdicts {
        match case.ends_with("-many") {
            true => assert_eq!(verdict, "fail", "{case}: {detail}"),
            false => assert_ne!(verdict, "fail", "{case}: {detail}"),
        }
    }
    let output = bare(&socket, &["--volume-size", "64Mi", "--focus", "many$"]).output().await.expect("run");
    let text = String::from_utf8_lossy(&output.stdout);
    let (_, end) = text.split_once("\nFAIL: ").expect("a verdict");
    for case in ["allocated-many", "delta-many"] {
        let recap = format!("failed: {case}: {}\n", verdicts[case].1.lines().next().expect("a line"));
        assert!(end.contains(&recap), "{recap} is not in {end}");
    }
}
