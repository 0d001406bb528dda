//! Promise: what the driver sends arrives as it is, and no client or driver holds anything up but itself.

use std::time::{Duration, Instant};

use nix::sys::signal::Signal;
use proto::kubernetes::{GetMetadataAllocatedRequest, GetMetadataAllocatedResponse};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tonic::{Code, Request, Streaming};
use tonic_health::pb::HealthCheckRequest;
use tonic_health::pb::health_check_response::ServingStatus;
use tonic_health::pb::health_client::HealthClient;

use crate::broken_driver::{fields, frame, head};
use crate::driver::{Driver, MESSAGES, TUPLES};
use crate::hostile::{ALLOCATED, tls};
use crate::world::{Client, HOST, World, about, code, eventually, said};

async fn open(
    client: &mut Client,
    token: &str,
    namespace: &str,
    name: &str,
) -> Result<Streaming<GetMetadataAllocatedResponse>, (Code, String)> {
    let answer = client.0.get_metadata_allocated(about(token, namespace, name)).await;
    answer.map(tonic::Response::into_inner).map_err(said)
}

async fn begun(
    client: &mut Client,
    token: &str,
    namespace: &str,
    name: &str,
) -> Streaming<GetMetadataAllocatedResponse> {
    let mut stream = open(client, token, namespace, name).await.expect("a stream");
    assert!(stream.message().await.expect("a message").is_some());
    stream
}

async fn refused(client: &mut Client, token: &str, namespace: &str) -> (Code, String) {
    open(client, token, namespace, "snapshot").await.map(drop).expect_err("too many")
}

