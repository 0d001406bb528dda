//! DriverDiscovery: by which a driver's cbt-http is found. The object, its address, a call to that address, and the controller
//! that keeps its status.

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use k8s_openapi::ClusterResourceScope;
use kube::api::{ListParams, Patch, PatchParams};
use kube::{Api, Client, Resource};
use parking_lot::Mutex;
use reqwest::{Method, StatusCode, Url};
use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject;
use rustls::{ClientConfig as TlsConfig, RootCertStore};
use serde::Deserialize;
use serde_json::{Value, json};
use serve::object;
use serve::questions::ask;

use super::wire;
use crate::server::METRICS;

/// Its API group: that of the aggregated API server holds no stored objects at that version.
pub const GROUP: &str = "discovery.cbt.storage.k8s.io";
pub const VERSION: &str = "v1alpha1";
pub const PLURAL: &str = "driverdiscoveries";
/// Under which the data of a block is asked for, behind the address of the object.
pub const DATA: &str = "/data";
/// The port where a service names none.
const PORT: u16 = 443;
/// How often the status of all objects is brought up to date.
const EVERY: Duration = Duration::from_secs(5);
/// How long cbt-http may take to say that it is there.
const PATIENCE: Duration = Duration::from_secs(5);
const MAX_ANSWER: usize = 16 << 20;

object!(DriverDiscovery, "DriverDiscovery", PLURAL, VERSION, GROUP, ClusterResourceScope, {
    spec: Spec,
    status: Option<State>,
});

/// What cbt-http publishes.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Spec {
    pub driver_name: String,
    pub client_config: ClientConfig,
}

/// Where a cbt-http is: at a URL or behind a Service.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct ClientConfig {
    pub url: Option<String>,
    pub service: Option<Service>,
    /// Base64 of PEM.
    pub ca_bundle: String,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub struct Service {
    pub namespace: String,
    pub name: String,
    pub path: Option<String>,
    pub port: Option<u16>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct State {
    /// `ready` or `failed`.
    pub state: Option<String>,
    pub error: Option<String>,
}

impl ClientConfig {
    pub fn address(&self) -> Result<Url, String> {
        let text = match (&self.url, &self.service) {
            (Some(url), None) => url.clone(),
            (None, Some(Service { namespace, name, path, port })) => {
                let path = path.as_deref().unwrap_or_default().trim_start_matches('/');
                format!("https://{name}.{namespace}.svc:{}/{path}", port.unwrap_or(PORT))
            }
            _ => return Err("clientConfig must have either url or service".into()),
        };
        let url = Url::parse(&text).map_err(|error| format!("{text:?} is not a URL: {error}"))?;
        match url.scheme() {
            "https" => Ok(url),
            _ => Err(format!("{text:?} is not an https URL")),
        }
    }

    fn roots(&self) -> Result<RootCertStore, String> {
        let pem = STANDARD.decode(self.ca_bundle.trim());
        let pem = pem.map_err(|error| format!("clientConfig.caBundle is not base64: {error}"))?;
        let mut roots = RootCertStore::empty();
        for certificate in CertificateDer::pem_slice_iter(&pem) {
            let certificate =
                certificate.map_err(|error| format!("clientConfig.caBundle is not PEM: {error}"))?;
            roots.add(certificate).map_err(|error| format!("clientConfig.caBundle: {error}"))?;
        }
        match roots.is_empty() {
            true => Err("clientConfig.caBundle has no certificate".into()),
            false => Ok(roots),
        }
    }
}

/// The object of a driver: the oldest, where there are several.
pub async fn find(client: &Client, driver: &str) -> kube::Result<Option<DriverDiscovery>> {
    Ok(all(client).await?.into_iter().find(|object| object.spec.driver_name == driver))
}

/// All objects, the oldest first.
async fn all(client: &Client) -> kube::Result<Vec<DriverDiscovery>> {
    let objects: Api<DriverDiscovery> = Api::all(client.clone());
    let params = ListParams::default();
    let mut all = ask(METRICS.seconds, "DriverDiscovery", objects.list(&params)).await?.items;
    let age = |object: &DriverDiscovery| {
        let meta = object.meta();
        (meta.creation_timestamp.as_ref().map(|time| time.0), meta.name.clone())
    };
    all.sort_by_key(age);
    Ok(all)
}

/// Why a cbt-http has given no answer.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("its DriverDiscovery cannot be used: {0}")]
    Object(String),
    #[error("the aggregated API server has no token for cbt-http: see its log")]
    Token,
    #[error("cbt-http does not answer: try again")]
    Away,
    #[error("{reason}: {message}")]
    Refused { reason: String, message: String },
    #[error("invalid response from cbt-http: {0}")]
    Broken(String),
}

/// Calls of cbt-http, with this server's token.
pub struct Callers {
    /// The token's file: read with each call, for the kubelet replaces it.
    pub token: PathBuf,
    /// A client for each CA bundle.
    pub clients: Mutex<HashMap<String, reqwest::Client>>,
}

impl Callers {
    fn client(&self, config: &ClientConfig) -> Result<reqwest::Client, Error> {
        // Nothing panics while it holds the lock.
        let mut clients = self.clients.lock();
        if let Some(client) = clients.get(&config.ca_bundle) {
            return Ok(client.clone());
        }
        let roots = config.roots().map_err(Error::Object)?;
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let tls = TlsConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .map_err(|error| Error::Object(error.to_string()))?
            .with_root_certificates(roots)
            .with_no_client_auth();
        let client = reqwest::Client::builder()
            .tls_backend_preconfigured(tls)
            .https_only(true)
            .redirect(reqwest::redirect::Policy::none())
            .connect_timeout(PATIENCE)
            .build()
            .map_err(|error| Error::Object(error.to_string()))?;
        // Bundles that are no longer in use are few: certificates change seldom.
        if clients.len() >= 64 {
            clients.clear();
        }
        Ok(clients.entry(config.ca_bundle.clone()).or_insert(client).clone())
    }

