//! The cluster's objects as this gateway sees them: VolumeSnapshots, their contents, and snapshot classes, with the few
//! fields that it uses. They are watched, so that a call asks the API server for none.

use std::collections::{HashMap, HashSet};
use std::hash::Hash;
use std::sync::Arc;
use std::time::{Duration, Instant};

use futures_util::{StreamExt, TryStreamExt};
use kube::runtime::WatchStreamExt;
use kube::runtime::watcher::{self, Event};
use kube::{Api, Client, Resource};
use metrics::gauge;
use parking_lot::{Mutex, RwLock};
use serde::de::DeserializeOwned;
use tokio::task::JoinSet;

use wire::{ApiClass, ApiContent, ApiService, ApiSnapshot, keep_content, keep_snapshot};

mod wire;

pub use serve::snapshots::{Content, Snapshot, SnapshotName};

/// How long a watch lasts before it is begun again. So the API server answers each watch at least this often, also where no
/// object changes.
const WATCH_SECONDS: u32 = 30;
/// How long the API server may leave a watch unanswered before what it has shown is used no more. A watch that fails once or
/// twice is begun again earlier.
const STALE: Duration = Duration::from_secs(90);

/// A VolumeSnapshotClass: its parameters.
pub type Class = HashMap<String, String>;

#[derive(Debug)]
pub struct Objects {
    tables: RwLock<Tables>,
    with_audience: bool,
    /// When the API server last gave each watch a good answer.
    answered: Mutex<HashMap<String, Instant>>,
}

#[derive(Debug, Default)]
struct Tables {
    snapshots: Table<SnapshotName, Snapshot>,
    contents: Table<String, Content>,
    /// The contents of this driver with a handle. Two may have the same one: nothing keeps an administrator from it.
    by_handle: HashMap<String, HashSet<String>>,
    classes: Table<String, Class>,
    audience: Table<String, String>,
}

/// Objects by name. While a watch lists all of them again, the earlier ones count until it is done.
#[derive(Debug)]
struct Table<K, V> {
    known: HashMap<K, V>,
    listing: Option<HashMap<K, V>>,
    is_complete: bool,
}

impl<K, V> Default for Table<K, V> {
    fn default() -> Self {
        Table { known: HashMap::new(), listing: None, is_complete: false }
    }
}

impl<K: Eq + Hash, V> Table<K, V> {
    fn take<T>(&mut self, event: Event<T>, keep: impl FnOnce(T) -> (K, V)) {
        match event {
            Event::Init => self.listing = Some(HashMap::new()),
            Event::InitApply(object) => {
                let (key, value) = keep(object);
                self.listing.get_or_insert_default().insert(key, value);
            }
            Event::InitDone => {
                self.known = self.listing.take().unwrap_or_default();
                self.known.shrink_to_fit();
                self.is_complete = true;
            }
            Event::Apply(object) => {
                let (key, value) = keep(object);
                self.known.insert(key, value);
            }
            Event::Delete(object) => {
                self.known.remove(&keep(object).0);
            }
        }
    }
}

impl Objects {
    /// Nothing yet. `with_audience`: the SnapshotMetadataService is watched too.
    pub fn new(with_audience: bool) -> Self {
        Objects { tables: RwLock::default(), with_audience, answered: Mutex::default() }
    }

