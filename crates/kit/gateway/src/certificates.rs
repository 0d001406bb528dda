//! Certificates that look after themselves (`--manage-certificates`): the elected replica keeps a CA and a serving
//! certificate in a Secret, and the SnapshotMetadataService object up to date; every replica shows what the Secret holds.
//!
//! A change is written to the SnapshotMetadataService first and to the Secret second. So a crash between the two leaves one CA too
//! many, never one too few.

use std::sync::Arc;
use std::time::{Duration, Instant};

use base64::Engine;
use k8s_openapi::api::core::v1::Secret;
use kube::api::{DynamicObject, PostParams};
use kube::core::{ApiResource, GroupVersionKind};
use kube::{Api, Client};
use serde_json::{Value, json};
use serve::certificate::{Certificate, Pem};
use serve::certificates::{Error, State, secret};
use tokio::time::{sleep, timeout};

pub use serve::certificates::Lifetimes;

/// In the subjects of authority and certificate.
const OWNER: &str = "deltapath-gateway";
/// Marks a SnapshotMetadataService that this gateway wrote; one without it is a person's, and left alone.
const OURS: (&str, &str) = ("app.kubernetes.io/managed-by", "deltapath-gateway");
/// The field of it that an earlier CRD does not know.
const REQUIRE_BASE: &str = "requireBaseSnapshotForDelta";
/// How long one step may take at the API server.
const PATIENCE: Duration = Duration::from_secs(20);

/// What the certificates are for and where they are kept.
#[derive(Clone)]
pub struct Certificates {
    pub client: Client,
    pub namespace: String,
    pub secret: String,
    /// The SnapshotMetadataService's name: the driver's.
    pub driver: String,
    /// `spec.address` of it: host and port.
    pub address: String,
    /// `spec.audience` of it.
    pub audience: String,
    /// `spec.requireBaseSnapshotForDelta` of it, where the CRD has the field.
    pub require_base: bool,
    pub lifetimes: Lifetimes,
}

#[derive(Default)]
struct Memory {
    /// That the object is somebody else's.
    has_warned: bool,
    /// When `requireBaseSnapshotForDelta` was written, and the CRD did not know it.
    dropped: Option<Instant>,
}

/// Looks from one try to write a field that the CRD did not know to the next.
const LOOKS: u32 = 6;

impl Certificates {
    /// How often things are looked at: often enough to meet every time in [`Lifetimes`].
    fn every(&self) -> Duration {
        let shortest = self.lifetimes.overlap.min(self.lifetimes.leaf / 3);
        (shortest / 8).clamp(Duration::from_millis(50), Duration::from_secs(10))
    }

    fn hosts(&self) -> Vec<String> {
        let host = self.address.rsplit_once(':').map_or(self.address.as_str(), |(host, _)| host);
        let host = host.trim_start_matches('[').trim_end_matches(']').to_owned();
        match host.ends_with(".svc") {
            true => vec![format!("{host}.cluster.local"), host],
            false => vec![host],
        }
    }

    /// Shows what the Secret holds, now and whenever it changes; for ever.
    pub async fn follow(self, shown: Arc<Certificate>) {
        let mut current = None;
        let mut said = String::new();
        loop {
            match timeout(PATIENCE, self.read()).await.unwrap_or(Err(Error::Late)) {
                Ok((_, Some(state))) if current.as_ref() != Some(&state.leaf) => {
                    let what = &format!("the Secret {}", self.secret);
                    let [chain, key] = [&state.leaf.certificate, &state.leaf.key]
                        .map(|text| Pem { what, text: text.as_bytes() });
                    match shown.replace(chain, key) {
                        Ok(()) => tracing::info!(ends = %state.leaf.ends, "a new certificate is in use"),
                        Err(error) => tracing::error!(error = base::report(&error), "show the certificate"),
                    }
                    current = Some(state.leaf);
                }
                Ok(_) => said.clear(),
                Err(error) => {
                    let error = base::report(&error);
                    if error != said {
                        tracing::warn!(error, "read the certificate's Secret");
                    }
                    said = error;
                }
            }
            sleep(self.every()).await;
        }
    }

    /// The elected replica's work; for ever.
    pub async fn manage(&self) {
        let mut memory = Memory::default();
        loop {
            match timeout(PATIENCE, self.step(&mut memory)).await.unwrap_or(Err(Error::Late)) {
                // Perhaps there is more to do.
                Ok(true) => continue,
                Ok(false) => {}
                Err(error) => tracing::warn!(error = base::report(&error), "look after the certificates"),
            }
            sleep(self.every()).await;
        }
    }

