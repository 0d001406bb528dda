//! The rules for calls of the Node service.

use deltapath::sys::{CAP_SYS_RESOURCE, has_capability};

use super::calls::{Access, MountPath, Name, Size, Use};
use super::names::Kind;
use super::snapshots::is_blank;
use super::volumes::{least, range};
use super::wire::{Answer, Reply};
use super::world::{
    Bytes, EXHAUSTED, EXISTS, Ephemeral, INVALID, MIB, NOT_FOUND, PRECONDITION, Published, RANGE, Rule,
    Staged, Unfit, Volume, World, check_mode, done, equal, fits, kind, kind_of, refused, wrong,
};
use testkit::prelude::*;

/// The filesystem that staging finds, or makes, on a volume.
enum Found {
    Fs(&'static str, Option<u8>),
    /// Data that cannot be mounted and must not be formatted.
    Nothing,
    /// A copy of a half-made filesystem, so any result is allowed.
    Unsure,
}

fn find(volume: &Volume, wanted: &'static str, asked: Use) -> Found {
    let is_open = volume.source.is_some() || asked.access == Access::Fs("");
    match &volume.bytes {
        Bytes::Raw(content) if is_blank(content) && volume.source.is_none() => Found::Fs(wanted, None),
        Bytes::HalfMade => Found::Fs(wanted, None),
        Bytes::Fs(there, file) if *there == wanted || is_open => Found::Fs(there, *file),
        Bytes::Unsure => Found::Unsure,
        _ => Found::Nothing,
    }
}

impl World {
    /// Whether something other than volume `id` is mounted at a place.
    fn is_occupied(&self, at: MountPath, id: &str) -> bool {
        self.volumes.iter().any(|(other, volume)| other != id && volume.shows_at(at))
    }

    /// The volume of an unpublish or unstage; `None` if it does not exist and the call has nothing to do.
    fn undone(&mut self, id: &str, at: MountPath) -> Rule<Option<&mut Volume>> {
        if !id.is_empty() && at != MountPath::Empty && !self.volumes.contains_key(id) {
            return match self.is_occupied(at, id) {
                true => refused(NOT_FOUND, "there is no such volume, and something is mounted there"),
                false => Ok(None),
            };
        }
        if at == MountPath::Empty {
            return refused(INVALID, "the path is missing");
        }
        self.volume(id).map(Some)
    }

    pub fn stage(&mut self, id: &str, at: MountPath, asked: Use, answer: &Answer) -> Rule {
        check_mode(asked)?;
        if at == MountPath::Empty {
            return refused(INVALID, "the path is missing");
        }
        let occupied = self.is_occupied(at, id);
        let volume = self.volume(id)?;
        let kind = kind_of(asked, volume)?;
        let new = Staged { at, kind, read_only: asked.mode.reads_only() };
        if let Some(there) = volume.staged.as_ref().filter(|there| **there != new)
            && (volume.is_used() || (there.kind == Kind::Block && kind != Kind::Block))
        {
            return refused(EXISTS, "the volume is staged in another way");
        }
        let Kind::Fs(wanted) = kind else {
            done(answer)?;
            volume.staged = Some(new);
            if volume.bytes == Bytes::HalfMade {
                volume.bytes = Bytes::Raw(Content::default());
            }
            return Ok(());
        };
        if occupied {
            return refused(PRECONDITION, "something else is mounted there");
        }
        if volume.staged.as_ref() == Some(&new) {
            return done(answer).map(drop);
        }
        // From here on the intent is recorded, even if the call fails.
        volume.staged = None;
        volume.haunted.insert(at);
        let is_made = matches!(volume.bytes, Bytes::HalfMade)
            || matches!(&volume.bytes, Bytes::Raw(content) if is_blank(content) && volume.source.is_none());
        if is_made && volume.capacity < least(&[kind]) {
            return refused(PRECONDITION, "it is too small for that filesystem");
        }
        let found = match find(volume, wanted, asked) {
            Found::Unsure if !matches!(answer, Answer::Done(_)) => return Ok(()),
            Found::Unsure => Bytes::Unsure,
            Found::Fs(there, file) => Bytes::Fs(there, file),
            Found::Nothing => return refused(PRECONDITION, "it holds data and not that filesystem"),
        };
        done(answer)?;
        volume.bytes = found;
        (volume.staged, volume.grown, volume.mounted_with) = (Some(new), true, volume.capacity);
        volume.haunted.remove(&at);
        Ok(())
    }

    pub fn unstage(&mut self, id: &str, at: MountPath, answer: &Answer) -> Rule {
        let Some(volume) = self.undone(id, at)? else { return done(answer).map(drop) };
        if !volume.published.is_empty() {
            return refused(PRECONDITION, "the volume is published");
        }
        done(answer)?;
        if volume.staged.as_ref().is_some_and(|staged| staged.at == at) {
            volume.staged = None;
            volume.haunted.clear();
        }
        volume.haunted.remove(&at);
        Ok(())
    }

