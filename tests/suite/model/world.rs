//! The model: the state of a driver that conforms to the CSI spec, and its answers. The rules for each call are in
//! `volumes.rs`, `snapshots.rs` and `node.rs`.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use super::calls::{Access, Call, Mode, MountPath, Name, Question, Use};
use super::names::{Asked, Kind};
use super::wire::{Answer, Reply};
use testkit::cluster::key_of;
use testkit::prelude::*;
use testkit::subject::Site;

pub const MIB: u64 = 1 << 20;
/// The name of the file that marks a filesystem's content.
pub const MARK: &str = "mark";

/// Why an answer does not fit.
#[derive(Debug)]
pub enum Unfit {
    /// The call must fail with one of these codes, for this reason. If the answer has such a code, it is right.
    Refused(&'static [Code], String),
    Wrong(String),
}

pub type Rule<T = ()> = Result<T, Unfit>;

pub fn refused<T>(code: &'static [Code], why: impl Into<String>) -> Rule<T> {
    Err(Unfit::Refused(code, why.into()))
}

pub fn wrong<T>(what: impl Into<String>) -> Rule<T> {
    Err(Unfit::Wrong(what.into()))
}

pub const INVALID: &[Code] = &[Code::InvalidArgument];
pub const NOT_FOUND: &[Code] = &[Code::NotFound];
pub const EXISTS: &[Code] = &[Code::AlreadyExists];
const EXISTS_OR_NOT_FOUND: &[Code] = &[Code::AlreadyExists, Code::NotFound];
pub const PRECONDITION: &[Code] = &[Code::FailedPrecondition];
pub const RANGE: &[Code] = &[Code::OutOfRange];
pub const EXHAUSTED: &[Code] = &[Code::ResourceExhausted];
pub const ABORTED: &[Code] = &[Code::Aborted];
pub const UNIMPLEMENTED: &[Code] = &[Code::Unimplemented];

/// The bytes of a volume or snapshot.
#[derive(Clone, Debug, PartialEq)]
pub enum Bytes {
    /// The content of the device, by block.
    Raw(Content),
    /// A filesystem, and the byte in its file, if it has the file.
    Fs(&'static str, Option<u8>),
    /// Our own mkfs was interrupted, so the device is formatted again.
    HalfMade,
    /// A copy of a half-made filesystem: nothing is known about it.
    Unsure,
}

#[derive(Clone, Debug, PartialEq)]
pub enum Source {
    Snapshot(String),
    Volume(String),
}

#[derive(Clone, Debug, PartialEq)]
pub struct Attached {
    pub kind: Kind,
    pub mode: Mode,
    pub read_only: bool,
}

#[derive(Clone, Debug, PartialEq)]
pub struct Staged {
    pub at: MountPath,
    pub kind: Kind,
    pub read_only: bool,
}

#[derive(Clone, Debug, PartialEq)]
pub struct Published {
    pub at: MountPath,
    pub read_only: bool,
    pub shared: bool,
}

#[derive(Clone, Debug, PartialEq)]
pub struct Volume {
    pub name: Name,
    pub capacity: u64,
    pub block_size: u64,
    pub tracking: bool,
    pub access: Vec<Kind>,
    pub source: Option<Source>,
    /// The possible values of the mutable parameter `readAheadKiB`: several after a kill, until it is set again.
    pub read_ahead: BTreeSet<Option<u32>>,
    pub attached: Option<Attached>,
    pub staged: Option<Staged>,
    pub published: Vec<Published>,
    /// Places that a failed or interrupted call may have recorded.
    pub haunted: BTreeSet<MountPath>,
    /// Whether the device is known to be as large as the volume.
    pub grown: bool,
    /// Its size when its filesystem was mounted.
    pub mounted_with: u64,
    pub bytes: Bytes,
}

impl Volume {
    pub fn fs(&self) -> Option<&'static str> {
        self.access.iter().find_map(|kind| match kind {
            Kind::Fs(name) => Some(*name),
            Kind::Block => None,
        })
    }

