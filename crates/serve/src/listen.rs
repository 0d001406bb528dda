//! Connections over TLS: accepted, given a time for the handshake, counted, and closed when nobody uses them.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use rustls::ServerConfig;
use rustls::pki_types::CertificateDer;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc};
use tokio::time::{Instant, Sleep, sleep, timeout};
use tokio_rustls::TlsAcceptor;
use tokio_rustls::server::TlsStream;
use tokio_stream::wrappers::ReceiverStream;
use tokio_util::sync::{CancellationToken, WaitForCancellationFutureOwned};
use tonic::transport::server::Connected;

/// What connections may take.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Connections at once; further ones wait in the kernel's queue.
    pub connections: usize,
    /// Time for the handshake, and after it for the first byte.
    pub greeting: Duration,
    /// A connection without a call for this long is closed, at the latest after twice as long.
    pub unused: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        Limits { connections: 8192, greeting: Duration::from_secs(10), unused: Duration::from_secs(300) }
    }
}

/// Accepts connections until the stream is dropped. Each is greeted with the `config` of its moment; without one it is closed.
pub fn tls(
    listener: TcpListener,
    config: impl Fn() -> Option<Arc<ServerConfig>> + Send + 'static,
    limits: Limits,
) -> ReceiverStream<io::Result<Connection>> {
    let (ready, connections) = mpsc::channel(64);
    let places = Arc::new(Semaphore::new(limits.connections));
    tokio::spawn(async move {
        while let Ok(place) = places.clone().acquire_owned().await {
            let stream = tokio::select! {
                accepted = listener.accept() => match accepted {
                    Ok((stream, _)) => stream,
                    Err(error) => {
                        // Out of descriptors, perhaps: some of them come back.
                        tracing::warn!(%error, "accept a connection");
                        tokio::time::sleep(Duration::from_millis(100)).await;
                        continue;
                    }
                },
                () = ready.closed() => return,
            };
            let _ = stream.set_nodelay(true);
            let Some(config) = config() else {
                tracing::debug!("a connection is closed: there is no certificate yet");
                continue;
            };
            let (acceptor, ready) = (TlsAcceptor::from(config), ready.clone());
            tokio::spawn(async move {
                match timeout(limits.greeting, acceptor.accept(stream)).await {
                    Ok(Ok(stream)) => {
                        let _ = ready.send(Ok(Connection::new(stream, limits, place))).await;
                    }
                    Ok(Err(error)) => tracing::debug!(%error, "a TLS handshake failed"),
                    Err(_) => tracing::debug!("a TLS handshake took too long"),
                }
            });
        }
    });
    ReceiverStream::new(connections)
}

/// A connection. It ends when its [`Calls`] close it, and when no call has used it for long.
#[derive(Debug)]
pub struct Connection {
    stream: TlsStream<TcpStream>,
    calls: Calls,
    closed: Pin<Box<WaitForCancellationFutureOwned>>,
    /// When it is looked whether the connection is still used.
    look: Pin<Box<Sleep>>,
    unused: Duration,
    has_spoken: bool,
    _place: OwnedSemaphorePermit,
}

/// The calls on a connection. Each request has them among its extensions.
#[derive(Clone, Debug, Default)]
pub struct Calls {
    close: CancellationToken,
    open: Arc<AtomicUsize>,
    /// Calls that have begun since the connection was looked at.
    begun: Arc<AtomicUsize>,
    client: Option<Arc<CertificateDer<'static>>>,
}

/// A call that is open on a connection, until it is dropped.
#[derive(Debug)]
pub struct OpenCall(Calls);

impl Calls {
    /// Counts a call.
    pub fn open(&self) -> OpenCall {
        self.open.fetch_add(1, Ordering::Relaxed);
        self.begun.fetch_add(1, Ordering::Relaxed);
        OpenCall(self.clone())
    }

    /// The certificate that the client has shown.
    pub fn client(&self) -> Option<&CertificateDer<'static>> {
        self.client.as_deref()
    }

    fn are_none(&self) -> bool {
        self.open.load(Ordering::Relaxed) == 0
    }
}

impl OpenCall {
    /// Ends the call, and closes the connection if it has no other.
    pub fn end_and_close(self) {
        let calls = self.0.clone();
        drop(self);
        if calls.are_none() {
            calls.close.cancel();
        }
    }
}

impl Drop for OpenCall {
    fn drop(&mut self) {
        self.0.open.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Connection {
    fn new(stream: TlsStream<TcpStream>, limits: Limits, place: OwnedSemaphorePermit) -> Self {
        let shown = stream.get_ref().1.peer_certificates().and_then(|chain| chain.first());
        let calls = Calls { client: shown.cloned().map(Arc::new), ..Calls::default() };
        Connection {
            stream,
            closed: Box::pin(calls.close.clone().cancelled_owned()),
            calls,
            look: Box::pin(sleep(limits.greeting)),
            unused: limits.unused,
            has_spoken: false,
            _place: place,
        }
    }
}

impl Connection {
    /// The certificates that the client has shown, its own first.
    pub fn client_certificates(&self) -> &[CertificateDer<'static>] {
        self.stream.get_ref().1.peer_certificates().unwrap_or_default()
    }
}

impl Connected for Connection {
    type ConnectInfo = Calls;

    fn connect_info(&self) -> Calls {
        self.calls.clone()
    }
}

impl AsyncRead for Connection {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let ended =
            |why: &str| Poll::Ready(Err(io::Error::new(io::ErrorKind::ConnectionAborted, why.to_owned())));
        if self.closed.as_mut().poll(context).is_ready() {
            return ended("its only call was ended");
        }
        while self.look.as_mut().poll(context).is_ready() {
            // One that a call has just used may have the next one on its way.
            let is_used = self.calls.begun.swap(0, Ordering::Relaxed) > 0 || !self.calls.are_none();
            if !self.has_spoken || !is_used {
                return ended("no call uses it");
            }
            let next = Instant::now() + self.unused;
            self.look.as_mut().reset(next);
        }
        let before = buffer.filled().len();
        ready!(Pin::new(&mut self.stream).poll_read(context, buffer))?;
        if buffer.filled().len() > before && !self.has_spoken {
            self.has_spoken = true;
            let next = Instant::now() + self.unused;
            self.look.as_mut().reset(next);
        }
        Poll::Ready(Ok(()))
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

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write_vectored(context, bytes)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }
}
