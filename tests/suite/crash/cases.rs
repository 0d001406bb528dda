//! The calls that are interrupted, each with its preparation, the checks after it, and how it is undone. The calls are those
//! of `model/calls.rs`, and the model knows their possible results.

use std::path::Path;

use deltapath::sys::{mount, space};
use testkit::{MIB, Rig};

use super::scene::{self, FILES, SIZE, Scene};
use crate::model::calls::{
    Access, Call, From, Members, Mode, MountPath, Name, NameSet, NewName, NewVolume, Node, Ref, Size, Spot,
    Step, Use,
};

/// A raw volume that is not in use.
pub const ORIGIN: Name = Name('o');
/// Another one with the same content, for groups.
pub const OTHER: Name = Name('p');
/// A raw volume whose device is always attached.
pub const RAW: Name = Name('r');
/// An ext4 that is always mounted.
pub const FILESYSTEM: Name = Name('f');
/// A snapshot of the origin.
pub const FIRST: Name = Name('s');
/// A snapshot of the filesystem.
pub const OF_FILES: Name = Name('t');
/// The object that a case makes or works on, of any kind.
const VICTIM: Name = Name('v');
/// A snapshot taken after the victim.
const NEXT: Name = Name('n');
const INLINE: Name = Name('x');

pub const NAMES: NameSet = NameSet {
    volumes: &['o', 'p', 'r', 'f', 'v'],
    snapshots: &['s', 't', 'v', 'n'],
    groups: &['v'],
    ephemeral: &['x'],
};

/// A call that is interrupted.
#[derive(Clone, Debug)]
pub struct Case {
    pub name: &'static str,
    pub before: Vec<Step>,
    pub call: Call,
    /// Removes what the case made, so that everything is as before.
    pub after: Vec<Step>,
}

const BLOCK: Access = Access::Block;
const EXT4: Access = Access::Fs("ext4");
const XFS: Access = Access::Fs("xfs");
/// xfs, since a mounted ext4 grows only with a capability that a container may lack.
const GROWING_XFS: i64 = 300 * MIB;

pub fn volume(name: Name, access: Access, bytes: i64, from: From) -> Call {
    Call::CreateVolume(NewVolume::plain(name, access, bytes, from))
}

fn writer(access: Access) -> Use {
    Use { access, mode: Mode::Writer }
}

pub fn staging(name: Name) -> MountPath {
    MountPath::Staging(Spot { name, number: 0 })
}

pub fn target(name: Name) -> MountPath {
    MountPath::Target(Spot { name, number: 0 })
}

pub fn stage(name: Name) -> Call {
    Call::Stage { volume: Ref::Last(name), at: staging(name), asked: writer(Access::AsMade) }
}

pub fn publish(name: Name, read_only: bool) -> Call {
    let volume = Ref::Last(name);
    Call::Publish {
        volume,
        staged: staging(name),
        at: target(name),
        asked: writer(Access::AsMade),
        read_only,
    }
}

pub fn unpublish(name: Name) -> Call {
    Call::Unpublish { volume: Ref::Last(name), at: target(name) }
}

pub fn unstage(name: Name) -> Call {
    Call::Unstage { volume: Ref::Last(name), at: staging(name) }
}

pub fn snapshot(name: Name, of: Name) -> Call {
    Call::CreateSnapshot { name: NewName::Fine(name), volume: Ref::Last(of), style: None }
}

fn group(of: [Name; 2]) -> Call {
    let volumes = of.map(Ref::Last).into();
    Call::CreateGroup { name: NewName::Fine(VICTIM), volumes, style: None }
}

