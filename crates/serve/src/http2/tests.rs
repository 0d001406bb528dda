//! Against the server of another implementation (h2), and against frames written by hand.

use std::future::poll_fn;
use std::time::Duration;

use tokio::io::{AsyncWriteExt, DuplexStream, duplex};
use tonic::codegen::http::{Response, Version};

use super::*;

/// A head with `:status` 200, and trailers with `grpc-status` 0.
const OK: &[u8] = &[0x88];
const DONE: &[u8] = b"\x00\x0bgrpc-status\x010";

fn request() -> Request<()> {
    let request = Request::post("http://localhost/csi.v1.Identity/Probe").version(Version::HTTP_2);
    request.header("te", "trailers").header("content-type", "application/grpc").body(()).expect("a request")
}

fn begin(io: DuplexStream, body: &[u8], window: u32) -> Connection<DuplexStream> {
    Connection::begin(io, &request(), Bytes::copy_from_slice(body), window)
}

async fn part(connection: &mut Connection<DuplexStream>) -> Result<Option<Part>, Error> {
    poll_fn(|context| connection.poll_part(context)).await
}

/// All parts, until the end or an error.
async fn parts(connection: &mut Connection<DuplexStream>) -> Result<Vec<Part>, Error> {
    let mut all = Vec::new();
    while let Some(part) = part(connection).await? {
        all.push(part);
    }
    Ok(all)
}

fn data(parts: &[Part]) -> Vec<u8> {
    let pieces = parts.iter().filter_map(|part| match part {
        Part::Data(bytes) => Some(&bytes[..]),
        Part::Head(..) | Part::Trailers(_) => None,
    });
    pieces.collect::<Vec<_>>().concat()
}

fn frame(kind: u8, flags: u8, stream: u32, payload: &[u8]) -> Vec<u8> {
    let mut frame = (payload.len() as u32).to_be_bytes()[1..].to_vec();
    frame.extend([kind, flags]);
    frame.extend(stream.to_be_bytes());
    frame.extend(payload);
    frame
}

/// The parts of an answer that is these bytes, where the connection is closed then.
async fn answered(bytes: &[u8], window: u32) -> Result<Vec<Part>, Error> {
    let (ours, mut theirs) = duplex(1 << 20);
    let mut connection = begin(ours, b"", window);
    theirs.write_all(bytes).await.expect("write");
    theirs.shutdown().await.expect("shutdown");
    parts(&mut connection).await
}

