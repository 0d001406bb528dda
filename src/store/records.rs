//! The records as they are on disk: small JSON files that people can read.
//!
//! Every record has a `version`; other versions are refused. No record holds a secret or a mount flag (which the CSI spec
//! treats as one).

use std::fmt;
use std::path::PathBuf;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use serde::{Deserialize, Serialize};

use crate::sys::mount::is_plain_absolute;
use base::{BlockSize, GroupId, SnapshotId, VolumeId};

/// The version of all records that this build writes and reads.
pub(super) const VERSION: u32 = 3;

/// A point in time: seconds and nanoseconds since 1970-01-01 UTC.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Timestamp {
    /// Whole seconds.
    pub seconds: i64,
    /// Nanoseconds within the second.
    pub nanos: i32,
}

impl Timestamp {
    /// The clock's time. Nothing is ordered by it: snapshots have sequence numbers.
    pub fn now() -> Self {
        let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        Timestamp { seconds: since.as_secs() as i64, nanos: since.subsec_nanos() as i32 }
    }

    /// How long ago it is; nothing where the clock went backwards.
    pub fn age(self) -> Duration {
        let nanos = |at: Timestamp| i128::from(at.seconds) * 1_000_000_000 + i128::from(at.nanos);
        u64::try_from(nanos(Timestamp::now()) - nanos(self)).map_or(Duration::ZERO, Duration::from_nanos)
    }
}

/// What a record must be beyond its form: an impossible number would make arithmetic overflow.
pub(super) trait Checked {
    /// Fails with what is wrong.
    fn check(&self) -> Result<(), &'static str> {
        Ok(())
    }
}

fn holds(condition: bool, what: &'static str) -> Result<(), &'static str> {
    if condition { Ok(()) } else { Err(what) }
}

fn check_capacity(capacity: u64, size: BlockSize) -> Result<(), &'static str> {
    holds(
        size.round_up(capacity) == Some(capacity),
        "its capacity must be a whole number of blocks, and not larger than the largest volume",
    )
}

impl Timestamp {
    fn check(self) -> Result<(), &'static str> {
        // As google.protobuf.Timestamp has it: the years 1 to 9999.
        let years = -62_135_596_800..=253_402_300_799;
        let fits = years.contains(&self.seconds) && (0..1_000_000_000).contains(&self.nanos);
        holds(fits, "its time must be in the years 1 to 9999")
    }
}

/// How a volume may be used.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum AccessKind {
    /// As a raw block device.
    Block,
    /// As a mounted filesystem of this type.
    Filesystem(String),
}

impl fmt::Display for AccessKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            AccessKind::Block => f.write_str("Block"),
            AccessKind::Filesystem(fs_type) => write!(f, "Filesystem ({fs_type})"),
        }
    }
}

/// How block metadata is listed (`BlockMetadataType` of the CSI spec).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum TupleStyle {
    /// Adjacent blocks joined into extents (`VARIABLE_LENGTH`).
    Variable,
    /// Every block on its own (`FIXED_LENGTH`).
    Fixed,
}

/// What a volume was made from.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Source {
    /// A snapshot.
    Snapshot(SnapshotId),
    /// Another volume.
    Volume(VolumeId),
}

/// `volumes/<id>/record.json`. Names all that a retry of the call must agree with. Replaced as a whole
/// when the volume is expanded or modified.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct VolumeRecord {
    /// Format version.
    pub version: u32,
    /// The id, also the directory's name.
    pub id: VolumeId,
    /// The name the CO gave it: creation is idempotent by it.
    pub name: String,
    /// Size in bytes, a whole number of blocks.
    pub capacity: u64,
    /// The unit of its block maps.
    pub block_size: BlockSize,
    /// Every way it may be used.
    pub access: Vec<AccessKind>,
    /// What it was made from. Kept also after the source is deleted, for retries of the call.
    pub source: Option<Source>,
    /// Whether deltas are kept (`changedBlockTracking`).
    pub tracking: bool,
    /// What is set on its device.
    #[serde(default)]
    pub tuning: Tuning,
    /// The node it is attached to (ControllerPublishVolume), while it is. In `state.json`, for a full pool takes that.
    #[serde(skip)]
    pub attached: Option<Attached>,
    /// For an ephemeral inline volume, the handle that kubelet gave it: it has no name, and is removed when it
    /// is unpublished.
    #[serde(default)]
    pub ephemeral: Option<String>,
    /// When it was made.
    pub created: Timestamp,
}

/// Attributes of a volume that can be changed while it is in use (VolumeAttributesClass parameters).
/// `None`: the kernel's default.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Tuning {
    /// `readAheadKiB`.
    pub read_ahead_kib: Option<u32>,
    /// `directIO`.
    pub direct_io: Option<bool>,
}

/// A volume attached to a node.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Attached {
    /// The node.
    pub node_id: String,
    /// How it is to be used there.
    pub access: AccessKind,
    /// The access mode, by its name in the CSI spec.
    pub mode: String,
    /// Whether it may only be read there.
    pub read_only: bool,
}

impl VolumeRecord {
    /// The version to write.
    pub const VERSION: u32 = VERSION;

    /// The filesystem it is to carry; `None` for a volume that is only a block device.
    pub fn fs_type(&self) -> Option<&str> {
        self.access.iter().find_map(|access| match access {
            AccessKind::Filesystem(fs_type) => Some(fs_type.as_str()),
            AccessKind::Block => None,
        })
    }
}

impl Checked for VolumeRecord {
    fn check(&self) -> Result<(), &'static str> {
        check_capacity(self.capacity, self.block_size)?;
        holds(!self.access.is_empty(), "its list of access types is empty")?;
        self.created.check()
    }
}

