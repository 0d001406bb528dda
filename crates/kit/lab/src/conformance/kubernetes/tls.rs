//! The fields of the SnapshotMetadataService object, and TLS at its address, before any call.

use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use tokio_rustls::TlsConnector;
use x509_parser::prelude::{FromDer, X509Certificate};

use super::super::verdict::{Judged, Verdict, Wrong, remarked};
use super::cluster::Cluster;
use super::front::ANSWER;

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
