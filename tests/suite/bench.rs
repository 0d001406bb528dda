//! `cbt-lab bench`: measures our driver on every pool, gives no figure of an answer that is wrong, and leaves nothing behind.

use std::path::Path;
use std::time::Duration;

use nix::sys::signal::Signal;
use serde_json::Value;
use tokio::process::Command;

use crate::conformance::assert_empty;
use testkit::lab::{self, Lab};
use testkit::places::Disk;
use testkit::{PoolKind, Rig, eventually, said};

/// Little of everything.
const LITTLE: [(&str, &str); 6] = [
    ("--size", "64Mi"),
    ("--data", "8Mi"),
    ("--runs", "2"),
    ("--snapshots", "1,3"),
    ("--settle", "0"),
    ("--write-time", "0.2"),
];

/// Measures little, where `arguments` do not say otherwise, and tells it in JSON.
fn bench(socket: &Path, arguments: &[&str]) -> Command {
    let mut command = lab::command("bench", socket);
    let little = LITTLE.iter().filter(|(flag, _)| !arguments.contains(flag));
    command.args(["--output", "json"]).args(little.flat_map(|(flag, value)| [flag, value])).args(arguments);
    command
}

async fn run(socket: &Path, arguments: &[&str]) -> (Option<i32>, Value) {
    let output = bench(socket, arguments).output().await.expect("run");
    let result = serde_json::from_slice(&output.stdout).unwrap_or_else(|_| panic!("{}", said(&output)));
    (output.status.code(), result)
}

/// The ids of the figures that have a number, and of those that have none, with the reason.
fn sorted(result: &Value) -> (Vec<&str>, Vec<(&str, &str)>) {
    let (mut measured, mut missing) = (Vec::new(), Vec::new());
    for figure in result["figures"].as_array().expect("figures") {
        let id = figure["id"].as_str().expect("an id");
        match figure["missing"]["kind"].as_str() {
            None => {
                assert!(figure["measured"]["median"].is_number(), "{figure}");
                measured.push(id);
            }
            Some(kind) => {
                assert!(figure["measured"].is_null(), "a number beside a reason: {figure}");
                missing.push((id, kind));
            }
        }
    }
    (measured, missing)
}

fn is_of_writes(id: &str) -> bool {
    ["write-during", "write-after", "pause-during", "pause-after"].contains(&id)
}

