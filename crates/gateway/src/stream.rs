//! An answer on its way from the driver to the client: passed on frame by frame, counted, bounded in number and in the time
//! that its client may leave it alone.

use std::collections::HashMap;
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use bytes::Bytes;
use serve::listen::OpenCall;
use serve::relay::Tuples;
use tokio::time::Sleep;
use tonic::Status;
use tonic::body::Body;
use tonic::codegen::http::{self, HeaderMap};

use crate::driver;
use crate::record::{CountedStream, Record};

/// All answers under way.
#[derive(Debug)]
pub struct Streams {
    max: usize,
    max_per_client: usize,
    open: Mutex<Vec<Weak<Open>>>,
    by_client: Mutex<ByClient>,
}

#[derive(Debug, Default)]
struct ByClient {
    total: usize,
    each: HashMap<String, usize>,
}

/// A client's place among the open streams.
#[derive(Debug)]
pub struct Place {
    streams: Arc<Streams>,
    client: String,
    _counted: CountedStream,
}

impl Streams {
    /// At most `max` at once, and `max_per_client` for each client.
    pub fn new(max: usize, max_per_client: usize) -> Arc<Self> {
        Arc::new(Streams { max, max_per_client, open: Mutex::default(), by_client: Mutex::default() })
    }

    /// A place, if there is one.
    pub fn enter(self: &Arc<Self>, client: &str) -> Result<Place, Status> {
        let mut by_client = lock(&self.by_client);
        if by_client.total >= self.max {
            return Err(Status::resource_exhausted(format!(
                "{} streams are open, which is the maximum (--max-streams): try again when some are done",
                self.max
            )));
        }
        let own = by_client.each.entry(client.to_owned()).or_default();
        if *own >= self.max_per_client {
            return Err(Status::resource_exhausted(format!(
                "this client has {} streams open, which is the maximum (--max-streams-per-client): try again when some are done",
                self.max_per_client
            )));
        }
        *own += 1;
        by_client.total += 1;
        Ok(Place { streams: self.clone(), client: client.to_owned(), _counted: CountedStream::new() })
    }

    /// Ends the streams whose clients take nothing for `idle`; for ever.
    pub async fn end_idle(self: Arc<Self>, idle: Duration) {
        let every = (idle / 8).clamp(Duration::from_millis(10), Duration::from_secs(10));
        loop {
            tokio::time::sleep(every).await;
            let open: Vec<Arc<Open>> = {
                let mut open = lock(&self.open);
                open.retain(|one| one.strong_count() > 0);
                open.iter().filter_map(Weak::upgrade).collect()
            };
            for one in open {
                one.end_if_idle(idle);
            }
        }
    }

    /// Takes the driver's answer over, and makes of it the one to the client.
    pub fn pass_on(
        self: &Arc<Self>,
        (head, body): (http::response::Parts, driver::Answer),
        call: Call,
    ) -> http::Response<Body> {
        // An answer without a message has its status in the head ("Trailers-Only" in gRPC over HTTP/2).
        if let Some(status) = Status::from_header_map(&head.headers) {
            return call.fail(passed_on(status));
        }
        if head.status != http::StatusCode::OK {
            let what = format!("the CSI driver answered with the HTTP status {}", head.status.as_u16());
            return call.fail(Status::unknown(what));
        }
        let deadline = call.deadline.map(|deadline| Box::pin(tokio::time::sleep_until(deadline.into())));
        let live = Live { body, call, tuples: Tuples::default(), taken: Instant::now(), waits: true };
        let open = Arc::new(Open(Mutex::new(State::Live(Box::new(live)))));
        lock(&self.open).push(Arc::downgrade(&open));
        let mut response = http::Response::new(Body::new(Passing { open, deadline }));
        response
            .headers_mut()
            .insert(http::header::CONTENT_TYPE, http::HeaderValue::from_static("application/grpc"));
        response
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let mut by_client = lock(&self.streams.by_client);
        by_client.total -= 1;
        if let Some(own) = by_client.each.get_mut(&self.client) {
            *own -= 1;
            if *own == 0 {
                by_client.each.remove(&self.client);
            }
        }
    }
}

