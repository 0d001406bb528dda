//! The rules for calls of the Controller service on volumes.

use super::calls::{Access, From, NewName, NewVolume, Node, Pages, Size, Use};
use super::names::{Kind, Names};
use super::wire::{Answer, Reply};
use super::world::{
    ABORTED, Attached, Bytes, EXHAUSTED, EXISTS, INVALID, MIB, NOT_FOUND, PRECONDITION, RANGE, Rule, Source,
    UNIMPLEMENTED, Volume, World, check_mode, done, equal, kind, kind_of, refused, wrong,
};
use testkit::content::Content;

const DEFAULT_SIZE: u64 = 1 << 30;
/// The default of `--max-volume-size`.
const MAX_SIZE: u64 = 64 << 40;
const BLOCK: u64 = 4096;

/// Checks the bytes of a range. A limit of 0 means no limit.
pub fn range(size: Size) -> Rule<(u64, Option<u64>)> {
    let (Ok(required), Ok(limit)) = (u64::try_from(size.required), u64::try_from(size.limit)) else {
        return refused(INVALID, "a size is negative");
    };
    if limit != 0 && limit < required {
        return refused(INVALID, "the limit is below what is required");
    }
    Ok((required, (limit != 0).then_some(limit)))
}

fn rounded(wanted: u64, block: u64, limit: Option<u64>) -> Rule<u64> {
    match wanted.checked_next_multiple_of(block).filter(|capacity| *capacity <= MAX_SIZE) {
        None => refused(RANGE, "no volume is as large"),
        Some(capacity) if limit.is_some_and(|limit| capacity > limit) => {
            refused(RANGE, format!("{capacity} bytes are needed, more than the limit"))
        }
        Some(capacity) => Ok(capacity),
    }
}

pub fn least(access: &[Kind]) -> u64 {
    let least = |kind: &Kind| match kind {
        Kind::Fs("xfs") => 300 * MIB,
        Kind::Fs("btrfs") => 109 * MIB,
        Kind::Fs(_) => MIB,
        Kind::Block => 1,
    };
    access.iter().map(least).max().unwrap_or(1)
}

/// The kinds of access of several capabilities, each once.
pub fn kinds(uses: &[Use]) -> Rule<Vec<Kind>> {
    if uses.is_empty() {
        return refused(INVALID, "no capability is asked for");
    }
    let mut kinds = Vec::new();
    for asked in uses {
        check_mode(*asked)?;
    }
    for asked in uses {
        let kind = kind(*asked, "ext4")?;
        if !kinds.contains(&kind) {
            kinds.push(kind);
        }
    }
    match kinds.iter().filter(|kind| **kind != Kind::Block).count() > 1 {
        true => refused(INVALID, "a volume has one filesystem"),
        false => Ok(kinds),
    }
}

pub fn read_ahead(value: &str) -> Rule<u32> {
    match value.parse::<u32>() {
        Ok(kib) if kib % 4 == 0 => Ok(kib),
        _ => refused(INVALID, format!("readAheadKiB cannot be {value}")),
    }
}

/// The properties of a source: capacity, block size, tracking and bytes.
type Origin = (u64, u64, bool, Bytes);

