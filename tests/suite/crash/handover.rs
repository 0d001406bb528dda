//! A stream reads files that hashing writes, while both of its snapshots are deleted.

use std::os::unix::fs::FileExt;
use std::time::{Duration, Instant};

use cbt::MapFile;
use csi_client::delta_of;
use proto::{GetMetadataDeltaRequest, GetMetadataDeltaResponse};
use testkit::content::{Content, open_device};
use testkit::{BLOCK, Beside, MIB, PoolKind, Rig, narrow_client};

use crate::faults::{hashed, is_compared, until};
use testkit::orders::{Orders, Point};

/// More tuples than a client with small windows receives before it reads.
const CHANGED: u64 = 12_000;
/// How long a step is held at first, and at most. The time doubles when the hold ended before the other calls.
const HOLD: Duration = Duration::from_millis(250);
const LONGEST: Duration = Duration::from_secs(16);
/// Rounds that may lack the step that they are to hold.
const MISSED: usize = 20;
/// No step has this number, so a round with it holds nothing.
const NONE: u64 = u64::MAX;

/// A stream, and the blocks that it listed so far.
struct Read {
    stream: tonic::Streaming<GetMetadataDeltaResponse>,
    blocks: Vec<u64>,
}

impl Read {
    /// Opens it and reads the first message.
    async fn begin(rig: &Rig, base: &str, target: &str) -> Self {
        let request = GetMetadataDeltaRequest { max_results: 256, ..delta_of(base, target) };
        let mut narrow = narrow_client(&rig.socket()).await;
        let stream = narrow.get_metadata_delta(request).await.expect("delta").into_inner();
        let mut read = Read { stream, blocks: Vec::new() };
        read.on(1).await;
        read
    }

    /// Reads this many messages, or to the end.
    async fn on(&mut self, messages: usize) {
        for _ in 0..messages {
            let Some(message) = self.stream.message().await.expect("a message") else { return };
            self.blocks.extend(message.block_metadata.iter().map(|tuple| tuple.byte_offset as u64 / BLOCK));
        }
    }
}

/// A volume that changes from round to round.
struct Scene {
    pool: PoolKind,
    rig: Rig,
    volume: String,
    device: std::path::PathBuf,
    orders: Orders,
    content: Content,
    round: u64,
}

impl Scene {
    async fn new(pool: PoolKind) -> Self {
        let mut rig = Rig::start_with(pool, &["--block-metadata-type", "fixed"], "info").await;
        let (volume, device) = rig.block_volume("volume", 128 * MIB).await;
        let orders = Orders::new(rig.dir.path());
        let mut content = Content::default();
        content.write(&device, 0, 128 * MIB as u64 / BLOCK, 1);
        Scene { pool, rig, volume, device, orders, content, round: 0 }
    }

    /// Begins a round: takes the base and makes all changes after it. Also returns the content at the base.
    async fn base(&mut self, is_hashed_first: bool) -> (String, Content) {
        self.round += 1;
        let base = self.rig.snapshot(&format!("base {}", self.round), &self.volume).await;
        if is_hashed_first {
            hashed(&self.rig, &[&base]).await;
        }
        let before = self.content.clone();
        for run in 0..CHANGED / 8 {
            self.content.write(&self.device, run * 16, 8, (self.round % 200) as u8 + 2);
        }
        (base, before)
    }

    async fn target(&mut self) -> String {
        self.rig.snapshot(&format!("target {}", self.round), &self.volume).await
    }

    /// Orders that a step is held.
    fn hold(&mut self, step: u64, whose: &str, time: Duration) -> Instant {
        self.orders.hold(step, whose, time.as_millis() as u32);
        Instant::now()
    }

