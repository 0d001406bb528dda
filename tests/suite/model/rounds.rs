//! Explains the answers of a step: tries every order of concurrent calls, and every way in which a call may have been
//! interrupted. Keeps all worlds that no answer contradicts, until a later answer decides between them.

use tonic::Code;

use super::calls::{Call, MountPath};
use super::names::{Asked, Kind};
use super::wire::{Answer, Reply};
use super::world::{Bytes, Ephemeral, World};

/// A call that has ended.
pub struct Event {
    pub asked: Asked,
    pub answer: Answer,
}

/// The objects that exist after a kill, including those that an interrupted call may have made.
#[derive(Default)]
pub struct Listed {
    pub volumes: Vec<proto::Volume>,
    pub snapshots: Vec<proto::Snapshot>,
}

impl Listed {
    /// From the answers to both lists.
    pub fn of(volumes: &Answer, snapshots: &Answer) -> Result<Self, String> {
        match (volumes, snapshots) {
            (Answer::Done(Reply::Volumes(volumes)), Answer::Done(Reply::Snapshots(snapshots))) => {
                Ok(Listed {
                    volumes: volumes.iter().flatten().filter_map(|entry| entry.volume.clone()).collect(),
                    snapshots: snapshots.iter().flatten().cloned().collect(),
                })
            }
            _ => Err(format!("after the start, lists answer {volumes} and {snapshots}")),
        }
    }
}

/// The worlds after concurrent calls, or why there is none.
pub fn explain(worlds: &[World], events: &[Event], listed: &Listed) -> Result<Vec<World>, String> {
    let mut search = Search { events, listed, found: Vec::new(), reasons: Vec::new() };
    for world in worlds {
        search.go_on(world, &mut Vec::new());
    }
    match (search.found.is_empty(), events.len()) {
        (false, _) => Ok(search.found),
        (true, 1) => Err(search.reasons.swap_remove(0)),
        (true, _) => {
            search.reasons.sort();
            search.reasons.dedup();
            Err(format!("no order of these calls explains their answers: {}", search.reasons.join("; or ")))
        }
    }
}

struct Search<'e> {
    events: &'e [Event],
    listed: &'e Listed,
    found: Vec<World>,
    reasons: Vec<String>,
}

impl Search<'_> {
    fn go_on(&mut self, world: &World, past: &mut Vec<usize>) {
        if past.len() == self.events.len() {
            if !self.found.contains(world) {
                self.found.push(world.clone());
            }
            return;
        }
        for number in (0..self.events.len()).filter(|number| !past.contains(number)).collect::<Vec<_>>() {
            let nexts = self.outcomes(world, number);
            past.push(number);
            nexts.iter().for_each(|next| self.go_on(next, past));
            past.pop();
        }
    }

    /// The worlds after one of the calls.
    fn outcomes(&mut self, world: &World, number: usize) -> Vec<World> {
        let Event { asked, answer } = &self.events[number];
        if let Answer::Cut = answer {
            return cut(world, asked, self.listed);
        }
        if let Answer::Failed(Code::Aborted, _) = answer
            && (self.may_be_busy(number) || world.is_kept_elsewhere(asked))
        {
            let mut next = world.clone();
            next.abort(asked);
            return vec![next];
        }
        let mut next = world.clone();
        match next.accept(asked, answer, self.events.len() == 1) {
            Ok(()) => vec![next],
            Err(reason) => {
                let is_alone = self.events.len() == 1;
                self.reasons.push(if is_alone { reason } else { format!("{:?}: {reason}", asked.call) });
                Vec::new()
            }
        }
    }

    /// Whether another of the calls works on the same object.
    fn may_be_busy(&self, number: usize) -> bool {
        let ours = self.events[number].asked.objects();
        let others = self.events.iter().enumerate().filter(|(other, _)| *other != number);
        others.flat_map(|(_, other)| other.asked.objects()).any(|object| ours.contains(&object))
    }
}

/// The worlds after an interrupted call: it did nothing, or everything, or a part from which a retry continues.
fn cut(world: &World, asked: &Asked, listed: &Listed) -> Vec<World> {
    let mut worlds = vec![world.clone()];
    for reply in replies(world, asked, listed) {
        let mut next = world.clone();
        if next.accept(asked, &Answer::Done(reply), false).is_ok() {
            if let Call::Expand { volume, .. } = &asked.call {
                next.volumes.get_mut(&asked.names.volume(volume)).expect("it grew").grown = false;
            }
            if let Call::Modify { volume, .. } = &asked.call {
                let id = asked.names.volume(volume);
                let before = world.volumes[&id].read_ahead.iter();
                next.volumes.get_mut(&id).expect("it changed").read_ahead.extend(before);
            }
            if let Call::UnpublishEphemeral { at, .. } | Call::Unpublish { at, .. } = &asked.call {
                next.litter.insert(*at);
            }
            worlds.push(next);
        }
    }
    worlds.extend(halves(world, asked));
    worlds
}

