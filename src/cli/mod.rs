//! The command line: a file or directory a subcommand, and what they share.

mod check;
mod demo;
mod driver;
mod preflight;
mod verify;

use std::error::Error;
use std::io::IsTerminal;
use std::path::Path;
use std::process::ExitCode;

use clap::builder::{PossibleValue, PossibleValuesParser, TypedValueParser};
use clap::{Parser, Subcommand, ValueEnum};
use tracing_subscriber::filter::{LevelFilter, Targets};
use tracing_subscriber::fmt::writer::BoxMakeWriter;
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;
use tracing_subscriber::{Layer, fmt, registry};

use crate::pool::{self, KINDS, Kind, PoolRequest};
use base::{Quantity, Stop};

/// A CSI driver with exact changed block tracking (KEP-3314).
///
/// Volumes are sparse files behind loop devices, snapshots carry block maps, and the CSI
/// SnapshotMetadata service streams exactly what changed between two snapshots.
///
/// Exit codes: 0 done, 1 failed (the reason is on standard error), 2 wrong usage, 3 only leftovers found
/// (check), 130 interrupted.
#[derive(Debug, Parser)]
#[command(name = "deltapath", version, max_term_width = 100)]
pub struct Cli {
    #[command(subcommand)]
    command: Command,
    /// Format of the log on standard error. RUST_LOG sets the level (default: info for the driver, warn for the other
    /// commands).
    #[arg(long, global = true, value_enum, default_value_t = LogFormat::Text)]
    log_format: LogFormat,
}

#[derive(Debug, Subcommand)]
enum Command {
    Driver(Box<driver::Arguments>),
    Demo(demo::Arguments),
    Verify(verify::Arguments),
    Check(check::Arguments),
    Preflight(preflight::Arguments),
}

/// What a command prints on standard output.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Output {
    /// Readable text.
    Text,
    /// One JSON object at the end.
    Json,
}

/// `--pool`: a kind, or `auto`.
#[derive(Clone, Copy, Debug)]
struct PoolFlag(Option<&'static Kind>);

impl PoolFlag {
    fn parser() -> impl TypedValueParser<Value = Self> {
        let auto = PossibleValue::new("auto").help(
            "The data directory's filesystem if it is btrfs or clones files, else an image, else `dir`",
        );
        let kinds = KINDS.iter().map(|kind| PossibleValue::new(kind.name).help(kind.help));
        PossibleValuesParser::new(std::iter::once(auto).chain(kinds)).map(|name| PoolFlag(pool::named(&name)))
    }

    fn request(self, size: Option<Quantity>) -> PoolRequest {
        PoolRequest { kind: self.0, size }
    }
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum LogFormat {
    /// One readable line per event.
    Text,
    /// One JSON object per event.
    Json,
}

impl Cli {
    /// Sends the log to standard error.
    pub fn start_tracing(&self) {
        let default = match self.command {
            Command::Driver(_) => LevelFilter::INFO,
            _ => LevelFilter::WARN,
        };
        let asked = std::env::var("RUST_LOG").ok().and_then(|levels| levels.parse::<Targets>().ok());
        let mut levels = asked.unwrap_or_else(|| Targets::new().with_default(default));
        // The block maps are a member of their own; in the log they are part of the driver.
        if let Some((_, level)) = levels.iter().find(|(target, _)| *target == "deltapath") {
            levels = levels.with_target("cbt", level);
        }
        // Who serves waits for no reader of its log; the other commands lose no line.
        let writer = match self.command {
            Command::Driver(_) => BoxMakeWriter::new(serve::log::stderr),
            _ => BoxMakeWriter::new(std::io::stderr),
        };
        let log = fmt::layer().with_writer(writer);
        let log = match self.log_format {
            LogFormat::Text => log.with_ansi(std::io::stderr().is_terminal()).boxed(),
            LogFormat::Json => log.json().boxed(),
        };
        registry().with(log.with_filter(levels)).init();
    }
}

/// Runs the subcommand.
pub fn run(cli: Cli) -> ExitCode {
    let done = match cli.command {
        Command::Driver(arguments) => driver::run(*arguments),
        Command::Demo(arguments) => demo::run(arguments),
        Command::Verify(arguments) => verify::run(arguments),
        Command::Check(arguments) => check::run(arguments),
        Command::Preflight(arguments) => preflight::run(arguments),
    };
    serve::log::end("deltapath", done)
}

/// What is said of a file that is where a data directory is to be, or above it.
fn no_directory(data_dir: &Path) -> Option<String> {
    let file = data_dir.ancestors().find(|place| place.exists()).filter(|place| !place.is_dir())?;
    Some(format!("{} is a file, not a directory", file.display()))
}

/// What to do about it.
const ANOTHER_DIR: &str = "name another --data-dir";

/// For commands that need the directory; `preflight` only says it.
fn check_data_dir(data_dir: &Path) -> Result<(), String> {
    no_directory(data_dir).map_or(Ok(()), |found| Err(format!("{found}: {ANOTHER_DIR}")))
}

/// From here on a signal cancels this instead of ending the process: a command that has mounted a pool ends its work and
/// unmounts it first.
fn stop_on_signals() -> std::io::Result<Stop> {
    let stop = Stop::default();
    let cancelled = stop.clone();
    shell::at_signals(move || cancelled.cancel())?;
    Ok(stop)
}

/// What a subcommand returns: an exit code, or an error for standard error.
type Done = Result<ExitCode, Box<dyn Error>>;
