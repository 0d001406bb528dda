//! An HTTP/2 client of one call on a connection of its own (RFC 9113): what a relay needs, and little memory while it waits.
//!
//! A stream whose client takes nothing holds the bytes that it has read and not passed on, and no buffers beside them. A
//! general client has some 40 KiB for each connection. Windows may grow at any time. How large they are, and when a server counts
//! as gone, is decided in `upstream`.

use std::io;
use std::mem;
use std::pin::{Pin, pin};
use std::task::{Context, Poll, ready};

use bytes::{Buf, BufMut, Bytes, BytesMut};
use loona_hpack::{Decoder, Encoder};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite};
use tonic::codegen::http::{HeaderMap, HeaderName, HeaderValue, Request, StatusCode};

/// What a client sends first (section 3.4).
const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
/// The one stream.
const STREAM: u32 = 1;
/// Bytes before the payload of each frame: its length, kind, flags and stream.
const HEAD: usize = 9;
/// The largest payload, in both directions: the default of SETTINGS_MAX_FRAME_SIZE.
const MAX_FRAME: usize = 16 << 10;
/// The most bytes of a head or of trailers, packed and unpacked.
const MAX_FIELDS: usize = 16 << 10;
/// The most bytes of answers to pings and settings that may wait until the server reads.
const MAX_WAITING: usize = 64 << 10;
/// Bytes read at once. Those of a narrow window are copied out of the buffer, so they keep no more than themselves.
const READ: usize = 64 << 10;
const READ_NARROW: usize = 8 << 10;
/// A window from which pieces are passed on in the buffer that they were read into.
const WIDE: i64 = READ as i64;
/// Pieces below this size are put together as long as more of them are there: each costs more than its bytes.
const SMALL: usize = 1 << 10;

/// Kinds of frames (section 6).
mod kind {
    pub const DATA: u8 = 0;
    pub const HEADERS: u8 = 1;
    pub const RST_STREAM: u8 = 3;
    pub const SETTINGS: u8 = 4;
    pub const PUSH_PROMISE: u8 = 5;
    pub const PING: u8 = 6;
    pub const GOAWAY: u8 = 7;
    pub const WINDOW_UPDATE: u8 = 8;
    pub const CONTINUATION: u8 = 9;
}

mod flag {
    pub const ACK: u8 = 0x1;
    pub const END_STREAM: u8 = 0x1;
    pub const END_HEADERS: u8 = 0x4;
    pub const PADDED: u8 = 0x8;
    pub const PRIORITY: u8 = 0x20;
}

/// Settings (section 6.5.2).
mod setting {
    pub const ENABLE_PUSH: u16 = 2;
    pub const INITIAL_WINDOW_SIZE: u16 = 4;
    pub const MAX_HEADER_LIST_SIZE: u16 = 6;
}

/// Why there is no more of the answer.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The connection broke.
    #[error("the connection broke: {0}")]
    Io(#[from] io::Error),
    /// The connection ended before the answer did.
    #[error("the connection was closed")]
    Closed,
    /// The server gave the call up, with this error code (section 7).
    #[error("the server ended the call with the HTTP/2 error code {0}")]
    Reset(u32),
    /// The server sent what the protocol forbids, or more than this client takes.
    #[error("the server breaks HTTP/2: {0}")]
    Protocol(&'static str),
}

/// What comes of an answer, in this order: one head, any number of pieces of data, and at most one set of trailers.
#[derive(Debug, PartialEq)]
pub enum Part {
    /// The status and the fields before the data.
    Head(StatusCode, HeaderMap),
    /// Never empty.
    Data(Bytes),
    /// The fields after the data.
    Trailers(HeaderMap),
}

/// Where the answer is.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Stage {
    Head,
    Body,
    /// In the payload of a DATA frame: bytes that are still to come of data and of padding, and whether the stream ends there.
    Data {
        left: usize,
        padding: usize,
        is_last: bool,
    },
    End,
}

