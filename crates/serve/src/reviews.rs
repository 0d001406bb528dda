//! Who calls, and whether they may: TokenReview and SubjectAccessReview.
//!
//! A positive answer is kept for a few seconds and never longer than the token itself; a negative one never is. So rights
//! that are taken away end within that time. A token is kept only as a keyed hash.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use base64::Engine;
use k8s_openapi::api::authentication::v1::{TokenReview, TokenReviewSpec, TokenReviewStatus, UserInfo};
use k8s_openapi::api::authorization::v1::{ResourceAttributes, SubjectAccessReview, SubjectAccessReviewSpec};
use kube::api::PostParams;
use kube::{Api, Client};
use moka::Expiry;
use moka::future::Cache;
use tokio::sync::Semaphore;
use tonic::Status;

use crate::questions::{Metrics, ask, away};
use crate::snapshots::{SNAPSHOTS, SnapshotName};

/// Answers kept at once, of each kind.
const CACHED: u64 = 20_000;
/// The most reviews under way at once, so that a client that tries tokens out does not overload the API server.
const AT_ONCE: usize = 64;
/// Tokens that wait for their review at once.
const MAX_WAITING: usize = 1024;

/// A keyed hash of what a review was about.
type Key = [u8; blake3::OUT_LEN];

/// An object that a caller would do something with.
#[derive(Clone, Copy, Debug)]
pub struct Object<'a> {
    /// API group.
    pub group: &'a str,
    /// Version of the group.
    pub version: &'a str,
    /// The plural, as it stands in rules.
    pub resource: &'a str,
    /// The subresource; empty for the object itself.
    pub subresource: &'a str,
    /// The kind, for messages.
    pub kind: &'a str,
    /// Its namespace; empty for objects of the cluster.
    pub namespace: &'a str,
    /// Its name there; empty for what has none yet.
    pub name: &'a str,
}

impl<'a> From<&'a SnapshotName> for Object<'a> {
    fn from(SnapshotName { namespace, name }: &'a SnapshotName) -> Self {
        let (group, version, resource, subresource) = (SNAPSHOTS, "v1", "volumesnapshots", "");
        Object { group, version, resource, subresource, kind: "VolumeSnapshot", namespace, name }
    }
}

/// Asks the API server, or its own memory.
pub struct Reviews {
    client: Client,
    metrics: Metrics,
    /// Made when the process starts, and kept nowhere.
    secret: Key,
    keep: Duration,
    callers: Cache<Key, Arc<Caller>>,
    /// Rights that were granted, and until when each counts.
    rights: Cache<Key, Instant>,
    under_way: Semaphore,
    waiting: Semaphore,
}

/// Who a token belongs to.
#[derive(Clone, Debug)]
pub struct Caller {
    user: UserInfo,
    /// Of the token; for the keys of what it may do.
    token: Key,
    ends: Instant,
}

impl Caller {
    /// The user's name.
    pub fn name(&self) -> &str {
        self.user.username.as_deref().unwrap_or_default()
    }
}

/// Answers end on their own.
struct Ends;

impl Expiry<Key, Arc<Caller>> for Ends {
    fn expire_after_create(&self, _: &Key, caller: &Arc<Caller>, now: Instant) -> Option<Duration> {
        Some(caller.ends.saturating_duration_since(now))
    }
}

impl Expiry<Key, Instant> for Ends {
    fn expire_after_create(&self, _: &Key, ends: &Instant, now: Instant) -> Option<Duration> {
        Some(ends.saturating_duration_since(now))
    }
}

impl Reviews {
    /// Positive answers are kept for `keep`.
    pub fn new(client: Client, keep: Duration, metrics: Metrics) -> Result<Self, getrandom::Error> {
        let mut secret = Key::default();
        getrandom::fill(&mut secret)?;
        Ok(Reviews {
            client,
            metrics,
            secret,
            keep,
            callers: Cache::builder().max_capacity(CACHED).expire_after(Ends).build(),
            rights: Cache::builder().max_capacity(CACHED).expire_after(Ends).build(),
            under_way: Semaphore::new(AT_ONCE),
            waiting: Semaphore::new(MAX_WAITING),
        })
    }

    fn key(&self, parts: &[&[u8]]) -> Key {
        let mut hasher = blake3::Hasher::new_keyed(&self.secret);
        for part in parts {
            // With its length, or two lists of parts could be one text.
            hasher.update(&(part.len() as u64).to_le_bytes()).update(part);
        }
        *hasher.finalize().as_bytes()
    }

