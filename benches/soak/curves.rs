//! What is measured of the driver while it works, and what may grow.

use std::path::Path;
use std::time::Duration;

use deltapath::sys::loopdev::LoopDevice;
use deltapath::sys::mount::mounts;
use deltapath::sys::sweep::devices_below;

use testkit::Rig;

/// A look at the driver.
#[derive(Clone, Debug, Default)]
pub struct Sample {
    /// Seconds since the start.
    pub at: f64,
    /// By the names of [`CURVES`].
    pub values: [f64; CURVES.len()],
}

/// What of a third is compared.
#[derive(Clone, Copy, Debug)]
enum By {
    /// The middle one of all samples.
    Median,
    /// The lowest: what is there between two pieces of work.
    Lowest,
}

struct Curve {
    name: &'static str,
    by: By,
    /// How far the last third may be above the middle one: by this part of it, and by `more`.
    part: f64,
    more: f64,
    why: &'static str,
}

/// Everything that could leak. All is held on one process, in the last two thirds.
const CURVES: [Curve; 6] = [
    Curve {
        name: "RSS MiB",
        by: By::Median,
        part: 0.10,
        more: 8.0,
        why: "malloc keeps what a burst needed; 8 MiB are the buffers of a handful of streams",
    },
    Curve {
        name: "open fds",
        by: By::Lowest,
        part: 0.0,
        more: 6.0,
        why: "between two calls only sockets, lock and epoll are open; a call under way holds some files",
    },
    Curve {
        name: "threads",
        by: By::Median,
        part: 0.25,
        more: 8.0,
        why: "blocking threads come with calls and go 10 s after their last",
    },
    Curve {
        name: "loop devices",
        by: By::Median,
        part: 0.10,
        more: 3.0,
        why: "one a volume and the pool's; a restored volume has one while it is compared",
    },
    Curve {
        name: "mounts",
        by: By::Median,
        part: 0.15,
        more: 4.0,
        why: "one a raw volume, two a filesystem, and the pool's; a restored one while it is compared",
    },
    Curve {
        name: "staging files",
        by: By::Lowest,
        part: 0.0,
        more: 2.0,
        why: "an object is there only while it is made or removed",
    },
];

/// The loop devices on files of the driver, whose data directory may be a link to another disk.
pub fn devices(rig: &Rig) -> Vec<LoopDevice> {
    let dir = rig.data_dir().canonicalize();
    dir.map_or(Vec::new(), |dir| devices_below(&dir).unwrap_or_default())
}

impl Sample {
    /// Looks at the rig's driver, which runs.
    pub fn take(rig: &Rig, at: f64) -> Self {
        let process = format!("/proc/{}", rig.pid());
        let status = std::fs::read_to_string(format!("{process}/status")).unwrap_or_default();
        let number = |name: &str| {
            let line = status.lines().find_map(|line| line.strip_prefix(name)).unwrap_or_default();
            line.trim_matches(|c: char| !c.is_ascii_digit()).parse::<f64>().unwrap_or(0.0)
        };
        let dir = rig.dir.path();
        let mounts = mounts().map_or(0, |all| all.iter().filter(|m| m.mount_point.starts_with(dir)).count());
        let values = [
            number("VmRSS:") / 1024.0,
            entries(format!("{process}/fd").as_ref()),
            number("Threads:"),
            devices(rig).len() as f64,
            mounts as f64,
            entries(&rig.pool_dir().join("staging")),
        ];
        Sample { at, values }
    }

    pub fn open_files(&self) -> f64 {
        self.values[1]
    }

    /// All in a line.
    pub fn describe(&self) -> String {
        let [rss, fds, threads, loops, mounts, staging] = self.values;
        format!(
            "RSS {rss:.1} MiB, {fds} fds, {threads} threads, {loops} loops, {mounts} mounts, {staging} staging"
        )
    }
}

pub fn entries(dir: &Path) -> f64 {
    std::fs::read_dir(dir).map_or(0, Iterator::count) as f64
}

/// All samples of a run.
#[derive(Debug, Default)]
pub struct Curves {
    pub samples: Vec<Sample>,
    /// When the last process started: what was before counts for nothing.
    pub steady_from: f64,
    pub length: f64,
}

impl Curves {
    /// The samples between two parts of the run, of one curve. The first fifth of a second third is left out: a
    /// process that has just started is still to grow to its size.
    fn values(&self, curve: usize, from: f64, to: f64) -> Vec<f64> {
        let within = |sample: &&Sample| sample.at >= from * self.length && sample.at < to * self.length;
        self.samples.iter().filter(within).map(|sample| sample.values[curve]).collect()
    }

    fn thirds(&self, curve: usize) -> [Vec<f64>; 3] {
        let third = 1.0 / 3.0;
        let middle = (self.steady_from / self.length).max(third) + third / 5.0;
        [
            self.values(curve, 0.0, third),
            self.values(curve, middle, 2.0 * third),
            self.values(curve, 2.0 * third, 1.0),
        ]
    }

    /// What grew more than it may.
    pub fn leaks(&self) -> Vec<String> {
        let mut leaks = Vec::new();
        for (number, curve) in CURVES.iter().enumerate() {
            let [_, middle, last] = self.thirds(number).map(|values| curve.by.of(&values));
            let bound = middle * (1.0 + curve.part) + curve.more;
            let Curve { name, .. } = curve;
            if middle.is_nan() || last.is_nan() {
                leaks.push(format!("{name}: too few samples to judge"));
            } else if last > bound {
                leaks.push(format!("{name} grew from {middle:.1} to {last:.1}, the bound is {bound:.1}"));
            }
        }
        leaks
    }

    /// Prints the table and returns the leaks.
    pub fn print(&self, took: Duration) -> Vec<String> {
        println!("\nafter {} s, {} samples of the driver:\n", took.as_secs(), self.samples.len());
        println!("| curve | first third | middle third | last third | an hour adds | may be | why |");
        println!("| --- | --- | --- | --- | --- | --- | --- |");
        for (number, curve) in CURVES.iter().enumerate() {
            let Curve { name, by, part, more, why } = curve;
            let [first, middle, last] = self.thirds(number).map(|values| by.of(&values));
            let slope = self.slope(number) * 3600.0;
            let bound = middle * (1.0 + part) + more;
            println!(
                "| {name}, {by:?} | {first:.1} | {middle:.1} | {last:.1} | {slope:+.1} | {bound:.1} | {why} |"
            );
        }
        println!();
        self.leaks()
    }

    /// What a second adds, of the straight line through the last two thirds.
    fn slope(&self, curve: usize) -> f64 {
        let from = self.steady_from.max(self.length / 3.0);
        let points: Vec<(f64, f64)> =
            self.samples.iter().filter(|s| s.at >= from).map(|s| (s.at, s.values[curve])).collect();
        let count = points.len() as f64;
        let (mean_x, mean_y) = points.iter().fold((0.0, 0.0), |(x, y), point| (x + point.0, y + point.1));
        let (mean_x, mean_y) = (mean_x / count, mean_y / count);
        let over: f64 = points.iter().map(|(x, y)| (x - mean_x) * (y - mean_y)).sum();
        let under: f64 = points.iter().map(|(x, _)| (x - mean_x).powi(2)).sum();
        over / under
    }
}

impl By {
    fn of(self, values: &[f64]) -> f64 {
        let mut sorted = values.to_vec();
        sorted.sort_by(f64::total_cmp);
        let at = match self {
            By::Median => sorted.len() / 2,
            By::Lowest => 0,
        };
        sorted.get(at).copied().unwrap_or(f64::NAN)
    }
}