/// A call with all that it holds.
#[derive(Debug)]
pub struct Call {
    /// Its line in the audit.
    pub record: Record,
    /// When its caller gives up.
    pub deadline: Option<Instant>,
    /// The same call as its connection counts it; none where the connection is not one of `serve::listen`.
    pub on_connection: Option<OpenCall>,
    /// Its place among the streams, when its caller is known.
    pub place: Option<Place>,
}

impl Call {
    /// Ends the call before any message.
    pub fn fail(mut self, status: Status) -> http::Response<Body> {
        self.record.end(&status);
        status.into_http()
    }
}

/// An answer that is open. Its client's connection and the watch over idle ones share it.
#[derive(Debug)]
struct Open(Mutex<State>);

#[derive(Debug)]
enum State {
    Live(Box<Live>),
    /// What the client still has to be sent, if it ever asks.
    Ended(Option<Status>),
}

#[derive(Debug)]
struct Live {
    body: driver::Answer,
    call: Call,
    tuples: Tuples,
    /// When the client last took something.
    taken: Instant,
    /// Whether the client waits for the driver: then it is not idle.
    waits: bool,
}

impl Open {
    fn end_if_idle(&self, idle: Duration) {
        let mut state = lock(&self.0);
        let State::Live(live) = &mut *state else { return };
        if live.waits || live.taken.elapsed() < idle {
            return;
        }
        let status = Status::aborted(format!(
            "the client took nothing for {} s (--idle-timeout): continue behind the last tuple",
            idle.as_secs_f64()
        ));
        live.call.record.end(&status);
        let on_connection = live.call.on_connection.take();
        // What the driver's side holds goes here; what the transport holds for the client goes with the connection.
        *state = State::Ended(Some(status));
        drop(state);
        if let Some(call) = on_connection {
            call.end_and_close();
        }
    }
}

/// The body of the answer to the client.
#[derive(Debug)]
struct Passing {
    open: Arc<Open>,
    deadline: Option<Pin<Box<Sleep>>>,
}

impl http_body::Body for Passing {
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<http_body::Frame<Bytes>, Status>>> {
        let Passing { open, deadline } = &mut *self;
        let mut state = lock(&open.0);
        let live = match &mut *state {
            State::Live(live) => live,
            State::Ended(left) => return Poll::Ready(left.take().map(|status| Ok(trailers(&status)))),
        };
        live.taken = Instant::now();
        live.waits = false;
        if deadline.as_mut().is_some_and(|deadline| deadline.as_mut().poll(context).is_ready()) {
            let status = Status::deadline_exceeded("the deadline of the call has passed");
            return Poll::Ready(Some(Ok(end(&mut state, &status))));
        }
        let status = match live.body.poll_frame(context) {
            Poll::Pending => {
                live.waits = true;
                return Poll::Pending;
            }
            Poll::Ready(Some(Ok(frame))) => match frame.into_data() {
                Ok(bytes) => {
                    live.tuples.take(&bytes);
                    live.call.record.passed(bytes.len(), live.tuples.count());
                    return Poll::Ready(Some(Ok(http_body::Frame::data(bytes))));
                }
                Err(frame) => {
                    let trailers = frame.into_trailers().unwrap_or_default();
                    let status = Status::from_header_map(&trailers).map(passed_on);
                    status.unwrap_or_else(|| driver::cut_short("its trailers have no status"))
                }
            },
            Poll::Ready(Some(Err(error))) => driver::away(&error),
            Poll::Ready(None) => driver::cut_short("it has no trailers"),
        };
        Poll::Ready(Some(Ok(end(&mut state, &status))))
    }
}

/// Ends a live answer: what it holds is given back at once.
fn end(state: &mut State, status: &Status) -> http_body::Frame<Bytes> {
    if let State::Live(live) = state {
        live.call.record.end(status);
    }
    *state = State::Ended(None);
    trailers(status)
}

fn trailers(status: &Status) -> http_body::Frame<Bytes> {
    let mut headers = HeaderMap::new();
    // It fails for messages that are no header, and those are percent-encoded by it.
    let _ = status.add_header(&mut headers);
    http_body::Frame::trailers(headers)
}

/// The driver's status: its code, message and details, without other headers of the driver's.
fn passed_on(status: Status) -> Status {
    Status::with_details(status.code(), status.message(), Bytes::copy_from_slice(status.details()))
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
