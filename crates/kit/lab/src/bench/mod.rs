//! `cbt-lab bench`: what the snapshots of any CSI driver cost, and what the same costs without one.
//!
//! - `life.rs` is what is measured, and `growth.rs` with many snapshots, in the steps of `steps.rs` on a volume of `subject.rs`;
//!   `writes.rs` is the workload, `bare.rs` the same without a driver, `check.rs` judges the answers.
//! - `figures.rs` holds what came out; `show.rs` and `page.rs` print it.
//! - How a driver is called, and how all is taken away again, is shared with `conformance`.

mod bare;
mod check;
mod figures;
mod growth;
mod life;
mod page;
mod plan;
mod progress;
mod show;
mod steps;
mod subject;
mod writes;

use std::error::Error;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use base::{Endpoint, Quantity};
use clap::Args;
use shell::Usage;
use tokio::sync::watch;

use super::{Done, Output};
use crate::conformance::claims::Claims;
use crate::conformance::content::at_rest;
use crate::conformance::plugin::Plugin;
use crate::conformance::{Begun, Storage, remove_empty};
use crate::output::{check, write};
use figures::{Book, Conditions, Outcome, Verdict};
use plan::Plan;
use progress::Progress;
use steps::Bench;

/// How long threads may take to let go of devices.
const REST: Duration = Duration::from_secs(10);

/// Measure what the snapshots of any CSI driver cost.
///
/// Creates Block volumes through the driver's socket, publishes them and writes to them. It measures create, snapshot (the first, and
/// after some of the data changed), allocated, delta (at once and later), restore, clone and delete. It also measures the space that they
/// take, and the rate of random writes before, while and after a snapshot is taken. Over the sizes of --size, and, on the first of them, with
/// the numbers of snapshots of --snapshots, so that growth is seen. Each figure is the median of --runs, with the least and the most.
///
/// All answers are checked against what was written: a figure whose answer was wrong once is not given. What a driver does not claim
/// or report is left out, with the reason. With --bare-dir the same is done to a plain file. Needs root, and to see the driver's mounts
/// and devices; takes away all that it makes.
///
/// Exit codes: 0 everything that the driver supports was measured, 1 an answer is wrong, a call failed or something is left behind, 2 it could
/// not run, or nothing could be measured, 130 interrupted.
#[derive(Debug, Args)]
pub(super) struct Arguments {
    /// Socket of the driver; of its node plugin, where that is another process than the controller's.
    #[arg(long, value_name = "ENDPOINT", env = "CSI_ENDPOINT", required_unless_present = "compare")]
    endpoint: Option<Endpoint>,
    /// Socket of the controller plugin, which serves Identity, Controller and SnapshotMetadata. Default: the
    /// same as --endpoint.
    #[arg(long, value_name = "ENDPOINT", requires = "endpoint")]
    controller_endpoint: Option<Endpoint>,
    /// Sizes of the volumes, such as 1Gi,1Ti,16Ti. A size that the driver refuses is left out.
    #[arg(long, value_name = "SIZE,...", default_value = "1Gi", value_delimiter = ',', value_parser = volume_size)]
    size: Vec<Quantity>,
    /// How many snapshots a volume has when one more is measured, such as 1,10,100,1000; 0: leave that out.
    #[arg(long, value_name = "NUMBER,...", default_value = "1,10", value_delimiter = ',', value_parser = shell::within::<u64>(0..=10_000))]
    snapshots: Vec<u64>,
    /// Data that is written before the first snapshot, in pieces of 1Mi at random places: 1Mi to 4Gi, and not more than the
    /// smallest volume.
    #[arg(long, value_name = "SIZE", default_value = "256Mi", value_parser = data_size)]
    data: Quantity,
    /// Per cent of the data that change before each further snapshot, in random blocks of 4Ki.
    #[arg(long, value_name = "PERCENT,...", default_value = "0.01,1,10", value_delimiter = ',', value_parser = percent)]
    changed: Vec<f64>,
    /// How often each size is measured.
    #[arg(long, value_name = "NUMBER", default_value_t = 3, value_parser = shell::within::<u64>(1..=1000))]
    runs: u64,
    /// Time between a snapshot and a delta that is asked for later.
    #[arg(long, value_name = "AGE", default_value = "3s", value_parser = pause)]
    settle: Duration,
    /// Time of random writes before and after a snapshot; 0: leave them out.
    #[arg(long, value_name = "AGE", default_value = "2s", value_parser = pause)]
    write_time: Duration,
    /// Directory for a plain file, to which the same is done for comparison. It should be on the filesystem that the driver
    /// stores on. It takes three times --data. If it holds no file of the volume's size, the driver is measured alone.
    #[arg(long, value_name = "DIR", requires = "endpoint")]
    bare_dir: Option<PathBuf>,
    /// Directory that the driver stores in: its space is what that filesystem has left, instead of what GetCapacity says. Nothing
    /// else should write there.
    #[arg(long, value_name = "DIR", requires = "endpoint")]
    space_dir: Option<PathBuf>,
    #[command(flatten)]
    storage: Storage,
    /// How long a call may take.
    #[arg(long, value_name = "AGE", default_value = "10m", value_parser = shell::age)]
    timeout: Duration,
    /// Results to show side by side, as --json wrote them. With --endpoint, the new one comes after them; without, nothing is
    /// measured.
    #[arg(long, value_name = "FILE", num_args = 1..)]
    compare: Vec<PathBuf>,
    /// What is printed on standard output. JSON is the new result, or, with --compare, a list of all.
    #[arg(long, value_enum, default_value_t = Output::Text)]
    output: Output,
    /// Also write the new result as JSON, for --compare.
    #[arg(long, value_name = "FILE", requires = "endpoint")]
    json: Option<PathBuf>,
    /// Also write CSV, with one line for each figure.
    #[arg(long, value_name = "FILE")]
    csv: Option<PathBuf>,
    /// Also write a page with charts, which needs nothing else.
    #[arg(long, value_name = "FILE")]
    html: Option<PathBuf>,
    #[command(flatten)]
    quiet: shell::Quiet,
}

