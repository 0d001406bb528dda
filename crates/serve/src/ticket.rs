//! Tickets: the router's word, in writing, that one node may read one object of another. The router signs them with the key of
//! its certificate, and the node that is asked believes them for as long as it would believe the router itself: the chain
//! comes along, and is checked against the same CA. A ticket names its bearer, whose own certificate must say the same, so a
//! stolen one is worth nothing; and it is over after a quarter of an hour, so rights are felt to end.
//!
//! A signature replaces a call to the source's node. So one call orders a transfer, and a source that restarts still accepts it.

use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use prost::Message;
use prost::bytes::Bytes;
use rustls::SignatureScheme;
use rustls::crypto::CryptoProvider;
use rustls::pki_types::{CertificateDer, UnixTime};
use rustls::server::danger::ClientCertVerifier;
use rustls::sign::SigningKey;

use crate::identity::{Identity, Role};

/// How long a ticket is good for. A caller of CreateVolume repeats the call sooner, with a new one.
pub const LIFE: Duration = Duration::from_secs(15 * 60);
/// How much longer one may seem to be good, because clocks differ. No one may sign one for a year.
const CLOCKS: Duration = Duration::from_secs(15 * 60);
/// No other signature of the router's key begins like this.
const CONTEXT: &[u8] = b"deltapath transfer ticket 1\0";
/// What tickets may be signed with.
const SCHEMES: [SignatureScheme; 6] = [
    SignatureScheme::ED25519,
    SignatureScheme::ECDSA_NISTP256_SHA256,
    SignatureScheme::ECDSA_NISTP384_SHA384,
    SignatureScheme::RSA_PSS_SHA256,
    SignatureScheme::RSA_PSS_SHA384,
    SignatureScheme::RSA_PSS_SHA512,
];

/// What a ticket says.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct Claims {
    /// Id of the snapshot or volume that may be read.
    #[prost(string, tag = "1")]
    pub source: String,
    /// Key of the node that may read it.
    #[prost(string, tag = "2")]
    pub reader: String,
    /// Until when, in seconds since 1970.
    #[prost(uint64, tag = "3")]
    pub expires: u64,
}

#[derive(Clone, PartialEq, Eq, Message)]
struct Signed {
    #[prost(bytes = "bytes", tag = "1")]
    claims: Bytes,
    #[prost(uint32, tag = "2")]
    scheme: u32,
    #[prost(bytes = "bytes", tag = "3")]
    signature: Bytes,
    #[prost(bytes = "bytes", repeated, tag = "4")]
    chain: Vec<Bytes>,
}

/// Why a ticket is refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refused {
    /// It is not a ticket.
    #[error("it is not a ticket")]
    Form,
    /// Its signer is not the router of this cluster.
    #[error("its signer is not the router of {cluster}: {why}")]
    Signer {
        /// Ours.
        cluster: String,
        /// What is wrong.
        why: String,
    },
    /// The signature is not that of the certificate's key.
    #[error("its signature is wrong")]
    Signature,
    /// It is for another node or another object.
    #[error("it allows node {reader} to read {source_id}")]
    Other {
        /// Whom it is for.
        reader: String,
        /// What it is for.
        source_id: String,
    },
    /// It is over, or good for too long.
    #[error(
        "it is not good at this time: it ends at {expires} (seconds since 1970), and the clock says {now}"
    )]
    Time {
        /// Its end.
        expires: u64,
        /// Our clock.
        now: u64,
    },
}

/// Signs tickets.
#[derive(Debug)]
pub struct Signer {
    key: Arc<dyn SigningKey>,
    chain: Vec<CertificateDer<'static>>,
}

impl Signer {
    /// Signs with the key of the first certificate.
    pub fn new(key: Arc<dyn SigningKey>, chain: Vec<CertificateDer<'static>>) -> Self {
        Signer { key, chain }
    }

    /// A ticket that lets the node `reader` read `source`.
    pub fn issue(&self, source: &str, reader: &str) -> Result<Vec<u8>, rustls::Error> {
        let expires = seconds(SystemTime::now()) + LIFE.as_secs();
        self.sign(Claims { source: source.to_owned(), reader: reader.to_owned(), expires })
    }

    fn sign(&self, claims: Claims) -> Result<Vec<u8>, rustls::Error> {
        let signer = self
            .key
            .choose_scheme(&SCHEMES)
            .ok_or_else(|| rustls::Error::General("the key cannot sign tickets".to_owned()))?;
        let claims = claims.encode_to_vec();
        let signature = signer.sign(&message(&claims))?;
        let chain = self.chain.iter().map(|certificate| Bytes::copy_from_slice(certificate)).collect();
        let scheme = u32::from(u16::from(signer.scheme()));
        Ok(Signed { claims: claims.into(), scheme, signature: signature.into(), chain }.encode_to_vec())
    }
}

