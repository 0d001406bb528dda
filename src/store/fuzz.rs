//! The fuzz target of this layer: damaged records.

use std::fmt::Debug;
use std::path::Path;

use serde::Serialize;
use serde::de::DeserializeOwned;

use super::records::Checked;
use super::{
    Deleted, GroupRecord, Index, Manifest, SnapshotRecord, VolumeRecord, VolumeState, decode, encode,
};

/// A record that can be read can be written and read again, and no number in it makes arithmetic overflow.
pub(crate) fn records(bytes: &[u8]) {
    let mut index = Index::default();
    if let Some(volume) = read::<VolumeRecord>(bytes) {
        assert_eq!(volume.block_size.round_up(volume.capacity), Some(volume.capacity));
        assert!(volume.fs_type().is_some() || !volume.access.is_empty());
        let _ = volume.created.age();
        index.add_volume(volume.into());
    }
    if let Some(snapshot) = read::<SnapshotRecord>(bytes) {
        assert_eq!(snapshot.block_size.round_up(snapshot.capacity), Some(snapshot.capacity));
        assert!(snapshot.sequence.checked_add(1).is_some(), "there is no place for the next one");
        let _ = snapshot.created.age();
        let snapshot = std::sync::Arc::new(snapshot);
        index.add_snapshot(snapshot.clone());
        assert!(index.has_sequence(&snapshot));
        index.retain(&snapshot.id, snapshot.created);
        assert!(index.snapshot(&snapshot.id).is_none() && index.known(&snapshot.id).is_some());
    }
    if let Some(group) = read::<GroupRecord>(bytes) {
        index.add_group(group.into(), Vec::new());
    }
    if let Some(state) = read::<VolumeState>(bytes) {
        for path in state.published.iter().map(|published| &published.target) {
            assert!(path.is_absolute(), "{} depends on where the driver was started", path.display());
            assert_eq!(state.place(path), state.staged.as_ref());
        }
    }
    if let Some(deleted) = read::<Deleted>(bytes) {
        let _ = deleted.at.age();
    }
    read::<Manifest>(bytes);
}

fn read<R: Checked + DeserializeOwned + Serialize + Debug + PartialEq>(bytes: &[u8]) -> Option<R> {
    let path = Path::new("record.json");
    let record: R = decode(path, bytes).ok()?;
    let again: R = decode(path, &encode(&record)).expect("what was read can be written and read");
    assert_eq!(again, record);
    Some(record)
}