    /// Watches for ever, in tasks of `tasks`.
    pub fn watch(self: &Arc<Self>, client: &Client, driver: &str, tasks: &mut JoinSet<()>) {
        let all = watcher::Config { timeout: Some(WATCH_SECONDS), ..watcher::Config::default() };
        let one = all.clone().fields(&format!("metadata.name={driver}"));
        let mut watches = Watches { objects: self, client, tasks };
        watches.spawn(all.clone(), |tables, event: Event<ApiSnapshot>| {
            tables.snapshots.take(event, keep_snapshot);
        });
        let own = driver.to_owned();
        watches.spawn(all.clone(), move |tables, event: Event<ApiContent>| {
            tables.take_content(event, &own);
        });
        let own = driver.to_owned();
        watches.spawn(all, move |tables, event: Event<ApiClass>| {
            tables.classes.take(event, |class| {
                // Classes of others are of no use here; their names alone do no harm.
                let parameters = if class.driver == own { class.parameters } else { HashMap::new() };
                (class.metadata.name.unwrap_or_default(), parameters)
            });
        });
        if self.with_audience {
            watches.spawn(one, |tables, event: Event<ApiService>| {
                tables.audience.take(event, |service| {
                    (service.metadata.name.unwrap_or_default(), service.spec.audience)
                });
            });
        }
    }

    /// Why what is known must not be relied on, if that is so. Then calls are `UNAVAILABLE` and `/readyz` fails. If the API server is
    /// unreachable for all replicas, this takes none of them out of the Service, which cannot change then. It takes out a replica
    /// that alone is cut off.
    pub fn missing(&self) -> Option<&'static str> {
        if !self.tables.read().is_complete(self.with_audience) {
            return Some("the VolumeSnapshots are not listed yet");
        }
        let answered = self.answered.lock();
        let is_stale = answered.values().any(|at| at.elapsed() >= STALE);
        is_stale.then_some("the Kubernetes API server has not answered a watch for 90 seconds")
    }

    fn note_answer(&self, plural: &str) {
        let now = jiff::Timestamp::now().as_second();
        gauge!("deltapath_gateway_watch_answered_seconds", "objects" => plural.to_owned()).set(now as f64);
        self.answered.lock().insert(plural.to_owned(), Instant::now());
    }

    /// A snapshot and the content that its status names, as far as they are known.
    pub fn snapshot(&self, name: &SnapshotName) -> (Option<Snapshot>, Option<Content>) {
        let tables = self.tables.read();
        let snapshot = tables.snapshots.known.get(name).cloned();
        let content = snapshot.as_ref().and_then(|snapshot| snapshot.content.as_ref());
        let content = content.and_then(|content| tables.contents.known.get(content)).cloned();
        (snapshot, content)
    }

    pub fn with_handle(&self, handle: &str) -> Vec<Content> {
        let tables = self.tables.read();
        let names = tables.by_handle.get(handle).into_iter().flatten();
        names.filter_map(|name| tables.contents.known.get(name).cloned()).collect()
    }

    pub fn class(&self, name: &str) -> Option<Class> {
        self.tables.read().classes.known.get(name).cloned()
    }

    /// The audience in the SnapshotMetadataService object of that name.
    pub fn audience(&self, name: &str) -> Option<String> {
        self.tables.read().audience.known.get(name).filter(|audience| !audience.is_empty()).cloned()
    }
}

impl Tables {
    fn take_content(&mut self, event: Event<ApiContent>, driver: &str) {
        let changed = match &event {
            Event::Apply(content) | Event::Delete(content) => content.metadata.name.clone(),
            _ => None,
        };
        let is_listed = matches!(event, Event::InitDone);
        if let Some(name) = &changed {
            self.forget_handle(name);
        }
        self.contents.take(event, keep_content);
        let contents = &self.contents.known;
        let indexed = |name: &String, content: &Content| {
            let handle = content.handle.clone().filter(|_| content.driver == driver)?;
            Some((handle, name.clone()))
        };
        if is_listed {
            self.by_handle.clear();
            for (handle, name) in contents.iter().filter_map(|(name, content)| indexed(name, content)) {
                self.by_handle.entry(handle).or_default().insert(name);
            }
        } else if let Some(name) = changed
            && let Some((handle, name)) = contents.get(&name).and_then(|content| indexed(&name, content))
        {
            self.by_handle.entry(handle).or_default().insert(name);
        }
    }

    fn forget_handle(&mut self, name: &str) {
        let handle = self.contents.known.get(name).and_then(|content| content.handle.clone());
        if let Some(handle) = handle
            && let Some(names) = self.by_handle.get_mut(&handle)
        {
            names.remove(name);
            if names.is_empty() {
                self.by_handle.remove(&handle);
            }
        }
    }

