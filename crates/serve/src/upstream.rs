//! A streaming call to the server behind this one, read no faster than its answer is passed on.
//!
//! Each call has a connection of its own, which is driven where the answer is read, and by no task: while a client takes
//! nothing, nothing is read for it. What the server behind may have sent ahead is its window. It is small at first, and
//! large for streams that have shown that they are read, as long as the [`WideWindows`] of all calls allow it: so any number of
//! clients that stop reading cost a known amount of memory, and a few that read fast are fast.

use std::fmt;
use std::future::poll_fn;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use http_body::Frame;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::time::{Instant, Sleep, sleep};
use tonic::codegen::http::{self, HeaderValue, Request, Response, response};

use crate::http2::{self, Connection, Part};

/// What servers see as the address of the call: neither a socket nor a node has a host name here.
pub const ORIGIN: &str = "http://localhost";
/// What a stream may send ahead at first, in bytes.
const NARROW: u32 = 4 << 10;
/// And when it has shown that it is read.
const WIDE: u32 = 512 << 10;
/// How many bytes show that.
const PROVEN: u64 = 256 << 10;
/// When the first ping is sent, and how long an answer to one may take.
const PATIENCE: Duration = Duration::from_secs(20);
/// Between two pings to a server of ours.
pub const OFTEN: Duration = PATIENCE;
/// Between two pings to any server: one in Go closes a connection with pings that are less than five minutes apart
/// (`keepalive.EnforcementPolicy` of grpc-go), and a driver may take longer for its first message.
pub const RARELY: Duration = Duration::from_secs(310);

/// How many bytes of wide windows there may be, shared by all calls.
pub struct WideWindows(AtomicUsize);

impl WideWindows {
    /// At most `bytes` together.
    pub fn of(bytes: usize) -> Arc<Self> {
        Arc::new(WideWindows(AtomicUsize::new(bytes)))
    }

    fn take(self: &Arc<Self>) -> Option<WideWindow> {
        let taken =
            self.0.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| left.checked_sub(WIDE as usize));
        taken.is_ok().then(|| WideWindow(self.clone()))
    }
}

/// One of them; given back when it is dropped.
struct WideWindow(Arc<WideWindows>);

impl Drop for WideWindow {
    fn drop(&mut self) {
        self.0.0.fetch_add(WIDE as usize, Ordering::Relaxed);
    }
}

/// Why a call ended without the answer's own end.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The connection, or the call on it, broke.
    #[error(transparent)]
    Broken(#[from] http2::Error),
    /// A ping was not answered.
    #[error("no answer to a ping in {} s", PATIENCE.as_secs())]
    Silent,
}

/// A connection with one call on it, and what shows that its other end is alive.
struct Link<T> {
    connection: Connection<T>,
    /// When the next ping is due, or the answer to the last one.
    timer: Pin<Box<Sleep>>,
    is_pinged: bool,
    between: Duration,
}

/// The body of an answer, and the connection that it comes by.
pub struct Answer<T> {
    link: Link<T>,
    passed: u64,
    windows: Arc<WideWindows>,
    wide: Option<WideWindow>,
}

impl<T> fmt::Debug for Answer<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Answer").field("passed", &self.passed).finish_non_exhaustive()
    }
}

/// What is left of a call's time, as `grpc-timeout` has it: at most eight digits (gRPC over HTTP/2, "Timeout").
pub fn time_left(deadline: std::time::Instant) -> String {
    match deadline.saturating_duration_since(std::time::Instant::now()).as_millis() {
        millis @ 0..=99_999_999 => format!("{millis}m"),
        millis => format!("{}S", (millis / 1000).min(99_999_999)),
    }
}

/// The head of a gRPC call of `path`, whose caller gives up at the deadline.
pub fn request(path: &str, deadline: Option<std::time::Instant>) -> Result<Request<()>, http::Error> {
    let mut request = Request::post(format!("{ORIGIN}{path}"))
        .version(http::Version::HTTP_2)
        .header(http::header::TE, "trailers")
        .header(http::header::CONTENT_TYPE, "application/grpc")
        .body(())?;
    if let Some(deadline) = deadline {
        let timeout = HeaderValue::from_str(&time_left(deadline))?;
        request.headers_mut().insert("grpc-timeout", timeout);
    }
    Ok(request)
}

/// Sends a request whose body is one message, and waits for the head of the answer. While that or more of the answer is waited
/// for, pings are `between` apart: [`OFTEN`] or [`RARELY`].
pub async fn call<T>(
    io: T,
    request: Request<()>,
    body: Bytes,
    windows: Arc<WideWindows>,
    between: Duration,
) -> Result<(response::Parts, Answer<T>), Error>
where
    T: AsyncRead + AsyncWrite + Unpin,
{
    let connection = Connection::begin(io, &request, body, NARROW);
    let mut link = Link { connection, timer: Box::pin(sleep(PATIENCE)), is_pinged: false, between };
    let (status, fields) = match poll_fn(|context| link.poll_part(context)).await? {
        Some(Part::Head(status, fields)) => (status, fields),
        // The connection begins with a head, or fails.
        Some(Part::Data(_) | Part::Trailers(_)) | None => return Err(http2::Error::Closed.into()),
    };
    let (mut head, ()) = Response::new(()).into_parts();
    (head.status, head.headers) = (status, fields);
    Ok((head, Answer { link, passed: 0, windows, wide: None }))
}

