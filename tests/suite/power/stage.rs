//! Records what was acknowledged and which calls were running when the power was cut, for the model of `model/world.rs`, and
//! decides which client works.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use fastrand::Rng;
use parking_lot::Mutex;
use testkit::content::Content;
use testkit::disk::Rack;
use testkit::subject::Site;

use super::RETAINED;
use crate::model::calls::{Call, NameSet};
use crate::model::names::{Asked, Names};
use crate::model::wire::Answer;
use crate::model::world::{Bytes, World};

/// An action of a client.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wish {
    /// A write to a device, synced.
    Write,
    /// A discard, synced.
    Discard,
    CreateVolume,
    Restore,
    Clone,
    CreateSnapshot,
    DeleteSnapshot,
    CreateGroup,
    DeleteGroup,
    Expand,
    Modify,
    DeleteVolume,
}

/// Each wish, and its frequency in percent.
pub const WISHES: [(Wish, u32); 12] = [
    (Wish::Write, 30),
    (Wish::Discard, 5),
    (Wish::CreateVolume, 5),
    (Wish::Restore, 6),
    (Wish::Clone, 4),
    (Wish::CreateSnapshot, 18),
    (Wish::DeleteSnapshot, 9),
    (Wish::CreateGroup, 5),
    (Wish::DeleteGroup, 4),
    (Wish::Expand, 5),
    (Wish::Modify, 5),
    (Wish::DeleteVolume, 4),
];

/// By the volume's id, blocks that are being written or discarded and are not synced yet, with their new content.
pub type Unsynced = BTreeMap<String, BTreeMap<u64, Option<u8>>>;

/// The state at one moment.
#[derive(Clone)]
pub struct Moment {
    /// What was acknowledged.
    pub world: World,
    pub names: Arc<Names>,
    /// The running call of each client.
    pub under_way: BTreeMap<usize, Asked>,
    pub unsynced: Unsynced,
}

/// A disk after a power cut, and what must be on it.
pub struct Cut {
    pub disk: usize,
    /// The time of the cut, and what the disk lost.
    pub story: String,
    pub moment: Moment,
}

/// The model of a running machine, and its power cuts so far.
pub struct Stage {
    rack: Arc<Rack>,
    state: Mutex<State>,
}

struct State {
    moment: Moment,
    cuts: Vec<Cut>,
    acknowledged: usize,
    wanted: Option<Wanted>,
    random: Rng,
}

/// The action after which the power is cut.
#[derive(Clone, Copy)]
struct Wanted {
    wish: Wish,
    worker: usize,
}

/// What a client is to do next.
pub enum Turn {
    /// Anything.
    Free,
    /// This action, after which the power is cut.
    This(Wish),
    /// Nothing: the syncs of this client could hide a sync that is missing in the wanted call.
    Wait,
}

impl Stage {
    pub fn new(rack: Arc<Rack>, seed: u64) -> Self {
        let moment = Moment {
            world: World::new(false, [Site::alone()].into(), RETAINED),
            names: Arc::default(),
            under_way: BTreeMap::new(),
            unsynced: Unsynced::new(),
        };
        let random = Rng::with_seed(seed);
        let state = State { moment, cuts: Vec::new(), acknowledged: 0, wanted: None, random };
        Stage { rack, state: Mutex::new(state) }
    }

    pub fn look<T>(&self, look: impl FnOnce(&Moment) -> T) -> T {
        look(&self.state.lock().moment)
    }

    /// Records a call that is about to be made.
    pub fn begin(&self, worker: usize, call: Call) -> Asked {
        let moment = &mut self.state.lock().moment;
        let asked = Asked { call, names: moment.names.clone() };
        moment.under_way.insert(worker, asked.clone());
        asked
    }

    /// Records what was acknowledged: from here on no cut may lose it.
    pub fn end(&self, worker: usize, wish: Wish, asked: &Asked, answer: &Answer) {
        self.acknowledged(worker, wish, |moment| {
            if let Err(reason) = moment.world.accept(asked, answer, false) {
                panic!("{:?}: {reason}", asked.call);
            }
            if let Answer::Done(reply) = answer {
                Arc::make_mut(&mut moment.names).learn(&asked.call, reply);
            }
            moment.under_way.remove(&worker);
        });
    }

    /// Records a write or discard that is about to be made.
    pub fn begin_write(&self, volume: &str, blocks: impl Iterator<Item = (u64, Option<u8>)>) {
        self.state.lock().moment.unsynced.insert(volume.to_owned(), blocks.collect());
    }

    /// Records that it was synced.
    pub fn end_write(&self, worker: usize, wish: Wish, volume: &str, content: Content) {
        self.acknowledged(worker, wish, |moment| {
            moment.world.volumes.get_mut(volume).expect("it is there").bytes = Bytes::Raw(content);
            moment.unsynced.remove(volume);
        });
    }

    /// Records an acknowledgement. A missing sync shows best right after it, so this may be the moment of the cut.
    fn acknowledged(&self, worker: usize, wish: Wish, note: impl FnOnce(&mut Moment)) {
        let mut state = self.state.lock();
        note(&mut state.moment);
        state.acknowledged += 1;
        if state.wanted.is_some_and(|wanted| (wanted.worker, wanted.wish) == (worker, wish)) {
            state.wanted = None;
            self.cut_in(&mut state, &format!("right after {wish:?}"));
        }
    }

    /// The number of acknowledged calls and writes.
    pub fn progress(&self) -> usize {
        self.state.lock().acknowledged
    }

    /// Orders a power cut right after this action of this client is acknowledged.
    pub fn cut_after(&self, wish: Wish, worker: usize) {
        self.state.lock().wanted = Some(Wanted { wish, worker });
    }

    /// What a client is to do next.
    pub fn turn(&self, worker: usize) -> Turn {
        match self.state.lock().wanted {
            None => Turn::Free,
            Some(wanted) if wanted.worker == worker => Turn::This(wanted.wish),
            Some(_) => Turn::Wait,
        }
    }

    /// Cuts the power when the disk's cache holds some data, or after a short time.
    pub fn cut(&self, when: &str) {
        let mut state = self.state.lock();
        let sectors = 1 + state.random.u64(0..40) as usize;
        self.rack.wait_for_writes(0, sectors, Duration::from_millis(10));
        self.cut_in(&mut state, when);
    }

    /// Cuts the power. The state is locked, so nothing is recorded meanwhile, and it is exactly that of the cut.
    fn cut_in(&self, state: &mut State, when: &str) {
        let (disk, lost) = self.rack.cut(0, &mut state.random);
        state.cuts.push(Cut { disk, story: format!("{when}, {lost}"), moment: state.moment.clone() });
    }

    pub fn cut_count(&self) -> usize {
        self.state.lock().cuts.len()
    }

    pub fn take_cuts(&self) -> Vec<Cut> {
        std::mem::take(&mut self.state.lock().cuts)
    }
}

const fn names(volumes: &'static [char], snapshots: &'static [char], groups: &'static [char]) -> NameSet {
    NameSet { volumes, snapshots, groups, ephemeral: &[] }
}

/// The names of each client's objects. No other client uses them, so none of its calls may fail.
pub const NAMES: [NameSet; super::CLIENTS] = [
    names(&['a', 'b', 'c'], &['A', 'B', 'C', 'D', 'E', 'F'], &['1', '2']),
    names(&['d', 'e', 'f'], &['G', 'H', 'I', 'J', 'K', 'L'], &['3', '4']),
    names(&['g', 'h', 'i'], &['M', 'N', 'O', 'P', 'Q', 'R'], &['5', '6']),
];
