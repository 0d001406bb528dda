//! Promise: an answer is whole and right, or there is an error that says what to do. The driver's part is played by a script,
//! over a real socket. What Kubernetes adds is tested in crates/kit/gateway/tests/suite/library.rs, with a real API server.
#![allow(clippy::disallowed_methods)]

mod package;
mod server;

use std::collections::HashMap;
use std::time::Duration;

use server::{CAPACITY, End, Fault, Fields, Server};
use snapshot_metadata_client::{Advice, Blocks, Client, Error, Policy, Query, Range, Style, Violation};
use tonic::Code;

/// Forty ranges, in ten messages.
fn ranges() -> Vec<(i64, i64)> {
    (0..40).map(|number| (number * 8192, 4096)).collect()
}

/// The byte after the last range of this number of messages.
fn after(messages: i64) -> i64 {
    messages * 4 * 8192 - 4096
}

fn quick() -> Policy {
    Policy {
        retries: 3,
        backoff: Duration::from_millis(5),
        idle: Duration::from_millis(400),
        ..Policy::default()
    }
}

struct World {
    server: Server,
    client: Client,
    _dir: tempfile::TempDir,
}

fn world(ranges: &[(i64, i64)], script: &[Fault]) -> World {
    let dir = tempfile::tempdir().expect("temp dir");
    let server = Server::start(&dir.path().join("csi.sock"), ranges, script);
    let client = Client::csi(&server.endpoint()).expect("an endpoint").with_policy(quick());
    World { server, client, _dir: dir }
}

fn pairs(ranges: &[Range]) -> Vec<(i64, i64)> {
    ranges.iter().map(|range| (range.offset as i64, range.length as i64)).collect()
}

/// All that comes, and how it ends.
async fn drain(mut blocks: Blocks) -> (Vec<(i64, i64)>, Result<Blocks, Error>) {
    let mut got = Vec::new();
    loop {
        match blocks.next().await {
            Some(Ok(ranges)) => {
                assert!(!ranges.is_empty());
                got.extend(pairs(&ranges));
            }
            Some(Err(error)) => {
                assert!(blocks.next().await.is_none(), "something came after an error");
                return (got, Err(error));
            }
            None => {
                assert!(blocks.next().await.is_none(), "something came after the end");
                return (got, Ok(blocks));
            }
        }
    }
}

#[tokio::test]
async fn a_stream_that_is_cut_goes_on_where_it_was() {
    use Fault::*;
    const OK: Fields = &[("grpc-status", "0")];
    /// The first of the nine bytes of a message.
    const CUT: &[u8] = b"\0\0\0\0\x09abc";
    let none = End::default();
    for (what, script, offsets) in [
        ("nothing happens", vec![], vec![0]),
        ("unavailable", vec![Status(3, Code::Unavailable)], vec![0, after(3)]),
        ("before the first message", vec![Status(0, Code::Unavailable)], vec![0, 0]),
        ("busy", vec![Status(0, Code::ResourceExhausted), Status(0, Code::ResourceExhausted)], vec![0, 0, 0]),
        ("busy midway", vec![Status(1, Code::ResourceExhausted)], vec![0, after(1)]),
        ("aborted", vec![Status(2, Code::Aborted)], vec![0, after(2)]),
        ("cancelled by the server", vec![Status(2, Code::Cancelled)], vec![0, after(2)]),
        ("the server's deadline", vec![Status(2, Code::DeadlineExceeded)], vec![0, after(2)]),
        ("internal", vec![Status(2, Code::Internal)], vec![0, after(2)]),
        ("without a status", vec![Ends(4, End::default())], vec![0, after(4)]),
        // tonic takes these two for whole answers.
        ("within a message", vec![Ends(4, End { bytes: CUT, trailers: OK, ..none })], vec![0, after(4)]),
        ("with a status in the head alone", vec![Ends(4, End { head: OK, ..none })], vec![0, after(4)]),
        ("silent", vec![Silent(5)], vec![0, after(5)]),
        ("silent from the beginning", vec![Silent(0)], vec![0, 0]),
        (
            "more often than the retries in a row",
            (0..8).map(|_| Status(1, Code::Unavailable)).collect(),
            (0..=8).map(|part| if part == 0 { 0 } else { after(part) }).collect(),
        ),
        ("everything comes again", vec![Status(3, Code::Unavailable), FromTheBeginning], vec![0, after(3)]),
        ("rounded down", vec![Status(3, Code::Unavailable), RoundsDown(65536)], vec![0, after(3)]),
        // The last range ends far before the end of the volume, so that there is nothing more is an answer.
        ("after the last range", vec![Status(10, Code::Unavailable)], vec![0, after(10)]),
        (
            "after the last range, and then no message",
            vec![Status(10, Code::Unavailable), EarlyOk(0)],
            vec![0, after(10), after(10) - 4096],
        ),
    ] {
        let world = world(&ranges(), &script);
        let blocks = world.client.allocated("target").await.unwrap_or_else(|error| panic!("{what}: {error}"));
        assert_eq!((blocks.capacity(), blocks.style()), (CAPACITY as u64, Style::VariableLength));
        let (got, end) = drain(blocks).await;
        let blocks = end.unwrap_or_else(|error| panic!("{what}: {error}"));
        assert_eq!(got, ranges(), "{what}");
        assert_eq!(world.server.offsets(), offsets, "{what}");
        assert_eq!(blocks.position() as i64, after(10), "{what}");
        // The same as a delta, from another server with that script.
        let world = self::world(&ranges(), &script);
        let delta = world.client.delta("base", "target").await.expect("a delta").collect_all().await;
        assert_eq!(pairs(&delta.expect("a whole delta")), ranges(), "{what}");
    }
}

