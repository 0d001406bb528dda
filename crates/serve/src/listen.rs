//! Connections over TLS: accepted, given a time for the handshake, counted, and closed when no call uses them.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;

use rustls::ServerConfig;
use rustls::pki_types::CertificateDer;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, Join, ReadBuf, Take, join};
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Semaphore, mpsc};
use tokio::time::{Instant, Sleep, sleep, timeout};
use tokio_rustls::TlsAcceptor;
use tokio_rustls::server::TlsStream;
use tokio_stream::wrappers::ReceiverStream;
use tokio_util::sync::WaitForCancellationFutureOwned;
use tonic::Status;
use tonic::transport::server::Connected;

use crate::identity::Identity;
use crate::slots::{Bounds, Slot, Slots, Stage};

/// Connections that lost their slot during the handshake and are not closed yet: with more of them, none is accepted.
const CLOSING: usize = 256;
/// The most bytes that a client may send before its handshake is done: the library keeps a message that has not come whole, of up to
/// 64 KiB, and thousands of strangers may be in the handshake. A hello has two thousand, a chain of certificates a few more.
const HANDSHAKE: u64 = 16 << 10;
/// A connection that takes a bounded number of bytes in until its handshake is done.
type Tcp = Join<Take<OwnedReadHalf>, OwnedWriteHalf>;
/// What a call costs before anything of its body has come, in bytes: its state here and in HTTP/2.
const CALL: usize = 16 << 10;

/// What connections may take.
#[derive(Clone, Debug)]
pub struct Limits {
    /// Connections at once: the handshake is not done yet; it is, and no client is known; the client is known.
    pub stages: [usize; 3],
    /// Connections of one known client at once.
    pub each: usize,
    /// Bytes of all calls whose callers are not known, at 16 KiB each and their bodies ([`Calls::hold`]).
    pub unknown: usize,
    /// Time for the handshake, and after it for a first call of a known client.
    pub greeting: Duration,
    /// A connection without a call for this long is closed, at the latest after twice as long.
    pub unused: Duration,
    /// Whether the handshake shows who the client is. The calls on its connections are not counted then: each may be in use.
    pub known_by_certificate: bool,
}

impl Limits {
    /// For a port on which only certificates of the cluster are let in. An unused connection stays: pings end dead ones.
    pub fn of_certificates() -> Self {
        let unused = Duration::from_secs(365 * 24 * 3600);
        Limits { unused, known_by_certificate: true, ..Limits::default() }
    }
}

impl Default for Limits {
    fn default() -> Self {
        Limits {
            stages: [4096, 1024, 1280],
            each: 320,
            unknown: 48 << 20,
            greeting: Duration::from_secs(10),
            unused: Duration::from_secs(300),
            known_by_certificate: false,
        }
    }
}

/// Accepts connections until the stream is dropped. Each is greeted with the `config` of its moment; without one it is closed.
pub fn tls(
    listener: TcpListener,
    config: impl Fn() -> Option<Arc<ServerConfig>> + Send + 'static,
    limits: Limits,
) -> ReceiverStream<io::Result<Connection>> {
    let (ready, connections) = mpsc::channel(64);
    let in_handshake = Arc::new(Semaphore::new(limits.stages[Stage::Open as usize] + CLOSING));
    let slots = Slots::new(Bounds { stages: limits.stages, each: limits.each, unknown: limits.unknown });
    tokio::spawn(async move {
        // The semaphore is never closed.
        while let Ok(permit) = in_handshake.clone().acquire_owned().await {
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
            let (slot, ready, limits) = (slots.enter(), ready.clone(), limits.clone());
            let closed = slot.closed();
            tokio::spawn(async move {
                let _permit = permit;
                let greet = async {
                    // Who says nothing costs next to nothing. (`readable` may end before anything has come.)
                    stream.peek(&mut [0]).await?;
                    Box::pin(async {
                        let stream = greet(stream, config).await?;
                        let _ = ready.send(Ok(Connection::new(stream, &limits, slot))).await;
                        io::Result::Ok(())
                    })
                    .await
                };
                let greeted = tokio::select! {
                    greeted = timeout(limits.greeting, greet) => greeted,
                    () = closed => return tracing::debug!("a TLS handshake is given up for newer connections"),
                };
                match greeted {
                    Ok(Ok(())) => {}
                    Ok(Err(error)) => tracing::debug!(%error, "a TLS handshake failed"),
                    Err(_) => tracing::debug!("a TLS handshake took too long"),
                }
            });
        }
    });
    ReceiverStream::new(connections)
}

async fn greet(stream: TcpStream, config: Arc<ServerConfig>) -> io::Result<TlsStream<Tcp>> {
    let (read, write) = stream.into_split();
    let stream = join(read.take(HANDSHAKE), write);
    let mut stream = TlsAcceptor::from(config).accept(stream).await?;
    stream.get_mut().0.reader_mut().set_limit(u64::MAX);
    Ok(stream)
}

