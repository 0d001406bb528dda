//! One of several replicas does a piece of work: the holder of a Lease object (`coordination.k8s.io/v1`).
//!
//! Clocks of two machines are never compared. A replica that waits takes the lease over when it has not *seen* it change
//! for as long as the lease says, and for twice as long as its own ones say at most; the holder gives its work up a while before that, counted from when it began its last
//! renewal that succeeded. So two never work at once, as long as their clocks run at about the same speed.

use std::time::Duration;

use jiff::Timestamp;
use k8s_openapi::api::coordination::v1::{Lease as LeaseObject, LeaseSpec};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{MicroTime, ObjectMeta};
use kube::api::PostParams;
use kube::{Api, Client};
use tokio::time::{Instant, sleep, timeout, timeout_at};

/// How long each step takes.
#[derive(Clone, Copy, Debug)]
pub struct Times {
    /// How long a lease is honoured that no replica renews. At least a second.
    pub duration: Duration,
    /// When the holder gives up that cannot renew. Less than `duration`.
    pub deadline: Duration,
    /// How long to wait between two tries, to acquire or to renew.
    pub retry: Duration,
}

impl Default for Times {
    fn default() -> Self {
        Times {
            duration: Duration::from_secs(15),
            deadline: Duration::from_secs(10),
            retry: Duration::from_secs(2),
        }
    }
}

/// A lease, and who would hold it.
#[derive(Clone)]
pub struct Lease {
    leases: Api<LeaseObject>,
    name: String,
    holder: String,
    times: Times,
}

/// What was last seen of the object, and since when it is as it is, by our own clock.
struct Seen {
    holder: String,
    renewed: Option<Timestamp>,
    since: Instant,
}

impl Lease {
    /// The lease `name` of a namespace, for a replica with the name `holder`.
    pub fn new(client: Client, namespace: &str, name: &str, holder: &str, times: Times) -> Self {
        Lease {
            leases: Api::namespaced(client, namespace),
            name: name.to_owned(),
            holder: holder.to_owned(),
            times,
        }
    }

    /// Waits until this replica holds the lease, does the work as long as it does, and begins again; for ever. Work under
    /// way is dropped when the lease is lost; work that ends is begun again.
    pub async fn lead<W: Future>(&self, mut work: impl FnMut() -> W) {
        let mut seen = None;
        loop {
            let begun = Instant::now();
            match timeout(self.times.deadline, self.acquire(&mut seen)).await {
                Ok(Ok(true)) => {
                    tracing::info!(lease = self.name, holder = self.holder, "elected");
                    tokio::select! {
                        // First: where both are due after a pause of the process, the work must not continue.
                        biased;
                        () = self.keep(begun) => {}
                        _ = work() => tracing::warn!(lease = self.name, "the elected replica's work has ended"),
                    }
                    tracing::warn!(lease = self.name, holder = self.holder, "no longer elected");
                    seen = None;
                }
                Ok(Ok(false)) => {}
                Ok(Err(error)) => tracing::warn!(lease = self.name, %error, "acquire the lease"),
                Err(_) => tracing::warn!(lease = self.name, "the API server does not answer about the lease"),
            }
            sleep(self.times.retry).await;
        }
    }

    /// Renews until that fails for too long or another holds the lease.
    async fn keep(&self, acquired: Instant) {
        let mut renewed = acquired;
        loop {
            sleep(self.times.retry).await;
            let begun = Instant::now();
            let deadline = renewed + self.times.deadline;
            match timeout_at(deadline, self.renew()).await {
                Ok(Ok(true)) => renewed = begun,
                Ok(Ok(false)) => return,
                Ok(Err(error)) if Instant::now() < deadline => {
                    tracing::warn!(lease = self.name, %error, "renew the lease");
                }
                Ok(Err(_)) | Err(_) => return,
            }
        }
    }

