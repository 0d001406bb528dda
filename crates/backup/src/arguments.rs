//! Flags and help of every command.

use std::path::PathBuf;

use base::Quantity;
use clap::{Args, Parser, Subcommand, ValueEnum};

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
    /// Where the backups are: a directory, or s3://BUCKET/PREFIX. For S3 the usual AWS_ variables of the environment say
    /// how to reach it: AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_REGION, AWS_ENDPOINT, AWS_ALLOW_HTTP. The first
    /// backup makes it.
    #[arg(long, short, global = true, env = "CBT_BACKUP_REPOSITORY", value_name = "DIR|URL")]
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
    Incremental(Source),
    /// Make an incremental backup where that can be, else a full one, and say why.
    ///
    /// A full one is made where there is no earlier backup, where that one is damaged or of another size, or where the
    /// driver has no deltas or has forgotten the base. What may pass by itself, such as a driver that does not answer, is
    /// an error.
    Auto(Source),
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
    /// One JSON document at the end.
    Json,
}

#[derive(Debug, Args)]
pub struct Source {
    /// Name of the volume in the repository. Backups of one name belong together.
    #[arg(long, value_name = "NAME")]
    pub volume: String,
    /// Block device or image to read. It must hold the snapshot and not change meanwhile: a volume restored from it, or an
    /// image at rest.
    #[arg(long, value_name = "PATH")]
    pub device: PathBuf,
    /// Socket of the CSI driver, such as unix:///csi/csi.sock. Without it all of the device is read, of an image what is no
    /// hole.
    #[arg(long, value_name = "SOCKET", requires = "snapshot")]
    pub endpoint: Option<String>,
    /// CSI handle of the snapshot that the device holds.
    #[arg(long, value_name = "HANDLE")]
    pub snapshot: Option<String>,
    /// CSI handle of the snapshot to start from, which must be backed up. Default: that of the last backup of the volume.
    #[arg(long, value_name = "HANDLE", requires = "endpoint")]
    pub base: Option<String>,
    /// Read at most so many bytes a second, such as 100M.
    #[arg(long, value_name = "SIZE", value_parser = positive)]
    pub limit_rate: Option<Quantity>,
    /// Go on with an interrupted backup of the same snapshot, where there is one. Without --snapshot it is that of the same
    /// device, which must not have changed.
    #[arg(long)]
    pub resume: bool,
    /// Reads at once.
    #[arg(long, value_name = "NUMBER", default_value_t = 8, value_parser = clap::value_parser!(u8).range(1..=64))]
    pub in_flight: u8,
    /// Level of zstd: 1 is quick, 19 small.
    #[arg(long, value_name = "NUMBER", default_value_t = 1, value_parser = clap::value_parser!(i32).range(1..=19))]
    pub compression: i32,
}

/// Restore a backup to a device or file.
///
/// Every chunk is checked before it is written. A file comes into being as a whole, sparse. A device must be at least as
/// large as the backup; what the backup has as zeros is discarded there.
#[derive(Debug, Args)]
pub struct RestoreArguments {
    /// The backup: its id, the beginning of it, or `latest`.
    #[arg(value_name = "BACKUP")]
    pub backup: String,
    /// Device or file to write.
    #[arg(long, value_name = "PATH")]
    pub to: PathBuf,
    /// Volume of which `latest` is meant.
    #[arg(long, value_name = "NAME")]
    pub volume: Option<String>,
    /// Write only what differs from this backup. The device or file must hold it, unchanged; `verify BACKUP --against`
    /// tells.
    #[arg(long, value_name = "BACKUP", conflicts_with = "overwrite")]
    pub onto_base: Option<String>,
    /// Replace a file that exists.
    #[arg(long)]
    pub overwrite: bool,
    /// Segments of 128 MiB at once.
    #[arg(long, value_name = "NUMBER", default_value_t = 4, value_parser = clap::value_parser!(u8).range(1..=32))]
    pub in_flight: u8,
}

