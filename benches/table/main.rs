//! `make bench`: what things cost, each figure beside a bare operation in the same run, in one table. It
//! drives a release build of the driver over gRPC, on real pools and devices. Needs root, 2 free cores and some
//! 20 GB of disk.
//!
//! `cargo bench --bench table -- a e` runs the rows that are named; without names all. `scale` names `scale-volumes`,
//! `scale-chain` and `scale-huge`, and `growth` names `growth-volume`, `growth-data` and `growth-snapshots`. `btrfs`, `xfs` or `dir`, alone or beside them, runs the rows of one pool on that pool alone.
#![allow(clippy::disallowed_methods)]

mod changes;
mod cold;
mod crowd;
mod far;
mod fragments;
mod growth;
mod host;
mod lab;
mod load;
mod pools;
mod scale;
mod single;
mod stream;
mod tuned;
mod work;

use std::time::Duration;

use testkit::PoolKind;
use testkit::bench::{HEADS, Row, compare, median, record};

/// The pools whose snapshots share blocks.
const SHARING: [PoolKind; 2] = [PoolKind::Xfs, PoolKind::Btrfs];

/// What the rows are compared with.
const EARLIER: &str = "docs/benchmarks.json";

/// The rows, printed as they come, and all together in the end: also where a later one panics.
struct Table {
    wanted: Vec<String>,
    rows: Vec<Row>,
}

impl Table {
    /// Whether a row is named, or the family that it is one of (`scale` of `scale-huge`), or none is.
    fn wants(&self, id: &str) -> bool {
        let is_pool = |wanted: &&String| PoolKind::ALL.iter().any(|pool| *wanted == pool.name());
        let mut named = self.wanted.iter().filter(|wanted| !is_pool(wanted)).peekable();
        let is_it = |wanted: &String| {
            id.strip_prefix(wanted.as_str()).is_some_and(|rest| rest.is_empty() || rest.starts_with('-'))
        };
        named.peek().is_none() || named.any(is_it)
    }

    /// Those of some pools that are wanted: the named ones, or all where none is named.
    fn pools(&self, some: &[PoolKind]) -> Vec<PoolKind> {
        let named = |pool: &PoolKind| self.wanted.iter().any(|wanted| wanted == pool.name());
        let all = !PoolKind::ALL.iter().any(named);
        some.iter().copied().filter(|pool| all || named(pool)).collect()
    }

    /// The pools whose snapshots share blocks, of those that are wanted.
    fn sharing(&self) -> Vec<PoolKind> {
        self.pools(&SHARING)
    }

    fn add(&mut self, row: Row) {
        eprintln!("{row}");
        record(row.id, &row.what, &row.measured, &row.beside, row.must, row.holds);
        self.rows.push(row);
    }
}

impl Drop for Table {
    fn drop(&mut self) {
        println!("{HEADS}");
        for row in &self.rows {
            println!("{row}");
        }
        let earlier: Vec<serde_json::Value> =
            serde_json::from_str(include_str!("../../docs/benchmarks.json")).expect("JSON");
        println!("\n{}\n\n{}", host::machine(), compare::report(&self.rows, &earlier, EARLIER));
    }
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
    let mut table = Table { wanted, rows: Vec::new() };
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().expect("runtime");
    runtime.block_on(async {
        if changes::IDS.iter().any(|id| table.wants(id)) {
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
        if ["l", "m", "n", "o", "r"].iter().any(|id| table.wants(id)) {
            load::run(&mut table).await;
        }
        if table.wants("s") {
            tuned::run(&mut table).await;
        }
        if table.wants("p") {
            crowd::run(&mut table).await;
        }
        if table.wants("lab") {
            lab::run(&mut table).await;
        }
        // It takes a quarter of an hour, and so is not among all rows.
        if table.wanted.iter().any(|wanted| wanted == "far") {
            far::run(&table).await;
        }
        if growth::IDS.iter().any(|id| table.wants(id)) {
            growth::run(&table).await;
        }
        scale::run(&mut table).await;
        if table.wants("pools") {
            pools::run(&mut table).await;
        }
    });
}
