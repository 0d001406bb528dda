//! Row e: how fast tuples leave, beside a bare stream of equal messages.

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use base::BlockRange;
use futures_util::{StreamExt, stream};
use proto::{BlockMetadata, BlockMetadataType, GetMetadataAllocatedResponse};
use testkit::plugin::{self, Asked, Metadata};
use testkit::prelude::*;

use crate::host;
use crate::{Row, Table, spread};
use testkit::bench::{Process, median};

/// With this argument the bench is the bare server.
pub const BARE: &str = "--bare-stream";
/// 67 million.
const TUPLES: u64 = 1 << 26;
const A_MESSAGE: u64 = host::TUPLES_OF_A_MESSAGE as u64;
const ROUNDS: usize = 5;

pub async fn run(table: &mut Table) {
    let style = ["--block-metadata-type", "fixed"];
    let mut rig = Rig::start_with(PoolKind::Xfs, &style, "warn").await;
    let (volume, _) = rig.block_volume("volume", (TUPLES * 2 * 4096) as i64).await;
    let snapshot = rig.snapshot("snapshot", &volume).await;
    host::replace_map(&rig.snapshot_dir(&snapshot).allocated(), |writer| {
        for block in 0..TUPLES {
            writer.insert(BlockRange::new(block * 2, block * 2 + 1)).expect("insert");
        }
    });
    let dir = tempfile::tempdir().expect("temp dir");
    let socket = dir.path().join("bare.sock");
    let this = std::env::current_exe().expect("this program");
    let _bare = Process::start(Command::new(this).arg(BARE).arg(&socket));
    let mut bare = Client::connect(&socket, Duration::from_secs(10)).await.expect("the bare server");
    let (mut ours, mut theirs) = (Vec::new(), Vec::new());
    let before = testkit::process_status(rig.pid(), "VmRSS:");
    for _ in 0..ROUNDS {
        theirs.push(consume(&mut bare, "any").await);
        ours.push(consume(&mut rig.client, &snapshot).await);
    }
    let grown = testkit::process_status(rig.pid(), "VmHWM:").saturating_sub(before) >> 10;
    let rates = ours;
    let (ours, theirs) = (median(&rates), median(&theirs));
    table.add(Row {
        id: "e",
        what: "stream of 67,108,864 FIXED_LENGTH tuples".into(),
        measured: format!(
            "{}, memory grows by {grown} MiB",
            spread(&rates, |rate| format!("{:.1} M tuples/s", rate / 1e6))
        ),
        beside: format!("{:.0} % of a bare tonic stream, {:.1} M/s", 100.0 * ours / theirs, theirs / 1e6),
        must: "80 %; 64 MiB",
        holds: ours / theirs >= 0.8 && grown <= 64,
    });
    rig.detach_and_finish(&volume).await;
}

/// Tuples a second.
async fn consume(client: &mut Client, snapshot: &str) -> f64 {
    let read = host::allocated(client, snapshot).await;
    assert_eq!(read.tuples, TUPLES);
    TUPLES as f64 / read.whole.as_secs_f64()
}

/// The bare server, in a process of its own as the driver is. It makes messages from nothing but a counter.
pub fn serve_bare(socket: &Path) {
    let message = |first: u64| {
        let tuple = |block: u64| BlockMetadata { byte_offset: (block * 8192) as i64, size_bytes: 4096 };
        Ok(GetMetadataAllocatedResponse {
            block_metadata_type: BlockMetadataType::FixedLength.into(),
            volume_capacity_bytes: (TUPLES * 8192) as i64,
            block_metadata: (first..first + A_MESSAGE).map(tuple).collect(),
        })
    };
    let answer = move |_: Asked| {
        let messages = stream::iter((0..TUPLES).step_by(A_MESSAGE as usize).map(message));
        std::future::ready(Ok(messages.boxed()))
    };
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().expect("runtime");
    runtime.block_on(plugin::serve("bare", socket, Some(Metadata(answer))));
}
