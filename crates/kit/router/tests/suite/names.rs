//! Promise: a name is one object in the whole cluster, made where the scheduler, its source or the room that is left say.

use csi_client::{block_capability, from_snapshot, from_volume, new_volume};
use proto::Topology;
use testkit::{GIB, PoolKind};
use tokio::task::JoinHandle;
use tonic::Code;

use testkit::cluster::{Cluster, patiently, within};

#[apply(device_test)]
async fn a_name_is_found_again_on_whichever_node_has_it() {
    let cluster = Cluster::start(PoolKind::Dir, 3, &[]).await;
    let mut client = cluster.client();
    let request = |name: &str| new_volume(name, 16 << 20, block_capability());
    for node in 0..3 {
        let name = format!("on-{node}");
        let id = cluster.volume_on(node, &name).await;
        let again = client.create_volume(request(&name)).await.expect("without a topology");
        assert_eq!(again.volume_id, id);
        let other = client.create_volume(new_volume(&name, GIB, block_capability())).await;
        assert_eq!(other.expect_err("another size").code(), Code::AlreadyExists);
        let elsewhere = within(&[cluster.nodes[(node + 1) % 3].topology()], request(&name));
        let error = client.create_volume(elsewhere).await.expect_err("another place");
        assert_eq!(error.code(), Code::AlreadyExists, "{error}");
        // The names of snapshots and groups too.
        let snapshot = client.create_snapshot("daily", &id).await;
        let group = client.create_group("weekly", std::slice::from_ref(&id)).await;
        match node {
            0 => {
                snapshot.expect("the first of its name");
                group.expect("the first of its name");
            }
            _ => {
                assert_eq!(snapshot.expect_err("of another volume").code(), Code::AlreadyExists);
                assert_eq!(group.expect_err("of another volume").code(), Code::AlreadyExists);
            }
        }
    }
    let both = [client.create_volume(request("on-0")).await, client.create_volume(request("on-1")).await];
    let both = both.map(|volume| volume.expect("found").volume_id);
    let error = client.create_group("both", &both).await.expect_err("on two nodes");
    assert_eq!(error.code(), Code::FailedPrecondition, "{error}");
    for node in 0..2 {
        assert!(error.status.message().contains(&cluster.nodes[node].name()), "{error}");
    }
    cluster.finish();
}

/// Calls for one name, `call(WHICH, ROUTER)`, are made at two routers at once: one wins, also later and at either router. Which one, and its object.
async fn one_of_two_wins(
    call: &impl Fn(usize, usize) -> JoinHandle<csi_client::Result<String>>,
) -> (usize, String) {
    let at_once = [call(0, 0), call(1, 1)];
    let mut answers = Vec::new();
    for answer in at_once {
        answers.push(answer.await.expect("a client"));
    }
    let winner = answers.iter().position(Result::is_ok).unwrap_or_else(|| panic!("none: {answers:?}"));
    let id = answers[winner].as_ref().expect("made").clone();
    let error = answers.swap_remove(1 - winner).expect_err("two of one name");
    assert!(matches!(error.code(), Code::AlreadyExists | Code::Aborted), "{error}");
    for router in 0..2 {
        let again = call(winner, router).await.expect("a client");
        assert_eq!(again.expect("found again"), id);
        let error = call(1 - winner, router).await.expect("a client").expect_err("another's name");
        assert_eq!(error.code(), Code::AlreadyExists, "{error}");
    }
    (winner, id)
}

