//! The SnapshotMetadataService object, and the address that it names: its fields, and TLS before any call.

use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, ServerName};
use rustls::{ClientConfig, RootCertStore};
use serde_json::Value;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use x509_parser::prelude::{FromDer, X509Certificate};

use super::super::verdict::{Judged, Verdict, Wrong, remarked};
use super::cluster::Cluster;

/// How long the server may take to connect, or to answer bytes that it does not want.
const ANSWER: Duration = Duration::from_secs(10);

/// What the object says.
#[derive(Clone, Debug)]
pub(super) struct Front {
    pub address: String,
    pub audience: Option<String>,
    ca: Option<String>,
}

impl Front {
    pub fn of(object: &Value) -> Self {
        let field = |name: &str| {
            let value = object.pointer(&format!("/spec/{name}")).and_then(Value::as_str);
            value.filter(|value| !value.is_empty()).map(str::to_owned)
        };
        Front {
            address: field("address").unwrap_or_default(),
            audience: field("audience"),
            ca: field("caCert"),
        }
    }

    /// Host and port.
    pub fn place(&self) -> Result<(String, u16), Wrong> {
        let wrong = || {
            let address = &self.address;
            Wrong::new(format!(
                "spec.address is {address:?}, and not a host and a port, as in snapshot-metadata.backup.svc:6443"
            ))
        };
        let (host, port) = self.address.rsplit_once(':').ok_or_else(wrong)?;
        let bare = host.strip_prefix('[').and_then(|host| host.strip_suffix(']'));
        let is_whole = bare.is_some() || !host.contains([':', '/', '[', ']']);
        match port.parse::<u16>() {
            Ok(port) if port > 0 && !host.is_empty() && is_whole => {
                Ok((bare.unwrap_or(host).to_owned(), port))
            }
            _ => Err(wrong()),
        }
    }

    /// What the certificate has to be for.
    pub fn server_name(&self) -> Result<ServerName<'static>, Wrong> {
        let (host, _) = self.place()?;
        ServerName::try_from(host)
            .map_err(|error| Wrong::new(format!("spec.address {}: {error}", self.address)))
    }

    /// The certificates in caCert.
    fn authorities(&self) -> Result<Vec<CertificateDer<'static>>, Wrong> {
        let wrong = |what: String| Wrong::new(format!("spec.caCert {what}"));
        let ca = self.ca.as_ref().ok_or_else(|| wrong("is missing".into()))?;
        let pem = STANDARD.decode(ca).map_err(|error| wrong(format!("is not base64: {error}")))?;
        let all: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(&pem).collect();
        let all = all.map_err(|error| wrong(format!("is not PEM: {error}")))?;
        match all.is_empty() {
            true => Err(wrong("has no certificate in PEM".into())),
            false => Ok(all),
        }
    }

    /// A client that trusts caCert and nothing else.
    pub fn config(&self) -> Result<ClientConfig, Wrong> {
        let mut roots = RootCertStore::empty();
        for authority in self.authorities()? {
            roots.add(authority).map_err(|error| Wrong::new(format!("spec.caCert: {error}")))?;
        }
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let config = ClientConfig::builder_with_provider(provider).with_safe_default_protocol_versions();
        let config = config.map_err(|error| Wrong::new(error.to_string()))?;
        let mut config = config.with_root_certificates(roots).with_no_client_auth();
        config.alpn_protocols = vec![b"h2".to_vec()];
        Ok(config)
    }

    async fn connect(&self) -> Result<TcpStream, Wrong> {
        let (host, port) = self.place()?;
        let wrong = |why: String| Wrong::new(format!("connect to {}: {why}", self.address));
        match tokio::time::timeout(ANSWER, TcpStream::connect((host, port))).await {
            Ok(Ok(stream)) => Ok(stream),
            Ok(Err(error)) => Err(wrong(error.to_string())),
            Err(_) => Err(wrong(format!("no answer within {} s", ANSWER.as_secs()))),
        }
    }

    /// The first bytes that the server sends after these, as many as come within the time; none: it closed the connection.
    async fn answer(&self, bytes: &[u8]) -> Result<Option<Vec<u8>>, Wrong> {
        let mut stream = self.connect().await?;
        let mut answer = vec![0; 64];
        let read = async {
            stream.write_all(bytes).await?;
            stream.read(&mut answer).await
        };
        match tokio::time::timeout(ANSWER, read).await {
            Err(_) => Ok(None),
            // A server that resets the connection has refused too.
            Ok(read) => {
                answer.truncate(read.unwrap_or(0));
                Ok(Some(answer))
            }
        }
    }
}

pub(super) async fn address(cluster: &Cluster) -> Judged {
    cluster.front.connect().await?;
    Ok(Verdict::Pass)
}

pub(super) async fn audience(cluster: &Cluster) -> Judged {
    match &cluster.front.audience {
        Some(_) => Ok(Verdict::Pass),
        None => Err(Wrong::new("spec.audience is missing: no client knows what its tokens have to be for")),
    }
}

