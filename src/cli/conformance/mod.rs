//! `deltapath conformance`: tests the SnapshotMetadata service of any CSI driver from outside, through
//! CSI alone, against what the spec demands.
//!
//! - `table.rs` is the one table of cases; `format`, `offsets`, `errors`, `complete`, `life` and `streams`
//!   hold their tests. A test gets the `Lab` and returns a `Verdict` or what is `Wrong`.
//! - `lab.rs` and `history.rs` make the volumes and snapshots that cases share; `content.rs` knows what was
//!   written. All is judged by that, and by reading restored volumes: never by the driver's word alone.
//! - `plugin.rs` plays the container orchestrator, `ledger.rs` takes everything away again.

mod answer;
mod case;
mod claims;
mod complete;
mod content;
mod errors;
mod format;
mod history;
mod lab;
mod ledger;
mod life;
mod offsets;
mod plugin;
mod ranges;
mod report;
mod run;
mod secrets;
mod streams;
mod table;

use std::collections::HashMap;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use clap::{Args, ValueEnum};
use regex::Regex;
use tokio::signal::unix::{SignalKind, signal};

use super::Done;
use crate::base::{BlockSize, Quantity};
use crate::client::Client;
use crate::csi::Endpoint;
use crate::sys;
use case::Case;
use claims::Claims;
use lab::Lab;
use plugin::{Plugin, Settings};
use report::Report;
use secrets::Secrets;

/// Exit status where the suite can not run on the driver.
const CAN_NOT_RUN: u8 = 2;

/// Test the SnapshotMetadata service of any CSI driver.
///
/// Creates Block volumes through the driver's socket, attaches, stages and publishes them as the driver
/// claims, writes to the devices, takes snapshots, streams their metadata, restores and deletes. What the
/// streams tell is judged by what was written and by what restored volumes hold. Each case passes, fails, is
/// "allowed, but" (the spec permits it, a user should know), or is skipped with a reason. Needs root, and
/// to see the driver's mounts and devices; takes away all that it makes.
///
/// Exit codes: 0 all pass or are allowed, 1 a case fails or something is left behind, 2 it could not run, 130
/// interrupted.
#[derive(Debug, Args)]
pub(super) struct Arguments {
    /// Socket of the driver, which serves Identity, Controller, Node and SnapshotMetadata there.
    #[arg(
        long,
        value_name = "ENDPOINT",
        env = "CSI_ENDPOINT",
        required_unless_present = "list",
        default_value_if("list", "true", "unix:///")
    )]
    endpoint: Option<Endpoint>,
    /// Size of the volumes, at least 64Mi.
    #[arg(long, value_name = "SIZE", default_value = "1Gi", value_parser = volume_size)]
    volume_size: Quantity,
    /// Parameter of the StorageClass; may be given several times.
    #[arg(long, value_name = "KEY=VALUE", value_parser = pair)]
    parameter: Vec<(String, String)>,
    /// Parameter of the VolumeSnapshotClass; may be given several times.
    #[arg(long, value_name = "KEY=VALUE", value_parser = pair)]
    snapshot_parameter: Vec<(String, String)>,
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
    /// Seconds that a case, and each preparation that cases share, may take.
    #[arg(long, value_name = "SECONDS", default_value_t = 300, value_parser = clap::value_parser!(u64).range(1..))]
    timeout: u64,
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
    /// Also write the outcome as JUnit XML.
    #[arg(long, value_name = "FILE")]
    junit: Option<PathBuf>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Output {
    /// A few lines a case.
    Text,
    /// One JSON object at the end.
    Json,
}

fn volume_size(text: &str) -> Result<Quantity, String> {
    let size: Quantity = text.parse().map_err(|error: crate::base::QuantityError| error.to_string())?;
    match BlockSize::MIN.round_up(size.0).filter(|bytes| (64 << 20..=i64::MAX as u64 / 4).contains(bytes)) {
        Some(bytes) => Ok(Quantity(bytes)),
        None => Err(format!("{text} is no size for the suite's volumes: they need 64Mi at least")),
    }
}

fn pair(text: &str) -> Result<(String, String), String> {
    match text.split_once('=') {
        Some((key, value)) if !key.is_empty() => Ok((key.to_owned(), value.to_owned())),
        _ => Err(format!("{text:?} is no parameter: write key=value")),
    }
}

fn chosen<'c>(all: &'c [Case], arguments: &Arguments) -> Vec<&'c Case> {
    let focused = |case: &&Case| arguments.focus.as_ref().is_none_or(|regex| regex.is_match(case.name));
    let kept = |case: &&Case| !arguments.skip.as_ref().is_some_and(|regex| regex.is_match(case.name));
    all.iter().filter(focused).filter(kept).collect()
}