/// The calls for one name that allow one node each, or have their source on one: one is made, whichever router is asked.
#[apply(device_test)]
async fn two_routers_at_once_make_one_volume_where_each_call_allows_one_node() {
    const NAMES: usize = 20;
    let cluster = Cluster::start(PoolKind::Dir, 3, &[]).await;
    let second = cluster.another("second", &cluster.endpoints(), &[], 3).await;
    let sources = [cluster.volume_on(0, "one").await, cluster.volume_on(1, "two").await];
    let request = |name: &str, which: usize, has_source: bool| {
        let mut request = new_volume(name, 16 << 20, block_capability());
        if has_source {
            request.volume_content_source = Some(from_volume(&sources[which]));
            return request;
        }
        within(&[cluster.nodes[which].topology()], request)
    };
    for number in 0..NAMES {
        let name = format!("name-{number}");
        let call = |which: usize, router: usize| {
            let mut client = [cluster.client(), second.client.clone()][router].clone();
            let request = request(&name, which, number % 2 == 1);
            tokio::spawn(async move { client.create_volume(request).await.map(|made| made.volume_id) })
        };
        one_of_two_wins(&call).await;
        // A node that refuses to make a volume leaves its name to the others.
        let name = format!("refused-{number}");
        let mut refused = request(&name, 0, false);
        refused.parameters = [("no".to_owned(), "such".to_owned())].into();
        let error = cluster.client().create_volume(refused).await.expect_err("no such parameter");
        assert_eq!(error.code(), Code::InvalidArgument, "{error}");
        let made = second.client.clone().create_volume(request(&name, 1, false)).await;
        assert_eq!(cluster.node_of(&made.expect("the name is free").volume_id), 1);
    }
    second.finish();
    cluster.finish();
}

/// Snapshots and groups of one name, of volumes on two nodes: one is made, and the call for it goes on to find it.
#[apply(device_test)]
async fn two_routers_at_once_make_one_snapshot_of_a_name() {
    const NAMES: usize = 20;
    let cluster = Cluster::start(PoolKind::Dir, 3, &[]).await;
    let second = cluster.another("second", &cluster.endpoints(), &[], 3).await;
    let sources = [cluster.volume_on(0, "one").await, cluster.volume_on(1, "two").await];
    for number in 0..NAMES {
        let name = format!("name-{number}");
        let is_group = number % 2 == 1;
        let call = |which: usize, router: usize| {
            let (mut client, name) =
                ([cluster.client(), second.client.clone()][router].clone(), name.clone());
            let source = sources[which].clone();
            tokio::spawn(async move {
                match is_group {
                    true => client.create_group(&name, &[source]).await.map(|group| group.group_snapshot_id),
                    false => client.create_snapshot(&name, &source).await.map(|made| made.snapshot_id),
                }
            })
        };
        let (winner, id) = one_of_two_wins(&call).await;
        // A name is free as soon as nothing has it.
        if is_group {
            continue;
        }
        cluster.client().delete_snapshot(&id).await.expect("DeleteSnapshot");
        let id = call(1 - winner, 0).await.expect("a client").expect("it is free");
        cluster.client().delete_snapshot(&id).await.expect("DeleteSnapshot");
    }
    second.finish();
    cluster.finish();
}

#[apply(device_cases)]
async fn volumes_asked_at_once_are_spread(#[values(GIB, 4 << 20)] bytes: i64) {
    const VOLUMES: usize = 12;
    let cluster = Cluster::start(PoolKind::Dir, 3, &[]).await;
    let asked: Vec<_> = (0..VOLUMES)
        .map(|number| {
            let mut client = cluster.client();
            let request = new_volume(&format!("volume-{number}"), bytes, block_capability());
            tokio::spawn(async move { client.create_volume(request).await.expect("CreateVolume").volume_id })
        })
        .collect();
    let mut on = [0; 3];
    for asked in asked {
        on[cluster.node_of(&asked.await.expect("a client"))] += 1;
    }
    assert!(on.iter().all(|count| (3..=5).contains(count)), "{on:?}");
    cluster.finish();
}

