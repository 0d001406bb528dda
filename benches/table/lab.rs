//! Rows lab: what `cbt-lab bench` says of our driver, beside a client of the table's own that does the same in turn with it.

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use proto::GetCapacityRequest;
use serde_json::Value;

use crate::changes::{change, fill};
use crate::host::{self, timed};
use crate::{Row, Table, ratio, spread};
use fastrand::Rng;
use testkit::bench::{median, ms};
use testkit::prelude::*;

const ROUNDS: usize = 5;
/// As `cbt-lab bench` writes its data.
const PIECE: u64 = 1 << 20;

/// The figures of `cbt-lab bench` that both measure, and what they are of.
const FIGURES: [(&str, &str); 8] = [
    ("snapshot-first", "CreateSnapshot, the first"),
    ("allocated", "GetMetadataAllocated"),
    ("snapshot-1", "CreateSnapshot after 1 % changed"),
    ("delta-1-later", "GetMetadataDelta of 1 %"),
    ("restore", "CreateVolume from a snapshot"),
    ("clone", "CreateVolume from a volume"),
    ("delete-snapshot", "DeleteSnapshot"),
    ("delete-volume", "DeleteVolume"),
];
type Times = [Duration; FIGURES.len()];

/// Bytes of a volume: a dir pool lies on ext4, which holds no file of 16 TiB.
fn size(pool: PoolKind) -> u64 {
    match pool {
        PoolKind::Btrfs | PoolKind::Xfs => 16 << 40,
        PoolKind::Dir => 4 << 40,
    }
}

pub async fn run(table: &mut Table) {
    for pool in table.pools(&PoolKind::ALL) {
        let size = size(pool);
        let flags = ["--pool-size", "48Gi", "--max-volume-size", "16Ti"];
        let mut rig = Rig::start_with(pool, &flags, "warn").await;
        let (mut lab, mut own) = (Vec::new(), Vec::new());
        for round in 0..ROUNDS {
            own.push(by_own_client(&mut rig, size, round).await);
            host::idle(&rig, pool).await;
            lab.push(by_cbt_lab(&rig.socket(), size));
            host::idle(&rig, pool).await;
        }
        for (at, (_, what)) in FIGURES.iter().enumerate() {
            let of = |times: &[Times]| times.iter().map(|times| times[at]).collect::<Vec<_>>();
            let (lab, own) = (of(&lab), of(&own));
            table.add(Row {
                id: "lab",
                what: format!(
                    "cbt-lab bench: {what}, {} TiB sparse, 1 GiB data, {}",
                    size >> 40,
                    pool.name()
                ),
                measured: spread(&lab, ms),
                beside: format!(
                    "{:.2} x the table's own client, {}",
                    ratio(median(&lab), median(&own)),
                    spread(&own, ms)
                ),
                must: "the spreads meet, or within a quarter",
                holds: agree(&lab, &own),
            });
        }
        rig.finish();
    }
}

/// Within the noise of either.
fn agree(one: &[Duration], other: &[Duration]) -> bool {
    let meet = one.iter().min() <= other.iter().max() && other.iter().min() <= one.iter().max();
    meet || (0.8..=1.25).contains(&ratio(median(one), median(other)))
}

async fn by_own_client(rig: &mut Rig, size: u64, round: usize) -> Times {
    let mut random = Rng::with_seed(round as u64);
    let (volume, device) = rig.block_volume(&format!("volume {round}"), size as i64).await;
    fill(&device, size, PIECE, &mut random);
    let (base, first) = timed(rig.snapshot(&format!("first {round}"), &volume)).await;
    let allocated = host::allocated(&mut rig.client, &base).await.whole;
    change(&device, size, PIECE, &mut random);
    let (target, next) = timed(rig.snapshot(&format!("next {round}"), &volume)).await;
    host::hashed(rig, &target).await;
    let delta = host::delta(&mut rig.client, &base, &target).await.whole;
    // As cbt-lab does: both copies are there until the end, so the second is not written where the first one was.
    let mut made = [Duration::ZERO; 2];
    let mut copies = Vec::new();
    for (took, source) in made.iter_mut().zip([from_snapshot(&base), from_volume(&volume)]) {
        let request =
            new_volume_from(&format!("copy {}", copies.len()), size as i64, block_capability(), source);
        let (copy, time) = timed(rig.client.create_volume(request)).await;
        *took = time;
        copies.push(copy.expect("CreateVolume").volume_id);
    }
    let mut left = None;
    loop {
        let asked = rig.client.controller.get_capacity(GetCapacityRequest::default()).await;
        let answer = Some(asked.expect("GetCapacity").into_inner().available_capacity);
        if answer == left {
            break;
        }
        left = answer;
        tokio::time::sleep(Duration::from_millis(250)).await;
    }
    let mut without = Duration::ZERO;
    for snapshot in [&target, &base] {
        let (deleted, time) = timed(rig.client.delete_snapshot(snapshot)).await;
        deleted.expect("DeleteSnapshot");
        without += time / 2;
    }
    rig.detach(&volume).await;
    let (deleted, gone) = timed(rig.client.delete_volume(&volume)).await;
    deleted.expect("DeleteVolume");
    for copy in &copies {
        rig.client.delete_volume(copy).await.expect("DeleteVolume");
    }
    [first, allocated, next, delta, made[0], made[1], without, gone]
}

fn by_cbt_lab(socket: &Path, size: u64) -> Times {
    let plan = "--data 1Gi --changed 1 --snapshots 0 --write-time 0 --settle 3 --runs 1";
    let (result, is_right) = bench(socket, &format!("--size {size} {plan}"));
    assert!(is_right, "cbt-lab bench: {result}");
    let figures = result["figures"].as_array().expect("figures");
    FIGURES.map(|(id, _)| {
        let figure = figures.iter().find(|figure| figure["id"] == id).expect("a figure of each");
        Duration::from_secs_f64(figure["measured"]["median"].as_f64().expect("a number") / 1e3)
    })
}

/// What `cbt-lab bench` finds, and whether every answer was right.
pub fn bench(socket: &Path, plan: &str) -> (Value, bool) {
    let mut command = Command::new(testkit::program("cbt-lab"));
    command.args(["bench", "--endpoint", &format!("unix://{}", socket.display()), "--output", "json"]);
    let output = command.args(plan.split(' ')).output().expect("run cbt-lab");
    let result = serde_json::from_slice(&output.stdout);
    let why = || format!("cbt-lab bench: {}", String::from_utf8_lossy(&output.stderr));
    (result.unwrap_or_else(|_| panic!("{}", why())), output.status.success())
}
