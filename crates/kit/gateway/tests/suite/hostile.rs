//! Promise: no request and no client costs more than a bounded amount, and the process lives.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use bytes::{BufMut, Bytes, BytesMut};
use futures_util::StreamExt;
use http_body_util::Full;
use proto::kubernetes::GetMetadataAllocatedRequest;
use rustls::ClientConfig;
use rustls::pki_types::ServerName;
use serde_json::json;
use testkit::scene;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::TcpStream;
use tonic::codegen::http::HeaderMap;
use tonic::transport::Channel;
use tonic::{Code, Status};
use tower::{Service, ServiceExt};

use crate::driver::Driver;
use crate::world::{Client, Gateway, HOST, World, code, eventually};

/// What a client of HTTP/2 that trusts the gateway says in a handshake.
pub fn hello(gateway: &Gateway) -> (Arc<ClientConfig>, ServerName<'static>) {
    let mut config = scene::trusting(gateway.ca()).with_no_client_auth();
    config.alpn_protocols = vec![b"h2".to_vec()];
    (Arc::new(config), ServerName::try_from(HOST).expect("a name"))
}

/// A TLS connection that the test speaks on byte by byte.
pub async fn tls(gateway: &Gateway) -> tokio_rustls::client::TlsStream<TcpStream> {
    let (config, name) = hello(gateway);
    let stream = TcpStream::connect(("127.0.0.1", gateway.port)).await.expect("connect");
    tokio_rustls::TlsConnector::from(config).connect(name, stream).await.expect("a handshake")
}

/// Ten times what the gateway gives a client to say something: who waits longer hangs, and is not slow.
const HANGS: Duration = Duration::from_secs(100);

/// Sends bytes on a fresh TCP connection and waits for its end; how long it took.
async fn until_closed(gateway: &Gateway, bytes: &[u8]) -> Duration {
    let mut stream = TcpStream::connect(("127.0.0.1", gateway.port)).await.expect("connect");
    let begun = Instant::now();
    let _ = stream.write_all(bytes).await;
    let mut rest = Vec::new();
    let _ = tokio::time::timeout(HANGS, stream.read_to_end(&mut rest)).await.expect("it is closed");
    begun.elapsed()
}

pub async fn plaintext_old_tls_and_garbage_are_refused(world: World) {
    let (driver, ns, token) = world.with_snapshot("monday", "plain-1").await;
    let mut gateway = world.gateway(&[]).await;
    // HTTP/2 without TLS.
    let plain = format!("http://127.0.0.1:{}", gateway.port);
    let channel = Channel::from_shared(plain).expect("an address").connect().await;
    if let Ok(channel) = channel {
        let mut client = proto::kubernetes::snapshot_metadata_client::SnapshotMetadataClient::new(channel);
        let answer = client.get_metadata_allocated(GetMetadataAllocatedRequest::default()).await;
        // Which code that is, is the client's own business: it sees a connection that ends.
        assert!(answer.is_err(), "a call without TLS was answered");
    }
    until_closed(&gateway, b"GET / HTTP/1.1\r\n\r\n").await;
    // A ClientHello of TLS 1.1 that offers nothing later.
    let mut hello = vec![0x16, 0x03, 0x01, 0x00, 0x2f, 0x01, 0x00, 0x00, 0x2b, 0x03, 0x02];
    hello.extend([7; 32]);
    hello.extend([0x00, 0x00, 0x04, 0xc0, 0x13, 0x00, 0x2f, 0x01, 0x00]);
    let took = until_closed(&gateway, &hello).await;
    assert!(took < Duration::from_secs(5), "an old version waits for {took:?}");
    // The first two records of a ClientHello of nearly 64 KiB: so much is not kept for a stranger.
    let record = [&[0x16, 0x03, 0x01, 0x40, 0x00][..], &[7; 0x4000]].concat();
    let mut hello = record.repeat(2);
    hello[5..11].copy_from_slice(&[0x01, 0x00, 0xff, 0xf0, 0x03, 0x03]);
    let took = until_closed(&gateway, &hello).await;
    assert!(took < Duration::from_secs(5), "a long hello waits for {took:?}");
    // Bytes without sense, in TLS and before it.
    let mut random = vec![0; 64 << 10];
    fastrand::Rng::with_seed(7).fill(&mut random);
    for round in 0..50 {
        until_closed(&gateway, &random[round * 100..round * 100 + 1000]).await;
        let mut stream = tls(&gateway).await;
        let _ = stream.write_all(&random[round * 1000..round * 1000 + 1000]).await;
        let mut rest = Vec::new();
        let closed = tokio::time::timeout(HANGS, stream.read_to_end(&mut rest)).await;
        assert!(closed.is_ok(), "garbage after the handshake keeps the connection");
    }
    // Whoever connects and says nothing is sent away, before the handshake and after it.
    tokio::join!(until_closed(&gateway, b""), async {
        let mut stream = tls(&gateway).await;
        let mut rest = Vec::new();
        let _ = tokio::time::timeout(HANGS, stream.read_to_end(&mut rest)).await.expect("closed");
    });
    assert!(driver.seen.allocated.lock().is_empty(), "something reached the driver");
    assert!(gateway.running.is_alive());
    assert_eq!(code(&gateway.client().await.allocated(&token, &ns, "monday").await), Code::Ok);
}

