//! Fuzz targets of this layer: text in requests and flags.

use std::collections::HashMap;

use crate::driver::config::Retention;
use crate::driver::error::{Error, Result};
use crate::driver::request::page::PageRequest;
use crate::driver::request::params::{
    EphemeralParameters, SnapshotParameters, VolumeParameters, parse_tuning,
};
use base::{BlockSize, SnapshotId, VolumeId, age};

/// An age that parses is formatted as text that parses to the same age; a retention too.
pub(crate) fn ages(bytes: &[u8]) {
    let Ok(text) = std::str::from_utf8(bytes) else { return };
    if let Some(length) = age::parse(text) {
        assert_eq!(age::parse(&age::format(length)), Some(length), "{text:?}");
        assert!(text.is_ascii() && text.as_bytes()[0].is_ascii_digit(), "{text:?} is no length of time");
    }
    if let Ok(retention) = text.parse::<Retention>() {
        assert_eq!(retention.to_string().parse(), Ok(retention), "{text:?}");
    }
}

/// The input is four bytes of `max_entries`, then a token. Only an id is a valid token, and no page is larger than
/// a message.
pub(crate) fn tokens(bytes: &[u8]) {
    let (number, token) = bytes.split_at(bytes.len().min(4));
    let mut max_entries = [0; 4];
    max_entries[..number.len()].copy_from_slice(number);
    let starting_token = String::from_utf8_lossy(token).into_owned();
    let request = PageRequest { max_entries: i32::from_le_bytes(max_entries), starting_token };
    match request.limit() {
        Ok(limit) => {
            assert!(request.max_entries >= 0 && (1..=crate::driver::request::page::MAX_PAGE).contains(&limit))
        }
        Err(_) => assert!(request.max_entries < 0),
    }
    let text = &request.starting_token;
    let (volume, snapshot) = (request.after::<VolumeId>(), request.after::<SnapshotId>());
    for (place, id) in [
        (volume.map(|id| id.map(String::from)), text.parse::<VolumeId>().map(String::from).ok()),
        (snapshot.map(|id| id.map(String::from)), text.parse::<SnapshotId>().map(String::from).ok()),
    ] {
        match place {
            Ok(None) => assert!(text.is_empty()),
            Ok(Some(place)) => assert_eq!((Some(&place), &place), (id.as_ref(), text)),
            Err(error) => {
                assert!(id.is_none() && !text.is_empty(), "{text:?} is a token");
                check_message(&error);
            }
        }
    }
}

/// The input is lines of `name=value`, the parameters of a call. Accepted values are in range, and a refused one
/// gets an error of readable length.
pub(crate) fn parameters(bytes: &[u8]) {
    let text = String::from_utf8_lossy(bytes);
    let pairs = text.lines().filter_map(|line| line.split_once('='));
    let pairs: HashMap<String, String> =
        pairs.map(|(name, value)| (name.to_owned(), value.to_owned())).collect();
    let ours = |name: &&String| !name.starts_with("csi.storage.k8s.io/");
    let knows = |names: &[&str]| {
        let unknown = pairs.keys().filter(ours).find(|name| !names.contains(&name.as_str()));
        assert_eq!(unknown, None, "an unknown parameter is accepted");
    };
    if let Some(parsed) = accepted(VolumeParameters::parse(&pairs)) {
        knows(&["blockSize", "changedBlockTracking"]);
        let size = parsed.block_size.map(BlockSize::bytes);
        assert!(size.is_none_or(|size| size.is_power_of_two() && (4096..=4 << 20).contains(&size)));
        assert_eq!(parsed.block_size.is_some(), pairs.contains_key("blockSize"));
        assert!(parsed.fs_type.is_none_or(|name| ["ext4", "xfs", "btrfs"].contains(&name.as_str())));
    }
    if let Some(parsed) = accepted(SnapshotParameters::parse(&pairs)) {
        knows(&["blockMetadataType", "deletionPolicy"]);
        assert_eq!(parsed.tuple_style.is_some(), pairs.contains_key("blockMetadataType"));
    }
    if let Some(parsed) = accepted(parse_tuning(&pairs)) {
        knows(&["readAheadKiB", "directIO"]);
        assert!(parsed.read_ahead_kib.is_none_or(|kib| kib <= 1 << 20 && kib.is_multiple_of(4)));
        assert_eq!(parsed.direct_io.is_some(), pairs.contains_key("directIO"));
    }
    if let Some(Some(parsed)) = accepted(EphemeralParameters::parse(&pairs)) {
        knows(&["size"]);
        assert_eq!(parsed.size.is_some(), pairs.contains_key("size"));
    }
}

fn accepted<T>(parsed: Result<T>) -> Option<T> {
    parsed.map_err(|error| check_message(&error)).ok()
}

/// An error fits a log line, however long the client's input is.
fn check_message(error: &Error) {
    let message = error.to_string();
    assert!(message.len() < 4096, "a message of {} bytes", message.len());
}
