//! `deltapath demo`: the main job from end to end, on real loop devices. It starts a driver in a
//! temporary directory and plays kubelet and backup tool against it, over gRPC alone; it
//! checks every answer against what it wrote itself.

#![allow(clippy::disallowed_methods)]

mod draw;
mod host;
mod story;

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Instant;

use clap::Args;

use super::{Done, Output, stop_on_signals};
use crate::cli::PoolFlag;
use crate::sys;
use base::{BlockSize, Quantity, Stop};
use host::Host;
pub(super) use host::take_away;
use story::{Report, Story};

/// Show a full and an incremental block backup against a driver of its own.
///
/// Creates a Block volume, writes, snapshots, changes and punches blocks, snapshots again, streams
/// the allocated and the changed blocks, restores, and backs up into an image by the tuples alone. Everything is compared
/// with what was written. Needs root; leaves nothing behind, also when it is interrupted or killed.
///
/// Exit codes: 0 all equal, 1 a difference or a failure, 2 wrong usage, 130 interrupted.
#[derive(Debug, Args)]
pub(super) struct Arguments {
    /// Size of the volume, at least 64Mi.
    #[arg(long, value_name = "SIZE", default_value = "1Gi", value_parser = demo_size)]
    size: Quantity,
    /// Pool to run on.
    #[arg(long, value_name = "POOL", default_value = "auto", value_parser = PoolFlag::parser())]
    pool: PoolFlag,
    /// Directory to work in; everything made there is removed again.
    #[arg(long, value_name = "DIR", default_value_os_t = std::env::temp_dir())]
    work_dir: PathBuf,
    /// What is printed on standard output.
    #[arg(long, value_enum, default_value_t = Output::Text)]
    output: Output,
}

fn demo_size(text: &str) -> Result<Quantity, String> {
    let size: Quantity = text.parse().map_err(|error: base::QuantityError| error.to_string())?;
    match BlockSize::MIN.round_up(size.0).filter(|bytes| *bytes >= 64 << 20) {
        Some(bytes) => Ok(Quantity(bytes)),
        None => Err(format!("{text} is too small: the demo needs at least 64Mi")),
    }
}

pub(super) fn run(arguments: Arguments) -> Done {
    if !sys::is_root() {
        return Err("the demo needs root: its driver attaches loop devices and mounts filesystems".into());
    }
    let stop = stop_on_signals()?;
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    runtime.block_on(play(&arguments, &stop))
}

async fn play(arguments: &Arguments, stop: &Stop) -> Done {
    let started = Instant::now();
    let host = Host::start(&arguments.work_dir, arguments.pool.request(None), arguments.size, stop).await;
    if host.is_err() && stop.check().is_err() {
        shell::say!("deltapath: interrupted; cleaned up");
        return Ok(ExitCode::from(shell::INTERRUPTED));
    }
    let mut host = host?;
    let mut report = Report::new(arguments.size, arguments.output == Output::Text);
    let done = Story::new(&mut host, &mut report, stop).run().await;
    let left = host.stop().await;
    let interrupted = stop.check().is_err();
    if interrupted {
        shell::say!("deltapath: interrupted; cleaned up");
    } else if let Err(error) = &done {
        shell::say!("deltapath: {}", base::report(&**error));
    }
    for what in &left {
        shell::say!("deltapath: left behind: {what}");
    }
    let ok = done.is_ok() && left.is_empty() && !interrupted;
    report.verdict(ok, started.elapsed())?;
    Ok(match (interrupted, ok) {
        (true, _) => ExitCode::from(shell::INTERRUPTED),
        (false, true) => ExitCode::SUCCESS,
        (false, false) => ExitCode::FAILURE,
    })
}
