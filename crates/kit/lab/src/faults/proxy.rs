//! One call: read, met by faults, passed on, and its answer passed back. What a stream's answer becomes is in `play.rs`.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http_body_util::{BodyExt, Full, Limited};
use hyper::body::Incoming;
use proto::*;
use serve::relay::{self, deadline, frame, unframe};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tonic::body::Body;
use tonic::codegen::http::request::Parts;
use tonic::codegen::http::{HeaderMap, HeaderValue, Request, Response, header};
use tonic::{Code, Status};

use super::active::{Active, is_about};
use super::caller::Caller;
use super::catalog::Kind;
use super::change::{About, Message};
use super::play::{Guarded, Play, answer, replaced};
use super::request::{Asked, Stream, changed, lacks_secret};
use super::seen::Seen;
use super::spec::{Spec, parse_some};
use super::upstream::{Reader, Upstream};

/// Metadata of a request: the faults that it alone meets.
pub(super) const REQUEST_MARKER: &str = "cbt-lab-fault";
/// Parameter of CreateSnapshot, so of a VolumeSnapshotClass: the faults of calls about that snapshot.
pub(super) const SNAPSHOT_MARKER: &str = "cbt-lab.fault";
/// Callers of a gateway that are remembered.
const LET_IN: usize = 16;
/// The largest request.
const REQUEST: usize = 16 << 20;
/// Calls that change nothing.
const READS: [&str; 6] = ["Get", "List", "Probe", "Validate", "ControllerGet", "GroupControllerGet"];

pub(crate) struct Proxy {
    pub(super) upstream: Upstream,
    pub(super) active: Active,
    pub(super) seen: Seen,
    pub(super) seed: u64,
}

/// A call on its way.
struct Call {
    head: Parts,
    path: String,
    body: Bytes,
    asked: Asked,
    met: Vec<Arc<Spec>>,
    connection: CancellationToken,
    deadline: Option<Instant>,
}

impl Proxy {
    pub(super) fn new(upstream: Upstream, active: Active, seed: u64) -> Arc<Self> {
        Arc::new(Proxy { upstream, active, seen: Seen::default(), seed })
    }

    /// Answers a request that came on `connection`.
    pub async fn handle(
        self: Arc<Self>,
        request: Request<Incoming>,
        connection: CancellationToken,
    ) -> Response<Body> {
        let (head, body) = request.into_parts();
        let path = head.uri.path().to_owned();
        let answered = match path.starts_with("/csi.v1.") || path.starts_with("/snapshotmetadata.") {
            true => match Limited::new(body, REQUEST).collect().await {
                Ok(body) => self.answer(head, path, body.to_bytes(), connection).await,
                Err(error) => Err(Status::invalid_argument(format!("read the request: {error}"))),
            },
            // Health checks, reflection: not ours to know.
            false => self.upstream.call(Request::from_parts(head, Body::new(body))).await,
        };
        answered.unwrap_or_else(Status::into_http)
    }

    async fn answer(
        self: Arc<Self>,
        mut head: Parts,
        path: String,
        mut body: Bytes,
        connection: CancellationToken,
    ) -> Result<Response<Body>, Status> {
        // Answers must come uncompressed to be read.
        head.headers.remove("grpc-accept-encoding");
        let own = marked(head.headers.remove(REQUEST_MARKER))?;
        let Ok(asked) = Asked::read(&path, &body) else {
            // The driver says what is wrong with it.
            return self.upstream.call(request(head, body)).await;
        };
        let mut of_snapshot = Vec::new();
        if asked.call == "CreateSnapshot" {
            of_snapshot = take_marker(&mut body)?;
        }
        let mut met = self.active.meets(&asked);
        met.extend(
            own.into_iter()
                .chain(of_snapshot.iter().cloned())
                .filter(|spec| is_about(spec, &asked))
                .map(Arc::new),
        );
        for spec in &met {
            serve::log::stderr().push(format!("cbt-lab: {} meets {spec}\n", asked.call).as_bytes());
        }
        let deadline = deadline(&head.headers);
        let mut call = Call { head, path, body, asked, met, connection, deadline };
        if let Some(answer) = self.before(&mut call).await? {
            return Ok(answer);
        }
        self.seen.facts().before(&call.asked.call, &call.body);
        match call.asked.stream.clone() {
            Some(stream) => self.stream(call, stream).await,
            None => self.unary(call, of_snapshot).await,
        }
    }

