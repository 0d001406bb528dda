//! Promise: docs/faults.md says what the community's iterator and lister make of each fault. The example in deploy/backup-example is the
//! iterator; with `-table` it prints by the iterator's own table, as the lister does. They read through the gateway, and
//! `cbt-lab faults` stands before the driver behind it.

use std::path::Path;
use std::time::Duration;

use testkit::lab::{Lab, clients_table};
use tokio::process::Command;

use crate::community::{backup_account, program};
use crate::conformance::driver_at;
use crate::world::World;

/// A client that says nothing for so long hangs; the slowest answer takes a second.
const PATIENCE: Duration = Duration::from_secs(10);

/// What a run of the example printed: the ranges, and all else that is the stream's.
#[derive(Clone, Debug, Default, PartialEq)]
struct Listed {
    ranges: Vec<(i64, i64)>,
    rest: Vec<String>,
}

impl Listed {
    /// The last two numbers of a line are a range; what stands before them, and other lines, is the rest.
    fn of(text: &str) -> Self {
        let mut listed = Listed::default();
        for line in text.lines() {
            let words: Vec<&str> = line.split_whitespace().collect();
            let range = words
                .split_last_chunk()
                .and_then(|(_, [offset, size])| Some((offset.parse().ok()?, size.parse().ok()?)));
            match range {
                Some(range) => {
                    listed.ranges.push(range);
                    // Without the number of the record: how a stream is cut into messages is the driver's affair.
                    listed
                        .rest
                        .extend(words[..words.len() - 2].iter().skip(1).map(|word| (*word).to_owned()));
                }
                None => listed.rest.push(line.to_owned()),
            }
        }
        listed
    }

    fn holds_all_of(&self, whole: &Listed) -> bool {
        let holds = |(start, size): &(i64, i64)| {
            let end = start + size;
            self.ranges.iter().any(|(offset, length)| offset <= start && end <= offset + length)
        };
        whole.ranges.iter().all(holds)
    }
}

/// How a run ended: what it listed, or the first words of its error.
async fn list(world: &World, example: &Path, caller: &Path, table: bool) -> Result<Listed, String> {
    let mut command = Command::new(example);
    command.args(["list", "-snapshot=tuesday", "-base=monday", "-service-account=backup"]);
    command.args(["-namespace", &world.namespace, "-kubeconfig"]).arg(caller).kill_on_drop(true);
    if table {
        command.arg("-table");
    }
    let Ok(output) = tokio::time::timeout(PATIENCE, command.output()).await else {
        return Err("hangs".into());
    };
    let output = output.expect("run the example");
    if output.status.success() {
        return Ok(Listed::of(&String::from_utf8_lossy(&output.stdout)));
    }
    let error = String::from_utf8_lossy(&output.stderr).into_owned();
    let code = error.split_once("code = ").and_then(|(_, rest)| rest.split(' ').next());
    Err(code.map_or(error.clone(), |code| format!("error: {code}")))
}

fn outcome(listed: Result<Listed, String>, whole: &Listed) -> String {
    match listed {
        Err(how) => how,
        Ok(listed) if listed == *whole => "whole".into(),
        Ok(listed) if listed.holds_all_of(whole) => "passed on".into(),
        Ok(_) => "silently short".into(),
    }
}

pub async fn the_communitys_iterator_meets_each_fault_as_the_page_says(world: World) {
    let example = program("backup-example");
    let behind = world.dir.path().join("behind.sock");
    let _driver = driver_at(&world, &behind, &["--changes", "40", "--tuples-per-message", "5"]).await;
    let between = Lab::before(&behind, &world.socket(), "").await;
    let gateway = world.published_gateway().await;
    let caller = backup_account(&world).await;
    let mut wholes = Vec::new();
    for table in [false, true] {
        let whole = list(&world, &example, &caller, table).await;
        wholes.push(whole.unwrap_or_else(|how| panic!("without a fault: {how}\n{}", gateway.running.log())));
    }
    assert_eq!(wholes[0].ranges.len(), 40, "{:?}", wholes[0]);
    assert_eq!(wholes[0].ranges, wholes[1].ranges);

    let mut wrong = Vec::new();
    for row in &clients_table() {
        let (fault, expected) = (row[0].trim_matches('`'), &row[3]);
        for (table, whole) in [false, true].into_iter().zip(&wholes) {
            between.put(fault).await;
            let found = outcome(list(&world, &example, &caller, table).await, whole);
            if found != *expected {
                wrong.push(format!("{fault}, table {table}: expected {expected}, found {found}"));
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}
