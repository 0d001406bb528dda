//! Makes calls, and represents their answers.

use std::error::Error;

use csi_client::{BlockList, Client, from_snapshot, from_volume, stage_of};
use testkit::requests;
use tonic::{Code, Response, Status};

use super::calls::{ANOTHER, Call, From, Members, MountPath, NewVolume, Pages, Question, Size, Use};
use super::names::{Asked, Names, capability};

/// The content of an `OK` answer.
#[derive(Clone, Debug, PartialEq)]
pub enum Reply {
    Nothing,
    Volume(proto::Volume),
    Snapshot(proto::Snapshot),
    Group(proto::VolumeGroupSnapshot),
    Volumes(Vec<Vec<proto::list_volumes_response::Entry>>),
    Snapshots(Vec<Vec<proto::Snapshot>>),
    Status(proto::ControllerGetVolumeResponse),
    Health(Option<proto::VolumeHealth>),
    Unwell(Vec<proto::VolumeHealth>),
    Capacity(proto::GetCapacityResponse),
    Expanded(proto::ControllerExpandVolumeResponse),
    Confirmed(bool),
    Stats(proto::NodeGetVolumeStatsResponse),
    NodeExpanded(i64),
    Blocks(BlockList),
    Text(String),
}

/// How a call ended.
#[derive(Clone, Debug)]
pub enum Answer {
    Done(Reply),
    Failed(Code, String),
    /// The driver was killed before the answer.
    Cut,
}

impl std::fmt::Display for Answer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Answer::Done(_) => write!(f, "OK"),
            Answer::Failed(code, message) => write!(f, "{code:?} ({message})"),
            Answer::Cut => write!(f, "no answer"),
        }
    }
}

type Made = Result<Reply, Status>;

/// Makes a call.
pub async fn make(client: &mut Client, asked: &Asked) -> Answer {
    made(client, &asked.names, &asked.call).await.into()
}

impl std::convert::From<Made> for Answer {
    fn from(made: Made) -> Self {
        match made {
            Ok(reply) => Answer::Done(reply),
            // This error is not from the driver: the connection broke.
            Err(status) if status.source().is_some() || status.code() == Code::Unavailable => Answer::Cut,
            Err(status) => Answer::Failed(status.code(), status.message().to_owned()),
        }
    }
}

impl Answer {
    /// How a stream ended.
    pub fn of_blocks(list: Result<BlockList, csi_client::Error>) -> Self {
        list.map(Reply::Blocks).map_err(|error| error.status).into()
    }
}

fn nothing(made: csi_client::Result<()>) -> Made {
    made.map(|()| Reply::Nothing).map_err(|error| error.status)
}

fn range(size: Size) -> Option<proto::CapacityRange> {
    Some(proto::CapacityRange { required_bytes: size.required, limit_bytes: size.limit })
}

fn plain(asked: &Use) -> proto::VolumeCapability {
    capability(asked.access, asked.mode)
}

async fn create_volume(client: &mut Client, names: &Names, new: &NewVolume) -> Made {
    let mut request = proto::CreateVolumeRequest {
        name: new.name.text("volume"),
        capacity_range: range(new.size),
        volume_capabilities: new.uses.iter().map(plain).collect(),
        volume_content_source: match &new.from {
            From::Nothing => None,
            From::Snapshot(snapshot) => Some(from_snapshot(&names.snapshot(snapshot))),
            From::Volume(volume) => Some(from_volume(&names.volume(volume))),
        },
        ..Default::default()
    };
    if let Some(size) = new.block_size {
        request.parameters.insert("blockSize".into(), size.into());
    }
    if let Some(tracking) = new.tracking {
        request.parameters.insert("changedBlockTracking".into(), tracking.to_string());
    }
    if let Some(kib) = new.read_ahead {
        request.mutable_parameters.insert("readAheadKiB".into(), kib.into());
    }
    if new.elsewhere {
        let segments = [("topology.deltapath.csi.dev/node".to_owned(), ANOTHER.to_owned())].into();
        let requisite = vec![proto::Topology { segments }];
        request.accessibility_requirements =
            Some(proto::TopologyRequirement { requisite, preferred: vec![] });
    }
    let made = client.controller.create_volume(request).await?.into_inner();
    Ok(made.volume.map_or(Reply::Nothing, Reply::Volume))
}

