//! The answer of a stream that meets faults: messages are read from behind, changed, and sent on at the pace and to the end
//! that the faults say. Nothing is read ahead of the client, but by the fault that does that.

use std::collections::VecDeque;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use futures_util::{Stream as Frames, StreamExt};
use http_body_util::StreamBody;
use hyper::body::{Body as HttpBody, Frame};
use prost::Message as _;
use serve::relay::{frame, frame_bytes, unframe};
use tokio::sync::{Semaphore, mpsc};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tonic::body::Body;
use tonic::codegen::http::{HeaderMap, HeaderValue, Response, header};
use tonic::{Code, Status};

use super::catalog::Kind;
use super::change::{About, Changer, Message};
use super::request::Stream;
use super::seen::{Counts, Open};
use super::spec::Spec;
use super::upstream::Reader;

/// How long what was sent may take to leave, before the connection is closed.
const FLUSH: Duration = Duration::from_millis(50);

/// A stream that is played on.
pub(super) struct Play {
    reader: Reader,
    asked: Stream,
    faults: Vec<Arc<Spec>>,
    changers: Vec<Changer>,
    open: Open,
    connection: CancellationToken,
    deadline: Option<Instant>,
    /// Messages to be sent.
    out: VecDeque<Message>,
    /// Messages without tuples that wait for one with some, where a fault is about answers without any.
    empty: Option<Vec<Message>>,
    /// Pieces of a message that is sent in several.
    pieces: VecDeque<Bytes>,
    /// How it ends once all that is there is sent.
    end: Option<Status>,
    is_over: bool,
    messages: u64,
    bytes: u64,
    last: Option<Instant>,
}

/// What a fault does to a stream at some point of it.
enum Act {
    Go,
    End(Status),
    Stop,
}

impl Play {
    pub fn new(
        reader: Reader,
        asked: Stream,
        faults: Vec<(Arc<Spec>, About)>,
        open: Open,
        connection: CancellationToken,
        deadline: Option<Instant>,
    ) -> Self {
        let is_about_empty = |spec: &Arc<Spec>| {
            matches!(spec.entry.kind, Kind::EmptyIsError | Kind::EmptyWithoutMessage | Kind::EndIsError)
        };
        let specs: Vec<Arc<Spec>> = faults.iter().map(|(spec, _)| spec.clone()).collect();
        Play {
            reader,
            asked,
            empty: specs.iter().any(is_about_empty).then(Vec::new),
            faults: specs,
            changers: faults.into_iter().map(|(spec, about)| Changer::new(spec, about)).collect(),
            open,
            connection,
            deadline,
            out: VecDeque::new(),
            pieces: VecDeque::new(),
            end: None,
            is_over: false,
            messages: 0,
            bytes: 0,
            last: None,
        }
    }

    pub fn body(self) -> Body {
        let ahead = self.faults.iter().find(|spec| spec.entry.kind == Kind::ReadAhead);
        let ahead = ahead.map(|spec| spec.values.size);
        let frames = futures_util::stream::unfold(self, |mut play| async move {
            let frame = play.next().await?;
            Some((Ok(frame), play))
        });
        match ahead {
            Some(bytes) => Body::new(StreamBody::new(read_ahead(frames, bytes))),
            None => Body::new(StreamBody::new(frames)),
        }
    }

    async fn next(&mut self) -> Option<Frame<Bytes>> {
        if self.is_over {
            return None;
        }
        if self.ends_with_ok() {
            return Some(self.over(&Status::ok("")));
        }
        if let Some(piece) = self.pieces.pop_front() {
            return Some(self.piece(piece).await);
        }
        while self.out.is_empty() && self.end.is_none() {
            self.read().await;
        }
        let faults = self.faults.clone();
        for spec in &faults {
            match self.act(spec).await {
                Act::Go => {}
                Act::End(status) => return Some(self.over(&status)),
                Act::Stop => std::future::pending().await,
            }
        }
        let Some(message) = self.out.pop_front() else {
            let status = self.end.take().unwrap_or_else(|| Status::ok(""));
            return Some(self.over(&status));
        };
        let bytes = self.encode(&message);
        for spec in &faults {
            if spec.entry.kind == Kind::Cut && spec.values.bytes > 0 {
                let left = spec.values.bytes.saturating_sub(self.bytes);
                if left < bytes.len() as u64 {
                    self.out.clear();
                    self.pieces.clear();
                    self.end = Some(ended(spec));
                    // Then nothing but the end is left.
                    self.bytes = spec.values.bytes;
                    return Some(Frame::data(bytes.slice(..left as usize)));
                }
            }
        }
        self.messages += 1;
        self.bytes += bytes.len() as u64;
        let of_drip = |spec: &&Arc<Spec>| spec.entry.kind == Kind::Drip && spec.values.bytes > 0;
        if let Some(spec) = faults.iter().find(of_drip) {
            let size = spec.values.bytes as usize;
            let pieces = (0..bytes.len()).step_by(size).map(|at| bytes.slice(at..bytes.len().min(at + size)));
            self.pieces = pieces.collect();
        } else {
            self.pieces = VecDeque::from([bytes]);
        }
        let piece = self.pieces.pop_front().unwrap_or_default();
        Some(self.piece(piece).await)
    }

