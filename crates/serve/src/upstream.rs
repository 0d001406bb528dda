//! Streaming calls to the server behind this one, read no faster than their answers are passed on, on a few connections that
//! they share.
//!
//! What the server may send ahead of a client is the window of its stream. It is small, so that any number of clients that stop
//! reading cost a known amount of memory, and larger for as many streams as [`WideWindows`] has room for. The window of a
//! connection is as large as those of all its streams together: a stream that no client reads holds up no other.

use std::fmt;
use std::io;
use std::mem;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use h2::client::{Builder, SendRequest};
use h2::{FlowControl, Ping, PingPong, Reason, RecvStream};
use http_body::Frame;
use parking_lot::Mutex;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, oneshot};
use tokio::task::AbortHandle;
use tokio::time::{Instant, sleep, timeout};
use tonic::Code;
use tonic::codegen::http::{self, HeaderMap, HeaderValue, Request, response};

/// What servers see as the address of the call: neither a socket nor a node has a host name here.
pub const ORIGIN: &str = "http://localhost";
/// What a stream may send ahead, in bytes, and how many such streams a connection has at most.
const NARROW: u32 = 16 << 10;
const STREAMS: usize = 256;
/// The same for streams with a wide window, and the largest frame of these: a fast stream costs by the frame. Connections have
/// these limits from the beginning, since the windows of single streams cannot be changed; so wide streams have connections
/// of their own.
const WIDE: u32 = 512 << 10;
const WIDE_STREAMS: usize = 32;
const WIDE_FRAME: u32 = 64 << 10;
/// The most bytes of a head or of trailers, unpacked.
const MAX_FIELDS: u32 = 16 << 10;
/// What small pieces of data may cost until their tasks take them over: `h2` counts 256 bytes for each, 5 MiB for a wide window.
const SMALL_PIECES: usize = 64 << 20;
/// How long a call whose client is gone waits for its head. A server may end the connection of a client that takes back many calls
/// before it has looked at them, and all calls on it.
const GRACE: Duration = Duration::from_secs(1);
/// When a connection is looked at, and how long an answer to a ping may take.
const PATIENCE: Duration = Duration::from_secs(20);
/// Between two pings to a server of ours.
pub const OFTEN: Duration = PATIENCE;
/// Between two pings to any server that says nothing. A server in Go or C++ closes the connection after more than two pings that are
/// less than five minutes apart, if it has sent nothing between them (`keepalive.EnforcementPolicy` of grpc-go). It also closes one
/// with pings while no call is open.
pub const RARELY: Duration = Duration::from_secs(310);

/// How many streams may have wide windows, shared by all servers.
#[derive(Clone, Debug)]
pub struct WideWindows(Arc<Semaphore>);

impl WideWindows {
    /// At most `bytes` together.
    pub fn of(bytes: usize) -> Self {
        WideWindows(Arc::new(Semaphore::new((bytes / WIDE as usize).min(WIDE_STREAMS))))
    }
}

/// Why a call ended without the answer's own end.
#[derive(Clone, Debug, thiserror::Error)]
pub enum Error {
    /// A connection could not be made.
    #[error(transparent)]
    Connect(Arc<io::Error>),
    /// The connection, or the call on it, broke.
    #[error(transparent)]
    Broken(Arc<h2::Error>),
    /// A ping was not answered.
    #[error("no answer to a ping in {} s", PATIENCE.as_secs())]
    Silent,
}

impl Error {
    /// What a server did that is there: the code for it (gRPC over HTTP/2, "Errors"), and words that follow its name. `None` where
    /// it does not answer.
    pub fn verdict(&self) -> Option<(Code, String)> {
        let Error::Broken(error) = self else { return None };
        let reason = error.reason()?;
        if error.is_library() {
            let what = match reason {
                Reason::REFUSED_STREAM => format!("a head is larger than {MAX_FIELDS} bytes"),
                _ => error.to_string(),
            };
            return Some((Code::Internal, format!("breaks HTTP/2: {what}")));
        }
        // One that says goodbye continues with the calls that it has taken.
        if !error.is_reset() {
            return None;
        }
        let code = match reason {
            Reason::REFUSED_STREAM => Code::Unavailable,
            Reason::CANCEL => Code::Cancelled,
            Reason::ENHANCE_YOUR_CALM => Code::ResourceExhausted,
            Reason::INADEQUATE_SECURITY => Code::PermissionDenied,
            // The table has no row for them.
            Reason::STREAM_CLOSED => Code::Unknown,
            reason if u32::from(reason) >= u32::from(Reason::HTTP_1_1_REQUIRED) => Code::Unknown,
            _ => Code::Internal,
        };
        Some((code, format!("ended the call with the HTTP/2 error code {reason:?}")))
    }

