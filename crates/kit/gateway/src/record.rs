//! What is kept of a call: its metrics, and one audit line. The line is a JSON object on standard output, apart from the log
//! on standard error; it holds no token and no secret.

use std::time::Instant;

use metrics::{counter, describe_counter, describe_gauge, describe_histogram, histogram};
use serde::Serialize;
use serve::streams::Record as _;
use serve::upstream;
use tonic::{Code, Status};
use tracing::Span;

use crate::driver;

/// The most characters of a name and of a message that are written down: what clients send must not fill the queue of the log.
const NAME: usize = 256;
const MESSAGE: usize = 512;

pub fn describe() {
    describe_counter!("deltapath_gateway_rpc_total", "Completed calls, by method and gRPC code.");
    describe_histogram!("deltapath_gateway_rpc_seconds", "Time from a call's arrival to its end.");
    describe_histogram!(
        "deltapath_gateway_first_message_seconds",
        "Time from a call's arrival to the first bytes of its answer."
    );
    describe_counter!("deltapath_gateway_stream_tuples_total", "Block metadata tuples passed on.");
    describe_counter!("deltapath_gateway_stream_bytes_total", "Bytes of messages passed on.");
    describe_gauge!("deltapath_gateway_open_streams", "Calls under way whose caller is known.");
    describe_counter!(
        "deltapath_gateway_reviews_total",
        "Reviews of tokens and rights, by outcome: allowed, denied, failed, cached."
    );
    describe_histogram!("deltapath_gateway_api_seconds", "Time of a call to the Kubernetes API.");
    describe_gauge!("deltapath_gateway_driver_ready", "1 when the CSI driver answers its Probe.");
    describe_gauge!(
        "deltapath_gateway_watch_answered_seconds",
        "When the Kubernetes API server last answered a watch, by its objects, as UNIX time."
    );
}

/// A call under way. It is written down when it ends, or is dropped: then its client is gone.
#[derive(Debug)]
pub struct Record {
    method: &'static str,
    started: Instant,
    line: Line,
    has_begun: bool,
    has_ended: bool,
    span: Span,
}

#[derive(Debug, Default, Serialize)]
struct Line {
    time: String,
    method: &'static str,
    #[serde(skip_serializing_if = "String::is_empty")]
    user: String,
    namespace: String,
    snapshot: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    base: Option<String>,
    code: String,
    #[serde(skip_serializing_if = "String::is_empty")]
    message: String,
    tuples: u64,
    bytes: u64,
    milliseconds: u64,
}

impl Record {
    pub fn new(method: &'static str) -> Self {
        Record {
            method,
            started: Instant::now(),
            line: Line { method, ..Line::default() },
            has_begun: false,
            has_ended: false,
            span: tracing::info_span!(
                "rpc",
                method,
                namespace = tracing::field::Empty,
                snapshot = tracing::field::Empty,
                base = tracing::field::Empty
            ),
        }
    }

    pub fn about(&mut self, namespace: &str, snapshot: &str, base: Option<&str>) {
        self.span.record("namespace", cut(namespace, NAME));
        self.span.record("snapshot", cut(snapshot, NAME));
        self.line.namespace = cut(namespace, NAME).to_owned();
        self.line.snapshot = cut(snapshot, NAME).to_owned();
        if let Some(base) = base {
            self.span.record("base", cut(base, NAME));
            self.line.base = Some(cut(base, NAME).to_owned());
        }
    }

    pub fn by(&mut self, user: &str) {
        cut(user, NAME).clone_into(&mut self.line.user);
    }

    /// The span of the call, for what is done on its behalf.
    pub fn span(&self) -> &Span {
        &self.span
    }
}

impl serve::streams::Record for Record {
    fn passed(&mut self, bytes: usize, tuples: u64) {
        if !std::mem::replace(&mut self.has_begun, true) {
            histogram!("deltapath_gateway_first_message_seconds", "method" => self.method)
                .record(self.started.elapsed());
        }
        self.line.bytes += bytes as u64;
        self.line.tuples = tuples;
    }

    fn end(&mut self, status: &Status) {
        if std::mem::replace(&mut self.has_ended, true) {
            return;
        }
        let elapsed = self.started.elapsed();
        let method = self.method;
        let code = format!("{:?}", status.code());
        counter!("deltapath_gateway_rpc_total", "method" => method, "code" => code.clone()).increment(1);
        histogram!("deltapath_gateway_rpc_seconds", "method" => method).record(elapsed);
        counter!("deltapath_gateway_stream_tuples_total", "method" => method).increment(self.line.tuples);
        counter!("deltapath_gateway_stream_bytes_total", "method" => method).increment(self.line.bytes);
        let line = Line {
            time: jiff::Timestamp::now().to_string(),
            code,
            message: cut(status.message(), MESSAGE).to_owned(),
            milliseconds: elapsed.as_millis() as u64,
            ..std::mem::take(&mut self.line)
        };
        let _entered = self.span.enter();
        match status.code() {
            Code::Ok => tracing::debug!(tuples = line.tuples, "done"),
            code => tracing::info!(?code, reason = line.message, "failed"),
        }
        if let Ok(line) = serde_json::to_string(&line) {
            serve::log::stdout().push(format!("{line}\n").as_bytes());
        }
    }

    fn lost(&self, error: &upstream::Error) -> Status {
        driver::lost(error)
    }

    fn cut_short(&self, code: Code, why: &str) -> Status {
        driver::cut_short(code, why)
    }
}

impl Drop for Record {
    fn drop(&mut self) {
        self.end(&Status::cancelled("the client is gone"));
    }
}

/// The beginning of a text that may be absurdly long.
pub fn cut(text: &str, characters: usize) -> &str {
    match text.char_indices().nth(characters) {
        None => text,
        Some((at, _)) => &text[..at],
    }
}
