//! What a walk costs besides time: bytes, and what kube-apiserver and etcd have to do.

use std::fmt::Write as _;
use std::sync::atomic::Ordering;
use std::time::Duration;

use serde_json::Value;
use testkit::api_server::ApiServer;
use testkit::bench::ticks;
use testkit::earlier::world::World;

use crate::wire::Count;

pub struct Watched {
    counts: [Count; 2],
    bytes: [u64; 2],
    pid: u32,
    ticks: u64,
    memory: u64,
    audited: usize,
    revision: u64,
}

/// The cost of one walk, from the sum of several.
pub struct Cost {
    /// To and from the user, and between the parts.
    bytes: [f64; 2],
    /// Requests of the parts to kube-apiserver, without leases and watches.
    calls: f64,
    cpu: f64,
    /// By how much its memory grew meanwhile, at most; of all walks together.
    memory: u64,
    /// Keys written, without leases.
    writes: f64,
}

impl Watched {
    pub async fn begin(api: &ApiServer, counts: &[Count; 2]) -> Self {
        let pid = api.pid();
        // The peak is counted anew.
        std::fs::write(format!("/proc/{pid}/clear_refs"), "5").expect("clear_refs");
        Watched {
            counts: counts.clone(),
            bytes: load(counts),
            pid,
            ticks: ticks(pid),
            memory: memory(pid, "VmRSS:"),
            audited: audit(api).len(),
            revision: api.revision().await,
        }
    }

    /// The cost since then, divided by the number of walks.
    pub async fn end(&mut self, world: &World, walks: u32) -> Cost {
        let each = |sum: f64| sum / f64::from(walks);
        let api = &world.api;
        let (ticks, memory) = (ticks(self.pid) - self.ticks, memory(self.pid, "VmHWM:"));
        let bytes = load(&self.counts);
        // The audit log is written a little later than the answers.
        tokio::time::sleep(Duration::from_millis(500)).await;
        let audited = audit(api);
        let calls =
            audited[self.audited..].lines().filter(|line| is_of_a_part(line, &world.namespace)).count();
        let written = api.written_since(self.revision).await;
        let is_ours = |key: &str| !key.contains("leases/") && !key.contains("namespaces/marker-");
        let writes = written.iter().filter(|(key, _)| is_ours(key));
        Cost {
            bytes: [0, 1].map(|of| each((bytes[of] - self.bytes[of]) as f64)),
            calls: each(calls as f64),
            cpu: each(ticks as f64 / ticks_a_second()),
            memory: memory.saturating_sub(self.memory),
            writes: each(writes.count() as f64),
        }
    }
}

impl Cost {
    pub fn cells(&self) -> String {
        let mut text = format!("{}", self.calls.round());
        for bytes in self.bytes {
            write!(text, " | {}", size(bytes)).expect("a string");
        }
        let memory = size(self.memory as f64);
        write!(text, " | {} | +{memory} | {}", seconds(self.cpu), self.writes.round()).expect("a string");
        text
    }
}

impl std::fmt::Display for Cost {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let [user, parts] = self.bytes.map(size);
        write!(
            f,
            "{} calls at kube-apiserver, {user} to users, {parts} between the parts, {} of its CPU, {} writes to etcd",
            self.calls,
            seconds(self.cpu),
            self.writes
        )
    }
}

/// Whether a line of the audit log is a request of the programs of these designs, and no election and no watch.
fn is_of_a_part(line: &str, namespace: &str) -> bool {
    let Ok(event) = serde_json::from_str::<Value>(line) else { return false };
    let text = |at: &str| event.pointer(at).and_then(Value::as_str).unwrap_or_default().to_owned();
    let account = text("/user/username");
    let part = account.strip_prefix(&format!("system:serviceaccount:{namespace}:"));
    part.is_some_and(|part| part != "user")
        && text("/objectRef/resource") != "leases"
        && text("/verb") != "watch"
}

fn audit(api: &ApiServer) -> String {
    std::fs::read_to_string(api.file("audit.log")).expect("the audit log")
}

fn load(counts: &[Count; 2]) -> [u64; 2] {
    [0, 1].map(|of| counts[of].load(Ordering::Relaxed))
}

fn ticks_a_second() -> f64 {
    let ticks = nix::unistd::sysconf(nix::unistd::SysconfVar::CLK_TCK).expect("sysconf");
    ticks.expect("ticks a second") as f64
}

fn memory(pid: u32, field: &str) -> u64 {
    testkit::process_status(pid, field) << 10
}

fn size(bytes: f64) -> String {
    match bytes {
        bytes if bytes < 1e4 => format!("{bytes:.0} B"),
        bytes if bytes < 1e6 => format!("{:.1} kB", bytes / 1e3),
        bytes => format!("{:.1} MB", bytes / 1e6),
    }
}

pub fn seconds(seconds: f64) -> String {
    match seconds {
        seconds if seconds < 1.0 => format!("{:.1} ms", seconds * 1e3),
        seconds => format!("{seconds:.1} s"),
    }
}