    /// Whether it is mounted at its staging path. A Block volume is mounted only at its targets.
    pub fn is_mounted(&self) -> bool {
        self.staged.as_ref().is_some_and(|staged| staged.kind != Kind::Block)
    }

    /// Whether it must have a device.
    pub fn is_used(&self) -> bool {
        self.is_mounted() || !self.published.is_empty()
    }

    pub fn published_at(&self, at: MountPath) -> Option<&Published> {
        self.published.iter().find(|published| published.at == at)
    }
}

#[derive(Clone, Debug, PartialEq)]
pub struct Snapshot {
    /// `None` for a member of a group.
    pub name: Option<Name>,
    pub volume: String,
    /// Later snapshots of a volume have larger numbers.
    pub sequence: u64,
    pub capacity: u64,
    pub block_size: u64,
    pub tracking: bool,
    pub fixed: bool,
    pub group: Option<String>,
    pub bytes: Bytes,
}

#[derive(Clone, Debug, PartialEq)]
pub struct Group {
    pub name: Name,
    pub members: BTreeSet<String>,
    pub fixed: bool,
}

#[derive(Clone, Debug, PartialEq)]
pub struct Ephemeral {
    pub capacity: u64,
    pub kind: Kind,
    pub at: MountPath,
    pub read_only: bool,
    /// Whether it is mounted. A kill may have come before that.
    pub there: bool,
}

/// A possible state of the driver. Objects are listed by id, except ephemeral volumes, since no call returns their ids.
#[derive(Clone, Debug, PartialEq)]
pub struct World {
    pub attach: bool,
    /// The node, or the nodes behind a router. The id of a volume tells its node; ephemeral volumes are on the first.
    pub sites: Arc<[Site]>,
    /// Deleted snapshots of a volume that are kept as a base for deltas.
    pub retain: usize,
    pub volumes: BTreeMap<String, Volume>,
    pub snapshots: BTreeMap<String, Snapshot>,
    pub retained: BTreeMap<String, Snapshot>,
    pub groups: BTreeMap<String, Group>,
    pub ephemeral: BTreeMap<Name, Ephemeral>,
    /// Targets at which a kill may have left a file or directory.
    pub litter: BTreeSet<MountPath>,
    /// For targets where something is left, whether it is a directory.
    pub left: BTreeMap<MountPath, bool>,
    /// Names of snapshots and groups, each with the key of a node: a call for it ended with ABORTED, so a router may keep the
    /// name for this node.
    pub kept_names: BTreeSet<(String, String)>,
}

impl World {
    pub fn new(attach: bool, sites: Arc<[Site]>, retain: usize) -> Self {
        World {
            attach,
            sites,
            retain,
            volumes: BTreeMap::new(),
            snapshots: BTreeMap::new(),
            retained: BTreeMap::new(),
            groups: BTreeMap::new(),
            ephemeral: BTreeMap::new(),
            litter: BTreeSet::new(),
            left: BTreeMap::new(),
            kept_names: BTreeSet::new(),
        }
    }

    /// Updates the state with an answer, or returns why no driver in this state would give it. `alone`: no other call was
    /// running, so values that are read without a lock must be exact too.
    pub fn accept(&mut self, asked: &Asked, answer: &Answer, alone: bool) -> Result<(), String> {
        self.judge(|world| world.rule(asked, answer, alone), answer)?;
        if let (Answer::Done(_), Some((name, _))) = (answer, asked.made_of()) {
            self.kept_names.retain(|(kept, _)| *kept != name);
        }
        Ok(())
    }

    /// Compares an answer with a rule.
    pub fn judge(&mut self, rule: impl FnOnce(&mut World) -> Rule, answer: &Answer) -> Result<(), String> {
        match rule(self) {
            Ok(()) => Ok(()),
            Err(Unfit::Wrong(what)) => Err(what),
            Err(Unfit::Refused(codes, why)) => match answer {
                Answer::Failed(code, _) if codes.contains(code) => Ok(()),
                answer => Err(format!("got {answer}, want {codes:?}: {why}")),
            },
        }
    }