pub fn cases() -> Vec<Case> {
    let victim = Ref::Last(VICTIM);
    let delete = || Call::DeleteVolume(victim);
    let delete_snapshot = |name| Call::DeleteSnapshot(Ref::Last(name));
    let delete_group = || Call::DeleteGroup { group: victim, members: Members::All };
    let restored = || volume(VICTIM, BLOCK, SIZE, From::Snapshot(Ref::Last(FIRST)));
    let formatted = || volume(VICTIM, EXT4, FILES, From::Nothing);
    let grown = |bytes: i64| {
        let size = Size { required: 2 * bytes, limit: 0 };
        Call::Expand { volume: victim, size, asked: None }
    };
    let attach = || Call::ControllerPublish {
        volume: victim,
        node: Node::This,
        asked: writer(BLOCK),
        read_only: false,
    };
    let detach = || Call::ControllerUnpublish { volume: victim, node: Node::This };
    let inline = || Call::PublishEphemeral {
        handle: INLINE,
        at: target(INLINE),
        asked: writer(EXT4),
        size: "16Mi",
        read_only: false,
    };
    let no_inline = || Call::UnpublishEphemeral { handle: INLINE, at: target(INLINE) };
    let used = || vec![restored(), stage(VICTIM), publish(VICTIM, false)];
    let unused = || vec![unpublish(VICTIM), unstage(VICTIM), delete()];
    let steps = |calls: Vec<Call>| calls.into_iter().map(Step::One).collect();
    let case = |name, before, call, after| Case { name, before: steps(before), call, after: steps(after) };
    vec![
        case("CreateVolume", vec![], volume(VICTIM, BLOCK, SIZE, From::Nothing), vec![delete()]),
        case("Restore", vec![], restored(), vec![delete()]),
        case("Clone", vec![], volume(VICTIM, BLOCK, SIZE, From::Volume(Ref::Last(ORIGIN))), vec![delete()]),
        // The source is mounted, so it is frozen for the copy.
        case(
            "CloneMounted",
            vec![],
            volume(VICTIM, EXT4, FILES, From::Volume(Ref::Last(FILESYSTEM))),
            vec![delete()],
        ),
        case("CreateSnapshot", vec![], snapshot(VICTIM, ORIGIN), vec![delete_snapshot(VICTIM)]),
        case("SnapshotDevice", vec![], snapshot(VICTIM, RAW), vec![delete_snapshot(VICTIM)]),
        case("SnapshotMounted", vec![], snapshot(VICTIM, FILESYSTEM), vec![delete_snapshot(VICTIM)]),
        // Its changes are merged into those of the next snapshot.
        case(
            "DeleteSnapshot",
            vec![snapshot(VICTIM, ORIGIN), snapshot(NEXT, ORIGIN)],
            delete_snapshot(VICTIM),
            vec![delete_snapshot(NEXT)],
        ),
        case("DeleteVolume", vec![restored()], delete(), vec![]),
        case("CreateGroup", vec![], group([ORIGIN, OTHER]), vec![delete_group()]),
        case("GroupInUse", vec![], group([RAW, FILESYSTEM]), vec![delete_group()]),
        case("DeleteGroup", vec![group([ORIGIN, OTHER])], delete_group(), vec![]),
        case("Expand", vec![restored()], grown(SIZE), vec![delete()]),
        case("ExpandInUse", used(), grown(SIZE), unused()),
        case(
            "Modify",
            used(),
            Call::Modify { volume: victim, read_ahead: "512", direct_io: Some(false) },
            unused(),
        ),
        case("Attach", vec![restored()], attach(), vec![detach(), delete()]),
        case("Detach", vec![restored(), attach()], detach(), vec![delete()]),
        // The volume is blank, so it is formatted.
        case("Stage", vec![formatted()], stage(VICTIM), vec![unstage(VICTIM), delete()]),
        // The volume was expanded while it was not in use, so its filesystem grows.
        case(
            "StageGrown",
            vec![formatted(), stage(VICTIM), unstage(VICTIM), grown(FILES)],
            stage(VICTIM),
            vec![unstage(VICTIM), delete()],
        ),
        case("Publish", vec![formatted(), stage(VICTIM)], publish(VICTIM, false), unused()),
        case(
            "Unpublish",
            vec![formatted(), stage(VICTIM), publish(VICTIM, false)],
            unpublish(VICTIM),
            vec![unstage(VICTIM), delete()],
        ),
        case("Unstage", vec![formatted(), stage(VICTIM)], unstage(VICTIM), vec![delete()]),
        case("PublishDevice", vec![restored(), stage(VICTIM)], publish(VICTIM, false), unused()),
        case("PublishDeviceReadOnly", vec![restored(), stage(VICTIM)], publish(VICTIM, true), unused()),
        case("UnpublishDevice", used(), unpublish(VICTIM), vec![unstage(VICTIM), delete()]),
        case(
            "NodeExpand",
            vec![
                volume(VICTIM, XFS, GROWING_XFS, From::Nothing),
                stage(VICTIM),
                publish(VICTIM, false),
                grown(GROWING_XFS),
            ],
            Call::NodeExpand {
                volume: victim,
                at: target(VICTIM),
                size: Size { required: 0, limit: 0 },
                asked: None,
            },
            unused(),
        ),
        case("PublishEphemeral", vec![], inline(), vec![no_inline()]),
        case("UnpublishEphemeral", vec![inline()], no_inline(), vec![]),
    ]
}

