//! Prints calls and steps as readable sentences.

use std::fmt::{self, Display};

use super::{
    Access, Call, Cut, From, Members, Mode, Name, NewName, NewVolume, Pages, Place, Ref, Size, Spot, Step,
    Use,
};

impl Display for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.0)
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

/// Printed after a comma, or not at all if it is the plain value.
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

impl Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Place::Staging(Spot { name, number }) => write!(f, "{name}/staging-{number}"),
            Place::Target(Spot { name, number }) => write!(f, "{name}/target-{number}"),
            Place::Empty => write!(f, "\"\""),
        }
    }
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

impl Display for Pages {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self.most, self.bad_token) {
            (_, true) => write!(f, " from token \"zz\""),
            (0, _) => Ok(()),
            (most, _) => write!(f, " in pages of {most}"),
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
            Call::DeleteVolume(id)
            | Call::GetVolume(id)
            | Call::GetHealth(id)
            | Call::DeleteSnapshot(id)
            | Call::GetSnapshot(id) => {
                write!(f, "{method} {id}")
            }
            Call::ControllerPublish { volume, node, asked, read_only } => {
                write!(f, "{method} {volume} to \"{}\"{asked}{}", node.text(), reading(*read_only))
            }
            Call::ControllerUnpublish { volume, node } => {
                write!(f, "{method} {volume} from \"{}\"", node.text())
            }
            Call::Validate { volume, asked } => write!(f, "{method} {volume}{asked}"),
            Call::ListVolumes(pages) | Call::ListHealth(pages) => write!(f, "{method}{pages}"),
            Call::GetCapacity { asked } => write!(f, "{method}{}", optional(asked)),
            Call::Expand { volume, size, asked } => {
                write!(f, "{method} {volume} to {size}{}", optional(asked))
            }
            Call::Modify { volume, read_ahead, direct_io } => {
                write!(f, "{method} {volume}, readAheadKiB {read_ahead}")?;
                direct_io.iter().try_for_each(|direct| write!(f, ", directIO {direct}"))
            }
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
            Call::Unstage { volume, at }
            | Call::Unpublish { volume, at }
            | Call::Stats { volume, at }
            | Call::NodeHealth { volume, at } => {
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
            Step::Write { volume, block, count, fill } => {
                write!(f, "write {fill} to {count} blocks of {volume} from {block} on")
            }
            Step::Discard { volume, block, count } => {
                write!(f, "discard {count} blocks of {volume} from {block} on")
            }
        }
    }
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
            Call::ListHealth(_) => "ControllerListVolumeHealth".into(),
            Call::GetHealth(_) => "ControllerGetVolumeHealth".into(),
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
            Call::NodeHealth { .. } => "NodeGetVolumeHealth".into(),
            Call::NodeExpand { .. } => "NodeExpandVolume".into(),
            Call::Allocated { .. } => "GetMetadataAllocated".into(),
            Call::Delta { .. } => "GetMetadataDelta".into(),
            Call::Ask(question) => format!("{question:?}"),
        }
    }
}
