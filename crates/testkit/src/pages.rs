//! The pages of this repository, as tests hold them against the programs.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use crate::HOME;

/// A file of the repository.
pub fn read(path: &str) -> String {
    std::fs::read_to_string(Path::new(HOME).join(path)).unwrap_or_else(|error| panic!("{path}: {error}"))
}

/// The section whose heading, of the second level, begins so.
#[track_caller]
pub fn section<'p>(page: &'p str, heading: &str) -> &'p str {
    let found = page.split("\n## ").skip(1).find(|section| section.starts_with(heading));
    found.unwrap_or_else(|| panic!("the page has no section \"{heading}\""))
}

/// The blocks of code in a language.
pub fn blocks<'p>(page: &'p str, language: &str) -> Vec<&'p str> {
    let blocks = page.split("\n```").skip(1).step_by(2);
    blocks.filter_map(|block| block.strip_prefix(language)?.strip_prefix('\n')).collect()
}

/// The cells of the rows that begin so.
pub fn rows<'p>(text: &'p str, begin: &str) -> Vec<Vec<&'p str>> {
    let cells = |row: &'p str| row.trim_matches('|').split('|').map(str::trim).collect();
    text.lines().filter(|line| line.starts_with(begin)).map(cells).collect()
}

/// The calls of CSI as its contract has them: the service and the name of each.
pub fn calls_of_csi() -> Vec<(String, String)> {
    let (mut service, mut calls) = (String::new(), Vec::new());
    for line in read("proto/csi.proto").lines().map(str::trim) {
        if let Some(name) = line.strip_prefix("service ") {
            name.trim_end_matches('{').trim().clone_into(&mut service);
        }
        let call = line.strip_prefix("rpc ").and_then(|rest| rest.split(['(', ' ']).next());
        calls.extend(call.map(|call| (service.clone(), call.to_owned())));
    }
    calls
}

/// The words of a line without those that have a figure: two runs print the same ones. The first word always counts.
fn words(line: &str) -> Vec<&str> {
    let has_figure = |word: &str| word.contains(|c: char| c.is_ascii_digit());
    let words = line.split_whitespace().enumerate();
    words.filter(|(number, word)| *number == 0 || !has_figure(word)).map(|(_, word)| word).collect()
}

/// Fails where a line of the example of a page, but for its figures, is not the start of a line that was printed. Lines without a
/// letter do not count.
#[track_caller]
pub fn assert_printed(example: &str, printed: &str) {
    let lines: Vec<Vec<&str>> = printed.lines().map(words).collect();
    for wanted in example.lines().filter(|line| line.contains(|c: char| c.is_ascii_alphabetic())) {
        let is_there = lines.iter().any(|line| line.starts_with(&words(wanted)));
        assert!(is_there, "the page shows {wanted:?}, which is not in:\n{printed}");
    }
}

/// What stands between backticks.
pub fn quoted(text: &str) -> impl Iterator<Item = &str> {
    text.split('`').skip(1).step_by(2)
}

/// Fails where a page names a test, as `file::test`, that is in none of these suites; how many it names.
#[track_caller]
pub fn assert_has_tests(page: &str, suites: &[&str]) -> usize {
    let named: Vec<_> = quoted(page).filter_map(|name| name.split_once("::")).collect();
    for (file, test) in &named {
        let has_test = |suite: &&str| {
            let source = std::fs::read_to_string(format!("{HOME}/{suite}/{file}.rs"));
            source.is_ok_and(|source| source.contains(&format!("fn {test}(")))
        };
        assert!(suites.iter().any(has_test), "the page names the test {file}::{test}, which is nowhere");
    }
    named.len()
}

/// The metrics of the reference, each with its labels. Those of cbt-earlier that are "as the gateway's" have none here.
pub fn metrics() -> BTreeMap<String, BTreeSet<String>> {
    let page = read("docs/reference.md");
    let is_metric = |name: &&str| name.starts_with("deltapath_") || name.starts_with("cbt_earlier_");
    let of_row = |row: Vec<&str>| {
        let labels: BTreeSet<String> = quoted(row[1]).map(str::to_owned).collect();
        let names: Vec<String> = quoted(row[0]).filter(is_metric).map(str::to_owned).collect();
        names.into_iter().map(move |name| (name, labels.clone()))
    };
    rows(&page, "| `").into_iter().filter(|row| row.len() == 3).flat_map(of_row).collect()
}

/// Fails where a program serves a metric or a label that the reference does not give it.
#[track_caller]
pub fn assert_has_metrics(served: &str) {
    let metrics = metrics();
    // Others may be asked too, and those of the process are Prometheus' own.
    let is_ours = |line: &&str| line.starts_with("deltapath_") || line.starts_with("cbt_earlier_");
    for line in served.lines().filter(is_ours) {
        let (name, labels) = line.rsplit_once(' ').expect(line).0.split_once('{').unwrap_or((line, ""));
        let name = name.split(' ').next().unwrap_or(name);
        let ends = ["", "_bucket", "_sum", "_count"].into_iter();
        let known = ends.filter_map(|end| metrics.get(name.strip_suffix(end)?)).next();
        let known = known.unwrap_or_else(|| panic!("{name} is not in the reference"));
        // A label's name is the word before `="`.
        for (label, _) in labels.split(',').filter_map(|label| label.split_once("=\"")) {
            assert!(
                label == "le" || known.contains(label),
                "the reference does not give {name} the label {label}"
            );
        }
    }
}

/// Fails where the section of `program` lacks one of its flags (`help` and `version` need none), or names another. `flags` are
/// without dashes.
#[track_caller]
pub fn assert_names_every_flag<'a>(program: &str, flags: impl IntoIterator<Item = &'a str>) -> String {
    let page = read("docs/reference.md");
    let section = section(&page, &format!("Flags of `{program}`"));
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
