//! A CSI driver that holds one volume in memory: its snapshots say of each block which content it has. The model that pages
//! are held against, and what drivers do wrong on demand; `first_draft` uses the real one.

use std::collections::BTreeMap;
use std::path::Path;
use std::pin::Pin;
use std::sync::{Arc, Mutex};

use futures_util::{Stream, stream};
use proto::identity_server::IdentityServer;
use proto::snapshot_metadata_server::{SnapshotMetadata, SnapshotMetadataServer};
use proto::*;
use testkit::plugin::Plugin;
use tokio::net::UnixListener;
use tokio::runtime::Runtime;
use tokio_stream::wrappers::UnixListenerStream;
use tonic::{Request, Response, Status, async_trait};

/// A volume's snapshots.
#[derive(Clone)]
pub struct Volume {
    pub style: BlockMetadataType,
    /// In bytes.
    pub block: u64,
    pub blocks: u64,
    /// The content of each block, by handle. 0 is a hole.
    pub snapshots: BTreeMap<String, Vec<u8>>,
}

impl Volume {
    /// Snapshots `s0` and `s1`: blocks 1, 2 and 5 of 8 differ; of them 2 and 5 are holes in `s1`.
    pub fn small() -> Self {
        let snapshots = [("s0", [7, 7, 7, 0, 7, 7, 0, 0]), ("s1", [7, 8, 0, 0, 7, 0, 0, 0])];
        let snapshots = snapshots.map(|(handle, content)| (handle.to_owned(), content.to_vec())).into();
        Volume { style: BlockMetadataType::FixedLength, block: 4096, blocks: 8, snapshots }
    }

    /// Random snapshots `s0`, `s1` and on.
    pub fn random(random: &mut fastrand::Rng, snapshots: usize) -> Self {
        let style = match random.bool() {
            true => BlockMetadataType::FixedLength,
            false => BlockMetadataType::VariableLength,
        };
        let mut volume = Volume {
            style,
            block: 512 << random.u32(..8),
            blocks: random.u64(1..400),
            snapshots: BTreeMap::new(),
        };
        let mut content = vec![0; volume.blocks as usize];
        for number in 0..snapshots {
            for _ in 0..random.usize(..12) {
                let begin = random.usize(..content.len());
                let end = (begin + random.usize(1..40)).min(content.len());
                let fill = random.u8(..4);
                content[begin..end].fill(fill);
            }
            volume.snapshots.insert(format!("s{number}"), content.clone());
        }
        volume
    }

    pub fn capacity(&self) -> u64 {
        self.block * self.blocks
    }

    /// Tuples from the block with `from` on: offset and size.
    pub fn tuples(&self, base: Option<&str>, target: &str, from: u64) -> Result<Vec<(u64, u64)>, Status> {
        let find = |handle: &str| {
            let found = self.snapshots.get(handle);
            found.ok_or_else(|| Status::not_found(format!("snapshot {handle} does not exist")))
        };
        let target = find(target)?;
        let base = base.map(find).transpose()?;
        if from > self.capacity() {
            return Err(Status::out_of_range(format!("the volume has {} bytes", self.capacity())));
        }
        let is_listed = |at: usize| base.map_or(target[at] != 0, |base| base[at] != target[at]);
        let mut tuples: Vec<(u64, u64)> = Vec::new();
        for at in (from / self.block..self.blocks).filter(|at| is_listed(*at as usize)) {
            let offset = at * self.block;
            match tuples.last_mut() {
                Some((begin, size))
                    if self.style == BlockMetadataType::VariableLength && *begin + *size == offset =>
                {
                    *size += self.block;
                }
                _ => tuples.push((offset, self.block)),
            }
        }
        Ok(tuples)
    }

    /// Whether a range of a snapshot is a hole.
    pub fn is_hole(&self, snapshot: &str, (offset, size): (u64, u64)) -> bool {
        let content = &self.snapshots[snapshot];
        (offset / self.block..(offset + size) / self.block).all(|at| content[at as usize] == 0)
    }
}

/// A driver on a socket, until it is dropped.
pub struct Driver {
    pub volume: Arc<Mutex<Volume>>,
    /// Where each stream was to begin: of deltas, and of what is allocated.
    pub asked: Arc<Mutex<(Vec<i64>, Vec<i64>)>>,
    /// What came as secrets with deltas.
    pub secrets: Arc<Mutex<Vec<(String, String)>>>,
    /// Its own, so that its connections end with it, as those of a process do.
    runtime: Option<Runtime>,
}

impl Driver {
    pub fn start(name: &str, socket: &Path, volume: Volume) -> Self {
        Self::start_with(name, socket, Some(volume))
    }

