//! Promise: requests of both calls that are broken at random get the right code, and cost little memory.

use std::collections::BTreeSet;

use bytes::Bytes;
use futures_util::StreamExt;
use http_body_util::Full;
use proto::kubernetes::{GetMetadataAllocatedRequest, GetMetadataDeltaRequest};
use serve::relay::{frame, frame_bytes};
use tonic::Code;
use tonic::codegen::http::{HeaderMap, HeaderValue};

use crate::hostile::{ALLOCATED, call_with, connect};
use crate::world::{World, code};

const DELTA: &str = "/snapshotmetadata.SnapshotMetadata/GetMetadataDelta";
/// Bytes before a message: a flag and its length.
const PREFIX: usize = 5;

/// What a whole message may be answered with, whatever is in its fields.
const OF_MESSAGES: [Code; 6] = [
    Code::Ok,
    Code::InvalidArgument,
    Code::OutOfRange,
    Code::Unauthenticated,
    Code::PermissionDenied,
    Code::NotFound,
];

/// A request that is right, nearly right or nonsense, and the codes that may answer it.
struct Fuzzed {
    path: String,
    headers: HeaderMap,
    body: Bytes,
    allowed: Vec<Code>,
}

impl Fuzzed {
    fn new(random: &mut fastrand::Rng, token: &str, namespace: &str) -> Self {
        let is_delta = random.bool();
        let mut message = message(random, is_delta, token, namespace);
        match random.u8(..4) {
            0 => {
                for _ in 0..random.usize(1..8) {
                    let at = random.usize(..message.len() + 1);
                    message.splice(at..(at + random.usize(..2)).min(message.len()), [random.u8(..)]);
                }
            }
            1 => message = bytes(random),
            _ => {}
        }
        let mut body = frame_bytes(&message).to_vec();
        let mut allowed = match random.u8(..8) {
            // The flag of a compressed message.
            0 => {
                body[0] = random.u8(1..);
                vec![Code::Unimplemented]
            }
            // Another length.
            1 => {
                body[random.usize(1..PREFIX)] ^= random.u8(1..);
                vec![Code::InvalidArgument]
            }
            2 => {
                body.truncate(random.usize(..body.len()));
                vec![Code::InvalidArgument]
            }
            // More than one message, or the beginning of one.
            3 => {
                body.extend(&bytes(random));
                body.push(0);
                vec![Code::InvalidArgument]
            }
            _ => OF_MESSAGES.to_vec(),
        };
        let mut path = if is_delta { DELTA } else { ALLOCATED }.to_owned();
        if random.u8(..16) == 0 {
            let at = random.usize(..path.len());
            path.truncate(at);
            path.insert(0, '/');
            path.extend((0..random.usize(..64)).map(|_| random.alphanumeric()));
            allowed = vec![Code::Unimplemented];
        }
        let mut headers = HeaderMap::new();
        for _ in 0..random.usize(..4) {
            let name =
                ["grpc-encoding", "content-type", "authorization", "user-agent", "te", "x-a", "grpc-timeout"];
            let name = random.choice(name).expect("one");
            // No short deadline: the client itself would look at it.
            let value = match name {
                "grpc-timeout" => random.choice(["99999999H", "-1S", "S", "1x", ""]).expect("one").into(),
                _ => bytes(random),
            };
            if let Ok(value) = HeaderValue::from_bytes(&value) {
                headers.insert(name, value);
            }
        }
        Fuzzed { path, headers, body: body.into(), allowed }
    }
}

fn bytes(random: &mut fastrand::Rng) -> Vec<u8> {
    let mut bytes = vec![0; random.usize(..200)];
    random.fill(&mut bytes);
    bytes
}

/// A request of a call, with some of its fields wrong.
fn message(random: &mut fastrand::Rng, is_delta: bool, token: &str, namespace: &str) -> Vec<u8> {
    let mut text = |right: &str| match random.u8(..12) {
        0 => String::new(),
        1 => String::from_utf8_lossy(&bytes(random)).into_owned(),
        2 => format!("{right}x"),
        _ => right.to_owned(),
    };
    let (security_token, namespace, name, base_snapshot_id) =
        (text(token), text(namespace), text("monday"), text("plain-1"));
    let starting_offset = if random.u8(..4) == 0 { random.i64(..) } else { 0 };
    let max_results = if random.u8(..4) == 0 { random.i32(..) } else { 0 };
    let framed = match is_delta {
        false => frame(&GetMetadataAllocatedRequest {
            security_token,
            namespace,
            snapshot_name: name,
            starting_offset,
            max_results,
        }),
        true => frame(&GetMetadataDeltaRequest {
            security_token,
            namespace,
            base_snapshot_id,
            target_snapshot_name: name,
            starting_offset,
            max_results,
        }),
    };
    framed[PREFIX..].to_vec()
}

pub async fn requests_of_both_calls_get_the_right_code(world: World) {
    const ROUNDS: usize = 5000;
    const AT_ONCE: usize = 16;
    let (driver, ns, token) = world.with_snapshot("monday", "plain-1").await;
    let (mut gateway, mut client) = world.served(&[]).await;
    assert_eq!(code(&client.allocated(&token, &ns, "monday").await), Code::Ok);
    let before = gateway.peak();
    let channel = connect(&gateway).await;
    let mut random = fastrand::Rng::with_seed(11);
    let requests = (0..ROUNDS).map(|round| {
        let Fuzzed { path, headers, body, allowed } = Fuzzed::new(&mut random, &token, &ns);
        let channel = channel.clone();
        async move {
            let sent = tonic::body::Body::new(Full::new(body.clone()));
            let status = call_with(channel, &path, headers.clone(), sent).await;
            assert!(allowed.contains(&status.code()), "{round}: {path} {headers:?} {body:?}: {status:?}");
            (path, status.code())
        }
    });
    let seen: BTreeSet<(String, i32)> = futures_util::stream::iter(requests)
        .buffer_unordered(AT_ONCE)
        .map(|(path, code)| (path, code as i32))
        .collect()
        .await;
    // Requests that are all refused for one reason would test one check.
    for path in [ALLOCATED, DELTA] {
        for code in OF_MESSAGES.into_iter().chain([Code::Unimplemented]) {
            assert!(seen.contains(&(path.to_owned(), code as i32)), "{path}: never {code:?}");
        }
    }
    // The kernel counts it roughly.
    let grown = gateway.peak().saturating_sub(before);
    assert!(grown < 16 << 20, "it took {grown} bytes");
    assert!(gateway.running.is_alive());
    assert_eq!(code(&client.allocated(&token, &ns, "monday").await), Code::Ok);
    assert_eq!(code(&client.delta(&token, &ns, "plain-1", "monday").await), Code::Ok);
    let (allocated, deltas) = (driver.seen.allocated.lock(), driver.seen.deltas.lock());
    assert!(
        allocated.iter().all(|request| request.target_snapshot_id == "plain-1")
            && deltas.iter().all(|request| request.target_snapshot_id == "plain-1"),
        "something else reached the driver"
    );
}
