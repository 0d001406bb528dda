//! Answers of servers that do not keep to HTTP/2 or gRPC, frame by frame, and what their client is told.

use std::future::poll_fn;

use http_body::Body as _;
use tokio::io::{AsyncReadExt, AsyncWriteExt, DuplexStream, duplex};
use tonic::Code;

use super::*;
use crate::relay::frame as message;

mod kind {
    pub const DATA: u8 = 0;
    pub const HEADERS: u8 = 1;
    pub const RST_STREAM: u8 = 3;
    pub const SETTINGS: u8 = 4;
    pub const PING: u8 = 6;
    pub const GOAWAY: u8 = 7;
    pub const WINDOW_UPDATE: u8 = 8;
    pub const CONTINUATION: u8 = 9;
}

const END_STREAM: u8 = 1;
const END_HEADERS: u8 = 4;
/// `:status` 200 (RFC 7541, appendix A).
const OK: &[u8] = &[0x88];

fn frame(kind: u8, flags: u8, stream: u32, payload: &[u8]) -> Vec<u8> {
    let mut frame = (payload.len() as u32).to_be_bytes()[1..].to_vec();
    frame.extend([kind, flags]);
    frame.extend(stream.to_be_bytes());
    frame.extend(payload);
    frame
}

/// A field that is not indexed, nor packed.
fn field(name: &str, value: &str) -> Vec<u8> {
    let text = |text: &str| [&[text.len() as u8], text.as_bytes()].concat();
    [vec![0], text(name), text(value)].concat()
}

fn fields(fields: &[(&str, &str)]) -> Vec<u8> {
    fields.iter().flat_map(|(name, value)| field(name, value)).collect()
}

fn head(block: &[u8]) -> Vec<u8> {
    frame(kind::HEADERS, END_HEADERS, 1, block)
}

fn data(bytes: &[u8]) -> Vec<u8> {
    frame(kind::DATA, 0, 1, bytes)
}

fn trailers(with: &[(&str, &str)]) -> Vec<u8> {
    frame(kind::HEADERS, END_HEADERS | END_STREAM, 1, &fields(with))
}

fn done() -> Vec<u8> {
    trailers(&[("grpc-status", "0")])
}

/// An answer of its head alone: this HTTP status, and these fields.
fn alone(status: &str, with: &[(&str, &str)]) -> Vec<u8> {
    let block = [&b"\x08\x03"[..], status.as_bytes(), &fields(with)].concat();
    frame(kind::HEADERS, END_HEADERS | END_STREAM, 1, &block)
}

/// A server that answers the first call with these bytes, and every ping.
async fn serve(mut io: DuplexStream, answer: Vec<u8>) -> std::io::Result<()> {
    io.read_exact(&mut [0; 24]).await?;
    io.write_all(&frame(kind::SETTINGS, 0, 0, b"")).await?;
    loop {
        let mut head = [0; 9];
        io.read_exact(&mut head).await?;
        let mut payload = vec![0; u32::from_be_bytes([0, head[0], head[1], head[2]]) as usize];
        io.read_exact(&mut payload).await?;
        match (head[3], head[4]) {
            (kind::PING, 0) => io.write_all(&frame(kind::PING, 1, 0, &payload)).await?,
            (kind::HEADERS, _) => io.write_all(&answer).await?,
            _ => {}
        }
    }
}

#[derive(Debug)]
struct Nothing;

impl Record for Nothing {
    fn passed(&mut self, _: usize, _: u64) {}
    fn end(&mut self, _: &Status) {}
    fn lost(&self, error: &upstream::Error) -> Status {
        let (code, what) = error.verdict().unwrap_or((Code::Unavailable, error.to_string()));
        Status::new(code, what)
    }
    fn cut_short(&self, code: Code, why: &str) -> Status {
        Status::new(code, why)
    }
}

/// What comes of a call that is answered so: the bytes that were passed on, and the end.
async fn relayed(answer: Vec<u8>) -> (Vec<u8>, Status) {
    let (ours, theirs) = duplex(1 << 20);
    tokio::spawn(serve(theirs, answer));
    let request = upstream::request("/csi.v1.SnapshotMetadata/GetMetadataDelta", None).expect("a request");
    let upstream = upstream::Upstream::new(upstream::WideWindows::of(0), upstream::OFTEN);
    let asked = upstream.call(async { Ok(ours) }, request, message(&"question".to_owned()));
    let answer = match asked.await {
        Ok(answer) => answer,
        Err(error) => return (Vec::new(), Nothing.lost(&error)),
    };
    let streams = Streams::new(1, 1, "open");
    let call = Call { record: Nothing, deadline: None, on_connection: None, permit: None };
    let (head, mut body) = streams.pass_on(answer, call).into_parts();
    if let Some(status) = Status::from_header_map(&head.headers) {
        return (Vec::new(), status);
    }
    let mut passed = Vec::new();
    loop {
        match poll_fn(|context| Pin::new(&mut body).poll_frame(context)).await {
            Some(Ok(frame)) => match frame.into_data() {
                Ok(bytes) => passed.extend(bytes),
                Err(frame) => {
                    let trailers = frame.into_trailers().expect("trailers");
                    return (passed, Status::from_header_map(&trailers).expect("a status"));
                }
            },
            Some(Err(status)) => return (passed, status),
            None => return (passed, Status::unknown("no end")),
        }
    }
}

