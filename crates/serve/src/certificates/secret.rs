//! The Secret in which authorities and certificates are kept.

use std::collections::BTreeMap;

use k8s_openapi::ByteString;
use k8s_openapi::api::core::v1::Secret;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::api::PostParams;
use kube::{Api, Client};

use super::{Error, State};

/// The key under which everything is kept; `tls.crt`, `tls.key` and `ca.crt` repeat parts of it for other programs.
pub const KEPT: &str = "certificates.json";

/// Reads it: as it is, and what is kept in it, where either is there.
pub async fn read(
    client: &Client,
    namespace: &str,
    name: &str,
) -> Result<(Option<Secret>, Option<State>), Error> {
    let secrets: Api<Secret> = Api::namespaced(client.clone(), namespace);
    let secret = secrets.get_opt(name).await.map_err(|error| Error::Api("read the Secret", error))?;
    let kept = secret.as_ref().and_then(|secret| secret.data.as_ref()?.get(KEPT));
    let state = kept.map(|kept| serde_json::from_slice(&kept.0)).transpose().map_err(Error::Kept)?;
    Ok((secret, state))
}

/// Writes the state, unless the Secret has changed since it was read, as `before`: then another replica writes it, too.
pub async fn write(
    client: &Client,
    namespace: &str,
    name: &str,
    before: Option<Secret>,
    state: &State,
) -> Result<(), Error> {
    let secrets: Api<Secret> = Api::namespaced(client.clone(), namespace);
    let kept = serde_json::to_vec(state).map_err(Error::Kept)?;
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
    written.map(drop).map_err(|error| Error::Api("write the Secret", error))
}