#[tokio::test]
async fn an_answer_arrives_whole_over_connections_of_any_size() {
    for round in 0..40 {
        let mut random = fastrand::Rng::with_seed(round);
        let (question, sent) = (
            vec![7; random.usize(..200_000)],
            (0..random.usize(..800_000)).map(|_| random.u8(..)).collect::<Vec<_>>(),
        );
        let (ours, theirs) = duplex(1 << random.u32(3..17));
        let (asked, answer) = (question.clone(), sent.clone());
        let server = tokio::spawn(async move {
            let mut random = fastrand::Rng::with_seed(round);
            let mut builder = h2::server::Builder::new();
            // The body of the request has to wait for windows, which may be smaller than what it begins with.
            builder.initial_window_size([1, 1000, 65_535, 1 << 20][random.usize(..4)]);
            let mut connection = builder.handshake::<_, Bytes>(theirs).await.expect("handshake");
            let (request, mut respond) = connection.accept().await.expect("a call").expect("a call");
            let call = tokio::spawn(async move {
                let (head, mut body) = request.into_parts();
                assert_eq!(
                    (head.method.as_str(), head.uri.to_string().as_str()),
                    ("POST", "http://localhost/csi.v1.Identity/Probe")
                );
                assert_eq!(
                    (&head.headers["te"], &head.headers["content-type"], head.headers.len()),
                    (&HeaderValue::from_static("trailers"), &HeaderValue::from_static("application/grpc"), 2)
                );
                let mut got = Vec::new();
                while let Some(bytes) = body.data().await {
                    let bytes = bytes.expect("data");
                    body.flow_control().release_capacity(bytes.len()).expect("capacity");
                    got.extend(bytes);
                }
                assert!(got == asked, "the request is {} bytes instead of {}", got.len(), asked.len());
                let response =
                    Response::builder().header("content-type", "application/grpc").body(()).expect("a head");
                let mut stream = respond.send_response(response, false).expect("head");
                let mut left = Bytes::from(answer);
                while !left.is_empty() {
                    let most = [20, 4000, 100_000][random.usize(..3)];
                    let piece = left.split_to(left.len().min(random.usize(1..most)));
                    stream.send_data(piece, false).expect("data");
                }
                let mut trailers = HeaderMap::new();
                trailers.insert("grpc-status", HeaderValue::from_static("0"));
                trailers.insert("grpc-message", HeaderValue::from_static("all is well"));
                stream.send_trailers(trailers).expect("trailers");
            });
            while connection.accept().await.is_some() {}
            call.await.expect("the call");
        });
        let mut connection = begin(ours, &question, 8 << 10);
        if round % 2 == 0 {
            connection.widen(512 << 10);
        }
        let parts = tokio::time::timeout(Duration::from_secs(60), parts(&mut connection)).await;
        let parts = parts.expect("an end").expect("an answer");
        let Some(Part::Head(status, fields)) = parts.first() else { panic!("no head") };
        assert_eq!(
            (status.as_u16(), &fields["content-type"]),
            (200, &HeaderValue::from_static("application/grpc"))
        );
        let Some(Part::Trailers(trailers)) = parts.last() else { panic!("no trailers") };
        assert_eq!(
            (&trailers["grpc-status"], &trailers["grpc-message"]),
            (&HeaderValue::from_static("0"), &HeaderValue::from_static("all is well"))
        );
        assert!(data(&parts) == sent, "round {round}");
        drop(connection);
        server.await.expect("the server");
    }
}

#[tokio::test]
async fn a_server_is_no_more_than_the_window_ahead_and_nothing_is_kept_for_it() {
    const WINDOW: u32 = 8 << 10;
    let (ours, theirs) = duplex(1 << 20);
    let (taken, mut sent) = tokio::sync::watch::channel(0);
    tokio::spawn(async move {
        let mut connection = h2::server::handshake(theirs).await.expect("handshake");
        let (_, mut respond) = connection.accept().await.expect("a call").expect("a call");
        let mut stream = respond.send_response(Response::new(()), false).expect("head");
        tokio::spawn(async move { while connection.accept().await.is_some() {} });
        for total in 1.. {
            stream.reserve_capacity(1);
            poll_fn(|context| stream.poll_capacity(context)).await.expect("a call").expect("capacity");
            stream.send_data(Bytes::from_static(b"x"), false).expect("data");
            let _ = taken.send(total);
        }
    });
    let mut connection = begin(ours, b"question", WINDOW);
    assert!(matches!(part(&mut connection).await, Ok(Some(Part::Head(..)))));
    let quiet = async |sent: &mut tokio::sync::watch::Receiver<u32>| {
        while tokio::time::timeout(Duration::from_millis(200), sent.changed()).await.is_ok() {}
        *sent.borrow()
    };
    assert_eq!(quiet(&mut sent).await, WINDOW);
    let mut taken = 0;
    while taken < WINDOW {
        let Ok(Some(Part::Data(bytes))) = part(&mut connection).await else { panic!("no data") };
        taken += bytes.len() as u32;
    }
    // More comes only when the connection is polled again, for its buffers are empty, and gone.
    assert_eq!((connection.inbox.capacity(), connection.outbox.capacity()), (0, 0));
    connection.widen(4 * WINDOW);
    let Ok(Some(Part::Data(bytes))) = part(&mut connection).await else { panic!("no data") };
    taken += bytes.len() as u32;
    let ahead = quiet(&mut sent).await - taken;
    assert!(ahead > 2 * WINDOW && ahead <= 4 * WINDOW, "{ahead} bytes ahead");
}

