//! Through Kubernetes: which server answers for a snapshot, and what it takes to be let in.
//!
//! The SnapshotMetadataService object of the snapshot's driver says where the server is, which CA it is trusted by and which
//! audience a token must be for. It is read for each part of an answer, so a change of it is followed with the next retry.

mod token;

use std::collections::HashMap;
use std::fmt;
use std::path::PathBuf;
use std::time::Duration;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use kube::Api;
use kube::api::DynamicObject;
use kube::core::{ApiResource, GroupVersionKind};
use parking_lot::Mutex;
use proto::answers::Checked;
use proto::kubernetes::snapshot_metadata_client::SnapshotMetadataClient;
use proto::kubernetes::{GetMetadataAllocatedRequest, GetMetadataDeltaRequest};
use tokio::time::timeout;
use tonic::transport::{Certificate, ClientTlsConfig, Endpoint};

use crate::error::Error;
use crate::query::{Policy, Query};
use crate::transport::{MAX_MESSAGE, Messages, configured, messages};
use token::Tokens;

/// Longest answer that is waited for from the API server.
const PATIENCE: Duration = Duration::from_secs(10);

/// How a client shows who it is.
#[derive(Clone, Debug)]
pub struct Options {
    /// Where tokens come from.
    pub token: Token,
    /// How long a requested token is to be valid. The API server takes nothing below ten minutes, and may grant less.
    pub token_lifetime: Duration,
}

impl Default for Options {
    /// Tokens of the caller's own service account, for ten minutes each.
    fn default() -> Self {
        Options { token: Token::OwnAccount, token_lifetime: Duration::from_secs(600) }
    }
}

/// Where the security token of a call comes from. Its account must be allowed to get the VolumeSnapshot.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Token {
    /// Requested for the service account that the `kube::Client` itself uses, as in a pod.
    OwnAccount,
    /// Requested for this service account. The caller must be allowed to create `serviceaccounts/token` for it.
    ServiceAccount {
        /// Its namespace.
        namespace: String,
        /// Its name.
        name: String,
    },
    /// Kept in a file by somebody else, such as kubelet with a projected volume, for the right audience. The file is read
    /// for each part of an answer.
    File(PathBuf),
}

/// A namespace of a cluster.
pub(crate) struct Cluster {
    client: kube::Client,
    namespace: String,
    tokens: Tokens,
    /// The SnapshotMetadataService objects as they were last read, by driver.
    services: Mutex<HashMap<String, Service>>,
}

impl fmt::Debug for Cluster {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // Without tokens.
        f.debug_struct("Cluster").field("namespace", &self.namespace).finish_non_exhaustive()
    }
}

/// What a snapshot's objects say.
struct Snapshot {
    driver: String,
    handle: Option<String>,
}

/// A SnapshotMetadataService object.
#[derive(Clone)]
struct Service {
    address: String,
    audience: String,
    /// In PEM.
    ca: String,
    needs_base: bool,
}

impl Cluster {
    pub fn new(client: kube::Client, namespace: &str, options: Options) -> Self {
        Cluster {
            tokens: Tokens::new(client.clone(), options),
            client,
            namespace: namespace.to_owned(),
            services: Mutex::default(),
        }
    }

    /// Asks, from an offset on. `driver` is the driver of the snapshot, found when it is not known yet.
    pub async fn open(
        &self,
        query: &Query,
        offset: i64,
        driver: &mut Option<String>,
        policy: &Policy,
    ) -> Result<Messages, Error> {
        let driver = match driver {
            Some(driver) => &*driver,
            None => driver.insert(self.snapshot(query.target()).await?.driver),
        };
        let service = self.service(driver).await?;
        let security_token = self.tokens.get(&service.audience).await?;
        let channel = service.connect(driver, policy).await?;
        let mut client = SnapshotMetadataClient::new(channel).max_decoding_message_size(MAX_MESSAGE);
        let (starting_offset, max_results) = (offset, policy.max_results());
        let namespace = self.namespace.clone();
        let answer = match query.clone() {
            Query::Allocated { snapshot: snapshot_name } => {
                let request = GetMetadataAllocatedRequest {
                    security_token,
                    namespace,
                    snapshot_name,
                    starting_offset,
                    max_results,
                };
                client.get_metadata_allocated(request).await.map(messages)
            }
            Query::Delta { base: base_snapshot_id, target: target_snapshot_name } => {
                let request = GetMetadataDeltaRequest {
                    security_token,
                    namespace,
                    base_snapshot_id,
                    target_snapshot_name,
                    starting_offset,
                    max_results,
                };
                client.get_metadata_delta(request).await.map(messages)
            }
        };
        answer.map_err(|status| Error::of_status(query.call(), status))
    }

