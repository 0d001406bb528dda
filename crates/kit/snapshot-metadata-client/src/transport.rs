//! What the two ways to a server share: connections, and messages as this crate knows them.

use std::pin::Pin;
use std::time::Duration;

use futures_util::{Stream, StreamExt};
use tonic::transport::Endpoint;
use tonic::{Response, Status, Streaming};

use crate::answer::Message;
use crate::query::Policy;

/// Longest message that is taken, in bytes. Other clients take 4 MiB, so drivers keep to that.
pub(crate) const MAX_MESSAGE: usize = 16 << 20;
/// How much a server may send ahead, in bytes.
const WINDOW: u32 = 1 << 20;
/// When TCP looks whether the other end is still there. HTTP/2 has pings for that, but servers in Go end a connection whose
/// client pings more often than every five minutes.
const KEEPALIVE: Duration = Duration::from_secs(20);

/// The messages of a part.
pub(crate) type Messages = Pin<Box<dyn Stream<Item = Result<Message, Status>> + Send>>;

pub(crate) fn messages<M>(answer: Response<Streaming<M>>) -> Messages
where
    M: Into<Message> + Send + 'static,
{
    Box::pin(answer.into_inner().map(|message| message.map(Into::into)))
}

/// The connections of this client.
pub(crate) fn configured(endpoint: Endpoint, policy: &Policy) -> Endpoint {
    endpoint
        .connect_timeout(policy.connect)
        .tcp_keepalive(Some(KEEPALIVE))
        .tcp_keepalive_interval(Some(KEEPALIVE))
        .initial_stream_window_size(WINDOW)
        .initial_connection_window_size(WINDOW)
}

macro_rules! message_from {
    ($($response:ty),*) => {$(
        impl From<$response> for Message {
            fn from(message: $response) -> Self {
                let tuples = message.block_metadata.into_iter();
                Message {
                    style: message.block_metadata_type,
                    capacity: message.volume_capacity_bytes,
                    tuples: tuples.map(|tuple| (tuple.byte_offset, tuple.size_bytes)).collect(),
                }
            }
        }
    )*};
}

message_from!(
    proto::GetMetadataAllocatedResponse,
    proto::GetMetadataDeltaResponse,
    proto::kubernetes::GetMetadataAllocatedResponse,
    proto::kubernetes::GetMetadataDeltaResponse
);
