//! SIGKILL at any moment of the calls that change something.
//!
//! The incident: a driver is killed in the middle of a restore; kubelet's retry finds a volume of
//! that name, answers `OK`, and the workload runs on half its data (known failure 16). So after each
//! kill here: start again, look at every object (whole or absent), retry the call, look again, and
//! find no file, device or mount that nothing explains.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use deltapath::client::{Client, block_capability, from_snapshot, from_volume, new_volume};
use deltapath::csi::proto::{ListSnapshotsRequest, ListVolumesRequest};
use deltapath::sys::sweep::devices_below;

use crate::support::content::{Content, blocks_of};
use crate::support::{BLOCK, MIB, PoolKind, Rig, have_root, names};

const SIZE: i64 = 32 * MIB;
const BLOCKS: u64 = SIZE as u64 / BLOCK;

/// A call that is killed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Call {
    CreateVolume,
    Restore,
    Clone,
    CreateSnapshot,
    DeleteSnapshot,
    DeleteVolume,
    CreateGroup,
    DeleteGroup,
    Expand,
}

const CALLS: [Call; 9] = [
    Call::CreateVolume,
    Call::Restore,
    Call::Clone,
    Call::CreateSnapshot,
    Call::DeleteSnapshot,
    Call::DeleteVolume,
    Call::CreateGroup,
    Call::DeleteGroup,
    Call::Expand,
];

/// What the rounds work on.
struct Scene {
    origin: String,
    /// A second volume with the content of the first, for groups.
    other: String,
    content: Content,
    snapshot: String,
}

impl Scene {
    fn both(&self) -> [String; 2] {
        [self.origin.clone(), self.other.clone()]
    }
}

/// The members of a group, from the list of all snapshots.
async fn members(client: &mut Client, group: &str) -> Vec<String> {
    let list = client.controller.list_snapshots(ListSnapshotsRequest::default()).await.expect("list");
    let snapshots = list.into_inner().entries.into_iter().filter_map(|entry| entry.snapshot);
    snapshots.filter(|found| found.group_snapshot_id == group).map(|found| found.snapshot_id).collect()
}

impl Call {
    /// Makes the call; `Some(id)` of what it made.
    async fn make(self, client: &mut Client, scene: &Scene, victim: &str, round: usize) -> Option<String> {
        let name = format!("round {round}");
        let volume = |source| {
            let mut request = new_volume(&name, SIZE, block_capability());
            request.volume_content_source = source;
            request
        };
        let source = match self {
            Call::Restore => Some(from_snapshot(&scene.snapshot)),
            Call::Clone => Some(from_volume(&scene.origin)),
            _ => None,
        };
        match self {
            Call::CreateVolume | Call::Restore | Call::Clone => {
                client.create_volume(volume(source)).await.ok().map(|volume| volume.volume_id)
            }
            Call::CreateSnapshot => {
                client.create_snapshot(&name, &scene.origin).await.ok().map(|snapshot| snapshot.snapshot_id)
            }
            Call::DeleteSnapshot => client.delete_snapshot(victim).await.ok().map(|()| String::new()),
            Call::DeleteVolume => client.delete_volume(victim).await.ok().map(|()| String::new()),
            Call::CreateGroup => {
                client.create_group(&name, &scene.both()).await.ok().map(|group| group.group_snapshot_id)
            }
            Call::DeleteGroup => {
                let ids = members(client, victim).await;
                client.delete_group(victim, &ids).await.ok().map(|()| String::new())
            }
            Call::Expand => {
                let expanded = client.expand_volume(victim, 2 * SIZE).await.ok()?;
                assert_eq!(expanded.capacity_bytes, 2 * SIZE);
                Some(victim.to_owned())
            }
        }
    }

