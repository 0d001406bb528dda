//! The ids of the short names, and a call with the ids that its names had when it began, even if the names get other ids
//! meanwhile.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;

use csi_client::{block_capability, mount_capability};
use proto::VolumeCapability;
use proto::volume_capability::{AccessMode, access_mode};

use super::calls::{ANOTHER, Access, Call, Mode, MountPath, Name, NameSet, NewName, Node, Ref, Use};
use super::volumes::kinds;
use super::wire::Reply;
use testkit::cluster::key_of;
use testkit::subject::Site;

/// Digits of an id that was never given.
const NEVER: &str = "00000000000000000000000000000000";

/// A device, or a filesystem of this type.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Kind {
    Block,
    Fs(&'static str),
}

#[derive(Clone, Debug, Default)]
pub struct Names {
    /// The directory of all paths.
    pub dir: PathBuf,
    /// The node, or the nodes behind a router.
    pub sites: Vec<Site>,
    /// Ids in the order in which they were given, with the kinds of access that the volume was made for.
    pub volumes: BTreeMap<Name, Vec<(String, Vec<Kind>)>>,
    pub snapshots: BTreeMap<Name, Vec<String>>,
    /// With their members.
    pub groups: BTreeMap<Name, Vec<(String, Vec<String>)>>,
}

/// What a name was given last, or before.
fn pick<T: Clone>(given: &BTreeMap<Name, Vec<T>>, id: &Ref) -> Option<T> {
    let (name, back) = match id {
        Ref::Last(name) | Ref::Member(name, _) => (name, 0),
        Ref::Former(name) => (name, 1),
        _ => return None,
    };
    let given = given.get(name)?;
    given.len().checked_sub(1 + back).map(|at| given[at].clone())
}

impl Names {
    /// An id of no object. Behind a router it has the key of a known node, since a router cannot know about ids of other nodes.
    fn odd(&self, kind: &str, id: &Ref) -> String {
        match (id, &self.sites[..]) {
            (Ref::Nonsense, _) => "../x".to_owned(),
            (Ref::Empty, _) => String::new(),
            (_, [site, _, ..]) => format!("{kind}-{}{}", site.key, &NEVER[site.key.len()..]),
            _ => format!("{kind}-{NEVER}"),
        }
    }

    pub fn node(&self, node: Node, volume: &Ref) -> String {
        let id = self.volume(volume);
        let its =
            self.sites.iter().find(|site| key_of(&id).as_ref() == Some(&site.key)).or(self.sites.first());
        match node {
            Node::This => its.map_or_else(|| Site::alone().name, |its| its.name.clone()),
            Node::Another => ANOTHER.to_owned(),
            Node::Empty => String::new(),
        }
    }

    /// Makes the staging directories. There are no ids yet.
    pub fn below(dir: PathBuf, set: NameSet) -> Self {
        let names = Names { dir, ..Names::default() };
        for place in set.places().into_iter().filter(|place| matches!(place, MountPath::Staging(_))) {
            std::fs::create_dir_all(names.path(place)).expect("make a staging directory");
        }
        names
    }

    /// From now on the name refers to this volume, unless it has referred to it before.
    pub fn volume_has(&mut self, name: Name, id: &str, made_for: &[Kind]) {
        let given = self.volumes.entry(name).or_default();
        if given.iter().all(|(other, _)| other != id) {
            given.push((id.to_owned(), made_for.to_vec()));
        }
    }

    /// The same for a snapshot.
    pub fn snapshot_has(&mut self, name: Name, id: &str) {
        let given = self.snapshots.entry(name).or_default();
        if given.iter().all(|other| other != id) {
            given.push(id.to_owned());
        }
    }

    /// The same for a group, whose members stay in this order.
    pub fn group_has(&mut self, name: Name, id: &str, members: impl Iterator<Item = String>) {
        let given = self.groups.entry(name).or_default();
        if given.iter().all(|(other, _)| other != id) {
            given.push((id.to_owned(), members.collect()));
        }
    }

    /// Adds the ids in an answer.
    pub fn learn(&mut self, call: &Call, reply: &Reply) {
        match (call, reply) {
            (Call::CreateVolume(new), Reply::Volume(made)) => {
                if let NewName::Fine(name) = new.name {
                    self.volume_has(name, &made.volume_id, &kinds(&new.uses).unwrap_or_default());
                }
            }
            (Call::CreateSnapshot { name: NewName::Fine(name), .. }, Reply::Snapshot(made)) => {
                self.snapshot_has(*name, &made.snapshot_id);
            }
            (Call::CreateGroup { name: NewName::Fine(name), .. }, Reply::Group(made)) => {
                let members = made.snapshots.iter().map(|member| member.snapshot_id.clone());
                self.group_has(*name, &made.group_snapshot_id, members);
            }
            _ => {}
        }
    }

    /// Replaces ids and paths in a text by short names.
    pub fn spelled(&self, text: &str) -> String {
        let mut text = text.replace(&format!("{}/", self.dir.display()), "");
        let mut spell = |id: &String, name: String| text = text.replace(id.as_str(), &format!("<{name}>"));
        for (name, given) in &self.volumes {
            given.iter().for_each(|(id, _)| spell(id, name.to_string()));
        }
        for (name, given) in &self.snapshots {
            given.iter().for_each(|id| spell(id, name.to_string()));
        }
        for (name, given) in &self.groups {
            for (id, members) in given {
                spell(id, name.to_string());
                members.iter().enumerate().for_each(|(at, id)| spell(id, format!("{name}[{at}]")));
            }
        }
        text
    }

