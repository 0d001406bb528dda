//! From wire messages to the driver's types, and back.

use std::collections::BTreeMap;

use crate::driver::{
    AccessMode, AccessType, Capability, CapacityRange, Error, Fault, MountFlags, Result, SourceRef, Trouble,
    VolumeHealth,
};
use crate::store::{self, SnapshotRecord, Timestamp, TupleStyle, VolumeRecord};
use proto::volume_capability::access_mode::Mode;
use proto::volume_capability::{self as wire};

pub(super) fn capabilities(capabilities: Vec<proto::VolumeCapability>) -> Result<Vec<Capability>> {
    capabilities.into_iter().map(|capability| self::capability(Some(capability))).collect()
}

pub(super) fn capability(capability: Option<proto::VolumeCapability>) -> Result<Capability> {
    let capability = capability.ok_or(Error::Missing { field: "volume_capability" })?;
    let access = match capability.access_type {
        None => return Err(Error::Missing { field: "volume_capability.access_type" }),
        Some(wire::AccessType::Block(_)) => AccessType::Block,
        Some(wire::AccessType::Mount(mount)) => {
            if !mount.volume_mount_group.is_empty() {
                return Err(Error::Unsupported(
                    "volume_mount_group is not supported (VOLUME_MOUNT_GROUP is not claimed): use fsGroup"
                        .into(),
                ));
            }
            AccessType::Mount { fs_type: mount.fs_type, flags: MountFlags(mount.mount_flags) }
        }
    };
    let mode = capability.access_mode.ok_or(Error::Missing { field: "volume_capability.access_mode" })?;
    let mode = match Mode::try_from(mode.mode) {
        Ok(Mode::SingleNodeWriter) => AccessMode::SingleNodeWriter,
        Ok(Mode::SingleNodeReaderOnly) => AccessMode::SingleNodeReaderOnly,
        Ok(Mode::SingleNodeSingleWriter) => AccessMode::SingleNodeSingleWriter,
        Ok(Mode::SingleNodeMultiWriter) => AccessMode::SingleNodeMultiWriter,
        Ok(Mode::MultiNodeReaderOnly) => AccessMode::MultiNodeReaderOnly,
        Ok(Mode::Unknown) => return Err(Error::Missing { field: "volume_capability.access_mode.mode" }),
        Ok(mode @ (Mode::MultiNodeSingleWriter | Mode::MultiNodeMultiWriter)) => {
            return Err(Error::Unsupported(format!(
                "access mode {} is not supported: a volume is written on one node only",
                mode.as_str_name()
            )));
        }
        Err(_) => {
            return Err(Error::Invalid {
                field: "volume_capability.access_mode.mode",
                value: mode.mode.to_string(),
                want: "a mode of the CSI spec".into(),
            });
        }
    };
    Ok(Capability { access, mode })
}

pub(super) fn optional_capability(capability: Option<proto::VolumeCapability>) -> Result<Option<Capability>> {
    capability.map(|asked| self::capability(Some(asked))).transpose()
}

pub(super) fn range(range: Option<proto::CapacityRange>) -> Result<CapacityRange> {
    let range = range.unwrap_or_default();
    CapacityRange::new(range.required_bytes, range.limit_bytes)
}

pub(super) fn encode_health(health: VolumeHealth) -> proto::VolumeHealth {
    use proto::VolumeHealthErrorType as Wire;
    let entry = |Fault { reason, message }| {
        let (name, trouble) = reason.parts();
        let status = match trouble {
            Trouble::Degraded => Wire::Degraded,
            Trouble::Inaccessible => Wire::Inaccessible,
            Trouble::DataLoss => Wire::DataLoss,
        };
        proto::volume_health::VolumeHealthEntry { status: status.into(), reason: name.to_owned(), message }
    };
    proto::VolumeHealth {
        volume_id: health.volume_id,
        health_statuses: health.faults.into_iter().map(entry).collect(),
    }
}

