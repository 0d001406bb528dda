//! Who the bearer of a certificate is, by the URI in it.

use std::fmt;

use rustls::pki_types::CertificateDer;

/// Whom a certificate is for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Identity {
    /// The trust domain: peers of another one are rejected.
    pub cluster: String,
    /// What its bearer may do.
    pub role: Role,
}

/// What the bearer of a certificate may do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Role {
    /// Make CSI calls on nodes.
    Router,
    /// Answer them, for the data directory with this key; and read from other nodes what the router's tickets name.
    Node(String),
}

impl Identity {
    /// What this URI says; `None` where it is not one of ours.
    fn parse(uri: &str) -> Option<Self> {
        let (cluster, path) = uri.strip_prefix("spiffe://")?.split_once('/')?;
        let role = match path.strip_prefix("deltapath/")? {
            "router" => Role::Router,
            path => match path.strip_prefix("node/")? {
                key if !key.is_empty() && !key.contains('/') => Role::Node(key.to_owned()),
                _ => return None,
            },
        };
        (!cluster.is_empty()).then(|| Identity { cluster: cluster.to_owned(), role })
    }

    /// The one identity in a certificate.
    pub fn of(certificate: &CertificateDer<'_>) -> Option<Self> {
        let certificate = webpki::EndEntityCert::try_from(certificate).ok()?;
        let mut ours = certificate.valid_uri_names().filter_map(Identity::parse);
        let first = ours.next()?;
        // Of two roles a reader would have to choose one.
        ours.next().is_none().then_some(first)
    }
}

impl fmt::Display for Identity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "spiffe://{}/deltapath/", self.cluster)?;
        match &self.role {
            Role::Router => f.write_str("router"),
            Role::Node(key) => write!(f, "node/{key}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_uris_of_a_role_are_identities() {
        let node = |key: &str| Some(("c".to_owned(), Role::Node(key.to_owned())));
        for (uri, expected) in [
            ("spiffe://c/deltapath/router", Some(("c".to_owned(), Role::Router))),
            ("spiffe://a.b/deltapath/router", Some(("a.b".to_owned(), Role::Router))),
            ("spiffe://c/deltapath/node/0123abcd", node("0123abcd")),
            ("spiffe://c/deltapath/router/", None),
            ("spiffe://c/deltapath/router/x", None),
            ("spiffe://c/deltapath/node/", None),
            ("spiffe://c/deltapath/node/a/b", None),
            ("spiffe://c/deltapath/node", None),
            ("spiffe://c/x/deltapath/router", None),
            ("spiffe:///deltapath/router", None),
            ("https://c/deltapath/router", None),
            ("SPIFFE://c/deltapath/router", None),
            ("", None),
        ] {
            let expected = expected.map(|(cluster, role)| Identity { cluster, role });
            assert_eq!(Identity::parse(uri), expected, "{uri}");
            if let Some(identity) = expected {
                assert_eq!(identity.to_string(), uri);
            }
        }
    }
}
