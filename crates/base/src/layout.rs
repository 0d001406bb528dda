//! Every path below a data directory, in one place.
//!
//! ```text
//! DIR/deltapath.json              what kind of data directory this is
//! DIR/lock                        held by the one driver that serves it
//! DIR/pool.img                    the pool's image, where the pool is made in a file; pool.img.new while it is made
//! DIR/pool.img.untried            there until the kernel has mounted the image once
//! DIR/reserve                     room on the disk that is given back when the image is opened on a full one
//! DIR/pool/                       the pool: a plain directory, or where the image is mounted
//!     volumes/<id>/record.json    state.json: where it is attached, staged and published
//!     volumes/<id>/bytes/data.img
//!     volumes/<id>/ungrown/       what the volume was before a growth of its ext4 that was cut short
//!     snapshots/<id>/record.json  allocated.map changed.map skip-1.map skip-2.map ... pending.map hashes
//!     snapshots/<id>/bytes/data.img
//!     groups/<id>/record.json     a group snapshot
//!     groups/<id>/members/<id>/   its snapshots, each as below snapshots/
//!                                 a snapshot or a group that has a deleted.json was deleted, and is kept as a base
//!                                 for deltas; the bytes may be gone
//!     reserve                     room that is given back to a deletion on a full pool
//!     staging/                    half-made and half-removed objects, emptied at start, except for transfers
//!     staging/<id>.bytes/         bytes of a deleted snapshot, which are being removed
//!     staging/<id>/transfer.json  a volume that is still copied from another node, with its bytes/ so far
//! ```
//!
//! A crash may leave drafts next to these files, which are never read ([`DraftFile`]).

use std::path::{Path, PathBuf};

use super::{GroupId, SnapshotId, VolumeId};

/// The names under which a file is written next to its place, before it is renamed into it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DraftFile {
    /// `<name>.new`: a file that is made or replaced.
    New,
    /// `changed.map.compared`: the result of a comparison.
    Compared,
    /// `allocated.map.checked`: the result of a check.
    Checked,
}

impl DraftFile {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::New, Self::Compared, Self::Checked];

    /// The draft of this file.
    pub fn of(self, path: &Path) -> PathBuf {
        let end = match self {
            DraftFile::New => ".new",
            DraftFile::Compared => ".compared",
            DraftFile::Checked => ".checked",
        };
        let mut name = path.as_os_str().to_owned();
        name.push(end);
        name.into()
    }
}

/// The paths of one data directory (`--data-dir`).
#[derive(Clone, Debug)]
pub struct DataDir(PathBuf);

impl DataDir {
    /// The layout below `path`.
    pub fn new(path: impl Into<PathBuf>) -> Self {
        Self(path.into())
    }

    /// The directory itself.
    pub fn path(&self) -> &Path {
        &self.0
    }

    /// `deltapath.json`: format version, driver name, pool kind.
    pub fn manifest(&self) -> PathBuf {
        self.0.join("deltapath.json")
    }

    /// `lock`: locked by the running driver.
    pub fn lock(&self) -> PathBuf {
        self.0.join("lock")
    }

    /// `pool.img`: the filesystem image of a pool made in a file.
    pub fn pool_image(&self) -> PathBuf {
        self.0.join("pool.img")
    }

    /// `reserve`: takes the room that opening the image needs on a full disk.
    pub fn reserve(&self) -> PathBuf {
        self.0.join("reserve")
    }

    /// `pool.img.untried`: there until the kernel has mounted the image once.
    pub fn untried(&self) -> PathBuf {
        self.0.join("pool.img.untried")
    }

    /// `pool/`: where objects live.
    pub fn pool(&self) -> PoolDir {
        PoolDir(self.0.join("pool"))
    }
}

/// The paths of a pool.
#[derive(Clone, Debug)]
pub struct PoolDir(PathBuf);

impl PoolDir {
    /// The pool's root.
    pub fn path(&self) -> &Path {
        &self.0
    }

    /// `volumes/`.
    pub fn volumes(&self) -> PathBuf {
        self.0.join("volumes")
    }

    /// `snapshots/`.
    pub fn snapshots(&self) -> PathBuf {
        self.0.join("snapshots")
    }

    /// `groups/`.
    pub fn groups(&self) -> PathBuf {
        self.0.join("groups")
    }

    /// `staging/`.
    pub fn staging(&self) -> PathBuf {
        self.0.join("staging")
    }

    /// `reserve`: takes the room that a deletion needs on a full pool.
    pub fn reserve(&self) -> PathBuf {
        self.0.join("reserve")
    }