    /// The caller with this token, if it is valid for the audience.
    pub async fn caller(&self, token: &str, audience: &str) -> Result<Arc<Caller>, Status> {
        if !is_token(token) {
            return Err(self.refused());
        }
        let key = self.key(&[token.as_bytes(), audience.as_bytes()]);
        if let Some(caller) = self.callers.get(&key).await {
            self.counted("TokenReview", "cached");
            return Ok(caller);
        }
        // Calls with the same token at the same time wait for one review.
        let reviewed = self.callers.try_get_with(key, self.review_token(key, token, audience)).await;
        reviewed.map_err(|status| Status::clone(&status))
    }

    async fn review_token(&self, key: Key, token: &str, audience: &str) -> Result<Arc<Caller>, Status> {
        let busy = |_| Status::unavailable("too many tokens are being reviewed: try again");
        let _place = self.waiting.try_acquire().map_err(busy)?;
        let review = TokenReview {
            spec: TokenReviewSpec { token: token.to_owned(), audiences: Some(vec![audience.to_owned()]) },
            ..TokenReview::default()
        };
        let asked = Instant::now();
        let status = self.post(review, "TokenReview").await?.status.unwrap_or_default();
        let user = user_of(status, audience).ok_or_else(|| self.refused())?;
        self.counted("TokenReview", "allowed");
        let kept = seconds_left(token).map_or(self.keep, |left| left.min(self.keep));
        Ok(Arc::new(Caller { user, token: key, ends: asked + kept }))
    }

    /// What the API server says of the token is for its log, not for the token's holder.
    fn refused(&self) -> Status {
        self.counted("TokenReview", "denied");
        Status::unauthenticated("the security token is not valid, or not for the audience of this service")
    }

    /// The caller that a trusted server in front of this one has named.
    pub fn named(&self, user: UserInfo) -> Caller {
        let UserInfo { username, uid, groups, extra } = &user;
        let extra: BTreeMap<_, _> = extra.iter().flatten().collect();
        let text = serde_json::json!([username, uid, groups, extra]).to_string();
        Caller { token: self.key(&[b"named", text.as_bytes()]), ends: Instant::now() + self.keep, user }
    }

    /// Whether the caller may get that object.
    pub async fn may_get<'a>(&self, caller: &Caller, object: impl Into<Object<'a>>) -> Result<(), Status> {
        self.may(caller, "get", object).await
    }

    /// Whether the caller may do that with the object.
    pub async fn may<'a>(
        &self,
        caller: &Caller,
        verb: &'static str,
        object: impl Into<Object<'a>>,
    ) -> Result<(), Status> {
        let object = object.into();
        let Object { group, resource, subresource, namespace, name, .. } = object;
        let texts = [verb, group, resource, subresource, namespace, name].map(str::as_bytes);
        let mut parts = vec![&caller.token[..]];
        parts.extend(texts);
        let key = self.key(&parts);
        if self.rights.get(&key).await.is_some() {
            self.counted("SubjectAccessReview", "cached");
            return Ok(());
        }
        let reviewed = self.rights.try_get_with(key, self.review_right(caller, verb, object)).await;
        reviewed.map(drop).map_err(|status| Status::clone(&status))
    }

    async fn review_right(&self, caller: &Caller, verb: &str, object: Object<'_>) -> Result<Instant, Status> {
        let UserInfo { username, uid, groups, extra } = caller.user.clone();
        let extra = extra.map(|extra| extra.into_iter().collect::<BTreeMap<_, _>>());
        let some = |text: &str| Some(text.to_owned()).filter(|text| !text.is_empty());
        let review = SubjectAccessReview {
            spec: SubjectAccessReviewSpec {
                user: username,
                uid,
                groups,
                extra,
                resource_attributes: Some(ResourceAttributes {
                    verb: Some(verb.to_owned()),
                    group: Some(object.group.to_owned()),
                    version: Some(object.version.to_owned()),
                    resource: Some(object.resource.to_owned()),
                    subresource: some(object.subresource),
                    namespace: some(object.namespace),
                    name: some(object.name),
                    ..ResourceAttributes::default()
                }),
                ..SubjectAccessReviewSpec::default()
            },
            ..SubjectAccessReview::default()
        };
        let asked = Instant::now();
        let status = self.post(review, "SubjectAccessReview").await?.status.unwrap_or_default();
        if !status.allowed || status.denied == Some(true) {
            self.counted("SubjectAccessReview", "denied");
            return Err(Status::permission_denied(format!("the caller may not {verb} this {}", object.kind)));
        }
        self.counted("SubjectAccessReview", "allowed");
        Ok((asked + self.keep).min(caller.ends))
    }

    fn counted(&self, review: &'static str, outcome: &'static str) {
        metrics::counter!(self.metrics.reviews, "review" => review, "outcome" => outcome).increment(1);
    }

    /// Creates a review, which answers it.
    async fn post<K>(&self, review: K, kind: &'static str) -> Result<K, Status>
    where
        K: kube::Resource<DynamicType = ()>
            + Clone
            + std::fmt::Debug
            + serde::Serialize
            + serde::de::DeserializeOwned,
    {
        let api: Api<K> = Api::all(self.client.clone());
        let params = PostParams::default();
        let create = async {
            // The semaphore is never closed.
            let _place = self.under_way.acquire().await;
            ask(self.metrics.seconds, kind, api.create(&params, &review)).await
        };
        // What an error displays names what failed, and not the token in the request.
        create.await.map_err(|error| {
            self.counted(kind, "failed");
            away(&error)
        })
    }
}

