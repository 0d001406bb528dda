//! `cbt-backup`: backs volumes up by their changed blocks. Here the commands are started, and what they found is printed.
#![forbid(unsafe_code)]

mod arguments;
mod backup;
mod cluster;
mod device;
mod error;
mod nbd;
mod plan;
mod progress;
mod repository;
mod restore;
mod show;
mod wait;

use std::io::{IsTerminal, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use base::Stop;
use clap::Parser;
use files::Context as _;
use indicatif::HumanBytes;
use nix::sys::signal::{SigSet, Signal};
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
use error::{Error, Result};
use repository::lock::{Lost, Mode, Wanted};
use repository::prune::{self, Keep, Rules};
use repository::{About, Repository, verify};
use wait::wait;

/// The one of the C library keeps what threads have freed, by the pack.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

fn main() -> ExitCode {
    let cli = Cli::parse();
    let levels = std::env::var("RUST_LOG").ok().and_then(|levels| levels.parse::<Targets>().ok());
    let levels = levels.unwrap_or_else(|| Targets::new().with_default(LevelFilter::WARN));
    let log = fmt::layer().with_writer(std::io::stderr).with_ansi(std::io::stderr().is_terminal());
    registry().with(log.without_time().with_target(false).with_filter(levels)).init();
    let is_json = cli.output == Output::Json;
    let done = start(cli);
    if let Err(error) = &done
        && is_json
    {
        // Nobody may be there any more to read it.
        let _ = writeln!(std::io::stdout(), "{}", serde_json::json!({ "error": base::report(error) }));
    }
    match done {
        Ok(code) => code,
        Err(Error::Stopped) => {
            eprintln!("cbt-backup: interrupted");
            ExitCode::from(130)
        }
        Err(error) => {
            eprintln!("cbt-backup: {}", base::report(&error));
            ExitCode::FAILURE
        }
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
            Error::refused("no repository is named: add --repository DIR, or set CBT_BACKUP_REPOSITORY")
        })
    }

    /// The repository, for a command that only reads it.
    fn shared(&self, command: &str) -> Result<Repository> {
        let repository = Repository::open(self.url()?, self.runtime.handle(), &self.stop)?;
        self.lock(repository, Wanted { mode: Mode::Shared, command, wait: Duration::ZERO, is_reader: true })
    }

    fn lock(&self, repository: Repository, wanted: Wanted<'_>) -> Result<Repository> {
        repository.lock(wanted, &self.stop, &self.lost)
    }

    /// What an async call answers, unless the command is stopped before.
    fn wait<T>(&self, answer: impl Future<Output = T>) -> Result<T> {
        wait(self.runtime.handle(), &self.stop, answer)
    }

    /// Prints what a command found: as JSON, or by `text`.
    fn print(&self, value: &impl Serialize, text: impl FnOnce()) -> Result<()> {
        if self.is_json {
            let json = serde_json::to_string_pretty(value);
            println!("{}", json.map_err(|error| Error::refused(format!("write JSON: {error}")))?);
        } else {
            text();
        }
        Ok(())
    }
}

fn start(cli: Cli) -> Result<ExitCode> {
    let started = |error: std::io::Error| Error::refused(format!("start: {error}"));
    // A repository holds whole disks.
    nix::sys::stat::umask(nix::sys::stat::Mode::from_bits_truncate(0o077));
    // Before there are threads: the signals are for one of them alone.
    let stop = stop_on_signals().map_err(started)?;
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .map_err(started)?;
    let lost = Lost::default();
    let context = Context { url: cli.repository, is_json: cli.output == Output::Json, runtime, stop, lost };
    match execute(&context, cli.command) {
        // The lock's loss stops a command as Ctrl-C does.
        Err(Error::Stopped) => Err(context.lost.check().err().unwrap_or(Error::Stopped)),
        done => done,
    }
}

