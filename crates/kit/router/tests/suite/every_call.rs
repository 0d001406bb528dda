//! Promise: whichever call of the cluster is under way when its node is killed, cut off or frozen, it ends in time, the other node
//! answers meanwhile, and when the node is back the same call comes to what it was to come to, once.
//!
//! Calls that change something are stopped before one of their steps, by a fail point of the driver; of the others the node
//! has the request, or it is lost on the way.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use csi_client::{Client, block_capability, delta_of, from_snapshot, from_volume, new_volume};
use prost::Message;
use proto::TopologyRequirement;
use testkit::cluster::{Cluster, PATIENCE, within};
use testkit::network::{self, Host};
use testkit::orders::Orders;
use testkit::{MIB, PoolKind, requests};
use tonic::{Code, Request};

use crate::cuts::{Fault, GIVEN_UP, code_of};
use crate::streams::{LONG, question, snapshot};
use crate::transfers::nothing_is_left;

/// What a call is given whose node is not there.
const DEADLINE: Duration = Duration::from_secs(1);
/// What a call about a healthy node may take while another is silent: that is seen in twice `--node-timeout`, and by the pings
/// of its connection only after this.
const WELL: Duration = Duration::from_secs(10);

/// A call about a healthy node.
async fn well<T, E: std::fmt::Debug>(call: impl Future<Output = Result<T, E>>) -> T {
    let answer = tokio::time::timeout(WELL, call).await.expect("a call about a healthy node is held up");
    answer.expect("a healthy node")
}
/// How long a step is held: longer than its caller waits.
const HELD: u32 = 1500;

/// Which of the steps of a call is held.
fn held_step(fault: Fault, steps: usize) -> u64 {
    let at = match fault {
        Fault::Kill => steps / 2,
        Fault::Cut => steps / 3,
        Fault::Freeze => steps * 2 / 3,
    };
    at.max(1) as u64
}

/// A call, and what it comes to.
struct Row {
    service: &'static str,
    call: &'static str,
    what: What,
}

enum What {
    /// Volumes and snapshots more than before.
    Changes([i64; 2]),
    /// Reads something of an object.
    Reads,
    /// Reads something of all nodes, or of any: it may be answered without the one.
    OfAll,
}

impl Row {
    fn path(&self) -> String {
        format!("/csi.v1.{}/{}", self.service, self.call)
    }
}

const ROWS: [Row; 23] = {
    use What::{Changes, OfAll, Reads};
    const fn row(service: &'static str, call: &'static str, what: What) -> Row {
        Row { service, call, what }
    }
    const CONTROLLER: &str = "Controller";
    const GROUPS: &str = "GroupController";
    const METADATA: &str = "SnapshotMetadata";
    [
        row(CONTROLLER, "CreateVolume", Changes([1, 0])),
        row(CONTROLLER, "DeleteVolume", Changes([-1, 0])),
        row(CONTROLLER, "ControllerPublishVolume", Changes([0, 0])),
        row(CONTROLLER, "ControllerUnpublishVolume", Changes([0, 0])),
        row(CONTROLLER, "ControllerExpandVolume", Changes([0, 0])),
        row(CONTROLLER, "ControllerModifyVolume", Changes([0, 0])),
        row(CONTROLLER, "CreateSnapshot", Changes([0, 1])),
        row(CONTROLLER, "DeleteSnapshot", Changes([0, -1])),
        row(CONTROLLER, "ValidateVolumeCapabilities", Reads),
        row(CONTROLLER, "ControllerGetVolume", Reads),
        row(CONTROLLER, "ControllerGetVolumeHealth", Reads),
        row(CONTROLLER, "GetSnapshot", Reads),
        row(CONTROLLER, "ListVolumes", OfAll),
        row(CONTROLLER, "ListSnapshots", OfAll),
        row(CONTROLLER, "ControllerListVolumeHealth", OfAll),
        row(CONTROLLER, "GetCapacity", OfAll),
        row(CONTROLLER, "ControllerGetCapabilities", OfAll),
        row(GROUPS, "CreateVolumeGroupSnapshot", Changes([0, 2])),
        row(GROUPS, "DeleteVolumeGroupSnapshot", Changes([0, -2])),
        row(GROUPS, "GetVolumeGroupSnapshot", Reads),
        row(GROUPS, "GroupControllerGetCapabilities", OfAll),
        row(METADATA, "GetMetadataAllocated", Reads),
        row(METADATA, "GetMetadataDelta", Reads),
    ]
};

/// No call of these services is missing.
#[test]
fn the_table_has_every_call() {
    let calls = testkit::pages::calls_of_csi().into_iter();
    let calls = calls.filter(|(service, _)| !["Identity", "Node"].contains(&service.as_str()));
    let paths = calls.map(|(service, call)| format!("/csi.v1.{service}/{call}"));
    assert_eq!(ROWS.iter().map(Row::path).collect::<BTreeSet<_>>(), paths.collect());
}

