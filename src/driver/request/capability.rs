//! How a volume is to be used, and whether this driver supports that.

use crate::driver::error::{Error, Result, shown};
use crate::store::{AccessKind, VolumeRecord};

/// As a device or as a filesystem.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum AccessType {
    /// A raw block device.
    Block,
    /// A mounted filesystem.
    Mount {
        /// Its type; empty for the driver's choice.
        fs_type: String,
        /// Options for the mount call. The spec treats them as secrets: never logged or stored.
        flags: MountFlags,
    },
}

/// Mount options of a client. They do not show in debug output.
#[derive(Clone, Default, PartialEq, Eq)]
pub struct MountFlags(pub Vec<String>);

impl std::fmt::Debug for MountFlags {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "MountFlags({} hidden)", self.0.len())
    }
}

/// The access modes that this driver supports.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AccessMode {
    /// SINGLE_NODE_WRITER: one place, read and write.
    SingleNodeWriter,
    /// SINGLE_NODE_READER_ONLY: one place, read.
    SingleNodeReaderOnly,
    /// SINGLE_NODE_SINGLE_WRITER: one place, read and write.
    SingleNodeSingleWriter,
    /// SINGLE_NODE_MULTI_WRITER: many places on one node, read and write.
    SingleNodeMultiWriter,
    /// MULTI_NODE_READER_ONLY: many places, read.
    MultiNodeReaderOnly,
}

impl AccessMode {
    /// Whether the volume must not be written.
    pub fn is_read_only(self) -> bool {
        matches!(self, AccessMode::SingleNodeReaderOnly | AccessMode::MultiNodeReaderOnly)
    }

    /// Its name in the CSI spec.
    pub fn name(self) -> &'static str {
        match self {
            AccessMode::SingleNodeWriter => "SINGLE_NODE_WRITER",
            AccessMode::SingleNodeReaderOnly => "SINGLE_NODE_READER_ONLY",
            AccessMode::SingleNodeSingleWriter => "SINGLE_NODE_SINGLE_WRITER",
            AccessMode::SingleNodeMultiWriter => "SINGLE_NODE_MULTI_WRITER",
            AccessMode::MultiNodeReaderOnly => "MULTI_NODE_READER_ONLY",
        }
    }

    /// Whether it may be published at several targets (table of `NodePublishVolume`).
    pub fn is_shared(self) -> bool {
        matches!(self, AccessMode::SingleNodeMultiWriter | AccessMode::MultiNodeReaderOnly)
    }
}

/// One way of using a volume.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Capability {
    /// Device or filesystem.
    pub access: AccessType,
    /// Who may use it, and how.
    pub mode: AccessMode,
}

/// Filesystems that this driver makes and mounts, and the smallest device for each: the least that its `mkfs` accepts, and
/// for btrfs the least that the kernel can resize (`mkfs.btrfs` accepts 109 MiB, but that filesystem could never grow).
const FILESYSTEMS: [(&str, u64); 3] = [("ext4", 1 << 20), ("xfs", 300 << 20), ("btrfs", 256 << 20)];
/// The filesystem if the client does not choose.
const DEFAULT_FS: &str = "ext4";

impl Capability {
    /// Whether it is read-only: by the access mode, or by the mount flag `ro`.
    pub(in crate::driver) fn is_read_only(&self) -> bool {
        let flag = match &self.access {
            AccessType::Block => false,
            AccessType::Mount { flags, .. } => flags.0.iter().flat_map(|f| f.split(',')).any(|f| f == "ro"),
        };
        flag || self.mode.is_read_only()
    }

    /// The kind of access in the form that records keep, for a new volume.
    /// `default` is the filesystem if the client does not choose one; `None` for the driver's choice.
    pub(in crate::driver) fn kind(&self, default: Option<&str>) -> Result<AccessKind> {
        self.kind_or(default.unwrap_or(DEFAULT_FS))
    }

    /// The same for an existing volume, whatever it was made for. The default is the filesystem that it was made for.
    pub(in crate::driver) fn kind_for(&self, record: &VolumeRecord) -> Result<AccessKind> {
        self.kind_or(record.fs_type().unwrap_or(DEFAULT_FS))
    }

    /// Whether a volume that is staged as `staged` can be used so. Without a filesystem's name any filesystem will do.
    pub(in crate::driver) fn fits(&self, staged: &AccessKind) -> bool {
        match (&self.access, staged) {
            (AccessType::Block, AccessKind::Block) => true,
            (AccessType::Mount { .. }, AccessKind::Filesystem(there)) => {
                self.named_filesystem().is_none_or(|named| named == there)
            }
            _ => false,
        }
    }

    /// The filesystem that the client chose.
    pub(in crate::driver) fn named_filesystem(&self) -> Option<&str> {
        match &self.access {
            AccessType::Mount { fs_type, .. } if !fs_type.is_empty() => Some(fs_type),
            _ => None,
        }
    }

    fn kind_or(&self, default: &str) -> Result<AccessKind> {
        match &self.access {
            AccessType::Block => Ok(AccessKind::Block),
            AccessType::Mount { fs_type, .. } => {
                let fs_type = if fs_type.is_empty() { default } else { fs_type };
                known_filesystem("volume_capability.mount.fs_type", fs_type)?;
                Ok(AccessKind::Filesystem(fs_type.to_owned()))
            }
        }
    }
}

/// Whether this driver makes and mounts a filesystem.
pub(in crate::driver) fn is_known_filesystem(name: &str) -> bool {
    FILESYSTEMS.iter().any(|(known, _)| *known == name)
}

/// Fails for a filesystem that this driver does not make. `field` is the request's field that names it.
pub(in crate::driver) fn known_filesystem(field: &'static str, name: &str) -> Result<()> {
    match is_known_filesystem(name) {
        true => Ok(()),
        false => {
            let want = FILESYSTEMS.map(|(known, _)| known).join(", ");
            Err(Error::Invalid { field, value: shown(name), want })
        }
    }
}

/// The kinds of several capabilities, each once, in the order of the request. `fs_type` is the default filesystem.
pub(in crate::driver) fn kinds(
    capabilities: &[Capability],
    fs_type: Option<&str>,
) -> Result<Vec<AccessKind>> {
    if capabilities.is_empty() {
        return Err(Error::Missing { field: "volume_capabilities" });
    }
    let mut kinds = Vec::new();
    for capability in capabilities {
        let kind = capability.kind(fs_type)?;
        if !kinds.contains(&kind) {
            kinds.push(kind);
        }
    }
    let filesystems = kinds.iter().filter(|kind| matches!(kind, AccessKind::Filesystem(_))).count();
    match filesystems > 1 {
        true => {
            Err(Error::Unsupported("volume_capabilities name two filesystem types: a volume has one".into()))
        }
        false => Ok(kinds),
    }
}

/// The smallest size in bytes of a volume that supports all these kinds.
pub(in crate::driver) fn least_size(kinds: &[AccessKind]) -> u64 {
    let least = |kind: &AccessKind| match kind {
        AccessKind::Block => 1,
        AccessKind::Filesystem(name) => {
            FILESYSTEMS.iter().find(|(known, _)| known == name).map_or(1, |(_, least)| *least)
        }
    };
    kinds.iter().map(least).max().unwrap_or(1)
}