    /// The directory of a volume.
    pub fn volume(&self, id: &VolumeId) -> ObjectDir {
        ObjectDir(self.volumes().join(id.as_str()))
    }

    /// The directory of a group snapshot.
    pub fn group(&self, id: &GroupId) -> GroupDir {
        GroupDir(self.groups().join(id.as_str()))
    }

    /// The directory of a snapshot that is not a member of a group.
    pub fn snapshot(&self, id: &SnapshotId) -> ObjectDir {
        ObjectDir(self.snapshots().join(id.as_str()))
    }
}

/// The files inside one group snapshot, wherever its directory is now. Its members are inside, so that
/// one rename makes all of them exist, or none.
#[derive(Clone, Debug)]
pub struct GroupDir(PathBuf);

impl GroupDir {
    /// The layout below `path`.
    pub fn new(path: impl Into<PathBuf>) -> Self {
        Self(path.into())
    }

    /// The directory itself.
    pub fn path(&self) -> &Path {
        &self.0
    }

    /// `record.json`.
    pub fn record(&self) -> PathBuf {
        self.0.join("record.json")
    }

    /// `deleted.json`: that the group was deleted, and when.
    pub fn deleted(&self) -> PathBuf {
        self.0.join("deleted.json")
    }

    /// `members/`.
    pub fn members(&self) -> PathBuf {
        self.0.join("members")
    }

    /// The directory of a snapshot of the group.
    pub fn member(&self, id: &SnapshotId) -> ObjectDir {
        ObjectDir(self.members().join(id.as_str()))
    }
}

/// The files inside one volume or snapshot, wherever its directory is now.
#[derive(Clone, Debug)]
pub struct ObjectDir(PathBuf);

impl ObjectDir {
    /// The layout below `path`.
    pub fn new(path: impl Into<PathBuf>) -> Self {
        Self(path.into())
    }

    /// The directory itself.
    pub fn path(&self) -> &Path {
        &self.0
    }

    /// `transfer.json`: in `staging/` alone, the record of a volume that is still copied from another node.
    pub fn transfer(&self) -> PathBuf {
        self.0.join("transfer.json")
    }

    /// `record.json`.
    pub fn record(&self) -> PathBuf {
        self.0.join("record.json")
    }

    /// `state.json`: where a volume is attached, staged and published, and whether it is frozen.
    pub fn state(&self) -> PathBuf {
        self.0.join("state.json")
    }

    /// `deleted.json`: that a snapshot was deleted, and when.
    pub fn deleted(&self) -> PathBuf {
        self.0.join("deleted.json")
    }

    /// `bytes/`: a directory of its own, so that a pool may make it a subvolume.
    pub fn bytes(&self) -> PathBuf {
        self.0.join("bytes")
    }

    /// `bytes/data.img`: the blocks.
    pub fn data(&self) -> PathBuf {
        self.bytes().join("data.img")
    }

    /// `ungrown/`: what a volume held before its filesystem began to grow.
    pub fn ungrown(&self) -> ObjectDir {
        ObjectDir(self.0.join("ungrown"))
    }

    /// `allocated.map`: blocks that hold data.
    pub fn allocated(&self) -> PathBuf {
        self.0.join("allocated.map")
    }

    /// `changed.map`: blocks that may differ from another snapshot.
    pub fn changed(&self) -> PathBuf {
        self.0.join("changed.map")
    }

    /// The levels of skip maps.
    pub const SKIPS: std::ops::RangeInclusive<u32> = 1..=4;

    /// `skip-LEVEL.map`: blocks that may differ from a snapshot further back.
    pub fn skip(&self, level: u32) -> PathBuf {
        self.0.join(format!("skip-{level}.map"))
    }

    /// `pending.map`: blocks whose hash is not written yet.
    pub fn pending(&self) -> PathBuf {
        self.0.join("pending.map")
    }

    /// The drafts of maps that a crash may leave.
    pub fn map_drafts(&self) -> Vec<PathBuf> {
        let (allocated, changed) = (self.allocated(), self.changed());
        let mut drafts = vec![
            DraftFile::New.of(&allocated),
            DraftFile::Checked.of(&allocated),
            DraftFile::New.of(&self.pending()),
            DraftFile::New.of(&changed),
            DraftFile::Compared.of(&changed),
        ];
        drafts.extend(Self::SKIPS.map(|level| DraftFile::New.of(&self.skip(level))));
        drafts
    }

    /// `hashes`: one hash per block.
    pub fn hashes(&self) -> PathBuf {
        self.0.join("hashes")
    }
}