/// Every figure has a number, a bare one beside it where one is known, and each run is in it.
#[apply(every_pool)]
async fn ours_is_measured_on_every_pool(rig: Rig<pool>) {
    let dir = rig.dir.path().join("bare");
    std::fs::create_dir(&dir).expect("mkdir");
    let files = ["json", "csv", "html"].map(|end| dir.with_extension(end));
    let [json, csv, html] = files.each_ref().map(|file| file.to_str().expect("UTF-8"));
    let bare = dir.to_str().expect("UTF-8");
    let (code, result) =
        run(&rig.socket(), &["--bare-dir", bare, "--json", json, "--csv", csv, "--html", html]).await;
    assert_eq!((code, &result["verdict"]), (Some(0), &"right".into()), "{result:#}");
    let (measured, missing) = sorted(&result);
    let is_space = |id: &str| id.starts_with("space-");
    // The dir pool shares the space that GetCapacity tells with all else on its filesystem; and what is written all the time, it
    // does not copy. The other pools have their space to themselves.
    let may_miss = |id: &str| pool == PoolKind::Dir && (is_space(id) || is_of_writes(id));
    assert!(missing.iter().all(|(id, kind)| *kind == "left-out" && may_miss(id)), "{missing:?}");
    let all = "create snapshot-first allocated snapshot-0.01 snapshot-1 snapshot-10 delta-0.01-at-once \
               delta-10-at-once delta-1-later listed-1 restore clone delete-snapshot delete-volume write-before \
               write-during write-after pause-during many-snapshot many-delta-last many-delta-first many-restore many-delete \
               space-data space-snapshots space-restored space-clone";
    for id in all.split(' ') {
        assert!(measured.contains(&id) || may_miss(id), "{id} is missing: {measured:?}");
    }
    for figure in result["figures"].as_array().expect("figures") {
        let (id, measured) = (figure["id"].as_str().expect("id"), &figure["measured"]);
        if measured.is_null() {
            continue;
        }
        let number = |key: &str| measured[key].as_f64().unwrap_or_else(|| panic!("{figure}"));
        assert!(number("min") <= number("median") && number("median") <= number("max"), "{figure}");
        let samples = measured["samples"].as_array().expect("samples").len();
        // Of four snapshots in each run.
        assert_eq!(samples, if id == "delete-snapshot" { 8 } else { 2 }, "{figure}");
        let has_bare = !id.starts_with("many-")
            && !id.starts_with("listed-")
            && !id.ends_with("-later")
            && !is_space(id);
        assert_eq!(figure["bare"].is_object(), has_bare, "{figure}");
        // 8 MiB are written, and what is restored or cloned shares them.
        let data = f64::from(8 << 20);
        match id {
            // Others write to the disk that the dir pool is on.
            "space-data" if pool != PoolKind::Dir => {
                assert!((data / 2.0..data * 2.0).contains(&number("median")), "{figure}")
            }
            "space-restored" | "space-clone" if pool != PoolKind::Dir => {
                assert!(number("median") < data / 4.0, "{figure}");
            }
            _ => {}
        }
        if id.starts_with("listed-") {
            assert_eq!(number("max"), 1.0, "ours lists what changed and nothing else: {figure}");
        }
    }
    let counts: Vec<u64> =
        result["figures"].as_array().into_iter().flatten().filter_map(|f| f["snapshots"].as_u64()).collect();
    assert!(counts.contains(&1) && counts.contains(&3), "{counts:?}");
    let written: Value = serde_json::from_slice(&std::fs::read(json).expect("JSON")).expect("JSON");
    assert_eq!(written, result);
    let csv = std::fs::read_to_string(csv).expect("CSV");
    assert_eq!(csv.lines().count(), 1 + measured.len() + missing.len());
    assert!(std::fs::read_to_string(html).expect("HTML").contains("<svg "));
    assert_eq!(std::fs::read_dir(&dir).expect("list").count(), 0, "bare files are left");
    assert_empty(&mut rig).await;
}

/// Blocks of 4 KiB as tuples, and more of them than the driver puts into one message.
const SEVERAL_MESSAGES: [&str; 4] = ["--data", "32Mi", "--snapshot-parameter", "blockMetadataType=fixed"];

/// What a driver loses, or says wrong: no number for that answer, in any form, and for others still.
#[apply(device_cases)]
#[case("lose-tuple:call=GetMetadataDelta", "delta-", &[])]
#[case("lose-last:call=GetMetadataAllocated", "allocated", &[])]
#[case("overlap:call=GetMetadataAllocated", "allocated", &[])]
#[case("past-capacity:call=GetMetadataDelta", "delta-", &[])]
#[case("type-unknown:call=GetMetadataAllocated", "allocated", &[])]
#[case("type-changes:call=GetMetadataAllocated", "allocated", &SEVERAL_MESSAGES)]
#[case("capacity-wrong:call=GetMetadataDelta", "delta-", &[])]
#[case("capacity-changes:call=GetMetadataAllocated", "allocated", &SEVERAL_MESSAGES)]
#[case("capacity-changes:call=GetMetadataDelta,after=0", "delta-", &[])]
async fn a_wrong_answer_has_no_figure(
    rig: Rig<Xfs>,
    #[case] fault: &str,
    #[case] wrong: &str,
    #[case] more: &[&str],
) {
    let (_serving, socket) = Lab::faulty(&rig, fault).await;
    let (csv, html) = (rig.dir.path().join("wrong.csv"), rig.dir.path().join("wrong.html"));
    let few = ["--runs", "1", "--csv", csv.to_str().expect("UTF-8"), "--html", html.to_str().expect("UTF-8")];
    let (code, result) = run(&socket, &[&few[..], more].concat()).await;
    assert_eq!((code, &result["verdict"]), (Some(1), &"wrong".into()), "{fault}: {result:#}");
    let (measured, missing) = sorted(&result);
    let refused: Vec<&str> = missing.iter().filter(|(_, kind)| *kind == "wrong").map(|(id, _)| *id).collect();
    assert!(refused.iter().any(|id| id.starts_with(wrong)), "{fault}: {missing:?}");
    assert!(!measured.iter().any(|id| id.starts_with(wrong)), "{fault}: {measured:?}");
    for id in ["create", "snapshot-first", "restore", "clone", "delete-volume", "write-before"] {
        assert!(measured.contains(&id), "{fault}: {id}: {missing:?}");
    }
    if wrong == "delta-" {
        // One range that is lost may be of what was written while the snapshot was taken, which the next delta need not have.
        let by_writes = ["write-after", "write-during"].iter().filter(|_| !fault.starts_with("lose"));
        let mut by_deltas = ["many-delta-last", "many-delta-first"].iter().chain(by_writes);
        assert!(by_deltas.all(|id| refused.contains(id)), "{fault}: {refused:?}");
    }
    let csv = std::fs::read_to_string(csv).expect("CSV");
    let line = csv.lines().find(|line| line.contains(&format!(",{wrong}"))).expect("a line");
    assert!(line.contains(",0,,,,") && line.contains("wrong answer, no figure: "), "{line}");
    assert!(std::fs::read_to_string(html).expect("HTML").contains("WRONG: "));
    assert_empty(&mut rig).await;
}

