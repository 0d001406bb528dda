//! Runs a random sequence. Each step is made on a real driver, and its outcome, the lists and the kernel are compared with
//! the models.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use deltapath::sys::mount;

use super::calls::{Call, MountPath, Name, NameSet, Pages, Step};
use super::names::{Asked, Names};
use super::rounds::{Event, Listed, explain};
use super::wire::{Answer, make};
use super::world::{Bytes, MARK, World};
pub use testkit::LETTING_GO;
use testkit::cluster::key_of;
use testkit::prelude::*;
use testkit::subject::Subject;

/// The names in a life.
pub const NAMES: NameSet = NameSet {
    volumes: &['a', 'b', 'c'],
    snapshots: &['s', 't', 'u', 'v'],
    groups: &['g', 'h'],
    ephemeral: &['x', 'y'],
};
/// The number of clients, and so of concurrent calls in a step.
pub const CLIENTS: usize = 4;

/// How often each call ended with each code, over many lives.
#[derive(Default)]
pub struct Tally {
    pub codes: BTreeMap<(String, String), usize>,
    pub killed: usize,
    pub cut: usize,
    pub together: usize,
    pub steps: usize,
}

/// The most important calls. If these never succeed, a run proves nothing.
const NEEDED: [&str; 6] = [
    "CreateVolume",
    "CreateSnapshot",
    "CreateVolumeGroupSnapshot",
    "DeleteVolume",
    "NodeStageVolume",
    "NodePublishVolume",
];
/// The other calls, which are less frequent.
const RARER: [&str; 22] = [
    "ControllerExpandVolume",
    "ControllerGetVolume",
    "ControllerGetVolumeHealth",
    "ControllerListVolumeHealth",
    "ControllerModifyVolume",
    "ControllerPublishVolume",
    "ControllerUnpublishVolume",
    "DeleteSnapshot",
    "DeleteVolumeGroupSnapshot",
    "GetCapacity",
    "GetMetadataAllocated",
    "GetMetadataDelta",
    "GetSnapshot",
    "GetVolumeGroupSnapshot",
    "ListSnapshots",
    "ListVolumes",
    "NodeExpandVolume",
    "NodeGetVolumeHealth",
    "NodeGetVolumeStats",
    "NodeUnpublishVolume",
    "NodeUnstageVolume",
    "ValidateVolumeCapabilities",
];
/// This many lives must contain a success of every call.
const MANY: u32 = 100;

impl Tally {
    /// Fails if calls that must succeed never did.
    pub fn assert_reach(&self, lives: u32) {
        let succeeded = |method: &str| self.codes.contains_key(&(method.to_owned(), "Ok".to_owned()));
        // Without --enable-attach two calls are not in the capabilities.
        let claimed =
            |method: &str| !self.codes.contains_key(&(method.to_owned(), "Unimplemented".to_owned()));
        let missed: Vec<_> =
            NEEDED.iter().chain(&RARER).filter(|method| claimed(method) && !succeeded(method)).collect();
        let needed = NEEDED.iter().filter(|method| !succeeded(method)).count();
        // One call may be missing by chance: 15 lives make 6 groups on average, and one run in 300 makes none.
        assert!(lives < 10 || needed <= 1, "{needed} calls of {NEEDED:?} never succeeded: {self}");
        assert!(lives < MANY || missed.is_empty() && self.cut > 0, "{missed:?} never succeeded: {self}");
    }
}

impl std::fmt::Display for Tally {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Tally { codes, killed, cut, together, steps } = self;
        let calls: usize = codes.values().sum();
        writeln!(f, "{steps} steps, {calls} calls, {together} rounds, {cut} of {killed} kills cut a call")?;
        let mut method = "";
        for ((of, code), count) in codes {
            if of != method {
                write!(f, "{}  {of}:", if method.is_empty() { "" } else { "\n" })?;
                method = of;
            }
            write!(f, " {code} {count}")?;
        }
        Ok(())
    }
}

/// The possible states of a driver (worlds), and the ids of the names.
#[derive(Clone)]
pub struct Known {
    pub set: NameSet,
    pub worlds: Vec<World>,
    pub names: Arc<Names>,
}

impl Known {
    /// For an empty driver. Volumes are staged and published below `dir`.
    pub fn new(set: NameSet, dir: PathBuf, world: World) -> Self {
        let sites = world.sites.to_vec();
        let names = Arc::new(Names { sites, ..Names::below(dir, set) });
        Known { set, worlds: vec![world], names }
    }
}

/// A driver, or several behind a router, with clients and the possible states.
pub struct Life<'r, 's> {
    pub rig: &'r mut Subject<'s>,
    pub tally: &'r mut Tally,
    pub known: &'r mut Known,
    clients: Vec<Client>,
    /// The answers so far.
    pub reported: Vec<String>,
}

