//! `cbt-backup`: backs volumes up by their changed blocks. Here the commands are started, and what they found is printed. It is
//! a library for its fuzz targets alone.
// They panic where the output is closed: `shell` does not.
#![warn(clippy::print_stdout, clippy::print_stderr)]
#![forbid(unsafe_code)]

mod arguments;
mod backup;
mod block;
mod cluster;
mod device;
mod error;
#[cfg(any(test, feature = "fuzz"))]
pub mod fuzz;
mod nbd;
mod outputs;
mod plan;
mod progress;
mod repository;
mod restore;
mod sampled;
mod show;
mod wait;

use std::io::{IsTerminal, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use base::Stop;
use files::Context as _;
use indicatif::HumanBytes;
use serde::Serialize;
use snapshot_metadata_client::{Client, Options, Policy, Token};
use tracing_subscriber::filter::{LevelFilter, Targets};
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;
use tracing_subscriber::{Layer, fmt, registry};

use arguments::{
    Cli, Command, ListArguments, MountArguments, Output, PruneArguments, RestoreArguments, RunArguments,
    ShowArguments, Source, VerifyArguments,
};
use backup::{Asked, Request, Wish};
use error::{Error, Result, refused};
use repository::lock::{Lost, Mode, Wanted};
use repository::prune;
use repository::{About, Repository, verify};
use wait::wait;

const NAME: &str = "cbt-backup";

/// Runs the command line of this process.
pub fn main() -> ExitCode {
    let cli = shell::parse::<Cli>();
    let levels = std::env::var("RUST_LOG").ok().and_then(|levels| levels.parse::<Targets>().ok());
    let levels = levels.unwrap_or_else(|| Targets::new().with_default(LevelFilter::WARN));
    let log = fmt::layer().with_writer(std::io::stderr).with_ansi(std::io::stderr().is_terminal());
    registry().with(log.without_time().with_target(false).with_filter(levels)).init();
    let is_json = cli.output == Output::Json;
    let done = start(cli);
    if let Err(error) = &done
        && is_json
    {
        // The reader may be gone.
        let _ = writeln!(std::io::stdout(), "{}", serde_json::json!({ "error": base::report(error) }));
    }
    match done {
        Err(Error::Stopped) => {
            shell::say!("{NAME}: interrupted");
            ExitCode::from(shell::INTERRUPTED)
        }
        Err(Error::Usage(usage)) => shell::end(NAME, Err(usage.into())),
        // It may name what is in the repository.
        done => shell::end_with(NAME, done.map_err(Into::into), |line| shell::say!("{}", shell::plain(line))),
    }
}

/// What all commands need.
struct Context {
    url: Option<String>,
    is_json: bool,
    runtime: tokio::runtime::Runtime,
    stop: Stop,
    lost: Lost,
}

impl Context {
    fn url(&self) -> Result<&str> {
        self.url.as_deref().ok_or_else(|| {
            Error::usage("no repository is named: add --repository DIR, or set CBT_BACKUP_REPOSITORY")
        })
    }

    /// The repository, for a command that only reads it.
    fn shared(&self, command: &str) -> Result<Repository> {
        let repository = Repository::open(self.url()?, self.runtime.handle(), &self.stop)?;
        self.lock(repository, Wanted { mode: Mode::Shared, command, wait: Duration::ZERO, is_reader: true })
    }

    fn lock(&self, repository: Repository, wanted: Wanted<'_>) -> Result<Repository> {
        repository.lock(wanted, &self.lost)
    }

    /// What an async call answers, unless the command is stopped before.
    fn wait<T>(&self, answer: impl Future<Output = T>) -> Result<T> {
        wait(self.runtime.handle(), &self.stop, answer)
    }

    /// Prints what a command found: as JSON, or as `text` puts it.
    fn print(&self, value: &impl Serialize, text: impl FnOnce() -> String) -> Result<()> {
        let printed = shell::show(self.is_json, value, text);
        printed.map_err(|error| Error::refused(error.to_string()))
    }

    /// The same of what a command has done.
    fn tell(&self, value: &impl Serialize, text: impl FnOnce() -> String) -> Result<ExitCode> {
        Ok(shell::told(NAME, shell::show(self.is_json, value, text)))
    }
}

fn start(cli: Cli) -> Result<ExitCode> {
    let started = |error: std::io::Error| refused!("start: {error}");
    // A repository holds whole disks.
    nix::sys::stat::umask(nix::sys::stat::Mode::from_bits_truncate(0o077));
    // A file that must not grow further (ulimit -f) is an error of the write, and not the end of the process. Threads inherit it.
    nix::sys::signal::SigSet::from(nix::sys::signal::Signal::SIGXFSZ)
        .thread_block()
        .map_err(|error| started(error.into()))?;
    let stop = stop_on_signals().map_err(started)?;
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .map_err(started)?;
    let lost = Lost::default();
    let context = Context { url: cli.repository, is_json: cli.output == Output::Json, runtime, stop, lost };
    let done = match execute(&context, cli.command) {
        // The lock's loss stops a command as Ctrl-C does.
        Err(Error::Stopped) => Err(context.lost.check().err().unwrap_or(Error::Stopped)),
        done => done,
    };
    // A call to a disk that does not answer cannot be ended, and no one waits for it any more.
    context.runtime.shutdown_background();
    done
}

fn execute(context: &Context, command: Command) -> Result<ExitCode> {
    match command {
        Command::Full(source) => back_up(context, source, None, Wish::Full),
        Command::Incremental(of) => back_up(context, of.source, of.base, Wish::Incremental),
        Command::Auto(of) => back_up(context, of.source, of.base, Wish::Auto),
        Command::Run(arguments) => run(context, arguments),
        Command::Restore(arguments) => restore(context, &arguments),
        Command::Verify(arguments) => verify(context, &arguments),
        Command::List(arguments) => list(context, &arguments),
        Command::Prune(arguments) => prune(context, &arguments),
        Command::Show(arguments) => show(context, &arguments),
        Command::Mount(arguments) => mount(context, &arguments),
    }
}

/// From here on a signal asks for an end instead of making it. A second one makes it.
fn stop_on_signals() -> std::io::Result<Stop> {
    let stop = Stop::default();
    let asked = stop.clone();
    shell::at_signals(move || {
        // A result whose reader never reads must not hold up the end.
        if asked.check().is_err() || shell::is_printing() {
            std::process::exit(shell::INTERRUPTED.into());
        }
        asked.cancel();
    })?;
    Ok(stop)
}

/// Who is asked, and the CSI handle of the snapshot.
fn asked(context: &Context, source: &Source) -> Result<(Option<Asked>, Option<String>)> {
    let Some(snapshot) = source.snapshot.clone() else { return Ok((None, None)) };
    let client = match (&source.endpoint, &source.namespace) {
        (Some(endpoint), _) => arguments::driver(endpoint)?,
        (None, Some(namespace)) => {
            let api = context.wait(cluster::api(&source.cluster))??;
            let token = source.token_file.clone().map_or(Token::OwnAccount, Token::File);
            Client::kubernetes(api, namespace, Options { token, ..Options::default() })
        }
        (None, None) => return Ok((None, Some(snapshot))),
    };
    let idle = source.max_silence;
    let client = client.with_policy(Policy { retries: source.retries, idle, ..Policy::default() });
    let handle = context.wait(client.snapshot_handle(&snapshot))??;
    Ok((Some(Asked { client, snapshot }), Some(handle)))
}

fn back_up(context: &Context, source: Source, base: Option<String>, wish: Wish) -> Result<ExitCode> {
    let url = context.url()?;
    // Nothing is made where there is nothing to read, or nowhere to tell of it.
    let device = device::Device::open(&source.device)?;
    let report =
        source.report.as_ref().map(|report| outputs::report_of(context, report, &device)).transpose()?;
    let (asked, snapshot) = asked(context, &source)?;
    let request = Request { source, asked, snapshot, base, wish };
    let repository = Repository::open_or_create(url, context.runtime.handle(), &context.stop)?;
    let wanted = Wanted { mode: Mode::Shared, command: "backup", wait: Duration::ZERO, is_reader: false };
    let repository = context.lock(repository, wanted)?;
    let made = backup::run(&repository, &request)?.about;
    if let Some(report) = report {
        let json = serde_json::to_vec(&made);
        let json = json.map_err(|error| refused!("write JSON: {error}"))?;
        files::change::write_whole(&report, &json).map_err(|error| {
            let (id, why) = (&made.id, base::report(&error));
            refused!("backup {id} is made, but its report is not written: {why}")
        })?;
    }
    tell_backup(context, &made)
}

fn tell_backup(context: &Context, made: &About) -> Result<ExitCode> {
    context.tell(made, || {
        let About { id, kind, listed, read, added, milliseconds, why, .. } = made;
        // Of `run` all is what a pod reports.
        let (id, why) = (shell::plain(id), why.as_deref().map(shell::plain));
        let why = why.map_or(String::new(), |why| format!("full because {why}\n"));
        format!(
            "{id}: {kind}, {} listed, {} read, {} added to the repository, {:.1} s\n{why}",
            HumanBytes(*listed),
            HumanBytes(*read),
            HumanBytes(*added),
            *milliseconds as f64 / 1e3
        )
    })
}

fn run(context: &Context, arguments: RunArguments) -> Result<ExitCode> {
    let place = match arguments.clean_up {
        true => String::new(),
        false => place_in_pod(context.url.as_deref(), arguments.repository_claim.as_deref())?,
    };
    let made = context.runtime.block_on(cluster::run(&arguments, &place, &context.stop))?;
    made.map_or(Ok(ExitCode::SUCCESS), |made| tell_backup(context, &made))
}

/// The repository as the pod of a run names it. A directory that is not in a claim would go with the pod.
fn place_in_pod(repository: Option<&str>, claim: Option<&str>) -> Result<String> {
    let why = match (repository, claim) {
        (None, _) => {
            "no repository is named: add --repository s3://BUCKET/PREFIX, or --repository-claim NAME and \
             --repository DIRECTORY, or set CBT_BACKUP_REPOSITORY"
                .into()
        }
        (Some(bucket), None) if bucket.starts_with("s3://") => return Ok(bucket.to_owned()),
        (Some(directory), None) => format!(
            "run needs a bucket (s3://BUCKET/PREFIX), or --repository-claim NAME for the directory {directory:?}"
        ),
        (Some(place), Some(_)) if place.starts_with("s3://") || place.split('/').any(|part| part == "..") => {
            format!("--repository-claim takes a directory in the claim, not {place}")
        }
        (Some(directory), Some(_)) => {
            return Ok(format!("{}/{}", cluster::CLAIMED, directory.trim_start_matches('/')));
        }
    };
    Err(Error::usage(why))
}

/// A file that is made needs a directory that has a name.
fn absolute(path: &Path) -> Result<PathBuf> {
    Ok(std::path::absolute(path).context("find", path)?)
}

fn restore(context: &Context, arguments: &RestoreArguments) -> Result<ExitCode> {
    let repository = context.shared("restore")?;
    let volume = arguments.volume.as_deref();
    let index = repository.find(&arguments.backup, volume)?;
    let threads = arguments.in_flight.into();
    let to = &absolute(&arguments.to)?;
    outputs::outside(context, to)?;
    let restored = match &arguments.onto_base {
        Some(base) => {
            let base = repository.find(base, volume)?;
            restore::onto(&repository, &index, &base, to, threads)?
        }
        None => restore::run(&repository, &index, to, arguments.overwrite, threads)?,
    };
    context.tell(&restored, || {
        format!(
            "{} is in {}: {} written, {} cleared\n",
            restored.id,
            shell::plain(&restored.to.to_string_lossy()),
            HumanBytes(restored.written),
            HumanBytes(restored.cleared)
        )
    })
}

fn verify(context: &Context, arguments: &VerifyArguments) -> Result<ExitCode> {
    if arguments.against.is_some() && arguments.backups.len() != 1 {
        return Err(Error::usage("one backup is compared with a device: name one"));
    }
    let repository = context.shared("verify")?;
    let volume = arguments.volume.as_deref();
    let threads = arguments.in_flight.into();
    if let (Some(device), [backup]) = (&arguments.against, arguments.backups.as_slice()) {
        let index = repository.find(backup, volume)?;
        let compared = restore::compare(&repository, &index, device, threads)?;
        drop(repository);
        context.print(&compared, || {
            let mut text = String::new();
            for range in &compared.differing {
                text += &format!("bytes {} to {} differ\n", range.start, range.end);
            }
            let verdict = match compared.differing_bytes {
                0 => "equal".to_owned(),
                bytes => format!("{} differ", HumanBytes(bytes)),
            };
            let bytes = HumanBytes(compared.bytes);
            let device = shell::plain(&device.to_string_lossy());
            text + &format!("{} and {device}: {bytes} compared, {verdict}\n", compared.id)
        })?;
        return Ok(verdict(compared.differing_bytes == 0));
    }
    let ids = |wanted: &String| {
        // An index that is damaged cannot be found by its content.
        let exact = repository.ids()?.into_iter().find(|id| id == wanted);
        exact.map_or_else(|| Ok(repository.find(wanted, volume)?.about.id), Ok)
    };
    let chosen: Option<Vec<String>> = match arguments.backups.as_slice() {
        [] => None,
        wanted => Some(wanted.iter().map(ids).collect::<Result<_>>()?),
    };
    let report = verify::verify(&repository, chosen.as_deref(), threads)?;
    drop(repository);
    context.print(&report, || {
        let mut text = String::new();
        for damage in &report.damage {
            let backup = damage.backup.as_deref().unwrap_or("no backup");
            let place = match (damage.start, damage.end) {
                (Some(start), Some(end)) => format!(", bytes {start} to {end}"),
                _ => String::new(),
            };
            text += &format!("{}{place}: {}\n", shell::plain(backup), shell::plain(&damage.what));
        }
        let unused = match report.unused {
            None | Some(0) => String::new(),
            Some(bytes) => format!(" ({} of it unused)", HumanBytes(bytes)),
        };
        let found = match report.damage.len() {
            0 => "all sound".to_owned(),
            count => format!("{count} damaged"),
        };
        let (backups, packs) = (shell::count(report.backups, "backup"), shell::count(report.packs, "pack"));
        text + &format!("{backups}, {packs}, {}{unused}: {found}\n", HumanBytes(report.bytes))
    })?;
    Ok(verdict(report.damage.is_empty()))
}

fn verdict(is_good: bool) -> ExitCode {
    if is_good { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// A backup in the list. As JSON one that is damaged has `damage` in place of all but its id.
#[derive(Serialize)]
#[serde(untagged)]
enum Listed {
    Sound(About),
    Damaged { id: String, damage: String },
}

fn list(context: &Context, arguments: &ListArguments) -> Result<ExitCode> {
    let repository = context.shared("list")?;
    let listed = repository.each_index(|id, index| match index {
        Ok(index) => Ok(Listed::Sound(index.about)),
        Err(error) if error.is_damage() => {
            Ok(Listed::Damaged { id: id.to_owned(), damage: base::report(&error) })
        }
        Err(error) => Err(error),
    })?;
    let mut listed = listed.into_iter().collect::<Result<Vec<_>>>()?;
    // The volume of a damaged one is not known.
    listed.retain(|backup| match (backup, &arguments.volume) {
        (Listed::Sound(about), Some(volume)) => about.volume == *volume,
        _ => true,
    });
    let damaged: Vec<&str> = listed
        .iter()
        .filter_map(|backup| match backup {
            Listed::Damaged { damage, .. } => Some(damage.as_str()),
            Listed::Sound(_) => None,
        })
        .collect();
    // Its lock is not held while a reader takes its time.
    drop(repository);
    context.print(&listed, || text_of(&listed))?;
    for damaged in &damaged {
        shell::say!("{NAME}: {}", shell::plain(damaged));
    }
    Ok(verdict(damaged.is_empty()))
}

fn text_of(listed: &[Listed]) -> String {
    let abouts = || {
        listed.iter().filter_map(|backup| match backup {
            Listed::Sound(about) => Some(about),
            Listed::Damaged { .. } => None,
        })
    };
    let widths = abouts().map(|about| show::shown(&about.volume).chars().count()).max().unwrap_or(0).max(6);
    let mut text = format!(
        "{:<27}  {:widths$}  {:<11}  {:>11}  {:>11}  {:>11}\n",
        "BACKUP", "VOLUME", "KIND", "SIZE", "DATA", "ADDED"
    );
    for About { id, volume, kind, size, data, added, .. } in abouts() {
        let human = |bytes: &u64| HumanBytes(*bytes).to_string();
        let (id, volume) = (show::shown(id), show::shown(volume));
        text += &format!(
            "{id:<27}  {volume:widths$}  {:<11}  {:>11}  {:>11}  {:>11}\n",
            kind.to_string(),
            human(size),
            human(data),
            human(added)
        );
    }
    text
}

fn prune(context: &Context, arguments: &PruneArguments) -> Result<ExitCode> {
    let repository = match arguments.dry_run {
        true => context.shared("prune")?,
        false => {
            let repository = Repository::open(context.url()?, context.runtime.handle(), &context.stop)?;
            let wanted =
                Wanted { mode: Mode::Exclusive, command: "prune", wait: arguments.wait, is_reader: false };
            context.lock(repository, wanted)?
        }
    };
    let pruned = prune::prune(&repository, arguments)?;
    context.tell(&pruned, || {
        let would = if arguments.dry_run { "would be " } else { "" };
        let removed: String =
            pruned.removed.iter().map(|id| format!("{} {would}removed\n", shell::plain(id))).collect();
        format!(
            "{removed}{} {would}removed, {} kept; {} {would}freed, {} of them written again\n",
            shell::count(pruned.removed.len(), "backup"),
            pruned.kept.len(),
            HumanBytes(pruned.freed),
            HumanBytes(pruned.moved)
        )
    })
}

fn show(context: &Context, arguments: &ShowArguments) -> Result<ExitCode> {
    let html = arguments.html.as_ref().map(|file| outputs::file_to_write(context, file)).transpose()?;
    let (title, pictures) = match (&arguments.endpoint, &arguments.target) {
        (Some(endpoint), Some(target)) => {
            let base = arguments.base.as_deref();
            (
                target.clone(),
                vec![show::of_snapshots(context.runtime.handle(), endpoint, base, target, &context.stop)?],
            )
        }
        _ => {
            let repository = context.shared("show")?;
            let volume = arguments.volume.as_deref();
            match &arguments.backup {
                Some(backup) => {
                    let index = repository.find(backup, volume)?;
                    (index.about.volume.clone(), vec![show::of_backup(&repository, &index)?])
                }
                None => (volume.unwrap_or("Backups").to_owned(), show::of_volume(&repository, volume)?),
            }
        }
    };
    if let Some(file) = &html {
        show::write(file, &show::html(&title, &pictures))?;
    }
    let has_colour = std::io::stdout().is_terminal() && std::env::var_os("NO_COLOR").is_none();
    context.print(&pictures, || match pictures.as_slice() {
        [one] => one.text(has_colour),
        several => show::history(several, has_colour),
    })?;
    Ok(ExitCode::SUCCESS)
}

fn mount(context: &Context, arguments: &MountArguments) -> Result<ExitCode> {
    let repository = context.shared("mount")?;
    let index = repository.find(&arguments.backup, arguments.volume.as_deref())?;
    repository.check_packs(&index.packs, &index.about.id)?;
    let sector = if arguments.sector_size == "4096" { 4096 } else { 512 };
    nbd::serve(nbd::Export::new(repository, index, sector), &arguments.socket, &context.stop)?;
    // It ends with Ctrl-C, and with a lock that is lost.
    context.lost.check()?;
    Ok(ExitCode::SUCCESS)
}
