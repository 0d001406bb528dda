//! Flags and help of every command.

use std::path::PathBuf;
use std::time::Duration;

use base::{Endpoint, Quantity};
use clap::{Args, Parser, Subcommand, ValueEnum};
use shell::Quiet;
use snapshot_metadata_client::Client;

use crate::error::{Error, refused};

/// Back up volumes by their changed blocks, into a directory or an S3 bucket.
///
/// A backup reads a block device, or an image, that holds a snapshot. The CSI driver's SnapshotMetadata service says which
/// blocks hold data, and which changed since the last backup; nothing else is read. Every backup can be restored by itself:
/// an incremental one shares with earlier ones what did not change.
///
/// Reading needs no root beyond opening the device. Data is not encrypted: use a storage that does it.
///
/// Exit codes: 0 done, 1 failed or damage found (on standard error or in the output), 2 wrong usage, 130 interrupted.
#[derive(Debug, Parser)]
#[command(name = "cbt-backup", version, max_term_width = 100)]
pub struct Cli {
    #[command(subcommand)]
    pub command: Command,
    /// Where the backups are: a directory, or s3://BUCKET/PREFIX. The first backup makes the repository there; a bucket
    /// has to exist. S3 is configured by the usual AWS_ variables of the environment: AWS_ACCESS_KEY_ID,
    /// AWS_SECRET_ACCESS_KEY, AWS_REGION, AWS_ENDPOINT, AWS_ALLOW_HTTP.
    #[arg(long, short, global = true, env = "CBT_BACKUP_REPOSITORY", value_name = "DIR|URL", value_parser = repository)]
    pub repository: Option<String>,
    /// What is printed on standard output.
    #[arg(long, global = true, value_enum, default_value_t = Output::Text)]
    pub output: Output,
}

