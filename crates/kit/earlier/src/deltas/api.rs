//! The routes of the aggregated API server: discovery, OpenAPI, and the VolumeSnapshotDelta that is created, answered and
//! forgotten.

use std::collections::HashMap;
use std::num::NonZeroU32;
use std::sync::Arc;
use std::time::Duration;

use axum::body::Bytes;
use axum::extract::rejection::BytesRejection;
use axum::extract::{DefaultBodyLimit, Path, Query, Request, State};
use axum::http::{HeaderMap, StatusCode, header};
use axum::middleware::{self, Next};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use axum::{Extension, Json, Router};
use governor::clock::{Clock, DefaultClock};
use governor::{DefaultKeyedRateLimiter, Quota, RateLimiter};
use k8s_openapi::api::core::v1::Secret;
use kube::{Api as ObjectApi, Client};
use serde_json::Value;
use serve::listen::Calls;
use serve::questions::{ask, away};
use serve::reviews::{Caller, Object, Reviews};
use serve::snapshots::{self, Refusal as Unusable, SnapshotName};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tonic::{Code, Status};

use super::discovery::{self, Callers};
use super::documents;
use super::front_proxy::FrontProxy;
use super::negotiate::{Format, wants_aggregated, warning};
use super::resource::{
    self, COMPLETED, CONTINUE, Delta, Entry, FAILED, GROUP, KIND, PLURAL, SecretRef, State as Answer, VERSION,
};
use super::wire;
use crate::page_token::PageToken;
use crate::refusal::Refusal;
use crate::server::{ClientCertificates, METRICS, held_until_taken, place};

/// Longest object, in bytes.
const MAX_OBJECT: usize = 1 << 20;
/// Where the right to a block's data is: users who may create this subresource get data tokens.
const DATA: &str = "data";

pub struct Api {
    pub client: Client,
    pub reviews: Reviews,
    /// Who they are.
    pub proxy: Arc<FrontProxy>,
    pub callers: Arc<Callers>,
    /// Creates of each user.
    pub users: DefaultKeyedRateLimiter<String>,
    pub max_entries: u32,
    /// Creates at once.
    pub places: Arc<Semaphore>,
    pub timeout: Duration,
}

/// A bound for each user: of calls a second, and of calls at once after a pause.
pub fn bound(qps: NonZeroU32, burst: NonZeroU32) -> DefaultKeyedRateLimiter<String> {
    RateLimiter::keyed(Quota::per_second(qps).allow_burst(burst))
}

pub fn router(api: Arc<Api>) -> Router {
    let objects = get(not_served).post(create).put(not_served).patch(not_served).delete(not_served);
    let version = format!("/apis/{GROUP}/{VERSION}");
    Router::new()
        .route("/apis", get(groups))
        .route(&format!("/apis/{GROUP}"), get(async || Json(documents::group())))
        .route(&version, get(async || Json(documents::resources())))
        .route("/openapi/v2", get(async || Json(documents::openapi_v2())))
        .route("/openapi/v3", get(async || Json(documents::openapi_v3_index())))
        .route(&format!("/openapi/v3{version}"), get(async || Json(documents::openapi_v3())))
        .route(&documents::path(), objects)
        .route(&format!("{}/{{name}}", documents::path()), axum::routing::any(not_served))
        .route(&format!("{version}/{PLURAL}"), axum::routing::any(not_served))
        .fallback(not_found)
        .method_not_allowed_fallback(not_served)
        .layer(middleware::from_fn_with_state(api.clone(), identify))
        .layer(DefaultBodyLimit::max(MAX_OBJECT))
        .with_state(api)
}

/// No request is served without a user that kube-apiserver names.
async fn identify(
    State(api): State<Arc<Api>>,
    Extension(calls): Extension<Calls>,
    Extension(ClientCertificates(shown)): Extension<ClientCertificates>,
    mut request: Request,
    next: Next,
) -> Response {
    let open = calls.open();
    match api.proxy.user(&shown, request.headers()) {
        Some(user) => {
            let caller = Arc::new(api.reviews.named(user));
            open.known(caller.name());
            request.extensions_mut().insert(caller);
            next.run(request).await
        }
        None => refuse(
            request.headers(),
            &Refusal::new(
                StatusCode::UNAUTHORIZED,
                "Unauthorized",
                "Unauthorized: ask through kube-apiserver, which says who you are",
            ),
        ),
    }
}

fn refuse(headers: &HeaderMap, refusal: &Refusal) -> Response {
    Format::accepted(headers).unwrap_or(Format::Json).refuse(refusal)
}

async fn groups(headers: HeaderMap) -> Response {
    match wants_aggregated(&headers) {
        Some(media) => ([(header::CONTENT_TYPE, media)], documents::discovery().to_string()).into_response(),
        None => Json(documents::groups()).into_response(),
    }
}

