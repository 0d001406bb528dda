//! The request of a CreateVolume call, and its comparison with an existing volume.

use std::collections::BTreeMap;

use crate::driver::error::{Error, Result, shown};
use crate::driver::request::capability::Capability;
use crate::driver::request::params::VolumeParameters;
use crate::store::{AccessKind, Source, Tuning, VolumeRecord};
use base::BlockSize;

/// The longest name a CO may give (CSI spec, "Size Limits").
const MAX_NAME: usize = 128;

/// The size that a client asks for (`CapacityRange`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CapacityRange {
    /// Minimum in bytes; 0 for none.
    pub required: u64,
    /// Maximum in bytes.
    pub limit: Option<u64>,
}

impl CapacityRange {
    /// Checks the numbers of a request: 0 stands for none.
    pub fn new(required_bytes: i64, limit_bytes: i64) -> Result<Self> {
        let positive = |field, value: i64| {
            u64::try_from(value).map_err(|_| Error::Invalid {
                field,
                value: value.to_string(),
                want: "0 (no demand) or more".into(),
            })
        };
        let required = positive("capacity_range.required_bytes", required_bytes)?;
        let limit = positive("capacity_range.limit_bytes", limit_bytes)?;
        if limit != 0 && limit < required {
            return Err(Error::Invalid {
                field: "capacity_range.limit_bytes",
                value: limit.to_string(),
                want: format!("at least required_bytes, {required}"),
            });
        }
        Ok(CapacityRange { required, limit: (limit != 0).then_some(limit) })
    }

    /// Whether a capacity is in the requested range.
    pub(in crate::driver) fn holds(&self, capacity: u64) -> bool {
        capacity >= self.required && self.limit.is_none_or(|limit| capacity <= limit)
    }
}

/// A CreateVolume call.
#[derive(Clone, Debug)]
pub struct CreateVolume {
    /// The name: the same name means the same volume.
    pub name: String,
    /// The size of the volume.
    pub range: CapacityRange,
    /// The uses that it must support.
    pub capabilities: Vec<Capability>,
    /// StorageClass parameters.
    pub parameters: VolumeParameters,
    /// VolumeAttributesClass parameters.
    pub tuning: Tuning,
    /// The content source, if any.
    pub source: Option<SourceRef>,
    /// One of these topologies must be this node's; empty for any.
    pub requisite: Vec<BTreeMap<String, String>>,
}

/// A content source as a client names it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SourceRef {
    /// A snapshot's id.
    Snapshot(String),
    /// A volume's id.
    Volume(String),
}

/// How an existing volume differs from a new request with the same name, if it does.
pub(in crate::driver) fn difference(
    existing: &VolumeRecord,
    request: &CreateVolume,
    access: &[AccessKind],
) -> Option<String> {
    if !request.range.holds(existing.capacity) {
        return Some(format!("capacity {}", existing.capacity));
    }
    if !access.iter().all(|kind| existing.access.contains(kind)) {
        return Some("other volume_capabilities".into());
    }
    let source = existing.source.as_ref().map(|source| match source {
        Source::Snapshot(id) => SourceRef::Snapshot(id.to_string()),
        Source::Volume(id) => SourceRef::Volume(id.to_string()),
    });
    if source != request.source {
        return Some("another volume_content_source".into());
    }
    let from_source = existing.source.is_some();
    let block_size = request.parameters.block_size;
    if block_size
        .map_or(!from_source && existing.block_size != BlockSize::MIN, |size| size != existing.block_size)
    {
        return Some(format!("blockSize {}", existing.block_size));
    }
    let tracking = request.parameters.tracking;
    if tracking.map_or(!from_source && !existing.tracking, |tracking| tracking != existing.tracking) {
        return Some(format!("changedBlockTracking {}", existing.tracking));
    }
    None
}

/// Fails if the spec does not allow a CO to send this name.
pub(in crate::driver) fn check_name(field: &'static str, name: &str) -> Result<()> {
    if name.is_empty() {
        return Err(Error::Missing { field });
    }
    let banned = |c: char| c.is_control() && !matches!(c, '\t' | '\n' | '\r');
    if name.len() > MAX_NAME || name.chars().any(banned) {
        return Err(Error::Invalid {
            field,
            value: shown(name),
            want: format!("at most {MAX_NAME} bytes without control characters"),
        });
    }
    Ok(())
}