fn volume_size(text: &str) -> Result<Quantity, String> {
    let size: Quantity = text.parse().map_err(|error: base::QuantityError| error.to_string())?;
    match size.0.checked_next_multiple_of(1 << 20).filter(|bytes| *bytes > 0 && *bytes <= 1 << 60) {
        Some(bytes) => Ok(Quantity(bytes)),
        None => Err(format!("{text} is not a size for a volume: write 1Mi to 1Ei")),
    }
}

fn data_size(text: &str) -> Result<Quantity, String> {
    let size: Quantity = text.parse().map_err(|error: base::QuantityError| error.to_string())?;
    match size.0.is_multiple_of(1 << 20) && (1 << 20..=4 << 30).contains(&size.0) {
        true => Ok(size),
        false => Err(format!("{text} is not written in pieces of 1Mi: write a multiple of 1Mi, up to 4Gi")),
    }
}

fn percent(text: &str) -> Result<f64, String> {
    let number = text.parse::<f64>().ok().filter(|percent| *percent > 0.0 && *percent <= 100.0);
    number.ok_or_else(|| format!("{text:?} must be a number above 0 and at most 100"))
}

fn pause(text: &str) -> Result<Duration, String> {
    let longest = Duration::from_secs(3600);
    shell::age_or_none(text).and_then(|age| match age <= longest {
        true => Ok(age),
        false => Err("at most an hour".into()),
    })
}

