//! What must be on a disk after a power cut: what had been acknowledged before it, and what was on the way.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use crate::support::content::Content;
use crate::support::disk::{Rack, Random};

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
    /// The next acknowledgement is the last thing before a cut.
    armed: bool,
    random: Random,
}

impl Stage {
    pub fn new(rack: Arc<Rack>, seed: u64) -> Self {
        let state = State { model: Model::default(), cuts: Vec::new(), armed: false, random: Random(seed) };
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
    pub fn acknowledged(&self, what: &str, note: impl FnOnce(&mut Model)) {
        let mut state = self.state();
        note(&mut state.model);
        if std::mem::take(&mut state.armed) {
            self.cut_in(&mut state, &format!("right after {what}"));
        }
    }

    /// Cuts the power as soon as a call is acknowledged.
    pub fn arm(&self) {
        self.state().armed = true;
    }

    /// Cuts the power as soon as something is in the disk's cache, if that is soon.
    pub fn cut(&self, when: &str) {
        let mut state = self.state();
        let sectors = 1 + state.random.below(40) as usize;
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