    /// Takes a new token with the next call.
    pub async fn renew(&self) {
        self.tokens.forget().await;
    }

    /// The CSI handle of a VolumeSnapshot.
    pub async fn handle(&self, name: &str) -> Result<String, Error> {
        let missing = || Error::NotReady {
            what: self.title(name),
            why: "its VolumeSnapshotContent has no snapshotHandle yet",
        };
        self.snapshot(name).await?.handle.ok_or_else(missing)
    }

    /// Whether deltas of a VolumeSnapshot's driver need the VolumeSnapshot of the base.
    pub async fn needs_base(&self, name: &str) -> Result<bool, Error> {
        let driver = self.snapshot(name).await?.driver;
        Ok(self.service(&driver).await?.needs_base)
    }

    fn title(&self, name: &str) -> String {
        format!("VolumeSnapshot {}/{name}", self.namespace)
    }

    async fn snapshot(&self, name: &str) -> Result<Snapshot, Error> {
        let title = self.title(name);
        let snapshots: Api<DynamicObject> =
            Api::namespaced_with(self.client.clone(), &self.namespace, &snapshot_resource("VolumeSnapshot"));
        let snapshot = ask(&title, snapshots.get(name)).await?;
        let content = text(&snapshot, "/status/boundVolumeSnapshotContentName");
        let content = content.ok_or_else(|| Error::NotReady {
            what: title.clone(),
            why: "it is not bound to a VolumeSnapshotContent yet",
        })?;
        let contents: Api<DynamicObject> =
            Api::all_with(self.client.clone(), &snapshot_resource("VolumeSnapshotContent"));
        let what = format!("VolumeSnapshotContent {content} of {title}");
        let content = ask(&what, contents.get(&content)).await?;
        let driver = text(&content, "/spec/driver");
        let driver =
            driver.ok_or_else(|| Error::NotReady { what, why: "it does not name its CSI driver" })?;
        Ok(Snapshot { driver, handle: text(&content, "/status/snapshotHandle") })
    }

    /// The service of a driver as it is now, or as it was last where the API server does not answer.
    async fn service(&self, driver: &str) -> Result<Service, Error> {
        let kept = || self.services.lock();
        let resource = ApiResource::from_gvk_with_plural(
            &GroupVersionKind::gvk("cbt.storage.k8s.io", "v1beta1", "SnapshotMetadataService"),
            "snapshotmetadataservices",
        );
        let services: Api<DynamicObject> = Api::all_with(self.client.clone(), &resource);
        let what = format!("SnapshotMetadataService {driver}");
        match ask(&what, services.get(driver)).await {
            Ok(object) => {
                let service = Service::read(driver, &object)?;
                kept().insert(driver.to_owned(), service.clone());
                Ok(service)
            }
            Err(Error::Missing { .. }) => Err(Error::NoService { driver: driver.to_owned() }),
            Err(error) if error.is_passing() => kept().get(driver).cloned().ok_or(error),
            Err(error) => Err(error),
        }
    }
}

impl Service {
    fn read(driver: &str, object: &DynamicObject) -> Result<Self, Error> {
        let unusable = |problem| Error::BadService { driver: driver.to_owned(), problem };
        let field = |name: &str| text(object, name).filter(|text| !text.is_empty());
        let ca = field("/spec/caCert").ok_or_else(|| unusable("caCert is missing"))?;
        let ca = STANDARD.decode(ca).ok().and_then(|bytes| String::from_utf8(bytes).ok());
        let ca = ca.filter(|text| text.contains("-----BEGIN CERTIFICATE-----"));
        Ok(Service {
            address: field("/spec/address").ok_or_else(|| unusable("address is missing"))?,
            audience: field("/spec/audience").ok_or_else(|| unusable("audience is missing"))?,
            ca: ca.ok_or_else(|| unusable("caCert is not a certificate in PEM"))?,
            // The older version of the object, without this field, knows no service that can do without.
            needs_base: object.data.pointer("/spec/requireBaseSnapshotForDelta").and_then(|it| it.as_bool())
                != Some(false),
        })
    }

