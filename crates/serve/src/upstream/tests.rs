//! Against servers of `h2`.

use std::future::poll_fn;

use h2::server::{self, SendResponse};
use tokio::io::{AsyncReadExt, AsyncWriteExt, DuplexStream, duplex};
use tokio::runtime::{Handle, Runtime};
use tonic::codegen::http::Response;

use super::*;

mod lives;

/// A server that answers each call as its path says, on any number of connections.
#[derive(Default)]
struct Server {
    builder: server::Builder,
    connections: AtomicUsize,
    /// Bytes sent on each stream, in the order of their calls.
    sent: Mutex<Vec<Arc<AtomicUsize>>>,
    tasks: Mutex<Vec<AbortHandle>>,
    /// Where it runs, if not with its client.
    runtime: Option<Runtime>,
}

impl Server {
    fn new(set: impl FnOnce(&mut server::Builder) -> &mut server::Builder) -> Arc<Self> {
        let mut server = Server::default();
        set(&mut server.builder);
        Arc::new(server)
    }

    async fn connect(self: &Arc<Self>) -> io::Result<DuplexStream> {
        let (ours, theirs) = duplex(64 << 10);
        self.connections.fetch_add(1, Ordering::Relaxed);
        let server = self.clone();
        let runtime = self.runtime.as_ref().map_or_else(Handle::current, |runtime| runtime.handle().clone());
        let task = runtime.spawn(async move {
            let mut connection = server.builder.handshake::<_, Bytes>(theirs).await.expect("handshake");
            // Its streams end with it, as those of a process do.
            let mut calls = tokio::task::JoinSet::new();
            while let Some(Ok((request, respond))) = connection.accept().await {
                let sent = Arc::<AtomicUsize>::default();
                server.sent.lock().push(sent.clone());
                calls.spawn(answer(request.into_parts().0.uri.path().to_owned(), respond, sent));
            }
        });
        self.tasks.lock().push(task.abort_handle());
        Ok(ours)
    }

    fn kill(&self) {
        self.tasks.lock().drain(..).for_each(|task| task.abort());
    }

    async fn ask(
        self: &Arc<Self>,
        upstream: &Upstream,
        path: &str,
    ) -> Result<(response::Parts, Answer), Error> {
        let request = request(path, None).expect("a request");
        upstream.call(self.connect(), request, Bytes::from_static(b"question")).await
    }

    /// What each stream was sent when no more comes.
    async fn sent_when_quiet(&self) -> Vec<usize> {
        let read = || self.sent.lock().iter().map(|sent| sent.load(Ordering::Relaxed)).collect::<Vec<_>>();
        let mut before = read();
        loop {
            sleep(Duration::from_millis(200)).await;
            let now = read();
            if now == before {
                return now;
            }
            before = now;
        }
    }
}

/// `/silent` is never answered, `/freeze` stops the whole server for a moment, `/refused` is refused, `/SIZE/PIECE` is an answer of so many bytes in pieces of the second number.
async fn answer(path: String, mut respond: SendResponse<Bytes>, sent: Arc<AtomicUsize>) {
    let numbers: Vec<usize> = path.split('/').filter_map(|number| number.parse().ok()).collect();
    let [size, piece] = numbers[..] else {
        match &path[..] {
            "/refused" => respond.send_reset(Reason::REFUSED_STREAM),
            "/freeze" => std::thread::sleep(Duration::from_millis(500)),
            _ => drop(poll_fn(|context| respond.poll_reset(context)).await),
        }
        return;
    };
    let mut stream = respond.send_response(Response::new(()), false).expect("a head");
    let mut left = size;
    while left > 0 {
        let piece = piece.min(left);
        stream.reserve_capacity(piece);
        let Some(Ok(may)) = poll_fn(|context| stream.poll_capacity(context)).await else { return };
        let piece = piece.min(may);
        if stream.send_data(Bytes::from(vec![left as u8; piece]), false).is_err() {
            return;
        }
        left -= piece;
        sent.fetch_add(piece, Ordering::Relaxed);
    }
    let mut trailers = HeaderMap::new();
    trailers.insert("grpc-status", HeaderValue::from_static("0"));
    let _ = stream.send_trailers(trailers);
}

async fn next(answer: &mut Answer) -> Option<Result<Frame<Bytes>, Error>> {
    poll_fn(|context| answer.poll_frame(context)).await
}

