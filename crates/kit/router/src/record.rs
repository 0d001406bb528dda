//! What is kept of a call: its metrics, and a line in the log. Neither holds more of a request than the ids in it, for
//! requests carry secrets.

use std::sync::Arc;
use std::time::Instant;

use metrics::{counter, describe_counter, describe_gauge, describe_histogram, histogram};
use serve::upstream;
use tonic::{Code, Status};

use crate::node::Node;

pub const OPEN_STREAMS: &str = "deltapath_router_open_streams";

pub fn describe() {
    describe_counter!("deltapath_router_rpc_total", "Completed calls, by method and gRPC code.");
    describe_histogram!("deltapath_router_rpc_seconds", "Time from a call's arrival to its end.");
    describe_counter!("deltapath_router_stream_tuples_total", "Block metadata tuples passed on.");
    describe_counter!("deltapath_router_stream_bytes_total", "Bytes of metadata messages passed on.");
    describe_gauge!(OPEN_STREAMS, "Metadata streams under way.");
    describe_gauge!("deltapath_router_nodes", "Addresses of nodes, by state: up, away, forgotten.");
    describe_gauge!("deltapath_router_node_up", "1 while the node answers.");
    describe_counter!(
        "deltapath_router_lists_incomplete_total",
        "Lists that were asked for while this node did not answer, by method and node."
    );
    describe_counter!(
        "deltapath_router_volumes_made_twice_total",
        "Times that volumes of one name were found on several nodes."
    );
}

/// A call under way. Dropped without an end, its client is gone.
#[derive(Debug)]
pub struct Record {
    method: &'static str,
    about: String,
    node: Option<Arc<Node>>,
    started: Instant,
    passed: (u64, u64),
    has_ended: bool,
}

impl Record {
    pub fn new(method: &'static str) -> Self {
        let (about, started) = (String::new(), Instant::now());
        Record { method, about, node: None, started, passed: (0, 0), has_ended: false }
    }

    /// What it is about. Cut where a client sends something absurd.
    pub fn about(&mut self, id: &str) {
        self.about = id.chars().take(128).collect();
    }

    pub fn on(&mut self, node: &Arc<Node>) {
        self.node = Some(node.clone());
    }

    /// The call has ended with this code.
    pub fn done(&mut self, code: Code, reason: Option<&str>) {
        if std::mem::replace(&mut self.has_ended, true) {
            return;
        }
        let method = self.method;
        let elapsed = self.started.elapsed();
        counter!("deltapath_router_rpc_total", "method" => method, "code" => format!("{code:?}"))
            .increment(1);
        histogram!("deltapath_router_rpc_seconds", "method" => method).record(elapsed);
        let (bytes, tuples) = self.passed;
        if bytes > 0 {
            counter!("deltapath_router_stream_tuples_total", "method" => method).increment(tuples);
            counter!("deltapath_router_stream_bytes_total", "method" => method).increment(bytes);
        }
        let node = self.node.as_ref().map(|node| node.name.as_str());
        let (about, ms) = (&self.about, elapsed.as_millis() as u64);
        match reason {
            None => tracing::debug!(method, about, node, ms, "done"),
            Some(reason) => tracing::info!(method, about, node, ms, ?code, reason, "failed"),
        }
    }
}

impl serve::streams::Record for Record {
    fn passed(&mut self, bytes: usize, tuples: u64) {
        self.passed = (self.passed.0 + bytes as u64, tuples);
    }

    fn end(&mut self, status: &Status) {
        self.done(status.code(), (status.code() != Code::Ok).then(|| status.message()));
    }

    fn lost(&self, error: &upstream::Error) -> Status {
        match &self.node {
            Some(node) => node.lost(error),
            None => Status::unavailable("the node was lost: continue after the last tuple"),
        }
    }

    fn cut_short(&self, code: Code, why: &str) -> Status {
        tracing::warn!(
            why,
            node = self.node.as_ref().map(|node| node.name.as_str()),
            "an answer is cut short"
        );
        let what = format!("the node's answer is cut short, {why}: continue after the last tuple");
        Status::new(code, what)
    }
}

impl Drop for Record {
    fn drop(&mut self) {
        self.done(Code::Cancelled, Some("the client is gone"));
    }
}
