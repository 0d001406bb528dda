//! Metrics and health over HTTP, for Prometheus and for probes (`--http-endpoint`).
//!
//! What calls count is counted where they end (`csi`); what the driver holds is asked of it at each
//! scrape. Connections are the business of `serve::http`.

use std::net::SocketAddr;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use axum::Router;
use axum::http::StatusCode;
use axum::response::Response;
use axum::routing::get;
use metrics::{Unit, counter, describe_counter, describe_gauge, describe_histogram, gauge};
use metrics_exporter_prometheus::{BuildError, PrometheusHandle};
use serve::http::text;
use tokio::net::TcpListener;
use tokio::sync::{mpsc, oneshot};

use crate::driver::Driver;
use crate::metric;

/// Why metrics cannot be served.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The address cannot be listened on.
    #[error("listen on {0} (--http-endpoint)")]
    Listen(SocketAddr, #[source] std::io::Error),
    /// Something else in the process counts already.
    #[error("install the metrics recorder")]
    Install(#[source] BuildError),
}

/// A listener, bound before the driver serves: a taken address stops the start.
pub struct Server {
    listener: TcpListener,
    counted: PrometheusHandle,
}

impl Server {
    /// Binds `address` and starts to count.
    pub fn bind(address: SocketAddr) -> Result<Self, Error> {
        let listener = serve::slots::bind(address).map_err(|error| Error::Listen(address, error))?;
        let counted =
            serve::http::install_metrics(metric::LOG_LINES_DROPPED_TOTAL).map_err(Error::Install)?;
        describe();
        if let Ok(address) = listener.local_addr() {
            tracing::info!(%address, "serving metrics");
        }
        Ok(Server { listener, counted })
    }

    /// Serves until dropped.
    pub async fn serve(self, driver: Arc<Driver>) {
        let counted = self.counted.clone();
        let probed = driver.clone();
        let ready = answering(move || match probed.ready() {
            Ok(()) => Ok("ok\n".into()),
            Err(error) => Err(format!("{}\n", base::report(&error))),
        });
        let metrics = answering(move || Ok(scrape(&driver, &counted)));
        let router = Router::new()
            .route("/healthz", get(async || text(StatusCode::OK, "ok\n")))
            .route("/readyz", get(async move || ask(ready).await))
            .route("/metrics", get(async move || ask(metrics).await));
        tokio::join!(serve::http::upkeep(self.counted), serve::http::serve(self.listener, router));
    }
}

fn describe() {
    describe_counter!(metric::RPC_TOTAL, "Completed calls, by method and gRPC code.");
    describe_histogram!(metric::RPC_SECONDS, Unit::Seconds, "Time from a call's arrival to its end.");
    describe_counter!(metric::STREAM_TUPLES_TOTAL, "Block metadata tuples sent.");
    describe_counter!(
        metric::STREAM_DESCRIBED_BYTES_TOTAL,
        Unit::Bytes,
        "Bytes of volume that the tuples sent describe."
    );
    describe_gauge!(metric::VOLUMES, "Volumes, ephemeral ones among them.");
    describe_gauge!(metric::RETAINED_SNAPSHOTS, "Deleted snapshots that are kept as a base for deltas.");
    describe_gauge!(metric::SNAPSHOTS, "Snapshots, members of groups among them.");
    describe_gauge!(metric::GROUP_SNAPSHOTS, "Group snapshots.");
    describe_gauge!(metric::UNREADABLE_OBJECTS, "Objects whose records could not be read at start.");
    describe_gauge!(metric::UNHEALTHY_VOLUMES, "Volumes whose file is missing, cut short or cannot be read.");
    describe_gauge!(metric::POOL_SIZE_BYTES, Unit::Bytes, "Size of the pool's filesystem.");
    describe_gauge!(
        metric::POOL_FREE_BYTES,
        Unit::Bytes,
        "Free bytes: the smaller of what the pool has and what the host below a sparse image has."
    );
    describe_gauge!(
        metric::HASHING_BACKLOG_BYTES,
        Unit::Bytes,
        "Bytes of snapshots that are not hashed yet."
    );
    describe_gauge!(
        metric::TRANSFERS,
        "Volumes that are copied from other nodes, by state: running, waiting."
    );
    describe_gauge!(
        metric::TRANSFER_LEFT_BYTES,
        Unit::Bytes,
        "Bytes that running transfers still have to do."
    );
    describe_counter!(
        metric::TRANSFERS_ENDED_TOTAL,
        "Transfers that ended, by outcome: done, failed, removed."
    );
    describe_counter!(
        metric::TRANSFER_RECEIVED_BYTES_TOTAL,
        Unit::Bytes,
        "Bytes of blocks received from other nodes."
    );
    describe_counter!(metric::TRANSFER_SENT_BYTES_TOTAL, Unit::Bytes, "Bytes of blocks sent to other nodes.");
    describe_gauge!(metric::READY, "1 when the pool is there and takes a write.");
}

/// Where an answer is sent.
type Ask = oneshot::Sender<Response>;

/// Answers one request after the other, in one thread: however many ask, and however long a disk hangs, no more
/// threads are taken from CSI calls. One that panics is answered as an error. Ends with the last sender.
fn answering(say: impl Fn() -> Result<String, String> + Send + 'static) -> mpsc::Sender<Ask> {
    let (asks, mut asked) = mpsc::channel::<Ask>(1);
    tokio::task::spawn_blocking(move || {
        while let Some(answer) = asked.blocking_recv() {
            if answer.is_closed() {
                continue;
            }
            // Nothing is left half changed: it only reads.
            let said = match catch_unwind(AssertUnwindSafe(&say)) {
                Ok(Ok(body)) => text(StatusCode::OK, body),
                Ok(Err(body)) => text(StatusCode::SERVICE_UNAVAILABLE, body),
                Err(_) => text(StatusCode::INTERNAL_SERVER_ERROR, "see the driver's log\n"),
            };
            let _ = answer.send(said);
        }
    });
    asks
}

async fn ask(asks: mpsc::Sender<Ask>) -> Response {
    let (answer, answered) = oneshot::channel();
    let _ = asks.send(answer).await;
    let lost = |_| text(StatusCode::INTERNAL_SERVER_ERROR, "see the driver's log\n");
    answered.await.unwrap_or_else(lost)
}

/// The gauges as of now, and all that was counted.
fn scrape(driver: &Driver, counted: &PrometheusHandle) -> String {
    let figures = driver.figures();
    gauge!(metric::VOLUMES).set(figures.volumes as f64);
    gauge!(metric::SNAPSHOTS).set(figures.snapshots as f64);
    gauge!(metric::GROUP_SNAPSHOTS).set(figures.groups as f64);
    gauge!(metric::UNREADABLE_OBJECTS).set(figures.unreadable as f64);
    if let Some(unhealthy) = figures.unhealthy {
        gauge!(metric::UNHEALTHY_VOLUMES).set(unhealthy as f64);
    }
    if let Some(size) = figures.pool_bytes {
        gauge!(metric::POOL_SIZE_BYTES).set(size as f64);
    }
    if let Some(free) = figures.free_bytes {
        gauge!(metric::POOL_FREE_BYTES).set(free as f64);
    }
    gauge!(metric::RETAINED_SNAPSHOTS).set(figures.retained as f64);
    gauge!(metric::HASHING_BACKLOG_BYTES).set(figures.hashing_backlog as f64);
    let transfers = figures.transfers;
    for (state, count) in [("running", transfers.running), ("waiting", transfers.waiting)] {
        gauge!(metric::TRANSFERS, "state" => state).set(count as f64);
    }
    gauge!(metric::TRANSFER_LEFT_BYTES).set(transfers.left_bytes as f64);
    for (outcome, count) in
        [("done", transfers.done), ("failed", transfers.failed), ("removed", transfers.removed)]
    {
        counter!(metric::TRANSFERS_ENDED_TOTAL, "outcome" => outcome).absolute(count);
    }
    counter!(metric::TRANSFER_RECEIVED_BYTES_TOTAL).absolute(transfers.received_bytes);
    gauge!(metric::READY).set(if driver.ready().is_ok() { 1.0 } else { 0.0 });
    counted.run_upkeep();
    counted.render()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_panic_is_one_answer_and_the_next_question_has_its_own() {
        let count = std::sync::atomic::AtomicUsize::new(0);
        let asks = answering(move || match count.fetch_add(1, std::sync::atomic::Ordering::Relaxed) % 2 {
            0 => panic!("on purpose"),
            _ => Ok("ok\n".into()),
        });
        for status in [500, 200, 500] {
            let (answer, answered) = oneshot::channel();
            asks.send(answer).await.expect("it listens");
            assert_eq!(answered.await.expect("an answer").status(), status);
        }
    }
}
