//! The two calls of the SnapshotMetadata API. The order of the checks is that of [`Gateway::ask_driver`].

use std::collections::HashMap;
use std::convert::Infallible;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use http_body_util::BodyExt;
use k8s_openapi::api::core::v1::Secret;
use kube::{Api, Client};
use serve::listen::{Calls, Held};
use serve::questions::{Metrics, ask, away};
use serve::relay::{deadline, frame, unframe};
use serve::reviews::{Caller, Reviews};
use serve::snapshots::{self, NAME_MAX, NAMESPACE_MAX, Usable, is_object_name};
use serve::streams::{Call, Streams, within};
use serve::upstream::Answer;
use tonic::Status;
use tonic::body::Body;
use tonic::codegen::http::{Request, Response, response};
use tonic::server::NamedService;
use tower::Service;
use tracing::Instrument;

use crate::driver::Driver;
use crate::objects::{self, Objects, SnapshotName};
use crate::record::{self, Record};
use crate::resolve::{self, SecretName};
use proto::kubernetes;

/// The metrics of questions to the Kubernetes API server.
pub const METRICS: Metrics =
    Metrics { seconds: "deltapath_gateway_api_seconds", reviews: "deltapath_gateway_reviews_total" };
/// Longest request, in bytes. A token has a few thousand.
const MAX_REQUEST: usize = 32 << 10;
/// How long a client may take to send its request.
const REQUEST_TIME: Duration = Duration::from_secs(10);

pub struct Gateway {
    /// The name of the driver behind it, and of the SnapshotMetadataService object.
    pub driver_name: String,
    pub driver: Driver,
    pub objects: Arc<Objects>,
    pub reviews: Reviews,
    /// For what the watches may not know yet, and for secrets.
    pub client: Client,
    /// The audience that tokens must be for; none: that of the SnapshotMetadataService object.
    pub audience: Option<String>,
    pub streams: Arc<Streams<Record>>,
}

pub type Answering = Pin<Box<dyn Future<Output = Result<Response<Body>, Infallible>> + Send>>;

#[derive(Clone)]
pub struct SnapshotMetadata(pub Arc<Gateway>);

impl NamedService for SnapshotMetadata {
    const NAME: &'static str = "snapshotmetadata.SnapshotMetadata";
}

impl Service<Request<Body>> for SnapshotMetadata {
    type Response = Response<Body>;
    type Error = Infallible;
    type Future = Answering;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<Body>) -> Self::Future {
        self.0.clone().begin(request)
    }
}

/// What a client asks, of either call.
struct Question {
    token: String,
    target: SnapshotName,
    /// `base_snapshot_id`, for a delta.
    base: Option<String>,
    starting_offset: i64,
    max_results: i32,
}

impl Question {
    /// All arguments, before anybody is asked about them.
    fn check(&self) -> Result<(), Status> {
        let SnapshotName { namespace, name } = &self.target;
        let snapshot = if self.base.is_some() { "target_snapshot_name" } else { "snapshot_name" };
        let asked_for = [("security_token", &self.token), ("namespace", namespace), (snapshot, name)];
        for (field, value) in
            asked_for.into_iter().chain(self.base.as_ref().map(|base| ("base_snapshot_id", base)))
        {
            if value.is_empty() {
                return Err(Status::invalid_argument(format!("{field} is missing")));
            }
        }
        // They become parts of paths of the Kubernetes API.
        for (field, value, max) in [("namespace", namespace, NAMESPACE_MAX), (snapshot, name, NAME_MAX)] {
            if !is_object_name(value, max) {
                // Not all of it: whoever sends it need not read the answer, which waits here until then.
                return Err(Status::invalid_argument(format!(
                    "{field} must be the name of a Kubernetes object, got {:?}",
                    record::cut(value, 64)
                )));
            }
        }
        if self.max_results < 0 {
            let what = format!("max_results must be 0 or more, got {}", self.max_results);
            return Err(Status::invalid_argument(what));
        }
        if self.starting_offset < 0 {
            let what = format!("starting_offset must be 0 or more, got {}", self.starting_offset);
            return Err(Status::out_of_range(what));
        }
        Ok(())
    }
}

