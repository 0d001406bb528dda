//! Group snapshots: several volumes as of one moment, all of them or none.

use std::sync::Arc;

use crate::driver::error::{Error, OTHER_NAME, Result, shown};
use crate::driver::locks::LockKey;
use crate::driver::request::create::check_name;
use crate::driver::request::params::SnapshotParameters;
use crate::driver::shared::LockedVolume;
use crate::driver::snapshots::fill::NewSnapshot;
use crate::driver::snapshots::take::Snapshots;
use crate::store::{GroupRecord, Index, SnapshotRecord, Timestamp};
use base::GroupId;
use files::Context;

/// A group snapshot with its members.
#[derive(Clone, Debug)]
pub struct Group {
    /// What is on disk of the group itself.
    pub record: Arc<GroupRecord>,
    /// Its snapshots, in the order in which their volumes were named.
    pub members: Vec<Arc<SnapshotRecord>>,
}

impl Snapshots {
    /// A group snapshot by the id a client sent, which may be any string. `snapshot_ids` must be its
    /// members, in any order.
    pub fn group(&self, id: &str, snapshot_ids: &[String]) -> Result<Group> {
        if id.is_empty() {
            return Err(Error::Missing { field: "group_snapshot_id" });
        }
        let missing = || Error::NotFound { kind: "group snapshot", id: shown(id) };
        let Ok(parsed) = id.parse::<GroupId>() else { return Err(missing()) };
        let Some(group) = self.find_group(|index| index.group(&parsed)) else {
            self.shared.store.check_readable(id)?;
            return Err(missing());
        };
        check_members(&group.record, snapshot_ids)?;
        Ok(group)
    }

    /// Looks up a group and its members at one moment, since it may be deleted meanwhile.
    fn find_group(&self, find: impl FnOnce(&Index) -> Option<Arc<GroupRecord>>) -> Option<Group> {
        self.shared.store.read(|index| {
            let record = find(index)?;
            let members = record.members.iter().filter_map(|id| index.snapshot(id)).collect();
            Some(Group { record, members })
        })
    }

    /// Takes a snapshot of each volume, all as of one moment, or finds those that an earlier call of this
    /// name took.
    pub fn create_group(
        &self,
        name: &str,
        volume_ids: &[String],
        parameters: &SnapshotParameters,
    ) -> Result<Group> {
        check_name("name", name)?;
        if volume_ids.is_empty() || volume_ids.iter().any(String::is_empty) {
            return Err(Error::Missing { field: "source_volume_ids" });
        }
        let mut sorted: Vec<&String> = volume_ids.iter().collect();
        sorted.sort_unstable();
        if let Some(twice) = sorted.windows(2).find(|pair| pair[0] == pair[1]) {
            return Err(Error::Invalid {
                field: "source_volume_ids",
                value: format!("{} twice", shown(twice[0])),
                want: "every volume once".into(),
            });
        }
        let _name = self.shared.locks.take(LockKey::GroupName(name.to_owned()))?;
        if let Some(group) = self.find_group(|index| index.group_named(name)) {
            let mut theirs: Vec<&str> = group.members.iter().map(|member| member.volume.as_str()).collect();
            theirs.sort_unstable();
            let clash = |difference: &str| Error::Clash {
                kind: "group snapshot",
                name: shown(name),
                difference: difference.into(),
                remedy: OTHER_NAME,
            };
            if !sorted.iter().map(|id| id.as_str()).eq(theirs) {
                return Err(clash("other source_volume_ids"));
            }
            if group.record.tuple_style != parameters.tuple_style {
                return Err(clash("another blockMetadataType"));
            }
            return Ok(group);
        }
        let volumes = volume_ids.iter().map(|id| self.shared.lock_volume(id)).collect::<Result<Vec<_>>>()?;
        self.take_group(name, &volumes, parameters)
    }

    fn take_group(
        &self,
        name: &str,
        volumes: &[LockedVolume],
        parameters: &SnapshotParameters,
    ) -> Result<Group> {
        self.shared.check_room()?;
        let id = GroupId::random(self.shared.key).context("draw an id from", "/dev/random".as_ref())?;
        let draft = self.shared.store.draft_group(&id)?;
        let mut snapshots = Vec::new();
        for volume in volumes {
            self.shared.undo_cut_expansion(volume)?;
            let record = self.new_record("", Some(id.clone()), volume, parameters.tuple_style)?;
            snapshots.push(NewSnapshot {
                draft: draft.member(&record.id)?,
                volume: volume.record.clone(),
                record,
                pending: 0,
            });
        }
        self.filler.fill(&mut snapshots)?;
        let members: Vec<_> = snapshots.into_iter().map(|new| (new.record, new.pending)).collect();
        let record = GroupRecord {
            version: GroupRecord::VERSION,
            id,
            name: name.to_owned(),
            members: members.iter().map(|(member, _)| member.id.clone()).collect(),
            tuple_style: parameters.tuple_style,
            created: members.first().map_or_else(Timestamp::now, |(member, _)| member.created),
        };
        let volumes: Vec<_> = members.iter().map(|(member, _)| member.volume.clone()).collect();
        let (record, members) = self.histories.hold(&volumes).add_group(draft, record, members)?;
        Ok(Group { record, members })
    }

    /// Deletes a group and its members; deltas across them stay exact. An unknown id is not an error.
    pub fn delete_group(&self, id: &str, snapshot_ids: &[String]) -> Result<()> {
        if id.is_empty() {
            return Err(Error::Missing { field: "group_snapshot_id" });
        }
        let Ok(id) = id.parse::<GroupId>() else { return Ok(()) };
        let _guard = self.shared.locks.take(LockKey::Group(id.clone()))?;
        let Some(group) = self.find_group(|index| index.group(&id)) else {
            // A group whose record cannot be read still exists.
            return Ok(self.shared.store.check_readable(id.as_str())?);
        };
        check_members(&group.record, snapshot_ids)?;
        let volumes = group.members.iter().map(|member| &member.volume);
        self.histories.hold(volumes).delete_group(&group.record, &group.members)
    }
}

/// "Snapshot list mismatch" of the spec's tables for DeleteVolumeGroupSnapshot and GetVolumeGroupSnapshot.
fn check_members(record: &GroupRecord, snapshot_ids: &[String]) -> Result<()> {
    let mut asked: Vec<&str> = snapshot_ids.iter().map(String::as_str).collect();
    let mut members: Vec<&str> = record.members.iter().map(|id| id.as_str()).collect();
    asked.sort_unstable();
    members.sort_unstable();
    match asked == members {
        true => Ok(()),
        false => Err(Error::Invalid {
            field: "snapshot_ids",
            value: shown(&asked.join(", ")),
            want: format!("the members of {}: {}", record.id, members.join(", ")),
        }),
    }
}