pub(super) fn run(arguments: Arguments) -> Done {
    let (before, plan) = prepared(&arguments).map_err(Usage)?;
    let Some(endpoint) = &arguments.endpoint else {
        return tell(&arguments, &before, None).map(|()| ExitCode::SUCCESS);
    };
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    let measured = runtime.block_on(measure(&arguments, endpoint, plan));
    // A device that hangs holds its thread; that must not hold the program.
    runtime.shutdown_background();
    let interrupted = ExitCode::from(shell::INTERRUPTED);
    let Some(outcome) = measured.map_err(Usage)? else { return Ok(interrupted) };
    if outcome.verdict == Verdict::Failed && outcome.figures.iter().all(|figure| figure.measured.is_none()) {
        let left = outcome.left_behind.iter().map(|left| format!("left behind: {left}"));
        let why: Vec<String> = outcome.troubles.iter().cloned().chain(left).collect();
        return Err(Usage(format!("nothing could be measured: {}", why.join("; "))).into());
    }
    let code = match (outcome.verdict, outcome.is_good()) {
        (Verdict::Interrupted, _) => interrupted,
        (_, true) => ExitCode::SUCCESS,
        (_, false) => ExitCode::FAILURE,
    };
    tell(&arguments, &before, Some(outcome)).map(|()| code)
}

/// All that can be wrong before anything is made.
fn prepared(arguments: &Arguments) -> Result<(Vec<Outcome>, Plan), String> {
    let labelled = |path: &PathBuf| {
        let label = path.file_stem().map(|name| name.to_string_lossy().into_owned());
        Outcome::read(path).map(|result| Outcome { label, ..result })
    };
    let before: Vec<Outcome> = arguments.compare.iter().map(labelled).collect::<Result<_, _>>()?;
    for file in [&arguments.json, &arguments.csv, &arguments.html].into_iter().flatten() {
        check(file)?;
    }
    for (flag, dir) in [("--bare-dir", &arguments.bare_dir), ("--space-dir", &arguments.space_dir)] {
        if let Some(dir) = dir.as_ref().filter(|dir| !dir.is_dir()) {
            let why =
                if dir.exists() { "it is a file, not a directory" } else { "there is no such directory" };
            return Err(format!("{flag} {}: {why}", dir.display()));
        }
    }
    let mut sizes: Vec<u64> = arguments.size.iter().map(|size| size.0).collect();
    sizes.sort_unstable();
    sizes.dedup();
    if let Some(smallest) = sizes.first().filter(|size| **size < arguments.data.0) {
        let (data, size) = (arguments.data, Quantity(*smallest));
        return Err(format!(
            "--data {data} does not fit in a volume of {size}: write less, or larger volumes"
        ));
    }
    let mut snapshots = arguments.snapshots.clone();
    snapshots.retain(|count| *count > 0);
    snapshots.sort_unstable();
    snapshots.dedup();
    let plan = Plan {
        sizes,
        snapshots,
        runs: arguments.runs,
        data: arguments.data.0,
        changed: arguments.changed.clone(),
        settle: arguments.settle,
        write_time: arguments.write_time,
        bare_dir: arguments.bare_dir.clone(),
        space_dir: arguments.space_dir.clone(),
        patience: arguments.timeout,
    };
    Ok((before, plan))
}

/// Prints and writes the results.
fn tell(arguments: &Arguments, before: &[Outcome], new: Option<Outcome>) -> Result<(), Box<dyn Error>> {
    let mut results = before.to_vec();
    if let (Some(path), Some(new)) = (&arguments.json, &new) {
        write(path, &(serde_json::to_string_pretty(new)? + "\n"))?;
    }
    results.extend(new);
    if let Some(path) = &arguments.csv {
        write(path, &show::csv(&results))?;
    }
    if let Some(path) = &arguments.html {
        write(path, &page::page(&results))?;
    }
    let is_json = arguments.output == Output::Json;
    let text = || show::text(&results);
    Ok(match &results[..] {
        [one] => shell::show(is_json, one, text),
        all => shell::show(is_json, all, text),
    }?)
}

