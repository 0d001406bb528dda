//! Authorities (CAs) and the certificates that they sign, when each of them changes, and the Secret in which they are kept. Who
//! must know of them is for the program that makes them.

mod issue;
mod plan;
pub mod secret;

pub use issue::{Authority, Leaf};
pub use plan::{Announced, Former, Lifetimes, State, Step};
pub use rcgen::Error;
pub use secret::SecretError;
