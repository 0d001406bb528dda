//! A CSI driver that answers from memory, so that what it takes does not count.

use std::collections::HashMap;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use futures_util::{Stream, stream};
use proto::snapshot_metadata_server::{SnapshotMetadata, SnapshotMetadataServer};
use proto::{
    BlockMetadata, BlockMetadataType, GetMetadataAllocatedRequest, GetMetadataAllocatedResponse,
    GetMetadataDeltaRequest, GetMetadataDeltaResponse,
};
use tokio::net::UnixListener;
use tokio::runtime::Runtime;
use tokio_stream::wrappers::UnixListenerStream;
use tonic::{Request, Response, Status, async_trait};

use crate::source::Source;

/// Tuples in a message.
const TUPLES: usize = 256;

/// Answers by base, where there is one, and target.
type Answers = HashMap<(Option<String>, String), Vec<BlockMetadata>>;

/// A running driver of one volume.
pub struct Driver {
    answers: Arc<Mutex<Answers>>,
    runtime: Option<Runtime>,
    socket: PathBuf,
}

fn lock(answers: &Mutex<Answers>) -> MutexGuard<'_, Answers> {
    answers.lock().unwrap_or_else(PoisonError::into_inner)
}

fn tuples(ranges: &[Range<u64>]) -> Vec<BlockMetadata> {
    let tuple = |range: &Range<u64>| BlockMetadata {
        byte_offset: range.start as i64,
        size_bytes: (range.end - range.start) as i64,
    };
    ranges.iter().map(tuple).collect()
}

impl Driver {
    /// With one snapshot that holds what the source does.
    pub fn start(socket: &Path, source: &Source, handle: &str) -> Self {
        let first = HashMap::from([((None, handle.to_owned()), tuples(&source.ranges()))]);
        let answers = Arc::new(Mutex::new(first));
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build();
        let runtime = runtime.expect("a runtime");
        let listener = {
            let _entered = runtime.enter();
            UnixListenerStream::new(UnixListener::bind(socket).expect("bind"))
        };
        let service =
            SnapshotMetadataServer::new(Metadata { answers: answers.clone(), size: source.size as i64 });
        runtime.spawn(tonic::transport::Server::builder().add_service(service).serve_with_incoming(listener));
        Driver { answers, runtime: Some(runtime), socket: socket.to_owned() }
    }

    pub fn endpoint(&self) -> String {
        format!("unix://{}", self.socket.display())
    }

    pub fn delta(&self, base: &str, target: &str, changed: &[Range<u64>]) {
        lock(&self.answers).insert((Some(base.to_owned()), target.to_owned()), tuples(changed));
    }
}

impl Drop for Driver {
    fn drop(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
        let _ = std::fs::remove_file(&self.socket);
    }
}

struct Metadata {
    answers: Arc<Mutex<Answers>>,
    size: i64,
}

type Messages<M> = Pin<Box<dyn Stream<Item = Result<M, Status>> + Send>>;

impl Metadata {
    fn of(&self, base: Option<String>, target: String) -> Result<Vec<Vec<BlockMetadata>>, Status> {
        let answers = lock(&self.answers);
        let tuples = answers.get(&(base, target)).ok_or_else(|| Status::not_found("no such snapshot"))?;
        Ok(tuples.chunks(TUPLES).map(<[_]>::to_vec).collect())
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
        let volume_capacity_bytes = self.size;
        let messages =
            self.of(None, request.into_inner().snapshot_id)?.into_iter().map(move |block_metadata| {
                Ok(GetMetadataAllocatedResponse {
                    block_metadata_type: BlockMetadataType::VariableLength.into(),
                    volume_capacity_bytes,
                    block_metadata,
                })
            });
        Ok(Response::new(Box::pin(stream::iter(messages))))
    }

    async fn get_metadata_delta(
        &self,
        request: Request<GetMetadataDeltaRequest>,
    ) -> Result<Response<Self::GetMetadataDeltaStream>, Status> {
        let request = request.into_inner();
        let volume_capacity_bytes = self.size;
        let messages = self.of(Some(request.base_snapshot_id), request.target_snapshot_id)?;
        let messages = messages.into_iter().map(move |block_metadata| {
            Ok(GetMetadataDeltaResponse {
                block_metadata_type: BlockMetadataType::VariableLength.into(),
                volume_capacity_bytes,
                block_metadata,
            })
        });
        Ok(Response::new(Box::pin(stream::iter(messages))))
    }
}