    pub async fn list(
        &self,
        config: &ClientConfig,
        request: &wire::Request,
    ) -> Result<wire::Response, Error> {
        let address = config.address().map_err(Error::Object)?;
        let token = tokio::fs::read_to_string(&self.token).await.map_err(|error| {
            tracing::warn!(file = %self.token.display(), %error, "read the token for cbt-http");
            Error::Token
        })?;
        let call = self.client(config)?.request(Method::POST, address).bearer_auth(token.trim());
        let call = call.header("content-type", "application/json").body(json!(request).to_string());
        let mut answer = call.send().await.map_err(away)?;
        let mut body = Vec::new();
        while let Some(piece) = answer.chunk().await.map_err(away)? {
            if body.len() + piece.len() > MAX_ANSWER {
                return Err(Error::Broken(format!("it is longer than {MAX_ANSWER} bytes")));
            }
            body.extend_from_slice(&piece);
        }
        if answer.status() == StatusCode::OK {
            return serde_json::from_slice(&body).map_err(|error| Error::Broken(error.to_string()));
        }
        let status: Value = serde_json::from_slice(&body).unwrap_or_default();
        match (status["reason"].as_str(), status["message"].as_str()) {
            (Some(reason), Some(message)) => {
                Err(Error::Refused { reason: reason.to_owned(), message: message.to_owned() })
            }
            _ => Err(Error::Broken(format!("its code is {}", answer.status().as_u16()))),
        }
    }

    /// Whether a server answers there, with a certificate signed by the bundle.
    async fn reach(&self, config: &ClientConfig) -> Result<(), Error> {
        let address = config.address().map_err(Error::Object)?;
        let call = self.client(config)?.request(Method::GET, address).timeout(PATIENCE);
        call.send().await.map(drop).map_err(away)
    }
}

fn away(error: reqwest::Error) -> Error {
    tracing::warn!(error = &error as &dyn std::error::Error, "cbt-http does not answer");
    Error::Away
}

/// Keeps the status of every DriverDiscovery true, for people: whether its cbt-http can be reached. Works until it is
/// dropped.
pub async fn control(client: Client, callers: Arc<Callers>) {
    loop {
        match all(&client).await {
            Ok(objects) => bring_up_to_date(&client, &callers, &objects).await,
            Err(error) => tracing::warn!(%error, "list DriverDiscoveries"),
        }
        tokio::time::sleep(EVERY).await;
    }
}

async fn bring_up_to_date(client: &Client, callers: &Callers, objects: &[DriverDiscovery]) {
    let mut seen: HashMap<&str, &str> = HashMap::new();
    for object in objects {
        let Some(name) = object.meta().name.as_deref() else { continue };
        let driver = object.spec.driver_name.as_str();
        let error = match seen.get(driver) {
            Some(first) => Some(format!("{first} is the DriverDiscovery of {driver}: it is older")),
            None => {
                seen.insert(driver, name);
                let reached = callers.reach(&object.spec.client_config).await;
                reached.err().map(|error| error.to_string())
            }
        };
        let state = if error.is_some() { "failed" } else { "ready" };
        let wanted = State { state: Some(state.into()), error };
        if object.status.as_ref() == Some(&wanted) {
            continue;
        }
        tracing::info!(name, state, wanted.error, "status of a DriverDiscovery");
        let patch = Patch::Merge(json!({"status": {"state": state, "error": wanted.error}}));
        let objects: Api<DriverDiscovery> = Api::all(client.clone());
        let params = PatchParams::default();
        let patched = ask(METRICS.seconds, "status", objects.patch_status(name, &params, &patch)).await;
        if let Err(error) = patched {
            tracing::warn!(name, %error, "write the status of a DriverDiscovery");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_a_url_or_a_service() {
        let address = |config: Value| {
            let config: ClientConfig = serde_json::from_value(config).expect("a config");
            config.address().map(|url| url.to_string())
        };
        let service = json!({"namespace": "shop", "name": "cbt"});
        for (config, expected) in [
            (json!({"url": "https://a.test:8443/b"}), "https://a.test:8443/b"),
            (json!({"service": service}), "https://cbt.shop.svc/"),
            (
                json!({"service": {"namespace": "shop", "name": "cbt", "port": 8443, "path": "/v1alpha1/deltas"}}),
                "https://cbt.shop.svc:8443/v1alpha1/deltas",
            ),
        ] {
            assert_eq!(address(config).as_deref(), Ok(expected));
        }
        for (config, named) in [
            (json!({}), "either url or service"),
            (json!({"url": "https://a.test", "service": service}), "either url or service"),
            (json!({"url": "http://a.test"}), "http://a.test"),
            (json!({"url": "a.test"}), "a.test"),
        ] {
            assert!(address(config).is_err_and(|error| error.contains(named)), "{named}");
        }
    }

    #[test]
    fn a_bundle_without_certificates_is_refused() {
        for (bundle, named) in [("", "no certificate"), ("?", "base64"), ("QUJD", "no certificate")] {
            let config = ClientConfig { ca_bundle: bundle.into(), ..ClientConfig::default() };
            assert!(config.roots().is_err_and(|error| error.contains(named)), "{bundle:?}");
        }
    }
}