/// How many bytes come before trailers.
async fn read_whole(mut answer: Answer) -> Result<usize, Error> {
    let mut bytes = 0;
    while let Some(frame) = next(&mut answer).await {
        match frame?.into_data() {
            Ok(data) => bytes += data.len(),
            Err(trailers) => {
                assert_eq!(trailers.into_trailers().expect("trailers")["grpc-status"], "0");
                return Ok(bytes);
            }
        }
    }
    panic!("no trailers behind {bytes} bytes");
}

/// How many streams are open.
fn streams(upstream: &Upstream) -> usize {
    upstream.open.lock().iter().map(|one| one.state.streams.load(Ordering::Relaxed)).sum()
}

fn narrow() -> Upstream {
    Upstream::new(WideWindows::of(0), OFTEN)
}

#[tokio::test]
async fn answers_arrive_whole_side_by_side_on_one_connection() {
    for (windows, calls) in [(WideWindows::of(0), 100), (WideWindows::of(64 << 20), WIDE_STREAMS)] {
        let (server, upstream) = (Server::new(|builder| builder), Upstream::new(windows, OFTEN));
        let calls = (0..calls).map(async |number: usize| {
            let (size, piece) = (number * 7919 + 1, 1 + number * number);
            let (_, answer) = server.ask(&upstream, &format!("/{size}/{piece}")).await.expect("a head");
            assert_eq!(read_whole(answer).await.expect("an answer"), size);
        });
        futures_util::future::join_all(calls).await;
        assert_eq!(server.connections.load(Ordering::Relaxed), 1);
    }
}

/// Small pieces cost a server nothing, and wait in great numbers.
#[tokio::test]
async fn streams_that_nobody_reads_keep_their_windows_and_hold_up_no_other() {
    const STALLED: usize = 100;
    let (server, upstream) = (Server::new(|builder| builder), narrow());
    const SIZE: usize = 4 * NARROW as usize;
    let mut stalled = Vec::new();
    for number in 0..STALLED {
        let piece = if number % 10 == 0 { 1 } else { 16 << 10 };
        stalled.push(server.ask(&upstream, &format!("/{SIZE}/{piece}")).await.expect("a head").1);
    }
    let sent = server.sent_when_quiet().await;
    assert!(sent.iter().all(|sent| *sent == NARROW as usize), "{sent:?}");
    let held: usize = stalled.iter().map(|answer| answer.inbox.lock().bytes.capacity()).sum();
    assert!(held <= 2 * STALLED * NARROW as usize, "{held}");
    let (_, other) = server.ask(&upstream, "/10000000/10000").await.expect("a head");
    assert_eq!(read_whole(other).await.expect("an answer"), 10_000_000);
    for answer in stalled {
        assert_eq!(read_whole(answer).await.expect("an answer"), SIZE);
    }
    assert_eq!(server.connections.load(Ordering::Relaxed), 1);
}

/// What has come whole and waits for its reader is charged to the connection too: after 256 such answers no other got a byte.
#[tokio::test]
async fn answers_that_have_ended_and_are_not_read_hold_up_no_other() {
    let (server, upstream) = (Server::new(|builder| builder), narrow());
    let mut unread = Vec::new();
    for _ in 0..2 * STREAMS {
        unread.push(server.ask(&upstream, &format!("/{NARROW}/{NARROW}")).await.expect("a head").1);
    }
    let sent = server.sent_when_quiet().await;
    assert!(sent.iter().all(|sent| *sent == NARROW as usize), "{sent:?}");
    let (_, other) = server.ask(&upstream, "/1000000/10000").await.expect("a head");
    let other = timeout(Duration::from_secs(10), read_whole(other)).await.expect("it comes");
    assert_eq!(other.expect("an answer"), 1_000_000);
    // Given up or read, they leave room for others.
    unread.truncate(STREAMS);
    for answer in unread {
        assert_eq!(read_whole(answer).await.expect("an answer"), NARROW as usize);
    }
    assert_eq!(streams(&upstream), 0);
}

#[tokio::test]
async fn wide_windows_are_given_back() {
    let (server, windows) = (Server::new(|builder| builder), WideWindows::of(2 * WIDE as usize));
    let upstream = Upstream::new(windows.clone(), OFTEN);
    for _ in 0..2 {
        let mut answers = Vec::new();
        for _ in 0..3 {
            answers.push(server.ask(&upstream, "/10000000/10000").await.expect("a head").1);
        }
        let mut sent = server.sent_when_quiet().await;
        assert_eq!(sent.split_off(sent.len() - 3), [WIDE as usize, WIDE as usize, NARROW as usize]);
        drop(answers);
        assert_eq!(windows.0.available_permits(), 2);
    }
}

