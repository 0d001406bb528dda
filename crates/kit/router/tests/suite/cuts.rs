//! Promise: nodes whose link is cut, or who freeze, hold no call past its deadline and disturb no other node. Each driver is on a
//! host of its own, which a link leads to. That nothing is made twice or lost, whatever fails, is for `src/simulation`.

use std::path::Path;
use std::time::{Duration, Instant};

use csi_client::{block_capability, new_volume};
use nix::sys::signal::Signal;
use prost::Message;
use proto::{
    ControllerExpandVolumeRequest, ControllerGetVolumeRequest, CreateSnapshotRequest, DeleteVolumeRequest,
    GetMetadataAllocatedRequest, ListVolumesRequest,
};
use serve::relay::frame_bytes;
use serve::upstream::{self, Upstream, WideWindows};
use testkit::{PoolKind, network};
use tokio::net::UnixStream;
use tonic::{Code, Request};

use testkit::cluster::{Cluster, Node, eventually, patiently};

/// What a call is given, as sidecars give it.
const DEADLINE: Duration = Duration::from_secs(2);
/// How a call may end whose node is not there.
pub const GIVEN_UP: [Code; 4] = [Code::DeadlineExceeded, Code::Unavailable, Code::Cancelled, Code::Aborted];

/// What becomes of a node.
#[derive(Clone, Copy, Debug)]
pub enum Fault {
    Cut,
    Freeze,
    Kill,
}

impl Fault {
    pub fn strike(self, node: &mut Node) {
        match self {
            Fault::Cut => node.host.as_ref().expect("a host").cut(),
            Fault::Freeze => node.signal(Signal::SIGSTOP),
            Fault::Kill => node.rig.kill(),
        }
    }

    pub async fn mend(self, node: &mut Node) {
        match self {
            Fault::Cut => node.host.as_ref().expect("a host").mend(),
            Fault::Freeze => node.signal(Signal::SIGCONT),
            Fault::Kill => node.rig.start_again().await,
        }
    }
}

fn timed<T>(message: T) -> Request<T> {
    let mut request = Request::new(message);
    request.set_timeout(DEADLINE);
    request
}

/// How the router ends a call, or that it answers. The client has no clock of its own: only the router knows the deadline.
pub async fn code_of(socket: &Path, path: &str, message: &[u8], deadline: Duration) -> Code {
    let request = upstream::request(path, Some((Instant::now() + deadline).into())).expect("a request");
    let router = Upstream::new(WideWindows::of(0), upstream::OFTEN);
    let call = router.call(UnixStream::connect(socket), request, frame_bytes(message));
    // No slow machine, and sooner than the pings of a connection find that it is dead.
    let answered = tokio::time::timeout((4 * deadline).max(Duration::from_secs(8)), call).await;
    let (head, _) = answered.unwrap_or_else(|_| panic!("{path} hangs")).expect("an answer");
    // An answer has its status behind its messages.
    let code = head.headers.get("grpc-status").and_then(|code| code.to_str().ok()?.parse::<i32>().ok());
    code.map_or(Code::Ok, Code::from)
}

/// A call whose node is not there: the router itself ends it in time, and says why.
pub async fn is_given_up(cluster: &Cluster, path: &str, message: impl Message) {
    let code = code_of(&cluster.router().socket, path, &message.encode_to_vec(), DEADLINE).await;
    // Of what is made, an earlier call may be under way.
    let may_be_aborted = path.contains("/Create");
    assert!(GIVEN_UP.contains(&code) && (code != Code::Aborted || may_be_aborted), "{path}: {code:?}");
}

#[apply(root_cases)]
fn a_node_that_is_cut_off_or_frozen_holds_no_call_past_its_deadline(
    #[values(Fault::Cut, Fault::Freeze)] fault: Fault,
) {
    network::alone(move || async move {
        let mut cluster = Cluster::start_on_hosts(PoolKind::Dir, 2, &[], &["--node-timeout", "1s"]).await;
        let (here, there) = (cluster.volume_on(0, "here").await, cluster.volume_on(1, "there").await);
        let kept = cluster.volume_on(1, "kept").await;
        let mut client = cluster.client();
        let snapshot = client.create_snapshot("there", &there).await.expect("CreateSnapshot").snapshot_id;
        fault.strike(&mut cluster.nodes[1]);
        let mut controller = client.controller.clone();
        // At once, when nobody knows yet, and later.
        for round in 0..2 {
            let id = || there.clone();
            let get = ControllerGetVolumeRequest { volume_id: id() };
            is_given_up(&cluster, "/csi.v1.Controller/ControllerGetVolume", get).await;
            let new = CreateSnapshotRequest {
                name: format!("more-{round}"),
                source_volume_id: id(),
                ..Default::default()
            };
            is_given_up(&cluster, "/csi.v1.Controller/CreateSnapshot", new).await;
            let grow = ControllerExpandVolumeRequest {
                volume_id: id(),
                capacity_range: Some(proto::CapacityRange { required_bytes: 32 << 20, limit_bytes: 0 }),
                volume_capability: Some(block_capability()),
                ..Default::default()
            };
            is_given_up(&cluster, "/csi.v1.Controller/ControllerExpandVolume", grow).await;
            let delete = DeleteVolumeRequest { volume_id: id(), ..Default::default() };
            is_given_up(&cluster, "/csi.v1.Controller/DeleteVolume", delete).await;
            let stream = GetMetadataAllocatedRequest { snapshot_id: snapshot.clone(), ..Default::default() };
            is_given_up(&cluster, "/csi.v1.SnapshotMetadata/GetMetadataAllocated", stream).await;
            // The healthy node is none the worse for it.
            let get = ControllerGetVolumeRequest { volume_id: here.clone() };
            controller.controller_get_volume(timed(get)).await.expect("a healthy node");
            client.create_snapshot(&format!("here-{round}"), &here).await.expect("a healthy node");
        }
        cluster.router().sees(1).await;
        cluster.volume_on(0, "meanwhile").await;
        let listed = controller.list_volumes(timed(ListVolumesRequest::default())).await.expect("the others");
        assert_eq!(listed.into_inner().entries.len(), 2);
        fault.mend(&mut cluster.nodes[1]).await;
        cluster.router().sees(2).await;
        let get = ControllerGetVolumeRequest { volume_id: kept };
        controller.controller_get_volume(timed(get)).await.expect("it goes on");
        // What was asked in vain may have been done or not, and is right in both cases when it is asked again.
        let get = ControllerGetVolumeRequest { volume_id: there.clone() };
        match controller.controller_get_volume(timed(get)).await {
            // A call that was given up may still be at work there.
            Ok(_) => patiently!(client.delete_volume(&there)).expect("DeleteVolume"),
            Err(status) => assert_eq!(status.code(), Code::NotFound, "{status}"),
        }
        client.allocated(&snapshot, 0, 0).await.expect("a stream");
        cluster.finish();
    });
}

