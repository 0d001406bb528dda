//! The reader's side of a transfer between nodes: calls of the service in `transfer.rs`, on the node that has the source.

use std::error::Error as _;
use std::sync::Arc;
use std::time::{Duration, Instant};

use roaring::RoaringBitmap;
use tokio::runtime::Handle;
use tonic::{Code, Status, Streaming};

use super::transfer::{MAX_MESSAGE, decode_blocks, encode_blocks};
use crate::driver::{Blocks, Opened, Remote, RemoteFault};
use base::{BlockSize, ByteRange, DataDirKey, Stop};
use cbt::SegmentIndex;
use proto::answers::Checked;
use proto::transfer::transfer_client::TransferClient;
use proto::transfer::{BlocksRequest, CloseRequest, MapRequest, OpenRequest, ReadResponse};
use serve::mutual::Mutual;

/// Bytes that a connection takes in before they are written.
const WINDOW: u32 = 4 << 20;
/// How long a node may take to answer a connection, and to give a sign of life on it.
const PATIENCE: Duration = Duration::from_secs(10);
/// How often it is looked whether a call is still wanted.
const POLL_INTERVAL: Duration = Duration::from_millis(100);
/// How long a node may take for an answer on a connection that lives, and how many bytes a second it may need in addition to hash.
/// Tests have less time.
const SILENCE: Duration = if cfg!(test) { Duration::from_millis(500) } else { Duration::from_secs(60) };
const HASHED: u64 = 8 << 20;

/// A source on another node, as its driver gives it out.
pub(super) struct Puller {
    runtime: Handle,
    client: TransferClient<Checked>,
    node: String,
    ticket: Vec<u8>,
    source: String,
    point: String,
    block_size: BlockSize,
    answer: Option<Streaming<ReadResponse>>,
}

impl Puller {
    /// The way to a source. To be made in a runtime; used from threads outside of it.
    pub(super) fn new(
        tls: &Arc<Mutual>,
        address: &str,
        key: DataDirKey,
        ticket: Vec<u8>,
        source: String,
    ) -> Self {
        let channel = tls.channel(address, &key.to_string(), PATIENCE, WINDOW);
        Puller {
            runtime: Handle::current(),
            client: TransferClient::new(channel).max_decoding_message_size(MAX_MESSAGE),
            node: format!("the node {key} at {address}"),
            ticket,
            source,
            point: String::new(),
            block_size: BlockSize::MIN,
            answer: None,
        }
    }

    /// Waits for an answer, for as long as it is wanted.
    fn wait<T>(&self, stop: &Stop, call: impl Future<Output = Result<T, Status>>) -> Result<T, RemoteFault> {
        self.wait_for(SILENCE, stop, call)
    }

    /// The same with more patience. The connection's pings tell a node that is dead, and not one that only hangs.
    fn wait_for<T>(
        &self,
        patience: Duration,
        stop: &Stop,
        call: impl Future<Output = Result<T, Status>>,
    ) -> Result<T, RemoteFault> {
        let begun = Instant::now();
        self.runtime.block_on(async {
            let mut call = std::pin::pin!(call);
            loop {
                if let Ok(answered) = tokio::time::timeout(POLL_INTERVAL, &mut call).await {
                    return answered.map_err(|status| self.fault(&status));
                }
                if stop.check().is_err() {
                    return Err(RemoteFault::Stopped);
                }
                if begun.elapsed() >= patience {
                    let why = format!("{} has not answered for {} s", self.node, patience.as_secs_f64());
                    return Err(RemoteFault::Unavailable(why));
                }
            }
        })
    }

    fn fault(&self, status: &Status) -> RemoteFault {
        let said = || format!("{} says: {}", self.node, status.message());
        // A status that has a source was made by the transport, and not by the node.
        if let Some(broken) = status.source() {
            return RemoteFault::Unavailable(format!(
                "{} does not answer: {}",
                self.node,
                base::report(broken)
            ));
        }
        match status.code() {
            Code::NotFound => RemoteFault::Gone(format!("{} on {}", self.source, self.node)),
            Code::DataLoss | Code::Internal => RemoteFault::Damaged(said()),
            Code::FailedPrecondition | Code::InvalidArgument | Code::OutOfRange | Code::Unimplemented => {
                RemoteFault::Refused(said())
            }
            _ => RemoteFault::Unavailable(said()),
        }
    }

