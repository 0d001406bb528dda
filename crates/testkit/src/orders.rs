//! Orders to the fail points of a driver (`files::failpoint`), which was built with the cargo feature `failpoints`.

use std::path::{Path, PathBuf};
use std::time::Duration;

use tokio::task::JoinHandle;

/// What is done at a point.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cut {
    Kill,
    /// The step fails with this error number, once.
    Error(i32),
}

/// A point that the driver passed, or was stopped at.
#[derive(Clone, Debug)]
pub struct Point {
    pub number: u64,
    pub hit: bool,
    pub step: String,
    pub path: PathBuf,
}

/// More steps than any call has.
const BEYOND: u64 = 1 << 20;

/// The orders to a driver below `dir`.
pub struct Orders {
    file: PathBuf,
    number: u64,
}

impl Orders {
    pub fn new(dir: &Path) -> Self {
        Orders { file: dir.join("failpoints"), number: 0 }
    }

    /// From now on, the `at`th step of `whose` threads is cut.
    pub fn give(&mut self, cut: Cut, at: u64, whose: &str) {
        match cut {
            Cut::Kill => self.write(&format!("kill {at} {whose}")),
            Cut::Error(errno) => self.write(&format!("error {at} {whose} {errno}")),
        }
    }

    /// From now on, the `at`th step of `whose` threads is delayed by this number of milliseconds.
    pub fn hold(&mut self, at: u64, whose: &str, ms: u32) {
        self.write(&format!("hold {at} {whose} {ms}"));
    }

    /// From now on, the thread of `whose` that comes to the `at`th step panics.
    pub fn panic(&mut self, at: u64, whose: &str) {
        self.write(&format!("panic {at} {whose}"));
    }

    /// From now on, the points of calls are counted, and none is cut.
    pub fn count(&mut self) {
        self.give(Cut::Kill, BEYOND, "calls");
    }

    /// Waits until a step of `call` is held.
    pub async fn reached<T>(&self, call: &JoinHandle<T>) {
        while !self.passed().iter().any(|point| point.hit) {
            assert!(!call.is_finished(), "the call ends without passing the step");
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    }

    fn write(&mut self, order: &str) {
        self.number += 1;
        let fresh = self.file.with_extension("fresh");
        std::fs::write(&fresh, format!("{} {order}\n", self.number)).expect("write");
        std::fs::rename(&fresh, &self.file).expect("rename");
    }

    /// Takes the order back, and returns the points that were passed under it.
    pub fn withdraw(&self) -> Vec<Point> {
        std::fs::remove_file(&self.file).expect("remove");
        self.passed()
    }

    /// The points that were passed so far.
    pub fn passed(&self) -> Vec<Point> {
        let log = std::fs::read_to_string(self.file.with_extension("log")).unwrap_or_default();
        // The driver may be in the middle of its last line.
        let whole = log.split_inclusive('\n').filter_map(|line| line.strip_suffix('\n'));
        let points = whole.filter_map(|line| {
            let fields: Vec<&str> = line.split('\t').collect();
            let [order, number, word, step, path] = fields[..] else { panic!("the log says {line:?}") };
            (order.parse() == Ok(self.number)).then(|| Point {
                number: number.parse().expect("a number"),
                hit: word == "hit",
                step: step.to_owned(),
                path: path.into(),
            })
        });
        points.collect()
    }
}
