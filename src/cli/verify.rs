//! `deltapath verify`: holds every snapshot's maps and hashes against its data.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::process::ExitCode;

use clap::Args;
use indicatif::{ProgressBar, ProgressStyle};
use serde::Serialize;

use super::{Done, Output, check_data_dir, stop_on_signals};
use crate::driver::{Inspected, Inspection};
use crate::sys;
use base::{ByteRange, Quantity, SnapshotId, Stop};
use cbt::Finding;

/// Compare the blocks of snapshots with their hashes, and their block maps with the data.
///
/// Reports damage by snapshot and byte range, and changes nothing. Works with or without a running driver; without one it
/// mounts the pool for the time of the check. Blocks without a hash (not hashed yet, or not tracked) and deleted
/// snapshots are not compared. Needs root.
///
/// Exit codes: 0 no damage, 1 damage or a failure, 2 wrong usage, 130 interrupted.
#[derive(Debug, Args)]
pub(super) struct Arguments {
    /// Data directory of the driver.
    #[arg(long, value_name = "DIR", default_value = "/var/lib/deltapath")]
    data_dir: PathBuf,
    /// Check only this snapshot; may be repeated. Default: all.
    #[arg(long = "snapshot", value_name = "ID")]
    snapshots: Vec<SnapshotId>,
    /// What is printed on standard output.
    #[arg(long, value_enum, default_value_t = Output::Text)]
    output: Output,
    #[command(flatten)]
    quiet: shell::Quiet,
}

/// What a run found.
#[derive(Debug, Default, Serialize)]
struct Report {
    /// Snapshots that were read to the end.
    snapshots: usize,
    /// Bytes of their data.
    bytes: u64,
    /// Bytes of it without a hash, which are not compared.
    unhashed: u64,
    damage: Vec<Damage>,
    /// Objects whose records cannot be read, with the reason.
    unreadable: BTreeMap<String, String>,
}

#[derive(Debug, Serialize)]
struct Damage {
    snapshot: SnapshotId,
    what: String,
    /// The first byte and the byte after the last one; none where it is about the whole snapshot.
    start: Option<u64>,
    end: Option<u64>,
}

pub(super) fn run(arguments: Arguments) -> Done {
    if !sys::is_root() {
        return Err("verify needs root: it reads the pool, and mounts it where no driver does".into());
    }
    check_data_dir(&arguments.data_dir)?;
    let stop = stop_on_signals()?;
    let inspection = Inspection::open(&arguments.data_dir)?;
    let report = verify(&inspection, &arguments.snapshots, &stop);
    let closed = inspection.close();
    if report.is_err() && stop.check().is_err() {
        closed?;
        return Ok(ExitCode::from(shell::INTERRUPTED));
    }
    let report = report?;
    let shown = shell::show(arguments.output == Output::Json, &report, || report.text());
    closed?;
    shown?;
    Ok(match report.damage.is_empty() && report.unreadable.is_empty() {
        true => ExitCode::SUCCESS,
        false => ExitCode::FAILURE,
    })
}

fn verify(
    inspection: &Inspection,
    wanted: &[SnapshotId],
    stop: &Stop,
) -> Result<Report, Box<dyn std::error::Error>> {
    let mut chosen = inspection.snapshots();
    if let Some(missing) = wanted.iter().find(|id| !chosen.iter().any(|of| of.record.id == **id)) {
        return Err(format!("snapshot {missing} does not exist").into());
    }
    chosen.retain(|of| wanted.is_empty() || wanted.contains(&of.record.id));
    let bar = match shell::tells_progress() {
        true => ProgressBar::new(chosen.iter().map(|of| of.bytes).sum()),
        false => ProgressBar::hidden(),
    };
    bar.set_style(ProgressStyle::with_template(
        "{bar:30} {bytes}/{total_bytes} {bytes_per_sec} {eta} {msg}",
    )?);
    let mut report =
        Report { unreadable: inspection.unreadable().into_iter().collect(), ..Report::default() };
    for Inspected { record, bytes, unhashed } in chosen {
        bar.set_message(record.id.to_string());
        let progress = |bytes| bar.inc(bytes);
        let findings = match inspection.verify(&record.id, &progress, stop) {
            Ok(Some(findings)) => {
                report.snapshots += 1;
                report.bytes += bytes;
                report.unhashed += unhashed;
                findings
            }
            // Deleted meanwhile.
            Ok(None) => continue,
            Err(error) if error.stopped().is_some() => return Err(error.into()),
            // What cannot be read is damage; the others are read all the same.
            Err(error) => vec![Finding { what: base::report(&error), range: None }],
        };
        report.damage.extend(findings.into_iter().map(|finding| Damage {
            snapshot: record.id.clone(),
            what: finding.what,
            start: finding.range.map(|range: ByteRange| range.start),
            end: finding.range.map(|range| range.end),
        }));
    }
    bar.finish_and_clear();
    Ok(report)
}

impl Report {
    fn text(&self) -> String {
        let mut text = String::new();
        for damage in &self.damage {
            let place = match (damage.start, damage.end) {
                (Some(start), Some(end)) => format!(", bytes {start} to {end}"),
                _ => String::new(),
            };
            text += &format!("{}{place}: {}\n", damage.snapshot, damage.what);
        }
        for (path, why) in &self.unreadable {
            text += &format!("{path}: {why}\n");
        }
        let found = match self.damage.len() + self.unreadable.len() {
            0 => "all sound".to_owned(),
            count => format!("{count} damaged"),
        };
        let unhashed = match self.unhashed {
            0 => String::new(),
            bytes => format!(" ({} without a hash, not compared)", Quantity(bytes)),
        };
        let (snapshots, bytes) = (shell::count(self.snapshots, "snapshot"), Quantity(self.bytes));
        text + &format!("{snapshots}, {bytes} of data{unhashed}: {found}\n")
    }
}