pub fn refuse(answer: Response<Body>) -> Answering {
    Box::pin(std::future::ready(Ok(answer)))
}

/// Each connection of `serve::listen` gives its calls what counts them.
pub fn no_connection() -> Status {
    Status::internal("the call came over no connection that is counted")
}

impl Gateway {
    /// The head of a call may be long, and the call too. It is counted here, before a task of its own keeps anything of it.
    fn begin(self: Arc<Self>, request: Request<Body>) -> Answering {
        let (head, body) = request.into_parts();
        let delta = match head.uri.path() {
            "/snapshotmetadata.SnapshotMetadata/GetMetadataAllocated" => false,
            "/snapshotmetadata.SnapshotMetadata/GetMetadataDelta" => true,
            _ => return refuse(Status::unimplemented("the service has no such call").into_http()),
        };
        let calls = head.extensions.get::<Calls>();
        let call = Call {
            record: Record::new(if delta { "GetMetadataDelta" } else { "GetMetadataAllocated" }),
            deadline: deadline(&head.headers),
            on_connection: calls.map(Calls::open),
            permit: None,
        };
        match calls.ok_or_else(no_connection).and_then(Calls::hold) {
            Ok(held) => Box::pin(async move { Ok(self.answer(delta, body, call, held).await) }),
            Err(status) => refuse(call.fail(status)),
        }
    }

    async fn answer(
        self: Arc<Self>,
        delta: bool,
        body: Body,
        mut call: Call<Record>,
        mut held: Held,
    ) -> Response<Body> {
        let span = call.record.span().clone();
        let until = call.deadline;
        let ask = async {
            let question = read_question(delta, body, &mut held).await?;
            // Apart, so that a call that sends nothing costs little.
            Box::pin(self.ask_driver(question, held, &mut call)).await
        };
        match within(until, ask.instrument(span)).await {
            Ok(answer) => self.streams.pass_on(answer, call),
            Err(status) => call.fail(status),
        }
    }

    /// The checks in their order, and then the call to the driver.
    async fn ask_driver(
        &self,
        question: Question,
        held: Held,
        call: &mut Call<Record>,
    ) -> Result<(response::Parts, Answer), Status> {
        call.record.about(&question.target.namespace, &question.target.name, question.base.as_deref());
        // 1. All arguments.
        question.check()?;
        // 2. Who calls.
        let caller = self.reviews.caller(&question.token, &self.audience()?).await?;
        call.record.by(caller.name());
        call.permit = Some(self.streams.enter(caller.name())?);
        if let Some(on_connection) = &call.on_connection {
            on_connection.known(caller.name());
        }
        drop(held);
        // 3. Whether the cluster's objects are known as they are: a base whose content is not known counts as deleted, and
        // its handle is sent to the driver without a look at the caller's rights.
        if let Some(missing) = self.objects.missing() {
            return Err(Status::unavailable(format!("{missing}: try again")));
        }
        // 4. Whether they may get the target; what the base is, and whether they may get that, is asked meanwhile.
        let (may, base) = tokio::join!(
            self.reviews.may_get(&caller, &question.target),
            self.find_base(&caller, &question.target.namespace, question.base.as_deref())
        );
        may?;
        // 5. The target's objects.
        let target = self.find_target(&question.target).await?;
        // 6. The base, and both together.
        let base = base?.map(|base| base.against(&target)).transpose()?;
        // 7. The secrets of the class.
        let secrets = self.secrets(&question.target, &target).await?;
        // 8. The driver.
        let Question { starting_offset, max_results, .. } = question;
        let (path, body) = match base {
            None => {
                let snapshot_id = target.handle;
                let request =
                    proto::GetMetadataAllocatedRequest { snapshot_id, starting_offset, max_results, secrets };
                ("/csi.v1.SnapshotMetadata/GetMetadataAllocated", frame(&request))
            }
            Some(base_snapshot_id) => {
                let request = proto::GetMetadataDeltaRequest {
                    base_snapshot_id,
                    target_snapshot_id: target.handle,
                    starting_offset,
                    max_results,
                    secrets,
                };
                ("/csi.v1.SnapshotMetadata/GetMetadataDelta", frame(&request))
            }
        };
        self.driver.open(path, body, call.deadline).await
    }

