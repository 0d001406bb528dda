//! Parameters of storage and snapshot classes. Unknown ones are refused by name; the sidecars' own
//! (`csi.storage.k8s.io/...`) are tolerated wherever they send them.

use std::collections::HashMap;

use super::error::shown;
use super::{Error, Result};
use crate::base::{BlockSize, Quantity};
use crate::store::TupleStyle;

const SIDECAR_PREFIX: &str = "csi.storage.k8s.io/";

/// StorageClass parameters.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct VolumeParameters {
    /// `blockSize`.
    pub block_size: Option<BlockSize>,
    /// `changedBlockTracking`.
    pub tracking: Option<bool>,
}

impl VolumeParameters {
    /// Reads the parameters of a CreateVolume call.
    pub fn parse(parameters: &HashMap<String, String>) -> Result<Self> {
        let mut parsed = VolumeParameters::default();
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
                _ => return Err(unknown(name, "blockMetadataType")),
            }
        }
        Ok(parsed)
    }
}

/// The parameters meant for us, in a stable order, so that one request gives one error.
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
        ]));
        let expected =
            VolumeParameters { block_size: BlockSize::try_from(65536).ok(), tracking: Some(false) };
        assert_eq!(parsed.expect("valid"), expected);
        let parsed = SnapshotParameters::parse(&map(&[("blockMetadataType", "fixed")]));
        assert_eq!(parsed.expect("valid").tuple_style, Some(TupleStyle::Fixed));
    }

    #[test]
    fn what_is_wrong_is_named_with_its_value() {
        for (name, value, said) in [
            ("blocksize", "4Ki", "blocksize"),
            ("blockSize", "5Ki", "\"5Ki\""),
            ("blockSize", "8Mi", "4Mi"),
            ("changedBlockTracking", "yes", "true or false"),
        ] {
            let error = VolumeParameters::parse(&map(&[(name, value)])).expect_err(name);
            assert!(error.to_string().contains(said), "{error}");
        }
        assert!(SnapshotParameters::parse(&map(&[("blockMetadataType", "FIXED")])).is_err());
    }
}
