//! `cbt-lab conformance`: tests the SnapshotMetadata service of any CSI driver from outside, through
//! CSI alone, against what the spec demands.
//!
//! - `table.rs` is the one table of cases; `format`, `offsets`, `errors`, `complete`, `life`, `meanwhile` and `streams`
//!   hold their tests. A test gets the `Fixtures` and returns a `Verdict` or what is `Wrong`.
//! - `run.rs` runs them, several at once; `fixtures.rs` has the rule of which exclude each other.
//! - `fixtures.rs` and `history.rs` make the volumes and snapshots that cases share; `content.rs` knows what was
//!   written. All is judged by that, and by reading restored volumes: never by the driver's word alone.
//! - `subject.rs` is what cases ask: the `Fixtures`, or by `kubernetes/` a service in a cluster.
//! - `plugin.rs` plays the container orchestrator, `clean_up.rs` takes everything in `ledger.rs` away again.

pub(crate) mod answer;
pub(crate) mod attach;
mod case;
pub(crate) mod claims;
mod clean_up;
mod compare;
mod complete;
pub(crate) mod content;
mod errors;
mod fixtures;
mod format;
mod history;
pub(crate) mod kubernetes;
mod ledger;
mod life;
mod meanwhile;
mod offsets;
pub(crate) mod plugin;
pub(crate) mod ranges;
mod report;
mod rest;
mod run;
pub(crate) mod secrets;
mod streams;
mod subject;
mod table;
pub(crate) mod verdict;
mod volume;

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, Instant};

use clap::Args;
use regex::Regex;
use shell::Usage;
use tokio::sync::watch;

use super::{Done, Output};
use base::Endpoint;
use base::{BlockSize, Quantity};
use case::{Case, Level};
use claims::Claims;
use compare::Before;
use csi_client::Client;
use fixtures::{Fixtures, Need};
use plugin::{Plugin, Settings};
use report::{CSI, Choice, Report};
use secrets::Secrets;
use subject::Subject;

// No doc comment: clap would show it as the command's own.
#[derive(Debug, Args)]
pub(crate) struct Storage {
    /// Parameter of the StorageClass; may be given several times.
    #[arg(long, value_name = "KEY=VALUE", value_parser = pair)]
    pub parameter: Vec<(String, String)>,
    /// Parameter of the VolumeSnapshotClass; may be given several times.
    #[arg(long, value_name = "KEY=VALUE", value_parser = pair)]
    pub snapshot_parameter: Vec<(String, String)>,
    /// Secrets by call, in csi-sanity's format: a YAML file with CreateVolumeSecret and so on. The streams get
    /// CreateSnapshotSecret, unless there is a SnapshotMetadataSecret.
    #[arg(long, value_name = "FILE")]
    secrets: Option<PathBuf>,
    /// Directory to stage volumes below; the driver has to see it at the same path. Default: a temporary one.
    #[arg(long, value_name = "DIR")]
    staging_dir: Option<PathBuf>,
    /// Directory to publish volumes below. Default: a temporary one.
    #[arg(long, value_name = "DIR")]
    target_dir: Option<PathBuf>,
}

impl Storage {
    /// With directories below `dir` where none are given. An error: one of the files or paths is wrong.
    pub(crate) fn settings(&self, dir: &Path, volume_size: u64) -> Result<Settings, String> {
        let place = |given: &Option<PathBuf>, name: &str| {
            let Some(given) = given else { return Ok(dir.join(name)) };
            let wrong = |why: &str| format!("--{name}-dir {}: {why}", given.display());
            let given = std::path::absolute(given).map_err(|error| wrong(&error.to_string()))?;
            match given.parent().is_none_or(Path::is_dir) {
                true => Ok(given),
                false => Err(wrong("the directory above it does not exist: make that first")),
            }
        };
        Ok(Settings {
            volume_parameters: HashMap::from_iter(self.parameter.iter().cloned()),
            snapshot_parameters: HashMap::from_iter(self.snapshot_parameter.iter().cloned()),
            attributes: HashMap::new(),
            secrets: self.secrets.as_deref().map(Secrets::read).transpose()?.unwrap_or_default(),
            staging_dir: place(&self.staging_dir, "staging")?,
            target_dir: place(&self.target_dir, "target")?,
            volume_size,
        })
    }
}

