//! Promise: strangers who hold connections, and readers of the output who stop, keep no caller out, and the memory of both is bounded.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use rustls::ClientConfig;
use rustls::pki_types::ServerName;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tonic::Code;

use crate::hostile::hello;
use crate::world::{World, code};

const STRANGERS: usize = 10_000;

/// How far a stranger goes before it is silent.
#[derive(Clone, Copy, Debug)]
enum Stranger {
    Connection,
    HalfHello,
    Handshake,
    Preface,
}

impl Stranger {
    /// Connects, is silent until it is closed, and begins again; for ever.
    async fn hold(
        self,
        port: u16,
        config: Arc<ClientConfig>,
        name: ServerName<'static>,
        held: Arc<AtomicUsize>,
    ) {
        loop {
            // What fails, fails because the gateway has closed it.
            let _ = self.hold_once(port, config.clone(), name.clone(), &held).await;
            tokio::time::sleep(Duration::from_secs(1)).await;
        }
    }

    async fn hold_once(
        self,
        port: u16,
        config: Arc<ClientConfig>,
        name: ServerName<'static>,
        held: &AtomicUsize,
    ) -> std::io::Result<()> {
        let mut stream = TcpStream::connect(("127.0.0.1", port)).await?;
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

pub async fn ten_thousand_strangers_keep_nobody_out(world: World) {
    let (_driver, ns, token) = world.with_snapshot("monday", "plain-1").await;
    let mut gateway = world.gateway_with(&[], None, "info").await;
    gateway.ready().await;
    let (config, name) = hello(&gateway);
    let kinds = [Stranger::Connection, Stranger::HalfHello, Stranger::Handshake, Stranger::Preface];
    for kind in kinds {
        let held = Arc::<AtomicUsize>::default();
        // They have a thread of their own: a valid client is not to wait for its turn among them here.
        let crowd = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build();
        let crowd = crowd.expect("a runtime");
        for _ in 0..STRANGERS {
            crowd.spawn(kind.hold(gateway.port, config.clone(), name.clone(), held.clone()));
        }
        let (begun, mut took) = (Instant::now(), Vec::new());
        while begun.elapsed() < Duration::from_secs(15) || held.load(Ordering::Relaxed) < STRANGERS {
            let asked = Instant::now();
            let answer = tokio::time::timeout(Duration::from_secs(60), async {
                loop {
                    let answer = gateway.client().await.allocated(&token, &ns, "monday").await;
                    // Until its token is known a client is a stranger too, and is closed for newer ones where this machine
                    // is slow. As clients do, it connects again, and the time goes on.
                    if !answer.as_ref().is_err_and(|(_, message)| message == "transport error") {
                        break answer;
                    }
                }
            });
            let answer = answer.await.unwrap_or_else(|_| panic!("a valid client got no answer: {kind:?}"));
            assert_eq!(code(&answer), Code::Ok, "{kind:?}: {answer:?}");
            took.push(asked.elapsed());
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
        crowd.shutdown_background();
        took.sort();
        let (half, longest) = (took[took.len() / 2], took[took.len() - 1]);
        // The longest is while all of them say hello at once, on this machine too.
        assert!(half < Duration::from_secs(1) && longest < Duration::from_secs(20), "{kind:?}: {took:?}");
    }
    // The limit of the pod is 256 MiB.
    assert!(gateway.peak() < 192 << 20, "{} bytes", gateway.peak());
    assert!(gateway.running.is_alive());
}

/// Found from outside: 256 calls with bad tokens filled a pipe that nobody read, and then neither a call nor a probe was answered.
pub async fn an_audit_whose_reader_stops_stops_nothing(world: World) {
    let (_driver, ns, token) = world.with_snapshot("monday", "plain-1").await;
    let (reader, writer) = std::io::pipe().expect("a pipe");
    let mut gateway = world.gateway_with(&[], Some(writer.into()), "info").await;
    gateway.ready().await;
    let mut client = gateway.client().await;
    let calls = async {
        // Each is a line of 5 KB: as much as is written of names that JSON makes six times as long.
        let name = "\x01".repeat(1000);
        for _ in 0..400 {
            let answer = client.delta("a bad token", &name, &name, &name).await;
            assert_eq!(code(&answer), Code::InvalidArgument);
        }
        client.allocated(&token, &ns, "monday").await
    };
    let answer = tokio::time::timeout(Duration::from_secs(60), calls).await.expect("every call is answered");
    assert_eq!(code(&answer), Code::Ok);
    assert_eq!(gateway.get("/healthz").await.expect("an answer").0, 200);
    let dropped = gateway.metric(r#"deltapath_gateway_log_lines_dropped_total{output="stdout"}"#).await;
    assert!(dropped > 100.0, "{dropped} lines are counted as lost");
    let begun = Instant::now();
    assert!(gateway.running.stop().success());
    assert!(begun.elapsed() < Duration::from_secs(10), "its end waits for the reader");
    drop(reader);
}
