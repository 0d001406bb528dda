//! `make bench`: what things cost, each figure beside a bare operation in the same run, in one table. It
//! drives a release build of the driver over gRPC, on real pools and devices. Needs root, 2 free cores and some
//! 20 GB of disk.
//!
//! `cargo bench --bench table -- a e` runs the rows that are named; without names all. `btrfs` or `xfs` beside them runs
//! rows a, b, c, i, j and k on that pool alone.
#![allow(clippy::disallowed_methods)]

mod changes;
mod cold;
mod fragments;
mod host;
mod pools;
mod single;
mod stream;

use std::time::Duration;

use testkit::PoolKind;

/// The pools whose snapshots share blocks.
const SHARING: [PoolKind; 2] = [PoolKind::Xfs, PoolKind::Btrfs];

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
}

fn verdict(holds: bool) -> &'static str {
    if holds { "holds" } else { "MISSED" }
}

/// The middle one of an odd number of samples.
fn median<T: PartialOrd + Copy>(samples: &[T]) -> T {
    let mut sorted = samples.to_vec();
    sorted.sort_by(|a, b| a.partial_cmp(b).expect("figures"));
    sorted[sorted.len() / 2]
}

fn ms(time: Duration) -> String {
    format!("{:.1} ms", time.as_secs_f64() * 1e3)
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
        if table.wants("pools") {
            pools::run(&mut table).await;
        }
    });
    table.print();
    println!("\n{}", host::machine());
}