    /// Waits until a step is held, or until `ends`. Returns a time just before the hold began, not before `ordered`, or `None`
    /// if no step was held.
    async fn held(&self, ordered: Instant, ends: impl Fn() -> bool) -> Option<Instant> {
        let (mut not_yet, deadline) = (ordered, Instant::now() + Duration::from_secs(90));
        loop {
            let (now, has_ended) = (Instant::now(), ends());
            if self.orders.passed().iter().any(|point| point.hit) {
                return Some(not_yet);
            }
            if has_ended {
                return None;
            }
            assert!(now < deadline, "no step is held, and nothing ends");
            not_yet = now;
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }

    /// Waits for the background work on the deleted snapshots: both are hashed, and the base's data is freed.
    async fn settled(&self, base: &str, target: &str) {
        let [base, target] = [base, target].map(|id| self.rig.snapshot_dir(id));
        until("the base is freed", || !base.bytes().exists()).await;
        until("the target is hashed", || !target.bytes().exists() || is_compared(&target)).await;
    }

    /// Reads the stream to its end. It must list exactly the changed blocks.
    async fn is_exact(&self, mut read: Read, before: &Content, held: Option<&Point>) {
        read.on(usize::MAX).await;
        let expected = self.content.changed_since(before, BLOCK);
        assert_eq!(read.blocks, expected, "{:?}, held before {held:?}", self.pool);
    }
}

/// The numbers of the steps after `after` that differ from the step before in kind or file.
fn next_kinds(points: &[Point], after: u64) -> impl Iterator<Item = u64> {
    let is_other = |pair: &&[Point]| (&pair[0].step, &pair[0].path) != (&pair[1].step, &pair[1].path);
    points.windows(2).filter(is_other).map(|pair| pair[1].number).filter(move |number| *number > after)
}

/// Whether hashing has the lock on the volume's history at this step, so that a deletion waits.
fn is_locked(point: &Point) -> bool {
    let name = point.path.file_name().unwrap_or_default().to_string_lossy().into_owned();
    !matches!(name.as_str(), "hashes" | "changed.map.compared")
}

/// Not from an incident. Three threads work on the same files. A stream reads hashes, or data where there is no hash. Hashing
/// writes hashes, then removes their blocks from `pending`, then replaces `changed`. A deletion frees data and merges
/// `changed` into the next map. So hashing is held before each kind of step on each file in turn; meanwhile a stream begins
/// and both snapshots are deleted. Then hashing continues, and only after that the stream is read. It must be exact.
#[apply(device_cases)]
#[case::btrfs_with_a_hashed_base(PoolKind::Btrfs, true)]
#[case::xfs_with_nothing_hashed(PoolKind::Xfs, false)]
async fn a_stream_is_exact_at_each_step_of_hashing_while_its_snapshots_go(
    #[case] pool: PoolKind,
    #[case] base_is_hashed: bool,
) {
    let mut scene = Scene::new(pool).await;
    // Two rounds come first in which nothing is held. The first of all has more steps than later rounds, which take over
    // hashes from the round before.
    let mut wanted = vec![(1, HOLD), (NONE, HOLD), (NONE, HOLD)];
    let (mut during, mut waited, mut missed) = (0, 0, 0);
    while let Some((step, hold)) = wanted.pop() {
        let (base, before) = scene.base(base_is_hashed).await;
        let ordered = scene.hold(step, "hashing", hold);
        let target = scene.target().await;
        let dir = scene.rig.snapshot_dir(&target);
        let held = scene.held(ordered, || is_compared(&dir)).await;
        let read = Read::begin(&scene.rig, &base, &target).await;
        for id in [&base, &target] {
            scene.rig.client.delete_snapshot(id).await.expect("delete");
        }
        let is_over = held.is_some_and(|held| held.elapsed() >= hold);
        // Hashing continues on files that are deleted.
        scene.settled(&base, &target).await;
        let points = scene.orders.withdraw();
        let point = points.iter().find(|point| point.hit);
        scene.is_exact(read, &before, point).await;
        let Some(point) = point else {
            // Rounds differ by some steps, and this one had fewer.
            if step != NONE && missed < MISSED {
                missed += 1;
                wanted.push((step, hold));
            }
            continue;
        };
        // Without a hold during the deletions, the step came after them.
        let is_before = held.is_some();
        if is_before && is_over && !is_locked(point) {
            assert!(hold < LONGEST, "both deletions take longer than {hold:?}, held before {point:?}");
            wanted.push((step, 2 * hold));
            continue;
        }
        during += usize::from(is_before && !is_locked(point));
        waited += usize::from(is_before && is_locked(point));
        wanted.extend(next_kinds(&points, step).next().map(|step| (step, HOLD)));
    }
    let rounds = scene.round;
    assert!(during > 3 && waited > 3, "held {during} and {waited} times in {rounds} rounds");
    scene.rig.detach(&scene.volume).await;
    scene.rig.finish();
}

/// The reverse: a deletion is held before each kind of its steps on each file, while a stream is half read and hashing is
/// running. A writer to another volume slows hashing down.
#[apply(device_cases)]
#[case::btrfs_with_a_hashed_base(PoolKind::Btrfs, true, 1)]
#[case::xfs_with_nothing_hashed(PoolKind::Xfs, false, 2)]
async fn a_stream_is_exact_at_each_step_of_its_snapshots_deletions_beside_hashing(
    #[case] pool: PoolKind,
    #[case] base_is_hashed: bool,
    #[case] first: u64,
) {
    let mut scene = Scene::new(pool).await;
    let (written, device) = scene.rig.block_volume("written", MIB).await;
    // Each pool tests every second step. The two rounds before fill the retention.
    let mut wanted = vec![(first, HOLD), (NONE, HOLD), (NONE, HOLD)];
    let (mut beside_hashing, mut held_rounds) = (0, 0);
    while let Some((step, hold)) = wanted.pop() {
        let (base, before) = scene.base(base_is_hashed).await;
        let device = open_device(&device);
        let writer = Beside::start(move || {
            device.write_all_at(&[1; 4096], 0).and_then(|()| device.sync_data()).expect("write");
        });
        let target = scene.target().await;
        let mut read = Read::begin(&scene.rig, &base, &target).await;
        let ordered = scene.hold(step, "calls", hold);
        let deletions = tokio::spawn({
            let mut client = scene.rig.client.clone();
            let ids = [base.clone(), target.clone()];
            async move {
                for id in &ids {
                    client.delete_snapshot(id).await.expect("delete");
                }
            }
        });
        let held = scene.held(ordered, || deletions.is_finished()).await;
        let pending = MapFile::open(&scene.rig.snapshot_dir(&target).pending()).and_then(|map| map.count());
        let is_hashing = pending.is_ok_and(|count| count > 0);
        // Read some messages while the deletion is held, and the rest when deletions and hashing are done.
        read.on(4).await;
        let is_over = held.is_some_and(|held| held.elapsed() >= hold);
        deletions.await.expect("the deletions");
        writer.stop();
        scene.settled(&base, &target).await;
        let points = scene.orders.withdraw();
        let point = points.iter().find(|point| point.hit);
        scene.is_exact(read, &before, point).await;
        let Some(point) = point else { continue };
        if is_over {
            assert!(hold < LONGEST, "four messages take longer than {hold:?}, held before {point:?}");
            wanted.push((step, 2 * hold));
            continue;
        }
        held_rounds += 1;
        beside_hashing += usize::from(is_hashing);
        wanted.extend(next_kinds(&points, step).nth(1).map(|step| (step, HOLD)));
    }
    let rounds = scene.round;
    assert!(
        held_rounds > 3 && 2 * beside_hashing > held_rounds,
        "held {held_rounds} times in {rounds} rounds, {beside_hashing} beside hashing"
    );
    for id in [written, scene.volume] {
        scene.rig.detach(&id).await;
    }
    scene.rig.finish();
}
