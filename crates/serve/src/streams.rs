//! A streamed answer on its way from a CSI driver to the client: passed on frame by frame, counted, bounded in number and in
//! the time that its client may leave it alone. What else is to be known of a call is its [`Record`]'s business.
//!
//! The body of an idle stream is not polled, so it cannot end the stream. A task drops the driver's side instead.

use std::collections::HashMap;
use std::fmt;
use std::pin::Pin;
use std::sync::{Arc, Weak};
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use parking_lot::Mutex;
use tokio::time::{Instant, Sleep};
use tonic::body::Body;
use tonic::codegen::http::{self, HeaderMap};
use tonic::{Code, Status};

use crate::listen::OpenCall;
use crate::relay::{self, Tuples};
use crate::upstream::{self, Answer};

/// What is kept of a call: its line in an audit or a log, and its place in the metrics.
pub trait Record: fmt::Debug + Send + 'static {
    /// Bytes are passed on, with as many tuples in all by now.
    fn passed(&mut self, bytes: usize, tuples: u64);
    /// The call has ended like this. Dropped without, its client is gone.
    fn end(&mut self, status: &Status);
    /// The status for the client where the driver's answer broke.
    fn lost(&self, error: &upstream::Error) -> Status;
    /// The status for the client where the driver's answer is not whole, with this code.
    fn cut_short(&self, code: Code, why: &str) -> Status;
}

/// All answers under way.
#[derive(Debug)]
pub struct Streams<R> {
    max: usize,
    max_per_client: usize,
    gauge: &'static str,
    open: Mutex<Vec<Weak<Open<R>>>>,
    by_client: Arc<Mutex<ByClient>>,
}

#[derive(Debug, Default)]
struct ByClient {
    total: usize,
    each: HashMap<String, usize>,
}

/// The permission for one stream of a client, until it is dropped.
#[derive(Debug)]
pub struct Permit {
    by_client: Arc<Mutex<ByClient>>,
    client: String,
    gauge: &'static str,
}

impl<R: Record> Streams<R> {
    /// At most `max` at once, and `max_per_client` for each client. `gauge` is the metric that counts them.
    pub fn new(max: usize, max_per_client: usize, gauge: &'static str) -> Arc<Self> {
        let by_client = Arc::default();
        Arc::new(Streams { max, max_per_client, gauge, open: Mutex::default(), by_client })
    }

    /// A permit, unless too many streams are open.
    pub fn enter(&self, client: &str) -> Result<Permit, Status> {
        let mut by_client = self.by_client.lock();
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
        metrics::gauge!(self.gauge).increment(1.0);
        Ok(Permit { by_client: self.by_client.clone(), client: client.to_owned(), gauge: self.gauge })
    }

