//! The rules for calls on snapshots and groups, and for streams.

use std::collections::BTreeSet;

use csi_client::BlockList;
use proto::BlockMetadataType;

use super::calls::{Cut, Members, Name, NewName, Pages};
use super::volumes::{check_asked, check_pages, copied};
use super::wire::{Answer, Reply};
use super::world::{
    Bytes, EXISTS, Group, INVALID, NOT_FOUND, PRECONDITION, RANGE, Rule, Snapshot, World, done, equal,
    refused, wrong,
};
use testkit::content::{Content, blocks_of};

/// Whether each tuple is one block.
fn fixed(style: Option<&str>) -> Rule<bool> {
    match style {
        None => Ok(false),
        Some("fixed") => Ok(true),
        Some(other) => refused(INVALID, format!("blockMetadataType cannot be {other}")),
    }
}

fn name_of(name: NewName) -> Rule<Name> {
    match name {
        NewName::Fine(name) => Ok(name),
        _ => refused(INVALID, "the name cannot be"),
    }
}

impl World {
    fn snapshot(&self, id: &str) -> Rule<&Snapshot> {
        if id.is_empty() {
            return refused(INVALID, "the snapshot id is missing");
        }
        match self.snapshots.get(id) {
            Some(snapshot) => Ok(snapshot),
            None => refused(NOT_FOUND, "there is no such snapshot"),
        }
    }

    /// Compares a snapshot in an answer with the model.
    fn check_snapshot(&self, reported: &proto::Snapshot) -> Rule {
        let id = &reported.snapshot_id;
        let Some(snapshot) = self.snapshots.get(id) else { return wrong(format!("{id} is not there")) };
        equal("size_bytes", &reported.size_bytes, &(snapshot.capacity as i64))?;
        equal("source_volume_id", &reported.source_volume_id, &snapshot.volume)?;
        equal("ready_to_use", &reported.ready_to_use, &true)?;
        let group = snapshot.group.clone().unwrap_or_default();
        equal("group_snapshot_id", &reported.group_snapshot_id, &group)?;
        equal("accessible_topology", &reported.accessible_topology.len(), &1)?;
        equal("creation_time", &reported.creation_time.is_some(), &true)
    }

    /// Takes a snapshot of an existing volume.
    fn take(&mut self, id: &str, name: Option<Name>, volume_id: &str, fixed: bool, group: Option<&str>) {
        let volume = &self.volumes[volume_id];
        let line = self.snapshots.values().chain(self.retained.values());
        let last = line.filter(|of| of.volume == volume_id).map(|of| of.sequence).max().unwrap_or(0);
        let snapshot = Snapshot {
            name,
            volume: volume_id.to_owned(),
            sequence: last + 1,
            capacity: volume.capacity,
            block_size: volume.block_size,
            tracking: volume.tracking,
            fixed,
            group: group.map(str::to_owned),
            bytes: copied(&volume.bytes),
        };
        self.snapshots.insert(id.to_owned(), snapshot);
        self.settle(volume_id);
    }

    pub fn create_snapshot(
        &mut self,
        name: NewName,
        volume: &str,
        style: Option<&str>,
        answer: &Answer,
    ) -> Rule {
        let existing = self.snapshots.iter().find(|(_, there)| there.name.map(NewName::Fine) == Some(name));
        if existing.is_some_and(|(id, _)| self.are_apart([id, volume])) {
            return refused(EXISTS, "the name is taken by a snapshot on another node");
        }
        let fixed = fixed(style)?;
        let name = name_of(name)?;
        if volume.is_empty() {
            return refused(INVALID, "the source volume is missing");
        }
        if let Some((id, existing)) = existing {
            if existing.volume != volume || existing.fixed != fixed {
                let codes = self.taken([volume]);
                return refused(codes, "the name is taken by a snapshot that was asked for differently");
            }
            let Reply::Snapshot(reported) = done(answer)? else { return wrong("no snapshot in the answer") };
            equal("snapshot_id", &reported.snapshot_id, id)?;
            return self.check_snapshot(reported);
        }
        self.volume(volume)?;
        let Reply::Snapshot(reported) = done(answer)? else { return wrong("no snapshot in the answer") };
        if self.snapshots.contains_key(&reported.snapshot_id) {
            return wrong("the id of another snapshot");
        }
        self.take(&reported.snapshot_id, Some(name), volume, fixed, None);
        self.check_snapshot(reported)
    }

    /// Moves a deleted snapshot to those that are retained as a base for deltas.
    fn retire(&mut self, id: &str) -> Option<String> {
        let gone = self.snapshots.remove(id)?;
        let volume = gone.volume.clone();
        self.retained.insert(id.to_owned(), gone);
        Some(volume)
    }

