//! What all calls share: a blocking thread for the work, a span and a line in the log for the call.

use std::sync::Arc;
use std::time::Instant;

use tonic::{Code, Response, Status};
use tracing::Span;

use super::status::status;
use crate::driver::{Driver, Result};
use crate::metric;

/// A call under way: its method, and its span in the log.
#[derive(Clone, Debug)]
pub(super) struct Rpc {
    pub(super) method: &'static str,
    pub(super) span: Span,
}

/// Runs a unary call's work in a blocking thread. The work continues when the client is gone: it holds
/// its own locks, and a retry finds what it made.
pub(super) async fn unary<T: Send + 'static>(
    driver: &Arc<Driver>,
    rpc: Rpc,
    work: impl FnOnce(&Driver) -> Result<T> + Send + 'static,
) -> Result<Response<T>, Status> {
    let driver = driver.clone();
    let started = Instant::now();
    let task = tokio::task::spawn_blocking(move || {
        let _entered = rpc.span.enter();
        let answer = work(&driver).map_err(|error| status(&driver, &error));
        match &answer {
            Ok(_) => log(rpc.method, Code::Ok, started, None),
            Err(status) => log(rpc.method, status.code(), started, Some(status.message())),
        }
        answer
    });
    match task.await {
        Ok(answer) => answer.map(Response::new),
        Err(error) => {
            tracing::error!(%error, "a call panicked");
            Err(Status::internal("the call failed inside the driver; its log says where"))
        }
    }
}

/// The answer of a call whose capability is not in our lists.
pub(super) fn not_claimed(rpc: &Rpc, capability: &str) -> Status {
    let _entered = rpc.span.enter();
    let status = Status::unimplemented(format!("{capability} is not among this driver's capabilities"));
    log(rpc.method, status.code(), Instant::now(), Some(status.message()));
    status
}

/// The line that ends a call, inside its span, and its place in the metrics. The labels are methods of
/// the contract and gRPC codes: bounded both.
pub(super) fn log(method: &'static str, code: Code, started: Instant, reason: Option<&str>) {
    let elapsed = started.elapsed();
    metrics::counter!(metric::RPC_TOTAL, "method" => method, "code" => format!("{code:?}")).increment(1);
    metrics::histogram!(metric::RPC_SECONDS, "method" => method).record(elapsed);
    let ms = elapsed.as_secs_f64() * 1e3;
    let ms = (ms * 1e3).round() / 1e3;
    match reason {
        None => tracing::info!(code = ?code, ms, "done"),
        Some(reason) => tracing::warn!(code = ?code, ms, reason, "failed"),
    }
}

/// The span of a call: its method and the ids it is about. Requests are never logged whole: they
/// carry secrets.
macro_rules! rpc_span {
    ($method:literal $(, $field:ident = $value:expr)* $(,)?) => {
        crate::csi::rpc::Rpc {
            method: $method,
            span: tracing::info_span!("rpc", method = $method $(, $field = crate::csi::rpc::id(&$value))*),
        }
    };
}
pub(super) use rpc_span;

/// An id for the log, cut where a client sends something absurd.
pub(super) fn id(text: &str) -> &str {
    match text.char_indices().nth(128) {
        None => text,
        Some((at, _)) => &text[..at],
    }
}
