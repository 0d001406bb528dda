//! What the README says is there, is there: flags, parameters, targets, links.

use std::collections::BTreeSet;
use std::path::Path;
use std::process::Command;

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
fn every_flag_is_in_the_readme_and_every_flag_in_the_readme_is_real() {
    let readme = read("README.md");
    let driver = words(&help("driver"), "--");
    let mut real = driver.clone();
    for command in ["demo", "conformance", "verify", "check"] {
        real.extend(words(&help(command), "--"));
    }
    // Flags of cargo and install, which the README mentions too.
    let others = ["--help"].map(str::to_owned);
    for flag in words(&readme, "--") {
        assert!(
            real.contains(&flag) || others.contains(&flag),
            "the README speaks of {flag}, which is no flag"
        );
    }
    let table: String = readme.lines().filter(|line| line.starts_with("| `--")).collect();
    for flag in driver.iter().filter(|flag| *flag != "--help") {
        assert!(table.contains(&format!("`{flag}`")), "{flag} is not in the README's table of flags");
    }
}

#[test]
fn every_target_link_and_command_in_the_readme_exists() {
    let (readme, makefile) = (read("README.md"), read("Makefile"));
    // In code: behind a backtick, or at the begin of a line.
    let mut targets: Vec<&str> = Vec::new();
    for before in ["`make ", "\nmake "] {
        let named = readme.split(before).skip(1);
        targets.extend(
            named.filter_map(|rest| rest.split(|c: char| !c.is_ascii_lowercase() && c != '-').next()),
        );
    }
    assert!(targets.len() > 8, "only {targets:?} are found");
    for target in targets {
        assert!(makefile.contains(&format!("\n{target}:")), "the Makefile has no target {target}");
    }
    let links = readme.split("](").skip(1).filter_map(|rest| rest.split(')').next());
    for link in links.filter(|link| !link.contains("://")) {
        assert!(Path::new(env!("CARGO_MANIFEST_DIR")).join(link).exists(), "the README links to {link}");
    }
}

#[test]
fn every_parameter_in_the_readme_is_taken() {
    use deltapath::driver::{SnapshotParameters, VolumeParameters, parse_tuning};
    let classes = ["| StorageClass |", "| VolumeSnapshotClass |", "| VolumeAttributesClass |"];
    let rows: Vec<Vec<String>> = read("README.md")
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
                "VolumeAttributesClass" => drop(parse_tuning(&parameters).expect("a value of the README")),
                "StorageClass" => drop(VolumeParameters::parse(&parameters).expect("a value of the README")),
                _ => drop(SnapshotParameters::parse(&parameters).expect("a value of the README")),
            }
        }
    }
}