/// A connection with its call.
pub struct Connection<T> {
    io: T,
    /// What is read and not looked at.
    inbox: BytesMut,
    /// What is to be written.
    outbox: BytesMut,
    stage: Stage,
    /// A field block whose end has not come (CONTINUATION), and whether the stream ends with it.
    unfinished: Option<(BytesMut, bool)>,
    unpack: Decoder<'static>,
    /// The window of the answer, and what the server may send of it now.
    window: i64,
    allowed: i64,
    /// Passed on, and not yet given back to the window.
    taken: i64,
    /// What is left of the request's body, and what the server lets us send: on the stream, and on the connection.
    body: Bytes,
    may_send: (i64, i64),
    /// The server's SETTINGS_INITIAL_WINDOW_SIZE.
    initial: i64,
    /// Whether the server has sent anything since [`Connection::ping`].
    is_heard: bool,
}

impl<T: AsyncRead + AsyncWrite + Unpin> Connection<T> {
    /// Begins a call whose answer may be `window` bytes ahead.
    pub fn begin(io: T, request: &Request<()>, body: Bytes, window: u32) -> Self {
        const DEFAULT_WINDOW: i64 = 65_535;
        let mut connection = Connection {
            io,
            inbox: BytesMut::new(),
            outbox: BytesMut::new(),
            stage: Stage::Head,
            unfinished: None,
            unpack: Decoder::new(),
            window: window.into(),
            allowed: window.into(),
            taken: 0,
            body,
            may_send: (DEFAULT_WINDOW, DEFAULT_WINDOW),
            initial: DEFAULT_WINDOW,
            is_heard: false,
        };
        connection.outbox.put_slice(PREFACE);
        let mut settings = BytesMut::new();
        let ours = [
            (setting::ENABLE_PUSH, 0),
            (setting::INITIAL_WINDOW_SIZE, window),
            (setting::MAX_HEADER_LIST_SIZE, MAX_FIELDS as u32),
        ];
        for (name, value) in ours {
            settings.put_u16(name);
            settings.put_u32(value);
        }
        connection.send(kind::SETTINGS, 0, 0, &settings);
        let authority = request.uri().authority().map_or("localhost", |authority| authority.as_str());
        let path = request.uri().path_and_query().map_or("/", |path| path.as_str());
        let pseudo = [
            (":method", request.method().as_str()),
            (":scheme", request.uri().scheme_str().unwrap_or("http")),
            (":authority", authority),
            (":path", path),
        ];
        let fields = request.headers().iter().map(|(name, value)| (name.as_str(), value.as_bytes()));
        let fields = pseudo.iter().map(|(name, value)| (*name, value.as_bytes())).chain(fields);
        let block = Encoder::new().encode(fields.map(|(name, value)| (name.as_bytes(), value)));
        // A gRPC request has a few hundred bytes of fields, far less than a frame takes.
        connection.send(kind::HEADERS, flag::END_HEADERS, STREAM, &block);
        connection.send_body();
        connection
    }

    /// Lets the answer be `window` bytes ahead from now on; a window never shrinks.
    pub fn widen(&mut self, window: u32) {
        let more = i64::from(window) - self.window;
        if more > 0 {
            self.window += more;
            self.give_back(more);
        }
    }

    /// Asks the server for a sign of life.
    pub fn ping(&mut self) {
        self.is_heard = false;
        self.send(kind::PING, 0, 0, &[0; 8]);
    }

    /// Whether the server has sent anything since the last ping.
    pub fn is_heard(&self) -> bool {
        self.is_heard
    }

    /// The next part of the answer; `None` at its end.
    pub fn poll_part(&mut self, context: &mut Context<'_>) -> Poll<Result<Option<Part>, Error>> {
        loop {
            let part = self.next()?;
            if self.inbox.is_empty() && self.window < WIDE {
                self.inbox = BytesMut::new();
            }
            self.write(context)?;
            if part.is_some() || self.stage == Stage::End {
                return Poll::Ready(Ok(part));
            }
            ready!(self.read(context))?;
        }
    }

