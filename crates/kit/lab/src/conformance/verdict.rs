//! What may come out of a case.

use std::fmt;

use tonic::{Code, Status};

pub(super) use crate::code::name as code_name;

/// What a case found, where nothing is wrong.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Verdict {
    Pass,
    /// The spec allows it, and a user should know of it.
    Allowed(String),
    /// It was tried, nothing is wrong, and what the case is about did not happen: no proof.
    NotShown(String),
    /// It could not be tried, and why.
    Skip(String),
}

impl Verdict {
    /// As reports name it.
    pub fn word(&self) -> &'static str {
        match self {
            Verdict::Pass => "pass",
            Verdict::Allowed(_) => "allowed",
            Verdict::NotShown(_) => "not-shown",
            Verdict::Skip(_) => "skip",
        }
    }
}

/// Why a case fails.
#[derive(Clone, Debug)]
pub(crate) struct Wrong {
    what: String,
    code: Option<Code>,
    silent: bool,
}

/// What a case returns.
pub(super) type Judged = Result<Verdict, Wrong>;

impl Wrong {
    pub fn new(what: impl Into<String>) -> Self {
        Wrong { what: what.into(), code: None, silent: false }
    }

    /// A call that was refused.
    pub fn call(call: &str, status: &Status) -> Self {
        // What the driver itself answers has no cause on this side of the socket.
        let silent = std::error::Error::source(status).is_some() || status.code() == Code::Unavailable;
        Wrong { what: format!("{call}: {}", said(status)), code: Some(status.code()), silent }
    }

    /// The code of the call that was refused.
    pub fn code(&self) -> Option<Code> {
        self.code
    }

    /// Whether the driver did not answer at all.
    pub fn is_silence(&self) -> bool {
        self.silent
    }

    /// Says where it went wrong.
    pub fn at(self, place: &str) -> Self {
        Wrong { what: format!("{place}: {}", self.what), ..self }
    }
}

impl fmt::Display for Wrong {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.what)
    }
}

impl From<std::io::Error> for Wrong {
    fn from(error: std::io::Error) -> Self {
        Wrong::new(error.to_string())
    }
}

/// A status in words.
pub(crate) fn said(status: &Status) -> String {
    format!("{}: {}", code_name(status.code()), status.message())
}

/// Passes, or is allowed with all that was remarked.
pub(super) fn remarked(remarks: Vec<String>) -> Judged {
    match remarks.is_empty() {
        true => Ok(Verdict::Pass),
        false => Ok(Verdict::Allowed(remarks.join("; "))),
    }
}

/// The same with the first remark, of many that are alike.
pub(super) fn remarked_once(remarks: Vec<String>) -> Judged {
    remarked(remarks.into_iter().take(1).collect())
}

/// What is allowed where an answer would have no tuples.
pub(super) fn without_message() -> Judged {
    Ok(Verdict::Allowed("OK without a message: the client gets neither type nor capacity".into()))
}