async fn not_served(headers: HeaderMap) -> Response {
    let message =
        format!("{PLURAL}.{GROUP} are answered and not stored: they can be created, and nothing else");
    refuse(&headers, &Refusal::new(StatusCode::METHOD_NOT_ALLOWED, "MethodNotAllowed", message))
}

async fn not_found(headers: HeaderMap) -> Response {
    let message = "the server could not find the requested resource";
    refuse(&headers, &Refusal::new(StatusCode::NOT_FOUND, "NotFound", message))
}

async fn create(
    State(api): State<Arc<Api>>,
    Extension(caller): Extension<Arc<Caller>>,
    Path(namespace): Path<String>,
    Query(queries): Query<HashMap<String, String>>,
    headers: HeaderMap,
    body: Result<Bytes, BytesRejection>,
) -> Response {
    let format = match Format::accepted(&headers) {
        Ok(format) => format,
        Err(refusal) => return Format::Json.refuse(&refusal),
    };
    let answer = api.create(&caller, &namespace, &queries, &headers, body);
    let answer = tokio::time::timeout(api.timeout, answer).await.unwrap_or_else(|_| {
        let message = "the answer has taken too long: try again, or ask for fewer entries";
        Err(Status::deadline_exceeded(message).into())
    });
    let code = answer.as_ref().map_or_else(|refusal| refusal.code, |_| StatusCode::CREATED);
    let state = answer.as_ref().map_or("", |(object, ..)| match object["status"]["state"].as_u64() {
        Some(0) => "completed",
        Some(1) => "continue",
        _ => "failed",
    });
    metrics::counter!("cbt_earlier_deltas_total", "code" => code.as_str().to_owned(), "state" => state)
        .increment(1);
    match answer {
        Ok((object, warnings, place)) => {
            let mut response = format.write(code, &object);
            for (name, value) in warnings.iter().filter_map(|text| warning(text)) {
                response.headers_mut().append(name, value);
            }
            held_until_taken(response, place, api.timeout).await
        }
        Err(refusal) => format.refuse(&refusal),
    }
}

impl Api {
    /// The checks in their order, and then the answer; with it, warnings and its place.
    async fn create(
        &self,
        caller: &Caller,
        namespace: &str,
        queries: &HashMap<String, String>,
        headers: &HeaderMap,
        body: Result<Bytes, BytesRejection>,
    ) -> Result<(Value, Vec<String>, OwnedSemaphorePermit), Refusal> {
        // 1. Not too often.
        if let Err(until) = self.users.check_key(&caller.name().to_owned()) {
            let seconds = until.wait_time_from(DefaultClock::default().now()).as_secs().max(1);
            return Err(Refusal {
                details: serde_json::json!({"retryAfterSeconds": seconds}),
                ..Status::resource_exhausted("this user asks too often: try again later").into()
            });
        }
        let place = place(&self.places)?;
        // 2. Whether they may create such objects there.
        let object = |subresource| Object {
            group: GROUP,
            version: VERSION,
            resource: PLURAL,
            subresource,
            kind: KIND,
            namespace,
            name: "",
        };
        self.reviews.may(caller, "create", object("")).await?;
        // 3. What they ask.
        let format = Format::sent(headers)?;
        let body = body.map_err(|rejection| {
            let (code, reason) = match rejection.status() {
                StatusCode::PAYLOAD_TOO_LARGE => (StatusCode::PAYLOAD_TOO_LARGE, "RequestEntityTooLarge"),
                _ => (StatusCode::BAD_REQUEST, "BadRequest"),
            };
            Refusal::new(code, reason, rejection.body_text())
        })?;
        let (delta, unknown) = resource::read(format.read(&body)?, namespace)?;
        let warnings = judge(queries, unknown)?;
        // 4. Whether they may get the named objects: the answer is about the snapshots, and the driver reads the secret.
        let snapshot = |name: &str| SnapshotName { namespace: namespace.to_owned(), name: name.to_owned() };
        let target = snapshot(&delta.spec.target_volume_snapshot_name);
        let base =
            delta.spec.base_volume_snapshot_name.as_deref().filter(|name| !name.is_empty()).map(snapshot);
        for name in base.iter().chain([&target]) {
            self.reviews.may_get(caller, name).await?;
        }
        let secrets = match &delta.spec.volume_snapshot_delta_secret_ref {
            None => HashMap::new(),
            Some(reference) => self.secrets(caller, reference).await?,
        };
        // 5. The driver's handles, and where its cbt-http is.
        let (driver, from, to) = self.resolve(&delta, base.as_ref(), &target).await?;
        let found = discovery::find(&self.client, &driver).await.map_err(|error| away(&error))?;
        let found = found.ok_or_else(|| {
            Status::not_found(format!("the CSI driver {driver} has no DriverDiscovery: it runs no cbt-http"))
        })?;
        // 6. The answer.
        let limit = delta.spec.limit.filter(|limit| *limit > 0);
        let limit = limit.map_or(self.max_entries, |limit| {
            u32::try_from(limit).map_or(self.max_entries, |limit| limit.min(self.max_entries))
        });
        let offset = delta.spec.offset.unwrap_or(0);
        let request = wire::Request {
            from_snapshot_id: from.unwrap_or_default(),
            to_snapshot_id: to,
            secrets,
            max_entries: i32::try_from(limit).unwrap_or(i32::MAX),
            starting_token: if offset == 0 { String::new() } else { offset.to_string() },
        };
        let mut answer = Answer { limit: limit.into(), offset, ..Answer::default() };
        let listed = self.callers.list(&found.spec.client_config, &request).await;
        match listed.map_err(|error| error.to_string()).and_then(|page| checked(page, limit)) {
            Ok((mut page, next)) => {
                let has_tokens = page.changed_blocks.iter().any(|block| block.token.is_some());
                if has_tokens && !self.may_have_data(caller, object(DATA)).await? {
                    page.changed_blocks.iter_mut().for_each(|block| block.token = None);
                }
                let entries: Option<Vec<_>> = page.changed_blocks.into_iter().map(Entry::of).collect();
                match entries {
                    Some(entries) => {
                        answer.state = if next.is_some() { CONTINUE } else { COMPLETED };
                        (answer.next, answer.changed_blocks) = (next, entries);
                    }
                    None => fail(&mut answer, "cbt-http lists a block that begins inside another".into()),
                }
            }
            Err(error) => fail(&mut answer, error),
        }
        Ok((resource::answer(delta, namespace, &answer), warnings, place))
    }

