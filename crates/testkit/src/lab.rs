//! `cbt-lab` as a process that serves: the proxy that injects one fault, or the driver in memory.

use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use serde_json::Value;
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::process::{Child, Command};

use crate::pages;

/// A command of `cbt-lab` for the driver at a socket.
pub fn command(name: &str, socket: &Path) -> Command {
    let mut command = Command::new(crate::program("cbt-lab"));
    command.args([name, "--endpoint", &format!("unix://{}", socket.display())]).env_remove("CSI_ENDPOINT");
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

/// Serves until it is dropped.
pub struct Lab {
    pub child: Child,
    /// What it reported when it was ready.
    pub ready: Value,
}

/// Names of conformance cases with spaces between them: `*-order` is that case of both streams.
pub fn named(cases: &str) -> Vec<String> {
    let streams = |case: &str| match case.strip_prefix('*') {
        Some(rest) => vec![format!("allocated{rest}"), format!("delta{rest}")],
        None => vec![case.to_owned()],
    };
    cases.split(' ').flat_map(streams).collect()
}

/// The table of docs/faults.md of what clients make of each fault in a delta: the cells of each row.
pub fn clients_table() -> Vec<Vec<String>> {
    table("What a client makes of them")
}

/// The table of docs/faults.md of what `cbt-backup` makes of the other faults.
pub fn tools_table() -> Vec<Vec<String>> {
    table("What `cbt-backup` makes of the others")
}

fn table(heading: &str) -> Vec<Vec<String>> {
    let page = pages::read("docs/faults.md");
    let rows = pages::rows(pages::section(&page, heading), "| `");
    let rows: Vec<Vec<String>> =
        rows.iter().map(|row| row.iter().copied().map(str::to_owned).collect()).collect();
    assert!(rows.len() > 30 && rows.iter().all(|row| row.len() == 4), "{rows:?}");
    rows
}

impl Drop for Lab {
    /// Waits for its end: until then it answers at its socket, and the next one there is refused.
    fn drop(&mut self) {
        let _ = self.child.start_kill();
        while matches!(self.child.try_wait(), Ok(None)) {
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

impl Lab {
    /// `cbt-lab` with these arguments.
    pub async fn start<A: AsRef<std::ffi::OsStr>>(arguments: impl IntoIterator<Item = A>) -> Self {
        let mut command = Command::new(crate::program("cbt-lab"));
        command.args(arguments).args(["--output", "json"]).stdout(Stdio::piped()).stderr(Stdio::null());
        let mut child = command.kill_on_drop(true).spawn().expect("spawn");
        let mut lines = BufReader::new(child.stdout.take().expect("piped")).lines();
        let line = lines.next_line().await.expect("read").unwrap_or_default();
        let ready = serde_json::from_str(&line).unwrap_or_else(|_| panic!("it is not ready: {command:?}"));
        Lab { child, ready }
    }

    /// `cbt-lab faults` at `listen`, before the driver at `upstream`; `faults` may be none.
    pub async fn before(upstream: &Path, listen: &Path, faults: &str) -> Self {
        let address = |socket: &Path| format!("unix://{}", socket.display());
        let (upstream, listen) = (address(upstream), address(listen));
        let fixed = ["faults", "--upstream", &upstream, "--listen", &listen, "--control", "127.0.0.1:0"];
        let chosen = ["--fault", faults];
        Self::start(fixed.iter().chain(&chosen[..if faults.is_empty() { 0 } else { 2 }])).await
    }

    /// The same before a rig's driver, and its socket.
    pub async fn faulty(rig: &crate::Rig, faults: &str) -> (Self, PathBuf) {
        static SOCKETS: AtomicUsize = AtomicUsize::new(0);
        let number = SOCKETS.fetch_add(1, Ordering::Relaxed);
        let socket = rig.dir.path().join(format!("faulty-{number}.sock"));
        (Self::before(&rig.socket(), &socket, faults).await, socket)
    }

    /// A mock on a socket in `dir`, with a control address.
    pub async fn mock(dir: &tempfile::TempDir, arguments: &[&str]) -> (Self, PathBuf) {
        let socket = dir.path().join("csi.sock");
        let listen = format!("unix://{}", socket.display());
        let fixed = ["mock", "--listen", &listen, "--control", "127.0.0.1:0"];
        (Self::start(fixed.iter().chain(arguments)).await, socket)
    }

    /// Replaces all faults, as `curl -X PUT --data` does.
    pub async fn put(&self, faults: &str) {
        let (code, answer) = self.control("PUT", "/faults", faults).await;
        assert_eq!(code, 200, "{faults}: {answer}");
    }

    /// How many calls have met one of the faults that are on.
    pub async fn met(&self) -> u64 {
        let (code, rows) = self.control("GET", "/faults", "").await;
        assert_eq!(code, 200, "{rows}");
        let rows: Value = serde_json::from_str(&rows).expect("JSON");
        rows.as_array().expect("a list").iter().filter_map(|row| row["met"].as_u64()).sum()
    }

    /// A request to its HTTP API: the code and the body of the answer.
    pub async fn control(&self, method: &str, path: &str, body: &str) -> (u16, String) {
        let address = self.ready["control"].as_str().and_then(|address| address.strip_prefix("http://"));
        let mut stream = tokio::net::TcpStream::connect(address.expect("--control")).await.expect("connect");
        let length = body.len();
        let request = format!(
            "{method} {path} HTTP/1.1\r\nHost: lab\r\nConnection: close\r\nContent-Length: {length}\r\n\r\n{body}"
        );
        stream.write_all(request.as_bytes()).await.expect("write");
        let mut answer = String::new();
        stream.read_to_string(&mut answer).await.expect("read");
        let (head, body) = answer.split_once("\r\n\r\n").expect("a head");
        (head.split(' ').nth(1).expect("a status").parse().expect("a number"), body.to_owned())
    }
}
