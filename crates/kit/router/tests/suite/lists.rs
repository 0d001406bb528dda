//! Promise: the lists of all nodes are one, in pages whose tokens keep their place while nodes come and go.

use std::collections::BTreeSet;

use csi_client::Client;
use proto::{ListSnapshotsRequest, ListVolumesRequest};
use testkit::PoolKind;
use tonic::Code;

use testkit::cluster::{Cluster, eventually};

async fn volumes(client: &mut Client, max_entries: i32, token: &str) -> (Vec<String>, String) {
    let request = ListVolumesRequest { max_entries, starting_token: token.to_owned() };
    let page = client.controller.list_volumes(request).await.expect("ListVolumes").into_inner();
    let ids = page.entries.into_iter().filter_map(|entry| Some(entry.volume?.volume_id)).collect();
    (ids, page.next_token)
}

async fn snapshots(client: &mut Client, max_entries: i32, token: &str) -> (Vec<String>, String) {
    let request =
        ListSnapshotsRequest { max_entries, starting_token: token.to_owned(), ..Default::default() };
    let page = client.controller.list_snapshots(request).await.expect("ListSnapshots").into_inner();
    let ids = page.entries.into_iter().filter_map(|entry| Some(entry.snapshot?.snapshot_id)).collect();
    (ids, page.next_token)
}

#[apply(device_test)]
async fn pages_of_any_size_hold_every_entry_once() {
    let cluster = Cluster::start(PoolKind::Dir, 3, &[]).await;
    let mut client = cluster.client();
    let (mut all, mut taken) = (BTreeSet::new(), BTreeSet::new());
    // The second node has none.
    for (node, count) in [(0, 3), (2, 4)] {
        for number in 0..count {
            let id = cluster.volume_on(node, &format!("volume-{node}-{number}")).await;
            let name = format!("snapshot-{node}-{number}");
            taken.insert(client.create_snapshot(&name, &id).await.expect("CreateSnapshot").snapshot_id);
            all.insert(id);
        }
    }
    for size in [1, 2, 3, 4, 6, 7, 8, 0] {
        for (expected, is_volumes) in [(&all, true), (&taken, false)] {
            let mut token = String::new();
            let mut listed = Vec::new();
            loop {
                let page = match is_volumes {
                    true => volumes(&mut client, size, &token).await,
                    false => snapshots(&mut client, size, &token).await,
                };
                assert!(size == 0 || page.0.len() <= size as usize, "{size}: {page:?}");
                listed.extend(page.0);
                token = page.1;
                if token.is_empty() {
                    break;
                }
                assert!(listed.len() <= all.len(), "it does not end: {listed:?}");
            }
            assert_eq!(listed.len(), expected.len(), "in pages of {size}");
            assert_eq!(&listed.into_iter().collect::<BTreeSet<_>>(), expected, "in pages of {size}");
        }
    }
    for bad in ["0", "4294967295", "after-1", "node-1"] {
        let request = ListVolumesRequest { max_entries: 1, starting_token: bad.to_owned() };
        let status = client.controller.list_volumes(request).await.expect_err("no token of ours");
        assert_eq!(status.code(), Code::Aborted, "{bad}: {status}");
    }
    let request = ListVolumesRequest { max_entries: -1, ..Default::default() };
    let status = client.controller.list_volumes(request).await.expect_err("no number of entries");
    assert_eq!(status.code(), Code::InvalidArgument, "{status}");
    cluster.finish();
}

#[apply(device_test)]
async fn a_token_outlives_the_node_that_it_is_of() {
    let mut cluster = Cluster::start(PoolKind::Dir, 3, &[]).await;
    let mut client = cluster.client();
    // In the order of lists.
    cluster.nodes.sort_by(|a, b| a.key.cmp(&b.key));
    let mut ids = Vec::new();
    for node in 0..3 {
        let mut own = vec![
            cluster.volume_on(node, &format!("a-{node}")).await,
            cluster.volume_on(node, &format!("b-{node}")).await,
        ];
        own.sort();
        ids.push(own);
    }
    let (first, within) = volumes(&mut client, 3, "").await;
    assert_eq!(first, [&ids[0][..], &ids[1][..1]].concat());
    let (_, behind) = volumes(&mut client, 2, "").await;
    // The token of the second node's first volume, while the node is away, and when it is back.
    cluster.nodes[1].rig.kill();
    cluster.router().sees(2).await;
    assert_eq!(volumes(&mut client, 0, &within).await, (ids[2].clone(), String::new()));
    assert_eq!(volumes(&mut client, 0, &behind).await, (ids[2].clone(), String::new()));
    cluster.nodes[1].rig.start_again().await;
    cluster.router().sees(3).await;
    let rest = [&ids[1][1..], &ids[2][..]].concat();
    assert_eq!(volumes(&mut client, 0, &within).await, (rest, String::new()));
    // The same for the first node, which is behind us: its absence changes nothing.
    cluster.nodes[0].rig.kill();
    cluster.router().sees(2).await;
    assert_eq!(volumes(&mut client, 0, &behind).await, ([&ids[1][..], &ids[2][..]].concat(), String::new()));
    cluster.nodes[0].rig.start_again().await;
    cluster.router().sees(3).await;
    cluster.finish();
}

/// Another node may have the address by now, and may not have been seen yet: its snapshots would be missing.
#[apply(device_test)]
async fn a_list_of_snapshots_waits_for_the_former_address_of_a_node_that_has_moved() {
    let mut cluster = Cluster::start(PoolKind::Dir, 1, &[]).await;
    let (former, port) = (cluster.nodes[0].address.clone(), testkit::free_port());
    let endpoints = [former.clone(), format!("127.0.0.1:{port}")];
    let fresh = cluster.another("fresh", &endpoints, &[], 1).await;
    cluster.nodes[0].rig.terminate();
    cluster.nodes[0].start_again_with(&[&format!("--router-listen=127.0.0.1:{port}")]).await;
    let mut client = fresh.client.clone();
    let moved = format!("{former}, which does not answer");
    eventually("its former address is missed", async || {
        fresh.sees(1).await;
        let listed = client.snapshots().await;
        let status = listed.expect_err("what is at the former address is not known").status;
        assert_eq!(status.code(), Code::Unavailable, "{status}");
        status.message().contains(&moved) && status.message().contains("at another address now")
    })
    .await;
    fresh.finish();
    cluster.finish();
}