impl<T: AsyncRead + AsyncWrite + Unpin> Link<T> {
    /// The next part of the answer. While it waits it pings a server that has been quiet for a while.
    fn poll_part(&mut self, context: &mut Context<'_>) -> Poll<Result<Option<Part>, Error>> {
        loop {
            if let Poll::Ready(part) = self.connection.poll_part(context) {
                return Poll::Ready(part.map_err(Error::from));
            }
            if self.timer.as_mut().poll(context).is_pending() {
                return Poll::Pending;
            }
            let now = Instant::now();
            if self.is_pinged {
                if !self.connection.is_heard() {
                    return Poll::Ready(Err(Error::Silent));
                }
                self.timer.as_mut().reset(now + self.between.saturating_sub(PATIENCE));
            } else {
                self.connection.ping();
                self.timer.as_mut().reset(now + PATIENCE);
            }
            self.is_pinged = !self.is_pinged;
        }
    }
}

impl<T: AsyncRead + AsyncWrite + Unpin> Answer<T> {
    /// The next piece: data, or the trailers at the end.
    pub fn poll_frame(&mut self, context: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Error>>> {
        self.link.poll_part(context).map(|part| match part {
            Ok(Some(Part::Data(bytes))) => {
                self.passed += bytes.len() as u64;
                self.widen();
                Some(Ok(Frame::data(bytes)))
            }
            Ok(Some(Part::Trailers(trailers))) => Some(Ok(Frame::trailers(trailers))),
            // The head was the first part, and there is no second one.
            Ok(Some(Part::Head(..)) | None) => None,
            Err(error) => Some(Err(error)),
        })
    }

    fn widen(&mut self) {
        if self.wide.is_none() && self.passed >= PROVEN {
            self.wide = self.windows.take();
            if self.wide.is_some() {
                self.link.connection.widen(WIDE);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::io::{AsyncReadExt, AsyncWriteExt, DuplexStream, duplex};

    fn ask(io: DuplexStream) -> impl Future<Output = Result<(response::Parts, Answer<DuplexStream>), Error>> {
        let request = Request::post("http://localhost/a").body(()).expect("a request");
        call(io, request, Bytes::from_static(b"question"), WideWindows::of(0), RARELY)
    }

    async fn next(answer: &mut Answer<DuplexStream>) -> Option<Result<Frame<Bytes>, Error>> {
        poll_fn(|context| answer.poll_frame(context)).await
    }

    /// How long after the call begins each ping arrives at a server that says nothing else than the answers to them.
    async fn pings(mut theirs: DuplexStream, within: Duration) -> Vec<Duration> {
        let (started, mut pings) = (Instant::now(), Vec::new());
        let read = async {
            theirs.read_exact(&mut [0; 24]).await.expect("the preface");
            loop {
                let mut head = [0; 9];
                theirs.read_exact(&mut head).await.expect("a frame");
                let length = u32::from_be_bytes([0, head[0], head[1], head[2]]);
                let mut payload = vec![0; length as usize];
                theirs.read_exact(&mut payload).await.expect("a payload");
                if head[3] == 6 {
                    pings.push(started.elapsed());
                    theirs.write_all(&[0, 0, 8, 6, 1, 0, 0, 0, 0]).await.expect("write");
                    theirs.write_all(&payload).await.expect("write");
                }
            }
        };
        let _ = tokio::time::timeout(within, read).await;
        pings
    }

    #[tokio::test(start_paused = true)]
    async fn pings_are_as_far_apart_as_servers_in_go_want_them() {
        let (ours, theirs) = duplex(64 << 10);
        let call = tokio::spawn(ask(ours));
        let pings = pings(theirs, Duration::from_secs(3600)).await;
        assert!(pings.len() > 10, "{pings:?}");
        assert!(pings.windows(2).all(|two| two[1] - two[0] > Duration::from_secs(300)), "{pings:?}");
        let error = call.await.expect("a task").expect_err("nobody answers");
        assert!(matches!(error, Error::Broken(http2::Error::Closed)), "{error}");
    }

    /// The time of these tests is tokio's: it goes on at once where all wait for it.
    #[tokio::test(start_paused = true)]
    async fn a_server_that_says_nothing_is_given_up() {
        let (ours, _theirs) = duplex(64 << 10);
        let started = Instant::now();
        let error = ask(ours).await.expect_err("nobody answers");
        assert!(matches!(error, Error::Silent), "{error}");
        assert_eq!(started.elapsed().as_secs(), 2 * PATIENCE.as_secs());
    }

    #[tokio::test(start_paused = true)]
    async fn a_slow_server_that_answers_pings_is_waited_for_and_a_frozen_one_is_not() {
        let slow = Duration::from_secs(600);
        let (ours, theirs) = duplex(64 << 10);
        let server = tokio::spawn(async move {
            let mut connection = h2::server::handshake(theirs).await.expect("handshake");
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
        let started = Instant::now();
        let (_, mut answer) = ask(ours).await.expect("a head");
        let first = next(&mut answer).await.expect("a piece").expect("a piece").into_data().expect("data");
        assert_eq!(first, "first");
        assert!(started.elapsed() >= slow);
        let error = next(&mut answer).await.expect("an end").expect_err("it freezes");
        assert!(matches!(error, Error::Silent), "{error}");
        assert!(started.elapsed() >= 2 * slow, "not while it answered pings");
        drop(server.await.expect("the server"));
    }

    #[tokio::test]
    async fn a_connection_that_is_closed_ends_the_call() {
        let (ours, theirs) = duplex(64 << 10);
        drop(theirs);
        ask(ours).await.expect_err("nobody answers");
    }
}