    fn audience(&self) -> Result<String, Status> {
        let audience = self.audience.clone().or_else(|| self.objects.audience(&self.driver_name));
        audience.ok_or_else(|| {
            let name = &self.driver_name;
            Status::unavailable(format!(
                "the SnapshotMetadataService {name} does not exist, or has no audience: create it, or start the gateway with --audience"
            ))
        })
    }

    /// The target as the watches know it; where they do not know it as usable, as the API server does, for a client may be
    /// quicker than a watch.
    async fn find_target(&self, name: &SnapshotName) -> Result<Usable, Status> {
        let (snapshot, content) = self.objects.snapshot(name);
        if let Ok(usable) = snapshots::usable(name, snapshot, content, &self.driver_name) {
            return Ok(usable);
        }
        let (snapshot, content) =
            snapshots::fetch(METRICS.seconds, &self.client, name).await.map_err(|error| away(&error))?;
        snapshots::usable(name, snapshot, content, &self.driver_name)
            .map_err(|refusal| refusal.status(name, &self.driver_name))
    }

    /// What `base_snapshot_id` means: a handle of this driver that the cluster knows, else the name of a VolumeSnapshot
    /// in the namespace, else the handle of a snapshot that was deleted.
    async fn find_base(
        &self,
        caller: &Caller,
        namespace: &str,
        base: Option<&str>,
    ) -> Result<Option<Base>, Status> {
        let Some(base) = base else { return Ok(None) };
        let contents = self.objects.with_handle(base);
        if !contents.is_empty() {
            let mut refused = None;
            for content in contents {
                match self.reviews.may_get(caller, &content.snapshot).await {
                    Ok(()) => return Ok(Some(Base { handle: base.to_owned(), content: Some(content) })),
                    Err(status) => refused = Some(status),
                }
            }
            // Which VolumeSnapshot it is stays unsaid: it may be another tenant's.
            return Err(match refused {
                Some(status) if status.code() != tonic::Code::PermissionDenied => status,
                _ => {
                    Status::permission_denied("the caller may not get the VolumeSnapshot of base_snapshot_id")
                }
            });
        }
        let name = SnapshotName { namespace: namespace.to_owned(), name: base.to_owned() };
        let (snapshot, content) = self.objects.snapshot(&name);
        if snapshot.is_none() {
            return Ok(Some(Base { handle: base.to_owned(), content: None }));
        }
        self.reviews.may_get(caller, &name).await?;
        let usable = snapshots::usable(&name, snapshot, content.clone(), &self.driver_name)
            .map_err(|refusal| refusal.status(&name, &self.driver_name))?;
        Ok(Some(Base { handle: usable.handle, content }))
    }

    /// The secrets that the snapshot's class names. Without a class, or where the class is gone, none.
    async fn secrets(
        &self,
        snapshot: &SnapshotName,
        usable: &Usable,
    ) -> Result<HashMap<String, String>, Status> {
        let class = usable.class.as_ref().and_then(|class| self.objects.class(class));
        let Some(class) = class else { return Ok(HashMap::new()) };
        let Some(SecretName { namespace, name }) = resolve::secret_of(&class, snapshot, &usable.content)?
        else {
            return Ok(HashMap::new());
        };
        let secrets: Api<Secret> = Api::namespaced(self.client.clone(), &namespace);
        // The name is the administrator's business, so it is written to the log.
        let unusable = |why: &str| {
            tracing::warn!(namespace, name, why, "the secret of the VolumeSnapshotClass cannot be used");
            Status::failed_precondition(format!("the secret that the VolumeSnapshotClass names {why}"))
        };
        let secret = match ask(METRICS.seconds, "Secret", secrets.get_opt(&name)).await {
            Ok(Some(secret)) => secret,
            Ok(None) => return Err(unusable("does not exist")),
            Err(kube::Error::Api(status)) if status.code == 403 => {
                return Err(unusable("may not be read by this service"));
            }
            Err(error) => return Err(away(&error)),
        };
        let data = secret.data.unwrap_or_default().into_iter();
        let data = data.map(|(key, value)| Ok((key, String::from_utf8(value.0)?)));
        data.collect::<Result<_, std::string::FromUtf8Error>>()
            .map_err(|_| unusable("holds bytes that are not UTF-8"))
    }
}

