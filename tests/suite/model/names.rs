//! Which ids the short names stand for, and a call made ready with them: from here on it is about
//! ids, whatever the same names come to mean while it is under way.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;

use csi_client::{block_capability, mount_capability};
use proto::VolumeCapability;
use proto::volume_capability::{AccessMode, access_mode};

use super::calls::{Access, Call, Mode, Name, NewName, Place, Ref, Use};

const NEVER: &str = "00000000000000000000000000000000";

/// As a device or with a filesystem of this type.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Kind {
    Block,
    Fs(&'static str),
}

#[derive(Clone, Debug, Default)]
pub struct Names {
    /// Where paths are.
    pub dir: PathBuf,
    /// Ids in the order in which they were given, with what the volume was made for.
    pub volumes: BTreeMap<Name, Vec<(String, Vec<Kind>)>>,
    pub snapshots: BTreeMap<Name, Vec<String>>,
    /// With their members.
    pub groups: BTreeMap<Name, Vec<(String, Vec<String>)>>,
}

fn pick<T: Clone>(given: &BTreeMap<Name, Vec<T>>, name: Name, back: usize) -> Option<T> {
    let given = given.get(&name)?;
    given.len().checked_sub(1 + back).map(|at| given[at].clone())
}

fn odd(kind: &str, id: &Ref) -> String {
    match id {
        Ref::Nonsense => "../x".to_owned(),
        Ref::Empty => String::new(),
        _ => format!("{kind}-{NEVER}"),
    }
}

impl Names {
    /// A text with short names for ids and paths.
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

    fn made(&self, id: &Ref) -> Option<(String, Vec<Kind>)> {
        match id {
            Ref::Last(name) => pick(&self.volumes, *name, 0),
            Ref::Former(name) => pick(&self.volumes, *name, 1),
            _ => None,
        }
    }

    pub fn volume(&self, id: &Ref) -> String {
        self.made(id).map_or_else(|| odd("vol", id), |(id, _)| id)
    }

    pub fn snapshot(&self, id: &Ref) -> String {
        let found = match id {
            Ref::Last(name) => pick(&self.snapshots, *name, 0),
            Ref::Former(name) => pick(&self.snapshots, *name, 1),
            Ref::Member(name, place) => {
                pick(&self.groups, *name, 0).and_then(|(_, members)| members.get(*place).cloned())
            }
            _ => None,
        };
        found.unwrap_or_else(|| odd("snap", id))
    }

    /// A group and the members it had.
    pub fn group(&self, id: &Ref) -> (String, Vec<String>) {
        let found = match id {
            Ref::Last(name) => pick(&self.groups, *name, 0),
            Ref::Former(name) => pick(&self.groups, *name, 1),
            _ => None,
        };
        found.unwrap_or_else(|| (odd("group", id), vec!["x".into()]))
    }

    /// What a use asks of a volume.
    pub fn access(&self, asked: Use, volume: &Ref) -> Access {
        match (asked.access, self.made(volume)) {
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

    pub fn path(&self, place: Place) -> String {
        match place {
            Place::Empty => String::new(),
            place => self.dir.join(place.to_string().replace('/', "-")).display().to_string(),
        }
    }
}

/// A capability as the wire has it.
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

/// A call with the ids that its names stood for when it began.
#[derive(Clone, Debug)]
pub struct Asked {
    pub call: Call,
    pub names: Arc<Names>,
}

impl Asked {
    /// What the call works on: two at once that share one of these may find each other busy.
    pub fn objects(&self) -> Vec<String> {
        let names = &self.names;
        let named = |kind: &str, name: &NewName| format!("name of a {kind}: {}", name.text(""));
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