/// What is there before anything goes wrong.
struct Scene {
    cluster: Cluster,
    /// On the healthy node, and a snapshot of it.
    healthy: (String, String),
    /// Two volumes on the other, two snapshots of the first, and a group of both with its members.
    volumes: [String; 2],
    snapshots: [String; 2],
    group: (String, Vec<String>),
    /// A snapshot there with enough blocks that a client which does not read holds up its stream.
    long: String,
    orders: Orders,
    names: usize,
}

impl Scene {
    async fn new() -> Self {
        let mut cluster = Cluster::empty();
        let flags = ["--enable-attach", "--block-metadata-type", "fixed"];
        for number in 0..2 {
            cluster.add_node_on(PoolKind::Xfs, &flags, "", Some(Host::new(number))).await;
        }
        cluster.route(&cluster.endpoints(), &["--node-timeout", "3s"], 2).await;
        let long = snapshot(&mut cluster, 1, LONG).await;
        let mut client = cluster.client();
        let healthy = cluster.volume_on(0, "healthy").await;
        let of_healthy = client.create_snapshot("healthy", &healthy).await.expect("snapshot").snapshot_id;
        let volumes = [cluster.volume_on(1, "one").await, cluster.volume_on(1, "two").await];
        let first = client.create_snapshot("first", &volumes[0]).await.expect("snapshot").snapshot_id;
        let second = client.create_snapshot("second", &volumes[0]).await.expect("snapshot").snapshot_id;
        let group = client.create_group("group", &volumes).await.expect("group");
        let members = group.snapshots.into_iter().map(|member| member.snapshot_id).collect();
        let orders = Orders::new(cluster.nodes[1].rig.dir.path());
        Scene {
            cluster,
            healthy: (healthy, of_healthy),
            volumes,
            snapshots: [first, second],
            group: (group.group_snapshot_id, members),
            long,
            orders,
            names: 0,
        }
    }

    /// Makes what a call works on, and returns its message.
    async fn request(&mut self, row: &Row) -> Vec<u8> {
        self.names += 1;
        let name = format!("{} {}", row.call, self.names);
        let volume_id = match row.call {
            "DeleteVolume"
            | "ControllerPublishVolume"
            | "ControllerUnpublishVolume"
            | "ControllerExpandVolume"
            | "ControllerModifyVolume" => self.cluster.volume_on(1, &name).await,
            _ => self.volumes[0].clone(),
        };
        let [first, second] = self.snapshots.clone();
        let node_id = self.cluster.nodes[1].name();
        let mut client = self.cluster.client();
        let published = requests::attach(&volume_id, &node_id);
        match row.call {
            "CreateVolume" => {
                // Wherever there is a node, this one first.
                let mut request = new_volume(&name, 16 << 20, block_capability());
                request.accessibility_requirements = Some(TopologyRequirement {
                    requisite: Vec::new(),
                    preferred: vec![self.cluster.nodes[1].topology()],
                });
                request.encode_to_vec()
            }
            "DeleteVolume" => proto::DeleteVolumeRequest { volume_id, ..Default::default() }.encode_to_vec(),
            "ControllerPublishVolume" => published.encode_to_vec(),
            "ControllerUnpublishVolume" => {
                client.controller.controller_publish_volume(published).await.expect("attach");
                requests::detach(volume_id, &node_id).encode_to_vec()
            }
            "ControllerExpandVolume" => {
                let capacity_range = Some(proto::CapacityRange { required_bytes: 32 * MIB, limit_bytes: 0 });
                let volume_capability = Some(block_capability());
                let more = proto::ControllerExpandVolumeRequest::default();
                proto::ControllerExpandVolumeRequest { volume_id, capacity_range, volume_capability, ..more }
                    .encode_to_vec()
            }
            "ControllerModifyVolume" => {
                requests::modify(volume_id, &[("readAheadKiB", "512")]).encode_to_vec()
            }
            "CreateSnapshot" => {
                proto::CreateSnapshotRequest { name, source_volume_id: volume_id, ..Default::default() }
                    .encode_to_vec()
            }
            "DeleteSnapshot" => {
                let snapshot_id =
                    client.create_snapshot(&name, &volume_id).await.expect("snapshot").snapshot_id;
                proto::DeleteSnapshotRequest { snapshot_id, ..Default::default() }.encode_to_vec()
            }
            "CreateVolumeGroupSnapshot" => {
                let source_volume_ids = self.volumes.to_vec();
                proto::CreateVolumeGroupSnapshotRequest { name, source_volume_ids, ..Default::default() }
                    .encode_to_vec()
            }
            "DeleteVolumeGroupSnapshot" => {
                let made = client.create_group(&name, &self.volumes).await.expect("group");
                proto::DeleteVolumeGroupSnapshotRequest {
                    group_snapshot_id: made.group_snapshot_id,
                    snapshot_ids: made.snapshots.into_iter().map(|member| member.snapshot_id).collect(),
                    ..Default::default()
                }
                .encode_to_vec()
            }
            "GetVolumeGroupSnapshot" => {
                let (group_snapshot_id, snapshot_ids) = self.group.clone();
                proto::GetVolumeGroupSnapshotRequest { group_snapshot_id, snapshot_ids, ..Default::default() }
                    .encode_to_vec()
            }
            "ValidateVolumeCapabilities" => {
                requests::validate(volume_id, vec![block_capability()]).encode_to_vec()
            }
            "GetMetadataDelta" => delta_of(&first, &second).encode_to_vec(),
            // The first field of both is the id.
            "GetSnapshot" | "GetMetadataAllocated" => requests::snapshot(first).encode_to_vec(),
            "ControllerGetVolume" | "ControllerGetVolumeHealth" => {
                requests::health(volume_id).encode_to_vec()
            }
            // Nothing need be in these.
            _ => Vec::new(),
        }
    }