#[tokio::test]
async fn frames_are_read_as_the_protocol_has_them() {
    let head = frame(kind::HEADERS, flag::END_HEADERS, 1, OK);
    let done = frame(kind::HEADERS, flag::END_HEADERS | flag::END_STREAM, 1, DONE);
    let text = frame(kind::DATA, 0, 1, b"text");
    let padded = frame(kind::DATA, flag::PADDED, 1, b"\x03text\0\0\0");
    // The dependency and weight of a priority, padding, and the rest of the fields in two frames more.
    let priority = flag::PADDED | flag::PRIORITY;
    let scattered = [
        frame(
            kind::HEADERS,
            priority | flag::END_STREAM,
            1,
            &[&b"\x02\0\0\0\0\x10"[..], &DONE[..4], b"\0\0"].concat(),
        ),
        frame(kind::CONTINUATION, 0, 1, &DONE[4..9]),
        frame(kind::CONTINUATION, flag::END_HEADERS, 1, &DONE[9..]),
    ]
    .concat();
    let interim = frame(kind::HEADERS, flag::END_HEADERS, 1, b"\x08\x03103");
    let others = [
        frame(kind::SETTINGS, 0, 0, b"\0\x03\0\0\0\x64\0\x99\0\0\0\0"),
        frame(kind::SETTINGS, flag::ACK, 0, b""),
        frame(kind::PING, 0, 0, b"12345678"),
        frame(kind::PING, flag::ACK, 0, b"12345678"),
        frame(2, 0, 1, b"\0\0\0\0\x10"),
        frame(kind::WINDOW_UPDATE, 0, 0, b"\0\0\0\x01"),
        frame(kind::GOAWAY, 0, 0, b"\0\0\0\x01\0\0\0\0"),
        frame(0xfa, 0xff, 77, b"a kind of later days"),
    ]
    .concat();
    let empty = [frame(kind::DATA, 0, 1, b""), frame(kind::DATA, flag::PADDED, 1, b"\0")].concat();
    for (what, between, end) in [
        ("a plain answer", text.clone(), &done),
        ("padding", padded.clone(), &done),
        ("scattered trailers", text.clone(), &scattered),
        ("other frames", [&others[..], &text, &others].concat(), &done),
        ("frames without data", [&empty[..], &text, &empty].concat(), &done),
    ] {
        let bytes = [&interim[..], &head, &between, end].concat();
        for window in [8 << 10, 512 << 10] {
            let parts = answered(&bytes, window).await.unwrap_or_else(|error| panic!("{what}: {error}"));
            assert!(matches!(parts[0], Part::Head(StatusCode::OK, _)), "{what}: {parts:?}");
            assert_eq!(data(&parts), b"text", "{what}");
            let Some(Part::Trailers(trailers)) = parts.last() else { panic!("{what}: {parts:?}") };
            assert_eq!(trailers["grpc-status"], "0", "{what}");
        }
    }
    // An answer that is its head alone, and one that ends with its data.
    let alone = frame(kind::HEADERS, flag::END_HEADERS | flag::END_STREAM, 1, OK);
    assert_eq!(
        answered(&alone, 8 << 10).await.expect("a head"),
        [Part::Head(StatusCode::OK, HeaderMap::new())]
    );
    let last = frame(kind::DATA, flag::END_STREAM | flag::PADDED, 1, b"\x01text\0");
    let parts = answered(&[head, last].concat(), 8 << 10).await.expect("an answer");
    assert_eq!(data(&parts), b"text");
}

