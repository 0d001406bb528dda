//! Next to a driver: asks for its certificate, and asks again before it ends.

use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use base::DataDirKey;
use k8s_openapi::api::certificates::v1::CertificateSigningRequest;
use kube::api::{ObjectMeta, PostParams};
use kube::{Api, Client};
use proto::identity_client::IdentityClient;
use rcgen::{CertificateParams, KeyPair, SanType};
use x509_parser::pem::parse_x509_pem;

use super::SIGNER;

/// Between two looks at a request that is not answered yet, and at the driver.
const EVERY: Duration = Duration::from_secs(2);
/// How long a request is waited for before another is made.
const ANSWERED_IN: Duration = Duration::from_secs(120);

/// Ask for the certificate of the driver in the same pod, and ask again before it ends.
///
/// Writes node.crt and node.key, which the driver reads (--router-tls-cert, --router-tls-key) and reads again when they change.
#[derive(Clone, Debug, clap::Args)]
pub struct NodeCertificate {
    /// The name of the cluster in certificates: spiffe://CLUSTER/deltapath/node/KEY.
    #[arg(long, value_name = "CLUSTER", default_value = "deltapath", value_parser = super::cluster)]
    cluster: String,
    /// Socket of the driver, which says the key of its data directory.
    #[arg(long, value_name = "ENDPOINT", default_value = "/csi/csi.sock")]
    csi_address: base::Endpoint,
    /// Directory for node.crt and node.key.
    #[arg(long, value_name = "DIRECTORY")]
    dir: PathBuf,
    /// Kubeconfig file. Default: the pod's service account, or what kubectl would take.
    #[arg(long, value_name = "FILE")]
    kubeconfig: Option<PathBuf>,
}

pub async fn request(flags: NodeCertificate) -> Result<(), Box<dyn std::error::Error>> {
    let client = serve::questions::client(flags.kubeconfig.as_deref()).await?;
    let mut said = String::new();
    // For whom the files are, and until when that is well.
    let mut written: Option<(DataDirKey, SystemTime)> = None;
    loop {
        let step = async {
            let key = key_of(flags.csi_address.path()).await?;
            if written.is_none_or(|(known, renew)| known != key || renew <= SystemTime::now()) {
                let (certificate, private) = ask(&client, &flags.cluster, key).await?;
                let renew = renew(&certificate)?;
                // The driver takes what does not fit together when the second one is there.
                write(&flags.dir.join("node.key"), &private)?;
                write(&flags.dir.join("node.crt"), &certificate)?;
                tracing::info!(%key, "the node has a new certificate");
                written = Some((key, renew));
            }
            Ok::<(), String>(())
        };
        match step.await {
            Ok(()) => said.clear(),
            Err(error) => {
                if error != said {
                    tracing::warn!(error, "get a certificate");
                }
                said = error;
            }
        }
        tokio::time::sleep(if said.is_empty() { 10 * EVERY } else { EVERY }).await;
    }
}

async fn key_of(socket: &Path) -> Result<DataDirKey, String> {
    let channel = crate::delete::channel(socket, 5 * EVERY);
    let asked = IdentityClient::new(channel).get_plugin_info(proto::GetPluginInfoRequest {}).await;
    let info = asked.map_err(|status| format!("ask the driver for its key: {}", status.message()))?;
    let key = info.into_inner().manifest.remove("key").ok_or("the driver reports no key: upgrade it")?;
    key.parse().map_err(|error| format!("the driver's key {key:?} is {error}"))
}

/// A certificate and its key, in PEM.
async fn ask(client: &Client, cluster: &str, key: DataDirKey) -> Result<(String, String), String> {
    let private = KeyPair::generate().map_err(|error| format!("make a key: {error}"))?;
    let uri = format!("spiffe://{cluster}/deltapath/node/{key}");
    let request = || {
        let mut params = CertificateParams::new(Vec::new())?;
        params.subject_alt_names.push(SanType::URI(uri.try_into()?));
        params.serialize_request(&private)?.pem()
    };
    let pem = request().map_err(|error| format!("make a request: {error}"))?;
    let mut object = CertificateSigningRequest {
        metadata: ObjectMeta {
            generate_name: Some(format!("deltapath-node-{key}-")),
            ..ObjectMeta::default()
        },
        ..CertificateSigningRequest::default()
    };
    object.spec.request = k8s_openapi::ByteString(pem.into_bytes());
    object.spec.signer_name = SIGNER.to_owned();
    object.spec.usages = Some(["digital signature", "server auth", "client auth"].map(str::to_owned).into());
    let requests: Api<CertificateSigningRequest> = Api::all(client.clone());
    let failed = |error: kube::Error| format!("ask for a certificate: {}", base::report(&error));
    let made = requests.create(&PostParams::default(), &object).await.map_err(failed)?;
    let name = made.metadata.name.unwrap_or_default();
    let answered = async {
        loop {
            let status = requests.get(&name).await.map_err(failed)?.status.unwrap_or_default();
            if let Some(certificate) = status.certificate {
                let certificate =
                    String::from_utf8(certificate.0).map_err(|_| "the certificate is not PEM")?;
                return Ok((certificate, private.serialize_pem()));
            }
            let conditions = status.conditions.unwrap_or_default();
            if let Some(no) = conditions.iter().find(|found| matches!(&*found.type_, "Denied" | "Failed")) {
                return Err(format!(
                    "{name} is denied: {}",
                    no.message.as_deref().unwrap_or("no reason is given")
                ));
            }
            tokio::time::sleep(EVERY / 2).await;
        }
    };
    let late = |_| Err(format!("no answer to {name}: does deltapath-router certificates run?"));
    tokio::time::timeout(ANSWERED_IN, answered).await.unwrap_or_else(late)
}

/// When two thirds of its life are over.
fn renew(certificate: &str) -> Result<SystemTime, String> {
    let wrong = |error: &dyn std::fmt::Display| format!("the certificate cannot be read: {error}");
    let (_, pem) = parse_x509_pem(certificate.as_bytes()).map_err(|error| wrong(&error))?;
    let parsed = pem.parse_x509().map_err(|error| wrong(&error))?;
    let end = parsed.validity().not_after.timestamp();
    let end = SystemTime::UNIX_EPOCH + Duration::from_secs(u64::try_from(end).unwrap_or(0));
    let left = end.duration_since(SystemTime::now()).unwrap_or_default();
    Ok(SystemTime::now() + left / 3 * 2)
}

/// Whole or not at all.
fn write(path: &Path, text: &str) -> Result<(), String> {
    use std::io::Write;
    use std::os::unix::fs::OpenOptionsExt;
    let failed = |error: std::io::Error| format!("write {}: {error}", path.display());
    let draft = path.with_extension("new");
    #[expect(
        clippy::disallowed_methods,
        reason = "no state of the driver: files that are made again at each start"
    )]
    let mut file = std::fs::File::options()
        .create(true)
        .write(true)
        .truncate(true)
        .mode(0o600)
        .open(&draft)
        .map_err(failed)?;
    file.write_all(text.as_bytes()).map_err(failed)?;
    #[expect(clippy::disallowed_methods, reason = "the same")]
    std::fs::rename(&draft, path).map_err(failed)
}