#[derive(Debug, Subcommand)]
pub enum Command {
    /// Back up everything that holds data.
    Full(Source),
    /// Back up what changed since the last backup of the volume, or since the one of --base; fails where that cannot be.
    Incremental(Increment),
    /// Make an incremental backup where that can be, else a full one, and say why.
    ///
    /// A full one is made if the earlier backup is missing, damaged or larger than the volume. It is also made if the driver
    /// has no deltas, or does not know the base as a snapshot of this volume. What may pass by itself, such as a driver that
    /// does not answer, is an error.
    Auto(Increment),
    Run(RunArguments),
    Restore(RestoreArguments),
    Verify(VerifyArguments),
    /// List the backups, the oldest first.
    List(ListArguments),
    Prune(PruneArguments),
    Show(ShowArguments),
    Mount(MountArguments),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Output {
    /// For people.
    Text,
    /// One JSON document at the end; of a command that fails it is an object with `error`.
    Json,
}

/// Which cluster is asked, as kubectl's flags name it. Default: what KUBECONFIG or ~/.kube/config says, and in a pod the
/// pod's.
#[derive(Clone, Debug, Default, Args)]
pub struct Cluster {
    /// The kubeconfig that says how to reach the cluster. Default: KUBECONFIG, then ~/.kube/config; in a pod its account.
    #[arg(long, value_name = "FILE")]
    pub kubeconfig: Option<PathBuf>,
    /// The context of the kubeconfig. Default: its current one.
    #[arg(long, value_name = "NAME")]
    pub context: Option<String>,
}

impl Cluster {
    /// Why a cluster is not reached, with the flags that said how.
    pub fn explain(&self, why: &str) -> String {
        let file = self.kubeconfig.as_ref().map(|file| format!("--kubeconfig {}", file.display()));
        let context = self.context.as_ref().map(|name| format!("--context {name}"));
        match file.into_iter().chain(context).collect::<Vec<_>>().join(", ") {
            flags if flags.is_empty() => format!("{why}; set KUBECONFIG"),
            flags => format!("{flags}: {why}"),
        }
    }
}

#[derive(Debug, Args)]
pub struct Source {
    /// Name of the volume in the repository. Backups of one name belong together.
    #[arg(long, value_name = "NAME", value_parser = name)]
    pub volume: String,
    /// Block device or image to read. It must hold the snapshot and not change meanwhile: a volume restored from it, or an
    /// image at rest.
    #[arg(long, value_name = "PATH")]
    pub device: PathBuf,
    /// Socket of the CSI driver, such as unix:///csi/csi.sock. Without it and --namespace the whole device is read, and of
    /// an image everything but its holes.
    #[arg(long, value_name = "SOCKET", requires = "snapshot", conflicts_with = "namespace")]
    pub endpoint: Option<Endpoint>,
    /// Ask through Kubernetes, as the kubeconfig or the pod's account: --snapshot is a VolumeSnapshot of this namespace.
    #[arg(long, short, value_name = "NAME", requires = "snapshot")]
    pub namespace: Option<String>,
    #[command(flatten)]
    pub cluster: Cluster,
    /// File with a token for the snapshot metadata service, such as a projected volume. Default: one is requested, for the
    /// account that asks.
    #[arg(long, value_name = "FILE", requires = "namespace")]
    pub token_file: Option<PathBuf>,
    /// CSI handle of the snapshot that the device holds; with --namespace the name of its VolumeSnapshot.
    #[arg(long, value_name = "HANDLE|NAME", value_parser = name)]
    pub snapshot: Option<String>,
    /// Write the result to this file too, as JSON. It may not lie in the repository.
    #[arg(long, value_name = "FILE")]
    pub report: Option<PathBuf>,
    /// The most bytes to read a second, such as 100M.
    #[arg(long, value_name = "SIZE", value_parser = positive)]
    pub limit_rate: Option<Quantity>,
    /// Continue an interrupted or killed backup of the same snapshot and kind, if there is one; `auto` continues
    /// either kind. Without a driver it must be of the same device, or of the same image that was not written to since.
    /// Some of what is stored is compared with the device; where it differs, the backup starts over and says why.
    #[arg(long)]
    pub resume: bool,
    /// Times in a row that the driver may fail and be asked again, with longer and longer pauses.
    #[arg(long, value_name = "NUMBER", default_value_t = 8)]
    pub retries: u32,
    /// How long the driver may send nothing until it is asked again.
    #[arg(long, value_name = "AGE", default_value = "5m", value_parser = age)]
    pub max_silence: Duration,
    /// Reads at once.
    #[arg(long, value_name = "NUMBER", default_value_t = 16, value_parser = clap::value_parser!(u8).range(1..=64))]
    pub in_flight: u8,
    /// Level of zstd: 1 is quick, 19 small. Below 0, down to -50, it is quicker still and stores more.
    #[arg(long, value_name = "NUMBER", default_value_t = 1, value_parser = level)]
    pub compression: i32,
    #[command(flatten)]
    quiet: Quiet,
}

// No doc comment: clap would show it as the command's own.
#[derive(Debug, Args)]
pub struct Increment {
    #[command(flatten)]
    pub source: Source,
    /// CSI handle of the snapshot to start from, which must be backed up. Default: that of the last backup of the volume.
    #[arg(long, value_name = "HANDLE", requires = "snapshot", value_parser = name)]
    pub base: Option<String>,
}

/// The image of this version, in the registry that the release was made for.
fn image() -> &'static str {
    const IMAGE: &str = concat!("cbt-backup:", env!("CARGO_PKG_VERSION"));
    match option_env!("DELTAPATH_IMAGE_REGISTRY") {
        None | Some("") => IMAGE,
        Some(registry) => format!("{registry}/{IMAGE}").leak(),
    }
}

