//! Makes authorities and certificates.

use std::time::{Duration, SystemTime};

use jiff::{SignedDuration, Timestamp};
use rcgen::{
    BasicConstraints, CertificateParams, CertificateSigningRequestParams, DnType, ExtendedKeyUsagePurpose,
    IsCa, Issuer, KeyPair, KeyUsagePurpose, SanType,
};
use serde::{Deserialize, Serialize};

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

/// A certificate of a server or, where its name is a URI, of a program of ours; with its key.
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
    /// A new one of this owner, for `lifetime` from `now`.
    pub fn new(owner: &str, now: Timestamp, lifetime: Duration) -> Result<Self, rcgen::Error> {
        let key = KeyPair::generate()?;
        let mut number = [0; 8];
        getrandom::fill(&mut number).map_err(|_| rcgen::Error::RingUnspecified)?;
        let name = format!("{owner} CA {:016x}", u64::from_be_bytes(number));
        let certificate = authority(&name, now, lifetime)?.self_signed(&key)?.pem();
        Ok(Authority { name, certificate, key: key.serialize_pem(), renew: now + signed(lifetime / 3 * 2) })
    }

    /// A certificate of `owner` with these names, addresses or URIs, for `lifetime` from `now`.
    pub fn issue(
        &self,
        owner: &str,
        hosts: &[String],
        now: Timestamp,
        lifetime: Duration,
    ) -> Result<Leaf, rcgen::Error> {
        let key = KeyPair::generate()?;
        let leaf = leaf(owner, hosts, now, lifetime)?;
        let certificate = leaf.signed_by(&key, &self.issuer(now, lifetime)?)?.pem();
        let renew = now + signed(lifetime / 3 * 2);
        let (key, hosts, ends) = (key.serialize_pem(), hosts.to_vec(), now + signed(lifetime));
        Ok(Leaf { certificate, key, hosts, renew, ends })
    }

    /// A certificate, in PEM, for the key of a request (PKCS #10, in PEM) and these names. Nothing else that the request asks
    /// for is granted.
    pub fn sign(
        &self,
        request: &str,
        owner: &str,
        hosts: &[String],
        now: Timestamp,
        lifetime: Duration,
    ) -> Result<String, rcgen::Error> {
        let mut request = CertificateSigningRequestParams::from_pem(request)?;
        request.params = leaf(owner, hosts, now, lifetime)?;
        Ok(request.signed_by(&self.issuer(now, lifetime)?)?.pem())
    }

    /// What counts of the issuer in a signature is its name and its key.
    fn issuer(&self, now: Timestamp, lifetime: Duration) -> Result<Issuer<'static, KeyPair>, rcgen::Error> {
        Ok(Issuer::new(authority(&self.name, now, lifetime)?, KeyPair::from_pem(&self.key)?))
    }
}

fn leaf(
    owner: &str,
    hosts: &[String],
    now: Timestamp,
    lifetime: Duration,
) -> Result<CertificateParams, rcgen::Error> {
    let (uris, hosts): (Vec<_>, Vec<_>) = hosts.iter().cloned().partition(|host| host.contains("://"));
    let mut leaf = CertificateParams::new(hosts)?;
    leaf.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
    if !uris.is_empty() {
        leaf.extended_key_usages.push(ExtendedKeyUsagePurpose::ClientAuth);
    }
    for uri in uris {
        leaf.subject_alt_names.push(SanType::URI(uri.try_into()?));
    }
    leaf.distinguished_name.push(DnType::CommonName, owner);
    leaf.not_before = (SystemTime::from(now) - SKEW).into();
    leaf.not_after = SystemTime::from(now + signed(lifetime)).into();
    leaf.key_usages = vec![KeyUsagePurpose::DigitalSignature];
    leaf.use_authority_key_identifier_extension = true;
    Ok(leaf)
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

/// A span of time for arithmetic with timestamps.
pub(super) fn signed(duration: Duration) -> SignedDuration {
    SignedDuration::try_from(duration).unwrap_or(SignedDuration::MAX)
}