    fn rule(&mut self, asked: &Asked, answer: &Answer, alone: bool) -> Rule {
        let names = &*asked.names;
        match &asked.call {
            Call::CreateVolume(new) => self.create_volume(names, new, answer),
            Call::DeleteVolume(volume) => self.delete_volume(&names.volume(volume), answer),
            Call::ControllerPublish { volume, node, asked, read_only } => {
                self.attach(&names.volume(volume), *node, names.asked(*asked, volume), *read_only, answer)
            }
            Call::ControllerUnpublish { volume, node } => self.detach(&names.volume(volume), *node, answer),
            Call::Validate { volume, asked } => {
                self.validate(&names.volume(volume), names.asked(*asked, volume), answer)
            }
            Call::ListVolumes(pages) => self.list_volumes(*pages, answer, alone),
            Call::GetVolume(volume) => self.get_volume(&names.volume(volume), answer),
            Call::ListHealth(pages) => self.list_health(*pages, answer),
            Call::GetHealth(volume) => self.get_health(&names.volume(volume), answer),
            Call::GetCapacity { asked } => self.get_capacity(*asked, answer, alone),
            Call::Expand { volume, size, asked } => {
                let asked = asked.map(|asked| names.asked(asked, volume));
                self.expand(&names.volume(volume), *size, asked, answer)
            }
            Call::Modify { volume, read_ahead, .. } => self.modify(&names.volume(volume), read_ahead, answer),
            Call::CreateSnapshot { name, volume, style } => {
                self.create_snapshot(*name, &names.volume(volume), *style, answer)
            }
            Call::DeleteSnapshot(snapshot) => self.delete_snapshot(&names.snapshot(snapshot), answer),
            Call::ListSnapshots { pages, of, only } => {
                let of = of.as_ref().map(|of| names.volume(of)).unwrap_or_default();
                let only = only.as_ref().map(|only| names.snapshot(only)).unwrap_or_default();
                self.list_snapshots(*pages, &of, &only, answer, alone)
            }
            Call::GetSnapshot(snapshot) => self.get_snapshot(&names.snapshot(snapshot), answer),
            Call::CreateGroup { name, volumes, style } => {
                let volumes: Vec<String> = volumes.iter().map(|volume| names.volume(volume)).collect();
                self.create_group(*name, &volumes, *style, answer)
            }
            Call::DeleteGroup { group, members } => self.delete_group(names.group(group), *members, answer),
            Call::GetGroup { group, members } => self.get_group(names.group(group), *members, answer),
            Call::Stage { volume, at, asked } => {
                self.stage(&names.volume(volume), *at, names.asked(*asked, volume), answer)
            }
            Call::Unstage { volume, at } => self.unstage(&names.volume(volume), *at, answer),
            Call::Publish { volume, staged, at, asked, read_only } => self.publish(
                &names.volume(volume),
                *staged,
                *at,
                names.asked(*asked, volume),
                *read_only,
                answer,
            ),
            Call::Unpublish { volume, at } => self.unpublish(&names.volume(volume), *at, answer),
            Call::PublishEphemeral { handle, at, asked, size, read_only } => {
                self.publish_ephemeral(*handle, *at, *asked, size, *read_only, answer)
            }
            Call::UnpublishEphemeral { handle, at } => self.unpublish_ephemeral(*handle, *at, answer),
            Call::Stats { volume, at } => self.stats(&names.volume(volume), *at, answer, alone),
            Call::NodeHealth { volume, .. } => self.node_health(&names.volume(volume), answer),
            Call::NodeExpand { volume, at, size, asked } => {
                let asked = asked.map(|asked| names.asked(asked, volume));
                self.node_expand(&names.volume(volume), *at, *size, asked, answer)
            }
            Call::Allocated { snapshot, cut } => self.allocated(&names.snapshot(snapshot), *cut, answer),
            Call::Delta { base, target, cut } => {
                self.delta(&names.snapshot(base), &names.snapshot(target), *cut, answer)
            }
            Call::Ask(question) => self.ask(*question, answer),
        }
    }

