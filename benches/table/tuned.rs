//! Rows s: what the parameters of a VolumeAttributesClass are good for.

use std::fs::File;
use std::path::PathBuf;

use base::ByteRange;
use testkit::bench::{median, write_direct};
use testkit::{PoolKind, Rig};

use crate::load::{EACH_SYNCED, RANDOM, ROUNDS, WRITTEN, gigabytes, mebibytes, per_second, read_pieces};
use crate::work::{Load, Work};
use crate::{Row, Table, host, spread};

/// What a parameter of the VolumeAttributesClass is compared for.
struct Tuned {
    name: &'static str,
    value: &'static str,
    default: &'static str,
    what: &'static str,
    /// None: all of it is read in order, cold.
    work: Option<Work>,
    show: fn(f64) -> String,
}

impl Tuned {
    fn measure(&self, device: &PathBuf) -> f64 {
        match self.work {
            Some(work) => Load::of(std::slice::from_ref(device), work).rate,
            None => {
                host::drop_caches();
                read_pieces(&File::open(device).expect("open"), [ByteRange { start: 0, end: WRITTEN }])
            }
        }
    }
}

pub async fn run(table: &mut Table) {
    for pool in table.pools(&PoolKind::ALL) {
        of_pool(table, pool).await;
    }
}

/// One volume, whose parameters are changed to and fro while it is published.
async fn of_pool(table: &mut Table, pool: PoolKind) {
    let mut rig = Rig::start_with(pool, &["--pool-size", "32Gi"], "warn").await;
    let (id, device) = rig.block_volume("tuned", WRITTEN as i64).await;
    write_direct(&device, WRITTEN);
    const READ: &str = "reading 1 GiB in order, cold";
    let read_ahead = Tuned {
        name: "readAheadKiB",
        value: "4096",
        default: "128",
        what: READ,
        work: None,
        show: gigabytes,
    };
    let buffered =
        |what, work, show| Tuned { name: "directIO", value: "false", default: "true", what, work, show };
    let cases = [
        read_ahead,
        buffered(READ, None, gigabytes),
        buffered("sequential writes of 1 MiB", Some(Work::Sequential), mebibytes),
        buffered("random 4 KiB writes", Some(RANDOM), per_second),
        buffered("random 4 KiB, seven reads to three writes", Some(Work::Mixed), per_second),
        buffered("random 4 KiB writes, each with an fsync", Some(EACH_SYNCED), per_second),
    ];
    for case in cases {
        let (mut with, mut without) = (vec![], vec![]);
        for turn in 0..ROUNDS * 2 {
            let is_with = (turn + turn / 2) % 2 == 0;
            let value = if is_with { case.value } else { case.default };
            rig.modify(&id, &[(case.name, value)]).await.expect("ControllerModifyVolume");
            if is_with { &mut with } else { &mut without }.push(case.measure(&device));
        }
        table.add(Row {
            id: "s",
            what: format!("{} with {} {}, {}", case.what, case.name, case.value, pool.name()),
            measured: spread(&with, case.show),
            beside: format!(
                "{:.0} % of the same with {}, {}",
                100.0 * median(&with) / median(&without),
                case.default,
                spread(&without, case.show)
            ),
            must: "",
            holds: true,
        });
        rig.modify(&id, &[(case.name, case.default)]).await.expect("ControllerModifyVolume");
    }
    rig.detach_and_finish(&id).await;
}
