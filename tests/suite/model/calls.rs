//! The calls of a random sequence. They name objects by short names, so that a step has a meaning whatever came before it,
//! and any step can be left out.

mod plainer;
mod say;

/// A short name of something: `a`, `b`, ...
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Name(pub char);

/// The names that clients use. The first of each kind are the most frequent. Volumes and ephemeral volumes have no name in
/// common, since a place on the node is named by the volume.
#[derive(Clone, Copy, Debug)]
pub struct NameSet {
    pub volumes: &'static [char],
    pub snapshots: &'static [char],
    pub groups: &'static [char],
    pub ephemeral: &'static [char],
}

/// The number of staging paths, and of targets, of each name.
pub const SPOTS: u8 = 3;

impl NameSet {
    pub fn places(&self) -> Vec<MountPath> {
        let names = self.volumes.iter().chain(self.ephemeral).map(|name| Name(*name));
        let spots = names.flat_map(|name| (0..SPOTS).map(move |number| Spot { name, number }));
        spots.flat_map(|spot| [MountPath::Staging(spot), MountPath::Target(spot)]).collect()
    }
}

/// The name in a request that makes something.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NewName {
    Fine(Name),
    Empty,
    Long,
}

impl NewName {
    /// The name in the request.
    pub fn text(self, kind: &str) -> String {
        match self {
            NewName::Fine(name) => format!("{kind} {name}"),
            NewName::Empty => String::new(),
            NewName::Long => "x".repeat(129),
        }
    }
}

/// An object that a call is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Ref {
    /// The latest object of that name, whether it still exists or not.
    Last(Name),
    /// The object of that name before the latest.
    Former(Name),
    /// A member of the latest group of that name, by its position.
    Member(Name, usize),
    /// A valid id that was never given to an object.
    Never,
    /// Not a valid id.
    Nonsense,
    Empty,
}

/// `required_bytes` and `limit_bytes`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Size {
    pub required: i64,
    pub limit: i64,
}

/// The access type of a capability.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// The type that the volume was made for, or the filesystem if it was made for both.
    AsMade,
    Block,
    /// A filesystem; empty for the driver's choice.
    Fs(&'static str),
}

/// Who may use it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    Writer,
    MultiWriter,
    Reader,
    Readers,
    /// MULTI_NODE_MULTI_WRITER, which this driver does not support.
    ManyNodes,
}

impl Mode {
    pub fn reads_only(self) -> bool {
        matches!(self, Mode::Reader | Mode::Readers)
    }

    pub fn is_shared(self) -> bool {
        matches!(self, Mode::MultiWriter | Mode::Readers)
    }
}

/// A capability.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Use {
    pub access: Access,
    pub mode: Mode,
}

/// A path on the node. Each name has its own paths.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Spot {
    pub name: Name,
    pub number: u8,
}

/// A path in a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum MountPath {
    Staging(Spot),
    Target(Spot),
    Empty,
}

/// What a volume is made from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum From {
    Nothing,
    Snapshot(Ref),
    Volume(Ref),
}

/// CreateVolume.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NewVolume {
    pub name: NewName,
    pub size: Size,
    pub uses: Vec<Use>,
    pub from: From,
    /// Parameter `blockSize`.
    pub block_size: Option<&'static str>,
    /// Parameter `changedBlockTracking`.
    pub tracking: Option<bool>,
    /// Mutable parameter `readAheadKiB`.
    pub read_ahead: Option<&'static str>,
    /// Whether its requisite topology names another node.
    pub elsewhere: bool,
}

impl NewVolume {
    /// A volume with one use, for a single writer, and no other parameters.
    pub fn plain(name: Name, access: Access, bytes: i64, from: From) -> Self {
        NewVolume {
            name: NewName::Fine(name),
            size: Size { required: bytes, limit: 0 },
            uses: vec![Use { access, mode: Mode::Writer }],
            from,
            block_size: None,
            tracking: None,
            read_ahead: None,
            elsewhere: false,
        }
    }
}

/// The member list in a call on a group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Members {
    All,
    ButOne,
}

/// The node in an attachment call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Node {
    This,
    Another,
    Empty,
}

/// The name of a node that does not exist.
pub const ANOTHER: &str = "node-2";