    /// Without its SnapshotMetadata service where there is no volume.
    pub fn start_with(name: &str, socket: &Path, volume: Option<Volume>) -> Self {
        let _ = std::fs::remove_file(socket);
        let empty = Volume {
            style: BlockMetadataType::FixedLength,
            block: 512,
            blocks: 1,
            snapshots: BTreeMap::new(),
        };
        let (has_metadata, asked) = (volume.is_some(), Arc::default());
        let secrets: Arc<Mutex<Vec<_>>> = Arc::default();
        let volume = Arc::new(Mutex::new(volume.unwrap_or(empty)));
        let metadata =
            Metadata { volume: volume.clone(), asked: Arc::clone(&asked), secrets: secrets.clone() };
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build();
        let runtime = runtime.expect("a runtime");
        let listener = {
            let _entered = runtime.enter();
            UnixListenerStream::new(UnixListener::bind(socket).expect("bind"))
        };
        runtime.spawn(
            tonic::transport::Server::builder()
                .add_service(IdentityServer::new(Plugin { name: name.to_owned() }))
                .add_optional_service(has_metadata.then(|| SnapshotMetadataServer::new(metadata)))
                .serve_with_incoming(listener),
        );
        Driver { volume, asked, secrets, runtime: Some(runtime) }
    }
}

impl Drop for Driver {
    fn drop(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }
}

struct Metadata {
    volume: Arc<Mutex<Volume>>,
    asked: Arc<Mutex<(Vec<i64>, Vec<i64>)>>,
    secrets: Arc<Mutex<Vec<(String, String)>>>,
}

type Messages<M> = Pin<Box<dyn Stream<Item = Result<M, Status>> + Send>>;

impl Metadata {
    /// Messages of `max_results` tuples; one without any where there are none.
    fn answer(
        &self,
        base: Option<&str>,
        target: &str,
        from: i64,
        max_results: i32,
    ) -> Result<Vec<GetMetadataAllocatedResponse>, Status> {
        let volume = self.volume.lock().unwrap();
        // It breaks the CSI spec.
        let tuples = match target {
            "out-of-order" => vec![(volume.block, volume.block), (0, volume.block)],
            "too-long" => vec![(0, volume.capacity() + 1)],
            _ => volume.tuples(base, target, from as u64)?,
        };
        let message = |tuples: &[(u64, u64)]| {
            let tuple = |(offset, size): &(u64, u64)| BlockMetadata {
                byte_offset: *offset as i64,
                size_bytes: *size as i64,
            };
            GetMetadataAllocatedResponse {
                block_metadata_type: volume.style.into(),
                volume_capacity_bytes: volume.capacity() as i64,
                block_metadata: tuples.iter().map(tuple).collect(),
            }
        };
        let length = if max_results == 0 { 100 } else { max_results as usize };
        let messages: Vec<_> = tuples.chunks(length).map(message).collect();
        Ok(if messages.is_empty() { vec![message(&[])] } else { messages })
    }
}

#[async_trait]
impl SnapshotMetadata for Metadata {
    type GetMetadataAllocatedStream = Messages<GetMetadataAllocatedResponse>;
    type GetMetadataDeltaStream = Messages<GetMetadataDeltaResponse>;

    async fn get_metadata_allocated(
        &self,
        request: Request<GetMetadataAllocatedRequest>,
    ) -> Result<Response<Self::GetMetadataAllocatedStream>, Status> {
        let request = request.into_inner();
        self.asked.lock().unwrap().1.push(request.starting_offset);
        if request.snapshot_id == "slow" {
            return std::future::pending().await;
        }
        let messages =
            self.answer(None, &request.snapshot_id, request.starting_offset, request.max_results)?;
        Ok(Response::new(Box::pin(stream::iter(messages.into_iter().map(Ok)))))
    }

    async fn get_metadata_delta(
        &self,
        request: Request<GetMetadataDeltaRequest>,
    ) -> Result<Response<Self::GetMetadataDeltaStream>, Status> {
        let request = request.into_inner();
        self.asked.lock().unwrap().0.push(request.starting_offset);
        self.secrets.lock().unwrap().extend(request.secrets.clone());
        let (base, target) = (&request.base_snapshot_id, &request.target_snapshot_id);
        let messages = self.answer(Some(base), target, request.starting_offset, request.max_results)?;
        let messages = messages.into_iter().map(|message| {
            Ok(GetMetadataDeltaResponse {
                block_metadata_type: message.block_metadata_type,
                volume_capacity_bytes: message.volume_capacity_bytes,
                block_metadata: message.block_metadata,
            })
        });
        Ok(Response::new(Box::pin(stream::iter(messages))))
    }
}
