//! Promise: docs/faults.md says what `cbt-backup auto` makes of each fault that is about more than one delta: about what was
//! done to the volume before, about streams that are asked for again, and about a gateway. So there is no fault in the
//! catalogue of which the page does not say it.

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::process::Output;
use std::time::Duration;

use csi_client::{
    Client, Options, Question, block_capability, from_snapshot, from_volume, mount_capability, new_volume,
};
use futures_util::{StreamExt, stream};
use proto::*;
use testkit::lab::{Lab, clients_table, tools_table};
use testkit::{PoolKind, Rig};

use crate::api::with_snapshot;
use crate::faults::{AT_ONCE, Outcome, ask, image, in_deltas};
use crate::tool::{MIB, Place, text};

/// Members of groups are called so.
const BASE: &str = "one-v";
const TARGET: &str = "two-v";
const SIZE: i64 = 512 << 10;
/// The scene that only a driver with real volumes has.
const DISCARDED: &str = "discarded";

/// What comes before a backup.
#[derive(Clone, Copy)]
struct Scene {
    /// Flags of the mock.
    flags: &'static [&'static str],
    /// What changed between the snapshots; where it is not said, as many blocks as before the first one.
    changes: Option<&'static str>,
    /// The volume is expanded between the snapshots.
    grows: bool,
    /// All that a driver may remember is done before.
    has_past: bool,
    /// The same is done while the delta is read.
    is_meanwhile: bool,
    /// The tool asks by way of Kubernetes.
    is_gateway: bool,
}

impl Scene {
    fn of(name: &str) -> Self {
        let plain = Scene {
            flags: &["--tuples-per-message", "5"],
            changes: None,
            grows: false,
            has_past: false,
            is_meanwhile: false,
            is_gateway: false,
        };
        let keeps = &["--tuples-per-message", "5", "--keep-bases"];
        match name {
            "nothing" => plain,
            "a past" => Scene { flags: keeps, has_past: true, ..plain },
            "base forgotten" => Scene { has_past: true, ..plain },
            "unchanged" => Scene { changes: Some(""), ..plain },
            "grown" => Scene { grows: true, changes: Some("8Ki+4Ki 768Ki+4Ki"), ..plain },
            "grown, empty" => Scene { grows: true, changes: Some("8Ki+4Ki"), ..plain },
            "the end" => Scene { changes: Some("8Ki+4Ki 508Ki+4Ki"), ..plain },
            "small blocks" => Scene { flags: &["--tuples-per-message", "5", "--block-size", "512"], ..plain },
            "meanwhile" => Scene { flags: &["--tuples-per-message", "1"], is_meanwhile: true, ..plain },
            "a gateway" => Scene { is_gateway: true, ..plain },
            _ => panic!("there is no scene {name:?}"),
        }
    }
}

/// The mock at the moment before a backup.
struct World {
    place: Place,
    lab: Lab,
    client: Client,
    target: PathBuf,
    scene: Scene,
    /// Another client's streams.
    _beside: Option<csi_client::RawStream>,
}

impl World {
    async fn new(scene: Scene) -> Self {
        let mut place = Place::new();
        let listen = format!("unix://{}", place.path("csi.sock").display());
        let ca = place.path("ca.pem").display().to_string();
        let fixed = ["mock", "--listen", &listen, "--control", "127.0.0.1:0", "--changes", "60"];
        let kubernetes = ["--kubernetes", "https://127.0.0.1:0", "--ca-file", &ca, "--token", "sesame"];
        let lab = Lab::start(fixed.iter().chain(&kubernetes).chain(scene.flags)).await;
        let mut client =
            Client::connect(&place.path("csi.sock"), Duration::from_secs(10)).await.expect("connect");

        let origin = new_volume("origin", SIZE, block_capability());
        client.create_volume(origin).await.expect("CreateVolume");
        client.create_snapshot("before", "origin").await.expect("CreateSnapshot");
        let mut volume = new_volume("v", SIZE, mount_capability(""));
        volume.volume_content_source = Some(from_snapshot("before"));
        client.create_volume(volume).await.expect("CreateVolume from a snapshot");
        group(&mut client, "one", None).await;
        let base = image(&mut client, &place, BASE).await;
        let made = ask(&place, "full", BASE, &["--endpoint", &listen], &base).await;
        assert!(made.status.success(), "{}", text(&made.stderr));

        if scene.grows {
            client.expand_volume("v", 2 * SIZE).await.expect("ControllerExpandVolume");
        }
        group(&mut client, "two", scene.changes).await;
        let target = image(&mut client, &place, TARGET).await;
        if scene.is_gateway {
            let address =
                lab.ready["listen"][1].as_str().and_then(|address| address.strip_prefix("https://"));
            let ca = std::fs::read_to_string(&ca).expect("the authority");
            std::fs::write(place.path("token"), "sesame").expect("write");
            with_snapshot(&mut place, TARGET, address.expect("an address"), &ca);
        }
        let mut beside = None;
        if scene.has_past {
            happen(&mut client).await;
            let narrow = Client::connect_narrow(&place.path("csi.sock"), 24).await;
            let mut narrow = narrow.expect("connect");
            let question = Question::Allocated { snapshot: TARGET.into() };
            let options = Options { max_results: 1, ..Options::default() };
            drop(narrow.open_stream(&question, &options).await.expect("a stream that is left"));
            beside = Some(narrow.open_stream(&question, &options).await.expect("a stream that stays open"));
            client.delete_volume("v").await.expect("DeleteVolume");
            client.delete_snapshot(BASE).await.expect("DeleteSnapshot");
        }
        World { place, lab, client, target, scene, _beside: beside }
    }

