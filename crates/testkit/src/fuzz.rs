//! Fuzz targets without libFuzzer: each runs on its corpus, `fuzz/corpus/<target>/`, and on mutations of it.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

/// A target, by the name of its corpus and its file in `fuzz/fuzz_targets/`: it panics where something does not hold.
pub type Targets<'t> = &'t [(&'t str, fn(&[u8]))];

pub fn corpora() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/corpus")
}

fn names(dir: &Path) -> BTreeSet<String> {
    crate::names(dir).into_iter().collect()
}

/// The inputs of a corpus, by name.
fn corpus(target: &str) -> Vec<(String, Vec<u8>)> {
    let dir = corpora().join(target);
    names(&dir)
        .into_iter()
        .map(|name| (name.clone(), std::fs::read(dir.join(&name)).expect("read")))
        .collect()
}

/// Runs a target, and says which input it does not bear.
fn check(name: &str, target: fn(&[u8]), input: &str, bytes: &[u8]) {
    let outcome = std::panic::catch_unwind(|| target(bytes));
    assert!(outcome.is_ok(), "target {name}, input {input}: {:?}", bytes.escape_ascii().to_string());
}

/// What libFuzzer would do first: bits, bytes and numbers changed, parts cut out, repeated and taken from another
/// input.
fn mutate(bytes: &mut Vec<u8>, other: &[u8], dice: &mut fastrand::Rng) {
    for _ in 0..=dice.usize(0..4) {
        let length = bytes.len();
        let at = dice.usize(0..length.max(1));
        match dice.usize(0..9) {
            0 | 1 if length > 0 => bytes[at] ^= 1 << dice.usize(0..8),
            2 | 3 if length > 0 => bytes[at] = dice.usize(0..256) as u8,
            4 if length > 8 => {
                let odd = [0, 1, u64::MAX, i64::MAX as u64, u64::from(u32::MAX), 1 << 32];
                let at = dice.usize(0..length - 8);
                bytes[at..at + 8].copy_from_slice(&odd[dice.usize(0..odd.len())].to_le_bytes());
            }
            5 => bytes.truncate(at),
            6 if length > 0 => drop(bytes.drain(at..(at + 1 + dice.usize(0..8)).min(length))),
            7 => {
                let from = dice.usize(0..other.len().max(1));
                let part = &other[from..(from + dice.usize(0..32)).min(other.len())];
                bytes.splice(at..at, part.iter().copied());
            }
            _ => {
                let digits = ["0", "9", "18446744073709551615", "-1", "null", "\"", "..", "/", "%"];
                bytes.splice(at..at, digits[dice.usize(0..digits.len())].bytes());
            }
        }
        bytes.truncate(4096);
    }
}

/// Every target of a crate on its corpus, and on mutations of it: a short run, `make fuzz` is the long one.
/// `DELTAPATH_FUZZ_ROUNDS` asks for another number of rounds than 300 a target. `is_own` tells its targets from other crates'.
pub fn run(targets: Targets<'_>, is_own: impl Fn(&str) -> bool) {
    are_complete(targets, is_own);
    let rounds = std::env::var("DELTAPATH_FUZZ_ROUNDS").ok().and_then(|rounds| rounds.parse().ok());
    for &(name, target) in targets {
        let inputs = corpus(name);
        assert!(inputs.len() >= 3, "{name}: a corpus of {}", inputs.len());
        for (input, bytes) in &inputs {
            check(name, target, input, bytes);
        }
        let mut dice = fastrand::Rng::with_seed(1);
        for round in 0..rounds.unwrap_or(300) {
            let (input, bytes) = &inputs[dice.usize(0..inputs.len())];
            let (_, other) = &inputs[dice.usize(0..inputs.len())];
            let mut bytes = bytes.clone();
            mutate(&mut bytes, other, &mut dice);
            check(name, target, &format!("{input} in round {round}"), &bytes);
        }
    }
}

/// The targets of a crate, their files for libFuzzer and their corpora are the same set.
fn are_complete(targets: Targets<'_>, is_own: impl Fn(&str) -> bool) {
    let own =
        |dir: &Path| -> BTreeSet<String> { names(dir).into_iter().filter(|name| is_own(name)).collect() };
    let home = corpora().join("..");
    let targets: BTreeSet<String> = targets.iter().map(|(name, _)| (*name).to_owned()).collect();
    assert_eq!(own(&home.join("corpus")), targets);
    assert_eq!(own(&home.join("fuzz_targets")), targets.iter().map(|name| format!("{name}.rs")).collect());
    let manifest = std::fs::read_to_string(home.join("Cargo.toml")).expect("the manifest");
    for name in &targets {
        let file =
            std::fs::read_to_string(home.join("fuzz_targets").join(format!("{name}.rs"))).expect("read");
        assert!(file.contains(&format!("run({name:?}, bytes)")), "{name}.rs runs another target");
        assert!(manifest.contains(&format!("name = {name:?}\npath = \"fuzz_targets/{name}.rs\"")), "{name}");
    }
}