#[tokio::test]
async fn a_connection_that_takes_no_more_streams_has_another_beside_it() {
    let (server, upstream) = (Server::new(|builder| builder.max_concurrent_streams(2)), narrow());
    let mut open = Vec::new();
    for number in 0..5 {
        let opened = timeout(Duration::from_secs(10), server.ask(&upstream, "/1000000/1000")).await;
        open.push(opened.unwrap_or_else(|_| panic!("call {number} waits")).expect("a head").1);
    }
    assert_eq!(server.connections.load(Ordering::Relaxed), 3);
    for answer in open {
        assert_eq!(read_whole(answer).await.expect("an answer"), 1_000_000);
    }
    // Of those without a stream one is kept.
    let (_, answer) = server.ask(&upstream, "/1/1").await.expect("a head");
    assert_eq!((upstream.open.lock().len(), server.connections.load(Ordering::Relaxed)), (1, 3));
    drop(answer);
    let none = Server::new(|builder| builder.max_concurrent_streams(0));
    let error = none.ask(&narrow(), "/1/1").await.expect_err("no stream");
    assert!(error.to_string().contains("MAX_CONCURRENT_STREAMS"), "{error}");
}

#[tokio::test]
async fn a_server_that_dies_ends_its_streams_and_is_called_again() {
    let (server, upstream) = (Server::new(|builder| builder), narrow());
    let mut open = Vec::new();
    for _ in 0..3 {
        open.push(server.ask(&upstream, "/1000000/1000").await.expect("a head").1);
    }
    server.kill();
    // At once: the connection has not been seen to break.
    let (_, again) = server.ask(&upstream, "/1000/100").await.expect("on a new connection");
    assert_eq!(read_whole(again).await.expect("an answer"), 1000);
    for answer in open {
        let error = read_whole(answer).await.expect_err("a cut answer");
        assert!(error.verdict().is_none(), "{error}");
    }
    assert_eq!(server.connections.load(Ordering::Relaxed), 2);
    // And a call that the server has not begun with, once.
    let error = server.ask(&upstream, "/refused").await.expect_err("refused");
    assert_eq!(error.verdict().map(|(code, _)| code), Some(Code::Unavailable));
    assert_eq!(server.connections.load(Ordering::Relaxed), 3);
}

#[tokio::test]
async fn callers_who_wait_for_one_connection_hear_of_its_failure_together() {
    let upstream = narrow();
    let tries = AtomicUsize::new(0);
    let calls = (0..10).map(async |_| {
        let connect = async {
            tries.fetch_add(1, Ordering::Relaxed);
            sleep(Duration::from_millis(300)).await;
            Err::<DuplexStream, _>(io::Error::other("nobody there"))
        };
        upstream.call(connect, request("/1/1", None).expect("a request"), Bytes::new()).await.map(drop)
    });
    for ended in futures_util::future::join_all(calls).await {
        assert!(ended.expect_err("nobody").to_string().contains("nobody there"));
    }
    assert_eq!(tries.load(Ordering::Relaxed), 1);
}

/// A server ends a connection on which many calls are taken back before it has looked at them: `h2` after 20.
#[test]
fn clients_that_go_at_once_end_no_other_stream() {
    let runtime = |workers| {
        tokio::runtime::Builder::new_multi_thread()
            .worker_threads(workers)
            .enable_all()
            .build()
            .expect("a runtime")
    };
    let server = Arc::new(Server { runtime: Some(runtime(1)), ..Server::default() });
    let (ours, upstream) = (runtime(2), narrow());
    ours.block_on(async {
        let (_, other) = server.ask(&upstream, "/1000000/1000").await.expect("a head");
        for path in std::iter::once("/freeze").chain(std::iter::repeat_n("/silent", 40)) {
            let call = server.ask(&upstream, path);
            assert!(timeout(Duration::from_millis(5), call).await.is_err());
        }
        assert_eq!(read_whole(other).await.expect("an answer"), 1_000_000);
        // They are taken back then.
        let until = Instant::now() + Duration::from_secs(20);
        while streams(&upstream) > 0 {
            assert!(Instant::now() < until, "streams of clients that are gone stay");
            sleep(Duration::from_millis(50)).await;
        }
    });
}

