//! Streams that do not run to their end: cancelled, past their deadline, or stalled.

use std::os::unix::fs::FileExt;
use std::time::Duration;

use csi_client::delta_of;
use nix::fcntl::{PosixFadviseAdvice, posix_fadvise};
use proto::{
    GetCapacityRequest, GetMetadataAllocatedRequest, GetMetadataDeltaRequest, GetMetadataDeltaResponse,
};
use tonic::{Request, Streaming};

use testkit::prelude::*;
use testkit::{eventually, narrow_client};

use crate::faults::hashed;

/// Two snapshots. Between them every block was rewritten with the same bytes, and only the last one changed. So a delta
/// compares everything and finds a difference only at the end, which a client that gets `OK` too early would miss.
async fn needle(rig: &mut Rig, mib: i64) -> (String, String, u64) {
    needle_in(rig, mib, "4Ki").await
}

async fn needle_in(rig: &mut Rig, mib: i64, block_size: &str) -> (String, String, u64) {
    let (volume, device) = rig.block_volume_of("haystack", mib * MIB, block_size).await;
    let blocks = mib as u64 * 256;
    let mut content = Content::default();
    for start in (0..blocks).step_by(8192) {
        content.write(&device, start, 8192.min(blocks - start), 1);
    }
    let first = rig.snapshot("first", &volume).await;
    for start in (0..blocks).step_by(8192) {
        content.write(&device, start, 8192.min(blocks - start), 1);
    }
    content.write(&device, blocks - 1, 1, 2);
    let second = rig.snapshot("second", &volume).await;
    rig.detach(&volume).await;
    (first, second, (blocks - 1) * BLOCK)
}

/// Reads a stream of a delta to its end: where its tuples begin.
async fn rest(stream: &mut Streaming<GetMetadataDeltaResponse>) -> Vec<u64> {
    let mut found = Vec::new();
    while let Some(message) = stream.message().await.expect("message") {
        found.extend(message.block_metadata.iter().map(|tuple| tuple.byte_offset as u64));
    }
    found
}

/// Seen in other drivers: a cancel or a deadline midway ends the stream with `OK`, and an incomplete backup seems complete.
#[apply(device_test)]
async fn a_deadline_midway_never_ends_with_ok(rig: Rig<Xfs>) {
    let (first, second, last) = needle(&mut rig, 512).await;
    let (mut whole, mut cut) = (0, 0);
    for micros in (0..60_000).step_by(1500) {
        let mut request = Request::new(delta_of(&first, &second));
        request.set_timeout(Duration::from_micros(micros));
        let mut found = Vec::new();
        let ended = async {
            let mut stream = rig.client.metadata.get_metadata_delta(request).await?.into_inner();
            while let Some(message) = stream.message().await? {
                found.extend(message.block_metadata.iter().map(|tuple| tuple.byte_offset as u64));
            }
            Ok::<(), tonic::Status>(())
        };
        match ended.await {
            Ok(()) => {
                whole += 1;
                assert_eq!(found, [last], "OK after {micros} us, but the list is incomplete");
            }
            Err(status) => {
                cut += 1;
                let code = status.code();
                assert!(matches!(code, Code::DeadlineExceeded | Code::Cancelled), "{status}");
            }
        }
    }
    assert!(cut > 5, "no deadline struck midway: {whole} streams were whole");
    // Without a deadline the stream is complete.
    let list = rig.client.delta(&first, &second, 0, 0).await.expect("delta");
    assert_eq!(list.tuples().map(|tuple| tuple.offset).collect::<Vec<_>>(), [last]);
}