    fn is_complete(&self, with_audience: bool) -> bool {
        self.snapshots.is_complete
            && self.contents.is_complete
            && self.classes.is_complete
            && (self.audience.is_complete || !with_audience)
    }
}

struct Watches<'t> {
    objects: &'t Arc<Objects>,
    client: &'t Client,
    tasks: &'t mut JoinSet<()>,
}

impl Watches<'_> {
    fn spawn<K>(
        &mut self,
        config: watcher::Config,
        mut take: impl FnMut(&mut Tables, Event<K>) + Send + 'static,
    ) where
        K: Resource<DynamicType = ()> + Clone + DeserializeOwned + std::fmt::Debug + Send + 'static,
    {
        let objects = self.objects.clone();
        let plural = K::plural(&()).into_owned();
        let api = Api::all(self.noting(plural.clone()));
        self.tasks.spawn(async move {
            let mut events = watcher::watcher(api, config).default_backoff().boxed();
            loop {
                let event = match events.try_next().await {
                    Ok(Some(event)) => event,
                    Ok(None) => return,
                    Err(error) => {
                        tracing::warn!(objects = plural, %error, "the watch is begun again");
                        continue;
                    }
                };
                if matches!(event, Event::InitDone) {
                    tracing::info!(objects = plural, "listed");
                }
                take(&mut objects.tables.write(), event);
            }
        });
    }

    /// The client of one watch, which notes its good answers: each page of a list and each beginning of a watch. The watcher
    /// itself tells of neither where no object changes.
    fn noting(&self, plural: String) -> Client {
        let (client, objects) = (self.client.clone(), self.objects.clone());
        let plural: Arc<str> = plural.into();
        let noted = tower::service_fn(move |request| {
            let (client, objects, plural) = (client.clone(), objects.clone(), plural.clone());
            async move {
                let response = client.send(request).await?;
                if response.status().is_success() {
                    objects.note_answer(&plural);
                }
                Ok::<_, kube::Error>(response)
            }
        });
        Client::new(noted, self.client.default_namespace())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn content(name: &str, handle: &str, driver: &str) -> ApiContent {
        let object = serde_json::json!({
            "metadata": {"name": name},
            "spec": {"driver": driver, "volumeSnapshotRef": {"name": "s", "namespace": "n"}, "source": {}},
            "status": {"snapshotHandle": handle, "readyToUse": true},
        });
        serde_json::from_value(object).expect("a content")
    }

    #[test]
    fn contents_are_found_by_handle_through_every_event() {
        let mut tables = Tables::default();
        let with = |tables: &Tables, handle: &str| tables.by_handle.get(handle).map_or(0, HashSet::len);
        let mut take = |event| {
            tables.take_content(event, "ours");
            (with(&tables, "h1"), with(&tables, "h2"))
        };
        assert_eq!(take(Event::Init), (0, 0));
        assert_eq!(
            take(Event::InitApply(content("a", "h1", "ours"))),
            (0, 0),
            "a list counts when it is whole"
        );
        assert_eq!(take(Event::InitApply(content("b", "h1", "theirs"))), (0, 0));
        assert_eq!(take(Event::InitDone), (1, 0), "another driver's handle is none of ours");
        assert_eq!(take(Event::Apply(content("c", "h1", "ours"))), (2, 0));
        assert_eq!(take(Event::Apply(content("c", "h2", "ours"))), (1, 1), "the old handle is forgotten");
        assert_eq!(take(Event::Delete(content("c", "h2", "ours"))), (1, 0));
        assert_eq!(take(Event::Init), (1, 0), "the old list counts until the new one is whole");
        assert_eq!(take(Event::InitApply(content("d", "h2", "ours"))), (1, 0));
        assert_eq!(take(Event::InitDone), (0, 1));
    }
}