/// Measures the driver. None: interrupted before it began.
async fn measure(arguments: &Arguments, endpoint: &Endpoint, plan: Plan) -> Result<Option<Outcome>, String> {
    let controller = arguments.controller_endpoint.as_ref().unwrap_or(endpoint);
    let begun = arguments.storage.begin("bench", endpoint, controller, plan.data, plan.patience).await?;
    let Some(Begun { plugin, signals, ours, dir }) = begun else { return Ok(None) };
    let mut outcome = outcome(arguments, &plugin.claims, &plan);
    let began = Instant::now();
    live(&plugin, &plan, signals, &mut outcome).await;
    outcome.left_behind.extend(remove_empty(ours, dir));
    outcome.conditions.load[1] = load();
    outcome.conditions.seconds = began.elapsed().as_secs_f64().round();
    Ok(Some(outcome))
}

/// Measures, and takes everything away. The first signal ends the measuring, the second leaves things as they are.
async fn live(plugin: &Plugin, plan: &Plan, mut signals: watch::Receiver<u32>, outcome: &mut Outcome) {
    let progress = Progress::new(plan.steps());
    // All plain files are in here, so that what a thread makes after a signal is removed too.
    let bare = plan.bare_dir.as_ref();
    let bare = bare.map(|dir| tempfile::Builder::new().prefix("cbt-lab-bench-").tempdir_in(dir)).transpose();
    let bare = match bare {
        Ok(bare) => bare,
        Err(error) => return outcome.troubles.push(format!("--bare-dir: {error}")),
    };
    let plan = &Plan { bare_dir: bare.as_ref().map(|dir| dir.path().to_owned()), ..plan.clone() };
    let mut book = Book::default();
    let (mut troubles, mut left) = (Vec::new(), Vec::new());
    let mut interrupted = false;
    let knows_space = plugin.claims.capacity || plan.space_dir.is_some();
    let mut bench =
        Bench { plugin, plan, book: &mut book, progress: &progress, knows_space, left_before: None };
    tokio::select! {
        () = bench.measure(&mut troubles, &mut left) => {}
        _ = signals.wait_for(|count| *count >= 1) => interrupted = true,
    }
    progress.clear();
    at_rest(REST).await;
    tokio::select! {
        still = plugin.clean_up(plan.patience.min(Duration::from_secs(60))) => left = still,
        _ = signals.wait_for(|count| *count >= 2) => left = plugin.ledger.names(),
    }
    if let Some(Err(error)) = bare.map(tempfile::TempDir::close) {
        left.push(format!("plain files: {error}"));
    }
    outcome.figures = book.figures();
    outcome.verdict = match interrupted {
        true => Verdict::Interrupted,
        false => Outcome::verdict_of(&outcome.figures, &troubles),
    };
    (outcome.troubles, outcome.left_behind) = (troubles, left);
}

/// A result without figures.
fn outcome(arguments: &Arguments, claims: &Claims, plan: &Plan) -> Outcome {
    let pairs = arguments.storage.parameter.iter().chain(&arguments.storage.snapshot_parameter);
    let kernel = std::fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
    let now = load();
    Outcome {
        label: None,
        lab: env!("CARGO_PKG_VERSION").into(),
        driver: claims.name.clone(),
        version: claims.version.clone(),
        verdict: Verdict::Failed,
        conditions: Conditions {
            when: jiff::Timestamp::now().strftime("%Y-%m-%dT%H:%MZ").to_string(),
            cpus: std::thread::available_parallelism().map_or(0, usize::from),
            kernel: kernel.trim().to_owned(),
            load: [now, now],
            runs: plan.runs,
            data: plan.data,
            parameters: pairs.map(|(key, value)| format!("{key}={value}")).collect(),
            seconds: 0.0,
        },
        figures: Vec::new(),
        troubles: Vec::new(),
        left_behind: Vec::new(),
    }
}

/// Programs that wanted a processor over the last minute.
fn load() -> f64 {
    let text = std::fs::read_to_string("/proc/loadavg").unwrap_or_default();
    text.split(' ').next().and_then(|load| load.parse().ok()).unwrap_or(0.0)
}
