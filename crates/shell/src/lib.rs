//! What every program owes the one who started it: what it prints, the signals that end it, and its exit codes, which are a table
//! in docs/reference.md.
//!
//! - A reader that closes standard output (`| head`) has what it wanted: nothing is said of it, and the program ends as its work
//!   ended. Output that cannot be written for another reason, such as a full disk, is an error in one line.
//! - What cannot be said on standard error is lost, and nothing else.

mod pages;
mod signals;

use std::error::Error;
use std::ffi::OsStr;
use std::io::{self, ErrorKind, Write};
use std::net::SocketAddr;
use std::ops::RangeInclusive;
use std::process::ExitCode;
use std::str::FromStr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use clap::error::{ContextKind, ContextValue, ErrorKind as Wrong};
use clap::{Arg, ArgMatches, Args, Command, Parser};
use serde::Serialize;

pub use self::signals::{Signals, at_signals};

/// Text as a terminal may show it, on one line: what is in a repository, or the name of a file, may hold anything.
pub fn plain(text: &str) -> String {
    let escape = |c: char| match c {
        '\\' | '"' | '\'' => c.to_string(),
        c => c.escape_debug().to_string(),
    };
    text.chars().map(escape).collect()
}

/// The same for text of several lines.
pub fn plain_lines(text: &str) -> String {
    text.split('\n').map(plain).collect::<Vec<_>>().join("\n")
}

/// The commit and its date, from git, in images and what `make build` makes. `cargo build` has none: else each commit would build
/// everything again.
const COMMIT: Option<&str> = option_env!("DELTAPATH_COMMIT");

/// Exit code of wrong usage.
pub const USAGE: u8 = 2;
/// Exit code of a command that a signal has ended. A server that a signal ends has done what it is for: 0.
pub const INTERRUPTED: u8 = 130;

/// What is asked is wrong in itself, whatever the machine holds: the exit code is 2.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct Usage(pub String);

/// The exit code of a program that is done; of one that failed, the reason is said.
pub fn end(program: &str, done: Result<ExitCode, Box<dyn Error>>) -> ExitCode {
    end_with(program, done, |line| say!("{line}"))
}

/// The same, with another way to say a line.
pub fn end_with(program: &str, done: Result<ExitCode, Box<dyn Error>>, say: impl FnOnce(&str)) -> ExitCode {
    done.unwrap_or_else(|error| {
        say(&format!("{program}: {}", base::report(&*error)));
        if error.is::<Usage>() { ExitCode::from(USAGE) } else { ExitCode::FAILURE }
    })
}

/// Says a line on standard error, as `eprintln!` does where somebody reads it.
#[macro_export]
macro_rules! say {
    ($($line:tt)*) => {{
        use std::io::Write as _;
        let _ = writeln!(std::io::stderr(), "{}", $crate::plain_lines(&format!($($line)*)));
    }};
}

/// `--quiet`, for each command that shows progress.
#[derive(Debug, Args)]
pub struct Quiet {
    /// Print no progress on standard error.
    #[arg(long, short)]
    quiet: bool,
}

static IS_QUIET: AtomicBool = AtomicBool::new(false);

/// Whether progress may be shown: without `--quiet`.
pub fn tells_progress() -> bool {
    !IS_QUIET.load(Ordering::Relaxed)
}

/// Whether the command was given `--quiet`.
fn is_quiet(given: &ArgMatches) -> bool {
    given.try_get_one("quiet").is_ok_and(|quiet| quiet == Some(&true))
        || given.subcommand().is_some_and(|(_, given)| is_quiet(given))
}

/// Flags that all programs read in the same way. A negative number is a value of its flag, not a flag. A socket of a CSI driver is
/// `--endpoint` or, as the sidecars name it, `--csi-address`; the address of metrics and probes is `--http-endpoint`.
fn read_alike(command: Command) -> Command {
    let command = command.mut_args(|of| match of.get_action().takes_values() && !of.is_positional() {
        true => of.allow_negative_numbers(true),
        false => of,
    });
    let command = command.mut_args(|of| match of.get_long() {
        Some("endpoint") => of.visible_alias("csi-address"),
        Some("csi-address") => of.visible_alias("endpoint"),
        // What deltapath called it; for one release.
        Some("http-endpoint") => of.alias("metrics-address"),
        _ => of,
    });
    command.mut_subcommands(read_alike)
}