    /// What faults do before the call is passed on: refuse it, delay it, change it, or answer it.
    async fn before(&self, call: &mut Call) -> Result<Option<Response<Body>>, Status> {
        let met = call.met.clone();
        for spec in &met {
            self.meet(spec, call).await?;
            if spec.entry.kind == Kind::BaseGoneIsEmpty
                && let Some(stream) = &call.asked.stream
                && stream.base.as_ref().is_some_and(|base| self.seen.facts().deleted.contains(base))
            {
                return Ok(Some(self.empty(stream).await));
            }
        }
        Ok(None)
    }

    /// An answer without tuples in which nothing else is wrong: it has the type and the capacity that the driver tells of the
    /// target, or the capacity that was seen when it was made. For an unknown snapshot it has no message.
    async fn empty(&self, stream: &Stream) -> Response<Body> {
        let (path, body) = stream.allocated_of_target();
        let told = match self.upstream.ask(&path, body).await {
            Ok(mut reader) => reader.next().await,
            Err(refused) => Err(refused),
        };
        let told = told.ok().flatten().and_then(|message| unframe::<Message>(message).ok());
        let told = told.map(|message| Message { block_metadata: Vec::new(), ..message });
        let message = told.or_else(|| {
            let capacity = self.seen.facts().capacities.get(&stream.target).copied()?;
            Some(Message {
                block_metadata_type: BlockMetadataType::VariableLength.into(),
                volume_capacity_bytes: capacity,
                block_metadata: Vec::new(),
            })
        });
        answer(message.iter().map(frame))
    }

    async fn meet(&self, spec: &Spec, call: &mut Call) -> Result<(), Status> {
        let refused = |why: &str| Err(Status::new(spec.values.code, format!("{why} (cbt-lab: {spec})")));
        let of_node = call.path.starts_with("/csi.v1.Node/");
        let changes = !READS.iter().any(|read| call.asked.call.starts_with(read));
        match spec.entry.kind {
            Kind::Delay => tokio::time::sleep(Duration::from_millis(spec.values.ms)).await,
            Kind::Refuse | Kind::Burst => return refused("refused"),
            Kind::PutOff
                if changes
                    && !call.path.contains("NodeGet")
                    && self.seen.facts().count(format!("put off {}", call.asked.call)) == 0 =>
            {
                return refused("busy");
            }
            // Before the call is passed on, so that a call which the driver would refuse hangs too.
            Kind::Stall if spec.values.after == 0 || call.asked.stream.is_none() => {
                std::future::pending().await
            }
            Kind::Reset if spec.values.after == 0 || call.asked.stream.is_none() => {
                call.connection.cancel();
                std::future::pending::<()>().await;
            }
            Kind::WantsSecrets if lacks_secret(&call.path, &call.body, &spec.values.value)? => {
                return Err(Status::unauthenticated(format!("a secret is missing (cbt-lab: {spec})")));
            }
            Kind::NoService if call.asked.stream.is_some() => {
                return Err(Status::unimplemented(format!("no such service (cbt-lab: {spec})")));
            }
            Kind::NodeElsewhere if of_node => {
                return Err(Status::unimplemented(format!("a controller plugin (cbt-lab: {spec})")));
            }
            Kind::DeadlineIsOk => {
                call.head.headers.remove("grpc-timeout");
            }
            _ => {}
        }
        let Some(mut stream) = call.asked.stream.clone() else { return Ok(()) };
        let (offset, bound) = (stream.offset, stream.max_results);
        {
            let facts = self.seen.facts();
            let (base, volume) =
                (stream.base.as_deref().unwrap_or_default(), facts.volume_of(&stream.target));
            let why = match spec.entry.kind {
                Kind::SameIsRefused if !base.is_empty() && base == stream.target => {
                    "base and target are the same"
                }
                Kind::FilesystemIsError if facts.mounted.contains(volume) => "a Filesystem volume",
                Kind::SourceGone if facts.deleted.contains(volume) => "its volume is gone",
                Kind::RestoredInUse if !facts.in_use.is_empty() => "a volume restored from it is in use",
                Kind::BaseGone if facts.bases_gone.contains(base) => "the base is gone",
                Kind::BaseGoneIsError if facts.deleted.contains(base) => "the base is gone",
                Kind::ResumeGrownFails
                    if facts.grown.contains_key(volume)
                        && facts.capacity.get(volume).is_some_and(|capacity| offset > *capacity) =>
                {
                    "the offset is behind the end of the base"
                }
                _ => "",
            };
            if !why.is_empty() {
                return refused(why);
            }
        }
        match spec.entry.kind {
            Kind::IgnoreBound if bound > 0 => stream.max_results = 0,
            Kind::NegativeBoundIsNone | Kind::NegativeBoundCuts if bound < 0 => stream.max_results = 0,
            Kind::IgnoreOffset if offset > 0 => stream.offset = 0,
            // Far behind any volume it stays what it is.
            Kind::RoundOffsetUp if offset > 0 && offset < 1 << 60 => stream.offset = (offset + 4095) & !4095,
            _ => return Ok(()),
        }
        call.body = stream.body();
        Ok(())
    }