    pub fn delete_snapshot(&mut self, id: &str, answer: &Answer) -> Rule {
        if id.is_empty() {
            return refused(INVALID, "the snapshot id is missing");
        }
        if self.snapshots.get(id).is_some_and(|there| there.group.is_some()) {
            return refused(INVALID, "it is a member of a group");
        }
        done(answer)?;
        if let Some(volume) = self.retire(id) {
            self.settle(&volume);
        }
        Ok(())
    }

    pub fn list_snapshots(
        &mut self,
        pages: Pages,
        of: &str,
        only: &str,
        answer: &Answer,
        alone: bool,
    ) -> Rule {
        check_asked(pages)?;
        let Reply::Snapshots(list) = done(answer)? else { return wrong("no list in the answer") };
        check_pages(list, pages.most, self.is_routed())?;
        if self.is_routed() && !alone {
            return Ok(());
        }
        list.iter().flatten().try_for_each(|reported| self.check_snapshot(reported))?;
        let mut listed: Vec<&String> = list.iter().flatten().map(|reported| &reported.snapshot_id).collect();
        listed.sort();
        let want = self
            .snapshots
            .iter()
            .filter(|(id, there)| (of.is_empty() || there.volume == of) && (only.is_empty() || *id == only));
        equal("the list of snapshots", &listed, &want.map(|(id, _)| id).collect())
    }

    pub fn get_snapshot(&mut self, id: &str, answer: &Answer) -> Rule {
        self.snapshot(id)?;
        let Reply::Snapshot(reported) = done(answer)? else { return wrong("no snapshot in the answer") };
        equal("snapshot_id", &reported.snapshot_id.as_str(), &id)?;
        self.check_snapshot(reported)
    }

    fn check_group(&self, id: &str, reported: &proto::VolumeGroupSnapshot) -> Rule {
        let group = &self.groups[id];
        equal("group_snapshot_id", &reported.group_snapshot_id.as_str(), &id)?;
        let members: BTreeSet<String> =
            reported.snapshots.iter().map(|member| member.snapshot_id.clone()).collect();
        equal("the members", &members, &group.members)?;
        equal("ready_to_use", &reported.ready_to_use, &true)?;
        reported.snapshots.iter().try_for_each(|member| self.check_snapshot(member))
    }

    pub fn create_group(
        &mut self,
        name: NewName,
        volumes: &[String],
        style: Option<&str>,
        answer: &Answer,
    ) -> Rule {
        if self.are_apart(volumes.iter().map(String::as_str)) {
            return refused(PRECONDITION, "the volumes are on different nodes");
        }
        let existing = self.groups.iter().find(|(_, there)| NewName::Fine(there.name) == name);
        let all = existing.iter().map(|(id, _)| *id).chain(volumes);
        if existing.is_some() && self.are_apart(all.map(String::as_str)) {
            return refused(EXISTS, "the name is taken by a group on another node");
        }
        let fixed = fixed(style)?;
        let name = name_of(name)?;
        let wanted: BTreeSet<&String> = volumes.iter().collect();
        if volumes.is_empty() || volumes.iter().any(String::is_empty) || wanted.len() < volumes.len() {
            return refused(INVALID, "no volume, an empty id, or one twice");
        }
        if let Some((id, group)) = existing {
            let of: BTreeSet<&String> =
                group.members.iter().map(|member| &self.snapshots[member].volume).collect();
            if of != wanted || group.fixed != fixed {
                let codes = self.taken(volumes.iter().map(String::as_str));
                return refused(codes, "the name is taken by a group that was asked for differently");
            }
            let Reply::Group(reported) = done(answer)? else { return wrong("no group in the answer") };
            return self.check_group(id, reported);
        }
        for volume in volumes {
            self.volume(volume)?;
        }
        let Reply::Group(reported) = done(answer)? else { return wrong("no group in the answer") };
        let id = reported.group_snapshot_id.clone();
        let of: BTreeSet<&String> =
            reported.snapshots.iter().map(|member| &member.source_volume_id).collect();
        if self.groups.contains_key(&id) || of != wanted || reported.snapshots.len() != volumes.len() {
            return wrong(format!("a group {id} of {of:?}, want a new one of {wanted:?}"));
        }
        for member in &reported.snapshots {
            self.take(&member.snapshot_id, None, &member.source_volume_id, fixed, Some(&id));
        }
        let members = reported.snapshots.iter().map(|member| member.snapshot_id.clone()).collect();
        self.groups.insert(id.clone(), Group { name, members, fixed });
        self.check_group(&id, reported)
    }