pub async fn connect(gateway: &Gateway) -> Channel {
    Client::channel(gateway.port, HOST, gateway.ca()).await.expect("connect")
}

/// A gRPC call whose body is what the test says.
async fn call(gateway: &Gateway, path: &str, body: tonic::body::Body) -> Status {
    call_by(connect(gateway).await, path, body).await
}

async fn call_by(channel: Channel, path: &str, body: tonic::body::Body) -> Status {
    call_with(channel, path, HeaderMap::new(), body).await
}

/// The same with more headers, which replace those of their names.
pub async fn call_with(mut channel: Channel, path: &str, more: HeaderMap, body: tonic::body::Body) -> Status {
    let mut request = tonic::codegen::http::Request::post(format!("https://{HOST}{path}"))
        .header("te", "trailers")
        .header("content-type", "application/grpc")
        .body(body)
        .expect("a request");
    request.headers_mut().extend(more);
    let response = channel.ready().await.expect("ready").call(request).await;
    match response {
        Err(error) => Status::unavailable(error.to_string()),
        Ok(response) => Status::from_header_map(response.headers()).unwrap_or_else(|| Status::ok("a body")),
    }
}

pub const ALLOCATED: &str = "/snapshotmetadata.SnapshotMetadata/GetMetadataAllocated";

pub async fn requests_that_are_too_large_or_too_slow_end(world: World) {
    let (driver, ns, token) = world.with_snapshot("monday", "plain-1").await;
    let mut gateway = world.gateway(&[]).await;
    let before = gateway.peak();
    // A token of 100 MB, by four clients at once.
    let size = 100 << 20;
    let mut body = BytesMut::with_capacity(size + 16);
    body.put_u8(0);
    body.put_u32(size as u32 + 5);
    body.put_slice(&[0x0a, 0x80, 0x80, 0x80, 0x32]);
    body.put_bytes(b'x', size);
    let body = body.freeze();
    let huge = || call(&gateway, ALLOCATED, tonic::body::Body::new(Full::new(body.clone())));
    for status in futures_util::future::join_all((0..4).map(|_| huge())).await {
        assert!(matches!(status.code(), Code::InvalidArgument | Code::Unavailable), "{status:?}");
    }
    let none = || tonic::body::Body::new(Full::new(Bytes::new()));
    for path in ["/snapshotmetadata.SnapshotMetadata/Nothing", "/csi.v1.Controller/CreateVolume", "/"] {
        let status = call(&gateway, path, none()).await;
        assert_eq!(status.code(), Code::Unimplemented, "{path}");
    }
    // A request of which the head arrives and nothing more.
    let status = tokio::time::timeout(HANGS, call(&gateway, ALLOCATED, never())).await.expect("it ends");
    assert_eq!(status.code(), Code::DeadlineExceeded, "{status:?}");
    // Nine times as long where it is quoted and percent-encoded.
    let refused = gateway.client().await.allocated("t", &"\x01".repeat(32_700), "m").await;
    let (answered, said) = refused.expect_err("that is no name");
    assert!(answered == Code::InvalidArgument && said.len() < 1000, "{answered:?} in {} bytes", said.len());
    let audit = gateway.audit();
    let written = audit.iter().filter_map(|line| line.get("message")?.as_str()).map(str::len).max();
    assert!(written.is_some_and(|longest| longest < 1000), "{written:?} bytes in a line");
    let grown = gateway.peak().saturating_sub(before);
    assert!(grown < 32 << 20, "it took {grown} bytes");
    assert!(driver.seen.allocated.lock().is_empty(), "something reached the driver");
    assert!(gateway.running.is_alive());
    assert_eq!(code(&gateway.client().await.allocated(&token, &ns, "monday").await), Code::Ok);
}