    pub fn volume(&self, id: &Ref) -> String {
        pick(&self.volumes, id).map_or_else(|| self.odd("vol", id), |(id, _)| id)
    }

    pub fn snapshot(&self, id: &Ref) -> String {
        let found = match id {
            Ref::Member(_, place) => {
                pick(&self.groups, id).and_then(|(_, members)| members.get(*place).cloned())
            }
            id => pick(&self.snapshots, id),
        };
        found.unwrap_or_else(|| self.odd("snap", id))
    }

    pub fn group(&self, id: &Ref) -> (String, Vec<String>) {
        pick(&self.groups, id).unwrap_or_else(|| (self.odd("group", id), vec!["x".into()]))
    }

    /// The access that a use means for a volume.
    pub fn access(&self, asked: Use, volume: &Ref) -> Access {
        match (asked.access, pick(&self.volumes, volume)) {
            (Access::AsMade, Some((_, kinds))) => {
                let fs = kinds.iter().find_map(|kind| match kind {
                    Kind::Fs(name) => Some(Access::Fs(name)),
                    Kind::Block => None,
                });
                fs.unwrap_or(Access::Block)
            }
            (Access::AsMade, None) => Access::Block,
            (access, _) => access,
        }
    }

    /// The message of a use for a volume.
    pub fn capability(&self, asked: Use, volume: &Ref) -> VolumeCapability {
        capability(self.access(asked, volume), asked.mode)
    }

    /// A use with the access that it means for a volume.
    pub fn asked(&self, asked: Use, volume: &Ref) -> Use {
        Use { access: self.access(asked, volume), ..asked }
    }

    pub fn path(&self, place: MountPath) -> String {
        match place {
            MountPath::Empty => String::new(),
            place => self.dir.join(place.to_string().replace('/', "-")).display().to_string(),
        }
    }
}

pub fn capability(access: Access, mode: Mode) -> VolumeCapability {
    let mut capability = match access {
        Access::AsMade | Access::Block => block_capability(),
        Access::Fs(name) => mount_capability(name),
    };
    let mode = match mode {
        Mode::Writer => access_mode::Mode::SingleNodeWriter,
        Mode::MultiWriter => access_mode::Mode::SingleNodeMultiWriter,
        Mode::Reader => access_mode::Mode::SingleNodeReaderOnly,
        Mode::Readers => access_mode::Mode::MultiNodeReaderOnly,
        Mode::ManyNodes => access_mode::Mode::MultiNodeMultiWriter,
    };
    capability.access_mode = Some(AccessMode { mode: mode.into() });
    capability
}

fn named(kind: &str, name: &NewName) -> String {
    format!("name of a {kind}: {}", name.text(""))
}

/// A call with the ids that its names had when it began.
#[derive(Clone, Debug)]
pub struct Asked {
    pub call: Call,
    pub names: Arc<Names>,
}

impl Asked {
    /// The name of the snapshot or group that the call makes, and its first source.
    pub fn made_of(&self) -> Option<(String, String)> {
        match &self.call {
            Call::CreateSnapshot { name, volume, .. } => {
                Some((named("snapshot", name), self.names.volume(volume)))
            }
            Call::CreateGroup { name, volumes, .. } => {
                Some((named("group", name), self.names.volume(volumes.first()?)))
            }
            _ => None,
        }
    }

    /// The objects that the call works on. Of two concurrent calls that share one, either may be answered with ABORTED.
    pub fn objects(&self) -> Vec<String> {
        let names = &self.names;
        match &self.call {
            Call::CreateVolume(new) => {
                let mut objects = vec![named("volume", &new.name)];
                if let super::calls::From::Volume(volume) = &new.from {
                    objects.push(names.volume(volume));
                }
                objects
            }
            Call::CreateSnapshot { name, volume, .. } => {
                vec![named("snapshot", name), names.volume(volume)]
            }
            Call::CreateGroup { name, volumes, .. } => {
                let volumes = volumes.iter().map(|volume| names.volume(volume));
                std::iter::once(named("group", name)).chain(volumes).collect()
            }
            Call::DeleteVolume(volume)
            | Call::ControllerPublish { volume, .. }
            | Call::ControllerUnpublish { volume, .. }
            | Call::Expand { volume, .. }
            | Call::Modify { volume, .. }
            | Call::Stage { volume, .. }
            | Call::Unstage { volume, .. }
            | Call::Publish { volume, .. }
            | Call::Unpublish { volume, .. }
            | Call::NodeExpand { volume, .. } => vec![names.volume(volume)],
            Call::DeleteSnapshot(snapshot) => vec![names.snapshot(snapshot)],
            Call::DeleteGroup { group, .. } => vec![names.group(group).0],
            Call::PublishEphemeral { handle, .. } | Call::UnpublishEphemeral { handle, .. } => {
                vec![format!("ephemeral {handle}")]
            }
            _ => Vec::new(),
        }
    }
}
