//! Fuzz targets of this member, and what those of all members read their input with.
#![allow(missing_docs)]

use std::fmt::{Debug, Display};
use std::path::{Component, Path};
use std::str::FromStr;

use super::{GroupId, Quantity, SnapshotId, VolumeId};

/// A target: it panics where something does not hold.
pub type Target = fn(&[u8]);

/// Runs the target of this name.
pub fn run(targets: &[(&str, Target)], name: &str, bytes: &[u8]) {
    let (_, target) = targets.iter().find(|(known, _)| *known == name).expect("a target");
    target(bytes);
}

/// Takes values from the front of the input; past its end they are zeros.
#[derive(Clone, Copy, Debug)]
pub struct Input<'i>(pub &'i [u8]);

impl<'i> Input<'i> {
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// At most `length` bytes, fewer at the end.
    pub fn bytes(&mut self, length: usize) -> &'i [u8] {
        let (taken, rest) = self.0.split_at(length.min(self.0.len()));
        self.0 = rest;
        taken
    }

    fn array<const N: usize>(&mut self) -> [u8; N] {
        let mut array = [0; N];
        let taken = self.bytes(N);
        array[..taken.len()].copy_from_slice(taken);
        array
    }

    pub fn u8(&mut self) -> u8 {
        u8::from_le_bytes(self.array())
    }

    pub fn u16(&mut self) -> u16 {
        u16::from_le_bytes(self.array())
    }

    pub fn u32(&mut self) -> u32 {
        u32::from_le_bytes(self.array())
    }

    pub fn u64(&mut self) -> u64 {
        u64::from_le_bytes(self.array())
    }
}

/// An id that parses is its text, and a name that stays where it is put; every other text is refused.
pub fn ids(bytes: &[u8]) {
    let Ok(text) = std::str::from_utf8(bytes) else { return };
    id::<VolumeId>(text, "vol-");
    id::<SnapshotId>(text, "snap-");
    id::<GroupId>(text, "group-");
}

fn id<Id: FromStr + Display + Debug + PartialEq + serde::de::DeserializeOwned>(text: &str, prefix: &str) {
    let hex = text.strip_prefix(prefix);
    let is_one =
        hex.is_some_and(|hex| hex.len() == 32 && hex.bytes().all(|b| b"0123456789abcdef".contains(&b)));
    let parsed = text.parse::<Id>().ok();
    assert_eq!(parsed.is_some(), is_one, "{text:?}");
    // In a record as on the wire.
    let json = serde_json::to_string(text).expect("a string");
    assert_eq!(serde_json::from_str::<Id>(&json).ok(), parsed, "{text:?}");
    if let Some(id) = parsed {
        let shown = id.to_string();
        assert_eq!(shown, text);
        let parts: Vec<_> = Path::new(&shown).components().collect();
        assert!(matches!(parts[..], [Component::Normal(_)]), "{shown:?} leaves its directory");
    }
}

/// A size that parses reads back from its shortest form, and plain digits are the number they show.
pub fn quantities(bytes: &[u8]) {
    let Ok(text) = std::str::from_utf8(bytes) else { return };
    let parsed = text.parse::<Quantity>();
    if !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit()) {
        assert_eq!(parsed.as_ref().ok().map(|size| size.0), text.parse::<u64>().ok(), "{text:?}");
    }
    match parsed {
        Ok(size) => {
            assert_eq!(size.to_string().parse(), Ok(size), "{text:?}");
            assert!(text.bytes().any(|byte| byte.is_ascii_digit()), "{text:?} is not a number");
            // An exponent may have its sign, as in Kubernetes.
            let unsigned = text.replace("e+", "e").replace("E+", "E");
            assert!(!unsigned.contains(['-', ' ', '+']), "{text:?} is no size");
        }
        Err(error) => assert!(error.to_string().contains(&format!("{text:?}")), "{error}"),
    }
}
