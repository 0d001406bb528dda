//! `make bench`: what things cost, each figure beside a bare operation in the same run, in one table. It
//! drives a release build of the driver over gRPC, on real pools and devices. Needs root, 2 free cores and some
//! 20 GB of disk.
//!
//! `cargo bench --bench table -- a e` runs the rows that are named; without names all. `btrfs` or `xfs` beside them runs
//! the rows of one pool on that pool alone.
#![allow(clippy::disallowed_methods)]

mod changes;
mod cold;
mod crowd;
mod fragments;
mod host;
mod load;
mod pools;
mod scale;
mod single;
mod stream;

use std::time::Duration;

use testkit::PoolKind;
use testkit::bench::median;

/// The pools whose snapshots share blocks.
const SHARING: [PoolKind; 2] = [PoolKind::Xfs, PoolKind::Btrfs];

/// By how much a ratio may differ from run to run.
const WORSE: f64 = 1.25;

/// A line of the table.
struct Row {
    id: &'static str,
    what: String,
    measured: String,
    beside: String,
    must: &'static str,
    holds: bool,
}

/// The lines, printed as they come.
#[derive(Default)]
struct Table {
    wanted: Vec<String>,
    rows: Vec<Row>,
}

impl Table {
    fn wants(&self, id: &str) -> bool {
        self.wanted.is_empty() || self.wanted.iter().any(|wanted| wanted == id)
    }

    /// Whether a pool is named, or none is.
    fn wants_pool(&self, pool: PoolKind) -> bool {
        let named = |pool: &PoolKind| self.wanted.iter().any(|wanted| wanted == pool.name());
        named(&pool) || !SHARING.iter().any(named)
    }

    fn add(&mut self, row: Row) {
        eprintln!(
            "{} {}: {} | beside: {} | must be: {} | {}",
            row.id,
            row.what,
            row.measured,
            row.beside,
            row.must,
            verdict(row.holds)
        );
        self.rows.push(row);
    }

    fn print(&self) {
        println!("| # | what | measured | beside, in the same run | must be | |");
        println!("| --- | --- | --- | --- | --- | --- |");
        for row in &self.rows {
            let Row { id, what, measured, beside, must, holds } = row;
            println!("| {id} | {what} | {measured} | {beside} | {must} | {} |", verdict(*holds));
        }
    }

    /// The rows that are worse than the same rows in the docs. Times of different machines cannot be compared; ratios to a
    /// bare operation can, so the first ratio of each row is: `2.1 x` its time, or `85 %` of its speed.
    fn worse_than(&self, docs: &str) -> String {
        let mut known = 0;
        let mut worse = Vec::new();
        for row in &self.rows {
            let start = format!("| {} | {} | ", row.id, row.what);
            let old = docs.lines().find_map(|line| line.strip_prefix(&start)?.split(" | ").nth(1));
            let Some((old, new)) = old.and_then(Ratio::of).zip(Ratio::of(&row.beside)) else { continue };
            known += 1;
            if new.is_worse_than(&old) {
                worse.push(format!("{} {}: {} was {}", row.id, row.what, new, old));
            }
        }
        match worse.as_slice() {
            [] => format!("None of {known} rows is worse than in docs/benchmarks.md by more than a quarter."),
            some => format!("Worse than in docs/benchmarks.md by more than a quarter:\n{}", some.join("\n")),
        }
    }
}

/// How a figure compares with a bare operation.
enum Ratio {
    /// Times as long.
    Cost(f64),
    /// Percent as quick.
    Speed(f64),
}

impl Ratio {
    /// The first in a cell of the table.
    fn of(cell: &str) -> Option<Self> {
        let words: Vec<&str> = cell.split([' ', ';']).collect();
        words.windows(2).find_map(|pair| {
            let value = pair[0].parse().ok()?;
            match pair[1] {
                "x" => Some(Ratio::Cost(value)),
                "%" => Some(Ratio::Speed(value)),
                _ => None,
            }
        })
    }

    fn is_worse_than(&self, old: &Self) -> bool {
        match (self, old) {
            (Ratio::Cost(new), Ratio::Cost(old)) => *new > old * WORSE,
            (Ratio::Speed(new), Ratio::Speed(old)) => new * WORSE < *old,
            _ => true,
        }
    }
}

impl std::fmt::Display for Ratio {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Ratio::Cost(value) => write!(f, "{value} x"),
            Ratio::Speed(value) => write!(f, "{value} %"),
        }
    }
}

fn verdict(holds: bool) -> &'static str {
    if holds { "holds" } else { "MISSED" }
}

/// The middle one of samples, and the least and the most.
fn spread<T: PartialOrd + Copy>(samples: &[T], show: impl Fn(T) -> String) -> String {
    let mut sorted = samples.to_vec();
    sorted.sort_by(|a, b| a.partial_cmp(b).expect("figures"));
    let [least, .., most] = sorted[..] else { return show(sorted[0]) };
    format!("{} ({} to {})", show(median(samples)), show(least), show(most))
}

fn ratio(ours: Duration, bare: Duration) -> f64 {
    ours.as_secs_f64() / bare.as_secs_f64()
}

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    if let [flag, socket] = arguments.as_slice()
        && flag == stream::BARE
    {
        return stream::serve_bare(socket.as_ref());
    }
    assert!(deltapath::sys::is_root(), "the table needs root: it attaches loop devices and mounts");
    let wanted = arguments.into_iter().filter(|argument| !argument.starts_with('-')).collect();
    let mut table = Table { wanted, ..Table::default() };
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().expect("runtime");
    runtime.block_on(async {
        if ["a", "b", "b2", "c", "i"].iter().any(|id| table.wants(id)) {
            changes::run(&mut table).await;
        }
        if table.wants("d") {
            fragments::run(&mut table).await;
        }
        if table.wants("e") {
            stream::run(&mut table).await;
        }
        if table.wants("f") {
            single::hashing(&mut table);
        }
        if table.wants("g") {
            single::plain_copies(&mut table).await;
        }
        if table.wants("h") {
            single::many_snapshots(&mut table).await;
        }
        if table.wants("j") || table.wants("k") {
            cold::run(&mut table).await;
        }
        if ["l", "m", "n", "o"].iter().any(|id| table.wants(id)) {
            load::run(&mut table).await;
        }
        if table.wants("p") {
            crowd::run(&mut table).await;
        }
        if table.wants("scale") {
            scale::run(&mut table).await;
        }
        if table.wants("pools") {
            pools::run(&mut table).await;
        }
    });
    table.print();
    println!("\n{}\n\n{}", host::machine(), table.worse_than(include_str!("../../docs/benchmarks.md")));
}
