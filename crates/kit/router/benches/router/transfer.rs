//! Row d: a volume that is copied to another node, beside a bare copy over mutual TLS, and the two things that neither can be
//! quicker than: a stream of the same bytes over mutual TLS, and writing them to the target's pool.

use std::fs::File;
use std::io::Write;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use std::time::{Duration, Instant};

use csi_client::{block_capability, from_snapshot, new_volume};
use files::AlignedBuffer;
use rustls::pki_types::ServerName;
use serve::identity::Role;
use testkit::PoolKind;
use testkit::bench::{median, row, write_direct};
use testkit::cluster::{Cluster, patiently, within};
use testkit::played::tls;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::mpsc;
use tokio_rustls::{TlsAcceptor, TlsConnector};

/// Bytes of data in the volume, and its size.
const DATA: u64 = 1 << 30;
const SIZE: i64 = 2 << 30;
const PIECE: usize = 1 << 20;
const BLOCK: usize = 4096;
const ROUNDS: usize = 5;

/// Both ends of a connection from the second node to the first.
fn ends(cluster: &Cluster) -> (TlsAcceptor, TlsConnector) {
    let of = |node: usize| {
        let node = &cluster.nodes[node];
        tls(cluster.dir.path(), &node.name(), Role::Node(node.key.clone()))
    };
    (of(0).server().expect("loaded").into(), of(1).client().expect("loaded").into())
}

fn name() -> ServerName<'static> {
    ServerName::try_from("node").expect("a name")
}

/// The same bytes over a connection with the nodes' certificates, which nobody looks at.
async fn stream(cluster: &Cluster) -> Duration {
    let (acceptor, connector) = ends(cluster);
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("listen");
    let address = listener.local_addr().expect("an address");
    let sending = tokio::spawn(async move {
        let (stream, _) = listener.accept().await.expect("accept");
        let mut stream = acceptor.accept(stream).await.expect("a handshake");
        let mut piece = vec![0; PIECE];
        fastrand::Rng::with_seed(1).fill(&mut piece);
        for _ in 0..DATA / PIECE as u64 {
            stream.write_all(&piece).await.expect("send");
        }
        stream.shutdown().await.expect("shut down");
    });
    let connection = TcpStream::connect(address).await.expect("connect");
    let mut connection = connector.connect(name(), connection).await.expect("a handshake");
    let (mut buffer, mut left) = (vec![0; PIECE], DATA as usize);
    let begun = Instant::now();
    while left > 0 {
        left -= connection.read(&mut buffer).await.expect("receive");
    }
    let took = begun.elapsed();
    sending.await.expect("the sender");
    took
}

/// A bare copy over such a connection: read ahead, sent, hashed block by block, written past the page cache while more arrives,
/// and synced.
async fn bare_copy(cluster: &Cluster, source: &Path, target: &Path) -> Duration {
    let (acceptor, connector) = ends(cluster);
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("listen");
    let address = listener.local_addr().expect("an address");
    let from = File::open(source).expect("the source");
    let into = File::options().write(true).create_new(true).custom_flags(nix::libc::O_DIRECT).open(target);
    let into = into.expect("the target");
    into.set_len(SIZE as u64).expect("set_len");
    let begun = Instant::now();
    let (read, mut pieces) = mpsc::channel(4);
    let reading = std::thread::spawn(move || {
        for at in (0..DATA).step_by(PIECE) {
            let mut piece = vec![0; PIECE];
            from.read_exact_at(&mut piece, at).expect("read");
            read.blocking_send(piece).expect("the sender is there");
        }
    });
    let sending = tokio::spawn(async move {
        let (stream, _) = listener.accept().await.expect("accept");
        let mut stream = acceptor.accept(stream).await.expect("a handshake");
        while let Some(piece) = pieces.recv().await {
            stream.write_all(&piece).await.expect("send");
        }
        stream.shutdown().await.expect("shut down");
    });
    let connection = TcpStream::connect(address).await.expect("connect");
    let mut connection = connector.connect(name(), connection).await.expect("a handshake");
    let (arrived, mut waiting) = mpsc::channel::<AlignedBuffer>(4);
    let (written, mut empty) = mpsc::channel(6);
    for _ in 0..6 {
        written.try_send(AlignedBuffer::new(PIECE)).expect("room");
    }
    let writing = std::thread::spawn(move || {
        for at in (0..DATA).step_by(PIECE) {
            let piece = waiting.blocking_recv().expect("the receiver is there");
            into.write_all_at(&piece, at).expect("write");
            // After the last piece nobody waits for an empty one.
            let _ = written.try_send(piece);
        }
        into.sync_all().expect("sync");
    });
    for _ in 0..DATA / PIECE as u64 {
        let mut piece = empty.recv().await.expect("the writer is there");
        connection.read_exact(&mut piece).await.expect("receive");
        for block in piece.chunks(BLOCK) {
            std::hint::black_box(blake3::hash(block));
        }
        arrived.send(piece).await.expect("the writer is there");
    }
    drop(arrived);
    tokio::task::spawn_blocking(|| writing.join()).await.expect("join").expect("the writer");
    let took = begun.elapsed();
    sending.await.expect("the sender");
    reading.join().expect("the reader");
    std::fs::remove_file(target).expect("remove");
    took
}

