//! Service accounts, their rights, and tokens of theirs.

use std::path::PathBuf;
use std::time::SystemTime;

use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use k8s_openapi::api::authentication::v1::{TokenRequest, TokenRequestSpec};
use k8s_openapi::api::core::v1::ServiceAccount;
use kube::Api;
use kube::api::PostParams;
use rcgen::KeyPair;
use ring::signature::{ECDSA_P256_SHA256_FIXED_SIGNING, EcdsaKeyPair};
use serde_json::{Value, json};

use super::{ApiServer, kubeconfig};

/// The audience of tokens for the API server itself.
pub const API_AUDIENCE: &str = "https://kubernetes.default.svc";

impl ApiServer {
    /// Makes a service account with a role of these rules in its namespace.
    pub async fn account(&self, namespace: &str, name: &str, rules: Value) {
        let metadata = json!({"name": name, "namespace": namespace});
        self.make(json!({"apiVersion": "v1", "kind": "ServiceAccount", "metadata": metadata})).await;
        self.allow(namespace, namespace, name, rules).await;
    }

    /// Gives a service account of `home` a role of these rules in a namespace.
    pub async fn allow(&self, namespace: &str, home: &str, account: &str, rules: Value) {
        let metadata = json!({"name": account, "namespace": namespace});
        self.make(json!({"apiVersion": "rbac.authorization.k8s.io/v1", "kind": "Role", "metadata": metadata, "rules": rules}))
            .await;
        self.make(json!({
            "apiVersion": "rbac.authorization.k8s.io/v1", "kind": "RoleBinding", "metadata": metadata,
            "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": account},
            "subjects": [{"kind": "ServiceAccount", "name": account, "namespace": home}],
        }))
        .await;
    }

    /// Gives a service account a ClusterRole, everywhere.
    pub async fn bind(&self, namespace: &str, account: &str, role: &str) {
        self.make(json!({
            "apiVersion": "rbac.authorization.k8s.io/v1", "kind": "ClusterRoleBinding",
            "metadata": {"name": format!("{namespace}-{account}")},
            "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": role},
            "subjects": [{"kind": "ServiceAccount", "name": account, "namespace": namespace}],
        }))
        .await;
    }

    /// A token of a service account for an audience, good for an hour.
    pub async fn token(&self, namespace: &str, account: &str, audience: &str) -> String {
        self.token_bound(namespace, account, audience, None).await
    }

    /// The same, which is good only as long as that pod is there, and says on which node it is.
    async fn token_bound(&self, namespace: &str, account: &str, audience: &str, pod: Option<&str>) -> String {
        let pod = pod.map(|pod| json!({"apiVersion": "v1", "kind": "Pod", "name": pod}));
        let bound_object_ref = serde_json::from_value(json!(pod)).expect("a reference");
        let accounts: Api<ServiceAccount> = Api::namespaced(self.client.clone(), namespace);
        let request = TokenRequest {
            spec: Some(TokenRequestSpec {
                audiences: Some(vec![audience.to_owned()]),
                bound_object_ref,
                expiration_seconds: Some(3600),
                ..TokenRequestSpec::default()
            }),
            ..TokenRequest::default()
        };
        let made = accounts.create_token_request(account, &PostParams::default(), &request).await;
        made.expect("a token").status.expect("a status").token.expect("a token")
    }

    /// A kubeconfig of a service account, whose token is for the API server itself.
    pub async fn kubeconfig_of(&self, namespace: &str, account: &str) -> PathBuf {
        let token = self.token(namespace, account, API_AUDIENCE).await;
        self.kubeconfig_by(&format!("{namespace}.{account}"), token)
    }

    /// The same for a pod of the account.
    pub async fn kubeconfig_of_pod(&self, namespace: &str, account: &str, pod: &str) -> PathBuf {
        let token = self.token_bound(namespace, account, API_AUDIENCE, Some(pod)).await;
        self.kubeconfig_by(&format!("{namespace}.{account}.{pod}"), token)
    }

    fn kubeconfig_by(&self, name: &str, token: String) -> PathBuf {
        let path = self.dir.path().join(format!("{name}.kubeconfig"));
        let config = kubeconfig(self.dir.path(), self.port, json!({"token": token}));
        std::fs::write(&path, config.to_string()).expect("write");
        path
    }

    /// Tokens of a service account for an audience that no API server has given out: one by the cluster's own key that ended an hour
    /// ago, the same with an hour to go, and one by another key.
    pub async fn signed(&self, account: (&str, &str), audience: &str) -> [String; 3] {
        let ours = std::fs::read_to_string(self.file("accounts.key")).expect("the key");
        let theirs = KeyPair::generate().expect("a key").serialize_pem();
        let (namespace, name) = account;
        let object = self.objects("ServiceAccount", Some(namespace)).get(name).await;
        let uid = object.expect("the account").metadata.uid.expect("a uid");
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).expect("after 1970").as_secs();
        let claims = |begins: u64, ends: u64| {
            json!({
                "iss": API_AUDIENCE, "aud": [audience], "exp": ends, "nbf": begins, "iat": begins,
                "sub": format!("system:serviceaccount:{namespace}:{name}"),
                "kubernetes.io": {"namespace": namespace, "serviceaccount": {"name": name, "uid": uid}},
            })
        };
        [(&ours, now - 7200, now - 3600), (&ours, now - 7200, now + 3600), (&theirs, now - 60, now + 3600)]
            .map(|(key, begins, ends)| sign(key, &claims(begins, ends)))
    }
}

/// A token with these claims, signed with a key in PEM (ES256).
fn sign(key: &str, claims: &Value) -> String {
    let encode = |value: &Value| URL_SAFE_NO_PAD.encode(value.to_string());
    let text = format!("{}.{}", encode(&json!({"alg": "ES256", "typ": "JWT"})), encode(claims));
    let pair = KeyPair::from_pem(key).expect("a key");
    let random = ring::rand::SystemRandom::new();
    let signer = EcdsaKeyPair::from_pkcs8(&ECDSA_P256_SHA256_FIXED_SIGNING, &pair.serialize_der(), &random);
    let signature = signer.expect("a signer").sign(&random, text.as_bytes()).expect("a signature");
    format!("{text}.{}", URL_SAFE_NO_PAD.encode(signature.as_ref()))
}
