//! Answers that are passed on as they are: the body of a gRPC stream is sent from one connection to the other frame by
//! frame, with its trailers, and no message is put together or decoded. What passes is counted by [`Tuples`], which know whether
//! it ends where a message does.

use std::time::Duration;

use bytes::{BufMut, Bytes, BytesMut};
use prost::Message;
pub use proto::answers::status;
use proto::answers::{Messages, PREFIX, Piece};
use tokio::time::Instant;
use tonic::codegen::http::{HeaderMap, StatusCode};
use tonic::{Code, Status};

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
/// 3 of each message (`block_metadata`). After bytes that are not such a message it stops counting.
#[derive(Debug, Default)]
pub struct Tuples {
    counted: u64,
    messages: Messages,
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

impl Tuples {
    /// How many were seen.
    pub fn count(&self) -> u64 {
        self.counted
    }

    /// What there is of a message that has not come whole.
    pub fn cut(&self) -> Option<String> {
        self.messages.cut()
    }

    /// Takes the next bytes of the body.
    pub fn take(&mut self, bytes: &[u8]) {
        let Tuples { counted, messages, state } = self;
        messages.take(bytes, |Piece { is_plain, bytes, is_last }| {
            if !is_plain {
                *state = State::Lost;
            }
            state.read(bytes, counted);
            // A field that is longer than its message.
            if is_last && !matches!(state, State::Tag) {
                *state = State::Lost;
            }
        });
    }
}

impl State {
    fn skip(bytes: u64) -> Self {
        if bytes == 0 { State::Tag } else { State::Skip(bytes) }
    }

    /// Takes the next bytes of a message.
    fn read(&mut self, mut bytes: &[u8], counted: &mut u64) {
        loop {
            // Whole tuples with a length of one byte: nearly all of any answer.
            if matches!(*self, State::Tag) {
                while let [TUPLE, length @ 0..0x80, rest @ ..] = bytes
                    && let Some((_, after)) = rest.split_at_checked(usize::from(*length))
                {
                    bytes = after;
                    *counted += 1;
                }
            }
            let Some((&byte, mut rest)) = bytes.split_first() else { return };
            *self = match *self {
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
                            *counted += u64::from(is_tuple);
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
