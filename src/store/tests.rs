use super::*;
use base::{BlockSize, DataDir, GroupId};

fn volume(name: &str) -> VolumeRecord {
    VolumeRecord {
        version: VolumeRecord::VERSION,
        id: VolumeId::random(base::DataDirKey::random().expect("key")).expect("id"),
        name: name.to_owned(),
        capacity: 1 << 20,
        block_size: BlockSize::MIN,
        access: vec![AccessKind::Block, AccessKind::Filesystem("ext4".into())],
        source: Some(Source::Snapshot(
            SnapshotId::random(base::DataDirKey::random().expect("key")).expect("id"),
        )),
        tracking: true,
        tuning: Tuning::default(),
        attached: None,
        ephemeral: None,
        created: Timestamp::now(),
    }
}

fn snapshot(name: &str, of: &VolumeId, sequence: u64) -> SnapshotRecord {
    SnapshotRecord {
        version: SnapshotRecord::VERSION,
        id: SnapshotId::random(base::DataDirKey::random().expect("key")).expect("id"),
        name: name.to_owned(),
        group: None,
        volume: of.clone(),
        sequence,
        capacity: 1 << 20,
        block_size: BlockSize::MIN,
        tracking: true,
        tuple_style: None,
        created: Timestamp::now(),
        birth: None,
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
    fs::write(&path, text.replace("\"version\": 3", "\"version\": 4")).expect("write");
    assert!(matches!(open(dir.path()).damaged()[0].error, Error::UnknownVersion { version: 4, .. }));
    fs::write(
        &path,
        text.replace(
            record.id.as_str(),
            VolumeId::random(base::DataDirKey::random().expect("key")).expect("id").as_str(),
        ),
    )
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

fn group(name: &str, members: &[&SnapshotRecord]) -> GroupRecord {
    GroupRecord {
        version: GroupRecord::VERSION,
        id: GroupId::random(base::DataDirKey::random().expect("key")).expect("id"),
        name: name.to_owned(),
        members: members.iter().map(|member| member.id.clone()).collect(),
        tuple_style: None,
        created: Timestamp::now(),
    }
}

/// A group of a snapshot of each of two volumes, in its draft.
fn draft_group(store: &Store) -> (GroupDraft, GroupRecord, Vec<SnapshotRecord>) {
    let volumes = [add(store, volume("one")), add(store, volume("two"))];
    let mut members = volumes.map(|volume| snapshot("", &volume.id, 1));
    let record = group("together", &[&members[0], &members[1]]);
    let draft = store.draft_group(&record.id).expect("draft");
    for member in &mut members {
        member.group = Some(record.id.clone());
        draft.member(&member.id).expect("member");
    }
    (draft, record, members.into())
}

#[test]
fn a_group_is_there_with_all_its_members_or_not_at_all() {
    let dir = tempfile::tempdir().expect("temp dir");
    let store = open(dir.path());
    let (draft, record, members) = draft_group(&store);
    std::mem::forget(draft);
    let again = open(dir.path());
    assert_eq!(again.read(|index| (index.group_count(), index.snapshot_count())), (0, 0));
    assert_eq!(entries(&again.dir.staging()).expect("list").len(), 0, "a cut group leaves nothing");

    let draft = again.draft_group(&record.id).expect("draft");
    for member in &members {
        draft.member(&member.id).expect("member");
    }
    again.commit_group(draft, record.clone(), members.clone()).expect("commit");
    for store in [&again, &open(dir.path())] {
        assert_eq!(store.read(|index| index.group_named("together")).as_deref(), Some(&record));
        for member in &members {
            assert_eq!(store.read(|index| index.snapshot(&member.id)).as_deref(), Some(member));
            assert!(store.snapshot_dir(member).record().exists());
        }
    }
    drop(again.remove_group(&record.id).expect("remove"));
    for store in [&again, &open(dir.path())] {
        assert_eq!(store.read(|index| (index.group_count(), index.snapshot_count())), (0, 0));
        assert_eq!(entries(&store.dir.groups()).expect("list").len(), 0);
        assert_eq!(entries(&store.dir.staging()).expect("list").len(), 0);
    }
}

#[test]
fn a_group_that_is_not_whole_is_named_with_its_members() {
    let dir = tempfile::tempdir().expect("temp dir");
    let store = open(dir.path());
    let (draft, record, members) = draft_group(&store);
    store.commit_group(draft, record.clone(), members.clone()).expect("commit");
    let file = store.snapshot_dir(&members[1]).record();
    fs::write(&file, "{").expect("write");
    let again = open(dir.path());
    assert_eq!(again.read(|index| (index.group_count(), index.snapshot_count())), (0, 0));
    let ids = [record.id.as_str(), members[0].id.as_str(), members[1].id.as_str()];
    for id in ids {
        assert!(matches!(again.check_readable(id), Err(Error::Withheld { .. })), "{id}");
    }
    assert!(file.exists(), "a damaged object is left alone");
}

#[test]
fn a_replaced_record_is_the_one_that_is_read() {
    let dir = tempfile::tempdir().expect("temp dir");
    let store = open(dir.path());
    let record = add(&store, volume("growing"));
    let larger = VolumeRecord { capacity: 2 << 20, ..(*record).clone() };
    store.update_volume(larger.clone()).expect("update");
    for store in [&store, &open(dir.path())] {
        assert_eq!(store.read(|index| index.volume_named("growing")).as_deref(), Some(&larger));
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
fn the_state_of_a_volume_is_read_back() {
    let dir = tempfile::tempdir().expect("temp dir");
    let store = open(dir.path());
    let record = add(&store, volume("staged"));
    assert!(store.volume_state(&record.id).expect("read").is_idle());
    let state = VolumeState {
        staged: Some(Staged { path: "/staging".into(), access: AccessKind::Block, read_only: false }),
        ..VolumeState::default()
    };
    store.set_volume_state(&record.id, &state).expect("write");
    assert_eq!(open(dir.path()).volume_state(&record.id).expect("read"), state);
    store.set_volume_state(&record.id, &VolumeState::default()).expect("write");
    assert!(open(dir.path()).volume_state(&record.id).expect("read").is_idle());
}

#[test]
fn an_impossible_sequence_number_takes_no_place_and_leaves_room_for_the_next() {
    let dir = tempfile::tempdir().expect("temp dir");
    let of = volume("volume").id;
    let store = open(dir.path());
    for (name, sequence) in [("good", 7), ("last", u64::MAX), ("too far", u64::MAX - 1)] {
        let record = snapshot(name, &of, sequence);
        let draft = store.draft_snapshot(&record.id).expect("draft");
        store.commit_snapshot(draft, record).expect("commit");
    }
    let store = open(dir.path());
    assert_eq!(store.damaged().len(), 2);
    // One more for each whose place is not known.
    assert_eq!(store.read(|index| index.next_sequence(&of)), 10);
}

#[test]
fn a_transfer_outlives_a_restart_while_its_record_and_bytes_are_there() {
    let dir = tempfile::tempdir().expect("temp dir");
    let mut store = open(dir.path());
    let begin = |store: &Store, name: &str| {
        let record = volume(name);
        let draft = store.draft_volume(&record.id).expect("draft");
        fs::create_dir(draft.dir().bytes()).expect("mkdir");
        fs::File::create(draft.dir().data()).expect("create").set_len(record.capacity).expect("set_len");
        store.begin_transfer(&draft, &record).expect("begin");
        draft.keep();
        record
    };
    let (kept, cut, unwanted) = (begin(&store, "kept"), begin(&store, "cut"), begin(&store, "unwanted"));
    let broken = begin(&store, "broken");
    let files_of = |record: &VolumeRecord| ObjectDir::new(store.dir.staging().join(record.id.as_str()));
    fs::remove_file(files_of(&cut).data()).expect("remove");
    fs::write(files_of(&broken).transfer(), b"{").expect("write");
    store.end_transfer(&store.transfer_draft(&unwanted.id)).expect("end");
    for _ in 0..2 {
        store = open(dir.path());
        assert_eq!(store.transfers().expect("list"), std::slice::from_ref(&kept));
        assert_eq!(entries(&store.dir.staging()).expect("list").len(), 1);
        assert_eq!(store.read(|index| index.volume(&kept.id)), None, "it is no volume yet");
    }
    // Cut in the middle of the commit.
    slots::create(&ObjectDir::new(store.dir.staging().join(kept.id.as_str())).state()).expect("create");
    store.commit_transfer(store.transfer_draft(&kept.id), kept.clone()).expect("commit");
    let again = open(dir.path());
    assert_eq!(again.read(|index| index.volume(&kept.id)).as_deref(), Some(&kept));
    assert_eq!(again.transfers().expect("list"), []);
    let there = again.dir.volume(&kept.id);
    assert!(there.record().exists() && !there.transfer().exists());
}
