//! Parameters of StorageClasses, VolumeSnapshotClasses, VolumeAttributesClasses and inline volumes. An unknown parameter is
//! an error that names it. Those of the sidecars (`csi.storage.k8s.io/...`) are accepted everywhere.

use std::collections::HashMap;

use crate::driver::error::{Error, Result, shown};
use crate::driver::request::capability::known_filesystem;
use crate::store::{Tuning, TupleStyle};
use base::{BlockSize, Quantity};

const SIDECAR_PREFIX: &str = "csi.storage.k8s.io/";
/// The only parameter of the sidecars that matters for the volume. The provisioner turns it into a capability for
/// CreateVolume, and sends it unchanged with GetCapacity.
const FS_TYPE: &str = "csi.storage.k8s.io/fstype";

/// StorageClass parameters.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct VolumeParameters {
    /// `blockSize`.
    pub block_size: Option<BlockSize>,
    /// `changedBlockTracking`.
    pub tracking: Option<bool>,
    /// `csi.storage.k8s.io/fstype`: the filesystem if a capability does not name one.
    pub fs_type: Option<String>,
}

impl VolumeParameters {
    /// Reads the parameters of a CreateVolume call.
    pub fn parse(parameters: &HashMap<String, String>) -> Result<Self> {
        let fs_type = parameters.get(FS_TYPE).filter(|name| !name.is_empty());
        if let Some(name) = fs_type {
            known_filesystem("parameter csi.storage.k8s.io/fstype", name)?;
        }
        let mut parsed = VolumeParameters { fs_type: fs_type.cloned(), ..Default::default() };
        for (name, value) in own(parameters) {
            match name {
                "blockSize" => parsed.block_size = Some(block_size(value)?),
                "changedBlockTracking" => {
                    parsed.tracking =
                        Some(choose("changedBlockTracking", value, [("true", true), ("false", false)])?);
                }
                _ => {
                    return Err(unknown(name, "blockSize, changedBlockTracking"));
                }
            }
        }
        Ok(parsed)
    }
}

/// Reads VolumeAttributesClass parameters (`mutable_parameters`). Those that are not named stay `None`.
pub fn parse_tuning(parameters: &HashMap<String, String>) -> Result<Tuning> {
    let mut parsed = Tuning::default();
    for (name, value) in own(parameters) {
        match name {
            "readAheadKiB" => parsed.read_ahead_kib = Some(read_ahead(value)?),
            "directIO" => {
                parsed.direct_io = Some(choose("directIO", value, [("true", true), ("false", false)])?);
            }
            _ => return Err(unknown(name, "readAheadKiB, directIO")),
        }
    }
    Ok(parsed)
}

/// The kernel counts in pages, so it would round any other value.
fn read_ahead(value: &str) -> Result<u32> {
    let parsed = value.parse::<u32>().ok().filter(|kib| *kib <= 1 << 20 && kib.is_multiple_of(4));
    parsed.ok_or_else(|| Error::Invalid {
        field: "parameter readAheadKiB",
        value: shown(value),
        want: "a multiple of 4 from 0 to 1048576".into(),
    })
}

/// The parameters of an ephemeral inline volume: the attributes in the pod's spec, which kubelet sends as the volume
/// context.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EphemeralParameters {
    /// `size`.
    pub size: Option<Quantity>,
}

impl EphemeralParameters {
    /// Reads the context of a NodePublishVolume call; `None` if the volume is not ephemeral.
    pub fn parse(context: &HashMap<String, String>) -> Result<Option<Self>> {
        if context.get("csi.storage.k8s.io/ephemeral").map(String::as_str) != Some("true") {
            return Ok(None);
        }
        let mut parsed = EphemeralParameters { size: None };
        for (name, value) in own(context) {
            match name {
                "size" => {
                    parsed.size = Some(value.parse().map_err(|_| Error::Invalid {
                        field: "volume attribute size",
                        value: shown(value),
                        want: "a quantity such as 1Gi".into(),
                    })?);
                }
                _ => return Err(unknown(name, "size")),
            }
        }
        Ok(Some(parsed))
    }
}

/// VolumeSnapshotClass parameters.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SnapshotParameters {
    /// `blockMetadataType`.
    pub tuple_style: Option<TupleStyle>,
}

impl SnapshotParameters {
    /// Reads the parameters of a CreateSnapshot call.
    pub fn parse(parameters: &HashMap<String, String>) -> Result<Self> {
        let mut parsed = SnapshotParameters::default();
        for (name, value) in own(parameters) {
            match name {
                "blockMetadataType" => {
                    let styles = [("variable", TupleStyle::Variable), ("fixed", TupleStyle::Fixed)];
                    parsed.tuple_style = Some(choose("blockMetadataType", value, styles)?);
                }
                // A field of the class, which the sidecars use. Kubernetes' storage tests also put it into the parameters
                // of a group's class. It has no effect there, so it is accepted.
                "deletionPolicy" => {
                    choose("deletionPolicy", value, [("Delete", ()), ("Retain", ())])?;
                }
                _ => return Err(unknown(name, "blockMetadataType")),
            }
        }
        Ok(parsed)
    }
}

