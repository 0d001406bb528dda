//! Tables of their own, for the charts: what each call costs as the volume, its data and its snapshots grow, and what it costs with any
//! driver. `cbt-lab bench` measures all of them. With PEERS="NAME=SOCKET[,DIR]" in the environment, that driver is in the last one.

use std::path::Path;

use serde_json::Value;
use testkit::bench::record_in;
use testkit::prelude::*;

use crate::{Table, host, lab};

pub const IDS: [&str; 4] = ["growth-volume", "growth-data", "growth-snapshots", "drivers"];

/// Figures of `cbt-lab bench`.
type Figures = Vec<Value>;

pub async fn run(table: &Table) {
    let mut drivers = Vec::new();
    for pool in table.pools(&PoolKind::ALL) {
        // A pool larger than what the disk has free shows the disk's free space, which the bare operations change.
        let rig = Rig::start_with(pool, &["--pool-size", "20Gi", "--max-volume-size", "16Ti"], "warn").await;
        let bare = tempfile::tempdir().expect("a directory");
        let measure = async |plan: &str| {
            host::idle(&rig, pool).await;
            let plan = format!("{plan} --bare-dir {}", bare.path().display());
            let (result, is_right) = lab::bench(&rig.socket(), &plan);
            assert!(is_right, "cbt-lab bench {plan}: {result}");
            figures(&result)
        };
        if table.wants("growth-volume") {
            let mut points = Vec::new();
            for size in ["1Gi", "16Gi", "256Gi", "4Ti", "16Ti"] {
                let plan =
                    format!("--size {size} --snapshots 0 --data 64Mi --changed 1 --write-time 0 --settle 1");
                // A dir pool lies on ext4, which holds no file of 16 TiB.
                let is_held = pool != PoolKind::Dir || size != "16Ti";
                points.push(if is_held { measure(&plan).await } else { Figures::new() });
            }
            record("growth of the volume", pool, &points);
        }
        if table.wants("growth-data") {
            let mut points = Vec::new();
            for data in ["64Mi", "256Mi", "1Gi", "4Gi"] {
                let plan = format!(
                    "--size 16Gi --snapshots 0 --data {data} --changed 1 --write-time 0 --settle 3 --runs 2"
                );
                points.push(measure(&plan).await);
            }
            record("growth of the data", pool, &points);
        }
        if table.wants("growth-snapshots") {
            let numbers = [1, 10, 100, 1000];
            let plan = "--snapshots 1,10,100,1000 --data 8Mi --changed 1 --write-time 0 --settle 0";
            let mut figures = measure(plan).await;
            let points = numbers.map(|number| {
                figures.extract_if(.., |figure| figure["snapshots"] == number).collect::<Figures>()
            });
            record("growth of the snapshots", pool, &points);
        }
        if table.wants("drivers") {
            drivers.push(measure(ANY_DRIVER).await);
        }
        rig.finish();
    }
    if drivers.len() == PoolKind::ALL.len() {
        drivers.push(peer());
        compare(&drivers);
    }
}

const ANY_DRIVER: &str = "--snapshots 0 --data 128Mi --write-time 1";

/// Of the first driver that PEERS names.
fn peer() -> Figures {
    let peers = std::env::var("PEERS").unwrap_or_default();
    let Some((_, place)) = peers.split(' ').next().and_then(|peer| peer.split_once('=')) else {
        return Figures::new();
    };
    let (socket, dir) = place.split_once(',').unwrap_or((place, ""));
    let space = if dir.is_empty() { String::new() } else { format!(" --space-dir {dir}") };
    // Where an answer is wrong, the figure is missing.
    figures(&lab::bench(Path::new(socket), &format!("{ANY_DRIVER}{space}")).0)
}

fn figures(result: &Value) -> Figures {
    let figures = result["figures"].as_array().expect("figures");
    figures.iter().filter(|figure| figure["unit"] != "times").cloned().collect()
}

/// A row of each time; a part of a cell is a point.
fn record(table: &str, pool: PoolKind, points: &[Figures]) {
    for figure in points[0].iter().filter(|figure| figure["unit"] == "milliseconds") {
        let same = the_same(figure, points);
        let measured: Vec<String> = same.iter().map(|figure| cell(figure, "/measured")).collect();
        let bare = same.iter().filter(|figure| figure["bare"].is_object());
        let bare: Vec<String> = bare.map(|figure| cell(figure, "/bare/measured")).collect();
        record_in(table, pool.name(), name(figure), &measured.join("; "), &bare.join("; "), "", true);
    }
}

/// A row of each figure; a part of a cell is a driver, and the bare operation is from the least to the most.
fn compare(drivers: &[Figures]) {
    for figure in &drivers[0] {
        let same = the_same(figure, drivers);
        let measured: Vec<String> = same.iter().map(|figure| cell(figure, "/measured")).collect();
        let bare = same.iter().filter_map(|figure| figure["bare"]["measured"]["median"].as_f64());
        let mut bare: Vec<f64> = bare.collect();
        bare.sort_by(f64::total_cmp);
        let bare = match bare[..] {
            [] => String::new(),
            [least, .., most] => range(least, most, figure),
            [one] => number(one, figure),
        };
        record_in("any driver", "", name(figure), &measured.join("; "), &bare, "", true);
    }
}

/// Null where it was not measured.
fn the_same(figure: &Value, all: &[Figures]) -> Vec<Value> {
    let find = |figures: &Figures| figures.iter().find(|other| other["id"] == figure["id"]).cloned();
    all.iter().map(|figures| find(figures).unwrap_or_default()).collect()
}

fn name(figure: &Value) -> &str {
    figure["what"].as_str().expect("a name")
}

fn cell(figure: &Value, spread: &str) -> String {
    let part = |name| figure.pointer(&format!("{spread}/{name}")).and_then(Value::as_f64);
    let (Some(median), Some(least), Some(most)) = (part("median"), part("min"), part("max")) else {
        return "left out".into();
    };
    format!("{} ({})", number(median, figure), range(least, most, figure))
}

/// The unit stands behind the second number alone.
fn range(least: f64, most: f64, figure: &Value) -> String {
    let (least, most) = (number(least, figure), number(most, figure));
    let unit = least.trim_start_matches(|c: char| c.is_ascii_digit() || "-.".contains(c));
    format!("{} to {most}", &least[..least.len() - unit.len()])
}

fn number(number: f64, figure: &Value) -> String {
    match figure["unit"].as_str() {
        Some("bytes") => format!("{:.1} MiB", number / f64::from(1 << 20)),
        Some("writes-per-second") => format!("{number:.0}/s"),
        _ if number >= 100.0 => format!("{number:.0} ms"),
        _ if number >= 1.0 => format!("{number:.1} ms"),
        _ => format!("{number:.2} ms"),
    }
}