impl World {
    /// Compares a volume in an answer with the model.
    fn check_volume(&self, id: &str, reported: &proto::Volume) -> Rule {
        use proto::volume_content_source::Type;
        let Some(volume) = self.volumes.get(id) else { return wrong(format!("{id} is not there")) };
        equal("volume_id", &reported.volume_id.as_str(), &id)?;
        equal("capacity_bytes", &reported.capacity_bytes, &(volume.capacity as i64))?;
        let source =
            reported.content_source.clone().and_then(|source| source.r#type).map(|source| match source {
                Type::Snapshot(source) => Source::Snapshot(source.snapshot_id),
                Type::Volume(source) => Source::Volume(source.volume_id),
            });
        equal("content_source", &source, &volume.source)?;
        equal("accessible_topology", &reported.accessible_topology.len(), &1)
    }

    fn origin(&self, source: Option<&Source>) -> Rule<Option<Origin>> {
        let origin = match source {
            None => return Ok(None),
            Some(Source::Snapshot(id)) => self
                .snapshots
                .get(id)
                .map(|from| (from.capacity, from.block_size, from.tracking, copied(&from.bytes))),
            Some(Source::Volume(id)) => self
                .volumes
                .get(id)
                .map(|from| (from.capacity, from.block_size, from.tracking, copied(&from.bytes))),
        };
        origin.map_or_else(|| refused(NOT_FOUND, "the source is not there"), |origin| Ok(Some(origin)))
    }

    pub fn create_volume(&mut self, names: &Names, new: &NewVolume, answer: &Answer) -> Rule {
        // The router answers a request that no node may serve.
        if self.is_routed() && new.elsewhere && new.name != NewName::Empty {
            return match self.volumes.values().any(|volume| NewName::Fine(volume.name) == new.name) {
                true => refused(EXISTS, "the volume of this name is on another node"),
                false => refused(EXHAUSTED, "it is wanted on a node that there is not"),
            };
        }
        let (required, limit) = range(new.size)?;
        new.uses.iter().try_for_each(|asked| check_mode(*asked))?;
        let block_size = match new.block_size {
            None => None,
            Some("64Ki") => Some(64 << 10),
            Some(other) => return refused(INVALID, format!("blockSize cannot be {other}")),
        };
        let read_ahead = new.read_ahead.map(read_ahead).transpose()?;
        let source = match &new.from {
            From::Nothing => None,
            From::Snapshot(snapshot) => Some(Source::Snapshot(names.snapshot(snapshot))),
            From::Volume(volume) => Some(Source::Volume(names.volume(volume))),
        };
        if let Some(Source::Snapshot(id) | Source::Volume(id)) = &source
            && id.is_empty()
        {
            return refused(INVALID, "the source has no id");
        }
        let NewName::Fine(name) = new.name else { return refused(INVALID, "the name cannot be") };
        let access = kinds(&new.uses)?;
        if let Some((id, existing)) = self.volumes.iter().find(|(_, volume)| volume.name == name) {
            let fits = existing.capacity >= required
                && limit.is_none_or(|limit| existing.capacity <= limit)
                && access.iter().all(|kind| existing.access.contains(kind))
                && existing.source == source;
            let plain = existing.source.is_none();
            let same_size =
                block_size.map_or(!plain || existing.block_size == BLOCK, |size| existing.block_size == size);
            let same_tracking =
                new.tracking.map_or(!plain || existing.tracking, |tracking| existing.tracking == tracking);
            if !(fits && same_size && same_tracking) || (new.elsewhere && !self.is_routed()) {
                let of = source.iter().map(|(Source::Snapshot(id) | Source::Volume(id))| id.as_str());
                return refused(
                    self.taken(of),
                    "the name is taken by a volume that was asked for differently",
                );
            }
            let Reply::Volume(reported) = done(answer)? else { return wrong("no volume in the answer") };
            return self.check_volume(id, reported);
        }
        if new.elsewhere {
            return refused(EXHAUSTED, "it is wanted on another node");
        }
        let origin = self.origin(source.as_ref())?;
        let (size_of, block_of) = origin.as_ref().map(|(size, block, ..)| (*size, *block)).unzip();
        let block_size = block_size.or(block_of).unwrap_or(BLOCK);
        let wanted = match (required, size_of) {
            (0, None) => {
                limit.map_or(DEFAULT_SIZE, |limit| DEFAULT_SIZE.min(limit / block_size * block_size))
            }
            (required, _) => required,
        };
        let capacity = rounded(wanted.max(size_of.unwrap_or(least(&access))), block_size, limit)?;
        let source_id = source.clone().map(|(Source::Snapshot(id) | Source::Volume(id))| id);
        // Without a source the volume may be made on any node with enough space.
        let room =
            source_id.as_ref().map_or(self.rooms().into_iter().max(), |id| Some(self.room(id))).unwrap_or(0);
        if capacity > room {
            return refused(EXHAUSTED, format!("{room} bytes may still be promised"));
        }
        let Reply::Volume(reported) = done(answer)? else { return wrong("no volume in the answer") };
        if capacity > self.room(&reported.volume_id) {
            return wrong("a volume on a node that has no room for it");
        }
        if source_id.is_some_and(|id| self.node(&id) != self.node(&reported.volume_id)) {
            return wrong("a volume on another node than its source");
        }
        if self.volumes.contains_key(&reported.volume_id) {
            return wrong("the id of another volume");
        }
        let (tracking, bytes) = match origin {
            None => (true, Bytes::Raw(Content::default())),
            Some((_, _, tracking, bytes)) => (tracking, bytes),
        };
        let volume = Volume {
            name,
            capacity,
            block_size,
            tracking: new.tracking.unwrap_or(tracking),
            access,
            source,
            read_ahead: [read_ahead].into(),
            attached: None,
            staged: None,
            published: Vec::new(),
            haunted: Default::default(),
            grown: true,
            mounted_with: capacity,
            bytes,
        };
        self.volumes.insert(reported.volume_id.clone(), volume);
        self.check_volume(&reported.volume_id, reported)
    }

    pub fn delete_volume(&mut self, id: &str, answer: &Answer) -> Rule {
        let attach = self.attach;
        match self.volume(id) {
            Err(super::world::Unfit::Refused(NOT_FOUND, _)) => return done(answer).map(drop),
            Err(error) => return Err(error),
            Ok(volume) if attach && volume.attached.is_some() => {
                return refused(PRECONDITION, "the volume is attached");
            }
            Ok(volume) if volume.is_mounted() || !volume.published.is_empty() => {
                return refused(PRECONDITION, "the volume is in use");
            }
            Ok(_) => {}
        }
        done(answer)?;
        self.volumes.remove(id);
        self.settle(id);
        Ok(())
    }

    pub fn attach(&mut self, id: &str, node: Node, asked: Use, read_only: bool, answer: &Answer) -> Rule {
        if !self.attach {
            return refused(UNIMPLEMENTED, "the driver runs without --enable-attach");
        }
        check_mode(asked)?;
        if node == Node::Empty {
            return refused(INVALID, "the node is missing");
        }
        let volume = self.volume(id)?;
        if node == Node::Another {
            return refused(NOT_FOUND, "there is no such node");
        }
        let attached = Attached { kind: kind_of(asked, volume)?, mode: asked.mode, read_only };
        match &volume.attached {
            Some(there) if *there != attached => {
                return refused(EXISTS, "the volume is attached in another way");
            }
            _ => {}
        }
        done(answer)?;
        volume.attached = Some(attached);
        Ok(())
    }

    pub fn detach(&mut self, id: &str, node: Node, answer: &Answer) -> Rule {
        if !self.attach {
            return refused(UNIMPLEMENTED, "the driver runs without --enable-attach");
        }
        match self.volume(id) {
            Err(super::world::Unfit::Refused(NOT_FOUND, _)) => done(answer).map(drop),
            Err(error) => Err(error),
            Ok(volume) => {
                done(answer)?;
                if node != Node::Another {
                    volume.attached = None;
                }
                Ok(())
            }
        }
    }

    pub fn validate(&mut self, id: &str, asked: Use, answer: &Answer) -> Rule {
        let volume = self.volume(id)?;
        let kind = check_mode(asked).and_then(|()| kind_of(asked, volume));
        let confirmed = match (kind, asked.access, &volume.bytes) {
            (Err(_), ..) => Some(false),
            (Ok(Kind::Fs(_)), Access::Fs(name), Bytes::Fs(there, _)) => {
                Some(name.is_empty() || name == *there)
            }
            // Whether the interrupted mkfs came as far as the superblock is not known.
            (Ok(Kind::Fs(_)), _, Bytes::HalfMade | Bytes::Unsure) => None,
            (Ok(_), ..) => Some(true),
        };
        match done(answer)? {
            Reply::Confirmed(reported) => equal("confirmed", reported, &confirmed.unwrap_or(*reported)),
            _ => wrong("no answer in the answer"),
        }
    }

    fn nodes(&self, id: &str) -> Vec<String> {
        match self.attach && self.volumes[id].attached.is_some() {
            true => vec![self.node(id).to_owned()],
            false => Vec::new(),
        }
    }

    /// Behind a router, a list during other calls shows each node at a different moment.
    pub fn list_volumes(&mut self, pages: Pages, answer: &Answer, alone: bool) -> Rule {
        check_asked(pages)?;
        let Reply::Volumes(list) = done(answer)? else { return wrong("no list in the answer") };
        check_pages(list, pages.most, self.is_routed())?;
        if self.is_routed() && !alone {
            return Ok(());
        }
        let mut listed = Vec::new();
        for entry in list.iter().flatten() {
            let (Some(reported), Some(status)) = (&entry.volume, &entry.status) else {
                return wrong("an entry without a volume or its status");
            };
            self.check_volume(&reported.volume_id, reported)?;
            let nodes = self.nodes(&reported.volume_id);
            equal("published_node_ids", &status.published_node_ids, &nodes)?;
            listed.push(reported.volume_id.clone());
        }
        listed.sort();
        let want: Vec<String> = self.volumes.keys().cloned().collect();
        equal("the list of volumes", &listed, &want)
    }

    pub fn get_volume(&mut self, id: &str, answer: &Answer) -> Rule {
        self.volume(id)?;
        let nodes = self.nodes(id);
        let Reply::Status(reported) = done(answer)? else { return wrong("no volume in the answer") };
        let (Some(volume), Some(status)) = (&reported.volume, &reported.status) else {
            return wrong("no volume or status in the answer");
        };
        self.check_volume(id, volume)?;
        equal("published_node_ids", &status.published_node_ids, &nodes)
    }

    /// There are no faults in this test.
    pub fn list_health(&mut self, pages: Pages, answer: &Answer) -> Rule {
        check_asked(pages)?;
        let Reply::Unwell(unwell) = done(answer)? else { return wrong("no list in the answer") };
        equal("the list of volumes that are not well", unwell, &Vec::new())
    }

    pub fn get_health(&mut self, id: &str, answer: &Answer) -> Rule {
        self.volume(id)?;
        let Reply::Health(reported) = done(answer)? else { return wrong("no health in the answer") };
        let well = proto::VolumeHealth { volume_id: id.to_owned(), health_statuses: Vec::new() };
        equal("the health", reported, &Some(well))
    }

    pub fn get_capacity(&mut self, asked: Option<Use>, answer: &Answer, alone: bool) -> Rule {
        let access = asked.map(|asked| kinds(&[asked])).transpose()?.unwrap_or_default();
        let Reply::Capacity(reported) = done(answer)? else { return wrong("no capacity in the answer") };
        if self.is_routed() && !alone {
            return Ok(());
        }
        let rooms = self.rooms();
        equal("available_capacity", &reported.available_capacity, &(rooms.iter().sum::<u64>() as i64))?;
        let most = rooms.iter().max().map_or(0, |room| MAX_SIZE.min(room / BLOCK * BLOCK)) as i64;
        equal("maximum_volume_size", &reported.maximum_volume_size, &Some(most))?;
        let least = least(&access).next_multiple_of(BLOCK) as i64;
        equal("minimum_volume_size", &reported.minimum_volume_size, &Some(least))
    }

    pub fn expand(&mut self, id: &str, size: Size, asked: Option<Use>, answer: &Answer) -> Rule {
        if id.is_empty() {
            return refused(INVALID, "the volume id is missing");
        }
        let (required, limit) = range(size)?;
        asked.map_or(Ok(()), check_mode)?;
        let room = self.room(id);
        let volume = self.volume(id)?;
        let asked = asked.map(|asked| kind_of(asked, volume)).transpose()?;
        // A stage that failed or was cut may have recorded another way.
        let is_unsure = !volume.haunted.is_empty();
        let on_node = match volume.staged.as_ref().map(|staged| staged.kind).or(asked) {
            Some(kind) => kind != Kind::Block,
            None => volume.fs().is_some(),
        };
        let capacity = match volume.capacity >= required {
            true if limit.is_some_and(|limit| volume.capacity > limit) => {
                return refused(RANGE, "volumes do not shrink");
            }
            true => volume.capacity,
            false => rounded(required, volume.block_size, limit)?,
        };
        if capacity - volume.capacity > room {
            return refused(EXHAUSTED, format!("{room} bytes may still be promised"));
        }
        let Reply::Expanded(reported) = done(answer)? else { return wrong("no size in the answer") };
        (volume.capacity, volume.grown) = (capacity, true);
        equal("capacity_bytes", &reported.capacity_bytes, &(capacity as i64))?;
        let on_node = if is_unsure { reported.node_expansion_required } else { on_node };
        equal("node_expansion_required", &reported.node_expansion_required, &on_node)
    }

    pub fn modify(&mut self, id: &str, value: &str, answer: &Answer) -> Rule {
        let volume = self.volume(id)?;
        let kib = read_ahead(value)?;
        done(answer)?;
        volume.read_ahead = [Some(kib)].into();
        Ok(())
    }
}

/// The bytes of a copy.
pub fn copied(bytes: &Bytes) -> Bytes {
    match bytes {
        Bytes::HalfMade => Bytes::Unsure,
        bytes => bytes.clone(),
    }
}

/// What may be asked of a list.
pub fn check_asked(pages: Pages) -> Rule {
    match pages {
        Pages { most: ..0, .. } => refused(INVALID, "max_entries is negative"),
        Pages { bad_token: true, .. } => refused(ABORTED, "no list ended with that token"),
        _ => Ok(()),
    }
}

/// No page is longer than requested, and none of several is empty. Only the last page of a router may be empty, since the
/// router cannot know whether the next nodes have an entry.
pub fn check_pages<T>(pages: &[Vec<T>], most: i32, is_routed: bool) -> Rule {
    for (number, page) in pages.iter().enumerate() {
        if most > 0 && page.len() > most as usize {
            return wrong(format!("a page of {}", page.len()));
        }
        let may_be_empty = is_routed && number + 1 == pages.len();
        if page.is_empty() && pages.len() > 1 && !may_be_empty {
            return wrong(format!("page {number} of {} is empty", pages.len()));
        }
    }
    Ok(())
}