/// The parameters for the driver, sorted, so that the same request always gets the same error.
fn own(parameters: &HashMap<String, String>) -> Vec<(&str, &str)> {
    let mut own: Vec<(&str, &str)> = parameters
        .iter()
        .filter(|(name, _)| !name.starts_with(SIDECAR_PREFIX))
        .map(|(name, value)| (name.as_str(), value.as_str()))
        .collect();
    own.sort_unstable();
    own
}

fn unknown(name: &str, known: &'static str) -> Error {
    Error::UnknownParameter { name: shown(name), known }
}

fn block_size(value: &str) -> Result<BlockSize> {
    let parsed = value.parse::<Quantity>().ok().and_then(|Quantity(bytes)| BlockSize::try_from(bytes).ok());
    parsed.ok_or_else(|| Error::Invalid {
        field: "parameter blockSize",
        value: shown(value),
        want: "a power of two from 4Ki to 4Mi".into(),
    })
}

fn choose<T, const N: usize>(field: &'static str, value: &str, choices: [(&str, T); N]) -> Result<T> {
    let want = choices.each_ref().map(|(name, _)| *name).join(" or ");
    let chosen = choices.into_iter().find(|(name, _)| *name == value);
    chosen.map(|(_, choice)| choice).ok_or_else(|| Error::Invalid { field, value: shown(value), want })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn map(pairs: &[(&str, &str)]) -> HashMap<String, String> {
        pairs.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect()
    }

    #[test]
    fn known_parameters_parse_and_the_sidecars_own_are_passed_over() {
        let parsed = VolumeParameters::parse(&map(&[
            ("blockSize", "64Ki"),
            ("changedBlockTracking", "false"),
            ("csi.storage.k8s.io/pvc/name", "data"),
            ("csi.storage.k8s.io/fstype", "xfs"),
        ]));
        let expected = VolumeParameters {
            block_size: BlockSize::try_from(65536).ok(),
            tracking: Some(false),
            fs_type: Some("xfs".into()),
        };
        assert_eq!(parsed.expect("valid"), expected);
        let parsed = SnapshotParameters::parse(&map(&[("blockMetadataType", "fixed")]));
        assert_eq!(parsed.expect("valid").tuple_style, Some(TupleStyle::Fixed));
    }

    #[test]
    fn a_devices_attributes_parse_and_no_others() {
        let parsed = parse_tuning(&map(&[("readAheadKiB", "512"), ("directIO", "false")])).expect("valid");
        assert_eq!(parsed, Tuning { read_ahead_kib: Some(512), direct_io: Some(false) });
        for (name, value, said) in [
            ("readAheadKiB", "3", "\"3\""),
            ("readAheadKiB", "-4", "multiple of 4"),
            ("readAheadKiB", "1048580", "1048576"),
            ("directIO", "on", "true or false"),
            ("iops", "3000", "readAheadKiB, directIO"),
        ] {
            let error = parse_tuning(&map(&[(name, value)])).expect_err(name);
            assert!(error.to_string().contains(said), "{error}");
        }
    }

    #[test]
    fn an_ephemeral_volume_has_a_size_and_nothing_else() {
        assert_eq!(EphemeralParameters::parse(&map(&[("size", "1Gi")])).expect("valid"), None);
        let context =
            [("csi.storage.k8s.io/ephemeral", "true"), ("csi.storage.k8s.io/pod.name", "p"), ("size", "1Gi")];
        let parsed = EphemeralParameters::parse(&map(&context)).expect("valid").expect("ephemeral");
        assert_eq!(parsed.size, Some(Quantity(1 << 30)));
        for (name, value) in [("size", "big"), ("colour", "red")] {
            let context = [("csi.storage.k8s.io/ephemeral", "true"), (name, value)];
            assert!(EphemeralParameters::parse(&map(&context)).is_err(), "{name}");
        }
    }

    #[test]
    fn what_is_wrong_is_named_with_its_value() {
        for (name, value, said) in [
            ("blocksize", "4Ki", "blocksize"),
            ("blockSize", "5Ki", "\"5Ki\""),
            ("blockSize", "8Mi", "4Mi"),
            ("changedBlockTracking", "yes", "true or false"),
            ("csi.storage.k8s.io/fstype", "zfs", "ext4, xfs, btrfs"),
        ] {
            let error = VolumeParameters::parse(&map(&[(name, value)])).expect_err(name);
            assert!(error.to_string().contains(said), "{error}");
        }
        assert!(SnapshotParameters::parse(&map(&[("blockMetadataType", "FIXED")])).is_err());
        assert!(SnapshotParameters::parse(&map(&[("deletionPolicy", "Keep")])).is_err());
        assert!(VolumeParameters::parse(&map(&[("deletionPolicy", "Delete")])).is_err());
    }

    #[test]
    fn a_field_of_the_snapshot_class_among_its_parameters_changes_nothing() {
        let pairs = [("deletionPolicy", "Delete"), ("blockMetadataType", "fixed")];
        let parsed = SnapshotParameters::parse(&map(&pairs)).expect("valid");
        assert_eq!(parsed, SnapshotParameters { tuple_style: Some(TupleStyle::Fixed) });
    }
}
