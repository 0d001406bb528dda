//! Promise: damage of the source's disk, or on the way, is found, and no volume holds it.

use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use csi_client::from_snapshot;
use testkit::cluster::{Cluster, patiently};
use testkit::{BLOCK, PoolKind};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tonic::Code;

use crate::transfers::{BLOCKS, assert_same, data, nothing_is_left, on, written};

/// A byte on the source's disk that changed since it was hashed.
#[apply(device_test)]
async fn damaged_data_is_found_and_becomes_no_volume() {
    // This pool hashes while it copies.
    let mut cluster = Cluster::start(PoolKind::Dir, 2, &[]).await;
    let mut client = cluster.client();
    let (origin, _, content) = written(&mut cluster, 4).await;
    let snapshot = client.create_snapshot("first", &origin).await.expect("CreateSnapshot").snapshot_id;
    let path = data(&cluster, 0, "snapshots", &snapshot);
    let file = std::fs::File::options().read(true).write(true).open(path).expect("open");
    let block = *content.blocks.keys().nth(700).expect("a block");
    let mut byte = [0];
    file.read_exact_at(&mut byte, block * BLOCK + 100).expect("read");
    file.write_all_at(&[byte[0] ^ 1], block * BLOCK + 100).expect("write");
    let request = on(&cluster, 1, "restored", from_snapshot(&snapshot));
    let error = patiently!(client.create_volume(request.clone())).expect_err("it is damaged");
    assert_eq!(error.code(), Code::DataLoss, "{error}");
    assert!(error.status.message().contains(&format!("bytes {} to", block * BLOCK)), "{error}");
    nothing_is_left(&cluster).await;
    assert!(cluster.nodes[1].rig.client.volumes().await.expect("ListVolumes").is_empty());
    // Mended, it is restored.
    file.write_all_at(&byte, block * BLOCK + 100).expect("write");
    let made = patiently!(client.create_volume(request.clone())).expect("CreateVolume");
    content.assert_equals(&data(&cluster, 1, "volumes", &made.volume_id), 0, BLOCKS);
    cluster.nodes[0].rig.detach(&origin).await;
    cluster.finish();
}

/// A proxy that flips one bit of each connection, the one after this number of bytes from the server; the count of flipped bits.
async fn flipping(port: u16, after: usize) -> (u16, Arc<AtomicUsize>) {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("bind");
    let address = listener.local_addr().expect("an address").port();
    let flipped = Arc::new(AtomicUsize::new(0));
    let count = flipped.clone();
    tokio::spawn(async move {
        while let Ok((client, _)) = listener.accept().await {
            let count = count.clone();
            tokio::spawn(async move {
                let Ok(server) = tokio::net::TcpStream::connect(("127.0.0.1", port)).await else { return };
                let ((mut from_client, mut to_client), (mut from_server, mut to_server)) =
                    (client.into_split(), server.into_split());
                tokio::spawn(async move {
                    let _ = tokio::io::copy(&mut from_client, &mut to_server).await;
                    let _ = to_server.shutdown().await;
                });
                let (mut passed, mut buffer) = (0, vec![0; 64 << 10]);
                while let Ok(read @ 1..) = from_server.read(&mut buffer).await {
                    if passed < after && passed + read >= after {
                        buffer[read - 1] ^= 1;
                        count.fetch_add(1, Ordering::Relaxed);
                    }
                    passed += read;
                    if to_client.write_all(&buffer[..read]).await.is_err() {
                        return;
                    }
                }
            });
        }
    });
    (address, flipped)
}

#[apply(device_test)]
async fn bits_that_change_on_the_way_cost_a_connection_and_no_byte() {
    let mut cluster = Cluster::start(PoolKind::Dir, 2, &[]).await;
    let (origin, _, _) = written(&mut cluster, 16).await;
    let snapshot = cluster.client().create_snapshot("first", &origin).await.expect("snapshot").snapshot_id;
    let (port, flipped) = flipping(cluster.nodes[0].port, 3 << 20).await;
    let endpoints = [format!("127.0.0.1:{port}"), format!("127.0.0.1:{}", cluster.nodes[1].port)];
    cluster.route(&endpoints, &[], 2).await;
    let request = on(&cluster, 1, "restored", from_snapshot(&snapshot));
    let made = patiently!(cluster.client().create_volume(request.clone())).expect("CreateVolume");
    assert_same(&data(&cluster, 0, "snapshots", &snapshot), &data(&cluster, 1, "volumes", &made.volume_id));
    assert!(flipped.load(Ordering::Relaxed) >= 3, "{flipped:?}");
    cluster.nodes[0].rig.detach(&origin).await;
    nothing_is_left(&cluster).await;
    cluster.finish();
}
