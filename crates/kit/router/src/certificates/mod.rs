//! Certificates of router and nodes in Kubernetes, so that no one has to make them by hand. `deltapath-router certificates`
//! (here, and in `sign`) keeps a CA and the router's certificate in a Secret, and signs what nodes ask for; it alone needs the
//! CA's key. `deltapath-router node-certificate` (in `request`) runs next to each driver and asks.
//!
//! Both go by CertificateSigningRequests, so it is the API server that says which node asks. Routers and drivers know nothing of
//! this: they read files.

mod request;
mod sign;

use std::path::PathBuf;
use std::time::Duration;

use k8s_openapi::api::core::v1::ConfigMap;
use kube::api::{ListParams, PostParams};
use kube::{Api, Client};
use serve::certificates::{Error, Lifetimes, State, secret};

pub use request::{NodeCertificate, request};

/// Who signs, as CertificateSigningRequests name it.
const SIGNER: &str = "deltapath.csi.dev/node";
/// In the subjects of all certificates.
const OWNER: &str = "deltapath";
/// How often requests are looked for, and how long one step may take at the API server.
const EVERY: Duration = Duration::from_secs(2);
const PATIENCE: Duration = Duration::from_secs(20);

/// Keep a CA and the router's certificate in a Secret, and sign the certificates of nodes.
///
/// The Secret has tls.crt, tls.key and ca.crt for the router, and the ConfigMap has ca.crt for the nodes. In the pod of each
/// driver, `deltapath-router node-certificate` makes a CertificateSigningRequest. It is signed if the
/// pod is one of the drivers', and if no other node has the key: the second ConfigMap says which node has which. Should a data
/// directory move to another node, take its line out of there.
///
/// One replica is enough: while it is down, only new certificates wait.
#[derive(Clone, Debug, clap::Args)]
pub struct Certificates {
    /// The name of the cluster in certificates: spiffe://CLUSTER/deltapath/router.
    #[arg(long, value_name = "CLUSTER", default_value = "deltapath", value_parser = cluster)]
    cluster: String,
    /// Namespace of Secret and ConfigMaps.
    #[arg(long, env = "POD_NAMESPACE", value_name = "NAME")]
    namespace: String,
    /// Secret with the CA's key and the router's certificate.
    #[arg(long, value_name = "NAME", default_value = "deltapath-router-tls")]
    secret: String,
    /// ConfigMap with the CA's certificate.
    #[arg(long, value_name = "NAME", default_value = "deltapath-router-ca")]
    ca_config_map: String,
    /// ConfigMap with the node of each key that was ever signed.
    #[arg(long, value_name = "NAME", default_value = "deltapath-node-keys")]
    keys_config_map: String,
    /// Service account of the drivers' pods, in the same namespace.
    #[arg(long, value_name = "NAME", default_value = "deltapath-plugin")]
    node_account: String,
    /// How long a CA is valid, such as 3650d. The next one comes after two thirds of it.
    #[arg(long, value_name = "AGE", default_value = "3650d", value_parser = shell::age)]
    ca_lifetime: Duration,
    /// How long a certificate is valid. The next one comes after two thirds of it. A new CA is published for so long before it
    /// signs, and an old one after.
    #[arg(long, value_name = "AGE", default_value = "90d", value_parser = shell::age)]
    certificate_lifetime: Duration,
    /// Kubeconfig file. Default: the pod's service account, or what kubectl would take.
    #[arg(long, value_name = "FILE")]
    kubeconfig: Option<PathBuf>,
}

fn cluster(text: &str) -> Result<String, String> {
    let is_name = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-' || b == b'.';
    match !text.is_empty() && text.bytes().all(is_name) {
        true => Ok(text.to_owned()),
        false => Err("the name of a cluster has lower case letters, digits, dots and dashes".into()),
    }
}