/// Promise: anyone may send a request, and all that are sent before their callers are known take a bounded memory together.
pub async fn requests_of_unknown_callers_take_a_bounded_memory(world: World) {
    const CONNECTIONS: usize = 40;
    /// As many as a connection carries at once.
    const CALLS: usize = 100;
    const SENT: usize = 31 << 10;
    let (_driver, ns, token) = world.with_snapshot("monday", "plain-1").await;
    let mut gateway = world.gateway(&[]).await;
    let before = gateway.peak();
    let mut channels = Vec::new();
    for _ in 0..CONNECTIONS {
        channels.push(connect(&gateway).await);
    }
    // Nearly all of a request that never ends.
    let mut bytes = vec![0x0a; SENT];
    bytes[..5].copy_from_slice(&[0, 0, 0, 0x7d, 0]);
    let bytes = Bytes::from(bytes);
    let calls =
        channels.iter().flat_map(|channel| std::iter::repeat_n(channel.clone(), CALLS)).map(|channel| {
            let first = Ok::<_, Status>(http_body::Frame::data(bytes.clone()));
            let body =
                futures_util::stream::once(std::future::ready(first)).chain(futures_util::stream::pending());
            let body = tonic::body::Body::new(http_body_util::StreamBody::new(Box::pin(body)));
            tokio::time::timeout(HANGS, call_by(channel, ALLOCATED, body))
        });
    let mut refused = 0;
    for status in futures_util::future::join_all(calls).await {
        let status = status.expect("it ends");
        match status.code() {
            // The HTTP/2 library itself ends connections that do such things often.
            Code::ResourceExhausted | Code::Unavailable => refused += 1,
            code => assert_eq!(code, Code::DeadlineExceeded, "{status:?}"),
        }
    }
    let sent = CONNECTIONS * CALLS * SENT;
    // Each of the others is kept until it is too late.
    let kept = CONNECTIONS * CALLS - refused;
    assert!(kept * SENT <= 32 << 20, "{kept} requests were kept, of {sent} bytes in all");
    let grown = gateway.peak().saturating_sub(before);
    // Beside the bytes each call is a task with its state, of some 25 KiB in a debug build.
    assert!(grown < 200 << 20, "{sent} bytes took {grown}");
    assert!(gateway.running.is_alive());
    assert_eq!(code(&gateway.client().await.allocated(&token, &ns, "monday").await), Code::Ok);
}

fn never() -> tonic::body::Body {
    let nothing = futures_util::stream::pending::<Result<http_body::Frame<Bytes>, Status>>();
    tonic::body::Body::new(http_body_util::StreamBody::new(nothing))
}

