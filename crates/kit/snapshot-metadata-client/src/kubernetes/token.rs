//! Security tokens: requested and renewed before they end, or read from a file.

use std::collections::HashMap;
use std::path::Path;
use std::time::{Duration, Instant};

use k8s_openapi::api::authentication::v1::{SelfSubjectReview, TokenRequest, TokenRequestSpec};
use k8s_openapi::api::core::v1::ServiceAccount;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::Api;
use kube::api::PostParams;
use tokio::sync::{Mutex, OnceCell};

use super::{Options, Token, ask};
use crate::error::Error;

/// The tokens of one client.
pub(super) struct Tokens {
    client: kube::Client,
    options: Options,
    /// Namespace and name of the account that tokens are requested for.
    account: OnceCell<(String, String)>,
    /// Requested ones, by audience. The lock is held while one is requested, so others wait for it and ask for none.
    held: Mutex<HashMap<String, Held>>,
}

struct Held {
    token: String,
    renew: Instant,
}

impl Tokens {
    pub fn new(client: kube::Client, options: Options) -> Self {
        Tokens { client, options, account: OnceCell::new(), held: Mutex::default() }
    }

    /// A token for an audience that is valid for some time to come.
    pub async fn get(&self, audience: &str) -> Result<String, Error> {
        if let Token::File(path) = &self.options.token {
            return read(path).await;
        }
        let mut held = self.held.lock().await;
        if let Some(held) = held.get(audience).filter(|held| Instant::now() < held.renew) {
            return Ok(held.token.clone());
        }
        let requested = Instant::now();
        let (token, lifetime) = self.request(audience).await?;
        let new = Held { token: token.clone(), renew: requested + usable_for(lifetime) };
        held.insert(audience.to_owned(), new);
        Ok(token)
    }

    /// Requests new ones from now on.
    pub async fn forget(&self) {
        self.held.lock().await.clear();
    }

    /// A new token and how long it is valid.
    async fn request(&self, audience: &str) -> Result<(String, Duration), Error> {
        let (namespace, name) = self.account.get_or_try_init(|| self.find_account()).await?;
        let account = format!("ServiceAccount {namespace}/{name}");
        let accounts: Api<ServiceAccount> = Api::namespaced(self.client.clone(), namespace);
        let seconds = i64::try_from(self.options.token_lifetime.as_secs()).unwrap_or(i64::MAX);
        let request = TokenRequest {
            metadata: ObjectMeta::default(),
            spec: Some(TokenRequestSpec {
                audiences: Some(vec![audience.to_owned()]),
                expiration_seconds: Some(seconds),
                ..TokenRequestSpec::default()
            }),
            status: None,
        };
        let what = format!("a token of {account}");
        let made = ask(&what, accounts.create_token_request(name, &PostParams::default(), &request)).await;
        let made = made.map_err(|error| match error {
            Error::Missing { .. } => Error::Missing { what: account },
            other => other,
        })?;
        // The API server may grant another time. It is taken as a length, for the clocks may differ.
        let granted = made.spec.and_then(|spec| spec.expiration_seconds).unwrap_or(seconds);
        let token = made.status.and_then(|status| status.token).unwrap_or_default();
        if token.is_empty() {
            return Err(Error::Missing { what });
        }
        Ok((token, Duration::from_secs(u64::try_from(granted).unwrap_or_default())))
    }

    async fn find_account(&self) -> Result<(String, String), Error> {
        if let Token::ServiceAccount { namespace, name } = &self.options.token {
            return Ok((namespace.clone(), name.clone()));
        }
        let reviews: Api<SelfSubjectReview> = Api::all(self.client.clone());
        let (parameters, review) = (PostParams::default(), SelfSubjectReview::default());
        let review = ask("the caller's own user", reviews.create(&parameters, &review)).await?;
        let user = review.status.and_then(|status| status.user_info).and_then(|user| user.username);
        account_of(user.as_deref().unwrap_or_default())
    }
}

/// The service account behind a user's name.
fn account_of(user: &str) -> Result<(String, String), Error> {
    let account = user.strip_prefix("system:serviceaccount:").and_then(|rest| rest.split_once(':'));
    account
        .map(|(namespace, name)| (namespace.to_owned(), name.to_owned()))
        .ok_or_else(|| Error::NoAccount { user: user.to_owned() })
}

/// How long a token is used: a fifth of its life is left for the way to the server and its checks.
fn usable_for(lifetime: Duration) -> Duration {
    lifetime * 4 / 5
}

async fn read(path: &Path) -> Result<String, Error> {
    let failed = |source| Error::TokenFile { path: path.to_owned(), source };
    let text = tokio::fs::read_to_string(path).await.map_err(failed)?;
    match text.trim() {
        "" => Err(failed(std::io::Error::other("the file is empty"))),
        token => Ok(token.to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_is_renewed_before_it_ends() {
        for (lifetime, used) in [(600, 480), (3600, 2880), (0, 0)] {
            assert_eq!(usable_for(Duration::from_secs(lifetime)), Duration::from_secs(used));
        }
    }

    #[test]
    fn only_service_accounts_have_tokens() {
        let account = account_of("system:serviceaccount:shop:backup").expect("an account");
        assert_eq!(account, ("shop".into(), "backup".into()));
        for user in ["", "admin", "system:node:one", "system:serviceaccount:shop"] {
            assert!(matches!(account_of(user), Err(Error::NoAccount { .. })), "{user:?}");
        }
    }
}
