//! Authorities (CAs) and the certificates that they sign, when each of them changes, and the Secret in which they are kept. Who
//! must know of them is for the program that makes them.

mod issue;
mod plan;
pub mod secret;

use jiff::Timestamp;

pub use issue::{Authority, Leaf};
pub use plan::{Announced, Former, Lifetimes, State, Step};

/// Why a step of who looks after them failed; it is tried again.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The API server refused this, or did not answer.
    #[error("{0}")]
    Api(&'static str, #[source] kube::Error),
    /// No certificate was made.
    #[error("make a certificate")]
    Issue(#[from] rcgen::Error),
    /// The Secret holds something else.
    #[error(
        "the Secret's {} cannot be read: delete it from the Secret, and new certificates are made",
        secret::KEPT
    )]
    Kept(#[source] serde_json::Error),
    /// It took too long.
    #[error("the API server does not answer")]
    Late,
}

impl State {
    /// This state, or what is due after it now, and whether that is another. Without one the first is made; `known` are the authorities
    /// that clients go by.
    pub async fn next(
        state: Option<State>,
        owner: &str,
        hosts: &[String],
        known: impl Future<Output = Result<Option<String>, Error>>,
        lifetimes: &Lifetimes,
    ) -> Result<(State, bool), Error> {
        let Some(state) = state else {
            let first = State::first(owner, hosts, known.await?, Timestamp::now(), lifetimes)?;
            tracing::info!("making the first certificates");
            return Ok((first, true));
        };
        let now = Timestamp::now();
        let Some(step) = state.due(now, lifetimes, hosts) else { return Ok((state, false)) };
        tracing::info!(?step, "certificates");
        Ok((state.after(step, owner, hosts, now, lifetimes)?, true))
    }
}
