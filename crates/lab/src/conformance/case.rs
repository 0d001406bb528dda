//! What a case is, and what may come out of it.

use std::fmt;
use std::future::Future;
use std::pin::Pin;

use clap::ValueEnum;
use serde::Serialize;
use tonic::{Code, Status};

use super::subject::Subject;
pub(super) use crate::code::name as code_name;

/// One requirement, and the test of it.
pub(super) struct Case<S: Subject> {
    /// Short, unique, and stable over versions: `--focus` and `--skip` match it.
    pub name: &'static str,
    pub level: Level,
    /// The heading of the CSI spec below "Snapshot Metadata Service RPCs".
    pub section: &'static str,
    /// What the spec demands there, in short words.
    pub requirement: &'static str,
    /// What is prepared before, on time of its own.
    pub needs: &'static [S::Need],
    pub run: Run<S>,
}

impl<S: Subject> Case<S> {
    pub fn one(
        name: &'static str,
        level: Level,
        section: &'static str,
        requirement: &'static str,
        needs: &'static [S::Need],
        run: Run<S>,
    ) -> Vec<Self> {
        vec![Case { name, level, section, requirement, needs, run }]
    }

    /// A requirement on both streams: two cases.
    pub fn both(
        names: [&'static str; 2],
        level: Level,
        sections: [&'static str; 2],
        requirement: &'static str,
        needs: &'static [S::Need],
        runs: [Run<S>; 2],
    ) -> Vec<Self> {
        let case = |at: usize| Case {
            name: names[at],
            level,
            section: sections[at],
            requirement,
            needs,
            run: runs[at],
        };
        vec![case(0), case(1)]
    }
}

pub(super) type Run<S> = for<'a> fn(&'a S) -> Pin<Box<dyn Future<Output = Judged> + Send + 'a>>;

/// How the spec puts a requirement.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, ValueEnum)]
#[serde(rename_all = "UPPERCASE")]
pub(super) enum Level {
    Must,
    Should,
}

impl fmt::Display for Level {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Level::Must => "MUST",
            Level::Should => "SHOULD",
        })
    }
}

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
