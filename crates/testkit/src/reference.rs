//! The page with all flags, docs/reference.md, as each program's own test holds it against the program.

use std::collections::BTreeSet;

use crate::HOME;

/// Fails where the section of `program` lacks one of its flags (`help` and `version` need none), or names another. `flags` are
/// without dashes.
#[track_caller]
pub fn assert_names_every_flag<'a>(program: &str, flags: impl IntoIterator<Item = &'a str>) -> String {
    let page = std::fs::read_to_string(format!("{HOME}/docs/reference.md")).expect("the reference");
    let title = format!("Flags of `{program}`");
    let section = page.split("\n## ").find(|section| section.starts_with(&title));
    let section = section.unwrap_or_else(|| panic!("the reference has no section \"{title}\""));
    let is_letter = |c: char| c.is_ascii_lowercase() || c == '-';
    let named = section.split("`--").skip(1).map(|rest| rest.split(|c| !is_letter(c)).next().unwrap_or(rest));
    let named: BTreeSet<&str> = named.collect();
    let flags: BTreeSet<&str> = flags.into_iter().collect();
    for flag in flags.iter().filter(|flag| !["help", "version"].contains(flag)) {
        assert!(named.contains(flag), "--{flag} of {program} is not in the reference");
    }
    let unknown: Vec<&&str> = named.difference(&flags).collect();
    assert!(unknown.is_empty(), "the reference gives {program} flags that it does not have: {unknown:?}");
    section.to_owned()
}
