//! Running the programs that own an on-disk format: `mkfs.*`, `blkid`, the resize tools.
//!
//! Programs are only run for on-disk formats, since no other code
//! knows them well enough. None outlives the driver: its next start may use the same device.

use std::ffi::{CStr, OsStr};
use std::io;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Output, Stdio};

use nix::mount::{MsFlags, mount};
use nix::sched::{CloneFlags, unshare};
use nix::sys::prctl::set_pdeathsig;
use nix::sys::signal::Signal;

use files::failpoint;
use files::{Context, Result, step};

/// The operation that fails for a program that is not installed.
pub const RUN: &str = "run";

/// Runs `program` to its end and returns what it printed; an exit status that `accept` does not
/// hold for is an error with the last line of its error output.
pub fn run<S: AsRef<OsStr>>(
    program: &'static str,
    arguments: &[S],
    subject: &Path,
    accept: impl Fn(i32) -> bool,
) -> Result<Output> {
    let mut command = Command::new(program);
    command.args(arguments).arg(subject);
    run_command(program, command, subject, accept)
}

/// The same with the arguments behind the subject.
pub fn run_with<S: AsRef<OsStr>>(
    program: &'static str,
    subject: &Path,
    arguments: &[S],
    accept: impl Fn(i32) -> bool,
) -> Result<Output> {
    let mut command = Command::new(program);
    command.arg(subject).args(arguments);
    run_command(program, command, subject, accept)
}

/// Starts this program again with its arguments, in this process: its threads end, and its files are closed.
pub fn start_again() -> io::Error {
    let mut arguments = std::env::args_os();
    let name = arguments.next().unwrap_or_default();
    Command::new("/proc/self/exe").arg0(name).args(arguments).exec()
}

fn run_command(
    program: &'static str,
    mut command: Command,
    subject: &Path,
    accept: impl Fn(i32) -> bool,
) -> Result<Output> {
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let driver = nix::unistd::getpid();
    let prepare = move || {
        set_pdeathsig(Signal::SIGKILL)?;
        if nix::unistd::getppid() != driver {
            // It was killed before the kernel knew.
            return Err(io::ErrorKind::BrokenPipe.into());
        }
        if program == "mkfs.btrfs" {
            // If that is not permitted, mkfs reads them and may succeed.
            let _ = hide_mounts();
        }
        Ok(())
    };
    // SAFETY: between fork and exec it makes system calls and allocates nothing.
    unsafe { command.pre_exec(prepare) };
    let child = step(RUN, program.as_ref(), || command.spawn())?;
    // A point while it is at work. It ends in any case: nothing still runs after an error.
    let passed = failpoint::pass("wait for", program.as_ref());
    let output = child.wait_with_output().and_then(|output| passed.map(|()| output));
    let output = output.context("wait for", program.as_ref())?;
    match output.status.code() {
        Some(code) if accept(code) => Ok(output),
        _ => {
            let said = String::from_utf8_lossy(&output.stderr);
            let last = said.trim().lines().last().unwrap_or("no error output").to_owned();
            let message = format!("{program}: {}: {last}", output.status);
            Err(io::Error::other(message)).context("run a program on", subject)
        }
    }
}

/// Shows the calling process an empty table of mounts. mkfs.btrfs asks every loop device in that table for its file, and
/// fails when one of them, which may belong to another program, is on a dead filesystem. That the subject is not mounted
/// is ensured in other ways: an image is new, and a device is opened exclusively.
#[expect(clippy::disallowed_methods, reason = "in a namespace that ends with the program")]
fn hide_mounts() -> nix::Result<()> {
    unshare(CloneFlags::CLONE_NEWNS)?;
    mount(None::<&CStr>, c"/", None::<&CStr>, MsFlags::MS_REC | MsFlags::MS_PRIVATE, None::<&CStr>)?;
    mount(Some(c"/dev/null"), c"/proc/self/mounts", None::<&CStr>, MsFlags::MS_BIND, None::<&CStr>)
}

/// Whether `program` is on the path.
pub fn exists(program: &str) -> bool {
    std::env::var_os("PATH")
        .is_some_and(|path| std::env::split_paths(&path).any(|directory| directory.join(program).is_file()))
}
