//! The gateway's questions to the Kubernetes API server, under the names of its metrics.

pub use serve::questions::{Metrics, away};

/// The names of its metrics about them.
pub const METRICS: Metrics =
    Metrics { seconds: "deltapath_gateway_api_seconds", reviews: "deltapath_gateway_reviews_total" };

/// Waits for the answer. `call` names it among the metrics.
pub async fn ask<T>(call: &'static str, question: impl Future<Output = kube::Result<T>>) -> kube::Result<T> {
    serve::questions::ask(METRICS.seconds, call, question).await
}