/// How long after the connection begins each ping arrives at a server that says nothing else than the answers to them.
async fn pings(mut theirs: DuplexStream, within: Duration) -> Vec<Duration> {
    let (started, mut pings) = (Instant::now(), Vec::new());
    let read = async {
        theirs.read_exact(&mut [0; 24]).await.expect("the preface");
        theirs.write_all(&[0, 0, 0, 4, 0, 0, 0, 0, 0]).await.expect("settings");
        loop {
            let mut head = [0; 9];
            theirs.read_exact(&mut head).await.expect("a frame");
            let length = u32::from_be_bytes([0, head[0], head[1], head[2]]);
            let mut payload = vec![0; length as usize];
            theirs.read_exact(&mut payload).await.expect("a payload");
            if head[3] == 6 && head[4] == 0 {
                pings.push(started.elapsed());
                theirs.write_all(&[0, 0, 8, 6, 1, 0, 0, 0, 0]).await.expect("write");
                theirs.write_all(&payload).await.expect("write");
            }
        }
    };
    let _ = timeout(within, read).await;
    pings
}

/// The time of these tests is tokio's: it goes on at once where all wait for it.
#[tokio::test(start_paused = true)]
async fn pings_are_as_far_apart_as_servers_in_go_want_them() {
    let (ours, theirs) = duplex(64 << 10);
    let upstream = Arc::new(Upstream::new(WideWindows::of(0), RARELY));
    let call = tokio::spawn({
        let upstream = upstream.clone();
        async move {
            let request = request("/silent", None).expect("a request");
            upstream.call(async { Ok(ours) }, request, Bytes::from_static(b"question")).await.map(drop)
        }
    });
    let pings = pings(theirs, Duration::from_secs(3600)).await;
    // That of the connection, one when the first call waits, and the others: two that come too early are allowed.
    assert!(pings.len() > 10 && pings[1] == PATIENCE, "{pings:?}");
    assert!(pings[1..].windows(2).all(|two| two[1] - two[0] > Duration::from_secs(300)), "{pings:?}");
    let error = call.await.expect("a task").expect_err("nobody answers");
    assert!(error.verdict().is_none(), "{error}");
}

#[tokio::test(start_paused = true)]
async fn nobody_is_pinged_while_no_call_is_open() {
    for (between, most) in [(RARELY, 2), (OFTEN, 400)] {
        let (ours, theirs) = duplex(64 << 10);
        let upstream = Upstream::new(WideWindows::of(0), between);
        let request = request("/silent", None).expect("a request");
        let call = upstream.call(async { Ok(ours) }, request, Bytes::from_static(b"question"));
        let given_up = async { drop(timeout(Duration::from_secs(1), call).await) };
        let ((), pings) = tokio::join!(given_up, pings(theirs, Duration::from_secs(3600)));
        assert!(pings.len() <= most && pings.len() > most / 3, "{between:?}: {}", pings.len());
    }
}

#[tokio::test(start_paused = true)]
async fn a_server_that_says_nothing_is_given_up() {
    let (ours, _theirs) = duplex(64 << 10);
    let started = Instant::now();
    let request = request("/silent", None).expect("a request");
    let error = narrow().call(async { Ok(ours) }, request, Bytes::new()).await.expect_err("nobody answers");
    assert!(matches!(error, Error::Silent), "{error}");
    assert_eq!(started.elapsed(), PATIENCE);
}

#[tokio::test(start_paused = true)]
async fn a_slow_server_that_answers_pings_is_waited_for_and_a_frozen_one_is_not() {
    let slow = Duration::from_secs(600);
    let (ours, theirs) = duplex(64 << 10);
    let server = tokio::spawn(async move {
        let mut connection = server::handshake(theirs).await.expect("handshake");
        let (_request, mut answer) = connection.accept().await.expect("a call").expect("a call");
        // Driven, it answers pings; then it sends the head and a piece, and freezes.
        tokio::select! {
            _ = connection.accept() => panic!("there is one call"),
            () = sleep(slow) => {}
        }
        let mut body = answer.send_response(Response::new(()), false).expect("head");
        body.send_data(Bytes::from_static(b"first"), false).expect("data");
        tokio::select! {
            _ = connection.accept() => panic!("there is one call"),
            () = sleep(slow) => {}
        }
        (connection, body)
    });
    let (started, upstream) = (Instant::now(), Upstream::new(WideWindows::of(0), RARELY));
    let request = request("/slow", None).expect("a request");
    let (_, mut answer) = upstream.call(async { Ok(ours) }, request, Bytes::new()).await.expect("a head");
    let first = next(&mut answer).await.expect("a piece").expect("a piece").into_data().expect("data");
    assert_eq!(first, "first");
    assert!(started.elapsed() >= slow);
    let error = next(&mut answer).await.expect("an end").expect_err("it freezes");
    assert!(matches!(error, Error::Silent), "{error}");
    assert!(started.elapsed() >= 2 * slow, "not while it answered pings");
    drop(server.await.expect("the server"));
}