pub async fn messages_pass_through_as_the_driver_sends_them(world: World) {
    let (driver, ns, token) = world.with_snapshot("snapshot", "plain-1").await;
    let (gateway, mut client) = world.served(&[]).await;
    let request =
        GetMetadataAllocatedRequest { starting_offset: 77, max_results: 5, ..about(&token, &ns, "snapshot") };
    let mut stream = client.0.get_metadata_allocated(request).await.expect("a stream").into_inner();
    let mut numbers = 0;
    while let Some(message) = stream.message().await.expect("a message") {
        assert_eq!(message.block_metadata_type, 2);
        assert_eq!(message.volume_capacity_bytes, 1 << 40);
        for tuple in message.block_metadata {
            assert_eq!((tuple.byte_offset, tuple.size_bytes), (numbers * 8192, 4096));
            numbers += 1;
        }
    }
    assert_eq!(numbers, MESSAGES * TUPLES);
    let asked = driver.seen.allocated.lock().pop().expect("a request");
    assert_eq!((asked.starting_offset, asked.max_results), (77, 5));
    let (messages, tuples) = client.delta(&token, &ns, "deleted", "snapshot").await.expect("a delta");
    assert_eq!((messages as i64, tuples.len() as i64), (MESSAGES, MESSAGES * TUPLES));
    let counted = gateway.metric(r#"deltapath_gateway_stream_tuples_total{method="GetMetadataDelta"}"#).await;
    assert_eq!(counted, (MESSAGES * TUPLES) as f64);
    let rpcs = gateway.metric(r#"deltapath_gateway_rpc_total{method="GetMetadataDelta",code="Ok"}"#).await;
    assert_eq!(rpcs, 1.0, "a delta is counted as a delta");
    // An empty target and a bad offset never reach the driver.
    for (offset, results, expected) in [(-1, 0, Code::OutOfRange), (0, -1, Code::InvalidArgument)] {
        let request = GetMetadataAllocatedRequest {
            starting_offset: offset,
            max_results: results,
            ..about(&token, &ns, "snapshot")
        };
        assert_eq!(client.0.get_metadata_allocated(request).await.expect_err("refused").code(), expected);
    }
    assert!(driver.seen.allocated.lock().is_empty());
}

pub async fn the_drivers_own_codes_and_messages_pass(world: World) {
    let snapshots = [("snapshot", "midway-1"), ("unknown", "unknown-1")];
    let (_driver, ns, token) = world.with_snapshots(&snapshots).await;
    let (gateway, mut client) = world.served(&[]).await;
    let mut stream = open(&mut client, &token, &ns, "snapshot").await.expect("a stream");
    for _ in 0..MESSAGES {
        assert!(stream.message().await.expect("a message").is_some());
    }
    let status = stream.message().await.expect_err("the driver's error");
    assert_eq!((status.code(), status.message()), (Code::DataLoss, "block 7 is gone: ünreadable"));
    assert_eq!(status.details(), b"detail");
    let answer = client.allocated(&token, &ns, "unknown").await;
    assert_eq!(answer, Err((Code::NotFound, "snapshot unknown-1 does not exist".into())));
    let line = gateway.audit().into_iter().find(|line| line["code"] == "DataLoss").expect("an audit line");
    assert_eq!(line["tuples"], MESSAGES * TUPLES);
}

pub async fn a_client_that_stops_reading_is_ended_and_disturbs_nobody(world: World) {
    let snapshots = [("snapshot", "endless-1"), ("quick", "plain-1"), ("slow", "slow-1")];
    let (driver, ns, token) = world.with_snapshots(&snapshots).await;
    let gateway = world.gateway(&["--idle-timeout=3s"]).await;
    const STALLED: usize = 50;
    let mut stalled = Vec::new();
    for _ in 0..STALLED {
        let mut client = gateway.client().await;
        let stream = begun(&mut client, &token, &ns, "snapshot").await;
        stalled.push((client, stream));
    }
    // One whose driver has nothing to say waits longer than that, and is not the client's fault.
    let mut waiting = gateway.client().await;
    let mut patient = begun(&mut waiting, &token, &ns, "slow").await;
    let patient = tokio::spawn(async move { patient.message().await.map(|_| ()) });
    let before = gateway.memory();
    // One that reads on is never ended, however long it takes.
    let reading = {
        let (mut client, token, ns) = (gateway.client().await, token.clone(), ns.clone());
        tokio::spawn(async move {
            let mut stream = open(&mut client, &token, &ns, "snapshot").await.expect("a stream");
            let until = Instant::now() + Duration::from_secs(8);
            let mut messages = 0u64;
            while Instant::now() < until {
                assert!(stream.message().await.expect("a message of a stream that is read").is_some());
                messages += 1;
            }
            messages
        })
    };
    let mut client = gateway.client().await;
    for _ in 0..20 {
        assert_eq!(code(&client.allocated(&token, &ns, "quick").await), Code::Ok);
    }
    eventually("stalled streams are ended", async || {
        *driver.seen.open.lock() <= 2 && gateway.metric("deltapath_gateway_open_streams").await <= 2.0
    })
    .await;
    let grown = gateway.memory().saturating_sub(before);
    assert!(grown < 32 << 20, "{STALLED} streams that nobody reads took {grown} bytes");
    // A thread of its own writes them, later.
    eventually("each has its line in the audit log", async || {
        gateway.audit().iter().filter(|line| line["code"] == "Aborted").count() == STALLED
    })
    .await;
    // What had been sent is there; then comes the end, not an OK.
    for (_client, mut stream) in stalled {
        let status = loop {
            match stream.message().await {
                Ok(Some(_)) => {}
                Ok(None) => panic!("a stream that was cut ended with OK"),
                Err(status) => break status,
            }
        };
        assert!(status.code() != Code::Ok, "{status:?}");
    }
    assert!(reading.await.expect("the reader") > 100);
    assert!(!patient.is_finished(), "a stream was ended whose client waits for the driver");
    patient.abort();
}

/// In the transport each of their streams took 400 KiB.
pub async fn clients_that_stop_reading_their_sockets_take_a_bounded_memory(world: World) {
    const CALLS: u32 = 100;
    let (_driver, ns, token) = world.with_snapshot("snapshot", "endless-1").await;
    let gateway = world.gateway(&[]).await;
    let mut client = gateway.client().await;
    drop(begun(&mut client, &token, &ns, "snapshot").await);
    let before = gateway.memory();
    let request = serve::relay::frame(&about(&token, &ns, "snapshot"));
    let call = |number: u32| {
        let block = fields(&[(":path", ALLOCATED), ("content-type", "application/grpc")]);
        let mut frames = [head(&[b"\x83\x87", &block[..]].concat()), frame(0, 1, &request)];
        frames.iter_mut().for_each(|frame| frame[5..9].copy_from_slice(&(2 * number + 1).to_be_bytes()));
        frames.concat()
    };
    let (mut stalled, mut open) = (Vec::new(), 0.0);
    for _ in 0..2 {
        let (mut from, mut to) = tokio::io::split(tls(&gateway).await);
        // Its window for requests is no larger than those of a batch.
        let begin = async {
            to.write_all(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n").await.expect("write");
            // SETTINGS_INITIAL_WINDOW_SIZE of 16 MiB, and as much as there is for the connection.
            to.write_all(&frame(4, 0, &[0, 4, 1, 0, 0, 0])).await.expect("write");
            to.write_all(&frame(8, 0, &[0x7f, 0xff, 0, 0])).await.expect("write");
            for number in 0..CALLS {
                to.write_all(&call(number)).await.expect("write");
                open += 1.0;
                if number % 20 == 19 {
                    to.flush().await.expect("write");
                    let all = async || gateway.metric("deltapath_gateway_open_streams").await == open;
                    eventually("they are open", all).await;
                }
            }
        };
        let mut some = vec![0; 64 << 10];
        let read = async { while from.read(&mut some).await.expect("read") > 0 {} };
        tokio::select! {
            () = begin => {}
            () = read => panic!("it is closed"),
        }
        stalled.push((from, to));
    }
    tokio::time::sleep(Duration::from_secs(2)).await;
    let grown = gateway.memory().saturating_sub(before);
    // 32 of them have wide windows, of 512 KiB.
    assert!(grown < 64 << 20, "{} streams took {grown} bytes", 2 * CALLS);
}

pub async fn cancel_and_deadline_reach_the_driver(world: World) {
    let (driver, ns, token) = world.with_snapshot("snapshot", "slow-1").await;
    world.snapshot(&ns, "endless", "endless-1").await;
    let (gateway, mut client) = world.served(&[]).await;
    let open_now = || *driver.seen.open.lock();
    for name in ["snapshot", "endless"] {
        // The client goes, before or after the first message.
        let stream = begun(&mut client, &token, &ns, name).await;
        drop(stream);
        let gone = Instant::now();
        eventually("the driver's stream is cancelled", async || open_now() == 0).await;
        assert!(gone.elapsed() < Duration::from_secs(5), "{:?}", gone.elapsed());
    }
    // A deadline that passes in the middle, and one that passes before the first message.
    for (mut millis, first) in [(1800, true), (300, false)] {
        let given = loop {
            driver.seen.timeouts.lock().clear();
            let mut request = Request::new(about(&token, &ns, "snapshot"));
            request.set_timeout(Duration::from_millis(millis));
            let outcome = async {
                let mut stream = client.0.get_metadata_allocated(request).await?.into_inner();
                let mut messages = 0;
                while stream.message().await.inspect(|_| messages += 1)?.is_some() {}
                Ok::<_, tonic::Status>(messages)
            };
            let status = outcome.await.expect_err("the deadline passes");
            assert!(matches!(status.code(), Code::DeadlineExceeded | Code::Cancelled), "{status:?} {first}");
            eventually("the driver's stream is ended", async || open_now() == 0).await;
            // On a busy machine it may pass before the driver is asked.
            match driver.seen.timeouts.lock().pop() {
                Some(given) => break given,
                None => millis *= 2,
            }
            assert!(millis < 60_000, "the driver is never asked");
        };
        let left: u64 = given.trim_end_matches('m').parse().unwrap_or_else(|_| panic!("{given:?}"));
        assert!(left > 0 && left <= millis, "the driver was given {given} of {millis} ms");
    }
    // The gateway keeps the deadline itself too: gRPC clients that do not are not trusted.
    eventually("both are on record", async || {
        gateway.audit().iter().filter(|line| line["code"] == "DeadlineExceeded").count() >= 1
    })
    .await;
}

pub async fn streams_are_bounded_for_all_and_for_each(world: World) {
    let (driver, ns, token) = world.with_snapshot("snapshot", "endless-1").await;
    let others = [world.reader("second").await, world.reader("third").await];
    let (_gateway, mut client) = world.served(&["--max-streams=5", "--max-streams-per-client=2"]).await;
    let mut streams = Vec::new();
    for token in [&token, &token, &others[0], &others[0], &others[1]] {
        streams.push(open(&mut client, token, &ns, "snapshot").await.expect("a stream"));
    }
    let (code, message) = refused(&mut client, &token, &ns).await;
    assert_eq!(code, Code::ResourceExhausted, "{message}");
    let (code, message) = refused(&mut client, &others[1], &ns).await;
    assert!(code == Code::ResourceExhausted && message.contains("--max-streams)"), "{code:?} {message}");
    // A client that has used up its own streams gets that error, however many the others have left.
    streams.drain(2..).for_each(drop);
    eventually("their places are free", async || *driver.seen.open.lock() == 2).await;
    let (code, message) = refused(&mut client, &token, &ns).await;
    assert!(
        code == Code::ResourceExhausted && message.contains("--max-streams-per-client"),
        "{code:?} {message}"
    );
    streams.clear();
    eventually("all places are free", async || *driver.seen.open.lock() == 0).await;
    assert!(open(&mut client, &token, &ns, "snapshot").await.is_ok());
}

pub async fn a_stream_outlives_the_deletion_of_its_snapshot(world: World) {
    let (_driver, ns, token) = world.with_snapshot("snapshot", "endless-1").await;
    let (gateway, mut client) = world.served(&[]).await;
    let mut stream = open(&mut client, &token, &ns, "snapshot").await.expect("a stream");
    world.delete_snapshot(&ns, "snapshot").await;
    let mut other = gateway.client().await;
    eventually("a new stream is refused", async || {
        let refused = open(&mut other.clone(), &token, &ns, "snapshot").await.map(drop);
        matches!(refused, Err((Code::NotFound, _)))
    })
    .await;
    assert_eq!(code(&other.allocated(&token, &ns, "snapshot").await), Code::NotFound);
    // More than client, gateway and driver's socket hold of it.
    for number in 0..10_000 {
        let message = stream.message().await.expect("a message").expect("one more");
        assert_eq!(message.block_metadata[0].byte_offset, number * TUPLES * 8192);
    }
}

pub async fn a_driver_may_go_and_come_back(world: World) {
    let (driver, ns, token) = world.with_snapshot("snapshot", "slow-1").await;
    world.snapshot(&ns, "quick", "plain-1").await;
    let (mut gateway, mut client) = world.served(&[]).await;
    for round in 0..3 {
        assert_eq!(code(&client.allocated(&token, &ns, "quick").await), Code::Ok, "{round}");
    }
    // What probes of Kubernetes and load balancers ask over gRPC.
    let channel = Client::channel(gateway.port, HOST, gateway.ca()).await.expect("connect");
    let probe = HealthClient::new(channel);
    let health = async || {
        let request = HealthCheckRequest { service: "snapshotmetadata.SnapshotMetadata".into() };
        probe.clone().check(request).await.expect("an answer").into_inner().status()
    };
    eventually("health follows", async || health().await == ServingStatus::Serving).await;
    let mut stream = begun(&mut client, &token, &ns, "snapshot").await;
    drop(driver);
    let status = stream.message().await.expect_err("the driver is gone, and that is no OK");
    assert_eq!(status.code(), Code::Unavailable, "{status:?}");
    let answer = client.allocated(&token, &ns, "quick").await;
    assert_eq!(code(&answer), Code::Unavailable, "{answer:?}");
    gateway.until("/readyz", "unready", |(status, why)| *status == 503 && why.contains("CSI driver")).await;
    eventually("health follows", async || health().await == ServingStatus::NotServing).await;
    let _driver = Driver::start(&world.driver, &world.socket());
    gateway.ready().await;
    eventually("health follows", async || health().await == ServingStatus::Serving).await;
    assert_eq!(code(&client.allocated(&token, &ns, "quick").await), Code::Ok);
    assert!(gateway.running.is_alive());
}

/// A client's machine that is gone says nothing: no packet comes any more. Between the two stands a relay that stops.
pub async fn a_client_that_is_gone_without_a_word_is_noticed(world: World) {
    let (driver, ns, token) = world.with_snapshot("snapshot", "slow-1").await;
    let gateway = world.gateway(&[]).await;
    let relay = TcpListener::bind("127.0.0.1:0").await.expect("bind");
    let port = relay.local_addr().expect("address").port();
    let (stop, mut stopped) = tokio::sync::oneshot::channel::<()>();
    let to = gateway.port;
    let relay = tokio::spawn(async move {
        let mut client = relay.accept().await.expect("accept").0;
        let mut server = TcpStream::connect(("127.0.0.1", to)).await.expect("connect");
        tokio::select! {
            _ = tokio::io::copy_bidirectional(&mut client, &mut server) => panic!("it was to stay open"),
            _ = &mut stopped => {}
        }
        // Open still, and read by nobody.
        (client, server)
    });
    let mut client = Client::connect(port, HOST, gateway.ca()).await.expect("connect");
    let stream = begun(&mut client, &token, &ns, "snapshot").await;
    assert_eq!(*driver.seen.open.lock(), 1);
    stop.send(()).expect("the relay works");
    let held = relay.await.expect("the relay");
    let deadline = Instant::now() + Duration::from_secs(180);
    while *driver.seen.open.lock() > 0 {
        assert!(Instant::now() < deadline, "the driver still works for a client that is gone");
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
    drop((held, stream));
}

pub async fn a_driver_without_the_service_is_reported(world: World) {
    let _driver = Driver::start_with(&world.driver, &world.socket(), false);
    world.snapshot(&world.namespace, "snapshot", "plain-1").await;
    let token = world.reader("reader").await;
    let (mut gateway, mut client) = world.served(&[]).await;
    let answer = client.allocated(&token, &world.namespace, "snapshot").await;
    assert_eq!(code(&answer), Code::Unimplemented, "{answer:?}");
    assert!(gateway.running.is_alive());
}

pub async fn a_stop_lets_streams_end(world: World) {
    let (driver, ns, token) = world.with_snapshot("snapshot", "endless-1").await;
    let (mut gateway, mut client) = world.served(&["--drain=30s"]).await;
    let mut stream = begun(&mut client, &token, &ns, "snapshot").await;
    gateway.running.signal(Signal::SIGTERM);
    gateway.until("/readyz", "unready", |(status, _)| *status == 503).await;
    for _ in 0..100 {
        assert!(stream.message().await.expect("a stream goes on while the gateway stops").is_some());
    }
    assert!(gateway.running.is_alive());
    drop(stream);
    drop(client);
    assert_eq!(gateway.running.ended().await, Some(0));
    // The driver learns of it a moment later.
    eventually("the driver's stream ends", async || *driver.seen.open.lock() == 0).await;
    // And where a client does not end its stream, the time is over at some point.
    let config = world.gateway_kubeconfig("second-gateway").await;
    let mut gateway = world.gateway_by(&config, "second", &["--drain=1s"]);
    gateway.ready().await;
    let mut client = gateway.client().await;
    let _stream = open(&mut client, &token, &ns, "snapshot").await.expect("a stream");
    gateway.running.signal(Signal::SIGTERM);
    assert_eq!(gateway.running.ended().await, Some(0));
}
