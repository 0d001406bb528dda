//! Metrics and health over HTTP, for Prometheus and for probes (`--metrics-address`).
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

/// Why metrics cannot be served.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The address cannot be listened on.
    #[error("listen on {0} (--metrics-address)")]
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
    pub async fn bind(address: SocketAddr) -> Result<Self, Error> {
        let listener = TcpListener::bind(address).await.map_err(|error| Error::Listen(address, error))?;
        let counted = serve::http::install_metrics().map_err(Error::Install)?;
        describe();
        if let Ok(address) = listener.local_addr() {
            tracing::info!(%address, "serving metrics");
        }
        Ok(Server { listener, counted })
    }

    /// Serves until dropped.
    pub async fn serve(self, driver: Arc<Driver>) {
        let counted = self.counted.clone();
        let asks = answering(move |is_scrape| driver_says(&driver, is_scrape, &counted));
        let ask = |is_scrape| {
            let asks = asks.clone();
            get(async move || ask(asks, is_scrape).await)
        };
        let router = Router::new()
            .route("/healthz", get(async || text(StatusCode::OK, "ok\n")))
            .route("/readyz", ask(false))
            .route("/metrics", ask(true));
        tokio::join!(serve::http::upkeep(self.counted), serve::http::serve(self.listener, router));
    }
}

fn describe() {
    describe_counter!("deltapath_rpc_total", "Completed calls, by method and gRPC code.");
    describe_histogram!("deltapath_rpc_seconds", Unit::Seconds, "Time from a call's arrival to its end.");
    describe_counter!("deltapath_stream_tuples_total", "Block metadata tuples sent.");
    describe_counter!(
        "deltapath_stream_described_bytes_total",
        Unit::Bytes,
        "Bytes of volume that the tuples sent describe."
    );
    describe_gauge!("deltapath_volumes", "Volumes, ephemeral ones among them.");
    describe_gauge!("deltapath_retained_snapshots", "Deleted snapshots that are kept as a base for deltas.");
    describe_gauge!("deltapath_snapshots", "Snapshots, members of groups among them.");
    describe_gauge!("deltapath_group_snapshots", "Group snapshots.");
    describe_gauge!("deltapath_unreadable_objects", "Objects whose records could not be read at start.");
    describe_gauge!("deltapath_pool_size_bytes", Unit::Bytes, "Size of the pool's filesystem.");
    describe_gauge!(
        "deltapath_pool_free_bytes",
        Unit::Bytes,
        "Free bytes: the smaller of what the pool has and what the host below a sparse image has."
    );
    describe_gauge!(
        "deltapath_hashing_backlog_bytes",
        Unit::Bytes,
        "Bytes of snapshots that are not hashed yet."
    );
    describe_gauge!(
        "deltapath_transfers",
        "Volumes that are copied from other nodes, by state: running, waiting."
    );
    describe_gauge!(
        "deltapath_transfer_left_bytes",
        Unit::Bytes,
        "Bytes that running transfers still have to do."
    );
    describe_counter!(
        "deltapath_transfers_ended_total",
        "Transfers that ended, by outcome: done, failed, removed."
    );
    describe_counter!(
        "deltapath_transfer_received_bytes_total",
        Unit::Bytes,
        "Bytes of blocks received from other nodes."
    );
    describe_counter!(
        "deltapath_transfer_sent_bytes_total",
        Unit::Bytes,
        "Bytes of blocks sent to other nodes."
    );
    describe_gauge!("deltapath_ready", "1 when the pool is there and takes a write.");
}

/// What the driver is asked for, and where the answer goes.
struct Ask {
    is_scrape: bool,
    answer: oneshot::Sender<Response>,
}

/// Answers one request after the other, in one thread: however many ask, and however long a disk hangs, no more
/// threads are taken from CSI calls. One that panics is answered as an error. Ends with the last sender.
fn answering(say: impl Fn(bool) -> Result<String, String> + Send + 'static) -> mpsc::Sender<Ask> {
    let (asks, mut asked) = mpsc::channel::<Ask>(1);
    tokio::task::spawn_blocking(move || {
        while let Some(ask) = asked.blocking_recv() {
            if ask.answer.is_closed() {
                continue;
            }
            // Nothing is left half changed: it only reads.
            let answer = match catch_unwind(AssertUnwindSafe(|| say(ask.is_scrape))) {
                Ok(Ok(body)) => text(StatusCode::OK, body),
                Ok(Err(body)) => text(StatusCode::SERVICE_UNAVAILABLE, body),
                Err(_) => text(StatusCode::INTERNAL_SERVER_ERROR, "see the driver's log\n"),
            };
            let _ = ask.answer.send(answer);
        }
    });
    asks
}

async fn ask(asks: mpsc::Sender<Ask>, is_scrape: bool) -> Response {
    let (answer, answered) = oneshot::channel();
    let _ = asks.send(Ask { is_scrape, answer }).await;
    let lost = |_| text(StatusCode::INTERNAL_SERVER_ERROR, "see the driver's log\n");
    answered.await.unwrap_or_else(lost)
}

fn driver_says(driver: &Driver, is_scrape: bool, counted: &PrometheusHandle) -> Result<String, String> {
    if is_scrape {
        return Ok(scrape(driver, counted));
    }
    driver.ready().map(|()| "ok\n".into()).map_err(|error| format!("{}\n", base::report(&error)))
}

/// The gauges as of now, and all that was counted.
fn scrape(driver: &Driver, counted: &PrometheusHandle) -> String {
    let figures = driver.figures();
    gauge!("deltapath_volumes").set(figures.volumes as f64);
    gauge!("deltapath_snapshots").set(figures.snapshots as f64);
    gauge!("deltapath_group_snapshots").set(figures.groups as f64);
    gauge!("deltapath_unreadable_objects").set(figures.unreadable as f64);
    if let Some(size) = figures.pool_bytes {
        gauge!("deltapath_pool_size_bytes").set(size as f64);
    }
    if let Some(free) = figures.free_bytes {
        gauge!("deltapath_pool_free_bytes").set(free as f64);
    }
    gauge!("deltapath_retained_snapshots").set(figures.retained as f64);
    gauge!("deltapath_hashing_backlog_bytes").set(figures.hashing_backlog as f64);
    let transfers = figures.transfers;
    for (state, count) in [("running", transfers.running), ("waiting", transfers.waiting)] {
        gauge!("deltapath_transfers", "state" => state).set(count as f64);
    }
    gauge!("deltapath_transfer_left_bytes").set(transfers.left_bytes as f64);
    for (outcome, count) in
        [("done", transfers.done), ("failed", transfers.failed), ("removed", transfers.removed)]
    {
        counter!("deltapath_transfers_ended_total", "outcome" => outcome).absolute(count);
    }
    counter!("deltapath_transfer_received_bytes_total").absolute(transfers.received_bytes);
    gauge!("deltapath_ready").set(if driver.ready().is_ok() { 1.0 } else { 0.0 });
    counted.run_upkeep();
    counted.render()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_panic_is_one_answer_and_the_next_question_has_its_own() {
        let asks = answering(|is_scrape| match is_scrape {
            true => panic!("on purpose"),
            false => Ok("ok\n".into()),
        });
        for (is_scrape, status) in [(true, 500), (false, 200), (true, 500)] {
            let (answer, answered) = oneshot::channel();
            asks.send(Ask { is_scrape, answer }).await.expect("it listens");
            assert_eq!(answered.await.expect("an answer").status(), status);
        }
    }
}
