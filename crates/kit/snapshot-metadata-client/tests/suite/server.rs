//! A CSI driver on a real socket that knows one list of ranges and answers each call with the next fault of a script.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll};

use futures_util::future::BoxFuture;
use futures_util::{StreamExt, TryStreamExt};
use http_body::Frame;
use http_body_util::{BodyExt, StreamBody};
use proto::snapshot_metadata_server::SnapshotMetadataServer;
use proto::{BlockMetadata, BlockMetadataType, GetMetadataAllocatedResponse};
use testkit::plugin::{self, Asked, Metadata, Served};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::body::Body;
use tonic::codegen::Bytes;
use tonic::codegen::http::{self, HeaderName, HeaderValue};
use tonic::server::NamedService;
use tonic::{Code, Status};

pub const CAPACITY: i64 = 1 << 20;
/// Ranges in a message.
const PER_MESSAGE: usize = 4;

/// What goes wrong with one call.
#[derive(Clone, Debug)]
pub enum Fault {
    /// Nothing.
    None,
    /// The call ends with an error after this number of messages.
    Status(usize, Code),
    /// The call ends with OK after this number of messages.
    EarlyOk(usize),
    /// The call ends after this number of messages, and its status is somewhere else or nowhere.
    Ends(usize, End),
    /// Nothing more comes after this number of messages.
    Silent(usize),
    /// The capacity is another.
    Capacity(i64),
    /// The ranges are said to be blocks.
    FixedLength,
    /// The ranges come in the wrong order.
    Backwards,
    /// The ranges come from the beginning, whatever offset was asked for.
    FromTheBeginning,
    /// Offsets inside a unit of this number of bytes begin with the unit.
    RoundsDown(i64),
    /// This range is not known any more.
    Forgets((i64, i64)),
}

/// Fields of a head or of trailers.
pub type Fields = &'static [(&'static str, &'static str)];

/// How an answer ends that is none of tonic's.
#[derive(Clone, Copy, Debug, Default)]
pub struct End {
    /// What its head has beside what heads have.
    pub head: Fields,
    /// Bytes behind the messages.
    pub bytes: &'static [u8],
    /// Its trailers; without any it has none.
    pub trailers: Fields,
}

/// A driver, until it is dropped.
pub struct Server {
    shared: Arc<Shared>,
    socket: PathBuf,
    _served: Served,
}

#[derive(Default)]
struct Shared {
    ranges: Vec<(i64, i64)>,
    script: Mutex<VecDeque<Fault>>,
    offsets: Mutex<Vec<i64>>,
    others: Mutex<Vec<(String, i32)>>,
    end: Mutex<Option<End>>,
}

impl Server {
    /// On a socket, with a list of ranges. When the script is over, nothing goes wrong any more.
    pub fn start(socket: &Path, ranges: &[(i64, i64)], script: &[Fault]) -> Self {
        let script = Mutex::new(script.iter().cloned().collect());
        let shared = Arc::new(Shared { ranges: ranges.to_vec(), script, ..Shared::default() });
        let known = shared.clone();
        let metadata = Metadata(move |asked| std::future::ready(known.answer(asked)));
        let inner = SnapshotMetadataServer::new(metadata);
        let service = Ending { inner, shared: shared.clone() };
        let _served = Served::serving(socket, tonic::transport::Server::builder().add_service(service));
        Server { shared, socket: socket.to_owned(), _served }
    }

    pub fn endpoint(&self) -> String {
        format!("unix://{}", self.socket.display())
    }

    /// The offsets that were asked for.
    pub fn offsets(&self) -> Vec<i64> {
        self.shared.offsets.lock().unwrap().clone()
    }

    /// What else was in the requests: the secret `key`, and the maximum of results.
    pub fn others(&self) -> Vec<(String, i32)> {
        self.shared.others.lock().unwrap().clone()
    }
}