pub(super) fn run(arguments: Arguments) -> Done {
    let all = table::cases();
    let cases = chosen(&all, &arguments);
    if arguments.list {
        report::list(&cases, arguments.output == Output::Json)?;
        return Ok(ExitCode::SUCCESS);
    }
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    let ended = runtime.block_on(test(&arguments, &cases));
    // A device that hangs holds its thread; that must not hold the suite.
    runtime.shutdown_background();
    Ok(ended.unwrap_or_else(|error| {
        eprintln!("deltapath: could not run: {error}");
        ExitCode::from(CAN_NOT_RUN)
    }))
}

/// Runs the cases. An error: they could not be.
async fn test(arguments: &Arguments, cases: &[&Case]) -> Result<ExitCode, String> {
    if cases.is_empty() {
        return Err("no case is chosen: --list prints their names".into());
    }
    if !sys::is_root() {
        return Err("it needs root: it writes to block devices".into());
    }
    let endpoint = arguments.endpoint.as_ref().ok_or("no --endpoint")?;
    let patience = Duration::from_secs(arguments.timeout);
    let secrets = arguments.secrets.as_deref().map(Secrets::read).transpose()?.unwrap_or_default();
    let dir = tempfile::Builder::new().prefix("deltapath-conformance-").tempdir();
    let dir = dir.map_err(|error| format!("make a temporary directory: {error}"))?;

    let connect = Client::connect(endpoint.path(), Duration::from_secs(5));
    let mut client = connect
        .await
        .map_err(|error| format!("nobody answers at {endpoint}: {}", crate::driver::report(&error)))?;
    let asked = tokio::time::timeout(patience, Claims::ask(&mut client)).await;
    let claims = asked
        .map_err(|_| format!("the driver did not tell its capabilities within {} s", arguments.timeout))??;
    if let Some(missing) = claims.missing() {
        return Err(format!("{} does not claim {missing}, so there is nothing to test on", claims.name));
    }

    let settings = Settings {
        volume_parameters: HashMap::from_iter(arguments.parameter.iter().cloned()),
        snapshot_parameters: HashMap::from_iter(arguments.snapshot_parameter.iter().cloned()),
        secrets,
        staging_dir: arguments.staging_dir.clone().unwrap_or_else(|| dir.path().join("staging")),
        target_dir: arguments.target_dir.clone().unwrap_or_else(|| dir.path().join("target")),
        volume_size: arguments.volume_size.0,
    };
    let (name, version, claimed) = (claims.name.clone(), claims.version.clone(), claims.metadata);
    let plugin = Plugin::new(endpoint.path(), client, claims, settings, run_name()?);
    let lab = Lab::new(plugin, patience);
    if !claimed && !run::serves(&lab, patience).await {
        return Err(format!("{name} neither claims nor serves SnapshotMetadata"));
    }

    let mut signals = Vec::new();
    for kind in [SignalKind::interrupt(), SignalKind::terminate()] {
        signals.push(signal(kind).map_err(|error| format!("listen to signals: {error}"))?);
    }
    let interrupted = async move {
        let told = signals.iter_mut().map(|signal| Box::pin(signal.recv()));
        futures_util::future::select_all(told).await;
    };
    let started = Instant::now();
    let mut report = Report::new(endpoint.to_string(), name, version, arguments.output == Output::Text);
    run::run(&lab, cases, patience, &mut report, interrupted).await;
    // Only what is empty: what a driver holds below is not ours to remove.
    for name in ["staging", "target"] {
        let _ = std::fs::remove_dir(dir.path().join(name));
    }
    let place = dir.keep();
    if let Err(error) = std::fs::remove_dir(&place) {
        report.left_behind.push(format!("{}: {error}", place.display()));
    }
    if let Some(path) = &arguments.junit {
        report.write_junit(path).map_err(|error| format!("write {}: {error}", path.display()))?;
    }
    report.finish(started.elapsed()).map_err(|error| format!("write the report: {error}"))?;
    Ok(match (report.interrupted, report.is_good()) {
        (true, _) => ExitCode::from(130),
        (false, true) => ExitCode::SUCCESS,
        (false, false) => ExitCode::FAILURE,
    })
}

/// Begins the names of one run's volumes, snapshots and directories.
fn run_name() -> Result<String, String> {
    let mut random = [0; 4];
    getrandom::fill(&mut random).map_err(|error| format!("no random numbers: {error}"))?;
    Ok(format!("conformance-{:08x}", u32::from_ne_bytes(random)))
}
