//! The calls of a random sequence: on objects by short names, so that a step has a meaning whatever came
//! before it, and any step can be left out. They print as readable sentences.

mod plainer;
mod say;

/// A short name of something: `a`, `b`, ...
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Name(pub char);

/// The names that clients give; the first ones of each kind are met most. Volumes and ephemeral volumes have no name in
/// common, for the places on the node go by it.
#[derive(Clone, Copy, Debug)]
pub struct NameSet {
    pub volumes: &'static [char],
    pub snapshots: &'static [char],
    pub groups: &'static [char],
    pub ephemeral: &'static [char],
}

/// Places of each name.
pub const SPOTS: u8 = 3;

impl NameSet {
    /// Every place there is.
    pub fn places(&self) -> Vec<Place> {
        let names = self.volumes.iter().chain(self.ephemeral).map(|name| Name(*name));
        let spots = names.flat_map(|name| (0..SPOTS).map(move |number| Spot { name, number }));
        spots.flat_map(|spot| [Place::Staging(spot), Place::Target(spot)]).collect()
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
    /// As the request has it.
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
    /// The last one of that name, there or not.
    Last(Name),
    /// The one of that name before the last.
    Former(Name),
    /// A member of the last group of that name, by its place.
    Member(Name, usize),
    /// An id that could be one, and was never given.
    Never,
    /// What cannot be an id.
    Nonsense,
    /// No id.
    Empty,
}

/// Required bytes and limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Size {
    pub required: i64,
    pub limit: i64,
}

/// What one capability asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// What the volume was made for; of two the filesystem.
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
    /// MULTI_NODE_MULTI_WRITER, which this driver does not have.
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

/// Where on the node: a directory or target of its own for each name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Spot {
    pub name: Name,
    pub number: u8,
}

/// A path in a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Place {
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
    /// Whether its requisite topology is another node.
    pub elsewhere: bool,
}

impl NewVolume {
    /// Nothing asked but a use for one writer; what is made from something takes at least its size.
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

/// The name of a node that there is not.
pub const ANOTHER: &str = "node-2";

impl Node {
    /// For a reader.
    pub fn text(self) -> &'static str {
        match self {
            Node::This => "node-1",
            Node::Another => ANOTHER,
            Node::Empty => "",
        }
    }
}

/// A list's pages: all of them are asked for, one after the other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pages {
    /// `max_entries`.
    pub most: i32,
    /// Whether the first token is one that no list ended with.
    pub bad_token: bool,
}

impl Pages {
    pub const ALL: Pages = Pages { most: 0, bad_token: false };
}

/// Where a stream starts and how it is cut.
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
    /// So many bytes behind the end of a snapshot of 8 MiB.
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

/// The calls that tell who the driver is.
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

/// A call.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Call {
    CreateVolume(NewVolume),
    DeleteVolume(Ref),
    ControllerPublish {
        volume: Ref,
        node: Node,
        asked: Use,
        read_only: bool,
    },
    ControllerUnpublish {
        volume: Ref,
        node: Node,
    },
    Validate {
        volume: Ref,
        asked: Use,
    },
    ListVolumes(Pages),
    GetVolume(Ref),
    ListHealth(Pages),
    GetHealth(Ref),
    GetCapacity {
        asked: Option<Use>,
    },
    Expand {
        volume: Ref,
        size: Size,
        asked: Option<Use>,
    },
    Modify {
        volume: Ref,
        read_ahead: &'static str,
        direct_io: Option<bool>,
    },
    CreateSnapshot {
        name: NewName,
        volume: Ref,
        style: Option<&'static str>,
    },
    DeleteSnapshot(Ref),
    ListSnapshots {
        pages: Pages,
        of: Option<Ref>,
        only: Option<Ref>,
    },
    GetSnapshot(Ref),
    CreateGroup {
        name: NewName,
        volumes: Vec<Ref>,
        style: Option<&'static str>,
    },
    DeleteGroup {
        group: Ref,
        members: Members,
    },
    GetGroup {
        group: Ref,
        members: Members,
    },
    Stage {
        volume: Ref,
        at: Place,
        asked: Use,
    },
    Unstage {
        volume: Ref,
        at: Place,
    },
    Publish {
        volume: Ref,
        staged: Place,
        at: Place,
        asked: Use,
        read_only: bool,
    },
    Unpublish {
        volume: Ref,
        at: Place,
    },
    /// Of an ephemeral inline volume.
    PublishEphemeral {
        handle: Name,
        at: Place,
        asked: Use,
        size: &'static str,
        read_only: bool,
    },
    UnpublishEphemeral {
        handle: Name,
        at: Place,
    },
    Stats {
        volume: Ref,
        at: Place,
    },
    NodeHealth {
        volume: Ref,
        at: Place,
    },
    NodeExpand {
        volume: Ref,
        at: Place,
        size: Size,
        asked: Option<Use>,
    },
    Allocated {
        snapshot: Ref,
        cut: Cut,
    },
    Delta {
        base: Ref,
        target: Ref,
        cut: Cut,
    },
    Ask(Question),
}

/// A step of a life.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Step {
    /// One call, answered before the next step.
    One(Call),
    /// Several clients, a call each, all at once.
    Together(Vec<Call>),
    /// SIGKILL some microseconds into one or several calls, and a start.
    Killed { calls: Vec<Call>, after: u64 },
    /// SIGTERM and a start.
    Restart,
    /// SIGKILL at rest, and a start.
    Crash,
    /// Some blocks of a Block volume, or a file on a filesystem, wherever it is published for writing.
    Write { volume: Name, block: u64, count: u64, fill: u8 },
    /// A discard of the same.
    Discard { volume: Name, block: u64, count: u64 },
}

impl Step {
    /// The calls in it.
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
