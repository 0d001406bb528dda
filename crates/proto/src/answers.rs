//! Answers as gRPC over HTTP/2 defines them, where tonic reads them otherwise: their status, and whether they are whole. For clients by
//! [`Checked`], and for servers that pass answers on as bytes.

use std::task::ready;

use base64::Engine;
use base64::alphabet;
use base64::engine::{DecodePaddingMode, GeneralPurpose, GeneralPurposeConfig};
use http_body::{Body as _, Frame};
use percent_encoding::percent_decode;
use tonic::body::Body;
use tonic::codegen::http::{HeaderMap, HeaderValue, Request, Response};
use tonic::codegen::{BoxFuture, Bytes, Context, Pin, Poll, Service};
use tonic::transport::{self, Channel};
use tonic::{Code, Status};

/// Length of the prefix of a message: a flag and a big-endian length ("Length-Prefixed-Message").
pub const PREFIX: usize = 5;

/// The status in a head or in trailers. Words and details that cannot be read change nothing about the code, as the protocol
/// wants it ("Responses", "Status-Message"): tonic takes the first for an error of its own, and panics at the second.
pub fn status(fields: &HeaderMap) -> Option<Status> {
    let bytes = |name| fields.get(name).map(HeaderValue::as_bytes);
    let code = Code::from_bytes(bytes("grpc-status")?);
    let message = percent_decode(bytes("grpc-message").unwrap_or_default()).decode_utf8_lossy();
    let padding = GeneralPurposeConfig::new().with_decode_padding_mode(DecodePaddingMode::Indifferent);
    let details = GeneralPurpose::new(&alphabet::STANDARD, padding)
        .decode(bytes("grpc-status-details-bin").unwrap_or_default())
        .unwrap_or_default();
    Some(Status::with_details(code, message, details.into()))
}

/// The messages in a body, however it is cut into pieces.
#[derive(Debug, Default)]
pub struct Messages {
    /// How much of a message's prefix was seen.
    prefix: usize,
    flag: u8,
    /// The length of the message, and how much of it is still to come.
    length: u32,
    left: usize,
}

/// The next bytes of a message.
#[derive(Clone, Copy, Debug)]
pub struct Piece<'b> {
    /// Whether the message is not compressed.
    pub is_plain: bool,
    pub bytes: &'b [u8],
    /// Whether the message ends with them.
    pub is_last: bool,
}

impl Messages {
    /// Takes the next bytes of the body, and shows those of messages. Of an empty message there are none.
    pub fn take(&mut self, mut bytes: &[u8], mut show: impl FnMut(Piece<'_>)) {
        while let Some((&byte, rest)) = bytes.split_first() {
            if self.left > 0 {
                let (message, rest) = bytes.split_at(self.left.min(bytes.len()));
                self.left -= message.len();
                show(Piece { is_plain: self.flag == 0, bytes: message, is_last: self.left == 0 });
                bytes = rest;
                continue;
            }
            match self.prefix {
                0 => (self.flag, self.length) = (byte, 0),
                _ => self.length = self.length << 8 | u32::from(byte),
            }
            self.prefix = (self.prefix + 1) % PREFIX;
            if self.prefix == 0 {
                self.left = self.length as usize;
            }
            bytes = rest;
        }
    }

    /// What there is of a message that has not come whole.
    pub fn cut(&self) -> Option<String> {
        match (self.prefix, self.left) {
            (0, 0) => None,
            (0, left) => {
                let length = self.length as usize;
                Some(format!("it ends after {} of {length} bytes of a message", length - left))
            }
            (seen, _) => Some(format!("it ends after {seen} of {PREFIX} bytes before a message")),
        }
    }
}

/// A channel for clients of tonic that a server may answer with anything: what tonic would panic at, misread, or take for a whole answer,
/// it gets as the protocol defines it.
#[derive(Clone, Debug)]
pub struct Checked(pub Channel);

impl Service<Request<Body>> for Checked {
    type Response = Response<Body>;
    type Error = transport::Error;
    type Future = BoxFuture<Response<Body>, transport::Error>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), transport::Error>> {
        Service::poll_ready(&mut self.0, context)
    }

    fn call(&mut self, request: Request<Body>) -> Self::Future {
        let answer = Service::call(&mut self.0, request);
        Box::pin(async move { Ok(checked(answer.await?)) })
    }
}

fn checked(answer: Response<Body>) -> Response<Body> {
    let (mut head, body) = answer.into_parts();
    if body.is_end_stream() {
        make_readable(&mut head.headers);
        return Response::from_parts(head, body);
    }
    match status(&head.headers).map(|status| status.code()) {
        // Only an answer without a message has its status in the head ("Trailers-Only"). With a message, tonic would wait for no other.
        Some(Code::Ok) => drop(head.headers.remove("grpc-status")),
        _ => make_readable(&mut head.headers),
    }
    Response::from_parts(head, Body::new(Whole { body, messages: Messages::default() }))
}

/// Writes a status again, so that tonic reads what [`status`] does.
fn make_readable(fields: &mut HeaderMap) {
    let Some(status) = status(fields) else { return };
    fields.remove("grpc-message");
    fields.remove("grpc-status-details-bin");
    // It fails for words that are not a header value, and those are percent-encoded by it.
    let _ = status.add_header(fields);
}

/// A body that does not end well within a message: tonic looks for the rest of one only where there are no trailers.
struct Whole {
    body: Body,
    messages: Messages,
}

impl http_body::Body for Whole {
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        let Some(mut frame) = ready!(Pin::new(&mut self.body).poll_frame(context)?) else {
            return Poll::Ready(None);
        };
        if let Some(bytes) = frame.data_ref() {
            self.messages.take(bytes, |_| {});
        }
        if let Some(trailers) = frame.trailers_mut() {
            let is_ok = status(trailers).is_some_and(|status| status.code() == Code::Ok);
            if let Some(cut) = self.messages.cut().filter(|_| is_ok) {
                return Poll::Ready(Some(Err(Status::internal(format!("the answer is not whole: {cut}")))));
            }
            make_readable(trailers);
        }
        Poll::Ready(Some(Ok(frame)))
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }
}