    /// Ends the streams whose clients take nothing for `idle`, or beyond their deadline; for ever.
    pub async fn end_idle(self: Arc<Self>, idle: Duration) {
        let every = (idle / 8).clamp(Duration::from_millis(10), Duration::from_secs(10));
        loop {
            tokio::time::sleep(every).await;
            let open: Vec<_> = {
                let mut open = self.open.lock();
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
        &self,
        (head, body): (http::response::Parts, Answer),
        call: Call<R>,
    ) -> http::Response<Body> {
        // An answer without a message has its status in the head ("Trailers-Only" in gRPC over HTTP/2).
        if let Some(status) = relay::status(&head.headers)
            && (body.is_whole() || status.code() != Code::Ok)
        {
            return call.fail(status);
        }
        if let Some(code) = relay::code_of_http(head.status) {
            let what = format!("the CSI driver answered with the HTTP status {}", head.status.as_u16());
            return call.fail(Status::new(code, what));
        }
        let deadline = call.deadline.map(|deadline| Box::pin(tokio::time::sleep_until(deadline)));
        let live = Live { body, call, tuples: Tuples::default(), taken: Instant::now(), waits: true };
        let open = Arc::new(Open(Mutex::new(State::Live(Box::new(live)))));
        self.open.lock().push(Arc::downgrade(&open));
        let mut response = http::Response::new(Body::new(Passing { open, deadline }));
        response
            .headers_mut()
            .insert(http::header::CONTENT_TYPE, http::HeaderValue::from_static("application/grpc"));
        response
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        metrics::gauge!(self.gauge).decrement(1.0);
        let mut by_client = self.by_client.lock();
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
pub struct Call<R> {
    /// What is kept of it.
    pub record: R,
    /// When its caller gives up.
    pub deadline: Option<Instant>,
    /// The same call as its connection counts it; none where the connection is not one of `listen`.
    pub on_connection: Option<OpenCall>,
    /// Its permit, when its caller is known.
    pub permit: Option<Permit>,
}

impl<R: Record> Call<R> {
    /// Ends the call before any message.
    pub fn fail(mut self, status: Status) -> http::Response<Body> {
        self.record.end(&status);
        status.into_http()
    }
}

/// An answer that is open. Its client's connection and the watch over idle ones share it.
#[derive(Debug)]
struct Open<R>(Mutex<State<R>>);

#[derive(Debug)]
enum State<R> {
    Live(Box<Live<R>>),
    /// What the client still has to be sent, if it ever asks.
    Ended(Option<Status>),
}

#[derive(Debug)]
struct Live<R> {
    body: Answer,
    call: Call<R>,
    tuples: Tuples,
    /// When the client last took something.
    taken: Instant,
    /// Whether the client waits for the driver: then it is not idle.
    waits: bool,
}

impl<R: Record> Live<R> {
    /// The status for an answer that ends with this one. One that ends within a message is not whole, even if the driver says OK.
    fn ended(&self, status: Option<Status>, why_not: &str) -> Status {
        match (status, self.tuples.cut()) {
            (Some(status), None) => status,
            (Some(status), _) if status.code() != Code::Ok => status,
            (_, Some(cut)) => self.call.record.cut_short(Code::Internal, &cut),
            (None, None) => self.call.record.cut_short(Code::Unavailable, why_not),
        }
    }

    fn is_late(&self) -> bool {
        self.call.deadline.is_some_and(|deadline| deadline <= Instant::now())
    }
}

impl<R: Record> Open<R> {
    fn end_if_idle(&self, idle: Duration) {
        let mut state = self.0.lock();
        let State::Live(live) = &mut *state else { return };
        // Where the client takes nothing, its connection asks for nothing, and the deadline there is not looked at.
        let is_late = live.is_late();
        if live.waits || !is_late && live.taken.elapsed() < idle {
            return;
        }
        let status = match is_late {
            true => late(),
            false => Status::aborted(format!(
                "the client took nothing for {} s (--idle-timeout): continue behind the last tuple",
                idle.as_secs_f64()
            )),
        };
        live.call.record.end(&status);
        let on_connection = live.call.on_connection.take();
        // What the driver's side holds is freed here; what the transport holds for the client is freed with the connection.
        *state = State::Ended(Some(status));
        drop(state);
        if let Some(call) = on_connection {
            call.end_and_close();
        }
    }
}

/// The body of the answer to the client.
#[derive(Debug)]
struct Passing<R> {
    open: Arc<Open<R>>,
    deadline: Option<Pin<Box<Sleep>>>,
}

impl<R: Record> http_body::Body for Passing<R> {
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<http_body::Frame<Bytes>, Status>>> {
        let Passing { open, deadline } = &mut *self;
        let mut state = open.0.lock();
        let live = match &mut *state {
            State::Live(live) => live,
            State::Ended(left) => return Poll::Ready(left.take().map(|status| Ok(trailers(&status)))),
        };
        live.taken = Instant::now();
        live.waits = false;
        if deadline.as_mut().is_some_and(|deadline| deadline.as_mut().poll(context).is_ready()) {
            return Poll::Ready(Some(Ok(end(&mut state, &late()))));
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
                    live.ended(relay::status(&trailers), "its trailers have no status in their first 16 KiB")
                }
            },
            Poll::Ready(Some(Err(error))) => match live.call.record.lost(&error) {
                // It keeps the deadline too.
                status if status.code() == Code::Cancelled && live.is_late() => late(),
                status => status,
            },
            Poll::Ready(None) => live.ended(None, "it has no trailers"),
        };
        Poll::Ready(Some(Ok(end(&mut state, &status))))
    }
}

/// Ends a live answer: what it holds is given back at once.
fn end<R: Record>(state: &mut State<R>, status: &Status) -> http_body::Frame<Bytes> {
    if let State::Live(live) = state {
        live.call.record.end(status);
    }
    *state = State::Ended(None);
    trailers(status)
}

fn late() -> Status {
    Status::deadline_exceeded("the deadline of the call has passed")
}

/// Waits for the answer no longer than its caller does.
pub async fn within<T>(
    deadline: Option<Instant>,
    answer: impl Future<Output = Result<T, Status>>,
) -> Result<T, Status> {
    let Some(until) = deadline else { return answer.await };
    match tokio::time::timeout_at(until, answer).await {
        // The transport keeps the time too, and has other words for its end.
        Ok(Err(status)) if status.code() == Code::Cancelled && Instant::now() >= until => Err(late()),
        Ok(answer) => answer,
        Err(_) => Err(late()),
    }
}

fn trailers(status: &Status) -> http_body::Frame<Bytes> {
    let mut headers = HeaderMap::new();
    // It fails for messages that are not a header value, and those are percent-encoded by it.
    let _ = status.add_header(&mut headers);
    http_body::Frame::trailers(headers)
}

/// The driver's status: its code, message and details, without other headers of the driver's.
pub fn passed_on(status: Status) -> Status {
    Status::with_details(status.code(), status.message(), Bytes::copy_from_slice(status.details()))
}

#[cfg(test)]
mod tests;
