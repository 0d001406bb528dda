//! Promise: two nodes that say they are the same one are named, and nothing is deleted or made because of them.

use csi_client::{block_capability, new_volume};
use prost::Message;
use proto::node::{ChooseResponse, DescribeResponse};
use testkit::cluster::{Cluster, within};
use testkit::{MIB, PoolKind};
use tonic::Code;

use crate::strangers::{KEY, described, play};

#[apply(device_test)]
async fn copies_of_a_data_directory_are_named_and_nothing_is_deleted() {
    let mut cluster = Cluster::start(PoolKind::Dir, 2, &[]).await;
    let volume = cluster.volume_on(0, "lives").await;
    let (key, name) = (cluster.nodes[0].key.clone(), cluster.nodes[0].name());
    let copied = DescribeResponse { process: "other".to_owned(), ..described(&key, &name) }.encode_to_vec();
    // Its DeleteVolume is OK, as that of a copy that never had the volume.
    let answers = move |path: &str, _| if path.ends_with("/Describe") { copied.clone() } else { Vec::new() };
    let address = play(&cluster, &key, "copy", answers).await;
    let endpoints = [vec![address.clone()], cluster.endpoints()].concat();
    cluster.route(&endpoints, &[], 1).await;
    let mut client = cluster.client();
    let error = client.delete_volume(&volume).await.expect_err("nobody knows on which");
    assert_eq!(error.code(), Code::FailedPrecondition, "{error}");
    for named in [&address, &cluster.nodes[0].address, &key] {
        assert!(error.status.message().contains(named.as_str()), "{named} in {error}");
    }
    cluster.volume_on(1, "other").await;
    assert_eq!(cluster.nodes[0].rig.client.volumes().await.expect("ListVolumes").len(), 1);
    cluster.finish();
}

#[apply(device_test)]
async fn two_nodes_with_one_node_id_are_named_and_get_nothing_new() {
    let mut cluster = Cluster::start(PoolKind::Dir, 2, &[]).await;
    let volume = cluster.volume_on(0, "before").await;
    let name = cluster.nodes[0].name();
    let twin = described(KEY, &name).encode_to_vec();
    // It may be the arbiter of a name.
    let chosen = ChooseResponse { key: cluster.nodes[1].key.clone(), ..Default::default() }.encode_to_vec();
    let answers = move |path: &str, _| match path.rsplit('/').next() {
        Some("Describe") => twin.clone(),
        Some("Choose") => chosen.clone(),
        _ => Vec::new(),
    };
    let address = play(&cluster, KEY, "twin", answers).await;
    let endpoints = [vec![address.clone()], cluster.endpoints()].concat();
    cluster.route(&endpoints, &[], 3).await;
    let mut client = cluster.client();
    let request = new_volume("new", 16 * MIB, block_capability());
    let request = within(&[cluster.nodes[0].topology()], request);
    let error = client.create_volume(request).await.expect_err("on which of them?");
    assert_eq!(error.code(), Code::FailedPrecondition, "{error}");
    for named in [&address, &cluster.nodes[0].address, &name] {
        assert!(error.status.message().contains(named.as_str()), "{named} in {error}");
    }
    // What is there stays reachable, and others get what fits anywhere.
    let any = client.create_volume(new_volume("any", 16 * MIB, block_capability())).await.expect("elsewhere");
    assert_eq!(cluster.node_of(&any.volume_id), 1);
    client.delete_volume(&volume).await.expect("its key says where it is");
    cluster.finish();
}