    /// Whether the answer may have data tokens. A right to know which blocks changed is not a right to read them.
    async fn may_have_data(&self, caller: &Caller, data: Object<'_>) -> Result<bool, Refusal> {
        match self.reviews.may(caller, "create", data).await {
            Ok(()) => Ok(true),
            Err(status) if status.code() == Code::PermissionDenied => Ok(false),
            Err(status) => Err(status.into()),
        }
    }

    async fn secrets(
        &self,
        caller: &Caller,
        reference: &SecretRef,
    ) -> Result<HashMap<String, String>, Refusal> {
        let SecretRef { namespace, name } = reference;
        let object = Object {
            group: "",
            version: "v1",
            resource: "secrets",
            subresource: "",
            kind: "Secret",
            namespace,
            name,
        };
        self.reviews.may_get(caller, object).await?;
        let secrets: ObjectApi<Secret> = ObjectApi::namespaced(self.client.clone(), namespace);
        let secret = match ask(METRICS.seconds, "Secret", secrets.get_opt(name)).await {
            Err(kube::Error::Api(status)) if status.code == 403 => {
                let message = format!(
                    "the aggregated API server may not get Secret {namespace}/{name}: its operator has to allow it"
                );
                return Err(Status::permission_denied(message).into());
            }
            secret => secret.map_err(|error| away(&error))?,
        };
        let secret =
            secret.ok_or_else(|| Status::not_found(format!("Secret {namespace}/{name} does not exist")))?;
        let texts = secret.data.unwrap_or_default().into_iter().map(|(key, value)| {
            let value = String::from_utf8(value.0);
            value.map(|value| (key.clone(), value)).map_err(|_| {
                Refusal::bad_request(format!("{key} in Secret {namespace}/{name} is not text (UTF-8)"))
            })
        });
        texts.collect()
    }

