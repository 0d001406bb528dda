//! Promise: a driver takes no more of the gateway's memory than its answers may, and what it gets wrong is an error that says so.

use std::time::Duration;

use testkit::gateway::world::{World, code, eventually};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{UnixListener, UnixStream};
use tokio::task::{JoinHandle, JoinSet};
use tokio::time::timeout;
use tonic::Code;

/// `:status` 200.
const OK: &[u8] = b"\x88";

/// A frame of HTTP/2, of no call yet.
pub fn frame(kind: u8, flags: u8, payload: &[u8]) -> Vec<u8> {
    let length = (payload.len() as u32).to_be_bytes();
    [&length[1..], &[kind, flags, 0, 0, 0, 0], payload].concat()
}

pub fn head(block: &[u8]) -> Vec<u8> {
    frame(1, 4, block)
}

fn last(block: &[u8]) -> Vec<u8> {
    frame(1, 5, block)
}

/// Fields that are not indexed, nor packed.
pub fn fields(fields: &[(&str, &str)]) -> Vec<u8> {
    let text = |text: &str| [&[text.len() as u8], text.as_bytes()].concat();
    fields.iter().flat_map(|(name, value)| [vec![0], text(name), text(value)].concat()).collect()
}

/// Answers each call with these frames, and pings.
async fn answer(mut stream: UnixStream, answer: Vec<Vec<u8>>) -> std::io::Result<()> {
    stream.read_exact(&mut [0; 24]).await?;
    stream.write_all(&frame(4, 0, b"")).await?;
    loop {
        let mut head = [0; 9];
        stream.read_exact(&mut head).await?;
        let mut payload = vec![0; u32::from_be_bytes([0, head[0], head[1], head[2]]) as usize];
        stream.read_exact(&mut payload).await?;
        match (head[3], head[4]) {
            (6, 0) => stream.write_all(&frame(6, 1, &payload)).await?,
            (1, _) => {
                for mut frame in answer.iter().cloned() {
                    frame[5..9].copy_from_slice(&head[5..]);
                    stream.write_all(&frame).await?;
                }
            }
            _ => {}
        }
    }
}

/// A driver that answers so.
fn answers(world: &World, frames: Vec<Vec<u8>>) -> JoinHandle<()> {
    // The driver before has left it.
    let _ = std::fs::remove_file(world.socket());
    let socket = UnixListener::bind(world.socket()).expect("bind");
    tokio::spawn(async move {
        let mut connections = JoinSet::new();
        while let Ok((stream, _)) = socket.accept().await {
            connections.spawn(answer(stream, frames.clone()));
        }
    })
}

/// tonic panics at such details, and with its name and its readiness the gateway asks the driver by tonic.
pub async fn a_driver_whose_status_cannot_be_read_is_asked_again(world: World) {
    let status = [("grpc-status", "9"), ("grpc-message", "asleep"), ("grpc-status-details-bin", "***")];
    let broken = vec![last(&[OK, &fields(&status)].concat())];
    let driver = answers(&world, broken.clone());
    let mut gateway = world.gateway_with(&[], None, "info").await;
    let is_asked = async || gateway.running.log().contains("asleep");
    eventually("it asks for the name", is_asked).await;
    driver.abort();
    let _ = std::fs::remove_file(world.socket());
    let (driver, ns, token) = world.with_snapshot("monday", "plain-1").await;
    gateway.ready().await;
    assert_eq!(code(&gateway.client().await.allocated(&token, &ns, "monday").await), Code::Ok);
    drop(driver);
    let driver = answers(&world, broken);
    // Its tasks end with it where one of them does.
    tokio::time::sleep(Duration::from_secs(3)).await;
    assert!(gateway.running.is_alive());
    assert_eq!(gateway.metric("deltapath_gateway_driver_ready").await, 0.0);
    driver.abort();
}

pub async fn a_driver_that_breaks_the_protocol_harms_only_its_own_answer(world: World) {
    let (_driver, ns, token) = world.with_snapshot("monday", "plain-1").await;
    let mut gateway = world.gateway(&[]).await;
    gateway.ready().await;
    // The gateway goes on asking that driver for its health, on the connection that it has.
    let aside = world.socket().with_extension("aside");
    std::fs::rename(world.socket(), &aside).expect("rename");
    // A table of fields of 256 MiB, and then two bytes for each entry of 4,000.
    let interim = b"\x08\x03103";
    let grow = [b"\x3f\xe1\xff\xff\x7f", &interim[..], b"\x40\x7f\xa1\x1e", &[b'x'; 4000], b"\0"].concat();
    let again = [&interim[..], &[0x7e, 0].repeat(3)].concat();
    let said = |status: &[(&str, &str)]| vec![last(&[OK, &fields(status)].concat())];
    let cut = vec![head(OK), frame(0, 0, b"\0\0\0\0\x09abc"), last(&fields(&[("grpc-status", "0")]))];
    // Each counts 32 bytes more than it has.
    let long = [fields(&[("x", &"v".repeat(60))]).repeat(190), fields(&[("grpc-status", "0")])].concat();
    let reset = |code| vec![head(OK), frame(3, 0, &[0, 0, 0, code])];
    for (frames, expected, says) in [
        ([vec![head(&grow)], vec![head(&again); 20_000]].concat(), Code::Internal, "breaks HTTP/2"),
        (cut, Code::Internal, "3 of 9 bytes"),
        (vec![head(OK), last(&long)], Code::Unavailable, "16 KiB"),
        (reset(8), Code::Cancelled, "CANCEL"),
        (reset(11), Code::ResourceExhausted, "CALM"),
        (vec![last(b"\x08\x03404")], Code::Unimplemented, "404"),
        (vec![last(b"\x08\x03503")], Code::Unavailable, "503"),
        (said(&[("grpc-status", "9"), ("grpc-message", "a%FFb")]), Code::FailedPrecondition, "a\u{fffd}b"),
        (said(&[("grpc-status", "9"), ("grpc-status-details-bin", "***")]), Code::FailedPrecondition, ""),
    ] {
        let driver = answers(&world, frames);
        let before = gateway.peak();
        for _ in 0..3 {
            // Its connection to the driver before may end only now.
            let ended = timeout(Duration::from_secs(30), async {
                loop {
                    match gateway.client().await.allocated(&token, &ns, "monday").await {
                        Err((Code::Unavailable, said)) if said.contains("does not answer on its socket") => {
                            tokio::time::sleep(Duration::from_millis(50)).await;
                        }
                        ended => return ended,
                    }
                }
            });
            match ended.await.expect("an end") {
                Err((code, said)) if code == expected && said.contains(says) => {}
                ended => panic!("not {expected:?} with {says:?}: {ended:?}"),
            }
        }
        let grown = gateway.peak().saturating_sub(before);
        assert!(grown < 16 << 20, "an answer took {grown} bytes: {expected:?} {says}");
        driver.abort();
        std::fs::remove_file(world.socket()).expect("remove");
    }
    std::fs::rename(&aside, world.socket()).expect("rename");
    assert_eq!(code(&gateway.client().await.allocated(&token, &ns, "monday").await), Code::Ok);
    assert!(gateway.running.is_alive());
}