/// A run on a driver that answers.
pub(crate) struct Begun {
    pub plugin: Plugin,
    pub signals: watch::Receiver<u32>,
    /// For [`remove_empty`], at its end.
    pub ours: Vec<PathBuf>,
    pub dir: tempfile::TempDir,
}

impl Storage {
    /// Begins a run with volumes of that size; none where a signal came first. An error: it could not be.
    pub(crate) async fn begin(
        &self,
        kind: &str,
        endpoint: &Endpoint,
        controller: &Endpoint,
        volume_size: u64,
        patience: Duration,
    ) -> Result<Option<Begun>, String> {
        if !nix::unistd::geteuid().is_root() {
            return Err("it needs root: it writes to block devices".into());
        }
        // Before anything is made that a signal could leave behind.
        let mut signals = signals().map_err(|error| format!("listen to signals: {error}"))?;
        let dir = tempfile::Builder::new().prefix(&format!("cbt-lab-{kind}-")).tempdir();
        let dir = dir.map_err(|error| format!("make a temporary directory: {error}"))?;
        let settings = self.settings(dir.path(), volume_size)?;
        let (client, claims) = tokio::select! {
            asked = ask(endpoint, controller, patience) => asked?,
            _ = signals.wait_for(|count| *count > 0) => return Ok(None),
        };
        let ours = [settings.staging_dir.clone(), settings.target_dir.clone()];
        let ours = ours.into_iter().filter(|dir| !dir.exists()).collect();
        let plugin = Plugin::new(controller.path(), client, claims, settings, run_name(kind)?);
        Ok(Some(Begun { plugin, signals, ours, dir }))
    }
}

/// Test the SnapshotMetadata service of any CSI driver.
///
/// Creates Block volumes through the driver's socket, attaches, stages and publishes them as the driver
/// claims, writes to the devices, takes snapshots, streams their metadata, restores and deletes. The
/// streams are compared with what was written and with what restored volumes hold. A case passes, fails or is skipped with a
/// reason. "allowed, but" means that the spec permits it, and that a user should know. A case is not shown if what it tests did
/// not happen, such as a deadline that passed after the stream had ended. Needs root, and
/// to see the driver's mounts and devices; takes away all that it makes.
///
/// Exit codes: 0 all pass or are allowed, 1 a case fails or something is left behind, 2 it could not run, 130
/// interrupted.
#[derive(Debug, Args)]
pub(super) struct Arguments {
    /// Socket of the driver; of its node plugin, where that is another process than the controller's.
    #[arg(
        long,
        value_name = "ENDPOINT",
        env = "CSI_ENDPOINT",
        required_unless_present_any = ["list", "kubernetes"],
        default_value_if("list", "true", "unix:///")
    )]
    endpoint: Option<Endpoint>,
    /// Socket of the controller plugin, which serves Identity, Controller and SnapshotMetadata. Default: the
    /// same as --endpoint.
    #[arg(long, value_name = "ENDPOINT")]
    controller_endpoint: Option<Endpoint>,
    /// Size of the volumes, at least 64Mi.
    #[arg(long, value_name = "SIZE", default_value = "1Gi", value_parser = volume_size)]
    volume_size: Quantity,
    #[command(flatten)]
    storage: Storage,
    /// Parameter of a VolumeAttributesClass, to which a volume is modified; may be given several times. Without it the case about
    /// that is skipped.
    #[arg(long, value_name = "KEY=VALUE", value_parser = pair)]
    modify_parameter: Vec<(String, String)>,
    /// How long a case, and each preparation that cases share, may take.
    #[arg(long, value_name = "AGE", default_value = "5m", value_parser = shell::age)]
    timeout: Duration,
    /// How many cases, and preparations that cases share, run at once. Cases that would disturb each other run one after another, and
    /// the order of the report stays the same. A driver that is wrong under parallel calls fails the cases that meet it; 1 runs one case
    /// at a time, which is calmest for the driver and shows which case a failure belongs to.
    #[arg(long, value_name = "N", default_value_t = 4, value_parser = clap::value_parser!(u16).range(1..))]
    jobs: u16,
    /// Run the cases of one level. Default: both.
    #[arg(long, value_enum)]
    level: Option<Level>,
    /// Run the cases whose name matches.
    #[arg(long, value_name = "REGEX")]
    focus: Option<Regex>,
    /// Leave out the cases whose name matches.
    #[arg(long, value_name = "REGEX")]
    skip: Option<Regex>,
    /// Print the cases and what the spec demands, and run none.
    #[arg(long)]
    list: bool,
    /// What is printed on standard output.
    #[arg(long, value_enum, default_value_t = Output::Text)]
    output: Output,
    /// Say what changed since another run: a file of its --output json.
    #[arg(long, value_name = "FILE")]
    compare: Option<PathBuf>,
    /// Also write the outcome as JUnit XML.
    #[arg(long, value_name = "FILE")]
    junit: Option<PathBuf>,
    #[command(flatten)]
    kubernetes: kubernetes::InCluster,
}

