//! Keeps the status of every DifferentialSnapshot true: whether it can be asked about, and where. The elected replica does.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use futures_util::StreamExt;
use kube::api::{Patch, PatchParams};
use kube::runtime::Controller as Watches;
use kube::runtime::controller::Action;
use kube::runtime::reflector::ObjectRef;
use kube::runtime::watcher;
use kube::{Api, Client, Resource};
use parking_lot::Mutex;
use serde_json::json;
use serve::questions::ask;
use serve::snapshots::ApiSnapshot;
use tonic::Status;

use crate::server::METRICS;

use super::resource::{self, DifferentialSnapshot, State, Unresolved};

/// How long a watch lasts before it is restarted: a dead connection is noticed in this time.
const WATCH_SECONDS: u32 = 120;
/// When what is not ready is looked at again. VolumeSnapshots are watched, their contents are not.
const SOON: Duration = Duration::from_secs(2);
/// When what is decided is looked at again.
const LATER: Duration = Duration::from_secs(60);

/// What the status depends on besides the objects.
pub struct Controller {
    pub client: Client,
    pub driver_name: String,
    pub service_address: String,
    pub ready_timeout: Duration,
}

/// Since when an object waits: its generation then, by uid.
type Waiting = Mutex<HashMap<String, (i64, Instant)>>;

impl Controller {
    /// Works until it is dropped.
    pub async fn run(self: Arc<Self>) {
        let waiting = Arc::new(Waiting::default());
        let config = || watcher::Config { timeout: Some(WATCH_SECONDS), ..watcher::Config::default() };
        let watches = Watches::new(Api::<DifferentialSnapshot>::all(self.client.clone()), config());
        let known = watches.store();
        let concerned = move |snapshot: ApiSnapshot| {
            let concerned = known.state().into_iter().filter(|object| {
                let name = snapshot.meta().name.as_deref().unwrap_or_default();
                let is_near = object.meta().namespace == snapshot.meta().namespace;
                is_near
                    && (object.spec.base() == Some(name) || object.spec.target_volume_snapshot_name == name)
            });
            concerned.map(|object| ObjectRef::from_obj(&*object)).collect::<Vec<_>>()
        };
        watches
            .watches(Api::<ApiSnapshot>::all(self.client.clone()), config(), concerned)
            .run(
                move |object, controller: Arc<Controller>| {
                    let waiting = waiting.clone();
                    async move { controller.reconcile(&object, &waiting).await }
                },
                |object, error, _| {
                    tracing::warn!(object = object.meta().name, %error, "the status is tried again");
                    Action::requeue(SOON)
                },
                self,
            )
            .for_each(async |done| {
                if let Err(error) = done {
                    tracing::debug!(%error, "reconcile");
                }
            })
            .await;
    }

    async fn reconcile(
        &self,
        object: &DifferentialSnapshot,
        waiting: &Waiting,
    ) -> Result<Action, kube::Error> {
        let meta = object.meta();
        let (Some(namespace), Some(name)) = (&meta.namespace, &meta.name) else {
            return Ok(Action::await_change());
        };
        if meta.deletion_timestamp.is_some() {
            return Ok(Action::await_change());
        }
        let uid = meta.uid.clone().unwrap_or_default();
        let resolved = resource::resolve(&self.client, &self.driver_name, namespace, &object.spec).await;
        if !matches!(resolved, Err(Unresolved::NotYet(_))) {
            waiting.lock().remove(&uid);
        }
        let (wanted, again) = match resolved {
            Ok(_) => {
                let url = format!("https://{}/{namespace}/{name}", self.service_address);
                (State { state: Some("url-ready".into()), error: None, callback_url: Some(url) }, LATER)
            }
            Err(Unresolved::NotOurs(_)) => return Ok(Action::await_change()),
            Err(Unresolved::Unknown(error)) => return Err(error),
            Err(Unresolved::Never(status)) => (failed(error_of(&status)), LATER),
            Err(Unresolved::NotYet(status)) => {
                let generation = meta.generation.unwrap_or(0);
                let now = Instant::now();
                let since = {
                    // Nothing panics while it holds the lock.
                    let mut waiting = waiting.lock();
                    let begun = waiting.entry(uid).or_insert((generation, now));
                    if begun.0 != generation {
                        *begun = (generation, now);
                    }
                    begun.1
                };
                let left = self.ready_timeout.saturating_sub(since.elapsed());
                match left.is_zero() {
                    true => (failed(format!("Timeout: {}", status.message())), SOON),
                    false => (State { error: Some(error_of(&status)), ..State::default() }, SOON.min(left)),
                }
            }
        };
        if object.status.as_ref() != Some(&wanted) {
            let State { state, error, callback_url } = &wanted;
            tracing::info!(namespace, name, state, error, "status");
            // A merge takes away what is null.
            let patch = Patch::Merge(
                json!({"status": {"state": state, "error": error, "callbackURL": callback_url}}),
            );
            let objects: Api<DifferentialSnapshot> = Api::namespaced(self.client.clone(), namespace);
            let params = PatchParams::default();
            let patched = ask(METRICS.seconds, "status", objects.patch_status(name, &params, &patch)).await;
            match patched {
                // It was deleted meanwhile.
                Err(kube::Error::Api(status)) if status.code == 404 => return Ok(Action::await_change()),
                patched => patched.map(drop)?,
            }
        }
        Ok(Action::requeue(again))
    }
}

fn failed(error: String) -> State {
    State { state: Some("failed".into()), error: Some(error), callback_url: None }
}

fn error_of(status: &Status) -> String {
    format!("{:?}: {}", status.code(), status.message())
}
