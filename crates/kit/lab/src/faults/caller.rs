//! Who asks a gateway, as far as the request says: its token and its namespace. Nothing is verified here; that is the
//! gateway's work, and what some faults get wrong.
//!
//! A gateway that accepts the wrong token is simulated by a second call: a refused request is repeated with the token of a caller
//! that was accepted before.

use std::time::{SystemTime, UNIX_EPOCH};

use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use serde_json::Value;
use tonic::Code;

use super::catalog::Kind;

/// Who asks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Caller {
    pub token: String,
    pub namespace: String,
}

impl Caller {
    /// The name of the ServiceAccount, by the token's own word.
    pub fn account(&self) -> Option<String> {
        let claims = self.claims()?;
        let (_, account) = claims["sub"].as_str()?.strip_prefix("system:serviceaccount:")?.split_once(':')?;
        Some(account.to_owned())
    }

    fn claims(&self) -> Option<Value> {
        let claims = URL_SAFE_NO_PAD.decode(self.token.split('.').nth(1)?).ok()?;
        serde_json::from_slice(&claims).ok()
    }

    fn has_expired(&self) -> bool {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
        self.claims().and_then(|claims| claims["exp"].as_u64()).is_some_and(|ends| ends < now)
    }

    fn is_for_another_audience(&self, than: &Caller) -> bool {
        let audience = |caller: &Caller| caller.claims().map(|claims| claims["aud"].clone());
        audience(self).is_some_and(|audience_of_this| Some(audience_of_this) != audience(than))
    }

    /// Whether a fault lets this one, who was let in, stand in for another who was refused with `code`.
    pub(super) fn stands_in_for(&self, other: &Caller, code: Code, fault: Kind) -> bool {
        let is_unknown = code == Code::Unauthenticated && !other.token.is_empty();
        let audience_differs = other.is_for_another_audience(self);
        match fault {
            Kind::TokenNotNeeded => other.token.is_empty(),
            Kind::AudienceNotChecked => is_unknown && audience_differs,
            Kind::ExpiryNotChecked => is_unknown && other.has_expired(),
            Kind::SignatureNotChecked => is_unknown && !audience_differs && !other.has_expired(),
            Kind::RightsNotChecked => code == Code::PermissionDenied && self.token != other.token,
            Kind::NamespaceNotChecked => code == Code::NotFound && self.namespace != other.namespace,
            _ => false,
        }
    }
}