/// Verifies tickets.
#[derive(Debug)]
pub struct TicketVerifier {
    signed: Arc<dyn ClientCertVerifier>,
    provider: Arc<CryptoProvider>,
    cluster: String,
}

impl TicketVerifier {
    /// Believes the router of this cluster, whose certificate `signed` has to accept.
    pub fn new(signed: Arc<dyn ClientCertVerifier>, provider: Arc<CryptoProvider>, cluster: &str) -> Self {
        TicketVerifier { signed, provider, cluster: cluster.to_owned() }
    }

    /// Whether the ticket lets the node `reader` read `source` now.
    pub fn check(&self, ticket: &[u8], source: &str, reader: &str) -> Result<(), Refused> {
        self.check_at(ticket, source, reader, SystemTime::now())
    }

    fn check_at(&self, ticket: &[u8], source: &str, reader: &str, now: SystemTime) -> Result<(), Refused> {
        let signed = Signed::decode(ticket).map_err(|_| Refused::Form)?;
        let mut chain = signed.chain.iter().map(|certificate| CertificateDer::from(certificate.to_vec()));
        let signer = chain.next().ok_or(Refused::Form)?;
        let stranger = |why: String| Refused::Signer { cluster: self.cluster.clone(), why };
        let at = UnixTime::since_unix_epoch(now.duration_since(UNIX_EPOCH).unwrap_or_default());
        self.signed
            .verify_client_cert(&signer, &chain.collect::<Vec<_>>(), at)
            .map_err(|error| stranger(error.to_string()))?;
        match Identity::of(&signer) {
            Some(Identity { cluster, role: Role::Router }) if cluster == self.cluster => {}
            found => {
                let found =
                    found.map_or_else(|| "no part of deltapath".to_owned(), |found| found.to_string());
                return Err(stranger(format!("its certificate is for {found}")));
            }
        }
        self.verify(&signer, &signed)?;
        // Only now: what it says is the router's word.
        let claims = Claims::decode(signed.claims).map_err(|_| Refused::Form)?;
        let (now, expires) = (seconds(now), claims.expires);
        if expires <= now || expires > now + (LIFE + CLOCKS).as_secs() {
            return Err(Refused::Time { expires, now });
        }
        match claims.source == source && claims.reader == reader {
            true => Ok(()),
            false => Err(Refused::Other { reader: claims.reader, source_id: claims.source }),
        }
    }

    fn verify(&self, signer: &CertificateDer<'_>, signed: &Signed) -> Result<(), Refused> {
        let scheme = u16::try_from(signed.scheme).map_err(|_| Refused::Form)?.into();
        if !SCHEMES.contains(&scheme) {
            return Err(Refused::Signature);
        }
        let certificate = webpki::EndEntityCert::try_from(signer).map_err(|_| Refused::Form)?;
        let known = self.provider.signature_verification_algorithms.mapping;
        let algorithms = known.iter().find(|(known, _)| *known == scheme).map_or(&[][..], |(_, all)| all);
        let message = message(&signed.claims);
        let is_sound = algorithms
            .iter()
            .any(|algorithm| certificate.verify_signature(*algorithm, &message, &signed.signature).is_ok());
        if is_sound { Ok(()) } else { Err(Refused::Signature) }
    }
}

fn message(claims: &[u8]) -> Vec<u8> {
    [CONTEXT, claims].concat()
}

fn seconds(time: SystemTime) -> u64 {
    time.duration_since(UNIX_EPOCH).unwrap_or_default().as_secs()
}

#[cfg(test)]
mod tests {
    use super::*;
    use rcgen::{
        BasicConstraints, CertificateParams, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair, SanType,
    };
    use rustls::RootCertStore;
    use rustls::crypto::ring;
    use rustls::pki_types::PrivateKeyDer;
    use rustls::server::WebPkiClientVerifier;

    struct Ca(Issuer<'static, KeyPair>, CertificateDer<'static>);

    fn ca() -> Ca {
        let mut params = CertificateParams::new(Vec::new()).expect("params");
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let key = KeyPair::generate().expect("a key");
        let certificate = params.self_signed(&key).expect("a CA").der().clone();
        Ca(Issuer::new(params, key), certificate)
    }

