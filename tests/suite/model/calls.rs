//! Calls as a life has them: on objects by short names, so that a step means something whatever went
//! before it, and a life without one of its steps is still one. They print as a person would say them.

use std::fmt::{self, Display};

/// A short name of something: `a`, `b`, ...
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Name(pub char);

impl Display for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.0)
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

impl Display for NewName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            NewName::Fine(name) => write!(f, "{name}"),
            NewName::Empty => write!(f, "\"\""),
            NewName::Long => write!(f, "a name of 129 bytes"),
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
    /// What can not be an id.
    Nonsense,
    /// No id.
    Empty,
}

impl Display for Ref {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Ref::Last(name) => write!(f, "{name}"),
            Ref::Former(name) => write!(f, "the former {name}"),
            Ref::Member(name, place) => write!(f, "{name}[{place}]"),
            Ref::Never => write!(f, "an id never given"),
            Ref::Nonsense => write!(f, "\"../x\""),
            Ref::Empty => write!(f, "\"\""),
        }
    }
}

/// Required bytes and limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Size {
    pub required: i64,
    pub limit: i64,
}

impl Display for Size {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let shown = |bytes: i64| match bytes {
            i64::MAX => "2^63-1 bytes".to_owned(),
            bytes if bytes > 0 && bytes % (1 << 20) == 0 => format!("{} MiB", bytes >> 20),
            bytes if bytes > 1 << 20 => format!("{} MiB and {} bytes", bytes >> 20, bytes % (1 << 20)),
            bytes => format!("{bytes} bytes"),
        };
        match (self.required, self.limit) {
            (0, 0) => write!(f, "any size"),
            (required, 0) => write!(f, "{}", shown(required)),
            (0, limit) => write!(f, "at most {}", shown(limit)),
            (required, limit) => write!(f, "{} to {}", shown(required), shown(limit)),
        }
    }
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

/// Printed with a comma before it, and not at all where it is the plain one.
impl Display for Use {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.access {
            Access::AsMade => {}
            Access::Block => write!(f, ", Block")?,
            Access::Fs("") => write!(f, ", a filesystem")?,
            Access::Fs(name) => write!(f, ", {name}")?,
        }
        match self.mode {
            Mode::Writer => Ok(()),
            Mode::MultiWriter => write!(f, ", SINGLE_NODE_MULTI_WRITER"),
            Mode::Reader => write!(f, ", SINGLE_NODE_READER_ONLY"),
            Mode::Readers => write!(f, ", MULTI_NODE_READER_ONLY"),
            Mode::ManyNodes => write!(f, ", MULTI_NODE_MULTI_WRITER"),
        }
    }
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

impl Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Place::Staging(Spot { name, number }) => write!(f, "{name}/staging-{number}"),
            Place::Target(Spot { name, number }) => write!(f, "{name}/target-{number}"),
            Place::Empty => write!(f, "\"\""),
        }
    }
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

impl Display for NewVolume {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "CreateVolume {}, {}", self.name, self.size)?;
        self.uses.iter().try_for_each(|asked| write!(f, "{asked}"))?;
        if self.uses.is_empty() {
            write!(f, ", no capability")?;
        }
        match self.from {
            From::Nothing => {}
            From::Snapshot(snapshot) => write!(f, ", from snapshot {snapshot}")?,
            From::Volume(volume) => write!(f, ", from volume {volume}")?,
        }
        if let Some(size) = self.block_size {
            write!(f, ", blockSize {size}")?;
        }
        if let Some(tracking) = self.tracking {
            write!(f, ", changedBlockTracking {tracking}")?;
        }
        if let Some(kib) = self.read_ahead {
            write!(f, ", readAheadKiB {kib}")?;
        }
        if self.elsewhere {
            write!(f, ", on another node")?;
        }
        Ok(())
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

impl Node {
    pub fn text(self) -> &'static str {
        match self {
            Node::This => "node-1",
            Node::Another => "node-2",
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

impl Display for Pages {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self.most, self.bad_token) {
            (_, true) => write!(f, " from token \"zz\""),
            (0, _) => Ok(()),
            (most, _) => write!(f, " in pages of {most}"),
        }
    }
}

/// Where a stream starts and how it is cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cut {
    pub offset: Offset,
    pub most: i32,
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