#[apply(device_test)]
async fn volumes_go_where_most_room_is_left_and_to_the_next_when_there_is_none() {
    let cluster = Cluster::start(PoolKind::Xfs, 2, &["--overcommit", "1"]).await;
    let mut client = cluster.client();
    let free = |client: &csi_client::Client| {
        let mut controller = client.controller.clone();
        async move {
            let answer = controller.get_capacity(proto::GetCapacityRequest::default()).await;
            answer.expect("GetCapacity").into_inner()
        }
    };
    // A pool of 8 GiB each, a little of which is the filesystem's own.
    let empty = free(&client).await;
    assert!(empty.available_capacity > 15 * GIB, "{empty:?}");
    assert!(empty.maximum_volume_size.is_some_and(|most| most < 8 * GIB), "{empty:?}");
    let mut sized = async |name: &str, gib: i64| {
        // Told by the nodes every few seconds.
        tokio::time::sleep(std::time::Duration::from_secs(3)).await;
        client.create_volume(new_volume(name, gib * GIB, block_capability())).await
    };
    let first = sized("a", 5).await.expect("room").volume_id;
    let other = 1 - cluster.node_of(&first);
    // 2.9 GiB are left there, and on the other node 7.9, 6.9, 3.9 and 0.9.
    for (name, gib, is_other) in [("b", 1, true), ("c", 3, true), ("d", 3, true), ("e", 2, false)] {
        let volume = sized(name, gib).await.expect("room").volume_id;
        assert_eq!(cluster.node_of(&volume) == other, is_other, "{name}");
    }
    let error = sized("f", 3).await.expect_err("3 GiB are left nowhere");
    assert_eq!(error.code(), Code::ResourceExhausted, "{error}");
    cluster.finish();
}

#[apply(device_test)]
async fn a_source_decides_where_its_copies_are() {
    let cluster = Cluster::start(PoolKind::Dir, 2, &[]).await;
    let mut client = cluster.client();
    let volume = cluster.volume_on(1, "source").await;
    let snapshot = client.create_snapshot("source", &volume).await.expect("CreateSnapshot").snapshot_id;
    let [here, there] = [0, 1].map(|node: usize| cluster.nodes[node].topology());
    let copy = |name: &str, source| {
        let mut request = new_volume(name, 16 << 20, block_capability());
        request.volume_content_source = Some(source);
        request
    };
    for (name, source) in [("clone", from_volume(&volume)), ("restore", from_snapshot(&snapshot))] {
        let made = client.create_volume(copy(name, source.clone())).await.expect("CreateVolume");
        assert_eq!(cluster.node_of(&made.volume_id), 1);
        let both = within(&[here.clone(), there.clone()], copy(&format!("{name}-both"), source.clone()));
        let made = client.create_volume(both).await.expect("one of them will do");
        assert_eq!(cluster.node_of(&made.volume_id), 1);
        let elsewhere = within(std::slice::from_ref(&here), copy(&format!("{name}-here"), source));
        let made = patiently!(client.create_volume(elsewhere.clone())).expect("it is copied");
        assert_eq!(cluster.node_of(&made.volume_id), 0);
    }
    // What is gone is gone, and not perhaps elsewhere.
    client.delete_snapshot(&snapshot).await.expect("DeleteSnapshot");
    let gone = within(&[there], copy("late", from_snapshot(&snapshot)));
    assert_eq!(client.create_volume(gone).await.expect_err("it is gone").code(), Code::NotFound);
    let nowhere = within(
        &[Topology { segments: [("topology.deltapath.csi.dev/node".to_owned(), "x".to_owned())].into() }],
        new_volume("nowhere", 16 << 20, block_capability()),
    );
    let error = client.create_volume(nowhere).await.expect_err("no such node");
    assert_eq!(error.code(), Code::ResourceExhausted, "{error}");
    cluster.finish();
}

/// One name, given twice while a node was away: who asks again for what was acknowledged gets it.
#[apply(device_test)]
async fn what_was_acknowledged_is_found_again_beside_another_of_its_name() {
    let mut cluster = Cluster::start(PoolKind::Dir, 2, &[]).await;
    let volumes = [cluster.volume_on(0, "one").await, cluster.volume_on(1, "two").await];
    let mut client = cluster.client();
    let mut ask = async |which: usize| {
        let of = &volumes[which];
        let snapshot = patiently!(client.create_snapshot("same", of)).expect("CreateSnapshot").snapshot_id;
        let group = patiently!(client.create_group("same", std::slice::from_ref(of))).expect("a group");
        (snapshot, group.group_snapshot_id)
    };
    let first = ask(0).await;
    cluster.nodes[0].rig.kill();
    cluster.router().sees(1).await;
    let second = ask(1).await;
    cluster.nodes[0].rig.start_again().await;
    cluster.router().sees(2).await;
    assert_eq!([ask(0).await, ask(1).await], [first, second]);
    cluster.finish();
}