    /// How the router ends a call that is given so long; by itself, for this client has no clock.
    async fn ask(&self, row: &Row, message: &[u8], deadline: Duration) -> Code {
        code_of(&self.cluster.router().socket, &row.path(), message, deadline).await
    }

    /// Volumes and snapshots that each node itself lists.
    async fn counts(&mut self) -> Vec<[i64; 2]> {
        let mut counts = Vec::new();
        for node in &mut self.cluster.nodes {
            let volumes = node.rig.client.volumes().await.expect("a list").len();
            let snapshots = node.rig.client.snapshots().await.expect("a list").len();
            counts.push([volumes as i64, snapshots as i64]);
        }
        counts
    }

    /// The other node answers whatever is asked of it.
    async fn others_are_well(&self, name: &str) {
        let (volume, taken) = &self.healthy;
        let mut client = self.cluster.client();
        let get = proto::ControllerGetVolumeRequest { volume_id: volume.clone() };
        well(client.controller.controller_get_volume(get)).await;
        well(client.allocated(taken, 0, 0)).await;
        let new = well(client.create_snapshot(name, volume)).await.snapshot_id;
        well(client.delta(taken, &new, 0, 0)).await;
        well(client.delete_snapshot(&new)).await;
        for source in [None, Some(from_snapshot(taken)), Some(from_volume(volume))] {
            let mut request =
                new_volume(&format!("{name} {}", source.is_some()), 16 << 20, block_capability());
            request.volume_content_source = source;
            let request = within(&[self.cluster.nodes[0].topology()], request);
            let made = well(client.create_volume(request)).await.volume_id;
            well(client.expand_volume(&made, 32 << 20)).await;
            well(client.delete_volume(&made)).await;
        }
    }

    /// A call that changes something, stopped in the middle.
    async fn change(&mut self, row: &Row, fault: Fault, [volumes, snapshots]: [i64; 2]) {
        let context = format!("{fault:?} in {}", row.call);
        // How many steps it has.
        let message = self.request(row).await;
        self.orders.count();
        assert_eq!(self.ask(row, &message, PATIENCE).await, Code::Ok, "{context}");
        let steps = self.orders.withdraw().len();
        assert!(steps > 0, "{context}: it changes nothing, or the driver was built without fail points");
        let message = self.request(row).await;
        let before = self.counts().await;
        self.orders.hold(held_step(fault, steps), "calls", HELD);
        let called = {
            let (socket, path) = (self.cluster.router().socket.clone(), row.path());
            let message = message.clone();
            // Long enough to come to the step also on a machine that is busy with other disks.
            tokio::spawn(async move { code_of(&socket, &path, &message, 4 * DEADLINE).await })
        };
        self.orders.reached(&called).await;
        fault.strike(&mut self.cluster.nodes[1]);
        let (code, ()) =
            tokio::join!(async { called.await.expect("a call") }, self.others_are_well(&context));
        assert!(GIVEN_UP.contains(&code), "{context}: {code:?}");
        // The client repeats the call, also while the node is away.
        let code = self.ask(row, &message, DEADLINE).await;
        assert!(GIVEN_UP.contains(&code), "{context}, once more: {code:?}");
        let _ = self.orders.withdraw();
        fault.mend(&mut self.cluster.nodes[1]).await;
        self.done(row, &message, &context).await;
        let after = self.counts().await;
        let expected = [before[0], [before[1][0] + volumes, before[1][1] + snapshots]];
        assert_eq!(after, expected, "{context}: volumes and snapshots of the healthy node and of the other");
        nothing_is_left(&self.cluster).await;
    }