    pub fn publish(
        &mut self,
        id: &str,
        staged: MountPath,
        at: MountPath,
        asked: Use,
        read_only: bool,
        answer: &Answer,
    ) -> Rule {
        check_mode(asked)?;
        if id.is_empty() || at == MountPath::Empty {
            return refused(INVALID, "the volume id or the target is missing");
        }
        if staged == MountPath::Empty {
            return refused(PRECONDITION, "the staging path is missing");
        }
        let occupied = self.is_occupied(at, id);
        let attach = self.attach;
        let left = self.left.get(&at).copied();
        let volume = self.volume(id)?;
        kind_of(asked, volume)?;
        let there = volume.staged.clone().filter(|there| there.at == staged && fits(asked, there.kind));
        let Some(there) = there else {
            if volume.haunted.contains(&staged) {
                volume.haunted.insert(at);
            }
            return refused(PRECONDITION, "the volume is not staged there, or in another way");
        };
        let kind = there.kind;
        let attached = volume.attached.as_ref().filter(|_| attach);
        let new = Published {
            at,
            read_only: read_only
                || there.read_only
                || asked.mode.reads_only()
                || attached.is_some_and(|attached| attached.read_only),
            shared: asked.mode.is_shared(),
        };
        let mut others = volume.published.iter().filter(|other| **other != new);
        if volume.published_at(at).is_some_and(|other| *other != new) {
            return refused(EXISTS, "it is published there in another way");
        }
        if others.clone().any(|other| !(other.shared && new.shared)) {
            return refused(PRECONDITION, "it is published elsewhere, for one target");
        }
        if kind == Kind::Block && others.any(|other| other.read_only != new.read_only) {
            return refused(PRECONDITION, "a device is writable everywhere or nowhere");
        }
        if occupied {
            return refused(PRECONDITION, "something else is mounted there");
        }
        if volume.published.contains(&new) {
            return done(answer).map(drop);
        }
        if left.is_some_and(|directory| directory != (kind != Kind::Block)) {
            return refused(INVALID, "something else is at the target");
        }
        done(answer)?;
        volume.published.push(new);
        volume.haunted.remove(&at);
        if kind == Kind::Block {
            volume.grown = true;
        }
        self.litter.remove(&at);
        Ok(())
    }

    pub fn unpublish(&mut self, id: &str, at: MountPath, answer: &Answer) -> Rule {
        let Some(volume) = self.undone(id, at)? else { return done(answer).map(drop) };
        done(answer)?;
        let was = volume.published_at(at).is_some();
        volume.published.retain(|published| published.at != at);
        volume.haunted.remove(&at);
        if was {
            self.litter.remove(&at);
        }
        Ok(())
    }

    /// How the volume at a place is staged; `None` if that is not known.
    fn place(volume: &Volume, at: MountPath) -> Rule<Option<&Staged>> {
        if at == MountPath::Empty {
            return refused(INVALID, "the path is missing");
        }
        match &volume.staged {
            Some(staged) if staged.at == at || volume.published_at(at).is_some() => Ok(Some(staged)),
            _ if volume.haunted.contains(&at) => Ok(None),
            _ => refused(NOT_FOUND, "the volume is not there"),
        }
    }

    /// A mount that a failed call recorded but did not make may be reported. There are no other faults in this test.
    pub fn node_health(&mut self, id: &str, answer: &Answer) -> Rule {
        if self.volume(id)?.haunted.is_empty() {
            return self.get_health(id, answer);
        }
        match done(answer)? {
            Reply::Health(Some(reported)) => equal("volume_id", &reported.volume_id.as_str(), &id),
            _ => wrong("no health in the answer"),
        }
    }

    pub fn stats(&mut self, id: &str, at: MountPath, answer: &Answer, alone: bool) -> Rule {
        if at == MountPath::Empty {
            return refused(INVALID, "the path is missing");
        }
        let volume = self.volume(id)?;
        let Some(staged) = Self::place(volume, at)? else { return either(answer, NOT_FOUND) };
        let Reply::Stats(reported) = done(answer)? else { return wrong("no stats in the answer") };
        if !alone {
            return Ok(());
        }
        let Some(bytes) = reported.usage.first() else { return wrong("no usage") };
        let capacity = volume.capacity as i64;
        let fits = match staged.kind {
            Kind::Block => bytes.total == capacity && bytes.used + bytes.available == capacity,
            Kind::Fs(_) => bytes.total > 0 && (bytes.total <= capacity || !volume.grown),
        };
        match fits && bytes.used >= 0 && bytes.available >= 0 {
            true => Ok(()),
            false => wrong(format!("the usage of a volume of {capacity} bytes is {bytes:?}")),
        }
    }

