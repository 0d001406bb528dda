//! The `deltapath` command: parse, start tracing, run one subcommand.
// They panic where the output is closed: `shell` does not.
#![warn(clippy::print_stdout, clippy::print_stderr)]

use std::process::ExitCode;

use deltapath::cli::{Cli, run};

fn main() -> ExitCode {
    let cli = shell::parse::<Cli>();
    cli.start_tracing();
    run(cli)
}
