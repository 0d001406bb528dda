//! What a backup tool's client makes of each fault: the library of this project, `snapshot-metadata-client`, with which our own
//! tool reads. It goes on and has the whole answer, it fails with an advice, or the fault is one that no client can see. What
//! the tool itself makes of them is tested beside it.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use snapshot_metadata_client::{Advice, Client, Policy};

use testkit::lab::{Lab, clients_table};

/// What comes of a delta under each of these; the page has the same table.
const SURVIVES: &[(&str, &str)] = &[
    ("cut:first=1", "whole: it continues"),
    ("cut", "error: retry"),
    ("cut:after=0", "error: retry"),
    ("cut:bytes=100,first=1", "whole: it continues"),
    ("cut:code=OK", "not seen"),
    ("cut:code=NOT_FOUND", "error: full backup"),
    ("cut:first=1;ignore-offset", "whole: it continues"),
    ("stall:after=2,first=1", "whole: it continues"),
    ("stall", "error: retry"),
    ("late-first-message:ms=300", "whole"),
    ("delay:ms=300", "whole"),
    ("drip:ms=20", "whole"),
    ("reset:call=GetMetadataDelta,after=2,first=1", "whole: it continues"),
    ("reset", "error: retry"),
    ("no-first-message", "not seen"),
    ("repeat-message", "error: full backup"),
    ("swap-tuples", "error: full backup"),
    ("swap-messages", "error: full backup"),
    ("overlap", "error: full backup"),
    ("duplicate-tuple", "error: full backup"),
    ("empty-tuple", "error: full backup"),
    ("negative-offset", "error: full backup"),
    ("negative-size", "error: full backup"),
    ("past-capacity", "error: full backup"),
    ("last-fixed-past-capacity", "more than changed"),
    ("type-unknown", "error: full backup"),
    ("type-changes", "error: full backup"),
    ("fixed-uneven", "whole"),
    ("capacity-changes", "error: full backup"),
    ("capacity-wrong", "error: full backup"),
    ("lose-tuple", "not seen"),
    ("lose-last", "not seen"),
    ("lose-share", "not seen"),
    ("lose-small", "not seen"),
    ("lose-later:after=7", "not seen"),
    ("too-much", "more than changed"),
    ("refuse:call=GetMetadataDelta,first=2", "whole"),
    ("refuse:call=GetMetadataDelta", "error: retry"),
    ("refuse:call=GetMetadataDelta,code=UNAUTHENTICATED", "error: stop"),
    ("burst:call=GetMetadataDelta,times=2,of=5", "whole"),
    ("wants-secrets:call=GetMetadataDelta", "error: stop"),
    ("no-service:call=GetMetadataDelta", "error: full backup"),
    ("base-gone", "error: full backup"),
    ("read-ahead", "whole"),
    ("huge-messages", "whole"),
];