    /// Does what is due, if anything. Each change is written in this order:
    /// 1. the object names every authority of the new state, and at a change of authorities those of the old one;
    /// 2. the Secret holds the new state, and servers show it.
    ///
    /// So a crash in between leaves an object that names one authority too many, and never one too few.
    async fn step(&self, memory: &mut Memory) -> Result<bool, Error> {
        let (secret, state) = self.read().await?;
        let (state, is_new) = State::next(state, OWNER, &self.hosts(), self.named(), &self.lifetimes).await?;
        self.name_authorities(&state, memory).await?;
        if is_new {
            secret::write(&self.client, &self.namespace, &self.secret, secret, &state).await?;
        }
        Ok(is_new)
    }

    async fn read(&self) -> Result<(Option<Secret>, Option<State>), Error> {
        secret::read(&self.client, &self.namespace, &self.secret).await
    }

    fn services(&self) -> (Api<DynamicObject>, ApiResource) {
        let kind = GroupVersionKind::gvk("cbt.storage.k8s.io", "v1beta1", "SnapshotMetadataService");
        let resource = ApiResource::from_gvk_with_plural(&kind, "snapshotmetadataservices");
        (Api::all_with(self.client.clone(), &resource), resource)
    }

    /// The authorities that the object names now, if it is ours.
    async fn named(&self) -> Result<Option<String>, Error> {
        let failed = |error| Error::Api("read the SnapshotMetadataService", error);
        let object = self.services().0.get_opt(&self.driver).await.map_err(failed)?;
        let named = object.filter(is_ours).and_then(|object| {
            let named = object.data.pointer("/spec/caCert")?.as_str()?;
            String::from_utf8(base64::engine::general_purpose::STANDARD.decode(named).ok()?).ok()
        });
        Ok(named)
    }

    /// Makes the object say what it should, if it is ours or there is none.
    async fn name_authorities(&self, state: &State, memory: &mut Memory) -> Result<(), Error> {
        let (services, resource) = self.services();
        let bundle = base64::engine::general_purpose::STANDARD.encode(state.bundle());
        let wanted = json!({
            "address": self.address,
            "audience": self.audience,
            "caCert": bundle,
            REQUIRE_BASE: self.require_base,
        });
        let found = services.get_opt(&self.driver).await;
        let found = found.map_err(|error| Error::Api("read the SnapshotMetadataService", error))?;
        let failed = |error| Error::Api("write the SnapshotMetadataService", error);
        let Some(mut object) = found else {
            let mut object = DynamicObject::new(&self.driver, &resource).data(json!({"spec": wanted}));
            object.metadata.labels = Some([(OURS.0.to_owned(), OURS.1.to_owned())].into());
            services.create(&PostParams::default(), &object).await.map_err(failed)?;
            tracing::info!(name = self.driver, "made the SnapshotMetadataService");
            return Ok(());
        };
        if !is_ours(&object) {
            if !std::mem::replace(&mut memory.has_warned, true) {
                tracing::warn!(
                    name = self.driver,
                    "the SnapshotMetadataService has no label {}={}: it is left alone, and its caCert must be ca.crt of the Secret {}",
                    OURS.0,
                    OURS.1,
                    self.secret
                );
            }
            return Ok(());
        }
        let spec = object.data["spec"].clone();
        // A CRD that does not know the last field drops it, until it is replaced by one that does.
        let is_as_wanted = |field: &str| spec[field] == wanted[field];
        let lacks_base = |spec: &Value| spec[REQUIRE_BASE].is_null();
        let was_dropped = memory.dropped.is_some_and(|at| at.elapsed() < LOOKS * self.every());
        if ["address", "audience", "caCert"].into_iter().all(is_as_wanted)
            && (is_as_wanted(REQUIRE_BASE) || lacks_base(&spec) && was_dropped)
        {
            return Ok(());
        }
        object.data["spec"] = wanted;
        let written =
            services.replace(&self.driver, &PostParams::default(), &object).await.map_err(failed)?;
        memory.dropped = lacks_base(&written.data["spec"]).then(Instant::now);
        if written.data["spec"] != spec {
            tracing::info!(name = self.driver, "updated the SnapshotMetadataService");
        }
        Ok(())
    }
}

fn is_ours(object: &DynamicObject) -> bool {
    object.metadata.labels.as_ref().and_then(|labels| labels.get(OURS.0)).is_some_and(|label| label == OURS.1)
}