/// The driver itself enforces the deadline, not only the client's library: a raw `grpc-timeout` that the client ignores
/// ends the stream with DEADLINE_EXCEEDED.
#[apply(device_test)]
async fn the_driver_keeps_the_deadline_of_a_slow_reader() {
    let mut rig = Rig::start_with(PoolKind::Xfs, &["--block-metadata-type", "fixed"], "info").await;
    let (first, _, _) = needle(&mut rig, 256).await;
    let mut deadline = 200;
    let tuples = loop {
        let mut request = Request::new(GetMetadataAllocatedRequest {
            snapshot_id: first.clone(),
            max_results: 16,
            ..Default::default()
        });
        request.metadata_mut().insert("grpc-timeout", format!("{deadline}m").parse().expect("a header"));
        let mut client = narrow_client(&rig.socket()).await;
        let mut tuples = 0;
        let read = async {
            let mut stream = client.get_metadata_allocated(request).await?.into_inner();
            while let Some(message) = stream.message().await? {
                tuples += message.block_metadata.len();
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
            Ok::<_, tonic::Status>(())
        };
        let status = read.await.expect_err("OK past the deadline");
        assert_eq!(status.code(), Code::DeadlineExceeded, "{status}");
        // On a busy machine it may pass before the first message.
        if tuples > 0 {
            break tuples;
        }
        deadline *= 2;
        assert!(deadline < 60_000, "no message before any deadline");
    };
    assert!(tuples < 65536);
    rig.finish();
}

fn open_files(pid: u32) -> usize {
    std::fs::read_dir(format!("/proc/{pid}/fd")).expect("fds").count()
}

/// The work of a stream ends within 100 ms after its client has cancelled it, also in the middle of large blocks that come
/// from the disk. The least of some tries counts, since other tests want the processors too.
#[apply(device_cases)]
async fn a_cancel_ends_the_work_at_once(#[values("4Ki", "4Mi")] block_size: &str) {
    const MOST: Duration = Duration::from_millis(100);
    let mut rig = Rig::start(PoolKind::Xfs).await;
    // No hash is made meanwhile, so a delta reads both snapshots, and only streams open and close files.
    testkit::orders::Orders::new(rig.dir.path()).hold(1, "hashing", 600_000);
    let (first, second, _) = needle_in(&mut rig, 512, block_size).await;
    let before = open_files(rig.pid());
    let mut least = Duration::MAX;
    for _ in 0..8 {
        // Both are read from the disk, which takes longer than the work may go on.
        for id in [&first, &second] {
            let data = rig.snapshot_dir(id).data();
            let data = std::fs::File::open(data).expect("open");
            posix_fadvise(&data, 0, 0, PosixFadviseAdvice::POSIX_FADV_DONTNEED).expect("drop the cache");
        }
        let request = delta_of(&first, &second);
        let mut stream = rig.client.metadata.get_metadata_delta(request).await.expect("opened").into_inner();
        // It comes after a few milliseconds without a tuple; the only tuple comes in the end.
        let message = stream.message().await.expect("a message").expect("a message");
        assert_eq!(message.block_metadata, []);
        drop(stream);
        let cancelled = std::time::Instant::now();
        while open_files(rig.pid()) > before {
            assert!(cancelled.elapsed() < Duration::from_secs(60), "its files are still open");
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        least = least.min(cancelled.elapsed());
    }
    assert!(least < MOST, "it goes on for {least:?}");
    // An orderly stop would wait for the hashing.
    drop(rig);
}

/// If a client disconnects, its streams' files are closed, their work ends, and the log says so.
#[apply(device_test)]
async fn a_gone_client_leaves_no_stream_behind() {
    let mut rig = Rig::start_with(PoolKind::Xfs, &["--block-metadata-type", "fixed"], "info").await;
    let (first, second, _) = needle(&mut rig, 256).await;
    // Hashing opens files too.
    hashed(&rig, &[&first, &second]).await;
    let before = open_files(rig.pid());
    for round in 0..60 {
        let allocated = GetMetadataAllocatedRequest { snapshot_id: first.clone(), ..Default::default() };
        let mut stream =
            rig.client.metadata.get_metadata_allocated(allocated).await.expect("opened").into_inner();
        if round % 2 == 0 {
            stream.message().await.expect("a message");
        }
        drop(stream);
        let delta = delta_of(&first, &second);
        drop(rig.client.metadata.get_metadata_delta(delta).await.expect("opened"));
    }
    let pid = rig.pid();
    eventually("the files of 120 dropped streams are closed", async || open_files(pid) <= before).await;
    let log = rig.log();
    assert!(log.contains("Cancelled") && log.contains("the client is gone"), "{log}");
    rig.finish();
}

/// 512 streams that are not read must not delay a unary call, so none of them may hold a thread.
#[apply(device_test)]
async fn stalled_streams_delay_nobody() {
    let mut rig = Rig::start_with(PoolKind::Xfs, &["--block-metadata-type", "fixed"], "warn").await;
    let (first, _, _) = needle(&mut rig, 256).await;
    let mut stalled = Vec::new();
    for _ in 0..64 {
        // A connection's window is shared by its streams, so there are several connections.
        let mut client = narrow_client(&rig.socket()).await;
        for _ in 0..8 {
            let request = GetMetadataAllocatedRequest { snapshot_id: first.clone(), ..Default::default() };
            stalled.push(client.get_metadata_allocated(request).await.expect("opened").into_inner());
        }
    }
    let answer = tokio::time::timeout(
        Duration::from_secs(20),
        rig.client.controller.get_capacity(GetCapacityRequest::default()),
    );
    answer.await.expect("a unary call waits behind stalled streams").expect("GetCapacity");
    // The streams were stalled, not ended, and each continues where it was.
    let mut tuples = 0;
    let stream = stalled.last_mut().expect("streams");
    while let Some(message) = stream.message().await.expect("message") {
        tuples += message.block_metadata.len();
    }
    assert_eq!(tuples, 65536);
    drop(stalled);
    rig.finish();
}

/// Streams that compare much data and find nothing must not delay the first messages of others: they take turns.
#[apply(device_test)]
async fn silent_streams_take_turns_with_others() {
    let mut rig = Rig::start(PoolKind::Xfs).await;
    // With hashes they would soon be at their end.
    testkit::orders::Orders::new(rig.dir.path()).hold(1, "hashing", 600_000);
    let (first, second, _) = needle(&mut rig, 512).await;
    let request = delta_of(&first, &second);
    let mut silent = tokio::task::JoinSet::new();
    for _ in 0..64 {
        let stream = rig.client.metadata.get_metadata_delta(request.clone()).await.expect("opened");
        let mut stream = stream.into_inner();
        silent.spawn(async move { while stream.message().await.expect("message").is_some() {} });
    }
    let request = GetMetadataAllocatedRequest { snapshot_id: first, ..Default::default() };
    let stream = rig.client.metadata.get_metadata_allocated(request).await.expect("opened");
    stream.into_inner().message().await.expect("message").expect("a first message");
    assert!(silent.try_join_next().is_none(), "another stream had to end first");
    silent.shutdown().await;
    drop(rig);
}

/// A stream continues while its snapshots are deleted, whether they are retained or removed, since its files are open.
#[apply(every_pool)]
async fn a_stream_outlives_the_deletion_of_its_snapshots(pool: PoolKind, #[values("8", "0")] retained: &str) {
    let flags = ["--block-metadata-type", "fixed", "--retain-deleted", retained];
    let mut rig = Rig::start_with(pool, &flags, "info").await;
    let (first, second, last) = needle(&mut rig, 256).await;
    let allocated =
        GetMetadataAllocatedRequest { snapshot_id: first.clone(), max_results: 100, ..Default::default() };
    let mut allocated =
        rig.client.metadata.get_metadata_allocated(allocated).await.expect("opened").into_inner();
    let delta = delta_of(&first, &second);
    let mut delta = rig.client.metadata.get_metadata_delta(delta).await.expect("opened").into_inner();
    rig.client.delete_snapshot(&first).await.expect("delete");
    rig.client.delete_snapshot(&second).await.expect("delete");
    assert_eq!(names(&rig.pool_dir().join("snapshots")).is_empty(), retained == "0");
    let mut tuples = 0;
    while let Some(message) = allocated.message().await.expect("message") {
        tuples += message.block_metadata.len();
    }
    assert_eq!(tuples, 65536);
    assert_eq!(rest(&mut delta).await, [last]);
    rig.finish();
}

/// The anonymous memory of a process, in bytes.
fn memory_of(pid: u32) -> u64 {
    testkit::process_status(pid, "RssAnon:") << 10
}

/// The most memory that a process has until `done`.
async fn most_memory_of(pid: u32, done: impl Future) -> u64 {
    let mut most = memory_of(pid);
    tokio::pin!(done);
    while tokio::time::timeout(Duration::from_millis(2), &mut done).await.is_err() {
        most = most.max(memory_of(pid));
    }
    most
}

/// The most memory that all streams may take together.
const STREAMS_MEMORY: u64 = (64 + ALLOCATOR) << 20;
/// What the allocator may keep in addition: 1,024 streams on a busy machine once took all of the 64 MiB.
const ALLOCATOR: u64 = 16;
const STREAMS_REST: u64 = 16 << 20;

/// The incident: 200 streams on blocks of 4 MiB took 1.6 GB, since each held two of its blocks until its end.
#[apply(device_test)]
async fn large_blocks_take_no_more_memory(rig: Rig<Xfs>) {
    let (first, second, _) = needle_in(&mut rig, 64, "4Mi").await;
    let idle = memory_of(rig.pid());
    let mut streams = tokio::task::JoinSet::new();
    for _ in 0..200 {
        let request = delta_of(&first, &second);
        let mut client = rig.client.metadata.clone();
        streams.spawn(async move {
            rest(&mut client.get_metadata_delta(request).await.expect("opened").into_inner()).await.len()
        });
    }
    let mut answers = Vec::new();
    let all = async {
        while let Some(tuples) = streams.join_next().await {
            answers.push(tuples.expect("a stream"));
        }
    };
    let most = most_memory_of(rig.pid(), all).await;
    assert_eq!(answers, [1; 200]);
    assert!(most < idle + STREAMS_MEMORY, "{} MiB more for 200 streams", (most - idle) >> 20);
}

/// Opens 1,024 streams over a volume of `mibs` with every second block changed, and does not read them for a while. Each
/// then continues where it was. Of the short answers the driver finishes each long before the client has read it.
#[apply(device_cases)]
#[case::of_long_messages(256)]
#[case::of_short_answers(128)]
async fn a_thousand_stalled_streams_share_a_bounded_memory(#[case] mibs: i64) {
    let mut rig = Rig::start_with(PoolKind::Xfs, &["--block-metadata-type", "fixed"], "warn").await;
    let (volume, device) = rig.block_volume("volume", mibs * MIB).await;
    let every_other = |fill: u8| {
        let device = open_device(&device);
        for block in (0..mibs as u64 * 256).step_by(2) {
            device.write_all_at(&[fill; BLOCK as usize], block * BLOCK).expect("write");
        }
        device.sync_all().expect("sync");
    };
    every_other(1);
    let first = rig.snapshot("first", &volume).await;
    every_other(2);
    let second = rig.snapshot("second", &volume).await;
    rig.detach(&volume).await;
    let idle = memory_of(rig.pid());
    let mut stalled = Vec::new();
    let opened = async {
        for _ in 0..128 {
            // A connection's window is shared by its streams, so there are several connections.
            let mut client = narrow_client(&rig.socket()).await;
            for _ in 0..8 {
                let request = GetMetadataDeltaRequest { max_results: 16384, ..delta_of(&first, &second) };
                stalled.push(client.get_metadata_delta(request).await.expect("opened").into_inner());
            }
        }
        tokio::time::sleep(Duration::from_secs(2)).await;
    };
    let most = most_memory_of(rig.pid(), opened).await;
    assert!(most < idle + STREAMS_MEMORY, "{} MiB more for 1024 streams", (most - idle) >> 20);
    let mut last = stalled.pop().expect("streams");
    let every_other = (0..mibs as u64 * 256).step_by(2).map(|block| block * BLOCK);
    assert_eq!(rest(&mut last).await, every_other.collect::<Vec<_>>());
    drop((last, stalled));
    let mut rest = memory_of(rig.pid());
    for _ in 0..100 {
        if rest < idle + STREAMS_REST {
            break;
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
        rest = memory_of(rig.pid());
    }
    assert!(rest < idle + STREAMS_REST, "{} MiB more once they are gone", (rest - idle) >> 20);
    rig.finish();
}