/// The answers that the call could have returned if it had completed.
fn replies(world: &World, asked: &Asked, listed: &Listed) -> Vec<Reply> {
    match &asked.call {
        Call::CreateVolume(_) => listed.volumes.iter().cloned().map(Reply::Volume).collect(),
        Call::CreateSnapshot { .. } => listed.snapshots.iter().cloned().map(Reply::Snapshot).collect(),
        Call::CreateGroup { .. } => {
            let mut ids: Vec<&String> =
                listed.snapshots.iter().map(|reported| &reported.group_snapshot_id).collect();
            ids.sort();
            ids.dedup();
            let group = |id: &String| proto::VolumeGroupSnapshot {
                group_snapshot_id: id.clone(),
                snapshots: listed
                    .snapshots
                    .iter()
                    .filter(|reported| reported.group_snapshot_id == *id)
                    .cloned()
                    .collect(),
                creation_time: None,
                ready_to_use: true,
            };
            ids.into_iter().filter(|id| !id.is_empty()).map(|id| Reply::Group(group(id))).collect()
        }
        Call::Expand { volume, .. } => {
            let id = asked.names.volume(volume);
            let reported = listed.volumes.iter().find(|reported| reported.volume_id == id);
            let capacity = reported.map(|reported| reported.capacity_bytes);
            let reply = |node_expansion_required| {
                capacity.map(|capacity_bytes| {
                    Reply::Expanded(proto::ControllerExpandVolumeResponse {
                        capacity_bytes,
                        node_expansion_required,
                    })
                })
            };
            [reply(false), reply(true)].into_iter().flatten().collect()
        }
        Call::NodeExpand { volume, .. } => {
            let capacity = world.volumes.get(&asked.names.volume(volume)).map(|volume| volume.capacity);
            capacity.map(|capacity| Reply::NodeExpanded(capacity as i64)).into_iter().collect()
        }
        _ => vec![Reply::Nothing],
    }
}

/// The worlds after a part of a call that has several steps on the node.
fn halves(world: &World, asked: &Asked) -> Vec<World> {
    let names = &asked.names;
    let mut worlds = Vec::new();
    match &asked.call {
        Call::Stage { volume, at, asked: how } => {
            let id = names.volume(volume);
            let Some(there) = world.volumes.get(&id) else { return worlds };
            let wanted = match super::world::kind(
                super::calls::Use { access: names.access(*how, volume), mode: how.mode },
                there.fs().unwrap_or("ext4"),
            ) {
                Ok(Kind::Fs(wanted)) if there.staged.is_none() && there.published.is_empty() => wanted,
                _ => return worlds,
            };
            let mut half = |bytes: Option<Bytes>| {
                let mut next = world.clone();
                let volume = next.volumes.get_mut(&id).expect("found above");
                volume.staged = None;
                volume.haunted.insert(*at);
                if let Some(bytes) = bytes {
                    volume.bytes = bytes;
                }
                worlds.push(next);
            };
            half(None);
            let formats = match &there.bytes {
                Bytes::Raw(content) => super::snapshots::is_blank(content) && there.source.is_none(),
                Bytes::HalfMade => true,
                _ => false,
            };
            if formats {
                half(Some(Bytes::HalfMade));
                half(Some(Bytes::Fs(wanted, None)));
            }
        }
        Call::Unstage { volume, at } => {
            let mut next = world.clone();
            if let Some(volume) = next.volumes.get_mut(&names.volume(volume))
                && volume.staged.as_ref().is_some_and(|staged| staged.at == *at)
                && volume.published.is_empty()
            {
                volume.staged = None;
                volume.haunted.insert(*at);
                worlds.push(next);
            }
        }
        Call::Publish { volume, at, .. } => {
            let mut next = world.clone();
            if let Some(volume) = next.volumes.get_mut(&names.volume(volume))
                && *at != MountPath::Empty
                && volume.published_at(*at).is_none()
            {
                volume.haunted.insert(*at);
                next.litter.insert(*at);
                worlds.push(next);
            }
        }
        Call::Unpublish { volume, at } => {
            let mut next = world.clone();
            if let Some(volume) = next.volumes.get_mut(&names.volume(volume))
                && volume.published_at(*at).is_some()
            {
                volume.published.retain(|published| published.at != *at);
                volume.haunted.insert(*at);
                next.litter.insert(*at);
                worlds.push(next);
            }
        }
        Call::PublishEphemeral { handle, at, asked: how, size, read_only } => {
            let mut next = world.clone();
            next.litter.insert(*at);
            worlds.push(next.clone());
            let mut whole = world.clone();
            if whole
                .publish_ephemeral(*handle, *at, *how, size, *read_only, &Answer::Done(Reply::Nothing))
                .is_ok()
                && world.ephemeral.get(handle).is_none_or(|there| !there.there)
            {
                let there = Ephemeral { there: false, ..whole.ephemeral[handle].clone() };
                next.ephemeral.insert(*handle, there);
                worlds.push(next);
            }
        }
        Call::UnpublishEphemeral { handle, at } => {
            let mut next = world.clone();
            if let Some(there) = next.ephemeral.get_mut(handle)
                && there.at == *at
            {
                there.there = false;
                next.litter.insert(*at);
                worlds.push(next);
            }
        }
        _ => {}
    }
    worlds
}