    pub fn volume(&mut self, id: &str) -> Rule<&mut Volume> {
        if id.is_empty() {
            return refused(INVALID, "the volume id is missing");
        }
        match self.volumes.get_mut(id) {
            Some(volume) => Ok(volume),
            None => refused(NOT_FOUND, "there is no such volume"),
        }
    }

    /// The bytes that can still be provisioned on each node.
    pub fn rooms(&self) -> Vec<u64> {
        let mut rooms: Vec<u64> = self.sites.iter().map(|site| site.room).collect();
        for (id, volume) in &self.volumes {
            let room = &mut rooms[self.site(id)];
            *room = room.saturating_sub(volume.capacity);
        }
        let ephemeral: u64 = self.ephemeral.values().map(|volume| volume.capacity).sum();
        rooms[0] = rooms[0].saturating_sub(ephemeral);
        rooms
    }

    /// The same on the node of an object.
    pub fn room(&self, id: &str) -> u64 {
        self.rooms()[self.site(id)]
    }

    /// The node of an object. Calls with an id of no node go to the first.
    fn site(&self, id: &str) -> usize {
        self.sites.iter().position(|site| Some(&site.key) == key_of(id).as_ref()).unwrap_or(0)
    }

    /// The name of its node.
    pub fn node(&self, id: &str) -> &str {
        &self.sites[self.site(id)].name
    }

    /// Whether there is a router. It makes some checks before a node makes others.
    pub fn is_routed(&self) -> bool {
        self.sites.len() > 1
    }

    /// Whether the valid ids among these belong to different nodes.
    pub fn are_apart<'i>(&self, ids: impl IntoIterator<Item = &'i str>) -> bool {
        let keys: BTreeSet<String> = ids.into_iter().filter_map(key_of).collect();
        self.is_routed() && keys.len() > 1
    }

    /// The call was answered with ABORTED.
    pub fn abort(&mut self, asked: &Asked) {
        if let Some((name, source)) = asked.made_of().filter(|_| self.is_routed()) {
            self.kept_names.extend(key_of(&source).map(|key| (name, key)));
        }
    }

    /// Whether a router may keep the name that the call gives for another node.
    pub fn is_kept_elsewhere(&self, asked: &Asked) -> bool {
        asked.made_of().is_some_and(|(name, source)| {
            let ours = key_of(&source);
            self.kept_names.iter().any(|(kept, key)| *kept == name && ours.as_ref() != Some(key))
        })
    }

    /// Forgets the deleted snapshots of a volume that cannot be the base of a delta, and the oldest ones beyond the count.
    pub fn settle(&mut self, volume: &str) {
        let newest = self.snapshots.values().filter(|live| live.volume == volume).map(|live| live.sequence);
        let newest = newest.max().unwrap_or(0);
        let lives = self.volumes.contains_key(volume);
        let of = |kept: &Snapshot| kept.volume == volume;
        self.retained.retain(|_, kept| !of(kept) || (kept.tracking && (lives || newest > kept.sequence)));
        let mut all: Vec<u64> =
            self.retained.values().filter(|kept| of(kept)).map(|kept| kept.sequence).collect();
        all.sort_unstable();
        let first = all.len().saturating_sub(self.retain);
        let first = all.get(first).copied().unwrap_or(u64::MAX);
        self.retained.retain(|_, kept| !of(kept) || kept.sequence >= first);
    }

