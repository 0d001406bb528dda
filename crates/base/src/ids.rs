//! Ids of the objects the driver makes.
//!
//! An id becomes a directory name, so its type can hold nothing but `<prefix>-<32 hex digits>`:
//! whatever a client sends either parses into that or names nothing we made. The first eight digits
//! are the [`DataDirKey`] of the data directory that the object was made in, so that a router in front
//! of many nodes knows the node by the id alone. The others are random and never reused, so a stale
//! id cannot come to mean another object.

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
const KEY_DIGITS: usize = 8;

/// The key of a data directory: made with it, kept in `deltapath.json`, and part of every id.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct DataDirKey(u32);

/// A string that is not the key of a data directory.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[error("not the key of a data directory (want {KEY_DIGITS} hex digits in lower case)")]
pub struct KeyError;

impl DataDirKey {
    /// A fresh key from the kernel's random number generator.
    pub fn random() -> std::io::Result<Self> {
        let mut bits = [0u8; KEY_DIGITS / 2];
        getrandom::fill(&mut bits).map_err(std::io::Error::from)?;
        Ok(DataDirKey(u32::from_be_bytes(bits)))
    }

    /// The key in an id of whatever kind; `None` for a string that is not an id.
    pub fn of(id: &str) -> Option<Self> {
        let digits = PREFIXES.iter().find_map(|prefix| id.strip_prefix(prefix))?;
        match is_hex(digits, HEX_DIGITS) {
            true => digits.get(..KEY_DIGITS)?.parse().ok(),
            false => None,
        }
    }
}

impl FromStr for DataDirKey {
    type Err = KeyError;

    fn from_str(text: &str) -> Result<Self, KeyError> {
        match is_hex(text, KEY_DIGITS) {
            true => u32::from_str_radix(text, 16).map(DataDirKey).map_err(|_| KeyError),
            false => Err(KeyError),
        }
    }
}

impl TryFrom<String> for DataDirKey {
    type Error = KeyError;

    fn try_from(text: String) -> Result<Self, KeyError> {
        text.parse()
    }
}

impl From<DataDirKey> for String {
    fn from(key: DataDirKey) -> String {
        key.to_string()
    }
}

impl fmt::Display for DataDirKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:08x}", self.0)
    }
}

/// What ids begin with.
const PREFIXES: [&str; 3] = ["vol-", "snap-", "group-"];

fn is_hex(text: &str, digits: usize) -> bool {
    text.len() == digits && text.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f'))
}

fn hex_digit(half: u8) -> char {
    char::from(b"0123456789abcdef"[usize::from(half & 15)])
}

macro_rules! id_type {
    ($(#[$doc:meta])* $name:ident, $prefix:literal) => {
        $(#[$doc])*
        #[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
        #[serde(try_from = "String", into = "String")]
        pub struct $name(String);

        impl $name {
            /// A fresh id of the data directory with this key, from the kernel's random number generator.
            pub fn random(key: DataDirKey) -> std::io::Result<Self> {
                let mut id = format!(concat!($prefix, "-{}"), key);
                let mut bits = [0u8; (HEX_DIGITS - KEY_DIGITS) / 2];
                getrandom::fill(&mut bits).map_err(std::io::Error::from)?;
                id.extend(bits.iter().flat_map(|byte| [byte >> 4, byte & 15]).map(hex_digit));
                Ok(Self(id))
            }

            /// The id as text, which is also its directory name.
            pub fn as_str(&self) -> &str {
                &self.0
            }
        }

        impl FromStr for $name {
            type Err = IdError;

            fn from_str(text: &str) -> Result<Self, IdError> {
                match text.strip_prefix(concat!($prefix, "-")) {
                    Some(hex) if is_hex(hex, HEX_DIGITS) => Ok(Self(text.to_owned())),
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
        let key = DataDirKey::random().expect("getrandom works");
        let first = VolumeId::random(key).expect("getrandom works");
        let second = VolumeId::random(key).expect("getrandom works");
        assert_ne!(first, second);
        assert_eq!(first.as_str().parse(), Ok(first.clone()));
    }

    #[test]
    fn an_id_of_any_kind_tells_its_key() {
        let key: DataDirKey = "00ab12cd".parse().expect("a key");
        assert_eq!(key.to_string(), "00ab12cd");
        for id in [
            VolumeId::random(key).map(String::from),
            SnapshotId::random(key).map(String::from),
            GroupId::random(key).map(String::from),
        ] {
            assert_eq!(DataDirKey::of(&id.expect("getrandom works")), Some(key));
        }
        let good = "0123456789abcdef0123456789abcdef";
        assert_eq!(DataDirKey::of(&format!("vol-{good}")), "01234567".parse().ok());
        for no_id in
            ["", "vol-", "vol-01234567", "01234567", &format!("disk-{good}"), &format!("vol-{good}0")]
        {
            assert_eq!(DataDirKey::of(no_id), None, "{no_id:?}");
        }
        for no_key in ["", "0123456", "012345678", "0123456G", "0123456A", "+1234567"] {
            assert_eq!(no_key.parse::<DataDirKey>(), Err(KeyError), "{no_key:?}");
        }
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