/// A delta under a fault, as a client that does not wait long sees it.
async fn outcome(fault: Option<&str>, whole: Option<&[(u64, u64)]>) -> (String, Vec<(u64, u64)>) {
    let dir = tempfile::tempdir().expect("temp dir");
    // Many blocks lie side by side, so the ranges are of several sizes.
    let fixed =
        ["--volume", "disk=512Ki", "--snapshots", "2", "--changes", "60", "--tuples-per-message", "5"];
    let chosen = fault.map_or(Vec::new(), |fault| vec!["--fault", fault]);
    let (_lab, socket) = Lab::mock(&dir, &[&fixed[..], &chosen].concat()).await;
    let policy = Policy {
        retries: 3,
        backoff: Duration::from_millis(10),
        max_backoff: Duration::from_millis(50),
        idle: Duration::from_secs(3),
        ..Policy::default()
    };
    let client = Client::csi(&format!("unix://{}", socket.display())).expect("a socket").with_policy(policy);
    let mut ranges = Vec::new();
    let mut resumed = 0;
    let ended = async {
        let mut blocks = client.delta("disk-1", "disk-2").await?;
        while let Some(part) = blocks.next().await {
            ranges.extend(part?.into_iter().map(|range| (range.offset, range.end())));
            resumed = blocks.resumed();
        }
        resumed = blocks.resumed();
        Ok::<_, snapshot_metadata_client::Error>(())
    }
    .await;
    let told = match ended {
        Err(error) => match error.advice() {
            Advice::Retry => "error: retry",
            Advice::FullBackup => "error: full backup",
            Advice::Stop => "error: stop",
        },
        Ok(()) if whole.is_none_or(|whole| whole == ranges) && resumed > 0 => "whole: it continues",
        Ok(()) if whole.is_none_or(|whole| whole == ranges) => "whole",
        Ok(()) => {
            let covers =
                |range: &(u64, u64)| ranges.iter().any(|told| told.0 <= range.0 && range.1 <= told.1);
            let has_all = whole.is_some_and(|whole| whole.iter().all(covers));
            if has_all { "more than changed" } else { "not seen" }
        }
    };
    (told.to_owned(), ranges)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_goes_on_or_says_what_to_do() {
    let (told, whole) = outcome(None, None).await;
    let sizes: BTreeSet<u64> = whole.iter().map(|(start, end)| end - start).collect();
    assert!(told == "whole" && whole.len() > 30 && sizes.len() > 1, "{told}: {whole:?}");
    let mut found = BTreeMap::new();
    for (fault, _) in SURVIVES {
        found.insert(*fault, outcome(Some(fault), Some(&whole)).await.0);
    }
    let wrong: Vec<String> = SURVIVES
        .iter()
        .filter(|(fault, expected)| found[fault] != *expected)
        .map(|(fault, expected)| format!("{fault}: expected {expected}, found {}", found[fault]))
        .collect();
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// The page has the same table.
#[test]
fn the_page_says_what_comes_of_each() {
    let rows: Vec<Vec<String>> = clients_table().into_iter().map(|row| row[..2].to_vec()).collect();
    // What `cbt-backup` and the community's iterator make of them is the business of the tests beside them.
    let wanted: Vec<[String; 2]> =
        SURVIVES.iter().map(|(fault, outcome)| [format!("`{fault}`"), (*outcome).to_owned()]).collect();
    assert_eq!(rows, wanted);
}

/// No fault of a stream is left out, but for those that a first and whole stream of ranges does not meet.
#[test]
fn every_fault_of_a_stream_is_in_the_table() {
    let elsewhere = [
        // Of a connection over TLS.
        "tls-expired",
        "tls-other-host",
        "tls-other-authority",
        "tls-old-versions",
        "plaintext",
        // Of answers without ranges, and of offsets at the end.
        "empty-without-message",
        "empty-is-error",
        "end-repeats-last",
        "end-is-error",
        // Of discarded ranges.
        "lose-discarded",
        // Of what happened before, or beside.
        "lose-when-asked-again",
        "lose-after-cancel",
        "lose-beside",
        "lose-slow",
    ];
    let groups = ["The stream and its connection", "Tuples", "Changes that are lost, or too many"];
    let mut named: BTreeSet<String> =
        SURVIVES.iter().map(|(fault, _)| fault.split(':').next().unwrap_or_default().to_owned()).collect();
    named.extend(elsewhere.map(str::to_owned));
    let all = super::faults::catalog();
    let all = all["faults"].as_array().expect("a list").iter();
    let of_streams = all.filter(|fault| groups.iter().any(|group| fault["group"] == *group));
    let of_streams: BTreeSet<String> =
        of_streams.map(|fault| fault["name"].as_str().expect("a name").to_owned()).collect();
    assert!(of_streams.len() > 40, "{of_streams:?}");
    let missing: Vec<_> = of_streams.difference(&named).collect();
    assert!(missing.is_empty(), "not in the table: {missing:?}");
}
