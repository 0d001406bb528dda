//! Connections over TLS: accepted, shaken hands with in time, counted, and ended when nobody uses them.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use rustls::ServerConfig;
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
    /// How long a connection without a call stays.
    pub unused: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        Limits { connections: 8192, greeting: Duration::from_secs(10), unused: Duration::from_secs(300) }
    }
}

/// Accepts connections until the stream is dropped.
pub fn tls(
    listener: TcpListener,
    config: Arc<ServerConfig>,
    limits: Limits,
) -> ReceiverStream<io::Result<Connection>> {
    let (ready, connections) = mpsc::channel(64);
    let acceptor = TlsAcceptor::from(config);
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
            let (acceptor, ready) = (acceptor.clone(), ready.clone());
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

/// A connection. It ends when its [`Line`] is hung up, and when no call uses it for long.
#[derive(Debug)]
pub struct Connection {
    stream: TlsStream<TcpStream>,
    line: Line,
    hung_up: Pin<Box<WaitForCancellationFutureOwned>>,
    /// When it is looked whether the connection is still used.
    look: Pin<Box<Sleep>>,
    unused: Duration,
    has_spoken: bool,
    _place: OwnedSemaphorePermit,
}

/// A connection, as seen by the calls on it.
#[derive(Clone, Debug, Default)]
pub struct Line {
    hang_up: CancellationToken,
    calls: Arc<AtomicUsize>,
}

/// A call on a connection, until it is dropped.
#[derive(Debug)]
pub struct OnLine(Line);

impl Line {
    /// Counts a call.
    pub fn enter(&self) -> OnLine {
        self.calls.fetch_add(1, Ordering::Relaxed);
        OnLine(self.clone())
    }
}

impl OnLine {
    /// Ends the call's place, and the connection too if no other call uses it.
    pub fn leave_and_hang_up(self) {
        let line = self.0.clone();
        drop(self);
        if line.calls.load(Ordering::Relaxed) == 0 {
            line.hang_up.cancel();
        }
    }
}

impl Drop for OnLine {
    fn drop(&mut self) {
        self.0.calls.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Connection {
    fn new(stream: TlsStream<TcpStream>, limits: Limits, place: OwnedSemaphorePermit) -> Self {
        let line = Line::default();
        Connection {
            stream,
            hung_up: Box::pin(line.hang_up.clone().cancelled_owned()),
            line,
            look: Box::pin(sleep(limits.greeting)),
            unused: limits.unused,
            has_spoken: false,
            _place: place,
        }
    }
}

impl Connected for Connection {
    type ConnectInfo = Line;

    fn connect_info(&self) -> Line {
        self.line.clone()
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
        if self.hung_up.as_mut().poll(context).is_ready() {
            return ended("its only call was ended");
        }
        while self.look.as_mut().poll(context).is_ready() {
            if !self.has_spoken || self.line.calls.load(Ordering::Relaxed) == 0 {
                return ended("nobody uses it");
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