/// Read everything back and check it.
///
/// Damage is told by backup and byte range, and noted in the repository, so that no incremental backup is made over it.
/// Exit codes: 0 all is sound, 1 damage, a difference, or a failure, 2 wrong usage, 130 interrupted.
#[derive(Debug, Args)]
pub struct VerifyArguments {
    /// Backups to check: ids, beginnings of them, or `latest`. Default: everything in the repository.
    #[arg(value_name = "BACKUP")]
    pub backups: Vec<String>,
    /// Volume of which `latest` is meant.
    #[arg(long, value_name = "NAME")]
    pub volume: Option<String>,
    /// Compare one backup with this device or file, byte by byte.
    #[arg(long, value_name = "PATH", requires = "backups")]
    pub against: Option<PathBuf>,
    /// Packs at once, of 16 MiB.
    #[arg(long, value_name = "NUMBER", default_value_t = 4, value_parser = clap::value_parser!(u8).range(1..=8))]
    pub in_flight: u8,
}

#[derive(Debug, Args)]
pub struct ListArguments {
    /// Only backups of this volume.
    #[arg(long, value_name = "NAME")]
    pub volume: Option<String>,
}

/// Remove backups that are not to be kept, and all that nothing needs.
///
/// The rules add up, volume by volume, in UTC. Without any no backup is removed. It needs the repository alone.
#[derive(Debug, Args)]
pub struct PruneArguments {
    /// Keep the last so many.
    #[arg(long, value_name = "NUMBER", value_parser = clap::value_parser!(u16).range(1..))]
    pub keep_last: Option<u16>,
    /// Keep the last one of each of the last so many days that have one.
    #[arg(long, value_name = "NUMBER", value_parser = clap::value_parser!(u16).range(1..))]
    pub keep_daily: Option<u16>,
    /// Keep the last one of each of the last so many weeks that have one; weeks begin on Monday.
    #[arg(long, value_name = "NUMBER", value_parser = clap::value_parser!(u16).range(1..))]
    pub keep_weekly: Option<u16>,
    /// Only remove backups of this volume.
    #[arg(long, value_name = "NAME")]
    pub volume: Option<String>,
    /// Write a pack anew when more than so many percent of it are unused.
    #[arg(long, value_name = "PERCENT", default_value_t = 20, value_parser = clap::value_parser!(u8).range(0..=100))]
    pub max_unused: u8,
    /// Say which backups would be removed, and do nothing.
    #[arg(long)]
    pub dry_run: bool,
}

/// Draw what holds data and what changed.
///
/// Without a backup it is the history of a volume, a line each; with one, its map. With --endpoint it is that of two
/// snapshots of a CSI driver, and needs no repository.
#[derive(Debug, Args)]
pub struct ShowArguments {
    /// The backup: its id, the beginning of it, or `latest`. Default: all of them, as a history.
    #[arg(value_name = "BACKUP", conflicts_with = "endpoint")]
    pub backup: Option<String>,
    /// Only backups of this volume.
    #[arg(long, value_name = "NAME", conflicts_with = "endpoint")]
    pub volume: Option<String>,
    /// Write one HTML file that needs no other, with all maps.
    #[arg(long, value_name = "FILE")]
    pub html: Option<PathBuf>,
    /// Socket of a CSI driver, such as unix:///csi/csi.sock.
    #[arg(long, value_name = "SOCKET", requires = "target")]
    pub endpoint: Option<String>,
    /// CSI handle of the earlier snapshot: what changed since is shown.
    #[arg(long, value_name = "HANDLE", requires = "endpoint")]
    pub base: Option<String>,
    /// CSI handle of the snapshot.
    #[arg(long, value_name = "HANDLE", requires = "endpoint")]
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
    #[arg(value_name = "BACKUP")]
    pub backup: String,
    /// Volume of which `latest` is meant.
    #[arg(long, value_name = "NAME")]
    pub volume: Option<String>,
    /// Socket to listen at.
    #[arg(long, value_name = "PATH")]
    pub socket: PathBuf,
    /// Bytes of a sector: 4096 for a filesystem that was made on a device with sectors of 4096.
    #[arg(long, value_name = "BYTES", default_value = "512", value_parser = ["512", "4096"])]
    pub sector_size: String,
}

fn positive(text: &str) -> Result<Quantity, String> {
    match text.parse::<Quantity>() {
        Ok(Quantity(0)) => Err("0 would never end".into()),
        Ok(size) => Ok(size),
        Err(error) => Err(error.to_string()),
    }
}
