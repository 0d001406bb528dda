//! The gateway's part of `make bench`: what it costs beside a bare stream and beside the community's sidecar, in one run, with
//! the same driver and the same API server. Needs root, Go for the API server and the sidecar, and 2 free cores.
//!
//! `cargo bench -p deltapath-gateway -- a d` runs the rows that are named; without names all.
#![allow(clippy::disallowed_methods)]

use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::sync::Arc;
use std::time::{Duration, Instant};

use futures_util::{Stream, StreamExt, stream};
use k8s_openapi::api::core::v1::Secret;
use kube::Api;
use kube::api::ListParams;
use proto::kubernetes::snapshot_metadata_server::{SnapshotMetadata, SnapshotMetadataServer};
use proto::kubernetes::{
    BlockMetadata, GetMetadataAllocatedRequest, GetMetadataAllocatedResponse, GetMetadataDeltaRequest,
    GetMetadataDeltaResponse,
};
use testkit::api_server::ApiServer;
use testkit::bench::{HEADS, Process, median, ms, row, ticks};
use testkit::free_port;
use testkit::gateway::driver::Driver;
use testkit::gateway::world::{AUDIENCE, Client, Files, Gateway, HOST, Sidecar, World, about};
use tonic::transport::{Identity, Server, ServerTlsConfig};
use tonic::{Request, Response, Status, async_trait};

/// Messages of the long stream, and tuples in each.
const MESSAGES: u64 = 4096;
const TUPLES: u64 = 4096;
/// How the bench starts itself as a bare server.
const BARE: &str = "--serve-bare";
/// And as a driver.
const DRIVER: &str = "--serve-driver";

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().expect("a runtime");
    match arguments.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        [BARE, port, dir] => {
            return runtime.block_on(serve_bare(port.parse().expect("a port"), Path::new(dir)));
        }
        [DRIVER, name, socket] => {
            let _driver = Driver::start(name, Path::new(socket));
            return runtime.block_on(std::future::pending());
        }
        _ => {}
    }
    let wanted: Vec<_> = arguments.into_iter().filter(|argument| !argument.starts_with('-')).collect();
    let wants = |row: &str| wanted.is_empty() || wanted.iter().any(|wanted| wanted == row);
    runtime.block_on(async {
        let api = Arc::new(ApiServer::start().await);
        println!("{HEADS}");
        if wants("a") || wants("b") || wants("c") || wants("d") {
            let bench = Bench::new(&api).await;
            let mut extra = Duration::ZERO;
            if wants("a") {
                bench.long_stream().await;
            }
            if wants("b") || wants("d") {
                extra = bench.first_message().await;
            }
            if wants("c") {
                bench.many_at_once().await;
            }
            if wants("d") {
                bench.stalled(extra).await;
            }
        }
        if wants("e") {
            many_snapshots(&api).await;
        }
    });
}

struct Bench {
    world: World,
    gateway: Gateway,
    token: String,
    files: Files,
    sidecar: Option<Sidecar>,
    _driver: Process,
}

impl Bench {
    async fn new(api: &Arc<ApiServer>) -> Self {
        let world = World::new(api.clone(), "rows_a_to_d_of_the_bench").await;
        let driver = Process::of_this(&[DRIVER, &world.driver, &world.socket().display().to_string()]);
        let ns = world.namespace.clone();
        world.default_class().await;
        for (name, handle) in [("long", "long-1"), ("short", "plain-1"), ("endless", "endless-1")] {
            world.snapshot(&ns, name, handle).await;
        }
        let token = world.reader("reader").await;
        let gateway = world.gateway(&[]).await;
        let files = Files::make(&other_dir(&world));
        world.service("sidecar.test:1", AUDIENCE, "YQ==").await;
        let program = Path::new(testkit::HOME).join(".deps/backup/csi-snapshot-metadata");
        let sidecar = match program.exists() {
            true => Some(Sidecar::start(&program, &world, &world.socket(), &files).await),
            false => {
                eprintln!("no {}: `make test-deps` builds it", program.display());
                None
            }
        };
        Bench { world, gateway, token, files, sidecar, _driver: driver }
    }