impl Display for Cut {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.offset.bytes() != 0 {
            write!(f, " from byte {}", self.offset.bytes())?;
        }
        match self.most {
            0 => Ok(()),
            most => write!(f, ", {most} a message"),
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
}

/// A call.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Call {
    CreateVolume(NewVolume),
    DeleteVolume(Ref),
    ControllerPublish { volume: Ref, node: Node, asked: Use, read_only: bool },
    ControllerUnpublish { volume: Ref, node: Node },
    Validate { volume: Ref, asked: Use },
    ListVolumes(Pages),
    GetVolume(Ref),
    GetCapacity { asked: Option<Use> },
    Expand { volume: Ref, size: Size, asked: Option<Use> },
    Modify { volume: Ref, read_ahead: &'static str },
    CreateSnapshot { name: NewName, volume: Ref, style: Option<&'static str> },
    DeleteSnapshot(Ref),
    ListSnapshots { pages: Pages, of: Option<Ref>, only: Option<Ref> },
    GetSnapshot(Ref),
    CreateGroup { name: NewName, volumes: Vec<Ref>, style: Option<&'static str> },
    DeleteGroup { group: Ref, members: Members },
    GetGroup { group: Ref, members: Members },
    Stage { volume: Ref, at: Place, asked: Use },
    Unstage { volume: Ref, at: Place },
    Publish { volume: Ref, staged: Place, at: Place, asked: Use, read_only: bool },
    Unpublish { volume: Ref, at: Place },
    /// Of an ephemeral inline volume.
    PublishEphemeral { handle: Name, at: Place, asked: Use, size: &'static str, read_only: bool },
    UnpublishEphemeral { handle: Name, at: Place },
    Stats { volume: Ref, at: Place },
    NodeExpand { volume: Ref, at: Place, size: Size, asked: Option<Use> },
    Allocated { snapshot: Ref, cut: Cut },
    Delta { base: Ref, target: Ref, cut: Cut },
    Ask(Question),
}

impl Call {
    /// The RPC.
    pub fn method(&self) -> String {
        match self {
            Call::CreateVolume(_) => "CreateVolume".into(),
            Call::DeleteVolume(_) => "DeleteVolume".into(),
            Call::ControllerPublish { .. } => "ControllerPublishVolume".into(),
            Call::ControllerUnpublish { .. } => "ControllerUnpublishVolume".into(),
            Call::Validate { .. } => "ValidateVolumeCapabilities".into(),
            Call::ListVolumes(_) => "ListVolumes".into(),
            Call::GetVolume(_) => "ControllerGetVolume".into(),
            Call::GetCapacity { .. } => "GetCapacity".into(),
            Call::Expand { .. } => "ControllerExpandVolume".into(),
            Call::Modify { .. } => "ControllerModifyVolume".into(),
            Call::CreateSnapshot { .. } => "CreateSnapshot".into(),
            Call::DeleteSnapshot(_) => "DeleteSnapshot".into(),
            Call::ListSnapshots { .. } => "ListSnapshots".into(),
            Call::GetSnapshot(_) => "GetSnapshot".into(),
            Call::CreateGroup { .. } => "CreateVolumeGroupSnapshot".into(),
            Call::DeleteGroup { .. } => "DeleteVolumeGroupSnapshot".into(),
            Call::GetGroup { .. } => "GetVolumeGroupSnapshot".into(),
            Call::Stage { .. } => "NodeStageVolume".into(),
            Call::Unstage { .. } => "NodeUnstageVolume".into(),
            Call::Publish { .. } | Call::PublishEphemeral { .. } => "NodePublishVolume".into(),
            Call::Unpublish { .. } | Call::UnpublishEphemeral { .. } => "NodeUnpublishVolume".into(),
            Call::Stats { .. } => "NodeGetVolumeStats".into(),
            Call::NodeExpand { .. } => "NodeExpandVolume".into(),
            Call::Allocated { .. } => "GetMetadataAllocated".into(),
            Call::Delta { .. } => "GetMetadataDelta".into(),
            Call::Ask(question) => format!("{question:?}"),
        }
    }
}

fn optional(asked: &Option<Use>) -> String {
    asked.map(|asked| asked.to_string()).unwrap_or_default()
}

fn styled(style: &Option<&'static str>) -> String {
    style.map(|style| format!(", blockMetadataType {style}")).unwrap_or_default()
}

fn reading(read_only: bool) -> &'static str {
    if read_only { ", readonly" } else { "" }
}

impl Display for Members {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Members::All => Ok(()),
            Members::ButOne => write!(f, " naming one member less"),
        }
    }
}

impl Display for Call {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let method = self.method();
        match self {
            Call::CreateVolume(new) => write!(f, "{new}"),
            Call::DeleteVolume(id) | Call::GetVolume(id) | Call::DeleteSnapshot(id) | Call::GetSnapshot(id) => {
                write!(f, "{method} {id}")
            }
            Call::ControllerPublish { volume, node, asked, read_only } => {
                write!(f, "{method} {volume} to \"{}\"{asked}{}", node.text(), reading(*read_only))
            }
            Call::ControllerUnpublish { volume, node } => {
                write!(f, "{method} {volume} from \"{}\"", node.text())
            }
            Call::Validate { volume, asked } => write!(f, "{method} {volume}{asked}"),
            Call::ListVolumes(pages) => write!(f, "{method}{pages}"),
            Call::GetCapacity { asked } => write!(f, "{method}{}", optional(asked)),
            Call::Expand { volume, size, asked } => {
                write!(f, "{method} {volume} to {size}{}", optional(asked))
            }
            Call::Modify { volume, read_ahead } => write!(f, "{method} {volume}, readAheadKiB {read_ahead}"),
            Call::CreateSnapshot { name, volume, style } => {
                write!(f, "{method} {name} of {volume}{}", styled(style))
            }
            Call::ListSnapshots { pages, of, only } => {
                write!(f, "{method}{pages}")?;
                of.iter().try_for_each(|of| write!(f, ", of volume {of}"))?;
                only.iter().try_for_each(|only| write!(f, ", only {only}"))
            }
            Call::CreateGroup { name, volumes, style } => {
                let volumes: Vec<String> = volumes.iter().map(Ref::to_string).collect();
                write!(f, "{method} {name} of [{}]{}", volumes.join(", "), styled(style))
            }
            Call::DeleteGroup { group, members } | Call::GetGroup { group, members } => {
                write!(f, "{method} {group}{members}")
            }
            Call::Stage { volume, at, asked } => write!(f, "{method} {volume} at {at}{asked}"),
            Call::Unstage { volume, at } | Call::Unpublish { volume, at } | Call::Stats { volume, at } => {
                write!(f, "{method} {volume} at {at}")
            }
            Call::Publish { volume, staged, at, asked, read_only } => {
                write!(f, "{method} {volume} from {staged} at {at}{asked}{}", reading(*read_only))
            }
            Call::PublishEphemeral { handle, at, asked, size, read_only } => {
                write!(f, "{method} ephemeral {handle} at {at}, size {size}{asked}{}", reading(*read_only))
            }
            Call::UnpublishEphemeral { handle, at } => write!(f, "{method} ephemeral {handle} at {at}"),
            Call::NodeExpand { volume, at, size, asked } => {
                write!(f, "{method} {volume} at {at}, {size}{}", optional(asked))
            }
            Call::Allocated { snapshot, cut } => write!(f, "{method} {snapshot}{cut}"),
            Call::Delta { base, target, cut } => write!(f, "{method} {base} to {target}{cut}"),
            Call::Ask(_) => write!(f, "{method}"),
        }
    }
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
    Write { volume: Name, block: u64, fill: u8 },
    /// A discard of the same.
    Discard { volume: Name, block: u64 },
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

impl Step {
    /// The same with one call less, or one at a time instead of several.
    pub fn plainer(&self) -> Vec<Step> {
        let fewer = |calls: &[Call]| {
            let without = |at| {
                let mut calls = calls.to_vec();
                calls.remove(at);
                calls
            };
            (0..calls.len()).map(without).filter(|calls| !calls.is_empty()).collect::<Vec<_>>()
        };
        match self {
            Step::Together(calls) if calls.len() == 1 => vec![Step::One(calls[0].clone())],
            Step::Together(calls) => fewer(calls).into_iter().map(Step::Together).collect(),
            Step::Killed { calls, after } => {
                let fewer = fewer(calls).into_iter();
                let killed = |calls| Step::Killed { calls, after: *after };
                fewer.map(killed).chain([Step::Together(calls.clone())]).collect()
            }
            _ => Vec::new(),
        }
    }
}

impl Display for Step {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let all = |calls: &[Call]| calls.iter().map(Call::to_string).collect::<Vec<_>>().join(" || ");
        match self {
            Step::One(call) => write!(f, "{call}"),
            Step::Together(calls) if calls.len() == 1 => write!(f, "{}", all(calls)),
            Step::Together(calls) => write!(f, "at once: {}", all(calls)),
            Step::Killed { calls, after } => write!(f, "SIGKILL {after} µs into: {}; start", all(calls)),
            Step::Restart => write!(f, "stop and start"),
            Step::Crash => write!(f, "SIGKILL and start"),
            Step::Write { volume, block, fill } => write!(f, "write {fill} to block {block} of {volume}"),
            Step::Discard { volume, block } => write!(f, "discard block {block} of {volume}"),
        }
    }
}
