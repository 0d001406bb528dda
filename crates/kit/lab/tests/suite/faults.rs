//! Every fault there is, seen by a client: one life of a driver (`life.rs`) is lived with each, and what it meets differs from what
//! it meets without, in the way that the table says. The page has the same catalogue.

use std::collections::{BTreeMap, BTreeSet};

use futures_util::StreamExt;
use serde_json::Value;
use testkit::pages;

use super::life::{WITHOUT, lived};

/// A fault; the step that meets it; what the client sees there. The same without a fault is [`WITHOUT`].
const SEEN: &[(&str, &str, &str)] = &[
    ("cut", "delta", "v1024[8+4 32+4] Unavailable"),
    ("cut:after=2,code=OK", "delta", "v1024[8+4 32+4] v1024[64+8 128+4] OK"),
    ("cut:after=0,code=INTERNAL", "delta", "Internal"),
    ("stall", "delta", "no end"),
    ("stall:after=1", "delta", "v1024[8+4 32+4] no end"),
    ("stall:call=Probe", "probe", "no end"),
    ("late-first-message:ms=60000", "delta", "no end"),
    ("delay:ms=60000,call=GetMetadataDelta", "delta", "no end"),
    ("drip:ms=60000", "delta", "no end"),
    ("reset:call=Probe", "probe", "Unknown"),
    ("reset:after=1,call=GetMetadataDelta", "delta", "v1024[8+4 32+4] Unknown"),
    ("no-first-message", "delta", "v1024[64+8 128+4] v1024[512+4] OK"),
    ("repeat-message:after=2", "delta", "v1024[8+4 32+4] v1024[64+8 128+4] v1024[512+4] v1024[512+4] OK"),
    ("read-ahead", "deadline", "whole OK"),
    ("huge-messages", "delta", "OutOfRange"),
    ("swap-tuples", "delta", "v1024[32+4 8+4] v1024[128+4 64+8] v1024[512+4] OK"),
    ("swap-messages", "delta", "v1024[8+4 32+4] v1024[512+4] v1024[64+8 128+4] OK"),
    (
        "overlap",
        "delta",
        "v1024[8+25088b] v1024[32+33280b] v1024[64+66048b] v1024[128+393728b] v1024[512+4] OK",
    ),
    ("duplicate-tuple", "delta", "v1024[8+4 8+4 32+4] v1024[64+8 64+8 128+4] v1024[512+4 512+4] OK"),
    ("empty-tuple", "delta", "v1024[8+0 32+4] v1024[64+0 128+4] v1024[512+0] OK"),
    ("negative-offset", "delta", "v1024[-4+4 32+4] v1024[-4+8 128+4] v1024[-4+4] OK"),
    ("negative-size", "delta", "v1024[8+-4 32+4] v1024[64+-8 128+4] v1024[512+-4] OK"),
    ("past-capacity", "delta", "v1024[8+4 32+4] v1024[64+8 128+4] v1024[512+524800b] OK"),
    ("last-fixed-past-capacity", "delta", "f1024[8+4 32+4] f1024[64+8 128+4] f1024[512+524800b] OK"),
    ("type-unknown", "delta", "?1024[8+4 32+4] ?1024[64+8 128+4] ?1024[512+4] OK"),
    ("type-changes", "delta", "v1024[8+4 32+4] f1024[64+8 128+4] f1024[512+4] OK"),
    ("fixed-uneven", "delta", "f1024[8+4 32+4] f1024[64+8 128+4] f1024[512+4] OK"),
    ("capacity-changes:after=2", "delta", "v1024[8+4 32+4] v1024[64+8 128+4] v1028[512+4] OK"),
    ("capacity-wrong", "delta", "v512[8+4 32+4] v512[64+8 128+4] v512[512+4] OK"),
    ("empty-without-message", "unchanged", "OK"),
    ("empty-is-error", "unchanged", "Internal"),
    ("end-repeats-last", "at the end", "v1024[1020+4] OK"),
    ("end-is-error", "at the end", "OutOfRange"),
    ("lose-tuple:after=2", "delta", "v1024[8+4 32+4] v1024[128+4] v1024[512+4] OK"),
    ("lose-last", "delta", "v1024[8+4 32+4] v1024[64+8 128+4] v1024[] OK"),
    ("lose-share:percent=100", "delta", "v1024[] v1024[] v1024[] OK"),
    ("lose-small", "delta", "v1024[] v1024[64+8] v1024[] OK"),
    ("lose-later:after=3", "delta", "v1024[8+4 32+4] v1024[64+8] OK"),
    ("lose-discarded", "delta", "v1024[8+4 32+4] v1024[64+8 128+4] v1024[512+4] OK"),
    ("lose-when-asked-again", "again", "v1024[32+4] v1024[64+8 128+4] v1024[512+4] OK"),
    ("lose-after-cancel", "after a cancel", "v1024[8+4 32+4] v1024[64+8 128+4] v1024[] OK"),
    ("lose-beside", "beside another", "v1024[8+4 32+4] v1024[64+8 128+4] v1024[] OK"),
    ("lose-slow:ms=20", "read slowly", "cut OK"),
    ("too-much", "delta", "v1024[0+1024] OK"),
    ("ignore-max-results", "delta", "v1024[8+4 32+4 64+8 128+4 512+4] OK"),
    ("negative-bound-is-none", "negative max_results", "v1024[8+4 32+4 64+8 128+4 512+4] OK"),
    ("negative-bound-cuts", "negative max_results", "v1024[8+4 32+4 64+8 128+4] OK"),
    ("ignore-offset", "resumed", "v1024[8+4 32+4] v1024[64+8 128+4] v1024[512+4] OK"),
    ("round-offset-up", "resumed", "v1024[64+8 128+4] v1024[512+4] OK"),
    ("shifted-window", "resumed", "v1024[28+4 64+8] v1024[124+4 508+4] OK"),
    ("refuse:code=DATA_LOSS,call=Probe", "probe", "DataLoss"),
    ("burst:call=GetMetadataDelta,times=1,of=2", "delta", "Unavailable"),
    ("put-off", "volume", "Aborted"),
    ("error-becomes", "unknown", "Internal"),
    // Of nothing no capacity is known.
    ("error-becomes:code=OK", "unknown", "OK"),
    ("error-becomes:from=INVALID_ARGUMENT,code=OK", "negative max_results", "v1024[] OK"),
    ("same-is-refused", "same", "InvalidArgument"),
    ("wants-secrets", "delta", "Unauthenticated"),
    ("no-service", "services", "Controller GroupController"),
    ("no-service", "delta", "Unimplemented"),
    ("service-not-claimed", "services", "Controller GroupController"),
    ("groups-not-claimed", "services", "Controller SnapshotMetadata"),
    ("expansion-not-claimed", "expands", "false"),
    ("node-elsewhere", "node", "Unimplemented"),
    ("base-gone", "delta", "v1024[8+4 32+4] NotFound"),
    ("base-gone", "again", "NotFound"),
    ("base-gone-is-empty", "base deleted", "v1024[] OK"),
    ("base-gone-is-error:code=DATA_LOSS", "base deleted", "DataLoss"),
    ("base-gone-loses-later", "base deleted, again", "v1024[] v1024[] v1024[] OK"),
    ("source-gone", "source deleted", "NotFound"),
    ("lose-after-delete", "after a delete", "v1024[32+4] v1024[64+8 128+4] v1024[512+4] OK"),
    ("delete-ends-streams", "deleted meanwhile", "cut OK"),
    ("lose-after-restore", "after a restore", "v1024[32+4] v1024[64+8 128+4] v1024[512+4] OK"),
    ("lose-restored", "of a restored volume", "lost"),
    ("lose-after-clone", "after a clone", "v1024[32+4] v1024[64+8 128+4] v1024[512+4] OK"),
    ("lose-after-modify", "after a change", "v1024[32+4] v1024[64+8 128+4] v1024[512+4] OK"),
    ("modify-ends-streams", "modified meanwhile", "cut OK"),
    ("expand-ends-streams", "expanded meanwhile", "cut OK"),
    ("clone-ends-streams", "cloned meanwhile", "cut OK"),
    ("lose-after-expand", "expanded, base", "v1024[8+4 32+4] v1024[64+8 128+4] v1024[] OK"),
    ("restored-in-use", "restored volume in use", "Aborted"),
    ("old-snapshots-grow", "expanded, base", "v2048[8+4 32+4] v2048[64+8 128+4] v2048[512+4] OK"),
    ("grown-stays-small", "expanded", "v1024[1536+4] OK"),
    ("lose-grown", "expanded", "v2048[] OK"),
    ("resume-grown-fails", "expanded, resumed", "OutOfRange"),
    ("lose-group-members", "group", "v1024[] OK"),
    ("filesystem-is-error", "filesystem", "Internal"),
    ("filesystem-is-empty", "filesystem", "v1024[] OK"),
    ("deadline-is-ok", "deadline", "cut OK"),
    ("snapshot-not-ready", "snapshot", "not ready"),
    ("fails-after-success", "snapshot", "Internal"),
];