    /// What the call is to work on, made beforehand.
    async fn prepare(self, rig: &mut Rig, scene: &Scene, round: usize) -> String {
        let name = format!("victim {round}");
        match self {
            Call::DeleteSnapshot => rig.snapshot(&name, &scene.origin).await,
            Call::DeleteGroup => {
                rig.client.create_group(&name, &scene.both()).await.expect("group").group_snapshot_id
            }
            Call::DeleteVolume | Call::Expand => {
                let mut request = new_volume(&name, SIZE, block_capability());
                request.volume_content_source = Some(from_snapshot(&scene.snapshot));
                rig.client.create_volume(request).await.expect("create").volume_id
            }
            _ => String::new(),
        }
    }
}

/// Volumes with their sizes, and snapshots with their groups.
async fn listed(rig: &mut Rig) -> (BTreeMap<String, u64>, BTreeMap<String, String>) {
    let controller = &mut rig.client.controller;
    let volumes = controller.list_volumes(ListVolumesRequest::default()).await.expect("list").into_inner();
    let snapshots =
        controller.list_snapshots(ListSnapshotsRequest::default()).await.expect("list").into_inner();
    (
        volumes
            .entries
            .into_iter()
            .map(|entry| entry.volume.expect("volume"))
            .map(|volume| (volume.volume_id, volume.capacity_bytes as u64))
            .collect(),
        snapshots
            .entries
            .into_iter()
            .map(|entry| entry.snapshot.expect("snapshot"))
            .map(|snapshot| (snapshot.snapshot_id, snapshot.group_snapshot_id))
            .collect(),
    )
}

