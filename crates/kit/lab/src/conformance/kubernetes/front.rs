//! The SnapshotMetadataService object, and connections to the address that it names.

use std::time::Duration;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use rustls::ClientConfig;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, ServerName};
use serde_json::Value;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use super::super::verdict::Wrong;

/// How long the server may take to connect, or to answer bytes that it does not want.
pub(super) const ANSWER: Duration = Duration::from_secs(10);

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
    pub fn authorities(&self) -> Result<Vec<CertificateDer<'static>>, Wrong> {
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
        let config = crate::tls::config(self.authorities()?);
        config.map_err(|error| Wrong::new(format!("spec.caCert: {error}")))
    }

    pub async fn connect(&self) -> Result<TcpStream, Wrong> {
        let (host, port) = self.place()?;
        let wrong = |why: String| Wrong::new(format!("connect to {}: {why}", self.address));
        match tokio::time::timeout(ANSWER, TcpStream::connect((host, port))).await {
            Ok(Ok(stream)) => Ok(stream),
            Ok(Err(error)) => Err(wrong(error.to_string())),
            Err(_) => Err(wrong(format!("no answer within {} s", ANSWER.as_secs()))),
        }
    }

    /// The first bytes that the server sends after these, as many as come within the time; none: it closed the connection.
    pub async fn answer(&self, bytes: &[u8]) -> Result<Option<Vec<u8>>, Wrong> {
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
