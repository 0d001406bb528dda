//! What the tables of `make bench` have in common.

#[cfg(test)]
mod charts;
pub mod compare;

use std::fs::File;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use files::AlignedBuffer;
use serde_json::{Value, json};

/// A row: what was measured, what it is compared with, the limit, and whether it holds.
pub struct Row {
    pub id: &'static str,
    pub what: String,
    pub measured: String,
    pub beside: String,
    pub must: &'static str,
    pub holds: bool,
}

/// The row of a table in Markdown.
impl std::fmt::Display for Row {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Row { id, what, measured, beside, must, holds } = self;
        write!(f, "| {id} | {what} | {measured} | {beside} | {must} | {} |", verdict(*holds))
    }
}

/// The heads of the columns.
pub const HEADS: &str = "| # | What | Measured | Compared with, in the same run | Must be | |\n| --- | --- | --- | --- | --- | --- |";

fn verdict(holds: bool) -> &'static str {
    if holds { "holds" } else { "MISSED" }
}

/// Prints a row, and records it.
pub fn row(id: &str, what: &str, measured: &str, beside: &str, must: &str, holds: bool) {
    println!("| {id} | {what} | {measured} | {beside} | {must} | {} |", verdict(holds));
    record(id, what, measured, beside, must, holds);
}

/// Writes a row into target/bench.json. The table is the name of the bench.
pub fn record(id: &str, what: &str, measured: &str, beside: &str, must: &str, holds: bool) {
    let program = std::env::current_exe().expect("this program");
    let table = program.file_name().and_then(|name| name.to_str()?.split('-').next()).expect("a name");
    record_in(table, id, what, measured, beside, must, holds);
}

/// The same, in another table.
pub fn record_in(table: &str, id: &str, what: &str, measured: &str, beside: &str, must: &str, holds: bool) {
    // target/release/deps/BENCH-HASH
    let program = std::env::current_exe().expect("this program");
    let target = program.ancestors().nth(3).expect("the directory of the build");
    let row = json!({
        "table": table, "id": id, "what": what, "measured": measured, "beside": beside, "must": must, "holds": holds
    });
    put(&target.join("bench.json"), row);
}

/// In place of an earlier row that measured the same.
fn put(file: &Path, row: Value) {
    let mut rows: Vec<Value> =
        std::fs::read(file).map_or_else(|_| Vec::new(), |text| serde_json::from_slice(&text).expect("JSON"));
    rows.retain(|old| ["table", "id", "what"].iter().any(|key| old[key] != row[key]));
    rows.push(row);
    let lines: Vec<String> = rows.iter().map(Value::to_string).collect();
    std::fs::write(file, format!("[\n{}\n]\n", lines.join(",\n"))).expect("write");
}

#[cfg(test)]
#[test]
fn a_row_replaces_the_one_that_measured_the_same() {
    let dir = tempfile::tempdir().expect("a directory");
    let file = dir.path().join("bench.json");
    let row = |id: &str, measured: &str| json!({ "table": "t", "id": id, "what": "w", "measured": measured });
    for (id, measured) in [("a", "1 ms"), ("b", "2 ms"), ("a", "3 ms")] {
        put(&file, row(id, measured));
    }
    let rows: Vec<Value> = serde_json::from_slice(&std::fs::read(&file).expect("read")).expect("JSON");
    assert_eq!(rows, [row("b", "2 ms"), row("a", "3 ms")]);
}

pub fn median<T: PartialOrd + Copy>(samples: &[T]) -> T {
    let mut sorted = samples.to_vec();
    sorted.sort_by(|a, b| a.partial_cmp(b).expect("no sample is NaN"));
    sorted[sorted.len() / 2]
}

pub fn ms(time: Duration) -> String {
    format!("{:.2} ms", time.as_secs_f64() * 1e3)
}

/// A process that ends with this.
pub struct Process(pub Child);

impl Process {
    pub fn start(command: &mut Command) -> Self {
        Process(command.stdin(Stdio::null()).spawn().expect("start a program"))
    }

    /// The bench itself, with these arguments.
    pub fn of_this(arguments: &[&str]) -> Self {
        Self::start(Command::new(std::env::current_exe().expect("this program")).args(arguments))
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Writes noise to a device or file from its start on, past the page cache and in order, and flushes it.
pub fn write_direct(path: &Path, bytes: u64) -> Duration {
    const PIECE: usize = 1 << 20;
    let mut options = File::options();
    options.write(true).create(true).truncate(false).custom_flags(libc::O_DIRECT);
    let file = options.open(path).expect("open for direct I/O");
    let mut piece = AlignedBuffer::new(PIECE);
    fastrand::Rng::with_seed(bytes).fill(&mut piece);
    let began = Instant::now();
    for offset in (0..bytes).step_by(PIECE) {
        piece[..8].copy_from_slice(&offset.to_le_bytes());
        file.write_all_at(&piece, offset).expect("write");
    }
    file.sync_all().expect("flush");
    began.elapsed()
}

/// The time that a process has had of a processor, in ticks.
pub fn ticks(pid: u32) -> u64 {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).expect("stat");
    // Behind the name, which may hold blanks: utime and stime are the fields 14 and 15 of all.
    let (_, fields) = stat.rsplit_once(") ").expect("a name");
    fields.split(' ').skip(11).take(2).map(|field| field.parse::<u64>().expect("ticks")).sum()
}
