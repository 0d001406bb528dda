//! `run`: a backup of a claim of a Kubernetes cluster. What is here makes objects, waits for them, and removes them; the
//! backup itself is made by `auto` or `full` in the pod. A backup takes hours, and outlives minutes without the API server.
//! The temporary claim and the pod have names that follow from the claim's, so two runs of one claim never work at once, and
//! what a killed one has left is found again. Snapshots have names of their own, and are found by an annotation.
//! The pod reports by its termination message, so that no right to read logs is needed.

mod ended;
mod objects;

use std::time::{Duration, Instant};

use base::Stop;
use kube::api::{DeleteParams, DynamicObject, ListParams, Patch, PatchParams, PostParams, Preconditions};
use kube::config::{Config, KubeConfigOptions, Kubeconfig};
use kube::core::{ApiResource, GroupVersionKind};
use kube::{Api, Client};
use parking_lot::Mutex;
use serde_json::{Value, json};

pub use objects::CLAIMED;

use crate::arguments::{Cluster, RunArguments};
use crate::error::{Error, Result, refused};
use crate::repository::About;
use crate::repository::names::random_digits;
use crate::wait::unless;
use ended::Ended;
use objects::{MANAGED_BY, OF_RUN, OURS, another, is_managed, not_of_a_run};
use shell::plain;

/// Between two looks at an object.
const POLL: Duration = Duration::from_millis(500);
/// How long what is deleted may take to go: a pod has 30 s to end.
const GOING: Duration = Duration::from_secs(90);
/// How many pods that were killed are replaced.
const REPLACED: usize = 3;
/// Says of which claim a snapshot of ours is. One that a user keeps is not ours any more.
const OF_CLAIM: &str = "cbt-backup/claim";
/// Says that a snapshot is the base of the next backup.
const BASE: &str = "cbt-backup/base";
/// What a snapshot of a filesystem needs before a claim of it may be a device.
const MODE_CHANGE: &str = "snapshot.storage.kubernetes.io/allow-volume-mode-change";

/// A client of the API server that the kubeconfig names, or of the pod's own cluster.
pub async fn api(cluster: &Cluster) -> Result<Client> {
    let Cluster { kubeconfig, context } = cluster.clone();
    let options = KubeConfigOptions { context, ..KubeConfigOptions::default() };
    // In a task of its own, so that a signal ends the wait for a FIFO or a plugin that does not answer.
    let client = tokio::spawn(async move {
        let config = match kubeconfig {
            Some(path) => Config::from_custom_kubeconfig(Kubeconfig::read_from(path)?, &options).await?,
            None if options.context.is_some() => Config::from_kubeconfig(&options).await?,
            None => Config::infer().await?,
        };
        Ok::<_, Box<dyn std::error::Error + Send + Sync>>(Client::try_from(config)?)
    });
    client.await.unwrap_or_else(|error| Err(error.into())).map_err(|error| {
        let why = cluster.explain(&base::report(&*error));
        refused!("there is no way to the Kubernetes API server: {why}")
    })
}

/// Prints progress.
fn tell(what: &str) {
    if shell::tells_progress() {
        shell::say!("cbt-backup: {what}");
    }
}

/// Makes a backup of a claim, or only cleans up. Nothing but the backup and its base is left, however it ends.
pub async fn run(arguments: &RunArguments, repository: &str, stop: &Stop) -> Result<Option<About>> {
    let client = unless(|| stop.check().is_err(), api(&arguments.cluster)).await??;
    let namespace = arguments.namespace.clone().unwrap_or_else(|| client.default_namespace().to_owned());
    let name = format!("cbt-backup-{}", arguments.pvc);
    let id = random_digits(16)?;
    let run = Run { id, name, client, namespace, arguments, stop, created: Mutex::default() };
    if arguments.clean_up {
        let mut done = run.remove(PODS, &run.name, is_managed).await;
        done = done.and(run.remove(CLAIMS, &run.name, is_managed).await);
        for snapshot in run.snapshots(false).await? {
            done = done.and(run.remove(SNAPSHOTS, &snapshot, is_managed).await);
        }
        return done.map(|()| None);
    }
    let snapshot = format!("{}-{}", run.name, jiff::Timestamp::now().strftime("%Y%m%d-%H%M%S"));
    let made = run.back_up(&snapshot, repository).await;
    // A Ctrl-C from here on is a second one, which ends the program at once.
    let cleaned = run.clean_up(&snapshot, made.as_ref().ok()).await;
    match (made, cleaned) {
        (Ok(made), Ok(())) => Ok(Some(made.about)),
        (Ok(_), Err(error)) => Err(error),
        (Err(error), cleaned) => {
            if let Err(cleaned) = cleaned {
                let why = plain(&base::report(&cleaned));
                shell::say!("cbt-backup: {why}; `cbt-backup run --clean-up` tries again");
            }
            Err(error)
        }
    }
}

