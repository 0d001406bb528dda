//! A node of the simulation: what its driver answers to routers, with a disk that outlives its process. The choices of nodes for
//! names are the driver's own (`base::Choices`); the rest is a model of it.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use base::{Choices, DataDirKey};
use bytes::Bytes;
use parking_lot::Mutex;
use prost::Message;
use proto::node::{
    AbandonRequest, AbandonResponse, ChooseRequest, ChooseResponse, CreateFromRequest, CreateFromResponse,
    DescribeResponse, FindRequest, FindResponse, Kind,
};
use serve::mutual::Mutual;
use serve::relay::frame_bytes;
use testkit::played::serve_on;
use tokio::sync::mpsc;
use tokio::time::{Instant, sleep};
use tokio_rustls::TlsAcceptor;
use tokio_stream::wrappers::UnboundedReceiverStream;
use tonic::Status;

use super::disk::{Copy, Disk, Snapshot, Volume, id_of, is_same, page, snapshot};
use super::network::{HostId, Network};
use super::world::World;

pub const DRIVER: &str = "deltapath.csi.dev";
/// Size of a pool, in bytes.
pub const POOL: u64 = 64 << 30;
/// The longest that a call takes where nothing is wrong.
pub const NORMAL: Duration = Duration::from_millis(200);

/// What ends with the process.
#[derive(Default)]
struct Process {
    number: u64,
    choices: Choices<i32>,
    /// Names of which an object is being made.
    making: BTreeSet<(i32, String)>,
    /// Ids of copies that a task works on, and where the last call said that their source is. The others wait for CreateVolume.
    copying: BTreeMap<String, String>,
}

pub struct Node {
    pub host: HostId,
    pub key: DataDirKey,
    tls: Arc<Mutual>,
    network: Network,
    /// How much faster than the simulation's its clock is.
    pace: u32,
    began: Instant,
    state: Mutex<State>,
}

struct State {
    random: fastrand::Rng,
    disk: Disk,
    process: Process,
    /// The longest that a call takes.
    slowness: Duration,
}

fn answer<M: Message>(message: &M) -> Result<Bytes, Status> {
    Ok(message.encode_to_vec().into())
}

fn read<M: Message + Default>(message: Bytes) -> M {
    M::decode(message).expect("a request")
}

impl Node {
    pub fn new(host: HostId, key: DataDirKey, tls: Arc<Mutual>, network: &Network, seed: u64) -> Arc<Self> {
        let mut random = fastrand::Rng::with_seed(seed);
        let pace = random.choice([1, 1, 10]).expect("some");
        let state = State { random, disk: Disk::default(), process: Process::default(), slowness: NORMAL };
        let (network, began) = (network.clone(), Instant::now());
        Arc::new(Node { host, key, tls, network, pace, began, state: Mutex::new(state) })
    }

    pub fn disk(&self) -> Disk {
        self.state.lock().disk.clone()
    }

    pub fn is_at_work(&self) -> bool {
        let process = &self.state.lock().process;
        !process.making.is_empty() || !process.copying.is_empty()
    }

    pub fn slow(&self, slowness: Duration) {
        self.state.lock().slowness = slowness;
    }

    /// Its disk is as it was once. Only while its process is dead.
    pub fn set_disk(&self, disk: Disk) {
        self.state.lock().disk = disk;
    }

    pub fn name(&self) -> String {
        format!("node-{}", self.key)
    }

    pub fn topology(&self) -> proto::Topology {
        proto::Topology { segments: [(format!("topology.{DRIVER}/node"), self.name())].into() }
    }

    /// Its process is gone, with all that it was doing.
    pub fn end(&self) {
        let mut state = self.state.lock();
        let number = state.process.number + 1;
        state.process = Process { number, ..Default::default() };
        state.disk.copies.values_mut().for_each(|copy| copy.asked = Instant::now());
    }