    async fn piece(&mut self, piece: Bytes) -> Frame<Bytes> {
        for spec in &self.faults {
            if spec.entry.kind == Kind::Drip {
                tokio::time::sleep(Duration::from_millis(spec.values.ms)).await;
            }
        }
        self.last = Some(Instant::now());
        Frame::data(piece)
    }

    /// What a fault does before the next message, or before the end.
    async fn act(&mut self, spec: &Spec) -> Act {
        let is_there = self.messages == spec.values.after;
        match spec.entry.kind {
            Kind::Cut if spec.values.bytes == 0 && is_there => Act::End(ended(spec)),
            Kind::Stall if is_there => Act::Stop,
            Kind::Reset if is_there => {
                let connection = self.connection.clone();
                tokio::spawn(async move {
                    // What was sent reaches the client first.
                    tokio::time::sleep(FLUSH).await;
                    connection.cancel();
                });
                Act::Stop
            }
            Kind::LateFirst if self.messages == 0 => {
                tokio::time::sleep(Duration::from_millis(spec.values.ms)).await;
                Act::Go
            }
            Kind::BaseGone if is_there => {
                self.open.seen.facts().bases_gone.extend(self.asked.base.clone());
                Act::End(ended(spec))
            }
            _ => Act::Go,
        }
    }

    /// Whether a fault ends the stream here, as if it were whole.
    fn ends_with_ok(&self) -> bool {
        let more =
            |count: fn(&Counts) -> u64| count(&self.open.seen.facts().counts) > count(&self.open.counts);
        self.faults.iter().any(|spec| match spec.entry.kind {
            Kind::DeadlineIsOk => self.deadline.is_some_and(|deadline| Instant::now() >= deadline),
            Kind::DeleteEndsStreams => more(|counts| counts.deletions),
            Kind::ModifyEndsStreams => more(|counts| counts.modifications),
            Kind::ExpandEndsStreams => more(|counts| counts.expansions),
            Kind::CloneEndsStreams => more(|counts| counts.clones),
            Kind::LoseSlow => {
                self.last.is_some_and(|last| last.elapsed() >= Duration::from_millis(spec.values.ms))
            }
            _ => false,
        })
    }

    /// Reads the next message from behind, or the end.
    async fn read(&mut self) {
        let read = self.reader.next().await.and_then(|message| message.map(unframe::<Message>).transpose());
        match read {
            Ok(Some(message)) => {
                if let Some(empty) = &mut self.empty {
                    empty.push(message);
                    if empty.iter().any(|message| !message.block_metadata.is_empty()) {
                        let waiting = self.empty.take().unwrap_or_default();
                        waiting.into_iter().for_each(|message| self.change(message, 0));
                    }
                } else {
                    self.change(message, 0);
                }
            }
            Ok(None) => {
                self.end = Some(Status::ok(""));
                if let Some(empty) = self.empty.take() {
                    self.without_tuples(empty);
                }
                self.flush();
            }
            Err(status) => {
                self.end = Some(replaced(status, &self.faults));
                self.flush();
            }
        }
    }

    /// An answer without tuples that a fault is about.
    fn without_tuples(&mut self, messages: Vec<Message>) {
        let capacity = messages.first().map_or(0, |message| message.volume_capacity_bytes);
        let offset = self.asked.offset;
        let (mut messages, mut end) = (messages, None);
        for spec in &self.faults {
            match spec.entry.kind {
                Kind::EmptyIsError if offset == 0 => end = Some(ended(spec)),
                Kind::EndIsError if offset == capacity => end = Some(ended(spec)),
                Kind::EmptyWithoutMessage => messages.clear(),
                _ => {}
            }
        }
        match end {
            Some(end) => self.end = Some(end),
            None => messages.into_iter().for_each(|message| self.change(message, 0)),
        }
    }

    /// Sends a message through the changers from number `from` on.
    fn change(&mut self, message: Message, from: usize) {
        let mut messages = vec![message];
        for changer in &mut self.changers[from..] {
            messages = messages.into_iter().flat_map(|message| changer.message(message)).collect();
        }
        self.out.extend(messages);
    }

    /// What the changers hold back is passed through those after them.
    fn flush(&mut self) {
        for at in 0..self.changers.len() {
            for message in self.changers[at].end() {
                self.change(message, at + 1);
            }
        }
    }