/// Serves until a signal.
pub async fn run(flags: Certificates) -> Result<(), Box<dyn std::error::Error>> {
    let client = serve::questions::client(flags.kubeconfig.as_deref()).await?;
    tracing::info!(cluster = flags.cluster, secret = flags.secret, "signing");
    let keeper = Keeper { client, flags };
    let mut said = String::new();
    loop {
        match tokio::time::timeout(PATIENCE, keeper.step()).await.unwrap_or(Err(Error::Late)) {
            Ok(()) => said.clear(),
            Err(error) => {
                let error = base::report(&error);
                if error != said {
                    tracing::warn!(error, "look after the certificates");
                }
                said = error;
            }
        }
        tokio::time::sleep(EVERY).await;
    }
}

struct Keeper {
    client: Client,
    flags: Certificates,
}

impl Keeper {
    fn uri(&self, role: &str) -> String {
        format!("spiffe://{}/deltapath/{role}", self.flags.cluster)
    }

    /// Nodes renew by themselves within the life of a certificate, so that is how long two authorities overlap.
    fn lifetimes(&self) -> Lifetimes {
        let leaf = self.flags.certificate_lifetime;
        Lifetimes { authority: self.flags.ca_lifetime, leaf, overlap: leaf }
    }

    /// Does what is due. Each change of the CA is written for the nodes first and into the Secret second, so a crash in between
    /// leaves nodes with one CA too many, and never one too few.
    async fn step(&self) -> Result<(), Error> {
        let (namespace, name) = (&self.flags.namespace, &self.flags.secret);
        let (secret, state) = secret::read(&self.client, namespace, name).await?;
        let hosts = [self.uri("router")];
        let (state, is_new) = State::next(state, OWNER, &hosts, self.published(), &self.lifetimes()).await?;
        self.publish(&state).await?;
        if is_new {
            secret::write(&self.client, namespace, name, secret, &state).await?;
        }
        let requests = self.requests();
        let of_signer = ListParams::default().fields(&format!("spec.signerName={SIGNER}")).match_any();
        let listed = requests
            .list(&of_signer)
            .await
            .map_err(|error| Error::Api("list requests for certificates", error))?;
        let mut answered = Ok(());
        for request in listed.items.into_iter().filter(sign::is_open) {
            // One that fails must not keep the other nodes waiting.
            answered = answered.and(self.answer(&requests, request, &state).await);
        }
        answered
    }

    fn config_maps(&self) -> Api<ConfigMap> {
        Api::namespaced(self.client.clone(), &self.flags.namespace)
    }

    async fn published(&self) -> Result<Option<String>, Error> {
        Ok(self.config_map(&self.flags.ca_config_map).await?.and_then(|map| map.data?.remove("ca.crt")))
    }

    async fn publish(&self, state: &State) -> Result<(), Error> {
        let map = self.config_map(&self.flags.ca_config_map).await?;
        self.put(map, &self.flags.ca_config_map, "ca.crt", &state.bundle()).await
    }

    async fn config_map(&self, name: &str) -> Result<Option<ConfigMap>, Error> {
        self.config_maps().get_opt(name).await.map_err(|error| Error::Api("read a ConfigMap", error))
    }

    /// Puts a value into a ConfigMap as it was read, if it is not there.
    async fn put(&self, map: Option<ConfigMap>, name: &str, key: &str, value: &str) -> Result<(), Error> {
        let is_there = map.is_some();
        let mut map = map.unwrap_or_default();
        let data = map.data.get_or_insert_default();
        if data.get(key).is_some_and(|found| found == value) {
            return Ok(());
        }
        data.insert(key.to_owned(), value.to_owned());
        let written = match is_there {
            true => self.config_maps().replace(name, &PostParams::default(), &map).await,
            false => {
                map.metadata.name = Some(name.to_owned());
                self.config_maps().create(&PostParams::default(), &map).await
            }
        };
        written.map(drop).map_err(|error| Error::Api("write a ConfigMap", error))
    }
}