    async fn driver(&self) -> csi_client::Client {
        let connected = csi_client::Client::connect(&self.world.socket(), Duration::from_secs(10)).await;
        connected.expect("connect")
    }

    /// A client of the community's sidecar, if it is there.
    async fn sidecar(&self) -> Option<Client> {
        let port = self.sidecar.as_ref()?.port;
        Some(Client::connect(port, HOST, &self.files.ca).await.expect("connect"))
    }

    async fn long_stream(&self) {
        let port = free_port();
        let dir = self.files.chain.parent().expect("a directory").display().to_string();
        let _bare = Process::of_this(&[BARE, &port.to_string(), &dir]);
        let mut bare = loop {
            match Client::connect(port, HOST, &self.files.ca).await {
                Ok(client) => break client,
                Err(_) => tokio::time::sleep(Duration::from_millis(50)).await,
            }
        };
        let mut through = self.gateway.client().await;
        let mut sidecar = self.sidecar().await;
        let (mut bares, mut ours, mut theirs) = (Vec::new(), Vec::new(), Vec::new());
        // In turn, so that a slow moment of the machine meets all of them.
        for _ in 0..5 {
            bares.push(self.read_long(&mut bare).await);
            ours.push(self.read_long(&mut through).await);
            if let Some(sidecar) = &mut sidecar {
                theirs.push(self.read_long(sidecar).await);
            }
        }
        let rate = |times: &[Duration]| (MESSAGES * TUPLES) as f64 / median(times).as_secs_f64() / 1e6;
        let (bare, ours) = (rate(&bares), rate(&ours));
        let theirs = if theirs.is_empty() { f64::NAN } else { rate(&theirs) };
        row(
            "a",
            "a stream of 16,777,216 tuples over TLS",
            &format!("{ours:.1} M tuples/s"),
            &format!(
                "{:.0} % of a bare tonic TLS stream, {bare:.1} M/s; {:.1} x the community's sidecar, {theirs:.1} M/s",
                ours / bare * 100.0,
                ours / theirs
            ),
            "80 %; 4 x",
            ours >= 0.8 * bare && ours >= 4.0 * theirs,
        );
    }

    async fn read_long(&self, client: &mut Client) -> Duration {
        let begun = Instant::now();
        let request = about(&self.token, &self.world.namespace, "long");
        let mut stream = client.0.get_metadata_allocated(request).await.expect("a stream").into_inner();
        let mut tuples = 0;
        while let Some(message) = stream.message().await.expect("a message") {
            tuples += message.block_metadata.len() as u64;
        }
        assert_eq!(tuples, MESSAGES * TUPLES);
        begun.elapsed()
    }

    async fn first_message(&self) -> Duration {
        let mut own = self.driver().await;
        let mut through = self.gateway.client().await;
        let (mut owns, mut ours, mut theirs) = (Vec::new(), Vec::new(), Vec::new());
        let mut sidecar = self.sidecar().await;
        for round in 0..201 {
            owns.push(first_of_driver(&mut own).await);
            ours.push(self.first(&mut through).await);
            // It is given the time between its calls that its limit of five a second wants.
            if round % 10 == 0
                && let Some(sidecar) = &mut sidecar
            {
                tokio::time::sleep(Duration::from_millis(1500)).await;
                theirs.push(self.first(sidecar).await);
            }
        }
        let extra = median(&ours).saturating_sub(median(&owns));
        let theirs = if theirs.is_empty() { Duration::ZERO } else { median(&theirs) };
        row(
            "b",
            "time to the first message above the driver's own, warm",
            &ms(extra),
            &format!(
                "the driver's own {}; the community's sidecar {} above it",
                ms(median(&owns)),
                ms(theirs.saturating_sub(median(&owns)))
            ),
            "2 ms",
            extra <= Duration::from_millis(2),
        );
        extra
    }

    /// Those of twenty new users.
    async fn tokens(&self, name: &str) -> Vec<String> {
        let mut tokens = Vec::new();
        for number in 0..20 {
            tokens.push(self.world.reader(&format!("{name}-{number}")).await);
        }
        // The API server's own authorizer knows the new roles by then.
        tokio::time::sleep(Duration::from_secs(2)).await;
        tokens
    }

