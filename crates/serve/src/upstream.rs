//! A streaming call to the server behind this one, read no faster than its answer is passed on.
//!
//! Each call has a connection of its own, which is driven where the answer is read, and by no task: while a client takes
//! nothing, nothing is read for it. What the server behind may have sent ahead is its window. It is small at first, and
//! large for streams that have shown that they are read, as long as [`Room`] has some left: so any number of clients that
//! stop reading cost a known amount of memory, and a few that read fast are fast.

use std::fmt;
use std::future::poll_fn;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::Bytes;
use h2::client::{Builder, Connection, SendRequest};
use h2::{Ping, PingPong, Reason, RecvStream};
use http_body::Frame;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::time::{Instant, Sleep, sleep};
use tonic::codegen::http::{Request, Response, response};

/// What a stream may send ahead at first, in bytes.
const NARROW: u32 = 8 << 10;
/// And when it has shown that it is read.
const WIDE: u32 = 512 << 10;
/// How many bytes show that.
const PROVEN: u64 = 256 << 10;
/// Between two pings, and how long an answer to one may take.
const KEEPALIVE: Duration = Duration::from_secs(20);

/// Room for wide windows, in bytes, shared by all calls.
pub struct Room(AtomicUsize);

impl Room {
    /// So much of it.
    pub fn new(bytes: usize) -> Arc<Self> {
        Arc::new(Room(AtomicUsize::new(bytes)))
    }

    fn take(self: &Arc<Self>) -> Option<Taken> {
        let taken =
            self.0.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| left.checked_sub(WIDE as usize));
        taken.is_ok().then(|| Taken(self.clone()))
    }
}

struct Taken(Arc<Room>);

impl Drop for Taken {
    fn drop(&mut self) {
        self.0.0.fetch_add(WIDE as usize, Ordering::Relaxed);
    }
}

/// Why a call ended without the answer's own end.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The connection, or the stream on it, broke.
    #[error("HTTP/2")]
    Protocol(#[from] h2::Error),
    /// The connection ended before the answer did.
    #[error("the connection was closed")]
    Closed,
    /// A ping was not answered.
    #[error("no answer to a ping in {} s", KEEPALIVE.as_secs())]
    Silent,
}

/// The body of an answer, and the connection that it comes by.
pub struct Answer<T> {
    connection: Connection<T, Bytes>,
    /// The connection is closed when the last of these goes.
    _sender: SendRequest<Bytes>,
    body: RecvStream,
    is_closed: bool,
    passed: u64,
    room: Arc<Room>,
    wide: Option<Taken>,
    pings: Option<PingPong>,
    ping: Pin<Box<Sleep>>,
    is_waiting_for_pong: bool,
}

impl<T> fmt::Debug for Answer<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Answer").field("passed", &self.passed).finish_non_exhaustive()
    }
}

/// Sends a request whose body is one message, and waits for the head of the answer.
pub async fn call<T>(
    io: T,
    request: Request<()>,
    body: Bytes,
    room: Arc<Room>,
) -> Result<(response::Parts, Answer<T>), Error>
where
    T: AsyncRead + AsyncWrite + Unpin,
{
    let handshake = Builder::new()
        .initial_window_size(NARROW)
        .initial_connection_window_size(2 * WIDE)
        .max_header_list_size(16 << 10)
        .enable_push(false)
        .handshake(io);
    let (mut sender, mut connection): (SendRequest<Bytes>, Connection<T, Bytes>) = handshake.await?;
    let (mut answer, mut stream) = sender.send_request(request, false)?;
    // A request is far smaller than any window.
    stream.send_data(body, true)?;
    let head: Response<RecvStream> = poll_fn(|context| {
        if let Poll::Ready(answer) = Pin::new(&mut answer).poll(context) {
            return Poll::Ready(answer.map_err(Error::from));
        }
        match Pin::new(&mut connection).poll(context) {
            // What was read before it ended may hold the answer.
            Poll::Ready(ended) => Poll::Ready(match Pin::new(&mut answer).poll(context) {
                Poll::Ready(answer) => answer.map_err(Error::from),
                Poll::Pending => Err(ended.map_or_else(Error::from, |()| Error::Closed)),
            }),
            Poll::Pending => Pin::new(&mut answer).poll(context).map_err(Error::from),
        }
    })
    .await?;
    let (head, body) = head.into_parts();
    let pings = connection.ping_pong();
    let answer = Answer {
        connection,
        _sender: sender,
        body,
        is_closed: false,
        passed: 0,
        room,
        wide: None,
        pings,
        ping: Box::pin(sleep(KEEPALIVE)),
        is_waiting_for_pong: false,
    };
    Ok((head, answer))
}