/// A kind of object: group, version, kind, and plural.
type Resource = (&'static str, &'static str, &'static str, &'static str);

const PODS: Resource = ("", "v1", "Pod", "pods");
const CLAIMS: Resource = ("", "v1", "PersistentVolumeClaim", "persistentvolumeclaims");
const VOLUMES: Resource = ("", "v1", "PersistentVolume", "persistentvolumes");
const SNAPSHOTS: Resource = ("snapshot.storage.k8s.io", "v1", "VolumeSnapshot", "volumesnapshots");
const CONTENTS: Resource =
    ("snapshot.storage.k8s.io", "v1", "VolumeSnapshotContent", "volumesnapshotcontents");
const SERVICES: Resource =
    ("cbt.storage.k8s.io", "v1beta1", "SnapshotMetadataService", "snapshotmetadataservices");

struct Run<'r> {
    /// Of no other run.
    id: String,
    client: Client,
    namespace: String,
    /// Of the temporary claim and of the pod.
    name: String,
    arguments: &'r RunArguments,
    stop: &'r Stop,
    /// What this run has made, or may have: the answer can be lost.
    created: Mutex<Vec<(Resource, String)>>,
}

/// What a run has made.
struct Made {
    about: About,
    /// The driver gives no delta from a snapshot whose VolumeSnapshot is gone.
    needs_snapshot: bool,
}

/// Whether an API server may answer in a moment: there was no answer, or one that it is busy or broken. What is not a request
/// never becomes one.
fn is_passing(error: &kube::Error) -> bool {
    match error {
        kube::Error::Api(status) => matches!(status.code, 408 | 429 | 500..),
        kube::Error::BuildRequest(_) | kube::Error::HttpError(_) => false,
        _ => true,
    }
}

/// Asks an API server until it answers, or the command is stopped between two tries. Patience begins with each question, so it
/// is counted from the last good answer.
async fn asked<T>(
    patience: Duration,
    stop: &Stop,
    ask: impl AsyncFn() -> kube::Result<T>,
) -> kube::Result<T> {
    let until = Instant::now() + patience;
    let mut is_said = false;
    loop {
        match ask().await {
            Err(error) if is_passing(&error) && Instant::now() < until && stop.check().is_ok() => {
                if !std::mem::replace(&mut is_said, true) {
                    let (seconds, error) = (patience.as_secs(), base::report(&error));
                    tracing::warn!("the API server is asked again for at most {seconds} s: {error}");
                }
            }
            answer => return answer,
        }
        tokio::time::sleep(POLL).await;
    }
}

fn text<'v>(object: &'v DynamicObject, at: &str) -> Option<&'v str> {
    object.data.pointer(at).and_then(Value::as_str)
}