fn execute(context: &Context, command: Command) -> Result<ExitCode> {
    match command {
        Command::Full(source) => back_up(context, source, Wish::Full),
        Command::Incremental(source) => back_up(context, source, Wish::Incremental),
        Command::Auto(source) => back_up(context, source, Wish::Auto),
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
    let signals = SigSet::from_iter([Signal::SIGINT, Signal::SIGTERM, Signal::SIGHUP]);
    signals.thread_block()?;
    let stop = Stop::default();
    std::thread::Builder::new().name("signals".into()).spawn({
        let stop = stop.clone();
        move || {
            while signals.wait().is_ok() {
                if stop.check().is_err() {
                    std::process::exit(130);
                }
                stop.cancel();
            }
        }
    })?;
    Ok(stop)
}

/// Who is asked, and the CSI handle of the snapshot.
fn asked(context: &Context, source: &Source) -> Result<(Option<Asked>, Option<String>)> {
    let Some(snapshot) = source.snapshot.clone() else { return Ok((None, None)) };
    let client = match (&source.endpoint, &source.namespace) {
        (Some(endpoint), _) => Client::csi(endpoint)?,
        (None, Some(namespace)) => {
            let api = context.wait(cluster::api())??;
            let token = source.token_file.clone().map_or(Token::OwnAccount, Token::File);
            Client::kubernetes(api, namespace, Options { token, ..Options::default() })
        }
        (None, None) => return Ok((None, Some(snapshot))),
    };
    let idle = Duration::from_secs(source.max_silence);
    let client = client.with_policy(Policy { retries: source.retries, idle, ..Policy::default() });
    let handle = context.wait(client.snapshot_handle(&snapshot))??;
    Ok((Some(Asked { client, snapshot }), Some(handle)))
}

fn back_up(context: &Context, source: Source, wish: Wish) -> Result<ExitCode> {
    // Nothing is made where there is nothing to read, or nowhere to tell of it.
    device::Device::open(&source.device)?;
    if let Some(report) = &source.report {
        device::check_writable(report)?;
    }
    let (asked, snapshot) = asked(context, &source)?;
    let request = Request {
        volume: source.volume,
        device: source.device,
        asked,
        snapshot,
        base: source.base,
        wish,
        limit: source.limit_rate.map(|rate| rate.0),
        resume: source.resume,
        in_flight: source.in_flight.into(),
        level: source.compression,
    };
    let repository = Repository::open_or_create(context.url()?, context.runtime.handle(), &context.stop)?;
    let wanted = Wanted { mode: Mode::Shared, command: "backup", wait: Duration::ZERO, is_reader: false };
    let repository = context.lock(repository, wanted)?;
    let made = backup::run(&repository, &request, &context.stop)?.about;
    if let Some(report) = &source.report {
        let json = serde_json::to_vec(&made);
        let json = json.map_err(|error| Error::refused(format!("write JSON: {error}")))?;
        files::change::write_whole(report, &json)?;
    }
    print_backup(context, &made)?;
    Ok(ExitCode::SUCCESS)
}

fn print_backup(context: &Context, made: &About) -> Result<()> {
    context.print(made, || {
        let About { id, kind, listed, read, added, milliseconds, .. } = made;
        println!(
            "{id}: {kind}, {} listed, {} read, {} added to the repository, {:.1} s",
            HumanBytes(*listed),
            HumanBytes(*read),
            HumanBytes(*added),
            *milliseconds as f64 / 1e3
        );
        if let Some(why) = &made.why {
            println!("full because {why}");
        }
    })
}

fn run(context: &Context, arguments: RunArguments) -> Result<ExitCode> {
    let repository = match arguments.clean_up {
        true => String::new(),
        false => context.url()?.to_owned(),
    };
    let made = context.runtime.block_on(cluster::run(&arguments, &repository, &context.stop))?;
    if let Some(made) = made {
        print_backup(context, &made)?;
    }
    Ok(ExitCode::SUCCESS)
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
    let restored = match &arguments.onto_base {
        Some(base) => {
            let base = repository.find(base, volume)?;
            restore::onto(&repository, &index, &base, to, threads, &context.stop)?
        }
        None => restore::run(&repository, &index, to, arguments.overwrite, threads, &context.stop)?,
    };
    context.print(&restored, || {
        println!(
            "{} is in {}: {} written, {} cleared",
            restored.id,
            restored.to.display(),
            HumanBytes(restored.written),
            HumanBytes(restored.cleared)
        );
    })?;
    Ok(ExitCode::SUCCESS)
}

fn verify(context: &Context, arguments: &VerifyArguments) -> Result<ExitCode> {
    let repository = context.shared("verify")?;
    let volume = arguments.volume.as_deref();
    let threads = arguments.in_flight.into();
    if let Some(device) = &arguments.against {
        let [backup] = arguments.backups.as_slice() else {
            return Err(Error::refused("one backup is compared with a device: name one"));
        };
        let index = repository.find(backup, volume)?;
        let compared = restore::compare(&repository, &index, device, threads, &context.stop)?;
        context.print(&compared, || {
            for range in &compared.differing {
                println!("bytes {} to {} differ", range.start, range.end);
            }
            let verdict = match compared.differing_bytes {
                0 => "equal".to_owned(),
                bytes => format!("{} differ", HumanBytes(bytes)),
            };
            println!(
                "{} and {}: {} compared, {verdict}",
                compared.id,
                device.display(),
                HumanBytes(compared.bytes)
            );
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
    let report = verify::verify(&repository, chosen.as_deref(), threads, &context.stop)?;
    context.print(&report, || {
        for damage in &report.damage {
            let backup = damage.backup.as_deref().unwrap_or("no backup");
            let place = match (damage.start, damage.end) {
                (Some(start), Some(end)) => format!(", bytes {start} to {end}"),
                _ => String::new(),
            };
            println!("{backup}{place}: {}", damage.what);
        }
        let unused = match report.unused {
            None | Some(0) => String::new(),
            Some(bytes) => format!(" ({} of it unused)", HumanBytes(bytes)),
        };
        let found = match report.damage.len() {
            0 => "all sound".to_owned(),
            count => format!("{count} damaged"),
        };
        println!(
            "{} backups, {} packs, {}{unused}: {found}",
            report.backups,
            report.packs,
            HumanBytes(report.bytes)
        );
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
    // Of which volume a damaged one is nobody knows.
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
    context.print(&listed, || print_list(&listed))?;
    for damaged in &damaged {
        eprintln!("cbt-backup: {damaged}");
    }
    Ok(verdict(damaged.is_empty()))
}

fn print_list(listed: &[Listed]) {
    let abouts = || {
        listed.iter().filter_map(|backup| match backup {
            Listed::Sound(about) => Some(about),
            Listed::Damaged { .. } => None,
        })
    };
    let widths = abouts().map(|about| show::shown(&about.volume).chars().count()).max().unwrap_or(0).max(6);
    println!(
        "{:<27}  {:widths$}  {:<11}  {:>11}  {:>11}  {:>11}",
        "BACKUP", "VOLUME", "KIND", "SIZE", "DATA", "ADDED"
    );
    for About { id, volume, kind, size, data, added, .. } in abouts() {
        let human = |bytes: &u64| HumanBytes(*bytes).to_string();
        let (id, volume) = (show::shown(id), show::shown(volume));
        println!(
            "{id:<27}  {volume:widths$}  {:<11}  {:>11}  {:>11}  {:>11}",
            kind.to_string(),
            human(size),
            human(data),
            human(added)
        );
    }
}

fn prune(context: &Context, arguments: &PruneArguments) -> Result<ExitCode> {
    let repository = match arguments.dry_run {
        true => context.shared("prune")?,
        false => {
            let repository = Repository::open(context.url()?, context.runtime.handle(), &context.stop)?;
            let wait = Duration::from_secs(arguments.wait);
            let wanted = Wanted { mode: Mode::Exclusive, command: "prune", wait, is_reader: false };
            context.lock(repository, wanted)?
        }
    };
    let number = |of: Option<u16>| of.map(usize::from);
    let rules = Rules {
        keep: Keep {
            last: number(arguments.keep_last),
            daily: number(arguments.keep_daily),
            weekly: number(arguments.keep_weekly),
            monthly: number(arguments.keep_monthly),
            yearly: number(arguments.keep_yearly),
        },
        remove: arguments.remove.clone(),
        volume: arguments.volume.clone(),
        max_unused: arguments.max_unused.into(),
        is_dry: arguments.dry_run,
    };
    let pruned = prune::prune(&repository, &rules, &context.stop)?;
    context.print(&pruned, || {
        let would = if arguments.dry_run { "would be " } else { "" };
        for id in &pruned.removed {
            println!("{id} {would}removed");
        }
        println!(
            "{} backups {would}removed, {} kept; {} {would}freed, {} of them written anew",
            pruned.removed.len(),
            pruned.kept.len(),
            HumanBytes(pruned.freed),
            HumanBytes(pruned.moved)
        );
    })?;
    Ok(ExitCode::SUCCESS)
}

fn show(context: &Context, arguments: &ShowArguments) -> Result<ExitCode> {
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
    if let Some(file) = &arguments.html {
        show::write(&absolute(file)?, &show::html(&title, &pictures))?;
    }
    let has_colour = std::io::stdout().is_terminal() && std::env::var_os("NO_COLOR").is_none();
    context.print(&pictures, || match pictures.as_slice() {
        [one] => print!("{}", one.text(has_colour)),
        several => print!("{}", show::history(several, has_colour)),
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
