//! Calls to the API server, as JSON, and a list of what was made with them.

use std::path::Path;
use std::time::Duration;

use kube::config::{KubeConfigOptions, Kubeconfig};
use kube::{Client, Config};
use parking_lot::Mutex;
use serde_json::{Value, json};
use tonic::codegen::http::{Method, Request};

/// Longest answer that is waited for.
const PATIENCE: Duration = Duration::from_secs(20);
/// The groups whose objects are used.
pub(super) const SNAPSHOTS: &str = "/apis/snapshot.storage.k8s.io/v1";
const RBAC: &str = "/apis/rbac.authorization.k8s.io/v1";

/// The API server.
pub(super) struct Api {
    /// For what is called through a library.
    pub client: Client,
    /// Paths of what was made. Noted before the call that makes it.
    made: Mutex<Vec<String>>,
}

/// What the API server said instead.
#[derive(Clone, Debug)]
pub(super) struct Refusal {
    what: String,
    code: Option<u16>,
}

impl std::fmt::Display for Refusal {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.what)
    }
}

impl From<Refusal> for String {
    fn from(refusal: Refusal) -> String {
        refusal.what
    }
}

/// Whether that is a name of an object, so that it may be part of a path.
pub(super) fn is_name(name: &str) -> bool {
    !name.is_empty()
        && name.len() <= 253
        && name.bytes().all(|c| c.is_ascii_alphanumeric() || matches!(c, b'-' | b'.'))
        && !name.starts_with('.')
}

impl Api {
    /// By a kubeconfig, and the namespace that it names.
    pub async fn connect(kubeconfig: Option<&Path>) -> Result<(Self, String), String> {
        let config = match kubeconfig {
            Some(path) => {
                let failed =
                    |error: &dyn std::fmt::Display| format!("--kubeconfig {}: {error}", path.display());
                let read = Kubeconfig::read_from(path).map_err(|error| failed(&error))?;
                let config = Config::from_custom_kubeconfig(read, &KubeConfigOptions::default()).await;
                config.map_err(|error| failed(&error))?
            }
            None => {
                Config::infer().await.map_err(|error| format!("no cluster: {error}; give --kubeconfig"))?
            }
        };
        let namespace = config.default_namespace.clone();
        let client =
            Client::try_from(config).map_err(|error| format!("the kubeconfig cannot be used: {error}"))?;
        Ok((Api { client, made: Mutex::default() }, namespace))
    }

    async fn send(&self, method: Method, path: &str, body: Option<Value>) -> Result<Value, Refusal> {
        let call = format!("{method} {path}");
        let content =
            if method == Method::PATCH { "application/merge-patch+json" } else { "application/json" };
        let bytes = body.map_or(Vec::new(), |body| body.to_string().into_bytes());
        let request = Request::builder().method(method).uri(path).header("content-type", content).body(bytes);
        let refused = |why: &str, code| Refusal { what: format!("{call}: {why}"), code };
        let request = request.map_err(|error| refused(&error.to_string(), None))?;
        match tokio::time::timeout(PATIENCE, self.client.request::<Value>(request)).await {
            Ok(Ok(answer)) => Ok(answer),
            Ok(Err(kube::Error::Api(status))) => Err(refused(&status.message, Some(status.code))),
            Ok(Err(error)) => Err(refused(&base::report(&error), None)),
            Err(_) => Err(refused(&format!("no answer within {} s", PATIENCE.as_secs()), None)),
        }
    }

    pub async fn get(&self, path: &str) -> Result<Value, Refusal> {
        self.send(Method::GET, path, None).await
    }

    /// An object that may not be there.
    pub async fn find(&self, path: &str) -> Result<Option<Value>, Refusal> {
        match self.get(path).await {
            Ok(object) => Ok(Some(object)),
            Err(refusal) if refusal.code == Some(404) => Ok(None),
            Err(refusal) => Err(refusal),
        }
    }

    /// A question that the API server answers, such as a review.
    pub async fn post(&self, path: &str, body: Value) -> Result<Value, Refusal> {
        self.send(Method::POST, path, Some(body)).await
    }

    pub async fn patch(&self, path: &str, body: Value) -> Result<Value, Refusal> {
        self.send(Method::PATCH, path, Some(body)).await
    }

    /// Makes an object in the list at `path`.
    pub async fn make(&self, path: &str, name: &str, mut object: Value) -> Result<Value, Refusal> {
        self.made.lock().push(format!("{path}/{name}"));
        object["metadata"]["name"] = json!(name);
        self.post(path, object).await
    }

