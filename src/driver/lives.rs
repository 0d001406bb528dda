//! Whole lives of a driver, without root and without devices: volumes are written through their files, snapshots are taken
//! and deleted, hashed or not, the driver is opened again, and every delta is compared with what was written.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::time::Duration;

use proptest::prelude::*;
use tempfile::TempDir;

use super::{
    AccessMode, AccessType, Capability, CapacityRange, Config, CreateVolume, Driver, HashingThread,
    MetadataRequest, MetadataStream, Progress, Retention, SnapshotParameters, SourceRef, VolumeParameters,
};
use crate::pool::{self, Kind, PoolRequest};
use crate::store::{Tuning, TupleStyle};
use base::{Quantity, Stop};

const BLOCK: u64 = 4096;
const BLOCKS: usize = 256;
/// The blocks that are written.
const USED: [usize; 8] = [0, 1, 2, 7, 8, 100, 254, 255];

/// What each block holds: one byte, over and over; 0 for a hole.
type Content = [u8; BLOCKS];

#[derive(Clone, Debug)]
pub(super) enum Step {
    Write { at: usize, byte: u8 },
    Punch { at: usize },
    Snapshot,
    Delete { which: usize },
    Delta { base: usize, target: usize },
    Hash,
    Restore { which: usize },
    Reopen,
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let index = any::<usize>;
    let step = prop_oneof![
        // Few blocks and few bytes, so that a block often has again what it had before.
        6 => (0..USED.len(), 1..=3u8).prop_map(|(at, byte)| Step::Write { at: USED[at], byte }),
        2 => (0..USED.len()).prop_map(|at| Step::Punch { at: USED[at] }),
        4 => Just(Step::Snapshot),
        2 => index().prop_map(|which| Step::Delete { which }),
        4 => (index(), index()).prop_map(|(base, target)| Step::Delta { base, target }),
        1 => Just(Step::Hash),
        1 => index().prop_map(|which| Step::Restore { which }),
        1 => Just(Step::Reopen),
    ];
    prop::collection::vec(step, 20..80)
}

/// How many deleted snapshots are kept: where it is few, others are removed, and their changes merged into those of the next.
fn retained() -> impl Strategy<Value = usize> {
    prop_oneof![Just(0_usize), Just(1), Just(100)]
}

pub(super) struct Life {
    dir: TempDir,
    kind: &'static Kind,
    /// From the first [`Step::Hash`] until the driver is opened again.
    hashing: Option<HashingThread>,
    /// `None` while it is opened again.
    driver: Option<Arc<Driver>>,
    /// Deleted snapshots that are kept.
    retained: usize,
    volume: String,
    content: Content,
    /// The snapshots of the volume in the order they were taken, deleted ones with `false`: the last [`Life::retained`] of those
    /// are bases.
    pub(super) snapshots: Vec<(String, Content, bool)>,
    made: usize,
}

impl Life {
    pub(super) fn new(kind: &str, retained: usize) -> Self {
        let dir = tempfile::Builder::new().prefix("deltapath-life-").tempdir().expect("temp dir");
        let kind = pool::named(kind).expect("a kind");
        let mut life = Life {
            dir,
            kind,
            hashing: None,
            driver: None,
            retained,
            volume: String::new(),
            content: [0; BLOCKS],
            snapshots: Vec::new(),
            made: 0,
        };
        life.open();
        life.volume = life.create(None);
        life
    }

    pub(super) fn driver(&self) -> &Arc<Driver> {
        self.driver.as_ref().expect("an open driver")
    }

    pub(super) fn close(&mut self) {
        self.hashing = None;
        if let Some(driver) = self.driver.take() {
            driver.close().expect("close");
        }
    }

    fn open(&mut self) {
        let driver = Driver::open(Config {
            driver_name: "life".into(),
            node_id: "node".into(),
            data_dir: self.dir.path().join("data"),
            pool: PoolRequest { kind: Some(self.kind), size: None },
            tuple_style: TupleStyle::Variable,
            max_volume_size: Quantity(1 << 30),
            overcommit: None,
            attach: false,
            max_volumes: 0,
            retain: Retention { count: self.retained, age: Duration::from_secs(3600) },
            transfer_rate: None,
        });
        self.driver = Some(Arc::new(driver.expect("open")));
    }

    fn create(&mut self, source: Option<SourceRef>) -> String {
        self.made += 1;
        let request = wanted(&format!("volume-{}", self.made), source);
        self.driver().volumes.create(&request).expect("a volume").id.to_string()
    }

    fn file(&self, volume: &str) -> File {
        let path = self.driver().shared.volume_data(&volume.parse().expect("an id"));
        File::options().read(true).write(true).open(path).expect("the volume's file")
    }

    fn alive(&self) -> Vec<usize> {
        (0..self.snapshots.len()).filter(|number| self.snapshots[*number].2).collect()
    }

    /// The snapshots that a delta can begin with.
    fn bases(&self) -> Vec<usize> {
        let deleted = |from: usize| self.snapshots[from..].iter().filter(|snapshot| !snapshot.2).count();
        let is_base = |number: &usize| self.snapshots[*number].2 || deleted(*number) <= self.retained;
        (0..self.snapshots.len()).filter(is_base).collect()
    }