    async fn connect(&self, driver: &str, policy: &Policy) -> Result<Checked, Error> {
        let unusable = |_| Error::BadService {
            driver: driver.to_owned(),
            problem: "address is not a host and a port, such as snapshot-metadata.backup.svc:6443",
        };
        let tls = ClientTlsConfig::new().ca_certificate(Certificate::from_pem(&self.ca));
        let endpoint = Endpoint::from_shared(format!("https://{}", self.address)).map_err(unusable)?;
        let endpoint = configured(endpoint, policy).tls_config(tls).map_err(unusable)?;
        endpoint
            .connect()
            .await
            .map(Checked)
            .map_err(|source| Error::Connect { to: self.address.clone(), source: source.into() })
    }
}

fn snapshot_resource(kind: &str) -> ApiResource {
    let plural = format!("{}s", kind.to_lowercase());
    ApiResource::from_gvk_with_plural(&GroupVersionKind::gvk("snapshot.storage.k8s.io", "v1", kind), &plural)
}

fn text(object: &DynamicObject, at: &str) -> Option<String> {
    object.data.pointer(at).and_then(|value| value.as_str()).map(str::to_owned)
}

/// A call to the API server about an object.
async fn ask<T>(what: &str, call: impl Future<Output = Result<T, kube::Error>>) -> Result<T, Error> {
    let failed = |code, source| Error::Api { what: what.to_owned(), code, source };
    match timeout(PATIENCE, call).await {
        Ok(Ok(answer)) => Ok(answer),
        Ok(Err(kube::Error::Api(status))) if status.code == 404 => {
            Err(Error::Missing { what: what.to_owned() })
        }
        Ok(Err(kube::Error::Api(status))) => Err(failed(Some(status.code), status.message.clone().into())),
        Ok(Err(error)) => Err(failed(None, error.into())),
        Err(_) => Err(failed(None, format!("no answer within {} s", PATIENCE.as_secs()).into())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_service_is_used_only_where_everything_is_there() {
        let pem = "-----BEGIN CERTIFICATE-----\n-----END CERTIFICATE-----\n";
        let object = |change: fn(&mut serde_json::Value)| {
            let mut spec = serde_json::json!({
                "address": "host:1", "audience": "it", "caCert": STANDARD.encode(pem), "requireBaseSnapshotForDelta": false,
            });
            change(&mut spec);
            let data = serde_json::json!({"spec": spec});
            DynamicObject { types: None, metadata: Default::default(), data }
        };
        let read = |change| Service::read("driver", &object(change)).map_err(|error| error.to_string());
        let service = read(|_| {}).expect("a service");
        assert_eq!(
            (service.address.as_str(), service.audience.as_str(), service.ca.as_str()),
            ("host:1", "it", pem)
        );
        assert!(!service.needs_base);
        for (change, needs) in [
            ((|spec| spec["requireBaseSnapshotForDelta"] = true.into()) as fn(&mut serde_json::Value), true),
            (|spec| drop(spec.as_object_mut().map(|spec| spec.remove("requireBaseSnapshotForDelta"))), true),
        ] {
            assert_eq!(read(change).ok().map(|service| service.needs_base), Some(needs));
        }
        for (change, words) in [
            ((|spec| spec["address"] = "".into()) as fn(&mut serde_json::Value), "address is missing"),
            (|spec| spec["audience"] = "".into(), "audience is missing"),
            (|spec| spec["caCert"] = "".into(), "caCert is missing"),
            (|spec| spec["caCert"] = "???".into(), "caCert is not a certificate in PEM"),
            (|spec| spec["caCert"] = "bm9uZQ==".into(), "caCert is not a certificate in PEM"),
        ] {
            let error = read(change).err().expect("it cannot be used");
            assert_eq!(error, format!("the SnapshotMetadataService driver cannot be used: {words}"));
        }
    }
}