    fn request(&self, index: SegmentIndex, blocks: &RoaringBitmap) -> BlocksRequest {
        let (point, blocks) = (self.point.clone(), encode_blocks(blocks));
        BlocksRequest { point, segment: index.0, blocks, without_holes: true }
    }
}

impl Remote for Puller {
    fn open(&mut self, volume_id: &str, stop: &Stop) -> Result<Opened, RemoteFault> {
        let request = OpenRequest {
            ticket: self.ticket.clone(),
            source_id: self.source.clone(),
            volume_id: volume_id.to_owned(),
        };
        let mut client = self.client.clone();
        let opened = self.wait(stop, client.open(request))?.into_inner();
        let block_size = BlockSize::try_from(u64::from(opened.block_size));
        let block_size =
            block_size.map_err(|error| RemoteFault::Refused(format!("{} says: {error}", self.node)))?;
        if opened.allocated_blocks > block_size.blocks_in(opened.capacity) {
            return Err(RemoteFault::Refused(format!(
                "{} says that {} blocks of {} bytes hold data",
                self.node, opened.allocated_blocks, opened.capacity
            )));
        }
        (self.point, self.block_size, self.answer) = (opened.point, block_size, None);
        Ok(Opened {
            capacity: opened.capacity,
            block_size,
            tracking: opened.tracking,
            segments: opened.segments.into_iter().map(SegmentIndex).collect(),
            allocated_blocks: opened.allocated_blocks,
            relatives: opened.relatives,
            filesystem: Some((opened.filesystem, opened.most_bytes))
                .filter(|(fs_type, _)| !fs_type.is_empty()),
        })
    }

    fn map(&mut self, index: SegmentIndex, stop: &Stop) -> Result<RoaringBitmap, RemoteFault> {
        let request = MapRequest { point: self.point.clone(), segment: index.0 };
        let mut client = self.client.clone();
        let map = self.wait(stop, client.map(request))?.into_inner();
        decode_blocks(&map.blocks).map_err(|status| self.fault(&status))
    }

    fn hashes(
        &mut self,
        index: SegmentIndex,
        blocks: &RoaringBitmap,
        stop: &Stop,
    ) -> Result<Vec<u8>, RemoteFault> {
        let request = self.request(index, blocks);
        let mut client = self.client.clone();
        let patience = SILENCE + Duration::from_secs(blocks.len() * self.block_size.bytes() / HASHED);
        Ok(self.wait_for(patience, stop, client.hashes(request))?.into_inner().hashes)
    }

    fn read(&mut self, index: SegmentIndex, blocks: &RoaringBitmap, stop: &Stop) -> Result<(), RemoteFault> {
        let request = self.request(index, blocks);
        let mut client = self.client.clone();
        self.answer = Some(self.wait(stop, client.read(request))?.into_inner());
        Ok(())
    }

    fn next(&mut self, stop: &Stop) -> Result<Option<Blocks>, RemoteFault> {
        let Some(mut answer) = self.answer.take() else { return Ok(None) };
        let message = self.wait(stop, answer.message())?;
        Ok(message.map(|ReadResponse { data, hashes, holes }| {
            self.answer = Some(answer);
            let (holes, _) = holes.as_chunks();
            // What is too long is past the end of the blocks, which is refused where it is used.
            let hole =
                |[start, length]: &[u64; 2]| ByteRange { start: *start, end: start.saturating_add(*length) };
            Blocks { data, hashes, holes: holes.iter().map(hole).collect() }
        }))
    }

    fn close(&mut self) {
        let request = CloseRequest { point: std::mem::take(&mut self.point) };
        let mut client = self.client.clone();
        // If that fails, it is closed after a while without reads.
        let closed = self.wait(&Stop::at(Some(Instant::now() + PATIENCE)), client.close(request));
        if let Err(fault) = closed {
            tracing::debug!(?fault, node = self.node, "a source could not be closed");
        }
    }

