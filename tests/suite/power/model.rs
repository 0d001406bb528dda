//! What must be on a disk after a power cut: what had been acknowledged before it, and what was on the way.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use fastrand::Rng;
use testkit::content::Content;
use testkit::disk::Rack;

/// A call that changes something.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Call {
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

pub const CALLS: [Call; 12] = [
    Call::Write,
    Call::Discard,
    Call::CreateVolume,
    Call::Restore,
    Call::Clone,
    Call::CreateSnapshot,
    Call::DeleteSnapshot,
    Call::CreateGroup,
    Call::DeleteGroup,
    Call::Expand,
    Call::Modify,
    Call::DeleteVolume,
];

/// How far an object is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    /// The call that makes it runs.
    Making,
    There,
    /// The call that deletes it runs.
    Going,
    Gone,
}

impl Phase {
    pub fn must_be(self) -> bool {
        self == Phase::There
    }

    pub fn may_be(self) -> bool {
        self != Phase::Gone
    }
}

#[derive(Clone)]
pub struct Volume {
    /// Known once the call that makes it has returned.
    pub id: Option<String>,
    pub phase: Phase,
    pub size: u64,
    /// The size that a call on the way asks for.
    pub growing: Option<u64>,
    pub read_ahead: Option<u32>,
    /// What a call on the way sets it to.
    pub retuned: Option<u32>,
    /// What was written and synced.
    pub content: Arc<Content>,
    /// Blocks that are being written (or discarded), until they are synced.
    pub unsure: BTreeMap<u64, Option<u8>>,
}

#[derive(Clone)]
pub struct Snapshot {
    pub id: Option<String>,
    pub phase: Phase,
    /// The name of its volume.
    pub volume: String,
    /// The name of its group.
    pub group: Option<String>,
    /// Its place among the snapshots of its volume.
    pub order: usize,
    pub size: u64,
    pub content: Arc<Content>,
}

#[derive(Clone)]
pub struct Group {
    pub id: Option<String>,
    pub phase: Phase,
}

/// All that was ever made, by name; a member of a group by the group's and the volume's.
#[derive(Clone, Default)]
pub struct Model {
    pub volumes: BTreeMap<String, Volume>,
    pub snapshots: BTreeMap<String, Snapshot>,
    pub groups: BTreeMap<String, Group>,
}

impl Model {
    /// The place that the next snapshot of a volume takes.
    pub fn next_order(&self, volume: &str) -> usize {
        self.snapshots.values().filter(|snapshot| snapshot.volume == volume).count()
    }

    pub fn volume(&mut self, name: &str) -> &mut Volume {
        self.volumes.get_mut(name).expect("a volume of the model")
    }

    pub fn snapshot(&mut self, name: &str) -> &mut Snapshot {
        self.snapshots.get_mut(name).expect("a snapshot of the model")
    }

    /// Moves a group and its members to another phase.
    pub fn set_group(&mut self, name: &str, phase: Phase) {
        self.groups.get_mut(name).expect("a group of the model").phase = phase;
        let members = self.snapshots.values_mut();
        members
            .filter(|member| member.group.as_deref() == Some(name))
            .for_each(|member| member.phase = phase);
    }
}

/// A disk after a power cut, and what must be on it.
pub struct Cut {
    pub disk: usize,
    /// When it was, and what the disk lost.
    pub story: String,
    pub model: Model,
}

/// The model of a live machine, and the power cuts it has had.
pub struct Stage {
    rack: Arc<Rack>,
    state: Mutex<State>,
}

struct State {
    model: Model,
    cuts: Vec<Cut>,
    acknowledged: usize,
    wanted: Option<Wanted>,
    random: Rng,
}

/// A call after which the power is to go.
#[derive(Clone, Copy)]
struct Wanted {
    call: Call,
    worker: usize,
}

/// What a client is to do next.
pub enum Turn {
    /// What it likes.
    Free,
    /// This call, after which the power goes.
    This(Call),
    /// Nothing: another one's syncs would make up for one that the wanted call leaves out.
    Wait,
}

impl Stage {
    pub fn new(rack: Arc<Rack>, seed: u64) -> Self {
        let (model, cuts) = Default::default();
        let state = State { model, cuts, acknowledged: 0, wanted: None, random: Rng::with_seed(seed) };
        Stage { rack, state: Mutex::new(state) }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn look<T>(&self, look: impl FnOnce(&Model) -> T) -> T {
        look(&self.state().model)
    }

    /// Notes what is about to be asked for.
    pub fn begin(&self, note: impl FnOnce(&mut Model)) {
        note(&mut self.state().model);
    }

    /// Notes what was acknowledged: from here on no cut may lose it. The moment right after it is the one
    /// at which a sync that was left out shows best.
    pub fn acknowledged(&self, worker: usize, call: Call, note: impl FnOnce(&mut Model)) {
        let mut state = self.state();
        note(&mut state.model);
        state.acknowledged += 1;
        if state.wanted.is_some_and(|wanted| (wanted.worker, wanted.call) == (worker, call)) {
            state.wanted = None;
            self.cut_in(&mut state, &format!("right after {call:?}"));
        }
    }

    /// The number of calls that were acknowledged.
    pub fn progress(&self) -> usize {
        self.state().acknowledged
    }

    /// Cuts the power as soon as this call of this client is acknowledged.
    pub fn cut_after(&self, call: Call, worker: usize) {
        self.state().wanted = Some(Wanted { call, worker });
    }

    /// What a client is to do next.
    pub fn turn(&self, worker: usize) -> Turn {
        match self.state().wanted {
            None => Turn::Free,
            Some(wanted) if wanted.worker == worker => Turn::This(wanted.call),
            Some(_) => Turn::Wait,
        }
    }

    /// Cuts the power as soon as something is in the disk's cache, if that is soon.
    pub fn cut(&self, when: &str) {
        let mut state = self.state();
        let sectors = 1 + state.random.u64(0..40) as usize;
        self.rack.wait_for_writes(0, sectors, Duration::from_millis(10));
        self.cut_in(&mut state, when);
    }

    /// While the model is locked nothing is noted as begun or acknowledged, so it is that of the very moment.
    fn cut_in(&self, state: &mut State, when: &str) {
        let (disk, lost) = self.rack.cut(0, &mut state.random);
        state.cuts.push(Cut { disk, story: format!("{when}, {lost}"), model: state.model.clone() });
    }

    pub fn cut_count(&self) -> usize {
        self.state().cuts.len()
    }

    pub fn take_cuts(&self) -> Vec<Cut> {
        std::mem::take(&mut self.state().cuts)
    }
}