    async fn unary(&self, call: Call, of_snapshot: Vec<Spec>) -> Result<Response<Body>, Status> {
        let Call { head, path, body, asked, met, .. } = call;
        let answered = self.upstream.call(request(head, body.clone())).await?;
        let (headers, mut reader) = Reader::of(answered)?;
        let Some(mut message) = reader.next().await? else {
            return Err(Status::internal(format!("{path}: its answer is empty")));
        };
        if reader.next().await?.is_some() {
            return Err(Status::internal(format!("{path}: its answer has two messages")));
        }
        self.seen.facts().after(&asked.call, &body, &message);
        if let Some(id) = of_snapshot.first().and_then(|_| created(&message)) {
            self.remember(&id, of_snapshot);
        }
        for spec in &met {
            match spec.entry.kind {
                Kind::NotReady if asked.call == "CreateSnapshot" => {
                    let id = created(&message).unwrap_or_default();
                    if self.seen.facts().count(format!("not ready {id}")) < spec.values.times {
                        message = changed(&message, |answer: &mut CreateSnapshotResponse| {
                            answer.snapshot.iter_mut().for_each(|snapshot| snapshot.ready_to_use = false);
                        })?;
                    }
                }
                Kind::FailsAfterSuccess => {
                    let mut hasher = DefaultHasher::new();
                    body.hash(&mut hasher);
                    let what = format!("failed {} {}", asked.call, hasher.finish());
                    if self.seen.facts().count(what) < spec.values.times {
                        return Err(Status::new(
                            spec.values.code,
                            format!("it is done, and this is an error (cbt-lab: {spec})"),
                        ));
                    }
                }
                kind => message = unclaimed(kind, &asked.call, message)?,
            }
        }
        Ok(with_head(answer([message]), headers))
    }

    /// The faults that a snapshot was made with are on for calls about it.
    fn remember(&self, id: &str, specs: Vec<Spec>) {
        let is_new = self.seen.facts().marked.insert(id.to_owned());
        if is_new {
            let about = |mut spec: Spec| {
                spec.limits.snapshot = Some(id.to_owned());
                spec
            };
            self.active.add(specs.into_iter().map(about).collect());
        }
    }