/// All of a table's rows that are not as they should be.
async fn assert_ends(rows: Vec<(String, Code, &str, Vec<u8>)>) {
    let mut wrong = Vec::new();
    for (what, code, says, answer) in rows {
        let ended = tokio::spawn(tokio::time::timeout(Duration::from_secs(10), relayed(answer))).await;
        match ended {
            Ok(Ok((_, status))) if status.code() == code && status.message().contains(says) => {}
            ended => wrong.push(format!("{what}: not {code:?} with {says:?}, but {ended:?}")),
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// gRPC over HTTP/2, "Errors".
#[tokio::test]
async fn http2_codes_become_those_of_grpc() {
    let mut rows = Vec::new();
    for (number, code) in [
        (0, Code::Internal),
        (1, Code::Internal),
        (2, Code::Internal),
        (3, Code::Internal),
        (4, Code::Internal),
        (5, Code::Unknown),
        (6, Code::Internal),
        (7, Code::Unavailable),
        (8, Code::Cancelled),
        (9, Code::Internal),
        (10, Code::Internal),
        (11, Code::ResourceExhausted),
        (12, Code::PermissionDenied),
        (0x99, Code::Unknown),
    ] {
        let reset = frame(kind::RST_STREAM, 0, 1, &u32::to_be_bytes(number));
        rows.push((format!("{number} before the head"), code, "", reset.clone()));
        let behind = [head(OK), data(&message(&"x".to_owned())), reset].concat();
        rows.push((format!("{number} behind a message"), code, "", behind));
    }
    assert_ends(rows).await;
}

/// "HTTP to gRPC Status Code Mapping".
#[tokio::test]
async fn http_statuses_become_codes_of_grpc() {
    let mut rows = Vec::new();
    for (status, code) in [
        ("400", Code::Internal),
        ("401", Code::Unauthenticated),
        ("403", Code::PermissionDenied),
        ("404", Code::Unimplemented),
        ("415", Code::Unknown),
        ("429", Code::Unavailable),
        ("431", Code::Internal),
        ("500", Code::Unknown),
        ("502", Code::Unavailable),
        ("503", Code::Unavailable),
        ("504", Code::Unavailable),
    ] {
        rows.push((status.to_owned(), code, status, alone(status, &[("content-type", "text/html")])));
        let said = alone(status, &[("grpc-status", "5"), ("grpc-message", "gone")]);
        rows.push((format!("{status} with a status of gRPC"), Code::NotFound, "gone", said));
    }
    assert_ends(rows).await;
}

#[tokio::test]
async fn an_answer_that_is_cut_is_no_whole_one() {
    let whole = message(&"a message".to_owned());
    let cut = |bytes: usize| data(&whole[..bytes]);
    let last = |bytes: &[u8]| frame(kind::DATA, END_STREAM, 1, bytes);
    let rows = [
        ("whole", Code::Ok, "", [head(OK), data(&whole), done()].concat()),
        ("whole, in pieces", Code::Ok, "", [head(OK), cut(3), data(&whole[3..]), done()].concat()),
        ("in a message", Code::Internal, "8 of 11 bytes of a message", [head(OK), cut(13), done()].concat()),
        ("in the second", Code::Internal, "1 of 11 bytes", [head(OK), data(&whole), cut(6), done()].concat()),
        ("in a prefix", Code::Internal, "3 of 5 bytes", [head(OK), cut(3), done()].concat()),
        ("at END_STREAM in a message", Code::Internal, "8 of 11", [head(OK), last(&whole[..13])].concat()),
        ("at END_STREAM", Code::Unavailable, "no trailers", [head(OK), last(&whole)].concat()),
        (
            "with an error of the server's own",
            Code::DataLoss,
            "bad block",
            [head(OK), cut(13), trailers(&[("grpc-status", "15"), ("grpc-message", "bad block")])].concat(),
        ),
        (
            "without a status",
            Code::Unavailable,
            "no status",
            [head(OK), data(&whole), trailers(&[])].concat(),
        ),
    ];
    assert_ends(
        rows.into_iter().map(|(what, code, says, answer)| (what.into(), code, says, answer)).collect(),
    )
    .await;
    // A status before the messages ends nothing.
    let early = [OK, &field("grpc-status", "0")].concat();
    let (passed, status) = relayed([head(&early), data(&whole), done()].concat()).await;
    assert_eq!((&passed[..], status.code()), (&whole[..], Code::Ok));
}

#[tokio::test]
async fn words_that_cannot_be_read_keep_their_code() {
    fn at_once(with: &[(&str, &str)]) -> Vec<u8> {
        alone("200", with)
    }
    fn in_the_end(with: &[(&str, &str)]) -> Vec<u8> {
        [head(OK), data(&message(&"x".to_owned())), trailers(with)].concat()
    }
    let mut rows = Vec::new();
    for place in [at_once as fn(&[(&str, &str)]) -> Vec<u8>, in_the_end] {
        for (message, says) in
            [("%FF%FEbad %C3%A4 block", "bad ä block"), ("100%", "100%"), ("%zz %4", "%zz %4")]
        {
            let with = [("grpc-status", "9"), ("grpc-message", message)];
            rows.push((message.to_owned(), Code::FailedPrecondition, says, place(&with)));
        }
        let with = [("grpc-status", "9"), ("grpc-message", "ö"), ("grpc-status-details-bin", "***")];
        rows.push(("no base64".into(), Code::FailedPrecondition, "ö", place(&with)));
    }
    assert_ends(rows).await;
}

#[tokio::test]
async fn what_http2_forbids_ends_the_call() {
    let window = |value: u32| [&[0, 4][..], &value.to_be_bytes()].concat();
    let more = |by: u32| by.to_be_bytes();
    let in_the_answer = |bytes: Vec<u8>| [head(OK), bytes, done()].concat();
    let rows = [
        ("a window above 2^31-1", in_the_answer(frame(kind::SETTINGS, 0, 0, &window(1 << 31)))),
        ("the largest window", in_the_answer(frame(kind::SETTINGS, 0, 0, &window(u32::MAX)))),
        ("SETTINGS of a stream", in_the_answer(frame(kind::SETTINGS, 0, 1, &window(1 << 16)))),
        ("PING of a stream", in_the_answer(frame(kind::PING, 0, 1, b"12345678"))),
        ("GOAWAY of a stream", in_the_answer(frame(kind::GOAWAY, 0, 1, &[0; 8]))),
        ("a name in capitals", in_the_answer(trailers(&[("Grpc-Status", "0")]))),
        ("a name in capitals in the head", [head(&[OK, &field("X", "y")].concat()), done()].concat()),
        (
            "CONTINUATION of another stream",
            [frame(kind::HEADERS, 0, 1, OK), frame(kind::CONTINUATION, END_HEADERS, 3, b""), done()].concat(),
        ),
        ("WINDOW_UPDATE of 0", in_the_answer(frame(kind::WINDOW_UPDATE, 0, 0, &more(0)))),
        ("WINDOW_UPDATE of 0 for a stream", in_the_answer(frame(kind::WINDOW_UPDATE, 0, 1, &more(0)))),
        (
            "a window that grows above 2^31-1",
            in_the_answer(frame(kind::WINDOW_UPDATE, 0, 0, &more(i32::MAX as u32))),
        ),
        ("data beyond the window", [head(OK), data(&[0; 16 << 10]).repeat(64), done()].concat()),
        ("data of another call", [head(OK), frame(kind::DATA, 0, 3, b"x"), done()].concat()),
        (
            "a head that is too large",
            [head(&[OK, &field("x", &"y".repeat(99)).repeat(140)].concat()), done()].concat(),
        ),
    ];
    let says = "breaks HTTP/2";
    assert_ends(rows.into_iter().map(|(what, answer)| (what.into(), Code::Internal, says, answer)).collect())
        .await;
}

/// The most memory that this process has had, in bytes.
fn peak() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").expect("status");
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).expect("a peak");
    line.trim().trim_end_matches(" kB").parse::<u64>().expect("a number") << 10
}

/// Two bytes make an entry of 4,000: a table without a bound takes 600 times what is sent.
#[tokio::test]
async fn a_table_of_fields_takes_no_more_than_it_may() {
    const HEADS: usize = 20_000;
    let interim = |block: &[u8]| head(&[&b"\x08\x03103"[..], block].concat());
    let name = [&b"\x40\x7f\xa1\x1e"[..], &[b'x'; 4000], b"\0"].concat();
    // The table's size comes first in a block.
    let grow = [&b"\x3f\xe1\xff\xff\x7f\x08\x03103"[..], &name].concat();
    let again = interim(&[0x7e, 0].repeat(3)).repeat(HEADS);
    for (first, code) in [(head(&grow), Code::Internal), (interim(&name), Code::Ok)] {
        let before = peak();
        let (_, status) = relayed([&first[..], &again, &head(OK), &done()].concat()).await;
        let grown = peak() - before;
        assert!(grown < 64 << 20, "{} bytes took {grown}", again.len());
        assert_eq!(status.code(), code, "{status:?}");
    }
}