impl Shared {
    fn answer(&self, Asked { is_delta, request, .. }: Asked) -> plugin::Answer {
        let snapshots = (request.base_snapshot_id.as_str(), request.target_snapshot_id.as_str());
        assert_eq!(snapshots, (if is_delta { "base" } else { "" }, "target"));
        let offset = request.starting_offset;
        self.offsets.lock().unwrap().push(offset);
        let secret = request.secrets.get("key").cloned().unwrap_or_default();
        self.others.lock().unwrap().push((secret, request.max_results));
        let fault = self.script.lock().unwrap().pop_front().unwrap_or(Fault::None);
        *self.end.lock().unwrap() = match fault {
            Fault::Ends(_, end) => Some(end),
            _ => None,
        };
        let from = match fault {
            Fault::FromTheBeginning => 0,
            Fault::RoundsDown(unit) => offset / unit * unit,
            _ => offset,
        };
        let known = |range: &&(i64, i64)| !matches!(fault, Fault::Forgets(gone) if gone == **range);
        let listed = self.ranges.iter().filter(known).filter(|(offset, length)| offset + length > from);
        let mut listed: Vec<(i64, i64)> = listed
            .map(|&(offset, length)| {
                let begin = offset.max(from);
                (begin, offset + length - begin)
            })
            .collect();
        if matches!(fault, Fault::Backwards) {
            listed.reverse();
        }
        let (capacity, style) = match fault {
            Fault::Capacity(capacity) => (capacity, BlockMetadataType::VariableLength),
            Fault::FixedLength => (CAPACITY, BlockMetadataType::FixedLength),
            _ => (CAPACITY, BlockMetadataType::VariableLength),
        };
        let message = move |ranges: &[(i64, i64)]| GetMetadataAllocatedResponse {
            block_metadata_type: style.into(),
            volume_capacity_bytes: capacity,
            block_metadata: ranges
                .iter()
                .map(|&(byte_offset, size_bytes)| BlockMetadata { byte_offset, size_bytes })
                .collect(),
        };
        let (send, receive) = mpsc::channel(1);
        tokio::spawn(async move {
            let messages = match listed.is_empty() {
                true => vec![message(&[])],
                false => listed.chunks(PER_MESSAGE).map(message).collect(),
            };
            let after = match fault {
                Fault::Status(after, _)
                | Fault::EarlyOk(after)
                | Fault::Ends(after, _)
                | Fault::Silent(after) => after,
                _ => messages.len(),
            };
            for message in messages.into_iter().take(after) {
                if send.send(Ok(message)).await.is_err() {
                    return;
                }
            }
            match fault {
                Fault::Silent(_) => send.closed().await,
                Fault::Status(_, code) => {
                    let _ = send.send(Err(Status::new(code, "as the script says"))).await;
                }
                _ => {}
            }
        });
        Ok(Box::pin(ReceiverStream::new(receive)))
    }
}

/// Gives an answer another end where the script says so.
#[derive(Clone)]
struct Ending<S> {
    inner: S,
    shared: Arc<Shared>,
}

fn fields(fields: Fields) -> impl Iterator<Item = (HeaderName, HeaderValue)> {
    let field = |(name, value)| (HeaderName::from_static(name), HeaderValue::from_static(value));
    fields.iter().copied().map(field)
}

impl<S: NamedService> NamedService for Ending<S> {
    const NAME: &'static str = S::NAME;
}

impl<S> tower::Service<http::Request<Body>> for Ending<S>
where
    S: tower::Service<http::Request<Body>, Response = http::Response<Body>, Error = Infallible>,
    S::Future: Send + 'static,
{
    type Response = http::Response<Body>;
    type Error = Infallible;
    type Future = BoxFuture<'static, Result<Self::Response, Infallible>>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        self.inner.poll_ready(context)
    }

    fn call(&mut self, request: http::Request<Body>) -> Self::Future {
        let answer = self.inner.call(request);
        let shared = self.shared.clone();
        Box::pin(async move {
            let mut answer = answer.await?;
            let Some(End { head, bytes, trailers }) = *shared.end.lock().unwrap() else { return Ok(answer) };
            answer.headers_mut().extend(fields(head));
            Ok(answer.map(|body| {
                let more = (!bytes.is_empty()).then(|| Frame::data(Bytes::from_static(bytes)));
                let last = (!trailers.is_empty()).then(|| Frame::trailers(fields(trailers).collect()));
                let data = BodyExt::into_data_stream(body).map_ok(Frame::data);
                let rest = more.into_iter().chain(last).map(Ok);
                Body::new(StreamBody::new(data.chain(futures_util::stream::iter(rest))))
            }))
        })
    }
}