    fn node(&self) -> &str {
        &self.node
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::pin::Pin;

    use futures_util::Stream;
    use proto::transfer::transfer_server::{Transfer, TransferServer};
    use proto::transfer::{CloseResponse, HashesResponse, MapResponse, OpenResponse};
    use tokio_stream::wrappers::TcpListenerStream;
    use tonic::{Request, Response, async_trait};

    /// A node that takes every call, and answers none but an Open for `much`: with more blocks than there are.
    struct Silent;

    #[async_trait]
    impl Transfer for Silent {
        type ReadStream = Pin<Box<dyn Stream<Item = Result<ReadResponse, Status>> + Send>>;

        async fn open(&self, request: Request<OpenRequest>) -> Result<Response<OpenResponse>, Status> {
            if request.get_ref().source_id != "much" {
                std::future::pending::<()>().await;
            }
            let (capacity, block_size, allocated_blocks) = (1 << 20, 4096, u64::MAX);
            Ok(Response::new(OpenResponse { capacity, block_size, allocated_blocks, ..Default::default() }))
        }

        async fn map(&self, _: Request<MapRequest>) -> Result<Response<MapResponse>, Status> {
            std::future::pending().await
        }

        async fn hashes(&self, _: Request<BlocksRequest>) -> Result<Response<HashesResponse>, Status> {
            std::future::pending().await
        }

        async fn read(&self, _: Request<BlocksRequest>) -> Result<Response<Self::ReadStream>, Status> {
            Ok(Response::new(Box::pin(futures_util::stream::pending())))
        }

        async fn close(&self, _: Request<CloseRequest>) -> Result<Response<CloseResponse>, Status> {
            std::future::pending().await
        }
    }

    /// What a call of a node like that comes to; none if it does not end.
    fn asked<T: Send + 'static>(
        source: &str,
        call: impl FnOnce(&mut Puller) -> T + Send + 'static,
    ) -> Option<T> {
        let runtime = tokio::runtime::Runtime::new().expect("a runtime");
        let _in_runtime = runtime.enter();
        let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("listen");
        listener.set_nonblocking(true).expect("a socket");
        let address = listener.local_addr().expect("an address");
        let listener = tokio::net::TcpListener::from_std(listener).expect("a socket");
        let server = tonic::transport::Server::builder().add_service(TransferServer::new(Silent));
        runtime.spawn(server.serve_with_incoming(TcpListenerStream::new(listener)));
        let channel = tonic::transport::Endpoint::from_shared(format!("http://{address}"));
        let mut puller = Puller {
            runtime: runtime.handle().clone(),
            client: TransferClient::new(Checked(channel.expect("a URI").connect_lazy())),
            node: "the node".to_owned(),
            ticket: Vec::new(),
            source: source.to_owned(),
            point: String::new(),
            block_size: BlockSize::MIN,
            answer: None,
        };
        let (tell, told) = std::sync::mpsc::channel();
        std::thread::spawn(move || tell.send(call(&mut puller)));
        let told = told.recv_timeout(Duration::from_secs(20)).ok();
        runtime.shutdown_background();
        told
    }

    #[test]
    fn a_node_that_lives_and_says_nothing_is_given_up() {
        let calls: [fn(&mut Puller) -> Option<RemoteFault>; 4] = [
            |way| way.open("vol", &Stop::default()).err(),
            |way| way.map(SegmentIndex(0), &Stop::default()).err(),
            |way| way.hashes(SegmentIndex(0), &RoaringBitmap::from_iter([0]), &Stop::default()).err(),
            |way| {
                way.read(SegmentIndex(0), &RoaringBitmap::from_iter([0]), &Stop::default())
                    .expect("a stream");
                way.next(&Stop::default()).err()
            },
        ];
        for (number, call) in calls.into_iter().enumerate() {
            match asked("silent", call) {
                Some(Some(RemoteFault::Unavailable(why))) => assert!(why.contains("the node"), "{why}"),
                other => panic!("call {number}: {other:?}"),
            }
        }
    }

    #[test]
    fn a_source_has_no_more_blocks_than_bytes() {
        let opened = asked("much", |way| way.open("vol", &Stop::default()));
        assert!(matches!(opened, Some(Err(RemoteFault::Refused(_)))), "{opened:?}");
    }
}
