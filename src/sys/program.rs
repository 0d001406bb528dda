//! Running the programs that own an on-disk format: `mkfs.*`, `blkid`, the resize tools.
//!
//! Everything that is a system call is made as one; these are called because no other code may
//! claim to know their formats.

use std::ffi::OsStr;
use std::io;
use std::path::Path;
use std::process::{Command, Output, Stdio};

use super::{Context, Error, Result};

/// Runs `program` to its end and returns what it printed; an exit status that `accept` does not
/// hold for is an error with the program's own last words.
pub fn run<S: AsRef<OsStr>>(
    program: &'static str,
    arguments: &[S],
    subject: &Path,
    accept: impl Fn(i32) -> bool,
) -> Result<Output> {
    let output = Command::new(program).args(arguments).arg(subject).stdin(Stdio::null()).output().map_err(
        |source| match source.kind() {
            io::ErrorKind::NotFound => {
                Error { operation: "run (install the program on this node)", path: program.into(), source }
            }
            _ => Error { operation: "run", path: program.into(), source },
        },
    )?;
    match output.status.code() {
        Some(code) if accept(code) => Ok(output),
        _ => {
            let said = String::from_utf8_lossy(&output.stderr);
            let last = said.trim().lines().last().unwrap_or("it said nothing").to_owned();
            let message = format!("{program}: {}: {last}", output.status);
            Err(io::Error::other(message)).context("run a program on", subject)
        }
    }
}

/// Whether `program` is on the path.
pub fn exists(program: &str) -> bool {
    std::env::var_os("PATH")
        .is_some_and(|path| std::env::split_paths(&path).any(|directory| directory.join(program).is_file()))
}