/// What a driver does not claim, or has no space for, is left out with the reason, and is no failure.
#[apply(device_test)]
async fn what_a_driver_cannot_is_left_out() {
    let mut rig = Rig::start_with(PoolKind::Xfs, &["--max-volume-size", "1Gi"], "info").await;
    let (_serving, socket) = Lab::faulty(&rig, "no-service").await;
    let (code, result) = run(&socket, &["--runs", "1", "--size", "64Mi,2Gi"]).await;
    assert_eq!(code, Some(0), "{result:#}");
    let (measured, missing) = sorted(&result);
    assert!(missing.iter().all(|(_, kind)| *kind == "left-out"), "{missing:?}");
    for id in ["allocated", "delta-1-at-once", "delta-1-later", "many-delta-first", "create"] {
        assert!(missing.iter().any(|(left, _)| *left == id), "{id}: {missing:?}");
    }
    assert!(measured.contains(&"restore") && measured.contains(&"write-after"), "{measured:?}");
    let large =
        result["figures"].as_array().into_iter().flatten().find(|figure| figure["size"] == 2_147_483_648_u64);
    let why = large.expect("the large size")["missing"]["why"].as_str().expect("a reason");
    assert!(why.contains("OUT_OF_RANGE"), "{why}");
    assert_empty(&mut rig).await;
    rig.finish();
}

/// Incident: with `--bare-dir` on ext4 a volume of 16 TiB was not measured at all, since ext4 has no file of that size.
#[apply(device_test)]
async fn a_volume_larger_than_a_bare_file_can_be_is_measured_alone() {
    let mut rig = Rig::start_with(PoolKind::Xfs, &["--max-volume-size", "16Ti"], "info").await;
    let disk = Disk::ext4(64 << 20);
    let bare = disk.mount_point.to_str().expect("UTF-8");
    let flags = ["--bare-dir", bare, "--size", "64Mi,16Ti", "--runs", "1", "--snapshots", "0"];
    let (code, result) = run(&rig.socket(), &flags).await;
    assert_eq!((code, &result["verdict"]), (Some(0), &"right".into()), "{result:#}");
    for (size, has_bare) in [(64 << 20, true), (16_u64 << 40, false)] {
        let mut figures = result["figures"].as_array().into_iter().flatten();
        let restore = figures.find(|figure| figure["id"] == "restore" && figure["size"] == size);
        let restore = restore.expect("a restore of each size");
        assert!(restore["measured"]["median"].is_number(), "{restore}");
        assert_eq!(restore["bare"].is_object(), has_bare, "{restore}");
    }
    assert_empty(&mut rig).await;
    rig.finish();
}

/// Nothing was measured, which is no finding about the driver.
#[apply(device_test)]
async fn a_set_up_that_is_refused_is_wrong_usage(rig: Rig<Dir>) {
    let output = bench(&rig.socket(), &["--parameter", "foo=bar"]).output().await.expect("run");
    let told = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{}", said(&output));
    assert!(output.stdout.is_empty(), "{}", said(&output));
    assert!(told.contains("CreateVolume: INVALID_ARGUMENT") && told.contains("foo"), "{told}");
    assert_empty(&mut rig).await;
}