/// A connection. It ends when its [`Calls`] close it, when its slot is another's, and when no call has used it for long.
#[derive(Debug)]
pub struct Connection {
    stream: TlsStream<Tcp>,
    calls: Calls,
    closed: Pin<Box<WaitForCancellationFutureOwned>>,
    /// When it is looked whether the connection is still used.
    look: Pin<Box<Sleep>>,
    soon: Duration,
    unused: Duration,
}

/// The calls on a connection. Each request has them among its extensions.
#[derive(Clone, Debug)]
pub struct Calls {
    slot: Arc<Slot>,
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
        self.slot.begin();
        self.begun.fetch_add(1, Ordering::Relaxed);
        OpenCall(self.clone())
    }

    /// Counts what a call costs until its caller is known. Where all of them cost too much, the stranger's connection whose calls cost
    /// most is closed.
    pub fn hold(&self) -> Result<Held, Status> {
        let mut held = Held { slot: self.slot.clone(), bytes: 0 };
        held.add(CALL)?;
        Ok(held)
    }

    /// The certificate that the client has shown.
    pub fn client(&self) -> Option<&CertificateDer<'static>> {
        self.client.as_deref()
    }
}

/// What a call costs whose caller is not known; given back when it is dropped.
#[derive(Debug)]
pub struct Held {
    slot: Arc<Slot>,
    bytes: usize,
}

impl Held {
    /// As many bytes of its body are kept, too.
    pub fn add(&mut self, bytes: usize) -> Result<(), Status> {
        if !self.slot.hold(bytes) {
            return Err(Status::resource_exhausted("too many requests are being received: try again"));
        }
        self.bytes += bytes;
        Ok(())
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        self.slot.give_back(self.bytes);
    }
}

impl OpenCall {
    /// The call has shown who the client of the connection is.
    pub fn known(&self, client: &str) {
        self.0.slot.known(client);
    }

    /// Ends the call, and closes the connection if it has no other.
    pub fn end_and_close(self) {
        let calls = self.0.clone();
        drop(self);
        if calls.slot.is_idle() {
            calls.slot.close();
        }
    }
}

impl Drop for OpenCall {
    fn drop(&mut self) {
        self.0.slot.end();
    }
}

impl Connection {
    fn new(stream: TlsStream<Tcp>, limits: &Limits, slot: Slot) -> Self {
        let shown = stream.get_ref().1.peer_certificates().and_then(|chain| chain.first());
        match (limits.known_by_certificate, shown) {
            (true, Some(shown)) => {
                slot.begin();
                slot.known(&Identity::of(shown).map_or_else(String::new, |identity| identity.to_string()));
            }
            _ => slot.greeted(),
        }
        let calls =
            Calls { client: shown.cloned().map(Arc::new), begun: Arc::default(), slot: Arc::new(slot) };
        Connection {
            stream,
            closed: Box::pin(calls.slot.closed()),
            calls,
            look: Box::pin(sleep(limits.greeting)),
            soon: limits.greeting / 2,
            unused: limits.unused,
        }
    }

    /// The certificates that the client has shown, its own first.
    pub fn client_certificates(&self) -> &[CertificateDer<'static>] {
        self.stream.get_ref().1.peer_certificates().unwrap_or_default()
    }

    /// An error when it is to end. Looked at by reads and by writes: a client that takes nothing keeps its server from reading.
    fn poll_end(&mut self, context: &mut Context<'_>) -> io::Result<()> {
        let ended = |why: &str| Err(io::Error::new(io::ErrorKind::ConnectionAborted, why.to_owned()));
        if self.closed.as_mut().poll(context).is_ready() {
            return ended("it is closed: its only call was ended, or newer connections need its slot");
        }
        while self.look.as_mut().poll(context).is_ready() {
            // One that a call has just used may have the next one on its way.
            let slot = &self.calls.slot;
            let is_used = self.calls.begun.swap(0, Ordering::Relaxed) > 0 || !slot.is_idle();
            let next = match (slot.is_known(), is_used) {
                (true, true) => self.unused,
                // Who calls is being looked at, which is bounded in time; what it hears has to be sent, too.
                (false, true) => self.soon,
                _ => return ended("no call of a known client uses it"),
            };
            self.look.as_mut().reset(Instant::now() + next);
        }
        Ok(())
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
        self.poll_end(context)?;
        Pin::new(&mut self.stream).poll_read(context, buffer)
    }
}

impl AsyncWrite for Connection {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        self.poll_end(context)?;
        Pin::new(&mut self.stream).poll_write(context, bytes)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        self.poll_end(context)?;
        Pin::new(&mut self.stream).poll_write_vectored(context, bytes)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.poll_end(context)?;
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }
}