    /// A process serves, until its connections end.
    pub fn start(self: &Arc<Self>, world: &Arc<World>) {
        let mut incoming = self.network.listen(self.host);
        let acceptor = TlsAcceptor::from(self.tls.server().expect("a certificate"));
        let (accepted, connections) = mpsc::unbounded_channel();
        tokio::spawn(async move {
            while let Some(stream) = incoming.recv().await {
                let (acceptor, accepted) = (acceptor.clone(), accepted.clone());
                tokio::spawn(async move {
                    if let Ok(stream) = acceptor.accept(stream).await {
                        let _ = accepted.send(io::Result::Ok(stream));
                    }
                });
            }
        });
        let (node, world) = (self.clone(), world.clone());
        let number = self.state.lock().process.number;
        let answers = move |path: String, message| {
            let (node, world) = (node.clone(), world.clone());
            let has_failed = world.has_failed.clone();
            // What is begun goes on when its caller is gone.
            let work = tokio::spawn(async move {
                node.work(number).await;
                let answer = node.answer(&world, number, &path, message).await;
                node.work(number).await;
                Ok(vec![frame_bytes(&answer?)])
            });
            async move {
                work.await.unwrap_or_else(|error| {
                    has_failed.store(true, Ordering::Relaxed);
                    panic!("{error}");
                })
            }
        };
        tokio::spawn(serve_on(UnboundedReceiverStream::new(connections), answers));
    }

    /// Some time passes. A process that has ended meanwhile goes no further, and one that is frozen goes on when it is not.
    async fn work(&self, number: u64) {
        let time = {
            let mut state = self.state.lock();
            let most = state.slowness.as_micros() as u64;
            Duration::from_micros(state.random.u64(..=most))
        };
        sleep(time).await;
        self.network.thawed(self.host).await;
        if self.state.lock().process.number != number {
            std::future::pending().await
        }
    }

    async fn answer(
        self: &Arc<Self>,
        world: &Arc<World>,
        number: u64,
        path: &str,
        message: Bytes,
    ) -> Result<Bytes, Status> {
        match path.rsplit('/').next().unwrap_or_default() {
            "Describe" => answer(&self.describe(number)),
            "Find" => self.find(&read(message)),
            "Choose" => self.choose(&read(message)),
            "CreateVolume" => answer(&self.create_volume(number, &read(message)).await?),
            "CreateFrom" => self.create_from(world, number, &read(message)).await,
            "Abandon" => self.abandon(&read(message)),
            "DeleteVolume" => {
                let asked: proto::DeleteVolumeRequest = read(message);
                let disk = &mut self.state.lock().disk;
                disk.volumes.remove(&asked.volume_id);
                disk.copies.remove(&asked.volume_id);
                answer(&proto::DeleteVolumeResponse {})
            }
            "CreateSnapshot" => answer(&self.create_snapshot(number, &read(message)).await?),
            "DeleteSnapshot" => {
                let asked: proto::DeleteSnapshotRequest = read(message);
                self.state.lock().disk.snapshots.remove(&asked.snapshot_id);
                answer(&proto::DeleteSnapshotResponse {})
            }
            "ListVolumes" => {
                let asked: proto::ListVolumesRequest = read(message);
                let state = self.state.lock();
                let (page, next_token) = page(&state.disk.volumes, asked.max_entries, &asked.starting_token);
                let entries = page.map(|(id, volume)| proto::list_volumes_response::Entry {
                    volume: Some(self.volume(id, volume)),
                    status: None,
                });
                answer(&proto::ListVolumesResponse { entries: entries.collect(), next_token })
            }
            "ListSnapshots" => {
                let asked: proto::ListSnapshotsRequest = read(message);
                let state = self.state.lock();
                let (page, next_token) =
                    page(&state.disk.snapshots, asked.max_entries, &asked.starting_token);
                let entries = page.map(|(id, found)| proto::list_snapshots_response::Entry {
                    snapshot: Some(snapshot(id, found)),
                });
                answer(&proto::ListSnapshotsResponse { entries: entries.collect(), next_token })
            }
            other => Err(Status::unimplemented(other)),
        }
    }

    fn describe(&self, number: u64) -> DescribeResponse {
        let state = self.state.lock();
        let provisioned_bytes = state.disk.provisioned();
        DescribeResponse {
            key: self.key.to_string(),
            node_id: self.name(),
            topology: self.topology().segments,
            driver_name: DRIVER.to_owned(),
            total_bytes: POOL,
            free_bytes: POOL.saturating_sub(provisioned_bytes),
            provisioned_bytes,
            process: number.to_string(),
            ..Default::default()
        }
    }

    fn find(&self, asked: &FindRequest) -> Result<Bytes, Status> {
        let state = self.state.lock();
        let found = match asked.kind() {
            Kind::Volume => {
                let copy = || Some((state.disk.copy_named(&asked.name)?, true));
                state.disk.volume_named(&asked.name).map(|id| (id, false)).or_else(copy)
            }
            Kind::Snapshot => state.disk.snapshot_named(&asked.name).map(|id| (id, false)),
            kind => return Err(Status::unimplemented(kind.as_str_name())),
        };
        if found.is_none() && state.process.making.contains(&(asked.kind, asked.name.clone())) {
            return Err(Status::aborted("it is being made"));
        }
        let (id, in_progress) = found.unwrap_or_default();
        answer(&FindResponse { id, in_progress })
    }