impl<T: AsyncRead + AsyncWrite + Unpin> Answer<T> {
    /// The next piece: data, or the trailers at the end.
    pub fn poll_frame(&mut self, context: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Error>>> {
        self.drive(context);
        match self.poll_body(context) {
            Poll::Pending if self.is_closed => Poll::Ready(Some(Err(Error::Closed))),
            Poll::Pending => self.keep_alive(context).map(|silent| Some(Err(silent))),
            ready => ready,
        }
    }

    /// Reads and writes what the connection can.
    fn drive(&mut self, context: &mut Context<'_>) {
        if !self.is_closed
            && let Poll::Ready(ended) = Pin::new(&mut self.connection).poll(context)
        {
            // What has been read before is still passed on; the stream then tells what is wrong.
            self.is_closed = true;
            if let Err(error) = ended {
                tracing::debug!(%error, "a connection to the server behind broke");
            }
        }
    }

    fn poll_body(&mut self, context: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Error>>> {
        match ready!(self.body.poll_data(context)) {
            Some(Ok(bytes)) => {
                self.body.flow_control().release_capacity(bytes.len())?;
                self.passed += bytes.len() as u64;
                self.widen();
                // A piece holds on to the whole buffer that it was read into. Where a client stops reading, it stays for
                // long; so it is cut out while the window is narrow.
                let bytes = if self.wide.is_some() { bytes } else { Bytes::copy_from_slice(&bytes) };
                Poll::Ready(Some(Ok(Frame::data(bytes))))
            }
            Some(Err(error)) if error.reason() == Some(Reason::NO_ERROR) => Poll::Ready(None),
            Some(Err(error)) => Poll::Ready(Some(Err(error.into()))),
            None => match ready!(self.body.poll_trailers(context))? {
                Some(trailers) => Poll::Ready(Some(Ok(Frame::trailers(trailers)))),
                None => Poll::Ready(None),
            },
        }
    }

    fn widen(&mut self) {
        if self.wide.is_none() && self.passed >= PROVEN {
            self.wide = self.room.take();
            // Refused while earlier settings are not acknowledged: tried again with the next piece.
            if self.wide.is_some() && self.connection.set_initial_window_size(WIDE).is_err() {
                self.wide = None;
            }
        }
    }

    /// Pings a server that has been quiet for a while; ready when it does not answer.
    fn keep_alive(&mut self, context: &mut Context<'_>) -> Poll<Error> {
        let Some(pings) = &mut self.pings else { return Poll::Pending };
        if self.is_waiting_for_pong && pings.poll_pong(context).is_ready() {
            self.is_waiting_for_pong = false;
        }
        while self.ping.as_mut().poll(context).is_ready() {
            if self.is_waiting_for_pong {
                return Poll::Ready(Error::Silent);
            }
            self.is_waiting_for_pong = pings.send_ping(Ping::opaque()).is_ok();
            self.ping.as_mut().reset(Instant::now() + KEEPALIVE);
            // Written when the connection is driven the next time.
            context.waker().wake_by_ref();
        }
        Poll::Pending
    }
}