/// Back up a claim of a Kubernetes cluster, from the snapshot to the clean-up.
///
/// It takes a snapshot of the claim, restores it to a temporary claim with the volume as a device, and starts a pod there
/// that runs `cbt-backup auto`, or `full`. In the end, also after Ctrl-C, the pod, the temporary claim and the snapshot go. The driver's
/// handle of the snapshot stays in the repository, as the base of the next backup; where a driver needs the VolumeSnapshot
/// itself for that, the last one stays too. Kubernetes is asked as the kubeconfig or the pod's account says.
#[derive(Debug, Args)]
pub struct RunArguments {
    /// The PersistentVolumeClaim.
    #[arg(long, value_name = "NAME")]
    pub pvc: String,
    /// Its namespace. Default: that of the kubeconfig or of the pod.
    #[arg(long, short, value_name = "NAME")]
    pub namespace: Option<String>,
    #[command(flatten)]
    pub cluster: Cluster,
    /// Name of the volume in the repository. Default: NAMESPACE/PVC.
    #[arg(long, value_name = "NAME", value_parser = name)]
    pub volume: Option<String>,
    /// Claim with the repository: it is mounted in the pod, and --repository is a directory in it. Without it --repository
    /// has to be a bucket.
    #[arg(long, value_name = "NAME")]
    pub repository_claim: Option<String>,
    /// Secret whose keys become variables of the pod, such as AWS_ACCESS_KEY_ID.
    #[arg(long, value_name = "NAME")]
    pub secret: Option<String>,
    /// Class of the snapshot. Default: the driver's default class.
    #[arg(long, value_name = "NAME")]
    pub snapshot_class: Option<String>,
    /// Image of the pod.
    #[arg(long, value_name = "IMAGE", default_value = image())]
    pub image: String,
    /// Taint that the pod tolerates, since it has to run on a node of the volume; `*`: all taints. Can be given more than once.
    #[arg(long, value_name = "KEY[=VALUE]", value_parser = name)]
    pub toleration: Vec<String>,
    /// Service account of the pod. It needs the rights in deploy/backup/cronjob.yaml.
    #[arg(long, value_name = "NAME", default_value = "cbt-backup")]
    pub service_account: String,
    /// Make a full backup, also where an incremental one could be made.
    #[arg(long, conflicts_with = "clean_up")]
    pub full: bool,
    /// How long the snapshot may take to be ready, and then the pod to start; and how long the API server may be away at any
    /// time.
    #[arg(long, value_name = "AGE", default_value = "10m", value_parser = age)]
    pub patience: Duration,
    /// Leave the snapshot.
    #[arg(long)]
    pub keep_snapshot: bool,
    /// Only remove what a killed run of this claim left behind.
    #[arg(long)]
    pub clean_up: bool,
    /// More flags of `auto`, or of `full` with --full, such as `-- --limit-rate 100M`.
    #[arg(last = true, value_name = "FLAG")]
    pub more: Vec<String>,
    #[command(flatten)]
    quiet: Quiet,
}

/// Restore a backup to a device or file.
///
/// Every chunk is checked before it is written. A file comes into being as a whole, sparse. A device must be at least as
/// large as the backup; what the backup has as zeros is discarded there.
#[derive(Debug, Args)]
pub struct RestoreArguments {
    /// The backup: its id, the beginning of it, or `latest`.
    #[arg(value_name = "BACKUP", value_parser = name)]
    pub backup: String,
    /// Device or file to write.
    #[arg(long, value_name = "PATH")]
    pub to: PathBuf,
    /// Volume of which `latest` is meant.
    #[arg(long, value_name = "NAME", value_parser = name)]
    pub volume: Option<String>,
    /// Write only what differs from this backup. The device or file must hold it, unchanged. A part of it is compared before;
    /// `verify BACKUP --against` compares all of it.
    #[arg(long, value_name = "BACKUP", value_parser = name, conflicts_with = "overwrite")]
    pub onto_base: Option<String>,
    /// Replace the content of a file that exists. It keeps its owner and mode, and a symbolic link is followed.
    #[arg(long)]
    pub overwrite: bool,
    /// Segments of 128 MiB at once.
    #[arg(long, value_name = "NUMBER", default_value_t = 8, value_parser = clap::value_parser!(u8).range(1..=32))]
    pub in_flight: u8,
    #[command(flatten)]
    quiet: Quiet,
}

/// Read everything back and check it.
///
/// Damage is reported by backup and byte range, and noted in the repository, so that no incremental backup is made over it.
/// Exit codes: 0 all is sound, 1 damage, a difference, or a failure, 2 wrong usage, 130 interrupted.
#[derive(Debug, Args)]
pub struct VerifyArguments {
    /// Backups to check: ids, beginnings of them, or `latest`. Default: everything in the repository.
    #[arg(value_name = "BACKUP", value_parser = name)]
    pub backups: Vec<String>,
    /// Volume of which `latest` is meant.
    #[arg(long, value_name = "NAME", value_parser = name)]
    pub volume: Option<String>,
    /// Compare one backup with this device or file, byte by byte.
    #[arg(long, value_name = "PATH", requires = "backups")]
    pub against: Option<PathBuf>,
    /// Packs at once, of 16 MiB.
    #[arg(long, value_name = "NUMBER", default_value_t = 4, value_parser = clap::value_parser!(u8).range(1..=8))]
    pub in_flight: u8,
    #[command(flatten)]
    quiet: Quiet,
}

