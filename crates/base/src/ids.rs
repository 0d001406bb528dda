//! Ids of the objects the driver makes.
//!
//! An id becomes a directory name, so its type can hold nothing but `<prefix>-<32 hex digits>`:
//! whatever a client sends either parses into that or names nothing we made. Ids are random and
//! never reused, so a stale id cannot come to mean another object.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// A string that cannot be the id of any object of this driver.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[error("not an id made by this driver (want {prefix}- and 32 hex digits)")]
pub struct IdError {
    prefix: &'static str,
}

const HEX_DIGITS: usize = 32;

macro_rules! id_type {
    ($(#[$doc:meta])* $name:ident, $prefix:literal) => {
        $(#[$doc])*
        #[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
        #[serde(try_from = "String", into = "String")]
        pub struct $name(String);

        impl $name {
            /// A fresh id from the kernel's random number generator.
            pub fn random() -> std::io::Result<Self> {
                let mut bits = [0u8; HEX_DIGITS / 2];
                getrandom::fill(&mut bits).map_err(std::io::Error::from)?;
                Ok(Self(format!(concat!($prefix, "-{:032x}"), u128::from_be_bytes(bits))))
            }

            /// The id as text, which is also its directory name.
            pub fn as_str(&self) -> &str {
                &self.0
            }
        }

        impl FromStr for $name {
            type Err = IdError;

            fn from_str(text: &str) -> Result<Self, IdError> {
                let hex = text.strip_prefix(concat!($prefix, "-"));
                let valid = |hex: &str| {
                    hex.len() == HEX_DIGITS
                        && hex.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f'))
                };
                match hex {
                    Some(hex) if valid(hex) => Ok(Self(text.to_owned())),
                    _ => Err(IdError { prefix: $prefix }),
                }
            }
        }

        impl TryFrom<String> for $name {
            type Error = IdError;

            fn try_from(text: String) -> Result<Self, IdError> {
                text.parse()
            }
        }

        impl From<$name> for String {
            fn from(id: $name) -> String {
                id.0
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(&self.0)
            }
        }
    };
}

id_type!(
    /// The id of a volume, `vol-` and 32 hex digits.
    VolumeId,
    "vol"
);
id_type!(
    /// The id of a snapshot, `snap-` and 32 hex digits.
    SnapshotId,
    "snap"
);
id_type!(
    /// The id of a group snapshot, `group-` and 32 hex digits.
    GroupId,
    "group"
);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_random_id_parses_back_and_differs_from_the_next() {
        let first = VolumeId::random().expect("getrandom works");
        let second = VolumeId::random().expect("getrandom works");
        assert_ne!(first, second);
        assert_eq!(first.as_str().parse(), Ok(first.clone()));
    }

    #[test]
    fn nothing_that_could_leave_a_directory_is_an_id() {
        let good = "0123456789abcdef0123456789abcdef";
        assert!(format!("snap-{good}").parse::<SnapshotId>().is_ok());
        for bad in [
            String::new(),
            "..".into(),
            "vol-".into(),
            format!("vol-{good}/.."),
            format!("vol-{good}0"),
            format!("vol-{}", good.to_uppercase()),
            format!("snap-{good}"),
            format!("vol-{}\0", &good[1..]),
            "x".repeat(10_000),
        ] {
            assert!(bad.parse::<VolumeId>().is_err(), "{bad:?}");
        }
    }
}
