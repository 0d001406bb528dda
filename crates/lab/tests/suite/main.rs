//! `cbt-lab` as a program: what it says when it cannot run, its faults, and its mock. What its conformance suite finds in
//! drivers is tested beside the driver.
#![allow(clippy::disallowed_methods)]

mod bench;
mod chosen;
mod examples;
mod faults;
mod life;
mod mock;
mod sanity;
mod survives;
mod usage;

use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use csi_client::{Client, Message, Options, Question};
use serde_json::Value;
use tempfile::TempDir;
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::process::{Child, Command};
use tonic::Status;

/// As `testkit::needs`, which links the driver; nothing here does.
pub(crate) fn needs(what: &str) {
    if std::env::var_os("DELTAPATH_WITHOUT_GO").is_some() {
        writeln!(std::io::stdout(), "left out: needs {what}").expect("write");
        std::process::exit(77);
    }
}

/// A `cbt-lab` that serves; dropped, it is gone.
pub(crate) struct Lab {
    pub(crate) child: Child,
    /// What it told when it was ready.
    pub(crate) ready: Value,
}

impl Lab {
    pub(crate) async fn start(arguments: &[&str]) -> Self {
        let mut child = Command::new(env!("CARGO_BIN_EXE_cbt-lab"))
            .args(arguments)
            .args(["--output", "json"])
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .kill_on_drop(true)
            .spawn()
            .expect("spawn");
        let mut lines = BufReader::new(child.stdout.take().expect("piped")).lines();
        let line = lines.next_line().await.expect("read").expect("it is ready");
        Lab { child, ready: serde_json::from_str(&line).expect("JSON") }
    }

    /// A mock on a socket in `dir`, with a control address.
    pub(crate) async fn mock(dir: &TempDir, arguments: &[&str]) -> (Self, PathBuf) {
        let socket = dir.path().join("csi.sock");
        let listen = format!("unix://{}", socket.display());
        let fixed = ["mock", "--listen", &listen, "--control", "127.0.0.1:0"];
        (Self::start(&[&fixed[..], arguments].concat()).await, socket)
    }

    /// A request to its HTTP API: status code and body.
    pub(crate) async fn control(&self, method: &str, path: &str, body: &str) -> (u16, String) {
        let address = self.ready["control"].as_str().expect("a control address");
        let address = address.strip_prefix("http://").expect("http");
        let mut stream = tokio::net::TcpStream::connect(address).await.expect("connect");
        let length = body.len();
        let request = format!(
            "{method} {path} HTTP/1.1\r\nhost: lab\r\nconnection: close\r\ncontent-length: {length}\r\n\r\n{body}"
        );
        stream.write_all(request.as_bytes()).await.expect("write");
        let mut answer = String::new();
        stream.read_to_string(&mut answer).await.expect("read");
        let (head, body) = answer.split_once("\r\n\r\n").expect("a head");
        let code = head.split(' ').nth(1).expect("a status").parse().expect("a number");
        (code, body.to_owned())
    }
}

pub(crate) async fn connect(socket: &Path) -> Client {
    Client::connect(socket, Duration::from_secs(10)).await.expect("connect")
}

pub(crate) fn allocated(snapshot: &str) -> Question {
    Question::Allocated { snapshot: snapshot.to_owned() }
}

pub(crate) fn delta(base: &str, target: &str) -> Question {
    Question::Delta { base: base.to_owned(), target: target.to_owned() }
}

/// A message in a few words: type, capacity and tuples in KiB, or in bytes where that is no whole number.
fn text_of(message: &Message) -> String {
    let size = |bytes: i64| if bytes % 1024 == 0 { format!("{}", bytes / 1024) } else { format!("{bytes}b") };
    let tuples: Vec<String> =
        message.tuples.iter().map(|(start, length)| format!("{}+{}", size(*start), size(*length))).collect();
    let style = ["?", "f", "v"][message.style as usize];
    format!("{style}{}[{}]", size(message.capacity), tuples.join(" "))
}

pub(crate) fn code(status: &Status) -> String {
    format!("{:?}", status.code())
}

/// A stream, read to its end with pauses, in a few words.
pub(crate) async fn read(
    client: &mut Client,
    question: &Question,
    options: &Options,
    pause: Duration,
) -> String {
    let mut all = Vec::new();
    let reading = async {
        let mut stream = match client.open_stream(question, options).await {
            Ok(stream) => stream,
            Err(status) => return code(&status),
        };
        loop {
            tokio::time::sleep(pause).await;
            match stream.next().await {
                Ok(Some(message)) => all.push(text_of(&message)),
                Ok(None) => return "OK".to_owned(),
                Err(status) => return code(&status),
            }
        }
    };
    let end = tokio::time::timeout(Duration::from_secs(10), reading).await;
    all.push(end.unwrap_or_else(|_| "no end".to_owned()));
    all.join(" ")
}
