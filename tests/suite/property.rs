//! Random actions on volumes against a model: writes, zeros, discards, snapshots alone and in groups, restores, clones,
//! expansions, deletions and restarts, on all pools, in both styles, and at any stage of hashing. Every delta, also from a
//! deleted base, and every allocated list must be exact, block by block, from any offset. Nothing is missing, and nothing
//! is listed too much, except zeros in blocks that were copied whole from another node.
//!
//! The model in `model/` knows the possible answers of each call and compares whole devices, which are small. This model
//! knows only contents, and writes windows at the borders of a map's segments, in volumes of 40 GiB and more.

use std::collections::BTreeSet;

use proptest::prelude::*;
use proptest::test_runner::{Config, RngSeed, TestCaseError, TestRunner};
use tokio::runtime::Runtime;

use testkit::cluster::key_of;
use testkit::prelude::*;
use testkit::subject::Subject;

/// Large enough for three segments of a map at 4 KiB; only the windows are written.
const SIZE: i64 = 40 * GIB;
const WINDOW: u64 = 96;
/// The start, a segment's border, the end of the volume, and the part that an expansion adds.
const WINDOWS: [u64; 4] = [0, (1 << 22) - WINDOW / 2, SIZE as u64 / BLOCK - WINDOW, SIZE as u64 / BLOCK];
/// The size that expansions add: the last window, then enough for another segment of a map.
const GROWTH: [u64; 2] = [WINDOW * BLOCK, 20 << 30];

#[derive(Clone, Debug)]
enum Action {
    Write { volume: usize, at: Place, fill: u8 },
    Discard { volume: usize, at: Place },
    Snapshot { volume: usize },
    Group { volumes: (usize, usize) },
    Expand { volume: usize },
    DeleteSnapshot { pick: usize },
    Restore { pick: usize },
    Clone { volume: usize },
    DeleteVolume { volume: usize },
    Restart { kill: bool },
}

#[derive(Clone, Debug)]
struct Place {
    window: usize,
    start: u64,
    count: u64,
}

impl Place {
    fn start(&self) -> u64 {
        WINDOWS[self.window] + self.start
    }

    fn is_in(&self, volume: &Volume) -> bool {
        (self.start() + self.count) * BLOCK <= volume.size
    }
}

fn place() -> impl Strategy<Value = Place> {
    (0..WINDOWS.len(), 0..WINDOW, 1..24u64).prop_map(|(window, start, count)| Place {
        window,
        start,
        count: count.min(WINDOW - start),
    })
}

fn step() -> impl Strategy<Value = Action> {
    let volume = 0..4usize;
    prop_oneof![
        // Few fill bytes, so that blocks often change back; 0 writes zeros.
        10 => (volume.clone(), place(), 0..4u8).prop_map(|(volume, at, fill)| Action::Write { volume, at, fill }),
        4 => (volume.clone(), place()).prop_map(|(volume, at)| Action::Discard { volume, at }),
        8 => volume.clone().prop_map(|volume| Action::Snapshot { volume }),
        2 => (volume.clone(), volume.clone()).prop_map(|volumes| Action::Group { volumes }),
        2 => volume.clone().prop_map(|volume| Action::Expand { volume }),
        3 => (0..16usize).prop_map(|pick| Action::DeleteSnapshot { pick }),
        2 => (0..16usize).prop_map(|pick| Action::Restore { pick }),
        1 => volume.clone().prop_map(|volume| Action::Clone { volume }),
        1 => volume.prop_map(|volume| Action::DeleteVolume { volume }),
        1 => any::<bool>().prop_map(|kill| Action::Restart { kill }),
    ]
}

#[derive(Default)]
struct Volume {
    id: String,
    device: std::path::PathBuf,
    size: u64,
    content: Content,
    /// Blocks that were copied whole from another node. If the part with data is discarded later, zeros are left in the block,
    /// and it may be listed.
    copied: BTreeSet<u64>,
}

struct Snapshot {
    id: String,
    /// The id of its volume.
    volume: String,
    size: u64,
    /// Larger for later snapshots.
    number: usize,
    /// Its group, and all members of the group.
    group: Option<(String, Vec<String>)>,
    content: Content,
    copied: BTreeSet<u64>,
}

impl Snapshot {
    fn of(id: String, volume: &Volume, number: usize) -> Self {
        let (content, copied) = (volume.content.clone(), volume.copied.clone());
        Snapshot { id, volume: volume.id.clone(), size: volume.size, number, group: None, content, copied }
    }
}

/// The volumes and snapshots that the driver must have.
#[derive(Default)]
struct Model {
    volumes: Vec<Volume>,
    snapshots: Vec<Snapshot>,
    /// Deleted snapshots that are kept as a base for deltas.
    retained: Vec<Snapshot>,
    /// Deleted snapshots that are no longer kept.
    forgotten: Vec<String>,
    names: usize,
    block_size: u64,
    /// `--retain-deleted`: how many deleted snapshots of a volume are kept.
    kept: usize,
}