async fn made(client: &mut Client, names: &Names, call: &Call) -> Made {
    let styled = |style: &Option<&'static str>| {
        style.iter().map(|style| ("blockMetadataType".to_owned(), (*style).to_owned())).collect()
    };
    let members = |group, members: Members| {
        let (id, mut ids) = names.group(group);
        if members == Members::ButOne {
            ids.pop();
        }
        (id, ids)
    };
    match call {
        Call::CreateVolume(new) => create_volume(client, names, new).await,
        Call::Ask(question) => ask(client, *question).await,
        Call::ListVolumes(pages) => {
            let mut list = List::of(*pages);
            while let Some(starting_token) = list.next.take() {
                let request = proto::ListVolumesRequest { max_entries: pages.most, starting_token };
                let page = client.controller.list_volumes(request).await?.into_inner();
                list.add(page.entries, page.next_token);
            }
            Ok(Reply::Volumes(list.pages))
        }
        Call::ListSnapshots { pages, of, only } => {
            let mut list = List::of(*pages);
            while let Some(starting_token) = list.next.take() {
                let request = proto::ListSnapshotsRequest {
                    max_entries: pages.most,
                    starting_token,
                    source_volume_id: of.as_ref().map(|of| names.volume(of)).unwrap_or_default(),
                    snapshot_id: only.as_ref().map(|only| names.snapshot(only)).unwrap_or_default(),
                    ..Default::default()
                };
                let page = client.controller.list_snapshots(request).await?.into_inner();
                let snapshots = page.entries.into_iter().filter_map(|entry| entry.snapshot);
                list.add(snapshots.collect(), page.next_token);
            }
            Ok(Reply::Snapshots(list.pages))
        }
        Call::DeleteVolume(volume) => nothing(client.delete_volume(&names.volume(volume)).await),
        Call::ControllerPublish { volume, node, asked, read_only } => {
            let request = proto::ControllerPublishVolumeRequest {
                volume_id: names.volume(volume),
                node_id: names.node(*node, volume),
                volume_capability: Some(names.capability(*asked, volume)),
                readonly: *read_only,
                ..Default::default()
            };
            client.controller.controller_publish_volume(request).await.map(|_| Reply::Nothing)
        }
        Call::ControllerUnpublish { volume, node } => {
            let request = requests::detach(names.volume(volume), &names.node(*node, volume));
            client.controller.controller_unpublish_volume(request).await.map(|_| Reply::Nothing)
        }
        Call::Validate { volume, asked } => {
            let request = requests::validate(names.volume(volume), vec![names.capability(*asked, volume)]);
            let answer = client.controller.validate_volume_capabilities(request).await?;
            Ok(Reply::Confirmed(answer.into_inner().confirmed.is_some()))
        }
        Call::GetVolume(volume) => {
            let request = proto::ControllerGetVolumeRequest { volume_id: names.volume(volume) };
            Ok(Reply::Status(client.controller.controller_get_volume(request).await?.into_inner()))
        }
        Call::ListHealth(pages) => {
            let mut list = List::of(*pages);
            while let Some(starting_token) = list.next.take() {
                let max_entries = pages.most;
                let request = proto::ControllerListVolumeHealthRequest {
                    max_entries,
                    starting_token,
                    ..Default::default()
                };
                let page = client.controller.controller_list_volume_health(request).await?.into_inner();
                list.add(page.entries, page.next_token);
            }
            Ok(Reply::Unwell(list.pages.concat()))
        }
        Call::GetHealth(volume) => {
            let request = requests::health(names.volume(volume));
            let reported = client.controller.controller_get_volume_health(request).await?.into_inner();
            Ok(Reply::Health(reported.volume_health))
        }
        Call::GetCapacity { asked } => {
            let request = proto::GetCapacityRequest {
                volume_capabilities: asked.iter().map(plain).collect(),
                ..Default::default()
            };
            Ok(Reply::Capacity(client.controller.get_capacity(request).await?.into_inner()))
        }
        Call::Expand { volume, size, asked } => {
            let request = proto::ControllerExpandVolumeRequest {
                volume_id: names.volume(volume),
                capacity_range: range(*size),
                volume_capability: asked.map(|asked| names.capability(asked, volume)),
                ..Default::default()
            };
            Ok(Reply::Expanded(client.controller.controller_expand_volume(request).await?.into_inner()))
        }
        Call::Modify { volume, read_ahead, direct_io } => {
            let mut request = requests::modify(names.volume(volume), &[("readAheadKiB", read_ahead)]);
            if let Some(direct) = direct_io {
                request.mutable_parameters.insert("directIO".into(), direct.to_string());
            }
            client.controller.controller_modify_volume(request).await.map(|_| Reply::Nothing)
        }
        Call::CreateSnapshot { name, volume, style } => {
            let request = proto::CreateSnapshotRequest {
                name: name.text("snapshot"),
                source_volume_id: names.volume(volume),
                parameters: styled(style),
                ..Default::default()
            };
            let made = client.controller.create_snapshot(request).await?.into_inner();
            Ok(made.snapshot.map_or(Reply::Nothing, Reply::Snapshot))
        }
        Call::DeleteSnapshot(snapshot) => nothing(client.delete_snapshot(&names.snapshot(snapshot)).await),
        Call::GetSnapshot(snapshot) => {
            let request = requests::snapshot(names.snapshot(snapshot));
            let found = client.controller.get_snapshot(request).await?.into_inner();
            Ok(found.snapshot.map_or(Reply::Nothing, Reply::Snapshot))
        }
        Call::CreateGroup { name, volumes, style } => {
            let request = proto::CreateVolumeGroupSnapshotRequest {
                name: name.text("group"),
                source_volume_ids: volumes.iter().map(|volume| names.volume(volume)).collect(),
                parameters: styled(style),
                ..Default::default()
            };
            let made = client.groups.create_volume_group_snapshot(request).await?.into_inner();
            Ok(made.group_snapshot.map_or(Reply::Nothing, Reply::Group))
        }
        Call::DeleteGroup { group, members: named } => {
            let (id, members) = members(group, *named);
            nothing(client.delete_group(&id, &members).await)
        }
        Call::GetGroup { group, members: named } => {
            let (group_snapshot_id, snapshot_ids) = members(group, *named);
            let request = proto::GetVolumeGroupSnapshotRequest {
                group_snapshot_id,
                snapshot_ids,
                ..Default::default()
            };
            let found = client.groups.get_volume_group_snapshot(request).await?.into_inner();
            Ok(found.group_snapshot.map_or(Reply::Nothing, Reply::Group))
        }
        Call::Allocated { snapshot, cut } => {
            let list = client.allocated(&names.snapshot(snapshot), cut.offset.bytes(), cut.most).await;
            list.map(Reply::Blocks).map_err(|error| error.status)
        }
        Call::Delta { base, target, cut } => {
            let (base, target) = (names.snapshot(base), names.snapshot(target));
            let list = client.delta(&base, &target, cut.offset.bytes(), cut.most).await;
            list.map(Reply::Blocks).map_err(|error| error.status)
        }
        Call::Stage { volume, at, asked } => {
            let (staging, capability) = (names.path(*at), names.capability(*asked, volume));
            let request = stage_of(&names.volume(volume), staging.as_ref(), capability);
            client.node.node_stage_volume(request).await.map(|_| Reply::Nothing)
        }
        Call::Unstage { volume, at } => {
            let request = requests::unstage(names.volume(volume), names.path(*at));
            client.node.node_unstage_volume(request).await.map(|_| Reply::Nothing)
        }
        Call::Publish { volume, staged, at, asked, read_only } => {
            let request = proto::NodePublishVolumeRequest {
                volume_id: names.volume(volume),
                staging_target_path: names.path(*staged),
                target_path: names.path(*at),
                volume_capability: Some(names.capability(*asked, volume)),
                readonly: *read_only,
                ..Default::default()
            };
            client.node.node_publish_volume(request).await.map(|_| Reply::Nothing)
        }
        Call::Unpublish { volume, at } => {
            let request = requests::unpublish(names.volume(volume), names.path(*at));
            client.node.node_unpublish_volume(request).await.map(|_| Reply::Nothing)
        }
        Call::PublishEphemeral { handle, at, asked, size, read_only } => {
            let mut request = proto::NodePublishVolumeRequest {
                volume_id: format!("csi-{handle}"),
                target_path: names.path(*at),
                volume_capability: Some(plain(asked)),
                readonly: *read_only,
                ..Default::default()
            };
            request.volume_context.insert("csi.storage.k8s.io/ephemeral".into(), "true".into());
            request.volume_context.insert("size".into(), (*size).into());
            client.node.node_publish_volume(request).await.map(|_| Reply::Nothing)
        }
        Call::UnpublishEphemeral { handle, at } => {
            let request = requests::unpublish(format!("csi-{handle}"), names.path(*at));
            client.node.node_unpublish_volume(request).await.map(|_| Reply::Nothing)
        }
        Call::Stats { volume, at } => {
            let request = requests::stats(names.volume(volume), names.path(*at));
            Ok(Reply::Stats(client.node.node_get_volume_stats(request).await?.into_inner()))
        }
        Call::NodeHealth { volume, at } => {
            let mut request =
                proto::NodeGetVolumeHealthRequest { volume_id: names.volume(volume), ..Default::default() };
            match at {
                MountPath::Staging(_) => request.staging_target_path = names.path(*at),
                MountPath::Target(_) | MountPath::Empty => request.volume_publish_path = names.path(*at),
            }
            Ok(Reply::Health(client.node.node_get_volume_health(request).await?.into_inner().volume_health))
        }
        Call::NodeExpand { volume, at, size, asked } => {
            let mut request = requests::node_expand(names.volume(volume), names.path(*at));
            request.capacity_range = range(*size);
            request.volume_capability = asked.map(|asked| names.capability(asked, volume));
            let expanded = client.node.node_expand_volume(request).await?.into_inner();
            Ok(Reply::NodeExpanded(expanded.capacity_bytes))
        }
    }
}

