//! What changed since another run of the suite.

use std::collections::BTreeMap;
use std::path::Path;

use serde::{Deserialize, Serialize};

/// An earlier run, as `--output json` printed it.
#[derive(Debug, Deserialize)]
pub(super) struct Before {
    cases: Vec<Judged>,
}

#[derive(Debug, Deserialize)]
struct Judged {
    name: String,
    verdict: String,
}

/// A case with another verdict than before.
#[derive(Debug, PartialEq, Eq, Serialize)]
struct Change {
    name: String,
    /// None: it was not run.
    before: Option<String>,
    /// None: it was not run now.
    now: Option<String>,
}

/// What changed.
#[derive(Debug, PartialEq, Eq, Serialize)]
pub(super) struct Changes(Vec<Change>);

impl Before {
    /// Reads the report in a file.
    pub fn read(path: &Path) -> Result<Self, String> {
        crate::output::before(path, "report of cbt-lab conformance --output json")
    }
}

impl Changes {
    /// Between the verdicts of an earlier run and those of this one, by the names of cases.
    pub fn between<'a>(before: &'a Before, now: impl Iterator<Item = (&'a str, &'a str)>) -> Self {
        let mut both: BTreeMap<&str, (Option<&str>, Option<&str>)> = BTreeMap::new();
        for case in &before.cases {
            both.entry(&case.name).or_default().0 = Some(&case.verdict);
        }
        now.for_each(|(name, verdict)| both.entry(name).or_default().1 = Some(verdict));
        let changed = both.into_iter().filter(|(_, (before, now))| before != now);
        let change = |(name, (before, now)): (&str, (Option<&str>, Option<&str>))| Change {
            name: name.to_owned(),
            before: before.map(str::to_owned),
            now: now.map(str::to_owned),
        };
        Changes(changed.map(change).collect())
    }

    /// For a person.
    pub fn text(&self) -> String {
        if self.0.is_empty() {
            return "nothing changed since the run that it is compared with\n".into();
        }
        let word = |verdict: &Option<String>| verdict.clone().unwrap_or_else(|| "not run".into());
        let lines = self.0.iter().map(|Change { name, before, now }| {
            format!("changed: {name}: {} -> {}\n", word(before), word(now))
        });
        lines.collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_changed_is_listed_and_nothing_else() {
        let before = [("a", "pass"), ("b", "fail"), ("gone", "pass")];
        let cases = before.map(|(name, verdict)| Judged { name: name.into(), verdict: verdict.into() });
        let told = Before { cases: cases.into() };
        let now = [("a", "pass"), ("b", "pass"), ("new", "skip")];
        let changes = Changes::between(&told, now.into_iter());
        assert_eq!(
            changes.text(),
            "changed: b: fail -> pass\nchanged: gone: pass -> not run\nchanged: new: not run -> skip\n"
        );
        let same = Changes::between(&told, before.into_iter());
        assert_eq!(same, Changes(Vec::new()));
    }
}