fn volume_size(text: &str) -> Result<Quantity, String> {
    let size: Quantity = text.parse().map_err(|error: base::QuantityError| error.to_string())?;
    match BlockSize::MIN.round_up(size.0).filter(|bytes| (64 << 20..=i64::MAX as u64 / 4).contains(bytes)) {
        Some(bytes) => Ok(Quantity(bytes)),
        None => Err(format!("{text} is too small or too large for the suite's volumes: write 64Mi or more")),
    }
}

pub(crate) fn pair(text: &str) -> Result<(String, String), String> {
    match text.split_once('=') {
        Some((key, value)) if !key.is_empty() => Ok((key.to_owned(), value.to_owned())),
        _ => Err(format!("{text:?} is not a parameter: write key=value")),
    }
}

fn chosen<'c, S: Subject>(all: &'c [Case<S>], arguments: &Arguments) -> Vec<&'c Case<S>> {
    let focused = |case: &&Case<S>| arguments.focus.as_ref().is_none_or(|regex| regex.is_match(case.name));
    let kept = |case: &&Case<S>| !arguments.skip.as_ref().is_some_and(|regex| regex.is_match(case.name));
    let of_level = |case: &&Case<S>| arguments.level.is_none_or(|level| case.level == level);
    all.iter().filter(of_level).filter(focused).filter(kept).collect()
}

pub(super) fn run(arguments: Arguments) -> Done {
    match arguments.kubernetes.kubernetes {
        true => kubernetes::run(&arguments),
        false => run_cases(&arguments, &table::cases(), test),
    }
}

/// Lists the cases that are chosen, or runs them.
fn run_cases<S: Subject>(
    arguments: &Arguments,
    all: &[Case<S>],
    test: impl AsyncFnOnce(&Arguments, &[&Case<S>]) -> Result<Done, String>,
) -> Done {
    let cases = chosen(all, arguments);
    if arguments.list {
        report::list(&cases, arguments.output == Output::Json)?;
        return Ok(ExitCode::SUCCESS);
    }
    if let Some(path) = &arguments.junit {
        crate::output::check(path).map_err(Usage)?;
    }
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    let ended = runtime.block_on(test(arguments, &cases));
    // A device that hangs holds its thread; that must not hold the suite.
    runtime.shutdown_background();
    ended.map_err(|error| Usage(format!("could not run: {error}")))?
}