#[tokio::test]
async fn a_driver_may_be_away_for_a_while() {
    let dir = tempfile::tempdir().expect("temp dir");
    let socket = dir.path().join("csi.sock");
    let first = Server::start(&socket, &ranges(), &[Fault::Silent(2)]);
    let policy = Policy { retries: 100, max_backoff: Duration::from_millis(50), ..quick() };
    let client = Client::csi(&first.endpoint()).expect("an endpoint").with_policy(policy);
    let blocks = client.allocated("target").await.expect("a stream");
    drop(first);
    let draining = tokio::spawn(drain(blocks));
    tokio::time::sleep(Duration::from_millis(200)).await;
    assert!(!draining.is_finished(), "it ended while the driver was away");
    let second = Server::start(&socket, &ranges(), &[]);
    let (got, end) = draining.await.expect("no panic");
    assert_eq!((got, end.is_ok()), (ranges(), true));
    assert_eq!(second.offsets().len(), 1);
}

#[tokio::test]
async fn the_last_bytes_of_a_volume_are_asked_for_from_a_known_range_on() {
    use Fault::*;
    // A volume whose last range ends where the volume does, and one whose last range ends inside a block.
    for (last, again) in
        [((CAPACITY - 8192, 8192), CAPACITY - 8192), ((CAPACITY - 8192, 1000), CAPACITY - 8192)]
    {
        let known = [(0, 4096), last];
        let world = world(&known, &[Status(1, Code::Unavailable)]);
        let (got, end) = drain(world.client.allocated("target").await.expect("a stream")).await;
        assert_eq!((got.as_slice(), end.is_ok()), (&known[..], true));
        assert_eq!(world.server.offsets(), [0, again]);
        // A server that does not know it any more is not believed.
        let script = [Status(1, Code::Unavailable), Forgets(last)];
        let world = self::world(&known, &script);
        let (got, end) = drain(world.client.delta("base", "target").await.expect("a stream")).await;
        let error = end.expect_err("a range is gone");
        assert!(matches!(&error, Error::Invalid { violation: Violation::Forgotten(_), .. }), "{error}");
        assert_eq!((got.as_slice(), error.advice()), (&known[..], Advice::FullBackup));
    }
}