    async fn back_up(&self) -> Output {
        let (endpoint, token) = (
            format!("unix://{}", self.place.path("csi.sock").display()),
            self.place.path("token").display().to_string(),
        );
        let asked: &[&str] = match self.scene.is_gateway {
            true => &["--namespace", "ns", "--token-file", &token],
            false => &["--endpoint", &endpoint],
        };
        ask(&self.place, "auto", TARGET, asked, &self.target).await
    }
}

/// What is done to the volume and its snapshots.
async fn happen(client: &mut Client) {
    client.create_snapshot("other", "v").await.expect("CreateSnapshot");
    client.delete_snapshot("other").await.expect("DeleteSnapshot");
    client.expand_volume("v", 2 * SIZE).await.expect("ControllerExpandVolume");
    let request = ControllerModifyVolumeRequest { volume_id: "v".into(), ..Default::default() };
    client.controller.controller_modify_volume(request).await.expect("ControllerModifyVolume");
    let mut clone = new_volume("clone", 0, block_capability());
    clone.volume_content_source = Some(from_volume("v"));
    client.create_volume(clone).await.expect("CreateVolume from a volume");
}

/// A group snapshot of the volume alone.
async fn group(client: &mut Client, name: &str, changes: Option<&str>) {
    let request = CreateVolumeGroupSnapshotRequest {
        name: name.to_owned(),
        source_volume_ids: vec!["v".to_owned()],
        parameters: changes.map(|ranges| ("ranges".to_owned(), ranges.to_owned())).into_iter().collect(),
        ..Default::default()
    };
    client.groups.create_volume_group_snapshot(request).await.expect("CreateVolumeGroupSnapshot");
}