    async fn first(&self, client: &mut Client) -> Duration {
        first(client, &self.token, &self.world.namespace, "short").await
    }

    async fn many_at_once(&self) {
        let ns = &self.world.namespace;
        let tokens = self.tokens("reader").await;
        let run = async |client: Client, limit: Duration| {
            let begun = Instant::now();
            let calls = (0..200).map(|number| {
                let (mut client, token, ns) = (client.clone(), tokens[number % 20].clone(), ns.clone());
                tokio::spawn(tokio::time::timeout(limit, async move {
                    client.allocated(&token, &ns, "short").await
                }))
            });
            let mut served = 0;
            for call in calls.collect::<Vec<_>>() {
                served += usize::from(matches!(call.await.expect("a call"), Ok(Ok(_))));
            }
            (served, begun.elapsed())
        };
        let (served, took) = run(self.gateway.client().await, Duration::from_secs(60)).await;
        let beside = match self.sidecar().await {
            None => "no sidecar here".to_owned(),
            Some(client) => {
                let (served, took) = run(client, Duration::from_secs(60)).await;
                format!("the community's sidecar: {served} served in {:.1} s", took.as_secs_f64())
            }
        };
        row(
            "c",
            "200 calls at once by 20 users, cold",
            &format!("{served} served in {}", ms(took)),
            &beside,
            "200",
            served == 200,
        );
    }

    /// Waits until the gateway passes nothing on, and returns the most memory that it had meanwhile.
    async fn until_quiet(&self) -> u64 {
        let (mut peak, mut before) = (0, 0);
        loop {
            for _ in 0..10 {
                peak = peak.max(self.gateway.memory());
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
            let now = ticks(self.gateway.running.pid());
            // Two hundredths of a second in one: its timers alone.
            if now.saturating_sub(before) <= 2 {
                return peak;
            }
            before = now;
        }
    }

    async fn stalled(&self, extra: Duration) {
        const CLIENTS: usize = 1000;
        let ns = &self.world.namespace;
        let tokens = self.tokens("stalled").await;
        let mut other = self.gateway.client().await;
        self.first(&mut other).await;
        let before = self.gateway.memory();
        let mut held = Vec::new();
        for number in 0..CLIENTS {
            let mut client = self.gateway.client().await;
            let request = about(&tokens[number % 20], ns, "endless");
            let mut stream = client.0.get_metadata_allocated(request).await.expect("a stream").into_inner();
            stream.message().await.expect("a message");
            held.push((client, stream));
        }
        // Their own windows, of megabytes, fill up first.
        let peak = self.until_quiet().await;
        let grown = self.gateway.memory().saturating_sub(before);
        let mut own = self.driver().await;
        let (mut owns, mut ours) = (Vec::new(), Vec::new());
        for _ in 0..51 {
            owns.push(first_of_driver(&mut own).await);
            ours.push(self.first(&mut other).await);
        }
        let delayed = median(&ours).saturating_sub(median(&owns));
        row(
            "d",
            "1,000 clients that stop reading",
            &format!(
                "memory grows by {} MiB, {} MiB while their windows fill; another's first message {} above the driver's own",
                grown >> 20,
                peak.saturating_sub(before) >> 20,
                ms(delayed)
            ),
            &format!("without them {}", ms(extra)),
            "128 MiB; 5 x",
            grown <= 128 << 20 && delayed <= extra * 5,
        );
    }
}

/// The time to the driver's own first message, without a gateway.
async fn first_of_driver(driver: &mut csi_client::Client) -> Duration {
    let begun = Instant::now();
    let request = proto::GetMetadataAllocatedRequest { snapshot_id: "plain-1".into(), ..Default::default() };
    let mut stream = driver.metadata.get_metadata_allocated(request).await.expect("a stream").into_inner();
    stream.message().await.expect("a message").expect("one");
    begun.elapsed()
}

async fn first(client: &mut Client, token: &str, namespace: &str, snapshot: &str) -> Duration {
    let begun = Instant::now();
    let request = about(token, namespace, snapshot);
    let mut stream = client.0.get_metadata_allocated(request).await.expect("a stream").into_inner();
    stream.message().await.expect("a message").expect("one");
    let took = begun.elapsed();
    while stream.message().await.expect("a message").is_some() {}
    took
}

fn other_dir(world: &World) -> PathBuf {
    let dir = world.dir.path().join("other");
    std::fs::create_dir_all(&dir).expect("mkdir");
    dir
}

async fn many_snapshots(api: &Arc<ApiServer>) {
    const SNAPSHOTS: usize = 10_000;
    let world = Arc::new(World::new(api.clone(), "row_e_of_the_bench").await);
    let _driver = Driver::start(&world.driver, &world.socket());
    let makers: Vec<_> = (0..16)
        .map(|maker| {
            let world = world.clone();
            tokio::spawn(async move {
                for number in (maker..SNAPSHOTS).step_by(16) {
                    let name = format!("snapshot-{number:05}");
                    world.snapshot(&world.namespace, &name, &format!("plain-{number}")).await;
                }
            })
        })
        .collect();
    for maker in makers {
        maker.await.expect("made");
    }
    // The API's own time: both lists, in pages as clients take them.
    let begun = Instant::now();
    for kind in ["VolumeSnapshot", "VolumeSnapshotContent"] {
        let objects = world.api.objects(kind, None);
        let mut parameters = ListParams::default().limit(500);
        loop {
            let page = objects.list(&parameters).await.expect("a page");
            match page.metadata.continue_.filter(|token| !token.is_empty()) {
                Some(token) => parameters = parameters.continue_token(&token),
                None => break,
            }
        }
    }
    let listed = begun.elapsed();
    // Its rights are made before the clock runs.
    let files = Files::make(world.dir.path());
    let config = world.gateway_kubeconfig("gateway").await;
    let secrets: Api<Secret> = Api::all(world.api.client.clone());
    secrets.list(&ListParams::default()).await.expect("warm");
    let begun = Instant::now();
    let gateway = Gateway::start(&world, &config, "gateway", &["--audience", AUDIENCE], Some(files));
    gateway.ready().await;
    let ready = begun.elapsed();
    tokio::time::sleep(Duration::from_secs(2)).await;
    let memory = gateway.memory();
    row(
        "e",
        "start to ready with 10,000 VolumeSnapshots",
        &format!("{}, then {} MiB", ms(ready), memory >> 20),
        &format!("listing them and their contents, {}", ms(listed)),
        "3 s more; 100 MiB",
        ready <= listed + Duration::from_secs(3) && memory <= 100 << 20,
    );
}

struct Bare;

type Messages<M> = Pin<Box<dyn Stream<Item = Result<M, Status>> + Send>>;

#[async_trait]
impl SnapshotMetadata for Bare {
    type GetMetadataAllocatedStream = Messages<GetMetadataAllocatedResponse>;
    type GetMetadataDeltaStream = Messages<GetMetadataDeltaResponse>;

