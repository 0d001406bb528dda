//! Figures with their spread, and the result of a whole run, as it is kept in a file. It measures nothing and prints nothing.

use std::fmt;
use std::path::Path;

use base::Quantity;
use serde::{Deserialize, Serialize};

/// What a number counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum Unit {
    Milliseconds,
    Bytes,
    WritesPerSecond,
    /// A ratio.
    Times,
}

impl Unit {
    /// A number for a person.
    pub fn text(self, number: f64) -> String {
        match self {
            Unit::Milliseconds if number.abs() >= 10_000.0 => format!("{:.1} s", number / 1000.0),
            Unit::Milliseconds if number.abs() >= 100.0 => format!("{number:.0} ms"),
            Unit::Milliseconds => format!("{number:.1} ms"),
            Unit::Bytes => bytes(number),
            Unit::WritesPerSecond => format!("{number:.0}/s"),
            Unit::Times => format!("{number:.2} x"),
        }
    }

    /// The median of several runs, and from the least to the most.
    pub fn spread(self, Spread { median, min, max, .. }: &Spread) -> String {
        let [median, min, max] = [median, min, max].map(|number| self.text(*number));
        format!("{median} ({min} to {max})")
    }
}

fn bytes(number: f64) -> String {
    let units = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
    let mut left = number;
    let mut unit = 0;
    while left.abs() >= 1024.0 && unit + 1 < units.len() {
        left /= 1024.0;
        unit += 1;
    }
    match unit {
        0 => format!("{left:.0} B"),
        _ => format!("{left:.1} {}", units[unit]),
    }
}

/// Numbers of several runs.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct Spread {
    pub median: f64,
    pub min: f64,
    pub max: f64,
    /// One a run, in their order.
    pub samples: Vec<f64>,
}

impl Spread {
    /// None of no samples.
    pub fn of(samples: &[f64]) -> Option<Self> {
        let mut sorted = samples.to_vec();
        sorted.sort_by(f64::total_cmp);
        let (min, max) = (*sorted.first()?, *sorted.last()?);
        let middle = sorted.len() / 2;
        let median = match sorted.len() % 2 {
            0 => f64::midpoint(sorted[middle - 1], sorted[middle]),
            _ => sorted[middle],
        };
        Some(Spread { median, min, max, samples: samples.to_vec() })
    }
}

/// Why a figure has no number.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Missing {
    pub kind: Why,
    pub why: String,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum Why {
    /// The driver answered, and the answer is wrong.
    Wrong,
    /// A call failed.
    Failed,
    /// The driver does not do or tell it.
    LeftOut,
}

impl fmt::Display for Missing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kind = match self.kind {
            Why::Wrong => "wrong answer, no figure",
            Why::Failed => "failed",
            Why::LeftOut => "left out",
        };
        write!(f, "{kind}: {}", self.why)
    }
}

/// Something else that does the same to the same bytes.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct Bare {
    pub what: String,
    pub measured: Spread,
}

/// What is measured, and on what.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Spot {
    /// Short and stable over versions: results are compared by it.
    pub id: String,
    pub what: String,
    pub unit: Unit,
    /// Of the volume.
    pub size: u64,
    /// How many snapshots the volume has already, where that is what changes.
    pub snapshots: Option<u64>,
}

impl Spot {
    /// Whether both are about the same, in two results.
    pub fn is(&self, other: &Spot) -> bool {
        (&self.id, self.size, self.snapshots) == (&other.id, other.size, other.snapshots)
    }