pub async fn transfer() {
    for pool in [PoolKind::Xfs, PoolKind::Btrfs] {
        let mut cluster = Cluster::start(pool, 2, &[]).await;
        let (origin, device) = cluster.nodes[0].rig.block_volume("bench", SIZE).await;
        write_direct(&device, DATA);
        let mut client = cluster.client();
        let snapshot = client.create_snapshot("bench", &origin).await.expect("CreateSnapshot").snapshot_id;
        cluster.nodes[0].rig.detach(&origin).await;
        let data = cluster.nodes[0].rig.pool_dir().join("snapshots").join(&snapshot).join("bytes/data.img");
        let bench_file = cluster.nodes[1].rig.pool_dir().join("bench");
        let [mut ours, mut streams, mut writes, mut copies] = [const { Vec::new() }; 4];
        // In turn, so that a slow moment of the machine meets all. The first round is for the hashes of the snapshot.
        for round in 0..=ROUNDS {
            let streamed = stream(&cluster).await;
            let written = write_direct(&bench_file, DATA);
            std::fs::remove_file(&bench_file).expect("remove");
            let copied = bare_copy(&cluster, &data, &bench_file).await;
            let mut request = new_volume(&format!("copy {round}"), SIZE, block_capability());
            request.volume_content_source = Some(from_snapshot(&snapshot));
            let request = within(&[cluster.nodes[1].topology()], request);
            let begun = Instant::now();
            let made = patiently!(client.create_volume(request.clone())).expect("CreateVolume");
            let took = begun.elapsed();
            client.delete_volume(&made.volume_id).await.expect("DeleteVolume");
            if round > 0 {
                ours.push(took);
                streams.push(streamed);
                writes.push(written);
                copies.push(copied);
            }
        }
        cluster.finish();
        let rate = |times: &[Duration]| DATA as f64 / median(times).as_secs_f64() / f64::from(1 << 20);
        let [rate, stream, write, copy] = [&ours, &streams, &writes, &copies].map(|times| rate(times));
        let bound = stream.min(write);
        row(
            "d",
            &format!("{} MiB copied to another node, {}", DATA >> 20, pool.name()),
            &format!("{rate:.0} MiB/s"),
            &format!(
                "{:.0} % of a bare copy, {copy:.0} MiB/s; {:.0} % of the smaller: a bare stream over mutual TLS {stream:.0} \
                 MiB/s, a bare direct write to the target's pool {write:.0} MiB/s",
                rate / copy * 100.0,
                rate / bound * 100.0
            ),
            "90 % of a bare copy, or 70 % of the smaller",
            rate >= 0.9 * copy || rate >= 0.7 * bound,
        );
        std::io::stdout().flush().expect("stdout");
    }
}