#[tokio::test]
async fn what_goes_on_has_to_fit_to_what_came() {
    use Fault::*;
    let cut = || Status(3, Code::Unavailable);
    for (what, script, words) in [
        ("another capacity", vec![cut(), Capacity(1 << 30)], "volume_capacity_bytes was 1048576 first"),
        ("a smaller one", vec![cut(), Capacity(1 << 16)], "volume_capacity_bytes was 1048576 first"),
        ("another style", vec![cut(), FixedLength], "block_metadata_type was VariableLength first"),
        ("the wrong order", vec![cut(), Backwards], "a range begins at"),
        ("the wrong order at once", vec![Backwards], "a range begins at"),
        ("past the end", vec![Capacity(5 * 8192)], "is not in a volume of 40960 bytes"),
        ("no message", vec![EarlyOk(0)], "without any message"),
        ("no message after retries", vec![Status(0, Code::Unavailable), EarlyOk(0)], "without any message"),
        ("an end that is not there twice", vec![cut(), EarlyOk(0), EarlyOk(0)], "is not in it any more"),
    ] {
        let world = world(&ranges(), &script);
        let (got, error) = match world.client.delta("base", "target").await {
            Err(error) => (Vec::new(), error),
            Ok(blocks) => {
                let (got, end) = drain(blocks).await;
                (got, end.err().unwrap_or_else(|| panic!("{what}: taken for whole")))
            }
        };
        assert!(matches!(error, Error::Invalid { .. }), "{what}: {error:?}");
        assert!(error.to_string().contains(words), "{what}: {error}");
        assert_eq!(error.advice(), Advice::FullBackup, "{what}");
        assert!(ranges().starts_with(&got), "{what}: {got:?}");
    }
}

#[tokio::test]
async fn errors_that_stay_end_it_at_once_and_others_after_some_tries() {
    use Fault::Status;
    for (code, advice) in [
        (Code::NotFound, Advice::FullBackup),
        (Code::FailedPrecondition, Advice::FullBackup),
        (Code::Unimplemented, Advice::FullBackup),
        (Code::DataLoss, Advice::FullBackup),
        (Code::PermissionDenied, Advice::Stop),
        (Code::Unauthenticated, Advice::Stop),
        (Code::InvalidArgument, Advice::Stop),
        (Code::OutOfRange, Advice::Stop),
    ] {
        for messages in [0, 2] {
            let world = world(&ranges(), &[Status(messages, code)]);
            let error = match world.client.delta("base", "target").await {
                Err(error) => error,
                Ok(blocks) => drain(blocks).await.1.expect_err("it fails"),
            };
            assert_eq!((error.code(), error.advice()), (Some(code), advice), "{error}");
            assert_eq!(
                error.to_string(),
                format!("GetMetadataDelta: the server answered {code:?}: as the script says")
            );
            assert_eq!(world.server.offsets(), [0], "{code:?} was tried again");
        }
    }
    // Three retries in a row without a range bring nothing.
    let script = [2, 0, 0, 0, 0].map(|messages| Status(messages, Code::Unavailable));
    let world = world(&ranges(), &script);
    let (got, end) = drain(world.client.delta("base", "target").await.expect("a stream")).await;
    let error = end.expect_err("it gives up");
    assert_eq!((got.len(), error.advice(), error.code()), (8, Advice::Retry, Some(Code::Unavailable)));
    let said = format!("GetMetadataDelta failed 4 times in a row at byte {}, the last time with: ", after(2));
    assert!(error.to_string().starts_with(&said), "{error}");
    assert_eq!(world.server.offsets(), [0, after(2), after(2), after(2)]);
}

/// tonic takes words that cannot be read for a failure of its own, which is tried again, and panics at such details.
#[tokio::test]
async fn a_status_counts_whatever_comes_with_it() {
    const FIELDS: [(Fields, &str); 3] = [
        (&[("grpc-status", "9"), ("grpc-message", "a%FFb")], "a\u{fffd}b"),
        (&[("grpc-status", "9"), ("grpc-status-details-bin", "***")], ""),
        (
            &[("grpc-status", "9"), ("grpc-message", "said%20so"), ("grpc-status-details-bin", "***")],
            "said so",
        ),
    ];
    for (fields, said) in FIELDS {
        let behind = |messages| Fault::Ends(messages, End { trailers: fields, ..End::default() });
        let at_once = Fault::Ends(0, End { head: fields, ..End::default() });
        for fault in [at_once, behind(0), behind(2)] {
            let world = world(&ranges(), &[fault]);
            let error = match world.client.delta("base", "target").await {
                Err(error) => error,
                Ok(blocks) => drain(blocks).await.1.expect_err("it fails"),
            };
            assert_eq!(error.code(), Some(Code::FailedPrecondition), "{fields:?}: {error}");
            assert!(error.to_string().ends_with(said), "{fields:?}: {error}");
            assert_eq!(world.server.offsets(), [0], "{fields:?}: it was tried again");
        }
    }
}