    /// The volume, for a heading.
    pub fn place(&self) -> String {
        let size = Quantity(self.size);
        match self.snapshots {
            None => format!("{size}"),
            Some(1) => format!("{size}, 1 snapshot there"),
            Some(count) => format!("{size}, {count} snapshots there"),
        }
    }
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct Figure {
    #[serde(flatten)]
    pub spot: Spot,
    pub measured: Option<Spread>,
    pub bare: Option<Bare>,
    pub missing: Option<Missing>,
}

impl Figure {
    /// How many times the bare operation, or what part of it.
    pub fn times_bare(&self) -> Option<f64> {
        let (measured, bare) = (self.measured.as_ref()?, self.bare.as_ref()?);
        (bare.measured.median > 0.0).then(|| measured.median / bare.measured.median)
    }
}

/// All samples of a run, while it is under way.
#[derive(Debug, Default)]
pub(super) struct Book(Vec<Row>);

#[derive(Debug)]
struct Row {
    spot: Spot,
    samples: Vec<f64>,
    bare: Option<(String, Vec<f64>)>,
    missing: Option<Missing>,
}

impl Book {
    fn row(&mut self, spot: &Spot) -> &mut Row {
        let at = self.0.iter().position(|row| row.spot.is(spot)).unwrap_or_else(|| {
            self.0.push(Row { spot: spot.clone(), samples: Vec::new(), bare: None, missing: None });
            self.0.len() - 1
        });
        &mut self.0[at]
    }

    pub fn sample(&mut self, spot: &Spot, number: f64) {
        self.row(spot).samples.push(number);
    }

    pub fn bare(&mut self, spot: &Spot, what: &str, number: f64) {
        let bare = self.row(spot).bare.get_or_insert_with(|| (what.to_owned(), Vec::new()));
        bare.1.push(number);
    }

    /// The driver's answer is wrong: no run's number counts.
    pub fn wrong(&mut self, spot: &Spot, why: impl fmt::Display) {
        let row = self.row(spot);
        if row.missing.as_ref().is_none_or(|missing| missing.kind != Why::Wrong) {
            row.missing = Some(Missing { kind: Why::Wrong, why: why.to_string() });
        }
    }

    /// Notes the first reason that there is.
    fn missing(&mut self, spot: &Spot, kind: Why, why: impl fmt::Display) {
        self.row(spot).missing.get_or_insert_with(|| Missing { kind, why: why.to_string() });
    }

    pub fn failed(&mut self, spot: &Spot, why: impl fmt::Display) {
        self.missing(spot, Why::Failed, why);
    }

    /// What a driver does in one run and does not in another has failed.
    pub fn left_out(&mut self, spot: &Spot, why: impl fmt::Display) {
        let kind = if self.row(spot).samples.is_empty() { Why::LeftOut } else { Why::Failed };
        self.missing(spot, kind, why);
    }

    /// The driver's answers give no figure, in one run at least.
    pub fn no_figure(&mut self, spot: &Spot, why: impl fmt::Display) {
        self.missing(spot, Why::LeftOut, why);
    }

    pub fn figures(&self) -> Vec<Figure> {
        let figure = |row: &Row| Figure {
            spot: row.spot.clone(),
            measured: Spread::of(&row.samples).filter(|_| row.missing.is_none()),
            bare: row.bare.as_ref().and_then(|(what, samples)| {
                Spread::of(samples).map(|measured| Bare { what: what.clone(), measured })
            }),
            missing: row.missing.clone(),
        };
        self.0.iter().map(figure).collect()
    }
}

/// How it was measured.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct Conditions {
    /// When it began, RFC 3339.
    pub when: String,
    pub cpus: usize,
    pub kernel: String,
    /// Programs that wanted a processor, in the minute before it began and before it ended.
    pub load: [f64; 2],
    pub runs: u64,
    /// Bytes that are written before the first snapshot.
    pub data: u64,
    /// Parameters of the StorageClass and of the VolumeSnapshotClass.
    pub parameters: Vec<String>,
    pub seconds: f64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum Verdict {
    /// All that the driver does and tells was measured, and is right.
    Right,
    /// An answer is wrong.
    Wrong,
    /// No answer is wrong, and a call failed.
    Failed,
    Interrupted,
}

/// A run on a driver.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct Outcome {
    /// What tells it from others next to it: the name of its file.
    #[serde(skip)]
    pub label: Option<String>,
    /// The version of cbt-lab.
    pub lab: String,
    pub driver: String,
    pub version: String,
    pub verdict: Verdict,
    pub conditions: Conditions,
    pub figures: Vec<Figure>,
    /// What stopped a run, apart from what the figures say.
    pub troubles: Vec<String>,
    pub left_behind: Vec<String>,
}

