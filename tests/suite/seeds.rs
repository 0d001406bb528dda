//! The fuzz corpora start from files that the driver wrote.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use serde_json::Value;

use deltapath::sys::slots;

use testkit::prelude::*;

/// Files of a driver with every kind of object, by corpus and name of the seed.
async fn written() -> BTreeMap<(&'static str, &'static str), Vec<u8>> {
    let mut rig = Rig::start_with(PoolKind::Btrfs, &["--enable-attach"], "info").await;
    let (volume, device) = rig.block_volume("seed", 8 * MIB).await;
    let attach = requests::attach(&volume, "node-1");
    rig.client.controller.controller_publish_volume(attach).await.expect("attach");
    let mut content = Content::default();
    content.write(&device, 3, 40, 1);
    let first = rig.snapshot("first", &volume).await;
    content.write(&device, 20, 10, 2);
    let second = rig.snapshot("second", &volume).await;
    let group = rig.client.create_group("group", std::slice::from_ref(&volume)).await.expect("group");
    rig.client.delete_snapshot(&first).await.expect("delete");
    let pool = rig.pool_dir();
    let (volume_dir, snapshot_dir) =
        (pool.join("volumes").join(&volume), pool.join("snapshots").join(&second));
    let read =
        |path: PathBuf| std::fs::read(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    let found = BTreeMap::from([
        (("records", "seed-manifest"), read(rig.data_dir().join("deltapath.json"))),
        (("records", "seed-volume"), read(volume_dir.join("record.json"))),
        (
            ("records", "seed-state"),
            slots::read(&volume_dir.join("state.json")).expect("read").expect("in use"),
        ),
        (("records", "seed-snapshot"), read(snapshot_dir.join("record.json"))),
        (
            ("records", "seed-group"),
            read(pool.join("groups").join(&group.group_snapshot_id).join("record.json")),
        ),
        (("records", "seed-deleted"), read(pool.join("snapshots").join(&first).join("deleted.json"))),
        (("maps", "seed-allocated"), read(snapshot_dir.join("allocated.map"))),
        (("maps", "seed-changed"), read(snapshot_dir.join("changed.map"))),
        (("maps", "seed-pending"), read(snapshot_dir.join("pending.map"))),
        (("hashes", "seed-hashes"), read(snapshot_dir.join("hashes"))),
    ]);
    rig.detach_and_finish(&volume).await;
    found
}

/// A record without its values. Fields that are not set are left out.
fn shape(value: &Value) -> Value {
    match value {
        Value::Object(fields) => fields
            .iter()
            .filter(|(_, value)| !value.is_null())
            .map(|(name, value)| (name.clone(), shape(value)))
            .collect(),
        Value::Array(list) => list.first().map(shape).into_iter().collect(),
        Value::Bool(_) | Value::Null => Value::Null,
        Value::Number(_) => 0.into(),
        Value::String(_) => "".into(),
    }
}

/// What all files of a format have in common: the fields of a record; the magic number, version and block size at the end of
/// a map; whole pages of hashes.
fn format(corpus: &str, bytes: &[u8]) -> String {
    const TRAILER: usize = 108;
    match corpus {
        "records" => shape(&serde_json::from_slice(bytes).expect("JSON")).to_string(),
        "maps" => bytes[bytes.len() - TRAILER..][..16].escape_ascii().to_string(),
        _ => (bytes.len() % 4096).to_string(),
    }
}

/// Seeds of an older format would be poor starting points. `make seeds` writes new ones.
#[apply(device_test)]
async fn the_seeds_of_the_corpora_are_as_the_driver_writes_them() {
    let home = Path::new(env!("CARGO_MANIFEST_DIR")).join("fuzz/corpus");
    for ((corpus, name), bytes) in written().await {
        let path = home.join(corpus).join(name);
        if std::env::var_os("DELTAPATH_SEEDS").is_some() {
            std::fs::create_dir_all(home.join(corpus)).expect("mkdir");
            std::fs::write(&path, &bytes).expect("write");
        }
        let seed = std::fs::read(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
        assert_eq!(
            format(corpus, &seed),
            format(corpus, &bytes),
            "{} is of another format: run make seeds",
            path.display()
        );
    }
}