#[derive(Debug, Args)]
pub struct ListArguments {
    /// Only backups of this volume.
    #[arg(long, value_name = "NAME", value_parser = name)]
    pub volume: Option<String>,
}

/// Which backups a prune keeps. With nothing said all are.
#[derive(Clone, Copy, Debug, Default, Args)]
pub struct Keep {
    /// The number of last backups to keep.
    #[arg(long = "keep-last", value_name = "NUMBER", value_parser = clap::value_parser!(u16).range(1..))]
    pub last: Option<u16>,
    /// The number of days to keep a backup of: the last one of each day that has one.
    #[arg(long = "keep-daily", value_name = "NUMBER", value_parser = clap::value_parser!(u16).range(1..))]
    pub daily: Option<u16>,
    /// The number of weeks to keep a backup of: the last one of each week that has one; weeks begin on Monday.
    #[arg(long = "keep-weekly", value_name = "NUMBER", value_parser = clap::value_parser!(u16).range(1..))]
    pub weekly: Option<u16>,
    /// The number of months to keep a backup of: the last one of each month that has one.
    #[arg(long = "keep-monthly", value_name = "NUMBER", value_parser = clap::value_parser!(u16).range(1..))]
    pub monthly: Option<u16>,
    /// The number of years to keep a backup of: the last one of each year that has one.
    #[arg(long = "keep-yearly", value_name = "NUMBER", value_parser = clap::value_parser!(u16).range(1..))]
    pub yearly: Option<u16>,
}

/// Remove backups that are not to be kept, and all that nothing needs.
///
/// The rules add up, volume by volume, in UTC. Without any only what --remove names is removed. It needs the repository
/// alone.
#[derive(Debug, Args)]
pub struct PruneArguments {
    #[command(flatten)]
    pub keep: Keep,
    /// Remove this backup, whatever the rules say: its id, or the beginning of it. May be given several times. The other
    /// backups stay whole.
    #[arg(long, value_name = "BACKUP", value_parser = name)]
    pub remove: Vec<String>,
    /// The rules are only about backups of this volume.
    #[arg(long, value_name = "NAME", value_parser = name)]
    pub volume: Option<String>,
    /// The percentage of a pack that may be unused before it is rewritten.
    #[arg(long, value_name = "PERCENT", default_value_t = 20, value_parser = clap::value_parser!(u8).range(0..=100))]
    pub max_unused: u8,
    /// How long to wait for other commands that use the repository. Default: it fails at once.
    #[arg(long, value_name = "AGE", default_value = "0s", hide_default_value = true, value_parser = age_or_none)]
    pub wait: Duration,
    /// Say which backups would be removed and what that would free at least, and do nothing. It needs no right to write.
    #[arg(long)]
    pub dry_run: bool,
}

/// Draw what holds data and what changed.
///
/// Of several backups it is the history, a line each; of one, its map. With --endpoint it is that of two
/// snapshots of a CSI driver, and needs no repository.
#[derive(Debug, Args)]
pub struct ShowArguments {
    /// The backup: its id, the beginning of it, or `latest`. Default: all of them, as a history.
    #[arg(value_name = "BACKUP", value_parser = name, conflicts_with = "endpoint")]
    pub backup: Option<String>,
    /// Only backups of this volume.
    #[arg(long, value_name = "NAME", value_parser = name, conflicts_with = "endpoint")]
    pub volume: Option<String>,
    /// Write one HTML file that needs no other, with all maps.
    #[arg(long, value_name = "FILE")]
    pub html: Option<PathBuf>,
    /// Socket of a CSI driver, such as unix:///csi/csi.sock.
    #[arg(long, value_name = "SOCKET", requires = "target")]
    pub endpoint: Option<Endpoint>,
    /// CSI handle of the earlier snapshot: what changed since is shown.
    #[arg(long, value_name = "HANDLE", requires = "endpoint", value_parser = name)]
    pub base: Option<String>,
    /// CSI handle of the snapshot.
    #[arg(long, value_name = "HANDLE", requires = "endpoint", value_parser = name)]
    pub target: Option<String>,
}

