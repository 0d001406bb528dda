//! Authorities (CAs) and the certificates that they sign, and when each of them changes. Where they are kept, and who must
//! know of them, is for the program that makes them.

mod issue;
mod plan;

pub use issue::{Authority, Leaf};
pub use plan::{Announced, Former, Lifetimes, State, Step};
pub use rcgen::Error;