/// The mounts and files below kubelet's directory.
struct Seen {
    mounted: Vec<MountPath>,
    /// Targets that exist although nothing is mounted there, and whether each is a directory.
    left: BTreeMap<MountPath, bool>,
}

/// If one node of several was killed, calls on objects of the others must be answered. Answers from all nodes may lack the
/// killed node's part, so they are not compared.
fn others_are_well(events: &mut [Event], killed: &str) -> Result<(), String> {
    for Event { asked, answer } in events {
        let objects = asked.objects();
        let is_of_all = matches!(
            asked.call,
            Call::ListVolumes(_)
                | Call::ListSnapshots { .. }
                | Call::ListHealth(_)
                | Call::GetCapacity { .. }
        );
        if is_of_all {
            *answer = Answer::Cut;
        } else if let Answer::Cut = answer
            && !objects.is_empty()
            && objects.iter().all(|id| key_of(id).is_some_and(|key| key != killed))
            && objects.iter().all(|id| id.starts_with("vol-") || id.starts_with("snap-"))
        {
            return Err(format!("{:?}: no answer, and the node of {killed} was killed", asked.call));
        }
    }
    Ok(())
}

/// Makes a call, and repeats it while its volume is in use elsewhere. An unmounted filesystem stays while another mount
/// namespace has a copy of the mount, as the containers of other tests have for a moment.
async fn make_patiently(client: &mut Client, asked: &Asked) -> Answer {
    let deadline = Instant::now() + LETTING_GO;
    loop {
        match make(client, asked).await {
            Answer::Failed(Code::FailedPrecondition, said)
                if testkit::is_held_elsewhere(Code::FailedPrecondition, &said)
                    && Instant::now() < deadline =>
            {
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
            answer => return answer,
        }
    }
}

impl<'r, 's> Life<'r, 's> {
    /// Continues with a driver in a known state.
    pub async fn begin(rig: &'r mut Subject<'s>, tally: &'r mut Tally, known: &'r mut Known) -> Self {
        let mut life = Life { rig, tally, known, clients: Vec::new(), reported: Vec::new() };
        life.connect().await;
        life
    }

    async fn connect(&mut self) {
        self.clients.clear();
        for _ in 0..CLIENTS {
            let client = Client::connect(&self.rig.socket(), Duration::ZERO).await.expect("connect");
            self.clients.push(client);
        }
    }

    /// Makes all steps, then checks everything, and then deletes everything.
    pub async fn live(&mut self, steps: &[Step]) -> Result<(), String> {
        let outcome = self.live_to_the_end(steps).await;
        for reported in &mut self.reported {
            *reported = self.known.names.spelled(reported);
        }
        outcome.map_err(|said| self.known.names.spelled(&said))
    }

    async fn live_to_the_end(&mut self, steps: &[Step]) -> Result<(), String> {
        for (number, step) in steps.iter().enumerate() {
            self.tally.steps += 1;
            let mut outcome = self.step(step).await;
            if outcome.is_ok() {
                outcome = self.check(Call::ListHealth(Pages::ALL)).await;
            }
            self.reported.resize(number + 1, String::new());
            outcome.map_err(|said| format!("step {}: {said}", number + 1))?;
        }
        self.look_at_all().await.map_err(|said| format!("at the end: {said}"))?;
        self.clear().await.map_err(|said| format!("while all is deleted: {said}"))
    }

    /// Makes one step, and checks the lists, the kernel and the devices.
    pub async fn step(&mut self, step: &Step) -> Result<(), String> {
        match step {
            Step::One(_) => self.round(step.calls(), None).await?,
            Step::Together(calls) => {
                self.tally.together += 1;
                self.round(calls, None).await?;
            }
            Step::Killed { calls, after } => {
                self.tally.killed += 1;
                self.round(calls, Some(Duration::from_micros(*after))).await?;
            }
            Step::Restart => {
                let status = self.rig.terminate();
                self.rig.start_again().await;
                self.connect().await;
                if !status.success() {
                    return Err(format!("the driver ended with {status}"));
                }
            }
            Step::Crash => {
                self.rig.kill_one();
                self.rig.start_again().await;
                self.connect().await;
            }
            Step::Write { volume, block, count, fill } => self.write(*volume, *block, *count, Some(*fill)),
            Step::Discard { volume, block, count } => self.write(*volume, *block, *count, None),
        }
        self.look().await
    }

    /// Makes concurrent calls, and kills the driver during them if `kill` is set. Of several drivers behind a router one is
    /// killed, or all if a call makes an object: with only one killed, an object of the same name may be made on another node
    /// and exist twice (`docs/router.md`), which this model does not cover.
    async fn round(&mut self, calls: &[Call], kill: Option<Duration>) -> Result<(), String> {
        let mut running = Vec::new();
        for (call, client) in calls.iter().zip(&self.clients) {
            let asked = Asked { call: call.clone(), names: self.known.names.clone() };
            let mut client = client.clone();
            running.push(tokio::spawn(async move {
                let answer = make_patiently(&mut client, &asked).await;
                Event { asked, answer }
            }));
        }
        let mut killed = None;
        if let Some(after) = kill {
            tokio::time::sleep(after).await;
            match calls.iter().any(Call::makes) {
                true => self.rig.kill(),
                false => killed = Some(self.rig.kill_one()),
            }
        }
        let mut events = Vec::new();
        for call in running {
            events.push(call.await.expect("a call"));
        }
        if let Some(killed) = killed.filter(|_| self.rig.is_routed()) {
            others_are_well(&mut events, &killed)?;
        }
        for Event { asked, answer } in &events {
            let code = match answer {
                Answer::Done(_) => "Ok".to_owned(),
                Answer::Failed(code, _) => format!("{code:?}"),
                Answer::Cut => "cut".to_owned(),
            };
            *self.tally.codes.entry((asked.call.method(), code)).or_default() += 1;
        }
        let answers: Vec<String> = events.iter().map(|event| event.answer.to_string()).collect();
        self.reported.push(answers.join(" || "));
        if kill.is_some() {
            self.tally.cut += usize::from(events.iter().any(|event| matches!(event.answer, Answer::Cut)));
            self.rig.start_again().await;
            self.connect().await;
            return self.cut(&events).await;
        }
        if events.iter().any(|event| matches!(event.answer, Answer::Cut)) {
            return Err("the connection broke, and nobody had killed the driver".into());
        }
        self.known.worlds = explain(&self.known.worlds, &events, &Listed::default())?;
        self.learn();
        Ok(())
    }

    /// Updates the worlds after calls of which some were interrupted, by a kill or a failed step. Keeps every outcome that the
    /// lists allow.
    pub async fn cut(&mut self, events: &[Event]) -> Result<(), String> {
        let listed = self.list().await?;
        self.known.worlds = explain(&self.known.worlds, events, &listed)?;
        // Only then names: in a world that the lists contradict an interrupted call may have given the id of an old object to
        // a new name, and what is deleted by that name at the end would be the old one.
        self.look_at_lists().await?;
        self.learn();
        Ok(())
    }

    /// Takes the ids of all objects from the worlds.
    fn learn(&mut self) {
        let Known { worlds, names, .. } = &mut *self.known;
        let names = Arc::make_mut(names);
        for world in worlds {
            for (id, volume) in &world.volumes {
                names.volume_has(volume.name, id, &volume.access);
            }
            for (id, snapshot) in &world.snapshots {
                if let Some(name) = snapshot.name {
                    names.snapshot_has(name, id);
                }
            }
            for (id, group) in &world.groups {
                names.group_has(group.name, id, group.members.iter().cloned());
            }
        }
    }

    async fn ask(&mut self, call: Call) -> Event {
        let asked = Asked { call, names: self.known.names.clone() };
        let answer = make_patiently(&mut self.clients[0], &asked).await;
        Event { asked, answer }
    }

    /// Makes a call that is not part of a step, and compares its answer with the worlds.
    async fn check(&mut self, call: Call) -> Result<(), String> {
        let event = self.ask(call).await;
        let said = format!("{:?}", event.asked.call);
        if let Answer::Cut = event.answer {
            return Err(format!("then {said}: the connection broke"));
        }
        let explained = explain(&self.known.worlds, &[event], &Listed::default());
        self.known.worlds = explained.map_err(|reason| format!("then {said}: {reason}"))?;
        Ok(())
    }

    async fn list(&mut self) -> Result<Listed, String> {
        let volumes = self.ask(Call::ListVolumes(Pages::ALL)).await.answer;
        let snapshots =
            self.ask(Call::ListSnapshots { pages: Pages::ALL, of: None, only: None }).await.answer;
        Listed::of(&volumes, &snapshots)
    }

    async fn look_at_lists(&mut self) -> Result<(), String> {
        self.check(Call::ListVolumes(Pages::ALL)).await?;
        self.check(Call::ListSnapshots { pages: Pages::ALL, of: None, only: None }).await
    }

    /// Compares the lists and the kernel with the worlds.
    pub async fn look(&mut self) -> Result<(), String> {
        self.look_at_lists().await?;
        let seen = self.seen();
        self.narrow(|world| world.check_kernel(&seen))?;
        self.look_at_devices().await
    }

    /// Keeps the worlds for which `fits` succeeds.
    fn narrow(&mut self, fits: impl Fn(&mut World) -> Result<(), String>) -> Result<(), String> {
        let mut reason = String::new();
        self.known.worlds.retain_mut(|world| match fits(world) {
            Ok(()) => true,
            Err(said) => {
                reason = said;
                false
            }
        });
        if self.known.worlds.is_empty() { Err(reason) } else { Ok(()) }
    }

    fn seen(&self) -> Seen {
        let places: BTreeMap<String, MountPath> =
            self.known.set.places().into_iter().map(|place| (self.known.names.path(place), place)).collect();
        let mounts = mount::mounts().expect("mounts");
        let shown = mounts.iter().filter_map(|mount| places.get(&mount.mount_point.display().to_string()));
        let mut mounted: Vec<MountPath> = shown.copied().collect();
        mounted.sort();
        let mut left = BTreeMap::new();
        for (path, place) in places {
            if matches!(place, MountPath::Target(_))
                && !mounted.contains(&place)
                && let Ok(meta) = std::fs::symlink_metadata(path)
            {
                left.insert(place, meta.is_dir());
            }
        }
        Seen { mounted, left }
    }

    /// Writes or discards blocks, or writes a file, if the volume is published for writing in every world.
    fn write(&mut self, name: Name, block: u64, count: u64, fill: Option<u8>) {
        let there = |world: &World| {
            let (id, volume) = world.volumes.iter().find(|(_, volume)| volume.name == name)?;
            let published = volume.published.iter().find(|published| !published.read_only)?;
            // Where an expansion was cut, the device may be smaller than the volume until a retry.
            let size = if volume.grown { volume.capacity } else { 0 };
            Some((id.clone(), published.at, size, volume.bytes.clone()))
        };
        let Some((id, at, size, bytes)) = there(&self.known.worlds[0]) else { return };
        let same = Some((id.clone(), at, size, bytes.clone()));
        if self.known.worlds.iter().any(|world| there(world) != same) {
            return;
        }
        let path = self.known.names.path(at);
        let path = Path::new(&path);
        let kind = self.known.worlds[0].volumes[&id].staged.as_ref().map(|staged| staged.kind);
        let bytes = match (bytes, fill, kind) {
            (Bytes::Raw(mut content), fill, Some(super::names::Kind::Block)) => {
                if (block + count) * BLOCK > size {
                    return;
                }
                match fill {
                    Some(fill) => content.write(path, block, count, fill),
                    None => content.discard(path, block, count),
                }
                Bytes::Raw(content)
            }
            (Bytes::Fs(kind, _), Some(fill), Some(super::names::Kind::Fs(_))) => {
                std::fs::write(path.join(MARK), [fill]).expect("write a file");
                Bytes::Fs(kind, Some(fill))
            }
            _ => return,
        };
        for world in &mut self.known.worlds {
            world.volumes.get_mut(&id).expect("it is the same in all").bytes = bytes.clone();
        }
    }
}

impl World {
    /// Checks that exactly the expected mounts exist, and that nothing is left at a target unless a kill explains it.
    fn check_kernel(&mut self, seen: &Seen) -> Result<(), String> {
        let mut want: Vec<MountPath> = Vec::new();
        for volume in self.volumes.values() {
            want.extend(volume.staged.iter().filter(|_| volume.is_mounted()).map(|staged| staged.at));
            want.extend(volume.published.iter().map(|published| published.at));
        }
        want.extend(self.ephemeral.values().filter(|volume| volume.there).map(|volume| volume.at));
        want.sort();
        let shown =
            |places: &[MountPath]| places.iter().map(MountPath::to_string).collect::<Vec<_>>().join(", ");
        if seen.mounted != want {
            return Err(format!("mounted are [{}], want [{}]", shown(&seen.mounted), shown(&want)));
        }
        if let Some((place, _)) = seen.left.iter().find(|(place, _)| !self.litter.contains(place)) {
            return Err(format!("something is left at {place}"));
        }
        self.litter.retain(|place| seen.left.contains_key(place));
        self.left = seen.left.clone();
        Ok(())
    }
}

/// The blocks that a life writes, and their neighbours.
fn blocks(content: &Content, capacity: u64) -> Vec<u64> {
    let around = |block: &u64| block.saturating_sub(1)..block + 2;
    let mut blocks: Vec<u64> = content.blocks.keys().flat_map(around).chain(0..20).collect();
    blocks.extend([capacity / BLOCK - 1]);
    blocks.retain(|block| (block + 1) * BLOCK <= capacity);
    blocks.sort_unstable();
    blocks.dedup();
    blocks
}

mod end;
