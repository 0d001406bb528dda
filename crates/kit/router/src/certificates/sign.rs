//! Answers the requests of nodes: signed, or denied with a reason.

use base::DataDirKey;
use jiff::Timestamp;
use k8s_openapi::api::certificates::v1::CertificateSigningRequest;
use kube::Api;
use kube::api::{Patch, PatchParams};
use rcgen::{CertificateSigningRequestParams, SanType};
use serde_json::json;
use serve::certificates::State;

use super::{Error, Keeper, OWNER};

/// By which the API server says on which node the pod is whose token was used.
const NODE_NAME: &str = "authentication.kubernetes.io/node-name";

/// Whether it is not answered yet.
pub fn is_open(request: &CertificateSigningRequest) -> bool {
    let status = request.status.as_ref();
    let has_certificate = status.is_some_and(|status| status.certificate.is_some());
    let conditions = status.and_then(|status| status.conditions.as_deref()).unwrap_or_default();
    !has_certificate && !conditions.iter().any(|condition| matches!(&*condition.type_, "Denied" | "Failed"))
}

/// What a request asks for: the key of a data directory, for the node that its pod is on. The reason where it may have none.
fn asked(
    request: &CertificateSigningRequest,
    account: &str,
    prefix: &str,
) -> Result<(DataDirKey, String), String> {
    let spec = &request.spec;
    let who = spec.username.as_deref().unwrap_or_default();
    if who != account {
        return Err(format!("{who} is not the drivers' service account {account}"));
    }
    let node = spec.extra.as_ref().and_then(|extra| extra.get(NODE_NAME)?.first());
    let node =
        node.ok_or("the token does not say on which node its pod is: Kubernetes 1.32 or later does")?;
    let pem = std::str::from_utf8(&spec.request.0).map_err(|_| "the request is not PEM")?;
    let parsed = CertificateSigningRequestParams::from_pem(pem);
    let parsed = parsed.map_err(|error| format!("the request cannot be read: {error}"))?;
    let [SanType::URI(uri)] = &parsed.params.subject_alt_names[..] else {
        return Err("the request must have one URI and no other name".to_owned());
    };
    let uri = uri.as_str();
    let key = uri.strip_prefix(prefix).and_then(|key| key.parse().ok());
    let key = key.ok_or_else(|| format!("the request is for {uri}, and {prefix}KEY is expected"))?;
    Ok((key, node.clone()))
}

impl Keeper {
    /// A key is the node's that asked for it first.
    pub async fn answer(
        &self,
        requests: &Api<CertificateSigningRequest>,
        request: CertificateSigningRequest,
        state: &State,
    ) -> Result<(), Error> {
        let (prefix, flags) = (self.uri("node/"), &self.flags);
        let account = format!("system:serviceaccount:{}:{}", flags.namespace, flags.node_account);
        let (key, node) = match asked(&request, &account, &prefix) {
            Ok(asked) => asked,
            Err(why) => return self.deny(requests, &request, &why).await,
        };
        let keys = self.config_map(&flags.keys_config_map).await?;
        let owner = keys.as_ref().and_then(|keys| keys.data.as_ref()?.get(&key.to_string())).cloned();
        if let Some(owner) = owner.filter(|owner| *owner != node) {
            let why = format!(
                "the data directory {key} is on node {owner}: if it has moved to {node}, take its line out of the ConfigMap {}",
                flags.keys_config_map
            );
            return self.deny(requests, &request, &why).await;
        }
        self.put(keys, &flags.keys_config_map, &key.to_string(), &node).await?;
        let pem = String::from_utf8_lossy(&request.spec.request.0).into_owned();
        let hosts = [format!("{prefix}{key}")];
        let (now, lifetime) = (Timestamp::now(), flags.certificate_lifetime);
        let certificate = state.current.sign(&pem, OWNER, &hosts, now, lifetime)?;
        let name = request.metadata.name.as_deref().unwrap_or_default();
        let failed = |error| Error::Api("answer a request for a certificate", error);
        let approved = self.condition(&request, "Approved", "the data directory is this node's");
        requests.patch_approval(name, &PatchParams::default(), &approved).await.map_err(failed)?;
        let certificate = k8s_openapi::ByteString(certificate.into_bytes());
        let signed = Patch::Merge(json!({"status": {"certificate": certificate}}));
        requests.patch_status(name, &PatchParams::default(), &signed).await.map_err(failed)?;
        tracing::info!(%key, node, "a node has a new certificate");
        Ok(())
    }