    /// Whether the same call may be made on another connection: the server has not begun with it, or the connection broke.
    fn is_of_connection(&self) -> bool {
        match self {
            Error::Connect(_) | Error::Silent => false,
            Error::Broken(error) => {
                let is_refused = error.is_remote() && error.reason() == Some(Reason::REFUSED_STREAM);
                !error.is_reset() || is_refused
            }
        }
    }
}

/// What is left of a call's time, as `grpc-timeout` has it: at most eight digits (gRPC over HTTP/2, "Timeout"). It is rounded up, so
/// that no server gives a call up before its deadline.
pub fn time_left(deadline: Instant) -> String {
    let left = deadline.saturating_duration_since(Instant::now());
    match left.as_nanos().div_ceil(1_000_000) {
        millis @ 0..=99_999_999 => format!("{millis}m"),
        millis => format!("{}S", (millis / 1000).min(99_999_999)),
    }
}

/// The head of a gRPC call of `path`, whose caller gives up at the deadline.
pub fn request(path: &str, deadline: Option<Instant>) -> Result<Request<()>, http::Error> {
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

/// One server, and the connections to it.
#[derive(Debug)]
pub struct Upstream {
    windows: WideWindows,
    between: Duration,
    open: Mutex<Vec<Arc<Connection>>>,
    /// Held while a connection is made, with the last failure: those who waited meanwhile do not try the same again in turn.
    connecting: tokio::sync::Mutex<Option<(Instant, Error)>>,
}

impl Upstream {
    /// Nothing is connected yet. Pings are `between` apart: [`OFTEN`] or [`RARELY`].
    pub fn new(windows: WideWindows, between: Duration) -> Self {
        Upstream { windows, between, open: Mutex::default(), connecting: Default::default() }
    }

    /// Makes a call whose body is one message, and waits for the head of the answer. `connect` makes a connection, where one
    /// is needed. A call that meets the end of a connection before its head is made once more: it must be one that only reads.
    pub async fn call<T>(
        &self,
        connect: impl Future<Output = io::Result<T>>,
        request: Request<()>,
        body: Bytes,
    ) -> Result<(response::Parts, Answer), Error>
    where
        T: AsyncRead + AsyncWrite + Unpin + Send + 'static,
    {
        let wide = self.windows.0.clone().try_acquire_owned().ok();
        let mut connect = pin!(connect);
        loop {
            let (permit, is_new) = self.permit(connect.as_mut(), wide.is_some()).await?;
            let state = permit.0.state.clone();
            let (told, head) = oneshot::channel();
            let inbox = Arc::<Mutex<Inbox>>::default();
            let work = permit.ask(request.clone(), body.clone(), told, inbox.clone());
            let task = tokio::spawn(work).abort_handle();
            match head.await.unwrap_or(Err(Error::Silent)) {
                Ok(Begun { head, is_whole, window }) => {
                    return Ok((head, Answer { inbox, is_whole, window, task, _wide: wide }));
                }
                Err(error) if !is_new && error.is_of_connection() => {
                    state.is_over.store(true, Ordering::Relaxed);
                }
                Err(error) => return Err(error),
            }
        }
    }

    /// A permit on a connection, and whether that was made for it.
    async fn permit<T>(
        &self,
        connect: Pin<&mut impl Future<Output = io::Result<T>>>,
        is_wide: bool,
    ) -> Result<(Permit, bool), Error>
    where
        T: AsyncRead + AsyncWrite + Unpin + Send + 'static,
    {
        if let Some(permit) = self.free_permit(is_wide) {
            return Ok((permit, false));
        }
        let since = Instant::now();
        let mut failed = self.connecting.lock().await;
        if let Some(permit) = self.free_permit(is_wide) {
            return Ok((permit, false));
        }
        if let Some((when, error)) = &*failed
            && *when > since
        {
            return Err(error.clone());
        }
        let connected = async {
            let io = connect.await.map_err(|error| Error::Connect(Arc::new(error)))?;
            timeout(PATIENCE, Connection::open(io, is_wide, self.between)).await.unwrap_or(Err(Error::Silent))
        };
        match connected.await {
            Ok(connection) => {
                let connection = Arc::new(connection);
                let permit = Permit::on(&connection);
                self.open.lock().push(connection);
                Ok((permit, true))
            }
            Err(error) => {
                *failed = Some((Instant::now(), error.clone()));
                Err(error)
            }
        }
    }

    /// A permit on a connection that is open. Of those without streams, one of each kind is kept.
    fn free_permit(&self, is_wide: bool) -> Option<Permit> {
        let mut open = self.open.lock();
        let mut has_idle = [false; 2];
        open.retain(|one| {
            let is_used = one.state.streams.load(Ordering::Relaxed) > 0;
            !one.state.is_over.load(Ordering::Relaxed)
                && (is_used || !mem::replace(&mut has_idle[usize::from(one.is_wide)], true))
        });
        open.iter().find(|one| one.is_wide == is_wide && one.has_room()).map(Permit::on)
    }
}

/// A connection. It is closed when neither [`Upstream`] nor a stream holds it any more.
struct Connection {
    requests: SendRequest<Bytes>,
    is_wide: bool,
    state: Arc<State>,
}

impl fmt::Debug for Connection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Connection").field("state", &self.state).finish_non_exhaustive()
    }
}