    async fn get_metadata_allocated(
        &self,
        _: Request<GetMetadataAllocatedRequest>,
    ) -> Result<Response<Self::GetMetadataAllocatedStream>, Status> {
        let message = |number: u64| GetMetadataAllocatedResponse {
            block_metadata_type: 2,
            volume_capacity_bytes: 1 << 40,
            block_metadata: (number * TUPLES..(number + 1) * TUPLES)
                .map(|at| BlockMetadata { byte_offset: at as i64 * 8192, size_bytes: 4096 })
                .collect(),
        };
        Ok(Response::new(stream::iter((0..MESSAGES).map(message)).map(Ok).boxed()))
    }

    async fn get_metadata_delta(
        &self,
        _: Request<GetMetadataDeltaRequest>,
    ) -> Result<Response<Self::GetMetadataDeltaStream>, Status> {
        Err(Status::unimplemented("not in this bench"))
    }
}

/// A server of nothing but the messages, with tonic's own TLS.
async fn serve_bare(port: u16, dir: &Path) {
    let read = |name: &str| std::fs::read(dir.join(name)).expect(name);
    let identity = Identity::from_pem(read("tls.crt"), read("tls.key"));
    Server::builder()
        .tls_config(ServerTlsConfig::new().identity(identity))
        .expect("tls")
        .add_service(SnapshotMetadataServer::new(Bare))
        .serve(([127, 0, 0, 1], port).into())
        .await
        .expect("serve");
}
