//! CreateVolume: on which node a volume is made, so that there is one of a name.

use std::sync::Arc;
use std::time::Duration;

use base::DataDirKey;
use bytes::Bytes;
use metrics::counter;
use proto::node::{
    AbandonRequest, AbandonResponse, ChooseRequest, CreateFromRequest, CreateFromResponse, FindResponse, Kind,
};
use tokio::time::Instant;
use tonic::{Code, Status};

use super::names::{choice, in_work, is_answered};
use super::{Router, Target, Work, answers, decode, forgotten};
use crate::node::Node;
use crate::nodes::Lookup;
use crate::placement;

/// How long a volume that a node was asked for, without an answer, is waited for after the last try.
const WAITED_FOR: Duration = Duration::from_secs(600);
/// Such volumes at once.
const MOST_UNANSWERED: usize = 10_000;

/// How long a copy continues for calls that allow its node, after the last of them. Tests have less time.
const UNASKED: Duration = Duration::from_secs(if cfg!(debug_assertions) { 5 } else { 60 });

/// How long a router may take from its choice of a node to its call of it, before another one continues without it.
const SOON: Duration = Duration::from_secs(1);

impl Router {
    /// Makes a volume, and notes whether there may be another of its name.
    pub(super) async fn create_volume(&self, work: &mut Work<'_>) -> Result<Bytes, Status> {
        let request: proto::CreateVolumeRequest = decode(&work.message)?;
        work.is_in_doubt = !self.nodes.away().is_empty();
        let answer = self.place_volume(&request, work).await?;
        if work.is_in_doubt
            && let Some(made) = decode::<proto::CreateVolumeResponse>(&answer)?.volume
        {
            self.doubt(&request.name, made.volume_id);
        }
        Ok(answer)
    }

