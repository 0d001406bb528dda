//! Promise: strangers who hold connections, and readers of the output who stop, keep no caller out, and the memory of both is bounded.

use std::time::{Duration, Instant};

use testkit::crowd::{Door, Stranger, keeps_nobody_out};
use tonic::Code;

use crate::hostile::hello;
use crate::world::{World, code};

pub async fn ten_thousand_strangers_keep_nobody_out(world: World) {
    let (_driver, ns, token) = world.with_snapshot("monday", "plain-1").await;
    let mut gateway = world.gateway_with(&[], None, "info").await;
    gateway.ready().await;
    let (config, name) = hello(&gateway);
    let door = Door { address: ([127, 0, 0, 1], gateway.port).into(), config, name };
    // `Stranger::Handshake` is tested with the earlier designs, which have the same listener.
    for kind in [Stranger::Connection, Stranger::HalfHello, Stranger::Preface] {
        keeps_nobody_out(kind, door.clone(), async || {
            let answer = gateway.client().await.allocated(&token, &ns, "monday").await;
            let is_closed = answer.as_ref().is_err_and(|(_, message)| message == "transport error");
            assert!(is_closed || code(&answer) == Code::Ok, "{kind:?}: {answer:?}");
            !is_closed
        })
        .await;
    }
    // The limit of the pod.
    assert!(gateway.peak() < 256 << 20, "{} bytes", gateway.peak());
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