impl Run<'_> {
    fn objects(&self, (group, version, kind, plural): Resource) -> Api<DynamicObject> {
        let resource =
            ApiResource::from_gvk_with_plural(&GroupVersionKind::gvk(group, version, kind), plural);
        match kind {
            "PersistentVolume" | "VolumeSnapshotContent" | "SnapshotMetadataService" => {
                Api::all_with(self.client.clone(), &resource)
            }
            _ => Api::namespaced_with(self.client.clone(), &self.namespace, &resource),
        }
    }

    fn failed(&self, operation: &'static str, kind: Resource, name: &str) -> impl Fn(kube::Error) -> Error {
        let what = format!("{} {name}", kind.2);
        move |source| Error::Kubernetes { operation, what: what.clone(), source: Box::new(source) }
    }

    async fn get(&self, kind: Resource, name: &str) -> Result<DynamicObject> {
        let objects = self.objects(kind);
        self.answered(async || objects.get(name).await).await?.map_err(self.failed("get", kind, name))
    }

    fn patience(&self) -> Duration {
        self.arguments.patience
    }

    /// Asks the API server until it answers, or the command is stopped.
    async fn answered<T>(&self, ask: impl AsyncFn() -> kube::Result<T>) -> Result<kube::Result<T>> {
        unless(|| self.stop.check().is_err(), asked(self.patience(), self.stop, ask)).await
    }

    /// The same while cleaning up: it continues after the command was stopped, but for no longer than [`GOING`].
    async fn insist<T>(&self, ask: impl AsyncFn() -> kube::Result<T>) -> kube::Result<T> {
        asked(GOING.min(self.patience()), &Stop::default(), ask).await
    }

    /// Makes an object. A request on its way is not given up, not even with Ctrl-C: it might be carried out after the clean-up.
    async fn create(&self, kind: Resource, mut object: Value) -> Result<()> {
        let name = object["metadata"]["name"].as_str().unwrap_or_default().to_owned();
        object["metadata"]["annotations"][OF_RUN] = json!(self.id);
        let object =
            serde_json::from_value(object).map_err(|error| refused!("{} {name}: {error}", kind.2))?;
        let created = || self.created.lock();
        created().push((kind, name.clone()));
        let objects = self.objects(kind);
        let make = async || objects.create(&PostParams::default(), &object).await;
        let made = asked(self.patience(), self.stop, make).await;
        if matches!(&made, Err(error) if !is_passing(error)) {
            // It was refused, or may be of another.
            created().pop();
        }
        match made {
            Ok(_) => Ok(()),
            Err(kube::Error::Api(status)) if status.code == 409 => {
                match self.look(kind, &name).await? {
                    // The answer to a request before the last one was lost.
                    Some(there) if self.has_made(&there) => {
                        created().push((kind, name));
                        Ok(())
                    }
                    Some(there) => Err(another(kind.2, &there)),
                    None => Err(self.failed("create", kind, &name)(kube::Error::Api(status))),
                }
            }
            Err(error) => {
                self.stop.check()?;
                Err(self.failed("create", kind, &name)(error))
            }
        }
    }

    async fn look(&self, kind: Resource, name: &str) -> Result<Option<DynamicObject>> {
        let objects = self.objects(kind);
        let there = self.answered(async || objects.get_opt(name).await).await?;
        there.map_err(self.failed("get", kind, name))
    }

    /// Deletes an object that is ours, and waits until it is gone. Another of its name, which may come at any time, is not
    /// touched.
    async fn remove(
        &self,
        kind: Resource,
        name: &str,
        is_ours: impl Fn(&DynamicObject) -> bool,
    ) -> Result<()> {
        let objects = self.objects(kind);
        let look = async || {
            let there = self.insist(async || objects.get_opt(name).await).await;
            there.map_err(self.failed("get", kind, name))
        };
        let Some(there) = look().await? else { return Ok(()) };
        match (is_managed(&there), is_ours(&there)) {
            (false, _) => return Err(refused!("{} {name} is not deleted: {}", kind.2, not_of_a_run())),
            (_, false) => return Ok(()),
            _ => {}
        }
        let uid = there.metadata.uid;
        let preconditions = Some(Preconditions { uid: uid.clone(), resource_version: None });
        let deletion = DeleteParams { preconditions, ..DeleteParams::default() };
        match self.insist(async || objects.delete(name, &deletion).await).await {
            Ok(_) => {}
            // It is gone, or another has its name by now.
            Err(kube::Error::Api(status)) if matches!(status.code, 404 | 409) => return Ok(()),
            Err(error) => return Err(self.failed("delete", kind, name)(error)),
        }
        let until = Instant::now() + GOING;
        while look().await?.is_some_and(|there| there.metadata.uid == uid) {
            if Instant::now() > until {
                return Err(refused!("{} {name} is deleted and still there after {GOING:?}", kind.2));
            }
            tokio::time::sleep(POLL).await;
        }
        Ok(())
    }

    /// The snapshots of the claim that runs have made, with or without bases.
    async fn snapshots(&self, with_bases: bool) -> Result<Vec<String>> {
        let ours = ListParams::default().labels(&format!("{MANAGED_BY}={OURS}"));
        let objects = self.objects(SNAPSHOTS);
        let list = self.insist(async || objects.list(&ours).await).await;
        let list = list.map_err(self.failed("list", SNAPSHOTS, ""))?;
        let is_of_claim = |object: &DynamicObject| {
            let annotation = |name| object.metadata.annotations.as_ref().and_then(|all| all.get(name));
            annotation(OF_CLAIM) == Some(&self.arguments.pvc) && (with_bases || annotation(BASE).is_none())
        };
        Ok(list.items.into_iter().filter(is_of_claim).filter_map(|object| object.metadata.name).collect())
    }

    async fn back_up(&self, snapshot: &str, repository: &str) -> Result<Made> {
        let claim = self.get(CLAIMS, &self.arguments.pvc).await?;
        for kind in [PODS, CLAIMS] {
            if let Some(there) = self.look(kind, &self.name).await? {
                return Err(another(kind.2, &there));
            }
        }
        let placement = self.placement(&claim).await?;
        self.create(SNAPSHOTS, self.snapshot(snapshot)).await?;
        let (content, size) = self.ready(snapshot).await?;
        tell(&format!("VolumeSnapshot {snapshot} is ready"));
        if text(&claim, "/spec/volumeMode") != Some("Block") {
            self.allow_device(&content).await?;
        }
        let size = size
            .or_else(|| text(&claim, "/status/capacity/storage").map(str::to_owned))
            .ok_or_else(|| refused!("nothing says how large {snapshot} is"))?;
        let storage_class = text(&claim, "/spec/storageClassName");
        self.create(CLAIMS, self.source_claim(snapshot, &size, storage_class)).await?;
        let mut killed = 0;
        let about = loop {
            self.create(PODS, self.pod(snapshot, repository, placement.clone(), killed > 0)).await?;
            match self.finished().await? {
                Ended::Made(about) => break *about,
                Ended::Killed(why) if killed < REPLACED => {
                    tell(&format!("{why}: another pod continues the backup"));
                    self.remove(PODS, &self.name, |there| self.has_made(there)).await?;
                    self.stop.check()?;
                    self.created.lock().retain(|(kind, _)| *kind != PODS);
                    killed += 1;
                }
                Ended::Killed(why) => {
                    return Err(refused!("{why}. {REPLACED} pods before it were killed too"));
                }
            }
        };
        // The backup is made, whatever comes now.
        let needs_snapshot = self.needs_snapshot(&content).await.unwrap_or_else(|error| {
            tracing::warn!("VolumeSnapshot {snapshot} stays: {}", base::report(&error));
            true
        });
        Ok(Made { about, needs_snapshot })
    }

    /// Removes the pod, the temporary claim, and the snapshots that are not a base.
    async fn clean_up(&self, snapshot: &str, made: Option<&Made>) -> Result<()> {
        let is_base = made.is_some_and(|made| made.needs_snapshot);
        let created = std::mem::take(&mut *self.created.lock());
        let mut done = Ok(());
        for (kind, name) in created.into_iter().rev() {
            let stays = kind == SNAPSHOTS && (is_base || self.arguments.keep_snapshot);
            if !stays {
                done = done.and(self.remove(kind, &name, |there| self.has_made(there)).await);
            }
        }
        if made.is_some() && !self.arguments.keep_snapshot {
            if is_base {
                let patch = Patch::Merge(json!({"metadata": {"annotations": {BASE: "true"}}}));
                let objects = self.objects(SNAPSHOTS);
                let marked = self
                    .insist(async || objects.patch(snapshot, &PatchParams::default(), &patch).await)
                    .await;
                marked.map_err(self.failed("annotate", SNAPSHOTS, snapshot))?;
            }
            for before in self.snapshots(true).await?.into_iter().filter(|name| name != snapshot) {
                done = done.and(self.remove(SNAPSHOTS, &before, is_managed).await);
            }
        }
        done
    }

    /// Looks at an object until something can be said about it, or `patience` is over: `late` says what then.
    async fn until<T>(
        &self,
        kind: Resource,
        name: &str,
        mut look: impl FnMut(&DynamicObject, bool) -> Option<Result<T>>,
    ) -> Result<T> {
        let until = Instant::now() + self.patience();
        loop {
            self.stop.check()?;
            let object = self.get(kind, name).await?;
            if let Some(found) = look(&object, Instant::now() > until) {
                return found;
            }
            tokio::time::sleep(POLL).await;
        }
    }

    /// Waits until the snapshot is ready: its content, and its size where the driver says it.
    async fn ready(&self, snapshot: &str) -> Result<(String, Option<String>)> {
        self.until(SNAPSHOTS, snapshot, |object, is_late| {
            let content = text(object, "/status/boundVolumeSnapshotContentName");
            let is_ready = object.data.pointer("/status/readyToUse") == Some(&Value::Bool(true));
            if let (true, Some(content)) = (is_ready, content) {
                return Some(Ok((
                    content.to_owned(),
                    text(object, "/status/restoreSize").map(str::to_owned),
                )));
            }
            let why = text(object, "/status/error/message").unwrap_or("the snapshot controller says nothing");
            is_late.then(|| {
                Err(refused!(
                    "VolumeSnapshot {snapshot} is not ready after {} s: {why}",
                    self.arguments.patience.as_secs_f64()
                ))
            })
        })
        .await
    }

    /// Lets a claim have the snapshot of a filesystem as a device.
    async fn allow_device(&self, content: &str) -> Result<()> {
        let patch = Patch::Merge(json!({"metadata": {"annotations": {MODE_CHANGE: "true"}}}));
        let objects = self.objects(CONTENTS);
        let done = self.answered(async || objects.patch(content, &PatchParams::default(), &patch).await);
        match done.await? {
            Ok(_) => Ok(()),
            Err(kube::Error::Api(status)) if status.code == 403 => Err(refused!(
                "{} is a Filesystem claim. To read its snapshot as a device, VolumeSnapshotContent {content} needs the annotation \
                 {MODE_CHANGE}: \"true\", which this account may not set: give it the right to patch volumesnapshotcontents",
                self.arguments.pvc
            )),
            Err(error) => Err(self.failed("annotate", CONTENTS, content)(error)),
        }
    }

    /// The nodes of the claim's volume: what is restored from its snapshot is there too.
    async fn placement(&self, claim: &DynamicObject) -> Result<Option<Value>> {
        let Some(volume) = text(claim, "/spec/volumeName") else {
            return Err(refused!(
                "the claim {} is bound to no volume yet: start a pod that uses it",
                self.arguments.pvc
            ));
        };
        match self.get(VOLUMES, volume).await {
            Ok(volume) => Ok(volume.data.pointer("/spec/nodeAffinity/required").cloned()),
            Err(Error::Kubernetes { source, .. }) if matches!(&*source, kube::Error::Api(status) if status.code == 403) =>
            {
                tracing::warn!("the nodes of volume {volume} are not known: this account may not get it");
                Ok(None)
            }
            Err(error) => Err(error),
        }
    }

    /// Whether the driver of a content needs the VolumeSnapshot of a base. Where no object says so, it is safe to keep it.
    async fn needs_snapshot(&self, content: &str) -> Result<bool> {
        let content = self.get(CONTENTS, content).await?;
        let driver = text(&content, "/spec/driver").unwrap_or_default();
        let services = self.objects(SERVICES);
        let service = self.answered(async || services.get_opt(driver).await).await?;
        let service = service.map_err(self.failed("get", SERVICES, driver))?;
        let says = |object: DynamicObject| {
            object.data.pointer("/spec/requireBaseSnapshotForDelta").and_then(Value::as_bool)
        };
        Ok(service.and_then(says).unwrap_or(true))
    }
}

#[cfg(test)]
mod tests {
    use kube::core::Status;

    use super::*;

    #[test]
    fn an_api_server_that_is_busy_or_broken_is_asked_again() {
        let passes = |code| {
            let status = Status { code, ..Status::default() };
            is_passing(&kube::Error::Api(Box::new(status)))
        };
        assert!([408, 429, 500, 502, 503, 504].into_iter().all(passes));
        assert!(![400, 401, 403, 404, 409, 422].into_iter().any(passes));
        // What cannot be asked at all cannot be asked again.
        let empty = kube::core::request::Error::Validation("a name is empty".into());
        assert!(!is_passing(&kube::Error::BuildRequest(empty)));
    }
}
