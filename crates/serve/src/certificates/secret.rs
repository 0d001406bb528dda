//! The Secret in which authorities and certificates are kept.

use std::collections::BTreeMap;

use k8s_openapi::ByteString;
use k8s_openapi::api::core::v1::Secret;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::api::PostParams;
use kube::{Api, Client};

use super::State;

/// The key under which everything is kept; `tls.crt`, `tls.key` and `ca.crt` repeat parts of it for other programs.
const KEPT: &str = "certificates.json";

/// Why the Secret was not read or written.
#[derive(Debug, thiserror::Error)]
pub enum SecretError {
    /// The API server refused, or did not answer.
    #[error("{0} the Secret")]
    Api(&'static str, #[source] kube::Error),
    /// It holds something else.
    #[error("the Secret's {KEPT} cannot be read: delete it from the Secret, and new certificates are made")]
    Kept(#[source] serde_json::Error),
}

/// Reads it: as it is, and what is kept in it, where either is there.
pub async fn read(
    client: &Client,
    namespace: &str,
    name: &str,
) -> Result<(Option<Secret>, Option<State>), SecretError> {
    let secrets: Api<Secret> = Api::namespaced(client.clone(), namespace);
    let secret = secrets.get_opt(name).await.map_err(|error| SecretError::Api("read", error))?;
    let kept = secret.as_ref().and_then(|secret| secret.data.as_ref()?.get(KEPT));
    let state = kept.map(|kept| serde_json::from_slice(&kept.0)).transpose().map_err(SecretError::Kept)?;
    Ok((secret, state))
}

/// Writes the state, unless the Secret has changed since it was read, as `before`: then another replica writes it, too.
pub async fn write(
    client: &Client,
    namespace: &str,
    name: &str,
    before: Option<Secret>,
    state: &State,
) -> Result<(), SecretError> {
    let secrets: Api<Secret> = Api::namespaced(client.clone(), namespace);
    let kept = serde_json::to_vec(state).map_err(SecretError::Kept)?;
    let data = [
        (KEPT, kept),
        ("tls.crt", state.leaf.certificate.clone().into_bytes()),
        ("tls.key", state.leaf.key.clone().into_bytes()),
        ("ca.crt", state.bundle().into_bytes()),
    ];
    let data: BTreeMap<_, _> = data.map(|(key, value)| (key.to_owned(), ByteString(value))).into();
    let written = match before {
        Some(secret) => {
            secrets.replace(name, &PostParams::default(), &Secret { data: Some(data), ..secret }).await
        }
        None => {
            let metadata = ObjectMeta { name: Some(name.to_owned()), ..ObjectMeta::default() };
            let secret = Secret { metadata, data: Some(data), ..Secret::default() };
            secrets.create(&PostParams::default(), &secret).await
        }
    };
    written.map(drop).map_err(|error| SecretError::Api("write", error))
}
