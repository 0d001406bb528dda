//! Answers that are passed on as they are: the body of a gRPC stream goes from one connection to the other frame by
//! frame, with its trailers, and no message is put together or decoded. What passes is counted by [`Tuples`], which know whether
//! it ends where a message does.

use std::time::{Duration, Instant};

use base64::Engine;
use base64::alphabet;
use base64::engine::{DecodePaddingMode, GeneralPurpose, GeneralPurposeConfig};
use bytes::{BufMut, Bytes, BytesMut};
use percent_encoding::percent_decode;
use prost::Message;
use tonic::codegen::http::{HeaderMap, HeaderValue, StatusCode};
use tonic::{Code, Status};

/// Length of the prefix of a gRPC message: a flag and a big-endian length ("Length-Prefixed-Message" in gRPC over HTTP/2).
const PREFIX: usize = 5;

/// A message with its prefix, as the body of a unary request.
pub fn frame(message: &impl Message) -> Bytes {
    frame_bytes(&message.encode_to_vec())
}

/// The same for a message that is encoded already.
pub fn frame_bytes(message: &[u8]) -> Bytes {
    let mut body = BytesMut::with_capacity(PREFIX + message.len());
    body.put_u8(0);
    body.put_u32(message.len() as u32);
    body.put_slice(message);
    body.freeze()
}

/// The one message of a unary request's body.
pub fn unframe<M: Message + Default>(body: Bytes) -> Result<M, Status> {
    M::decode(unframe_bytes(body)?)
        .map_err(|_| Status::invalid_argument("the request is not a message of this call"))
}

/// The same, not decoded.
pub fn unframe_bytes(mut body: Bytes) -> Result<Bytes, Status> {
    let broken = |what: &str| Status::invalid_argument(format!("the request is {what}"));
    if body.len() < PREFIX {
        return Err(broken("empty or cut short"));
    }
    let prefix = body.split_to(PREFIX);
    if prefix[0] != 0 {
        return Err(Status::unimplemented("the request is compressed: send it without grpc-encoding"));
    }
    let length = u32::from_be_bytes([prefix[1], prefix[2], prefix[3], prefix[4]]);
    if length as usize != body.len() {
        return Err(broken("not one whole message"));
    }
    Ok(body)
}

/// The moment at which the caller gives up, from the `grpc-timeout` header (gRPC over HTTP/2, "Requests").
pub fn deadline(headers: &HeaderMap) -> Option<Instant> {
    let text = headers.get("grpc-timeout")?.to_str().ok()?;
    let (value, unit) = text.split_at_checked(text.len().checked_sub(1)?)?;
    let value: u64 = value.parse().ok()?;
    let timeout = match unit {
        "H" => Duration::from_secs(value.checked_mul(3600)?),
        "M" => Duration::from_secs(value.checked_mul(60)?),
        "S" => Duration::from_secs(value),
        "m" => Duration::from_millis(value),
        "u" => Duration::from_micros(value),
        "n" => Duration::from_nanos(value),
        _ => return None,
    };
    Instant::now().checked_add(timeout)
}

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

/// The code for an answer with this status of HTTP and none of gRPC ("HTTP to gRPC Status Code Mapping").
pub fn code_of_http(status: StatusCode) -> Option<Code> {
    match status.as_u16() {
        200 => None,
        400 | 431 => Some(Code::Internal),
        401 => Some(Code::Unauthenticated),
        403 => Some(Code::PermissionDenied),
        404 => Some(Code::Unimplemented),
        429 | 502..=504 => Some(Code::Unavailable),
        _ => Some(Code::Unknown),
    }
}

/// The tag of a tuple: field 3, length-delimited.
const TUPLE: u8 = 3 << 3 | 2;

/// Counts the block metadata tuples in the body of a stream, however it is cut into pieces: the embedded messages in field
/// 3 of each message (`block_metadata`). After bytes that are no such message it counts no more.
#[derive(Debug, Default)]
pub struct Tuples {
    counted: u64,
    /// How much of a message's prefix was seen.
    prefix: usize,
    /// The length of the message, and how much of it is still to come.
    length: u32,
    left: usize,
    state: State,
}

#[derive(Clone, Copy, Debug, Default)]
enum State {
    /// Before a field.
    #[default]
    Tag,
    /// In a varint: its value and bits so far, and what it is.
    Varint { value: u64, bits: u32, kind: Varint },
    /// In bytes that are not looked at.
    Skip(u64),
    /// What comes is not understood.
    Lost,
}

#[derive(Clone, Copy, Debug)]
enum Varint {
    /// The value of a field.
    Value,
    /// The length of an embedded message, string or the like.
    Length { is_tuple: bool },
}

impl State {
    fn skip(bytes: u64) -> Self {
        if bytes == 0 { State::Tag } else { State::Skip(bytes) }
    }
}