    /// The driver's name, and its handles of base and target.
    async fn resolve(
        &self,
        delta: &Delta,
        base: Option<&SnapshotName>,
        target: &SnapshotName,
    ) -> Result<(String, Option<String>, String), Refusal> {
        let invalid = |field, message: &str| {
            resource::invalid(&delta.metadata, vec![(field, "FieldValueInvalid", message.to_owned())])
        };
        let (target_field, base_field) = ("spec.targetVolumeSnapshotName", "spec.baseVolumeSnapshotName");
        let refused = |field, unusable: Unusable, name: &SnapshotName, driver: &str| {
            let status = unusable.status(name, driver);
            match unusable {
                // The server is there; the snapshot is not, yet.
                Unusable::NotReady(_) => Refusal::new(StatusCode::CONFLICT, "Conflict", status.message()),
                Unusable::OtherDriver => invalid(field, status.message()),
                Unusable::Missing | Unusable::NoContent | Unusable::BoundToAnother => status.into(),
            }
        };
        let fetch = async |name: &SnapshotName| {
            let found = snapshots::fetch(METRICS.seconds, &self.client, name).await;
            found.map_err(|error| Refusal::from(away(&error)))
        };
        let (snapshot, content) = fetch(target).await?;
        let driver = content.as_ref().map_or_else(String::new, |content| content.driver.clone());
        let usable = snapshots::usable(target, snapshot, content, &driver);
        let usable = usable.map_err(|unusable| refused(target_field, unusable, target, &driver))?;
        let Some(base) = base else { return Ok((driver, None, usable.handle)) };
        let (snapshot, content) = fetch(base).await?;
        let from = snapshots::usable(base, snapshot, content.clone(), &driver);
        let from = from.map_err(|unusable| refused(base_field, unusable, base, &driver))?;
        if let Some(content) = &content {
            snapshots::in_order(content, &usable).map_err(|status| invalid(base_field, status.message()))?;
        }
        Ok((driver, Some(from.handle), usable.handle))
    }
}

/// A failed answer is asked for again from where this one was to begin.
fn fail(answer: &mut Answer, error: String) {
    answer.state = FAILED;
    answer.error = Some(error);
    answer.next = Some(answer.offset);
}

/// The page, and the index of the block that the next one begins with.
fn checked(page: wire::Response, limit: u32) -> Result<(wire::Response, Option<u64>), String> {
    if page.changed_blocks.len() > limit as usize {
        return Err(format!("cbt-http lists more than the {limit} blocks that it was asked for"));
    }
    match page.next_token.as_str() {
        "" => Ok((page, None)),
        text => match PageToken::parse(text) {
            Some(place) => Ok((page, Some(place.number()))),
            None => {
                Err(format!("the nextToken of cbt-http does not begin with the index of a block: {text:?}"))
            }
        },
    }
}

/// What the queries make of unknown fields: warnings, or a refusal.
fn judge(queries: &HashMap<String, String>, unknown: Vec<String>) -> Result<Vec<String>, Refusal> {
    if let Some(dry) = queries.get("dryRun").filter(|dry| !["", "All"].contains(&dry.as_str())) {
        return Err(Refusal::bad_request(format!("dryRun must be All, got {dry:?}")));
    }
    match queries.get("fieldValidation").map_or("", String::as_str) {
        "" | "Warn" => Ok(unknown),
        "Ignore" => Ok(Vec::new()),
        "Strict" if unknown.is_empty() => Ok(unknown),
        "Strict" => Err(Refusal::bad_request(format!("strict decoding error: {}", unknown.join(", ")))),
        other => Err(Refusal::bad_request(format!(
            "fieldValidation must be Ignore, Warn or Strict, got {other:?}"
        ))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unknown_fields_are_judged_by_the_query() {
        let judge = |name: &str, value: &str, unknown: &[&str]| {
            let queries = HashMap::from([(name.to_owned(), value.to_owned())]);
            let unknown = unknown.iter().map(|text| (*text).to_owned()).collect();
            super::judge(&queries, unknown).map_err(|refusal| refusal.message)
        };
        assert_eq!(judge("x", "", &["a"]), Ok(vec!["a".into()]));
        assert_eq!(judge("fieldValidation", "Warn", &["a"]), Ok(vec!["a".into()]));
        assert_eq!(judge("fieldValidation", "Ignore", &["a"]), Ok(vec![]));
        assert_eq!(judge("fieldValidation", "Strict", &[]), Ok(vec![]));
        let refused = judge("fieldValidation", "Strict", &["a", "b"]);
        assert_eq!(refused, Err("strict decoding error: a, b".into()));
        assert!(judge("fieldValidation", "strict", &[]).is_err_and(|error| error.contains("\"strict\"")));
        assert_eq!(judge("dryRun", "All", &[]), Ok(vec![]));
        assert!(judge("dryRun", "Some", &[]).is_err_and(|error| error.contains("\"Some\"")));
    }

    #[test]
    fn pages_that_are_none_are_seen() {
        let page = |blocks: usize, next: &str| {
            let block = wire::Block { offset: 0, block_size_bytes: 512, token: None };
            let changed_blocks = vec![block; blocks];
            checked(wire::Response { volume_size_bytes: 512, next_token: next.into(), changed_blocks }, 2)
                .map(|(_, next)| next)
        };
        assert_eq!(page(2, ""), Ok(None));
        assert_eq!(page(2, "7-0123456789abcdef"), Ok(Some(7)));
        assert_eq!(page(0, "7"), Ok(Some(7)));
        assert!(page(3, "").is_err_and(|error| error.contains("more than the 2")));
        assert!(page(2, "opaque").is_err_and(|error| error.contains("\"opaque\"")));
    }
}