#[derive(Debug, Default)]
struct State {
    streams: AtomicUsize,
    /// Whether it takes no more streams.
    is_over: AtomicBool,
    is_silent: AtomicBool,
    /// Whether the server has sent something of an answer since the last ping.
    is_heard: AtomicBool,
}

impl Connection {
    /// Waits until the server has said how many streams it takes.
    async fn open<T>(io: T, is_wide: bool, between: Duration) -> Result<Self, Error>
    where
        T: AsyncRead + AsyncWrite + Unpin + Send + 'static,
    {
        let (window, streams, frame) =
            if is_wide { (WIDE, WIDE_STREAMS, WIDE_FRAME) } else { (NARROW, STREAMS, NARROW) };
        let (requests, mut connection) = Builder::new()
            .enable_push(false)
            .initial_window_size(window)
            .initial_connection_window_size(window * streams as u32)
            .max_frame_size(frame)
            .max_header_list_size(MAX_FIELDS)
            .data_frame_budget(SMALL_PIECES)
            .handshake(io)
            .await
            .map_err(broken)?;
        let failed = |why: &str| Error::Connect(Arc::new(io::Error::other(why.to_owned())));
        let mut pings = connection.ping_pong().ok_or_else(|| failed("it cannot be pinged"))?;
        // The server's settings come before its answer to a ping.
        tokio::select! {
            ended = &mut connection => {
                ended.map_err(broken)?;
                return Err(failed("it was closed at once"));
            }
            pong = pings.ping(Ping::opaque()) => {
                pong.map_err(broken)?;
            }
        }
        if requests.current_max_send_streams() == 0 {
            return Err(failed("it allows no call (SETTINGS_MAX_CONCURRENT_STREAMS is 0)"));
        }
        let state = Arc::new(State { is_heard: true.into(), ..State::default() });
        tokio::spawn({
            let state = state.clone();
            async move {
                tokio::select! {
                    _ = connection => {}
                    () = until_silent(pings, &state, between) => {}
                }
                state.is_over.store(true, Ordering::Relaxed);
            }
        });
        Ok(Connection { requests, is_wide, state })
    }

    fn has_room(&self) -> bool {
        let most = if self.is_wide { WIDE_STREAMS } else { STREAMS };
        self.state.streams.load(Ordering::Relaxed) < most.min(self.requests.current_max_send_streams())
    }
}

/// Pings the server while there are streams, until it does not answer.
async fn until_silent(mut pings: PingPong, state: &State, between: Duration) {
    let mut last = Instant::now();
    loop {
        sleep(PATIENCE).await;
        let is_idle = between > OFTEN && state.streams.load(Ordering::Relaxed) == 0;
        if is_idle || last.elapsed() < between && !state.is_heard.swap(false, Ordering::Relaxed) {
            continue;
        }
        last = Instant::now();
        match timeout(PATIENCE, pings.ping(Ping::opaque())).await {
            Ok(Ok(_)) => {}
            // The connection has ended, and says how.
            Ok(Err(_)) => std::future::pending().await,
            Err(_) => return state.is_silent.store(true, Ordering::Relaxed),
        }
    }
}

/// The permission for one stream on a connection, until it is dropped.
#[derive(Debug)]
struct Permit(Arc<Connection>);

impl Permit {
    fn on(connection: &Arc<Connection>) -> Self {
        connection.state.streams.fetch_add(1, Ordering::Relaxed);
        Permit(connection.clone())
    }