impl Tuples {
    /// How many were seen.
    pub fn count(&self) -> u64 {
        self.counted
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

    /// Takes the next bytes of the body.
    pub fn take(&mut self, mut bytes: &[u8]) {
        while let Some((&byte, rest)) = bytes.split_first() {
            if self.left > 0 {
                let (message, rest) = bytes.split_at(self.left.min(bytes.len()));
                self.read(message);
                self.left -= message.len();
                // A field that is longer than its message.
                if self.left == 0 && !matches!(self.state, State::Tag) {
                    self.state = State::Lost;
                }
                bytes = rest;
                continue;
            }
            match self.prefix {
                0 if byte != 0 => self.state = State::Lost,
                0 => self.length = 0,
                _ => self.length = self.length << 8 | u32::from(byte),
            }
            self.prefix = (self.prefix + 1) % PREFIX;
            if self.prefix == 0 {
                self.left = self.length as usize;
            }
            bytes = rest;
        }
    }

    /// Takes the next bytes of a message.
    fn read(&mut self, mut bytes: &[u8]) {
        loop {
            // Whole tuples with a length of one byte: nearly all of any answer.
            if matches!(self.state, State::Tag) {
                while let [TUPLE, length @ 0..0x80, rest @ ..] = bytes
                    && let Some((_, after)) = rest.split_at_checked(usize::from(*length))
                {
                    bytes = after;
                    self.counted += 1;
                }
            }
            let Some((&byte, mut rest)) = bytes.split_first() else { return };
            self.state = match self.state {
                // A field number above 15 takes more than one byte; none of ours does.
                State::Tag if byte >= 0x80 => State::Lost,
                State::Tag => match byte & 7 {
                    0 => State::Varint { value: 0, bits: 0, kind: Varint::Value },
                    1 => State::Skip(8),
                    2 => {
                        State::Varint { value: 0, bits: 0, kind: Varint::Length { is_tuple: byte == TUPLE } }
                    }
                    5 => State::Skip(4),
                    _ => State::Lost,
                },
                State::Varint { bits, .. } if bits > 63 => State::Lost,
                State::Varint { value, bits, kind } => {
                    let value = value | u64::from(byte & 0x7f) << bits;
                    match (byte & 0x80 == 0, kind) {
                        (false, _) => State::Varint { value, bits: bits + 7, kind },
                        (true, Varint::Value) => State::Tag,
                        (true, Varint::Length { is_tuple }) => {
                            self.counted += u64::from(is_tuple);
                            State::skip(value)
                        }
                    }
                }
                State::Skip(left) => {
                    let here = left.min(bytes.len() as u64);
                    rest = &bytes[here as usize..];
                    State::skip(left - here)
                }
                State::Lost => return,
            };
            bytes = rest;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A message with type, capacity and `tuples` tuples, framed.
    fn message(tuples: u64) -> Vec<u8> {
        let mut fields = vec![0x08, 2, 0x10, 0x80, 0x80, 0x40];
        for tuple in 0..tuples {
            match tuple % 3 {
                0 => fields.extend([0x1a, 0]),
                1 => fields.extend([0x1a, 2, 0x10, 1]),
                _ => fields.extend([0x1a, 5, 0x08, 0x80, 0x20, 0x10, 1]),
            }
        }
        let mut framed = vec![0];
        framed.extend((fields.len() as u32).to_be_bytes());
        framed.extend(fields);
        framed
    }

    #[test]
    fn tuples_are_counted_however_the_body_is_cut() {
        let empty = [0, 0, 0, 0, 0];
        let body = [message(1000), message(0), empty.to_vec(), message(7)].concat();
        for piece in [1, 2, 3, 5, 7, 64, 4096, body.len()] {
            let mut tuples = Tuples::default();
            body.chunks(piece).for_each(|piece| tuples.take(piece));
            assert_eq!(tuples.count(), 1007, "in pieces of {piece}");
        }
    }

    #[test]
    fn a_body_that_is_none_counts_no_more_and_harms_nobody() {
        for broken in [
            &[1, 0, 0, 0, 4][..],                       // compressed
            &[0, 0, 0, 0, 2, 0x1a, 9],                  // a tuple longer than its message
            &[0, 0, 0, 0, 1, 0x07],                     // no such wire type
            &[0, 0, 0, 0, 9, 0x1a, 255, 255, 255, 255], // a length without an end
            &[0; 11],
        ] {
            let mut tuples = Tuples::default();
            tuples.take(broken);
            tuples.take(&message(5));
            assert!(tuples.count() <= 6, "{broken:?}");
        }
    }

    #[test]
    fn a_request_is_one_whole_message() {
        let sent = "a token".to_owned();
        assert_eq!(unframe::<String>(frame(&sent)).expect("whole"), sent);
        let whole = frame(&sent);
        let code = |body: &[u8]| {
            unframe::<String>(Bytes::copy_from_slice(body)).map_err(|status| status.code()).unwrap_err()
        };
        assert_eq!(code(&whole[..3]), tonic::Code::InvalidArgument);
        assert_eq!(code(&whole[..whole.len() - 1]), tonic::Code::InvalidArgument);
        assert_eq!(code(&[&whole[..], &whole[..]].concat()), tonic::Code::InvalidArgument);
        assert_eq!(code(&[1, 0, 0, 0, 0]), tonic::Code::Unimplemented);
        assert_eq!(code(&[0, 0, 0, 0, 1, 0xff]), tonic::Code::InvalidArgument);
    }
}