impl Model {
    /// The blocks copied from other nodes in a volume made from this one or from a snapshot of it.
    fn copied(&self, to: &str, from: &str, content: &Content, before: &BTreeSet<u64>) -> BTreeSet<u64> {
        let mut copied = before.clone();
        if key_of(to) != key_of(from) {
            copied.extend(content.allocated(self.block_size));
        }
        copied
    }

    fn name(&mut self, prefix: &str, case: usize) -> String {
        self.names += 1;
        format!("{prefix} {case}.{}", self.names)
    }

    /// Forgets the deleted snapshots that cannot be the base of a delta, and those beyond the count.
    fn settle(&mut self) {
        let is_later =
            |one: &Snapshot, than: &Snapshot| one.volume == than.volume && one.number > than.number;
        let mut bases = Vec::new();
        for base in std::mem::take(&mut self.retained) {
            let may_be_one = self.volumes.iter().any(|volume| volume.id == base.volume)
                || self.snapshots.iter().any(|target| is_later(target, &base));
            match may_be_one {
                true => bases.push(base),
                false => self.forgotten.push(base.id),
            }
        }
        let later = |base: &Snapshot| bases.iter().filter(|one| is_later(one, base)).count();
        let stays: Vec<bool> = bases.iter().map(|base| later(base) < self.kept).collect();
        for (base, stays) in bases.into_iter().zip(stays) {
            match stays {
                true => self.retained.push(base),
                false => self.forgotten.push(base.id),
            }
        }
    }
}

async fn create(rig: &mut Subject<'_>, model: &mut Model, case: usize, block_size: u64) {
    let mut request = new_volume(&model.name("volume", case), SIZE, block_capability());
    request.parameters.insert("blockSize".into(), block_size.to_string());
    model.block_size = block_size;
    let id = rig.client.create_volume(request).await.expect("create").volume_id;
    let device = rig.attach(&id).await;
    model.volumes.push(Volume { id, device, size: SIZE as u64, ..Volume::default() });
}

async fn apply(rig: &mut Subject<'_>, model: &mut Model, step: &Action, case: usize) {
    let count = model.volumes.len();
    match step {
        Action::Write { volume, at, fill } if count > 0 => {
            let volume = &mut model.volumes[volume % count];
            if at.is_in(volume) {
                volume.content.write(&volume.device, at.start(), at.count, *fill);
            }
        }
        Action::Discard { volume, at } if count > 0 => {
            let volume = &mut model.volumes[volume % count];
            if at.is_in(volume) {
                volume.content.discard(&volume.device, at.start(), at.count);
            }
        }
        Action::Snapshot { volume } if count > 0 => {
            let name = model.name("snapshot", case);
            let volume = &model.volumes[volume % count];
            let id = rig.snapshot(&name, &volume.id).await;
            model.snapshots.push(Snapshot::of(id, volume, model.names));
        }
        Action::Group { volumes: (one, two) } if count > 0 => {
            let name = model.name("group", case);
            let mut picked = vec![one % count, two % count];
            picked.dedup();
            let ids: Vec<String> = picked.iter().map(|volume| model.volumes[*volume].id.clone()).collect();
            if ids.iter().any(|id| key_of(id) != key_of(&ids[0])) {
                let refused = rig.client.create_group(&name, &ids).await;
                assert_eq!(code(refused), Code::FailedPrecondition, "on different nodes");
                return;
            }
            let group = rig.client.create_group(&name, &ids).await.expect("nobody writes meanwhile");
            let members = testkit::members(&group);
            for (member, volume) in group.snapshots.into_iter().zip(picked) {
                let mut snapshot = Snapshot::of(member.snapshot_id, &model.volumes[volume], model.names);
                assert_eq!(member.source_volume_id, snapshot.volume);
                snapshot.group = Some((group.group_snapshot_id.clone(), members.clone()));
                model.snapshots.push(snapshot);
            }
        }
        Action::Expand { volume } if count > 0 => {
            let volume = &mut model.volumes[volume % count];
            if volume.size < SIZE as u64 + GROWTH[0] + GROWTH[1] {
                volume.size += GROWTH[usize::from(volume.size > SIZE as u64)];
                let expanded =
                    rig.client.expand_volume(&volume.id, volume.size as i64).await.expect("expand");
                assert_eq!(expanded.capacity_bytes as u64, volume.size);
            }
        }
        Action::DeleteSnapshot { pick } if !model.snapshots.is_empty() => {
            let gone = model.snapshots.remove(pick % model.snapshots.len());
            delete(rig, model, gone).await;
        }
        Action::Restore { pick } if !model.snapshots.is_empty() && count < 4 => {
            let name = model.name("restored", case);
            let source = &model.snapshots[pick % model.snapshots.len()];
            let size = source.size;
            let (id, device) = rig.volume_from(&name, size as i64, from_snapshot(&source.id)).await;
            let copied = model.copied(&id, &source.id, &source.content, &source.copied);
            model.volumes.push(Volume { id, device, size, content: source.content.clone(), copied });
        }
        Action::Clone { volume } if count > 0 && count < 4 => {
            let name = model.name("cloned", case);
            let source = &model.volumes[volume % count];
            let (size, content) = (source.size, source.content.clone());
            let (id, device) = rig.volume_from(&name, size as i64, from_volume(&source.id)).await;
            let copied = model.copied(&id, &source.id, &content, &source.copied);
            model.volumes.push(Volume { id, device, size, content, copied });
        }
        Action::DeleteVolume { volume } if count > 1 => {
            let gone = model.volumes.remove(volume % count);
            rig.detach(&gone.id).await;
            rig.client.delete_volume(&gone.id).await.expect("delete");
            model.settle();
        }
        Action::Restart { kill } => {
            if *kill {
                rig.kill();
            } else {
                assert!(rig.terminate().success());
            }
            rig.start_again().await;
        }
        _ => {}
    }
}

