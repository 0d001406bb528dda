//! Strangers who hold connections to a TLS port, while a valid client asks.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use rustls::ClientConfig;
use rustls::pki_types::ServerName;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

const STRANGERS: usize = 10_000;

/// The address of a TLS server, and how a stranger says hello to it.
#[derive(Clone, Debug)]
pub struct Door {
    pub address: SocketAddr,
    pub config: Arc<ClientConfig>,
    pub name: ServerName<'static>,
}

/// How far a stranger gets before it is silent.
#[derive(Clone, Copy, Debug)]
pub enum Stranger {
    Connection,
    HalfHello,
    Handshake,
    Preface,
}

impl Stranger {
    /// Connects, is silent until it is closed, and begins again; for ever.
    async fn hold(self, door: Door, held: Arc<AtomicUsize>) {
        loop {
            // What fails, fails because the server has closed it.
            let _ = self.hold_once(door.clone(), &held).await;
            tokio::time::sleep(Duration::from_secs(1)).await;
        }
    }

    async fn hold_once(self, door: Door, held: &AtomicUsize) -> std::io::Result<()> {
        let Door { address, config, name } = door;
        let mut stream = TcpStream::connect(address).await?;
        held.fetch_add(1, Ordering::Relaxed);
        let mut rest = Vec::new();
        match self {
            Stranger::Connection => {}
            Stranger::HalfHello => {
                let mut hello = Vec::new();
                let mut client = rustls::ClientConnection::new(config, name).expect("a client");
                client.write_tls(&mut hello)?;
                stream.write_all(&hello[..hello.len() / 2]).await?;
            }
            Stranger::Handshake | Stranger::Preface => {
                let mut stream = tokio_rustls::TlsConnector::from(config).connect(name, stream).await?;
                if matches!(self, Stranger::Preface) {
                    stream.write_all(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0").await?;
                }
                return stream.read_to_end(&mut rest).await.map(drop);
            }
        }
        stream.read_to_end(&mut rest).await.map(drop)
    }
}

/// Checks that ten thousand strangers of a kind keep a valid client from nothing: it is always answered within ten seconds, and once
/// they are there, at least once within one: other tests may have the disk and the processor for longer. `ask` connects, asks, and
/// tells whether it got its answer; `false` where its connection was closed.
pub async fn keeps_nobody_out(kind: Stranger, door: Door, mut ask: impl AsyncFnMut() -> bool) {
    let held = Arc::<AtomicUsize>::default();
    // They have a thread of their own: a valid client is not to wait for its turn among them here.
    let crowd = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build();
    let crowd = crowd.expect("a runtime");
    for _ in 0..STRANGERS {
        crowd.spawn(kind.hold(door.clone(), held.clone()));
    }
    let mut while_they_come = Vec::new();
    while held.load(Ordering::Relaxed) < STRANGERS {
        while_they_come.push(answer(kind, &mut ask).await);
    }
    let (begun, mut took) = (Instant::now(), Vec::new());
    while begun.elapsed() < Duration::from_secs(5) {
        took.push(answer(kind, &mut ask).await);
    }
    crowd.shutdown_background();
    took.sort();
    let longest = took.iter().chain(&while_they_come).max().expect("a call");
    assert!(*longest < Duration::from_secs(10), "{kind:?}: {while_they_come:?}, then {took:?}");
    assert!(took[0] < Duration::from_secs(1), "{kind:?}: {took:?}");
}

/// How long a valid client waits for its answer. Until it is known it is a stranger too, and its connection may be closed for a newer
/// one. As clients do, it connects again, and the time keeps running.
async fn answer(kind: Stranger, ask: &mut impl AsyncFnMut() -> bool) -> Duration {
    let asked = Instant::now();
    let answered = tokio::time::timeout(Duration::from_secs(60), async { while !ask().await {} });
    answered.await.unwrap_or_else(|_| panic!("a valid client got no answer: {kind:?}"));
    let took = asked.elapsed();
    tokio::time::sleep(Duration::from_millis(100)).await;
    took
}