/// Everything on disk is an object that is listed, and every listed object is whole.
async fn audit(rig: &mut Rig, scene: &Scene, context: &str) {
    let (volumes, snapshots) = listed(rig).await;
    let pool = rig.pool_dir();
    // What was deleted may be settled behind.
    let deadline = Instant::now() + Duration::from_secs(20);
    while !names(&pool.join("staging")).is_empty() {
        assert!(Instant::now() < deadline, "{context}: staging holds {:?}", names(&pool.join("staging")));
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    assert_eq!(names(&pool.join("volumes")), volumes.keys().cloned().collect::<Vec<_>>(), "{context}");
    let alone = snapshots.iter().filter(|(_, group)| group.is_empty()).map(|(id, _)| id.clone());
    assert_eq!(names(&pool.join("snapshots")), alone.collect::<Vec<_>>(), "{context}");
    let groups: BTreeSet<&String> = snapshots.values().filter(|group| !group.is_empty()).collect();
    assert_eq!(names(&pool.join("groups")).iter().collect::<BTreeSet<_>>(), groups, "{context}");
    for group in groups {
        let members: Vec<&String> =
            snapshots.iter().filter(|(_, of)| *of == group).map(|(id, _)| id).collect();
        assert_eq!(members.len(), 2, "{context}: half a group");
        assert!(names(&pool.join("groups").join(group).join("members")).iter().eq(members), "{context}");
    }
    assert_eq!(devices_below(&pool).expect("devices").len(), 0, "{context}: a device is left");
    for (snapshot, group) in &snapshots {
        let dir = match group.is_empty() {
            true => pool.join("snapshots").join(snapshot),
            false => pool.join("groups").join(group).join("members").join(snapshot),
        };
        scene.content.assert_equals(&dir.join("bytes/data.img"), 0, BLOCKS);
        let list = rig.client.allocated(snapshot, 0, 0).await.expect("allocated");
        assert_eq!(blocks_of(&list, BLOCK), scene.content.allocated(BLOCK), "{context}");
        match rig.client.delta(&scene.snapshot, snapshot, 0, 0).await {
            Ok(delta) => assert_eq!(delta.tuples().count(), 0, "{context}: nothing was written between them"),
            Err(error) => {
                assert!(!group.is_empty(), "{context}: {error}");
                assert_eq!(error.code(), tonic::Code::InvalidArgument, "{context}: the other volume's");
            }
        }
    }
    for (volume, capacity) in &volumes {
        let image = pool.join("volumes").join(volume).join("bytes/data.img");
        let meta = std::fs::metadata(&image).unwrap_or_else(|error| panic!("{context}: {volume}: {error}"));
        assert!(
            *capacity == SIZE as u64 || *capacity == 2 * SIZE as u64,
            "{context}: {volume} has {capacity}"
        );
        assert!(meta.len() >= *capacity, "{context}: {volume} is cut short");
    }
}

async fn rounds(pool: PoolKind, count: usize) {
    let mut rig = Rig::start(pool).await;
    let (origin, device) = rig.block_volume("origin", SIZE).await;
    let mut content = Content::default();
    content.write(&device, 0, 3000, 1);
    content.write(&device, 5000, 3000, 2);
    content.discard(&device, 5100, 100);
    rig.detach(&origin).await;
    let snapshot = rig.snapshot("first", &origin).await;
    let mut request = new_volume("other", SIZE, block_capability());
    request.volume_content_source = Some(from_volume(&origin));
    let other = rig.client.create_volume(request).await.expect("clone").volume_id;
    let scene = Scene { origin, other, content, snapshot };
    let mut cut = 0;
    let mut random = 88172645463325252u64;
    let mut usual = [Duration::from_millis(20); CALLS.len()];
    for round in 0..count {
        let which = round % CALLS.len();
        let call = CALLS[which];
        let context = format!("{pool:?}, round {round}, {call:?}");
        let victim = call.prepare(&mut rig, &scene, round).await;
        let mut client = rig.client.clone();
        let started = Instant::now();
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        // Somewhere between the call's begin and a little after its usual end.
        let moment = usual[which].mul_f64((random % 1000) as f64 / 800.0);
        let finished = tokio::select! {
            made = call.make(&mut client, &scene, &victim, round) => {
                usual[which] = (usual[which] + started.elapsed()) / 2;
                made.is_some()
            }
            () = tokio::time::sleep(moment) => false,
        };
        rig.kill();
        cut += usize::from(!finished);
        rig.start_again().await;
        audit(&mut rig, &scene, &context).await;

        let mut client = rig.client.clone();
        let made = call.make(&mut client, &scene, &victim, round).await;
        let made = made.unwrap_or_else(|| panic!("{context}: the retry fails\n{}", rig.log()));
        if matches!(call, Call::Restore | Call::Clone) {
            let image = rig.pool_dir().join("volumes").join(&made).join("bytes/data.img");
            scene.content.assert_equals(&image, 0, BLOCKS);
        }
        audit(&mut rig, &scene, &context).await;
        match call {
            Call::CreateVolume | Call::Restore | Call::Clone => {
                rig.client.delete_volume(&made).await.expect("delete");
            }
            Call::Expand => {
                let image = rig.pool_dir().join("volumes").join(&made).join("bytes/data.img");
                assert_eq!(std::fs::metadata(image).expect("stat").len(), 2 * SIZE as u64, "{context}");
                rig.client.delete_volume(&made).await.expect("delete");
            }
            Call::CreateGroup => {
                let ids = members(&mut rig.client, &made).await;
                rig.client.delete_group(&made, &ids).await.expect("delete");
            }
            Call::CreateSnapshot => rig.client.delete_snapshot(&made).await.expect("delete"),
            Call::DeleteSnapshot | Call::DeleteVolume | Call::DeleteGroup => {}
        }
    }
    assert!(cut > count / 4, "only {cut} of {count} calls were cut by the kill");
    let (volumes, snapshots) = listed(&mut rig).await;
    assert_eq!((volumes.len(), snapshots.len()), (2, 1));
    rig.finish();
}

/// Rounds a pool; `DELTAPATH_CRASH_ROUNDS` asks for more.
fn count() -> usize {
    std::env::var("DELTAPATH_CRASH_ROUNDS").ok().and_then(|rounds| rounds.parse().ok()).unwrap_or(90)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_kill_leaves_every_object_whole_or_absent_on_dir() {
    if have_root() {
        rounds(PoolKind::Dir, count()).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_kill_leaves_every_object_whole_or_absent_on_xfs() {
    if have_root() {
        rounds(PoolKind::Xfs, count()).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_kill_leaves_every_object_whole_or_absent_on_btrfs() {
    if have_root() {
        rounds(PoolKind::Btrfs, count()).await;
    }
}