/// Deletes a snapshot that was taken out of the model. A member is deleted with its group.
async fn delete(rig: &mut Subject<'_>, model: &mut Model, gone: Snapshot) {
    match &gone.group {
        None => rig.client.delete_snapshot(&gone.id).await.expect("delete"),
        Some((group, members)) => {
            assert_eq!(code(rig.client.delete_snapshot(&gone.id).await), Code::InvalidArgument);
            rig.client.delete_group(group, members).await.expect("delete the group");
            let is_member = |snapshot: &mut Snapshot| members.contains(&snapshot.id);
            model.retained.extend(model.snapshots.extract_if(.., is_member));
        }
    }
    model.retained.push(gone);
    model.settle();
}

/// A delta is refused if a snapshot does not exist, or if the two are on different nodes.
async fn refused(rig: &mut Subject<'_>, base: &str, target: &str, why: &str) {
    let expected = if key_of(base) == key_of(target) { Code::NotFound } else { Code::InvalidArgument };
    assert_eq!(code(rig.client.delta(base, target, 0, 0).await), expected, "{why}");
}

/// Compares contents and lists with the model.
async fn check(rig: &mut Subject<'_>, model: &Model, block_size: u64, offsets: &[(u64, i32)]) {
    for volume in &model.volumes {
        for window in WINDOWS.into_iter().filter(|window| (window + WINDOW) * BLOCK <= volume.size) {
            volume.content.assert_equals(&volume.device, window, WINDOW);
        }
    }
    for snapshot in &model.snapshots {
        let list = rig.client.allocated(&snapshot.id, 0, 0).await.expect("allocated");
        let (listed, expected) = (blocks_of(&list, block_size), snapshot.content.allocated(block_size));
        let may_be = |block: &u64| expected.contains(block) || snapshot.copied.contains(block);
        assert!(
            expected.iter().all(|block| listed.contains(block)) && listed.iter().all(may_be),
            "allocated: {listed:?}, expected {expected:?}, copied {:?}",
            snapshot.copied
        );
        assert!(listed.is_sorted_by(|block, next| block < next), "allocated: {listed:?}");
        assert_eq!(list.capacity, snapshot.size, "a snapshot keeps the size it was taken with");
    }
    for gone in &model.forgotten {
        for target in &model.snapshots {
            refused(rig, gone, &target.id, "forgotten").await;
        }
    }
    for base in &model.retained {
        assert_eq!(code(rig.client.allocated(&base.id, 0, 0).await), Code::NotFound, "deleted");
        for target in &model.snapshots {
            refused(rig, &target.id, &base.id, "deleted").await;
        }
    }
    for base in model.snapshots.iter().chain(&model.retained) {
        for target in model.snapshots.iter().filter(|target| target.number >= base.number) {
            if base.volume != target.volume {
                let refused = rig.client.delta(&base.id, &target.id, 0, 0).await;
                assert_eq!(code(refused), Code::InvalidArgument);
                continue;
            }
            let list = rig.client.delta(&base.id, &target.id, 0, 0).await.expect("delta");
            let changed = target.content.changed_since(&base.content, block_size);
            assert_eq!(blocks_of(&list, block_size), changed, "delta");
            for (offset, max_results) in offsets {
                let offset = offset % (target.size + 1);
                let list =
                    rig.client.delta(&base.id, &target.id, offset as i64, *max_results).await.expect("delta");
                let tail: Vec<u64> = changed.iter().copied().filter(|b| *b >= offset / block_size).collect();
                let listed = blocks_of(&list, block_size);
                assert_eq!(listed, tail, "delta from {offset}, {max_results} a message");
            }
            // A client can resume from every message boundary.
            let list = rig.client.delta(&base.id, &target.id, 0, 3).await.expect("delta");
            let mut sent = Vec::new();
            for message in &list.messages {
                let Some(last) = message.last() else { continue };
                sent.extend(message.iter().copied());
                let resume = (last.offset + last.size) as i64;
                let rest = rig.client.delta(&base.id, &target.id, resume, 3).await.expect("resume");
                let whole: Vec<_> = sent.iter().copied().chain(rest.tuples()).collect();
                assert!(whole.iter().copied().eq(list.tuples()), "resumed at {resume}");
            }
        }
    }
}