/// Whether it may be a token. The API server reads it behind `Bearer ` of a header: where a blank is in it, the rest counts for nothing.
fn is_token(text: &str) -> bool {
    !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_graphic())
}

/// The user whom a review has found, if the token is for the audience. One without a name is `system:anonymous` to the API server.
fn user_of(status: TokenReviewStatus, audience: &str) -> Option<UserInfo> {
    let is_for_us = status.audiences.is_some_and(|audiences| audiences.iter().any(|one| one == audience));
    let user = status.user.filter(|_| status.authenticated == Some(true) && is_for_us)?;
    let is_named = user.username.as_deref().is_some_and(|name| !["", "system:anonymous"].contains(&name));
    is_named.then_some(user)
}

/// How long a token still lives, by its `exp` claim. The API server has judged the token; this only shortens what is kept,
/// so nothing is verified here. `None` where it is not a JWT.
fn seconds_left(token: &str) -> Option<Duration> {
    #[derive(serde::Deserialize)]
    struct Claims {
        exp: u64,
    }
    let claims = token.split('.').nth(1)?;
    let claims = base64::engine::general_purpose::URL_SAFE_NO_PAD.decode(claims).ok()?;
    let Claims { exp } = serde_json::from_slice(&claims).ok()?;
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).ok()?;
    Some(Duration::from_secs(exp).saturating_sub(now))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_user_without_a_name_is_none() {
        for (name, authenticated, audiences, is_user) in [
            (Some("ann"), Some(true), &["here", "there"][..], true),
            (Some("ann"), Some(false), &["here"], false),
            (Some("ann"), None, &["here"], false),
            (Some("ann"), Some(true), &["there"], false),
            (Some("system:anonymous"), Some(true), &["here"], false),
            (Some(""), Some(true), &["here"], false),
            (None, Some(true), &["here"], false),
        ] {
            let audiences = audiences.iter().map(|&one| one.to_owned()).collect();
            let user = UserInfo { username: name.map(str::to_owned), ..UserInfo::default() };
            let status = TokenReviewStatus {
                authenticated,
                audiences: Some(audiences),
                user: Some(user),
                ..TokenReviewStatus::default()
            };
            assert_eq!(user_of(status, "here").is_some(), is_user, "{name:?}");
        }
    }

    #[test]
    fn a_token_tells_how_long_it_lives() {
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).expect("after 1970").as_secs();
        let token = |claims: &str| {
            format!("head.{}.signature", base64::engine::general_purpose::URL_SAFE_NO_PAD.encode(claims))
        };
        let left = seconds_left(&token(&format!("{{\"exp\":{}}}", now + 100))).expect("a time");
        assert!(left > Duration::from_secs(90) && left <= Duration::from_secs(100), "{left:?}");
        assert_eq!(seconds_left(&token("{\"exp\":1}")), Some(Duration::ZERO));
        for other in ["", "opaque", "a.b.c", &token("{}"), &token("[]")] {
            assert_eq!(seconds_left(other), None, "{other:?}");
        }
    }
}
