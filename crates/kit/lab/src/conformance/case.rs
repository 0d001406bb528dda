//! What a case is. What may come out of it is in `verdict.rs`.

use std::fmt;
use std::future::Future;
use std::pin::Pin;

use clap::ValueEnum;
use serde::Serialize;

use super::subject::Subject;
use super::verdict::Judged;

/// One requirement, and the test of it.
#[derive(Serialize)]
#[serde(bound = "")]
pub(super) struct Case<S: Subject> {
    /// Short, unique, and stable over versions: `--focus` and `--skip` match it.
    pub name: &'static str,
    pub level: Level,
    /// The heading of the CSI spec below "Snapshot Metadata Service RPCs".
    pub section: &'static str,
    /// What the spec demands there, in short words.
    pub requirement: &'static str,
    /// What is prepared before, on time of its own.
    #[serde(skip)]
    pub needs: &'static [S::Need],
    #[serde(skip)]
    pub run: Run<S>,
}

impl<S: Subject> Case<S> {
    pub fn of(
        name: &'static str,
        level: Level,
        section: &'static str,
        requirement: &'static str,
        needs: &'static [S::Need],
        run: Run<S>,
    ) -> Self {
        Case { name, level, section, requirement, needs, run }
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
