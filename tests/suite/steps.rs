//! Every change on disk or in the kernel is a step, at which tests can kill the driver or fail it
//! (`crates/files/src/failpoint.rs`). A change that goes another way would never be tested so.

use std::path::{Path, PathBuf};

/// Calls that change something, as the driver's rooms write them.
const CHANGES: [&str; 22] = [
    "fs::rename(",
    "fs::remove_file(",
    "fs::remove_dir(",
    "fs::remove_dir_all(",
    "fs::create_dir(",
    "fs::create_dir_all(",
    "fs::write(",
    "fs::set_permissions(",
    "DirBuilder::new()",
    ".create_new(true)",
    ".create(true)",
    ".set_len(",
    ".sync_all()",
    ".sync_data()",
    ".write_all(",
    ".write_all_at(",
    "punch_hole(&",
    "UnixListener::bind(",
    "umount2(",
    "mknod(",
    "FIFREEZE, 0",
    "FITHAW, 0",
];

/// The rooms that run in the driver's process.
const ROOMS: [&str; 7] =
    ["src/sys", "src/store", "src/pool", "src/driver", "src/csi", "crates/cbt/src", "crates/files/src"];

/// Files of those rooms that need no steps: a command that runs beside no call, and scratch files that have no
/// name and go with the process.
const EXEMPT: [&str; 4] =
    ["src/driver/check.rs", "src/pool/probe.rs", "crates/files/src/pattern.rs", "crates/files/src/ranges.rs"];

/// How many lines a step may begin before its change, and the lines that may stand after it.
const NEAR: (usize, usize) = (4, 2);

/// The changes in a source file that no step is near.
fn unguarded(text: &str) -> Vec<(usize, String)> {
    let code = text.split("#[cfg(test)]").next().unwrap_or_default();
    let lines: Vec<&str> = code.lines().map(|line| line.split("//").next().unwrap_or_default()).collect();
    let is_step = |line: &&str| line.contains("step(") || line.contains("failpoint::pass(");
    let is_change = |line: &str| CHANGES.iter().any(|change| line.contains(change));
    let near =
        |number: usize| lines[number.saturating_sub(NEAR.0)..(number + NEAR.1).min(lines.len())].iter();
    (0..lines.len())
        .filter(|number| is_change(lines[*number]) && !near(*number).any(is_step))
        .map(|number| (number + 1, lines[number].trim().to_owned()))
        .collect()
}

fn sources(dir: &Path, found: &mut Vec<PathBuf>) {
    for entry in std::fs::read_dir(dir).expect("read_dir") {
        let path = entry.expect("entry").path();
        match path.is_dir() {
            true => sources(&path, found),
            // Tests and fuzz targets are in no driver.
            false if path.ends_with("tests.rs") || path.ends_with("fuzz.rs") => {}
            false if path.extension().is_some_and(|end| end == "rs") => found.push(path),
            false => {}
        }
    }
}

#[test]
fn every_change_is_a_step() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut files = Vec::new();
    for room in ROOMS {
        sources(&root.join(room), &mut files);
    }
    assert!(files.len() > 60, "only {} files were found", files.len());
    let exempt = EXEMPT.map(|file| root.join(file));
    for file in files.iter().filter(|file| !exempt.contains(file) && !file.ends_with("failpoint.rs")) {
        let found = unguarded(&std::fs::read_to_string(file).expect("read"));
        assert!(found.is_empty(), "{} changes something outside of a step: {found:?}", file.display());
    }
}

#[test]
fn a_change_outside_of_a_step_is_found() {
    assert_eq!(unguarded("fn f() {\n    fs::rename(a, b)?;\n}\n"), [(2, "fs::rename(a, b)?;".to_owned())]);
    assert_eq!(unguarded("    step(\"rename\", a, || fs::rename(a, b))?;\n"), []);
}