struct Base {
    handle: String,
    /// None where the cluster has forgotten it.
    content: Option<objects::Content>,
}

impl Base {
    /// Its handle, if it fits to the target.
    fn against(self, target: &Usable) -> Result<String, Status> {
        if let Some(content) = &self.content {
            snapshots::in_order(content, target)?;
        }
        Ok(self.handle)
    }
}

async fn read_question(delta: bool, body: Body, held: &mut Held) -> Result<Question, Status> {
    let bytes = read_body(body, held).await?;
    match delta {
        false => unframe(bytes).map(|asked: kubernetes::GetMetadataAllocatedRequest| Question {
            token: asked.security_token,
            target: SnapshotName { namespace: asked.namespace, name: asked.snapshot_name },
            base: None,
            starting_offset: asked.starting_offset,
            max_results: asked.max_results,
        }),
        true => unframe(bytes).map(|asked: kubernetes::GetMetadataDeltaRequest| Question {
            token: asked.security_token,
            target: SnapshotName { namespace: asked.namespace, name: asked.target_snapshot_name },
            base: Some(asked.base_snapshot_id),
            starting_offset: asked.starting_offset,
            max_results: asked.max_results,
        }),
    }
}

/// The request, if it comes whole and in time.
pub async fn read_body(body: Body, held: &mut Held) -> Result<Bytes, Status> {
    tokio::time::timeout(REQUEST_TIME, collect(body, held))
        .await
        .map_err(|_| Status::deadline_exceeded("the request did not arrive in time"))?
}

async fn collect(mut body: Body, held: &mut Held) -> Result<Bytes, Status> {
    let mut whole = BytesMut::new();
    while let Some(frame) = body.frame().await {
        let frame =
            frame.map_err(|error| Status::cancelled(format!("the request did not arrive: {error}")))?;
        let Ok(data) = frame.into_data() else { continue };
        if whole.len() + data.len() > MAX_REQUEST {
            return Err(Status::invalid_argument(format!("the request is larger than {MAX_REQUEST} bytes")));
        }
        held.add(data.len())?;
        whole.extend_from_slice(&data);
    }
    Ok(whole.freeze())
}

#[cfg(test)]
mod tests {
    use super::*;
    use tonic::Code;

    #[test]
    fn arguments_are_checked_before_anybody_is_asked() {
        let good = || Question {
            token: "t".into(),
            target: SnapshotName { namespace: "shop".into(), name: "monday".into() },
            base: Some("snap-1".into()),
            starting_offset: 0,
            max_results: 0,
        };
        assert!(good().check().is_ok());
        type Spoil = fn(&mut Question);
        let table: [(Spoil, Code, &str); 10] = [
            (|q| q.token.clear(), Code::InvalidArgument, "security_token"),
            (|q| q.target.namespace.clear(), Code::InvalidArgument, "namespace"),
            (|q| q.target.name.clear(), Code::InvalidArgument, "target_snapshot_name"),
            (|q| q.base = Some(String::new()), Code::InvalidArgument, "base_snapshot_id"),
            (|q| q.target.name = "../secrets".into(), Code::InvalidArgument, "target_snapshot_name"),
            (|q| q.target.namespace = "a/b".into(), Code::InvalidArgument, "namespace"),
            (|q| q.target.name = "a?b".into(), Code::InvalidArgument, "target_snapshot_name"),
            (|q| q.target.name = "\x01".repeat(32_700), Code::InvalidArgument, "target_snapshot_name"),
            (|q| q.max_results = -1, Code::InvalidArgument, "max_results"),
            (|q| q.starting_offset = -1, Code::OutOfRange, "starting_offset"),
        ];
        for (spoil, code, field) in table {
            let mut question = good();
            spoil(&mut question);
            let status = question.check().expect_err(field);
            assert_eq!(status.code(), code, "{field}");
            assert!(status.message().contains(field), "{}", status.message());
            assert!(status.message().len() < 1000, "{}", status.message());
        }
    }
}