/// Calls that depend on `--retain-deleted`. A second pass makes them without retention.
pub const DELETIONS: [&str; 4] = ["DeleteSnapshot", "DeleteGroup", "DeleteVolume", "CreateSnapshot"];

impl Case {
    /// Checks what the model does not check, after the call succeeded. The audit checks the contents of snapshots.
    pub fn shortfall(&self, rig: &Rig, scene: &Scene) -> Result<(), String> {
        let hold = |holds: bool, what: &str| if holds { Ok(()) } else { Err(what.to_owned()) };
        let image = || rig.pool_dir().join("volumes").join(scene.volume(VICTIM)).join("bytes/data.img");
        let path = |place| scene.path(place);
        match self.name {
            "Restore" | "Clone" => scene.check_origin(&image()),
            "CloneMounted" => scene::check_filesystem(&image()),
            "Expand" | "ExpandInUse" => {
                let length = std::fs::metadata(image()).map_err(|error| error.to_string())?.len();
                hold(length == 2 * SIZE as u64, "the file has not grown")
            }
            "Stage" => write_file(&path(staging(VICTIM))),
            "Publish" => write_file(&path(target(VICTIM))),
            "PublishEphemeral" => write_file(&path(target(INLINE))),
            "StageGrown" | "NodeExpand" => {
                let total = space(&path(staging(VICTIM))).expect("statvfs").total;
                let before = if self.name == "NodeExpand" { GROWING_XFS } else { FILES } as u64;
                hold(total > before * 3 / 2, "the filesystem has not grown")
            }
            "PublishDevice" => scene::write_first_block(&path(target(VICTIM))).map_err(|e| e.to_string()),
            "PublishDeviceReadOnly" => {
                let refused = scene::write_first_block(&path(target(VICTIM))).is_err();
                hold(refused, "the device is not for reading only")
            }
            // The model allows an interrupted call to leave it, and does not look again after the retry.
            "Unpublish" | "UnpublishDevice" => hold(!path(target(VICTIM)).exists(), "the target stays"),
            "UnpublishEphemeral" => hold(!path(target(INLINE)).exists(), "the target stays"),
            _ => Ok(()),
        }
    }
}

/// Writes and syncs a file. That fails unless the filesystem is mounted, writable and not frozen.
fn write_file(dir: &Path) -> Result<(), String> {
    if mount::mounted_at(dir).expect("mounts").is_none() {
        return Err(format!("nothing is mounted at {}", dir.display()));
    }
    let written = std::fs::File::create(dir.join("file")).and_then(|file| {
        std::io::Write::write_all(&mut &file, b"written")?;
        file.sync_all()
    });
    written.map_err(|error| error.to_string())
}
