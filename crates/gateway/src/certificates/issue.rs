//! Makes authorities and serving certificates.

use std::time::{Duration, SystemTime};

use jiff::Timestamp;
use rcgen::{
    BasicConstraints, CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair,
    KeyUsagePurpose,
};
use serde::{Deserialize, Serialize};

use super::plan::signed;

/// How far the clock of a client may be behind.
const SKEW: Duration = Duration::from_secs(300);

/// An authority, with its key.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Authority {
    /// Its subject's common name; each has its own.
    pub name: String,
    /// In PEM.
    pub certificate: String,
    /// In PEM.
    pub key: String,
    /// When the next one is due.
    pub renew: Timestamp,
}

/// A serving certificate, with its key.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Leaf {
    /// In PEM.
    pub certificate: String,
    /// In PEM.
    pub key: String,
    /// The names that it is for.
    pub hosts: Vec<String>,
    /// When the next one is due.
    pub renew: Timestamp,
    /// When it is no longer valid.
    pub ends: Timestamp,
}

impl Authority {
    /// A new one, for `lifetime` from `now`.
    pub fn new(now: Timestamp, lifetime: Duration) -> Result<Self, rcgen::Error> {
        let key = KeyPair::generate()?;
        let mut number = [0; 8];
        getrandom::fill(&mut number).map_err(|_| rcgen::Error::RingUnspecified)?;
        let name = format!("deltapath-gateway CA {:016x}", u64::from_be_bytes(number));
        let certificate = authority(&name, now, lifetime)?.self_signed(&key)?.pem();
        Ok(Authority { name, certificate, key: key.serialize_pem(), renew: now + signed(lifetime / 3 * 2) })
    }

    /// A certificate for a server with these names or addresses, for `lifetime` from `now`.
    pub fn issue(&self, hosts: &[String], now: Timestamp, lifetime: Duration) -> Result<Leaf, rcgen::Error> {
        let key = KeyPair::generate()?;
        let mut leaf = CertificateParams::new(hosts)?;
        leaf.distinguished_name.push(DnType::CommonName, "deltapath-gateway");
        leaf.not_before = (SystemTime::from(now) - SKEW).into();
        let ends = now + signed(lifetime);
        leaf.not_after = SystemTime::from(ends).into();
        leaf.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        leaf.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
        leaf.use_authority_key_identifier_extension = true;
        // What counts of the issuer in a signature is its name and its key.
        let issuer = Issuer::new(authority(&self.name, now, lifetime)?, KeyPair::from_pem(&self.key)?);
        let certificate = leaf.signed_by(&key, &issuer)?.pem();
        let renew = now + signed(lifetime / 3 * 2);
        Ok(Leaf { certificate, key: key.serialize_pem(), hosts: hosts.to_vec(), renew, ends })
    }
}

fn authority(name: &str, now: Timestamp, lifetime: Duration) -> Result<CertificateParams, rcgen::Error> {
    let mut params = CertificateParams::new(Vec::new())?;
    params.distinguished_name.push(DnType::CommonName, name);
    params.not_before = (SystemTime::from(now) - SKEW).into();
    params.not_after = SystemTime::from(now + signed(lifetime)).into();
    params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
    params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
    Ok(params)
}