    /// The codes for a call with a name that is taken, if it names these objects. A router looks up their node first, and an
    /// invalid id has none.
    pub fn taken<'i>(&self, ids: impl IntoIterator<Item = &'i str>) -> &'static [Code] {
        let has_node = |id: &str| self.sites.iter().any(|site| key_of(id).as_ref() == Some(&site.key));
        match self.is_routed() && !ids.into_iter().all(has_node) {
            true => EXISTS_OR_NOT_FOUND,
            false => EXISTS,
        }
    }

    fn ask(&self, question: Question, answer: &Answer) -> Rule {
        let Reply::Text(text) = done(answer)? else { return wrong("no answer in the answer") };
        let node = format!("node_id: {:?}", self.sites[0].name);
        let (has, lacks): (&[&str], &[&str]) = match question {
            Question::Probe => (&["ready: Some(true)"], &[]),
            Question::GetPluginInfo if self.is_routed() => (&["\"deltapath.csi.dev\"", "\"nodes\""], &[]),
            Question::GetPluginInfo => (&["\"deltapath.csi.dev\"", "\"pool\""], &[]),
            Question::GetPluginCapabilities => (
                &[
                    "ControllerService",
                    "GroupControllerService",
                    "SnapshotMetadataService",
                    "SnapshotAccessibilityConstraints",
                    "Online",
                ],
                &["Unknown"],
            ),
            Question::ControllerGetCapabilities => match self.attach {
                true => (&["CreateDeleteVolume", "PublishUnpublishVolume", "PublishReadonly"], &[]),
                false => (&["CreateDeleteVolume", "GetSnapshot"], &["PublishUnpublishVolume"]),
            },
            Question::GroupControllerGetCapabilities => (&["CreateDeleteGetVolumeGroupSnapshot"], &[]),
            Question::NodeGetCapabilities => (&["StageUnstageVolume", "ExpandVolume"], &["VolumeMountGroup"]),
            Question::NodeGetStorageHealth => (&["backend_health"], &["Pool"]),
            Question::NodeGetInfo => (&[&node, "topology.deltapath.csi.dev/node"], &[]),
        };
        for word in has {
            if !text.contains(word) {
                return wrong(format!("{word} is missing in {text}"));
            }
        }
        match lacks.iter().find(|word| text.contains(**word)) {
            Some(word) => wrong(format!("{word} is not to be in {text}")),
            None => Ok(()),
        }
    }
}

/// The reply of a call that must succeed.
pub fn done(answer: &Answer) -> Rule<&Reply> {
    match answer {
        Answer::Done(reply) => Ok(reply),
        answer => wrong(format!("got {answer}, want OK")),
    }
}

/// The kind of access of a capability. `default` is the filesystem if it names none.
pub fn kind(asked: Use, default: &'static str) -> Rule<Kind> {
    match asked.access {
        Access::AsMade | Access::Block => Ok(Kind::Block),
        Access::Fs("") => Ok(Kind::Fs(default)),
        Access::Fs(name @ ("ext4" | "xfs" | "btrfs")) => Ok(Kind::Fs(name)),
        Access::Fs(name) => refused(INVALID, format!("{name} is no filesystem of this driver")),
    }
}

pub fn check_mode(asked: Use) -> Rule {
    match asked.mode {
        Mode::ManyNodes => refused(INVALID, "the access mode is not supported"),
        _ => Ok(()),
    }
}

/// The kind of access of a capability for a volume, whatever that was made for.
pub fn kind_of(asked: Use, volume: &Volume) -> Rule<Kind> {
    kind(asked, volume.fs().unwrap_or("ext4"))
}

/// Whether a volume that is staged as `there` can be used so.
pub fn fits(asked: Use, there: Kind) -> bool {
    match (asked.access, there) {
        (Access::AsMade | Access::Block, Kind::Block) | (Access::Fs(""), Kind::Fs(_)) => true,
        (Access::Fs(name), Kind::Fs(there)) => name == there,
        _ => false,
    }
}

pub fn equal<T: PartialEq + std::fmt::Debug>(what: &str, got: &T, want: &T) -> Rule {
    match got == want {
        true => Ok(()),
        false => wrong(format!("{what} is {got:?}, want {want:?}")),
    }
}
