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

/// Checks that ten thousand strangers of a kind keep a valid client from nothing. `ask` connects, asks, and tells whether it got
/// its answer; `false` where its connection was closed.
pub async fn keeps_nobody_out(kind: Stranger, door: Door, mut ask: impl AsyncFnMut() -> bool) {
    let held = Arc::<AtomicUsize>::default();
    // They have a thread of their own: a valid client is not to wait for its turn among them here.
    let crowd = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build();
    let crowd = crowd.expect("a runtime");
    for _ in 0..STRANGERS {
        crowd.spawn(kind.hold(door.clone(), held.clone()));
    }
    let (begun, mut took) = (Instant::now(), Vec::new());
    while begun.elapsed() < Duration::from_secs(10) || held.load(Ordering::Relaxed) < STRANGERS {
        let asked = Instant::now();
        // Until it is known a client is a stranger too, and is closed for newer ones where this machine is slow. As clients do,
        // it connects again, and the time keeps running.
        let answered = tokio::time::timeout(Duration::from_secs(60), async { while !ask().await {} });
        answered.await.unwrap_or_else(|_| panic!("a valid client got no answer: {kind:?}"));
        took.push(asked.elapsed());
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    crowd.shutdown_background();
    took.sort();
    let (half, longest) = (took[took.len() / 2], took[took.len() - 1]);
    // On a quiet machine the longest is 0.6 seconds. Other tests run at the same time, and the strangers' own handshakes take most of
    // this machine while all of them come at once: a few calls wait for that.
    assert!(half < Duration::from_secs(1) && longest < Duration::from_secs(10), "{kind:?}: {took:?}");
}
