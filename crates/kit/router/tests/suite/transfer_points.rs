//! Promise: before whichever of its steps either end of a transfer dies, and whichever end it is, what comes of it equals its
//! source, and so do its later deltas.
//!
//! A series makes one transfer over and over, with a death at its first step, its second, and so on, until it ends without
//! reaching the step. The suite takes a part of the steps, others on each pool; `DELTAPATH_TRANSFER_KILLS` (`make
//! transfer-kills`) has it take all.

use std::time::Duration;

use csi_client::{from_snapshot, from_volume};
use proto::VolumeContentSource;
use testkit::PoolKind;
use testkit::cluster::{Cluster, eventually, patiently};
use testkit::content::Content;
use testkit::orders::{Cut, Orders};

use crate::transfers::{assert_same, data, later_deltas_are_exact, on, staging, written};

const SOURCE: usize = 0;
const TARGET: usize = 1;
/// Where not all steps are taken, every 12th is.
const PART: u64 = 12;
/// How long a step is held while the other end is killed.
const HELD: u32 = 1000;

/// A cluster, what is copied, and what has been done.
struct Lab {
    cluster: Cluster,
    pool: PoolKind,
    /// What the source holds, and its bytes on its node.
    content: Content,
    original: std::path::PathBuf,
    orders: [Orders; 2],
    names: usize,
    deaths: usize,
}

impl Lab {
    /// Copies `source` while `victim` dies before the `at`th step of `side`; whether there was such a step.
    async fn round(&mut self, source: &VolumeContentSource, side: usize, victim: usize, at: u64) -> bool {
        self.names += 1;
        let context = format!("{:?}: node {victim} dies at step {at} of node {side}", self.pool);
        let request = on(&self.cluster, TARGET, &format!("copy {}", self.names), source.clone());
        match side == victim {
            true => self.orders[side].give(Cut::Kill, at, "calls"),
            false => self.orders[side].hold(at, "calls", HELD),
        }
        let asking = {
            let (mut client, request) = (self.cluster.client(), request.clone());
            tokio::spawn(async move { patiently!(client.create_volume(request.clone())) })
        };
        let orders = &self.orders[side];
        let is_hit = || orders.passed().iter().any(|point| point.hit);
        // The source puts away what it had open when the volume is there.
        let is_over = || {
            asking.is_finished()
                && (staging(&self.cluster, SOURCE).is_empty() && staging(&self.cluster, TARGET).is_empty())
        };
        eventually(&context, async || is_hit() || is_over()).await;
        let points = orders.withdraw();
        let hit = points.into_iter().find(|point| point.hit);
        if hit.is_some() {
            self.deaths += 1;
            self.cluster.nodes[victim].rig.kill();
            self.cluster.nodes[victim].rig.start_again().await;
        }
        let made = asking.await.expect("the task");
        let made = made.unwrap_or_else(|error| panic!("{context} ({hit:?}): {error}")).volume_id;
        assert_same(&self.original, &data(&self.cluster, TARGET, "volumes", &made));
        later_deltas_are_exact(&mut self.cluster, TARGET, &made, self.content.clone()).await;
        patiently!(self.cluster.client().delete_volume(&made)).expect("DeleteVolume");
        // Of a source whose reader died behind the commit nobody says that it is not needed any more.
        tokio::time::sleep(Duration::from_millis(20)).await;
        if !staging(&self.cluster, SOURCE).is_empty() {
            self.cluster.nodes[SOURCE].rig.terminate();
            self.cluster.nodes[SOURCE].rig.start_again().await;
        }
        for node in [SOURCE, TARGET] {
            let left = || staging(&self.cluster, node);
            eventually(&format!("{context} ({hit:?}): {:?} go", left()), async || left().is_empty()).await;
        }
        hit.is_some()
    }

    /// All steps of both ends, and the death of either there. How many steps the target has.
    async fn series(&mut self, source: &VolumeContentSource, first: u64) {
        let all = std::env::var_os("DELTAPATH_TRANSFER_KILLS").is_some();
        let (first, step) = if all { (1, 1) } else { (first, PART) };
        for side in [TARGET, SOURCE] {
            for victim in [TARGET, SOURCE] {
                let mut at = first + (side + 2 * victim) as u64 * u64::from(!all) % PART;
                while self.round(source, side, victim, at).await {
                    at += step;
                }
            }
        }
    }
}

#[apply(every_pool)]
async fn a_death_before_any_step_of_a_transfer_costs_no_byte(pool: PoolKind) {
    let mut cluster = Cluster::start(pool, 2, &[]).await;
    let (origin, device, mut content) = written(&mut cluster, 1).await;
    let mut client = cluster.client();
    let first = client.create_snapshot("first", &origin).await.expect("CreateSnapshot").snapshot_id;
    let before = content.clone();
    content.write(&device, 100, 60, 201);
    content.discard(&device, 10, 30);
    let second = client.create_snapshot("second", &origin).await.expect("CreateSnapshot").snapshot_id;
    cluster.nodes[SOURCE].rig.detach(&origin).await;
    let orders = [SOURCE, TARGET].map(|node| Orders::new(cluster.nodes[node].rig.dir.path()));
    let original = data(&cluster, SOURCE, "snapshots", &second);
    let mut lab = Lab { cluster, pool, content, original, orders, names: 0, deaths: 0 };
    let place = pool as u64;
    // From nothing, and of a volume, of which the source makes a copy first.
    lab.series(&from_snapshot(&second), 1 + place).await;
    lab.series(&from_volume(&origin), 4 + place).await;
    // From an earlier copy: what differs is put right, and what is too much is punched.
    let earlier = on(&lab.cluster, TARGET, "earlier", from_snapshot(&first));
    let made = patiently!(lab.cluster.client().create_volume(earlier.clone()));
    let made = made.expect("CreateVolume").volume_id;
    lab.series(&from_snapshot(&second), 7 + place).await;
    before.assert_equals(&data(&lab.cluster, TARGET, "volumes", &made), 0, 400);
    eprintln!("{pool:?}: {} deaths at a step", lab.deaths);
    assert!(lab.deaths > 5, "only {} deaths", lab.deaths);
    lab.cluster.finish();
}