    fn read(&mut self, context: &mut Context<'_>) -> Poll<Result<(), Error>> {
        self.inbox.reserve(if self.window < WIDE { READ_NARROW } else { READ });
        let read = pin!(self.io.read_buf(&mut self.inbox)).poll(context);
        if self.inbox.is_empty() {
            // Nothing is kept while nothing comes.
            self.inbox = BytesMut::new();
        }
        match ready!(read)? {
            0 => Poll::Ready(Err(Error::Closed)),
            _ => {
                self.is_heard = true;
                Poll::Ready(Ok(()))
            }
        }
    }

    /// Writes what the connection takes; the rest when it is polled again.
    fn write(&mut self, context: &mut Context<'_>) -> Result<(), Error> {
        while !self.outbox.is_empty() {
            match Pin::new(&mut self.io).poll_write(context, &self.outbox) {
                Poll::Pending if self.outbox.len() > MAX_WAITING + self.body.len() => {
                    return Err(Error::Protocol("it asks for answers and does not read them"));
                }
                Poll::Pending => return Ok(()),
                Poll::Ready(written) => match written? {
                    0 => return Err(Error::Closed),
                    written => self.outbox.advance(written),
                },
            }
        }
        self.outbox = BytesMut::new();
        // A connection over TLS may hold some of it back.
        match Pin::new(&mut self.io).poll_flush(context) {
            Poll::Ready(flushed) => Ok(flushed?),
            Poll::Pending => Ok(()),
        }
    }

    fn send(&mut self, kind: u8, flags: u8, stream: u32, payload: &[u8]) {
        self.outbox.put_uint(payload.len() as u64, 3);
        self.outbox.put_u8(kind);
        self.outbox.put_u8(flags);
        self.outbox.put_u32(stream);
        self.outbox.put_slice(payload);
    }

    /// Sends what the server's windows allow of the request's body.
    fn send_body(&mut self) {
        while !self.body.is_empty() {
            let may = self.may_send.0.min(self.may_send.1).clamp(0, MAX_FRAME as i64);
            let piece = self.body.split_to(self.body.len().min(may as usize));
            if piece.is_empty() {
                return;
            }
            let flags = if self.body.is_empty() { flag::END_STREAM } else { 0 };
            self.send(kind::DATA, flags, STREAM, &piece);
            self.may_send.0 -= piece.len() as i64;
            self.may_send.1 -= piece.len() as i64;
        }
    }

    /// Lets the server send more bytes. The window of the connection begins no smaller than that of the stream, and
    /// grows with it: so only the stream's counts.
    fn give_back(&mut self, bytes: i64) {
        self.allowed += bytes;
        for stream in [STREAM, 0] {
            self.send(kind::WINDOW_UPDATE, 0, stream, &(bytes as u32).to_be_bytes());
        }
    }

    /// Bytes of data or padding are passed on.
    fn took(&mut self, bytes: usize) {
        self.taken += bytes as i64;
        if self.taken * 2 >= self.window && self.stage != Stage::End {
            let taken = mem::take(&mut self.taken);
            self.give_back(taken);
        }
    }