    /// A message with its prefix, as large as a fault wants it.
    fn encode(&self, message: &Message) -> Bytes {
        let huge = self.faults.iter().find(|spec| spec.entry.kind == Kind::Huge);
        let Some(spec) = huge else { return frame(message) };
        /// Field 1000 of any message, length-delimited: clients skip it.
        const UNKNOWN: u64 = 1000 << 3 | 2;
        let mut body = message.encode_to_vec();
        let missing = (spec.values.size as usize).saturating_sub(body.len());
        prost::encoding::encode_varint(UNKNOWN, &mut body);
        prost::encoding::encode_varint(missing as u64, &mut body);
        body.resize(body.len() + missing, 0);
        frame_bytes(&body)
    }

    fn over(&mut self, status: &Status) -> Frame<Bytes> {
        self.is_over = true;
        self.open.is_done = true;
        Frame::trailers(trailers(status))
    }
}

/// Frames that are made whether they are asked for or not, as long as those that wait have fewer than `bytes` bytes. They end
/// when the client is gone.
fn read_ahead(
    frames: impl Frames<Item = Result<Frame<Bytes>, Status>> + Send + 'static,
    bytes: u64,
) -> impl Frames<Item = Result<Frame<Bytes>, Status>> + Send {
    let bytes = u32::try_from(bytes).unwrap_or(u32::MAX);
    let room = Arc::new(Semaphore::new(bytes as usize));
    let (sender, receiver) = mpsc::unbounded_channel();
    tokio::spawn(async move {
        let mut frames = std::pin::pin!(frames);
        let reading = async {
            while let Some(frame) = frames.next().await {
                let size = frame.as_ref().ok().and_then(Frame::data_ref).map_or(0, Bytes::len);
                let size = u32::try_from(size).unwrap_or(u32::MAX).min(bytes);
                let taken = room.clone().acquire_many_owned(size).await;
                if sender.send((frame, taken)).is_err() {
                    return;
                }
            }
        };
        tokio::select! {
            () = reading => {}
            () = sender.closed() => {}
        }
    });
    futures_util::stream::unfold(receiver, |mut receiver: mpsc::UnboundedReceiver<_>| async move {
        // Its bytes are free for the next ones.
        let (frame, _taken) = receiver.recv().await?;
        Some((frame, receiver))
    })
}

fn ended(spec: &Spec) -> Status {
    match spec.values.code {
        Code::Ok => Status::ok(""),
        code => Status::new(code, format!("the stream ends here (cbt-lab: {spec})")),
    }
}

/// What a refusal becomes.
pub(super) fn replaced(status: Status, met: &[Arc<Spec>]) -> Status {
    let is_replaced =
        |spec: &&Arc<Spec>| spec.entry.kind == Kind::ErrorBecomes && spec.values.from == status.code();
    match met.iter().find(is_replaced) {
        Some(spec) => Status::new(spec.values.code, format!("{} (cbt-lab: {spec})", status.message())),
        None => status,
    }
}

/// A status as the end of a body.
pub(crate) fn trailers(status: &Status) -> HeaderMap {
    let mut trailers = HeaderMap::new();
    if status.add_header(&mut trailers).is_err() {
        // A message that no header can hold.
        trailers.insert("grpc-status", HeaderValue::from(status.code() as i32));
    }
    trailers
}

/// An answer with the head that gRPC has.
pub(crate) fn response(body: Body) -> Response<Body> {
    let mut response = Response::new(body);
    response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static("application/grpc"));
    response
}

/// An answer of these messages, each with its prefix, that ends with `OK`.
pub(crate) fn answer(messages: impl IntoIterator<Item = Bytes>) -> Response<Body> {
    let end = Frame::trailers(trailers(&Status::ok("")));
    let frames: Vec<_> = messages.into_iter().map(Frame::data).chain([end]).map(Ok::<_, Status>).collect();
    response(Body::new(StreamBody::new(futures_util::stream::iter(frames))))
}

/// An answer that no fault changes; it is noted whether it is read to its end.
pub(super) struct Guarded {
    body: Body,
    open: Open,
}

impl Guarded {
    pub fn new(body: Body, mut open: Open) -> Self {
        // A refusal is all in its head, and no client asks for more.
        open.is_done = body.is_end_stream();
        Guarded { body, open }
    }
}

impl HttpBody for Guarded {
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        let polled = Pin::new(&mut self.body).poll_frame(context);
        match &polled {
            Poll::Ready(None) => self.open.is_done = true,
            Poll::Ready(Some(Ok(frame))) if frame.is_trailers() => self.open.is_done = true,
            _ => {}
        }
        polled
    }

    /// A refusal has to end with its head: clients in Go take an empty body behind it for a stream that was cut.
    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }
}
