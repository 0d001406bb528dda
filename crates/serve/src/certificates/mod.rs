//! Authorities (CAs) and the certificates that they sign, when each of them changes, and the Secret in which they are kept. Who
//! must know of them is for the program that makes them.

mod issue;
mod plan;
pub mod secret;

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