    fn choose(&self, asked: &ChooseRequest) -> Result<Bytes, Status> {
        let key = |text: &String| text.parse::<DataDirKey>().expect("a key");
        let (proposed, not) = (key(&asked.proposed_key), asked.excluded_keys.iter().map(key));
        let now = self.began.into_std() + self.began.elapsed() * self.pace;
        let choices = &mut self.state.lock().process.choices;
        let chosen = if asked.is_over {
            choices.end(asked.kind, &asked.name, proposed);
            proposed
        } else {
            let not: Vec<_> = not.collect();
            choices.choose(asked.kind, &asked.name, proposed, &not, now).expect("few choices")
        };
        answer(&ChooseResponse { key: chosen.to_string(), kind: asked.kind })
    }

    fn volume(&self, id: &str, volume: &Volume) -> proto::Volume {
        proto::Volume {
            volume_id: id.to_owned(),
            capacity_bytes: volume.bytes,
            accessible_topology: vec![self.topology()],
            content_source: volume
                .source
                .clone()
                .map(|source| proto::VolumeContentSource { r#type: Some(source) }),
            ..Default::default()
        }
    }

    fn created(&self, id: &str, volume: &Volume) -> proto::CreateVolumeResponse {
        proto::CreateVolumeResponse { volume: Some(self.volume(id, volume)) }
    }

    /// The volume of this name that is there, if it is as the request has it.
    fn made(
        &self,
        request: &proto::CreateVolumeRequest,
    ) -> Result<Option<proto::CreateVolumeResponse>, Status> {
        let state = self.state.lock();
        let Some(id) = state.disk.volume_named(&request.name) else { return Ok(None) };
        let volume = &state.disk.volumes[&id];
        is_same(volume, request)?;
        Ok(Some(self.created(&id, volume)))
    }

    async fn create_volume(
        &self,
        number: u64,
        request: &proto::CreateVolumeRequest,
    ) -> Result<proto::CreateVolumeResponse, Status> {
        if let Some(made) = self.made(request)? {
            return Ok(made);
        }
        let (id, volume) = {
            let mut state = self.state.lock();
            let name = request.name.clone();
            if let Some((_, copy)) = state.disk.copies.iter_mut().find(|(_, copy)| copy.volume.name == name) {
                // It waits for a call that says where its source is.
                copy.asked = Instant::now();
                return Err(Status::aborted("it is being copied"));
            }
            let bytes = request.capacity_range.map_or(0, |range| range.required_bytes);
            if state.disk.provisioned() + bytes as u64 > POOL {
                return Err(Status::resource_exhausted("the pool is full"));
            }
            let source = request.volume_content_source.clone().and_then(|source| source.r#type);
            let content = match &source {
                None => state.random.u64(..),
                Some(source) => {
                    let requisite =
                        request.accessibility_requirements.as_ref().map(|asked| asked.requisite.len());
                    state.disk.content(source, self.key, requisite > Some(0))?
                }
            };
            let making = &mut state.process.making;
            if !making.insert((Kind::Volume.into(), name.clone())) {
                return Err(Status::aborted("another call makes it"));
            }
            (self.id("vol", &mut state.random), Volume { name, bytes, content, source })
        };
        self.work(number).await;
        let mut state = self.state.lock();
        let created = self.created(&id, &volume);
        state.process.making.remove(&(Kind::Volume.into(), volume.name.clone()));
        state.disk.volumes.insert(id, volume);
        Ok(created)
    }

    async fn create_snapshot(
        &self,
        number: u64,
        request: &proto::CreateSnapshotRequest,
    ) -> Result<proto::CreateSnapshotResponse, Status> {
        let answered = |id: &str, found: &Snapshot| {
            Ok(proto::CreateSnapshotResponse { snapshot: Some(snapshot(id, found)) })
        };
        let (id, made) = {
            let mut state = self.state.lock();
            if let Some(id) = state.disk.snapshot_named(&request.name) {
                let found = &state.disk.snapshots[&id];
                return match found.volume_id == request.source_volume_id {
                    true => answered(&id, found),
                    false => Err(Status::already_exists("a snapshot of another volume has the name")),
                };
            }
            let source = state.disk.volumes.get(&request.source_volume_id);
            let content = source.ok_or_else(|| Status::not_found("no such volume"))?.content;
            let (name, volume_id) = (request.name.clone(), request.source_volume_id.clone());
            if !state.process.making.insert((Kind::Snapshot.into(), name.clone())) {
                return Err(Status::aborted("another call makes it"));
            }
            (self.id("snap", &mut state.random), Snapshot { name, volume_id, content })
        };
        self.work(number).await;
        let mut state = self.state.lock();
        state.process.making.remove(&(Kind::Snapshot.into(), made.name.clone()));
        let answer = answered(&id, &made);
        state.disk.snapshots.insert(id, made);
        answer
    }

    async fn create_from(
        self: &Arc<Self>,
        world: &Arc<World>,
        number: u64,
        asked: &CreateFromRequest,
    ) -> Result<Bytes, Status> {
        let request: proto::CreateVolumeRequest = read(asked.create_volume.clone().into());
        if let Some(made) = self.made(&request)? {
            return answer(&CreateFromResponse { created: made.encode_to_vec() });
        }
        let source = request.volume_content_source.clone().and_then(|source| source.r#type);
        let source_id = id_of(source.as_ref().expect("a source")).to_owned();
        let known = self.state.lock().disk.copy_named(&request.name);
        let id = match known {
            Some(id) => id,
            None => {
                let from = world.at(self, &asked.address)?;
                if from.key.to_string() != asked.key {
                    return Err(Status::unavailable("another node is at the source's address"));
                }
                let content =
                    from.state.lock().disk.content(source.as_ref().expect("a source"), from.key, true)?;
                let mut state = self.state.lock();
                let bytes = request.capacity_range.map_or(0, |range| range.required_bytes);
                if state.disk.provisioned() + bytes as u64 > POOL {
                    return Err(Status::resource_exhausted("the pool is full"));
                }
                let volume = Volume { name: request.name.clone(), bytes, content, source };
                let (id, left) = (self.id("vol", &mut state.random), state.random.u32(1..8));
                let copy = Copy { volume, source_id, asked: Instant::now(), left };
                state.disk.copies.insert(id.clone(), copy);
                id
            }
        };
        {
            let state = &mut *self.state.lock();
            let copy = state.disk.copies.get_mut(&id).expect("it is there");
            is_same(&copy.volume, &request)?;
            copy.asked = Instant::now();
            if state.process.copying.insert(id.clone(), asked.address.clone()).is_none() {
                tokio::spawn(self.clone().copy(world.clone(), number, id));
            }
        }
        Err(Status::aborted("it is being copied"))
    }

    /// Parts come as long as the source is reached, and wait while it is not.
    async fn copy(self: Arc<Self>, world: Arc<World>, number: u64, id: String) {
        loop {
            sleep(Duration::from_millis(900)).await;
            self.work(number).await;
            let (copy, address) = {
                let state = self.state.lock();
                (state.disk.copies.get(&id).cloned(), state.process.copying[&id].clone())
            };
            let Some(copy) = copy else { break };
            let source_key = DataDirKey::of(&copy.source_id);
            let from = world.at(&self, &address).ok().filter(|from| Some(from.key) == source_key);
            let content = from.map(|from| {
                let source = copy.volume.source.as_ref().expect("a source");
                from.state.lock().disk.content(source, from.key, true)
            });
            let state = &mut *self.state.lock();
            match content {
                None => continue,
                Some(Err(_)) => drop(state.disk.copies.remove(&id)),
                Some(Ok(_)) if copy.left > 0 => {
                    state.disk.copies.get_mut(&id).expect("it is there").left -= 1;
                    continue;
                }
                Some(Ok(_)) => {
                    state.disk.copies.remove(&id);
                    state.disk.volumes.insert(id.clone(), copy.volume);
                }
            }
            break;
        }
        self.state.lock().process.copying.remove(&id);
    }

    fn abandon(&self, asked: &AbandonRequest) -> Result<Bytes, Status> {
        let mut state = self.state.lock();
        if state.disk.volumes.contains_key(&asked.volume_id) {
            return answer(&AbandonResponse { is_volume: true });
        }
        if let Some(copy) = state.disk.copies.get(&asked.volume_id) {
            let unasked = copy.asked.elapsed() >= Duration::from_secs(asked.unasked_seconds);
            if !unasked && copy.source_id != asked.gone_source_id {
                return Err(Status::aborted("CreateVolume is called for it"));
            }
            state.disk.copies.remove(&asked.volume_id);
        }
        answer(&AbandonResponse { is_volume: false })
    }

    fn id(&self, kind: &str, random: &mut fastrand::Rng) -> String {
        format!("{kind}-{}{:024x}", self.key, random.u64(..))
    }
}