    /// The next part of the answer in what has been read; `None` where more has to be read first, and at the end.
    fn next(&mut self) -> Result<Option<Part>, Error> {
        let mut together = BytesMut::new();
        let data = |together: BytesMut| Ok(Some(Part::Data(together.freeze())));
        loop {
            match self.stage {
                Stage::End if together.is_empty() => return Ok(None),
                Stage::End => return data(together),
                Stage::Data { left: 0, padding: 0, is_last } => {
                    self.stage = if is_last { Stage::End } else { Stage::Body };
                }
                _ if self.inbox.is_empty() => {
                    return if together.is_empty() { Ok(None) } else { data(together) };
                }
                Stage::Data { left: 0, padding, is_last } => {
                    let here = padding.min(self.inbox.len());
                    self.inbox.advance(here);
                    self.stage = Stage::Data { left: 0, padding: padding - here, is_last };
                    self.took(here);
                }
                Stage::Data { left, padding, is_last } => {
                    let here = left.min(self.inbox.len());
                    let is_copied = self.window < WIDE || here < SMALL;
                    if !is_copied && !together.is_empty() || together.len() + here > READ {
                        return data(together);
                    }
                    self.stage = Stage::Data { left: left - here, padding, is_last };
                    self.took(here);
                    let bytes = self.inbox.split_to(here);
                    if !is_copied {
                        return data(bytes);
                    }
                    together.extend_from_slice(&bytes);
                }
                Stage::Head | Stage::Body => {
                    // What ends the data is left for the next time.
                    let ends = [kind::HEADERS, kind::RST_STREAM, kind::GOAWAY];
                    if !together.is_empty() && self.inbox.get(3).is_none_or(|kind| ends.contains(kind)) {
                        return data(together);
                    }
                    match self.frame()? {
                        Frame::Cut if together.is_empty() => return Ok(None),
                        Frame::Cut => return data(together),
                        Frame::Done => {}
                        Frame::Part(part) => return Ok(Some(part)),
                    }
                }
            }
        }
    }

    /// Takes one frame out of what has been read; of DATA its head alone.
    fn frame(&mut self) -> Result<Frame, Error> {
        let Some((mut head, _)) = self.inbox.split_at_checked(HEAD) else { return Ok(Frame::Cut) };
        let length = head.get_uint(3) as usize;
        let (kind, flags, stream) = (head.get_u8(), head.get_u8(), head.get_u32() & (u32::MAX >> 1));
        let has = |flag: u8| flags & flag != 0;
        if length > MAX_FRAME {
            return Err(Error::Protocol("a frame is larger than 16384 bytes"));
        }
        if self.unfinished.is_some() != (kind == kind::CONTINUATION) {
            return Err(Error::Protocol("CONTINUATION is missing, or continues nothing"));
        }
        let is_of_call = stream == STREAM;
        if kind == kind::DATA {
            let before = usize::from(has(flag::PADDED));
            if self.inbox.len() < HEAD + before {
                return Ok(Frame::Cut);
            }
            let padding = if before == 1 { usize::from(self.inbox[HEAD]) } else { 0 };
            let left = length.checked_sub(before + padding);
            let left = left.ok_or(Error::Protocol("the padding is longer than its frame"))?;
            if !is_of_call || self.stage != Stage::Body {
                return Err(Error::Protocol("data comes where there is no call for it"));
            }
            self.allowed -= length as i64;
            if self.allowed < 0 {
                return Err(Error::Protocol("the data exceeds the window"));
            }
            self.inbox.advance(HEAD + before);
            self.stage = Stage::Data { left, padding, is_last: has(flag::END_STREAM) };
            self.took(before);
            return Ok(Frame::Done);
        }
        if self.inbox.len() < HEAD + length {
            return Ok(Frame::Cut);
        }
        let mut payload = self.inbox.split_to(HEAD + length).split_off(HEAD);
        let cut = Error::Protocol("the length of a frame does not fit its kind");
        match kind {
            kind::HEADERS => {
                if !is_of_call {
                    return Err(Error::Protocol("a head comes where there is no call for it"));
                }
                let padding =
                    if has(flag::PADDED) { usize::from(payload.try_get_u8().map_err(|_| cut)?) } else { 0 };
                let before = if has(flag::PRIORITY) { 5 } else { 0 };
                let Some(end) = payload.len().checked_sub(padding).filter(|end| *end >= before) else {
                    return Err(Error::Protocol("the padding is longer than its frame"));
                };
                payload.truncate(end);
                payload.advance(before);
                self.fields(payload, has(flag::END_STREAM), has(flag::END_HEADERS))
            }
            kind::CONTINUATION => {
                let (mut fields, is_last) = self.unfinished.take().unwrap_or_default();
                fields.extend_from_slice(&payload);
                self.fields(fields, is_last, has(flag::END_HEADERS))
            }
            kind::RST_STREAM if is_of_call => Err(Error::Reset(payload.try_get_u32().map_err(|_| cut)?)),
            kind::SETTINGS if !has(flag::ACK) => {
                if !length.is_multiple_of(6) {
                    return Err(cut);
                }
                while payload.has_remaining() {
                    let (name, value) = (payload.get_u16(), i64::from(payload.get_u32()));
                    if name == setting::INITIAL_WINDOW_SIZE {
                        self.may_send.0 += value - mem::replace(&mut self.initial, value);
                    }
                }
                self.send(kind::SETTINGS, flag::ACK, 0, &[]);
                self.send_body();
                Ok(Frame::Done)
            }
            kind::PING if !has(flag::ACK) => {
                if length != 8 {
                    return Err(cut);
                }
                self.send(kind::PING, flag::ACK, 0, &payload);
                Ok(Frame::Done)
            }
            // A server that is being stopped still ends the calls that it has taken.
            kind::GOAWAY => match (payload.try_get_u32(), payload.try_get_u32()) {
                (Ok(last), Ok(0)) if last & (u32::MAX >> 1) >= STREAM => Ok(Frame::Done),
                (Ok(_), Ok(code)) => Err(Error::Reset(code)),
                _ => Err(cut),
            },
            kind::WINDOW_UPDATE => {
                let more = i64::from(payload.try_get_u32().map_err(|_| cut)? & (u32::MAX >> 1));
                match stream {
                    0 => self.may_send.1 += more,
                    STREAM => self.may_send.0 += more,
                    _ => {}
                }
                self.send_body();
                Ok(Frame::Done)
            }
            kind::PUSH_PROMISE => Err(Error::Protocol("it pushes, which was refused")),
            // Acknowledgements, priorities, and kinds that are unknown here.
            _ => Ok(Frame::Done),
        }
    }