    pub(super) fn play(&mut self, step: &Step) {
        match *step {
            Step::Write { at, byte } => {
                let file = self.file(&self.volume);
                file.write_all_at(&[byte; BLOCK as usize], at as u64 * BLOCK).expect("write");
                self.content[at] = byte;
            }
            Step::Punch { at } => {
                files::punch_hole(&self.file(&self.volume), at as u64 * BLOCK, BLOCK).expect("punch");
                self.content[at] = 0;
            }
            Step::Snapshot => {
                self.made += 1;
                let name = format!("snapshot-{}", self.made);
                let parameters = SnapshotParameters::default();
                let taken = self.driver().snapshots.create(&name, &self.volume, &parameters, &[]);
                self.snapshots.push((taken.expect("a snapshot").id.to_string(), self.content, true));
            }
            Step::Delete { which } => {
                let Some(number) = one_of(&self.alive(), which) else { return };
                self.driver().snapshots.delete(&self.snapshots[number].0).expect("delete");
                self.snapshots[number].2 = false;
            }
            Step::Delta { base, target } => {
                let chosen = (one_of(&self.bases(), base), one_of(&self.alive(), target));
                let (Some(base), Some(target)) = chosen else { return };
                if base <= target {
                    self.compare(base, target);
                }
            }
            Step::Hash => {
                if self.hashing.is_none() {
                    let hashing = self.driver().hashing.clone();
                    self.hashing = Some(HashingThread::start(hashing).expect("a thread"));
                }
                while self.driver().figures().hashing_backlog > 0 {
                    std::thread::sleep(Duration::from_millis(1));
                }
            }
            Step::Restore { which } => {
                let Some(number) = one_of(&self.alive(), which) else { return };
                let restored = self.create(Some(SourceRef::Snapshot(self.snapshots[number].0.clone())));
                let mut read = vec![0; BLOCKS * BLOCK as usize];
                self.file(&restored).read_exact_at(&mut read, 0).expect("read");
                let found: Vec<u8> = read.iter().step_by(BLOCK as usize).copied().collect();
                assert_eq!(found, self.snapshots[number].1, "the restored volume");
                self.driver().volumes.delete(&restored).expect("delete");
            }
            Step::Reopen => {
                self.close();
                self.open();
            }
        }
    }

    /// Compares the answers about two snapshots with what was written, two tuples a message.
    pub(super) fn compare(&self, base: usize, target: usize) {
        let (before, after) = (&self.snapshots[base], &self.snapshots[target]);
        let (metadata, stop) = (&self.driver().metadata, Stop::default());
        let request = MetadataRequest { max_results: 2, ..MetadataRequest::default() };
        let delta = metadata.delta(&before.0, &after.0, request, &stop).expect("a delta");
        let differ: Vec<usize> = (0..BLOCKS).filter(|block| before.1[*block] != after.1[*block]).collect();
        assert_eq!(blocks(delta), differ, "from {base} to {target}");
        let allocated = metadata.allocated(&after.0, request, &stop).expect("an answer");
        let holds: Vec<usize> = (0..BLOCKS).filter(|block| after.1[*block] != 0).collect();
        assert_eq!(blocks(allocated), holds, "allocated in {target}");
    }
}

/// A volume of this name and of the size of all here.
pub(super) fn wanted(name: &str, source: Option<SourceRef>) -> CreateVolume {
    CreateVolume {
        name: name.to_owned(),
        range: CapacityRange { required: BLOCKS as u64 * BLOCK, limit: None },
        capabilities: vec![Capability { access: AccessType::Block, mode: AccessMode::SingleNodeWriter }],
        parameters: VolumeParameters::default(),
        tuning: Tuning::default(),
        source,
        requisite: Vec::new(),
    }
}

fn blocks(mut stream: MetadataStream) -> Vec<usize> {
    let mut found = Vec::new();
    loop {
        match stream.work(&Stop::default()).expect("an answer") {
            Progress::Message(message) => {
                let blocks = message.tuples.iter().flat_map(|range| range.start / BLOCK..range.end / BLOCK);
                found.extend(blocks.map(|block| block as usize));
            }
            Progress::Nothing => {}
            Progress::End => return found,
        }
    }
}

fn one_of(numbers: &[usize], which: usize) -> Option<usize> {
    (!numbers.is_empty()).then(|| numbers[which % numbers.len()])
}

fn live(kind: &str, retained: usize, steps: &[Step]) {
    let mut life = Life::new(kind, retained);
    steps.iter().for_each(|step| life.play(step));
    for target in life.alive() {
        life.bases().into_iter().filter(|base| *base <= target).for_each(|base| life.compare(base, target));
    }
    life.close();
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, failure_persistence: None, ..ProptestConfig::default() })]

    /// A backend that knows what was written, so that maps are made from it and hashes come later.
    #[test]
    fn every_delta_of_a_life_is_exact(steps in steps(), retained in retained()) {
        live("example", retained, &steps);
    }

    /// One that knows nothing, so that hashes are made with the copy.
    #[test]
    fn every_delta_of_a_life_on_plain_files_is_exact(steps in steps(), retained in retained()) {
        live("dir", retained, &steps);
    }
}
