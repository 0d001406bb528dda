//! Messages as they come: a gRPC codec that neither decodes nor encodes.

use bytes::{Buf, BufMut, Bytes};
use tonic::Status;
use tonic::codec::{Codec, DecodeBuf, Decoder, EncodeBuf, Encoder};

/// Messages are bytes.
#[derive(Clone, Copy, Debug, Default)]
pub struct Passthrough;

impl Codec for Passthrough {
    type Encode = Bytes;
    type Decode = Bytes;
    type Encoder = Self;
    type Decoder = Self;

    fn encoder(&mut self) -> Self {
        *self
    }

    fn decoder(&mut self) -> Self {
        *self
    }
}

impl Encoder for Passthrough {
    type Item = Bytes;
    type Error = Status;

    fn encode(&mut self, message: Bytes, body: &mut EncodeBuf<'_>) -> Result<(), Status> {
        body.put(message);
        Ok(())
    }
}

impl Decoder for Passthrough {
    type Item = Bytes;
    type Error = Status;

    fn decode(&mut self, body: &mut DecodeBuf<'_>) -> Result<Option<Bytes>, Status> {
        Ok(Some(body.copy_to_bytes(body.remaining())))
    }
}