/// Clients in Go refuse an authority that is not valid now, those of other libraries take it.
pub(super) async fn authority(cluster: &Cluster) -> Judged {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs() as i64;
    for (number, der) in cluster.front.authorities()?.iter().enumerate() {
        let wrong = |why: String| Wrong::new(format!("certificate {number} of spec.caCert {why}"));
        let (_, certificate) =
            X509Certificate::from_der(der).map_err(|error| wrong(format!("cannot be read: {error}")))?;
        let validity = certificate.validity();
        if now < validity.not_before.timestamp() || now > validity.not_after.timestamp() {
            let (from, to) = (validity.not_before, validity.not_after);
            return Err(wrong(format!("is valid from {from} to {to}, and not now")));
        }
    }
    Ok(Verdict::Pass)
}

pub(super) async fn certificate(cluster: &Cluster) -> Judged {
    let front = &cluster.front;
    let (name, config) = (front.server_name()?, front.config()?);
    let stream = front.connect().await?;
    let handshake = TlsConnector::from(Arc::new(config)).connect(name, stream);
    match tokio::time::timeout(ANSWER, handshake).await {
        Ok(Ok(_)) => Ok(Verdict::Pass),
        Ok(Err(error)) => Err(Wrong::new(format!("handshake with {}: {error}", front.address))),
        Err(_) => {
            Err(Wrong::new(format!("handshake with {}: no end within {} s", front.address, ANSWER.as_secs())))
        }
    }
}

/// Record types of TLS, and the message that takes a client's offer.
const HANDSHAKE: u8 = 22;
const SERVER_HELLO: u8 = 2;

/// A ClientHello that offers nothing later than `version`, with suites and curves of its time.
fn hello(version: [u8; 2]) -> Vec<u8> {
    let suites = [0xc0, 0x09, 0xc0, 0x13, 0xc0, 0x0a, 0xc0, 0x14, 0x00, 0x2f, 0x00, 0x35];
    // Curves P-256 and P-384, uncompressed points.
    let extensions =
        [0x00, 0x0a, 0x00, 0x06, 0x00, 0x04, 0x00, 0x17, 0x00, 0x18, 0x00, 0x0b, 0x00, 0x02, 0x01, 0x00];
    let mut body = version.to_vec();
    body.extend([7; 32]);
    body.extend([0, 0, suites.len() as u8]);
    body.extend(suites);
    body.extend([1, 0, 0, extensions.len() as u8]);
    body.extend(extensions);
    let mut hello = vec![HANDSHAKE, 3, 1, 0, body.len() as u8 + 4, 1, 0, 0, body.len() as u8];
    hello.extend(body);
    hello
}

pub(super) async fn old_versions(cluster: &Cluster) -> Judged {
    let mut remarks = Vec::new();
    for (minor, name) in [(1, "TLS 1.0"), (2, "TLS 1.1")] {
        match cluster.front.answer(&hello([3, minor])).await? {
            Some(answer) if answer.first() == Some(&HANDSHAKE) && answer.get(5) == Some(&SERVER_HELLO) => {
                return Err(Wrong::new(format!("a client that offers nothing later than {name} is taken")));
            }
            Some(_) => {}
            None => remarks.push(format!("it leaves a client of {name} without an answer")),
        }
    }
    remarked(remarks)
}

/// HTTP/2 without TLS: what a server sends first is SETTINGS.
pub(super) async fn plaintext(cluster: &Cluster) -> Judged {
    /// The preface, and a client's empty SETTINGS.
    const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0";
    const SETTINGS: u8 = 4;
    match cluster.front.answer(PREFACE).await? {
        Some(answer) if answer.first() == Some(&0) && answer.get(3) == Some(&SETTINGS) => {
            Err(Wrong::new("HTTP/2 is served without TLS: tokens would be sent in the clear"))
        }
        Some(_) => Ok(Verdict::Pass),
        None => Ok(Verdict::Allowed("it leaves a client without TLS without an answer".into())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn front(address: &str) -> Front {
        Front::of(&json!({"spec": {"address": address, "audience": "", "caCert": "bm9uZQ=="}}))
    }

    #[test]
    fn an_address_is_a_host_and_a_port() {
        for (address, host, port) in
            [("a.svc:6443", "a.svc", 6443), ("127.0.0.1:1", "127.0.0.1", 1), ("[::1]:443", "::1", 443)]
        {
            assert_eq!(front(address).place().expect(address), (host.to_owned(), port));
        }
        for address in
            ["", "a.svc", "a.svc:", ":6443", "a.svc:0", "a.svc:x", "https://a.svc:1", "::1:443", "a/b:1"]
        {
            let wrong = front(address).place().expect_err(address).to_string();
            assert!(wrong.contains("spec.address") && wrong.contains(address), "{wrong}");
        }
    }

    #[test]
    fn fields_that_are_empty_are_missing() {
        let front = front("a:1");
        assert_eq!(front.audience, None);
        let wrong = front.config().expect_err("no PEM").to_string();
        assert!(wrong.contains("no certificate in PEM"), "{wrong}");
    }
}