async fn outcome(scene: Scene, fault: &str) -> Outcome {
    let world = World::new(scene).await;
    let mut client = world.client.clone();
    world.lab.put(fault).await;
    if scene.has_past {
        // Some faults are about what was asked before; whether they answer this is their affair.
        let _ = client.delta(BASE, TARGET, 0, 0).await;
    }
    let meanwhile = async {
        if scene.is_meanwhile {
            while !fault.is_empty() && world.lab.met().await == 0 {
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
            // Some messages are on their way; all of them take ten seconds.
            tokio::time::sleep(Duration::from_secs(1)).await;
            happen(&mut client).await;
        }
    };
    let (made, ()) = tokio::join!(world.back_up(), meanwhile);
    Outcome::of(&world.place, &made, &world.target, fault)
}

/// What is wrong with a cell of the page: the outcome, and in brackets words of what is said.
fn differs(found: &Outcome, cell: &str, row: &str) -> Option<String> {
    let (what, words) =
        cell.split_once(" (").map_or((cell, ""), |(what, words)| (what, words.trim_end_matches(')')));
    let is_loud = ["error", "full backup instead", "short, with a warning"].contains(&what);
    assert_eq!(is_loud, !words.is_empty(), "{row}: {cell}: what is said?");
    let is_so = found.what == what && found.said.contains(words);
    (!is_so).then(|| format!("{row}: expected {cell}, found {}: {}", found.what, found.said.trim()))
}

/// What is wrong with a row of the page.
async fn check(row: &[String]) -> Vec<String> {
    let [fault, name, deltas, both] = row else { panic!("{row:?} has not four cells") };
    let (fault, scene) = (fault.trim_matches('`'), Scene::of(name));
    // Faults of a gateway's connections and callers are those of no call.
    let in_deltas = if scene.is_gateway { fault.to_owned() } else { in_deltas(fault) };
    let mut wrong = Vec::new();
    for (fault, cell) in [(in_deltas.as_str(), deltas), (fault, both)] {
        wrong.extend(differs(&outcome(scene, fault).await, cell, &format!("{fault}, {name}")));
    }
    wrong
}

#[tokio::test(flavor = "multi_thread")]
async fn the_tool_meets_each_other_fault_as_the_page_says() {
    let rows: Vec<_> = tools_table().into_iter().filter(|row| row[1] != DISCARDED).collect();
    let names: BTreeSet<&str> = rows.iter().map(|row| row[1].as_str()).collect();
    let mut wrong = Vec::new();
    for name in names {
        // What comes of it without a fault.
        let expected = match name {
            "base forgotten" => "full backup instead (there is no snapshot)",
            _ => "whole",
        };
        wrong.extend(differs(&outcome(Scene::of(name), "").await, expected, name));
    }
    let checks = stream::iter(&rows).map(|row| check(row));
    let found: Vec<Vec<String>> = checks.buffer_unordered(AT_ONCE).collect().await;
    wrong.extend(found.into_iter().flatten());
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// The mock's volumes discard nothing.
#[test_with::root]
#[tokio::test(flavor = "multi_thread")]
async fn the_tool_meets_lost_discards_as_the_page_says() {
    let rows: Vec<_> = tools_table().into_iter().filter(|row| row[1] == DISCARDED).collect();
    assert!(!rows.is_empty());
    let place = Place::new();
    let mut rig = Rig::start(PoolKind::Xfs).await;
    let front = place.path("front.sock");
    let lab = Lab::before(&rig.socket(), &front, "").await;
    let endpoint = format!("unix://{}", front.display());
    let (volume, device) = rig.block_volume("volume", 64 * MIB as i64).await;
    let open = || std::fs::File::options().read(true).write(true).open(&device).expect("open the device");
    let mut image = files::pattern::Image::default();
    image.write(&open(), 100, 300, 1).expect("write");
    let first = rig.snapshot("first", &volume).await;
    let (_, base) = rig.volume_from("base", 64 * MIB as i64, from_snapshot(&first)).await;
    image.punch(&open(), 100, 150).expect("discard");
    image.write(&open(), 9000, 1, 2).expect("write");
    let second = rig.snapshot("second", &volume).await;
    let (_, target) = rig.volume_from("target", 64 * MIB as i64, from_snapshot(&second)).await;
    let made = ask(&place, "full", &first, &["--endpoint", &endpoint], &base).await;
    assert!(made.status.success(), "{}", text(&made.stderr));
    let outcome = async |fault: &str| {
        lab.put(fault).await;
        let place = place.copy();
        let made = ask(&place, "auto", &second, &["--endpoint", &endpoint], &target).await;
        Outcome::of(&place, &made, &target, fault)
    };
    let mut wrong: Vec<String> = differs(&outcome("").await, "whole", DISCARDED).into_iter().collect();
    for row in &rows {
        let fault = row[0].trim_matches('`');
        for (fault, cell) in [(in_deltas(fault).as_str(), &row[2]), (fault, &row[3])] {
            wrong.extend(differs(&outcome(fault).await, cell, fault));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    for entry in std::fs::read_dir(rig.kubelet()).expect("list") {
        let entry = entry.expect("entry");
        rig.detach(entry.file_name().to_str().expect("an id")).await;
    }
    rig.finish();
}

/// A fault that is added to the catalogue needs a row.
#[test]
fn every_fault_has_a_row() {
    let rows = clients_table().into_iter().chain(tools_table());
    let faults: Vec<String> = rows.map(|row| row[0].trim_matches('`').to_owned()).collect();
    let named: BTreeSet<&str> = faults
        .iter()
        .flat_map(|fault| fault.split(';'))
        .map(|fault| fault.split(':').next().unwrap_or_default())
        .collect();
    let mut command = std::process::Command::new(testkit::program("cbt-lab"));
    let output = command.args(["faults", "--list", "--output", "json"]).output().expect("run cbt-lab");
    let all: serde_json::Value = serde_json::from_slice(&output.stdout).expect("JSON");
    let all: Vec<&str> =
        all["faults"].as_array().expect("a list").iter().filter_map(|fault| fault["name"].as_str()).collect();
    assert!(all.len() > 80, "{all:?}");
    let missing: Vec<_> = all.iter().filter(|name| !named.contains(*name)).collect();
    assert!(missing.is_empty(), "docs/faults.md does not say what cbt-backup makes of {missing:?}");
}