impl Outcome {
    /// Reads what `--json` or `--output json` wrote.
    pub fn read(path: &Path) -> Result<Self, String> {
        crate::output::before(path, "result of cbt-lab bench --json")
    }

    pub fn is_good(&self) -> bool {
        self.verdict == Verdict::Right && self.left_behind.is_empty()
    }

    pub fn verdict_of(figures: &[Figure], troubles: &[String]) -> Verdict {
        let any = |kind: Why| {
            figures.iter().any(|figure| figure.missing.as_ref().is_some_and(|missing| missing.kind == kind))
        };
        let nothing = !figures.iter().any(|figure| figure.measured.is_some());
        match (any(Why::Wrong), any(Why::Failed) || nothing || !troubles.is_empty()) {
            (true, _) => Verdict::Wrong,
            (false, true) => Verdict::Failed,
            (false, false) => Verdict::Right,
        }
    }

    pub fn find(&self, spot: &Spot) -> Option<&Figure> {
        self.figures.iter().find(|figure| figure.spot.is(spot))
    }
}

/// The spots of all results, in the order of the first that has each.
pub(super) fn spots(results: &[Outcome]) -> Vec<&Spot> {
    let mut spots: Vec<&Spot> = Vec::new();
    for figure in results.iter().flat_map(|result| &result.figures) {
        if !spots.iter().any(|spot| spot.is(&figure.spot)) {
            spots.push(&figure.spot);
        }
    }
    // Several sizes one after another, each with its growth by snapshots.
    spots.sort_by_key(|spot| (spot.size, spot.snapshots));
    spots
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    /// A result with a snapshot's time and a delta's, which may be wrong.
    pub(in super::super) fn result(driver: &str, wrong: bool) -> Outcome {
        let mut book = Book::default();
        for number in [2.0, 1.0, 3.0] {
            book.sample(&spot("snapshot-first"), number);
            book.bare(&spot("snapshot-first"), "a copy", 4.0 * number);
            book.sample(&spot("delta"), number);
            book.sample(&Spot { size: 2 << 30, ..spot("snapshot-first") }, 2.0 * number);
            for count in [1, 10, 100] {
                let spot = Spot { snapshots: Some(count), ..spot("many-snapshot") };
                book.sample(&spot, number * count as f64);
            }
        }
        if wrong {
            book.wrong(&spot("delta"), "4096 bytes, \"changed\"");
        }
        let figures = book.figures();
        Outcome {
            label: None,
            lab: "0".into(),
            driver: driver.into(),
            version: "1".into(),
            verdict: Outcome::verdict_of(&figures, &[]),
            conditions: Conditions {
                when: "2026-01-01T00:00Z".into(),
                cpus: 2,
                kernel: "6".into(),
                load: [0.0, 1.0],
                runs: 3,
                data: 1 << 20,
                parameters: Vec::new(),
                seconds: 1.0,
            },
            figures,
            troubles: Vec::new(),
            left_behind: Vec::new(),
        }
    }

    #[test]
    fn a_result_is_read_as_it_was_written() {
        let dir = tempfile::tempdir().expect("temp dir");
        let path = dir.path().join("a.json");
        let wrong = result("a", true);
        std::fs::write(&path, serde_json::to_string(&wrong).expect("JSON")).expect("write");
        assert_eq!(Outcome::read(&path).expect("read"), wrong);
        std::fs::write(&path, "{}").expect("write");
        let error = Outcome::read(&path).expect_err("no result");
        assert!(error.contains("a.json") && error.contains("no result of cbt-lab bench"), "{error}");
    }

    #[test]
    fn sizes_come_one_after_another_and_then_their_growth() {
        let all = [result("a", false)];
        let shown: Vec<_> = spots(&all).iter().map(|spot| spot.place()).collect();
        let places = ["1Gi", "1Gi", "1Gi, 1 snapshot there", "1Gi, 10 snapshots there"];
        assert_eq!(shown[..4], places);
        assert_eq!(shown.last().map(String::as_str), Some("2Gi"));
    }

    fn spot(id: &str) -> Spot {
        Spot {
            id: id.into(),
            what: id.to_uppercase(),
            unit: Unit::Milliseconds,
            size: 1 << 30,
            snapshots: None,
        }
    }

    #[test]
    fn a_spread_is_of_all_runs() {
        let spread = |samples: &[f64]| {
            let spread = Spread::of(samples).expect("samples");
            (spread.median, spread.min, spread.max)
        };
        assert_eq!(spread(&[3.0, 1.0, 2.0]), (2.0, 1.0, 3.0));
        assert_eq!(spread(&[4.0, 1.0, 2.0, 3.0]), (2.5, 1.0, 4.0));
        assert_eq!(spread(&[7.0]), (7.0, 7.0, 7.0));
        assert_eq!(Spread::of(&[]), None);
    }

    /// One wrong run takes the number of all, whatever came before or comes later.
    #[test]
    fn what_is_wrong_once_has_no_number() {
        let mut book = Book::default();
        for run in 0..3 {
            book.sample(&spot("delta"), 1.0);
            book.bare(&spot("delta"), "bare", 2.0);
            if run == 1 {
                book.failed(&spot("delta"), "late");
                book.wrong(&spot("delta"), "4096 bytes are in no tuple");
            }
            book.sample(&spot("restore"), 5.0);
        }
        let figures = book.figures();
        assert_eq!(figures[0].measured, None);
        let why = figures[0].missing.as_ref().map(ToString::to_string);
        assert_eq!(why.as_deref(), Some("wrong answer, no figure: 4096 bytes are in no tuple"));
        assert_eq!(figures[0].bare.as_ref().map(|bare| bare.measured.samples.len()), Some(3));
        assert_eq!(figures[1].measured.as_ref().map(|measured| measured.median), Some(5.0));
        assert_eq!(Outcome::verdict_of(&figures, &[]), Verdict::Wrong);
        assert_eq!(Outcome::verdict_of(&figures[1..], &[]), Verdict::Right);
        assert_eq!(Outcome::verdict_of(&figures[1..], &["late".into()]), Verdict::Failed);
        assert_eq!(Outcome::verdict_of(&[], &[]), Verdict::Failed);
    }

    #[test]
    fn what_works_in_one_run_alone_is_not_left_out_but_failed() {
        let mut book = Book::default();
        book.left_out(&spot("clone"), "not claimed");
        book.sample(&spot("create"), 1.0);
        book.left_out(&spot("create"), "no space");
        let kinds: Vec<_> = book.figures().into_iter().map(|figure| figure.missing.map(|m| m.kind)).collect();
        assert_eq!(kinds, [Some(Why::LeftOut), Some(Why::Failed)]);
    }

    #[test]
    fn numbers_read_well() {
        let texts = [
            (Unit::Milliseconds, 0.04, "0.0 ms"),
            (Unit::Milliseconds, 99.94, "99.9 ms"),
            (Unit::Milliseconds, 512.2, "512 ms"),
            (Unit::Milliseconds, 18_900.0, "18.9 s"),
            (Unit::Bytes, 4096.0, "4.0 KiB"),
            (Unit::Bytes, -2_097_152.0, "-2.0 MiB"),
            (Unit::WritesPerSecond, 1234.5, "1234/s"),
            (Unit::Times, 1.0, "1.00 x"),
        ];
        for (unit, number, text) in texts {
            assert_eq!(unit.text(number), text);
        }
    }
}