/// `snapshots/<id>/record.json`. Says all that an answer needs, so that a snapshot survives its
/// volume, and keeps its own capacity when the volume grows.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SnapshotRecord {
    /// Format version.
    pub version: u32,
    /// The id, also the directory's name.
    pub id: SnapshotId,
    /// The name the CO gave it: creation is idempotent by it. Empty for a member of a group.
    pub name: String,
    /// The group it was taken with: it is in that group's directory, and is deleted with it.
    #[serde(default)]
    pub group: Option<GroupId>,
    /// The volume it was taken of, which may be deleted.
    pub volume: VolumeId,
    /// Its place among the snapshots of the volume: later ones are larger. Not a clock.
    pub sequence: u64,
    /// The volume's size in bytes when it was taken.
    pub capacity: u64,
    /// The unit of its block maps.
    pub block_size: BlockSize,
    /// Whether deltas are kept.
    pub tracking: bool,
    /// How its tuples are listed; `None` for the driver's default.
    pub tuple_style: Option<TupleStyle>,
    /// When it was taken.
    pub created: Timestamp,
    /// What marks the moment of its copy in the pool (btrfs: the transaction that made it), where the
    /// pool finds from it what was written since, even when the bytes are gone.
    #[serde(default)]
    pub birth: Option<u64>,
}

impl SnapshotRecord {
    /// The version to write.
    pub const VERSION: u32 = VERSION;

    /// No snapshot gets as far as this; a larger number is a damaged one.
    pub(super) const LAST_SEQUENCE: u64 = u64::MAX / 2;
}

impl Checked for SnapshotRecord {
    fn check(&self) -> Result<(), &'static str> {
        check_capacity(self.capacity, self.block_size)?;
        let room = self.sequence <= Self::LAST_SEQUENCE;
        holds(room, "its sequence number is too large")?;
        self.created.check()
    }
}

/// `snapshots/<id>/deleted.json`, and for all members at once `groups/<id>/deleted.json`. The snapshot is deleted if this
/// file exists.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Deleted {
    /// Format version.
    pub version: u32,
    /// When it was deleted.
    pub at: Timestamp,
}

impl Deleted {
    /// The version to write.
    pub const VERSION: u32 = VERSION;
}

impl Checked for Deleted {
    fn check(&self) -> Result<(), &'static str> {
        self.at.check()
    }
}

/// `groups/<id>/record.json`: a group snapshot. Its members' records are in its directory.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct GroupRecord {
    /// Format version.
    pub version: u32,
    /// The id, also the directory's name.
    pub id: GroupId,
    /// The name the CO gave it: creation is idempotent by it.
    pub name: String,
    /// Its snapshots, in the order in which their volumes were named.
    pub members: Vec<SnapshotId>,
    /// How their tuples are listed; `None` for the driver's default.
    pub tuple_style: Option<TupleStyle>,
    /// When it was taken.
    pub created: Timestamp,
}

impl GroupRecord {
    /// The version to write.
    pub const VERSION: u32 = VERSION;
}

impl Checked for GroupRecord {
    fn check(&self) -> Result<(), &'static str> {
        let members: std::collections::HashSet<_> = self.members.iter().collect();
        holds(members.len() == self.members.len(), "it names a member twice")?;
        self.created.check()
    }
}

/// `volumes/<id>/state.json`: what is done to a volume now. Written before the kernel is asked, so that nothing is mounted
/// or frozen that no record explains; what is really there, the kernel says. It changes in place
/// ([`crate::sys::slots`]): on a full pool volumes must still be staged and unstaged.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct VolumeState {
    /// Format version.
    pub version: u32,
    /// The node it is attached to (ControllerPublishVolume).
    pub attached: Option<Attached>,
    /// Where and how it is staged.
    pub staged: Option<Staged>,
    /// Where it is published.
    pub published: Vec<Published>,
    /// Set while mkfs runs: what is on the device then is ours to overwrite.
    pub formatting: bool,
    /// The boot in which its filesystem was to be frozen, until it is thawed: a driver that starts again thaws what a
    /// dead one left frozen. A reboot thaws everything.
    pub frozen: Option<String>,
}

impl Default for VolumeState {
    fn default() -> Self {
        VolumeState {
            version: VERSION,
            attached: None,
            staged: None,
            published: Vec::new(),
            formatting: false,
            frozen: None,
        }
    }
}

impl VolumeState {
    /// How the volume is staged, if `path` is one of its places: where it is staged, or published.
    pub fn place(&self, path: &std::path::Path) -> Option<&Staged> {
        let staged = self.staged.as_ref()?;
        let published = || self.published.iter().any(|published| published.target == path);
        (staged.path == path || published()).then_some(staged)
    }

    /// Whether nothing on this node needs its device.
    pub fn is_idle(&self) -> bool {
        self.staged.is_none() && self.published.is_empty() && !self.formatting
    }
}

impl Checked for VolumeState {
    fn check(&self) -> Result<(), &'static str> {
        let paths = self.staged.iter().map(|staged| &staged.path);
        let mut paths = paths.chain(self.published.iter().map(|published| &published.target));
        holds(
            paths.all(|path| is_plain_absolute(path)),
            "it names a path that is not absolute, or holds `..`",
        )
    }
}

/// A staged volume.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Staged {
    /// The staging path.
    pub path: PathBuf,
    /// As a device or as a filesystem.
    pub access: AccessKind,
    /// Whether it is staged for readers only.
    pub read_only: bool,
}

/// A published volume.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Published {
    /// The target path.
    pub target: PathBuf,
    /// Whether it may only be read there.
    pub read_only: bool,
    /// Whether other targets are allowed at the same time.
    pub shared: bool,
}
