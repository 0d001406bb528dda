//! The files that an API server starts with: certificates, keys, and its administrator's kubeconfig.

use std::path::{Path, PathBuf};

use rcgen::{CertificateParams, DnType, ExtendedKeyUsagePurpose, KeyPair};
use serde_json::{Value, json};

use crate::cluster::Authority;

/// A CA with the server's certificate and an administrator's, another with those by which the server shows other API servers
/// who it is, and the key that signs tokens of accounts.
pub(super) fn make_certificates(dir: &Path) {
    let write = |name: &str, text: String| std::fs::write(dir.join(name), text).expect("write");
    let authority = |file: &str, name: &str| {
        let authority = Authority::new(name);
        write(file, authority.pem.clone());
        authority
    };
    let (issuer, proxy) = (authority("ca.crt", "test CA"), authority("proxy-ca.crt", "front proxy CA"));
    for (issuer, name, subject, organization) in [
        (&issuer, "server", "kube-apiserver", None),
        (&issuer, "admin", "admin", Some("system:masters")),
        (&proxy, "front-proxy", "front-proxy", None),
        // By the same CA, and not for the front proxy.
        (&proxy, "not-the-proxy", "someone", None),
    ] {
        let names = vec!["127.0.0.1".to_owned(), "localhost".to_owned()];
        let mut params = CertificateParams::new(names).expect("params");
        params.distinguished_name.push(DnType::CommonName, subject);
        if let Some(organization) = organization {
            params.distinguished_name.push(DnType::OrganizationName, organization);
        }
        params.extended_key_usages =
            vec![ExtendedKeyUsagePurpose::ServerAuth, ExtendedKeyUsagePurpose::ClientAuth];
        let (chain, key) = issuer.sign(&params);
        write(&format!("{name}.crt"), chain);
        write(&format!("{name}.key"), key);
    }
    let accounts = KeyPair::generate().expect("a key");
    write("accounts.key", accounts.serialize_pem());
    write("accounts.pub", accounts.public_key_pem());
}

pub(super) fn kubeconfig(dir: &Path, port: u16, user: Value) -> Value {
    json!({
        "apiVersion": "v1", "kind": "Config", "current-context": "test",
        "clusters": [{"name": "test", "cluster": {
            "server": format!("https://127.0.0.1:{port}"), "certificate-authority": dir.join("ca.crt"),
        }}],
        "users": [{"name": "test", "user": user}],
        "contexts": [{"name": "test", "context": {"cluster": "test", "user": "test"}}],
    })
}

pub(super) fn write_kubeconfig(dir: &Path, port: u16) -> PathBuf {
    let path = dir.join("kubeconfig");
    let user = json!({"client-certificate": dir.join("admin.crt"), "client-key": dir.join("admin.key")});
    std::fs::write(&path, kubeconfig(dir, port, user).to_string()).expect("write");
    path
}
