use super::*;
use crate::base::{BlockSize, DataDir};

fn volume(name: &str) -> VolumeRecord {
    VolumeRecord {
        version: VolumeRecord::VERSION,
        id: VolumeId::random().expect("id"),
        name: name.to_owned(),
        capacity: 1 << 20,
        block_size: BlockSize::MIN,
        access: vec![AccessKind::Block, AccessKind::Filesystem("ext4".into())],
        source: Some(Source::Snapshot(SnapshotId::random().expect("id"))),
        tracking: true,
        created: Timestamp::now(),
    }
}

fn snapshot(name: &str, of: &VolumeId, sequence: u64) -> SnapshotRecord {
    SnapshotRecord {
        version: SnapshotRecord::VERSION,
        id: SnapshotId::random().expect("id"),
        name: name.to_owned(),
        volume: of.clone(),
        sequence,
        capacity: 1 << 20,
        block_size: BlockSize::MIN,
        tracking: true,
        tuple_style: None,
        created: Timestamp::now(),
    }
}

fn open(dir: &Path) -> Store {
    let pool = DataDir::new(dir).pool();
    fs::create_dir_all(pool.path()).expect("mkdir");
    Store::open(pool).expect("open")
}

fn add(store: &Store, record: VolumeRecord) -> Arc<VolumeRecord> {
    let draft = store.draft_volume(&record.id).expect("draft");
    store.commit_volume(draft, record).expect("commit")
}

#[test]
fn what_is_committed_is_there_after_a_restart_and_a_dropped_draft_is_not() {
    let dir = tempfile::tempdir().expect("temp dir");
    let store = open(dir.path());
    let kept = add(&store, volume("kept"));
    let taken = snapshot("taken", &kept.id, 1);
    let draft = store.draft_snapshot(&taken.id).expect("draft");
    store.commit_snapshot(draft, taken.clone()).expect("commit");
    let dropped = volume("dropped");
    drop(store.draft_volume(&dropped.id).expect("draft"));
    assert_eq!(entries(&store.dir.staging()).expect("list").len(), 0, "a dropped draft leaves nothing");

    let again = open(dir.path());
    assert_eq!(again.read(|index| index.volume(&kept.id)).as_deref(), Some(&*kept));
    assert_eq!(again.read(|index| index.snapshot_named("taken")).as_deref(), Some(&taken));
    assert_eq!(again.read(|index| index.volume_named("dropped")), None);
}

#[test]
fn a_crash_before_the_rename_leaves_nothing_after_the_next_start() {
    let dir = tempfile::tempdir().expect("temp dir");
    let store = open(dir.path());
    let record = volume("torn");
    std::mem::forget(store.draft_volume(&record.id).expect("draft"));
    assert_eq!(entries(&store.dir.staging()).expect("list").len(), 1);
    let again = open(dir.path());
    assert_eq!(entries(&again.dir.staging()).expect("list").len(), 0);
    assert_eq!(again.read(|index| index.volume(&record.id)), None);
}

#[test]
fn a_record_cut_short_is_named_and_stops_nobody_else() {
    let dir = tempfile::tempdir().expect("temp dir");
    let store = open(dir.path());
    let (sound, torn) = (add(&store, volume("sound")), add(&store, volume("torn")));
    let path = store.dir.volume(&torn.id).record();
    let bytes = fs::read(&path).expect("read");
    for length in [0, 1, bytes.len() / 2, bytes.len() - 2] {
        fs::write(&path, &bytes[..length]).expect("write");
        let again = open(dir.path());
        assert_eq!(again.read(|index| index.volume(&sound.id)).as_deref(), Some(&*sound));
        assert_eq!(again.read(|index| index.volume(&torn.id)), None);
        assert!(again.damaged()[0].path.ends_with(torn.id.as_str()), "cut at {length}");
        assert!(store.dir.volume(&torn.id).path().exists(), "a damaged object is left alone");
    }
}

#[test]
fn a_record_of_another_version_or_place_is_refused() {
    let dir = tempfile::tempdir().expect("temp dir");
    let store = open(dir.path());
    let record = add(&store, volume("later"));
    let path = store.dir.volume(&record.id).record();
    let text = fs::read_to_string(&path).expect("read");
    fs::write(&path, text.replace("\"version\": 1", "\"version\": 2")).expect("write");
    assert!(matches!(open(dir.path()).damaged()[0].error, Error::UnknownVersion { version: 2, .. }));
    fs::write(&path, text.replace(record.id.as_str(), VolumeId::random().expect("id").as_str()))
        .expect("write");
    assert!(matches!(open(dir.path()).damaged()[0].error, Error::Misplaced { .. }));
}

#[test]
fn removed_is_gone_by_every_key() {
    let dir = tempfile::tempdir().expect("temp dir");
    let store = open(dir.path());
    let record = add(&store, volume("gone"));
    let first = snapshot("first", &record.id, 1);
    let second = snapshot("second", &record.id, 2);
    for taken in [&first, &second] {
        let draft = store.draft_snapshot(&taken.id).expect("draft");
        store.commit_snapshot(draft, taken.clone()).expect("commit");
    }
    drop(store.remove_volume(&record.id).expect("remove"));
    drop(store.remove_snapshot(&first.id).expect("remove"));
    for store in [&store, &open(dir.path())] {
        assert_eq!(store.read(|index| index.volume_named("gone")), None);
        assert_eq!(store.read(|index| index.snapshot_named("first")), None);
        let chain: Vec<u64> = store.read(|index| index.chain(&record.id).map(|s| s.sequence).collect());
        assert_eq!(chain, [2], "a snapshot outlives its volume");
        assert_eq!(entries(&store.dir.staging()).expect("list").len(), 0);
    }
}

#[test]
fn pages_go_on_behind_an_id_that_is_gone() {
    let dir = tempfile::tempdir().expect("temp dir");
    let store = open(dir.path());
    let mut ids: Vec<VolumeId> = (0..5).map(|n| add(&store, volume(&n.to_string())).id.clone()).collect();
    ids.sort();
    drop(store.remove_volume(&ids[1]).expect("remove"));
    let rest: Vec<VolumeId> =
        store.read(|index| index.volumes_after(Some(&ids[1])).map(|record| record.id.clone()).collect());
    assert_eq!(rest, ids[2..]);
}

#[test]
fn node_state_is_kept_while_there_is_something_to_remember() {
    let dir = tempfile::tempdir().expect("temp dir");
    let store = open(dir.path());
    let record = add(&store, volume("staged"));
    assert!(store.node_state(&record.id).expect("read").is_idle());
    let state = NodeState {
        staged: Some(Staged { path: "/staging".into(), access: AccessKind::Block, read_only: false }),
        ..NodeState::default()
    };
    store.set_node_state(&record.id, &state).expect("write");
    assert_eq!(open(dir.path()).node_state(&record.id).expect("read"), state);
    store.set_node_state(&record.id, &NodeState::default()).expect("write");
    assert!(!store.dir.volume(&record.id).node().exists());
}