/// Runs the cases. An error: they could not be.
async fn test(arguments: &Arguments, cases: &[&Case<Fixtures>]) -> Result<Done, String> {
    if cases.is_empty() {
        return Err("no case is chosen: --list prints their names".into());
    }
    let before = arguments.compare.as_deref().map(Before::read).transpose()?;
    let endpoint = arguments.endpoint.as_ref().ok_or("no --endpoint")?;
    let controller = arguments.controller_endpoint.as_ref().unwrap_or(endpoint);
    let (size, patience) = (arguments.volume_size.0, arguments.timeout);
    let begun = arguments.storage.begin("conformance", endpoint, controller, size, patience).await?;
    let Some(Begun { mut plugin, signals, ours, dir }) = begun else {
        return Ok(Ok(ExitCode::from(shell::INTERRUPTED)));
    };
    plugin.settings.attributes.extend(arguments.modify_parameter.iter().cloned());
    let Claims { name, version, metadata, .. } = plugin.claims.clone();
    let fixtures = Arc::new(Fixtures::new(plugin));
    if !metadata && !run::serves(&fixtures, patience).await {
        return Err(format!("{name} neither claims nor serves SnapshotMetadata"));
    }
    let started = Instant::now();
    // The run sees it too, and cleans up.
    let stopped = || {
        let mut signals = signals.clone();
        async move { signals.wait_for(|count| *count > 0).await.map(drop) }
    };
    let first = match cases.iter().any(|case| case.needs.contains(&Need::Pair)) {
        false => None,
        true => tokio::select! {
            first = run::first(&fixtures, patience) => Some(first),
            _ = stopped() => None,
        },
    };
    let refusal = match &first {
        Some((_, first @ Err(_))) => run::refusal(first).cloned(),
        _ if cases.iter().any(|case| case.name == "modified-between") => tokio::select! {
            refused = run::refused_attributes(&fixtures.plugin, patience) => refused,
            _ = stopped() => None,
        },
        _ => None,
    };
    if let Some(refusal) = refusal {
        let mut left = fixtures.plugin.clean_up(patience).await;
        left.extend(remove_empty(ours, dir));
        let left = left.iter().map(|left| format!("; left behind: {left}")).collect::<String>();
        return Err(format!("{name} refuses what the cases need: {refusal}{left}"));
    }
    let by_name = arguments.focus.is_some() || arguments.skip.is_some();
    let choice = Choice { level: arguments.level, by_name };
    let mut report =
        Report::new(CSI, controller.to_string(), name, version, choice, arguments.output == Output::Text);
    run::run(fixtures, cases, first, (arguments.jobs.into(), patience), &mut report, signals).await;
    report.left_behind.extend(remove_empty(ours, dir));
    Ok(end(arguments, report, before.as_ref(), started))
}

/// Removes directories that the run has made, where they are empty: what a driver holds below is not ours to remove. Returns
/// those that stay.
pub(crate) fn remove_empty(ours: Vec<PathBuf>, dir: tempfile::TempDir) -> Vec<String> {
    let all = ours.into_iter().chain([dir.keep()]);
    all.filter_map(|dir| match std::fs::remove_dir(&dir) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            Some(format!("{}: {error}", dir.display()))
        }
        _ => None,
    })
    .collect()
}

/// Writes the report of a run that is over.
fn end(arguments: &Arguments, mut report: Report, before: Option<&Before>, started: Instant) -> Done {
    let junit = arguments.junit.as_ref().map_or(Ok(()), |path| report.write_junit(path));
    if let Some(before) = before {
        report.compare(before);
    }
    report.finish(started.elapsed())?;
    junit?;
    Ok(match (report.interrupted, report.is_good()) {
        (true, _) => ExitCode::from(shell::INTERRUPTED),
        (false, true) => ExitCode::SUCCESS,
        (false, false) => ExitCode::FAILURE,
    })
}

/// Connects, and asks the driver what it can.
async fn ask(
    endpoint: &Endpoint,
    controller: &Endpoint,
    patience: Duration,
) -> Result<(Client, Claims), String> {
    let mut client = connect(endpoint).await?;
    if controller != endpoint {
        client = Client { node: client.node, ..connect(controller).await? };
    }
    let asked = tokio::time::timeout(patience, Claims::ask(&mut client)).await;
    let late = |_| format!("the driver did not tell its capabilities within {} s", patience.as_secs());
    let claims = asked.map_err(late)??;
    match claims.missing() {
        None => Ok((client, claims)),
        Some(missing) => {
            Err(format!("{} does not claim {missing}, so there is nothing to test on", claims.name))
        }
    }
}

async fn connect(endpoint: &Endpoint) -> Result<Client, String> {
    let connected = Client::connect(endpoint.path(), Duration::from_secs(5)).await;
    connected.map_err(|error| format!("no answer at {endpoint}: {}", base::report(&error)))
}

/// Counts SIGINT, SIGTERM and SIGHUP.
fn signals() -> std::io::Result<watch::Receiver<u32>> {
    let mut signals = shell::Signals::watch()?;
    let (count, counted) = watch::channel(0);
    tokio::spawn(async move {
        loop {
            signals.next().await;
            count.send_modify(|count| *count += 1);
            shell::say!("cbt-lab: interrupted; cleaning up (Ctrl-C again: stop without cleaning up)");
        }
    });
    Ok(counted)
}

/// Begins the names of one run's volumes, snapshots and directories.
pub(crate) fn run_name(kind: &str) -> Result<String, String> {
    let mut random = [0; 4];
    getrandom::fill(&mut random).map_err(|error| format!("no random numbers: {error}"))?;
    Ok(format!("{kind}-{:08x}", u32::from_ne_bytes(random)))
}