    /// Deletes an object that was made, if it is there.
    pub async fn delete(&self, path: &str) -> Result<(), Refusal> {
        match self.send(Method::DELETE, path, None).await {
            Err(refusal) if refusal.code != Some(404) => Err(refusal),
            _ => {
                self.made.lock().retain(|made| made != path);
                Ok(())
            }
        }
    }

    /// Deletes all that was made, the last first; returns what could not be.
    pub async fn delete_all(&self, patience: Duration) -> Vec<String> {
        let mut left = Vec::new();
        for path in self.made().into_iter().rev() {
            match tokio::time::timeout(patience, self.delete(&path)).await {
                Ok(Ok(())) => {}
                Ok(Err(refusal)) => left.push(refusal.what),
                Err(_) => left.push(path),
            }
        }
        left
    }

    /// Paths of all that was made and is not deleted.
    pub fn made(&self) -> Vec<String> {
        self.made.lock().clone()
    }

    /// Lets an account of another namespace do this in a namespace.
    pub async fn allow(
        &self,
        namespace: &str,
        name: &str,
        rule: Value,
        account: &Account<'_>,
    ) -> Result<(), Refusal> {
        let path = |kind: &str| format!("{RBAC}/namespaces/{namespace}/{kind}");
        let role = json!({"apiVersion": "rbac.authorization.k8s.io/v1", "kind": "Role", "metadata": {}, "rules": [rule]});
        self.make(&path("roles"), name, role).await?;
        let binding = json!({
            "apiVersion": "rbac.authorization.k8s.io/v1", "kind": "RoleBinding", "metadata": {},
            "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": name},
            "subjects": [{"kind": "ServiceAccount", "name": account.name, "namespace": account.namespace}],
        });
        self.make(&path("rolebindings"), name, binding).await.map(drop)
    }

    /// Whether an account may do that to VolumeSnapshots, as the API server has it now.
    pub async fn may(
        &self,
        account: &Account<'_>,
        namespace: &str,
        verb: &str,
        name: &str,
    ) -> Result<bool, Refusal> {
        let Account { namespace: home, name: account } = account;
        let review = json!({
            "apiVersion": "authorization.k8s.io/v1", "kind": "SubjectAccessReview",
            "spec": {
                "user": format!("system:serviceaccount:{home}:{account}"),
                "groups": ["system:serviceaccounts", format!("system:serviceaccounts:{home}"), "system:authenticated"],
                "resourceAttributes": {
                    "group": "snapshot.storage.k8s.io", "version": "v1", "resource": "volumesnapshots",
                    "namespace": namespace, "verb": verb, "name": name,
                },
            },
        });
        let answer = self.post("/apis/authorization.k8s.io/v1/subjectaccessreviews", review).await?;
        Ok(answer["status"]["allowed"] == json!(true))
    }

    /// A token of an account for an audience, or for the API server; bound to a Secret, if one is given.
    pub async fn token(
        &self,
        account: &Account<'_>,
        audience: Option<&str>,
        secret: Option<(&str, &str)>,
    ) -> Result<String, Refusal> {
        let Account { namespace, name } = account;
        let path = format!("/api/v1/namespaces/{namespace}/serviceaccounts/{name}/token");
        let mut spec =
            json!({"expirationSeconds": 3600, "audiences": audience.into_iter().collect::<Vec<_>>()});
        if let Some((name, uid)) = secret {
            spec["boundObjectRef"] = json!({"kind": "Secret", "apiVersion": "v1", "name": name, "uid": uid});
        }
        let request = json!({"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "metadata": {}, "spec": spec});
        let answer = self.post(&path, request).await?;
        let token = answer["status"]["token"].as_str().unwrap_or_default();
        match token.is_empty() {
            true => Err(Refusal { what: format!("POST {path}: the answer has no token"), code: None }),
            false => Ok(token.to_owned()),
        }
    }

    /// Whether the API server knows whose token that is.
    pub async fn knows(&self, token: &str, audience: &str) -> Result<bool, Refusal> {
        let review = json!({
            "apiVersion": "authentication.k8s.io/v1", "kind": "TokenReview",
            "spec": {"token": token, "audiences": [audience]},
        });
        let answer = self.post("/apis/authentication.k8s.io/v1/tokenreviews", review).await?;
        Ok(answer["status"]["authenticated"] == json!(true))
    }
}

/// A ServiceAccount.
pub(super) struct Account<'a> {
    pub namespace: &'a str,
    pub name: &'a str,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_names_become_parts_of_paths() {
        for good in ["monday", "snap-1.of.disk", "1"] {
            assert!(is_name(good), "{good}");
        }
        for bad in ["", "..", "../x", "a/b", "a?b", "a b", "ä", ".x"] {
            assert!(!is_name(bad), "{bad}");
        }
    }
}