    /// Makes a call, says how its answer begins, and takes the rest of it in.
    async fn ask(
        self,
        request: Request<()>,
        body: Bytes,
        mut told: oneshot::Sender<Result<Begun, Error>>,
        inbox: Arc<Mutex<Inbox>>,
    ) {
        let asked = async {
            let (answer, mut sender) = self.0.requests.clone().send_request(request, false)?;
            sender.send_data(body, true)?;
            answer.await
        };
        let gone = async {
            told.closed().await;
            sleep(GRACE).await;
        };
        let asked = tokio::select! {
            asked = asked => asked,
            () = gone => return,
        };
        let answer = match asked.map_err(|error| self.error(error)) {
            Ok(answer) => answer,
            Err(error) => {
                drop(self);
                let _ = told.send(Err(error));
                return;
            }
        };
        self.0.state.is_heard.store(true, Ordering::Relaxed);
        let (head, mut body) = answer.into_parts();
        let (is_whole, window) = (body.is_end_stream(), body.flow_control().clone());
        if told.send(Ok(Begun { head, is_whole, window })).is_ok() {
            self.fill(body, &inbox).await;
        }
    }

    async fn fill(self, mut body: RecvStream, inbox: &Mutex<Inbox>) {
        let end = loop {
            match body.data().await {
                Some(Ok(bytes)) => {
                    self.0.state.is_heard.store(true, Ordering::Relaxed);
                    inbox.lock().add(|inbox| inbox.bytes.extend_from_slice(&bytes));
                }
                Some(Err(error)) => break Err(self.error(error)),
                None => break body.trailers().await.map_err(|error| self.error(error)),
            }
        };
        inbox.lock().add(|inbox| inbox.end = Some((end, self)));
    }

    fn error(&self, error: h2::Error) -> Error {
        match self.0.state.is_silent.load(Ordering::Relaxed) {
            true => Error::Silent,
            false => broken(error),
        }
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        self.0.state.streams.fetch_sub(1, Ordering::Relaxed);
    }
}

fn broken(error: h2::Error) -> Error {
    Error::Broken(Arc::new(error))
}

/// How an answer begins.
struct Begun {
    head: response::Parts,
    is_whole: bool,
    window: FlowControl,
}

/// The body of an answer. A task takes it over as it comes, within the window: the library would keep each frame for itself,
/// with the buffer that it was read into, and ends connections on which too many small ones wait.
pub struct Answer {
    inbox: Arc<Mutex<Inbox>>,
    is_whole: bool,
    window: FlowControl,
    task: AbortHandle,
    _wide: Option<OwnedSemaphorePermit>,
}

/// What has come and is not passed on.
#[derive(Default)]
struct Inbox {
    bytes: BytesMut,
    /// The end, and the permit with it: what waits here is charged to the window of the connection, which is as large as those of as
    /// many streams as have permits.
    end: Option<(Result<Option<HeaderMap>, Error>, Permit)>,
    reader: Option<Waker>,
}

impl fmt::Debug for Answer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Answer").finish_non_exhaustive()
    }
}

impl Answer {
    /// Whether the head was the whole answer.
    pub fn is_whole(&self) -> bool {
        self.is_whole
    }

    /// The next piece: data, or the trailers at the end.
    pub fn poll_frame(&mut self, context: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Error>>> {
        let mut inbox = self.inbox.lock();
        if inbox.bytes.is_empty() {
            // Whoever reads the end finds the permit free.
            return match inbox.end.take().map(|(end, _)| end) {
                Some(Ok(trailers)) => Poll::Ready(trailers.map(|trailers| Ok(Frame::trailers(trailers)))),
                Some(Err(error)) => Poll::Ready(Some(Err(error))),
                None => {
                    inbox.reader = Some(context.waker().clone());
                    Poll::Pending
                }
            };
        }
        let bytes = mem::take(&mut inbox.bytes).freeze();
        drop(inbox);
        // It fails for more than has come.
        let _ = self.window.release_capacity(bytes.len());
        Poll::Ready(Some(Ok(Frame::data(bytes))))
    }
}

impl Drop for Answer {
    /// Tells the server that no one waits for the answer any more.
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl Inbox {
    fn add(&mut self, what: impl FnOnce(&mut Self)) {
        what(self);
        if let Some(reader) = self.reader.take() {
            reader.wake();
        }
    }
}

#[cfg(test)]
mod tests;