/// What is wrong where a flag has an empty value, in all programs: it is a variable that is not set in a script, and no flag
/// means anything by it.
fn empty_value(command: &Command, given: &ArgMatches) -> Option<String> {
    let is_empty = |of: &&Arg| {
        let values = given.try_get_raw(of.get_id().as_str()).ok().flatten();
        values.is_some_and(|mut values| values.any(OsStr::is_empty))
    };
    if let Some(flag) = command.get_arguments().find(is_empty) {
        // Of a command that is not built yet, clap cannot show a flag.
        let value = flag.get_value_names().into_iter().flatten().map(|name| format!("<{name}>"));
        let words = flag.get_long().map(|long| format!("--{long}")).into_iter().chain(value);
        let flag = words.collect::<Vec<_>>().join(" ");
        return Some(format!("invalid value '' for '{flag}': it is empty: is a variable not set?"));
    }
    let (name, given) = given.subcommand()?;
    empty_value(command.find_subcommand(name)?, given)
}

/// Ends the program for a wrong command line, which is also told as JSON if that was asked for.
fn refuse(error: &clap::Error) -> ! {
    let words: Vec<_> = std::env::args_os().take_while(|word| word != "--").collect();
    if words.windows(2).any(|pair| pair == ["--output", "json"])
        || words.iter().any(|word| word == "--output=json")
    {
        let text = error.render().to_string();
        let what = text.split("\n\n").next().unwrap_or_default().trim_start_matches("error: ");
        // The reader may be gone.
        let _ = writeln!(io::stdout(), "{}", serde_json::json!({ "error": what }));
    }
    error.exit()
}

/// The error, which names the commands that take a flag where the given one does not.
fn naming_takers(program: &Command, mut error: clap::Error) -> clap::Error {
    if let (Wrong::UnknownArgument, Some(ContextValue::String(flag))) =
        (error.kind(), error.get(ContextKind::InvalidArg))
    {
        let is_it = |of: &Arg| match flag.strip_prefix("--") {
            Some(long) => of.get_long() == Some(long),
            None => flag
                .strip_prefix('-')
                .is_some_and(|short| of.get_short().is_some_and(|of| short == of.to_string())),
        };
        let takers = program.get_subcommands().filter(|command| command.get_arguments().any(is_it));
        let takers = takers.map(Command::get_name).collect::<Vec<_>>().join(", ");
        if !takers.is_empty() {
            let tip = format!("'{flag}' is a flag of other commands: {takers}");
            error.insert(ContextKind::Suggested, ContextValue::StyledStrs(vec![tip.into()]));
        }
    }
    error
}

/// How kubectl calls a plugin: `kubectl cbt` for a program that is installed as `kubectl-cbt`.
fn as_plugin() -> Option<String> {
    let path = std::env::args_os().next()?;
    let name = std::path::Path::new(&path).file_name()?.to_str()?;
    Some(format!("kubectl {}", name.strip_prefix("kubectl-")?.replace('_', "-")))
}

/// What `--version` says.
fn version(number: &str, commit: Option<&str>) -> String {
    match commit {
        None | Some("") => number.to_owned(),
        Some(commit) => format!("{number} ({commit})"),
    }
}

/// The command line, of which a wrong one ends the program.
///
/// Help, the version, `completions` and `man`, which every program has, are printed here, and end it too.
pub fn parse<C: Parser>() -> C {
    let mut program = read_alike(pages::add(C::command()));
    if let Some(name) = as_plugin() {
        program = program.bin_name(name);
    }
    if let Some(number) = program.get_version() {
        let version: &'static str = version(number, COMMIT).leak();
        program = program.version(version);
    }
    let given = match program.clone().try_get_matches() {
        // With the style that fits the terminal.
        Err(error) if !error.use_stderr() => {
            printed(error.print().and_then(|()| io::stdout().flush())).map(|()| None).map_err(Box::from)
        }
        given => {
            let given = given.unwrap_or_else(|error| refuse(&naming_takers(&program, error)));
            if let Some(why) = empty_value(&program, &given) {
                refuse(&program.error(Wrong::InvalidValue, why));
            }
            pages::run(&program, &given).map(|is_done| Some(given).filter(|_| !is_done))
        }
    };
    match given {
        Ok(Some(given)) => {
            IS_QUIET.store(is_quiet(&given), Ordering::Relaxed);
            C::from_arg_matches(&given).unwrap_or_else(|error| refuse(&error))
        }
        Ok(None) => std::process::exit(0),
        Err(error) => {
            say!("{}: {}", program.get_name(), base::report(&*error));
            std::process::exit(1)
        }
    }
}