    async fn deny(
        &self,
        requests: &Api<CertificateSigningRequest>,
        request: &CertificateSigningRequest,
        why: &str,
    ) -> Result<(), Error> {
        let name = request.metadata.name.as_deref().unwrap_or_default();
        tracing::warn!(request = name, why, "a request for a certificate is denied");
        let denied = self.condition(request, "Denied", why);
        let done = requests.patch_approval(name, &PatchParams::default(), &denied).await;
        done.map(drop).map_err(|error| Error::Api("deny a request for a certificate", error))
    }

    /// Only where nothing has changed since the request was read.
    fn condition(
        &self,
        request: &CertificateSigningRequest,
        kind: &str,
        why: &str,
    ) -> Patch<serde_json::Value> {
        Patch::Merge(json!({
            "metadata": {"resourceVersion": request.metadata.resource_version},
            "status": {"conditions": [{"type": kind, "status": "True", "reason": "DataDirectoryKey", "message": why}]},
        }))
    }

    pub fn requests(&self) -> Api<CertificateSigningRequest> {
        Api::all(self.client.clone())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ACCOUNT: &str = "system:serviceaccount:deltapath:deltapath-plugin";
    const PREFIX: &str = "spiffe://c/deltapath/node/";

    fn request(user: &str, node: Option<&str>, names: &[&str]) -> CertificateSigningRequest {
        let mut params = rcgen::CertificateParams::new(Vec::new()).expect("params");
        for name in names {
            params.subject_alt_names.push(match name.contains("://") {
                true => SanType::URI((*name).try_into().expect("a URI")),
                false => SanType::DnsName((*name).try_into().expect("a name")),
            });
        }
        let key = rcgen::KeyPair::generate().expect("a key");
        let pem = params.serialize_request(&key).expect("a request").pem().expect("PEM");
        let mut request = CertificateSigningRequest::default();
        request.spec.request = k8s_openapi::ByteString(pem.into_bytes());
        request.spec.username = Some(user.to_owned());
        request.spec.extra = node.map(|node| [(NODE_NAME.to_owned(), vec![node.to_owned()])].into());
        request
    }

    #[test]
    fn only_a_drivers_pod_gets_one_name_of_a_node() {
        let ours = "spiffe://c/deltapath/node/0123abcd";
        for (user, node, names, expected) in [
            (ACCOUNT, Some("n"), &[ours][..], Ok("n")),
            (
                "system:serviceaccount:deltapath:other",
                Some("n"),
                &[ours],
                Err("not the drivers' service account"),
            ),
            ("system:serviceaccount:other:deltapath-plugin", Some("n"), &[ours], Err("not the drivers'")),
            (ACCOUNT, None, &[ours], Err("on which node")),
            (ACCOUNT, Some("n"), &["spiffe://c/deltapath/router"], Err("KEY is expected")),
            (ACCOUNT, Some("n"), &["spiffe://d/deltapath/node/0123abcd"], Err("KEY is expected")),
            (ACCOUNT, Some("n"), &["spiffe://c/deltapath/node/x"], Err("KEY is expected")),
            (ACCOUNT, Some("n"), &[ours, "spiffe://c/deltapath/router"], Err("one URI")),
            (ACCOUNT, Some("n"), &[ours, "node.test"], Err("one URI")),
            (ACCOUNT, Some("n"), &[], Err("one URI")),
        ] {
            let found = asked(&request(user, node, names), ACCOUNT, PREFIX);
            match (&found, expected) {
                (Ok((key, node)), Ok(expected)) => {
                    assert_eq!((key.to_string().as_str(), &**node), ("0123abcd", expected))
                }
                (Err(why), Err(expected)) => assert!(why.contains(expected), "{why}"),
                _ => panic!("{user} {node:?} {names:?}: {found:?}"),
            }
        }
        let mut garbage = request(ACCOUNT, Some("n"), &[ours]);
        garbage.spec.request.0.truncate(80);
        assert!(asked(&garbage, ACCOUNT, PREFIX).is_err_and(|why| why.contains("cannot be read")));
    }
}