    /// Makes a call again until it is answered, as sidecars do.
    async fn done(&self, row: &Row, message: &[u8], context: &str) {
        let until = Instant::now() + PATIENCE;
        loop {
            let code = self.ask(row, message, PATIENCE).await;
            if code == Code::Ok {
                break;
            }
            assert!(GIVEN_UP.contains(&code) && Instant::now() < until, "{context}, afterwards: {code:?}");
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        self.cluster.router().sees(2).await;
    }

    /// All calls that tell something at once, and streams in the middle.
    async fn tell(&mut self, fault: Fault) {
        let mut asked = Vec::new();
        for row in ROWS.iter().filter(|row| !matches!(row.what, What::Changes(_))) {
            asked.push((row, self.request(row).await));
        }
        let whole = self.cluster.client().allocated(&self.long, 0, 0).await.expect("whole");
        let mut narrow = Client::connect_narrow(&self.cluster.router().socket, 65535).await.expect("connect");
        let mut request = Request::new(question(&self.long));
        request.set_timeout(3 * DEADLINE);
        let mut stream =
            narrow.metadata.get_metadata_allocated(request).await.expect("a stream").into_inner();
        let end = |message: &proto::GetMetadataAllocatedResponse| {
            message.block_metadata.last().map_or(0, |tuple| tuple.byte_offset + tuple.size_bytes)
        };
        let mut last = end(&stream.message().await.expect("a message").expect("a message"));
        // The node has what it is asked, and does not answer: before it is killed too.
        match fault {
            Fault::Kill => Fault::Freeze.strike(&mut self.cluster.nodes[1]),
            Fault::Cut | Fault::Freeze => fault.strike(&mut self.cluster.nodes[1]),
        }
        let calls: Vec<_> = asked
            .iter()
            .map(|(row, message)| {
                let (socket, path) = (self.cluster.router().socket.clone(), row.path());
                let message = message.clone();
                tokio::spawn(async move { code_of(&socket, &path, &message, DEADLINE).await })
            })
            .collect();
        if let Fault::Kill = fault {
            tokio::time::sleep(DEADLINE / 4).await;
            fault.strike(&mut self.cluster.nodes[1]);
        }
        self.others_are_well("meanwhile").await;
        for (call, (row, _)) in calls.into_iter().zip(&asked) {
            let code = call.await.expect("a call");
            let may_be_answered = matches!(row.what, What::OfAll) && code == Code::Ok;
            assert!(GIVEN_UP.contains(&code) || may_be_answered, "{fault:?} in {}: {code:?}", row.call);
        }
        let read = async {
            loop {
                match stream.message().await {
                    Ok(Some(message)) => last = last.max(end(&message)),
                    Ok(None) => panic!("{fault:?}: a stream that was cut ends with OK"),
                    Err(status) => break status,
                }
            }
        };
        let ended = tokio::time::timeout(12 * DEADLINE, read).await;
        let status = ended.unwrap_or_else(|_| panic!("{fault:?}: a stream hangs"));
        assert!(GIVEN_UP.contains(&status.code()), "{fault:?}: {status}");
        fault.mend(&mut self.cluster.nodes[1]).await;
        for (row, message) in &asked {
            self.done(row, message, &format!("{fault:?} in {}", row.call)).await;
        }
        let rest = self.cluster.client().allocated(&self.long, last, 0).await.expect("the rest");
        let behind: Vec<_> = whole.tuples().filter(|tuple| tuple.offset >= last as u64).collect();
        assert!(!behind.is_empty() && behind.len() < whole.tuples().count(), "it was cut in the middle");
        assert_eq!(behind, rest.tuples().collect::<Vec<_>>(), "{fault:?}");
    }
}

/// All calls that tell something, and of those that change something each with a kill and with one of the others: a node that
/// is silent takes seconds to be given up. With DELTAPATH_TRANSFER_KILLS, each with each.
#[apply(root_cases)]
fn a_fault_in_the_middle_of_any_call(#[values(Fault::Kill, Fault::Cut, Fault::Freeze)] fault: Fault) {
    network::alone(move || async move {
        let mut scene = Scene::new().await;
        scene.tell(fault).await;
        let all = std::env::var_os("DELTAPATH_TRANSFER_KILLS").is_some();
        for (number, row) in ROWS.iter().enumerate() {
            let is_taken = all
                || match fault {
                    Fault::Kill => true,
                    Fault::Cut => number % 2 == 0,
                    Fault::Freeze => number % 2 == 1,
                };
            match row.what {
                What::Changes(change) if is_taken => scene.change(row, fault, change).await,
                _ => {}
            }
        }
        let Scene { mut cluster, .. } = scene;
        for volume in cluster.client().volumes().await.expect("ListVolumes") {
            let volume = volume.volume_id;
            let node = cluster.node_of(&volume);
            cluster.nodes[node].rig.detach(&volume).await;
        }
        cluster.finish();
    });
}
