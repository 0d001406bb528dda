//! The `deltapath` command: parse, start tracing, run one subcommand.

use std::process::ExitCode;

use clap::Parser;
use deltapath::cli::{Cli, run};

fn main() -> ExitCode {
    let cli = Cli::parse();
    cli.start_tracing();
    run(cli)
}