#[tokio::test]
async fn nobody_on_the_socket_is_an_error_that_names_it() {
    let dir = tempfile::tempdir().expect("temp dir");
    let endpoint = format!("unix://{}", dir.path().join("none.sock").display());
    for (retries, words) in
        [(0, "cannot connect to unix:///"), (2, "GetMetadataAllocated failed 3 times in a row")]
    {
        let client = Client::csi(&endpoint).expect("an endpoint").with_policy(Policy { retries, ..quick() });
        let error = client.allocated("target").await.expect_err("nobody is there");
        let said = error.to_string();
        assert!(said.starts_with(words) && said.contains(&endpoint), "{said}");
        assert!(said.contains("No such file"), "{said}");
        assert_eq!(error.advice(), Advice::Retry);
    }
    for endpoint in ["", "csi.sock", "http://localhost:50051", "unix://csi.sock"] {
        let error = Client::csi(endpoint).map(drop).expect_err("no endpoint");
        assert!(matches!(error, Error::Endpoint(_)), "{endpoint}: {error}");
    }
}

#[tokio::test]
async fn a_backup_can_go_on_from_an_offset() {
    let world = world(&ranges(), &[Fault::RoundsDown(4096), Fault::RoundsDown(4096)]);
    let query = Query::Allocated { snapshot: "target".into() };
    let blocks = world.client.query(query.clone(), 8192 * 39 + 100).await.expect("a stream");
    assert_eq!(blocks.position(), 8192 * 39 + 100);
    assert_eq!(pairs(&blocks.collect_all().await.expect("whole")), [(8192 * 39 + 100, 3996)]);
    // Nothing is left, which is an answer.
    let blocks = world.client.query(query, 8192 * 40).await.expect("a stream");
    assert_eq!(blocks.capacity(), CAPACITY as u64);
    assert_eq!(blocks.collect_all().await.expect("whole"), []);
    assert_eq!(world.client.snapshot_handle("target").await.expect("a handle"), "target");
}

#[tokio::test]
async fn an_answer_may_be_empty() {
    let world = world(&[], &[]);
    let blocks = world.client.delta("base", "target").await.expect("a stream");
    assert_eq!(blocks.capacity(), CAPACITY as u64);
    assert_eq!(blocks.collect_all().await.expect("whole"), []);
}

#[tokio::test]
async fn a_call_that_is_given_up_loses_nothing() {
    let world = world(&ranges(), &[Fault::Silent(1), Fault::Silent(1), Fault::Silent(1)]);
    let mut blocks = world.client.allocated("target").await.expect("a stream");
    let mut got = Vec::new();
    loop {
        // In the middle of a wait for a message, a pause and a connection.
        match tokio::time::timeout(Duration::from_millis(7), blocks.next()).await {
            Err(_) => {}
            Ok(Some(ranges)) => got.extend(pairs(&ranges.expect("ranges"))),
            Ok(None) => break,
        }
        if world.server.offsets().len() < 3 {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    }
    assert_eq!(got, ranges());
}

#[tokio::test]
async fn secrets_and_limits_reach_the_driver_and_no_log() {
    let world = world(&ranges(), &[]);
    let secrets = HashMap::from([("key".to_owned(), "hidden".to_owned())]);
    let client = Client::csi_with_secrets(&world.server.endpoint(), secrets).expect("an endpoint");
    let client = client.with_policy(Policy { max_results: 7, ..quick() });
    assert!(!format!("{client:?}").contains("hidden"));
    client.allocated("target").await.expect("a stream").collect_all().await.expect("whole");
    client.delta("base", "target").await.expect("a stream").collect_all().await.expect("whole");
    assert_eq!(world.server.others(), [("hidden".to_owned(), 7), ("hidden".to_owned(), 7)]);
}
