//! What README and reference say is there, is there: flags, parameters, targets.

use std::collections::BTreeSet;
use std::path::Path;
use std::process::Command;

/// The pages that speak of commands, flags and targets.
const PAGES: [&str; 5] =
    ["README.md", "docs/reference.md", "docs/conformance.md", "docs/benchmarks.md", "docs/testing.md"];

fn pages() -> String {
    PAGES.map(read).concat()
}

fn read(name: &str) -> String {
    std::fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join(name)).expect(name)
}

fn help(subcommand: &str) -> String {
    let output =
        Command::new(env!("CARGO_BIN_EXE_deltapath")).args([subcommand, "--help"]).output().expect("run");
    assert!(output.status.success());
    String::from_utf8(output.stdout).expect("utf-8")
}

/// The words of a text that begin with `prefix`, cut at the first character that no name has.
fn words(text: &str, prefix: &str) -> BTreeSet<String> {
    let name = |rest: &str| -> String {
        rest.chars().take_while(|c| c.is_ascii_alphanumeric() || *c == '-').collect()
    };
    let found = text.split(prefix).skip(1).map(|rest| format!("{prefix}{}", name(rest)));
    let begins_with_a_letter =
        |word: &String| word[prefix.len()..].starts_with(|c: char| c.is_ascii_alphabetic());
    found.filter(begins_with_a_letter).collect()
}

#[test]
fn every_flag_is_in_the_reference_and_every_flag_in_the_pages_is_real() {
    let driver = words(&help("driver"), "--");
    let mut real = driver.clone();
    for command in ["demo", "conformance", "verify", "check"] {
        real.extend(words(&help(command), "--"));
    }
    // Flags of other programs, which the pages mention too.
    let others = ["--help"].map(str::to_owned);
    for flag in words(&pages(), "--") {
        assert!(real.contains(&flag) || others.contains(&flag), "the pages name {flag}, which is not a flag");
    }
    let table: String = read("docs/reference.md").lines().filter(|line| line.starts_with("| `--")).collect();
    for flag in driver.iter().filter(|flag| *flag != "--help") {
        assert!(table.contains(&format!("`{flag}`")), "{flag} is not in the table of flags");
    }
}

#[test]
fn every_target_in_the_pages_exists() {
    let (pages, makefile) = (pages(), read("Makefile"));
    // In code: behind a backtick, or at the begin of a line.
    let mut targets: Vec<&str> = Vec::new();
    for before in ["`make ", "\nmake "] {
        let named = pages.split(before).skip(1);
        targets.extend(
            named.filter_map(|rest| rest.split(|c: char| !c.is_ascii_lowercase() && c != '-').next()),
        );
    }
    assert!(targets.len() > 8, "only {targets:?} are found");
    for target in targets {
        assert!(makefile.contains(&format!("\n{target}:")), "the Makefile has no target {target}");
    }
}

#[test]
fn every_parameter_in_the_reference_is_accepted() {
    use deltapath::driver::{SnapshotParameters, VolumeParameters, parse_tuning};
    let classes = ["| StorageClass |", "| VolumeSnapshotClass |", "| VolumeAttributesClass |"];
    let rows: Vec<Vec<String>> = read("docs/reference.md")
        .lines()
        .filter(|line| classes.iter().any(|class| line.starts_with(class)))
        .map(|line| line.split('|').map(|cell| cell.trim().to_owned()).collect())
        .collect();
    assert_eq!(rows.len(), 6);
    for row in rows {
        let name = row[2].trim_matches('`').to_owned();
        let values: Vec<&str> = row[3].split('`').skip(1).step_by(2).collect();
        assert!(!values.is_empty(), "{name} has no values");
        for value in values {
            let parameters = std::collections::HashMap::from([(name.clone(), value.to_owned())]);
            match row[1].as_str() {
                "VolumeAttributesClass" => drop(parse_tuning(&parameters).expect("a value of the reference")),
                "StorageClass" => {
                    drop(VolumeParameters::parse(&parameters).expect("a value of the reference"))
                }
                _ => drop(SnapshotParameters::parse(&parameters).expect("a value of the reference")),
            }
        }
    }
}
