//! A stream that reads what hashing writes, while both of its snapshots are deleted.

use std::time::Duration;

use base::ObjectDir;
use proto::GetMetadataDeltaRequest;
use testkit::content::Content;
use testkit::{BLOCK, MIB, PoolKind, Rig, narrow_client};

use crate::faults::{is_hashed, until};
use testkit::orders::{Orders, Point};

/// More tuples than a client with small windows takes in before it reads.
const CHANGED: u64 = 12_000;
/// How long hashing is held: longer than the calls take that are made meanwhile.
const HOLD: Duration = Duration::from_millis(250);

/// No incident led to this test. Three work on the same files: a stream reads hashes and, where there is none, data; hashing
/// writes hashes, then takes their blocks out of `pending`, then replaces `changed`; a deletion frees data and hands
/// `changed` on. So hashing is held before each kind of step in turn, a stream begins there, both snapshots go, hashing goes
/// on, and only then the stream is read: it lists what changed and nothing else.
#[rstest::rstest]
#[case::btrfs_with_a_hashed_base(PoolKind::Btrfs, true)]
#[case::xfs_with_nothing_hashed(PoolKind::Xfs, false)]
#[test_with::root]
#[tokio::test(flavor = "multi_thread")]
async fn a_stream_is_exact_at_each_step_of_hashing_while_its_snapshots_go(
    #[case] pool: PoolKind,
    #[case] base_is_hashed: bool,
) {
    let mut rig = Rig::start_with(pool, &["--block-metadata-type", "fixed"], "info").await;
    let (volume, device) = rig.block_volume("volume", 128 * MIB).await;
    let snapshots = rig.pool_dir().join("snapshots");
    let dir_of = |id: &str| ObjectDir::new(snapshots.join(id));
    let mut orders = Orders::new(rig.dir.path());
    let mut content = Content::default();
    content.write(&device, 0, 128 * MIB as u64 / BLOCK, 1);
    // Two rounds only count the steps. The first has more than all later ones, which take over hashes of the round before.
    let mut wanted = vec![u64::MAX; 2];
    let (mut round, mut held) = (0, 0);
    while let Some(step) = wanted.pop() {
        round += 1;
        let base = rig.snapshot(&format!("base {round}"), &volume).await;
        let base_dir = dir_of(&base);
        if base_is_hashed {
            until("the base is hashed", || is_hashed(&base_dir)).await;
        }
        let before = content.clone();
        for run in 0..CHANGED / 8 {
            content.write(&device, run * 16, 8, (round % 200) as u8 + 2);
        }
        orders.hold(step, "hashing", HOLD.as_millis() as u32);
        let target = rig.snapshot(&format!("target {round}"), &volume).await;
        let target_dir = dir_of(&target);
        until("hashing is held, or ends", || {
            orders.passed().iter().any(|point| point.hit) || is_hashed(&target_dir)
        })
        .await;
        let request = GetMetadataDeltaRequest {
            base_snapshot_id: base.clone(),
            target_snapshot_id: target.clone(),
            max_results: 256,
            ..Default::default()
        };
        let mut narrow = narrow_client(&rig.socket()).await;
        let mut stream = narrow.get_metadata_delta(request).await.expect("delta").into_inner();
        let mut tuples = stream.message().await.expect("the first message").expect("one").block_metadata;
        for id in [&base, &target] {
            rig.client.delete_snapshot(id).await.expect("delete");
        }
        // Hashing goes on meanwhile, on files that are deleted.
        tokio::time::sleep(HOLD).await;
        while let Some(message) = stream.message().await.expect("a message") {
            tuples.extend(message.block_metadata);
        }
        let listed: Vec<u64> = tuples.iter().map(|tuple| tuple.byte_offset as u64 / BLOCK).collect();
        let points = orders.withdraw();
        let step_held = points.iter().find(|point| point.hit);
        held += usize::from(step_held.is_some());
        assert_eq!(listed, content.changed_since(&before, BLOCK), "{pool:?}, held before {step_held:?}");
        if round == 2 {
            let is_first = |pair: &&[Point]| pair[0].step != pair[1].step;
            wanted = points.windows(2).filter(is_first).map(|pair| pair[1].number).collect();
        }
    }
    assert!(held > 5, "hashing was held {held} times in {round} rounds");
    rig.detach(&volume).await;
    rig.finish();
}
