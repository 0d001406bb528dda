//! What the tables of `make bench` have in common.

use std::process::{Child, Command, Stdio};
use std::time::Duration;

/// Prints a row: what was measured, beside what, the limit, and whether it holds.
pub fn row(id: &str, what: &str, measured: &str, beside: &str, must: &str, holds: bool) {
    let verdict = if holds { "holds" } else { "MISSED" };
    println!("| {id} | {what} | {measured} | {beside} | {must} | {verdict} |");
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
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}