#[tokio::test]
async fn what_the_protocol_forbids_ends_the_call() {
    let head = frame(kind::HEADERS, flag::END_HEADERS, 1, OK);
    let both = |more: Vec<u8>| [&head[..], &more].concat();
    let large = frame(kind::DATA, 0, 1, &[0; 16 << 10]);
    for (what, error, bytes) in [
        ("closed at once", "closed", vec![]),
        ("closed in the answer", "closed", head.clone()),
        ("closed in a frame", "closed", both(frame(kind::DATA, 0, 1, b"text")[..11].to_vec())),
        ("data before the head", "no call for it", frame(kind::DATA, 0, 1, b"text")),
        ("data of another call", "no call for it", both(frame(kind::DATA, 0, 3, b"text"))),
        ("data beyond the window", "exceeds the window", both([&large[..], &large, &large, &large].concat())),
        ("a frame that is too large", "frame is larger", both(frame(kind::DATA, 0, 1, &[0; (16 << 10) + 1]))),
        (
            "padding longer than its data",
            "the padding is longer",
            both(frame(kind::DATA, flag::PADDED, 1, b"\x05text")),
        ),
        (
            "padding longer than its head",
            "the padding is longer",
            frame(kind::HEADERS, flag::PADDED | flag::END_HEADERS, 1, b"\x05\x88"),
        ),
        (
            "no room for the padding's length",
            "the length of a frame",
            frame(kind::HEADERS, flag::PADDED | flag::END_HEADERS, 1, b""),
        ),
        ("a head of another call", "no call for it", frame(kind::HEADERS, flag::END_HEADERS, 3, OK)),
        (
            "a head that cannot be unpacked",
            "cannot be unpacked",
            frame(kind::HEADERS, flag::END_HEADERS, 1, &[0xff; 8]),
        ),
        ("a head without a status", "no status", frame(kind::HEADERS, flag::END_HEADERS, 1, DONE)),
        ("a second head", "no status", both(head.clone())),
        (
            "trailers that do not end the answer",
            "no status",
            both(frame(kind::HEADERS, flag::END_HEADERS, 1, DONE)),
        ),
        ("a continuation of nothing", "CONTINUATION", frame(kind::CONTINUATION, flag::END_HEADERS, 1, OK)),
        (
            "a head in pieces with data between",
            "CONTINUATION",
            [frame(kind::HEADERS, 0, 1, OK), frame(kind::DATA, 0, 1, b"")].concat(),
        ),
        (
            "a head without end",
            "head is larger",
            frame(kind::HEADERS, 0, 1, &[0; 16 << 10])
                .into_iter()
                .chain(frame(kind::CONTINUATION, 0, 1, &[0; 16]))
                .collect(),
        ),
        // One field of 4,000 bytes that is kept, and named 100 times more.
        (
            "a head that is large when it is unpacked",
            "head is larger",
            frame(
                kind::HEADERS,
                flag::END_HEADERS,
                1,
                &[&b"\x88\x40\x01a\x7f\xa1\x1e"[..], &[b'x'; 4000], &[0xbe; 100]].concat(),
            ),
        ),
        ("a push", "pushes", both(frame(kind::PUSH_PROMISE, flag::END_HEADERS, 1, b"\0\0\0\x02"))),
        ("settings cut short", "the length of a frame", frame(kind::SETTINGS, 0, 0, b"\0\x04\0\0")),
        ("a ping cut short", "the length of a frame", frame(kind::PING, 0, 0, b"1234")),
        ("a window cut short", "the length of a frame", frame(kind::WINDOW_UPDATE, 0, 0, b"\0")),
        ("a goodbye cut short", "the length of a frame", frame(kind::GOAWAY, 0, 0, b"\0\0\0\x01")),
        (
            "a goodbye before the call was taken",
            "error code 0",
            frame(kind::GOAWAY, 0, 0, b"\0\0\0\0\0\0\0\0"),
        ),
        ("a goodbye with an error", "error code 2", both(frame(kind::GOAWAY, 0, 0, b"\0\0\0\x01\0\0\0\x02"))),
        ("a reset", "error code 8", both(frame(kind::RST_STREAM, 0, 1, b"\0\0\0\x08"))),
    ] {
        let ended = answered(&bytes, 8 << 10).await;
        assert!(matches!(&ended, Err(ended) if ended.to_string().contains(error)), "{what}: {ended:?}");
    }
    // What came before the end is passed on.
    let (ours, mut theirs) = duplex(1 << 20);
    let mut connection = begin(ours, b"", 8 << 10);
    let bytes =
        both([frame(kind::DATA, 0, 1, b"text"), frame(kind::RST_STREAM, 0, 1, b"\0\0\0\x08")].concat());
    theirs.write_all(&bytes).await.expect("write");
    assert!(matches!(part(&mut connection).await, Ok(Some(Part::Head(..)))));
    assert_eq!(part(&mut connection).await.expect("data"), Some(Part::Data(Bytes::from_static(b"text"))));
    assert!(matches!(part(&mut connection).await, Err(Error::Reset(8))));
}

