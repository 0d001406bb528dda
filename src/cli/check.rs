//! `deltapath check`: the audit of a data directory, and what clears a crash's leftovers away.

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use clap::Args;
use serde::Serialize;

use super::{Done, Output, check_data_dir, stop_on_signals};
use crate::driver::{Discovery, Inspection, Result, Severity};
use crate::sys;
use base::Stop;

/// While a driver runs, the audit also finds what a call is making. After this time the call is done.
const SECOND_LOOK: Duration = Duration::from_secs(2);

/// Audit a data directory: records, files, block maps, loop devices, mounts.
///
/// Every record must be complete, every file and device must belong to an object, and every block map must have correct
/// checksums. The blocks are not read; `deltapath verify` does that. Works with or without a running driver; without one it
/// mounts the pool for the time of the check. Needs root.
///
/// Findings are damage (something acknowledged is not as it was written) and leftovers (left by a crash, not needed). Strangers
/// were not made by this driver, and are never touched. A note is what the driver corrects when it uses the object.
///
/// Exit codes: 0 nothing but notes; 1 damage, or the check failed; 2 wrong usage; 3 leftovers or strangers, and no
/// damage; 130 interrupted, after the check has ended and unmounted what it mounted.
#[derive(Debug, Args)]
pub(super) struct Arguments {
    /// Data directory of the driver.
    #[arg(long, value_name = "DIR", default_value = "/var/lib/deltapath")]
    data_dir: PathBuf,
    /// Remove leftovers: half-made objects, drafts of files, and devices and mounts without a record. Objects are never
    /// touched. Refused while a driver runs.
    #[arg(long)]
    repair: bool,
    /// What is printed on standard output.
    #[arg(long, value_enum, default_value_t = Output::Text)]
    output: Output,
}

/// What a run found.
#[derive(Debug, Serialize)]
struct Report {
    volumes: usize,
    snapshots: usize,
    /// Deleted snapshots that are kept as a base for deltas.
    retained: usize,
    /// Whether a driver serves the directory.
    served: bool,
    found: Vec<Found>,
}

#[derive(Debug, Serialize)]
struct Found {
    severity: Severity,
    path: PathBuf,
    what: String,
    /// Whether it was repaired.
    repaired: bool,
}

pub(super) fn run(arguments: Arguments) -> Done {
    if !sys::is_root() {
        return Err("check needs root: it reads the pool, and mounts it where no driver does".into());
    }
    check_data_dir(&arguments.data_dir)?;
    let stop = stop_on_signals()?;
    let report = check(&arguments.data_dir, arguments.repair, &stop)?;
    if stop.check().is_err() {
        return Ok(ExitCode::from(shell::INTERRUPTED));
    }
    shell::show(arguments.output == Output::Json, &report, || report.text())?;
    Ok(report.exit_code())
}

fn check(dir: &Path, repair: bool, stop: &Stop) -> Result<Report, Box<dyn std::error::Error>> {
    let inspection = Inspection::open(dir)?;
    if repair && inspection.is_served() {
        return Err(
            "a driver serves this directory and clears leftovers away itself: stop it first, or leave \
                    --repair out"
                .into(),
        );
    }
    let looked = look(dir, &inspection, repair, stop);
    let (volumes, snapshots, retained) = inspection.counts();
    let served = inspection.is_served();
    let closed = inspection.close();
    let found = looked?;
    closed?;
    Ok(Report { volumes, snapshots, retained, served, found })
}

fn look(dir: &Path, inspection: &Inspection, repair: bool, stop: &Stop) -> Result<Vec<Found>> {
    let mut found = inspection.check()?;
    if !found.is_empty() && inspection.is_served() && stop.check().is_ok() {
        std::thread::sleep(SECOND_LOOK);
        let again = Inspection::open(dir)?;
        let still = again.check();
        again.close()?;
        let still = still?;
        found.retain(|discovery| still.contains(discovery));
    }
    let found = found.into_iter().map(|discovery| Found {
        repaired: repair && stop.check().is_ok() && is_repaired(inspection, &discovery),
        severity: discovery.severity,
        path: discovery.path,
        what: discovery.what,
    });
    Ok(found.collect())
}

fn is_repaired(inspection: &Inspection, discovery: &Discovery) -> bool {
    inspection.repair(discovery).unwrap_or_else(|error| {
        tracing::error!(path = %discovery.path.display(), error = base::report(&error), "not repaired");
        false
    })
}

impl Report {
    fn open(&self) -> impl Iterator<Item = &Found> {
        self.found.iter().filter(|found| !found.repaired && found.severity != Severity::Note)
    }

    fn exit_code(&self) -> ExitCode {
        match self.open().map(|found| found.severity).min() {
            None => ExitCode::SUCCESS,
            Some(Severity::Damage) => ExitCode::FAILURE,
            Some(_) => ExitCode::from(3),
        }
    }

    fn text(&self) -> String {
        let mut text = String::new();
        for Found { severity, path, what, repaired } in &self.found {
            let severity = match severity {
                Severity::Damage => "damage",
                Severity::Leftover => "leftover",
                Severity::Stranger => "stranger",
                Severity::Note => "note",
            };
            let repaired = if *repaired { " (repaired)" } else { "" };
            text += &format!("{severity}: {}: {what}{repaired}\n", path.display());
        }
        let found = match self.open().count() {
            0 => "all is well".to_owned(),
            count => format!("{count} found"),
        };
        let Report { volumes, snapshots, retained, .. } = self;
        let (volumes, snapshots) = (shell::count(*volumes, "volume"), shell::count(*snapshots, "snapshot"));
        text + &format!("{volumes}, {snapshots}, {retained} retained: {found}\n")
    }
}