    pub fn node_expand(
        &mut self,
        id: &str,
        at: MountPath,
        size: Size,
        asked: Option<Use>,
        answer: &Answer,
    ) -> Rule {
        let (required, limit) = range(size)?;
        asked.map_or(Ok(()), check_mode)?;
        if at == MountPath::Empty {
            return refused(INVALID, "the path is missing");
        }
        let volume = self.volume(id)?;
        let Some(staged) = Self::place(volume, at)? else {
            return match answer {
                Answer::Failed(Code::NotFound | Code::InvalidArgument | Code::OutOfRange, _) => Ok(()),
                answer => done(answer).map(drop),
            };
        };
        if let Some(asked) = asked {
            kind_of(asked, volume)?;
            if !fits(asked, staged.kind) {
                return refused(INVALID, "it is staged in another way");
            }
        }
        if volume.capacity < required || limit.is_some_and(|limit| volume.capacity > limit) {
            return refused(RANGE, format!("the volume has {} bytes", volume.capacity));
        }
        if volume.is_mounted() && staged.read_only {
            return refused(PRECONDITION, "the filesystem is mounted for reading");
        }
        // A mounted ext4 grows only if the driver has CAP_SYS_RESOURCE, which a container may lack.
        let may_be_refused = staged.kind == Kind::Fs("ext4") && volume.capacity > volume.mounted_with;
        if may_be_refused
            && !has_capability(CAP_SYS_RESOURCE).unwrap_or(false)
            && let Answer::Failed(Code::FailedPrecondition, _) = answer
        {
            return Ok(());
        }
        let Reply::NodeExpanded(reported) = done(answer)? else { return wrong("no size in the answer") };
        if volume.is_mounted() || !volume.published.is_empty() {
            volume.grown = true;
        }
        super::world::equal("capacity_bytes", reported, &(volume.capacity as i64))
    }

    pub fn publish_ephemeral(
        &mut self,
        handle: Name,
        at: MountPath,
        asked: Use,
        size: &str,
        read_only: bool,
        answer: &Answer,
    ) -> Rule {
        check_mode(asked)?;
        let capacity = match size {
            "8Mi" => 8 * MIB,
            "16Mi" => 16 * MIB,
            other => return refused(INVALID, format!("size cannot be {other}")),
        };
        if at == MountPath::Empty {
            return refused(INVALID, "the path is missing");
        }
        if matches!(asked.access, Access::Block | Access::AsMade) {
            return refused(INVALID, "an ephemeral volume is no device");
        }
        let occupied =
            self.ephemeral.iter().any(|(other, volume)| *other != handle && volume.there && volume.at == at);
        let room = self.rooms()[0];
        let read_only = read_only || asked.mode.reads_only();
        if let Some(volume) = self.ephemeral.get_mut(&handle) {
            let Kind::Fs(made) = volume.kind else { return wrong("an ephemeral device") };
            let kind = kind(asked, made)?;
            if kind != volume.kind {
                return refused(INVALID, "it was made for another filesystem");
            }
            if volume.there && (volume.at != at || volume.read_only != read_only) {
                return refused(EXISTS, "it is published in another way");
            }
            if occupied {
                return refused(PRECONDITION, "something else is mounted there");
            }
            done(answer)?;
            (volume.at, volume.read_only, volume.there) = (at, read_only, true);
            self.litter.remove(&at);
            return Ok(());
        }
        let kind = kind(asked, "ext4")?;
        if capacity > room {
            return refused(EXHAUSTED, format!("{room} bytes may still be promised"));
        }
        if occupied {
            return refused(PRECONDITION, "something else is mounted there");
        }
        done(answer)?;
        self.ephemeral.insert(handle, Ephemeral { capacity, kind, at, read_only, there: true });
        self.litter.remove(&at);
        Ok(())
    }

    pub fn unpublish_ephemeral(&mut self, handle: Name, at: MountPath, answer: &Answer) -> Rule {
        if at == MountPath::Empty {
            return refused(INVALID, "the path is missing");
        }
        let occupied = self.ephemeral.values().any(|other| other.there && other.at == at);
        match self.ephemeral.get(&handle) {
            None if occupied => refused(NOT_FOUND, "there is no such volume, and another is there"),
            None => done(answer).map(drop),
            Some(volume) if volume.at != at => done(answer).map(drop),
            Some(_) => {
                done(answer)?;
                self.ephemeral.remove(&handle);
                self.litter.remove(&at);
                Ok(())
            }
        }
    }
}

impl Volume {
    /// Whether the volume is mounted at a place.
    pub fn shows_at(&self, at: MountPath) -> bool {
        let staged = self.staged.as_ref().is_some_and(|staged| staged.at == at) && self.is_mounted();
        staged || self.published_at(at).is_some()
    }
}

/// The answer may be OK, or one of these codes.
fn either(answer: &Answer, codes: &'static [Code]) -> Rule {
    match answer {
        Answer::Done(_) => Ok(()),
        _ => Err(Unfit::Refused(codes, "a call on it was cut, or failed".into())),
    }
}