#[tokio::test]
async fn small_pieces_are_put_together_and_large_ones_are_not_copied() {
    let head = frame(kind::HEADERS, flag::END_HEADERS, 1, OK);
    let small = frame(kind::DATA, 0, 1, &[1; 20]).repeat(1000);
    let large = frame(kind::DATA, 0, 1, &[2; 16 << 10]);
    let done = frame(kind::HEADERS, flag::END_HEADERS | flag::END_STREAM, 1, DONE);
    let parts =
        answered(&[&head[..], &small, &large, &small, &done].concat(), 512 << 10).await.expect("an answer");
    assert_eq!(data(&parts), [vec![1; 20_000], vec![2; 16 << 10], vec![1; 20_000]].concat());
    // One or two pieces for what was read at once, of 64 KiB.
    assert!(parts.len() <= 2 + 5, "{} parts", parts.len());
}

#[tokio::test]
async fn a_server_that_asks_and_does_not_read_is_given_up() {
    let (ours, mut theirs) = duplex(256);
    let mut connection = begin(ours, b"", 8 << 10);
    let server = tokio::spawn(async move {
        let ping = frame(kind::PING, 0, 0, b"12345678");
        while theirs.write_all(&ping).await.is_ok() {}
    });
    let ended = parts(&mut connection).await;
    assert!(matches!(ended, Err(Error::Protocol(_))), "{ended:?}");
    drop(connection);
    server.await.expect("the server");
}

#[tokio::test]
async fn no_bytes_make_it_panic_or_hang() {
    let whole = [
        frame(kind::SETTINGS, 0, 0, b"\0\x04\0\0\x10\0"),
        frame(kind::HEADERS, flag::END_HEADERS, 1, OK),
        frame(kind::DATA, flag::PADDED, 1, b"\x03text\0\0\0"),
        frame(kind::WINDOW_UPDATE, 0, 1, b"\0\0\x10\0"),
        frame(kind::HEADERS, 0, 1, &DONE[..4]),
        frame(kind::CONTINUATION, flag::END_HEADERS, 1, &DONE[4..]),
    ]
    .concat();
    let mut random = fastrand::Rng::with_seed(4);
    for _ in 0..2_000 {
        let mut bytes = whole.clone();
        for _ in 0..random.usize(1..6) {
            let at = random.usize(..bytes.len());
            match random.u8(..3) {
                0 => bytes[at] = random.u8(..),
                1 => drop(bytes.remove(at)),
                _ => bytes.insert(at, random.u8(..)),
            }
        }
        // An answer or an error: what is sent is bounded, and the connection is closed then.
        if let Ok(parts) = answered(&bytes, 8 << 10).await {
            assert!(data(&parts).len() <= bytes.len(), "{parts:?}");
        }
    }
}
