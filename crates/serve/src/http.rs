//! Plain HTTP for probes and Prometheus: a bounded number of connections, none of which can be slow for long. What is
//! answered is a router of the server's own.

use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use metrics_exporter_prometheus::{BuildError, PrometheusBuilder, PrometheusHandle};
use tokio::net::TcpListener;
use tokio::sync::Semaphore;

/// Upper bounds of the latency histograms' buckets, in seconds: from a look-up in memory to a long copy.
const BUCKETS: [f64; 14] =
    [0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0, 60.0];
/// How often samples are folded into the histograms, also where nobody scrapes.
const UPKEEP: Duration = Duration::from_secs(5);
/// How long a client may take to send its request's head.
const PATIENCE: Duration = Duration::from_secs(10);
/// Connections at once; further ones wait.
const MAX_CONNECTIONS: usize = 64;

/// Starts to count what the process's metrics say. Once a process.
pub fn install_metrics() -> Result<PrometheusHandle, BuildError> {
    PrometheusBuilder::new().set_buckets(&BUCKETS)?.install_recorder()
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
    let connections = Arc::new(Semaphore::new(MAX_CONNECTIONS));
    loop {
        let place = connections.clone().acquire_owned().await.expect("it is never closed");
        let stream = match listener.accept().await {
            Ok((stream, _)) => stream,
            Err(error) => {
                // Out of descriptors, perhaps: the server goes on, and so does this.
                tracing::warn!(%error, "accept an HTTP connection");
                tokio::time::sleep(Duration::from_secs(1)).await;
                continue;
            }
        };
        let service = TowerToHyperService::new(router.clone());
        tokio::spawn(async move {
            let _place = place;
            let served = hyper::server::conn::http1::Builder::new()
                .timer(TokioTimer::new())
                .header_read_timeout(PATIENCE)
                .serve_connection(TokioIo::new(stream), service)
                .await;
            if let Err(error) = served {
                tracing::debug!(%error, "an HTTP connection ended");
            }
        });
    }
}

async fn unknown() -> Result<Response, Infallible> {
    Ok(text(StatusCode::NOT_FOUND, "there is /metrics, /healthz and /readyz\n"))
}

/// A plain answer.
pub fn text(status: StatusCode, body: impl Into<String>) -> Response {
    (status, [(header::CONTENT_TYPE, "text/plain; version=0.0.4; charset=utf-8")], body.into())
        .into_response()
}