async fn clear(rig: &mut Subject<'_>, mut model: Model) {
    for volume in std::mem::take(&mut model.volumes) {
        rig.detach(&volume.id).await;
        rig.client.delete_volume(&volume.id).await.expect("delete");
    }
    while let Some(gone) = model.snapshots.pop() {
        delete(rig, &mut model, gone).await;
    }
    assert!(rig.retained().is_empty(), "deleted snapshots are kept that cannot be a base");
}

/// Offsets near the written blocks, so that they are before, inside and behind tuples.
fn offset() -> impl Strategy<Value = (u64, i32)> {
    let near =
        (0..WINDOWS.len(), 0..WINDOW * BLOCK).prop_map(|(window, byte)| WINDOWS[window] * BLOCK + byte);
    (near, prop_oneof![Just(0), 1..6i32, Just(i32::MAX)])
}

/// `routed`: the number of drivers behind a router. Restored and cloned volumes are made on each node in turn.
#[apply(root_cases)]
#[case::dir_variable(PoolKind::Dir, None, "variable")]
#[case::dir_fixed(PoolKind::Dir, None, "fixed")]
#[case::xfs_variable(PoolKind::Xfs, None, "variable")]
#[case::xfs_fixed(PoolKind::Xfs, None, "fixed")]
#[case::btrfs_variable(PoolKind::Btrfs, None, "variable")]
#[case::btrfs_fixed(PoolKind::Btrfs, None, "fixed")]
#[case::two_nodes(PoolKind::Xfs, Some(2), "variable")]
#[case::three_nodes(PoolKind::Dir, Some(3), "fixed")]
fn any_life_gives_exact_deltas(
    #[case] pool: PoolKind,
    #[case] routed: Option<usize>,
    #[case] style: &'static str,
) {
    let runtime = Runtime::new().expect("runtime");
    let cases = testkit::asked("PROPTEST_CASES").unwrap_or(15);
    let mut runner = TestRunner::new(Config {
        cases,
        failure_persistence: None,
        max_shrink_iters: 60,
        rng_seed: RngSeed::Fixed(testkit::seed(&format!("{style} deltas on {pool:?}"))),
        ..Config::default()
    });
    // With none, each deletion merges the changes of a snapshot into those of the next.
    let kept = if style == "fixed" { 0 } else { 3 };
    let retained = kept.to_string();
    let flags = ["--block-metadata-type", style, "--retain-deleted", &retained];
    let start = || runtime.block_on(Subject::start(pool, routed, &flags, "warn"));
    let rig = std::cell::RefCell::new(start());
    let log = std::cell::RefCell::new(String::new());
    let case = std::cell::Cell::new(0);
    let strategy = (
        prop::collection::vec(step(), 10..40),
        prop::collection::vec(offset(), 2..5),
        prop_oneof![3 => Just(4096u64), 1 => Just(65536u64)],
    );
    let outcome = runner.run(&strategy, |(steps, offsets, block_size)| {
        case.set(case.get() + 1);
        let mut rig = rig.borrow_mut();
        let lived = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            runtime.block_on(async {
                let mut model = Model { kept, ..Model::default() };
                create(&mut rig, &mut model, case.get(), block_size).await;
                for step in &steps {
                    apply(&mut rig, &mut model, step, case.get()).await;
                }
                check(&mut rig, &model, block_size, &offsets).await;
                clear(&mut rig, model).await;
            });
        }));
        lived.map_err(|panic| {
            // What a failed case leaves would make the next one fail too.
            log.replace(rig.log());
            *rig = start();
            let said = panic.downcast_ref::<String>().cloned();
            let said = said.or_else(|| panic.downcast_ref::<&str>().map(|said| (*said).to_owned()));
            TestCaseError::fail(said.unwrap_or_else(|| "a panic".to_owned()))
        })
    });
    if let Err(error) = outcome {
        panic!("{}\n{error}", log.take());
    }
    rig.into_inner().finish();
}
