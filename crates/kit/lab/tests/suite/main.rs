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

use std::path::Path;
use std::time::Duration;

use csi_client::{Client, Message, Options, Question};
use testkit::lab::Lab;
use testkit::needs;
use tonic::Status;

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