    async fn stream(self: Arc<Self>, call: Call, stream: Stream) -> Result<Response<Body>, Status> {
        let Call { head, body, met, connection, deadline, .. } = call;
        let mut abouts = Vec::new();
        for spec in &met {
            abouts.push(self.about(spec, &stream).await?);
        }
        // Counted after that, so that a stream does not count itself.
        let open = self.seen.open();
        let mut answered = self.upstream.call(request(head.clone(), body)).await?;
        if let Some(again) = self.stand_in(&stream, &answered, &met) {
            answered = self.upstream.call(request(head, again.body())).await?;
        }
        if met.is_empty() {
            let (head, body) = answered.into_parts();
            return Ok(Response::from_parts(head, Body::new(Guarded::new(body, open))));
        }
        let (headers, reader) = match Reader::of(answered) {
            Ok(read) => read,
            Err(status) => {
                let status = replaced(status, &met);
                return match status.code() {
                    Code::Ok => Ok(self.empty(&stream).await),
                    _ => Err(status),
                };
            }
        };
        let faults = met.into_iter().zip(abouts).collect();
        let play = Play::new(reader, stream, faults, open, connection, deadline);
        Ok(with_head(Response::new(play.body()), headers))
    }

    /// Notes whom a gateway lets in. Where it has refused and a fault takes the caller for one whom it let in before, the
    /// request of that one.
    fn stand_in(&self, stream: &Stream, answered: &Response<Body>, met: &[Arc<Spec>]) -> Option<Stream> {
        let caller = stream.caller.clone()?;
        let mut facts = self.seen.facts();
        let refused = relay::status(answered.headers()).map(|status| status.code());
        let Some(code) = refused.filter(|code| *code != Code::Ok) else {
            facts.let_in.retain(|let_in| *let_in != caller);
            facts.let_in.push(caller);
            if facts.let_in.len() > LET_IN {
                facts.let_in.remove(0);
            }
            return None;
        };
        let stands_in =
            |let_in: &&Caller| met.iter().any(|spec| let_in.stands_in_for(&caller, code, spec.entry.kind));
        let caller = facts.let_in.iter().rev().find(stands_in).cloned()?;
        Some(Stream { caller: Some(caller), ..stream.clone() })
    }

    /// What a fault has to know of a stream.
    async fn about(&self, spec: &Spec, stream: &Stream) -> Result<About, Status> {
        let mut about = About { offset: stream.offset, seed: self.seed, ..About::default() };
        if spec.entry.kind == Kind::LoseDiscarded {
            let (path, body) = stream.allocated_of_target();
            let mut reader = self.upstream.ask(&path, body).await?;
            while let Some(message) = reader.next().await? {
                let message: Message = unframe(message)?;
                about
                    .held
                    .extend(message.block_metadata.iter().map(|tuple| (tuple.byte_offset, tuple.size_bytes)));
            }
        }
        let mut facts = self.seen.facts();
        let volume = facts.volume_of(&stream.target).to_owned();
        let (grown, was) = (facts.grown.get(&volume).copied(), facts.capacity.get(&volume).copied());
        about.applies = match spec.entry.kind {
            Kind::LoseAgain => stream.offset == 0 && facts.count(format!("asked {}", stream.is())) > 0,
            Kind::LoseAfterDelete => facts.counts.deletions > 0,
            Kind::LoseAfterRestore => !facts.restored.is_empty(),
            Kind::LoseRestored => facts.restored.contains(&volume),
            Kind::LoseAfterClone => facts.counts.clones > 0,
            Kind::LoseAfterModify => facts.counts.modifications > 0,
            Kind::LoseAfterExpand => grown.is_some(),
            Kind::LoseMembers => facts.members.contains(&stream.target),
            Kind::LoseAfterCancel => facts.cancelled,
            Kind::LoseBeside => facts.open > 0,
            Kind::NegativeBoundCuts => stream.max_results < 0,
            Kind::FilesystemIsEmpty => facts.mounted.contains(&volume),
            Kind::BaseGoneLosesLater => {
                let base = stream.base.as_deref().unwrap_or_default();
                facts.deleted.contains(base) && facts.count(format!("answered {}", stream.is())) > 0
            }
            _ => false,
        };
        match spec.entry.kind {
            Kind::OldSnapshotsGrow => about.capacity = grown,
            Kind::GrownStaysSmall => about.capacity = grown.and(was),
            Kind::LoseGrown => about.old_end = grown.and(was),
            _ => {}
        }
        Ok(about)
    }
}