    impl Ca {
        fn signer(&self, uri: &str) -> Signer {
            let key = KeyPair::generate().expect("a key");
            let mut params = CertificateParams::new(Vec::new()).expect("params");
            params.subject_alt_names.push(SanType::URI(uri.try_into().expect("a URI")));
            params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ClientAuth];
            let leaf = params.signed_by(&key, &self.0).expect("a certificate");
            let key = PrivateKeyDer::try_from(key.serialize_der()).expect("a key");
            let key = ring::default_provider().key_provider.load_private_key(key).expect("a key");
            Signer::new(key, vec![leaf.der().clone()])
        }

        fn judge(&self) -> TicketVerifier {
            let provider = Arc::new(ring::default_provider());
            let mut roots = RootCertStore::empty();
            roots.add(self.1.clone()).expect("a CA");
            let signed = WebPkiClientVerifier::builder_with_provider(Arc::new(roots), provider.clone());
            TicketVerifier::new(signed.build().expect("a verifier"), provider, "c")
        }
    }

    const ROUTER: &str = "spiffe://c/deltapath/router";

    #[test]
    fn a_ticket_is_for_one_reader_and_one_source_and_ends() {
        let ca = ca();
        let (signer, judge, now) = (ca.signer(ROUTER), ca.judge(), SystemTime::now());
        let ticket = signer.issue("snap-1", "aaaaaaaa").expect("a ticket");
        let check =
            |source, reader, later| judge.check_at(&ticket, source, reader, now + Duration::from_secs(later));
        assert_eq!(check("snap-1", "aaaaaaaa", 0), Ok(()));
        assert_eq!(check("snap-1", "aaaaaaaa", LIFE.as_secs() - 2), Ok(()));
        assert!(matches!(check("snap-1", "aaaaaaaa", LIFE.as_secs() + 2), Err(Refused::Time { .. })));
        assert!(matches!(check("snap-2", "aaaaaaaa", 0), Err(Refused::Other { .. })));
        assert!(matches!(check("snap-1", "bbbbbbbb", 0), Err(Refused::Other { .. })));
        let endless = Claims { source: "snap-1".into(), reader: "aaaaaaaa".into(), expires: u64::MAX };
        let endless = judge.check_at(&signer.sign(endless).expect("a ticket"), "snap-1", "aaaaaaaa", now);
        assert!(matches!(endless, Err(Refused::Time { .. })), "{endless:?}");
    }

    #[test]
    fn only_the_router_of_the_cluster_issues_tickets() {
        let (ours, other) = (ca(), ca());
        let judge = ours.judge();
        for (signer, expected) in [
            (ours.signer(ROUTER), true),
            (other.signer(ROUTER), false),
            (ours.signer("spiffe://other/deltapath/router"), false),
            (ours.signer("spiffe://c/deltapath/node/aaaaaaaa"), false),
        ] {
            let ticket = signer.issue("snap-1", "aaaaaaaa").expect("a ticket");
            let checked = judge.check(&ticket, "snap-1", "aaaaaaaa");
            match expected {
                true => assert_eq!(checked, Ok(())),
                false => assert!(matches!(checked, Err(Refused::Signer { .. })), "{checked:?}"),
            }
        }
    }

    #[test]
    fn a_changed_ticket_is_refused() {
        let ca = ca();
        let (signer, judge) = (ca.signer(ROUTER), ca.judge());
        let ticket = signer.issue("snap-1", "aaaaaaaa").expect("a ticket");
        let mut signed = Signed::decode(&ticket[..]).expect("a ticket");
        let claims = Claims::decode(signed.claims.clone()).expect("claims");
        let other = Claims { source: "snap-2".into(), ..claims };
        signed.claims = other.encode_to_vec().into();
        assert_eq!(judge.check(&signed.encode_to_vec(), "snap-2", "aaaaaaaa"), Err(Refused::Signature));
        for cut in 0..ticket.len() {
            judge.check(&ticket[..cut], "snap-1", "aaaaaaaa").expect_err("cut short");
        }
        // The certificate of the router with the signature of somebody else.
        let mut forged = Signed::decode(&ticket[..]).expect("a ticket");
        let node = ca.signer("spiffe://c/deltapath/node/aaaaaaaa");
        let by_node = node.issue("snap-1", "aaaaaaaa").expect("a ticket");
        let by_node = Signed::decode(&by_node[..]).expect("a ticket");
        (forged.claims, forged.signature) = (by_node.claims, by_node.signature);
        assert_eq!(judge.check(&forged.encode_to_vec(), "snap-1", "aaaaaaaa"), Err(Refused::Signature));
    }
}
