//! `cbt-lab`: what a driver author and a backup author need to test their own changed block tracking. It knows CSI,
//! and nothing of any driver.
// They panic where the output is closed: `shell` does not.
#![warn(clippy::print_stdout, clippy::print_stderr)]
#![allow(clippy::disallowed_methods)]
#![forbid(unsafe_code)]

mod bench;
mod code;
mod conformance;
mod faults;
mod mock;
mod output;
mod random;
mod tls;

use std::error::Error;
use std::process::ExitCode;

use clap::{Parser, Subcommand, ValueEnum};

/// Tests changed block tracking (KEP-3314) of any CSI driver.
///
/// Exit codes: 0 done, 1 failed (the reason is on standard error), 2 wrong usage, or nothing could be tested or measured, 130
/// interrupted.
#[derive(Debug, Parser)]
#[command(name = "cbt-lab", version, max_term_width = 100)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    Bench(bench::Arguments),
    Conformance(conformance::Arguments),
    Faults(faults::Arguments),
    Mock(mock::Arguments),
}

/// What a command prints on standard output.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Output {
    /// For people.
    Text,
    /// One JSON object.
    Json,
}

/// What a subcommand returns: an exit code, or an error for standard error.
type Done = Result<ExitCode, Box<dyn Error>>;

fn main() -> ExitCode {
    let done = match shell::parse::<Cli>().command {
        Command::Bench(arguments) => bench::run(arguments),
        Command::Conformance(arguments) => conformance::run(arguments),
        Command::Faults(arguments) => faults::run(arguments),
        Command::Mock(arguments) => mock::run(arguments),
    };
    shell::end("cbt-lab", done)
}