/// The faults in a request's own marker.
fn marked(marker: Option<HeaderValue>) -> Result<Vec<Spec>, Status> {
    let Some(marker) = marker else { return Ok(Vec::new()) };
    let text =
        marker.to_str().map_err(|_| Status::invalid_argument(format!("{REQUEST_MARKER} is not ASCII")))?;
    let specs =
        parse_some(text).map_err(|error| Status::invalid_argument(format!("{REQUEST_MARKER}: {error}")))?;
    let counts = |spec: &&Spec| {
        let limits = &spec.limits;
        limits.nth.or(limits.first).or(limits.every).is_some() || limits.share.is_some()
    };
    match specs.iter().find(counts) {
        Some(spec) => Err(Status::invalid_argument(format!(
            "{REQUEST_MARKER}: {spec}: one request is not counted, so it takes no nth, first, every and share"
        ))),
        None => Ok(specs),
    }
}

/// Takes the marker out of the parameters of CreateSnapshot.
fn take_marker(body: &mut Bytes) -> Result<Vec<Spec>, Status> {
    let mut request: CreateSnapshotRequest = unframe(body.clone())?;
    let Some(marker) = request.parameters.remove(SNAPSHOT_MARKER) else { return Ok(Vec::new()) };
    *body = frame(&request);
    parse_some(&marker)
        .map_err(|error| Status::invalid_argument(format!("parameter {SNAPSHOT_MARKER}: {error}")))
}

/// The id of the snapshot that was made.
fn created(answer: &Bytes) -> Option<String> {
    unframe::<CreateSnapshotResponse>(answer.clone()).ok()?.snapshot.map(|snapshot| snapshot.snapshot_id)
}

/// Takes capabilities out of an answer.
fn unclaimed(kind: Kind, call: &str, answer: Bytes) -> Result<Bytes, Status> {
    use plugin_capability::{Type, service::Type as Service};
    let hidden = match kind {
        Kind::NoService | Kind::NotClaimed => Some(Service::SnapshotMetadataService),
        Kind::GroupsNotClaimed => Some(Service::GroupControllerService),
        _ => None,
    };
    match (call, hidden) {
        ("GetPluginCapabilities", Some(hidden)) => {
            changed(&answer, |answer: &mut GetPluginCapabilitiesResponse| {
                let is_hidden = |capability: &PluginCapability| matches!(&capability.r#type, Some(Type::Service(service)) if service.r#type() == hidden);
                answer.capabilities.retain(|capability| !is_hidden(capability));
            })
        }
        ("ControllerGetCapabilities", _) if kind == Kind::ExpansionNotClaimed => {
            use controller_service_capability::{Type, rpc};
            changed(&answer, |answer: &mut ControllerGetCapabilitiesResponse| {
                let expands = |capability: &ControllerServiceCapability| matches!(&capability.r#type, Some(Type::Rpc(rpc)) if rpc.r#type() == rpc::Type::ExpandVolume);
                answer.capabilities.retain(|capability| !expands(capability));
            })
        }
        _ => Ok(answer),
    }
}

/// An answer with the head of the one from behind, whose length it no longer has.
fn with_head(mut answer: Response<Body>, mut headers: HeaderMap) -> Response<Body> {
    headers.remove(header::CONTENT_LENGTH);
    *answer.headers_mut() = headers;
    answer
}

fn request(mut head: Parts, body: Bytes) -> Request<Body> {
    head.headers.remove(header::CONTENT_LENGTH);
    Request::from_parts(head, Body::new(Full::new(body)))
}
