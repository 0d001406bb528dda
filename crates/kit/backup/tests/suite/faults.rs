//! Promise: docs/faults.md says what `cbt-backup auto` makes of each fault of a driver's deltas, on `cbt-lab mock`. It has all,
//! makes a full backup, or fails and says so; what no client can see is named there.

use std::path::{Path, PathBuf};
use std::process::Output;
use std::time::Duration;

use csi_client::{Client, block_capability, from_snapshot, new_volume};
use futures_util::{StreamExt, stream};
use proto::NodePublishVolumeRequest;
use testkit::lab::{Lab, clients_table};
use tokio::process::Command;

use crate::tool::{Place, arg, id, text};

/// The slowest gives up after four silences of three seconds, and pauses between.
const PATIENCE: Duration = Duration::from_secs(120);
/// Rows of the table at once: most of them wait.
pub const AT_ONCE: usize = 4;

/// The mock with two snapshots of one volume, which are the same in every run.
async fn mock(place: &Place) -> (Lab, String) {
    let endpoint = format!("unix://{}", place.path("csi.sock").display());
    let fixed = ["mock", "--listen", &endpoint, "--control", "127.0.0.1:0"];
    let volume =
        ["--volume", "disk=512Ki", "--snapshots", "2", "--changes", "60", "--tuples-per-message", "5"];
    (Lab::start(fixed.iter().chain(&volume)).await, endpoint)
}

/// An image of a snapshot, as the mock publishes it.
pub async fn image(client: &mut Client, place: &Place, snapshot: &str) -> PathBuf {
    let name = format!("from-{snapshot}");
    let mut request = new_volume(&name, 0, block_capability());
    request.volume_content_source = Some(from_snapshot(snapshot));
    client.create_volume(request).await.expect("CreateVolume");
    let target = place.path(&name);
    let request = NodePublishVolumeRequest {
        volume_id: name,
        target_path: target.display().to_string(),
        volume_capability: Some(block_capability()),
        ..Default::default()
    };
    client.node.node_publish_volume(request).await.expect("NodePublishVolume");
    target
}

async fn back_up(place: &Place, wish: &str, snapshot: &str, endpoint: &str, device: &Path) -> Output {
    ask(place, wish, snapshot, &["--endpoint", endpoint], device).await
}

/// A backup, with `asked` for who is asked what changed.
pub async fn ask(place: &Place, wish: &str, snapshot: &str, asked: &[&str], device: &Path) -> Output {
    let source = ["--volume", "v", "--snapshot", snapshot, "--device", arg(device)];
    let patience = ["--retries", "3", "--max-silence", "3", "--output", "json"];
    let mut command = Command::from(place.command(&[&[wish], &source[..], asked, &patience].concat()));
    let output = tokio::time::timeout(PATIENCE, command.kill_on_drop(true).output()).await;
    output.unwrap_or_else(|_| panic!("{wish} of {snapshot} does not end")).expect("run cbt-backup")
}

/// The fault in deltas alone, where it does not say itself in which calls.
pub fn in_deltas(fault: &str) -> String {
    let of_one = |fault: &str| match (fault.contains("call="), fault.contains(':')) {
        (true, _) => fault.to_owned(),
        (false, true) => format!("{fault},call=GetMetadataDelta"),
        (false, false) => format!("{fault}:call=GetMetadataDelta"),
    };
    fault.split(';').map(of_one).collect::<Vec<_>>().join(";")
}

/// What came of a backup, in the words of the page, and what was said of it.
pub struct Outcome {
    pub what: &'static str,
    pub said: String,
}

impl Outcome {
    /// Of a backup in a repository that had one, of what `target` holds.
    pub fn of(place: &Place, made: &Output, target: &Path, fault: &str) -> Self {
        let said = text(&made.stderr);
        let listed = place.list();
        if !made.status.success() {
            assert_eq!(made.status.code(), Some(1), "{fault}: {said}");
            assert!(said.lines().any(|line| line.starts_with("cbt-backup: ")), "{fault}: no word: {said}");
            assert_eq!(listed.len(), 1, "{fault} fails, and leaves a backup");
            return Outcome { what: "error", said };
        }
        assert_eq!(listed.len(), 2, "{fault}");
        let made: serde_json::Value = serde_json::from_slice(&made.stdout).expect("JSON");
        let to = place.path("restored");
        place.ok(&["restore", &id(&made), "--to", arg(&to)]);
        let read = |path: &Path| std::fs::read(path).expect("read");
        let is_whole = read(&to) == read(target);
        match made["kind"].as_str() {
            Some("full") if is_whole => {
                let why = made["why"].as_str().unwrap_or_default();
                assert!(!why.is_empty(), "{fault}: {made}");
                Outcome { what: "full backup instead", said: why.to_owned() }
            }
            _ if !is_whole && said.contains("WARN") && said.contains("is not read") => {
                Outcome { what: "short, with a warning", said }
            }
            _ if !is_whole => Outcome { what: "not seen", said },
            _ if said.contains("asking again") => Outcome { what: "whole: it asks again", said },
            _ => Outcome { what: "whole", said },
        }
    }
}

/// A repository with a full backup of the first snapshot, and what the second one is.
struct Before {
    place: Place,
    target: PathBuf,
}

impl Before {
    async fn new() -> Self {
        let place = Place::new();
        let (_mock, endpoint) = mock(&place).await;
        let mut client =
            Client::connect(&place.path("csi.sock"), Duration::from_secs(10)).await.expect("connect");
        let base = image(&mut client, &place, "disk-1").await;
        let target = image(&mut client, &place, "disk-2").await;
        let made = back_up(&place, "full", "disk-1", &endpoint, &base).await;
        assert!(made.status.success(), "{}", text(&made.stderr));
        Before { place, target }
    }

    /// What comes of a backup of the second snapshot, in a copy of the repository.
    async fn outcome(&self, fault: &str) -> &'static str {
        let place = self.place.copy();
        let (mock, endpoint) = mock(&place).await;
        mock.put(fault).await;
        let made = back_up(&place, "auto", "disk-2", &endpoint, &self.target).await;
        Outcome::of(&place, &made, &self.target, fault).what
    }

    /// What is wrong with a row of the page.
    async fn check(&self, fault: &str, expected: &str) -> Option<String> {
        let found = self.outcome(&in_deltas(fault)).await;
        if found != expected {
            return Some(format!("{fault}: expected {expected}, found {found}"));
        }
        let everywhere = self.outcome(fault).await;
        let is_worse = everywhere == "not seen" && expected != "not seen";
        is_worse.then(|| format!("{fault} in both streams: a backup is short"))
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_tool_meets_each_fault_as_the_page_says() {
    let before = Before::new().await;
    assert_eq!(before.outcome("").await, "whole");
    let rows = stream::iter(clients_table()).map(async |row| {
        let [fault, _, expected, _] = row.as_slice() else { panic!("{row:?} has not four cells") };
        before.check(fault.trim_matches('`'), expected).await
    });
    let wrong: Vec<Option<String>> = rows.buffer_unordered(AT_ONCE).collect().await;
    let wrong: Vec<String> = wrong.into_iter().flatten().collect();
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}