/// Serve a backup as a read-only block device (NBD on a UNIX socket), to fetch single files out of it.
///
/// For instance, as root: `nbd-client -unix SOCKET /dev/nbd0` or `qemu-nbd -r -c /dev/nbd0
/// 'nbd+unix:///?socket=SOCKET'`, then `mount -o ro,noload /dev/nbd0 /mnt` (ext4) or `mount -o ro,norecovery,nouuid
/// /dev/nbd0 /mnt` (xfs). It runs until Ctrl-C, and no prune can run meanwhile.
#[derive(Debug, Args)]
pub struct MountArguments {
    /// The backup: its id, the beginning of it, or `latest`.
    #[arg(value_name = "BACKUP", value_parser = name)]
    pub backup: String,
    /// Volume of which `latest` is meant.
    #[arg(long, value_name = "NAME", value_parser = name)]
    pub volume: Option<String>,
    /// Socket to listen at.
    #[arg(long, value_name = "PATH")]
    pub socket: PathBuf,
    /// Bytes of a sector: 4096 for a filesystem that was made on a device with sectors of 4096.
    #[arg(long, value_name = "BYTES", default_value = "512", value_parser = ["512", "4096"])]
    pub sector_size: String,
}

/// A name of a volume, a backup or a snapshot: fit for a table.
fn name(text: &str) -> Result<String, String> {
    match text {
        _ if text.chars().any(char::is_control) => {
            Err("it holds a control character, such as a new line".into())
        }
        _ if text.len() > LONGEST_NAME => {
            Err(format!("it has {} bytes, and may have {LONGEST_NAME}", text.len()))
        }
        _ => Ok(text.to_owned()),
    }
}

/// Bytes of a name. A namespace with the name of a claim has at most 317.
const LONGEST_NAME: usize = 512;

fn repository(text: &str) -> Result<String, String> {
    let is_place = match text.split_once("://") {
        Some((scheme, place)) => scheme == "s3" && !place.is_empty() && !place.starts_with('/'),
        None => !text.is_empty(),
    };
    is_place.then(|| text.to_owned()).ok_or_else(|| "write a directory or s3://BUCKET/PREFIX".into())
}

/// The CSI driver at `--endpoint`. One that does not answer still has its socket, so where there is none the path is wrong.
pub fn driver(endpoint: &Endpoint) -> Result<Client, Error> {
    use std::os::unix::fs::FileTypeExt;
    let path = endpoint.path();
    match path.metadata() {
        Ok(found) if found.file_type().is_socket() => Ok(Client::csi(&endpoint.to_string())?),
        Ok(_) => Err(refused!("{} (--endpoint) is not a socket", path.display())),
        Err(error) => {
            Err(refused!("there is no socket of a CSI driver at {} (--endpoint): {error}", path.display()))
        }
    }
}

fn age(text: &str) -> Result<Duration, String> {
    shell::age(text).and_then(no_longer)
}

fn age_or_none(text: &str) -> Result<Duration, String> {
    shell::age_or_none(text).and_then(no_longer)
}

/// A clock counts a hundred years, and not all that can be written.
fn no_longer(age: Duration) -> Result<Duration, String> {
    let most = Duration::from_secs(36500 * 86400);
    (age <= most).then_some(age).ok_or_else(|| "it may be at most 36500d".into())
}

/// Level 0 is zstd's own default, which is another than ours.
fn level(text: &str) -> Result<i32, String> {
    match text.parse() {
        Ok(level @ (-50..=-1 | 1..=19)) => Ok(level),
        _ => Err("it is a number from 1 to 19, or from -50 to -1".into()),
    }
}

fn positive(text: &str) -> Result<Quantity, String> {
    match text.parse::<Quantity>() {
        Ok(Quantity(0)) => Err("it must be greater than 0: leave the flag out for no limit".into()),
        Ok(size) => Ok(size),
        Err(error) => Err(error.to_string()),
    }
}