/// More pages than a life has objects, so that a list with circular tokens ends.
const MAX_PAGES: usize = 64;

/// The pages of a list so far, and the token of the next.
struct List<P> {
    pages: Vec<P>,
    next: Option<String>,
}

impl<P> List<P> {
    fn of(asked: Pages) -> Self {
        let next = if asked.bad_token { "zz".to_owned() } else { String::new() };
        List { pages: Vec::new(), next: Some(next) }
    }

    fn add(&mut self, page: P, next: String) {
        self.pages.push(page);
        self.next = Some(next).filter(|next| !next.is_empty() && self.pages.len() < MAX_PAGES);
    }
}

fn text<T: std::fmt::Debug>(answer: Result<Response<T>, Status>) -> Made {
    Ok(Reply::Text(format!("{:?}", answer?.get_ref())))
}

async fn ask(client: &mut Client, question: Question) -> Made {
    let client = (&mut client.identity, &mut client.controller, &mut client.groups, &mut client.node);
    let (identity, controller, groups, node) = client;
    match question {
        Question::Probe => text(identity.probe(proto::ProbeRequest {}).await),
        Question::GetPluginInfo => text(identity.get_plugin_info(proto::GetPluginInfoRequest {}).await),
        Question::GetPluginCapabilities => {
            text(identity.get_plugin_capabilities(proto::GetPluginCapabilitiesRequest {}).await)
        }
        Question::ControllerGetCapabilities => {
            text(controller.controller_get_capabilities(proto::ControllerGetCapabilitiesRequest {}).await)
        }
        Question::GroupControllerGetCapabilities => {
            let request = proto::GroupControllerGetCapabilitiesRequest {};
            text(groups.group_controller_get_capabilities(request).await)
        }
        Question::NodeGetCapabilities => {
            text(node.node_get_capabilities(proto::NodeGetCapabilitiesRequest {}).await)
        }
        Question::NodeGetInfo => text(node.node_get_info(proto::NodeGetInfoRequest {}).await),
        Question::NodeGetStorageHealth => {
            text(node.node_get_storage_health(proto::NodeGetStorageHealthRequest::default()).await)
        }
    }
}