/// Found from outside: 60 connections took half a gigabyte with 256 calls each, of which only the heads came.
pub async fn calls_without_a_body_take_a_bounded_memory_and_keep_nobody_out(world: World) {
    const CONNECTIONS: usize = 150;
    const CALLS: usize = 256;
    const PATHS: [&str; 3] = [ALLOCATED, "/grpc.health.v1.Health/Check", "/grpc.health.v1.Health/Watch"];
    let (_driver, ns, token) = world.with_snapshot("monday", "plain-1").await;
    let gateway = Arc::new(world.gateway(&[]).await);
    assert_eq!(code(&gateway.client().await.allocated(&token, &ns, "monday").await), Code::Ok);
    let before = gateway.peak();
    for path in PATHS {
        let sent = Arc::<AtomicUsize>::default();
        // They have a thread of their own: a valid client is not to wait for its turn among them here.
        let crowd = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build();
        let crowd = crowd.expect("a runtime");
        for _ in 0..CONNECTIONS {
            let (gateway, sent) = (gateway.clone(), sent.clone());
            crowd.spawn(async move {
                loop {
                    let channel = connect(&gateway).await;
                    let calls = (0..CALLS).map(|_| {
                        sent.fetch_add(1, Ordering::Relaxed);
                        call_by(channel.clone(), path, never())
                    });
                    futures_util::future::join_all(calls).await;
                    tokio::time::sleep(Duration::from_secs(1)).await;
                }
            });
        }
        let (begun, mut took) = (Instant::now(), Vec::new());
        while begun.elapsed() < Duration::from_secs(8) || sent.load(Ordering::Relaxed) < CONNECTIONS * CALLS {
            let asked = Instant::now();
            let answer = gateway.client().await.allocated(&token, &ns, "monday").await;
            assert_eq!(code(&answer), Code::Ok, "{path}: {answer:?}");
            took.push(asked.elapsed());
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
        // Whoever of it still held the gateway would leave its process behind.
        tokio::task::spawn_blocking(move || crowd.shutdown_timeout(Duration::from_secs(20)))
            .await
            .expect("no panic");
        // None is kept out. How soon they are served is asked where the machine is not needed by the crowd (`crowds`).
        let grown = gateway.peak() - before;
        assert!(took.iter().all(|took| *took < Duration::from_secs(20)), "{path}: {took:?}");
        assert!(grown < 128 << 20, "{path}: {} calls took {grown} bytes", sent.load(Ordering::Relaxed));
    }
}

/// Sends a byte now and then, until the other side closes the connection.
async fn drip(stream: impl AsyncRead + AsyncWrite, bytes: &[u8]) {
    let (mut from, mut to) = tokio::io::split(stream);
    let send = async {
        for byte in bytes.chunks(1) {
            tokio::time::sleep(BETWEEN).await;
            if to.write_all(byte).await.is_err() || to.flush().await.is_err() {
                return;
            }
        }
        std::future::pending().await
    };
    let mut rest = Vec::new();
    tokio::select! {
        () = send => {}
        _ = from.read_to_end(&mut rest) => {}
    }
}

const BETWEEN: Duration = Duration::from_millis(500);
const CROWD: usize = 100;

#[derive(Clone, Copy, Debug)]
enum Slow {
    Handshake,
    Headers,
    Body,
}

impl Slow {
    /// Ten times what the gateway gives such a client: for handshake and body 10 seconds; for a head half a minute without
    /// anything that can be read, and half a minute without an answer to a ping.
    fn patience(self) -> Duration {
        match self {
            Slow::Handshake | Slow::Body => HANGS,
            Slow::Headers => Duration::from_secs(600),
        }
    }

    /// Is slow until the gateway ends it. `slow_now` counts it when it has begun.
    async fn until_ended(self, gateway: &Gateway, slow_now: Arc<AtomicUsize>) {
        let begin = move || slow_now.fetch_add(1, Ordering::Relaxed);
        match self {
            Slow::Handshake => {
                let (config, name) = hello(gateway);
                let mut hello = Vec::new();
                let mut client = rustls::ClientConnection::new(config, name).expect("a client");
                client.write_tls(&mut hello).expect("a vector takes all");
                let stream = TcpStream::connect(("127.0.0.1", gateway.port)).await.expect("connect");
                begin();
                drip(stream, &hello).await;
            }
            Slow::Headers => {
                let mut stream = tls(gateway).await;
                // The preface, SETTINGS without a setting, and a frame of HEADERS that ends them.
                stream.write_all(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n").await.expect("write");
                stream.write_all(&[0, 0, 0, 4, 0, 0, 0, 0, 0]).await.expect("write");
                stream.write_all(&[0, 0x3f, 0xff, 1, 4, 0, 0, 0, 1]).await.expect("write");
                begin();
                drip(stream, &[0x83; 0x3fff]).await;
            }
            Slow::Body => {
                let begin = Arc::new(begin);
                let bytes = futures_util::stream::unfold(0, move |number: usize| {
                    let begin = begin.clone();
                    async move {
                        tokio::time::sleep(BETWEEN).await;
                        if number == 0 {
                            begin();
                        }
                        // A message of 16 KiB.
                        let byte = [0, 0, 0, 0x40, 0].get(number).copied().unwrap_or(0x0a);
                        let frame = http_body::Frame::data(Bytes::from(vec![byte]));
                        Some((Ok::<_, Status>(frame), number + 1))
                    }
                });
                let body = tonic::body::Body::new(http_body_util::StreamBody::new(Box::pin(bytes)));
                let status = call(gateway, ALLOCATED, body).await;
                assert_eq!(status.code(), Code::DeadlineExceeded, "{status:?}");
            }
        }
    }
}

pub async fn a_crowd_of_slow_clients_keeps_nobody_out_and_is_ended(world: World) {
    let (driver, ns, token) = world.with_snapshot("monday", "plain-1").await;
    let mut gateway = world.gateway(&[]).await;
    // What a first call needs is there already.
    assert_eq!(code(&gateway.client().await.allocated(&token, &ns, "monday").await), Code::Ok);
    let before = gateway.peak();
    let slow_now = Arc::<AtomicUsize>::default();
    let crowd = [Slow::Handshake, Slow::Headers, Slow::Body].repeat(CROWD);
    let all = crowd.len();
    let crowd = crowd.into_iter().map(|kind| {
        let (gateway, slow_now) = (&gateway, slow_now.clone());
        async move {
            let ended =
                tokio::time::timeout(kind.patience(), kind.until_ended(gateway, slow_now.clone())).await;
            assert!(ended.is_ok(), "a slow client is still there: {kind:?}");
            slow_now.fetch_sub(1, Ordering::Relaxed);
        }
    });
    let mut crowd = Box::pin(futures_util::future::join_all(crowd));
    let mut among_most = 0;
    loop {
        // A client that comes anew, as long as they are there.
        let call = async {
            let slow = slow_now.load(Ordering::Relaxed);
            let answer = gateway.client().await.allocated(&token, &ns, "monday").await;
            assert_eq!(code(&answer), Code::Ok, "{answer:?}");
            tokio::time::sleep(Duration::from_millis(50)).await;
            slow.min(slow_now.load(Ordering::Relaxed))
        };
        tokio::select! {
            _ = &mut crowd => break,
            slow = call => among_most = among_most.max(slow),
        }
    }
    drop(crowd);
    assert!(among_most > all / 2, "no call was served among more than {among_most} of {all} slow clients");
    let grown = gateway.peak().saturating_sub(before);
    assert!(grown < 64 << 20, "{all} slow clients took {grown} bytes");
    assert!(gateway.running.is_alive());
    let asked = driver.seen.allocated.lock();
    assert!(
        asked.iter().all(|request| request.target_snapshot_id == "plain-1"),
        "something else reached the driver"
    );
}

pub async fn no_token_and_no_secret_is_written_anywhere(world: World) {
    let _driver = Driver::start(&world.driver, &world.socket());
    let ns = world.namespace.clone();
    world.class("secret", "deltapath-snapshotter", &ns).await;
    let metadata = json!({"name": "deltapath-snapshotter", "namespace": ns});
    let secret = "the-drivers-own-password";
    let data = json!({"password": secret});
    world
        .api
        .make(json!({"apiVersion": "v1", "kind": "Secret", "metadata": metadata, "stringData": data}))
        .await;
    let of_class = json!({"snapshot": {"spec": {"volumeSnapshotClassName": format!("{ns}-secret")}}});
    world.snapshot_but(&ns, "monday", "plain-1", of_class).await;
    let token = world.reader("reader").await;
    // Everything that can be logged is; other crates at their most talkative too.
    let gateway = world.gateway_with(&[], None, "trace").await;
    gateway.ready().await;
    let rules = json!([{"apiGroups": [""], "resources": ["secrets"], "verbs": ["get"]}]);
    world.api.allow(&ns, &ns, "gateway", rules).await;
    let wrong = world.api.token(&ns, "reader", "another-audience").await;
    let mut client = gateway.client().await;
    let served = async || code(&client.allocated(&token, &ns, "monday").await) == Code::Ok;
    eventually("a call is served", served).await;
    assert_eq!(code(&client.allocated(&wrong, &ns, "monday").await), Code::Unauthenticated);
    assert_eq!(code(&client.delta(&token, &ns, "plain-1", "nothing").await), Code::NotFound);
    let log = gateway.running.log();
    for from in ["h2::", "hyper", "rustls::"] {
        let is_there = log.lines().any(|line| line.contains(" TRACE ") && line.contains(from));
        assert!(is_there, "the log has nothing from {from}");
    }
    // The gateway's own token, too, and the password as the API server sends it.
    let config = std::fs::read(world.api.file(&format!("{ns}.gateway.kubeconfig"))).expect("read");
    let config: serde_json::Value = serde_json::from_slice(&config).expect("JSON");
    let own = config["users"][0]["user"]["token"].as_str().expect("a token").to_owned();
    let encoded = STANDARD.encode(secret);
    let written = [log, format!("{:?}", gateway.audit()), gateway.get("/metrics").await.expect("metrics").1];
    for text in written {
        for hidden in [token.as_str(), &wrong, &own, secret, &encoded] {
            // Also no part of it that would do: the signature.
            let tail = hidden.rsplit('.').next().unwrap_or(hidden);
            let written = text.lines().find(|line| line.contains(tail));
            assert!(written.is_none(), "{hidden} was written: {written:?}");
        }
    }
}

pub async fn calls_are_served_when_nobody_reads_the_audit(world: World) {
    let (_driver, ns, token) = world.with_snapshot("monday", "plain-1").await;
    let (reader, writer) = std::io::pipe().expect("a pipe");
    drop(reader);
    let mut gateway = world.gateway_with(&[], Some(writer.into()), "info").await;
    gateway.ready().await;
    let mut client = gateway.client().await;
    for _ in 0..3 {
        assert_eq!(code(&client.allocated(&token, &ns, "monday").await), Code::Ok);
    }
    assert!(gateway.running.is_alive());
    assert_eq!(
        gateway.metric(r#"deltapath_gateway_rpc_total{method="GetMetadataAllocated",code="Ok"}"#).await,
        3.0
    );
}