    /// Checks that a group exists and that the member list is right.
    fn group(&self, (id, members): &(String, Vec<String>), named: Members) -> Rule<()> {
        if id.is_empty() {
            return refused(INVALID, "the group's id is missing");
        }
        let Some(group) = self.groups.get(id) else { return refused(NOT_FOUND, "there is no such group") };
        match named == Members::All
            && members.iter().collect::<BTreeSet<_>>() == group.members.iter().collect()
        {
            true => Ok(()),
            false => refused(INVALID, "the list is not that of its members"),
        }
    }

    pub fn delete_group(&mut self, group: (String, Vec<String>), named: Members, answer: &Answer) -> Rule {
        match self.group(&group, named) {
            Err(super::world::Unfit::Refused(NOT_FOUND, _)) => return done(answer).map(drop),
            found => found?,
        }
        done(answer)?;
        for member in &self.groups.remove(&group.0).expect("found above").members {
            if let Some(volume) = self.retire(member) {
                self.settle(&volume);
            }
        }
        Ok(())
    }

    pub fn get_group(&mut self, group: (String, Vec<String>), named: Members, answer: &Answer) -> Rule {
        self.group(&group, named)?;
        let Reply::Group(reported) = done(answer)? else { return wrong("no group in the answer") };
        self.check_group(&group.0, reported)
    }

    pub fn allocated(&mut self, id: &str, cut: Cut, answer: &Answer) -> Rule {
        let snapshot = self.snapshot(id)?;
        check_cut(snapshot, cut)?;
        let Reply::Blocks(list) = done(answer)? else { return wrong("no stream in the answer") };
        let want = match &snapshot.bytes {
            Bytes::Raw(content) => Some(content.allocated(snapshot.block_size)),
            _ => None,
        };
        check_blocks(snapshot, cut, list, want)
    }

    pub fn delta(&mut self, base: &str, target: &str, cut: Cut, answer: &Answer) -> Rule {
        if target.is_empty() {
            return refused(INVALID, "the snapshot id is missing");
        }
        if self.are_apart([base, target]) {
            return refused(INVALID, "they are on different nodes, so not of one volume");
        }
        let kept = self.retained.get(base);
        let base_of = match (self.snapshot(base), kept) {
            (Ok(base), _) | (Err(_), Some(base)) => base,
            (Err(error), None) => return Err(error),
        };
        let target_of = self.snapshot(target)?;
        if base_of.volume != target_of.volume || base_of.sequence > target_of.sequence {
            return refused(INVALID, "not two snapshots of one volume, the older first");
        }
        check_cut(target_of, cut)?;
        if !target_of.tracking {
            return refused(PRECONDITION, "the volume is not tracked");
        }
        let Reply::Blocks(list) = done(answer)? else { return wrong("no stream in the answer") };
        let want = match (&base_of.bytes, &target_of.bytes) {
            _ if base == target => Some(Vec::new()),
            (Bytes::Raw(base), Bytes::Raw(target)) => Some(target.changed_since(base, target_of.block_size)),
            (Bytes::Fs(_, one), Bytes::Fs(_, two))
                if one != two && list.bytes() == 0 && cut.offset.bytes() == 0 =>
            {
                return wrong("the file changed and no block is listed");
            }
            _ => None,
        };
        check_blocks(target_of, cut, list, want)
    }
}

/// Checks the offset and the length of messages of a stream.
fn check_cut(snapshot: &Snapshot, cut: Cut) -> Rule {
    if cut.most < 0 {
        return refused(INVALID, "max_results is negative");
    }
    match u64::try_from(cut.offset.bytes()) {
        Ok(offset) if offset <= snapshot.capacity => Ok(()),
        _ => refused(RANGE, "the offset is outside of the snapshot"),
    }
}

/// Compares a stream with exactly the blocks that it must list, if they are known.
fn check_blocks(snapshot: &Snapshot, cut: Cut, list: &BlockList, want: Option<Vec<u64>>) -> Rule {
    equal("volume_capacity_bytes", &list.capacity, &snapshot.capacity)?;
    let style = match snapshot.fixed {
        true => BlockMetadataType::FixedLength,
        false => BlockMetadataType::VariableLength,
    };
    equal("block_metadata_type", &list.style, &style)?;
    if cut.most > 0 && list.messages.iter().any(|message| message.len() > cut.most as usize) {
        return wrong("a message of more tuples than were asked for");
    }
    if snapshot.fixed && list.tuples().any(|tuple| tuple.size != snapshot.block_size) {
        return wrong("a tuple of another size than a block");
    }
    let first = cut.offset.bytes() as u64 / snapshot.block_size;
    match want {
        None => Ok(()),
        Some(mut want) => {
            want.retain(|block| *block >= first);
            equal("the list of blocks", &blocks_of(list, snapshot.block_size), &want)
        }
    }
}

pub fn is_blank(content: &Content) -> bool {
    content.blocks.is_empty()
}