    /// Takes in fields: a head, or trailers.
    fn fields(&mut self, block: BytesMut, is_last: bool, is_whole: bool) -> Result<Frame, Error> {
        if block.len() > MAX_FIELDS {
            return Err(Error::Protocol("a head is larger than 16384 bytes"));
        }
        if !is_whole {
            self.unfinished = Some((block, is_last));
            return Ok(Frame::Done);
        }
        let (mut status, mut fields, mut size, mut is_valid) = (None, HeaderMap::new(), 0, true);
        let unpacked = self.unpack.decode_with_cb(&block, |name, value| {
            size += name.len() + value.len() + 32;
            if size > MAX_FIELDS {
                return;
            }
            match (name.as_ref(), HeaderName::from_bytes(&name), HeaderValue::from_bytes(&value)) {
                (b":status", _, _) => status = StatusCode::from_bytes(&value).ok(),
                (_, Ok(name), Ok(value)) => drop(fields.append(name, value)),
                _ => is_valid = false,
            }
        });
        if unpacked.is_err() || !is_valid {
            return Err(Error::Protocol("a head cannot be unpacked"));
        }
        if size > MAX_FIELDS {
            return Err(Error::Protocol("a head is larger than 16384 bytes"));
        }
        match (self.stage, status) {
            // An interim answer (RFC 9110, section 15.2).
            (Stage::Head, Some(status)) if status.is_informational() && !is_last => Ok(Frame::Done),
            (Stage::Head, Some(status)) => {
                self.stage = if is_last { Stage::End } else { Stage::Body };
                Ok(Frame::Part(Part::Head(status, fields)))
            }
            (Stage::Body, None) if is_last => {
                self.stage = Stage::End;
                Ok(Frame::Part(Part::Trailers(fields)))
            }
            _ => Err(Error::Protocol("a head has no status, or trailers do not end the answer")),
        }
    }
}

/// What a frame is to the caller.
enum Frame {
    /// It has not come whole.
    Cut,
    /// It is dealt with.
    Done,
    Part(Part),
}

#[cfg(test)]
mod tests;