#[tokio::test(flavor = "multi_thread")]
async fn every_fault_is_seen_and_in_the_way_that_its_name_says() {
    let without = lived(None, None).await;
    let expected: BTreeMap<&str, String> =
        WITHOUT.iter().map(|(step, seen)| (*step, (*seen).to_owned())).collect();
    assert_eq!(without, expected);
    let lives = SEEN.iter().map(|(fault, step, expected)| async move {
        let seen = lived(Some(fault), Some(step)).await;
        (fault, step, expected, seen[step].clone())
    });
    let mut lives = futures_util::stream::iter(lives).buffer_unordered(6);
    let mut wrong = Vec::new();
    while let Some((fault, step, expected, seen)) = lives.next().await {
        if seen != **expected {
            wrong.push(format!("{fault}: {step}:\n  expected {expected}\n  saw      {seen}"));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

pub(crate) fn catalog() -> Value {
    let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_cbt-lab"));
    let output = command.args(["faults", "--list", "--output", "json"]).output().expect("run");
    serde_json::from_slice(&output.stdout).expect("JSON")
}

fn names() -> BTreeSet<String> {
    let all = catalog();
    let all = all["faults"].as_array().expect("a list");
    all.iter().map(|fault| fault["name"].as_str().expect("a name").to_owned()).collect()
}

/// No fault is one that nobody has seen; the two that this driver cannot show are seen elsewhere.
#[test]
fn every_fault_is_in_the_table() {
    let mut seen: BTreeSet<String> =
        SEEN.iter().map(|(fault, ..)| fault.split(':').next().unwrap_or_default().to_owned()).collect();
    // `tls-expired` in `mock.rs`; those about who asks, and about what comes before TLS, before a gateway
    // (`crates/kit/gateway/tests/suite/conformance.rs`).
    let elsewhere = [
        "tls-expired",
        "tls-other-host",
        "tls-other-authority",
        "tls-old-versions",
        "plaintext",
        "token-not-needed",
        "audience-not-checked",
        "expiry-not-checked",
        "signature-not-checked",
        "rights-not-checked",
        "namespace-not-checked",
    ];
    seen.extend(elsewhere.map(str::to_owned));
    assert_eq!(seen, names());
}

/// The page has a row for every fault, with what it takes and does, and no other.
#[test]
fn the_page_is_the_catalogue() {
    let page = pages::read("docs/faults.md");
    let (page, _) = page.split_once("\n## What a client makes of them\n").expect("the section of clients");
    let rows: BTreeSet<&str> = page.lines().filter(|line| line.starts_with("| `")).collect();
    let all = catalog();
    let mut wanted = BTreeSet::new();
    for fault in all["faults"].as_array().expect("a list") {
        let takes: Vec<String> = fault["takes"]
            .as_array()
            .expect("a list")
            .iter()
            .map(|pair| format!("`{}={}`", pair[0].as_str().expect("text"), pair[1].as_str().expect("text")))
            .collect();
        let text = |key: &str| fault[key].as_str().expect(key).to_owned();
        wanted.insert(format!("| `{}` | {} | {} |", text("name"), takes.join(", "), text("does")));
    }
    for key in ["values", "limits"] {
        for pair in all[key].as_array().expect("a list") {
            wanted.insert(format!(
                "| `{}` | {} |",
                pair[0].as_str().expect("text"),
                pair[1].as_str().expect("text")
            ));
        }
    }
    let wanted: BTreeSet<&str> = wanted.iter().map(String::as_str).collect();
    let (missing, others): (Vec<_>, Vec<_>) =
        (wanted.difference(&rows).collect(), rows.difference(&wanted).collect());
    assert!(missing.is_empty(), "not in docs/faults.md:\n{missing:#?}");
    assert!(others.is_empty(), "in docs/faults.md alone:\n{others:#?}");
}
