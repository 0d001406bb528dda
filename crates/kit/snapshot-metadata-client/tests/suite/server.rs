//! A CSI driver on a real socket that knows one list of ranges and answers each call with the next fault of a script.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::io;
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll};
use std::time::Duration;

use futures_util::future::BoxFuture;
use futures_util::task::AtomicWaker;
use futures_util::{Stream, TryStreamExt};
use http_body_util::{BodyExt, StreamBody};
use proto::snapshot_metadata_server::{SnapshotMetadata, SnapshotMetadataServer};
use proto::*;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::mpsc;
use tokio_stream::wrappers::{ReceiverStream, UnixListenerStream};
use tonic::body::Body;
use tonic::codegen::http;
use tonic::server::NamedService;
use tonic::transport::server::Connected;
use tonic::{Code, Request, Response, Status, async_trait};

pub const CAPACITY: i64 = 1 << 20;
/// Ranges in a message.
const PER_MESSAGE: usize = 4;

/// What goes wrong with one call.
#[derive(Clone, Debug)]
pub enum Fault {
    /// Nothing.
    None,
    /// The connection breaks after this number of messages.
    Reset(usize),
    /// The call ends with an error after this number of messages.
    Status(usize, Code),
    /// The call ends with OK after this number of messages.
    EarlyOk(usize),
    /// The body ends without any status after this number of messages.
    NoStatus(usize),
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

/// A driver, until it is dropped.
pub struct Server {
    shared: Arc<Shared>,
    socket: PathBuf,
    runtime: Option<tokio::runtime::Runtime>,
}

#[derive(Default)]
struct Shared {
    ranges: Vec<(i64, i64)>,
    script: Mutex<VecDeque<Fault>>,
    offsets: Mutex<Vec<i64>>,
    others: Mutex<Vec<(String, i32)>>,
    /// The newest connection.
    connection: Mutex<Arc<Cut>>,
    strips_status: AtomicBool,
}

impl Server {
    /// On a socket, with a list of ranges. When the script is over, nothing goes wrong any more.
    pub fn start(socket: &Path, ranges: &[(i64, i64)], script: &[Fault]) -> Self {
        let _ = std::fs::remove_file(socket);
        let script = Mutex::new(script.iter().cloned().collect());
        let shared = Arc::new(Shared { ranges: ranges.to_vec(), script, ..Shared::default() });
        // Its own, so that its connections end with it, as those of a process do.
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build();
        let runtime = runtime.expect("a runtime");
        let listener = {
            let _entered = runtime.enter();
            UnixListenerStream::new(UnixListener::bind(socket).expect("bind"))
        };
        let connections = {
            let shared = shared.clone();
            listener.map_ok(move |stream| {
                let cut = Arc::<Cut>::default();
                *shared.connection.lock().unwrap() = cut.clone();
                Connection { stream, cut }
            })
        };
        let service =
            Stripping { inner: SnapshotMetadataServer::new(Driver(shared.clone())), shared: shared.clone() };
        runtime
            .spawn(tonic::transport::Server::builder().add_service(service).serve_with_incoming(connections));
        Server { shared, socket: socket.to_owned(), runtime: Some(runtime) }
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

impl Drop for Server {
    fn drop(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }
}

struct Driver(Arc<Shared>);

type Messages<M> = Pin<Box<dyn Stream<Item = Result<M, Status>> + Send>>;

impl Driver {
    fn answer(
        &self,
        offset: i64,
        secret: Option<&String>,
        max_results: i32,
    ) -> Messages<GetMetadataAllocatedResponse> {
        let shared = self.0.clone();
        shared.offsets.lock().unwrap().push(offset);
        shared.others.lock().unwrap().push((secret.cloned().unwrap_or_default(), max_results));
        let fault = shared.script.lock().unwrap().pop_front().unwrap_or(Fault::None);
        shared.strips_status.store(matches!(fault, Fault::NoStatus(_)), Ordering::Relaxed);
        let from = match fault {
            Fault::FromTheBeginning => 0,
            Fault::RoundsDown(unit) => offset / unit * unit,
            _ => offset,
        };
        let known = |range: &&(i64, i64)| !matches!(fault, Fault::Forgets(gone) if gone == **range);
        let listed = shared.ranges.iter().filter(known).filter(|(offset, length)| offset + length > from);
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
        let cut = shared.connection.lock().unwrap().clone();
        let (send, receive) = mpsc::channel(1);
        tokio::spawn(async move {
            let messages = match listed.is_empty() {
                true => vec![message(&[])],
                false => listed.chunks(PER_MESSAGE).map(message).collect(),
            };
            let after = match fault {
                Fault::Reset(after)
                | Fault::Status(after, _)
                | Fault::EarlyOk(after)
                | Fault::NoStatus(after)
                | Fault::Silent(after) => after,
                _ => messages.len(),
            };
            for message in messages.into_iter().take(after) {
                if send.send(Ok(message)).await.is_err() {
                    return;
                }
            }
            match fault {
                Fault::Reset(_) => {
                    // Until what was sent is on its way.
                    tokio::time::sleep(Duration::from_millis(50)).await;
                    cut.cut();
                    send.closed().await;
                }
                Fault::Silent(_) => send.closed().await,
                Fault::Status(_, code) => {
                    let _ = send.send(Err(Status::new(code, "as the script says"))).await;
                }
                _ => {}
            }
        });
        Box::pin(ReceiverStream::new(receive))
    }
}

#[async_trait]
impl SnapshotMetadata for Driver {
    type GetMetadataAllocatedStream = Messages<GetMetadataAllocatedResponse>;
    type GetMetadataDeltaStream = Messages<GetMetadataDeltaResponse>;

    async fn get_metadata_allocated(
        &self,
        request: Request<GetMetadataAllocatedRequest>,
    ) -> Result<Response<Self::GetMetadataAllocatedStream>, Status> {
        let request = request.into_inner();
        assert_eq!(request.snapshot_id, "target");
        let secret = request.secrets.get("key");
        Ok(Response::new(self.answer(request.starting_offset, secret, request.max_results)))
    }

    async fn get_metadata_delta(
        &self,
        request: Request<GetMetadataDeltaRequest>,
    ) -> Result<Response<Self::GetMetadataDeltaStream>, Status> {
        let request = request.into_inner();
        assert_eq!(
            (request.base_snapshot_id.as_str(), request.target_snapshot_id.as_str()),
            ("base", "target")
        );
        let secret = request.secrets.get("key");
        let messages = self.answer(request.starting_offset, secret, request.max_results);
        Ok(Response::new(Box::pin(messages.map_ok(|message| GetMetadataDeltaResponse {
            block_metadata_type: message.block_metadata_type,
            volume_capacity_bytes: message.volume_capacity_bytes,
            block_metadata: message.block_metadata,
        }))))
    }
}

/// Takes the trailers off an answer where the script says so.
#[derive(Clone)]
struct Stripping<S> {
    inner: S,
    shared: Arc<Shared>,
}

impl<S: NamedService> NamedService for Stripping<S> {
    const NAME: &'static str = S::NAME;
}

impl<S> tower::Service<http::Request<Body>> for Stripping<S>
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
            let answer = answer.await?;
            Ok(match shared.strips_status.load(Ordering::Relaxed) {
                true => answer.map(|body| {
                    let data = BodyExt::into_data_stream(body).map_ok(http_body::Frame::data);
                    Body::new(StreamBody::new(data))
                }),
                false => answer,
            })
        })
    }
}

/// A connection that can be broken.
struct Connection {
    stream: UnixStream,
    cut: Arc<Cut>,
}

#[derive(Default)]
struct Cut {
    is_cut: AtomicBool,
    reader: AtomicWaker,
}

impl Cut {
    fn cut(&self) {
        self.is_cut.store(true, Ordering::SeqCst);
        self.reader.wake();
    }
}

impl Connected for Connection {
    type ConnectInfo = ();
    fn connect_info(&self) {}
}

impl AsyncRead for Connection {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        self.cut.reader.register(context.waker());
        match self.cut.is_cut.load(Ordering::SeqCst) {
            true => Poll::Ready(Err(io::ErrorKind::ConnectionReset.into())),
            false => Pin::new(&mut self.stream).poll_read(context, buffer),
        }
    }
}

impl AsyncWrite for Connection {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(context, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }
}