/// The channel to a node keeps the deadline of a call too, and has called the node unreachable when it was the first to end it.
#[apply(device_test)]
async fn a_call_that_meets_its_deadline_makes_its_node_no_lost_one() {
    const CALLS: u64 = 16;
    let mut cluster = Cluster::start(PoolKind::Dir, 1, &[]).await;
    let volume_id = cluster.volume_on(0, "slow").await;
    Fault::Freeze.strike(&mut cluster.nodes[0]);
    let message = ControllerGetVolumeRequest { volume_id }.encode_to_vec();
    let socket = &cluster.router().socket;
    let calls = (0..CALLS).map(|call| {
        let deadline = Duration::from_micros(200_000 + 5_300 * call);
        code_of(socket, "/csi.v1.Controller/ControllerGetVolume", &message, deadline)
    });
    let codes = futures_util::future::join_all(calls).await;
    Fault::Freeze.mend(&mut cluster.nodes[0]).await;
    // The router's own server keeps the deadline as well, and calls it a cancelled call.
    assert!(codes.iter().all(|code| [Code::DeadlineExceeded, Code::Cancelled].contains(code)), "{codes:?}");
    assert!(!cluster.router().running.log().contains("a node is unreachable"));
    cluster.finish();
}

/// A retry that crosses a partition: the first node has the volume, its answer is lost, and the router that is asked again has
/// never heard of it.
#[test_with::root]
#[test]
fn a_volume_made_twice_across_a_partition_is_found_and_the_one_in_use_stays() {
    network::alone(|| async {
        let mut cluster = Cluster::start_on_hosts(PoolKind::Dir, 2, &[], &["--node-timeout", "1s"]).await;
        let request = || new_volume("twice", 16 << 20, block_capability());
        // By the node alone, as if the arbiter had forgotten which node it chose.
        let first =
            cluster.nodes[0].rig.client.create_volume(request()).await.expect("CreateVolume").volume_id;
        cluster.nodes[0].host.as_ref().expect("a host").cut();
        let fresh = cluster.another("fresh", &cluster.endpoints(), &["--node-timeout", "1s"], 1).await;
        let mut client = fresh.client.clone();
        let second = patiently!(client.create_volume(request())).expect("the other node").volume_id;
        assert_eq!(cluster.node_of(&second), 1);
        cluster.volume_on(1, "once").await;
        cluster.nodes[0].host.as_ref().expect("a host").mend();
        let counted = "deltapath_router_volumes_made_twice_total 1\n";
        eventually("it is found", async || fresh.get("/metrics").await.contains(counted)).await;
        let log = fresh.running.log();
        assert!(log.contains(&first) && log.contains(&second) && log.contains("exists twice"), "{log}");
        let error = client.create_volume(request()).await.expect_err("which of them?");
        assert_eq!(error.code(), Code::FailedPrecondition, "{error}");
        // Both are there until an operator says which one goes, and the one in use does not.
        cluster.nodes[1].rig.attach(&second).await;
        let delete = |id: &str| {
            let program = testkit::program("deltapath-router");
            let endpoint = format!("--endpoint=unix://{}", fresh.socket.display());
            let done = std::process::Command::new(program).args(["delete-volume", id, &endpoint]).output();
            let done = done.expect("run");
            (done.status.code(), String::from_utf8_lossy(&done.stderr).into_owned())
        };
        let (code, said) = delete(&second);
        assert!(code == Some(1) && said.contains("FailedPrecondition"), "{code:?}: {said}");
        assert_eq!(delete(&first), (Some(0), String::new()));
        assert_eq!(client.create_volume(request()).await.expect("one is left").volume_id, second);
        cluster.nodes[1].rig.detach(&second).await;
        fresh.finish();
        cluster.finish();
    });
}