    /// One try. Conflicts are a `false`: another was quicker.
    async fn acquire(&self, seen: &mut Option<Seen>) -> kube::Result<bool> {
        let Some(object) = self.leases.get_opt(&self.name).await? else {
            let metadata = ObjectMeta { name: Some(self.name.clone()), ..Default::default() };
            let spec = Some(self.spec(None, 0));
            let created = self.leases.create(&PostParams::default(), &LeaseObject { metadata, spec }).await;
            return won(created);
        };
        let spec = object.spec.clone().unwrap_or_default();
        let holder = spec.holder_identity.clone().unwrap_or_default();
        let renewed = spec.renew_time.as_ref().map(|time| time.0);
        let is_new = seen.as_ref().is_none_or(|seen| (&seen.holder, seen.renewed) != (&holder, renewed));
        if is_new {
            *seen = Some(Seen { holder: holder.clone(), renewed, since: Instant::now() });
        }
        let since = seen.as_ref().map_or_else(Instant::now, |seen| seen.since);
        let duration = u64::try_from(spec.lease_duration_seconds.unwrap_or(0)).unwrap_or(0);
        // Ours all say the same; what a stranger has written keeps no replica waiting for years.
        let duration = Duration::from_secs(duration).min(2 * self.times.duration);
        let is_free = holder.is_empty() || holder == self.holder;
        if !is_free && since.elapsed() < duration {
            return Ok(false);
        }
        self.take(object, &spec).await
    }

    /// Gives the lease back if this replica holds it, so that another need not wait until it runs out. For the end of a process:
    /// [`Lease::lead`] must have been dropped, for it would take the lease again.
    pub async fn release(&self) {
        match timeout(self.times.retry, self.give_back()).await {
            Ok(Ok(())) => {}
            Ok(Err(error)) => tracing::warn!(lease = self.name, %error, "give the lease back"),
            Err(_) => tracing::warn!(lease = self.name, "the API server does not answer about the lease"),
        }
    }

    async fn give_back(&self) -> kube::Result<()> {
        loop {
            let Some(object) = self.leases.get_opt(&self.name).await? else { return Ok(()) };
            let mut spec = object.spec.clone().unwrap_or_default();
            if spec.holder_identity.as_deref() != Some(&self.holder) {
                return Ok(());
            }
            spec.holder_identity = None;
            let released = LeaseObject { spec: Some(spec), ..object };
            // A conflict is a renewal that was under way.
            if won(self.leases.replace(&self.name, &PostParams::default(), &released).await)? {
                tracing::info!(lease = self.name, holder = self.holder, "gave the lease back");
                return Ok(());
            }
        }
    }

    async fn renew(&self) -> kube::Result<bool> {
        let object = self.leases.get(&self.name).await?;
        let spec = object.spec.clone().unwrap_or_default();
        match spec.holder_identity.as_deref() == Some(&self.holder) {
            true => self.take(object, &spec).await,
            false => Ok(false),
        }
    }

    /// Writes this replica into the object, unless the object has changed since it was read.
    async fn take(&self, object: LeaseObject, before: &LeaseSpec) -> kube::Result<bool> {
        let is_ours = before.holder_identity.as_deref() == Some(&self.holder);
        let transitions = before.lease_transitions.unwrap_or(0).saturating_add(i32::from(!is_ours));
        let acquired = before.acquire_time.clone().filter(|_| is_ours);
        let taken = LeaseObject { spec: Some(self.spec(acquired, transitions)), ..object };
        won(self.leases.replace(&self.name, &PostParams::default(), &taken).await)
    }

    fn spec(&self, acquired: Option<MicroTime>, transitions: i32) -> LeaseSpec {
        let now = MicroTime(Timestamp::now());
        LeaseSpec {
            holder_identity: Some(self.holder.clone()),
            lease_duration_seconds: Some(self.times.duration.as_secs().max(1) as i32),
            acquire_time: Some(acquired.unwrap_or_else(|| now.clone())),
            renew_time: Some(now),
            lease_transitions: Some(transitions),
            ..Default::default()
        }
    }
}

fn won(written: kube::Result<LeaseObject>) -> kube::Result<bool> {
    match written {
        Ok(_) => Ok(true),
        Err(kube::Error::Api(status)) if status.code == 409 => Ok(false),
        Err(error) => Err(error),
    }
}