pub(super) fn encode_storage_fault(
    Fault { reason, message }: Fault,
) -> proto::node_get_storage_health_response::StorageBackendHealth {
    use proto::StorageHealthErrorType as Wire;
    let (name, trouble) = reason.parts();
    let status = match trouble {
        Trouble::Inaccessible => Wire::StorageUnreachable,
        Trouble::Degraded | Trouble::DataLoss => Wire::StorageDegraded,
    };
    proto::node_get_storage_health_response::StorageBackendHealth {
        status: status.into(),
        reason: name.to_owned(),
        message,
        // The pool serves every use.
        volume_capability: None,
    }
}

/// The topologies one of which must be ours; those that are only preferred change nothing where there is one node.
pub(super) fn requisite(asked: Option<proto::TopologyRequirement>) -> Vec<BTreeMap<String, String>> {
    asked.map(|asked| topologies(asked.requisite)).unwrap_or_default()
}

pub(super) fn source(source: Option<proto::VolumeContentSource>) -> Result<Option<SourceRef>> {
    use proto::volume_content_source::Type;
    let Some(source) = source else { return Ok(None) };
    match source.r#type {
        None => Err(Error::Missing { field: "volume_content_source.type" }),
        Some(Type::Snapshot(source)) if source.snapshot_id.is_empty() => {
            Err(Error::Missing { field: "volume_content_source.snapshot.snapshot_id" })
        }
        Some(Type::Volume(source)) if source.volume_id.is_empty() => {
            Err(Error::Missing { field: "volume_content_source.volume.volume_id" })
        }
        Some(Type::Snapshot(source)) => Ok(Some(SourceRef::Snapshot(source.snapshot_id))),
        Some(Type::Volume(source)) => Ok(Some(SourceRef::Volume(source.volume_id))),
    }
}

fn topologies(topologies: Vec<proto::Topology>) -> Vec<BTreeMap<String, String>> {
    topologies.into_iter().map(|topology| topology.segments.into_iter().collect()).collect()
}

pub(super) fn encode_topology(topology: BTreeMap<String, String>) -> proto::Topology {
    proto::Topology { segments: topology.into_iter().collect() }
}

pub(super) fn encode_volume(record: &VolumeRecord, topology: BTreeMap<String, String>) -> proto::Volume {
    use proto::volume_content_source::{SnapshotSource, Type, VolumeSource};
    let source = record.source.as_ref().map(|source| match source {
        store::Source::Snapshot(id) => Type::Snapshot(SnapshotSource { snapshot_id: id.to_string() }),
        store::Source::Volume(id) => Type::Volume(VolumeSource { volume_id: id.to_string() }),
    });
    proto::Volume {
        capacity_bytes: wire_bytes(record.capacity),
        volume_id: record.id.to_string(),
        volume_context: Default::default(),
        content_source: source.map(|source| proto::VolumeContentSource { r#type: Some(source) }),
        accessible_topology: vec![encode_topology(topology)],
    }
}

pub(super) fn encode_snapshot(
    record: &SnapshotRecord,
    topology: BTreeMap<String, String>,
) -> proto::Snapshot {
    proto::Snapshot {
        size_bytes: wire_bytes(record.capacity),
        snapshot_id: record.id.to_string(),
        source_volume_id: record.volume.to_string(),
        creation_time: Some(encode_time(record.created)),
        // A snapshot exists once it is whole.
        ready_to_use: true,
        group_snapshot_id: record.group.as_ref().map(ToString::to_string).unwrap_or_default(),
        accessible_topology: vec![encode_topology(topology)],
    }
}

pub(super) fn encode_time(time: Timestamp) -> prost_types::Timestamp {
    prost_types::Timestamp { seconds: time.seconds, nanos: time.nanos }
}

pub(super) fn encode_style(style: TupleStyle) -> proto::BlockMetadataType {
    match style {
        TupleStyle::Variable => proto::BlockMetadataType::VariableLength,
        TupleStyle::Fixed => proto::BlockMetadataType::FixedLength,
    }
}

/// Bytes as the wire has them. Capacities are checked against `i64::MAX` when they are made.
pub(super) fn wire_bytes(bytes: u64) -> i64 {
    i64::try_from(bytes).unwrap_or(i64::MAX)
}