/// How a list is requested: all pages, one after the other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pages {
    /// `max_entries`.
    pub most: i32,
    /// Whether the first token is invalid.
    pub bad_token: bool,
}

impl Pages {
    pub const ALL: Pages = Pages { most: 0, bad_token: false };
}

/// Where a stream starts, and how many tuples a message has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cut {
    pub offset: Offset,
    pub most: i32,
}

impl Cut {
    pub const WHOLE: Cut = Cut { offset: Offset::At(0), most: 0 };
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Offset {
    At(i64),
    /// This many bytes behind the end of a snapshot of 8 MiB.
    BehindEnd(i64),
}

impl Offset {
    pub fn bytes(self) -> i64 {
        match self {
            Offset::At(bytes) => bytes,
            Offset::BehindEnd(more) => (8 << 20) + more,
        }
    }
}

/// The calls that describe the driver.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Question {
    Probe,
    GetPluginInfo,
    GetPluginCapabilities,
    ControllerGetCapabilities,
    GroupControllerGetCapabilities,
    NodeGetCapabilities,
    NodeGetInfo,
    NodeGetStorageHealth,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Call {
    CreateVolume(NewVolume),
    DeleteVolume(Ref),
    ControllerPublish { volume: Ref, node: Node, asked: Use, read_only: bool },
    ControllerUnpublish { volume: Ref, node: Node },
    Validate { volume: Ref, asked: Use },
    ListVolumes(Pages),
    GetVolume(Ref),
    ListHealth(Pages),
    GetHealth(Ref),
    GetCapacity { asked: Option<Use> },
    Expand { volume: Ref, size: Size, asked: Option<Use> },
    Modify { volume: Ref, read_ahead: &'static str, direct_io: Option<bool> },
    CreateSnapshot { name: NewName, volume: Ref, style: Option<&'static str> },
    DeleteSnapshot(Ref),
    ListSnapshots { pages: Pages, of: Option<Ref>, only: Option<Ref> },
    GetSnapshot(Ref),
    CreateGroup { name: NewName, volumes: Vec<Ref>, style: Option<&'static str> },
    DeleteGroup { group: Ref, members: Members },
    GetGroup { group: Ref, members: Members },
    Stage { volume: Ref, at: MountPath, asked: Use },
    Unstage { volume: Ref, at: MountPath },
    Publish { volume: Ref, staged: MountPath, at: MountPath, asked: Use, read_only: bool },
    Unpublish { volume: Ref, at: MountPath },
    PublishEphemeral { handle: Name, at: MountPath, asked: Use, size: &'static str, read_only: bool },
    UnpublishEphemeral { handle: Name, at: MountPath },
    Stats { volume: Ref, at: MountPath },
    NodeHealth { volume: Ref, at: MountPath },
    NodeExpand { volume: Ref, at: MountPath, size: Size, asked: Option<Use> },
    Allocated { snapshot: Ref, cut: Cut },
    Delta { base: Ref, target: Ref, cut: Cut },
    Ask(Question),
}

/// A step of a life.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Step {
    /// One call, answered before the next step.
    One(Call),
    /// Several clients make one call each, at the same time.
    Together(Vec<Call>),
    /// SIGKILL some microseconds after the beginning of one or several calls, and a start.
    Killed { calls: Vec<Call>, after: u64 },
    /// SIGTERM and a start.
    Restart,
    /// SIGKILL between calls, and a start.
    Crash,
    /// A write of some blocks of a Block volume, or of a file on a filesystem, if it is published for writing.
    Write { volume: Name, block: u64, count: u64, fill: u8 },
    /// A discard of some blocks of a Block volume.
    Discard { volume: Name, block: u64, count: u64 },
}

impl Step {
    pub fn calls(&self) -> &[Call] {
        match self {
            Step::One(call) => std::slice::from_ref(call),
            Step::Together(calls) | Step::Killed { calls, .. } => calls,
            _ => &[],
        }
    }
}

impl Call {
    /// Whether it makes something that has a name.
    pub fn makes(&self) -> bool {
        matches!(self, Call::CreateVolume(_) | Call::CreateSnapshot { .. } | Call::CreateGroup { .. })
    }
}
