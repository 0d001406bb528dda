//! Plain HTTP for probes and Prometheus. Anyone may connect: a connection has one request and a few seconds for all of it, and the
//! oldest one is closed where there are too many. What is answered is a router of the server's own.

use std::convert::Infallible;
use std::time::Duration;

use axum::Router;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use metrics_exporter_prometheus::{BuildError, PrometheusBuilder, PrometheusHandle};
use tokio::net::TcpListener;

use crate::slots::{Bounds, Slots};

/// Upper bounds of the latency histograms' buckets, in seconds: from a look-up in memory to a long copy.
const BUCKETS: [f64; 14] =
    [0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0, 60.0];
/// How often samples are folded into the histograms, also where no one scrapes.
const UPKEEP: Duration = Duration::from_secs(5);
/// How long a connection may take: to send its request, to be answered, and to take the answer.
const PATIENCE: Duration = Duration::from_secs(10);
/// Connections at once.
const MAX_CONNECTIONS: usize = 256;

/// Starts to count what the process's metrics say, lines of the log that are lost under the name `dropped_lines`. Once a process.
pub fn install_metrics(dropped_lines: &'static str) -> Result<PrometheusHandle, BuildError> {
    let metrics = PrometheusBuilder::new().set_buckets(&BUCKETS)?.install_recorder()?;
    crate::log::count_dropped(dropped_lines);
    Ok(metrics)
}

/// Folds samples into the histograms now and then, for ever.
pub async fn upkeep(metrics: PrometheusHandle) {
    let mut ticks = tokio::time::interval(UPKEEP);
    loop {
        ticks.tick().await;
        metrics.run_upkeep();
    }
}

/// Serves metrics, and whether the process lives and is ready, until dropped. `missing` says what it waits for.
pub async fn probes(
    listener: TcpListener,
    metrics: PrometheusHandle,
    missing: impl Fn() -> Option<&'static str> + Clone + Send + Sync + 'static,
) {
    let rendered = metrics.clone();
    let readiness = async move || match missing() {
        None => text(StatusCode::OK, "ok\n"),
        Some(what) => text(StatusCode::SERVICE_UNAVAILABLE, format!("{what}\n")),
    };
    let router = Router::new()
        .route("/healthz", get(async || text(StatusCode::OK, "ok\n")))
        .route("/readyz", get(readiness))
        .route("/metrics", get(async move || text(StatusCode::OK, rendered.render())));
    tokio::join!(upkeep(metrics), serve(listener, router));
}

/// Serves until dropped.
pub async fn serve(listener: TcpListener, router: Router) {
    let router = router.fallback(unknown);
    let slots = Slots::new(Bounds { stages: [MAX_CONNECTIONS, 0, 0], each: 0, unknown: 0 });
    loop {
        let stream = match listener.accept().await {
            Ok((stream, _)) => stream,
            Err(error) => {
                // Out of descriptors, perhaps: the server continues, and so does this.
                tracing::warn!(%error, "accept an HTTP connection");
                tokio::time::sleep(Duration::from_secs(1)).await;
                continue;
            }
        };
        let slot = slots.enter();
        let service = TowerToHyperService::new(router.clone());
        tokio::spawn(async move {
            let served = hyper::server::conn::http1::Builder::new()
                .timer(TokioTimer::new())
                .keep_alive(false)
                .serve_connection(TokioIo::new(stream), service);
            let ended = tokio::select! {
                ended = tokio::time::timeout(PATIENCE, served) => ended,
                () = slot.closed() => return tracing::debug!("an HTTP connection is closed for newer ones"),
            };
            match ended {
                Ok(Ok(())) => {}
                Ok(Err(error)) => tracing::debug!(%error, "an HTTP connection ended"),
                Err(_) => tracing::debug!("an HTTP connection took too long"),
            }
        });
    }
}

async fn unknown() -> Result<Response, Infallible> {
    Ok(text(StatusCode::NOT_FOUND, "not found; this server has /metrics, /healthz and /readyz\n"))
}

/// A plain answer.
pub fn text(status: StatusCode, body: impl Into<String>) -> Response {
    (status, [(header::CONTENT_TYPE, "text/plain; version=0.0.4; charset=utf-8")], body.into())
        .into_response()
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::net::TcpStream;

    use super::*;

    /// Promise: whoever asks for metrics without reading them keeps no probe waiting, and is sent away.
    #[tokio::test(flavor = "multi_thread")]
    async fn a_crowd_that_asks_and_does_not_read_keeps_no_probe_waiting() {
        let recorder = PrometheusBuilder::new().build_recorder();
        let metrics = recorder.handle();
        metrics::with_local_recorder(&recorder, || {
            for number in 0..1_000 {
                metrics::counter!("a_counter_with_a_long_name", "number" => number.to_string()).increment(1);
            }
        });
        let listener = crate::slots::bind(([127, 0, 0, 1], 0).into()).expect("bind");
        let address = listener.local_addr().expect("an address");
        let serving = tokio::spawn(probes(listener, metrics, || None));
        let mut crowd = Vec::new();
        for _ in 0..MAX_CONNECTIONS + 100 {
            let mut stream = TcpStream::connect(address).await.expect("connect");
            // One that was closed for others takes no more of them.
            let _ = stream.write_all(&b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n".repeat(1_000)).await;
            crowd.push(stream);
        }
        let begun = Instant::now();
        let mut longest = Duration::ZERO;
        while begun.elapsed() < PATIENCE + Duration::from_secs(2) {
            let asked = Instant::now();
            let mut stream = TcpStream::connect(address).await.expect("connect");
            stream.write_all(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n").await.expect("ask");
            let mut answer = String::new();
            let read = tokio::time::timeout(Duration::from_secs(20), stream.read_to_string(&mut answer));
            read.await.expect("an answer in time").expect("an answer");
            assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
            longest = longest.max(asked.elapsed());
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
        assert!(longest < Duration::from_secs(5), "a probe took {longest:?}");
        let open = crowd.iter().filter(|stream| {
            let mut all = vec![0; 64 << 20];
            // What was sent is read first; then there is an end, or an error, or a connection that is open.
            while let Ok(1..) = stream.try_read(&mut all) {}
            stream.try_read(&mut all[..1]).is_err_and(|error| error.kind() == std::io::ErrorKind::WouldBlock)
        });
        assert_eq!(open.count(), 0, "connections are still open");
        serving.abort();
    }
}
