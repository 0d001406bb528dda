//! The callback listener: `GET /NAMESPACE/NAME` with a bearer token, answered with a page in JSON.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::Arc;
use std::time::Duration;

use axum::extract::rejection::QueryRejection;
use axum::extract::{Path, Query, State};
use axum::http::HeaderMap;
use axum::response::Response;
use axum::routing::get;
use axum::{Extension, Router};
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use kube::{Api, Client};
use parking_lot::Mutex;
use proto::answers::Checked;
use proto::differential::differential_snapshot_client::DifferentialSnapshotClient;
use proto::differential::{DifferentialSnapshotRequest, DifferentialSnapshotResponse};
use serde::{Deserialize, Serialize};
use serve::listen::{Calls, OpenCall};
use serve::questions::{ask, away};
use serve::reviews::{Object, Reviews};
use serve::snapshots::{NAME_MAX, NAMESPACE_MAX, is_object_name};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tonic::Status;

use crate::refusal::Refusal;
use crate::request::bearer;
use crate::server::{METRICS, answer_page, place};

use super::resource::{self, DifferentialSnapshot, GROUP, PLURAL, Pair, Unresolved, VERSION};

pub struct Listener {
    pub client: Client,
    pub reviews: Reviews,
    pub audience: String,
    pub driver_name: String,
    pub pages: DifferentialSnapshotClient<Checked>,
    pub page_timeout: Duration,
    /// Requests at once.
    pub places: Arc<Semaphore>,
    /// Requests at once of one user.
    pub each: usize,
    /// How many each user has under way.
    pub under_way: Mutex<HashMap<String, usize>>,
}

/// The places of a request: among those of its user, and among all.
type Places = (OfUser, OwnedSemaphorePermit);

/// A request of a known user, until it is dropped.
struct OfUser {
    listener: Arc<Listener>,
    user: String,
}

impl Drop for OfUser {
    fn drop(&mut self) {
        let mut under_way = self.listener.under_way.lock();
        if let Entry::Occupied(mut own) = under_way.entry(std::mem::take(&mut self.user)) {
            *own.get_mut() -= 1;
            if *own.get() == 0 {
                own.remove();
            }
        }
    }
}

/// What a request says besides its path.
#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct Asked {
    start_offset: Option<String>,
    max_entries: Option<u64>,
}

/// A page as the design writes it.
#[derive(Debug, Serialize)]
#[serde(rename_all = "PascalCase")]
struct Page {
    change_block_list: Vec<Block>,
    next_offset: String,
    volume_size: u64,
    timeout: u64,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "PascalCase")]
struct Block {
    offset: u64,
    size: u64,
    /// Base64.
    context: String,
    zero_out: bool,
}

impl From<DifferentialSnapshotResponse> for Page {
    fn from(response: DifferentialSnapshotResponse) -> Self {
        let blocks = response.change_block_list.into_iter().map(|block| Block {
            offset: block.offset,
            size: block.size,
            context: STANDARD.encode(block.context),
            zero_out: block.zero_out,
        });
        Page {
            change_block_list: blocks.collect(),
            next_offset: response.next_offset,
            volume_size: response.volume_size,
            timeout: response.timeout,
        }
    }
}

pub fn router(listener: Arc<Listener>) -> Router {
    Router::new()
        .route("/{namespace}/{name}", get(page))
        .fallback(async || Refusal::from(Status::not_found("the path is not /NAMESPACE/NAME")))
        .with_state(listener)
}

async fn page(
    State(listener): State<Arc<Listener>>,
    Extension(calls): Extension<Calls>,
    Path((namespace, name)): Path<(String, String)>,
    asked: Result<Query<Asked>, QueryRejection>,
    headers: HeaderMap,
) -> Response {
    let time = listener.page_timeout;
    let page = async move {
        let open = calls.open();
        let (page, places) = listener.page(&namespace, &name, asked, &headers, (&calls, &open)).await?;
        Ok((Page::from(page), (places, open)))
    };
    answer_page(page, time, "the page has taken too long: try again, or ask for fewer entries").await
}

impl Listener {
    /// One user does not take all places of the others.
    fn enter(self: &Arc<Self>, user: &str) -> Result<Places, Status> {
        let place = place(&self.places)?;
        let mut under_way = self.under_way.lock();
        let own = under_way.entry(user.to_owned()).or_default();
        if *own >= self.each {
            let message = format!("this user has {own} requests under way, which is the most: try again");
            return Err(Status::resource_exhausted(message));
        }
        *own += 1;
        Ok((OfUser { listener: self.clone(), user: user.to_owned() }, place))
    }

    /// The checks in their order, and then the page, with its places.
    async fn page(
        self: Arc<Self>,
        namespace: &str,
        name: &str,
        asked: Result<Query<Asked>, QueryRejection>,
        headers: &HeaderMap,
        (calls, open): (&Calls, &OpenCall),
    ) -> Result<(DifferentialSnapshotResponse, Places), Status> {
        // 1. Who calls: a place is not for strangers. The design wants 403 where there is no token.
        let token = bearer(headers).ok_or_else(|| {
            Status::permission_denied("a token is missing: send the header Authorization: Bearer TOKEN")
        })?;
        let held = calls.hold()?;
        let caller = self.reviews.caller(token, &self.audience).await?;
        open.known(caller.name());
        let places = self.enter(caller.name())?;
        drop(held);
        // 2. Whether they may get the object. The names become parts of a path of the Kubernetes API.
        if !is_object_name(namespace, NAMESPACE_MAX) || !is_object_name(name, NAME_MAX) {
            return Err(Status::not_found("the path does not name a Kubernetes object"));
        }
        let object = Object {
            group: GROUP,
            version: VERSION,
            resource: PLURAL,
            subresource: "",
            kind: "DifferentialSnapshot",
            namespace,
            name,
        };
        self.reviews.may_get(&caller, object).await?;
        let Query(asked) = asked.map_err(|rejection| Status::invalid_argument(rejection.body_text()))?;
        let objects: Api<DifferentialSnapshot> = Api::namespaced(self.client.clone(), namespace);
        let found = ask(METRICS.seconds, "DifferentialSnapshot", objects.get_opt(name)).await;
        let object = found.map_err(|error| away(&error))?.ok_or_else(|| {
            Status::not_found(format!("DifferentialSnapshot {namespace}/{name} does not exist"))
        })?;
        // 3. Whether they may get what it names: a user who may write the object could name any snapshot of the namespace.
        for snapshot in object.spec.snapshots(namespace) {
            self.reviews.may_get(&caller, &snapshot).await?;
        }
        // 4. The driver's handles, as of now: the status may lag behind.
        let pair = resource::resolve(&self.client, &self.driver_name, namespace, &object.spec).await;
        let Pair { base, target } = pair.map_err(|unresolved| match unresolved {
            Unresolved::NotOurs(status) | Unresolved::NotYet(status) | Unresolved::Never(status) => status,
            Unresolved::Unknown(error) => away(&error),
        })?;
        // 5. The page.
        let request = DifferentialSnapshotRequest {
            snapshot_base: base.unwrap_or_default(),
            snapshot_target: target,
            mode: object.spec.mode.unwrap_or_default(),
            start_offset: asked.start_offset.or(object.spec.start_offset).unwrap_or_default(),
            max_entries: asked.max_entries.unwrap_or(0),
            parameters: object.spec.parameters.into_iter().collect(),
        };
        let page = self.pages.clone().get_differential_snapshot(request).await;
        Ok((page?.into_inner(), places))
    }
}