    /// 1. A volume of this name is found again, wherever it is, also while it is copied there.
    /// 2. A node that was asked before and has not answered is asked again: the volume may be there.
    /// 3. Else the source's node or, without a source and where the topologies leave that node out, the best one: proposed to the
    ///    arbiter of the name, so that two routers make one volume. The next best where that has no room.
    async fn place_volume(
        &self,
        request: &proto::CreateVolumeRequest,
        work: &mut Work<'_>,
    ) -> Result<Bytes, Status> {
        use proto::volume_content_source::Type;
        let name = request.name.as_str();
        work.record.about(name);
        if name.is_empty() {
            return self.ask_any(work).await;
        }
        let _held = self.hold(Kind::Volume, name)?;
        let requirement = request.accessibility_requirements.as_ref();
        let source = request.volume_content_source.as_ref().and_then(|source| match &source.r#type {
            Some(Type::Snapshot(source)) => Some(&source.snapshot_id),
            Some(Type::Volume(source)) => Some(&source.volume_id),
            None => None,
        });
        work.source = source.and_then(|source| Some((DataDirKey::of(source)?, source.clone())));
        let is_forgotten = |key: DataDirKey| matches!(self.nodes.lookup(key), Lookup::Forgotten);
        let source_is_forgotten = work.source.as_ref().is_some_and(|(key, _)| is_forgotten(*key));
        let (found, are_all) = self.find(Kind::Volume, name, work.deadline).await?;
        work.is_in_doubt |= !are_all;
        self.end_other_copies(name, &found, requirement, work.deadline).await?;
        match &found[..] {
            [] => {}
            // Half a copy, of what will never be read, or where it is not wanted any more.
            [(node, found)]
                if found.in_progress
                    && (source_is_forgotten || !placement::is_allowed(&node.topology, requirement)) =>
            {
                let gone = work.source.as_ref().filter(|_| source_is_forgotten);
                self.abandon_on(node, name, found, gone.map_or("", |(_, source)| source), work.deadline)
                    .await?;
                self.unanswered.lock().remove(name);
                self.is_over(choice(Kind::Volume, name), node.key, &self.nodes.up(), work.deadline).await;
            }
            [(node, found)] if !placement::is_allowed(&node.topology, requirement) => {
                return Err(left_out(name, node, found));
            }
            [(node, _)] => return self.create_on(node, name, work).await,
            found => {
                counter!("deltapath_router_volumes_made_twice_total").increment(1);
                let places: Vec<_> =
                    found.iter().map(|(node, found)| format!("{} on node {}", found.id, node.name)).collect();
                return Err(Status::failed_precondition(format!(
                    "volume {name:?} exists twice, as {}: delete the one that is not in use",
                    places.join(" and as ")
                )));
            }
        }
        if let Some(key) = self.waits_for(name) {
            match self.nodes.lookup(key) {
                Lookup::Found(node) if placement::is_allowed(&node.topology, requirement) => {
                    return self.create_on(&node, name, work).await;
                }
                Lookup::Unavailable(status) => return Err(status),
                Lookup::Found(_) | Lookup::Forgotten => {}
            }
        }
        let mut at = None;
        if let Some((_, source)) = &work.source {
            match self.target(source)? {
                Target::Forgotten => return Err(forgotten(source)),
                Target::Node(node) if placement::is_allowed(&node.topology, requirement) => {
                    at = Some(node.key)
                }
                Target::Node(_) | Target::Any => {}
            }
        }
        self.create_new(request, at, work).await
    }

    /// Deletes a volume, also one that is not whole, on its node.
    pub(super) async fn delete_on(
        &self,
        node: &Arc<Node>,
        id: &str,
        deadline: Option<Instant>,
    ) -> Result<(), Status> {
        let request = proto::DeleteVolumeRequest { volume_id: id.to_owned(), ..Default::default() };
        let path = "/csi.v1.Controller/DeleteVolume";
        node.ask::<proto::DeleteVolumeResponse>(path, &request, deadline).await.map(drop)
    }

    /// If a name has a volume and copies, or several copies, ends those that no call has asked for lately, and fails: the next
    /// call finds one. Their nodes were away when the others were begun. Which copy is kept does not depend on the call. A call
    /// that does not allow the volume ends nothing, since it can get nothing.
    async fn end_other_copies(
        &self,
        name: &str,
        found: &[(Arc<Node>, FindResponse)],
        requirement: Option<&proto::TopologyRequirement>,
        deadline: Option<Instant>,
    ) -> Result<(), Status> {
        let (copies, volumes): (Vec<_>, Vec<_>) = found.iter().partition(|(_, found)| found.in_progress);
        let (kept, others) = match &volumes[..] {
            [] => {
                let kept = copies.iter().min_by_key(|(node, _)| node.key);
                let Some((kept, _)) = kept.filter(|_| copies.len() > 1) else { return Ok(()) };
                (kept, copies.into_iter().filter(|(node, _)| node.key != kept.key).collect())
            }
            [(kept, volume)] if !placement::is_allowed(&kept.topology, requirement) => {
                return Err(left_out(name, kept, volume));
            }
            [(kept, _)] if !copies.is_empty() => (kept, copies),
            _ => return Ok(()),
        };
        for (node, copy) in others {
            self.abandon_on(node, name, copy, "", deadline).await?;
        }
        Err(in_work(name, &kept.name))
    }

    /// Ends a copy for which no other call has come lately, or whose source is `gone` for good. A volume that it has become stays.
    pub(super) async fn abandon_on(
        &self,
        node: &Arc<Node>,
        name: &str,
        found: &FindResponse,
        gone: &str,
        deadline: Option<Instant>,
    ) -> Result<(), Status> {
        let request = AbandonRequest {
            volume_id: found.id.clone(),
            unasked_seconds: UNASKED.as_secs(),
            gone_source_id: gone.to_owned(),
        };
        match node.ask("/deltapath.node.v1.Node/Abandon", &request, deadline).await {
            Ok(AbandonResponse { is_volume: false }) => Ok(()),
            // A driver of an earlier release says Unimplemented, and ends by itself what no call asks for.
            Err(status) if !matches!(status.code(), Code::Aborted | Code::Unimplemented) => Err(status),
            Ok(_) | Err(_) => Err(in_work(name, &node.name)),
        }
    }

    /// Asks a node to make the volume. Until it answers, also beyond the end of this call, its name is kept for it.
    async fn create_on(&self, node: &Arc<Node>, name: &str, work: &mut Work<'_>) -> Result<Bytes, Status> {
        {
            let mut unanswered = self.unanswered.lock();
            if unanswered.len() >= MOST_UNANSWERED && !unanswered.contains_key(name) {
                unanswered.retain(|_, (_, asked)| asked.elapsed() < WAITED_FOR);
                if unanswered.len() >= MOST_UNANSWERED {
                    return Err(Status::resource_exhausted(format!(
                        "{MOST_UNANSWERED} volumes wait for nodes that do not answer: try again later"
                    )));
                }
            }
            unanswered.insert(name.to_owned(), (node.key, Instant::now()));
        }
        let answer = match work.source.clone() {
            Some((key, source)) if key != node.key => {
                let copied = self.copy_to(node, key, &source, work).await;
                // The copy continues, also if no call comes for it any more.
                if work.is_in_doubt
                    && copied.as_ref().is_err_and(|status| status.code() == Code::Aborted)
                    && let Ok(Some(begun)) = Self::find_on(node, Kind::Volume, name, work.deadline).await
                {
                    self.doubt(name, begun.id);
                }
                copied
            }
            _ => work.ask(node).await,
        };
        if is_answered(&answer) {
            self.unanswered.lock().remove(name);
            if answer.is_err() {
                self.is_over(choice(Kind::Volume, name), node.key, &self.nodes.up(), work.deadline).await;
            }
        }
        answer
    }

    /// Asks a node to make the volume of a source that is on another, which is allowed to it by a ticket.
    async fn copy_to(
        &self,
        node: &Arc<Node>,
        key: DataDirKey,
        source: &str,
        work: &mut Work<'_>,
    ) -> Result<Bytes, Status> {
        let away = match self.nodes.lookup(key) {
            Lookup::Found(from) => Ok(from),
            Lookup::Unavailable(status) => Err(status),
            Lookup::Forgotten => Err(forgotten(source)),
        };
        let from = match away {
            Ok(from) => from,
            // Without its source's node it can still be found. The node itself does not have the source.
            Err(status) => match work.ask(node).await {
                Err(refused) if matches!(refused.code(), Code::ResourceExhausted | Code::NotFound) => {
                    return Err(status);
                }
                answer => return answer,
            },
        };
        let request = CreateFromRequest {
            create_volume: work.message.to_vec(),
            address: from.address.to_string(),
            key: key.to_string(),
            ticket: self.nodes.ticket(source, node.key)?,
        };
        work.record.on(node);
        let path = "/deltapath.node.v1.Node/CreateFrom";
        let created: Bytes =
            node.ask::<CreateFromResponse>(path, &request, work.deadline).await?.created.into();
        answers::check(work.method, node, &work.message, &created)?;
        Ok(created)
    }

    /// The node that has not answered for this name, if there is one.
    fn waits_for(&self, name: &str) -> Option<DataDirKey> {
        let mut unanswered = self.unanswered.lock();
        let (key, asked) = unanswered.get_mut(name).filter(|(_, asked)| asked.elapsed() < WAITED_FOR)?;
        *asked = Instant::now();
        Some(*key)
    }

    /// What the node that was chosen for a name has of it. Another router may have chosen it just now, and is about to ask it: so it has
    /// a moment to come.
    async fn soon_on(
        node: &Arc<Node>,
        name: &str,
        deadline: Option<Instant>,
    ) -> Result<Option<FindResponse>, Status> {
        let until = Instant::now() + SOON;
        loop {
            let found = Self::find_on(node, Kind::Volume, name, deadline).await?;
            if found.is_some() || Instant::now() >= until {
                return Ok(found);
            }
            tokio::time::sleep(SOON / 20).await;
        }
    }

    /// Makes the volume on the node that the arbiter of its name has chosen: `at` that node, or the best one.
    async fn create_new(
        &self,
        request: &proto::CreateVolumeRequest,
        at: Option<DataDirKey>,
        work: &mut Work<'_>,
    ) -> Result<Bytes, Status> {
        let (name, requirement) = (request.name.as_str(), request.accessibility_requirements.as_ref());
        let bytes = request.capacity_range.map_or(0, |range| range.required_bytes);
        // Counted before anything is waited for, so that calls at once see each other.
        let candidates = self.nodes.candidates();
        let (best, making) = self.making.order(candidates, requirement, u64::try_from(bytes).unwrap_or(0));
        let allowed = at.map_or(best, |at| vec![at]);
        let nodes = self.nodes.up();
        let mut excluded = Vec::new();
        let mut full = None;
        loop {
            let Some(best) = allowed.iter().find(|key| !excluded.contains(*key)) else {
                if let Some(why) = full.is_none().then(|| self.nodes.taken_id(requirement)).flatten() {
                    return Err(Status::failed_precondition(why));
                }
                let may_be_away = self.nodes.away().iter().any(|missing| {
                    missing
                        .node
                        .as_ref()
                        .is_none_or(|node| placement::is_allowed(&node.topology, requirement))
                });
                return Err(full.unwrap_or_else(|| match may_be_away {
                    true => Status::unavailable("no node that the topologies allow answers: try again later"),
                    false => Status::resource_exhausted("none of the requisite topologies is that of a node"),
                }));
            };
            let excluded_keys = excluded.iter().map(DataDirKey::to_string).collect();
            let choose = ChooseRequest { excluded_keys, ..choice(Kind::Volume, name) };
            let (chosen, arbiter) = self.choose(choose.clone(), *best, &nodes, work.deadline).await?;
            // Another router may have asked the first one.
            let first =
                placement::arbiters(name, nodes.iter().map(|node| node.key).collect()).into_iter().next();
            work.is_in_doubt |= first != Some(arbiter.key);
            let node = match self.nodes.lookup(chosen) {
                Lookup::Found(node) => node,
                // Its volume may be there.
                Lookup::Unavailable(status) => return Err(status),
                Lookup::Forgotten => {
                    excluded.push(chosen);
                    continue;
                }
            };
            if !allowed.contains(&chosen) {
                match Self::soon_on(&node, name, work.deadline).await? {
                    Some(found) if found.in_progress => return Err(in_work(name, &node.name)),
                    Some(_) if placement::is_allowed(&node.topology, requirement) => {
                        return self.create_on(&node, name, work).await;
                    }
                    Some(found) => return Err(left_out(name, &node, &found)),
                    // The choice was for a volume that is deleted, or was not made.
                    None => {
                        work.is_in_doubt = true;
                        excluded.push(chosen);
                    }
                }
                continue;
            }
            if chosen != *best {
                // A choice is kept for whoever proposes it.
                self.choose(choose, chosen, &[arbiter], work.deadline).await?;
            }
            making.is_on(chosen);
            match self.create_on(&node, name, work).await {
                Err(status) if status.code() == Code::ResourceExhausted => full = Some(status),
                answer => return answer,
            }
            excluded.push(chosen);
        }
    }
}

/// The volume is on a node on which the call does not allow it.
fn left_out(name: &str, node: &Node, found: &FindResponse) -> Status {
    Status::already_exists(format!(
        "volume {name:?} already exists as {} on node {}, which the requisite topologies leave out: use another name, or \
         delete it",
        found.id, node.name
    ))
}