/// The value of a flag that is a length of time above zero.
pub fn age(text: &str) -> Result<Duration, String> {
    match age_or_none(text)? {
        Duration::ZERO => Err("it must be above 0".into()),
        age => Ok(age),
    }
}

/// The value of a flag that is a length of time, or 0. What is added to the time of now, even more than once, is a date that every
/// calendar has.
pub fn age_or_none(text: &str) -> Result<Duration, String> {
    let longest = Duration::from_secs(36_500 * 24 * 3600);
    base::age::read(text).filter(|age| *age <= longest).ok_or_else(|| {
        "write a whole number and a unit (s, m, h, d), such as 5m, or seconds, such as 0.5; at most 36500d".into()
    })
}

/// The values of a flag that is a number of things. clap's own parsers of 64 bits and `FromStr` do not say what there is.
pub fn within<T: FromStr>(
    range: RangeInclusive<u64>,
) -> impl Fn(&str) -> Result<T, String> + Clone + Send + Sync {
    move |text| {
        let number =
            text.parse::<u64>().ok().filter(|number| range.contains(number)).and_then(|_| text.parse().ok());
        number.ok_or_else(|| format!("{text} is not in {}..={}", range.start(), range.end()))
    }
}

/// The value of `--http-endpoint`: `[ADDRESS]:PORT`.
pub fn http_endpoint(text: &str) -> Result<SocketAddr, String> {
    let text = if text.starts_with(':') { format!("0.0.0.0{text}") } else { text.to_owned() };
    text.parse()
        .map_err(|_| "an endpoint is an IP address and a port, such as 127.0.0.1:8080, or :8080".into())
}

/// A number of things, such as `1 snapshot` and `2 snapshots`.
pub fn count(number: usize, thing: &str) -> String {
    format!("{number} {thing}{}", if number == 1 { "" } else { "s" })
}

static IS_PRINTING: AtomicBool = AtomicBool::new(false);

/// Whether a result is being printed: its reader may never take it.
pub fn is_printing() -> bool {
    IS_PRINTING.load(Ordering::Relaxed)
}

/// Prints on standard output, at once.
pub fn print(text: &str) -> io::Result<()> {
    IS_PRINTING.store(true, Ordering::Relaxed);
    let mut out = io::stdout().lock();
    let written = out.write_all(text.as_bytes()).and_then(|()| out.flush());
    IS_PRINTING.store(false, Ordering::Relaxed);
    printed(written)
}

/// What came of printing on standard output. If its reader has closed it, that is not an error.
fn printed(written: io::Result<()>) -> io::Result<()> {
    match written {
        Err(error) if error.kind() != ErrorKind::BrokenPipe => {
            Err(io::Error::new(error.kind(), format!("write to standard output: {error}")))
        }
        _ => Ok(()),
    }
}

/// Prints a result: as JSON, or as `text` puts it.
pub fn show(
    is_json: bool,
    result: &(impl Serialize + ?Sized),
    text: impl FnOnce() -> String,
) -> io::Result<()> {
    match is_json {
        true => print(&(serde_json::to_string_pretty(result)? + "\n")),
        false => print(&text()),
    }
}

/// The end of work that stays done, whether or not its result could be printed.
pub fn told(program: &str, printed: io::Result<()>) -> ExitCode {
    if let Err(error) = printed {
        say!("{program}: it is done, but could not be reported: {error}");
    }
    ExitCode::SUCCESS
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_version_names_the_commit_where_there_is_one() {
        for commit in [None, Some("")] {
            assert_eq!(version("0.1.0", commit), "0.1.0");
        }
        assert_eq!(version("0.1.0", Some("0123abcd4567 2026-01-31")), "0.1.0 (0123abcd4567 2026-01-31)");
    }

    #[test]
    fn one_thing_is_no_plural() {
        assert_eq!([0, 1, 2].map(|number| count(number, "backup")), ["0 backups", "1 backup", "2 backups"]);
    }
}