/// A call that fails ends that life, is reported, and leaves nothing.
#[apply(device_test)]
async fn a_call_that_fails_is_told(rig: Rig<Xfs>) {
    let (_serving, socket) = Lab::faulty(&rig, "refuse:call=CreateSnapshot,code=INTERNAL").await;
    let (code, result) = run(&socket, &[]).await;
    assert_eq!((code, &result["verdict"]), (Some(1), &"failed".into()), "{result:#}");
    let (measured, missing) = sorted(&result);
    assert_eq!(measured, ["create"]);
    assert_eq!(missing, [("snapshot-first", "failed")]);
    let trouble = result["troubles"][0].as_str().expect("a trouble");
    assert!(trouble.contains("CreateSnapshot: INTERNAL"), "{result:#}");
    assert_empty(&mut rig).await;
}

/// A driver that does not say how much is left is measured by the filesystem that it stores on.
#[apply(device_test)]
async fn space_is_measured_without_get_capacity() {
    let mut rig = Rig::start(PoolKind::Xfs).await;
    let (_serving, socket) = Lab::faulty(&rig, "refuse:call=GetCapacity,code=INTERNAL").await;
    let pool = rig.pool_dir();
    let flags = ["--snapshots", "0", "--runs", "1", "--space-dir", pool.to_str().expect("UTF-8")];
    let free = || deltapath::sys::space(&pool).expect("statvfs").available;
    let at_first = free();
    for (flags, expected) in [(&flags[..4], 0), (&flags, 4)] {
        // xfs frees in the background what the run before deleted, 8 MiB and more, and this run would count it as its own.
        eventually("what was deleted is freed", async || free() + (4 << 20) >= at_first).await;
        let (code, result) = run(&socket, flags).await;
        assert_eq!(code, Some(0), "{result:#}");
        let (measured, _) = sorted(&result);
        let spaces = measured.iter().filter(|id| id.starts_with("space-")).count();
        assert_eq!(spaces, expected, "{flags:?}: {result:#}");
    }
    assert_empty(&mut rig).await;
}

/// Ctrl-C and SIGTERM at any time: nothing is left, and what was measured is printed.
#[apply(device_test)]
async fn a_signal_at_any_time_leaves_nothing(rig: Rig<Xfs>) {
    let work = rig.dir.path().join("work");
    let bare = rig.dir.path().join("bare");
    for dir in [&work, &bare] {
        std::fs::create_dir(dir).expect("mkdir");
    }
    let [staging, target] = ["staging", "target"].map(|name| work.join(name));
    let text = |path: &Path| path.to_str().expect("UTF-8").to_owned();
    let (at_staging, at_target, at_bare) = (text(&staging), text(&target), text(&bare));
    let dirs =
        ["--staging-dir", &at_staging, "--target-dir", &at_target, "--bare-dir", &at_bare, "--runs", "50"];
    for (signal, sign, millis) in [
        (Signal::SIGINT, "NodePublishVolume", 0),
        (Signal::SIGTERM, "CreateSnapshot", 0),
        (Signal::SIGINT, "GetMetadataDelta", 20),
        (Signal::SIGINT, "DeleteVolume", 400),
    ] {
        let before = rig.log().len();
        let running = bench(&rig.socket(), &dirs).spawn().expect("spawn");
        eventually(sign, async || rig.log()[before..].contains(sign)).await;
        tokio::time::sleep(Duration::from_millis(millis)).await;
        testkit::signal(running.id().expect("it runs"), signal);
        let output = running.wait_with_output().await.expect("wait");
        assert_eq!(output.status.code(), Some(130), "{signal} at {sign}: {}", said(&output));
        let result: Value = serde_json::from_slice(&output.stdout).expect("a result");
        assert_eq!(result["verdict"], "interrupted");
        assert_eq!(result["left_behind"], Value::Array(Vec::new()));
        assert_empty(&mut rig).await;
        testkit::nothing_left(&work);
        assert!(!staging.exists() && !target.exists(), "directories are left");
        assert_eq!(std::fs::read_dir(&bare).expect("list").count(), 0, "bare files are left");
    }
}
